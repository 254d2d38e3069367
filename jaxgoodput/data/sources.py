"""Anything with random access, read as stacked numpy batches.

A `Source` answers two questions: how many samples, and the samples at these indices, stacked. What
a sample is, is up to the user: any PyTree of numbers. Samples that cannot be stacked are errors
that name the sample and the leaf, since they come from data nobody has looked at.
"""

import abc
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int, PyTree

from jaxgoodput.data.rows import check_numeric, check_same_kind, leaf_name, narrow

Indexing = Literal["one", "array", "getitems"]


class Source(abc.ABC):
    """Random access to equally shaped samples; subclass it to read a format of your own.

    `batch` is called from the loader's thread, one call at a time.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of samples; does not change."""

    @abc.abstractmethod
    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """The samples at `indices`, stacked: a PyTree of numeric arrays `[n, ...]`.

        The arrays must be fresh: a device may go on reading them after this call.
        """


class ArraySource(Source):
    """A PyTree of arrays that share their leading dimension, the samples.

    Arrays of other libraries are converted once, here; a `numpy.memmap` stays on disk.

    Raises:
      TypeError: a leaf is not an array of numbers.
      ValueError: there are no leaves, or their leading dimensions differ.
    """

    def __init__(self, arrays: PyTree):
        named, structure = jax.tree_util.tree_flatten_with_path(arrays)
        if not named:
            raise ValueError(
                "The dataset holds no arrays. Pass for example "
                "{'image': images, 'label': labels}, each array with one row per sample."
            )
        leaves = [_as_rows(path, leaf) for path, leaf in named]
        sizes = {leaf_name(path): len(leaf) for (path, _), leaf in zip(named, leaves, strict=True)}
        (first, size), *_ = sizes.items()
        for other, other_size in sizes.items():
            if other_size != size:
                raise ValueError(
                    f"The arrays of a dataset have one row per sample, but {first} has {size} rows "
                    f"and {other} has {other_size}. Sizes of all: {sizes}. Cut them to the same "
                    f"samples, or put the axis of samples first."
                )
        self._arrays = jax.tree_util.tree_unflatten(structure, leaves)
        self._size = size

    def __len__(self) -> int:
        """Number of rows."""
        return self._size

    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """The rows at `indices`, gathered into new arrays."""
        return jax.tree.map(lambda rows: rows.take(indices, axis=0), self._arrays)


class SequenceSource(Source):
    """Any object with `__len__` and `__getitem__`, whose items are PyTrees of equal structure.

    `indexing` declares how to read it, and is never guessed: "one" calls `dataset[i]` per sample;
    "getitems" calls `dataset.__getitems__([i, ...])` once, for a list of samples; "array" calls
    `dataset[indices]` once, for the stacked batch. Scalars become arrays. Lists and tuples inside
    an item are PyTree nodes, not arrays.

    Raises (from `batch`):
      RuntimeError: the dataset raised; the message has the sample's index, the cause is chained.
      ValueError, TypeError: items that cannot be stacked, naming both samples and the leaf.
    """

    def __init__(self, dataset: Any, *, indexing: Indexing = "one"):
        if indexing not in ("one", "array", "getitems"):
            raise ValueError(
                f"indexing={indexing!r} is not a way to read a dataset. Use 'one' (dataset[i]), "
                f"'array' (dataset[indices]) or 'getitems' (dataset.__getitems__(indices))."
            )
        needed = ["__len__", "__getitem__"] + ["__getitems__"] * (indexing == "getitems")
        missing = [name for name in needed if not hasattr(type(dataset), name)]
        if missing:
            raise TypeError(
                f"A dataset needs random access, but {type(dataset).__name__} has no "
                f"{' and no '.join(missing)}. Batches of any size are cut from one global order, "
                f"which a stream cannot do: pass a dict of arrays, an object with __len__ and "
                f"__getitem__, a grain MapDataset, or a jaxgoodput Source."
            )
        self._dataset = dataset
        self._indexing = indexing
        self._size = len(dataset)

    def __len__(self) -> int:
        """Number of items when the source was made."""
        return self._size

    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """The items at `indices`, stacked leaf by leaf."""
        if self._indexing == "array":
            rows = _read(lambda: self._dataset[indices], indices)
            return _checked_rows(rows, len(indices))
        if self._indexing == "getitems":
            items = list(_read(lambda: self._dataset.__getitems__(indices.tolist()), indices))
            if len(items) != len(indices):
                raise ValueError(
                    f"{type(self._dataset).__name__}.__getitems__ returned {len(items)} items for "
                    f"{len(indices)} indices. It must return one item per index, in their order."
                )
        else:
            items = [self._read_one(i) for i in indices.tolist()]
        return _stack(items, indices)

    def _read_one(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise RuntimeError(_failure(f"sample {index}", error)) from error


class GrainSource(SequenceSource):
    """A grain `MapDataset`, read by random access; grain itself is not imported here.

    Leave shuffling, repetition and batching to the cursor: it repeats and shuffles every epoch
    anew.

    Raises:
      ValueError: the dataset is infinite (`.repeat()` without a count), or, from `batch`, filtered.
    """

    def __init__(self, dataset: Any):
        super().__init__(dataset)
        if len(self) >= sys.maxsize:
            raise ValueError(
                "The grain MapDataset is infinite, so it has no epochs to count. Remove .repeat(): "
                "the cursor goes through the dataset as often as training needs."
            )

    def _read_one(self, index: int) -> Any:
        item = super()._read_one(index)
        if item is None:
            raise ValueError(
                f"The grain MapDataset has no sample {index}: it was filtered, and a filtered "
                f"MapDataset has holes, so samples cannot be counted. Filter the records before "
                f"they become a MapDataset, for example with a list of the indices to keep."
            )
        return item


def as_source(dataset: Any, *, indexing: Indexing = "one") -> Source:
    """A `Source` over what the user has; a `Source` is returned as it is.

    Accepted: a mapping of arrays (nested PyTrees too), one array, a tuple of arrays, a grain
    `MapDataset`, or any object with `__len__` and `__getitem__` (a list of samples, a torch
    dataset). `indexing` applies to the last kind only: see `SequenceSource`.

    Raises:
      TypeError: no random access, or leaves that are no numbers.
      ValueError: the dataset is empty, or its arrays differ in length.

    >>> len(as_source({"x": np.zeros((3, 2)), "y": np.zeros(3)}))
    3
    """
    if isinstance(dataset, Source):
        source = dataset
    elif isinstance(dataset, Mapping):
        # A lazy mapping (numpy's npz files) is no PyTree node; a dict of its values is.
        source = ArraySource(dict(dataset))
    elif _is_array(dataset) or _is_tuple_of_arrays(dataset):
        source = ArraySource(dataset)
    elif _is_grain(dataset, "MapDataset"):
        source = GrainSource(dataset)
    elif _is_grain(dataset, "IterDataset") or _is_grain(dataset, "DataLoader"):
        raise TypeError(
            f"grain's {type(dataset).__name__} is a stream without random access, so it cannot "
            f"change its batch size without losing samples. Pass the MapDataset it was made from, "
            f"before .to_iter_dataset() and without .batch()."
        )
    else:
        source = SequenceSource(dataset, indexing=indexing)
    if len(source) < 1:
        raise ValueError(
            f"The dataset is empty: {type(dataset).__name__} has {len(source)} samples. Check the "
            f"path, split or filter that produced it."
        )
    return source


def abstract_sample(source: Source) -> PyTree[jax.ShapeDtypeStruct]:
    """Shape and dtype of one sample as the devices will hold it; reads sample 0.

    >>> abstract_sample(as_source({"x": np.zeros((3, 2))}))
    {'x': ShapeDtypeStruct(shape=(2,), dtype=float32)}
    """
    rows = source.batch(np.zeros(1, np.int64))
    check_same_kind(rows, None, 1)
    return check_same_kind(narrow(rows), None, 1)


def _as_rows(path: Any, leaf: Any) -> np.ndarray:
    if not _is_array(leaf):
        raise TypeError(
            f"Leaf {leaf_name(path)} of the dataset is a {type(leaf).__name__}, not an array with "
            f"one row per sample. Wrap lists as numpy.asarray(...)."
        )
    rows = np.asarray(leaf)
    if rows.ndim == 0:
        raise ValueError(
            f"Leaf {leaf_name(path)} of the dataset is a single number, not an array with one row "
            f"per sample. Constants belong into the loss, not into the dataset."
        )
    check_numeric(path, rows.dtype)
    return rows


def _checked_rows(rows: PyTree, count: int) -> PyTree[np.ndarray]:
    def check(path: Any, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.ndim == 0 or len(array) != count:
            raise ValueError(
                f"dataset[indices] returned {leaf_name(path)} of shape {array.shape} for {count} "
                f"indices; indexing='array' promises one row per index. Use indexing='one' "
                f"otherwise."
            )
        check_numeric(path, array.dtype)
        # The dataset may hand out a view of memory that it will reuse.
        return array if array.flags.owndata else array.copy()

    return jax.tree_util.tree_map_with_path(check, rows)


def _stack(items: list[Any], indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
    """The items as one PyTree of arrays `[n, ...]`, or an error naming the two that disagree."""
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


def _read(read: Callable[[], Any], indices: Int[np.ndarray, " n"]) -> Any:
    try:
        return read()
    except Exception as error:
        shown = indices[:8].tolist()
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        raise RuntimeError(_failure(f"samples {shown}{more}", error)) from error


def _failure(what: str, error: Exception) -> str:
    return (
        f"Reading {what} of the dataset failed: {type(error).__name__}: {error}. No sample is "
        f"skipped silently: mend the dataset, or return a placeholder whose loss has weight 0."
    )


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype")


def _is_tuple_of_arrays(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(_is_array(member) and len(member.shape) > 0 for member in value)
    )


def _is_grain(value: Any, name: str) -> bool:
    return any(
        base.__name__ == name and base.__module__.split(".")[0] == "grain"
        for base in type(value).__mro__
    )
