"""The file of one segment: rows that are written once and never change, with a checksum for each of them.

    rows    num_rows x row_bytes
    ids     num_rows x int64
    sums    num_rows x uint64, the checksum of each row and its id
    footer  magic, row_bytes, num_rows, and a checksum of ids, sums and footer

While a segment grows, its disk space is allocated in large pieces ahead of the rows, so that a full disk is
noticed before a row is half written. The checksum of a row weights its words by position: it detects any
flipped bit, and a row made of two halves from different times. It is no protection against tampering.
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
FOOTER = struct.Struct("<8sQQL")  # magic, row_bytes, num_rows, checksum
PIECE_BYTES = 2**25  # disk space allocated at once
CHECKED_AT_ONCE = 2**16


class DamagedFile(DamagedError):
    """A file of a store is missing, cut off or changed."""

    def __init__(self, path: pathlib.Path, what: str):
        super().__init__(f"{path} {what}")
        self.path = path


def row_sums(
    ids: Int64[np.ndarray, " n"], rows: UInt64[np.ndarray, "n words"]
) -> UInt64[np.ndarray, " n"]:
    """Return the checksum of each row and its id: 64-bit words, each times an odd number for its position."""
    factors = mixed(np.arange(1, rows.shape[1] + 1)) | np.uint64(1)
    sums = np.einsum("ij,j->i", rows, factors)
    sums += mixed(ids + 1) ^ np.uint64(STEP)  # so that a row of zeros does not sum to zero
    return sums


@dataclass(frozen=True)
class Segment:
    """A finished segment (a file of rows), mapped into memory."""

    path: pathlib.Path
    rows: UInt64[np.ndarray, "n words"]
    ids: Int64[np.ndarray, " n"]
    sums: UInt64[np.ndarray, " n"]
    total: int
    """Checksum of ids, sums and footer, which the manifest repeats."""

    @classmethod
    def open(cls, path: pathlib.Path, row_bytes: int) -> "Segment":
        """Map a segment.

        Raises:
          DamagedFile: it is missing or cut off, or its ids or checksums are damaged.
          ValueError: it is whole, but its rows have another width.
        """
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                file.seek(max(size - FOOTER.size, 0))
                magic, width, num_rows, total = FOOTER.unpack(file.read(FOOTER.size))
        except (FileNotFoundError, struct.error) as error:
            raise DamagedFile(path, f"is missing or has no footer ({error})") from error
        if magic != MAGIC or size != num_rows * (width + 16) + FOOTER.size:
            raise DamagedFile(
                path, f"has {size} bytes, which do not end in the footer of a segment"
            )
        mapped = np.memmap(path, np.uint8, "r")
        ids, sums = (
            mapped[num_rows * (width + at) : num_rows * (width + at + 8)].view(kind)
            for at, kind in ((0, np.int64), (8, np.uint64))
        )
        if _total(width, ids, sums) != total:
            raise DamagedFile(path, "has a damaged list of ids or checksums")
        if width != row_bytes:
            raise ValueError(
                f"{path} holds rows of {width} bytes, and rows of {row_bytes} were asked for: the table was "
                "made with another dimension, optimizer or dtype. Open it with the ones that it was made "
                "with."
            )
        rows = mapped[: num_rows * width].view(np.uint64).reshape(num_rows, width // 8)
        return cls(path, rows, ids, sums, total)

    def take(self, positions: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, "n words"]:
        """Return copies of the rows at these positions. Raises DamagedFile if one is damaged."""
        rows = self.rows.take(positions, axis=0)
        self._compare(rows, positions)
        return rows

    def check(self) -> None:
        """Read every row. Raises DamagedFile, naming the first row that is damaged."""
        for start in range(0, len(self.ids), CHECKED_AT_ONCE):
            positions = np.arange(start, min(start + CHECKED_AT_ONCE, len(self.ids)))
            self._compare(self.rows[positions[0] : positions[-1] + 1], positions)

    def _compare(self, rows: np.ndarray, positions: np.ndarray) -> None:
        sums = row_sums(self.ids.take(positions), rows)
        wrong = np.flatnonzero(sums != self.sums.take(positions))
        if len(wrong):
            position = int(positions[wrong[0]])
            raise DamagedFile(
                self.path,
                f"has a damaged row: id {self.ids[position]}, at position {position} "
                f"({len(wrong)} damaged of {len(positions)} that were read)",
            )


class SegmentWriter:
    """A segment that grows; owns its file until it is finished.

    Rows may be read as soon as `append` has returned. They are not verified: this process wrote them.
    """

    def __init__(self, path: pathlib.Path, row_bytes: int, max_rows: int):
        self.path = path
        self._row_bytes, self.max_rows = row_bytes, max_rows
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._allocated = 0
        try:
            os.ftruncate(self._file, max_rows * row_bytes)  # a length to map; allocates nothing
            self.rows = np.memmap(path, np.uint64, "r", shape=(max_rows, row_bytes // 8))
        except BaseException:
            self.close()
            path.unlink()
            raise
        self._ids = np.empty(max_rows, np.int64)
        self.num_rows = 0

    @property
    def ids(self) -> Int64[np.ndarray, " n"]:
        """Ids of the rows that have been appended so far, in order."""
        return self._ids[: self.num_rows]

    @property
    def room(self) -> int:
        """Number of rows that may still be appended to the segment."""
        return self.max_rows - self.num_rows

    def append(self, ids: Int64[np.ndarray, " n"], rows: UInt64[np.ndarray, "n words"]) -> None:
        """Append at most `room` rows. If the disk refuses (OSError), none of them is there."""
        start, size = self.num_rows * self._row_bytes, len(ids) * self._row_bytes
        self._allocate(start + size)
        _write(self._file, np.ascontiguousarray(rows), start)
        self._ids[self.num_rows : self.num_rows + len(ids)] = ids
        self.num_rows += len(ids)

    def _allocate(self, end: int) -> None:
        if end > self._allocated:
            upto = min(-(-end // PIECE_BYTES) * PIECE_BYTES, self.max_rows * self._row_bytes)
            if hasattr(os, "posix_fallocate"):  # without it, only the write notices a full disk
                os.posix_fallocate(self._file, self._allocated, upto - self._allocated)
            self._allocated = upto

    def take(self, positions: Int64[np.ndarray, " n"]) -> UInt64[np.ndarray, "n words"]:
        """Return copies of the rows at these positions, which have been appended."""
        return self.rows.take(positions, axis=0)

    def finish(self) -> Segment:
        """Write ids, checksums and footer, and map the finished segment. Does not fsync."""
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
        self.close()  # last: if mapping fails now, `finish` can be called again
        return segment

    def close(self) -> None:
        """Close the file, and keep its content. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _total(row_bytes: int, ids: np.ndarray, sums: np.ndarray) -> int:
    total = zlib.crc32(struct.pack("<QQ", row_bytes, len(ids)))
    return zlib.crc32(sums.data, zlib.crc32(ids.data, total))


def _write(file: int, array: np.ndarray, start: int) -> None:
    view = array.data.cast("B")
    done = 0
    while done < len(view):  # one call writes at most 2 GiB, and less if a signal arrives
        done += os.pwrite(file, view[done:], start + done)
