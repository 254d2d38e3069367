"""Frozen dataclasses that are PyTrees.

`@struct` is the one way a value that JAX must see (traced, donated, sharded) is written down; fields
marked `static()` are part of the structure and must be hashable.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

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
