"""Starts `jaxgoodput serve` for tests: a real service on a free port, all of it gone at the end."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import compilations
import processes

from jaxgoodput._fields.serial import encode
from jaxgoodput.cluster.client import Client, RequestRefused, read_token
from jaxgoodput.cluster.service.wire import (
    VERSION,
    ClusterShown,
    JobShown,
    Join,
    NodeWork,
    Receipt,
    Submission,
)
from jaxgoodput.specs import JobSpec, Node

T = TypeVar("T")
LIMIT_S = 120.0


class Service:
    """A service in a folder; `start` and `kill` as often as wanted."""

    def __init__(self, folder: pathlib.Path, *options: str, port: int = 0):
        self.folder = folder
        self.options = options
        self.port = port
        self.child: subprocess.Popen[bytes] | None = None
        self.log = folder.with_name(f"{folder.name}.log")
        self._stack = contextlib.ExitStack()
        self._own: Client | None = None
        self.ca: pathlib.Path | None = None
        """Of its certificate."""

    def __enter__(self) -> "Service":
        try:
            self.start()
        except BaseException:  # `__exit__` is not called then
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGINT)
            try:
                self.child.wait(60.0)
            except subprocess.TimeoutExpired:
                self.kill()
        self._stack.close()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        address = self.folder / "address"
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "jaxgoodput.cli", "serve", "--folder", str(self.folder)]
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [*command, "--port", str(self.port), *self.options],
                env={**os.environ, "JAX_PLATFORMS": "cpu", **compilations.JOBS},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.until(
            lambda: address.exists() and address.read_text() and self.answers(),
            "it does not answer",
        )
        self.port = int(address.read_text().rpartition(":")[2])

    def answers(self) -> bool:
        """Whether a request is answered."""
        client = self.client(timeout_s=5.0)
        try:
            client.call("GET", "nodes", type_=ClusterShown)
        except OSError:
            return False
        except RequestRefused:
            return True
        finally:
            client.close()
        return True

    @property
    def token(self) -> str:
        """The operator's own, or anything where others are used."""
        path = self.folder / "token"
        return read_token(path) if path.exists() else "nobody's"

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self.child is not None
        self.child.kill()
        self.child.wait()

    def client(self, token: str | None = None, timeout_s: float = 30.0) -> Client:
        """A connection."""
        url = (self.folder / "address").read_text().strip()
        token = token or self.token
        made = Client(url, token, timeout_s=timeout_s, ca=self.ca)
        self._stack.callback(made.close)
        return made

    def until(
        self, holds: Callable[[], Any], what: str, limit_s: float = LIMIT_S, every_s: float = 0.1
    ) -> Any:
        """What `holds` returns, once that is something."""
        return until(holds, lambda: self._wrong(what), limit_s, every_s, self._is_alive)

    def _is_alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def _wrong(self, what: str) -> str:
        return f"{what}:\n{self.log.read_text()[-6000:]}"

    def job(self, name: str) -> JobShown:
        """A job as it is now."""
        if self._own is None:
            self._own = self.client()
        return self._own.call("GET", "jobs", name, type_=JobShown)

    def run(self, *arguments: str) -> str:
        """What a command of `jaxgoodput` prints, told of this service."""
        done = subprocess.run(
            [sys.executable, "-m", "jaxgoodput.cli", *_told(arguments, self.folder)],
            capture_output=True,
            text=True,
            timeout=processes.LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def until(
    holds: Callable[[], Any],
    what: Callable[[], str],
    limit_s: float = LIMIT_S,
    every_s: float = 0.1,
    can_be: Callable[[], bool] = lambda: True,
) -> Any:
    """What `holds` returns, once that is something; `what` is said where it does not come to that."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        if time.monotonic() > deadline or not can_be():
            raise AssertionError(what())
        time.sleep(every_s)
    return found


def submit(client: Client, job: Submission) -> JobShown:
    """Hand in a job that nobody runs."""
    return client.call("POST", "jobs", body=job, type_=JobShown, changes=True)


def _told(arguments: Sequence[str], folder: pathlib.Path) -> list[str]:
    return [arguments[0], "--folder", str(folder), *arguments[1:]]


def submission(name: str = "a", **spec: Any) -> Submission:
    """A job that nobody runs."""
    fields = {"max_devices": 8, **spec}
    return Submission(spec=JobSpec(id=name, **fields), command=("python", "train.py"))


def as_json(value: Any) -> bytes:
    """As a client sends it."""
    return json.dumps(encode(value)).encode()


def with_workdir(job: Submission, workdir: str) -> Submission:
    """The job with a workdir."""
    return dataclasses.replace(job, workdir=workdir)


def join(
    client: Client, name: str = "n0", devices: int = 8, instance: str = "one", kind: str = "cpu"
) -> Receipt:
    """A node comes, whose agent is the test."""
    node = Node(name=name, kind=kind, num_devices=devices)
    return client.call(
        "POST", "nodes", body=Join(node=node, instance=instance, version=VERSION), type_=Receipt
    )


def work(client: Client, name: str = "n0", instance: str = "one", **query: Any) -> NodeWork:
    """What the node of the test has to do."""
    return client.call("GET", "nodes", name, "work", type_=NodeWork, instance=instance, **query)
