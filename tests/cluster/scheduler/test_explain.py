"""What explain says is true: what it names as the remedy makes the job run."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from worlds import Fifo, cluster_of, job_recipes, jobs_of, nodes, table

from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Reservation

TWO = ClusterSpec(
    nodes=tuple(
        Node(name=f"n{i}", kind="a", num_devices=4, labels={"rack": f"r{i}"}) for i in range(2)
    )
)
LARGE = ClusterSpec(nodes=tuple(Node(name=f"n{i}", kind="a", num_devices=4) for i in range(16)))


def view(id_: str, *, submitted_s: float = 0.0, devices: dict | None = None, **spec) -> JobView:
    return JobView(
        spec=JobSpec(id=id_, **spec),
        goodput=table(LARGE),
        submitted_s=submitted_s,
        allocation=Allocation(devices=devices or {}),
        since_s=0.0 if devices else None,
    )


def with_more(cluster: ClusterSpec, kind: str, count: int) -> ClusterSpec:
    """As explain promises: whole nodes of the kind, and a rest on one node."""
    size = max(n.num_devices for n in cluster.nodes if n.kind == kind and n.state != "down")
    sizes = [size] * (count // size) + [count % size] * (count % size > 0)
    more = (
        Node(name=f"extra{i}", kind=kind, num_devices=s, labels={"rack": "extra"})
        for i, s in enumerate(sizes)
    )
    return dataclasses.replace(cluster, nodes=(*cluster.nodes, *more))


@settings(max_examples=40, deadline=None)
@given(nodes(), job_recipes())
def test_the_devices_that_it_names_make_the_job_run(nodes, recipes):
    cluster = cluster_of(nodes)
    jobs = jobs_of(recipes, cluster)
    plan = reconcile(jobs, cluster, Fifo(), 0.0)
    for job in jobs:
        said = explain(job.spec.id, jobs, cluster, Fifo(), 0.0, plan=plan)
        assert (said.constraint == "none") == bool(plan.allocations[job.spec.id].devices)
        reason = plan.reasons[job.spec.id]
        assert (said.constraint == "refused") == reason.startswith("refused")
        waits = reason.startswith("waits: for nodes that are down or draining: ")
        assert (said.constraint == "nodes") == waits
        assert said.message
        if said.constraint == "capacity":
            assert said.devices and said.changes
        for kind, count in said.devices.items():
            larger = reconcile(jobs, with_more(cluster, kind, count), Fifo(), 0.0)
            assert larger.allocations[job.spec.id].devices


def test_a_job_that_runs_needs_no_change():
    said = explain("x", [view("x")], TWO, Fifo(), 0.0)
    assert said.constraint == "none" and said.message == "gets 1 a by Fifo" and not said.changes


def test_capacity_counts_the_jobs_that_come_first():
    jobs = [view(f"j{i}", submitted_s=float(i), min_devices=4) for i in range(4)]
    third, fourth = (explain(j, jobs, TWO, Fifo(), 0.0) for j in ("j2", "j3"))
    assert third.constraint == fourth.constraint == "capacity"
    assert third.devices == {"a": 4} and fourth.devices == {"a": 8}
    assert "4 more a" in third.changes and "all devices of kind a" in third.message


def test_a_smaller_minimum():
    jobs = [view("first", min_devices=4), view("x", submitted_s=1.0, min_devices=8)]
    said = explain("x", jobs, TWO, Fifo(), 0.0)
    assert said.constraint == "minimum size"
    assert said.changes == ("min_devices=4", "4 more a") and said.devices == {"a": 4}


def test_quota():
    cluster = dataclasses.replace(TWO, quota={"poor": 1})
    jobs = [view("first", tenant="poor"), view("x", submitted_s=1.0, tenant="poor", min_devices=2)]
    said = explain("x", jobs, cluster, Fifo(), 0.0)
    assert said.constraint == "quota" and said.changes[0] == "a quota of 3 for 'poor'"
    assert not said.devices


def test_reservation():
    cluster = dataclasses.replace(
        TWO,
        reservations=(
            Reservation(node="n0", num_devices=4, start_s=0.0, end_s=60.0, tenant="red"),
        ),
    )
    jobs = [view("first", min_devices=4), view("x", submitted_s=1.0, mode="rigid", num_devices=4)]
    said = explain("x", jobs, cluster, Fifo(), 10.0)
    assert said.constraint == "reservation"
    assert said.changes[0] == "the end of the reservation of 4 devices on n0 at 60 s"


def test_topology_level():
    said = explain("x", [view("x", min_devices=8, level="rack")], TWO, Fifo(), 0.0)
    assert said.constraint == "refused" and "no domain of level 'rack'" in said.message
    assert said.changes[0] == "no requirement of one 'rack'"


def test_minimum_run_time_of_others():
    young = view(
        "young", devices={"n0": (0, 1, 2, 3)}, submitted_s=5.0, min_run_s=100.0, min_devices=4
    )
    also = view(
        "also", devices={"n1": (0, 1, 2, 3)}, submitted_s=6.0, preemptible=False, min_devices=4
    )
    said = explain("x", [young, also, view("x", mode="rigid", num_devices=4)], TWO, Fifo(), 50.0)
    assert said.constraint == "minimum run time" and said.devices == {"a": 4}


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        ({"kinds": ("vapor",)}, "allowing other kinds of devices"),
        ({"min_devices": 32}, "min_devices=8"),
    ],
)
def test_refusals_come_with_a_remedy(spec, change):
    said = explain("x", [view("x", **spec)], TWO, Fifo(), 0.0)
    assert said.constraint == "refused" and change in said.changes


@pytest.mark.parametrize("states", list(itertools.product(("up", "down", "draining"), repeat=2)))
def test_jobs_wait_for_nodes_that_may_come_back(states):
    nodes = (dataclasses.replace(n, state=s) for n, s in zip(TWO.nodes, states, strict=True))
    broken = dataclasses.replace(TWO, nodes=tuple(nodes))
    said = explain("x", [view("x", mode="rigid", num_devices=8)], broken, Fifo(), 0.0)
    away = 4 * sum(state != "up" for state in states)
    if not away:
        assert said.constraint == "none"
    else:
        assert said.constraint == "nodes" and said.message.startswith("waits: ")
        assert f"the return of nodes that are down or draining ({away} a)" in said.changes


@dataclasses.dataclass(frozen=True)
class Heaviest:
    """Runs only the job of the greatest weight; ready to switch only where restarts are cheap."""

    def __call__(self, jobs, cluster, now_s):
        best = max(jobs, key=lambda v: (v.spec.weight, v.spec.id))
        for v in jobs:
            if v.allocation.devices and v.restart_s > 0 and best.spec.weight <= 2 * v.spec.weight:
                best = v
        return Fifo()([best], cluster, now_s)


def test_price_of_switching_and_utility():
    old = view("old", devices={"n0": (0,)})
    said = explain("x", [old, view("x")], TWO, Heaviest(), 0.0)
    assert said.constraint == "price of switching"
    assert "a weight of 4 instead of 1" in said.changes
    said = explain("x", [old, view("old2", weight=3.0), view("x")], TWO, Heaviest(), 0.0)
    assert said.constraint == "utility" and said.changes == ("a weight of 4 instead of 1",)
    assert "Heaviest leaves devices idle that it could use" in said.message
    full = [old, view("old2", weight=3.0, devices={"n0": (1, 2, 3), "n1": (0, 1, 2, 3)})]
    plan = reconcile([*full, view("x")], TWO, Everything(), 0.0)
    said = explain("x", [*full, view("x")], TWO, Everything(), 0.0, plan=plan)
    assert said.constraint == "utility"
    assert "Everything finds the devices of more use to others" in said.message


@dataclasses.dataclass(frozen=True)
class Everything:
    """Lets every job keep what it has, and starts none."""

    def __call__(self, jobs, cluster, now_s):
        return Decision(allocations={v.spec.id: v.allocation for v in jobs if v.allocation.devices})


def test_a_job_that_nothing_helps_is_told_so():
    @dataclasses.dataclass(frozen=True)
    class Nothing:
        def __call__(self, jobs, cluster, now_s):
            return Decision(allocations={})

    said = explain("x", [view("x")], TWO, Nothing(), 0.0)
    assert said.constraint == "utility" and said.changes == () and said.devices == {}


def test_an_unknown_job_is_an_error():
    with pytest.raises(ValueError, match="no job 'y' among the 1"):
        explain("y", [view("x")], TWO, Fifo(), 0.0)
