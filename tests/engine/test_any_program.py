"""Programs of every shape under FSDP: the same gradients, and never the whole model at once."""

import engines
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.spmd import with_logical_constraint
from jax.sharding import PartitionSpec

import jaxgoodput as jg
from jaxgoodput.parallel.strategy import REPLICA_AXES, Strategy

DIM, WIDE, LAYERS = 64, 128, 4
SAMPLE = {"x": jax.ShapeDtypeStruct((3, DIM), jnp.float32)}


def stacked(key):
    k = jax.random.split(key, 3)
    return {
        "up": {"kernel": jax.random.normal(k[0], (LAYERS, DIM, WIDE)) * 0.1},
        "down": {"kernel": jax.random.normal(k[1], (LAYERS, WIDE, DIM)) * 0.1},
        "head": jax.random.normal(k[2], (DIM, DIM)) * 0.1,
        "scale": jnp.ones(DIM),
    }


def block(x, layer):
    return x + jnp.tanh(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]


def layers_of(params):
    return {name: params[name] for name in ("up", "down")}


def mean_square(x):
    return jnp.mean(x**2, axis=(-1, -2))


def scanned(params, batch, key):
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), batch["x"], layers_of(params))
    return mean_square(x @ params["head"] * params["scale"][None, None])


def scanned_with_checkpoint(params, batch, key):
    body = jax.checkpoint(lambda x, p: (block(x, p), jnp.sum(p["up"]["kernel"])))
    x, sums = jax.lax.scan(body, batch["x"], layers_of(params), unroll=2)
    return mean_square(x @ params["head"]) + jnp.sum(sums)


def cast_and_scanned_backwards(params, batch, key):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), layers_of(params))
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), batch["x"], half, reverse=True)
    return mean_square(x)


def in_a_loop(params, batch, key):
    x = batch["x"]
    for i in range(LAYERS):
        x = jax.checkpoint(block)(x, jax.tree.map(lambda p, i=i: p[i], layers_of(params)))
    return mean_square(x)


def used_twice(params, batch, key):
    """Tied weights."""
    x = batch["x"] @ params["head"]
    return mean_square(jnp.tanh(x) @ params["head"].T)


def joined_and_turned(params, batch, key):
    """Parameters put together, turned and scaled before they compute with anything."""
    both = jnp.concatenate([params["head"], 2.0 * params["head"].T], axis=1)
    wide = params["up"]["kernel"][1]
    return mean_square(batch["x"] @ both @ wide.reshape(2 * DIM, DIM))


def under_branches(params, batch, key):
    x = jax.lax.cond(
        jnp.sum(batch["x"]) > 0,
        lambda x, w: x @ w,
        lambda x, w: jnp.sin(x) @ w.T,
        batch["x"],
        params["head"],
    )
    x = jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ params["head"]), x)
    return mean_square(jax.jit(block)(x, jax.tree.map(lambda p: p[0], layers_of(params))))


def passed_on(params, batch, key):
    """Used for nothing but themselves: a penalty."""
    penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    return mean_square(batch["x"] * params["scale"][None, None]) + penalty


LOSSES = (
    scanned,
    scanned_with_checkpoint,
    cast_and_scanned_backwards,
    in_a_loop,
    used_twice,
    joined_and_turned,
    under_branches,
    passed_on,
)


def after_two_steps(strategy, loss, init=stacked, **problem):
    engine = engines.make(
        loss,
        init=init,
        tx=optax.adam(1e-2),
        strategy=strategy,
        sample=SAMPLE,
        preconditioned=False,
        **problem,
    )
    state, metrics = engine.init(jax.random.key(0)), None
    rng = np.random.default_rng(0)
    for _ in range(2):
        rows = {"x": rng.standard_normal((8, 3, DIM)).astype(np.float32)}
        state, metrics = engines.run(engine, state, [rows])
    return engines.host(state.params), metrics


def assert_alike(found, expected, tolerance=2e-5):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found[0]), jax.tree.leaves(expected[0]), strict=True
    ):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), path
    one, other = found[1], expected[1]
    np.testing.assert_allclose([one.loss, one.grad_norm], [other.loss, other.grad_norm], rtol=2e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_any_program_has_the_gradients_of_whole_parameters(loss):
    expected = after_two_steps(Strategy(), loss)
    # Whether a detour over bfloat16 is taken at all is up to the compiler.
    tolerance = 1e-2 if loss is cast_and_scanned_backwards else 2e-5
    assert_alike(after_two_steps(Strategy(fsdp=8), loss), expected, tolerance)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [scanned_with_checkpoint, used_twice], ids=lambda f: f.__name__)
def test_the_same_with_tensor_parallelism_and_frozen_leaves(loss):
    def trainable(params):
        return {**jax.tree.map(lambda _: True, params), "down": {"kernel": False}}

    expected = after_two_steps(Strategy(), loss, trainable=trainable)
    found = after_two_steps(Strategy(data=2, fsdp=2, tensor=2), loss, trainable=trainable)
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        assert np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(b)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(WIDE, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(DIM, name="down")(nn.gelu(y)), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return layers()(x, None)[0]


@pytest.mark.nightly
def test_a_scanned_linen_module():
    model = jg.from_linen(Stack())

    def loss_and_state(params, model_state, batch, key):
        out, model_state = model.train(params, model_state, key, batch["x"])
        return mean_square(out), model_state

    def init(key):
        return model.init(key, jnp.zeros((1, 3, DIM)))

    kind = {"init": init, "loss_and_state": loss_and_state}
    expected = after_two_steps(Strategy(), None, **kind)
    assert_alike(after_two_steps(Strategy(fsdp=8), None, **kind), expected)


class Constrained(nn.Module):
    """Says with names of the mesh, and with logical ones, how its activations are cut."""

    @nn.compact
    def __call__(self, x):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(REPLICA_AXES))
        inner = with_logical_constraint(nn.Dense(WIDE, name="up")(x), ("batch", None, "mlp"))
        return nn.Dense(DIM, name="down")(nn.gelu(inner))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy", [Strategy(data=8), Strategy(fsdp=4, tensor=2)], ids=lambda s: s.name
)
def test_a_module_with_constraints_is_initialised_by_calling_it(strategy):
    """Flax runs the whole module to make its parameters, constraints and all, here with one row."""
    kind = {
        "init": lambda key: Constrained().init(key, jnp.zeros((1, 3, DIM)))["params"],
        "loss": lambda params, batch, key: mean_square(
            Constrained().apply({"params": params}, batch["x"])
        ),
    }
    expected = after_two_steps(Strategy(), **kind)
    assert_alike(after_two_steps(strategy, **kind), expected)
