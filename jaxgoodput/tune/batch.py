"""Which batch configuration next, and why: a pure function from what is known to a verdict.

The best configuration by the goodput model, corrected by what was measured, is taken only where it is
worth it: it must beat the current one by `min_gain` (hysteresis), the last change must be `dwell_steps`
behind, and the price of the switch must be earned back within the horizon. Where time is unknown as a
function of the batch, a neighbouring size is probed first.
"""

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.efficiency import GradParams, efficiency, noise_scale
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement, step_time
from jaxgoodput.goodput.search import BatchConfig, BatchLimits, best_batch
from jaxgoodput.tune.verdict import Verdict


class Indivisible(ValueError):
    """A batch that cannot be cut into equal micro-batches over the replicas of a strategy."""


@dataclass(frozen=True, kw_only=True)
class Caution:
    """How willing the tuner is to change things."""

    min_gain: float = 0.05
    doubt: float = 0.0  # what the step times may hide: a change must promise at least as much gain
    dwell_steps: int = 20
    max_growth: float = 4.0
    switch_s: float = 0.0  # what a change costs, seconds of training
    horizon_s: float = 60.0  # within which a change must have paid for itself


def tune(
    fit: PerfFit | None,
    grad: GradParams,
    placement: Placement,
    limits: BatchLimits,
    current: BatchConfig,
    *,
    ready: Collection[int],
    steps_since_change: int,
    caution: Caution,
    timed: Collection[int] = (),
    residuals: tuple[tuple[int, float], ...] = (),
    accumulate: bool = True,
    statistics_every: int = 1,
    tried_from: BatchConfig | None = None,
) -> Verdict:
    """The verdict for the next stretch of training.

    `ready` are the micro-batch sizes that can run without compiling, `timed` those whose step time was
    measured here; `residuals` says how far the model is off there. With only one timed, nothing is known
    about how time grows with the batch: a few real steps at another size (a probe, which trains like any
    other step) tell, where the noise leaves anything to be won. `grad` should be the cautious estimate:
    NaN (unknown) keeps the current configuration.

    Where the current configuration is a probe, `tried_from` is the one before it: that one is the
    incumbent, and returned to unless another (the probe included) earns the change from there.
    """
    home = current if tried_from is None else tried_from

    def keep(reason: str, goodput: float = math.nan) -> Verdict:
        return Verdict(
            config=current,
            goodput=goodput,
            gain=1.0,
            reason=reason,
            statistics_every=statistics_every,
        )

    if fit is None:
        return keep("keep: no step times yet")
    if math.isnan(float(grad.sqr)) or math.isnan(float(grad.var)):
        return keep("keep: too few gradient-noise samples yet")
    model = GoodputModel(
        perf=fit.params,
        grad=grad,
        base_batch_size=limits.base,
        residuals=residuals,
    )
    now = float(model.goodput(placement, home.micro_batch_size, home.num_micro_batches))
    largest = max(int(current.global_batch_size * caution.max_growth), current.global_batch_size)
    if steps_since_change < caution.dwell_steps:
        return keep(
            f"keep: {steps_since_change} steps since the last change, waiting for "
            f"{caution.dwell_steps}",
            now,
        )
    if set(timed) <= {current.micro_batch_size}:
        probe = _probe(limits, current, ready, caution.max_growth, largest)
        # Where the noise leaves nothing to be won, the steps are better spent where they are.
        if probe is not None and (1 + caution.min_gain) <= hoped_gain(
            grad, limits, current.global_batch_size, np.array(probe.global_batch_size)
        ):
            return Verdict(
                config=probe,
                goodput=math.nan,
                gain=1.0,
                reason=f"probe: only micro-batches of {current.micro_batch_size} have been timed; a few "
                f"steps of {probe.micro_batch_size} tell how time grows with the batch",
                statistics_every=statistics_every,
            )
    critical = float(noise_scale(grad, limits.base))
    at = f"noise scale {critical:.3g} samples"
    # Before the search, which refuses to choose among unknowns: a run that goes on with the step times
    # of another number of replicas knows nothing about this one yet.
    if not math.isfinite(now):
        return keep(f"keep: the model cannot tell ({at})", now)
    allowed = _narrowed(limits, min(limits.max, largest), accumulate)
    sizes = sorted(set(ready) | {current.micro_batch_size})
    config, best = best_batch(model, placement, allowed, micro_batch_sizes=sizes)
    config = dataclasses.replace(config, strategy=current.strategy)
    if not math.isfinite(best):
        return keep(f"keep: the model cannot tell ({at})", now)
    gain = best / now
    # Whoever is on trial is judged as usual, or no trial beside a compilation would ever be won.
    asked = max(caution.min_gain, caution.doubt) if home == current else caution.min_gain
    what = (
        f"{home.global_batch_size} -> {config.global_batch_size} samples "
        f"({config.micro_batch_size} x {config.num_replicas} replicas "
        f"x {config.num_micro_batches} micro-batches)"
    )
    payback_s = caution.switch_s / (1 - 1 / gain) if gain > 1 else math.inf
    if config == home:
        why = f"{home.global_batch_size} samples is the best there is ({at})"
    elif gain < 1 + asked:
        why = (
            f"{what} would gain {gain - 1:.1%}, below the {asked:.0%} "
            f"that a change must bring ({at})"
        )
    elif config == current:
        return Verdict(
            config=current,
            goodput=best,
            gain=gain,
            reason=f"keep: {what}, which was tried, gains {gain - 1:.1%} goodput ({at})",
            statistics_every=statistics_every,
        )
    elif payback_s > caution.horizon_s:
        why = (
            f"{what} would gain {gain - 1:.1%} but needs {payback_s:.0f} s to earn back its "
            f"price of {caution.switch_s:.1f} s, more than {caution.horizon_s:.0f} s ({at})"
        )
    else:
        why = None
    if why is not None and home == current:
        return keep(f"keep: {why}", now)
    if why is not None:
        return Verdict(
            config=home,
            goodput=now,
            gain=1.0,
            reason=f"return: {why}",
            statistics_every=statistics_every,
        )
    return Verdict(
        config=config,
        goodput=best,
        gain=gain,
        reason=f"change: {what} gains {gain - 1:.1%} goodput ({at})",
        statistics_every=statistics_every,
    )


def _probe(
    limits: BatchLimits,
    current: BatchConfig,
    ready: Collection[int],
    growth: float,
    largest: int,
) -> BatchConfig | None:
    """The ready size nearest to `growth` times the current one that the limits allow."""
    options = [
        dataclasses.replace(current, micro_batch_size=size)
        for size in ready
        if size != current.micro_batch_size
    ]
    most = min(limits.max, largest)
    options = [c for c in options if limits.smallest <= c.global_batch_size <= most]
    wanted = current.micro_batch_size * growth
    return min(options, key=lambda c: abs(math.log(c.micro_batch_size / wanted)), default=None)


def hoped_gain(grad: GradParams, limits: BatchLimits, now: int, there: np.ndarray) -> np.ndarray:
    """[batches] goodput over the present one's, if the step time grew as the square root of the batch.

    Half-way between not at all and in proportion: what may be hoped for before a size was timed. An
    unknown noise is hoped to be large. 0 outside the limits.
    """
    before = efficiency(grad, now / limits.base)
    after = efficiency(grad, there / limits.base)
    hope = np.sqrt(there / now) * np.nan_to_num(after / before, nan=1.0)
    return np.where((there >= limits.smallest) & (there <= limits.max), hope, 0.0)


def residuals_of(
    perf: PerfParams, placement: Placement, timings: StepTimings, timed: Collection[int]
) -> tuple[tuple[int, float], ...]:
    """(micro-batch size, measured / modelled step time) of the `timed` sizes, in order of size.

    Caches and the allocator bend the model's straight line; where a size was timed undisturbed, that
    goes before what the model makes of it.
    """
    here = (timings.num_nodes == placement.num_nodes) & (
        timings.num_replicas == placement.num_replicas
    )
    here &= np.isin(timings.micro_batch_size, list(timed)) & np.isfinite(timings.step_s)
    sizes = np.asarray(timings.micro_batch_size)[here]
    ratios = np.asarray(timings.step_s)[here] / step_time(perf, placement, sizes)
    known = np.isfinite(ratios)
    return tuple(sorted(zip(sizes[known].tolist(), ratios[known].tolist(), strict=True)))


def _narrowed(limits: BatchLimits, largest: int, accumulate: bool) -> BatchLimits:
    return dataclasses.replace(
        limits,
        base=min(limits.base, largest),
        min_global=min(limits.smallest, largest),
        max=largest,
        max_micro_batches=limits.max_micro_batches if accumulate else 1,
    )


def fixed_config(
    base: int,
    num_replicas: int,
    largest_micro: int,
    *,
    tolerance: float = 0.0,
    max_micro_batches: int = 1024,
) -> BatchConfig:
    """The configuration with the fewest micro-batches whose global batch is `base`, within tolerance.

    Raises Indivisible, a ValueError, naming the nearest global batches that the replicas can divide.

    >>> fixed_config(96, 8, largest_micro=8)
    BatchConfig(micro_batch_size=6, num_micro_batches=2, num_replicas=8)
    """
    if largest_micro < 1:
        raise ValueError(
            "not even one sample per replica fits into the memory budget; raise memory_bytes, or "
            "make the model smaller."
        )
    best: tuple[float, int, BatchConfig] | None = None
    for count in range(1, max_micro_batches + 1):
        exact = base / (num_replicas * count)
        for micro in {math.floor(exact), math.ceil(exact)}:
            if not 1 <= micro <= largest_micro:
                continue
            config = BatchConfig(
                micro_batch_size=micro, num_micro_batches=count, num_replicas=num_replicas
            )
            off = abs(config.global_batch_size - base) / base
            if off <= tolerance + 1e-12 and (best is None or (off, count) < best[:2]):
                best = (off, count, config)
        if best is not None and best[0] == 0:
            break
        if exact < 1:
            break
    if best is not None:
        return best[2]
    near = " and ".join(map(str, _nearest(base, num_replicas, largest_micro, max_micro_batches)))
    raise Indivisible(
        f"a global batch of {base} samples cannot be cut into equal micro-batches over "
        f"{num_replicas} replicas (at most {max_micro_batches} of at most {largest_micro} samples, "
        f"tolerance {tolerance:.0%}). "
        f"The nearest global batches that can are {near}: set batch.base to one of them, or raise "
        "fixed_tolerance or batch.max_micro_batches."
    )


def _nearest(base: int, num_replicas: int, largest_micro: int, most_micros: int) -> list[int]:
    """The largest global batch below `base` and the smallest above it that can be cut evenly."""

    def can(share: int) -> bool:  # samples per replica
        return any(
            share % k == 0 and share // k <= largest_micro for k in range(1, most_micros + 1)
        )

    most = largest_micro * most_micros
    share = base // num_replicas
    below = next(
        (s for s in range(min(share, most), 0, -1) if s * num_replicas < base and can(s)), 0
    )
    above = next((s for s in range(share + 1, most + 1) if can(s)), 0)
    return [s * num_replicas for s in (below, above) if s]


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
