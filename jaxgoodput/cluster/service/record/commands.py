"""The decision on each request, as a pure function: from the state to the events that happen and the answer.

A `CommandRefused` says why nothing happens. Random values and the time are arguments.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput.cluster.service.record import events, faults
from jaxgoodput.cluster.service.record.events import Event
from jaxgoodput.cluster.service.record.state import State, owners
from jaxgoodput.cluster.service.wire import (
    VERSION,
    Join,
    NodeReport,
    Receipt,
    Report,
    Submission,
)
from jaxgoodput.specs import Allocation, Hints

MOST_JOBS = 10_000  # that wait or run
MOST_OF_TENANT = 2000  # of these, submitted with a user's token for one tenant
MOST_LETTERS_OF_TENANT = 2**25  # total length of their commands


class CommandRefused(Exception):
    """A request that the service understands and does not carry out. The message says why."""

    def __init__(self, status: int, message: str, *, retry_s: float = 1.0):
        self.status = status
        """The HTTP status of the answer."""
        self.retry_s = retry_s
        """Seconds after which the request may be sent again, if the status is 429 (too many requests)."""
        super().__init__(message)


@dataclass(frozen=True)
class Outcome:
    """The result of a decision: the events that happen, and the answer to the caller."""

    events: tuple[Event, ...] = ()
    answer: Any = field(default_factory=Receipt)


@dataclass(frozen=True)
class Caller:
    """The sender of a request, as its token identifies it."""

    tenant: str
    role: str
    """"user" may act on the jobs of its tenant, "node" may do what agents do, "operator" everything."""

    def sees(self, tenant: str) -> bool:
        """Whether the caller may see the jobs of a tenant."""
        return self.role == "operator" or (self.role == "user" and self.tenant == tenant)


def check_owned(state: State, caller: Caller, job: str) -> None:
    """Check that the caller has a job of this name.

    Raises the same CommandRefused for a job that does not exist and for another tenant's job.
    """
    entry = state.jobs.get(job)
    if entry is None or not caller.sees(entry.spec.tenant):
        raise CommandRefused(
            404, f"you have no job {job[:80]!a}. `jaxgoodput status` lists your jobs."
        )


def of_tenant(caller: Caller, submission: Submission) -> Submission:
    """Return a submission under the caller's tenant. Raises CommandRefused if it names another tenant."""
    spec = submission.spec
    if caller.role != "user":
        return submission
    if spec.tenant not in ("default", caller.tenant):
        raise CommandRefused(
            403,
            f"the job says tenant {spec.tenant!r}, but this token belongs to tenant {caller.tenant!r}. Leave "
            "the tenant out, or use a token of that tenant.",
        )
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, tenant=caller.tenant))


def submit(state: State, caller: Caller, submission: Submission, secret: str) -> Outcome:
    """Accept a job, unless its name is taken, its tenant has too many jobs, or it can never run."""
    submission = of_tenant(caller, submission)
    spec = submission.spec
    known = state.jobs.get(spec.id)
    if known is not None and not (known.is_over and caller.sees(known.spec.tenant)):
        raise CommandRefused(
            409,
            f"a job named {spec.id!r} exists already. Give this one another name, or wait until that one has "
            "ended.",
        )
    if len(state.active) >= MOST_JOBS:
        raise CommandRefused(
            409,
            f"{MOST_JOBS} jobs are waiting or running, the most that are possible. Try again later.",
        )
    if caller.role == "user":
        _check_share(state, submission)
    _check_fits(state, submission)
    return Outcome((events.JobSubmitted(submission=submission, secret=secret),), spec.id)


def _check_share(state: State, submission: Submission) -> None:
    """Check that a tenant does not have too many jobs, or too long commands. Raises CommandRefused."""
    tenant = submission.spec.tenant
    own = [e.submission for e in state.active.values() if e.spec.tenant == tenant]
    letters = sum(one.num_letters for one in (*own, submission))
    if len(own) >= MOST_OF_TENANT or letters > MOST_LETTERS_OF_TENANT:
        raise CommandRefused(
            409,
            f"{len(own)} jobs of tenant {tenant!r} are waiting or running, and with this one their commands "
            f"have {letters} characters. The limits are {MOST_OF_TENANT} jobs and {MOST_LETTERS_OF_TENANT} "
            "characters. Wait until some of them have ended.",
        )


def _check_fits(state: State, submission: Submission) -> None:
    """Check that a kind the job allows exists, and that it needs no more devices than exist in total.

    It does not check whether so many devices are of those kinds. Without nodes every job passes. Raises
    CommandRefused.
    """
    spec = submission.spec
    nodes = [entry.node for entry in state.nodes.values()]
    kinds = {node.kind for node in nodes}
    if spec.kinds is not None and kinds and not kinds & set(spec.kinds):
        raise CommandRefused(
            409,
            f"job {spec.id!r} may run on {', '.join(spec.kinds)} only, but the cluster has "
            f"{', '.join(sorted(kinds))}. Name one of these, or leave the kinds out.",
        )
    total = sum(node.num_devices for node in nodes)
    least = spec.num_devices or spec.min_devices
    if total and least > total:
        raise CommandRefused(
            409,
            f"job {spec.id!r} needs {least} devices, but all nodes together have {total}. Ask for fewer, or "
            "add a node first.",
        )


def cancel(state: State, caller: Caller, job: str) -> Outcome:
    """Cancel a job. A job that has ended already stays as it is."""
    check_owned(state, caller, job)
    if state.jobs[job].is_over:
        return Outcome((), Receipt(note=f"the job has ended already: {state.jobs[job].phase}"))
    return Outcome((events.JobCancelled(job=job),))


def hint(state: State, caller: Caller, job: str, hints: Hints) -> Outcome:
    """Store a job's hints (measurements). Raises CommandRefused if they are out of date or do not fit."""
    entry = state.jobs.get(job)
    if entry is None or not (caller.role == "node" or caller.sees(entry.spec.tenant)):
        raise CommandRefused(404, f"you have no job {job[:80]!a}, so it cannot have hints.")
    if entry.is_over:
        raise CommandRefused(
            409, f"job {job!r} has ended ({entry.phase}), so its hints are of no use."
        )
    last, generation = entry.hints, entry.allocation.generation
    if hints.generation != generation:
        raise CommandRefused(
            409,
            f"hints for generation {hints.generation} of job {job!r} are not for its present allocation, of "
            f"generation {generation}. Send the present generation.",
        )
    if hints == last:
        return Outcome((), Receipt(note="known already"))
    if last is not None and not _is_newer(hints, last):
        raise CommandRefused(
            409,
            f"hints {hints.number} of generation {hints.generation} of job {job!r} are older than the stored "
            f"hints {last.number} of generation {last.generation}. They are ignored.",
        )
    kinds = {entry.node.kind for entry in state.nodes.values()}
    if hints.kind not in kinds:
        raise CommandRefused(
            409,
            f"hints of job {job!r} were measured on {hints.kind[:80]!a}, but the cluster has "
            f"{', '.join(sorted(kinds)) or 'no nodes'}. Send the kind with which the node joined.",
        )
    return Outcome((events.HintsReceived(job=job, hints=hints),))


def _is_newer(hints: Hints, last: Hints) -> bool:
    # Numbers come from the clock of the job's host. If that clock is set back, progress tells what is newer.
    is_later = (hints.generation, hints.number) > (last.generation, last.number)
    return is_later or hints.progress > last.progress


def join(state: State, join: Join) -> Outcome:
    """Add a node, or accept another agent for a known node."""
    node = join.node
    if join.version != VERSION:
        raise CommandRefused(
            409,
            f"the agent of node {node.name!r} speaks version {join.version}, but this service speaks version "
            f"{VERSION}. Run the same jaxgoodput on all machines.",
        )
    joined = events.NodeJoined(node=node, instance=join.instance)
    known = state.nodes.get(node.name)
    if known is None or known.node.state == "down":
        return Outcome((joined,))
    if known.instance != join.instance:
        lost = events.NodeChanged(
            name=node.name, state="down", why="another agent has joined for it"
        )
        return Outcome((lost, joined))
    if dataclasses.replace(known.node, state="up") == node:
        return Outcome((), Receipt(note="known already"))
    return Outcome((joined,))


def change_node(state: State, name: str, to: str, why: str, *, silent: bool = False) -> Outcome:
    """Drain a node, take it out of service, or take it back.

    `silent`: it sent no heartbeat. A silent node comes back with its next heartbeat; a node that an operator
    took out of service does not. A node that is taken back starts afresh: what jobs have reported of it is
    forgotten.
    """
    known = state.nodes.get(name)
    if known is None:
        names = ", ".join(sorted(state.nodes)) or "none"
        raise CommandRefused(404, f"there is no node {name[:80]!a}. The nodes are: {names}.")
    forgets = to == "up" and any(node == name for node, _ in state.faults)
    if known.node.state == to and (silent or not known.silent) and not forgets:
        return Outcome((), Receipt(note=f"the node is {to} already"))
    assert to in ("up", "draining", "down")
    changed = events.NodeChanged(name=name, state=to, why=why, silent=silent, forgets=forgets)
    return Outcome((changed,))


def revive(state: State, name: str) -> Outcome:
    """Bring a silent node, from which a heartbeat came, back to "up", or "draining" if it was drained."""
    known = state.nodes[name]
    if not known.silent:
        return Outcome()
    if known.drained is not None:
        return Outcome((events.NodeChanged(name=name, state="draining", why=known.drained),))
    return Outcome((events.NodeChanged(name=name, state="up", why="it sends heartbeats again"),))


def report(state: State, node: str, instance: str, reports: tuple[Report, ...]) -> Outcome:
    """Record that coordinators on a node listen or ended, and which of its devices jobs have released.

    Reports of earlier attempts are ignored.
    """
    check_agent(state, node, instance)
    found: list[Event] = []
    for one in reports:
        job, attempt = one.job, one.attempt
        entry = state.active_job(job)
        if entry is None or entry.attempt != attempt:
            continue
        held = entry.allocation.devices.get(node, ())
        released = tuple(sorted(set(one.released) & set(held)))
        if released:
            found.append(
                events.DevicesReleased(job=job, attempt=attempt, node=node, devices=released)
            )
        if entry.home != node:
            continue
        if one.code is not None:
            ended = events.CoordinatorEnded(
                job=job, attempt=attempt, code=one.code, why=one.why, retries_unsaved=True
            )
            found.append(ended)
        elif one.address is not None and one.address != entry.address:
            found.append(events.CoordinatorListening(job=job, attempt=attempt, address=one.address))
    return Outcome(tuple(found))


def report_nodes(
    state: State, home: str, reports: tuple[NodeReport, ...], now_s: float, first_s: float
) -> Outcome:
    """Keep nodes that jobs report apart from them, for `first_s` seconds at first.

    `home` is the node that reports for the coordinators that it runs. A report counts if the job still holds
    devices of the reported node, and says something new.
    """
    found: list[Event] = []
    known = state.faults
    for one in reports:
        entry = state.active_job(one.job)
        if entry is None or entry.home != home or entry.attempt != one.attempt:
            continue
        if one.node not in entry.allocation.devices:
            continue
        if faults.is_known(known, one.node, one.job, one.fault, now_s):
            continue
        until_s, all_until_s = faults.terms(known, one.node, one.job, now_s, first_s)
        reported = events.NodeReported(
            node=one.node,
            job=one.job,
            fault=one.fault,
            why=one.why,
            slow_ratio=one.slow_ratio,
            until_s=until_s,
            all_until_s=all_until_s,
        )
        known = faults.with_report(known, reported, now_s)
        found.append(reported)
    return Outcome(tuple(found))


def check_agent(state: State, node: str, instance: str) -> None:
    """Raise CommandRefused if another agent than `instance` has joined as this node, or if none has."""
    known = state.nodes.get(node)
    if known is None:
        raise CommandRefused(404, f"there is no node {node[:80]!a}. It must join first.")
    if known.instance != instance:
        raise CommandRefused(
            409,
            f"another agent has joined as node {node!r}, so this one stops. Give each agent its own --name.",
        )


def adopt(
    state: State, planned: events.PlanMade, base: Mapping[str, int], reasoned: events.ReasonsGiven
) -> Outcome:
    """Put a plan in force, without the parts that became impossible while it was made.

    `base` holds the generation of each job's allocation at the time of planning.
    """
    changes = {
        id_: allocation
        for id_, allocation in planned.changes.items()
        if _is_possible(state, id_, allocation, base.get(id_))
    }
    taken = owners(state)
    for id_ in changes:
        for device in _devices(state.jobs[id_].allocation):
            taken.pop(device, None)
    sure: dict[str, Allocation] = {}
    # Jobs that lose everything come first: they free devices for the others.
    for id_, allocation in sorted(changes.items(), key=lambda pair: bool(pair[1].devices)):
        if any(taken.get(device, id_) != id_ for device in _devices(allocation)):
            # Its present devices may already belong to another job, so it gets none until the next plan.
            allocation = Allocation(generation=allocation.generation)
        sure[id_] = allocation
        taken |= dict.fromkeys(_devices(allocation), id_)
    kept = dataclasses.replace(planned, changes=sure)
    return Outcome((kept, reasoned) if reasoned.reasons else (kept,))


def _is_possible(state: State, job: str, allocation: Allocation, generation: int | None) -> bool:
    """Whether a job can still get this allocation, which was planned while it had `generation`."""
    entry = state.active_job(job)
    if entry is None or entry.allocation.generation != generation:
        return False
    held = entry.allocation.devices
    return all(
        _can_have(state, name, local, held.get(name, ()))
        for name, local in allocation.devices.items()
    )


def _can_have(state: State, name: str, local: Sequence[int], held: Sequence[int]) -> bool:
    """Whether a job may get the devices `local` of a node; it already has the devices `held` there."""
    known = state.nodes.get(name)
    if known is None or known.node.state == "down":
        return False
    if any(index >= known.node.num_devices for index in local):  # it came back with fewer
        return False
    return known.node.state == "up" or set(local) <= set(held)


def _devices(allocation: Allocation) -> list[tuple[str, int]]:
    return [(name, index) for name, local in allocation.devices.items() for index in local]
