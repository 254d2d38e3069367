"""`tryout`: would another batch train faster? Answered by a minute of training that leaves nothing behind.

The task's own run begins in a temporary folder, with the base batch, until the gradient noise is known. Then
further runs take one batch after the other, each four times as large as the one before, until a larger one
does not fit, promises no more, or time is up; if time is left, also the batches between. The noise says how
much each sample of a batch is worth, the step times how many samples there are in a second.
"""

import dataclasses
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.data.sources import is_endless
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import Window
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.text import percent, roughly, seconds
from jaxgoodput.train.ask.aside import repeatable, require_alone, set_aside, short_run
from jaxgoodput.train.config import Config
from jaxgoodput.train.start.problem import problem_of
from jaxgoodput.train.trainer import Trainer
from jaxgoodput.tune.block_times import SHORT_S

TIME_S = 50.0
# Noise estimates that are enough, how long they are waited for, and the steps that are tried at least. The
# noise mostly grows: that of the middle of a run tells more of the whole, if the middle comes so soon.
ENOUGH_NOISE, NOISE_S, NOISE_STEPS, MIDDLE = 40.0, 10.0, 12, 0.5
# For how long steps of a batch are timed, and how many at least; the second half counts. Short steps are
# dispatched together after a while, which is waited for: a run has most of its steps so.
TIMED_S, TIMED_STEPS, TOGETHER_WITHIN_S = 4.0, 6, 12.0
LEAST_TIMED_S = 1.0  # if time is up: the first steps of a run may take longer
# The noise may take this share of the time; if compiling has used that up, the second share for its steps.
NOISE_SHARE, NOISE_STEPS_SHARE = 0.4, 0.1
EXTRA_SHARE = 0.3  # of the time, by which one larger batch may go over it
FACTOR = 4  # from one batch to the next
FURTHEST = 1024  # times the base batch
WORTH_IT = 0.9  # of the time with the base batch
TOGETHER = 2.0  # steps per dispatch, from which on most steps are dispatched together
LONG = 10**6  # base steps, or passes over the data, of a run that is ended by its hook
# Base steps of a task's own run, and its seconds, from which on it need not be made longer for this.
LONG_ENOUGH, LONG_ENOUGH_S = 1000, 20.0


@dataclass(frozen=True, kw_only=True)
class TriedBatch:
    """A batch whose steps were timed."""

    num_samples: int
    step_s: float
    """Median seconds of a step."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Median seconds of steps of a batch, dispatched one by one and together; NaN if there were none."""

    num_samples: int
    alone_s: float
    together_s: float

    def step_s(self, base: "StepTimes") -> float:
        """Return the seconds of a step in a long run, to compare with those of the base batch.

        If short steps of this batch were not seen together yet, they are expected to save as many seconds
        each as at the base batch, and to take at least as long. If only steps alone are known of the base
        batch, steps alone are compared. NaN if no steps of one kind are known of both, unless those of this
        batch are too long to be dispatched together.

        >>> base = StepTimes(num_samples=8, alone_s=0.002, together_s=0.001)
        >>> round(StepTimes(num_samples=16, alone_s=0.0025, together_s=math.nan).step_s(base), 6)
        0.0015
        """
        if math.isnan(base.together_s):
            return self.alone_s
        if not math.isnan(self.together_s):
            return self.together_s
        if self.alone_s >= SHORT_S:
            return self.alone_s
        return max(self.alone_s - max(base.alone_s - base.together_s, 0.0), base.together_s)


def step_times(windows: Sequence[Window]) -> StepTimes:
    """Return the step times in the windows of a run with one batch; of each kind, the second half counts."""

    def median_s(per_dispatch: Callable[[float], bool]) -> float:
        of_kind = [one for one in windows if per_dispatch(one.steps_per_dispatch)]
        later = of_kind[len(of_kind) // 2 :]
        return statistics.median([one.seconds / one.num_steps for one in later] or [math.nan])

    alone_s, together_s = median_s(lambda n: n < TOGETHER), median_s(lambda n: n >= TOGETHER)
    return StepTimes(
        num_samples=windows[-1].config.global_batch_size, alone_s=alone_s, together_s=together_s
    )


def time_share(base: TriedBatch, batch: TriedBatch, noise: float) -> float:
    """Return the time of a batch for the same progress as a share of the base batch's, at a noise scale.

    >>> one, four = (TriedBatch(num_samples=n, step_s=1.0) for n in (8, 32))
    >>> time_share(one, four, math.inf), time_share(one, four, 8.0)
    (0.25, 0.625)
    """
    # How much a sample is worth, relative to one in the base batch.
    worth = 1.0 if math.isinf(noise) else (noise + base.num_samples) / (noise + batch.num_samples)
    return (batch.step_s / batch.num_samples) / (base.step_s / base.num_samples) / worth


@dataclass(frozen=True, kw_only=True)
class Tryout:
    """What a minute of training says of other batches."""

    batches: tuple[TriedBatch, ...]
    """The base batch, and larger ones in order."""
    noise_scale: float
    """Batch at which noise and signal of the gradient are equal, in samples; NaN if it is unknown."""
    noise_lower: float
    """Lower end of its 80 % interval."""
    noise_upper: float
    """Upper end."""
    noise_is_guess: bool
    """Whether no signal exceeds its own error."""
    limit: str = ""
    """Why no larger batch was tried."""
    refusal: str = ""
    """Why the run could not choose its batch as the task is now; empty if it could."""
    num_noise_steps: int = 0
    """Steps that were to measure the noise."""
    base_steps: float | None = None
    """Length of the run, in steps of the base batch; None if it is not known."""

    @property
    def base(self) -> TriedBatch:
        """The batch that the script has now."""
        return self.batches[0]

    def time_of(self, batch: TriedBatch, noise: float) -> float:
        """Return the time that a batch takes for the same progress, as a share of the base batch's.

        `noise` is the noise scale, in samples.
        """
        return time_share(self.base, batch, noise)

    @property
    def best(self) -> TriedBatch:
        """The batch that promises to take least time."""
        if math.isnan(self.noise_scale):
            return self.base
        return min(self.batches, key=lambda one: self.time_of(one, self.noise_scale))

    @property
    def is_worth_it(self) -> bool:
        """Whether the best batch takes clearly less time, and no more with the least noise there may be."""
        if self.best is self.base:
            return False
        is_better = self.time_of(self.best, self.noise_scale) <= WORTH_IT
        return is_better and self.time_of(self.best, self.noise_lower) <= 1.0

    def answer(self) -> str:
        """Return what was found, as a few lines for people."""
        lines = [f"{'batch':<10}{'step':>9}{'samples/s':>12}   time for the same progress"]
        for one in self.batches:
            pace = one.num_samples / one.step_s
            lines.append(
                f"{one.num_samples:<10,}{seconds(one.step_s):>9}{pace:>12,.0f}   {self._time_in_words(one)}"
            )
        return "\n".join([*lines, *([self.limit] if self.limit else []), "", *self._conclusion()])

    def _time_in_words(self, one: TriedBatch) -> str:
        if one is self.base:
            return "1"
        if math.isnan(self.noise_scale):
            return "unknown"
        noises = (self.noise_scale, self.noise_upper, self.noise_lower)
        likely, least, most = (self.time_of(one, noise) for noise in noises)
        return f"{likely:.2f} ({least:.2f} to {most:.2f})"

    def _conclusion(self) -> Iterator[str]:
        best, base = self.best, self.base.num_samples
        if math.isnan(self.noise_scale):
            yield (
                f"Not known: {self.num_noise_steps} steps did not tell the noise of the gradient. Take more "
                "time (--time-s); or, if the loss is one number for all samples, return one per sample."
            )
            return
        guess = ", little more than a guess so far" if self.noise_is_guess else ""
        yield (
            f"The noise scale is about {self.noise_scale:,.0f} samples (80 %: {self.noise_lower:,.0f} to "
            f"{self.noise_upper:,.0f}){guess}. Well below it, a batch twice as large needs half the steps. "
            "It mostly grows while a run trains."
        )
        if len(self.batches) == 1:
            yield "Not known: no larger batch was timed."
        elif best is self.base:
            yield f"Not worth it now: no larger batch would take less time than {base:,} samples."
        else:
            share = percent(self.time_of(best, self.noise_scale))
            would = (
                f"{best.num_samples:,} samples instead of {base:,} would take {share} of the time"
            )
            if not self.is_worth_it:
                yield f"Not worth it now: {would}, and that is not certain."
                return
            yield f"Worth it: {would}{self._saved()}. To let the run choose its batch:"
            yield f'\n    batch=jg.BatchLimits(base={base}, max={4 * best.num_samples}), policy="goodput"'
            if self.refusal:
                yield f"\nBefore that: {self.refusal}"

    def _saved(self) -> str:
        if self.base_steps is None:
            return ""
        whole_s = self.base_steps * self.base.step_s
        share = self.time_of(self.best, self.noise_scale)
        return f", {roughly(share * whole_s)} instead of {roughly(whole_s)}"


def tryout(trainer: Trainer, *, time_s: float = TIME_S, clock: Clock | None = None) -> Tryout:
    """Find out, in about a minute of training, what larger batches promise; `time_s` is how many seconds.

    It trains in a temporary folder: the trainer's own workdir is not touched. Its hooks are not called, and
    nothing is evaluated. The answer in words is `answer()`.

    It takes longer than that if a few steps or one larger batch need more time: without them there is no
    answer.

    Raises what `Trainer.fit` raises with the base batch; RuntimeError in a job of several processes, with
    tables or live data, or if the data end before a step is timed.
    """
    require_alone(trainer, "tryout")
    clock = clock or SystemClock()
    own, began_s = trainer.config, clock.now()
    refusal = _refusal(trainer, own)
    with set_aside(trainer), tempfile.TemporaryDirectory(prefix="jaxgoodput-try-") as folder:
        source = repeatable(trainer.dataset(), "tryout")
        num_samples = math.inf if is_endless(source) else float(len(source))
        trainer.dataset = lambda: source
        length = _length(own, num_samples)
        # The noise and the time of the base batch come from runs of one length: a schedule is part of the
        # program, which need not be compiled twice then.
        own = own if (length or 0) >= LONG_ENOUGH else _extended(own)
        noise, num_noise_steps = _noise(trainer, own, folder, clock, began_s, time_s, length)
        upper = noise.noise_interval.upper
        own_s = (length or math.inf) * noise.seconds / noise.num_steps
        batches, limit = _timed(
            trainer,
            own if own_s >= LONG_ENOUGH_S else _extended(own),
            folder,
            lambda: began_s + time_s - clock.now(),
            num_samples,
            math.inf if math.isnan(upper) else upper,
            clock,
            time_s,
        )
    interval = noise.noise_interval
    return Tryout(
        batches=batches,
        noise_scale=noise.noise_scale,
        noise_lower=interval.lower,
        noise_upper=interval.upper,
        noise_is_guess=noise.noise_is_guess,
        limit=limit,
        refusal=refusal,
        num_noise_steps=num_noise_steps,
        base_steps=length,
    )


def _length(own: Config, num_samples: float) -> float | None:
    """Return the length of the task's own run in base steps; None if it is not known."""
    if own.base_steps is None and own.epochs is not None and math.isfinite(num_samples):
        return own.epochs * num_samples / own.batch.base
    return own.base_steps


def _refusal(trainer: Trainer, own: Config) -> str:
    """Return why the run could not choose its batch; empty if it could."""
    try:
        problem_of(trainer, dataclasses.replace(own, policy="goodput"))
    except ValueError as error:
        return str(error)
    return ""


def try_loss(
    loss: Callable[..., Any],
    params: Any,
    data: Any,
    optimizer: optax.GradientTransformation,
    *,
    batch: int,
    base_steps: float | None = None,
    time_s: float = TIME_S,
) -> Tryout:
    """Find out what larger batches promise for a loop of your own, as `tryout` does for a trainer.

    `loss(params, batch, key)` returns a loss per sample, `[batch]`; `data` is what `Trainer.dataset` may
    return; `optimizer` is an optax optimizer that is tuned for batches of `batch` samples; and `base_steps`
    is the length of a run with them, if it is known.
    """

    class Own(Trainer):
        def init(self, key: jax.Array) -> Any:
            return params

        def loss(self, params: Any, batch: Any, key: jax.Array) -> Any:
            return loss(params, batch, key)

        def optimizer(self) -> optax.GradientTransformation:
            return optimizer

        def dataset(self) -> Any:
            return data

    limits = BatchLimits(base=batch, max=batch)
    config = Config(workdir="unused", batch=limits, base_steps=base_steps or float(LONG))
    return dataclasses.replace(tryout(Own(config), time_s=time_s), base_steps=base_steps)


def _noise(
    trainer: Trainer,
    own: Config,
    folder: str,
    clock: Clock,
    began_s: float,
    time_s: float,
    length: float | None,
) -> tuple[Window, int]:
    """Return the last window of a run that measures the noise at every step, and its number of steps.

    `length` is that of the task's own run in base steps, if it is known.
    """
    end_s, least_s = began_s + NOISE_SHARE * time_s, NOISE_STEPS_SHARE * time_s
    middle = math.inf if length is None else MIDDLE * length

    def is_enough(windows: list[Window], passed_s: float) -> bool:
        num_steps = sum(one.num_steps for one in windows)
        is_known = windows[-1].noise_confidence >= ENOUGH_NOISE and num_steps >= middle
        is_long = passed_s >= NOISE_S and num_steps >= NOISE_STEPS
        return is_known or is_long or (passed_s >= least_s and clock.now() >= end_s)

    every = dataclasses.replace(own.statistics, every_steps=1)
    limits = dataclasses.replace(own.batch, max=own.batch.base, min_global=None, sizes=None)
    trainer.config = short_run(own, folder, "noise", statistics=every, batch=limits)
    windows, _ = _windows(trainer, is_enough, clock)
    if not windows:
        raise RuntimeError(
            "the data, or the run, ended before a step of the base batch was seen. Give it a longer run."
        )
    return windows[-1], sum(one.num_steps for one in windows)


def _timed(
    trainer: Trainer,
    own: Config,
    folder: str,
    time_left_s: Callable[[], float],
    num_samples: float,
    noise: float,
    clock: Clock,
    time_s: float,
) -> tuple[tuple[TriedBatch, ...], str]:
    """Time one batch after the other; return them in order, and why no larger one was tried.

    `noise` is the largest noise scale that there may be, in samples.
    """
    base, found, took_s = own.batch.base, dict[int, StepTimes](), 0.0

    def tried(size: int) -> TriedBatch:
        times = found[size]
        return TriedBatch(num_samples=times.num_samples, step_s=times.step_s(found[base]))

    def share(size: int) -> float:
        return time_share(tried(base), tried(size), noise)

    def try_one(size: int) -> str:
        """Time a batch; returns why not, if it was not."""
        nonlocal took_s
        if size > max(num_samples, base):
            return f"Larger ones were not tried: the data have {num_samples:,.0f} samples."
        if size > FURTHEST * base:
            return f"Larger ones than {FURTHEST} times the base batch are not tried."
        # An answer without a larger batch is none: the first one may take longer.
        extra_s = EXTRA_SHARE * time_s if len(found) == 1 else 0.0
        if found and took_s > time_left_s() + extra_s:
            return "Larger ones were not tried: the time was up (--time-s)."
        began_s = clock.now()
        try:
            found[size] = _time_one(trainer, own, folder, size, clock, time_left_s)
        except (ValueError, MemoryError, RuntimeError) as error:
            if size == base:
                raise
            return f"{size:,} samples cannot be used: {str(error).splitlines()[0]}"
        took_s = clock.now() - began_s
        if math.isnan(found[size].step_s(found[base])):
            del found[size]
            return (
                f"Steps of {size:,} samples could not be compared yet: the time was up (--time-s)."
            )
        return ""

    size, limit = base, ""
    while not (limit := try_one(size)):
        if share(size) > min(map(share, found)):
            limit = "Larger ones would take longer."
            break
        size *= FACTOR
    best = min(found, key=share)
    for between in (best * 2, best // 2):
        if base < between and not took_s > time_left_s():
            try_one(between)
    return tuple(map(tried, sorted(found))), limit


def _time_one(
    trainer: Trainer,
    own: Config,
    folder: str,
    size: int,
    clock: Clock,
    time_left_s: Callable[[], float],
) -> StepTimes:
    """Return the step times of a batch, from a run of its own: as a run that has it would take.

    Raises RuntimeError if the data end before.
    """

    def is_enough(windows: list[Window], passed_s: float) -> bool:
        num_steps = sum(one.num_steps for one in windows)
        if time_left_s() < 0 and passed_s >= LEAST_TIMED_S:
            return True
        together_s = sum(one.seconds for one in windows if one.steps_per_dispatch >= TOGETHER)
        may_change = together_s < LEAST_TIMED_S and step_times(windows).alone_s < SHORT_S
        enough_s = TOGETHER_WITHIN_S if may_change else TIMED_S
        return num_steps >= TIMED_STEPS and passed_s >= enough_s

    every = dataclasses.replace(own.statistics, every_steps=None)
    limits = dataclasses.replace(own.batch, base=size, max=size, min_global=None, sizes=None)
    for config in (own, _extended(own)) if size == own.batch.base else (_extended(own),):
        trainer.config = short_run(config, folder, f"batch-{size}", statistics=every, batch=limits)
        windows, is_ended_by_data = _windows(trainer, is_enough, clock)
        if not is_ended_by_data:
            break
    else:  # the last steps may have been smaller
        raise RuntimeError(
            f"the data ended before enough steps of {size:,} samples were timed. Give it more of them, or "
            "let them repeat."
        )
    return step_times(windows)


def _extended(config: Config) -> Config:
    """Return the settings of a run that is ended by its hook."""
    if config.epochs is not None:
        return dataclasses.replace(config, epochs=LONG)
    return dataclasses.replace(config, base_steps=float(LONG))


def _windows(
    trainer: Trainer, is_enough: Callable[[list[Window], float], bool], clock: Clock
) -> tuple[list[Window], bool]:
    """Train until the windows seen are enough, by the seconds since the first; return all but that one.

    Also returns whether the data, or the run, ended before.
    """
    watch = _Watch(trainer, is_enough, clock)
    trainer.hooks = (watch,)
    trainer.fit()
    return watch.windows[1:] or watch.windows, not watch.has_ended


class _Watch(Hook):
    """Keeps the windows of a run, and ends it when they are enough."""

    def __init__(
        self, trainer: Trainer, is_enough: Callable[[list[Window], float], bool], clock: Clock
    ):
        self.windows: list[Window] = []
        self._trainer, self._is_enough, self._clock = trainer, is_enough, clock
        self._since_s = math.nan
        self.has_ended = False
        """Whether the windows were enough."""

    def on_window(self, event: Window, /) -> None:
        """Keep a window; the first one may have steps that waited for the beginning."""
        now_s = self._clock.now()
        if not self.windows:
            self._since_s = now_s
        self.windows.append(event)
        is_enough = len(self.windows) > 1 and self._is_enough(self.windows, now_s - self._since_s)
        if is_enough and not self.has_ended:
            self.has_ended = True
            self._trainer.finish()
