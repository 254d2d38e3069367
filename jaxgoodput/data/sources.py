"""Data sets as sources: anything with random access, and streams, read as stacked numpy batches.

A `Source` answers two questions: how many samples there are, and what the samples at given indices hold,
stacked. A sample is any PyTree of numbers. Samples that cannot be stacked are errors that name the sample and
the leaf, because users may never have looked at that sample.
"""

import abc
import numbers
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int, PyTree

from jaxgoodput.data.rows import (
    check_numeric,
    check_same_kind,
    leaf_name,
    narrow,
    stack,
)

Indexing = Literal["one", "array", "getitems"]
ENDLESS = sys.maxsize  # length of an endless source; grain uses the same number
KINDS = (
    "Pass a dict of arrays, an object with __len__ and __getitem__, a grain MapDataset, a jaxgoodput Source, "
    "or anything iterable (see jaxgoodput.stream)."
)


class Source(abc.ABC):
    """Random access to equally shaped samples. Subclass it to read a format of your own.

    `batch` is called by the loader's thread, one call at a time.
    """

    dataset: Any = None
    """The user's own object, if this reads one."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples, which must not change."""

    @abc.abstractmethod
    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """Return the samples at `indices`, stacked: a PyTree of numeric arrays `[n, ...]`.

        Return new arrays every time, because a device may still read them after this call.
        """

    def example(self) -> PyTree[np.ndarray]:
        """Return one sample, stacked: a PyTree of numeric arrays `[1, ...]`, for their shapes and types."""
        return self.batch(np.zeros(1, np.int64))

    def batch_of_epochs(
        self, indices: Int[np.ndarray, " n"], epochs: Int[np.ndarray, " n"]
    ) -> PyTree[np.ndarray]:
        """Return the samples at `indices`, augmented for their `epochs`. Override it for random augmentation.

        Training calls this method; evaluations call it with epoch 0. Draw from (index, epoch) alone, for
        example with `np.random.default_rng([seed, index, epoch])`, so that a resumed run reads the same
        again.
        """
        return self.batch(indices)


class ArraySource(Source):
    """A PyTree of arrays in memory, with one row per sample.

    Arrays of other libraries are converted once, at construction; a `numpy.memmap` stays on disk.

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
                    f"and {other} has {other_size}. Rows of all arrays: {sizes}. Give all arrays the same "
                    f"samples, with the axis of samples first."
                )
        self.arrays: PyTree[np.ndarray] = jax.tree_util.tree_unflatten(structure, leaves)
        self._size = size

    def __len__(self) -> int:
        """Return the number of rows of the arrays, which is the number of samples."""
        return self._size

    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """Return the rows at `indices`, gathered into new arrays."""
        return jax.tree.map(lambda rows: _gathered(rows, indices), self.arrays)


class SequenceSource(Source):
    """Any object with `__len__` and `__getitem__` whose items are PyTrees of equal structure.

    `indexing` declares how to read the dataset; it is never guessed:

    * "one" calls `dataset[i]` for each sample.
    * "getitems" calls `dataset.__getitems__([i, ...])` once, which returns a list of samples.
    * "array" calls `dataset[indices]` once, which returns the stacked batch.

    Scalars become arrays. Lists and tuples inside an item are PyTree nodes, not arrays, and a field that is a
    list of numbers is refused. A dataset with a method `item_of_epoch(index, epoch)` is read through it,
    sample by sample.

    Raises (from `batch`):
      RuntimeError: the dataset raised an error. The message has the sample's index; the cause is chained.
      ValueError, TypeError: items cannot be stacked. The message names both samples and the leaf.
    """

    num_readers = 1
    """Recommended number of reading threads: 1 for other data sets, whose `__getitem__` may not be
    thread-safe."""

    def __init__(self, dataset: Any, *, indexing: Indexing = "one"):
        if indexing not in ("one", "array", "getitems"):
            raise ValueError(
                f"indexing={indexing!r} is not a way to read a dataset. Use 'one' (dataset[i]), "
                f"'array' (dataset[indices]) or 'getitems' (dataset.__getitems__(indices))."
            )
        takes_epochs = hasattr(type(dataset), "item_of_epoch")
        needed = ["__len__"] + ["__getitem__"] * (not takes_epochs)
        needed += ["__getitems__"] * (indexing == "getitems")
        missing = [name for name in needed if not hasattr(type(dataset), name)]
        if missing:
            raise TypeError(
                f"A dataset needs random access, but {type(dataset).__name__} has no "
                f"{' and no '.join(missing)}. {KINDS}"
            )
        self.dataset = dataset
        self._indexing = indexing
        self._size = len(dataset)
        self._takes_epochs = takes_epochs

    def __len__(self) -> int:
        """Return the number of items at the time when the source was made."""
        return self._size

    @property
    def is_read_one_by_one(self) -> bool:
        """Whether a batch is read by a call of `sample` for each sample, instead of one for all."""
        return self._indexing == "one" or self._takes_epochs

    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """Return the items at `indices`, augmented as in epoch 0, with the arrays of each leaf stacked."""
        return self.batch_of_epochs(indices, np.zeros_like(indices))

    def batch_of_epochs(
        self, indices: Int[np.ndarray, " n"], epochs: Int[np.ndarray, " n"]
    ) -> PyTree[np.ndarray]:
        """Return the items at `indices`, augmented for their `epochs`; arrays of each leaf are stacked."""
        if self.is_read_one_by_one:
            pairs = zip(indices.tolist(), epochs.tolist(), strict=True)
            return self.stacked([self.sample(index, epoch) for index, epoch in pairs], indices)
        if self._indexing == "array":
            rows = _read(lambda: self.dataset[indices], indices)
            return _checked_rows(rows, len(indices))
        items = list(_read(lambda: self.dataset.__getitems__(indices.tolist()), indices))
        if len(items) != len(indices):
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ returned {len(items)} items for "
                f"{len(indices)} indices. It must return one item per index, in their order."
            )
        return self.stacked(items, indices)

    def sample(self, index: int, epoch: int) -> Any:
        """Return one item, augmented for its epoch."""
        try:
            return self._item(index, epoch)
        except Exception as error:
            raise RuntimeError(failure(f"sample {index}", error)) from error

    def stacked(self, items: list[Any], indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """Stack the arrays of items that `sample` returned into a batch, leaf by leaf."""
        return stack(items, indices)

    def _item(self, index: int, epoch: int) -> Any:
        if self._takes_epochs:
            return self.dataset.item_of_epoch(index, epoch)
        return self.dataset[index]


class GrainSource(SequenceSource):
    """A grain `MapDataset`, read by random access. grain itself is not imported here.

    Sample i of epoch e is `dataset[e * len(dataset) + i]`. grain seeds its random transforms with that index,
    so they differ from epoch to epoch, and a resumed run repeats them. Leave shuffling and batching to the
    loader. An infinite dataset (`.repeat()` without a count) is read in its own order, without epochs.

    Raises:
      ValueError (from `batch`): the dataset is filtered.
    """

    num_readers = 16
    """Recommended number of reading threads: the default of grain's own `ReadOptions`."""

    def _item(self, index: int, epoch: int) -> Any:
        return self.dataset[index if is_endless(self) else epoch * len(self) + index]

    def sample(self, index: int, epoch: int) -> Any:
        """Return one item, augmented for its epoch."""
        item = super().sample(index, epoch)
        if item is None:
            raise ValueError(
                f"The grain MapDataset has no sample {index}: it was filtered, and a filtered "
                f"MapDataset has holes, so samples cannot be counted. Filter the records before "
                f"they become a MapDataset, for example with a list of the indices to keep."
            )
        return item


def is_endless(source: Source) -> bool:
    """Return whether a source has no end, and therefore no epochs."""
    return len(source) >= ENDLESS


def abstract_sample(source: Source) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a sample as the devices will hold it. Reads one sample.

    >>> abstract_sample(ArraySource({"x": np.zeros((3, 2))}))
    {'x': ShapeDtypeStruct(shape=(2,), dtype=float32)}
    """
    rows = source.example()
    check_same_kind(rows, None, 1)
    return check_same_kind(narrow(rows), None, 1)


def _as_rows(path: Any, leaf: Any) -> np.ndarray:
    if not is_array(leaf):
        raise TypeError(
            f"Leaf {leaf_name(path)} of the dataset is a {type(leaf).__name__}, not an array with "
            f"one row per sample. Wrap lists as numpy.asarray(...)."
        )
    rows = np.asarray(leaf)
    if rows.ndim == 0:
        raise ValueError(
            f"Leaf {leaf_name(path)} of the dataset is a single number, not an array with one row "
            f"per sample. Constants belong in the loss, not in the dataset."
        )
    if rows.dtype == object and all(isinstance(x, numbers.Number) for x in rows.ravel()):
        raise TypeError(
            f"Leaf {leaf_name(path)} of the dataset has dtype object, which no device can hold, and its "
            'values are all numbers. Convert it with .astype("float32"), or to the type that they have.'
        )
    check_numeric(path, rows.dtype)
    return rows


def _gathered(rows: np.ndarray, indices: Int[np.ndarray, " n"]) -> np.ndarray:
    """Return the rows at `indices`, in a new array."""
    # `take` is faster, but copies the whole array first if its rows are not contiguous. They are not in an
    # array that pandas has made of several columns.
    return rows.take(indices, axis=0) if rows.flags.c_contiguous else rows[indices]


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
        # The dataset may return a view of memory that it will reuse.
        return array if array.flags.owndata else array.copy()

    return jax.tree_util.tree_map_with_path(check, rows)


def _read(read: Callable[[], Any], indices: Int[np.ndarray, " n"]) -> Any:
    try:
        return read()
    except Exception as error:
        shown = indices[:8].tolist()
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        raise RuntimeError(failure(f"samples {shown}{more}", error)) from error


def failure(what: str, error: Exception) -> str:
    """Return the message of a read that failed by an error of the user's own code."""
    return (
        f"Reading {what} of the dataset failed: {type(error).__name__}: {error}. No sample is "
        f"skipped silently: repair the dataset, or return a placeholder whose loss has weight 0."
    )


def is_array(value: Any) -> bool:
    """Return whether a value is an array, of any library."""
    return hasattr(value, "__array__") and hasattr(value, "shape") and hasattr(value, "dtype")
