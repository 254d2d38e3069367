"""Chooses how an optimizer is treated when its batch changes, leaf by leaf: its rule, its noise, its memory.

Optimizers are traced and probed once before training (`traced`, `probe`), because optax stores neither names
nor constants. Leaves that the optimizer treats alike have a rule in common; most optimizers have one rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from absl import logging
from jaxtyping import PyTree

from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.learning_rate import LeafRules, Rule
from jaxgoodput.optim.memory import Decays
from jaxgoodput.optim.preconditioner import MomentConstants, covers, moment_memories
from jaxgoodput.optim.probe import Probe, noise_share
from jaxgoodput.optim.traced import (
    Clocks,
    TracedUpdate,
    by_updates,
    clocks_of,
    own_counts,
    traced_update,
)

_SAME_SHARE = 1.5  # leaves whose shares of noise differ by a smaller factor have one rule
_SHARE_ERROR = 0.01  # of a measured share; shares near 0 differ by any factor
_TRIED_COUNTS = (1, 100, 1_000, 10_000, 100_000)  # at which schedules are tried


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """The properties of an optimizer that `adaptive` and the noise statistics depend on."""

    tx: optax.GradientTransformationExtraArgs
    """The optimizer, given only the arguments that it accepts."""
    moves: tuple[bool, ...]
    """Whether any update may change a leaf, for each leaf; noise is measured on leaves that move."""
    clocks: Clocks
    """Counts of the schedules in its state."""
    by_updates: tuple[str, ...]
    """Wrappers that mean a number of updates, so that the batch must not change."""
    own_counts: tuple[str, ...]
    """Optimizers whose own schedules go by updates, even if the batch changes."""
    is_adam_like: bool
    """Whether it divides by a root of squares, as the norms of its noise then are, too."""
    rule: LeafRules
    """Learning-rate rules, the user's own, or rules that suit the optimizer."""
    moments: tuple[MomentConstants, ...]
    """Constants of each leaf's second moment."""
    long_averages: Decays
    """Option of `adaptive`."""


def treatment_of(
    tx: optax.GradientTransformation,
    params: PyTree,
    rule: Rule | None = None,
    preconditioned: bool | None = None,
) -> Treatment:
    """Return how to treat `tx`; `params` may be abstract. Warns if the user's own `rule` does not suit it.

    `preconditioned` says whether norms of gradients are measured after the optimizer's division; None: they
    are if it divides.

    Raises UnsupportedOptimizer if the transformation requires more than gradients, parameters and the loss.
    """
    traced = traced_update(tx, params)
    clocks = clocks_of(traced)
    moves = np.array(traced.moves())
    if not moves.any():  # a step size of 0: what it would do is unknown
        moves[:] = True
    probed = _Probed.of(traced, clocks, moves)
    _warn_of_averages(probed.probe, traced.state)
    if rule is not None:
        _warn_of_rule(rule, probed)
    return Treatment(
        tx=traced.tx,
        moves=tuple(map(bool, moves)),
        clocks=clocks,
        by_updates=by_updates(traced),
        own_counts=own_counts(traced),
        is_adam_like=bool(probed.divides.any()),
        rule=_leaf_rules(probed, rule, preconditioned is not False),
        moments=probed.moments,
        long_averages=probed.probe.long_averages(),
    )


@dataclass(frozen=True, kw_only=True)
class _Probed:
    """What probing found of each leaf, as arrays `[leaves]`."""

    traced: TracedUpdate
    clocks: Clocks
    probe: Probe
    """The optimizer, with schedules at the first count at which all leaves move."""
    moves: np.ndarray
    """Whether any update may change the leaf."""
    divides: np.ndarray
    """Whether the leaf's gradient is divided by a root of squares that `preconditioner` finds."""
    normalises: np.ndarray
    """Whether updates stay the same if gradients double, or would if squares had time to follow."""
    moments: tuple[MomentConstants, ...]
    decays: list[float | None]
    """Share of the second moment that is kept per update, if updates lag behind it."""

    @classmethod
    def of(cls, traced: TracedUpdate, clocks: Clocks, moves: np.ndarray) -> "_Probed":
        """Probe the optimizer; `moves` says which leaves an update may change."""
        params, state = traced.params, traced.state
        probe, grows = _held_where_all_move(traced, clocks, moves)
        divides = np.array([x is not None for x in covers(state, params)]) & moves
        moments = (MomentConstants(),) * len(moves)
        if divides.any():
            moments = probe.moment_constants()
        decays = moment_memories(state, params, moments)
        if any(x is not None for x in decays):
            is_lagging = probe.lags()
            # A leaf that shows nothing (a single element less its mean) is no evidence against it.
            pairs = zip(decays, is_lagging, np.isnan(grows), strict=True)
            decays = [x if lag or hidden else None for x, lag, hidden in pairs]
        # An unseen leaf is taken for what most parameters are.
        sizes = np.array([x.size for x in jax.tree.leaves(params)], float)
        seen = moves & ~np.isnan(grows)
        most = seen.any() and float(np.average(grows[seen], weights=sizes[seen] + 1e-9)) > 0.5
        return cls(
            traced=traced,
            clocks=clocks,
            probe=probe,
            moves=moves,
            divides=divides,
            normalises=divides | np.where(np.isnan(grows), most, grows == 1),
            moments=moments,
            decays=decays,
        )

    def step_sizes(self, by_size: np.ndarray) -> np.ndarray:
        """Return the step size of each leaf at the highest point of its schedule that was tried."""
        counts = _TRIED_COUNTS if self.clocks.steady else _TRIED_COUNTS[:1]
        return self.probe.step_sizes(by_size=by_size, moments=self.moments, counts=counts)


def _held_where_all_move(
    traced: TracedUpdate, clocks: Clocks, moves: np.ndarray
) -> tuple[Probe, np.ndarray]:
    """Return a probe with schedules held at a count at which all leaves move, and `normalises` there.

    If there is no such count, it is the first that is tried, because most schedules begin there.
    """
    probe = Probe(traced, clocks)
    found, before = None, None
    for count in _TRIED_COUNTS if clocks.steady else _TRIED_COUNTS[:1]:
        probe.count = count
        grows = probe.normalises()
        found = grows if found is None else found
        hidden = np.isnan(grows) & moves
        if not hidden.any():
            return probe, grows
        if before is not None and (hidden == before).all():  # no schedule is what hides them
            break
        before = hidden
    assert found is not None
    probe.count = _TRIED_COUNTS[0]
    return probe, found


def _leaf_rules(probed: _Probed, rule: Rule | None, preconditioned: bool) -> LeafRules:
    """Return the rule of each leaf, the user's `rule` or one that suits it."""
    num_leaves, moving = len(probed.moves), np.flatnonzero(probed.moves).tolist()
    chosen = _suitable_rules(probed) if rule is None else [rule] * num_leaves
    kinds: dict[tuple[Rule, float | None], int] = {}
    rule_of_leaf = [0] * num_leaves
    for i in moving:
        decay = probed.decays[i] if chosen[i] is rules.adam_scale else None
        rule_of_leaf[i] = kinds.setdefault((chosen[i], decay), len(kinds))
    is_divided = probed.divides & preconditioned
    by_size = probed.normalises & ~is_divided
    # Norms are measured in the coordinates of each leaf's own division. If these differ, norms are converted.
    sizes: tuple[float, ...] = ()
    if len({(bool(is_divided[i]), bool(by_size[i])) for i in moving}) > 1:
        found = probed.step_sizes(by_size)
        largest = found[probed.moves].max()
        sizes = tuple(map(float, found / largest)) if largest > 0 else ()
    return LeafRules(
        rules=tuple(one for one, _ in kinds),
        second_moment_decays=tuple(decay for _, decay in kinds),
        rule_of_leaf=tuple(rule_of_leaf),
        step_sizes=sizes,
        by_size=tuple(map(bool, by_size)),
    )


def _suitable_rules(probed: _Probed) -> list[Rule]:
    """Return the rule that suits each leaf."""
    chosen: list[Rule] = [rules.adam_scale if x else rules.adascale for x in probed.normalises]
    # Divided by what keeps up with the gradient, or by what holds only a part of the noise.
    divided = np.flatnonzero(probed.moves & probed.normalises).tolist()
    others = [i for i in divided if probed.decays[i] is None]
    for i, own in _rules_by_noise(probed, others).items():
        chosen[i] = own
    return chosen


def _rules_by_noise(probed: _Probed, leaves: Sequence[int]) -> dict[int, Rule]:
    """Return rules that fit how much noise is left in what a leaf's gradient is divided by."""
    if not leaves:
        return {}
    left = probed.probe.noise_left()
    by_share = sorted(leaves, key=lambda i: noise_share(left[[i]]))
    groups: list[list[int]] = []
    for i in by_share:
        share = noise_share(left[[i]])
        least = noise_share(left[groups[-1][:1]]) if groups else -1.0
        if share <= max(_SAME_SHARE * least, least + _SHARE_ERROR):
            groups[-1].append(i)
        else:
            groups.append([i])
    found = {}
    for group in groups:
        own = rules.of_noise_share(noise_share(left[group]))
        found.update(dict.fromkeys(group, own))
    return found


def _warn_of_rule(rule: Rule, probed: _Probed) -> None:
    own = probed.normalises[probed.moves]
    for worse, better, is_wrong, does in (
        (rules.adascale, rules.adam_scale, own, "divides"),
        (rules.adam_scale, rules.adascale, ~own, "does not divide"),
    ):
        if rule is worse and is_wrong.any():
            where = "" if is_wrong.all() else f" in {is_wrong.sum()} of {own.size} leaves"
            logging.warning(
                "the rule %s does not suit this optimizer, which %s the gradient by its size%s. Use %s, or "
                "leave Config.rule None to have it chosen.",
                worse.__name__,
                does,
                where,
                better.__name__,
            )


def _warn_of_averages(probe: Probe, opt_state: PyTree) -> None:
    if _holds(opt_state, optax.contrib.ScheduleFreeState):
        logging.warning(
            "optimizer() is schedule-free: it averages parameters with steps of its own, which the "
            "learning-rate gain of a larger batch does not change, so most of the gain is lost. Use "
            'Config.policy "fixed", which keeps the batch and needs no gain.'
        )
    elif _holds(opt_state, optax.EmaState) or probe.averages_parameters():
        logging.warning(
            "optimizer() keeps an average (optax.ema, or one of the parameters), which sees updates before "
            "the learning-rate gain. That is right for a momentum, but an average of the parameters falls "
            "behind them at a larger batch. Use Config.ema instead, which includes the gain."
        )


def _holds(opt_state: PyTree, kind: type) -> bool:
    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return any(map(is_kind, jax.tree.leaves(opt_state, is_leaf=is_kind)))
