"""Readers of workloads and measurements in the layouts of published artifacts.

Sources: the artifacts of Pollux (OSDI 2021), Sia (SOSP 2023), Gavel (OSDI 2020) and Shockwave (NSDI 2023).
You download the files and name the folder. Difference: nothing is skipped. A line that cannot be read is an
error that names the file, the line, the column and what was expected.
"""

import csv
import math
import pathlib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgoodput._fields.serial import parse
from jaxgoodput.cluster.published.tables import Application, Curve, Runs, StepTable, normalised
from jaxgoodput.cluster.scheduler.policy import Mode
from jaxgoodput.specs import JobTerms

Path = str | pathlib.Path

# Largest numbers accepted in a file. With larger ones, sums overflow or simulations never end.
_LARGEST, _LARGEST_S = 1e30, 1e9
# Largest micro-batch by application, if Pollux measured larger ones than its jobs may use.
CAPPED_MICRO_BATCH = {"yolov3": 8}
_CATEGORIES: Mapping[str, Mode] = {
    "adaptive": "adaptive",
    "scale-gpus": "elastic",
    "rigid": "rigid",
}


class TraceError(ValueError):
    """A workload file is not in the expected layout; the message names file and line."""


@dataclass(frozen=True, kw_only=True)
class TraceJob(JobTerms):
    """One job of a workload: when it is submitted, what it runs, and what its user asked for.

    A job that has a deadline also declares its remaining work.
    """

    id: str
    submit_s: float
    application: str
    num_devices: int = 1
    """Number of devices that the user would ask for."""
    min_devices: int | None = None
    """Least number of devices of a job that is not rigid; None: 1."""
    max_devices: int | None = None
    """Greatest number of devices of a job that is not rigid; None: as in the simulation's settings."""
    global_batch_size: int | None = None
    """Global batch that the user would pick, in samples."""
    mode: Mode | None = None
    """What may change while it runs; None = as in the simulation's settings."""
    num_steps: int | None = None
    """Work of the job: steps over all devices in Gavel's traces, base steps for goodput models."""
    duration_s: float | None = None
    """Seconds that it ran on `num_devices`, in traces that hold only durations."""
    slo: float | None = None
    """Deadline as a multiple of the isolated duration, in Gavel's traces."""


def read_pollux_workload(path: Path) -> tuple[TraceJob, ...]:
    """Read a Pollux workload file: name, time, application, num_replicas, batch_size."""
    return _read_workload(pathlib.Path(path))


def read_sia_workload(path: Path) -> tuple[TraceJob, ...]:
    """Read a Sia workload file: Pollux's columns and, optionally, `category`."""
    return _read_workload(pathlib.Path(path))


def _read_workload(path: pathlib.Path) -> tuple[TraceJob, ...]:
    jobs: dict[str, TraceJob] = {}
    for row in _rows(path, ("name", "time", "application", "num_replicas", "batch_size")):
        category = row.cells.get("category")
        if category is not None and category not in _CATEGORIES:
            raise row.error("category", f"one of {', '.join(_CATEGORIES)}")
        name = row.text("name")
        if name in jobs:
            raise row.error("name", "a name that no earlier line has")
        jobs[name] = TraceJob(
            id=name,
            submit_s=row.number("time", least=0.0, most=_LARGEST_S),
            application=row.text("application"),
            num_devices=row.integer("num_replicas"),
            global_batch_size=row.integer("batch_size"),
            mode=None if category is None else _CATEGORIES[category],
        )
    return tuple(jobs.values())


def read_gavel_trace(path: Path) -> tuple[TraceJob, ...]:
    """Read a Gavel trace of 7 or 10 columns, or one of Shockwave's (12 columns), separated by tabs."""
    path = pathlib.Path(path)
    layouts = {len(names): names for names in (_GAVEL_OLD, _GAVEL, _SHOCKWAVE)}
    jobs = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        cells = line.split("\t")
        names = layouts.get(len(cells))
        if names is None:
            raise TraceError(
                f"{path}, line {number}: {len(cells)} columns separated by tabs, expected "
                f"{', '.join(map(str, sorted(layouts)))} (a trace of Gavel or Shockwave)."
            )
        row = _Row(path, number, dict(zip(names, cells, strict=True)))
        slo = row.number("SLO") if "SLO" in names else -1.0
        jobs.append(
            TraceJob(
                id=str(len(jobs)),
                submit_s=row.number("arrival_time", least=0.0, most=_LARGEST_S),
                application=row.text("job_type"),
                num_devices=row.integer("scale_factor"),
                num_steps=row.integer("total_steps"),
                weight=row.number("priority_weight", above=0.0)
                if "priority_weight" in names
                else 1.0,
                slo=slo if slo >= 0 else None,
            )
        )
    return tuple(jobs)


_GAVEL_OLD = ("job_type", "command", "num_steps_arg", "needs_data_dir", "total_steps") + (
    "arrival_time",
    "scale_factor",
)
_GAVEL = ("job_type", "command", "working_directory", "num_steps_arg", "needs_data_dir") + (
    "total_steps",
    "scale_factor",
    "priority_weight",
    "SLO",
    "arrival_time",
)
_SHOCKWAVE = (*_GAVEL[:7], "mode", "priority_weight", "SLO", "duration_s", "arrival_time")

_JOB_KEY = re.compile(
    r"""\((?P<quote>['"])(?P<name>[^'"\\]+)(?P=quote), ?(?P<scale>[0-9]{1,9})\)"""
)

# Kind -> (job type, devices) -> partner (None = alone) -> steps/s of the first and of the partner.
Throughputs = dict[
    str, dict[tuple[str, int], dict[tuple[str, int] | None, float | tuple[float, float]]]
]


def read_gavel_throughputs(path: Path) -> Throughputs:
    """Read Gavel's throughput tables, in steps/s: [kind][(job type, devices)][partner or None].

    An entry is a number for a job alone, and a pair (job, partner) for two jobs together; 0 = does not fit.
    """
    path = pathlib.Path(path)
    try:
        data = parse(_text(path))
    except ValueError as error:
        raise TraceError(f"{path}: expected JSON with throughput tables: {error}") from error
    tables: Throughputs = {}
    for kind, jobs in _object(data, f"{path}: ", "kinds of devices").items():
        tables[kind] = {}
        for job, partners in _object(jobs, f"{path}, [{kind!r}]: ", "jobs").items():
            place = f"{path}, [{kind!r}][{job!r}]"
            tables[kind][_job_key(path, kind, job)] = {
                None if partner == "null" else _job_key(path, kind, partner): _speeds(
                    value, f"{place}[{partner!r}]", 1 if partner == "null" else 2
                )
                for partner, value in _object(partners, f"{place}: ", "partners of the job").items()
            }
    return tables


def _speeds(value: Any, place: str, wanted: int) -> float | tuple[float, float]:
    numbers = value if isinstance(value, list) else [value]
    good = all(type(v) in (int, float) and 0 <= v <= _LARGEST_S for v in numbers)
    if len(numbers) != wanted or not good:
        raise TraceError(
            f"{place}: expected {wanted} numbers >= 0 and <= {_LARGEST_S:g} (steps/s), got "
            f"{reprlib.repr(value)}."
        )
    return float(numbers[0]) if wanted == 1 else (float(numbers[0]), float(numbers[1]))


def _object(value: Any, where: str, names: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"{where}expected an object by {names}, got {reprlib.repr(value)}.")
    return value


def _job_key(path: pathlib.Path, kind: str, text: str) -> tuple[str, int]:
    found = _JOB_KEY.fullmatch(text)
    if found is None:
        raise TraceError(
            f"{path}, [{kind!r}]: the key {reprlib.repr(text)} is not of the form ('job type', scale "
            "factor)."
        )
    return found["name"], int(found["scale"])


def read_pollux_applications(folder: Path, *, kind: str = "t4") -> dict[str, Application]:
    """Read every application below `folder`: placements.csv, scalability.csv and validation-*.csv.

    `kind` names the one kind of device on which they were measured.
    """
    return _read_applications(pathlib.Path(folder), {kind: ""})


def read_sia_applications(folder: Path, kinds: Sequence[str]) -> dict[str, Application]:
    """Read every application below `folder` that was measured on all of `kinds`.

    The files are placements-KIND.csv, scalability-KIND.csv and validation-*.csv. A folder that lacks a kind
    (such as the pipeline-parallel `gpt_pmp`) is left out.
    """
    return _read_applications(pathlib.Path(folder), {kind: f"-{kind}" for kind in kinds})


def _read_applications(folder: pathlib.Path, suffixes: Mapping[str, str]) -> dict[str, Application]:
    applications = {}
    files = [f"placements{suffix}.csv" for suffix in suffixes.values()]
    for place in sorted(folder.iterdir()):
        if all((place / file).is_file() for file in files):
            steps = {kind: _read_steps(place, kind, s) for kind, s in suffixes.items()}
            low = min(table.span[0] for table in steps.values())
            high = max(table.span[1] for table in steps.values())
            micro = low, min(high, CAPPED_MICRO_BATCH.get(place.name, high))
            applications[place.name] = Application(place.name, steps, _read_runs(place), micro)
    if not applications:
        raise TraceError(
            f"{folder}: none of its folders holds {', '.join(files)}; name the folder of applications."
        )
    return applications


def _read_steps(place: pathlib.Path, kind: str, suffix: str) -> StepTable:
    rows: dict[tuple[int, ...], list[tuple[float, float, float]]] = {}
    times = ("local_bsz", "step_time", "sync_time")
    for row in _rows(place / f"placements{suffix}.csv", ("placement", *times)):
        digits = row.text("placement")
        if not re.fullmatch("[1-9]+", digits):
            raise row.error("placement", "one digit per node, 1 to 9")
        rows.setdefault(normalised([int(d) for d in digits]), []).append(row.times())
    if not rows:
        raise TraceError(f"{place}/placements{suffix}.csv: no measurement below the header.")
    curves = {}
    for counts, measured in rows.items():
        sizes, step, sync = np.array(sorted(measured)).T
        curves[counts] = Curve(sizes, step, sync)
    scalability = place / f"scalability{suffix}.csv"
    points = []
    if scalability.is_file():
        for row in _rows(scalability, ("num_nodes", "num_replicas", *times)):
            points.append((row.integer("num_nodes"), row.integer("num_replicas"), *row.times()))
    return StepTable(f"{place.name} on {kind}", curves, np.array(points, float).reshape(-1, 5))


def _read_runs(place: pathlib.Path) -> Runs:
    columns = ("progress", "iteration", "grad_sqr", "grad_var")
    tables: dict[int, list[tuple[float, float, float, float]]] = {}
    for path in place.glob("validation-*.csv"):
        size = path.stem.removeprefix("validation-")
        if not re.fullmatch("[1-9][0-9]{0,8}", size):
            raise TraceError(f"{path}: expected validation-BATCH.csv with a whole number as BATCH.")
        rows = tables[int(size)] = []
        done = 0.0, 0.0
        for row in _rows(path, columns):
            rows.append(
                (
                    row.number("progress", above=done[0]),
                    row.number("iteration", above=done[1]),
                    row.number("grad_sqr", least=0.0),
                    row.number("grad_var", above=0.0),
                )
            )
            done = rows[-1][:2]
    if not tables or not all(tables.values()):
        raise TraceError(f"{place}: expected validation-*.csv files with at least one epoch each.")
    batches = tuple(sorted(tables))
    epochs = min(map(len, tables.values()))
    stacked = np.array([tables[batch][:epochs] for batch in batches])
    return Runs(place.name, batches, *np.moveaxis(stacked, 2, 0))


@dataclass(frozen=True)
class _Row:
    """One line of a file, with the file's name and the line's number for error messages."""

    path: pathlib.Path
    line: int
    cells: Mapping[str, str]

    def error(self, column: str, expected: str) -> TraceError:
        return TraceError(
            f"{self.path}, line {self.line}, column {column!r}: expected {expected}, "
            f"got {self.cells[column]!r}."
        )

    def text(self, column: str) -> str:
        if not self.cells[column]:
            raise self.error(column, "a name")
        return self.cells[column]

    def number(
        self,
        column: str,
        *,
        least: float = -_LARGEST,
        above: float = -math.inf,
        most: float = _LARGEST,
    ) -> float:
        bound = f" of at least {least:g}" if above == -math.inf else f" above {above:g}"
        value = self._parsed(column)
        if not (least <= value <= most and value > above):
            raise self.error(column, f"a number{bound} and at most {most:g}")
        return value

    def integer(self, column: str) -> int:
        value = self._parsed(column)
        if not (1 <= value <= _LARGEST_S and value.is_integer()):
            raise self.error(column, f"a whole number of at least 1 and at most {_LARGEST_S:g}")
        return int(value)

    def _parsed(self, column: str) -> float:
        try:
            return float(self.cells[column])
        except ValueError:
            return math.nan  # within no bounds

    def times(self) -> tuple[float, float, float]:
        """Return the line's (batch per device, seconds of a step, seconds of its synchronisation)."""
        size, step = (
            self.integer("local_bsz"),
            self.number("step_time", least=1e-9, most=_LARGEST_S),
        )
        sync = self.number("sync_time", least=0.0)
        if sync >= step:
            raise self.error("sync_time", f"less than the step_time of {step:g} that it is part of")
        return float(size), step, sync


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # spreadsheets put a byte order mark first
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _rows(path: pathlib.Path, columns: Sequence[str]) -> Iterator[_Row]:
    """Yield the lines below the header, which must name at least `columns`."""
    reader = csv.reader(_text(path).splitlines())
    try:
        yield from _checked_rows(path, reader, columns)
    except csv.Error as error:  # such as a cell of more than 128 KiB
        raise TraceError(
            f"{path}, line {reader.line_num}: this is no line of a CSV file: {error}."
        ) from error


def _checked_rows(path: pathlib.Path, reader: Any, columns: Sequence[str]) -> Iterator[_Row]:
    header = next(reader, [])
    missing = [name for name in columns if name not in header]
    if missing:
        raise TraceError(
            f"{path}, line 1: expected a header with the columns {', '.join(columns)}, "
            f"but {', '.join(missing)} are missing in {header}."
        )
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise TraceError(
                f"{path}, line {reader.line_num}: {len(cells)} columns, expected {len(header)} "
                f"({', '.join(header)})."
            )
        yield _Row(path, reader.line_num, dict(zip(header, map(str.strip, cells), strict=True)))
