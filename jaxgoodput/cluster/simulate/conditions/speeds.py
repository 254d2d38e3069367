"""How much jobs slow each other down: on the network, on shared devices, on slow nodes, and by their input."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxgoodput.cluster.simulate.conditions.breakdowns import Breakdowns
from jaxgoodput.cluster.simulate.conditions.inputs import fed
from jaxgoodput.cluster.simulate.jobs.tracked import TrackedJob
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import Node


def relative_speeds(
    running: Sequence[TrackedJob],
    settings: Settings,
    nodes: Mapping[str, Node],
    breakdowns: Breakdowns,
) -> dict[str, float]:
    """Return the speed of running jobs by id, relative to the speed alone; jobs that are absent have 1."""
    speeds: dict[str, float] = {}
    if settings.interference:
        wide = [job for job in running if job.allocation.num_nodes > 1]
        guests = Counter(node for job in wide for node in job.allocation.devices)
        for job in wide:
            if any(guests[node] > 1 for node in job.allocation.devices):
                speeds[job.id] = 1.0 - settings.interference
    if settings.sharing:
        _share_devices(speeds, running)
    slow = breakdowns.speeds({job.id: job.allocation.devices for job in running})
    for job_id, left in slow.items():
        speeds[job_id] = left * speeds.get(job_id, 1.0)
    if settings.inputs is not None:
        places = [(job.id, job.work.application, job.allocation) for job in running]
        rates = fed(settings.inputs, nodes, places)
        for job in running:
            if job.id in rates:
                most = rates[job.id] / job.work.samples_per_s()
                speeds[job.id] = min(speeds.get(job.id, 1.0), most)
    return speeds


def _share_devices(speeds: dict[str, float], running: Sequence[TrackedJob]) -> None:
    """Slow down the jobs that share their devices with others."""
    groups: dict[str, list[TrackedJob]] = {}
    for job in running:
        if job.allocation.share_group is not None:
            groups.setdefault(job.allocation.share_group, []).append(job)
    for group in groups.values():
        for job in group:
            for other in group:
                if other is not job:
                    # Jobs that do not fit beside each other take turns.
                    beside = job.work.beside(other.work, job.kind) or 1.0 / len(group)
                    speeds[job.id] = speeds.get(job.id, 1.0) * beside
