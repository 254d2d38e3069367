"""What is known of the cluster and its jobs: the sum of the journal's events, by one pure function.

    state = step(state, stamped)

Nothing here reads a clock, a disk or a socket, so a state that is read back from the journal is the one that
was lost, and a process that follows the journal has it too.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxgoodput.cluster.service.record.events import (
    CoordinatorEnded,
    CoordinatorListening,
    HintsReceived,
    JobCancelled,
    JobSubmitted,
    JournalEntry,
    NodeChanged,
    NodeJoined,
    PlanMade,
    ReasonsGiven,
    RequestAnswered,
)
from jaxgoodput.cluster.service.wire import OVER, HeldDevices, JobTask, NodeWork, Phase, Submission
from jaxgoodput.specs import Allocation, Hints, JobSpec, Node

SAVED = 143  # the exit code of a job that has saved and wants to go on
COORDINATES = "coordinates"  # the label of nodes on which coordinators are to run
MOST_OVER = 2000  # jobs that are over and still known
MOST_OVER_LETTERS = 2**25  # of their commands, in all
MOST_ANSWERS = 20_000  # requests that may come again
MOST_ANSWER_LETTERS = 2**25  # of their answers, in all
MOST_PAST = 60  # stretches of a job with the same devices that are still known
MOST_FAILURES = 3  # by a signal, in a row, before the job has failed
MOST_SAVES = 10  # in a row that nobody asked for, likewise
LONG_S = 600.0  # an attempt that lived for so long was none of a row


@dataclass(frozen=True, kw_only=True)
class NodeEntry:
    """A node, and how it came to be as it is."""

    node: Node
    instance: str
    version: int
    """Of its work: the place in the journal of what changed it last."""
    why: str = ""
    silent: bool = False
    """Whether it is down for want of a sign of life only."""
    drained: str | None = None
    """Why it was drained, until it is taken in again; it may be down meanwhile."""


@dataclass(frozen=True, kw_only=True)
class JobEntry:
    """A job, and all that has happened to it."""

    submission: Submission
    secret: str = field(repr=False)
    submitted_s: float
    phase: Phase = "waiting"
    allocation: Allocation = field(default_factory=Allocation)
    reason: str = "not looked at yet"
    since_s: float | None = None
    """When it got the devices that it has."""
    settled_s: float = 0.0
    """Up to when what it has had is counted."""
    started_s: float | None = None
    finished_s: float | None = None
    num_changes: int = 0
    received_s: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds by kind, up to `settled_s`."""
    ran_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by kind, likewise."""
    home: str | None = None
    """The node of its coordinator."""
    attempt: int = 0
    attempted_s: float = 0.0
    """When the last attempt began."""
    address: str | None = None
    failures: int = 0
    saves: int = 0
    """Ends in a row to go on later, on devices that it kept."""
    code: int | None = None
    hints: Hints | None = None
    past: tuple[HeldDevices, ...] = ()

    @property
    def spec(self) -> JobSpec:
        """What its user asked for."""
        return self.submission.spec

    @property
    def is_over(self) -> bool:
        """Whether it is done, has failed or was taken away."""
        return self.phase in OVER


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """What a request got, for when it comes again."""

    digest: str
    status: int
    body: str


@dataclass(frozen=True, kw_only=True)
class State:
    """The cluster at one place of the journal."""

    seq: int = 0
    at_s: float = 0.0
    nodes: Mapping[str, NodeEntry] = field(default_factory=dict)
    jobs: Mapping[str, JobEntry] = field(default_factory=dict)
    """In the order in which they came."""
    answers: Mapping[str, StoredAnswer] = field(default_factory=dict)
    """The oldest first."""
    num_answer_letters: int = 0
    solved_s: float | None = None
    next_solve_s: float = 0.0

    @property
    def kind_of(self) -> dict[str, str]:
        """Of the devices of each node."""
        return {name: entry.node.kind for name, entry in self.nodes.items()}

    @property
    def active(self) -> dict[str, JobEntry]:
        """The jobs that are not over."""
        return {id_: entry for id_, entry in self.jobs.items() if not entry.is_over}


def step(state: State, stamped: JournalEntry) -> State:
    """The state after one event more.

    Raises ValueError where the event names a job or node that is not there: the journal is not this
    state's.
    """
    event, at_s = stamped.event, max(stamped.at_s, state.at_s)
    state = dataclasses.replace(state, seq=stamped.seq, at_s=at_s)
    match event:
        case NodeJoined():
            return _joined(state, event)
        case NodeChanged():
            return _node_changed(state, event)
        case JobSubmitted():
            id_ = event.submission.spec.id
            entry = JobEntry(
                submission=event.submission, secret=event.secret, submitted_s=at_s, settled_s=at_s
            )
            before = state.jobs.get(id_)
            if before is not None:
                # It counts on from the job of its name before it, whose reports may still be on their way.
                entry = dataclasses.replace(
                    entry,
                    attempt=before.attempt,
                    allocation=Allocation(generation=before.allocation.generation),
                )
            others = {other: e for other, e in state.jobs.items() if other != id_}
            return dataclasses.replace(state, jobs={**_without_oldest(others), id_: entry})
        case JobCancelled(job=job):
            entry = dataclasses.replace(_known(state, job), reason="its user took it away")
            return _over(state, entry, "cancelled", None)
        case HintsReceived(job=job, hints=hints):
            return _with_job(state, dataclasses.replace(_known(state, job), hints=hints))
        case PlanMade():
            return _planned(state, event)
        case ReasonsGiven(reasons=reasons):
            jobs = {
                id_: dataclasses.replace(entry, reason=reasons[id_])
                if id_ in reasons and not entry.is_over
                else entry
                for id_, entry in state.jobs.items()
            }
            return dataclasses.replace(state, jobs=jobs)
        case CoordinatorListening(job=job, address=address):
            entry = dataclasses.replace(_known(state, job), address=address)
            return _touched(_with_job(state, entry), entry, entry.allocation)
        case CoordinatorEnded():
            return _ended(state, event)
        case RequestAnswered():
            return _answered(state, event)


def work_of(state: State, name: str) -> NodeWork:
    """What a node has to do."""
    tasks = []
    for id_, entry in state.jobs.items():
        if entry.is_over:
            continue
        devices = entry.allocation.devices.get(name, ())
        coordinates = entry.home == name and entry.attempt > 0
        if not devices and not coordinates:
            continue
        submission = entry.submission
        each = submission.devices_per_process
        exactly = submission.spec.num_devices
        least = exactly or submission.spec.min_devices
        most = exactly or submission.spec.max_devices
        tasks.append(
            JobTask(
                job=id_,
                generation=entry.allocation.generation,
                devices=tuple(devices),
                command=submission.command,
                cwd=submission.cwd,
                workdir=submission.workdir,
                devices_per_process=each,
                min_processes=max(least // each, 1),
                max_processes=max(most // each, 1),
                attempt=entry.attempt,
                coordinates=coordinates,
                address=entry.address,
                runs=bool(entry.allocation.devices),
                secret=entry.secret,
            )
        )
    return NodeWork(node=name, version=state.nodes[name].version, tasks=tuple(tasks))


def owners(state: State) -> dict[tuple[str, int], str]:
    """Who has each device that somebody has."""
    return {
        (name, index): id_
        for id_, entry in state.jobs.items()
        for name, local in entry.allocation.devices.items()
        for index in local
    }


def received(entry: JobEntry, kind_of: Mapping[str, str], now_s: float) -> JobEntry:
    """The job with all that it has had counted up to now."""
    seconds = max(now_s - entry.settled_s, 0.0)
    if not entry.allocation.devices or not seconds:
        return dataclasses.replace(entry, settled_s=max(now_s, entry.settled_s))
    had, ran = dict(entry.received_s), dict(entry.ran_s)
    for name, local in entry.allocation.devices.items():
        kind = kind_of.get(name, "")
        had[kind] = had.get(kind, 0.0) + seconds * len(local)
    for kind in {kind_of.get(name, "") for name in entry.allocation.devices}:
        ran[kind] = ran.get(kind, 0.0) + seconds
    return dataclasses.replace(entry, received_s=had, ran_s=ran, settled_s=now_s)


def _known(state: State, job: str) -> JobEntry:
    if job not in state.jobs:
        raise ValueError(f"there is no job {job!r} at place {state.seq} of the journal")
    return state.jobs[job]


def _with_job(state: State, entry: JobEntry) -> State:
    return dataclasses.replace(state, jobs={**state.jobs, entry.spec.id: entry})


def _touched(state: State, entry: JobEntry, *allocations: Allocation) -> State:
    """The nodes of a job, which have something else to do now."""
    names = {name for allocation in allocations for name in allocation.devices}
    names |= {entry.home} if entry.home is not None else set()
    nodes = {
        name: dataclasses.replace(node, version=state.seq) if name in names else node
        for name, node in state.nodes.items()
    }
    return dataclasses.replace(state, nodes=nodes)


def _changed(state: State, entry: JobEntry, allocation: Allocation) -> JobEntry:
    """The job with other devices, a coordinator among them where it needs another one."""
    at_s = state.at_s
    before = received(entry, state.kind_of, at_s)
    had, has = entry.allocation.devices, allocation.devices
    if dict(had) == dict(has):
        return dataclasses.replace(before, allocation=allocation)
    past = before.past
    if past and past[-1].end_s is None:
        past = (*past[:-1], dataclasses.replace(past[-1], end_s=at_s))
    if has:
        past = (*past[-MOST_PAST:], HeldDevices(start_s=at_s, end_s=None, devices=has))
    entry = dataclasses.replace(
        before,
        allocation=allocation,
        phase="running" if has else "waiting",
        since_s=at_s if has else None,
        started_s=before.started_s if before.started_s is not None or not has else at_s,
        num_changes=before.num_changes + (before.started_s is not None and bool(has)),
        past=past,
    )
    if has and (not had or not _is_up(state, entry.home)):
        entry = _at_home(state, entry)
    return entry


def _at_home(state: State, entry: JobEntry) -> JobEntry:
    """The job with a new attempt, whose coordinator is where the last one was if that can be."""
    home = entry.home
    if not _is_up(state, home):
        named = sorted(n for n, e in state.nodes.items() if COORDINATES in e.node.labels)
        candidates = [*named, *sorted(entry.allocation.devices)]
        home = next((name for name in candidates if _is_up(state, name)), None)
    return dataclasses.replace(
        entry, home=home, attempt=entry.attempt + 1, attempted_s=state.at_s, address=None
    )


def _is_up(state: State, name: str | None) -> bool:
    entry = None if name is None else state.nodes.get(name)
    return entry is not None and entry.node.state != "down"


def _over(state: State, entry: JobEntry, phase: Phase, code: int | None) -> State:
    before = entry.allocation
    freed = dataclasses.replace(
        _changed(state, entry, Allocation(generation=before.generation + 1)),
        phase=phase,
        finished_s=state.at_s,
        code=code,
    )
    return _touched(_with_job(state, freed), freed, before)


def _without_oldest(jobs: Mapping[str, JobEntry]) -> Mapping[str, JobEntry]:
    over = [id_ for id_, entry in jobs.items() if entry.is_over]
    letters = sum(jobs[id_].submission.num_letters for id_ in over)
    gone = set[str]()
    for place, id_ in enumerate(over):
        if len(over) - place <= MOST_OVER and letters <= MOST_OVER_LETTERS:
            break
        letters -= jobs[id_].submission.num_letters
        gone.add(id_)
    return {id_: entry for id_, entry in jobs.items() if id_ not in gone} if gone else jobs


def _answered(state: State, event: RequestAnswered) -> State:
    """The state with an answer more; of too many or too long ones the oldest are forgotten."""
    answers = dict(state.answers)
    before = answers.pop(event.request, None)
    letters = state.num_answer_letters - (0 if before is None else len(before.body))
    answers[event.request] = StoredAnswer(digest=event.digest, status=event.status, body=event.body)
    letters += len(event.body)
    if len(answers) > MOST_ANSWERS or letters > MOST_ANSWER_LETTERS:
        for request in list(answers)[:-1]:  # a tenth at once: this looks at all of them
            if len(answers) <= 0.9 * MOST_ANSWERS and letters <= 0.9 * MOST_ANSWER_LETTERS:
                break
            letters -= len(answers.pop(request).body)
    return dataclasses.replace(state, answers=answers, num_answer_letters=letters)


def _joined(state: State, event: NodeJoined) -> State:
    """A node has come; what its agent before ran has ended, where it is another one."""
    name = event.node.name
    known = state.nodes.get(name)
    entry = NodeEntry(node=event.node, instance=event.instance, version=state.seq)
    if known is not None and known.drained is not None:
        drained = dataclasses.replace(event.node, state="draining")
        entry = dataclasses.replace(entry, node=drained, why=known.drained, drained=known.drained)
    state = dataclasses.replace(state, nodes={**state.nodes, name: entry})
    if known is None or known.instance == event.instance:
        return state
    for job in list(state.jobs.values()):
        if job.home == name and not job.is_over and job.allocation.devices:
            again = _at_home(state, job)
            state = _touched(_with_job(state, again), again, again.allocation)
    return state


def _node_changed(state: State, event: NodeChanged) -> State:
    known = state.nodes.get(event.name)
    if known is None:
        raise ValueError(f"there is no node {event.name!r} at place {state.seq} of the journal")
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
    if event.state != "down":
        return state
    for job in list(state.jobs.values()):
        if job.is_over or (event.name not in job.allocation.devices and job.home != event.name):
            continue
        state = _without_node(state, job, event.name)
    return state


def _without_node(state: State, job: JobEntry, name: str) -> State:
    """The job on what is left of its devices, or without any where that is too little."""
    before = job.allocation
    left = {other: local for other, local in before.devices.items() if other != name}
    count = sum(map(len, left.values()))
    least = job.spec.num_devices or job.spec.min_devices
    kept = left if count >= least else {}
    if dict(kept) != dict(before.devices):
        allocation = Allocation(devices=kept, generation=before.generation + 1)
        job = _changed(state, job, allocation)
    if job.home == name:
        job = (
            _at_home(state, job)
            if job.allocation.devices
            else dataclasses.replace(job, home=None, address=None)
        )
    return _touched(_with_job(state, job), job, before, job.allocation)


def _planned(state: State, event: PlanMade) -> State:
    state = dataclasses.replace(state, solved_s=event.solved_s, next_solve_s=event.next_solve_s)
    for id_, allocation in event.changes.items():
        job = _known(state, id_)
        before = job.allocation
        job = _changed(state, job, allocation)
        state = _touched(_with_job(state, job), job, before, allocation)
    return state


def _ended(state: State, event: CoordinatorEnded) -> State:
    job = _known(state, event.job)
    if event.code == 0:
        return _over(state, dataclasses.replace(job, reason="done"), "done", 0)
    is_short = state.at_s - job.attempted_s <= LONG_S
    if event.code == SAVED:  # it was told to, or none of its processes could go on
        moved = job.since_s is None or job.since_s > job.attempted_s
        saves = 0 if moved else job.saves + 1 if is_short else 1
        job = dataclasses.replace(job, saves=saves)
        if saves < MOST_SAVES:
            again = _at_home(state, job) if job.allocation.devices else job
            return _touched(_with_job(state, again), again, again.allocation)
        why = f"{saves} times in a row it has ended to go on (143), though it kept its devices"
        return _over(state, dataclasses.replace(job, reason=f"failed: {why}"), "failed", SAVED)
    # By a signal, its own or that of its processes: with their node, for want of memory, or because it was
    # told to stop and saved for too long.
    by_signal = event.code < 0 or event.code > 128
    if by_signal and not job.allocation.devices:
        return _touched(_with_job(state, job), job)
    failures = job.failures + 1 if is_short else 1
    job = dataclasses.replace(job, failures=failures)
    if by_signal and failures < MOST_FAILURES:
        again = _at_home(state, job)
        return _touched(_with_job(state, again), again, again.allocation)
    job = dataclasses.replace(job, reason=f"failed: {event.why or f'exit code {event.code}'}")
    return _over(state, job, "failed", event.code)
