"""One process: it asks no other, and the last micro-batch of a batch and its update are one program."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from jaxgoodput.data.loader import StepBatch
from jaxgoodput.engine.state import Sums, TrainState
from jaxgoodput.train.control import OwnDecisions
from jaxgoodput.train.runs.membership import RunSnapshot
from jaxgoodput.train.runs.state import RunState
from jaxgoodput.train.tables.feed import Feed


@dataclass(frozen=True)
class Dispatched:
    """What a dispatched step gives: the next state, and values that tell when its parts are done."""

    state: TrainState
    metrics: Array
    accumulated: Array | float | None = None
    """Ready when the micro-batches are done, or the clock's reading then; None if nothing tells."""
    reduced: Sums | Array | float | None = None
    """Ready when the sums are exchanged, or the clock's reading then; None if nothing tells."""


def fused_step(
    feed: Feed, now: RunState, batch: StepBatch, *, measured: bool, control: np.ndarray | None
) -> Dispatched:
    """Start a step whose last micro-batch and update are one program. Donates `now.state`."""
    engine, work = now.engine, None
    *some, last = batch.micro_batches
    for micro in some:
        work = engine.accumulate(work or engine.begin(now.state), micro.data, micro.mask)
    step = feed.step_of(engine)
    state, metrics = step(now.state, work, last.data, last.mask, measure=measured, control=control)
    return Dispatched(state, metrics)


class Alone:
    """A run of one process."""

    first_copy_s = math.inf

    def __init__(self, feed: Feed, decisions: OwnDecisions):
        self.decisions = decisions
        self._feed = feed

    def next_batch(
        self, now: RunState, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """Return the next batch of the feed; see `Run.next_batch`."""
        return self._feed.next(now.batch, meanwhile=meanwhile)

    def dispatch(self, now: RunState, batch: StepBatch, *, measured: bool) -> Dispatched:
        """Start one step; see `Run.dispatch`."""
        return fused_step(self._feed, now, batch, measured=measured, control=None)

    def stepped(self, step: int, *, timed: bool) -> None:
        """Do nothing: no other process hears of it."""

    def to_save(self, now: RunState) -> TrainState:
        """Return the state as it is."""
        return now.state

    def keep(self, kept: RunSnapshot) -> float:
        """Return infinity: there is no other host to keep a copy."""
        return math.inf

    def blames_a_peer(self, error: BaseException) -> bool:
        """Return False: there is no peer."""
        return False

    def ended_by(self, error: BaseException) -> None:
        """Return None: an error ends the run."""
