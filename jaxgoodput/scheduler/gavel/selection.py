"""Which jobs run in a round: the set of greatest total value that fits, greedily or exactly.

Candidates are rows (a job alone, or a pair of jobs on the same devices); `value[row, kind]` is what running
it there is worth, not positive = not there. A row needs `size[row]` devices of one kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse
from jaxtyping import Float, Int

from jaxgoodput.scheduler.policy import SolverError


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """What may run; `members[row]` are the jobs of a row, and each job runs in at most one row.

    `budgets` are quotas: rows that count against it, and how many devices they may have at once.
    """

    value: Float[np.ndarray, "rows kinds"]
    size: Int[np.ndarray, " rows"]
    capacity: Int[np.ndarray, " kinds"]
    members: Sequence[tuple[int, ...]]
    budgets: Sequence[tuple[np.ndarray, int]] = ()

    @property
    def independent(self) -> bool:
        """Whether no two rows share a job and no budget can bind, so that only capacity matters."""
        jobs = [job for row in self.members for job in row]
        free = all(int(self.size[rows].sum()) <= limit for rows, limit in self.budgets)
        return free and len(set(jobs)) == len(jobs)

    @property
    def table_cells(self) -> int:
        """Cells of the table that the exact dynamic program fills."""
        cells = len(self.size)
        for free in self.capacity.tolist():
            cells *= free + 1
        return cells


def greedy(candidates: Candidates, start: Int[np.ndarray, " rows"] | None = None) -> np.ndarray:
    """Rows in order of value, each where it is worth most and still fits; [rows] kind, -1 = does not run.

    Fills what `start` leaves free. Ties go to the earlier row and kind. This is Gavel's mechanism.
    """
    c = candidates
    chosen = np.full(len(c.size), -1) if start is None else start.copy()
    free = c.capacity.copy()
    left = [limit for _, limit in c.budgets]
    taken: set[int] = set()

    def take(row, kind):
        chosen[row] = kind
        free[kind] -= c.size[row]
        taken.update(c.members[row])
        for b, (rows, _) in enumerate(c.budgets):
            left[b] -= int(c.size[row]) if rows[row] else 0

    for row in np.flatnonzero(chosen >= 0).tolist():
        take(row, int(chosen[row]))
    rows, kinds = np.nonzero(c.value > 0)
    for at in np.argsort(-c.value[rows, kinds], kind="stable").tolist():
        row, kind = int(rows[at]), int(kinds[at])
        size = int(c.size[row])
        within = all(not of[row] or size <= left[b] for b, (of, _) in enumerate(c.budgets))
        if size <= free[kind] and within and not taken & set(c.members[row]):
            take(row, kind)
    return chosen


def one_kind(
    value: Float[np.ndarray, " rows"], size: Int[np.ndarray, " rows"], capacity: int
) -> np.ndarray:
    """The rows of greatest total value within the capacity, of one kind: exact; [rows] bool.

    best[i, j] is the most that the first i rows are worth on j devices: O(rows x devices).
    """
    best = np.zeros(capacity + 1)
    took = np.zeros((len(value), capacity + 1), dtype=bool)
    for i, (worth, need) in enumerate(zip(value.tolist(), size.tolist(), strict=True)):
        if worth <= 0 or need > capacity:
            continue
        with_it = best[: capacity + 1 - need] + worth
        took[i, need:] = with_it > best[need:]
        best[need:] = np.maximum(best[need:], with_it)
    chosen = np.zeros(len(value), dtype=bool)
    left = capacity
    for i in range(len(value) - 1, -1, -1):
        if took[i, left]:
            chosen[i] = True
            left -= int(size[i])
    return chosen


def several_kinds(candidates: Candidates, max_cells: int) -> np.ndarray:
    """The rows of greatest total value and their kinds: exact; [rows] kind, -1 = does not run.

    best[i, j_1, ..., j_n] is over the first i rows and the devices of each kind: a table of
    rows x product of (capacity + 1) cells. ValueError where that is above `max_cells`, or where rows share
    jobs or a budget can bind, which the table does not see: `relaxed` is for these.
    """
    c = candidates
    if c.table_cells > max_cells or not c.independent:
        raise ValueError(
            f"The exact table has {c.table_cells} cells, at most {max_cells} are allowed"
            + ("" if c.independent else ", and the rows share jobs or budgets")
            + ". Use relaxed(), the linear program with rounding, or allow more cells."
        )
    if len(c.capacity) == 1:
        return np.where(one_kind(c.value[:, 0], c.size, int(c.capacity[0])), 0, -1)
    best = np.zeros(tuple(c.capacity + 1))
    took = np.full((len(c.size), *best.shape), -1, dtype=np.int8)
    for i, need in enumerate(c.size.tolist()):
        before = best
        for kind in np.flatnonzero((c.value[i] > 0) & (c.capacity >= need)).tolist():
            if best is before:
                best = before.copy()
            to = tuple(slice(need if k == kind else 0, None) for k in range(best.ndim))
            end = int(c.capacity[kind]) + 1 - need
            of = tuple(slice(0, end if k == kind else None) for k in range(best.ndim))
            with_it = before[of] + c.value[i, kind]
            better = with_it > best[to]
            best[to] = np.where(better, with_it, best[to])
            took[i][to][better] = kind
    chosen = np.full(len(c.size), -1)
    left = c.capacity.copy()
    for i in range(len(c.size) - 1, -1, -1):
        chosen[i] = took[(i, *left)]
        if chosen[i] >= 0:
            left[chosen[i]] -= c.size[i]
    return chosen


def relaxed(candidates: Candidates) -> np.ndarray:
    """The linear relaxation, rounded down, then filled greedily; [rows] kind, -1 = does not run.

    A vertex has at most one split row per capacity and budget (where rows share no job), so at most that
    many are lost before the filling.
    """
    c = candidates
    rows, kinds = np.nonzero((c.value > 0) & (c.size[:, None] <= c.capacity))
    if not len(rows):
        return np.full(len(c.size), -1)
    variable = np.arange(len(rows))
    members = [(job, v) for v, row in enumerate(rows.tolist()) for job in c.members[row]]
    jobs, at = np.asarray(members).T
    num_jobs, num_kinds = int(jobs.max()) + 1, len(c.capacity)
    matrix: Any = scipy.sparse.csr_matrix(
        (
            np.concatenate([np.ones(len(jobs)), c.size[rows].astype(float)]),
            (np.concatenate([jobs, num_jobs + kinds]), np.concatenate([at, variable])),
        ),
        (num_jobs + num_kinds, len(rows)),
    )
    budgets = [np.where(of[rows], c.size[rows], 0).astype(float) for of, _ in c.budgets]
    if budgets:
        matrix = scipy.sparse.vstack([matrix, np.array(budgets)])
    right = np.concatenate([np.ones(num_jobs), c.capacity, [limit for _, limit in c.budgets]])
    values = c.value[rows, kinds]
    result = scipy.optimize.linprog(
        -values / values.max(), A_ub=matrix.tocsc(), b_ub=right, method="highs-ds"
    )
    if result.x is None:
        raise SolverError(
            f"HiGHS stopped with the status {result.status} ({result.message}) on the choice of a round; "
            "running nothing is feasible, so look for values that are not finite."
        )
    chosen = np.full(len(c.size), -1)
    whole = result.x > 1 - 1e-6
    chosen[rows[whole]] = kinds[whole]
    return greedy(c, chosen)
