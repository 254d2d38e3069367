"""The long averages that an optimizer keeps forget by progress, as they did at the base batch.

Adam's second moment and Lion's momentum remember a hundred to a thousand updates. When an update becomes
worth ten, they still hold gradients of a time that training has long left, and the updates that are left to
a run are too few to replace them. So an update that is worth k base steps counts as k of them in these
averages: what they keep of themselves, d, becomes d^k. (Malladi et al. 2022 for Adam's b2, whose 1 - d
becomes k (1 - d); Marek et al. 2025 for a half-life in tokens.)

optax keeps no constants, and the transformation is run as it is: from an average before and after an update,
m and d m + (1 - d) y, follows y, and from that d^k m + (1 - d^k) y. Adam divides its average by 1 - d^t after
t updates, where that of S base steps has the weight 1 - d^S; it is kept times the quotient of both, so that
what Adam makes of it is right, and its count, by which the first moment goes too, stays as it is. Momentum of
SGD and of Adam is left alone: at larger rates it is what keeps training stable.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

FIELD_OF = {optax.ScaleByAdamState: "nu", optax.ScaleByLionState: "mu"}
"""The states that keep a long average, and where."""
Decays = tuple[float | None, ...]
"""What the averages of a state keep of themselves in an update, in its order; None: is left alone."""


def averages(opt_state: PyTree) -> list[PyTree]:
    """The long averages in an optimizer state, at any depth."""
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=_keeps_one) if _keeps_one(x)]
    return [getattr(node, FIELD_OF[type(node)]) for node in found]


def decays_of(first: PyTree, second: PyTree) -> Decays:
    """What each average keeps of itself, from the states after one and two updates by the same gradient.

    (1 - d) y and then (1 + d) times that. None for one that is not such an average (adamax keeps a maximum
    under Adam's name), and for those in half precision, which do not tell.
    """
    found: list[float | None] = []
    for one, two in zip(averages(first), averages(second), strict=True):
        leaves = list(zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))
        pairs = [(float(np.sum(a)), float(np.sum(b))) for a, b in leaves]
        ratios = [b / a - 1 for a, b in pairs if a != 0]
        kept = float(np.median(ratios)) if ratios else 0.0
        is_told = 0 < kept < 1 and all(jnp.finfo(a.dtype).bits >= 32 for a, _ in leaves)
        # As people write them: 0.999, not 0.99900001.
        found.append(1 - float(f"{1 - kept:.4g}") if is_told else None)
    return tuple(found)


def by_progress(before: PyTree, after: PyTree, decays: Decays, done: Array, worth: Array) -> PyTree:
    """The optimizer state `after` an update that is `worth` so many base steps in its long averages.

    `done` are the base steps before it. After as many updates, one that is worth one changes nothing.
    """
    old, decay = iter(averages(before)), iter(decays)

    def aged(node: Any) -> Any:
        if not _keeps_one(node):
            return node
        average, kept = next(old), next(decay)
        if kept is None:
            return node
        share = (1 - kept**worth) / (1 - kept)
        was, now = jnp.ones(()), jnp.ones(())  # what is kept is so many times the average
        is_plain = worth == 1
        if isinstance(node, optax.ScaleByAdamState):
            count = jnp.asarray(node.count, worth.dtype)
            is_plain &= done == count - 1
            quotient = (1 - kept ** (count - 1)) / (1 - kept**done)
            was = jnp.where((done > 0) & (count > 1), quotient, 1)  # before the first it is 0
            now = (1 - kept**count) / (1 - kept ** (done + worth))

        def mixed(x: Array, new: Array) -> Array:
            x, then = x.astype(worth.dtype), new.astype(worth.dtype)
            moved = now * (kept**worth * x / was + share * (then - kept * x))
            if isinstance(node, optax.ScaleByAdamState):
                moved = jnp.maximum(moved, 0)  # a constant that is not quite right takes none below
            return jnp.where(is_plain, new, moved.astype(new.dtype))

        field = FIELD_OF[type(node)]
        return node._replace(**{field: jax.tree.map(mixed, average, getattr(node, field))})

    return jax.tree.map(aged, after, is_leaf=_keeps_one)


def _keeps_one(node: Any) -> bool:
    return type(node) in FIELD_OF
