"""A gradient that explodes lowers the gain at once; one that only varies does not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from jaxgoodput.optim import adaptation
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptive import GAIN_GROWTH, adaptive
from jaxgoodput.optim.gain_growth import FALL, HOLD, GainGrowth

NOISES = {
    "normal": lambda rng, n: np.exp(0.2 * rng.standard_normal(n)),
    "long tails": lambda rng, n: 1 + 0.1 * np.abs(rng.standard_t(6, n)),
    "chi": lambda rng, n: np.sqrt(rng.chisquare(4, n) / 4),
    "none": lambda rng, n: np.ones(n),
}
CURVES = {
    "flat": lambda x: np.ones_like(x),
    "falling": lambda x: 3 / (1 + x / 100),
    "rising slowly": lambda x: 1 + x / 1000,
}
LENGTH = 1500
BASE_STEPS = 1000


@jax.jit
def followed(norms, wanted, scales, start):
    """The gain of each update, and whether its gradient explodes, from `start` base steps on."""

    def step(carry, given):
        growth, gain, progress = carry
        norm, scale = given
        gain = jnp.minimum(jnp.minimum(wanted, scale), growth.limit(gain, GAIN_GROWTH))
        progress += gain
        growth = growth.after(norm, gain, scale, gain, progress)
        return (growth, gain, progress), (gain, growth.explodes)

    one = jnp.float32(1)
    return jax.lax.scan(step, (GainGrowth.first(), one, start * one), (norms, scales))[1]


@jax.jit
def limits(norms, wanted, power, scales, start):
    """Of each update: its factor, and what it may be worth. With `wanted` its worth is a power of that."""

    def step(carry, given):
        growth, factor, progress = carry
        norm, scale = given
        factor = jnp.minimum(jnp.where(scale > 1, wanted, 1), growth.limit(factor, GAIN_GROWTH))
        worth = jnp.where(scale > 1, wanted ** (power - 1), 1) * factor
        progress += worth
        growth = growth.after(norm, factor, scale, worth, progress)
        return (growth, factor, progress), (factor, worth, growth.most_worth, progress)

    one = jnp.float32(1)
    return jax.lax.scan(step, (GainGrowth.first(), one, start * one), (norms, scales))[1]


def gains(norms, wanted=8.0, scales: Any = 64.0, start=0.0):
    norms = jnp.asarray(norms, jnp.float32)
    scales = jnp.broadcast_to(jnp.asarray(scales, jnp.float32), norms.shape)
    return [np.asarray(x) for x in followed(norms, wanted, scales, start)]


@settings(max_examples=60, deadline=None)
@given(
    noise=st.sampled_from(sorted(NOISES)),
    curve=st.sampled_from(sorted(CURVES)),
    size=st.floats(1e-6, 1e6),
    seed=st.integers(0, 2**16),
)
def test_norms_that_only_vary_leave_the_gain_alone(noise, curve, size, seed):
    rng = np.random.default_rng(seed)
    norms = size * CURVES[curve](np.arange(LENGTH)) * NOISES[noise](rng, LENGTH)
    found, explodes = gains(norms)
    assert not explodes.any()
    assert np.all(np.diff(found) >= 0) and found[-1] == 8.0


@settings(max_examples=60, deadline=None)
@given(
    noise=st.sampled_from(["normal", "long tails", "none"]),
    at=st.integers(100, LENGTH - 200),
    faster=st.floats(1.05, 3.0),
    seed=st.integers(0, 2**16),
    wanted=st.floats(1.5, 64),
    start=st.sampled_from([0.0, 1e3, 1e6]),
)
def test_an_explosion_ends_the_gain_before_the_norm_is_ten_times_as_large(
    noise, at, faster, seed, wanted, start
):
    """However fast it grows, up to three times per update, and whatever the gradients' noise."""
    rng = np.random.default_rng(seed)
    norms = NOISES[noise](rng, LENGTH)
    usual = norms[:at].mean()
    norms[at:] *= faster ** np.minimum(np.arange(1, LENGTH - at + 1), 14 / np.log(faster))
    found, explodes = gains(norms, wanted, start=start)
    assert not explodes[:at].any()
    first = int(np.argmax(explodes))
    assert explodes[first] and norms[first - 1] < 10 * usual
    assert found[first + 1] == 1.0


def test_after_it_the_gain_grows_quickly_to_half_and_slowly_beyond():
    norms = np.ones(4000)
    norms[1000] = 10.0
    found, explodes = gains(norms, start=1e4)
    assert explodes.sum() == 1 and found[1000] == 8.0 and found[1001] == 1.0
    held = 1001 + HOLD
    assert np.all(found[1001:held] == 1.0) and found[held] > 1.0
    half = held + int(np.argmax(found[held:] >= FALL * 8))
    assert half - held <= np.log(4) / np.log(GAIN_GROWTH) + 2
    progress = 1e4 + np.cumsum(found)
    again = half + int(np.argmax(found[half:] >= 0.75 * 8))
    assert again > half and progress[again] > 1.4 * progress[half]


@settings(max_examples=40, deadline=None)
@given(
    start=st.floats(1e3, 1e5),
    wanted=st.floats(2.5, 16.0),
    power=st.sampled_from([1.0, 2.0]),
    stays=st.booleans(),
)
def test_after_it_a_limit_is_reported_that_holds_and_is_gone_once_progress_has_doubled(
    start, wanted, power, stays
):
    """For rules whose factor is the worth of an update, as SGD's, and for its root, as Adam's."""
    norms, scales = np.ones(8000, np.float32), np.full(8000, 64.0, np.float32)
    norms[1000] = 10.0
    if not stays:
        scales[1001:7000] = 1.0  # the base batch meanwhile: the limit grows all the same
    found = limits(norms, wanted, power, scales, np.float32(start))
    factor, worth, most, progress = map(np.asarray, found)
    assert not most[:1000].any() and factor[1000] > 1.5
    holds = np.flatnonzero(most)
    first = 1000 + HOLD if stays else 1001  # a smaller batch has other norms
    assert list(holds) == list(range(first, holds[-1] + 1)), "one stretch"
    grown = most[holds[0]] / max(worth[1000] / 2, 1)
    assert grown == pytest.approx(progress[holds[0]] / progress[1000], rel=1e-3)
    assert np.all(factor[holds[1:]] <= 1.001 * factor[1000])
    least = 1.001 * np.where(scales[holds[1:]] > 1, wanted ** (power - 1), 1)
    assert np.all(worth[holds[1:]] <= np.maximum(1.002 * most[holds[:-1]], least))
    if holds[-1] < 7999:
        assert progress[holds[-1]] / progress[1000] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("progress", [1e4, 1e8, 1e12])
def test_the_limit_grows_in_runs_of_any_length(progress):
    """One update is worth less than the last digit of the progress."""
    one, growth = jnp.float32(8), GainGrowth.first()
    for norm in [1.0] * 20 + [10.0] + [1.0] * HOLD:
        growth = growth.after(norm, one, 64 * one, one, jnp.float32(progress))
    assert float(growth.most_worth) == pytest.approx(4)
    later = growth.after(1.0, one / 4, 64 * one, one / 4, jnp.float32(1.5 * progress))
    assert float(later.most_worth) == pytest.approx(6)
    last = later.after(1.0, one / 4, 64 * one, one / 4, jnp.float32(2.001 * progress))
    assert float(last.most_worth) == 0 and float(last.borne) > 8


@settings(max_examples=40, deadline=None)
@given(
    noise=st.sampled_from(["normal", "chi", "none"]),
    times=st.floats(4.0, 8.0),
    at=st.integers(200, 600),
    seed=st.integers(0, 2**16),
    start=st.sampled_from([0.0, 1e3, 1e6]),
)
def test_noise_that_has_grown_leaves_no_limit(noise, times, at, seed, start):
    """As when the noise jumps forty-fold. The gain is back where it was after some tens of updates."""
    rng = np.random.default_rng(seed)
    norms = NOISES[noise](rng, LENGTH)
    norms[at:] *= times
    found, explodes = gains(norms, start=start)
    (first,) = np.flatnonzero(explodes)
    assert at <= first < at + 20
    grown = int(np.ceil(np.log(found[first]) / np.log(GAIN_GROWTH)))
    back = first + HOLD + grown + 40  # it does not grow while a norm is large
    assert found[back] >= 0.9 * found[first]
    if start < 1e6:
        assert found[-1] == 8.0


@settings(max_examples=20, deadline=None)
@given(start=st.floats(1.0, 1e6))
def test_growth_takes_a_share_of_the_progress_but_not_where_the_gain_has_been(start):
    found, _ = gains(np.ones(2000), wanted=4.0, start=start)
    num = int(np.argmax(found >= 4.0)) + 1 if (found >= 4.0).any() else len(found)
    progress = start + found[:num].sum()
    assert num >= np.log(4) / np.log(GAIN_GROWTH) - 1
    if num < 1900:
        assert progress < 1.1 * start + 150
        scales = np.full(2000, 64.0)
        scales[num : num + 50] = 1.0
        again, _ = gains(np.ones(2000), wanted=4.0, scales=scales, start=start)
        assert again[num] == 1.0 and again[num + 50 + 30] == 4.0


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_ends_the_gain_and_leaves_no_trace(odd):
    norms = np.ones(400)
    norms[0] = norms[100] = odd
    found, explodes = gains(norms)
    assert set(np.flatnonzero(explodes)) == {0, 100}
    assert found[100] == 8.0 and found[101] == 1.0 and found[-1] == 8.0


def test_gradients_that_were_zero_at_first_do_not_explode():
    norms = np.concatenate([np.zeros(50), np.ones(1000)])
    assert not gains(norms)[1].any()


def test_no_limit_is_no_limit():
    growth = GainGrowth.first().after(
        1.0, jnp.float32(4), jnp.float32(8), jnp.float32(1), jnp.float32(1e9)
    )
    assert float(growth.limit(jnp.float32(4), float("inf"))) == float("inf")


def test_at_a_gain_of_one_nothing_happens():
    norms = np.concatenate([np.ones(100), 1e6 * np.ones(100)])
    assert not gains(norms, wanted=1.0)[1].any()


def test_a_smaller_batch_has_larger_gradients():
    norms = np.concatenate([np.ones(100), 5 * np.ones(100)])
    scales = np.concatenate([np.full(100, 16.0), np.full(100, 4.0)])
    assert not gains(norms, scales=scales)[1].any()
    assert gains(norms, scales=np.full(200, 16.0))[1].any()


@functools.cache
def training(momentum):
    """The initial parameters and state, and a jitted function that trains quadratic losses at a rate of 1."""
    tx = adaptive(optax.sgd(1.0, momentum=momentum), rules.linear, base_batch_size=1)
    params = jnp.ones(8)

    def step(curvature, noise, carry, given):
        (params, state), (key, size) = carry, given
        loss = 0.5 * jnp.sum(curvature * params**2)
        grads = curvature * params + noise * jax.random.normal(key, (8,)) / jnp.sqrt(size)
        updates, state = tx.update(grads, state, params, global_batch_size=size)
        return (optax.apply_updates(params, updates), state), loss

    @jax.jit
    def train(curvature, noise, carry, keys, sizes):
        return jax.lax.scan(functools.partial(step, curvature, noise), carry, (keys, sizes))

    return (params, tx.init(params)), train


def descent(share, noise, momentum, scale, seed):
    """Losses of updates at the base batch and 1,000 at `scale` times it, and the state at the end.

    The rate at the base batch is a `share` of the largest one that such losses bear.
    """
    curvature = share * 2 * (1 + (momentum or 0)) * jnp.linspace(0.05, 1.0, 8)
    carry, train = training(momentum)
    sizes = jnp.concatenate([jnp.ones(BASE_STEPS), jnp.full(1000, float(scale))])
    keys = jax.random.split(jax.random.key(seed), BASE_STEPS + 1000)
    (_, state), losses = train(curvature, jnp.float32(noise), carry, keys, sizes)
    return np.asarray(losses[:BASE_STEPS]), np.asarray(losses[BASE_STEPS:]), state


@settings(max_examples=25, deadline=None)
@given(
    share=st.floats(0.2, 0.7),
    noise=st.floats(0.01, 0.3),
    momentum=st.sampled_from([None, 0.9]),
    scale=st.sampled_from([4, 16, 64]),
    seed=st.integers(0, 2**16),
)
def test_a_rate_that_is_not_borne_destroys_nothing(share, noise, momentum, scale, seed):
    """Whatever the noise says."""
    before, after, state = descent(share, noise, momentum, scale, seed)
    usual = float(np.mean(before[100:]))
    event(f"exploded: {float(adaptation.find(state).growth.exploded) > 0}")
    assert np.max(after) < 1e5 * usual
    assert np.median(after[-100:]) < 20 * usual


def test_it_would_be_destroyed_without(monkeypatch):
    monkeypatch.setattr(GainGrowth, "limit", lambda self, gain, most: jnp.maximum(gain, 1) * most)
    training.cache_clear()
    before, after, _ = descent(0.75, 0.1, None, 16, 0)
    training.cache_clear()
    assert not np.median(after[-100:]) < 1e3 * before[100:].mean()
