"""Which values of a tree are lost: no longer finite, although they were when the run began.

Masks of -inf and running minima begin at infinity and may stay there. `Origin` remembers them, so that a
value which becomes infinite or NaN later is told from one which always was.
"""

import base64
import functools
import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int8, PyTree

from jaxgoodput._pytree import wide_dtype

INFINITE, NAN = 1, 2  # how bad a value is; a finite one is 0


def floats(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of floats and complex numbers by path, as `jax.tree_util.keystr` writes it."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = ((jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
    return {path: leaf for path, leaf in named if jnp.issubdtype(leaf.dtype, jnp.inexact)}


def how_bad(x: Array) -> Int8[Array, "..."]:
    """Return 0 for every finite value, 1 for an infinite one, 2 for NaN. Use this inside jit."""
    code = jnp.where(jnp.isnan(x), np.int8(NAN), np.int8(INFINITE))
    return jnp.where(jnp.isfinite(x), np.int8(0), code)


def how_bad_on_host(x: np.ndarray) -> Int8[np.ndarray, "..."]:
    """Do the same as `how_bad`, with NumPy arrays on the host."""
    code = np.where(np.isnan(x), np.int8(NAN), np.int8(INFINITE))
    return np.where(np.isfinite(x), np.int8(0), code)


def any_lost(x: Array, began: Array | None = None) -> Bool[Array, ""]:
    """Return whether any value is worse than it began; without `began`, whether any is not finite.

    Use this inside jit.
    """
    return any_not_finite([x]) if began is None else jnp.any(how_bad(x) > began)


def any_not_finite(leaves: Sequence[Array]) -> Bool[Array, ""]:
    """Return whether any value of leaves of one shape and type is not finite. Use this inside jit."""
    # 0 times infinity is NaN. XLA:CPU adds up 120 MB in 7 ms, and needs 78 to count what is not finite.
    nothings = [x.astype(wide_dtype(x.dtype)) * 0 for x in leaves]
    return jnp.isnan(jnp.sum(functools.reduce(operator.add, nothings)))


@jax.jit
def num_lost(x: Array, began: Array | None) -> Float[Array, ""]:
    """Return how many values are worse than they began; if None, how many are not finite.

    A float, because an integer could wrap around to 0.
    """
    return jnp.sum(how_bad(x) > (0 if began is None else began), dtype=jnp.float32)


@dataclass(frozen=True)
class Origin:
    """The values that were not finite when a run began, by the paths of their leaves."""

    codes: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What `how_bad` says of each value, for leaves that held any; whole leaves, on the host."""

    @cached_property
    def packed(self) -> dict[str, str]:
        """The codes as text by path."""
        return {
            path: base64.b64encode(zlib.compress(np.ascontiguousarray(x).tobytes())).decode()
            for path, x in self.codes.items()
        }

    @classmethod
    def unpacked(cls, packed: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> "Origin":
        """Read what `packed` holds; `shapes` has the shapes of the leaves."""
        return cls(
            {
                path: np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int8).reshape(
                    tuple(shapes[path])
                )
                for path, text in packed.items()
            }
        )

    def lost_on_host(self, leaves: Mapping[str, Any]) -> dict[str, int]:
        """Return how many values are lost, by path, of leaves in host memory; good leaves are left out."""
        found = {
            path: int(np.sum(how_bad_on_host(np.asarray(x)) > self.codes.get(path, np.int8(0))))
            for path, x in leaves.items()
        }
        return {path: count for path, count in found.items() if count}


def first_lost(x: np.ndarray, began: np.ndarray | None) -> tuple[tuple[int, ...], str]:
    """Return the index of the first lost value of a leaf on the host, and the value as text."""
    lost = how_bad_on_host(x) > (np.int8(0) if began is None else began)
    index = np.unravel_index(int(np.argmax(lost)), x.shape)
    return tuple(map(int, index)), str(x[index])
