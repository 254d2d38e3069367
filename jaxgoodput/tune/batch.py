"""Chooses the next batch and gives the reason: a pure function from a `Situation` to a `Verdict`.

The goodput model, corrected by measured step times, names the best configuration. A change to it must gain at
least `min_gain` (hysteresis), come `dwell_steps` after the last change, and earn back the cost of the switch
within the horizon. If the loss leaps or falls more slowly after a change, the run goes back, whatever the
model says (`evidence.py`). As long as only one size has been timed, the tuner first probes another near it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxgoodput.goodput.efficiency import efficiency, is_known, noise_scale
from jaxgoodput.goodput.search import BatchConfig, BatchLimits, best_batch
from jaxgoodput.text import count, estimate, percent, roughly, with_error
from jaxgoodput.tune.evidence import is_denied
from jaxgoodput.tune.strategy import choose_strategy, effect, judge_trial
from jaxgoodput.tune.verdict import LEAST_FIXED, PROBE_S, PROBE_STEPS, Situation, Verdict

# How many times the expected noise an optimist believes in. In the mean over a run the exact one was up to
# twice as large in four of five models, and at single points several times. With 4 times as much, the
# forecast for a decoder at 4 and 16 times its base batch was what separate runs then took.
OPTIMISM = 4.0
# Power of the batch with which an optimist believes short steps to grow: steps of a third to two thirds of a
# millisecond grew by 1.1 to 1.4 times with four times the batch.
GROWTH = 0.25
# Times as long as undisturbed that steps beside a compilation may take: on two cores of a CPU, since the
# compiler's threads yield.
MOST_DISTURBED = 1.6
# Times its price that exploring with borrowed time, and a later trial, must be expected to save.
REPAYMENT = 5.0
# Where an optimist expects a knee of the step time: share of the way from the smallest size at which it may
# be to the largest, by their logarithms. At 1, sizes just below one that is slow would look best.
KNEE = 0.75


def tune(situation: Situation) -> Verdict:
    """Return the verdict for the next stretch of training: a batch, or another strategy.

    One thing changes at a time. Another strategy is considered only if the noise is known, nothing is being
    compiled, and the batch stays as it is.
    """
    current, home = situation.current, situation.home
    if situation.scheduled is not None:
        return follow_schedule(situation, situation.scheduled)
    if not situation.adapt:
        return situation.keep("keep: Config.policy asks for a fixed batch")
    if (verdict := undo_leap(situation)) is not None:
        return verdict
    if home is not None and home.config.strategy != current.strategy:
        return judge_trial(situation)
    verdict = choose_batch(situation)
    if verdict.config != current or home is not None or not _may_switch(situation):
        return verdict
    return choose_strategy(situation, verdict)


def _may_switch(situation: Situation) -> bool:
    """Return whether the strategy may be changed now: no compilation, no recent change, goodput known."""
    if situation.disturbed or not situation.others:
        return False
    if situation.steps_since_change < situation.caution.dwell_steps:
        return False
    if situation.floor > 1:  # the best batch of another strategy may be below it
        return False
    return math.isfinite(situation.here.goodput(situation.current, situation.grad))


def follow_schedule(situation: Situation, wanted: int) -> Verdict:
    """Return the verdict for the batch that the user's schedule asks for.

    It uses the fewest micro-batches that the compiled sizes allow.
    """
    here, current = situation.here, situation.current
    goodput = here.goodput(current, situation.grad)
    if current.global_batch_size == wanted:
        return situation.keep(f"keep: {wanted} samples, as scheduled", goodput)
    config = _of_samples(situation, wanted)
    if config is not None:
        what = f"{current.global_batch_size} -> {wanted} samples"
        return situation.change(config, f"change: {what}, as scheduled", goodput)
    reason = f"keep: the schedule asks for {wanted} samples, which are not compiled yet"
    return situation.keep(reason, goodput)


def _of_samples(situation: Situation, wanted: int) -> BatchConfig | None:
    """Return a batch of `wanted` samples of the fewest compiled micro-batches; None if there is none."""
    here, current = situation.here, situation.current
    most = here.limits.max_micro_batches if situation.accumulate else 1
    for size in sorted(here.ready, reverse=True):
        count, rest = divmod(wanted, size * current.num_replicas)
        if not rest and 1 <= count <= most:
            return dataclasses.replace(current, micro_batch_size=size, num_micro_batches=count)
    return None


def _as_now(situation: Situation, earlier: BatchConfig) -> BatchConfig | None:
    """Return a batch that was in use earlier as it can be used now; None if it cannot.

    Devices may have come or gone since. If its size is not compiled any more, and no other will do, training
    waits for it.
    """
    current = situation.current
    placed = (earlier.strategy, earlier.num_replicas) == (current.strategy, current.num_replicas)
    if placed and earlier.micro_batch_size in situation.here.ready:
        return earlier
    found = _of_samples(situation, earlier.global_batch_size)
    return earlier if found is None and placed else found


def undo_leap(situation: Situation) -> Verdict | None:
    """Return the verdict to go back because the loss has leapt since the batch has grown; None if not."""
    here, leap, current = situation.here, situation.leap, situation.current
    if leap is None:
        return None
    config = _as_now(situation, leap.to)
    if config is None or config == current:
        return None
    back, at, was = config.global_batch_size, leap.at.global_batch_size, estimate(leap.was)
    what = f"the loss was {was} before and is {estimate(leap.now)}"
    too_large = "so the learning rate, which grows with the batch, is too large there"
    if leap.stays:
        reason = (
            f"return: the loss has not come back with {at} samples ({what}); {back} is the smallest "
            "batch that was used"
        )
    elif leap.explodes:
        reason = f"return: the gradient explodes with {at} samples (far above its mean norm), {too_large}"
    else:
        reason = f"return: the loss leaps with {at} samples ({what}), {too_large}"
    now = here.goodput(situation.incumbent, situation.grad)
    verdict = situation.change(config, reason, now)
    return dataclasses.replace(verdict, denied=True)


def choose_batch(situation: Situation) -> Verdict:
    """Return the verdict about the batch under the present strategy.

    Only compiled sizes are chosen. As long as a single size has been timed, a probe of another one is
    proposed if the noise allows a gain. Unknown noise keeps the present batch. If the noise scale is
    little more than a guess, no smaller batch is chosen.

    During a trial, the batch before it (`home`) is the incumbent: the run returns to it unless another
    batch, such as the one on trial, beats it.
    """
    for rule in (_not_ready, denial, _first_probe):
        if (verdict := rule(situation)) is not None:
            return verdict
    return _search(situation)


def _not_ready(situation: Situation) -> Verdict | None:
    """Return a verdict to keep the batch if it is too early to judge it."""
    here, least = situation.here, situation.caution.dwell_steps
    if here.fit is None:
        return situation.keep("keep: no step times have been measured yet")
    if not is_known(situation.grad):
        why = situation.outlook or "too few samples have been measured"
        return situation.keep(f"keep: the gradient noise is not known yet; {why}")
    if situation.steps_since_change < least:
        return situation.keep(
            f"keep: only {count(situation.steps_since_change, 'step')} since the last change, and the next "
            f"may come after {least}",
            here.goodput(situation.incumbent, situation.grad),
        )
    return None


def denial(situation: Situation) -> Verdict | None:
    """Return the verdict to undo a larger batch if the loss now falls more slowly; None if it does not."""
    here, before, stretch = situation.here, situation.stretch_before, situation.stretch
    if before is None or stretch is None or here.fit is None:
        return None
    earlier = _as_now(situation, before.config)
    if before.config.strategy != here.config.strategy or earlier is None:
        return None
    model = here.model(situation.grad)
    old, new = (
        float(model.throughput(here.placement, c.micro_batch_size, c.num_micro_batches))
        for c in (earlier, here.config)
    )
    if not is_denied(before, stretch, new / old):
        return None
    reason = (
        f"return: the loss falls too slowly with {here.config.global_batch_size} samples, by a measured "
        f"{with_error(stretch.gained, 2 * stretch.error)} per e-fold of samples (two standard errors); with "
        f"{earlier.global_batch_size} it fell by {with_error(before.gained, 2 * before.error)}, and "
        f"the throughput is only {estimate(new / old)} times as high"
    )
    now = here.goodput(situation.incumbent, situation.grad)
    verdict = situation.change(earlier, reason, now)
    return dataclasses.replace(verdict, denied=True)


def _first_probe(situation: Situation) -> Verdict | None:
    """Return the verdict to try another size if only the present one was timed and more may be gained."""
    here, current = situation.here, situation.current
    options = _untimed(situation)
    if set(here.timed) - {current.micro_batch_size} or not options:
        return None
    # If the noise leaves nothing to gain, a probe would only waste steps.
    least = 1 + situation.caution.min_gain
    options = [c for c in options if _hope_of(situation, c) >= least]
    if not options:
        return None
    wanted = current.micro_batch_size * situation.caution.max_growth
    probe = min(options, key=lambda c: abs(math.log(c.micro_batch_size / wanted)))
    trial_s = assumed_trial_s(situation, np.array(float(probe.global_batch_size)))
    price = "a few steps" if math.isnan(trial_s) else f"about {roughly(trial_s)}"
    known = f"only micro-batches of {current.micro_batch_size} have"
    if current.micro_batch_size not in here.timed:
        known = "no size has"
    return situation.change(
        probe,
        f"probe: {known} been timed without disturbance; a trial of {probe.micro_batch_size} takes {price}, "
        f"and may gain up to {percent(_hope_of(situation, probe) - 1)} goodput if steps are as fast as hoped",
    )


def assumed_trial_s(situation: Situation, there: np.ndarray) -> float:
    """Return the assumed seconds of a trial of a batch of `there` samples; NaN before any step was timed."""
    seconds = PROBE_STEPS * situation.step_s * float(assumed_growth(situation, there))
    return math.nan if math.isnan(seconds) else max(seconds, PROBE_S)


def _hope_of(situation: Situation, config: BatchConfig) -> float:
    """Return the `hoped_gain` of a batch, corrected by steps of it that were timed beside a compilation.

    The compilation may be the reason why they took longer than assumed.
    """
    there, seconds = np.array(config.global_batch_size), situation.seconds_by_size
    hope = float(hoped_gain(situation, there))
    size, now = config.micro_batch_size, situation.current.micro_batch_size
    if not {size, now} <= seconds.keys():
        return hope
    slower = seconds[size] / seconds[now] / float(assumed_growth(situation, there))
    return hope / (max(slower / MOST_DISTURBED, 1.0) if slower > 1 else slower)


def _later_probe(situation: Situation) -> Verdict | None:
    """Return the verdict to try a size that was never timed and that an optimist expects a gain from.

    The present batch is the best by the model, which knows no step time of that size.
    """
    here, current = situation.here, situation.current
    options = _untimed(situation)
    is_trial, asked = situation.home is not None, _asked(situation)
    if not options or is_trial or situation.disturbed or asked > situation.caution.min_gain:
        return None
    if not set(here.timed) - {current.micro_batch_size}:
        return None  # the model is a line through one point

    def gains(configs: Sequence[BatchConfig]) -> np.ndarray:
        batches = np.array([c.global_batch_size for c in configs]).reshape(-1, 1)
        return modelled_gain(situation, [c.micro_batch_size for c in configs], batches)

    hopes = gains(options)
    timed = [_of_size(current, size) for size in here.ready if size in here.timed]
    probe, hope = options[int(np.argmax(hopes))], hopes.max() / gains(timed).max(initial=1.0)
    if not (hope >= 1 + situation.caution.min_gain and trial_pays(situation, probe, float(hope))):
        return None
    size = probe.micro_batch_size
    hoped_s = hoped_seconds(situation.seconds_by_size, [size], situation.fixed_s)[0]
    lucks = []
    if probe.global_batch_size > current.global_batch_size:
        lucks.append("the noise is larger than measured")
    if not math.isnan(hoped_s):
        lucks.append("its steps are as short as hoped")
    luck = " and ".join(lucks) or "the model is right"
    return situation.change(
        probe,
        f"probe: steps with {probe.micro_batch_size} were never timed; a trial takes about "
        f"{roughly(_modelled_trial_s(situation, probe))}, and may gain up to {percent(hope - 1)} goodput if "
        f"{luck}; {_measured(situation)}",
    )


def trial_pays(situation: Situation, probe: BatchConfig, hope: float) -> bool:
    """Return whether the rest of the run may save several times the seconds of a trial."""
    price_s = _modelled_trial_s(situation, probe)
    return not situation.left_s * (1 - 1 / hope) < REPAYMENT * price_s  # of NaN, nothing is known


def _modelled_trial_s(situation: Situation, probe: BatchConfig) -> float:
    """Return the seconds that a trial takes by the fitted step times."""
    here = situation.here
    throughput = here.model(situation.grad).throughput(
        here.placement, probe.micro_batch_size, probe.num_micro_batches
    )
    return max(PROBE_STEPS * probe.global_batch_size / float(throughput), PROBE_S)


def _untimed(situation: Situation) -> list[BatchConfig]:
    """Return the batches of compiled sizes that were never timed, as far as one change may reach."""
    here, current, limits = situation.here, situation.current, situation.here.limits
    least = max(limits.smallest, situation.floor)
    most = min(limits.max, situation.largest)
    sizes = (s for s in here.ready if s not in here.timed and s != current.micro_batch_size)
    options = (_of_size(current, size) for size in sizes)
    return [c for c in options if least <= c.global_batch_size <= most]


def _of_size(config: BatchConfig, micro_batch_size: int) -> BatchConfig:
    return dataclasses.replace(config, micro_batch_size=micro_batch_size)


def _search(situation: Situation) -> Verdict:
    """Return the verdict on the best batch of compiled sizes that one change may reach."""
    here, grad = situation.here, situation.grad
    limits, current, home = here.limits, here.config, situation.incumbent
    now, at = here.goodput(home, grad), _measured(situation)
    # Checked before the search, which refuses to choose among unknowns. A run that resumes with step times
    # of another number of replicas cannot predict anything for this one yet.
    if not math.isfinite(now):
        return situation.keep(f"keep: the model cannot predict the present batch yet; {at}", now)
    smallest = max(limits.smallest, min(situation.floor, situation.largest))
    allowed = _narrowed(limits, smallest, min(limits.max, situation.largest), situation.accumulate)
    sizes = sorted({*here.ready, current.micro_batch_size})
    config, best = best_batch(here.model(grad), here.placement, allowed, micro_batch_sizes=sizes)
    config = dataclasses.replace(config, strategy=current.strategy)
    # A trial that succeeds is kept, unless another batch promises clearly more.
    tried, least = here.goodput(current, grad), 1 + situation.caution.min_gain
    if tried >= least * now and best < least * tried:
        config, best = current, tried
    if not math.isfinite(best):
        return situation.keep(f"keep: the model cannot predict any batch yet; {at}", now)
    if config == home:
        best_known = _already_best(situation, sizes, now)
        if config != current and math.isfinite(tried):
            found = effect(tried / now, is_measured=True)
            best_known = (
                f"a batch of {current.global_batch_size} was tried and {found}; {best_known}"
            )
        return _later_probe(situation) or _stay(situation, best_known, now)
    return _judge(situation, config, best, now, at)


def _corrected(factor: float) -> str:
    """Say by how much the loss has corrected the measured noise, if it has."""
    if abs(factor - 1) < 0.1:
        return ""
    return f" and taken {estimate(factor)} times as large, by how the loss fell at other batches"


def _measured(situation: Situation) -> str:
    """Return what a verdict rests on: the measured noise scale, and the sizes whose steps were timed."""
    here = situation.here
    critical = float(noise_scale(situation.measured_grad, here.limits.base))
    timed = [*map(str, sorted(set(here.timed)))]
    steps = f"steps of {len(timed)} sizes" if len(timed) > 3 else f"steps of {' and '.join(timed)}"
    also = f", {steps}" if timed else ""
    noise, stated = f"noise scale {estimate(critical)} samples", situation.noise_interval
    if situation.noise_is_guess:
        noise += ", little more than a guess"
    if stated.is_known:
        noise += f" (80 % interval {estimate(stated.lower)} to {estimate(stated.upper)})"
    if (most := situation.most_gain) is not None:
        also += f"; as the gradient has exploded, no step is worth more than {estimate(most)} base steps yet"
    return f"measured: {noise}{_corrected(situation.noise_factor)}{also}"


def _judge(situation: Situation, config: BatchConfig, best: float, now: float, at: str) -> Verdict:
    """Return the verdict on a change to `config`, with goodput `best`; the incumbent has goodput `now`."""
    caution, home, gain = situation.caution, situation.incumbent, best / now
    what = (
        f"{home.global_batch_size} -> {config.global_batch_size} samples "
        f"({config.micro_batch_size} x {count(config.num_replicas, 'replica')} "
        f"x {count(config.num_micro_batches, 'micro-batch')})"
    )
    asked = _asked(situation)
    payback_s = caution.switch_s / (1 - 1 / gain) if gain > 1 else math.inf
    if situation.noise_is_guess and config.global_batch_size < home.global_batch_size:
        # A larger noise scale would make the smaller batch worth less, by an unknown amount.
        why = (
            f"{what} cannot be judged: the gradient signal is below its own standard error, so the noise may "
            f"be larger; {at}"
        )
    elif gain < 1 + asked:
        limit = f"the {percent(asked)} that a change must bring (Tuning.min_gain)"
        if asked > caution.min_gain:
            limit = f"the {percent(asked)} asked for while a compilation disturbs the step times"
        if (probe := _later_probe(situation)) is not None:
            return probe
        why = f"{what} would {effect(gain, down=True)} by the model, below {limit}; {at}"
    elif config == situation.current:
        reason = f"keep: {what} was tried and {effect(gain, is_measured=True)}; {at}"
        return situation.keep(reason, best, gain)
    elif payback_s > caution.horizon_s:
        why = (
            f"{what} would {effect(gain)} by the model, but the switch costs about "
            f"{roughly(caution.switch_s)}, which takes {roughly(payback_s)} to earn back, more than "
            f"{roughly(caution.horizon_s)}; {at}"
        )
    else:
        trial = ""
        if config.micro_batch_size not in situation.here.timed:
            trial = f", although steps of {config.micro_batch_size} were never timed"
            if not situation.disturbed:  # see `Trials`
                trial += f": a trial takes about {roughly(_modelled_trial_s(situation, config))}"
        reason = f"change: {what} is expected to {effect(gain)} by the model{trial}; {at}"
        return situation.change(config, reason, best, gain)
    return _stay(situation, why, now)


def _stay(situation: Situation, why: str, now: float) -> Verdict:
    """Return the verdict to use the incumbent, the batch before a trial if one runs, which ends the trial."""
    home = situation.incumbent
    word = "keep" if home == situation.current else "return"
    return situation.change(home, f"{word}: {why}", now)


def _asked(situation: Situation) -> float:
    """Return the gain in goodput that a change must promise, as a share (0.05 is 5 %).

    A trial is judged without `Caution.doubt`, or no trial during a compilation could ever succeed.
    """
    caution, is_trial = situation.caution, situation.incumbent != situation.current
    return caution.min_gain if is_trial else max(caution.min_gain, caution.doubt)


def _already_best(situation: Situation, sizes: Sequence[int], now: float) -> str:
    """Explain why the incumbent stays, and name a batch out of reach that would merit a change."""
    here, limits, home = situation.here, situation.here.limits, situation.incumbent
    ladder = {*limits.ladder(here.placement.num_replicas), *sizes}
    at = _measured(situation)
    if len(set(here.timed)) < 2:  # one step time says nothing about another size's
        return f"{home.global_batch_size} samples stay; {_prospect(situation, len(ladder))}; {at}"
    what, also = "is the best batch by the model", ""
    wide = _narrowed(limits, limits.smallest, limits.max, situation.accumulate)
    beyond, hoped = best_batch(
        here.model(situation.grad), here.placement, wide, micro_batch_sizes=sorted(ladder)
    )
    if hoped >= now * (1 + _asked(situation)):
        what += " within reach" if beyond.micro_batch_size in sizes else " among the compiled ones"
        also = f"; {beyond.global_batch_size} would {effect(hoped / now)} by the model"
    why = f"{home.global_batch_size} samples {what}{also}; {at}"
    if home.global_batch_size == situation.floor > limits.smallest:
        why += "; no smaller one is tried yet, because an earlier run had reached it by now"
    return why


def _prospect(situation: Situation, num_sizes: int) -> str:
    """Return what may come next before two sizes have been timed, and what it costs if that is known."""
    timed = [*map(str, set(situation.here.timed))]
    only = (
        f"only micro-batches of {timed[0]} have been timed" if timed else "no size has been timed"
    )
    if num_sizes < 2:
        return "no other size is allowed"
    if situation.outlook:
        return f"{only}; {situation.outlook}"
    if not _untimed(situation):
        return f"{only}, and no other size is compiled that the next change may reach"
    least = percent(situation.caution.min_gain)
    return f"{only}, and no compiled one may gain the {least} that a change must bring"


def hoped_gain(situation: Situation, there: np.ndarray) -> np.ndarray:
    """Return a guess of the gain of a batch whose step time is unknown, to decide whether to try it.

    The result, `[batches]`, is the goodput of each batch `there` relative to the present one, if the step
    time grew with the batch to the power of `GROWTH`, of a smaller one with its square root. For a larger
    batch it grows by more if all but a fixed share of it is in proportion (`Situation.fixed_share`). Batches
    outside the limits get 0.
    """
    limits, now = situation.here.limits, situation.current.global_batch_size
    hope = there / now / assumed_growth(situation, there)
    hope = hope * _optimistic_worth(situation, now, there)
    return np.where((there >= limits.smallest) & (there <= limits.max), hope, 0.0)


def assumed_growth(situation: Situation, there: np.ndarray) -> np.ndarray:
    """Return how many times as long as the present step those of other batches are assumed to take.

    At least the power `GROWTH` of the size for a larger batch, and the square root for a smaller one.
    """
    times, fixed = there / situation.current.global_batch_size, situation.fixed_share
    grown = np.maximum(times**GROWTH, fixed + (1 - fixed) * times)
    return np.asarray(np.where(times < 1, np.sqrt(times), grown))


def modelled_gain(situation: Situation, sizes: Sequence[int], batches: np.ndarray) -> np.ndarray:
    """Return the same guess, `[sizes, counts]`, by the fitted step times: use it once two sizes are timed.

    `batches` are of one or more micro-batches of each size, in samples. A size that was never timed, between
    two that were, may be as fast as `hoped_seconds` says.
    """
    here, current, limits = situation.here, situation.current, situation.here.limits
    model = here.model(situation.grad)
    each = np.asarray(sizes)[:, None]
    counts = batches // (each * current.num_replicas)
    there = np.asarray(model.throughput(here.placement, each, counts))
    hoped_s = hoped_seconds(situation.seconds_by_size, sizes, situation.fixed_s)[:, None]
    there = np.where(counts == 1, np.fmax(there, batches / hoped_s), there)
    now = model.throughput(here.placement, current.micro_batch_size, current.num_micro_batches)
    worth = _optimistic_worth(situation, current.global_batch_size, batches)
    hope = there / float(now) * worth
    return np.where((batches >= limits.smallest) & (batches <= limits.max), hope, 0.0)


def hoped_seconds(
    seconds_by_size: Mapping[int, float], sizes: Sequence[int], fixed_s: float = math.inf
) -> np.ndarray:
    """Return the step time that one may hope for with each size, `[sizes]`, between two that were timed.

    The time is assumed to be convex in the size: up to a knee it grows as it did below, and from there on it
    is on a line to the larger neighbour that is no steeper than above. The knee may be anywhere up to where
    both lines meet, and is hoped to be at `KNEE` of that way. All but `fixed_s` seconds of the smaller
    neighbour's step, or `LEAST_FIXED` of it, grow in proportion at least. NaN for other sizes.

    >>> hoped_seconds({16: 0.02, 64: 0.02, 256: 0.08, 512: 0.16}, [64, 128])  # a knee may be at 64
    array([ nan, 0.04])
    >>> hoped_seconds({16: 0.02, 64: 0.16}, [32, 48]).round(3)  # 64 was too large, and 48 may be
    array([0.02 , 0.041])
    >>> hoped_seconds({16: 0.02, 64: 0.16}, [32], fixed_s=0.005)  # most of a step must grow
    array([0.035])
    """
    found = np.full(len(sizes), np.nan)
    timed = sorted(seconds_by_size.items())
    for i, size in enumerate(sizes):
        below, above = [x for x in timed if x[0] < size], [x for x in timed if x[0] > size]
        if size in seconds_by_size or not (below and above):
            continue
        (smaller, smaller_s), (larger, larger_s) = below[-1], above[0]
        straight = _slope(below[-1], above[0])
        before = min(max(_slope(*below[-2:]), 0.0), straight) if len(below) > 1 else 0.0
        latest = float(larger)
        if len(above) > 1 and (after := max(_slope(*above[:2]), straight)) > before:
            ahead_s = smaller_s - before * smaller - larger_s + after * larger
            latest = min(max(ahead_s / (after - before), smaller), larger)
        knee = smaller * (latest / smaller) ** KNEE
        knee_s = smaller_s + before * (knee - smaller)
        start = (smaller, smaller_s) if size <= knee else (larger, larger_s)
        hoped_s = start[1] + _slope(start, (knee, knee_s)) * (size - start[0])
        growing_s = max(smaller_s - max(fixed_s, LEAST_FIXED * smaller_s), 0.0)
        grown_s = smaller_s + growing_s * (size / smaller - 1)
        found[i] = max(hoped_s, min(grown_s, smaller_s + straight * (size - smaller)))
    return found


def _slope(one: tuple[float | int, float], other: tuple[float | int, float]) -> float:
    """Return the slope of the line through two points; 0 if they are the same."""
    return (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0


def _optimistic_worth(situation: Situation, now: int, there: np.ndarray) -> np.ndarray:
    """Return the efficiency of each batch `there` relative to `now`, in the eyes of an optimist (`OPTIMISM`).

    Unknown noise counts as large. What the loss has corrected it by is a part of what an optimist hopes for.
    For a smaller batch the hope is the expected worth.
    """
    grad, base = situation.measured_grad, situation.here.limits.base
    hoped = dataclasses.replace(grad, var=max(OPTIMISM, situation.noise_factor) * grad.var)
    ratios = [
        np.asarray(efficiency(x, there / base) / efficiency(x, now / base))
        for x in (hoped, situation.grad)
    ]
    return np.asarray(np.nan_to_num(np.where(there < now, ratios[1], ratios[0]), nan=1.0))


def _narrowed(limits: BatchLimits, smallest: int, largest: int, accumulate: bool) -> BatchLimits:
    return dataclasses.replace(
        limits,
        base=min(limits.base, largest),
        min_global=min(smallest, largest),
        max=largest,
        max_micro_batches=limits.max_micro_batches if accumulate else 1,
    )
