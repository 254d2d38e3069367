"""Parameters cut over "fsdp" become whole where they are used, and their gradients are cut again.

Inside a replica's part of a step (manual over the replica axes, automatic over "tensor") every cut leaf
is gathered, and the backward pass scatters the sum of the replicas' gradients. On the way, a *tap* takes
the squared norm of this replica's whole gradient, leaf by leaf: the gradient exists whole for one leaf
at a time, and statistics need no further collective (a `custom_vjp` whose second cotangent is the norm).
When and how often leaves are gathered is the subject of `late.py`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.parallel.late import Part, call_late
from jaxgoodput.parallel.strategy import FSDP_AXIS, TENSOR_AXIS, Strategy


def manual(spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec that a replica sees: "tensor" stays with the compiler."""
    return PartitionSpec(*(axis if axis == FSDP_AXIS else None for axis in spec))


def automatic(spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec that is left to the compiler."""
    return PartitionSpec(*(axis if axis == TENSOR_AXIS else None for axis in spec))


@dataclass(frozen=True)
class Collectives:
    """Sums, gathers and scatters inside a replica, for leaves cut over "tensor" besides.

    A collective over a manual axis would gather what is cut over an automatic one first, so each runs
    with "tensor" manual too.
    """

    strategy: Strategy

    def on_shards(self, function: Callable[..., Any], specs: Sequence[PartitionSpec]) -> Any:
        """`function` of local blocks, to as many, where "tensor" cuts any as `specs` say."""
        own = tuple(automatic(spec) for spec in specs)
        if all(axis is None for spec in own for axis in spec):
            return function
        return jax.shard_map(
            function,
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=own,
            out_specs=own,
            axis_names={TENSOR_AXIS},
            check_vma=False,
        )

    def sum(self, tree: PyTree, specs: PyTree, axes: Sequence[str]) -> PyTree:
        """The tree summed over `axes`, in one collective; axes of degree 1 cost nothing."""
        axes = tuple(axis for axis in axes if self.strategy.degrees[axis] > 1)
        leaves, structure = jax.tree.flatten(tree)
        if not axes or not leaves:
            return tree
        run = self.on_shards(
            lambda *xs: tuple(jax.lax.psum(xs, axes)), structure.flatten_up_to(specs)
        )
        return jax.tree.unflatten(structure, run(*leaves))

    def gather(self, x: Array, spec: PartitionSpec) -> Array:
        """A leaf whole in its replica."""
        dim = _fsdp_dim(spec)
        if dim is None:
            return x

        def run(x: Array) -> tuple[Array]:
            return (jax.lax.all_gather(x, FSDP_AXIS, axis=dim, tiled=True),)

        return self.on_shards(run, (spec,))(x)[0]

    def scatter(self, g: Array, spec: PartitionSpec) -> Array:
        """The sum of the replicas' whole gradients, cut over "fsdp"; unsummed where nothing is cut."""
        dim = _fsdp_dim(spec)
        if dim is None:
            return g

        def run(g: Array) -> tuple[Array]:
            return (jax.lax.psum_scatter(g, FSDP_AXIS, scatter_dimension=dim, tiled=True),)

        return self.on_shards(run, (spec,))(g)[0]


@dataclass(frozen=True)
class _Tap:
    """Where one leaf's squared norm goes, and how the leaf is cut."""

    collectives: Collectives
    spec: PartitionSpec
    label: int
    num_labels: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tapped(part: Array, slot: Array, norms: Array, tap: _Tap) -> Array:
    """The whole leaf. The cotangent of `slot` is its gradient, float32 and cut; of `norms`, its norm."""
    return tap.collectives.gather(part, tap.spec)


def _forward(part: Array, slot: Array, norms: Array, tap: _Tap) -> tuple[Array, None]:
    return tap.collectives.gather(part, tap.spec), None


def _backward(tap: _Tap, residuals: None, g: Array) -> tuple[None, Array, Array]:
    g = g.astype(jnp.promote_types(g.dtype, jnp.float32))
    norms = jnp.zeros((tap.num_labels,))
    if tap.num_labels:
        squares = (g * jnp.conj(g)).real if jnp.iscomplexobj(g) else g * g
        norms = norms.at[tap.label].set(jnp.sum(squares))
    return None, tap.collectives.scatter(g, tap.spec), norms


_tapped.defvjp(_forward, _backward)


def value_and_grad(
    objective: Callable[[PyTree, PyTree], tuple[Array, Any]],
    kept: PyTree,
    rest: PyTree,
    *,
    specs: tuple[PyTree, PyTree],
    collectives: Collectives,
    labels: PyTree,
    num_labels: int,
) -> tuple[tuple[Array, Any], PyTree, Array]:
    """`jax.value_and_grad` of `objective(kept, rest)` for leaves cut over "fsdp".

    `kept` and `rest` (not differentiated) are a replica's parts, `specs` how each is cut, `labels` a
    tree like `kept` of label indices. Returns (value, aux), the gradient summed over "fsdp" and cut
    like the parameters (float32), and this replica's squared norms `[num_labels]`, which cost nothing
    for 0 labels.
    """
    degree = collectives.strategy.fsdp
    slots = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), kept
    )
    wholes = tuple(
        jax.tree.map(lambda x, spec: _whole(x, spec, degree), tree, cuts)
        for tree, cuts in ((kept, specs[0]), (rest, specs[1]))
    )

    def run(slots: PyTree, norms: Array) -> tuple[Array, Any]:
        def tapped(x: Array, slot: Array, spec: PartitionSpec, label: int) -> Part | Array:
            def gather(values: tuple[Any, ...], spec: PartitionSpec) -> Array:
                return _tapped(*values, _Tap(collectives, spec, label, num_labels))

            values = (x, slot, norms)
            part = Part(values, (True, True, False), spec, gather)
            return part if is_cut(spec) else gather(values, spec)

        def untapped(x: Array, spec: PartitionSpec) -> Part | Array:
            part = Part((x,), (True,), spec, lambda v, cut: collectives.gather(v[0], cut))
            return part if is_cut(spec) else x

        parts = (
            jax.tree.map(tapped, kept, slots, specs[0], labels),
            jax.tree.map(untapped, rest, specs[1]),
        )
        return call_late(objective, parts, wholes)

    found, (grads, norms) = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(
        slots, jnp.zeros((num_labels,))
    )
    leaves, structure = jax.tree.flatten(grads)
    flat = structure.flatten_up_to(specs[0])
    uncut = [i for i, spec in enumerate(flat) if _fsdp_dim(spec) is None]
    mine = [leaves[i] for i in uncut]
    summed = collectives.sum(mine, [flat[i] for i in uncut], (FSDP_AXIS,))
    for i, leaf in zip(uncut, summed, strict=True):
        leaves[i] = leaf
    return found, jax.tree.unflatten(structure, leaves), norms


def _whole(x: Array, spec: PartitionSpec, degree: int) -> jax.ShapeDtypeStruct:
    shape, dim = list(x.shape), _fsdp_dim(spec)
    if dim is not None:
        shape[dim] *= degree
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def is_cut(spec: PartitionSpec) -> bool:
    """Whether "fsdp" cuts a leaf."""
    return _fsdp_dim(spec) is not None


def _fsdp_dim(spec: PartitionSpec) -> int | None:
    return next((i for i, axis in enumerate(spec) if axis == FSDP_AXIS), None)
