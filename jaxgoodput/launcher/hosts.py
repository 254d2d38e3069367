"""How agents come to be on the hosts of a job: as processes here, or through a remote shell."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxgoodput.launcher.supervise import UsageError

SECRET = "JAXGOODPUT_SECRET"
_END_S = 10.0  # for an agent, which has been told that the job is over


class Hosts(Protocol):
    """Starts agents, and ends them."""

    @property
    def names(self) -> Sequence[str]:
        """Of the hosts."""
        ...

    def start(self, arguments: Sequence[str], on_end: Callable[[str, int], None]) -> None:
        """Start an agent on each host: `arguments` are those of `jaxgoodput`, less its name.

        `on_end` is called, from another thread, with the name and exit code of one that has ended.
        """
        ...

    def close(self) -> None:
        """Wait for all agents to end, and end those that do not."""
        ...


class LocalAgents:
    """Agents that are processes of this host: on it, or remote shells to others."""

    def __init__(self, commands: Mapping[str, Callable[[Sequence[str]], list[str]]], secret: str):
        self._commands = commands
        self._secret = secret
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._is_closing = False

    @property
    def names(self) -> Sequence[str]:
        """Of the hosts."""
        return tuple(self._commands)

    def start(self, arguments: Sequence[str], on_end: Callable[[str, int], None]) -> None:
        """Start them all. Raises UsageError where one cannot be."""
        for name, command in self._commands.items():
            try:
                child = subprocess.Popen(
                    command(["agent", "--name", name, "--secret-stdin", *arguments]),
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C is for the coordinator, which tells them
                )
            except OSError as error:
                self.close()
                raise UsageError(f"the agent of {name} cannot be started: {error}") from None
            self._children[name] = child
            assert child.stdin is not None
            try:
                child.stdin.write(self._secret.encode() + b"\n")
                child.stdin.flush()
            except OSError:
                pass  # it has ended already, which is told
            threading.Thread(target=self._await, args=(name, child, on_end), daemon=True).start()

    def _await(
        self, name: str, child: subprocess.Popen[bytes], on_end: Callable[[str, int], None]
    ) -> None:
        code = child.wait()
        if not self._is_closing:
            on_end(name, code)

    def close(self) -> None:
        """Wait for all agents to end, and end those that do not."""
        self._is_closing = True
        for child in self._children.values():
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
            if child.stdin is not None:
                try:
                    child.stdin.close()
                except OSError:
                    pass  # it did not read what was written last


def local(count: int, secret: str) -> LocalAgents:
    """Agents on this machine, as if they were hosts; one has this machine's own name."""
    names = ["local"] if count == 1 else [f"local{i}" for i in range(count)]
    return LocalAgents({name: _here for name in names}, secret)


def _here(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "jaxgoodput.cli", *arguments]


def remote(names: Sequence[str], secret: str, *, shell: str, python: str) -> LocalAgents:
    """Agents on other hosts through a remote shell, such as `ssh -o BatchMode=yes`, in this folder.

    The shell is called as `SHELL HOST COMMAND`, COMMAND being one word for a shell there.

    Raises UsageError for a name that is there twice.
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
    """The hosts of a file, one a line; what is behind a # is left out.

    Raises UsageError where a line says more, such as how many processes.

    >>> read_host_file("a  # the first\\n\\nb\\n")
    ['a', 'b']
    """
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    for words in lines:
        if len(words) > 1:
            raise UsageError(
                f"the host file says {' '.join(words)!r}: give one host a line. Every host has as many "
                "processes: --nproc-per-node N."
            )
    return [words[0] for words in lines if words]
