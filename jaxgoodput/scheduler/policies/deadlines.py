"""Deadlines: who can still meet one gets what that takes, as soon as it must, ahead of everybody else.

A job that declares its work left needs, on a shape, that work over its goodput there, and a restart if it has
another shape. It claims the shapes on which that fits into the time left, the one that takes the fewest
device-seconds first: it grows only when a smaller size no longer does.

It claims when it must: when on that shape it could not stand still for half the time left, or when the jobs
that are due until some moment together need more than `CROWDED` of all devices until then (their processor
demand; Baruah, Rosier and Howell 1990), for all of these; and a job that has measured nothing yet, so that
it does. Before, it competes like any other. Claims are in the order of deadlines, which on one device no
other order beats (Dertouzos 1974). Where the demand exceeds the devices, the job that needs most is given
up, then the next (Moore 1968: so the most are in time). What a tenant is limited to counts like devices, for
its jobs. Given up, like a job that not even its best shape brings there, it competes like any other.
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
class _Supply:
    """Devices, or what a limit counts, of which only so many are used at a time."""

    most: float
    counts: np.ndarray
    """[jobs] bool."""
    use: np.ndarray
    """[shapes] of it by a job that counts."""
    said: str
    """Whose it is, in words."""


@dataclass(frozen=True)
class _Due:
    """A job with a deadline."""

    job: int
    left_s: float
    shapes: tuple[int, ...]  # that are fast enough, the cheapest first
    least_s: float  # on its fastest
    needs_s: float  # on the cheapest; inf: it has to be measured
    needs: np.ndarray  # [supplies] there, in unit-seconds
    runs: bool


def deadlines_of(problem: ShapeProblem) -> Deadlines:
    """The claims of deadlines at present; jobs without a deadline or without declared work have none."""
    supplies = _supplies(problem)
    dues = sorted(
        (due for job in range(len(problem.jobs)) if (due := _due(problem, supplies, job))),
        key=lambda due: (due.left_s, problem.jobs[due.job].spec.id),
    )
    kept, given_up = _in_time(problem, supplies, [due for due in dues if due.shapes])
    given_up |= {
        due.job: f"on no shape that it is offered its deadline in {due.left_s:.0f} s can be met: it would "
        f"take {due.least_s:.0f} s"
        for due in dues
        if not due.shapes and _could_elsewhere(problem, due)
    }
    must = {
        due.job
        for due in kept
        if due.needs_s > (1.0 - (IDLE_STILL if due.runs else IDLE)) * due.left_s
    }
    for at, supply in enumerate(supplies):
        its = [due for due in kept if supply.counts[due.job]]
        demand = np.cumsum([due.needs[at] for due in its])
        for runs, load in ((False, CROWDED), (True, CROWDED_STILL)):
            # The last moment until which there is hardly room for all.
            crowded_s = max(
                (
                    d.left_s
                    for d, n in zip(its, demand, strict=True)
                    if n > load * supply.most * d.left_s
                ),
                default=-math.inf,
            )
            must |= {due.job for due in its if due.runs == runs and due.left_s <= crowded_s}
    return Deadlines(tuple(Claim(due.job, due.shapes) for due in kept if due.job in must), given_up)


def _supplies(problem: ShapeProblem) -> list[_Supply]:
    """All devices, and what tenants are limited to."""
    total = float(sum(capacity(problem.cluster).values()))
    every = np.ones(len(problem.jobs), bool)
    found = [_Supply(total, every, problem.devices.astype(float), f"all devices, {total:.0f}")]
    for limit, counted, units in problem.limits():
        found.append(
            _Supply(limit.left, counted, units[problem.kind] * problem.devices, limit.said)
        )
    return found


def _due(problem: ShapeProblem, supplies: list[_Supply], job: int) -> _Due | None:
    """The job with the shapes on which it meets its deadline; None where there is nothing to meet."""
    view = problem.jobs[job]
    if view.spec.deadline_s is None or view.remaining is None or not len(problem.shapes):
        return None
    left_s = view.spec.deadline_s - problem.now_s
    runs = bool(problem.running[job])
    nothing = np.zeros(len(supplies))
    if not view.is_measured:
        shapes = tuple(problem.sizes(job))
        due = _Due(job, left_s, shapes, math.inf, math.inf, nothing, runs)
        return due if shapes and left_s > 0.0 else None
    until = view.restoring_until_s or -math.inf
    restart_s = np.full(len(problem.shapes), view.restart_s)
    if problem.present[job] >= 0:
        restart_s[problem.present[job]] = max(until - problem.now_s, 0.0)
    with np.errstate(invalid="ignore"):
        needs_s = view.remaining / problem.goodput[job] + restart_s
    for supply in supplies:
        if supply.counts[job]:
            needs_s = np.where(supply.use <= supply.most + 1e-9, needs_s, np.nan)
    with np.errstate(invalid="ignore"):
        fast = (1.0 + MARGIN) * needs_s <= left_s
        if not fast.any():
            fast = needs_s <= left_s
    least_s = float(np.min(needs_s, initial=np.inf, where=~np.isnan(needs_s)))
    if not fast.any():
        return _Due(job, left_s, (), least_s, math.inf, nothing, runs)
    device_s = np.where(fast, needs_s * problem.devices, np.inf)
    order = [int(s) for s in np.argsort(device_s, kind="stable") if fast[s]]
    needs = np.array([needs_s[order[0]] * s.use[order[0]] * s.counts[job] for s in supplies])
    return _Due(job, left_s, tuple(order), least_s, float(needs_s[order[0]]), needs, runs)


def _could_elsewhere(problem: ShapeProblem, due: _Due) -> bool:
    """Whether its own table has a shape that is fast enough; where not, `constraints_of` has said so."""
    view = problem.jobs[due.job]
    return view.remaining is not None and view.remaining <= due.left_s * max(
        view.goodput.values(), default=0.0
    )


def _in_time(
    problem: ShapeProblem, supplies: list[_Supply], dues: list[_Due]
) -> tuple[list[_Due], dict[int, str]]:
    """The jobs, by deadline, that have room together, and why the others do not."""
    kept: list[_Due] = []
    given_up: dict[int, str] = {}
    demand = np.zeros(len(supplies))
    most = np.array([supply.most for supply in supplies])
    for due in dues:
        kept.append(due)
        demand = demand + due.needs
        while (over := demand > most * due.left_s + 1e-6).any():
            at = int(over.argmax())
            # What has begun is not thrown away for what has not, at equal need.
            worst = max(kept, key=lambda one: (one.needs[at], not problem.running[one.job]))
            kept.remove(worst)
            demand = demand - worst.needs
            given_up[worst.job] = (
                f"its deadline in {worst.left_s:.0f} s cannot be met beside those of others: it needs "
                f"{worst.needs[at]:.0f} of the {most[at] * worst.left_s:.0f} unit-seconds that "
                f"{supplies[at].said}, give until then"
            )
    return kept, given_up
