"""A 32-bit number for each id, looked up and changed for many ids at once.

There are two kinds. `HashIndex` takes any ids: open addressing with linear probing, 12 bytes a cell, where
whole arrays of ids probe together. `DirectIndex` is an array over all possible ids: 4 bytes for each, except
that memory pages that were never written to take no memory.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, UInt32

from jaxgoodput._hash import mixed

MISSING = np.uint32(2**32 - 1)
EMPTY, REMOVED = -1, -2  # in cells; ids are not negative
MAX_LOAD = (
    0.6  # share of cells in use, removed ids included; a lookup then probes 1.8 cells on average
)
MIN_CELLS = 1024
DIRECT_LIMIT = 2**28  # ids for which an array over all of them is 1 GiB


@runtime_checkable
class Index(Protocol):
    """A map from ids to numbers below 2^32 - 1. If an id occurs twice in one call, the last number stays."""

    def get(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        """Return the number that is stored for each id, or `MISSING` if there is none."""
        ...

    def put(
        self, ids: Int64[np.ndarray, " n"], numbers: UInt32[np.ndarray, " n"]
    ) -> UInt32[np.ndarray, " n"]:
        """Store a number for each id, and return the numbers that were stored before."""
        ...

    def remove(self, ids: Int64[np.ndarray, " n"]) -> None:
        """Remove these ids, all of which must be in the index."""
        ...


def index_for(num_ids: int | None, num_rows: int | None = None) -> Index:
    """Return the smaller kind of index for ids below `num_ids`, at most `num_rows` of them at once.

    None means any id, and any number of rows.
    """
    if num_ids is None or num_ids > DIRECT_LIMIT:
        return HashIndex()
    if num_rows is not None and num_rows * 12 / MAX_LOAD * 2 < num_ids * 4:
        return HashIndex()
    return DirectIndex(num_ids)


class DirectIndex:
    """An index that is an array over all possible ids; see `Index`."""

    def __init__(self, num_ids: int):
        # Number + 1, so that untouched memory is "missing".
        self._next = np.zeros(num_ids, np.uint32)

    def get(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        """Return the number of each id, or `MISSING`: the array holds number + 1, so 0 - 1 wraps to it."""
        return self._next.take(ids) - np.uint32(1)

    def put(
        self, ids: Int64[np.ndarray, " n"], numbers: UInt32[np.ndarray, " n"]
    ) -> UInt32[np.ndarray, " n"]:
        """Store a number for each id, and return the numbers that were stored before."""
        old = self.get(ids)
        self._next[ids] = numbers + np.uint32(1)
        return old

    def remove(self, ids: Int64[np.ndarray, " n"]) -> None:
        """Remove these ids, all of which must be in the index."""
        self._next[ids] = 0


class HashIndex:
    """An index that is a hash table; see `Index`. It grows before `MAX_LOAD` of its cells are in use."""

    def __init__(self):
        self._clear(MIN_CELLS)

    def _clear(self, num_cells: int) -> None:
        self._ids = np.full(num_cells, EMPTY, np.int64)
        self._numbers = np.zeros(num_cells, np.uint32)
        self._size = 0
        self._num_used = 0  # cells of present and of removed ids

    def get(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        """Return the number that is stored for each id, or `MISSING` if there is none."""
        cells = self._cells_of(ids)
        return np.where(cells < 0, MISSING, self._numbers[cells])

    def put(
        self, ids: Int64[np.ndarray, " n"], numbers: UInt32[np.ndarray, " n"]
    ) -> UInt32[np.ndarray, " n"]:
        """Store a number for each id, and return the numbers that were stored before."""
        cells = self._cells_of(ids)
        is_new = cells < 0
        old = np.where(is_new, MISSING, self._numbers[cells])
        fresh = np.flatnonzero(is_new)
        if len(fresh):
            if self._make_room(len(fresh)):
                cells = self._cells_of(ids)
            cells[fresh] = self._claim(ids[fresh])
        self._numbers[cells] = numbers
        return old

    def remove(self, ids: Int64[np.ndarray, " n"]) -> None:
        """Remove these ids, all of which must be in the index."""
        self._ids[self._cells_of(ids)] = REMOVED
        self._size -= len(ids)

    def _cells_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the cell of the hash table that holds each id, -1 if none does."""
        last = len(self._ids) - 1
        cells = (mixed(ids) & np.uint64(last)).astype(np.int64)
        there = self._ids.take(cells)
        probing = np.flatnonzero((there != ids) & (there != EMPTY))
        cells[there == EMPTY] = -1
        while len(probing):
            cells[probing] = (cells[probing] + 1) & last
            there = self._ids.take(cells[probing])
            cells[probing[there == EMPTY]] = -1
            probing = probing[(there != ids[probing]) & (there != EMPTY)]
        return cells

    def _claim(self, ids: np.ndarray) -> np.ndarray:
        """Give a cell to each of `ids`, none of which is present, and return the cells."""
        last = len(self._ids) - 1
        cells = (mixed(ids) & np.uint64(last)).astype(np.int64)
        waiting = np.arange(len(ids))
        while len(waiting):
            wanted = cells[waiting]
            there = self._ids.take(wanted)
            free = there < 0
            # All write at once. If several want one cell, the last write wins and the others probe on.
            self._ids[wanted[free]] = ids[waiting[free]]
            lost = self._ids.take(wanted) != ids[waiting]
            self._num_used += int(np.count_nonzero((there == EMPTY) & ~lost))
            waiting = waiting[lost]
            cells[waiting] = (cells[waiting] + 1) & last
        self._size += len(ids)
        return cells

    def _make_room(self, num_more: int) -> bool:
        """Rebuild the hash table if `num_more` ids do not fit; return whether it was rebuilt."""
        if self._num_used + num_more <= MAX_LOAD * len(self._ids):
            return False
        num_cells = MIN_CELLS
        # Half as much again, so that cells of removed ids do not cause a rebuild at every call.
        while MAX_LOAD * num_cells < 1.5 * (self._size + num_more):
            num_cells *= 2
        there = np.flatnonzero(self._ids >= 0)
        ids, numbers = self._ids[there], self._numbers[there]
        self._clear(num_cells)
        self._numbers[self._claim(ids)] = numbers
        return True
