"""The schedulers that others are compared with: Tiresias, Optimus, earliest deadline first, a static one.

The first two and the last follow the versions that Pollux's artifact simulates (Qiao et al., OSDI 2021),
including their placement: a job goes to the emptiest nodes, the first of equals. They therefore answer
with devices, and use the generic placement nowhere.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.specs import Allocation, ClusterSpec, Shape


class _Free:
    """The devices that nobody has, node by node."""

    def __init__(self, cluster: ClusterSpec):
        self._left = {
            node.name: set(range(node.num_devices)) - set(node.withheld)
            for node in cluster.nodes
            if node.state != "down"
        }
        self._open = {node.name: node.state == "up" for node in cluster.nodes}

    @property
    def num_devices(self) -> int:
        """Devices that may be given out."""
        return sum(len(left) for name, left in self._left.items() if self._open[name])

    def holds(self, allocation: Allocation) -> bool:
        """Whether exactly these devices are free."""
        return all(
            node in self._left and self._left[node].issuperset(local)
            for node, local in allocation.devices.items()
        )

    def take(self, allocation: Allocation) -> None:
        """Give these devices out."""
        for node, local in allocation.devices.items():
            self._left[node] -= set(local)

    def emptiest(self, num_devices: int, generation: int) -> Allocation:
        """So many devices from the emptiest nodes, one node after the other."""
        chosen: dict[str, tuple[int, ...]] = {}
        while num_devices:
            name = max((n for n in self._left if self._open[n]), key=lambda n: len(self._left[n]))
            local = tuple(sorted(self._left[name])[:num_devices])
            self._left[name] -= set(local)
            chosen[name] = local
            num_devices -= len(local)
        return Allocation(devices=chosen, generation=generation)


def _one_kind(cluster: ClusterSpec, policy: str) -> str | None:
    kinds = sorted({node.kind for node in cluster.nodes if node.state == "up"})
    if len(kinds) > 1:
        raise ValueError(
            f"{policy} knows one kind of device only, but the cluster has {', '.join(kinds)}; "
            "use a heterogeneity-aware policy, or a cluster of one kind."
        )
    if cluster.quota:
        raise ValueError(
            f"{policy} knows no quotas, but the cluster has them for {', '.join(sorted(cluster.quota))}; "
            "use another policy, or leave the quotas out."
        )
    if cluster.tenants:
        raise ValueError(
            f"{policy} knows no tenants, but the cluster has {', '.join(t.name for t in cluster.tenants)}; "
            "use another policy, or leave the tenants out."
        )
    return kinds[0] if kinds else None


def _arrival(jobs: Sequence[JobView]) -> list[JobView]:
    return sorted(jobs, key=lambda job: job.submitted_s)


@dataclass(frozen=True, kw_only=True)
class Tiresias:
    """Two first-in-first-out queues; a job that has had enough service falls into the second one.

    Jobs run on exactly the devices that their users asked for, in queue order, where they fit
    beside those before them; the others are preempted. Gu et al., NSDI 2019, with one threshold and
    no promotion.
    """

    threshold_device_s: float = 16 * 3600.0

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Allocations by queue order."""
        _one_kind(cluster, "Tiresias")
        served = {job.spec.id: sum(job.received_s.values()) for job in jobs}
        queues: tuple[list[JobView], list[JobView]] = ([], [])
        for job in _arrival(jobs):
            queues[served[job.spec.id] >= self.threshold_device_s].append(job)
        return _in_order(
            (
                (job, wanted, f"queue {level}: {wanted} devices")
                for level, queue in enumerate(queues)
                for job in queue
                for wanted in (job.spec.num_devices or job.spec.min_devices,)
            ),
            cluster,
        )


def _in_order(queue: Iterable[tuple[JobView, int, str]], cluster: ClusterSpec) -> Decision:
    """Who fits beside those before it, of jobs with the devices that they want, and why."""
    free = _Free(cluster)
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
    """The devices that its user would pick, within what it can have."""
    wanted = job.spec.num_devices or job.rigid_shape_hint or job.spec.min_devices
    return max(job.spec.min_devices, min(wanted, job.spec.max_devices))


def _place(
    running: Sequence[tuple[JobView, int]], free: _Free, reasons: Mapping[str, str]
) -> Decision:
    """Jobs keep the devices that they have where the number is the same; then one after the other."""
    allocations: dict[str, Allocation] = {}
    for job, size in running:
        if job.allocation.num_devices == size and free.holds(job.allocation):
            allocations[job.spec.id] = job.allocation
            free.take(job.allocation)
    for job, size in running:
        if job.spec.id not in allocations:
            allocations[job.spec.id] = free.emptiest(size, job.allocation.generation + 1)
    return Decision(allocations=allocations, reasons=reasons)


@dataclass(frozen=True, kw_only=True)
class Optimus:
    """One device each, then one by one to the job whose remaining time falls the most.

    Jobs keep their batch; `JobView.goodput` must be their speed on every number of devices and
    `JobView.remaining` what is left of their work. Peng et al., EuroSys 2018.
    """

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Allocations by marginal gain.

        Raises ValueError for a job that does not declare its remaining work.
        """
        kind = _one_kind(cluster, "Optimus")
        free = _Free(cluster)
        budget = free.num_devices
        sizes: dict[str, int] = {}
        speeds = {job.spec.id: _by_size(job, kind) for job in jobs}
        left: dict[str, float] = {}
        heap: list[tuple[float, int, str]] = []
        for order, job in enumerate(jobs):
            name = job.spec.id
            if job.remaining is None:
                raise ValueError(
                    f"Optimus needs the remaining work of job {name!r}, which does not declare it; "
                    "declare it or choose another policy."
                )
            left[name] = job.remaining
            least = job.spec.min_devices
            if budget >= least and least in speeds[name]:
                sizes[name] = least
                budget -= least
                heap.append((-_gain(speeds[name], least, left[name]), order, name))
        heapq.heapify(heap)
        limit = {job.spec.id: job.spec.max_devices for job in jobs}
        while budget and heap:
            gain, order, name = heapq.heappop(heap)
            if gain >= 0:
                break
            sizes[name] += 1
            budget -= 1
            if sizes[name] < limit[name]:
                heapq.heappush(heap, (-_gain(speeds[name], sizes[name], left[name]), order, name))
        reasons = {
            job.spec.id: f"{sizes[job.spec.id]} devices by marginal gain"
            if job.spec.id in sizes
            else "no device left for its first"
            for job in jobs
        }
        chosen = [(job, sizes[job.spec.id]) for job in jobs if job.spec.id in sizes]
        return _place(sorted(chosen, key=lambda pair: pair[1]), free, reasons)


def _by_size(job: JobView, kind: str | None) -> dict[int, float]:
    """The speed by number of devices, on as few nodes as hold them."""
    shapes: dict[int, Shape] = {}
    for shape, speed in job.goodput.items():
        known = shapes.get(shape.num_devices, shape)
        if shape.kind == kind and speed > 0 and shape.num_nodes <= known.num_nodes:
            shapes[shape.num_devices] = shape
    return {size: job.goodput[shape] for size, shape in shapes.items()}


def _gain(speeds: Mapping[int, float], size: int, remaining: float) -> float:
    """Seconds that one device more would save."""
    if size + 1 not in speeds:
        return 0.0
    return (1.0 / speeds[size] - 1.0 / speeds[size + 1]) * remaining


@dataclass(frozen=True, kw_only=True)
class EarliestDeadline:
    """The earliest deadline first, on the devices that users asked for; later ones are preempted.

    Jobs without a deadline come last, in order of arrival. Who does not fit beside those before it is passed
    over. Liu and Layland, 1973, for devices instead of one processor.
    """

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Allocations by deadline."""
        _one_kind(cluster, "EarliestDeadline")
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

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Allocations by arrival."""
        free = _Free(cluster)
        allocations, reasons = {}, {}
        for job in jobs:
            if job.allocation.num_devices and free.holds(job.allocation):
                allocations[job.spec.id] = job.allocation
                free.take(job.allocation)
                reasons[job.spec.id] = "keeps what it has"
        _one_kind(cluster, "Static")
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
                blocked = True  # nobody overtakes the first one that waits
        return Decision(allocations=allocations, reasons=reasons)
