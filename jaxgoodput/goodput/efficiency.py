"""How much a sample of a larger batch is worth, from two moments of the gradient.

Source: McCandlish et al. 2018 (noise scale); Johnson et al. 2020 (AdaScale gain); Pollux,
equations 5-7.
"""

from jaxgoodput._pytree import struct
from jaxgoodput.goodput.perf import Numeric, namespace


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


def gain(grad: GradParams, scale: Numeric) -> Numeric:
    """How many base steps one step at `scale` (batch / base batch) is worth.

    1 at scale 1 whatever the noise; 1 where signal and noise are both zero; at most `scale` above
    1. NaN where the moments are unknown and the scale is not 1.

    >>> float(gain(GradParams(sqr=1.0, var=3.0), 3.0))
    2.0
    """
    xp = namespace(grad, scale)
    denominator = grad.var / xp.asarray(scale) + grad.sqr
    # `<=` and not its opposite: a NaN must stay a NaN and not become the perfect or the worst
    # answer.
    degenerate = denominator <= 0
    ratio = (grad.var + grad.sqr) / xp.where(degenerate, 1.0, denominator)
    return xp.where(degenerate | (xp.asarray(scale) == 1), 1.0, ratio)


def efficiency(grad: GradParams, scale: Numeric) -> Numeric:
    """Progress per sample relative to the base batch: gain / scale.

    1 at the base, in (0, 1] above it, and 1 or more below it.
    """
    return gain(grad, scale) / scale


def noise_scale(grad: GradParams, base_batch_size: Numeric) -> Numeric:
    """The batch size, in samples, at which gradient noise and signal are equal.

    Below it a larger batch is almost free; far above it, almost useless. Infinite where no signal
    is left; NaN where unknown.

    >>> float(noise_scale(GradParams(sqr=1.0, var=8.0), base_batch_size=64))
    512.0
    """
    xp = namespace(grad, base_batch_size)
    silent = xp.asarray(grad.sqr) <= 0
    return xp.where(silent, xp.inf, grad.var / xp.where(silent, 1.0, grad.sqr) * base_batch_size)
