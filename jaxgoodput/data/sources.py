"""Data sets as sources: anything with random access, and streams, read as stacked numpy batches.

A `Source` answers two questions: how many samples there are, and what the samples at given indices hold,
stacked. A sample is any PyTree of numbers. Samples that cannot be stacked are errors that name the sample and
the leaf, because users may never have looked at that sample.
"""

import abc
import dataclasses
import json
import numbers
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int, PyTree

from jaxgoodput.data.rows import check_numeric, check_same_kind, digest, leaf_name, narrow

Indexing = Literal["one", "array", "getitems"]
NUM_PROBED = 2  # samples of a stream before and behind the state that `begin` sets it back to
ENDLESS = sys.maxsize  # length of an endless source; grain uses the same number
KINDS = (
    "Pass a dict of arrays, an object with __len__ and __getitem__, a grain MapDataset, a jaxgoodput Source, "
    "or a stream: something iterable whose iterator has get_state() and set_state(state), or that has "
    "state_dict() and load_state_dict(state)."
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
            raise RuntimeError(_failure(f"sample {index}", error)) from error

    def stacked(self, items: list[Any], indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """Stack the arrays of items that `sample` returned into a batch, leaf by leaf."""
        return _stack(items, indices)

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


@dataclass(frozen=True)
class StreamState:
    """A stream's own state at a place in the stream, from which the stream can continue."""

    place: int
    """Number of samples before this place, since the beginning of the stream."""
    state: str
    """The stream's own state, as JSON, or as bytes in hexadecimal."""
    is_bytes: bool = False
    """Whether `state` is bytes in hexadecimal."""
    is_pickle: bool = False
    """Whether these bytes are a pickle of the state, which JSON could not hold."""
    first: str | None = None
    """Digest of the sample at `place`; None if it is not known, or the stream draws samples anew."""
    replays: bool = False
    """Whether the stream can only be set back to its beginning, so that all samples are read again."""


# The methods that save and restore the state of an iterator, or of the iterable that makes iterators.
METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class StreamSource(Source):
    """An iterator with a state that can be saved. A sample's index is its place in the stream.

    `stream` is iterable. Its iterator has `get_state()` (JSON values, or bytes) and `set_state(state)`: a
    grain `IterDataset` or `DataLoader`, or an iterator of your own. Or the iterator, or the stream itself,
    has `state_dict()` (anything that can be pickled) and `load_state_dict(state)`: a Hugging Face
    `IterableDataset`, a `StatefulDataLoader` of torchdata. If the stream itself has them, a new iterator is
    made after loading.

    Samples are kept from when they are read until they are released, so that they can be divided into batches
    of another size. The stream's state is saved before every read of several samples. A resumed run returns
    to such a state, and skips the samples that were used. Each sample is used exactly once if the stream
    repeats the same samples after it is set back; `begin` finds out. Every process reads the whole stream,
    and hands out its part.

    One thread may read while another asks for states and releases samples.

    Raises:
      TypeError: the iterator has no state, or (from reads) its state cannot be saved.
      RuntimeError (from reads): the stream raised an error; the cause is chained. The read is not repeated.
    """

    def __init__(self, stream: Any):
        self._name = type(stream).__name__
        self.dataset = stream
        self._iterator = iter(stream)
        self._owner, self._methods = self._stateful()
        self._items: dict[int, Any] = {}  # by place, in this order: read, but not released
        self._next = 0  # place of the next sample from the iterator
        self._released = 0  # samples before this place are forgotten
        self._failed: RuntimeError | None = None
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # guards the states
        self._has_begun = self._draws_anew = False  # what `begin` found out
        self._states = [self._state()]  # in the order of their places
        self._first = self._states[0]

    def _stateful(self) -> tuple[Any, tuple[str, str]]:
        """Return the object that has the state, and the names of its methods."""
        found = [(self._iterator, names) for names in METHODS] + [(self.dataset, METHODS[1])]
        for owner, names in found:
            if all(hasattr(owner, name) for name in names):
                return owner, names
        missing = [name for name in METHODS[0] if not hasattr(self._iterator, name)]
        raise TypeError(
            f"A dataset needs random access, or a state to resume from, but {self._name} has neither: "
            f"its iterator has no {' and no '.join(missing)}. {KINDS}"
        )

    def __len__(self) -> int:
        """Return `ENDLESS`: the end is not known before it is reached."""
        return ENDLESS

    def available(self, first: int, count: int) -> int:
        """Read up to `count` samples from place `first` on; return how many there are.

        Fewer than `count` if the stream ends.
        """
        with self._reading:
            state = None
            if self._next < first + count and self._next > self._states[-1].place:
                state = None if self._states[-1].replays else self._state()
            while self._next < first + count:
                if (
                    self._failed is not None
                ):  # a generator that has raised would seem to be at its end
                    raise self._failed
                try:
                    item = next(self._iterator)
                except StopIteration:
                    break
                except Exception as error:
                    self._failed = RuntimeError(_failure(f"sample {self._next}", error))
                    raise self._failed from error
                self._remember(item, state)
                state = None
            return max(min(count, self._next - first), 0)

    def _remember(self, item: Any, state: StreamState | None) -> None:
        """Keep the sample at the next place; `state` is the stream's before it was read, if it was taken.

        A state at the end of a stream is not kept, because some streams begin anew from there.
        """
        with self._lock:
            if state is not None:
                self._states.append(state)
            last = self._states[-1]
            if last.place == self._next and last.first is None and not self._draws_anew:
                self._states[-1] = dataclasses.replace(last, first=digest(item))
        if self._next >= self._released:
            self._items[self._next] = item
        self._next += 1

    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """Return the samples at these places, which must have been read (see `available`), and not released.

        Place 0 is read if necessary.
        """
        if self._next == 0:
            self.available(0, 1)
        missing = [i for i in indices.tolist() if i not in self._items]
        if missing:
            raise ValueError(
                f"The stream {self._name} cannot give sample {missing[0]}: it was read up to {self._next}, "
                f"and samples below {self._released} are used. A stream is read in its own order; any other "
                f"order needs random access."
            )
        return _stack([self._items[i] for i in indices.tolist()], indices)

    def release(self, place: int) -> None:
        """Forget the kept samples before `place`, as they are not needed again."""
        while self._items and (oldest := next(iter(self._items))) < place:
            del self._items[oldest]
        self._released = max(self._released, place)
        with self._lock:
            while len(self._states) > 1 and self._states[1].place <= place:
                del self._states[0]

    def state_at(self, place: int) -> StreamState:
        """Return the last saved state at or before sample number `place`, which must not be released."""
        with self._lock:
            return [state for state in self._states if state.place <= place][-1]

    def restore(self, saved: StreamState) -> None:
        """Set the stream back to a state that `state_at` returned, in this process or another."""
        with self._reading:  # an earlier loader may have been closed during a read
            get, set_back = self._methods
            try:
                getattr(self._owner, set_back)(_read_state(saved))
            except Exception as error:  # the stream's own
                raise RuntimeError(
                    f"{set_back}() of the stream {self._name} failed: {type(error).__name__}: {error}. It "
                    f"must set the stream back to any state that {get}() returned."
                ) from error
            if self._owner is not self._iterator:
                self._iterator = iter(self.dataset)
            self._items, self._next, self._released = {}, saved.place, saved.place
            with self._lock:
                self._states, self._failed = [saved], None

    def begin(self) -> str | None:
        """Set the stream to its beginning, for a run that begins.

        The first call finds out whether the stream repeats its samples after it is set back, and returns a
        warning if not; it reads the first samples three times. If only the beginning can be repeated (shuffle
        buffers are often not part of a state), a resumed run reads all samples again from there, and still
        uses each once.
        """
        if self._has_begun:
            self.restore(self._first)
            return None
        self._has_begun = True

        def read(first: int) -> list[str]:
            count = self.available(first, 2 * NUM_PROBED - first)
            return [digest(self._items[first + i]) for i in range(count)]

        self.restore(self._first)
        self.available(0, NUM_PROBED)
        begin, rest = read(0)[:NUM_PROBED], read(NUM_PROBED)
        between = self.state_at(NUM_PROBED)
        self.restore(between)
        goes_on = read(between.place)[-len(rest) :] == rest if rest else True
        self.restore(self._first)
        repeats = read(0) == begin + rest
        self._draws_anew = not repeats
        self._first = dataclasses.replace(self._first, replays=repeats and not goes_on)
        self.restore(self._first)
        if not repeats:
            return (
                f"the stream {self._name} returned other samples when it was set back to its beginning. If "
                "it draws them at random without a seed, nothing is wrong; if it orders them at random, a "
                "resumed run may use some samples twice and some never. Seed it."
            )
        if not goes_on:
            return (
                f"the stream {self._name} goes on with other samples after it is set back, unless it is set "
                "back to its beginning (a shuffle buffer is not part of its state). A resumed run therefore "
                "reads the stream from its beginning, and skips the samples that were used."
            )
        return None

    def goes_on(self, place: int) -> bool:
        """Return whether the stream, as restored, goes on with the sample that was there before.

        The samples before `place` were used.
        """
        (saved,) = self._states
        self._draws_anew = saved.first is None
        is_there = self.available(saved.place, 1) == 1
        found = saved.first is None or (
            is_there and digest(self._items[saved.place]) == saved.first
        )
        self.release(place)
        return found

    def _state(self) -> StreamState:
        state = getattr(self._owner, self._methods[0])()
        if isinstance(state, bytes):
            return StreamState(self._next, state.hex(), is_bytes=True)
        try:
            text = json.dumps(state)
            is_json = bool(
                json.loads(text) == state
            )  # false for tuples, and keys that are not strings
        except (TypeError, ValueError):
            is_json, text = False, ""
        if is_json:
            return StreamState(self._next, text)
        if self._methods == METHODS[1]:
            return StreamState(self._next, self._pickled(state), is_bytes=True, is_pickle=True)
        raise TypeError(
            f"get_state() of the stream {self._name} returned a {type(state).__name__} that JSON cannot "
            f"give back as it is, so it cannot be part of a checkpoint. Return dicts with string keys, "
            f"lists, numbers and strings; or bytes, for example from pickle."
        )

    def _pickled(self, state: Any) -> str:
        try:
            return pickle.dumps(state).hex()
        except Exception as error:  # the state's own
            raise TypeError(
                f"state_dict() of the stream {self._name} returned a {type(state).__name__} that cannot be "
                f"pickled, so it cannot be part of a checkpoint ({type(error).__name__}: {error}). Return "
                "dicts, lists, tuples, numbers, strings and arrays."
            ) from error


def _read_state(saved: StreamState) -> Any:
    if saved.is_pickle:
        return pickle.loads(bytes.fromhex(saved.state))
    return bytes.fromhex(saved.state) if saved.is_bytes else json.loads(saved.state)


def as_source(dataset: Any, *, indexing: Indexing = "one") -> Source:
    """Return a `Source` for a user's dataset; a `Source` is returned as it is.

    The dataset may be a mapping of arrays (nested PyTrees too), one array, a tuple of arrays, a grain
    `MapDataset`, any object with `__len__` and `__getitem__` (a list of samples, a torch dataset), or a
    stream (`StreamSource`). `indexing` applies to objects with `__getitem__` only: see `SequenceSource`.

    Raises:
      TypeError: the dataset has neither random access nor a state, or its leaves are not numbers.
      ValueError: the dataset is empty, or its arrays differ in length.

    >>> len(as_source({"x": np.zeros((3, 2)), "y": np.zeros(3)}))
    3
    """
    if isinstance(dataset, Source):
        source = dataset
    elif isinstance(dataset, Mapping):
        # A lazy mapping, such as an npz file of numpy, is no PyTree node. A dict of its values is one.
        source = ArraySource(dict(dataset))
    elif _is_array(dataset) or _is_tuple_of_arrays(dataset):
        source = ArraySource(dataset)
    elif _is_grain(dataset, "MapDataset"):
        source = GrainSource(dataset)
    elif hasattr(type(dataset), "__iter__") and not _has_random_access(dataset):
        source = StreamSource(dataset)
    else:
        source = SequenceSource(dataset, indexing=indexing)
    if len(source) < 1:
        raise ValueError(
            f"The dataset is empty: {type(dataset).__name__} has {len(source)} samples. Check the "
            f"path, split or filter that produced it."
        )
    return source


def _has_random_access(dataset: Any) -> bool:
    # Hugging Face's and torch's iterable data sets have a `__getitem__` that does not give a sample.
    return all(hasattr(type(dataset), name) for name in ("__getitem__", "__len__"))


def is_endless(source: Source) -> bool:
    """Return whether a source has no end, and therefore no epochs."""
    return len(source) >= ENDLESS


def abstract_sample(source: Source) -> PyTree[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a sample as the devices will hold it. Reads sample 0.

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


def _stack(items: list[Any], indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
    """Stack items into one PyTree of arrays `[n, ...]`. An error names two items that differ."""
    _refuse_lists(items[0], int(indices[0]))
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


def _refuse_lists(item: Any, index: int) -> None:
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
        f"skipped silently: repair the dataset, or return a placeholder whose loss has weight 0."
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
