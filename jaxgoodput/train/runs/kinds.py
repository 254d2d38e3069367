"""`Run`: what the loop asks of a kind of run; and the one place that chooses the kind."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import Loader, StepBatch
from jaxgoodput.engine import memory
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.parallel.place import Place, place
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.control import (
    CONTROL_SIZE,
    Decisions,
    OwnDecisions,
    Requests,
    SharedDecisions,
)
from jaxgoodput.train.runs.alone import Alone, Dispatched
from jaxgoodput.train.runs.elastic import Elastic
from jaxgoodput.train.runs.membership import Membership, RunSnapshot
from jaxgoodput.train.runs.processes import Processes, SpanningProcesses
from jaxgoodput.train.runs.state import RunState
from jaxgoodput.train.tables.feed import Feed


@runtime_checkable
class Run(Protocol):
    """A kind of run: how its batches come, how a step is made, and what ties its processes together."""

    @property
    def decisions(self) -> Decisions:
        """How it decides what to do before the next step."""
        ...

    @property
    def first_copy_s(self) -> float:
        """Seconds until the first copy of the state to another host; infinite if none is needed."""
        ...

    def next_batch(
        self, now: RunState, *, meanwhile: Callable[[], None] = lambda: None
    ) -> StepBatch | None:
        """Return the next batch, or None at the end of the data.

        `meanwhile` is called now and then while it waits, and may raise.
        """
        ...

    def dispatch(self, now: RunState, batch: StepBatch, *, measured: bool) -> Dispatched:
        """Start one step; `measured` has it measure the gradient noise. Donates `now.state`."""
        ...

    def stepped(self, step: int, *, timed: bool) -> None:
        """Take note that `step` was dispatched; `timed` if its time says what a step takes."""
        ...

    def to_save(self, now: RunState) -> TrainState:
        """Return the state as the process that writes checkpoints needs it."""
        ...

    def keep(self, kept: RunSnapshot) -> float:
        """Copy the state to another host; returns the expected seconds between two failures."""
        ...

    def blames_a_peer(self, error: BaseException) -> bool:
        """Whether an error looks as if another process has died."""
        ...

    def ended_by(self, error: BaseException) -> str | None:
        """Return why an error ends this set of processes but not the run; None if it ends the run."""
        ...


def run_of(
    where: Place,
    requests: Requests,
    strategies: StrategyCompiler,
    *,
    first: BatchConfig,
    feed: Feed,
    loader: Loader,
    leases: bool,
    membership: Membership | None,
    clock: Clock,
) -> Run:
    """Return the run of the kind that these processes make; `first` is the batch to begin with."""
    decisions: OwnDecisions | SharedDecisions
    if where.process_count == 1:
        decisions = OwnDecisions(requests, strategies)
    else:
        decisions = SharedDecisions(requests, strategies, where, first)
    if membership is not None:
        return Elastic(feed, loader, decisions, where, membership, clock, leases=leases)
    if isinstance(decisions, OwnDecisions):
        return Alone(feed, decisions)
    if where.spans:
        return SpanningProcesses(feed, decisions)
    return Processes(feed, loader, decisions, where, leases=leases)


# -- what is asked before there is a run -------------------------------------------------------------


def place_of(
    devices: Sequence[Any] | None, strategies: Sequence[Strategy], membership: Membership | None
) -> Place:
    """Return which devices a run has, and who shares them; `membership` if processes come and go."""
    if membership is None:
        return place(devices, strategies)
    found = place(devices, strategies, group_size=membership.group_size)
    return dataclasses.replace(found, is_broken=membership.is_broken)


def control_size(where: Place) -> int:
    """Return the length of the vector that rides along with a step: 0 if there is nobody to tell."""
    return 0 if is_alone(where) else CONTROL_SIZE


def is_alone(where: Place) -> bool:
    """Whether a run has one process for good."""
    return where.process_count == 1 and where.world is None


def has_others(where: Place) -> bool:
    """Whether other processes wait for this one now."""
    return where.process_count > 1


def least_everywhere(where: Place, budget: int) -> int:
    """Return the least memory budget of all processes, so that all plan the same; they call this together."""
    where.meet("before the plan")
    return memory.least(budget) if has_others(where) else budget
