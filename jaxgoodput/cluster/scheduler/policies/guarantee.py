"""Nobody waits for ever: who has had far less than an equal share runs, whatever others make of the devices.

Utility counts jobs, so many small ones outbid a large one in every round. An equal share gives every job the
same part of its life on the fewest devices that it takes, by weight: part = w C / sum_j w_j n_j, at most 1,
for C devices and jobs that need n_j. A job that is older than a patience and has run for less than a
guaranteed share of part x age is *due*, and remains so until it has had twice that: it is not interrupted at
once, and who alternates does so in stretches that grow with its age.

The due are served in order of submission, before those that are restarting or began lately. So the oldest
that waits runs at once where it fits beside none, and a younger one waits for those before it only, each of
whom takes at most twice its guaranteed share of the time: together less than all of it.
"""

import numpy as np

from jaxgoodput.cluster.scheduler.policies.promises import Claim
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.shapes import capacity


def due(problem: ShapeProblem, guaranteed: float, patience_s: float) -> np.ndarray:
    """[jobs] bool: older than `patience_s` and behind the guaranteed share of an equal part.

    A job that waits is behind below `guaranteed` of its part, one that runs below twice that.
    """
    if not problem.goodput.size:
        return np.zeros(len(problem.jobs), bool)
    fewest = np.where(np.isnan(problem.goodput), np.inf, problem.devices).min(1)
    can = np.isfinite(fewest)
    fewest = np.where(can, fewest, 1.0)
    weight = np.array([view.spec.weight for view in problem.jobs], np.float64)
    wanted = float((weight * fewest)[can].sum())
    part = np.minimum(weight * sum(capacity(problem.cluster).values()) / max(wanted, 1e-9), 1.0)
    counted_s = np.array([sum(v.fraction_received_s.values()) for v in problem.jobs], np.float64)
    ran_s = np.where(counted_s > 0.0, counted_s, problem.received_s() / fewest)
    share = np.where(problem.running, 2.0 * guaranteed, guaranteed)
    age_s = problem.age_s()
    return can & (age_s > patience_s) & (ran_s < share * part * age_s)


def claims_of(problem: ShapeProblem, is_due: np.ndarray) -> list[Claim]:
    """What the due claim: any of their shapes, the oldest first."""
    order = sorted(
        np.flatnonzero(is_due).tolist(),
        key=lambda i: (problem.jobs[i].submitted_s, problem.jobs[i].spec.id),
    )
    return [Claim(i, problem.sizes(i)) for i in order]
