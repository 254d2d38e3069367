"""The agent of a node: asks the service what is to be done, has it done, and tells what came of it.

Three threads. One asks and waits for the answer, one looks after the processes, one tells. Where the service
does not answer, everything goes on as it is, and all of them try again.
"""

import contextlib
import pathlib
import queue
import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from absl import logging

from jaxgoodput import _disk
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.cluster.client import Client, RequestRefused, Unreachable
from jaxgoodput.cluster.service.node.hints import hints_of
from jaxgoodput.cluster.service.node.jobs import Jobs, LaunchSettings
from jaxgoodput.cluster.service.wire import (
    DONE,
    FAILED,
    USAGE,
    VERSION,
    JobTask,
    Join,
    NodeWork,
    OutputLines,
    Receipt,
    Reports,
)
from jaxgoodput.specs import Hints, Node

IN_USE = 3  # what is left of an agent before has not ended, which it may yet
LOOK_S = 0.2
WAIT_S = 20.0  # for something to do, at once
AGAIN_S = 2.0
TELL_S = 0.5
LONGER_S = 10.0  # than the grace, to end what an agent before has left
PATIENCE = 20.0  # of what reading hints takes, until the next look
MOST_TOLD = 512 * 2**10  # bytes of all jobs' lines at once, as JSON: half of what the service takes


@dataclass(frozen=True, kw_only=True)
class NodeAgentSettings:
    """What `jaxgoodput node` was asked for."""

    node: Node
    place: LaunchSettings
    folder: pathlib.Path
    """Of this agent alone: two of one node would start everything twice."""
    hints_s: float = 5.0
    """From one look into the journals of runs to the next."""
    alone_s: float | None = None
    """Without a word of the service, after which its jobs save and end: they may run elsewhere by then."""


def run_node(
    part: NodeAgentSettings, client: Callable[[], Client], *, clock: Clock | None = None
) -> int:
    """Take part in the cluster until told to stop; an exit code. `client` makes connections.

    SIGTERM and SIGINT give the node up: its processes save and leave their jobs. What an agent that was
    killed has left is waited for. Raises InUse where that does not end: another agent of this node runs here.
    """
    clock = clock or SystemClock()
    part.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        agent = NodeAgent(part, client, clock, _hold(part, stack, clock))
        told = threading.Event()
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, lambda *_: told.set())
        return agent.run(told)


def _hold(part: NodeAgentSettings, stack: contextlib.ExitStack, clock: Clock) -> int:
    """The lock of the agent's folder, once the processes of the agent before have saved. Raises InUse."""
    until_s, is_said = clock.now() + 2 * part.place.grace_s + LONGER_S, False
    while True:
        try:
            return stack.enter_context(_disk.held(part.folder))
        except _disk.InUse as error:
            if clock.now() >= until_s:
                raise
            if not is_said:
                logging.warning("%s This agent waits for that.", error)
            is_said = True
            clock.sleep(LOOK_S)


class NodeAgent:
    """`run` takes part until it is told to stop, or another agent has come for the node."""

    def __init__(
        self,
        part: NodeAgentSettings,
        client: Callable[[], Client],
        clock: Clock,
        lock: int | None = None,
    ):
        self.instance = secrets.token_hex(8)
        self._part, self._client, self._clock = part, client, clock
        self._jobs = Jobs(part.place, clock, lock)
        self._work: queue.SimpleQueue[NodeWork] = queue.SimpleQueue()
        self._replaced: str | None = None
        self._is_over = threading.Event()
        self._has_failed = threading.Event()
        self._lock = threading.Lock()  # of the jobs
        self._is_away = False
        self._heard_s = clock.now()  # when the service answered last
        self._is_alone = False

    def run(self, told: threading.Event) -> int:
        """Until told; an exit code."""
        threads = [
            threading.Thread(target=self._or_end, args=(target,), daemon=True)
            for target in (self._ask, self._tell)
        ]
        for thread in threads:
            thread.start()
        # This thread starts the processes: they end with it.
        while not told.is_set() and self._replaced is None and not self._has_failed.is_set():
            with contextlib.suppress(queue.Empty):
                work = self._work.get(timeout=LOOK_S)
                with self._lock:
                    self._jobs.take(work)
            self._end_if_alone()
            with self._lock:
                self._jobs.look()
        # Beside the rest: processes are not to lose of their time to save what a deaf service takes.
        farewell = threading.Thread(target=self._say_goodbye, daemon=True)
        if self._replaced is None:
            farewell.start()
            threads.append(farewell)
        with self._lock:
            self._jobs.stop()
        while not self._jobs.is_idle:
            with self._lock:
                self._jobs.look()
            self._clock.sleep(LOOK_S)
        self._is_over.set()
        for thread in threads[1:]:
            thread.join(5.0)  # what it still has to tell
        if self._replaced is not None:
            logging.error("%s", self._replaced)
            return USAGE
        return FAILED if self._has_failed.is_set() else DONE

    def _end_if_alone(self) -> None:
        alone_s = self._clock.now() - self._heard_s
        if self._part.alone_s is None or self._is_alone or alone_s < self._part.alone_s:
            return
        logging.warning(
            "node %s: nothing was heard of the service for %.0f s. Its jobs save and end here.",
            self._part.node.name,
            alone_s,
        )
        self._is_alone = True
        with self._lock:
            self._jobs.stop()

    def _or_end(self, work: Callable[[], None]) -> None:
        """One of the threads: the agent ends with it, and whoever started the agent starts another one."""
        try:
            work()
        except Exception:
            logging.exception("node %s: a part of its agent has failed", self._part.node.name)
            self._has_failed.set()

    def _ask(self) -> None:
        client, version, joined = self._client(), 0, False
        name = self._part.node.name
        while not self._is_over.is_set() and self._replaced is None:
            try:
                if not joined:
                    join = Join(node=self._part.node, instance=self.instance, version=VERSION)
                    client.call("POST", "nodes", body=join, changes=True, type_=Receipt)
                    joined, version = True, 0
                work = client.call(
                    "GET",
                    "nodes",
                    name,
                    "work",
                    type_=NodeWork,
                    instance=self.instance,
                    after=version,
                    wait_s=WAIT_S,
                )
                if self._is_away:
                    logging.warning("node %s: the service answers again", name)
                self._is_away, self._heard_s = False, self._clock.now()
                if work.version != version or self._is_alone:
                    version, self._is_alone = work.version, False
                    self._work.put(work)
            except Unreachable as error:
                self._tell_of_absence(error)
                self._clock.sleep(AGAIN_S)
            except RequestRefused as error:
                if error.status == 409:  # another agent of the node, or another version
                    self._replaced = str(error)
                elif error.status == 404:  # a service that has lost its folder
                    joined = False
                else:  # a token that is no longer known, or what stands between: no job is stopped for it
                    self._tell_of_absence(error)
                self._clock.sleep(AGAIN_S)

    def _tell(self) -> None:
        client = self._client()
        hints_s, numbers = 0.0, dict[str, tuple[int, int]]()
        while not (self._is_over.wait(TELL_S) and self._jobs.is_idle and not self._has_news()):
            try:
                self._tell_reports(client, numbers)
                self._tell_lines(client)
            except (Unreachable, RequestRefused) as error:
                self._tell_of_absence(error)
                if self._is_over.is_set():
                    return  # nobody hears it
                self._clock.sleep(AGAIN_S)
                continue
            if self._clock.now() >= hints_s:
                begun_s = self._clock.now()
                self._tell_hints(client, numbers)
                # Journals that have grown long are read less often.
                took_s = self._clock.now() - begun_s
                hints_s = self._clock.now() + max(self._part.hints_s, PATIENCE * took_s)

    def _tell_reports(self, client: Client, numbers: dict[str, tuple[int, int]]) -> None:
        """Where coordinators are and how they ended; in a request of its own, which no line delays."""
        with self._lock:
            reports = self._jobs.reports()
        if not reports:
            return
        try:
            if any(report.code is not None for report in reports):
                self._tell_hints(
                    client, numbers
                )  # how far it came, which is refused once it is over
            self._post(client, Reports(instance=self.instance, coordinators=tuple(reports)))
        except (Unreachable, RequestRefused):
            with self._lock:
                self._jobs.give_back(reports)
            raise

    def _tell_lines(self, client: Client) -> None:
        with self._lock:
            lines = self._jobs.lines(MOST_TOLD)
        if not lines:
            return
        told = tuple(OutputLines(job=job, text=text) for job, _, text in lines)
        try:
            self._post(client, Reports(instance=self.instance, lines=told))
        except (Unreachable, RequestRefused) as error:
            if isinstance(error, RequestRefused) and error.status == 413:  # as it would be again
                logging.warning("%d lines are left out: %s", sum(map(_num_lines, told)), error)
                return
            for _, kept, text in lines:
                kept.give_back(text)
            raise

    def _post(self, client: Client, told: Reports) -> None:
        name = self._part.node.name
        client.call("POST", "nodes", name, "reports", body=told, changes=True, type_=Receipt)

    def _has_news(self) -> bool:
        with self._lock:
            reports = self._jobs.reports()
            self._jobs.give_back(reports)
        return bool(reports)

    def _tell_hints(self, client: Client, numbers: dict[str, tuple[int, int]]) -> None:
        """What the journals of runs say that are new since the last look; by the coordinator's node only."""
        with self._lock:
            tasks = list(self._jobs.tasks)
        for task in tasks:
            if task.workdir is None or not task.coordinates or not task.runs:
                continue
            found = self._hints_of(task, task.workdir)
            if found is None:
                continue
            generation, number = numbers.get(task.job, (task.generation, -1))
            if found.number == number or generation != task.generation:
                # Where the generation is new, what is there was measured under the last one: what comes next.
                numbers[task.job] = task.generation, found.number
                continue
            try:
                client.call("POST", "jobs", task.job, "hints", body=found, type_=Receipt)
                numbers[task.job] = task.generation, found.number
            except Unreachable as error:
                self._tell_of_absence(error)
                return
            except RequestRefused as error:  # its job is over, or has other devices by now
                logging.info("hints of %s: %s", task.job, error)

    def _hints_of(self, task: JobTask, workdir: str) -> Hints | None:
        """What a run says; None where it says nothing, or what cannot be read, which costs that job alone."""
        try:
            return hints_of(
                pathlib.Path(task.cwd) / workdir,
                self._part.node.kind,
                task.generation,
                task.devices_per_process,
            )
        except Exception:
            logging.exception("hints of %s cannot be read", task.job)
            return None

    def _say_goodbye(self) -> None:
        try:
            self._client().call(
                "POST", "nodes", self._part.node.name, "down", changes=True, type_=Receipt
            )
        except (Unreachable, RequestRefused) as error:
            logging.warning("the service could not be told that this node goes: %s", error)

    def _tell_of_absence(self, error: Exception) -> None:
        if not self._is_away:
            self._is_away = True
            logging.warning(
                "node %s: %s. Its jobs go on with what they have.", self._part.node.name, error
            )


def _num_lines(lines: OutputLines) -> int:
    return lines.text.count("\n")
