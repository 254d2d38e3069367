"""One process that a node's agent has started: its output, its exit code, and its end with the agent.

An agent that is killed cannot end its processes. On Linux the kernel therefore sends them SIGTERM when the
agent dies; they save and leave their jobs. While they run, they hold the lock of the agent's folder, so the
next agent waits for them and finds the devices free.
"""

import collections
import contextlib
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

from absl import logging

from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock

_PDEATHSIG = 1  # an option of prctl
MOST_LINES = 2000  # lines that wait to be sent
LONGEST_LINE = 4000  # bytes; a longer line is split, so that it never fills the memory


class Process:
    """A child process whose output is read line by line. Raises OSError if it cannot start.

    It receives `secret` on its standard input. `on_line` is called on another thread with each line that it
    writes. It inherits `lock`, a file descriptor, and holds that lock while it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: str,
        secret: str,
        *,
        on_line: Callable[[str], None],
        clock: Clock,
        lock: int | None = None,
    ):
        self._clock = clock
        self._on_line = on_line
        self._is_stopping = False
        self._kill_s: float | None = None
        if not pathlib.Path(cwd).is_dir():
            raise FileNotFoundError(
                f"there is no folder {cwd} on this node, in which the job should start. Create it on every "
                "node, or submit the job from a shared folder."
            )
        self._child = subprocess.Popen(
            list(command),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
            pass_fds=() if lock is None else (lock,),
        )
        assert self._child.stdin is not None  # it was started with a pipe
        with contextlib.suppress(OSError):  # it has ended already, which its exit code tells
            self._child.stdin.write(secret.encode() + b"\n")
            self._child.stdin.close()
        failed = partial(logging.error, "the output of a process cannot be read any more: %r")
        self._reader = Worker("process-output", self._read, on_error=failed)

    def code(self) -> int | None:
        """Return the exit code, negative for the signal that ended the process; None while it runs."""
        if self._kill_s is not None and self._clock.now() >= self._kill_s:
            self._signal(signal.SIGKILL)
            self._kill_s = None
        code = self._child.poll()
        if code is not None:
            self._reader.join(1.0)  # not for ever: a child of its own may keep the pipe open
        return code

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL if the process still runs after `grace_s`. Idempotent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._kill_s = self._clock.now() + grace_s
            self._signal(signal.SIGTERM)

    def _signal(self, kind: signal.Signals) -> None:
        if self._child.poll() is None:
            # SIGKILL goes to the whole group, SIGTERM only to the process, which tells its children itself.
            send = os.killpg if kind == signal.SIGKILL else os.kill
            with contextlib.suppress(ProcessLookupError):
                send(self._child.pid, kind)

    def _read(self, _: Worker) -> None:
        assert self._child.stdout is not None  # it was started with a pipe
        with self._child.stdout as pipe:
            while line := pipe.readline(LONGEST_LINE):
                self._on_line(line.decode("utf-8", "replace").rstrip("\r\n"))


class OutputBuffer:
    """Output that has not been sent to the service yet. Thread-safe.

    If it grows too long, the oldest lines are dropped, and a line says how many.
    """

    def __init__(self):
        self._lines: collections.deque[str] = collections.deque()
        self._num_lost = 0
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """Add a line of output, which is kept until `take` returns it."""
        with self._lock:
            self._lines.append(line)
            if len(self._lines) > MOST_LINES:
                self._lines.popleft()
                self._num_lost += 1

    def take(self, most_bytes: int) -> str:
        """Remove and return lines of up to `most_bytes` as JSON in all, but at least one line."""
        with self._lock:
            found, size = [], 0
            if self._num_lost and self._lines:
                found.append(f"jaxgoodput: {self._num_lost} lines are left out here")
                self._num_lost = 0
            while self._lines and size < most_bytes:
                found.append(self._lines.popleft())
                size += len(json.dumps(found[-1]))
        return "".join(f"{line}\n" for line in found)

    def give_back(self, text: str) -> None:
        """Put text that could not be sent back in front of the other lines."""
        with self._lock:
            self._lines.extendleft(reversed(text.splitlines()[-MOST_LINES:]))


def die_with_parent() -> Callable[[], None] | None:
    """Return a `preexec_fn` that has the kernel send SIGTERM to a child when its starting thread ends.

    Returns None on systems other than Linux, which cannot do this.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PDEATHSIG, signal.SIGTERM)

    return ask
