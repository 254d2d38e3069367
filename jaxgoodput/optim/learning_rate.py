"""Learning-rate rules: the factor by which another batch size multiplies the tuned learning rate.

A rule is a plain function `rule(scale, grad, progress) -> factor` of scalars, which JAX may trace. `scale` is
batch / base batch, `grad` the gradient moments of one label, and `progress` the base steps done. At scale 1
every rule gives 1, except during `legw`'s warm-up.

Rules that depend on noise never increase the learning rate while the moments are unknown. The factor is then
1 above the base batch, and `scale` below it, which is right for pure noise and the smallest possible value.
A rule of your own need not ask for this: while the moments are unknown (`grad.known` is False), it gets the
moments of almost pure signal from the base batch on, and of almost pure noise below it (`cautious`).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxgoodput.goodput.efficiency import GradParams, gain

Rule = Callable[[Any, GradParams, Any], Any]
_ALMOST_NONE = 1e-6  # of a moment, if the other one is 1


def cautious(scale: Any, grad: GradParams) -> GradParams:
    """Return the moments as a rule gets them: if unknown, some that give almost the smallest factor.

    The larger moment is then 1 and the other one 1e-6, so a rule may divide by either. It is the signal from
    the base batch on, and the noise below it.
    """
    dtype = jnp.asarray(grad.var).dtype
    is_signal = jnp.asarray(scale) >= 1
    sqr = jnp.where(is_signal, 1.0, _ALMOST_NONE).astype(dtype)
    var = jnp.where(is_signal, _ALMOST_NONE, 1.0).astype(dtype)
    return dataclasses.replace(
        grad, sqr=jnp.where(grad.known, grad.sqr, sqr), var=jnp.where(grad.known, grad.var, var)
    )


@dataclass(frozen=True, kw_only=True)
class LeafRules:
    """Rules of an optimizer that treats groups of leaves differently (`optax.multi_transform`, Muon).

    Tuples by leaf follow `jax.tree.leaves(params)`; leaves beyond their end have the first rule.
    """

    rules: tuple[Rule, ...]
    """The different rules."""
    second_moment_decays: tuple[float | None, ...]
    """Option `second_moment_decay` of `adaptive`, for each rule."""
    rule_of_leaf: tuple[int, ...] = ()
    """Index of each leaf's rule."""
    step_sizes: tuple[float, ...] = ()
    """Step size of each leaf, relative to the largest, which converts its norms to expected decreases of the
    loss; () if the norms of all leaves are in the same units."""
    by_size: tuple[bool, ...] = ()
    """Whether a leaf's update is divided by the size of its gradient, which the norms are then divided by."""

    def of_leaves(self, num_leaves: int) -> tuple[int, ...]:
        """Return the index of the rule of each of so many leaves."""
        return self.rule_of_leaf + (0,) * (num_leaves - len(self.rule_of_leaf))


def adascale(scale: Any, grad: GradParams, progress: Any = 0.0) -> Any:
    """Return the gain: how many base steps one step is worth (Johnson et al. 2020, AdaScale). Use it for SGD.

    It lies between 1 (no noise) and `scale` (pure noise). Negative moments count as zero. If both are zero,
    the result is `scale`, as in AdaptDL.

    >>> float(adascale(4.0, GradParams(sqr=1.0, var=2.0)))
    2.0
    """
    del progress
    sqr = jnp.maximum(jnp.asarray(grad.sqr), 0)
    # The floor is relative to sqr, because gradients may be small everywhere and still be all signal.
    var = jnp.maximum(jnp.maximum(jnp.asarray(grad.var), 1e-6 * sqr), 1e-30)
    known = jnp.asarray(grad.known) & jnp.isfinite(sqr) & jnp.isfinite(var)
    worth = gain(GradParams(sqr=jnp.where(known, sqr, 1), var=jnp.where(known, var, 1)), scale)
    return jnp.where(known, worth, jnp.minimum(scale, 1.0))


def adam_scale(scale: Any, grad: GradParams, progress: Any = 0.0) -> Any:
    """Return the square root of the gain. Use it for optimizers that divide by the gradient's size (AdaptDL).

    `grad` should then come from preconditioned gradients: see `noise.preconditioner`.

    >>> float(adam_scale(4.0, GradParams(sqr=0.0, var=1.0)))
    2.0
    """
    return jnp.sqrt(adascale(scale, grad, progress))


def of_noise_share(share: float) -> Rule:
    """Return a rule for optimizers that divide by an average's size: gain / sqrt(gain of share * noise).

    `share` is the part of the gradient's noise that is left in that average (`probe.noise_share`). If it is
    1, the rule equals `adam_scale`. If it is near 0, as for Lion, which takes the sign of a momentum, updates
    do not grow by themselves when the noise shrinks, and the factor is the gain.

    >>> rule = of_noise_share(0.0)
    >>> round(float(rule(4.0, GradParams(sqr=1.0, var=2.0), 0.0)), 3)
    2.0
    """

    def rule(scale: Any, grad: GradParams, progress: Any) -> Any:
        quiet = dataclasses.replace(grad, var=share * jnp.asarray(grad.var))
        by_itself = adascale(scale, quiet, progress)
        return adascale(scale, grad, progress) / jnp.sqrt(by_itself)

    return rule


def linear(scale: Any, grad: GradParams | None = None, progress: Any = 0.0) -> Any:
    """Return the scale itself (Goyal et al. 2017), which is right for SGD while noise dominates."""
    del grad, progress
    return scale


def square_root(scale: Any, grad: GradParams | None = None, progress: Any = 0.0) -> Any:
    """Return the root of the scale (Hoffer 2017; Malladi 2022 for Adam): keeps the update's variance."""
    del grad, progress
    return jnp.sqrt(scale)


def legw(warmup_base_steps: float) -> Rule:
    """Return the rule of You et al. 2019: the root of the scale, after a warm-up that grows with the scale.

    `warmup_base_steps` is the length of the warm-up tuned at the base batch. At another scale it takes
    `scale` times as much progress. The factor begins at 0 and stays below 1 during the warm-up, even at scale
    1.

    >>> float(legw(100.0)(4.0, GradParams(sqr=1.0, var=1.0), 200.0))
    1.0
    """
    if not warmup_base_steps >= 0:
        raise ValueError(
            f"warmup_base_steps must be 0 or more, got {warmup_base_steps}. It is the length of the "
            "warm-up at the base batch size, in steps."
        )

    def rule(scale: Any, grad: GradParams, progress: Any) -> Any:
        if warmup_base_steps == 0:
            return square_root(scale, grad, progress)
        warmup = jnp.minimum(1.0, progress / (warmup_base_steps * scale))
        return jnp.sqrt(scale) * warmup

    return rule


def none(scale: Any, grad: GradParams | None = None, progress: Any = 0.0) -> Any:
    """Return 1, which keeps the tuned learning rate at every batch."""
    del grad, progress
    return jnp.ones_like(jnp.asarray(scale, jnp.result_type(float)))
