"""If plans are carried out in order, every row is where they say, and rows that are read stay."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.embedding import directory as directories
from jaxgoodput.embedding.directory import NEVER, Directory, Tier, warmer

DEVICE_ROWS, RAM_ROWS, NUM_IDS = 12, 16, 60


class Tiers:
    """A model of where rows are, with plans carried out one by one, to compare a directory with."""

    def __init__(self):
        self.device, self.ram, self.disk = {}, {}, set()  # slot -> id
        self.evicted_at = {}

    def carry_out(self, plan, ids):
        assert plan.waits_for < plan.number
        fetched = set()
        for i, found in zip(plan.missing[plan.in_ram], plan.from_ram, strict=True):
            assert self.ram.pop(int(found)) == i
            assert self.evicted_at[int(i)] <= plan.waits_for
            fetched.add(int(i))
        for i in plan.missing[~plan.in_ram]:
            assert i not in self.ram.values() and i not in self.device.values()
            self.disk.discard(int(i))
            fetched.add(int(i))
        for i, slot in zip(plan.dumped, plan.dumped_slots, strict=True):
            assert self.ram.pop(int(slot)) == i
            assert self.evicted_at[int(i)] <= plan.waits_for
            self.disk.add(int(i))
        for i, slot, to in zip(plan.evicted, plan.evicted_slots, plan.evicted_targets, strict=True):
            assert self.device.pop(int(slot)) == i
            assert int(to) not in self.ram
            self.ram[int(to)] = int(i)
            self.evicted_at[int(i)] = plan.number
        for i, slot in zip(plan.missing, plan.targets, strict=True):
            assert int(slot) not in self.device
            self.device[int(slot)] = int(i)
        assert [self.device[int(slot)] for slot in plan.slots] == ids.tolist()
        assert max(self.device) < DEVICE_ROWS and max(self.ram, default=0) < RAM_ROWS
        places = [*self.device.values(), *self.ram.values(), *self.disk]
        assert len(places) == len(set(places))  # in one tier at a time


BATCHES = st.lists(
    st.lists(st.integers(0, NUM_IDS - 1), unique=True, min_size=1, max_size=DEVICE_ROWS).map(
        lambda ids: np.array(sorted(ids), np.int64)
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(batches=BATCHES, look_ahead=st.integers(0, 4), settle_at=st.integers(0, 40))
def test_every_plan_finds_its_rows_whatever_is_read(batches, look_ahead, settle_at):
    directory = Directory(
        device_rows=DEVICE_ROWS, ram_rows=RAM_ROWS, num_ids=NUM_IDS, half_life=10.0
    )
    tiers, told = Tiers(), 0
    for number, ids in enumerate(batches):
        while told < min(number + look_ahead + 1, len(batches)):
            directory.look_ahead(batches[told])
            told += 1
        plan = directory.plan()
        assert plan.number == number
        tiers.carry_out(plan, ids)
        if number == settle_at:  # batches that were announced but not planned are forgotten
            device, ram = np.full(DEVICE_ROWS, -1), np.full(RAM_ROWS, -1)
            device[list(tiers.device)] = list(tiers.device.values())
            ram[list(tiers.ram)] = list(tiers.ram.values())
            directory, told = directory.settled(device, ram, number), number + 1
            tiers.evicted_at = dict.fromkeys(tiers.evicted_at, NEVER)


def through(directory, batches, look_ahead=0):
    """Return the plans of a stream of batches."""
    plans = []
    for number in range(len(batches)):
        for ids in batches[number : number + 1] if look_ahead == 0 else ():
            directory.look_ahead(np.array(ids))
        if look_ahead:
            last = number + look_ahead
            wanted = batches[: last + 1] if number == 0 else batches[last : last + 1]
            for ids in wanted:
                directory.look_ahead(np.array(ids))
        plans.append(directory.plan())
    return plans


def test_of_rows_read_once_the_least_recent_leaves_and_frequent_ones_stay():
    directory = Directory(device_rows=4, ram_rows=4, num_ids=100, half_life=50.0)
    plans = through(directory, [[1, 2], [1, 3], [1, 4], [5], [6], [2]])
    assert [plan.evicted.tolist() for plan in plans] == [[], [], [], [2], [3], [4]]
    assert plans[-1].in_ram.all() and plans[-1].waits_for == 3


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_rows_are_read_often_that_so_large_a_share_of_batches_reads(share):
    rng = np.random.default_rng(0)
    rates = np.concatenate([np.linspace(0.02, 0.98, 40)])
    directory = Directory(device_rows=40, ram_rows=40, num_ids=40, half_life=300.0)
    directory.often = share
    for _ in range(1500):
        directory.look_ahead(np.flatnonzero(rng.random(40) < rates))
        plan = directory.plan()
    directory.look_ahead(np.arange(40))
    plan = directory.plan()
    clear = abs(rates - share) > 0.1
    np.testing.assert_array_equal(plan.is_often[clear], rates[clear] > share)


def test_what_was_read_often_long_ago_gives_way():
    directory = Directory(device_rows=2, ram_rows=2, num_ids=100, half_life=3.0)
    plans = through(directory, [[1]] * 8 + [[2]] * 5 + [[2]] * 12 + [[3]])
    assert plans[-1].evicted.tolist() == [1]


def test_rows_that_the_look_ahead_reads_stay():
    batches = [[1, 2], [3], [4], [1, 2]]
    for look_ahead, evicted in ((0, [1, 2]), (3, [3])):
        directory = Directory(device_rows=3, ram_rows=3, num_ids=100, half_life=50.0)
        plans = through(directory, batches, look_ahead)
        gone = [i for plan in plans[:3] for i in plan.evicted.tolist()]
        assert set(gone) <= set(evicted)
        assert bool(plans[3].missing.size) == (look_ahead == 0)


def test_where_the_look_ahead_leaves_no_room_what_is_needed_last_gives_way():
    directory = Directory(device_rows=4, ram_rows=4, num_ids=100, half_life=50.0)
    plans = through(directory, [[1, 2, 3, 4], [5], [1], [2], [3], [4]], look_ahead=5)
    assert plans[1].evicted.tolist() == [4]


def test_where_the_look_ahead_leaves_no_room_rows_that_it_does_not_read_leave_first():
    directory = Directory(device_rows=4, ram_rows=4, num_ids=100, half_life=50.0)
    plans = through(directory, [[1, 2, 3, 4], [5, 6], [1], [2], [4]], look_ahead=4)
    assert plans[1].evicted.tolist() == [3, 4]


@pytest.mark.parametrize("look_ahead", [0, 5])
def test_with_enough_look_ahead_no_batch_needs_what_one_under_way_evicts(look_ahead):
    rng = np.random.default_rng(0)
    directory = Directory(device_rows=300, ram_rows=300, num_ids=2000, half_life=100.0)
    batches = [np.unique(np.minimum(rng.zipf(1.1, 40) - 1, 1999)) for _ in range(300)]
    plans = through(directory, batches, look_ahead)
    close = [plan for plan in plans[100:] if plan.number - plan.waits_for <= look_ahead]
    recent = [plan for plan in plans[100:] if plan.number - plan.waits_for <= 5]
    assert not close
    assert bool(recent) == (look_ahead == 0)


@pytest.mark.parametrize("count", [1, 77, 300, 3000])
def test_of_rows_as_cold_as_each_other_those_of_the_first_slots_leave(count):
    rng = np.random.default_rng(0)
    tier = Tier(4096, None)
    slots, heat = np.arange(4000), rng.integers(0, 4, 4000).astype(float)
    tier.occupy(slots, rng.permutation(4000), heat, number=0)
    left, _, _ = tier.victims(count, now=1)
    np.testing.assert_array_equal(left, np.lexsort((slots, heat))[:count])


def test_heat_is_what_logarithms_say_in_bits_that_no_library_changes():
    heat = np.concatenate([np.random.default_rng(0).uniform(-60, 60, 10**5), [-np.inf, 0.0]])
    np.testing.assert_allclose(warmer(heat, 0.0), np.logaddexp2(heat, 0.0), rtol=0, atol=5e-7)
    gaps = np.arange(len(directories._ADDED)) / directories.PER_UNIT
    exact = np.log2(1 + np.exp2(-gaps)) * 2**30
    np.testing.assert_array_equal(directories._ADDED * 2**30, np.round(exact))
    # A math library that is wrong by 1e-15 must round each entry to the same value.
    assert abs(exact - np.floor(exact) - 0.5).min() > 1e-15 * 2**30
