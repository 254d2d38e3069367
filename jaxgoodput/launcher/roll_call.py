"""Which of the processes that a launcher started have joined their job, and how their runs ended.

A launcher starts a command, which may be a wrapper: `env X=1 python train.py`, `bash -c ...`, `numactl ...`.
Then the process that trains is not the one that was started, and other processes inherit its environment.
So a process is a worker only if it has answered the roll call of its launcher: a connection over the
loopback interface, one for each worker, that lasts as long as the worker. The first process that answers for
a worker is the worker. Later ones are refused.

The launcher learns from it which process to send signals to, and whether a wrapper hides the exit code of a
run. The worker learns from it that its launcher has ended.
"""

import contextlib
import os
import pathlib
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput import _wire as wire
from jaxgoodput._exits import FAILED, ProcessFacts, process_exit
from jaxgoodput.launcher.elastic.listener import Listener

VARIABLE = "JAXGOODPUT_ROLL_CALL"
CONNECT_S = 600.0  # default time for a started process to join; a container may be fetched first
_ANSWER_S = 10.0  # of the launcher, which is on the same host
_LAST_WORD_S = 20.0  # for a worker's last report to arrive after its command has ended

HOW_TO_JOIN = (
    "A script joins when it first uses jaxgoodput.Trainer, or calls jaxgoodput.initialize(). Any other "
    "script joins if the wrapper starts it as `python -m jaxgoodput.launcher SCRIPT`. The wrapper must pass "
    "the variables JAXGOODPUT_* on to the script, and a container must share this host's network."
)


class AlreadyJoined(RuntimeError):
    """Another process has joined the job as this worker."""


@dataclass
class _Answer:
    """What a worker has reported."""

    pid: int
    words: str  # its command line
    token: str  # random; tells the first process that answers from later ones
    code: int | None = None  # exit code of its last run; None while it trains
    has_trained: bool = False
    is_gone: threading.Event = field(default_factory=threading.Event)


class RollCall:
    """The launcher's side: waits for the workers of one host, and knows which process each of them is.

    If `must_join`, each worker has to answer within `connect_s` seconds; one that ends
    without an answer has failed.
    """

    def __init__(
        self,
        *,
        must_join: bool,
        connect_s: float,
        on_error: Callable[[BaseException], None],
    ):
        self.must_join = must_join
        self.connect_s = connect_s
        self._secret = wire.make_secret()
        self._lock = threading.Lock()
        self._answers: dict[str, _Answer] = {}  # by worker
        self._channels: dict[str, wire.Channel] = {}  # of the workers that have not ended
        self._listener = Listener(
            "127.0.0.1", None, self._secret, self._greet, name="roll-call", on_error=on_error
        )

    def environ(self, worker: str) -> dict[str, str]:
        """Return the variable by which the process of this worker finds the roll call."""
        return {VARIABLE: f"{self._listener.address}/{self._secret}/{worker}"}

    def has_joined(self, worker: str) -> bool:
        """Return whether a process has ever answered for this worker."""
        with self._lock:
            return worker in self._answers

    def is_there(self, worker: str) -> bool:
        """Return whether a process is this worker now."""
        with self._lock:
            return worker in self._channels

    def pid(self, worker: str) -> int | None:
        """Return the number of the process that is this worker; None if there is none, or it has ended.

        Also None if the number denotes another process here, because the worker runs in a container.
        """
        with self._lock:
            answer = self._answers.get(worker) if worker in self._channels else None
        if answer is None:
            return None
        return answer.pid if _has(answer.pid, self.environ(worker)[VARIABLE]) else None

    def true_code(
        self,
        worker: str,
        command: Sequence[str],
        pid: int,
        code: int,
        last_step: int | None = None,
    ) -> tuple[int, str]:
        """Return how a worker ended whose command, with this number, has ended with this code; and why.

        The reason is empty if the code is the command's; see `process_exit`. `last_step` is the last step
        that the worker's present run has reported.
        """
        with self._lock:
            answer = self._answers.get(worker)
        if answer is None:
            return (code, "") if code or not self.must_join else (FAILED, self._missing(command))
        if answer.has_trained:
            answer.is_gone.wait(_LAST_WORD_S)
        found = process_exit(
            ProcessFacts(
                code=code,
                has_begun=answer.has_trained,
                run_code=answer.code,
                last_step=last_step,
                is_wrapped=answer.pid != pid,
            )
        )
        if not found.why:
            return found.code, ""
        return found.code, (
            f"`{shlex.join(command)}` ended with code {code}, but the run in it (process {answer.pid}) "
            f"{found.why}"
        )

    def _missing(self, command: Sequence[str]) -> str:
        return (
            f"`{shlex.join(command)}` ended with code 0, but none of its processes had joined the job: they "
            f"did their work alone. {HOW_TO_JOIN}"
        )

    def overdue(self, command: Sequence[str]) -> str:
        """Say that a worker has not joined in time."""
        return (
            f"`{shlex.join(command)}` was started {self.connect_s:g} s ago (--connect-s), and none of its "
            f"processes has joined the job. {HOW_TO_JOIN}"
        )

    def let_go(self, worker: str) -> None:
        """End the connection of a worker whose command has ended. If it still runs, it ends itself."""
        with self._lock:
            channel = self._channels.get(worker)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """End all connections. A worker that still runs ends itself."""
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()
        self._listener.close()

    def _greet(self, channel: wire.Channel, hello: Mapping[str, Any]) -> None:
        """Handle one connection, until the process at its other end has ended."""
        worker = str(hello["worker"])
        answer = _Answer(int(hello["pid"]), str(hello["words"]), str(hello["token"]))
        with contextlib.closing(channel):
            with self._lock:
                first = self._answers.get(worker)
                if first is None or self._gives_way(first, answer):
                    first = self._answers[worker] = answer
                    self._channels[worker] = channel
            try:
                channel.send({"pid": first.pid, "words": first.words, "token": first.token})
                while first is answer and (message := channel.receive()) is not None:
                    answer.code, answer.has_trained = message["code"], True
            finally:
                answer.is_gone.set()
                with self._lock:
                    if self._channels.get(worker) is channel:
                        del self._channels[worker]

    def _gives_way(self, first: _Answer, later: _Answer) -> bool:
        """Whether another process may be the worker after the first one has ended.

        It may if it is the same one, which has executed itself anew, or if the job has no other process.
        """
        return first.is_gone.is_set() and (first.pid == later.pid or not self.must_join)


class RollCallLink:
    """The worker's side of the roll call: `called` is the value of the variable.

    Raises AlreadyJoined if another process is the worker, and ConnectionError if no launcher answers.
    """

    def __init__(self, called: str):
        address, secret, worker = called.split("/", 2)
        token = secrets.token_hex(8)
        try:
            self._channel = wire.connect(address, secret, timeout_s=_ANSWER_S)
            self._channel.be_patient(_ANSWER_S)
            own = {"pid": os.getpid(), "words": shlex.join(sys.orig_argv)[:200], "token": token}
            self._channel.send({"worker": worker, **own})
            answer = self._channel.receive()
            self._channel.be_patient(None)
        except OSError as error:
            raise ConnectionError(
                f"the launcher of this worker cannot be reached at {address}: {error}. It runs on the same "
                "host; a container must share the host's network."
            ) from None
        if answer is None:
            raise ConnectionError(
                f"the launcher of this worker at {address} has ended. Its own output says why."
            )
        if answer["token"] != token:
            self._channel.close()
            raise AlreadyJoined(already_joined(answer["pid"], answer["words"]))

    def report(self, code: int | None) -> None:
        """Tell the launcher that a run has begun (None), or with which exit code it has ended."""
        with contextlib.suppress(OSError):  # the launcher has ended, and so will this process
            self._channel.send({"code": code})

    def close(self) -> None:
        """End the connection: this process is no worker any more."""
        self._channel.close()

    def wait_for_the_end(self) -> None:
        """Return when the launcher has ended, or has let go of this worker."""
        while self._channel.receive() is not None:
            pass


def _has(pid: int, called: str) -> bool:
    """Return whether the process with this number was started with this value of the variable."""
    try:
        text = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return False  # another user's
    except OSError:  # it has ended, or there is no such folder: not Linux
        return not pathlib.Path("/proc/self").exists()
    return f"{VARIABLE}={called}".encode() in text.split(b"\0")


def already_joined(pid: int | str, words: str = "") -> str:
    """Say why this process cannot train as part of the job that its environment describes."""
    what = f" (`{words}`)" if words else ""
    return (
        "this process cannot train: it has the environment of a worker of a job, and process "
        f"{pid}{what} has joined as that worker already. The first process that uses "
        "jaxgoodput.Trainer is the worker. "
        "If that was a Python program that starts this script, put a wrapper before it: `jaxgoodput run ... "
        "-- env python PROGRAM`. To train alone, as a run of its own, start this process without the "
        "variables JAXGOODPUT_*."
    )
