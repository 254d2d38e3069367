"""Starvation guard: a job that has had far less than an equal share runs, whatever others would gain.

Utility counts jobs, so many small jobs outbid a large one in every round. An equal share would give every
job the same part of its life on the fewest devices that it accepts, by weight: part = w C / sum_j w_j n_j,
at most 1, for C devices and jobs that need n_j. A job older than a patience is *due* if it has run for less
than a guaranteed share of part x age. It stays due until it has had twice that, so it is not interrupted at
once; if jobs alternate, they do so in stretches that grow with their age.

Due jobs are served in order of submission, before jobs that are restarting or began lately. So the oldest
waiting job runs at once if it does not fit beside others. A younger one waits only for the jobs before it,
and these together take less than all of the time, because each takes at most twice its guaranteed share.
"""

from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.scheduler.policies.promises import Claim
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision
from jaxgoodput.cluster.scheduler.shapes import capacity


def due(problem: ShapeProblem, guaranteed: float, patience_s: float) -> np.ndarray:
    """Return [jobs] bool: older than `patience_s`, and behind the share `guaranteed` of an equal part.

    A waiting job is behind below `guaranteed` of its part, a running job below twice that.
    """
    if not problem.goodput.size:
        return np.zeros(len(problem.jobs), bool)
    fewest = np.where(np.isnan(problem.goodput), np.inf, problem.devices).min(1)
    can = np.isfinite(fewest)
    fewest = np.where(can, fewest, 1.0)
    weight = problem.weight()
    wanted = float((weight * fewest)[can].sum())
    part = np.minimum(weight * sum(capacity(problem.cluster).values()) / max(wanted, 1e-9), 1.0)
    counted_s = np.array([sum(v.fraction_received_s.values()) for v in problem.jobs], np.float64)
    ran_s = np.where(counted_s > 0.0, counted_s, problem.received_s() / fewest)
    share = np.where(problem.running, 2.0 * guaranteed, guaranteed)
    age_s = problem.age_s()
    return can & (age_s > patience_s) & (ran_s < share * part * age_s)


def claims_of(problem: ShapeProblem, is_due: np.ndarray) -> list[Claim]:
    """Return claims, by which due jobs must run, the oldest job first: any of its shapes, smallest first."""
    order = sorted(
        np.flatnonzero(is_due).tolist(),
        key=lambda i: (problem.jobs[i].submitted_s, problem.jobs[i].spec.id),
    )
    return [Claim(i, problem.sizes(i)) for i in order]


def with_due(decision: Decision, problem: ShapeProblem, is_due: np.ndarray) -> Decision:
    """Return the decision; jobs that start because they are due have this added to their reasons."""
    reasons = dict(decision.reasons)
    for view in (problem.jobs[i] for i in np.flatnonzero(is_due)):
        if view.spec.id in decision.allocations and not view.allocation.devices:
            reasons[view.spec.id] += ": it has had less than its guaranteed share of the time"
    return replace(decision, reasons=reasons)
