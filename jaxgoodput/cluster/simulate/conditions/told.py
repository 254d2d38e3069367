"""What policies are told about jobs, and how wrong it is.

With `Settings.told_noise`, every entry of a job's goodput table is wrong by its own factor. The factor
belongs to the job and the shape and never changes: neither measurements of other shapes nor averages over
time repair it.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.placement.amounts import needs_of, some_limited
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.restart_estimate import estimated_restart_s
from jaxgoodput.cluster.scheduler.shapes import own_shapes, shapes, size_limits
from jaxgoodput.cluster.scheduler.work_left import EndedJob, Experience
from jaxgoodput.cluster.simulate.jobs.job import Truth, every_size
from jaxgoodput.cluster.simulate.jobs.tracked import TrackedJob, device_kinds
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import ClusterSpec, JobSpec, Shape

NEWCOMER_S = 60.0  # how long a hypothetical job has run on each kind of device


def told_factor(deviation: float, seed: int, job: int, shape: Shape) -> float:
    """Return the factor by which policies are told a wrong goodput; its log has this standard deviation.

    The same arguments give the same factor, in any order of calls. The normal draw behind it does not depend
    on the deviation.

    >>> told_factor(0.0, 0, 3, Shape("t4", 1, 2))
    1.0
    """
    # A generator of its own for every entry makes the factor independent of what else was asked before.
    of_kind = zlib.crc32(shape.kind.encode())
    rng = np.random.default_rng(
        [seed, 0x746F6C64, job, of_kind, shape.num_nodes, shape.num_devices]
    )
    return math.exp(deviation * float(rng.standard_normal()))


class JobViews:
    """Makes the `JobView`s: what a policy is told about simulated jobs, which may differ from the truth."""

    def __init__(self, settings: Settings, cluster: ClusterSpec):
        self._settings = settings
        self._all_sizes = every_size(device_kinds(cluster))
        self._few_sizes = shapes(cluster)
        self._cluster, self._is_limited = cluster, some_limited(cluster)
        self._spread: dict[tuple, tuple[Shape, ...]] = {}
        self._experience = Experience()

    def learn(self, ended: Iterable[TrackedJob]) -> None:
        """Have views of jobs to come tell what these jobs had used when they ended."""
        for job in ended:
            used_s = math.fsum(job.device_s.values())
            self._experience.add(EndedJob(*_kind_of(job), used_s))

    def view(
        self,
        job: TrackedJob,
        active: Sequence[TrackedJob],
        now_s: float,
        tenant_received_s: Mapping[str, float],
    ) -> JobView:
        """Return what a policy is told about a job; `active` are all unfinished jobs."""
        settings, work = self._settings, job.work
        adaptive = work.spec.mode == "adaptive"
        sizes = self._few_sizes if adaptive else self._all_sizes
        if self._is_limited and needs_of(work.spec):
            sizes = self._with_spread(work.spec, sizes)
        goodput = work.goodput(sizes)
        error: dict[Shape, float] = {}
        # An adaptive job that has not run offers 1, which is no estimate and so not wrong.
        if settings.told_noise and not (adaptive and work.largest_profiled == 0):
            goodput = self._with_errors(job, goodput)
            if settings.declared_errors:
                error = dict.fromkeys(goodput, settings.told_noise)
        restart_s = settings.told_restart_of(work.application)
        if settings.learned_restarts:
            restart_s = estimated_restart_s(restart_s, job.restart.took_s)
        restoring = job.restart.left_s > 0 and job.running
        has_history = settings.work_left == "history"
        guess = self._experience.guess(*_kind_of(job)) if has_history else None
        return JobView(
            spec=work.spec,
            allocation=job.allocation,
            goodput=goodput,
            goodput_error=error,
            submitted_s=job.trace.submit_s,
            since_s=job.since_s,
            paused_s=job.intervals[-1].end_s if job.intervals and not job.running else None,
            restoring_until_s=now_s + job.restart.left_s if restoring else None,
            num_restarts=job.restart.count,
            restart_s=restart_s,
            received_s=dict(job.device_s),
            fraction_received_s=dict(job.kind_s),
            largest_profiled=work.largest_profiled,
            remaining=work.remaining() if self._tells_work(job) else None,
            work_guess=guess,
            rigid_shape_hint=job.trace.num_devices,
            shared_goodput=_shared(job, goodput, active) if settings.sharing else {},
            tenant_received_s=tenant_received_s,
        )

    def _tells_work(self, job: TrackedJob) -> bool:
        """Whether policies are told how much work the job has left."""
        told, work = self._settings.work_left, job.work
        # Without it a deadline means nothing to a scheduler.
        is_due = work.spec.deadline_s is not None
        return told == "told" or is_due or (told == "published" and work.tells_work)

    def _with_spread(self, spec: JobSpec, sizes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """Return the shapes, and those over more nodes that a job's needs ask for; always the same tuple."""
        key = len(sizes), size_limits(spec), spec.kinds, needs_of(spec)
        if key not in self._spread:
            self._spread[key] = tuple(sorted({*sizes, *own_shapes(self._cluster, spec)}))
        return self._spread[key]

    def _with_errors(self, job: TrackedJob, goodput: Mapping[Shape, float]) -> dict[Shape, float]:
        settings, factors = self._settings, job.told_factors
        for shape in goodput:
            if shape not in factors:
                factors[shape] = told_factor(settings.told_noise, settings.seed, job.index, shape)
        return {shape: rate * factors[shape] for shape, rate in goodput.items()}

    def newcomer(
        self,
        truth: Truth,
        trace: TraceJob,
        index: int,
        kinds: Iterable[str],
        now_s: float,
        tenant_received_s: Mapping[str, float],
    ) -> JobView:
        """Return the `JobView` of a hypothetical new job; an adaptive one has run a minute on each kind."""
        work = truth.job(trace, self._settings, index)
        before = work.save()
        for kind in dict.fromkeys(kinds):
            if work.spec.mode == "adaptive" and (
                work.spec.kinds is None or kind in work.spec.kinds
            ):
                work.place(kind, (1,))
                work.advance(NEWCOMER_S)
                work.restore(before)
        view = self.view(TrackedJob(trace, work, index), [], now_s, tenant_received_s)
        return replace(view, submitted_s=now_s)


def _kind_of(job: TrackedJob) -> tuple[str, str, int]:
    """Return what a scheduler may know jobs by that are alike: script, owner, and devices asked for."""
    spec = job.work.spec
    return job.work.application, spec.tenant, spec.num_devices or spec.max_devices


def _shared(
    job: TrackedJob, goodput: Mapping[Shape, float], active: Sequence[TrackedJob]
) -> dict[tuple[str, Shape], float]:
    """Return a job's goodput on devices shared with each other job of its size, if it was measured."""
    size = job.work.spec.num_devices
    table = {}
    for other in active:
        if other is not job and other.work.spec.num_devices == size:
            for shape, alone in goodput.items():
                beside = job.work.beside(other.work, shape.kind)
                if beside is not None:
                    table[other.id, shape] = alone * beside
    return table
