"""An index answers for every id what a dictionary would."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._hash import mixed
from jaxgoodput.embedding.hashing import initial_values, owners
from jaxgoodput.embedding.index import MISSING, DirectIndex, HashIndex, index_for

NUM_IDS = 300
MIXED = [0, 6238072747940578789, 15839785061582574730, 1466053882811111471]
OWNERS = [0, 2, 2, 2, 0, 2, 0, 2, 1, 1, 0, 2]
INITIAL = [
    [-0.09355151653289795, -0.9719339609146118, 0.9423298835754395],
    [-0.686123251914978, 0.7324806451797485, 0.6217019557952881],
    [0.5565652847290039, -0.6329951286315918, 0.5719835758209229],
    [0.9610973596572876, -0.43330180644989014, -0.47161734104156494],
]


@st.composite
def changes(draw):
    """Draw a sequence of calls, each with different ids."""
    kind = st.sampled_from(["put", "put", "remove"])
    ids = st.lists(st.integers(0, NUM_IDS - 1), unique=True, max_size=200)
    return draw(st.lists(st.tuples(kind, ids), max_size=12))


@pytest.mark.parametrize("make", [HashIndex, lambda: DirectIndex(NUM_IDS)])
@given(calls=changes())
def test_it_is_a_dictionary(make, calls):
    index, expected, number = make(), {}, 0
    everything = np.arange(NUM_IDS)
    for kind, ids in calls:
        if kind == "put":
            numbers = np.arange(number, number + len(ids), dtype=np.uint32)
            old = index.put(np.array(ids, np.int64), numbers)
            assert old.tolist() == [expected.get(i, int(MISSING)) for i in ids]
            expected |= dict(zip(ids, numbers.tolist(), strict=True))
            number += len(ids)
        else:
            there = [i for i in ids if i in expected]
            index.remove(np.array(there, np.int64))
            for i in there:
                del expected[i]
        found = index.get(everything)
        assert found.tolist() == [expected.get(i, int(MISSING)) for i in range(NUM_IDS)]


def test_ids_come_and_go_for_ever_without_the_cells_filling_up():
    index, cells = HashIndex(), 0
    for start in range(0, 200_000, 400):
        ids = np.arange(start, start + 400)
        index.put(ids, np.zeros(400, np.uint32))
        index.remove(ids)
        cells = max(cells, len(index._ids))
    assert cells <= 4096
    assert (index.get(np.arange(200_000)) == MISSING).all()


def test_ids_of_63_bits_are_told_apart():
    ids = np.array([2**62, 2**62 + 1, 2**63 - 3, 0, 1], np.int64)
    index = index_for(None)
    index.put(ids, np.arange(5, dtype=np.uint32))
    assert index.get(ids).tolist() == [0, 1, 2, 3, 4]
    assert index.get(np.array([2, 2**61])).tolist() == [int(MISSING)] * 2


def test_the_numbers_that_follow_from_an_id_are_part_of_the_format():
    ids = np.array([0, 1, 2, 10**12])
    assert mixed(ids).tolist() == MIXED
    assert owners(np.arange(12), range(3)).tolist() == OWNERS
    first = initial_values(ids, 3, seed=0, scale=1.0)
    np.testing.assert_array_equal(first, np.array(INITIAL, np.float32))
    assert first.dtype == np.float32


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 7])
def test_a_host_more_takes_its_share_and_moves_nothing_between_the_others(num_hosts):
    ids = np.arange(40_000)
    before, after = owners(ids, range(num_hosts)), owners(ids, range(num_hosts + 1))
    moved = before != after
    assert (after[moved] == num_hosts).all()
    assert abs(moved.mean() - 1 / (num_hosts + 1)) < 0.01
    assert np.bincount(after).min() > 0.95 * len(ids) / (num_hosts + 1)


@pytest.mark.parametrize("hosts", [[], [0, 1, 0]])
def test_hosts_that_cannot_be_are_named(hosts):
    with pytest.raises(ValueError, match="hosts="):
        owners(np.arange(3), hosts)


def test_rows_begin_spread_evenly_and_unlike_each_other():
    values = initial_values(np.arange(20_000), 7, seed=3, scale=0.5)
    assert abs(values.mean()) < 0.002 and abs(values.std() - 0.5 / 3**0.5) < 0.002
    assert np.abs(values).max() <= 0.5
    assert len(np.unique(values[:, 0])) > 19_900
    assert abs(np.corrcoef(values.T) - np.eye(7)).max() < 0.03
    np.testing.assert_array_equal(values[5:6], initial_values(np.array([5]), 7, seed=3, scale=0.5))
