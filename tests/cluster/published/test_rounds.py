"""Rounds: the choice is the best that fits, shares are met over time, leases and quotas are kept."""

import itertools

import numpy as np
import pytest
from gavel_worlds import cluster_of, owners, rigid_view, run_rounds
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.published.gavel.discrete import FirstInFirstOut
from jaxgoodput.cluster.published.gavel.fairness import MaxMinFairness, WaterFilling
from jaxgoodput.cluster.published.gavel.fractions import from_views
from jaxgoodput.cluster.published.gavel.rounds import (
    RoundProblem,
    RoundScheduler,
    best_rows,
    greedy,
)


def rows_of(seed, num_rows, num_kinds, *, paired=False, budgets=()):
    rng = np.random.default_rng(seed)
    members = [(i,) for i in range(num_rows)]
    if paired:
        members = [
            tuple(sorted(rng.choice(num_rows, 1 + i % 2, False).tolist())) for i in range(num_rows)
        ]
    shape = num_rows, num_kinds
    value = np.where(rng.random(shape) < 0.8, rng.exponential(1, shape), 0)
    size = rng.choice([1, 2, 3, 4, 8], num_rows)
    return RoundProblem(
        value=value,
        size=size,
        capacity=rng.integers(0, 9, num_kinds),
        members=members,
        # Every other row counts, in devices that are dearer by kind.
        budgets=[
            (np.outer(np.where(of, size, 0), 1.0 + np.arange(num_kinds)), limit)
            for of, limit in budgets
        ],
    )


def worth(c, chosen):
    """The value of a choice that breaks no rule."""
    rows = np.flatnonzero(chosen >= 0)
    used = np.bincount(chosen[rows], c.size[rows], len(c.capacity))
    assert (used <= c.capacity).all()
    jobs = [job for row in rows for job in c.members[row]]
    assert len(jobs) == len(set(jobs))
    assert all(use[rows, chosen[rows]].sum() <= limit for use, limit in c.budgets)
    assert (c.value[rows, chosen[rows]] > 0).all()
    return float(c.value[rows, chosen[rows]].sum())


def brute_force(c):
    best = 0.0
    for choice in itertools.product(range(-1, len(c.capacity)), repeat=len(c.size)):
        chosen = np.array(choice)
        rows = np.flatnonzero(chosen >= 0)
        fits = (np.bincount(chosen[rows], c.size[rows], len(c.capacity)) <= c.capacity).all()
        fits &= all(use[rows, chosen[rows]].sum() <= limit for use, limit in c.budgets)
        jobs = [job for row in rows for job in c.members[row]]
        if fits and len(jobs) == len(set(jobs)) and (c.value[rows, chosen[rows]] > 0).all():
            best = max(best, float(c.value[rows, chosen[rows]].sum()))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
def test_the_best_rows_are_those_of_brute_force(seed, num_rows, num_kinds, paired, limited):
    budgets = ((np.arange(num_rows) % 2 == 0, 5.0),) if limited else ()
    c = rows_of(seed, num_rows, num_kinds, paired=paired, budgets=budgets)
    assert worth(c, best_rows(c)) == pytest.approx(brute_force(c))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 3), st.booleans(), st.booleans())
def test_greedy_breaks_no_rule_and_is_no_better_than_the_best(
    seed, num_rows, num_kinds, paired, limited
):
    budgets = ((np.arange(num_rows) % 2 == 0, 5.0),) if limited else ()
    c = rows_of(seed, num_rows, num_kinds, paired=paired, budgets=budgets)
    assert worth(c, greedy(c)) <= worth(c, best_rows(c)) * (1 + 1e-9)


def crowd(rng, num_jobs, gangs=(1, 1, 1, 2, 4, 8)):
    sizes = rng.choice(gangs, num_jobs).tolist()
    speeds = rng.lognormal(0, 1, (num_jobs, 2))
    return [
        rigid_view(f"j{i:02d}", gang, {"a": float(speeds[i, 0]), "b": float(speeds[i, 1])})
        for i, gang in enumerate(sizes)
    ]


def received_and_target(policy, views, cluster, num_rounds):
    target = policy.fraction_policy(from_views(views, cluster, 0.0)).alone
    after, _ = run_rounds(policy, views, cluster, num_rounds, 360.0)
    received = np.array([[v.fraction_received_s.get(k, 0.0) for k in "ab"] for v in after])
    return received / num_rounds / 360.0, target


@pytest.mark.parametrize("selection", ["greedy", "exact"])
@pytest.mark.parametrize("fairness", [WaterFilling(), MaxMinFairness()], ids=["levels", "max-min"])
def test_received_fractions_converge_to_the_targets(selection, fairness):
    views = crowd(np.random.default_rng(4), 12, gangs=(1,))
    policy = RoundScheduler(fraction_policy=fairness, selection=selection)
    received, target = received_and_target(policy, views, cluster_of({"a": 3, "b": 4}), 80)
    # Whoever has no share of a kind may still be given what is left over.
    assert (received >= target - 0.03).all(), (received - target).round(3)


@pytest.mark.parametrize("selection", ["greedy", "exact"])
def test_a_gang_is_not_starved_by_single_devices(selection):
    # Fractions that no schedule reaches: a gang of all devices beside jobs that are always to run.
    views = [rigid_view("gang", 4, {"a": 1.0})]
    views += [rigid_view(f"j{i}", 1, {"a": 1.0}) for i in range(6)]
    policy = RoundScheduler(fraction_policy=WaterFilling(), selection=selection)
    received, target = received_and_target(policy, views, cluster_of({"a": 4}), 60)
    assert received[0, 0] >= 0.9 * target[0, 0], (received, target)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from(["greedy", "exact"]))
def test_no_device_is_given_twice_and_equal_inputs_give_equal_decisions(seed, num_jobs, selection):
    rng = np.random.default_rng(seed)
    views = crowd(rng, num_jobs)
    cluster = cluster_of({"a": int(rng.integers(1, 12)), "b": int(rng.integers(1, 12))})
    policy = RoundScheduler(fraction_policy=WaterFilling(), selection=selection)
    views, decisions = run_rounds(policy, views, cluster, 4, 360.0)
    for decision in decisions:
        assert all(len(who) == 1 for who in owners(decision).values())
        assert decision.reasons.keys() == {v.spec.id for v in views}
        for view in views:
            given = decision.allocations.get(view.spec.id)
            assert given is None or given.num_devices in (0, view.spec.num_devices)
    assert policy(views, cluster, 1440.0) == policy(views, cluster, 1440.0)


def test_a_lease_is_kept_and_then_given_up():
    views = [rigid_view("p", 1, {"a": 1.0}), rigid_view("q", 1, {"a": 1.0})]
    cluster = cluster_of({"a": 1})
    policy = RoundScheduler(fraction_policy=MaxMinFairness(), round_s=360.0)
    held, _ = run_rounds(policy, views, cluster, 1, 60.0)
    ran = [v.spec.id for v in held if v.allocation.devices]
    early, late = policy(held, cluster, 200.0), policy(held, cluster, 400.0)
    assert list(early.allocations) == ran and "lease" in early.reasons[ran[0]]
    assert list(late.allocations) != ran


def test_devices_are_kept_where_kind_and_size_stay():
    views = [rigid_view(f"j{i}", 2, {"a": 1.0}) for i in range(4)]
    policy = RoundScheduler(fraction_policy=MaxMinFairness())
    _, decisions = run_rounds(policy, views, cluster_of({"a": 8}), 5, 360.0)
    assert all(d.allocations == decisions[0].allocations for d in decisions)


def test_a_job_that_fits_nowhere_is_reported_and_starves_nobody():
    views = [rigid_view("huge", 64, {"a": 1.0}), rigid_view("small", 1, {"a": 1.0})]
    for fairness in (MaxMinFairness(), WaterFilling(), FirstInFirstOut()):
        decision = RoundScheduler(fraction_policy=fairness)(views, cluster_of({"a": 4}), 0.0)
        assert list(decision.allocations) == ["small"]
        assert "no kind has room for its 64 devices" in decision.reasons["huge"]


def test_quotas_hold_in_every_round():
    views = [
        rigid_view(f"j{i}", 1 + i % 2, {"a": 1.0}, tenant="x" if i < 4 else "y") for i in range(6)
    ]
    cluster = cluster_of({"a": 8}, quota={"x": 3})
    policy = RoundScheduler(fraction_policy=WaterFilling(), selection="exact")
    _, decisions = run_rounds(policy, views, cluster, 6, 360.0)
    for decision in decisions:
        mine = [
            decision.allocations[f"j{i}"].num_devices
            for i in range(4)
            if f"j{i}" in decision.allocations
        ]
        assert 0 < sum(mine) <= 3


def test_a_bad_entry_of_a_table_is_left_out():
    views = [rigid_view("p", 1, {"a": float("nan"), "b": 1.0})]
    decision = RoundScheduler(fraction_policy=MaxMinFairness())(
        views, cluster_of({"a": 4, "b": 4}), 0.0
    )
    assert next(iter(decision.allocations["p"].devices)).startswith("b")


def test_an_empty_queue_is_an_empty_decision():
    policy = RoundScheduler(fraction_policy=MaxMinFairness())
    assert policy([], cluster_of({"a": 1}), 0.0).allocations == {}
