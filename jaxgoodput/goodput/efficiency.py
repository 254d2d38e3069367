"""How much a sample of a larger batch is worth, from two moments of the gradient.

Source: McCandlish et al. 2018 (noise scale); Johnson et al. 2020 (AdaScale gain); Pollux,
equations 5-7. Parameters whose noise differs by orders of magnitude must not be pooled: of a
recommender's gradient noise, rows that are hardly ever read hold nine tenths, and a larger batch
costs them nothing. What a sample is worth is then the mean over groups of parameters, weighted by
their signal.
"""

from typing import Annotated, Any, TypeAlias

import numpy as np

from jaxgoodput._pytree import struct
from jaxgoodput.goodput.perf import Numeric, namespace

# An array `[groups]`; in JSON, a list of numbers.
PerGroup: TypeAlias = Annotated[Any, tuple[float, ...]]


@struct
class GradParams:
    """The two moments of the gradient that decide the batch, both at the base batch size.

    Scalars, or arrays of one shape. NaN says unknown: every batch but the base then has an unknown
    worth.
    """

    sqr: Numeric
    """Squared norm of the expected gradient."""
    var: Numeric
    """Trace of the covariance of the gradient of one base batch."""


@struct
class GradGroups:
    """The two moments of every group of parameters, at the base batch size.

    Arrays `[groups]`; NaN says unknown.
    """

    sqr: PerGroup
    """Squared norm of the group's expected gradient: its share of what training gains."""
    var: PerGroup
    """Trace of the covariance of the group's gradient, of one base batch."""


Grad: TypeAlias = GradParams | GradGroups


def is_known(grad: Grad) -> bool:
    """Whether every moment is known; on the host."""
    return bool(np.isfinite(grad.sqr).all() and np.isfinite(grad.var).all())


def gain(grad: Grad, scale: Numeric) -> Numeric:
    """How many base steps one step at `scale` (batch / base batch) is worth.

    1 at scale 1 whatever the noise; 1 where signal and noise are both zero; at most `scale` above
    1. NaN where the moments are unknown and the scale is not 1.

    >>> float(gain(GradParams(sqr=1.0, var=3.0), 3.0))
    2.0
    """
    if isinstance(grad, GradGroups):
        return efficiency(grad, scale) * scale
    xp = namespace(grad, scale)
    denominator = grad.var / xp.asarray(scale) + grad.sqr
    # `<=` and not its opposite: a NaN must stay a NaN and not become the perfect or the worst
    # answer.
    degenerate = denominator <= 0
    ratio = (grad.var + grad.sqr) / xp.where(degenerate, 1.0, denominator)
    return xp.where(degenerate | (xp.asarray(scale) == 1), 1.0, ratio)


def efficiency(grad: Grad, scale: Numeric) -> Numeric:
    """Progress per sample relative to the base batch: gain / scale.

    1 at the base, in (0, 1] above it, and 1 or more below it. Of groups with shares s_i of the signal and
    noise scales n_i it is sum_i s_i (n_i + base) / (n_i + batch), which above the base batch never exceeds
    that of the pooled moments (Jensen's inequality); where no group has any signal, that of the pooled
    moments.

    >>> even = GradGroups(sqr=np.array([1.0, 1.0]), var=np.array([0.0, 1e9]))
    >>> round(float(efficiency(even, 4.0)), 3)
    0.625
    """
    if not isinstance(grad, GradGroups):
        return gain(grad, scale) / scale
    xp = namespace(grad, scale)
    scale = xp.asarray(scale)
    signal = xp.sum(grad.sqr, axis=-1)
    each = efficiency(GradParams(sqr=grad.sqr, var=grad.var), scale[..., None])
    mean = xp.sum(grad.sqr * each, axis=-1) / xp.where(signal > 0, signal, 1.0)
    pooled = efficiency(GradParams(sqr=signal, var=xp.sum(grad.var, axis=-1)), scale)
    # `<=` and not its opposite: a NaN must stay a NaN.
    return xp.where(scale == 1, 1.0, xp.where(signal <= 0, pooled, mean))


def noise_scale(grad: Grad, base_batch_size: Numeric) -> Numeric:
    """The batch size, in samples, at which gradient noise and signal are equal.

    Below it a larger batch is almost free; far above it, almost useless: at it, a sample is worth
    half of what one of a tiny batch is. Of groups it is the batch at which that holds of their mean,
    weighted by their signal.
    Infinite where no signal is left; NaN where unknown.

    >>> float(noise_scale(GradParams(sqr=1.0, var=8.0), base_batch_size=64))
    512.0
    >>> groups = GradGroups(sqr=np.array([1.0, 1.0]), var=np.array([1.0, 100.0]))
    >>> round(float(noise_scale(groups, base_batch_size=64)))  # the geometric mean of 64 and 6400
    640
    """
    xp = namespace(grad, base_batch_size)
    silent = xp.asarray(grad.sqr) <= 0
    each = xp.where(silent, xp.inf, grad.var / xp.where(silent, 1.0, grad.sqr) * base_batch_size)
    if not isinstance(grad, GradGroups):
        return each
    signal = xp.sum(grad.sqr, axis=-1)
    share = grad.sqr / xp.where(signal > 0, signal, 1.0)
    # By bisection in the logarithm, between the smallest and the largest of the groups.
    sizes = xp.clip(xp.where(silent, 1.0, each), 1e-9, 1e30)
    low, high = (
        xp.log(xp.min(xp.where(silent, 1e30, sizes), axis=-1)),
        xp.log(xp.max(xp.where(silent, 1e-9, sizes), axis=-1)),
    )
    for _ in range(60):
        middle = (low + high) / 2
        worth = xp.sum(share * sizes / (sizes + xp.exp(middle)[..., None]), axis=-1)
        low, high = xp.where(worth > 0.5, middle, low), xp.where(worth > 0.5, high, middle)
    return xp.where(signal <= 0, xp.inf, xp.exp((low + high) / 2) + 0 * signal)
