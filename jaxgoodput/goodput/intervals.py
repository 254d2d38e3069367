"""States the noise scale with an 80 % interval, from averages of signal and noise and their errors.

The noise of a gradient is measured within a few steps. Its signal may lie far below its own standard error,
as in embedding tables, for which one estimate per step would have to be averaged for longer than a run lasts.
What is known then is a distribution:

* The ratio of signal to noise has a level that all groups of parameters share. Beforehand, only its range is
  known (`LEVELS`). Groups differ from this level by a random factor (`GROUP_SPREAD`), so groups that were
  measured well say something about the others. If none was, the interval reaches up to noise scales of
  thousands of base batches.
* A measured signal has a normal error.
* The averages cover the last thousand base batches or so, but the signal is that of the present parameters.
  It changes from step to step and drifts (`FLUCTUATION`).

Estimates from pairs of updates also contain how far the parameters moved in between. The interval does not
cover that. Nor does it cover what the parts of a batch share, such as the statistics of batch normalisation,
which pass for signal: the true noise scale then tends to the upper end, or beyond.

Everything is numpy on the host. The draws are fixed: the same averages give the same interval.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

# Range of the level, the ratio of signal to noise at the base batch. Every decade is equally likely.
LEVELS = (1e-4, 10.0)
# Standard deviation of the logarithm of this ratio over the groups of a model.
GROUP_SPREAD = 1.5
# Standard deviation of the logarithm of the present signal about its average. With 0.5, eight of ten states
# of a decoder lie inside (benchmarks/noise_intervals.py). Alone it makes the interval span a factor of 3.6.
FLUCTUATION = 0.5
# The largest standard deviation of the logarithm of the noise. Beyond it nothing is known, and its
# exponential would overflow.
WIDEST = 10.0
NUM_DRAWS, NUM_LEVELS, NUM_SIGNALS = 64, 16, 24

Groups = Float[np.ndarray, " groups"]


@dataclass(frozen=True, kw_only=True)
class NoiseInterval:
    """A noise scale in samples, meant to lie between `lower` and `upper` in eight of ten states."""

    lower: float
    middle: float
    """The median."""
    upper: float

    @property
    def is_known(self) -> bool:
        """Whether there are enough estimates to say anything."""
        return bool(np.isfinite(self.middle))


UNKNOWN_INTERVAL = NoiseInterval(lower=np.nan, middle=np.nan, upper=np.nan)


def noise_interval(
    sqr: Groups,
    var: Groups,
    sqr_error: Groups,
    var_error: float,
    base_batch_size: int,
    *,
    fluctuation: float = FLUCTUATION,
) -> NoiseInterval:
    """Return the noise scale of the groups' mean worth (`efficiency.noise_scale`) with its interval.

    `sqr` is the plain average of each group's estimated signal, which may be negative, and `sqr_error` its
    standard error. `var` is the noise at the base batch size, and `var_error` the standard error of its sum,
    as a share of the sum. `fluctuation` is the standard deviation of the logarithm of the present signal
    about its average; pass 0 for the noise scale of the average.

    Without any noise the noise scale is 0, and known. It is unknown if a number is not finite.
    """
    if not all(np.isfinite(x).all() for x in (sqr, var, sqr_error, var_error)):
        return UNKNOWN_INTERVAL
    total = float(var.sum())
    if not total > 0:
        return NoiseInterval(lower=0.0, middle=0.0, upper=0.0)
    # A group without noise would have an infinite ratio; its signal counts as it is.
    noise = np.maximum(np.asarray(var, float) / total, 1e-12)
    signals = _draws(np.asarray(sqr, float) / total, np.asarray(sqr_error, float) / total, noise)
    spread = np.minimum(np.hypot(fluctuation, var_error), WIDEST)
    # The mean of the signal over states is its average, so its median lies below.
    factors = np.exp(spread * ndtri(_UNIFORM[:, 1]) + spread**2 / 2)
    scales = _half_worth(signals, noise) * factors * base_batch_size
    lower, middle, upper = np.quantile(scales, [0.1, 0.5, 0.9])
    return NoiseInterval(lower=float(lower), middle=float(middle), upper=float(upper))


def _draws(measured: Groups, error: Groups, noise: Groups) -> np.ndarray:
    """Return signals drawn from their joint distribution given what was measured, `[draws, groups]`."""
    # Without noise or error nothing was measured, as of an unused parameter: it tells nothing of others.
    is_measured = (noise > 1e-12) & (error > 0)
    error = np.maximum(error, 1e-9 * noise)
    least = np.maximum(measured - 3.5 * error, noise * (LEVELS[0] / 100))
    most = np.maximum(measured, 0) + 4 * error
    low, high = (_unbent(bound / error) for bound in (least, np.maximum(most, 1.001 * least)))
    # Candidates for every group's signal, [groups, signals]: logarithmic below its error, linear above.
    bent = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, NUM_SIGNALS)
    signals = error[:, None] * np.logaddexp(bent, 0)
    logs = np.log(signals)
    # The first three terms are the density of the candidates' logarithms.
    agreement = np.log(error)[:, None] - np.logaddexp(-bent, 0) - logs
    agreement -= 0.5 * ((signals - measured[:, None]) / error[:, None]) ** 2
    levels = np.linspace(np.log(LEVELS[0]), np.log(LEVELS[1]), NUM_LEVELS)
    apart = (logs - np.log(noise)[:, None])[None] - levels[:, None, None]
    likely = agreement[None] - 0.5 * (apart / GROUP_SPREAD) ** 2  # [levels, groups, signals]
    best = likely.max(axis=-1, keepdims=True)
    chance = np.exp(likely - best)
    below = np.zeros_like(chance)
    np.cumsum((chance[..., 1:] + chance[..., :-1]) / 2, axis=-1, out=below[..., 1:])
    of_level = ((np.log(below[..., -1]) + best[..., 0]) * is_measured).sum(axis=-1)
    up_to = np.cumsum(np.exp(of_level - of_level.max()))
    level = np.searchsorted(up_to / up_to[-1], _UNIFORM[:, 0])
    # Every group's signal at the drawn level, between two candidates.
    below = below[level]  # [draws, groups, signals]
    drawn = _uniform_of(len(noise)) * below[..., -1]
    after = np.clip((below < drawn[..., None]).sum(axis=-1), 1, NUM_SIGNALS - 1)[..., None]
    start, end = (np.take_along_axis(below, i, axis=-1)[..., 0] for i in (after - 1, after))
    part = np.clip((drawn - start) / np.maximum(end - start, 1e-300), 0, 1)
    group = np.arange(len(noise))
    start, end = (logs[group, i[..., 0]] for i in (after - 1, after))
    return np.exp(start + part * (end - start))


def _unbent(ratio: np.ndarray) -> np.ndarray:
    """Return the number whose softplus is `ratio`."""
    return ratio + np.log(-np.expm1(-ratio))


def _half_worth(signals: np.ndarray, noise: Groups) -> np.ndarray:
    """Return the noise scale of each row of signals, `[draws]`, in base batches."""
    scales = noise / signals
    share = signals / signals.sum(axis=-1, keepdims=True)
    low, high = np.log(scales.min(axis=-1)), np.log(scales.max(axis=-1))
    for _ in range(12):  # more digits than the draws have
        middle = (low + high) / 2
        more = (share * scales / (scales + np.exp(middle)[:, None])).sum(axis=-1) > 0.5
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    return np.exp((low + high) / 2)


def _uniform_of(num_groups: int) -> np.ndarray:
    """Return numbers in (0, 1), evenly spread for each group, `[draws, groups]`."""
    return _UNIFORM[:, 2 + np.arange(num_groups) % (_UNIFORM.shape[1] - 2)]


def _evenly(num_columns: int) -> np.ndarray:
    """Return evenly spread numbers in (0, 1) in several orders, `[draws, columns]` (Latin hypercube)."""
    rng = np.random.default_rng(0)
    orders = [rng.permutation(NUM_DRAWS) for _ in range(num_columns)]
    return (np.stack(orders, axis=1) + 0.5) / NUM_DRAWS


_UNIFORM = _evenly(66)
