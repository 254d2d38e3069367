"""Gavel's policies reach the reference objectives, and their fractions can always be carried out."""

import dataclasses

import numpy as np
import pytest
import scipy.optimize
from gavel_worlds import random_problem, with_pairs
from golden_problems import instances
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.published.gavel.discrete import (
    AlloX,
    FirstInFirstOut,
    GandivaLike,
    IsolatedShares,
    Proportional,
)
from jaxgoodput.cluster.published.gavel.fairness import (
    FinishTimeFairness,
    Hierarchical,
    Makespan,
    MaxMinFairness,
    WaterFilling,
)
from jaxgoodput.cluster.published.gavel.programs import LinearProgram, gauge
from jaxgoodput.cluster.published.gavel.throughput import TotalThroughput

BY_OBJECTIVE = {
    "max_min_fairness_perf": MaxMinFairness(),
    "max_min_fairness": MaxMinFairness(heterogeneous=False),
    "finish_time_fairness_perf": FinishTimeFairness(),
    "finish_time_fairness_perf__second_call": FinishTimeFairness(),
    "max_sum_throughput_perf": TotalThroughput(),
    "max_sum_throughput_normalized_by_cost_perf": TotalThroughput(per_price=True),
    "max_sum_throughput_normalized_by_cost_perf_SLOs": TotalThroughput(
        per_price=True, deadlines=True
    ),
    "min_total_duration_perf": Makespan(),
}
EVERY = [
    *BY_OBJECTIVE.values(),
    FinishTimeFairness(heterogeneous=False),
    Makespan(heterogeneous=False),
    WaterFilling(),
    WaterFilling(heterogeneous=False),
    Hierarchical(weights={"a": 2.0}, orders={"b": "fifo"}),
    FirstInFirstOut(),
    FirstInFirstOut(kinds="any"),
    AlloX(),
    GandivaLike(),
    IsolatedShares(),
    Proportional(),
]


def results(golden, pattern, policy):
    found = [
        (name, problem, result)
        for name, problem, _, answers in instances(golden, pattern)
        for result in answers
        if result["policy"] == policy
    ]
    assert found, f"no golden instance of {policy}"
    return found


@pytest.mark.parametrize("policy", BY_OBJECTIVE)
def test_golden_objectives(golden, policy):
    for name, problem, result in results(golden, "gavel_[0-9]*.json", policy):
        if policy.endswith("second_call"):
            problem = dataclasses.replace(
                problem,
                remaining_steps=np.array(result["steps_remaining"], float),
                since_arrival_s=np.array(result["time_since_start"], float),
                isolated_s=np.array(result["cumulative_isolated_time"], float),
            )
        answer = BY_OBJECTIVE[policy](problem)
        assert answer.excess(problem) <= 1e-9, name
        if result.get("slo_feasible") is False:
            # The reference drops all deadlines here; ours serves and reports them, at a price.
            free = TotalThroughput(per_price=True)(problem).objective
            assert free == pytest.approx(result["reference_objective"], rel=1e-6), name
            assert answer.objective < free and answer.reasons, name
            continue
        assert answer.objective == pytest.approx(result["reference_objective"], rel=1e-6), name


def test_golden_levels_of_water_filling(golden):
    policy = "max_min_fairness_water_filling_perf"
    for name, problem, result in results(golden, "gavel_[0-9]*.json", policy):
        answer = WaterFilling()(problem)
        share = problem.scale_factor / problem.weight / problem.proportional_rate()
        levels = np.sort(answer.rate(problem) * share)
        assert answer.excess(problem) <= 1e-9, name
        assert answer.objective == pytest.approx(result["reference_objective"], rel=1e-6), name
        np.testing.assert_allclose(levels, result["levels_sorted_reference"], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("policy", ["fifo_perf", "allox", "isolated"])
def test_golden_allocations(golden, policy):
    ours = {"fifo_perf": FirstInFirstOut(), "allox": AlloX(), "isolated": IsolatedShares()}[policy]
    for name, problem, result in results(golden, "gavel_[0-9]*.json", policy):
        if policy == "fifo_perf":  # the reference's queue is in order of id, whatever the ages
            ages = np.arange(problem.num_jobs, 0, -1, dtype=float)
            problem = dataclasses.replace(problem, since_arrival_s=ages)
        np.testing.assert_allclose(
            ours(problem).alone, result["allocation"], atol=1e-8, err_msg=name
        )


def test_golden_closed_forms(golden):
    for _, problem, result in results(golden, "gavel_[0-9]*.json", "isolated"):
        np.testing.assert_allclose(problem.isolated_rate(), result["isolated_throughput"])
    for _, problem, result in results(golden, "gavel_[0-9]*.json", "proportional"):
        np.testing.assert_allclose(problem.proportional_rate(), result["proportional_throughput"])
        ours = Proportional()(problem).alone
        ratio = ours / np.array(result["allocation"])
        np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-7)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 25), st.floats(0.3, 6), st.booleans())
def test_fractions_are_always_feasible(seed, num_jobs, crowd, limited):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_jobs, int(rng.integers(1, 5)), crowd=crowd)
    late = np.where(rng.random(num_jobs) < 0.4, rng.uniform(-100, 20_000, num_jobs), np.inf)
    problem = dataclasses.replace(problem, deadlines_s=late)
    lawful = EVERY
    if limited:  # closed forms and discrete policies leave quotas to the round scheduler
        problem = dataclasses.replace(problem, quota={"a": int(rng.integers(0, 5)), "b": 3})
        lawful = [p for p in EVERY if type(p).__module__.rpartition(".")[2] != "discrete"]
    for policy in lawful:
        answer = policy(problem)
        assert answer.excess(problem) <= 1e-9, policy
        useless = problem.throughput <= 0
        if not isinstance(policy, IsolatedShares | Proportional):
            assert (answer.alone[useless] == 0).all(), policy
        again = policy(problem)
        assert (again.alone == answer.alone).all(), policy


def bottleneck_levels(problem, unit):
    """The lexicographic optimum by the book: raise all, test each job alone, freeze, again."""
    program = LinearProgram.of(problem)
    num_jobs, num_variables = problem.num_jobs, len(program.row)
    share = (program.rate.multiply(1 / unit[:, None])).tocsr()
    rows = program.limits.toarray()
    level = np.zeros(num_jobs)
    rising = problem.runnable.copy()

    def solve(cost, lower, step):
        matrix = np.vstack(
            [
                np.hstack([rows, np.zeros((len(rows), 1))]),
                np.hstack([-share.toarray(), step[:, None]]),
            ]
        )
        return scipy.optimize.linprog(
            cost, matrix, np.concatenate([program.bounds, -lower]), method="highs-ds"
        )

    while rising.any():
        cost = np.append(np.zeros(num_variables), -1.0)
        result = solve(cost, np.where(rising, 0.0, level), rising.astype(float))
        level[rising] = result.x[-1]
        slack = np.full(num_jobs, np.inf)
        for i in np.flatnonzero(rising):
            one = np.append(-share[[i]].toarray().ravel(), 0.0)
            best = -solve(one, level * (1 - 1e-9), np.zeros(num_jobs)).fun
            slack[i] = (best - level[i]) / (level[i] + 1e-3)
        # Some job cannot rise, but giving up 1e-9 of the others may buy it more than the tolerance.
        assert slack.min() <= 1e-4
        rising[slack <= max(slack.min(), 1e-6)] = False
    return level


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.floats(0.5, 4), st.booleans(), st.booleans())
@example(seed=325, num_jobs=8, crowd=3.0, paired=True, limited=False)
def test_water_filling_is_the_lexicographic_optimum(seed, num_jobs, crowd, paired, limited):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_jobs, int(rng.integers(1, 4)), crowd=crowd)
    problem = with_pairs(problem, rng) if paired else problem
    if limited:
        problem = dataclasses.replace(problem, quota={"a": 1, "b": 2})
    unit = problem.weight * np.maximum(problem.proportional_rate(), 1e-30) / problem.scale_factor
    unit = np.where(problem.runnable, unit, 1.0)
    ours = WaterFilling()(problem).rate(problem) / unit
    expected = bottleneck_levels(problem, unit)
    np.testing.assert_allclose(np.sort(ours), np.sort(expected), rtol=2e-6, atol=1e-7)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.floats(0.5, 5))
def test_finish_time_fairness_is_what_bisection_finds(seed, num_jobs, crowd):
    problem = random_problem(np.random.default_rng(seed), num_jobs, crowd=crowd)
    problem = dataclasses.replace(
        problem, throughput=np.where(problem.throughput > 0, problem.throughput, 0.01)
    )
    alone = problem.isolated_s + problem.remaining_steps / problem.isolated_rate()
    program = LinearProgram.of(problem)
    low, high = float((problem.since_arrival_s / alone).max()) * (1 + 1e-9) + 1e-9, 1e7
    for _ in range(60):
        ratio = np.sqrt(low * high)
        need = problem.remaining_steps / (ratio * alone - problem.since_arrival_s)
        low, high = (low, ratio) if gauge(program, need).scale >= 1 else (ratio, high)
    answer = FinishTimeFairness()(problem)
    assert answer.objective == pytest.approx(high, rel=1e-6)
    finish = problem.since_arrival_s + problem.remaining_steps / answer.rate(problem)
    assert (finish / alone).max() == pytest.approx(answer.objective, rel=1e-6)


def test_makespan_is_reached():
    problem = random_problem(np.random.default_rng(3), 40)
    answer = Makespan()(problem)
    can = problem.runnable
    duration = problem.remaining_steps[can] / answer.rate(problem)[can]
    assert duration.max() == pytest.approx(answer.objective, rel=1e-6)


def test_infeasible_deadlines_are_reported_by_job_and_the_rest_is_served():
    problem = random_problem(np.random.default_rng(5), 6, gangs=False)
    problem = dataclasses.replace(
        problem,
        throughput=np.ones((6, 3)),
        capacity=np.array([1, 1, 0]),
        remaining_steps=np.full(6, 1000.0),
        deadlines_s=np.array([1000.0, 1000.0, 1000.0, 10.0, -5.0, np.inf]),
    )
    answer = TotalThroughput(deadlines=True)(problem)
    rate = answer.rate(problem)
    assert answer.excess(problem) <= 1e-9
    assert "out of reach" in answer.reasons["j0003"] and "missed 5 s ago" in answer.reasons["j0004"]
    # Two devices for three jobs that each need one all of the time: as much as can be is met.
    assert rate[:3].sum() == pytest.approx(2.0, rel=1e-6)
    short = [job for job in ("j0000", "j0001", "j0002") if job in answer.reasons]
    assert short == [f"j000{i}" for i in range(3) if rate[i] < 1 - 1e-6] and short
    assert "j0005" not in answer.reasons


def test_deadlines_that_can_be_met_are_met_and_not_reported():
    problem = random_problem(np.random.default_rng(6), 20, crowd=1.0)
    possible = MaxMinFairness()(problem).rate(problem)
    ask = problem.runnable & (np.arange(20) % 3 == 0) & (possible > 0)
    problem = dataclasses.replace(
        problem,
        deadlines_s=np.where(
            ask, problem.remaining_steps / np.where(ask, possible, 1) * 1.01, np.inf
        ),
    )
    answer = TotalThroughput(per_price=True, deadlines=True)(problem)
    rate = answer.rate(problem)
    assert ask.any() and not answer.reasons
    assert (rate[ask] >= (problem.remaining_steps / problem.deadlines_s)[ask] * (1 - 1e-8)).all()


def test_answers_are_vertices():
    problem = random_problem(np.random.default_rng(8), 64, crowd=4)
    answer = MaxMinFairness()(problem)
    assert answer.objective is not None
    slack = [
        1 - answer.alone.sum(axis=1),
        problem.capacity - problem.scale_factor @ answer.alone,
        answer.rate(problem)
        * problem.scale_factor
        / problem.weight
        / np.where(problem.runnable, problem.proportional_rate(), 1.0)
        - answer.objective,
    ]
    above = sum(int((part > 1e-7).sum()) for part in (answer.alone, *slack))
    assert above + 1 <= 2 * problem.num_jobs + len(problem.kinds)  # the objective is a variable too


def test_fifo_never_lets_a_job_overtake_that_can_run_anywhere():
    problem = random_problem(np.random.default_rng(9), 30, crowd=4)
    problem = dataclasses.replace(problem, throughput=np.maximum(problem.throughput, 0.1))
    x = FirstInFirstOut()(problem).alone.sum(axis=1)
    order = [i for i in np.argsort(-problem.since_arrival_s) if problem.runnable[i]]
    runs = x[order]
    assert (np.diff(runs) <= 0).all() and 0 < runs.sum() < len(order)


def test_fifo_passes_a_job_whose_speed_on_all_that_is_free_is_0():
    problem = dataclasses.replace(
        random_problem(np.random.default_rng(0), 4, 2, gangs=False),
        throughput=np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]),
        capacity=np.array([1, 1]),
        since_arrival_s=np.array([4.0, 3.0, 2.0, 1.0]),
    )
    found = FirstInFirstOut()(problem)
    assert found.alone.tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]
    assert "passed over" in found.reasons[problem.job_ids[1]]
    assert "no kind has its 1 free" in found.reasons[problem.job_ids[3]]


def test_allox_minimises_the_mean_finish_time():
    # Three jobs of 1, 2 and 3 s on one device: the shortest goes first.
    problem = random_problem(np.random.default_rng(1), 3, 1, gangs=False)
    problem = dataclasses.replace(
        problem,
        throughput=np.ones((3, 1)),
        capacity=np.array([1]),
        remaining_steps=np.array([3.0, 1.0, 2.0]),
    )
    assert AlloX()(problem).alone.ravel().tolist() == [0, 1, 0]
    held = dataclasses.replace(problem, held=np.array([0, -1, -1]))
    assert AlloX()(held).alone.ravel().tolist() == [1, 0, 0]  # what runs is not moved


def test_a_gang_is_outside_of_allox_and_said_to_be():
    problem = random_problem(np.random.default_rng(2), 4)
    problem = dataclasses.replace(problem, scale_factor=np.array([1, 2, 1, 4]))
    assert sorted(AlloX()(problem).reasons) == ["j0001", "j0003"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("throughput", np.full((3, 3), np.nan), "throughput must be finite"),
        ("throughput", np.full((3, 3), -1.0), "throughput must be finite"),
        ("scale_factor", np.array([1, 0, 1]), "scale_factor must be at least 1"),
        ("weight", np.array([1.0, 0.0, 1.0]), "weight must be above 0"),
        ("job_ids", ("a",), "job_ids has 1 entries"),
    ],
)
def test_bad_problems_say_what_is_wrong(field, value, message):
    problem = random_problem(np.random.default_rng(0), 3)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(problem, **{field: value})


def test_no_jobs_and_jobs_that_can_run_nowhere():
    nobody = random_problem(np.random.default_rng(0), 0)
    lost = random_problem(np.random.default_rng(0), 3)
    lost = dataclasses.replace(lost, throughput=np.zeros((3, 3)))
    for policy in EVERY:
        assert policy(nobody).alone.shape == (0, 3)
        if not isinstance(policy, IsolatedShares | Proportional):
            assert (policy(lost).alone == 0).all()
