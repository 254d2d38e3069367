"""The best choice among options that share a few capacities, with a bound on what any could be worth.

A dynamic program over the free capacity where that is cheap. Otherwise the linear relaxation gives a
price for every row; rounding it gives a choice; and only options whose reduced cost is smaller than
what separates the two can be part of a better one. They are solved exactly, by the dynamic program or
by branch and bound (HiGHS).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse

from jaxgoodput.scheduler.policy import SolverTimeout
from jaxgoodput.scheduler.solve.dual_prices import dual_prices

CHEAP = 1_000_000  # cells (options x states) that a dynamic program visits in about 5 ms
CHEAP_CORE = 20_000_000  # after the relaxation: still less than branch and bound needs
LARGEST_PROGRAM = 3_000  # options that the linear program is given where the smoothed prices serve
SMALL_CORE = 600  # options that branch and bound is given first: tens of milliseconds
LARGE_CORE = 4_000  # where that is not close enough


@dataclass(frozen=True, kw_only=True)
class Options:
    """Pairs of a job and something it may take, sorted by job."""

    job: np.ndarray  # [options] which job's
    value: np.ndarray  # [options]; -inf = never
    use: np.ndarray  # [options, rows] >= 0
    limit: np.ndarray  # [rows]
    forced: np.ndarray  # [jobs] bool: takes exactly one; the others take at most one

    def replace(self, **changes: Any) -> "Options":
        """The same, with other fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """An option for every job."""

    option: np.ndarray  # [jobs] index of the option; -1 = none
    objective: float
    bound: float


def solve(options: Options, relative_gap: float, time_limit_s: float) -> Solution | None:
    """A choice within `relative_gap` of the best where time allows; None where none is feasible.

    Raises SolverTimeout where the time ends before any choice is known.
    """
    keep = np.flatnonzero(np.isfinite(options.value))
    if len(keep) < len(options.job):
        inner = solve(_subset(options, keep), relative_gap, time_limit_s)
        if inner is None:
            return None
        option = np.where(inner.option >= 0, keep[inner.option], -1) if len(keep) else inner.option
        return dataclasses.replace(inner, option=option)
    offered = np.bincount(options.job, minlength=len(options.forced)) > 0
    if (options.forced & ~offered).any():
        return None
    if not len(keep):
        return Solution(option=np.full(len(options.forced), -1), objective=0.0, bound=0.0)
    options = _without_slack_rows(options)
    if _cells(options) <= CHEAP:
        return _by_program(options)
    found = _from_prices(options, time_limit_s)
    if found is None:
        return None
    prices, chosen = found
    slack, worth, bound = _dual(options, prices)
    for largest in (SMALL_CORE, LARGE_CORE):
        objective = -np.inf if chosen is None else _objective(options, chosen)
        if bound - objective <= relative_gap * abs(objective):
            break
        chosen, bound = _finish(
            options, chosen, bound, slack, worth, relative_gap, time_limit_s, largest
        )
    if chosen is None:
        return None
    objective = _objective(options, chosen)
    return Solution(option=chosen, objective=objective, bound=max(bound, objective))


def _dual(options: Options, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """What an option is worse than its job's best one, [options], and what jobs are worth, [jobs].

    Both at these prices; and the bound that follows from them by weak duality, whatever they are.
    """
    reduced = options.value - options.use @ prices
    worth = np.where(options.forced, -np.inf, 0.0)
    np.maximum.at(worth, options.job, reduced)
    return worth[options.job] - reduced, worth, float(options.limit @ prices + worth.sum())


def _from_prices(
    options: Options, time_limit_s: float
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Prices of the relaxation and a choice that they suggest; None where nothing is feasible.

    Large instances: only the jobs nearest to indifference enter the linear program; the others
    take what is best at smoothed prices.
    """
    if len(options.job) <= LARGEST_PROGRAM:
        relaxed = _relax(options, time_limit_s)
        return relaxed and (relaxed[0], _round(options, relaxed[1]))
    prices = dual_prices(options.value, options.use, options.limit, options.job, options.forced)
    slack, worth, bound = _dual(options, prices)
    best = np.full(len(options.forced), -1)
    at_best = np.flatnonzero(slack <= 0.0)
    best[options.job[at_best[::-1]]] = at_best[::-1]
    best[~options.forced & (worth <= 0.0)] = -1
    lead = np.where(options.forced | (best < 0), np.inf, worth)
    others = np.flatnonzero(best[options.job] != np.arange(len(slack)))
    np.minimum.at(lead, options.job[others], slack[others])
    order = np.argsort(lead, kind="stable")
    sizes = np.bincount(options.job, minlength=len(best))[order]
    near = np.zeros(len(best), bool)
    near[order[np.cumsum(sizes) <= LARGEST_PROGRAM]] = True
    settled = np.where(near, -1, best)
    fixed = settled[settled >= 0]
    left = options.limit - options.use[fixed].sum(0)
    relaxed = None
    inside = np.flatnonzero(near[options.job])
    if len(inside) and (left >= 0).all():
        inner = _subset(options, inside).replace(limit=left, forced=options.forced & near)
        relaxed = _relax(inner, time_limit_s)
    if relaxed is None:  # the prices were too far off, or there is no solution: the whole program
        relaxed = _relax(options, time_limit_s)
        return relaxed and (relaxed[0], _round(options, relaxed[1]))
    fractions = np.zeros(len(slack))
    fractions[fixed] = 1.0
    fractions[inside] = relaxed[1]
    if _dual(options, relaxed[0])[2] < bound:
        prices = relaxed[0]
    return prices, _round(options, fractions)


def _finish(
    options: Options,
    chosen: np.ndarray | None,
    bound: float,
    slack: np.ndarray,
    worth: np.ndarray,
    relative_gap: float,
    time_limit_s: float,
    largest: int,
) -> tuple[np.ndarray | None, float]:
    """Reduced-cost fixing, then the exact solution of what is left open: a choice and a bound.

    Where more than `largest` options are left open, only those of the jobs nearest to indifference.
    """
    num_jobs = len(options.forced)
    objective = -np.inf if chosen is None else _objective(options, chosen)
    room = bound - objective + 1e-9 * (1.0 + abs(bound))
    alive = slack <= room
    idle = ~options.forced & (worth <= room)
    count = np.bincount(options.job[alive], minlength=num_jobs) + idle
    free = count > 1
    exact = True
    if chosen is not None and alive[free[options.job]].sum() > largest:
        # The jobs nearest to indifference between two options are where a better choice is found.
        second = np.full(num_jobs, np.inf)
        others = chosen[options.job] != np.arange(len(slack))
        np.minimum.at(second, options.job[others], slack[others])
        second = np.minimum(second, np.where(options.forced | (chosen < 0), np.inf, worth))
        sizes = np.where(free, count, 0)
        order = np.argsort(second, kind="stable")
        inside = np.zeros(num_jobs, bool)
        inside[order[np.cumsum(sizes[order]) <= largest]] = True
        free &= inside
        exact = False
        settled = chosen.copy()
    else:
        settled = np.full(num_jobs, -1)
        lone = np.flatnonzero(alive & ~free[options.job])
        settled[options.job[lone]] = lone
    settled[free] = -1
    fixed = settled[settled >= 0]
    left = options.limit - options.use[fixed].sum(0)
    value = float(options.value[fixed].sum())
    core = np.flatnonzero(alive & free[options.job])
    if (left < -1e-9).any():
        core = core[:0]  # nothing beats what was rounded
    else:
        core = core[(options.use[core] <= left + 1e-9).all(1)]
    inner = options.replace(
        job=options.job[core],
        value=options.value[core],
        use=options.use[core],
        limit=left,
        forced=options.forced & free,
    )
    allowed = relative_gap * abs(objective if np.isfinite(objective) else bound)
    found = _exact(inner, allowed, time_limit_s) if len(core) else None
    if found is not None:
        option = settled.copy()
        taken = found.option >= 0
        option[taken] = core[found.option[taken]]
        option = _improve(options, option)
        if exact:
            bound = min(bound, max(objective, found.bound + value))
        if _objective(options, option) > objective:
            chosen, objective = option, _objective(options, option)
    elif exact and chosen is not None:
        bound = objective
    return chosen, bound


def _by_program(options: Options) -> Solution | None:
    """The best choice by dynamic program, which is its own bound."""
    chosen = _program(options)
    if chosen is None:
        return None
    objective = _objective(options, chosen)
    return Solution(option=chosen, objective=objective, bound=objective)


def _exact(options: Options, allowed: float, time_limit_s: float) -> Solution | None:
    """The best choice, within `allowed` (in units of the objective) where HiGHS must find it."""
    options = _without_slack_rows(options)
    if _cells(options) <= CHEAP_CORE:
        return _by_program(options)
    rows, low, high = _rows(options)
    scale = float(np.sort(options.value)[-50:].sum())
    result = optimize.milp(
        -options.value,
        integrality=np.ones(len(options.job)),
        bounds=optimize.Bounds(0.0, 1.0),
        constraints=[(rows, low, high)],
        options={
            "mip_rel_gap": float(np.clip(allowed / max(abs(scale), 1e-9), 1e-9, 0.1)),
            "time_limit": time_limit_s,
        },
    )
    if result.x is None:
        return None
    chosen = np.full(len(options.forced), -1)
    taken = np.flatnonzero(result.x > 0.5)
    chosen[options.job[taken]] = taken
    bound = -result.mip_dual_bound if result.mip_dual_bound is not None else np.inf
    return Solution(option=chosen, objective=_objective(options, chosen), bound=bound)


def _rows(options: Options) -> tuple[sparse.csc_array, np.ndarray, np.ndarray]:
    """The constraint matrix [rows + jobs, options] and its two sides."""
    num_options, num_rows = options.use.shape
    column, row = np.nonzero(options.use)
    every = np.arange(num_options)
    matrix = sparse.csc_array(
        (
            np.concatenate([options.use[column, row], np.ones(num_options)]),
            (np.concatenate([row, num_rows + options.job]), np.concatenate([column, every])),
        ),
        shape=(num_rows + len(options.forced), num_options),
    )
    low = np.concatenate([np.full(num_rows, -np.inf), np.where(options.forced, 1.0, -np.inf)])
    high = np.concatenate([options.limit, np.ones(len(options.forced))])
    return matrix, low, high


def _relax(options: Options, time_limit_s: float) -> tuple[np.ndarray, np.ndarray] | None:
    """The prices [rows] and the fractions [options] of a vertex of the relaxation; None = infeasible."""
    matrix, low, high = _rows(options)
    equal = np.isfinite(low)
    result = optimize.linprog(
        -options.value,
        A_ub=matrix[~equal] if equal.any() else matrix,
        b_ub=high[~equal],
        A_eq=matrix[equal] if equal.any() else None,
        b_eq=high[equal] if equal.any() else None,
        bounds=(0.0, None),
        method="highs-ds",
        options={"time_limit": time_limit_s},
    )
    if result.status == 2:
        return None
    if result.x is None or result.ineqlin.marginals is None:
        raise SolverTimeout(
            f"no allocation of {len(options.forced)} jobs ({len(options.job)} options) was found "
            f"within {time_limit_s:g} s: {result.message} The previous plan stays; raise the time "
            "limit or narrow the sizes that the jobs allow."
        )
    prices = np.maximum(0.0, -np.asarray(result.ineqlin.marginals)[: len(options.limit)])
    return prices, np.asarray(result.x)


def _round(options: Options, fractions: np.ndarray) -> np.ndarray | None:
    """The whole part of a fractional choice, filled up greedily; None where a forced job is left."""
    chosen = np.full(len(options.forced), -1)
    whole = np.flatnonzero(fractions > 1.0 - 1e-6)
    chosen[options.job[whole]] = whole
    left = options.limit - options.use[whole].sum(0)
    for job in np.flatnonzero(options.forced & (chosen < 0)):
        mine = np.flatnonzero(options.job == job)
        mine = mine[(options.use[mine] <= left + 1e-9).all(1)]
        if not len(mine):
            return None
        least = mine[np.argmin(options.use[mine].sum(1))]
        chosen[job] = least
        left = left - options.use[least]
    return _improve(options, chosen)


def _improve(options: Options, chosen: np.ndarray) -> np.ndarray:
    """Single changes that fit what is left, the most valuable first, until there is none."""
    chosen = chosen.copy()
    none = len(options.value)
    value = np.append(options.value, 0.0)
    use = np.concatenate([options.use, np.zeros((1, options.use.shape[1]))])
    while True:
        present = np.where(chosen >= 0, chosen, none)
        left = options.limit - use[present].sum(0)
        theirs = present[options.job]
        gain = options.value - value[theirs]
        gain[((options.use - use[theirs]) > left + 1e-9).any(1)] = 0.0
        best = int(np.argmax(gain))
        if gain[best] <= 1e-12:
            return chosen
        chosen[options.job[best]] = best


def _program(options: Options) -> np.ndarray | None:
    """The exact best by dynamic programming over what is left of every row; None = infeasible.

    best[c] is the most that the jobs so far are worth within capacity c, so that the last entry is
    the answer: O(options x states). Of equals, the first option in order.
    """
    limit = np.floor(options.limit + 1e-9).astype(int)
    use = np.rint(options.use).astype(int)
    best = np.zeros(limit + 1)
    start = np.searchsorted(options.job, np.arange(len(options.forced) + 1))
    jobs = np.flatnonzero(np.diff(start))
    picks = np.full((len(jobs), *best.shape), -1, np.int16)
    for pick, job in zip(picks, jobs, strict=True):
        after = np.full_like(best, -np.inf) if options.forced[job] else best.copy()
        for index, option in enumerate(range(start[job], start[job + 1])):
            need = use[option]
            if (need > limit).any():
                continue
            rest = tuple(slice(0, most + 1 - part) for most, part in zip(limit, need, strict=True))
            here = tuple(slice(part, None) for part in need)
            value = best[rest] + options.value[option]
            better = value > after[here]
            np.copyto(after[here], value, where=better)
            np.copyto(pick[here], index, where=better)
        best = after
    if not np.isfinite(best[tuple(limit)]):
        return None
    chosen = np.full(len(options.forced), -1)
    at = limit.copy()
    for pick, job in zip(picks[::-1], jobs[::-1], strict=True):
        index = int(pick[tuple(at)])
        if index >= 0:
            chosen[job] = start[job] + index
            at -= use[chosen[job]]
    return chosen


def _cells(options: Options) -> float:
    """What the dynamic program would cost; infinite where a row is not counted in whole numbers."""
    if (options.use != np.rint(options.use)).any():
        return np.inf
    states = float(np.prod(np.floor(options.limit + 1e-9) + 1.0))
    return len(options.job) * states


def _without_slack_rows(options: Options) -> Options:
    """Without the rows that no choice can exceed."""
    most = np.zeros((len(options.forced), options.use.shape[1]))
    np.maximum.at(most, options.job, options.use)
    binding = most.sum(0) > options.limit + 1e-9
    if not binding.any():  # one row is kept so that there always is one
        return options.replace(use=np.zeros((len(options.job), 1)), limit=np.zeros(1))
    return options.replace(use=options.use[:, binding], limit=options.limit[binding])


def _subset(options: Options, keep: np.ndarray) -> Options:
    return options.replace(job=options.job[keep], value=options.value[keep], use=options.use[keep])


def _objective(options: Options, chosen: np.ndarray) -> float:
    return float(options.value[chosen[chosen >= 0]].sum())
