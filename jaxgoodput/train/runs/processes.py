"""A fixed set of processes: each with a copy of the model, or all with one model that spans them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxgoodput._jax import shared_store
from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import Loader, StepBatch
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.state import TrainState, Work
from jaxgoodput.parallel.place import Place, place
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.control import Decisions, PeerLost
from jaxgoodput.train.runs.alone import Alone, Dispatched
from jaxgoodput.train.runs.membership import Agreement, RunSnapshot
from jaxgoodput.train.runs.state import RunState
from jaxgoodput.train.tables.feed import Feed


class Spanning(Alone):
    """A run of processes whose layouts span the devices of all: they run every program together."""

    @property
    def runs_blocks(self) -> bool:
        """No: requests take effect at the same step in all processes."""
        return False


@dataclass
class Processes:
    """A run of processes with a whole copy of the model each; only sums of gradients cross between them.

    With `leases`, micro-batches go to whichever process is free.
    """

    feed: Feed
    decisions: Decisions
    loader: Loader
    agreement: Agreement
    leases: bool
    first_copy_s: float = math.inf
    runs_blocks: bool = False

    def next_batch(self, now: RunState, meanwhile: Callable[[], None]) -> StepBatch | None:
        """Return the next batch, in parts if they are leased; None at the end of the data."""
        if self.leases and now.batch.num_micro_batches > 1:
            return self.loader.next_in_parts(now.batch, lambda: self.agreement.lease(now.step))
        return self.feed.next(now.batch, meanwhile)

    def dispatch(self, now: RunState, batch: StepBatch, *, measured: bool) -> Dispatched:
        """Start one step; `measured` has it measure the gradient noise. Donates `now.state`."""
        control = self.decisions.sent(batch.config)
        work, _ = accumulated(now, batch, measured=measured)
        assert work.sums is not None
        total = now.engine.reduce(work, control)
        state, metrics = now.engine.update(now.state, total, work)
        return Dispatched(state, metrics, work.sums.weight, total)

    def stepped(self, step: int, *, timed: bool) -> None:
        """Forget which process took which micro-batch in steps that are long over."""
        self.agreement.forget(step)

    def to_save(self, now: RunState) -> TrainState:
        """Return the state as it is: one process has all of it."""
        return now.state

    def keep(self, kept: RunSnapshot) -> float:
        """Return infinity without a copy: the run ends with the first process that dies."""
        return math.inf

    def ended_by(self, error: BaseException) -> str | None:
        """Return None: the run ends with the first process that dies."""
        return None


# -- what kinds of several processes share -----------------------------------------------------------


def accumulated(now: RunState, batch: StepBatch, *, measured: bool) -> tuple[Work, int]:
    """Start this process's micro-batches of a step; returns their sums and how many rows they have."""
    engine, work, num_rows = now.engine, now.engine.begin(now.state), 0
    if batch.parts is None:
        compares = measured and len(batch.micro_batches) == 1 and not engine.has_groups
        for micro in batch.micro_batches:
            work = engine.accumulate(work, micro.data, micro.mask, measure=compares)
            num_rows += len(micro.mask)
        return work, num_rows
    for micro in batch.parts:
        work = engine.accumulate(work, micro.data, micro.mask)
        num_rows += len(micro.mask)
        # A process takes its next part only when this one is done, so that slow ones take fewer.
        assert work.sums is not None
        jax.block_until_ready(work.sums.weight)
    return work, num_rows


def agreement_of(where: Place) -> Agreement:
    """Return the `Agreement` of these processes, through which they share out micro-batches of a step."""
    return Agreement(
        shared_store(),
        where.process_index,
        where.process_count,
        group_size=where.group_size,
        is_broken=where.is_broken,
    )


def peer_lost(where: Place, clock: Clock, safe_step: int | None) -> PeerLost:
    """Return the error to raise when another process has died; finds out which ones are silent."""
    silent = ", ".join(map(str, where.silent(clock))) or "unknown"
    return PeerLost(
        f"another process of this job has died or does not answer. Of {where.process_count} processes, these "
        f"are silent: {silent}. Their own output says why, and the launcher names the first to fail. Start "
        f"the job again: it resumes from step {safe_step or 0}."
    )


def spanning(
    where: Place, engines: Engines, devices: Sequence[Any] | None, strategies: Sequence[Strategy]
) -> Place | None:
    """Return the layouts with which a model spans a fixed set of processes; None if it need not.

    A loss that runs over the rows of all replicas at once needs one program over all processes.
    """
    if where.world is None or where.is_elastic or not engines.is_global(where.layout):
        return None
    layouts = place(devices, strategies, spanning=True).layouts
    return dataclasses.replace(where, layouts=layouts, world=None)
