"""Batches whose rows are on the device when they are handed out, prepared by threads ahead of the training.

Four stages, each with the next batch but one while the others have theirs: *read and plan*; *pull* rows out
of RAM; *load* from the disk, write to it, and send to the device; *train*, which is the caller's thread. A
fifth thread has what leaves the device arrive in RAM. Without threads the same is done in the same order, and
every row has the same bits.
"""

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jax.sharding import Sharding
from jaxtyping import Array

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.embedding.table import EvictedRows, Lookup, TieredTable

T = TypeVar("T")
STAGES = ("plan", "pull", "load", "train", "write back")
MEANWHILE_S = 0.1  # between two calls while a batch is waited for
NEWEST = 32  # batches by which a stage is judged: the first ones are slow


@dataclass(frozen=True)
class PlacedBatch:
    """A batch whose rows are on the device."""

    number: int
    batch: Any
    slots: dict[str, Array]
    """Of every table; a step that gets them donated gives others back, to `Pipeline.trained`."""
    lookups: dict[str, Lookup]


@dataclass(frozen=True)
class StageFailure:
    """What ended a stage."""

    error: BaseException


@dataclass
class Times:
    """How long the stages were at work, s, and how long the caller waited for them."""

    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    newest_s: dict[str, deque[float]] = field(
        default_factory=lambda: {stage: deque(maxlen=NEWEST) for stage in STAGES}
    )
    """Of each stage, what the newest batches took."""
    stalled_s: float = 0.0
    num_batches: int = 0

    @property
    def bottleneck_s(self) -> float:
        """What a batch takes in the slowest stage but the training, undisturbed; NaN: too few to tell.

        A lower quartile: threads of a busy host wait for each other and for its cores.
        """
        newest = [tuple(self.newest_s[stage]) for stage in STAGES if stage != "train"]
        if min(map(len, newest)) < NEWEST:
            return math.nan
        return max(statistics.quantiles(seconds, n=4)[0] for seconds in newest)

    def add(self, stage: str, seconds: float) -> None:
        """Book one batch of a stage."""
        self.busy_s[stage] += seconds
        self.newest_s[stage].append(seconds)


class StageQueue(Generic[T]):
    """A queue between two threads that ends for both when either is over."""

    def __init__(self, size: int):
        self._size = size
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, item: T) -> bool:
        """Wait for room; False: nobody takes anything any more."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._size or self._is_closed)
            if not self._is_closed:
                self._items.append(item)
            self._changed.notify_all()
            return not self._is_closed

    def get(self, meanwhile: Callable[[], None] = lambda: None) -> T | None:
        """Wait for an item; None: it was closed. `meanwhile` is called now and then, and may raise."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._items or self._is_closed, MEANWHILE_S):
                meanwhile()
            item = None if self._is_closed else self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Drop what is in it; both sides hear of it."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


class EndOfBatches:
    """There are no more batches."""


class Pipeline:
    """Iterates over `PlacedBatch` batches; each has to be given back to `trained` before the next.

    `ids(batch)` names the ids that a batch reads of every table, in any shape. `look_ahead`: batches behind
    the planned one whose rows are not evicted; with 2 * `depth` + 3 of them hardly any batch waits for rows
    that one under way evicts, as long as there are slots for all. `depth`: batches that may wait between two
    stages; 0: no threads. `batches` are read ahead of the training by as many as both say: where training is
    resumed goes by the batches that were handed out, not by those that were read. `room_for_all`: lookups are
    as long as a batch has ids, so that their shape says nothing of how many of those differ. `lies(batch)`:
    how a batch lies on the devices, where not all beside the slots. `meanwhile` is called now and then while
    a batch is waited for, and may raise: nothing has changed then.

    An error of a stage, such as bad ids, is raised where its batch would have been handed out: the batches
    before it are, and train.
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
            raise ValueError(f"look_ahead={look_ahead}, depth={depth}: give 0 or more.")
        self.tables = dict(tables)
        self.times = Times()
        self._clock = clock or SystemClock()
        self._ids, self._look_ahead = ids, look_ahead
        self._room_for_all, self._lies, self._meanwhile = room_for_all, lies, meanwhile
        self._plans = self._planned(iter(batches))
        self._waiting: PlacedBatch | None = None
        self._handed_out_s = 0.0
        self._over: EndOfBatches | StageFailure | None = None
        self._write_back_failure: BaseException | None = None
        self._leaving: dict[str, EvictedRows] = {}  # what is not yet anybody's to write back
        self._is_closed = False
        self._planned_ahead = StageQueue[Any](depth)
        self._pulled = StageQueue[Any](depth)
        self._loaded = StageQueue[Any](depth)
        self._evicted = StageQueue[Any](depth + 1)
        self._threads: list[threading.Thread] = []
        if depth:
            self._start("plan", self._plan_all)
            self._start("pull", lambda: self._work("pull", self._planned_ahead, self._pulled))
            self._start("load", lambda: self._work("load", self._pulled, self._loaded))
            self._start("write back", self._write_back_all)

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"table {name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def __enter__(self) -> "Pipeline":
        """The pipeline."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. The tables are as the last trained batch left them, and may be used again.

        Waits for `batches` where they are being read.
        """
        if self._is_closed:
            return  # the tables may be another pipeline's by now
        if self._over is None:
            self._over = EndOfBatches()
        for channel in (self._planned_ahead, self._pulled, self._loaded):
            channel.close()
        if self._threads:
            self._evicted.put(EndOfBatches())  # what was evicted arrives first
            self._threads[-1].join()
        for table in self.tables.values():
            table.stop(
                "the pipeline was closed"
            )  # for whoever waits for rows of batches that are not trained
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._write_back_failure is None:
            self._write_back(self._leaving)
            for table in self.tables.values():
                table.settle()
        self._is_closed = True

    def __iter__(self) -> Iterator[PlacedBatch]:
        """The batches, from the one behind the last."""
        return self

    def __next__(self) -> PlacedBatch:
        """The next batch, once its rows are in their slots."""
        if self._waiting is not None:
            raise RuntimeError(
                f"Batch {self._waiting.number} was not given back. Call `trained(slots)` with what its step "
                "made of `placed.slots` before asking for the next."
            )
        start_s = self._clock.now()
        loaded = self._next_loaded()
        self.times.stalled_s += self._clock.now() - start_s
        if self._write_back_failure is not None:
            raise self._write_back_failure
        if isinstance(loaded, EndOfBatches):
            raise StopIteration
        if isinstance(loaded, StageFailure):
            raise loaded.error
        batch, lookups = loaded[0], {}
        try:
            for name, part in loaded[1].items():
                lookups[name], self._leaving[name] = self.tables[name].place(part)
            if self._threads:
                self._evicted.put(self._leaving)
            else:
                self._write_back(self._leaving)
        except BaseException as error:  # Ctrl-C, too: `close` writes back what has left
            self._over = StageFailure(error)
            raise
        self._leaving = {}
        slots = {name: table.slots for name, table in self.tables.items()}
        self._waiting = PlacedBatch(self.times.num_batches, batch, slots, lookups)
        self.times.num_batches += 1
        self._handed_out_s = self._clock.now()
        return self._waiting

    def trained(self, slots: Mapping[str, Array]) -> None:
        """Take the slots that a step gave back for those that it was given."""
        if self._waiting is None:
            raise RuntimeError(
                "No batch was handed out: call `next` first, and this once for each."
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
        if self._threads:
            found = self._loaded.get(self._meanwhile)
        else:
            try:
                found = self._timed(
                    "load", self._load, self._timed("pull", self._pull, self._next())
                )
            except BaseException as error:
                found = StageFailure(error)
        if isinstance(found, EndOfBatches | StageFailure):
            self._over = found
        return found

    def _next(self) -> Any:
        """The next batch with its plans."""
        start_s = self._clock.now()
        found = next(self._plans, EndOfBatches())
        self.times.add("plan", self._clock.now() - start_s)
        return found

    def _planned(self, batches: Iterator[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Batches with a plan and the places of their ids by table, planned when those behind are known."""
        window: deque[tuple[Any, dict[str, Any]]] = deque()
        failure: Exception | None = None
        is_over, end = False, EndOfBatches()
        while True:
            while not is_over and len(window) <= self._look_ahead:
                try:
                    if (batch := next(batches, end)) is end:
                        is_over = True
                        break
                    found = self._unique(batch)
                except Exception as error:  # raised behind the batches before it
                    failure, is_over = error, True
                else:
                    for name, (unique, _) in found.items():
                        self.tables[name].directory.look_ahead(unique)
                    window.append((batch, {name: inverse for name, (_, inverse) in found.items()}))
            if not window:
                if failure is not None:
                    raise failure
                return
            batch, inverses = window.popleft()
            yield (
                batch,
                {name: (self.tables[name].directory.plan(), x) for name, x in inverses.items()},
            )

    def _unique(self, batch: Any) -> dict[str, tuple[Any, Any]]:
        ids = self._ids(batch)
        if ids.keys() != self.tables.keys():
            raise ValueError(
                f"ids(batch) names the tables {sorted(ids)}, and the pipeline has {sorted(self.tables)}. "
                "Name the ids of each."
            )
        found = {}
        for name, table in self.tables.items():
            try:
                found[name] = table.unique(ids[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"Table {name!r}: {error}") from None
        return found

    def _pull(self, item: Any) -> Any:
        if isinstance(item, EndOfBatches | StageFailure):
            return item
        batch, plans = item
        return batch, {
            n: self.tables[n].pull(plan, inverse) for n, (plan, inverse) in plans.items()
        }

    def _load(self, item: Any) -> Any:
        if isinstance(item, EndOfBatches | StageFailure):
            return item
        batch, pulled = item
        lies = self._lies(batch)
        return batch, {
            name: self.tables[name].load(part, room_for_all=self._room_for_all, batch=lies)
            for name, part in pulled.items()
        }

    def _write_back(self, evicted: Mapping[str, EvictedRows]) -> None:
        for name, part in evicted.items():
            self.tables[name].write_back(part)

    def _timed(self, stage: str, run: Callable[[Any], Any], item: Any) -> Any:
        start_s = self._clock.now()
        tables = self.tables.values() if stage == "pull" else ()  # the others wait for no rows
        waited_s = sum(table.counts.waited_s for table in tables)
        found = run(item)
        waited_s -= sum(table.counts.waited_s for table in tables)
        self.times.add(stage, self._clock.now() - start_s + min(waited_s, 0.0))
        return found

    def _plan_all(self) -> None:
        while True:
            try:
                item = self._next()
            except BaseException as error:  # SystemExit, too: the caller waits to hear of it
                item = StageFailure(error)
            if not self._planned_ahead.put(item) or isinstance(item, EndOfBatches | StageFailure):
                return

    def _work(self, stage: str, source: StageQueue[Any], target: StageQueue[Any]) -> None:
        run = {"pull": self._pull, "load": self._load}[stage]
        while (item := source.get()) is not None:
            try:
                item = self._timed(stage, run, item)
            except BaseException as error:
                item = StageFailure(error)
            if not target.put(item) or isinstance(item, EndOfBatches | StageFailure):
                return

    def _write_back_all(self) -> None:
        while (item := self._evicted.get()) is not None and not isinstance(item, EndOfBatches):
            start_s = self._clock.now()
            try:
                self._write_back(item)
            except BaseException as error:
                self._write_back_failure = error
                for table in self.tables.values():
                    table.stop(f"rows that left the device could not be fetched ({error})")
                self._evicted.close()
                return
            self.times.add("write back", self._clock.now() - start_s)
