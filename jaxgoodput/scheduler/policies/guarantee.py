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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgoodput.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.scheduler.shapes import capacity, capacity_rows


class Promises(NamedTuple):
    """What the choice of shapes has to keep; all of it can be kept together."""

    pinned: np.ndarray
    """[jobs] the shape that a job keeps, -1 = free."""
    at_least: np.ndarray
    """[jobs] bool: runs, in whatever shape."""


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


def promises(
    problem: ShapeProblem, is_due: np.ndarray, restoring: np.ndarray, young: np.ndarray
) -> Promises:
    """Who surely runs: the due by age, then who is restarting, then who began lately, as far as they fit.

    restoring: [jobs] the shape of who is restarting, else -1; young: [jobs] bool.
    """
    if not is_due.any():
        return Promises(restoring, young & (restoring < 0))  # they run, so they fit
    room = _Room(problem)
    pinned = np.full(len(problem.jobs), -1)
    at_least = np.zeros(len(problem.jobs), bool)
    order = sorted(
        np.flatnonzero(is_due).tolist(),
        key=lambda i: (problem.jobs[i].submitted_s, problem.jobs[i].spec.id),
    )
    for i in order:
        if restoring[i] >= 0 and room.take(i, [int(restoring[i])]):
            pinned[i] = restoring[i]
        else:
            at_least[i] = room.take(i, room.sizes(i))
    for i in np.flatnonzero((restoring >= 0) & ~is_due).tolist():
        if room.take(i, [int(restoring[i])]):
            pinned[i] = restoring[i]
    for i in np.flatnonzero(young & (restoring < 0) & ~is_due).tolist():
        at_least[i] = room.take(i, room.sizes(i))
    return Promises(pinned, at_least)


class _Room:
    """What is left of capacity and quotas while jobs are promised devices one after the other."""

    def __init__(self, problem: ShapeProblem):
        self._problem = problem
        rows = capacity_rows(problem.cluster, problem.shapes)
        self._use, self._left = rows.matrix, rows.limits.copy()
        self._quota = dict(problem.cluster.quota)

    def sizes(self, job: int) -> Sequence[int]:
        """The shapes that a job may have, the smallest first."""
        allowed = np.flatnonzero(~np.isnan(self._problem.goodput[job]))
        return [int(s) for s in allowed[np.argsort(self._problem.devices[allowed], kind="stable")]]

    def take(self, job: int, shapes: Sequence[int]) -> bool:
        """Take the first of these shapes that fits; False where none does."""
        tenant = self._problem.jobs[job].spec.tenant
        for shape in shapes:
            devices = int(self._problem.devices[shape])
            fits = (self._use[:, shape] <= self._left + 1e-9).all()
            if fits and devices <= self._quota.get(tenant, devices):
                self._left = self._left - self._use[:, shape]
                if tenant in self._quota:
                    self._quota[tenant] -= devices
                return True
        return False
