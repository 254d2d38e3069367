"""`StepsInFlight`: the steps that were dispatched, up to the last one whose result was looked at."""

from collections import deque
from collections.abc import Iterator

from jaxgoodput.data.loader import StepBatch
from jaxgoodput.train.control import DEPTH, Requests
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.runs.alone import Dispatched
from jaxgoodput.train.watcher import StepResult, Ticket, Watcher


class StepsInFlight:
    """The steps that run or wait on the devices: their tickets, and which results every process has by now.

    Only the loop's thread uses it.
    """

    def __init__(self, start: PreparedRun, requests: Requests, watcher: Watcher):
        self._start = start
        self._requests = requests
        self._watcher = watcher
        # The last step of each of the newest dispatches, and the last one whose result was looked at.
        self._dispatched: deque[int] = deque([start.now.step], maxlen=DEPTH)
        self._settled_to = start.now.step
        self._num_untimed = (
            DEPTH  # steps whose times say nothing: the first ones, and after a change
        )

    @property
    def is_steady(self) -> bool:
        """Whether the time of the newest step, which is not added yet, says how long such steps take."""
        return self._num_untimed <= 0

    def has_changed(self) -> None:
        """Note that the next step is the first of another batch."""
        self._num_untimed = 1

    def add(
        self,
        batch: StepBatch,
        done: Dispatched,
        *,
        measured: bool,
        began_s: float,
        timed: bool,
        busy: bool,
    ) -> None:
        """Take in the steps of `batch`, the newest of the run's state, and have the watcher wait for them.

        `began_s` is a reading of the clock in seconds; see `Ticket` for the others.
        """
        now, cursors = self._start.now, self._start.loader.cursors_in(batch)
        self._dispatched.append(now.step)
        self._num_untimed -= 1
        size = batch.num_samples // batch.count
        begun_at, samples = now.step - batch.count, now.samples - batch.num_samples
        self._watcher.submit(
            *(
                Ticket(
                    step=begun_at + i,
                    config=batch.config,
                    measured=measured,
                    began_s=began_s,
                    timed=timed,
                    busy=busy,
                    num_samples=size,
                    samples=samples + i * size,
                    num_batches_taken=self._requests.num_batches_taken,
                    before=cursors[i - 1],
                    after=cursors[i],
                    metrics=done.metrics,
                    accumulated=done.accumulated,
                    reduced=done.reduced,
                    num_together=batch.count,
                    is_last=i == batch.count,
                )
                for i in range(1, batch.count + 1)
            )
        )

    def settled(self) -> Iterator[StepResult]:
        """Yield the results that every process has by now: of the dispatch before the one in flight."""
        if len(self._dispatched) == DEPTH:
            yield from self._up_to(self._dispatched[0])

    def rest(self) -> Iterator[StepResult]:
        """Yield the results of all other steps; waits for them."""
        yield from self._up_to(self._dispatched[-1])

    def _up_to(self, last: int) -> Iterator[StepResult]:
        for result in self._watcher.results(self._settled_to + 1, last):
            self._settled_to = result.ticket.step
            yield result
