"""One process: the last micro-batch of a batch and its update are one program."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Array

from jaxgoodput.data.loader import StepBatch
from jaxgoodput.engine.state import Sums, TrainState
from jaxgoodput.train.control import Decisions
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


@dataclass
class Alone:
    """A run of one process. All kinds of run have the same methods."""

    feed: Feed
    decisions: Decisions
    """How it decides what to do before the next step."""
    first_copy_s: float = math.inf
    """Seconds until the first copy of the state to another host; infinite if none is needed."""

    @property
    def runs_blocks(self) -> bool:
        """Whether several steps may be dispatched as one."""
        return self.feed.reads_blocks

    def next_batch(self, now: RunState, meanwhile: Callable[[], None]) -> StepBatch | None:
        """Return the next batch, or None at the end of the data.

        `meanwhile` is called now and then while it waits, and may raise.
        """
        return self.feed.next(now.batch, meanwhile)

    def dispatch(self, now: RunState, batch: StepBatch, *, measured: bool) -> Dispatched:
        """Start a step, or a block of them; `measured` has it measure the gradient noise.

        Donates `now.state`.
        """
        engine, work, control = now.engine, None, self.decisions.sent(batch.config)
        *some, last = batch.micro_batches
        for micro in some:
            work = engine.accumulate(work or engine.begin(now.state), micro.data, micro.mask)
        data, mask = last.data, last.mask
        if batch.first is not None:
            if batch.count > 1 or (engine.blocks.can_split and not measured):
                part = {"first": batch.first, "count": batch.count}
                return Dispatched(*engine.blocks.run(now.state, data, mask, **part))
            data, mask = engine.blocks.rows(data, mask, batch.first)
        step = self.feed.step_of(engine)
        options = {"measure": measured, "control": control}
        return Dispatched(*step(now.state, work, data, mask, **options))

    def stepped(self, step: int, *, timed: bool) -> None:
        """Do nothing: runs of several processes forget here what they agreed on for old steps."""

    def to_save(self, now: RunState) -> TrainState:
        """Return the state as it lies on the devices, which is what is saved."""
        return now.state

    def keep(self, kept: RunSnapshot) -> float:
        """Return infinity, the seconds between failures, without a copy: such a run does not survive one."""
        return math.inf

    def ended_by(self, error: BaseException) -> str | None:
        """Return None: every error ends the run, because such a run does not go on with fewer processes."""
        return None
