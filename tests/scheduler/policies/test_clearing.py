"""Clearing prices: nobody can do better at them, and together the jobs want about what there is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.scheduler.policies.clearing import clearing_prices

SIZES = np.array([1, 2, 4, 8, 16])


def jobs_of(exponents):
    return SIZES[None, :].astype(float) ** np.array(exponents)[:, None]


def prices_of(exponents, weight, capacity):
    kind = np.zeros(len(SIZES), np.int64)
    return clearing_prices(
        jobs_of(exponents), np.array(weight), SIZES, kind, np.array([float(capacity)])
    )


@given(
    exponents=st.lists(st.floats(0.3, 0.95), min_size=1, max_size=30),
    capacity=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_the_cost_is_the_least_of_all_shapes(exponents, capacity, seed):
    weight = np.random.default_rng(seed).uniform(0.1, 3.0, len(exponents))
    prices, cost, best = prices_of(exponents, weight, capacity)
    every = (weight[:, None] + prices[0] * SIZES) / jobs_of(exponents)
    np.testing.assert_allclose(cost, every.min(1), rtol=1e-12)
    at_best = jobs_of(exponents)[np.arange(len(every)), every.argmin(1)]
    np.testing.assert_allclose(best, at_best, rtol=1e-12)


@given(exponents=st.lists(st.floats(0.4, 0.9), min_size=40, max_size=60))
def test_many_jobs_want_about_what_there_is(exponents):
    capacity = 4 * len(exponents)
    prices, _, _ = prices_of(exponents, np.ones(len(exponents)), capacity)

    def wanted(price):
        return SIZES[(jobs_of(exponents) / (1.0 + price * SIZES)).argmax(1)].sum()

    assert wanted(prices[0] * 1.1) <= capacity <= wanted(prices[0] / 1.1)


def test_more_devices_are_cheaper_and_a_job_that_scales_is_worth_more_of_them():
    few, _, _ = prices_of([0.5, 0.9, 0.7], [1.0] * 3, 8)
    many, _, _ = prices_of([0.5, 0.9, 0.7], [1.0] * 3, 24)
    assert many[0] < few[0]
    value = 1.0 + many[0] * SIZES
    best = (jobs_of([0.5, 0.9]) / value).argmax(1)
    assert best[1] > best[0]


def test_equal_kinds_have_equal_prices_and_idle_ones_cost_nothing():
    goodput = np.tile(np.array([[1.0, 1.7, 1.0, 1.7, np.nan]]), (6, 1))
    devices, kind = np.array([1, 2, 1, 2, 1]), np.array([0, 0, 1, 1, 2])
    prices, _, _ = clearing_prices(goodput, np.ones(6), devices, kind, np.array([4.0, 4.0, 4.0]))
    assert prices[0] == pytest.approx(prices[1])
    assert prices[2] < 1e-2 * prices[0]


def test_a_job_without_shapes_has_no_cost_and_bothers_nobody():
    goodput = np.array([[np.nan, np.nan], [1.0, 1.5]])
    both = clearing_prices(goodput, np.ones(2), SIZES[:2], np.zeros(2, int), np.ones(1))
    alone = clearing_prices(goodput[1:], np.ones(1), SIZES[:2], np.zeros(2, int), np.ones(1))
    assert np.isnan(both[1][0])
    np.testing.assert_array_equal(both[0], alone[0])
    empty = clearing_prices(goodput[:1], np.ones(1), SIZES[:2], np.zeros(2, int), np.ones(1))
    assert empty[0].tolist() == [0.0]
