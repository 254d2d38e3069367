"""One host's part of a job whose processes come and go: starts workers, watches them, and says how they end.

    jaxgoodput agent --rdzv-endpoint HOST:PORT --nproc-per-node N -- python train.py ...

It decides nothing. What the coordinator says it does; where the coordinator is gone it ends its workers, and
looks for a new one at the same address for a while.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import queue
import secrets
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgoodput.clock import Clock
from jaxgoodput.launcher import wire
from jaxgoodput.launcher.local import keep_freed_pages, shim_command
from jaxgoodput.launcher.supervise import (
    DONE,
    FAILED,
    SAVED,
    USAGE,
    Child,
    Exited,
    Signalled,
    UsageError,
    say,
    signals_to,
)
from jaxgoodput.launcher.worker import WorkerEnv, inherited_environ, pipe_name

_RETRY_S = 0.5
_CONNECT_S = 5.0


def facts_of(command: Sequence[str]) -> dict[str, str]:
    """What must be the same on all hosts of a job: versions, the command, and its script."""
    found = {
        "Python": platform.python_version(),
        **{
            name: importlib.metadata.version(name)
            for name in ("jaxgoodput", "jax", "jaxlib", "numpy")
        },
        "the command": " ".join(command),
    }
    for argument in command:
        path = pathlib.Path(argument)
        if path.suffix == ".py" and path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            found[f"the content of {argument}"] = digest
            break
    return found


def run_agent(
    command: Sequence[str],
    *,
    address: str,
    secret: str,
    name: str,
    slots: int,
    devices_per_process: int | None,
    silent_s: float,
    grace_s: float,
    reconnect_s: float,
    clock: Clock,
) -> int:
    """Take part in the job at `address` until it is over; an exit code.

    SIGTERM, SIGINT and SIGHUP have this host leave the job, which goes on without it: the workers are let go
    at the end of a step. Raises UsageError where the command cannot be started.
    """
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UsageError(f"--rdzv-endpoint {address}: give HOST:PORT, as `jaxgoodput run` says it.")
    shimmed = shim_command(command)
    if shutil.which(shimmed[0]) is None:
        raise UsageError(f"there is no program {shimmed[0]!r} on {name}.")
    agent = Agent(
        shimmed,
        address=address,
        secret=secret,
        name=name,
        slots=slots,
        devices_per_process=devices_per_process,
        silent_s=silent_s,
        grace_s=grace_s,
        clock=clock,
    )
    deadline_s = clock.now() + reconnect_s
    with signals_to(agent.events):
        while True:
            code = agent.take_part(facts_of(command))
            if code is not None:
                return code
            if agent.has_taken_part:
                deadline_s = clock.now() + reconnect_s
                agent.has_taken_part = False
            if clock.now() >= deadline_s:
                say(f"{name}: there is no coordinator at {address} any more")
                return FAILED
            with contextlib.suppress(queue.Empty):
                if isinstance(agent.events.get(timeout=_RETRY_S), Signalled):
                    return SAVED  # nothing of the job is here


class Agent:
    """The workers of one host. `take_part` runs until the job is over, or the coordinator is gone."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        address: str,
        secret: str,
        name: str,
        slots: int,
        devices_per_process: int | None,
        silent_s: float,
        grace_s: float,
        clock: Clock,
    ):
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.has_taken_part = False
        self._command = command
        self._address = address
        self._secret = secret
        self._name = name
        self._slots = slots
        self._devices = devices_per_process
        self._silent_s = silent_s
        self._grace_s = grace_s
        self._clock = clock
        self._instance = secrets.token_hex(8)
        self._children: dict[str, tuple[int, Child]] = {}  # by member: slot and process
        self._plan: list[tuple[float, int]] = []  # signals to all that are left, and when
        self._is_leaving = False

    def take_part(self, facts: Mapping[str, str]) -> int | None:
        """One connection to a coordinator; None where it has gone before the job was over."""
        try:
            channel = wire.connect(self._address, self._secret, timeout_s=_CONNECT_S)
        except wire.WrongSecret as error:
            say(f"{self._name}: {error}")
            return USAGE
        except OSError:
            return None
        hello = {"host": self._name, "slots": self._slots, "instance": self._instance}
        try:
            channel.send({"type": "agent", **hello, "facts": facts})
        except OSError:
            channel.close()
            return None
        threading.Thread(target=_read, args=(channel, self.events), daemon=True).start()
        with contextlib.ExitStack() as stack:
            stack.callback(channel.close)
            lifeline, held = os.pipe()
            stack.callback(os.close, held)
            stack.callback(os.close, lifeline)
            stack.callback(self._finish)
            return self._obey(channel, lifeline)

    def _obey(self, channel: wire.Channel, lifeline: int) -> int | None:
        code: int | None = None
        is_over = False
        while not (is_over and not self._children):
            try:
                wait_s = max(self._plan[0][0] - self._clock.now(), 0.0) if self._plan else None
                event = self.events.get(timeout=wait_s)
            except queue.Empty:
                (_, signum), *self._plan = self._plan
                for _, child in self._children.values():
                    child.send(signum)
                continue
            match event:
                case Exited(member, code_):
                    self._children.pop(str(member), None)
                    self._send(channel, {"type": "exit", "member": member, "code": code_})
                    if self._is_leaving and not self._children:
                        return SAVED
                case Signalled(signum):
                    self._stop(channel, signum)
                    if not self._children:
                        return SAVED
                case (sender, _) if sender is not channel:
                    continue  # of a connection that is over
                case (_, None):
                    if is_over:
                        continue
                    say(f"{self._name}: the coordinator at {self._address} has gone")
                    return SAVED if self._is_leaving else None
                case (_, message):
                    match message["type"]:
                        case "accepted":
                            self.has_taken_part = True
                        case "refused":
                            say(f"{self._name} was refused: {message['why']}")
                            return USAGE
                        case "start":
                            self._start(message["member"], lifeline)
                        case "kill":
                            if message["member"] in self._children:
                                self._children[message["member"]][1].send(signal.SIGKILL)
                        case "stop":
                            self._send_all(signal.SIGTERM)
                        case "end":
                            is_over, code = True, message.get("code", DONE)
                            self._plan = self._plan or [
                                (self._clock.now() + self._grace_s, signal.SIGKILL)
                            ]
        return code

    def _start(self, member: str, lifeline: int) -> None:
        taken = {slot for slot, _ in self._children.values()}
        slot = min(set(range(len(taken) + 1)) - taken)
        devices = self._devices or 1
        everything = self._slots == 1 and self._devices is None
        inherited = inherited_environ()
        flag = f"--xla_cpu_collective_timeout_seconds={max(round(self._silent_s), 1)}"
        environ = {
            **inherited,
            **keep_freed_pages(inherited),
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": f"{inherited.get('XLA_FLAGS', '')} {flag}".strip(),
            **WorkerEnv(
                num_processes=1,
                process_id=0,
                job_id=f"elastic-{self._address}",
                devices_per_process=self._devices,
                local_device_ids=None
                if everything
                else tuple(range(slot * devices, (slot + 1) * devices)),
                grace_s=self._grace_s,
                rendezvous=self._address,
                secret=self._secret,
                member=member,
                host=self._name,
            ).to_environ(),
            "JAXGOODPUT_LIFELINE": pipe_name(lifeline),
        }
        self._children[member] = (
            slot,
            Child(member, self._command, environ, lifeline, True, self.events, self._clock),
        )

    def _stop(self, channel: wire.Channel, signum: int) -> None:
        """Leave the job at the end of a step; told once more, at once."""
        if self._is_leaving:
            self._send_all(signal.SIGKILL)
            return
        self._is_leaving = True
        say(f"{self._name}: {signal.Signals(signum).name}, it leaves the job")
        self._send(channel, {"type": "leave"})
        self._plan = [(self._clock.now() + self._grace_s, signal.SIGKILL)]

    def _send_all(self, signum: int) -> None:
        for _, child in self._children.values():
            child.send(signum)
        if signum == signal.SIGTERM:
            self._plan = [(self._clock.now() + self._grace_s, signal.SIGKILL)]

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
            if isinstance(event, Exited):
                self._children.pop(str(event.rank), None)
            elif isinstance(event, Signalled):
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
