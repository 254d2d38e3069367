"""Pure functions traced once, and replayed wherever the same is to be traced again.

A run whose processes come and go makes all of its programs anew for every set of them: what was compiled
is dead, and comes from the disk. But most of that time is Python, in the user's loss, its gradient and the
optimizer; what these come to (a jaxpr) names no device and lives on.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from jaxgoodput.parallel.once import Once


@dataclass(frozen=True)
class _Trace:
    jaxpr: ClosedJaxpr
    structure: Any  # of the results


class Traces:
    """What functions came to, by a key and the types of their arguments. Safe from any thread.

    The caller's key tells apart all that a function reads besides its arguments: two calls with one key
    and arguments of the same types are one computation.
    """

    def __init__(self):
        self.once = Once()
        """Anything else that tracing tells."""

    def __call__(self, key: Hashable, function: Callable[..., PyTree], *arguments: PyTree) -> Any:
        """`function(*arguments)` within a trace; it is called only where that is not known yet."""
        leaves, structure = jax.tree.flatten(arguments)
        types = tuple(jax.typeof(leaf) for leaf in leaves)
        # Inside of a manual mesh the same is another computation.
        where = jax.sharding.get_abstract_mesh()

        def make() -> _Trace | None:
            results = []

            def flat(*leaves: Array) -> list[Array]:
                found, of_results = jax.tree.flatten(
                    function(*jax.tree.unflatten(structure, leaves))
                )
                results.append(of_results)
                return found

            jaxpr = jax.make_jaxpr(flat)(*leaves)
            consts = [_on_host(const) for const in jaxpr.consts]
            if any(const is None for const in consts) or _holds_arrays(jaxpr.jaxpr):
                return None
            return _Trace(ClosedJaxpr(jaxpr.jaxpr, consts), results[0])

        trace = self.once((key, structure, types, where), make)
        if trace is None:
            return function(*arguments)
        return jax.tree.unflatten(trace.structure, jaxpr_as_fun(trace.jaxpr)(*leaves))


def _holds_arrays(jaxpr: Jaxpr) -> bool:
    """Whether a function within it has an array of its own, which would keep the devices."""
    inner = [
        x
        for one in jaxpr.eqns
        for x in jax.tree.leaves(list(one.params.values()), is_leaf=_is_jaxpr)
    ]
    closed = [x for x in inner if isinstance(x, ClosedJaxpr)]
    opened = [x.jaxpr for x in closed] + [x for x in inner if isinstance(x, Jaxpr)]
    own = any(isinstance(const, jax.Array) for x in closed for const in x.consts)
    return own or any(map(_holds_arrays, opened))


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)


def _on_host(const: Any) -> Any:
    """A constant that outlives the devices; None where it cannot be had without them."""
    if isinstance(const, jax.core.Tracer):  # of a trace around this one
        return None
    if jnp.issubdtype(const.dtype, jax.dtypes.prng_key):  # no array of numbers
        return None
    return np.asarray(const)
