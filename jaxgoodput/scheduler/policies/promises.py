"""What the choice of shapes has to keep, whatever it is worth: claims in order, as far as they fit together.

A claim names a job and the shapes that satisfy it. Claims are granted one after the other, each on the first
of its shapes for which capacity and quotas have room beside those granted before; so all that is granted can
be kept together, and the choice may still give a job any other of its claimed shapes. Then who is restarting
keeps its shape, and who began lately runs on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgoodput.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.scheduler.shapes import capacity_rows


class Claim(NamedTuple):
    """A job that is to run on one of these shapes."""

    job: int
    shapes: Sequence[int]
    """The one that is tried first in front."""


class Promises(NamedTuple):
    """What the choice of shapes has to keep; all of it can be kept together."""

    pinned: np.ndarray
    """[jobs] the shape that a job keeps, -1 = free."""
    at_least: np.ndarray
    """[jobs] bool: runs, on an allowed shape."""
    allowed: np.ndarray
    """[jobs, shapes] bool: False where a granted claim does not name the shape."""


def promises(
    problem: ShapeProblem, claims: Sequence[Claim], restoring: np.ndarray, young: np.ndarray
) -> Promises:
    """Who surely runs: the claims in order, then who is restarting, then who began lately.

    restoring: [jobs] the shape of who is restarting, else -1; young: [jobs] bool. Of several claims of one
    job the first that fits is granted.
    """
    allowed = np.ones(problem.goodput.shape, bool)
    if not claims:
        return Promises(restoring, young & (restoring < 0), allowed)  # they run, so they fit
    room = _Room(problem)
    pinned = np.full(len(problem.jobs), -1)
    at_least = np.zeros(len(problem.jobs), bool)
    for i, shapes in claims:
        if pinned[i] >= 0 or at_least[i]:
            continue
        if restoring[i] in shapes and room.take(i, [int(restoring[i])]):
            pinned[i] = restoring[i]
        elif room.take(i, shapes):
            at_least[i] = True
            allowed[i] = False
            allowed[i, list(shapes)] = True
    for i in np.flatnonzero((restoring >= 0) & (pinned < 0) & ~at_least).tolist():
        if room.take(i, [int(restoring[i])]):
            pinned[i] = restoring[i]
    for i in np.flatnonzero(young & (restoring < 0) & ~at_least).tolist():
        at_least[i] = room.take(i, problem.sizes(i))
    return Promises(pinned, at_least, allowed)


class _Room:
    """What is left of capacity and quotas while jobs are promised devices one after the other."""

    def __init__(self, problem: ShapeProblem):
        self._problem = problem
        rows = capacity_rows(problem.cluster, problem.shapes)
        self._use, self._left = rows.matrix, rows.limits.copy()
        self._quota = dict(problem.cluster.quota)

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
