"""Runs an optimizer's update with everything computed once: leaves that it treats alike count as one.

A thousand leaves under Adam are a thousand times the same few operations. If gradients, parameters and the
first state of two leaves are equal, and so are the expressions that give their updates and next states, they
stay equal in every update. The trace shows which expressions are equal (value numbering); leaves are parted
until no update parts them further. Only one of each class is then compiled and run.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jaxtyping import Array, PyTree

from jaxgoodput.optim.constants import LOOPS, called_once
from jaxgoodput.optim.traced import TracedUpdate

_LARGE = 4096  # elements of a constant that is compared by identity instead of by value
_BY_ELEMENT = frozenset(
    "add add_any sub mul div rem neg sign abs max min clamp pow integer_pow square sqrt rsqrt cbrt exp exp2 "
    "log log1p expm1 tanh floor ceil round cos sin eq ne lt le gt ge and or not xor convert_element_type "
    "select_n is_finite copy copy_p stop_gradient erf logistic real imag".split()
)
_RESHAPING = frozenset("transpose reshape squeeze expand_dims broadcast_in_dim copy copy_p".split())


@dataclass(frozen=True)
class _Call:
    """An equation of a traced function whose results have numbers."""

    within: Jaxpr
    equation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Numbering:
    """Gives the values in traced functions numbers: one number for equal expressions of equal values."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._constants: dict[int, Any] = {}
        self._calls: dict[int, _Call] = {}
        self._functions: dict[int, tuple[Any, Any]] = {}

    def argument(self, *key: Any) -> int:
        """Return the number that stands for an argument of a traced function; it is new for a new key.

        Arguments with the same `key` get the same number, so they are taken to have equal values.
        """
        return self._number(("argument", key))

    def type_of(self, x: Any) -> Any:
        """Return what tells types of arrays apart."""
        return (x.shape, str(x.dtype))

    def is_shaped(self, equation: Any, place: int) -> bool:
        """Return whether input `place` of an equation is a number that stands for any that shapes give."""
        return False

    def outputs(self, function: ClosedJaxpr | Jaxpr, inputs: Sequence[int]) -> list[int]:
        """Return the numbers of a function's outputs, given the ones of its inputs."""
        is_closed = isinstance(function, ClosedJaxpr)
        jaxpr, consts = (function.jaxpr, function.consts) if is_closed else (function, ())
        known: dict[Any, int] = dict(zip(jaxpr.constvars, map(self._constant, consts), strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(x: Any) -> int:
            return self._constant(x.val, x.aval) if isinstance(x, Literal) else known[x]

        for equation in jaxpr.eqns:
            operands = tuple(
                self._shaped(equation, i) if self.is_shaped(equation, i) else read(x)
                for i, x in enumerate(equation.invars)
            )
            inner = None if equation.primitive.name in LOOPS else called_once(equation)
            results = (
                self._called(jaxpr, equation, operands)
                if inner is None
                else self.outputs(inner, operands)
            )
            known.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def evaluated(self, wanted: Sequence[int], values: Mapping[int, Any]) -> list[Array]:
        """Return the values with the numbers `wanted`, from the arguments' `values`."""
        known = {**self._constants, **values}
        for call in self._needed(wanted):
            for number, value in zip(call.outputs, _evaluated(call, known), strict=True):
                known[number] = value
        return [jnp.asarray(known[number]) for number in wanted]

    def is_by_element(self, wanted: Sequence[int]) -> bool:
        """Return whether each element of these values depends on its own elements and on scalars alone."""
        return all(
            call.equation.primitive.name in _BY_ELEMENT
            or (
                call.equation.primitive.name == "broadcast_in_dim"
                and not call.equation.invars[0].aval.shape
            )
            for call in self._needed(wanted)
        )

    def _needed(self, wanted: Sequence[int]) -> Iterator[_Call]:
        """Yield the calls that these values need, each after the ones that it needs."""
        needed, stack = set(), list(wanted)
        while stack:
            number = stack.pop()
            if number in self._calls and number not in needed:
                needed.add(number)
                stack.extend(self._calls[number].inputs)
        calls = {id(self._calls[number]): self._calls[number] for number in sorted(needed)}
        yield from calls.values()

    def _called(self, within: Jaxpr, equation: Any, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of the results of an equation, which are new if no equal one is known."""
        params = tuple(
            (name, self._key(value))
            for name, value in sorted(self._params_of(equation).items(), key=lambda x: x[0])
        )
        # What has effects is equal to nothing else.
        identity = object() if equation.effects else None
        key = (equation.primitive, inputs, params, identity)
        outputs = tuple(self._number((key, i)) for i in range(len(equation.outvars)))
        if outputs and outputs[0] not in self._calls:
            call = _Call(within, equation, inputs, outputs)
            self._calls.update(dict.fromkeys(outputs, call))
        return outputs

    def _constant(self, value: Any, aval: Any = None) -> int:
        is_array = isinstance(value, np.ndarray | jax.Array | np.generic)
        is_key = is_array and jnp.issubdtype(value.dtype, jax.dtypes.extended)
        if isinstance(value, Tracer) or is_key or np.size(value) > _LARGE:
            key: Any = id(value)
        else:
            array = np.asarray(value, None if aval is None else aval.dtype)
            key = (array.dtype, array.shape, array.tobytes())
        number = self._number(("constant", key))
        if aval is not None and not is_array:
            value = np.asarray(value, aval.dtype)
        self._constants.setdefault(number, value)
        return number

    def _params_of(self, equation: Any) -> Mapping[str, Any]:
        """Return the parameters that tell an equation apart from others."""
        return equation.params

    def _shaped(self, equation: Any, place: int) -> int:
        return self._number(("shaped", str(equation.invars[place].aval.dtype)))

    def _key(self, value: Any) -> Any:
        """Return what tells a parameter of an equation apart from others."""
        if isinstance(value, ClosedJaxpr | Jaxpr):
            return self._function(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._key, value))
        try:
            hash(value)
        except TypeError:
            return _Same(value)
        return (type(value), value)

    def _function(self, function: ClosedJaxpr | Jaxpr) -> Any:
        """Return what tells a function apart from others: its results, as expressions of its arguments."""
        if id(function) not in self._functions:
            jaxpr = function.jaxpr if isinstance(function, ClosedJaxpr) else function
            avals = tuple(self._kind_of(x.aval) for x in jaxpr.invars)
            inner = [self.argument("inner", i, aval) for i, aval in enumerate(avals)]
            found = (avals, tuple(self.outputs(function, inner)))
            self._functions[id(function)] = (function, found)  # kept, so that no other has its id
        return self._functions[id(function)][1]

    def _kind_of(self, aval: Any) -> Any:
        return str(aval)

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


class ShapelessNumbering(Numbering):
    """Gives equal numbers to expressions that differ in the lengths of axes alone.

    `shaped` has the literals that stand for any number that shapes give (`shaped_literals`).
    """

    def __init__(self, shaped: frozenset[tuple[int, int]] = frozenset()) -> None:
        super().__init__()
        self._literals = shaped

    def type_of(self, x: Any) -> Any:
        """Return what tells types of arrays apart."""
        return (len(x.shape), str(x.dtype))

    def is_shaped(self, equation: Any, place: int) -> bool:
        """Return whether input `place` of an equation is a number that stands for any that shapes give."""
        return (id(equation), place) in self._literals

    def _called(self, within: Jaxpr, equation: Any, inputs: tuple[int, ...]) -> tuple[int, ...]:
        if equation.primitive.name in _RESHAPING:
            return inputs[:1]
        return super()._called(within, equation, inputs)

    def _params_of(self, equation: Any) -> Mapping[str, Any]:
        if equation.primitive.name == "integer_pow":
            return equation.params
        return {name: x for name, x in equation.params.items() if not _is_of_axes(x)}

    def _kind_of(self, aval: Any) -> Any:
        return self.type_of(aval)


def _is_of_axes(value: Any) -> bool:
    """Return whether a parameter consists of whole numbers: axes, lengths, or places along them."""
    if isinstance(value, tuple | list):
        return all(map(_is_of_axes, value))
    return isinstance(value, int) and not isinstance(value, bool)


def shaped_literals(function: Any, other: Any) -> frozenset[tuple[int, int]] | None:
    """Return the literals that shapes give: they differ in another trace of a function, at other shapes.

    Each is the `id` of its equation in `function`, and its place. None if the traces have other equations.
    """
    ours, others = (x.jaxpr if isinstance(x, ClosedJaxpr) else x for x in (function, other))
    if len(ours.eqns) != len(others.eqns):
        return None
    found: set[tuple[int, int]] = set()
    for equation, twin in zip(ours.eqns, others.eqns, strict=True):
        if equation.primitive is not twin.primitive or len(equation.invars) != len(twin.invars):
            return None
        for i, (x, y) in enumerate(zip(equation.invars, twin.invars, strict=True)):
            both = isinstance(x, Literal) and isinstance(y, Literal)
            if both and not np.array_equal(x.val, y.val):
                found.add((id(equation), i))
        inside = _functions(equation), _functions(twin)
        if len(inside[0]) != len(inside[1]):
            return None
        for x, y in zip(*inside, strict=True):
            inner = shaped_literals(x, y)
            if inner is None:
                return None
            found |= inner
    return frozenset(found)


def _functions(equation: Any) -> list[Any]:
    """Return the functions that an equation holds."""
    leaves = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
    )
    return [x for x in leaves if isinstance(x, ClosedJaxpr | Jaxpr)]


class _Same:
    """A key that is equal only for the very same object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _evaluated(call: _Call, known: Mapping[int, Any]) -> list[Any]:
    """Return the results of one equation; random bits are the ones in the middle, and so normal noise is 0.

    What an optimizer does with gradients would be hidden behind the noise that it adds.
    """
    equation, values = call.equation, {}
    if equation.primitive.name == "random_bits":
        (aval,) = (x.aval for x in equation.outvars)
        return [jnp.full(aval.shape, jnp.iinfo(aval.dtype).max // 2 + 1, aval.dtype)]
    for variable, number in zip(equation.invars, call.inputs, strict=True):
        if not isinstance(variable, Literal):
            values[variable] = known[number]
    alone = call.within.replace(
        constvars=[],
        invars=list(values),
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, []))(*values.values())


@dataclass(frozen=True)
class FoldedUpdate:
    """An optimizer's update for the case that all leaves of one type have equal values.

    Leaves that then stay equal form a class, whose update is computed once. A state is a list of arrays, one
    for each class of its leaves.
    """

    traced: TracedUpdate
    clocks: frozenset[str]
    """Paths of the counts in the state that get a given count in every update."""
    state_classes: tuple[int, ...]
    """Class of each leaf of the state."""
    numbering: Callable[[], Numbering] = Numbering
    """Maker of the numbering that says which values are equal."""

    @classmethod
    def of(
        cls,
        traced: TracedUpdate,
        clocks: frozenset[str],
        numbering: Callable[[], Numbering] = Numbering,
    ) -> "FoldedUpdate":
        """Find the classes of a traced update."""
        numbers, firsts = cls(traced, clocks, (), numbering)._init
        avals = [numbers.type_of(x) for x in jax.tree.leaves(traced.state)]
        classes = _numbered(zip(firsts, avals, strict=True))
        while True:
            folded = cls(traced, clocks, classes, numbering)
            refined = _numbered(zip(classes, folded._update[2], strict=True))
            if max(refined, default=0) == max(classes, default=0):
                return folded
            classes = refined

    @functools.cached_property
    def leaf_classes(self) -> np.ndarray:
        """Class of each leaf of the parameters; leaves of a class have the same updates."""
        return np.array(_numbered(self._update[1]), int)

    @property
    def expressions(self) -> tuple[list[int], tuple[int, ...]]:
        """The numbers of the updates, and the classes of the state that they are expressed in."""
        return self._update[1], self.state_classes

    @property
    def num_elements(self) -> int:
        """Number of elements of one leaf of each class."""
        leaves = jax.tree.leaves(self.traced.params)
        return sum(leaves[i].size for i in self.first_of_leaves)

    @property
    def is_by_element(self) -> bool:
        """Whether updates are computed element by element; literals may still follow from shapes."""
        numbering, moved, _ = self._update
        return numbering.is_by_element(moved)

    def init(self, value: Any) -> list[Array]:
        """Return the first state for parameters that are `value` everywhere."""
        numbering, firsts = self._init
        values = self._params(numbering, value)
        return numbering.evaluated([firsts[i] for i in self._first_of_state], values)

    def update(
        self, gradient: Callable[[Any], Array], state: list[Array], value: Any, count: Any
    ) -> tuple[list[Array], list[Array]]:
        """Return the updates of each class of leaves, and the next state.

        `gradient` makes a leaf's gradient from its abstract value; parameters are `value` everywhere.
        """
        numbering, moved, after = self._update
        arguments = self._arguments(numbering, gradient, state, value, count)
        wanted = [moved[i] for i in self.first_of_leaves]
        next_state = [after[i] for i in self._first_of_state]
        results = numbering.evaluated([*wanted, *next_state], arguments)
        typed = [
            new if new.dtype == old.dtype else new.astype(old.dtype)
            for new, old in zip(results[len(wanted) :], state, strict=True)
        ]
        return results[: len(wanted)], typed

    def scales(self, function: Callable[[PyTree], PyTree], state: list[Array]) -> list[Array]:
        """Return the leaves of `function(state)`, from the arrays of each class of a state's leaves."""
        numbering, jaxpr = Numbering(), jax.make_jaxpr(function)(self.traced.state)
        inputs = [numbering.argument("state", x) for x in self.state_classes]
        outputs = numbering.outputs(jaxpr, inputs)
        given = dict(zip(inputs, (state[x] for x in self.state_classes), strict=True))
        once = list(dict.fromkeys(outputs))
        found = dict(zip(once, numbering.evaluated(once, given), strict=True))
        return [found[x] for x in outputs]

    @functools.cached_property
    def first_of_leaves(self) -> list[int]:
        """First leaf of each class."""
        return _firsts(self.leaf_classes.tolist())

    @functools.cached_property
    def _first_of_state(self) -> list[int]:
        return _firsts(self.state_classes)

    @functools.cached_property
    def _init(self) -> tuple[Numbering, list[int]]:
        numbering = self.numbering()
        jaxpr = jax.make_jaxpr(self.traced.tx.init)(self.traced.params)
        return numbering, numbering.outputs(jaxpr, [_param(numbering, x) for x in jaxpr.in_avals])

    @functools.cached_property
    def _update(self) -> tuple[Numbering, list[int], list[int]]:
        """The numbers of all updates and of the whole next state."""
        numbering, num_leaves = self.numbering(), self.traced.num_leaves
        outputs = numbering.outputs(self.traced.jaxpr, [x for x, _ in self._inputs(numbering)])
        return numbering, outputs[:num_leaves], outputs[num_leaves:]

    def _inputs(self, numbering: Numbering) -> list[tuple[int, tuple[str, Any]]]:
        """Return each input of the traced update as its number, and what it is."""
        num_leaves, avals = self.traced.num_leaves, self.traced.jaxpr.in_avals
        paths = [jax.tree_util.keystr(p) for p, _ in _with_paths(self.traced.state)]
        grads, rest = avals[:num_leaves], avals[num_leaves:]
        states, params = rest[: len(paths)], rest[len(paths) : len(paths) + num_leaves]
        inputs = [(numbering.argument("grad", numbering.type_of(x)), ("grad", x)) for x in grads]
        for path, x, state_class in zip(paths, states, self.state_classes, strict=True):
            if path in self.clocks:
                inputs.append((numbering.argument("count", numbering.type_of(x)), ("count", x)))
            else:
                inputs.append((numbering.argument("state", state_class), ("state", state_class)))
        inputs += [(_param(numbering, x), ("param", x)) for x in params]
        inputs += [(numbering.argument("loss"), ("loss", x)) for x in avals[-1:]]
        return inputs

    def _arguments(
        self,
        numbering: Numbering,
        gradient: Callable[[Any], Array],
        state: list[Array],
        value: Any,
        count: Any,
    ) -> dict[int, Any]:
        def filled(what: str, of: Any) -> Any:
            if what == "state":
                return state[of]
            if what == "grad":
                return gradient(of)
            filling = {"count": count, "param": value, "loss": 1.0}[what]
            return jnp.full(of.shape, filling, of.dtype)

        return {number: filled(*what) for number, what in dict(self._inputs(numbering)).items()}

    def _params(self, numbering: Numbering, value: Any) -> dict[int, Any]:
        avals = {numbering.type_of(x): x for x in jax.tree.leaves(self.traced.params)}
        return {_param(numbering, x): jnp.full(x.shape, value, x.dtype) for x in avals.values()}


def _with_paths(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _param(numbering: Numbering, x: Any) -> int:
    return numbering.argument("param", numbering.type_of(x))


def _numbered(keys: Any) -> tuple[int, ...]:
    """Return the place of each key among the different ones, in order of appearance."""
    places: dict[Any, int] = {}
    return tuple(places.setdefault(key, len(places)) for key in keys)


def _firsts(classes: Sequence[int]) -> list[int]:
    """Return the first place of each class, in order of the classes."""
    found: dict[int, int] = {}
    for place, own in enumerate(classes):
        found.setdefault(own, place)
    return list(found.values())
