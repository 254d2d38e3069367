"""Compaction: segments that are mostly stale are replaced by one that holds only their live rows."""

import errno
import threading
from collections.abc import Mapping, Sequence

from absl import logging

from jaxgoodput._worker import QueueWorker
from jaxgoodput.embedding.store.appender import Appender, StoreTraffic
from jaxgoodput.embedding.store.folder import StoreFolder
from jaxgoodput.embedding.store.row_map import COPIED_AT_ONCE, LiveRows, RowMap
from jaxgoodput.embedding.store.segment import Segment

MAX_STALE = 0.5  # share of a segment's rows; above it, the segment is compacted
MANY_SMALL = 16  # segments below a quarter of the full size; above it, they are merged


def to_compact(num_rows: Sequence[int], num_live: Sequence[int], max_rows: int) -> list[int]:
    """Return the indices of the segments that are worth replacing by one; empty if none are.

    These are segments that are more than half stale, emptiest first, and small ones if there are many.

    >>> to_compact([100, 100, 100], [90, 20, 49], max_rows=100)
    [1, 2]
    """
    stale = [i for i, n in enumerate(num_rows) if num_live[i] < (1 - MAX_STALE) * n]
    small = [i for i, n in enumerate(num_rows) if n < max_rows // 4 and i not in stale]
    chosen, sum_live = [], 0
    for i in sorted(stale, key=num_live.__getitem__) + (small if len(small) > MANY_SMALL else []):
        if sum_live + num_live[i] <= max_rows:
            chosen.append(i)
            sum_live += num_live[i]
    return sorted(chosen)


class Compactor:
    """Compacts a store: rewrites segments with outdated rows, on a background thread if `in_background`.

    An error on that thread is raised by the next `raise_failure`. A full disk is not an error: compaction
    pauses until `retry`.
    """

    def __init__(
        self,
        folder: StoreFolder,
        rows: RowMap,
        appender: Appender,
        traffic: StoreTraffic,
        *,
        in_background: bool,
    ):
        self._folder, self._rows, self._traffic = folder, rows, traffic
        self._appender = appender
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._has_room = True
        self._worker: QueueWorker[None] | None = None
        if in_background:
            self._worker = QueueWorker("compaction", self._compact_all, on_error=self._failed)

    def wake(self) -> None:
        """Have the background thread finish full segments and compact; returns without waiting for it."""
        if self._worker is not None and not self._worker.num_waiting:
            self._worker.put(None)

    def wake_if_worth(self) -> None:
        """Wake the background thread if there is something to compact and room to do so."""
        if self._has_room and self._chosen():
            self.wake()

    def retry(self) -> None:
        """Try to compact again after the disk was full, as a commit may have made room."""
        if not self._has_room:
            self._has_room = True
            self.wake()

    def raise_failure(self) -> None:
        """Raise the error with which the background thread failed, if it did; only once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the background thread."""
        if self._worker is not None:
            self._worker.close()

    def compact(self) -> bool:
        """Rewrite the rows in use of segments with many outdated ones; return whether there were any."""
        with self._lock:
            self._appender.finish()
            if not (chosen := self._chosen()):
                return False
            self._rewrite(self._rows.live(chosen))
            self._traffic.num_compactions += 1
            return True

    def _chosen(self) -> list[int]:
        numbers, sizes, live = self._rows.occupancy()
        return [numbers[i] for i in to_compact(sizes, live, self._rows.max_rows)]

    def _rewrite(self, live: Mapping[int, LiveRows]) -> None:
        segment = self._copied(live)
        self._rows.replace(live, segment)
        if segment is not None:
            self._folder.unpin(segment.path.name)
        self._folder.delete_unused()

    def _copied(self, live: Mapping[int, LiveRows]) -> Segment | None:
        """Write live rows to a new segment, which stays pinned; None if there are none."""
        num_rows = sum(len(some.ids) for some in live.values())
        if not num_rows:
            return None
        writer = self._folder.new_writer(num_rows)
        try:
            with self._folder.explained():
                for old, ids, positions in live.values():
                    for at in range(0, len(ids), COPIED_AT_ONCE):
                        some = slice(at, at + COPIED_AT_ONCE)
                        writer.append(ids[some], old.take(positions[some]))
            segment = self._folder.finish(writer)
        except BaseException:
            self._folder.discard(writer)
            raise
        self._traffic.bytes_written += segment.path.stat().st_size
        return segment

    def _compact_all(self, _: None) -> None:
        assert self._worker is not None  # this is its thread
        while not self._worker.is_stopping and self.compact():
            pass

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            logging.warning(
                "the table's files cannot be compacted, because the disk is full: %s. No rows are lost. "
                "It is tried again after the next commit; free some space on that disk.",
                error,
            )
            self._has_room = False
        else:
            self._failure = error
