"""The state of a cluster and its jobs, as a pure function of the journal's events.

    state = step(state, entry)

Nothing here reads a clock, a disk or a socket. So replaying the journal after a crash gives the state that
was lost, and another process that follows the journal has the same state.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxgoodput._exits import DONE, SAVED, UNSAVED
from jaxgoodput.cluster.service.plain import plain
from jaxgoodput.cluster.service.record import events
from jaxgoodput.cluster.service.record.faults import Faults, with_report, without_node
from jaxgoodput.cluster.service.wire import (
    OVER,
    TEXT_RULES,
    HeldDevices,
    JobTask,
    NodeWork,
    Phase,
    Report,
    Submission,
)
from jaxgoodput.specs import Allocation, Hints, HostFault, JobSpec, Node

NO_NEWS = events.PlanMade | events.ReasonsGiven | events.RequestAnswered  # change no later plan
COORDINATES = "coordinates"  # the label of nodes that run coordinators
MOST_OVER = 2000  # ended jobs that are remembered
MOST_OVER_LETTERS = 2**25  # total length of their commands
MOST_ANSWERS = 20_000  # answers that are remembered, in case their requests come again
MOST_ANSWER_LETTERS = 2**25  # total length of these answers
MOST_PAST = 60  # periods with the same devices that are remembered of a job
MOST_FAILURES = 3  # consecutive attempts ended by a signal, or unsaved, before the job fails
MOST_SAVES = 10  # consecutive attempts that ended unasked with 143 before the job fails
LONG_S = 600.0  # an attempt that ran this long resets both counts
COLOUR_S = 3600.0  # for which an ended job keeps its colour to itself
MOST_COLOURED = 100  # newest ended jobs that keep their colours to themselves for longer


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """What the service records of a node: its present state, and the part of its history that matters."""

    node: Node
    instance: str
    version: int
    """Journal position of the last event that changed this node's work."""
    why: str = ""
    silent: bool = False
    """Whether it is down only because it sent no heartbeat."""
    drained: str | None = None
    """Why an operator drained it, also while it is down; None if it is not drained."""


@dataclass(frozen=True, kw_only=True)
class JobEntry:
    """What the service records of a job: its request, its phase, its devices now and before."""

    submission: Submission
    secret: str = field(repr=False)
    submitted_s: float
    seq: int = 0
    """Journal position at which it was submitted; listings continue from such a position."""
    colour: int = 0
    """The number of its colour on the page. No other job that may be shown there as well has it."""
    phase: Phase = "waiting"
    allocation: Allocation = field(default_factory=Allocation)
    reason: str = "not planned yet"
    since_s: float | None = None
    """Time at which it got its present devices; None without devices."""
    settled_s: float = 0.0
    """Time up to which `received_s` and `ran_s` are counted."""
    started_s: float | None = None
    finished_s: float | None = None
    num_changes: int = 0
    """How many times it got devices anew after its first start."""
    received_s: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds held, by kind of device."""
    ran_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds with at least one device, by kind of device."""
    home: str | None = None
    """The node that runs its coordinator."""
    attempt: int = 0
    """The number of coordinators that it has had."""
    attempted_s: float = 0.0
    """Time at which the last attempt began."""
    address: str | None = None
    failures: int = 0
    """Consecutive attempts that ended by a signal."""
    saves: int = 0
    """Consecutive attempts that saved and ended although the job kept its devices."""
    code: int | None = None
    """Exit code with which the job ended; None before, or if it did not end by itself."""
    most_devices: int | None = None
    """Most devices that it still needs until its end; None if it has released none."""
    hints: Hints | None = None
    past: tuple[HeldDevices, ...] = ()

    @property
    def spec(self) -> JobSpec:
        """The job's spec, as its user has submitted it."""
        return self.submission.spec

    @property
    def is_over(self) -> bool:
        """Whether the job is done, has failed or was cancelled."""
        return self.phase in OVER


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """The answer to a request, which is given again if the same request is sent again."""

    digest: str
    status: int
    body: str


@dataclass(frozen=True, kw_only=True)
class State:
    """The whole state of the cluster: what the events of the journal up to one position lead to."""

    seq: int = 0
    """Position in the journal of the last event."""
    at_s: float = 0.0
    """Time of that event, in seconds of the service's own clock."""
    news_s: float | None = None
    """Time of the last event that may change a plan, such as a submission, an end or a measurement; None if
    there was none since a state was read that does not say."""
    nodes: Mapping[str, NodeEntry] = field(default_factory=dict)
    jobs: Mapping[str, JobEntry] = field(default_factory=dict)
    """All jobs by name, the oldest first."""
    answers: Mapping[str, StoredAnswer] = field(default_factory=dict)
    """Stored answers by idempotency key, the oldest first."""
    num_answer_letters: int = 0
    """Characters of all stored answers together."""
    solved_s: float | None = None
    """Time of the last plan; None if there is none."""
    next_solve_s: float = 0.0
    """Latest time of the next plan."""
    num_restarts: int = 0
    """How often coordinators were started again, counting all jobs since the journal began."""
    num_resizes: int = 0
    """How often jobs got other devices after their first start, counted likewise."""
    faults: Faults = field(default_factory=dict)
    """What jobs have reported of nodes."""
    num_faults: Mapping[HostFault, int] = field(default_factory=dict)
    """How often jobs have reported nodes since the journal began, by fault."""

    # What is asked of one state again and again: by each job of a plan, by each node that waits for work.

    @cached_property
    def kind_of(self) -> dict[str, str]:
        """The kind of device of each node, by the node's name."""
        return {name: entry.node.kind for name, entry in self.nodes.items()}

    @cached_property
    def active(self) -> Mapping[str, JobEntry]:
        """The jobs that have not ended, by id."""
        return {id_: entry for id_, entry in self.jobs.items() if not entry.is_over}

    @cached_property
    def on_node(self) -> Mapping[str, Sequence[str]]:
        """The jobs that have devices or their coordinator on each node, by its name."""
        found: dict[str, list[str]] = {}
        for id_, entry in self.active.items():
            home = [entry.home] if entry.home is not None and entry.attempt > 0 else []
            for name in {*entry.allocation.devices, *home}:
                found.setdefault(name, []).append(id_)
        return found

    def active_job(self, id_: str) -> JobEntry | None:
        """Return a job that has not ended; None if there is none of this id."""
        entry = self.jobs.get(id_)
        return None if entry is None or entry.is_over else entry


def step(state: State, entry: events.JournalEntry) -> State:
    """Return the state after one more event.

    Raises ValueError if the event names a job or node that does not exist, so that the journal cannot belong
    to this state.
    """
    event, at_s = entry.event, max(entry.at_s, state.at_s)
    news_s = state.news_s if isinstance(event, NO_NEWS) else at_s
    state = dataclasses.replace(state, seq=entry.seq, at_s=at_s, news_s=news_s)
    match event:
        case events.NodeJoined():
            return _joined(state, event)
        case events.NodeChanged():
            return _node_changed(state, event)
        case events.NodeReported():
            return _reported(state, event)
        case events.JobSubmitted():
            return _submitted(state, event)
        case events.JobCancelled(job=job):
            cancelled = dataclasses.replace(_known(state, job), reason="cancelled by its user")
            return _over(state, cancelled, "cancelled", None)
        case events.HintsReceived(job=job, hints=hints):
            return _with_job(state, dataclasses.replace(_known(state, job), hints=hints))
        case events.PlanMade():
            return _planned(state, event)
        case events.ReasonsGiven(reasons=reasons):
            changed = {
                id_: dataclasses.replace(job, reason=reasons[id_])
                for id_, job in state.active.items()
                if id_ in reasons
            }
            return dataclasses.replace(state, jobs={**state.jobs, **changed})
        case events.CoordinatorListening(job=job, address=address):
            return _restated(state, dataclasses.replace(_known(state, job), address=address))
        case events.CoordinatorEnded():
            return _ended(state, event)
        case events.DevicesReleased():
            return _released(state, event)
        case events.RequestAnswered():
            return _answered(state, event)


def work_of(state: State, name: str) -> NodeWork:
    """Return the work of a node: one task for each job that has devices or its coordinator there."""
    tasks = []
    for id_ in state.on_node.get(name, ()):
        entry = state.jobs[id_]
        devices = entry.allocation.devices.get(name, ())
        coordinates = entry.home == name and entry.attempt > 0
        submission, spec = entry.submission, entry.spec
        each = submission.devices_per_process
        tasks.append(
            JobTask(
                job=id_,
                generation=entry.allocation.generation,
                devices=tuple(devices),
                command=submission.command,
                cwd=submission.cwd,
                workdir=submission.workdir,
                devices_per_process=each,
                min_processes=max((spec.num_devices or spec.min_devices) // each, 1),
                max_processes=max((spec.num_devices or spec.max_devices) // each, 1),
                attempt=entry.attempt,
                coordinates=coordinates,
                address=entry.address,
                runs=bool(entry.allocation.devices),
                secret=entry.secret,
                variables=submission.variables,
            )
        )
    return NodeWork(node=name, version=state.nodes[name].version, tasks=tuple(tasks))


def owners(state: State) -> dict[tuple[str, int], str]:
    """Return the job that holds each device (node, local index); free devices are left out."""
    return {
        (name, index): id_
        for id_, entry in state.jobs.items()
        for name, local in entry.allocation.devices.items()
        for index in local
    }


def counted_until(now_s: float, entry: JobEntry, kind_of: Mapping[str, str]) -> JobEntry:
    """Return a job, to whose device-seconds the time up to `now_s` has been added."""
    elapsed_s = max(now_s - entry.settled_s, 0.0)
    received_s, ran_s = dict(entry.received_s), dict(entry.ran_s)
    if elapsed_s:
        for name, local in entry.allocation.devices.items():
            kind = kind_of.get(name, "")
            received_s[kind] = received_s.get(kind, 0.0) + elapsed_s * len(local)
        for kind in {kind_of.get(name, "") for name in entry.allocation.devices}:
            ran_s[kind] = ran_s.get(kind, 0.0) + elapsed_s
    return dataclasses.replace(
        entry, received_s=received_s, ran_s=ran_s, settled_s=max(now_s, entry.settled_s)
    )


def _known(state: State, job: str) -> JobEntry:
    if job not in state.jobs:
        raise ValueError(
            f"there is no job {job!r} at position {state.seq} of the journal, so no event can concern it"
        )
    return state.jobs[job]


def _with_job(state: State, job: JobEntry) -> State:
    """Return the state with a changed job. Every change of a job that has started is counted here."""
    before = _known(state, job.spec.id)
    restarts = 0 if before.started_s is None else job.attempt - before.attempt
    return dataclasses.replace(
        state,
        jobs={**state.jobs, job.spec.id: job},
        num_restarts=state.num_restarts + restarts,
        num_resizes=state.num_resizes + job.num_changes - before.num_changes,
    )


def _restated(state: State, job: JobEntry, before: Allocation | None = None) -> State:
    """Return the state with a changed job, and new work for all nodes that the change concerns.

    `before` is the job's earlier allocation, if that has changed.
    """
    names = {*job.allocation.devices, *(before.devices if before else ()), job.home}
    nodes = {
        name: dataclasses.replace(node, version=state.seq) if name in names else node
        for name, node in state.nodes.items()
    }
    return dataclasses.replace(_with_job(state, job), nodes=nodes)


def _reallocated(state: State, job: JobEntry, allocation: Allocation) -> JobEntry:
    """Return a job with another allocation, and with a new coordinator if it needs one."""
    at_s = state.at_s
    counted = counted_until(at_s, job, state.kind_of)
    had, has = job.allocation.devices, allocation.devices
    if dict(had) == dict(has):
        return dataclasses.replace(counted, allocation=allocation)
    past = counted.past
    if past and past[-1].end_s is None:
        past = (*past[:-1], dataclasses.replace(past[-1], end_s=at_s))
    if not has:
        return dataclasses.replace(
            counted, allocation=allocation, phase="waiting", since_s=None, past=past
        )
    has_started = counted.started_s is not None
    changed = dataclasses.replace(
        counted,
        allocation=allocation,
        phase="running",
        since_s=at_s,
        started_s=counted.started_s if has_started else at_s,
        num_changes=counted.num_changes + has_started,
        past=(*past[-MOST_PAST:], HeldDevices(start_s=at_s, end_s=None, devices=has)),
    )
    is_orphaned = not had or not _is_up(state, changed.home)
    return _attempted(state, changed) if is_orphaned else changed


def _attempted(state: State, job: JobEntry) -> JobEntry:
    """Return a job with a new attempt, whose coordinator stays on the last one's node if that is up."""
    home = job.home
    if not _is_up(state, home):
        named = sorted(n for n, e in state.nodes.items() if COORDINATES in e.node.labels)
        candidates = [*named, *sorted(job.allocation.devices)]
        home = next((name for name in candidates if _is_up(state, name)), None)
    # An attempt that begins further back may need devices that the last one had released.
    begun = {"attempt": job.attempt + 1, "attempted_s": state.at_s, "most_devices": None}
    return dataclasses.replace(job, home=home, address=None, **begun)


def _is_up(state: State, name: str | None) -> bool:
    entry = None if name is None else state.nodes.get(name)
    return entry is not None and entry.node.state != "down"


def _over(state: State, job: JobEntry, phase: Phase, code: int | None) -> State:
    """Return the state in which the job has ended in this phase, and its devices are free."""
    before = job.allocation
    freed = _reallocated(state, job, Allocation(generation=before.generation + 1))
    freed = dataclasses.replace(freed, phase=phase, finished_s=state.at_s, code=code)
    return _restated(state, freed, before)


def _submitted(state: State, event: events.JobSubmitted) -> State:
    id_, at_s = event.submission.spec.id, state.at_s
    others = {other: entry for other, entry in state.jobs.items() if other != id_}
    job = JobEntry(
        submission=event.submission,
        secret=event.secret,
        submitted_s=at_s,
        settled_s=at_s,
        seq=state.seq,
        colour=_free_colour(others, at_s),
    )
    before = state.jobs.get(id_)
    if before is not None:
        # Reports about an earlier job of this name may still be in flight. Counting on tells them apart.
        generation = before.allocation.generation
        job = dataclasses.replace(
            job, attempt=before.attempt, allocation=Allocation(generation=generation)
        )
    return dataclasses.replace(state, jobs={**_without_oldest(others), id_: job})


def _free_colour(jobs: Mapping[str, JobEntry], at_s: float) -> int:
    """Return the least number of a colour that no job has which is shown beside a new one for long."""
    over = [entry for entry in jobs.values() if entry.is_over]
    recent = [e for e in over if at_s - (e.finished_s or 0.0) < COLOUR_S]
    taken = {e.colour for e in (*recent, *over[-MOST_COLOURED:])}
    taken |= {entry.colour for entry in jobs.values() if not entry.is_over}
    return next(number for number in itertools.count() if number not in taken)


def _without_oldest(jobs: Mapping[str, JobEntry]) -> Mapping[str, JobEntry]:
    """Return the jobs without the oldest ended ones, if these are too many or take too much room."""
    over = [id_ for id_, entry in jobs.items() if entry.is_over]
    letters = sum(jobs[id_].submission.num_letters for id_ in over)
    dropped = set[str]()
    for index, id_ in enumerate(over):
        if len(over) - index <= MOST_OVER and letters <= MOST_OVER_LETTERS:
            break
        letters -= jobs[id_].submission.num_letters
        dropped.add(id_)
    return {id_: entry for id_, entry in jobs.items() if id_ not in dropped}


def _answered(state: State, event: events.RequestAnswered) -> State:
    """Return the state with one more answer, without the oldest if they are too many or too long."""
    answers = dict(state.answers)
    before = answers.pop(event.request, None)
    letters = state.num_answer_letters - (0 if before is None else len(before.body))
    answers[event.request] = StoredAnswer(digest=event.digest, status=event.status, body=event.body)
    letters += len(event.body)
    if len(answers) > MOST_ANSWERS or letters > MOST_ANSWER_LETTERS:
        # This looks at all answers, so it drops a tenth of them at once.
        for request in list(answers)[:-1]:
            if len(answers) <= 0.9 * MOST_ANSWERS and letters <= 0.9 * MOST_ANSWER_LETTERS:
                break
            letters -= len(answers.pop(request).body)
    return dataclasses.replace(state, answers=answers, num_answer_letters=letters)


def _joined(state: State, event: events.NodeJoined) -> State:
    """Return the state with a node added.

    If the node's agent is another one than before, whatever the earlier agent ran has ended.
    """
    name = event.node.name
    known = state.nodes.get(name)
    entry = NodeEntry(node=event.node, instance=event.instance, version=state.seq)
    if known is not None and known.drained is not None:
        drained = dataclasses.replace(event.node, state="draining")
        entry = dataclasses.replace(entry, node=drained, why=known.drained, drained=known.drained)
    state = dataclasses.replace(state, nodes={**state.nodes, name: entry})
    if known is None or known.instance == event.instance:
        return state
    for job in list(state.active.values()):
        if job.home == name and job.allocation.devices:
            state = _restated(state, _attempted(state, job))
    return state


def _node_changed(state: State, event: events.NodeChanged) -> State:
    known = state.nodes.get(event.name)
    if known is None:
        raise ValueError(
            f"there is no node {event.name!r} at position {state.seq} of the journal, so no "
            "event can concern it"
        )
    drained = {"up": None, "draining": event.why, "down": known.drained}
    entry = dataclasses.replace(
        known,
        node=dataclasses.replace(known.node, state=event.state),
        why=event.why,
        silent=event.silent,
        drained=drained[event.state],
        version=state.seq,
    )
    state = dataclasses.replace(state, nodes={**state.nodes, event.name: entry})
    if event.forgets:
        state = dataclasses.replace(state, faults=without_node(state.faults, event.name))
    if event.state == "down":
        for job in list(state.active.values()):
            if event.name in job.allocation.devices or job.home == event.name:
                state = _without_node(state, job, event.name)
    return state


def _reported(state: State, event: events.NodeReported) -> State:
    faults = with_report(state.faults, event, state.at_s)
    counts = {**state.num_faults, event.fault: state.num_faults.get(event.fault, 0) + 1}
    return dataclasses.replace(state, faults=faults, num_faults=counts)


def _without_node(state: State, job: JobEntry, name: str) -> State:
    """Return a job without the devices of a node; it loses all devices if the rest are too few."""
    before = job.allocation
    left = {other: local for other, local in before.devices.items() if other != name}
    least = job.spec.num_devices or job.spec.min_devices
    kept = left if sum(map(len, left.values())) >= least else {}
    if dict(kept) != dict(before.devices):
        allocation = Allocation(devices=kept, generation=before.generation + 1)
        job = _reallocated(state, job, allocation)
    if job.home == name:
        if job.allocation.devices:
            job = _attempted(state, job)
        else:
            job = dataclasses.replace(job, home=None, address=None)
    return _restated(state, job, before)


def _released(state: State, event: events.DevicesReleased) -> State:
    """Return the state with a job that goes on without some devices; none if the rest were too few."""
    job = _known(state, event.job)
    before, gone = job.allocation, {(event.node, index) for index in event.devices}
    left = {
        name: kept
        for name, local in before.devices.items()
        if (kept := tuple(index for index in local if (name, index) not in gone))
    }
    count = sum(map(len, left.values()))
    is_fewer = count < sum(map(len, before.devices.values()))
    if not is_fewer or count < (job.spec.num_devices or job.spec.min_devices):
        return state
    job = dataclasses.replace(job, most_devices=count)
    allocation = Allocation(devices=left, generation=before.generation + 1)
    return _restated(state, _reallocated(state, job, allocation), before)


def _planned(state: State, event: events.PlanMade) -> State:
    state = dataclasses.replace(state, solved_s=event.solved_s, next_solve_s=event.next_solve_s)
    for id_, allocation in event.changes.items():
        job = _known(state, id_)
        state = _restated(state, _reallocated(state, job, allocation), job.allocation)
    return state


def _ended(state: State, event: events.CoordinatorEnded) -> State:
    """Return the state after an attempt ended: the job is done, failed, waits, or gets another attempt."""
    job = _known(state, event.job)
    if event.code == DONE:
        return _over(state, dataclasses.replace(job, reason="done"), "done", DONE)
    is_short = state.at_s - job.attempted_s <= LONG_S
    # It was told to save, too few of its processes were left, or its coordinator could not start.
    if event.code == SAVED:
        return _saved(state, job, is_short)
    # A signal to the coordinator or to its processes: the node ran out of memory, or the job was told to stop
    # and took too long to save. Or it could not save for now.
    may_pass = event.code < 0 or event.code > 128
    may_pass |= event.code == UNSAVED and event.retries_unsaved
    if may_pass and not job.allocation.devices:
        return _restated(state, job)
    job = dataclasses.replace(job, failures=job.failures + 1 if is_short else 1)
    if may_pass and job.failures < MOST_FAILURES:
        return _restated(state, _attempted(state, job))
    # Journals of earlier versions hold reasons that did not pass the door for text.
    why = plain(event.why, TEXT_RULES[Report, "why"]) or f"exit code {event.code}"
    job = dataclasses.replace(job, reason=f"failed: {why}")
    return _over(state, job, "failed", event.code)


def _saved(state: State, job: JobEntry, is_short: bool) -> State:
    """Return the state after a job has asked for a restart: another attempt, unless it does so too often."""
    has_moved = job.since_s is None or job.since_s > job.attempted_s
    saves = 0 if has_moved else job.saves + 1 if is_short else 1
    job = dataclasses.replace(job, saves=saves)
    if saves < MOST_SAVES:
        return _restated(state, _attempted(state, job) if job.allocation.devices else job)
    why = f"it ended with 143, for a restart, {saves} times in a row, although it kept its devices"
    return _over(state, dataclasses.replace(job, reason=f"failed: {why}"), "failed", SAVED)
