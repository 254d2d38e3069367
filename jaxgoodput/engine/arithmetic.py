"""How much a traced program computes, counted before it is compiled.

A scan counts times its length, a conditional as its largest branch. What `shard_map` holds is traced for one
device, and counts for all.
"""

import math
from collections.abc import Callable

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

Shapes = list[tuple[int, ...]]
# Additions in the time of one number, about, in unoptimised code of a CPU, by the beginning of the
# operation's name; of windows and cumulative sums, for each number read.
COSTS = {
    "reduce_window": 10,
    "select_and_": 100,
    "cum": 100,
    "sort": 500,
    "random_bits": 50,
    "threefry": 50,
    "erf_inv": 20,
}
# The same of a multiplication of a convolution that XLA:CPU does not leave to Eigen.
LOOPED_CONVOLUTION = 40


def matrix_flops(jaxpr: Jaxpr) -> float:
    """Return the flops of a traced program's matrix products and convolutions, on all its devices.

    A `while` counts as one iteration.
    """
    return _total(jaxpr, _flops_of)


def matrix_flops_by_type(jaxpr: Jaxpr) -> dict[str, float]:
    """Return the flops of `matrix_flops` by the type of their factors, such as "bfloat16"."""
    totals: dict[str, float] = {}
    for name in sorted(_types(jaxpr)):
        flops = _total(
            jaxpr, lambda one, name=name: _flops_of(one) if _type_of(one) == name else 0.0
        )
        totals |= {name: flops} if flops else {}
    return totals


def elementary_work(jaxpr: Jaxpr) -> float:
    """Return how many additions take about as long as a traced program without its matrix products.

    An operation counts one addition for each number of its result, or as many as `COSTS` says; a reduction
    also counts what it reads. A matrix product or convolution counts only its result, because the compiler's
    options do not change how long it takes. The exception is a convolution whose window has more places than
    its input, as in the last layers of a network for small pictures: XLA:CPU swaps the two, which Eigen
    cannot do backwards, and emits a loop. The work is infinite if there is a `while`, whose trips are not
    known.
    """
    return _total(jaxpr, _work_of)


def primitives(jaxpr: Jaxpr) -> set[str]:
    """Return the names of all operations of a traced program, also those inside of others."""
    inner = (primitives(j) for one in jaxpr.eqns for j in jaxprs_in_params(one.params))
    return {one.primitive.name for one in jaxpr.eqns}.union(*inner)


def _work_of(one: JaxprEqn) -> float:
    name = one.primitive.name
    if name == "while":
        return math.inf
    reads = name.startswith(("reduce", "arg", "cum"))
    shapes = _shapes([*one.invars, *one.outvars] if reads else one.outvars)
    cost = next((cost for start, cost in COSTS.items() if name.startswith(start)), 1)
    if name == "conv_general_dilated" and _is_looped(one):
        cost += LOOPED_CONVOLUTION * _flops_of(one) / (2 * math.prod(shapes[-1]))
    if name.startswith("reduce_window"):
        cost *= math.prod(one.params.get("window_dimensions", ()))
    return float(cost * sum(map(math.prod, shapes)))


def _total(jaxpr: Jaxpr, of: Callable[[JaxprEqn], float]) -> float:
    """Return the sum of `of` over all operations, also those inside of others."""
    return float(sum(_of_one(one, of) for one in jaxpr.eqns))


def _of_one(one: JaxprEqn, of: Callable[[JaxprEqn], float]) -> float:
    name, inner = one.primitive.name, [_total(j, of) for j in jaxprs_in_params(one.params)]
    if name.startswith(("reduce", "scatter")) or (of is _work_of and name == "while"):
        return of(one)  # what it holds combines two numbers
    if name == "scan":
        return one.params["length"] * sum(inner)
    if name == "shard_map":
        mesh, axes = one.params["mesh"], one.params["newly_manual_axes"]
        return math.prod(mesh.shape[axis] for axis in axes) * sum(inner)
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) if inner else of(one)


def _is_looped(convolution: JaxprEqn) -> bool:
    """Whether XLA:CPU emits a loop for a convolution: its window is larger than its input."""
    spec = convolution.params["dimension_numbers"]
    image, kernel, *_ = _shapes(convolution.invars)
    window = math.prod(kernel[i] for i in spec.rhs_spec[2:])
    return window > math.prod(image[i] for i in spec.lhs_spec[2:])


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


def _types(jaxpr: Jaxpr) -> set[str]:
    inner = (_types(j) for one in jaxpr.eqns for j in jaxprs_in_params(one.params))
    return {_type_of(one) for one in jaxpr.eqns if _flops_of(one)}.union(*inner)


def _type_of(one: JaxprEqn) -> str:
    """Return the type of an operation's first operand; "" if it has none."""
    return str(getattr(one.invars[0].aval, "dtype", "")) if one.invars else ""


def _shapes(variables: list) -> Shapes:
    return [getattr(x.aval, "shape", ()) for x in variables]
