"""Numbers that are told wrong: they stay wrong in the same way, and cost little where something is done."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import truth, workload

from jaxgoodput.clock import FakeClock
from jaxgoodput.scheduler.policies.goodput import Goodput
from jaxgoodput.simulate import (
    Settings,
    simulate,
    synthetic_applications,
    synthetic_workload,
    uniform_cluster,
)
from jaxgoodput.simulate.conditions.restarts import RestartCosts, Storage
from jaxgoodput.simulate.conditions.told import told_factor
from jaxgoodput.simulate.model_jobs import ModelTruth
from jaxgoodput.specs import Shape

EVENTS = Settings(round_s=None, rounding=False, growth=None)
MODELS = ModelTruth(synthetic_applications({"t4": 1.0}))
NODES = uniform_cluster("t4", 4, 4)


class Asked:
    """The default policy, which keeps what it was asked."""

    def __init__(self):
        self.policy, self.views = Goodput(), []

    def __call__(self, jobs, cluster, now_s, /):
        self.views.append({view.spec.id: view for view in jobs})
        return self.policy(jobs, cluster, now_s)


def asked(settings, jobs=20, made=MODELS):
    policy = Asked()
    lines = synthetic_workload(jobs, hours=2.0, seed=3)
    found = simulate(lines, NODES, policy, made, settings=settings, clock=FakeClock())
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
    index = {line.id: i for i, line in enumerate(synthetic_workload(20, hours=2.0, seed=3))}
    seen = {}
    for view in (view for moment in views for view in moment.values()):
        if view.largest_profiled == 0:
            assert set(view.goodput.values()) == {1.0} and not view.goodput_error
            continue
        assert dict(view.goodput_error) == dict.fromkeys(view.goodput, 0.3)
        truth_now = {
            shape: told / told_factor(0.3, 0, index[view.spec.id], shape)
            for shape, told in view.goodput.items()
        }
        one = truth_now[Shape("t4", 1, 1)]
        # The same phase of the same program: the same truth, whichever job tells it.
        key = view.spec.id.rsplit("-", 1)[0], round(one, 6)
        ratios = [rate / one for rate in truth_now.values()]
        assert seen.setdefault(key, ratios) == pytest.approx(ratios)
    assert len(seen) > 10


def test_jobs_that_ran_know_all_shapes_although_they_were_asked_before():
    """A job is asked when it comes, and knows one device; once it has run, it knows all sizes."""
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
        last = {}
        for moment in views:
            for view in moment.values():
                last.setdefault(view.spec.id, view.restart_s)
                if view.since_s is not None and view.restoring_until_s is None:
                    last[view.spec.id] = view.restart_s
        assert all(first.restart_s == 150.0 for first in views[0].values())
        assert set(last.values()) == {known}


def test_learning_changes_nothing_where_the_truth_is_told():
    for costs in (None, RestartCosts()):
        plain = dataclasses.replace(EVENTS, costs=costs)
        learned = dataclasses.replace(plain, learned_restarts=True)
        assert asked(plain)[1] == asked(learned)[1]


def test_restarts_through_the_storage_are_learned_as_they_took():
    costs = RestartCosts(storage=Storage(bytes_per_s=1e9, state_bytes=2e11))
    views, _ = asked(dataclasses.replace(EVENTS, costs=costs, learned_restarts=True))
    learned = {v.restart_s for moment in views for v in moment.values() if v.num_restarts > 2}
    assert (
        max(learned) > 400.0
    )  # twice 200 GB at 1 GB/s, and 30 s, and longer where others were there


def test_measured_tables_are_told_wrong_too():
    settings = Settings(told_noise=0.2, round_s=None, rounding=False)
    jobs, nodes = workload(), uniform_cluster("a", 2, 2)
    found = simulate(jobs, nodes, Goodput(), truth(), settings=settings, clock=FakeClock())
    again = simulate(jobs, nodes, Goodput(), truth(), settings=settings, clock=FakeClock())
    assert found == again and len(found.jobs) == len(jobs)


@pytest.mark.slow
def test_tables_wrong_by_thirty_percent_cost_little_once_smoothed():
    smoothed, taken = [], []
    for seed in range(2):
        lines = synthetic_workload(40, hours=6.0, seed=seed)
        settings = dataclasses.replace(EVENTS, seed=seed)

        def average_s(policy, noise, lines=lines, settings=settings):
            told = dataclasses.replace(settings, told_noise=noise)
            found = simulate(lines, uniform_cluster("t4", 6, 4), policy, MODELS, settings=told)
            return found.summary()["average_jct_s"]

        alone = average_s(Goodput(), 0.0)
        assert alone == average_s(Goodput(smooth_tables=False), 0.0)
        smoothed.append(average_s(Goodput(), 0.3) / alone)
        taken.append(average_s(Goodput(smooth_tables=False), 0.3) / alone)
    assert np.mean(smoothed) < 1.10 < np.mean(taken)
