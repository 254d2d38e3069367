"""What a stacked batch must be: numeric arrays, one row per sample, the same kind every time.

Checked on the host, before a wrong width, shape or structure becomes a wrapped integer, a silent
recompilation or an error that names no leaf. And which of its rows a process needs, to put them on its
devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int, PyTree


def check_same_kind(
    rows: PyTree, expected: PyTree[jax.ShapeDtypeStruct] | None, count: int
) -> PyTree[jax.ShapeDtypeStruct]:
    """The kind of the batch's samples (structure, shapes, dtypes), the same as `expected`.

    Shapes that change from batch to batch would compile anew each time; `None` expects nothing yet.

    Raises:
      ValueError: another kind, or not `count` rows, naming the leaf and both.
      TypeError: leaves that are not numeric numpy arrays.
    """
    if expected is not None and _is_kind(rows, expected, count):
        return expected
    named, structure = jax.tree_util.tree_flatten_with_path(rows)
    if not named:
        raise ValueError(
            "The samples of the dataset hold no numbers at all (an empty PyTree, or None). "
            "Return at least one array or number per sample."
        )
    leaves = []
    for path, array in named:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"Source.batch returned leaf {leaf_name(path)} as {type(array).__name__}; it must "
                f"return numpy arrays with one row per sample. Convert with numpy.asarray."
            )
        check_numeric(path, array.dtype)
        if array.ndim == 0 or len(array) != count:
            raise ValueError(
                f"Source.batch returned leaf {leaf_name(path)} of shape {array.shape} for {count} "
                f"samples; it must have one row per sample."
            )
        leaves.append(jax.ShapeDtypeStruct(array.shape[1:], array.dtype))
    kind = jax.tree.unflatten(structure, leaves)
    if expected is None:
        return kind
    old_leaves, old_structure = jax.tree.flatten(expected)
    if old_structure != structure:
        raise ValueError(
            f"The samples changed their structure from {old_structure} to {structure} between two "
            f"batches. Every sample must be the same PyTree."
        )
    for (path, _), old, new in zip(named, old_leaves, leaves, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"Leaf {leaf_name(path)} of the samples changed from {old.dtype}{list(old.shape)} "
                f"to {new.dtype}{list(new.shape)} between two batches. Every new shape would "
                f"compile the step again: pad or crop to one shape, and convert to one dtype."
            )
    return kind


def _is_kind(rows: PyTree, expected: PyTree[jax.ShapeDtypeStruct], count: int) -> bool:
    """Whether a batch is as expected: the usual case, without names for errors."""
    leaves, structure = jax.tree.flatten(rows)
    wanted, old_structure = jax.tree.flatten(expected)
    return structure == old_structure and all(
        isinstance(x, np.ndarray) and x.shape == (count, *w.shape) and x.dtype == w.dtype
        for x, w in zip(leaves, wanted, strict=True)
    )


def narrow(rows: PyTree[np.ndarray]) -> PyTree[np.ndarray]:
    """The batch in the widths that JAX computes in: 64-bit leaves as 32-bit ones, unless x64 is on.

    Raises:
      ValueError: an integer does not fit, naming the leaf and the value; JAX would wrap it around.
    """

    def convert(path: Any, array: np.ndarray) -> np.ndarray:
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        if dtype == array.dtype:
            return array
        if dtype.kind in "iu" and array.size:
            limits, low, high = np.iinfo(dtype), array.min(), array.max()
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"Leaf {leaf_name(path)} holds {low if low < limits.min else high}, which "
                    f"does not fit into {dtype}, the widest integer that JAX uses unless "
                    f"jax_enable_x64 is set. Map large identifiers to 0 .. n-1, or hash them, "
                    f"before they reach the loader."
                )
        return array.astype(dtype)

    return jax.tree_util.tree_map_with_path(convert, rows)


def held_rows(
    sharding: NamedSharding, num_rows: int, process_index: int | None = None
) -> Int[np.ndarray, " held"]:
    """The rows of a batch that the devices of a process hold, ascending; all, where there is one process.

    `process_index`: of which process; None: of this one. Where a copy of the model lies on devices of several
    processes, each of them holds its rows.

    Raises ValueError where the rows cannot be cut evenly over the devices.
    """
    rows = np.arange(num_rows)
    own = jax.process_index() if process_index is None else process_index
    places = sharding.devices_indices_map((num_rows,)).items()
    mine = [rows[place] for device, place in places if device.process_index == own]
    return np.unique(np.concatenate(mine))


def parts_of(sharding: NamedSharding, process_index: int, process_count: int) -> tuple[int, int]:
    """How many meshes like that of `sharding` share a batch, and the number of the one of this process.

    Each process has one of its own, or several share one: all of them, or groups of one size.
    """
    size = len({device.process_index for device in sharding.device_set})
    return process_count // size, process_index // size


def put_rows(
    tree: PyTree[np.ndarray],
    held: Int[np.ndarray, " held"],
    sharding: NamedSharding,
    *,
    num_rows: int,
) -> PyTree[jax.Array]:
    """A batch of `num_rows` rows on the devices of `sharding`, from those that `held_rows` says.

    Where the devices are of several processes, all of them come here, each with its own rows.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(rows: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(num_rows)
            start = int(np.searchsorted(held, first))
            return rows[start : start + last - first]

        with jax.transfer_guard("allow"):  # it is meant
            return jax.make_array_from_callback((num_rows, *rows.shape[1:]), sharding, part)

    return jax.tree.map(one, tree)


def check_numeric(path: Any, dtype: np.dtype) -> None:
    """Raise a TypeError that names the leaf if a device cannot hold `dtype`."""
    # jnp knows bfloat16 and the other extension types, which numpy calls void.
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"Leaf {leaf_name(path)} of the samples has dtype {dtype}, which no device can hold. "
            f"Turn text into token or category numbers, dates into seconds, and rows of unequal "
            f"length into padded ones, before they reach the loader."
        )


def leaf_name(path: Any) -> str:
    """How an error names a leaf of a sample."""
    return jax.tree_util.keystr(path) or "(the sample itself)"
