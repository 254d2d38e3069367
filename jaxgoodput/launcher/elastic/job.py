"""One job on hosts that come and go: `jaxgoodput run --nnodes MIN:MAX`.

This process is the coordinator, and must outlive every host. It starts agents on the hosts that are named;
other hosts may join at any time with `jaxgoodput agent`.
"""

import contextlib
import os
import pathlib
import queue
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxgoodput import _wire as wire
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher.elastic import hosts
from jaxgoodput.launcher.elastic.agent import facts_of
from jaxgoodput.launcher.elastic.coordinator import Coordinator, with_slots
from jaxgoodput.launcher.elastic.state import Limits
from jaxgoodput.launcher.host_list import NamedHost
from jaxgoodput.launcher.join_file import JoinDetails, join_file_there
from jaxgoodput.launcher.local import shim_command
from jaxgoodput.launcher.notices.notice import Notice, NoticeSettings
from jaxgoodput.launcher.notices.watch import notices_to
from jaxgoodput.launcher.roll_call import CONNECT_S
from jaxgoodput.launcher.supervise import StopSignal, UsageError, say, signals_to

# Fields of `Limits` that are options of a job under the same name.
_SAME = "least most max_restarts silent_s join_s admit_every_s".split()
_SAME += "exclude_slow exclude_s reports_hosts keep_hosts".split()


@dataclass(frozen=True, kw_only=True)
class Job:
    """Options of `jaxgoodput run --nnodes`. Fields without a description are described in `Limits`."""

    least: int
    """Fewest hosts that may train."""
    most: int
    """Most hosts that may train."""
    slots: int = 1
    """Number of processes per host."""
    hosts_per_group: int | None = None
    """Number of hosts that share one copy of the model; None: each process has its own copy."""
    devices_per_process: int | None = None
    """None: one, or all devices of the host if it runs one process."""
    hosts: tuple[NamedHost, ...] = ()
    """Hosts to reach through `rsh`; empty: simulated hosts on this machine."""
    local_hosts: int = 1
    """Number of simulated hosts."""
    rsh: str = "ssh -o BatchMode=yes"
    """Command of the remote shell."""
    python: str = "python3"
    """The Python that runs agents on other hosts."""
    endpoint: str | None = None
    """Address of the coordinator, HOST:PORT; None: a free port."""
    max_restarts: int = 10
    grace_s: float = 60.0
    """How long processes may take to save and exit after a stop signal, before they are killed."""
    silent_s: float = 10.0
    join_s: float = 10.0
    admit_every_s: float = 5.0
    exclude_slow: float = 2.0
    exclude_s: float = 300.0
    join_file: pathlib.Path | None = None
    """File to write, by which other hosts find the job; see `join_file`."""
    reports_hosts: bool = False
    keep_hosts: bool = False
    reconnect_s: float = 0.0
    """How long an agent that has lost its coordinator looks for another at the same address."""
    connect_s: float = CONNECT_S
    """How long a process may take from its start until it joins the job."""
    notices: NoticeSettings = NoticeSettings()
    """Where hosts, and this process, look for notices that they will be taken away."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the processes on hosts that this command starts."""
    secret: str | None = field(default=None, repr=False)
    """Secret of the job; None: taken from the environment, or made anew."""


def run_elastic(command: Sequence[str], job: Job, *, clock: Clock | None = None) -> int:
    """Run `command` on between `least` and `most` hosts; return the job's exit code.

    Raises UsageError for options that no job can satisfy, and for a command that cannot be started.
    """
    limits, secret = _checked(command, job)
    if job.hosts:
        started = hosts.remote(job.hosts, secret, job.variables, shell=job.rsh, python=job.python)
    else:
        started = hosts.local(job.local_hosts, secret, job.variables)
    host, port = _endpoint(job)
    needed = limits.needed
    can_be_joined = port is not None or job.join_file is not None
    if not can_be_joined and 0 < len(started.names) < needed:
        grouped = job.hosts_per_group is not None
        raise UsageError(
            f"--nnodes {job.least}:{job.most} needs {needed} hosts"
            + f" in groups of {job.hosts_per_group} (--hosts-per-group)" * grouped
            + f", {len(started.names)} are named, and no other host knows where to connect. Name more hosts, "
            "or say how others find the job: --join-file FILE, or --rdzv-endpoint HOST:PORT."
        )
    from jaxgoodput import _jax

    _jax.quiet_runtime_log()
    events: queue.SimpleQueue[StopSignal | Notice] = queue.SimpleQueue()
    clock = clock or SystemClock()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(events))
        stack.enter_context(notices_to(events, job.notices, clock))  # until all has been closed
        slots = {name: _slots_of(job, name) for name in started.names}
        grouped = job.hosts_per_group is not None
        limits = with_slots(limits, job.slots, named=[*slots.values()], grouped=grouped)
        coordinator = Coordinator(
            limits,
            host=host,
            port=port,
            secret=secret,
            facts=facts_of(command),
            clock=clock,
        )
        stack.callback(started.close)
        stack.callback(coordinator.close)
        say(f"the job is at {coordinator.address}, for {job.least} to {job.most} hosts")
        if job.join_file is not None:
            details = JoinDetails(coordinator.address, secret)
            stack.enter_context(join_file_there(job.join_file, details))
        named = NamedHosts(slots, coordinator, limits.needed, may_grow=job.join_file is not None)

        def told() -> str | None:
            while not events.empty():
                why = _why_to_stop(events.get())
                if why is not None:
                    return why
            return named.look() if slots and port is None else None

        started.start(partial(_agent_arguments, command, job, coordinator.address), named.ended)
        return coordinator.run(told)


def _why_to_stop(event: StopSignal | Notice) -> str | None:
    """Return why a signal or a notice to the coordinator's host stops the whole job; None for a warning.

    Without a coordinator there is no job, so it ends with its last step saved while there is time.
    """
    if isinstance(event, StopSignal):
        return signal.Signals(event.signum).name
    say(f"the coordinator's host: {event}")
    return None if event.is_warning else "the coordinator's host will be gone"


def _checked(command: Sequence[str], job: Job) -> tuple[Limits, str]:
    """Return the job's limits, in hosts, and its secret; raise UsageError before anything has started."""
    program = shim_command(command)[0]
    if not job.hosts and shutil.which(program) is None:
        raise UsageError(f"there is no program {program!r}.")
    if not job.hosts and job.local_hosts == 0 and job.variables:
        raise UsageError(
            "--env has no effect with --local-hosts 0, because this command starts no process then. Give it "
            "to each `jaxgoodput agent`."
        )
    slots = {host.slots or job.slots for host in job.hosts}
    if job.hosts_per_group is not None and len(slots) > 1:
        raise UsageError(
            f"the hosts run {', '.join(map(str, sorted(slots)))} processes, and in groups "
            "(--hosts-per-group) all hosts run the same number. Give all the same number of slots."
        )
    given = job.secret or os.environ.get(hosts.SECRET)
    if not job.hosts and job.local_hosts == 0 and not given and job.join_file is None:
        raise UsageError(
            "with --local-hosts 0 all hosts join by `jaxgoodput agent`, which needs the secret of the job. "
            f"Set {hosts.SECRET} to the same text here and on every host, or give --join-file FILE."
        )
    try:
        same = {name: getattr(job, name) for name in _SAME}
        limits = Limits(**same, group_size=job.hosts_per_group or 1)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return limits, given or wire.make_secret()


class NamedHosts:
    """Watches the hosts whose agents this process has started, if no other host is sure to join.

    `slots` are their numbers of processes. An agent that has ended does not come back. If the hosts that are
    left have room for fewer than `least` processes, the job might wait for ever. One that `may_grow` waits
    for its first start all the same.
    """

    def __init__(
        self, slots: Mapping[str, int], coordinator: Coordinator, least: int, *, may_grow: bool
    ):
        self._slots = slots
        self._may_grow = may_grow
        self._coordinator = coordinator
        self._least = least
        self._codes: dict[str, int] = {}  # exit codes, in the order in which the agents ended
        self._could_train = False
        self._is_said = False

    def ended(self, name: str, code: int) -> None:
        """Tell the coordinator that the agent of host `name` ended with an exit code. Thread-safe."""
        self._coordinator.lost(name, f"its agent has ended with exit code {code}")
        self._codes[name] = code

    def look(self) -> str | None:
        """End the job if too few hosts are left; return "SIGTERM" if it is to save its state before."""
        codes = dict(self._codes)
        here = self._coordinator.slots
        self._could_train |= sum(here.values()) >= self._least
        # Processes count: hosts of many may go on without those of few, which an early release lets go.
        left = {name: slots for name, slots in self._slots.items() if name not in codes} | here
        if self._is_said or sum(left.values()) >= self._least:
            return None
        if self._may_grow and left and not self._could_train:
            return None
        self._is_said = True
        sizes = set(self._slots.values())
        needed = f"{self._least} processes"
        if len(sizes) == 1:
            needed = f"{-(-self._least // sizes.pop())} hosts"
        why = f"the agents of {', '.join(codes)} have ended, and it needs {needed}"
        if left and self._could_train:
            say(f"the job cannot go on: {why}")
            return signal.SIGTERM.name
        self._coordinator.give_up([*codes.values()], why if left else "all agents have ended")
        return None


def _slots_of(job: Job, name: str) -> int:
    """Return the number of processes on a host that this command starts."""
    return next((host.slots for host in job.hosts if host.name == name), None) or job.slots


def _agent_arguments(command: Sequence[str], job: Job, address: str, name: str) -> list[str]:
    arguments = ["--rdzv-endpoint", address, "--nproc-per-node", str(_slots_of(job, name))]
    if job.devices_per_process is not None:
        arguments += ["--devices-per-process", str(job.devices_per_process)]
    arguments += ["--grace-s", str(job.grace_s), "--silent-s", str(job.silent_s)]
    arguments += ["--reconnect-s", str(job.reconnect_s), "--connect-s", str(job.connect_s)]
    return [*arguments, *job.notices.to_arguments(), "--", *command]


def _endpoint(job: Job) -> tuple[str, int | None]:
    """Return the host and port to listen at: the loopback interface, unless other hosts are to connect."""
    if job.endpoint is None:
        others_may_come = job.hosts or job.join_file is not None
        return _own_name() if others_may_come else "127.0.0.1", None
    host, colon, port = job.endpoint.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(
            f"--rdzv-endpoint {job.endpoint} is no address. Give HOST:PORT, with PORT from 1 to 65535, or 0 "
            "for a free one."
        )
    return host, int(port) or None


def _own_name() -> str:
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError as error:
        own = f"unknown ({error})"
    if own.startswith("127.") or " " in own:
        raise UsageError(
            f"the hosts cannot reach this one by its name, {name}, whose address is {own} here. Say how "
            "they can: --rdzv-endpoint ADDRESS:0."
        )
    return name
