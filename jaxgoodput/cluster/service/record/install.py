"""Puts a new journal in the place of an old one: a kill at any moment leaves the old one or the new one.

The new database is written under another name. Once it is complete, it is renamed to `journal.db.next`. From
then on it counts, and `finish`, which is idempotent, removes what belongs to the old one.
"""

import os
import pathlib
from collections.abc import Iterable

from jaxgoodput import _disk
from jaxgoodput.cluster.service.record.chain import EMPTY, JournalRow
from jaxgoodput.cluster.service.record.head import create_head
from jaxgoodput.cluster.service.record.table import (
    FILE,
    INDEX,
    LOG,
    create_file,
    opened_to_read,
    rows,
)

NEXT = f"{FILE}.next"


def install(folder: pathlib.Path, found: Iterable[JournalRow]) -> None:
    """Replace the journal in a folder by one with these rows, which must be a chain. Raises DiskFull."""
    new = folder / f"{FILE}.new"
    create_file(new, found)
    _disk.sync_folder(folder)
    os.replace(new, folder / NEXT)
    finish(folder)


def finish(folder: pathlib.Path) -> None:
    """Complete a replacement that was cut short. Does nothing if there is none.

    Raises CorruptJournalError, and changes nothing, if the new journal is damaged.
    """
    next_ = folder / NEXT
    if not next_.exists():
        return
    _disk.sync_folder(folder)
    head = EMPTY
    with opened_to_read(next_) as connection:
        for row in rows(connection, next_, EMPTY):
            head = row.head
    for end in ("-wal", "-shm"):  # of the reader
        next_.with_name(next_.name + end).unlink(missing_ok=True)
    # SQLite must not apply the log of the old database to the new one.
    for name in (LOG, INDEX):
        (folder / name).unlink(missing_ok=True)
    create_head(folder, head)
    os.replace(next_, folder / FILE)
    _disk.sync_folder(folder)
