"""How much a traced program computes, counted before it is compiled.

A scan counts times its length, a conditional as its largest branch, a `while` as one iteration. What
`shard_map` holds is traced for one device, and counts for all.
"""

import math
from collections.abc import Callable

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

Shapes = list[tuple[int, ...]]


def matrix_flops(jaxpr: Jaxpr) -> float:
    """Return the flops of a traced program's matrix products and convolutions, on all its devices."""
    return _total(jaxpr, _flops_of)


def numbers_made(jaxpr: Jaxpr) -> float:
    """Return how many numbers the operations of a traced program make, on all its devices."""
    return _total(jaxpr, lambda one: float(sum(map(math.prod, _shapes(one.outvars)))))


def _total(jaxpr: Jaxpr, of: Callable[[JaxprEqn], float]) -> float:
    """Return the sum of `of` over the operations that hold no others."""
    return float(sum(_of_one(one, of) for one in jaxpr.eqns))


def _of_one(one: JaxprEqn, of: Callable[[JaxprEqn], float]) -> float:
    name, inner = one.primitive.name, [_total(j, of) for j in jaxprs_in_params(one.params)]
    if name == "scan":
        return one.params["length"] * sum(inner)
    if name == "shard_map":
        mesh, axes = one.params["mesh"], one.params["newly_manual_axes"]
        return math.prod(mesh.shape[axis] for axis in axes) * sum(inner)
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) if inner else of(one)


def _flops_of(one: JaxprEqn) -> float:
    name, shapes = one.primitive.name, _shapes([*one.invars, *one.outvars])
    if name == "dot_general":
        ((summed, _), _) = one.params["dimension_numbers"]
        return 2.0 * math.prod(shapes[-1]) * math.prod(shapes[0][i] for i in summed)
    if name.startswith("ragged_dot"):
        # Every row meets the matrix of one group, whichever dimension is summed over.
        return 2.0 * math.prod(shapes[0]) * shapes[-1][-1]
    if name == "conv_general_dilated":
        _, kernel, *_, result = shapes
        outputs = kernel[one.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(result) * math.prod(kernel) / outputs
    return 0.0


def _shapes(variables: list) -> Shapes:
    return [getattr(x.aval, "shape", ()) for x in variables]
