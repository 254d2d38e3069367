"""The choice is within every limit, as good as an independent program's, and its bound is a bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from jaxgoodput.cluster.scheduler.policy import SolverTimeout
from jaxgoodput.cluster.scheduler.solve import multiple_choice as knapsack
from jaxgoodput.cluster.scheduler.solve.assignment import Quota, allocate
from jaxgoodput.cluster.scheduler.solve.dual_prices import dual_prices


def instance(num_jobs, nodes, seed, quotas=0):
    """nodes: [(nodes, devices of one)] by kind; jobs of sublinear speed that differ by kind."""
    rng = np.random.default_rng(seed)
    demand, kind = [], []
    for index, (count, size) in enumerate(nodes):
        one = [2**i for i in range(10) if 2**i <= size]
        one += [size * i for i in range(2, count + 1) if size * i <= 64]
        demand += one
        kind += [index] * len(one)
    demand, kind = np.array(demand), np.array(kind)
    speed = rng.uniform(1, 8, (num_jobs, len(nodes)))[:, kind]
    goodput = speed * demand ** rng.uniform(0.4, 0.98, (num_jobs, 1))
    largest = 2 ** rng.integers(0, 7, (num_jobs, 1))
    goodput = np.where(demand > largest, np.nan, goodput)
    utility = 1.1 - (goodput / np.nanmin(goodput, 1, keepdims=True)) ** -0.5
    capacity = np.array([count * size for count, size in nodes])
    rows = tuple(
        Quota(jobs=rng.random(num_jobs) < 0.5, limit=int(rng.integers(1, capacity.sum() + 1)))
        for _ in range(quotas)
    )
    return utility, demand, kind, capacity, rows


def independent(utility, demand, kind, capacity, quotas, must):
    """The best objective by one mixed-integer program over every pair; None = infeasible."""
    num_jobs, num_shapes = utility.shape
    rows = [np.tile(np.where(kind == k, demand, 0), num_jobs) for k in range(len(capacity))]
    rows += [(quota.jobs[:, None] * demand).ravel() for quota in quotas]
    rows += [np.repeat(np.arange(num_jobs) == job, num_shapes) for job in range(num_jobs)]
    low = np.r_[np.full(len(capacity) + len(quotas), -np.inf), np.where(must, 1.0, 0.0)]
    high = np.r_[capacity, [quota.limit for quota in quotas], np.ones(num_jobs)]
    allowed = ~np.isnan(utility.ravel())
    result = optimize.milp(
        -np.nan_to_num(utility.ravel()),
        integrality=np.ones(utility.size),
        bounds=optimize.Bounds(0.0, allowed.astype(float)),
        constraints=optimize.LinearConstraint(sparse.csc_array(np.array(rows, float)), low, high),
        options={"mip_rel_gap": 1e-9},
    )
    return None if result.x is None else -float(result.fun)


def check_limits(choice, utility, demand, kind, capacity, quotas=()):
    runs = np.flatnonzero(choice.shape >= 0)
    shapes = choice.shape[runs]
    assert not np.isnan(utility[runs, shapes]).any()
    used = np.bincount(kind[shapes], demand[shapes], len(capacity))
    assert (used <= capacity).all()
    for quota in quotas:
        assert (demand[shapes] * quota.jobs[runs]).sum() <= quota.limit
    np.testing.assert_allclose(choice.objective, utility[runs, shapes].sum(), atol=1e-9)
    assert choice.bound >= choice.objective


clusters = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=3
)


@settings(max_examples=60, deadline=None)
@given(
    nodes=clusters,
    num_jobs=st.integers(1, 12),
    quotas=st.integers(0, 2),
    seed=st.integers(0, 10**6),
    exact_program=st.booleans(),
)
def test_the_choice_is_the_best_there_is(nodes, num_jobs, quotas, seed, exact_program):
    problem = instance(num_jobs, nodes, seed, quotas)
    utility, demand, kind, capacity, rows = problem
    with pytest.MonkeyPatch.context() as patch:
        if not exact_program:  # both ways: by dynamic programming, and by relaxation and branching
            patch.setattr(knapsack, "CHEAP", 0)
            patch.setattr(knapsack, "CHEAP_CORE", 0)
            patch.setattr(knapsack, "LARGEST_PROGRAM", 20)
        choice = allocate(utility, demand, kind, capacity, quotas=rows, relative_gap=0.0)
    check_limits(choice, utility, demand, kind, capacity, rows)
    best = independent(utility, demand, kind, capacity, rows, np.zeros(num_jobs, bool))
    assert best is not None
    np.testing.assert_allclose(choice.objective, best, rtol=1e-6, atol=1e-9)
    assert choice.unserved == ()


@settings(max_examples=40, deadline=None)
@given(
    nodes=clusters, num_jobs=st.integers(1, 10), seed=st.integers(0, 10**6), share=st.floats(0, 1)
)
def test_jobs_that_must_run_do_or_are_named(nodes, num_jobs, seed, share):
    utility, demand, kind, capacity, _ = instance(num_jobs, nodes, seed)
    must = np.random.default_rng(seed).random(num_jobs) < share
    utility[must] -= 2.0  # worth less than nothing: only the duty makes them run
    choice = allocate(utility, demand, kind, capacity, at_least=must, relative_gap=0.0)
    check_limits(choice, utility, demand, kind, capacity)
    runs = choice.shape >= 0
    assert set(np.flatnonzero(must & ~runs)) == set(choice.unserved)
    best = independent(utility, demand, kind, capacity, (), must)
    assert (best is None) == bool(choice.unserved)
    if best is not None:
        np.testing.assert_allclose(choice.objective, best, rtol=1e-6, atol=1e-9)
    elif len(capacity) == 1:  # as many as fit at their least size
        least = np.sort(np.nanmin(np.where(np.isnan(utility), np.nan, demand), 1)[must])
        assert (must & runs).sum() == (np.cumsum(least) <= capacity[0]).sum()


@pytest.mark.parametrize("seed", [43, 79])
def test_as_many_as_fit_of_many_jobs_that_must_run(seed):
    """So many that the relaxation decides, whose rounding does not serve all of them."""
    rng = np.random.default_rng(seed)
    num_jobs, num_kinds = int(rng.integers(20, 60)), 3
    demand = np.array([1, 2, 4, 8, 16, 32] * num_kinds)
    kind, capacity = np.repeat(np.arange(num_kinds), 6), np.array([64, 64, 64])
    utility = rng.uniform(0.1, 1, (num_jobs, 1)) * demand ** rng.uniform(0.3, 1, (num_jobs, 1))
    utility = utility * rng.uniform(0.5, 2, (num_jobs, num_kinds))[:, kind]
    least = 2 ** rng.integers(0, 4, (num_jobs, 1))
    utility[demand < least] = np.nan
    utility[demand > least * 2 ** rng.integers(0, 3, (num_jobs, 1))] = np.nan
    must = rng.random(num_jobs) < rng.uniform(0.3, 1)
    choice = allocate(utility, demand, kind, capacity, at_least=must, time_limit_s=20.0)
    check_limits(choice, utility, demand, kind, capacity)
    assert set(np.flatnonzero(must & (choice.shape < 0))) == set(choice.unserved)


def test_a_pinned_job_keeps_its_shape_whatever_it_is_worth():
    utility = np.array([[0.1, np.nan], [1.0, 1.5]])
    choice = allocate(
        utility, np.array([1, 2]), np.array([0, 0]), np.array([3]), pinned=np.array([1, -1])
    )
    assert choice.shape.tolist() == [1, 0]
    assert choice.objective == 1.0


def test_pins_beyond_the_capacity_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"use 4 of kind 0, but only 3 exist.*Release"):
        allocate(
            np.ones((2, 1)), np.array([2]), np.array([0]), np.array([3]), pinned=np.array([0, 0])
        )


def test_a_quota_in_money_counts_the_kind():
    # Two kinds of the same worth; the dear one exceeds the budget.
    quota = Quota(jobs=np.ones(2, bool), limit=3.0, per_device=np.array([2.5, 1.0]))
    choice = allocate(
        np.array([[1.0, 0.9], [1.0, 0.9]]),
        np.array([1, 1]),
        np.array([0, 1]),
        np.array([2, 2]),
        quotas=[quota],
    )
    assert sorted(choice.shape.tolist()) == [1, 1]


@pytest.mark.parametrize("nodes", [[(256, 8)], [(86, 8), (85, 8), (85, 8)]])
@pytest.mark.parametrize("gap", [0.0, 1e-3])
def test_large_instances_are_solved_to_their_gap_within_their_limits(nodes, gap):
    utility, demand, kind, capacity, _ = instance(800, nodes, 3)
    choice = allocate(utility, demand, kind, capacity, relative_gap=gap)
    check_limits(choice, utility, demand, kind, capacity)
    assert choice.bound - choice.objective <= max(gap, 1e-6) * abs(choice.objective)


def test_the_prices_are_nearly_those_of_the_linear_program():
    utility, demand, kind, capacity, _ = instance(300, [(20, 8), (12, 4)], 5)
    job, shape = np.nonzero(~np.isnan(utility))
    value = utility[job, shape]
    use = np.where(kind[shape][:, None] == np.arange(2), demand[shape][:, None], 0.0)
    limit = capacity.astype(float)
    prices = dual_prices(value, use, limit, job, np.zeros(300, bool))
    matrix, _, high = knapsack._rows(
        knapsack.Knapsack(job=job, value=value, use=use, limit=limit, forced=np.zeros(300, bool))
    )
    relaxed = optimize.linprog(-value, A_ub=matrix, b_ub=high)
    worth = np.zeros(300)
    np.maximum.at(worth, job, value - use @ prices)
    bound = limit @ prices + worth.sum()
    assert -relaxed.fun * (1 - 1e-9) <= bound <= -relaxed.fun * (1 + 2e-3)


def test_equal_inputs_give_equal_choices_and_nothing_gives_nothing():
    utility, demand, kind, capacity, _ = instance(40, [(6, 4), (2, 8), (3, 8)], 8)
    first, second = (allocate(utility, demand, kind, capacity) for _ in range(2))
    assert (first.shape == second.shape).all()
    assert allocate(utility[:0], demand, kind, capacity).shape.shape == (0,)
    nowhere = allocate(np.full((2, 1), np.nan), np.array([1]), np.array([0]), np.array([4]))
    assert nowhere.shape.tolist() == [-1, -1]


def test_no_time_at_all_is_said():
    utility, demand, kind, capacity, _ = instance(800, [(86, 8), (85, 8), (85, 8)], 3)
    with pytest.raises(SolverTimeout, match="The previous plan stays"):
        allocate(utility, demand, kind, capacity, time_limit_s=0.0)
