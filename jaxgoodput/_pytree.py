"""Frozen dataclasses that are PyTrees, and trees of small arrays packed into one vector.

Every value that JAX traces, donates or shards is a `@struct`. Fields marked `static()` are part of the tree's
structure and must be hashable.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

T = TypeVar("T")

_STATIC = "jaxgoodput_static"


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that is part of the structure of the PyTree, not one of its leaves."""
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={_STATIC: True})
    return dataclasses.field(default=default, metadata={_STATIC: True})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field)
)
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only dataclass that is registered as a PyTree.

    >>> @struct
    ... class Point:
    ...     x: float
    ...     name: str = static(default="p")
    >>> jax.tree.leaves(Point(x=1.0))
    [1.0]
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    meta = [f.name for f in fields if f.metadata.get(_STATIC)]
    data = [f.name for f in fields if not f.metadata.get(_STATIC)]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


def wide_dtype(*dtypes: Any) -> np.dtype:
    """Return the least type, at least float32, that holds values of these types without rounding.

    Unlike `jnp.result_type`, it works under JAX's strict type promotion.

    >>> wide_dtype(jnp.bfloat16, jnp.bool_)
    dtype('float32')
    """
    return np.result_type(np.float32, *dtypes)


def one_vector(arrays: Sequence[Any], dtype: Any) -> Array:
    """Return the elements of some small arrays, one array after the other, as a vector of this type.

    XLA makes a single operation of it. Of a concatenation it makes one for each array.

    >>> one_vector([jnp.ones((1, 2)), jnp.array(3)], jnp.float32)
    Array([1., 1., 3.], dtype=float32)
    """
    ends = list(itertools.accumulate(map(jnp.size, arrays), initial=0))
    return _with_values(jnp.zeros(ends[-1], dtype), zip(ends, arrays, strict=False))


def _with_values(vector: Any, values: Iterable[tuple[int, Any]]) -> Array:
    """Return the vector with the elements of each array from its place on."""
    index = np.arange(vector.size)
    for at, array in values:
        new = jnp.ravel(array).astype(vector.dtype)
        end = at + new.size
        if new.size != 1:
            new = jnp.pad(new, (at, vector.size - end))
        # The mask is a constant: computed, it would be an operation of its own for each array in a loop.
        vector = jnp.where((index >= at) & (index < end), new, vector)
    return vector


@struct
class PackedTree(Generic[T]):
    """A tree of small arrays, packed into one vector.

    Use it to pass many small arrays into or out of an executable: each array costs the host some microseconds
    per step.
    """

    vector: Any
    """Leaves in order, floats and bools (as 0 or 1), in the widest of their types."""
    structure: Hashable = static()
    """Structure of the tree."""
    leaves: tuple[tuple[tuple[int, ...], Any], ...] = static()
    """Shape and type of each leaf."""

    @classmethod
    def of(cls, tree: T) -> "PackedTree[T]":
        """Pack the leaves of a tree into one vector, of a float type that holds them all.

        >>> PackedTree.of({"a": jnp.ones((2, 3)), "b": jnp.array(True)}).vector.shape
        (7,)
        """
        leaves, structure = jax.tree.flatten(tree)
        arrays = [jnp.asarray(x) for x in leaves]
        kinds = tuple((x.shape, x.dtype) for x in arrays)
        dtype = wide_dtype(*(x.dtype for x in arrays))
        vector = one_vector(arrays, dtype)
        return cls(vector=vector, structure=structure, leaves=kinds)

    @property
    def tree(self) -> T:
        """The tree again, cut from the vector; leaves have their old shapes and types."""
        if isinstance(self.vector, jax.Array) and not isinstance(self.vector, Tracer):
            return _unpacked(self)  # one dispatch instead of one per leaf
        found, at = [], 0
        for shape, dtype in self.leaves:
            end = at + math.prod(shape)
            found.append(self.vector[at:end].reshape(shape).astype(dtype))
            at = end
        structure: Any = self.structure
        return jax.tree.unflatten(structure, found)

    def replaced(self, old: T, new: T) -> "PackedTree[T]":
        """Return the tree `new`, packed; leaves that are the same objects as in `old` stay where they are.

        `old` is what `tree` returned. Few changes then cost little: the vector is not made anew.
        """
        leaves = jax.tree.leaves(new)
        places = itertools.accumulate(map(jnp.size, leaves), initial=0)
        pairs = zip(jax.tree.leaves(old), leaves, strict=True)
        changed = (
            (at, now) for at, (was, now) in zip(places, pairs, strict=False) if now is not was
        )
        vector = _with_values(self.vector, changed)
        return dataclasses.replace(self, vector=vector)

    @property
    def host_tree(self) -> T:
        """The tree as numpy arrays. Waits for the computation, and compiles nothing."""
        return dataclasses.replace(self, vector=jax.device_get(self.vector)).tree


_unpacked = jax.jit(lambda packed: packed.tree)
