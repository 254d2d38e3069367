"""The tuner's input (`Situation`) and its decision (`Verdict`): values without rules."""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.efficiency import Grad, GradGroups, is_known
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.intervals import UNKNOWN_INTERVAL, NoiseInterval, noise_interval
from jaxgoodput.goodput.leap import Leap
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Feeding, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.optim.noise import MeasuredGroups
from jaxgoodput.tune.evidence import Bar, Stretch

LEAST_FIXED = 0.25  # share of a step that an optimist expects not to grow with the batch
# Least length of a trial of a new size or strategy. Its first steps are disturbed: batches of the new size
# are being read, and the window before is being drawn and told. Short steps took ten times as long for 40 ms.
PROBE_STEPS, PROBE_S = 8, 0.1


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A decision about the batch and the strategy, and the reason for it."""

    config: BatchConfig
    """The batch and strategy to use from now on."""
    goodput: float
    """Predicted useful samples/s; NaN while the model is unknown."""
    gain: float
    """Predicted goodput, relative to keeping the present configuration."""
    reason: str
    """A sentence for the user, with the numbers that decided."""
    statistics_every: int = 1
    """Steps between two measurements of the gradient noise."""
    denied: bool = False
    """Whether the measured loss overruled the model and rejected the present batch."""


@dataclass(frozen=True, kw_only=True)
class Caution:
    """Limits that keep the tuner from changing the configuration too eagerly."""

    min_gain: float = 0.05
    """Smallest predicted gain, as a share, that justifies a change."""
    doubt: float = 0.0
    """Possible error of the step times, as a share; a change must promise at least this much gain."""
    dwell_steps: int = 20
    """Minimum number of steps between two changes."""
    max_growth: float = 4.0
    """Largest factor by which one change may grow the global batch."""
    switch_s: float = 0.0
    """Cost of a batch change, in seconds of training."""
    horizon_s: float = 60.0
    """Time within which a change must pay for itself."""


@dataclass(frozen=True, kw_only=True)
class StrategyOption:
    """A strategy that can be used without compiling, with its measurements; the present one is one too."""

    config: BatchConfig
    """The present batch under this strategy, or the nearest one that it allows."""
    limits: BatchLimits
    """Batches that data, devices and memory allow under it."""
    placement: Placement
    """Nodes and replicas that it runs on."""
    ready: Collection[int] = ()
    """Compiled micro-batch sizes."""
    timed: Collection[int] = ()
    """Micro-batch sizes whose step time was measured."""
    fit: PerfFit | None = None
    """Model fitted to its step times; None if it was never timed."""
    residuals: tuple[tuple[int, float], ...] = ()
    """(micro-batch size, measured / modelled step time) of every size timed without disturbance."""
    switch_s: float = 0.0
    """Seconds that moving the state to this strategy takes."""
    feeding: Feeding | None = None
    """Time to prepare a batch, which overlaps with the step; None if it was not measured."""

    def model(self, grad: Grad) -> GoodputModel:
        """Return the goodput model of this strategy, which must have a fit."""
        assert self.fit is not None
        return GoodputModel(
            perf=self.fit.params,
            grad=grad,
            base_batch_size=self.limits.base,
            residuals=self.residuals,
            feeding=self.feeding,
        )

    def goodput(self, config: BatchConfig, grad: Grad) -> float:
        """Return the useful samples/s of a configuration; NaN if the strategy was never timed."""
        if self.fit is None:
            return math.nan
        at = (self.placement, config.micro_batch_size, config.num_micro_batches)
        return float(self.model(grad).goodput(*at))


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything that a verdict depends on."""

    here: StrategyOption
    """The strategy and batch in use; until the model is fitted again, with the fit of the last verdict."""
    grad: Grad
    """Cautious estimate of the gradient noise, corrected by the loss; NaN if unknown."""
    steps_since_change: int
    """Steps since the configuration last changed."""
    caution: Caution = Caution()
    """Conditions that a change must meet."""
    home: StrategyOption | None = None
    """During a trial, the configuration in use before it, which is restored if the trial fails."""
    others: tuple[StrategyOption, ...] = ()
    """Other strategies, without the ones whose trial gave no step times."""
    step: int = 0
    """Step at which this was recorded."""
    timings: StepTimings | None = None
    """Step times under the present strategy."""
    clean: Collection[int] = ()
    """Sizes of the present strategy that were timed without disturbance."""
    disturbed: bool = False
    """Whether a compilation competes with the steps."""
    accumulate: bool = True
    """Whether an update may use several micro-batches."""
    statistics_every: int = 1
    """Steps between two noise measurements from now on."""
    noise_is_guess: bool = False
    """Whether no signal exceeds its own standard error: the noise scale is little more than a guess."""
    noise_factor: float = 1.0
    """What the loss has corrected the measured noise by (`goodput/calibration.py`)."""
    measured: MeasuredGroups[float] | None = None
    """What the noise was estimated from, for the interval that the reason states."""
    adapt: bool = True
    """Whether the batch may change; if False, only the model is fitted."""
    scheduled: int | None = None
    """Global batch that the user's schedule asks for now; None without a schedule."""
    stretch: Stretch | None = None
    """Loss decrease measured just after the last change of the batch."""
    stretch_before: Stretch | None = None
    """Loss decrease measured just before it."""
    bar: Bar | None = None
    """A batch that the loss has rejected."""
    leap: Leap | None = None
    """A leap of the loss after the batch has grown."""
    floor: int = 1
    """Smallest global batch to consider, because an earlier run had reached it by this point."""
    left_s: float = math.nan
    """Seconds to the end of training at the present batch; NaN if unknown."""
    step_s: float = math.nan
    """Seconds of one step of the present configuration."""
    fixed_s: float = math.inf
    """Seconds of a step that need not grow with the batch, at most; infinite if unknown."""
    outlook: str = ""
    """A sentence on what compiling another size costs and may bring; empty before it was considered."""

    @property
    def current(self) -> BatchConfig:
        """The configuration in use."""
        return self.here.config

    @property
    def measured_grad(self) -> Grad:
        """The moments as the gradients show them, without the correction by the loss."""
        return dataclasses.replace(self.grad, var=self.grad.var / self.noise_factor)

    @property
    def most_gain(self) -> float | None:
        """Base steps that a step may be worth, at most, after an explosion of the gradient; None: any."""
        return self.grad.most_gain if isinstance(self.grad, GradGroups) else None

    @property
    def noise_interval(self) -> NoiseInterval:
        """The measured noise scale with its 80 % interval; decisions rest on `grad`. Takes a millisecond."""
        seen, grad = self.measured, self.measured_grad
        if seen is None or not is_known(grad):
            return UNKNOWN_INTERVAL
        base = self.here.limits.base
        return noise_interval(seen.sqr, grad.var, seen.sqr_error, seen.var_error, base)

    @property
    def seconds_by_size(self) -> dict[int, float]:
        """The median seconds of a step of one micro-batch, by its size, on the present replicas."""
        timings = self.timings
        if timings is None:
            return {}
        columns = (
            timings.num_nodes,
            timings.num_replicas,
            timings.micro_batch_size,
            timings.step_s,
        )
        rows = zip(*map(np.atleast_1d, columns), strict=True)
        here = (self.here.placement.num_nodes, self.current.num_replicas)
        return {int(size): float(s) for *at, size, s in rows if tuple(at) == here and s > 0}

    @property
    def fixed_share(self) -> float:
        """The share of a step that need not grow with the batch, in the eyes of an optimist."""
        if not self.step_s > 0:
            return 1.0
        return min(max(self.fixed_s / self.step_s, LEAST_FIXED), 1.0)

    @property
    def incumbent(self) -> BatchConfig:
        """The configuration that others are compared with: the one before the trial, if one is running."""
        return self.current if self.home is None else self.home.config

    @property
    def largest(self) -> int:
        """The largest global batch that one change may lead to: limited by growth, and below banned ones."""
        now = self.current.global_batch_size
        grown = max(int(now * self.caution.max_growth), now)
        return grown if self.bar is None else min(grown, max(self.bar.global_batch_size - 1, 1))

    def keep(self, reason: str, goodput: float = math.nan, gain: float = 1.0) -> Verdict:
        """Return the verdict that nothing changes."""
        return self.change(self.current, reason, goodput, gain)

    def change(
        self, config: BatchConfig, reason: str, goodput: float = math.nan, gain: float = 1.0
    ) -> Verdict:
        """Return the verdict that `config` is used from now on."""
        return Verdict(
            config=config,
            goodput=goodput,
            gain=gain,
            reason=reason,
            statistics_every=self.statistics_every,
        )
