"""Says whether what the last verdict rested on no longer holds, so that the next one should not wait."""

import dataclasses
import math

from jaxgoodput.goodput.efficiency import noise_scale
from jaxgoodput.tune.batch import denial
from jaxgoodput.tune.verdict import Situation

# Factors beyond which the noise scale, or the time of a step, counts as another one. The best batch moves
# with the square root of either, and a batch that is off by a factor of 1.25 costs at most 2 %.
NOISE, STEP_S = 1.5, 1.5
CADENCE = 2.0  # the same for the number of steps between two measurements of the noise, if that is too large
DOUBT = 1.5  # times the standard errors of losses


def has_drifted(before: Situation | None, now: Situation) -> bool:
    """Return whether noise, step time, loss or a limit have left what they were at the last verdict.

    The loss has if it now denies the present batch with more certainty than a verdict asks for, as it is
    looked at again and again. So has a noise that should be measured more often. What is unknown, before or
    now, has not. After a change of the batch, other rules ask; so do they before the first verdict.
    """
    if before is None or before.current != now.current:
        return False
    base = now.here.limits.base
    was, is_now = (float(noise_scale(s.grad, base)) for s in (before, now))
    return (
        _is_other(was, is_now, NOISE)
        or _is_other(before.step_s, now.step_s, STEP_S)
        or _is_other(before.most_gain or math.inf, now.most_gain or math.inf, NOISE)
        or before.statistics_every > CADENCE * now.statistics_every
        or (denial(before) is None and denial(_doubted(now)) is not None)
    )


def _doubted(situation: Situation) -> Situation:
    """Return a situation with larger errors of its losses."""
    wider = [
        s and dataclasses.replace(s, error=DOUBT * s.error)
        for s in (situation.stretch, situation.stretch_before)
    ]
    return dataclasses.replace(situation, stretch=wider[0], stretch_before=wider[1])


def _is_other(before: float, now: float, factor: float) -> bool:
    """Return whether two values differ by more than a factor; never if one is NaN."""
    low, high = sorted((before, now))
    return high > factor * low
