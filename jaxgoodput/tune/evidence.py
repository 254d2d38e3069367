"""What training really gained at each batch, beside what the model says of it; it may deny a larger batch.

A *stretch* is the steps between two changes of the global batch, as far as they lie in the newer half of
the run. What it gained is minus the slope of the loss over the logarithm of the samples gone by, by
weighted least squares: a loss that falls as a power of the samples has a slope in samples that halves
whenever they double, whatever the batch, while its slope in their logarithm hardly moves between two
neighbours.

A change to a larger batch that the model wanted is *denied* where the loss falls so much more slowly after
it that even two standard errors leave less gained per second than before. The run then goes back, and that
batch is barred until the noise scale has doubled. Training slows down by itself too: if the stretch after
the way back gains no more than the denied one did, it was not the batch, and the bar is lifted.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.search import BatchConfig

SETTLE_STEPS = 10  # after a change: momentum and the learning rate's gain are still those of before
MIN_STEPS = 20  # fewer tell no slope
NUM_ERRORS = 2.0
MOST_POINTS = 512  # neighbours are merged beyond it

Point = tuple[float, float, float, int]
"""Logarithm of the samples gone by, mean loss, samples and steps behind it."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What the steps between two changes of the batch gained."""

    config: BatchConfig
    """The last of this global batch."""
    num_steps: int
    """That the slope is made of."""
    gained: float = math.nan
    """Loss lost per e-fold of samples; NaN: too few steps to tell."""
    error: float = math.nan
    """Its standard error."""

    @property
    def is_known(self) -> bool:
        """Whether there are steps enough to tell."""
        return math.isfinite(self.gained) and math.isfinite(self.error)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A batch that loss has denied."""

    noise_scale: float
    """In samples, when it was denied."""
    was: Stretch
    """The steps with it."""

    @property
    def global_batch_size(self) -> int:
        """The smallest batch that is barred."""
        return self.was.config.global_batch_size

    def holds(self, noise_scale: float) -> bool:
        """Whether it still does at a noise scale; an unknown one does not lift it."""
        return not noise_scale > 2 * self.noise_scale


def is_denied(before: Stretch, now: Stretch, throughput_ratio: float) -> bool:
    """Whether the loss falls more slowly per second than before, beyond doubt.

    `throughput_ratio` is samples per second now over those before. Where the loss before did not fall beyond
    doubt, nothing can be denied.
    """
    grown = now.config.global_batch_size > before.config.global_batch_size
    if not (grown and before.is_known and now.is_known):
        return False
    least, most = before.gained - NUM_ERRORS * before.error, now.gained + NUM_ERRORS * now.error
    return least > 0 and most * throughput_ratio < least


class Evidence:
    """The loss of every step by stretch, and the bar, if there is one. Used by one thread."""

    def __init__(self):
        self._points: list[Point] = []
        self._config: BatchConfig | None = None
        self._skip = 0
        self._before: Stretch | None = None
        self.bar: Bar | None = None

    def add(self, config: BatchConfig, samples: int, loss: float, num_samples: int) -> None:
        """One applied update: `samples` since training began, `num_samples` of them in this update."""
        old = self._config
        if old is None or config.global_batch_size != old.global_batch_size:
            self._before = self.now()
            self._points, self._skip = [], SETTLE_STEPS
        self._config = config
        if self._skip > 0:
            self._skip -= 1
            return
        self._points.append((math.log(max(samples, 1)), loss, float(num_samples), 1))
        if len(self._points) > MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            last = self._points[-1:] * (len(self._points) % 2)
            self._points = [_merged(a, b) for a, b in pairs] + last

    @property
    def before(self) -> Stretch | None:
        """The stretch before the present one."""
        return self._before

    def now(self) -> Stretch | None:
        """The present stretch, where it is of the newer half of the run; None before the first update."""
        if self._config is None:
            return None
        if not self._points:
            return Stretch(config=self._config, num_steps=0)
        since = self._points[-1][0] - math.log(2)
        return _fitted(self._config, [p for p in self._points if p[0] >= since])

    def deny(self, noise_scale: float) -> None:
        """Bar the present batch and all above it."""
        now = self.now()
        assert now is not None
        self.bar = Bar(noise_scale=noise_scale, was=now)

    def review(self, noise_scale: float) -> None:
        """Lift the bar where the noise has grown, or where it turns out that it was not the batch."""
        if self.bar is None:
            return
        now, was = self.now(), self.bar.was
        least = was.num_steps * was.config.global_batch_size  # samples behind what is compared
        if not self.bar.holds(noise_scale):
            self.bar = None
        elif (
            now is not None
            and now.is_known
            and now.config.global_batch_size < was.config.global_batch_size
            and now.num_steps * now.config.global_batch_size >= least
            and now.gained < was.gained + NUM_ERRORS * math.hypot(now.error, was.error)
        ):
            self.bar = None


def _merged(a: Point, b: Point) -> Point:
    weight = a[2] + b[2]
    share = b[2] / weight if weight > 0 else 0.5
    return a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]), weight, a[3] + b[3]


def _fitted(config: BatchConfig, points: Sequence[Point]) -> Stretch:
    """The slope by weighted least squares; a mean of more samples varies less."""
    x, y, weight, steps = (np.asarray(column, np.float64) for column in zip(*points, strict=True))
    made = Stretch(config=config, num_steps=int(steps.sum()))
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
