"""The analyst works behind the loop: timings, windows, verdicts, and everyone who is told.

One thread takes finished steps and other events in order, keeps the timing table, draws a window
every few seconds and asks the tuner for a verdict when one is due. A verdict goes to the loop through
`Requests`; hooks hear of everything through a `hooking.Teller`, however slow they are.
"""

import dataclasses
import math
import queue
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.engine.state import StepMetrics
from jaxgoodput.goodput.efficiency import Grad, gain, noise_scale
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.perf import Feeding
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe import hooks as hooking
from jaxgoodput.observe.events import Event, FitEnd, StepEnd, TuneEnd
from jaxgoodput.optim.noise import MIN_SAMPLES
from jaxgoodput.train.compile_ahead import ReadyStrategies
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import DEPTH, Control, Requests
from jaxgoodput.train.watcher import StepResult
from jaxgoodput.train.window import UNKNOWN, window_of
from jaxgoodput.tune.batch import hoped_gain, statistics_cadence, tune
from jaxgoodput.tune.evidence import Evidence
from jaxgoodput.tune.plan import scheduled
from jaxgoodput.tune.remembered import BEGINNING, EARLY, FirstNoise, ProgramMemory, lasting
from jaxgoodput.tune.timings import (
    MIN_COUNT,
    StrategyTimings,
    TimingKey,
    TimingRow,
    TimingTable,
    feeding_of,
)
from jaxgoodput.tune.tuner import Tuner, TunerAnswer
from jaxgoodput.tune.verdict import PROBE_STEPS, Caution, Situation, StrategyOption

# Once the noise is known, until both kinds of step are timed and can be compared; and while what is
# known is from before a growth of the batch.
FIRST_CADENCE = 2
# Steps beside a compilation took up to 2.3 times as long on two cores. Until it is known by how much
# they do here, only a change that promises to double the goodput is believed meanwhile.
UNKNOWN_DOUBT = 1.0
CALM_STEPS = 8  # after a compilation, before times are compared


class Analyst:
    """A thread over a queue of results and events."""

    def __init__(
        self,
        config: Config,
        strategies: ReadyStrategies,
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
        self._config = config
        self._strategies = strategies
        self._current = current
        self._requests = requests
        self._may_start = config.compiles_behind
        self._compile_s = compile_s  # what one size took
        self._tells_steps = hooking.hear(hooks, StepEnd)
        self._clock = clock
        self._on_error = on_error
        self._book = book
        self._learning_rate = learning_rate
        self._dataset_size = dataset_size
        self._adapt = adapt
        self._schedule = schedule
        self._lock = threading.Lock()
        self._timings = StrategyTimings(num_nodes=1)
        self._feeding_s: dict[int, float] = {}  # by global batch size
        self._evidence = Evidence()
        self._every = config.statistics.every_steps or 1  # until the noise is known
        self._sampled_at: int | None = None  # the step that measured the noise last
        self._changed_at = (
            -config.tuning.dwell_steps
        )  # nothing has changed yet that should settle first
        self._switches_s: list[float] = []
        # The step after a change, not compared yet.
        self._first: tuple[TimingKey, float] | None = None
        self._steps_seen = 0
        self._last_tune_s = clock.now()
        self._last_tune_step = 0
        self._window: list[StepResult] = []
        self._window_start_s = clock.now()
        self._latest: StepResult | None = None
        self._disturbed = False
        self._calm = CALM_STEPS  # steps since the last disturbed one
        self._was_unknown = False  # the noise, at the last question
        self._was_disturbed = False  # the steps, at the last question
        self._probing = False
        self._tried_from: BatchConfig | None = None  # before the probe
        self._tried: set[str] = set()  # strategies that have had their trial
        self._first_noise: FirstNoise | None = None  # near the beginning, of this or an earlier run
        # Where an earlier run ended, and after how many samples it had come there.
        self._settled: tuple[BatchConfig, int] | None = None
        # Which batches were taken up, and after how many samples, without trials that were given up; empty
        # where the run began in another process.
        self._taken_up: list[tuple[int, BatchConfig]] = [(0, current)]
        self._wanted = 0  # the number of the last change that was posted
        self._taken_at: int | None = -DEPTH  # the step at which the loop took it; None: not yet
        self._queue: queue.SimpleQueue[StepResult | TunerAnswer | Event | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._tuner = tuner(self._queue.put, on_error)
        self._is_judging = False  # from a question to its conclusion
        self._teller = hooking.Teller(
            hooks,
            is_stopping=lambda: requests.signal is not None,
            clock=clock,
            on_error=on_error,
            book=book,
        )
        self._thread = threading.Thread(target=self._run, name="jaxgoodput-analyst", daemon=True)
        self._thread.start()

    # -- from other threads ----------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether training waits for hooks."""
        return self._teller.is_awaited

    def result(self, result: StepResult) -> None:
        """A step is done. Waits where hooks are far behind, but not once a stop was asked for."""
        self._teller.hold_up()
        self._queue.put(result)

    def fed(self, global_batch_size: int, seconds: float) -> None:
        """What preparing batches of this size takes, beside the steps."""
        self._feeding_s[global_batch_size] = seconds

    def tell(self, event: Event) -> None:
        """Pass an event on to the hooks, after everything that came before it."""
        self._queue.put(event)

    def timings(self) -> dict[str, tuple[TimingRow, ...]]:
        """Step times by strategy: they must survive a restart, and so must the cadence."""
        with self._lock:
            return self._timings.rows()

    def restore(self, timings: Mapping[str, Sequence[TimingRow]], statistics_every: int) -> None:
        """Go on with these. Fits are made again from the timings."""
        with self._lock:
            self._taken_up = []
            self._timings.restore(timings)
            self._every = self._config.statistics.every_steps or statistics_every

    def recall(self, earlier: ProgramMemory) -> None:
        """Go on with what earlier runs of this program left, but for their cadence: noise comes first."""
        with self._lock:
            self._timings.restore(earlier.timings)
            self._first_noise = earlier.noise
            self._settled = earlier.batch, earlier.since_samples
            if self._current.global_batch_size == earlier.batch.global_batch_size:
                self._taken_up = [(earlier.since_samples, self._current)]

    def remembered(self, step: int) -> ProgramMemory:
        """What the next run of this program can begin with; for after `flush`, at the last step."""
        batch, since = self._settled or (self._current, 0)
        on_trial = self._probing and self._tried_from is not None
        kept = self._taken_up[:-1] if on_trial and len(self._taken_up) > 1 else self._taken_up
        if kept:
            since, batch = kept[-1]
        return ProgramMemory(
            timings=lasting(self.timings(), step),
            batch=batch,
            since_samples=since,
            noise=self._first_noise,
        )

    @property
    def statistics_every(self) -> int:
        """Steps between two noise measurements, as last decided."""
        return self._every

    def flush(self) -> None:
        """Wait until everything handed in so far is dealt with."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Deal with everything handed in and end the thread."""
        self._tuner.close()
        self._queue.put(None)
        self._thread.join()
        self._teller.close()

    # -- on the analyst's own thread -------------------------------------------------------------

    def _run(self) -> None:
        ended = False
        while (item := self._queue.get()) is not None:
            ended = ended or isinstance(item, FitEnd)
            if isinstance(item, threading.Event):
                self._teller.tell_when_done(item)
                continue
            try:
                if isinstance(item, StepResult):
                    self._take(item)
                elif isinstance(item, TunerAnswer):
                    self._is_judging = False
                    if not ended:  # a verdict on what is over is of no use
                        self._conclude(item)
                else:
                    if self._window:
                        self._draw()
                    self._teller.tell(item)
            except BaseException as error:
                self._on_error(error)

    def _take(self, result: StepResult) -> None:
        ticket, metrics = result.ticket, result.metrics
        finite = bool(metrics.is_finite)
        if ticket.config != self._current:
            if self._window:
                self._draw()  # a window is of one configuration
            self._current, self._changed_at = ticket.config, ticket.step
            before = [taken for _, taken in self._taken_up[-2:-1]]
            if before == [ticket.config]:  # what came between was a trial
                self._taken_up.pop()
            else:
                self._taken_up.append((ticket.samples - ticket.num_samples, ticket.config))
            self._switches_s = self._switches_s[-8:]
        if self._every == 1 and self._config.statistics.every_steps is None:
            plain = self._table.count(self._timings.key(ticket.config, measured=False))
            if metrics.noise.is_known and plain < 3:
                self._set_cadence(FIRST_CADENCE)
        if ticket.measured and finite and metrics.noise.newest_samples > 0:
            self._sampled_at = ticket.step
        if self._taken_at is None and ticket.num_batches_taken >= self._wanted:
            self._taken_at = ticket.step
        if finite:
            self._evidence.add(ticket.config, ticket.samples, metrics.loss, ticket.num_samples)
        latest = BEGINNING if self._first_noise is None else self._first_noise.progress
        if metrics.progress < latest and metrics.noise.newest_samples >= MIN_SAMPLES:
            self._first_noise = FirstNoise(
                progress=metrics.progress,
                sqr=tuple(metrics.noise.group_sqr.tolist()),
                var=tuple(metrics.noise.group_var.tolist()),
            )
        key = self._timings.key(ticket.config, measured=ticket.measured)
        if ticket.timed and finite:
            with self._lock:
                self._table.add(key, result.parts, ticket.step, busy=ticket.busy)
        elif ticket.step == self._changed_at:
            self._first = key, result.parts.step_s
        if self._first is not None and self._table.count(self._first[0]) >= MIN_COUNT:
            extra_s = max(self._first[1] - self._table.median_s(self._first[0]), 0.0)
            self._switches_s.append(extra_s)
            self._book("first_execution", extra_s)
            self._first = None
        self._latest, self._disturbed = result, ticket.busy
        self._calm = 0 if ticket.busy else self._calm + 1
        self._steps_seen += 1
        self._window.append(result)
        if self._tells_steps:
            self._teller.tell(_step_end(result))
        now = self._clock.now()
        if now - self._window_start_s >= self._config.reporting.window_s:
            self._draw()
        is_due = not self._follow_schedule(ticket.step) and self._is_tune_due(now, ticket.step)
        # At first, while most time is left, and then as often as anything else is decided.
        is_asked = is_due or self._steps_seen <= self._config.tuning.warm_up_steps
        if self._may_start and is_asked and self._is_compiling_worth_it(metrics):
            self._strategies.start()
            self._may_start = False
        if is_due:
            self._ask(now, ticket.step)

    def _is_compiling_worth_it(self, metrics: StepMetrics[float]) -> bool:
        """Whether other batches may save more of the time left than it takes to compile them."""
        grad = metrics.noise.cautious
        sizes = self._strategies.sizes(self._current.strategy)
        batches = np.multiply.outer(sizes, np.arange(1, self._limits.max_micro_batches + 1))
        batches *= self._current.num_replicas
        hopes = hoped_gain(grad, self._limits, self._current.global_batch_size, batches)
        hopes *= self._better_known(sizes, batches)
        is_ready = np.isin(sizes, list(self._strategies.ready(self._current.strategy)))
        hope = float(hopes[~is_ready].max(initial=0.0) / hopes[is_ready].max(initial=1.0))
        saved_s = self._left_s(metrics, grad) * (1 - 1 / hope) if hope > 1 else 0.0
        price_s = self._compile_s * max(len(sizes) - 1, 1)
        wanted = self._config.policy == "goodput" and hope >= 1 + self._config.tuning.min_gain
        if self._adapt and self._strategies.num_strategies > 1 and metrics.noise.is_known:
            # Nobody knows what another strategy is worth; one that just merits a change must repay all.
            price_s = self._compile_s * self._strategies.num_strategies
            if self._left_s(metrics, grad) * self._config.tuning.min_gain > price_s:
                return True
        return wanted and saved_s > price_s

    def _better_known(self, sizes: Sequence[int], batches: np.ndarray) -> np.ndarray:
        """[sizes, counts] by what factor a hope is wrong, where another size than the present was timed."""
        current = self._current
        now_s = self._table.step_s(self._timings.num_nodes, current)
        one = [dataclasses.replace(current, micro_batch_size=s, num_micro_batches=1) for s in sizes]
        there_s = np.array([self._table.step_s(self._timings.num_nodes, c) for c in one])
        there_s[np.asarray(sizes) == current.micro_batch_size] = math.nan
        counts = batches / batches[:, :1]  # no micro-batch takes longer than a whole step of it
        known = now_s / (there_s[:, None] * counts) * np.sqrt(batches / current.global_batch_size)
        return np.nan_to_num(known, nan=1.0)

    def _left_s(self, metrics: StepMetrics[float], grad: Grad) -> float:
        """Seconds to the end at the present batch; NaN before any step was timed."""
        step_s = self._table.step_s(self._timings.num_nodes, self._current)
        if self._config.base_steps is not None:
            worth = gain(grad, self._current.global_batch_size / self._limits.base)
            return (self._config.base_steps - metrics.progress) * step_s / float(worth)
        assert self._config.epochs is not None and self._latest is not None
        left = self._config.epochs * self._dataset_size - self._latest.ticket.samples
        return left / self._current.global_batch_size * step_s

    def _follow_schedule(self, step: int) -> bool:
        """Take up what the user's own schedule wants, if it can be: there is nothing to fit or to search."""
        if self._scheduled() in (None, self._current.global_batch_size):
            return False
        if self._taken_at is None or step < self._taken_at + DEPTH:
            return False
        situation = self._situation(step)
        verdict = tune(situation)
        if verdict.config == self._current:
            return False  # the next verdict says why
        self._conclude(TunerAnswer(situation=situation, verdict=verdict))
        return True

    def _scheduled(self) -> int | None:
        """The batch of the user's own schedule, by now."""
        if self._schedule is None or self._latest is None:
            return None
        return scheduled(self._schedule, self._share_done())

    def _share_done(self) -> float:
        """How much of the run is done, after its first result."""
        assert self._latest is not None
        if self._config.base_steps is not None:
            return self._latest.metrics.progress / self._config.base_steps
        assert self._config.epochs is not None
        return self._latest.ticket.samples / (self._config.epochs * self._dataset_size)

    def _is_tune_due(self, now: float, step: int) -> bool:
        if self._steps_seen < self._config.tuning.warm_up_steps:
            return False
        if self._is_judging or self._tuner.is_busy:
            return False
        # The loop may be far ahead of this thread, and processes agree on a change a few steps later.
        if self._taken_at is None or self._taken_at <= step < self._taken_at + DEPTH:
            return False
        if 0 < self._calm < CALM_STEPS:
            return False  # soon it is known how long a step really takes
        assert self._latest is not None
        since_change = step - self._changed_at
        if self._probing:
            return since_change >= PROBE_STEPS
        if self._last_tune_step < self._changed_at:
            return since_change >= self._config.tuning.dwell_steps  # it may want to go further
        unknown = not self._latest.metrics.noise.is_known
        if self._was_unknown and not unknown:
            return True  # what was waited for has come
        if self._was_disturbed and not self._disturbed:
            return True  # the last verdict was on times that compilation had blurred
        unknown |= self._fit is None
        return (
            now - self._last_tune_s >= self._config.tuning.every_s
            or step - self._last_tune_step >= self._config.tuning.every_steps
            or (unknown and step - self._last_tune_step >= self._config.tuning.warm_up_steps)
        )

    def _ask(self, now: float, step: int) -> None:
        """Hand the tuner what it needs for a verdict."""
        assert self._latest is not None
        self._last_tune_s, self._last_tune_step = now, step
        self._was_unknown = not self._latest.metrics.noise.is_known
        self._was_disturbed = self._disturbed
        self._evidence.review(self._noise_scale(self._latest.metrics.noise.cautious))
        # An answer may lie in the queue while the tuner is free again: another would not know of it.
        self._is_judging = self._tuner.ask(self._situation(step))

    def _situation(self, step: int) -> Situation:
        """All that a verdict depends on, by now."""
        assert self._latest is not None
        metrics, config, current = self._latest.metrics, self._config, self._current
        grad, doubt = metrics.noise.cautious, self._table.disturbance()
        clean = self._timings.timed(current, clean=True)
        here = StrategyOption(
            config=current,
            limits=self._limits,
            placement=self._timings.placement(current),
            ready=self._strategies.ready(current.strategy),
            timed=clean if not self._disturbed else self._timings.timed(current, clean=False),
            fit=self._fit,
            feeding=self._feeding(),
        )
        others = map(self._timings.known, self._strategies.others() if self._adapt else ())
        return Situation(
            step=step,
            here=here,
            home=self._home(here),
            others=tuple(o for o in others if o.fit or o.config.strategy not in self._tried),
            grad=grad,
            noise_is_lower_bound=metrics.noise.is_lower_bound,
            timings=self._table.timings(step),
            clean=clean,
            disturbed=self._disturbed,
            steps_since_change=step - self._changed_at,
            caution=Caution(
                min_gain=config.tuning.min_gain,
                doubt=(UNKNOWN_DOUBT if math.isnan(doubt) else doubt) * self._disturbed,
                dwell_steps=PROBE_STEPS if self._probing else config.tuning.dwell_steps,
                max_growth=self._max_growth(),
                switch_s=statistics.median(self._switches_s) if self._switches_s else 0.0,
            ),
            accumulate=config.accumulates,
            statistics_every=self._cadence(),
            adapt=self._adapt,
            scheduled=self._scheduled(),
            stretch=self._evidence.now(),
            stretch_before=self._evidence.before,
            bar=self._evidence.bar,
            floor=self._floor(),
            left_s=self._left_s(metrics, grad),
            step_s=self._table.step_s(self._timings.num_nodes, current),
        )

    def _feeding(self) -> Feeding | None:
        """What is known of preparing batches; no more than the steps for which they were prepared took."""
        size = self._current.global_batch_size
        step_s = self._table.step_s(self._timings.num_nodes, self._current)
        if size in self._feeding_s and math.isfinite(step_s):
            self._feeding_s[size] = min(self._feeding_s[size], step_s)
        return feeding_of(dict(self._feeding_s))

    def _noise_scale(self, grad: Grad) -> float:
        return float(noise_scale(grad, self._limits.base))

    def _max_growth(self) -> float:
        """As the user says, or as far as an earlier run settled: that is no leap into the unknown."""
        most = self._config.tuning.max_growth
        if self._settled is None or self._settled[0].strategy != self._current.strategy:
            return most
        return max(most, self._settled[0].global_batch_size / self._current.global_batch_size)

    def _floor(self) -> int:
        """The smallest batch to be considered: early on that of an earlier run, until it had come to it.

        Whatever the noise says: a larger batch loses less over a run than over its first samples.
        """
        if self._settled is None or self._latest is None:
            return 1
        batch, since_samples = self._settled
        stays = self._current.global_batch_size >= batch.global_batch_size
        early = self._latest.ticket.samples < since_samples and self._share_done() < EARLY
        return batch.global_batch_size if stays and early else 1

    def _home(self, here: StrategyOption) -> StrategyOption | None:
        """What was in use before the probe that the present configuration is."""
        config = self._tried_from
        if config is None or config == here.config:
            return None
        if config.strategy == here.config.strategy:
            return dataclasses.replace(here, config=config)
        return self._timings.known(
            StrategyOption(
                config=config,
                limits=self._strategies.limits(config.strategy),
                placement=self._timings.placement(config),
                ready=(config.micro_batch_size,),
            )
        )

    @property
    def _table(self) -> TimingTable:
        """The step times of the strategy in use."""
        return self._timings.table(self._current.strategy)

    @property
    def _limits(self) -> BatchLimits:
        limits = self._strategies.limits(self._current.strategy)
        if self._config.accumulates:
            return limits
        return dataclasses.replace(limits, max_micro_batches=1)

    @property
    def _fit(self) -> PerfFit | None:
        return self._timings.fits.get(self._current.strategy)

    def _conclude(self, found: TunerAnswer) -> None:
        """Pass a verdict on to the loop and to whoever watches."""
        situation, verdict = found.situation, found.verdict
        here, current = situation.here, situation.current
        with self._lock:
            self._timings.fits[current.strategy] = here.fit
        # A verdict on a configuration that is no longer in use is void.
        switched = verdict.config != current and current == self._current
        home = None if situation.home is None else situation.home.config
        if switched:
            if verdict.denied:
                self._evidence.deny(self._noise_scale(situation.grad))
            self._requests.post(Control(batch=verdict.config))
            # A size that was never timed is on trial, whatever the model hopes of it. Where everything
            # is timed beside a compilation, nothing is learned from a trial that will not change.
            same = verdict.config.strategy == current.strategy
            untimed = same and verdict.config.micro_batch_size not in here.timed
            untried = math.isnan(verdict.goodput) or (untimed and not situation.disturbed)
            # What the user's own schedule asks for is on no trial.
            self._probing = self._schedule is None and verdict.config != home and untried
            self._tried_from = current if self._probing else None
            self._tried.add(verdict.config.strategy)
            self._wanted, self._taken_at = self._requests.num_batches, None
            logging.info("step %d: %s", situation.step, verdict.reason)
        elif current == self._current:
            self._probing = False
            if home is not None and verdict.gain > 1:
                self._tried_from = None  # the probe has earned its place
        if verdict.statistics_every != self._every:
            self._set_cadence(verdict.statistics_every)
        self._teller.tell(
            TuneEnd(
                step=situation.step,
                before=current,
                verdict=verdict,
                fit=here.fit,
                timings=situation.timings,
                grad=situation.grad,
                num_nodes=here.placement.num_nodes,
                num_replicas=current.num_replicas,
                limits=self._limits,
                residuals=here.residuals,
                switched=switched,
                feeding=here.feeding,
            ),
        )

    def _set_cadence(self, every: int) -> None:
        with self._lock:
            self._every = every
        self._requests.post(Control(statistics_every=every))

    def _cadence(self) -> int:
        if self._config.statistics.every_steps is not None:
            return self._config.statistics.every_steps
        if self._latest is None or not self._latest.metrics.noise.is_known:
            return 1  # until the noise is known, nothing is worth more than to know it
        plain = self._timings.key(self._current, measured=False)
        measured = self._timings.key(self._current, measured=True)
        if min(self._table.count(plain), self._table.count(measured)) < 3:
            return FIRST_CADENCE
        cadence = statistics_cadence(
            self._table.median_s(plain),
            self._table.median_s(measured),
            overhead=self._config.statistics.overhead,
        )
        # At every step no plain one would ever be timed again, and a first comparison that was wrong would
        # stand for good.
        cadence = max(cadence, 2)
        # After the batch has grown, what is known is from before: renew it soon.
        stale = self._latest.metrics.noise.newest_samples < MIN_SAMPLES
        return FIRST_CADENCE if stale else cadence

    def _draw(self) -> None:
        """Close the window and tell the hooks."""
        now = self._clock.now()
        results, self._window = self._window, []
        seconds, self._window_start_s = now - self._window_start_s, now
        # What schedules are called with: see `Task.optimizer`.
        latest = results[-1]
        at = latest.metrics.progress
        if self._config.epochs is not None:
            at = latest.ticket.samples / self._limits.base
        rate = self._learning_rate(at)
        self._teller.tell(
            window_of(
                results,
                seconds,
                limits=self._limits,
                placement=self._timings.placement(self._current),
                fit=self._fit,
                learning_rate=UNKNOWN if rate is None else float(rate),
                statistics_every=self._every,
                sampled_at=self._sampled_at,
                memory_limit=self._strategies.memory_limit(self._current.strategy),
                total_base_steps=self._config.base_steps,
                total_samples=(self._config.epochs or 0) * self._dataset_size,
                stretch=self._evidence.now(),
                stretch_before=self._evidence.before,
                feeding=self._feeding(),
                feeding_s=self._feeding_s.get(self._current.global_batch_size, UNKNOWN),
                arithmetic=self._strategies.arithmetic(self._current),
                tokens_per_sample=float(self._config.reporting.tokens_per_sample or UNKNOWN),
            ),
        )


# Of a step's metrics, what an event says elsewhere; and names that hooks know.
_SAID_ELSEWHERE = {"is_finite", "skipped_in_a_row", "num_samples", "num_groups", "progress"}
_TOLD_AS = {
    "num_skipped": "skipped",
    "sqr": "grad_sqr",
    "var": "grad_var",
    "num_samples": "noise_samples",
    "newest_samples": "newest_noise_samples",
}


def _step_end(result: StepResult) -> StepEnd:
    """What hooks hear of a step."""
    ticket, metrics = result.ticket, result.metrics
    return StepEnd(
        step=ticket.step,
        progress=metrics.progress,
        samples=ticket.samples,
        config=ticket.config,
        num_samples=ticket.num_samples,
        before=ticket.before,
        after=ticket.after,
        finite=bool(metrics.is_finite),
        at_s=result.ready_s,
        seconds=result.parts.step_s if ticket.timed else None,
        metrics=_told(metrics),
    )


def _told(metrics: StepMetrics[float]) -> dict[str, float]:
    """What hooks hear of a step, by name: every field but those of `_SAID_ELSEWHERE`."""
    own = {f.name: getattr(metrics, f.name) for f in dataclasses.fields(metrics)}
    noise, aux = own.pop("noise"), own.pop("aux")
    told = {name: value for name, value in own.items() if name not in _SAID_ELSEWHERE}
    told |= {
        f.name: getattr(noise, f.name)
        for f in dataclasses.fields(noise)
        if not f.name.startswith("group_")  # not numbers
    }
    told = {_TOLD_AS.get(name, name): value for name, value in told.items()}
    return told | {f"aux/{name}": value for name, value in aux.items()}
