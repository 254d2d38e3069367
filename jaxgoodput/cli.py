"""The command line `jaxgoodput`: finds the commands that rooms register, parses, and carries one out.

Each room declares its commands in its `commands.py`, which the entry points `jaxgoodput.commands` in
pyproject.toml name; `jaxgoodput._commands` says how.
"""

import argparse
import difflib
import importlib.metadata
import io
import os
import platform
import re
import select
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn, TextIO

import shtab

from jaxgoodput import __version__
from jaxgoodput._commands import Commands
from jaxgoodput._exits import MEANINGS

_UNREAD = 141  # the exit code that a shell reports for a program that SIGPIPE ended

_EPILOG = textwrap.fill(
    "exit codes: " + "; ".join(f"{code} {means}" for code, means in MEANINGS.items()) + ".",
    width=106,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: the process's own) and return its exit code.

    Raises:
        SystemExit: 2 if argparse rejects the command line, 0 after --help.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Print a question mark for a character that the terminal lacks, instead of failing.
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command: list[str] = []
    if "--" in arguments:  # the rest is the user's own command, which may contain our options
        position = arguments.index("--")
        arguments, command = arguments[:position], arguments[position + 1 :]
    parser = command_parser()
    if any("\0" in argument for argument in (*arguments, *command)):
        parser.error("an argument contains a NUL character, which no file name or number has")
    for flag in (a.removesuffix("=--") for a in arguments if re.fullmatch(r"--[\w-]+=--", a)):
        parser.error(f"{flag} needs a value; -- ends the options of {parser.prog}")
    # argparse's own message for a mistyped command lists all choices, and suggests none.
    _require_known(arguments, parser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown, _parsers(parser)[options.called], takes_command=options.takes_command)
    if command and not options.takes_command:
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
    """Return whether the reader of a stream has closed it, like `| head`; if so, drop its output."""
    end = select.poll()
    end.register(stream.fileno(), 0)  # errors are reported without being asked for
    if not any(event & select.POLLERR for _, event in end.poll(0)):
        return False
    # Python flushes stdout when it exits: let that go nowhere instead of failing again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return True


def _parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by its name."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices


def _require_known(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """End with an error if the first argument is not a command, and suggest a similar one."""
    known = _parsers(parser)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        close = difflib.get_close_matches(arguments[0], known, n=1)
        meant = f"did you mean {close[0]}?" if close else f"There are {', '.join(known)}."
        parser.error(f"there is no command {arguments[0]!r}; {meant}")


def _refuse(
    unknown: Sequence[str], command: argparse.ArgumentParser, *, takes_command: bool
) -> NoReturn:
    """End with an error about arguments that a command does not have, and print its usage."""
    name, first = command.prog, unknown[0]
    close = difflib.get_close_matches(first, command._option_string_actions, n=1, cutoff=0.75)
    if close and first.startswith("--"):
        hint = f"did you mean {close[0]}?"
    elif takes_command and not first.startswith("-"):
        hint = f"put -- before the command: {name} ... -- {' '.join(unknown)}"
    elif takes_command:
        hint = f"options of your own program go after --: {name} ... -- ... {first}"
    else:
        hint = f"{name} --help lists all options"
    command.error(f"unrecognized arguments: {' '.join(unknown)}; {hint}")


class _Versions(argparse.Action):
    """Prints the versions that a bug report must name, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        names = ("jax", "jaxlib", "flax", "optax", "numpy")
        found = [f"{name} {importlib.metadata.version(name)}" for name in names]
        found += [f"Python {platform.python_version()}", platform.platform(terse=True)]
        print(f"jaxgoodput {__version__} ({', '.join(found)})")
        parser.exit()


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands.

    What it parses has the command's name in `called`, its function in `action`, and `takes_command`.
    """
    parser = argparse.ArgumentParser(
        prog="jaxgoodput",
        description="Adaptive, elastic training in JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Versions, nargs=0, help="print the versions of what matters, and exit"
    )
    shtab.add_argument_to(parser, "--print-completion")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _registered(parser):
        own = subparsers.add_parser(
            command.name,
            help=command.summary,
            usage=command.usage,
            description=command.description,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.set_defaults(
            action=command.action, called=command.name, takes_command=command.takes_command
        )
        for option in command.options:
            option.add_to(own)
    return parser


def _registered(parser: argparse.ArgumentParser) -> Commands:
    """Return the commands that the entry points name; end with an error if there are none."""
    commands = Commands()
    points = importlib.metadata.entry_points(group="jaxgoodput.commands")
    if not points:
        parser.error(
            "no commands were found, because jaxgoodput is not installed: run `pip install -e .` in its "
            "source tree"
        )
    for point in sorted(points, key=lambda point: point.name):
        point.load()(commands)
    return commands


if __name__ == "__main__":
    raise SystemExit(main())
