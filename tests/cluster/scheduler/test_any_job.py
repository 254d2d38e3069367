"""Any job runs or is refused at once: without a table, of any size, on any nodes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import cluster_of, job_recipes, nodes

from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import own_shapes, packed, shapes
from jaxgoodput.specs import ClusterSpec, JobSpec, Node

EIGHT = ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=8),))
# Baselines that know neither kinds nor levels, and policies for gangs of one device.
GENERAL = {
    name: entry
    for name, entry in catalogue().items()
    if not entry.one_kind and not entry.sharing and entry.largest_gang is None
}


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_a_rigid_job_needs_no_table(name, size):
    job = JobView(spec=JobSpec(id="x", mode="rigid", num_devices=size))
    plan = reconcile([job], EIGHT, GENERAL[name].policy, 60.0)
    assert plan.allocations["x"].num_devices == size, plan.reasons


@pytest.mark.parametrize(("least", "most"), [(3, 3), (5, 7), (1, 3), (7, 64)])
@pytest.mark.parametrize("mode", ["adaptive", "elastic"])
def test_sizes_between_a_jobs_limits_are_offered(mode, least, most):
    job = JobView(spec=JobSpec(id="x", mode=mode, min_devices=least, max_devices=most))
    plan = reconcile([job], EIGHT, Goodput(), 0.0)
    assert plan.allocations["x"].num_devices == min(most, 8), plan.reasons


@settings(max_examples=60, deadline=None)
@given(nodes(), job_recipes())
def test_a_job_that_is_alone_runs_or_waits_for_nodes_or_is_refused(recipe, recipes):
    cluster = cluster_of(recipe)
    up = tuple(dataclasses.replace(node, state="up") for node in cluster.nodes)
    whole = dataclasses.replace(cluster, nodes=up)
    for fields in recipes:
        spec = JobSpec(id="x", **{k: v for k, v in fields.items() if k != "restart_s"})
        now, later = (reconcile([JobView(spec=spec)], c, Goodput(), 0.0) for c in (cluster, whole))
        runs, could = (bool(plan.allocations["x"].devices) for plan in (now, later))
        assert could or not runs
        said = now.reasons["x"]
        assert said.startswith("waits: for nodes that are down or draining: ") == (
            could and not runs
        ), said
        assert said.startswith("refused: ") == (not could), said


@settings(max_examples=200, deadline=None)
@given(
    usable=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    num_devices=st.integers(1, 40),
)
def test_a_packed_shape_is_on_the_fewest_nodes_that_hold_it(usable, num_devices):
    shape = packed("a", num_devices, 8, usable)
    if num_devices > sum(usable):
        assert shape is None
    if shape is not None:
        largest = sorted(usable, reverse=True)
        assert num_devices <= sum(largest[: shape.num_nodes])
        # An even spread may need one node more than the devices alone.
        assert shape.num_nodes == 1 or num_devices > sum(largest[: shape.num_nodes - 2])


def test_sizes_that_are_powers_of_two_add_none():
    assert own_shapes(EIGHT, JobSpec(id="x", min_devices=2, max_devices=8)) <= set(shapes(EIGHT))


def test_processes_of_several_devices_are_not_split():
    spec = JobSpec(id="x", mode="elastic", min_devices=6, max_devices=12)
    two = ClusterSpec(nodes=(*EIGHT.nodes, dataclasses.replace(EIGHT.nodes[0], name="m")))
    plan = reconcile([JobView(spec=spec, devices_per_process=3)], two, Goodput(), 0.0)
    assert plan.allocations["x"].num_devices == 6  # 12 would be 8 and 4


@pytest.mark.parametrize(("size", "each"), [(12, 1), (7, 2)])
def test_a_refusal_speaks_of_nodes_and_not_of_a_table_that_was_not_given(size, each):
    nodes = tuple(Node(name=f"n{i}", kind="a", num_devices=8, withheld=(0, 1)) for i in range(2))
    job = JobView(spec=JobSpec(id="x", mode="rigid", num_devices=size), devices_per_process=each)
    plan = reconcile([job], ClusterSpec(nodes=nodes), Goodput(), 0.0)
    assert plan.reasons["x"] == (
        f"refused: no nodes of one kind hold whole processes on {size} devices, "
        "and the cluster has 12 a in service"
    )
