"""How much jobs are slowed down: by other jobs on a node or device, by slow nodes, and by their input."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxgoodput.cluster.simulate.conditions.breakdowns import Breakdowns
from jaxgoodput.cluster.simulate.conditions.inputs import Inputs, fed
from jaxgoodput.cluster.simulate.jobs.tracked import TrackedJob
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import Node


def relative_speeds(
    running: Sequence[TrackedJob],
    settings: Settings,
    nodes: Mapping[str, Node],
    breakdowns: Breakdowns,
) -> dict[str, float]:
    """Return the speed of running jobs, by id, relative to an undisturbed job; for absent jobs it is 1."""
    speeds: dict[str, float] = {}
    if settings.interference:
        _interfere(speeds, running, settings.interference)
    if settings.sharing:
        _share_devices(speeds, running)
    slow = breakdowns.speeds({job.id: job.allocation.devices for job in running})
    for job_id, left in slow.items():
        speeds[job_id] = left * speeds.get(job_id, 1.0)
    if settings.inputs is not None:
        # Last, because waiting for input is a limit on the speed and not a factor of it.
        _feed(speeds, running, settings.inputs, nodes)
    return speeds


def _interfere(speeds: dict[str, float], running: Sequence[TrackedJob], share: float) -> None:
    """Reduce, in `speeds`, the speeds of jobs on several nodes that share a node with another such job."""
    wide = [job for job in running if job.allocation.num_nodes > 1]
    guests = Counter(node for job in wide for node in job.allocation.devices)
    for job in wide:
        if any(guests[node] > 1 for node in job.allocation.devices):
            speeds[job.id] = 1.0 - share


def _feed(
    speeds: dict[str, float],
    running: Sequence[TrackedJob],
    inputs: Inputs,
    nodes: Mapping[str, Node],
) -> None:
    """Reduce, in `speeds`, the speeds of jobs that wait for their samples to be prepared."""
    places = [(job.id, job.work.application, job.allocation) for job in running]
    rates = fed(inputs, nodes, places)
    for job in running:
        if job.id in rates:
            most = rates[job.id] / job.work.samples_per_s()
            speeds[job.id] = min(speeds.get(job.id, 1.0), most)


def _share_devices(speeds: dict[str, float], running: Sequence[TrackedJob]) -> None:
    """Reduce, in `speeds`, the speeds of jobs that run on the same devices as another job."""
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
