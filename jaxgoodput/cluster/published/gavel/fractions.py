"""Gavel's fractions: which part of its time each job should spend on each kind of device.

Source: Narayanan et al., "Heterogeneity-aware cluster scheduling policies for deep learning workloads"
(Gavel), OSDI 2020, and its artifact. Unlike the artifact, limits and budgets of tenants are constraints of
the problem.

Scheduling is split in two. A *fraction policy* reads a `FractionProblem` and answers with `Fractions`: job i
should run on kind j for the part x[i, j] of wall-clock time, always as a gang of `scale_factor[i]` devices.
`rounds.RoundScheduler` then turns fractions into allocations.

Feasible fractions: x >= 0; each row sums to at most 1, because a job runs in one place at a time; and for
every kind, the sum over i of scale_factor[i] x[i, j] is at most capacity[j]. If jobs share devices, a pair
of jobs has a row of its own. It counts once against the capacity, and once against the time of each of the
two jobs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from jaxgoodput.cluster.scheduler.limits import (
    Limit,
    counts,
    limits_of,
    per_device,
    quota_limit,
)
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import capacity, node_size
from jaxgoodput.specs import ClusterSpec, JobSpec, Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class FractionProblem:
    """What a fraction policy may know; rows are jobs, columns are kinds of device.

    Speeds on kinds without devices, or of tenants with a limit of 0, become 0 whatever is given. Raises
    ValueError for impossible numbers.
    """

    job_ids: tuple[str, ...]
    kinds: tuple[str, ...]
    throughput: Float[np.ndarray, "jobs kinds"]
    """Steps (or any unit of the job's own) per second of the whole gang; 0 = cannot run there."""
    scale_factor: Int[np.ndarray, " jobs"]
    """Devices in each job's gang."""
    capacity: Int[np.ndarray, " kinds"]
    """Devices of each kind."""
    weight: Float[np.ndarray, " jobs"]
    """Users' weights, above 0; a job of weight 2 deserves twice the share of a job of weight 1."""
    remaining_steps: Float[np.ndarray, " jobs"]
    """Work left, in the unit of `throughput` times seconds."""
    since_arrival_s: Float[np.ndarray, " jobs"]
    """Seconds since the job was submitted."""
    price: Float[np.ndarray, " kinds"]
    """Price per device and hour."""
    deadlines_s: Float[np.ndarray, " jobs"]
    """Seconds from now to the deadline; infinite = none."""
    isolated_s: Float[np.ndarray, " jobs"]
    """Time that the work done so far would have taken on a 1/m share of the cluster (C_i of finish-time
    fairness)."""
    held: Int[np.ndarray, " jobs"]
    """Index of the kind on which a job runs at present; -1 = none."""
    tenant: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    """Pairs of jobs that may share devices."""
    pair_throughput: Float[np.ndarray, "pairs 2 kinds"] = field(
        default_factory=lambda: np.zeros((0, 2, 0))
    )
    """Speeds of the two members of each pair while they share devices."""
    quota: Mapping[str, int] = field(default_factory=dict)
    """Most devices at once by tenant; missing tenants have no quota."""
    tenant_limits: tuple[Limit, ...] = ()
    """Limits of whole subtrees of tenants, in devices or money."""

    def __post_init__(self):
        num_jobs, num_kinds = self.throughput.shape
        if self.pairs == () and self.pair_throughput.shape[-1] != num_kinds:
            object.__setattr__(self, "pair_throughput", np.zeros((0, 2, num_kinds)))
        self._check()
        barred = np.zeros((num_jobs, num_kinds), bool)
        barred |= np.asarray(self.capacity) == 0
        for limit in self.limits:
            if limit.left <= 0:
                its: np.ndarray = counts([limit], self.tenant)[0]
                counted = per_device([limit], self.kinds) > 0
                barred |= its[:, None] & counted
        object.__setattr__(self, "throughput", np.where(barred, 0.0, self.throughput))
        if self.pairs:
            either = barred[np.asarray(self.pairs)].any(axis=1)[:, None, :]
            speeds = np.where(either, 0.0, self.pair_throughput)
            object.__setattr__(self, "pair_throughput", speeds)

    def _check(self):
        num_jobs, num_kinds = self.throughput.shape
        for name, per, length in (
            ("job_ids", "job", num_jobs),
            ("tenant", "job", num_jobs),
            ("kinds", "kind", num_kinds),
        ):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries but throughput has the shape "
                    f"{self.throughput.shape} [jobs, kinds]. Give one entry per {per}."
                )
        for name in "throughput pair_throughput remaining_steps since_arrival_s price".split():
            values = getattr(self, name)
            if not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(
                    f"{name} must be finite and at least 0, got {values[~(values >= 0)][:3]} among its "
                    "entries. Use 0 for a kind on which a job cannot run, as from_views() does."
                )
        for name, wrong, valid in (
            ("scale_factor", self.scale_factor < 1, "at least 1"),
            ("weight", ~(self.weight > 0), "above 0"),
        ):
            if wrong.any():
                raise ValueError(f"{name} must be {valid}, got {getattr(self, name).min():g}.")
        self._check_pairs()

    def _check_pairs(self):
        for i, j in self.pairs:
            if i == j or self.scale_factor[i] != self.scale_factor[j]:
                raise ValueError(
                    f"The pair {(i, j)} has gangs of {self.scale_factor[i]} and {self.scale_factor[j]} "
                    "devices; only two jobs of one gang size can share all of their devices."
                )

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits on what tenants use: quotas first, then limits of tenants with those below them."""
        return (*(quota_limit(t, n) for t, n in self.quota.items()), *self.tenant_limits)

    @property
    def num_jobs(self) -> int:
        """Number of jobs, the rows of `throughput`."""
        return len(self.job_ids)

    @property
    def runnable(self) -> np.ndarray:
        """[jobs] whether a job can run on any kind at all."""
        return self.throughput.max(axis=1, initial=0.0) > 0

    def nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """Return zeros as fractions of time: [jobs, kinds] for jobs alone, [pairs, kinds] for pairs."""
        return np.zeros(self.throughput.shape), np.zeros((len(self.pairs), len(self.kinds)))

    def proportional_rate(self) -> np.ndarray:
        """Return [jobs] the speed of a job whose time on the kinds is proportional to their devices."""
        return self.throughput @ self.capacity / max(self.capacity.sum(), 1)

    def isolated_fractions(self) -> np.ndarray:
        """Return [jobs, kinds] the fraction of time of each job if each of the m had 1/m of every kind."""
        share = self.capacity[None, :] / max(self.num_jobs, 1) / self.scale_factor[:, None]
        return share / np.maximum(share.sum(axis=1, keepdims=True), 1.0)

    def isolated_rate(self) -> np.ndarray:
        """Return [jobs] the steps per second of each job if each of the m jobs had 1/m of the cluster."""
        return (self.throughput * self.isolated_fractions()).sum(axis=1)

    def agnostic(self) -> "FractionProblem":
        """Return the problem as a policy sees it that cannot tell kinds apart: each job has its mean speed.

        The mean is over the devices on which the job can run, so it never gets time on others. Pairs are
        left out.
        """
        can = self.throughput > 0
        mean = (self.throughput * self.capacity).sum(axis=1) / np.maximum(can @ self.capacity, 1)
        return dataclasses.replace(
            self,
            throughput=np.where(can, mean[:, None], 0.0),
            pairs=(),
            pair_throughput=np.zeros((0, 2, len(self.kinds))),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fractions:
    """The fraction of time that each job, and each pair on shared devices, runs on each kind of device."""

    alone: Float[np.ndarray, "jobs kinds"]
    """Fraction of the time in which the job has devices of that kind for itself."""
    together: Float[np.ndarray, "pairs kinds"]
    """Fractions of the problem's `pairs`."""
    objective: float | None = None
    """Value of the policy's objective, in its own unit; None if it has none."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Explanation, by id, for jobs that did not get what they asked for."""
    fills: bool = True
    """Whether devices that are left over may go to jobs with a fraction of 0."""

    def rate(self, problem: FractionProblem) -> np.ndarray:
        """Return [jobs] the average steps per second of each job with these fractions."""
        rate = (self.alone * problem.throughput).sum(axis=1)
        if problem.pairs:
            both = np.einsum("kj,kmj->km", self.together, problem.pair_throughput)
            np.add.at(rate, np.asarray(problem.pairs), both)
        return rate

    def per_job(self, problem: FractionProblem) -> np.ndarray:
        """Return [jobs, kinds] the fraction of its time that a job runs, alone or with another."""
        total = self.alone.copy()
        for (i, j), row in zip(problem.pairs, self.together, strict=True):
            total[i] += row
            total[j] += row
        return total

    def excess(self, problem: FractionProblem) -> float:
        """Return by how much the worst constraint is exceeded: time, capacity, a limit, or x >= 0."""
        per_job = self.per_job(problem)
        used = problem.scale_factor @ self.alone
        if problem.pairs:
            used = used + problem.scale_factor[[i for i, _ in problem.pairs]] @ self.together
        over = [per_job.sum(axis=1) - 1, used - problem.capacity, -self.alone.ravel()]
        for limit in problem.limits:
            x = np.vstack([self.alone, self.together])
            over.append((limit_use(problem, limit) * x).sum() - limit.left)
        return float(max(np.max(part, initial=0.0) for part in (*over, -self.together.ravel())))


def limit_use(problem: FractionProblem, limit: Limit) -> np.ndarray:
    """Return [jobs + pairs, kinds] what each job or pair counts against a limit if it runs there.

    A pair counts once, for the member whose id comes first, as in `reconcile`.
    """
    payers = [*range(problem.num_jobs)]
    payers += [min(pair, key=lambda i: problem.job_ids[i]) for pair in problem.pairs]
    mine = counts([limit], [problem.tenant[i] for i in payers])[0]
    size = np.where(mine, problem.scale_factor[np.array(payers, dtype=int)], 0).astype(float)
    return size[:, None] * per_device([limit], problem.kinds)


@runtime_checkable
class FractionPolicy(Protocol):
    """A rule that gives jobs fractions of their time on each kind. Equal problems must give equal ones.

    Implementations are frozen dataclasses with `__call__`.
    """

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Return the fraction of its time that every job runs on each kind of device."""
        ...


def gang_size(spec: JobSpec, hint: int | None = None) -> int:
    """Return the number of devices of a job under a policy that does not resize jobs.

    A rigid job declares it. For others it is the user's choice within their limits, or the smallest size.
    """
    if spec.mode == "rigid" and spec.num_devices is not None:
        return spec.num_devices
    return min(max(spec.min_devices, hint or spec.num_devices or 1), spec.max_devices)


def gang_shape(job: JobView, kind: str, num_devices: int, per_node: int) -> Shape | None:
    """Return the shape of a job with `num_devices` of one kind, on the fewest nodes of `per_node` devices.

    None if its speed there is unknown or not a positive number.
    """
    shape = Shape(kind, -(-num_devices // max(per_node, 1)), num_devices)
    speed = job.goodput.get(shape, 0.0)
    return shape if np.isfinite(speed) and speed > 0 else None


def from_views(
    jobs: Sequence[JobView],
    cluster: ClusterSpec,
    now_s: float,
    *,
    assumed_remaining_s: float = 3600.0,
) -> FractionProblem:
    """Return the problem that jobs pose on a cluster, leaving out speeds that are not positive numbers.

    A gang that is larger than all devices of a kind cannot run there. A job that declares no remaining work
    is assumed to be half done (typical of a heavy-tailed length), with at least `assumed_remaining_s` left
    at its isolated speed. Only the time received by kind is known of the past, so a job's isolated time is
    its steps so far at the present isolated speed. `packing.with_pairs_of_views` adds pairs of jobs.
    """
    free, per_node = capacity(cluster), node_size(cluster)
    kinds = tuple(sorted(free))
    sizes = [gang_size(job.spec, job.rigid_shape_hint) for job in jobs]
    limits = limits_of(cluster)

    def column(value: Callable[[JobView], float | int]) -> np.ndarray:
        return np.array([value(job) for job in jobs], dtype=float)

    throughput = np.zeros((len(jobs), len(kinds)))
    for i, (job, size) in enumerate(zip(jobs, sizes, strict=True)):
        throughput[i] = _speeds(job, size, free, per_node, limits)
    problem = FractionProblem(
        job_ids=tuple(job.spec.id for job in jobs),
        kinds=kinds,
        throughput=throughput,
        scale_factor=np.array(sizes, dtype=int),
        capacity=np.array([free[kind] for kind in kinds], dtype=int),
        weight=column(lambda job: job.spec.weight),
        remaining_steps=np.zeros(len(jobs)),
        since_arrival_s=column(lambda job: max(now_s - job.submitted_s, 0.0)),
        price=np.array([cluster.price_per_hour.get(kind, 1.0) for kind in kinds], dtype=float),
        deadlines_s=column(
            lambda job: np.inf if job.spec.deadline_s is None else job.spec.deadline_s - now_s
        ),
        isolated_s=np.zeros(len(jobs)),
        held=_held(jobs, cluster, kinds),
        tenant=tuple(job.spec.tenant for job in jobs),
        quota=dict(cluster.quota),
        tenant_limits=limits[len(cluster.quota) :],
    )
    done = np.array([[job.fraction_received_s.get(kind, 0.0) for kind in kinds] for job in jobs])
    done = (throughput * done.reshape(throughput.shape)).sum(axis=1)
    isolated = problem.isolated_rate()
    declared = column(lambda job: np.nan if job.remaining is None else max(job.remaining, 0.0))
    assumed = np.maximum(done, assumed_remaining_s * isolated)
    isolated_s = np.divide(done, isolated, out=np.zeros(len(jobs)), where=isolated > 0)
    remaining = np.where(np.isnan(declared), assumed, declared)
    return dataclasses.replace(problem, remaining_steps=remaining, isolated_s=isolated_s)


def _held(jobs: Sequence[JobView], cluster: ClusterSpec, kinds: Sequence[str]) -> np.ndarray:
    kind_of = {node.name: node.kind for node in cluster.nodes}
    held = np.full(len(jobs), -1)
    for i, job in enumerate(jobs):
        on = [kind_of[name] for name in job.allocation.devices if name in kind_of]
        if on:
            held[i] = kinds.index(on[-1])
    return held


def _speeds(
    job: JobView,
    size: int,
    free: Mapping[str, int],
    per_node: Mapping[str, int],
    limits: Sequence[Limit],
) -> list[float]:
    """Return a job's speed with `size` devices on each kind; 0 if it does not fit there or may not run."""
    its = [limit for limit in limits if job.spec.tenant in limit.tenants]
    speeds = dict.fromkeys(sorted(free), 0.0)
    for kind in speeds:
        over = any(size * limit.per_device(kind) > limit.left + 1e-9 for limit in its)
        allowed = job.spec.kinds is None or kind in job.spec.kinds
        shape = gang_shape(job, kind, size, per_node.get(kind, 0))
        if allowed and not over and size <= free[kind] and shape is not None:
            speeds[kind] = job.goodput[shape]
    return list(speeds.values())
