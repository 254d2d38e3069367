"""Which strategy next, and why: pure functions beside `tune`, which picks the batch under one strategy.

Every strategy has step times and a fit of its own. One that was never timed is tried for a few real
steps, once, where the time left can repay two moves of the state and steps that may be slower. One that
was timed is taken where its best measured batch beats the present one by `min_gain`, and the move pays for
itself within the horizon. A trial stays unless the strategy before it was faster.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.batch import Caution
from jaxgoodput.tune.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a strategy."""

    fit: PerfFit
    placement: Placement
    limits: BatchLimits
    residuals: tuple[tuple[int, float], ...]  # (micro-batch size, measured / modelled step time)

    def goodput(self, config: BatchConfig, grad: GradParams) -> float:
        """Useful samples/s of a configuration of this strategy."""
        model = GoodputModel(
            perf=self.fit.params,
            grad=grad,
            base_batch_size=self.limits.base,
            residuals=self.residuals,
        )
        return float(
            model.goodput(self.placement, config.micro_batch_size, config.num_micro_batches)
        )


@dataclass(frozen=True, kw_only=True)
class Option:
    """Another strategy that could be used without compiling."""

    config: BatchConfig  # nearest to the present batch
    timed: Collection[int]  # micro-batch sizes
    known: Known | None  # None: never timed
    switch_s: float  # what moving the state there costs


def best_of(
    option: Option, grad: GradParams, *, largest: int, accumulate: bool
) -> tuple[BatchConfig, float] | None:
    """The best configuration of timed sizes, and its useful samples/s; None where there is none."""
    if option.known is None:
        return None
    limits, replicas = option.known.limits, option.config.num_replicas
    found = None
    for size in sorted(option.timed):
        for count in range(1, (limits.max_micro_batches if accumulate else 1) + 1):
            config = BatchConfig(
                micro_batch_size=size,
                num_micro_batches=count,
                num_replicas=replicas,
                strategy=option.config.strategy,
            )
            if not limits.smallest <= config.global_batch_size <= min(limits.max, largest):
                continue
            worth = option.known.goodput(config, grad)
            if math.isfinite(worth) and (found is None or worth > found[1]):
                found = config, worth
    return found


def choose_strategy(
    verdict: Verdict,
    now: float,
    options: Sequence[Option],
    grad: GradParams,
    *,
    caution: Caution,
    accumulate: bool,
    left_s: float,
    probe_s: float,
) -> Verdict:
    """`verdict`, which keeps the present batch, or one that changes the strategy instead.

    `now` is the present useful samples/s, `left_s` how long training will go on, `probe_s` how long a
    trial lasts. The price of a switch is in the reason.
    """
    here = verdict.config
    largest = max(int(here.global_batch_size * caution.max_growth), here.global_batch_size)
    best: tuple[BatchConfig, float, float] | None = None
    for option in options:
        found = best_of(option, grad, largest=largest, accumulate=accumulate)
        if found is not None and (best is None or found[1] > best[1]):
            best = (*found, option.switch_s)
    refused = ""
    if best is not None and now > 0:
        config, goodput, switch_s = best
        gain = goodput / now
        payback_s = switch_s / (1 - 1 / gain) if gain > 1 else math.inf
        what = f"{here.strategy} -> {_named(config)}"
        price = f"the switch costs {switch_s:.2f} s"
        if gain >= 1 + caution.min_gain and payback_s <= min(caution.horizon_s, left_s):
            return Verdict(
                config=config,
                goodput=goodput,
                gain=gain,
                reason=f"change: {what} gains {gain - 1:.1%} goodput ({price}, earned back in "
                f"{payback_s:.1f} s)",
                statistics_every=verdict.statistics_every,
            )
        refused = f"; {what} would gain {gain - 1:.1%} ({price})"
    for option in options:
        price_s = 2 * option.switch_s + probe_s
        # Worth a try if a gain just large enough to be taken would repay it.
        if option.known is None and left_s * caution.min_gain > price_s:
            return Verdict(
                config=option.config,
                goodput=math.nan,
                gain=1.0,
                reason=f"probe: {_named(option.config)} was never timed; a few steps tell, for "
                f"{price_s:.2f} s with both moves",
                statistics_every=verdict.statistics_every,
            )
    return replace(verdict, reason=verdict.reason + refused)


def judge_trial(
    current: BatchConfig,
    home: BatchConfig,
    here: Known | None,
    there: Known | None,
    grad: GradParams,
    *,
    statistics_every: int,
) -> Verdict:
    """Whether a strategy on trial stays, against `home`, the configuration before it."""
    trial = math.nan if here is None else here.goodput(current, grad)
    before = math.nan if there is None else there.goodput(home, grad)
    gain = trial / before
    if math.isfinite(gain) and gain > 1:
        return Verdict(
            config=current,
            goodput=trial,
            gain=gain,
            reason=f"keep: {_named(current)}, which was tried, gains {gain - 1:.1%} goodput over "
            f"{_named(home)}",
            statistics_every=statistics_every,
        )
    measured = f"has {gain:.1%} of its goodput" if math.isfinite(gain) else "could not be timed"
    return Verdict(
        config=home,
        goodput=before,
        gain=1.0,
        reason=f"return: to {_named(home)}; {_named(current)}, which was tried, {measured}",
        statistics_every=statistics_every,
    )


def _named(config: BatchConfig) -> str:
    return f"{config.strategy} ({config.global_batch_size} samples)"
