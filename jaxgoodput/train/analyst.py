"""The analyst works on a thread behind the loop: it records steps, asks the tuner, and reports.

The thread handles finished steps and other events in order. The `Decider` says what follows from them. A
verdict of the tuner goes to the loop as a `Control` in `Requests`, and takes effect with the next batch.
Hooks hear of everything through a `Reporter`, which may lag behind without delaying the analyst.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from jaxgoodput._worker import QueueWorker
from jaxgoodput.clock import Clock
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe import hooks as hooking
from jaxgoodput.observe.events import Event, FitEnd, StepEnd
from jaxgoodput.train.compile_ahead import CompilationStarter, StrategyCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import DEPTH, Control, Requests
from jaxgoodput.train.decider import BatchFindings, Decider
from jaxgoodput.train.reporter import Reporter, WindowInputs, tune_end
from jaxgoodput.train.watcher import StepResult
from jaxgoodput.tune.block_times import BlockTimes
from jaxgoodput.tune.exploring import Explored
from jaxgoodput.tune.payoff import RunLength
from jaxgoodput.tune.remembered import ProgramMemory
from jaxgoodput.tune.timings import TimingRow
from jaxgoodput.tune.tuner import TunerAnswer, TunerThread

# Seconds between two looks at finished steps, and steps after which one comes earlier: short steps are dealt
# with together.
REST_S, MOST_TOGETHER = 0.02, 32
KNOWN_WAIT_S = 1.0


class Analyst:
    """Passes finished steps to the `Decider`, and its verdicts on to the loop and to hooks.

    `current` is the batch to start with, `compile_s` the seconds that compiling one size takes. `book` adds
    seconds to a named part of the ledger, `learning_rate` is the user's own schedule, and
    `schedule` the user's own schedule of batches. Without `adapt` the batch stays as it is.
    """

    def __init__(
        self,
        config: Config,
        strategies: StrategyCompiler,
        *,
        current: BatchConfig,
        requests: Requests,
        compile_s: float,
        hooks: Sequence[Any],
        clock: Clock,
        on_error: Callable[[BaseException], None],
        book: Callable[[str, float], None],
        learning_rate: Callable[[float], float | None],
        dataset_size: int,
        adapt: bool,
        schedule: Mapping[int | float, int] | None = None,
        tuner: Callable[..., TunerThread] = TunerThread,
    ):
        self._strategies = strategies
        self._requests = requests
        self._clock = clock
        self._has_ended = False  # no verdict is of use any more
        self._thinking = threading.Lock()  # held while what is known changes
        self._known: tuple[BatchFindings, Explored | None] = (
            BatchFindings(),
            None,
        )  # at the last look
        # A schedule of the user's own needs the noise for what it changes.
        saves = config.compiles_behind and config.statistics.every_steps is None
        self._compiling = CompilationStarter(
            strategies,
            compile_s,
            clock.now(),
            explores=config.compiles_behind and config.policy == "goodput",
            saves=saves and isinstance(config.policy, str),
        )
        length = RunLength(
            base_steps=config.base_steps,
            epochs=config.epochs,
            dataset_size=dataset_size,
            schedule=schedule,
            learning_rate=learning_rate,
        )
        self._decider = Decider(
            config.tuning,
            config.statistics,
            sizes=strategies,
            starter=self._compiling,
            length=length,
            current=current,
            base=config.batch.base,
            now_s=clock.now(),
            depth=DEPTH,
            adapt=adapt,
            accumulates=config.accumulates,
            needs_noise=config.policy != "fixed",
            book=lambda seconds: book("first_execution", seconds),
        )
        self._teller = hooking.Teller(
            hooks,
            is_stopping=lambda: requests.signal is not None,
            clock=clock,
            on_error=on_error,
            book=book,
            short_windows=config.reporting.window_s < REST_S,
        )
        self._reporter = Reporter(
            self._teller.tell,
            config.reporting,
            length=length,
            hears_steps=hooking.hear(hooks, StepEnd),
            clock=clock,
        )
        self._worker: QueueWorker[StepResult | TunerAnswer | Event] = QueueWorker(
            "analyst", self._handle, on_error=on_error, rest_s=REST_S
        )
        self._tuner = tuner(self._worker.put, on_error)

    # -- called from other threads ---------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether training waits for hooks."""
        return self._teller.is_awaited

    def result(self, result: StepResult) -> None:
        """Hand in a finished step. Blocks while hooks are far behind, unless the run is stopping."""
        worker = self._worker
        self._teller.hold_up(lambda: worker.num_waiting)
        worker.put(result)
        if worker.num_waiting >= MOST_TOGETHER:
            worker.hurry()

    def fed(self, global_batch_size: int, seconds: float) -> None:
        """Record the seconds that preparing a batch took, beside the steps."""
        self._decider.feeding.add(global_batch_size, seconds)

    def step_s(self, config: BatchConfig) -> float:
        """Return the median seconds of a configuration's steps; NaN before one was timed."""
        return self._decider.timings.step_s(config)

    @property
    def blocks(self) -> BlockTimes:
        """Step times with and without blocks."""
        return self._decider.timings.blocks

    def tell(self, event: Event) -> None:
        """Pass an event on to the hooks, after everything handed in before it."""
        self._worker.put(event)

    def timings(self) -> dict[str, tuple[TimingRow, ...]]:
        """Return the step times by strategy, for a checkpoint."""
        return self._decider.timings.rows()

    def restore(
        self,
        timings: Mapping[str, Sequence[TimingRow]],
        statistics_every: int,
        findings: BatchFindings | None,
        explored: Explored | None,
        samples: int,
    ) -> None:
        """Resume after `samples` with what the run knew, in other processes or before a restart."""
        self._decider.restore(timings, statistics_every, findings, samples)
        if explored is not None:
            self._compiling.resume(explored, self._clock.now())

    def known(self) -> tuple[BatchFindings, Explored | None]:
        """Return a copy of what the run has found out of batches, and what exploring has cost and brought.

        The latter is None if the run does not explore. What was known before is returned if the analyst is
        busy for too long, perhaps with the user's code: a save must not wait for that.
        """
        if self._thinking.acquire(timeout=KNOWN_WAIT_S):
            try:
                explored = self._compiling.explored(self._clock.now())
                self._known = self._decider.findings, explored
            finally:
                self._thinking.release()
        return self._known

    def recall(self, earlier: ProgramMemory) -> None:
        """Begin with the memory of earlier runs of this program. The noise is still measured afresh."""
        self._decider.recall(earlier)

    def remembered(self, step: int) -> ProgramMemory:
        """Return the memory for the next run of this program; call it after `flush`, at the last step."""
        return self._decider.remembered(step)

    @property
    def statistics_every(self) -> int:
        """Steps between two noise measurements, as last decided."""
        return self._decider.cadence.every

    def flush(self) -> None:
        """Wait until everything handed in so far has been handled, by hooks too."""
        done = threading.Event()
        self._worker.call_when_done(lambda: self._teller.tell_when_done(done))
        done.wait()

    def close(self) -> None:
        """Handle everything that was handed in, then end the threads."""
        self._tuner.close()
        self._worker.close()
        self._teller.close()

    # -- on the analyst's own thread -------------------------------------------------------------

    def _handle(self, item: StepResult | TunerAnswer | Event) -> None:
        if isinstance(item, StepResult):
            with self._thinking:
                self._take(item)
        elif isinstance(item, TunerAnswer):
            with self._thinking:
                self._decider.answered(item.cpu_s)
                if not self._has_ended:
                    self._conclude(item)
        else:
            self._has_ended |= isinstance(item, FitEnd)
            if not self._reporter.is_empty:
                self._draw()
            self._teller.tell(item)

    def _take(self, result: StepResult) -> None:
        """Learn from a finished step, report it, and ask for a verdict if one is due."""
        ticket, metrics = result.ticket, result.metrics
        if ticket.config != self._decider.current and not self._reporter.is_empty:
            self._draw()  # a window holds steps of one configuration
        every = self._decider.cadence.every
        self._decider.add(ticket, metrics, result.parts, self._clock.now())
        self._post_cadence(every)
        self._reporter.add(result)
        if not ticket.is_last:
            return  # what follows is the same for all that were dispatched together
        if self._reporter.is_due:
            self._draw()
        self._decide()

    def _decide(self) -> None:
        """Act at once if that is called for, start compiling other batches, or ask for a verdict."""
        if (answer := self._decider.at_once()) is not None:
            self._conclude(answer)
            return
        situation = self._decider.question(self._clock.now(), is_busy=self._tuner.is_busy)
        if situation is not None:
            self._tuner.ask(situation)

    def _conclude(self, answer: TunerAnswer) -> None:
        """Pass a verdict on to the loop and to hooks."""
        decider, verdict = self._decider, answer.verdict
        every = decider.cadence.every
        is_switch = decider.conclude(answer)
        if is_switch:
            self._requests.post(Control(batch=verdict.config))
            decider.posted(self._requests.num_batches)
            at = answer.situation.step
            logging.debug("step %d: new batch or strategy: %s", at, verdict.reason)
        self._post_cadence(every)
        slopes = decider.evidence.by_batch
        self._teller.tell(tune_end(answer, slopes, self._strategies, switched=is_switch))

    def _post_cadence(self, before: int) -> None:
        """Tell the loop how often the noise is measured, if that is not as `before`."""
        every = self._decider.cadence.every
        if every != before:
            self._requests.post(Control(statistics_every=every))

    def _draw(self) -> None:
        """Close the window and tell the hooks about it."""
        decider, current = self._decider, self._decider.current
        self._reporter.draw(
            WindowInputs(
                here=decider.here(),
                statistics_every=decider.cadence.every,
                measured_at=decider.cadence.measured_at,
                memory_limit=self._strategies.memory_limit(current.strategy),
                stretch=decider.evidence.now(),
                stretch_before=decider.evidence.before,
                feeding_s=decider.feeding.of(current.global_batch_size),
                arithmetic=self._strategies.arithmetic(current),
                account=self._compiling.account(self._clock.now(), decider.left_s()),
            )
        )
