"""The watcher waits for results so that the loop does not have to.

The loop submits a ticket for every step it dispatches. The watcher's thread blocks on the step's metrics,
notes when they were ready, and publishes a `StepResult`. The loop asks only for results of steps before the
one in flight.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxgoodput._jax import settings_here
from jaxgoodput._worker import QueueWorker
from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.engine.state import StepMetrics, Sums
from jaxgoodput.tune.timings import DispatchedStep, Parts, interval


@dataclass(frozen=True, kw_only=True)
class Ticket(DispatchedStep):
    """A step that was dispatched to the devices, and the arrays that will hold its results."""

    before: Cursor
    after: Cursor
    metrics: Array  # of this step, or `[steps, numbers]` of all that were dispatched with it
    # Ready when the micro-batches are done, and when the sums are exchanged. If the loop has waited for them,
    # the clock's readings then.
    accumulated: Array | float | None = None
    reduced: Sums | Array | float | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A finished step: its ticket, its metrics on the host, and how long its parts took."""

    ticket: Ticket
    metrics: StepMetrics[float]
    control: np.ndarray  # the agreed vector; empty in one process
    parts: Parts  # seconds
    ready_s: float  # clock reading when its metrics were there


class Watcher:
    """A thread that waits for dispatched steps (tickets), in order, and reads their metrics.

    `read` fetches the metrics of so many steps that were dispatched together, and `on_result` is called with
    each result, both on the thread.
    """

    def __init__(
        self,
        read: Callable[[Array, int], Sequence[tuple[StepMetrics[float], np.ndarray]]],
        on_result: Callable[[StepResult], None],
        clock: Clock,
    ):
        self._read = read
        self._on_result = on_result
        self._clock = clock
        self._results: dict[int, StepResult] = {}
        self._done = threading.Condition()
        self._ready_s: float | None = None  # when the step before was ready
        self.error: BaseException | None = (
            None  # what broke the computation or a consumer of results
        )
        self.newest: int | None = None  # the last step that is known to be done
        self._worker = QueueWorker(
            "watcher", self._publish, on_error=self._fail, within=settings_here()
        )

    def submit(self, *tickets: Ticket) -> None:
        """Have the thread wait for these steps, dispatched together, after earlier ones. Returns at once."""
        self._worker.put(tickets)

    def let_go(self, *used: Any) -> None:
        """Drop what the steps submitted so far have used, once they are done; the caller drops it now.

        The thread that drops the last reference to an array on a device gives up Python's lock for a moment.
        The loop would have to wait for other threads at each array.
        """
        self._worker.call_when_done(partial(_drop, used))

    def result(self, step: int) -> StepResult:
        """Wait for the result of `step`, and return it; `results` yields it once more.

        Raises what the computation or a consumer of results raised.
        """
        with self._done:
            self._done.wait_for(lambda: step in self._results or self.error is not None)
            if step in self._results:
                return self._results[step]
            assert self.error is not None
            raise self.error

    def results(self, first: int, last: int) -> Iterator[StepResult]:
        """Wait for the results of steps `first` to `last`, and yield each once.

        Raises what the computation or a consumer of results raised, behind the results that came before.
        """
        if first > last:
            return
        with self._done:
            self._done.wait_for(lambda: last in self._results or self.error is not None)
        for step in range(first, last + 1):
            if step not in self._results:
                assert self.error is not None
                raise self.error
            yield self._results.pop(step)

    def close(self) -> None:
        """Finish the tickets submitted so far, and end the thread."""
        self._worker.close()

    def _fail(self, error: BaseException) -> None:
        with self._done:
            self.error = self.error or error
            self._done.notify_all()

    def _publish(self, tickets: Sequence[Ticket]) -> None:
        results = self._watch(tickets, self._ready_s)
        self._ready_s = results[-1].ready_s
        for result in results:
            self._on_result(result)
        with self._done:
            self._results |= {result.ticket.step: result for result in results}
            self.newest = tickets[-1].step
            self._done.notify_all()

    def _watch(self, tickets: Sequence[Ticket], previous_s: float | None) -> list[StepResult]:
        ticket = tickets[0]
        marks: list[float] = []
        for mark in (ticket.accumulated, ticket.reduced):
            if isinstance(mark, float):
                marks.append(mark)
            elif mark is not None:
                jax.block_until_ready(mark)
                marks.append(self._clock.now())
        read = self._read(ticket.metrics, len(tickets))
        ready_s = self._clock.now()
        step_s = interval(previous_s, ticket.began_s, ready_s)
        if len(marks) == 2:
            # The loop has waited for this step, so the step before was over, even if not seen to be.
            if isinstance(ticket.accumulated, float):
                previous_s = None
            parts = Parts(
                step_s=step_s,
                accumulate_s=interval(previous_s, ticket.began_s, marks[0]),
                reduce_s=marks[1] - marks[0],
                update_s=ready_s - marks[1],
            )
        else:
            parts = Parts(step_s=step_s / len(tickets))
        return [
            StepResult(ticket=one, metrics=metrics, control=control, parts=parts, ready_s=ready_s)
            for one, (metrics, control) in zip(tickets, read, strict=True)
        ]


def _drop(_: Any) -> None:
    """Do nothing: the last reference goes with the call."""
