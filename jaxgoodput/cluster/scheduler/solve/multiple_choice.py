"""Choose one item per job, from items that share a few capacities, with a bound on the best possible value.

If the capacities are small, a dynamic program is exact and cheap. Otherwise the linear relaxation gives a
price for every row, and rounding it gives a choice. Only items whose reduced cost is smaller than the gap
between the two can be part of a better choice. These few are solved exactly, by the dynamic program or by
branch and bound (HiGHS).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, sparse

from jaxgoodput.cluster.scheduler.policy import SolverTimeout
from jaxgoodput.cluster.scheduler.solve.dual_prices import dual_prices

CHEAP = 1_000_000  # cells (items x states) that a dynamic program visits in about 5 ms
CHEAP_CORE = 20_000_000  # after the relaxation: still less than branch and bound needs
LARGEST_PROGRAM = 3_000  # items in the linear program; above, smoothed prices decide the other jobs
SMALL_CORE = 600  # items given to branch and bound first: tens of milliseconds
LARGE_CORE = 4_000  # items given to it if the first result is not close enough


@dataclass(frozen=True, kw_only=True)
class Knapsack:
    """A multiple-choice knapsack problem: each job takes at most one of its items, within limits."""

    job: np.ndarray  # [items] index of the job
    value: np.ndarray  # [items]; -inf = never
    use: np.ndarray  # [items, rows] >= 0
    limit: np.ndarray  # [rows]
    forced: np.ndarray  # [jobs] bool: takes exactly one item; other jobs take at most one

    def replace(self, **changes: Any) -> "Knapsack":
        """Return a copy of the problem in which these fields have other values."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A solution: the item of every job, its objective, and a bound on the best objective."""

    item: np.ndarray  # [jobs] index of the item; -1 = none
    objective: float
    bound: float


class _Dual(NamedTuple):
    """What follows from prices for the use of each limit, which need not be optimal."""

    slack: np.ndarray  # [items] reduced cost: how much worse an item is than its job's best one
    worth: (
        np.ndarray
    )  # [jobs] value of the best item after paying for its use, at least 0 if not forced
    bound: float  # on every choice, by weak duality


def solve(
    knapsack: Knapsack,
    relative_gap: float,
    time_limit_s: float,
    start: np.ndarray | None = None,
) -> Selection | None:
    """Return a choice within `relative_gap` of the best if time allows; None if none is feasible.

    `start`: [jobs] items of finite value, -1 = none, of a choice that is known to be feasible. Rounding falls
    back on it. Raises SolverTimeout if the time ends before any choice is known.
    """
    keep = np.flatnonzero(np.isfinite(knapsack.value))
    if len(keep) < len(knapsack.job):
        if start is not None:
            start = np.where(start >= 0, np.searchsorted(keep, start), -1)
        inner = solve(_subset(knapsack, keep), relative_gap, time_limit_s, start)
        if inner is None:
            return None
        item = np.where(inner.item >= 0, keep[inner.item], -1) if len(keep) else inner.item
        return dataclasses.replace(inner, item=item)
    offered = np.bincount(knapsack.job, minlength=len(knapsack.forced)) > 0
    if (knapsack.forced & ~offered).any():
        return None
    if not len(keep):
        return Selection(item=np.full(len(knapsack.forced), -1), objective=0.0, bound=0.0)
    knapsack = _without_slack_rows(knapsack)
    if _cells(knapsack) <= CHEAP:
        return _by_program(knapsack)
    found = _from_prices(knapsack, time_limit_s, start)
    return None if found is None else _close_gap(knapsack, *found, relative_gap, time_limit_s)


def _close_gap(
    knapsack: Knapsack,
    prices: np.ndarray,
    chosen: np.ndarray | None,
    relative_gap: float,
    time_limit_s: float,
) -> Selection | None:
    """Improve a choice until it is within `relative_gap` of its bound, or as far as two attempts lead."""
    dual = _dual(knapsack, prices)
    for largest in (SMALL_CORE, LARGE_CORE):
        objective = -np.inf if chosen is None else _objective(knapsack, chosen)
        if dual.bound - objective <= relative_gap * abs(objective):
            break
        chosen, bound = _finish(knapsack, chosen, dual, relative_gap, time_limit_s, largest)
        dual = dual._replace(bound=bound)
    if chosen is None:
        return None
    objective = _objective(knapsack, chosen)
    return Selection(item=chosen, objective=objective, bound=max(dual.bound, objective))


def _dual(knapsack: Knapsack, prices: np.ndarray) -> _Dual:
    reduced = knapsack.value - knapsack.use @ prices
    worth = np.where(knapsack.forced, -np.inf, 0.0)
    np.maximum.at(worth, knapsack.job, reduced)
    bound = float(knapsack.limit @ prices + worth.sum())
    return _Dual(worth[knapsack.job] - reduced, worth, bound)


def _from_prices(
    knapsack: Knapsack, time_limit_s: float, start: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Return prices of the relaxation and a choice that they suggest; None if nothing is feasible.

    In large instances only the jobs nearest to indifference enter the linear program. The others take what is
    best at smoothed prices.
    """
    if len(knapsack.job) > LARGEST_PROGRAM:
        prices = dual_prices(
            knapsack.value, knapsack.use, knapsack.limit, knapsack.job, knapsack.forced
        )
        found = _relax_the_nearest(knapsack, prices, time_limit_s)
        if found is not None:
            return found[0], _round(knapsack, found[1], start)
    # A small instance; or the prices were too far off, or there is no solution.
    relaxed = _relax(knapsack, time_limit_s)
    return relaxed and (relaxed[0], _round(knapsack, relaxed[1], start))


def _relax_the_nearest(
    knapsack: Knapsack, prices: np.ndarray, time_limit_s: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Fix the jobs that prices decide clearly and relax the rest: prices and fractions, or None."""
    dual = _dual(knapsack, prices)
    # Each job's best item at these prices, the first of equal ones; none if that is no better than nothing.
    best = np.full(len(knapsack.forced), -1)
    at_best = np.flatnonzero(dual.slack <= 0.0)
    best[knapsack.job[at_best[::-1]]] = at_best[::-1]
    best[~knapsack.forced & (dual.worth <= 0.0)] = -1
    sizes = np.bincount(knapsack.job, minlength=len(best))
    near = _nearest(_indifference(knapsack, best, dual), sizes, LARGEST_PROGRAM)
    fixed = best[~near & (best >= 0)]
    left = knapsack.limit - knapsack.use[fixed].sum(0)
    inside = np.flatnonzero(near[knapsack.job])
    if not len(inside) or (left < 0).any():
        return None
    inner = _subset(knapsack, inside).replace(limit=left, forced=knapsack.forced & near)
    relaxed = _relax(inner, time_limit_s)
    if relaxed is None:
        return None
    fractions = np.zeros(len(dual.slack))
    fractions[fixed] = 1.0
    fractions[inside] = relaxed[1]
    better = _dual(knapsack, relaxed[0]).bound < dual.bound
    return relaxed[0] if better else prices, fractions


def _indifference(knapsack: Knapsack, chosen: np.ndarray, dual: _Dual) -> np.ndarray:
    """Return [jobs] how much worse than its chosen item (or none) each job's next best option is."""
    second = np.where(knapsack.forced | (chosen < 0), np.inf, dual.worth)
    others = np.flatnonzero(chosen[knapsack.job] != np.arange(len(dual.slack)))
    np.minimum.at(second, knapsack.job[others], dual.slack[others])
    return second


def _nearest(indifference: np.ndarray, sizes: np.ndarray, most: int) -> np.ndarray:
    """Return [jobs] bool: the jobs nearest to indifference that together have at most `most` items.

    `sizes`: [jobs] number of items.
    """
    order = np.argsort(indifference, kind="stable")
    near = np.zeros(len(order), bool)
    near[order[np.cumsum(sizes[order]) <= most]] = True
    return near


class _Core(NamedTuple):
    """The part of the problem that is still open after fixing items by their reduced costs."""

    items: np.ndarray  # indices of the open items
    free: np.ndarray  # [jobs] bool: undecided
    settled: np.ndarray  # [jobs] the item of a decided job, -1 = none or undecided
    exact: bool  # whether no better choice exists outside

    def problem(self, knapsack: Knapsack, left: np.ndarray) -> Knapsack:
        """Return the open items as a problem of their own, within what is left of the limits."""
        inner = _subset(knapsack, self.items)
        return inner.replace(limit=left, forced=knapsack.forced & self.free)


def _core(knapsack: Knapsack, chosen: np.ndarray | None, dual: _Dual, largest: int) -> _Core:
    """Fix items by reduced cost.

    If more than `largest` items are left open, keep only the items of the jobs nearest to indifference
    between two items, because a better choice is most likely found there.
    """
    num_jobs = len(knapsack.forced)
    objective = -np.inf if chosen is None else _objective(knapsack, chosen)
    # Taking an item of larger reduced cost would lower the bound below what is already achieved.
    room = dual.bound - objective + 1e-9 * (1.0 + abs(dual.bound))
    alive = dual.slack <= room
    idle = ~knapsack.forced & (dual.worth <= room)
    count = np.bincount(knapsack.job[alive], minlength=num_jobs) + idle
    free = count > 1
    exact = chosen is None or alive[free[knapsack.job]].sum() <= largest
    if chosen is not None and not exact:
        sizes = np.where(free, count, 0)
        free &= _nearest(_indifference(knapsack, chosen, dual), sizes, largest)
        settled = chosen.copy()
    else:
        # A job with one option left takes it: its only open item, or nothing.
        settled = np.full(num_jobs, -1)
        lone = np.flatnonzero(alive & ~free[knapsack.job])
        settled[knapsack.job[lone]] = lone
    settled[free] = -1
    return _Core(np.flatnonzero(alive & free[knapsack.job]), free, settled, bool(exact))


def _finish(
    knapsack: Knapsack,
    chosen: np.ndarray | None,
    dual: _Dual,
    relative_gap: float,
    time_limit_s: float,
    largest: int,
) -> tuple[np.ndarray | None, float]:
    """Solve exactly what reduced-cost fixing leaves open; return a choice and a bound."""
    objective = -np.inf if chosen is None else _objective(knapsack, chosen)
    bound = dual.bound
    core = _core(knapsack, chosen, dual, largest)
    fixed = core.settled[core.settled >= 0]
    left = knapsack.limit - knapsack.use[fixed].sum(0)
    fits = (knapsack.use[core.items] <= left + 1e-9).all(1)
    # If the fixed items alone exceed a limit, nothing beats the rounded choice.
    core = core._replace(items=core.items[fits & ~(left < -1e-9).any()])
    allowed = relative_gap * abs(objective if np.isfinite(objective) else bound)
    found = None
    if len(core.items):
        found = _exact(core.problem(knapsack, left), allowed, time_limit_s)
    if found is not None:
        item = core.settled.copy()
        taken = found.item >= 0
        item[taken] = core.items[found.item[taken]]
        item = _improve(knapsack, item)
        if core.exact:
            bound = min(bound, max(objective, found.bound + float(knapsack.value[fixed].sum())))
        if _objective(knapsack, item) > objective:
            chosen = item
    elif core.exact and chosen is not None:
        bound = objective
    return chosen, bound


def _by_program(knapsack: Knapsack) -> Selection | None:
    """Return the best choice by dynamic program, which is its own bound; None if infeasible."""
    chosen = _program(knapsack)
    if chosen is None:
        return None
    objective = _objective(knapsack, chosen)
    return Selection(item=chosen, objective=objective, bound=objective)


def _exact(knapsack: Knapsack, allowed: float, time_limit_s: float) -> Selection | None:
    """Return the best choice; if HiGHS must find it, one within `allowed` of the best objective."""
    knapsack = _without_slack_rows(knapsack)
    if _cells(knapsack) <= CHEAP_CORE:
        return _by_program(knapsack)
    rows, low, high = _rows(knapsack)
    # HiGHS wants a relative gap. The items in the core are worth far less than the whole objective, so the
    # allowed gap is divided by a rough guess of what the core's best choice is worth.
    scale = float(np.sort(knapsack.value)[-50:].sum())
    result = optimize.milp(
        -knapsack.value,
        integrality=np.ones(len(knapsack.job)),
        bounds=optimize.Bounds(0.0, 1.0),
        constraints=[(rows, low, high)],
        options={
            "mip_rel_gap": float(np.clip(allowed / max(abs(scale), 1e-9), 1e-9, 0.1)),
            "time_limit": time_limit_s,
        },
    )
    if result.x is None:
        return None
    chosen = np.full(len(knapsack.forced), -1)
    taken = np.flatnonzero(result.x > 0.5)
    chosen[knapsack.job[taken]] = taken
    bound = -result.mip_dual_bound if result.mip_dual_bound is not None else np.inf
    return Selection(item=chosen, objective=_objective(knapsack, chosen), bound=bound)


def _rows(knapsack: Knapsack) -> tuple[sparse.csc_array, np.ndarray, np.ndarray]:
    """Return the constraint matrix [rows + jobs, items], and its lower and upper bounds."""
    num_items, num_rows = knapsack.use.shape
    column, row = np.nonzero(knapsack.use)
    every = np.arange(num_items)
    matrix = sparse.csc_array(
        (
            np.concatenate([knapsack.use[column, row], np.ones(num_items)]),
            (np.concatenate([row, num_rows + knapsack.job]), np.concatenate([column, every])),
        ),
        shape=(num_rows + len(knapsack.forced), num_items),
    )
    low = np.concatenate([np.full(num_rows, -np.inf), np.where(knapsack.forced, 1.0, -np.inf)])
    high = np.concatenate([knapsack.limit, np.ones(len(knapsack.forced))])
    return matrix, low, high


def _relax(knapsack: Knapsack, time_limit_s: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Return prices [rows] and fractions [items] at a vertex of the relaxation; None if infeasible."""
    matrix, low, high = _rows(knapsack)
    equal = np.isfinite(low)
    result = optimize.linprog(
        -knapsack.value,
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
            f"no allocation of {len(knapsack.forced)} jobs ({len(knapsack.job)} items) was found "
            f"within {time_limit_s:g} s: {result.message} The previous plan stays; raise the time "
            "limit or narrow the sizes that the jobs allow."
        )
    prices = np.maximum(0.0, -np.asarray(result.ineqlin.marginals)[: len(knapsack.limit)])
    return prices, np.asarray(result.x)


def _round(
    knapsack: Knapsack, fractions: np.ndarray, start: np.ndarray | None
) -> np.ndarray | None:
    """Return the whole part of a fractional choice, filled up greedily.

    If a forced job has no item that fits, return the nearest choice that `start` allows, or None without one.
    """
    chosen = np.full(len(knapsack.forced), -1)
    whole = np.flatnonzero(fractions > 1.0 - 1e-6)
    chosen[knapsack.job[whole]] = whole
    left = knapsack.limit - knapsack.use[whole].sum(0)
    for job in np.flatnonzero(knapsack.forced & (chosen < 0)):
        mine = np.flatnonzero(knapsack.job == job)
        mine = mine[(knapsack.use[mine] <= left + 1e-9).all(1)]
        if not len(mine):
            return None if start is None else _improve(knapsack, _mended(knapsack, chosen, start))
        least = mine[np.argmin(knapsack.use[mine].sum(1))]
        chosen[job] = least
        left = left - knapsack.use[least]
    return _improve(knapsack, chosen)


def _mended(knapsack: Knapsack, chosen: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Make a choice feasible: change job after job to its item in `start`, the cheapest change first."""
    none, value, use = _with_none(knapsack)
    use = use / np.maximum(knapsack.limit, 1e-9)
    then = np.where(start >= 0, start, none)
    now = np.where(knapsack.forced & (chosen < 0), then, np.where(chosen >= 0, chosen, none))
    while True:
        over = use[now].sum(0) > 1.0 + 1e-9
        if not over.any():
            return np.where(now < none, now, -1)
        # Least loss of value per unit that it frees in the rows that are exceeded.
        freed = (use[now] - use[then])[:, over].sum(1)
        loss = np.where(freed > 1e-12, value[now] - value[then], np.inf)
        best = int(np.argmin(loss / np.maximum(freed, 1e-12)))
        if not np.isfinite(loss[best]):
            return start
        now[best] = then[best]


def _improve(knapsack: Knapsack, chosen: np.ndarray) -> np.ndarray:
    """Make single changes that fit what is left, the most valuable first, until there is none."""
    chosen = chosen.copy()
    none, value, use = _with_none(knapsack)
    while True:
        present = np.where(chosen >= 0, chosen, none)
        left = knapsack.limit - use[present].sum(0)
        theirs = present[knapsack.job]
        gain = knapsack.value - value[theirs]
        for row, room in enumerate(left):  # one after the other, because there are few rows
            gain[knapsack.use[:, row] - use[theirs, row] > room + 1e-9] = 0.0
        best = int(np.argmax(gain))
        if gain[best] <= 1e-12:
            return chosen
        chosen[knapsack.job[best]] = best


def _with_none(knapsack: Knapsack) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the values and uses of the items and of one more, which stands for no item, and its index."""
    use = np.concatenate([knapsack.use, np.zeros((1, knapsack.use.shape[1]))])
    return len(knapsack.value), np.append(knapsack.value, 0.0), use


def _program(knapsack: Knapsack) -> np.ndarray | None:
    """Return the best choice by dynamic programming over the capacity of every row; None if infeasible.

    best[c] is the greatest value of the jobs so far within capacity c, so the last entry is the answer. The
    cost is O(items x states). Of equally good items the first is chosen.
    """
    limit = np.floor(knapsack.limit + 1e-9).astype(int)
    use = np.rint(knapsack.use).astype(int)
    best = np.zeros(limit + 1)
    start = np.searchsorted(knapsack.job, np.arange(len(knapsack.forced) + 1))
    jobs = np.flatnonzero(np.diff(start))
    picks = np.full((len(jobs), *best.shape), -1, np.int16)
    for pick, job in zip(picks, jobs, strict=True):
        after = np.full_like(best, -np.inf) if knapsack.forced[job] else best.copy()
        for index, item in enumerate(range(start[job], start[job + 1])):
            need = use[item]
            if (need > limit).any():
                continue
            # The item leaves capacity c - need for the jobs before: two views of the table, shifted by need.
            rest = tuple(slice(0, most + 1 - part) for most, part in zip(limit, need, strict=True))
            here = tuple(slice(part, None) for part in need)
            value = best[rest] + knapsack.value[item]
            better = value > after[here]
            np.copyto(after[here], value, where=better)
            np.copyto(pick[here], index, where=better)
        best = after
    if not np.isfinite(best[tuple(limit)]):
        return None
    chosen = np.full(len(knapsack.forced), -1)
    at = limit.copy()
    for pick, job in zip(picks[::-1], jobs[::-1], strict=True):
        index = int(pick[tuple(at)])
        if index >= 0:
            chosen[job] = start[job] + index
            at -= use[chosen[job]]
    return chosen


def _cells(knapsack: Knapsack) -> float:
    """Return the cost of the dynamic program in cells; infinite if a row does not use whole numbers."""
    if (knapsack.use != np.rint(knapsack.use)).any():
        return np.inf
    states = float(np.prod(np.floor(knapsack.limit + 1e-9) + 1.0))
    return len(knapsack.job) * states


def _without_slack_rows(knapsack: Knapsack) -> Knapsack:
    """Return the problem without the limits that no choice of items can exceed."""
    most = np.zeros((len(knapsack.forced), knapsack.use.shape[1]))
    np.maximum.at(most, knapsack.job, knapsack.use)
    binding = most.sum(0) > knapsack.limit + 1e-9
    if not binding.any():  # keep one row, so that there always is one
        return knapsack.replace(use=np.zeros((len(knapsack.job), 1)), limit=np.zeros(1))
    return knapsack.replace(use=knapsack.use[:, binding], limit=knapsack.limit[binding])


def _subset(knapsack: Knapsack, keep: np.ndarray) -> Knapsack:
    return knapsack.replace(
        job=knapsack.job[keep], value=knapsack.value[keep], use=knapsack.use[keep]
    )


def _objective(knapsack: Knapsack, chosen: np.ndarray) -> float:
    return float(knapsack.value[chosen[chosen >= 0]].sum())
