"""What requests ask for, as pure decisions: from the state to the events that happen and the answer.

A `CommandRefused` says why nothing happens. All that is random or read from a clock is handed in.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput.cluster.service.record.events import (
    CoordinatorEnded,
    CoordinatorListening,
    Event,
    HintsReceived,
    JobCancelled,
    JobSubmitted,
    NodeChanged,
    NodeJoined,
    PlanMade,
    ReasonsGiven,
)
from jaxgoodput.cluster.service.record.state import State, owners
from jaxgoodput.cluster.service.wire import VERSION, Join, Receipt, Report, Submission
from jaxgoodput.specs import Allocation, Hints

MOST_JOBS = 10_000  # that are not over
MOST_OF_TENANT = 2000  # likewise, where a user of it hands them in
MOST_LETTERS_OF_TENANT = 2**25  # of the commands of these


class CommandRefused(Exception):
    """A request that is understood, and not done."""

    def __init__(self, status: int, message: str):
        self.status = status
        """As of HTTP."""
        super().__init__(message)


@dataclass(frozen=True)
class Outcome:
    """What happens, and what whoever asked for it is told."""

    events: tuple[Event, ...] = ()
    answer: Any = field(default_factory=Receipt)


@dataclass(frozen=True)
class Caller:
    """Who asks."""

    tenant: str
    role: str
    """"user": its own jobs; "node": what agents do; "operator": everything."""

    def sees(self, tenant: str) -> bool:
        """Whether jobs of a tenant are its business."""
        return self.role == "operator" or (self.role == "user" and self.tenant == tenant)


def job_of(state: State, caller: Caller, job: str) -> None:
    """Raises Refused, alike for a job that is not there and one that is somebody else's."""
    entry = state.jobs.get(job)
    if entry is None or not caller.sees(entry.spec.tenant):
        raise CommandRefused(
            404, f"you have no job {job[:80]!a}. `jaxgoodput status` lists those you have."
        )


def of_tenant(caller: Caller, submission: Submission) -> Submission:
    """The job as one of the caller's tenant. Raises Refused where it says that it is another one's."""
    spec = submission.spec
    if caller.role != "user":
        return submission
    if spec.tenant not in ("default", caller.tenant):
        raise CommandRefused(
            403,
            f"the job says tenant {spec.tenant!r}, and this token is that of {caller.tenant!r}. Leave the "
            "tenant out, or use the token of the other one.",
        )
    return dataclasses.replace(submission, spec=dataclasses.replace(spec, tenant=caller.tenant))


def submit(state: State, caller: Caller, submission: Submission, secret: str) -> Outcome:
    """A job comes."""
    submission = of_tenant(caller, submission)
    spec = submission.spec
    known = state.jobs.get(spec.id)
    if known is not None and not (known.is_over and caller.sees(known.spec.tenant)):
        raise CommandRefused(
            409,
            f"there is a job {spec.id!r} already. Give this one another name, or await the end of that one.",
        )
    if len(state.active) >= MOST_JOBS:
        raise CommandRefused(
            409, f"{MOST_JOBS} jobs are waiting or running, and no more can be. Try again later."
        )
    if caller.role == "user":
        _check_share(state, submission)
    kinds = {entry.node.kind for entry in state.nodes.values()}
    if spec.kinds is not None and kinds and not kinds & set(spec.kinds):
        raise CommandRefused(
            409,
            f"job {spec.id!r} may run on {', '.join(spec.kinds)} only, and the cluster has "
            f"{', '.join(sorted(kinds))}. Name one of these, or leave the kinds out.",
        )
    total = sum(entry.node.num_devices for entry in state.nodes.values())
    least = spec.num_devices or spec.min_devices
    if total and least > total:
        raise CommandRefused(
            409,
            f"job {spec.id!r} needs {least} devices, and all nodes together have {total}. Ask for fewer, or "
            "have a node join first.",
        )
    return Outcome((JobSubmitted(submission=submission, secret=secret),), spec.id)


def _check_share(state: State, submission: Submission) -> None:
    """Raises Refused where one tenant would leave too little room for the others."""
    tenant = submission.spec.tenant
    its = [e.submission for e in state.active.values() if e.spec.tenant == tenant]
    letters = sum(one.num_letters for one in (*its, submission))
    if len(its) >= MOST_OF_TENANT or letters > MOST_LETTERS_OF_TENANT:
        raise CommandRefused(
            409,
            f"{len(its)} jobs of tenant {tenant!r} are waiting or running, with commands of {letters} "
            f"letters in all with this one; {MOST_OF_TENANT} jobs and {MOST_LETTERS_OF_TENANT} letters "
            "can be. Await the end of some.",
        )


def cancel(state: State, caller: Caller, job: str) -> Outcome:
    """A job is taken away; one that is over stays as it ended."""
    job_of(state, caller, job)
    if state.jobs[job].is_over:
        return Outcome((), Receipt(note=f"it was over already: {state.jobs[job].phase}"))
    return Outcome((JobCancelled(job=job),))


def hint(state: State, caller: Caller, job: str, hints: Hints) -> Outcome:
    """A job tells of itself."""
    entry = state.jobs.get(job)
    if entry is None or not (caller.role == "node" or caller.sees(entry.spec.tenant)):
        raise CommandRefused(404, f"you have no job {job[:80]!a}, so it can have no hints.")
    if entry.is_over:
        raise CommandRefused(
            409, f"job {job!r} is over ({entry.phase}); its hints are of no use any more."
        )
    if hints.generation != entry.allocation.generation:
        raise CommandRefused(
            409,
            f"hints of generation {hints.generation} of job {job!r}, whose allocation is of generation "
            f"{entry.allocation.generation}. Tell the generation that is handed out now.",
        )
    last = entry.hints
    if last is not None and hints.number == last.number and hints == last:
        return Outcome((), Receipt(note="known already"))
    # Its number is by the clock of its host: where that was set back, its progress says that it is newer.
    if (
        last is not None
        and (hints.generation, hints.number) <= (last.generation, last.number)
        and hints.progress <= last.progress
    ):
        raise CommandRefused(
            409,
            f"hints {hints.number} of generation {hints.generation} of job {job!r} are older than those that "
            f"are known, {last.number} of generation {last.generation}. They are left out.",
        )
    kinds = {entry.node.kind for entry in state.nodes.values()}
    if hints.kind not in kinds:
        raise CommandRefused(
            409,
            f"hints of job {job!r} were measured on {hints.kind[:80]!a}, and the cluster has "
            f"{', '.join(sorted(kinds)) or 'no nodes'}. Tell the kind that the node joined with.",
        )
    return Outcome((HintsReceived(job=job, hints=hints),))


def join(state: State, join: Join) -> Outcome:
    """A node comes, or comes back."""
    node = join.node
    if join.version != VERSION:
        raise CommandRefused(
            409,
            f"the agent of node {node.name!r} speaks version {join.version}, this service version {VERSION}. "
            "Run the same jaxgoodput on all machines.",
        )
    known = state.nodes.get(node.name)
    if known is not None and known.instance == join.instance and _same(known.node, node):
        return Outcome((), Receipt(note="known already"))
    if known is not None and known.instance != join.instance and known.node.state != "down":
        lost = NodeChanged(name=node.name, state="down", why="another agent has come for it")
        return Outcome((lost, NodeJoined(node=node, instance=join.instance)))
    return Outcome((NodeJoined(node=node, instance=join.instance),))


def _same(known: Any, node: Any) -> bool:
    return dataclasses.replace(known, state="up") == node and known.state != "down"


def change_node(state: State, name: str, to: str, why: str, *, silent: bool = False) -> Outcome:
    """A node is drained, given up, or taken in again."""
    known = state.nodes.get(name)
    if known is None:
        raise CommandRefused(
            404,
            f"there is no node {name[:80]!a}; there are {', '.join(sorted(state.nodes)) or 'none'}.",
        )
    # One that is silent comes back by itself, which one that somebody took out of service does not.
    if known.node.state == to and not (known.silent and not silent):
        return Outcome((), Receipt(note=f"it was {to} already"))
    assert to in ("up", "draining", "down")
    return Outcome((NodeChanged(name=name, state=to, why=why, silent=silent),))


def heard(state: State, name: str) -> Outcome:
    """A node that was down for want of a sign of life gives one: it is as it was before."""
    known = state.nodes[name]
    if not known.silent:
        return Outcome()
    if known.drained is not None:
        return Outcome((NodeChanged(name=name, state="draining", why=known.drained),))
    return Outcome((NodeChanged(name=name, state="up", why="it answers again"),))


def report(state: State, node: str, instance: str, reports: tuple[Report, ...]) -> Outcome:
    """What coordinators did on a node; what is of an earlier attempt is left out."""
    of_this_agent(state, node, instance)
    events: list[Event] = []
    for one in reports:
        entry = state.jobs.get(one.job)
        if entry is None or entry.is_over or entry.home != node or entry.attempt != one.attempt:
            continue
        if one.code is not None:
            events.append(
                CoordinatorEnded(
                    job=one.job, attempt=one.attempt, code=one.code, why=one.why[:2000]
                )
            )
        elif one.address is not None and one.address != entry.address:
            events.append(
                CoordinatorListening(job=one.job, attempt=one.attempt, address=one.address[:200])
            )
    return Outcome(tuple(events))


def of_this_agent(state: State, node: str, instance: str) -> None:
    """Raises Refused where the node has not joined, or another agent has."""
    known = state.nodes.get(node)
    if known is None:
        raise CommandRefused(404, f"there is no node {node[:80]!a}. Have it join first.")
    if known.instance != instance:
        raise CommandRefused(
            409,
            f"another agent has come for node {node!r}. Give each agent its own --name; the older one stops.",
        )


def _can_have(state: State, name: str, local: Sequence[int], has: Sequence[int]) -> bool:
    """Whether a job may have devices of a node of which it has some now."""
    known = state.nodes.get(name)
    if known is None or known.node.state == "down":
        return False
    if any(index >= known.node.num_devices for index in local):  # it came back with fewer
        return False
    return known.node.state == "up" or set(local) <= set(has)


def adopt(state: State, planned: PlanMade, base: dict[str, int], reasoned: ReasonsGiven) -> Outcome:
    """A plan, less what has become impossible while it was made.

    `base`: of which generation each job's allocation was then.
    """
    taken = owners(state)
    changes: dict[str, Allocation] = {}
    for id_, allocation in planned.changes.items():
        entry = state.jobs.get(id_)
        if entry is None or entry.is_over or entry.allocation.generation != base.get(id_):
            continue
        if not all(
            _can_have(state, name, local, entry.allocation.devices.get(name, ()))
            for name, local in allocation.devices.items()
        ):
            continue
        changes[id_] = allocation
    for id_ in changes:
        for name, local in state.jobs[id_].allocation.devices.items():
            for index in local:
                taken.pop((name, index), None)
    sure: dict[str, Allocation] = {}
    for id_, allocation in sorted(changes.items(), key=lambda pair: bool(pair[1].devices)):
        wanted = [(name, index) for name, local in allocation.devices.items() for index in local]
        if any(taken.get(device, id_) != id_ for device in wanted):
            # Its present devices may have gone to another one by then: it has none until the next plan.
            allocation = Allocation(generation=allocation.generation)
            wanted = []
        sure[id_] = allocation
        taken |= dict.fromkeys(wanted, id_)
    kept = dataclasses.replace(planned, changes=sure)
    return Outcome((kept, reasoned) if reasoned.reasons else (kept,))
