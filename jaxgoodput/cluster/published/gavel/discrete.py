"""Policies that need no linear program: in order of arrival, AlloX, Gandiva-like, and fixed shares.

Source: the baselines of Gavel (OSDI 2020, section 7) and its artifact; AlloX is Le et al., EuroSys 2020, and
Gandiva Xiao et al., OSDI 2018. Differences are stated at each class.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.optimize

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem, Fractions
from jaxgoodput.cluster.published.gavel.packing import best_partners, combined_speed


@dataclass(frozen=True, kw_only=True)
class FirstInFirstOut:
    """Run jobs in order of arrival until the first that fits on no kind; no job overtakes it.

    A job that could only get kinds on which its speed is 0 is passed over, because it would keep devices
    idle.

    With `kinds="fastest"`, each job takes the free kind on which it is fastest, anew at every call. With
    `kinds="any"` the policy cannot tell kinds apart: running jobs stay, other jobs take the kind with most
    devices free. If the problem has pairs, the first waiting job shares the devices of the running job with
    which the sum of relative speeds is greatest and above `packing_threshold`.
    """

    kinds: Literal["fastest", "any"] = "fastest"
    packing_threshold: float = 1.5

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        alone, together = problem.nothing()
        queue, reasons = self._run_in_order(problem, alone)
        while queue and (found := self._partner(problem, queue[0], alone)) is not None:
            k, other, j = found
            alone[other, j], together[k, j] = 0.0, 1.0
            queue.pop(0)
        if queue:
            head = problem.job_ids[queue[0]]
            reasons |= {problem.job_ids[i]: f"waits its turn behind {head}" for i in queue[1:]}
            size = problem.scale_factor[queue[0]]
            reasons[head] = f"first in the queue: no kind has its {size} free"
        return Fractions(alone=alone, together=together, reasons=reasons, fills=False)

    def _run_in_order(self, problem, alone):
        """Note in `alone` which jobs have room to run, in order; return the others, and remarks by job id."""
        free = problem.capacity.copy()
        queue = [i for i in _by_arrival(problem) if problem.runnable[i]]
        if self.kinds == "any":
            queue = _without_running(problem, queue, free, alone)
        reasons = {}
        while queue:
            i = queue[0]
            has_room = free >= problem.scale_factor[i]
            fits = has_room & (problem.throughput[i] > 0)
            if not has_room.any():
                break
            if fits.any():
                score = problem.throughput[i] if self.kinds == "fastest" else free
                j = int(np.argmax(np.where(fits, score, -1.0)))
                alone[i, j] = 1.0
                free[j] -= problem.scale_factor[i]
            else:
                reasons[problem.job_ids[i]] = "passed over: its speed on all that is free is 0"
            queue.pop(0)
        return queue, reasons

    def _partner(self, problem, i, alone):
        """Find the (pair, job, kind) with which job i shares devices best, by combined speed; or None."""
        best, best_speed = None, self.packing_threshold
        speeds = combined_speed(problem)
        for k, pair in enumerate(problem.pairs):
            if i not in pair:
                continue
            other = pair[0] if pair[1] == i else pair[1]
            for j in np.flatnonzero(alone[other] > 0):
                if speeds[k, j] > best_speed:
                    best, best_speed = (k, other, int(j)), speeds[k, j]
        return best


def _without_running(problem, jobs, free, alone):
    """Let running jobs stay on their kind if they make progress there; return the other jobs."""
    others = []
    for i in jobs:
        j = problem.held[i]
        if j >= 0 and problem.throughput[i, j] > 0 and free[j] >= problem.scale_factor[i]:
            alone[i, j] = 1.0
            free[j] -= problem.scale_factor[i]
        else:
            others.append(i)
    return others


@dataclass(frozen=True, kw_only=True)
class AlloX:
    """Choose the order and kinds of device with the smallest average finish time (EuroSys 2020).

    A job that is p-th from the end on its device delays p jobs by its length. So the best order is a
    minimum-cost matching of jobs with (device, p), and the first job of each device runs now. Jobs that run
    already are not moved. Only the `oldest_fraction` of the waiting jobs is considered, but at least as many
    as devices are free. Gangs of more than one device are outside the method and are reported.

    Devices of a kind are alike, so at most ceil(jobs / devices) positions on each are needed.
    """

    oldest_fraction: float = 1.0

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        alone, together = problem.nothing()
        gangs = np.flatnonzero(problem.scale_factor > 1)
        reasons = {
            problem.job_ids[
                i
            ]: f"AlloX runs single devices; this gang has {problem.scale_factor[i]}"
            for i in gangs
        }
        free = problem.capacity.copy()
        singles = (problem.scale_factor == 1) & problem.runnable
        in_order = [i for i in _by_arrival(problem) if singles[i]]
        waiting = _without_running(problem, in_order, free, alone)
        num_devices = int(free.sum())
        waiting = waiting[: max(num_devices, int(self.oldest_fraction * len(waiting)))]
        if waiting and num_devices:
            for i, j in _first_jobs(problem, waiting, free):
                alone[i, j] = 1.0
        return Fractions(alone=alone, together=together, reasons=reasons, fills=False)


def _first_jobs(problem, waiting, free):
    """Match waiting jobs with positions on free devices; return the first job of each device and its kind."""
    kind_of = np.repeat(np.arange(len(free)), free)
    speed = problem.throughput[np.ix_(waiting, kind_of)]
    length = problem.remaining_steps[waiting][:, None] / np.where(speed > 0, speed, 1.0)
    # A device that a job cannot use costs more than any order of all the jobs.
    never = (length.max() + 1.0) * len(waiting) ** 2
    length = np.where(speed > 0, length, never)
    deepest = -(-len(waiting) // np.maximum(free[kind_of], 1))
    columns = [
        (device, p) for p in range(1, len(waiting) + 1) for device in np.flatnonzero(deepest >= p)
    ]
    device_of, position = np.asarray(columns).T
    # The time waited so far is part of a finish time. It moves no optimum, but decides among equal ones.
    cost = problem.since_arrival_s[waiting][:, None] + length[:, device_of] * position
    first = {}
    for job, column in zip(*scipy.optimize.linear_sum_assignment(cost), strict=True):
        device, p = device_of[column], position[column]
        if speed[job, device] > 0 and p > first.get(device, (0, 0))[0]:
            first[device] = (p, job)
    return [(waiting[job], kind_of[device]) for device, (_, job) in first.items()]


@dataclass(frozen=True, kw_only=True)
class GandivaLike:
    """Give all jobs equal time; if they do not all fit, run pairs that do better together than in turn.

    Gandiva pairs jobs at random and keeps what works. Here the best pairs come first, so that equal problems
    give equal fractions. A pair is used only if its combined relative speed, averaged over the kinds that it
    can use, is at least `least_speed`.
    """

    least_speed: float = 1.0

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        alone, together = problem.nothing()
        can = np.flatnonzero(problem.runnable)
        chosen = ()
        if problem.scale_factor[can].sum() > problem.capacity.sum():
            chosen = best_partners(problem, self.least_speed)
        paired = {i for k in chosen for i in problem.pairs[k]}
        singles = [i for i in can if i not in paired]
        groups = len(singles) + len(chosen)
        for i in singles:
            useful = problem.throughput[i] > 0
            alone[i] = _equal_share(problem, groups, problem.scale_factor[i], useful)
        for k in chosen:
            useful = (problem.pair_throughput[k] > 0).all(axis=0)
            gang = problem.scale_factor[problem.pairs[k][0]]
            together[k] = _equal_share(problem, groups, gang, useful)
        return Fractions(alone=alone, together=together)


@dataclass(frozen=True, kw_only=True)
class IsolatedShares:
    """Give each of m jobs 1/m of every kind to itself, whether it is useful or not."""

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        return Fractions(alone=problem.isolated_fractions(), together=problem.nothing()[1])


@dataclass(frozen=True, kw_only=True)
class Proportional:
    """Give each job time on each kind of device by its share of all devices, less if not all jobs fit."""

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        share = problem.capacity / max(problem.capacity.sum(), 1)
        demand = max(int(problem.scale_factor.sum()), 1)
        scale = min(1.0, problem.capacity.sum() / demand)
        alone = np.broadcast_to(share * scale, problem.throughput.shape).copy()
        return Fractions(alone=alone, together=problem.nothing()[1])


def _by_arrival(problem):
    """Return the indices of the jobs, the earliest arrival first; equally old jobs keep their order."""
    return [int(i) for i in np.argsort(-problem.since_arrival_s, kind="stable")]


def _equal_share(problem, groups, gang, useful):
    share = np.where(useful, problem.capacity / max(groups, 1) / gang, 0.0)
    return share / max(share.sum(), 1.0)
