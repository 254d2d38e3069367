"""The decisions of a run, for the trainer's `Analyst` and for a loop of the user's own (`jg.Tuner`).

The `Decider` is told of every finished step and remembers what decisions rest on: step times, noise, losses
and trials. It says when a verdict is due and on which `Situation`, and takes the verdict in. It has no
threads, no clock and no hooks: its caller passes the time and puts verdicts into effect.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from absl import logging

from jaxgoodput.engine.state import StepMetrics
from jaxgoodput.goodput.efficiency import noise_scale
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.optim.gain_growth import HOLD
from jaxgoodput.train.config import Statistics, Tuning
from jaxgoodput.tune.batch import tune, undo_leap
from jaxgoodput.tune.cadence import FIRST_CADENCE, NoiseCadence
from jaxgoodput.tune.drift import has_drifted
from jaxgoodput.tune.due import VerdictTimer
from jaxgoodput.tune.evidence import Evidence
from jaxgoodput.tune.payoff import RunLength
from jaxgoodput.tune.remembered import BatchHistory, ProgramMemory
from jaxgoodput.tune.timings import (
    DispatchedStep,
    FeedingTimes,
    Parts,
    StrategyTimings,
    TimingRow,
    TimingTable,
)
from jaxgoodput.tune.trial import Trials
from jaxgoodput.tune.tuner import TunerAnswer
from jaxgoodput.tune.verdict import PROBE_STEPS, Caution, Situation, StrategyOption

# Assumed error of step times beside a compilation until it has been measured. On two cores such steps took up
# to 2.3 times as long before the compiler's threads yielded, and elsewhere they still may, so only a change
# that promises to double the goodput is believed.
UNKNOWN_DOUBT = 1.0
_EXPLODES = (
    "step %d: the gradient explodes: the learning rate, %.3g times your own, may be too large at this batch. "
    "It is your own in the next %d steps, which show if the noise has grown instead."
)


@runtime_checkable
class UsableSizes(Protocol):
    """What a run may use: limits, compiled micro-batch sizes and other strategies."""

    def limits(self, strategy: str) -> BatchLimits:
        """Return the batches that are allowed under a strategy."""
        ...

    def ready(self, strategy: str) -> Sequence[int]:
        """Return the micro-batch sizes that may be chosen now."""
        ...

    def accumulates(self, strategy: str) -> bool:
        """Return whether batches of several micro-batches may be chosen."""
        ...

    def others(self) -> tuple[StrategyOption, ...]:
        """Return the other strategies that the run can switch to without compiling."""
        ...

    @property
    def fixed_s(self) -> float:
        """Upper bound on the part of a step's seconds that does not grow with its batch.

        It is infinite if nothing is known of that.
        """
        ...


@runtime_checkable
class SizeStarter(Protocol):
    """What makes more sizes usable, if that is expected to pay."""

    is_open: bool
    """Whether there is anything left to start."""

    @property
    def outlook(self) -> str:
        """A sentence on what one more size costs and may bring; empty before it was considered."""
        ...

    def is_time(self, step: int, now_s: float) -> bool:
        """Whether to `consider` another size again."""
        ...

    def stepped(self, ticket: DispatchedStep, table: TimingTable, *, is_trial: bool) -> None:
        """Note that a step is done; `is_trial` says whether its batch is only tried."""
        ...

    def consider(
        self,
        situation: Situation,
        table: TimingTable,
        *,
        strategy: str,
        now_s: float,
        of_all: bool,
    ) -> bool:
        """Make another size usable if it pays; return whether it is ready at once, for a verdict on it."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchFindings:
    """What a run has learnt of batches, besides step times: what its next processes begin with."""

    is_part: ClassVar[bool] = True  # a checkpoint of another version may have more fields
    evidence: Evidence = field(default_factory=Evidence)
    """Losses by batch, bans of batches, and the correction of forecasts."""
    trials: Trials = field(default_factory=Trials)
    """The trial that is running."""
    history: BatchHistory = field(default_factory=BatchHistory)
    """The batches that were chosen."""


class Decider:
    """Learns from finished steps, says when a verdict is due, and takes it in. Call it on one thread.

    `current` is the batch to start with, and `base` the base batch in samples; `now_s` the time, on a clock
    that all calls share. A change of the batch takes effect `depth` steps after the loop has taken it up.
    `book` is called with the seconds that each change has cost. Without `adapt` the batch stays as it is.
    Without `needs_noise` nothing rests on the noise at the base batch, so that it is measured rarely.
    """

    def __init__(
        self,
        tuning: Tuning,
        statistics: Statistics,
        *,
        sizes: UsableSizes,
        starter: SizeStarter,
        length: RunLength,
        current: BatchConfig,
        base: int,
        now_s: float,
        depth: int,
        adapt: bool = True,
        accumulates: bool = False,
        needs_noise: bool = True,
        book: Callable[[float], None] = lambda seconds: None,
    ):
        self.current = current
        """The batch of the newest step."""
        self.timings = StrategyTimings(1, book)
        self.feeding = FeedingTimes()
        self.evidence = Evidence()
        self.cadence = NoiseCadence(
            statistics.every_steps, statistics.overhead, is_needed=needs_noise
        )
        self._needs_noise = needs_noise
        self._tuning = tuning
        self._sizes = sizes
        self._starter = starter
        self._length = length
        self._base = base
        self._adapt = adapt
        self._accumulates_at_all = accumulates
        self._due = VerdictTimer(
            now_s,
            warm_up_steps=tuning.warm_up_steps,
            dwell_steps=tuning.dwell_steps,
            every_s=tuning.every_s,
            every_steps=tuning.every_steps,
            depth=depth,
            adapts=adapt,
        )
        self._trials = Trials()
        self._history = BatchHistory.begun(current)
        self._latest: tuple[DispatchedStep, StepMetrics[float]] | None = None

    # -- what earlier runs have left ---------------------------------------------------------------

    def restore(
        self,
        timings: Mapping[str, Sequence[TimingRow]],
        statistics_every: int,
        findings: BatchFindings | None,
        samples: int,
    ) -> None:
        """Resume after `samples` with what the run knew before; None: an older checkpoint has no findings."""
        self.timings.restore(timings)
        self.cadence.restore(statistics_every)
        if findings is None:  # a checkpoint of an earlier version
            self._history.resume()
            return
        own = copy.deepcopy(findings)
        self.evidence, self._trials, self._history = own.evidence, own.trials, own.history
        self._trials.resumed(self.current)
        self._history.go_on(self.current, samples)

    @property
    def findings(self) -> BatchFindings:
        """A copy of what the run has learnt of batches so far."""
        own = BatchFindings(evidence=self.evidence, trials=self._trials, history=self._history)
        return copy.deepcopy(own)

    def recall(self, earlier: ProgramMemory) -> None:
        """Begin with the memory of earlier runs of this program. The noise is still measured afresh."""
        self.timings.restore(earlier.timings)
        self._history.recall(earlier, self.current)

    def remembered(self, step: int) -> ProgramMemory:
        """Return the memory for the next run of this program, at the last step."""
        is_trial = self._trials.is_running and self._trials.home is not None
        return self._history.memory(self.timings.rows(), step, self.current, is_trial=is_trial)

    # -- steps -------------------------------------------------------------------------------------

    def add(
        self, step: DispatchedStep, metrics: StepMetrics[float], parts: Parts, now_s: float
    ) -> None:
        """Learn from a finished step. This may change how often the noise is measured (`cadence`)."""
        is_changed = step.config != self.current
        if is_changed:
            self.current = step.config
            self._history.add(step.config, step.samples - step.num_samples)
        self._latest = step, metrics
        self._due.add_step(
            now_s,
            step.step,
            is_changed=is_changed,
            is_disturbed=step.busy,
            num_taken=step.num_batches_taken,
        )
        self._learn_time(step, metrics, parts, is_changed=is_changed)
        if metrics.is_finite:
            update = step.config, step.samples, metrics.loss, step.num_samples
            if explodes := bool(metrics.explodes):
                logging.warning(_EXPLODES, step.step, metrics.gain, HOLD)
            is_limited = metrics.most_gain > 0
            told = {"gain": metrics.gain, "is_limited": is_limited, "explodes": explodes}
            self.evidence.add(*update, **told)
        if not step.is_last:
            return  # what follows is the same for all that were dispatched together
        self._learn_noise(step, metrics)
        # Neither a batch on trial nor one that is about to be left is worth measuring.
        is_passing = self._trials.is_running or not self._due.has_arrived(step.step)
        self._starter.stepped(step, self._table, is_trial=is_passing)

    def _learn_noise(self, step: DispatchedStep, metrics: StepMetrics[float]) -> None:
        noise = metrics.noise
        plain = self.timings.key(step.config, measured=False)
        if self.cadence.should_relax(self._table, plain, is_known=noise.is_known):
            self.cadence.every = FIRST_CADENCE
        if step.measured and metrics.is_finite and noise.newest_samples > 0:
            self.cadence.measured_at = float(step.step)
        if step.measured:
            self._history.add_noise(metrics.progress, metrics.grad, noise.newest_samples)
        self.evidence.calibrate(metrics.grad, self._base)

    def _learn_time(
        self, step: DispatchedStep, metrics: StepMetrics[float], parts: Parts, *, is_changed: bool
    ) -> None:
        # A first step that was compiled says nothing of what a change costs: its seconds are NaN.
        if is_changed and not step.timed and not math.isnan(parts.step_s):
            key = self.timings.key(step.config, measured=step.measured)
            self.timings.switches.add_first_steps(key, parts.step_s, step.num_together)
        if not step.is_last:
            return
        if step.timed and metrics.is_finite:
            how = {"measured": step.measured, "busy": step.busy}
            count = step.num_together
            self.timings.add(step.config, parts, step.step, **how, num_together=count)
        self.timings.switches.compare(self._table)

    # -- verdicts ----------------------------------------------------------------------------------

    def at_once(self) -> TunerAnswer | None:
        """Return a verdict that needs no tuner, to be put into effect now: there is nothing to fit.

        It follows the user's schedule, or goes back after a leap of the loss.
        """
        assert self._latest is not None
        step = self._latest[0].step
        is_there = self._scheduled() in (None, self.current.global_batch_size)
        if (is_there and not self._has_leapt) or not self._due.has_arrived(step):
            return None
        situation = self._situation(step)
        verdict = undo_leap(situation) if is_there else tune(situation)
        if verdict is None or verdict.config == self.current:
            return None  # the next verdict says why
        return TunerAnswer(situation=situation, verdict=verdict)

    def question(self, now_s: float, *, is_busy: bool = False) -> Situation | None:
        """Return the situation to ask the tuner about now, or None; `is_busy` says that the tuner is.

        Also considers other sizes. After a question, `answered` must be called before the next one comes.
        """
        assert self._latest is not None
        newest, metrics = self._latest
        step, is_known = newest.step, metrics.noise.is_known
        is_due = not is_busy and self._due.is_due(
            now_s,
            step,
            is_trial=self._trials.is_running,
            is_timed=lambda: self.timings.is_timed(self.current, clean=not self._due.is_disturbed),
            is_known=is_known,
            has_fit=self._fit is not None,
            has_drifted=lambda: has_drifted(self._due.judged, self._situation(step)),
        )
        if is_due:
            self._asked(now_s, step, is_known=is_known)
        # At every step at first, while most time is left; it does not wait for the tuner.
        is_time = is_due or self._due.is_warming_up or self._starter.is_time(step, now_s)
        is_settled = not self._trials.is_running and self._due.has_arrived(step)
        if self._starter.is_open and is_time and is_settled:
            is_ready = self._starter.consider(
                self._situation(step),
                self._table,
                strategy=self.current.strategy,
                now_s=now_s,
                of_all=self._adapt and is_known,
            )
            if is_ready and not (is_due or is_busy or self._due.is_judging):
                is_due = True
                self._asked(now_s, step, is_known=is_known)
        if not is_due:
            return None
        # Until the answer is handled: the tuner is free earlier, but another would not know of it.
        self._due.judged, self._due.is_judging = self._situation(step), True
        return self._due.judged

    def _asked(self, now_s: float, step: int, *, is_known: bool) -> None:
        self._due.asked(now_s, step, is_known=is_known)
        self.evidence.review(*self._noise_and_rate())

    def answered(self, cpu_s: float) -> None:
        """Note that the question was answered, which took the tuner `cpu_s` CPU seconds."""
        self._due.is_judging, self._due.answer_s = False, cpu_s

    def conclude(self, answer: TunerAnswer) -> bool:
        """Take a verdict in; return whether the loop must use another batch. Then call `posted`."""
        situation, verdict = answer.situation, answer.verdict
        current, leap = situation.current, situation.leap
        self.timings.fits[current.strategy] = situation.here.fit
        # A verdict is void on a configuration no longer in use, and if it does not know of a leap.
        is_valid = current == self.current and self._has_leapt <= (leap is not None)
        is_switch = is_valid and verdict.config != current
        if is_switch:
            if verdict.denied and not (leap is not None and leap.stays):
                self.evidence.deny(*self._noise_and_rate(), leaps=leap is not None)
            self._trials.switched(situation, verdict)
        elif is_valid:
            self._trials.kept(situation, verdict)
        self.cadence.every = verdict.statistics_every
        return is_switch

    def posted(self, num_posted: int) -> None:
        """Note that the loop was told of a change, the `num_posted`-th one (`num_batches_taken`)."""
        self._due.posted(num_posted)

    # -- the situation -----------------------------------------------------------------------------

    def _situation(self, step: int) -> Situation:
        """Return everything that a verdict depends on now."""
        assert self._latest is not None
        newest, metrics = self._latest
        samples = newest.samples
        current, noise, table = self.current, metrics.noise, self._table
        here = self.here()
        others = map(self.timings.known, self._sizes.others() if self._adapt else ())
        share_done = self._length.share_done(metrics.progress, samples)
        return Situation(
            step=step,
            here=here,
            home=home_of(self._trials.home, here, self._sizes, self.timings),
            others=tuple(
                o for o in others if o.fit or o.config.strategy not in self._trials.strategies
            ),
            grad=self.evidence.calibration.corrected(metrics.grad),
            noise_factor=self.evidence.calibration.factor,
            noise_is_guess=noise.is_guess,
            measured=metrics.measured,
            timings=table.timings(step),
            clean=self.timings.timed(current, clean=True),
            disturbed=self._due.is_disturbed,
            steps_since_change=self._due.steps_since_change(step),
            caution=self._caution(),
            accumulate=self._accumulates,
            statistics_every=self.cadence.wanted(
                table,
                self.timings.key(current, measured=False),
                self.timings.key(current, measured=True),
                is_known=noise.is_known,
                newest_samples=noise.newest_samples,
                is_needed=self._needs_noise or current.global_batch_size != self._base,
                may_block=current.num_replicas == current.num_micro_batches == 1,
            ),
            adapt=self._adapt,
            scheduled=self._scheduled(),
            stretch=self.evidence.after,
            stretch_before=self.evidence.before,
            bar=self.evidence.bar,
            leap=self.evidence.level.leap,
            floor=self._history.floor(current, samples, share_done),
            left_s=self.left_s(),
            step_s=self.timings.step_s(current),
            fixed_s=self._sizes.fixed_s,
            outlook=self._starter.outlook,
        )

    def here(self) -> StrategyOption:
        """Return the strategy and batch in use, with its measurements."""
        current = self.current
        step_s = self.timings.step_s(current)
        return StrategyOption(
            config=current,
            limits=self._limits,
            placement=self.timings.placement(current),
            ready=self._sizes.ready(current.strategy),
            timed=self.timings.timed(current, clean=not self._due.is_disturbed),
            fit=self._fit,
            # A batch was prepared during a step, so that took no longer than the step.
            feeding=self.feeding.line(current.global_batch_size, step_s),
        )

    def left_s(self) -> float:
        """Return the seconds to the end of training at the present batch; NaN before a step was timed."""
        assert self._latest is not None
        newest, metrics = self._latest
        return self._length.left_s(
            metrics.grad,
            metrics.progress,
            newest.samples,
            global_batch_size=self.current.global_batch_size,
            base=self._base,
            step_s=self.timings.step_s(self.current),
        )

    def _caution(self) -> Caution:
        """Return the limits on changes now, from the settings and from how uncertain step times are."""
        tuning, doubt = self._tuning, self._table.disturbance()
        return Caution(
            min_gain=tuning.min_gain,
            doubt=(UNKNOWN_DOUBT if math.isnan(doubt) else doubt) * self._due.is_disturbed,
            dwell_steps=PROBE_STEPS if self._trials.is_running else tuning.dwell_steps,
            max_growth=self._history.max_growth(self.current, tuning.max_growth),
            switch_s=self.timings.switches.median_s,
        )

    def _scheduled(self) -> int | None:
        """Return the global batch that the user's schedule asks for now; None without a schedule."""
        if self._latest is None:
            return None
        newest, metrics = self._latest
        return self._length.scheduled(metrics.progress, newest.samples)

    def _noise_and_rate(self) -> tuple[float, float | None]:
        """Return the noise scale in samples, and the user's own learning rate if it is known."""
        assert self._latest is not None
        newest, metrics = self._latest
        scale = noise_scale(metrics.grad, self._base)
        return float(scale), self._length.rate(metrics.progress, newest.samples, self._base)

    @property
    def _has_leapt(self) -> bool:
        """Whether the loss has leapt, and the batch may change because of that."""
        return self._adapt and self.evidence.level.leap is not None

    @property
    def _table(self) -> TimingTable:
        """The step times of the strategy in use."""
        return self.timings.table(self.current.strategy)

    @property
    def _limits(self) -> BatchLimits:
        limits = self._sizes.limits(self.current.strategy)
        if self._accumulates:
            return limits
        return dataclasses.replace(limits, max_micro_batches=1)

    @property
    def _accumulates(self) -> bool:
        """Whether a batch may consist of several micro-batches."""
        are_compiled = self._sizes.accumulates(self.current.strategy)
        return self._accumulates_at_all and (are_compiled or self.current.num_micro_batches > 1)

    @property
    def _fit(self) -> PerfFit | None:
        return self.timings.fits.get(self.current.strategy)


def home_of(
    config: BatchConfig | None,
    here: StrategyOption,
    sizes: UsableSizes,
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
            limits=sizes.limits(config.strategy),
            placement=timings.placement(config),
            ready=(config.micro_batch_size,),
        )
    )
