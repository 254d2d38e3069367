"""Which fraction of its time each job should spend on each kind of device: the problem and its answer.

Gavel (OSDI 2020) splits scheduling in two. A *fraction policy* reads a `FractionProblem` and answers
with `Fractions`: x[i, j] is the share of wall-clock time that job i ought to run on kind j, always as a
gang of `scale_factor[i]` devices. `rounds.RoundScheduler` then turns fractions into allocations.

Feasible fractions: x >= 0; a job runs in one place at a time (its row sums to at most 1); sum over i of
scale_factor[i] x[i, j] <= capacity[j]. Where jobs share devices, a pair of jobs has a row of its own
that counts once against the capacity and once against the time of either job.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from jaxgoodput.cluster.scheduler.limits import Limit, limits_of, per_device
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import capacity, node_size
from jaxgoodput.specs import ClusterSpec, JobSpec, Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class FractionProblem:
    """What a fraction policy may know; rows are jobs, columns are kinds of device.

    `throughput` is in steps (or any unit of the job's own) per second of the whole gang; 0 = cannot run
    there. `deadlines_s` count from now; infinite = none. `isolated_s` is the time that a job would have
    taken for what it has done so far on its own 1/m of the cluster (C_i of finish-time fairness).
    Speeds on kinds without devices, or of tenants with a limit of 0, count as 0 whatever is given.
    `held` is the kind that a job runs on at present, -1 = none. `pair_throughput[k, 0]` and `[k, 1]` are
    the speeds of the two members of `pairs[k]` while they share devices. `price` is per device and hour,
    `quota` devices at once by tenant (absent = any), `tenant_limits` those of whole subtrees, in devices or
    money.
    """

    job_ids: tuple[str, ...]
    kinds: tuple[str, ...]
    throughput: Float[np.ndarray, "jobs kinds"]
    scale_factor: Int[np.ndarray, " jobs"]
    capacity: Int[np.ndarray, " kinds"]
    weight: Float[np.ndarray, " jobs"]
    remaining_steps: Float[np.ndarray, " jobs"]
    since_arrival_s: Float[np.ndarray, " jobs"]
    price: Float[np.ndarray, " kinds"]
    deadlines_s: Float[np.ndarray, " jobs"]
    isolated_s: Float[np.ndarray, " jobs"]
    held: Int[np.ndarray, " jobs"]
    tenant: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    pair_throughput: Float[np.ndarray, "pairs 2 kinds"] = field(
        default_factory=lambda: np.zeros((0, 2, 0))
    )
    quota: Mapping[str, int] = field(default_factory=dict)
    tenant_limits: tuple[Limit, ...] = ()

    def __post_init__(self):
        num_jobs, num_kinds = self.throughput.shape
        if self.pairs == () and self.pair_throughput.shape[-1] != num_kinds:
            object.__setattr__(self, "pair_throughput", np.zeros((0, 2, num_kinds)))
        for name, length in (("job_ids", num_jobs), ("tenant", num_jobs), ("kinds", num_kinds)):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries but throughput has the shape "
                    f"{self.throughput.shape} [jobs, kinds]. Give one entry per "
                    f"{'kind' if name == 'kinds' else 'job'}."
                )
        for name in (
            "throughput",
            "pair_throughput",
            "remaining_steps",
            "since_arrival_s",
            "price",
        ):
            values = getattr(self, name)
            if not np.isfinite(values).all() or (values < 0).any():
                raise ValueError(
                    f"{name} must be finite and at least 0, got {values[~(values >= 0)][:3]} among its "
                    f"entries; 0 says that a job cannot run there. from_views() leaves such entries out."
                )
        if num_jobs and (self.scale_factor < 1).any():
            raise ValueError(
                f"scale_factor must be at least 1, got {int(self.scale_factor.min())}."
            )
        if num_jobs and not (self.weight > 0).all():
            raise ValueError(f"weight must be above 0, got {float(self.weight.min())}.")
        barred = np.zeros((num_jobs, len(self.kinds)), bool)
        barred |= np.asarray(self.capacity) == 0
        for limit in self.limits:
            if limit.left <= 0:
                its = np.array([tenant in limit.tenants for tenant in self.tenant], bool)
                counted = per_device([limit], self.kinds) > 0
                barred |= its[:, None] & counted
        object.__setattr__(self, "throughput", np.where(barred, 0.0, self.throughput))
        if self.pairs:
            either = barred[np.asarray(self.pairs)].any(axis=1)[:, None, :]
            speeds = np.where(either, 0.0, self.pair_throughput)
            object.__setattr__(self, "pair_throughput", speeds)
        for i, j in self.pairs:
            if i == j or self.scale_factor[i] != self.scale_factor[j]:
                raise ValueError(
                    f"The pair {(i, j)} has gangs of {self.scale_factor[i]} and {self.scale_factor[j]} "
                    "devices; only two jobs of one gang size can share all of their devices."
                )

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What tenants may have together: quotas, then limits of subtrees."""
        quotas = (
            Limit(
                tenants=frozenset({t}),
                left=float(n),
                said=f"the quota of tenant {t!r}, {n} devices",
            )
            for t, n in self.quota.items()
        )
        return (*quotas, *self.tenant_limits)

    @property
    def num_jobs(self) -> int:
        """Rows of `throughput`."""
        return len(self.job_ids)

    @property
    def runnable(self) -> np.ndarray:
        """[jobs] whether a job can run on any kind at all."""
        return self.throughput.max(axis=1, initial=0.0) > 0

    def proportional_rate(self) -> np.ndarray:
        """[jobs] speed of a job that spends its time on the kinds in proportion to their numbers."""
        return self.throughput @ self.capacity / max(self.capacity.sum(), 1)

    def isolated_fractions(self) -> np.ndarray:
        """[jobs, kinds] time on a 1/m share of every kind, for m jobs; no job above all of its time."""
        share = self.capacity[None, :] / max(self.num_jobs, 1) / self.scale_factor[:, None]
        return share / np.maximum(share.sum(axis=1, keepdims=True), 1.0)

    def isolated_rate(self) -> np.ndarray:
        """[jobs] speed on a 1/m share of the cluster."""
        return (self.throughput * self.isolated_fractions()).sum(axis=1)

    def agnostic(self) -> "FractionProblem":
        """The same problem for a policy that cannot tell kinds apart: every job goes at its mean speed.

        The mean is over the devices that the job can run on, so that it never gets time on others.
        """
        where = self.throughput > 0
        devices = where @ self.capacity
        mean = (self.throughput * self.capacity).sum(axis=1) / np.maximum(devices, 1)
        return dataclasses.replace(
            self,
            throughput=np.where(where, mean[:, None], 0.0),
            pairs=(),
            pair_throughput=np.zeros((0, 2, len(self.kinds))),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fractions:
    """Fractions of wall-clock time, feasible by construction, with the objective that they reach."""

    alone: Float[np.ndarray, "jobs kinds"]
    together: Float[np.ndarray, "pairs kinds"]
    """Rows are the problem's `pairs`."""
    objective: float | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By job id, where it did not get what it asked."""
    fills: bool = True
    """Whether devices that are left over may go to jobs with the fraction 0."""

    def rate(self, problem: FractionProblem) -> np.ndarray:
        """[jobs] steps per second that the fractions give."""
        rate = (self.alone * problem.throughput).sum(axis=1)
        if problem.pairs:
            both = np.einsum("kj,kmj->km", self.together, problem.pair_throughput)
            np.add.at(rate, np.asarray(problem.pairs), both)
        return rate

    def per_job(self, problem: FractionProblem) -> np.ndarray:
        """[jobs, kinds] fraction of its time that a job runs, alone or with another."""
        total = self.alone.copy()
        for (i, j), row in zip(problem.pairs, self.together, strict=True):
            total[i] += row
            total[j] += row
        return total

    def excess(self, problem: FractionProblem) -> float:
        """By how much the worst constraint is exceeded: of time, of capacity, or of a sign."""
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
    """[jobs + pairs, kinds] what each job or pair counts against a limit where it runs.

    A pair counts once, for the member whose id comes first, as `reconcile` counts it.
    """
    payers = [*range(problem.num_jobs)]
    payers += [min(pair, key=lambda i: problem.job_ids[i]) for pair in problem.pairs]
    mine = np.array([problem.tenant[i] in limit.tenants for i in payers], dtype=bool)
    size = np.where(mine, problem.scale_factor[np.array(payers, dtype=int)], 0).astype(float)
    return size[:, None] * per_device([limit], problem.kinds)


@runtime_checkable
class FractionPolicy(Protocol):
    """Implementations are frozen dataclasses with `__call__`; equal problems give equal fractions."""

    def __call__(self, problem: FractionProblem, /) -> Fractions:
        """Fractions of time for every job of the problem."""
        ...


def gang_size(spec: JobSpec, hint: int | None = None) -> int:
    """How many devices a job runs on under a policy that does not resize jobs.

    Rigid jobs say so; of others it is what their user would have picked, within their limits, or their
    smallest size.
    """
    if spec.mode == "rigid" and spec.num_devices is not None:
        return spec.num_devices
    return min(max(spec.min_devices, hint or spec.num_devices or 1), spec.max_devices)


def gang_shape(job: JobView, kind: str, num_devices: int, per_node: int) -> Shape | None:
    """The shape of a gang on one kind, over as few nodes of `per_node` devices as can be; None if unknown.

    Unknown is also a speed that is not a positive number.
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
    """The problem that job views pose, without speeds that are no positive numbers.

    A gang that is larger than all devices of a kind cannot run there. A job that declares no remaining
    work is assumed to be half done (what it has left is what it has done, as of a heavy-tailed length),
    and to have at least `assumed_remaining_s` left at its isolated speed. What is known of the past is
    the time received by kind, so the isolated time of a job counts its steps done at the present
    isolated speed. Pairs of jobs are added by `packing.with_pairs_of_views`.
    """
    free = capacity(cluster)
    per_node = node_size(cluster)
    kinds = tuple(sorted(free))
    sizes = [gang_size(job.spec, job.rigid_shape_hint) for job in jobs]
    throughput = np.zeros((len(jobs), len(kinds)))
    limits = limits_of(cluster)
    held = np.full(len(jobs), -1)
    kind_of = {node.name: node.kind for node in cluster.nodes}
    for i, (job, size) in enumerate(zip(jobs, sizes, strict=True)):
        its = [limit for limit in limits if job.spec.tenant in limit.tenants]
        for j, kind in enumerate(kinds):
            over = any(size * limit.per_device(kind) > limit.left + 1e-9 for limit in its)
            if size > free[kind] or over:
                continue
            if job.spec.kinds is not None and kind not in job.spec.kinds:
                continue
            shape = gang_shape(job, kind, size, per_node.get(kind, 0))
            if shape is not None:
                throughput[i, j] = job.goodput[shape]
        for name, local in job.allocation.devices.items():
            if local and kind_of.get(name) in kinds:
                held[i] = kinds.index(kind_of[name])
    done = np.array([[job.fraction_received_s.get(kind, 0.0) for kind in kinds] for job in jobs])
    done = (throughput * done.reshape(throughput.shape)).sum(axis=1)
    problem = FractionProblem(
        job_ids=tuple(job.spec.id for job in jobs),
        kinds=kinds,
        throughput=throughput,
        scale_factor=np.array(sizes, dtype=int),
        capacity=np.array([free[kind] for kind in kinds], dtype=int),
        weight=np.array([job.spec.weight for job in jobs], dtype=float),
        remaining_steps=np.zeros(len(jobs)),
        since_arrival_s=np.array([max(now_s - job.submitted_s, 0.0) for job in jobs], dtype=float),
        price=np.array([cluster.price_per_hour.get(kind, 1.0) for kind in kinds], dtype=float),
        deadlines_s=np.array(
            [
                np.inf if job.spec.deadline_s is None else job.spec.deadline_s - now_s
                for job in jobs
            ],
            dtype=float,
        ),
        isolated_s=np.zeros(len(jobs)),
        held=held,
        tenant=tuple(job.spec.tenant for job in jobs),
        quota=dict(cluster.quota),
        tenant_limits=limits[len(cluster.quota) :],
    )
    isolated = problem.isolated_rate()
    remaining = np.maximum(done, assumed_remaining_s * isolated)
    for i, job in enumerate(jobs):
        if job.remaining is not None:
            remaining[i] = max(job.remaining, 0.0)
    isolated_s = np.divide(done, isolated, out=np.zeros(len(jobs)), where=isolated > 0)
    return dataclasses.replace(problem, remaining_steps=remaining, isolated_s=isolated_s)
