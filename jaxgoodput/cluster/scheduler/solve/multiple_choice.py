"""The best choice among items that share a few capacities, with a bound on what any could be worth.

A dynamic program over the free capacity where that is cheap. Otherwise the linear relaxation gives a
price for every row; rounding it gives a choice; and only items whose reduced cost is smaller than
what separates the two can be part of a better one. They are solved exactly, by the dynamic program or
by branch and bound (HiGHS).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse

from jaxgoodput.cluster.scheduler.policy import SolverTimeout
from jaxgoodput.cluster.scheduler.solve.dual_prices import dual_prices

CHEAP = 1_000_000  # cells (items x states) that a dynamic program visits in about 5 ms
CHEAP_CORE = 20_000_000  # after the relaxation: still less than branch and bound needs
LARGEST_PROGRAM = 3_000  # items that the linear program is given where the smoothed prices serve
SMALL_CORE = 600  # items that branch and bound is given first: tens of milliseconds
LARGE_CORE = 4_000  # where that is not close enough


@dataclass(frozen=True, kw_only=True)
class Knapsack:
    """Pairs of a job and something it may take, sorted by job."""

    job: np.ndarray  # [items] which job's
    value: np.ndarray  # [items]; -inf = never
    use: np.ndarray  # [items, rows] >= 0
    limit: np.ndarray  # [rows]
    forced: np.ndarray  # [jobs] bool: takes exactly one; the others take at most one

    def replace(self, **changes: Any) -> "Knapsack":
        """The same, with other fields."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """An item for every job."""

    item: np.ndarray  # [jobs] index of the item; -1 = none
    objective: float
    bound: float


def solve(
    knapsack: Knapsack,
    relative_gap: float,
    time_limit_s: float,
    start: np.ndarray | None = None,
) -> Selection | None:
    """A choice within `relative_gap` of the best where time allows; None where none is feasible.

    start: [jobs] items, -1 = none, of a choice that is known to be feasible: what rounding falls back on.
    Raises SolverTimeout where the time ends before any choice is known.
    """
    keep = np.flatnonzero(np.isfinite(knapsack.value))
    if len(keep) < len(knapsack.job):
        inner = solve(_subset(knapsack, keep), relative_gap, time_limit_s)
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
    if found is None:
        return None
    prices, chosen = found
    slack, worth, bound = _dual(knapsack, prices)
    for largest in (SMALL_CORE, LARGE_CORE):
        objective = -np.inf if chosen is None else _objective(knapsack, chosen)
        if bound - objective <= relative_gap * abs(objective):
            break
        chosen, bound = _finish(
            knapsack, chosen, bound, slack, worth, relative_gap, time_limit_s, largest
        )
    if chosen is None:
        return None
    objective = _objective(knapsack, chosen)
    return Selection(item=chosen, objective=objective, bound=max(bound, objective))


def _dual(knapsack: Knapsack, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """What an item is worse than its job's best one, [items], and what jobs are worth, [jobs].

    Both at these prices; and the bound that follows from them by weak duality, whatever they are.
    """
    reduced = knapsack.value - knapsack.use @ prices
    worth = np.where(knapsack.forced, -np.inf, 0.0)
    np.maximum.at(worth, knapsack.job, reduced)
    return worth[knapsack.job] - reduced, worth, float(knapsack.limit @ prices + worth.sum())


def _from_prices(
    knapsack: Knapsack, time_limit_s: float, start: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Prices of the relaxation and a choice that they suggest; None where nothing is feasible.

    Large instances: only the jobs nearest to indifference enter the linear program; the others
    take what is best at smoothed prices.
    """
    if len(knapsack.job) <= LARGEST_PROGRAM:
        relaxed = _relax(knapsack, time_limit_s)
        return relaxed and (relaxed[0], _round(knapsack, relaxed[1], start))
    prices = dual_prices(
        knapsack.value, knapsack.use, knapsack.limit, knapsack.job, knapsack.forced
    )
    slack, worth, bound = _dual(knapsack, prices)
    best = np.full(len(knapsack.forced), -1)
    at_best = np.flatnonzero(slack <= 0.0)
    best[knapsack.job[at_best[::-1]]] = at_best[::-1]
    best[~knapsack.forced & (worth <= 0.0)] = -1
    lead = np.where(knapsack.forced | (best < 0), np.inf, worth)
    others = np.flatnonzero(best[knapsack.job] != np.arange(len(slack)))
    np.minimum.at(lead, knapsack.job[others], slack[others])
    order = np.argsort(lead, kind="stable")
    sizes = np.bincount(knapsack.job, minlength=len(best))[order]
    near = np.zeros(len(best), bool)
    near[order[np.cumsum(sizes) <= LARGEST_PROGRAM]] = True
    settled = np.where(near, -1, best)
    fixed = settled[settled >= 0]
    left = knapsack.limit - knapsack.use[fixed].sum(0)
    relaxed = None
    inside = np.flatnonzero(near[knapsack.job])
    if len(inside) and (left >= 0).all():
        inner = _subset(knapsack, inside).replace(limit=left, forced=knapsack.forced & near)
        relaxed = _relax(inner, time_limit_s)
    if relaxed is None:  # the prices were too far off, or there is no solution: the whole program
        relaxed = _relax(knapsack, time_limit_s)
        return relaxed and (relaxed[0], _round(knapsack, relaxed[1], start))
    fractions = np.zeros(len(slack))
    fractions[fixed] = 1.0
    fractions[inside] = relaxed[1]
    if _dual(knapsack, relaxed[0])[2] < bound:
        prices = relaxed[0]
    return prices, _round(knapsack, fractions, start)


def _finish(
    knapsack: Knapsack,
    chosen: np.ndarray | None,
    bound: float,
    slack: np.ndarray,
    worth: np.ndarray,
    relative_gap: float,
    time_limit_s: float,
    largest: int,
) -> tuple[np.ndarray | None, float]:
    """Reduced-cost fixing, then the exact solution of what is left open: a choice and a bound.

    Where more than `largest` items are left open, only those of the jobs nearest to indifference.
    """
    num_jobs = len(knapsack.forced)
    objective = -np.inf if chosen is None else _objective(knapsack, chosen)
    room = bound - objective + 1e-9 * (1.0 + abs(bound))
    alive = slack <= room
    idle = ~knapsack.forced & (worth <= room)
    count = np.bincount(knapsack.job[alive], minlength=num_jobs) + idle
    free = count > 1
    exact = True
    if chosen is not None and alive[free[knapsack.job]].sum() > largest:
        # The jobs nearest to indifference between two items are where a better choice is found.
        second = np.full(num_jobs, np.inf)
        others = chosen[knapsack.job] != np.arange(len(slack))
        np.minimum.at(second, knapsack.job[others], slack[others])
        second = np.minimum(second, np.where(knapsack.forced | (chosen < 0), np.inf, worth))
        sizes = np.where(free, count, 0)
        order = np.argsort(second, kind="stable")
        inside = np.zeros(num_jobs, bool)
        inside[order[np.cumsum(sizes[order]) <= largest]] = True
        free &= inside
        exact = False
        settled = chosen.copy()
    else:
        settled = np.full(num_jobs, -1)
        lone = np.flatnonzero(alive & ~free[knapsack.job])
        settled[knapsack.job[lone]] = lone
    settled[free] = -1
    fixed = settled[settled >= 0]
    left = knapsack.limit - knapsack.use[fixed].sum(0)
    value = float(knapsack.value[fixed].sum())
    core = np.flatnonzero(alive & free[knapsack.job])
    if (left < -1e-9).any():
        core = core[:0]  # nothing beats what was rounded
    else:
        core = core[(knapsack.use[core] <= left + 1e-9).all(1)]
    inner = knapsack.replace(
        job=knapsack.job[core],
        value=knapsack.value[core],
        use=knapsack.use[core],
        limit=left,
        forced=knapsack.forced & free,
    )
    allowed = relative_gap * abs(objective if np.isfinite(objective) else bound)
    found = _exact(inner, allowed, time_limit_s) if len(core) else None
    if found is not None:
        item = settled.copy()
        taken = found.item >= 0
        item[taken] = core[found.item[taken]]
        item = _improve(knapsack, item)
        if exact:
            bound = min(bound, max(objective, found.bound + value))
        if _objective(knapsack, item) > objective:
            chosen, objective = item, _objective(knapsack, item)
    elif exact and chosen is not None:
        bound = objective
    return chosen, bound


def _by_program(knapsack: Knapsack) -> Selection | None:
    """The best choice by dynamic program, which is its own bound."""
    chosen = _program(knapsack)
    if chosen is None:
        return None
    objective = _objective(knapsack, chosen)
    return Selection(item=chosen, objective=objective, bound=objective)


def _exact(knapsack: Knapsack, allowed: float, time_limit_s: float) -> Selection | None:
    """The best choice, within `allowed` (in units of the objective) where HiGHS must find it."""
    knapsack = _without_slack_rows(knapsack)
    if _cells(knapsack) <= CHEAP_CORE:
        return _by_program(knapsack)
    rows, low, high = _rows(knapsack)
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
    """The constraint matrix [rows + jobs, items] and its two sides."""
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
    """The prices [rows] and the fractions [items] of a vertex of the relaxation; None = infeasible."""
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
    """The whole part of a fractional choice, filled up greedily.

    Where a forced job is left, as near to that as `start` allows; None without one.
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
    """A choice that is feasible: job after job as `start` has it, the cheapest first, until it is."""
    none = len(knapsack.value)
    value = np.append(knapsack.value, 0.0)
    use = np.concatenate([knapsack.use, np.zeros((1, knapsack.use.shape[1]))])
    use = use / np.maximum(knapsack.limit, 1e-9)
    then = np.where(start >= 0, start, none)
    now = np.where(knapsack.forced & (chosen < 0), then, np.where(chosen >= 0, chosen, none))
    while True:
        over = use[now].sum(0) > 1.0 + 1e-9
        if not over.any():
            return np.where(now < none, now, -1)
        freed = (use[now] - use[then])[:, over].sum(1)
        loss = np.where(freed > 1e-12, value[now] - value[then], np.inf)
        best = int(np.argmin(loss / np.maximum(freed, 1e-12)))
        if not np.isfinite(loss[best]):
            return start
        now[best] = then[best]


def _improve(knapsack: Knapsack, chosen: np.ndarray) -> np.ndarray:
    """Single changes that fit what is left, the most valuable first, until there is none."""
    chosen = chosen.copy()
    none = len(knapsack.value)
    value = np.append(knapsack.value, 0.0)
    use = np.concatenate([knapsack.use, np.zeros((1, knapsack.use.shape[1]))])
    while True:
        present = np.where(chosen >= 0, chosen, none)
        left = knapsack.limit - use[present].sum(0)
        theirs = present[knapsack.job]
        gain = knapsack.value - value[theirs]
        gain[((knapsack.use - use[theirs]) > left + 1e-9).any(1)] = 0.0
        best = int(np.argmax(gain))
        if gain[best] <= 1e-12:
            return chosen
        chosen[knapsack.job[best]] = best


def _program(knapsack: Knapsack) -> np.ndarray | None:
    """The exact best by dynamic programming over what is left of every row; None = infeasible.

    best[c] is the most that the jobs so far are worth within capacity c, so that the last entry is
    the answer: O(items x states). Of equals, the first item in order.
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
    """What the dynamic program would cost; infinite where a row is not counted in whole numbers."""
    if (knapsack.use != np.rint(knapsack.use)).any():
        return np.inf
    states = float(np.prod(np.floor(knapsack.limit + 1e-9) + 1.0))
    return len(knapsack.job) * states


def _without_slack_rows(knapsack: Knapsack) -> Knapsack:
    """Without the rows that no choice can exceed."""
    most = np.zeros((len(knapsack.forced), knapsack.use.shape[1]))
    np.maximum.at(most, knapsack.job, knapsack.use)
    binding = most.sum(0) > knapsack.limit + 1e-9
    if not binding.any():  # one row is kept so that there always is one
        return knapsack.replace(use=np.zeros((len(knapsack.job), 1)), limit=np.zeros(1))
    return knapsack.replace(use=knapsack.use[:, binding], limit=knapsack.limit[binding])


def _subset(knapsack: Knapsack, keep: np.ndarray) -> Knapsack:
    return knapsack.replace(
        job=knapsack.job[keep], value=knapsack.value[keep], use=knapsack.use[keep]
    )


def _objective(knapsack: Knapsack, chosen: np.ndarray) -> float:
    return float(knapsack.value[chosen[chosen >= 0]].sum())
