"""Where nothing happens the plan comes to rest; while somebody waits it does not."""

import dataclasses

import numpy as np
import pytest
from event_logs import EventWorld

from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policies.steady import as_of_last_event
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape

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
    then = as_of_last_event(ShapeProblem.of(jobs, TWO, 3000.0), 600.0)
    assert then.now_s == 1000.0  # the last change was at 400 s
    np.testing.assert_allclose(then.received_s(), [2000.0, 1500.0])
    early = ShapeProblem.of(jobs, TWO, 900.0)
    assert as_of_last_event(early, 600.0) is early


def test_while_somebody_waits_everything_is_of_now():
    jobs = (job("x", 0, 0.0, {"a": 9000.0}), job("y", None, None, {}))
    problem = ShapeProblem.of(jobs, TWO, 9000.0)
    assert as_of_last_event(problem, 600.0) is problem
    hopeless = dataclasses.replace(jobs[1], goodput={})
    settled = as_of_last_event(ShapeProblem.of((jobs[0], hopeless), TWO, 9000.0), 600.0)
    assert settled.now_s == 600.0
    nobody = ShapeProblem.of((), TWO, 9000.0)
    assert as_of_last_event(nobody, 600.0) is nobody
