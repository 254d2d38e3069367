"""The commands that start jobs: `jaxgoodput run`, `agent`, `coordinate` and `plan`."""

import argparse
import pathlib
import sys
from typing import Any

from jaxgoodput._commands import (
    Commands,
    OneOf,
    argument,
    at_least,
    file,
    number,
    port,
    switch,
    text,
    wrong,
)
from jaxgoodput._exits import DONE
from jaxgoodput.launcher.host_list import NamedHost, read_host_file, read_host_list
from jaxgoodput.launcher.notices.notice import (
    NoticeSettings,
    metadata_server,
    notice_source,
    settings_of,
)
from jaxgoodput.launcher.variables import as_mapping, from_line, variable


def _span(text: str) -> tuple[int, int]:
    """Parse MIN:MAX, or one number, as an argparse type."""
    least, _, most = text.partition(":")
    try:
        found = at_least(1)(least), at_least(1)(most or least)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, as MIN:MAX or one number") from None
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text}: give MIN:MAX with MIN <= MAX, or one number")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """Parse different numbers I,J,..., as an argparse type."""
    found = tuple(map(at_least(0), text.split(",")))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text} has a number twice; give different ones, I,J,...")
    return found


# fmt: off
_NUM_PROCESSES = number("--nproc-per-node", "N", 1, "processes per host (default: 1 with --nnodes)")
_NUM_DEVICES = number("--devices-per-process", "D", 1, "devices of each process: virtual ones on CPU; GPUs "
                      "r*D to (r+1)*D-1 for process r (default: one, or all if N is 1)")
_GRACE = number("--grace-s", "S", 0.0, "seconds from a stop signal to SIGKILL, for saving the state", 60.0)
_SILENT = number("--silent-s", "S", 1.0, "seconds without a heartbeat after which a process is replaced "
                 "(default: 10)")
_RECONNECT = number("--reconnect-s", "S", 0.0, "seconds for which agents try to reach a coordinator that "
                    "is gone (default: 60 if --rdzv-endpoint names a port, else 0)")
_CONNECT = number("--connect-s", "S", 1.0, "seconds from the start of a process until it, or a process "
                  "that it starts, must have joined the job (default: 600)")
_ENV = text("--env", "NAME[=VALUE]", "environment variable of each process, by default with the value that "
            "it has here; may be repeated", [], type=variable, action="append")
_NOTICES = text("--notices", "SOURCE", "source of notices that a host will be taken away, which then leaves "
                "(for the host of `run`: all save and stop): gce, aws, signal:USR1[@SECONDS], file:PATH; "
                "may be repeated (default: none is asked)", type=notice_source, action="append")
_METADATA = text("--metadata-server", "URL", "address to ask instead of the cloud's own metadata server, "
                 "http://HOST:PORT", type=metadata_server)
_SECRET = switch("--secret-stdin", help=argparse.SUPPRESS)
_REPORTS_HOSTS = switch("--reports-hosts", help=argparse.SUPPRESS)
_KEEP_HOSTS = switch("--keep-hosts", help=argparse.SUPPRESS)
_ENV_STDIN = switch("--env-stdin", help=argparse.SUPPRESS)
# fmt: on

# Options of `run` that make sense only if hosts come and go: `run` without --nnodes refuses them.
_ELASTIC = (
    text("--hosts", "A,B,...", "hosts, each as [USER@]HOST[:PORT][=SLOTS], with SLOTS processes instead of "
         "--nproc-per-node; all see the script in the same folder (default: this machine)"),
    text("--hostfile", "FILE", "file with one host per line, as [USER@]HOST[:PORT] [slots=N], instead of "
         "--hosts", type=file),
    number("--local-hosts", "K", 0, "simulate K hosts on this machine; 0 if every host joins with "
           "`jaxgoodput agent` (default: 1 if no hosts are named)"),
    number("--hosts-per-group", "K", 1, "hosts that share one copy of the model, split as Config.strategies "
           "says; they join and leave together (default: each process has a copy of its own)"),
    text("--rsh", "SHELL", "remote shell, called as SHELL [-p PORT] HOST COMMAND (default: ssh -o "
         "BatchMode=yes)"),
    text("--remote-python", "PATH", "Python interpreter on the hosts (default: the one that runs this "
         "command)"),
    number("--join-s", "S", 0.0, "seconds that the first start waits for more than MIN hosts (default: 10)"),
    number("--admit-every-s", "S", 0.0, "minimum seconds between two changes that only add hosts (default: "
           "5)"),
    number("--exclude-slow", "FACTOR", 0.0, "exclude a straggler for a while: a host that needs more than "
           "FACTOR times as long per sample as the others, if steps are shorter without it and at least MIN "
           "hosts remain; 0: never (default: 2)"),
    number("--exclude-s", "S", 0.0, "seconds until an excluded host is tried again; doubled each time "
           "(default: 300)"),
    text("--rdzv-endpoint", "HOST:PORT", "address of the coordinator (default: a free port, on the loopback "
         "interface without --hosts and --join-file)"),
    text("--join-file", "FILE", "write the job's address and secret to a file while it runs, readable for "
         "its owner only, so that further hosts can join with `jaxgoodput agent --join-file FILE`",
         type=pathlib.Path),
    _SILENT,
    _RECONNECT,
    _NOTICES,
    _METADATA,
    _SECRET,
    _REPORTS_HOSTS,
    _KEEP_HOSTS,
)  # fmt: skip

_RUN = (
    text("--nnodes", "MIN:MAX", "fewest and most hosts that the job can run with; or one number, for "
         "exactly that many", type=_span),
    _NUM_PROCESSES,
    _NUM_DEVICES,
    number("--max-restarts", "K", 0, "restarts after a crash, or after exit code 143 without a stop "
           "signal; two crashes in a row without progress end the job (default: 0). With --nnodes: "
           "processes that may be replaced, in total (default: 100)"),
    _GRACE,
    _CONNECT,
    _ENV,
    *_ELASTIC,
)  # fmt: skip

_AGENT = (
    OneOf(
        (
            text("--rdzv-endpoint", "HOST:PORT", "address of the coordinator"),
            text("--join-file", "FILE", "file that `jaxgoodput run --join-file` writes, with the address and "
                 "the secret; it is read again before each attempt to connect", type=pathlib.Path),
        ),
        required=True,
    ),
    text("--name", "NAME", "name of this host in the job (default: its host name)"),
    _NUM_PROCESSES,
    _NUM_DEVICES,
    text("--local-devices", "I,J,...", "this host's devices for its processes, with --devices-per-process "
         "(default: from device 0)", type=_numbers),
    _GRACE,
    _CONNECT,
    _ENV,
    _SILENT,
    _RECONNECT,
    _NOTICES,
    _METADATA,
    _SECRET,
    _ENV_STDIN,
)  # fmt: skip

_COORDINATE = (
    number("--num-processes", "N", 1, "processes of the whole job", required=True),
    text(
        "--host", "HOST", "address by which the processes reach this host (default: its host name)"
    ),
    text("--port", "PORT", "port of the coordinator (default: a free one)", type=port),
    _GRACE,
)

_PLAN = (
    argument("script", "SCRIPT|WORKDIR", "a training script, or the --workdir of a run"),
    OneOf(
        (
            text("--topology", "KIND:SHAPE", "devices that need not be present: nodes x GPUs, such as "
                 "h100:2x8 or a100-80:1x8, or TPUs, such as v5e:16x16 or v5p:4x4x4 (needs their compiler)"),
            number("--devices", "N", 1, "number of devices of this machine's kind; virtual ones on CPU"),
        ),
        required=True,
    ),
    number("--nodes", "M", 1, "WORKDIR only: nodes over which the devices are spread evenly (default: 1)"),
    number("--num-slices", "S", 1, "slices of the topology", 1),
    number("--micro-batch-size", "M", 1, "samples per replica (default: the base batch divided by the "
           "replicas, or less if that does not fit)"),
    number("--memory-gib", "G", 0.0, "memory per device that a step may use (default: the chip's memory "
           "minus execution.memory_margin; JAX takes 3/4 of a GPU's)"),
    number("--price-per-hour", "P", 0.0, "price of one device for an hour, to show the price of 1e9 tokens, "
           "or of 1e6 samples without Config.reporting.tokens_per_sample"),
    text("--explain", "STRATEGY", "plan this strategy alone, and name its largest buffers and collectives"),
    text("--python", "FILE", "the Python to plan with, if the compiler is installed in an environment of its "
         "own"),
)  # fmt: skip

_TRY = (
    argument("script", "SCRIPT", "a training script"),
    number("--time-s", "S", 5.0, "seconds of training, more if a larger batch needs it (default: 50)", 50.0),
)  # fmt: skip


def add_commands(commands: Commands) -> None:
    """Register the commands of the launcher, such as `run` and `agent`."""
    usage = (
        "jaxgoodput run --nproc-per-node N [options] -- python train.py [args ...]\n"
        "       jaxgoodput run --nnodes MIN:MAX [--hosts A,B,...] [options] -- python train.py [args ...]"
    )
    commands.add(10, "run", _run, usage, _RUN, takes_command=True)
    usage = (
        "jaxgoodput agent (--rdzv-endpoint HOST:PORT | --join-file FILE) [options] -- python train.py "
        "[args ...]"
    )
    commands.add(10, "agent", _agent, usage, _AGENT, takes_command=True)
    usage = (
        "jaxgoodput coordinate --num-processes N [options] -- srun python -m jaxgoodput.launcher "
        "train.py [args ...]"
    )
    commands.add(10, "coordinate", _coordinate, usage, _COORDINATE, takes_command=True)
    usage = (
        "jaxgoodput plan SCRIPT (--topology h100:2x8 | --devices N) [options] [-- args ...]\n"
        "       jaxgoodput plan WORKDIR --devices N [--nodes M]"
    )
    commands.add(10, "plan", _plan, usage, _PLAN, takes_command=True)
    usage = "jaxgoodput try SCRIPT [--time-s S] [-- args ...]"
    commands.add(10, "try", _try, usage, _TRY, takes_command=True)


def _run(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Run a script as one job of several processes, on this host or on hosts that join and leave.

    The N processes form one JAX job: jax.process_count() is N. The script does not need to be changed. Each
    line of output is prefixed with the number of its process. Signals are forwarded, and no process outlives
    this command.

    With --nnodes the job continues while hosts join and leave: the remaining processes keep the state in
    memory and are not restarted. Failed processes are replaced. A further host joins with `jaxgoodput agent`.

    examples:
      jaxgoodput run --nproc-per-node 2 --devices-per-process 2 -- python train.py --workdir /tmp/run
      jaxgoodput run --nnodes 1:4 --hosts a,b,c,d -- python train.py --workdir /shared/run
    """
    from jaxgoodput.launcher.local import run_local
    from jaxgoodput.launcher.supervise import UsageError

    if options.nnodes is not None:
        return _run_elastic(options, command, parser)
    for option in _ELASTIC:
        if getattr(options, option.name) not in (None, False):
            parser.error(
                f"{option.flags[0]} is for a job whose hosts come and go: give --nnodes MIN:MAX, or "
                "leave it out"
            )
    if options.nproc_per_node is None:
        parser.error("the following arguments are required: --nproc-per-node, or --nnodes")
    try:
        return run_local(
            command,
            options.nproc_per_node,
            options.devices_per_process,
            max_restarts=options.max_restarts or 0,
            grace_s=options.grace_s,
            variables=_variables(options),
            **_set(options, "connect_s"),
        )
    except UsageError as error:
        return wrong(error)


def _run_elastic(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.launcher.elastic.job import Job, run_elastic
    from jaxgoodput.launcher.supervise import UsageError

    _require_consistent(options, parser)
    least, most = options.nnodes
    # A coordinator that is started again is found only if its port is known in advance.
    has_port = (options.rdzv_endpoint or ":0").rpartition(":")[2] != "0"
    names = "rsh join_s admit_every_s silent_s exclude_slow exclude_s connect_s".split()
    try:
        job = Job(
            **{
                "local_hosts": 1,
                "max_restarts": 100,
                "reconnect_s": 60.0 if has_port else 0.0,
                **_set(options, "local_hosts", "max_restarts", "reconnect_s", *names),
            },
            reports_hosts=options.reports_hosts,
            keep_hosts=options.keep_hosts,
            least=least,
            most=most,
            slots=options.nproc_per_node or 1,
            hosts_per_group=options.hosts_per_group,
            devices_per_process=options.devices_per_process,
            hosts=_hosts(options),
            python=options.remote_python or sys.executable,
            endpoint=options.rdzv_endpoint,
            join_file=options.join_file,
            grace_s=options.grace_s,
            notices=_notices(options),
            variables=_variables(options),
            secret=sys.stdin.readline().strip() if options.secret_stdin else None,
        )
        return run_elastic(command, job)
    except (UsageError, OSError) as error:
        return wrong(error)


def _require_consistent(options, parser: argparse.ArgumentParser) -> None:
    """End the program with a usage error if options contradict each other."""
    sources = _set(options, "hosts", "hostfile", "local_hosts")
    if len(sources) > 1:
        parser.error("give one of --hosts, --hostfile and --local-hosts")
    if not sources.keys() & {"hosts", "hostfile"}:
        for name in _set(options, "rsh", "remote_python"):
            parser.error(f"--{name.replace('_', '-')} is for the hosts of --hosts or --hostfile")


def _hosts(options) -> tuple[NamedHost, ...]:
    """Return the hosts in --hosts or --hostfile. Raises UsageError for a name that is wrong, or none."""
    from jaxgoodput.launcher.supervise import UsageError

    if options.hostfile is not None:
        given, read, text = f"--hostfile {options.hostfile}", read_host_file, _in(options.hostfile)
    elif options.hosts is not None:
        given, read, text = f"--hosts {options.hosts!r}", read_host_list, options.hosts
    else:
        return ()
    try:
        return tuple(read(text))
    except ValueError as error:
        raise UsageError(f"{given}: {error}") from None


def _variables(options) -> dict[str, str]:
    """Return the variables of --env. Raises UsageError."""
    from jaxgoodput.launcher.supervise import UsageError

    try:
        return as_mapping(options.env)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _notices(options) -> NoticeSettings:
    """Return where to look for notices. Raises UsageError."""
    from jaxgoodput.launcher.supervise import UsageError

    try:
        return settings_of(options.notices, options.metadata_server)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _from_stdin() -> dict[str, str]:
    """Return the variables that the command which started this agent has written. Raises UsageError."""
    from jaxgoodput.launcher.supervise import UsageError

    try:
        return from_line(sys.stdin.readline())
    except ValueError as error:
        raise UsageError(f"--env-stdin: {error}") from None


def _in(path: pathlib.Path) -> str:
    from jaxgoodput.launcher.supervise import UsageError

    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path} cannot be read: {error}") from None


def _set(options, *names: str) -> dict[str, Any]:
    """Return, by name, the ones of these options that were given, as arguments of a settings class."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _local_devices(options, parser: argparse.ArgumentParser) -> tuple[int, ...] | None:
    listed = options.local_devices
    needed = (options.nproc_per_node or 1) * (options.devices_per_process or 0)
    if listed is not None and len(listed) != needed:
        parser.error(
            f"--local-devices names {len(listed)} devices, but --nproc-per-node processes with "
            f"--devices-per-process devices each take {needed}"
        )
    return listed


def _agent(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Let this host join a job that `jaxgoodput run --nnodes` started.

    The command must be the same as the job's. On SIGTERM, and on a notice of --notices that the host will be
    taken away, the host leaves, and the job continues.
    JAXGOODPUT_SECRET must hold the same secret here and where `jaxgoodput run` is started, unless a
    --join-file tells it.
    """
    import os
    import socket

    from jaxgoodput.clock import SystemClock
    from jaxgoodput.launcher.elastic.agent import AgentSettings, run_agent
    from jaxgoodput.launcher.supervise import UsageError

    if options.secret_stdin:
        secret = sys.stdin.readline().strip()
    else:
        secret = os.environ.get("JAXGOODPUT_SECRET", "")
    if not secret and options.join_file is None:
        parser.error(
            "JAXGOODPUT_SECRET is not set. Set it to the same text here and where `jaxgoodput run` is started"
        )
    try:
        told = _from_stdin() if options.env_stdin else {}
        settings = AgentSettings(
            address=options.rdzv_endpoint or "",
            secret=secret,
            name=options.name or socket.gethostname(),
            slots=options.nproc_per_node or 1,
            devices_per_process=options.devices_per_process,
            local_devices=_local_devices(options, parser),
            grace_s=options.grace_s,
            notices=_notices(options),
            variables={**told, **_variables(options)},
            **_set(options, "join_file", "silent_s", "reconnect_s", "connect_s"),
        )
        return run_agent(command, settings, clock=SystemClock())
    except UsageError as error:
        return wrong(error)


def _coordinate(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Serve a job whose processes another program starts (srun, kubectl).

    Run a command that starts the N processes of one job, on any hosts, and help them find each other while it
    runs. The command must pass JAXGOODPUT_COORDINATOR and JAXGOODPUT_NUM_PROCESSES on to the processes. They
    read their rank from JAXGOODPUT_PROCESS_ID, JAX_PROCESS_ID or SLURM_PROCID. See launch/slurm.sbatch for an
    example.
    """
    from jaxgoodput.launcher.local import run_coordinated
    from jaxgoodput.launcher.supervise import UsageError

    try:
        return run_coordinated(
            command,
            options.num_processes,
            host=options.host,
            port=options.port,
            grace_s=options.grace_s,
        )
    except UsageError as error:
        return wrong(error)


def _plan(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Predict what each strategy would do on devices that need not be present.

    Given a script, run it up to its Trainer.fit(), compile the step for each of Config.strategies (if there
    are none, for all that suit the model), and print for each whether it fits, what a device holds at the
    peak, the bytes received inside nodes and between them, and the step time by the chip's roofline, best
    first. Nothing is trained.

    Given the workdir of a run, print which devices, batch and strategy suit it best, from the step times and
    the gradient noise that it measured, and which of these numbers are guesses.

    examples:
      jaxgoodput plan train.py --topology h100:2x8 -- --workdir /tmp/run
      jaxgoodput plan train.py --topology v5e:16x16 --explain fsdp256 -- --workdir /tmp/run
      jaxgoodput plan train.py --devices 8 -- --workdir /tmp/run
      jaxgoodput plan /tmp/run --devices 16 --nodes 2
    """
    from jaxgoodput.launcher.plan import plan
    from jaxgoodput.launcher.plan_run import is_workdir
    from jaxgoodput.launcher.supervise import UsageError

    if is_workdir(options.script):
        return _plan_run(options, command)
    if options.nodes is not None:
        parser.error(
            f"--nodes is for the workdir of a run, and {options.script} is not one; a script's strategies "
            f"are planned for --devices or a --topology"
        )
    names = ("topology", "devices", "num_slices", "micro_batch_size", "memory_gib")
    given = _set(options, *names, "price_per_hour", "explain")
    flags = [f"--{k.replace('_', '-')}={value}" for k, value in given.items()]
    try:
        return plan(
            [*flags, options.script, *command], topology=options.topology, python=options.python
        )
    except UsageError as error:
        return wrong(error)


def _try(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    """Find out within a minute whether another batch would train a script's model faster.

    Run the script up to its Trainer.fit(), and train for a while in a temporary folder: at first with the
    base batch, to measure the noise of the gradient, and then with one batch after the other, each twice as
    large. Print how long each takes for the same progress, and which settings to use. The script's own
    workdir is not touched, and its hooks are not called.

    examples:
      jaxgoodput try train.py
      jaxgoodput try train.py --time-s 30 -- --workdir /tmp/run
    """
    from jaxgoodput.launcher.supervise import UsageError
    from jaxgoodput.launcher.try_script import try_script

    try:
        print(try_script(options.script, command, options.time_s))
    except UsageError as error:
        return wrong(error)
    return DONE


def _plan_run(options, command: list[str]) -> int:
    from jaxgoodput.launcher.plan_run import plan_run
    from jaxgoodput.launcher.supervise import UsageError

    given = {
        "--topology": options.topology is not None,
        "--num-slices": options.num_slices != 1,
        "--micro-batch-size": options.micro_batch_size is not None,
        "--memory-gib": options.memory_gib is not None,
        "--price-per-hour": options.price_per_hour is not None,
        "--explain": options.explain is not None,
        "--python": options.python is not None,
        "a command after --": bool(command),
    }
    try:
        for what, is_given in given.items():
            if is_given:
                raise UsageError(
                    f"{what} is for a script, but {options.script} is the folder of a run, which is "
                    f"planned from what it measured on its own kind of device. Use --devices and --nodes."
                )
        print(plan_run(options.script, options.devices, options.nodes or 1))
    except UsageError as error:
        return wrong(error)
    return DONE
