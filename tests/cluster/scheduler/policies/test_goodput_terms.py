"""What the default policy's utility is made of: prices, expected stays, and kinds that others know."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.policies.goodput import (
    Goodput,
    clearing_prices,
    with_usual_kinds,
)
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policies.tables import FAR, with_doubt
from jaxgoodput.cluster.scheduler.policies.transitions import expected_stay_s, leads_further
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.specs import ClusterSpec, JobSpec, Node

SIZES = np.array([1, 2, 4, 8, 16])
CLUSTER = ClusterSpec(
    nodes=tuple(Node(name=kind, kind=kind, num_devices=2) for kind in ("a", "b", "c"))
)
ONE = {shape.kind: shape for shape in shapes(CLUSTER) if shape.num_devices == 1}


def jobs_of(exponents):
    return SIZES[None, :].astype(float) ** np.array(exponents)[:, None]


def prices_of(exponents, weight, capacity):
    kind = np.zeros(len(SIZES), np.int64)
    return clearing_prices(
        jobs_of(exponents), np.array(weight), SIZES, kind, np.array([float(capacity)])
    )


@given(
    exponents=st.lists(st.floats(0.3, 0.95), min_size=1, max_size=30),
    capacity=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_the_cost_is_the_least_of_all_shapes(exponents, capacity, seed):
    weight = np.random.default_rng(seed).uniform(0.1, 3.0, len(exponents))
    prices, cost, best = prices_of(exponents, weight, capacity)
    every = (weight[:, None] + prices[0] * SIZES) / jobs_of(exponents)
    np.testing.assert_allclose(cost, every.min(1), rtol=1e-12)
    at_best = jobs_of(exponents)[np.arange(len(every)), every.argmin(1)]
    np.testing.assert_allclose(best, at_best, rtol=1e-12)


@given(exponents=st.lists(st.floats(0.4, 0.9), min_size=40, max_size=60))
def test_many_jobs_want_about_what_there_is(exponents):
    capacity = 4 * len(exponents)
    prices, _, _ = prices_of(exponents, np.ones(len(exponents)), capacity)

    def wanted(price):
        return SIZES[(jobs_of(exponents) / (1.0 + price * SIZES)).argmax(1)].sum()

    assert wanted(prices[0] * 1.1) <= capacity <= wanted(prices[0] / 1.1)


def test_more_devices_are_cheaper_and_a_job_that_scales_is_worth_more_of_them():
    few, _, _ = prices_of([0.5, 0.9, 0.7], [1.0] * 3, 8)
    many, _, _ = prices_of([0.5, 0.9, 0.7], [1.0] * 3, 24)
    assert many[0] < few[0]
    value = 1.0 + many[0] * SIZES
    best = (jobs_of([0.5, 0.9]) / value).argmax(1)
    assert best[1] > best[0]


def test_equal_kinds_have_equal_prices_and_idle_ones_cost_nothing():
    goodput = np.tile(np.array([[1.0, 1.7, 1.0, 1.7, np.nan]]), (6, 1))
    devices, kind = np.array([1, 2, 1, 2, 1]), np.array([0, 0, 1, 1, 2])
    prices, _, _ = clearing_prices(goodput, np.ones(6), devices, kind, np.array([4.0, 4.0, 4.0]))
    assert prices[0] == pytest.approx(prices[1])
    assert prices[2] < 1e-2 * prices[0]


def test_a_job_without_shapes_has_no_cost_and_bothers_nobody():
    goodput = np.array([[np.nan, np.nan], [1.0, 1.5]])
    both = clearing_prices(goodput, np.ones(2), SIZES[:2], np.zeros(2, int), np.ones(1))
    alone = clearing_prices(goodput[1:], np.ones(1), SIZES[:2], np.zeros(2, int), np.ones(1))
    assert np.isnan(both[1][0])
    np.testing.assert_array_equal(both[0], alone[0])
    empty = clearing_prices(goodput[:1], np.ones(1), SIZES[:2], np.zeros(2, int), np.ones(1))
    assert empty[0].tolist() == [0.0]


def stay_s(age_s, restarts, restart_s):
    view = JobView(
        spec=JobSpec(id="a"),
        goodput={},
        num_restarts=restarts,
        restart_s=restart_s,
        submitted_s=50.0,
    )
    return float(expected_stay_s(ShapeProblem.of((view,), CLUSTER, 50.0 + age_s))[0])


def test_its_numbers():
    assert stay_s(age_s=0.0, restarts=0, restart_s=0.0) == pytest.approx(96.0)
    assert stay_s(age_s=1780.0, restarts=4, restart_s=50.0) == pytest.approx(320.0)


@given(age_s=st.floats(0, 1e6), restarts=st.integers(0, 100), restart_s=st.floats(0, 1000))
def test_it_grows_with_age_and_falls_with_restarts(age_s, restarts, restart_s):
    now = stay_s(age_s, restarts, restart_s)
    assert now > 0
    assert stay_s(age_s + 60.0, restarts, restart_s) > now > stay_s(age_s, restarts + 1, restart_s)


@given(
    age_s=st.floats(0, 1e6),
    restarts=st.integers(0, 100),
    restart_s=st.floats(0, 1000),
    contention=st.floats(0, 1),
)
def test_the_less_others_want_its_devices_the_longer_it_stays(
    age_s, restarts, restart_s, contention
):
    view = JobView(
        spec=JobSpec(id="a"),
        restart_s=restart_s,
        num_restarts=restarts,
        largest_profiled=2**restarts,
    )
    problem = ShapeProblem.of((view,), CLUSTER, age_s)
    stay = [float(expected_stay_s(problem, c)[0]) for c in (1.0, contention, 0.0)]
    assert stay == sorted(stay)
    assert stay[0] == pytest.approx(stay_s(age_s, restarts, restart_s))
    # Restarts by which it grew do not count, others do.
    assert stay[2] == pytest.approx(age_s + 2.0 * restart_s + 120.0)
    to_and_fro = dataclasses.replace(view, largest_profiled=1)
    problem = ShapeProblem.of((to_and_fro,), CLUSTER, age_s)
    assert expected_stay_s(problem, 0.0)[0] == pytest.approx(stay[2] / (restarts + 1))


def test_a_job_from_a_clock_that_is_ahead_counts_as_new():
    assert stay_s(age_s=-30.0, restarts=0, restart_s=10.0) == stay_s(0.0, 0, 10.0)


def view(id_, speeds, profiled=1, **spec):
    table = {ONE[kind]: speed for kind, speed in speeds.items()}
    return JobView(spec=JobSpec(id=id_, **spec), goodput=table, largest_profiled=profiled)


def rows(*views):
    """{job: {kind: goodput on one device}}, as the policy is offered it."""
    problem = ShapeProblem.of(views, CLUSTER, 0.0)
    goodput = with_usual_kinds(problem)
    column = {kind: problem.shapes.index(shape) for kind, shape in ONE.items()}
    return {
        v.spec.id: {kind: float(goodput[i, c]) for kind, c in column.items()}
        for i, v in enumerate(views)
    }


NEW = view("new", dict.fromkeys(ONE, 1.0), profiled=0)


def test_the_ratios_are_those_that_others_found_whatever_their_units():
    found = rows(view("x", {"a": 1.0, "b": 4.0, "c": 2.0}), NEW)["new"]
    assert found["b"] / found["a"] == pytest.approx(4.0)
    assert found["c"] / found["a"] == pytest.approx(2.0)
    scaled = rows(view("x", {"a": 1e3, "b": 4e3, "c": 2e3}), NEW)["new"]
    assert scaled == pytest.approx(found)


def test_the_policy_starts_it_there():
    for fast in ONE:  # whichever it is, so that no order of kinds can pass for knowledge
        other = view("x", {kind: 4.0 if kind == fast else 1.0 for kind in ONE})
        given = Goodput()([other, NEW], CLUSTER, 0.0).allocations
        assert set(given["new"].devices) == {fast}


def test_of_several_the_geometric_mean():
    found = rows(
        view("x", {"a": 1.0, "b": 8.0, "c": 1.0}), view("y", {"a": 5.0, "b": 10.0, "c": 5.0}), NEW
    )["new"]
    assert found["b"] / found["a"] == pytest.approx(4.0)


def test_who_has_measured_or_been_told_is_left_alone():
    known = view("x", {"a": 1.0, "b": 4.0, "c": 2.0})
    told = view("told", {"a": 3.0, "b": 1.0, "c": 1.0}, profiled=0)
    rigid = view("rigid", dict.fromkeys(ONE, 5.0), profiled=0, mode="rigid", num_devices=1)
    found = rows(known, told, rigid, NEW)
    assert found["x"] == {"a": 1.0, "b": 4.0, "c": 2.0}
    assert found["rigid"] == dict.fromkeys(ONE, 5.0)
    assert found["told"] == {"a": 3.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize("others", [(), (view("x", {"a": 1.0, "b": 4.0}),)], ids=["none", "partly"])
def test_where_nobody_knows_all_kinds_they_stay_alike(others):
    assert set(rows(*others, NEW)["new"].values()) == {1.0}


def test_jobs_without_any_shape_do_no_harm():
    found = rows(view("x", {"a": 1.0, "b": 4.0, "c": 2.0}), view("none", {}, profiled=0), NEW)
    assert np.isnan(list(found["none"].values())).all()
    assert found["new"]["b"] / found["new"]["a"] == pytest.approx(4.0)


WIDE = ClusterSpec(
    nodes=tuple(Node(name=f"n{i}", kind="a", num_devices=8) for i in range(8)),
)


def sized(profiled, largest=64, **spec):
    """A job that scales perfectly up to a largest size that is offered."""
    table = {s: float(s.num_devices) for s in shapes(WIDE) if s.num_devices <= largest}
    return JobView(
        spec=JobSpec(id="a", **{"max_devices": 64, **spec}),
        goodput=table,
        largest_profiled=profiled,
    )


def leads(view):
    """The sizes that are worth more for what they lead to."""
    problem = ShapeProblem.of((view,), WIDE, 0.0)
    return problem.devices[leads_further(problem)[0] > 1.0].tolist()


def test_the_largest_size_on_offer_is_worth_more_if_it_opens_up_others():
    assert leads(sized(4, largest=8)) == [8]
    assert leads(sized(8, largest=8)) == []  # it has been there
    assert leads(sized(4, largest=8, max_devices=8)) == []  # it may not have more
    assert leads(sized(16, largest=64)) == []  # there is no more
    assert leads(sized(0, largest=8)) == []  # it has not run yet, and nothing is known
    assert leads(sized(4, largest=8, mode="rigid", num_devices=8)) == []


def test_a_size_that_looks_no_better_than_a_smaller_one_is_not_tried_for_what_may_follow():
    view = sized(4, largest=8)
    table = {s: min(g, 4.0) for s, g in view.goodput.items()}
    assert leads(dataclasses.replace(view, goodput=table)) == []


@given(profiled=st.integers(0, 64))
def test_a_table_is_trusted_near_what_was_measured(profiled):
    problem = ShapeProblem.of((sized(profiled),), WIDE, 0.0)
    found, told = with_doubt(problem)[0], problem.goodput[0]
    if profiled == 0:
        np.testing.assert_array_equal(found, told)
        return
    near = problem.devices <= FAR * profiled
    np.testing.assert_array_equal(found[near], told[near])
    assert (found[~near] < told[~near]).all()
    np.testing.assert_allclose(
        found[~near], FAR * profiled
    )  # as much as perfect scaling gives there


def test_a_table_that_is_no_estimate_of_the_job_is_trusted_everywhere():
    problem = ShapeProblem.of((sized(1, mode="elastic"),), WIDE, 0.0)
    np.testing.assert_array_equal(with_doubt(problem), problem.goodput)


def test_on_an_empty_cluster_a_job_goes_far_in_few_steps_and_is_not_forbidden_any():
    view, sizes = sized(1), []
    for now_s in (60.0, 120.0, 180.0, 240.0):
        given = Goodput()((view,), WIDE, now_s).allocations["a"]
        sizes.append(given.num_devices)
        view = JobView(
            spec=view.spec,
            goodput=view.goodput,
            largest_profiled=given.num_devices,
            allocation=given,
            since_s=now_s,
            num_restarts=len(sizes) - 1,
        )
    assert sizes == [4, 16, 64, 64]
