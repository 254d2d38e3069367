"""A plan that is asked for again with nothing new stays; a job that waits gets its turn."""

import dataclasses
import importlib
import pathlib
from types import ModuleType

import numpy as np
import pytest
from event_logs import EventWorld

from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policies.steady import as_of, some_wait, standing
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Reservation, Shape

ROOT = pathlib.Path(__file__).parents[4]

ENDLESS = {
    "mode": "adaptive",
    "num_devices": None,
    "min_devices": 1,
    "max_devices": 64,
    "deadline_s": None,
    "restart_s": 30.0,
    "work_s": np.inf,
    "declares": False,
    "noise": 0.0,
}


def world(policy, num_jobs, seed, max_gap_s):
    """Endless jobs that scale as devices^0.4 to devices^1, on 64 devices."""
    nodes = [{"name": f"n{i}", "kind": "a", "num_devices": 8} for i in range(8)]
    made = EventWorld.of(nodes, policy)
    made.max_gap_s = max_gap_s
    rng = np.random.default_rng(seed)
    for _ in range(num_jobs):
        made.arrive({**ENDLESS, "scaling": float(rng.uniform(0.4, 1.0))})
    return made


def rounds_with_changes(made, num_rounds):
    """The rounds in which anybody got other devices."""
    changed = []
    for number in range(num_rounds):
        plan = made.decide()
        if plan.start or plan.resize or plan.pause:
            changed.append(number)
        made.pass_time(plan.next_solve_s - made.now_s)
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("max_gap_s", [60.0, 600.0])
def test_thirty_endless_jobs_come_to_rest(max_gap_s):
    made = world(Goodput(), 30, seed=0, max_gap_s=max_gap_s)
    changed = rounds_with_changes(made, 100)
    assert changed and max(changed) < 50, changed
    assert all(job.view.allocation.devices for job in made.jobs.values())
    # An arrival is an event: the newcomer runs at once, and then there is rest again.
    made.arrive({**ENDLESS, "scaling": 0.9})
    assert "j30" in made.decide().start
    rounds_with_changes(made, 10)
    assert rounds_with_changes(made, 10) == []


MANY = [pytest.mark.slow, pytest.mark.nightly]
SHAPES = {Shape("a", 1, 1): 1.0, Shape("a", 1, 2): 1.8}
TWO = ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=2),))


def job(id_, device, since_s, received_s):
    allocation = Allocation() if device is None else Allocation(devices={"n": (device,)})
    return JobView(
        spec=JobSpec(id=id_, max_devices=2),
        goodput=SHAPES,
        allocation=allocation,
        since_s=since_s,
        received_s=received_s,
    )


def test_service_since_the_last_event_is_left_out():
    jobs = (job("x", 0, 100.0, {"a": 4000.0}), job("y", 1, 400.0, {"a": 700.0, "b": 2800.0}))
    then = standing(ShapeProblem.of(jobs, TWO, 3000.0), 600.0)
    assert then.weights.now_s == 1000.0  # the last change was at 400 s
    assert then.prices.now_s == 3000.0  # what was measured since is unknown
    np.testing.assert_allclose(then.weights.received_s(), [2000.0, 1500.0])
    early = ShapeProblem.of(jobs, TWO, 900.0)
    assert all(problem is early for problem in standing(early, 600.0))


@pytest.mark.parametrize(
    ("news_s", "weights_s", "prices_s"),
    [(None, 1000.0, 3000.0), (0.0, 400.0, 400.0), (500.0, 500.0, 500.0), (2000.0, 1000.0, 2000.0)],
)
def test_prices_stand_still_from_the_last_news_on_and_weights_soon_after_an_event(
    news_s, weights_s, prices_s
):
    jobs = (job("x", 0, 100.0, {"a": 4000.0}), job("y", 1, 400.0, {"a": 3500.0}))
    problem = ShapeProblem.of(jobs, dataclasses.replace(TWO, changed_s=news_s), 3000.0)
    then = standing(problem, 600.0)
    assert (then.weights.now_s, then.prices.now_s) == (weights_s, prices_s)


def test_a_job_waits_only_if_it_could_run():
    jobs = (job("x", 0, 0.0, {"a": 9000.0}), job("y", None, None, {}))
    assert some_wait(ShapeProblem.of(jobs, TWO, 9000.0))
    hopeless = dataclasses.replace(jobs[1], goodput={})
    problem = ShapeProblem.of((jobs[0], hopeless), TWO, 9000.0)
    assert not some_wait(problem)
    nothing = ShapeProblem.of((), TWO, 9000.0)
    assert all(problem is nothing for problem in standing(nothing, 600.0))


@pytest.fixture(scope="module")
def worlds() -> ModuleType:
    """The worlds of `benchmarks/scheduler_asked_again.py`, which prints what is checked here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("scheduler_asked_again")


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=MANY) for i in range(20, 300, 20))])
def test_with_nothing_new_only_what_falls_due_changes(worlds, first):
    found = [f for seed in range(first, first + 20) for f in worlds.asked_again(seed)]
    assert [worlds.in_words(f) for f in found if not f.is_named] == []
    assert first or len(found) > 3  # turns come


def grown_little():
    """A job on one device, an hour after its last change, that would gain an eighth on two."""
    (one, two) = SHAPES
    return dataclasses.replace(
        job("x", 0, 0.0, {"a": 3600.0}),
        goodput={one: 1.0, two: 1.12},
        restart_s=30.0,
        largest_profiled=2,
        num_restarts=2,
    )


def test_news_is_worth_a_change_at_the_price_of_its_time():
    """The same view, an hour after its last change: news that came now makes the change cheap."""

    def devices(changed_s):
        cluster = dataclasses.replace(TWO, changed_s=changed_s)
        return Goodput()([grown_little()], cluster, 3600.0).allocations["x"].num_devices

    assert devices(0.0) == 1  # nothing is new since it began, when it could not be worth it
    assert devices(3600.0) == devices(None) == 2


def test_declared_work_and_time_on_devices_are_of_the_last_event_too():
    view = dataclasses.replace(
        job("x", 0, 100.0, {"a": 900.0}),
        remaining=100.0,
        fraction_received_s={"a": 900.0},
        restart_s=30.0,
    )
    (then,) = as_of(ShapeProblem.of([view], TWO, 1000.0), 110.0).jobs
    assert then.remaining == pytest.approx(100.0 + 1000.0 - 130.0)  # it restarted until 130 s
    assert then.received_s["a"] == then.fraction_received_s["a"] == pytest.approx(10.0)


def test_a_gap_that_is_accepted_anyway_changes_nothing(worlds, monkeypatch):
    """Without the rule, the solver's choice among plans of nearly equal worth moves jobs."""
    changes = {}
    for is_kept in (True, False):
        if not is_kept:
            monkeypatch.setattr(
                "jaxgoodput.cluster.scheduler.policies.goodput.unchanged", lambda *_: None
            )
        changes[is_kept] = sum(len(worlds.asked_again(seed)) for seed in range(20))
    assert changes[True] < changes[False]


def test_devices_that_are_free_are_used_however_little_a_job_is_worth():
    """The worth of one small job among many is within the gap to the best choice that is accepted."""
    cluster = ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=32),), changed_s=900.0)
    shape = Shape(kind="a", num_nodes=1, num_devices=1)
    views = [
        dataclasses.replace(job(f"j{i}", i, 0.0, {"a": 900.0}), goodput={shape: 1.0})
        for i in range(12)
    ]
    new = JobView(
        spec=JobSpec(id="new", max_devices=1, weight=0.01),
        goodput={shape: 1.0},
        submitted_s=900.0,
        largest_profiled=1,
    )
    assert "new" in Goodput()([*views, new], cluster, 1000.0).allocations


def test_a_table_without_the_present_shape_costs_no_plan():
    """For example that of a job whose budget no longer pays for it."""
    (one, two) = SHAPES
    spec = JobSpec(id="x", max_devices=2)
    x = dataclasses.replace(job("x", 0, 0.0, {"a": 900.0}), spec=spec, remaining=1e4)
    x = dataclasses.replace(
        x, goodput={one: 1.0}, allocation=Allocation(devices={"n": (0, 1)}), largest_profiled=2
    )
    y = dataclasses.replace(job("y", 2, 0.0, {"a": 900.0}), goodput={one: 1.0, two: 1.5})
    three = ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=3),), changed_s=100.0)
    assert Goodput()([x, y], three, 5000.0).allocations


def test_a_reservation_that_ends_is_news():
    kept = Reservation(node=TWO.nodes[0].name, num_devices=1, start_s=0.0, end_s=3500.0)
    cluster = dataclasses.replace(TWO, changed_s=0.0, reservations=(kept,))
    assert Goodput()([grown_little()], cluster, 3600.0).allocations["x"].num_devices == 2


def test_doubt_about_a_size_takes_no_deadline_away():
    cluster = ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=16),))
    table = {Shape(kind="a", num_nodes=1, num_devices=n): float(n**0.9) for n in (1, 2, 4, 8, 16)}
    x = JobView(
        spec=JobSpec(id="x", max_devices=16, deadline_s=4600.0),
        goodput=table,
        allocation=Allocation(devices={"n": (0,)}),
        since_s=-3600.0,
        submitted_s=-3600.0,
        received_s={"a": 3600.0},
        largest_profiled=1,
        remaining=16000.0,
        restart_s=30.0,
    )
    decision = Goodput()([x], cluster, 0.0)
    assert "cannot be met" not in decision.reasons["x"]
    assert decision.allocations["x"].num_devices >= 4
