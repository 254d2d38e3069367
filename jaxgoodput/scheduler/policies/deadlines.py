"""Deadlines: who can still meet one gets what that takes, as soon as it must, ahead of everybody else.

A job that declares its work left needs, on a shape, that work over its goodput there, and a restart if it has
another shape. It claims the shapes on which that fits into the time left, the one that takes the fewest
device-seconds first: it grows only when a smaller size no longer does.

It claims when it must: when on that shape it could not stand still for half the time left, or when the jobs
that are due until some moment together need more than `CROWDED` of all devices until then (their processor
demand; Baruah, Rosier and Howell 1990), for all of these; and a job that has measured nothing yet, so that
it does. Before, it competes like any other. Claims are in
the order of deadlines, which on one device no other order beats (Dertouzos 1974). Where the demand exceeds
the devices, the job that needs most is given up, then the next (Moore 1968: so the most are in time). Given
up, like a job that not even its best shape brings there, it competes like any other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxgoodput.scheduler.policies.promises import Claim
from jaxgoodput.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.scheduler.shapes import capacity

MARGIN = 0.05  # of the time needed: goodputs are estimates
CROWDED = 0.7  # devices do not divide as demand does: gangs, nodes, kinds
IDLE = 0.5  # of the time left
CROWDED_STILL, IDLE_STILL = 0.5, 0.75  # for who runs: it goes on for a while once it had to start


@dataclass(frozen=True)
class Deadlines:
    """Who claims what, and whose deadline is given up beside the others."""

    claims: tuple[Claim, ...]
    given_up: Mapping[int, str]
    """Job -> why."""


@dataclass(frozen=True)
class _Due:
    """A job whose deadline its own goodput can meet."""

    job: int
    left_s: float
    shapes: tuple[int, ...]  # that are fast enough, the cheapest first
    needs_s: float  # on the cheapest; inf: it has to be measured
    device_s: float
    runs: bool


def deadlines_of(problem: ShapeProblem) -> Deadlines:
    """The claims of deadlines at present; jobs without a deadline or without declared work have none."""
    dues = sorted(
        (due for job in range(len(problem.jobs)) if (due := _due(problem, job)) is not None),
        key=lambda due: (due.left_s, problem.jobs[due.job].spec.id),
    )
    total = float(sum(capacity(problem.cluster).values()))
    kept, given_up = _in_time(problem, dues, total)
    crowded_s = {
        True: -math.inf,
        False: -math.inf,
    }  # the last moment until which there is hardly room
    demand = 0.0
    for due in kept:
        demand += due.device_s
        for runs, load in ((False, CROWDED), (True, CROWDED_STILL)):
            if demand > load * total * due.left_s:
                crowded_s[runs] = due.left_s
    must = [
        due
        for due in kept
        if due.left_s <= crowded_s[due.runs]
        or due.needs_s > (1.0 - (IDLE_STILL if due.runs else IDLE)) * due.left_s
    ]
    return Deadlines(tuple(Claim(due.job, due.shapes) for due in must), given_up)


def _due(problem: ShapeProblem, job: int) -> _Due | None:
    view = problem.jobs[job]
    if view.spec.deadline_s is None or view.remaining is None:
        return None
    left_s = view.spec.deadline_s - problem.now_s
    if not view.is_measured:
        shapes = tuple(problem.sizes(job))
        runs = bool(problem.running[job])
        return _Due(job, left_s, shapes, math.inf, 0.0, runs) if shapes and left_s > 0.0 else None
    until = view.restoring_until_s or -math.inf
    restart_s = np.full(len(problem.shapes), view.restart_s)
    if problem.present[job] >= 0:
        restart_s[problem.present[job]] = max(until - problem.now_s, 0.0)
    with np.errstate(invalid="ignore"):
        needs_s = view.remaining / problem.goodput[job] + restart_s
        fast = (1.0 + MARGIN) * needs_s <= left_s
        if not fast.any():
            fast = needs_s <= left_s
    if not fast.any():
        return None  # `constraints_of` says so
    device_s = np.where(fast, needs_s * problem.devices, np.inf)
    order = [int(s) for s in np.argsort(device_s, kind="stable") if fast[s]]
    return _Due(
        job=job,
        left_s=left_s,
        shapes=tuple(order),
        needs_s=float(needs_s[order[0]]),
        device_s=float(device_s[order[0]]),
        runs=bool(problem.running[job]),
    )


def _in_time(
    problem: ShapeProblem, dues: list[_Due], total: float
) -> tuple[list[_Due], dict[int, str]]:
    """The jobs, by deadline, that have room together, and why the others do not."""
    kept: list[_Due] = []
    given_up: dict[int, str] = {}
    for due in dues:
        kept.append(due)
        while sum(one.device_s for one in kept) > total * due.left_s:
            # What has begun is not thrown away for what has not, at equal need.
            worst = max(kept, key=lambda one: (one.device_s, not problem.running[one.job]))
            kept.remove(worst)
            given_up[worst.job] = (
                f"its deadline in {worst.left_s:.0f} s cannot be met beside those of others: until "
                f"then there are {total * worst.left_s:.0f} device-seconds, and it needs "
                f"{worst.device_s:.0f}"
            )
    return kept, given_up
