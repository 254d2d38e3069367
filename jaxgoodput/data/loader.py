"""Samples on the devices before they are needed, whatever the batch size does next.

One thread walks ahead of the loop: it takes the next micro-batch's indices from the cursor, reads
this process's part of them, and puts it on the devices. The loop's `next` only pops a queue. What
is in the queue is speculation about the next configuration: the consumer's cursor moves only when
samples are handed out, so a change of configuration drops the queue and starts again from there. A
micro-batch is a run of consecutive places of the global order, so a change of `num_micro_batches`
alone drops nothing. Where several threads read a source (`readers.py`), reads of later micro-batches are
begun before those of the first are done, and the thread puts each together when its samples are there. A
stream, which cannot be read again, keeps its samples until they are handed out; every process reads the
whole of it.

The global micro-batch is the next `num_replicas * micro_batch_size` samples, reshaped to
`[num_replicas, micro_batch_size]`. Each process reads the rows that its own devices hold, and every one
computes this from the same cursor, so that none has to ask another. In an elastic job, where each has a
mesh of its own, process p of P feeds the replicas from `p * R / P` up to `(p + 1) * R / P`.
"""

import dataclasses
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor, Permutations, epochs_of, take
from jaxgoodput.data.readers import Readers, Reading
from jaxgoodput.data.rows import check_same_kind, held_rows, narrow, parts_of, put_rows
from jaxgoodput.data.sources import Source, StreamSource, StreamState, is_endless
from jaxgoodput.goodput.search import BatchConfig

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
MEANWHILE_S = 0.1  # between two calls while `Loader.next` waits


@dataclass(frozen=True)
class MicroBatch:
    """What the replicas of a mesh compute at once, cut over the axis of replicas."""

    data: PyTree[jax.Array]
    """Leaves `[rows, ...]`, of all replicas of the loader's mesh."""
    mask: Float[Array, " rows"]
    """1 on real samples, 0 on padding, which repeats a real sample, so that a masked loss is finite."""
    on_host: Any = None
    """What `Loader.on_host` made of the same rows."""


@dataclass(frozen=True)
class StepBatch:
    """What one update uses."""

    micro_batches: tuple[MicroBatch, ...]
    """`config.num_micro_batches` of them; fewer only in a run's last batch, whose last may be smaller."""
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
    parts: Iterator[MicroBatch] | None = None
    """Instead of `micro_batches`: as many as this process takes, read as they are asked for, once."""
    read_s: float = 0.0
    """Seconds that one thread read this process's part, mostly beside the loop; 0 of parts, and where several
    threads read: what is left to wait for says nothing of how long they take."""


@dataclass(frozen=True)
class _Position:
    cursor: Cursor
    handed_out: int = 0  # samples since the loader was made


@dataclass(frozen=True)
class _Portion:
    """A global micro-batch; of an elastic job, `micro_batch` is this process's part of it."""

    micro_batch: MicroBatch
    num_rows: int  # padding too, all processes
    indices: np.ndarray  # of the real samples, all processes
    after: _Position
    read_s: float = 0.0


@dataclass(frozen=True)
class _Begun:
    """A global micro-batch that is being read."""

    position: _Position
    config: BatchConfig
    sharding: NamedSharding
    indices: np.ndarray  # of the real samples, all processes
    num_mine: int  # of them, those read here
    after: _Position
    reading: Reading


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
    over all processes; None is without end. What is left of them at the end is a batch of its own size,
    padded by fewer samples than there are replicas; with `drop_last` it is not handed out. `prefetch` is
    how many step batches wait on the devices (beside those in use); 0 reads on the caller's thread.
    `num_readers` and `num_retries` are those of `Readers`. A source without end is read in its own order,
    whatever `shuffle` says. `on_host` is called with the rows of every micro-batch, behind the loop,
    padding too, and makes what `MicroBatch.on_host` is to be. Arguments other than `process_index` and
    `sharding` must be equal on all processes. Close it, or use it as a context manager; reading starts with
    the first `next`.

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
        self._stream = source if isinstance(source, StreamSource) else None
        self._readers = Readers(
            source, clock=clock, num_readers=num_readers, num_retries=num_retries
        )
        self._dataset_size = len(source)
        # Raises for an empty dataset, or for a cursor that another dataset left.
        _, cursor = take(cursor, self._dataset_size, 0, shuffle=shuffle)
        self._sharding = sharding
        self._process_index = process_index
        self._process_count = process_count
        self._max_samples = max_samples
        self._drop_last = drop_last
        self._prefetch = prefetch
        self._shuffle = shuffle and not is_endless(source)
        self._clock = clock
        self._on_host = on_host
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

    @property
    def stream(self) -> StreamState | None:
        """What a stream is to be set back to for a restart from `cursor`; None for other sources."""
        return None if self._stream is None else self._stream.state_at(self.cursor.offset)

    @property
    def num_retried(self) -> int:
        """Reads that failed and were repeated, so far."""
        return self._readers.num_retried

    def place(self, sharding: NamedSharding) -> None:
        """Put batches there from now on; what was read ahead for elsewhere is read again."""
        with self._changed:
            if sharding != self._sharding:
                self._sharding, self._config = sharding, None
                self._queue.clear()
                self._tail = self._head
                self._generation += 1

    def go_back(self, cursor: Cursor, num_samples: int) -> None:
        """Hand out again what was handed out last: `num_samples`, the first of which is at `cursor`.

        For whoever takes batches ahead of those that use them. A stream cannot be read again.
        """
        assert self._stream is None
        with self._changed:
            self._head = _Position(cursor, self._head.handed_out - num_samples)
            self._tail, self._config = self._head, None
            self._queue.clear()
            self._generation += 1

    def next(
        self, config: BatchConfig, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """The next batch, in the shape of `config`; None when `max_samples` have been handed out, or a
        stream has ended.

        Returns at once if the configuration is that of the previous call, or differs in
        `num_micro_batches` only, and reading keeps up; else it waits for as many micro-batches.
        `meanwhile` is called now and then while it waits, and may raise.

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
            # On the loop's thread, whose guard is not for what a user's data set does.
            with self._changed, jax.transfer_guard("allow"):
                while not self._is_ready(config.num_micro_batches):
                    begun = self._begin(self._tail, config, self._sharding)
                    self._append(self._finish(begun), self._generation)
        elif self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="jaxgoodput-loader", daemon=True
            )
            self._thread.start()
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._closed or self._is_ready(config.num_micro_batches), MEANWHILE_S
            ):
                meanwhile()
            wait_s = self._clock.now() - began
            self._require_open()
            portions = []
            for entry in list(self._queue)[: config.num_micro_batches]:
                if isinstance(entry, _Failure):
                    raise RuntimeError(entry.what) from entry.error
                if isinstance(entry, _Portion):
                    portions.append(entry)
            if not portions or (self._drop_last and len(portions) < config.num_micro_batches):
                return None
            for _ in portions:
                self._queue.popleft()
            before, self._head = self._head, portions[-1].after
            if self._stream is not None:
                self._stream.release(self._head.cursor.offset)
            self._changed.notify_all()
        return self._step_batch(portions, config, before.cursor, wait_s)

    def next_in_parts(self, config: BatchConfig, lease: Callable[[], int]) -> StepBatch | None:
        """The next batch, of which this process takes those parts that `lease` gives it.

        A part is a micro-batch of the replicas of one process, and `lease` counts up over all processes: each
        part is given out once, to whoever asks. Ask for the next one only when the one before is done: a
        process that is slow then takes fewer, and the sum is the same. One that gets none takes a part whose
        mask is 0. Nothing is read ahead.

        Raises:
          ValueError: `config` cannot be spread over the processes and devices.
          RuntimeError: a stream failed.
        """
        self._require_open()
        self._check(config)
        with self._changed:
            before = self._head
            full = count = config.global_batch_size
            if self._max_samples is not None:
                count = min(count, self._max_samples - before.handed_out)
            if self._stream is not None:
                self._stream.release(before.cursor.offset)  # until now, parts of it were read
                with jax.transfer_guard("allow"):
                    count = self._stream.available(before.cursor.offset, count)
            if count == 0 or (self._drop_last and count < full):
                return None
            indices, after = take(
                before.cursor,
                self._dataset_size,
                count,
                shuffle=self._shuffle,
                permutations=self._permutations,
            )
            self._head = self._tail = _Position(after, before.handed_out + count)
            if self._config is not None:  # what was read ahead
                self._config = None
                self._queue.clear()
                self._generation += 1
        sharding = self._sharding
        num_rows = config.num_replicas // self._num_parts(sharding) * config.micro_batch_size
        num_parts = -(-count // num_rows)
        epochs = epochs_of(before.cursor, self._dataset_size, count)
        return StepBatch(
            micro_batches=(),
            parts=self._leased(config, sharding, indices, epochs, num_rows, lease),
            config=config,
            num_samples=count,
            before=before.cursor,
            after=after,
            num_padded=num_parts * num_rows - count,
            wait_s=0.0,
            indices=indices,
        )

    def close(self, *, wait: bool = True) -> None:
        """End the thread and free what was prefetched; further calls do nothing.

        A read in progress is waited for; one that takes over 10 s is left behind with a warning. Without
        `wait` it is left behind at once.
        """
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        self._readers.stop()
        if not wait:
            return
        ended = True
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)
            ended = not thread.is_alive()
        # A thread that hangs waits for a reader that does: once is long enough.
        if not self._readers.join(CLOSE_TIMEOUT_S if ended else 0.0) or not ended:
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
        return parts_of(sharding, self._process_index, self._process_count)[0]

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
        return StepBatch(
            micro_batches=tuple(portion.micro_batch for portion in portions),
            config=config,
            num_samples=len(indices),
            before=before,
            after=portions[-1].after.cursor,
            num_padded=sum(portion.num_rows for portion in portions) - len(indices),
            wait_s=wait_s,
            read_s=sum(portion.read_s for portion in portions),
            indices=indices,
        )

    def _leased(
        self,
        config: BatchConfig,
        sharding: NamedSharding,
        indices: np.ndarray,
        epochs: np.ndarray,
        num_rows: int,
        lease: Callable[[], int],
    ) -> Iterator[MicroBatch]:
        """The parts that this process gets, as they are given out."""
        num_parts, has_any = -(-len(indices) // num_rows), False
        while (part := lease()) < num_parts or not has_any:
            held, _ = self._held(sharding, num_rows)
            places = part * num_rows + held
            mine = places[places < len(indices)]
            # One to pad with, also where there is nothing else.
            rows = mine if len(mine) == len(held) else np.append(mine, 0)
            with jax.transfer_guard("allow"):
                reading = self._readers.begin(indices[rows], epochs[rows])
                begun = _Begun(
                    position=self._head,
                    config=config,
                    sharding=sharding,
                    indices=indices[mine],
                    num_mine=len(mine),
                    after=self._head,
                    reading=reading,
                )
                try:
                    micro_batch = self._read(begun)
                except Exception as error:
                    raise RuntimeError(_failure(error, self._head, indices[mine]).what) from error
            has_any = True
            yield micro_batch
            if part >= num_parts:
                return

    # -- the producer's side ---------------------------------------------------------------------

    def _work(self) -> None:
        begun: deque[_Begun | _Failure | _End] = deque()  # of one generation, in order
        generation = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._closed
                        or self._may_begin(begun)
                        or (begun and (self._has_room() or generation != self._generation))  # noqa: B023
                    )
                )
                if self._closed or generation != self._generation:
                    _drop(begun)
                if self._closed:
                    return
                generation, config, sharding = self._generation, self._config, self._sharding
                begins, finishes = self._may_begin(begun), self._has_room()
                afters = [one.after for one in begun if isinstance(one, _Begun)]
                position = afters[-1] if afters else self._tail
            if begins:
                assert config is not None  # there is no room before the first configuration
                entry = _safely(partial(self._begin, position, config, sharding), position)
                begun.append(entry)
            elif begun and finishes:
                one = begun.popleft()
                entry = _safely(partial(self._finish, one), position)
                if not isinstance(entry, _Portion):
                    _drop(begun)  # nothing behind it is wanted
                with self._changed:
                    if self._closed:
                        return
                    self._append(entry, generation)
                del one, entry  # not to be kept alive meanwhile: it may be the loop's to free

    def _has_room(self) -> bool:
        """Whether the queue may take another entry."""
        if self._config is None or (self._queue and not isinstance(self._queue[-1], _Portion)):
            return False
        return len(self._queue) < self._prefetch * self._config.num_micro_batches

    def _may_begin(self, begun: Sequence[_Begun | _Failure | _End]) -> bool:
        """Whether to begin another micro-batch: one at a time, or as many as keep all readers at work."""
        if not begun or not self._readers.are_threads:
            return not begun and self._has_room()
        if self._config is None or not isinstance(begun[-1], _Begun):
            return False
        num_reads = sum(len(one.reading.reads) for one in begun if isinstance(one, _Begun))
        room = self._prefetch * self._config.num_micro_batches - len(self._queue)
        return len(begun) < room or num_reads < 2 * self._readers.num_threads

    def _append(self, entry: _Portion | _Failure | _End, generation: int) -> None:
        if generation != self._generation:
            return  # read for a configuration that nobody wants any more
        if isinstance(entry, _Portion):
            self._tail = entry.after
        self._queue.append(entry)
        self._changed.notify_all()

    def _begin(
        self, position: _Position, config: BatchConfig, sharding: NamedSharding
    ) -> _Begun | _Failure | _End:
        count = full = config.num_replicas * config.micro_batch_size
        if self._max_samples is not None:
            count = min(count, self._max_samples - position.handed_out)
        indices = np.empty(0, np.int64)
        try:
            if self._stream is not None:
                count = self._stream.available(position.cursor.offset, count)
            if count == 0 or (self._drop_last and count < full):
                return _End()
            # Layers in stages cut a micro-batch into a fixed number of parts: theirs is padded to its size.
            if sharding.mesh.shape.get("stage", 1) == 1:
                own = -(-count // config.num_replicas)
                config = dataclasses.replace(config, micro_batch_size=own)
            indices, after = take(
                position.cursor,
                self._dataset_size,
                count,
                shuffle=self._shuffle,
                permutations=self._permutations,
            )
            epochs = epochs_of(position.cursor, self._dataset_size, count)
            num_parts, part = parts_of(sharding, self._process_index, self._process_count)
            num_rows = config.num_replicas // num_parts * config.micro_batch_size
            held, _ = self._held(sharding, num_rows)
            places = held + part * num_rows
            mine = places[places < count]
            wanted = mine if len(mine) == len(places) else np.append(mine, 0)  # one to pad with
            return _Begun(
                position=position,
                config=config,
                sharding=sharding,
                indices=indices,
                num_mine=len(mine),
                after=_Position(after, position.handed_out + count),
                reading=self._readers.begin(indices[wanted], epochs[wanted]),
            )
        except Exception as error:  # handed to the loop, which raises it: see `next`
            return _failure(error, position, indices)

    def _finish(self, begun: _Begun | _Failure | _End) -> _Portion | _Failure | _End:
        if not isinstance(begun, _Begun):
            return begun
        began_s = self._clock.now()
        try:
            return _Portion(
                micro_batch=self._read(begun),
                num_rows=begun.config.num_replicas * begun.config.micro_batch_size,
                indices=begun.indices,
                after=begun.after,
                read_s=0.0 if self._readers.are_threads else self._clock.now() - began_s,
            )
        except Exception as error:  # handed to the loop, which raises it: see `next`
            return _failure(error, begun.position, begun.indices)

    def _read(self, begun: _Begun) -> MicroBatch:
        sharding, config = begun.sharding, begun.config
        num_rows = config.num_replicas // self._num_parts(sharding) * config.micro_batch_size
        held, full = self._held(sharding, num_rows)
        num_padded = len(held) - begun.num_mine
        rows = begun.reading.result()
        self._kind = check_same_kind(rows, self._kind, begun.num_mine + bool(num_padded))
        rows = narrow(rows)
        if not num_padded:
            data = put_rows(rows, held, sharding, num_rows=num_rows)
            return MicroBatch(data=data, mask=full, on_host=self._made_of(rows))
        if num_padded > 1:
            # Not zeros: a real sample keeps every loss finite, and 0 times it is 0.
            rows = jax.tree.map(
                lambda x: np.concatenate([x, x[-1:].repeat(num_padded - 1, 0)]), rows
            )
        mask = np.zeros(len(held), np.float32)
        mask[: begun.num_mine] = 1
        data, mask = put_rows((rows, mask), held, sharding, num_rows=num_rows)
        return MicroBatch(data=data, mask=mask, on_host=self._made_of(rows))

    def _made_of(self, rows: PyTree) -> Any:
        return None if self._on_host is None else self._on_host(rows)

    def _held(self, sharding: NamedSharding, num_rows: int) -> tuple[np.ndarray, Array]:
        """Which rows are held here, and the mask that all micro-batches without padding share."""
        key = (sharding, num_rows)
        if self._full is None or self._full[0] != key:
            held = held_rows(sharding, num_rows)
            ones = np.ones(len(held), np.float32)
            self._full = key, held, put_rows(ones, held, sharding, num_rows=num_rows)
        return self._full[1:]


def _safely(make: Callable[[], T], position: _Position) -> T | _Failure:
    """What it makes, or any error whatever: a thread that SystemExit has ended would hang the loop."""
    try:
        return make()
    except BaseException as error:
        return _failure(error, position, np.empty(0, np.int64))


def _drop(begun: deque[_Begun | _Failure | _End]) -> None:
    """Leave out what was begun and will not be handed out."""
    for one in begun:
        if isinstance(one, _Begun):
            one.reading.cancel()
    begun.clear()


def _failure(error: BaseException, position: _Position, indices: np.ndarray) -> _Failure:
    shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return _Failure(
        error,
        f"The micro-batch of samples {shown or '(unknown)'} (epoch {position.cursor.epoch}, offset "
        f"{position.cursor.offset}) could not be loaded. {type(error).__name__}: {error}",
    )
