"""Leases of samples: each part of a batch is taken once, also if processes that will leave take no more."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._jax import SharedStore
from jaxgoodput.train.runs.membership import NO_LEASE, Agreement


class Store(SharedStore):
    """What processes share, in memory."""

    def __init__(self):
        self.values, self.counts = {}, {}

    def count(self, key):
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]

    def set(self, key, value, *, overwrite=False):
        return self.values.setdefault(key, value) == value

    def wait(self, key, *, unless):
        assert key in self.values, "the process that speaks for the group asks first"
        return self.values[key]


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(0, 12),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.integers(0, 2**32),
)
def test_all_parts_are_taken_once_whichever_processes_decline_and_whenever(
    num_groups, group_size, num_parts, declines_at, seed
):
    """As `Loader.next_in_parts` asks: until a number is beyond the last part. Two steps one after another."""
    store, rng = Store(), random.Random(seed)
    count = num_groups * group_size
    made = [Agreement(store, i, count, group_size=group_size) for i in range(count)]
    clock = 0
    for step in (3, 4):
        taken, after, asking = [], [], set(range(num_groups))
        while asking:
            group = rng.choice(sorted(asking))
            clock += 1
            declines = clock >= declines_at[group]
            members = range(group * group_size, (group + 1) * group_size)
            numbers = [made[i].lease(step, declines=declines) for i in members]
            assert len(set(numbers)) == 1, "a group computes a part together"
            if numbers[0] < num_parts:
                taken.append(numbers[0])
                after += [group] if declines else []
            else:
                asking.discard(group)
        assert sorted(taken) == list(range(num_parts)), "each part once, and none is left"
        assert len(set(after)) <= 1, "only one takes parts although it will leave"


def test_one_that_declines_takes_nothing_while_another_does_not():
    store = Store()
    leaves, stays = Agreement(store, 0, 2), Agreement(store, 1, 2)
    assert leaves.lease(1) == 0 and stays.lease(1) == 1
    assert [leaves.lease(1, declines=True) for _ in range(3)] == [NO_LEASE] * 3
    assert [stays.lease(1) for _ in range(3)] == [2, 3, 4]
    assert leaves.lease(2, declines=True) == NO_LEASE and leaves.lease(3) == 0


@pytest.mark.parametrize("count", [2, 3])
def test_the_last_of_all_that_decline_takes_what_is_left(count):
    store = Store()
    all_of_them = [Agreement(store, i, count) for i in range(count)]
    *first, last = [one.lease(7, declines=True) for one in all_of_them]
    assert first == [NO_LEASE] * (count - 1) and last == 0
    assert all_of_them[-1].lease(7, declines=True) == 1
