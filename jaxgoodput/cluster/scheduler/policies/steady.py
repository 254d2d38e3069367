"""Where nothing happens nothing is decided anew: soon after an event, weights and prices stand still.

Weights fall with service and the price of a change falls with age. Of jobs that all run, the one on more
devices falls behind, gives them to another, gets them back, and so on for ever: 30 endless jobs on 64
devices, where nothing ever happens, changed 113 times in rounds 50 to 400. What service says of jobs is worth
something when somebody comes, leaves or measures something new, and jobs tell when that was last: at the
latest arrival or change of devices. While somebody waits, all is of now: he has to get his turn. The price of
a change is always of now: what jobs measure while nothing else happens is worth acting on.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem


def as_of_last_event(problem: ShapeProblem, settle_s: float) -> ShapeProblem:
    """The problem as it was `settle_s` after the last arrival or change, with the service had by then.

    As it is until then, and where a job waits that could run.
    """
    could = ~np.isnan(problem.goodput).all(1) if problem.goodput.size else problem.running
    if not problem.jobs or (could & ~problem.running).any():
        return problem
    events_s = [t for v in problem.jobs for t in (v.submitted_s, v.since_s) if t is not None]
    settled_s = max(events_s) + settle_s
    passed_s = problem.now_s - settled_s
    if passed_s <= 0.0:
        return problem
    jobs = tuple(
        replace(view, received_s=_less(view.received_s, view.allocation.num_devices * passed_s))
        for view in problem.jobs
    )
    return replace(problem, jobs=jobs, now_s=settled_s)


def _less(received_s: Mapping[str, float], device_s: float) -> dict[str, float]:
    """Device-seconds by kind with so many fewer in all, 0 at least; only their sum is of interest."""
    total_s = sum(received_s.values())
    left = max(1.0 - device_s / total_s, 0.0) if total_s > 0.0 else 1.0
    return {kind: had_s * left for kind, had_s in received_s.items()}
