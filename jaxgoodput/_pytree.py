"""Frozen dataclasses that are PyTrees, and many small arrays as one.

`@struct` is the one way a value that JAX must see (traced, donated, sharded) is written down; fields
marked `static()` are part of the structure and must be hashable.
"""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, Generic, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

T = TypeVar("T")

_STATIC = "jaxgoodput_static"


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that belongs to the structure of the PyTree rather than to its leaves."""
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={_STATIC: True})
    return dataclasses.field(default=default, metadata={_STATIC: True})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field)
)
def struct(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass registered as a PyTree.

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


@struct
class PackedTree(Generic[T]):
    """A tree of small arrays as one vector: every array that goes into and out of an executable costs the
    host some microseconds per step.
    """

    vector: Any
    """All leaves, floats and bools (0 or 1), one behind the other, in the widest of their types."""
    structure: Hashable = static()
    """Of the tree."""
    leaves: tuple[tuple[tuple[int, ...], Any], ...] = static()
    """Shape and type of each leaf."""

    @classmethod
    def of(cls, tree: T) -> "PackedTree[T]":
        """The tree in one vector.

        >>> Packed.of({"a": jnp.ones((2, 3)), "b": jnp.array(True)}).vector.shape
        (7,)
        """
        leaves, structure = jax.tree.flatten(tree)
        arrays = [jnp.asarray(x) for x in leaves]
        kinds = tuple((x.shape, x.dtype) for x in arrays)
        dtype = jnp.result_type(jnp.float32, *(x.dtype for x in arrays))
        vector = jnp.concatenate([jnp.ravel(x).astype(dtype) for x in arrays])
        return cls(vector=vector, structure=structure, leaves=kinds)

    @property
    def tree(self) -> T:
        """What was packed."""
        if isinstance(self.vector, jax.Array) and not isinstance(self.vector, Tracer):
            return _unpacked(self)  # leaf by leaf it would be a hundred dispatches
        found, at = [], 0
        for shape, dtype in self.leaves:
            end = at + math.prod(shape)
            found.append(self.vector[at:end].reshape(shape).astype(dtype))
            at = end
        structure: Any = self.structure
        return jax.tree.unflatten(structure, found)

    @property
    def host_tree(self) -> T:
        """Likewise, of numpy arrays, and without compiling anything; waits for whatever computes it."""
        return dataclasses.replace(self, vector=np.asarray(self.vector)).tree


_unpacked = jax.jit(lambda packed: packed.tree)
