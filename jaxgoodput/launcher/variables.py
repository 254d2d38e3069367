"""Environment variables that a user gives to the processes of a job: `--env NAME[=VALUE]`."""

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping

MOST_BYTES = 32_000  # of all variables of a job: they go through a pipe before an agent reads it
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# The launcher sets these itself, differently for each process.
_OWN = re.compile(
    r"JAXGOODPUT_.*|JAX_(COORDINATOR_ADDRESS|NUM_PROCESSES|PROCESS_ID|LOCAL_DEVICE_IDS)"
)


def variable(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE, or NAME for the value in this process's environment, as an argparse type."""
    name, equals, value = text.partition("=")
    try:
        check_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not equals:
        if name not in os.environ:
            raise argparse.ArgumentTypeError(
                f"{name} is not set here, so it has no value to pass on. Set it, or give {name}=VALUE"
            )
        value = os.environ[name]
    return name, value


def check_name(name: str) -> None:
    """Raise ValueError for a name that no variable has, or that the launcher sets itself."""
    if re.fullmatch(_NAME, name) is None:
        raise ValueError(
            f"{name[:80]!a} is no name of a variable. Use letters, digits and underscores, and do not begin "
            "with a digit"
        )
    if _OWN.fullmatch(name):
        raise ValueError(
            f"{name} is set by the launcher, for each process differently. Leave it out"
        )


def as_mapping(given: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return variables by name. Raises ValueError if one is given twice, or if they are too long."""
    pairs = list(given)
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"--env {twice} is given twice. Give each variable once.")
    size = len(to_line(found))
    if size > MOST_BYTES:
        raise ValueError(
            f"the variables of --env take {size} bytes as JSON, and {MOST_BYTES} are the most. Put long "
            "values into a file that the script reads."
        )
    return found


def to_line(variables: Mapping[str, str]) -> str:
    """Return variables as one line, for the standard input of an agent: command lines can be read by all."""
    return json.dumps(dict(variables))


def from_line(line: str) -> dict[str, str]:
    """Return the variables that `to_line` wrote. Raises ValueError for any other text."""
    found = json.loads(line)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("the variables on standard input are no JSON object of texts")
    return found
