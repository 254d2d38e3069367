"""Keep decisions steady: a plan that is asked for again, with nothing new, stays as it is.

Weights fall with service, weights and the price of a change follow age. Without this rule, the running job
with more devices falls behind, gives devices to another job, gets them back, and so on for ever: 30 endless
jobs on 64 devices, with no event at all, changed 113 times in rounds 50 to 400. Service received says
something about a job's length when a job arrives, ends or is measured. So weights stand still from the last
arrival or change of devices on, and prices from the last news, which may also be a measurement
(`ClusterSpec.changed_s`). If nothing says when there was news, prices follow the present, because a new
measurement is worth acting on.

While a job waits, the present counts, so that it gets its turn: the jobs that hold its devices have had more
of them since. Only if that starts a job, something changes; running jobs exchange no devices meanwhile.
Besides, a promise may end: a restart, or the time for which a job that has begun is not paused. What changes
for these reasons is named in the decision's reasons.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.constraints import on_offer
from jaxgoodput.cluster.scheduler.placement.amounts import too_much
from jaxgoodput.cluster.scheduler.policies.placeable import PlacedChoice
from jaxgoodput.cluster.scheduler.policies.promises import Promises
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.solve.assignment import Choice
from jaxgoodput.specs import Allocation


class Standing(NamedTuple):
    """The problem as it was when weights and prices began to stand still."""

    weights: ShapeProblem
    prices: ShapeProblem


def some_wait(problem: ShapeProblem) -> bool:
    """Return whether a job waits that could run."""
    could = ~np.isnan(problem.goodput).all(1) if problem.goodput.size else problem.running
    return bool((could & ~problem.running).any())


def standing(problem: ShapeProblem, settle_s: float) -> Standing:
    """Return the problem as it was at the last event, for weights, and at the last news, for prices.

    News that is later than the last arrival or change of devices moves weights by at most `settle_s`; so does
    the time that passes if it is unknown when there was news.
    """
    now_s, news_s = problem.now_s, problem.cluster.changed_s
    # A reservation that begins or ends changes what there is, without an event.
    turns_s = [t for r in problem.cluster.reservations for t in (r.start_s, r.end_s) if t <= now_s]
    news_s = None if news_s is None else max([news_s, *turns_s])
    event_s = max(
        (t for v in problem.jobs for t in (v.submitted_s, v.since_s, v.paused_s) if t is not None),
        default=now_s,
    )
    last_s = now_s if news_s is None else min(max(event_s, news_s), now_s)
    prices, settled_s = as_of(problem, last_s), min(event_s + settle_s, last_s)
    return Standing(prices if settled_s == last_s else as_of(problem, settled_s), prices)


def as_of(problem: ShapeProblem, at_s: float) -> ShapeProblem:
    """Return the problem with time, service and declared work as they were, if jobs kept their devices.

    What ended jobs say of others stays as it is now: it changes with an end, which is news.
    """
    if problem.now_s <= at_s:
        return problem
    jobs = tuple(
        _as_of(view, int(shape), problem, at_s)
        for view, shape in zip(problem.jobs, problem.present.tolist(), strict=True)
    )
    return replace(problem, jobs=jobs, now_s=at_s)


def _as_of(view: JobView, shape: int, problem: ShapeProblem, at_s: float) -> JobView:
    """Return the job as it was at a time, if it has kept its devices since."""
    passed_s = problem.now_s - at_s
    had = _less(view.received_s, view.allocation.num_devices * passed_s)
    left = view.remaining
    if left is not None and shape >= 0:
        begun_s = at_s if view.since_s is None else max(at_s, view.since_s + view.restart_s)
        # Its table may no longer have its shape, for example if its budget is too small for it by now.
        left += max(problem.now_s - begun_s, 0.0) * view.goodput.get(problem.shapes[shape], 0.0)
    ran_s = view.fraction_received_s
    ran_s = _less(ran_s, passed_s) if view.allocation.devices else ran_s
    return replace(view, received_s=had, fraction_received_s=ran_s, remaining=left)


def _less(received_s: Mapping[str, float], less_s: float) -> dict[str, float]:
    """Return (device-)seconds by kind, scaled so that their sum is `less_s` smaller, but at least 0."""
    total_s = sum(received_s.values())
    left = max(1.0 - less_s / total_s, 0.0) if total_s > 0.0 else 1.0
    return {kind: had_s * left for kind, had_s in received_s.items()}


def uses_more(choice: Choice, other: Choice, problem: ShapeProblem) -> bool:
    """Return whether a choice uses more devices than another: a little more worth may be all of one job's."""
    used, others = (problem.devices[c.shape[c.shape >= 0]].sum() for c in (choice, other))
    return bool(used > others)


def unchanged(
    problem: ShapeProblem, utility: np.ndarray, promised: Promises, other: Choice, gap: float
) -> PlacedChoice | None:
    """Return the choice in which every job keeps what it has, if that is possible and good enough; else None.

    It is good enough if another choice is worth at most `gap` more and uses no more devices. `utility`:
    [jobs, shapes], NaN = not allowed.
    """
    rows = np.flatnonzero(problem.running)
    shapes = problem.present[rows]
    if (shapes < 0).any() or (promised.granted[~problem.running] >= 0).any():
        return None
    allowed = ~np.isnan(utility) & promised.allowed
    pinned = promised.pinned[rows]
    if not (allowed[rows, shapes].all() and ((pinned < 0) | (pinned == shapes)).all()):
        return None
    value = float(utility[rows, shapes].sum())
    chosen = np.where(problem.running, problem.present, -1)
    choice = Choice(shape=chosen, objective=value, bound=other.bound)
    if other.objective - value > gap or uses_more(other, choice, problem):
        return None
    allocations = {problem.jobs[i].spec.id: problem.jobs[i].allocation for i in rows.tolist()}
    if not (_within_limits(problem) and _still_there(problem, allocations)):
        return None
    return PlacedChoice(choice, allocations)


def _still_there(problem: ShapeProblem, allocations: Mapping[str, Allocation]) -> bool:
    """Return whether the cluster has all these devices and what they need, and no two jobs hold the same."""
    taken: dict[str, int] = {}  # bits
    for allocation in allocations.values():
        if not on_offer(allocation, problem.nodes, draining=True):
            return False
        for name, local in allocation.devices.items():
            its, others = sum(1 << i for i in local), taken.get(name, 0)
            if its & others:
                return False
            taken[name] = its | others
    specs = {view.spec.id: view.spec for view in problem.jobs}
    return too_much(problem.cluster, specs, allocations) is None


def _within_limits(problem: ShapeProblem) -> bool:
    """Return whether the jobs that run stay within each limit."""
    shape = problem.present[problem.running]
    return all(
        ((units[problem.kind] * problem.devices)[shape] * counted[problem.running]).sum()
        <= limit.left + 1e-9
        for limit, counted, units in problem.limits()
    )


def starts(decision: Decision, problem: ShapeProblem) -> list[int]:
    """Return the jobs that wait and get devices."""
    return [
        i
        for i in np.flatnonzero(~problem.running).tolist()
        if problem.jobs[i].spec.id in decision.allocations
    ]


def changes(decision: Decision, problem: ShapeProblem) -> bool:
    """Return whether any job gets other devices than it has."""
    return any(
        (given := decision.allocations.get(v.spec.id)) is not v.allocation
        and (given.devices if given else {}) != v.allocation.devices
        for v in problem.jobs
    )


def with_turns(
    decision: Decision, problem: ShapeProblem, is_due: np.ndarray, is_news: bool
) -> Decision:
    """Return the decision; reasons say whose turn it is, if jobs start on devices that others had.

    `is_due`: [jobs] bool, jobs whose reason says why they are due already. If there `is_news`, it is not
    their turn that starts the other jobs.
    """
    started = [i for i in starts(decision, problem) if is_due[i] or not is_news]
    fewer = _with_fewer_devices(decision, problem) if started else []
    if not fewer:
        return decision
    reasons, waited_s = dict(decision.reasons), problem.waited_s()
    for i in (i for i in started if not is_due[i]):
        reasons[problem.jobs[i].spec.id] += f": its turn, after {waited_s[i]:.0f} s without devices"
    first = problem.jobs[started[0]].spec.id
    more = f" and {len(started) - 1} more" if len(started) > 1 else ""
    for id_ in fewer:
        reasons[id_] += f"; it is the turn of {first}{more}"
    return replace(decision, reasons=reasons)


def _with_fewer_devices(decision: Decision, problem: ShapeProblem) -> list[str]:
    return [
        view.spec.id
        for view in problem.jobs
        if (given := decision.allocations.get(view.spec.id)) is not view.allocation
        and view.allocation.num_devices > (given.num_devices if given else 0)
    ]


def with_ended_promises(
    decision: Decision, problem: ShapeProblem, begun_s: float, least_run: float
) -> Decision:
    """Return the decision; jobs that may change since a promise ended have this added to their reasons.

    A job keeps its shape while it restarts, and is not paused before it has run `least_run` restarts. Only
    promises that ended after `begun_s`, the time of the last event, count.
    """
    reasons = dict(decision.reasons)
    for view in problem.jobs:
        given = decision.allocations.get(view.spec.id)
        if view.since_s is None or (given is not None and given.devices == view.allocation.devices):
            continue
        kept_s = view.restart_s * (1.0 if given is not None else max(least_run, 1.0))
        if begun_s < view.since_s + kept_s <= problem.now_s:
            reasons[view.spec.id] += f", now that it has had its devices for {kept_s:.0f} s"
    return replace(decision, reasons=reasons)
