"""One job on hosts that come and go: `jaxgoodput run --nnodes MIN:MAX`.

Here is the coordinator, which must outlive every host; agents are started on the hosts that are named, and
others may join later with `jaxgoodput agent`.
"""

import contextlib
import os
import queue
import shutil
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxgoodput import _wire as wire
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher import hosts as places
from jaxgoodput.launcher.agent import facts_of
from jaxgoodput.launcher.coordinator import Coordinator, with_slots
from jaxgoodput.launcher.local import shim_command
from jaxgoodput.launcher.rendezvous import Limits
from jaxgoodput.launcher.supervise import StopSignal, UsageError, exit_code, say, signals_to


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `jaxgoodput run --nnodes` was asked for."""

    least: int
    most: int
    slots: int = 1
    """Processes of each host."""
    hosts_per_group: int | None = None
    """That share one copy of the model; None: each process has its own."""
    devices_per_process: int | None = None
    hosts: tuple[str, ...] = ()
    """Through `rsh`; none: this machine."""
    local_hosts: int = 1
    rsh: str = "ssh -o BatchMode=yes"
    python: str = "python3"
    endpoint: str | None = None
    max_restarts: int = 10
    grace_s: float = 60.0
    silent_s: float = 10.0
    join_s: float = 10.0
    admit_every_s: float = 5.0
    exclude_slow: float = 2.0
    exclude_s: float = 300.0
    reconnect_s: float = 0.0
    """For which an agent whose coordinator has gone looks for another at the same place."""
    secret: str | None = field(default=None, repr=False)
    """Of the job; None: that of the environment, or a new one."""


def run_elastic(command: Sequence[str], job: Job, *, clock: Clock | None = None) -> int:
    """Run `command` on as many hosts as there are, between `least` and `most`; its exit code.

    Raises UsageError for what cannot be started.
    """
    clock = clock or SystemClock()
    program = shim_command(command)[0]  # named before anything is started
    if not job.hosts and shutil.which(program) is None:
        raise UsageError(f"there is no program {program!r}.")
    given = job.secret or os.environ.get(places.SECRET)
    if not job.hosts and job.local_hosts == 0 and not given:
        raise UsageError(
            "with --local-hosts 0 all hosts come by `jaxgoodput agent`, which needs the secret of the job: "
            f"set {places.SECRET} to the same text here and there."
        )
    secret = given or wire.make_secret()
    try:
        limits = Limits(
            least=job.least,
            most=job.most,
            group_size=job.hosts_per_group or 1,
            max_restarts=job.max_restarts,
            silent_s=job.silent_s,
            join_s=job.join_s,
            admit_every_s=job.admit_every_s,
            exclude_slow=job.exclude_slow,
            exclude_s=job.exclude_s,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if job.hosts:
        started = places.remote(job.hosts, secret, shell=job.rsh, python=job.python)
    else:
        started = places.local(job.local_hosts, secret)
    host, port = _endpoint(job)
    group = job.hosts_per_group or 1
    needed = -(-job.least // group) * group
    if port is None and 0 < len(started.names) < needed:
        raise UsageError(
            f"--nnodes {job.least}:{job.most} needs {needed} hosts, {len(started.names)} are named, and "
            "nobody else knows where to come. Name more, or give a port for others to come to: "
            "--rdzv-endpoint HOST:PORT."
        )
    from jaxgoodput import _jax

    _jax.quiet_runtime_log()
    events: queue.SimpleQueue[StopSignal] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(events))
        coordinator = Coordinator(
            with_slots(limits, job.slots, grouped=job.hosts_per_group is not None),
            host=host,
            port=port,
            secret=secret,
            facts=facts_of(command),
            clock=clock,
        )
        stack.callback(started.close)
        stack.callback(coordinator.close)
        say(f"the job is at {coordinator.address}, for {job.least} to {job.most} hosts")

        named = RemoteHosts(started.names, coordinator, needed)

        def told() -> str | None:
            if not events.empty():
                return signal.Signals(events.get().signum).name
            return named.look() if named.names and port is None else None

        started.start(_agent_arguments(command, job, coordinator.address), named.ended)
        return coordinator.run(told)


class RemoteHosts:
    """The hosts whose agents were started from here, where nobody else knows how to come to the job.

    An agent that has ended comes no more. With fewer than `least` left the job would wait for ever.
    """

    def __init__(self, names: Sequence[str], coordinator: Coordinator, least: int):
        self.names = names
        self._coordinator = coordinator
        self._least = least
        self._codes: dict[str, int] = {}  # in the order of their ends
        self._could_train = False
        self._is_said = False

    def ended(self, name: str, code: int) -> None:
        """An agent has ended. From any thread."""
        self._coordinator.lost(name, f"its agent has ended with {code}")
        self._codes[name] = code

    def look(self) -> str | None:
        """End the job if it cannot go on; "SIGTERM" where what it has in memory is to be saved first."""
        codes = dict(self._codes)
        here = set(self._coordinator.hosts)
        self._could_train |= len(here) >= self._least
        left = (set(self.names) - set(codes)) | here
        if self._is_said or len(left) >= self._least:
            return None
        self._is_said = True
        if not left:
            self._coordinator.give_up(exit_code([*codes.values()]), "all agents have ended")
            return None
        why = f"the agents of {', '.join(codes)} have ended, and it needs {self._least} hosts"
        if self._could_train:
            say(f"the job cannot go on: {why}")
            return signal.SIGTERM.name
        self._coordinator.give_up(exit_code([*codes.values()]), why)
        return None


def _agent_arguments(command: Sequence[str], job: Job, address: str) -> list[str]:
    arguments = ["--rdzv-endpoint", address, "--nproc-per-node", str(job.slots)]
    if job.devices_per_process is not None:
        arguments += ["--devices-per-process", str(job.devices_per_process)]
    arguments += ["--grace-s", str(job.grace_s), "--silent-s", str(job.silent_s)]
    arguments += ["--reconnect-s", str(job.reconnect_s)]
    return [*arguments, "--", *command]


def _endpoint(job: Job) -> tuple[str, int | None]:
    """Where to listen: on the loopback interface, unless other hosts are to come."""
    if job.endpoint is None and not job.hosts:
        return "127.0.0.1", None
    if job.endpoint is None:
        name = socket.gethostname()
        try:
            own = socket.gethostbyname(name)
        except OSError as error:
            own = f"nothing ({error})"
        if own.startswith("127.") or " " in own:
            raise UsageError(
                f"the hosts cannot reach this one by its name, {name}, which is {own} here. Say how "
                "they can: --rdzv-endpoint ADDRESS:0."
            )
        return name, None
    host, colon, port = job.endpoint.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(
            f"--rdzv-endpoint {job.endpoint}: give HOST:PORT, PORT from 1 to 65535, or 0 for a free one."
        )
    return host, int(port) or None
