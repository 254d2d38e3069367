"""One job as several processes of this host: start, watch, pass signals on, leave nobody behind.

    python train.py ...      ->   rank 0 .. N-1: python -m jaxgoodput.launcher train.py ...

The coordination service lives here and not in a worker, so that no worker's death takes it along.
Each worker leads a process group of its own: all of it goes when the worker goes.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher.supervise import (
    DONE,
    SAVED,
    USAGE,
    ProcessesEnd,
    UsageError,
    say,
    supervise,
    told_within,
)
from jaxgoodput.launcher.worker import WorkerEnv, inherited_environ

_SHIM = ("-m", "jaxgoodput.launcher")
_FLAGS = frozenset("-b -B -d -E -I -O -OO -P -q -s -S -u -v".split())
_FLAGS_WITH_VALUE = frozenset(("-W", "-X"))

# Numbers of bytes: blocks to keep, what may lie free, what to fetch at once.
_KEEP_FREED_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
LONGEST_PAUSE_S = 60.0  # before a job that crashed is started again
_OLDEST_GLIBC = (2, 36)  # older ones were not tried; some refuse to keep blocks above 32 MiB


def keep_freed_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make a CPU worker's next step find the memory that its last step freed.

    XLA:CPU allocates a step's temporaries anew each time, and glibc gives large blocks back to the
    kernel at once: on the recommender 12,600 page faults and half of the CPU time of each step. The
    price is a resident size that stays at its peak. None of them where steps run on an accelerator,
    where the C library is another, and where `environ` has decided about malloc already.
    """
    platforms = environ.get("JAX_PLATFORMS")
    plugins = any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
    on_cpu = platforms == "cpu" if platforms else not plugins
    tunables = environ.get("GLIBC_TUNABLES", "")
    is_decided = "glibc.malloc" in tunables or not _KEEP_FREED_PAGES.keys().isdisjoint(environ)
    if is_decided or not on_cpu or _glibc() < _OLDEST_GLIBC:
        return {}
    # An arena that is not the first keeps no block above 64 MiB.
    return {"MALLOC_ARENA_MAX": environ.get("MALLOC_ARENA_MAX", "1"), **_KEEP_FREED_PAGES}


def _glibc() -> tuple[int, ...]:
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (ValueError, OSError):  # musl, macOS
        return ()
    return tuple(map(int, version.split("."))) if name == "glibc" else ()


def shim_command(command: Sequence[str]) -> list[str]:
    """`command` with its Python script or module run through the worker shim.

    A bare `python` or a bare script becomes this interpreter; any other program stays as it is, and
    its own Python code joins the job with `jaxgoodput.initialize()`.

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
    position = 1
    while position < len(command) and (
        command[position] in _FLAGS or command[position][:2] in _FLAGS_WITH_VALUE
    ):
        position += 2 if command[position] in _FLAGS_WITH_VALUE else 1
    options, rest = list(command[1:position]), list(command[position:])
    if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        given = " ".join(command)
        raise UsageError(
            f"`{given}` names no script that each process could run. Put the code into a file: "
            "`jaxgoodput run ... -- python train.py`, or `python -m MODULE`."
        )
    return [interpreter, *options, *_SHIM, *rest]


def run_local(
    command: Sequence[str],
    num_processes: int,
    devices_per_process: int | None = None,
    *,
    max_restarts: int = 0,
    grace_s: float = 60.0,
    crash_grace_s: float = 5.0,
    clock: Clock | None = None,
) -> int:
    """Run `command` as one job of `num_processes` workers on this host; its exit code.

    Every line of a worker appears here behind its rank, `[0] ...`. SIGTERM, SIGINT and SIGHUP are
    passed on to all workers, which then have `grace_s` to save and leave; a second SIGINT kills. When a
    worker fails, the others get `crash_grace_s` to see it, as long again after SIGTERM, and are
    then killed. When this process is killed, its workers die with it.

    The code is 0 if all workers are done, 143 if all are done or saved, otherwise that of the first
    to fail. A job that ends without having been told to is started again, at most `max_restarts`
    times: at once after 143 (saved, wants a restart), after a crash when a pause is over that doubles
    each time, and not after 2 (wrong usage). Two crashes in a row at which it came no further than
    before end it: a script without a `Trainer` never tells how far it came.

    On a GPU machine process r uses the devices [r * devices_per_process, (r + 1) *
    devices_per_process) (default 1); on CPU that many virtual ones. `JAX_PLATFORMS` chooses, as
    ever. On CPU the workers keep the memory that steps free (`keep_freed_pages`).

    Raises:
        UsageError: a number is below its least value, or the command cannot be started.
    """
    if num_processes < 1:
        raise UsageError(f"{num_processes} processes: a job has at least one.")
    if devices_per_process is not None and devices_per_process < 1:
        raise UsageError(f"{devices_per_process} devices per process: each has at least one.")
    if max_restarts < 0:
        raise UsageError(f"max_restarts={max_restarts}: give 0 or more.")
    command = shim_command(command)
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no program {command[0]!r}.")
    # Only here: no command line that is wrong should wait for JAX to be imported.
    from jaxgoodput import _jax

    everything = num_processes == 1 and devices_per_process is None
    devices = devices_per_process or 1
    inherited = inherited_environ()
    inherited |= keep_freed_pages(inherited)
    restarts = Restarts(max_restarts)
    while True:
        with contextlib.ExitStack() as stack:
            coordinator = None
            if num_processes > 1:
                _jax.quiet_runtime_log()
                service = _jax.start_coordination_service(num_processes)
                stack.callback(service.shutdown)
                coordinator = service.address
            environs = [
                {
                    **inherited,
                    "PYTHONUNBUFFERED": "1",  # lines appear when they are written
                    **WorkerEnv(
                        num_processes=num_processes,
                        process_id=rank,
                        coordinator=coordinator,
                        job_id=f"local-{os.getpid()}",
                        devices_per_process=devices_per_process,
                        local_device_ids=None
                        if everything
                        else tuple(range(rank * devices, (rank + 1) * devices)),
                        restart=restarts.num,
                        grace_s=grace_s,
                    ).to_environ(),
                }
                for rank in range(num_processes)
            ]
            end = supervise(
                [command] * num_processes,
                environs,
                prefix_output=True,
                grace_s=grace_s,
                crash_grace_s=crash_grace_s,
                clock=clock or SystemClock(),
            )
        pause_s = restarts.pause_s(end)
        if pause_s is None or told_within(pause_s):
            return end.code


class Restarts:
    """Decides whether a job that has ended is started again, and when; remembers how it went so far."""

    def __init__(self, most: int):
        self.num = 0
        self._most = most
        self._num_crashes = 0
        self._num_fruitless = 0  # crashes in a row
        self._furthest: int | None = None

    def pause_s(self, end: ProcessesEnd) -> float | None:
        """How long to wait before the next start; None: there is none."""
        if end.told or end.code in (DONE, USAGE) or self.num >= self._most:
            return None
        self.num += 1
        before = end.began if self._furthest is None else self._furthest
        has_progressed = end.step is not None and before is not None and end.step > before
        if has_progressed:
            self._furthest = end.step
        if end.code == SAVED:
            return 0.0
        self._num_crashes += 1
        self._num_fruitless = 0 if has_progressed else self._num_fruitless + 1
        if self._num_fruitless == 2:
            say("it has crashed twice without coming any further, and is not started again")
            return None
        pause_s = min(2.0 ** (self._num_crashes - 1), LONGEST_PAUSE_S)
        say(f"starting again in {pause_s:g} s, for the {self.num}. time of {self._most} at most")
        return pause_s


def run_coordinated(
    command: Sequence[str],
    num_processes: int,
    *,
    host: str | None = None,
    port: int | None = None,
    grace_s: float = 60.0,
    clock: Clock | None = None,
) -> int:
    """Serve a job of `num_processes` workers at `host:port` while `command` runs them.

    `command` (such as `srun python -m jaxgoodput.launcher train.py`) finds the address and
    the number in its environment; `host` is how the workers reach this one (default: its name);
    ranks come from whoever starts them. Signals and the exit code pass through as in `run_local`.

    Raises:
        UsageError: the number of processes, the port or the command is wrong.
    """
    if num_processes < 1:
        raise UsageError(f"{num_processes} processes: a job has at least one.")
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
    with contextlib.ExitStack() as stack:
        stack.callback(service.shutdown)
        end = supervise(
            [command],
            [environ],
            prefix_output=False,
            grace_s=grace_s,
            crash_grace_s=0.0,
            clock=clock or SystemClock(),
        )
    return end.code
