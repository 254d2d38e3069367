"""One host's part of a job on hosts that come and go: the agent starts its workers and reports how they end.

    jaxgoodput agent --rdzv-endpoint HOST:PORT --nproc-per-node N -- python train.py ...

The agent decides nothing: it does what the coordinator says. If the coordinator is gone, it ends its workers
and tries for a while to reach a new coordinator at the same address.
"""

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import math
import os
import pathlib
import platform
import queue
import secrets
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxgoodput import _wire as wire
from jaxgoodput._exits import DONE, FAILED, SAVED, USAGE, RunFacts, exit_code, run_exit
from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness, messages
from jaxgoodput.launcher.join_file import read_join_file
from jaxgoodput.launcher.local import keep_freed_pages, shim_command
from jaxgoodput.launcher.notices.notice import Notice, NoticeSettings, seconds_to_leave
from jaxgoodput.launcher.notices.watch import notices_to
from jaxgoodput.launcher.roll_call import CONNECT_S
from jaxgoodput.launcher.supervise import (
    Child,
    ChildExit,
    StopSignal,
    UsageError,
    how_it_ended,
    open_roll_call,
    say,
    signals_to,
)
from jaxgoodput.launcher.worker import WorkerEnv, inherited_environ, pipe_name

_LOOKS = 5  # checks for stopped workers per heartbeat timeout
_RETRY_S = 0.5
_CONNECT_S = 5.0
_MOST_ENDED = 64  # ends of workers that are remembered
_ANSWER_S = 1.0  # within which a coordinator says whether workers of a leaving host are to save

# Packages that decide what a step computes, or what processes send each other.
_PACKAGES = ("jaxgoodput", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """Options of `jaxgoodput agent`."""

    address: str = ""
    """Address of the coordinator, HOST:PORT; empty if `join_file` tells it."""
    secret: str = field(default="", repr=False)
    join_file: pathlib.Path | None = None
    """File with the address and the secret, which is read anew before each connection; see `join_file`."""
    name: str
    """Name of this host in the job."""
    slots: int = 1
    """Number of processes on this host."""
    devices_per_process: int | None = None
    local_devices: tuple[int, ...] | None = None
    """Devices of this host, in the order in which its processes take them; None: 0, 1, 2, ..."""
    silent_s: float = 10.0
    """Heartbeat timeout."""
    grace_s: float = 60.0
    """How long workers may take to save and exit before they are killed."""
    reconnect_s: float = 60.0
    """How long to look for a coordinator that does not answer."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the workers."""
    connect_s: float = CONNECT_S
    """How long a worker may take from its start until it joins the job."""
    notices: NoticeSettings = NoticeSettings()
    """Where to look for notices that this host will be taken away."""


def facts_of(command: Sequence[str]) -> dict[str, str]:
    """Return what must be equal on all hosts of a job: package versions, package code, command and script."""
    found = {
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "the code of jaxgoodput": _digest(pathlib.Path(__file__).parents[2]),
        "the command": " ".join(command),
    }
    modules = [
        pathlib.Path(f"{name.replace('.', '/')}.py")
        for flag, name in itertools.pairwise(command)
        if flag == "-m"
    ]
    for path in (*modules, *map(pathlib.Path, command)):
        if path.suffix == ".py" and path.is_file():
            found[f"the content of {path}"] = _digest(path)
            break
    return found


def _digest(path: pathlib.Path) -> str:
    """Return a digest of a file's content, or of all Python files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def run_agent(command: Sequence[str], part: AgentSettings, *, clock: Clock) -> int:
    """Take part in a job until it is over; return the exit code.

    On SIGTERM, SIGINT or SIGHUP, and on a notice that the host will be taken away, this host leaves the job,
    which goes on without it; its workers exit after their current step. If the coordinator has gone, the
    workers are killed, and what they had in memory is lost: the exit code is then 75. Raises UsageError if
    the command cannot be started.
    """
    program, given = _checked(command, part), part
    instance = secrets.token_hex(8)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    deadline_s = clock.now() + part.reconnect_s
    lost_step: int | None = None
    with signals_to(events), notices_to(events, part.notices, clock):
        while True:
            try:
                part = _with_details(given)
                channel = _connected(part, instance, facts_of(command))
            except (OSError, ValueError) as error:
                if given.join_file is None:
                    if not isinstance(error, OSError):
                        raise
                    if isinstance(error, wire.WrongSecret):
                        say(f"{part.name}: {error}")
                        return USAGE
                # A join file may be of a job that has ended, until another writes it.
                why = str(error)
            else:
                agent = Agent(channel, program, part, events, clock)
                code = agent.run()
                if code is not None:
                    return code
                why = "it has gone"
                if agent.was_accepted:
                    deadline_s = clock.now() + part.reconnect_s
                    lost_step = _last_of([lost_step, agent.lost_step])
            if clock.now() >= deadline_s:
                where = part.address if given.join_file is None else f"what {given.join_file} says"
                say(
                    f"{part.name}: no coordinator answers at {where} ({why}), after trying for "
                    f"{part.reconnect_s:g} s. Check that `jaxgoodput run --nnodes` is alive there, and that "
                    "this host can reach its address and port."
                )
                return FAILED if lost_step is None else _without_coordinator(part.name, lost_step)
            with contextlib.suppress(queue.Empty):
                if _is_to_leave(events.get(timeout=_RETRY_S)):
                    return _without_coordinator(part.name, lost_step)


def _without_coordinator(name: str, lost_step: int | None) -> int:
    """Return the exit code of an agent that ends without a coordinator, and print what was lost.

    `lost_step` is the last step known of workers that ended because the coordinator had gone; None if none
    of them had begun to train.
    """
    why = "its workers ended because the coordinator had gone"
    end = run_exit(
        RunFacts(
            stopped_by="stop",
            last_step=lost_step or 0,
            may_be_further=lost_step is not None,
            saved_step=None,
            unsaved_why=why,
        )
    )
    say(f"{name} ends with exit code {end.code}: {end.why}")
    return end.code


def _last_of(steps: Iterable[int | None]) -> int | None:
    """Return the last of these steps; None stands for a process that has not begun to train."""
    return max((step for step in steps if step is not None), default=None)


def _is_to_leave(event: Any) -> bool:
    """Whether an event tells this host to leave its job: a signal, or a notice that is no mere warning."""
    return isinstance(event, StopSignal) or (isinstance(event, Notice) and not event.is_warning)


def _checked(command: Sequence[str], part: AgentSettings) -> list[str]:
    """Return the command that starts a worker; raise UsageError before anything has started."""
    host, colon, port = part.address.rpartition(":")
    if part.join_file is None and not (host and colon and port.isdigit()):
        raise UsageError(
            f"--rdzv-endpoint {part.address} is no address. Give HOST:PORT, which `jaxgoodput run` prints "
            "when it starts."
        )
    shimmed = shim_command(command)
    if shutil.which(shimmed[0]) is None:
        raise UsageError(f"there is no program {shimmed[0]!r} on {part.name}.")
    return shimmed


def _with_details(part: AgentSettings) -> AgentSettings:
    """Return the settings with the address and secret of the join file, if there is one."""
    if part.join_file is None:
        return part
    found = read_join_file(part.join_file)
    return dataclasses.replace(part, address=found.address, secret=found.secret)


def _connected(part: AgentSettings, instance: str, facts: Mapping[str, str]) -> wire.Channel:
    channel = wire.connect(part.address, part.secret, timeout_s=_CONNECT_S)
    try:
        hello = messages.AgentHello(part.name, part.slots, instance, facts)
        channel.send(messages.encoded(hello))
    except OSError:
        channel.close()
        raise
    return channel


class HostWorkers:
    """The workers of this host during one connection; a context manager that leaves no process behind.

    `events` receives a `ChildExit` for every worker that ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        part: AgentSettings,
        events: "queue.SimpleQueue[Any]",
        clock: Clock,
    ):
        self._kill_s = math.inf  # when all workers that are left will be killed
        self._gone_s = math.inf  # when they must have ended, because the host will be gone
        self._killed: set[str] = set()  # workers that were sent SIGKILL from here
        self._command = command
        self._part = part
        self._events = events
        self._clock = clock
        self._running: dict[str, tuple[int, Child]] = {}  # slot and process, by name
        self._waiting: list[str] = []  # to be started as soon as a slot is free
        self._look_s = 0.0  # when to look for stopped workers again
        self._lifeline, self._held = os.pipe()  # workers die when `_held` closes
        self._roll_call = open_roll_call(must_join=True, connect_s=part.connect_s)

    def __enter__(self) -> "HostWorkers":
        return self

    def __exit__(self, *exc: object) -> None:
        told_to_leave = None
        for _, child in self._running.values():
            child.finish()
        while self._running:
            event = self._events.get()
            if isinstance(event, ChildExit):
                self._running.pop(str(event.rank), None)
            elif _is_to_leave(event):
                told_to_leave = event
        if told_to_leave is not None:
            self._events.put(told_to_leave)  # for the loop that looks for a coordinator
        self._roll_call.close()
        os.close(self._lifeline)
        os.close(self._held)

    def __bool__(self) -> bool:
        """Whether any worker process runs on this host."""
        return bool(self._running)

    def start(self, member: str) -> None:
        """Start a worker for this member, or note that it waits if all slots are taken."""
        free = set(range(self._part.slots)) - {slot for slot, _ in self._running.values()}
        if not free:  # a worker that was killed keeps its devices until it is gone
            self._waiting.append(member)
            return
        slot = min(free)
        environ = self._environ(member, slot)
        child = Child(
            member,
            self._command,
            environ,
            self._lifeline,
            True,
            self._events,
            self._clock,
            self._roll_call,
        )
        self._running[member] = slot, child

    def ended(self, member: str) -> Child | None:
        """Forget the worker of this member, which has ended; return its process."""
        return self._running.pop(member, (0, None))[1]

    @property
    def last_step(self) -> int | None:
        """The last step that a run which is not over has reported; None if no worker trains."""
        return _last_of(child.run_step for _, child in self._running.values())

    def has_killed(self, member: str) -> bool:
        """Return whether the worker of this member was sent SIGKILL from here."""
        return member in self._killed

    def start_waiting(self) -> None:
        """Start the worker that has waited longest for a slot, if any waits."""
        if self._waiting:
            self.start(self._waiting.pop(0))

    def kill(self, member: str) -> None:
        """Kill the worker of this member, or forget it if it still waits for a slot."""
        if member in self._waiting:
            self._waiting.remove(member)
        if member in self._running:
            self._killed.add(member)
            self._running[member][1].send(signal.SIGKILL)

    def send_all(self, signum: int) -> None:
        """Send this signal to all workers of the host."""
        if signum == signal.SIGKILL:
            self._killed.update(self._running)
        for _, child in self._running.values():
            child.send(signum)

    @property
    def is_grace_running(self) -> bool:
        """Whether the workers that are left will be killed."""
        return not math.isinf(self._kill_s)

    def kill_after_grace(self) -> None:
        """Kill the workers that are left when a grace period is over, which begins now; or `kill_within`."""
        self._kill_s = min(self._clock.now() + self._part.grace_s, self._gone_s)

    def kill_within(self, seconds: float) -> None:
        """Kill the workers that are left after so many seconds, if not earlier, whatever comes later."""
        self._gone_s = min(self._gone_s, self._clock.now() + seconds)
        self._kill_s = min(self._kill_s, self._gone_s)

    def look_after(self) -> float | None:
        """Kill workers that are stopped or overdue; return the seconds until the next look, None: never."""
        now_s = self._clock.now()
        if now_s >= self._look_s:
            self._kill_stopped()
            self._look_s = now_s + max(self._part.silent_s / _LOOKS, 0.1)
        if now_s >= self._kill_s:
            self.send_all(signal.SIGKILL)
            self._kill_s = math.inf
        next_s = min(self._kill_s, self._look_s if self._running else math.inf)
        return None if math.isinf(next_s) else max(next_s - self._clock.now(), 0.0)

    def _kill_stopped(self) -> None:
        # Without heartbeats, the coordinator cannot tell a stopped worker from one that still starts.
        for member, (_, child) in self._running.items():
            stopped_s = child.stopped_s()
            if stopped_s and stopped_s >= self._part.silent_s:
                say(f"SIGKILL to {member}: it was stopped (SIGSTOP) for {stopped_s:.0f} s")
                self.kill(member)
            child.kill_if_overdue()

    def _environ(self, member: str, slot: int) -> dict[str, str]:
        part = self._part
        count = part.devices_per_process or 1
        own = part.local_devices or tuple(range(part.slots * count))
        has_all = part.slots == 1 and part.devices_per_process is None
        inherited = {**inherited_environ(), **part.variables}
        flag = f"--xla_cpu_collective_timeout_seconds={max(round(part.silent_s), 1)}"
        return {
            **inherited,
            **keep_freed_pages(inherited),
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": f"{inherited.get('XLA_FLAGS', '')} {flag}".strip(),
            **WorkerEnv(
                num_processes=1,
                process_id=0,
                job_id=f"elastic-{part.address}",
                devices_per_process=part.devices_per_process,
                local_device_ids=None if has_all else own[slot * count : (slot + 1) * count],
                grace_s=part.grace_s,
                rendezvous=part.address,
                secret=part.secret,
                member=member,
                host=part.name,
            ).to_environ(),
            "JAXGOODPUT_LIFELINE": pipe_name(self._lifeline),
        }


class Agent:
    """One connection of a host's agent to a coordinator, and the workers that run while it lasts."""

    def __init__(
        self,
        channel: wire.Channel,
        command: Sequence[str],
        part: AgentSettings,
        events: "queue.SimpleQueue[Any]",
        clock: Clock,
    ):
        self.was_accepted = False
        self._channel = channel
        self._part = part
        self._events = events
        self._clock = clock
        self._workers = HostWorkers(command, part, events, clock)
        self._failed: tuple[str, int, Child] | None = (
            None  # the last failed worker: name, code, process
        )
        self._is_leaving = self._is_interrupted = False
        self._code_left = SAVED  # exit code if the host leaves; 0 if the job has let it go
        self._is_over = False  # the coordinator has said that the job is over
        self._is_finished = False
        self._code: int | None = None
        self._codes: list[int] = []  # of workers that ended since this host leaves the job
        self._spared_s = math.inf  # time from which it is sure that the others go on with the state
        # When workers ended amid a run, unsaved, and their last steps.
        self._ended: collections.deque[tuple[float, int]] = collections.deque(maxlen=_MOST_ENDED)
        self.lost_step: int | None = None
        """The last step known of workers that ran here when the coordinator went; None if none trained."""

    def run(self) -> int | None:
        """Obey the coordinator until the job is over; return the exit code, or None if it has gone."""
        reader = Worker("agent-reader", self._read)
        try:
            with self._workers:
                while not self._is_finished and (self._workers or not self._is_over):
                    self._wait_for_event()
        finally:
            self._channel.close()
            reader.close()
        if self._code not in (None, DONE, SAVED):
            self._tell_of_failure()
        return self._code

    def _read(self, worker: Worker) -> None:
        try:
            for message in messages.received(
                self._channel, messages.TO_AGENTS, lambda error: say(str(error))
            ):
                self._events.put((self._channel, message))
        finally:
            self._events.put((self._channel, None))

    def _wait_for_event(self) -> None:
        try:
            event = self._events.get(timeout=self._workers.look_after())
        except queue.Empty:
            return
        match event:
            case ChildExit(member, code, why):
                if why:
                    say(f"{self._part.name}: {member} ended with {code}: {why}")
                self._worker_ended(str(member), code)
            case StopSignal(signum):
                self._signalled(signum)
            case Notice():
                self._noticed(event)
            case (sender, message) if sender is self._channel:  # not from an earlier connection
                self._obey(message)

    def _finish(self, code: int | None) -> None:
        self._is_finished, self._code = True, code

    # -- what happens here -----------------------------------------------------------------------

    def _worker_ended(self, member: str, code: int) -> None:
        child = self._workers.ended(member)
        if child is not None and exit_code([code]) not in (DONE, SAVED):
            if child.run_step is not None:
                self._ended.append((self._clock.now(), child.run_step))
            # One that still starts when the job ends fails for want of a coordinator, which says nothing.
            if not self._is_over:
                self._failed = member, code, child
        if not self._is_over:
            self._workers.start_waiting()
        self._send(ev.ProcessExited(member, code))
        if self._is_leaving and child is not None and child.step is not None:
            # One that did not leave in time was killed from here, but the others hold the state.
            was_killed = code == -signal.SIGKILL and self._workers.has_killed(member)
            if not (was_killed and self._clock.now() >= self._spared_s):
                self._codes.append(code)
        if self._is_leaving and not self._workers:
            self._finish_leaving()

    def _signalled(self, signum: int) -> None:
        """Leave the job on a signal; on a second SIGINT, at once."""
        if signum == signal.SIGINT and self._is_interrupted:
            self._workers.send_all(signal.SIGKILL)
        self._is_interrupted |= signum == signal.SIGINT
        self._leave(signal.Signals(signum).name, None)

    def _noticed(self, notice: Notice) -> None:
        if notice.is_warning:
            say(f"{self._part.name}: {notice}. It stays in the job until it has to go")
        else:
            self._leave(str(notice), notice.within_s)

    def _leave(self, why: str, within_s: float | None) -> None:
        """Have this host's workers leave the job after their current step, before the host is gone."""
        if not self._is_leaving:
            self._is_leaving = True
            say(f"{self._part.name}: {why}, leaving the job")
            self._send(ev.Leave(self._part.name, why, within_s))
            self._spared_s = self._clock.now() + _ANSWER_S
        if not self._workers.is_grace_running:  # nothing hurried while the host was only released
            self._workers.kill_after_grace()
        if within_s is not None:
            self._workers.kill_within(seconds_to_leave(within_s, self._part.grace_s))
        if not self._workers:
            self._finish_leaving()

    def _be_let_go(self, why: str) -> None:
        """Have this host's workers leave after the current step: the rest of the run does not need them.

        Nothing hurries, so they may take as long for it as they need.
        """
        if self._is_leaving:
            return
        self._is_leaving, self._code_left = True, DONE
        self._spared_s = self._clock.now()
        say(f"{self._part.name} is released: {why}")
        if not self._workers:
            self._finish_leaving()

    def _finish_leaving(self) -> None:
        """End as the job has, or else as this host's workers have since it leaves: saved, or not needed."""
        code = exit_code([self._code_left, *self._codes])
        self._finish(self._code if self._is_over else code)

    # -- what the coordinator says ---------------------------------------------------------------

    def _obey(self, message: Any) -> None:
        match message:
            case None if not self._is_over:
                say(f"{self._part.name}: the coordinator at {self._part.address} has gone")
                self.lost_step = _last_of([self._workers.last_step, self._lost_before()])
                if self._is_leaving:
                    self._finish(_without_coordinator(self._part.name, self.lost_step))
                else:
                    self._finish(None)
            case messages.Accepted():
                self.was_accepted = True
            case ev.Refuse(_, why):
                say(f"{self._part.name} was refused: {why}")
                self._finish(USAGE)
            case ev.LetGo(_, why):
                self._be_let_go(why)
            case messages.CheckHost(peers):
                # On a thread of its own: a check takes seconds, and workers must be watched meanwhile.
                Worker("check", partial(self._examine, peers), on_error=self._check_failed)
            case messages.StartWorker(member):
                self._workers.start(member)
            case ev.Kill(member):
                self._workers.kill(member)
            case messages.StopWorkers():
                self._spared_s = math.inf
                self._workers.send_all(signal.SIGTERM)
                # As long as the host is there, even if it leaves: they save now.
                self._workers.kill_after_grace()
            case ev.EndJob(code):
                self._is_over, self._code = True, code
                if not self._workers.is_grace_running:  # it would begin again
                    self._workers.kill_after_grace()

    def _lost_before(self) -> int | None:
        """Return the last step of workers that saw the coordinator go, and ended, before the agent did."""
        since_s = self._clock.now() - self._part.silent_s
        return _last_of(step for ended_s, step in self._ended if ended_s >= since_s)

    def _examine(self, peers: Sequence[str], worker: Worker) -> None:
        check = fitness.examine(self._part.address, peers, self._part.secret, self._clock)
        self._send(ev.HostExamined(self._part.name, check))

    def _check_failed(self, error: BaseException) -> None:
        failure = f"its check failed: {type(error).__name__}: {error}"
        self._send(ev.HostExamined(self._part.name, fitness.Check(failure=failure)))

    def _tell_of_failure(self) -> None:
        """Print once more the last failure and the worker's last lines, as users read the end of a log."""
        if self._failed is None:
            return
        member, code, child = self._failed
        say(f"the last failure on {self._part.name} was {member}: {how_it_ended(code)}")
        for line in child.last_lines:
            say(f"    [{member}] {line}")

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the reader notices that the connection has ended
            self._channel.send(messages.encoded(message))
