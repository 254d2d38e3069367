"""Says whether what the last verdict rested on no longer holds, so that the next one should not wait."""

from jaxgoodput.goodput.efficiency import noise_scale
from jaxgoodput.tune.batch import denial
from jaxgoodput.tune.verdict import Situation

# Factors beyond which the noise scale, or the time of a step, counts as another one. The best batch moves
# with the square root of either, and a batch that is off by a factor of 1.25 costs at most 2 %.
NOISE, STEP_S = 1.5, 1.5
CADENCE = 2.0  # the same for the number of steps between two measurements of the noise


def has_drifted(before: Situation, now: Situation) -> bool:
    """Return whether noise, step time or loss have left what they were at the last verdict.

    The loss has if the batch chosen then is now denied by it. What is unknown, before or now, has not. The
    noise also needs a verdict if it should be measured more or less often. After a change of the batch,
    other rules ask.
    """
    if before.current != now.current:
        return False
    base = now.here.limits.base
    noises = (float(noise_scale(s.grad, base)) for s in (before, now))
    return (
        _is_other(*noises, NOISE)
        or _is_other(before.step_s, now.step_s, STEP_S)
        or _is_other(before.statistics_every, now.statistics_every, CADENCE)
        or (denial(before) is None and denial(now) is not None)
    )


def _is_other(before: int | float, now: int | float, factor: float) -> bool:
    """Return whether two values differ by more than a factor; never if one is NaN."""
    low, high = sorted((before, now))
    return high > factor * low
