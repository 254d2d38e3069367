"""Pure functions traced once, and replayed when the same function is to be traced again.

An elastic run builds all of its programs anew for every set of processes. Compiling is fast, because
executables come from the compilation cache on disk; most of the time is Python, in the user's loss, its
gradient and the optimizer. Their traces (jaxprs) name no device, so later sets can reuse them.
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
    """The recorded trace of a function: its jaxpr, and the tree structure of its results."""

    jaxpr: ClosedJaxpr
    structure: Any


class Traces:
    """Traces of functions, by a key and the types of their arguments. Thread-safe.

    The key must cover everything that a function reads besides its arguments: two calls with the same key
    and argument types are taken for the same computation.
    """

    def __init__(self):
        self.once = Once()
        """Other results of tracing, by key."""

    def __call__(self, key: Hashable, function: Callable[..., PyTree], *arguments: PyTree) -> Any:
        """Return `function(*arguments)` inside a trace; calls the function only if no trace is known."""
        leaves, structure = jax.tree.flatten(arguments)
        types = tuple(jax.typeof(leaf) for leaf in leaves)
        # Inside a manual mesh, the same function is another computation.
        mesh = jax.sharding.get_abstract_mesh()

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

        trace = self.once((key, structure, types, mesh), make)
        if trace is None:
            return function(*arguments)
        return jax.tree.unflatten(trace.structure, jaxpr_as_fun(trace.jaxpr)(*leaves))


def _holds_arrays(jaxpr: Jaxpr) -> bool:
    """Return whether an inner function has an array of its own, which would keep devices alive."""
    for one in jaxpr.eqns:
        for x in jax.tree.leaves(list(one.params.values()), is_leaf=_is_jaxpr):
            if isinstance(x, ClosedJaxpr):
                if any(isinstance(const, jax.Array) for const in x.consts):
                    return True
                x = x.jaxpr
            if isinstance(x, Jaxpr) and _holds_arrays(x):
                return True
    return False


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)


def _on_host(const: Any) -> Any:
    """Return a constant in host memory; None if it cannot exist without its devices."""
    if isinstance(const, jax.core.Tracer):  # it belongs to an outer trace
        return None
    if jnp.issubdtype(const.dtype, jax.dtypes.prng_key):  # keys are no array of numbers
        return None
    return np.asarray(const)
