"""The processes of jobs on one node, brought step by step to what the service wants.

The coordinator of a job is `jaxgoodput run --nnodes MIN:MAX`. Each of its processes is a `jaxgoodput agent`
of its own, which the launcher sees as a host. So a job grows and shrinks as hosts join and leave: the other
processes keep their state in memory and do not restart. A device passes to another job only once the process
of the first job has ended.
"""

import errno
import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from jaxgoodput._exits import DONE, SAVED, USAGE, RunFacts, run_exit
from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.node.process import OutputBuffer, Process
from jaxgoodput.cluster.service.wire import (
    LONGEST_WHY,
    NAME,
    JobTask,
    NodeReport,
    NodeWork,
    Report,
)
from jaxgoodput.launcher.elastic import fitness
from jaxgoodput.launcher.variables import to_line

RELEASED = " is released: "  # an agent prints its name and this if its job needs it no more
AT = "the job is at "  # a coordinator prints this and its address once it listens
LONGEST_BACKOFF_S = 30.0
MOST_REPORTS = 40  # sent at once, each of up to 12 KB
MOST_OF_JOB = 64 * 2**10  # bytes of a job's lines sent at once, as JSON
LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.E2BIG)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """A node's name and address, and how long its jobs' processes may take to join, answer and save."""

    node: str
    """The name of this node."""
    host: str
    """The address of this node for other nodes."""
    grace_s: float = 60.0
    """Time to save between SIGTERM and SIGKILL."""
    join_s: float = 3.0
    """How long a starting job waits for more processes than its minimum."""
    admit_every_s: float = 2.0
    """Least time that a job trains with the same processes before it lets more of them in."""
    silent_s: float = 10.0
    """How long a process may go without a heartbeat before it is killed."""


@dataclass
class _Member:
    """A process that works on a job, and the address of the coordinator that it joined."""

    process: Process
    address: str


@dataclass
class NodeJob:
    """A job on this node, with the coordinator and the processes that run here."""

    task: JobTask
    coordinator: Process | None = None
    attempt: int = 0
    """The attempt of the last coordinator started here."""
    retry_s: float = 0.0
    """Earliest time to start the next coordinator."""
    last_lines: list[str] = field(default_factory=list)
    """The coordinator's last few lines."""
    reported_address: str | None = None
    members: dict[tuple[int, ...], _Member] = field(default_factory=dict)
    """Processes by their devices."""
    failures: dict[tuple[int, ...], tuple[int, float]] = field(default_factory=dict)
    """Consecutive failures by devices, and the time of the next try."""
    released: dict[tuple[int, ...], str] = field(default_factory=dict)
    """The address of the coordinator that needs these devices no more, by devices."""
    lines: OutputBuffer = field(default_factory=OutputBuffer)
    is_over: bool = False

    @property
    def has_processes(self) -> bool:
        """Whether the coordinator or a process of this job runs here."""
        return self.coordinator is not None or bool(self.members)

    @property
    def address(self) -> str | None:
        """The coordinator that processes join; None if none may run."""
        return self.task.address if self.task.runs and not self.is_over else None

    @property
    def wants_coordinator(self) -> bool:
        """Whether the job's coordinator has to run here."""
        return self.task.coordinates and self.task.runs and not self.is_over


class Jobs:
    """All jobs of a node. Call `look` a few times per second: it starts and ends processes as needed.

    `lock` is a file descriptor that every process inherits, and holds locked while it runs.
    """

    COORDINATOR: ClassVar = ("--reports-hosts",)
    """More options of the coordinators."""

    def __init__(self, place: LaunchSettings, clock: Clock, lock: int | None = None):
        self._place, self._clock, self._held = place, clock, lock
        self._jobs: dict[str, NodeJob] = {}
        self._reports: list[Report | NodeReport] = []
        self._reporting = threading.Lock()  # of `_reports`: threads that read output add to it
        self._turn = 0  # the job whose lines come first

    @property
    def is_idle(self) -> bool:
        """Whether no process of any job runs on this node."""
        return not any(job.has_processes for job in self._jobs.values())

    @property
    def tasks(self) -> Sequence[JobTask]:
        """The tasks (parts of jobs) that the service has given to this node."""
        return [job.task for job in self._jobs.values() if not job.is_over]

    def take(self, work: NodeWork) -> None:
        """Accept the service's list of tasks for this node. Jobs that are not on it are ended here."""
        tasks = {task.job: task for task in work.tasks}
        for id_, task in tasks.items():
            before = self._jobs.get(id_)
            if before is None or before.task.secret != task.secret:
                if before is not None and before.has_processes:
                    # A new job of the same name. Its devices are free only once the old job has ended here.
                    before.is_over = True
                    del self._jobs[id_]
                    self._jobs[f"{id_} of {before.task.secret}"] = before
                self._jobs[id_] = NodeJob(task)
            self._jobs[id_].task, self._jobs[id_].is_over = task, False
        for id_, job in self._jobs.items():
            if id_ not in tasks:
                job.is_over = True

    def stop(self) -> None:
        """Mark all jobs of this node as over; the next calls of `look` end their processes."""
        for job in self._jobs.values():
            job.is_over = True

    def reports(self) -> list[Report | NodeReport]:
        """Remove and return the next reports about and of coordinators. The caller must send them."""
        with self._reporting:
            found, self._reports = self._reports[:MOST_REPORTS], self._reports[MOST_REPORTS:]
        return found

    def give_back(self, reports: Sequence[Report | NodeReport]) -> None:
        """Put reports back that could not be sent, so that `reports` returns them again."""
        with self._reporting:
            self._reports = [*reports, *self._reports]

    def lines(self, most_bytes: int) -> Sequence[tuple[str, OutputBuffer, str]]:
        """Remove and return output, up to `most_bytes` as JSON: for each job its name, buffer and text.

        If not all of it fits, the jobs take turns. Text that cannot be sent goes back into its buffer.
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
        """Start processes that tasks need, end those that no task needs, and note which have ended."""
        for job in self._jobs.values():
            self._look_at_coordinator(job)
            self.look_at_processes(job)
        self._jobs = {
            id_: job for id_, job in self._jobs.items() if not job.is_over or job.has_processes
        }

    # -- the coordinator -------------------------------------------------------------------------

    def _look_at_coordinator(self, job: NodeJob) -> None:
        task = job.task
        if job.coordinator is None:
            is_new = task.attempt > job.attempt
            if job.wants_coordinator and is_new and self._clock.now() >= job.retry_s:
                self._start_coordinator(job)
            return
        code = job.coordinator.code()
        if code is not None:
            job.coordinator = None
            said = [line for line in job.last_lines if line.startswith("jaxgoodput: ")]
            why = said[-1].removeprefix("jaxgoodput: ") if said and code else ""
            self._report(job, code=code, why=why)
        elif not job.wants_coordinator or task.attempt > job.attempt:
            job.coordinator.stop(2 * self._place.grace_s)

    def _start_coordinator(self, job: NodeJob) -> None:
        task, place = job.task, self._place
        job.attempt, job.last_lines, job.reported_address = task.attempt, [], None
        options = [
            *("run", "--secret-stdin", "--nnodes", f"{task.min_processes}:{task.max_processes}"),
            *("--local-hosts", "0", "--rdzv-endpoint", f"{place.host}:0", *self.COORDINATOR),
            *("--join-s", f"{place.join_s:g}", "--admit-every-s", f"{place.admit_every_s:g}"),
        ]
        try:
            job.coordinator = self._start(job, options, lambda line: self._hear(job, line))
        except OSError as error:
            # A missing folder stays missing; a lack of processes or memory passes.
            lasts = error.errno in LASTING or isinstance(error, FileNotFoundError)
            job.retry_s = self._clock.now() + LONGEST_BACKOFF_S
            job.lines.add(f"jaxgoodput: {place.node}: {error}")
            # Nothing has begun, so there is nothing to save; only a wrong command is not worth a restart.
            code = USAGE if lasts else run_exit(RunFacts(stopped_by=str(error))).code
            self._report(job, code=code, why=str(error))

    def _hear(self, job: NodeJob, line: str) -> None:
        """Handle a line of the coordinator: its address, a report of a host, or at its end the reason."""
        try:
            report = fitness.from_line(line)
        except ValueError as error:
            job.lines.add(f"jaxgoodput: {self._place.node}: a report of a host is ignored: {error}")
            return
        if report is not None:
            self.report_node(job, report)
            return
        job.lines.add(line)
        job.last_lines = [*job.last_lines[-4:], line]
        if AT in line and job.reported_address is None:
            job.reported_address = line.split(AT)[1].split(",")[0][:200]
            self._report(job, address=job.reported_address)

    def _report(
        self, job: NodeJob, address: str | None = None, code: int | None = None, why: str = ""
    ) -> None:
        name, attempt = job.task.job, job.attempt
        self._send(
            Report(job=name, attempt=attempt, address=address, code=code, why=why[:LONGEST_WHY])
        )

    def _send(self, report: Report | NodeReport) -> None:
        with self._reporting:
            self._reports.append(report)

    def report_node(self, job: NodeJob, report: fitness.HostReport) -> None:
        """Pass on what the coordinator reports of a host, which is one process of a job on a node."""
        node = report.host.rpartition(":")[0]
        if re.fullmatch(NAME, node) is None:
            return  # a host that is no node has joined by itself; the service knows nothing of it
        found = NodeReport(
            job=job.task.job,
            attempt=job.attempt,
            node=node,
            fault=report.fault,
            why=report.why[:LONGEST_WHY],
            slow_ratio=report.numbers.get("slow_ratio"),
        )
        self._send(found)

    # -- the processes ---------------------------------------------------------------------------

    def look_at_processes(self, job: NodeJob) -> None:
        """Start and end processes of a job; here as children. A subclass may run them elsewhere."""
        self._note_ends(job)
        self._look_at_members(job)

    def _note_ends(self, job: NodeJob) -> None:
        """Remove the processes that have ended, and set the time at which each may start again."""
        for group, member in list(job.members.items()):
            code = member.process.code()
            if code is None:
                continue
            del job.members[group]
            if job.released.get(group) == member.address:
                task = job.task
                self._send(Report(job=task.job, attempt=task.attempt, released=group))
            count = 0 if code in (DONE, SAVED) else job.failures.get(group, (0, 0.0))[0] + 1
            wait_s = min(2.0**count, LONGEST_BACKOFF_S) if count else 1.0
            job.failures[group] = count, self._clock.now() + wait_s

    def _look_at_members(self, job: NodeJob) -> None:
        task, now_s, address = job.task, self._clock.now(), job.address
        wanted = set[tuple[int, ...]]()
        if address is not None:
            wanted = set(groups(task.devices, task.devices_per_process))
        for group in set(job.released) - wanted:  # they may be given to the job again
            del job.released[group]
        for group, member in job.members.items():
            if group not in wanted or member.address != address:
                member.process.stop(self._place.grace_s + 10.0)
        needed = {group for group in wanted if job.released.get(group) != address}
        for group in sorted(needed - set(job.members)):
            if now_s >= job.failures.get(group, (0, 0.0))[1] and self._is_free(group):
                assert address is not None  # or no group would be wanted
                self._start_member(job, group, address)

    def _start_member(self, job: NodeJob, group: tuple[int, ...], address: str) -> None:
        name = f"{self._place.node}:{group[0]}"
        options = [
            *("agent", "--secret-stdin", "--name", name),
            *("--rdzv-endpoint", address, "--nproc-per-node", "1", "--reconnect-s", "60"),
            *("--devices-per-process", str(len(group))),
            *("--local-devices", ",".join(map(str, group))),
        ]
        try:
            process = self._start(
                job, options, partial(self._hear_member, job, group, name, address)
            )
        except OSError as error:
            job.failures[group] = 1, self._clock.now() + LONGEST_BACKOFF_S
            job.lines.add(f"jaxgoodput: {self._place.node}: {error}")
        else:
            job.members[group] = _Member(process, address)

    def _hear_member(
        self, job: NodeJob, group: tuple[int, ...], name: str, address: str, line: str
    ) -> None:
        """Handle a line of an agent, which may say that the job does not need it any more."""
        job.lines.add(line)
        if line.startswith(f"jaxgoodput: {name}{RELEASED}"):
            job.released[group] = address

    def _is_free(self, group: tuple[int, ...]) -> bool:
        """Whether no process of any job uses one of these devices."""
        taken = {index for job in self._jobs.values() for its in job.members for index in its}
        return not taken & set(group)

    def _start(
        self, job: NodeJob, options: Sequence[str], on_line: Callable[[str], None]
    ) -> Process:
        """Start `jaxgoodput` with these options and the job's command. Raises OSError.

        It reads the job's secret, and an agent its variables, from its standard input.
        """
        task, place = job.task, self._place
        told = task.secret
        if task.variables and options[0] == "agent":
            options = [*options, "--env-stdin"]
            told += f"\n{to_line(dict(task.variables))}"
        command = [
            *(sys.executable, "-m", "jaxgoodput.cli", *options),
            *("--grace-s", f"{place.grace_s:g}", "--silent-s", f"{place.silent_s:g}"),
            *("--", *task.command),
        ]
        return Process(
            command,
            task.cwd,
            told,
            on_line=on_line,
            clock=self._clock,
            lock=self._held,
        )


def groups(devices: Sequence[int], each: int) -> list[tuple[int, ...]]:
    """Divide devices among processes of `each` devices.

    Groups that start at a multiple of `each` come first, so that most groups stay the same as devices change.

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
