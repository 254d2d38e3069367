"""The command line: `jaxgoodput run | coordinate | report`; imports what a command needs, late."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

_DONE, _USAGE = 0, 2

Number = TypeVar("Number", int, float)

_EPILOG = """\
exit codes: 0 done; 143 saved and wants a restart (SIGTERM, SIGINT); 1 a bug; 2 wrong usage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: the process's own) and return its exit code.

    Raises:
        SystemExit: 2 where argparse rejects the command line, 0 after --help.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in arguments:  # everything behind it belongs to the user's own program
        position = arguments.index("--")
        arguments, command = arguments[:position], arguments[position + 1 :]
    parser = _parser()
    options = parser.parse_args(arguments)
    if command and options.action is _report:
        parser.error("report takes no command after --")
    return options.action(options, command, parser)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxgoodput",
        description="Adaptive, elastic training in JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        command.set_defaults(action=action)
        return command

    run = add(
        "run",
        _run,
        "run a script as one job of several processes on this host",
        "jaxgoodput run --nproc-per-node N [options] -- python train.py [args ...]",
        "Start N processes of the script, which form one JAX job: jax.process_count() is N. The\n"
        "script needs no line of its own for that. Its output appears line by line behind the\n"
        "number of the process; signals are passed on; nothing is left running.\n\n"
        "example: jaxgoodput run --nproc-per-node 2 --devices-per-process 2 -- \\\n"
        "             python train.py --workdir /tmp/run",
    )
    run.add_argument(
        "--nproc-per-node", type=_at_least(1), required=True, metavar="N", help="processes to start"
    )
    run.add_argument(
        "--devices-per-process",
        type=_at_least(1),
        metavar="D",
        help="devices of each process: virtual ones on CPU, GPUs r*D to (r+1)*D-1 for process r "
        "(default: one; all where N is 1)",
    )
    run.add_argument(
        "--max-restarts",
        type=_at_least(0),
        default=0,
        metavar="K",
        help="start again, at most K times, after an unasked-for exit with 143 (default: 0)",
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
    coordinate.add_argument(
        "--port", type=_at_least(1), default=None, help="default: one that is free"
    )
    for command in (run, coordinate):
        command.add_argument(
            "--grace-s",
            type=_at_least(0.0),
            default=60.0,
            metavar="S",
            help="seconds between a stop signal and SIGKILL, for saving (default: 60)",
        )
    report = add(
        "report",
        _report,
        "print where a run's time went and what its batch sizes did",
        "jaxgoodput report WORKDIR",
        "Print a run as a table: where the time went, which batch sizes were used, what the model\n"
        "predicted and what was measured.",
    )
    report.add_argument("workdir", metavar="WORKDIR", help="the run's --workdir")
    return parser


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
        return value

    return number


def _run(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.launcher.local import run_local
    from jaxgoodput.launcher.supervise import UsageError

    try:
        return run_local(
            command,
            options.nproc_per_node,
            options.devices_per_process,
            max_restarts=options.max_restarts,
            grace_s=options.grace_s,
        )
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


def _report(options, command: list[str], parser: argparse.ArgumentParser) -> int:
    from jaxgoodput.train.report import report

    try:
        print(report(options.workdir))
    except (OSError, ValueError) as error:  # no such run, or not the files of one
        return _wrong(error)
    return _DONE


def _wrong(error: Exception) -> int:
    print(f"jaxgoodput: {error}", file=sys.stderr)
    return _USAGE


if __name__ == "__main__":
    raise SystemExit(main())
