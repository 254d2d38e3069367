"""Finds values that a traced function returns whatever its arguments are.

An optimizer is a closure: nothing in it says which leaves it never moves, or which counts advance by one in
every update. Trying it on some gradients would only say what happened for these. Its trace says it for all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxgoodput import _jax

# A value is a scalar if all elements of the array are known to be equal to it, and None if they are not.
Value = np.ndarray | None

_SHAPE_ONLY = frozenset(
    "broadcast_in_dim reshape transpose squeeze expand_dims slice rev copy copy_p device_put reduce_max "
    "reduce_min reduce_and reduce_or sharding_constraint reduce_precision".split()
)
_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda x, y: x / y if jnp.issubdtype(x.dtype, jnp.inexact) else np.trunc(x / y),
    "rem": np.fmod,
    "neg": np.negative,
    "sign": np.sign,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "pow": np.float_power,
    "integer_pow": np.float_power,
    "square": np.square,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "floor": np.floor,
    "ceil": np.ceil,
    "cos": np.cos,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "convert_element_type": np.asarray,
}
_ZERO_IF_ANY = frozenset("mul and dot_general conv_general_dilated".split())
_ZERO_IF_FIRST = frozenset(
    "div rem reduce_sum cumsum cumprod cummax cummin reduce_prod sort dynamic_slice real imag".split()
)
_CONCRETE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
LOOPS = frozenset("scan while".split())  # their bodies run more than once
# Equations that are one call of their function. Others that hold a function call it as often as they like:
# `reduce` and `reduce_window` once per element, with as many arguments as they have inputs.
_CALLS = frozenset(
    "jit pjit closed_call core_closed_call call core_call eval_jaxpr checkpoint remat remat2 custom_jvp_call "
    "custom_jvp_call_jaxpr custom_vjp_call custom_vjp_call_jaxpr".split()
)


def constant_outputs(traced: ClosedJaxpr, known: Mapping[int, Any]) -> list[Value]:
    """Return the value of each output that is the same whatever the arguments are, else None.

    `known` has the values of arguments whose elements are all equal, by position; nothing is known of the
    others, except that all floats are finite. (Only finite gradients reach an optimizer, so
    `optax.apply_if_finite` lets all pass.)

    >>> traced = jax.make_jaxpr(lambda x, n: (0 * x, x + 1, n + 1))(1.0, 1)
    >>> [x if x is None else float(x) for x in constant_outputs(traced, {1: 4})]
    [0.0, None, 5.0]
    """
    arguments: list[Value] = [None] * len(traced.jaxpr.invars)
    for place, value in known.items():
        arguments[place] = np.asarray(value, traced.in_avals[place].dtype)
    with np.errstate(all="ignore"):
        return _outputs(traced, arguments)


def affected_outputs(function: ClosedJaxpr | Jaxpr, arguments: Sequence[bool]) -> list[bool]:
    """Return for each output whether one of some arguments, the ones that are True, may affect it."""
    jaxpr = function.jaxpr if isinstance(function, ClosedJaxpr) else function
    affected = {x for x, is_one in zip(jaxpr.invars, arguments, strict=True) if is_one}

    def is_affected(x: Any) -> bool:
        return not isinstance(x, Literal) and x in affected

    for equation in jaxpr.eqns:
        inputs, inner = list(map(is_affected, equation.invars)), called_once(equation)
        results = [any(inputs)] * len(equation.outvars)
        if inner is not None:
            results = affected_outputs(inner, inputs)
        affected.update(x for x, is_one in zip(equation.outvars, results, strict=True) if is_one)
    return list(map(is_affected, jaxpr.outvars))


def _outputs(function: ClosedJaxpr | Jaxpr, arguments: Sequence[Value]) -> list[Value]:
    """Return what is known of the outputs of a function."""
    is_closed = isinstance(function, ClosedJaxpr)
    jaxpr, consts = (function.jaxpr, function.consts) if is_closed else (function, ())
    known: dict[Any, Value] = dict(zip(jaxpr.constvars, map(_uniform, consts), strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(x: Any) -> Value:
        return _uniform(x.val) if isinstance(x, Literal) else known.get(x)

    for one in jaxpr.eqns:
        found = _results(one, [read(x) for x in one.invars])
        known.update(zip(one.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _results(one: Any, inputs: list[Value]) -> list[Value]:
    """Return what is known of the results of one equation."""
    name = one.primitive.name
    if name == "is_finite" or (name in ("eq", "ne") and one.invars[0] is one.invars[1]):
        return [np.asarray(name != "ne")]  # whether it is a number
    if name in ("cond", "select_n"):
        return _of_choice(one, inputs)
    if name == "optimization_barrier":
        return list(inputs)
    if name in LOOPS:
        return _of_loop(one, inputs)
    inner = called_once(one)
    if inner is not None:
        return _outputs(inner, inputs)
    if len(one.outvars) != 1:
        return [None] * len(one.outvars)
    return [_result(one, name, inputs)]


def _of_choice(one: Any, inputs: list[Value]) -> list[Value]:
    """Return what is known of the results of a choice between functions or values."""
    index, *given = inputs
    if one.primitive.name == "select_n":
        return _common([[case] for case in _chosen(index, given)])
    return _common([_outputs(branch, given) for branch in _chosen(index, one.params["branches"])])


def _of_loop(one: Any, inputs: list[Value]) -> list[Value]:
    """Return what is known of a loop's results: values that it starts with, and that no turn changes."""
    params = one.params
    if one.primitive.name == "while":
        start, num_consts = params["cond_nconsts"], params["body_nconsts"]
        body, num_carried = params["body_jaxpr"], len(one.outvars)
    else:
        start, body = 0, params["jaxpr"]
        num_consts, num_carried = _jax.operands_of_scan(params)
    consts = inputs[start : start + num_consts]
    carried = inputs[start + num_consts : start + num_consts + num_carried]
    scanned = inputs[start + num_consts + num_carried :]
    while True:
        found = _outputs(body, [*consts, *carried, *scanned])
        stays = _common([carried, found[:num_carried]])
        if sum(x is None for x in stays) == sum(x is None for x in carried):
            return [*stays, *found[num_carried:]]
        carried = stays


def _result(one: Any, name: str, inputs: list[Value]) -> Value:
    dtype = one.outvars[0].aval.dtype
    if _is_zero(name, inputs):
        return np.zeros((), dtype)
    if _is_true(name, inputs):
        return np.asarray(True)
    values = [x for x in inputs if x is not None]
    if not values or len(values) < len(inputs):
        return None
    if name in _SHAPE_ONLY:
        return values[0]
    if name in ("concatenate", "stack"):
        return _common([[x] for x in values])[0]
    return _folded(one, name, values)


def _folded(one: Any, name: str, values: list[Any]) -> Value:
    dtype = one.outvars[0].aval.dtype
    if name not in _ELEMENTWISE:
        return None
    powers = [one.params["y"]] if name == "integer_pow" else []
    return np.asarray(_ELEMENTWISE[name](*values, *powers)).astype(dtype)


def _is_true(name: str, inputs: list[Value]) -> bool:
    """Return whether a disjunction is true because some input is."""
    return name == "or" and any(x is not None and x.dtype == np.bool_ and bool(x) for x in inputs)


def _is_zero(name: str, inputs: list[Value]) -> bool:
    """Return whether a result is 0 because some input is."""
    zeros = [x is not None and not x for x in inputs]
    return (name in _ZERO_IF_ANY and any(zeros)) or (name in _ZERO_IF_FIRST and zeros[0])


def _chosen(index: Value, cases: Sequence[Any]) -> Sequence[Any]:
    """Return the one case that a known index selects, or all."""
    if index is None:
        return cases
    return [cases[min(max(int(index), 0), len(cases) - 1)]]


def _common(results: Sequence[list[Value]]) -> list[Value]:
    """Return for each place of several lists the value that all have there; None if they do not agree.

    A value that is unknown (None) in one of the lists is unknown in the result.
    """

    def same(values: tuple[Value, ...]) -> Value:
        first, *others = values
        equal = first is not None and all(x is not None and x == first for x in others)
        return first if equal else None

    return [same(values) for values in zip(*results, strict=True)]


def called_once(one: Any) -> ClosedJaxpr | Jaxpr | None:
    """Return the function that an equation calls once with its own inputs; None if there is none."""
    if one.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = one.params.get(name)
        if isinstance(inner, ClosedJaxpr | Jaxpr):
            plain = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            return inner if len(plain.invars) == len(one.invars) else None
    return None


def _uniform(x: Any) -> Value:
    """Return the value that all elements of an array share; None if they differ."""
    if isinstance(x, Tracer) or not isinstance(x, _CONCRETE):
        return None
    if jnp.issubdtype(getattr(x, "dtype", np.dtype(float)), jax.dtypes.extended):
        return None  # a random key
    array = np.asarray(x)
    if not array.size or not (array == array.flat[0]).all():
        return None
    return np.asarray(array.flat[0])
