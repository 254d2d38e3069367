"""Finds the preconditioner of an adaptive optimizer, the factor of its gradients, in nested states."""

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
    """The constants of an optimizer that divides by a second moment; `probe.moment_constants` finds them."""

    b2: float = 0.999
    """Share of the second moment that is kept per update."""
    eps: float = 1e-8
    """Number added to the root of the second moment."""


def preconditioner(
    opt_state: PyTree, params: PyTree, *, b2: float = 0.999, eps: float = 1e-8
) -> PyTree | None:
    """Return the factor of the gradients, 1 / (sqrt(second moment) + eps); None for SGD and its kin.

    It finds the states of adam, adamw, nadam, lamb, amsgrad, adabelief, rmsprop and adagrad at any depth
    (chain, multi_transform, masked, inject_hyperparams, apply_if_finite). Leaves that are not covered get 1.
    So do all leaves in the first 5 updates of a bias-corrected moment, as in AdaptDL. An element whose second
    moment is still 0 (a table row that no sample has read) has no scale yet. It gets 0, which leaves it out,
    because 1 / eps would outweigh everything else.

    optax stores neither b2 nor eps in its state, so pass yours (`probe.moment_constants` finds them). If
    `inject_hyperparams` holds them, its values are used instead. (adamax stores a maximum under adam's name
    and is not supported.)
    """
    found: dict[Any, Array] = {}
    _collect_scales(opt_state, {"b2": b2, "eps": eps}, found)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
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


def second_moments(opt_state: PyTree) -> list[Array]:
    """Return the leaves of the second moments of Adam and AMSGrad."""
    kinds = (optax.ScaleByAdamState, optax.ScaleByAmsgradState)
    found = [node.nu for node in _adaptive(opt_state) if isinstance(node, kinds)]
    return jax.tree.leaves(found)


def _adaptive(opt_state: PyTree) -> list[Any]:
    """Return the states of transformations that divide by a second moment, at any depth."""
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_is_adaptive) if _is_adaptive(x)]


def moment_memory(opt_state: PyTree, b2: float) -> float | None:
    """Return the share of second moments that is kept per update: `b2`, or 1 if they are sums (Adagrad).

    None if they adapt within a few updates or never shrink (RMSProp, AMSGrad), or if there are several kinds.
    """
    kinds = {type(node) for node in _adaptive(opt_state)}
    if kinds == {optax.ScaleByRssState}:
        return 1.0
    averages = {optax.ScaleByAdamState, optax.ScaleByBeliefState}
    return b2 if kinds and kinds <= averages else None


def is_adam_like(opt_state: PyTree) -> bool:
    """Return whether the optimizer divides each element of the gradient by a root of its squares."""
    return bool(_adaptive(opt_state))


def _is_adaptive(node: Any) -> bool:
    return isinstance(node, _ADAPTIVE_STATES) or type(node).__name__ in _COUNTED_NAMES


def _collect_scales(state: PyTree, constants: dict[str, Any], found: dict[Any, Array]) -> None:
    """Add the factor of each leaf, by path, from the adaptive states under `state` to `found`.

    If several cover a leaf, the first wins.
    """
    injected = optax.InjectStatefulHyperparamsState

    def is_leaf(node: Any) -> bool:
        return _is_adaptive(node) or isinstance(node, injected)

    for node in jax.tree.leaves(state, is_leaf=is_leaf):
        if isinstance(node, injected):
            known = {k: v for k, v in node.hyperparams.items() if k in ("b2", "decay", "eps")}
            known |= {"b2": known["decay"]} if "decay" in known else {}
            _collect_scales(node.inner_state, constants | known, found)
        elif _is_adaptive(node):
            for path, scale in _scales(node, **{k: constants[k] for k in ("b2", "eps")}):
                found.setdefault(path, scale)


def _scales(state: Any, *, b2: Any, eps: Any) -> list[tuple[Any, Array]]:
    if isinstance(state, optax.ScaleByRssState):
        moment = state.sum_of_squares
    elif isinstance(state, optax.ScaleByAmsgradState):
        moment = state.nu_max  # already bias-corrected
    elif "RStdDev" in type(state).__name__:
        moment = jax.tree.map(lambda nu, mu: nu - jnp.square(mu), state.nu, state.mu)
    else:
        moment = state.nu
    # Checked by field, because every tuple has a method called count.
    count: Any = state.count if "count" in state._fields else None
    corrected = isinstance(state, optax.ScaleByAmsgradState)

    def scale(x: Array) -> Array:
        x = jnp.maximum(x.astype(wide_dtype(x.dtype)), 0)
        correction: Any = 1.0
        if count is not None and not corrected:
            correction = 1 - b2 ** jnp.maximum(count, 1).astype(x.dtype)
        # A sum instead of a choice, because XLA:CPU takes twice as long over a root in a branch.
        found = 1 / (jnp.sqrt(x / correction) + (eps + jnp.where(x > 0, 0.0, jnp.inf)))
        return (found if count is None else jnp.where(count < _ADAM_WARMUP, 1, found)).astype(
            x.dtype
        )

    return [(path, scale(x)) for path, x in jax.tree_util.tree_flatten_with_path(moment)[0]]
