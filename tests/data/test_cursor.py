"""The order of samples: one permutation per epoch, cut anywhere, resumed anywhere."""

import dataclasses
import json
import unittest.mock as mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.data import cursor as module
from jaxgoodput.data.cursor import Cursor, Permutations, epochs_of, take

SIZES = st.integers(1, 40)
COUNTS = st.lists(st.integers(0, 90), max_size=8)


def epoch_order(seed, epoch, size):
    return take(Cursor(seed, epoch), size, size)[0]


def take_all(cursor, size, counts, **options):
    pieces = []
    for count in counts:
        indices, cursor = take(cursor, size, count, **options)
        assert indices.shape == (count,) and indices.dtype == np.int64
        pieces.append(indices)
    return np.concatenate([np.empty(0, np.int64), *pieces]), cursor


@given(size=SIZES, counts=COUNTS, seed=st.integers(0, 2**70), shuffle=st.booleans())
def test_batches_are_cut_from_the_epochs_permutations(size, counts, seed, shuffle):
    start = Cursor(seed)
    got, cursor = take_all(start, size, counts, shuffle=shuffle, permutations=Permutations())
    epochs = range(sum(counts) // size + 1)
    orders = [epoch_order(seed, e, size) if shuffle else np.arange(size) for e in epochs]
    np.testing.assert_array_equal(got, np.concatenate(orders)[: sum(counts)])
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    assert cursor.num_samples(size) == sum(counts) and cursor.offset < size
    np.testing.assert_array_equal(
        epochs_of(start, size, sum(counts)), np.repeat(epochs, size)[: sum(counts)]
    )


@pytest.mark.slow
@given(part=st.integers(1, 9), size=SIZES, counts=COUNTS)
def test_a_keyed_order_is_the_same_in_parts(part, size, counts):
    with mock.patch.object(module, "PART", part):
        got, _ = take_all(Cursor(3), size, counts, permutations=Permutations())
    np.testing.assert_array_equal(got, take_all(Cursor(3), size, counts)[0])


@pytest.mark.slow
@given(size=SIZES, before=COUNTS, after=COUNTS, seed=st.integers(0, 9))
def test_resume_from_any_cursor_equals_going_on(size, before, after, seed):
    start = Cursor(seed)
    whole, end = take_all(start, size, before + after)
    first, stop = take_all(start, size, before)
    restored = Cursor(**json.loads(json.dumps(dataclasses.asdict(stop))))
    second, resumed_end = take_all(restored, size, after)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    assert resumed_end == end and restored == stop


def test_epochs_and_seeds_give_different_orders():
    orders = {
        tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_the_order_is_part_of_the_checkpoint_format():
    # A shuffle that computes others would repeat and lose samples on resume.
    assert epoch_order(0, 0, 10).tolist() == [0, 5, 6, 9, 2, 7, 4, 3, 1, 8]
    assert epoch_order(7, 3, 8).tolist() == [7, 2, 5, 4, 6, 3, 0, 1]


def test_what_is_taken_belongs_to_the_caller():
    permutations = Permutations()
    cursor = Cursor(0)
    first, _ = take(cursor, 10, 5, permutations=permutations)
    expected = first.copy()
    first[:] = -1
    again, _ = take(cursor, 10, 5, permutations=permutations)
    np.testing.assert_array_equal(again, expected)


def test_parts_are_computed_once_and_only_two_are_kept(monkeypatch):
    computed, compute = [], module.shuffled

    def counted(places, size, *, seed, epoch):
        computed.append(epoch)
        return compute(places, size, seed=seed, epoch=epoch)

    monkeypatch.setattr(module, "shuffled", counted)
    permutations, start = Permutations(), Cursor(0)
    take_all(start, 10, [3] * 20, permutations=permutations)
    assert computed == [0, 1, 2, 3, 4, 5]
    take(start, 10, 5, permutations=permutations)
    assert computed[6:] == [0]


@pytest.mark.parametrize(
    ("cursor", "size", "count", "message"),
    [
        (Cursor(0), 0, 1, "nothing to take"),
        (Cursor(0), 5, -1, "count=-1"),
        (Cursor(3, 2, 6), 5, 1, "sample 6 of epoch 2.*only 5 samples.*larger dataset"),
    ],
)
def test_impossible_requests_are_named(cursor, size, count, message):
    with pytest.raises(ValueError, match=message):
        take(cursor, size, count)


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({"seed": 0, "epoch": 0, "offset": 0, "rank": 1}, TypeError, "rank"),
        ({"seed": 0, "epoch": -1, "offset": 0}, ValueError, "epoch=-1 is negative"),
        ({"seed": 0, "epoch": 0, "offset": 1.0}, TypeError, "offset"),
        ({"seed": True, "epoch": 0, "offset": 0}, TypeError, "seed=True is a bool"),
        ({"seed": 0, "epoch": np.int64(1), "offset": 0}, TypeError, "epoch"),
    ],
)
def test_a_bad_record_is_no_cursor(record, kind, message):
    with pytest.raises(kind, match=message):
        Cursor(**record)
