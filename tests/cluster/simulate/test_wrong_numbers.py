"""Wrong numbers that policies are told: each error stays the same, and costs little with countermeasures."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import truth, workload

from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.simulate import (
    Settings,
    simulate,
    synthetic_applications,
    synthetic_workload,
    uniform_cluster,
)
from jaxgoodput.cluster.simulate.conditions.restarts import RestartCosts, Storage
from jaxgoodput.cluster.simulate.conditions.told import told_factor
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth
from jaxgoodput.specs import Shape

EVENTS = Settings(round_s=None, rounding=False, growth=None)
MODELS = ModelTruth(synthetic_applications({"t4": 1.0}))
NODES = uniform_cluster("t4", 2, 4)


class Asked:
    """The default policy, which records its inputs."""

    def __init__(self):
        self.policy, self.views = Goodput(), []

    def __call__(self, jobs, cluster, now_s, /):
        self.views.append({view.spec.id: view for view in jobs})
        return self.policy(jobs, cluster, now_s)


SMALL = tuple(
    dataclasses.replace(line, num_steps=min(line.num_steps or 0, 8_000))
    for line in synthetic_workload(20, hours=0.5, seed=3)
    if line.application in ("vision-small", "recommender")
)[:8]


def asked(settings):
    policy = Asked()
    found = simulate(SMALL, NODES, policy, MODELS, settings=settings, clock=FakeClock())
    return policy.views, found


@given(
    deviation=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32),
    job=st.integers(0, 1000),
    size=st.integers(1, 64),
)
def test_a_factor_belongs_to_its_job_and_shape(deviation, seed, job, size):
    shape = Shape("t4", 1, size)
    once = told_factor(deviation, seed, job, shape)
    assert once == told_factor(deviation, seed, job, shape) > 0
    others = [(seed + 1, job, shape), (seed, job + 1, shape), (seed, job, Shape("t5", 1, size))]
    assert all(told_factor(deviation, *other) != once for other in others)
    assert told_factor(2 * deviation, seed, job, shape) == pytest.approx(once**2)


def test_factors_are_log_normal():
    drawn = [
        np.log(told_factor(0.3, 7, j, Shape("t4", 1, k))) for j in range(60) for k in range(1, 20)
    ]
    assert abs(np.mean(drawn)) < 0.03 and np.std(drawn) == pytest.approx(0.3, rel=0.08)


def test_what_a_table_is_wrong_by_never_changes():
    settings = dataclasses.replace(EVENTS, told_noise=0.3, declared_errors=True)
    views, _ = asked(settings)
    index = {line.id: i for i, line in enumerate(SMALL)}
    checked = 0
    for view in (view for moment in views for view in moment.values()):
        if view.largest_profiled == 0:
            assert set(view.goodput.values()) == {1.0} and not view.goodput_error
            continue
        assert dict(view.goodput_error) == dict.fromkeys(view.goodput, 0.3)
        i = index[view.spec.id]
        so = [told / told_factor(0.3, 0, i, shape) for shape, told in view.goodput.items()]
        places = tuple((shape.num_nodes, shape.num_devices) for shape in view.goodput)
        phases = [MODELS.goodput(SMALL[i].application, "t4", p, places) for p in range(10)]
        assert any(np.allclose(so, phase, rtol=1e-9) for phase in phases)
        checked += 1
    assert checked > 20


def test_jobs_that_ran_know_all_shapes_although_they_were_asked_before():
    """A job is asked when it arrives, and knows one device; once it has run, it knows all sizes."""
    views, _ = asked(EVENTS)
    ran = [v for moment in views for v in moment.values() if v.largest_profiled > 0]
    new = [v for moment in views for v in moment.values() if v.largest_profiled == 0]
    assert new and all(len(view.goodput) == 1 for view in new)
    assert ran and all(len(view.goodput) > 1 for view in ran)


def test_what_is_told_of_restarts_gives_way_to_what_they_took():
    told = dataclasses.replace(EVENTS, restart_s=30.0, told_restart_s=150.0)
    for settings, known in (
        (told, 150.0),
        (dataclasses.replace(told, learned_restarts=True), 30.0),
    ):
        views, _ = asked(settings)
        every = [view for moment in views for view in moment.values()]
        new = [v for v in every if v.num_restarts == 0 and v.since_s is None]
        working = [v for v in every if v.since_s is not None and v.restoring_until_s is None]
        assert new and {view.restart_s for view in new} == {150.0}
        assert working and {view.restart_s for view in working} == {known}


def test_learning_changes_nothing_where_the_truth_is_told():
    learned = dataclasses.replace(EVENTS, learned_restarts=True)
    assert asked(EVENTS)[1] == asked(learned)[1]


def test_restarts_through_the_storage_are_learned_as_they_took():
    # Its second restart moves 20 GB twice through 1 GB/s, or longer if other jobs share it.
    costs = RestartCosts(start=0.0, storage=Storage(bytes_per_s=1e9, state_bytes=2e10))
    views, _ = asked(dataclasses.replace(EVENTS, costs=costs, learned_restarts=True))
    every = [view for moment in views for view in moment.values()]
    once = {v.restart_s for v in every if v.num_restarts == 0 and v.restoring_until_s is None}
    assert once <= {0.0, 30.0} and 0.0 in once
    assert max(v.restart_s for v in every if v.num_restarts > 1) >= 50.0


def test_measured_tables_are_told_wrong_too():
    settings = Settings(told_noise=0.2, round_s=None, rounding=False, mode="elastic")
    jobs, nodes = workload(4), uniform_cluster("a", 2, 2)
    policy = Asked()
    simulate(jobs, nodes, policy, truth(), settings=settings, clock=FakeClock())
    exact = Asked()
    right = dataclasses.replace(settings, told_noise=0.0)
    simulate(jobs, nodes, exact, truth(), settings=right, clock=FakeClock())
    (told,), (so,) = policy.views[0].values(), exact.views[0].values()
    assert {s: g * told_factor(0.2, 0, 0, s) for s, g in so.goodput.items()} == told.goodput
