"""Starts the agents of a job's hosts, as processes of this machine or through a remote shell."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

from jaxgoodput._worker import Worker, Workers
from jaxgoodput.launcher.supervise import UsageError, say

SECRET = "JAXGOODPUT_SECRET"
_END_S = 10.0  # how long an agent may take to end when the job is over


class LocalAgents:
    """Agents that are child processes: agents of this host, or remote shells that run agents elsewhere.

    `command` turns a host's name and the arguments of `jaxgoodput` into the command line of its agent.
    """

    def __init__(
        self,
        names: Sequence[str],
        secret: str,
        command: Callable[[str, Sequence[str]], list[str]],
    ):
        self.names = tuple(names)
        self._secret = secret
        self._command = command
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._watchers = Workers(
            "agent-watcher", lambda error: say(f"an agent is not watched any more: {error}")
        )
        self._is_closing = False

    def start(self, arguments: Sequence[str], on_end: Callable[[str, int], None]) -> None:
        """Start an agent on each host, with these arguments of the `jaxgoodput` command.

        `on_end` is called, from another thread, with the name and exit code of each agent that ends. Raises
        UsageError if an agent cannot be started.
        """
        for name in self.names:
            try:
                child = subprocess.Popen(
                    self._command(name, ["agent", "--name", name, "--secret-stdin", *arguments]),
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


def local(count: int, secret: str) -> LocalAgents:
    """Simulate `count` hosts on this machine, each with an agent of its own."""
    names = ["local"] if count == 1 else [f"local{i}" for i in range(count)]
    command = [sys.executable, "-m", "jaxgoodput.cli"]
    return LocalAgents(names, secret, lambda name, arguments: [*command, *arguments])


def remote(names: Sequence[str], secret: str, *, shell: str, python: str) -> LocalAgents:
    """Run agents on other hosts through a remote shell, such as `ssh -o BatchMode=yes`, in this folder.

    The shell is called as `SHELL HOST COMMAND`, where COMMAND is one word for the shell on that host.
    """

    def command(name: str, arguments: Sequence[str]) -> list[str]:
        there = shlex.join([python, "-m", "jaxgoodput.cli", *arguments])
        return [*shlex.split(shell), name, f"cd {shlex.quote(os.getcwd())} && exec {there}"]

    return LocalAgents(names, secret, command)


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
