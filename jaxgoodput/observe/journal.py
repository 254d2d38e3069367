"""The run's own story as lines of JSON: `workdir/goodput.jsonl`, appended to, never rewritten.

One object a line: `event` (the name of a class of `events.py`), `wall` (Unix seconds), `restart`,
and the event's fields. After a crash the reader leaves out what the restart has undone, so that
nothing counts twice.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import logging

from jaxgoodput._serial import encode
from jaxgoodput.clock import Clock
from jaxgoodput.observe.badput import SavedLedger, TimeLedger
from jaxgoodput.observe.events import Event, FitStart

FILE_NAME = "goodput.jsonl"


class Journal:
    """Appends records to `workdir/goodput.jsonl`; every line leaves the process at once.

    A disk that refuses a line costs that line and a warning, not the run.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, clock: Clock):
        path = pathlib.Path(workdir) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._restart = 0
        self._num_lost = 0
        # Unbuffered: after a refused write nothing lingers that would be written later,
        # out of order.
        self._file = open(path, "ab+", buffering=0)
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
        data = json.dumps(line, allow_nan=False).encode("ascii") + b"\n"
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

    def close(self) -> None:
        """Close the file; `write` may not be called afterwards."""
        self._file.close()

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


def _warn_torn(line_number: int, text: str) -> None:
    logging.warning(
        "line %d of the journal is unfinished (a run was killed while writing it) and was left "
        "out: %.60s",
        line_number,
        text,
    )


def read(
    path: str | os.PathLike[str],
    *,
    keep_undone: bool = False,
    on_torn: Callable[[int, str], None] = _warn_torn,
) -> list[dict[str, Any]]:
    """The records of a journal in order, each as the dictionary that was written.

    A run that resumed at step s undid what earlier runs did beyond s: those records are left out,
    or, with `keep_undone`, kept with `"undone": True`. Unfinished lines are passed to
    `on_torn(line_number, text)`, by default a logged warning, and left out.

    Raises:
      FileNotFoundError: there is no such file.
    """
    records: list[dict[str, Any]] = []
    lines = pathlib.Path(path).read_bytes().split(b"\n")
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        text = raw.decode("ascii", errors="replace")
        try:
            record = json.loads(text)
        except ValueError:
            on_torn(number, text)
            continue
        if not isinstance(record, dict) or "event" not in record:
            on_torn(number, text)
            continue
        if record["event"] == FitStart.__name__:
            for earlier in records:
                if earlier.get("step", 0) > record["step"]:
                    earlier["undone"] = True
        records.append(record)
    if keep_undone:
        return records
    return [record for record in records if not record.get("undone")]


def _ends_mid_line(file: Any) -> bool:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return False
    file.seek(size - 1)
    last = file.read(1)
    file.seek(0, os.SEEK_END)
    return last != b"\n"


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
    """The runs in this workdir so far, or those before restart number `before`."""
    path = pathlib.Path(workdir) / FILE_NAME
    records = read(path, keep_undone=True) if path.exists() else []
    records = [r for r in records if before is None or r["restart"] < before]
    starts = [r["wall"] for r in records if r["event"] == FitStart.__name__]
    if not starts:
        return EarlierRuns(0, None, None)
    return EarlierRuns(len(starts), max(r["wall"] for r in records), starts[-1])


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
