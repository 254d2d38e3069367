"""What a verdict is, and all that it is made of: values, no rules."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from jaxgoodput.goodput.efficiency import Grad
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Feeding, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.evidence import Bar, Stretch

PROBE_STEPS = 8  # at a size, or under a strategy, that is being tried


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A decision about the batch and the strategy, and why."""

    config: BatchConfig
    """What to use from now on."""
    goodput: float
    """Predicted useful samples/s; NaN while the model is unknown."""
    gain: float
    """Predicted goodput over that of keeping the present configuration."""
    reason: str
    """In words, with the numbers that decided."""
    statistics_every: int = 1
    """Steps between two measurements of the gradient noise."""
    denied: bool = False
    """Whether the loss denies the present batch, however much the model hopes of it."""


@dataclass(frozen=True, kw_only=True)
class Caution:
    """How willing the tuner is to change things."""

    min_gain: float = 0.05
    """A change must promise this much more goodput."""
    doubt: float = 0.0
    """What the step times may hide: a change must promise at least as much gain."""
    dwell_steps: int = 20
    """Steps between two changes."""
    max_growth: float = 4.0
    """The global batch grows at most by this factor in one change."""
    switch_s: float = 0.0
    """What a change of the batch costs, seconds of training."""
    horizon_s: float = 60.0
    """Within which a change must have paid for itself."""


@dataclass(frozen=True, kw_only=True)
class StrategyOption:
    """A strategy that can be used without compiling, and what is known of it; the present one is one too."""

    config: BatchConfig
    """Under this strategy: the present batch, or the one nearest to it."""
    limits: BatchLimits
    """What data, devices and memory allow under it."""
    placement: Placement
    """Where it runs, as the model sees it."""
    ready: Collection[int] = ()
    """Micro-batch sizes that are compiled."""
    timed: Collection[int] = ()
    """Micro-batch sizes whose step time was measured."""
    fit: PerfFit | None = None
    """Of its step times; None: never timed."""
    residuals: tuple[tuple[int, float], ...] = ()
    """(micro-batch size, measured / modelled step time) of the sizes timed undisturbed."""
    switch_s: float = 0.0
    """What moving the state there takes."""
    feeding: Feeding | None = None
    """What prepares a batch beside the step."""

    def model(self, grad: Grad) -> GoodputModel:
        """Goodput under this strategy; it must have a fit."""
        assert self.fit is not None
        return GoodputModel(
            perf=self.fit.params,
            grad=grad,
            base_batch_size=self.limits.base,
            residuals=self.residuals,
            feeding=self.feeding,
        )

    def goodput(self, config: BatchConfig, grad: Grad) -> float:
        """Useful samples/s of a configuration of this strategy; NaN where it was never timed."""
        if self.fit is None:
            return math.nan
        at = (self.placement, config.micro_batch_size, config.num_micro_batches)
        return float(self.model(grad).goodput(*at))


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything that a verdict depends on."""

    here: StrategyOption
    """The strategy and the batch in use. Its fit is that of the last verdict until `fitted`."""
    grad: Grad
    """The cautious noise estimate; NaN: unknown."""
    steps_since_change: int
    """Steps since the configuration last changed."""
    caution: Caution = Caution()
    """How much a change must bring."""
    home: StrategyOption | None = None
    """Where the present configuration is on trial: what was in use before, and is returned to."""
    others: tuple[StrategyOption, ...] = ()
    """Other strategies; those that had their trial only where they were timed."""
    step: int = 0
    """The step at which it was so."""
    timings: StepTimings | None = None
    """Step times under the present strategy."""
    clean: Collection[int] = ()
    """Sizes of the present strategy that were timed undisturbed."""
    disturbed: bool = False
    """Whether a compilation competes with the steps."""
    accumulate: bool = True
    """Whether several micro-batches per update are allowed."""
    statistics_every: int = 1
    """Steps between two measurements of the noise, as they are now to be."""
    noise_is_lower_bound: bool = False
    """Whether the signal is below its own standard error: the noise may be any larger."""
    adapt: bool = True
    """False: the batch is fixed, only the model is of interest."""
    scheduled: int | None = None
    """The global batch that the user's own schedule wants now; None: there is no schedule."""
    stretch: Stretch | None = None
    """What the loss says of the present batch."""
    stretch_before: Stretch | None = None
    """What it says of the batch before."""
    bar: Bar | None = None
    """A batch that it has denied."""
    floor: int = 1
    """The smallest global batch to be considered, because an earlier run had come to it by now."""
    left_s: float = math.nan
    """Seconds to the end of training at the present batch; NaN: unknown."""
    step_s: float = math.nan
    """Seconds of a present step."""

    @property
    def current(self) -> BatchConfig:
        """The configuration in use."""
        return self.here.config

    def keep(self, reason: str, goodput: float = math.nan, gain: float = 1.0) -> Verdict:
        """The verdict that nothing changes."""
        return self.change(self.current, reason, goodput, gain)

    def change(
        self, config: BatchConfig, reason: str, goodput: float = math.nan, gain: float = 1.0
    ) -> Verdict:
        """The verdict that `config` is used."""
        return Verdict(
            config=config,
            goodput=goodput,
            gain=gain,
            reason=reason,
            statistics_every=self.statistics_every,
        )
