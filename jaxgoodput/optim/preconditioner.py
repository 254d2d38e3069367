"""Finds the preconditioner of an adaptive optimizer, the factor of its gradients, in nested states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import wide_dtype

_ADAM_WARMUP = 5  # updates before a bias-corrected second moment is trusted (AdaptDL)


@dataclass(frozen=True)
class MomentConstants:
    """The constants of an optimizer that divides by a second moment; `Probe.moment_constants` finds them."""

    b2: float = 0.999
    """Share of the second moment that is kept per update."""
    eps: float = 1e-8
    """Number added to the root of the second moment."""


def preconditioner(
    opt_state: PyTree,
    params: PyTree,
    *,
    b2: float = 0.999,
    eps: float = 1e-8,
    by_leaf: Sequence[MomentConstants] | None = None,
) -> PyTree | None:
    """Return the factor of the gradients, 1 / (sqrt(second moment) + eps); None for SGD and its kin.

    It finds the states of adam, adamw, nadam, lamb, amsgrad, adabelief, rmsprop and adagrad at any depth
    (chain, multi_transform, masked, inject_hyperparams, apply_if_finite). Leaves that are not covered get 1.
    So do all leaves in the first 5 updates of a bias-corrected moment, as in AdaptDL. An element whose second
    moment is still 0 (a table row that no sample has read) has no scale yet. It gets 0, which leaves it out,
    because 1 / eps would outweigh everything else.

    optax stores neither b2 nor eps in its state, so pass yours, or `by_leaf` if leaves differ
    (`Probe.moment_constants` finds them). If `inject_hyperparams` holds them, its values are used instead.
    (adamax stores a maximum under adam's name and is not supported.)
    """
    found: dict[Any, Array] = {}
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    given = by_leaf or [MomentConstants(b2=b2, eps=eps)] * len(leaves)
    constants = {path: one for (path, _), one in zip(leaves, given, strict=True)}
    _collect_scales(opt_state, constants, {}, found)
    if not any(path in found for path, _ in leaves):
        return None
    scales = []
    for path, leaf in leaves:
        scale = found.get(path)
        if scale is not None and scale.shape != leaf.shape:
            raise ValueError(
                f"the optimizer's second moment for params{jax.tree_util.keystr(path)} has shape "
                f"{scale.shape}, but the parameter has {leaf.shape}. Pass the params that the state was "
                "made for."
            )
        scales.append(jnp.ones(leaf.shape) if scale is None else scale)
    return jax.tree.unflatten(structure, scales)


_ADAPTIVE_STATES = (
    optax.ScaleByAdamState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByRmsState,
    optax.ScaleByRStdDevState,
    optax.ScaleByRssState,
)
# Moments inside these are of gradients in other coordinates, which also may have other shapes.
_PROJECTED_STATES = tuple(
    kind for kind in (getattr(optax.contrib, "GaLoreState", None),) if kind is not None
)
_COUNTED_NAMES = ("ScaleByRmsWithCountState", "ScaleByRStdDevWithCountState")  # not exported


def is_settled(opt_state: PyTree) -> Array:
    """Return whether every second moment has seen enough updates; a bool scalar that may be traced.

    Until then `preconditioner` returns 1, so norms have other units than later ones.
    """
    counts: list[Any] = [node.count for node in _adaptive(opt_state) if "count" in node._fields]
    settled = jnp.ones((), bool)
    for count in counts:
        settled &= count >= _ADAM_WARMUP
    return settled


def second_moments(opt_state: PyTree, params: PyTree) -> list[Any]:
    """Return the second moment of each leaf of `params` that Adam or AMSGrad keeps; None for others."""
    kinds = (optax.ScaleByAdamState, optax.ScaleByAmsgradState)
    found: dict[Any, Any] = {}
    for node in _adaptive(opt_state):
        if isinstance(node, kinds):
            for path, moment in jax.tree_util.tree_leaves_with_path(node.nu):
                found.setdefault(path, moment)
    return [found.get(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def covers(opt_state: PyTree, params: PyTree) -> list[int | None]:
    """Return for each leaf of `params` which of the states that divide by a second moment divides it.

    States are counted in order; None if no state does. Both trees may be abstract.
    """
    found: dict[Any, int] = {}
    for index, node in enumerate(_adaptive(opt_state)):
        for path, moment in jax.tree_util.tree_leaves_with_path(jax.eval_shape(_moment, node)):
            found.setdefault((path, moment.shape), index)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [found.get((path, leaf.shape)) for path, leaf in leaves]


def _adaptive(opt_state: PyTree) -> list[Any]:
    """Return the states of transformations that divide by a second moment, at any depth."""

    def is_leaf(node: Any) -> bool:
        return _is_adaptive(node) or isinstance(node, _PROJECTED_STATES)

    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_leaf) if _is_adaptive(x)]


def moment_memories(
    opt_state: PyTree, params: PyTree, moments: Sequence[MomentConstants]
) -> list[float | None]:
    """Return for each leaf the share of its second moment that is kept per update, or 1 if it is a sum.

    None if there is no second moment, or if it adapts within a few updates or never shrinks (RMSProp,
    AMSGrad). `moments` are the constants of every leaf.
    """
    nodes, averages = _adaptive(opt_state), (optax.ScaleByAdamState, optax.ScaleByBeliefState)
    found: list[float | None] = []
    for index, constants in zip(covers(opt_state, params), moments, strict=True):
        node = None if index is None else nodes[index]
        if isinstance(node, optax.ScaleByRssState):
            found.append(1.0)
        else:
            found.append(constants.b2 if isinstance(node, averages) else None)
    return found


def _is_adaptive(node: Any) -> bool:
    return isinstance(node, _ADAPTIVE_STATES) or type(node).__name__ in _COUNTED_NAMES


def _collect_scales(
    state: PyTree,
    constants: Mapping[Any, MomentConstants],
    injected: Mapping[str, Any],
    found: dict[Any, Array],
) -> None:
    """Add the factor of each leaf, by path, from the adaptive states under `state` to `found`.

    If several cover a leaf, the first wins. `injected` constants replace the leaves' own.
    """
    kind = optax.InjectStatefulHyperparamsState

    def is_leaf(node: Any) -> bool:
        return _is_adaptive(node) or isinstance(node, (kind, *_PROJECTED_STATES))

    for node in jax.tree.leaves(state, is_leaf=is_leaf):
        if isinstance(node, kind):
            known = {k: v for k, v in node.hyperparams.items() if k in ("b2", "decay", "eps")}
            known |= {"b2": known.pop("decay")} if "decay" in known else {}
            _collect_scales(node.inner_state, constants, {**injected, **known}, found)
        elif _is_adaptive(node):
            for path, moment in jax.tree_util.tree_leaves_with_path(_moment(node)):
                own = constants.get(path, MomentConstants())
                values = {"b2": own.b2, "eps": own.eps, **injected}
                if path not in found:
                    found[path] = _scale(node, moment, **values)


def _moment(state: Any) -> PyTree:
    """Return the tree of second moments in a state, whose roots divide the gradients."""
    if isinstance(state, optax.ScaleByRssState):
        return state.sum_of_squares
    if isinstance(state, optax.ScaleByAmsgradState):
        return state.nu_max  # already bias-corrected
    if "RStdDev" in type(state).__name__:
        return jax.tree.map(lambda nu, mu: nu - jnp.square(mu), state.nu, state.mu)
    return state.nu


def _scale(state: Any, x: Array, *, b2: Any, eps: Any) -> Array:
    """Return the factor of a leaf's gradient, from its second moment `x`."""
    # Checked by field, because every tuple has a method called count.
    count: Any = state.count if "count" in state._fields else None
    x = jnp.maximum(x.astype(wide_dtype(x.dtype)), 0)
    correction: Any = 1.0
    if count is not None and not isinstance(state, optax.ScaleByAmsgradState):
        correction = 1 - b2 ** jnp.maximum(count, 1).astype(x.dtype)
    # A sum instead of a choice, because XLA:CPU takes twice as long over a root in a branch.
    found = 1 / (jnp.sqrt(x / correction) + (eps + jnp.where(x > 0, 0.0, jnp.inf)))
    return (found if count is None else jnp.where(count < _ADAM_WARMUP, 1, found)).astype(x.dtype)
