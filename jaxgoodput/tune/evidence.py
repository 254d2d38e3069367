"""Measures how fast the loss falls at each batch, which may overrule the model and reject a batch.

A *stretch* is steps between two changes of the global batch: the newer half of the run, or what lies near a
change. Its gain is minus the slope of the loss over the logarithm of the samples trained on, by weighted
least squares. The logarithm makes neighbouring stretches comparable: a loss that falls as a power of the
samples has a slope per sample that halves whenever the samples double, whatever the batch, but a nearly
constant slope per logarithm.

A larger batch that the model wanted is *rejected* if the loss then falls so much more slowly that even two
standard errors leave less gain per second than before. Only steps near the change are compared (`NEAR`):
training slows down by itself, and a batch that has been in use for long cannot be held to what the loss did
at the beginning. The run goes back, and the batch is barred until the noise scale has doubled. If the stretch
after the return gains no more than the rejected one did, the batch was not the cause, and the bar is lifted.

A loss that leaps after the batch has grown (`goodput/leap.py`) rejects the batch at once, and for longer.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.goodput.calibration import Calibration
from jaxgoodput.goodput.efficiency import Grad, GradGroups
from jaxgoodput.goodput.leap import LossLevel
from jaxgoodput.goodput.search import BatchConfig

# Ignored after a change, and until the gain rises by less per update: momentum and learning rate still follow
# the batch before.
SETTLE_STEPS, SETTLED = 10, 1.00001
MIN_STEPS = 20  # needed for a slope
ENOUGH = 2 * MIN_STEPS  # with so many a slope is not improved by steps far from the change
# Samples on either side of a change that are compared with those on the other side, as a logarithm.
NEAR = math.log(1.5)
# The part of them just after a change in which the loss catches up: it says little of what follows.
CATCH_UP = math.log(1.1)
NUM_ERRORS = 2.0  # standard errors by which a rejection must be certain
MOST_POINTS = 512  # beyond this, neighbouring points are merged

Point = tuple[float, float, float, int]
"""Logarithm of the samples trained on, mean loss, and the numbers of samples and steps it is taken over."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The loss decrease measured between two changes of the batch."""

    config: BatchConfig
    """Last configuration with this global batch."""
    num_steps: int
    """Number of steps that the slope was fitted to."""
    gained: float = math.nan
    """Decrease of the loss per e-fold of samples; NaN after too few steps."""
    error: float = math.nan
    """Standard error of `gained`."""
    until_samples: float = math.nan
    """Samples trained on at the last of these steps."""

    @property
    def is_known(self) -> bool:
        """Whether there were enough steps for a slope."""
        return math.isfinite(self.gained) and math.isfinite(self.error)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A ban on a batch size, and all larger ones, with which the loss fell more slowly, or leapt."""

    was: Stretch
    """Stretch of the rejected batch."""
    noise_scale: float = math.nan
    """Noise scale at that time, in samples."""
    is_leap: bool = False
    """Whether the loss leapt with it."""
    learning_rate: float | None = None
    """The user's own learning rate at that time; None if unknown."""

    @property
    def global_batch_size(self) -> int:
        """The smallest batch that is banned, in samples."""
        return self.was.config.global_batch_size

    def holds(
        self, noise_scale: float, learning_rate: float | None = None, samples: float = math.nan
    ) -> bool:
        """Return whether the ban still holds: the noise scale has not doubled since, or is unknown.

        After a leap of the loss, the noise does not matter: the user's own learning rate must have halved, or
        four times the `samples` must have been trained on.
        """
        if not self.is_leap:
            return not noise_scale > 2 * self.noise_scale
        now, was = learning_rate, self.learning_rate
        has_halved = now is not None and was is not None and now <= was / 2
        return not (has_halved or samples > 4 * self.was.until_samples)


def is_denied(before: Stretch, now: Stretch, throughput_ratio: float) -> bool:
    """Return whether the loss now falls more slowly per second than before, beyond doubt.

    `throughput_ratio` is the throughput now, relative to before. If the loss before did not clearly fall,
    nothing can be rejected.
    """
    grown = now.config.global_batch_size > before.config.global_batch_size
    if not (grown and before.is_known and now.is_known):
        return False
    least, most = before.gained - NUM_ERRORS * before.error, now.gained + NUM_ERRORS * now.error
    return least > 0 and most * throughput_ratio < least


@dataclass
class Evidence:
    """Collects the loss of every step, and what follows from it. Not thread-safe.

    `bar` is the ban on large batches, `calibration` the correction of forecasts, and `level` watches for a
    loss that leaps. All that is known is in the fields, so that it can be saved and read again.
    """

    level: LossLevel = field(default_factory=LossLevel)
    _points: list[Point] = field(default_factory=list)
    _config: BatchConfig | None = None
    _skip: int = 0
    _gain: float = 1.0  # of the last update
    _samples: int = 0  # at the last update
    _before: Stretch | None = None
    _after: Stretch | None = None  # once it is complete
    _settled: Stretch | None = None  # the same without the part that catches up
    _changed: float = 0.0  # logarithm of the samples at the last change, if there was one
    # Known slopes of batches no longer in use.
    _earlier: dict[int, Stretch] = field(default_factory=dict)
    _denied: Bar | None = None  # by its slope
    _leapt: Bar | None = None
    _calibration: Calibration = field(default_factory=Calibration)
    _calibrated: float = 0.0  # logarithm of the samples when that was learnt

    def add(
        self,
        config: BatchConfig,
        samples: int,
        loss: float,
        num_samples: int,
        *,
        gain: float = 1.0,
        is_limited: bool = False,
        explodes: bool = False,
    ) -> None:
        """Add an applied update with its `gain`, and whether its gradient `explodes`.

        The gain `is_limited` by an explosion before: it then rises so slowly that it is not waited for.

        `samples` were trained on since training began, `num_samples` of them in this update.
        """
        self.level.add(config, samples, loss, num_samples, explodes=explodes)
        self._samples = samples
        old = self._config
        if old is None or config.global_batch_size != old.global_batch_size:
            self._earlier = self.by_batch
            self._before, self._after, self._settled = self._last(NEAR), None, None
            self._points, self._skip = [], SETTLE_STEPS
            if old is not None:
                self._changed = math.log(max(samples - num_samples, 1))
        self._config = config
        rises, self._gain = not is_limited and gain > SETTLED * self._gain, gain
        if self._skip > 0 or (rises and not self._points):
            self._skip = max(self._skip - 1, 0)
            return
        at = math.log(max(samples, 1))
        if self._before is not None and self._after is None and at > self._changed + NEAR:
            after = self._last(math.inf)
            # A young run doubles its samples within few steps: it waits for enough of them.
            if after is not None and after.num_steps >= ENOUGH:
                self._after, self._settled = after, self._last(at - self._changed - CATCH_UP)
        self._points.append((at, loss, float(num_samples), 1))
        # Merging neighbours bounds the memory. It keeps the slope, because a merged point stands for the mean
        # of its steps with their weight.
        if len(self._points) > MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            last = self._points[-1:] * (len(self._points) % 2)
            self._points = [_merged(a, b) for a, b in pairs] + last

    @property
    def before(self) -> Stretch | None:
        """The stretch just before the last change of the batch (`NEAR`); None before the first change."""
        return self._before

    @property
    def after(self) -> Stretch | None:
        """The stretch just after the last change (`NEAR`, or `ENOUGH` steps), as far as it has come.

        None before any change.
        """
        if self._before is None or self._after is not None:
            return self._after
        return self._last(math.inf)

    @property
    def calibration(self) -> Calibration:
        """What the loss says about the forecast, less what has faded since."""
        if not self._calibration.num_changes or not self._points:
            return self._calibration
        return self._calibration.faded(math.exp(min(self._calibrated - self._points[-1][0], 0.0)))

    def calibrate(self, grad: Grad, base: int) -> None:
        """Correct the forecast by the last change of the batch, once the stretch after it is complete.

        `grad` are the measured moments of the gradient; `base` is their batch, in samples.
        """
        before, now, self._settled = self._before, self._settled, None
        if isinstance(grad, GradGroups) and grad.most_gain is not None:
            return  # it limits one of the stretches, and perhaps not the other
        if before is not None and now is not None:
            self._calibration = self.calibration.after(
                batches=(before.config.global_batch_size, now.config.global_batch_size),
                gained=(before.gained, now.gained),
                errors=(before.error, now.error),
                grad=grad,
                base=base,
            )
            self._calibrated = self._points[-1][0]

    def now(self) -> Stretch | None:
        """Return the stretch since the last change, within the newer half of the run; None before updates."""
        return self._last(math.log(2))

    @property
    def by_batch(self) -> dict[int, Stretch]:
        """The newest known slope of each global batch that was in use for long enough."""
        now = self.now()
        if now is None or not now.is_known:
            return self._earlier
        return self._earlier | {now.config.global_batch_size: now}

    def _last(self, width: float) -> Stretch | None:
        """Return the stretch since the last change, within the last `width` of the logarithm of samples."""
        if self._config is None:
            return None
        if not self._points:
            return Stretch(config=self._config, num_steps=0)
        since = self._points[-1][0] - width
        return _fitted(self._config, [p for p in self._points if p[0] >= since])

    @property
    def bar(self) -> Bar | None:
        """The ban on the smallest batch that is banned."""
        bars = [bar for bar in (self._denied, self._leapt) if bar is not None]
        return min(bars, key=lambda bar: bar.global_batch_size, default=None)

    def deny(
        self, noise_scale: float, learning_rate: float | None = None, *, leaps: bool = False
    ) -> None:
        """Ban the present batch and all larger ones (`Bar`), because the loss falls too slowly or `leaps`.

        Noise and learning rate are the present ones.
        """
        now = self.now()  # later on, it is compared with what comes next
        assert now is not None
        if not leaps:
            self._denied = Bar(was=now, noise_scale=noise_scale)
        else:
            was = Stretch(config=now.config, num_steps=0, until_samples=float(self._samples))
            self._leapt = Bar(was=was, is_leap=True, learning_rate=learning_rate)

    def review(self, noise_scale: float, learning_rate: float | None = None) -> None:
        """Lift the bans (`Bar`) that hold no longer, or if the loss falls no faster with a smaller batch."""
        now = self.now()
        samples = math.nan if now is None else now.until_samples
        if self._leapt is not None and not self._leapt.holds(noise_scale, learning_rate, samples):
            self._leapt = None
        if self._denied is None:
            return
        was = self._denied.was
        # The comparison is fair only after as many samples as the rejected stretch was judged by.
        least = was.num_steps * was.config.global_batch_size
        if not self._denied.holds(noise_scale):
            self._denied = None
        elif (
            now is not None
            and now.is_known
            and now.config.global_batch_size < was.config.global_batch_size
            and now.num_steps * now.config.global_batch_size >= least
            and now.gained < was.gained + NUM_ERRORS * math.hypot(now.error, was.error)
        ):
            self._denied = None


def _merged(a: Point, b: Point) -> Point:
    weight = a[2] + b[2]
    share = b[2] / weight if weight > 0 else 0.5
    return a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]), weight, a[3] + b[3]


def _fitted(config: BatchConfig, points: Sequence[Point]) -> Stretch:
    """Fit the slope of the loss by weighted least squares, with more weight on the mean of more samples."""
    x, y, weight, steps = (np.asarray(column, np.float64) for column in zip(*points, strict=True))
    made = Stretch(
        config=config,
        num_steps=int(steps.sum()),
        until_samples=float(round(math.exp(points[-1][0]))),
    )
    if len(points) < MIN_STEPS or not weight.sum() > 0:
        return made
    x = x - np.average(x, weights=weight)
    y = y - np.average(y, weights=weight)
    spread = np.sum(weight * x**2)
    if not spread > 0:
        return made
    slope = np.sum(weight * x * y) / spread
    residual = np.sum(weight * (y - slope * x) ** 2) / (len(points) - 2)
    return dataclasses.replace(made, gained=-float(slope), error=float(np.sqrt(residual / spread)))
