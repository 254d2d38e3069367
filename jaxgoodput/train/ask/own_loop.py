"""`Tuner` takes the trainer's decisions about the batch for a loop of the user's own.

It asks the same `Decider` as `Trainer.fit`, on the caller's thread. What differs is how other sizes come into
use: a plain loop compiles a size in its first step at it, and waits meanwhile. So the price of a size is the
whole compilation, and `LoopSizes` offers one more size only if the account of exploring allows that price.

A step that is not done yet is read one step later, so that the device always has work. The loop waits for a
step only before and after the first one of another program, whose compilation would otherwise count as step
time, and at the end of training. A program is a size together with whether the step is to measure the noise.
The time that the tuner itself takes is not step time: the step beside which it decided is not timed.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import PackedTree, struct
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.engine.state import StepMetrics
from jaxgoodput.goodput.efficiency import is_known
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.optim import adaptation
from jaxgoodput.optim.adaptation import Adaptation, AdaptiveState
from jaxgoodput.train.compile_ahead import fixed_on_cpu_s
from jaxgoodput.train.config import Statistics, Tuning
from jaxgoodput.train.decider import Decider
from jaxgoodput.train.process import launched
from jaxgoodput.tune.exploring import Explorer, Looks
from jaxgoodput.tune.payoff import RunLength
from jaxgoodput.tune.plan import BatchPlan, batch_plan
from jaxgoodput.tune.timings import DispatchedStep, Parts, TimingTable
from jaxgoodput.tune.tuner import answer
from jaxgoodput.tune.verdict import Situation, StrategyOption, Verdict

LEAST_COMPILE_S = 1e-9  # a price of 0 would mean that nothing was compiled
WRONG_SHARE = 0.01  # by which a batch may differ from what was asked for: roundings
_NOTHING = StepBytes(arguments=0, outputs=0, temporaries=0)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A size that a verdict may choose although it is not compiled yet."""

    size: int
    """Samples of an update."""
    price_s: float
    """Seconds to charge once it is compiled, for that and for its trial."""
    compile_s: float
    """Seconds of the price that are for compiling."""


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """The first step of a program, until later steps tell which part of it was compiling."""

    config: BatchConfig
    """Its batch."""
    seconds: float
    """How long it took, with its compilation."""
    charged_s: float
    """Seconds that were charged for compiling it."""
    is_first_of_size: bool
    """Whether no other program of this size was compiled before."""


class LoopSizes:
    """The sizes that a loop of the user's own may use. It compiles each when it is first used, and waits.

    `compile_s` is how long that takes; NaN until the first step has told, 0 if no price is to be paid.
    """

    def __init__(self, plan: BatchPlan, compile_s: float):
        self.is_open = compile_s != 0
        """Whether sizes become usable one by one, each for a price."""
        self.fixed_s = math.inf
        """Upper bound on the part of a step's seconds that does not grow with its batch."""
        self._plan = plan
        start = plan.start.micro_batch_size
        self._ready = (start,) if self.is_open else tuple(plan.sizes)
        self._explorer = Explorer(compile_s, 0.0, delay=1.0, least_delay=1.0)
        # Programs: a size, and whether it was asked to measure the noise.
        self._used: set[tuple[int, bool]] = set()
        self._compiled: set[int] = set()  # sizes of which a program was compiled
        self._first_steps: list[FirstStep] = []
        self._offer: Offer | None = None
        self._looks = Looks(0.0)

    # -- as `UsableSizes` --------------------------------------------------------------------------

    def limits(self, strategy: str) -> BatchLimits:
        """Return the user's limits."""
        return self._plan.limits

    def ready(self, strategy: str) -> Sequence[int]:
        """Return the sizes that were used, and the one that may be compiled next."""
        return self._ready

    def accumulates(self, strategy: str) -> bool:
        """Return False: an update takes one micro-batch."""
        return False

    def others(self) -> tuple[StrategyOption, ...]:
        """Return nothing: the loop has a single strategy."""
        return ()

    # -- as `SizeStarter` --------------------------------------------------------------------------

    @property
    def outlook(self) -> str:
        """A sentence on what the next size costs and may save, as last decided."""
        return self._explorer.outlook

    def is_time(self, step: int, now_s: float) -> bool:
        """Whether to `consider` another size again."""
        return self._looks.is_time(step, now_s)

    def is_new(self, size: int, *, measures: bool) -> bool:
        """Return whether a step of this size, measuring the noise or not, would be the first of its kind."""
        return (size, measures) not in self._used

    def use(self, size: int, *, measures: bool) -> None:
        """Note that a step of this kind was taken."""
        self._used.add((size, measures))

    def compiled(self, config: BatchConfig, seconds: float) -> None:
        """Note that the first step of a program took this long, with its compilation. Charges an offer."""
        size, charged_s = config.micro_batch_size, 0.0
        if not self.is_open:
            return
        if self._offer is not None and self._offer.size == size:
            self._explorer.account.spend(self._offer.price_s)
            charged_s, self._offer = self._offer.compile_s, None
        self._first_steps.append(
            FirstStep(
                config=config,
                seconds=seconds,
                charged_s=charged_s,
                is_first_of_size=size not in self._compiled,
            )
        )
        self._compiled.add(size)

    def stepped(self, ticket: DispatchedStep, table: TimingTable, *, is_trial: bool) -> None:
        """Take in what compilations really took, once enough other steps of their size were timed."""
        unknown = []
        for first in self._first_steps:
            config = first.config
            timed = table.timed_sizes(1, config.num_replicas, clean=True)
            if config.micro_batch_size in timed:
                self._correct(first, table.step_s(1, config))
            else:
                unknown.append(first)
        self._first_steps = unknown

    def _correct(self, first: FirstStep, step_s: float) -> None:
        """Charge what compiling a program really took, and expect the same of the next size."""
        took_s, explorer = max(first.seconds - step_s, LEAST_COMPILE_S), self._explorer
        is_start = first.config == self._plan.start
        if not is_start:  # the first size has to be compiled anyway
            explorer.account.spend(took_s - first.charged_s)
        # The first size may come from a compilation cache, so that the user knows better.
        if first.is_first_of_size and (not is_start or math.isnan(explorer.compile_s)):
            explorer.compile_s = took_s

    def consider(
        self,
        situation: Situation,
        table: TimingTable,
        *,
        strategy: str,
        now_s: float,
        of_all: bool,
    ) -> bool:
        """Offer one more size if that is expected to pay; return whether a verdict should be about it now.

        An offer is charged when it is compiled. Another one replaces it if no verdict has chosen it.
        """
        self._looks.looked(situation.step, now_s)
        explorer, caution = self._explorer, situation.caution
        # A verdict would not use it yet.
        is_early = situation.steps_since_change < caution.dwell_steps
        if is_early or math.isnan(explorer.compile_s) or not is_known(situation.grad):
            return False
        account, spent_s = explorer.account, explorer.account.spent_s
        found = explorer.next(
            situation, self._plan.sizes, self._ready, table, now_s=now_s, may_hurry=False
        )
        if found is None:
            return False
        explorer.compiled(explorer.compile_s, table)
        withdrawn = None if self._offer is None else self._offer.size
        price_s = account.spent_s - spent_s
        account.spend(-price_s)  # see `compiled`
        self._offer = Offer(size=found.size, price_s=price_s, compile_s=explorer.compile_s)
        self._ready = (*(x for x in self._ready if x != withdrawn), found.size)
        return True


@struct
class LoopReading:
    """What is read of a step: its metrics, and what tells whether the loop does as it was asked."""

    metrics: StepMetrics[Any]
    """What decisions rest on; what the optimizer's state does not hold is 0."""
    measured: Any
    """Whether the step measured the noise."""
    base_batches: Any
    """Samples so far over the base batch, without the rounding error `base_batches_rest`."""
    base_batches_rest: Any
    """Rounding error of `base_batches`."""


def _reading(own: PackedTree[Adaptation], loss: Any) -> PackedTree[LoopReading]:
    """Return what the state of `adaptive` and the loss say of a step."""
    state, found = AdaptiveState(inner=(), own=own), own.tree
    loss = jnp.asarray(loss, jnp.float32)
    none = jnp.zeros(())  # integers beside floats would be packed as float64
    metrics = StepMetrics[Array](
        loss=loss,
        weight=jnp.ones(()),
        grad_norm=none,
        is_finite=jnp.isfinite(loss),
        num_skipped=none,
        skipped_in_a_row=none,
        num_samples=none,
        num_groups=none,
        progress=adaptation.progress(state),
        gain=adaptation.gain(state).mean(),
        explodes=found.growth.explodes,
        most_gain=found.growth.most_worth,
        noise=adaptation.readout(state),
        measured=adaptation.measured_groups(state),
        aux={},
    )
    reading = LoopReading(
        metrics=metrics,
        measured=found.unmeasured == 0,
        base_batches=found.base_batches,
        base_batches_rest=found.base_batches_rest,
    )
    return PackedTree.of(reading)


_reading_of = jax.jit(_reading)


@dataclass(frozen=True, kw_only=True)
class LoopStep:
    """A step of the loop that was not read yet."""

    about: DispatchedStep
    reading: PackedTree[LoopReading]
    seconds: int | float | None  # as the caller says; None: by the clock
    done_s: float | None  # the clock's reading when it was handed in, if it was done by then
    measures: bool  # whether it was asked to measure the noise
    compiles: bool  # whether it was the first one of its program
    is_disturbed: bool = False  # whether the clock can't tell how long it took


class Tuner:
    """Chooses the batches of a loop of your own, as `Trainer.fit` does in its loop.

    Use this if you want to keep your loop. Your optimizer must be wrapped in `adaptive`, and your steps must
    measure the gradient noise, such as with `value_grad_and_noise`:

        tuner = jg.Tuner(jg.BatchLimits(base=32, max=512), base_steps=1500)
        while not tuner.is_done:
            batch = take(tuner.batch_size)
            params, opt_state, loss = step(params, opt_state, batch)
            tuner.step(opt_state, loss)

    `limits` are the batches, in samples of one update; their `base` is the `base_batch_size` of `adaptive`.
    Set `BatchLimits.sizes` if your step demands certain sizes, such as multiples of the number of groups.
    `base_steps` is the length of training. Make the tuner just before the loop: the time from there
    to the end of the first step counts as a compilation.

    Your loop compiles a size when it first uses it, and waits. The tuner therefore tries another size only if
    the time that is left can repay that. `compile_s` is how long it takes; None takes what the first step
    took longer than later ones. Each new size corrects it. 0 means that compiling is no reason against a
    size, for instance because you have compiled them all before.

    `learning_rate` returns your own learning rate by base steps, without the factor of `adaptive`. With it, a
    batch at which the loss has leapt is tried again once the rate has halved. `tuning` and `statistics` are
    as in `Config`, but some of their fields don't apply: accumulation, memory of earlier runs, smoothing,
    `Statistics.preconditioned` and `Statistics.from_norm_layers`. With an Adam-like optimizer, pass
    `second_moment_decay` to `adaptive` yourself, and a `noise.preconditioner` to what measures the noise.
    `clock` tells the time.

    `opt_state` is the state of a resumed loop, from which the progress made so far is read. Without it, the
    tuner knows of that after the first step.

    Raises ValueError in a job of several processes, and RuntimeError in one whose hosts come and go: each
    process would decide for itself.
    """

    def __init__(
        self,
        limits: BatchLimits,
        base_steps: int | float,
        *,
        compile_s: int | float | None = None,
        learning_rate: Callable[[float], float] | None = None,
        tuning: Tuning | None = None,
        statistics: Statistics | None = None,
        clock: Clock | None = None,
        opt_state: PyTree | None = None,
    ):
        _check(base_steps, compile_s)
        plan = batch_plan(
            dataclasses.replace(limits, max_micro_batches=1),
            1,
            limits.max,
            budget=0,
            needs=lambda size, several: _NOTHING,
            accumulate=False,
        )
        self._base_steps = float(base_steps)
        self._base = limits.base
        self._sizes = LoopSizes(plan, math.nan if compile_s is None else float(compile_s))
        self._decider = Decider(
            tuning or Tuning(),
            statistics or Statistics(),
            sizes=self._sizes,
            starter=self._sizes,
            length=RunLength(
                base_steps=self._base_steps,
                epochs=None,
                dataset_size=0,
                learning_rate=learning_rate or (lambda at: None),
            ),
            current=plan.start,
            base=limits.base,
            now_s=0.0,
            depth=0,
        )
        self._clock = clock or SystemClock()
        self._config = plan.start  # of the next step
        self._newest = plan.start  # of the newest step
        self._num_steps = self._num_changes = 0
        self._unread: LoopStep | None = None
        self._seen_s = self._clock.now()  # when the time of the next step to read begins
        self._passed_s = 0.0  # the time of all steps that were read
        self._progress = 0.0 if opt_state is None else adaptation.progress_on_host(opt_state)
        self._base_batches = math.nan
        self._verdict: Verdict | None = None

    @property
    def batch_size(self) -> int:
        """Number of samples that the next update should use."""
        return self._config.global_batch_size

    @property
    def measures(self) -> bool:
        """Whether the next step need measure the gradient noise.

        A step that measures takes longer. If you have a program for each kind, use this to choose. Measuring
        at every step does no harm but takes its time.
        """
        return self._num_steps % self._decider.cadence.every == 0

    @property
    def progress(self) -> float:
        """Base steps done, at the newest step that was read."""
        return self._progress

    @property
    def is_done(self) -> bool:
        """Whether `base_steps` base steps are done.

        It is exact after every step. Before the first one, a resumed loop has to pass its `opt_state` to the
        constructor.
        """
        return self._progress >= self._base_steps

    @property
    def verdict(self) -> Verdict | None:
        """The newest verdict, whether it changed the batch or not; None before the first."""
        return self._verdict

    @property
    def why(self) -> str:
        """The reason of the newest verdict, as a sentence; empty before the first."""
        return "" if self._verdict is None else self._verdict.reason

    def step(self, opt_state: PyTree, loss: Any, *, seconds: int | float | None = None) -> None:
        """Learn from an update that has just used `batch_size` samples, and decide about the next one.

        Call it once after each update. Afterwards, `batch_size` is the size for the next update.

        `opt_state` is the state after the update and `loss` the mean loss of its batch; neither need be
        computed yet. You may donate them to the next step. `seconds` is how long the step took, if you know
        better than the clock: without it, all time between two steps counts.

        Raises ValueError if the state is not of `adaptive`, or if it counts other samples than the tuner.
        """
        if jnp.ndim(loss) != 0:
            raise ValueError(
                f"loss must be one number, the mean over the batch; got the shape {jnp.shape(loss)}. Pass "
                "loss.mean()."
            )
        own = adaptation.packed(opt_state)
        if not self._num_steps:
            self._sizes.fixed_s = _fixed_s(own, opt_state)
        size = self.batch_size
        now = self._step(own, loss, seconds)
        before, self._unread, config = self._unread, None, self._config
        if before is not None:
            if now.done_s is not None:
                before, now = self._apart(before, now)
            has_decided = self._read(before)
            now = dataclasses.replace(now, is_disturbed=now.is_disturbed or has_decided)
        # At most so much progress is not known yet.
        may_be_done = self._progress + max(size / self._base, 1.0) >= self._base_steps
        is_next_new = self._sizes.is_new(self.batch_size, measures=self.measures)
        must_wait = now.compiles or may_be_done or is_next_new or self._config != config
        if must_wait or now.done_s is not None:
            self._read(now)
            self._seen_s = self._clock.now()  # nothing is being computed
        else:
            self._unread = now

    def _apart(self, before: LoopStep, now: LoopStep) -> tuple[LoopStep, LoopStep]:
        """Return two steps with a time for each. The first was not done when it was handed in."""
        assert now.done_s is not None
        are_alike = before.measures == now.measures and before.about.timed and now.about.timed
        how = {"is_disturbed": before.is_disturbed or not are_alike}
        middle_s = (self._seen_s + now.done_s) / 2
        return dataclasses.replace(before, done_s=middle_s, **how), dataclasses.replace(now, **how)

    def _step(
        self, own: PackedTree[Adaptation], loss: Any, seconds: int | float | None
    ) -> LoopStep:
        """Return the newest step, whose reading is being computed."""
        size, measures = self.batch_size, self.measures
        compiles = self._sizes.is_new(size, measures=measures)
        self._sizes.use(size, measures=measures)
        self._num_steps += 1
        about = DispatchedStep(
            step=self._num_steps,
            config=self._config,
            measured=False,  # until it is read
            began_s=self._passed_s,
            timed=not (compiles or self._config != self._newest),
            busy=False,
            num_samples=size,
            samples=0,  # until it is read
            num_batches_taken=self._num_changes,
        )
        self._newest = self._config
        return LoopStep(
            about=about,
            seconds=seconds,
            done_s=self._clock.now() if _is_done(loss) else None,
            reading=_reading_of(own, loss),
            measures=measures,
            compiles=compiles,
        )

    def _read(self, step: LoopStep) -> bool:
        """Wait for a step, learn from it, and decide; return whether deciding has taken time."""
        reading = _on_host(step.reading)
        done_s = self._clock.now() if step.done_s is None else step.done_s
        done_s = max(done_s, self._seen_s)
        is_disturbed = step.is_disturbed and step.seconds is None
        seconds = done_s - self._seen_s if step.seconds is None else float(step.seconds)
        self._seen_s = done_s
        self._passed_s += seconds
        base_batches = reading.base_batches + reading.base_batches_rest
        about = dataclasses.replace(
            step.about,
            measured=reading.measured,
            timed=step.about.timed and seconds > 0 and not is_disturbed,
            samples=round(base_batches * self._base),
        )
        self._check_samples(about, base_batches)
        if step.compiles:
            self._sizes.compiled(about.config, seconds)
        metrics = reading.metrics
        self._progress = metrics.progress
        parts = Parts(step_s=math.nan if step.compiles or is_disturbed else seconds)
        self._decider.add(about, metrics, parts, self._passed_s)
        return self._decide()

    def _decide(self) -> bool:
        """Reach a verdict if one is due; return whether it was."""
        decider = self._decider
        found = decider.at_once()
        if found is None:
            situation = decider.question(self._passed_s)
            if situation is None:
                return False
            began_s = time.thread_time()
            found = answer(situation)
            decider.answered(time.thread_time() - began_s)
        self._verdict = found.verdict
        if decider.conclude(found):
            self._config = found.verdict.config
            self._num_changes += 1
            decider.posted(self._num_changes)
        return True

    def _check_samples(self, about: DispatchedStep, base_batches: float) -> None:
        """Raise ValueError if the state counts other samples than this step was to have."""
        before, self._base_batches = self._base_batches, base_batches
        counted = (
            base_batches - before
        ) * self._base  # NaN at the first step: the run may have resumed
        if abs(counted - about.num_samples) > WRONG_SHARE * about.num_samples:
            raise ValueError(
                f"step {about.step} was to use {about.num_samples} samples, but the optimizer's state counts "
                f"{counted:.6g} of them, by a base batch of {self._base}. The tuner would judge another "
                "batch than you use. Take tuner.batch_size samples for each update, pass their number to "
                "tx.update as global_batch_size, give adaptive the limits' base as base_batch_size, and call "
                "tuner.step once after each update."
            )


def _is_done(loss: Any) -> bool:
    """Return whether a loss is computed. Numbers of Python and NumPy are."""
    is_ready = getattr(loss, "is_ready", None)
    return is_ready is None or is_ready()


def _on_host(reading: PackedTree[LoopReading]) -> LoopReading:
    """Wait for a reading; return it with Python numbers."""
    return jax.tree.map(_plain, reading.host_tree)


def _plain(value: Any) -> Any:
    """Return a Python number for an array of one, and other arrays as they are."""
    return value.item() if value.ndim == 0 else value


def _fixed_s(own: PackedTree[Adaptation], opt_state: PyTree) -> float:
    """Return an upper bound on the part of a step's seconds that does not grow with its batch.

    It is infinite unless on a CPU.
    """
    (device, *_) = own.vector.devices()
    if device.platform != "cpu":
        return math.inf
    # The parameters are not known; they are taken to be as large as the optimizer's state.
    return fixed_on_cpu_s(2 * sum(x.nbytes for x in jax.tree.leaves(opt_state)))


def _check(base_steps: int | float, compile_s: int | float | None) -> None:
    """Raise ValueError for arguments of `Tuner` that cannot work, and RuntimeError in an unsuitable job."""
    if not 0 < base_steps < math.inf:
        raise ValueError(
            f"base_steps must be a positive number, got {base_steps}. Give the updates that training would "
            "take with the base batch."
        )
    if compile_s is not None and not compile_s >= 0:
        raise ValueError(
            f"compile_s must be at least 0 seconds, got {compile_s}. Leave it out to have it measured."
        )
    link = launched()
    if link.refusal:
        raise RuntimeError(link.refusal)
    if link.membership is not None:
        raise RuntimeError(
            "this process belongs to a job whose hosts come and go (run --nnodes), and a loop of your own "
            "would train alone in each of its processes. Use jg.Trainer, or start the loop without a "
            "launcher."
        )
    if num_others := jax.process_count() - 1:
        raise ValueError(
            f"this process is one of {num_others + 1}, each of which would choose its own batch. Use "
            "jg.Trainer, whose processes decide together."
        )
