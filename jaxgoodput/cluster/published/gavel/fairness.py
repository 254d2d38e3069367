"""The fair policies: make shares, finish times or completion as even as possible, by linear programs.

Source: Gavel (OSDI 2020, sections 4.1 to 4.3) and its artifact; finish-time fairness is from Themis (Mahajan
et al., NSDI 2020). The objectives are as published; the algorithms differ as follows.

Max-min fairness and makespan are one program each, finish-time fairness a few. Water filling, the
lexicographic max-min optimum over jobs (or over tenants and then their jobs), needs more. As long as no
capacity binds, the levels of all jobs rise along a path that is known in advance: jobs that reach their own
best speed stop, and the other jobs of their tenant rise faster. So only the end of the feasible part of the
path is to be found; Newton's method on the prices of a linear program (`gauge`) finds it in a few programs.
At that point the jobs with a price are stuck. A job without one gains nothing from a kind that has a price
(complementary slackness), so its best speed is now the one on the other kinds. Every such stage puts a price
on one more kind, so there are no more stages than kinds, however many jobs there are. The published
algorithm solves a mixed-integer program per level instead.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem, Fractions
from jaxgoodput.cluster.published.gavel.programs import LinearProgram, gauge
from jaxgoodput.cluster.scheduler.limits import counts, per_device
from jaxgoodput.cluster.scheduler.policy import SolverError

_EXACT = 1e-9  # how far from feasible levels may be, relatively
_PRICED = 1e-7  # share of the price of all needs (1 in total) from which a job counts as stuck
_MAX_PROGRAMS = 200  # per stage of water filling; five are usual


@dataclass(frozen=True, kw_only=True)
class MaxMinFairness:
    """Least attained service: maximise the smallest weighted share of the cluster (Gavel, section 4.1).

    max over x of min over jobs of (s_i / w_i) rate_i(x) / proportional_rate_i. With `heterogeneous=False`, a
    share is one of time, whatever the kind: (s_i / w_i) sum_j x_ij. Pairs in the problem are used (space
    sharing). One linear program. It promises nothing to jobs other than the worst one; use `WaterFilling`
    for that.
    """

    heterogeneous: bool = True

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
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
    """Let the last job end as early as possible: max over x of min over jobs of rate_i(x) / steps left.

    One linear program, whose objective is exactly the makespan in seconds. With `heterogeneous=False` all
    kinds count as equally fast. Gavel, section 4.2.
    """

    heterogeneous: bool = True

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        seen = problem if self.heterogeneous else problem.agnostic()
        program = LinearProgram.of(seen)
        found = gauge(program, problem.remaining_steps)
        return _answer(program, found.x, problem, objective=1.0 / found.scale)


@dataclass(frozen=True, kw_only=True)
class FinishTimeFairness:
    """Minimise the worst finish-time ratio: (t_i + S_i / rate_i(x)) / (C_i + S_i / isolated_rate_i).

    t_i is the time since arrival, S_i the steps left, C_i the time that the past would have taken in
    isolation (Themis; Gavel, section 4.2). Weights play no part. For a given ratio the needs are speeds, so
    each step is one linear program. Its prices give a lower bound on the ratio (the root of a convex
    function), at which the next program is solved. This Newton method rises monotonically and ends after a
    few programs, as soon as the bound and the ratio reached differ by at most `tolerance`, relatively.
    """

    heterogeneous: bool = True
    tolerance: float = 1e-9
    max_programs: int = 60

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
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
        # No job does better than running at its best speed all of the time.
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
    """Maximise the smallest share (s_i / w_i) rate_i / proportional_rate_i, then the next smallest, and on.

    The objective is the smallest share. Pairs in the problem are used. With `heterogeneous=False` all kinds
    count as equally fast. Gavel, section 4.3, with an exact test of which jobs are stuck.
    """

    heterogeneous: bool = True

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        seen = problem if self.heterogeneous else problem.agnostic()
        everyone = (_Together(np.arange(problem.num_jobs), problem.weight),)
        return _fill(seen, problem, everyone)


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """Water filling over tenants by weight, and within each tenant by fairness or in order of arrival.

    A tenant's rate W_e is shared among its jobs that can still rise: by weight ("fairness"), or all to the
    first of them ("fifo"). A tenant that is not named has weight 1 and fairness. The objective is the lowest
    level of a job. Gavel, section 4.3.
    """

    weights: Mapping[str, float | int] = field(default_factory=dict)
    orders: Mapping[str, Literal["fairness", "fifo"]] = field(default_factory=dict)

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
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
    """Return [jobs] the steps/s that each job needs for one unit of its weighted fair share."""
    return problem.weight / problem.scale_factor * problem.proportional_rate()


def _answer(
    program: LinearProgram, x: np.ndarray, problem: FractionProblem, objective: float | None = None
) -> Fractions:
    """Return the solution `x` as `Fractions`, with a row for every pair of the original problem."""
    reasons = {
        job: "no kind of device has room for its gang and a known speed"
        for job, can in zip(problem.job_ids, problem.runnable, strict=True)
        if not can
    }
    answer = program.fractions(x, objective=objective, reasons=reasons)
    if len(answer.together) == len(problem.pairs):
        return answer
    return dataclasses.replace(answer, together=problem.nothing()[1])  # `agnostic` left them out


def _root(low, found, asks, steps, since, alone):
    """Return the ratio at which sum of price * need(ratio) falls to the scale that the prices allow.

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
    # Make a minimal step, so that rounding cannot stop the search before the tolerance is reached.
    return max(ratio, low * (1 + 1e-12))


@dataclass(frozen=True, eq=False)
class _Together:
    """Jobs whose levels rise at the same time, each in proportion to its weight / gang size.

    A level is a job's rate / proportional rate, as in `_fill`. If `rate` is given, the jobs share it: when
    one stops, the others rise faster. If it is None, no job's rise depends on the others.
    """

    jobs: np.ndarray
    """Their numbers in the problem."""
    weight: np.ndarray
    """Weights of these jobs, in their order."""
    rate: float | None = None
    """Sum over these jobs of gang size * rise of the level, per unit of t; see `path`."""

    def path(self, start, room, gang):
        """Return a function from t to the levels of `self.jobs`, and the t at which all of them have stopped.

        t is a parameter that grows from 0; it has no unit. The arguments are arrays over all jobs of the
        problem: `start` is a job's level at t = 0, `room` the most that the level can rise, and `gang` the
        number of devices that the job uses at once.
        """
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
    """Jobs whose levels (see `_Together`) rise one after another: one starts when the last has stopped."""

    jobs: np.ndarray
    """Their numbers in the problem, in the order in which they rise."""
    rate: float
    """Gang size * rise of the rising job's level, per unit of t."""

    def path(self, start, room, gang):
        """Return the same as `_Together.path`, whose arguments it takes, for jobs that rise in turn."""
        unit = self.rate / gang[self.jobs]
        lasts = room[self.jobs] / unit
        begins = np.cumsum(lasts) - lasts
        return (
            lambda t: start[self.jobs] + unit * np.clip(t - begins, 0.0, lasts),
            float(lasts.sum()),
        )


def _fill(seen, problem, entities):
    """Return the `Fractions` at which no job can rise further, with all levels raised together from 0.

    A level is a job's rate / proportional rate. `seen` is the problem with the speeds that the policy goes
    by; `entities` say how the levels of their jobs rise. The objective is the lowest level * gang / weight.
    """
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
            # Ties hide the price of a stuck job, but the job with the largest price is certainly stuck.
            priced = rising & (share >= share[rising].max())
        rising &= ~(priced | stuck)
        if not seen.pairs:
            open_kinds &= ~_exhausted(seen, binding, rising)
    weighted = level * gang / problem.weight
    x = found.x if len(found.x) else np.zeros(len(program.row))
    lowest = weighted[problem.runnable].min(initial=np.inf)
    objective = float(lowest) if np.isfinite(lowest) else None
    return _answer(program, x, problem, objective=objective)


def _exhausted(seen, binding, rising):
    """Return [jobs, kinds] bool: a rising job gains nothing on that kind, as it or a limit is used up."""
    least = _PRICED * binding.scale
    full = binding.kind_price * seen.capacity > least
    exhausted = full[None, :] & rising[:, None]
    for limit, price in zip(seen.limits, binding.quota_price, strict=True):
        if price * limit.left > least:
            its = rising & counts([limit], seen.tenant)[0]
            exhausted |= its[:, None] & (per_device([limit], seen.kinds) > 0)
    return exhausted


def _levels(paths, num_jobs, t):
    """Return [jobs] the level of each job at t, a parameter that grows from 0; see `_Together.path`."""
    levels = np.zeros(num_jobs)
    for jobs, at, _ in paths:
        levels[jobs] = at(t)
    return levels


def _best(seen, open_kinds):
    """Return [jobs] a job's best speed, alone or with another, on kinds that are still open to it."""
    best = np.where(open_kinds, seen.throughput, 0.0).max(axis=1, initial=0.0)
    if seen.pairs:
        np.maximum.at(best, np.asarray(seen.pairs), seen.pair_throughput.max(axis=2))
    return best


def _furthest(program, levels, end, unit):
    """Return the largest t up to `end` whose levels are feasible, the prices that bind there, and a solution.

    The search starts at the end of the path and goes down to the root of the last prices' bound, which no
    feasible t exceeds. It is exact after finitely many programs, because there are finitely many prices.
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
