"""A loss that leaps lowers the gain at once; a loss that only varies does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxgoodput.optim import adaptation
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.optim.ceiling import NONE, GainCeiling

NOISES = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "skewed": lambda rng, n: rng.lognormal(0, 0.8, n),
    "long tails": lambda rng, n: rng.standard_t(3, n),
    "rare spikes": lambda rng, n: rng.standard_normal(n) + 100 * (rng.random(n) < 0.01),
    "none": lambda rng, n: np.zeros(n),
}
CURVES = {
    "flat": lambda x: np.ones_like(x),
    "falling": lambda x: 3 / (1 + x / 100),
    "rising slowly": lambda x: 1 + x / 5000,
    "negative": lambda x: -np.log1p(x),
}
LENGTH = 1500


@jax.jit
def gains(losses, wanted):
    """The gain after each of the losses."""

    def step(ceiling, loss):
        ceiling = ceiling.after(loss, jnp.minimum(wanted, ceiling.gain))
        return ceiling, ceiling.gain

    return jax.lax.scan(step, GainCeiling.none(), losses)[1]


@settings(max_examples=60, deadline=None)
@given(
    noise=st.sampled_from(sorted(NOISES)),
    curve=st.sampled_from(sorted(CURVES)),
    size=st.floats(0.01, 0.5),
    seed=st.integers(0, 2**16),
)
def test_losses_that_only_vary_leave_the_gain_alone(noise, curve, size, seed):
    rng = np.random.default_rng(seed)
    losses = CURVES[curve](np.arange(LENGTH)) + size * NOISES[noise](rng, LENGTH)
    assert float(gains(jnp.asarray(losses, jnp.float32), 8.0).min()) == NONE


@settings(max_examples=60, deadline=None)
@given(
    noise=st.sampled_from(["normal", "long tails", "none"]),
    at=st.integers(100, LENGTH - 100),
    leap=st.floats(20, 1e4),
    size=st.floats(0.01, 0.3),
    seed=st.integers(0, 2**16),
    wanted=st.floats(1.5, 64),
)
def test_a_leap_lowers_the_gain_to_one_within_tens_of_updates(noise, at, leap, size, seed, wanted):
    rng = np.random.default_rng(seed)
    losses = 1 + size * NOISES[noise](rng, LENGTH)
    losses[at:] += leap * max(size, 0.1)
    found = np.asarray(gains(jnp.asarray(losses, jnp.float32), wanted))
    assert found[at - 1] == NONE
    assert found[at : at + 30].min() == 1.0


def test_at_a_gain_of_one_nothing_happens():
    losses = jnp.concatenate([jnp.ones(100), 1e6 * jnp.ones(100)])
    assert float(gains(losses, 1.0).min()) == NONE


def descent(rate, noise, momentum, scale, num, *, told, seed=0):
    """Losses of `num` updates at `scale` times the base batch, after 100 at the base."""
    curvature = jnp.linspace(0.05, 1.0, 8)
    tx = adaptive(optax.sgd(rate, momentum=momentum), rules.linear, base_batch_size=1)
    params = jnp.ones(8)

    @jax.jit
    def train(params, state, keys, size):
        def step(carry, key):
            params, state = carry
            loss = 0.5 * jnp.sum(curvature * params**2)
            grads = curvature * params + noise * jax.random.normal(key, (8,)) / jnp.sqrt(size)
            said = {"value": loss} if told else {}
            updates, state = tx.update(grads, state, params, global_batch_size=size, **said)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, state), keys)

    keys = jax.random.split(jax.random.key(seed), 100 + num)
    carry, first = train(params, tx.init(params), keys[:100], jnp.float32(1))
    (_, state), then = train(*carry, keys[100:], jnp.float32(scale))
    return np.asarray(first), np.asarray(then), state


@settings(max_examples=25, deadline=None)
@given(
    share=st.floats(0.3, 0.9),
    noise=st.floats(0.01, 0.3),
    momentum=st.sampled_from([None, 0.9]),
    scale=st.sampled_from([4, 16, 64]),
    seed=st.integers(0, 2**16),
)
def test_a_rate_that_is_not_borne_destroys_nothing(share, noise, momentum, scale, seed):
    """Quadratic losses bear a rate of 2 / curvature (1 + momentum), whatever the noise says."""
    rate = share * 2 * (1 + (momentum or 0))
    args = rate, noise, momentum, scale, 400
    before, after, state = descent(*args, told=True, seed=seed)
    usual = float(np.mean(before[50:]))
    assert np.median(after[-100:]) < 20 * usual, (usual, after[-100:])
    assert float(adaptation.gain(state).max()) < scale
    _, untold, _ = descent(*args, told=False, seed=seed)
    event(f"lost without it: {not np.median(untold[-100:]) < 1e3 * usual}")


def test_it_would_be_destroyed_without():
    before, after, _ = descent(1.5, 0.1, None, 16, 400, told=False)
    assert not np.median(after[-100:]) < 1e3 * before[50:].mean()


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_says_nothing_of_the_gain(loss):
    found = gains(jnp.asarray([1.0] * 50 + [loss]), 4.0)
    assert float(found[-1]) == NONE or loss == float("inf")
