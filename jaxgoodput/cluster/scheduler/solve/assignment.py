"""Choose a shape for every job: a multiple-choice knapsack over kinds of device, solved to a proven gap.

    maximise    sum_js utility[j, s] x[j, s]
    subject to  sum_s x[j, s] <= 1                      for every job (= 1 if it must run)
                sum_js demand[s] x[j, s] <= capacity    for every kind, and likewise for every quota

The linear relaxation has a vertex at which at most (kinds + quotas) jobs are fractional, so its prices decide
nearly every job. The items that they leave open (reduced cost below the gap) form a small exact problem, see
`multiple_choice.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.solve.multiple_choice import Knapsack, Selection, solve


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A limit on what some jobs use together, in devices or any unit that grows with devices."""

    jobs: np.ndarray
    """[jobs] how far a job's use counts: 1 or 0, or units for each of its devices."""
    limit: float | int
    per_device: np.ndarray | None = None
    """[kinds] units that one device counts, at least 0; None = 1."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A shape for every job, and an upper bound on the value of any choice."""

    shape: np.ndarray
    """[jobs] index of the shape; -1 if the job does not run."""
    objective: float
    bound: float
    unserved: tuple[int, ...] = ()
    """Jobs that had to run but do not fit."""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """All constraints as rows: capacities of kinds, then quotas, then further rows."""

    demand: np.ndarray  # [shapes]
    kind: np.ndarray  # [shapes]
    num_kinds: int
    quotas: Sequence[Quota]
    more: np.ndarray  # [further rows, shapes]
    limit: np.ndarray  # [rows]

    def use(self, jobs: np.ndarray, shapes: np.ndarray) -> np.ndarray:
        """Return [pairs, rows] how much of each row's limit each pair of a job and a shape uses."""
        used = np.zeros((len(jobs), len(self.limit)))
        kind, demand = self.kind[shapes], self.demand[shapes]
        used[np.arange(len(jobs)), kind] = demand
        for row, quota in enumerate(self.quotas, self.num_kinds):
            units = np.ones(self.num_kinds) if quota.per_device is None else quota.per_device
            used[:, row] = np.asarray(quota.jobs)[jobs] * units[kind] * demand
        used[:, self.num_kinds + len(self.quotas) :] = self.more[:, shapes].T
        return used

    def held(self, pinned: np.ndarray) -> np.ndarray:
        """Return [rows] what pinned jobs, which keep a shape, use. Raises ValueError if that is too much."""
        jobs = np.flatnonzero(pinned >= 0)
        used = self.use(jobs, pinned[jobs]).sum(0)
        if (used > self.limit + 1e-9).any():
            row = int(np.argmax(used - self.limit))
            more = row - self.num_kinds
            what = f"kind {row}" if more < 0 else f"quota or further row {more}"
            raise ValueError(
                f"the pinned jobs use {used[row]:g} of {what}, but only {self.limit[row]:g} exist: they "
                "cannot all keep what they have. Release the jobs whose devices are gone first."
            )
        return used


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
    """Return the choice of highest total utility within the capacity, to `relative_gap` if time allows.

    Not running is worth 0, so a shape of utility <= 0 is taken only by a job that must run.

    Args:
      utility: [jobs, shapes]; NaN = not allowed.
      demand: [shapes] devices.
      kind: [shapes] index of the kind.
      capacity: [kinds] devices.
      pinned: [jobs] shape that a job keeps, -1 = free.
      at_least: [jobs] bool: must run on some shape. If these jobs cannot all fit, some are reported in
        `unserved`.
      quotas: limits on what some jobs use together.
      rows: [rows, shapes] use of further capacities, each growing with the devices of a kind.
      row_limit: [rows] limits of `rows`.
      start: [jobs] shape, -1 = none, of a choice that is known to satisfy all constraints. It is needed only
        if many jobs must run.

    Raises SolverTimeout if no choice is known after `time_limit_s`, ValueError if the pinned jobs alone
    exceed the capacity or a quota.

    >>> allocate(np.array([[1.0, 1.5], [1.0, 1.2]]), np.array([1, 2]), np.array([0, 0]),
    ...     np.array([3])).shape.tolist()
    [1, 0]
    """
    utility = np.asarray(utility, np.float64)
    demand, kind = np.asarray(demand, np.float64), np.asarray(kind, np.int64)
    pinned = np.full(len(utility), -1) if pinned is None else np.asarray(pinned, np.int64)
    forced = np.zeros(len(utility), bool) if at_least is None else np.asarray(at_least, bool)
    rows = np.zeros((0, len(demand))) if rows is None else np.asarray(rows, np.float64)
    more = np.zeros(0) if row_limit is None else np.asarray(row_limit, np.float64)
    limit = np.array([*capacity, *(quota.limit for quota in quotas), *more], np.float64)
    constraints = _Rows(
        demand=demand, kind=kind, num_kinds=len(capacity), quotas=quotas, more=rows, limit=limit
    )
    used = constraints.held(pinned)
    held = np.flatnonzero(pinned >= 0)
    kept = float(np.nansum(utility[held, pinned[held]]))
    job, shape = np.nonzero(_undominated(utility, demand, kind, forced) & (pinned < 0)[:, None])
    needs = constraints.use(job, shape)
    fits = (needs <= limit - used + 1e-9).all(1)
    job, shape = job[fits], shape[fits]
    knapsack = Knapsack(
        job=job,
        value=utility[job, shape],
        use=needs[fits],
        limit=limit - used,
        forced=forced & (pinned < 0),
    )
    known = None if start is None else _items(start, job, shape, utility, demand, kind)
    solution, unserved = _solve_what_fits(knapsack, known, relative_gap, time_limit_s)
    chosen = pinned.copy()
    taken = solution.item >= 0
    chosen[taken] = shape[solution.item[taken]]
    return Choice(
        shape=chosen,
        objective=solution.objective + kept,
        bound=solution.bound + kept,
        unserved=unserved,
    )


def _undominated(
    utility: np.ndarray, demand: np.ndarray, kind: np.ndarray, forced: np.ndarray
) -> np.ndarray:
    """Return [jobs, shapes] bool: allowed, useful, and better than every smaller shape of the same kind.

    A quota never makes a dominated shape better, because it counts more for more devices too.
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
    """Return [jobs] the item for each shape of `start`, or a better one that is no larger; -1 = none."""
    wanted = start[job]
    no_larger = (wanted >= 0) & (kind[shape] == kind[wanted]) & (demand[shape] <= demand[wanted])
    items = np.flatnonzero(no_larger)
    items = items[np.argsort(utility[job[items], shape[items]], kind="stable")]
    known = np.full(len(start), -1)
    known[job[items]] = items  # if a job has several, the last one wins, which is the best
    return known


def _solve_what_fits(
    knapsack: Knapsack, start: np.ndarray | None, relative_gap: float, time_limit_s: float
) -> tuple[Selection, tuple[int, ...]]:
    """Return the best choice, and jobs that had to run but are left out because not all of them fit."""
    solution = solve(knapsack, relative_gap, time_limit_s, start)
    if solution is not None:
        return solution, ()
    # Serve as many of the forced jobs as fit; among equally many, the ones that use the least.
    share = (knapsack.use / np.maximum(knapsack.limit, 1.0)).sum(1)
    among = knapsack.forced[knapsack.job]
    count = knapsack.replace(
        value=np.where(among, 1.0 - 1e-4 * share / (1.0 + share.max(initial=0.0)), 0.0),
        forced=np.zeros_like(knapsack.forced),
    )
    most = solve(count, relative_gap=0.0, time_limit_s=time_limit_s)
    served = knapsack.forced & (most.item >= 0) if most else np.zeros_like(knapsack.forced)
    unserved = tuple(int(job) for job in np.flatnonzero(knapsack.forced & ~served))
    worth = (knapsack.value > 0.0) | served[knapsack.job]
    fitting = knapsack.replace(forced=served, value=np.where(worth, knapsack.value, -np.inf))
    solution = solve(fitting, relative_gap, time_limit_s)
    if solution is None and most is not None:  # rounding went astray; `most` itself is a choice
        known = np.where(served, most.item, -1)
        solution = solve(fitting, relative_gap, time_limit_s, known)
    assert solution is not None
    return solution, unserved
