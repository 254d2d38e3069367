"""Whichever way a loss runs, it estimates the noise that was planted."""

import engines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.parallel.strategy import Strategy

DIM, SPREAD, STEPS = 2048, 3.0, 150
STRATEGIES = (
    Strategy(data=8),
    Strategy(fsdp=8),
    Strategy(data=2, fsdp=2, tensor=2),
    Strategy(tensor=8),
)


def inner_product(params, batch, key):
    """The gradient of one sample is the sample itself, so its moments are those of the data."""
    del key
    return batch["x"] @ params["w"]


def moments(strategy, *, preconditioned, micro_batches=1):
    """(|E g|^2, trace of the covariance per base batch) after many batches of 16 samples."""
    one = engines.make(
        inner_product,
        init=lambda key: {"w": jnp.zeros(DIM)},
        tx=optax.chain(optax.scale_by_adam(b2=0.99), optax.scale(0.0)),
        strategy=strategy,
        sample={"x": jax.ShapeDtypeStruct((DIM,), jnp.float32)},
        preconditioned=preconditioned,
        smoothing=0.97,  # Adam's first updates have no second moment to divide by: forget them
        base=16,
    )
    state, metrics, previous = one.init(jax.random.key(0)), None, None
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = {"x": 1.0 + SPREAD * rng.standard_normal((16, DIM)).astype(np.float32)}
        *some, last = engines.cut(x, micro_batches)
        work = None
        for rows in some:
            work = one.accumulate(work or one.begin(state), *engines.put(one, rows))
        state, metrics, previous = one.step(
            state, work, *engines.put(one, last), previous=previous if work is None else None
        )
        jax.block_until_ready(metrics)  # too many steps under way are more than XLA:CPU can take
    found = engines.read(one, engines.known(metrics))
    return found.noise.sqr, found.noise.var


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_every_layout_finds_the_planted_noise(strategy):
    sqr, var = moments(strategy, preconditioned=False)
    np.testing.assert_allclose(var, DIM * SPREAD**2 / 16, rtol=0.03)
    np.testing.assert_allclose(sqr, DIM, rtol=0.1)


def test_micro_batches_of_a_global_loss_find_it_too():
    sqr, var = moments(Strategy(fsdp=4), preconditioned=False, micro_batches=4)
    np.testing.assert_allclose(var, DIM * SPREAD**2 / 16, rtol=0.03)
    np.testing.assert_allclose(sqr, DIM, rtol=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=lambda s: s.name)
def test_differences_agree_with_replicas_after_adams_division(strategy):
    expected = moments(STRATEGIES[0], preconditioned=True)
    np.testing.assert_allclose(moments(strategy, preconditioned=True), expected, rtol=0.07)
