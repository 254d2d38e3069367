"""The state as people and programs see it."""

from collections.abc import Callable

from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.record.state import JobEntry, State, received
from jaxgoodput.cluster.service.wire import AllocationShown, ClusterShown, JobShown, NodeShown

OTHERS = "(another tenant's)"


def job(state: State, entry: JobEntry, now_s: float, *, past: bool = False) -> JobShown:
    """A job; with `past` what it had before."""
    counted = received(entry, state.kind_of, now_s)
    spec = entry.spec
    return JobShown(
        id=spec.id,
        tenant=spec.tenant,
        phase=entry.phase,
        reason=entry.reason,
        command=entry.submission.command,
        workdir=entry.submission.workdir,
        min_devices=spec.num_devices or spec.min_devices,
        max_devices=spec.num_devices or spec.max_devices,
        devices=entry.allocation.devices,
        home=entry.home,
        generation=entry.allocation.generation,
        num_devices=entry.allocation.num_devices,
        submitted_s=entry.submitted_s,
        started_s=entry.started_s,
        finished_s=entry.finished_s,
        num_changes=entry.num_changes,
        device_s=sum(counted.received_s.values()),
        code=entry.code,
        hints=entry.hints,
        past=entry.past if past else (),
    )


def allocation(entry: JobEntry) -> AllocationShown:
    """What a job has."""
    return AllocationShown(
        job=entry.spec.id,
        phase=entry.phase,
        generation=entry.allocation.generation,
        devices=entry.allocation.devices,
    )


def name_for(caller: Caller, state: State, job: str) -> str:
    """The name of a job, where it is the caller's business."""
    entry = state.jobs.get(job)
    return job if entry is None or caller.sees(entry.spec.tenant) else OTHERS


def cluster(
    caller: Caller, state: State, now_s: float, silent_s: Callable[[str], float]
) -> ClusterShown:
    """All nodes, and who has their devices; those of other tenants together, without names."""
    jobs: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in state.nodes}
    for id_, entry in state.jobs.items():
        for name, local in entry.allocation.devices.items():
            shown = name_for(caller, state, id_)
            jobs[name][shown] = tuple(sorted((*jobs[name].get(shown, ()), *local)))
    found = tuple(
        NodeShown(
            node=entry.node,
            jobs=jobs[name],
            silent_s=silent_s(name),
            why=entry.why,
        )
        for name, entry in state.nodes.items()
    )
    return ClusterShown(now_s=now_s, nodes=found)
