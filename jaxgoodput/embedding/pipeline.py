"""Prepares batches ahead of the training, so that their rows are on the device when they are handed out.

There are four stages, which work on successive batches at the same time: *plan* reads a batch and plans its
moves; *pull* takes rows out of RAM; *load* reads and writes the disk and sends rows to the device; *train*
is the caller's thread. A fifth thread writes back to RAM what was evicted from the device. Without threads,
the same is done in the same order, and every row has the same bits.
"""

import functools
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jax.sharding import Sharding
from jaxtyping import Array

from jaxgoodput._jax import settings_here
from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.embedding.table import EvictedRows, Lookup, TieredTable

T = TypeVar("T")
STAGES = ("plan", "pull", "load", "train", "write back")
MEANWHILE_S = 0.1  # between two calls of `meanwhile`
NEWEST = 32  # batches that a stage is judged by; the first ones are slow


@dataclass(frozen=True)
class PlacedBatch:
    """A batch whose table rows are on the device."""

    number: int
    batch: Any
    slots: dict[str, Array]
    """Device rows of each table. A step may donate them; give the new ones to `Pipeline.trained`."""
    lookups: dict[str, Lookup]


@dataclass(frozen=True)
class StageFailure:
    """An item of a queue between stages: the error that ended the stage before."""

    error: BaseException


class EndOfBatches:
    """An item of a queue between stages: there are no more batches."""


@dataclass
class Times:
    """How long each stage has worked, in seconds, and how long the caller has waited for batches."""

    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    newest_s: dict[str, deque[float]] = field(
        default_factory=lambda: {stage: deque(maxlen=NEWEST) for stage in STAGES}
    )
    """Seconds for each of the newest batches, by stage."""
    stalled_s: float = 0.0
    num_batches: int = 0

    @property
    def bottleneck_s(self) -> float:
        """Seconds per batch of the slowest stage except training; NaN until there are enough batches.

        This is a lower quartile, because threads of a busy host delay each other.
        """
        newest = [tuple(self.newest_s[stage]) for stage in STAGES if stage != "train"]
        if min(map(len, newest)) < NEWEST:
            return math.nan
        return max(statistics.quantiles(seconds, n=4)[0] for seconds in newest)

    def add(self, stage: str, seconds: float) -> None:
        """Add the seconds that a stage took for one batch."""
        self.busy_s[stage] += seconds
        self.newest_s[stage].append(seconds)


class StageQueue(Generic[T]):
    """A bounded queue between two threads; closing it wakes both."""

    def __init__(self, size: int):
        self._size = size
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, item: T) -> bool:
        """Wait until the queue has room, and add an item; return False if the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._size or self._is_closed)
            if not self._is_closed:
                self._items.append(item)
            self._changed.notify_all()
            return not self._is_closed

    def get(self, meanwhile: Callable[[], None] = lambda: None) -> T | None:
        """Wait for an item; None if the queue was closed. `meanwhile` is called repeatedly, and may raise."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._items or self._is_closed, MEANWHILE_S):
                meanwhile()
            item = None if self._is_closed else self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Drop all items, and wake the threads that wait to put or get."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


class Pipeline:
    """Iterates over `PlacedBatch`es; each has to be given back to `trained` before the next is asked for.

    If a stage fails, for example on bad ids, the error is raised when its batch would have been handed out.
    The batches before it are handed out and can be trained.

    Args:
      tables: tables by name.
      batches: batches, which are read ahead of the training by about `look_ahead` + 3 * `depth`. To resume,
        continue after the last batch that was handed out, not the last that was read.
      ids: returns the ids that a batch reads, by table, in any shape.
      look_ahead: number of batches after the planned one whose rows are not evicted. With 2 * `depth` + 3,
        batches hardly ever wait for rows that were just evicted, as long as there are enough slots.
      depth: number of batches that may wait between two stages; 0 = no threads.
      room_for_all: whether lookups are as long as a batch has ids, so that their shape does not depend on how
        many of the ids differ.
      lies: returns how a batch is sharded; None = like the slots.
      meanwhile: called repeatedly while a batch is awaited. It may raise; nothing has changed then.
    """

    def __init__(
        self,
        tables: Mapping[str, TieredTable],
        batches: Iterable[Any],
        ids: Callable[[Any], Mapping[str, Any]],
        *,
        look_ahead: int = 5,
        depth: int = 1,
        room_for_all: bool = False,
        lies: Callable[[Any], Sharding | None] = lambda batch: None,
        meanwhile: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ):
        if look_ahead < 0 or depth < 0:
            raise ValueError(f"look_ahead={look_ahead} and depth={depth} must be at least 0.")
        self.tables = dict(tables)
        self.times = Times()
        self._clock = clock or SystemClock()
        self._ids, self._look_ahead = ids, look_ahead
        self._room_for_all, self._lies, self._meanwhile = room_for_all, lies, meanwhile
        self._plans = self._planned(iter(batches))
        self._waiting: PlacedBatch | None = None  # handed out, not given back
        self._handed_out_s = 0.0
        self._over: EndOfBatches | StageFailure | None = None
        self._leaving: dict[str, EvictedRows] = {}  # evicted, but not passed on to be written back
        self._is_closed = False
        planned, pulled = StageQueue[Any](depth), StageQueue[Any](depth)
        self._loaded = StageQueue[Any](depth)
        self._evicted = StageQueue[Any](depth + 1)
        self._queues = (planned, pulled, self._loaded)
        self._workers: list[Worker] = []
        self._write_back_worker: Worker | None = None
        self._write_back_error: BaseException | None = None
        if depth:
            within = settings_here()
            for name, stage in (
                ("plan", functools.partial(self._plan_all, target=planned)),
                ("pull", functools.partial(self._run_stage, "pull", planned, pulled)),
                ("load", functools.partial(self._run_stage, "load", pulled, self._loaded)),
            ):
                self._workers.append(Worker(f"table {name}", stage, within=within))
            self._write_back_worker = Worker(
                "table write back",
                self._write_back_all,
                on_error=self._write_back_failed,
                within=within,
            )

    def __enter__(self) -> "Pipeline":
        """Return the pipeline."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. The tables are as the last trained batch left them, and can be used again.

        If a batch is being read, this waits for it. Idempotent.
        """
        if self._is_closed:
            return  # the tables may be in use by another pipeline
        if self._over is None:
            self._over = EndOfBatches()
        for queue in self._queues:
            queue.close()
        # Evicted rows arrive first, since the end of the batches is behind them in the queue.
        if self._write_back_worker is not None:
            self._evicted.put(EndOfBatches())
            self._write_back_worker.join()
        for table in self.tables.values():
            table.stop("the pipeline was closed")  # wakes `pull` if it waits for an untrained batch
        for worker in self._workers:
            worker.join()
        # If rows could not be written back, the tables stay stopped: they have lost rows.
        if self._write_back_error is None:
            self._write_back(self._leaving)
            for table in self.tables.values():
                table.settle()
        self._is_closed = True

    def __iter__(self) -> Iterator[PlacedBatch]:
        """Return the pipeline: it continues after the last batch that was handed out."""
        return self

    def __next__(self) -> PlacedBatch:
        """Return the next batch, once the table rows that it reads are in their slots on the device."""
        if self._waiting is not None:
            raise RuntimeError(
                f"Batch {self._waiting.number} was not given back. Call `trained(slots)` with the slots that "
                "its step returned before you ask for the next batch."
            )
        start_s = self._clock.now()
        loaded = self._next_loaded()
        self.times.stalled_s += self._clock.now() - start_s
        if self._write_back_error is not None:
            raise self._write_back_error
        if isinstance(loaded, EndOfBatches):
            raise StopIteration
        if isinstance(loaded, StageFailure):
            raise loaded.error
        batch, lookups = loaded[0], {}
        try:
            for name, part in loaded[1].items():
                lookups[name], self._leaving[name] = self.tables[name].place(part)
            if self._workers:
                self._evicted.put(self._leaving)
            else:
                self._write_back(self._leaving)
        except BaseException as error:  # also Ctrl-C: `close` then writes back what was evicted
            self._over = StageFailure(error)
            raise
        self._leaving = {}
        slots = {name: table.slots for name, table in self.tables.items()}
        self._waiting = PlacedBatch(self.times.num_batches, batch, slots, lookups)
        self.times.num_batches += 1
        self._handed_out_s = self._clock.now()
        return self._waiting

    def trained(self, slots: Mapping[str, Array]) -> None:
        """Give back a batch: `slots` are the device rows that its step returned, by table."""
        if self._waiting is None:
            raise RuntimeError(
                "No batch was handed out. Call `next` first, and `trained` once for each batch."
            )
        for name, table in self.tables.items():
            table.slots = slots[name]
        self._waiting = None
        self.times.add("train", self._clock.now() - self._handed_out_s)

    # -- the stages ----------------------------------------------------------------------------------

    def _next_loaded(self) -> Any:
        if self._over is not None:
            return self._over
        found: Any
        if self._workers:
            found = self._loaded.get(self._meanwhile)
        else:
            try:
                found = self._timed("load", self._timed("pull", self._next()))
            except BaseException as error:
                found = StageFailure(error)
        if isinstance(found, EndOfBatches | StageFailure):
            self._over = found
        return found

    def _next(self) -> Any:
        """Wait for the next batch, and return it with the plans of its tables."""
        start_s = self._clock.now()
        found = next(self._plans, EndOfBatches())
        self.times.add("plan", self._clock.now() - start_s)
        return found

    def _planned(self, batches: Iterator[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield batches with a plan and inverse indices by table. A plan waits for its look-ahead."""
        window: deque[tuple[Any, dict[str, Any]]] = deque()
        announced: Iterator[tuple[Any, dict[str, Any]]] | None = self._announced(batches)
        failure: Exception | None = None
        while True:
            while announced is not None and len(window) <= self._look_ahead:
                try:
                    window.append(next(announced))
                except StopIteration:
                    announced = None
                except Exception as error:  # raised after the batches before it
                    failure, announced = error, None
            if not window:
                if failure is not None:
                    raise failure
                return
            batch, inverses = window.popleft()
            yield (
                batch,
                {name: (self.tables[name].directory.plan(), x) for name, x in inverses.items()},
            )

    def _announced(self, batches: Iterator[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield batches with inverse indices by table, after their ids were given to the look-ahead.

        A StopIteration that the caller's `ids` raises is an error, as in every generator, and not the end.
        """
        for batch in batches:
            found = self._unique(batch)
            for name, (unique, _) in found.items():
                self.tables[name].directory.look_ahead(unique)
            yield batch, {name: inverse for name, (_, inverse) in found.items()}

    def _unique(self, batch: Any) -> dict[str, tuple[Any, Any]]:
        ids = self._ids(batch)
        if ids.keys() != self.tables.keys():
            raise ValueError(
                f"ids(batch) returned ids for the tables {sorted(ids)}, but the pipeline has "
                f"{sorted(self.tables)}. Return ids for each of them."
            )
        found = {}
        for name, table in self.tables.items():
            try:
                found[name] = table.unique(ids[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"Table {name!r}: {error}") from None
        return found

    def _pull(self, item: Any) -> Any:
        batch, plans = item
        return batch, {
            n: self.tables[n].pull(plan, inverse) for n, (plan, inverse) in plans.items()
        }

    def _load(self, item: Any) -> Any:
        batch, pulled = item
        lies = self._lies(batch)
        return batch, {
            name: self.tables[name].load(part, room_for_all=self._room_for_all, batch=lies)
            for name, part in pulled.items()
        }

    def _write_back(self, evicted: Mapping[str, EvictedRows]) -> None:
        for name, part in evicted.items():
            self.tables[name].write_back(part)

    def _timed(self, stage: str, item: Any) -> Any:
        """Run one batch through a stage and record the time; the last items pass unchanged."""
        start_s = self._clock.now()
        # The only stage that waits for rows.
        tables = self.tables.values() if stage == "pull" else ()
        waited_s = sum(table.counts.waited_s for table in tables)
        if not isinstance(item, EndOfBatches | StageFailure):
            item = {"pull": self._pull, "load": self._load}[stage](item)
        waited_s -= sum(table.counts.waited_s for table in tables)
        self.times.add(stage, self._clock.now() - start_s + min(waited_s, 0.0))
        return item

    def _plan_all(self, _: Worker, *, target: StageQueue[Any]) -> None:
        while True:
            try:
                item = self._next()
            except BaseException as error:  # also SystemExit: the caller is waiting for an item
                item = StageFailure(error)
            if not target.put(item) or isinstance(item, EndOfBatches | StageFailure):
                return

    def _run_stage(
        self, stage: str, source: StageQueue[Any], target: StageQueue[Any], _: Worker
    ) -> None:
        while (item := source.get()) is not None:
            try:
                item = self._timed(stage, item)
            except BaseException as error:
                item = StageFailure(error)
            if not target.put(item) or isinstance(item, EndOfBatches | StageFailure):
                return

    def _write_back_all(self, _: Worker) -> None:
        while (item := self._evicted.get()) is not None and not isinstance(item, EndOfBatches):
            start_s = self._clock.now()
            self._write_back(item)
            self.times.add("write back", self._clock.now() - start_s)

    def _write_back_failed(self, error: BaseException) -> None:
        self._write_back_error = error
        for table in self.tables.values():
            table.stop(f"rows that left the device could not be fetched ({error})")
        self._evicted.close()
