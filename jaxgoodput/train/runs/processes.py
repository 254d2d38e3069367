"""A fixed set of processes: each with a copy of the model, or all with one model that spans them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxgoodput._jax import PeerGone, shared_store
from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import Loader, StepBatch
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.state import TrainState, Work
from jaxgoodput.parallel.place import Place, place
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.control import PeerLost, SharedDecisions
from jaxgoodput.train.runs.alone import Dispatched, fused_step
from jaxgoodput.train.runs.membership import Agreement, RunSnapshot
from jaxgoodput.train.runs.state import RunState
from jaxgoodput.train.tables.feed import Feed


class SpanningProcesses:
    """Processes whose layouts span the devices of all: every program is run by all of them together."""

    first_copy_s = math.inf

    def __init__(self, feed: Feed, decisions: SharedDecisions):
        self.decisions = decisions
        self._feed = feed

    def next_batch(
        self, now: RunState, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """Return the next batch of the feed; see `Run.next_batch`."""
        return self._feed.next(now.batch, meanwhile=meanwhile)

    def dispatch(self, now: RunState, batch: StepBatch, *, measured: bool) -> Dispatched:
        """Start one step; see `Run.dispatch`."""
        control = self.decisions.sent(batch.config)
        return fused_step(self._feed, now, batch, measured=measured, control=control)

    def stepped(self, step: int, *, timed: bool) -> None:
        """Do nothing: the step itself told the others."""

    def to_save(self, now: RunState) -> TrainState:
        """Return the state as it is: all processes write it together."""
        return now.state

    def keep(self, kept: RunSnapshot) -> float:
        """Return infinity: a fixed set of processes ends with the first that dies."""
        return math.inf

    def blames_a_peer(self, error: BaseException) -> bool:
        """Whether an error looks as if another process has died."""
        return is_of_a_peer(error)

    def ended_by(self, error: BaseException) -> None:
        """Return None: an error ends the run."""


class Processes:
    """Processes with a whole copy of the model each; only sums of gradients cross between them.

    With `leases`, micro-batches go to whichever process is free.
    """

    first_copy_s = math.inf

    def __init__(
        self, feed: Feed, loader: Loader, decisions: SharedDecisions, where: Place, *, leases: bool
    ):
        self.decisions = decisions
        self._feed = feed
        self._loader = loader
        self._leases = leases
        self._agreement = agreement_of(where)

    def next_batch(
        self, now: RunState, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """Return the next batch, in parts if they are leased; see `Run.next_batch`."""
        if self._leases and now.batch.num_micro_batches > 1:
            return self._loader.next_in_parts(now.batch, lambda: self._agreement.lease(now.step))
        return self._feed.next(now.batch, meanwhile=meanwhile)

    def dispatch(self, now: RunState, batch: StepBatch, *, measured: bool) -> Dispatched:
        """Start one step; see `Run.dispatch`."""
        control = self.decisions.sent(batch.config)
        work, _ = accumulated(now, batch, measured=measured)
        assert work.sums is not None
        total = now.engine.reduce(work, control)
        state, metrics = now.engine.update(now.state, total, work)
        return Dispatched(state, metrics, work.sums.weight, total)

    def stepped(self, step: int, *, timed: bool) -> None:
        """Forget the leases of steps that are over."""
        self._agreement.forget(step)

    def to_save(self, now: RunState) -> TrainState:
        """Return the state as it is: one process has all of it."""
        return now.state

    def keep(self, kept: RunSnapshot) -> float:
        """Return infinity: a fixed set of processes ends with the first that dies."""
        return math.inf

    def blames_a_peer(self, error: BaseException) -> bool:
        """Whether an error looks as if another process has died."""
        return is_of_a_peer(error)

    def ended_by(self, error: BaseException) -> None:
        """Return None: an error ends the run."""


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
    """Return what the processes of this set agree on within a step."""
    return Agreement(
        shared_store(),
        where.process_index,
        where.process_count,
        group_size=where.group_size,
        is_broken=where.is_broken,
    )


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error looks like a collective that failed because another process has died."""
    if isinstance(error, PeerGone):
        return True
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "heartbeat", "coordination"))


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
    """Return where a fixed set of processes runs a model that spans them; None if it need not span.

    A loss that runs over the rows of all replicas at once needs one program over all processes.
    """
    if where.world is None or where.is_elastic or not engines.is_global(where.layout):
        return None
    layouts = place(devices, strategies, spanning=True).layouts
    return dataclasses.replace(where, layouts=layouts, world=None)
