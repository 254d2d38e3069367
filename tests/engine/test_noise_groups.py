"""Whatever a layout can see, it estimates the same noise."""

import engines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.engine.noise_groups import noise_groups
from jaxgoodput.parallel.strategy import Strategy

DIM, SPREAD, STEPS = 2048, 3.0, 150


def inner_product(params, batch, key):
    """The gradient of one sample is the sample itself, so its moments are those of the data."""
    del key
    return batch["x"] @ params["w"]


def engine(strategy, *, preconditioned):
    return engines.make(
        inner_product,
        init=lambda key: {"w": jnp.zeros(DIM)},
        tx=optax.chain(optax.scale_by_adam(b2=0.99), optax.scale(0.0)),
        strategy=strategy,
        sample={"x": jax.ShapeDtypeStruct((DIM,), jnp.float32)},
        preconditioned=preconditioned,
        smoothing=0.97,  # Adam's first updates have no second moment to divide by: forget them
        base=16,
    )


def moments(strategy, *, preconditioned):
    """(|E g|^2, trace of the covariance per base batch) after many batches of 16 samples."""
    one = engine(strategy, preconditioned=preconditioned)
    state, metrics, previous = one.init(jax.random.key(0)), None, None
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = 1.0 + SPREAD * rng.standard_normal((16, DIM)).astype(np.float32)
        state, metrics, previous = one.step(
            state, None, *engines.put(one, {"x": x}), previous=previous
        )
        jax.block_until_ready(metrics)  # too many steps under way are more than XLA:CPU can take
    found = engines.read(one, engines.known(metrics)).noise
    return found.sqr, found.var


STRATEGIES = (
    Strategy(data=8),
    Strategy(fsdp=8),
    Strategy(data=4, fsdp=2),
    Strategy(data=2, fsdp=4),
    Strategy(data=2, fsdp=2, tensor=2),
    Strategy(tensor=8),
)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_every_layout_finds_the_planted_noise(strategy):
    sqr, var = moments(strategy, preconditioned=False)
    np.testing.assert_allclose(var, DIM * SPREAD**2 / 16, rtol=0.03)
    np.testing.assert_allclose(sqr, DIM, rtol=0.1)


def test_copies_and_differences_agree_with_replicas_after_adams_division():
    expected = moments(Strategy(data=8), preconditioned=True)
    kinds = set()
    for strategy in STRATEGIES[1:]:
        kinds.add(noise_groups(strategy, preconditioned=True))
        found = moments(strategy, preconditioned=True)
        np.testing.assert_allclose(found, expected, rtol=0.07, err_msg=strategy.name)
    assert {k.group for k in kinds} == {"copy", "replica"}
    assert {k.needs_two_steps for k in kinds} == {True, False}
