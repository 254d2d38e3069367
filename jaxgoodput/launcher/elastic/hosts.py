"""Starts the agents of a job's hosts, as processes of this machine or through a remote shell."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from jaxgoodput._worker import Worker, Workers
from jaxgoodput.launcher.supervise import UsageError, say

SECRET = "JAXGOODPUT_SECRET"
_END_S = 10.0  # how long an agent may take to end when the job is over


class Hosts(Protocol):
    """Starts agents, and ends them."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the hosts."""
        ...

    def start(self, arguments: Sequence[str], on_end: Callable[[str, int], None]) -> None:
        """Start an agent on each host, with these arguments of the `jaxgoodput` command.

        `on_end` is called, from another thread, with the name and exit code of each agent that ends.
        """
        ...

    def close(self) -> None:
        """Wait for all agents to end, and kill those that do not."""
        ...


class LocalAgents:
    """Agents that are child processes: agents of this host, or remote shells that run agents elsewhere."""

    def __init__(self, commands: Mapping[str, Callable[[Sequence[str]], list[str]]], secret: str):
        self._commands = commands
        self._secret = secret
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers = Workers("agent-watcher", lambda error: say(f"watching an agent: {error}"))
        self._is_closing = False

    @property
    def names(self) -> Sequence[str]:
        """Names of the hosts."""
        return tuple(self._commands)

    def start(self, arguments: Sequence[str], on_end: Callable[[str, int], None]) -> None:
        """Start all agents. Raises UsageError if one cannot be started."""
        for name, command in self._commands.items():
            try:
                child = subprocess.Popen(
                    command(["agent", "--name", name, "--secret-stdin", *arguments]),
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C reaches only the coordinator, which tells the agents
                )
            except OSError as error:
                self.close()
                raise UsageError(f"the agent of {name} cannot be started: {error}") from None
            self._children[name] = child
            assert child.stdin is not None
            with contextlib.suppress(OSError):  # it has ended already, which its watcher reports
                child.stdin.write(self._secret.encode() + b"\n")
                child.stdin.flush()
            self._watchers.start(partial(self._watch, name, child, on_end))

    def _watch(
        self,
        name: str,
        child: subprocess.Popen[bytes],
        on_end: Callable[[str, int], None],
        worker: Worker,
    ) -> None:
        code = child.wait()
        if not self._is_closing:
            on_end(name, code)

    def close(self) -> None:
        """Wait for all agents to end, and kill those that do not."""
        self._is_closing = True
        for child in self._children.values():
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
            if child.stdin is not None:
                with contextlib.suppress(OSError):  # it did not read what was written last
                    child.stdin.close()
        self._watchers.join()


def local(count: int, secret: str) -> LocalAgents:
    """Simulate `count` hosts on this machine, each with an agent of its own."""
    names = ["local"] if count == 1 else [f"local{i}" for i in range(count)]
    return LocalAgents({name: _here for name in names}, secret)


def _here(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "jaxgoodput.cli", *arguments]


def remote(names: Sequence[str], secret: str, *, shell: str, python: str) -> LocalAgents:
    """Run agents on other hosts through a remote shell, such as `ssh -o BatchMode=yes`, in this folder.

    The shell is called as `SHELL HOST COMMAND`, where COMMAND is one word for the shell on that host.
    Raises UsageError for a name that occurs twice.
    """
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise UsageError(f"{', '.join(twice)} is there twice among the hosts. Name each host once.")

    def command(name: str) -> Callable[[Sequence[str]], list[str]]:
        def of(arguments: Sequence[str]) -> list[str]:
            there = shlex.join([python, "-m", "jaxgoodput.cli", *arguments])
            return [*shlex.split(shell), name, f"cd {shlex.quote(os.getcwd())} && exec {there}"]

        return of

    return LocalAgents({name: command(name) for name in names}, secret)


def read_host_file(text: str) -> list[str]:
    """Return the hosts in a host file: one per line, with comments after #.

    Raises UsageError for a line with more than a name, such as a number of processes.

    >>> read_host_file("a  # the first\\n\\nb\\n")
    ['a', 'b']
    """
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    for words in lines:
        if len(words) > 1:
            raise UsageError(
                f"the host file says {' '.join(words)!r}; give one host per line and nothing else. All hosts "
                "run the same number of processes: --nproc-per-node N."
            )
    return [words[0] for words in lines if words]
