"""`journal.head`: how many events were acknowledged, kept outside of the journal's database.

A database that lost its newest rows looks like an older, sound one. This file tells them apart. It is written
after the rows are on disk and before their requests are answered, so after a crash the database may hold more
events than this file says, and never fewer. It has two records. A write replaces the older one, so a write
that a loss of power cuts short leaves the other.
"""

import hashlib
import os
import pathlib
import weakref

from absl import logging

from jaxgoodput import _disk
from jaxgoodput.cluster.service.record.chain import ChainHead

FILE = "journal.head"
FORMAT = 3
"""The format of the journal to which the head belongs."""
RECORD_BYTES = 512  # a disk writes a sector of this size at once


class DamagedHeadError(Exception):
    """No record of the file `journal.head` can be read."""


class HeadFile:
    """Writes the file `journal.head` in a folder, in which `create_head` has made it."""

    def __init__(self, folder: pathlib.Path):
        path = folder / FILE
        found = [_parsed(text) for text in _records(path)]
        if None in found:
            logging.warning(
                "one of the two records in %s cannot be read; the other one is used. This is normal after a "
                "loss of power.",
                path,
            )
        newest = max(range(2), key=lambda i: -1 if (head := found[i]) is None else head.position)
        self._next = 1 - newest
        self._path = path
        self._file = os.open(path, os.O_RDWR)
        self._close = weakref.finalize(self, os.close, self._file)

    def write(self, head: ChainHead) -> None:
        """Return once a head is on the disk. Raises OSError, after which the journal must be opened again."""
        try:
            os.pwrite(self._file, _record(head), self._next * RECORD_BYTES)
            os.fdatasync(self._file)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._path} could not be written ({error.strerror}), so the last requests are on the disk "
                "but were not answered. Jobs keep their devices. Check that disk and start the service again",
            ) from None
        self._next = 1 - self._next

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close()


def create_head(folder: pathlib.Path, head: ChainHead) -> None:
    """Write a new file that says `head`. A kill at any moment leaves the old file or the new one."""
    new = folder / f"{FILE}.new"
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    with new.open("wb") as file:
        file.write(_record(head) * 2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, folder / FILE)
    _disk.sync_folder(folder)


def read_head(folder: pathlib.Path) -> ChainHead | None:
    """Return the head that was acknowledged last; None if there is no file.

    Raises DamagedHeadError if neither record can be read.
    """
    path = folder / FILE
    if not path.exists():
        return None
    found = [head for text in _records(path) if (head := _parsed(text)) is not None]
    if not found:
        raise DamagedHeadError(f"{FILE}, which says how many events were acknowledged, is damaged")
    return max(found, key=lambda head: head.position)


def _records(path: pathlib.Path) -> list[bytes]:
    data = path.read_bytes()
    return [data[:RECORD_BYTES], data[RECORD_BYTES : 2 * RECORD_BYTES]]


def _record(head: ChainHead) -> bytes:
    text = f"jaxgoodput journal {FORMAT}: {head.position} events, the last is {head.total or '-'}"
    return f"{text} {_sum(text)}".ljust(RECORD_BYTES - 1).encode() + b"\n"


def _parsed(record: bytes) -> ChainHead | None:
    """Return the head that a record says; None if it is damaged."""
    text, _, total = record.decode(errors="replace").strip().rpartition(" ")
    words = text.split(" ")
    if len(words) != 9 or total != _sum(text):
        return None
    return ChainHead(int(words[3]), "" if words[-1] == "-" else words[-1])


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
