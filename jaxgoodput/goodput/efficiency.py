"""How much a sample of a larger batch is worth, from two moments of the gradient.

Source: McCandlish et al. 2018 (noise scale); Johnson et al. 2020 (AdaScale gain); Pollux, equations 5-7.

Parameters whose noise differs by orders of magnitude must not be pooled. In a recommender, embedding rows
that are hardly ever read hold nine tenths of the gradient noise, and a larger batch costs them nothing. The
worth of a sample is therefore a mean over groups of parameters, weighted by their signal.
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

    Scalars, or arrays of one shape. If they are unknown, so is the worth of every batch except the base.
    """

    sqr: Numeric
    """Squared norm of the expected gradient."""
    var: Numeric
    """Trace of the covariance of the gradient of one base batch."""
    known: Any = True
    """Whether enough was measured. If False, JAX arrays hold finite placeholders, because programs must not
    compute with NaN; Python and numpy values are NaN."""


@struct
class GradGroups:
    """The two moments of every group of parameters, at the base batch size, as arrays `[groups]`."""

    sqr: PerGroup
    """Squared norm of the group's expected gradient, which is its share of the progress of training."""
    var: PerGroup
    """Trace of the covariance of the group's gradient of one base batch."""
    known: Any = True
    """Whether enough was measured, a scalar. If False, JAX arrays hold finite placeholders; numpy arrays are
    NaN."""
    most_gain: Any = None
    """Base steps that a step above the base batch may be worth, at most; None for no limit. Set on the host
    after the gradient has exploded: the noise does not tell it."""


Grad: TypeAlias = GradParams | GradGroups


def is_known(grad: Grad) -> bool:
    """Return whether every moment is known. Host values only."""
    finite = np.isfinite(grad.sqr).all() and np.isfinite(grad.var).all()
    return bool(finite and np.all(grad.known))


def _or_nan(value: Numeric, known: Any) -> Numeric:
    """Return `value`, or NaN if the moments that it was computed from are not `known`."""
    return value if known is True else namespace(value, known).where(known, value, np.nan)


def gain(grad: Grad, scale: Numeric) -> Numeric:
    """Return how many base steps one step at `scale` (batch / base batch) is worth.

    The gain is 1 at scale 1, whatever the noise, and also if signal and noise are both zero. Above scale 1 it
    is at most `scale`. It is NaN if the moments are unknown and the scale is not 1.

    >>> float(gain(GradParams(sqr=1.0, var=3.0), 3.0))
    2.0
    """
    if isinstance(grad, GradGroups):
        return efficiency(grad, scale) * scale
    xp = namespace(grad, scale)
    denominator = grad.var / xp.asarray(scale) + grad.sqr
    # Written with `<=`, because a NaN must stay a NaN and not become the best or the worst answer.
    degenerate = denominator <= 0
    ratio = (grad.var + grad.sqr) / xp.where(degenerate, 1.0, denominator)
    worth = _or_nan(xp.where(degenerate, 1.0, ratio), grad.known)
    return xp.where(xp.asarray(scale) == 1, 1.0, worth)


def efficiency(grad: Grad, scale: Numeric) -> Numeric:
    """Return the progress per sample relative to the base batch: gain / scale.

    It is 1 at the base batch, in (0, 1] above it, and 1 or more below it. For groups with shares s_i of the
    signal and noise scales n_i it is sum_i s_i (n_i + base) / (n_i + batch), and at most their `most_gain` /
    scale. Above the base batch this never exceeds the efficiency of the pooled moments (Jensen's inequality).
    If no group has any signal, the pooled moments are used.

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
    # Written with `<=`, because a NaN must stay a NaN.
    worth = _or_nan(xp.where(signal <= 0, pooled, mean), grad.known)
    if grad.most_gain is not None:
        worth = xp.where(scale > 1, xp.minimum(worth, grad.most_gain / scale), worth)
    return xp.where(scale == 1, 1.0, worth)


def noise_scale(grad: Grad, base_batch_size: Numeric) -> Numeric:
    """Return the batch size, in samples, at which gradient noise and signal are equal.

    Below it, a larger batch is almost free; far above it, almost useless. At the noise scale a sample is
    worth half as much as a sample of a tiny batch. For groups, it is the batch at which this holds for the
    mean worth, weighted by signal. It is infinite if there is no signal, and NaN if the moments are unknown.

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
        return _or_nan(each, grad.known)
    signal = xp.sum(grad.sqr, axis=-1)
    share = grad.sqr / xp.where(signal > 0, signal, 1.0)
    # Bisection in the logarithm, between the smallest and the largest noise scale of a group.
    sizes = xp.clip(xp.where(silent, 1.0, each), 1e-9, 1e30)
    low, high = (
        xp.log(xp.min(xp.where(silent, 1e30, sizes), axis=-1)),
        xp.log(xp.max(xp.where(silent, 1e-9, sizes), axis=-1)),
    )
    for _ in range(60):
        middle = (low + high) / 2
        worth = xp.sum(share * sizes / (sizes + xp.exp(middle)[..., None]), axis=-1)
        low, high = xp.where(worth > 0.5, middle, low), xp.where(worth > 0.5, high, middle)
    # Adding `0 * signal` makes the result NaN if the moments of any group are NaN.
    size = xp.where(signal <= 0, xp.inf, xp.exp((low + high) / 2) + 0 * signal)
    return _or_nan(size, grad.known)
