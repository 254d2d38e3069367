"""A cluster in simulated time: discrete events around the same decisions that the service makes.

Jobs advance at the speed that the truth about their applications gives. The policy sees `JobView`s and
answers with a plan, as in the real service. With `Settings.round_s`, time advances in rounds, as in the
simulators of Pollux and Sia: every job advances by a round, then the policy is asked. Otherwise time
advances from event to event: arrivals, ends, failures and first measurements, with the minimum and maximum
gap between decisions that the settings give.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import JobView, Plan, Policy
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.simulate.accounts import TenantAccounts
from jaxgoodput.cluster.simulate.conditions.breakdowns import Breakdowns
from jaxgoodput.cluster.simulate.conditions.speeds import relative_speeds
from jaxgoodput.cluster.simulate.conditions.told import JobViews
from jaxgoodput.cluster.simulate.jobs.job import Truth
from jaxgoodput.cluster.simulate.jobs.tracked import RestartModel, TrackedJob, spent
from jaxgoodput.cluster.simulate.jobs.workload import Workload
from jaxgoodput.cluster.simulate.records import Result
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import Allocation, ClusterSpec, Node

EPSILON_S = 1e-6  # events closer than this happen at once
STALLED_S = 24 * 3600.0  # if nothing runs and nothing happens for this long, nothing ever will


class StalledError(RuntimeError):
    """The simulation is stuck: jobs wait, nothing runs, and nothing will ever change."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a simulation, for a progress bar."""

    now_s: float
    num_done: int
    num_jobs: int


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
    """Run a workload to its end, and return what happened to every job.

    `name` is the policy's name in the result (default: its class). `clock` measures how long decisions take.
    Raises ValueError if the truth does not know a job, and StalledError if the policy leaves jobs waiting
    and nothing will ever change.
    """
    settings = Settings() if settings is None else settings
    clock = SystemClock() if clock is None else clock
    world = _World(jobs, cluster, policy, truth, settings, clock)
    for _ in world.steps():
        if on_progress is not None:
            done = len(jobs) - world.workload.num_left
            on_progress(Progress(now_s=world.now_s, num_done=done, num_jobs=len(jobs)))
    return world.result(name or type(policy).__name__)


@dataclass(frozen=True, kw_only=True)
class SimulatedDecision:
    """One decision of a simulation: the policy's input, and its plan."""

    jobs: tuple[JobView, ...]
    cluster: ClusterSpec
    """The cluster at that time, with the nodes marked that were down."""
    now_s: float
    plan: Plan
    applications: Mapping[str, str]
    """Application of each job of the workload, by id."""
    submitted_s: Mapping[str, float]
    """Submission time of each job of the workload, by id. Some had not arrived, others were done."""


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
    """Return the last decision up to a time, and the view of a hypothetical job `added` that arrives then.

    Use this to ask why a policy decided as it did, or what it would do with one more job. The hypothetical
    job has run for a minute on one device of each kind, so that its table is known. Raises ValueError if no
    decision was made by then, or if all jobs were done.
    """
    settings = Settings() if settings is None else settings
    world = _World(jobs, cluster, policy, truth, settings, SystemClock())
    found = _last_decision(world, at_s)
    if not world.workload.num_left and world.now_s < at_s:
        raise ValueError(
            f"all {len(jobs)} jobs were done by {world.now_s:,.0f} s. Name an earlier time."
        )
    if found is None:
        first = min((trace.submit_s for trace in jobs), default=math.inf)
        raise ValueError(
            f"no decision was made up to {at_s:,.0f} s; the first job arrives at {first:,.0f} s. Name a "
            "later time."
        )
    return found, None if added is None else world.newcomer(added, found.now_s)


def _last_decision(world: "_World", at_s: float) -> SimulatedDecision | None:
    """Run a world until a time; return its last decision up to then."""
    found: SimulatedDecision | None = None
    for _ in world.steps():
        if world.last is not None and world.last.now_s <= at_s:
            found = world.last
        if world.now_s > at_s:
            break
    return found


class _World:
    """One simulation in progress: its time, its jobs, its nodes, and the plan in force."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        cluster: ClusterSpec,
        policy: Policy,
        truth: Truth,
        settings: Settings,
        clock: Clock,
    ):
        self.workload = Workload(
            [
                TrackedJob(trace, truth.job(trace, settings, index), index)
                for index, trace in enumerate(jobs)
            ]
        )
        self.now_s = 0.0
        self.last: SimulatedDecision | None = None
        self._cluster, self._policy, self._truth = cluster, policy, truth
        self._settings, self._clock = settings, clock
        self._nodes = {node.name: node for node in cluster.nodes}
        self._breakdowns = Breakdowns(settings, cluster)
        self._restarts = RestartModel(settings)
        self._tenants = TenantAccounts(cluster, settings.usage_half_life_s)
        self._views = JobViews(settings, cluster)
        self._decision_s: list[float] = []  # how long each decision took
        self._wanted = True  # whether an event asks for a decision
        self._last_solve_s = -math.inf
        self._next_solve_s = math.inf  # when the last plan asks to be reviewed
        self._news_s = 0.0  # when jobs, their tables or nodes were last other than before
        self._stalled_s = 0.0  # when to give up if nothing runs until then
        self._settled_until_s = -math.inf  # until when no plan is needed as long as all jobs run
        if (script := self._breakdowns.script) is not None:
            for job in self.workload.jobs:
                job.crash_ahead_s = script.crashes(job.index)
                job.crash_in_s = next(job.crash_ahead_s, math.inf)
                job.cancel_s = job.trace.submit_s + script.cancelled_after_s(job.index)

    def steps(self) -> Iterator[None]:
        """Run the simulation to its end; yields after each advance of the simulated time."""
        settings = self._settings
        if settings.round_s is not None and settings.decide_at_start:
            self._befall()
            self._decide()
            yield
        while self.workload.num_left:
            if settings.round_s is None:
                self._next_event()
            else:
                self._advance(settings.round_s, self._speeds())
                self._befall()
                self._decide()
            yield

    # Time.

    def _speeds(self) -> dict[str, float]:
        running = [job for job in self.workload.active if job.running]
        return relative_speeds(running, self._settings, self._nodes, self._breakdowns)

    def _advance(self, seconds: float, speeds: Mapping[str, float]) -> None:
        # Jobs that arrive within this time count from their arrival, but get devices only at a decision.
        self.workload.admit(self.now_s + seconds, inclusive=False)
        active = [job for job in self.workload.active if job.trace.submit_s < self.now_s + seconds]
        if self._cluster.tenants:
            self._tenants.add(active, self._breakdowns.present(), seconds)
        for job in active:
            stay = self.now_s + seconds - max(job.trace.submit_s, self.now_s)
            if job.running:
                speed = speeds.get(job.id, 1.0)
                used = job.advance(seconds, speed, self.now_s, self._restarts)
                stay = stay if job.finish_s is None else used
            job.contention += len(active) * stay
        self.now_s += seconds
        self._forget_finished()

    def _forget_finished(self) -> None:
        ended = self.workload.forget_finished()
        self._views.learn(ended)
        self._wanted |= bool(ended)

    def _next_event(self) -> None:
        """Advance to the next event, and ask the policy for a plan if one is due then.

        After an event that calls for one, a plan is due `min_gap_s` after the last plan. Otherwise it is due
        when the last plan said, at most `max_gap_s` after it.
        """
        speeds, before_s = self._speeds(), self.now_s
        self._advance(self._span(speeds), speeds)
        self.workload.admit(self.now_s, inclusive=True)
        for job in self.workload.active:
            # Compared with the time before, because sums of floats may step over the moment of an arrival.
            has_arrived = before_s < job.trace.submit_s <= self.now_s
            if has_arrived or job.measured_s <= self.now_s:
                self._wanted = True
                job.measured_s = math.inf
        self._befall()
        if self.now_s >= self._due_s() - EPSILON_S:
            self._decide()

    def _span(self, speeds: Mapping[str, float]) -> float:
        """Return the seconds until the next event, such as a decision, an arrival, a failure or an end."""
        moments = [max(self._due_s(), self.now_s), self._breakdowns.next_s]
        if (next_s := self.workload.next_submit_s) is not None:
            moments.append(next_s)
        for job in self.workload.active:
            moments.append(job.cancel_s)
            if job.running:
                moments.append(job.measured_s)
        span = min(moments) - self.now_s
        for job in self.workload.active:
            if job.running and job.restart.left_s < span:
                left = span - job.restart.left_s
                stop = job.work.next_stop(left, speeds.get(job.id, 1.0))
                if stop is not None:
                    # Never a step of zero seconds: time must pass.
                    span = min(span, max(job.restart.left_s + stop, EPSILON_S))
        return span

    def _due_s(self) -> float:
        """Return the time when the policy is asked next: soon after an event, otherwise as the plan says."""
        if self._wanted:
            return self._last_solve_s + self._settings.min_gap_s
        return self._next_solve_s

    def _befall(self) -> None:
        """Write checkpoints, let nodes fail and be repaired, and cancel jobs, if their time has come."""
        for job in self.workload.active:
            if job.running and self.now_s - job.checkpoint[0] >= self._breakdowns.checkpoint_s:
                job.save(self.now_s)
        failed, has_changed = self._breakdowns.pass_to(self.now_s)
        self._wanted |= has_changed
        for node in failed:
            for job in self.workload.active:
                if node in job.allocation.devices:
                    job.work.restore(job.checkpoint[1])
                    self._place(job, Allocation(generation=job.allocation.generation + 1))
        for job in self.workload.active:
            if job.cancel_s <= self.now_s:
                self._cancel(job)
        self._forget_finished()

    def _cancel(self, job: TrackedJob) -> None:
        job.cancelled = True
        job.finish(self.now_s)
        self._restarts.leave(job, self.now_s)

    # Decisions.

    def _decide(self) -> None:
        """Ask the policy for a plan, and give jobs the devices that it says."""
        settings = self._settings
        self.workload.admit(self.now_s, inclusive=True)
        active = [job for job in self.workload.active if job.trace.submit_s <= self.now_s]
        if self.now_s < self._settled_until_s and all_run(active):
            self._wanted = False  # a job has ended, and no other one waits for its devices
            return
        self._last_solve_s, self._wanted = self.now_s, False
        self._next_solve_s = math.inf
        if not active:
            return
        had_s = self._tenants.had_s
        views = [self._views.view(job, active, self.now_s, had_s) for job in active]
        cluster = self._with_news(views, self._breakdowns.present())
        begun = self._clock.now()
        # The service makes the same call.
        plan = reconcile(
            views,
            cluster,
            self._policy,
            self.now_s,
            min_gap_s=settings.min_gap_s,
            max_gap_s=settings.max_gap_s,
        )
        self._decision_s.append(self._clock.now() - begun)
        self.last = SimulatedDecision(
            jobs=tuple(views),
            cluster=cluster,
            now_s=self.now_s,
            plan=plan,
            applications=self.workload.applications,
            submitted_s=self.workload.submitted_s,
        )
        for job in active:
            self._place(job, plan.allocations[job.id])
        self._next_solve_s, self._settled_until_s = plan.next_solve_s, -math.inf
        if settings.settled_gap_s is not None and self._is_settled(active, plan.next_solve_s):
            self._next_solve_s = self._settled_until_s = self.now_s + settings.settled_gap_s
        self._restarts.share_storage(self.workload.active, self.now_s)
        self._stop_without_money()
        self._raise_if_stalled(active)

    def _is_settled(self, active: Sequence[TrackedJob], next_s: float) -> bool:
        """Return whether nothing could be gained before the next event: all jobs run, at fixed sizes.

        A plan that asks to be reviewed early knows of a change to come, and budgets may run out meanwhile.
        """
        if next_s < self.now_s + self._settings.max_gap_s or self._cluster.price_per_hour:
            return False
        return all_run(active)

    def _with_news(self, views: Sequence[JobView], cluster: ClusterSpec) -> ClusterSpec:
        """Return the cluster with the time of the last news: other jobs, tables or nodes than before."""
        before = None if self.last is None else {v.spec.id: v.goodput for v in self.last.jobs}
        is_news = self.last is None or cluster.nodes != self.last.cluster.nodes
        if is_news or {view.spec.id: view.goodput for view in views} != before:
            self._news_s = self.now_s
        return replace(cluster, changed_s=self._news_s)

    def _place(self, job: TrackedJob, allocation: Allocation) -> None:
        kind = self._nodes[next(iter(allocation.devices))].kind if allocation.devices else ""
        if not job.place(allocation, kind, self.now_s, self._restarts):
            return
        if allocation.num_devices > job.work.largest_profiled:
            job.measured_s = self.now_s + job.restart.left_s + self._settings.observe_s
        if self._breakdowns.checkpoint_s < math.inf:
            job.save(self.now_s)
        job.work.place(kind, tuple(map(len, allocation.devices.values())))

    def _stop_without_money(self) -> None:
        """Cancel the jobs whose budget is used up, as they would wait for ever."""
        for job in self.workload.active:
            if job.trace.submit_s <= self.now_s and spent(job, self._cluster.price_per_hour):
                job.out_of_money = True
                self._cancel(job)
        self._forget_finished()

    def _raise_if_stalled(self, active: Sequence[TrackedJob]) -> None:
        future = self.workload.next_submit_s is not None
        if any(job.running for job in active) or future or self._breakdowns.down:
            self._stalled_s = self.now_s + STALLED_S
        elif self.now_s > self._stalled_s:
            raise StalledError(
                f"{len(active)} jobs wait and nothing runs, at {self.now_s:.0f} s and for "
                f"{STALLED_S / 3600:.0f} hours: the policy will never start "
                f"{', '.join(job.id for job in active[:5])}. Are they larger than the cluster?"
            )

    def newcomer(self, trace: TraceJob, now_s: float) -> JobView:
        """Return the `JobView` of a hypothetical job that is submitted now."""
        kinds = (node.kind for node in self._cluster.nodes)
        had_s = self._tenants.had_s
        return self._views.newcomer(
            self._truth, trace, len(self.workload.jobs), kinds, now_s, had_s
        )

    def result(self, name: str) -> Result:
        """Return the records of all jobs, once they are done, as the result of the policy `name`."""
        records = tuple(job.record(self._cluster) for job in self.workload.jobs)
        return Result(
            policy=name,
            jobs=records,
            decision_s=tuple(self._decision_s),
            num_failures=self._breakdowns.num_failures,
            tenants=self._tenants.records(records),
        )


def all_run(jobs: Sequence[TrackedJob]) -> bool:
    """Return whether all jobs run, and none may change its number of devices."""
    return all(job.running and job.work.spec.mode == "rigid" for job in jobs)


def uniform_cluster(kind: str, num_nodes: int, num_devices: int) -> ClusterSpec:
    """Return a cluster of `num_nodes` equal nodes with `num_devices` devices each."""
    return ClusterSpec(
        nodes=tuple(
            Node(name=f"{kind}-{i:03d}", kind=kind, num_devices=num_devices)
            for i in range(num_nodes)
        )
    )
