"""The interval of the noise scale: how often it holds, what it ignores, and what makes it narrower."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput import intervals
from jaxgoodput.goodput.efficiency import GradGroups, noise_scale
from jaxgoodput.goodput.intervals import noise_interval
from jaxgoodput.optim import noise

BASE = 32
NUM_RUNS = 200  # the share of runs has a standard error of 3 %
seeds = st.integers(0, 10**6)
numbers_of_groups = st.sampled_from([1, 2, 10])


def share_inside(sqr, var, measured, error, average, **options):
    """The share of runs, `[runs, groups]`, in which the interval holds the noise scale of `sqr` and `var`."""
    inside = []
    for truth, of_run, deviation in zip(sqr, measured, error, strict=True):
        stated = noise_interval(of_run, var, deviation, 0.0, BASE, **options)
        exact = float(noise_scale(GradGroups(sqr=truth, var=var), BASE))
        inside.append(stated.lower <= exact <= stated.upper)
    return np.mean(inside)


def planted(rng, num_groups, error, fluctuation):
    """Signals drawn as the module says, `[runs, groups]`; their measured averages and standard errors."""
    var = np.exp(rng.normal(size=num_groups))
    level = rng.uniform(*np.log(intervals.LEVELS), size=(NUM_RUNS, 1))
    scatter = intervals.GROUP_SPREAD * rng.normal(size=(NUM_RUNS, num_groups))
    average = var * np.exp(level + scatter)
    errors = np.broadcast_to(error * var, average.shape)
    measured = average + errors * rng.normal(size=average.shape)
    state = fluctuation * rng.normal(size=(NUM_RUNS, 1)) - fluctuation**2 / 2
    return average * np.exp(state), var, measured, errors, average


@settings(deadline=None, max_examples=8)
@given(
    seeds,
    numbers_of_groups,
    st.sampled_from([1e-4, 1e-2, 0.1, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_it_holds_in_four_of_five_runs_however_far_signals_lie_below_their_error(
    seed, num_groups, error, fluctuation
):
    runs = planted(np.random.default_rng(seed), num_groups, error, fluctuation)
    assert 0.7 <= share_inside(*runs, fluctuation=fluctuation) <= 0.9


@settings(deadline=None, max_examples=8)
@given(seeds, st.sampled_from([1, 5, 20]), st.floats(0.05, 0.3), st.floats(-7.0, 1.0))
def test_it_holds_in_four_of_five_runs_with_one_truth_that_was_measured_well(
    seed, num_groups, error, level
):
    """What is believed beforehand is then of no weight."""
    rng = np.random.default_rng(seed)
    var = np.exp(rng.normal(size=num_groups))
    sqr = np.broadcast_to(var * np.exp(level + rng.normal(size=num_groups)), (NUM_RUNS, num_groups))
    measured = sqr * (1 + error * rng.normal(size=sqr.shape))
    found = share_inside(sqr, var, measured, error * sqr, sqr, fluctuation=0.0)
    assert 0.7 <= found <= 0.9


moments = st.lists(
    st.tuples(st.floats(-1.0, 10.0), st.floats(1e-3, 10.0), st.floats(1e-3, 3.0)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=30)
@given(moments, st.floats(-20.0, 20.0))
def test_units_of_the_loss_do_not_matter(groups, exponent):
    sqr, var, error = np.array(groups).T
    stated = noise_interval(sqr, var, error, 0.1, BASE)
    unit = 10.0**exponent
    other = noise_interval(unit * sqr, unit * var, unit * error, 0.1, BASE)
    np.testing.assert_allclose(dataclasses.astuple(stated), dataclasses.astuple(other), rtol=1e-6)


@settings(deadline=None, max_examples=30)
@given(moments)
def test_more_estimates_make_it_narrower(groups):
    """Four times as many make each error half as large."""
    sqr, var, error = np.array(groups).T
    sqr = np.maximum(sqr, 0.1 * var)  # a signal that can be found at all

    def width(error):
        stated = noise_interval(sqr, var, error, 0.0, BASE)
        assert 0 < stated.lower <= stated.middle <= stated.upper < np.inf
        return np.log(stated.upper / stated.lower)

    widths = [width(error * 4.0**-i) for i in range(5)]
    assert widths[-1] <= widths[0] + 0.2  # a few dozen draws
    np.testing.assert_allclose(width(1e-6 * var), 2 * 1.2816 * intervals.FLUCTUATION, rtol=0.1)


@settings(deadline=None, max_examples=30)
@given(moments, st.floats(0.0, 1e9))
def test_a_noise_that_is_hardly_measured_has_a_wide_interval(groups, var_error):
    """The error of its sum may be many times the sum, if that is almost 0."""
    sqr, var, error = np.array(groups).T
    stated = noise_interval(sqr, var, error, var_error, BASE)
    assert 0 < stated.lower <= stated.middle <= stated.upper < np.inf
    if var_error > 5:
        assert stated.upper > 1e4 * stated.lower


def test_without_noise_the_noise_scale_is_zero_and_a_silent_group_does_no_harm():
    stated = noise_interval(np.ones(2), np.zeros(2), np.zeros(2), 0.0, BASE)
    assert dataclasses.astuple(stated) == (0.0, 0.0, 0.0) and stated.is_known
    one = noise_interval(np.array([1.0]), np.array([4.0]), np.array([0.01]), 0.0, BASE)
    two = noise_interval(
        np.array([1.0, 0.0]), np.array([4.0, 0.0]), np.array([0.01, 0.0]), 0.0, BASE
    )
    np.testing.assert_allclose(dataclasses.astuple(one), dataclasses.astuple(two), rtol=0.05)


def states_of(rng, sqr, var, num_estimates, fluctuation, drift):
    """Noise statistics of runs with Gaussian gradients, and signals of their last states, `[runs, groups]`.

    The signal of a state is `sqr` times a factor common to all groups, which differs from state to state by
    `fluctuation`, and grows by exp(-drift) over the run. Each group has 50 parameters.
    """
    size, groups = 50, len(sqr)
    last = fluctuation * rng.normal(size=(NUM_RUNS, num_estimates)) - fluctuation**2 / 2
    factors = np.exp(last - drift * np.linspace(0, 1, num_estimates))
    halves = (
        rng.normal(size=(NUM_RUNS, num_estimates, 2, groups, size))
        * np.sqrt(2 * var / size)[:, None]
    )
    halves[..., 0] += np.sqrt(factors[..., None] * sqr)[:, :, None, :]
    small = np.square(halves).sum(-1).mean(2)
    large = np.square(halves.mean(2)).sum(-1)

    def run(small, large):
        def take(state, norms):
            sample = noise.NoiseSample(
                small_sqr=norms[0],
                large_sqr=norms[1],
                num_groups=jnp.asarray(2),
                num_samples=jnp.asarray(BASE),
            )
            return noise.update_noise(state, sample, base_batch_size=BASE), None

        return jax.lax.scan(take, noise.init_noise(groups), (small, large))[0]

    states = jax.vmap(run)(jnp.asarray(small, jnp.float32), jnp.asarray(large, jnp.float32))
    return states, factors[:, -1:] * sqr


@pytest.mark.parametrize("drift", [0.0, 0.3])
@pytest.mark.parametrize("ratio", [0.02, 0.2, 2.0])
@pytest.mark.parametrize("num_groups", [1, 5])
def test_after_two_hundred_estimates_it_holds_the_noise_scale_of_the_last_state(
    num_groups, ratio, drift
):
    rng = np.random.default_rng(0)
    var = np.exp(rng.normal(size=num_groups))
    sqr = ratio * var * np.exp(0.5 * rng.normal(size=num_groups))
    states, truths = states_of(rng, sqr, var, 200, intervals.FLUCTUATION, drift)
    measured = jax.device_get(jax.vmap(noise.measured_groups)(states))
    averages = np.asarray(states.current.var[:, :-1])
    inside, widths = [], []
    for i, truth in enumerate(truths):
        stated = noise_interval(
            measured.sqr[i], averages[i], measured.sqr_error[i], float(measured.var_error[i]), BASE
        )
        exact = float(noise_scale(GradGroups(sqr=truth, var=var), BASE))
        inside.append(stated.lower <= exact <= stated.upper)
        widths.append(stated.upper / stated.lower)
    assert 0.7 <= np.mean(inside) <= 0.9
    if ratio >= 0.2:  # a signal above its error
        assert np.median(widths) < 4.5
