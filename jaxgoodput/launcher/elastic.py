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
from dataclasses import dataclass

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher import hosts as places
from jaxgoodput.launcher import wire
from jaxgoodput.launcher.agent import facts_of
from jaxgoodput.launcher.coordinator import Coordinator, with_slots
from jaxgoodput.launcher.local import shim_command
from jaxgoodput.launcher.rendezvous import Limits
from jaxgoodput.launcher.supervise import Signalled, UsageError, exit_code, say, signals_to


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `jaxgoodput run --nnodes` was asked for."""

    least: int
    most: int
    slots: int = 1
    """Processes of each host."""
    devices_per_process: int | None = None
    hosts: tuple[str, ...] = ()
    """Through `shell`; none: this machine."""
    local_hosts: int = 1
    shell: str = "ssh -o BatchMode=yes"
    python: str = "python3"
    endpoint: str | None = None
    max_restarts: int = 10
    grace_s: float = 60.0
    silent_s: float = 10.0
    join_s: float = 10.0
    admit_every_s: float = 5.0
    reconnect_s: float = 0.0
    """For which an agent whose coordinator has gone looks for another at the same place."""


def run_elastic(command: Sequence[str], job: Job, *, clock: Clock | None = None) -> int:
    """Run `command` on as many hosts as there are, between `least` and `most`; its exit code.

    Raises UsageError for what cannot be started.
    """
    clock = clock or SystemClock()
    program = shim_command(command)[0]  # named before anything is started
    if not job.hosts and shutil.which(program) is None:
        raise UsageError(f"there is no program {program!r}.")
    if not job.hosts and job.local_hosts == 0 and not os.environ.get(places.SECRET):
        raise UsageError(
            "with --local-hosts 0 all hosts come by `jaxgoodput agent`, which needs the secret of the job: "
            f"set {places.SECRET} to the same text here and there."
        )
    secret = os.environ.get(places.SECRET) or wire.make_secret()
    try:
        limits = Limits(
            least=job.least,
            most=job.most,
            max_restarts=job.max_restarts,
            silent_s=job.silent_s,
            join_s=job.join_s,
            admit_every_s=job.admit_every_s,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if job.hosts:
        started = places.remote(job.hosts, secret, shell=job.shell, python=job.python)
    else:
        started = places.local(job.local_hosts, secret)
    host, port = _endpoint(job)
    from jaxgoodput import _jax

    _jax.quiet_runtime_log()
    events: queue.SimpleQueue[Signalled] = queue.SimpleQueue()

    def told() -> str | None:
        return None if events.empty() else signal.Signals(events.get().signum).name

    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(events))
        coordinator = Coordinator(
            with_slots(limits, job.slots),
            host=host,
            port=port,
            secret=secret,
            facts=facts_of(command),
            clock=clock,
        )
        stack.callback(started.close)
        stack.callback(coordinator.close)
        say(f"the job is at {coordinator.address}, for {job.least} to {job.most} hosts")

        codes: dict[str, int] = {}
        num_hosts = len(job.hosts) or job.local_hosts

        def ended(name: str, code: int) -> None:
            coordinator.lost(name, f"its agent has ended with {code}")
            codes[name] = code
            if len(codes) == num_hosts and port is None:  # nobody else knows where to come
                coordinator.give_up(exit_code([*codes.values()]), "all agents have ended")

        started.start(_agent_arguments(command, job, coordinator.address), ended)
        return coordinator.run(told)


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
    if not colon or not host or not port.isdigit():
        raise UsageError(f"--rdzv-endpoint {job.endpoint}: give HOST:PORT, PORT 0 for a free one.")
    return host, int(port) or None
