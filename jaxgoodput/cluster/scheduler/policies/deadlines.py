"""Deadlines: a job that can still meet its deadline gets what that takes, just in time, before other jobs.

A job that declares its remaining work needs, on a shape, that work divided by its goodput there, plus a
restart if it has another shape. It claims the shapes that are fast enough for the time left, the cheapest in
device-seconds first. So it grows only when a smaller size is no longer enough.

A job makes its claim as late as possible; before, it competes like any other. It claims if it could not
stand still for half of the time left, or if the jobs due up to some moment together need more than `CROWDED`
of all devices until then (their processor demand; Baruah, Rosier and Howell 1990). A job without
measurements claims at once, in order to be measured. Claims are served in the order of deadlines, which no
other order beats on one device (Dertouzos 1974). If the demand exceeds the devices, the job with the
greatest need is given up, then the next, so that most jobs are in time (Moore 1968). Limits of tenants count
like devices, for their own jobs. A job whose deadline is given up, or out of reach on its best shape,
competes like any other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxgoodput.cluster.scheduler.policies.promises import Claim
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision
from jaxgoodput.cluster.scheduler.solve.assignment import Choice

MARGIN = 0.05  # of the time needed, because goodputs are estimates
CROWDED = 0.7  # not 1, because gangs, nodes and kinds do not divide as demand does
IDLE = 0.5  # of the time left
# For jobs that run: a job that had to start goes on for a while, instead of stopping at once.
CROWDED_STILL, IDLE_STILL = 0.5, 0.75


@dataclass(frozen=True)
class Deadlines:
    """The jobs that must run now to meet their deadlines, and the deadlines that are given up."""

    claims: tuple[Claim, ...]
    given_up: Mapping[int, str]
    """Reason for each given-up deadline, by index of the job."""


@dataclass(frozen=True)
class _Supplies:
    """Things of which only so much can be used at a time: all devices, and each limit of tenants."""

    most: np.ndarray
    """[supplies] units that can be used at a time."""
    counts: np.ndarray
    """[jobs, supplies] bool: whether a job's use counts."""
    use: np.ndarray
    """[shapes, supplies] units that a shape uses."""
    hours: tuple[bool, ...]
    """Whether a supply is told in hours (money) or seconds (devices)."""
    said: tuple[str, ...]
    """Unit and owner of each supply, in words."""

    @classmethod
    def of(cls, problem: ShapeProblem) -> "_Supplies":
        """Return the supplies of a problem: first all devices together, then each limit on tenants."""
        # CPUs and memory have no queue of their own: jobs that lack them are no earlier with fewer devices.
        limits = [limit for limit in problem.limits() if limit[0].tenants]
        total = float(sum(problem.supply.values()))
        most, use, counts = [total], [problem.devices.astype(float)], [np.ones(len(problem.jobs))]
        hours, said = [False], ["device-seconds in the cluster"]
        for limit, counted, units in limits:
            most.append(limit.left)
            use.append(units[problem.kind] * problem.devices)
            counts.append(counted)
            hours.append(limit.price is not None)
            unit = "" if limit.price is not None else "device-seconds "
            said.append(f"{unit}that {limit.said}, allows")
        return cls(
            most=np.array(most),
            counts=np.stack(counts, 1).astype(bool),
            use=np.stack(use, 1),
            hours=tuple(hours),
            said=tuple(said),
        )


@dataclass(frozen=True)
class _DueJob:
    """A job whose deadline has not passed, with the time and the devices that it still needs."""

    job: int
    left_s: float
    runs: bool
    shapes: tuple[int, ...]  # fast enough, the cheapest first
    least_s: float  # time on its fastest shape; inf if unknown, or if it has none
    needs_s: float  # time on its cheapest shape; inf if it has to be measured
    needs: np.ndarray  # [supplies] least use, in unit-seconds


def deadlines_of(problem: ShapeProblem) -> Deadlines:
    """Return the jobs that must run now to meet their deadlines, and the deadlines that are given up.

    Jobs without a deadline or without declared work make none.
    """
    if not len(problem.shapes):
        return Deadlines((), {})
    supplies = _Supplies.of(problem)
    found = (_due(problem, supplies, job) for job in range(len(problem.jobs)))
    dues = sorted(filter(None, found), key=lambda due: (due.left_s, problem.jobs[due.job].spec.id))
    kept, given_up = _in_time(problem, supplies, [due for due in dues if due.shapes])
    for due in dues:
        if _is_out_of_reach(problem, due):
            given_up[due.job] = (
                f"its deadline in {due.left_s:.0f} s cannot be met on any offered shape: with the restart, "
                f"the fastest takes {due.least_s:.0f} s"
            )
    must = _must(supplies, kept)
    claims = (Claim(due.job, due.shapes) for due, now in zip(kept, must, strict=True) if now)
    return Deadlines(tuple(claims), given_up)


def with_deadlines(
    decision: Decision, problem: ShapeProblem, choice: Choice, deadlines: Deadlines
) -> Decision:
    """Return the decision; the reasons of jobs with a deadline now mention it."""
    reasons = dict(decision.reasons)
    for i, why in deadlines.given_up.items():
        reasons[problem.jobs[i].spec.id] += f"; {why}"
    for i, shapes in deadlines.claims:
        spec = problem.jobs[i].spec
        left_s = (spec.deadline_s or problem.now_s) - problem.now_s
        if int(choice.shape[i]) not in shapes:
            fast = " that is fast enough" if problem.jobs[i].is_measured else ""
            reasons[spec.id] += (
                f"; its deadline is in {left_s:.0f} s, but promises to other jobs leave no shape{fast}"
            )
        elif spec.id in decision.allocations:
            reasons[spec.id] += f": its deadline is in {left_s:.0f} s"
    return replace(decision, reasons=reasons)


def _must(supplies: _Supplies, kept: list[_DueJob]) -> np.ndarray:
    """Return [kept] bool: a job must run now, as its time is short or too many other jobs are due."""
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
        # The last moment up to which there is hardly room for all jobs due by then.
        last_s = np.where(crowded, left_s[:, None], -np.inf).max(0)
        must |= (runs == still) & (counts & (left_s[:, None] <= last_s)).any(1)
    return must


def _due(problem: ShapeProblem, supplies: _Supplies, job: int) -> _DueJob | None:
    """Return the job with the shapes on which it meets its deadline; None if it has nothing to meet."""
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
        due = _DueJob(job, left_s, runs, shapes, math.inf, math.inf, needs)
        return due if shapes and left_s > 0.0 else None
    needs_s = np.where(may, _time_s(problem, job, view.remaining), np.nan)
    with np.errstate(invalid="ignore"):
        fast = (1.0 + MARGIN) * needs_s <= left_s
        if not fast.any():
            fast = needs_s <= left_s
    least_s = float(np.min(needs_s, initial=np.inf, where=~np.isnan(needs_s)))
    if not fast.any():
        return _DueJob(job, left_s, runs, (), least_s, math.inf, needs)
    device_s = np.where(fast, needs_s * problem.devices, np.inf)
    quick = np.flatnonzero(fast)
    order = np.argsort(device_s, kind="stable")[: len(quick)].tolist()
    needs[its] = (needs_s[quick, None] * supplies.use[np.ix_(quick, its)]).min(0)
    return _DueJob(job, left_s, runs, tuple(order), least_s, float(needs_s[order[0]]), needs)


def _time_s(problem: ShapeProblem, job: int, remaining: float) -> np.ndarray:
    """Return [shapes] seconds until a job would be done, its restart included; NaN = not allowed."""
    view = problem.jobs[job]
    restart_s = np.full(len(problem.shapes), view.restart_s)
    if problem.present[job] >= 0:
        until = view.restoring_until_s or -math.inf
        restart_s[problem.present[job]] = max(until - problem.now_s, 0.0)
    return remaining / problem.goodput[job] + restart_s


def _is_out_of_reach(problem: ShapeProblem, due: _DueJob) -> bool:
    """Return whether no offered shape is fast enough, though another one in the job's table would be.

    If no shape at all is fast enough, `constraints_of` has said so.
    """
    view = problem.jobs[due.job]
    if due.shapes or not math.isfinite(due.least_s) or view.remaining is None:
        return False
    return view.remaining <= due.left_s * max(view.goodput.values(), default=0.0)


def _in_time(
    problem: ShapeProblem, supplies: _Supplies, dues: list[_DueJob]
) -> tuple[list[_DueJob], dict[int, str]]:
    """Return the jobs that can all meet their deadlines together, and why each other one cannot."""
    kept: list[_DueJob] = []
    given_up: dict[int, str] = {}
    demand = np.zeros(len(supplies.most))
    for due in dues:
        kept.append(due)
        demand = demand + due.needs
        while (over := demand > supplies.most * due.left_s + 1e-6).any():
            # First the supply that the fewest jobs share: a job given up there may free room for all.
            exceeded = np.flatnonzero(over)
            at = int(exceeded[supplies.counts[:, exceeded].sum(0).argmin()])
            # At equal need, a job that has begun is kept rather than one that has not.
            worst = max(kept, key=lambda one: (one.needs[at], not problem.running[one.job]))
            kept.remove(worst)
            demand = demand - worst.needs
            unit = 3600.0 if supplies.hours[at] else 1.0
            given_up[worst.job] = (
                f"its deadline in {worst.left_s:.0f} s cannot be met beside other deadlines: it needs "
                f"{worst.needs[at] / unit:.5g} of the {supplies.most[at] * worst.left_s / unit:.5g} "
                f"{supplies.said[at]} until then"
            )
    return kept, given_up
