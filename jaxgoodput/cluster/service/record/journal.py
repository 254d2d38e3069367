"""The journal of a cluster: an acknowledged event survives, whenever the service is killed.

It is one SQLite table with a write-ahead log. Its rows form a chain (`chain.py`), and the head of that chain
is also kept outside of the database (`head.py`), so neither a damaged row nor a shorter table goes unnoticed.
An event that replaces an earlier one with the same key (such as a job's hints) deletes that row in the same
transaction. So the file stays small, and replaying the rows that are left gives the same state.
"""

import pathlib
import sqlite3
from collections.abc import Iterator, Sequence

from jaxgoodput.cluster.service.record import table
from jaxgoodput.cluster.service.record.chain import EMPTY, ChainHead, link_sum, row_of
from jaxgoodput.cluster.service.record.check import checked, is_before_chains, states
from jaxgoodput.cluster.service.record.events import Event, JournalEntry
from jaxgoodput.cluster.service.record.head import HeadFile
from jaxgoodput.cluster.service.record.install import finish, install
from jaxgoodput.cluster.service.record.state import State
from jaxgoodput.cluster.service.record.table import FILE, DiskFull

_BEFORE = "select seq, sum from events where seq < ? order by seq desc limit 1"
_AFTER = "select seq, sum, key from events where seq > ? order by seq limit 1"


class ClusterJournal:
    """Writes events to the journal in `folder`, and replays them. A journal of an older format is converted.

    Only one process may write, from one thread at a time. The file may grow to `most_bytes`, by default as
    far as the disk has room. Raises CorruptJournalError, and changes nothing, if the journal is not what was
    acknowledged, and ValueError if another program wrote it.
    """

    def __init__(self, folder: pathlib.Path, *, most_bytes: int | None = None):
        self.path = folder / FILE
        finish(folder)
        self._head, self._keys = _checked(folder)
        self._acknowledged = HeadFile(folder)
        self._connection = _connect(self.path, most_bytes)
        # Rows that a crash kept from being acknowledged count from now on, as the state includes them.
        self._acknowledged.write(self._head)

    @property
    def last(self) -> int:
        """The position of the last event, which is the number of events that were ever written."""
        return self._head.position

    def append(self, events: Sequence[Event], at_s: float, wall: float) -> list[JournalEntry]:
        """Write all events in one transaction; return them with their positions once they are on the disk.

        Raises DiskFull, and writes nothing, if there is no room for all of them. Raises OSError if they are
        on the disk but cannot be acknowledged; then the journal has to be opened again.
        """
        entries = [
            JournalEntry(self.last + i, at_s, wall, event) for i, event in enumerate(events, 1)
        ]
        head, keys = self._head, dict[str, int]()
        connection = self._connection
        try:
            connection.execute("begin immediate")
            for entry in entries:
                row = row_of(entry, head)
                connection.execute(table.INSERT, row)
                head = row.head
                if row.key is not None:
                    replaced = keys.get(row.key, self._keys.get(row.key))
                    keys[row.key] = row.seq
                    if replaced is not None:
                        self._remove(replaced)
            connection.execute("commit")
        except BaseException as error:
            if connection.in_transaction:
                connection.execute("rollback")
            if isinstance(error, sqlite3.OperationalError) and table.is_full(error):
                raise DiskFull(table.full(self.path, error)) from None
            raise
        self._acknowledged.write(head)
        self._head = head
        self._keys.update(keys)
        return entries

    def _remove(self, position: int) -> None:
        """Delete a row that was replaced, and link the row after it to the row before it."""
        execute = self._connection.execute
        found = execute(_BEFORE, (position,)).fetchone()
        before = EMPTY if found is None else ChainHead(*found)
        seq, total, key = execute(_AFTER, (position,)).fetchone()
        execute("delete from events where seq = ?", (position,))
        link = link_sum(seq, total, key, before)
        execute("update events set after = ?, link = ? where seq = ?", (before.position, link, seq))

    def replay(self, state: State | None = None) -> tuple[State, float]:
        """Return the state after all events, and the Unix time of the last event (0 if there is none).

        With a `state`, only later events are replayed on top of it. Raises CorruptJournalError at the first
        event that is damaged or impossible.
        """
        head = EMPTY if state is None else ChainHead(state.seq, None)
        state, wall = state or State(), 0.0
        found = table.rows(self._connection, self.path, head)
        for after, row in states(self.path, found, state):
            state, wall = after, row.wall
        return state, wall

    def close(self) -> None:
        """Close the journal's files. Idempotent."""
        self._connection.close()
        self._acknowledged.close()


class JournalFollower:
    """Reads, without writing, a journal that another process writes."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / FILE
        self._connection = sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10.0)

    def read(self, after: int) -> Iterator[JournalEntry]:
        """Yield the events after position `after` that have been written so far."""
        head = ChainHead(after, None) if after else EMPTY
        for row in table.rows(self._connection, self._path, head):
            yield table.entry_of(self._path, row)


def _checked(folder: pathlib.Path) -> tuple[ChainHead, dict[str, int]]:
    """Return the head of the journal in a folder and the position of each key; make what is not there yet.

    Raises CorruptJournalError, ValueError and DiskFull.
    """
    if not table.has_database(folder):
        for _ in checked(folder):  # raises if there was a journal
            pass
        install(folder, ())
    table.make_private(folder / FILE)
    if is_before_chains(folder):
        install(folder, list(checked(folder)))
    head, keys = EMPTY, dict[str, int]()
    for row in checked(folder):
        head = row.head
        if row.key is not None:
            keys[row.key] = row.seq
    return head, keys


def _connect(path: pathlib.Path, most_bytes: int | None) -> sqlite3.Connection:
    """Open a sound journal to write to it. Raises CorruptJournalError and DiskFull."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        if most_bytes is not None:
            (page,) = connection.execute("pragma page_size").fetchone()
            connection.execute(f"pragma max_page_count = {most_bytes // page}")
        connection.execute(
            "begin immediate"
        )  # fails if the first page says that it must not be written
        connection.execute("rollback")
    except sqlite3.DatabaseError as error:
        connection.close()
        if table.is_full(error):
            raise DiskFull(table.full(path, error)) from None
        raise table.unreadable(path, None, error) from None
    return connection
