"""The journal of a run: `workdir/goodput.jsonl`, one JSON object per line, only ever appended to.

A line holds `event` (the name of a class of `events.py`), `wall` (Unix seconds), `restart` (0 for the first
run in this workdir), the fields of the event, a number and a checksum (`checked_lines.py`). `Journal` writes
events, `read` returns them. A run that resumes from a checkpoint undoes what was done after it; readers leave
out what was undone, so that nothing counts twice. Damaged lines are left out and named.

A file that has grown to `SEGMENT_BYTES` is renamed to `goodput.1.jsonl`, the next to `goodput.2.jsonl`, and
so on. The newest `NUM_WHOLE` of these segments stay as they are, and so do damaged ones. In the others,
neighbouring windows with the same batch are merged into one, and verdicts that changed nothing are only
counted. A month of training then takes megabytes, and its totals stay the same.
"""

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from absl import logging

from jaxgoodput._fields.serial import decode, encode, parse
from jaxgoodput.clock import Clock
from jaxgoodput.observe import events
from jaxgoodput.observe.badput import SavedLedger, TimeLedger
from jaxgoodput.observe.checked_lines import (
    REPEATED,
    LineOrder,
    checked,
    first_of,
    is_whole,
    number_of,
    renumbered,
)
from jaxgoodput.observe.events import EvalEnd, Event, FitStart, TuneEnd, Window

FILE_NAME = "goodput.jsonl"
FILES = r"goodput(\.\d+)?\.jsonl"  # its segments
SEGMENT_BYTES = 32 * 2**20
NUM_WHOLE = 4
MOST_MERGED = 100  # windows that are merged into one

_BLOCK_BYTES = 2**20  # read at once; a longer line is damaged
_LARGEST = 1e100  # a larger number is damaged, and sums of such numbers overflow
_START = f'"{FitStart.__name__}"'.encode()
_KINDS = {
    kind.__name__: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind.journaled
}

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Record(Generic[E]):
    """One line of a journal: an event, when it was written and by which run."""

    event: E
    """Plain `Event` if this package has no class of that name: a user's own kind of event."""
    wall: float
    """Unix seconds."""
    restart: int
    """Number of the run; 0 for the first one in this workdir."""
    num_merged: int = 1
    """Number of events that this one stands for."""
    undone: bool = False
    """Whether a later run resumed from before this event."""


def of_kind(records: Iterable[Record], kind: type[E]) -> list[E]:
    """Return the events of one kind, in order."""
    return [record.event for record in records if isinstance(record.event, kind)]


class Journal:
    """Appends events to `workdir/goodput.jsonl`; as a hook it writes every event whose class is `journaled`.

    Every line is handed to the operating system at once, so that a killed run loses nothing. If the disk
    refuses a line, that line is lost and a warning is logged; the run continues.
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
        numbers = map(number_of, _newest_first(segments(self._path)))
        self._num_lines = next(filter(None, numbers), 0)

    def write(self, event: Event) -> None:
        """Append one event, without the fields that are marked `NOT_JOURNALED`."""
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
        self._num_lines += 1  # a line that is lost counts, so that readers miss it
        data = checked(line, self._num_lines)
        if self._torn:
            # A killed run or a full disk left an unfinished line: begin a new one.
            data = b"\n" + data
        try:
            written = self._file.write(data)
        except OSError as error:
            self._lost(name, str(error))
            return
        self._torn = written != len(data)
        if self._torn:
            self._lost(name, f"only {written} of {len(data)} bytes were written")
        elif self._file.tell() >= self._set_aside_at:
            self._set_aside()

    on_record = write  # the method of a hook

    def close(self) -> None:
        """Close the file. `write` must not be called afterwards."""
        self._file.close()

    def _open(self) -> Any:
        # Unbuffered: data that the disk refused must not be written later, out of order.
        return open(self._path, "ab+", buffering=0)

    def _set_aside(self) -> None:
        """Finish this segment, begin a new one, and shorten the one that is no longer among the newest."""
        older = _older(self._path)
        number = max(older, default=0) + 1
        try:
            self._path.rename(
                self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")
            )
            file = self._open()
            # From here on the new segment is in use, even if shortening an old one fails.
            self._file.close()
            self._file, self._set_aside_at = file, SEGMENT_BYTES
            if (long := number - NUM_WHOLE) in older:
                _shorten(older[long])
        # The disk is full, or a damaged line is nested too deeply: the segment keeps growing.
        except (OSError, RecursionError) as error:
            self._set_aside_at = self._file.tell() + SEGMENT_BYTES
            logging.warning(
                "the journal %s has become long, and no new file could be begun: %s. Training goes on, and "
                "events are appended to the long one. Free some space on that disk.",
                self._path,
                error,
            )

    def _lost(self, name: str, why: str) -> None:
        self._num_lost += 1
        if self._num_lost == 1 or self._num_lost % 100 == 0:
            logging.warning(
                "a %s event could not be written to %s (%s); %d events lost so far. Training goes on. "
                "Free some space on that disk so that later events are recorded.",
                name,
                self._file.name,
                why,
                self._num_lost,
            )


def segments(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Return the files of a journal, oldest first; [] if there is no journal."""
    path = pathlib.Path(path)
    return [*_older(path).values(), *([path] if path.is_file() else [])]


def _older(path: pathlib.Path) -> dict[int, pathlib.Path]:
    """Return the finished segments of a journal by their number, oldest first."""
    found = {}
    for other in path.parent.glob(f"{path.stem}.*{path.suffix}"):
        number = other.name.removeprefix(f"{path.stem}.").removesuffix(path.suffix)
        if number.isascii() and number.isdigit() and len(number) < 10:
            found[int(number)] = other
    return dict(sorted(found.items()))


def _shorten(path: pathlib.Path) -> None:
    """Rewrite a segment with windows merged and verdicts counted, unless it is damaged or older."""
    records: list[dict[str, Any]] = []
    last = None
    for raw in filter(bytes.strip, _lines(path)):
        record = _parsed(raw)
        number = None if record is None else number_of(record)
        if record is None or number is None or not (last is None or first_of(record) == last + 1):
            return  # so that readers can still say what is wrong with it
        records.append(record)
        last = number
    first = first_of(records[0]) if records else None
    if first is None or last is None:
        return
    brief = path.with_suffix(".tmp")
    try:
        with brief.open("wb") as file:
            file.writelines(renumbered(_merged(records), first, last))
        brief.replace(path)
    finally:
        brief.unlink(missing_ok=True)


def _merged(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merge neighbouring windows with the same batch, and unchanging verdicts between them.

    Evaluations do not separate windows, but checkpoints do: a run that resumes from a checkpoint must undo
    whole windows.
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
            so_far = 0 if verdict is None else _num_merged(verdict)
            verdict = {**record, "num_merged": so_far + _num_merged(record)}
        else:
            if record["event"] != EvalEnd.__name__:
                yield from filter(None, (window, verdict))
                window = verdict = None
            yield record
    yield from filter(None, (window, verdict))


def _num_merged(record: dict[str, Any]) -> int:
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
    # A value known in only one of the two would be averaged over other steps than the rest.
    known = all(_is_number(a.get(name)) == _is_number(b.get(name)) for name in _AVERAGED)
    return whole and same and known and _num_merged(a) < MOST_MERGED


def _merged_windows(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Add up sums, average means by steps, and take the newest known value of everything else."""

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
    return {**merged, "num_merged": _num_merged(a) + _num_merged(b)}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if it is damaged, or lacks an event, time, restart or step."""
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
        and is_whole(raw, record)
    )
    return record if is_one else None


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    """Yield the lines of a file; of a line that is too long, only the beginning."""
    with path.open("rb") as file:
        while raw := file.readline(_BLOCK_BYTES):
            yield raw
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(_BLOCK_BYTES)


def _lines_backwards(path: pathlib.Path, holding: bytes = b"") -> Iterator[bytes]:
    """Yield the lines that contain `holding`, last line first, and in any case the file's first line.

    Only as much of the file is read as the caller asks for.
    """
    with path.open("rb") as file:
        end, tail = file.seek(0, os.SEEK_END), b""
        while end > 0:
            start = max(end - _BLOCK_BYTES, 0)
            file.seek(start)
            first, cut, whole = (file.read(end - start) + tail).partition(b"\n")
            if cut and holding in whole:  # skips most blocks without splitting them
                yield from (line for line in reversed(whole.split(b"\n")) if holding in line)
            end, tail = start, first[:_BLOCK_BYTES]
        yield tail


def _newest_first(files: Iterable[pathlib.Path], holding: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the records of files, newest line first; only those whose line contains `holding`."""
    for raw in itertools.chain.from_iterable(
        _lines_backwards(file, holding) for file in list(files)[::-1]
    ):
        if (record := _parsed(raw)) is not None:
            yield record


def _warn_damage(where: str, what: str) -> None:
    logging.warning(
        "the journal is damaged at %s: %s. A run was killed while writing, the disk was full, or the file "
        "was changed. Training does not depend on it; reports count what is left.",
        where,
        what,
    )


def read(
    path: str | os.PathLike[str],
    *,
    keep_undone: bool = False,
    on_damage: Callable[[str, str], None] = _warn_damage,
) -> list[Record]:
    """Return the records of a journal in order, oldest segment first.

    A run that resumed at step s undid what earlier runs did after s. Such records are left out, or, with
    `keep_undone`, marked as `undone`. For each line that was changed, is there twice or not in its place, and
    wherever lines are missing, `on_damage("goodput.jsonl:LINE", what)` is called, which by default logs a
    warning. Lines that are missing at the very end are not noticed.

    Raises:
      FileNotFoundError: there is no journal.
    """
    records: list[Record] = []
    order = LineOrder()
    for segment in segments(path) or [pathlib.Path(path)]:
        for number, raw in enumerate(_lines(segment), start=1):
            record, problem = _record_at(f"{segment.name}:{number}", raw, order)
            if problem is not None:
                on_damage(f"{segment.name}:{number}", problem)
            if record is not None:
                records.append(record)
    _mark_undone(records)
    return [record for record in records if keep_undone or not record.undone]


def _record_at(where: str, raw: bytes, order: LineOrder) -> tuple[Record | None, str | None]:
    """Return the record of a line, None if it does not count, and what is wrong with the line, if any."""
    if not raw.strip():
        return None, None
    fields = _parsed(raw)
    record = None if fields is None else _record(fields, where)
    if fields is None or record is None:
        order.unreadable()
        return None, "the line was changed or cut, and is left out"
    problem = order.problem(fields)
    return (None if problem is REPEATED else record), problem


def _mark_undone(records: list[Record]) -> None:
    """Mark what a later run has undone, by resuming from before its step."""
    lowest = math.inf  # step from which a later run resumed
    for place, record in reversed(list(enumerate(records))):
        if record.event.step > lowest:
            records[place] = dataclasses.replace(record, undone=True)
        if isinstance(record.event, FitStart):
            lowest = min(lowest, record.event.step)


def read_workdir(
    workdir: str | os.PathLike[str],
    *,
    keep_undone: bool = False,
    on_damage: Callable[[str, str], None] = _warn_damage,
) -> list[Record]:
    """Return the records of the run in a workdir, as `read` does.

    Raises:
      FileNotFoundError: there is no such folder, or no run has started there; the message says which.
    """
    folder = pathlib.Path(workdir)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}. Pass the --workdir that the training was started with."
        )
    if not segments(folder / FILE_NAME):
        raise FileNotFoundError(
            f"{folder} holds no {FILE_NAME}, so no jaxgoodput run has started there. Pass the --workdir that "
            "the training was started with."
        )
    return read(folder / FILE_NAME, keep_undone=keep_undone, on_damage=on_damage)


def _record(line: dict[str, Any], where: str) -> Record | None:
    """Return the record that a line of the journal holds; None if it is damaged."""
    fields = dict(line)
    name, wall, restart = fields.pop("event"), fields.pop("wall"), fields["restart"]
    num_merged = fields.pop("num_merged", 1)
    kind = _KINDS.get(name, Event)
    if kind is Event:
        fields = {"step": fields["step"]}
    elif kind is not FitStart:  # the one event that has a field `restart` itself
        del fields["restart"]
    try:
        event = decode(fields, kind, where)
        if isinstance(event, FitStart):
            event.known_settings  # noqa: B018  # raises ValueError if they are damaged
    except ValueError:
        return None
    return Record(event=event, wall=float(wall), restart=restart, num_merged=num_merged)


def _ends_mid_line(file: Any) -> bool:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return False
    file.seek(size - 1)
    last = file.read(1)
    file.seek(0, os.SEEK_END)
    return last != b"\n"


class EarlierRuns(NamedTuple):
    """The earlier runs in a workdir. Times are Unix seconds, None if there was no run."""

    num_runs: int
    last_seen: float | None
    """Time of the last line that any of them wrote."""
    latest_start: float | None
    """Start of the latest run."""


def earlier_runs(workdir: str | os.PathLike[str], *, before: int | None = None) -> EarlierRuns:
    """Return the runs in this workdir so far, or only those before restart number `before`.

    The journal is read from its end, only as far as the start of the latest of these runs.
    """
    files = segments(pathlib.Path(workdir) / FILE_NAME)

    def latest(holding: bytes = b"") -> Iterator[dict[str, Any]]:
        of_all = _newest_first(files, holding)
        return (r for r in of_all if before is None or r["restart"] < before)

    start = next((r for r in latest(_START) if r["event"] == FitStart.__name__), None)
    if start is None:
        return EarlierRuns(0, None, None)
    newest = next(latest())
    return EarlierRuns(max(newest["restart"], start["restart"]) + 1, newest["wall"], start["wall"])


def resume(workdir: str | os.PathLike[str], ledger: TimeLedger, saved: SavedLedger | None) -> int:
    """Continue the time ledger of the earlier runs in this workdir, and return how many there were.

    `saved` is the ledger in the checkpoint. If None, there is no checkpoint, and all time of the latest run
    counts as lost. Buckets of `ledger` may be open.
    """
    runs = earlier_runs(workdir)
    if runs.latest_start is not None:
        nothing = SavedLedger(saved_at=runs.latest_start)
        ledger.continue_from(nothing if saved is None else saved, runs.last_seen)
    return runs.num_runs
