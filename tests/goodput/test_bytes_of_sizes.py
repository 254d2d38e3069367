"""The largest micro-batch that fits is known from the bytes of a few."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.memory import StepBytes, largest_that_fits, predicted_peak


def linear(state, per_sample):
    """What a step of a size needs where memory grows with the size."""
    return lambda size: StepBytes(arguments=state, outputs=7, temporaries=per_sample * size)


linears = st.builds(linear, st.integers(0, 10**9), st.integers(1, 10**6))
ladders = st.lists(st.integers(1, 4096), min_size=2, max_size=12, unique=True)


@settings(deadline=None)
@given(need=linears, sizes=ladders, budget=st.integers(0, 10**10), data=st.data())
def test_two_known_sizes_predict_every_other_exactly(need, sizes, budget, data):
    known = {s: need(s) for s in data.draw(st.sets(st.sampled_from(sizes), min_size=2))}
    for size in sizes:
        assert predicted_peak(size, known) == pytest.approx(need(size).peak, abs=1)
    best = largest_that_fits(sizes, known, budget)
    assert best in {0, *sizes}
    assert best == 0 or predicted_peak(best, known) <= budget
    assert all(predicted_peak(s, known) > budget for s in sizes if s > best)


@settings(deadline=None)
@given(need=linears, sizes=ladders, low=st.integers(0, 10**10), more=st.integers(0, 10**10))
def test_more_memory_never_fits_less(need, sizes, low, more):
    known = {sizes[0]: need(sizes[0])}
    assert largest_that_fits(sizes, known, low) <= largest_that_fits(sizes, known, low + more)


def test_an_analysis_is_believed_over_a_prediction():
    known = {8: StepBytes(100, 0, 80), 16: StepBytes(100, 0, 160), 32: StepBytes(100, 0, 9000)}
    assert largest_that_fits([8, 16, 32], known, 1000) == 16
    with pytest.raises(ValueError, match="compile one micro-batch size first"):
        largest_that_fits([8], {}, 1000)
