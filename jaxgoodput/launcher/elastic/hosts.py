"""Starts the agents of a job's hosts, as processes of this machine or through a remote shell."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxgoodput._worker import Worker, Workers
from jaxgoodput.launcher.host_list import NamedHost
from jaxgoodput.launcher.supervise import UsageError, say
from jaxgoodput.launcher.variables import to_line

SECRET = "JAXGOODPUT_SECRET"
_END_S = 10.0  # how long an agent may take to end when the job is over


class LocalAgents:
    """Agents that are child processes: agents of this host, or remote shells that run agents elsewhere.

    `command` turns a host's name and the arguments of `jaxgoodput` into the command line of its agent. Its
    workers get `variables` in addition to their environment.
    """

    def __init__(
        self,
        names: Sequence[str],
        secret: str,
        command: Callable[[str, Sequence[str]], list[str]],
        variables: Mapping[str, str] | None = None,
    ):
        self.names = tuple(names)
        self._variables = dict(variables or {})
        self._secret = secret
        self._command = command
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers = Workers(
            "agent-watcher", lambda error: say(f"an agent is not watched any more: {error}")
        )
        self._is_closing = False

    def start(
        self, arguments: Callable[[str], Sequence[str]], on_end: Callable[[str, int], None]
    ) -> None:
        """Start an agent on each host, with the arguments of the `jaxgoodput` command for that host.

        `on_end` is called, from another thread, with the name and exit code of each agent that ends. Raises
        UsageError if an agent cannot be started.
        """
        stdin = ["--secret-stdin", *["--env-stdin"] * bool(self._variables)]
        told = [self._secret, *[to_line(self._variables)] * bool(self._variables)]
        for name in self.names:
            try:
                child = subprocess.Popen(
                    self._command(name, ["agent", "--name", name, *stdin, *arguments(name)]),
                    stdin=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C reaches only the coordinator, which tells the agents
                )
            except OSError as error:
                self.close()
                raise UsageError(
                    f"the agent of {name} cannot be started: {error}. Check that this program exists here."
                ) from None
            self._children[name] = child
            assert child.stdin is not None
            with contextlib.suppress(OSError):  # it has ended already, which its watcher reports
                child.stdin.write("".join(f"{line}\n" for line in told).encode())
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
        """Wait for all agents to end, and kill the ones that do not end in time."""
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


def local(count: int, secret: str, variables: Mapping[str, str] | None = None) -> LocalAgents:
    """Simulate `count` hosts on this machine, each with an agent of its own."""
    names = ["local"] if count == 1 else [f"local{i}" for i in range(count)]
    command = [sys.executable, "-m", "jaxgoodput.cli"]
    return LocalAgents(names, secret, lambda name, arguments: [*command, *arguments], variables)


def remote(
    hosts: Sequence[NamedHost],
    secret: str,
    variables: Mapping[str, str] | None = None,
    *,
    shell: str,
    python: str,
) -> LocalAgents:
    """Run agents on other hosts through a remote shell, such as `ssh -o BatchMode=yes`, in this folder.

    The shell is called as `SHELL [-p PORT] HOST COMMAND`; COMMAND is one word for the shell on that host.
    """
    by_name = {host.name: host for host in hosts}

    def command(name: str, arguments: Sequence[str]) -> list[str]:
        there = shlex.join([python, "-m", "jaxgoodput.cli", *arguments])
        host = by_name[name]
        port = [] if host.port is None else ["-p", str(host.port)]
        folder = shlex.quote(os.getcwd())
        return [*shlex.split(shell), *port, host.target, f"cd {folder} && exec {there}"]

    return LocalAgents([*by_name], secret, command, variables)
