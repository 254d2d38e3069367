"""Budgets of jobs: what is spent stops a job, and what cannot be paid is not offered."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from worlds import table

from jaxgoodput.cluster.scheduler.constraints import constraints_of
from jaxgoodput.cluster.scheduler.costs import cost_to_finish
from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node

PRICES = {"a": 1.0, "b": 3.0}
TWO = ClusterSpec(
    nodes=(Node(name="a0", kind="a", num_devices=8), Node(name="b0", kind="b", num_devices=8)),
    price_per_hour=PRICES,
)


def view(budget, cluster=TWO, remaining=None, received=None, **spec):
    return JobView(
        spec=JobSpec(id="j", budget=budget, **spec),
        goodput=table(cluster, b=2.0),
        remaining=remaining,
        received_s=received or {},
        largest_profiled=8,
    )


@settings(max_examples=60, deadline=None)
@given(st.floats(0.1, 100.0), st.floats(0.0, 100.0), st.floats(0.0, 1e5))
def test_only_what_can_be_paid_is_offered(budget, spent, remaining):
    assume(abs(spent - budget) > 1e-6)
    job = view(budget, remaining=remaining, received={"a": 3600.0 * spent})
    fixed = constraints_of([job], TWO, 0.0)
    if spent >= budget:
        assert "budget" in fixed.refused["j"] and "is spent" in fixed.refused["j"]
        return
    offered = fixed.views["j"].goodput
    wanted = {shape: cost_to_finish(job, shape, PRICES) or 0.0 for shape in job.goodput}
    left = budget - spent
    cheap = {shape for shape, money in wanted.items() if money <= left}
    if cheap:
        assert set(offered) == cheap and not fixed.remarks
    else:
        assert offered and {wanted[s] for s in offered} == {min(wanted.values())}
        lacks = min(wanted.values()) - left
        assert f"{lacks:.2f} short" in fixed.remarks["j"]


@pytest.mark.parametrize("spec", [{}, {"preemptible": False}, {"min_run_s": 1e6}])
def test_a_job_whose_budget_is_spent_does_not_run(spec):
    job = view(2.0, received={"a": 3600.0, "b": 1200.0}, **spec)
    job = dataclasses.replace(job, allocation=Allocation(devices={"a0": (0, 1)}), since_s=0.0)
    plan = reconcile([job], TWO, Goodput(), 100.0)
    assert plan.pause == ("j",) and "its budget of 2 is spent (2.00 so far)" in plan.reasons["j"]
    said = explain("j", [job], TWO, Goodput(), 100.0)
    assert said.constraint == "budget" and said.changes == ("a budget above 2.00",)


def test_it_moves_to_where_it_can_pay_the_rest():
    job = view(3.0, remaining=3600.0 * 2.0)  # an hour on one b for 3, two on one a for 2
    job = dataclasses.replace(
        job, allocation=Allocation(devices={"b0": tuple(range(8))}), since_s=0.0
    )
    plan = reconcile([job], TWO, Goodput(), 100.0)
    given = plan.allocations["j"]
    assert given.devices and given.num_devices <= 4


def test_a_budget_without_prices_is_remarked():
    bare = dataclasses.replace(TWO, price_per_hour={})
    plan = reconcile([view(1.0, bare)], bare, Goodput(), 0.0)
    assert "its budget of 1 limits nothing" in plan.reasons["j"]
    some = dataclasses.replace(TWO, price_per_hour={"a": 1.0})
    plan = reconcile([view(1.0, some)], some, Goodput(), 0.0)
    assert "the cluster has no price for b" in plan.reasons["j"]


def test_a_budget_is_a_number():
    with pytest.raises(ValueError, match="budget=-1"):
        JobSpec(id="j", budget=-1.0)


def test_the_next_decision_comes_when_the_budget_is_spent():
    job = view(
        2.0, received={"a": 3600.0}, max_devices=2
    )  # 1.0 is left: 2 devices for half an hour
    job = dataclasses.replace(job, allocation=Allocation(devices={"a0": (0, 1)}), since_s=0.0)
    plan = reconcile([job], TWO, Goodput(), 100.0, max_gap_s=1e5)
    assert plan.next_solve_s == pytest.approx(100.0 + 1800.0)
    rich = dataclasses.replace(job, spec=dataclasses.replace(job.spec, budget=None))
    assert reconcile([rich], TWO, Goodput(), 100.0, max_gap_s=1e5).next_solve_s == 1e5 + 100.0


def test_a_job_that_has_measured_nothing_is_offered_every_kind():
    new = dataclasses.replace(view(1.0, remaining=1e5), largest_profiled=0)
    fixed = constraints_of([new], TWO, 0.0)
    assert fixed.views["j"].goodput == new.goodput and not fixed.remarks


def test_what_costs_nothing_needs_no_money():
    free = dataclasses.replace(TWO, price_per_hour={"a": 0.0, "b": 0.0})
    assert reconcile([view(0.0)], free, Goodput(), 0.0).start == ("j",)
