"""The loader hands out the cursor's order exactly once, on the devices, whatever the batch does."""

import dataclasses
import itertools
import re
import sys
import threading
import unittest.mock as mock
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgoodput.clock import FakeClock
from jaxgoodput.data.cursor import Cursor, epochs_of, take
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.loader import Loader
from jaxgoodput.data.read_ahead import SMALL_BYTES, TOGETHER
from jaxgoodput.data.rows import NumberedRows
from jaxgoodput.data.sources import Source, abstract_sample
from jaxgoodput.data.streams import StreamSource, stream
from jaxgoodput.goodput.search import BatchConfig


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() <= before, threading.enumerate()


def sharding_over(num_devices, first=0):
    devices = np.array(jax.devices()[first : first + num_devices])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("data"))


def config_of(micro_batch_size, num_micro_batches=1, num_replicas=2):
    return BatchConfig(
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
    )


def loader_of(source, num_devices=1, *, first=0, cursor=None, clock=None, **options):
    if not isinstance(source, Source):
        source = as_source(source)
    return Loader(
        source,
        sharding=sharding_over(num_devices, first),
        cursor=Cursor(0) if cursor is None else cursor,
        clock=FakeClock() if clock is None else clock,
        **options,
    )


def numbers(size):
    """A dataset whose samples are their own indices."""
    return {"id": np.arange(size, dtype=np.int32)}


def step(loader, config):
    """The next batch of a loader that has one."""
    batch = loader.next(config)
    assert batch is not None
    return batch


def drain(loader, configs):
    batches = []
    for config in configs:
        batch = loader.next(config)
        if batch is None:
            break
        batches.append(batch)
    return batches


def ids(batches):
    return np.concatenate([np.empty(0, np.int64), *(batch.indices for batch in batches)])


def real_ids(micro_batch):
    return np.asarray(micro_batch.data["id"])[np.asarray(micro_batch.mask) == 1]


CONFIGS = st.lists(
    st.builds(
        config_of,
        st.integers(1, 7),
        st.integers(1, 3),
        st.sampled_from([2, 4]),
    ),
    min_size=1,
    max_size=6,
)


# -- exactly once ---------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 40),
    processes=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=4
    ),
    max_samples=st.none() | st.integers(0, 60),
    turns=st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
@pytest.mark.filterwarnings("ignore:global_batch_size:UserWarning")
def test_parts_that_go_to_whoever_is_free_are_the_whole_batch(
    size, processes, steps, max_samples, turns
):
    """Any number of processes, in any order, some steps in parts and others evenly."""
    loaders = [
        loader_of(
            numbers(size),
            first=index,
            process_index=index,
            process_count=processes,
            max_samples=max_samples,
            prefetch=index,
        )
        for index in range(processes)
    ]
    cursor, given_out = Cursor(0), 0
    for micro, count, in_parts in steps:
        config = config_of(micro, count, processes)
        total = config.global_batch_size
        total = total if max_samples is None else min(total, max_samples - given_out)
        if not in_parts:
            found = [loader.next(config) for loader in loaders]
            got = [micro for batch in found if batch is not None for micro in batch.micro_batches]
        else:
            leases = iter(range(10**6))
            found = [loader.next_in_parts(config, lambda it=leases: next(it)) for loader in loaders]
            asking = {i: batch.parts for i, batch in enumerate(found) if batch is not None}
            taken = {i: [] for i in asking}
            for turn in (turns * 200)[: 50 * len(asking)]:
                parts = asking.get(turn % processes)
                one = None if parts is None else next(parts, None)
                if one is not None:
                    taken[turn % processes].append(one)
            for i, parts in asking.items():
                assert parts is not None
                taken[i] += list(parts)
                assert taken[i], "a process that got none has one to add up, of nothing"
            got = [one for ones in taken.values() for one in ones]
        if total == 0:
            assert found == [None] * processes
            break
        wanted, cursor = take(cursor, size, total)
        given_out += total
        assert sorted(np.concatenate([real_ids(one) for one in got])) == sorted(wanted)
        for loader, batch in zip(loaders, found, strict=True):
            assert batch is not None and batch.num_samples == total
            assert loader.cursor == batch.after == cursor
    for loader in loaders:
        loader.close()


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 60),
    configs=CONFIGS,
    process_count=st.sampled_from([1, 2]),
    prefetch=st.integers(0, 3),
    shuffle=st.booleans(),
    max_samples=st.none() | st.integers(0, 150),
)
@pytest.mark.filterwarnings("ignore:global_batch_size=")
def test_every_sample_of_every_epoch_comes_exactly_once(
    size, configs, process_count, prefetch, shuffle, max_samples
):
    """For any configurations and process counts: the batches concatenate to the permutations."""
    options = dict(prefetch=prefetch, shuffle=shuffle, max_samples=max_samples)
    loaders = [
        loader_of(numbers(size), process_index=p, process_count=process_count, **options)
        for p in range(process_count)
    ]
    steps = []
    for loader in loaders:
        with loader:
            steps.append(drain(loader, configs))
    wanted = sum(config.global_batch_size for config in configs)
    total = wanted if max_samples is None else min(wanted, max_samples)
    expected, end = take(Cursor(0), size, total, shuffle=shuffle)
    for loader, batches in zip(loaders, steps, strict=True):
        np.testing.assert_array_equal(ids(batches), expected)
        assert loader.cursor == end

    # What the devices got, over all processes, is what the indices say: nothing lost or doubled.
    for batches in zip(*steps, strict=True):
        first = batches[0]
        got = np.concatenate(
            [
                np.concatenate([real_ids(part) for part in parts])
                for parts in zip(*(batch.micro_batches for batch in batches), strict=True)
            ]
        )
        np.testing.assert_array_equal(got, first.indices)
        rows = sum(micro.mask.shape[0] for b in batches for micro in b.micro_batches)
        assert rows == first.num_samples + first.num_padded
        weight = sum(float(micro.mask.sum()) for b in batches for micro in b.micro_batches)
        assert weight == first.num_samples


@settings(deadline=None, max_examples=15)
@given(size=st.integers(40, 60), before=CONFIGS, after=CONFIGS, read_ahead=st.integers(0, 3))
@pytest.mark.filterwarnings("ignore:global_batch_size=")
def test_resume_from_any_cursor_equals_going_on(size, before, after, read_ahead):
    """A restart from the cursor of the last step loses what was prefetched, and no sample."""
    with loader_of(numbers(size), prefetch=read_ahead) as loader:
        whole = drain(loader, before + after)
    with loader_of(numbers(size)) as loader:
        first = drain(loader, before)
        cursor = Cursor(**dataclasses.asdict(loader.cursor))
    assert cursor == first[-1].after
    # The second life runs with another number of processes.
    with loader_of(numbers(size), cursor=cursor, process_count=2) as loader:
        second = drain(loader, after)
    np.testing.assert_array_equal(ids(first + second), ids(whole))
    assert [b.before for b in first + second] == [b.before for b in whole]
    assert [b.after for b in first + second] == [b.after for b in whole]


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(3, 40),
    first=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    configs=CONFIGS,
    process_count=st.sampled_from([1, 2]),
    shuffle=st.booleans(),
    max_samples=st.none() | st.integers(1, 150),
)
@pytest.mark.filterwarnings("ignore:global_batch_size=")
def test_numbered_rows_tell_the_epoch_and_the_index_of_their_samples(
    size, first, configs, process_count, shuffle, max_samples
):
    """Also of padding, which repeats a sample, and of parts that a process leases."""
    cursor = Cursor(0, *first)
    of_processes = []
    for index in range(process_count):
        with loader_of(
            numbers(size),
            cursor=cursor,
            shuffle=shuffle,
            max_samples=max_samples,
            process_index=index,
            process_count=process_count,
            on_host=lambda x: x["id"],
            numbered=True,
        ) as loader:
            of_processes.append(drain(loader, configs))
    found = []  # epochs of samples, in order
    for micro_batches in zip(*map(micro_batches_of, of_processes), strict=True):
        for one in micro_batches:
            assert isinstance(one.data, NumberedRows)
            epochs, indices = np.ascontiguousarray(one.data.numbers).astype("<u4").view("<u8").T
            np.testing.assert_array_equal(indices, one.data.own["id"])
            np.testing.assert_array_equal(indices, one.on_host)
            found += epochs[np.asarray(one.mask) == 1].tolist()
    total = sum(batch.num_samples for batch in of_processes[0])
    assert found == epochs_of(cursor, size, total).tolist()


def micro_batches_of(batches):
    return [micro for batch in batches for micro in batch.micro_batches]


def test_leased_parts_are_numbered():
    leases = iter(range(3))
    with loader_of(numbers(40), numbered=True) as loader:
        batch = loader.next_in_parts(config_of(4, 3), lambda: next(leases, 9))
        assert batch is not None and batch.parts is not None
        parts = list(batch.parts)
    found = np.concatenate([np.asarray(part.data.numbers)[:, 2] for part in parts])
    np.testing.assert_array_equal(found, batch.indices)


LIVES = st.lists(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=8), max_size=6)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(lives=LIVES, size=st.integers(30, 50), every=st.sampled_from([1, 3]))
def test_killed_at_random_moments_every_sample_still_counts_once(lives, size, every):
    """Steps since the last checkpoint are undone by its cursor, not repeated on top."""
    log, saved, saved_steps = [], Cursor(3), 0
    for life in lives:
        log = log[:saved_steps]  # the state goes back to the checkpoint, and so does the cursor
        with loader_of(numbers(size), cursor=saved) as loader:
            for micro_batch_size, save in life:
                log.append(step(loader, config_of(micro_batch_size, every)))
                if save:
                    saved, saved_steps = log[-1].after, len(log)
    order = ids(log)
    expected, _ = take(Cursor(3), size, len(order))
    np.testing.assert_array_equal(order, expected)


# -- placement ------------------------------------------------------------------------------------


def test_two_processes_of_two_devices_see_what_one_process_of_four_sees():
    configs = [config_of(3, 2, 4), config_of(5, 1, 4), config_of(3, 3, 4)]
    options = dict(max_samples=70)
    with loader_of(numbers(50), 4, **options) as alone:
        expected = drain(alone, configs)
    parts = []
    for p in range(2):
        options.update(process_index=p, process_count=2, first=2 * p)
        with loader_of(numbers(50), 2, **options) as loader:
            parts.append(drain(loader, configs))
    for whole, left, right in zip(expected, *parts, strict=True):
        np.testing.assert_array_equal(whole.indices, left.indices)
        assert (whole.num_padded, whole.after) == (right.num_padded, right.after)
        for w, l, r in zip(
            whole.micro_batches, left.micro_batches, right.micro_batches, strict=True
        ):
            shards = [np.asarray(s.data) for s in w.data["id"].addressable_shards]
            halves = [
                np.asarray(s.data) for half in (l, r) for s in half.data["id"].addressable_shards
            ]
            np.testing.assert_array_equal(shards, halves)
            np.testing.assert_array_equal(
                w.mask, np.concatenate([np.asarray(l.mask), np.asarray(r.mask)])
            )


def test_batches_are_global_arrays_in_the_order_of_micro_batch_then_replica():
    config = config_of(3, 2, 4)
    with loader_of(numbers(50), 4, shuffle=False) as loader:
        batch = step(loader, config)
    assert batch.config == config and batch.num_padded == 0
    expected = np.arange(24).reshape(2, 4, 3)
    for k, micro in enumerate(batch.micro_batches):
        array = micro.data["id"]
        assert array.sharding == micro.mask.sharding == sharding_over(4)
        assert micro.mask.dtype == jnp.float32 and micro.mask.shape == array.shape == (12,)
        for replica, shard in enumerate(array.addressable_shards):
            np.testing.assert_array_equal(shard.data, expected[k, replica])


def test_a_nested_source_of_three_levels_keeps_structure_dtypes_and_values():
    rng = np.random.default_rng(0)
    arrays = {
        "user": {
            "history": (rng.integers(0, 9, (20, 4)), rng.random((20, 4))),
            "age": rng.random(20),
        },
        "label": rng.integers(0, 2, 20).astype(np.int8),
    }
    with loader_of(arrays, 2, max_samples=11) as loader:
        batch = step(loader, config_of(4, 2, 2))
    assert batch.num_samples == 11 and batch.num_padded == 1
    got = jax.tree.map(
        lambda *parts: np.concatenate(parts)[:11], *(m.data for m in batch.micro_batches)
    )
    assert jax.tree.structure(got) == jax.tree.structure(arrays)
    expected = jax.tree.map(lambda x: x[batch.indices], arrays)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b.astype(a.dtype))
    assert got["user"]["history"][0].dtype == np.int32
    assert got["user"]["age"].dtype == np.float32
    assert got["label"].dtype == np.int8


def test_the_loop_runs_under_the_transfer_guard():
    with jax.transfer_guard("disallow"):
        for prefetch in (0, 2):
            with loader_of(numbers(50), 4, prefetch=prefetch, max_samples=30) as loader:
                assert len(drain(loader, [config_of(2, 2, 4)] * 3)) == 2


# -- the last batch -------------------------------------------------------------------------------


def test_the_last_batch_is_as_small_as_can_be_and_padded_with_real_values_of_weight_zero():
    data = {"x": np.arange(100, dtype=np.float32)[:, None] + 5, "id": np.arange(100)}
    with loader_of(data, 2, max_samples=37) as loader:
        batches = drain(loader, [config_of(4, 3, 2)] * 9)
        assert loader.next(config_of(1)) is None and loader.next(config_of(4, 3, 2)) is None
    assert [b.num_samples for b in batches] == [24, 13]
    assert [b.num_padded for b in batches] == [0, 1]
    last = batches[-1]
    # 13 samples are a micro-batch of 8 and one of 6 (two replicas), of which 5 are real.
    assert len(last.micro_batches) == 2 and last.config.num_micro_batches == 3
    mask = np.asarray(last.micro_batches[1].mask)
    assert mask.tolist() == [1] * 5 + [0]
    x = np.asarray(last.micro_batches[1].data["x"])[:, 0]
    np.testing.assert_array_equal(x[:5], last.indices[8:] + 5)
    np.testing.assert_array_equal(x[5:], [last.indices[8 + 3] + 5])  # the first of its replica
    assert last.after == Cursor(0, 0, 37)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("count", range(1, 13))
def test_padding_repeats_the_first_sample_of_its_replica(replicas, count):
    """If a replica has none of its own, it gets the first one of the micro-batch."""
    with loader_of(numbers(40), replicas, max_samples=count) as loader:
        batch = step(loader, config_of(12 // replicas, num_replicas=replicas))
    (micro,) = batch.micro_batches
    mask, ids = np.asarray(micro.mask), np.asarray(micro.data["id"])
    size = len(ids) // replicas
    assert size == -(-count // replicas) and mask.sum() == count
    for row in range(count, len(ids)):
        first = row // size * size
        assert ids[row] == batch.indices[first if first < count else 0]


def test_full_micro_batches_share_one_mask_and_a_padded_one_has_its_own():
    with loader_of(numbers(27), 2, max_samples=27) as loader:
        batches = drain(loader, [config_of(4, 2)] * 2)
    *full, last = [micro.mask for batch in batches for micro in batch.micro_batches]
    assert len(full) == 3 and all(mask is full[0] for mask in full)
    assert last is not full[0] and np.asarray(last).tolist() == [1] * 3 + [0]
    assert np.asarray(full[0]).tolist() == [1] * 8


def test_a_process_may_get_padding_only():
    with loader_of(numbers(10), max_samples=1, process_index=1, process_count=2) as loader:
        batch = step(loader, config_of(3))
    (micro,) = batch.micro_batches
    assert np.asarray(micro.mask).tolist() == [0]
    assert np.asarray(micro.data["id"]).tolist() == [batch.indices[0]]
    assert (batch.num_samples, batch.num_padded) == (1, 1)


@pytest.mark.parametrize("config", [config_of(4), config_of(2, 2)])
def test_what_is_no_whole_batch_is_left_out_where_that_is_asked_for(config):
    with loader_of(numbers(30), 2, max_samples=30, drop_last=True) as loader:
        batches = drain(loader, [config] * 9)
        assert loader.next(config) is None
    assert [b.num_samples for b in batches] == [8, 8, 8]
    assert loader.cursor == batches[-1].after


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(4, 40),  # a batch at least
    begin=st.integers(0, 90),
    total=st.integers(1, 90),
    drops=st.booleans(),
    in_parts=st.booleans(),
)
def test_what_is_left_after_a_batch_is_what_is_handed_out_after_it(
    size, begin, total, drops, in_parts
):
    cursor = Cursor(0).later(begin, size)
    config = config_of(2, 2, num_replicas=1)
    with loader_of(numbers(size), cursor=cursor, max_samples=total, drop_last=drops) as loader:
        batches = []
        leases = itertools.count()
        while (
            batch := loader.next_in_parts(config, lambda: next(leases))
            if in_parts
            else loader.next(config)
        ) is not None:
            batches.append(batch)
        counts = [batch.num_samples for batch in batches]
        left = [loader.samples_left(batch) for batch in batches]
    assert left == [sum(counts[i + 1 :]) for i in range(len(counts))]
    assert sum(counts) == (total - total % config.global_batch_size if drops else total)


def test_without_an_end_it_is_not_known_how_much_is_left():
    with loader_of(numbers(10)) as loader:
        assert loader.samples_left(step(loader, config_of(1))) is None


def test_weighted_means_over_padded_batches_are_those_of_the_samples():
    values = np.random.default_rng(0).random(30)
    with loader_of({"x": values}, 2, max_samples=30) as loader:
        batches = drain(loader, [config_of(4, 2, 2), config_of(5), config_of(4)])
    total = sum(float((m.data["x"] * m.mask).sum()) for b in batches for m in b.micro_batches)
    np.testing.assert_allclose(total, values.sum(), rtol=1e-5)
    assert sum(b.num_samples for b in batches) == 30 and batches[-1].num_padded == 0


# -- prefetch -------------------------------------------------------------------------------------


class Gate(Source):
    """Samples that are their indices, a log of the reads, and a door for the first `limit` samples."""

    def __init__(self, size=1000, limit=10**9):
        self.size = size
        self.limit = limit
        self.reads = []
        self.changed = threading.Condition()

    def __len__(self):
        return self.size

    def batch(self, indices):
        with self.changed:
            self.reads.append(len(indices))
            self.changed.notify_all()
            turn = sum(self.reads)
            assert self.changed.wait_for(lambda: turn <= self.limit, timeout=60)
        return {"id": indices}

    def wait_for_samples(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: sum(self.reads) >= count, timeout=60)

    def open(self):
        with self.changed:
            self.limit = 10**9
            self.changed.notify_all()


def test_reads_run_ahead_by_the_prefetch_depth_and_no_further():
    gate = Gate()
    with loader_of(gate, prefetch=2) as loader:
        loader.next(config_of(2, 3))
        gate.wait_for_samples(12 + 2 * 12)
        loader.next(config_of(2, 3))
        gate.wait_for_samples(24 + 2 * 12)
        # Full again: the thread is idle until the next batch is taken. It may have read as many as it reads
        # together beyond that.
        most = 24 + 2 * 12 + (TOGETHER - 1) * 4
        with gate.changed:
            assert not gate.changed.wait_for(lambda: sum(gate.reads) > most, timeout=0.05)


def test_large_micro_batches_are_read_one_by_one_and_no_further_than_the_prefetch_depth():
    read = []

    class Large(Gate):
        def batch(self, indices):
            read.append(len(indices))
            return {"x": np.zeros((len(indices), SMALL_BYTES // 8), np.float32)}

    with loader_of(Large(), prefetch=2) as loader:
        for _ in range(4):
            loader.next(config_of(2))
    assert set(read) == {4} and len(read) <= 4 + 2 + 1


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=12),
    st.integers(0, 79),
    st.integers(80, 90),
)
def test_a_sample_that_fails_is_named_whatever_was_read_together(configs, bad, size):
    """All batches before it are handed out, and the error names the samples of its own micro-batch."""

    class Broken(Gate):
        def batch(self, indices):
            if bad in indices:
                raise ValueError("broken")
            return {"id": indices}

    taken = 0
    with loader_of(Broken(size), shuffle=False) as loader:
        for rows, count in configs * 6:
            num_rows = 2 * rows * count
            wanted = np.arange(taken, taken + num_rows) % size
            if bad not in wanted:
                np.testing.assert_array_equal(loader.next(config_of(rows, count)).indices, wanted)
                taken += num_rows
                continue
            first = int(np.flatnonzero(wanted == bad)[0]) // (2 * rows) * 2 * rows
            shown = ", ".join(map(str, wanted[first : first + 2 * rows]))
            with pytest.raises(RuntimeError, match=f"samples {shown} .*broken"):
                loader.next(config_of(rows, count))
            return


def test_what_was_prefetched_is_handed_out_while_the_source_hangs():
    gate = Gate(limit=7 * 4)
    with loader_of(gate, prefetch=2) as loader:
        batches = drain(loader, [config_of(2, 3)] * 2)
        gate.wait_for_samples(7 * 4 + 1)  # hangs
        gate.open()
        batches += drain(loader, [config_of(2, 3)] * 2)
    np.testing.assert_array_equal(ids(batches), take(Cursor(0), 1000, 48)[0])


def test_a_change_of_micro_batch_count_alone_reads_nothing_twice():
    gate = Gate()
    counts = [1, 4, 2, 3, 1]
    with loader_of(gate, prefetch=3, max_samples=22) as loader:
        batches = drain(loader, [config_of(1, count) for count in counts])
    assert sum(gate.reads) == 22
    np.testing.assert_array_equal(ids(batches), take(Cursor(0), 1000, 22)[0])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_was_taken_and_not_used_is_handed_out_again(prefetch):
    with loader_of(numbers(1000), prefetch=prefetch, max_samples=50) as loader:
        used = drain(loader, [config_of(3)] * 2)
        ahead = drain(loader, [config_of(3)] * 3)
        loader.go_back(used[-1].after, sum(batch.num_samples for batch in ahead))
        assert loader.cursor == used[-1].after
        rest = drain(loader, [config_of(5, 2), config_of(5), config_of(5)])
    np.testing.assert_array_equal(ids(used + rest), take(Cursor(0), 1000, 50)[0])


def test_configurations_may_alternate_every_step():
    with loader_of(numbers(1000)) as loader:
        batches = drain(loader, [config_of(3, 2), config_of(5)] * 20)
    np.testing.assert_array_equal(ids(batches), take(Cursor(0), 1000, 20 * 22)[0])


def test_without_prefetch_there_is_no_thread_and_nothing_is_read_ahead():
    gate = Gate()
    before = threading.active_count()
    with loader_of(gate, prefetch=0) as loader:
        drain(loader, [config_of(2, 3)] * 2)
        assert threading.active_count() == before
    assert len(gate.reads) == 6


def test_waiting_is_measured_by_the_clock_that_was_passed(clock):
    class Slow(Source):
        def __len__(self):
            return 100

        def batch(self, indices):
            clock.advance(0.25)
            return indices

    with loader_of(Slow(), prefetch=0, clock=clock) as loader:
        assert step(loader, config_of(2, 3)).wait_s == 0.75
    with loader_of(numbers(100), clock=clock) as loader:
        assert step(loader, config_of(2, 3)).wait_s == 0.0


# -- errors ---------------------------------------------------------------------------------------


class Bad:
    """Sample 13 cannot be read."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            raise OSError("truncated file")
        return {"id": index}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_exception_of_the_source_surfaces_where_its_batch_is_due(prefetch):
    with loader_of(Bad(), prefetch=prefetch, shuffle=False) as loader:
        batches = drain(loader, [config_of(2)] * 3)  # samples 0 to 11 are fine
        assert ids(batches).tolist() == list(range(12))
        for _ in range(2):
            message = r"epoch 0, offset 12\).*sample 13 .*OSError: truncated file"
            with pytest.raises(RuntimeError, match=message) as caught:
                loader.next(config_of(2))
            assert isinstance(getattr(caught.value.__cause__, "__cause__", None), OSError)
        assert loader.cursor == Cursor(0, 0, 12)
        # One sample is still before the bad one, for a configuration that does not reach it.
        with loader_of(Bad(), cursor=loader.cursor, process_count=2, shuffle=False) as other:
            assert step(other, config_of(1)).indices.tolist() == [12, 13]


def test_a_failure_read_ahead_in_vain_is_forgotten():
    with loader_of(Bad(), shuffle=False) as loader:
        loader.next(config_of(3))
        # Whether or not the thread has met sample 13 by now, these do not reach it.
        batches = drain(loader, [config_of(1)] * 3 + [config_of(1, 1, 1)])
        assert ids(batches).tolist() == list(range(6, 13))
        with pytest.raises(RuntimeError, match="sample 13"):
            loader.next(config_of(1, 1, 1))


class Raises(Source):
    """The second read raises `error`, once."""

    def __init__(self, error):
        self.errors = [None, error]

    def __len__(self):
        return 20

    def batch(self, indices):
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return {"id": indices}


def test_the_end_of_the_thread_is_an_error_rather_than_a_hang():
    with loader_of(Raises(SystemExit(3))) as loader:
        step(loader, config_of(1))
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            loader.next(config_of(1))


def test_an_interrupt_without_prefetch_stays_one_and_loses_nothing():
    with loader_of(Raises(KeyboardInterrupt()), prefetch=0, shuffle=False) as loader:
        step(loader, config_of(1))
        with pytest.raises(KeyboardInterrupt):
            loader.next(config_of(1))
        assert step(loader, config_of(1)).indices.tolist() == [2, 3]


def test_samples_that_change_shape_between_batches_are_an_error():
    items = [{"x": np.zeros(3)}] * 4 + [{"x": np.zeros(2)}] * 4
    with loader_of(items, shuffle=False) as loader:
        drain(loader, [config_of(1)] * 2)
        with pytest.raises(RuntimeError, match=r"\['x'\].*float64\[3\] to float64\[2\]"):
            loader.next(config_of(1))


def test_identifiers_too_large_for_the_devices_are_an_error():
    with loader_of({"id": np.array([1, 2**40])}, shuffle=False) as loader:
        with pytest.raises(RuntimeError, match=r"\['id'\] holds 1099511627776"):
            loader.next(config_of(1))


def test_numbers_too_large_for_the_devices_are_an_error():
    with loader_of({"x": np.array([1.0, 1e300])}, shuffle=False) as loader:
        with pytest.raises(RuntimeError, match=r"samples 0, 1 .*\['x'\] holds 1e\+300 in row 1"):
            loader.next(config_of(1))


def test_a_source_that_breaks_its_promises_is_named():
    class Wrong(Source):
        def __len__(self):
            return 10

        def batch(self, indices):
            return {"x": np.zeros(7)}

    with loader_of(Wrong(), shuffle=False) as loader:
        with pytest.raises(RuntimeError, match=r"samples 0, 1 .*\['x'\] of shape \(7,\) for 2"):
            loader.next(config_of(1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(4, 1, 3), "num_replicas=3 cannot be split evenly over 2 processes"),
        (config_of(4, 1, 6), "3 replicas here.*cannot be split"),
    ],
)
def test_a_batch_that_does_not_fit_the_devices_is_refused(config, message):
    with loader_of(numbers(100), 2, process_count=2) as loader:
        with pytest.raises(ValueError, match=message):
            loader.next(config)
        assert step(loader, config_of(4, 1, 4)).num_samples == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process_index": 2, "process_count": 2}, "process_index=2"),
        ({"max_samples": -1}, "max_samples=-1"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"cursor": Cursor(0, 0, 11)}, "only 10 samples"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loader_of(numbers(10), **options)


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="0 samples"):
        loader_of(Gate(0))


def test_a_dataset_smaller_than_the_batch_is_said_once_and_still_counts_exactly():
    # Recorded here, because another thread may just be changing what Python does with warnings.
    with mock.patch.object(warnings, "warn") as warned, loader_of(numbers(10)) as loader:
        batches = drain(loader, [config_of(4, 3)] * 4)
    ((sentence,), _) = warned.call_args_list[0]
    assert re.search("global_batch_size=24 .* dataset of 10 samples", sentence)
    assert warned.call_count == 1
    counts = np.bincount(ids(batches), minlength=10)
    assert counts.sum() == 96 and counts.max() - counts.min() <= 2


# -- readers, retries, epochs -----------------------------------------------------------------------


class Meeting:
    """Samples that are their indices; `num` reads have to be under way at once before any ends."""

    def __init__(self, num, size=1000):
        self.barrier, self.size = threading.Barrier(num, timeout=60), size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.barrier.wait()
        return {"id": index}


@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_all_readers_are_at_work_whatever_the_micro_batch(micro_batch_size, prefetch):
    config = config_of(micro_batch_size)
    options = dict(num_readers=4, prefetch=prefetch, max_samples=48)
    with loader_of(Meeting(4), **options) as loader:
        batches = drain(loader, [config] * 48)
    np.testing.assert_array_equal(ids(batches), take(Cursor(0), 1000, 48)[0])
    got = [real_ids(micro) for batch in batches for micro in batch.micro_batches]
    np.testing.assert_array_equal(np.concatenate(got), ids(batches))


class Uneven:
    """Later samples are often there first; counts how often each was read."""

    def __init__(self, size):
        self.size, self.counts, self.lock = size, np.zeros(size, int), threading.Lock()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        with self.lock:
            self.counts[index] += 1
        threading.Event().wait(0.0005 * (index % 4))
        return {"id": index}


@settings(deadline=None, max_examples=10)
@given(configs=CONFIGS, prefetch=st.integers(0, 3), shuffle=st.booleans())
@pytest.mark.filterwarnings("ignore:global_batch_size=")
def test_readers_keep_the_order_over_any_change_of_batch(configs, prefetch, shuffle):
    options = dict(num_readers=5, prefetch=prefetch, shuffle=shuffle, max_samples=100)
    with loader_of(Uneven(60), **options) as loader:
        batches = drain(loader, configs)
        expected, end = take(Cursor(0), 60, len(ids(batches)), shuffle=shuffle)
        assert loader.cursor == end
    np.testing.assert_array_equal(ids(batches), expected)
    got = [real_ids(micro) for batch in batches for micro in batch.micro_batches]
    np.testing.assert_array_equal(np.concatenate(got), expected)


def test_readers_read_nothing_twice_while_the_micro_batch_stays():
    dataset = Uneven(56)  # full micro-batches: padding would be one more read
    with loader_of(dataset, num_readers=5, max_samples=56) as loader:
        drain(loader, [config_of(4), config_of(4, 3)] * 9)
    assert dataset.counts.tolist() == [1] * 56


@pytest.mark.parametrize("prefetch", [0, 2])
def test_readers_name_the_first_sample_that_fails(prefetch):
    with loader_of(Bad(), prefetch=prefetch, num_readers=4, shuffle=False) as loader:
        assert ids(drain(loader, [config_of(2)] * 3)).tolist() == list(range(12))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"offset 12\).*sample 13 .*truncated file"):
                loader.next(config_of(2))
        assert loader.cursor == Cursor(0, 0, 12)
        assert ids(drain(loader, [config_of(1, 1, 1)])).tolist() == [12]


def test_a_reader_that_hangs_is_left_behind_with_a_warning(monkeypatch):
    monkeypatch.setattr("jaxgoodput.data.loader.CLOSE_TIMEOUT_S", 0.05)
    hangs, door = threading.Event(), threading.Event()

    class Hanging(Uneven):
        def __getitem__(self, index):
            if index == 6:
                hangs.set()
                assert door.wait(60)
            return super().__getitem__(index)

    loader = loader_of(Hanging(60), num_readers=3, shuffle=False)
    loader.next(config_of(2))
    assert hangs.wait(60)
    threads = [t for t in threading.enumerate() if t.name.startswith("jaxgoodput-")]
    with pytest.warns(ResourceWarning, match="cannot be interrupted"):
        loader.close()
    door.set()
    for thread in threads:
        thread.join(60)


class Flaky(Uneven):
    """The first `num_failures` reads of every fifth sample fail."""

    def __init__(self, num_failures, error=None):
        super().__init__(40)
        self.num_failures, self.error = num_failures, error or OSError("connection reset")

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if index % 5 == 0 and self.counts[index] <= self.num_failures:
            raise self.error
        return item


@pytest.mark.parametrize("num_readers", [1, 3])
def test_a_read_that_fails_in_passing_is_repeated_and_counted(num_readers, clock):
    dataset = Flaky(2)
    options = dict(num_readers=num_readers, num_retries=3, max_samples=40, clock=clock)
    with loader_of(dataset, **options) as loader:
        batches = drain(loader, [config_of(4)] * 9)
        assert loader.num_retried == 16
    np.testing.assert_array_equal(ids(batches), take(Cursor(0), 40, 40)[0])
    assert clock.now() == 8 * (0.5 + 1.0)
    assert dataset.counts.tolist() == [3, 1, 1, 1, 1] * 8  # no other sample of the batch again


@pytest.mark.parametrize(
    ("error", "reads", "told"),
    [
        (TimeoutError("slow"), 3, r"sample 0 .*TimeoutError: slow.* It was tried 3 times\."),
        (
            KeyError("label"),
            1,
            r"sample 0 .*KeyError: 'label'[^.]*\. No sample is skipped .* weight 0\.$",
        ),
    ],
)
def test_a_read_that_keeps_failing_says_how_often(error, reads, told, clock):
    dataset = Flaky(99, error)
    with loader_of(dataset, num_retries=2, shuffle=False, clock=clock) as loader:
        with pytest.raises(RuntimeError, match=told):
            loader.next(config_of(2))
    assert dataset.counts[0] == reads


def test_sources_read_as_arrays_are_repeated_as_a_whole(clock):
    class Remote(Source):
        num_reads = 0

        def __len__(self):
            return 10

        def batch(self, indices):
            self.num_reads += 1
            if self.num_reads % 2:
                raise ConnectionError("reset")
            return indices

    with loader_of(Remote(), num_readers=4, num_retries=1, clock=clock, max_samples=10) as loader:
        assert len(drain(loader, [config_of(1)] * 9)) == 5 and loader.num_retried == 5
        assert not [t for t in threading.enumerate() if "reader" in t.name]


@pytest.mark.parametrize("num_readers", [1, 3])
def test_every_sample_is_read_as_its_epoch_has_it(num_readers):
    class Told(Uneven):
        def item_of_epoch(self, index, epoch):
            return {**self[index], "epoch": epoch}

    configs = [config_of(4), config_of(3, 2), config_of(1), config_of(5)] * 3
    with loader_of(Told(13), num_readers=num_readers, cursor=Cursor(1, 2, 7)) as loader:
        batches = drain(loader, configs[:4])
        cursor = loader.cursor
    with loader_of(Told(13), num_readers=num_readers, cursor=cursor) as loader:
        batches += drain(loader, configs[4:])
    got = [micro.data["epoch"] for batch in batches for micro in batch.micro_batches]
    wanted = (2 * 13 + 7 + np.arange(len(ids(batches)))) // 13
    np.testing.assert_array_equal(np.concatenate(got), wanted)


# -- streams and data sets without end ----------------------------------------------------------------


class Numbers:
    """A stream of numbers, up to an end."""

    def __init__(self, end=10**9):
        self.place, self.end = 0, end

    def __iter__(self):
        return self

    def __next__(self):
        if self.place >= self.end:
            raise StopIteration
        self.place += 1
        return {"id": self.place - 1}

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


@settings(deadline=None, max_examples=30)
@given(lives=st.lists(CONFIGS, max_size=4), prefetch=st.integers(0, 3), end=st.integers(1, 200))
def test_a_stream_comes_exactly_once_over_any_batches_and_restarts(lives, prefetch, end):
    cursor, state, got, num_padded = Cursor(0), None, [], 0
    for configs in lives:
        source = as_source(Numbers(end))
        assert isinstance(source, StreamSource)
        abstract_sample(source)
        if state is not None:
            source.restore(state)
        with loader_of(source, cursor=cursor, prefetch=prefetch) as loader:
            for batch in drain(loader, configs):
                got += [real_ids(micro) for micro in batch.micro_batches]
                np.testing.assert_array_equal(
                    np.concatenate(got)[-batch.num_samples :], batch.indices
                )
                num_padded += batch.num_padded
            cursor, state = loader.cursor, loader.stream
    wanted = sum(config.global_batch_size for configs in lives for config in configs)
    assert np.concatenate([np.empty(0), *got]).tolist() == list(range(min(wanted, end)))


@settings(deadline=None, max_examples=50)
@given(
    lives=st.lists(
        st.lists(
            st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 5), st.booleans()),
            max_size=6,
        ),
        max_size=3,
    ),
    prefetch=st.integers(0, 2),
    drop_last=st.booleans(),
    end=st.integers(1, 120),
)
def test_blocks_of_a_stream_are_exactly_once_whatever_part_of_them_is_used(
    lives, prefetch, drop_last, end
):
    """What is not used of a block goes back; a run resumes at what was used, not at what was read."""
    cursor, state, got = Cursor(0), None, []
    for life in lives:
        source = as_source(Numbers(end))
        assert isinstance(source, StreamSource)
        if state is not None:
            source.restore(state)
        with loader_of(source, cursor=cursor, prefetch=prefetch, drop_last=drop_last) as loader:
            for size, count, most, in_block in life:
                config = config_of(size, num_replicas=1)
                batch = loader.next_block(config, count) if in_block else loader.next(config)
                if batch is None:
                    assert end - len(got) < (size if drop_last else 1)
                    break
                assert batch.count in (1, count)
                used, rest = loader.split(batch, max(min(most, batch.count), 1))
                got += used.indices.tolist()
                cursor, state = used.after, loader.used(used.after)
                if rest is not None:
                    loader.go_back(rest.before, rest.num_samples)
    assert got == list(range(len(got))) and len(got) <= end


def test_a_stream_that_begins_anew_after_its_end_has_ended():
    class Again:
        """Iterators of many loaders begin anew if they are asked behind their end."""

        def __init__(self):
            self.place = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.place = (self.place + 1) % 6
            if self.place == 0:
                raise StopIteration
            return {"id": self.place - 1}

    source = stream(Again(), live=True)
    assert source.available(0, 4) == 4
    assert [source.available(4, 4), source.available(4, 4), source.available(5, 1)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("live", "ahead", "may"),
    [(False, 0, True), (True, 0, False), (True, 95, False), (True, 96, True)],
)
def test_a_live_stream_is_read_no_further_ahead_than_it_says(live, ahead, may):
    source = stream(iter(Numbers()), live=live, ahead_samples=ahead) if live else stream(Numbers())
    with loader_of(source, prefetch=2) as loader:
        assert loader.can_read_blocks(32) is may
        for _ in range(40):
            assert loader.next(config_of(4)) is not None
    assert may or source._next <= (40 + 3) * 8  # two that wait, and one that is read


def test_how_far_to_read_ahead_is_asked_of_live_streams_only():
    for ahead_samples, live in ((-1, True), (8, False)):
        with pytest.raises(ValueError, match="may be read from a live stream before they are used"):
            stream(iter([]), live=live, ahead_samples=ahead_samples)


def test_a_stream_forgets_what_was_handed_out():
    source = as_source(Numbers())
    assert isinstance(source, StreamSource)
    with loader_of(source, prefetch=2) as loader:
        drain(loader, [config_of(4, 2)] * 50)
        drain(loader, [config_of(3)] * 50)
    # Small batches are read several at a time; the one that was taken last may go back.
    assert len(source._items) <= 6 * (TOGETHER + 4) and len(source._states) <= 5


@settings(deadline=None, max_examples=30)
@given(
    lives=st.lists(st.tuples(st.integers(1, 4), CONFIGS), max_size=4),
    end=st.integers(1, 200),
    in_parts=st.booleans(),
)
def test_processes_that_come_and_go_read_a_stream_exactly_once_together(lives, end, in_parts):
    """Each reads all of it; also where a process goes on with the stream that it has read from before."""
    sources = [as_source(Numbers(end)) for _ in range(4)]
    cursor, state, got = Cursor(0), None, []
    for count, configs in lives:
        loaders = []
        for process, source in enumerate(sources[:count]):
            assert isinstance(source, StreamSource)
            if state is not None:
                source.restore(state)
            loaders.append(
                loader_of(source, cursor=cursor, process_index=process, process_count=count)
            )
        for config in configs:
            config = dataclasses.replace(config, num_replicas=count * config.num_replicas)
            leases = itertools.count()
            if in_parts:
                batches = [one.next_in_parts(config, lambda: next(leases)) for one in loaders]  # noqa: B023
                parts = [list(one.parts) for one in batches if one is not None]
            else:
                batches = [one.next(config) for one in loaders]
                parts = [list(one.micro_batches) for one in batches if one is not None]
            assert len(parts) in (0, count)
            ids = [real_ids(micro) for of_process in parts for micro in of_process]
            if ids:
                wanted = batches[0].indices.tolist()
                assert sorted(np.concatenate(ids).tolist()) == wanted
                got += wanted
        # One that has begun to read ahead knows a later state than the others; any of them will do.
        cursor, state = loaders[0].cursor, loaders[-1].stream
        assert all(one.cursor == cursor for one in loaders)
        for one in loaders:
            one.close()
    assert got == list(range(len(got))) and len(got) <= end


def test_a_data_set_without_end_is_read_in_its_own_order():
    class Endless(Source):
        def __len__(self):
            return sys.maxsize

        def batch(self, indices):
            return {"id": indices.astype(np.int32)}

    with loader_of(Endless(), shuffle=True) as loader:
        batches = drain(loader, [config_of(3, 2), config_of(5)] * 3)
        cursor = loader.cursor
    with loader_of(Endless(), cursor=cursor, process_count=2) as loader:
        batches += drain(loader, [config_of(4)] * 3)
    assert ids(batches).tolist() == list(range(3 * 22 + 3 * 8))


# -- closing --------------------------------------------------------------------------------------


def test_closing_ends_the_thread_and_may_be_repeated():
    loader = loader_of(numbers(100))
    loader.next(config_of(2))
    (thread,) = [t for t in threading.enumerate() if t.name == "jaxgoodput-loader"]
    loader.close()
    loader.close()
    assert not thread.is_alive()
    assert loader.cursor == Cursor(0, 0, 4)
    with pytest.raises(RuntimeError, match="closed"):
        loader.next(config_of(2))


def test_a_loader_that_was_never_used_has_no_thread():
    before = threading.active_count()
    loader = loader_of(numbers(100))
    assert threading.active_count() == before
    loader.close()


def test_a_waiting_loop_is_woken_by_close():
    gate = Gate(limit=0)
    loader = loader_of(gate)
    seen = []

    def consume():
        try:
            loader.next(config_of(2))
        except RuntimeError as error:
            seen.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    gate.wait_for_samples(1)
    closer = threading.Thread(target=loader.close)
    closer.start()
    consumer.join(60)
    assert seen and "closed" in seen[0]
    gate.open()
    closer.join(60)
    assert not closer.is_alive()


def test_a_read_that_never_ends_is_left_behind_with_a_warning(monkeypatch):
    monkeypatch.setattr("jaxgoodput.data.loader.CLOSE_TIMEOUT_S", 0.01)
    gate = Gate(limit=4)
    loader = loader_of(gate)
    loader.next(config_of(2))
    (thread,) = [t for t in threading.enumerate() if t.name == "jaxgoodput-loader"]
    gate.wait_for_samples(5)
    with pytest.warns(ResourceWarning, match="cannot be interrupted"):
        loader.close()
    gate.open()
    thread.join(60)
    assert not thread.is_alive()
