"""New rows of a store: the active segment, and the full ones that are not finished yet."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

from jaxgoodput.embedding.store.folder import StoreFolder
from jaxgoodput.embedding.store.row_map import RowMap
from jaxgoodput.embedding.store.segment import SegmentWriter


@dataclass
class StoreTraffic:
    """How much a store has written and read since it was opened."""

    rows_put: int = 0
    rows_got: int = 0
    bytes_put: int = 0
    bytes_written: int = 0
    """Bytes of segments that were written, compaction included."""
    num_compactions: int = 0

    @property
    def write_amplification(self) -> float:
        """Bytes written to the disk for each byte that was put."""
        return self.bytes_written / self.bytes_put if self.bytes_put else 1.0


class Appender:
    """Appends rows to the active segment and begins a new one when it is full.

    `lock` makes writers take turns; the caller of `append` and `retire` holds it. `on_full` is called when a
    segment is full, and should have another thread call `finish`.
    """

    def __init__(
        self,
        folder: StoreFolder,
        rows: RowMap,
        traffic: StoreTraffic,
        on_full: Callable[[], None],
    ):
        self.lock = threading.Lock()
        self._folder, self._rows, self._traffic = folder, rows, traffic
        self._on_full = on_full
        self._active: tuple[int, SegmentWriter] | None = None  # with its number in the map
        self._full: dict[int, SegmentWriter] = {}
        self._finishing = threading.Lock()

    def append(self, ids: Int64[np.ndarray, " n"], rows: UInt64[np.ndarray, "n words"]) -> None:
        """Write rows, and note that their ids' newest rows are these. Raises OSError if the disk refuses."""
        start = 0
        while start < len(ids):
            number, writer = self._with_room()
            end, first = min(start + writer.room, len(ids)), writer.num_rows
            with self._folder.explained():
                writer.append(ids[start:end], rows[start:end])
            self._rows.put(ids[start:end], number, first)
            start = end

    def _with_room(self) -> tuple[int, SegmentWriter]:
        if self._active is not None and self._active[1].room == 0:
            self.retire()
            self._on_full()
        if self._active is None:
            writer = self._folder.new_writer(self._rows.max_rows)
            try:
                self._active = self._rows.add(writer), writer
            except BaseException:
                self._folder.discard(writer)
                raise
            self._folder.unpin(writer.path.name)
        return self._active

    def retire(self) -> None:
        """Write no more rows into the active segment; `finish` completes its file later."""
        if self._active is None:
            return
        (number, writer), self._active = self._active, None
        if writer.num_rows:
            self._full[number] = writer
        else:  # the disk refused its first rows
            self._rows.remove(number)
            self._folder.discard(writer)

    def finish(self) -> None:
        """Write the footers of full segments, and replace their writers in the row map. Thread-safe."""
        with self._finishing:
            # A copy, because `retire` may add a segment at any time, under the other lock.
            for number, writer in dict(self._full).items():
                segment = self._folder.finish(writer)
                self._traffic.bytes_written += segment.path.stat().st_size - segment.rows.nbytes
                self._rows.finish(number, segment)
                del self._full[number]

    def close(self) -> None:
        """Close all files. Rows that were not committed are lost."""
        with self.lock:
            self.retire()
            for writer in self._full.values():
                writer.close()
