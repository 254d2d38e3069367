"""The analyst works on a thread behind the loop: it records step times, asks the tuner, and reports.

The thread handles finished steps and other events in order. A verdict of the tuner goes to the loop as a
`Control` in `Requests`, and takes effect with the next batch. Hooks hear of everything through a `Reporter`,
which may lag behind without delaying the analyst.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from jaxgoodput._worker import QueueWorker
from jaxgoodput.clock import Clock
from jaxgoodput.engine.state import StepMetrics
from jaxgoodput.goodput.efficiency import Grad, noise_scale
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe import hooks as hooking
from jaxgoodput.observe.events import Event, FitEnd, StepEnd
from jaxgoodput.train.compile_ahead import CompilationStarter, StrategyCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import DEPTH, Control, Requests
from jaxgoodput.train.reporter import Reporter, WindowInputs, tune_end
from jaxgoodput.train.watcher import StepResult
from jaxgoodput.tune.batch import tune, undo_leap
from jaxgoodput.tune.block_times import BlockTimes
from jaxgoodput.tune.cadence import FIRST_CADENCE, NoiseCadence
from jaxgoodput.tune.drift import has_drifted
from jaxgoodput.tune.due import VerdictTimer
from jaxgoodput.tune.evidence import Evidence
from jaxgoodput.tune.exploring import AccountState
from jaxgoodput.tune.payoff import RunLength
from jaxgoodput.tune.remembered import BatchHistory, ProgramMemory
from jaxgoodput.tune.timings import (
    FeedingTimes,
    StrategyTimings,
    TimingRow,
    TimingTable,
)
from jaxgoodput.tune.trial import Trials
from jaxgoodput.tune.tuner import Tuner, TunerAnswer
from jaxgoodput.tune.verdict import PROBE_STEPS, Caution, Situation, StrategyOption

# Assumed error of step times beside a compilation until it has been measured. On two cores such steps took up
# to 2.3 times as long before the compiler's threads yielded, and elsewhere they still may, so only a change
# that promises to double the goodput is believed.
UNKNOWN_DOUBT = 1.0
# Seconds between two looks at finished steps, and steps after which one comes earlier: short steps are dealt
# with together.
REST_S, MOST_TOGETHER = 0.02, 32
EXPLODES = (
    "step %d: the gradient explodes, with a norm of %.3g: the learning rate, %.3g times your own, "
    "is too large at this batch. It is your own in the next step, and grows again more slowly."
)


class Analyst:
    """Decides when to ask the tuner, and passes its verdicts on to the loop and to hooks.

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
        tuner: Callable[..., Tuner] = Tuner,
    ):
        tuning = config.tuning
        self._config = config
        self._strategies = strategies
        self._current = current
        self._requests = requests
        self._clock = clock
        self._adapt = adapt
        # A schedule of the user's own needs the noise for what it changes.
        saves = config.compiles_behind and config.statistics.every_steps is None
        self._compiling = CompilationStarter(
            strategies,
            compile_s,
            clock.now(),
            explores=config.compiles_behind and config.policy == "goodput",
            saves=saves and isinstance(config.policy, str),
        )
        self._length = RunLength(
            base_steps=config.base_steps,
            epochs=config.epochs,
            dataset_size=dataset_size,
            schedule=schedule,
            learning_rate=learning_rate,
        )
        self._timings = StrategyTimings(1, lambda seconds: book("first_execution", seconds))
        self._feeding = FeedingTimes()
        self._evidence = Evidence()
        self._cadence = NoiseCadence(config.statistics.every_steps, config.statistics.overhead)
        self._due = VerdictTimer(
            clock.now(),
            warm_up_steps=tuning.warm_up_steps,
            dwell_steps=tuning.dwell_steps,
            every_s=tuning.every_s,
            every_steps=tuning.every_steps,
            depth=DEPTH,
        )
        self._trials = Trials()
        self._history = BatchHistory(current)
        self._latest: StepResult | None = None
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
            length=self._length,
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
        self._feeding.add(global_batch_size, seconds)

    def step_s(self, config: BatchConfig) -> float:
        """Return the median seconds of a configuration's steps; NaN before one was timed."""
        return self._timings.step_s(config)

    @property
    def blocks(self) -> BlockTimes:
        """Step times with and without blocks."""
        return self._timings.blocks

    def tell(self, event: Event) -> None:
        """Pass an event on to the hooks, after everything handed in before it."""
        self._worker.put(event)

    def timings(self) -> dict[str, tuple[TimingRow, ...]]:
        """Return the step times by strategy, for a checkpoint."""
        return self._timings.rows()

    def restore(self, timings: Mapping[str, Sequence[TimingRow]], statistics_every: int) -> None:
        """Resume with the step times and the noise cadence of a checkpoint."""
        self._history.resume()
        self._timings.restore(timings)
        self._cadence.restore(statistics_every)

    def recall(self, earlier: ProgramMemory) -> None:
        """Begin with the memory of earlier runs of this program. The noise is still measured afresh."""
        self._timings.restore(earlier.timings)
        self._history.recall(earlier, self._current)

    def remembered(self, step: int) -> ProgramMemory:
        """Return the memory for the next run of this program; call it after `flush`, at the last step."""
        is_trial = self._trials.is_running and self._trials.home is not None
        return self._history.memory(self.timings(), step, self._current, is_trial=is_trial)

    @property
    def statistics_every(self) -> int:
        """Steps between two noise measurements, as last decided."""
        return self._cadence.every

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
            self._take(item)
        elif isinstance(item, TunerAnswer):
            self._due.is_judging, self._due.answer_s = False, item.cpu_s
            if not self._due.has_ended:
                self._conclude(item)
        else:
            self._due.has_ended |= isinstance(item, FitEnd)
            if not self._reporter.is_empty:
                self._draw()
            self._teller.tell(item)

    def _take(self, result: StepResult) -> None:
        """Learn from a finished step, report it, and ask for a verdict if one is due."""
        ticket, metrics = result.ticket, result.metrics
        is_changed = ticket.config != self._current
        if is_changed:
            if not self._reporter.is_empty:
                self._draw()  # a window holds steps of one configuration
            self._current = ticket.config
            self._history.add(ticket.config, ticket.samples - ticket.num_samples)
        self._latest = result
        self._due.add_step(
            self._clock.now(),
            ticket.step,
            is_changed=is_changed,
            is_disturbed=ticket.busy,
            num_taken=ticket.num_batches_taken,
        )
        self._learn_time(result, is_changed=is_changed)
        if metrics.is_finite:
            update = ticket.config, ticket.samples, metrics.loss, ticket.num_samples
            explodes = bool(metrics.explodes)
            self._evidence.add(*update, gain=metrics.gain, explodes=explodes)
        if metrics.explodes:
            logging.warning(EXPLODES, ticket.step, metrics.grad_norm, metrics.gain)
        self._reporter.add(result)
        if not ticket.is_last:
            return  # what follows is the same for all that were dispatched together
        self._learn_noise(result)
        # Neither a batch on trial nor one that is about to be left is worth measuring.
        is_passing = self._trials.is_running or not self._due.has_arrived(ticket.step)
        self._compiling.stepped(ticket, self._table, is_trial=is_passing)
        if self._reporter.is_due:
            self._draw()
        self._decide(metrics, ticket.step)

    def _learn_noise(self, result: StepResult) -> None:
        ticket, noise = result.ticket, result.metrics.noise
        plain = self._timings.key(ticket.config, measured=False)
        if self._cadence.should_relax(self._table, plain, is_known=noise.is_known):
            self._set_cadence(FIRST_CADENCE)
        if ticket.measured and result.metrics.is_finite and noise.newest_samples > 0:
            self._cadence.measured_at = float(ticket.step)
        if ticket.measured:
            self._history.add_noise(
                result.metrics.progress, result.metrics.grad, noise.newest_samples
            )
        self._evidence.calibrate(result.metrics.grad, self._config.batch.base)

    def _learn_time(self, result: StepResult, *, is_changed: bool) -> None:
        ticket, parts = result.ticket, result.parts
        if is_changed and not ticket.timed:
            key = self._timings.key(ticket.config, measured=ticket.measured)
            self._timings.switches.add_first_steps(key, parts.step_s, ticket.num_together)
        if not ticket.is_last:
            return
        if ticket.timed and result.metrics.is_finite:
            how = {"measured": ticket.measured, "busy": ticket.busy}
            count = ticket.num_together
            self._timings.add(ticket.config, parts, ticket.step, **how, num_together=count)
        self._timings.switches.compare(self._table)

    def _decide(self, metrics: StepMetrics[float], step: int) -> None:
        """Act at once if that is called for, start compiling other batches, or ask for a verdict."""
        now_s, is_known = self._clock.now(), metrics.noise.is_known
        is_changing = self._act_at_once(step)
        is_due = not (is_changing or self._tuner.is_busy) and self._due.is_due(
            now_s,
            step,
            is_trial=self._trials.is_running,
            is_timed=lambda: self._timings.is_timed(
                self._current, clean=not self._due.is_disturbed
            ),
            is_known=is_known,
            has_fit=self._fit is not None,
            has_drifted=lambda: has_drifted(self._due.judged, self._situation(step)),
        )
        if is_due:
            self._due.asked(now_s, step, is_known=is_known)
            self._evidence.review(*self._noise_and_rate())
        # At every step at first, while most time is left; it does not wait for the tuner.
        is_time = is_due or self._due.is_warming_up or self._compiling.is_time(step, now_s)
        is_settled = not self._trials.is_running and self._due.has_arrived(step)
        if self._compiling.is_open and is_time and is_settled:
            self._compiling.consider(
                self._situation(step),
                self._table,
                strategy=self._current.strategy,
                now_s=self._clock.now(),
                of_all=self._adapt and is_known,
            )
        if is_due:
            # Until the answer is handled: the tuner is free earlier, but another would not know of it.
            self._due.judged = self._situation(step)
            self._due.is_judging = self._tuner.ask(self._due.judged)

    def _act_at_once(self, step: int) -> bool:
        """Follow the user's schedule, or go back after a leap of the loss; return whether it posted a change.

        The tuner is not asked: there is nothing to fit or to search.
        """
        is_there = self._scheduled() in (None, self._current.global_batch_size)
        has_leapt = self._adapt and self._evidence.level.leap is not None
        if (is_there and not has_leapt) or not self._due.has_arrived(step):
            return False
        situation = self._situation(step)
        verdict = undo_leap(situation) if is_there else tune(situation)
        if verdict is None or verdict.config == self._current:
            return False  # the next verdict says why
        self._conclude(TunerAnswer(situation=situation, verdict=verdict))
        return True

    def _conclude(self, answer: TunerAnswer) -> None:
        """Pass a verdict on to the loop and to hooks."""
        situation, verdict = answer.situation, answer.verdict
        current = situation.current
        self._timings.fits[current.strategy] = situation.here.fit
        # A verdict is void on a configuration no longer in use, and if it does not know of a leap.
        has_leapt = self._adapt and self._evidence.level.leap is not None
        is_valid = current == self._current and has_leapt <= (situation.leap is not None)
        is_switch = is_valid and verdict.config != current
        if is_switch:
            leap = situation.leap
            if verdict.denied and not (leap is not None and leap.stays):
                self._evidence.deny(*self._noise_and_rate(), leaps=leap is not None)
            self._requests.post(Control(batch=verdict.config))
            self._due.posted(self._requests.num_batches)
            self._trials.switched(situation, verdict)
            logging.debug("step %d: new batch or strategy: %s", situation.step, verdict.reason)
        elif is_valid:
            self._trials.kept(situation, verdict)
        if verdict.statistics_every != self._cadence.every:
            self._set_cadence(verdict.statistics_every)
        slopes = self._evidence.by_batch
        self._teller.tell(tune_end(answer, slopes, self._strategies, switched=is_switch))

    def _set_cadence(self, every: int) -> None:
        self._cadence.every = every
        self._requests.post(Control(statistics_every=every))

    def _draw(self) -> None:
        """Close the window and tell the hooks about it."""
        self._reporter.draw(
            WindowInputs(
                here=self._here(),
                statistics_every=self._cadence.every,
                measured_at=self._cadence.measured_at,
                memory_limit=self._strategies.memory_limit(self._current.strategy),
                stretch=self._evidence.now(),
                stretch_before=self._evidence.before,
                feeding_s=self._feeding.of(self._current.global_batch_size),
                arithmetic=self._strategies.arithmetic(self._current),
                account=self._account(),
            )
        )

    def _account(self) -> AccountState | None:
        assert self._latest is not None
        left_s = self._left_s(self._latest.metrics.grad)
        return self._compiling.account(self._clock.now(), left_s)

    # -- the situation ---------------------------------------------------------------------------

    def _situation(self, step: int) -> Situation:
        """Return everything that a verdict depends on now."""
        assert self._latest is not None
        metrics, samples = self._latest.metrics, self._latest.ticket.samples
        current, noise, table = self._current, metrics.noise, self._table
        here = self._here()
        others = map(self._timings.known, self._strategies.others() if self._adapt else ())
        share_done = self._length.share_done(metrics.progress, samples)
        return Situation(
            step=step,
            here=here,
            home=home_of(self._trials.home, here, self._strategies, self._timings),
            others=tuple(
                o for o in others if o.fit or o.config.strategy not in self._trials.strategies
            ),
            grad=self._evidence.calibration.corrected(metrics.grad),
            noise_factor=self._evidence.calibration.factor,
            noise_is_guess=noise.is_guess,
            measured=metrics.measured,
            timings=table.timings(step),
            clean=self._timings.timed(current, clean=True),
            disturbed=self._due.is_disturbed,
            steps_since_change=self._due.steps_since_change(step),
            caution=self._caution(),
            accumulate=self._accumulates,
            statistics_every=self._cadence.wanted(
                table,
                self._timings.key(current, measured=False),
                self._timings.key(current, measured=True),
                is_known=noise.is_known,
                newest_samples=noise.newest_samples,
                may_block=current.num_replicas == current.num_micro_batches == 1,
            ),
            adapt=self._adapt,
            scheduled=self._scheduled(),
            stretch=self._evidence.after,
            stretch_before=self._evidence.before,
            bar=self._evidence.bar,
            leap=self._evidence.level.leap,
            floor=self._history.floor(current, samples, share_done),
            left_s=self._left_s(metrics.grad),
            step_s=self._timings.step_s(current),
            fixed_s=self._strategies.fixed_s,
            outlook=self._compiling.outlook,
        )

    def _here(self) -> StrategyOption:
        """Return the strategy and batch in use, with its measurements."""
        current = self._current
        step_s = self._timings.step_s(current)
        return StrategyOption(
            config=current,
            limits=self._limits,
            placement=self._timings.placement(current),
            ready=self._strategies.ready(current.strategy),
            timed=self._timings.timed(current, clean=not self._due.is_disturbed),
            fit=self._fit,
            # A batch was prepared during a step, so that took no longer than the step.
            feeding=self._feeding.line(current.global_batch_size, step_s),
        )

    def _caution(self) -> Caution:
        """Return the limits on changes now, from the settings and from how uncertain step times are."""
        tuning, doubt = self._config.tuning, self._table.disturbance()
        return Caution(
            min_gain=tuning.min_gain,
            doubt=(UNKNOWN_DOUBT if math.isnan(doubt) else doubt) * self._due.is_disturbed,
            dwell_steps=PROBE_STEPS if self._trials.is_running else tuning.dwell_steps,
            max_growth=self._history.max_growth(self._current, tuning.max_growth),
            switch_s=self._timings.switches.median_s,
        )

    def _scheduled(self) -> int | None:
        """Return the global batch that the user's schedule asks for now; None without a schedule."""
        if self._latest is None:
            return None
        return self._length.scheduled(self._latest.metrics.progress, self._latest.ticket.samples)

    def _left_s(self, grad: Grad) -> float:
        """Return the seconds to the end of training at the present batch; NaN before a step was timed."""
        assert self._latest is not None
        return self._length.left_s(
            grad,
            self._latest.metrics.progress,
            self._latest.ticket.samples,
            global_batch_size=self._current.global_batch_size,
            base=self._limits.base,
            step_s=self._timings.step_s(self._current),
        )

    def _noise_and_rate(self) -> tuple[float, float | None]:
        """Return the noise scale in samples, and the user's own learning rate if it is known."""
        assert self._latest is not None
        metrics, samples = self._latest.metrics, self._latest.ticket.samples
        scale = noise_scale(metrics.grad, self._limits.base)
        return float(scale), self._length.rate(metrics.progress, samples, self._limits.base)

    @property
    def _table(self) -> TimingTable:
        """The step times of the strategy in use."""
        return self._timings.table(self._current.strategy)

    @property
    def _limits(self) -> BatchLimits:
        limits = self._strategies.limits(self._current.strategy)
        if self._accumulates:
            return limits
        return dataclasses.replace(limits, max_micro_batches=1)

    @property
    def _accumulates(self) -> bool:
        """Whether a batch may consist of several micro-batches."""
        are_compiled = self._strategies.accumulates(self._current.strategy)
        return self._config.accumulates and (are_compiled or self._current.num_micro_batches > 1)

    @property
    def _fit(self) -> PerfFit | None:
        return self._timings.fits.get(self._current.strategy)


def home_of(
    config: BatchConfig | None,
    here: StrategyOption,
    strategies: StrategyCompiler,
    timings: StrategyTimings,
) -> StrategyOption | None:
    """Return the configuration in use before a trial, with its measurements; None without a trial."""
    if config is None or config == here.config:
        return None
    if config.strategy == here.config.strategy:
        return dataclasses.replace(here, config=config)
    return timings.known(
        StrategyOption(
            config=config,
            limits=strategies.limits(config.strategy),
            placement=timings.placement(config),
            ready=(config.micro_batch_size,),
        )
    )
