"""Deadlines that can be met are met, ahead of everybody else; others are named and starve nobody."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.published.baselines import EarliestDeadline
from jaxgoodput.cluster.scheduler import Goodput
from jaxgoodput.cluster.scheduler.policies.deadlines import deadlines_of
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.simulate import uniform_cluster
from jaxgoodput.specs import ClusterSpec, JobSpec, Node, Shape, Tenant

ROUND_S = 60.0


def view(name, left_s, deadline_s, sizes=(1,), power=1.0, **fields):
    """A job that takes so many seconds on its smallest size; k devices are k^power as fast."""
    least = sizes[0]
    spec = JobSpec(
        id=name,
        mode="elastic",
        min_devices=least,
        max_devices=sizes[-1],
        deadline_s=deadline_s,
    )
    goodput = {Shape("t4", 1, k): float(k / least) ** power for k in sizes}
    return JobView(
        spec=spec, goodput=goodput, remaining=left_s, restart_s=0.0, largest_profiled=1, **fields
    )


def finish(views, cluster, policy, *, rounds):
    """When each job ends, seconds: the plan of every round is carried out to the end of the round."""
    ends, now_s = {}, 0.0
    views = {v.spec.id: v for v in views}
    for _ in range(rounds):
        if not views:
            break
        plan = reconcile(list(views.values()), cluster, policy, now_s, min_gap_s=0.0)
        for name, old in list(views.items()):
            its = plan.allocations[name]
            assert old.remaining is not None
            rate = old.goodput[Shape("t4", its.num_nodes, its.num_devices)] if its.devices else 0.0
            if rate and old.remaining <= rate * ROUND_S:
                ends[name] = now_s + old.remaining / rate
                del views[name]
                continue
            same = its.devices == old.allocation.devices
            views[name] = dataclasses.replace(
                old,
                allocation=its,
                remaining=old.remaining - rate * ROUND_S,
                since_s=None if not its.devices else old.since_s if same else now_s,
                received_s={"t4": old.received_s.get("t4", 0.0) + its.num_devices * ROUND_S},
                fraction_received_s={
                    "t4": old.fraction_received_s.get("t4", 0.0) + bool(its.devices) * ROUND_S
                },
            )
        now_s += ROUND_S
    return ends


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    slack=st.floats(0.1, 2.0),
    others=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_on_one_device_whatever_can_be_met_is_met(lengths, slack, others, order):
    # In this order one after the other, each ends before its deadline; they are told in another order.
    ends = np.cumsum(lengths) * ROUND_S
    due = [
        view(f"d{i}", n * ROUND_S, float(end) * (1.0 + slack))
        for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    loose = [view(f"o{i}", 600.0, None) for i in range(others)]
    views = [*due, *loose]
    order.shuffle(views)
    done = finish(views, uniform_cluster("t4", 1, 1), Goodput(), rounds=sum(lengths) + 40)
    assert {v.spec.id for v in views} == set(done)
    late = {v.spec.id for v in due if done[v.spec.id] > v.spec.deadline_s}
    assert not late


def test_a_job_that_needs_all_of_the_cluster_for_its_deadline_gets_it_in_time():
    mine = view("mine", 8 * 900.0, 5400.0, sizes=(1, 2, 4, 8))
    others = [view(f"o{i}", 3600.0, None) for i in range(24)]
    done = finish([mine, *others], uniform_cluster("t4", 1, 8), Goodput(), rounds=400)
    assert done["mine"] <= 5400.0 and len(done) == 25


def test_a_deadline_that_is_far_away_takes_nothing_from_others():
    problem = ShapeProblem.of([view("a", 600.0, 36000.0)], uniform_cluster("t4", 1, 1), 0.0)
    assert not deadlines_of(problem).claims and not deadlines_of(problem).given_up


def test_a_job_grows_only_when_a_smaller_size_is_too_slow():
    cluster = uniform_cluster("t4", 1, 8)
    for deadline_s, devices in ((1300.0, 1), (900.0, 2), (700.0, 4)):
        job = view("a", 1000.0, deadline_s, sizes=(1, 2, 4, 8), power=0.5)
        (claim,) = deadlines_of(ShapeProblem.of([job], cluster, 0.0)).claims
        assert ShapeProblem.of([job], cluster, 0.0).devices[claim.shapes[0]] == devices


def test_of_too_many_the_one_that_needs_most_is_given_up_and_told():
    jobs = [view("short", 500.0, 1000.0), view("long", 800.0, 1100.0), view("mid", 550.0, 1200.0)]
    cluster = uniform_cluster("t4", 1, 1)
    plan = reconcile(jobs, cluster, Goodput(), 0.0)
    assert "cannot be met beside other deadlines" in plan.reasons["long"]
    assert "its deadline is in 1000 s" in plan.reasons["short"]
    done = finish(jobs, cluster, Goodput(), rounds=60)
    assert done["short"] <= 1000.0 and done["mid"] <= 1200.0 and "long" in done


def test_a_deadline_that_no_shape_meets_claims_nothing_and_is_told():
    hopeless = view("hopeless", 5000.0, 1000.0)
    cluster = uniform_cluster("t4", 1, 1)
    assert not deadlines_of(ShapeProblem.of([hopeless], cluster, 0.0)).claims
    plan = reconcile([hopeless], cluster, Goodput(), 0.0)
    assert "cannot be met: it needs 5000 s" in plan.reasons["hopeless"]


def test_a_deadline_that_the_offered_shapes_alone_miss_is_told():
    job = view("a", 1000.0, 700.0, sizes=(1, 2, 4))
    # Not more than it has run on yet.
    plan = reconcile([job], uniform_cluster("t4", 1, 4), Goodput(growth=1.0), 0.0)
    assert "its deadline in 700 s cannot be met on any offered shape" in plan.reasons["a"]
    assert "the fastest takes 1000 s" in plan.reasons["a"]


def test_what_a_tenant_may_not_have_pushes_nobody_out():
    """Two jobs of a tenant that may have one device; a third job could use the rest."""
    cluster = dataclasses.replace(
        uniform_cluster("t4", 1, 4), tenants=(Tenant(name="poor", limit=1),)
    )

    def of(tenant, job):
        return dataclasses.replace(job, spec=dataclasses.replace(job.spec, tenant=tenant))

    first = of("poor", view("first", 600.0, 1000.0))
    second = of("poor", view("second", 700.0, 1000.0))
    wide = of("poor", view("wide", 1000.0, 1100.0, sizes=(4,)))
    rich = of("rich", view("rich", 1100.0, 1300.0, sizes=(4,)))
    found = deadlines_of(ShapeProblem.of([first, second, wide, rich], cluster, 0.0))
    assert set(found.given_up) == {1}  # of the wide one its limit says already that it has no shape
    said = (
        "it needs 700 of the 1000 device-seconds that the limit of tenant 'poor', 1 devices, allows"
    )
    assert said in found.given_up[1]
    assert {claim.job for claim in found.claims} == {0, 3}


def test_a_limit_gives_up_its_own_before_anybody_elses():
    """At one deadline both the limit and the cluster are too small: one that it concerns makes room."""
    cluster = dataclasses.replace(
        uniform_cluster("t4", 1, 4), tenants=(Tenant(name="poor", limit=1),)
    )
    jobs = [view(name, 600.0, 1000.0) for name in ("p1", "p2")]
    jobs = [dataclasses.replace(j, spec=dataclasses.replace(j.spec, tenant="poor")) for j in jobs]
    jobs += [view("rich", 950.0, 1000.0, sizes=(2,)), view("rich1", 950.0, 1000.0)]
    found = deadlines_of(ShapeProblem.of(jobs, cluster, 0.0))
    assert len(found.given_up) == 1 and set(found.given_up) < {0, 1}


def test_a_budget_is_counted_on_what_costs_least():
    """The dear kind takes fewer device-seconds, but the cheap one is in time for less."""
    nodes = tuple(Node(name=kind, kind=kind, num_devices=4) for kind in ("a", "b"))
    cluster = ClusterSpec(
        nodes=nodes,
        price_per_hour={"a": 1.0, "b": 4.0},
        tenants=(Tenant(name="t", budget_per_hour=4.0),),
    )
    jobs = [
        JobView(
            spec=JobSpec(id=f"j{i}", tenant="t", deadline_s=1000.0, max_devices=1),
            goodput={Shape("a", 1, 1): 1.0, Shape("b", 1, 1): 2.5},
            remaining=900.0,
            largest_profiled=1,
        )
        for i in range(5)
    ]
    assert not deadlines_of(ShapeProblem.of(jobs[:3], cluster, 0.0)).given_up
    (why,) = deadlines_of(ShapeProblem.of(jobs, cluster, 0.0)).given_up.values()
    assert "it needs 0.25833 of the 1.1111 that the budget of tenant 't', 4 per hour, allows" in why


def test_who_must_run_and_finds_no_room_is_told():
    cluster = uniform_cluster("t4", 1, 4)
    tenants = (Tenant(name="sure", guaranteed=4),)
    cluster = dataclasses.replace(cluster, tenants=tenants)
    late = view("late", 1000.0, 1500.0)
    sure = [
        JobView(
            spec=JobSpec(id=f"s{i}", tenant="sure", max_devices=1),
            goodput={Shape("t4", 1, 1): 1.0},
            largest_profiled=1,
        )
        for i in range(4)
    ]
    reason = reconcile([late, *sure], cluster, Goodput(), 0.0).reasons["late"]
    assert "its deadline is in 1500 s, but promises to other jobs leave no shape" in reason


def test_who_has_measured_nothing_runs_at_once_for_its_deadline():
    new = dataclasses.replace(
        view("new", 500.0, 5000.0),
        spec=JobSpec(id="new", mode="adaptive", deadline_s=5000.0),
        largest_profiled=0,
    )
    running = view("old", 9000.0, None)
    cluster = uniform_cluster("t4", 1, 1)
    plan = reconcile([running], cluster, Goodput(), 0.0)
    running = dataclasses.replace(running, allocation=plan.allocations["old"], since_s=0.0)
    plan = reconcile([running, new], cluster, Goodput(), 600.0)
    assert plan.allocations["new"].devices


def test_earliest_deadline_first_passes_over_what_does_not_fit():
    cluster = uniform_cluster("t4", 1, 4)
    jobs = [
        view("late", 100.0, 900.0, sizes=(2,)),
        view("soon", 100.0, 300.0, sizes=(3,)),
        view("none", 100.0, None, sizes=(1,)),
    ]
    plan = reconcile(jobs, cluster, EarliestDeadline(), 0.0)
    running = {name for name, its in plan.allocations.items() if its.devices}
    assert running == {"soon", "none"}


@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 100.0])
def test_a_deadline_that_has_passed_is_told_and_claims_nothing(deadline_s):
    job = view("a", 100.0, deadline_s)
    cluster = uniform_cluster("t4", 1, 1)
    assert not deadlines_of(ShapeProblem.of([job], cluster, 200.0)).claims
    assert "deadline passed" in reconcile([job], cluster, Goodput(), 200.0).reasons["a"]
