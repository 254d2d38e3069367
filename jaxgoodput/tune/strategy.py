"""Chooses the next strategy and gives the reason, once the batch under the present one is settled. Pure.

Every strategy has its own step times and its own fit. A strategy that was never timed gets one trial of a few
real steps, if the time left can repay two moves of the state and steps that may be slower. A strategy that
was timed is chosen if its best measured batch beats the present one by `min_gain` and the move pays for
itself within the horizon. A trial succeeds unless the strategy before it was faster.
"""

import math
from dataclasses import replace

from jaxgoodput.goodput.efficiency import Grad
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.text import percent, roughly
from jaxgoodput.tune.verdict import PROBE_S, PROBE_STEPS, Situation, StrategyOption, Verdict


def best_of(
    there: StrategyOption, grad: Grad, *, largest: int, accumulate: bool
) -> tuple[BatchConfig, float] | None:
    """Return the best configuration of a strategy's timed sizes and its useful samples/s; None: no such."""
    best = None
    counts = range(1, (there.limits.max_micro_batches if accumulate else 1) + 1)
    options = [
        replace(there.config, micro_batch_size=size, num_micro_batches=count)
        for size in sorted(there.timed)
        for count in counts
    ]
    for config in options:
        if (
            there.limits.smallest <= config.global_batch_size <= min(there.limits.max, largest)
            and math.isfinite(worth := there.goodput(config, grad))
            and (best is None or worth > best[1])
        ):
            best = config, worth
    return best


def choose_strategy(situation: Situation, verdict: Verdict) -> Verdict:
    """Return a verdict to change the strategy, or `verdict`, which keeps the present batch.

    The reason names the cost of the switch.
    """
    refused = ""
    if (best := _fastest(situation)) is not None:
        found = _judge_switch(situation, *best)
        if isinstance(found, Verdict):
            return found
        refused = found
    trial = _untried(situation)
    return trial or replace(verdict, reason=verdict.reason + refused)


def _fastest(situation: Situation) -> tuple[BatchConfig, float, float] | None:
    """Return the best timed configuration of all other strategies, its goodput and the seconds to switch."""
    best: tuple[BatchConfig, float, float] | None = None
    for there in situation.others:
        found = best_of(
            there, situation.grad, largest=situation.largest, accumulate=situation.accumulate
        )
        if found is not None and (best is None or found[1] > best[1]):
            best = (*found, there.switch_s)
    return best


def _judge_switch(
    situation: Situation, config: BatchConfig, goodput: float, switch_s: float
) -> Verdict | str:
    """Return the verdict to switch, or else the words that say why not."""
    here, caution = situation.current, situation.caution
    now = situation.here.goodput(here, situation.grad)
    if not now > 0:
        return ""
    gain = goodput / now
    payback_s = switch_s / (1 - 1 / gain) if gain > 1 else math.inf
    what, why = f"{here.strategy} -> {_named(config)}", "by measured step times of both"
    price = f"the switch costs about {roughly(switch_s)}"
    if gain >= 1 + caution.min_gain and payback_s <= min(caution.horizon_s, situation.left_s):
        price += f", earned back in {roughly(payback_s)}"
        reason = f"change: {what} is expected to {effect(gain)} {why}; {price}"
        return situation.change(config, reason, goodput, gain)
    return f"; {what} would {effect(gain)} {why}, and {price}"


def _untried(situation: Situation) -> Verdict | None:
    """Return the verdict to try a strategy that was never timed, if a gain would repay the trial."""
    bar = situation.bar
    for there in situation.others:
        if bar is not None and there.config.global_batch_size >= bar.global_batch_size:
            continue
        price_s = 2 * there.switch_s + max(PROBE_STEPS * situation.step_s, PROBE_S)
        # Worth a trial if a gain just large enough to justify a change would repay it.
        if there.fit is None and situation.left_s * situation.caution.min_gain > price_s:
            return situation.change(
                there.config,
                f"probe: {_named(there.config)} was never timed; a trial takes about {roughly(price_s)} with "
                f"both moves, and may gain the {percent(situation.caution.min_gain)} that would repay it",
            )
    return None


def judge_trial(situation: Situation) -> Verdict:
    """Return the verdict on a strategy on trial: it stays if it beats `home`, the one before it."""
    home, current = situation.home, situation.current
    assert home is not None
    trial = situation.here.goodput(current, situation.grad)
    before = home.goodput(home.config, situation.grad)
    gain = trial / before
    if math.isfinite(gain) and gain > 1:
        reason = (
            f"keep: {_named(current)} was tried, and by measured step times of both "
            f"{effect(gain, is_measured=True)} over {_named(home.config)}"
        )
        return situation.keep(reason, trial, gain)
    measured = f"has {percent(gain)} of its goodput, by measured step times of both"
    if not math.isfinite(gain):
        measured = "could not be timed"
    return situation.change(
        home.config,
        f"return: to {_named(home.config)}, because {_named(current)} was tried and {measured}",
        before,
    )


def effect(gain: float, *, is_measured: bool = False, down: bool = False) -> str:
    """Return what a ratio of goodputs means, in words that follow "would"; `down` never rounds up.

    If it `is_measured`, the words follow the name of what has this effect.

    >>> effect(1.4), effect(0.9), effect(1.001, is_measured=True), effect(0.997)
    ('gain 40% goodput', 'lose 10% goodput', 'gains less than 1% goodput', 'lose less than 1% goodput')
    """
    word, share = ("lose", 1 - gain) if gain < 1 else ("gain", gain - 1)
    shown = percent(share, down=down)
    shown = "less than 1%" if shown == "0%" else shown
    return f"{word}{'s' * is_measured} {shown} goodput"


def _named(config: BatchConfig) -> str:
    return f"{config.strategy} ({config.global_batch_size} samples)"
