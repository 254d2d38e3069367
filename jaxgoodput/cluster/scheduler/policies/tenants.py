"""Turn the guarantees of tenants into claims, and what tenants deserve of the rest into factors of weights.

A tenant whose jobs want its guaranteed devices gets them in the same decision, whichever jobs have borrowed
them. From the leaves of the tree upwards, each tenant spends its guarantee on its own jobs. Jobs that have
waited too long (`guarantee.py`) come first, then others in order of their weights; at equal weight, the job
that makes most of a device (change costs included), then the earlier one. Each job starts on its smallest
shape; then jobs grow, again where a device is worth most. What a tenant leaves over is spent on the jobs of
the other tenants below its parent. So at least the guaranteed devices of every subtree run, as far as its
jobs can use them. Only what is left is borrowed. It goes where the choice of shapes finds best, with weights
multiplied by what tenants deserve over what they had (`fair_share.py`).
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.fair_share import factors
from jaxgoodput.cluster.scheduler.limits import subtrees, together, use_by_tenant
from jaxgoodput.cluster.scheduler.policies.promises import Claim, Room
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import capacity
from jaxgoodput.specs import ClusterSpec


class GuaranteedClaims(NamedTuple):
    """Jobs that must run because a tenant's guarantee pays for them; all of them can run at once."""

    claims: list[Claim]
    whose: dict[int, str]
    """Tenant whose guarantee pays for a job, by index of the job."""
    devices: dict[int, int]
    """Number of devices that the guarantee pays for, by index of the job."""


def fair_factors(problem: ShapeProblem, power: float) -> np.ndarray:
    """Return [jobs] factors for the jobs' weights: above 1 if the tenant has had less than it deserves."""
    cluster = problem.cluster
    active = {view.spec.tenant for view in problem.jobs}
    active |= {name for name, by_kind in cluster.in_use.items() if sum(by_kind.values())}
    had_s = problem.jobs[0].tenant_received_s if problem.jobs else {}  # all jobs carry the same
    found = factors(cluster, active, had_s, float(_num_devices(cluster)), power=power)
    return np.array([found[view.spec.tenant] for view in problem.jobs], np.float64)


def guaranteed(
    problem: ShapeProblem,
    utility: np.ndarray,
    urgency: np.ndarray,
    preferred: Mapping[int, Sequence[int]],
) -> GuaranteedClaims:
    """Return the jobs that must run because the guarantees of their tenants pay for them.

    If fewer devices are in service than are guaranteed, all guarantees shrink alike.

    `utility`: [jobs, shapes] of the policy, NaN = not allowed; `urgency`: [jobs] rank, the lowest comes
    first; `preferred`: by job, the shapes that it is to have if one of them fits into what is left of the
    guarantee.
    """
    cluster = problem.cluster
    below = subtrees(cluster)
    spending = _Spending(problem, utility, preferred)
    order = _order(problem, utility, urgency)
    scale = _scale(cluster)
    whose: dict[int, str] = {}
    # Tenants inside another one come before it, because their subtrees are smaller.
    for tenant in sorted(cluster.tenants, key=lambda tenant: len(below[tenant.name])):
        its = below[tenant.name]
        jobs = [i for i in order if problem.jobs[i].spec.tenant in its]
        left = int(tenant.guaranteed * scale + 1e-9)
        left -= _in_use(cluster, its) + sum(spending.devices(i) for i in jobs)
        for i in jobs:
            if left <= 0:
                break
            if i in whose:  # paid for by a tenant inside this one
                left -= spending.prefer(i, left)
            elif taken := spending.start(i, left):
                left -= taken
                whose[i] = tenant.name
        spending.grow([i for i in jobs if i in whose], left)
    devices = {i: spending.devices(i) for i in whose}
    spending.let_restart()
    return GuaranteedClaims([spending.claim(i) for i in whose], whose, devices)


def _scale(cluster: ClusterSpec) -> float:
    """Return the devices in service as a share of all guaranteed ones, at most 1."""
    top = sum(tenant.guaranteed for tenant in cluster.tenants if tenant.parent is None)
    return min(1.0, _num_devices(cluster) / max(top, 1))


def _num_devices(cluster: ClusterSpec) -> int:
    """Return the number of devices in service, in use or not."""
    return sum(capacity(cluster).values()) + _in_use(cluster, cluster.in_use)


def _in_use(cluster: ClusterSpec, tenants: Iterable[str]) -> int:
    return sum(sum(cluster.in_use.get(name, {}).values()) for name in tenants)


def _order(problem: ShapeProblem, utility: np.ndarray, urgency: np.ndarray) -> list[int]:
    """Return the jobs that can run at all, in the order in which a tenant's guarantee serves them."""
    if not utility.size:
        return []
    per_device = np.where(np.isnan(utility), -np.inf, utility / problem.devices).max(1)

    def rank(i: int):
        view = problem.jobs[i]
        return (
            urgency[i],
            -view.spec.weight,
            -per_device[i],
            view.submitted_s,
            view.spec.id,
        )

    return sorted(np.flatnonzero(np.isfinite(per_device)).tolist(), key=rank)


class _Spending:
    """Shapes that jobs get from their tenants' guarantees; a shape is added only if all fit together."""

    def __init__(
        self, problem: ShapeProblem, utility: np.ndarray, preferred: Mapping[int, Sequence[int]]
    ):
        self._problem = problem
        self._whole, self._utility = utility, utility.copy()
        for job, shapes in preferred.items():
            self._utility[job, np.setdiff1d(np.arange(utility.shape[1]), shapes)] = np.nan
        self._room = Room(problem)
        self._restoring = problem.restoring()
        self._shape: dict[int, int] = {}  # by job
        # Utility of the preferred shapes of each job that began on another shape.
        self._fallen: dict[int, np.ndarray] = {}
        self._pinned: set[int] = set()  # restarting jobs that keep their shape
        self._moved: set[int] = set()  # restarting jobs that may not keep it

    def devices(self, job: int) -> int:
        """Return the number of devices of the shape that a job has so far; 0 = none."""
        return int(self._problem.devices[self._shape[job]]) if job in self._shape else 0

    def start(self, job: int, left: int) -> int:
        """Give a job its first shape of at most `left` devices; return how many it takes, 0 if none fits."""
        taken = self._start(job, left)
        if taken or np.array_equal(self._utility[job], self._whole[job], equal_nan=True):
            return taken
        preferred, self._utility[job] = self._utility[job].copy(), self._whole[job]
        taken = self._start(job, left)  # another shape is better than none
        if taken:
            self._fallen[job] = preferred
        else:
            self._utility[job] = preferred
        return taken

    def prefer(self, job: int, left: int) -> int:
        """Move a job that began on another shape to a preferred one; return the devices it takes more."""
        if job not in self._fallen or job in self._pinned:
            return 0
        devices, at = self._problem.devices, self.devices(job)
        fits = np.flatnonzero(~np.isnan(self._fallen[job]) & (devices - at <= left))
        for to in fits[np.argsort(devices[fits], kind="stable")].tolist():
            if self._change(job, to):
                self._utility[job] = self._fallen.pop(job)
                return int(devices[to]) - at
        return 0

    def _start(self, job: int, left: int) -> int:
        devices, utility = self._problem.devices, self._utility[job]
        allowed = np.flatnonzero(~np.isnan(utility) & (devices <= left))
        allowed = allowed[np.lexsort((-utility[allowed], devices[allowed]))].tolist()
        present = int(self._restoring[job])
        if present in allowed:
            allowed = [present, *(s for s in allowed if s != present)]
        shape = self._room.take(job, allowed)
        if shape is None:
            return 0
        self._shape[job] = shape
        if shape == present:
            self._pinned.add(job)
        return int(devices[shape])

    def grow(self, jobs: list[int], left: int):
        """Give jobs larger shapes within `left` more devices, first where one more device is worth most."""
        devices = self._problem.devices
        queue: list[tuple[float, int, int]] = []  # steps: -worth per device, job, new shape

        def offer(jobs: list[int]):
            at = np.array([self._shape[job] for job in jobs], np.int64)
            gain = utility[jobs] - utility[jobs, at][:, None]
            more = devices - devices[at][:, None]
            with np.errstate(invalid="ignore"):
                better = (more > 0) & (more <= left) & (gain > 0.0)
            worth = np.where(better, gain / np.maximum(more, 1), 0.0)
            best = worth.argmax(1)
            of_best = worth[np.arange(len(jobs)), best]
            for job, to, each in zip(jobs, best.tolist(), of_best.tolist(), strict=True):
                if each > 0.0:
                    heapq.heappush(queue, (-each, job, to))

        utility = self._utility.copy()
        free = [job for job in jobs if job not in self._pinned]
        if left > 0 and free:
            offer(free)
        # Entries of the queue may be out of date: a step that no longer fits is offered again, smaller.
        while queue and left > 0:
            _, job, to = heapq.heappop(queue)
            more = int(devices[to]) - self.devices(job)
            if more <= left:
                if self._change(job, to):
                    left -= more
                else:
                    utility[job, to] = np.nan  # does not fit beside the other jobs
            offer([job])

    def let_restart(self):
        """Let jobs that restart on more devices than are guaranteed keep their shape if it is free."""
        for job in self._shape:
            present = int(self._restoring[job])
            if present < 0 or job in self._pinned:
                continue
            fewer = self._problem.devices[present] < self.devices(job)
            if not fewer and self._change(job, present):
                self._pinned.add(job)
            else:
                self._moved.add(job)

    def claim(self, job: int) -> Claim:
        """Return the job as a claim: it must run on its shape, or on any with at least as many devices."""
        devices, at = self._problem.devices, self._shape[job]
        enough = ~np.isnan(self._utility[job]) & (devices >= devices[at])
        if job in self._moved:
            enough[self._restoring[job]] = False
        others = np.flatnonzero(enough)
        others = others[np.argsort(devices[others], kind="stable")].tolist()
        return Claim(job, [at, *(s for s in others if s != at)])

    def _change(self, job: int, to: int) -> bool:
        at = self._shape[job]
        self._room.give_back(job, at)
        fits = self._room.take(job, [to]) is not None
        self._shape[job] = to if fits else at
        if not fits:
            again = self._room.take(job, [at])
            assert again is not None, "it was there a moment ago"
        return fits


@dataclass(frozen=True)
class _Accounts:
    """How many devices tenants are guaranteed, and how many they have after the decision."""

    guarantee: Mapping[str, int]
    has: Mapping[str, int]
    """Devices that each tenant and those below it use after the decision."""
    below: Mapping[str, frozenset[str]]
    takers: list[str]
    """Tenants whose guarantees give their jobs more devices than before, sorted."""


def _accounts(decision: Decision, problem: ShapeProblem, own: GuaranteedClaims) -> _Accounts:
    cluster = problem.cluster
    kind_of = {node.name: node.kind for node in cluster.nodes}
    tenants = {view.spec.id: view.spec.tenant for view in problem.jobs}
    use = together((cluster.in_use, use_by_tenant(decision.allocations, tenants, kind_of)))
    total = {name: sum(by_kind.values()) for name, by_kind in use.items()}
    below = subtrees(cluster)
    takers = set()
    for i, name in own.whose.items():
        view = problem.jobs[i]
        now = decision.allocations.get(view.spec.id)
        if now is not None and now.num_devices > view.allocation.num_devices:
            takers.add(name)
    return _Accounts(
        guarantee={t.name: t.guaranteed for t in cluster.tenants},
        has={name: sum(total.get(one, 0) for one in its) for name, its in below.items()},
        below=below,
        takers=sorted(takers),
    )


def with_tenants(decision: Decision, problem: ShapeProblem, own: GuaranteedClaims) -> Decision:
    """Return the decision; its reasons now also say which devices are guaranteed, borrowed or taken back."""
    accounts = _accounts(decision, problem, own)
    reasons = dict(decision.reasons)
    for i, view in enumerate(problem.jobs):
        now, sure = decision.allocations.get(view.spec.id), own.devices.get(i, 0)
        if now is not None:
            payer = own.whose.get(i, view.spec.tenant)
            remark = _runs_on(view, payer, sure, now.num_devices, accounts)
        else:
            remark = "" if sure else _gives_way(view, accounts)
        reasons[view.spec.id] += remark
    return replace(decision, reasons=reasons)


def _gives_way(view: JobView, accounts: _Accounts) -> str:
    back = [name for name in accounts.takers if view.spec.tenant not in accounts.below[name]]
    if not view.allocation.devices or not back:
        return ""
    names = " and ".join(f"{name!r} ({accounts.guarantee[name]} devices)" for name in back)
    return f"; it gives way to the guarantee of {names}"


def _runs_on(
    view: JobView, payer: str, guaranteed: int, num_devices: int, accounts: _Accounts
) -> str:
    """Return what to add to a job's reason: whose guarantee pays for it, and whether devices are borrowed."""
    tenant, remark = view.spec.tenant, ""
    guarantee = accounts.guarantee.get(tenant, 0)
    if guaranteed and (payer != tenant or not view.allocation.devices):
        remark += f"; from the {accounts.guarantee[payer]} devices guaranteed to {payer!r}"
    if num_devices > guaranteed and accounts.has.get(tenant, 0) > guarantee:
        remark += f"; borrowed: {tenant!r} has {accounts.has[tenant]} devices and is guaranteed {guarantee}"
    return remark
