"""Converts the state to what people and programs see of it."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxgoodput.cluster.service.record import faults
from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.record.state import JobEntry, State, counted_until
from jaxgoodput.cluster.service.wire import (
    AllocationShown,
    ClusterShown,
    FaultShown,
    JobShown,
    NodeShown,
)
from jaxgoodput.specs import Hints
from jaxgoodput.text import compact, seconds

OTHERS = "(another tenant's)"


def job(
    caller: Caller, state: State, entry: JobEntry, now_s: float, *, whole: bool = False
) -> JobShown:
    """Return a job as its user sees it; `whole` adds its earlier devices, and nodes kept apart from it."""
    spec, devices = entry.spec, entry.allocation.devices
    reported = faults.of_job(state.faults, spec.id, now_s) if whole else {}
    return JobShown(
        id=spec.id,
        tenant=spec.tenant,
        phase=entry.phase,
        reason=entry.reason,
        command=entry.submission.command,
        workdir=entry.submission.workdir,
        min_devices=spec.num_devices or spec.min_devices,
        max_devices=spec.num_devices or spec.max_devices,
        devices=devices,
        home=entry.home,
        generation=entry.allocation.generation,
        num_devices=entry.allocation.num_devices,
        submitted_s=entry.submitted_s,
        started_s=entry.started_s,
        finished_s=entry.finished_s,
        num_changes=entry.num_changes,
        device_s=math.fsum(counted_until(now_s, entry, state.kind_of).received_s.values()),
        code=entry.code,
        hints=entry.hints,
        past=entry.past if whole else (),
        apart=_faults(caller, state, reported),
        kinds=spec.kinds,
        preferred_kinds=spec.preferred_kinds,
        cpus_per_device=spec.cpus_per_device,
        memory_gib_per_device=spec.memory_gib_per_device,
    )


class JobPage(NamedTuple):
    """Some of a caller's jobs, oldest first."""

    jobs: list[JobEntry]
    num_older: int
    next_before: int | None
    """Where the next page continues; None if there are no older jobs."""


def newest(caller: Caller, state: State, active: bool, most: int, before: int) -> JobPage:
    """Return the caller's newest jobs that were submitted before a position of the journal, `most` at most.

    `active`: only jobs that have not ended.
    """
    found = [
        entry
        for entry in state.jobs.values()
        if entry.seq < before and caller.sees(entry.spec.tenant) and not (active and entry.is_over)
    ]
    shown, num_older = found[-most:], max(len(found) - most, 0)
    return JobPage(shown, num_older, shown[0].seq if num_older else None)


def allocation(entry: JobEntry) -> AllocationShown:
    """Return the devices that a job holds."""
    return AllocationShown(
        job=entry.spec.id,
        phase=entry.phase,
        generation=entry.allocation.generation,
        devices=entry.allocation.devices,
    )


def name_for(caller: Caller, state: State, job: str) -> str:
    """Return a job's name, or a placeholder if the job belongs to a tenant that the caller may not see."""
    entry = state.jobs.get(job)
    return job if entry is None or caller.sees(entry.spec.tenant) else OTHERS


def state_in_words(state: str, why: str) -> str:
    """Return a node's state, with the reason if it is not up.

    >>> state_in_words("down", "no heartbeat")
    'down (no heartbeat)'
    """
    return f"{state} ({why})" if why and state != "up" else state


def with_faults(state: str, reported: Iterable[FaultShown], now_s: float) -> str:
    """Return the state of a node in words, followed by what jobs reported of it."""
    return "; ".join((state, *(fault_in_words(one, now_s) for one in reported)))


def node_faults(caller: Caller, state: State, now_s: float) -> dict[str, tuple[FaultShown, ...]]:
    """Return, by node, the reports of jobs that are in force."""
    found: dict[str, tuple[FaultShown, ...]] = {}
    for one in _faults(caller, state, faults.in_force(state.faults, now_s)):
        found[one.node] = (*found.get(one.node, ()), one)
    return found


def _faults(
    caller: Caller, state: State, found: Mapping[tuple[str, str], faults.NodeFault]
) -> tuple[FaultShown, ...]:
    return tuple(
        FaultShown(
            node=node,
            job=name_for(caller, state, job),
            fault=one.fault,
            why=one.why,
            slow_ratio=one.slow_ratio,
            at_s=one.at_s,
            until_s=one.until_s,
            all_until_s=one.all_until_s,
        )
        for (node, job), one in found.items()
    )


class AmountsLeft(NamedTuple):
    """CPUs and GiB of memory of a node that no job uses; None: jobs are never short of them."""

    cpus: float | None
    memory_gib: float | None


def amounts_left(state: State) -> dict[str, AmountsLeft]:
    """Return, by node, the CPUs and the memory that no job uses."""
    cpus, memory_gib = dict.fromkeys(state.nodes, 0.0), dict.fromkeys(state.nodes, 0.0)
    for entry in state.active.values():
        for name, local in entry.allocation.devices.items():
            cpus[name] += entry.spec.cpus_per_device * len(local)
            memory_gib[name] += entry.spec.memory_gib_per_device * len(local)

    def left(has: float | None, used: float) -> float | None:
        return None if has is None else max(round(has - used, 3), 0.0)

    return {
        name: AmountsLeft(
            left(entry.node.cpus, cpus[name]), left(entry.node.memory_gib, memory_gib[name])
        )
        for name, entry in state.nodes.items()
    }


def left_in_words(cpus: float | None, memory_gib: float | None) -> list[str]:
    """Return what is left of a node's CPUs and memory, in words; [] if neither is limited.

    >>> left_in_words(12.0, None)
    ['12 CPUs left']
    """
    parts = [
        f"{left:g} {unit}"
        for left, unit in ((cpus, "CPUs"), (memory_gib, "GiB of memory"))
        if left is not None
    ]
    return [f"{' and '.join(parts)} left"] if parts else []


def fault_in_words(fault: FaultShown, now_s: float) -> str:
    """Return what a job reported of a node, and for how much longer the node is kept apart from whom.

    >>> fault_in_words(FaultShown(node="n0", job="a", fault="slow", why="...", slow_ratio=5.1, at_s=0.0,
    ...     until_s=300.0, all_until_s=None), 60.0)
    'slow (5.1 times the median) by a, kept apart from it for 4 min 00 s'
    """
    ratio = "" if fault.slow_ratio is None else f" ({fault.slow_ratio:.3g} times the median)"
    whom, until_s = "it", fault.until_s
    if fault.all_until_s is not None and fault.all_until_s > now_s:
        whom, until_s = "all jobs", fault.all_until_s
    return f"{fault.fault}{ratio} by {fault.job}, kept apart from {whom} for {seconds(until_s - now_s)}"


def progress(hints: Hints | None) -> str:
    """Return how far a job is: a percentage if it knows its total, else its base steps.

    >>> progress(None)
    '-'
    """
    if hints is None:
        return "-"
    if hints.total:
        return f"{100 * min(hints.progress / hints.total, 1):.0f} %"
    return compact(hints.progress)


def cluster(
    caller: Caller, state: State, now_s: float, silent_s: Callable[[str], float]
) -> ClusterShown:
    """Return all nodes and the jobs that hold their devices; jobs of other tenants appear as one."""
    jobs: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in state.nodes}
    for id_, entry in state.jobs.items():
        shown = name_for(caller, state, id_)
        for name, local in entry.allocation.devices.items():
            jobs[name][shown] = tuple(sorted((*jobs[name].get(shown, ()), *local)))
    reported = node_faults(caller, state, now_s)
    left = amounts_left(state)
    nodes = tuple(
        NodeShown(
            node=entry.node,
            jobs=jobs[name],
            silent_s=silent_s(name),
            why=entry.why,
            faults=reported.get(name, ()),
            cpus_left=left[name].cpus,
            memory_gib_left=left[name].memory_gib,
        )
        for name, entry in state.nodes.items()
    )
    return ClusterShown(now_s=now_s, nodes=nodes)
