"""Streams: iterables that are read in their own order, and what a resumed run needs to go on with them."""

import dataclasses
import json
import operator
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from absl import logging
from jaxtyping import Int, PyTree

from jaxgoodput.data.passes import Passes
from jaxgoodput.data.rows import check_same_kind, digest, refuse_lists, stack
from jaxgoodput.data.sources import ENDLESS, Source, failure

NUM_PROBED = 2  # items of a stream before and behind the state that `begin` sets it back to
# Items behind a state that a resumed run compares. Two, because one may agree by chance: what a shuffle
# buffer draws next is the same sample once in as many times as it has samples.
NUM_COMPARED = 2


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
    """Digests of the sample at `place` and of the first one of the next item, with a space in between.

    Only the first if the next was not read yet; None if neither is known, or the stream draws samples anew.
    """
    replays: bool = False
    """Whether the stream can only be set back to its beginning, so that all samples are read again."""


# The methods that save and restore the state of an iterator, or of the iterable that makes iterators.
METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class StreamSource(Source):
    """An iterable that is read in its own order. A sample's index is its place in the stream.

    `stream` is iterable. Its iterator has `get_state()` (JSON values, or bytes) and `set_state(state)`: a
    grain `IterDataset` or `DataLoader`, or an iterator of your own. Or the iterator, or the stream itself,
    has `state_dict()` (anything that can be pickled) and `load_state_dict(state)`: a Hugging Face
    `IterableDataset`, a `StatefulDataLoader` of torchdata. If the stream itself has them, a new iterator is
    made after loading. If there is no state, a resumed run begins the stream anew and skips what was used
    (`Passes`).

    `is_batched` says that its items are batches, with one row per sample in each of their arrays, of which
    the last may have fewer. They are taken apart, so that a step may have any number of samples.

    A stream that `is_live` is never set back: what was read and not used when a run ends is lost, and a
    resumed run goes on with whatever comes next. Since what it gives may depend on when it is asked, no more
    than `ahead_samples` are read before they are used, beside the few batches that are always read ahead.

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

    def __init__(
        self,
        stream: Any,
        *,
        is_batched: bool = False,
        is_live: bool = False,
        ahead_samples: int = 0,
    ):
        self.dataset = stream
        self._ahead_samples = ahead_samples if is_live else ENDLESS
        self._is_batched = is_batched
        self._iterator = iter(stream)
        if not is_live:
            self._owner, self._methods = self._stateful()
        # Read, but not released: by the place of their first sample, in this order.
        self._items: dict[int, Any] = {}
        self._kind: PyTree | None = None  # of the samples of batches
        self._example: PyTree[np.ndarray] | None = None  # the first sample that was read
        self._next = 0  # place of the next sample from the iterator
        self._num_since = 0  # items that were read since the newest state
        self._released = 0  # samples before this place are forgotten
        # Why nothing more can be read. Kept, because some begin anew if they are asked once more, and a
        # generator that has raised would seem to be at its end.
        self._over: RuntimeError | StopIteration | None = None
        self._reading = threading.Lock()
        self._lock = threading.Lock()  # guards the states
        self._has_begun = self._draws_anew = False  # what `begin` found out
        self._states = [self._state()]  # in the order of their places
        self._first = self._resumed = self._states[0]

    def _stateful(self) -> tuple[Any, tuple[str, str]]:
        """Return the object that has the state, and the names of its methods."""
        found = [(self._iterator, names) for names in METHODS] + [(self.dataset, METHODS[1])]
        for owner, names in found:
            if all(hasattr(owner, name) for name in names):
                return owner, names
        if self._iterator is self.dataset:
            raise TypeError(
                f"dataset() returned an iterator ({self._name}), which can be read once only, so that a "
                "resumed run could not begin it anew. Return what it iterates over; or "
                "jaxgoodput.stream(make), where make(number) makes the iterator of each pass; or, if a "
                "resumed run should continue with whatever comes next, jaxgoodput.stream(it, live=True)."
            )
        self._iterator = Passes(lambda number: self.dataset, first=self._iterator)
        return self._iterator, METHODS[0]

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
                if isinstance(self._over, RuntimeError):
                    raise self._over
                if self._over is not None:
                    break
                try:
                    item = next(self._iterator)
                except StopIteration as end:
                    self._over = end
                    break
                except Exception as error:
                    self._over = RuntimeError(failure(f"sample {self._next}", error))
                    raise self._over from error
                item = self._taken_in(item)
                if self._num_samples(item):  # else the state is that of the batch behind it
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
            if last.place == self._next:
                self._num_since = 0
            known = (last.first or "").split()
            if len(known) == self._num_since < NUM_COMPARED and not self._draws_anew:
                known.append(self._digest(item))
                self._states[-1] = dataclasses.replace(last, first=" ".join(known))
            self._num_since += 1
        if self._example is None:
            self._example = jax.tree.map(np.copy, self._rows(item, 0, 1))
        behind = self._next + self._num_samples(item)
        if behind > self._released:
            self._items[self._next] = item
        self._next = behind

    def _taken_in(self, item: Any) -> Any:
        """Return an item as it is kept: a batch is checked and copied, as its memory may be used again."""
        if not self._is_batched:
            return item
        try:
            refuse_lists(item, self._next)
            rows = jax.tree.map(lambda x: np.asarray(x).copy(), item)
            leaves = jax.tree.leaves(rows)
            count = len(leaves[0]) if leaves and leaves[0].ndim else 0
            self._kind = check_same_kind(rows, self._kind, count)
        except (TypeError, ValueError) as error:
            self._over = RuntimeError(
                f"the batch that begins with sample {self._next} of the stream {self._name} cannot be taken "
                f"apart: {error}"
            )
            raise self._over from error
        return rows

    def _rows(self, item: Any, first: int, end: int) -> PyTree[np.ndarray]:
        """Return some samples of an item, stacked."""
        if not self._is_batched:
            return stack([item], np.array([self._next]))
        return jax.tree.map(operator.itemgetter(slice(first, end)), item)

    def _digest(self, item: Any) -> str:
        """Return a digest of the first sample of an item."""
        return digest(self._rows(item, 0, 1)) if self._is_batched else digest(item)

    def _num_samples(self, item: Any) -> int:
        return len(jax.tree.leaves(item)[0]) if self._is_batched else 1

    def batch(self, indices: Int[np.ndarray, " n"]) -> PyTree[np.ndarray]:
        """Return the samples at these places, which must have been read (`available`) and not released."""
        missing = (indices < self._released) | (indices >= self._next)
        if missing.any():
            raise ValueError(
                f"The stream {self._name} cannot give sample {indices[missing][0]}: it was read up to "
                f"{self._next}, and samples below {self._released} are used. A stream is read in its own "
                "order; any other order needs random access."
            )
        if not self._is_batched:
            return stack([self._items[i] for i in indices.tolist()], indices)
        firsts = np.array(list(self._items))
        at = np.searchsorted(firsts, indices, side="right") - 1
        parts = []
        for run in np.split(np.arange(len(indices)), np.flatnonzero(np.diff(at)) + 1):
            first = int(firsts[at[run[0]]])
            inside = indices[run] - first
            parts.append(jax.tree.map(operator.itemgetter(inside), self._items[first]))
        return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)

    def example(self) -> PyTree[np.ndarray]:
        """Return the first sample that was read, stacked; it is still there for training."""
        if self._example is None and not self.available(self._next, 1):
            raise ValueError(f"The stream {self._name} is empty: it has no sample to begin with.")
        assert self._example is not None
        return self._example

    def release(self, place: int) -> None:
        """Forget the kept samples before `place`, as they are not needed again."""
        for first in list(self._items):
            if first + self._num_samples(self._items[first]) > place:
                break
            del self._items[first]
        self._released = max(self._released, place)
        with self._lock:
            while len(self._states) > 1 and self._states[1].place <= place:
                del self._states[0]

    def state_at(self, place: int) -> StreamState:
        """Return the last saved state at or before sample number `place`, which must not be released."""
        with self._lock:
            return [state for state in self._states if state.place <= place][-1]

    @property
    def _name(self) -> str:
        """What messages call it."""
        return type(self.dataset).__name__

    def restore(self, saved: StreamState) -> None:
        """Set the stream back to a state that `state_at` returned, in this process or another.

        If the stream refuses the state, it begins anew and skips what was used; `goes_on` then compares.

        Raises RuntimeError if it cannot begin anew either, or nothing is known to compare it with.
        """
        self._resumed = saved
        try:
            self._restore(saved)
        except RuntimeError as error:
            if saved.first is None:
                raise
            self._begin_anew(str(error))

    def _begin_anew(self, why: str) -> None:
        """Set the stream to its beginning, to skip all that was used before the state to resume from."""
        logging.warning(
            "%s This run therefore reads the stream from its beginning, and skips the samples that were "
            "used before that state, %d. If it then has other samples than before, the run is refused.",
            why,
            self._resumed.place,
        )
        self._restore(dataclasses.replace(self._first, replays=True))
        self.release(self._resumed.place)  # else all that is skipped would be kept

    def _restore(self, saved: StreamState) -> None:
        with self._reading:  # an earlier loader may have been closed during a read
            if self.is_live:
                self._renumber(saved.place)
            else:
                self._set_back(saved)
                self._items, self._next = {}, saved.place
            self._released = saved.place
            with self._lock:
                self._states, self._over = [saved], None

    @property
    def is_live(self) -> bool:
        """Whether it is never set back."""
        return self._ahead_samples < ENDLESS

    def may_read_ahead(self, num_samples: int) -> bool:
        """Whether so many samples may be read before they are used."""
        return num_samples <= self._ahead_samples

    def _renumber(self, place: int) -> None:
        """Let the samples that were read and not released begin at another place."""
        kept, self._items, self._next = self._items, {}, place
        for first, item in kept.items():
            end = first + self._num_samples(item)
            if first < self._released < end:
                item = self._rows(item, self._released - first, end - first)
            if self._released < end:
                self._items[self._next] = item
                self._next += self._num_samples(item)

    def _set_back(self, saved: StreamState) -> None:
        """Set the user's object back; the samples that it gave are still there."""
        get, set_back = self._methods
        try:
            getattr(self._owner, set_back)(_read_state(saved))
            if self._owner is not self._iterator:  # some set the state only now
                self._iterator = iter(self.dataset)
        except Exception as error:  # the stream's own
            raise RuntimeError(
                f"{set_back}() of the stream {self._name} failed: {type(error).__name__}: {error}. It "
                f"must set the stream back to any state that {get}() returned."
            ) from error

    def begin(self) -> str | None:
        """Set the stream to its beginning, for a run that begins.

        The first call finds out whether the stream repeats its samples after it is set back, and returns a
        warning if not; it reads the first samples three times. If only the beginning can be repeated (shuffle
        buffers are often not part of a state), a resumed run reads all samples again from there, and still
        uses each once.
        """
        if self.is_live:
            self._restore(StreamState(0, "null"))
            return (
                f"the stream {self._name} is live: it is never set back. If this run is resumed, it goes on "
                "with whatever comes next, and what this one has read ahead is lost."
            )
        if self._has_begun:
            self._restore(self._first)
            return None

        def read(num_items: int = ENDLESS, up_to: int = ENDLESS) -> list[str]:
            found = []
            while len(found) < num_items and self._next < up_to:
                place = self._next
                if not self.available(place, 1):
                    break
                found.append(self._digest(self._items[place]))
            return found

        self._restore(self._first)
        begin = read(NUM_PROBED)
        middle = self._next
        rest = read(NUM_PROBED)
        between, end = self.state_at(middle), self._next
        goes_on = True
        if rest and not isinstance(self._owner, Passes):  # these go back by what was just read
            self._restore(between)
            goes_on = read(up_to=end)[-len(rest) :] == rest
        self._restore(self._first)
        repeats = read(len(begin) + len(rest)) == begin + rest
        self._draws_anew, self._has_begun = not repeats, True
        if not (repeats and goes_on):  # else what was just read is the beginning
            self._first = dataclasses.replace(self._first, replays=repeats and not goes_on)
            self._restore(self._first)
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
        """Return whether the stream, as restored, goes on with the samples that were there before.

        The samples before `place` were used. A stream that does not go on after it was set back may still do
        so from its beginning, so that is tried as well. Some have a state that leaves out a shuffle buffer,
        which `begin` cannot find out if the state is right again for as long as a buffer lasts.
        """
        saved = self._resumed
        if self.is_live:
            self._restore(StreamState(place, "null"))
            return True
        self._draws_anew = saved.first is None
        why = (
            f"the stream {self._name} goes on with other samples than before after it is set back to the "
            "state of the checkpoint (a shuffle buffer may not be part of its state)."
        )
        try:
            found = self._has_next(saved)
        except RuntimeError as error:  # some refuse a state only when they are read
            if saved.first is None:
                raise
            found, why = False, str(error)
        # Passes are read again from the beginning of one anyway.
        if not found and self._states[0].place and not isinstance(self._owner, Passes):
            found = self._has_next_anew(saved, why)
            if not found:  # where other data are allowed, its own state is still the better guess
                self._restore(saved)
        self.release(place)
        return found

    def _has_next_anew(self, saved: StreamState, why: str) -> bool:
        """Return whether the samples behind a state are there after the stream was set to its beginning."""
        try:
            self._begin_anew(why)
            return self._has_next(saved)
        except RuntimeError as error:
            logging.warning("That failed as well: %s", error)
            return False

    def _has_next(self, saved: StreamState) -> bool:
        """Return whether the samples behind a state are those that were there when it was saved."""
        place = saved.place
        for expected in (saved.first or "").split():
            item = self._items.get(place) if self.available(place, 1) else None
            if item is None or self._digest(item) != expected:
                return False
            place += self._num_samples(item)
        return True

    def _state(self) -> StreamState:
        if self.is_live:
            return StreamState(self._next, "null")
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


def stream(
    data: Any,
    *,
    batched: bool = False,
    passes: int | None = 1,
    live: bool = False,
    ahead_samples: int = 0,
) -> StreamSource:
    """Return a source that reads an iterable in its own order, for `Trainer.dataset`.

    `data` may be a loader of torch, torchdata, tfds, webdataset or Hugging Face, or any other iterable; or a
    function of the number of a pass, 0, 1, ..., that returns the iterable of that pass, always the same one
    for the same number (seed it with the number). `passes` is how many passes to make, None without end.

    With `batched`, its items are batches: the arrays have one row per sample. Steps may still have any number
    of samples. A run that is resumed goes on exactly where it stopped, by the iterable's own state if it has
    one and there is one pass. Otherwise it begins the pass anew, and skips what was used. If `live`, it goes
    on with whatever comes next: for data that come only once, such as a buffer that is filled meanwhile.
    Two batches are read ahead of it. Allow more by `ahead_samples`, if what it gives need not be newer: then
    short steps may be dispatched together, which takes 48 batches.

    Raises:
      TypeError: `data` is neither; or it is an iterator, which can be read once only, and not `live`.
      ValueError: `passes` is not positive, or there are several of a live iterable; or `ahead_samples` is
        negative, or given without `live`.

    >>> pairs = stream(lambda number: [{"x": np.arange(4) + 4 * number}], batched=True, passes=2)
    >>> pairs.available(0, 100), pairs.batch(np.array([3, 4]))
    (8, {'x': array([3, 4])})
    """
    if passes is not None and passes < 1:
        raise ValueError(f"passes={passes}: make at least one, or None to go on without end.")
    if ahead_samples < 0 or (ahead_samples and not live):
        raise ValueError(
            f"ahead_samples={ahead_samples}: give the number of samples that may be read from a live stream "
            "before they are used. Other streams are read ahead as far as it helps."
        )
    if not hasattr(type(data), "__iter__"):
        if not callable(data):
            raise TypeError(
                f"stream() takes an iterable, or a function that returns one for the number of a pass; got "
                f"{data!r:.60}."
            )
        if live:
            raise ValueError(
                "a live stream is one iterable: call the function, and pass its result."
            )
        make: Callable[[int], Any] = data
        return StreamSource(Passes(make, passes), is_batched=batched)
    if live and passes != 1:
        raise ValueError(f"a live stream is read once; got passes={passes}.")
    if passes != 1:
        if iter(data) is data:
            raise TypeError(
                f"an iterator ({type(data).__name__}) can be read once only. Pass a function that makes a "
                "new one for each pass."
            )
        return StreamSource(Passes(lambda number: data, passes), is_batched=batched)
    return StreamSource(data, is_batched=batched, is_live=live, ahead_samples=ahead_samples)
