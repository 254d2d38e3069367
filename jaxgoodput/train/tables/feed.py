"""Feeds: what a run's batches come through, with the rows of tables if the task has any.

A `TableFeed` hands the loader's batches to a pipeline that runs ahead of the loop. If the loop asks for
another shape, the batches under way are dropped, and the loader goes back to the last batch that was trained.
So do the tables: no row has changed on the way. If several processes train together, each reads its own rows
of a batch and tells the others which ids those read. All of them plan the same, and have the same rows in
their slots. A `PlainFeed` has no tables and passes the loader's batches on.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.loader import Loader, MicroBatch, StepBatch
from jaxgoodput.data.rows import held_rows
from jaxgoodput.embedding.peers import Peers
from jaxgoodput.embedding.pipeline import Pipeline, PlacedBatch
from jaxgoodput.embedding.table import TieredTable
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs.rows import WithRows
from jaxgoodput.engine.state import TrainState, Work
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.parallel.place import Place
from jaxgoodput.train.tables.commits import committed

StepFunction = Callable[..., tuple[TrainState, Array]]
"""A function that takes what `Engine.step` takes, and returns the next state and the metrics."""
Commits = tuple[Mapping[str, int], str | None]
"""The commits by table, and what went wrong."""


@dataclass
class PlainFeed:
    """Hands out the batches of a run without tables; `TableFeed`, for tables, has the same methods."""

    loader: Loader
    tables: Mapping[str, TieredTable] = field(default_factory=dict)
    """The open tables by name."""
    wait_bucket: str = "data_loading_sync"
    """The bucket of the time ledger that waiting for a batch goes to."""
    feeding_s: float = math.nan
    """Seconds that bringing the rows of a batch takes, beside the steps; NaN if unknown."""
    reads_blocks: bool = True
    """Whether the loader's batches need nothing more, so that several may be read as one."""
    is_settled: bool = True
    """Whether a checkpoint may be written at any moment, from any thread."""
    slots: Mapping[str, Array] = field(default_factory=dict)
    """The device's rows by table, after the last step that was dispatched."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """How many values of rows that were written or checked are not finite, by table and field."""

    def next(self, config: BatchConfig, meanwhile: Callable[[], None]) -> StepBatch | None:
        """Return the next batch; see `Loader.next`."""
        return self.loader.next(config, meanwhile=meanwhile)

    def step_of(self, engine: Engine) -> StepFunction:
        """Return the function that starts the step of the batch handed out last."""
        return engine.step

    def commit(self, step: int, kept: Callable[[], Collection[int]]) -> Commits:
        """Return no commits and no error: there are no tables."""
        return {}, None

    def check_slots(self) -> None:
        """Do nothing: there are no tables."""

    def agrees(self, holds: bool) -> bool:
        """Return True: no process has a part of a table."""
        return True

    def close(self) -> None:
        """End the threads. The tables are as the last step left them."""


class _FeedStopped(Exception):
    """Ends the wait for a batch that is not needed any more, because the run stops."""


class TableFeed:
    """Owns the pipeline of a run's tables. The loader's micro-batches have their ids `on_host`, by table.

    With `threads=False` the caller's thread does everything. `peers` are the other processes that hold the
    tables. `commit_to` is the workdir whose checkpoints name the commits.
    """

    wait_bucket = "embedding"
    reads_blocks = False
    is_settled = False  # rows are on their way between batches that the loop alone knows

    def __init__(
        self,
        tables: Mapping[str, TieredTable],
        loader: Loader,
        *,
        where: Place,
        commit_to: str,
        clock: Clock,
        threads: bool = True,
        peers: Peers | None = None,
        base_batch_size: int,
    ):
        self.tables = tables
        self._where = where
        self._commit_to = commit_to
        self._base_batch_size = base_batch_size
        self._peers = peers
        self._num_read = 0  # batches whose ids were read
        self._loader = loader
        self._clock = clock
        self._depth = 1 if threads else 0
        # If no row ever leaves its slot, nothing must be kept from leaving.
        stays = all(table.ram_rows == 0 for table in tables.values())
        self._look_ahead = 0 if stays else 2 * self._depth + 3
        self._pipeline: Pipeline | None = None
        self._config: BatchConfig | None = None
        self._placed: PlacedBatch | None = None
        self._is_over = False
        self._meanwhile: Callable[[], None] = lambda: None
        self._after: Cursor = loader.cursor
        self._num_taken = 0  # samples that the pipeline took from the loader
        self._num_given = 0  # samples in the batches that were handed out

    @property
    def slots(self) -> Mapping[str, Array]:
        """The device's rows by table, after the last step that was dispatched."""
        return {name: table.slots for name, table in self.tables.items()}

    @property
    def lost(self) -> Mapping[str, int]:
        """How many values of rows that were written or checked are not finite, by table and field."""
        return {
            f"{name}: {what}": count
            for name, table in self.tables.items()
            for what, count in table.lost.items()
        }

    @property
    def feeding_s(self) -> float:
        """Seconds that bringing the rows of a batch takes, beside the steps; NaN if unknown.

        It is known of one process only: several wait for each other.
        """
        if self._pipeline is None or self._peers is not None or not self._depth:
            return math.nan
        return self._pipeline.times.bottleneck_s

    def next(self, config: BatchConfig, meanwhile: Callable[[], None]) -> StepBatch | None:
        """Return the next batch, as `Loader.next` does, once its rows are in their slots.

        Raises what `Loader.next` does, and TypeError or ValueError for invalid ids, naming the table.
        """
        if config != self._config:
            self.close()
            self._config, self._is_over = config, False
            self._pipeline = self._begun(config)
        assert self._pipeline is not None
        self._meanwhile = meanwhile
        stalled_s = self._pipeline.times.stalled_s
        with jax.transfer_guard("allow"):  # without threads, samples are read here
            self._placed = next(self._pipeline, None)
        if self._placed is None:
            return None
        batch: StepBatch = self._placed.batch
        self._after, self._num_given = batch.after, self._num_given + batch.num_samples
        places = {name: lookup.inverse for name, lookup in self._placed.lookups.items()}
        (micro,) = batch.micro_batches
        data = WithRows(own=micro.data, rows=places)
        return dataclasses.replace(
            batch,
            micro_batches=(MicroBatch(data=data, mask=micro.mask),),
            # Putting rows into slots is not counted: it may wait for the step before.
            wait_s=self._pipeline.times.stalled_s - stalled_s,
        )

    def step_of(self, engine: Engine) -> StepFunction:
        """Return the step that reads the rows of the batch handed out last, and changes them."""
        return partial(self._step, engine)

    def _step(
        self, engine: Engine, state: TrainState, work: Work | None, *batch: PyTree, **options: Any
    ) -> tuple[TrainState, Array]:
        assert work is None and self._placed is not None and self._pipeline is not None
        # Which slot each id of the batch reads, the batch itself says.
        found = self._placed.lookups.items()
        lookups = {name: dataclasses.replace(lookup, inverse=()) for name, lookup in found}
        slots = self._placed.slots
        state, slots, metrics = engine.step_with_rows(state, slots, lookups, *batch, **options)
        self._pipeline.trained(slots)
        return state, metrics

    def commit(self, step: int, kept: Callable[[], Collection[int]]) -> Commits:
        """Commit all tables with a checkpoint of `step`; see `Feed.commit`."""
        try:
            hosts = self._where.process_count
            return committed(self.tables, self._commit_to, step, kept(), hosts), None
        except (OSError, RuntimeError) as error:
            return {}, f"step {step}: {error}"

    def check_slots(self) -> None:
        """Add the device's rows to what `lost` counts."""
        for table in self.tables.values():
            table.check_slots()

    def agrees(self, holds: bool) -> bool:
        """Whether something holds in every process. All processes call this together."""
        with jax.transfer_guard("allow"):
            return self._where.everywhere(holds)

    def close(self) -> None:
        """End the threads. The tables are as the last step left them."""
        if self._pipeline is None:
            return
        self._is_over = True
        if self._peers is not None:
            self._peers.stop("the batch size changes, or training is over")
        self._pipeline.close()
        if self._peers is not None:
            self._peers.begin()
            self._num_read = 0
        self._pipeline = None
        if self._num_taken > self._num_given:
            self._loader.go_back(self._after, self._num_taken - self._num_given)
            self._num_taken = self._num_given

    def _begun(self, config: BatchConfig) -> Pipeline:
        # Rows that half of all base batches read count as often read. A larger batch reads them oftener.
        scale = config.global_batch_size / self._base_batch_size
        for table in self.tables.values():
            table.often = 1 - 2**-scale
        return Pipeline(
            self.tables,
            self._batches(config),
            self._ids_of,
            look_ahead=self._look_ahead,
            depth=self._depth,
            room_for_all=True,
            lies=lambda batch: batch.micro_batches[0].mask.sharding,
            meanwhile=lambda: self._meanwhile(),
            clock=self._clock,
        )

    def _batches(self, config: BatchConfig) -> Iterator[StepBatch]:
        while (batch := self._loader.next(config, meanwhile=self._unless_over)) is not None:
            self._num_taken += batch.num_samples
            yield batch

    def _unless_over(self) -> None:
        if self._is_over:
            raise _FeedStopped

    def _ids_of(self, batch: StepBatch) -> dict[str, np.ndarray]:
        """Return the ids that a batch reads, in all processes."""
        (micro,) = batch.micro_batches
        ids: dict[str, np.ndarray] = micro.on_host
        if self._peers is None:
            return ids
        number, self._num_read = self._num_read, self._num_read + 1
        (num_rows,), sharding = micro.mask.shape, micro.mask.sharding
        assert isinstance(sharding, NamedSharding)
        held = [held_rows(sharding, num_rows, rank) for rank in range(self._peers.count)]
        found = {}
        for name, own in ids.items():
            whole = np.empty((num_rows, *own.shape[1:]), own.dtype)
            for rows, part in zip(
                held, self._peers.gather(f"{name}: ids", number, own), strict=True
            ):
                whole[rows] = part
            found[name] = whole
        return found


Feed = PlainFeed | TableFeed
