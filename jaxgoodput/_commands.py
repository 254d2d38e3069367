"""How a room declares its commands: options as data, checked numbers, and one way to report an error.

`jaxgoodput.cli` finds the rooms through the entry points `jaxgoodput.commands` and turns what they declare
into parsers. Nothing here, and nothing that a room imports to declare its commands, may import JAX:
`--help` must be quick.
"""

import argparse
import inspect
import pathlib
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxgoodput._exits import USAGE
from jaxgoodput._fields.typed import number_in, path_in_words, shortened

# The largest number of seconds, hours or GiB: threads cannot wait longer, and no disk holds more. And the
# largest number of processes, hosts or devices, which are listed one by one.
_LARGEST, _MOST = 1e9, 10**6

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
    *,
    most: int | float | None = None,
    **settings: Any,
) -> Option:
    """Declare an option that takes a number from `least` to `most`: a whole number if `least` is one."""
    kind = at_least(least, most, flag.replace("-", "_"))
    return text(flag, metavar, help, default, type=kind, **settings)


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


def at_least(
    least: Number, most: int | float | None = None, name: str = ""
) -> Callable[[str], Number]:
    """Return an argparse type for numbers from `least` to `most`; integers if `least` is one.

    `name` tells the unit of what was meant by other texts: "10m" is 600 if it ends in `_s`.
    """
    kind = type(least)
    largest = most if most is not None else _MOST if kind is int else _LARGEST

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            meant = number_in(text, name)
            fits = (
                meant is not None and (kind is float or isinstance(meant, int)) and meant >= least
            )
            remedy = f"write {meant}" if fits else "give one"
            raise argparse.ArgumentTypeError(f"{shortened(text)} is not {what}; {remedy}") from None
        if not value >= least:  # false for NaN, too
            raise argparse.ArgumentTypeError(
                f"{shortened(value)} is less than {least}, the smallest number allowed"
            )
        if value > largest:
            raise argparse.ArgumentTypeError(
                f"{shortened(value)} is more than {largest:g}, the largest number allowed"
            )
        return value

    return parse


def file(text: str) -> pathlib.Path:
    """Parse the path of a file that is to be read, as an argparse type."""
    path = pathlib.Path(text)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:  # ValueError: a character that no name has
        why = error.strerror if isinstance(error, OSError) else "no name has these characters"
        raise argparse.ArgumentTypeError(f"{path_in_words(text)} cannot be read: {why}") from None
    if is_folder:
        raise argparse.ArgumentTypeError(f"{path_in_words(text)} is a folder; name a file")
    return path


def folder(text: str) -> pathlib.Path:
    """Parse the path of a folder that exists, or can be made, as an argparse type."""
    path = pathlib.Path(text)
    for place in (path, *path.absolute().parents):
        try:
            is_folder = stat.S_ISDIR(place.stat().st_mode)
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            is_folder = False
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "no name has these characters"
            raise argparse.ArgumentTypeError(f"{path_in_words(text)} is no folder: {why}") from None
        if not is_folder:
            raise argparse.ArgumentTypeError(f"{path_in_words(place)} is a file; name a folder")
        break
    return path


def port(text: str) -> int:
    """Parse a TCP port, as an argparse type."""
    return at_least(1, 65535)(text)


def wrong(error: Exception) -> int:
    """Print an error that the user can correct, and return the exit code for wrong usage."""
    if isinstance(error, BrokenPipeError):
        raise error  # the reader of our output has gone: not the user's error
    print(f"jaxgoodput: {error}", file=sys.stderr)
    return USAGE
