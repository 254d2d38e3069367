"""The fair policies: shares, finish times or ends of jobs are as even as can be, by linear programs.

Max-min fairness and makespan are one program each; finish-time fairness is a few. Water filling, the
lexicographic max-min optimum over jobs or over tenants and then their jobs, goes further. The levels of
all jobs rise along a path that is known in advance as long as no capacity binds: jobs that reach their
own best speed stop, and their tenant's others rise faster. So what is to be found is only how far along
the path is feasible; Newton's method on the prices of a linear program finds it in a few programs
(`gauge`). There the jobs with a price are stuck, and a job without one gains nothing from a kind that has
a price (complementary slackness), so its best speed is now that on the other kinds. Every such stage puts
a price on one more kind: there are no more stages than kinds, however many jobs there are, where the
published algorithm solves a mixed-integer program per level.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem, Fractions
from jaxgoodput.cluster.published.gavel.programs import LinearProgram, gauge
from jaxgoodput.cluster.scheduler.limits import per_device
from jaxgoodput.cluster.scheduler.policy import SolverError

_EXACT = 1e-9  # relative; how far from feasible levels may be
_PRICED = 1e-7  # a job's share of the price of all needs (which is 1) that says that it is stuck
_MAX_PROGRAMS = 200  # per stage of water filling; five are usual


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
        program = LinearProgram.of(seen)
        found = gauge(program, need)
        return _answer(program, found.x, problem, objective=found.scale)


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
        program = LinearProgram.of(seen)
        found = gauge(program, problem.remaining_steps)
        return _answer(program, found.x, problem, objective=1.0 / found.scale)


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
        program = LinearProgram.of(seen)
        steps, since = problem.remaining_steps, problem.since_arrival_s
        isolated = seen.isolated_rate()
        asks = (steps > 0) & (isolated > 0)
        if not asks.any():
            return _answer(program, np.zeros(len(program.row)), problem)
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
        return _answer(program, best, problem, objective=high)


@dataclass(frozen=True, kw_only=True)
class WaterFilling:
    """The smallest share (s_i / w_i) rate_i / proportional_rate_i is largest, then the next, and so on.

    The objective is the smallest share. Pairs in the problem are used. `heterogeneous=False` takes
    all kinds for equally fast. Gavel, section 4.3, with an exact test of who is stuck.
    """

    heterogeneous: bool = True

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        seen = problem if self.heterogeneous else problem.agnostic()
        everyone = (_Together(np.arange(problem.num_jobs), problem.weight),)
        return _fill(seen, problem, everyone)


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """Water filling over tenants by weight, and inside each by fairness or in order of arrival.

    An entity's rate W_e is shared among its jobs that can still rise: by weight ("fairness"), or all to
    the first of them ("fifo"). A tenant that is not named has the weight 1 and fairness. The objective
    is the lowest of the jobs' levels. Gavel, section 4.3.
    """

    weights: Mapping[str, float | int] = field(default_factory=dict)
    orders: Mapping[str, Literal["fairness", "fifo"]] = field(default_factory=dict)

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        entities = []
        for tenant in sorted(set(problem.tenant)):
            jobs = np.array([i for i, t in enumerate(problem.tenant) if t == tenant])
            weight = float(self.weights.get(tenant, 1.0))
            order = self.orders.get(tenant, "fairness")
            if not weight > 0 or order not in ("fairness", "fifo"):
                raise ValueError(
                    f"The tenant {tenant!r} has the weight {weight} and the order {order!r}: give a weight "
                    'above 0 and "fairness" or "fifo".'
                )
            if order == "fifo":
                jobs = jobs[np.argsort(-problem.since_arrival_s[jobs], kind="stable")]
                entities.append(_InTurn(jobs, weight))
            else:
                entities.append(_Together(jobs, problem.weight[jobs], weight))
        return _fill(problem, problem, tuple(entities))


def share_need(problem: FractionProblem) -> np.ndarray:
    """[jobs] steps/s that are one unit of weighted share: w_i proportional_rate_i / s_i."""
    return problem.weight / problem.scale_factor * problem.proportional_rate()


def _answer(
    program: LinearProgram, x: np.ndarray, problem: FractionProblem, objective: float | None = None
) -> Fractions:
    """The fractions of `x`, with a row for every pair of the problem as it was asked."""
    reasons = {
        job: "no kind of device has room for its gang and a known speed"
        for job, can in zip(problem.job_ids, problem.runnable, strict=True)
        if not can
    }
    answer = program.fractions(x, objective=objective, reasons=reasons)
    if len(answer.together) == len(problem.pairs):
        return answer
    nothing = np.zeros((len(problem.pairs), len(problem.kinds)))  # `agnostic` left the pairs out
    return dataclasses.replace(answer, together=nothing)


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


@dataclass(frozen=True, eq=False)
class _Together:
    """Jobs that rise at once, each in proportion to its weight, at a sum of `rate`.

    Where `rate` is None each rises at its own weight, whether others have stopped or not.
    """

    jobs: np.ndarray
    weight: np.ndarray
    rate: float | None = None

    def path(self, start, room, gang):
        """Levels after the time t, and the time from which on nothing rises."""
        unit = self.weight / gang[self.jobs]
        stop = room[self.jobs] / unit  # potential at which each job stops
        if self.rate is None:
            return lambda t: start[self.jobs] + unit * np.minimum(t, stop), stop.max(initial=0.0)
        order = np.argsort(stop, kind="stable")
        rising = self.weight[order][::-1].cumsum()[::-1]
        times = np.cumsum(np.diff(stop[order], prepend=0.0) * rising) / self.rate

        def levels(t):
            potential = np.interp(t, np.concatenate([[0.0], times]), np.append(0.0, stop[order]))
            return start[self.jobs] + unit * np.minimum(potential, stop)

        return levels, times[-1] if len(times) else 0.0


@dataclass(frozen=True, eq=False)
class _InTurn:
    """Jobs that rise one after another at the rate `rate`."""

    jobs: np.ndarray
    rate: float

    def path(self, start, room, gang):
        """Levels after the time t, and the time from which on nothing rises."""
        unit = self.rate / gang[self.jobs]
        lasts = room[self.jobs] / unit
        begins = np.cumsum(lasts) - lasts
        return (
            lambda t: start[self.jobs] + unit * np.clip(t - begins, 0.0, lasts),
            float(lasts.sum()),
        )


def _fill(seen, problem, entities):
    """Raises all levels until nobody can rise. Levels are rate / proportional rate, per job."""
    program = LinearProgram.of(seen)
    unit = seen.proportional_rate()
    unit = np.where(unit > 0, unit, 1.0)
    gang = problem.scale_factor.astype(float)
    open_kinds = seen.throughput > 0
    level = np.zeros(problem.num_jobs)
    rising = problem.runnable.copy()
    found = gauge(program, level)
    while rising.any():
        room = np.where(rising, np.maximum(_best(seen, open_kinds) / unit - level, 0.0), 0.0)
        paths = [(e.jobs, *e.path(level, room, gang)) for e in entities]
        levels = functools.partial(_levels, paths, problem.num_jobs)
        end = max((float(last) for _, _, last in paths), default=0.0)
        reached, binding, found = _furthest(program, levels, end, unit)
        new = levels(reached)
        stuck = rising & (new >= level + room * (1 - _EXACT))
        level = new
        if binding is None:
            break
        share = binding.job_price * unit * level
        priced = rising & (share > _PRICED)
        if not (priced | stuck).any():
            # Ties hide the price of whoever is stuck: the largest one is certain to be.
            priced = rising & (share >= share[rising].max())
        rising &= ~(priced | stuck)
        if not seen.pairs:
            least = _PRICED * binding.scale
            full = binding.kind_price * seen.capacity > least
            open_kinds &= ~(full[None, :] & rising[:, None])
            limits = np.array([limit.left for limit in seen.limits], dtype=float)
            spent = binding.quota_price * limits > least
            for limit in (one for one, out in zip(seen.limits, spent, strict=True) if out):
                its = [i for i in np.flatnonzero(rising) if seen.tenant[i] in limit.tenants]
                open_kinds[np.ix_(its, per_device([limit], seen.kinds)[0] > 0)] = False
    weighted = level * gang / problem.weight
    x = found.x if len(found.x) else np.zeros(len(program.row))
    lowest = weighted[problem.runnable].min(initial=np.inf)
    objective = float(lowest) if np.isfinite(lowest) else None
    return _answer(program, x, problem, objective=objective)


def _levels(paths, num_jobs, t):
    """[jobs] levels after the time t."""
    levels = np.zeros(num_jobs)
    for jobs, at, _ in paths:
        levels[jobs] = at(t)
    return levels


def _best(seen, open_kinds):
    """[jobs] the best speed on the kinds that are open to a job, alone or with another."""
    best = np.where(open_kinds, seen.throughput, 0.0).max(axis=1, initial=0.0)
    if seen.pairs:
        np.maximum.at(best, np.asarray(seen.pairs), seen.pair_throughput.max(axis=2))
    return best


def _furthest(program, levels, end, unit):
    """The largest t up to `end` whose levels are feasible, the prices that bind there, and a solution.

    Starts at the end of the path and comes down to the root of the last prices' bound, which no
    feasible t exceeds: exact after finitely many programs, as there are finitely many prices.
    """
    t, binding = end, None
    for _ in range(_MAX_PROGRAMS):
        found = gauge(program, levels(t) * unit)
        if found.scale >= 1 - _EXACT:
            return t, binding, found
        binding = found
        price = found.job_price * unit
        low, high = 0.0, t
        for _ in range(200):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if price @ levels(middle) <= found.scale else (low, middle)
        t = low
    raise SolverError(
        f"Water filling did not settle after {_MAX_PROGRAMS} linear programs at t={t}. Look for speeds that "
        "differ by many orders of magnitude in the jobs' goodput tables."
    )
