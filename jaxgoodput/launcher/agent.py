"""One host's part of a job whose processes come and go: starts workers, watches them, and says how they end.

    jaxgoodput agent --rdzv-endpoint HOST:PORT --nproc-per-node N -- python train.py ...

It decides nothing. What the coordinator says it does; where the coordinator is gone it ends its workers, and
looks for a new one at the same address for a while.
"""

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
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput import _wire as wire
from jaxgoodput.clock import Clock
from jaxgoodput.launcher import fitness
from jaxgoodput.launcher.local import keep_freed_pages, shim_command
from jaxgoodput.launcher.supervise import (
    DONE,
    FAILED,
    SAVED,
    USAGE,
    Child,
    ChildExit,
    StopSignal,
    UsageError,
    exit_code,
    how_it_ended,
    say,
    signals_to,
)
from jaxgoodput.launcher.worker import WorkerEnv, inherited_environ, pipe_name

_LOOKS = 5  # at the workers within the time-out
_RETRY_S = 0.5
_CONNECT_S = 5.0


# Packages that decide what a step computes, or what is said between processes.
_PACKAGES = ("jaxgoodput", "jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What `jaxgoodput agent` was asked for: one host's part of a job."""

    address: str
    """Of the coordinator, HOST:PORT."""
    secret: str = field(repr=False)
    name: str
    slots: int = 1
    """Processes of this host."""
    devices_per_process: int | None = None
    local_devices: tuple[int, ...] | None = None
    """Of this host, which its processes take in this order; None: from 0 on."""
    silent_s: float = 10.0
    grace_s: float = 60.0
    reconnect_s: float = 60.0
    """For which a coordinator that does not answer is looked for."""


def facts_of(command: Sequence[str]) -> dict[str, str]:
    """What must be the same on all hosts of a job: versions and code of packages, the command, its script."""
    found = {
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "the code of jaxgoodput": _digest(pathlib.Path(__file__).parents[1]),
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
    """Of a file, or of all Python code in a folder."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        digest.update(f"{file.relative_to(path)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def run_agent(command: Sequence[str], part: AgentSettings, *, clock: Clock) -> int:
    """Take part in a job until it is over; an exit code.

    SIGTERM, SIGINT and SIGHUP have this host leave the job, which goes on without it: the workers are let go
    at the end of a step. Raises UsageError where the command cannot be started.
    """
    host, colon, port = part.address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UsageError(
            f"--rdzv-endpoint {part.address}: give HOST:PORT, as `jaxgoodput run` says it."
        )
    shimmed = shim_command(command)
    if shutil.which(shimmed[0]) is None:
        raise UsageError(f"there is no program {shimmed[0]!r} on {part.name}.")
    agent = Agent(shimmed, part, clock=clock)
    deadline_s = clock.now() + part.reconnect_s
    with signals_to(agent.events):
        while True:
            code = agent.take_part(facts_of(command))
            if code is not None:
                return code
            if agent.has_taken_part:
                deadline_s = clock.now() + part.reconnect_s
                agent.has_taken_part = False
            if clock.now() >= deadline_s:
                say(
                    f"{part.name}: no coordinator answers at {part.address} ({agent.last_error}); it was "
                    f"looked for {part.reconnect_s:g} s. Check that `jaxgoodput run --nnodes` is alive "
                    "there, and that this host can reach its address and port."
                )
                return FAILED
            with contextlib.suppress(queue.Empty):
                if isinstance(agent.events.get(timeout=_RETRY_S), StopSignal):
                    return SAVED  # nothing of the job is here


class Agent:
    """The workers of one host. `take_part` runs until the job is over, or the coordinator is gone."""

    def __init__(self, command: Sequence[str], part: AgentSettings, *, clock: Clock):
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.has_taken_part = False
        self.last_error: OSError | None = None  # of the connection
        self._command = command
        self._part = part
        self._clock = clock
        self._instance = secrets.token_hex(8)
        self._children: dict[str, tuple[int, Child]] = {}  # by member: slot and process
        self._waiting: list[str] = []  # processes to start as soon as one has gone
        self._failed: tuple[str, int, Child] | None = None  # the last one: member, code and process
        self._plan: list[tuple[float, int]] = []  # signals to all that are left, and when
        self._is_leaving = False

    def take_part(self, facts: Mapping[str, str]) -> int | None:
        """One connection to a coordinator; None where it has gone before the job was over."""
        try:
            channel = wire.connect(self._part.address, self._part.secret, timeout_s=_CONNECT_S)
        except wire.WrongSecret as error:
            say(f"{self._part.name}: {error}")
            return USAGE
        except OSError as error:
            self.last_error = error
            return None
        hello = {"host": self._part.name, "slots": self._part.slots, "instance": self._instance}
        try:
            channel.send({"type": "agent", **hello, "facts": facts})
        except OSError as error:
            self.last_error = error
            channel.close()
            return None
        threading.Thread(target=_read, args=(channel, self.events), daemon=True).start()
        with contextlib.ExitStack() as stack:
            stack.callback(channel.close)
            lifeline, held = os.pipe()
            stack.callback(os.close, held)
            stack.callback(os.close, lifeline)
            stack.callback(self._finish)
            code = self._obey(channel, lifeline)
            if code not in (None, DONE, SAVED):
                self._tell_of_failure()
            return code

    def _obey(self, channel: wire.Channel, lifeline: int) -> int | None:
        code: int | None = None
        is_over, look_s = False, 0.0
        while not (is_over and not self._children):
            try:
                if self._clock.now() >= look_s:
                    self._end_who_is_stopped()
                    look_s = self._clock.now() + max(self._part.silent_s / _LOOKS, 0.1)
                due_s = self._plan[0][0] if self._plan else math.inf
                until_s = min(due_s, look_s if self._children else math.inf)
                wait_s = max(until_s - self._clock.now(), 0.0)
                event = self.events.get(timeout=None if math.isinf(wait_s) else wait_s)
            except queue.Empty:
                if self._plan and self._clock.now() >= self._plan[0][0]:
                    (_, signum), *self._plan = self._plan
                    for _, child in self._children.values():
                        child.send(signum)
                continue
            match event:
                case ChildExit(member, code_):
                    self._ended(str(member), code_, tells=not is_over)
                    if self._waiting and not is_over:
                        self._start(self._waiting.pop(0), lifeline)
                    self._send(channel, {"type": "exit", "member": member, "code": code_})
                    if self._is_leaving and not self._children:
                        return SAVED
                case StopSignal(signum):
                    self._stop(channel, signum)
                    if not self._children:
                        return SAVED
                case (sender, _) if sender is not channel:
                    continue  # of a connection that is over
                case (_, None):
                    if is_over:
                        continue
                    say(f"{self._part.name}: the coordinator at {self._part.address} has gone")
                    self.last_error = ConnectionError("it has gone")
                    return SAVED if self._is_leaving else None
                case (_, message):
                    match message["type"]:
                        case "accepted":
                            self.has_taken_part = True
                        case "refused":
                            say(f"{self._part.name} was refused: {message['why']}")
                            return USAGE
                        case "check":
                            threading.Thread(
                                target=self._check, args=(channel, message["peers"]), daemon=True
                            ).start()
                        case "start":
                            self._start(message["member"], lifeline)
                        case "kill":
                            if message["member"] in self._waiting:
                                self._waiting.remove(message["member"])
                            if message["member"] in self._children:
                                self._children[message["member"]][1].send(signal.SIGKILL)
                        case "stop":
                            self._send_all(signal.SIGTERM)
                        case "end":
                            is_over, code = True, message.get("code", DONE)
                            self._plan = self._plan or [
                                (self._clock.now() + self._part.grace_s, signal.SIGKILL)
                            ]
        return code

    def _end_who_is_stopped(self) -> None:
        """Kill a worker that is stopped: the coordinator cannot tell it from one that gets ready."""
        for member, (_, child) in self._children.items():
            stopped_s = child.stopped_s()
            if stopped_s and stopped_s >= self._part.silent_s:
                say(f"SIGKILL to {member}: it was stopped (SIGSTOP) for {stopped_s:.0f} s")
                child.send(signal.SIGKILL)

    def _check(self, channel: wire.Channel, peers: Sequence[str]) -> None:
        check = fitness.examine(self._part.address, peers, self._part.secret, self._clock)
        self._send(channel, {"type": "checked", "check": dataclasses.asdict(check)})

    def _start(self, member: str, lifeline: int) -> None:
        free = set(range(self._part.slots)) - {slot for slot, _ in self._children.values()}
        if not free:  # one that was killed is not gone yet, and its devices are its own until then
            self._waiting.append(member)
            return
        slot = min(free)
        devices = self._part.devices_per_process or 1
        own = self._part.local_devices or tuple(range(self._part.slots * devices))
        everything = self._part.slots == 1 and self._part.devices_per_process is None
        inherited = inherited_environ()
        flag = f"--xla_cpu_collective_timeout_seconds={max(round(self._part.silent_s), 1)}"
        environ = {
            **inherited,
            **keep_freed_pages(inherited),
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": f"{inherited.get('XLA_FLAGS', '')} {flag}".strip(),
            **WorkerEnv(
                num_processes=1,
                process_id=0,
                job_id=f"elastic-{self._part.address}",
                devices_per_process=self._part.devices_per_process,
                local_device_ids=None if everything else own[slot * devices : (slot + 1) * devices],
                grace_s=self._part.grace_s,
                rendezvous=self._part.address,
                secret=self._part.secret,
                member=member,
                host=self._part.name,
            ).to_environ(),
            "JAXGOODPUT_LIFELINE": pipe_name(lifeline),
        }
        self._children[member] = (
            slot,
            Child(member, self._command, environ, lifeline, True, self.events, self._clock),
        )

    def _ended(self, member: str, code: int, *, tells: bool) -> None:
        _, child = self._children.pop(member, (0, None))
        # What was still starting when the job ended fails for want of a coordinator: that tells nothing.
        if child is not None and tells and exit_code([code]) not in (DONE, SAVED):
            self._failed = member, code, child

    def _tell_of_failure(self) -> None:
        """How a process of this host failed last, and its last lines: all that most users read is the end."""
        if self._failed is None:
            return
        member, code, child = self._failed
        say(f"{member} failed last on {self._part.name}: {how_it_ended(code)}")
        for line in child.last_lines:
            say(f"    [{member}] {line}")

    def _stop(self, channel: wire.Channel, signum: int) -> None:
        """Leave the job at the end of a step; told once more, at once."""
        if self._is_leaving:
            self._send_all(signal.SIGKILL)
            return
        self._is_leaving = True
        say(f"{self._part.name}: {signal.Signals(signum).name}, it leaves the job")
        self._send(channel, {"type": "leave"})
        self._plan = [(self._clock.now() + self._part.grace_s, signal.SIGKILL)]

    def _send_all(self, signum: int) -> None:
        for _, child in self._children.values():
            child.send(signum)
        if signum == signal.SIGTERM:
            self._plan = [(self._clock.now() + self._part.grace_s, signal.SIGKILL)]

    def _send(self, channel: wire.Channel, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # its reader finds out
            channel.send(message)

    def _finish(self) -> None:
        """Leave no process behind."""
        told = None
        for _, child in self._children.values():
            child.finish()
        while self._children:
            event = self.events.get()
            if isinstance(event, ChildExit):
                self._children.pop(str(event.rank), None)
            elif isinstance(event, StopSignal):
                told = event
        if told is not None:
            self.events.put(told)  # for whoever looks for a coordinator
        self._plan = []


def _read(channel: wire.Channel, events: "queue.SimpleQueue[Any]") -> None:
    message: Mapping[str, Any] | None = {}
    while message is not None:
        try:
            message = channel.receive()
        except wire.WrongSecret as error:
            say(str(error))
            message = None
        events.put((channel, message))
