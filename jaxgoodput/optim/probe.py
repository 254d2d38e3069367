"""Asks an optimizer what it does, by giving it gradients that are known. Once, before training.

optax keeps neither constants nor names in its states. So the transformation is run for a few updates on a
tree of the parameters' structure, one element a leaf, and its answers are compared.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, PyTree

from jaxgoodput.optim.adaptive import with_schedules_at
from jaxgoodput.optim.preconditioner import MomentConstants, second_moments

NORM = 1e-3  # of a probing gradient: below every usual limit for clipping
NUM_UPDATES = 3
MAX_COMPILED = 100  # leaves; of more, running operation by operation takes less time than compiling


class NeedsMore(TypeError):
    """A transformation that asks for arguments which training does not give it."""


def normalised_share(tx: optax.GradientTransformation, params: PyTree) -> float:
    """The share of parameters whose update stays as it is when the gradient is twice as large.

    About 0 for SGD with or without momentum, 1 for whatever divides by the gradient's size: Adam, Lion,
    Adafactor, sign and normalised SGD. `params` may be abstract. NaN where all updates are zero.

    Raises NeedsMore for a transformation that asks for more than gradients, parameters and the loss.

    >>> normalised_share(optax.sgd(0.1), {"w": jnp.zeros(3)})
    0.0
    >>> normalised_share(optax.sign_sgd(0.1), {"w": jnp.zeros(3)})
    1.0
    """
    sizes = np.array([math.prod(x.shape) for x in jax.tree.leaves(params)], float)
    # Not at zero: some measure their steps by the parameters.
    moved, _ = _updates(tx, _small(params, 0.1), (NORM, 2 * NORM), NUM_UPDATES)
    seen = (moved > 0).all(axis=0)
    if not seen.any():
        return math.nan
    stays = moved[1, seen] / moved[0, seen] < math.sqrt(2)  # half-way between 1 and 2
    return float(np.average(stays, weights=sizes[seen]))


def moment_constants(tx: optax.GradientTransformation, params: PyTree) -> MomentConstants:
    """The b2 and eps of Adam and its kin; optax's defaults for others. `params` may be abstract.

    Where groups of parameters have constants of their own, the median.

    >>> moment_constants(optax.adam(0.1, b2=0.95, eps=1e-6), {"w": jnp.zeros(3)})
    MomentConstants(b2=0.95, eps=1e-06)
    """
    default = MomentConstants()
    sizes = (NORM, NORM**2)
    # At zero, where weight decay adds nothing.
    moved, moments = _updates(tx, _small(params, 0.0), sizes, 1)
    # A moment after one update is (1 - b2) times the gradient's square. As people write it: 0.95.
    grown = moments[0] / _entry(sizes[0], moved.shape[1]) ** 2
    grown = grown[(grown > 0) & (grown < 1)]
    if not grown.size:
        return default  # of another kind, whose eps is elsewhere
    b2 = float(f"{1 - np.median(grown):.6g}")
    eps = _epsilon(moved, *(_entry(size, moved.shape[1]) for size in sizes))
    return MomentConstants(b2=b2, eps=default.eps if math.isnan(eps) else eps)


def _epsilon(moved: np.ndarray, large: float, small: float) -> float:
    """eps, from the first updates for two sizes c of the gradient: each is in proportion to c / (c + eps)."""
    seen = (moved > 0).all(axis=0)
    if not seen.any():
        return math.nan
    ratio = np.minimum(moved[1, seen] / moved[0, seen], 1.0)
    below = ratio * large - small
    below = np.where(below > 1e-4 * small, below, np.nan)  # else it grows as the gradient does
    return float(f"{np.median(large * small * (1 - ratio) / below):.2g}")


def _updates(
    tx: optax.GradientTransformation, params: PyTree, norms: tuple[float, ...], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """[norms, leaves] sizes of the updates, all of `count` added up; [norms, moments] second moments."""
    tx = optax.with_extra_args_support(tx)
    leaves = jax.tree.leaves(params)

    def run(entry: Array) -> tuple[Array, Array]:
        grads = jax.tree.map(lambda x: jnp.full_like(x, entry), params)
        state, total = tx.init(params), jnp.zeros(len(leaves))
        for _ in range(count):
            state = with_schedules_at(state, jnp.ones((), jnp.int32))  # a warm-up begins at zero
            update, state = tx.update(grads, state, params, value=jnp.ones(()))
            total += jnp.stack([jnp.abs(x).sum() for x in jax.tree.leaves(update)])
        moments = [x.sum().astype(total.dtype) for x in second_moments(state)]
        return total, jnp.stack(moments) if moments else jnp.zeros(0)

    if len(leaves) <= MAX_COMPILED:
        run = jax.jit(run)
    try:
        found = [run(jnp.asarray(_entry(norm, len(leaves)))) for norm in norms]
    except (TypeError, ValueError) as error:
        if any(words in str(error) for words in ("missing", "must be provided")):
            raise NeedsMore(str(error)) from error
        logging.info("the optimizer cannot be asked what it does: %s", error)
        return np.zeros((len(norms), len(leaves))), np.zeros((len(norms), 0))
    moved, moments = zip(*jax.device_get(found), strict=True)
    return np.stack(moved), np.stack(moments)


def _entry(norm: float, num_leaves: int) -> float:
    return norm / math.sqrt(max(num_leaves, 1))


def _small(params: PyTree, value: float) -> PyTree:
    """One element for each leaf, in as many dimensions: masks may go by them."""

    def leaf(x: Any) -> Array:
        return jnp.full((1,) * len(x.shape), value, x.dtype)

    return jax.tree.map(leaf, params)
