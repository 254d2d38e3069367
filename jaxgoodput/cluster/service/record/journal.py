"""The journal of a cluster: an acknowledged event survives, whenever the service is killed.

It is one SQLite table with a write-ahead log, and each row carries a checksum. An event that replaces an
earlier one with the same key (such as a job's hints) deletes that row in the same transaction. So the file
stays small, and replaying the rows that are left gives the same state. A damaged row stops the replay at its
position; `repair` keeps everything before it.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxgoodput import _disk
from jaxgoodput.cluster.service.record.events import Event, JournalEntry, from_text, key_of, to_text
from jaxgoodput.cluster.service.record.state import State, step

FILE = "journal.db"
FORMAT = 2

_SCHEMA = """
create table if not exists events (
    seq integer primary key autoincrement,
    at real not null, wall real not null,
    kind text not null, body text not null, key text, sum text not null
);
create index if not exists by_key on events (key) where key is not null;
"""
_INSERT = "insert into events values (?, ?, ?, ?, ?, ?, ?)"
_ROWS = "select seq, at, wall, kind, body, sum from events where seq > ? order by seq"


class CorruptJournalError(Exception):
    """The journal on disk is damaged from some position on: it is not what was written."""

    def __init__(self, path: pathlib.Path, position: int, why: str):
        self.position = position
        """The position of the first row that cannot be read."""
        super().__init__(
            f"the journal {path} cannot be read from position {position} on: {why}. Nothing was changed. "
            f"To keep everything before it, run `jaxgoodput serve --folder {path.parent} --repair`; later "
            "events are set aside and the service forgets them."
        )


class DiskFull(Exception):
    """The disk is full. Nothing of the transaction was written."""


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """What a repair of the journal has kept and dropped."""

    kept: int
    """The number of events that were kept."""
    position: int | None
    """The position of the first row that could not be read; None if all rows are sound."""
    aside: pathlib.Path | None
    """The copy of the damaged journal; None if nothing was changed."""


class ClusterJournal:
    """Writes events to the journal in `folder`, and replays them.

    Only one process may write, from one thread at a time. The file may grow to `most_bytes`, by default as
    far as the disk has room. Raises CorruptJournalError if the file is not a journal.
    """

    def __init__(self, folder: pathlib.Path, *, most_bytes: int | None = None):
        self.path = folder / FILE
        _create(self.path)
        self._connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=10.0
        )
        try:
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            self._connection.executescript(_SCHEMA)
            if most_bytes is not None:
                (page,) = self._connection.execute("pragma page_size").fetchone()
                self._connection.execute(f"pragma max_page_count = {most_bytes // page}")
            (version,) = self._connection.execute("pragma user_version").fetchone()
            if version == 0:
                self._connection.execute(f"pragma user_version = {FORMAT}")
        except sqlite3.DatabaseError as error:
            self._connection.close()
            if _is_full(error):
                raise DiskFull(_full(self.path, error)) from None
            raise CorruptJournalError(self.path, 1, str(error)) from None
        # SQLite remembers the last position even after that row was deleted.
        row = self._connection.execute("select seq from sqlite_sequence").fetchone()
        self.last = row[0] if row else 0
        if version not in (0, FORMAT):
            self._connection.close()
            raise ValueError(
                f"the journal {self.path} has format {version}; this program writes format {FORMAT}. Start "
                "the service with the program that wrote the journal."
            )

    def append(self, events: Sequence[Event], at_s: float, wall: float) -> list[JournalEntry]:
        """Write all events in one transaction; return them with their positions once they are on the disk.

        Raises DiskFull, and writes nothing, if there is no room for all of them.
        """
        entries = [
            JournalEntry(self.last + i, at_s, wall, event) for i, event in enumerate(events, 1)
        ]
        connection = self._connection
        try:
            connection.execute("begin immediate")
            for entry in entries:
                key = key_of(entry.event)
                if key is not None:
                    connection.execute("delete from events where key = ?", (key,))
                connection.execute(_INSERT, _row(entry))
            connection.execute("commit")
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("rollback")
            if isinstance(error, sqlite3.OperationalError) and _is_full(error):
                raise DiskFull(_full(self.path, error)) from None
            raise
        self.last += len(entries)
        return entries

    def replay(self, state: State | None = None) -> tuple[State, float]:
        """Return the state after all events, and the Unix time of the last event (0 if there is none).

        With a `state`, only later events are replayed on top of it. Raises CorruptJournalError at the first
        event that is damaged or impossible.
        """
        state, wall = state or State(), 0.0
        for after, entry in _states(self._connection, self.path, state):
            state, wall = after, entry.wall
        return state, wall

    def close(self) -> None:
        """Close the journal's file."""
        self._connection.close()


class JournalFollower:
    """Reads, without writing, a journal that another process writes."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / FILE
        self._connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10.0)

    def read(self, after: int) -> Iterator[JournalEntry]:
        """Yield the events after position `after` that have been written so far."""
        return read(self._connection, self._path, after)


def read(connection: sqlite3.Connection, path: pathlib.Path, after: int) -> Iterator[JournalEntry]:
    """Yield the events after a position. Raises CorruptJournalError at the first damaged row."""
    position = after
    try:
        for seq, at_s, wall, kind, body, total in connection.execute(_ROWS, (after,)):
            position = seq
            if total != _sum(seq, at_s, wall, kind, body):
                raise CorruptJournalError(path, seq, "its checksum does not match")
            try:
                event = from_text(kind, body)
            except ValueError as error:
                raise CorruptJournalError(path, seq, str(error)) from None
            yield JournalEntry(seq, at_s, wall, event)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise CorruptJournalError(path, position + 1, str(error)) from None


def _states(
    connection: sqlite3.Connection, path: pathlib.Path, state: State
) -> Iterator[tuple[State, JournalEntry]]:
    """Yield the state after each later event. Raises CorruptJournalError at the first impossible event."""
    for entry in read(connection, path, state.seq):
        try:
            state = step(state, entry)
        except ValueError as error:
            raise CorruptJournalError(path, entry.seq, str(error)) from None
        yield state, entry


def repair(folder: pathlib.Path) -> RepairReport:
    """Keep everything before the first damaged row, and set a copy of the damaged journal aside.

    A kill at any moment leaves either the old journal or the new one. Raises FileNotFoundError if there is
    no journal, and InUse if a service uses the folder.
    """
    path = folder / FILE
    if not path.exists():
        raise FileNotFoundError(f"there is no journal {path}: nothing can be repaired.")
    with _disk.held(folder):
        return _repair(folder, path)


def _repair(folder: pathlib.Path, path: pathlib.Path) -> RepairReport:
    kept: list[JournalEntry] = []
    position = None
    # Closing the connection moves what is in the write-ahead log into the file.
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        try:
            for _, entry in _states(connection, path, State()):
                kept.append(entry)
        except CorruptJournalError as error:
            position = error.position
    if position is None:
        return RepairReport(kept=len(kept), position=None, aside=None)
    number = 1
    while (aside := folder / f"{FILE}.damaged-{number}").exists():
        number += 1
    logs = [old for end in ("-wal", "-shm") if (old := path.with_name(path.name + end)).exists()]
    for old in (path, *logs):
        copy = aside.with_name(aside.name + old.name.removeprefix(FILE))
        shutil.copy2(old, copy)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
    new = folder / f"{FILE}.new"
    new.unlink(missing_ok=True)
    _write(new, kept)
    _disk.sync_folder(folder)
    # A file too damaged to absorb its write-ahead log has left it behind. SQLite must not apply that log to
    # the new file.
    for old in logs:
        old.unlink()
    os.replace(new, path)
    _disk.sync_folder(folder)
    return RepairReport(kept=len(kept), position=position, aside=aside)


def _create(path: pathlib.Path) -> None:
    """Create a file that only its owner can read, because it holds secrets of jobs.

    SQLite gives its auxiliary files the same mode.
    """
    path.touch(mode=0o600)
    path.chmod(0o600)


def _write(path: pathlib.Path, entries: Sequence[JournalEntry]) -> None:
    """Write a new journal with these entries at their positions."""
    _create(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma synchronous = full")
        connection.executescript(_SCHEMA)
        connection.execute(f"pragma user_version = {FORMAT}")
        connection.execute("begin")
        connection.executemany(_INSERT, map(_row, entries))
        connection.execute("commit")


def _row(entry: JournalEntry) -> tuple[object, ...]:
    kind, body = type(entry.event).__name__, to_text(entry.event)
    total = _sum(entry.seq, entry.at_s, entry.wall, kind, body)
    return entry.seq, entry.at_s, entry.wall, kind, body, key_of(entry.event), total


def _sum(seq: int, at_s: float, wall: float, kind: str, body: str) -> str:
    text = f"{seq} {at_s!r} {wall!r} {kind} {body}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _is_full(error: sqlite3.Error) -> bool:
    return "full" in str(error) or "disk I/O" in str(error)


def _full(path: pathlib.Path, error: sqlite3.Error) -> str:
    return (
        f"the journal {path} could not be written: {error}. This request changed nothing, and jobs keep "
        "their devices. Free some space on that disk and send the request again."
    )
