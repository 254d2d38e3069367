"""Promises that the choice of shapes has to keep: claims granted in order, as far as they fit together.

A claim names a job and the shapes that satisfy it. Claims are granted one after the other, each on the first
of its shapes for which capacity and limits have room beside the claims granted before. So all granted claims
can be kept together, and the choice may still give a job any other of its claimed shapes. A later claim of
the same job is granted only on shapes that satisfy both claims. After the claims, restarting jobs keep their
shapes, and jobs that began lately run on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.shapes import capacity_rows


class Claim(NamedTuple):
    """A job that has to run, and the shapes on which it may."""

    job: int
    shapes: Sequence[int]
    """Shapes in the order in which they are tried. A shape that the job was granted before, or on which it is
    restarting, is tried first; then the one that it has, if it is no larger than the first of these."""


class Promises(NamedTuple):
    """Promises to jobs, such as to keep a shape or to run at all; the cluster can keep all at once."""

    pinned: np.ndarray
    """[jobs] shape that a job keeps, -1 = free."""
    at_least: np.ndarray
    """[jobs] bool: whether a job has to run, on any allowed shape."""
    allowed: np.ndarray
    """[jobs, shapes] bool: False if a granted claim of the job does not name the shape."""
    granted: np.ndarray
    """[jobs] shapes that keep all promises, -1 = none."""
    order: tuple[int, ...] = ()
    """Jobs with a promise, the ones whose promise counts most first."""


def promises(
    problem: ShapeProblem, claims: Sequence[Claim], restoring: np.ndarray, young: np.ndarray
) -> Promises:
    """Grant the claims in order, then the shapes of restarting jobs, then shapes of young jobs.

    `restoring`: [jobs] shape of a job that is restarting, else -1; `young`: [jobs] bool, began lately.
    """
    if not claims:
        allowed = np.ones(problem.goodput.shape, bool)
        # All of these jobs run at present, so their shapes fit together.
        granted = np.where(young | (restoring >= 0), problem.present, -1)
        order = [*np.flatnonzero(restoring >= 0), *np.flatnonzero(young & (restoring < 0))]
        return Promises(
            restoring, young & (restoring < 0), allowed, granted, tuple(map(int, order))
        )
    grants = _Grants(problem, restoring)
    for claim in claims:
        grants.grant(claim)
    for i in np.flatnonzero((restoring >= 0) & (grants.granted < 0)).tolist():
        if grants.take(i, [int(restoring[i])]):
            grants.pinned[i] = restoring[i]
    for i in np.flatnonzero(young & (restoring < 0) & (grants.granted < 0)).tolist():
        grants.take(i, problem.sizes(i))
    at_least = (grants.granted >= 0) & (grants.pinned < 0)
    order = dict.fromkeys(
        [
            *(claim.job for claim in claims),
            *np.flatnonzero(restoring >= 0).tolist(),
            *np.flatnonzero(young).tolist(),
        ]
    )
    order = tuple(i for i in order if grants.granted[i] >= 0)
    return Promises(grants.pinned, at_least, grants.allowed, grants.granted, order)


class _Grants:
    """Collects promises to jobs one after the other, as far as devices and limits suffice."""

    def __init__(self, problem: ShapeProblem, restoring: np.ndarray):
        self._room = Room(problem)
        self._restoring, self._present, self._devices = restoring, problem.present, problem.devices
        self.pinned = np.full(len(problem.jobs), -1)
        self.granted = np.full(len(problem.jobs), -1)
        self.allowed = np.ones(problem.goodput.shape, bool)

    def take(self, job: int, shapes: Sequence[int]) -> bool:
        """Promise the job the first of these shapes that still fits; return False if none does."""
        shape = self._room.take(job, shapes)
        self.granted[job] = -1 if shape is None else shape
        return shape is not None

    def grant(self, claim: Claim):
        """Grant a claim: find a shape that fits, and that satisfies earlier claims of the same job too."""
        i, shapes = claim
        had, present = int(self.granted[i]), int(self._restoring[i])
        both = [s for s in shapes if self.allowed[i, s]]
        if not both:
            return
        if had >= 0:
            self._room.give_back(i, had)
        here = self._keepable(i, both)
        if self.take(i, sorted(both, key=lambda s: (s != present, s != had, s != here))):
            self.pinned[i] = present if self.granted[i] == present else -1
            self.allowed[i] = False
            self.allowed[i, both] = True
        elif had >= 0:
            again = self.take(i, [had])
            assert again, "it was there a moment ago"

    def _keepable(self, job: int, shapes: Sequence[int]) -> int:
        """Return the shape that the job has, if it is among these and no larger than the first; else -1.

        It is tried before others: with other devices the job could drive out one that restarts.
        """
        here = int(self._present[job])
        return here if here in shapes and self._devices[here] <= self._devices[shapes[0]] else -1


class Room:
    """What devices and limits leave for further jobs, while devices are promised to job after job."""

    def __init__(self, problem: ShapeProblem):
        rows = capacity_rows(problem.cluster, problem.shapes)
        limits = problem.limits()
        units = [per_device[problem.kind] * problem.devices for _, _, per_device in limits]
        self._use = np.vstack([rows.matrix, *units])  # [rows and limits, shapes]
        self._left = np.concatenate([rows.limits, [limit.left for limit, _, _ in limits]])
        # [jobs, rows and limits] how far a job counts: for all rows, and for the limits that are on it.
        every = np.ones((len(problem.jobs), len(rows.limits)))
        self._counts = np.column_stack([every, *(counted for _, counted, _ in limits)])

    def take(self, job: int, shapes: Sequence[int]) -> int | None:
        """Take the first of these shapes that fits and return it; None if none does."""
        counted = self._counts[job]
        for shape in shapes:
            use = counted * self._use[:, shape]
            if (use <= np.where(counted > 0, self._left, np.inf) + 1e-9).all():
                self._left = self._left - use
                return int(shape)
        return None

    def give_back(self, job: int, shape: int):
        """Undo `take`: give back what the job's shape had taken of devices and limits."""
        self._left = self._left + self._counts[job] * self._use[:, shape]
