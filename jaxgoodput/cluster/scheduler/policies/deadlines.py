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

from jaxgoodput.cluster.scheduler.policies.promises import Claim
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.shapes import capacity

MARGIN = 0.05  # of the time needed: goodputs are estimates
CROWDED = 0.7  # devices do not divide as demand does: gangs, nodes, kinds
IDLE = 0.5  # of the time left
CROWDED_STILL, IDLE_STILL = 0.5, 0.75  # for who runs: it goes on for a while once it had to start


@dataclass(frozen=True)
class Deadlines:
    """Who claims what, and whose deadline is given up."""

    claims: tuple[Claim, ...]
    given_up: Mapping[int, str]
    """Job -> why."""


@dataclass(frozen=True)
class _Supplies:
    """All devices, and what tenants are limited to: of each only so much is used at a time."""

    most: np.ndarray
    """[supplies]"""
    counts: np.ndarray
    """[jobs, supplies] bool: whose use counts."""
    use: np.ndarray
    """[shapes, supplies] how much of it."""
    hours: tuple[bool, ...]
    """What costs money is told by the hour, devices by the second."""
    said: tuple[str, ...]
    """What there is, in words."""

    @classmethod
    def of(cls, problem: ShapeProblem) -> "_Supplies":
        limits = problem.limits()
        total = float(sum(capacity(problem.cluster).values()))
        unit = {True: "", False: "device-seconds "}
        priced = [limit.price is not None for limit, _, _ in limits]
        return cls(
            most=np.array([total, *(limit.left for limit, _, _ in limits)]),
            counts=np.stack(
                [np.ones(len(problem.jobs), bool), *(counted for _, counted, _ in limits)], 1
            ),
            use=np.stack(
                [
                    problem.devices.astype(float),
                    *(units[problem.kind] * problem.devices for _, _, units in limits),
                ],
                1,
            ),
            hours=(False, *priced),
            said=(
                "device-seconds that there are",
                *(
                    f"{unit[costs]}that {limit.said}, allows"
                    for (limit, _, _), costs in zip(limits, priced, strict=True)
                ),
            ),
        )


@dataclass(frozen=True)
class _Due:
    """A job with a deadline."""

    job: int
    left_s: float
    runs: bool
    shapes: tuple[int, ...]  # that are fast enough, the cheapest first
    least_s: float  # on its fastest; inf: not known, or none
    needs_s: float  # on the cheapest; inf: it has to be measured
    needs: np.ndarray  # [supplies] what it takes at least, in unit-seconds


def deadlines_of(problem: ShapeProblem) -> Deadlines:
    """The claims of deadlines at present; jobs without a deadline or without declared work have none."""
    if not len(problem.shapes):
        return Deadlines((), {})
    supplies = _Supplies.of(problem)
    dues = sorted(
        (due for job in range(len(problem.jobs)) if (due := _due(problem, supplies, job))),
        key=lambda due: (due.left_s, problem.jobs[due.job].spec.id),
    )
    kept, given_up = _in_time(problem, supplies, [due for due in dues if due.shapes])
    given_up |= {
        due.job: f"its deadline in {due.left_s:.0f} s can be met on no shape that it is offered: restart "
        f"included, that would take {due.least_s:.0f} s"
        for due in dues
        if not due.shapes and math.isfinite(due.least_s) and _could_elsewhere(problem, due)
    }
    return Deadlines(
        tuple(
            Claim(due.job, due.shapes)
            for due, now in zip(kept, _must(supplies, kept), strict=True)
            if now
        ),
        given_up,
    )


def _must(supplies: _Supplies, kept: list[_Due]) -> np.ndarray:
    """[kept] bool: who may not stand still any more, by himself or beside the others."""
    if not kept:
        return np.zeros(0, bool)
    left_s = np.array([due.left_s for due in kept])
    needs_s = np.array([due.needs_s for due in kept])
    runs = np.array([due.runs for due in kept])
    counts = supplies.counts[[due.job for due in kept]]
    demand = np.cumsum([due.needs for due in kept], axis=0)  # [kept, supplies]
    must = needs_s > (1.0 - np.where(runs, IDLE_STILL, IDLE)) * left_s
    for still, load in ((False, CROWDED), (True, CROWDED_STILL)):
        crowded = counts & (demand > load * supplies.most * left_s[:, None])
        # The last moment until which there is hardly room for all.
        last_s = np.where(crowded, left_s[:, None], -np.inf).max(0)
        must |= (runs == still) & (counts & (left_s[:, None] <= last_s)).any(1)
    return must


def _due(problem: ShapeProblem, supplies: _Supplies, job: int) -> _Due | None:
    """The job with the shapes on which it meets its deadline; None where there is nothing to meet."""
    view = problem.jobs[job]
    if view.spec.deadline_s is None or view.remaining is None:
        return None
    left_s = view.spec.deadline_s - problem.now_s
    runs = bool(problem.running[job])
    its = np.flatnonzero(supplies.counts[job])
    may: np.ndarray = np.all(supplies.use[:, its] <= supplies.most[its] + 1e-9, axis=1)
    needs = np.zeros(len(supplies.most))
    if not view.is_measured:
        shapes = tuple(s for s in problem.sizes(job) if may[s])
        due = _Due(job, left_s, runs, shapes, math.inf, math.inf, needs)
        return due if shapes and left_s > 0.0 else None
    until = view.restoring_until_s or -math.inf
    restart_s = np.full(len(problem.shapes), view.restart_s)
    if problem.present[job] >= 0:
        restart_s[problem.present[job]] = max(until - problem.now_s, 0.0)
    with np.errstate(invalid="ignore"):
        needs_s = np.where(may, view.remaining / problem.goodput[job] + restart_s, np.nan)
        fast = (1.0 + MARGIN) * needs_s <= left_s
        if not fast.any():
            fast = needs_s <= left_s
    least_s = float(np.min(needs_s, initial=np.inf, where=~np.isnan(needs_s)))
    if not fast.any():
        return _Due(job, left_s, runs, (), least_s, math.inf, needs)
    device_s = np.where(fast, needs_s * problem.devices, np.inf)
    quick = np.flatnonzero(fast)
    order = np.argsort(device_s, kind="stable")[: len(quick)].tolist()
    needs[its] = (needs_s[quick, None] * supplies.use[np.ix_(quick, its)]).min(0)
    return _Due(job, left_s, runs, tuple(order), least_s, float(needs_s[order[0]]), needs)


def _could_elsewhere(problem: ShapeProblem, due: _Due) -> bool:
    """Whether its own table has a shape that is fast enough; where not, `constraints_of` has said so."""
    view = problem.jobs[due.job]
    return view.remaining is not None and view.remaining <= due.left_s * max(
        view.goodput.values(), default=0.0
    )


def _in_time(
    problem: ShapeProblem, supplies: _Supplies, dues: list[_Due]
) -> tuple[list[_Due], dict[int, str]]:
    """The jobs, by deadline, that have room together, and why the others do not."""
    kept: list[_Due] = []
    given_up: dict[int, str] = {}
    demand = np.zeros(len(supplies.most))
    for due in dues:
        kept.append(due)
        demand = demand + due.needs
        while (over := demand > supplies.most * due.left_s + 1e-6).any():
            # First what concerns the fewest: who is given up for that may be in the way of all.
            where = np.flatnonzero(over)
            at = int(where[supplies.counts[:, where].sum(0).argmin()])
            # What has begun is not thrown away for what has not, at equal need.
            worst = max(kept, key=lambda one: (one.needs[at], not problem.running[one.job]))
            kept.remove(worst)
            demand = demand - worst.needs
            unit = 3600.0 if supplies.hours[at] else 1.0
            given_up[worst.job] = (
                f"its deadline in {worst.left_s:.0f} s cannot be met beside those of others: it needs "
                f"{worst.needs[at] / unit:.5g} of the {supplies.most[at] * worst.left_s / unit:.5g} "
                f"{supplies.said[at]} until then"
            )
    return kept, given_up
