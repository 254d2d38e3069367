"""Keep decisions steady while nothing happens: weights stand still soon after the last event.

Weights fall with service and the price of a change falls with age. Without this rule, the running job with
more devices falls behind, gives devices to another job, gets them back, and so on for ever: 30 endless jobs
on 64 devices, with no event at all, changed 113 times in rounds 50 to 400. Service received says something
about a job's length when a job arrives, ends or is measured. The last such event is known from the jobs
themselves: the latest arrival or change of devices. While a job waits, the present counts, so that it gets
its turn. The price of a change always follows the present, because new measurements are worth acting on.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem


def as_of_last_event(problem: ShapeProblem, settle_s: float) -> ShapeProblem:
    """Return the problem with time and service as they were `settle_s` after the last arrival or change.

    Until then, or while a job waits that could run, return the problem unchanged.
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
    """Return device-seconds by kind, scaled so that their sum is `device_s` smaller, but at least 0."""
    total_s = sum(received_s.values())
    left = max(1.0 - device_s / total_s, 0.0) if total_s > 0.0 else 1.0
    return {kind: had_s * left for kind, had_s in received_s.items()}
