"""A pipeline computes what a scan over its layers does, and hands on nothing but micro-batches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxgoodput.parallel.partition import param_specs
from jaxgoodput.parallel.pipeline import bubble_fraction, pipeline
from jaxgoodput.parallel.strategy import Strategy

LAYERS, BATCH, LENGTH, DIM = 8, 16, 3, 32


def layer(params, x):
    # Without an epsilon: at zero there is no gradient.
    x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))
    return x + jnp.tanh(x @ params["up"] + params["bias"][None, None]) @ params["down"]


@pytest.fixture(scope="module")
def params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (LAYERS, DIM, 64), "bias": (LAYERS, 64), "down": (LAYERS, 64, DIM)}
    return {
        "layers": {
            n: 0.1 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)
        }
    }


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, DIM))


def loss(params, x, num_micro_batches=1, of=layer, num_stages=None):
    y = pipeline(
        of, params["layers"], x, num_micro_batches=num_micro_batches, num_stages=num_stages
    )
    return jnp.sum(jnp.sin(y) * jnp.arange(1.0, BATCH + 1)[:, None, None]), y


def reference(params, x):
    y = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])[0]
    return jnp.sum(jnp.sin(y) * jnp.arange(1.0, BATCH + 1)[:, None, None]), y


@pytest.fixture(scope="module")
def expected(params, x):
    return jax.device_get(jax.jit(jax.grad(reference, argnums=(0, 1), has_aux=True))(params, x))


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4),
        jax.device_get(found),
        expected,
    )


def compiled(strategy, params, x, num_micro_batches, of=layer):
    layout = strategy.on(jax.devices()[: strategy.num_devices])
    shardings = param_specs(layout, params).shardings(params)
    gradient = jax.grad(
        lambda p, x: loss(p, x, num_micro_batches, of), argnums=(0, 1), has_aux=True
    )
    with jax.set_mesh(layout.mesh):
        placed = jax.device_put(params, shardings), jax.device_put(x, layout.batch_sharding)
        return jax.jit(gradient).lower(*placed).compile(), placed


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_values_and_gradients_are_those_of_a_scan(
    params, x, expected, num_stages, num_micro_batches
):
    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    run = jax.jit(gradient, static_argnums=(2, 3, 4))
    close(run(params, x, num_micro_batches, layer, num_stages), expected)


@pytest.mark.parametrize(
    "strategy, num_micro_batches",
    [
        (Strategy(data=2), 4),
        (Strategy(stage=2), 3),
        (Strategy(stage=4), 8),
        (Strategy(data=2, stage=4), 8),
        (Strategy(data=2, stage=4), 16),  # fewer rows than replicas in a micro-batch
        (Strategy(fsdp=2, tensor=2, stage=2), 4),
        (Strategy(expert=2, context=2, stage=2), 2),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_the_same_under_every_strategy(params, x, expected, strategy, num_micro_batches):
    run, placed = compiled(strategy, params, x, num_micro_batches)
    close(run(*placed), expected)


def test_layers_may_be_computed_again_on_the_way_back(params, x, expected):
    run, placed = compiled(Strategy(data=2, stage=4), params, x, 4, jax.checkpoint(layer))
    close(run(*placed), expected)


def test_only_micro_batches_travel_between_stages(params, x):
    layout = Strategy(data=2, stage=4).on(jax.devices())
    shardings = param_specs(layout, params).shardings(params)
    assert {s.spec for s in jax.tree.leaves(shardings)} == {P("stage")}

    def total(params, x):
        return loss(params, x, 8)[0]

    with jax.set_mesh(layout.mesh):
        shaped = param_specs(layout, params).placed(params)
        rows = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.batch_sharding)
        lowered = jax.jit(jax.grad(total), out_shardings=shardings).lower(shaped, rows)
        text = str(lowered.compile().as_text())
    micro_batch = BATCH // 2 // 8 * LENGTH * DIM
    sent = re.findall(r"= \w+\[([\d,]*)\]\S* (collective-permute|all-gather|all-to-all)\(", text)
    assert "collective-permute" in {kind for _, kind in sent}
    assert {kind for _, kind in sent} == {"collective-permute"}, sent
    assert {np.prod([int(n) for n in dims.split(",")]) for dims, _ in sent} == {micro_batch}


def test_a_tree_goes_through_and_comes_out_in_its_order():
    rows = {"x": jnp.zeros((BATCH, 2)), "row": jnp.arange(BATCH)}

    def add(params, tree):
        return {"x": tree["x"] + params * tree["row"][:, None], "row": tree["row"]}

    layout = Strategy(data=2, stage=4).on(jax.devices())
    with jax.set_mesh(layout.mesh):
        run = jax.jit(lambda p, rows: pipeline(add, p, rows, num_micro_batches=4))
        found = run(jnp.arange(8.0), rows)
    np.testing.assert_array_equal(found["row"], np.arange(BATCH))
    np.testing.assert_array_equal(found["x"], 28.0 * np.arange(BATCH)[:, None] * np.ones((1, 2)))


def test_what_does_not_divide_is_refused_with_its_remedy(params, x):
    with pytest.raises(ValueError, match="8 layers cannot be cut into 3 stages.*divides 8"):
        loss(params, x, num_stages=3)
    with pytest.raises(ValueError, match=r"16 rows.*12 micro-batches .num_micro_batches=9.*fewer"):
        loss(params, x, 9, num_stages=4)
    with pytest.raises(ValueError, match="at least 1; got 0. Use 1"):
        loss(params, x, 0)


def test_more_micro_batches_wait_less():
    assert bubble_fraction(1, 5) == 0
    waits = [bubble_fraction(4, m) for m in (1, 2, 4, 8)]
    assert waits == sorted(waits, reverse=True) and waits[0] == 3 / 4
