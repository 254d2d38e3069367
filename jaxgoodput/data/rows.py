"""Checks stacked batches, and puts a process's rows of a batch on its devices.

A batch must consist of numeric arrays with one row per sample, of the same shapes and dtypes every time. It
is checked on the host, before a wrong width, shape or structure becomes an integer that wraps around, a
silent recompilation, or an error that names no leaf.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int, PyTree, UInt

from jaxgoodput._pytree import struct


@struct
class NumberedRows:
    """A batch whose rows tell which samples they are. A loss that has a key for each sample needs it."""

    own: PyTree
    """The batch itself; leaves `[rows, ...]`."""
    numbers: Any
    """The epoch and the index of each row's sample: uint32 `[rows, 4]`, two words each, the low one first."""


def numbered(
    rows: PyTree, epochs: Int[np.ndarray, " rows"], indices: Int[np.ndarray, " rows"]
) -> NumberedRows:
    """Return a batch on the host with the epochs and the indices of its samples.

    >>> numbered({"x": np.zeros(2)}, np.array([0, 1]), np.array([7, 2**32])).numbers.tolist()
    [[0, 0, 7, 0], [1, 0, 0, 1]]
    """
    return NumberedRows(own=rows, numbers=_words(epochs, indices))


def numbered_sample(sample: PyTree) -> NumberedRows:
    """Return an abstract sample, without a batch axis, as a row of `NumberedRows`."""
    return NumberedRows(own=sample, numbers=jax.ShapeDtypeStruct((4,), np.uint32))


def _words(
    epochs: Int[np.ndarray, " rows"], indices: Int[np.ndarray, " rows"]
) -> UInt[np.ndarray, "rows 4"]:
    """Return epochs and indices as words of 32 bits, which JAX holds also without `jax_enable_x64`."""
    wide = np.stack([epochs, indices], axis=1).astype("<u8")
    return wide.view("<u4").astype(np.uint32)


def check_same_kind(
    rows: PyTree, expected: PyTree[jax.ShapeDtypeStruct] | None, count: int
) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the structure, shapes and dtypes of a batch's samples, and check that they equal `expected`.

    Shapes that change from batch to batch would compile anew each time. `expected` is None for the first
    batch.

    Raises:
      ValueError: the samples are of another kind, or there are not `count` rows; the message names the leaf.
      TypeError: a leaf is not a numeric numpy array.
    """
    if expected is not None and _is_kind(rows, expected, count):
        return expected
    named, structure = jax.tree_util.tree_flatten_with_path(rows)
    if not named:
        raise ValueError(
            "The samples of the dataset hold no numbers at all (an empty PyTree, or None). "
            "Return at least one array or number per sample."
        )
    leaves = [_kind_of_leaf(path, array, count) for path, array in named]
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


def _kind_of_leaf(path: Any, array: Any, count: int) -> jax.ShapeDtypeStruct:
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
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)


def _is_kind(rows: PyTree, expected: PyTree[jax.ShapeDtypeStruct], count: int) -> bool:
    """Return whether a batch has the expected structure, types and shapes; quick, as it prepares no error."""
    leaves, structure = jax.tree.flatten(rows)
    wanted, old_structure = jax.tree.flatten(expected)
    return structure == old_structure and all(
        isinstance(x, np.ndarray) and x.shape == (count, *w.shape) and x.dtype == w.dtype
        for x, w in zip(leaves, wanted, strict=True)
    )


def narrow(rows: PyTree[np.ndarray]) -> PyTree[np.ndarray]:
    """Convert a batch to the widths that JAX computes in: 64-bit leaves to 32 bits, unless x64 is enabled.

    Raises:
      ValueError: a number does not fit; the message names the leaf, the row and the value. JAX would wrap an
        integer around, and make a float infinite.
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
        with np.errstate(over="ignore"):
            narrowed = array.astype(dtype)
        if dtype.kind in "fc":
            _require_finite(path, array, narrowed)
        return narrowed

    return jax.tree_util.tree_map_with_path(convert, rows)


def _require_finite(path: Any, wide: np.ndarray, narrowed: np.ndarray) -> None:
    """Raise ValueError if a finite number became infinite."""
    lost = np.isinf(narrowed)
    if lost.any() and (lost := lost & np.isfinite(wide)).any():
        place = np.argwhere(lost)[0]
        raise ValueError(
            f"Leaf {leaf_name(path)} holds {wide[tuple(place)]!s} in row {place[0]} of the batch, which is "
            f"beyond the range of {narrowed.dtype}, the widest type that JAX uses unless jax_enable_x64 is "
            f"set: it would become infinite. Scale, clip or mask such values before they reach the loader."
        )


def stack(items: list[Any], indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
    """Stack items into one PyTree of arrays `[n, ...]`. An error names two items that differ."""
    refuse_lists(items[0], int(indices[0]))
    flat = [jax.tree.flatten(item) for item in items]
    structure = flat[0][1]
    for index, (_, other) in zip(indices, flat, strict=True):
        if other != structure:
            raise ValueError(
                f"Samples {indices[0]} and {index} differ in structure: {structure} against "
                f"{other}. Every sample must be the same PyTree; give missing fields a default."
            )
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(items[0])[0]]
    stacked = []
    for leaf, path in enumerate(paths):
        rows = [np.asarray(leaves[leaf]) for leaves, _ in flat]
        check_numeric(path, rows[0].dtype)
        for index, row in zip(indices, rows, strict=True):
            if row.shape != rows[0].shape or row.dtype != rows[0].dtype:
                raise ValueError(
                    f"Leaf {leaf_name(path)} is {rows[0].dtype}{list(rows[0].shape)} in sample "
                    f"{indices[0]} but {row.dtype}{list(row.shape)} in sample {index}. Samples of "
                    f"a batch are stacked: pad or crop them to one shape, and convert to one "
                    f"dtype, in the dataset's __getitem__."
                )
        stacked.append(np.stack(rows))
    return jax.tree.unflatten(structure, stacked)


def refuse_lists(item: Any, index: int) -> None:
    """Raise TypeError if a field is a list of numbers, each of which JAX would take for a leaf."""
    named = jax.tree_util.tree_flatten_with_path(item, is_leaf=_is_list_of_numbers)[0]
    for path, field in named:
        if path and _is_list_of_numbers(field):
            kinds = {type(x).__name__ for x in field}
            what = f"{kinds.pop()}s" if len(kinds) == 1 else "numbers"
            raise TypeError(
                f"sample {index} {leaf_name(path)} is a list of {len(field)} {what}: return one array per "
                "field (numpy.asarray(...)), of one length in all samples."
            )


def _is_list_of_numbers(x: Any) -> bool:
    """Return whether `x` is a list of numbers, or of lists of numbers at any depth."""
    return isinstance(x, list) and bool(x) and all(_is_number(one) for one in x)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | complex | np.number) or _is_list_of_numbers(x)


def held_rows(
    sharding: NamedSharding, num_rows: int, process_index: int | None = None
) -> Int[np.ndarray, " held"]:
    """Return the rows of a batch that the devices of a process hold, in ascending order.

    A single process holds all rows. If a copy of the model spans several processes, each of them holds the
    copy's rows. `process_index` defaults to this process.

    Raises ValueError if the rows cannot be split evenly over the devices.
    """
    rows = np.arange(num_rows)
    own = jax.process_index() if process_index is None else process_index
    places = sharding.devices_indices_map((num_rows,)).items()
    mine = [rows[place] for device, place in places if device.process_index == own]
    return np.unique(np.concatenate(mine))


def parts_of(sharding: NamedSharding, process_index: int, process_count: int) -> tuple[int, int]:
    """Return how many meshes share a batch, and the number of the mesh of this process.

    Each process has a mesh of its own, or several processes share one: all of them, or groups of equal size.
    `sharding` is on this process's mesh.
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
    """Put a batch of `num_rows` rows on the devices of `sharding`.

    `tree` has the rows `held`, as `held_rows` gives them. If the devices belong to several processes, all of
    them must call this, each with its own rows.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(rows: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(num_rows)
            start = int(np.searchsorted(held, first))
            return rows[start : start + last - first]

        with jax.transfer_guard("allow"):  # this transfer is intended
            return jax.make_array_from_callback((num_rows, *rows.shape[1:]), sharding, part)

    return jax.tree.map(one, tree)


def check_numeric(path: Any, dtype: np.dtype) -> None:
    """Raise a TypeError that names the leaf if no device can hold `dtype`."""
    # jnp knows bfloat16 and the other extension types, which numpy calls void.
    if not (jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)):
        raise TypeError(
            f"Leaf {leaf_name(path)} of the samples has dtype {dtype}, which no device can hold. "
            f"Turn text into token or category numbers, dates into seconds, and rows of unequal "
            f"length into padded ones, before they reach the loader."
        )


def digest(rows: PyTree) -> str:
    """Return a digest of samples: the names, types, shapes and values of their leaves.

    >>> digest({"x": np.zeros(2)}) == digest({"x": np.zeros((1, 2))})
    False
    """
    total = hashlib.sha256()
    add_to(total, rows)
    return total.hexdigest()


def add_to(total: Any, rows: PyTree) -> None:
    """Add samples to a digest of `hashlib`."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(rows)[0]:
        leaf = np.asarray(leaf)
        total.update(f"{leaf_name(path)} {leaf.dtype} {leaf.shape} ".encode())
        total.update(leaf.tobytes())


def leaf_name(path: Any) -> str:
    """Return a readable name for the path of a leaf in a sample, for error messages."""
    return jax.tree_util.keystr(path) or "(the sample itself)"
