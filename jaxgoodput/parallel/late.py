"""Parameters that become whole as late as possible, and again in the backward pass.

A model that scans over stacked layers takes its whole stack as one argument. Gathered before the call, all
layers would be whole at once, and kept until the backward pass has used them: FSDP would save nothing. So
the function is traced for whole parameters, and its program is run anew with the parts in their place. A
part passes through calls, `jax.checkpoint` and rearrangements as it is, and a scan slices it; the one
operation that computes with it gathers it, under a `jax.checkpoint` of its own, so that the backward pass
gathers it anew (ZeRO-3, Rajbhandari et al. 2020) and the function's own checkpoints keep their meaning.

A leaf that is used more than once at one level is gathered there once and kept: the gradient of every use
must be added up before its norm is taken.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.parallel.strategy import FSDP_AXIS

# Made of parameters alone and without much arithmetic: made again rather than kept.
_REARRANGEMENTS = frozenset(
    "convert_element_type transpose reshape squeeze expand_dims broadcast_in_dim concatenate slice rev "
    "copy neg mul div add sub".split()
)


@dataclass(frozen=True)
class Part:
    """A leaf that is not whole yet. `gather(values, spec)` makes it whole.

    A scan slices those `values` that have the leaf's shape (`sliced`) and hands on the others.
    """

    values: tuple[Any, ...]
    sliced: tuple[bool, ...]
    spec: PartitionSpec
    gather: Callable[[tuple[Any, ...], PartitionSpec], Array]


@dataclass(frozen=True)
class _Lazy:
    """An array made of parts: `make` of the whole leaves."""

    parts: tuple[Part, ...]
    make: Callable[[Sequence[Array]], Array]
    casts: tuple[Any, ...] | None  # what `make` does, where it is casts only

    def force(self) -> Array:
        return self.make([part.gather(part.values, part.spec) for part in self.parts])

    @property
    def can_be_scanned(self) -> bool:
        """Whether slices along the first dimension are parts themselves."""
        spec = self.parts[0].spec
        return self.casts is not None and spec[0] is None and FSDP_AXIS in spec

    @property
    def values(self) -> list[tuple[Any, ...]]:
        return [part.values for part in self.parts]

    def of(self, values: Sequence[tuple[Any, ...]]) -> "_Lazy":
        """The same, of other values."""
        parts = zip(self.parts, values, strict=True)
        return replace(self, parts=tuple(replace(part, values=tuple(v)) for part, v in parts))


def call_late(function: Callable[..., PyTree], arguments: PyTree, whole: PyTree) -> PyTree:
    """`function(*arguments)`, whose leaves may be `Part`s; they are gathered where they are used.

    `whole` are abstract arguments, with whole leaves.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*whole)
    leaves = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, Part))
    inputs = [_Lazy((x,), _first, ()) if isinstance(x, Part) else x for x in leaves]
    results = _run(closed.jaxpr, closed.consts, inputs, in_loop=False)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _first(wholes: Sequence[Array]) -> Array:
    return wholes[0]


def _forced(x: Any) -> Any:
    return x.force() if isinstance(x, _Lazy) else x


def _is_lazy(x: Any) -> bool:
    return isinstance(x, _Lazy)


def _run(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], *, in_loop: bool
) -> list[Any]:
    """The program's results, whole."""
    known: dict[Any, Any] = {}
    uses = Counter(v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal))
    uses.update(v for v in jaxpr.outvars if not isinstance(v, Literal))

    def write(names: Sequence[Any], values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            known[name] = _forced(value) if uses[name] > 1 else value

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else known[v]

    write(jaxpr.constvars, consts)
    write(jaxpr.invars, arguments)
    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        write(eqn.outvars, _step(eqn, inputs, in_loop=in_loop))
    return [_forced(read(v)) for v in jaxpr.outvars]


def _step(eqn: JaxprEqn, inputs: Sequence[Any], *, in_loop: bool) -> Sequence[Any]:
    """One operation's results, some of them perhaps lazy."""
    if not any(map(_is_lazy, inputs)):
        return _bound(eqn, inputs)
    name = eqn.primitive.name
    if name in ("jit", "pjit", "closed_call"):
        closed: ClosedJaxpr = eqn.params["jaxpr"]
        return _run(closed.jaxpr, closed.consts, inputs, in_loop=in_loop)
    if name in ("remat2", "checkpoint"):
        return _checkpoint(eqn, inputs, in_loop=in_loop)
    if name == "scan":
        return _scan(eqn, inputs)
    if any(True for _ in jaxprs_in_params(eqn.params)):
        # Branches and loops that may run any number of times: whole before, and kept.
        return _bound(eqn, [_forced(x) for x in inputs])
    alone = all(
        _is_lazy(x) or isinstance(v, Literal) for x, v in zip(inputs, eqn.invars, strict=True)
    )
    if name in _REARRANGEMENTS and alone:
        return [_rearranged(eqn, inputs)]
    return _gathered_again(eqn, inputs, in_loop=in_loop)


def _bound(eqn: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return found if eqn.primitive.multiple_results else [found]


def _rearranged(eqn: JaxprEqn, inputs: Sequence[Any]) -> _Lazy:
    lazies = [x for x in inputs if _is_lazy(x)]
    counts = [len(x.parts) for x in lazies]

    def make(wholes: Sequence[Array]) -> Array:
        rest = iter(wholes)
        made = iter(
            [x.make([next(rest) for _ in range(n)]) for x, n in zip(lazies, counts, strict=True)]
        )
        return _bound(eqn, [next(made) if _is_lazy(x) else x for x in inputs])[0]

    casts = None
    if eqn.primitive.name == "convert_element_type" and lazies[0].casts is not None:
        casts = (*lazies[0].casts, eqn.params["new_dtype"])
    return _Lazy(tuple(part for x in lazies for part in x.parts), make, casts)


def _gathered_again(eqn: JaxprEqn, inputs: Sequence[Any], *, in_loop: bool) -> Sequence[Any]:
    """An operation that computes with parts: whole here, and whole again in the backward pass."""

    def run(values: list[Any]) -> Sequence[Any]:
        pairs = zip(inputs, values, strict=True)
        return _bound(eqn, [x.of(v).force() if _is_lazy(x) else v for x, v in pairs])

    # Inside a loop the two passes are different programs, which nothing could merge.
    again = jax.checkpoint(run, prevent_cse=not in_loop)
    return again([x.values if _is_lazy(x) else x for x in inputs])


def _checkpoint(eqn: JaxprEqn, inputs: Sequence[Any], *, in_loop: bool) -> Sequence[Any]:
    params = eqn.params

    def run(values: list[Any]) -> Sequence[Any]:
        pairs = zip(inputs, values, strict=True)
        own = [x.of(v) if _is_lazy(x) else v for x, v in pairs]
        return _run(params["jaxpr"], (), own, in_loop=in_loop)

    again = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
    return again([x.values if _is_lazy(x) else x for x in inputs])


def _scan(eqn: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    params = eqn.params
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    closed: ClosedJaxpr = params["jaxpr"]
    # What every round uses is gathered once, before; so is a stack that is cut along the scan.
    fixed = [_forced(x) for x in inputs[:num_consts]]
    carry = [_forced(x) for x in inputs[num_consts : num_consts + num_carry]]
    stacks = [
        x if _is_lazy(x) and x.can_be_scanned else _forced(x)
        for x in inputs[num_consts + num_carry :]
    ]
    if not any(map(_is_lazy, stacks)):
        return _bound(eqn, [*fixed, *carry, *stacks])

    def slices_of(stack: Any) -> Any:
        if not _is_lazy(stack):
            return stack
        (part,) = stack.parts
        return [v for v, cut in zip(part.values, part.sliced, strict=True) if cut]

    def layer(stack: Any, slices: Any) -> Any:
        if not _is_lazy(stack):
            return slices
        (part,) = stack.parts
        rest = iter(slices)
        values = tuple(
            next(rest) if cut else v for v, cut in zip(part.values, part.sliced, strict=True)
        )
        own = replace(part, values=values, spec=PartitionSpec(*part.spec[1:]))
        cast = functools.partial(_cast, dtypes=stack.casts)
        return _Lazy((own,), cast, stack.casts)

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        own = [layer(stack, x) for stack, x in zip(stacks, slices, strict=True)]
        found = _run(closed.jaxpr, closed.consts, [*fixed, *carry, *own], in_loop=True)
        return found[:num_carry], found[num_carry:]

    carry, outputs = jax.lax.scan(
        body,
        carry,
        [slices_of(x) for x in stacks],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *outputs]


def _cast(wholes: Sequence[Array], dtypes: Sequence[Any]) -> Array:
    whole = wholes[0]
    for dtype in dtypes:
        whole = whole.astype(dtype)
    return whole
