"""Nobody waits for ever: the oldest that is due runs, and everybody gets the guaranteed share."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.guarantee import due
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.cluster.scheduler.work_left import EndedJob, Experience
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node

EIGHT = ClusterSpec(nodes=tuple(Node(name=f"n{i}", kind="k", num_devices=4) for i in range(2)))


def rigid(id_, size, cluster=EIGHT, weight=1.0, **fields):
    spec = JobSpec(id=id_, mode="rigid", num_devices=size, max_devices=size, weight=weight)
    table = {s: float(size) for s in shapes(cluster) if s.num_devices == size}
    return JobView(spec=spec, goodput=table, largest_profiled=size, **fields)


def after(view, allocation, now_s, span_s):
    """The job a while later, under its new allocation; it never ends."""
    changed = allocation.devices != view.allocation.devices
    began = bool(allocation.devices) and changed
    ran_s = span_s if allocation.devices else 0.0
    had = sum(view.received_s.values())
    return dataclasses.replace(
        view,
        allocation=allocation,
        since_s=None if not allocation.devices else now_s if changed else view.since_s,
        restoring_until_s=now_s + view.restart_s if began else None,
        num_restarts=view.num_restarts + (began and had > 0),
        received_s={"k": had + ran_s * allocation.num_devices},
        fraction_received_s={"k": sum(view.fraction_received_s.values()) + ran_s},
    )


def go_on(jobs, cluster, policy, rounds, span_s):
    """The jobs after so many rounds."""
    for turn in range(rounds):
        now_s = turn * span_s
        plan = reconcile(jobs, cluster, policy, now_s)
        jobs = [after(view, plan.allocations[view.spec.id], now_s, span_s) for view in jobs]
    return jobs


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=12),
    weights=st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12),
    seed=st.integers(0, 1000),
)
def test_the_oldest_that_is_due_runs(sizes, weights, seed):
    ages = np.random.default_rng(seed).uniform(4000.0, 90000.0, len(sizes))
    jobs = [
        rigid(f"j{i}", size, weight=weight, submitted_s=-age)
        for i, (size, weight, age) in enumerate(zip(sizes, weights, ages, strict=False))
    ]
    problem, policy = ShapeProblem.of(jobs, EIGHT, 0.0), Goodput()
    turns = due(problem, policy.guaranteed, policy.patience_s)
    decision = policy(jobs, EIGHT, 0.0)
    for first in sorted(np.flatnonzero(turns.due), key=lambda i: (-turns.waited_s[i], -ages[i]))[
        :1
    ]:
        oldest = jobs[first].spec.id
        assert oldest in decision.allocations
        why = decision.reasons[oldest]
        assert "guaranteed share" in why or "its turn" in why


@settings(max_examples=50, deadline=None)
@given(
    left_s=st.floats(10.0, 1e6),
    age_s=st.floats(4000.0, 1e6),
    others=st.integers(1, 30),
    is_told=st.booleans(),
)
def test_a_job_is_due_once_it_could_no_longer_end_in_time(left_s, age_s, others, is_told):
    """Told or guessed from jobs that all used as much; in time is as with the guaranteed share."""
    guess = Experience([EndedJob("a.py", "ana", 8, 8 * left_s)] * 400).guess("a.py", "ana", 8)
    known: Any = {"remaining": 8 * left_s} if is_told else {"work_guess": guess}
    job = rigid("j", 8, submitted_s=-age_s, **known)
    jobs = [job, *(rigid(f"o{i}", 8) for i in range(others))]
    policy = Goodput()
    found = due(ShapeProblem.of(jobs, EIGHT, 0.0), policy.guaranteed, policy.patience_s)
    in_time_s = left_s * (1 + others) / policy.guaranteed
    slack = 1.0 if is_told else 1.2  # what is guessed is known on a grid
    if age_s + left_s < in_time_s / slack:
        assert not found.behind[0]
    elif age_s + left_s > in_time_s * slack:
        assert found.behind[0]


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 1, 1, 2, 4, 8]), min_size=4, max_size=16),
    seed=st.integers(0, 1000),
)
def test_everybody_gets_the_guaranteed_share(sizes, seed):
    weights = np.random.default_rng(seed).uniform(0.2, 5.0, len(sizes))
    jobs = [
        rigid(f"j{i}", n, weight=float(w))
        for i, (n, w) in enumerate(zip(sizes, weights, strict=True))
    ]
    rounds, span_s = 100, 900.0
    done = go_on(jobs, EIGHT, Goodput(), rounds, span_s)
    for view, size in zip(done, sizes, strict=True):
        part = min(
            view.spec.weight * 8 / sum(j.spec.weight * n for j, n in zip(jobs, sizes, strict=True)),
            1.0,
        )
        ran = sum(view.fraction_received_s.values()) / (rounds * span_s)
        # A quarter of an equal part, but for the wait at the beginning and for those before it.
        assert ran > 0.2 * part, (view.spec.id, size)


@pytest.mark.parametrize("guaranteed", [0.25, 0.0])
def test_a_gang_among_many_small_jobs_starts(guaranteed):
    gang, now_s, given = rigid("gang", 8), 0.0, {}
    for turn in range(30):  # newcomers every 10 minutes, more than there are devices
        now_s = 600.0 * turn
        young = [rigid(f"y{turn}-{i}", 1, submitted_s=now_s - 30.0 * i) for i in range(12)]
        given = Goodput(guaranteed=guaranteed)([gang, *young], EIGHT, now_s).allocations
        if "gang" in given:
            break
    assert ("gang" in given) == (guaranteed > 0)
    if guaranteed:
        assert now_s <= 2 * 3600.0


def test_a_quota_bounds_what_is_guaranteed():
    cluster = dataclasses.replace(EIGHT, quota={"default": 4})
    jobs = [rigid(f"j{i}", 4, cluster, submitted_s=-9000.0 - i) for i in range(2)]
    given = Goodput()(jobs, cluster, 0.0).allocations
    assert list(given) == ["j1"]


@given(running=st.integers(6, 15), waited_s=st.floats(0.0, 7000.0))
def test_a_paused_job_is_due_soon_unless_many_more_want_devices_than_there_are(running, waited_s):
    """Single-device jobs on 8 devices: up to 12 of them, a pause ends within 1,800 s and a round."""
    others = [
        rigid(
            f"j{i}",
            1,
            allocation=Allocation(devices={f"n{i // 4}": (i % 4,)}) if i < 8 else Allocation(),
            since_s=-100.0 if i < 8 else None,
            fraction_received_s={"k": 1e6},
            submitted_s=-100.0,
        )
        for i in range(running)
    ]
    paused = rigid(
        "paused",
        1,
        submitted_s=-1e5,
        paused_s=-waited_s,
        received_s={"k": 9e4},
        fraction_received_s={"k": 9e4},
    )
    problem = ShapeProblem.of([*others, paused], EIGHT, 0.0)
    is_due = bool(due(problem, 0.25, 3600.0).due[-1])
    assert is_due == (waited_s > 1440.0 and running + 1 <= 12)
    if is_due and running >= 8:
        reasons = Goodput()([*others, paused], EIGHT, 0.0).reasons
        assert f": its turn, after {waited_s:.0f} s without devices" in reasons["paused"]
        assert sum("; it is the turn of paused" in reason for reason in reasons.values()) == 1
    # While restarts take long, a pause is no longer than they are worth.
    slow = [dataclasses.replace(v, restart_s=300.0) for v in (*others, paused)]
    is_due = bool(due(ShapeProblem.of(slow, EIGHT, 0.0), 0.25, 3600.0).due[-1])
    assert is_due == (waited_s > 6000.0 and running + 1 <= 12)
    # One that never ran waits for its first turn as before.
    new = dataclasses.replace(
        paused, paused_s=None, received_s={}, fraction_received_s={}, submitted_s=-waited_s
    )
    problem = ShapeProblem.of([*others, new], EIGHT, 0.0)
    assert not due(problem, 0.25, 3600.0).waited_s.any()


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=12),
    patience_s=st.sampled_from([600.0, 3600.0]),
)
def test_a_turn_falls_due_at_its_time_and_not_at_the_plan_after_it(sizes, patience_s):
    """Plans may be a quarter of an hour apart."""
    most_s = 2.0 * max(sum(sizes) / 8, 1.0) * patience_s

    def waited_s(age_s):
        jobs = [rigid(f"j{i}", size, submitted_s=-age_s) for i, size in enumerate(sizes)]
        return due(ShapeProblem.of(jobs, EIGHT, 0.0), 1e-6, patience_s).waited_s

    assert (waited_s(most_s) == most_s).all()
    assert not waited_s(most_s - 1.0).any()
