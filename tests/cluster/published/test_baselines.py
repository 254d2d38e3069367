"""What the baselines do, on clusters small enough to reason about."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.published.baselines import Optimus, Static, Tiresias
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import check_decision
from jaxgoodput.cluster.simulate.jobs.job import every_size
from jaxgoodput.cluster.simulate.simulator import uniform_cluster
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node

CLUSTER = uniform_cluster("a", 4, 4)
SHAPES = every_size([("a", 4, 4)])


def rigid(name, size, *, at=0.0, served=0.0, allocation=None):
    return JobView(
        spec=JobSpec(id=name, mode="rigid", num_devices=size, min_devices=size, max_devices=size),
        submitted_s=at,
        received_s={"a": served},
        allocation=allocation or Allocation(),
    )


def elastic(
    name, *, per_device=1.0, fixed=0.1, remaining: float | None = 100.0, most=16, allocation=None
):
    """A job whose step takes fixed + work / devices."""
    goodput = {s: 1 / (fixed + per_device / s.num_devices) for s in SHAPES}
    return JobView(
        spec=JobSpec(id=name, mode="elastic", max_devices=most),
        goodput=goodput,
        remaining=remaining,
        allocation=allocation or Allocation(),
    )


def sizes(decision):
    return {name: a.num_devices for name, a in decision.allocations.items()}


def test_tiresias_serves_in_order_of_arrival_what_fits():
    jobs = [rigid("c", 8, at=3.0), rigid("a", 12, at=1.0), rigid("b", 8, at=2.0)]
    jobs.append(rigid("d", 4, at=4.0))
    decision = Tiresias()(jobs, CLUSTER, 10.0)
    assert sizes(decision) == {"a": 12, "d": 4}
    assert set(decision.reasons) == {"a", "b", "c", "d"}
    assert "do not fit into the 4" in decision.reasons["b"]


def test_tiresias_preempts_what_had_its_share():
    had = Allocation(devices={"a-000": (0, 1, 2, 3), "a-001": (0, 1, 2, 3)})
    old = rigid("old", 8, at=0.0, served=16 * 3600.0, allocation=had)
    new = rigid("new", 12, at=9.0)
    assert sizes(Tiresias()([old, new], CLUSTER, 10.0)) == {"new": 12}
    young = rigid("old", 8, at=0.0, served=16 * 3600.0 - 1, allocation=had)
    decision = Tiresias()([young, new], CLUSTER, 10.0)
    assert decision.allocations == {"old": had}


def test_a_job_that_keeps_its_size_keeps_its_devices_and_others_go_to_the_emptiest_nodes():
    had = Allocation(devices={"a-001": (0, 1)}, generation=3)
    jobs = [rigid("new", 2, at=0.0), rigid("old", 2, at=1.0, allocation=had), rigid("big", 6)]
    decision = Tiresias()(jobs, CLUSTER, 0.0)
    assert decision.allocations["old"] == had
    assert decision.allocations["new"].devices == {"a-000": (0, 1)}
    assert decision.allocations["big"].devices == {"a-002": (0, 1, 2, 3), "a-003": (0, 1)}


def test_optimus_gives_each_device_to_the_largest_gain():
    jobs = [elastic("long", remaining=1000.0), elastic("short", remaining=10.0)]
    got = sizes(Optimus()(jobs, CLUSTER, 0.0))
    assert got["long"] > got["short"] >= 1 and sum(got.values()) == 16

    def gain(job, k):
        return (1 / (1 + k) - 1 / (2 + k)) * job.remaining  # from k + 1 to k + 2 devices

    # Greedy is optimal for convex times: no device would save more elsewhere.
    for one, other in ((jobs[0], jobs[1]), (jobs[1], jobs[0])):
        k, m = got[one.spec.id], got[other.spec.id]
        if m > 1:
            assert gain(other, m - 2) >= gain(one, k - 1) - 1e-9


def test_optimus_stops_at_the_limits_and_where_nothing_is_saved():
    assert sizes(Optimus()([elastic("a", most=3)], CLUSTER, 0.0)) == {"a": 3}
    assert sizes(Optimus()([elastic("a", per_device=0.0)], CLUSTER, 0.0)) == {"a": 1}


def test_optimus_leaves_out_the_last_jobs_where_devices_are_short():
    jobs = [elastic(f"j{i}") for i in range(20)]
    decision = Optimus()(jobs, CLUSTER, 0.0)
    assert sizes(decision) == {f"j{i}": 1 for i in range(16)}
    assert "no device left" in decision.reasons["j19"]


def test_optimus_gives_a_job_of_unknown_work_its_least_and_plans_for_the_others():
    decision = Optimus()([elastic("a", remaining=None), elastic("b")], CLUSTER, 0.0)
    assert sizes(decision)["a"] == 1 < sizes(decision)["b"]
    assert "does not declare" in decision.reasons["a"]


def test_static_never_moves_a_job_and_lets_nobody_overtake():
    had = Allocation(devices={"a-002": (1, 2)})
    jobs = [
        rigid("late", 1, at=9.0),
        rigid("wide", 16, at=5.0),
        rigid("runs", 2, at=7.0, allocation=had),
    ]
    decision = Static()(jobs, CLUSTER, 10.0)
    assert decision.allocations == {"runs": had}
    assert "waits for 16" in decision.reasons["wide"]
    assert sizes(Static()([jobs[0], jobs[2]], CLUSTER, 10.0)) == {"runs": 2, "late": 1}


def test_static_takes_the_size_that_the_user_would_pick():
    job = JobView(spec=JobSpec(id="x", max_devices=4), rigid_shape_hint=8)
    assert sizes(Static()([job], CLUSTER, 0.0)) == {"x": 4}


@pytest.mark.parametrize("policy", [Tiresias(), Optimus(), Static()])
def test_several_kinds_are_refused(policy):
    nodes = (Node(name="x", kind="a", num_devices=4), Node(name="y", kind="b", num_devices=4))
    with pytest.raises(ValueError, match=r"one kind of device only, but the cluster has a, b"):
        policy([], ClusterSpec(nodes=nodes), 0.0)


@given(st.data())
def test_every_answer_can_be_carried_out(data):
    states = data.draw(st.lists(st.sampled_from(["up", "up", "down"]), min_size=1, max_size=4))
    withheld = data.draw(st.sampled_from([(), (0,), (1, 2)]))
    cluster = ClusterSpec(
        nodes=tuple(
            Node(name=f"a-{i:03d}", kind="a", num_devices=4, state=state, withheld=withheld)
            for i, state in enumerate(states)
        )
    )
    count = data.draw(st.integers(0, 8))
    wanted = [data.draw(st.sampled_from([1, 2, 3, 4, 6])) for _ in range(count)]
    rigid_jobs = [rigid(f"j{i}", size) for i, size in enumerate(wanted)]
    elastic_jobs = [elastic(f"j{i}", remaining=float(10 + size)) for i, size in enumerate(wanted)]
    for policy, jobs in (
        (Tiresias(), rigid_jobs),
        (Static(), rigid_jobs),
        (Optimus(), elastic_jobs),
    ):
        first = policy(jobs, cluster, 0.0)
        check_decision(first, jobs, cluster, type(policy).__name__)
        assert policy(jobs, cluster, 0.0) == first
        assert set(first.reasons) == {job.spec.id for job in jobs}
