"""Which batch next, and why: a pure function from what is known to a verdict.

The best configuration by the goodput model, corrected by what was measured, is taken only where it is
worth it: it must beat the current one by `min_gain` (hysteresis), the last change must be `dwell_steps`
behind, and the price of the switch must be earned back within the horizon. What the loss denies is left
again, whatever the model says (`evidence.py`). Where time is unknown as a function of the batch, a
neighbouring size is probed first.
"""

import dataclasses
import math

import numpy as np

from jaxgoodput.goodput.efficiency import Grad, efficiency, is_known, noise_scale
from jaxgoodput.goodput.search import BatchConfig, BatchLimits, best_batch
from jaxgoodput.text import compact
from jaxgoodput.tune.evidence import is_denied
from jaxgoodput.tune.strategy import choose_strategy, judge_trial
from jaxgoodput.tune.verdict import Caution, Situation, StrategyOption, Verdict


def tune(situation: Situation) -> Verdict:
    """The verdict for the next stretch of training: a batch, or another strategy.

    One change at a time, and no other strategy beside a compilation or before the noise is known.
    """
    current, home = situation.current, situation.home
    if situation.scheduled is not None:
        return follow_schedule(situation, situation.scheduled)
    if not situation.adapt:
        return situation.keep("keep: the policy is a fixed batch")
    if home is not None and home.config.strategy != current.strategy:
        return judge_trial(situation)
    verdict = choose_batch(situation)
    if verdict.config != current or situation.disturbed or home is not None or not situation.others:
        return verdict
    waits = situation.steps_since_change < situation.caution.dwell_steps
    waits |= situation.floor > 1  # another strategy's best batch may be below it
    known = math.isfinite(situation.here.goodput(current, situation.grad))
    return choose_strategy(situation, verdict) if known and not waits else verdict


def follow_schedule(situation: Situation, wanted: int) -> Verdict:
    """The batch that the user's schedule wants, in as few micro-batches as what is compiled allows."""
    here, current = situation.here, situation.current
    goodput = here.goodput(current, situation.grad)
    if current.global_batch_size == wanted:
        return situation.keep(f"keep: {wanted} samples, as scheduled", goodput)
    for size in sorted(here.ready, reverse=True):
        count, rest = divmod(wanted, size * current.num_replicas)
        most = here.limits.max_micro_batches if situation.accumulate else 1
        if not rest and 1 <= count <= most:
            config = dataclasses.replace(current, micro_batch_size=size, num_micro_batches=count)
            what = f"{current.global_batch_size} -> {wanted} samples"
            return situation.change(config, f"change: {what}, as scheduled", goodput)
    return situation.keep(f"keep: {wanted} samples are due, and not compiled yet", goodput)


def choose_batch(situation: Situation) -> Verdict:
    """Which batch under the present strategy.

    Only sizes that are ready are chosen. With a single one timed, nothing is known about how time grows
    with the batch: a few real steps at another size (a probe, which trains like any other step) tell,
    where the noise leaves anything to be won. An unknown noise keeps the present configuration.

    A noise scale that is only known to be at least so large speaks for no smaller batch.

    Where the present configuration is a probe, `home` is the one before it: that one is the incumbent,
    and returned to unless another (the probe included) earns the change from there.
    """
    here, grad, caution = situation.here, situation.grad, situation.caution
    limits, current = here.limits, here.config
    home = current if situation.home is None else situation.home.config
    if here.fit is None:
        return situation.keep("keep: no step times yet")
    if not is_known(grad):
        return situation.keep("keep: too few gradient-noise samples yet")
    model = here.model(grad)
    now = here.goodput(home, grad)
    largest = max(int(current.global_batch_size * caution.max_growth), current.global_batch_size)
    if situation.steps_since_change < caution.dwell_steps:
        return situation.keep(
            f"keep: {situation.steps_since_change} steps since the last change, waiting for "
            f"{caution.dwell_steps}",
            now,
        )
    denial = _denial(situation, now)
    if denial is not None:
        return denial
    if situation.bar is not None:
        largest = min(largest, max(situation.bar.global_batch_size - 1, 1))
    if set(here.timed) <= {current.micro_batch_size}:
        probe = _probe(here, caution.max_growth, largest, situation.floor)
        # Where the noise leaves nothing to be won, the steps are better spent where they are.
        if probe is not None and (1 + caution.min_gain) <= hoped_gain(
            grad, limits, current.global_batch_size, np.array(probe.global_batch_size)
        ):
            return situation.change(
                probe,
                f"probe: only micro-batches of {current.micro_batch_size} have been timed undisturbed; a few "
                f"steps of {probe.micro_batch_size} tell how time grows with the batch",
            )
    critical = float(noise_scale(grad, limits.base))
    at = f"noise scale {'at least ' if situation.noise_is_lower_bound else ''}{compact(critical)} samples"
    # Before the search, which refuses to choose among unknowns: a run that goes on with the step times
    # of another number of replicas knows nothing about this one yet.
    if not math.isfinite(now):
        return situation.keep(f"keep: the model cannot tell ({at})", now)
    smallest = max(limits.smallest, min(situation.floor, largest))
    allowed = _narrowed(limits, smallest, min(limits.max, largest), situation.accumulate)
    sizes = sorted({*here.ready, current.micro_batch_size})
    config, best = best_batch(model, here.placement, allowed, micro_batch_sizes=sizes)
    config = dataclasses.replace(config, strategy=current.strategy)
    if not math.isfinite(best):
        return situation.keep(f"keep: the model cannot tell ({at})", now)
    gain = best / now
    # Whoever is on trial is judged as usual, or no trial beside a compilation would ever be won.
    asked = max(caution.min_gain, caution.doubt) if home == current else caution.min_gain
    what = (
        f"{home.global_batch_size} -> {config.global_batch_size} samples "
        f"({config.micro_batch_size} x {config.num_replicas} replicas "
        f"x {config.num_micro_batches} micro-batches)"
    )
    payback_s = caution.switch_s / (1 - 1 / gain) if gain > 1 else math.inf
    if situation.noise_is_lower_bound and config.global_batch_size < home.global_batch_size:
        # A larger noise scale would make the smaller batch worth less, and nobody knows how much larger.
        why = f"{what} cannot be judged while the signal is below its own standard error ({at})"
    elif config == home:
        what, also = "is the best there is", ""
        wide = _narrowed(limits, limits.smallest, limits.max, situation.accumulate)
        everything = sorted({*limits.ladder(here.placement.num_replicas), *sizes})
        beyond, hoped = best_batch(model, here.placement, wide, micro_batch_sizes=everything)
        if hoped >= now * (1 + asked):
            is_ready = beyond.micro_batch_size in sizes
            what = f"is the best {'within reach' if is_ready else 'of what is compiled'}"
            also = (
                f"; the model hopes for {hoped / now - 1:.0%} more from {beyond.global_batch_size}"
            )
        why = f"{home.global_batch_size} samples {what} ({at}){also}"
        if home.global_batch_size == situation.floor > limits.smallest:
            why += "; an earlier run came to it, and as many samples as that took have not gone by"
    elif gain < 1 + asked:
        why = f"{what} would gain {gain - 1:.1%}, {_not_enough(asked, caution)} ({at})"
    elif config == current:
        reason = f"keep: {what}, which was tried, gains {gain - 1:.1%} goodput ({at})"
        return situation.keep(reason, best, gain)
    elif payback_s > caution.horizon_s:
        why = (
            f"{what} would gain {gain - 1:.1%} but needs {payback_s:.0f} s to earn back its "
            f"price of {caution.switch_s:.1f} s, more than {caution.horizon_s:.0f} s ({at})"
        )
    else:
        reason = f"change: {what} gains {gain - 1:.1%} goodput ({at})"
        return situation.change(config, reason, best, gain)
    if home == current:
        return situation.keep(f"keep: {why}", now)
    return situation.change(home, f"return: {why}", now)


def _not_enough(asked: float, caution: Caution) -> str:
    """Why so large a gain is not enough, in the user's words."""
    if asked > caution.min_gain:
        return (
            f"and step times are not to be trusted to {asked:.0%}: they were disturbed by programs that "
            "compiled beside the steps"
        )
    return f"below the {asked:.0%} that a change must bring (Tuning.min_gain)"


def _denial(situation: Situation, now: float) -> Verdict | None:
    """The way back from a larger batch after which the loss falls more slowly; None where it does not."""
    here, before, stretch = situation.here, situation.stretch_before, situation.stretch
    if before is None or stretch is None or here.fit is None:
        return None
    if before.config.strategy != here.config.strategy:
        return None
    model = here.model(situation.grad)
    old, new = (
        float(model.throughput(here.placement, c.micro_batch_size, c.num_micro_batches))
        for c in (before.config, here.config)
    )
    if not is_denied(before, stretch, new / old):
        return None
    reason = (
        f"return: loss denies {here.config.global_batch_size} samples: per e-fold of samples it fell by "
        f"{stretch.gained:.3g} +- {stretch.error:.1g}, before, with {before.config.global_batch_size}, by "
        f"{before.gained:.3g} +- {before.error:.1g}, and only {new / old:.2f} times as many go by a second"
    )
    verdict = situation.change(before.config, reason, now)
    return dataclasses.replace(verdict, denied=True)


def _probe(here: StrategyOption, growth: float, largest: int, floor: int) -> BatchConfig | None:
    """The ready size nearest to `growth` times the current one that the limits allow."""
    current, limits = here.config, here.limits
    options = [
        dataclasses.replace(current, micro_batch_size=size)
        for size in here.ready
        if size != current.micro_batch_size
    ]
    most = min(limits.max, largest)
    least = max(limits.smallest, floor)
    options = [c for c in options if least <= c.global_batch_size <= most]
    wanted = current.micro_batch_size * growth
    return min(options, key=lambda c: abs(math.log(c.micro_batch_size / wanted)), default=None)


def hoped_gain(grad: Grad, limits: BatchLimits, now: int, there: np.ndarray) -> np.ndarray:
    """[batches] goodput over the present one's, if the step time grew as the square root of the batch.

    Half-way between not at all and in proportion: what may be hoped for before a size was timed. An
    unknown noise is hoped to be large. 0 outside the limits.
    """
    before = efficiency(grad, now / limits.base)
    after = efficiency(grad, there / limits.base)
    hope = np.sqrt(there / now) * np.nan_to_num(after / before, nan=1.0)
    return np.where((there >= limits.smallest) & (there <= limits.max), hope, 0.0)


def _narrowed(limits: BatchLimits, smallest: int, largest: int, accumulate: bool) -> BatchLimits:
    return dataclasses.replace(
        limits,
        base=min(limits.base, largest),
        min_global=min(smallest, largest),
        max=largest,
        max_micro_batches=limits.max_micro_batches if accumulate else 1,
    )


def statistics_cadence(
    plain_s: float, measured_s: float, *, overhead: float, most: int = 64
) -> int:
    """Steps between two noise measurements so that they cost at most `overhead` of the time.

    `plain_s` and `measured_s` are medians of steps without and with a sample. NaN: at every step.

    >>> statistics_cadence(0.010, 0.014, overhead=0.02)
    20
    """
    if not (plain_s > 0 and measured_s > 0):
        return 1
    extra = max(measured_s / plain_s - 1, 0.0)
    if extra <= overhead:
        return 1
    return min(math.ceil(extra / overhead - 1e-9), most)
