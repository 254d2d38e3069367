"""Batches of the loader with the rows that they read on the device, whatever the batch size does next.

The loader hands its batches to a pipeline, which is ahead of the loop by some. Where the loop asks for
another shape, those that are under way are dropped, the loader goes back to behind the last that was
trained, and so do the tables: no row has changed on the way.

Where several processes train together, each reads its own rows of a batch, and hears of the others which ids
theirs read: all plan the same, and have the same rows in their slots.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.loader import Loader, MicroBatch, StepBatch
from jaxgoodput.data.rows import held_rows
from jaxgoodput.embedding.peers import Peers
from jaxgoodput.embedding.pipeline import Pipeline, PlacedBatch
from jaxgoodput.embedding.table import Lookup, TieredTable
from jaxgoodput.engine.rows import WithRows
from jaxgoodput.goodput.search import BatchConfig


class _Over(Exception):
    """Nobody waits for this batch any more."""


class Feed:
    """Owns the pipeline of a run's tables. The loader's micro-batches have their ids `on_host`, by table.

    `threads=False` does all on the caller's thread. `peers`: the other processes that have the tables.
    """

    def __init__(
        self,
        tables: Mapping[str, TieredTable],
        loader: Loader,
        *,
        clock: Clock,
        threads: bool = True,
        peers: Peers | None = None,
        base_batch_size: int,
    ):
        self.tables = tables
        self._base_batch_size = base_batch_size
        self._peers = peers
        self._num_read = 0  # batches whose ids were read
        self._loader = loader
        self._clock = clock
        self._depth = 1 if threads else 0
        # Where no row ever leaves its slot, nothing is to be kept from leaving.
        stays = all(table.ram_rows == 0 for table in tables.values())
        self._look_ahead = 0 if stays else 2 * self._depth + 3
        self._pipeline: Pipeline | None = None
        self._config: BatchConfig | None = None
        self._placed: PlacedBatch | None = None
        self._is_over = False
        self._meanwhile: Callable[[], None] = lambda: None
        self._after: Cursor = loader.cursor
        self._num_taken = 0  # samples that the pipeline took of the loader
        self._num_given = 0  # of them, those that were handed out

    @property
    def slots(self) -> Mapping[str, Array]:
        """The slots of all tables, for the step of the batch that was handed out."""
        assert self._placed is not None
        return self._placed.slots

    @property
    def lookups(self) -> dict[str, Lookup]:
        """The slots of that batch's rows; which of them each id is, the batch says."""
        assert self._placed is not None
        return {n: dataclasses.replace(x, inverse=()) for n, x in self._placed.lookups.items()}

    @property
    def feeding_s(self) -> float:
        """What bringing the rows of a batch of the present size takes, beside the steps; NaN: not yet known.

        Of one process: several wait for each other.
        """
        if self._pipeline is None or self._peers is not None or not self._depth:
            return math.nan
        return self._pipeline.times.bottleneck_s

    def next(
        self, config: BatchConfig, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """The next batch, as `Loader.next` says, once its rows are in their slots.

        Raises what `Loader.next` does, and TypeError or ValueError for what are no ids, naming the table.
        """
        if config != self._config:
            self._stop()
            self._config, self._is_over = config, False
            self._pipeline = self._begun(config)
        assert self._pipeline is not None
        self._meanwhile = meanwhile
        stalled_s = self._pipeline.times.stalled_s
        with jax.transfer_guard(
            "allow"
        ):  # where there are no threads, what reads samples runs here
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
            # Not what putting rows into slots takes, which may wait for the step before.
            wait_s=self._pipeline.times.stalled_s - stalled_s,
        )

    def trained(self, slots: Mapping[str, Array]) -> None:
        """Take the slots that the step of the last batch gave back."""
        assert self._pipeline is not None
        self._pipeline.trained(slots)

    def close(self) -> None:
        """End the threads; the tables are as the last step left them."""
        self._stop()

    def _begun(self, config: BatchConfig) -> Pipeline:
        # At the base batch, rows that one batch in two reads; of a larger batch, more of them do.
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
            raise _Over

    def _stop(self) -> None:
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

    def _ids_of(self, batch: StepBatch) -> dict[str, np.ndarray]:
        """The ids that a batch reads, in all processes."""
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
