"""What tenants are guaranteed, as claims; and the part of the rest that each deserves, as factors of weights.

A tenant whose jobs want them has its guaranteed devices in the same decision, whoever has borrowed them.
From the leaves of the tree upwards, each tenant spends what it is guaranteed on its own jobs: in order of
their weights, of equals whoever makes most of a device (what changes cost included), then who came first, a
job starts on its smallest shape, one that has waited too long (`guarantee.py`) before all others; then those
that run grow, again where a device is worth most. What a tenant leaves is spent on the jobs of the others
below its parent. So of every subtree at least the guaranteed devices run, as far as its jobs can use them;
only what is left after that is borrowed, and goes to whom the choice of shapes finds best, where weights are
multiplied by what tenants deserve over what they had (`fair_share.py`).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.fair_share import factors
from jaxgoodput.cluster.scheduler.limits import subtrees, together, use_by_tenant
from jaxgoodput.cluster.scheduler.policies.promises import Claim, Room
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision
from jaxgoodput.cluster.scheduler.shapes import capacity
from jaxgoodput.specs import ClusterSpec


class GuaranteedClaims(NamedTuple):
    """Claims that can all be granted together."""

    claims: list[Claim]
    whose: dict[int, str]
    """By job, the tenant out of whose guarantee it comes."""
    devices: dict[int, int]
    """By job, how many of these it is."""


def fair_factors(problem: ShapeProblem, power: float) -> np.ndarray:
    """[jobs] what weights are multiplied by, so that tenants have what they deserve over time."""
    cluster = problem.cluster
    active = {view.spec.tenant for view in problem.jobs}
    active |= {name for name, by_kind in cluster.in_use.items() if sum(by_kind.values())}
    had_s: dict[str, float] = {}
    for view in problem.jobs:
        had_s |= view.tenant_received_s
        break  # all jobs say the same
    found = factors(cluster, active, had_s, float(_num_devices(cluster)), power=power)
    return np.array([found[view.spec.tenant] for view in problem.jobs], np.float64)


def guaranteed(
    problem: ShapeProblem,
    utility: np.ndarray,
    urgency: np.ndarray,
    preferred: Mapping[int, Sequence[int]],
) -> GuaranteedClaims:
    """What tenants claim out of their guarantees.

    utility: [jobs, shapes] what the policy makes of them, NaN = not allowed; urgency: [jobs] the lowest
    comes first; preferred: by job, the shapes that it is to have where one of them fits into what is left of
    the guarantee. Where fewer devices are in service than are guaranteed, all guarantees shrink alike.
    """
    cluster = problem.cluster
    below = subtrees(cluster)
    spending = _Spending(problem, utility, preferred)
    order = _order(problem, utility, urgency)
    top = sum(tenant.guaranteed for tenant in cluster.tenants if tenant.parent is None)
    scale = min(1.0, _num_devices(cluster) / max(top, 1))
    whose: dict[int, str] = {}
    # Who is within another has the smaller subtree.
    for tenant in sorted(cluster.tenants, key=lambda tenant: len(below[tenant.name])):
        its = below[tenant.name]
        jobs = [i for i in order if problem.jobs[i].spec.tenant in its]
        left = int(tenant.guaranteed * scale + 1e-9)
        left -= sum(sum(cluster.in_use.get(name, {}).values()) for name in its)
        left -= sum(spending.devices(i) for i in jobs)
        if not jobs or left <= 0:
            continue
        for i in jobs:
            if i not in whose and left > 0:
                taken = spending.start(i, left)
                left -= taken
                if taken:
                    whose[i] = tenant.name
            elif left > 0:  # of one that is within it
                left -= spending.prefer(i, left)
        spending.grow([i for i in jobs if i in whose], left)
    devices = {i: spending.devices(i) for i in whose}
    spending.let_restart()
    return GuaranteedClaims([spending.claim(i) for i in whose], whose, devices)


def _num_devices(cluster: ClusterSpec) -> int:
    """In service: those to give, and those in use."""
    used = sum(sum(by_kind.values()) for by_kind in cluster.in_use.values())
    return sum(capacity(cluster).values()) + used


def _order(problem: ShapeProblem, utility: np.ndarray, urgency: np.ndarray) -> list[int]:
    """Jobs that can run at all, in the order in which a tenant serves its own."""
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
    """Shapes for jobs while tenants spend their guarantees; all of them fit together."""

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
        # By job that began on no shape that it prefers, the utility of those.
        self._fallen: dict[int, np.ndarray] = {}
        self._pinned: set[int] = set()  # restart, and keep their shape
        self._moved: set[int] = set()  # restart, and may not keep it

    def devices(self, job: int) -> int:
        """Of the shape that it has so far; 0 = none."""
        return int(self._problem.devices[self._shape[job]]) if job in self._shape else 0

    def start(self, job: int, left: int) -> int:
        """The devices that it begins with, at most `left`; 0 where nothing fits."""
        taken = self._start(job, left)
        if taken or np.array_equal(self._utility[job], self._whole[job], equal_nan=True):
            return taken
        preferred, self._utility[job] = self._utility[job].copy(), self._whole[job]
        taken = self._start(job, left)  # better one that it does not prefer than none
        if taken:
            self._fallen[job] = preferred
        else:
            self._utility[job] = preferred
        return taken

    def prefer(self, job: int, left: int) -> int:
        """What a job takes more, at most `left`, for a shape that it prefers where it began without one."""
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
        """Spend what is left on those that have begun, wherever a device more is worth most."""
        devices = self._problem.devices
        queue: list[tuple[float, int, int]] = []  # of a step: -worth, job, to

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
        while queue and left > 0:
            _, job, to = heapq.heappop(queue)
            more = int(devices[to]) - self.devices(job)
            if more <= left:
                if self._change(job, to):
                    left -= more
                else:
                    utility[job, to] = np.nan  # does not fit beside the others
            offer([job])

    def let_restart(self):
        """Who is restarting on more than its tenant is guaranteed keeps that where it is free."""
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
        """Its shape, or any that has as many devices."""
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


def with_tenants(decision: Decision, problem: ShapeProblem, own: GuaranteedClaims) -> Decision:
    """The decision with reasons that say what is guaranteed, what is borrowed, and who takes back."""
    cluster = problem.cluster
    guarantee = {t.name: t.guaranteed for t in cluster.tenants}
    kind_of = {node.name: node.kind for node in cluster.nodes}
    tenants = {view.spec.id: view.spec.tenant for view in problem.jobs}
    given = {view.spec.id: decision.allocations.get(view.spec.id) for view in problem.jobs}
    use = together((cluster.in_use, use_by_tenant(decision.allocations, tenants, kind_of)))
    total = {name: sum(by_kind.values()) for name, by_kind in use.items()}
    below = subtrees(cluster)
    has = {name: sum(total.get(one, 0) for one in its) for name, its in below.items()}
    took: set[str] = set()  # whose jobs have more devices than before, out of its guarantee
    for i, name in own.whose.items():
        now, before = given[problem.jobs[i].spec.id], problem.jobs[i].allocation.num_devices
        if now is not None and now.num_devices > before:
            took.add(name)
    reasons = dict(decision.reasons)
    for i, view in enumerate(problem.jobs):
        id_, tenant = view.spec.id, view.spec.tenant
        now, sure = given[id_], own.devices.get(i, 0)
        if now is None:
            back = sorted(name for name in took if tenant not in below[name])
            if view.allocation.devices and not sure and back:
                names = " and ".join(f"{name!r} ({guarantee[name]} devices)" for name in back)
                reasons[id_] += f"; it gives way to what is guaranteed to {names}"
            continue
        whole = own.whose.get(i, tenant)
        if sure and (whole != tenant or not view.allocation.devices):
            reasons[id_] += f"; of the {guarantee[whole]} devices guaranteed to {whole!r}"
        if now.num_devices > sure and has.get(tenant, 0) > guarantee.get(tenant, 0):
            reasons[id_] += (
                f"; borrowed: {tenant!r} has {has[tenant]} devices and is guaranteed "
                f"{guarantee[tenant]}"
            )
    return replace(decision, reasons=reasons)
