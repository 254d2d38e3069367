"""Reads micro-batches before they are asked for, whatever the batch size does next.

A thread works ahead of the training loop. What it has read is speculation about the next configuration: the
*head*, the first sample that was not handed out, moves only when micro-batches are taken. If the shape of
a micro-batch changes, everything that was read ahead is dropped, and reading restarts at the head. A
micro-batch is a run of consecutive samples, so a change of `num_micro_batches` alone drops nothing.

If several threads read the source (`readers`), reads of later micro-batches begin before the first one is
finished. If a single thread reads it quickly, several small micro-batches are read and put on the devices
together: beside short steps, waking a thread and calling JAX takes longer than reading.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding

from jaxgoodput._jax import settings_here
from jaxgoodput._worker import Worker
from jaxgoodput.data.micro_batches import (
    DataEnd,
    MicroBatchReader,
    PendingRead,
    Places,
    Portion,
    Position,
    ReadFailure,
)
from jaxgoodput.goodput.search import BatchConfig

T = TypeVar("T")

MEANWHILE_S = 0.1  # between two calls of `meanwhile`
# Micro-batches that are read together, at most, how long that may take, and how much they may hold.
TOGETHER, QUICK_S, SMALL_BYTES = 8, 5e-3, 2**20

Pending = deque[PendingRead | ReadFailure | DataEnd]


class ReadAhead:
    """A queue of micro-batches, and the thread that fills it.

    `num_batches` is the number of batches that are read ahead; 0 reads on the caller's thread.
    """

    def __init__(
        self,
        reader: MicroBatchReader,
        *,
        num_batches: int,
        position: Position,
        sharding: NamedSharding,
    ):
        self._reader = reader
        self._num_batches = num_batches
        self._worker: Worker | None = None
        # The thread and its owner share the rest, under this lock.
        self._changed = threading.Condition()
        self._is_closed = False
        self._config: BatchConfig | None = None
        self._sharding = sharding
        self._generation = 0  # grows when what was read ahead is dropped
        self._head = position  # first sample not handed out
        self._tail = position  # first sample not read
        self._queue: deque[Portion | ReadFailure | DataEnd] = deque()
        self._count = 1  # micro-batches to read together next
        self._has_failed = False  # whether reading several together has failed

    @property
    def head(self) -> Position:
        """The place of the first sample that was not handed out yet."""
        with self._changed:
            return self._head

    @property
    def sharding(self) -> NamedSharding:
        """How the rows of micro-batches lie on the devices."""
        return self._sharding

    def place(self, sharding: NamedSharding) -> None:
        """Put micro-batches on the devices of `sharding` from now on; drop what was read for another."""
        with self._changed:
            if sharding != self._sharding:
                self._sharding = sharding
                self._restart(self._head)

    def go_back(self, position: Position) -> None:
        """Hand out the samples from `position` on once more."""
        with self._changed:
            self._restart(position)

    def configure(self, config: BatchConfig) -> None:
        """Read micro-batches of the sizes that `config` says from now on."""
        with self._changed:
            old = self._config
            if old is None or (old.micro_batch_size, old.num_replicas) != (
                config.micro_batch_size,
                config.num_replicas,
            ):
                self._restart(self._head)
            self._config = config
            self._changed.notify_all()

    def take(self, config: BatchConfig, meanwhile: Callable[[], None]) -> list[Portion]:
        """Hand out the micro-batches of the next batch; fewer or none at the end of the data.

        Calls `meanwhile` now and then while it waits. Raises RuntimeError if a micro-batch could not be read,
        again at every call; the micro-batches before it are handed out first.
        """
        self._require_open()
        count = config.num_micro_batches
        if self._num_batches == 0:
            self._read_now(config)
        elif self._worker is None:
            self._worker = Worker("loader", self._work, within=settings_here())
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._is_closed or self._is_ready(count), MEANWHILE_S
            ):
                meanwhile()
            self._require_open()
            portions = []
            for entry in list(self._queue)[:count]:
                if isinstance(entry, ReadFailure):
                    raise RuntimeError(entry.message) from entry.error
                if isinstance(entry, Portion):
                    portions.append(entry)
            if not portions or (self._reader.drop_last and len(portions) < count):
                return []
            for _ in portions:
                self._queue.popleft()
            # Not what is handed out now, which may be handed out once more.
            self._reader.release(self._head)
            self._head = portions[-1].after
            self._changed.notify_all()
            return portions

    def hand_out_unread(self, most: int) -> tuple[Position, Places] | None:
        """Hand out up to `most` samples that the caller reads itself, with `MicroBatchReader.read_part`.

        Returns the position before these samples, and their places; None at the end of the data, or if
        `drop_last` is set and fewer than `most` are left. What was read ahead is dropped.
        """
        self._require_open()
        with self._changed, jax.transfer_guard("allow"):
            before = self._head
            self._reader.release(before)  # not earlier: parts of the last batch were read until now
            places = self._reader.places(before, most)
            if places is None:
                return None
            self._restart(places.after)
            return before, places

    def close(self, timeout_s: float | None) -> bool:
        """End the thread, and drop what was read ahead. Return False if the thread still runs.

        `timeout_s` limits the wait for a read in progress; None does not wait.
        """
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify_all()
            worker, self._worker = self._worker, None
        if worker is None or timeout_s is None:
            return True
        return worker.join(timeout_s)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "The Loader is closed and hands out nothing more. Make a new one from its `cursor`."
            )

    # -- under the lock --------------------------------------------------------------------------

    def _restart(self, position: Position) -> None:
        """Drop all micro-batches that were read ahead, and continue at `position`."""
        self._head = self._tail = position
        self._config = None
        self._queue.clear()
        self._count = 1
        self._generation += 1

    def _is_ready(self, count: int) -> bool:
        return len(self._queue) >= count or self._has_ended()

    def _has_ended(self) -> bool:
        """Return whether the queue ends with a failure or the end of the data, so that nothing can follow."""
        return bool(self._queue) and not isinstance(self._queue[-1], Portion)

    def _room(self) -> int:
        """Return how many more micro-batches the queue of micro-batches read ahead may take."""
        if self._config is None or self._has_ended():
            return 0
        most = max(self._num_batches * self._config.num_micro_batches, self._count // 2)
        return most - len(self._queue)

    def _may_begin(self, pending: Pending) -> bool:
        """Return whether to begin to read another micro-batch after `pending` was begun."""
        readers = self._reader.readers
        if not pending or not readers.are_threads:
            return not pending and self._room() > 0
        if self._config is None or not isinstance(pending[-1], PendingRead):
            return False
        # Begin as many as keep all reading threads busy, even beyond the room in the queue.
        num_reads = sum(len(one.reading.reads) for one in pending if isinstance(one, PendingRead))
        return len(pending) < self._room() or num_reads < 2 * readers.num_threads

    def _append(
        self, found: list[Portion] | ReadFailure | DataEnd, generation: int, *, count: int = 1
    ) -> None:
        """Take in what was found when `count` micro-batches were read together."""
        if generation != self._generation:
            return  # read for a configuration that is no longer wanted
        if isinstance(found, list):
            self._tail = found[-1].after
            self._count = self._next_count(found)
            self._queue.extend(found)
        elif isinstance(found, ReadFailure) and count > 1 and isinstance(found.error, Exception):
            # Those before the one that fails are handed out, and it is named.
            self._count, self._has_failed = 1, True
            logging.warning(
                "%d micro-batches that were read together could not be loaded (%s: %s). They are read one by "
                "one from here on.",
                count,
                type(found.error).__name__,
                found.error,
            )
        else:
            self._queue.append(found)
        self._changed.notify_all()

    def _next_count(self, found: list[Portion]) -> int:
        """Return how many micro-batches to read together after `found`: twice as many if that was quick."""
        reader = self._reader
        if reader.readers.are_threads or self._num_batches == 0 or self._has_failed:
            return 1
        if not reader.may_read_ahead(TOGETHER * (self._num_batches + 1) * len(found[0].indices)):
            return 1
        num_bytes = sum(x.nbytes for x in jax.tree.leaves(found[0].micro_batch.data))
        limits = (2 * len(found), TOGETHER, SMALL_BYTES // max(num_bytes, 1))
        if found[0].read_s > 0:
            limits = (*limits, int(QUICK_S / found[0].read_s))
        return max(min(limits), 1)

    # -- filling the queue -----------------------------------------------------------------------

    def _read_now(self, config: BatchConfig) -> None:
        # The loop's transfer guard is not meant for what a user's data set does.
        with self._changed, jax.transfer_guard("allow"):
            while not self._is_ready(config.num_micro_batches):
                pending = self._reader.begin(self._tail, config, self._sharding)
                self._append(self._reader.finish(pending), self._generation)

    def _work(self, worker: Worker) -> None:
        pending: Pending = deque()  # micro-batches being read, in order
        generation = -1  # of `pending`
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work(pending, generation))  # noqa: B023
                if self._is_closed or generation != self._generation:
                    _drop(pending)
                if self._is_closed:
                    return
                generation = self._generation
                begins, finishes = self._may_begin(pending), bool(pending) and self._room() > 0
                config, sharding, position = self._config, self._sharding, self._tail
                count = self._count
                if pending and isinstance(pending[-1], PendingRead):
                    position = pending[-1].places.after
            if begins:
                assert config is not None  # otherwise there is no room
                begin = partial(self._reader.begin, position, config, sharding, count)
                pending.append(_caught(begin, position))
            elif finishes:
                self._finish(pending, generation)

    def _has_work(self, pending: Pending, generation: int) -> bool:
        is_outdated = bool(pending) and generation != self._generation
        can_finish = bool(pending) and self._room() > 0
        return self._is_closed or is_outdated or can_finish or self._may_begin(pending)

    def _finish(self, pending: Pending, generation: int) -> None:
        first = pending.popleft()
        before, count = self._tail, 1
        if isinstance(first, PendingRead):
            before, count = first.before, first.count
        found = _caught(partial(self._reader.finish, first), before)
        if not isinstance(found, list):
            _drop(pending)  # nothing behind a failure or the end is wanted
        with self._changed:
            if not self._is_closed:
                self._append(found, generation, count=count)
        # On return, no reference to the micro-batch is left here: the loop alone decides when it is freed.


def _caught(make: Callable[[], T], position: Position) -> T | ReadFailure:
    """Call `make`, and turn any error into a failure.

    That includes SystemExit, which would end the thread and leave the loop waiting for ever.
    """
    try:
        return make()
    except BaseException as error:
        return ReadFailure.of(error, position, np.empty(0, np.int64))


def _drop(pending: Pending) -> None:
    """Cancel the reads of this micro-batch, as it will not be handed out."""
    for one in pending:
        if isinstance(one, PendingRead):
            one.reading.cancel()
    pending.clear()
