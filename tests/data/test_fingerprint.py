"""Data that changed is told from data that did not, and from data that is drawn anew at every read."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput._fields.serial import decode, encode
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.fingerprint import Fingerprint, fingerprint
from jaxgoodput.data.sources import Source


def rows(num=1000, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(num, 3)).astype(np.float32), "y": rng.integers(0, 9, num)}


class Drawn:
    """Every read of a sample is another one, but for those of `steady`."""

    def __init__(self, steady=()):
        self._rng = np.random.default_rng()
        self._steady = steady

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.full(2, index) + (0 if index in self._steady else self._rng.normal(size=2))


def of(dataset):
    return fingerprint(as_source(dataset))


def shuffled(data):
    order = np.random.default_rng(1).permutation(len(data["x"]))
    return {name: x[order] for name, x in data.items()}


@pytest.mark.parametrize(
    "change, difference",
    [
        (lambda data: data, None),
        (lambda data: rows(1001), "has 1001 samples instead of 1000"),
        (lambda data: rows(seed=1), "holds other samples"),
        (shuffled, "in another order"),
        (lambda data: {**data, "x": data["x"].astype(np.float64)}, "holds other samples"),
        (lambda data: {**data, "y": data["y"] + 1}, "holds other samples"),
        (lambda data: {"x": data["x"], "z": data["y"]}, "holds other samples"),
    ],
)
def test_another_length_other_values_types_names_or_order_are_told(change, difference):
    found = of(rows()).difference(of(change(rows())))
    assert found == difference or (difference is not None and difference in found)


def test_two_rows_of_arrays_that_are_swapped_anywhere_are_told():
    order = np.arange(1000)
    order[[5, 900]] = order[[900, 5]]
    found = of(rows()).difference(of({name: x[order] for name, x in rows().items()}))
    assert found is not None and "in another order" in found
    # A checkpoint of an earlier version has no digest of all samples.
    assert dataclasses.replace(of(rows()), whole=None).difference(of(rows())) is None


def test_samples_that_are_drawn_anew_say_nothing_but_their_number():
    for steady in ((), {0, 99}):
        drawn = of(Drawn(steady))
        assert drawn == Fingerprint(num_samples=100)
        assert drawn.difference(of(Drawn())) is None
        assert drawn.difference(of(np.zeros((100, 2)))) is None
        assert drawn.difference(of(np.zeros((99, 2)))) is not None


class Stated(Drawn):
    """Says of itself which version it is."""

    def __init__(self, fingerprint):
        super().__init__()
        self.fingerprint = fingerprint


class StatedStream:
    """A stream that says which version it is, in a method."""

    def __init__(self, version):
        self.version = version

    def fingerprint(self):
        return self.version

    def __iter__(self):
        return self

    def __next__(self):
        return np.zeros(2)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("kind", [Stated, StatedStream])
@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.none() | st.integers() | st.text(max_size=9)] * 2))
def test_what_a_data_set_says_of_itself_is_compared(kind, stated):
    found = of(kind(stated[0])).difference(of(kind(stated[1])))
    known = [None if x is None else str(x) for x in stated]
    if None in known or known[0] == known[1]:
        assert found is None
    else:
        assert found == f"has the fingerprint {known[1]!r} instead of {known[0]!r}"


@pytest.mark.parametrize("value", [1.5, True, b"a", ["a"]])
def test_what_is_no_fingerprint_is_refused(value):
    with pytest.raises(TypeError, match=r"Stated.fingerprint is a .*return a string"):
        of(Stated(value))


def test_it_comes_back_through_json():
    for found in (of(rows()), of(Drawn()), of(Stated("a"))):
        assert decode(json.loads(json.dumps(encode(found))), Fingerprint, "data") == found


def test_few_samples_are_read_of_many_and_one_at_a_time():
    class Counted:
        reads = 0

        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            self.reads += 1
            return np.zeros(1 + index % 3)  # of different lengths

    data = Counted()
    assert of(data).content is not None and data.reads == 16
    assert of(np.zeros(1)).content is not None


class Molecules(Drawn):
    """Its `fingerprint` is of a sample, and tells nothing of the data set."""

    def fingerprint(self, smiles):
        return [len(smiles)]


class Numbered(Source):
    """A source of the user's own, which keeps what it reads from under the name `dataset`."""

    def __init__(self, dataset, **names):
        self.dataset = dataset
        vars(self).update(names)

    def __len__(self):
        return 10

    def batch(self, indices):
        return np.asarray(indices)


def test_a_method_that_needs_arguments_is_another_thing_of_that_name():
    assert of(Molecules()).stated is None


def test_a_source_is_asked_before_what_it_reads_from():
    assert fingerprint(Numbered(None, fingerprint="v1")).stated == "v1"
    assert fingerprint(Numbered(rows(), fingerprint=np.int64(3))).stated == "3"
    assert fingerprint(Numbered(Numbered(None, fingerprint="v2"))).stated == "v2"
    assert fingerprint(Numbered(rows())).stated is None
