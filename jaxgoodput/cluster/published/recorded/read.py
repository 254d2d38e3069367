"""Reads a trace into jobs, and counts by reason the rows that are no use.

A row without devices, start or duration, or in another state than those asked for, cannot be simulated. It is
left out and counted, as such rows are part of every log. A cell that is no time or number at all is an
error: most likely the wrong column was named.
"""

import math
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jaxgoodput.cluster.published.recorded.layout import FIELDS, Cells, TraceLayout
from jaxgoodput.cluster.published.recorded.philly import philly_rows
from jaxgoodput.cluster.published.recorded.text_file import MISFIT, table_rows
from jaxgoodput.cluster.published.recorded.times import duration_s, is_missing, time_s
from jaxgoodput.cluster.published.traces import TraceError, TraceJob

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RecordedTrace:
    """The jobs of a trace that only says when they came, on how many devices and for how long they ran."""

    jobs: tuple[TraceJob, ...]
    """In order of submission; the first is submitted at 0 s."""
    unusable: Mapping[str, int]
    """Number of rows that were left out, by reason."""
    num_rounded: int = 0
    """Jobs that had a part of a device and count with the whole."""

    def without(self, reason: Callable[[TraceJob], str | None]) -> "RecordedTrace":
        """Return the trace without the jobs for which there is a reason, which is counted."""
        unusable, kept = Counter(self.unusable), []
        for job in self.jobs:
            why = reason(job)
            if why is None:
                kept.append(job)
            else:
                unusable[why] += 1
        return replace(self, jobs=tuple(kept), unusable=dict(unusable))

    def in_words(self) -> str:
        """Return how many rows were used, how many not, and why."""
        total = len(self.jobs) + sum(self.unusable.values())
        said = f"jobs that can be simulated: {len(self.jobs):,} of {total:,} rows"
        if self.unusable:
            parts = (f"{count:,} {why}" for why, count in sorted(self.unusable.items()))
            said += f"; left out: {', '.join(parts)}"
        if self.num_rounded:
            said += f"; with a part of a device, and simulated with all of it: {self.num_rounded:,}"
        return said


def read_recorded(path: str | pathlib.Path, layout: TraceLayout) -> RecordedTrace:
    """Read a trace. Raises TraceError, naming the line and the column, for what cannot be read.

    Use `PRESETS` for public traces, and `columns_layout` for others. The file may be compressed by gzip.
    """
    path = pathlib.Path(path)
    rows = philly_rows(path) if layout.file == "philly" else table_rows(path, layout)
    unusable: Counter[str] = Counter()
    jobs: list[TraceJob] = []
    num_rounded = 0
    for place, cells in rows:
        try:
            job, is_rounded = (MISFIT, False) if cells is None else _job(cells, layout)
        except ValueError as error:
            raise TraceError(f"{place}: {error}") from error
        if isinstance(job, str):
            unusable[job] += 1
        else:
            num_rounded += is_rounded
            jobs.append(job)
    if not jobs:
        counts = ", ".join(f"{count:,} {why}" for why, count in sorted(unusable.items()))
        raise TraceError(
            f"{path}: no row is a job that can be simulated: {counts or 'there are no rows'}. Name other "
            "columns or states."
        )
    return recorded(jobs, unusable, num_rounded)


def recorded(
    jobs: Iterable[TraceJob], unusable: Mapping[str, int], num_rounded: int = 0
) -> RecordedTrace:
    """Return jobs as a trace: sorted, the first at 0 s, and with different names."""
    found = sorted(jobs, key=lambda job: job.submit_s)
    zero_s = found[0].submit_s if found else 0.0
    return RecordedTrace(
        jobs=tuple(
            replace(
                job,
                id=id_,
                submit_s=job.submit_s - zero_s,
                deadline_s=None if job.deadline_s is None else job.deadline_s - zero_s,
            )
            for job, id_ in zip(found, _different([job.id for job in found]), strict=True)
        ),
        unusable=dict(unusable),
        num_rounded=num_rounded,
    )


def _job(cells: Cells, layout: TraceLayout) -> tuple[TraceJob | str, bool]:
    """Return the job of a row, or the reason that it is none; and whether its devices were rounded up."""
    columns = layout.columns
    texts = {role: cells[name] for role, name in columns.items() if not is_missing(cells[name])}
    if (why := layout.left_out(cells) or _unfit(texts, layout)) is not None:
        return why, False
    devices = layout.devices(cells)
    if not devices:
        return "without devices", False
    ran_s = _ran_s(texts, columns)
    if not ran_s or ran_s < 0:
        return ("ends before it starts" if ran_s else "without a duration"), False
    submit = "submit" if "submit" in columns else "start"
    kinds = () if layout.kinds is None else layout.kinds(cells)
    count = math.ceil(devices)
    job = TraceJob(
        id=texts.get("id", ""),
        submit_s=_read(time_s, texts[submit], columns[submit]),
        application=texts.get("application", "job"),
        num_devices=count,
        duration_s=ran_s,
        tenant=texts.get("tenant", texts.get("user", "default")),
        kinds=kinds or None,
        cpus_per_device=layout.cpus(cells) / count,
        memory_gib_per_device=layout.memory_gib(cells) / count,
        **_terms(texts, columns),
    )
    return job, devices != count


def _terms(texts: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a job that its row gives as they are, by name."""
    found: dict[str, Any] = {
        FIELDS[role]: _read(_PARSERS[role], text, columns[role])
        for role, text in texts.items()
        if role in FIELDS
    }
    if "prefer" in texts:
        found["preferred_kinds"] = tuple(k.strip() for k in texts["prefer"].split("|") if k.strip())
    return found


def _whole(text: str) -> int:
    number = float(text)
    if not (number.is_integer() and 1 <= number <= 1e6):
        raise ValueError(f"{text[:40]!r} is no number of devices, from 1 to a million")
    return int(number)


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1e30:
        raise ValueError(f"{text[:40]!r} is no number above 0")
    return number


def _yes_or_no(text: str) -> bool:
    said = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text.lower() not in said:
        raise ValueError(f"{text[:40]!r} is neither yes nor no")
    return said[text.lower()]


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "preference": _above_zero,
    "min": _whole,
    "max": _whole,
    "weight": _above_zero,
    "level": str,
    "min_run": duration_s,
    "preemptible": _yes_or_no,
    "deadline": time_s,
    "budget": _above_zero,
}


def _unfit(texts: Mapping[str, str], layout: TraceLayout) -> str | None:
    """Return why a job is not used: it ended in another state, or was not submitted or started."""
    state = texts.get("state", "")
    if layout.states and not _is_in(state, layout.states):
        return f"in state {_state(state) or '(none)'}"
    # A job that never started may have no devices and no duration either, and the start says more.
    for role, what in (("submit", "submission"), ("start", "start")):
        if role in layout.columns and role not in texts:
            return f"without a {what}"
    return None


def _ran_s(texts: Mapping[str, str], columns: Mapping[str, str]) -> float | None:
    """Return for how long a job ran; None if that is not known."""
    if "duration" in columns:
        text = texts.get("duration")
        return None if text is None else _read(duration_s, text, columns["duration"])
    if "start" not in texts or "end" not in texts:
        return None
    start_s, end_s = (_read(time_s, texts[role], columns[role]) for role in ("start", "end"))
    return end_s - start_s


def _read(parse: Callable[[str], T], text: str, column: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from error


def _state(text: str) -> str:
    """Return the first word of a state, as in Slurm's "CANCELLED by 1000" and "CANCELLED+"."""
    return (text.split() or [""])[0].rstrip("+")


def _is_in(text: str, states: Sequence[str]) -> bool:
    return text in states or _state(text) in states


def _different(names: Sequence[str]) -> list[str]:
    """Return names that are all different: a number for those without one, and #2 and so on for others."""
    found: list[str] = []
    used: set[str] = set()
    counts: Counter[str] = Counter()
    for index, name in enumerate(names):
        name = name or f"job-{index:06d}"
        chosen = name
        while chosen in used:
            counts[name] += 1
            chosen = f"{name}#{counts[name] + 1}"
        used.add(chosen)
        found.append(chosen)
    return found
