"""The reader of the short texts of options: `NAME=NUMBER,...` (`--costs`, `--inputs`, `--prices`, ...)."""

import contextlib
import math
from collections.abc import Collection, Iterator


def finite(text: str) -> float:
    """Return a number, or NaN if the text is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def key_numbers(part: str) -> tuple[str, tuple[float, ...]]:
    """Return the name and the numbers of `NAME=NUMBER[:NUMBER...]`; NaN stands for what is no finite number.

    >>> key_numbers("node=720:0.5")
    ('node', (720.0, 0.5))
    """
    name, _, rest = part.partition("=")
    return name.strip(), tuple(map(finite, rest.split(":")))


def read_numbers(
    option: str,
    text: str,
    *,
    known: Collection[str] | None = None,
    key: str = "NAME",
    example: str,
) -> dict[str, float]:
    """Return the numbers of `NAME=NUMBER,...` by name; `known` None = any names.

    Raises ValueError, quoting the option, if a part has another form or a name occurs twice. The message
    calls a name `key`, and shows `example`.

    >>> read_numbers("--prices", "t4=0.35,a100=3", key="KIND", example="t4=1")
    {'t4': 0.35, 'a100': 3.0}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, (number, *more) = key_numbers(part)
        if not name or name in found or more or math.isnan(number):
            raise ValueError(
                f"{option} {text!r}: {part!r} is not of the form {key}=NUMBER with each {key} once, such as "
                f"{example}."
            )
        if known is not None and name not in known:
            raise ValueError(f"{option} {text!r}: {name!r} is not one of {', '.join(known)}.")
        found[name] = number
    return found


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Put the option, with its text, before the message of a ValueError that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def check_above_zero(class_name: str, value: object, *names: str) -> None:
    """Raise ValueError unless these attributes are above 0 and finite. The message has the class's name."""
    for name in names:
        number = getattr(value, name)
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{class_name}.{name} must be above 0 and finite, got {number}.")
