"""Notices that the loss leaps after the batch has grown: the network does not bear the learning rate.

A larger batch has a larger learning rate, by the gain. The noise says how large the gain may be if noise is
all that limits the rate; it does not know which rate a network bears. If a rate is too high, the loss leaps
within some tens of updates, and the network may be lost for good. A slope of the loss needs hundreds of steps
and compares falls, so it sees this too late or not at all. A level needs a few steps.

The level is the median of the losses before the growth, and its spread the median deviation from it. The
loss has leapt once most of the newest losses are above both by far. A batch is watched while the samples grow
by half after its growth: a loss that leaps later has other causes.

Where the gradient explodes, the step itself lowers the gain (`optim/gain_growth.py`), and the loss hardly
leaps. If that happens twice with a batch, however late, it counts as a leap: the batch cannot have the rate
that makes it worth its samples. Once may be a single odd batch of data.
"""

import statistics
from dataclasses import dataclass, field

from jaxgoodput.goodput.search import BatchConfig

REMEMBERED, LEAST = 64, 16  # losses that a level is taken from, at most and at least
NEWEST = 8  # losses whose median is compared with it
# Deviations above the level that are a leap. 1.5 of them are one standard deviation of normal losses. Losses
# with long tails are above 9 at one step in thirty, and at five of eight steps once in 500,000.
WIDTH = 9.0
SHARE = 0.05  # of the level, which a leap also exceeds: losses may hardly vary
WATCHED = 1.5  # growth of the samples trained on during which a batch is watched
WATCHED_STEPS = 100  # and steps at least: a young run has soon doubled its samples
RECOVERY_STEPS = 200  # that the loss may take to come back
EXPLOSIONS = 2  # of the gradient that count as a leap


@dataclass(frozen=True, kw_only=True)
class Leap:
    """The loss has leapt: what to do about it, and the numbers."""

    to: BatchConfig
    """The batch to go back to."""
    at: BatchConfig
    """The batch in use."""
    was: float
    """Median loss before the batch grew."""
    now: float
    """Median of the newest losses."""
    explodes: bool = False
    """Whether the gradient exploded; the loss need not have leapt."""
    stays: bool = False
    """Whether the batch was made smaller before, and the loss did not come back."""


@dataclass
class _Watch:
    """What the losses of a batch are compared with, and for how long."""

    before: BatchConfig
    level: float
    most: float
    until_samples: float
    is_recovering: bool = False


@dataclass
class LossLevel:
    """Watches the losses after each growth of the batch. Not thread-safe.

    `leap` is set once the loss is too high, until the batch shrinks. All that is known is in the fields, so
    that it can be saved and read again.
    """

    _config: BatchConfig | None = None
    _grown_from: list[BatchConfig] = field(default_factory=list)  # ever larger ones
    _smallest: BatchConfig | None = None
    _losses: list[float] = field(default_factory=list)  # the last `REMEMBERED` to compare with
    _newest: list[float] = field(default_factory=list)  # the last `NEWEST` of this batch
    _num_steps: int = 0  # since the last change
    _num_explosions: int = 0  # since then
    _watch: _Watch | None = None
    leap: Leap | None = None

    def add(
        self,
        config: BatchConfig,
        samples: int,
        loss: float,
        num_samples: int,
        *,
        explodes: bool = False,
    ) -> None:
        """Add the loss of an update, and whether its gradient `explodes`.

        `samples` were trained on since training began, `num_samples` of them in this update.
        """
        old, size = self._config, config.global_batch_size
        if old is None or size != old.global_batch_size:
            if old is not None:
                self._changed(old, config, samples - num_samples)
            self._newest.clear()
            self._num_steps = self._num_explosions = 0
        if self._smallest is None or size <= self._smallest.global_batch_size:
            self._smallest = config
        self._config = config
        self._num_steps += 1
        self._newest = [*self._newest, loss][-NEWEST:]
        if self._watch is None:
            self._remember(loss)
        else:
            self._compare(self._watch, config, samples, loss)
        self._num_explosions += explodes
        to = self._grown_from[-1] if self._grown_from else self._smallest
        is_smaller = to.global_batch_size < size
        if self._num_explosions >= EXPLOSIONS and self.leap is None and is_smaller:
            level = statistics.median(self._losses) if self._losses else loss
            self.leap = Leap(to=to, at=config, was=level, now=loss, explodes=True)

    def _changed(self, old: BatchConfig, config: BatchConfig, samples: int) -> None:
        """Begin to watch a batch that has grown; one that has shrunk is watched only after a leap."""
        watch, size = self._watch, config.global_batch_size
        if size < old.global_batch_size:
            self._grown_from = [x for x in self._grown_from if x.global_batch_size < size]
            if watch is not None:
                watch.is_recovering |= self.leap is not None
                if not watch.is_recovering:
                    self._watch = None
            self.leap = None
            return
        self._grown_from.append(old)
        if watch is not None and watch.is_recovering:
            return  # it still waits for the loss to come back
        if len(self._losses) < LEAST:
            return
        level = statistics.median(self._losses)
        deviation = statistics.median([abs(x - level) for x in self._losses])
        most = level + max(WIDTH * deviation, SHARE * abs(level))
        if watch is not None:  # growth upon growth: what was before both still counts
            level, most = min((level, most), (watch.level, watch.most), key=lambda x: x[1])
        self._watch = _Watch(
            before=old, level=level, most=most, until_samples=WATCHED * max(samples, 1)
        )

    def _compare(self, watch: _Watch, config: BatchConfig, samples: int, loss: float) -> None:
        now = statistics.median_low(self._newest)
        is_high = len(self._newest) == NEWEST and now > watch.most
        if watch.is_recovering:
            if not is_high and len(self._newest) == NEWEST:
                self._end()
            elif is_high and self._num_steps >= RECOVERY_STEPS:
                assert self._smallest is not None
                if config.global_batch_size <= self._smallest.global_batch_size:
                    self._end()  # no batch is left to go back to
                else:
                    to = self._smallest
                    self.leap = Leap(to=to, at=config, was=watch.level, now=now, stays=True)
            return
        if self.leap is None and is_high:
            self.leap = Leap(to=watch.before, at=config, was=watch.level, now=now)
        if loss <= watch.most:
            self._remember(loss)
        if self.leap is None and samples > watch.until_samples and self._num_steps > WATCHED_STEPS:
            self._end()

    def _remember(self, loss: float) -> None:
        self._losses = [*self._losses, loss][-REMEMBERED:]

    def _end(self) -> None:
        """Watch no longer. After a leap, the next growth is judged by losses from now on."""
        if self._watch is not None and self._watch.is_recovering:
            self._losses.clear()
        self._watch = self.leap = None
