"""The processes of jobs on one node, brought to what the service says, a little at each look.

A job's coordinator is `jaxgoodput run --nnodes MIN:MAX`, and every process of the job is a
`jaxgoodput agent` of its own, a host as the launcher sees it. So a job gets and loses devices as hosts join
and leave: the others go on with the state in memory, and nobody restarts. A device passes from one job to
another when the process of the first has gone.
"""

import errno
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.node.process import OutputBuffer, Process
from jaxgoodput.cluster.service.wire import JobTask, NodeWork, Report

AT = "the job is at "  # what a coordinator says when it listens
LONGEST_BACKOFF_S = 30.0
MOST_REPORTS = 40  # at once, each of up to 12 KB
MOST_OF_JOB = 64 * 2**10  # bytes of a job's lines at once, as JSON
CANNOT = 2  # the exit code of what cannot be started
LATER = 143  # of what can be tried again, as after a save
LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.E2BIG)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Where the processes are started, and with how much patience."""

    node: str
    host: str
    """By which other nodes reach this one."""
    grace_s: float = 60.0
    """From being told to stop to being killed, for saving."""
    join_s: float = 3.0
    """For which a job that starts waits for more than its least."""
    admit_every_s: float = 2.0
    silent_s: float = 10.0


@dataclass
class _Member:
    """A process of a job."""

    process: Process
    address: str


@dataclass
class _Job:
    """What a job has here."""

    task: JobTask
    coordinator: Process | None = None
    attempt: int = 0
    """Of the coordinator that was started last."""
    again_s: float = 0.0
    """When the next one is started at the earliest."""
    said: list[str] = field(default_factory=list)
    """Its last lines."""
    told: str | None = None
    """Its address, where it was reported."""
    members: dict[tuple[int, ...], _Member] = field(default_factory=dict)
    failures: dict[tuple[int, ...], tuple[int, float]] = field(default_factory=dict)
    """Of a process in a row, and when it is tried again."""
    lines: OutputBuffer = field(default_factory=OutputBuffer)
    is_over: bool = False


class Jobs:
    """All jobs of a node. `look` does what is to be done now; it is called a few times a second.

    `lock`: the descriptor of what processes hold as long as they run.
    """

    def __init__(self, place: LaunchSettings, clock: Clock, lock: int | None = None):
        self._place, self._clock, self._held = place, clock, lock
        self._jobs: dict[str, _Job] = {}
        self._reports: list[Report] = []
        self._said = threading.Lock()  # of the reports, to which readers of processes add
        self._turn = 0  # whose lines come first

    @property
    def is_idle(self) -> bool:
        """Whether no process is left."""
        return not any(job.coordinator or job.members for job in self._jobs.values())

    @property
    def tasks(self) -> Sequence[JobTask]:
        """What is being done."""
        return [job.task for job in self._jobs.values() if not job.is_over]

    def take(self, work: NodeWork) -> None:
        """What the service says is to be done."""
        tasks = {task.job: task for task in work.tasks}
        for id_, task in tasks.items():
            if id_ not in self._jobs or self._jobs[id_].task.secret != task.secret:
                if id_ in self._jobs and self._has_processes(self._jobs[id_]):
                    # Another job of that name, which waits until those of all before it have gone.
                    before = self._jobs.pop(id_)
                    before.is_over = True
                    self._jobs[f"{id_} of {before.task.secret}"] = before
                self._jobs[id_] = _Job(task)
            self._jobs[id_].task, self._jobs[id_].is_over = task, False
        for id_, job in self._jobs.items():
            if id_ not in tasks:
                job.is_over = True

    def stop(self) -> None:
        """End everything."""
        for job in self._jobs.values():
            job.is_over = True

    def reports(self) -> list[Report]:
        """What is to be told of coordinators, as many as go at once; whoever takes it has to tell it."""
        with self._said:
            found, self._reports = self._reports[:MOST_REPORTS], self._reports[MOST_REPORTS:]
        return found

    def give_back(self, reports: Sequence[Report]) -> None:
        """These could not be told."""
        with self._said:
            self._reports = [*reports, *self._reports]

    def lines(self, most_bytes: int) -> Sequence[tuple[str, OutputBuffer, str]]:
        """What processes wrote since the last call: of which job, and where it is given back.

        `most_bytes` is of the JSON of all together. Where that is not enough, the jobs take turns.
        """
        found, left = [], most_bytes
        jobs = list(self._jobs.values())
        self._turn = (self._turn + 1) % max(len(jobs), 1)
        for job in (*jobs[self._turn :], *jobs[: self._turn]):
            text = job.lines.take(min(left, MOST_OF_JOB)) if left > 0 else ""
            if text:
                found.append((job.task.job, job.lines, text))
                left -= len(json.dumps(text))
        return found

    def look(self) -> None:
        """Start what is missing, end what is too much, and take note of what has ended."""
        for job in self._jobs.values():
            self._look_at_coordinator(job)
            self._look_at_members(job)
        self._jobs = {
            id_: job
            for id_, job in self._jobs.items()
            if not job.is_over or self._has_processes(job)
        }

    # -- the coordinator -------------------------------------------------------------------------

    def _look_at_coordinator(self, job: _Job) -> None:
        task = job.task
        if job.coordinator is not None:
            code = job.coordinator.code()
            if code is not None:
                job.coordinator = None
                self._report_end(job, code)
            elif job.is_over or not task.runs or not task.coordinates or task.attempt > job.attempt:
                job.coordinator.stop(2 * self._place.grace_s)
            return
        wanted = task.coordinates and task.runs and not job.is_over
        if not wanted or task.attempt <= job.attempt or self._clock.now() < job.again_s:
            return
        job.attempt, job.said, job.told = task.attempt, [], None
        place = self._place
        command = [
            *(sys.executable, "-m", "jaxgoodput.cli", "run", "--secret-stdin"),
            *("--nnodes", f"{task.min_processes}:{task.max_processes}", "--local-hosts", "0"),
            *("--rdzv-endpoint", f"{place.host}:0", "--exclude-slow", "0"),
            *("--join-s", f"{place.join_s:g}", "--admit-every-s", f"{place.admit_every_s:g}"),
            *("--grace-s", f"{place.grace_s:g}", "--silent-s", f"{place.silent_s:g}"),
            *("--", *task.command),
        ]
        try:
            job.coordinator = self._start(job, command, lambda line: self._hear(job, line))
        except OSError as error:
            # A folder that is missing stays so; processes or memory that are short now come back.
            lasts = error.errno in LASTING or isinstance(error, FileNotFoundError)
            job.again_s = self._clock.now() + LONGEST_BACKOFF_S
            job.lines.add(f"jaxgoodput: {place.node}: {error}")
            self._report(job, code=CANNOT if lasts else LATER, why=str(error))

    def _hear(self, job: _Job, line: str) -> None:
        """A line of the coordinator's; it says where it is, and at its end why it ended."""
        job.lines.add(line)
        job.said = [*job.said[-4:], line]
        if AT in line and job.told is None:
            job.told = line.split(AT)[1].split(",")[0][:200]
            self._report(job, address=job.told)

    def _report_end(self, job: _Job, code: int) -> None:
        said = [line for line in job.said if line.startswith("jaxgoodput: ")]
        why = said[-1].removeprefix("jaxgoodput: ") if said and code else ""
        self._report(job, code=code, why=why)

    def _report(
        self, job: _Job, address: str | None = None, code: int | None = None, why: str = ""
    ) -> None:
        name, attempt = job.task.job, job.attempt
        with self._said:
            self._reports.append(
                Report(job=name, attempt=attempt, address=address, code=code, why=why[:2000])
            )

    # -- the processes ---------------------------------------------------------------------------

    def _look_at_members(self, job: _Job) -> None:
        task, now_s = job.task, self._clock.now()
        for group, member in list(job.members.items()):
            code = member.process.code()
            if code is None:
                continue
            del job.members[group]
            count = 0 if code in (0, 143) else job.failures.get(group, (0, 0.0))[0] + 1
            wait_s = min(2.0**count, LONGEST_BACKOFF_S) if count else 1.0
            job.failures[group] = count, now_s + wait_s
        runs = task.runs and not job.is_over and task.address is not None
        wanted = set(groups(task.devices, task.devices_per_process)) if runs else set()
        for group, member in job.members.items():
            if group not in wanted or member.address != task.address:
                member.process.stop(self._place.grace_s + 10.0)
        for group in sorted(wanted - set(job.members)):
            if now_s < job.failures.get(group, (0, 0.0))[1] or not self._is_free(group):
                continue
            assert task.address is not None  # as `runs` says
            try:
                process = self._start(job, self._member_command(task, group), job.lines.add)
            except OSError as error:
                job.failures[group] = 1, now_s + LONGEST_BACKOFF_S
                job.lines.add(f"jaxgoodput: {self._place.node}: {error}")
                continue
            job.members[group] = _Member(process, task.address)

    def _member_command(self, task: JobTask, group: tuple[int, ...]) -> list[str]:
        place = self._place
        return [
            *(sys.executable, "-m", "jaxgoodput.cli", "agent", "--secret-stdin"),
            *("--name", f"{place.node}:{group[0]}", "--rdzv-endpoint", task.address or ""),
            *("--nproc-per-node", "1", "--devices-per-process", str(len(group))),
            *("--local-devices", ",".join(map(str, group)), "--reconnect-s", "60"),
            *("--grace-s", f"{place.grace_s:g}", "--silent-s", f"{place.silent_s:g}"),
            *("--", *task.command),
        ]

    def _is_free(self, group: tuple[int, ...]) -> bool:
        """Whether no process of any job has one of these devices."""
        taken = {index for job in self._jobs.values() for its in job.members for index in its}
        return not taken & set(group)

    def _start(self, job: _Job, command: Sequence[str], on_line) -> Process:
        task = job.task
        return Process(
            command, task.cwd, task.secret, on_line=on_line, clock=self._clock, lock=self._held
        )

    @staticmethod
    def _has_processes(job: _Job) -> bool:
        return job.coordinator is not None or bool(job.members)


def groups(devices: Sequence[int], each: int) -> list[tuple[int, ...]]:
    """The devices of each process: whole multiples of `each` first, so that those that stay are the same.

    >>> groups((0, 1, 2, 3), 2), groups((1, 2, 4, 5), 2)
    ([(0, 1), (2, 3)], [(4, 5), (1, 2)])
    """
    left = sorted(devices)
    found = []
    for first in range(0, max(left, default=-1) + 1, each):
        group = tuple(range(first, first + each))
        if set(group) <= set(left):
            found.append(group)
            left = [index for index in left if index not in group]
    found += [tuple(left[i : i + each]) for i in range(0, len(left) - each + 1, each)]
    return found
