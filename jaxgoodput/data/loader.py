"""Hands out batches of any size, already on the devices, with every sample exactly once.

The global micro-batch is the next `num_replicas * micro_batch_size` samples, reshaped to
`[num_replicas, micro_batch_size]`. Each process reads the rows that its own devices hold. In
an elastic job each process has a mesh of its own, and process p of P feeds replicas `p * R / P` to
`(p + 1) * R / P`.

A stream cannot be read again, so it keeps its samples until they are handed out. Every process reads the
whole of it.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int, PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.data.micro_batches import (
    MicroBatch,
    MicroBatchReader,
    Places,
    Portion,
    Position,
    ReadFailure,
)
from jaxgoodput.data.read_ahead import ReadAhead
from jaxgoodput.data.sources import Source
from jaxgoodput.data.streams import StreamSource, StreamState
from jaxgoodput.goodput.search import BatchConfig

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class StepBatch:
    """The samples of one step, which is one update of the parameters."""

    micro_batches: tuple[MicroBatch, ...]
    """`config.num_micro_batches` micro-batches. A run's last batch may have fewer, and a smaller last one."""
    config: BatchConfig
    """Configuration for which the samples were divided into micro-batches."""
    num_samples: int
    """Number of samples, over all processes, without padding."""
    before: Cursor
    """Place of the first sample."""
    after: Cursor
    """Place behind the last sample."""
    num_padded: int
    """Number of padding rows, over all processes."""
    wait_s: float
    """Seconds that `Loader.next` blocked."""
    indices: Int[np.ndarray, " num_samples"]
    """Indices of the samples in order, over all processes."""
    parts: Iterator[MicroBatch] | None = None
    """Parts that this process takes, instead of `micro_batches`. Each is read when it is asked for."""
    count: int = 1
    """Updates that are made of it, one after the other: see `Loader.next_block`."""
    first: int | None = None
    """Number of the first of these updates among those for which its micro-batch has the rows; None if it
    has the rows of this batch alone."""
    read_s: float = 0.0
    """Seconds that the loader's thread spent reading this process's part, mostly in the background. 0 for
    parts and if several threads read, whose time is not known."""

    @property
    def is_whole(self) -> bool:
        """Whether it has as many samples as its configuration says; a run's last batch may have fewer."""
        return self.num_samples == self.count * self.config.global_batch_size


class Loader:
    """Hands out every sample in the cursor's order exactly once, in batches of any configuration.

    Close it, or use it as a context manager. Reading starts with the first `next`. All arguments but
    `process_index` and `sharding` must be equal on all processes.

    Args:
      source: the data set. An endless source is read in its own order, even with `shuffle`.
      sharding: how the rows of a micro-batch lie on the devices. If its mesh spans all processes, a batch is
        a global array; otherwise each process holds its part, `[rows / process_count, ...]`.
      cursor: the first sample to hand out.
      max_samples: number of samples to hand out in total, over all processes; None: no limit.
      drop_last: drop the rest of the samples at the end instead of handing them out as a smaller batch. That
        batch is padded by fewer samples than there are replicas.
      prefetch: number of batches that wait on the devices, besides those in use; 0 reads on the caller's
        thread. Small micro-batches are read up to eight at a time (`read_ahead.TOGETHER`).
      num_readers: see `Readers`.
      num_retries: see `Readers`.
      on_host: function of the rows of every micro-batch, padding included, which is called in the background
        and whose result becomes `MicroBatch.on_host`.
      numbered: hand out `NumberedRows`, which tell the epoch and the index of each sample.

    Raises:
      ValueError: an argument is out of range, or the source is empty.
    """

    def __init__(
        self,
        source: Source,
        *,
        sharding: NamedSharding,
        cursor: Cursor,
        clock: Clock,
        process_index: int = 0,
        process_count: int = 1,
        max_samples: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        shuffle: bool = True,
        num_readers: int | None = 1,
        num_retries: int = 0,
        on_host: Callable[[PyTree], Any] | None = None,
        numbered: bool = False,
    ):
        if not 0 <= process_index < process_count:
            raise ValueError(
                f"process_index={process_index} is not one of {process_count} processes. Pass "
                f"jax.process_index() and jax.process_count()."
            )
        if max_samples is not None and max_samples < 0:
            raise ValueError(
                f"max_samples={max_samples} is negative. Give 0 or more, or None for no limit."
            )
        if prefetch < 0:
            raise ValueError(
                f"prefetch={prefetch} is negative. Give 0 to read on the caller's thread, or more."
            )
        self._reader = MicroBatchReader(
            source=source,
            clock=clock,
            process_index=process_index,
            process_count=process_count,
            max_samples=max_samples,
            drop_last=drop_last,
            shuffle=shuffle,
            num_readers=num_readers,
            num_retries=num_retries,
            on_host=on_host,
            numbered=numbered,
        )
        # Raises for an empty dataset, or for a cursor that another dataset left.
        _, cursor = take(cursor, len(source), 0, shuffle=shuffle)
        self._ahead = ReadAhead(
            self._reader, num_batches=prefetch, position=Position(cursor), sharding=sharding
        )
        self._end: int | None = None  # samples of the run up to its end, from its first epoch on
        if max_samples is not None and not isinstance(source, StreamSource):  # one may end before
            self._end = cursor.num_samples(len(source)) + max_samples
        self._num_ahead = prefetch
        self._clock = clock
        self._config: BatchConfig | None = None
        self._has_warned = False

    @property
    def cursor(self) -> Cursor:
        """The place of the first sample that was not handed out yet, at which a restart resumes."""
        return self._ahead.head.cursor

    @property
    def stream(self) -> StreamState | None:
        """The state to which a stream must be restored to resume from `cursor`; None for other sources."""
        return self._reader.stream_state(self._ahead.head)

    def used(self, cursor: Cursor) -> StreamState | None:
        """Forget what a stream had before `cursor`, as it has been used; return the state to resume there.

        Returns None for other sources. Otherwise the samples of a batch are kept until the next one is taken.
        """
        position = dataclasses.replace(self._ahead.head, cursor=cursor)
        found = self._reader.stream_state(position)
        self._reader.release(position)
        return found

    @property
    def num_retried(self) -> int:
        """Number of reads so far that failed and were repeated."""
        return self._reader.readers.num_retried

    def samples_left(self, batch: StepBatch) -> int | None:
        """Return how many samples will be used after this batch, if batches stay as large.

        Returns None for a stream, and if the number of samples is not limited.
        """
        if self._end is None:
            return None
        left = max(self._end - batch.after.num_samples(self._reader.dataset_size), 0)
        return left - left % batch.config.global_batch_size if self._reader.drop_last else left

    @property
    def dataset_size(self) -> int:
        """Number of samples of an epoch."""
        return self._reader.dataset_size

    def place(self, sharding: NamedSharding) -> None:
        """Put batches on the devices of `sharding` from now on. What was read for another is read again."""
        self._ahead.place(sharding)
        self._config = None

    def go_back(self, cursor: Cursor, num_samples: int) -> None:
        """Hand out again the last `num_samples` samples, the first of which is at `cursor`.

        Use this if batches were taken ahead of the steps that should have used them. A stream still has the
        samples of the batch, or block, that was taken last, and no others.
        """
        head = self._ahead.head
        self._ahead.go_back(Position(cursor, head.handed_out - num_samples))
        self._config = None

    def next(
        self, config: BatchConfig, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """Return the next batch, in the shape of `config`; None after `max_samples` or at a stream's end.

        Returns at once if reading keeps up, and if the configuration is the same as in the previous call or
        differs in `num_micro_batches` only. Otherwise it waits until the micro-batches are read, and calls
        `meanwhile` now and then, which may raise.

        Raises:
          ValueError: `config` cannot be spread over the processes and devices.
          RuntimeError: the source failed, with the cause chained (raised after the batches before it, and
            again by further calls), or the loader is closed.
        """
        return self._next(config, 1, meanwhile)

    def _next(
        self, config: BatchConfig, count: int, meanwhile: Callable[[], None]
    ) -> StepBatch | None:
        """Return the next batch in the shape of `config`, which is for `count` updates."""
        if config != self._config:
            self._check(config)
            self._ahead.configure(config)
            self._config = config
        began_s = self._clock.now()
        before = self._ahead.head.cursor
        portions = self._ahead.take(config, meanwhile)
        if not portions:
            return None
        return self._step_batch(portions, config, count, before, self._clock.now() - began_s)

    def can_read_blocks(self, num_samples: int) -> bool:
        """Whether blocks of so many samples may be read before they are used, and more of them ahead."""
        return self._reader.may_read_ahead((self._num_ahead + 1) * num_samples)

    def next_block(
        self, config: BatchConfig, count: int, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """Return the next `count` batches as one, for as many updates; None at a stream's end.

        Returns one batch if there are fewer samples, as near the end of a stream. The batches have one
        replica and one micro-batch each. They are read and put on the device together, which costs hardly
        more than for one of them, if it is small.
        """
        assert config.num_replicas == config.num_micro_batches == 1
        wide = dataclasses.replace(config, micro_batch_size=count * config.micro_batch_size)
        before = self._ahead.head
        block = self._next(wide, count, meanwhile)
        if block is None or block.num_samples < wide.global_batch_size:
            self._ahead.go_back(before)
            self._config = None
            return self._next(config, 1, meanwhile)
        return dataclasses.replace(block, config=config, first=0)

    def split(self, block: StepBatch, count: int) -> tuple[StepBatch, StepBatch | None]:
        """Return the first `count` updates of a block, and the rest if any; both have the rows of all."""
        if count == block.count:
            return block, None
        assert 0 < count < block.count and block.first is not None
        cursors, size = self.cursors_in(block), block.config.global_batch_size
        parts = []
        for begin, end in ((0, count), (count, block.count)):
            parts.append(
                dataclasses.replace(
                    block,
                    count=end - begin,
                    first=block.first + begin,
                    num_samples=(end - begin) * size,
                    before=cursors[begin],
                    after=cursors[end],
                    wait_s=0.0 if begin else block.wait_s,
                    read_s=block.read_s * (end - begin) / block.count,
                    indices=block.indices[begin * size : end * size],
                )
            )
        return parts[0], parts[1]

    def cursors_in(self, batch: StepBatch) -> list[Cursor]:
        """Return the places before, between and behind the updates that a batch is for."""
        if batch.count == 1:
            return [batch.before, batch.after]
        size, total = batch.config.global_batch_size, self._reader.dataset_size
        inside = [batch.before.later(i * size, total) for i in range(1, batch.count)]
        return [batch.before, *inside, batch.after]

    def next_in_parts(self, config: BatchConfig, lease: Callable[[], int]) -> StepBatch | None:
        """Return the next batch, of which this process takes the parts that `lease` assigns to it.

        Use this if processes differ in speed: a slow one takes fewer parts, and the sum stays the same. A
        part is a micro-batch of the replicas of one process. `lease` counts up over all processes, so each
        part is assigned once. Ask for the next part only when the one before is done. A process that gets no
        part takes one whose mask is 0. Nothing is read ahead.

        Raises:
          ValueError: `config` cannot be spread over the processes and devices.
          RuntimeError: a stream failed, or the loader is closed.
        """
        self._check(config)
        taken = self._ahead.hand_out_unread(config.global_batch_size)
        if taken is None:
            return None
        self._config = None
        before, places = taken
        sharding, count = self._ahead.sharding, len(places.indices)
        num_meshes, _ = self._reader.mesh_of(sharding)
        num_rows = config.num_replicas // num_meshes * config.micro_batch_size
        num_parts = -(-count // num_rows)
        return StepBatch(
            micro_batches=(),
            parts=self._leased(sharding, places, before, num_rows, num_parts, lease),
            config=config,
            num_samples=count,
            before=before.cursor,
            after=places.after.cursor,
            num_padded=num_parts * num_rows - count,
            wait_s=0.0,
            indices=places.indices,
        )

    def close(self, *, wait: bool = True) -> None:
        """End the thread and free what was read ahead. Idempotent.

        A read in progress is waited for. If it takes over 10 s, its thread is left behind with a warning;
        without `wait`, it is left behind at once.
        """
        readers = self._reader.readers
        readers.stop()
        has_ended = self._ahead.close(CLOSE_TIMEOUT_S if wait else None)
        if not wait:
            return
        # If the loader's thread hangs, it waits for a reader that hangs: that was long enough.
        if not readers.join(CLOSE_TIMEOUT_S if has_ended else 0.0) or not has_ended:
            warnings.warn(
                f"The dataset has been reading one micro-batch for over {CLOSE_TIMEOUT_S:.0f} s and "
                f"cannot be interrupted. Its thread ends with that read, or with the process.",
                ResourceWarning,
                stacklevel=2,
            )

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, config: BatchConfig) -> None:
        for name in ("micro_batch_size", "num_micro_batches", "num_replicas"):
            if getattr(config, name) < 1:
                raise ValueError(
                    f"{name}={getattr(config, name)}: a batch needs at least 1 of each."
                )
        num_meshes, _ = self._reader.mesh_of(self._ahead.sharding)
        if config.num_replicas % num_meshes:
            raise ValueError(
                f"num_replicas={config.num_replicas} cannot be split evenly over "
                f"{num_meshes} processes. Use a multiple of {num_meshes}: every "
                f"process feeds as many replicas as it has devices."
            )
        local_replicas = config.num_replicas // num_meshes
        try:
            self._ahead.sharding.shard_shape((local_replicas,))
        except ValueError as error:
            raise ValueError(
                f"num_replicas={config.num_replicas} over {num_meshes} meshes of devices gives "
                f"{local_replicas} replicas here, which cannot be split evenly by {self._ahead.sharding}. "
                f"Use a multiple of {num_meshes} times the product of the mesh axes that its spec names."
            ) from error

    def _step_batch(
        self,
        portions: list[Portion],
        config: BatchConfig,
        count: int,
        before: Cursor,
        wait_s: float,
    ) -> StepBatch:
        indices = np.concatenate([portion.indices for portion in portions])
        dataset_size = self._reader.dataset_size
        if len(indices) > count * dataset_size and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"global_batch_size={config.global_batch_size} is larger than the dataset of "
                f"{dataset_size} samples: a batch holds some samples more than once, though "
                f"each still once per epoch. Lower the maximum of BatchLimits to at most "
                f"{dataset_size} if that is not wanted.",
                stacklevel=3,
            )
        return StepBatch(
            micro_batches=tuple(portion.micro_batch for portion in portions),
            config=config,
            num_samples=len(indices),
            before=before,
            after=portions[-1].after.cursor,
            num_padded=sum(portion.num_rows for portion in portions) - len(indices),
            wait_s=wait_s,
            count=count,
            read_s=sum(portion.read_s for portion in portions),
            indices=indices,
        )

    def _leased(
        self,
        sharding: NamedSharding,
        places: Places,
        before: Position,
        num_rows: int,
        num_parts: int,
        lease: Callable[[], int],
    ) -> Iterator[MicroBatch]:
        """Yield the parts of a micro-batch that `lease` assigns to this process; at least one part."""
        has_any = False
        while (part := lease()) < num_parts or not has_any:
            with jax.transfer_guard("allow"):
                try:
                    micro_batch = self._reader.read_part(part, places, sharding, num_rows)
                except Exception as error:
                    mine = places.indices[part * num_rows : (part + 1) * num_rows]
                    failure = ReadFailure.of(error, before, mine)
                    raise RuntimeError(failure.message) from error
            has_any = True
            yield micro_batch
            if part >= num_parts:
                return
