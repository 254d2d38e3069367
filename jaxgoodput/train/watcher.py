"""The watcher waits for results so that the loop does not have to.

The loop hands in a ticket for every step it dispatches; this thread blocks on the step's metrics,
notes when they were ready, and publishes a `StepResult`. The loop asks only for results of steps before
the one in flight.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array

from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.engine.state import StepMetrics, Sums
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.timings import Parts, interval


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A step that was dispatched."""

    step: int
    config: BatchConfig
    measured: bool
    began_s: float  # when it was dispatched, less what the loop waited for its batch
    timed: bool  # False: first of its kind, or something compiled meanwhile
    busy: bool  # something else, such as a compilation, competed for the processors
    num_samples: int
    samples: int
    num_batches_taken: int  # wishes for a batch that the loop had taken when it dispatched this
    before: Cursor
    after: Cursor
    metrics: Array
    # Ready when the micro-batches are done, and when the sums are exchanged; where the loop has waited for
    # them, the clock's readings then.
    accumulated: Array | float | None = None
    reduced: Sums | Array | float | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step that is done."""

    ticket: Ticket
    metrics: StepMetrics[float]
    control: np.ndarray  # the agreed vector; empty in one process
    parts: Parts  # seconds
    ready_s: float  # clock reading when its metrics were there


class Watcher:
    """A thread over a queue of tickets."""

    def __init__(
        self,
        read: Callable[[Array], tuple[StepMetrics[float], np.ndarray]],
        on_result: Callable[[StepResult], None],
        clock: Clock,
    ):
        self._read = read
        self._on_result = on_result
        self._clock = clock
        self._tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._results: dict[int, StepResult] = {}
        self._done = threading.Condition()
        self._error: BaseException | None = None
        self.newest: int | None = None  # the last step that is done, as far as is known
        self._thread = threading.Thread(target=self._run, name="jaxgoodput-watcher", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Watch this step. Returns at once."""
        self._tickets.put(ticket)

    def result(self, step: int, *, keep: bool = False) -> StepResult:
        """The result of `step`, waiting for it; each may be asked for once, but for those that are to `keep`.

        Raises what the computation or a consumer of results raised.
        """
        with self._done:
            self._done.wait_for(lambda: step in self._results or self._error is not None)
            if step in self._results:
                return self._results[step] if keep else self._results.pop(step)
            assert self._error is not None
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Make the loop stop with `error`: something behind it broke."""
        with self._done:
            self._error = self._error or error
            self._done.notify_all()

    @property
    def error(self) -> BaseException | None:
        """What broke, if anything did."""
        return self._error

    def close(self) -> None:
        """Finish the tickets handed in so far and end the thread."""
        self._tickets.put(None)
        self._thread.join()

    def _run(self) -> None:
        previous_s: float | None = None
        while (ticket := self._tickets.get()) is not None:
            try:
                result = self._watch(ticket, previous_s)
                previous_s = result.ready_s
                self._on_result(result)
            except BaseException as error:
                self.fail(error)
                continue
            with self._done:
                self._results[ticket.step] = result
                self.newest = ticket.step
                self._done.notify_all()

    def _watch(self, ticket: Ticket, previous_s: float | None) -> StepResult:
        marks: list[float] = []
        for mark in (ticket.accumulated, ticket.reduced):
            if isinstance(mark, float):
                marks.append(mark)
            elif mark is not None:
                jax.block_until_ready(mark)
                marks.append(self._clock.now())
        metrics, control = self._read(ticket.metrics)
        ready_s = self._clock.now()
        step_s = interval(previous_s, ticket.began_s, ready_s)
        if len(marks) == 2:
            if isinstance(ticket.accumulated, float):  # the step before was over, if not seen to be
                previous_s = None
            parts = Parts(
                step_s=step_s,
                accumulate_s=interval(previous_s, ticket.began_s, marks[0]),
                reduce_s=marks[1] - marks[0],
                update_s=ready_s - marks[1],
            )
        else:
            parts = Parts(step_s=step_s)
        return StepResult(
            ticket=ticket, metrics=metrics, control=control, parts=parts, ready_s=ready_s
        )
