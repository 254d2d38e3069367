"""One process that a node's agent has started: its lines, its end, and that it does not outlive the agent.

An agent that is killed cannot end what it started. So the kernel tells these processes to stop when it goes
(on Linux): they save and leave their jobs. They hold the agent's folder as long as they run, so the agent
that comes next waits for them and finds the devices free.
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

from jaxgoodput.clock import Clock

_PDEATHSIG = 1  # prctl's option of that name
MOST_LINES = 2000  # that wait to be told
LONGEST_LINE = 4000  # bytes; longer ones come in parts, and none is held as a whole


class Process:
    """A child with its output as lines, which holds a `lock` too. Raises OSError where it cannot start."""

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
        self.is_told = False
        self._clock = clock
        self._on_line = on_line
        self._kill_s: float | None = None
        if not pathlib.Path(cwd).is_dir():
            raise FileNotFoundError(
                f"there is no folder {cwd} here, where the job is to be started"
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
        assert self._child.stdin is not None  # as it was started
        with contextlib.suppress(OSError):  # it has ended already, which its code tells
            self._child.stdin.write(secret.encode() + b"\n")
            self._child.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def code(self) -> int | None:
        """Its exit code, minus the signal where one ended it; None while it runs."""
        if self._kill_s is not None and self._clock.now() >= self._kill_s:
            self._signal(signal.SIGKILL)
            self._kill_s = None
        code = self._child.poll()
        if code is not None:
            self._reader.join(1.0)  # a child of its own may hold the pipe
        return code

    def stop(self, grace_s: float) -> None:
        """Tell it to stop, once; what is left so much later is killed."""
        if not self.is_told:
            self.is_told = True
            self._kill_s = self._clock.now() + grace_s
            self._signal(signal.SIGTERM)

    def _signal(self, kind: signal.Signals) -> None:
        if self._child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if kind == signal.SIGKILL:
                os.killpg(self._child.pid, kind)
            else:
                os.kill(self._child.pid, kind)

    def _read(self) -> None:
        assert self._child.stdout is not None  # as it was started
        with self._child.stdout as pipe:
            while line := pipe.readline(LONGEST_LINE):
                self._on_line(line.decode("utf-8", "replace").rstrip("\r\n"))


class OutputBuffer:
    """What processes wrote and nobody was told yet; of too many the oldest are left out, which is said."""

    def __init__(self):
        self._lines: collections.deque[str] = collections.deque()
        self._num_lost = 0
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        """One more, from any thread."""
        with self._lock:
            self._lines.append(line)
            if len(self._lines) > MOST_LINES:
                self._lines.popleft()
                self._num_lost += 1

    def take(self, most_bytes: int) -> str:
        """As many as may be told at once, one at least; `most_bytes` is of their JSON."""
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
        """These could not be told."""
        with self._lock:
            self._lines.extendleft(reversed(text.splitlines()[-MOST_LINES:]))


def die_with_parent() -> Callable[[], None] | None:
    """Has the kernel send SIGTERM to a child when the thread that started it ends."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PDEATHSIG, signal.SIGTERM)

    return ask
