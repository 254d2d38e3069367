"""The table of the journal: how its rows lie in SQLite, and how they are checked.

Everything here reads or makes a file. A file that may be damaged is opened read-only, because closing a
connection that may write moves what is left of a damaged write-ahead log into the file and deletes the log.
"""

import contextlib
import os
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator

from jaxgoodput.cluster.service.record import head as heads
from jaxgoodput.cluster.service.record.chain import (
    ChainHead,
    JournalRow,
    chained,
    content_sum,
    fault,
)
from jaxgoodput.cluster.service.record.events import JournalEntry, from_text

FILE = "journal.db"
LOG = f"{FILE}-wal"
INDEX = f"{FILE}-shm"  # SQLite's index of the log; it is built anew when the first process opens the file
FORMAT = heads.FORMAT
BEFORE_CHAINS = 2  # a format whose rows have a checksum of their contents only

_SCHEMA = """
create table events (
    seq integer primary key,
    at real not null, wall real not null,
    kind text not null, body text not null, key text,
    after integer not null, sum text not null, link text not null
);
"""
INSERT = "insert into events values (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ROWS = "select * from events where seq > ? order by seq"
_OLD_ROWS = "select seq, at, wall, kind, body, sum from events order by seq"
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class CorruptJournalError(Exception):
    """The journal on disk is damaged or incomplete: it is not what was written and acknowledged."""

    def __init__(self, path: pathlib.Path, position: int | None, why: str):
        self.position = position
        """The position of the first event that cannot be read; None if all that is there can be read."""
        self.why = why
        """What is wrong, as a clause."""
        what = "is damaged" if position is None else f"cannot be read from position {position} on"
        super().__init__(
            f"the journal {path} {what}: {why}. Nothing was changed. To keep all that can be read, run "
            f"`jaxgoodput serve --folder {path.parent} --repair`; it sets the damaged files aside and says "
            "what the service forgets."
        )


class DiskFull(Exception):
    """The disk is full. Nothing of the transaction was written."""


@contextlib.contextmanager
def opened_to_read(path: pathlib.Path) -> Iterator[sqlite3.Connection]:
    """Open a journal without changing it or its write-ahead log."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(
        sqlite3.connect(uri, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)
    ) as connection:
        yield connection


def has_database(folder: pathlib.Path) -> bool:
    """Return whether there is a database that is not empty. SQLite deletes the log of an empty one."""
    path = folder / FILE
    return path.exists() and path.stat().st_size > 0


def has_log(folder: pathlib.Path) -> bool:
    """Return whether there is a write-ahead log that is not empty."""
    path = folder / LOG
    return path.exists() and path.stat().st_size > 0


def format_of(connection: sqlite3.Connection, path: pathlib.Path, *, is_ours: bool) -> int:
    """Return the format of the table. `is_ours`: `journal.head` says that this program's format wrote it.

    Raises CorruptJournalError, and ValueError if another program wrote the journal.
    """
    try:
        (version,) = connection.execute("pragma user_version").fetchone()
        columns = [row[1] for row in connection.execute("pragma table_info(events)")]
    except sqlite3.DatabaseError as error:
        raise unreadable(path, 1, error) from None
    layout = FORMAT if "link" in columns else BEFORE_CHAINS
    if version not in (0, BEFORE_CHAINS, FORMAT):
        told = f"the journal {path} has format {version}; this program writes format {FORMAT}. "
        if is_ours:
            told += (
                f"{heads.FILE} says {FORMAT}, so the number in the journal is probably damaged: run "
                f"`jaxgoodput serve --folder {path.parent} --repair`."
            )
        else:
            told += "Start the service with the program that wrote the journal."
        raise ValueError(told)
    if not columns and version == 0 and not is_ours:
        return BEFORE_CHAINS  # an earlier program was killed while it made the journal
    if not columns:
        raise CorruptJournalError(path, 1, "it has no table of events")
    if layout == FORMAT and not _has_schema(connection):
        raise CorruptJournalError(path, 1, "the columns of its table are not those that were made")
    if version != layout and (version, layout) != (0, BEFORE_CHAINS):
        raise CorruptJournalError(path, 1, f"it claims format {version} and has format {layout}")
    return layout


def _has_schema(connection: sqlite3.Connection) -> bool:
    """Return whether the table of events is the one that `create_file` makes, up to upper case."""
    (made,) = connection.execute("select sql from sqlite_schema where name = 'events'").fetchone()
    return made.lower() == _SCHEMA.strip("\n;")


def rows(
    connection: sqlite3.Connection, path: pathlib.Path, before: ChainHead
) -> Iterator[JournalRow]:
    """Yield the rows after `before`. Raises CorruptJournalError at the first that is damaged or missing."""
    head = before
    try:
        for values in connection.execute(_ROWS, (before.position,)):
            row = JournalRow(*values)
            wrong = fault(row, head, is_first=head is before)
            if wrong is not None:
                raise CorruptJournalError(path, *wrong)
            head = row.head
            yield row
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise unreadable(path, head.position + 1, error) from None


def old_rows(connection: sqlite3.Connection, path: pathlib.Path) -> Iterator[JournalRow]:
    """Yield the rows of a journal of the format before chains, chained as they are found."""
    return chained(_old_entries(connection, path))


def _old_entries(connection: sqlite3.Connection, path: pathlib.Path) -> Iterator[JournalEntry]:
    position = 0
    try:
        if not connection.execute("pragma table_info(events)").fetchall():
            return
        for seq, at_s, wall, kind, body, total in connection.execute(_OLD_ROWS):
            if total != content_sum(seq, at_s, wall, kind, body):
                raise CorruptJournalError(path, seq, "its checksum does not match")
            position = seq
            yield _entry(path, seq, at_s, wall, kind, body)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise unreadable(path, position + 1, error) from None


def entry_of(path: pathlib.Path, row: JournalRow) -> JournalEntry:
    """Return the event of a sound row. Raises CorruptJournalError if it is no event."""
    return _entry(path, row.seq, row.at_s, row.wall, row.kind, row.body)


def _entry(
    path: pathlib.Path, seq: int, at_s: float, wall: float, kind: str, body: str
) -> JournalEntry:
    try:
        return JournalEntry(seq, at_s, wall, from_text(kind, body))
    except ValueError as error:
        raise CorruptJournalError(path, seq, str(error)) from None


def unreadable(path: pathlib.Path, position: int | None, error: Exception) -> Exception:
    """Return the exception for a file that SQLite cannot read: locked by another program, or damaged."""
    if getattr(error, "sqlite_errorcode", None) in _LOCKED:
        return OSError(
            f"the journal {path} is locked by another program ({error}). Close that program first."
        )
    return CorruptJournalError(path, position, str(error))


def create_file(path: pathlib.Path, found: Iterable[JournalRow]) -> None:
    """Write a new journal with these rows, which must be a chain, and flush it to the disk.

    Raises DiskFull.
    """
    path.unlink(missing_ok=True)
    make_private(path)
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("pragma synchronous = full")
            connection.execute("begin")
            connection.execute(_SCHEMA)
            connection.execute(f"pragma user_version = {FORMAT}")
            connection.executemany(INSERT, found)
            connection.execute("commit")
            # Only now, so that no row is in the log, which may not fit into the file when it is closed.
            connection.execute("pragma journal_mode = wal")
    except sqlite3.OperationalError as error:
        if is_full(error):
            raise DiskFull(full(path, error)) from None
        raise
    with path.open("rb") as file:
        os.fsync(file.fileno())


def make_private(path: pathlib.Path) -> None:
    """Make a file that only its owner can read, because a journal holds secrets of jobs.

    SQLite gives its auxiliary files the same mode.
    """
    path.touch(mode=0o600)
    path.chmod(0o600)


def is_full(error: sqlite3.Error) -> bool:
    """Return whether SQLite could not write because the disk is full."""
    return "full" in str(error) or "disk I/O" in str(error)


def full(path: pathlib.Path, error: sqlite3.Error) -> str:
    """Return what to tell a caller whose request did not fit on the disk."""
    return (
        f"the journal {path} could not be written: {error}. This request changed nothing, and jobs keep "
        "their devices. Free some space on that disk and send the request again."
    )
