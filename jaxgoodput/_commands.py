"""How a room declares its commands: options as data, checked numbers, and one way to report an error.

`jaxgoodput.cli` finds the rooms through the entry points `jaxgoodput.commands` and turns what they declare
into parsers. Nothing here, and nothing that a room imports to declare its commands, may import JAX:
`--help` must be quick.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

DONE, USAGE = 0, 2  # exit codes

# The largest number of seconds, hours or GiB: threads cannot wait longer, and no disk holds more.
_LARGEST = 1e9

Number = TypeVar("Number", int, float)
Action = Callable[[argparse.Namespace, list[str], argparse.ArgumentParser], int]


@dataclass(frozen=True)
class Option:
    """One option or positional argument, as `ArgumentParser.add_argument` takes it."""

    flags: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The attribute that holds the value after parsing."""
        return self.flags[-1].lstrip("-").replace("-", "_")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add this option to a parser, or to a group of one."""
        parser.add_argument(*self.flags, **self.settings)


@dataclass(frozen=True)
class OneOf:
    """Options of which at most one may be given, or exactly one if `required`."""

    options: tuple[Option, ...]
    required: bool = False

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser as a mutually exclusive group."""
        group = parser.add_mutually_exclusive_group(required=self.required)
        for option in self.options:
            option.add_to(group)


def text(flag: str, metavar: str, help: str, default: Any = None, **settings: Any) -> Option:
    """Declare an option that takes a word; `settings` are further arguments of `add_argument`."""
    if default not in (None, []):
        help += (
            f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
        )
    return Option((flag,), {"metavar": metavar, "help": help, "default": default, **settings})


def number(
    flag: str,
    metavar: str,
    least: int | float,
    help: str,
    default: int | float | None = None,
    **settings: Any,
) -> Option:
    """Declare an option that takes a number from `least` on: a whole number if `least` is one."""
    return text(flag, metavar, help, default, type=at_least(least), **settings)


def switch(*flags: str, help: str) -> Option:
    """Declare an option that takes no value and is False unless given."""
    return Option(flags, {"action": "store_true", "help": help})


def argument(name: str, metavar: str, help: str, **settings: Any) -> Option:
    """Declare a positional argument."""
    return Option((name,), {"metavar": metavar, "help": help, **settings})


@dataclass(frozen=True)
class Command:
    """One command of `jaxgoodput`. The docstring of its action is its help text."""

    name: str
    action: Action
    """Function of the parsed options, the words after `--` and the parser; it returns the exit code."""
    usage: str
    options: tuple[Option | OneOf, ...]
    takes_command: bool
    """Whether the user's own command may follow after `--`."""

    @property
    def summary(self) -> str:
        """The command's line in `jaxgoodput --help`: the first line of its action's docstring."""
        first = self.description.partition("\n")[0]
        return first[:1].lower() + first[1:].removesuffix(".")

    @property
    def description(self) -> str:
        """The text of `jaxgoodput COMMAND --help`, from its action's docstring."""
        return inspect.getdoc(self.action) or ""


@dataclass
class Commands:
    """The commands that the packages of jaxgoodput have registered so far."""

    _found: list[tuple[int, Command]] = field(default_factory=list)

    def add(
        self,
        order: int,
        name: str,
        action: Action,
        usage: str,
        options: tuple[Option | OneOf, ...],
        *,
        takes_command: bool = False,
    ) -> None:
        """Register a command; `order` is its place in `jaxgoodput --help`, lowest first."""
        self._found.append((order, Command(name, action, usage, options, takes_command)))

    def __iter__(self) -> Iterator[Command]:
        return iter([command for _, command in sorted(self._found, key=lambda found: found[0])])


def at_least(least: Number) -> Callable[[str], Number]:
    """Return an argparse type for numbers from `least` on; integers if `least` is one."""
    kind = type(least)

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}; give one") from None
        if not value >= least:  # false for NaN, too
            raise argparse.ArgumentTypeError(
                f"{value} is less than {least}, the smallest number allowed"
            )
        if kind is float and value > _LARGEST:
            raise argparse.ArgumentTypeError(
                f"{value:g} is more than {_LARGEST:g}, the largest number allowed"
            )
        return value

    return parse


def port(text: str) -> int:
    """Parse a TCP port, as an argparse type."""
    value = at_least(1)(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port: the largest port is 65535")
    return value


def wrong(error: Exception) -> int:
    """Print an error that the user can correct, and return the exit code for wrong usage."""
    if isinstance(error, BrokenPipeError):
        raise error  # the reader of our output has gone: not the user's error
    print(f"jaxgoodput: {error}", file=sys.stderr)
    return USAGE
