"""Streams: each sample once, in the stream's own order, and exactly the rest of them after a restart."""

import json
import pickle
import threading

import numpy as np
import pytest
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput._fields.serial import decode, encode
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.passes import Passes
from jaxgoodput.data.sources import abstract_sample, is_endless
from jaxgoodput.data.streams import StreamSource, StreamState
from jaxgoodput.data.streams import stream as stream_of


class Counting:
    """A stream of its own state, which is a number of samples (as `wrap` has it) and nothing else."""

    def __init__(self, end=10**9, wrap=lambda place: {"place": place}, unwrap=lambda s: s["place"]):
        self.place, self.end, self.wrap, self.unwrap = 0, end, wrap, unwrap
        self.bad = -1

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == self.bad:
            self.bad = -1
            self.place = self.end  # as a generator is after an exception
            raise OSError("the pipe broke")
        if self.place >= self.end:
            raise StopIteration
        self.place += 1
        return {"id": self.place - 1}

    def get_state(self):
        return self.wrap(self.place)

    def set_state(self, state):
        self.place = self.unwrap(state)


def test_a_stream_keeps_what_was_read_until_it_is_released():
    source = as_source(Counting(end=20))
    assert isinstance(source, StreamSource) and is_endless(source)
    assert abstract_sample(source)["id"].shape == ()
    assert source.available(0, 8) == 8
    assert source.batch(np.array([3, 4, 5, 3]))["id"].tolist() == [3, 4, 5, 3]
    source.release(4)
    assert source.batch(np.array([4, 5]))["id"].tolist() == [4, 5]
    with pytest.raises(ValueError, match="cannot give sample 3: .* below 4 are used"):
        source.batch(np.array([3]))
    assert [source.available(4, n) for n in (10, 16, 17, 50)] == [10, 16, 16, 16]
    assert source.available(20, 5) == 0 == source.available(30, 5)
    with pytest.raises(ValueError, match="cannot give sample 20: it was read up to 20"):
        source.batch(np.array([20]))


@settings(deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
def test_a_stream_goes_on_from_any_place_that_was_not_released(reads):
    source, used = as_source(Counting()), 0
    assert isinstance(source, StreamSource)
    for ahead, released in reads:
        source.available(used, ahead)
        used += min(released, ahead)
        source.release(used)
    saved = decode(json.loads(json.dumps(encode(source.state_at(used)))), StreamState, "stream")
    assert saved.place <= used
    other = as_source(Counting())
    assert isinstance(other, StreamSource)
    abstract_sample(other)
    other.restore(saved)
    assert other.available(used, 5) == 5
    assert other.batch(np.arange(used, used + 5))["id"].tolist() == list(range(used, used + 5))


def test_the_state_of_a_stream_is_json_or_bytes():
    def pickled(place):
        return pickle.dumps((place, {1: "one"}))

    stream = Counting(wrap=pickled, unwrap=lambda state: pickle.loads(state)[0])
    source = as_source(stream)
    assert isinstance(source, StreamSource)
    source.available(0, 3)
    source.available(3, 3)
    source.restore(source.state_at(4))
    assert stream.place == 3 and source.available(4, 2) == 2
    for state in ((1, 2), {1: 2}, np.int64(3), object()):
        with pytest.raises(TypeError, match="JSON cannot give back as it is"):
            as_source(Counting(wrap=lambda _, state=state: state))


def test_a_stream_that_raised_has_not_ended():
    stream = Counting(end=20)
    stream.bad = 5
    source = as_source(stream)
    assert isinstance(source, StreamSource)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sample 5 .*the pipe broke") as caught:
            source.available(0, 8)
        assert isinstance(caught.value.__cause__, OSError)
    assert source.available(0, 5) == 5


# -- streams with state_dict and load_state_dict ------------------------------------------------------


class Loadable:
    """As Hugging Face's data sets: the state is the iterable's, and `[]` gives no sample."""

    def __init__(self, end=60):
        self.end, self.place, self.begins_at = end, 0, 0

    def __getitem__(self, name):
        raise NotImplementedError

    def __iter__(self):
        self.place = self.begins_at
        while self.place < self.end:
            self.place += 1  # before the sample is handed out
            yield {"id": self.place - 1}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.begins_at = state["place"]


class Begun(Loadable):
    """As torchdata's loaders: the state is no JSON, and what has ended begins anew."""

    def state_dict(self):
        return {"place": (self.place, np.int64(0)), 1: b"key"}

    def load_state_dict(self, state):
        place, _ = state["place"]
        self.begins_at = 0 if place == self.end else place


class Buffered(Loadable):
    """Shuffled within a buffer that is not part of the state."""

    def __iter__(self):
        rng, buffer = np.random.default_rng(0), []
        for row in super().__iter__():
            buffer.append(row)
            if len(buffer) == 8:
                yield buffer.pop(rng.integers(8))
        yield from buffer


class Iterator:
    """The iterator itself has the state."""

    def __init__(self, end):
        self.place, self.end = 0, end

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == self.end:
            raise StopIteration
        self.place += 1
        return {"id": self.place - 1}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


LOADABLE = {
    "iterable": Loadable,
    "not JSON": Begun,
    "buffered": Buffered,
    "iterator": lambda: Iterator(end=60),
}


def stream(made) -> StreamSource:
    source = as_source(made)
    assert isinstance(source, StreamSource)
    return source


def all_of(source, used=0):
    """The samples from a place on."""
    found = source.available(used, 1000)
    return source.batch(np.arange(used, used + found))["id"].tolist()


@pytest.mark.parametrize("name", LOADABLE)
@settings(deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=8))
def test_a_stream_with_a_state_dict_goes_on_exactly(name, reads):
    whole, one, other = (stream(LOADABLE[name]()) for _ in range(3))
    warning = whole.begin()
    assert "shuffle buffer" in (warning or "") if name == "buffered" else warning is None
    expected, used = all_of(whole), 0
    assert sorted(expected) == list(range(60))
    one.begin()
    for released, ahead in reads:
        used += min(released, one.available(used, released + ahead))
        one.release(used)
    saved = decode(json.loads(json.dumps(encode(one.state_at(used)))), StreamState, "stream")
    abstract_sample(other)
    other.restore(saved)
    assert other.goes_on(used)
    if used < 60:
        assert all_of(other, used) == expected[used:]
    assert other.available(used, 100) == 60 - used


@pytest.mark.parametrize("place", [0, 7, 30])
def test_a_stream_that_does_not_go_on_as_before_is_noticed(place):
    source = stream(Loadable())
    source.begin()
    for first in range(0, place + 1, 3):
        source.available(first, 3)
        source.release(min(first + 3, place))
    saved = source.state_at(place)

    class Filtered(Loadable):
        def __iter__(self):
            return (row for row in super().__iter__() if row["id"] % 2)

    for same, made in ((True, Loadable()), (False, Filtered()), (False, Loadable(end=0))):
        other = stream(made)
        other.restore(saved)
        assert other.goes_on(place) == same


class BufferedInChunks(Loadable):
    """As `datasets` 5 shuffles: a state is exact in the first buffer, and leaves out what later ones keep."""

    def __iter__(self):
        for row in super().__iter__():
            chunk, at = divmod(row["id"], 10)
            yield {"id": 10 * chunk + (3 * at + self.skipped) % 10}

    skipped = 0

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.skipped = int(self.begins_at >= 10)


class Refusing(Loadable):
    """As grain's `DataLoader`: refuses a state that another object has made."""

    def state_dict(self):
        return {**super().state_dict(), "of": id(self)}

    def load_state_dict(self, state):
        if state["of"] != id(self):
            raise ValueError("the state is another's")
        super().load_state_dict({k: v for k, v in state.items() if k != "of"})


@pytest.mark.parametrize("made", [BufferedInChunks, Refusing])
def test_a_stream_that_only_its_beginning_repeats_is_read_again_from_there(made, monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    source, whole = stream(made()), stream(made())
    assert source.begin() is None
    expected, used = all_of(whole), 0
    for used in (23, 41):  # the second time from what the first resumed run has saved
        said.clear()
        for first in range(source._next, used + 5):
            source.available(first, 1)
        source.release(used)
        saved = decode(json.loads(json.dumps(encode(source.state_at(used)))), StreamState, "stream")
        source = stream(made())
        source.restore(saved)
        assert source.goes_on(used)
        assert len(source._items) <= 60 - used, "what was skipped is not kept"
        # What such a run saves begins at the beginning, unless the stream refuses that as well.
        is_told = any("reads the stream from its beginning" in one for one in said)
        assert is_told == (used == 23 or made is Refusing)
    assert all_of(source, used) == expected[used:]


@pytest.mark.parametrize("fails", ["when it is iterated", "when it is read"])
def test_a_state_that_is_refused_late_is_refused_all_the_same(fails, monkeypatch):
    class Late(Refusing):
        def load_state_dict(self, state):
            self.is_wrong = state["of"] != id(self)
            Loadable.load_state_dict(self, {k: v for k, v in state.items() if k != "of"})

        def __iter__(self):
            if self.is_wrong and fails == "when it is iterated":
                raise ValueError("the state is another's")
            return self.rows()

        is_wrong = False

        def rows(self):
            if self.is_wrong:
                raise ValueError("the state is another's")
            yield from super().__iter__()

    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    source = stream(Late())
    source.begin()
    for first in range(8):
        source.available(first, 1)
    other = stream(Late())
    other.restore(source.state_at(6))
    assert other.goes_on(6) and all_of(other, 6) == list(range(6, 60))
    assert "the state is another's" in said[0] and "from its beginning" in said[0]


def test_a_stream_that_is_another_one_is_refused_though_it_refuses_the_state():
    class Filtered(Refusing):
        def __iter__(self):
            return (row for row in super().__iter__() if row["id"] % 2)

    source = stream(Refusing())
    source.begin()
    for first in range(8):
        source.available(first, 1)
    other = stream(Filtered())
    other.restore(source.state_at(6))
    assert not other.goes_on(6)


def test_a_stream_that_draws_its_samples_anew_is_told_and_not_compared():
    class Drawn(Loadable):
        def __iter__(self):
            return ({"id": row["id"], "x": np.random.normal()} for row in super().__iter__())

    source, other = stream(Drawn()), stream(Drawn())
    assert "draws them at random without a seed" in (source.begin() or "")
    source.available(0, 5)
    source.available(5, 5)
    assert source.state_at(6).first is None
    other.restore(source.state_at(6))
    assert other.goes_on(6) and all_of(other, 6) == list(range(6, 60))


def test_a_state_that_cannot_be_saved_is_refused():
    class Locked(Loadable):
        def state_dict(self):
            return {"lock": threading.Lock()}

    with pytest.raises(TypeError, match="state_dict.. of the stream Locked .* cannot be pickled"):
        stream(Locked())


def test_a_stream_that_cannot_be_set_back_is_told_before_a_run_begins():
    class OneWay(Loadable):
        def load_state_dict(self, state):
            raise NotImplementedError("later")

    with pytest.raises(
        RuntimeError, match="load_state_dict.. of the stream OneWay failed: NotImpl"
    ):
        stream(OneWay()).begin()


# -- iterables without a state ------------------------------------------------------------------------


class Batches:
    """As loaders of other libraries: batches of any length, in memory that is used again; no state."""

    def __init__(self, lengths, number=0):
        self.lengths, self.number = lengths, number

    def __iter__(self):
        first = 1000 * self.number
        memory = np.zeros(9, np.int64)
        for length in self.lengths:
            rows = memory[:length]
            rows[:] = np.arange(first, first + length)
            yield {"id": rows, "pair": (rows * 2,)}
            first += length


def ids_of(source, first, count):
    """The samples at some places, which are read if they were not."""
    found = min(source.available(first, count), count)
    if not found:
        return []
    rows = source.batch(np.arange(first, first + found))
    np.testing.assert_array_equal(rows["pair"][0], 2 * rows["id"])
    return rows["id"].tolist()


@pytest.mark.slow
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    passes=st.integers(1, 3),
    reads=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=8),
)
def test_batches_are_taken_apart_and_go_on_at_any_sample(lengths, passes, reads):
    """However they are cut, and wherever a run stops: within a batch, between two, in any pass."""

    def made():
        found = stream_of(lambda number: Batches(lengths, number), batched=True, passes=passes)
        assert isinstance(found, StreamSource)
        return found

    expected = [1000 * p + i for p in range(passes) for i in range(sum(lengths))]
    one, other, used = made(), made(), 0
    assert one.begin() is None
    for released, ahead in reads:
        assert ids_of(one, used, ahead) == expected[used : used + ahead]
        used = min(used + released, used + one.available(used, ahead))
        one.release(used)
        if used > 0:
            with pytest.raises(ValueError, match=f"cannot give sample {used - 1}"):
                one.batch(np.array([used - 1]))
    saved = decode(json.loads(json.dumps(encode(one.state_at(used)))), StreamState, "stream")
    assert used - saved.place < max(lengths) + 20
    abstract_sample(other)
    other.restore(saved)
    if used < len(expected):
        assert other.goes_on(used)
    assert ids_of(other, used, 1000) == expected[used:]


@pytest.mark.parametrize("name", ["samples", "batches"])
def test_a_plain_iterable_is_resumed_by_skipping(name):
    is_batched = name == "batches"
    data = Batches([4, 4, 2]) if is_batched else [{"id": i, "pair": (2 * i,)} for i in range(10)]

    class Plain:
        def __iter__(self):
            return iter(data)

    one, other = (stream_of(Plain(), batched=is_batched) for _ in range(2))
    assert isinstance(one, StreamSource) and isinstance(other, StreamSource)
    assert one.begin() is None
    assert ids_of(one, 0, 3) == [0, 1, 2]
    assert ids_of(one, 3, 4) == [3, 4, 5, 6]
    one.release(5)
    other.restore(one.state_at(5))
    assert other.goes_on(5) and ids_of(other, 5, 100) == [5, 6, 7, 8, 9]
    if not is_batched:
        assert isinstance(as_source(Plain()), StreamSource)


def test_a_live_stream_goes_on_with_whatever_comes_next():
    given = iter([{"id": i, "pair": (2 * i,)} for i in range(100)])
    source = stream_of(given, live=True)
    assert isinstance(source, StreamSource)
    abstract_sample(source)
    assert "never set back" in (source.begin() or "")
    assert ids_of(source, 0, 8) == list(range(8)), "none is lost by looking at the first ones"
    source.release(8)
    source.available(8, 4)
    saved = source.state_at(8)
    later = stream_of(given, live=True)
    assert isinstance(later, StreamSource)
    abstract_sample(later)
    later.restore(saved)
    assert later.goes_on(8)
    assert ids_of(later, 8, 3) == [12, 13, 14], "what was read ahead is lost, as was said; no more"
    later.release(9)
    later.restore(later.state_at(10))
    assert ids_of(later, 10, 3) == [14, 15, 16], "within one process nothing is"


def test_a_live_stream_of_batches_keeps_the_rest_of_a_batch():
    source = stream_of(iter(Batches([4, 4, 4])), batched=True, live=True)
    assert isinstance(source, StreamSource)
    assert ids_of(source, 0, 6) == list(range(6))
    source.release(2)
    source.restore(source.state_at(2))
    assert source.goes_on(100) and ids_of(source, 100, 9) == list(range(2, 11))


def test_a_stream_that_is_kept_serves_a_second_run():
    source = stream_of(lambda number: Batches([4, 4]), batched=True)
    assert isinstance(source, StreamSource)
    for _ in range(2):
        abstract_sample(source)
        assert source.begin() is None
        assert ids_of(source, 0, 8) == list(range(8))
        source.release(8)


def test_a_loader_is_begun_as_rarely_as_can_be():
    """Some start processes for that."""
    begun = []

    class Costly(Batches):
        def __iter__(self):
            begun.append(1)
            return super().__iter__()

    source = stream_of(Costly([4, 4]), batched=True)
    assert isinstance(source, StreamSource)
    abstract_sample(source)
    source.begin()
    assert ids_of(source, 0, 8) == list(range(8)) and len(begun) == 3


def test_what_cannot_be_resumed_is_said():
    rng = np.random.default_rng()

    class Shuffled:
        def __iter__(self):
            return iter([{"id": i} for i in rng.permutation(50)])

    source = stream_of(Shuffled())
    assert isinstance(source, StreamSource)
    assert "Seed it" in (source.begin() or "")


def test_skipping_that_will_take_long_says_so_before(clock, caplog):
    class Slow:
        def __iter__(self):
            for i in range(9):
                clock.advance(10.0)
                yield i

    first = Passes(lambda number: Slow(), None, clock=clock)
    assert [next(first) for _ in range(12)][-3:] == [0, 1, 2]
    other = Passes(lambda number: Slow(), None, clock=clock)
    other.set_state(json.loads(json.dumps(first.get_state())))
    with caplog.at_level("INFO"):
        assert next(other) == 3
    assert "skipping 3 items of pass 1 over the data" in caplog.text
    assert "took 30 s the last time" in caplog.text
    assert other.get_state() == {"pass": 1, "taken": 4, "read_s": 40.0}


class Sampled(Batches):
    """As torch's DataLoader with a sampler of batches."""

    batch_size, batch_sampler = None, [[0, 1]]


class Torchlike(Batches):
    """As torch's DataLoader: it has a batch size of its own."""

    batch_size = 4

    def __len__(self):
        return len(self.lengths)


def generated():
    yield {"id": 1}


once = generated()
REFUSED = {
    "a loader of batches": (lambda: as_source(Torchlike([4])), TypeError, "batched=True"),
    "a loader with a sampler of batches": (
        lambda: as_source(Sampled([4])),
        TypeError,
        "batched=True",
    ),
    "a generator": (lambda: as_source(generated()), TypeError, "read once only.*live=True"),
    "a generator in passes": (lambda: stream_of(generated(), passes=2), TypeError, "once only"),
    "one generator for all passes": (
        lambda: stream_of(lambda number: once, passes=2).available(0, 9),
        RuntimeError,
        "pass 1 over the data has no items",
    ),
    "no pass": (lambda: stream_of([1], passes=0), ValueError, "at least one"),
    "live passes": (lambda: stream_of([1], passes=2, live=True), ValueError, "read once"),
    "a live function": (lambda: stream_of(lambda n: [1], live=True), ValueError, "one iterable"),
    "a number": (lambda: stream_of(3), TypeError, "takes an iterable"),
    "batches of numbers": (
        lambda: stream_of([{"id": 3}], batched=True).available(0, 1),
        RuntimeError,
        "cannot be taken apart",
    ),
    "batches of lists": (
        lambda: stream_of([{"id": [1, 2]}], batched=True).available(0, 1),
        RuntimeError,
        "list of 2 ints",
    ),
    "columns of other lengths": (
        lambda: stream_of([{"x": np.zeros(3), "y": np.zeros(2)}], batched=True).available(0, 1),
        RuntimeError,
        "'y'. of shape .2,. for 3",
    ),
    "text": (
        lambda: stream_of([{"x": np.array(["a", "b"])}], batched=True).available(0, 1),
        RuntimeError,
        "which no device can hold",
    ),
    "batches that change": (
        lambda: stream_of([{"x": np.zeros(3)}, {"x": np.zeros((3, 2))}], batched=True).available(
            0, 9
        ),
        RuntimeError,
        "begins with sample 3 .* changed from",
    ),
    "a shorter pass": (
        lambda: shorter(),
        RuntimeError,
        "has 2 items, and 3 of them were read before",
    ),
}


def shorter():
    long, short = (stream_of(lambda number, n=n: [1] * n) for n in (5, 2))
    long.available(0, 3)
    long.available(3, 1)
    short.restore(long.state_at(3))
    short.available(3, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_stream_is_refused(name):
    make, kind, why = REFUSED[name]
    with pytest.raises(kind, match=why):
        make()
