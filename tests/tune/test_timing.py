"""Step times: medians, brought down to one micro-batch, disturbed ones apart, old ones fading."""

import json
import math

import numpy as np
import pytest
from engines import known
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxgoodput._fields import serial
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.timings import (
    KEEP,
    MIN_COUNT,
    Parts,
    TimingKey,
    TimingRow,
    TimingTable,
    interval,
)

NAN = math.nan


def key(micro=8, count=1, *, replicas=1, measured=False):
    return TimingKey(
        num_nodes=1,
        num_replicas=replicas,
        micro_batch_size=micro,
        num_micro_batches=count,
        measured=measured,
    )


def filled(*rows, steps=MIN_COUNT, **kind):
    """A table with `steps` equal times of every (key, seconds)."""
    table = TimingTable(**kind)
    for where, seconds in rows:
        parts = seconds if isinstance(seconds, Parts) else Parts(seconds)
        for step in range(steps):
            table.add(where, parts, step)
    return table


def row(table, micro, step=MIN_COUNT):
    timings = known(table.timings(step))
    (i,) = np.flatnonzero(timings.micro_batch_size == micro)
    names = ("accumulate_s", "reduce_s", "update_s", "step_s", "weight")
    return {name: float(getattr(timings, name)[i]) for name in names}


# -- intervals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "dispatched", "ready", "seconds"),
    [
        (None, 9.0, 10.5, 1.5),
        (10.0, 9.0, 10.5, 0.5),  # queued behind the step before
        (10.0, 10.25, 10.5, 0.25),  # the loop was elsewhere
    ],
)
def test_a_step_takes_from_when_it_could_start_to_when_it_was_done(
    previous, dispatched, ready, seconds
):
    assert interval(previous, dispatched, ready) == seconds


@given(
    waits=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    works=st.lists(st.floats(0, 1), min_size=20, max_size=20),
)
def test_intervals_add_up_to_the_time_the_device_was_busy(waits, works):
    dispatched, ready, previous, total, busy = 0.0, 0.0, None, 0.0, 0.0
    for wait, work in zip(waits, works, strict=False):
        dispatched += wait
        ready = max(ready, dispatched) + work
        busy += work
        total += interval(previous, dispatched, ready)
        previous = ready
    assert total == pytest.approx(busy)


# -- medians -----------------------------------------------------------------------------------------


def test_one_slow_step_does_not_move_the_median():
    table = filled((key(), 0.1), steps=6)
    table.add(key(), Parts(50.0), 7)
    assert table.median_s(key()) == 0.1 and table.count(key()) == 7
    assert row(table, 8)["step_s"] == 0.1
    assert math.isnan(table.median_s(key(16)))


def test_the_latest_steps_count():
    table = filled((key(), 0.1), steps=KEEP)
    for step in range(KEEP):
        table.add(key(), Parts(0.2), step)
    assert table.median_s(key()) == 0.2 and table.count(key()) == KEEP


def test_few_steps_say_nothing():
    table = filled((key(), 0.1), steps=MIN_COUNT - 1)
    assert table.timings(5) is None
    assert table.timed_sizes(1, 1, clean=True) == set()
    table.add(key(), Parts(0.1), 5)
    assert known(table.timings(5)).step_s == [0.1]
    assert (
        table.timed_sizes(1, 1, clean=True) == {8} and table.timed_sizes(1, 2, clean=True) == set()
    )


def test_steps_without_statistics_are_believed_over_those_with():
    table = filled((key(measured=True), 0.3))
    assert row(table, 8)["step_s"] == 0.3
    for step in range(MIN_COUNT):
        table.add(key(), Parts(0.1), step)
    assert row(table, 8)["step_s"] == 0.1
    config = BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=1)
    table.add(key(), Parts(0.1), 9)
    assert table.step_s(1, config) == 0.1


@given(plain=st.floats(0.1, 1), measuring=st.floats(1, 4), delay=st.floats(1, 4))
def test_a_step_is_never_taken_for_longer_than_what_was_seen_of_it(plain, measuring, delay):
    """What measuring costs, and a compilation beside a step, only ever make it longer."""
    table = TimingTable()
    for step in range(MIN_COUNT):
        table.add(key(), Parts(plain * delay), step, busy=True)
        table.add(key(measured=True), Parts(plain * measuring), step)
    config = BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=1)
    shorter = plain * min(measuring, delay)
    assert row(table, 8)["step_s"] == table.step_s(1, config) == pytest.approx(shorter)


def test_undisturbed_times_are_believed_over_disturbed_ones_of_either_kind():
    table = TimingTable()
    for step in range(48):
        table.add(key(), Parts(0.3), step, busy=True)
    for step in range(MIN_COUNT):
        table.add(key(measured=True), Parts(0.1), step)
    assert row(table, 8)["step_s"] == 0.1
    table.add(key(measured=True), Parts(0.3), 9, busy=True)
    assert table.timed_sizes(1, 1, clean=False) == table.timed_sizes(1, 1, clean=True) == {8}


def test_how_much_a_compilation_slows_steps_is_read_off_the_sizes_timed_with_and_without():
    table = filled((key(), 0.1))
    assert math.isnan(table.disturbance())
    for step in range(MIN_COUNT):
        table.add(key(), Parts(0.25), step, busy=True)
    assert table.disturbance() == pytest.approx(1.5)


# -- several micro-batches ---------------------------------------------------------------------------


def test_parts_seen_apart_bring_a_step_down_to_one_micro_batch():
    whole = Parts(step_s=1.0, accumulate_s=0.8, reduce_s=0.15, update_s=0.05)
    got = row(filled((key(count=4), whole)), 8)
    assert got["accumulate_s"] == pytest.approx(0.2)
    assert got["step_s"] == pytest.approx(1.0 - 3 * 0.2)
    assert (got["reduce_s"], got["update_s"]) == (0.15, 0.05)


@settings(deadline=None)
@given(
    micro_s=st.floats(0.01, 1),
    rest_s=st.floats(0.001, 1),
    counts=st.sets(st.integers(1, 16), min_size=2, max_size=4),
)
def test_two_counts_of_one_size_tell_what_a_micro_batch_takes(micro_s, rest_s, counts):
    # Where it takes less than a tenth of its share of the step, the difference passes for noise.
    assume(micro_s > 0.1 * (micro_s + rest_s / max(counts)))
    table = filled(*((key(count=k), k * micro_s + rest_s) for k in counts))
    got = row(table, 8)
    assert got["accumulate_s"] == pytest.approx(micro_s)
    assert got["step_s"] == pytest.approx(micro_s + rest_s)
    assert len(known(table.timings(1)).step_s) == 1


def test_a_single_count_above_one_gives_a_share_and_no_step_time():
    got = row(filled((key(count=4), 1.0)), 8)
    assert got["accumulate_s"] == 0.25 and math.isnan(got["step_s"])


def test_a_micro_batch_is_never_free():
    got = row(filled((key(count=2), 1.0), (key(count=4), 0.9)), 8)
    assert got["accumulate_s"] > 0


def test_every_placement_and_size_has_its_row():
    table = filled((key(8), 0.1), (key(16), 0.2), (key(8, replicas=2), 0.3))
    timings = known(table.timings(3))
    rows = zip(timings.num_replicas, timings.micro_batch_size, timings.step_s, strict=True)
    assert {(int(r), int(m), float(s)) for r, m, s in rows} == {
        (1, 8, 0.1),
        (1, 16, 0.2),
        (2, 8, 0.3),
    }


# -- trust -------------------------------------------------------------------------------------------


def test_disturbed_steps_count_only_until_there_are_others():
    table = TimingTable()
    for step in range(KEEP):
        table.add(key(), Parts(0.9), step, busy=True)
    assert table.median_s(key()) == 0.9
    assert table.timed_sizes(1, 1, clean=False) == {8}
    assert table.timed_sizes(1, 1, clean=True) == set()
    disturbed = row(table, 8, KEEP)["weight"]
    for step in range(KEEP):
        table.add(key(), Parts(0.1), step)
    assert table.median_s(key()) == 0.1
    assert disturbed < 0.2 * row(table, 8, KEEP)["weight"]


def test_weight_halves_with_every_half_life():
    table = filled((key(), 0.1), half_life_steps=100.0)
    fresh, old, older = (row(table, 8, MIN_COUNT - 1 + n)["weight"] for n in (0, 100, 200))
    assert old == pytest.approx(fresh / 2) and older == pytest.approx(fresh / 4)


def test_more_steps_weigh_more():
    few, many = filled((key(), 0.1), steps=4), filled((key(), 0.1), steps=8)
    assert row(many, 8, 7)["weight"] == pytest.approx(2 * row(few, 8, 3)["weight"])


keys = st.builds(
    key, st.integers(1, 64), st.integers(1, 4), replicas=st.integers(1, 8), measured=st.booleans()
)
seconds = st.floats(1e-5, 10)
parts = st.builds(Parts, seconds, seconds | st.just(NAN), seconds | st.just(NAN))


@settings(deadline=None)
@given(steps=st.lists(st.tuples(keys, parts, st.booleans()), max_size=30))
def test_a_table_survives_json(steps):
    table = TimingTable()
    for number, (where, taken, busy) in enumerate(steps):
        table.add(where, taken, number, busy=busy)
    text = json.dumps(serial.encode(table.rows()), allow_nan=False)
    restored = TimingTable()
    restored.restore(serial.decode(json.loads(text), tuple[TimingRow, ...], "timings"))
    assert serial.encode(restored.rows()) == serial.encode(table.rows())
    before, after = table.timings(50), restored.timings(50)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        for name in vars(before):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
