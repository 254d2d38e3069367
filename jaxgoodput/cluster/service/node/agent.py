"""The agent of a node: it asks the service for work, runs it, and reports the results.

The thread that calls `run` looks after the processes. Two workers beside it ask for work and send reports. If
the service does not answer, the processes keep running and the workers try again.
"""

import contextlib
import math
import pathlib
import queue
import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from absl import logging

from jaxgoodput import _disk
from jaxgoodput._exits import DONE, FAILED, USAGE
from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.cluster.client import Client, RequestRefused, Unreachable
from jaxgoodput.cluster.service import wire
from jaxgoodput.cluster.service.node.hints import hints_of
from jaxgoodput.cluster.service.node.jobs import Jobs, LaunchSettings
from jaxgoodput.cluster.service.wire import VERSION, JobTask, NodeWork, Receipt
from jaxgoodput.specs import Hints, Node

IN_USE = 3  # exit code while processes of an earlier agent still run, which may yet end
LOOK_S = 0.2
ALIVE, ALIVE_S = "alive", 5.0  # a file in the agent's folder, and how often it is touched
WAIT_S = 20.0  # for how long one request waits for new work
AGAIN_S = 2.0
TELL_S = 0.5
LONGER_S = 10.0  # beyond the grace period, for processes of an earlier agent to end
PATIENCE = 20.0  # hints are read again after this multiple of the time that reading takes
MOST_TOLD = 512 * 2**10  # bytes of output sent at once, as JSON: half of what the service accepts

# By job, the generation and number of its hints when they were last read.
HintNumbers = dict[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class NodeAgentSettings:
    """The options of `jaxgoodput node`."""

    node: Node
    place: LaunchSettings
    folder: pathlib.Path
    """The agent's own folder. Its lock prevents two agents of one node, which would start all jobs twice."""
    hints_s: float = 5.0
    """Seconds between two reads of the journals of runs."""
    alone_s: float | None = None
    """Seconds without contact to the service after which jobs save and end, because the service may have
    started them elsewhere; None lets them run on."""


def run_node(
    part: NodeAgentSettings,
    client: Callable[[], Client],
    *,
    clock: Clock | None = None,
    jobs: Callable[[LaunchSettings, Clock, int | None], Jobs] = Jobs,
) -> int:
    """Run a node's agent until it is told to stop, and return its exit code. `client` opens connections.

    `jobs` makes what runs the processes of jobs, by default as children of this process.

    After SIGTERM or SIGINT the node's processes save and leave their jobs. If an earlier agent was killed,
    its processes must end first; raises InUse if they do not, because then another agent of this node runs
    here.
    """
    clock = clock or SystemClock()
    part.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        agent = NodeAgent(part, client, clock, jobs(part.place, clock, _hold(part, stack, clock)))
        told = threading.Event()
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, lambda *_: told.set())
        return agent.run(told)


def _hold(part: NodeAgentSettings, stack: contextlib.ExitStack, clock: Clock) -> int:
    """Wait for the lock of the agent's folder while processes of an earlier agent save. Raises InUse."""
    until_s, is_said = clock.now() + 2 * part.place.grace_s + LONGER_S, False
    while True:
        try:
            return stack.enter_context(_disk.held(part.folder))
        except _disk.InUse as error:
            if clock.now() >= until_s:
                raise
            if not is_said:
                logging.warning("%s This agent waits until the folder is free.", error)
            is_said = True
            clock.sleep(LOOK_S)


class NodeAgent:
    """Runs the jobs of one node. `run` ends when it is told to stop or another agent replaces this one."""

    def __init__(
        self,
        part: NodeAgentSettings,
        client: Callable[[], Client],
        clock: Clock,
        jobs: Jobs | None = None,
    ):
        self.instance = secrets.token_hex(8)
        self._part, self._client, self._clock = part, client, clock
        self._jobs = Jobs(part.place, clock) if jobs is None else jobs
        self._lock = threading.Lock()  # of `_jobs`
        self._work: queue.SimpleQueue[NodeWork] = queue.SimpleQueue()
        self._replaced: str | None = None
        self._has_failed = False
        self._is_away = False  # the service did not answer last
        self._heard_s = clock.now()  # time of the service's last answer
        self._is_alone = False  # the jobs were ended for lack of contact
        self._shown_s = -math.inf  # when `ALIVE` was touched last

    def run(self, told: threading.Event) -> int:
        """Run the jobs that the service assigns until `told` is set; return the exit code."""
        ask = Worker("node-ask", self._ask, on_error=self._fail)
        tell = Worker("node-tell", self._tell, on_error=self._fail)
        # Processes start on this thread, because the kernel ends them with the thread that started them.
        while not told.is_set() and self._replaced is None and not self._has_failed:
            with contextlib.suppress(queue.Empty):
                work = self._work.get(timeout=LOOK_S)
                with self._lock:
                    self._jobs.take(work)
            self._end_if_alone()
            with self._lock:
                self._jobs.look()
            self._show_life()
        senders = [tell]
        if self._replaced is None:
            # On a worker: a service that does not answer must not cost the processes their time to save.
            failed = partial(logging.error, "the farewell to the service failed: %r")
            senders.append(Worker("node-goodbye", self._say_goodbye, on_error=failed))
        self._end_jobs()
        ask.stop()
        for sender in senders:
            sender.stop()
            sender.join(5.0)  # the last reports
        if self._replaced is not None:
            logging.error("%s", self._replaced)
            return USAGE
        return FAILED if self._has_failed else DONE

    def _end_jobs(self) -> None:
        with self._lock:
            self._jobs.stop()
        while not self._jobs.is_idle:
            with self._lock:
                self._jobs.look()
            self._show_life()
            self._clock.sleep(LOOK_S)

    def _show_life(self) -> None:
        """Touch a file, by whose age others can tell whether the processes are still looked after."""
        if self._clock.now() >= self._shown_s + ALIVE_S:
            self._shown_s = self._clock.now()
            (self._part.folder / ALIVE).touch()

    def _end_if_alone(self) -> None:
        alone_s = self._clock.now() - self._heard_s
        if self._part.alone_s is None or self._is_alone or alone_s < self._part.alone_s:
            return
        logging.warning(
            "node %s: the service has not answered for %.0f s. The jobs here save and end, because it may "
            "have started them elsewhere.",
            self._part.node.name,
            alone_s,
        )
        self._is_alone = True
        with self._lock:
            self._jobs.stop()

    def _fail(self, error: BaseException) -> None:
        """End the agent because one of its threads failed. Its engine starts another agent."""
        name = self._part.node.name
        logging.error(
            "node %s: a thread of its agent has failed. The jobs here save and end, and then the agent ends. "
            "Start it again if no engine does so.",
            name,
            exc_info=error,
        )
        self._has_failed = True

    # -- asking for work -------------------------------------------------------------------------

    def _ask(self, worker: Worker) -> None:
        client, version = self._client(), None
        while not worker.is_stopping and self._replaced is None:
            try:
                if version is None:
                    self._join(client)
                    version = 0
                version = self._next_work(client, version)
                continue
            except Unreachable as error:
                self._note_absence(error)
            except RequestRefused as error:
                if error.status == 409:  # another agent has joined, or it speaks another version
                    self._replaced = str(error)
                elif error.status == 404:  # the service has lost its folder
                    version = None
                else:  # a token that has expired, or a proxy in between: no reason to stop jobs
                    self._note_absence(error)
            self._clock.sleep(AGAIN_S)

    def _join(self, client: Client) -> None:
        join = wire.Join(node=self._part.node, instance=self.instance, version=VERSION)
        client.call("POST", "nodes", body=join, changes=True, type_=Receipt)

    def _next_work(self, client: Client, version: int) -> int:
        """Ask the service, and wait, for newer work than `version`; pass it on and return its version."""
        name = self._part.node.name
        work = client.call(
            *("GET", "nodes", name, "work"),
            type_=NodeWork,
            instance=self.instance,
            after=version,
            wait_s=WAIT_S,
        )
        if self._is_away:
            logging.warning("node %s: the service answers again", name)
        self._is_away, self._heard_s = False, self._clock.now()
        if work.version != version or self._is_alone:
            self._is_alone = False
            self._work.put(work)
        return work.version

    # -- sending reports -------------------------------------------------------------------------

    def _tell(self, worker: Worker) -> None:
        client = self._client()
        hints_s, numbers = 0.0, HintNumbers()
        while not (worker.wait_stopping(TELL_S) and self._jobs.is_idle and not self._has_news()):
            try:
                self._tell_reports(client, numbers)
                self._tell_lines(client)
            except (Unreachable, RequestRefused) as error:
                self._note_absence(error)
                if worker.is_stopping:
                    return
                self._clock.sleep(AGAIN_S)
                continue
            begun_s = self._clock.now()
            if begun_s >= hints_s:
                self._tell_hints(client, numbers)
                # Journals that have grown long are read less often.
                now_s = self._clock.now()
                hints_s = now_s + max(self._part.hints_s, PATIENCE * (now_s - begun_s))

    def _tell_reports(self, client: Client, numbers: HintNumbers) -> None:
        """Tell the service what coordinators do and report, in requests that carry no output."""
        with self._lock:
            reports = self._jobs.reports()
        if not reports:
            return
        try:
            coordinators = tuple(one for one in reports if isinstance(one, wire.Report))
            nodes = tuple(one for one in reports if isinstance(one, wire.NodeReport))
            if any(report.code is not None for report in coordinators):
                # A job's last hints first: the service refuses them once the job has ended.
                self._tell_hints(client, numbers)
            told = wire.Reports(instance=self.instance, coordinators=coordinators, nodes=nodes)
            self._post(client, told)
        except (Unreachable, RequestRefused):
            with self._lock:
                self._jobs.give_back(reports)
            raise

    def _tell_lines(self, client: Client) -> None:
        with self._lock:
            lines = self._jobs.lines(MOST_TOLD)
        if not lines:
            return
        told = tuple(wire.OutputLines(job=job, text=text) for job, _, text in lines)
        try:
            self._post(client, wire.Reports(instance=self.instance, lines=told))
        except (Unreachable, RequestRefused) as error:
            if isinstance(error, RequestRefused) and error.status == 413:  # it would be again
                count = sum(one.text.count("\n") for one in told)
                logging.warning(
                    "%d lines of output are dropped, as they are too long for one request: %s",
                    count,
                    error,
                )
                return
            for _, buffer, text in lines:
                buffer.give_back(text)
            raise

    def _post(self, client: Client, told: wire.Reports) -> None:
        name = self._part.node.name
        client.call("POST", "nodes", name, "reports", body=told, changes=True, type_=Receipt)

    def _has_news(self) -> bool:
        with self._lock:
            reports = self._jobs.reports()
            self._jobs.give_back(reports)
        return bool(reports)

    def _tell_hints(self, client: Client, numbers: HintNumbers) -> None:
        """Send jobs' hints (measurements) that are new since the last call, if coordinators run here."""
        with self._lock:
            tasks = [task for task in self._jobs.tasks if task.coordinates and task.runs]
        for task in tasks:
            found = self._hints_of(task)
            if found is None:
                continue
            generation, number = numbers.get(task.job, (task.generation, -1))
            # Right after a change of generation, the journal still holds measurements of the last one.
            is_new = found.number != number and generation == task.generation
            try:
                if is_new:
                    client.call("POST", "jobs", task.job, "hints", body=found, type_=Receipt)
                numbers[task.job] = task.generation, found.number
            except Unreachable as error:
                self._note_absence(error)
                return
            except RequestRefused as error:  # the job has ended, or has other devices by now
                logging.info(
                    "the service took no new hints (measurements) of job %s, which may have ended or "
                    "have other devices by now: %s",
                    task.job,
                    error,
                )

    def _hints_of(self, task: JobTask) -> Hints | None:
        """Return the hints (measurements) of a run, or None. An unreadable journal is logged, not raised."""
        if task.workdir is None:
            return None
        try:
            return hints_of(
                pathlib.Path(task.cwd) / task.workdir,
                self._part.node.kind,
                task.generation,
                task.devices_per_process,
            )
        except Exception:
            logging.exception(
                "the measurements of job %s cannot be read from its journal in %s. The job goes on, but is "
                "planned without new measurements. Check that this node can read that folder.",
                task.job,
                task.workdir,
            )
            return None

    def _say_goodbye(self, _: Worker) -> None:
        name = self._part.node.name
        try:
            self._client().call("POST", "nodes", name, "down", changes=True, type_=Receipt)
        except (Unreachable, RequestRefused) as error:
            logging.warning(
                "the service could not be told that node %s leaves (%s). It marks the node as down once it "
                "misses the heartbeats.",
                name,
                error,
            )

    def _note_absence(self, error: Exception) -> None:
        if not self._is_away:
            self._is_away = True
            logging.warning(
                "node %s: the service cannot be asked: %s. The agent keeps trying, and its jobs go on.",
                self._part.node.name,
                error,
            )
