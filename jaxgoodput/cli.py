"""The command line, `jaxgoodput run | plan | report | simulate | serve | submit ...`; it imports late."""

import argparse
import contextlib
import difflib
import importlib.metadata
import importlib.util
import io
import os
import pathlib
import platform
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO, TypeVar

import shtab

from jaxgoodput import __version__
from jaxgoodput.cluster.service.options import add_commands

_DONE, _USAGE = 0, 2
_UNREAD = 141  # what a shell says of a program that SIGPIPE has ended
_LONGEST = 1e9  # seconds, hours or GiB: threads cannot wait for longer, and no disk holds more

Number = TypeVar("Number", int, float)

_EPILOG = """\
exit codes: 0 done; 143 saved and wants a restart (SIGTERM, SIGINT, SIGHUP); 75 the last step could not be
saved; 1 a bug; 2 wrong usage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: the process's own) and return its exit code.

    Raises:
        SystemExit: 2 where argparse rejects the command line, 0 after --help.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # what a terminal has no sign for is a question mark
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in arguments:  # everything behind it belongs to the user's own program
        position = arguments.index("--")
        arguments, command = arguments[:position], arguments[position + 1 :]
    parser = command_parser()
    if any("\0" in argument for argument in (*arguments, *command)):
        parser.error(
            "an argument holds a NUL character, which no file and no number has; leave it out"
        )
    _require_known(arguments, parser)
    options, unknown = parser.parse_known_args(arguments)
    takes_command = options.action in (_run, _agent, _coordinate, _plan)
    takes_command = takes_command or getattr(options, "takes_command", False)
    if unknown:
        _refuse(unknown, _commands(parser)[options.called], takes_command=takes_command)
    if command and not takes_command:
        parser.error(f"{options.called} takes no command after --")
    try:
        code = options.action(options, command, parser)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        return _UNREAD
    return code


def _is_unread(stream: TextIO) -> bool:
    """Whether nobody reads a stream any more, such as of `| head`; what is left for it is then dropped."""
    end = select.poll()
    end.register(stream.fileno(), 0)  # of errors it tells anyway
    if not any(event & select.POLLERR for _, event in end.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return True


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands, by their names."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices


def _require_known(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """End with an error where the first argument is no command, naming one that it may have meant."""
    known = _commands(parser)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        close = difflib.get_close_matches(arguments[0], known, n=1)
        meant = f"did you mean {close[0]}?" if close else f"There are {', '.join(known)}."
        parser.error(f"there is no command {arguments[0]!r}; {meant}")


def _refuse(
    unknown: Sequence[str], command: argparse.ArgumentParser, *, takes_command: bool
) -> NoReturn:
    """End with an error about arguments that a command does not have, under its own usage."""
    name, first = command.prog, unknown[0]
    close = difflib.get_close_matches(first, command._option_string_actions, n=1, cutoff=0.75)
    if close and first.startswith("--"):
        does = f"did you mean {close[0]}?"
    elif takes_command and not first.startswith("-"):
        does = f"put -- before the command: {name} ... -- {' '.join(unknown)}"
    elif takes_command:
        does = f"what belongs to your own program comes behind --: {name} ... -- ... {first}"
    else:
        does = f"{name} --help says what there is"
    command.error(f"unrecognized arguments: {' '.join(unknown)}; {does}")


class _Versions(argparse.Action):
    """Prints what a report of a defect has to name."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        names = ("jax", "jaxlib", "flax", "optax", "numpy")
        found = [f"{name} {importlib.metadata.version(name)}" for name in names]
        found += [f"Python {platform.python_version()}", platform.platform(terse=True)]
        print(f"jaxgoodput {__version__} ({', '.join(found)})")
        parser.exit()


def command_parser() -> argparse.ArgumentParser:
    """The commands and their options; `called` of what it parses is the name of the command."""
    parser = argparse.ArgumentParser(
        prog="jaxgoodput",
        description="Adaptive, elastic training in JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Versions, nargs=0, help="of what decides, and exit")
    shtab.add_argument_to(parser, "--print-completion")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, action: Callable, summary: str, usage: str, text: str):
        command = commands.add_parser(
            name,
            help=summary,
            usage=usage,
            description=text,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(action=action, called=name)
        return command

    run = add(
        "run",
        _run,
        "run a script as one job of several processes, on this host or on hosts that come and go",
        "jaxgoodput run --nproc-per-node N [options] -- python train.py [args ...]\n"
        "       jaxgoodput run --nnodes MIN:MAX [--hosts A,B,...] [options] -- python train.py [args ...]",
        "Start N processes of the script, which form one JAX job: jax.process_count() is N. The\n"
        "script needs no line of its own for that. Its output appears line by line behind the\n"
        "number of the process; signals are passed on; nothing is left running.\n\n"
        "With --nnodes the job goes on while hosts come and go: those that are left keep the state in\n"
        "memory, and nobody restarts. Processes that fail are replaced; a host more joins with\n"
        "`jaxgoodput agent`.\n\n"
        "examples: jaxgoodput run --nproc-per-node 2 --devices-per-process 2 -- \\\n"
        "              python train.py --workdir /tmp/run\n"
        "          jaxgoodput run --nnodes 1:4 --hosts a,b,c,d -- python train.py --workdir /shared/run",
    )
    run.add_argument(
        "--nnodes",
        metavar="MIN:MAX",
        help="the job goes on with any number of hosts between these (a number: exactly so many)",
    )
    run.add_argument(
        "--hosts",
        metavar="A,B,...",
        help="names for the remote shell; the script is in the same folder on all (default: this machine)",
    )
    run.add_argument("--hostfile", metavar="FILE", help="instead of --hosts: one a line")
    run.add_argument(
        "--local-hosts",
        type=_at_least(0),
        metavar="K",
        help="so many hosts that are this machine, to try it out; 0: all come with `jaxgoodput agent` "
        "(default: 1, where no hosts are named)",
    )
    run.add_argument(
        "--hosts-per-group",
        type=_at_least(1),
        metavar="K",
        help="so many hosts share one copy of the model, cut as Config.strategies says; they come and go "
        "together (default: each process has a copy of its own)",
    )
    run.add_argument(
        "--rsh",
        metavar="SHELL",
        help="the remote shell, called as SHELL HOST COMMAND (default: ssh -o BatchMode=yes)",
    )
    run.add_argument(
        "--remote-python",
        metavar="PATH",
        help="the interpreter on the hosts (default: that of this command)",
    )
    run.add_argument(
        "--join-s",
        type=_at_least(0.0),
        metavar="S",
        help="how long the first start waits for more than MIN hosts (default: 10)",
    )
    run.add_argument(
        "--admit-every-s",
        type=_at_least(0.0),
        metavar="S",
        help="the least time between two changes that only take somebody in (default: 5)",
    )
    run.add_argument(
        "--exclude-slow",
        type=_at_least(0.0),
        metavar="FACTOR",
        help="leave a host out for a while that needs more than FACTOR times as long for a sample as the "
        "others, where steps are shorter without it and MIN are left; 0: none (default: 2)",
    )
    run.add_argument(
        "--exclude-s",
        type=_at_least(0.0),
        metavar="S",
        help="until it is checked again, twice as long each time (default: 300)",
    )
    agent = add(
        "agent",
        _agent,
        "have this host take part in a job of `jaxgoodput run --nnodes`",
        "jaxgoodput agent --rdzv-endpoint HOST:PORT [options] -- python train.py [args ...]",
        "Start processes of the script on this host, for the job whose coordinator is at HOST:PORT.\n"
        "The command must be that of the job. SIGTERM has the host leave; the job goes on. The secret\n"
        "of the job is in JAXGOODPUT_SECRET, set alike for `jaxgoodput run` and for agents.",
    )
    agent.add_argument("--name", help="of this host in the job (default: its host name)")
    agent.add_argument(
        "--local-devices",
        metavar="I,J,...",
        help="the devices of this host that its processes take, with --devices-per-process (default: from "
        "0 on)",
    )
    for command in (run, agent):
        command.add_argument("--secret-stdin", action="store_true", help=argparse.SUPPRESS)
        command.add_argument(
            "--rdzv-endpoint",
            metavar="HOST:PORT",
            required=command is agent,
            help="where the coordinator is (of run: a free port, on the loopback interface where no "
            "hosts are named)",
        )
        command.add_argument(
            "--nproc-per-node",
            type=_at_least(1),
            metavar="N",
            help="processes of a host (default: 1 with --nnodes)",
        )
        command.add_argument(
            "--devices-per-process",
            type=_at_least(1),
            metavar="D",
            help="devices of each process: virtual ones on CPU, GPUs r*D to (r+1)*D-1 for process r "
            "(default: one; all where N is 1)",
        )
        command.add_argument(
            "--silent-s",
            type=_at_least(1.0),
            metavar="S",
            help="a process without a sign of life for so long is replaced (default: 10)",
        )
        command.add_argument(
            "--reconnect-s",
            type=_at_least(0.0),
            metavar="S",
            help="how long agents look for a coordinator that has gone (default: 60 where "
            "--rdzv-endpoint names a port, else 0)",
        )
    run.add_argument(
        "--max-restarts",
        type=_at_least(0),
        metavar="K",
        help="start again, at most K times, after an unasked-for exit with 143 or a crash; two crashes "
        "in a row without a step further end it (default: 0). With --nnodes: processes that are "
        "replaced, in all (default: 100)",
    )
    coordinate = add(
        "coordinate",
        _coordinate,
        "serve a job whose processes somebody else starts (srun, kubectl)",
        "jaxgoodput coordinate --num-processes N [options] -- srun python -m jaxgoodput.launcher "
        "train.py [args ...]",
        "Run a command that starts the N processes of one job, on any hosts, and let them find\n"
        "each other here while it runs. They read JAXGOODPUT_COORDINATOR and\n"
        "JAXGOODPUT_NUM_PROCESSES, which the command passes on, and their rank from\n"
        "JAXGOODPUT_PROCESS_ID, JAX_PROCESS_ID or SLURM_PROCID. launch/slurm.sbatch uses it.",
    )
    coordinate.add_argument(
        "--num-processes", type=_at_least(1), required=True, metavar="N", help="of the whole job"
    )
    coordinate.add_argument(
        "--host", default=None, help="how the processes reach this host (default: its name)"
    )
    coordinate.add_argument("--port", type=_port, default=None, help="default: one that is free")
    for command in (run, agent, coordinate):
        command.add_argument(
            "--grace-s",
            type=_at_least(0.0),
            default=60.0,
            metavar="S",
            help="seconds between a stop signal and SIGKILL, for saving (default: 60)",
        )
    _plan_options(
        add(
            "plan",
            _plan,
            "say what each strategy would do on devices that need not be there",
            "jaxgoodput plan SCRIPT (--topology v5e:16x16 | --devices N) [options] [-- args ...]\n"
            "       jaxgoodput plan WORKDIR --devices N [--nodes M]",
            "Run a script up to its Trainer.fit(), compile the step for each of Config.strategies (none:\n"
            "all that suit the model), and print what fits, what a device holds at its peak, what is\n"
            "sent, and the step time that a roofline of the chip gives, best first. Nothing is trained.\n"
            "Of the workdir of a run: which devices, batch and strategy it would do best on, by the\n"
            "step times and the gradient noise that it measured itself, and what of that is guessed.\n\n"
            "examples: jaxgoodput plan train.py --topology v5e:16x16 -- --workdir /tmp/run\n"
            "          jaxgoodput plan train.py --devices 8 -- --workdir /tmp/run\n"
            "          jaxgoodput plan /tmp/run --devices 16 --nodes 2",
        )
    )
    report = add(
        "report",
        _report,
        "print where a run's time went and what its batch sizes did",
        "jaxgoodput report WORKDIR [WORKDIR ...] [--json]",
        "Print a run as a table: where the time went, which batch sizes were used, what the model\n"
        "predicted and what was measured. Several runs are printed side by side.",
    )
    report.add_argument("workdirs", metavar="WORKDIR", nargs="+", help="the run's --workdir")
    report.add_argument("--json", action="store_true", help="the numbers; of several runs, a list")
    board = add(
        "board",
        _board,
        "show runs in TensorBoard, with the settings that their curves need",
        "jaxgoodput board WORKDIR [WORKDIR ...]",
        "Start TensorBoard on runs, each under the name of its folder, and open the page on which the\n"
        "curves that matter are pinned. Ctrl-C ends it.",
    )
    board.add_argument("workdirs", metavar="WORKDIR", nargs="+", help="the run's --workdir")
    board.add_argument("--port", type=_port, help="(default: the first free one from 6006 on)")
    board.add_argument("--no-browser", action="store_true", help="only print the address")
    simulate = add(
        "simulate",
        _simulate,
        "compare scheduling policies on a workload, in simulated time",
        "jaxgoodput simulate [--policy A,B,...] [--workload W] [--cluster C] [--out DIR] [options]",
        "Run a workload under each policy, through the same decisions that a real scheduler makes,\n"
        "and print how long jobs took, what was used and how fair it was. FTF is finish-time\n"
        "fairness: a job's time over what it would take alone on its share; above 1 is unfair.\n\n"
        "examples: jaxgoodput simulate --policy goodput,sia,tiresias --out /tmp/compared\n"
        "          jaxgoodput simulate --workload sia/workloads/philly/workload-1.csv \\\n"
        "              --cluster aws:6x4,dgx-ext:2x8,rtx:3x8 --policy goodput,sia\n"
        "          jaxgoodput simulate --explain vision-small-12@3h\n"
        "          jaxgoodput simulate --what-if language-model:8,weight=2@3h",
    )
    _simulate_options(simulate)
    add_commands(add, _at_least)
    return parser


def _simulate_options(simulate: argparse.ArgumentParser) -> None:
    text = {
        "--policy": "names separated by commas (default: goodput,sia,pollux,tiresias; goodput with --explain "
        "and --what-if); see --list",
        "--explain": "instead of comparing: why that job had what it had then, what else it could have "
        "had at which price, and who had the devices; TIME in seconds or as 90m, 1.5h, 2d",
        "--what-if": "instead of comparing: the plan at that time if one job more were there, "
        "APPLICATION[:DEVICES][,mode=M][,batch=N][,weight=W][,id=NAME]; who would change, and by how much",
        "--workload": "synthetic[:JOBS], or a workload file, or a folder that holds one, as Pollux, "
        "Sia or Gavel ship it; their tables are looked for above it (default: synthetic:160)",
        "--cluster": "[KIND:]NODESxDEVICES[/NODES PER RACK],... or a .json file of a ClusterSpec (default: "
        "that of the workload's artifact; t4:16x4)",
        "--faults": "what goes wrong, in hours: node=BETWEEN:REPAIR, rack=BETWEEN:REPAIR, "
        "slow=BETWEEN:LENGTH:SPEED, crash=BETWEEN, cancel=SHARE:AFTER, checkpoint=BETWEEN, separated by "
        "commas; the same for every policy (default: nothing)",
        "--rules": "own (of the workload's artifact; events for synthetic), pollux, sia, gavel: "
        "rounds as published; events: as jobs come and go; realistic: with noise, interference, "
        "failures and measured restart costs (default: own)",
        "--costs": "restarts by kind of change, in units of --restart-s: start=N, resume=N, move=N, "
        "shape=N, kind=N; compile=SECONDS for a shape that a job has not had; storage=GIB/S, shared by those "
        "that restart together (default: all alike)",
        "--inputs": "cpus=NUMBER of a node and APPLICATION=SAMPLES that one of them prepares in a second, "
        "per-device=NUMBER that a job asks for (default: no job waits for its samples)",
        "--speed": "speeds of kinds for synthetic jobs, KIND=NUMBER,..., 1 = a T4",
        "--tenants": "who shares the cluster, [PARENT/]NAME[:KEY=NUMBER...],... with guaranteed= and limit= "
        "in devices, weight=, budget= per hour, jobs= the part of the jobs that are its; results by tenant "
        "(default: nobody)",
        "--prices": "of a device per hour, KIND=NUMBER,... (default: those of the cluster's file)",
        "--budgets": "the most that a job may cost, NAME=NUMBER,... with the id of a job, an application or "
        "all as NAME (default: no limit)",
        "--deadlines": "SHARE:MULTIPLE: that share of the jobs is due so many times as long after its "
        "submission as it takes alone (default: none)",
        "--out": "write results.json and the pictures into this folder",
    }
    simulate.add_argument("--policy", metavar="A,B,...", default=None, help=text["--policy"])
    simulate.add_argument("--workload", metavar="W", default="synthetic", help=text["--workload"])
    simulate.add_argument("--cluster", metavar="C", default=None, help=text["--cluster"])
    simulate.add_argument("--rules", metavar="R", default="own", help=text["--rules"])
    simulate.add_argument(
        "--restart-s",
        type=_at_least(0.0),
        default=None,
        metavar="S",
        help="seconds that a change of devices costs (default: the rules'; 30 for synthetic)",
    )
    simulate.add_argument("--faults", metavar="F", default=None, help=text["--faults"])
    simulate.add_argument("--costs", metavar="X", default=None, help=text["--costs"])
    simulate.add_argument("--inputs", metavar="I", default=None, help=text["--inputs"])
    simulate.add_argument("--tenants", metavar="T", default=None, help=text["--tenants"])
    simulate.add_argument("--prices", metavar="K=N", default=None, help=text["--prices"])
    simulate.add_argument("--budgets", metavar="B", default=None, help=text["--budgets"])
    simulate.add_argument("--deadlines", metavar="D", default=None, help=text["--deadlines"])
    simulate.add_argument(
        "--declared-progress", action="store_true", help="adaptive jobs say how much work is left"
    )
    simulate.add_argument("--seed", type=_at_least(0), default=0, help="of jobs, noise, failures")
    simulate.add_argument(
        "--hours",
        type=_at_least(0.0),
        default=None,
        metavar="H",
        help="synthetic: jobs arrive during so many hours (default: 8)",
    )
    simulate.add_argument("--speed", metavar="K=N", default=None, help=text["--speed"])
    simulate.add_argument("--out", metavar="DIR", default=None, help=text["--out"])
    asked = simulate.add_mutually_exclusive_group()
    asked.add_argument("--explain", metavar="JOB@TIME", default=None, help=text["--explain"])
    asked.add_argument("--what-if", metavar="SPEC@TIME", default=None, help=text["--what-if"])
    simulate.add_argument("--list", action="store_true", help="name all policies and stop")


def _plan_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "script", metavar="SCRIPT|WORKDIR", help="the script that trains, or the --workdir of a run"
    )
    where = plan.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--topology",
        metavar="KIND:SHAPE",
        help="TPUs that need not be there, such as v5e:16x16, v6e:4x4 or v5p:4x4x4 (needs libtpu)",
    )
    where.add_argument(
        "--devices", type=_at_least(1), metavar="N", help="devices at hand; virtual ones on CPU"
    )
    plan.add_argument(
        "--nodes",
        type=_at_least(1),
        metavar="M",
        help="WORKDIR only: over which the devices are spread evenly (default: 1)",
    )
    plan.add_argument(
        "--num-slices",
        type=_at_least(1),
        default=1,
        metavar="S",
        help="of that topology (default: 1)",
    )
    plan.add_argument(
        "--micro-batch-size",
        type=_at_least(1),
        metavar="M",
        help="samples per replica (default: the base batch over the replicas, less where it does not fit)",
    )
    plan.add_argument(
        "--memory-gib",
        type=_at_least(0.0),
        metavar="G",
        help="what a step may use on a device (default: the chip's memory less execution.memory_margin)",
    )


def _at_least(least: Number) -> Callable[[str], Number]:
    kind = type(least)

    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if kind is float and value > _LONGEST:
            raise argparse.ArgumentTypeError(f"{value:g} is more than {_LONGEST:g}")
        return value

    return number


def _port(text: str) -> int:
    value = _at_least(1)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port: they end at 65535")
    return value


# Options of `run` that say something of hosts, or of processes that are replaced while others go on.
_ELASTIC = (
    *("hosts", "hostfile", "local_hosts", "hosts_per_group", "rsh", "remote_python"),
    *("rdzv_endpoint", "join_s", "admit_every_s", "silent_s", "reconnect_s"),
    *("exclude_slow", "exclude_s", "secret_stdin"),
)


def _run(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.launcher.local import run_local
    from jaxgoodput.launcher.supervise import UsageError

    if options.nnodes is not None:
        return _run_elastic(options, command, parser)
    for name in _ELASTIC:
        if getattr(options, name) not in (None, False):
            parser.error(
                f"--{name.replace('_', '-')} is for a job whose hosts come and go: give --nnodes MIN:MAX, or "
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
        )
    except UsageError as error:
        return _wrong(error)


def _run_elastic(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.launcher.elastic.hosts import read_host_file
    from jaxgoodput.launcher.elastic.job import Job, run_elastic
    from jaxgoodput.launcher.supervise import UsageError

    given = [n for n in ("hosts", "hostfile", "local_hosts") if getattr(options, n) is not None]
    if len(given) > 1:
        parser.error("give one of --hosts, --hostfile and --local-hosts")
    for name in ("rsh", "remote_python"):
        if getattr(options, name) is not None and given not in (["hosts"], ["hostfile"]):
            parser.error(f"--{name.replace('_', '-')} is for the hosts of --hosts or --hostfile")
    least, _, most = options.nnodes.partition(":")
    if not (least.isdigit() and (most or least).isdigit()):
        parser.error(f"--nnodes {options.nnodes}: give MIN:MAX, or one number")
    try:
        if options.hostfile is not None:
            hosts = read_host_file(pathlib.Path(options.hostfile).read_text())
            if not hosts:
                raise UsageError(f"--hostfile {options.hostfile} names no host")
        else:
            hosts = [h for h in (options.hosts or "").split(",") if h]
            if options.hosts is not None and not hosts:
                raise UsageError(f"--hosts {options.hosts!r} names no host")
        port = (options.rdzv_endpoint or ":0").rpartition(":")[2]
        wait_s = options.reconnect_s
        job = Job(
            least=int(least),
            most=int(most or least),
            slots=options.nproc_per_node or 1,
            hosts_per_group=options.hosts_per_group,
            devices_per_process=options.devices_per_process,
            hosts=tuple(hosts),
            local_hosts=1 if options.local_hosts is None else options.local_hosts,
            python=options.remote_python or sys.executable,
            endpoint=options.rdzv_endpoint,
            max_restarts=100 if options.max_restarts is None else options.max_restarts,
            grace_s=options.grace_s,
            reconnect_s=(0.0 if port == "0" else 60.0) if wait_s is None else wait_s,
            secret=sys.stdin.readline().strip() if options.secret_stdin else None,
            **_given(options, "rsh", "join_s", "admit_every_s", "silent_s"),
            **_given(options, "exclude_slow", "exclude_s"),
        )
        return run_elastic(command, job)
    except (UsageError, OSError) as error:
        return _wrong(error)


def _given(options, *names: str) -> dict[str, Any]:
    """Those of the options that were given; what takes them has the defaults of the others."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _local_devices(options, parser: argparse.ArgumentParser) -> tuple[int, ...] | None:
    text = options.local_devices
    if text is None:
        return None
    words = text.split(",")
    needed = (options.nproc_per_node or 1) * (options.devices_per_process or 0)
    if not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        parser.error(f"--local-devices {text}: give different numbers of devices, I,J,...")
    if len(words) != needed:
        parser.error(
            f"--local-devices {text} names {len(words)} devices, and --nproc-per-node processes of "
            f"--devices-per-process take {needed}"
        )
    return tuple(map(int, words))


def _agent(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    import os
    import socket

    from jaxgoodput.clock import SystemClock
    from jaxgoodput.launcher.elastic.agent import AgentSettings, run_agent
    from jaxgoodput.launcher.supervise import UsageError

    if options.secret_stdin:
        secret = sys.stdin.readline().strip()
    else:
        secret = os.environ.get("JAXGOODPUT_SECRET", "")
    if not secret:
        parser.error(
            "JAXGOODPUT_SECRET is not set. Set it to the same text here and where `jaxgoodput run` is started"
        )
    part = AgentSettings(
        address=options.rdzv_endpoint,
        secret=secret,
        name=options.name or socket.gethostname(),
        slots=options.nproc_per_node or 1,
        devices_per_process=options.devices_per_process,
        local_devices=_local_devices(options, parser),
        grace_s=options.grace_s,
        **_given(options, "silent_s", "reconnect_s"),
    )
    try:
        return run_agent(command, part, clock=SystemClock())
    except UsageError as error:
        return _wrong(error)


def _coordinate(options, command: list[str], parser: argparse.ArgumentParser) -> int:
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
        return _wrong(error)


def _plan(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.launcher.plan import plan
    from jaxgoodput.launcher.plan_run import is_workdir

    if is_workdir(options.script):
        return _plan_run(options, command)
    if options.nodes is not None:
        parser.error(
            f"--nodes is for the workdir of a run, and {options.script} is none; a script's strategies are "
            "planned for --devices or a --topology"
        )
    given = {
        "--topology": options.topology,
        "--devices": options.devices,
        "--num-slices": options.num_slices,
        "--micro-batch-size": options.micro_batch_size,
        "--memory-gib": options.memory_gib,
    }
    flags = [f"{name}={value}" for name, value in given.items() if value is not None]
    return plan([*flags, options.script, *command], num_devices=options.devices)


def _plan_run(options, command: list[str]) -> int:
    from jaxgoodput.launcher.plan_run import plan_run
    from jaxgoodput.launcher.supervise import UsageError

    try:
        for name, value, default in (
            ("--topology", options.topology, None),
            ("--num-slices", options.num_slices, 1),
            ("--micro-batch-size", options.micro_batch_size, None),
            ("--memory-gib", options.memory_gib, None),
            ("a command after --", command, []),
        ):
            if value != default:
                raise UsageError(
                    f"{name} is for a script, and {options.script} is a folder: a run is planned by what it "
                    "measured on its own kind of device. Use --devices and --nodes."
                )
        print(plan_run(options.script, options.devices, options.nodes or 1))
    except UsageError as error:
        return _wrong(error)
    return _DONE


def _report(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    import json

    from jaxgoodput.observe.report import compare, numbers, report

    # What a terminal cannot show is not sent to it.
    ascii = (sys.stdout.encoding or "ascii").lower().replace("-", "") not in ("utf8", "utf16")
    try:
        if options.json:
            found = [numbers(workdir) for workdir in options.workdirs]
            print(json.dumps(found if len(found) > 1 else found[0], indent=1))
        elif len(options.workdirs) > 1:
            print(compare(options.workdirs, ascii=ascii))
        else:
            print(report(options.workdirs[0], ascii=ascii))
    except (OSError, ValueError) as error:  # no such run, or not the files of one
        return _wrong(error)
    return _DONE


def _board(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    import webbrowser

    from jaxgoodput.observe import board

    if importlib.util.find_spec("tensorboard") is None:
        return _wrong(ValueError("there is no TensorBoard here: pip install tensorboard."))
    look = (lambda _: True) if options.no_browser else webbrowser.open
    try:
        return board.show(options.workdirs, look, port=options.port)
    except (OSError, ValueError) as error:
        return _wrong(error)


def _simulate(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.cluster.scheduler import catalogue
    from jaxgoodput.cluster.simulate import (
        StalledError,
        compare,
        explanation,
        read_scenario,
        read_settings,
        table,
        what_if,
    )
    from jaxgoodput.cluster.simulate.compare import (
        costs_in_words,
        deadlines_in_words,
        tenants_table,
    )

    known = catalogue()
    if options.list:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {named.says}" for name, named in known.items()))
        return _DONE
    question = options.explain or options.what_if
    default = "goodput" if question else "goodput,sia,pollux,tiresias"
    try:
        names = [name.strip() for name in (options.policy or default).split(",")]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"--policy: there is no {name!r}. There are: {', '.join(known)} "
                    "(--list says what they do)."
                )
        scenario = read_scenario(
            options.workload,
            options.cluster,
            seed=options.seed,
            hours=options.hours,
            speed=options.speed,
            tenants=options.tenants,
            prices=options.prices,
            budgets=options.budgets,
            deadlines=options.deadlines,
        )
        settings = read_settings(
            options.rules,
            scenario.origin,
            restart_s=options.restart_s,
            seed=options.seed,
            declared_progress=options.declared_progress,
            faults=options.faults,
            costs=options.costs,
            inputs=options.inputs,
        )
        if question:
            if options.out is not None:
                raise ValueError("--out: answers are printed only; leave it out, or the question.")
            answer = explanation if options.explain else what_if
            said = [answer(scenario, name, known[name], settings, question) for name in names]
            print("\n\n".join(said))
            return _DONE
        folder = _folder(options.out)
        with _progress() as on_progress:
            policies = {name: known[name] for name in names}
            results = compare(scenario, policies, settings, on_progress=on_progress)
        devices = sum(node.num_devices for node in scenario.cluster.nodes)
        print(f"{scenario.name}, {len(scenario.jobs)} jobs on {devices} devices\n")
        print(table(results))
        if whose := tenants_table(results):
            print(f"\n{whose}")
        if due := [said for said in map(deadlines_in_words, results) if said]:
            print()
            print("\n".join(due))
        if costs := [said for said in map(costs_in_words, results) if said]:
            print()
            print("\n".join(costs))
        if settings.faults is not None:
            print()
            print("\n".join(f"{r.policy}: {r.faults() or 'nothing went wrong'}" for r in results))
        if folder is not None:
            _write(folder, scenario, settings, results)
    except (ValueError, OSError, StalledError) as error:
        return _wrong(error)
    return _DONE


def _folder(path: str | None) -> pathlib.Path | None:
    """Where to write, checked before hours of simulation; nothing is made yet."""
    if path is None:
        return None
    folder = pathlib.Path(path)
    at = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    if not at.is_dir():
        raise ValueError(f"--out {path}: {at} is a file; name a folder.")
    return folder


def _write(folder: pathlib.Path, scenario, settings, results) -> None:
    from jaxgoodput.cluster.simulate import pictures
    from jaxgoodput.cluster.simulate.compare import to_json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(to_json(scenario, settings, results))
    if not pictures.has_matplotlib():
        print(f"\nwrote {folder}/results.json; for the pictures: pip install 'jaxgoodput[plots]'")
        return
    drawn = {"completion.png": pictures.completion_png(results, title=scenario.name)}
    for result in results:
        title = f"{result.policy}: {scenario.name}"
        name = f"gantt-{result.policy}.png"
        drawn[name] = pictures.gantt_png(result, scenario.cluster, title=title)
    for name, picture in drawn.items():
        (folder / name).write_bytes(picture)
    print(f"\nwrote results.json, {', '.join(drawn)} into {folder}")


@contextlib.contextmanager
def _progress() -> Iterator[Callable]:
    """How many jobs of a policy are done: a bar that goes away on a terminal, elsewhere a line per policy."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.completed}/{task.total} jobs, {task.fields[hours]:.1f} h"),
    )
    shown = progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    tasks: dict[str, progress.TaskID] = {}

    def on_progress(name: str, now) -> None:
        hours = now.now_s / 3600
        if console.is_terminal:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=now.num_jobs, hours=0.0)
            shown.update(tasks[name], completed=now.num_done, hours=hours)
        elif now.num_done == now.num_jobs:
            print(f"{name}: {now.num_done}/{now.num_jobs} jobs, {hours:.1f} h", file=sys.stderr)

    with shown:
        yield on_progress


def _wrong(error: Exception) -> int:
    if isinstance(error, BrokenPipeError):
        raise error
    print(f"jaxgoodput: {error}", file=sys.stderr)
    return _USAGE


if __name__ == "__main__":
    raise SystemExit(main())
