"""The schedulers that others are compared with: Tiresias, Optimus, earliest deadline first, and a static one.

Sources: Tiresias (Gu et al., NSDI 2019), Optimus (Peng et al., EuroSys 2018) and the static scheduler follow
the versions that Pollux's artifact simulates (Qiao et al., OSDI 2021), including their placement: a job goes
to the emptiest nodes, the first of equal ones. So they answer with devices, without the generic placement.
Earliest deadline first (Liu and Layland, 1973) is here for devices instead of one processor.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxgoodput.cluster.scheduler.constraints import offered_devices, within
from jaxgoodput.cluster.scheduler.placement.amounts import needs_of, some_limited
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.work_left import USUAL_S
from jaxgoodput.specs import Allocation, ClusterSpec, Shape


class _FreeDevices:
    """The devices that no job holds, by node, while a baseline policy hands them out."""

    def __init__(self, cluster: ClusterSpec):
        self._left = offered_devices(cluster, draining=True)
        self._open = [node.name for node in cluster.nodes if node.state == "up"]

    @property
    def num_devices(self) -> int:
        """Number of devices that are still free."""
        return sum(len(self._left[name]) for name in self._open)

    def keep(self, allocation: Allocation) -> bool:
        """Take the devices of `allocation` if all are free; return whether they were."""
        if not within(allocation, self._left):
            return False
        for node, local in allocation.devices.items():
            self._left[node] -= set(local)
        return True

    def emptiest(self, num_devices: int, generation: int) -> Allocation:
        """Return a new allocation of `num_devices` free devices: always from the node with most free ones."""
        chosen: dict[str, tuple[int, ...]] = {}
        while num_devices:
            name = max(self._open, key=lambda n: len(self._left[n]))
            local = tuple(sorted(self._left[name])[:num_devices])
            self._left[name] -= set(local)
            chosen[name] = local
            num_devices -= len(local)
        return Allocation(devices=chosen, generation=generation)


def _one_kind(jobs: Sequence[JobView], cluster: ClusterSpec, policy: str) -> str | None:
    """Return the kind of all devices, None without nodes.

    Raises ValueError for what `policy` does not know: several kinds, quotas, tenants, and jobs that need CPUs
    or memory of nodes that may lack them.
    """
    kinds = sorted({node.kind for node in cluster.nodes if node.state == "up"})
    if len(kinds) > 1:
        raise ValueError(
            f"{policy} knows one kind of device only, but the cluster has {', '.join(kinds)}; "
            "use a heterogeneity-aware policy, or a cluster of one kind."
        )
    _require_no_needs(jobs, cluster, policy)
    tenants = [tenant.name for tenant in cluster.tenants]
    for what, names in (("quotas", sorted(cluster.quota)), ("tenants", tenants)):
        if names:
            raise ValueError(
                f"{policy} knows no {what}, but the cluster has {what} ({', '.join(names)}); use another "
                f"policy, or leave the {what} out."
            )
    return kinds[0] if kinds else None


def _require_no_needs(jobs: Sequence[JobView], cluster: ClusterSpec, policy: str) -> None:
    """Raise ValueError if a job needs CPUs or memory of nodes that may lack them."""
    needing = [view.spec.id for view in jobs if needs_of(view.spec)]
    if needing and some_limited(cluster):
        raise ValueError(
            f"{policy} knows devices only, but job {needing[0]!r} needs CPUs or memory, which the nodes may "
            "lack; use another policy, or leave these numbers out of the nodes."
        )


def _arrival(jobs: Sequence[JobView]) -> list[JobView]:
    return sorted(jobs, key=lambda job: job.submitted_s)


@dataclass(frozen=True, kw_only=True)
class Tiresias:
    """Two first-in-first-out queues; a job that has had enough service falls into the second one.

    Jobs run on exactly the devices that their users asked for, in queue order, if they fit beside the jobs
    before them. Other jobs are preempted. Gu et al., NSDI 2019, with one threshold and no promotion.
    """

    threshold_device_s: float = 16 * 3600.0
    knows_amounts: ClassVar[bool] = False

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return allocations: jobs get their devices in the order of Tiresias's queues."""
        _one_kind(jobs, cluster, "Tiresias")
        queue = []
        for job in _arrival(jobs):
            level = int(sum(job.received_s.values()) >= self.threshold_device_s)
            wanted = job.spec.num_devices or job.spec.min_devices
            queue.append((level, job, wanted, f"queue {level}: {wanted} devices"))
        queue.sort(key=lambda entry: entry[0])
        return _in_order((entry[1:] for entry in queue), cluster)


def _in_order(queue: Iterable[tuple[JobView, int, str]], cluster: ClusterSpec) -> Decision:
    """Run each job, with the devices that it wants, if it fits beside the jobs before it."""
    free = _FreeDevices(cluster)
    budget = free.num_devices
    running, reasons = [], {}
    for job, wanted, why in queue:
        reasons[job.spec.id] = why
        if wanted <= budget:
            budget -= wanted
            running.append((job, wanted))
        else:
            reasons[job.spec.id] += f" do not fit into the {budget} left by jobs before it"
    return _place(running, free, reasons)


def _as_asked(job: JobView) -> int:
    """Return the number of devices that the job's user would pick, between the job's least and most."""
    if job.spec.mode == "rigid" and job.spec.num_devices:
        return job.spec.num_devices
    wanted = job.spec.num_devices or job.rigid_shape_hint or job.spec.min_devices
    return max(job.spec.min_devices, min(wanted, job.spec.max_devices))


def _place(
    running: Sequence[tuple[JobView, int]], free: _FreeDevices, reasons: Mapping[str, str]
) -> Decision:
    """Let jobs keep their devices if the number stays the same; then place the others one after the other."""
    allocations: dict[str, Allocation] = {}
    for job, size in running:
        if job.allocation.num_devices == size and free.keep(job.allocation):
            allocations[job.spec.id] = job.allocation
    for job, size in running:
        if job.spec.id not in allocations:
            allocations[job.spec.id] = free.emptiest(size, job.allocation.generation + 1)
    return Decision(allocations=allocations, reasons=reasons)


@dataclass(frozen=True, kw_only=True)
class Optimus:
    """Give one device to each job, then one by one to the job whose remaining time falls most.

    Jobs keep their batch. `JobView.goodput` must be their speed on every number of devices and
    `JobView.remaining` the work left; a job that does not declare it gets its least number of devices and no
    more, because what another would save is unknown. Peng et al., EuroSys 2018.
    """

    knows_amounts: ClassVar[bool] = False

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return allocations: each further device goes to the job that saves most time by it."""
        kind = _one_kind(jobs, cluster, "Optimus")
        free = _FreeDevices(cluster)
        sizes = _sizes_by_gain(jobs, kind, free.num_devices)
        reasons = {job.spec.id: _reason(job, sizes.get(job.spec.id)) for job in jobs}
        chosen = [(job, sizes[job.spec.id]) for job in jobs if job.spec.id in sizes]
        return _place(sorted(chosen, key=lambda pair: pair[1]), free, reasons)


def _reason(job: JobView, size: int | None) -> str:
    """Return why Optimus gives a job so many devices, or none."""
    if size is None:
        return "no device left for its first"
    if job.remaining is None:
        return f"{size} devices, its least: it does not declare the work left"
    return f"{size} devices by marginal gain"


def _sizes_by_gain(jobs: Sequence[JobView], kind: str | None, budget: int) -> dict[str, int]:
    """Return the number of devices of each job that runs, by id: more go to jobs that save most time."""
    sizes: dict[str, int] = {}
    speeds = [_by_size(job, kind) for job in jobs]
    heap: list[tuple[float, int]] = []  # -seconds saved by one more device, index of the job

    def offer(index: int):
        job = jobs[index]
        gain = _gain(speeds[index], sizes[job.spec.id], job.remaining or 0.0)
        heapq.heappush(heap, (-gain, index))

    for index, job in enumerate(jobs):
        name, least = job.spec.id, job.spec.min_devices
        if budget >= least and least in speeds[index]:
            sizes[name] = least
            budget -= least
            offer(index)
    while budget and heap:
        gain, index = heapq.heappop(heap)
        if gain >= 0:
            break
        spec = jobs[index].spec
        sizes[spec.id] += 1
        budget -= 1
        if sizes[spec.id] < spec.max_devices:
            offer(index)
    return sizes


def _by_size(job: JobView, kind: str | None) -> dict[int, float]:
    """Return the job's speed by number of devices of a kind, each on as few nodes as its table has."""
    shapes: dict[int, Shape] = {}
    for shape, speed in job.goodput.items():
        known = shapes.get(shape.num_devices, shape)
        if shape.kind == kind and speed > 0 and shape.num_nodes <= known.num_nodes:
            shapes[shape.num_devices] = shape
    return {size: job.goodput[shape] for size, shape in shapes.items()}


def _gain(speeds: Mapping[int, float], size: int, remaining: float) -> float:
    """Return the seconds that a job of `size` devices would save with one more; 0 if its speed is unknown."""
    if size + 1 not in speeds:
        return 0.0
    return (1.0 / speeds[size] - 1.0 / speeds[size + 1]) * remaining


@dataclass(frozen=True, kw_only=True)
class EarliestDeadline:
    """Run the earliest deadline first, on the devices that users asked for, and preempt later ones.

    Jobs without a deadline come last, in order of arrival. A job that does not fit beside the jobs before it
    is passed over.
    """

    knows_amounts: ClassVar[bool] = False

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return allocations: jobs get devices in the order of their deadlines, the earliest first."""
        _one_kind(jobs, cluster, "EarliestDeadline")
        last = float("inf")
        queue = sorted(
            _arrival(jobs), key=lambda j: last if j.spec.deadline_s is None else j.spec.deadline_s
        )
        return _in_order(
            ((j, _as_asked(j), f"{_as_asked(j)} devices in order of deadlines") for j in queue),
            cluster,
        )


@dataclass(frozen=True, kw_only=True)
class Static:
    """First in, first out, on as many devices as the user would pick, until the job is done."""

    knows_amounts: ClassVar[bool] = False

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return allocations: jobs get devices in the order of arrival."""
        _one_kind(jobs, cluster, "Static")
        free = _FreeDevices(cluster)
        allocations, reasons = {}, {}
        for job in jobs:
            held = job.allocation.num_devices
            is_other = job.spec.mode == "rigid" and held != _as_asked(job)  # of an earlier policy
            if held and not is_other and free.keep(job.allocation):
                allocations[job.spec.id] = job.allocation
                reasons[job.spec.id] = "keeps what it has"
        blocked = False
        for job in _arrival(jobs):
            name = job.spec.id
            if name in allocations:
                continue
            wanted = _as_asked(job)
            if not blocked and wanted <= free.num_devices:
                allocations[name] = free.emptiest(wanted, job.allocation.generation + 1)
                reasons[name] = f"{wanted} devices as asked"
            else:
                reasons[name] = f"waits for {wanted} devices, {free.num_devices} are free"
                blocked = True  # no job overtakes the first one that waits
        return Decision(allocations=allocations, reasons=reasons)


@dataclass(frozen=True, kw_only=True)
class LeastRemaining:
    """Run the jobs that end soonest on the devices that their users asked for: an oracle, if told the work.

    Jobs are in the order of the device-seconds that they have left, or of the seconds if `by_time`; each runs
    if it fits beside the jobs before it, and others are preempted. On one device no order has a lower average
    completion time (Schrage, 1968). If a job's work is only guessed from jobs that have ended, its Gittins
    index decides (Gittins, 1979); if nothing is known of it, the service that it has had.
    """

    by_time: bool = False
    knows_amounts: ClassVar[bool] = False

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return allocations: jobs get their devices in the order of what they have left."""
        kind = _one_kind(jobs, cluster, "LeastRemaining")
        queue = []
        for job in _arrival(jobs):
            wanted = _as_asked(job)
            left_s = _left_s(job, _by_size(job, kind), wanted)
            if self.by_time:
                left_s /= wanted
            queue.append((left_s, job, wanted, f"{wanted} devices for about {left_s:.0f} s"))
        queue.sort(key=lambda entry: entry[0])
        return _in_order((entry[1:] for entry in queue), cluster)


def _left_s(job: JobView, speeds: Mapping[int, float], size: int) -> float:
    """Return the device-seconds that a job has left on its devices: told, guessed, or as much as it had."""
    if job.remaining is not None and job.is_measured and speeds.get(size):
        return job.remaining / speeds[size] * size
    had_s = math.fsum(job.received_s.values())
    if job.work_guess is not None:
        return 1.0 / job.work_guess.rate(had_s)
    return USUAL_S + had_s
