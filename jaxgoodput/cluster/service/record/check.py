"""Is the journal what was written and acknowledged? A start and a repair ask this in the same way."""

import pathlib
import sqlite3
from collections.abc import Iterable, Iterator

from jaxgoodput.cluster.service.record import head as heads
from jaxgoodput.cluster.service.record import table
from jaxgoodput.cluster.service.record.chain import EMPTY, ChainHead, JournalRow
from jaxgoodput.cluster.service.record.state import State, step
from jaxgoodput.cluster.service.record.table import CorruptJournalError


def checked(folder: pathlib.Path) -> Iterator[JournalRow]:
    """Yield all rows of the journal in a folder, without changing a file; none if there is no journal yet.

    Raises CorruptJournalError at the first row that is damaged or missing, or at the end if something else is
    wrong. Raises ValueError if another program wrote the journal.
    """
    path = folder / table.FILE
    told, why = told_head(folder)
    if table.has_database(folder):
        with table.opened_to_read(path) as connection:
            yield from checked_rows(connection, path, told, why)
            check_structure(connection, path)
    elif told is not None and told.position:
        raise CorruptJournalError(path, 1, f"the file is missing or empty, and {_missing(0, told)}")
    elif table.has_log(folder):
        raise CorruptJournalError(path, 1, "the file is missing, and its write-ahead log is there")
    elif why is not None:
        raise CorruptJournalError(path, 1, f"the file is missing or empty, and {why}")


def is_before_chains(folder: pathlib.Path) -> bool:
    """Return whether the journal in a folder has the format before chains. Raises as `checked` does."""
    path = folder / table.FILE
    with table.opened_to_read(path) as connection:
        is_ours = told_head(folder) != (None, None)
        return table.format_of(connection, path, is_ours=is_ours) == table.BEFORE_CHAINS


def told_head(folder: pathlib.Path) -> tuple[ChainHead | None, str | None]:
    """Return what `journal.head` says, or None; and why it cannot be read, or None."""
    try:
        return heads.read_head(folder), None
    except heads.DamagedHeadError as error:
        return None, str(error)


def checked_rows(
    connection: sqlite3.Connection, path: pathlib.Path, told: ChainHead | None, why: str | None
) -> Iterator[JournalRow]:
    """Yield the rows of an open journal, which must include all that `journal.head` has `told` of.

    `why` says why that file cannot be read. A journal of the format before chains needs none.
    Raises CorruptJournalError and ValueError as `checked` does.
    """
    is_ours = told is not None or why is not None
    if table.format_of(connection, path, is_ours=is_ours) == table.BEFORE_CHAINS:
        found = table.old_rows(connection, path)
    else:
        found = table.rows(connection, path, EMPTY)
        if not is_ours:
            why = f"{heads.FILE}, which says how many events were acknowledged, is missing"
    yield from _acknowledged(path, found, told or EMPTY)
    if why is not None:
        raise CorruptJournalError(
            path, None, f"{why}, so it cannot be told whether later events are missing"
        )


def is_of(told: ChainHead, found: Iterable[JournalRow]) -> bool:
    """Return whether `journal.head` and rows may belong together: the acknowledged row is no other one."""
    return all(row.total == told.total for row in found if row.seq == told.position)


def _acknowledged(
    path: pathlib.Path, found: Iterable[JournalRow], told: ChainHead
) -> Iterator[JournalRow]:
    last, is_another = 0, False
    for row in found:
        is_another |= not is_of(told, [row])
        last = row.seq
        yield row
    if last < told.position:
        raise CorruptJournalError(path, last + 1, _missing(last, told))
    if is_another:
        raise CorruptJournalError(
            path,
            None,
            f"the event at position {told.position} is not the one that was acknowledged, so {heads.FILE} is "
            "another journal's and it cannot be told whether events are missing",
        )


def _missing(last: int, told: ChainHead) -> str:
    """Return how many acknowledged events a journal lacks whose last position is `last`, as a clause."""
    return f"{told.position - last} of the {told.position} acknowledged events are missing"


def check_structure(connection: sqlite3.Connection, path: pathlib.Path) -> None:
    """Check the database's own structure, so that no later write destroys rows that can be read now.

    Raises CorruptJournalError.
    """
    try:
        (said,) = connection.execute("pragma quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        raise table.unreadable(path, None, error) from None
    if said != "ok":
        raise CorruptJournalError(
            path, None, f"all events can be read, but SQLite finds {' '.join(said.split())!r}"
        )


def states(
    path: pathlib.Path, found: Iterable[JournalRow], state: State
) -> Iterator[tuple[State, JournalRow]]:
    """Yield the state after each later row. Raises CorruptJournalError at the first impossible event."""
    for row in found:
        entry = table.entry_of(path, row)
        try:
            state = step(state, entry)
        except ValueError as error:
            raise CorruptJournalError(path, row.seq, str(error)) from None
        yield state, row
