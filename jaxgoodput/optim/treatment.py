"""How an optimizer is treated when its batch changes: which rule, which norm, which memory.

The optimizer is asked (`probe`), once and before training: optax keeps neither names nor constants.
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
    """What `adaptive` and the statistics should know of an optimizer."""

    is_adam_like: bool
    """Whether it divides by a root of squares, by which the norms of its noise are then divided."""
    rule: Rule
    """By what a larger batch multiplies its learning rate: the user's, or the one that suits it."""
    moments: MomentConstants
    """Of its second moment."""
    second_moment_decay: float | None
    """See `adaptive`."""
    long_averages: Decays
    """See `adaptive`."""


def treatment_of(
    tx: optax.GradientTransformation, params: PyTree, rule: Rule | None = None
) -> Treatment:
    """How `tx` is treated; `rule` is the user's own, `params` may be abstract. Warns of what goes badly.

    Raises NeedsMore for a transformation that asks for more than gradients, parameters and the loss.
    """
    opt_state = jax.eval_shape(tx.init, params)
    adam_like = is_adam_like(opt_state)
    # Whatever is not known by name is asked: Lion, sign and normalised SGD, and a user's own.
    normalises = adam_like or normalised_share(tx, params) > 0.5
    moments = moment_constants(tx, params) if adam_like else MomentConstants()
    _warn_of_averages(tx, params, opt_state)
    decay = moment_memory(opt_state, moments.b2)
    if decay is not None and not lags(tx, params):
        decay = None
    if rule is None:
        rule = rules.adam_scale if normalises else rules.adascale
        if normalises and decay is None:
            rule = rules.of_noise_share(noise_share(tx, params))
    elif (rule is rules.adascale and normalises) or (rule is rules.adam_scale and not normalises):
        better = "adam_scale" if normalises else "adascale"
        logging.warning(
            "the rule %s does not suit this optimizer, which %s the gradient by its size: "
            "%s does. Leave Config.rule None to have it chosen.",
            getattr(rule, "__name__", rule),
            "divides" if normalises else "does not divide",
            better,
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
            "optimizer() is schedule-free: it averages parameters by steps of its own, which the "
            "learning-rate gain of a larger batch does not reach, so that most of the gain is lost. Use "
            'Config.policy "fixed", under which there is none.'
        )
    elif _holds(opt_state, optax.EmaState) or averages_parameters(tx, params):
        logging.warning(
            "optimizer() keeps an average (optax.ema, or one of the parameters), which sees updates before "
            "the learning-rate gain. As a momentum it is right; as an average of the parameters it falls "
            "behind them at a larger batch. Config.ema keeps one that does not."
        )


def _holds(opt_state: PyTree, kind: type) -> bool:
    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return any(map(is_kind, jax.tree.leaves(opt_state, is_leaf=is_kind)))
