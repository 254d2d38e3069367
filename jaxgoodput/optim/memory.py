"""Makes the long averages in an optimizer's state forget by progress instead of by updates.

Adam's second moment and Lion's momentum remember a hundred to a thousand updates. If an update becomes worth
ten base steps, they hold gradients from long ago, and the remaining updates are too few to replace them. So
an update that is worth k base steps counts as k of them in these averages: the share d that they keep becomes
d^k. (Malladi et al. 2022 do this for Adam's b2, with k (1 - d) instead of 1 - d; Marek et al. 2025 for a
half-life in tokens.)

optax does not store the constants, and its transformation runs unchanged. From an average before and after an
update, m and d m + (1 - d) y, follows y, and from it d^k m + (1 - d^k) y. Adam's bias correction needs care:
after t updates it divides by 1 - d^t, but an average over S base steps has the weight 1 - d^S. The average is
therefore stored times the ratio of the two, so that Adam's result is right. Adam's count stays as it is,
because its first moment uses it, too. The momentum of SGD and Adam is left alone, because it keeps training
stable at larger rates.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

FIELD_OF = {optax.ScaleByAdamState: "nu", optax.ScaleByLionState: "mu"}
"""Field that holds the long average, by the type of the state."""
Decays = tuple[float | None, ...]
"""Share that each average of a state keeps of itself per update, in order; None leaves an average alone."""


def averages(opt_state: PyTree) -> list[PyTree]:
    """Return the averages that remember many updates in an optimizer state, at any depth.

    These are `nu` of Adam and `mu` of Lion.
    """
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=_keeps_one) if _keeps_one(x)]
    return [getattr(node, FIELD_OF[type(node)]) for node in found]


def decays_of(first: PyTree, second: PyTree) -> Decays:
    """Return the decay d of each long average, from the states after one and two updates by one gradient.

    The first is (1 - d) y, and the second (1 + d) times as large. The decay is None for a value that is not
    such an average (adamax keeps a maximum under Adam's name), and in half precision, which is too coarse.
    """
    found: list[float | None] = []
    for one, two in zip(averages(first), averages(second), strict=True):
        leaves = list(zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))
        pairs = [(float(np.sum(a)), float(np.sum(b))) for a, b in leaves]
        ratios = [b / a - 1 for a, b in pairs if a != 0]
        kept = float(np.median(ratios)) if ratios else 0.0
        is_known = 0 < kept < 1 and all(jnp.finfo(a.dtype).bits >= 32 for a, _ in leaves)
        # Rounded as people write decays: 0.999, not 0.99900001.
        found.append(1 - float(f"{1 - kept:.4g}") if is_known else None)
    return tuple(found)


def by_progress(before: PyTree, after: PyTree, decays: Decays, done: Array, worth: Array) -> PyTree:
    """Return the state `after` an update, with long averages as if it had been `worth` that many base steps.

    `done` is the number of base steps before the update. If every update so far was worth one, nothing
    changes.
    """
    old, decay = iter(averages(before)), iter(decays)

    def aged(node: Any) -> Any:
        if not _keeps_one(node):
            return node
        average, kept = next(old), next(decay)
        if kept is None:
            return node
        share = (1 - kept**worth) / (1 - kept)
        was, now = jnp.ones(()), jnp.ones(())  # ratio of the stored value to the average
        is_plain = worth == 1
        if isinstance(node, optax.ScaleByAdamState):
            count = jnp.asarray(node.count, worth.dtype)
            is_plain &= done == count - 1
            quotient = (1 - kept ** (count - 1)) / (1 - kept**done)
            was = jnp.where((done > 0) & (count > 1), quotient, 1)  # 0 / 0 before the first update
            now = (1 - kept**count) / (1 - kept ** (done + worth))

        def mixed(x: Array, new: Array) -> Array:
            x, then = x.astype(worth.dtype), new.astype(worth.dtype)
            moved = now * (kept**worth * x / was + share * (then - kept * x))
            if isinstance(node, optax.ScaleByAdamState):
                moved = jnp.maximum(moved, 0)  # an inexact constant must not make a square negative
            return jnp.where(is_plain, new, moved.astype(new.dtype))

        field = FIELD_OF[type(node)]
        return node._replace(**{field: jax.tree.map(mixed, average, getattr(node, field))})

    return jax.tree.map(aged, after, is_leaf=_keeps_one)


def _keeps_one(node: Any) -> bool:
    return type(node) in FIELD_OF
