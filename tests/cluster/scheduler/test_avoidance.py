"""Nodes that jobs avoid: they leave them if they can run elsewhere, and no other job loses anything."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Fifo, after, check_plan, cluster_of, job_recipes, jobs_of, nodes, table

from jaxgoodput.cluster.scheduler import (
    Decision,
    Goodput,
    JobView,
    Sia,
    capacity,
    explain,
    place,
    reconcile,
    shape_of,
)
from jaxgoodput.cluster.scheduler.constraints import constraints_of, offered_devices
from jaxgoodput.cluster.scheduler.policy import AvoidedNode
from jaxgoodput.cluster.scheduler.shapes import takes
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape

SLOW, BROKEN = AvoidedNode(until_s=900.0), AvoidedNode(until_s=900.0, is_usable=False)
POLICIES = {"fifo": Fifo(), "goodput": Goodput(), "sia": Sia()}


def five(num_devices=1, count=5):
    return ClusterSpec(
        nodes=tuple(Node(name=f"n{i}", kind="a", num_devices=num_devices) for i in range(count))
    )


def view(id_, cluster, devices=None, avoids=None, **spec):
    fields: dict[str, Any] = {"min_devices": 1, "max_devices": 4, **spec}
    held = Allocation(devices={name: (0,) for name in devices or ()}, generation=3)
    return JobView(
        spec=JobSpec(id=id_, **fields),
        goodput=table(cluster),
        allocation=held,
        since_s=0.0 if devices else None,
        largest_profiled=4,
        avoids=avoids or {},
    )


def free_of(plan, cluster):
    """The devices that a plan gives to no job, by node."""
    free = offered_devices(cluster)
    for allocation in plan.allocations.values():
        for name, local in allocation.devices.items():
            free.get(name, set()).difference_update(local)
    return free


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(nodes=nodes(), recipes=job_recipes(), data=st.data())
def test_a_slow_node_starves_no_job_a_broken_one_is_not_used_and_others_lose_nothing(
    name, nodes, recipes, data
):
    policy, cluster = POLICIES[name], cluster_of(nodes)
    jobs = after(
        reconcile(jobs_of(recipes, cluster), cluster, policy, 0.0), jobs_of(recipes, cluster), 0.0
    )
    kinds = st.sampled_from([None, None, SLOW, BROKEN])
    drawn = {view.spec.id: {n.name: data.draw(kinds) for n in cluster.nodes} for view in jobs}
    avoiding = tuple(
        dataclasses.replace(
            view, avoids={n: one for n, one in drawn[view.spec.id].items() if one is not None}
        )
        for view in jobs
    )
    now_s = data.draw(st.sampled_from([50.0, 500.0]))
    plain = reconcile(jobs, cluster, policy, now_s)
    plan = reconcile(avoiding, cluster, policy, now_s)
    assert plan == reconcile(avoiding, cluster, policy, now_s)
    check_plan(plan, avoiding, cluster)
    held = constraints_of(avoiding, cluster, now_s).held
    kind_of, free = {n.name: n.kind for n in cluster.nodes}, free_of(plan, cluster)
    for view in avoiding:
        id_ = view.spec.id
        given, had = plan.allocations[id_].devices, plain.allocations[id_].devices
        if id_ in held:
            assert given == had
            continue
        used = {n: view.avoids[n] for n in given if n in view.avoids}
        assert all(one.is_usable for one in used.values())
        if had and all(one.is_usable for one in view.avoids.values()):
            assert given, "slow is better than nothing"
        if had and not view.avoids:
            assert sum(map(len, given.values())) == sum(map(len, had.values()))
            if had == view.allocation.devices:
                assert given == had, "what runs elsewhere stays as it is"
        if not used or not set(had) & set(view.avoids):
            continue
        rest = {n: local for n, local in given.items() if n not in used}
        shape = shape_of(rest, kind_of) if rest else None
        assert shape is None or not takes(view.spec, shape) or not view.goodput.get(shape)
        if view.spec.level is None and len(used) == 1:
            ((slow, _),) = used.items()
            assert not [
                node.name
                for node in cluster.nodes
                if node.kind == kind_of[slow] and node.state == "up" and node.name not in given
                if node.name not in view.avoids
                and len(free[node.name]) >= len(given[slow])
                # Devices that another job gave up may have been offered to this one last.
                and had
            ]


def test_a_free_node_replaces_the_slow_one_and_the_others_stay():
    cluster = five()
    job = view("x", cluster, ["n0", "n1", "n2", "n3"], {"n2": SLOW})
    plan = reconcile([job], cluster, Goodput(), 100.0)
    assert set(plan.allocations["x"].devices) == {"n0", "n1", "n3", "n4"}
    assert "n4 replaces n2" in plan.reasons["x"] and plan.resize == ("x",)
    moved = dataclasses.replace(job, allocation=plan.allocations["x"])
    again = reconcile([moved], cluster, Goodput(), 200.0)
    assert again.allocations["x"] is moved.allocation
    over = dataclasses.replace(moved, avoids={})
    assert reconcile([over], cluster, Goodput(), 1000.0).allocations["x"] is moved.allocation


@pytest.mark.parametrize(
    "avoided, least, is_left, says",
    [
        (SLOW, 1, True, "does without n2, kept apart from it, as no other node is free"),
        (SLOW, 4, False, "uses n2, kept apart from it, because it could not run otherwise"),
        (BROKEN, 1, True, "does without n2"),
    ],
)
def test_without_a_free_node_a_job_does_without_it_or_keeps_a_slow_one(
    avoided, least, is_left, says
):
    cluster = five(count=4)
    job = view("x", cluster, ["n0", "n1", "n2", "n3"], {"n2": avoided}, min_devices=least)
    plan = reconcile([job], cluster, Goodput(), 100.0)
    wanted = {"n0", "n1", "n3"} | (set() if is_left else {"n2"})
    assert set(plan.allocations["x"].devices) == wanted
    assert says in plan.reasons["x"]


def test_a_job_that_can_run_only_on_a_node_of_no_use_waits_and_is_told_so():
    cluster = five(count=4)
    job = view("x", cluster, ["n0", "n1", "n2", "n3"], {"n2": BROKEN}, min_devices=4)
    plan = reconcile([job], cluster, Goodput(), 100.0)
    assert plan.pause == ("x",)
    assert plan.reasons["x"].startswith("waits: it cannot use n2 for now")
    found = explain("x", [job], cluster, Goodput(), 100.0)
    assert found.constraint == "avoided nodes" and "n2 cannot be used by it" in found.message
    assert "one of these nodes, in 800 s" in found.changes


@dataclasses.dataclass(frozen=True)
class Most:
    """Each job gets as many devices as it can, in order."""

    def __call__(self, jobs, cluster, now_s, /):
        wanted, left = {}, sum(capacity(cluster).values())
        for view in jobs:
            size = min(view.spec.max_devices, left)
            if size >= view.spec.min_devices:
                wanted[view.spec.id] = Shape("a", size, size)
                left -= size
        return Decision(allocations=place(wanted, jobs, cluster))


def test_what_one_job_gives_up_another_one_gets():
    cluster = five(count=4)
    first = view("x", cluster, ["n0", "n1", "n2", "n3"], {"n2": SLOW})
    second = view("y", cluster, max_devices=1)
    plan = reconcile([first, second], cluster, Most(), 100.0)
    assert set(plan.allocations["x"].devices) == {"n0", "n1", "n3"}
    assert set(plan.allocations["y"].devices) == {"n2"}
    jobs = after(plan, [first, second], 100.0)
    again = reconcile(jobs, cluster, Most(), 200.0)
    assert again.allocations == plan.allocations, "nothing moves back and forth"


def test_a_job_that_starts_anyway_takes_the_slow_node_of_one_that_runs():
    cluster = five(count=4)
    first = view("x", cluster, ["n0", "n1", "n2"], {"n2": SLOW}, min_devices=3, max_devices=3)
    second = view("y", cluster, max_devices=1)
    plan = reconcile([first, second], cluster, Most(), 100.0)
    assert set(plan.allocations["x"].devices) == {"n0", "n1", "n3"}
    assert set(plan.allocations["y"].devices) == {"n2"}
    runs = dataclasses.replace(second, allocation=Allocation(devices={"n3": (0,)}), since_s=0.0)
    plan = reconcile([first, runs], cluster, Most(), 100.0)
    assert set(plan.allocations["x"].devices) == {"n0", "n1", "n2"}, "a job that runs stays"


@pytest.mark.parametrize("size", [2, 4])
def test_a_part_of_a_node_moves_to_the_fullest_node_with_room(size):
    cluster = five(num_devices=8, count=3)
    job = dataclasses.replace(
        view("x", cluster, max_devices=size, min_devices=size),
        allocation=Allocation(devices={"n0": tuple(range(size))}, generation=1),
        since_s=0.0,
        avoids={"n0": SLOW},
    )
    other = dataclasses.replace(
        view("y", cluster, max_devices=2, min_devices=2, preemptible=False),
        allocation=Allocation(devices={"n2": (0, 1)}, generation=1),
        since_s=0.0,
    )
    plan = reconcile([job, other], cluster, Goodput(), 100.0)
    ((name, local),) = plan.allocations["x"].devices.items()
    assert name == "n2" and len(local) == size and local[0] % size == 0


def test_a_job_without_its_node_gets_fewer_devices_of_another():
    cluster = five(num_devices=8, count=2)
    job = dataclasses.replace(
        view("x", cluster, max_devices=8),
        allocation=Allocation(devices={"n0": tuple(range(8))}, generation=1),
        since_s=0.0,
        avoids={"n0": BROKEN},
    )
    other = dataclasses.replace(
        view("y", cluster, max_devices=4, min_devices=4, preemptible=False),
        allocation=Allocation(devices={"n1": (0, 1, 2, 3)}, generation=1),
        since_s=0.0,
    )
    plan = reconcile([job, other], cluster, Goodput(), 100.0)
    ((name, local),) = plan.allocations["x"].devices.items()
    assert name == "n1" and 1 <= len(local) <= 4 and not set(local) & {0, 1, 2, 3}
    check_plan(plan, [job, other], cluster)


def test_the_next_plan_comes_when_a_term_ends():
    cluster = five()
    job = view("x", cluster, ["n0"], {"n2": AvoidedNode(until_s=130.0)}, max_devices=1)
    plan = reconcile([job], cluster, Goodput(), 100.0, max_gap_s=math.inf)
    assert plan.next_solve_s == 130.0
