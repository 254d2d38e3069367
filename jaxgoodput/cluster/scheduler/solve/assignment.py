"""Who gets which shape: a multiple-choice knapsack per kind of device, solved to a proven gap.

    maximise    sum_js utility[j, s] x[j, s]
    subject to  sum_s x[j, s] <= 1                      for every job (= 1 where it must run)
                sum_js demand[s] x[j, s] <= capacity    for every kind, and likewise for every quota

The linear relaxation has a vertex at which at most (kinds + quotas) jobs are fractional, so its prices
decide nearly every job. What they leave open (items whose reduced cost is below the gap) is a small
exact problem: `multiple_choice.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.solve.multiple_choice import Knapsack, Selection, solve


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A limit on what some jobs use together, in devices or in any unit that grows with devices."""

    jobs: np.ndarray
    """[jobs] bool: whose use counts."""
    limit: float | int
    per_device: np.ndarray | None = None
    """[kinds] >= 0: units of one device; None = 1."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A shape for every job, and the most that any choice could be worth."""

    shape: np.ndarray
    """[jobs] index of the shape; -1 = does not run."""
    objective: float
    bound: float
    unserved: tuple[int, ...] = ()
    """Jobs that had to run and do not fit."""


def allocate(
    utility: np.ndarray,
    demand: np.ndarray,
    kind: np.ndarray,
    capacity: np.ndarray,
    *,
    pinned: np.ndarray | None = None,
    at_least: np.ndarray | None = None,
    quotas: Sequence[Quota] = (),
    rows: np.ndarray | None = None,
    row_limit: np.ndarray | None = None,
    start: np.ndarray | None = None,
    relative_gap: float = 1e-4,
    time_limit_s: float = 10.0,
) -> Choice:
    """The choice of highest total utility within the capacity, to `relative_gap` where time allows.

    utility: [jobs, shapes]; NaN = not allowed. Running nowhere is worth 0, so a shape of utility
    <= 0 is only taken by a job that must run. demand: [shapes] devices; kind: [shapes] index of the
    kind; capacity: [kinds] devices. pinned: [jobs] shape that a job keeps, -1 = free. at_least:
    [jobs] bool, must run on some shape; those that cannot all fit are in `unserved`, and the rest
    is served nevertheless. rows: [rows, shapes] further capacities, each growing with the devices of
    a kind, and row_limit: [rows] how much of them there is. start: [jobs] shape, -1 = none, of a choice that
    is known to keep all this; it is needed only where many must run.

    Raises SolverTimeout where no choice is known after `time_limit_s`, ValueError where the pinned
    jobs alone exceed the capacity or a quota.

    >>> allocate(np.array([[1.0, 1.5], [1.0, 1.2]]), np.array([1, 2]), np.array([0, 0]),
    ...     np.array([3])).shape.tolist()
    [1, 0]
    """
    utility = np.asarray(utility, np.float64)
    demand, kind = np.asarray(demand, np.float64), np.asarray(kind, np.int64)
    num_jobs, num_kinds = len(utility), len(capacity)
    pinned = np.full(num_jobs, -1) if pinned is None else np.asarray(pinned, np.int64)
    forced = np.zeros(num_jobs, bool) if at_least is None else np.asarray(at_least, bool)
    rows = np.zeros((0, len(demand))) if rows is None else np.asarray(rows, np.float64)
    more = np.zeros(0) if row_limit is None else np.asarray(row_limit, np.float64)
    limit = np.array([*capacity, *(quota.limit for quota in quotas), *more], np.float64)

    def use(jobs: np.ndarray, shapes: np.ndarray) -> np.ndarray:
        """[pairs, rows] of every capacity and quota that these pairs of job and shape use."""
        used = np.zeros((len(jobs), len(limit)))
        used[np.arange(len(jobs)), kind[shapes]] = demand[shapes]
        for row, quota in enumerate(quotas, num_kinds):
            units = np.ones(num_kinds) if quota.per_device is None else quota.per_device
            used[:, row] = np.asarray(quota.jobs)[jobs] * units[kind[shapes]] * demand[shapes]
        used[:, num_kinds + len(quotas) :] = rows[:, shapes].T
        return used

    held = np.flatnonzero(pinned >= 0)
    used = use(held, pinned[held]).sum(0)
    if (used > limit + 1e-9).any():
        row = int(np.argmax(used - limit))
        what = f"kind {row}" if row < num_kinds else f"quota or further row {row - num_kinds}"
        raise ValueError(
            f"the pinned jobs use {used[row]:g} of {what}, but only {limit[row]:g} exist: they "
            "cannot all keep what they have. Release the jobs whose devices are gone first."
        )
    kept = float(np.nansum(utility[held, pinned[held]]))
    job, shape = np.nonzero(_undominated(utility, demand, kind, forced) & (pinned < 0)[:, None])
    needs = use(job, shape)
    fits = (needs <= limit - used + 1e-9).all(1)
    knapsack = Knapsack(
        job=job[fits],
        value=utility[job[fits], shape[fits]],
        use=needs[fits],
        limit=limit - used,
        forced=forced & (pinned < 0),
    )
    known = None if start is None else _items(start, job[fits], shape[fits], utility, demand, kind)
    solution, unserved = _solve_what_fits(knapsack, known, relative_gap, time_limit_s)
    chosen = pinned.copy()
    taken = solution.item >= 0
    chosen[taken] = shape[fits][solution.item[taken]]
    return Choice(
        shape=chosen,
        objective=solution.objective + kept,
        bound=solution.bound + kept,
        unserved=unserved,
    )


def _undominated(
    utility: np.ndarray, demand: np.ndarray, kind: np.ndarray, forced: np.ndarray
) -> np.ndarray:
    """[jobs, shapes] bool: allowed, worth something, and no fewer devices of the kind are as good.

    A quota never makes a dominated shape better: it too counts more for more devices.
    """
    order = np.lexsort((demand, kind))
    value = np.where(np.isnan(utility), -np.inf, utility)[:, order]
    floor = np.where(forced, -np.inf, 0.0)[:, None]
    keep = np.zeros(utility.shape, bool)
    for one in np.unique(kind):
        columns = np.flatnonzero(kind[order] == one)
        best = np.maximum.accumulate(np.maximum(value[:, columns], floor), 1)
        before = np.concatenate([np.broadcast_to(floor, (len(value), 1)), best[:, :-1]], 1)
        keep[:, order[columns]] = value[:, columns] > before
    return keep


def _items(
    start: np.ndarray,
    job: np.ndarray,
    shape: np.ndarray,
    utility: np.ndarray,
    demand: np.ndarray,
    kind: np.ndarray,
) -> np.ndarray:
    """[jobs] the items of a choice of shapes, or what is better than these and no larger; -1 = none."""
    wanted = start[job]
    no_larger = (wanted >= 0) & (kind[shape] == kind[wanted]) & (demand[shape] <= demand[wanted])
    items = np.flatnonzero(no_larger)
    items = items[np.argsort(utility[job[items], shape[items]], kind="stable")]
    known = np.full(len(start), -1)
    known[job[items]] = items  # of several the last, which is the best
    return known


def _solve_what_fits(
    knapsack: Knapsack, start: np.ndarray | None, relative_gap: float, time_limit_s: float
) -> tuple[Selection, tuple[int, ...]]:
    """The best choice, and the jobs that had to run and are left out because they cannot all fit."""
    solution = solve(knapsack, relative_gap, time_limit_s, start)
    if solution is not None:
        return solution, ()
    # Serve as many of them as fit; of equally many, those that use the least.
    share = (knapsack.use / np.maximum(knapsack.limit, 1.0)).sum(1)
    among = knapsack.forced[knapsack.job]
    count = knapsack.replace(
        value=np.where(among, 1.0 - 1e-4 * share / (1.0 + share.max(initial=0.0)), 0.0),
        forced=np.zeros_like(knapsack.forced),
    )
    most = solve(count, relative_gap=0.0, time_limit_s=time_limit_s)
    served = knapsack.forced & (most.item >= 0) if most else np.zeros_like(knapsack.forced)
    unserved = tuple(int(job) for job in np.flatnonzero(knapsack.forced & ~served))
    worth = knapsack.value > 0.0
    worth |= served[knapsack.job]
    solution = solve(
        knapsack.replace(forced=served, value=np.where(worth, knapsack.value, -np.inf)),
        relative_gap,
        time_limit_s,
    )
    assert solution is not None  # `most` itself is a choice
    return solution, unserved
