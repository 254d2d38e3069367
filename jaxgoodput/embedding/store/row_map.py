"""Maps ids to rows: which segment holds the newest row of an id, and how many rows of a segment are live."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from jaxgoodput.embedding.index import MISSING, index_for
from jaxgoodput.embedding.store.segment import Segment, SegmentWriter

COPIED_AT_ONCE = 4096  # rows copied while they are in the processor's cache


class LiveRows(NamedTuple):
    """The live rows of a segment: the ones for which no newer row was written."""

    segment: Segment | SegmentWriter
    ids: Int64[np.ndarray, " n"]
    positions: Int64[np.ndarray, " n"]


class RowMap:
    """Maps each id to its newest row. Thread-safe.

    A segment has a number while it is in the map. The location of a row is one 32-bit value: the number of
    its segment in the high bits, its position in the segment in the low `shift` bits. `max_rows`, rounded
    down to a power of two, is the most rows of a segment; `num_ids` is the limit of ids, if known.
    """

    def __init__(self, max_rows: int, num_ids: int | None):
        self._shift = max(max_rows.bit_length() - 1, 8)
        self.max_rows = 2**self._shift
        self._lock = threading.Lock()
        self._index = index_for(num_ids)
        self._segments: dict[int, Segment | SegmentWriter] = {}
        self._num_live: dict[int, int] = {}
        self._order: list[int] = []  # a row in a later segment replaces an earlier one

    def __len__(self) -> int:
        """The number of ids that have a row."""
        with self._lock:
            return sum(self._num_live.values())

    def read(
        self, ids: Int64[np.ndarray, " n"], row_words: int
    ) -> tuple[Bool[np.ndarray, " n"], UInt64[np.ndarray, "found words"]]:
        """Return which ids have a row, and copies of these rows in the order of the ids."""
        with self._lock:
            locations = self._index.get(ids)
            segments = dict(self._segments)  # one that is compacted away meanwhile stays readable
        found = locations != MISSING
        return found, self._gather(
            locations if found.all() else locations[found], segments, row_words
        )

    def _gather(
        self,
        locations: np.ndarray,
        segments: Mapping[int, Segment | SegmentWriter],
        row_words: int,
    ) -> np.ndarray:
        rows = np.empty((len(locations), row_words), np.uint64)
        # Rows are read in the order of the disk. Location and target are packed into one number, because
        # sorting numbers is several times as fast as argsort.
        keys = locations.astype(np.uint64) << np.uint64(32)
        keys |= np.arange(len(keys), dtype=np.uint64)
        keys.sort()
        targets = (keys & np.uint64(2**32 - 1)).astype(np.int64)
        positions = (keys >> np.uint64(32)).astype(np.int64)
        numbers = positions >> self._shift
        positions &= self.max_rows - 1
        ends = [*(np.flatnonzero(np.diff(numbers)) + 1), len(numbers)] if len(numbers) else []
        start = 0
        for end in ends:
            segment = segments[int(numbers[start])]
            for at in range(start, end, COPIED_AT_ONCE):
                upto = min(at + COPIED_AT_ONCE, end)
                rows[targets[at:upto]] = segment.take(positions[at:upto])
            start = end
        return rows

    def put(self, ids: Int64[np.ndarray, " n"], number: int, first: int) -> None:
        """Note that rows of these ids lie in segment `number`, one after another from position `first` on."""
        locations = self._locations(number, first, len(ids))
        with self._lock:
            self._point(ids, locations, number)

    def ids(self) -> Int64[np.ndarray, " n"]:
        """Return all ids that have a row, in ascending order."""
        with self._lock:
            found = [self._live(number).ids for number in self._order]
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    # -- segments ------------------------------------------------------------------------------------

    def add(self, segment: Segment | SegmentWriter) -> int:
        """Add a segment behind the others, and return its number. Raises ValueError if there are too many."""
        with self._lock:
            self._order.append(number := self._register(segment))
            return number

    def load(self, segments: Iterable[Segment]) -> None:
        """Add the segments of a commit, all of them finished, and note which rows they hold."""
        for segment in segments:
            number, ids = self.add(segment), np.asarray(segment.ids)
            self._index.put(ids, self._locations(number, 0, len(ids)))
        for number in self._order:
            self._num_live[number] = len(self._live(number).ids)

    def finish(self, number: int, segment: Segment) -> None:
        """Replace a segment's writer by the segment itself, as its file is now complete."""
        with self._lock:
            self._segments[number] = segment

    def remove(self, number: int) -> None:
        """Remove a segment all of whose rows were replaced by newer ones."""
        with self._lock:
            self._remove(number)

    def finished(self) -> list[Segment]:
        """Return all segments, the oldest first. All of them must be finished."""
        with self._lock:
            segments = [self._segments[number] for number in self._order]
        finished = [segment for segment in segments if isinstance(segment, Segment)]
        assert len(finished) == len(segments)  # the caller has retired the active one
        return finished

    def file_names(self) -> set[str]:
        """Return the file names of all segments."""
        with self._lock:
            return {segment.path.name for segment in self._segments.values()}

    def occupancy(self) -> tuple[list[int], list[int], list[int]]:
        """Return the numbers of the finished segments in order, their row counts and live row counts."""
        with self._lock:
            numbers = [n for n in self._order if isinstance(self._segments[n], Segment)]
            sizes = [len(self._segments[n].ids) for n in numbers]
            return numbers, sizes, [self._num_live[n] for n in numbers]

    def live(self, numbers: Sequence[int]) -> dict[int, LiveRows]:
        """Return, by number of segment, the rows that no newer row has replaced."""
        with self._lock:
            return {number: self._live(number) for number in numbers}

    def replace(self, old: Mapping[int, LiveRows], segment: Segment | None) -> None:
        """Replace segments by one that holds the rows that were live in them; None if there were none.

        The new segment takes the place of the last old one in the order: all rows that replace one of its
        rows come later. Rows that were put since `live` stay the newest.
        """
        with self._lock:
            last = max(self._order.index(number) for number in old)
            if segment is not None:
                number, ids = self._register(segment), np.asarray(segment.ids)
                before = np.concatenate([x.positions + (n << self._shift) for n, x in old.items()])
                # Rows that were put since `live` was called are elsewhere, and their copies here are stale.
                current = np.flatnonzero(self._index.get(ids) == before.astype(np.uint32))
                locations = current.astype(np.uint32) + np.uint32(number << self._shift)
                self._point(ids[current], locations, number)
                self._order.insert(last + 1, number)
            for number in old:
                self._remove(number)

    # The caller of the methods below holds `_lock`, or is the only thread.

    def _register(self, segment: Segment | SegmentWriter) -> int:
        number = next(i for i in range(len(self._segments) + 1) if i not in self._segments)
        if (number + 1) << self._shift >= MISSING:
            raise ValueError(
                f"{segment.path.parent} has {len(self._segments)} segments, more than the index can tell "
                "apart. Make segment_bytes larger, or commit less often."
            )
        self._segments[number], self._num_live[number] = segment, 0
        return number

    def _remove(self, number: int) -> None:
        self._order.remove(number)
        del self._segments[number], self._num_live[number]

    def _locations(self, number: int, first: int, count: int) -> np.ndarray:
        start = (number << self._shift) + first
        return np.arange(start, start + count, dtype=np.uint32)

    def _point(self, ids: np.ndarray, locations: np.ndarray, number: int) -> None:
        old = self._index.put(ids, locations)
        before = np.bincount((old[old != MISSING] >> np.uint32(self._shift)).astype(np.int64))
        for other in np.flatnonzero(before):
            self._num_live[int(other)] -= int(before[other])
        self._num_live[number] += len(ids)

    def _live(self, number: int) -> LiveRows:
        segment = self._segments[number]
        ids = segment.ids
        positions = np.flatnonzero(
            self._index.get(np.asarray(ids)) == self._locations(number, 0, len(ids))
        )
        return LiveRows(segment, np.asarray(ids[positions]), positions)
