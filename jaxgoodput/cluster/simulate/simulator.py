"""A cluster in simulated time: discrete events around the same decisions that the service makes.

Jobs advance as the truth about their applications says; the scheduler sees `JobView`s and answers with a
plan, exactly as in the real service. With `Settings.round_s` time goes in rounds (Pollux's and Sia's
simulators: every job advances a round, then the policy is asked); without, in events: arrivals, ends,
failures and first measurements, kept apart by the settings' two gaps.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.costs import cost
from jaxgoodput.cluster.scheduler.fair_share import deserved, faded
from jaxgoodput.cluster.scheduler.limits import subtrees
from jaxgoodput.cluster.scheduler.policy import JobView, Plan, Policy
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.restart_estimate import estimated_restart_s
from jaxgoodput.cluster.scheduler.shapes import capacity, shapes
from jaxgoodput.cluster.simulate.conditions.faults import FaultScript
from jaxgoodput.cluster.simulate.conditions.inputs import fed
from jaxgoodput.cluster.simulate.conditions.restarts import (
    Change,
    RestartCosts,
    SharedStorage,
    change_of,
)
from jaxgoodput.cluster.simulate.conditions.told import told_factor
from jaxgoodput.cluster.simulate.job import SimulatedJob, Truth, every_size, packed
from jaxgoodput.cluster.simulate.records import Interval, JobRecord, Result, TenantRecord
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import Allocation, ClusterSpec, Node, Shape, Tenant

EPSILON_S = 1e-6  # events closer than this happen at once
NEWCOMER_S = 60.0  # what a job that is only asked about has run on each kind of device
STALLED_S = 24 * 3600.0  # nothing runs and nothing happens for so long: it never will


class StalledError(RuntimeError):
    """Jobs wait, nothing runs, and nothing will ever change."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a simulation is, for a progress bar."""

    now_s: float
    num_done: int
    num_jobs: int


@dataclass
class _Entry:
    """A job in the simulation, and what the scheduler has measured about it."""

    trace: TraceJob
    job: SimulatedJob
    allocation: Allocation = field(default_factory=Allocation)
    kind: str = ""
    index: int = 0  # in the workload
    restoring_s: float = 0.0  # still to pass before it works again
    takes_s: float | None = None  # all of the restart that it is in
    took_s: list[float] = field(default_factory=list)  # what those behind it took
    factors: dict[Shape, float] = field(default_factory=dict)  # what its table is wrong by
    after_storage_s: float = 0.0  # of that, what comes after its checkpoint has been read
    last_shape: Shape | None = None
    had: set[Shape] = field(default_factory=set)  # shapes that its program was compiled for
    since_s: float | None = None
    start_s: float | None = None
    finish_s: float | None = None
    restarts: int = 0
    received: dict[str, float] = field(default_factory=dict)
    fraction: dict[str, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    measured_s: float = math.inf  # when its new size will have been measured
    saved: Any = None  # the last checkpoint, where work can be lost
    contention: float = 0.0  # integral of the number of unfinished jobs over its stay
    crashes: int = 0
    crash_ahead_s: Iterator[float] = field(default_factory=lambda: iter(()))
    crash_in_s: float = math.inf  # seconds of its own work
    cancel_s: float = math.inf  # when its user gives up
    cancelled: bool = False
    out_of_money: bool = False

    @property
    def running(self) -> bool:
        return bool(self.allocation.devices) and self.finish_s is None


def simulate(
    jobs: Sequence[TraceJob],
    cluster: ClusterSpec,
    policy: Policy,
    truth: Truth,
    *,
    settings: Settings | None = None,
    name: str = "",
    clock: Clock | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Run a workload to its end and say what happened to every job.

    `name` is what the result calls the policy; `clock` times the decisions. Raises ValueError where
    the truth does not know a job, and Stalled where the policy leaves jobs waiting although
    nothing will ever change.
    """
    settings = Settings() if settings is None else settings
    world = _World(
        jobs, cluster, policy, truth, settings, SystemClock() if clock is None else clock
    )
    if settings.round_s is not None and settings.decide_at_start:
        world.decide()
    while world.waiting:
        if settings.round_s is not None:
            world.advance(settings.round_s)
            world.decide()
        else:
            world.next_event()
        if on_progress is not None:
            done = len(world.entries) - len(world.waiting)
            on_progress(Progress(now_s=world.now_s, num_done=done, num_jobs=len(world.entries)))
    records = tuple(world.record(entry) for entry in world.entries)
    return Result(
        policy=name or type(policy).__name__,
        jobs=records,
        decision_s=tuple(world.decision_s),
        num_failures=world.num_failures,
        tenants=world.tenants(records),
    )


@dataclass(frozen=True, kw_only=True)
class SimulatedDecision:
    """One decision of a simulation: what the policy was asked, and the plan."""

    jobs: tuple[JobView, ...]
    cluster: ClusterSpec
    """As it was then, with the nodes that were down."""
    now_s: float
    plan: Plan
    applications: Mapping[str, str]
    """What each job runs."""
    submitted_s: Mapping[str, float]
    """Of all jobs of the workload, in its order; those that were not there had not come, or had left."""


def decision_at(
    jobs: Sequence[TraceJob],
    cluster: ClusterSpec,
    policy: Policy,
    truth: Truth,
    at_s: float,
    *,
    settings: Settings | None = None,
    added: TraceJob | None = None,
) -> tuple[SimulatedDecision, JobView | None]:
    """The last decision that was taken up to a moment, and `added` as a job that came then would look.

    That job has run a minute on one device of each kind, so that its table is known. Raises ValueError where
    nothing was decided by then, or all was over.
    """
    settings = Settings() if settings is None else settings
    world = _World(jobs, cluster, policy, truth, settings, SystemClock())
    if settings.round_s is not None and settings.decide_at_start:
        world.decide()
    found = world.last
    while world.waiting and world.now_s <= at_s:
        if settings.round_s is not None:
            world.advance(settings.round_s)
            world.decide()
        else:
            world.next_event()
        if world.last is not None and world.last.now_s <= at_s:
            found = world.last
    if not world.waiting and world.now_s < at_s:
        raise ValueError(
            f"all {len(world.entries)} jobs were done by {world.now_s:,.0f} s. Name an earlier time."
        )
    if found is None:
        first = min((trace.submit_s for trace in jobs), default=math.inf)
        raise ValueError(
            f"nothing was decided up to {at_s:,.0f} s; the first job comes at {first:,.0f} s. Name a "
            "later time."
        )
    return found, None if added is None else world.newcomer(added, found.now_s)


class _World:
    """The state of one simulation."""

    def __init__(self, jobs, cluster, policy, truth, settings, clock):
        self.settings: Settings = settings
        self.entries = [
            _Entry(trace, truth.job(trace, settings, index), index=index)
            for index, trace in enumerate(jobs)
        ]
        self.waiting = list(self.entries)  # not done, in the order of the workload
        self.now_s = 0.0
        self.decision_s: list[float] = []
        self.num_failures = 0
        self.last: SimulatedDecision | None = None
        self._policy: Policy = policy
        self._truth: Truth = truth
        self._clock: Clock = clock
        self._cluster: ClusterSpec = cluster
        self._down_until: dict[str, float] = {}
        self._kinds = {node.name: node.kind for node in cluster.nodes}
        self._nodes = {node.name: node for node in cluster.nodes}
        self._costs = RestartCosts() if settings.costs is None else settings.costs
        storage = self._costs.storage
        self._traffic = None if storage is None else SharedStorage(storage.bytes_per_s)
        self._all_sizes = every_size(_kinds(cluster))
        self._few_sizes = shapes(cluster)
        self._last_solve_s = -math.inf
        self._next_solve_s = math.inf  # when the last plan wants to be looked at again
        self._wanted = True  # an event asks for a decision
        self._applications = {e.trace.id: e.job.application for e in self.entries}
        self._submitted_s = {e.trace.id: e.trace.submit_s for e in self.entries}
        self._next_change_s = 0.0
        self._had_s: dict[str, float] = {}  # device-seconds of late by tenant
        self._deserved_s: dict[str, float] = {}  # in total
        rng = np.random.default_rng([settings.seed, 0x6661696C])
        self._rng = rng
        self._fails_at = {node.name: self._lifetime() for node in cluster.nodes}
        self._script: FaultScript | None = None
        checkpoints = [] if settings.failures is None else [settings.failures.checkpoint_s]
        if settings.faults is not None:
            script = FaultScript(settings.faults, cluster.nodes, settings.seed)
            checkpoints += [settings.faults.checkpoint_s] if settings.faults.lose_work else []
            for index, entry in enumerate(self.entries):
                entry.crash_ahead_s = script.crashes(index)
                entry.crash_in_s = next(entry.crash_ahead_s, math.inf)
                entry.cancel_s = entry.trace.submit_s + script.cancelled_after_s(index)
            self._script = script
        self._checkpoint_s = min(checkpoints, default=math.inf)

    # Time.

    def advance(self, seconds: float) -> None:
        """Let time pass for everybody."""
        speeds = self._speeds()
        active = [e for e in self.waiting if e.trace.submit_s < self.now_s + seconds]
        if self._cluster.tenants:
            self._count_for_tenants(active, seconds)
        for entry in active:
            begin = max(entry.trace.submit_s, self.now_s)
            used = seconds
            if entry.running:
                used = self._work(entry, seconds, speeds.get(entry.trace.id, 1.0))
            if entry.finish_s is None:
                entry.contention += len(active) * (self.now_s + seconds - begin)
            else:
                entry.contention += len(active) * used
        self.now_s += seconds
        if any(entry.finish_s is not None for entry in active):
            self.waiting = [e for e in self.waiting if e.finish_s is None]
            self._wanted = True

    def _count_for_tenants(self, active: Sequence[_Entry], seconds: float) -> None:
        """What the tenants have, and what they deserve, while so much time passes."""
        have = dict.fromkeys((e.job.spec.tenant for e in active), 0.0)
        for entry in active:
            have[entry.job.spec.tenant] += entry.allocation.num_devices if entry.running else 0
        self._had_s = faded(self._had_s, have, seconds, self.settings.usage_half_life_s)
        devices = float(sum(capacity(self._present()).values()))
        for name, its in deserved(self._cluster, have, devices).items():
            self._deserved_s[name] = self._deserved_s.get(name, 0.0) + its * seconds

    def _work(self, entry: _Entry, seconds: float, speed: float) -> float:
        used, left = 0.0, seconds
        while True:
            delay = min(entry.restoring_s, left)
            entry.restoring_s -= delay
            used += delay
            if entry.takes_s is not None and entry.restoring_s <= 0.0:
                entry.took_s.append(entry.takes_s)
                entry.takes_s = None
            if not left > delay:
                break
            left -= delay
            worked = float(entry.job.advance(min(left, entry.crash_in_s), speed))
            used += worked
            crashed = worked >= entry.crash_in_s and not entry.job.done
            entry.crash_in_s -= worked
            if not crashed:
                break
            left -= worked
            self._crash(entry)
        devices, kind = entry.allocation.num_devices, entry.kind
        entry.received[kind] = entry.received.get(kind, 0.0) + used * devices
        entry.fraction[kind] = entry.fraction.get(kind, 0.0) + used
        if entry.job.done:
            entry.finish_s = self.now_s + used
            self._close(entry, entry.finish_s)
        return used

    def _crash(self, entry: _Entry) -> None:
        """It starts again where it is, from its last checkpoint."""
        entry.crashes += 1
        entry.crash_in_s = next(entry.crash_ahead_s)
        entry.job.restore(entry.saved[1])
        entry.restoring_s = entry.takes_s = self._restart_s(entry, "resume")

    def _speeds(self) -> dict[str, float]:
        """Job id -> its speed relative to what its tables or model say, where others are in its way."""
        speeds: dict[str, float] = {}
        if self.settings.interference:
            wide = [e for e in self.waiting if e.running and e.allocation.num_nodes > 1]
            guests = Counter(node for e in wide for node in e.allocation.devices)
            for entry in wide:
                if any(guests[node] > 1 for node in entry.allocation.devices):
                    speeds[entry.trace.id] = 1.0 - self.settings.interference
        if self.settings.sharing:
            groups: dict[str, list[_Entry]] = {}
            for entry in self.waiting:
                if entry.running and entry.allocation.share_group is not None:
                    groups.setdefault(entry.allocation.share_group, []).append(entry)
            for group in groups.values():
                for entry in group:
                    for other in group:
                        if other is not entry:
                            beside = entry.job.beside(other.job, entry.kind)
                            # Two that do not fit beside each other take turns.
                            before = speeds.get(entry.trace.id, 1.0)
                            speeds[entry.trace.id] = before * (beside or 1.0 / len(group))
        if self._script is not None:
            for entry in self.waiting:
                left = self._script.speed(entry.allocation.devices) if entry.running else 1.0
                if left < 1.0:
                    speeds[entry.trace.id] = left * speeds.get(entry.trace.id, 1.0)
        if self.settings.inputs is not None:
            running = [e for e in self.waiting if e.running]
            places = [(e.trace.id, e.job.application, e.allocation) for e in running]
            feeds = fed(self.settings.inputs, self._nodes, places)
            for entry in running:
                if entry.trace.id in feeds:
                    most = feeds[entry.trace.id] / entry.job.samples_per_s()
                    speeds[entry.trace.id] = min(speeds.get(entry.trace.id, 1.0), most)
        return speeds

    def next_event(self) -> None:
        """Go to the next event, and decide where one asks for it or the largest gap is over."""
        future = [e.trace.submit_s for e in self.waiting if e.trace.submit_s > self.now_s]
        measured = [e.measured_s for e in self.waiting if e.running]
        until = min([max(self._decision_s(), self.now_s), self._next_fault_s(), *future, *measured])
        span = until - self.now_s
        speeds = self._speeds()
        for entry in self.waiting:
            if entry.running and entry.restoring_s < span:
                left = span - entry.restoring_s
                stop = entry.job.next_stop(left, speeds.get(entry.trace.id, 1.0))
                if stop is not None:
                    # Never a step of nothing: time must pass.
                    span = min(span, max(entry.restoring_s + stop, EPSILON_S))
        before_s = self.now_s
        self.advance(span)
        for entry in self.waiting:
            # A sum of floats may pass the moment of an arrival without ever being equal to it.
            arrived = before_s < entry.trace.submit_s <= self.now_s
            if arrived or entry.measured_s <= self.now_s:
                self._wanted = True
                entry.measured_s = math.inf
        self._befall()
        if self.now_s >= self._decision_s() - EPSILON_S:
            self.decide()

    def _decision_s(self) -> float:
        """When the policy is asked next: soon where an event wants it, else as the last plan says."""
        return self._last_solve_s + self.settings.min_gap_s if self._wanted else self._next_solve_s

    # Decisions.

    def decide(self) -> None:
        """Ask the policy and act on its plan."""
        if self.settings.round_s is not None:
            self._befall()
        active = [e for e in self.waiting if e.trace.submit_s <= self.now_s]
        self._last_solve_s, self._wanted = self.now_s, False
        self._next_solve_s = math.inf
        if not active:
            return
        views = [self._view(entry, active) for entry in active]
        cluster = self._present()
        begun = self._clock.now()
        # The line that the service calls, too.
        plan = reconcile(
            views,
            cluster,
            self._policy,
            self.now_s,
            min_gap_s=self.settings.min_gap_s,
            max_gap_s=self.settings.max_gap_s,
        )
        self.decision_s.append(self._clock.now() - begun)
        self.last = SimulatedDecision(
            jobs=tuple(views),
            cluster=cluster,
            now_s=self.now_s,
            plan=plan,
            applications=self._applications,
            submitted_s=self._submitted_s,
        )
        self._next_solve_s = plan.next_solve_s
        for entry in active:
            self._place(entry, plan.allocations[entry.trace.id])
        self._share_storage()
        self._stop_who_has_spent_all()
        future = any(e.trace.submit_s > self.now_s for e in self.waiting)
        if any(e.running for e in active) or future or self._down():
            self._next_change_s = self.now_s + STALLED_S
        elif self.now_s > self._next_change_s:
            raise StalledError(
                f"{len(active)} jobs wait and nothing runs, at {self.now_s:.0f} s and for "
                f"{STALLED_S / 3600:.0f} hours: the policy will never start "
                f"{', '.join(e.trace.id for e in active[:5])}. Are they larger than the cluster?"
            )

    def _view(self, entry: _Entry, active: Sequence[_Entry]) -> JobView:
        job = entry.job
        few = job.spec.mode == "adaptive"
        restoring = entry.restoring_s > 0 and entry.running
        goodput = job.goodput(self._few_sizes if few else self._all_sizes)
        error: dict[Shape, float] = {}
        if self.settings.told_noise and not (few and job.largest_profiled == 0):  # 1 is no estimate
            goodput = self._as_told(entry, goodput)
            if self.settings.declared_errors:
                error = dict.fromkeys(goodput, self.settings.told_noise)
        restart_s = self.settings.told_restart_of(job.application)
        if self.settings.learned_restarts:
            restart_s = estimated_restart_s(restart_s, entry.took_s)
        return JobView(
            spec=job.spec,
            allocation=entry.allocation,
            goodput=goodput,
            goodput_error=error,
            submitted_s=entry.trace.submit_s,
            since_s=entry.since_s,
            restoring_until_s=self.now_s + entry.restoring_s if restoring else None,
            num_restarts=entry.restarts,
            restart_s=restart_s,
            received_s=dict(entry.received),
            fraction_received_s=dict(entry.fraction),
            largest_profiled=job.largest_profiled,
            remaining=job.remaining(),
            rigid_shape_hint=entry.trace.num_devices,
            shared_goodput=self._shared(entry, goodput, active) if self.settings.sharing else {},
            tenant_received_s=self._had_s,
        )

    def _as_told(self, entry: _Entry, goodput: Mapping[Shape, float]) -> dict[Shape, float]:
        """Its table with what is wrong with it."""
        settings, factors = self.settings, entry.factors
        for shape in goodput:
            if shape not in factors:
                factors[shape] = told_factor(settings.told_noise, settings.seed, entry.index, shape)
        return {shape: rate * factors[shape] for shape, rate in goodput.items()}

    def newcomer(self, trace: TraceJob, now_s: float) -> JobView:
        """A job that comes now, after a minute on one device of each kind that it can use."""
        job = self._truth.job(trace, self.settings, len(self.entries))
        before = job.save()
        for kind in dict.fromkeys(self._kinds.values()):
            if job.spec.mode == "adaptive" and (job.spec.kinds is None or kind in job.spec.kinds):
                job.place(kind, (1,))
                job.advance(NEWCOMER_S)
                job.restore(before)
        view = self._view(_Entry(trace, job, index=len(self.entries)), [])
        return replace(view, submitted_s=now_s)

    def _shared(
        self, entry: _Entry, goodput: Mapping[Shape, float], active: Sequence[_Entry]
    ) -> dict[tuple[str, Shape], float]:
        """What it would do beside each other job of its size; pairs that were not measured are left out."""
        size = entry.job.spec.num_devices
        table = {}
        for other in active:
            if other is entry or other.job.spec.num_devices != size:
                continue
            for shape, alone in goodput.items():
                beside = entry.job.beside(other.job, shape.kind)
                if beside is not None:
                    table[other.trace.id, shape] = alone * beside
        return table

    def _place(self, entry: _Entry, allocation: Allocation) -> None:
        """Give a job other devices, if they are others."""
        if dict(allocation.devices) == dict(entry.allocation.devices):
            entry.allocation = allocation  # its generation or its share group may be another
            return
        self._close(entry, self.now_s)
        entry.allocation = allocation
        entry.measured_s = math.inf
        if self._traffic is not None:
            self._traffic.leave(entry.trace.id, self.now_s)
        running = entry.since_s is not None
        if not allocation.devices:
            entry.since_s, entry.restoring_s, entry.takes_s = None, 0.0, None
            return
        entry.kind = self._kinds[next(iter(allocation.devices))]
        entry.restarts += entry.start_s is not None
        entry.start_s = self.now_s if entry.start_s is None else entry.start_s
        entry.since_s = self.now_s
        self._restart(entry, running)
        if allocation.num_devices > entry.job.largest_profiled:
            entry.measured_s = self.now_s + entry.restoring_s + self.settings.observe_s
        if self._checkpoint_s < math.inf:
            entry.saved = self.now_s, entry.job.save()
        entry.job.place(entry.kind, tuple(map(len, allocation.devices.values())))

    def _restart(self, entry: _Entry, running: bool) -> None:
        """What the change to its new devices costs; `running`: it held others until now."""
        shape = Shape(entry.kind, entry.allocation.num_nodes, entry.allocation.num_devices)
        change = change_of(entry.last_shape, running, shape)
        entry.restoring_s = entry.takes_s = self._restart_s(entry, change, shape not in entry.had)
        entry.last_shape = shape
        entry.had.add(shape)
        if self._traffic is not None:
            size = self._costs.bytes(change, entry.job.application)
            self._traffic.join(entry.trace.id, size, self.now_s)
            entry.after_storage_s = entry.restoring_s

    def _restart_s(self, entry: _Entry, change: Change, new_shape: bool = False) -> float:
        application = entry.job.application
        restart_s = self.settings.restart_of(application)
        return self._costs.seconds(change, application, restart_s, new_shape)

    def _share_storage(self) -> None:
        """Those whose checkpoints are on their way wait for one another."""
        if self._traffic is None:
            return
        left_s = self._traffic.left_s(self.now_s)
        for entry in self.waiting:
            if entry.trace.id in left_s:
                entry.restoring_s = left_s[entry.trace.id] + entry.after_storage_s
                entry.takes_s = self.now_s - (entry.since_s or 0.0) + entry.restoring_s
                if entry.measured_s < math.inf:
                    entry.measured_s = self.now_s + entry.restoring_s + self.settings.observe_s

    def _close(self, entry: _Entry, end_s: float) -> None:
        if entry.since_s is not None and entry.allocation.devices:
            interval = Interval(
                start_s=entry.since_s,
                end_s=end_s,
                kind=entry.kind,
                devices=entry.allocation.devices,
            )
            entry.intervals.append(interval)

    # Faults.

    def _lifetime(self) -> float:
        if self.settings.failures is None:
            return math.inf
        return self.now_s + float(self._rng.exponential(self.settings.failures.mean_between_s))

    def _next_fault_s(self) -> float:
        soonest = math.inf
        if self.settings.failures is not None:
            soonest = min([*self._fails_at.values(), *self._down_until.values()])
        if self._script is not None:
            soonest = min([soonest, self._script.next_s, *(e.cancel_s for e in self.waiting)])
        return soonest

    def _befall(self) -> None:
        """All that has gone wrong, or has come back, up to now."""
        for entry in self.waiting:
            if entry.running and self._checkpoint_s < math.inf:
                if self.now_s - entry.saved[0] >= self._checkpoint_s:
                    entry.saved = self.now_s, entry.job.save()
        self._fail_and_repair()
        if self._script is None:
            return
        before = self._script.down
        failed = self._script.pass_to(self.now_s)
        self.num_failures += len(failed)
        for name in sorted(failed):
            self._lose(name)
        self._wanted |= bool(failed) or self._script.down != before
        if any(entry.cancel_s <= self.now_s for entry in self.waiting):
            self._cancel()

    def _lose(self, node: str) -> None:
        """Who runs there falls back to the last checkpoint, without devices."""
        for entry in self.waiting:
            if node in entry.allocation.devices:
                entry.job.restore(entry.saved[1])
                self._place(entry, Allocation(generation=entry.allocation.generation + 1))

    def _cancel(self) -> None:
        """The users whose patience is over take their jobs away."""
        for entry in self.waiting:
            if entry.cancel_s <= self.now_s:
                self._take_away(entry)
        self.waiting = [e for e in self.waiting if e.finish_s is None]
        self._wanted = True

    def _stop_who_has_spent_all(self) -> None:
        """They would wait for ever."""
        prices = self._cluster.price_per_hour
        for entry in self.waiting:
            budget = entry.job.spec.budget
            if budget is not None and prices and cost(entry.received, prices) >= budget:
                entry.out_of_money = entry.trace.submit_s <= self.now_s
                if entry.out_of_money:
                    self._take_away(entry)
        if any(entry.finish_s is not None for entry in self.waiting):
            self.waiting = [e for e in self.waiting if e.finish_s is None]
            self._wanted = True

    def _take_away(self, entry: _Entry) -> None:
        entry.cancelled, entry.finish_s = True, self.now_s
        if self._traffic is not None:
            self._traffic.leave(entry.trace.id, self.now_s)
        self._close(entry, self.now_s)

    def _fail_and_repair(self) -> None:
        failures = self.settings.failures
        if failures is None:
            return
        for name, until in list(self._down_until.items()):
            if until <= self.now_s:
                del self._down_until[name]
                self._fails_at[name] = self._lifetime()
                self._wanted = True
        for name, at in self._fails_at.items():
            if at <= self.now_s and name not in self._down_until:
                self.num_failures += 1
                self._wanted = True
                self._down_until[name] = self.now_s + failures.repair_s
                self._fails_at[name] = math.inf
                self._lose(name)

    def _down(self) -> frozenset[str]:
        """The nodes that are broken."""
        scripted = frozenset() if self._script is None else self._script.down
        return scripted.union(self._down_until)

    def _present(self) -> ClusterSpec:
        """The cluster as it is now."""
        down = self._down()
        if not down:
            return self._cluster
        nodes = tuple(
            replace(node, state="down") if node.name in down else node
            for node in self._cluster.nodes
        )
        return replace(self._cluster, nodes=nodes)

    # The end.

    def record(self, entry: _Entry) -> JobRecord:
        """What happened to a finished job."""
        assert entry.finish_s is not None  # only once all are done
        prices = self._cluster.price_per_hour
        return JobRecord(
            id=entry.trace.id,
            application=entry.job.application,
            submit_s=entry.trace.submit_s,
            start_s=entry.finish_s if entry.start_s is None else entry.start_s,
            finish_s=entry.finish_s,
            restarts=entry.restarts,
            device_s=dict(entry.received),
            intervals=tuple(entry.intervals),
            rho=None if entry.cancelled else self._rho(entry),
            crashes=entry.crashes,
            cancelled=entry.cancelled,
            tenant=entry.job.spec.tenant,
            cost=cost(entry.received, prices) if prices else None,
            out_of_money=entry.out_of_money,
            deadline_s=entry.job.spec.deadline_s,
        )

    def tenants(self, records: Sequence[JobRecord]) -> tuple[TenantRecord, ...]:
        """What every tenant had, with all below it; others that have jobs come last."""
        if not self._cluster.tenants:
            return ()
        below = subtrees(self._cluster)
        others = sorted({job.tenant for job in records} - set(below))
        found = []
        for tenant in (*self._cluster.tenants, *(Tenant(name=name) for name in others)):
            its = below.get(tenant.name, frozenset({tenant.name}))
            jobs = [job for job in records if job.tenant in its]
            jct_s = [job.jct_s for job in jobs if not job.cancelled]
            priced = [job.cost for job in jobs if job.cost is not None]
            found.append(
                TenantRecord(
                    name=tenant.name,
                    parent=tenant.parent,
                    num_jobs=len(jobs),
                    average_jct_s=float(np.mean(jct_s)) if jct_s else math.nan,
                    device_s=sum(sum(job.device_s.values()) for job in jobs),
                    deserved_s=sum(self._deserved_s.get(name, 0.0) for name in sorted(its)),
                    cost=sum(priced) if self._cluster.price_per_hour else None,
                )
            )
        return tuple(found)

    def _rho(self, entry: _Entry) -> float | None:
        """Finish-time fairness, as `records` defines it."""
        stay = (entry.finish_s or 0.0) - entry.trace.submit_s
        contention = max(entry.contention / stay, 1.0) if stay > 0 else 1.0
        total = sum(node.num_devices for node in self._cluster.nodes)
        share = max(1, math.floor(total / contention))
        share = min(share, entry.job.spec.max_devices)
        speed, weight = 0.0, 0.0
        for kind, nodes, each in _kinds(self._cluster):
            devices = min(share, nodes * each)
            alone = entry.job.isolated_s(kind, packed(devices, each))
            if math.isfinite(alone) and alone > 0:
                speed += nodes * each / alone
            weight += nodes * each
        return float(stay * speed / weight) if speed else None


def _kinds(cluster: ClusterSpec) -> list[tuple[str, int, int]]:
    """(kind, nodes, devices of the largest node) of every kind."""
    found: dict[str, list[int]] = {}
    for node in cluster.nodes:
        found.setdefault(node.kind, []).append(node.num_devices)
    return [(kind, len(sizes), max(sizes)) for kind, sizes in found.items()]


def uniform_cluster(kind: str, num_nodes: int, num_devices: int) -> ClusterSpec:
    """So many equal nodes of one kind."""
    return ClusterSpec(
        nodes=tuple(
            Node(name=f"{kind}-{i:03d}", kind=kind, num_devices=num_devices)
            for i in range(num_nodes)
        )
    )
