"""The two linear programs of all fraction policies: the largest scale (`gauge`), and the best value.

Source: the programs of Gavel (OSDI 2020, section 4), which the artifact states one by one for CVXPY; here
they are two functions on sparse matrices. HiGHS' dual simplex solves both, because its answer is a vertex:
at most as many variables and slacks are above 0 as there are rows, so few jobs are split over several kinds
and few jobs move.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import scipy.optimize
import scipy.sparse
from jaxtyping import Bool, Float

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem, Fractions, limit_use
from jaxgoodput.cluster.scheduler.policy import SolverError

_TOLERANCE = 1e-10  # the smallest that HiGHS accepts


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """All feasible fractions of time of a problem, as a linear program in sparse matrices.

    A variable is a combination of jobs (first every job alone, then the pairs) on a kind on which all its
    members make progress. `rate @ x` is in steps per second.
    """

    problem: FractionProblem
    row: np.ndarray  # [variables] combination
    column: np.ndarray  # [variables] kind
    rate: scipy.sparse.csr_matrix  # [jobs, variables]
    limits: (
        scipy.sparse.csr_matrix
    )  # [jobs + kinds, variables]: each job's time, each kind's devices

    @classmethod
    def of(cls, problem: FractionProblem) -> "LinearProgram":
        """Return the linear program of a problem: its limits, and a variable per job or pair and kind."""
        num_jobs, num_kinds = problem.throughput.shape
        row, column = np.nonzero(problem.throughput)
        num_alone = len(row)
        pairs = np.asarray(problem.pairs, dtype=int).reshape(-1, 2)
        pair_row, pair_column = np.nonzero((problem.pair_throughput > 0).all(axis=1))
        row = np.concatenate([row, num_jobs + pair_row])
        column = np.concatenate([column, pair_column])
        variable = np.arange(len(row))
        # The first member of each combination: the job itself, or the first job of the pair.
        first = np.where(row < num_jobs, row, 0)
        first[num_alone:] = pairs[pair_row, 0]
        jobs = np.concatenate([first, pairs[pair_row, 1]])
        variables = np.concatenate([variable, variable[num_alone:]])
        speeds = np.concatenate(
            [
                problem.throughput[row[:num_alone], column[:num_alone]],
                problem.pair_throughput[pair_row, 0, pair_column],
                problem.pair_throughput[pair_row, 1, pair_column],
            ]
        )
        rate = scipy.sparse.csr_matrix((speeds, (jobs, variables)), (num_jobs, len(row)))
        limits = scipy.sparse.csr_matrix(
            (
                np.concatenate([np.ones(len(jobs)), problem.scale_factor[first].astype(float)]),
                (np.concatenate([jobs, num_jobs + column]), np.concatenate([variables, variable])),
            ),
            (num_jobs + num_kinds, len(row)),
        )
        quotas = [limit_use(problem, limit)[row, column] for limit in problem.limits]
        if quotas:
            limits = scipy.sparse.csr_matrix(scipy.sparse.vstack([limits, np.array(quotas)]))
        return cls(problem, row, column, rate, limits)

    @property
    def bounds(self) -> np.ndarray:
        """[rows] upper bounds on `limits @ x`: time of jobs, devices of kinds, quotas and limits."""
        problem = self.problem
        quotas = [float(limit.left) for limit in problem.limits]
        return np.concatenate([np.ones(problem.num_jobs), problem.capacity, quotas])

    def fractions(self, x: np.ndarray, **more) -> Fractions:
        """Return a solution x as `Fractions`, scaled to hold exactly. Raises SolverError if it is far off."""
        num_jobs, num_kinds = self.problem.throughput.shape
        table = np.zeros((num_jobs + len(self.problem.pairs), num_kinds))
        table[self.row, self.column] = np.clip(x, 0.0, 1.0)
        answer = Fractions(alone=table[:num_jobs], together=table[num_jobs:], **more)
        over = answer.excess(self.problem)
        if over > 1e-6:
            raise SolverError(
                f"HiGHS returned fractions that exceed a constraint by {over:.3g}, beyond its tolerance "
                f"of {_TOLERANCE}. Speeds that differ by more than ten orders of magnitude within one "
                "job are the usual cause: check its goodput table."
            )
        if over > 0:  # scaling down makes every constraint hold exactly
            keep = 1.0 / (1.0 + over)
            answer = dataclasses.replace(
                answer, alone=answer.alone * keep, together=answer.together * keep
            )
        return answer


@dataclass(frozen=True, eq=False)
class Gauge:
    """The result of `gauge`: by how much all jobs' needs can be scaled at once, and what limits that.

    A price tells how strongly a job, kind or quota limits the scale: 0 means that it does not. The prices
    bound what any solution can reach: for every feasible x, sum of job_price * rate(x) <= scale (strong
    duality).
    """

    scale: float
    """The largest factor at which rate(x) >= factor * need for all jobs; infinite if all needs are 0."""
    x: Float[np.ndarray, " variables"]
    """A solution that reaches `scale`: fractions of time, by variable of the `LinearProgram`."""
    job_price: Float[np.ndarray, " jobs"]
    """Price of a step per second of each job, in units such that sum of job_price * need = 1."""
    kind_price: Float[np.ndarray, " kinds"]
    """Above 0 for kinds of which more devices would raise the scale."""
    quota_price: Float[np.ndarray, " quotas"]
    """Above 0 for quotas and limits (`FractionProblem.limits`) that hold the scale down."""


def gauge(program: LinearProgram, need: Float[np.ndarray, " jobs"]) -> Gauge:
    """Maximise the scale such that rate(x) >= scale * need, with needs in steps per second.

    Jobs that need 0 or can run nowhere are ignored. If no job is left, the scale is infinite and x = 0.
    """
    best = program.rate.max(axis=1).toarray().ravel() if len(program.row) else need * 0.0
    asks = np.flatnonzero((need > 0) & (best > 0))
    prices = np.zeros(len(need))
    num_jobs, num_variables = cast(tuple[int, int], program.rate.shape)
    if len(asks) == 0:
        nothing = np.zeros(len(program.problem.kinds)), np.zeros(len(program.problem.limits))
        return Gauge(np.inf, np.zeros(num_variables), prices, *nothing)
    # In units of what a job can do at best, so that all coefficients are at most 1.
    relative = need[asks] / best[asks]
    unit = relative.max()
    rows = scipy.sparse.diags_array(1.0 / best[asks]) @ program.rate[asks]
    matrix = scipy.sparse.block_array(
        [[-rows, (relative / unit)[:, None]], [program.limits, None]], format="csc"
    )
    cost = np.zeros(num_variables + 1)
    cost[-1] = -1.0
    result = _solve(cost, matrix, np.concatenate([np.zeros(len(asks)), program.bounds]))
    assert result is not None, "x = 0 is feasible"
    dual = np.maximum(-result.ineqlin.marginals, 0.0)
    # The dual of the scaled scale column says sum(dual * relative / unit) = 1.
    prices[asks] = dual[: len(asks)] / best[asks] * unit
    prices /= max(float(prices @ np.where(best > 0, need, 0.0)), 1e-300)
    of_kinds = len(asks) + num_jobs
    of_quotas = of_kinds + len(program.problem.kinds)
    scale = float(result.x[-1]) / unit
    return Gauge(scale, result.x[:-1], prices, dual[of_kinds:of_quotas], dual[of_quotas:])


def best_value(
    program: LinearProgram,
    value: Float[np.ndarray, " variables"],
    *,
    need: Float[np.ndarray, " jobs"] | None = None,
    soft: Bool[np.ndarray, " jobs"] | None = None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Maximise value @ x with rate(x) >= need; return x and shortfalls, or None if no x meets all needs.

    If `soft` is given, the jobs that it marks may fall short, and instead of `value` the negative sum of
    their shortfalls is maximised (each from 0 to 1, relative to the need).

    Returns:
      x [variables] and the shortfall [jobs], 0 if `soft` is None.
    """
    num_jobs, num_variables = cast(tuple[int, int], program.rate.shape)
    need = np.zeros(num_jobs) if need is None else need
    asks = np.flatnonzero(need > 0)
    rows = -(scipy.sparse.diags_array(1.0 / need[asks]) @ program.rate[asks])
    right = np.concatenate([-np.ones(len(asks)), program.bounds])
    short = np.zeros(num_jobs)
    if soft is None:
        matrix = scipy.sparse.vstack([rows, program.limits], format="csc")
        result = _solve(-value / max(np.abs(value).max(initial=0.0), 1e-300), matrix, right)
        return None if result is None else (result.x, short)
    gaps = scipy.sparse.diags_array(-soft[asks].astype(float))
    matrix = scipy.sparse.block_array([[rows, gaps], [program.limits, None]], format="csc")
    cost = np.concatenate([np.zeros(num_variables), np.ones(len(asks))])
    result = _solve(cost, matrix, right)
    if result is None:
        return None
    short[asks] = np.clip(result.x[num_variables:], 0.0, 1.0)
    return result.x[:num_variables], short


def _solve(cost: np.ndarray, matrix: Any, right: np.ndarray) -> Any:
    """Return a vertex that minimises cost @ x for x >= 0, matrix @ x <= right; None if it is infeasible."""
    if len(cost) == 0:  # linprog refuses empty problems
        return scipy.optimize.OptimizeResult(x=cost) if (right >= 0).all() else None
    result = scipy.optimize.linprog(
        cost,
        A_ub=matrix,
        b_ub=right,
        method="highs-ds",
        options={
            "primal_feasibility_tolerance": _TOLERANCE,
            "dual_feasibility_tolerance": _TOLERANCE,
        },
    )
    if result.status == 2:
        return None
    if result.status != 0 or result.x is None:
        raise SolverError(
            f"HiGHS stopped with the status {result.status} ({result.message}) on {matrix.shape[0]} rows "
            f"and {matrix.shape[1]} variables. The problem has a solution whenever speeds and needs are "
            "finite: look for extreme entries in the jobs' goodput tables."
        )
    return result
