"""A file of rows that is written once and then never changes, and that says of every row whether it is whole.

    rows    num_rows x row_bytes
    ids     num_rows x int64
    sums    num_rows x uint64, one of each row and its id
    footer  the numbers above, and a sum of ids, sums and footer

While it is written to, its disk space is taken in large pieces ahead of the rows, so that a full disk is met
before a row is half there. A row's sum is weighted by place: it tells any flipped bit, and a row of two
halves from different times; it is no help against somebody who means it.
"""

import os
import pathlib
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

from jaxgoodput._disk import DamagedError
from jaxgoodput._hash import STEP, mixed

MAGIC = b"jg rows1"
FOOTER = struct.Struct("<8sQQL")  # magic, row_bytes, num_rows, sum
PIECE_BYTES = 2**25  # of disk space taken at once
CHECKED_AT_ONCE = 2**16


class DamagedFile(DamagedError):
    """A file of a store is not what was written."""

    def __init__(self, path: pathlib.Path, what: str):
        super().__init__(f"{path} {what}")
        self.path = path


def row_sums(
    ids: Int64[np.ndarray, " n"], rows: UInt64[np.ndarray, "n words"]
) -> UInt64[np.ndarray, " n"]:
    """The sum of each row and its id: of its 64-bit words, each times an odd number of its place."""
    places = mixed(np.arange(1, rows.shape[1] + 1)) | np.uint64(1)
    sums = np.einsum("ij,j->i", rows, places)
    sums += mixed(ids + 1) ^ np.uint64(STEP)  # a row of zeros has none of zero
    return sums


@dataclass(frozen=True)
class Segment:
    """A finished segment, mapped into memory."""

    path: pathlib.Path
    rows: UInt64[np.ndarray, "n words"]
    ids: Int64[np.ndarray, " n"]
    sums: UInt64[np.ndarray, " n"]
    total: int
    """The sum of ids, sums and footer, as the manifest has it."""

    @classmethod
    def open(cls, path: pathlib.Path, row_bytes: int) -> "Segment":
        """Map a segment.

        Raises:
          DamagedFile: it is cut off, or its ids or sums are not what was written, or it is gone.
          ValueError: it is whole and holds rows of another width.
        """
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                file.seek(max(size - FOOTER.size, 0))
                magic, width, num_rows, total = FOOTER.unpack(file.read(FOOTER.size))
        except (FileNotFoundError, struct.error) as error:
            raise DamagedFile(path, f"is missing or has no footer ({error})") from error
        if magic != MAGIC or size != num_rows * (width + 16) + FOOTER.size:
            raise DamagedFile(path, f"has {size} bytes and ends in no footer of such a segment")
        mapped = np.memmap(path, np.uint8, "r")
        ids, sums = (
            mapped[num_rows * (width + at) : num_rows * (width + at + 8)].view(kind)
            for at, kind in ((0, np.int64), (8, np.uint64))
        )
        if _total(width, ids, sums) != total:
            raise DamagedFile(path, "has a list of rows that is not what was written")
        if width != row_bytes:
            raise ValueError(
                f"{path} holds rows of {width} bytes, and rows of {row_bytes} were asked for: the table was "
                "made with another dimension, optimizer or dtype. Open it with those that it was made with."
            )
        rows = mapped[: num_rows * width].view(np.uint64).reshape(num_rows, width // 8)
        return cls(path, rows, ids, sums, total)

    def take(self, places: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, "n words"]:
        """Copies of rows by their places.

        Raises DamagedFile, naming a row, where one is not what was written.
        """
        rows = self.rows.take(places, axis=0)
        self._compare(rows, places)
        return rows

    def check(self) -> None:
        """Read every row; raises DamagedFile, naming the first that is not what was written."""
        for start in range(0, len(self.ids), CHECKED_AT_ONCE):
            places = np.arange(start, min(start + CHECKED_AT_ONCE, len(self.ids)))
            self._compare(self.rows[places[0] : places[-1] + 1], places)

    def _compare(self, rows: np.ndarray, places: np.ndarray) -> None:
        wrong = np.flatnonzero(row_sums(self.ids.take(places), rows) != self.sums.take(places))
        if len(wrong):
            place = int(places[wrong[0]])
            raise DamagedFile(
                self.path,
                f"has a row, that of id {self.ids[place]}, number {place}, that is not what was written "
                f"({len(wrong)} such rows of {len(places)} that were read)",
            )


class SegmentWriter:
    """A segment that grows; owns its file until it is finished.

    Rows may be read as soon as `append` has returned: they are as this process wrote them.
    """

    def __init__(self, path: pathlib.Path, row_bytes: int, max_rows: int):
        self.path = path
        self._row_bytes, self.max_rows = row_bytes, max_rows
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._num_taken = 0
        try:
            os.ftruncate(self._file, max_rows * row_bytes)  # a length to map; takes no space
            self.rows = np.memmap(path, np.uint64, "r", shape=(max_rows, row_bytes // 8))
        except BaseException:
            self.close()
            path.unlink()
            raise
        self._ids = np.empty(max_rows, np.int64)
        self.num_rows = 0

    @property
    def ids(self) -> Int64[np.ndarray, " n"]:
        """The ids of its rows so far."""
        return self._ids[: self.num_rows]

    @property
    def room(self) -> int:
        """Rows that may still be appended."""
        return self.max_rows - self.num_rows

    def append(self, ids: Int64[np.ndarray, " n"], rows: UInt64[np.ndarray, "n words"]) -> None:
        """Write rows behind the others, at most `room`; OSError where the disk refuses: none is there."""
        start, size = self.num_rows * self._row_bytes, len(ids) * self._row_bytes
        self._take_space(start + size)
        _write(self._file, np.ascontiguousarray(rows), start)
        self._ids[self.num_rows : self.num_rows + len(ids)] = ids
        self.num_rows += len(ids)

    def _take_space(self, end: int) -> None:
        if end > self._num_taken:
            upto = min(-(-end // PIECE_BYTES) * PIECE_BYTES, self.max_rows * self._row_bytes)
            if hasattr(os, "posix_fallocate"):  # elsewhere a full disk is met by the writing itself
                os.posix_fallocate(self._file, self._num_taken, upto - self._num_taken)
            self._num_taken = upto

    def take(self, places: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, "n words"]:
        """Copies of rows by their places."""
        return self.rows.take(places, axis=0)

    def finish(self) -> Segment:
        """Write what tells whether the rows are whole, and map it anew; not yet on the disk for good."""
        ids, rows = self.ids, self.rows[: self.num_rows]
        sums = np.concatenate(
            [
                row_sums(ids[at : at + CHECKED_AT_ONCE], rows[at : at + CHECKED_AT_ONCE])
                for at in range(0, self.num_rows, CHECKED_AT_ONCE)
            ]
        )
        end = self.num_rows * self._row_bytes
        total = _total(self._row_bytes, ids, sums)
        footer = FOOTER.pack(MAGIC, self._row_bytes, self.num_rows, total)
        _write(self._file, ids, end)
        _write(self._file, sums, end + ids.nbytes)
        _write(self._file, np.frombuffer(footer, np.uint8), end + 2 * ids.nbytes)
        os.ftruncate(self._file, end + 2 * ids.nbytes + len(footer))
        segment = Segment.open(self.path, self._row_bytes)
        self.close()  # not before: where it cannot be mapped now, this can be called again
        return segment

    def close(self) -> None:
        """Let go of the file; what is in it stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _total(row_bytes: int, ids: np.ndarray, sums: np.ndarray) -> int:
    total = zlib.crc32(struct.pack("<QQ", row_bytes, len(ids)))
    return zlib.crc32(sums.data, zlib.crc32(ids.data, total))


def _write(file: int, array: np.ndarray, start: int) -> None:
    view = array.data.cast("B")
    done = 0
    while done < len(view):  # one call writes 2 GiB at most, and less where a signal comes
        done += os.pwrite(file, view[done:], start + done)
