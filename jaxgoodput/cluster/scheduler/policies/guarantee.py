"""Starvation guard: a job that has had far less than an equal share runs, whatever others would gain.

Utility counts jobs, so many small jobs outbid a large one in every round. An equal share would give every
job the same part of its life on the fewest devices that it accepts, by weight: part = w C / sum_j w_j n_j,
at most 1, for C devices and jobs that need n_j. A job is guaranteed that it ends no later than if it ran for
a share of its part all the time. As long as it could still do so by running from now on without a break, it
can wait: its work is told, or else guessed (`work_left.py`). So it is *due* if it is older than a patience,
has run for less than that share of part x age, and would now end too late. It stays due until the same holds
for twice the share, so it is not interrupted at once; if jobs alternate, they do so in stretches that grow
with their age. These do not grow for ever: a job is also due once it has waited, without a break, for twice
the patience times the number of clusters that all jobs together would fill; turns of one patience each would
come in half of that. While at most half as many jobs again want devices as there are, a job that has run is
due much sooner, unless restarts take long: a pause costs its job more than the restarts cost the others.

Due jobs are served before jobs that are restarting or began lately: first the ones that have waited too long,
then the others in order of submission. So the oldest waiting job runs at once if it does not fit beside
others. A younger one waits only for the jobs before it, and these together take less than all of the time,
because each takes at most twice its guaranteed share. Only devices that a job really had count: a promise
that cannot be placed beside those before it is not kept (`placeable.py`), and its job stays due.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxgoodput.cluster.scheduler.policies.promises import Claim
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision
from jaxgoodput.cluster.scheduler.work_left import least_left_s

SOON = (
    0.4  # patiences that a paused job waits at most, unless many more want devices than there are
)
RESTARTS = 20.0  # and at least so many restarts of the job that restarts slowest
FEW_MORE = 1.5  # clusters full of jobs up to which a pause is that short
CHANCE = 0.75  # with which a job whose work is not told has as much left as is guessed, or more
TOO_LONG = 2.0  # patiences per cluster full of jobs; with 1, average times grow by up to 3 %


@dataclass(frozen=True, kw_only=True)
class DueJobs:
    """The jobs that must run now, because they have had too little."""

    due: np.ndarray
    """[jobs] bool."""
    behind: np.ndarray
    """[jobs] bool, those of them that have had less than their guaranteed share."""
    waited_s: np.ndarray
    """[jobs] seconds since the job last had devices; 0 unless it has waited too long."""


def due(problem: ShapeProblem, guaranteed: float, patience_s: float) -> DueJobs:
    """Return the jobs that are older than `patience_s` and behind the share `guaranteed` of an equal part.

    A waiting job is behind below `guaranteed` of its part, a running job below twice that. A job that has
    waited too long is due, too.
    """
    nothing = np.zeros(len(problem.jobs))
    if not problem.goodput.size or guaranteed <= 0.0:
        return DueJobs(due=nothing > 0.0, behind=nothing > 0.0, waited_s=nothing)
    fewest = np.where(np.isnan(problem.goodput), np.inf, problem.devices).min(1)
    can = np.isfinite(fewest)
    fewest = np.where(can, fewest, 1.0)
    weight = problem.weight()
    num_devices = sum(problem.supply.values())
    wanted = float((weight * fewest)[can].sum())
    part = np.minimum(weight * num_devices / max(wanted, 1e-9), 1.0)
    counted_s = np.array([sum(v.fraction_received_s.values()) for v in problem.jobs], np.float64)
    ran_s = np.where(counted_s > 0.0, counted_s, problem.received_s() / fewest)
    share = np.where(problem.running, 2.0 * guaranteed, guaranteed)
    age_s = problem.age_s()
    behind = can & (age_s > patience_s) & (ran_s < share * part * age_s)
    for i in np.flatnonzero(behind).tolist():
        left_s = _left_s(problem, i, float(fewest[i]))
        # Its age at its end, with that share all the time.
        behind[i] = age_s[i] + left_s >= (ran_s[i] + left_s) / (share[i] * part[i])
    clusters = max(float(fewest[can].sum()) / max(num_devices, 1), 1.0)
    waited_s = np.where(can, problem.waited_s(), 0.0)
    most = np.full(len(waited_s), TOO_LONG * clusters)
    most *= patience_s
    if clusters <= FEW_MORE:
        soon_s = max(SOON * patience_s, RESTARTS * float(problem.restart_s()[can].max(initial=0.0)))
        most[problem.paused()] = min(soon_s, TOO_LONG * clusters * patience_s)
    waited_s = np.where(waited_s >= most, waited_s, 0.0)
    return DueJobs(due=behind | (waited_s > 0.0), behind=behind, waited_s=waited_s)


def _left_s(problem: ShapeProblem, job: int, fewest: float) -> float:
    """Return the seconds that a job has left on its fewest devices: told, or else guessed."""
    view = problem.jobs[job]
    if view.remaining is not None and view.is_measured:
        return view.remaining / float(np.nanmax(problem.goodput[job, problem.devices == fewest]))
    had_s = math.fsum(view.received_s.values())
    return least_left_s(view.work_guess, had_s, CHANCE) / fewest


def claims_of(problem: ShapeProblem, turns: DueJobs) -> list[Claim]:
    """Return claims, by which due jobs must run: on any of their shapes, the smallest first.

    Jobs that have waited too long come first, the longest wait first, then the others by age.
    """
    order = sorted(
        np.flatnonzero(turns.due).tolist(),
        key=lambda i: (
            -turns.waited_s[i],
            problem.jobs[i].submitted_s,
            problem.jobs[i].spec.id,
        ),
    )
    return [Claim(i, problem.sizes(i)) for i in order]


def with_due(decision: Decision, problem: ShapeProblem, turns: DueJobs) -> Decision:
    """Return the decision; jobs that start because they are due have this added to their reasons."""
    reasons = dict(decision.reasons)
    for i in np.flatnonzero(turns.due).tolist():
        view = problem.jobs[i]
        if view.spec.id not in decision.allocations or view.allocation.devices:
            continue
        reasons[view.spec.id] += (
            ": it has had less than its guaranteed share of the time"
            if turns.behind[i]
            else f": its turn, after {turns.waited_s[i]:.0f} s without devices"
        )
    return replace(decision, reasons=reasons)


def with_ended_turns(
    decision: Decision, problem: ShapeProblem, was_due: np.ndarray, is_due: np.ndarray
) -> Decision:
    """Return the decision; jobs that lose devices as they are no longer due have this added to their reasons.

    `was_due`: [jobs] bool, at the last event.
    """
    reasons = dict(decision.reasons)
    for view in (problem.jobs[i] for i in np.flatnonzero(was_due & ~is_due & problem.running)):
        given = decision.allocations.get(view.spec.id)
        if given is None or given.num_devices < view.allocation.num_devices:
            reasons[view.spec.id] += ": its turn is over, as it has had its guaranteed share"
    return replace(decision, reasons=reasons)
