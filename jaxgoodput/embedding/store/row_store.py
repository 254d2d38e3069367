"""`RowStore`: rows by id on a disk. New rows are appended to segments, and found through an index in memory.

What a commit names is durable: its manifest lists its segments, and segments never change. Rows that were put
after the last commit are lost with the process. When a store is opened again, it reads the segments of a
commit, rebuilds the index from their ids, and verifies the checksum of every row, at once or when the row is
read. A damaged row is an error that names it, never a value.
"""

import contextlib
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from jaxgoodput import _disk
from jaxgoodput.embedding.store.appender import Appender, StoreTraffic
from jaxgoodput.embedding.store.compaction import Compactor
from jaxgoodput.embedding.store.folder import Manifest, StoreFolder, commits_in
from jaxgoodput.embedding.store.row_map import RowMap
from jaxgoodput.embedding.store.segment import Segment

SEGMENT_BYTES = 2**27


class StoredRows(NamedTuple):
    """What `RowStore.get` returns: the rows of the ids that have one."""

    found: Bool[np.ndarray, " n"]
    """Whether each id has a row."""
    rows: UInt64[np.ndarray, "found words"]
    """Rows of the ids that were found, in their order."""


class RowStore:
    """Rows of one width in a folder that one process holds. Thread-safe.

    Raises (by the constructor):
      InUse: another process holds the folder.
      DamagedError: the commit is damaged. The message says which commit is whole; a damaged segment is moved
        to `damaged/`.
      ValueError: the stored rows have another width, or there is no such commit.
      OSError: the disk refuses.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        *,
        row_bytes: int,
        num_ids: int | None = None,
        at: int | None = None,
        checks_rows: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        keep: int = 2,
        compacts: bool = True,
    ):
        """Open a store, or create it.

        Args:
          folder: where the files are.
          row_bytes: size of a row, a multiple of 8.
          num_ids: limit of ids, if there is one: the index then takes 4 bytes for each possible id.
          at: commit to go back to; 0 = before the first. The next commit deletes the commits after it, except
            those in its `keep`.
          checks_rows: whether to verify every row now. Otherwise a row is verified when it is read.
          segment_bytes: size at which a segment is full.
          keep: number of commits that stay.
          compacts: whether a background thread compacts stale segments; `compact` does so on request.
        """
        if row_bytes < 8 or row_bytes % 8:
            raise ValueError(
                f"row_bytes={row_bytes} must be a multiple of 8, at least 8. Pad rows."
            )
        self.folder = pathlib.Path(folder)
        self.row_bytes = row_bytes
        self.traffic = StoreTraffic()
        self._rows = RowMap(segment_bytes // row_bytes, num_ids)
        self._is_closed = False
        with contextlib.ExitStack() as held:
            (self.folder / "commits").mkdir(parents=True, exist_ok=True)
            held.enter_context(_disk.held(self.folder))
            self._folder = StoreFolder(self.folder, row_bytes, self._rows, keep=keep)
            segments = self._folder.load(at, checks_rows=checks_rows)
            self._check_sizes(segments, num_ids)
            self._rows.load(segments)
            if at != 0:  # otherwise the old commits, and their segments, stay until the next commit
                self._folder.delete_unused()
            self._held = held.pop_all()
        self._appender = Appender(
            self._folder, self._rows, self.traffic, on_full=lambda: self._compactor.wake()
        )
        self._compactor = Compactor(
            self._folder, self._rows, self._appender, self.traffic, in_background=compacts
        )

    def _check_sizes(self, segments: Sequence[Segment], num_ids: int | None) -> None:
        largest = max((int(s.ids.max()) for s in segments if len(s.ids)), default=-1)
        if num_ids is not None and largest >= num_ids:
            raise ValueError(
                f"{self.folder} holds the row of id {largest}, and ids below {num_ids} were asked for. "
                f"Open it with num_rows={largest + 1} or more (num_ids of a store), or use another folder."
            )
        for segment in segments:
            if len(segment.ids) > self._rows.max_rows:
                raise ValueError(
                    f"{segment.path} holds {len(segment.ids)} rows, and segments of at most "
                    f"{self._rows.max_rows} were asked for. Open the store with its former segment_bytes."
                )

    def __enter__(self) -> "RowStore":
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder. Rows that were not committed are lost. Idempotent."""
        self._is_closed = True
        self._compactor.close()
        self._appender.close()
        self._held.close()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def newest(self) -> Manifest | None:
        """The newest commit: the one that was opened, or the last one made since; None if there is none."""
        return self._folder.newest

    def commits(self) -> dict[int, Mapping[str, Any]]:
        """Return the metadata of every readable commit by number, newest first."""
        return commits_in(self.folder)

    def get(self, ids: Int64[np.ndarray, " n"]) -> StoredRows:
        """Return the rows of the ids that have one. Raises DamagedFile, naming the row, if one is damaged."""
        found, rows = self._rows.read(ids, self.row_bytes // 8)
        self.traffic.rows_got += len(rows)
        return StoredRows(found, rows)

    def put(self, ids: Int64[np.ndarray, " n"], rows: UInt64[np.ndarray, "n words"]) -> None:
        """Store a row for each id, in place of the one that it had. No id may occur twice.

        Raises OSError if the disk is full or read-only; what was committed is intact.
        """
        if rows.shape[1] * 8 != self.row_bytes:
            raise ValueError(
                f"rows of {rows.shape[1] * 8} bytes do not fit a store of rows of {self.row_bytes} "
                "bytes. Put rows as wide as the store was opened for."
            )
        self._compactor.raise_failure()
        with self._appender.lock:
            self._raise_if_closed()
            self._appender.append(ids, rows)
        self.traffic.rows_put += len(ids)
        self.traffic.bytes_put += rows.nbytes
        self.traffic.bytes_written += rows.nbytes
        self._compactor.wake_if_worth()

    def ids(self) -> Int64[np.ndarray, " n"]:
        """Return the ids of all rows, in ascending order."""
        return self._rows.ids()

    def commit(self, about: Mapping[str, Any] | None = None, *, keep: Collection[int] = ()) -> int:
        """Make all rows durable, store the metadata `about` with them, and return the commit's number.

        The newest commits of this lineage stay, and the ones that `keep` names. Raises OSError if the disk
        refuses; the commit before stays the newest.
        """
        self._compactor.raise_failure()
        with self._appender.lock:
            self._raise_if_closed()
            self._appender.retire()
            self._appender.finish()
            number = self._folder.commit(dict(about or {}), keep)
            self._compactor.retry()
        return number

    def compact(self) -> bool:
        """Rewrite segments with many outdated rows; return whether there were any."""
        self._raise_if_closed()
        return self._compactor.compact()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"{self.folder} was closed, and may belong to another process now. Open it again to write."
            )
