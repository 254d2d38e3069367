"""Every rule is 1 at the base batch, bounded elsewhere, and silent about what it cannot know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.optim import learning_rate as rules

ALL = [rules.adascale, rules.adam_scale, rules.linear, rules.square_root, rules.none]
READING = [rules.adascale, rules.adam_scale]
moments = st.floats(-1e6, 1e6)
UNKNOWN = GradParams(sqr=float("nan"), var=float("nan"))


def grad(sqr, var):
    return GradParams(sqr=sqr, var=var)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(ALL), moments, moments)
def test_the_base_batch_keeps_its_learning_rate(rule, sqr, var):
    assert float(rule(1.0, grad(sqr, var), 10.0)) == 1.0


@settings(deadline=None, max_examples=100)
@given(st.floats(0.01, 1000.0), moments, moments)
def test_the_gain_lies_between_one_and_the_scale(scale, sqr, var):
    low, high = min(1.0, scale), max(1.0, scale)
    factor = float(rules.adascale(scale, grad(sqr, var), 0.0))
    assert low * (1 - 1e-5) <= factor <= high * (1 + 1e-5)
    np.testing.assert_allclose(
        rules.adam_scale(scale, grad(sqr, var), 0.0), np.sqrt(factor), rtol=1e-5
    )


def test_more_noise_is_more_gain():
    factors = [float(rules.adascale(8.0, grad(1.0, var))) for var in (0.0, 0.1, 1.0, 10.0, 1e9)]
    assert factors == sorted(factors) and factors[0] < 1.001 and factors[-1] > 7.999


def test_small_gradients_are_not_taken_for_noise():
    # An absolute floor of the variance would make these factors differ.
    np.testing.assert_allclose(
        rules.adascale(8.0, grad(1e-8, 1e-9)), rules.adascale(8.0, grad(1.0, 0.1)), rtol=1e-5
    )


@pytest.mark.parametrize("rule", READING)
@pytest.mark.parametrize(
    "known",
    [grad(float("nan"), 1.0), grad(1.0, float("nan")), GradParams(sqr=1.0, var=9.0, known=False)],
)
def test_unknown_noise_never_grows_the_learning_rate(rule, known):
    assert float(rule(16.0, known, 0.0)) == 1.0
    assert float(rule(0.25, known, 0.0)) == float(rule(0.25, grad(0.0, 1.0), 0.0)) < 1


def test_rules_without_noise():
    assert float(rules.linear(9.0, UNKNOWN, 0.0)) == 9.0
    assert float(rules.square_root(9.0, UNKNOWN, 0.0)) == 3.0
    assert float(rules.none(9.0, UNKNOWN, 0.0)) == 1.0


def test_legw_warms_up_longer_for_larger_batches():
    rule = rules.legw(100.0)
    assert float(rule(1.0, UNKNOWN, 0.0)) == 0.0
    np.testing.assert_allclose(rule(4.0, UNKNOWN, 100.0), 2.0 * 0.25, rtol=1e-6)
    assert float(rule(4.0, UNKNOWN, 1e9)) == 2.0
    assert float(rules.legw(0.0)(4.0, UNKNOWN, 0.0)) == 2.0
    with pytest.raises(ValueError, match="warmup_base_steps"):
        rules.legw(-1.0)


def test_rules_trace():
    for rule in [*ALL, rules.legw(3.0)]:
        factor = jax.jit(rule)(jnp.float32(2.0), grad(jnp.float32(1.0), jnp.float32(1.0)), 5.0)
        assert factor.shape == () and bool(jnp.isfinite(factor))


@pytest.mark.parametrize("scale", [0.5, 1.0, 8.0])
def test_the_noise_left_decides_between_the_gain_and_its_root(scale):
    grad = GradParams(sqr=1.0, var=5.0)
    gain = float(rules.adascale(scale, grad))
    assert float(rules.of_noise_share(1.0)(scale, grad, 0.0)) == pytest.approx(gain**0.5)
    assert float(rules.of_noise_share(0.0)(scale, grad, 0.0)) == pytest.approx(gain)
    between = float(rules.of_noise_share(0.1)(scale, grad, 0.0))
    assert min(gain, gain**0.5) <= between <= max(gain, gain**0.5)
