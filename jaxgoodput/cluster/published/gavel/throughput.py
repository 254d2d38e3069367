"""Maximise steps per second, or per dollar, with soft deadlines.

Source: Gavel (OSDI 2020, section 4.2) and its artifact. Differences: a deadline that cannot be met is
reported instead of making the problem infeasible.
"""

from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem, Fractions
from jaxgoodput.cluster.published.gavel.programs import LinearProgram, best_value
from jaxgoodput.cluster.scheduler.policy import SolverError


@dataclass(frozen=True, kw_only=True)
class TotalThroughput:
    """Maximise the sum over jobs of rate_i(x), optionally with each kind's speed divided by its price.

    `per_price` is Gavel's minimum cost (sum of x_ij T_ij / c_j). Its price is of one device even for a gang;
    `count_devices=True` counts all devices. Steps are not normalised, so jobs of many small steps win; this
    is Gavel's definition, kept for comparison.

    With `deadlines`, a job must run at S_i / (time to its deadline) or faster. If all deadlines can be met,
    this is a hard constraint. A deadline that has passed, or that the job cannot meet even alone, is ignored
    and reported. If the others cannot all be met, the sum of their relative shortfalls is minimised first,
    each shortfall is reported in `reasons`, and the value is maximised with what is left.
    """

    per_price: bool = False
    count_devices: bool = False
    deadlines: bool = False

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        program = LinearProgram.of(problem)
        value = np.asarray(program.rate.sum(axis=0)).ravel()
        if self.per_price:
            price = problem.price[program.column]
            if not (price > 0).all():
                raise ValueError(
                    f"per_price needs a price above 0 for every kind, got {problem.price.tolist()} for "
                    f"{list(problem.kinds)}. Give ClusterSpec.price_per_hour, or per_price=False."
                )
            if self.count_devices:
                first = [*range(problem.num_jobs), *(i for i, _ in problem.pairs)]
                price = price * problem.scale_factor[np.asarray(first, dtype=int)[program.row]]
            value = value / price
        need, reasons = self._needs(problem)
        found = best_value(program, value, need=need)
        if found is None:
            softly = best_value(program, value, need=need, soft=need > 0)
            assert softly is not None, "running nothing is feasible if all may fall short"
            short = softly[1]
            # Relax by a little, so that rounding does not make the second program infeasible.
            kept = need * np.maximum(1 - short - 1e-9, 0.0)
            found = best_value(program, value, need=kept)
            if found is None:
                raise SolverError(
                    "The deadlines that one linear program found reachable are infeasible in the next, "
                    "though relaxed by 1e-9. Look for extreme speeds in the jobs' goodput tables."
                )
            rate = program.rate @ found[0]
            for i in np.flatnonzero(rate < need * (1 - 1e-6)):
                reasons[problem.job_ids[i]] = (
                    f"deadline in {problem.deadlines_s[i]:.0f} s: needs {need[i]:.4g} steps/s, gets "
                    f"{rate[i]:.4g} beside the other deadlines"
                )
        x = found[0]
        return program.fractions(x, objective=float(value @ x), reasons=reasons)

    def _needs(self, problem):
        """Return [jobs] the steps/s that reachable deadlines need, and messages on the other ones by job."""
        need = np.zeros(problem.num_jobs)
        reasons = {}
        if not self.deadlines:
            return need, reasons
        best = (
            problem.throughput * np.minimum(1.0, problem.capacity / problem.scale_factor[:, None])
        ).max(axis=1, initial=0.0)
        for i, left_s in enumerate(problem.deadlines_s):
            steps = problem.remaining_steps[i]
            if not np.isfinite(left_s) or steps == 0:
                continue
            if left_s <= 0:
                reasons[problem.job_ids[i]] = f"deadline missed {-left_s:.0f} s ago"
            elif steps / left_s > best[i] * (1 + 1e-9):
                reasons[problem.job_ids[i]] = (
                    f"deadline in {left_s:.0f} s is out of reach: needs {steps / left_s:.4g} steps/s, its "
                    f"best kind gives {best[i]:.4g}"
                )
            else:
                need[i] = min(steps / left_s, best[i])
        return need, reasons
