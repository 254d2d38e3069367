"""How a worker learns its place in a job, and joins it. Only this package reads the environment.

    python -m jaxgoodput.launcher train.py --workdir /tmp/run
    python -m jaxgoodput.launcher -m my.trainer --workdir /tmp/run

joins the job that the environment describes, then runs the script in this process as `__main__`. If no such
variable is set, it only runs the script. So a script needs no code of its own to be distributed.

A script that a wrapper starts without this module (`env X=1 python train.py`) joins when it first uses
`jaxgoodput.Trainer`, or at the latest in `fit()`. Its children inherit the environment, and do not join.
"""

import atexit
import contextlib
import dataclasses
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxgoodput._worker import Worker
from jaxgoodput.launcher import roll_call

_PREFIX = "JAXGOODPUT_"
_JOINED = "JAXGOODPUT_JOINED"
# A wrapper may start the processes of a job at very different times; the launcher ends them all if one fails.
_OTHERS_S, _OTHERS_OF_ANY_S = (
    roll_call.CONNECT_S,
    60.0,
)  # the second if another program started them
_JOINING = threading.Lock()
_USAGE = "usage: python -m jaxgoodput.launcher (SCRIPT | -m MODULE) [ARGS ...]"


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """What the environment variables tell a worker: its rank, and how it reaches the others.

    Raises:
        ValueError: a number is out of range; the message names the variable.
    """

    num_processes: int
    process_id: int
    """Rank of this process, from 0."""
    coordinator: str | None = None
    """Address of JAX's coordination service, HOST:PORT."""
    job_id: str | None = None
    devices_per_process: int | None = None
    """Number of virtual devices on CPU."""
    local_device_ids: tuple[int, ...] | None = None
    """GPUs that the process may use; None: all."""
    restart: int = 0
    """Number of times that the launcher has restarted this job."""
    lifeline: str | None = None
    """Pipe that closes when the launcher dies; see `pipe_name`."""
    beats: str | None = None
    """Pipe for heartbeats, each the number of the last step."""
    grace_s: float | None = None
    """Time between a stop signal and SIGKILL."""
    rendezvous: str | None = None
    """Address of the coordinator of a job on hosts that come and go."""
    secret: str | None = None
    """Secret of that job."""
    member: str | None = None
    """Name of this process in that job."""
    host: str | None = None
    """Name of this process's host in that job."""
    roll_call: str | None = None
    """How to reach the roll call of the launcher; see `roll_call`."""
    joined: int | None = None
    """Number of the process that has joined as this worker, and from which this one has its environment."""

    def __post_init__(self):
        if self.num_processes < 1:
            raise ValueError(
                f"NUM_PROCESSES={self.num_processes} is too small: a job has at least one process. "
                "Set it to 1 or more."
            )
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
                f"DEVICES_PER_PROCESS={self.devices_per_process} is too small: "
                "a process has at least 1 device."
            )

    @property
    def is_alone(self) -> bool:
        """Whether the job has this process only, so that one that has not joined trains as well."""
        return self.num_processes == 1 and self.rendezvous is None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "WorkerEnv | None":
        """Return the worker that `environ` describes; None if it describes none.

        JAXGOODPUT_* variables come first, then JAX_*. SLURM_* variables count only if a coordinator is named,
        or if Slurm has started several tasks.

        Raises:
            ValueError: a variable is missing, or is not a number.
        """
        found = {name: _value(environ, name) for name in ("coordinator", *_SLURM_RANKS)}
        # Only srun sets SLURM_STEP_NUM_TASKS: a script inside sbatch or salloc is one process.
        has_tasks = environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
        uses_slurm = "SLURM_PROCID" in environ and (found["coordinator"] is not None or has_tasks)
        slurm = _SLURM_RANKS if uses_slurm else dict.fromkeys(_SLURM_RANKS, ())
        for name, others in slurm.items():
            found[name] = _value(environ, name, others)
        if all(value is None for value in found.values()):
            return None
        for name, others in slurm.items():
            if found[name] is None:
                first, *rest = (*_VARIABLES[name][1], *others)
                raise ValueError(
                    f"the environment describes a worker, but {first} is not set (nor one of "
                    f"{', '.join(rest)}). Set it, or unset the other JAXGOODPUT_* and JAX_* "
                    "variables to run one process alone."
                )
        found |= {name: _value(environ, name) for name in _VARIABLES if name not in found}
        return cls(**{name: value for name, value in found.items() if value is not None})

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables from which `from_environ` makes an equal object."""
        values = {variables[0]: getattr(self, name) for name, (_, variables) in _VARIABLES.items()}
        return {
            variable: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for variable, value in values.items()
            if value is not None
        }


def _text(variable: str, text: str) -> str:
    return text


def _integer(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{variable}={text!r} is not a whole number. Correct or unset it."
        ) from None


def _integers(variable: str, text: str) -> tuple[int, ...]:
    return tuple(_integer(variable, word) for word in text.split(","))


def _seconds(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{variable}={text!r} is not a number of seconds. Correct or unset it."
        ) from None


# How each field of `WorkerEnv` is read, and from which variables: the first one that is set counts.
_VARIABLES: Mapping[str, tuple[Callable[[str, str], Any], tuple[str, ...]]] = {
    "num_processes": (_integer, ("JAXGOODPUT_NUM_PROCESSES", "JAX_NUM_PROCESSES")),
    "process_id": (_integer, ("JAXGOODPUT_PROCESS_ID", "JAX_PROCESS_ID")),
    "coordinator": (_text, ("JAXGOODPUT_COORDINATOR", "JAX_COORDINATOR_ADDRESS")),
    "job_id": (_text, ("JAXGOODPUT_JOB_ID", "SLURM_JOB_ID")),
    "devices_per_process": (_integer, ("JAXGOODPUT_DEVICES_PER_PROCESS",)),
    "local_device_ids": (_integers, ("JAX_LOCAL_DEVICE_IDS",)),
    "restart": (_integer, ("JAXGOODPUT_RESTART", "SLURM_RESTART_COUNT")),
    "lifeline": (_text, ("JAXGOODPUT_LIFELINE",)),
    "beats": (_text, ("JAXGOODPUT_BEATS",)),
    "grace_s": (_seconds, ("JAXGOODPUT_GRACE_S",)),
    "rendezvous": (_text, ("JAXGOODPUT_RENDEZVOUS",)),
    "secret": (_text, ("JAXGOODPUT_SECRET",)),
    "member": (_text, ("JAXGOODPUT_MEMBER",)),
    "host": (_text, ("JAXGOODPUT_HOST",)),
    "roll_call": (_text, (roll_call.VARIABLE,)),
    "joined": (_integer, (_JOINED,)),
}
_SLURM_RANKS: Mapping[str, tuple[str, ...]] = {
    "num_processes": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "process_id": ("SLURM_PROCID",),
}


def _value(environ: Mapping[str, str], name: str, others: tuple[str, ...] = ()) -> Any:
    read, variables = _VARIABLES[name]
    for variable in (*variables, *others):
        if environ.get(variable):
            return read(variable, environ[variable])
    return None


def inherited_environ() -> dict[str, str]:
    """Return this process's environment without the variables of a job that it may belong to itself."""
    ours = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    return {k: v for k, v in os.environ.items() if not k.startswith(_PREFIX) and k not in ours}


def initialize(environ: Mapping[str, str] | None = None) -> WorkerEnv | None:
    """Join the job that `environ` describes (default: this process's environment); None if there is no job.

    Sets the number of virtual devices on CPU and the visible GPUs, makes the persistent compilation
    cache work for all processes, and connects them. Call it before JAX is asked for a device. A second call
    does nothing, so a script may call it even if the launcher already has.

    Also returns None in a child of a process that has joined, such as a reader of data: it has the variables
    of a worker, but is none, and its `fit()` refuses.

    Raises:
        ValueError: a variable is missing or wrong.
        RuntimeError: JAX has used its devices already, or another process has joined as this worker.
        ConnectionError: the launcher or the coordinator does not answer.
    """
    env = WorkerEnv.from_environ(os.environ if environ is None else environ)
    if env is None:
        return None
    from jaxgoodput.train.process import OF_PROCESS, LauncherLink

    with _JOINING:
        if OF_PROCESS.link.pid == os.getpid():
            return env
        if env.joined not in (None, os.getpid()):
            if env.is_alone:  # as before it was launched: there is no other process to train with
                OF_PROCESS.link = LauncherLink(pid=os.getpid())
                return env
            OF_PROCESS.link = LauncherLink(refusal=roll_call.already_joined(env.joined))
            return None
        try:
            _join(env)
        except roll_call.AlreadyJoined:
            if not env.is_alone:
                raise
            OF_PROCESS.link = LauncherLink(pid=os.getpid())
        os.environ[_JOINED] = str(os.getpid())  # for the children of this process
        return env


def join_if_launched() -> None:
    """Join the job of the launcher that started this process, unless another process is the worker.

    Does nothing without a launcher of this package: variables of Slurm or JAX may belong to tasks that train
    alone. Raises what `initialize` raises, except that a process that is no worker may do all but train.
    """
    from jaxgoodput.train.process import OF_PROCESS, LauncherLink

    names = ("JAXGOODPUT_PROCESS_ID", "JAXGOODPUT_COORDINATOR", roll_call.VARIABLE)
    if not any(os.environ.get(name) for name in names):
        return
    try:
        initialize()
    except roll_call.AlreadyJoined as error:
        OF_PROCESS.link = LauncherLink(refusal=str(error))


def _join(env: WorkerEnv) -> None:
    """Become the worker that `env` describes."""
    from jaxgoodput import _jax
    from jaxgoodput.train.process import OF_PROCESS, LauncherLink

    is_connected = env.coordinator is not None and _jax.connected_to() == env.coordinator
    chooses = env.devices_per_process is not None or env.local_device_ids is not None
    if not is_connected and (chooses or env.num_processes > 1):
        _jax.require_unused_devices()
    link = LauncherLink(grace_s=env.grace_s, pid=os.getpid())
    if env.roll_call is not None:
        link = _answer(env.roll_call, link)
    if env.lifeline is not None:
        _die_with_the_launcher(env.lifeline, is_launched=env.roll_call is not None)
    beats = None if env.beats is None else _inherited(env.beats)
    if beats is not None:
        link = dataclasses.replace(link, beat=_beat_into(beats))
    if not is_connected:
        _choose_devices(env)
    if env.rendezvous is not None:
        link = _join_rendezvous(env, env.rendezvous, link)
    if env.num_processes > 1:
        assert env.coordinator is not None
        _jax.share_compilation_cache()
        if not is_connected:
            _jax.connect(
                env.coordinator,
                env.num_processes,
                env.process_id,
                others_timeout_s=_OTHERS_OF_ANY_S if env.roll_call is None else _OTHERS_S,
            )
    OF_PROCESS.link = link


def _answer(called: str, link: Any) -> Any:
    """Answer the roll call of the launcher, and end this process when the launcher ends."""
    roll = roll_call.RollCallLink(called)

    def wait(_: Worker) -> None:
        roll.wait_for_the_end()
        _end_with_the_launcher(is_launched=True)

    Worker("lifeline", wait)
    reported: list[int | None] = []

    def report(code: int | None) -> None:
        reported[:] = [code]
        roll.report(code)

    def correct() -> None:
        """Tell that the script has handled the error that ended its last run."""
        if reported == [1] and not hasattr(sys, "last_type"):
            roll.report(0)

    atexit.register(correct)
    return dataclasses.replace(link, report=report)


def _choose_devices(env: WorkerEnv) -> None:
    import jax

    if env.devices_per_process is not None:
        jax.config.update("jax_num_cpu_devices", env.devices_per_process)
    if env.local_device_ids is not None:
        visible = ",".join(map(str, env.local_device_ids))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)


def _join_rendezvous(env: WorkerEnv, address: str, link: Any) -> Any:
    """Become a worker of an elastic job, whose coordinator is at `address`; its hosts come and go."""
    from jaxgoodput import _jax
    from jaxgoodput.launcher.elastic.member import JobMembership

    assert env.secret is not None and env.member is not None
    _jax.share_compilation_cache()
    member = JobMembership(address, env.secret, env.member)
    beat_locally = link.beat

    def beat(step: int | None) -> None:
        beat_locally(step)
        member.beat(step)

    return dataclasses.replace(link, beat=beat, membership=member)


def pipe_name(fd: int) -> str:
    """Return a name for the pipe `fd` that only a process which has inherited the pipe can use.

    The number alone could denote another file in a process that was started indirectly (srun, ssh).
    """
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}"


def _inherited(name: str) -> int | None:
    """Return the pipe of this name; None if a program between the launcher and this process has closed it."""
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
        # If the launcher does not read for a while, heartbeats are dropped: a later one says as much.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b"\n" if step is None else b"%d\n" % step)

    return beat


def _die_with_the_launcher(lifeline: str, *, is_launched: bool) -> None:
    """Kill this process's group when the pipe `lifeline` closes, so that no worker outlives its launcher.

    The launcher holds the other end of the pipe, and never writes to it.
    """
    fd = _inherited(lifeline)
    if fd is None:
        return

    def wait(_: Worker) -> None:
        while os.read(fd, 1):
            pass
        _end_with_the_launcher(is_launched=is_launched)

    Worker("lifeline", wait)


def _end_with_the_launcher(*, is_launched: bool) -> None:
    """Kill this process, and the group that the launcher has made for it: never that of another program.

    `is_launched` says that a launcher of this package has started it on this host, perhaps in a wrapper,
    which then leads the group.
    """
    leaders = {os.getpid(), os.getsid(0)} if is_launched else {os.getpid()}
    if os.getpgrp() in leaders:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Join the job, then run the script or module named in `arguments` as `__main__`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments = arguments[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-"):
        _exit_wrong_usage(_USAGE)
    target = arguments[0]
    if not is_module and not os.path.exists(target):
        _exit_wrong_usage(f"jaxgoodput: there is no script {target!r}.\n{_USAGE}")
    try:
        initialize()
    except ValueError as error:
        _exit_wrong_usage(f"jaxgoodput: {error}")
    sys.argv[:] = arguments
    # `python SCRIPT` looks for imports beside the script, `python -m` in the working directory.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


def _exit_wrong_usage(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)
