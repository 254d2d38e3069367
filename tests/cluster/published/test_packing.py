"""Pairs on the same devices: the reference objectives, never worse than taking turns, one budget each."""

import dataclasses

import numpy as np
import pytest
from gavel_worlds import cluster_of, owners, random_problem, rigid_view, with_pairs
from golden_problems import instances
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.published.gavel.discrete import FirstInFirstOut, GandivaLike
from jaxgoodput.cluster.published.gavel.fairness import (
    FinishTimeFairness,
    Makespan,
    MaxMinFairness,
    WaterFilling,
)
from jaxgoodput.cluster.published.gavel.fractions import from_views
from jaxgoodput.cluster.published.gavel.packing import (
    best_partners,
    combined_speed,
    with_pairs_of_views,
    worth_pairing,
)
from jaxgoodput.cluster.published.gavel.rounds import RoundScheduler
from jaxgoodput.cluster.published.gavel.throughput import TotalThroughput
from jaxgoodput.specs import Shape

PACKED = {
    "max_min_fairness_packed": MaxMinFairness(),
    "finish_time_fairness_packed": FinishTimeFairness(),
    "max_sum_throughput_normalized_by_cost_packed_SLOs": TotalThroughput(
        per_price=True, deadlines=True
    ),
    "min_total_duration_packed": Makespan(),
}


@pytest.mark.parametrize("policy", PACKED)
def test_golden_objectives(golden, policy):
    count = 0
    for name, problem, _, results in instances(golden, "gavel_packed_*.json"):
        (result,) = [r for r in results if r["policy"] == policy]
        answer = PACKED[policy](problem)
        assert answer.excess(problem) <= 1e-9, name
        assert answer.objective == pytest.approx(result["reference_objective"], rel=1e-6), name
        count += 1
    assert count


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 8))
def test_pairs_never_hurt_and_the_useless_ones_are_not_missed(seed, num_jobs):
    rng = np.random.default_rng(seed)
    alone = random_problem(rng, num_jobs)
    paired = with_pairs(alone, rng)
    lean = worth_pairing(paired)
    assert len(lean.pairs) <= len(paired.pairs)
    for policy in (*PACKED.values(), FirstInFirstOut(), GandivaLike()):
        assert policy(paired).excess(paired) <= 1e-9
    share, time = MaxMinFairness(), Makespan()
    most, without = share(paired).objective, share(alone).objective
    last, last_without = time(paired).objective, time(alone).objective
    assert most is not None and without is not None
    assert last is not None and last_without is not None
    assert most >= without * (1 - 1e-8)
    assert share(lean).objective == pytest.approx(most, rel=1e-7)
    assert last <= last_without * (1 + 1e-8)
    assert WaterFilling()(paired).objective == pytest.approx(most, rel=1e-6)


def two_on_one(**speeds_together):
    problem = random_problem(np.random.default_rng(0), 3, 1, gangs=False)
    return dataclasses.replace(
        problem,
        throughput=np.ones((3, 1)),
        capacity=np.array([1]),
        since_arrival_s=np.array([3.0, 2.0, 1.0]),
        pairs=((0, 1), (0, 2)),
        pair_throughput=np.array([speeds_together["first"], speeds_together["second"]])[..., None],
    )


def test_fifo_packs_the_head_of_the_queue_only_where_it_pays():
    good = two_on_one(first=[0.9, 0.9], second=[0.95, 0.95])
    assert FirstInFirstOut()(good).together.ravel().tolist() == [1, 0]  # not the better one behind
    poor = two_on_one(first=[0.7, 0.7], second=[0.95, 0.95])
    assert FirstInFirstOut()(poor).together.sum() == 0


def test_gandiva_takes_the_best_partners_and_drops_those_that_slow_down():
    problem = two_on_one(first=[0.6, 0.6], second=[0.8, 0.8])
    np.testing.assert_allclose(combined_speed(problem).ravel(), [1.2, 1.6])
    assert best_partners(problem) == (1,)
    answer = GandivaLike()(problem)
    np.testing.assert_allclose(answer.together.ravel(), [0, 0.5])
    np.testing.assert_allclose(answer.alone.ravel(), [0, 0.5, 0])
    slow = two_on_one(first=[0.4, 0.4], second=[0.3, 0.3])
    assert GandivaLike()(slow).together.sum() == 0


def views_that_share():
    shape = Shape("a", 1, 1)
    views = []
    for name in ("p", "q", "r"):
        others = [other for other in ("p", "q", "r") if other != name]
        views.append(
            rigid_view(
                name, 1, {"a": 1.0}, shared_goodput={(other, shape): 0.9 for other in others}
            )
        )
    return views


def test_pairs_come_from_views_and_share_devices_in_one_group():
    views = views_that_share()
    cluster = cluster_of({"a": 1})
    problem = with_pairs_of_views(from_views(views, cluster, 0.0), views, {"a": 4})
    assert problem.pairs == ((0, 1), (0, 2), (1, 2))
    policy = RoundScheduler(fraction_policy=MaxMinFairness(), share_devices=True)
    decision = policy(views, cluster, 0.0)
    groups = {a.share_group for a in decision.allocations.values()}
    assert len(decision.allocations) == 2 and len(groups) == 1 and None not in groups
    assert all(len(group) == 1 for group in owners(decision).values())


def test_gangs_of_different_sizes_do_not_pair():
    problem = random_problem(np.random.default_rng(0), 2)
    with pytest.raises(ValueError, match="gangs of"):
        dataclasses.replace(
            problem,
            scale_factor=np.array([1, 2]),
            pairs=((0, 1),),
            pair_throughput=np.ones((1, 2, 3)),
        )
