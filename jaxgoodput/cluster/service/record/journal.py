"""What has happened, on a disk: nothing that was acknowledged is lost, whenever this process is killed.

One table of SQLite with a write-ahead log, each row with a sum of its own. What takes the place of an older
row of its key (a job's hints) removes that row in the same transaction, so the file stays small, and reading
what is left gives the same state. A row that is not what was written stops the reading at its place; `repair`
keeps everything before it.
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
FORMAT = 1

_TABLE = """
create table if not exists events (
    seq integer primary key autoincrement,
    at real not null, wall real not null,
    kind text not null, body text not null, key text, sum text not null
)"""
_INDEX = "create index if not exists by_key on events (key) where key is not null"
_INSERT = "insert into events values (?, ?, ?, ?, ?, ?, ?)"
_ROWS = "select seq, at, wall, kind, body, sum from events where seq > ? order by seq"


class CorruptJournalError(Exception):
    """The journal is not what was written, from a place on."""

    def __init__(self, path: pathlib.Path, place: int, why: str):
        self.place = place
        """Of the first row that cannot be read; all before it can."""
        super().__init__(
            f"the journal {path} cannot be read from place {place} on: {why}. Nothing was changed. Keep all "
            f"before it with `jaxgoodput serve --folder {path.parent} --repair`; what was written later is "
            "set aside and lost to the service."
        )


class DiskFull(Exception):
    """The disk takes no more; nothing of the transaction was written."""


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """What a repair has kept."""

    kept: int
    """Events."""
    place: int | None
    """Of the first row that could not be read; None: all could."""
    aside: pathlib.Path | None
    """Where the journal as it was is now."""


class ClusterJournal:
    """Appends events, many at once; `append` returns when they are on the disk.

    One process writes at a time, from one thread at a time. Raises Corrupt where the file is no journal.
    """

    def __init__(self, folder: pathlib.Path, *, most_bytes: int | None = None):
        self.path = folder / FILE
        """Where it is; it may grow to `most_bytes`, or as far as the disk has room."""
        _own(self.path)
        self._connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=10.0
        )
        try:
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")
            self._connection.execute(_TABLE)
            self._connection.execute(_INDEX)
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
        row = self._connection.execute("select seq from sqlite_sequence").fetchone()
        self.last = row[0] if row else 0  # the place given last, be its row there or not
        if version not in (0, FORMAT):
            self._connection.close()
            raise ValueError(
                f"the journal {self.path} has format {version}; this program writes {FORMAT}. Start the "
                "service with the program that wrote it."
            )

    def append(self, events: Sequence[Event], at_s: float, wall: float) -> list[JournalEntry]:
        """Write events, all or none, and return them with their places, once they are on the disk.

        Raises DiskFull where there is no room for them.
        """
        found = [
            JournalEntry(self.last + i, at_s, wall, event) for i, event in enumerate(events, 1)
        ]
        connection = self._connection
        try:
            connection.execute("begin immediate")
            for stamped in found:
                key = key_of(stamped.event)
                if key is not None:
                    connection.execute("delete from events where key = ?", (key,))
                connection.execute(_INSERT, _row(stamped))
            connection.execute("commit")
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("rollback")
            if isinstance(error, sqlite3.OperationalError) and _is_full(error):
                raise DiskFull(_full(self.path, error)) from None
            raise
        self.last += len(found)
        return found

    def replay(self, state: State | None = None) -> tuple[State, float]:
        """The state that all events make, and the wall time of the last; Corrupt where one is not right."""
        state, wall = state or State(), 0.0
        for stamped in read(self._connection, self.path, state.seq):
            try:
                state, wall = step(state, stamped), stamped.wall
            except ValueError as error:
                raise CorruptJournalError(self.path, stamped.seq, str(error)) from None
        return state, wall

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


class Follower:
    """Reads the journal that another process writes."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / FILE
        self._connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10.0)

    def read(self, after: int) -> Iterator[JournalEntry]:
        """All events behind a place, as far as they have been written."""
        return read(self._connection, self._path, after)


def read(connection: sqlite3.Connection, path: pathlib.Path, after: int) -> Iterator[JournalEntry]:
    """The events behind a place. Raises Corrupt at the first that is not what was written."""
    place = after
    try:
        for seq, at_s, wall, kind, body, total in connection.execute(_ROWS, (after,)):
            place = seq
            if total != _sum(seq, at_s, wall, kind, body):
                raise CorruptJournalError(path, seq, "its sum is another one")
            try:
                event = from_text(kind, body)
            except ValueError as error:
                raise CorruptJournalError(path, seq, str(error)) from None
            yield JournalEntry(seq, at_s, wall, event)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise CorruptJournalError(path, place + 1, str(error)) from None


def repair(folder: pathlib.Path) -> RepairReport:
    """Keep everything before the first row that cannot be read; the journal as it was is set aside.

    A kill at any moment leaves the old journal or the new one. Raises FileNotFoundError where there is none,
    InUse where a service has the folder.
    """
    path = folder / FILE
    if not path.exists():
        raise FileNotFoundError(f"there is no journal {path}: nothing can be repaired.")
    with _disk.held(folder):
        return _repair(folder, path)


def _repair(folder: pathlib.Path, path: pathlib.Path) -> RepairReport:
    kept: list[JournalEntry] = []
    state, place = State(), None
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for stamped in read(connection, path, 0):
            try:
                state = step(state, stamped)
            except ValueError:
                place = stamped.seq
                break
            kept.append(stamped)
    except CorruptJournalError as error:
        place = error.place
    finally:
        connection.close()  # by which what is in the write-ahead log comes into the file
    if place is None:
        return RepairReport(kept=len(kept), place=None, aside=None)
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
    for old in logs:  # of a file too damaged to take them: they are not the new one's
        old.unlink()
    os.replace(new, path)
    _disk.sync_folder(folder)
    return RepairReport(kept=len(kept), place=place, aside=aside)


def _own(path: pathlib.Path) -> None:
    """Have a file that nobody else reads: it holds secrets of jobs. SQLite's other files are alike."""
    path.touch(mode=0o600)
    path.chmod(0o600)


def _write(path: pathlib.Path, events: Sequence[JournalEntry]) -> None:
    """A journal of these events, at their places."""
    _own(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma synchronous = full")
        connection.execute(_TABLE)
        connection.execute(_INDEX)
        connection.execute(f"pragma user_version = {FORMAT}")
        connection.execute("begin")
        for x in events:
            connection.execute(_INSERT, _row(x))
        connection.execute("commit")


def _row(x: JournalEntry) -> tuple[object, ...]:
    kind, body = type(x.event).__name__, to_text(x.event)
    total = _sum(x.seq, x.at_s, x.wall, kind, body)
    return x.seq, x.at_s, x.wall, kind, body, key_of(x.event), total


def _sum(seq: int, at_s: float, wall: float, kind: str, body: str) -> str:
    text = f"{seq} {at_s!r} {wall!r} {kind} {body}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _is_full(error: sqlite3.Error) -> bool:
    return "full" in str(error) or "disk I/O" in str(error)


def _full(path: pathlib.Path, error: sqlite3.Error) -> str:
    return (
        f"the journal {path} could not be written: {error}. Nothing of this request was done; jobs go on "
        "with what they have. Free some space on that disk and send it again."
    )
