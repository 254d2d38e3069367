"""Finish-time fairness: the worst ratio of a job's finish time to that on its own 1/m of the cluster."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxgoodput.scheduler.gavel.fractions import FractionProblem, Fractions
from jaxgoodput.scheduler.gavel.programs import Program, gauge
from jaxgoodput.scheduler.policy import SolverError


@dataclass(frozen=True, kw_only=True)
class FinishTimeFairness:
    """min over x of max over jobs of (t_i + S_i / rate_i(x)) / (C_i + S_i / isolated_rate_i).

    t_i is the time since arrival, S_i the steps left, C_i what the past would have taken in isolation
    (Themis; Gavel, section 4.2; weights play no part). For a given ratio the needs are speeds, so each
    step is one linear program. Its prices give a lower bound on the ratio (the root of a convex
    function), at which the next one is solved: a Newton method that rises monotonically and ends after
    a few programs, at a relative distance of `tolerance` between the bound and what x reaches.
    """

    heterogeneous: bool = True
    tolerance: float = 1e-9
    max_programs: int = 60

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        seen = problem if self.heterogeneous else problem.agnostic()
        program = Program.of(seen)
        steps, since = problem.remaining_steps, problem.since_arrival_s
        isolated = seen.isolated_rate()
        asks = (steps > 0) & (isolated > 0)
        reasons = {
            job: "no kind of device has room for its gang and a known speed"
            for job, can in zip(problem.job_ids, problem.runnable, strict=True)
            if not can
        }
        if not asks.any():
            none = program.fractions(np.zeros(len(program.row)), reasons=reasons)
            return self._as_asked(none, problem)
        alone = problem.isolated_s + np.divide(steps, isolated, where=asks, out=np.ones(len(steps)))
        fastest = seen.throughput.max(axis=1)
        if seen.pairs:
            np.maximum.at(fastest, np.asarray(seen.pairs), seen.pair_throughput.max(axis=2))
        # Nobody is better off than at his best speed all of the time.
        low = float(np.max((since + steps / np.where(asks, fastest, 1.0))[asks] / alone[asks]))
        high, best = np.inf, None
        for _ in range(self.max_programs):
            need = np.zeros(len(steps))
            need[asks] = steps[asks] / (low * alone[asks] - since[asks])
            found = gauge(program, need)
            rate = program.rate @ np.maximum(found.x, 0.0)
            if (rate[asks] > 0).all():
                reached = float(np.max((since[asks] + steps[asks] / rate[asks]) / alone[asks]))
                if reached < high:
                    high, best = reached, found.x
            if high - low <= self.tolerance * high or found.scale >= 1.0:
                break
            low = _root(low, found, asks, steps, since, alone)
        if best is None:
            raise SolverError(
                "Finish-time fairness found no fractions that give every job some time, though each has "
                "devices to run on. Look for speeds near 0 in the jobs' goodput tables."
            )
        answer = program.fractions(best, objective=high, reasons=reasons)
        return self._as_asked(answer, problem)

    def _as_asked(self, answer, problem):
        empty = np.zeros((len(problem.pairs), len(problem.kinds)))
        return answer if self.heterogeneous else dataclasses.replace(answer, together=empty)


def _root(low, found, asks, steps, since, alone):
    """The ratio at which sum of price * need(ratio) falls to what the prices say can be reached.

    The sum is convex and falls with the ratio, so Newton's steps from the left never pass the root.
    """
    priced = np.flatnonzero(asks & (found.job_price > 0))
    weight = found.job_price[priced] * steps[priced]
    ratio = low
    for _ in range(100):
        gap = ratio * alone[priced] - since[priced]
        value = float((weight / gap).sum()) - found.scale
        slope = float((weight * alone[priced] / gap**2).sum())
        step = value / slope
        ratio += max(step, 0.0)
        if step <= 1e-15 * ratio:
            break
    # Rounding must not bring it to a halt short of the tolerance.
    return max(ratio, low * (1 + 1e-12))
