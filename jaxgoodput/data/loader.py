"""Samples on the devices before they are needed, whatever the batch size does next.

One thread walks ahead of the loop: it takes the next micro-batch's indices from the cursor, reads
this process's part of them, and puts it on the devices. The loop's `next` only pops a queue. What
is in the queue is speculation about the next configuration: the consumer's cursor moves only when
samples are handed out, so a change of configuration drops the queue and starts again from there. A
micro-batch is a run of consecutive places of the global order, so a change of `num_micro_batches`
alone drops nothing.

The global micro-batch is the next `num_replicas * micro_batch_size` samples, reshaped to
`[num_replicas, micro_batch_size]`. Each process reads the rows that its own devices hold, and every one
computes this from the same cursor, so that none has to ask another. In an elastic job, where each has a
mesh of its own, process p of P feeds the replicas from `p * R / P` up to `(p + 1) * R / P`.
"""

import threading
import warnings
from collections import deque
from dataclasses import dataclass
from types import TracebackType

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor, Permutations, take
from jaxgoodput.data.rows import check_same_kind, held_rows, narrow, put_rows
from jaxgoodput.data.sources import Source
from jaxgoodput.goodput.search import BatchConfig

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class MicroBatch:
    """What the replicas of a mesh compute at once, cut over the axis of replicas."""

    data: PyTree[jax.Array]
    """Leaves `[rows, ...]`, of all replicas of the loader's mesh."""
    mask: Float[Array, " rows"]
    """1 on real samples, 0 on padding, which repeats a real sample, so that a masked loss is finite."""


@dataclass(frozen=True)
class StepBatch:
    """What one update uses."""

    micro_batches: tuple[MicroBatch, ...]
    """`config.num_micro_batches` of them; fewer only in a run's last batch, whose last may be padded."""
    config: BatchConfig
    """The configuration that these samples were cut for."""
    num_samples: int
    """Real samples, over all processes."""
    before: Cursor
    """The place of the first of these samples."""
    after: Cursor
    """The place behind the last."""
    num_padded: int
    """Over all processes."""
    wait_s: float
    """Seconds that `Loader.next` blocked."""
    indices: Int[np.ndarray, " num_samples"]
    """Of the real samples, in order, over all processes."""


@dataclass(frozen=True)
class _Position:
    cursor: Cursor
    handed_out: int = 0  # samples since the loader was made


@dataclass(frozen=True)
class _Portion:
    """A global micro-batch; of an elastic job, `micro_batch` is this process's part of it."""

    micro_batch: MicroBatch
    indices: np.ndarray  # of the real samples, all processes
    after: _Position


@dataclass(frozen=True)
class _Failure:
    error: BaseException
    what: str


@dataclass(frozen=True)
class _End:
    pass


class Loader:
    """Hands out every sample in the cursor's order exactly once, in batches of any configuration.

    `sharding` places a batch, of all processes where its mesh has devices of all, else this process's
    part `[rows / process_count, ...]`. `max_samples` is how many samples this loader hands out in total,
    over all processes; None is without end. `prefetch` is how many step batches wait on the devices
    (beside those in use); 0 reads on the caller's thread. Arguments other than `process_index` and
    `sharding` must be equal on all processes. Close it, or use it as a context manager; reading starts
    with the first `next`.

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
        prefetch: int = 2,
        shuffle: bool = True,
    ):
        if not 0 <= process_index < process_count:
            raise ValueError(
                f"process_index={process_index} is not one of {process_count} processes. Pass "
                f"jax.process_index() and jax.process_count()."
            )
        if max_samples is not None and max_samples < 0:
            raise ValueError(f"max_samples={max_samples} is negative; None is without end.")
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} is negative; 0 reads on the caller's thread.")
        self._source = source
        self._dataset_size = len(source)
        # Raises for an empty dataset, or for a cursor that another dataset left.
        _, cursor = take(cursor, self._dataset_size, 0, shuffle=shuffle)
        self._sharding = sharding
        self._process_index = process_index
        self._process_count = process_count
        self._max_samples = max_samples
        self._prefetch = prefetch
        self._shuffle = shuffle
        self._clock = clock
        self._permutations = Permutations()  # of the producer
        self._kind: PyTree | None = None  # structure, shapes and dtypes of the first batch read
        # Of the micro-batches read last: where they lie, which rows are held here, a mask without padding.
        self._full: tuple[tuple[NamedSharding, int], np.ndarray, Array] | None = None
        self._warned = False
        # The rest is shared by the two threads, under the condition's lock.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._config: BatchConfig | None = None
        self._generation = 0  # of the speculation: work of an older one is thrown away
        self._head = _Position(cursor)  # first sample not handed out
        self._tail = self._head  # first sample not read
        self._queue: deque[_Portion | _Failure | _End] = deque()

    @property
    def cursor(self) -> Cursor:
        """The first sample not handed out: where a restart begins."""
        with self._changed:
            return self._head.cursor

    def place(self, sharding: NamedSharding) -> None:
        """Put batches there from now on; what was read ahead for elsewhere is read again."""
        with self._changed:
            if sharding != self._sharding:
                self._sharding, self._config = sharding, None
                self._queue.clear()
                self._tail = self._head
                self._generation += 1

    def next(self, config: BatchConfig) -> StepBatch | None:
        """The next batch, in the shape of `config`; None when `max_samples` have been handed out.

        Returns at once if the configuration is that of the previous call, or differs in
        `num_micro_batches` only, and reading keeps up; else it waits for as many micro-batches.

        Raises:
          ValueError: `config` cannot be spread over the processes and devices.
          RuntimeError: the source failed (cause chained; raised again by further calls, after the
            batches before it), or the loader is closed.
        """
        self._require_open()
        if config != self._config:
            self._change(config)
        began = self._clock.now()
        if self._prefetch == 0:
            with self._changed:
                while not self._is_ready(config.num_micro_batches):
                    made = self._produce(self._tail, config, self._sharding)
                    self._append(made, self._generation)
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="jaxgoodput-loader", daemon=True
            )
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._is_ready(config.num_micro_batches))
            wait_s = self._clock.now() - began
            self._require_open()
            portions = []
            for entry in list(self._queue)[: config.num_micro_batches]:
                if isinstance(entry, _Failure):
                    raise RuntimeError(entry.what) from entry.error
                if isinstance(entry, _Portion):
                    portions.append(entry)
            if not portions:
                return None
            for _ in portions:
                self._queue.popleft()
            before, self._head = self._head, portions[-1].after
            self._changed.notify_all()
        return self._step_batch(portions, config, before.cursor, wait_s)

    def close(self) -> None:
        """End the thread and free what was prefetched; further calls do nothing.

        A read in progress is waited for; one that takes over 10 s is left behind with a warning.
        """
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                warnings.warn(
                    f"The dataset has been reading one micro-batch for over {CLOSE_TIMEOUT_S:.0f} "
                    f"s and cannot be interrupted. Its thread ends with that read, or with the "
                    f"process.",
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

    # -- the consumer's side ---------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "The Loader is closed and hands out nothing more. Make a new one from its `cursor`."
            )

    def _is_ready(self, num_micro_batches: int) -> bool:
        queue = self._queue
        return len(queue) >= num_micro_batches or bool(
            queue and not isinstance(queue[-1], _Portion)
        )

    def _change(self, config: BatchConfig) -> None:
        self._check(config)
        with self._changed:
            old, self._config = self._config, config
            same_shape = old is not None and (old.micro_batch_size, old.num_replicas) == (
                config.micro_batch_size,
                config.num_replicas,
            )
            if not same_shape:
                self._queue.clear()
                self._tail = self._head
                self._generation += 1
            self._changed.notify_all()

    def _check(self, config: BatchConfig) -> None:
        for name in ("micro_batch_size", "num_micro_batches", "num_replicas"):
            if getattr(config, name) < 1:
                raise ValueError(
                    f"{name}={getattr(config, name)}: a batch needs at least 1 of each."
                )
        num_parts = self._num_parts(self._sharding)
        if config.num_replicas % num_parts:
            raise ValueError(
                f"num_replicas={config.num_replicas} cannot be split evenly over "
                f"{num_parts} processes. Use a multiple of {num_parts}: every "
                f"process feeds as many replicas as it has devices."
            )
        local_replicas = config.num_replicas // num_parts
        try:
            self._sharding.shard_shape((local_replicas,))
        except ValueError as error:
            raise ValueError(
                f"num_replicas={config.num_replicas} over {num_parts} processes gives "
                f"{local_replicas} replicas here, which cannot be cut over the devices of "
                f"{self._sharding}. Use a multiple of the number of devices on that axis."
            ) from error

    def _num_parts(self, sharding: NamedSharding) -> int:
        """How many meshes share a batch: one where `sharding` spans all processes."""
        return self._process_count if sharding.is_fully_addressable else 1

    def _step_batch(
        self, portions: list[_Portion], config: BatchConfig, before: Cursor, wait_s: float
    ) -> StepBatch:
        indices = np.concatenate([portion.indices for portion in portions])
        if len(indices) > self._dataset_size and not self._warned:
            self._warned = True
            warnings.warn(
                f"global_batch_size={config.global_batch_size} is larger than the dataset of "
                f"{self._dataset_size} samples: a batch holds some samples more than once, though "
                f"each still once per epoch. Lower the maximum of BatchLimits to at most "
                f"{self._dataset_size} if that is not wanted.",
                stacklevel=3,
            )
        full = len(portions) * config.num_replicas * config.micro_batch_size
        return StepBatch(
            micro_batches=tuple(portion.micro_batch for portion in portions),
            config=config,
            num_samples=len(indices),
            before=before,
            after=portions[-1].after.cursor,
            num_padded=full - len(indices),
            wait_s=wait_s,
            indices=indices,
        )

    # -- the producer's side ---------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_room())
                if self._closed:
                    return
                generation, position, config = self._generation, self._tail, self._config
                sharding = self._sharding
            assert config is not None  # there is no room before the first configuration
            try:
                entry = self._produce(position, config, sharding)
            except BaseException as error:  # SystemExit too: a dead thread would hang the loop
                entry = _failure(error, position, np.empty(0, np.int64))
            with self._changed:
                if self._closed:
                    return
                self._append(entry, generation)
            # Not to be kept alive while waiting for room: it may be the loop's to free.
            del entry

    def _has_room(self) -> bool:
        if self._config is None or (self._queue and not isinstance(self._queue[-1], _Portion)):
            return False
        return len(self._queue) < self._prefetch * self._config.num_micro_batches

    def _append(self, entry: _Portion | _Failure | _End, generation: int) -> None:
        if generation != self._generation:
            return  # read for a configuration that nobody wants any more
        if isinstance(entry, _Portion):
            self._tail = entry.after
        self._queue.append(entry)
        self._changed.notify_all()

    def _produce(
        self, position: _Position, config: BatchConfig, sharding: NamedSharding
    ) -> _Portion | _Failure | _End:
        count = config.num_replicas * config.micro_batch_size
        if self._max_samples is not None:
            count = min(count, self._max_samples - position.handed_out)
        if count == 0:
            return _End()
        indices = np.empty(0, np.int64)
        try:
            indices, after = take(
                position.cursor,
                self._dataset_size,
                count,
                shuffle=self._shuffle,
                permutations=self._permutations,
            )
            return _Portion(
                micro_batch=self._read(indices, config, sharding),
                indices=indices,
                after=_Position(after, position.handed_out + count),
            )
        except Exception as error:  # handed to the loop, which raises it: see `next`
            return _failure(error, position, indices)

    def _read(
        self, indices: Int[np.ndarray, " real"], config: BatchConfig, sharding: NamedSharding
    ) -> MicroBatch:
        num_parts = self._num_parts(sharding)
        num_rows = config.num_replicas // num_parts * config.micro_batch_size
        held, full = self._held(sharding, num_rows)
        places = held + (self._process_index * num_rows if num_parts > 1 else 0)
        mine = indices[places[places < len(indices)]]
        num_padded = len(places) - len(mine)
        rows = self._source.batch(np.append(mine, indices[:1]) if num_padded else mine)
        self._kind = check_same_kind(rows, self._kind, len(mine) + bool(num_padded))
        rows = narrow(rows)
        if not num_padded:
            data = put_rows(rows, held, sharding, num_rows=num_rows)
            return MicroBatch(data=data, mask=full)
        if num_padded > 1:
            # Not zeros: a real sample keeps every loss finite, and 0 times it is 0.
            rows = jax.tree.map(
                lambda x: np.concatenate([x, x[-1:].repeat(num_padded - 1, 0)]), rows
            )
        mask = np.zeros(len(places), np.float32)
        mask[: len(mine)] = 1
        data, mask = put_rows((rows, mask), held, sharding, num_rows=num_rows)
        return MicroBatch(data=data, mask=mask)

    def _held(self, sharding: NamedSharding, num_rows: int) -> tuple[np.ndarray, Array]:
        """Which rows are held here, and the mask that all micro-batches without padding share."""
        key = (sharding, num_rows)
        if self._full is None or self._full[0] != key:
            held = held_rows(sharding, num_rows)
            ones = np.ones(len(held), np.float32)
            self._full = key, held, put_rows(ones, held, sharding, num_rows=num_rows)
        return self._full[1:]


def _failure(error: BaseException, position: _Position, indices: np.ndarray) -> _Failure:
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return _Failure(
        error,
        f"The micro-batch of samples {shown or '(unknown)'} (epoch {position.cursor.epoch}, offset "
        f"{position.cursor.offset}) could not be loaded. {type(error).__name__}: {error}",
    )
