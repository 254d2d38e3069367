"""What one worker of a job is told, and its start: the package's only reader of the environment.

    python -m jaxgoodput.launcher train.py --workdir /tmp/run
    python -m jaxgoodput.launcher -m my.trainer --workdir /tmp/run

joins the job that the environment describes and runs the script in this process as `__main__`; with
no such variables it only runs the script. So a script needs no line of its own to be distributed.
"""

import contextlib
import dataclasses
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_PREFIX = "JAXGOODPUT_"
_USAGE = "usage: python -m jaxgoodput.launcher (SCRIPT | -m MODULE) [ARGS ...]"


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """A worker's place in its job, as written in its environment.

    Raises:
        ValueError: a number is out of range; the message names the variable.
    """

    num_processes: int  # JAXGOODPUT_NUM_PROCESSES, else JAX_NUM_PROCESSES, else SLURM_NTASKS
    process_id: int  # JAXGOODPUT_PROCESS_ID, else JAX_PROCESS_ID, else SLURM_PROCID
    coordinator: str | None = None  # JAXGOODPUT_COORDINATOR, else JAX_COORDINATOR_ADDRESS
    job_id: str | None = None  # JAXGOODPUT_JOB_ID, else SLURM_JOB_ID
    devices_per_process: int | None = None  # JAXGOODPUT_DEVICES_PER_PROCESS: virtual, on CPU
    local_device_ids: tuple[int, ...] | None = None  # JAX_LOCAL_DEVICE_IDS: GPUs it may use
    restart: int = 0  # JAXGOODPUT_RESTART: how often the launcher started this job again
    lifeline: str | None = None  # JAXGOODPUT_LIFELINE: see `pipe_name`
    beats: str | None = None  # JAXGOODPUT_BEATS: a pipe for the number of the last step
    grace_s: float | None = None  # JAXGOODPUT_GRACE_S: from a stop signal to SIGKILL
    rendezvous: str | None = None  # JAXGOODPUT_RENDEZVOUS: where processes come and go
    secret: str | None = None  # JAXGOODPUT_SECRET: of the job
    member: str | None = None  # JAXGOODPUT_MEMBER: this process's name
    host: str | None = None  # JAXGOODPUT_HOST: the name of its agent

    def __post_init__(self):
        if self.num_processes < 1:
            raise ValueError(f"NUM_PROCESSES={self.num_processes}: a job has at least one process.")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"PROCESS_ID={self.process_id} is not in [0, {self.num_processes}), the range that "
                f"NUM_PROCESSES={self.num_processes} allows. Give each process its own rank."
            )
        if self.num_processes > 1 and self.coordinator is None:
            raise ValueError(
                f"NUM_PROCESSES={self.num_processes}, but JAXGOODPUT_COORDINATOR (host:port) is "
                "not set: these processes cannot find each other. Start them with `jaxgoodput run` "
                "(one host) or under `jaxgoodput coordinate` (Slurm, Kubernetes)."
            )
        if self.devices_per_process is not None and self.devices_per_process < 1:
            raise ValueError(
                f"DEVICES_PER_PROCESS={self.devices_per_process}: a process has at least 1 device."
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "WorkerEnv | None":
        """The worker that `environ` describes, or None where it describes none.

        JAXGOODPUT_* come first, then JAX_*, then, where a coordinator is named or Slurm has
        started several tasks, SLURM_*.

        Raises:
            ValueError: a variable is missing or is not a number.
        """
        coordinator = _first(environ, "JAXGOODPUT_COORDINATOR", "JAX_COORDINATOR_ADDRESS")
        # Only srun sets SLURM_STEP_NUM_TASKS: a script inside sbatch or salloc is one process.
        tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
        slurm = coordinator is not None or tasks != "1"
        count_names = ["JAXGOODPUT_NUM_PROCESSES", "JAX_NUM_PROCESSES"]
        id_names = ["JAXGOODPUT_PROCESS_ID", "JAX_PROCESS_ID"]
        if slurm and "SLURM_PROCID" in environ:
            count_names += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
            id_names += ["SLURM_PROCID"]
        count = _number(environ, *count_names)
        process_id = _number(environ, *id_names)
        if coordinator is None and count is None and process_id is None:
            return None
        for value, names in ((count, count_names), (process_id, id_names)):
            if value is None:
                raise ValueError(
                    f"the environment describes a worker, but {names[0]} is not set (nor one of "
                    f"{', '.join(names[1:])}). Set it, or unset the other JAXGOODPUT_* and JAX_* "
                    "variables to run one process alone."
                )
        assert count is not None and process_id is not None
        ids = environ.get("JAX_LOCAL_DEVICE_IDS")
        return cls(
            num_processes=count,
            process_id=process_id,
            coordinator=coordinator,
            job_id=_first(environ, "JAXGOODPUT_JOB_ID", "SLURM_JOB_ID"),
            devices_per_process=_number(environ, "JAXGOODPUT_DEVICES_PER_PROCESS"),
            local_device_ids=tuple(_integer("JAX_LOCAL_DEVICE_IDS", i) for i in ids.split(","))
            if ids
            else None,
            restart=_number(environ, "JAXGOODPUT_RESTART", "SLURM_RESTART_COUNT") or 0,
            lifeline=_first(environ, "JAXGOODPUT_LIFELINE"),
            beats=_first(environ, "JAXGOODPUT_BEATS"),
            grace_s=_seconds(environ, "JAXGOODPUT_GRACE_S"),
            rendezvous=_first(environ, "JAXGOODPUT_RENDEZVOUS"),
            secret=_first(environ, "JAXGOODPUT_SECRET"),
            member=_first(environ, "JAXGOODPUT_MEMBER"),
            host=_first(environ, "JAXGOODPUT_HOST"),
        )

    def to_environ(self) -> dict[str, str]:
        """The variables that `from_environ` reads this worker from."""
        values = {
            "JAXGOODPUT_COORDINATOR": self.coordinator,
            "JAXGOODPUT_NUM_PROCESSES": self.num_processes,
            "JAXGOODPUT_PROCESS_ID": self.process_id,
            "JAXGOODPUT_JOB_ID": self.job_id,
            "JAXGOODPUT_DEVICES_PER_PROCESS": self.devices_per_process,
            "JAXGOODPUT_RESTART": self.restart,
            "JAXGOODPUT_LIFELINE": self.lifeline,
            "JAXGOODPUT_BEATS": self.beats,
            "JAXGOODPUT_GRACE_S": self.grace_s,
            "JAXGOODPUT_RENDEZVOUS": self.rendezvous,
            "JAXGOODPUT_SECRET": self.secret,
            "JAXGOODPUT_MEMBER": self.member,
            "JAXGOODPUT_HOST": self.host,
            "JAX_LOCAL_DEVICE_IDS": None
            if self.local_device_ids is None
            else ",".join(map(str, self.local_device_ids)),
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((_integer(name, environ[name]) for name in names if environ.get(name)), None)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number.") from None


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    try:
        return float(environ[name]) if environ.get(name) else None
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} is not a number of seconds.") from None


def inherited_environ() -> dict[str, str]:
    """This process's environment without the variables of a job it may itself belong to."""
    ours = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    return {k: v for k, v in os.environ.items() if not k.startswith(_PREFIX) and k not in ours}


def initialize(environ: Mapping[str, str] | None = None) -> WorkerEnv | None:
    """Join the job that `environ` (default: the process's own) describes; None where there is none.

    Sets the number of virtual devices on CPU and the visible GPUs, makes the persistent compilation
    cache work for all processes, and connects. Call it before JAX is asked for a device. Once more
    (a script that calls it, started by the launcher, which did) it changes nothing.

    Raises:
        ValueError: a variable is missing or wrong.
        RuntimeError: JAX has used its devices already.
        ConnectionError: nobody answers at the coordinator's address.
    """
    env = WorkerEnv.from_environ(os.environ if environ is None else environ)
    if env is None:
        return None
    import jax

    from jaxgoodput import _jax
    from jaxgoodput.train.process import LAUNCHED, LauncherLink

    if env.coordinator is not None and _jax.connected_to() == env.coordinator:
        return env
    if env.rendezvous is not None and LAUNCHED.get(LauncherLink()).membership is not None:
        return env
    if env.lifeline is not None:
        _die_with_the_launcher(env.lifeline)
    beats = None if env.beats is None else _inherited(env.beats)
    told = LauncherLink(grace_s=env.grace_s)
    LAUNCHED.set(told if beats is None else dataclasses.replace(told, beat=_beat_into(beats)))

    if env.devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", env.devices_per_process)
    if env.local_device_ids is not None:
        visible = ",".join(map(str, env.local_device_ids))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)
    if env.rendezvous is not None:
        from jaxgoodput.launcher.member import JobMembership, RendezvousAddress

        assert env.secret is not None and env.member is not None and env.host is not None
        _jax.share_compilation_cache()
        member = JobMembership(RendezvousAddress(env.rendezvous, env.secret, env.member, env.host))
        told = LAUNCHED.get()
        LAUNCHED.set(
            dataclasses.replace(told, beat=_both(told.beat, member.beat), membership=member)
        )
    if env.num_processes > 1:
        assert env.coordinator is not None
        _jax.share_compilation_cache()
        _jax.connect(env.coordinator, env.num_processes, env.process_id)
    return env


def pipe_name(fd: int) -> str:
    """A name for the pipe `fd` that only a process which has inherited it can use.

    The number alone could mean another pipe in a process that was started over detours (srun, ssh).
    """
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}"


def _inherited(name: str) -> int | None:
    """The pipe of this name; None where something between the launcher and this process has closed it."""
    fd = _integer("JAXGOODPUT_LIFELINE or JAXGOODPUT_BEATS", name.split(":")[0])
    try:
        if pipe_name(fd) != name:
            return None
    except OSError:
        return None
    os.set_inheritable(fd, False)
    return fd


def _beat_into(fd: int) -> Callable[[int | None], None]:
    os.set_blocking(fd, False)

    def beat(step: int | None) -> None:
        # A launcher that does not read for a while misses nothing: the next one says more.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b"\n" if step is None else b"%d\n" % step)

    return beat


def _both(
    first: Callable[[int | None], None], second: Callable[[int | None], None]
) -> Callable[[int | None], None]:
    def beat(step: int | None) -> None:
        first(step)
        second(step)

    return beat


def _die_with_the_launcher(lifeline: str) -> None:
    """Kill this process's group when the pipe `lifeline` closes: no orphans, however it died.

    The launcher holds its writing end, and never writes.
    """
    fd = _inherited(lifeline)
    if fd is None:
        return

    def wait():
        while os.read(fd, 1):
            pass
        # The launcher gives each worker a process group of its own; never kill anyone else's.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="jaxgoodput-lifeline", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the job, then run the script or module named in `arguments` as `__main__`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    is_module = bool(arguments) and arguments[0] == "-m"
    if is_module:
        arguments = arguments[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2)
    target = arguments[0]
    if not is_module and not os.path.exists(target):
        print(f"jaxgoodput: there is no script {target!r}.\n{_USAGE}", file=sys.stderr)
        raise SystemExit(2)
    try:
        initialize()
    except ValueError as error:
        print(f"jaxgoodput: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv[:] = arguments
    # `python SCRIPT` looks for imports beside the script, `python -m` in the working directory.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")
