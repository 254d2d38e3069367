"""`jaxgoodput serve --repair`: a journal that the service refuses becomes one with which it starts.

What is kept is the longest sound beginning that can be read. Nothing is destroyed: the damaged files are set
aside, and the report says what the service forgets.
"""

import contextlib
import os
import pathlib
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxgoodput import _disk
from jaxgoodput.cluster.service.record import head as heads
from jaxgoodput.cluster.service.record import table
from jaxgoodput.cluster.service.record.chain import JournalRow, content_sum
from jaxgoodput.cluster.service.record.check import (
    checked,
    checked_rows,
    is_of,
    states,
    told_head,
)
from jaxgoodput.cluster.service.record.events import JobSubmitted, from_text
from jaxgoodput.cluster.service.record.install import NEXT, finish, install
from jaxgoodput.cluster.service.record.salvage import write_images
from jaxgoodput.cluster.service.record.state import State
from jaxgoodput.cluster.service.record.table import FILE, LOG, CorruptJournalError

ASIDE = "journal.damaged"
MOST_NAMED = 20  # jobs that a report names; the others are counted
_SCRATCH = "journal.scratch"
_LATER = "select seq, at, wall, kind, body, sum from events where seq > ? order by seq"


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """What a repair of the journal has kept, and what the service forgets."""

    kept: int
    """The number of events that were kept."""
    position: int | None
    """The position of the first event that was not kept; None if all that there are were kept."""
    why: str | None
    """What was wrong, as a clause; None if nothing was."""
    lost: range | None
    """Positions of acknowledged events after the last that was kept; None if it cannot be told which."""
    forgotten: tuple[str, ...]
    """Jobs whose submission was not kept, as far as it can be read. There may be more."""
    aside: pathlib.Path | None
    """The folder with the damaged files; None if nothing was changed."""

    def text(self) -> str:
        """Return what to tell the operator, a line for each fact."""
        if self.aside is None:
            return f"all {self.kept} events of the journal can be read: nothing was changed"
        what = f"the {self.kept} events before position {self.position} are kept"
        if self.position is None:
            what = f"all {self.kept} events that can be found are kept"
        lines = [f"{what}; the damaged files are in {self.aside}"]
        if self.why is not None:
            lines.append(f"what was wrong: {self.why}")
        if self.lost is None:
            lines.append("whether acknowledged events are lost cannot be told")
        elif self.lost:
            places = f"positions {self.lost[0]} to {self.lost[-1]}"
            lines.append(f"{len(self.lost)} acknowledged events are lost, {places}")
        else:
            lines.append("no acknowledged event is lost")
        if self.forgotten:
            more = len(self.forgotten) - MOST_NAMED
            names = ", ".join(self.forgotten[:MOST_NAMED]) + (
                f" and {more} more" if more > 0 else ""
            )
            lines.append(f"jobs that the service forgets: {names}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Reading:
    """What one way of reading a damaged journal finds."""

    kept: list[JournalRow]
    """A sound beginning."""
    error: CorruptJournalError | None
    """What ends it; None if it is all that was acknowledged."""
    later: Mapping[int, str]
    """Jobs that were submitted after it, by position, as far as these rows can be read."""

    @property
    def last(self) -> int:
        """The position of the last event that is kept."""
        return self.kept[-1].seq if self.kept else 0


def repair(folder: pathlib.Path) -> RepairReport:
    """Keep the longest sound beginning of the journal in a folder, and set the damaged files aside.

    A kill at any moment leaves either the old journal or the new one. Raises FileNotFoundError if there is
    no journal, ValueError if another program wrote it, and InUse if a service uses the folder.
    """
    path = folder / FILE
    if not any((folder / name).exists() for name in (FILE, LOG, heads.FILE, NEXT)):
        raise FileNotFoundError(f"there is no journal {path}: nothing can be repaired.")
    with _disk.held(folder):
        try:
            finish(folder)
        except CorruptJournalError:  # the files that it was to replace may still be there
            os.replace(folder / NEXT, _new_folder(folder) / NEXT)
        return _repair(folder, path)


def _repair(folder: pathlib.Path, path: pathlib.Path) -> RepairReport:
    first = _read_in_place(folder, path)
    if first.error is None:
        return _report(folder, first, {}, None, None)
    readings = [first]
    if first.error.position is not None:
        readings += _read_images(folder, path)
    best = max(readings, key=lambda reading: reading.last)
    later = {seq: job for reading in readings for seq, job in reading.later.items()}
    report = _report(folder, best, later, _set_aside(folder), first.error.why)
    install(folder, best.kept)
    return report


def _report(
    folder: pathlib.Path,
    found: _Reading,
    later: Mapping[int, str],
    aside: pathlib.Path | None,
    why: str | None,
) -> RepairReport:
    told, _ = told_head(folder)
    error, first, lost = found.error, found.last + 1, None
    if told is not None and is_of(told, found.kept):
        lost = range(first, max(told.position + 1, first))
    elif error is None:  # a sound journal of the format before chains
        lost = range(first, first)
    return RepairReport(
        kept=len(found.kept),
        position=None if error is None else error.position,
        why=why,
        lost=lost,
        forgotten=tuple(sorted({job for seq, job in later.items() if seq > found.last})),
        aside=aside,
    )


def _read_in_place(folder: pathlib.Path, path: pathlib.Path) -> _Reading:
    """Read a journal as a start of the service does."""
    try:
        reading = _read(path, checked(folder))
    except ValueError as error:
        if told_head(folder)[0] is None:
            raise
        reading = _Reading([], CorruptJournalError(path, 1, str(error)), {})
    if reading.error is None or not table.has_database(folder):
        return reading
    with table.opened_to_read(path) as connection:
        return _Reading(reading.kept, reading.error, _submitted(connection, reading.last))


def _read_images(folder: pathlib.Path, path: pathlib.Path) -> Iterator[_Reading]:
    """Read what is left of the database and its log without SQLite's own recovery."""
    told, why = told_head(folder)
    database, log = (_bytes(folder / name) for name in (FILE, LOG))
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    try:
        for image in write_images(scratch, database, log):
            # ValueError: the format number in this image's first page is damaged. Nothing is read from it.
            with table.opened_to_read(image) as connection, contextlib.suppress(ValueError):
                reading = _read(path, checked_rows(connection, path, told, why))
                later = _submitted(connection, reading.last)
                yield _Reading(reading.kept, reading.error, later)
    finally:
        shutil.rmtree(scratch)


def _read(path: pathlib.Path, found: Iterable[JournalRow]) -> _Reading:
    kept: list[JournalRow] = []
    try:
        for _, row in states(path, found, State()):
            kept.append(row)
    except CorruptJournalError as error:
        return _Reading(kept, error, {})
    return _Reading(kept, None, {})


def _submitted(connection: sqlite3.Connection, after: int) -> Mapping[int, str]:
    """Return the jobs of whole rows after a position, in spite of what is wrong between them."""
    jobs = dict[int, str]()
    # The rest of the table cannot be read, or it is not there; the report says that there may be more.
    with contextlib.suppress(sqlite3.DatabaseError, ValueError):
        for seq, at_s, wall, kind, body, total in connection.execute(_LATER, (after,)):
            if total != content_sum(seq, at_s, wall, kind, body) or kind != JobSubmitted.__name__:
                continue
            event = from_text(kind, body)
            assert isinstance(event, JobSubmitted)
            jobs[seq] = event.submission.spec.id
    return jobs


def _bytes(path: pathlib.Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _new_folder(folder: pathlib.Path) -> pathlib.Path:
    number = 1
    while (aside := folder / f"{ASIDE}-{number}").exists():
        number += 1
    aside.mkdir(mode=0o700)
    return aside


def _set_aside(folder: pathlib.Path) -> pathlib.Path:
    """Copy the files of the damaged journal, and flush the copies to the disk; return their folder."""
    aside = _new_folder(folder)
    for name in (FILE, LOG, heads.FILE):
        if (folder / name).exists():
            shutil.copy2(folder / name, aside / name)
            with (aside / name).open("rb") as file:
                os.fsync(file.fileno())
    _disk.sync_folder(aside)
    _disk.sync_folder(folder)
    return aside
