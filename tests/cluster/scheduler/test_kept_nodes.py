"""A job that waits for devices of jobs that may not be stopped gets them in the end, and explain names it."""

import dataclasses

import pytest
from worlds import Fifo

from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node

TWO = ClusterSpec(nodes=tuple(Node(name=f"n{i}", kind="a", num_devices=4) for i in range(2)))
STEP_S, WORK_S = 600.0, 2400.0


def single(name: str, now_s: float, **fields) -> JobView:
    spec = JobSpec(id=name, mode="rigid", num_devices=1, **fields)
    return JobView(spec=spec, submitted_s=now_s)


def first_start(policy, cluster, gang, hours, **fields) -> float | None:
    """When a gang starts in a stream of single-device jobs of 40 minutes, three of which always wait."""
    jobs, left, number = {gang.spec.id: gang}, {}, 0
    for turn in range(int(hours * 3600 / STEP_S)):
        now_s = turn * STEP_S
        while sum(not v.allocation.devices for v in jobs.values()) < 4:
            view = single(f"s{number}", now_s, **fields)
            jobs[view.spec.id], left[view.spec.id], number = view, WORK_S, number + 1
        plan = reconcile(list(jobs.values()), cluster, policy, now_s)
        if plan.allocations[gang.spec.id].devices:
            return now_s
        for id_, view in list(jobs.items()):
            given = plan.allocations[id_]
            began = given.devices and not view.allocation.devices
            jobs[id_] = dataclasses.replace(
                view, allocation=given, since_s=now_s if began else view.since_s
            )
            if given.devices:
                left[id_] -= STEP_S
                if left[id_] <= 0.0:
                    del jobs[id_]
    return None


@pytest.mark.parametrize("fields", [{"preemptible": False}, {"min_run_s": 1e6}])
@pytest.mark.parametrize("size", [4, 8])
def test_a_gang_starts_in_a_stream_of_jobs_that_may_not_be_stopped(fields, size):
    gang = JobView(spec=JobSpec(id="gang", mode="rigid", num_devices=size))
    start_s = first_start(Goodput(), TWO, gang, 6.0, **fields)
    # An hour of patience, and what the last ones that began before take.
    assert start_s is not None and start_s <= 3600.0 + WORK_S + 2 * STEP_S


@pytest.mark.parametrize("kept", [True, False])
def test_no_nodes_are_kept_for_a_job_that_waits_for_something_else(kept):
    cluster = dataclasses.replace(TWO, quota={} if kept else {"t": 1})
    held = dataclasses.replace(
        single("held", 0.0, preemptible=False),
        allocation=Allocation(devices={"n0": (0,)}),
        since_s=0.0,
    )
    gang = JobView(spec=JobSpec(id="gang", mode="rigid", num_devices=8, tenant="t"))
    other = single("other", 19_000.0, preemptible=False)
    plan = reconcile([held, gang, other], cluster, Goodput(), 20_000.0)
    assert bool(plan.allocations["other"].devices) is not kept


def test_nodes_are_kept_whatever_the_policy():
    gang = JobView(spec=JobSpec(id="gang", mode="rigid", num_devices=8))
    assert first_start(Fifo(), TWO, gang, 6.0, preemptible=False) is not None


def world(now_s: float) -> list[JobView]:
    held = dataclasses.replace(
        single("holds", 0.0, preemptible=False),
        allocation=Allocation(devices={"n0": (0,)}),
        since_s=0.0,
    )
    gang = JobView(spec=JobSpec(id="gang", mode="rigid", num_devices=8))
    return [held, gang, single("new", now_s, preemptible=False)]


def test_devices_that_are_kept_are_explained():
    jobs = world(5000.0)
    plan = reconcile(jobs, TWO, Goodput(), 5000.0)
    assert not plan.allocations["gang"].devices and not plan.allocations["new"].devices
    assert "n0, n1 are kept for 'gang', which has waited 1.4 h" in plan.reasons["new"]
    assert "are kept for 'gang'" in plan.reasons["gang"]
    for id_ in ("gang", "new"):
        said = explain(id_, jobs, TWO, Goodput(), 5000.0, plan=plan)
        assert "'gang'" in said.message or said.constraint == "minimum run time", said
    said = explain("new", jobs, TWO, Goodput(), 5000.0, plan=plan)
    assert said.constraint == "kept nodes"
    assert said.changes[0] == "the start or the end of 'gang'"
    without = [v for v in jobs if v.spec.id != "gang"]
    assert reconcile(without, TWO, Goodput(), 5000.0).allocations["new"].devices


def test_jobs_that_may_be_stopped_start_on_kept_nodes():
    jobs = [*world(5000.0), single("free", 5000.0)]
    plan = reconcile(jobs, TWO, Goodput(), 5000.0)
    assert plan.allocations["free"].devices and not plan.allocations["new"].devices


def test_nothing_is_kept_before_the_patience_ends():
    jobs = world(1000.0)
    assert reconcile(jobs, TWO, Goodput(), 1000.0).allocations["new"].devices
