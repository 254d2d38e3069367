"""Chooses how an optimizer is treated when its batch changes: its rule, the norm of its noise, its memory.

Optimizers are probed once before training (`probe`), because optax stores neither names nor constants.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from absl import logging
from jaxtyping import PyTree

from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.learning_rate import Rule
from jaxgoodput.optim.memory import Decays
from jaxgoodput.optim.preconditioner import MomentConstants, is_adam_like, moment_memory
from jaxgoodput.optim.probe import (
    averages_parameters,
    lags,
    long_averages,
    moment_constants,
    noise_share,
    normalised_share,
)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """The properties of an optimizer that `adaptive` and the noise statistics depend on."""

    is_adam_like: bool
    """Whether it divides by a root of squares, as the norms of its noise then are, too."""
    rule: Rule
    """Learning-rate rule, the user's or the one that suits the optimizer."""
    moments: MomentConstants
    """Constants of its second moment."""
    second_moment_decay: float | None
    """Option of `adaptive`."""
    long_averages: Decays
    """Option of `adaptive`."""


def treatment_of(
    tx: optax.GradientTransformation, params: PyTree, rule: Rule | None = None
) -> Treatment:
    """Return how to treat `tx`; `params` may be abstract. Warns if the user's own `rule` does not suit it.

    Raises NeedsMore if the transformation requires more than gradients, parameters and the loss.
    """
    opt_state = jax.eval_shape(tx.init, params)
    adam_like = is_adam_like(opt_state)
    # Optimizers that are not known by type are probed: Lion, sign and normalised SGD, and a user's own.
    normalises = adam_like or normalised_share(tx, params) > 0.5
    moments = moment_constants(tx, params) if adam_like else MomentConstants()
    _warn_of_averages(tx, params, opt_state)
    decay = moment_memory(opt_state, moments.b2)
    if decay is not None and not lags(tx, params):
        decay = None
    better = rules.adam_scale if normalises else rules.adascale
    worse = rules.adascale if normalises else rules.adam_scale
    if rule is None:
        is_lagging = not normalises or decay is not None
        rule = better if is_lagging else rules.of_noise_share(noise_share(tx, params))
    elif rule is worse:
        logging.warning(
            "the rule %s does not suit this optimizer, which %s the gradient by its size. Use %s, or leave "
            "Config.rule None to have it chosen.",
            worse.__name__,
            "divides" if normalises else "does not divide",
            better.__name__,
        )
    return Treatment(
        is_adam_like=adam_like,
        rule=rule,
        moments=moments,
        second_moment_decay=decay if rule is rules.adam_scale else None,
        long_averages=long_averages(tx, params),
    )


def _warn_of_averages(tx: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    if _holds(opt_state, optax.contrib.ScheduleFreeState):
        logging.warning(
            "optimizer() is schedule-free: it averages parameters with steps of its own, which the "
            "learning-rate gain of a larger batch does not change, so most of the gain is lost. Use "
            'Config.policy "fixed", which keeps the batch and needs no gain.'
        )
    elif _holds(opt_state, optax.EmaState) or averages_parameters(tx, params):
        logging.warning(
            "optimizer() keeps an average (optax.ema, or one of the parameters), which sees updates before "
            "the learning-rate gain. That is right for a momentum, but an average of the parameters falls "
            "behind them at a larger batch. Use Config.ema instead, which includes the gain."
        )


def _holds(opt_state: PyTree, kind: type) -> bool:
    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return any(map(is_kind, jax.tree.leaves(opt_state, is_leaf=is_kind)))
