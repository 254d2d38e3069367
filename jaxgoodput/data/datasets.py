"""`as_source`: what reads a user's data set."""

from collections.abc import Mapping
from typing import Any

from jaxgoodput.data.sources import (
    ArraySource,
    GrainSource,
    Indexing,
    SequenceSource,
    Source,
    is_array,
)
from jaxgoodput.data.streams import StreamSource

FRAMES = {"pandas", "polars", "pyarrow", "cudf", "modin"}  # libraries of tables by column


def as_source(dataset: Any, *, indexing: Indexing = "one") -> Source:
    """Return a `Source` for a user's dataset; a `Source` is returned as it is.

    The dataset may be a mapping of arrays (nested PyTrees too), one array, a tuple of arrays, a grain
    `MapDataset`, any object with `__len__` and `__getitem__` (a list of samples, a torch dataset), or
    any other iterable (`StreamSource`). `indexing` applies to objects with `__getitem__` only: see
    `SequenceSource`.

    Raises:
      TypeError: the dataset is an iterator without a state, its leaves are not numbers, or it has a batch
        size of its own and does not say what its items are.
      ValueError: the dataset is empty, or its arrays differ in length.

    >>> import numpy as np
    >>> len(as_source({"x": np.zeros((3, 2)), "y": np.zeros(3)}))
    3
    """
    if isinstance(dataset, Source):
        source = dataset
    elif isinstance(dataset, Mapping):
        # A lazy mapping, such as an npz file of numpy, is no PyTree node. A dict of its values is one.
        source = ArraySource(dict(dataset))
    elif is_array(dataset) or _is_tuple_of_arrays(dataset):
        source = ArraySource(dataset)
    elif _is_grain(dataset, "MapDataset"):
        source = GrainSource(dataset)
    elif has_own_order(dataset):
        if getattr(dataset, "batch_size", None) or getattr(dataset, "batch_sampler", None):
            raise TypeError(
                f"dataset() returned a {type(dataset).__name__} with a batch size. Its items are batches, "
                "and a run chooses its own. Return jaxgoodput.stream(loader, batched=True), which takes them "
                "apart; or, better, the data set that it reads (loader.dataset), if that has a length and "
                "[]. If its items are samples, give it batch_size=None."
            )
        source = StreamSource(dataset)
    else:
        _refuse_columns(dataset)
        source = SequenceSource(dataset, indexing=indexing)
    if len(source) < 1:
        raise ValueError(
            f"The dataset is empty: {type(dataset).__name__} has {len(source)} samples. Check the "
            f"path, split or filter that produced it."
        )
    return source


def has_own_order(dataset: Any) -> bool:
    """Return whether a data set can only be read in its own order: an iterable without random access."""
    # Hugging Face's and torch's iterable data sets have a `__getitem__` that does not give a sample.
    has_random_access = all(hasattr(type(dataset), x) for x in ("__getitem__", "__len__"))
    return hasattr(type(dataset), "__iter__") and not has_random_access


def _refuse_columns(dataset: Any) -> None:
    """Raise TypeError for a data frame, and for a list of arrays that cannot be samples of one shape."""
    frames = [x for x in type(dataset).__mro__ if x.__module__.split(".")[0] in FRAMES]
    if frames and hasattr(dataset, "columns"):
        raise TypeError(
            f"a {type(dataset).__name__} has columns, and its [] is not a sample. Return the columns as "
            "arrays: {name: np.asarray(frame[name]) for name in names}."
        )
    if isinstance(dataset, list) and len(dataset) > 1 and all(map(is_array, dataset)):
        shapes = list(dict.fromkeys(tuple(one.shape) for one in dataset))
        if len(shapes) > 1:
            raise TypeError(
                "a list holds samples, all of one shape, and these arrays have the shapes "
                f"{', '.join(map(str, shapes[:4]))}. If they are columns with one row per sample, return a "
                'tuple of them, or a dict such as {"x": inputs, "y": labels}; if they are samples, pad them '
                "to one shape."
            )


def _is_tuple_of_arrays(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(is_array(member) and len(member.shape) > 0 for member in value)
    )


def _is_grain(value: Any, name: str) -> bool:
    return any(
        base.__name__ == name and base.__module__.split(".")[0] == "grain"
        for base in type(value).__mro__
    )
