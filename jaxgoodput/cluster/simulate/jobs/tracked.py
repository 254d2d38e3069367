"""A job in a simulation: its devices, restarts, checkpoints and crashes, and what it has used so far."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.costs import cost
from jaxgoodput.cluster.simulate.conditions.restarts import (
    Change,
    RestartCosts,
    SharedStorage,
    change_of,
)
from jaxgoodput.cluster.simulate.jobs.job import SimulatedJob, packed
from jaxgoodput.cluster.simulate.records import Interval, JobRecord
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import Allocation, ClusterSpec, Shape


@dataclass
class RestartState:
    """The restarts of one job: the one in progress, and numbers about earlier ones."""

    left_s: float = 0.0
    """Seconds until the job works again; 0 = it is not restarting."""
    total_s: float | None = None
    """Seconds of the whole current restart; None = there is none."""
    after_storage_s: float = 0.0
    """Seconds of the current restart after the checkpoint has passed the storage."""
    took_s: list[float] = field(default_factory=list)
    """Seconds that each finished restart took."""
    count: int = 0
    """Changes of devices after the first start."""
    shape: Shape | None = None
    """The last shape."""
    compiled: set[Shape] = field(default_factory=set)
    """Shapes that the job's program has been compiled for."""

    def begin(self, seconds: float) -> None:
        """Begin a restart that takes `seconds`, in which the job makes no progress."""
        self.left_s = self.total_s = seconds

    def cancel(self) -> None:
        """End the current restart, because the job has lost its devices."""
        self.left_s, self.total_s = 0.0, None

    def wait(self, seconds: float) -> float:
        """Let `seconds` pass; return how many of them the restart took up."""
        used = min(self.left_s, seconds)
        self.left_s -= used
        if self.total_s is not None and self.left_s <= 0.0:
            self.took_s.append(self.total_s)
            self.total_s = None
        return used


class RestartModel:
    """Decides how long the restarts of a simulation take; owns the storage that restarting jobs share."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._costs = RestartCosts() if settings.costs is None else settings.costs
        storage = self._costs.storage
        self._traffic = None if storage is None else SharedStorage(storage.bytes_per_s)

    def seconds(self, job: "TrackedJob", change: Change, new_shape: bool = False) -> float:
        """Return the seconds that a change of devices takes the job, without moving its checkpoint."""
        application = job.work.application
        restart_s = self._settings.restart_of(application)
        return self._costs.seconds(change, application, restart_s, new_shape)

    def begin(self, job: "TrackedJob", was_running: bool, now_s: float) -> None:
        """Let a job begin its restart on the devices that it has just been given."""
        state = job.restart
        shape = Shape(job.kind, job.allocation.num_nodes, job.allocation.num_devices)
        change = change_of(state.shape, was_running, shape)
        state.begin(self.seconds(job, change, shape not in state.compiled))
        state.shape = shape
        state.compiled.add(shape)
        if self._traffic is not None:
            self._traffic.join(job.id, self._costs.bytes(change, job.work.application), now_s)
            state.after_storage_s = state.left_s

    def leave(self, job: "TrackedJob", now_s: float) -> None:
        """Let a job no longer move its checkpoint through the shared storage, if it still does."""
        if self._traffic is not None:
            self._traffic.leave(job.id, now_s)

    def share_storage(self, jobs: Sequence["TrackedJob"], now_s: float) -> None:
        """Update how long restarts that wait for the storage last, after jobs have joined or left it."""
        if self._traffic is None:
            return
        left_s = self._traffic.left_s(now_s)
        for job in jobs:
            if job.id in left_s:
                state = job.restart
                state.left_s = left_s[job.id] + state.after_storage_s
                # Counted from the start of the restart, so that the policy learns what it really took.
                state.total_s = now_s - (job.since_s or 0.0) + state.left_s
                if job.measured_s < math.inf:
                    job.measured_s = now_s + state.left_s + self._settings.observe_s


@dataclass(eq=False)
class TrackedJob:
    """A job of the workload, and all that the simulator knows about it."""

    trace: TraceJob
    work: SimulatedJob
    index: int
    """Line in the workload."""
    allocation: Allocation = field(default_factory=Allocation)
    kind: str = ""
    """Kind of the current devices."""
    restart: RestartState = field(default_factory=RestartState)
    since_s: float | None = None
    """When the job got its current devices; None = it has none."""
    start_s: float | None = None
    finish_s: float | None = None
    device_s: dict[str, float] = field(default_factory=dict)
    """Device-seconds so far, by kind."""
    kind_s: dict[str, float] = field(default_factory=dict)
    """Seconds on devices so far, by kind."""
    intervals: list[Interval] = field(default_factory=list)
    contention: float = 0.0
    """Integral of the number of unfinished jobs over the time since the submission."""
    measured_s: float = math.inf
    """When the job will have measured its new size."""
    told_factors: dict[Shape, float] = field(default_factory=dict)
    """Errors of what policies are told (see `conditions.told`)."""
    checkpoint: tuple[float, Any] = (0.0, None)
    """Time and content of the last checkpoint, if work can be lost."""
    crashes: int = 0
    crash_ahead_s: Iterator[float] = field(default_factory=lambda: iter(()))
    """Seconds of work before each further crash."""
    crash_in_s: float = math.inf
    """Seconds of work before the next crash."""
    cancel_s: float = math.inf
    """When the job's user cancels it."""
    cancelled: bool = False
    out_of_money: bool = False

    @property
    def id(self) -> str:
        """The job's id in the workload."""
        return self.trace.id

    @property
    def running(self) -> bool:
        """Whether the job has devices."""
        return bool(self.allocation.devices) and self.finish_s is None

    def advance(self, seconds: float, speed: float, now_s: float, restarts: RestartModel) -> float:
        """Restart, work and crash for at most `seconds`; return the seconds used, fewer if it finished."""
        # One pass per crash: the rest of a restart, then work until the time or the job ends, or it crashes.
        used, left = 0.0, seconds
        while True:
            delay = self.restart.wait(left)
            used += delay
            if not left > delay:
                break
            left -= delay
            worked = float(self.work.advance(min(left, self.crash_in_s), speed))
            used += worked
            crashed = worked >= self.crash_in_s and not self.work.done
            self.crash_in_s -= worked
            if not crashed:
                break
            left -= worked
            self.crashes += 1
            self.crash_in_s = next(self.crash_ahead_s)
            self.work.restore(self.checkpoint[1])
            self.restart.begin(restarts.seconds(self, "resume"))
        devices = self.allocation.num_devices
        self.device_s[self.kind] = self.device_s.get(self.kind, 0.0) + used * devices
        self.kind_s[self.kind] = self.kind_s.get(self.kind, 0.0) + used
        if self.work.done:
            self.finish(now_s + used)
        return used

    def place(
        self, allocation: Allocation, kind: str, now_s: float, restarts: RestartModel
    ) -> bool:
        """Give the job these devices, perhaps none; return whether it begins a restart on new ones."""
        if dict(allocation.devices) == dict(self.allocation.devices):
            self.allocation = allocation  # its generation or share group may differ
            return False
        self._close_interval(now_s)
        self.allocation = allocation
        self.measured_s = math.inf
        restarts.leave(self, now_s)
        was_running = self.since_s is not None
        if not allocation.devices:
            self.since_s = None
            self.restart.cancel()
            return False
        self.kind = kind
        self.restart.count += self.start_s is not None
        self.start_s = now_s if self.start_s is None else self.start_s
        self.since_s = now_s
        restarts.begin(self, was_running, now_s)
        return True

    def save(self, now_s: float) -> None:
        """Write a checkpoint of the simulated work, to which the job falls back if a node fails."""
        self.checkpoint = now_s, self.work.save()

    def finish(self, at_s: float) -> None:
        """Note that the job ended at the time `at_s`, and close its last interval on devices."""
        self.finish_s = at_s
        self._close_interval(at_s)

    def _close_interval(self, end_s: float) -> None:
        if self.since_s is not None and self.allocation.devices:
            devices = self.allocation.devices
            self.intervals.append(
                Interval(start_s=self.since_s, end_s=end_s, kind=self.kind, devices=devices)
            )

    def record(self, cluster: ClusterSpec) -> JobRecord:
        """Return what happened to the job, which must have finished, as a `JobRecord`."""
        assert self.finish_s is not None  # the simulation runs until all are done
        prices, spec = cluster.price_per_hour, self.work.spec
        return JobRecord(
            id=self.id,
            application=self.work.application,
            submit_s=self.trace.submit_s,
            start_s=self.finish_s if self.start_s is None else self.start_s,
            finish_s=self.finish_s,
            restarts=self.restart.count,
            device_s=dict(self.device_s),
            intervals=tuple(self.intervals),
            rho=None if self.cancelled else self._rho(cluster),
            crashes=self.crashes,
            cancelled=self.cancelled,
            tenant=spec.tenant,
            cost=cost(self.device_s, prices) if prices else None,
            out_of_money=self.out_of_money,
            deadline_s=spec.deadline_s,
        )

    def _rho(self, cluster: ClusterSpec) -> float | None:
        """Return the finish-time fairness, as `records` defines it."""
        stay = (self.finish_s or 0.0) - self.trace.submit_s
        contention = max(self.contention / stay, 1.0) if stay > 0 else 1.0
        total = sum(node.num_devices for node in cluster.nodes)
        share = min(max(1, math.floor(total / contention)), self.work.spec.max_devices)
        speed, weight = 0.0, 0.0
        for kind, nodes, each in device_kinds(cluster):
            alone = self.work.isolated_s(kind, packed(min(share, nodes * each), each))
            if math.isfinite(alone) and alone > 0:
                speed += nodes * each / alone
            weight += nodes * each
        return float(stay * speed / weight) if speed else None


def device_kinds(cluster: ClusterSpec) -> list[tuple[str, int, int]]:
    """Return (kind, number of nodes, devices of the largest node) for every kind of device."""
    found: dict[str, list[int]] = {}
    for node in cluster.nodes:
        found.setdefault(node.kind, []).append(node.num_devices)
    return [(kind, len(sizes), max(sizes)) for kind, sizes in found.items()]


def spent(job: TrackedJob, prices: Mapping[str, float]) -> bool:
    """Return whether a job has used up its budget."""
    budget = job.work.spec.budget
    return budget is not None and bool(prices) and cost(job.device_s, prices) >= budget
