"""A permutation of any length, place by place: one to one, the same forever, and without a pattern."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.data.shuffle import shuffled

NUM_KEYS = 3000


def orders(size, epoch=0):
    """One for each of many seeds, as rows."""
    return np.stack(
        [shuffled(np.arange(size), size, seed=seed, epoch=epoch) for seed in range(NUM_KEYS)]
    )


def excess(counts):
    """How far counts that should be equal are from that, in standard deviations of chi-square."""
    expected = counts.sum() / counts.size
    degrees = np.prod([n - 1 for n in counts.shape])
    return ((counts - expected) ** 2 / expected - degrees / counts.size).sum() / np.sqrt(
        2 * degrees
    )


def table(rows, columns, size):
    """How often each value of `rows` came together with each of `columns`."""
    counts = np.zeros((size, size))
    np.add.at(counts, (rows.ravel(), columns.ravel()), 1)
    return counts


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_every_index_comes_exactly_once(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed=seed, epoch=epoch)
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


@settings(deadline=None)
@given(data=st.data(), size=st.integers(1, 2**63 - 1), seed=st.integers(0, 2**70))
def test_a_place_goes_where_it_goes_whatever_is_asked_with_it(data, size, seed):
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=30)), int)
    found = shuffled(places, size, seed=seed, epoch=1)
    assert ((found >= 0) & (found < size)).all() and len(set(found.tolist())) == len(places)
    alone = [shuffled(places[i : i + 1], size, seed=seed, epoch=1) for i in range(len(places))]
    assert found.tolist() == [int(one[0]) for one in alone]


def test_the_order_is_part_of_the_checkpoint_format():
    # Another one would repeat and lose samples on resume.
    large = shuffled(np.array([0, 5 * 10**8, 10**9 - 1]), 10**9, seed=2**70, epoch=10**6)
    assert large.tolist() == [988471044, 447655438, 345648016]
    largest = shuffled(np.array([0, 2**62]), 2**63 - 1, seed=0, epoch=0)
    assert largest.tolist() == [2044929359766392088, 2687512609666112948]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_handful_is_as_likely_as_any_other(size):
    names = {order: i for i, order in enumerate(itertools.permutations(range(size)))}
    seen = np.bincount([names[tuple(order)] for order in orders(size).tolist()])
    assert len(seen) == len(names) and excess(seen) < 4


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 16, 31])
def test_places_epochs_and_neighbours_say_nothing_of_one_another(size):
    first, second = orders(size), orders(size, epoch=1)
    places = np.broadcast_to(np.arange(size), first.shape)
    assert excess(table(places, first, size)) < 4
    assert excess(table(first, second, size)) < 4
    steps = (first[:, 1:] - first[:, :-1]) % size  # 1 to size - 1, all alike
    assert excess(np.bincount(steps.ravel(), minlength=size)[1:]) < 4


def test_a_large_order_is_spread_evenly_and_neighbours_are_strangers():
    size = 10**9
    found = shuffled(np.arange(200_000), size, seed=3, epoch=0)
    assert excess(np.bincount(found * 1000 // size)) < 4
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 4 / np.sqrt(len(found))


def test_memory_is_that_of_what_is_asked_for():
    places = np.arange(8192) + 10**8
    shuffled(places, 10**9, seed=0, epoch=0)
    tracemalloc.start()
    shuffled(places, 10**9, seed=0, epoch=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * places.nbytes
