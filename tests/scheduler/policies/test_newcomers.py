"""A job that knows nothing starts where others found it fast; one that knows is left alone."""

import numpy as np
import pytest

from jaxgoodput.scheduler.policies.goodput import Goodput
from jaxgoodput.scheduler.policies.newcomers import with_usual_kinds
from jaxgoodput.scheduler.policies.shape_choice import Problem
from jaxgoodput.scheduler.policy import JobView
from jaxgoodput.scheduler.shapes import shapes
from jaxgoodput.specs import ClusterSpec, JobSpec, Node

CLUSTER = ClusterSpec(
    nodes=tuple(Node(name=kind, kind=kind, num_devices=2) for kind in ("a", "b", "c"))
)
ONE = {shape.kind: shape for shape in shapes(CLUSTER) if shape.num_devices == 1}


def view(id_, speeds, profiled=1, **spec):
    table = {ONE[kind]: speed for kind, speed in speeds.items()}
    return JobView(spec=JobSpec(id=id_, **spec), goodput=table, largest_profiled=profiled)


def rows(*views):
    """{job: {kind: goodput on one device}}, as the policy is offered it."""
    problem = Problem.of(views, CLUSTER, 0.0)
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
