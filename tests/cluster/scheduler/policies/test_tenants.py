"""Tenants: guarantees in one decision, limits of subtrees always, nothing idle, and shares by weight."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import after, check_plan, table

from jaxgoodput.cluster.published.gavel.fairness import WaterFilling
from jaxgoodput.cluster.published.gavel.rounds import RoundScheduler
from jaxgoodput.cluster.published.pollux import Pollux
from jaxgoodput.cluster.published.sia import Sia
from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.fair_share import deserved, factors, faded
from jaxgoodput.cluster.scheduler.limits import limits_of, subtrees, use_by_tenant
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Tenant

NODES = tuple(Node(name=f"n{i}", kind="k", num_devices=8) for i in range(2))
TREE = (
    Tenant(name="lab", guaranteed=8, limit=14),
    Tenant(name="a", parent="lab", guaranteed=4),
    Tenant(name="b", parent="lab", guaranteed=2, limit=6),
    Tenant(name="c", guaranteed=4, weight=2.0),
)
SIXTEEN = ClusterSpec(nodes=NODES, tenants=TREE)


def job(id_, tenant, cluster=SIXTEEN, most=8, submitted_s=0.0, restart_s=30.0, **spec):
    view = JobView(
        spec=JobSpec(id=id_, tenant=tenant, max_devices=most, **spec),
        goodput={s: g for s, g in table(cluster).items() if s.num_devices <= most},
        submitted_s=submitted_s,
        largest_profiled=most,
        restart_s=restart_s,
    )
    return view


def has(plan, jobs, cluster):
    """Devices of every tenant of the tree, with all below it."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    use = use_by_tenant(plan.allocations, {v.spec.id: v.spec.tenant for v in jobs}, kind_of)
    return {
        name: sum(sum(use.get(one, {}).values()) for one in its)
        for name, its in subtrees(cluster).items()
    }


def check_limits(plan, jobs, cluster):
    kind_of = {node.name: node.kind for node in cluster.nodes}
    use = use_by_tenant(plan.allocations, {v.spec.id: v.spec.tenant for v in jobs}, kind_of)
    for limit in limits_of(cluster):
        assert limit.used(use) <= limit.left + 1e-9, limit.said


@st.composite
def crowds(draw):
    """Who is there first, and who comes then: (tenant, most devices, weight) of each."""
    one = st.tuples(
        st.sampled_from(["a", "b", "c", "lab", "else"]),
        st.sampled_from([1, 1, 2, 8]),
        st.sampled_from([0.1, 1.0, 7.0]),
    )
    return draw(st.lists(one, max_size=20)), draw(st.lists(one, min_size=1, max_size=20))


@settings(max_examples=25, deadline=None)
@given(crowds())
def test_who_wants_its_guarantee_has_it_at_once(crowd):
    first, then = crowd
    cluster = SIXTEEN
    jobs = tuple(job(f"f{i}", t, most=n, weight=w) for i, (t, n, w) in enumerate(first))
    plan = reconcile(jobs, cluster, Goodput(), 0.0)
    # It has only begun, and would not be paused for anybody's merit.
    jobs = tuple(dataclasses.replace(v, received_s={"k": 60.0}) for v in after(plan, jobs, 0.0))
    jobs += tuple(
        job(f"t{i}", t, most=n, weight=w, submitted_s=60.0) for i, (t, n, w) in enumerate(then)
    )
    plan = reconcile(jobs, cluster, Goodput(), 60.0)
    check_plan(plan, jobs, cluster)
    check_limits(plan, jobs, cluster)
    found = has(plan, jobs, cluster)
    for tenant in cluster.tenants:
        its = subtrees(cluster)[tenant.name]
        waiting = [
            v for v in jobs if v.spec.tenant in its and not plan.allocations[v.spec.id].devices
        ]
        # Every job here runs on one device, so a tenant whose job waits has all that it is sure of, or
        # its own limit keeps it from more.
        full = any(
            limit.left - found[name] < 1
            for name in found
            if tenant.name in subtrees(cluster)[name]
            for limit in limits_of(cluster)
            if limit.tenants == subtrees(cluster)[name]
        )
        assert not waiting or found[tenant.name] >= tenant.guaranteed or full


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 8]), min_size=16, max_size=24), st.integers(0, 2))
def test_what_is_borrowed_is_used_while_nobody_else_wants_it(sizes, which):
    tenant = ("a", "c", "else")[which]
    jobs = [job(f"j{i}", tenant, most=n) for i, n in enumerate(sizes)]
    plan = reconcile(jobs, SIXTEEN, Goodput(), 0.0)
    used = sum(given.num_devices for given in plan.allocations.values())
    assert used == (14 if tenant == "a" else 16)  # all, but for the limit of the lab
    if tenant == "a":
        assert any("borrowed: 'a' has 14 devices" in said for said in plan.reasons.values())


def test_children_lend_to_one_another_first():
    jobs = [job(f"a{i}", "a", most=1) for i in range(20)]
    jobs += [job(f"x{i}", "else", most=1, weight=50.0) for i in range(20)]
    found = has(reconcile(jobs, SIXTEEN, Goodput(), 0.0), jobs, SIXTEEN)
    assert found["a"] == found["lab"] == 8  # with what b and the lab itself leave


def test_a_guarantee_is_spent_by_weight_then_by_submission():
    jobs = [
        job(f"a{i}", "a", most=1, submitted_s=-float(i), weight=1.0 + (i == 2)) for i in range(9)
    ]
    jobs += [job(f"b{i}", "b", most=1) for i in range(4)]
    jobs += [job(f"x{i}", "else", most=1, weight=50.0) for i in range(20)]
    poor = dataclasses.replace(TREE[1], parent=None, weight=1e-3)
    cluster = dataclasses.replace(SIXTEEN, tenants=(poor,))
    plan = reconcile(jobs, cluster, Goodput(), 0.0)
    ours = {id_ for id_, given in plan.allocations.items() if given.devices and id_[0] == "a"}
    assert {"a2", "a8", "a7", "a6"} <= ours
    assert all("4 devices guaranteed to 'a'" in plan.reasons[id_] for id_ in ("a2", "a8"))


def test_who_may_not_be_stopped_is_not():
    held = [job(f"x{i}", "else", most=1, preemptible=False) for i in range(16)]
    jobs = after(reconcile(held, SIXTEEN, Goodput(), 0.0), held, 0.0)
    jobs += (job("a", "a", most=1),)
    plan = reconcile(jobs, SIXTEEN, Goodput(), 10.0)
    assert plan.pause == () and not plan.allocations["a"].devices
    jobs = (*(dataclasses.replace(v, spec=dataclasses.replace(v.spec, preemptible=True)) for v in
              jobs[:-1]), jobs[-1])  # fmt: skip
    plan = reconcile(jobs, SIXTEEN, Goodput(), 10.0)
    assert plan.start == ("a",) and len(plan.pause) == 1
    assert "gives way to the guarantee of 'a' (4 devices)" in plan.reasons[plan.pause[0]]


@pytest.mark.parametrize(
    "policy",
    [Goodput(), Sia(), Pollux(), RoundScheduler(fraction_policy=WaterFilling())],
    ids=lambda policy: type(policy).__name__,
)
@settings(max_examples=12, deadline=None)
@given(crowds(), st.integers(0, 8), st.floats(0.0, 9.0))
def test_no_subtree_exceeds_its_limits(policy, crowd, limit, budget):
    tenants = (
        Tenant(name="lab", limit=limit, budget_per_hour=budget),
        Tenant(name="a", parent="lab", limit=limit // 2),
        Tenant(name="b", parent="lab", budget_per_hour=budget / 3),
        Tenant(name="c", budget_per_hour=2.5),
    )
    nodes = (*NODES, Node(name="m", kind="l", num_devices=8))
    prices = {"k": 1.0, "l": 0.3}
    cluster = ClusterSpec(nodes=nodes, tenants=tenants, price_per_hour=prices)
    now_s, jobs = 0.0, ()
    for round_, part in enumerate(crowd):
        jobs += tuple(
            job(f"{round_}-{i}", t, cluster, n, now_s, weight=w, mode="rigid", num_devices=n)
            for i, (t, n, w) in enumerate(part)
        )
        plan = reconcile(jobs, cluster, policy, now_s)
        check_plan(plan, jobs, cluster)
        check_limits(plan, jobs, cluster)
        jobs = tuple(
            dataclasses.replace(v, restoring_until_s=now_s + 90.0) for v in after(plan, jobs, now_s)
        )
        now_s += 60.0


def test_a_plan_without_tenants_is_the_same_whatever_tenants_had():
    bare = ClusterSpec(nodes=NODES)
    jobs = [job(f"j{i}", t, bare) for i, t in enumerate("aabbcc" * 3)]
    told = [dataclasses.replace(v, tenant_received_s={"a": 1e6, "b": 3.0}) for v in jobs]
    assert reconcile(jobs, bare, Goodput(), 5.0) == reconcile(told, bare, Goodput(), 5.0)


def test_who_waits_is_told_of_limits_and_guarantees():
    tenants = (Tenant(name="a", limit=2), Tenant(name="c", guaranteed=14))
    cluster = ClusterSpec(nodes=NODES, tenants=tenants)
    jobs = [job(f"a{i}", "a", cluster, 1) for i in range(4)]
    plan = reconcile(jobs, cluster, Goodput(), 0.0)
    waits = next(id_ for id_, given in plan.allocations.items() if not given.devices)
    assert "the limit of tenant 'a', 2 devices" in plan.reasons[waits]
    said = explain(waits, jobs, cluster, Goodput(), 0.0)
    assert said.constraint == "tenant limit" and said.changes[0].startswith("a limit of")
    jobs = [job(f"c{i}", "c", cluster, 1) for i in range(14)]
    jobs += [job(f"x{i}", "else", cluster, 1, weight=9.0) for i in range(3)]
    plan = reconcile(jobs, cluster, Goodput(), 0.0)
    waits = next(id_ for id_, given in plan.allocations.items() if not given.devices)
    said = explain(waits, jobs, cluster, Goodput(), 0.0)
    assert said.constraint == "guarantee" and "'c' (14)" in said.message
    priced = dataclasses.replace(
        cluster, tenants=(Tenant(name="a", budget_per_hour=3.0),), price_per_hour={"k": 2.0}
    )
    jobs = [job(f"a{i}", "a", priced, 1) for i in range(2)]
    plan = reconcile(jobs, priced, Goodput(), 0.0)
    waits = next(id_ for id_, given in plan.allocations.items() if not given.devices)
    assert "the budget of tenant 'a', 3 per hour" in plan.reasons[waits]
    said = explain(waits, jobs, priced, Goodput(), 0.0)
    assert said.constraint == "tenant budget" and said.changes[0] == "5 per hour for 'a'"


# Shares over time.


@settings(max_examples=50, deadline=None)
@given(
    st.sets(st.sampled_from(["a", "b", "c", "lab", "else"]), min_size=1),
    st.integers(0, 64).map(float),
)
def test_what_is_deserved_is_all_there_is_and_no_more_than_limits(active, devices):
    found = deserved(SIXTEEN, active, devices)
    assert set(found) == active and all(its >= 0 for its in found.values())
    assert sum(found.values()) <= devices + 1e-9
    if "else" in active or "c" in active:  # they have no limit
        assert sum(found.values()) == pytest.approx(devices)
    assert sum(found.get(name, 0.0) for name in ("a", "b", "lab")) <= 14 + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 1e5), st.floats(0.0, 1e5), st.floats(0.0, 64.0), st.floats(1.0, 1e5))
def test_usage_fades_alike_in_one_step_and_in_two(first_s, second_s, devices, half_life_s):
    once = faded({"a": 100.0}, {"a": devices}, first_s + second_s, half_life_s)
    half = faded({"a": 100.0}, {"a": devices}, first_s, half_life_s)
    twice = faded(half, {"a": devices}, second_s, half_life_s)
    assert once["a"] == pytest.approx(twice["a"], rel=1e-6, abs=1e-6)
    # Never more than a tenant would have had that always had so many.
    assert once["a"] <= max(100.0, devices * half_life_s / np.log(2.0)) * (1 + 1e-9)


def test_factors_are_bounded_and_fall_with_what_was_had():
    had = [
        factors(SIXTEEN, {"a", "c"}, {"a": s, "c": 1e5}, 16.0)["a"] for s in np.geomspace(1, 1e9)
    ]
    assert (np.diff(had) <= 0).all() and had[0] == 8.0 and had[-1] < 1.0
    assert min(had) >= 1 / 8
    # On target: neither more nor less.
    due = deserved(SIXTEEN, {"a", "c"}, 16.0)
    even = factors(SIXTEEN, {"a", "c"}, {name: 1e6 * its for name, its in due.items()}, 16.0)
    assert all(each == pytest.approx(1.0) for each in even.values())


WRONG = {
    "unknown parent": ((Tenant(name="a", parent="z"),), "parent 'z', which is not one of the tenants"),
    "cycle": ((Tenant(name="a", parent="b"), Tenant(name="b", parent="a")), "is below itself"),
    "twice": ((Tenant(name="a"), Tenant(name="a")), "occur more than once"),
    "more than the parent": (
        (Tenant(name="p", guaranteed=3), Tenant(name="a", parent="p", guaranteed=2),
         Tenant(name="b", parent="p", guaranteed=2)),
        "guaranteed 4 devices, but 'p' itself is guaranteed 3",
    ),
    "no prices": ((Tenant(name="a", budget_per_hour=1.0),), "kind 'k' has no price"),
}  # fmt: skip


@pytest.mark.parametrize("tenants, says", WRONG.values(), ids=WRONG)
def test_trees_that_cannot_be(tenants, says):
    with pytest.raises(ValueError, match=says):
        ClusterSpec(nodes=NODES, tenants=tenants)


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"guaranteed": -1}, "0 or more"),
        ({"guaranteed": 5, "limit": 4}, "limited to 4"),
        ({"weight": 0.0}, "above 0"),
        ({"budget_per_hour": float("nan")}, "finite"),
    ],
)
def test_tenants_that_cannot_be(fields, says):
    with pytest.raises(ValueError, match=says):
        Tenant(name="a", **fields)


def test_within_a_guarantee_the_earlier_deadline_comes_first():
    tenants = (Tenant(name="mine", guaranteed=1), Tenant(name="theirs", guaranteed=1))
    cluster = ClusterSpec(nodes=(Node(name="n", kind="k", num_devices=2),), tenants=tenants)

    def due(id_, deadline_s, **spec):
        view = job(id_, "mine", cluster, most=1, deadline_s=deadline_s, **spec)
        rate = max(view.goodput.values())
        return dataclasses.replace(view, remaining=600.0 * rate, restart_s=0.0)

    jobs = [
        due("late", 1000.0, weight=9.0),
        due("early", 900.0),
        job("x", "theirs", cluster, most=1),
    ]
    plan = reconcile(jobs, cluster, Goodput(), 0.0)
    assert set(plan.start) == {"early", "x"}


@pytest.mark.parametrize("others, has", [(0, 4), (1, 2)])
def test_a_deadline_that_the_guarantee_is_too_small_for_still_has_what_is_guaranteed(others, has):
    """Four devices would meet it and two are guaranteed: four while nobody else is sure of them, else two."""
    tenants = Tenant(name="mine", guaranteed=2), Tenant(name="theirs", guaranteed=2)
    cluster = ClusterSpec(nodes=(Node(name="n", kind="k", num_devices=4),), tenants=tenants)
    mine = job("due", "mine", cluster, most=4, deadline_s=1000.0)
    fastest = max(mine.goodput.values())
    mine = dataclasses.replace(mine, remaining=900.0 * fastest)
    rest = [job(f"o{i}", "theirs", cluster, most=2, min_devices=2) for i in range(others)]
    # A hundred times as important as anybody's but what is guaranteed.
    loose = [job(f"l{i}", "loose", cluster, most=1, weight=100.0) for i in range(4)]
    plan = reconcile([mine, *rest, *loose], cluster, Goodput(), 0.0)
    assert plan.allocations["due"].num_devices == has, plan.reasons
    assert all(plan.allocations[view.spec.id].devices for view in rest)


@pytest.mark.parametrize("least", [1, 2])
def test_a_deadline_takes_of_the_guarantee_above_what_its_own_tenant_lacks(least):
    tenants = (
        Tenant(name="lab", guaranteed=4),
        Tenant(name="leaf", parent="lab", guaranteed=1),
        Tenant(name="sibling", parent="lab"),
    )
    cluster = ClusterSpec(nodes=(Node(name="n", kind="k", num_devices=4),), tenants=tenants)
    due = job("due", "leaf", cluster, most=4, min_devices=least, deadline_s=1000.0)
    due = dataclasses.replace(due, remaining=900.0 * max(due.goodput.values()))
    others = [job(f"s{i}", "sibling", cluster, most=1) for i in range(3)]
    plan = reconcile([due, *others], cluster, Goodput(), 0.0)
    assert plan.allocations["due"].num_devices == 4, plan.reasons


def test_who_restarts_within_its_guarantee_grows_for_its_deadline():
    cluster = ClusterSpec(
        nodes=(Node(name="n", kind="k", num_devices=4),),
        tenants=(Tenant(name="mine", guaranteed=1),),
    )
    due = job("due", "mine", cluster, most=4, deadline_s=1000.0, restart_s=0.0)
    due = dataclasses.replace(
        due,
        remaining=800.0 * max(due.goodput.values()),
        allocation=Allocation(devices={"n": (0,)}),
        restoring_until_s=100.0,
    )
    plan = reconcile([due], cluster, Goodput(), 10.0)
    assert plan.allocations["due"].num_devices == 4, plan.reasons
