"""What the choice of shapes has to keep, whatever it is worth: claims in order, as far as they fit together.

A claim names a job and the shapes that satisfy it. Claims are granted one after the other, each on the first
of its shapes for which capacity and limits have room beside those granted before; so all that is granted can
be kept together, and the choice may still give a job any other of its claimed shapes. A later claim of the
same job is granted on shapes that satisfy both. Then who is restarting keeps its shape, and who began lately
runs on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.shapes import capacity_rows


class Claim(NamedTuple):
    """A job that is to run on one of these shapes."""

    job: int
    shapes: Sequence[int]
    """The one that is tried first in front; before it, one that it was granted before or is restarting on."""


class Promises(NamedTuple):
    """What the choice of shapes has to keep; all of it can be kept together."""

    pinned: np.ndarray
    """[jobs] the shape that a job keeps, -1 = free."""
    at_least: np.ndarray
    """[jobs] bool: runs, on an allowed shape."""
    allowed: np.ndarray
    """[jobs, shapes] bool: False where a granted claim does not name the shape."""
    granted: np.ndarray
    """[jobs] shapes with which all that is kept, -1 = none."""


def promises(
    problem: ShapeProblem, claims: Sequence[Claim], restoring: np.ndarray, young: np.ndarray
) -> Promises:
    """Who surely runs: the claims in order, then who is restarting, then who began lately.

    restoring: [jobs] the shape of who is restarting, else -1; young: [jobs] bool.
    """
    allowed = np.ones(problem.goodput.shape, bool)
    if not claims:
        granted = np.where(young | (restoring >= 0), problem.present, -1)  # they run, so they fit
        return Promises(restoring, young & (restoring < 0), allowed, granted)
    room = Room(problem)
    pinned = np.full(len(problem.jobs), -1)
    granted = np.full(len(problem.jobs), -1)

    def take(i: int, shapes: Sequence[int]) -> bool:
        """Grant the first of these shapes that fits, if one does."""
        shape = room.take(i, shapes)
        granted[i] = -1 if shape is None else shape
        return shape is not None

    for i, shapes in claims:
        had = int(granted[i])
        both = [s for s in shapes if allowed[i, s]]
        if not both:
            continue
        if had >= 0:
            room.give_back(i, had)
        first = [s for s in (int(restoring[i]), had) if s in both]
        if take(i, [*first, *both]):
            pinned[i] = restoring[i] if granted[i] == restoring[i] else -1
            allowed[i] = False
            allowed[i, both] = True
        elif had >= 0:
            again = take(i, [had])
            assert again, "it was there a moment ago"
    for i in np.flatnonzero((restoring >= 0) & (granted < 0)).tolist():
        if take(i, [int(restoring[i])]):
            pinned[i] = restoring[i]
    for i in np.flatnonzero(young & (restoring < 0) & (granted < 0)).tolist():
        take(i, problem.sizes(i))
    return Promises(pinned, (granted >= 0) & (pinned < 0), allowed, granted)


class Room:
    """What is left of capacity and limits while jobs are promised devices one after the other."""

    def __init__(self, problem: ShapeProblem):
        rows = capacity_rows(problem.cluster, problem.shapes)
        limits = problem.limits()
        units = [per_device[problem.kind] * problem.devices for _, _, per_device in limits]
        self._use = np.vstack([rows.matrix, *units])  # [rows and limits, shapes]
        self._left = np.concatenate([rows.limits, [limit.left for limit, _, _ in limits]])
        # [jobs, rows and limits] which of them a job uses: all rows, and the limits of its tenant.
        every = np.ones((len(problem.jobs), len(rows.limits)), bool)
        self._counts = np.column_stack([every, *(counted for _, counted, _ in limits)])

    def take(self, job: int, shapes: Sequence[int]) -> int | None:
        """Take the first of these shapes that fits, and say which; None where none does."""
        counted = self._counts[job]
        for shape in shapes:
            use = np.where(counted, self._use[:, shape], 0.0)
            if (use <= np.where(counted, self._left, np.inf) + 1e-9).all():
                self._left = self._left - use
                return int(shape)
        return None

    def give_back(self, job: int, shape: int):
        """As if the job had not taken it."""
        self._left = self._left + np.where(self._counts[job], self._use[:, shape], 0.0)
