"""The run's own story as lines of JSON: `workdir/goodput.jsonl`, only ever appended to.

One object a line: `event` (the name of a class of `events.py`), `wall` (Unix seconds), `restart`,
and the event's fields. After a crash the reader leaves out what the restart has undone, so that
nothing counts twice. Lines that are none of these are passed over.

A file that has grown to `SEGMENT_BYTES` is set aside as `goodput.1.jsonl`, the next as `goodput.2.jsonl`,
and so on. The newest `NUM_WHOLE` of them stay as they are; in older ones neighbouring windows of one
batch become one, and verdicts that changed nothing a count, so that a month takes megabytes and its
totals are what they were.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from absl import logging

from jaxgoodput._serial import encode, parse
from jaxgoodput.clock import Clock
from jaxgoodput.observe.badput import SavedLedger, TimeLedger
from jaxgoodput.observe.events import EvalEnd, Event, FitStart, TuneEnd, Window

FILE_NAME = "goodput.jsonl"
SEGMENT_BYTES = 32 * 2**20
NUM_WHOLE = 4
MOST_MERGED = 100  # windows that become one

_BLOCK_BYTES = 2**20  # read at once, and the longest line that can be one of ours
_LARGEST = 1e100  # beyond it a number is damage, and sums of it overflow
_START = f'"{FitStart.__name__}"'.encode()


class Journal:
    """Appends records to `workdir/goodput.jsonl`; every line leaves the process at once.

    A disk that refuses a line costs that line and a warning, not the run.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, clock: Clock):
        self._path = pathlib.Path(workdir) / FILE_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._restart = 0
        self._num_lost = 0
        self._set_aside_at = SEGMENT_BYTES
        self._file = self._open()
        self._torn = _ends_mid_line(self._file)

    def write(self, event: Event) -> None:
        """Append one event, less the fields that it keeps out of the journal."""
        if isinstance(event, FitStart):
            self._restart = event.restart
        name = type(event).__name__
        line: dict[str, Any] = {
            "event": name,
            "wall": self._clock.wall(),
            "restart": self._restart,
        }
        for field in dataclasses.fields(event):
            if field.metadata.get("journaled", True):
                line[field.name] = encode(getattr(event, field.name))
        data = _line(line)
        if self._torn:
            # A line that a killed run or a full disk left unfinished must not swallow this one.
            data = b"\n" + data
        try:
            written = self._file.write(data)
        except OSError as error:
            self._lost(name, str(error))
            return
        self._torn = written != len(data)
        if self._torn:
            self._lost(name, f"only {written} of {len(data)} bytes were taken")
        elif self._file.tell() >= self._set_aside_at:
            self._set_aside()

    def close(self) -> None:
        """Close the file; `write` may not be called afterwards."""
        self._file.close()

    def _open(self) -> Any:
        # Unbuffered: after a refused write nothing lingers that would be written later,
        # out of order.
        return open(self._path, "ab+", buffering=0)

    def _set_aside(self) -> None:
        """Begin a new file; the one that is no longer among the newest becomes short."""
        older = _older(self._path)
        number = max(older, default=0) + 1
        try:
            self._path.rename(
                self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")
            )
            file = self._open()
            self._file.close()
            self._file, self._set_aside_at = file, SEGMENT_BYTES
            if (long := number - NUM_WHOLE) in older:
                _shorten(older[long])
        # A full disk, or lines that nobody wrote like that: it grows on, or one stays long.
        except (OSError, RecursionError) as error:
            self._set_aside_at = self._file.tell() + SEGMENT_BYTES
            logging.warning("the journal %s could not be divided: %s", self._path, error)

    def _lost(self, name: str, why: str) -> None:
        self._num_lost += 1
        if self._num_lost == 1 or self._num_lost % 100 == 0:
            logging.warning(
                "%s could not take a %s record (%s); %d lost so far. Training goes on. "
                "Free some space on that disk to have the rest recorded.",
                self._file.name,
                name,
                why,
                self._num_lost,
            )


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def segments(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The files of a journal, oldest first; none where there is no journal."""
    path = pathlib.Path(path)
    return [*_older(path).values(), *([path] if path.is_file() else [])]


def _older(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """What was set aside of a journal, by number, oldest first."""
    found = {}
    for other in path.parent.glob(f"{path.stem}.*{path.suffix}"):
        number = other.name.removeprefix(f"{path.stem}.").removesuffix(path.suffix)
        if number.isascii() and number.isdigit() and len(number) < 10:
            found[int(number)] = other
    return dict(sorted(found.items()))


def _shorten(path: pathlib.Path) -> None:
    """Rewrite a segment with windows merged and verdicts counted; what cannot be read is left out."""
    brief = path.with_suffix(".tmp")
    try:
        with brief.open("wb") as file:
            file.writelines(map(_line, _merged(filter(None, map(_record, _lines(path))))))
        brief.replace(path)
    finally:
        brief.unlink(missing_ok=True)


def _merged(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records with neighbouring windows of one batch as one, whatever verdicts lie between.

    Across evaluations, but not across a checkpoint: a run that resumes there undoes whole ones.
    """
    window: dict[str, Any] | None = None
    verdict: dict[str, Any] | None = None
    for record in records:
        if record["event"] == Window.__name__:
            if window is not None and _can_merge(window, record):
                window = _merged_windows(window, record)
                continue
            yield from filter(None, (window, verdict))
            window, verdict = record, None
        elif record["event"] == TuneEnd.__name__ and not record.get("switched"):
            told = 0 if verdict is None else num_merged(verdict)
            verdict = {**record, "num_merged": told + num_merged(record)}
        else:
            if record["event"] != EvalEnd.__name__:
                yield from filter(None, (window, verdict))
                window = verdict = None
            yield record
    yield from filter(None, (window, verdict))


def num_merged(record: dict[str, Any]) -> int:
    """How many events a record stands for."""
    return record.get("num_merged", 1)


_SUMMED = ("num_steps", "seconds")
_AVERAGED = ("measured_step_s", "predicted_step_s", "throughput", "efficiency") + (
    "goodput_measured",
    "goodput_predicted",
    "noise_scale",
    "gain",
)


def _can_merge(a: dict[str, Any], b: dict[str, Any]) -> bool:
    whole = all(_is_number(window.get(name)) for window in (a, b) for name in _SUMMED)
    same = a["restart"] == b["restart"] and a.get("config") == b.get("config")
    # A mean of what is known would be one over other steps than the mean beside it.
    known = all(_is_number(a.get(name)) == _is_number(b.get(name)) for name in _AVERAGED)
    return whole and same and known and num_merged(a) < MOST_MERGED


def _merged_windows(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Sums and means by steps over both; of all else the newest that is known."""

    def mean(x: Any, y: Any) -> Any:
        known = [(v, w["num_steps"]) for v, w in ((x, a), (y, b)) if _is_number(v)]
        total = sum(steps for _, steps in known)
        return sum(v * steps for v, steps in known) / total if total else None

    merged = {**a, **{name: value for name, value in b.items() if value is not None}}
    merged |= {name: a[name] + b[name] for name in _SUMMED}
    merged |= {name: mean(a.get(name), b.get(name)) for name in _AVERAGED if name in merged}
    x, y = a.get("metrics"), b.get("metrics")
    if isinstance(x, dict) and isinstance(y, dict):
        merged["metrics"] = {name: mean(x.get(name), y.get(name)) for name in x | y}
    return {**merged, "num_merged": num_merged(a) + num_merged(b)}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _record(raw: bytes) -> dict[str, Any] | None:
    """What a line holds; None where that is no record."""
    try:
        record = parse(raw, largest=_LARGEST)
    except ValueError:
        return None
    is_one = (
        isinstance(record, dict)
        and isinstance(record.get("event"), str)
        and _is_number(record.get("wall"))
        and all(type(record.get(name)) is int for name in ("restart", "step"))
        and type(record.get("num_merged", 1)) is int
    )
    return record if is_one else None


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    """The lines of a file; of one that is too long to be ours the beginning."""
    with path.open("rb") as file:
        while raw := file.readline(_BLOCK_BYTES):
            yield raw
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(_BLOCK_BYTES)


def _lines_backwards(path: pathlib.Path, holding: bytes = b"") -> Iterator[bytes]:
    """The lines of a file that hold some text, the last one first, read as far as they are asked for."""
    with path.open("rb") as file:
        end, tail = file.seek(0, os.SEEK_END), b""
        while end > 0:
            start = max(end - _BLOCK_BYTES, 0)
            file.seek(start)
            first, cut, whole = (file.read(end - start) + tail).partition(b"\n")
            if cut and holding in whole:  # most blocks are passed over in one look
                yield from (line for line in reversed(whole.split(b"\n")) if holding in line)
            end, tail = start, first[:_BLOCK_BYTES]
        yield tail


def _warn_torn(where: str, text: str) -> None:
    logging.warning(
        "%s of the journal cannot be read (a run was killed while writing it, or the disk was full) and "
        "was left out: %.60s",
        where,
        text,
    )


def read(
    path: str | os.PathLike[str],
    *,
    keep_undone: bool = False,
    on_torn: Callable[[str, str], None] = _warn_torn,
) -> list[dict[str, Any]]:
    """The records of a journal in order, what was set aside of it first, as the dictionaries written.

    A run that resumed at step s undid what earlier runs did beyond s: those records are left out,
    or, with `keep_undone`, kept with `"undone": True`. Lines that hold no record are passed to
    `on_torn("goodput.jsonl:LINE", text)`, by default a logged warning, and left out.

    Raises:
      FileNotFoundError: there is no journal.
    """
    records = [record for _, record in lines(path, on_torn)]
    for record, gone in zip(records, undone(records), strict=True):
        if gone:
            record["undone"] = True
    if keep_undone:
        return records
    return [record for record in records if not record.get("undone")]


def lines(
    path: str | os.PathLike[str], on_torn: Callable[[str, str], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a journal with where they are, one by one, as `read` reads them."""
    for segment in segments(path) or [pathlib.Path(path)]:
        for number, raw in enumerate(_lines(segment), start=1):
            record, where = _record(raw), f"{segment.name}:{number}"
            if record is not None:
                yield where, record
            elif raw.strip():
                on_torn(where, raw[:200].decode("ascii", errors="replace"))


def undone(records: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which of the records a later run undid, by resuming before their step."""
    lowest, found = math.inf, []
    for record in reversed(records):
        found.append(record["step"] > lowest)
        if record["event"] == FitStart.__name__:
            lowest = min(lowest, record["step"])
    return found[::-1]


def _ends_mid_line(file: Any) -> bool:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return False
    file.seek(size - 1)
    last = file.read(1)
    file.seek(0, os.SEEK_END)
    return last != b"\n"


@dataclass(frozen=True, kw_only=True)
class RecordFields:
    """What a reader needs of an object of the journal, of this version and older ones."""

    is_part: ClassVar[bool] = True


class Recorder:
    """The journal as a hook: it writes every event that does not say otherwise."""

    def __init__(self, record: Journal):
        self._record = record

    def on_record(self, event: Event) -> None:
        """Write the event, whatever its kind."""
        self._record.write(event)


class EarlierRuns(NamedTuple):
    """What a journal tells of the runs before; times in Unix seconds, None where there was no run."""

    num_runs: int
    last_seen: float | None
    """When the last record was written."""
    latest_start: float | None


def earlier_runs(workdir: str | os.PathLike[str], *, before: int | None = None) -> EarlierRuns:
    """The runs in this workdir so far, or those before restart number `before`.

    Read from the end of the journal, as far as the start of the latest of them.
    """
    files = segments(pathlib.Path(workdir) / FILE_NAME)[::-1]

    def latest(holding: bytes = b"") -> Iterator[dict[str, Any]]:
        for raw in itertools.chain.from_iterable(_lines_backwards(f, holding) for f in files):
            record = _record(raw)
            if record is not None and (before is None or record["restart"] < before):
                yield record

    start = next((r for r in latest(_START) if r["event"] == FitStart.__name__), None)
    if start is None:
        return EarlierRuns(0, None, None)
    newest = next(latest())
    return EarlierRuns(max(newest["restart"], start["restart"]) + 1, newest["wall"], start["wall"])


def resume(workdir: str | os.PathLike[str], ledger: TimeLedger, saved: SavedLedger | None) -> int:
    """Let `ledger` go on from those of the runs before in this workdir; how many there were.

    `saved` is the ledger of the checkpoint, None where there is none: then all the time of the
    latest run was lost with it. Buckets of `ledger` may be open meanwhile.
    """
    runs = earlier_runs(workdir)
    if runs.latest_start is not None:
        nothing = SavedLedger(saved_at=runs.latest_start)
        ledger.continue_from(nothing if saved is None else saved, runs.last_seen)
    return runs.num_runs
