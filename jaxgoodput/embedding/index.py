"""Where each id's row is: a number of 32 bits per id, looked up and changed for many ids at once.

Two of a kind. `HashIndex` takes any ids: open addressing with linear probing, 12 bytes a cell, whole arrays
of ids probing together. `DirectIndex` is an array over all ids that there may be: 4 bytes for each, whether
it is there or not, of which memory that was never written to takes none.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, UInt32

from jaxgoodput._hash import mixed

MISSING = np.uint32(2**32 - 1)
EMPTY, REMOVED = -1, -2  # ids are not negative
FULLEST = (
    0.6  # of a hash index, cells of removed ids counted: at 0.6 an id is found after 1.8 cells
)
SMALLEST = 1024
DIRECT_LIMIT = 2**28  # ids for which an array over all of them is 1 GiB


@runtime_checkable
class Index(Protocol):
    """Numbers below 2^32 - 1 by id. Of an id that is in one call twice, the last number stays."""

    def get(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        """The numbers of ids, `MISSING` for those that have none."""
        ...

    def put(
        self, ids: Int64[np.ndarray, " n"], numbers: UInt32[np.ndarray, " n"]
    ) -> UInt32[np.ndarray, " n"]:
        """Give ids their numbers; returns those that they had."""
        ...

    def remove(self, ids: Int64[np.ndarray, " n"]) -> None:
        """Forget ids that are there."""
        ...


def index_for(num_ids: int | None, num_rows: int | None = None) -> Index:
    """The smaller index for ids below `num_ids` (None: any) of which at most `num_rows` are there at once."""
    if num_ids is None or num_ids > DIRECT_LIMIT:
        return HashIndex()
    if num_rows is not None and num_rows * 12 / FULLEST * 2 < num_ids * 4:
        return HashIndex()
    return DirectIndex(num_ids)


class DirectIndex:
    """An array over all ids that there may be."""

    def __init__(self, num_ids: int):
        self._next = np.zeros(
            num_ids, np.uint32
        )  # number + 1: what was never written to is missing

    def get(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        """The numbers of ids; 0 - 1 is `MISSING`."""
        return self._next.take(ids) - np.uint32(1)

    def put(
        self, ids: Int64[np.ndarray, " n"], numbers: UInt32[np.ndarray, " n"]
    ) -> UInt32[np.ndarray, " n"]:
        """Give ids their numbers; returns those that they had."""
        old = self.get(ids)
        self._next[ids] = numbers + np.uint32(1)
        return old

    def remove(self, ids: Int64[np.ndarray, " n"]) -> None:
        """Forget ids that are there."""
        self._next[ids] = 0


class HashIndex:
    """Open addressing; grows to twice as many cells as it fills."""

    def __init__(self):
        self._clear(SMALLEST)

    def _clear(self, num_cells: int) -> None:
        self._ids = np.full(num_cells, EMPTY, np.int64)
        self._numbers = np.zeros(num_cells, np.uint32)
        self._size = 0
        self._num_used = 0  # of the cells, by ids that are there or were removed

    def get(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, " n"]:
        """The numbers of ids, `MISSING` for those that have none."""
        cells = self._cells_of(ids)
        return np.where(cells < 0, MISSING, self._numbers[cells])

    def put(
        self, ids: Int64[np.ndarray, " n"], numbers: UInt32[np.ndarray, " n"]
    ) -> UInt32[np.ndarray, " n"]:
        """Give ids their numbers; returns those that they had."""
        cells = self._cells_of(ids)
        is_new = cells < 0
        old = np.where(is_new, MISSING, self._numbers[cells])
        fresh = np.flatnonzero(is_new)
        if len(fresh):
            if self._make_room(len(fresh)):
                cells = self._cells_of(ids)
            cells[fresh] = self._claimed(ids[fresh])
        self._numbers[cells] = numbers
        return old

    def remove(self, ids: Int64[np.ndarray, " n"]) -> None:
        """Forget ids that are there."""
        self._ids[self._cells_of(ids)] = REMOVED
        self._size -= len(ids)

    def _cells_of(self, ids: np.ndarray) -> np.ndarray:
        """Where each id is; -1 where it is not there."""
        last = len(self._ids) - 1
        cells = (mixed(ids) & np.uint64(last)).astype(np.int64)
        there = self._ids.take(cells)
        going_on = np.flatnonzero((there != ids) & (there != EMPTY))
        cells[there == EMPTY] = -1
        while len(going_on):
            cells[going_on] = (cells[going_on] + 1) & last
            there = self._ids.take(cells[going_on])
            cells[going_on[there == EMPTY]] = -1
            going_on = going_on[(there != ids[going_on]) & (there != EMPTY)]
        return cells

    def _claimed(self, ids: np.ndarray) -> np.ndarray:
        """A cell for each of `ids`, which are not there. Of several that want one cell the last has it."""
        last = len(self._ids) - 1
        cells = (mixed(ids) & np.uint64(last)).astype(np.int64)
        waiting = np.arange(len(ids))
        while len(waiting):
            wanted = cells[waiting]
            there = self._ids.take(wanted)
            free = there < 0
            self._ids[wanted[free]] = ids[waiting[free]]
            lost = self._ids.take(wanted) != ids[waiting]
            self._num_used += int(np.count_nonzero((there == EMPTY) & ~lost))
            waiting = waiting[lost]
            cells[waiting] = (cells[waiting] + 1) & last
        self._size += len(ids)
        return cells

    def _make_room(self, num_more: int) -> bool:
        """Whether all that are there had to move."""
        if self._num_used + num_more <= FULLEST * len(self._ids):
            return False
        num_cells = SMALLEST
        # Room for as many again, so that removed ids do not have it done anew with every call.
        while FULLEST * num_cells < 1.5 * (self._size + num_more):
            num_cells *= 2
        there = np.flatnonzero(self._ids >= 0)
        ids, numbers = self._ids[there], self._numbers[there]
        self._clear(num_cells)
        self._numbers[self._claimed(ids)] = numbers
        return True
