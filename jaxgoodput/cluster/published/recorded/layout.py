"""The layout of a trace: which column holds what, and how the devices of a job follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxgoodput.cluster.published.recorded.times import is_missing

Cells = Mapping[str, str]
"""The texts of one row, by the names of the columns."""

# What a column may hold, in words.
ROLES: Mapping[str, str] = {
    "submit": "when the job was submitted",
    "start": "when it got its devices",
    "end": "when it ended",
    "duration": "for how long it ran",
    "devices": "how many devices it had",
    "id": "its name",
    "state": "how it ended",
    "user": "the user it belongs to",
    "tenant": "the tenant it belongs to, instead of the user",
    "kind": "the kinds of device that it may use, separated by |",
    "application": "the program that it runs",
    "cpu": "how many CPUs it had, on all nodes together",
    "memory": "how much main memory it had, in GiB, on all nodes together",
    "prefer": "the kinds of device that it would rather have, separated by |",
    "preference": "how many times as fast another kind must be to be as good",
    "min": "its least number of devices, if it is not rigid",
    "max": "its greatest number of devices, if it is not rigid",
    "weight": "its priority; 1 is normal",
    "level": "the topology level within one domain of which it lies",
    "min_run": "for how long it keeps its devices before others may get them",
    "preemptible": "whether others may get its devices: yes or no",
    "deadline": "when it is due",
    "budget": "what it may cost",
}

# Which field of a job each role fills that is taken as it is; `read.py` derives the others.
FIELDS: Mapping[str, str] = {
    "preference": "preference",
    "min": "min_devices",
    "max": "max_devices",
    "weight": "weight",
    "level": "level",
    "min_run": "min_run_s",
    "preemptible": "preemptible",
    "deadline": "deadline_s",
    "budget": "budget",
}


def devices_in(name: str) -> Callable[[Cells], float]:
    """Return the function that reads a number, such as the devices, in a column. It raises ValueError."""

    def read(cells: Cells) -> float:
        return number_in(cells, name)

    return read


def number_in(cells: Cells, name: str) -> float:
    """Return the number in a column; 0 if there is none. Raises ValueError for a text that is no number."""
    text = cells.get(name, "")
    if is_missing(text):
        return 0.0
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1e6:
        raise ValueError(f"{text[:40]!r} is no number from 0 to a million")
    return number


def kinds_in(name: str) -> Callable[[Cells], tuple[str, ...]]:
    """Return the function that reads the kinds in a column, which `|` separates."""

    def read(cells: Cells) -> tuple[str, ...]:
        text = cells[name]
        if is_missing(text):
            return ()
        return tuple(kind.strip() for kind in text.split("|") if kind.strip())

    return read


def _zero(cells: Cells) -> float:
    """Return 0, as a trace that does not say what a job had."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class TraceLayout:
    """Which column of a trace holds what. Use `columns_layout`, or one of the presets."""

    file: Literal["table", "philly"] = "table"
    """Format of the file: a table as text, or the JSON of Philly's log."""
    columns: Mapping[str, str]
    """Name of the column by what it holds (`ROLES`)."""
    header: tuple[str, ...] | None = None
    """Names of the columns if the file does not begin with them."""
    delimiter: str | None = None
    """Character between cells; None: the one of comma, tab, | and ; that is most frequent in the header."""
    states: tuple[str, ...] = ()
    """States of the jobs that are used; empty: all."""
    needs: tuple[str, ...] = ()
    """Columns that are needed beside those in `columns`."""
    devices: Callable[[Cells], float]
    """Devices of a job; parts of one are rounded up."""
    kinds: Callable[[Cells], tuple[str, ...]] | None = None
    """Kinds of device that a job may use; empty: all."""
    cpus: Callable[[Cells], float] = field(default=_zero)
    """CPUs of a job on all nodes together; 0: unknown."""
    memory_gib: Callable[[Cells], float] = field(default=_zero)
    """Main memory of a job on all nodes together, in GiB; 0: unknown."""
    left_out: Callable[[Cells], str | None] = field(default=lambda _: None)
    """Reason for which a row is no job; None if it is one."""

    def __post_init__(self):
        has = self.columns.keys()
        if not ({"duration"} <= has or {"start", "end"} <= has):
            raise ValueError(
                "a trace needs a column of durations, or columns of starts and ends. Add duration=NAME, or "
                "start=NAME,end=NAME."
            )
        if not has & {"submit", "start"}:
            raise ValueError(
                "a trace needs a column that says when jobs were submitted. Add submit=NAME."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns that the file must have."""
        return tuple(dict.fromkeys((*self.columns.values(), *self.needs)))


def columns_layout(
    text: str, *, delimiter: str | None = None, states: tuple[str, ...] = ()
) -> TraceLayout:
    """Return the layout of `submit=NAME,devices=NAME,duration=NAME[,state=NAME...]`.

    Raises ValueError for any other text.

    >>> columns_layout("submit=at,devices=gpus,start=begin,end=finish").names
    ('at', 'begin', 'finish', 'gpus')
    """
    columns = _columns(text)
    devices = columns.pop("devices", None)
    if devices is None:
        raise ValueError(
            f"--columns {text!r}: no column says how many devices a job had. Add devices=NAME."
        )
    kind, cpu, memory = (columns.pop(role, None) for role in ("kind", "cpu", "memory"))
    try:
        return TraceLayout(
            columns=columns,
            delimiter=delimiter,
            states=states,
            needs=tuple(name for name in (devices, kind, cpu, memory) if name is not None),
            devices=devices_in(devices),
            kinds=None if kind is None else kinds_in(kind),
            cpus=_zero if cpu is None else devices_in(cpu),
            memory_gib=_zero if memory is None else devices_in(memory),
        )
    except ValueError as error:
        raise ValueError(f"--columns {text!r}: {error}") from error


def _columns(text: str) -> dict[str, str]:
    """Return the name of each role's column. Raises ValueError if the text is not of that form."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        role, _, name = (word.strip() for word in part.partition("="))
        if role not in ROLES or not name or role in columns:
            raise ValueError(
                f"--columns {text!r}: {part!r} is not of the form WHAT=COLUMN with each WHAT once. WHAT is "
                f"one of {', '.join(ROLES)}."
            )
        columns[role] = name
    return columns
