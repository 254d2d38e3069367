"""One job as several processes of this host: starts them, watches them, and passes signals on.

    python train.py ...      ->   rank 0 .. N-1: python -m jaxgoodput.launcher train.py ...

JAX's coordination service lives in this process, not in a worker, so that it survives the death of any
worker. Each worker leads a process group of its own. When the worker ends, its whole group is killed.
"""

import contextlib
import dataclasses
import importlib.util
import os
import queue
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence

from jaxgoodput._exits import DONE, SAVED, USAGE
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher.roll_call import CONNECT_S
from jaxgoodput.launcher.supervise import (
    ChildExit,
    ProcessesEnd,
    StopSignal,
    UsageError,
    open_roll_call,
    say,
    signals_to,
    supervise,
    told_within,
)
from jaxgoodput.launcher.worker import WorkerEnv, inherited_environ

_SHIM = ("-m", "jaxgoodput.launcher")
_FLAGS = frozenset("-b -B -d -E -I -O -OO -P -q -s -S -u -v".split())
_FLAGS_WITH_VALUE = frozenset(("-W", "-X"))

# glibc settings in bytes: largest block to keep, most free memory to keep, least to fetch at once.
_KEEP_FREED_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
LONGEST_PAUSE_S = 60.0  # before a crashed job is restarted
_OLDEST_GLIBC = (2, 36)  # older versions are untested; some refuse to keep blocks above 32 MiB


def keep_freed_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a CPU worker's next step reuses the memory that its last step freed.

    XLA:CPU allocates a step's temporaries anew each time, and glibc returns large blocks to the kernel at
    once. On the recommender example that cost 12,600 page faults and half of the CPU time of each step. The
    price is a resident size that stays at its peak.

    Returns no variables if steps run on an accelerator, if the C library is not glibc, or if `environ`
    already contains malloc settings.
    """
    platforms = environ.get("JAX_PLATFORMS")
    plugins = any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
    on_cpu = platforms == "cpu" if platforms else not plugins
    tunables = environ.get("GLIBC_TUNABLES", "")
    is_decided = "glibc.malloc" in tunables or not _KEEP_FREED_PAGES.keys().isdisjoint(environ)
    if is_decided or not on_cpu or _glibc() < _OLDEST_GLIBC:
        return {}
    # One arena only: any other than the first keeps no block above 64 MiB.
    return {"MALLOC_ARENA_MAX": environ.get("MALLOC_ARENA_MAX", "1"), **_KEEP_FREED_PAGES}


def _glibc() -> tuple[int, ...]:
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):  # musl, macOS
        return ()
    return tuple(map(int, version.split("."))) if name == "glibc" else ()


def shim_command(command: Sequence[str]) -> list[str]:
    """Return `command` with its Python script or module run through the worker shim.

    A bare `python`, or a bare script, runs with this interpreter. Any other program stays as it is; a script
    that it starts joins the job when it first uses `jaxgoodput.Trainer`.

    >>> shim_command(["/opt/python3", "-u", "train.py", "--workdir=w"])
    ['/opt/python3', '-u', '-m', 'jaxgoodput.launcher', 'train.py', '--workdir=w']

    Raises:
        UsageError: there is no command, or Python is given no script (`-c`, `-`, or nothing).
    """
    if not command:
        raise UsageError("there is no command to run: `jaxgoodput run ... -- python train.py`.")
    program = os.path.basename(command[0])
    if program.endswith(".py"):
        return [sys.executable, *_SHIM, *command]
    if not program.startswith("python") or program.removeprefix("python").strip("0123456789."):
        return list(command)
    interpreter = command[0] if os.path.dirname(command[0]) else sys.executable
    num_options = _count_options(command[1:])
    options, rest = command[1 : num_options + 1], command[num_options + 1 :]
    if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        given = " ".join(command)
        raise UsageError(
            f"`{given}` names no script that each process could run. Put the code into a file: "
            "`jaxgoodput run ... -- python train.py`, or `python -m MODULE`."
        )
    return [interpreter, *options, *_SHIM, *rest]


def _count_options(words: Sequence[str]) -> int:
    """Return how many of the words after `python` are options of the interpreter."""
    position = 0
    while position < len(words):
        word = words[position]
        if word not in _FLAGS and word[:2] not in _FLAGS_WITH_VALUE:
            break
        position += 2 if word in _FLAGS_WITH_VALUE else 1
    return position


def run_local(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int | None = None,
    *,
    max_restarts: int = 0,
    grace_s: float = 60.0,
    crash_grace_s: float = 5.0,
    connect_s: float = CONNECT_S,
    variables: Mapping[str, str] | None = None,
    clock: Clock | None = None,
) -> int:
    """Run `command` as one job of `num_processes` workers on this host; return its exit code.

    Output, signals, failures and hangs are handled as `supervise` says. If there are several workers, each
    has to join the job within `connect_s`. The exit code is 0 if all workers are done, 143 if all are done or
    saved, otherwise the code of the first worker that failed.

    A job that ends without a signal is restarted, at most `max_restarts` times: at once after 143 (saved,
    wants a restart); after a crash, with pauses that double; never after 2 (wrong usage). It is given up
    after two crashes in a row without progress between them. A script without a `Trainer` reports no
    progress.

    On a machine with GPUs, process r uses the devices [r * devices_per_process, (r + 1) *
    devices_per_process), by default one device. On CPU, each process has that many virtual devices.
    `JAX_PLATFORMS` chooses the platform, as usual; `variables` are added to the environment of each process.
    On CPU the workers keep the memory that steps free (`keep_freed_pages`).

    Raises:
        UsageError: a number is too small, or the command cannot be started.
    """
    _require_a_process(num_processes)
    if devices_per_process is not None and devices_per_process < 1:
        raise UsageError(
            f"{devices_per_process} devices per process are too few: each process has at least one. "
            "Give 1 or more."
        )
    if max_restarts < 0:
        raise UsageError(f"max_restarts={max_restarts} is negative. Give 0 or more.")
    command = shim_command(command)
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r}.")
    # Imported only here, so that errors in a command line are reported without waiting for JAX.
    from jaxgoodput import _jax

    restarts = Restarts(max_restarts)
    events: queue.SimpleQueue[ChildExit | StopSignal] = queue.SimpleQueue()
    with signals_to(events):  # also between two attempts, and while this host's services end
        while True:
            with contextlib.ExitStack() as stack:
                coordinator = None
                if num_processes > 1:
                    _jax.quiet_runtime_log()
                    service = _jax.start_coordination_service(num_processes)
                    stack.callback(service.shutdown)
                    coordinator = service.address
                roll_call = open_roll_call(must_join=num_processes > 1, connect_s=connect_s)
                stack.callback(roll_call.close)
                env = WorkerEnv(
                    num_processes=num_processes,
                    process_id=0,
                    coordinator=coordinator,
                    job_id=f"local-{os.getpid()}",
                    devices_per_process=devices_per_process,
                    restart=restarts.num,
                    grace_s=grace_s,
                )
                end = supervise(
                    [command] * num_processes,
                    _environs(env, variables or {}),
                    prefix_output=True,
                    grace_s=grace_s,
                    crash_grace_s=crash_grace_s,
                    clock=clock or SystemClock(),
                    roll_call=roll_call,
                    events=events,
                )
            pause_s = restarts.pause_s(end)
            if pause_s is None or told_within(pause_s, events):
                return end.code


def _require_a_process(num_processes: int) -> None:
    if num_processes < 1:
        raise UsageError(
            f"{num_processes} processes are too few: a job has at least one. Give 1 or more."
        )


def _environs(env: WorkerEnv, variables: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment variables of each local worker; `env` describes the worker of rank 0."""
    inherited = {**inherited_environ(), **variables}
    inherited |= keep_freed_pages(inherited)
    count = env.devices_per_process or 1
    has_all = env.num_processes == 1 and env.devices_per_process is None
    return [
        {
            **inherited,
            "PYTHONUNBUFFERED": "1",  # lines appear when they are written
            **dataclasses.replace(
                env,
                process_id=rank,
                local_device_ids=None
                if has_all
                else tuple(range(rank * count, (rank + 1) * count)),
            ).to_environ(),
        }
        for rank in range(env.num_processes)
    ]


class Restarts:
    """Decides whether and when a job that has ended is restarted, from how its earlier attempts went."""

    def __init__(self, most: int):
        self.num = 0
        """Number of restarts so far."""
        self._most = most
        self._num_crashes = 0
        self._num_fruitless = 0  # consecutive crashes without progress
        self._furthest: int | None = None  # last step of any attempt

    def pause_s(self, end: ProcessesEnd) -> float | None:
        """Return how many seconds to wait before the next attempt; None: do not restart the job."""
        if end.told or end.code in (DONE, USAGE) or self.num >= self._most:
            return None
        self.num += 1
        has_progressed = self._has_progressed(end)
        if end.code == SAVED:
            return 0.0
        self._num_crashes += 1
        self._num_fruitless = 0 if has_progressed else self._num_fruitless + 1
        if self._num_fruitless == 2:
            say(
                "the job has crashed twice without progress, and is not restarted. See its output above for "
                "the cause."
            )
            return None
        pause_s = min(2.0 ** (self._num_crashes - 1), LONGEST_PAUSE_S)
        say(f"restarting the job in {pause_s:g} s (restart {self.num} of at most {self._most})")
        return pause_s

    def _has_progressed(self, end: ProcessesEnd) -> bool:
        before = end.began if self._furthest is None else self._furthest
        if end.step is None or before is None or end.step <= before:
            return False
        self._furthest = end.step
        return True


def run_coordinated(
    command: Sequence[str],
    num_processes: int,
    *,
    host: str | None = None,
    port: int | None = None,
    grace_s: float = 60.0,
    clock: Clock | None = None,
) -> int:
    """Serve a job of `num_processes` workers at `host:port` while `command` runs them; return its exit code.

    Use this if another program, such as `srun python -m jaxgoodput.launcher train.py`, starts the workers and
    gives them their ranks. `command` finds the address and the number of processes in its environment; `host`
    is the name under which the workers reach this host (default: its own name). Signals and the exit code
    pass through as in `run_local`.

    Raises:
        UsageError: the number of processes, the port or the command is wrong.
    """
    _require_a_process(num_processes)
    if not command or shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0] if command else ''!r} to run.")
    from jaxgoodput import _jax

    _jax.quiet_runtime_log()
    try:
        service = _jax.start_coordination_service(
            num_processes, host=host or socket.gethostname(), port=port
        )
    except OSError as error:
        raise UsageError(str(error)) from None
    environ = {
        **inherited_environ(),
        "JAXGOODPUT_COORDINATOR": service.address,
        "JAXGOODPUT_NUM_PROCESSES": str(num_processes),
        "JAXGOODPUT_GRACE_S": str(grace_s),
    }
    events: queue.SimpleQueue[ChildExit | StopSignal] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_to(events))
        stack.callback(service.shutdown)
        end = supervise(
            [command],
            [environ],
            prefix_output=False,
            grace_s=grace_s,
            crash_grace_s=0.0,
            clock=clock or SystemClock(),
            events=events,
        )
    return end.code
