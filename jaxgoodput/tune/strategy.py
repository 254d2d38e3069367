"""Which strategy next, and why: pure functions beside the choice of the batch under one strategy.

Every strategy has step times and a fit of its own. One that was never timed is tried for a few real
steps, once, where the time left can repay two moves of the state and steps that may be slower. One that
was timed is taken where its best measured batch beats the present one by `min_gain`, and the move pays for
itself within the horizon. A trial stays unless the strategy before it was faster.
"""

import math
from dataclasses import replace

from jaxgoodput.goodput.efficiency import Grad
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.verdict import PROBE_STEPS, Situation, StrategyOption, Verdict


def best_of(
    there: StrategyOption, grad: Grad, *, largest: int, accumulate: bool
) -> tuple[BatchConfig, float] | None:
    """The best configuration of timed sizes, and its useful samples/s; None where there is none."""
    found = None
    for size in sorted(there.timed):
        for count in range(1, (there.limits.max_micro_batches if accumulate else 1) + 1):
            config = replace(there.config, micro_batch_size=size, num_micro_batches=count)
            if (
                not there.limits.smallest
                <= config.global_batch_size
                <= min(there.limits.max, largest)
            ):
                continue
            worth = there.goodput(config, grad)
            if math.isfinite(worth) and (found is None or worth > found[1]):
                found = config, worth
    return found


def choose_strategy(situation: Situation, verdict: Verdict) -> Verdict:
    """`verdict`, which keeps the present batch, or one that changes the strategy instead.

    The price of a switch is in the reason.
    """
    grad, caution, here = situation.grad, situation.caution, situation.current
    now = situation.here.goodput(here, grad)
    largest = max(int(here.global_batch_size * caution.max_growth), here.global_batch_size)
    if situation.bar is not None:
        largest = min(largest, situation.bar.global_batch_size - 1)
    best: tuple[BatchConfig, float, float] | None = None
    for there in situation.others:
        found = best_of(there, grad, largest=largest, accumulate=situation.accumulate)
        if found is not None and (best is None or found[1] > best[1]):
            best = (*found, there.switch_s)
    refused = ""
    if best is not None and now > 0:
        config, goodput, switch_s = best
        gain = goodput / now
        payback_s = switch_s / (1 - 1 / gain) if gain > 1 else math.inf
        what = f"{here.strategy} -> {_named(config)}"
        price = f"the switch costs {switch_s:.2f} s"
        if gain >= 1 + caution.min_gain and payback_s <= min(caution.horizon_s, situation.left_s):
            reason = (
                f"change: {what} gains {gain - 1:.1%} goodput ({price}, earned back in "
                f"{payback_s:.1f} s)"
            )
            return situation.change(config, reason, goodput, gain)
        refused = f"; {what} would gain {gain - 1:.1%} ({price})"
    for there in situation.others:
        price_s = 2 * there.switch_s + PROBE_STEPS * situation.step_s
        bar = situation.bar
        if bar is not None and there.config.global_batch_size >= bar.global_batch_size:
            continue
        # Worth a try if a gain just large enough to be taken would repay it.
        if there.fit is None and situation.left_s * caution.min_gain > price_s:
            return situation.change(
                there.config,
                f"probe: {_named(there.config)} was never timed; a few steps tell, for "
                f"{price_s:.2f} s with both moves",
            )
    return replace(verdict, reason=verdict.reason + refused)


def judge_trial(situation: Situation) -> Verdict:
    """Whether a strategy on trial stays, against `home`, the one before it."""
    home, current = situation.home, situation.current
    assert home is not None
    trial = situation.here.goodput(current, situation.grad)
    before = home.goodput(home.config, situation.grad)
    gain = trial / before
    if math.isfinite(gain) and gain > 1:
        reason = (
            f"keep: {_named(current)}, which was tried, gains {gain - 1:.1%} goodput over "
            f"{_named(home.config)}"
        )
        return situation.keep(reason, trial, gain)
    measured = f"has {gain:.1%} of its goodput" if math.isfinite(gain) else "could not be timed"
    return situation.change(
        home.config,
        f"return: to {_named(home.config)}; {_named(current)}, which was tried, {measured}",
        before,
    )


def _named(config: BatchConfig) -> str:
    return f"{config.strategy} ({config.global_batch_size} samples)"
