"""Makes micro-batches: from a place in the order of samples to arrays on the devices.

Making one has two halves, so that reads can overlap. `MicroBatchReader.begin` works out which samples a
micro-batch holds and begins to read them; `finish` waits for them, checks them, and puts them on the devices.
Several can be made together, which takes hardly longer than one if they are small.
Only this process's part is read. Each process computes its part from the same cursor, so none has to ask
another.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor, Permutations, epochs_of, take
from jaxgoodput.data.readers import Readers, Reading
from jaxgoodput.data.rows import (
    NumberedRows,
    check_same_kind,
    held_rows,
    narrow,
    numbered,
    parts_of,
    put_rows,
)
from jaxgoodput.data.sources import Source, is_endless
from jaxgoodput.data.streams import StreamSource, StreamState
from jaxgoodput.goodput.search import BatchConfig

MOST_HELD = 8  # sizes of micro-batches whose rows and masks are kept


@dataclass(frozen=True)
class MicroBatch:
    """The samples that all replicas of a mesh compute at once, split over the replicas."""

    data: PyTree[jax.Array]
    """Samples of all replicas; leaves `[rows, ...]`. `NumberedRows` if the loader is `numbered`."""
    mask: Float[Array, " rows"]
    """1 for samples, 0 for padding. That repeats a sample of its replica, so that a masked loss is finite."""
    on_host: Any = None
    """Result of the loader's `on_host` function for the same rows."""


@dataclass(frozen=True)
class Position:
    """A place in the order in which samples are handed out."""

    cursor: Cursor
    handed_out: int = 0
    """Samples before this place, counted since the loader was made."""


@dataclass(frozen=True)
class Places:
    """Which samples come next in the order, and in which epoch each is read."""

    indices: Int[np.ndarray, " num_samples"]
    epochs: Int[np.ndarray, " num_samples"]
    after: Position


@dataclass(frozen=True)
class OwnRows:
    """Rows of this process that are being read: its samples, and maybe one more sample to pad with."""

    reading: Reading
    num_samples: int
    """Number of its samples, without the one to pad with."""
    epochs: Int[np.ndarray, " rows"]
    indices: Int[np.ndarray, " rows"]


@dataclass(frozen=True)
class PendingRead:
    """Micro-batches whose samples are still being read, together: one, or several whole ones."""

    before: Position
    places: Places
    """Their samples, over all processes."""
    mine: OwnRows
    """The rows that this process reads."""
    mesh_rows: int
    """Rows of this process's mesh in each, with padding."""
    num_rows: int
    """Rows of all meshes in each, with padding."""
    sharding: NamedSharding
    count: int = 1
    """Number of micro-batches."""

    @property
    def reading(self) -> Reading:
        """The reads of this process's rows."""
        return self.mine.reading


@dataclass(frozen=True)
class Portion:
    """A micro-batch that has been read: this process's part of it, and which samples it has in total."""

    micro_batch: MicroBatch
    num_rows: int
    """Rows over all processes, with padding."""
    indices: Int[np.ndarray, " num_samples"]
    """Samples over all processes."""
    after: Position
    read_s: float = 0.0
    """Seconds that the reader's thread took for it; 0 if samples are read on several threads."""


@dataclass(frozen=True)
class ReadFailure:
    """A micro-batch that could not be read."""

    error: BaseException
    message: str

    @classmethod
    def of(
        cls, error: BaseException, position: Position, indices: Int[np.ndarray, " n"]
    ) -> "ReadFailure":
        """Return the failure for an error in a micro-batch of these samples that begins at `position`."""
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        return cls(
            error,
            f"The micro-batch of samples {shown or '(unknown)'} (epoch {position.cursor.epoch}, offset "
            f"{position.cursor.offset}) could not be loaded. {type(error).__name__}: {error}",
        )


@dataclass(frozen=True)
class DataEnd:
    """No micro-batch follows: the data have ended, or enough samples have been handed out."""


@dataclass(kw_only=True, eq=False)
class MicroBatchReader:
    """Reads this process's part of micro-batches. The fields are `Loader`'s arguments.

    Not thread-safe: one thread at a time begins, and one at a time finishes.
    """

    source: Source
    clock: Clock
    process_index: int
    process_count: int
    max_samples: int | None
    drop_last: bool
    shuffle: bool
    num_readers: int | None
    num_retries: int
    on_host: Callable[[PyTree], Any] | None
    numbered: bool

    def __post_init__(self):
        source = self.source
        self.dataset_size = len(source)
        self.readers = Readers(
            source, clock=self.clock, num_readers=self.num_readers, num_retries=self.num_retries
        )
        self.shuffle = self.shuffle and not is_endless(source)
        self._stream = source if isinstance(source, StreamSource) else None
        self._permutations = Permutations()
        self._kind: PyTree | None = None  # structure, shapes and dtypes of the first batch
        # By sharding and number of rows: which rows this process holds, and the mask without padding; the one
        # used last comes last. The loader's thread and the loop's use it.
        self._held: dict[tuple[NamedSharding, int], tuple[np.ndarray, Array]] = {}
        self._holding = threading.Lock()

    def may_read_ahead(self, num_samples: int) -> bool:
        """Whether so many samples may be read before they are used: any number, but of a live stream."""
        return self._stream is None or self._stream.may_read_ahead(num_samples)

    def stream_state(self, position: Position) -> StreamState | None:
        """Return the state to restore a stream to so as to resume at `position`; None without a stream."""
        return None if self._stream is None else self._stream.state_at(position.cursor.offset)

    def release(self, position: Position) -> None:
        """Forget the samples of a stream before `position`, as they have been handed out."""
        if self._stream is not None:
            self._stream.release(position.cursor.offset)

    def mesh_of(self, sharding: NamedSharding) -> tuple[int, int]:
        """Return how many meshes share a batch, and the number of this process's mesh."""
        return parts_of(sharding, self.process_index, self.process_count)

    def places(self, position: Position, most: int) -> Places | None:
        """Return the next samples from `position` on, `most` at the most; None if there are none left.

        With `drop_last`, returns None if fewer than `most` are left.
        """
        count = most
        if self.max_samples is not None:
            count = min(count, self.max_samples - position.handed_out)
        if self._stream is not None:
            count = self._stream.available(position.cursor.offset, count)
        if count == 0 or (self.drop_last and count < most):
            return None
        indices, after = take(
            position.cursor,
            self.dataset_size,
            count,
            shuffle=self.shuffle,
            permutations=self._permutations,
        )
        epochs = epochs_of(position.cursor, self.dataset_size, count)
        return Places(indices, epochs, Position(after, position.handed_out + count))

    def begin(
        self, position: Position, config: BatchConfig, sharding: NamedSharding, count: int = 1
    ) -> PendingRead | ReadFailure | DataEnd:
        """Begin to read `count` micro-batches from `position` on, without waiting for their samples.

        Begins to read one if there are not so many whole ones. Errors are returned as a ReadFailure, not
        raised.
        """
        indices = np.empty(0, np.int64)
        try:
            size = config.num_replicas * config.micro_batch_size
            places = self.places(position, count * size)
            if count > 1 and (places is None or len(places.indices) < count * size):
                count, places = 1, self.places(position, size)
            if places is None:
                return DataEnd()
            indices = places.indices
            # The last micro-batch has as few rows as possible. Pipeline stages divide a micro-batch into a
            # fixed number of parts, so theirs is padded to full size.
            if sharding.mesh.shape.get("stage", 1) == 1:
                size = -(-len(indices) // (count * config.num_replicas))
                config = dataclasses.replace(config, micro_batch_size=size)
            num_meshes, mesh = self.mesh_of(sharding)
            mesh_rows = config.num_replicas // num_meshes * config.micro_batch_size
            num_rows = mesh_rows * num_meshes
            firsts = [i * num_rows + mesh * mesh_rows for i in range(count)]
            mine = self._begin_rows(sharding, mesh_rows, firsts, places)
            return PendingRead(
                before=position,
                places=places,
                mine=mine,
                mesh_rows=mesh_rows,
                num_rows=num_rows,
                sharding=sharding,
                count=count,
            )
        except Exception as error:  # raised in the loop when this micro-batch is due
            return ReadFailure.of(error, position, indices)

    def finish(
        self, pending: PendingRead | ReadFailure | DataEnd
    ) -> list[Portion] | ReadFailure | DataEnd:
        """Wait for the samples that `begin` began to read, and put them on the devices.

        Errors are returned as a ReadFailure, not raised. A ReadFailure or DataEnd is returned as it is.
        """
        if not isinstance(pending, PendingRead):
            return pending
        began_s = self.clock.now()
        try:
            found = self._assembled(
                pending.mine, pending.sharding, pending.mesh_rows, pending.count
            )
            read_s = 0.0 if self.readers.are_threads else self.clock.now() - began_s
            return list(self._portions(pending, found, read_s / pending.count))
        except Exception as error:  # raised in the loop when this micro-batch is due
            return ReadFailure.of(error, pending.before, pending.places.indices)

    def _portions(
        self, pending: PendingRead, found: Sequence[MicroBatch], read_s: float
    ) -> Iterator[Portion]:
        """Yield each of the micro-batches that were read together, with its samples."""
        before, places = pending.before, pending.places
        size = len(places.indices) // pending.count
        for i, micro_batch in enumerate(found):
            after, done = places.after, (i + 1) * size
            if i + 1 < pending.count:
                cursor = before.cursor.later(done, self.dataset_size)
                after = Position(cursor, before.handed_out + done)
            yield Portion(
                micro_batch=micro_batch,
                num_rows=pending.num_rows,
                indices=places.indices[done - size : done],
                after=after,
                read_s=read_s,
            )

    def read_part(
        self, part: int, places: Places, sharding: NamedSharding, num_rows: int
    ) -> MicroBatch:
        """Read rows `part * num_rows` to `(part + 1) * num_rows` of a batch, on the caller's thread.

        If the batch has fewer rows, the rest is padding. Raises what reading raises.
        """
        mine = self._begin_rows(sharding, num_rows, [part * num_rows], places)
        (found,) = self._assembled(mine, sharding, num_rows)
        return found

    def _begin_rows(
        self, sharding: NamedSharding, num_rows: int, firsts: Sequence[int], places: Places
    ) -> OwnRows:
        """Begin to read the rows that this process holds of parts that begin at rows `firsts`."""
        held, _ = self._whole(sharding, num_rows)
        rows = np.concatenate([first + held for first in firsts])
        mine = rows[rows < len(places.indices)]
        # If rows are missing, one more sample is read to pad with, even if there is no other.
        wanted = mine if len(mine) == len(rows) else np.append(mine, 0)
        indices, epochs = places.indices[wanted], places.epochs[wanted]
        reading = self.readers.begin(indices, epochs)
        return OwnRows(reading, len(mine), epochs, indices)

    def _assembled(
        self, mine: OwnRows, sharding: NamedSharding, num_rows: int, count: int = 1
    ) -> list[MicroBatch]:
        """Wait for the rows of `count` micro-batches, and put them on the devices, in one call."""
        held, full_mask = self._whole(sharding, num_rows)
        num_mine = mine.num_samples
        num_padded = count * len(held) - num_mine
        rows = mine.reading.result()
        self._kind = check_same_kind(rows, self._kind, num_mine + bool(num_padded))
        rows, mask = narrow(rows), full_mask
        if self.numbered:
            rows = numbered(rows, mine.epochs, mine.indices)
        if num_padded:
            filled = _padded(held, num_mine, sharding.shard_shape((num_rows,))[0])
            rows = jax.tree.map(lambda x: x[filled], rows)
            ones = (np.arange(len(held)) < num_mine).astype(np.float32)
            mask = put_rows(ones, held, sharding, num_rows=num_rows)
        each = [rows] if count == 1 else _split(rows, count)
        placed = put_rows(each, held, sharding, num_rows=num_rows)
        return [
            MicroBatch(data=data, mask=mask, on_host=self._computed_on_host(rows))
            for data, rows in zip(placed, each, strict=True)
        ]

    def _computed_on_host(self, rows: PyTree[np.ndarray]) -> Any:
        """Return the result of `on_host` for the rows of a micro-batch."""
        if self.on_host is None:
            return None
        return self.on_host(rows.own if isinstance(rows, NumberedRows) else rows)

    def _whole(self, sharding: NamedSharding, num_rows: int) -> tuple[np.ndarray, Array]:
        """Return which of `num_rows` rows this process holds, and a mask of ones, which is made once.

        Steps alone, blocks of them and last batches take turns, so those of several sizes are kept.
        """
        key = (sharding, num_rows)
        with self._holding:
            found = self._held.pop(key, None)
            if found is None:
                held = held_rows(sharding, num_rows)
                ones = np.ones(len(held), np.float32)
                found = held, put_rows(ones, held, sharding, num_rows=num_rows)
                if len(self._held) >= MOST_HELD:
                    self._held.pop(next(iter(self._held)))
            self._held[key] = found
        return found


def _split(rows: PyTree[np.ndarray], count: int) -> list[PyTree[np.ndarray]]:
    """Split rows into `count` equal parts, one behind the other; without copying."""
    leaves, structure = jax.tree.flatten(rows)
    parts = zip(*(np.split(leaf, count) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(structure, part) for part in parts]


def _padded(held: np.ndarray, num_mine: int, replica_rows: int) -> np.ndarray:
    """Return for each row that is held which of the rows that were read it is.

    The first `num_mine` rows are samples, the rest is padding. Padding repeats the first sample of its
    replica. With zeros a loss could be infinite, and 0 times it is NaN. A replica of padding alone gets the
    sample that was read behind the others. `held` are the numbers of the rows, ascending.

    >>> _padded(np.arange(8), 5, 2)
    array([0, 1, 2, 3, 4, 4, 5, 5])
    """
    first = np.searchsorted(held, held // replica_rows * replica_rows)
    return np.where(
        np.arange(len(held)) < num_mine, np.arange(len(held)), np.minimum(first, num_mine)
    )
