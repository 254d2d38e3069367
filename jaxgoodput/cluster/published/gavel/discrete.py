"""Policies that give whole kinds of device to whole jobs: in order of arrival, AlloX, Gandiva-like."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.optimize

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem, Fractions
from jaxgoodput.cluster.published.gavel.packing import best_partners, combined_speed


@dataclass(frozen=True, kw_only=True)
class FirstInFirstOut:
    """Jobs run in order of arrival until the first for which no kind has room; nobody overtakes it.

    One that could only get kinds on which its speed is 0 is passed over: it would keep devices idle.

    `kinds="fastest"`: each takes the free kind on which it is fastest, anew at every call.
    `kinds="any"` cannot tell kinds apart: jobs that run stay where they are, others take the kind with
    the most devices free. With pairs in the problem, the head of the queue that does not fit shares the
    devices of the running job with which the sum of their speeds, each relative to running alone, is
    greatest and above `packing_threshold`.
    """

    kinds: Literal["fastest", "any"] = "fastest"
    packing_threshold: float = 1.5

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        free = problem.capacity.copy()
        alone, together = _nothing(problem)
        queue = [i for i in _by_arrival(problem) if problem.runnable[i]]
        if self.kinds == "any":
            for i in [i for i in queue if problem.held[i] >= 0]:
                j = problem.held[i]
                if problem.throughput[i, j] > 0 and free[j] >= problem.scale_factor[i]:
                    alone[i, j] = 1.0
                    free[j] -= problem.scale_factor[i]
                    queue.remove(i)
        reasons = {}
        while queue:
            i = queue[0]
            fits = (free >= problem.scale_factor[i]) & (problem.throughput[i] > 0)
            if not fits.any():
                if not (free >= problem.scale_factor[i]).any():
                    break
                reasons[problem.job_ids[i]] = "passed over: its speed on all that is free is 0"
                queue.pop(0)
                continue
            score = problem.throughput[i] if self.kinds == "fastest" else free
            j = int(np.argmax(np.where(fits, score, -1.0)))
            alone[i, j] = 1.0
            free[j] -= problem.scale_factor[i]
            queue.pop(0)
        while queue and problem.pairs:
            found = self._partner(problem, queue[0], alone)
            if found is None:
                break
            k, other, j = found
            alone[other, j], together[k, j] = 0.0, 1.0
            queue.pop(0)
        if queue:
            head = problem.job_ids[queue[0]]
            reasons |= {problem.job_ids[i]: f"waits its turn behind {head}" for i in queue[1:]}
            reasons[head] = (
                f"first in the queue: no kind has its {problem.scale_factor[queue[0]]} free"
            )
        return Fractions(alone=alone, together=together, reasons=reasons, fills=False)

    def _partner(self, problem, i, alone):
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


@dataclass(frozen=True, kw_only=True)
class AlloX:
    """The order and the kinds of device with the smallest average finish time (EuroSys 2020).

    A job that runs p-th from the end on its device delays p jobs by its length, so the best order is a
    minimum-cost matching of jobs with (device, p); those that come first run now. Jobs that run already
    are not moved. Only the `oldest_fraction` of the waiting jobs, but at least as many as there are
    free devices, are looked at. Gangs of more than one device are outside of the method and reported.

    Devices of a kind are alike, so no more than ceil(jobs / devices) positions on each are needed.
    """

    oldest_fraction: float = 1.0

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        alone, together = _nothing(problem)
        reasons = {
            problem.job_ids[
                i
            ]: f"AlloX runs single devices; this gang has {problem.scale_factor[i]}"
            for i in np.flatnonzero(problem.scale_factor > 1)
        }
        free = problem.capacity.copy()
        waiting = []
        for i in _by_arrival(problem):
            if problem.scale_factor[i] > 1 or not problem.runnable[i]:
                continue
            j = problem.held[i]
            if j >= 0 and problem.throughput[i, j] > 0 and free[j] > 0:
                alone[i, j] = 1.0
                free[j] -= 1
            else:
                waiting.append(i)
        num_devices = int(free.sum())
        waiting = waiting[: max(num_devices, int(self.oldest_fraction * len(waiting)))]
        if not waiting or num_devices == 0:
            return Fractions(alone=alone, together=together, reasons=reasons, fills=False)
        kind_of = np.repeat(np.arange(len(free)), free)
        speed = problem.throughput[np.ix_(waiting, kind_of)]
        length = problem.remaining_steps[waiting][:, None] / np.where(speed > 0, speed, 1.0)
        # A device that a job cannot use costs more than any order of all the jobs.
        never = (length.max() + 1.0) * len(waiting) ** 2
        length = np.where(speed > 0, length, never)
        deepest = -(-len(waiting) // np.maximum(free[kind_of], 1))
        columns = [
            (device, p)
            for p in range(1, len(waiting) + 1)
            for device in np.flatnonzero(deepest >= p)
        ]
        device_of, position = np.asarray(columns).T
        # Waiting so far is part of a finish time; it moves no optimum, but it decides among equal ones.
        cost = problem.since_arrival_s[waiting][:, None] + length[:, device_of] * position
        jobs, chosen = scipy.optimize.linear_sum_assignment(cost)
        first = {}
        for job, column in zip(jobs, chosen, strict=True):
            device, p = device_of[column], position[column]
            if speed[job, device] > 0 and p > first.get(device, (0, 0))[0]:
                first[device] = (p, job)
        for device, (_, job) in first.items():
            alone[waiting[job], kind_of[device]] = 1.0
        return Fractions(alone=alone, together=together, reasons=reasons, fills=False)


@dataclass(frozen=True, kw_only=True)
class GandivaLike:
    """Equal time for all; where they do not all fit, in pairs that do better together than in turn.

    Gandiva pairs at random and keeps what works. Here the pairs are the best first, so that equal
    problems give equal fractions; a pair stays only while its combined relative speed, averaged over
    the kinds it can use, is at least `least_speed`.
    """

    least_speed: float = 1.0

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        alone, together = _nothing(problem)
        can = np.flatnonzero(problem.runnable)
        chosen = []
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
    """Each of m jobs has 1/m of every kind to itself, whatever it makes of it."""

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        return Fractions(alone=problem.isolated_fractions(), together=_nothing(problem)[1])


@dataclass(frozen=True, kw_only=True)
class Proportional:
    """Each job has time on the kinds in proportion to their numbers, its gangs scaled to what fits."""

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        share = problem.capacity / max(problem.capacity.sum(), 1)
        demand = max(int(problem.scale_factor.sum()), 1)
        scale = min(1.0, problem.capacity.sum() / demand)
        alone = np.broadcast_to(share * scale, problem.throughput.shape).copy()
        return Fractions(alone=alone, together=_nothing(problem)[1])


def _nothing(problem):
    return np.zeros(problem.throughput.shape), np.zeros((len(problem.pairs), len(problem.kinds)))


def _by_arrival(problem):
    """Jobs, oldest first; ties in the order given."""
    return [int(i) for i in np.argsort(-problem.since_arrival_s, kind="stable")]


def _equal_share(problem, groups, gang, useful):
    share = np.where(useful, problem.capacity / max(groups, 1) / gang, 0.0)
    return share / max(share.sum(), 1.0)
