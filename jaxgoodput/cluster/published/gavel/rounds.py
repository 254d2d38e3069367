"""Gavel's round mechanism: in each round, run the jobs that are furthest behind their fractions.

Source: Gavel (OSDI 2020, section 5) and its artifact. Differences: there is an exact selection besides the
published greedy one, limits of tenants are kept, and nothing is remembered between rounds. What a job has
received is in its view, and its lease is the time since its allocation began.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxgoodput.cluster.published.gavel.fractions import (
    FractionPolicy,
    FractionProblem,
    Fractions,
    from_views,
    gang_shape,
    limit_use,
)
from jaxgoodput.cluster.published.gavel.packing import with_pairs_of_views
from jaxgoodput.cluster.scheduler.constraints import (
    Devices,
    add_devices,
    offered_devices,
    withhold,
    within,
)
from jaxgoodput.cluster.scheduler.limits import limits_of, use_by_tenant
from jaxgoodput.cluster.scheduler.placement.amounts import used_by_node
from jaxgoodput.cluster.scheduler.placement.placement import place
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import capacity, node_size
from jaxgoodput.cluster.scheduler.solve.multiple_choice import Knapsack, solve
from jaxgoodput.specs import ClusterSpec, Shape

_NEVER_YET = 1e9  # stands for 1 / f if nothing was received: before all jobs that have something
_EXACT, _TIME_LIMIT_S = 1e-9, 10.0  # relative gap and time limit of the exact selection


@dataclass(frozen=True, kw_only=True)
class RoundScheduler:
    """Run the set of jobs of greatest total priority x_ij / f_ij that fits, with x from a fraction policy.

    f_ij is the share of its time, since it arrived (or since `JobView.fractions_since_s`), that job i has
    received on kind j. If it is 0, the priority is 1e9 x_ij. A priority of 1 is on target. Jobs run as gangs
    of `fractions.gang_size` devices.

    With `selection="greedy"`, jobs are taken in order of priority, as in Gavel. With "exact", the set of
    greatest total value is taken, a multiple-choice knapsack in which a gang of s devices counts s times
    (`count_devices`). Otherwise eight single devices on target would outweigh a gang of eight that is seven
    times behind, and shares would not converge.

    A job keeps its devices for `round_s` after it got them (its lease), while it restores, during its
    minimum run time, and always if it cannot be preempted. Devices that are left over go to the jobs with
    fraction 0 that have received least, unless the fraction policy forbids it (as those in order of arrival
    do). With `share_devices`, pairs of jobs with known speeds side by side (`JobView.shared_goodput`) take
    part. Placement puts gangs of whole nodes first, and keeps a job's devices if kind and size stay.
    """

    fraction_policy: FractionPolicy
    round_s: float = 360.0
    selection: Literal["greedy", "exact"] = "greedy"
    count_devices: bool = True
    share_devices: bool = False

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return allocations for the next round: the jobs of greatest total priority that fit run."""
        if not jobs:
            return Decision(allocations={})
        problem = from_views(jobs, cluster, now_s)
        per_node = node_size(cluster)
        if self.share_devices:
            problem = with_pairs_of_views(problem, jobs, per_node)
        target = self.fraction_policy(problem)
        # As published, the closed forms also give time on kinds on which a job cannot run.
        target = dataclasses.replace(
            target, alone=np.where(problem.throughput > 0.0, target.alone, 0.0)
        )
        pinned = self._pinned(jobs, cluster, now_s)
        allocations = {job: jobs[i].allocation for job, i in pinned.items()}
        taken: Devices = {}
        for allocation in allocations.values():
            add_devices(taken, allocation.devices)
        tenants = {job.spec.id: job.spec.tenant for job in jobs}
        kind_of = {node.name: node.kind for node in cluster.nodes}
        amounts = used_by_node({job.spec.id: job.spec for job in jobs}, allocations)
        rest = withhold(cluster, taken, use_by_tenant(allocations, tenants, kind_of), amounts)
        received = fraction_received(jobs, problem, now_s)
        urgency = priorities(problem, target, received)
        chosen = self._choose(problem, target, urgency, received, rest, set(pinned.values()))
        wanted, groups = _wanted(problem, jobs, chosen, per_node)
        placed = place(wanted, jobs, rest, share_groups=groups)
        allocations.update(placed)
        reasons = {}
        for i, job in enumerate(problem.job_ids):
            if job in pinned:
                said = "keeps its devices: its lease, its restore or its minimum run time goes on"
            else:
                said = _outcome(problem, i, wanted.get(job), job in placed)
            reasons[job] = "; ".join([said, *_shares(problem, i, target, received)])
        return Decision(allocations=allocations, reasons=reasons, objective=target.objective)

    def _pinned(self, jobs, cluster, now_s) -> dict[str, int]:
        """Return the jobs that keep their devices in this round, whatever their priority: rows by id."""
        offered = offered_devices(cluster)
        return {
            job.spec.id: i
            for i, job in enumerate(jobs)
            if self._stays(job, now_s) and within(job.allocation, offered)
        }

    def _stays(self, job: JobView, now_s: float) -> bool:
        """Return whether a job must keep its devices in this round."""
        if not job.allocation.devices or job.since_s is None:
            return False
        leased = now_s < job.since_s + max(self.round_s, job.spec.min_run_s)
        restoring = job.restoring_until_s is not None and now_s < job.restoring_until_s
        return leased or restoring or not job.spec.preemptible

    def _choose(self, problem, target, urgency, received, rest, pinned):
        """Return [jobs + pairs] the kind on which each job or pair runs in this round; -1 = does not run."""
        num_rows = problem.num_jobs + len(problem.pairs)
        members = [_members(problem, row) for row in range(num_rows)]
        size = np.array([problem.scale_factor[m[0]] for m in members], dtype=int)
        open_row = np.array([not pinned & set(m) for m in members], dtype=bool)
        free = capacity(rest)
        value = np.where(open_row[:, None], urgency, 0.0)
        exact = self.selection == "exact"
        if exact and self.count_devices:
            value = value * size[:, None]
        round_problem = RoundProblem(
            value=value,
            size=size,
            capacity=np.array([free.get(kind, 0) for kind in problem.kinds], dtype=int),
            members=members,
            budgets=[(limit_use(problem, limit), limit.left) for limit in limits_of(rest)],
        )
        chosen = best_rows(round_problem) if exact else greedy(round_problem)
        if not target.fills:
            return chosen
        # Idle devices go to the jobs that have received least, on the kinds on which they are fastest.
        starved = 1.0 / (1.0 + received.sum(axis=1))
        relative = problem.throughput / np.maximum(problem.throughput.max(1, keepdims=True), 1e-300)
        filler = np.zeros_like(value)
        singles = slice(0, problem.num_jobs)
        filler[singles] = np.where(open_row[singles, None], starved[:, None] * relative, 0.0)
        return greedy(dataclasses.replace(round_problem, value=filler), chosen)


def _wanted(problem, jobs, chosen, per_node) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return the shape of each chosen job, and the share group of each job in a chosen pair, by id."""
    wanted: dict[str, Shape] = {}
    groups: dict[str, str] = {}
    for row in np.flatnonzero(chosen >= 0).tolist():
        members = _members(problem, row)
        kind = problem.kinds[chosen[row]]
        for i in members:
            shape = gang_shape(jobs[i], kind, int(problem.scale_factor[i]), per_node[kind])
            assert shape is not None, "only shapes of known speed are candidates"
            wanted[problem.job_ids[i]] = shape
            if len(members) > 1:
                groups[problem.job_ids[i]] = "+".join(problem.job_ids[m] for m in members)
    return wanted, groups


def _outcome(problem: FractionProblem, i: int, wanted: Shape | None, is_placed: bool) -> str:
    if wanted is not None:
        said = f"{wanted.num_devices} {wanted.kind}"
        return f"runs on {said}" if is_placed else f"waits: no {said} are free in one piece"
    if not problem.runnable[i]:
        size = problem.scale_factor[i]
        return f"waits: no kind has room for its {size} devices and a known speed"
    return "waits: others are further behind their shares"


def _shares(problem: FractionProblem, i: int, target: Fractions, received: np.ndarray) -> list[str]:
    """Return, in words, what time a job should get and has had on each kind, and a remark of the policy."""
    x, f = target.per_job(problem)[i], received[i]
    shares = ", ".join(
        f"{kind} {x[j]:.3g} ({f[j]:.3g} received)"
        for j, kind in enumerate(problem.kinds)
        if x[j] > 0 or f[j] > 0
    )
    said = [f"its shares of time: {shares}" if shares else "its share of time is 0"]
    remark = target.reasons.get(problem.job_ids[i])
    return said if remark is None else [*said, remark]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundProblem:
    """What may run in a round; rows are jobs alone, then pairs of jobs on the same devices."""

    value: Float[np.ndarray, "rows kinds"]
    """Value of running a row on a kind; not positive = not allowed."""
    size: Int[np.ndarray, " rows"]
    """Devices that a row needs."""
    capacity: Int[np.ndarray, " kinds"]
    members: Sequence[tuple[int, ...]]
    """Jobs of each row; each job runs in at most one row."""
    budgets: Sequence[tuple[np.ndarray, float]] = ()
    """Limits: what each row counts on each kind, and how much is left."""


def greedy(problem: RoundProblem, start: Int[np.ndarray, " rows"] | None = None) -> np.ndarray:
    """Take rows in order of value, each on the kind of greatest value that has room. Gavel's mechanism.

    Fills what `start` leaves free. Ties go to the earlier row and kind.

    Returns:
      [rows] kind; -1 = does not run.
    """
    chosen = np.full(len(problem.size), -1) if start is None else start.copy()
    free = problem.capacity.copy()
    left = [limit for _, limit in problem.budgets]
    taken: set[int] = set()

    def take(row, kind):
        chosen[row] = kind
        free[kind] -= problem.size[row]
        taken.update(problem.members[row])
        for b, (use, _) in enumerate(problem.budgets):
            left[b] -= float(use[row, kind])

    for row in np.flatnonzero(chosen >= 0).tolist():
        take(row, int(chosen[row]))
    rows, kinds = np.nonzero(problem.value > 0)
    for at in np.argsort(-problem.value[rows, kinds], kind="stable").tolist():
        row, kind = int(rows[at]), int(kinds[at])
        affordable = all(
            use[row, kind] <= max(left[b] + 1e-9, 0.0) for b, (use, _) in enumerate(problem.budgets)
        )
        fits = int(problem.size[row]) <= free[kind] and affordable
        if fits and not taken & set(problem.members[row]):
            take(row, kind)
    return chosen


def best_rows(problem: RoundProblem) -> np.ndarray:
    """Choose the rows of greatest total value and their kinds.

    This is a knapsack in which every row takes at most one kind. Limits, and jobs that are in several rows,
    are further capacities.

    Returns:
      [rows] kind; -1 = does not run.
    """
    row, kind = np.nonzero((problem.value > 0) & (problem.size[:, None] <= problem.capacity))
    # Only a job that is in several rows needs a constraint of its own: it runs in at most one of them.
    counts = Counter(itertools.chain.from_iterable(problem.members))
    capacities = [
        (np.where(kind == k, problem.size[row], 0), n) for k, n in enumerate(problem.capacity)
    ]
    capacities += [(use[row, kind], n) for use, n in problem.budgets]
    for job, count in counts.items():
        if count > 1:
            takes_part = np.array([job in members for members in problem.members], int)
            capacities.append((takes_part[row], 1))
    solution = solve(
        Knapsack(
            job=row,
            value=problem.value[row, kind],
            use=np.array([use for use, _ in capacities], float).T,
            limit=np.array([limit for _, limit in capacities], float),
            forced=np.zeros(len(problem.size), bool),
        ),
        _EXACT,
        _TIME_LIMIT_S,
    )
    assert solution is not None, "running nothing is feasible"
    chosen = np.full(len(problem.size), -1)
    runs = solution.item >= 0
    chosen[runs] = kind[solution.item[runs]]
    return chosen


def fraction_received(
    jobs: Sequence[JobView], problem: FractionProblem, now_s: float
) -> np.ndarray:
    """Return [jobs, kinds] the share of its time that each job has run on each kind.

    Time counts from a job's arrival, or from `fractions_since_s` if it is given.
    """
    received = np.zeros((len(jobs), len(problem.kinds)))
    for i, job in enumerate(jobs):
        begin_s = job.submitted_s if job.fractions_since_s is None else job.fractions_since_s
        for j, kind in enumerate(problem.kinds):
            seconds = job.fraction_received_s.get(kind, 0.0)
            received[i, j] = seconds / max(now_s - begin_s, seconds, 1e-9)
    return received


def priorities(problem: FractionProblem, target: Fractions, received: np.ndarray) -> np.ndarray:
    """Return [jobs + pairs, kinds] x / f, or 1e9 x if f = 0; 0 if x = 0.

    f of a pair is the larger one of its members. Measurements do not tell apart what a job got alone and
    beside another. So f of a row with one job is the job's time on that kind in total, times the row's share
    of it.
    """
    total = target.per_job(problem)
    x = np.vstack([target.alone, target.together])
    reference = np.zeros_like(x)
    for row in range(len(x)):
        mine = list(_members(problem, row))
        share = np.divide(x[row], total[mine].max(0), out=np.zeros(x.shape[1]), where=x[row] > 0)
        reference[row] = received[mine].max(axis=0) * share
    return np.where(reference > 0, x / np.where(reference > 0, reference, 1.0), x * _NEVER_YET)


def _members(problem: FractionProblem, row: int) -> tuple[int, ...]:
    return (row,) if row < problem.num_jobs else problem.pairs[row - problem.num_jobs]
