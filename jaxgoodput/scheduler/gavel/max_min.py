"""Max-min fairness and makespan: the slowest job, by one measure or another, is as fast as can be."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from jaxgoodput.scheduler.gavel.fractions import FractionProblem, Fractions
from jaxgoodput.scheduler.gavel.programs import Program, gauge


@dataclass(frozen=True, kw_only=True)
class MaxMinFairness:
    """Least attained service: the smallest weighted share of the cluster is as large as can be.

    max over x of min over jobs of (s_i / w_i) rate_i(x) / proportional_rate_i. Agnostic to kinds
    (`heterogeneous=False`) the share is of time, whatever the kind: (s_i / w_i) sum_j x_ij. With pairs
    in the problem they are used (space sharing). Gavel, section 4.1. One linear program; beyond its
    worst job it promises nothing, which is what `WaterFilling` is for.
    """

    heterogeneous: bool = True

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        seen, need = problem, share_need(problem)
        if not self.heterogeneous:
            seen = problem.agnostic()
            ones = (seen.throughput > 0).astype(float)
            seen = dataclasses.replace(seen, throughput=ones)
            need = problem.weight / problem.scale_factor
        program = Program.of(seen)
        found = gauge(program, need)
        answer = program.fractions(found.x, objective=found.scale, reasons=_cannot_run(problem))
        empty = np.zeros((len(problem.pairs), len(problem.kinds)))
        return answer if self.heterogeneous else dataclasses.replace(answer, together=empty)


@dataclass(frozen=True, kw_only=True)
class Makespan:
    """The last job ends as early as can be: max over x of min over jobs of rate_i(x) / steps left.

    The objective is the makespan in seconds, exactly, of one linear program. `heterogeneous=False`
    takes all kinds for equally fast. Gavel, section 4.2.
    """

    heterogeneous: bool = True

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        seen = problem if self.heterogeneous else problem.agnostic()
        program = Program.of(seen)
        found = gauge(program, problem.remaining_steps)
        answer = program.fractions(
            found.x, objective=1.0 / found.scale, reasons=_cannot_run(problem)
        )
        empty = np.zeros((len(problem.pairs), len(problem.kinds)))
        return answer if self.heterogeneous else dataclasses.replace(answer, together=empty)


def share_need(problem: FractionProblem) -> np.ndarray:
    """[jobs] steps/s that are one unit of weighted share: w_i proportional_rate_i / s_i."""
    return problem.weight / problem.scale_factor * problem.proportional_rate()


def _cannot_run(problem: FractionProblem) -> dict[str, str]:
    return {
        job: "no kind of device has room for its gang and a known speed"
        for job, can in zip(problem.job_ids, problem.runnable, strict=True)
        if not can
    }
