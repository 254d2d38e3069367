"""Starts scripts under `jaxgoodput run` for tests: time-limited, and leaving nothing behind."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import compilations

LIMIT_S = 90.0


def records_so_far(folder: pathlib.Path) -> list[tuple[int, dict[str, Any]]]:
    """What processes have written to `<pid>.jsonl` until now: (pid, record), without lines begun."""
    return [
        (int(path.stem), json.loads(text))
        for path in folder.glob("*.jsonl")
        for text in path.read_text().split("\n")[:-1]
    ]


@dataclass(frozen=True)
class Finished:
    """How a job ended and what its processes wrote."""

    code: int
    out: str
    err: str

    def lines(self, rank: int, stream: str = "out") -> list[str]:
        """What process `rank` wrote to `out` or `err`, without the prefix."""
        prefix = f"[{rank}] "
        text = self.out if stream == "out" else self.err
        return [s.removeprefix(prefix) for s in text.splitlines() if s.startswith(prefix)]

    def value(self, rank: int, name: str) -> str:
        """The value of the line `name=value` that process `rank` wrote; exactly one.

        Gloo writes pieces of lines to the same pipe at any moment, before or behind ours.
        """
        (value,) = [
            found[1]
            for line in self.lines(rank)
            if (found := re.search(rf"(?<!\w){name}=(.*?)(?=\[Gloo\]|$)", line))
        ]
        return value


class Job:
    """A running job; as a context manager it is killed, workers included, when the test leaves."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None):
        self._files = [tempfile.NamedTemporaryFile("w+", suffix=s) for s in (".out", ".err")]
        self._child = subprocess.Popen(
            list(command),
            env={**os.environ, "JAX_PLATFORMS": "cpu", **compilations.JOBS, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            start_new_session=True,
        )
        self.pid = self._child.pid

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        # The workers die with the launcher; that they do has tests of its own.
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        for file in self._files:
            file.close()

    def text(self) -> str:
        """Everything written so far, out before err."""
        return "".join(pathlib.Path(file.name).read_text() for file in self._files)

    def send(self, signum: int) -> None:
        """Send a signal to the launcher."""
        os.kill(self.pid, signum)

    def running(self) -> bool:
        return self._child.poll() is None

    def wait_for(self, text: str, *, count: int = 1, limit_s: float = LIMIT_S) -> str:
        """Return all output as soon as it holds `text` at least `count` times."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = not self.running()  # asked first: what it wrote before its end counts
            output = self.text()
            if output.count(text) >= count:
                return output
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not appear {count} times in:\n{output}")
            time.sleep(0.02)

    def wait(self, *, limit_s: float = LIMIT_S) -> Finished:
        """Wait for the end; past the limit the test fails with all output."""
        try:
            code = self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            raise AssertionError(f"still running after {limit_s} s:\n{self.text()}") from None
        out, err = (pathlib.Path(file.name).read_text() for file in self._files)
        return Finished(code, out, err)


def start(
    script: pathlib.Path | str,
    num_processes: int,
    devices_per_process: int | None = None,
    *,
    arguments: Sequence[str] = (),
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Job:
    """Start `jaxgoodput run` with `python script arguments`."""
    command = [sys.executable, "-m", "jaxgoodput.cli", "run"]
    command += ["--nproc-per-node", str(num_processes), *options]
    if devices_per_process is not None:
        command += ["--devices-per-process", str(devices_per_process)]
    return Job([*command, "--", "python", str(script), *arguments], environ)


def run(
    script: pathlib.Path | str,
    num_processes: int,
    devices_per_process: int | None = None,
    *,
    limit_s: float = LIMIT_S,
    **options,
) -> Finished:
    """`start`, and wait for the end."""
    with start(script, num_processes, devices_per_process, **options) as job:
        return job.wait(limit_s=limit_s)


def gone(pid: int, *, limit_s: float = 20.0) -> bool:
    """Whether process `pid` ends within the limit (a zombie has ended)."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def signal_soon(signum: signal.Signals, ready: pathlib.Path, *, pid: int | None = None) -> None:
    """Send `signum` (default: to this process) once the file `ready` exists; returns at once."""

    def send():
        deadline = time.monotonic() + LIMIT_S
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid() if pid is None else pid, signum)

    threading.Thread(target=send, daemon=True).start()
