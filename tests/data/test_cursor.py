"""The order of samples: one permutation per epoch, cut anywhere, resumed anywhere."""

import dataclasses
import doctest
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.data import cursor as module
from jaxgoodput.data.cursor import Cursor, Permutations, epoch_order, take

SIZES = st.integers(1, 40)
COUNTS = st.lists(st.integers(0, 90), max_size=8)


def take_all(cursor, size, counts, **options):
    pieces = []
    for count in counts:
        indices, cursor = take(cursor, size, count, **options)
        assert indices.shape == (count,) and indices.dtype == np.int64
        pieces.append(indices)
    return np.concatenate([np.empty(0, np.int64), *pieces]), cursor


@given(size=SIZES, counts=COUNTS, seed=st.integers(0, 2**70), shuffle=st.booleans())
def test_batches_are_cut_from_the_epochs_permutations(size, counts, seed, shuffle):
    got, cursor = take_all(Cursor(seed), size, counts, shuffle=shuffle, permutations=Permutations())
    epochs = range(sum(counts) // size + 1)
    orders = [epoch_order(seed, e, size) if shuffle else np.arange(size) for e in epochs]
    np.testing.assert_array_equal(got, np.concatenate(orders)[: sum(counts)])
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    assert cursor.num_samples(size) == sum(counts) and cursor.offset < size


@given(size=SIZES, before=COUNTS, after=COUNTS, seed=st.integers(0, 9))
def test_resume_from_any_cursor_equals_going_on(size, before, after, seed):
    whole, end = take_all(Cursor(seed), size, before + after)
    first, stop = take_all(Cursor(seed), size, before)
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
    # A numpy that draws other permutations would repeat and lose samples on resume.
    assert epoch_order(0, 0, 10).tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert epoch_order(7, 3, 8).tolist() == [3, 5, 0, 4, 2, 7, 1, 6]


def test_what_is_taken_belongs_to_the_caller():
    permutations = Permutations()
    first, _ = take(Cursor(0), 10, 5, permutations=permutations)
    expected = first.copy()
    first[:] = -1
    again, _ = take(Cursor(0), 10, 5, permutations=permutations)
    np.testing.assert_array_equal(again, expected)


def test_permutations_are_drawn_once_and_only_two_are_kept(monkeypatch):
    drawn = []

    def counted(seed, epoch, size):
        drawn.append(epoch)
        return epoch_order(seed, epoch, size)

    monkeypatch.setattr(module, "epoch_order", counted)
    permutations = Permutations()
    take_all(Cursor(0), 10, [3] * 20, permutations=permutations)
    assert drawn == [0, 1, 2, 3, 4, 5]
    take(Cursor(0), 10, 5, permutations=permutations)
    assert drawn[6:] == [0]


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


def test_the_examples_in_the_docstrings_hold():
    failed, tried = doctest.testmod(module)
    assert tried and not failed
