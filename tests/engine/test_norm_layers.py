"""Noise from normalisation layers: the model computes what it did, the noise is that of single samples."""

import engines
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.engine.state import Loss
from jaxgoodput.optim import adaptation
from jaxgoodput.parallel.strategy import Strategy

DIM, LENGTH, BASE = 64, 3, 16
SAMPLE = {"x": jax.ShapeDtypeStruct((LENGTH, DIM), jnp.float32)}


class Block(nn.Module):
    """Of a transformer, without the attention; as the body of a scan over layers."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(2 * DIM)(nn.RMSNorm()(x))
        return x + nn.Dense(DIM)(nn.gelu(nn.LayerNorm()(y))), None


class Model(nn.Module):
    scanned: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            layers = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = layers()(x, None)
        else:
            for _ in range(2):
                x, _ = Block()(x, None)
        return nn.Dense(DIM)(nn.LayerNorm()(x))


def loss_of(model):
    def loss(params, batch, key):
        error = model.apply({"params": params}, batch["x"]) - jnp.roll(batch["x"], 1, axis=1)
        return jnp.mean(error**2, axis=(1, 2))

    return loss


def init_of(model):
    return lambda key: model.init(key, jnp.zeros((2, LENGTH, DIM)))["params"]


def engine_of(model, strategy=None, *, loss=None, from_norm_layers=True, **options):
    return engines.make(
        loss or loss_of(model),
        init=init_of(model),
        strategy=strategy,
        sample=SAMPLE,
        from_norm_layers=from_norm_layers,
        **{"tx": optax.sgd(0.0), "base": BASE, "smoothing": 1 - 1e-6, **options},
    )


def rows(rng, count):
    return {"x": rng.standard_normal((count, LENGTH, DIM)).astype(np.float32)}


def by_definition(model, params, x):
    """[samples, features of all layers] gradients of the layers' scales, whose value is 1 at the start.

    Added up over layers of as many features, which share their factors.
    """
    loss = loss_of(model)
    grads = jax.vmap(
        jax.grad(lambda p, x: jnp.sum(loss(p, {"x": x[None]}, None))), in_axes=(None, 0)
    )(params, x)
    by_features = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if jax.tree_util.keystr(path).endswith("['scale']"):
            summed = np.asarray(leaf, np.float64).reshape(len(leaf), -1, leaf.shape[-1]).sum(1)
            by_features[leaf.shape[-1]] = by_features.get(leaf.shape[-1], 0) + summed
    return np.concatenate(list(by_features.values()), axis=1)


@pytest.mark.nightly
@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (Strategy(), 1),
        (Strategy(), 3),
        (Strategy(fsdp=8), 1),
        (Strategy(data=2, fsdp=2, tensor=2), 2),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_the_sample_is_that_of_single_samples_under_every_layout(rng, strategy, parts, scanned):
    model = Model(scanned)
    engine = engine_of(model, strategy)
    state = engine.init(jax.random.key(0))
    params = engines.host(state.params)
    batch = rows(rng, 24)
    state, metrics = engines.run(engine, state, engines.cut(batch, parts))
    grads = by_definition(model, params, jnp.asarray(batch["x"]))
    count = len(grads)
    small, large = np.mean(np.sum(grads**2, 1)), np.sum(grads.mean(0) ** 2)
    averages = engines.host(adaptation.find(state.opt_state).groups.current)
    np.testing.assert_allclose(
        averages.sqr[-1], (count * large - small) / (count - 1), rtol=1e-3, atol=1e-4 * small
    )
    var = count * (small - large) / (count - 1) / BASE
    np.testing.assert_allclose(averages.var[-1], var, rtol=1e-3)
    assert metrics.num_groups == count


@pytest.mark.nightly
def test_nothing_that_is_trained_changes(rng):
    batches = [rows(rng, 8) for _ in range(3)]
    found = []
    for from_norm_layers in (False, True):
        engine = engine_of(
            Model(), Strategy(fsdp=8), from_norm_layers=from_norm_layers, tx=optax.adam(1e-2)
        )
        state = engine.init(jax.random.key(0))
        for batch in batches:
            state, _ = engines.run(engine, state, [batch])
        found.append((engines.host(state.params), engines.host(state.opt_state.inner)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)


@pytest.mark.nightly
def test_padding_and_weights_count_for_nothing(rng):
    def weighted(params, batch, key):
        losses = loss_of(Model())(params, batch, key)
        return Loss.of(3.0 * losses, 3.0 * jnp.ones_like(losses))

    batch = rows(rng, 6)
    padded = {"x": np.concatenate([batch["x"], batch["x"][:2]])}
    mask = np.array([1.0] * 6 + [0.0] * 2)
    readings = []
    for given, loss in ((batch, None), ((padded, mask), None), (batch, weighted)):
        engine = engine_of(Model(), loss=loss)
        _, metrics = engines.run(engine, engine.init(jax.random.key(0)), [given])
        readings.append([metrics.noise.var, metrics.num_groups])
    np.testing.assert_allclose(readings[1:], readings[:1] * 2, rtol=1e-4)


def test_a_model_without_them_is_named(rng):
    def loss(params, batch, key):
        return jnp.mean((batch["x"] @ params["w"]) ** 2, axis=(1, 2))

    engine = engines.make(
        loss, init=lambda key: {"w": jnp.eye(DIM)}, sample=SAMPLE, from_norm_layers=True
    )
    with pytest.raises(ValueError, match="needs a model with normalisation layers of flax.linen"):
        engines.run(engine, engine.init(jax.random.key(0)), [rows(rng, 8)])


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_layers_that_jax_remembers_are_named(rng, wrap):
    model = Model()
    applied = wrap(
        lambda params, x: model.apply({"params": params}, x)
    )  # outlives a call of the loss

    def loss(params, batch, key):
        return jnp.mean((applied(params, batch["x"]) - batch["x"]) ** 2, axis=(1, 2))

    engine = engine_of(model, loss=loss)
    with pytest.raises(ValueError, match="which JAX does not trace again"):
        engines.run(engine, engine.init(jax.random.key(0)), [rows(rng, 8)])


@pytest.mark.nightly
def test_a_norm_of_something_else_than_samples_is_left_alone(rng):
    class Tabled(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = self.param("table", nn.initializers.normal(1.0), (8, LENGTH, DIM))
            bias = nn.LayerNorm(name="of_table")(table).mean(0, keepdims=True)
            return nn.Dense(DIM)(nn.LayerNorm()(x) + bias)

    model = Tabled()
    for parts in (1, 2):
        engine = engine_of(model)
        state = engine.init(jax.random.key(0))
        _, metrics = engines.run(engine, state, engines.cut(rows(rng, 8), parts))
        assert metrics.num_groups == 8 and metrics.noise.var > 0
