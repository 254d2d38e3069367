"""Learning-rate rules: by what factor a batch of another size multiplies the tuned learning rate.

A rule is a plain function `rule(scale, grad, progress) -> factor` of scalars that JAX may trace:
`scale` is batch / base batch, `grad` the gradient moments of one label group (NaN = unknown),
`progress` the base steps done. Every rule but `legw`'s warm-up gives 1 at scale 1.

The rules that read the noise never grow the learning rate on moments they do not know: the factor
is then 1 above the base batch and `scale` (pure noise, the smallest answer possible) below it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxgoodput.goodput.efficiency import GradParams, gain

Rule = Callable[[Any, GradParams, Any], Any]


def adascale(scale: Any, grad: GradParams, progress: Any = 0.0) -> Any:
    """The gain: how many base steps one step is worth (Johnson et al. 2020, AdaScale; for SGD).

    Between 1 (no noise) and `scale` (nothing but noise). Negative moments count as zero, and where
    both are zero the answer is `scale`, as in AdaptDL.

    >>> float(adascale(4.0, GradParams(sqr=1.0, var=2.0)))
    2.0
    """
    del progress
    sqr = jnp.maximum(jnp.asarray(grad.sqr), 0)
    # Relative to sqr, not absolute: gradients may be small everywhere and still be all signal.
    var = jnp.maximum(jnp.maximum(jnp.asarray(grad.var), 1e-6 * sqr), 1e-30)
    known = jnp.isfinite(sqr) & jnp.isfinite(var)
    worth = gain(GradParams(sqr=jnp.where(known, sqr, 1), var=jnp.where(known, var, 1)), scale)
    return jnp.where(known, worth, jnp.minimum(scale, 1.0))


def adam_scale(scale: Any, grad: GradParams, progress: Any = 0.0) -> Any:
    """The square root of the gain, for optimizers that divide by the gradient's size (AdaptDL).

    `grad` should then come from preconditioned gradients: `noise.preconditioner`.

    >>> float(adam_scale(4.0, GradParams(sqr=0.0, var=1.0)))
    2.0
    """
    return jnp.sqrt(adascale(scale, grad, progress))


def of_noise_share(share: float) -> Rule:
    """A rule for optimizers that divide by the size of an average: `gain / sqrt(gain of share * noise)`.

    `share` is how much of the gradient's noise is left in what they divide (`probe.noise_share`): 1 gives
    `adam_scale`; near 0, as for Lion, whose sign is that of a momentum, updates do not grow by
    themselves when the noise shrinks, and the factor is the gain.

    >>> rule = of_noise_share(0.0)
    >>> round(float(rule(4.0, GradParams(sqr=1.0, var=2.0), 0.0)), 3)
    2.0
    """

    def rule(scale: Any, grad: GradParams, progress: Any) -> Any:
        quiet = GradParams(sqr=grad.sqr, var=share * jnp.asarray(grad.var))
        by_itself = adascale(scale, quiet, progress)
        return adascale(scale, grad, progress) / jnp.sqrt(by_itself)

    return rule


def linear(scale: Any, grad: GradParams | None = None, progress: Any = 0.0) -> Any:
    """The scale itself (Goyal et al. 2017): right for SGD while noise dominates."""
    del grad, progress
    return scale


def square_root(scale: Any, grad: GradParams | None = None, progress: Any = 0.0) -> Any:
    """The root of the scale (Hoffer 2017; Malladi 2022 for Adam): keeps the update's variance."""
    del grad, progress
    return jnp.sqrt(scale)


def legw(warmup_base_steps: float) -> Rule:
    """The root of the scale, after a linear warm-up that grows with the scale (You et al. 2019).

    `warmup_base_steps` is the warm-up tuned at the base batch, in base steps; at `scale` it takes
    `scale` times as much progress. The factor is 0 at progress 0, and below 1 in the warm-up even
    at scale 1.

    >>> float(legw(100.0)(4.0, GradParams(sqr=1.0, var=1.0), 200.0))
    1.0
    """
    if not warmup_base_steps >= 0:
        raise ValueError(
            f"warmup_base_steps must be 0 or more, got {warmup_base_steps}: it is the length of "
            "the warm-up at the base batch size, in steps."
        )

    def rule(scale: Any, grad: GradParams, progress: Any) -> Any:
        if warmup_base_steps == 0:
            return square_root(scale, grad, progress)
        warmup = jnp.minimum(1.0, progress / (warmup_base_steps * scale))
        return jnp.sqrt(scale) * warmup

    return rule


def none(scale: Any, grad: GradParams | None = None, progress: Any = 0.0) -> Any:
    """1: the learning rate stays as tuned, whatever the batch."""
    del grad, progress
    return jnp.ones_like(jnp.asarray(scale, jnp.result_type(float)))
