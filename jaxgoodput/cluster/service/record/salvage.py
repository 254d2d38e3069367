"""What can still be read of a damaged journal if SQLite's own reading gives up.

SQLite ignores a write-ahead log from its first damaged frame on. But most later frames are whole, and hold
newer copies of the same pages. So an image is made: the database, under the newest whole copy of each page.
The chain of rows says later how much of that image is true, so nothing here has to be certain.
"""

import itertools
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxgoodput.cluster.service.record.table import create_file

PAGE_BYTES = 4096  # the size with which the journal is made
_HEADER_BYTES, _FRAME_BYTES = 32, 24
_BIG_ENDIAN = 0x377F0683
_PLAIN = b"\x01\x01"  # the file does not need a write-ahead log
_MODE, _COUNTER, _SIZE, _FREE, _VALID_FOR = 18, 24, 28, 32, 92  # offsets in the first page


class LogFrame(NamedTuple):
    """A whole frame of a write-ahead log: a copy of a page."""

    number: int
    """The page, from 1 on."""
    num_pages: int
    """The size of the database if the frame ends a transaction, otherwise 0."""
    data: bytes


def write_images(folder: pathlib.Path, database: bytes, log: bytes) -> Iterator[pathlib.Path]:
    """Write images of a damaged journal into `folder`, one after the other; yield the path of each.

    The second one has the first page of a new journal, if its own page is what is damaged.
    """
    pages = {
        number: database[start : start + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
        for number, start in enumerate(range(0, len(database), PAGE_BYTES), 1)
    }
    pages |= _newest(frames(log))
    if not pages:
        return
    fresh = folder / "fresh"
    create_file(fresh, ())
    template = fresh.read_bytes()[:PAGE_BYTES]
    for first in (pages.get(1, template), template):
        path = folder / "image"
        path.write_bytes(_image({**pages, 1: first}))
        yield path


def frames(log: bytes) -> Iterator[LogFrame]:
    """Yield the whole frames of a log. The checksum of each continues the checksum of the one before.

    If a frame is damaged, either the checksum that is stored with it or the one that is computed is true.
    """
    if len(log) < _HEADER_BYTES + _FRAME_BYTES:
        return
    order = ">" if struct.unpack_from(">I", log)[0] == _BIG_ENDIAN else "<"
    salt = _salt(log)
    before = {log[24:32], _log_sum(order, log[:24], bytes(8))}
    for start in range(_HEADER_BYTES, len(log), _FRAME_BYTES + PAGE_BYTES):
        head = log[start : start + _FRAME_BYTES]
        data = log[start + _FRAME_BYTES : start + _FRAME_BYTES + PAGE_BYTES]
        if len(data) < PAGE_BYTES:
            return
        number, num_pages = struct.unpack_from(">II", head)
        sums = {_log_sum(order, head[:8] + data, old) for old in before}
        if head[8:16] == salt and head[16:24] in sums:
            yield LogFrame(number, num_pages, data)
            sums = set()
        before = {head[16:24], *sums}


def _salt(log: bytes) -> bytes:
    """Return what marks the frames of this log, not of an earlier one: as most of the first ones have it."""
    starts = range(_HEADER_BYTES, len(log) - _FRAME_BYTES, _FRAME_BYTES + PAGE_BYTES)
    found = [log[16:24], *(log[s + 8 : s + 16] for s in itertools.islice(starts, 2))]
    return max(found, key=found.count)


def _log_sum(order: str, data: bytes, before: bytes) -> bytes:
    """Return SQLite's checksum of a frame, which continues `before`."""
    one, two = struct.unpack(">II", before)
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return struct.pack(">II", one, two)


def _newest(found: Iterator[LogFrame]) -> Mapping[int, bytes]:
    """Return the newest copy of each page, up to the end of the last transaction."""
    pages: dict[int, bytes] = {}
    waiting: dict[int, bytes] = {}
    for frame in found:
        waiting[frame.number] = frame.data
        if frame.num_pages:
            pages |= waiting
            waiting = {}
    return pages


def _image(pages: Mapping[int, bytes]) -> bytes:
    """Return a database that SQLite opens without a log, and whose size in its head is true."""
    count = max(pages)
    first = bytearray(pages[1])
    first[_MODE : _MODE + 2] = _PLAIN
    struct.pack_into(">I", first, _SIZE, count)
    struct.pack_into(">II", first, _FREE, 0, 0)
    first[_VALID_FOR : _VALID_FOR + 4] = first[_COUNTER : _COUNTER + 4]
    return b"".join(
        bytes(first) if number == 1 else pages.get(number, bytes(PAGE_BYTES))
        for number in range(1, count + 1)
    )
