"""What blocks save is found by comparing like with like, and taken off the times of batches without any."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.block_times import (
    ENOUGH,
    ENOUGH_IN_BLOCKS,
    KEEP,
    MARGIN,
    MARGIN_BUSY,
    MOST_SAVED,
    SHORT_S,
    BlockTimes,
)

BATCH = BatchConfig(num_replicas=1, micro_batch_size=16, num_micro_batches=1)
OTHER = dataclasses.replace(BATCH, micro_batch_size=64)
SECONDS = st.floats(1e-5, 1e-1)
RUNS = st.lists(  # in blocks, beside a compilation, some seconds and how often they come in turns
    st.tuples(
        st.booleans(),
        st.booleans(),
        st.lists(SECONDS, min_size=1, max_size=5),
        st.integers(1, 40),
    ),
    max_size=8,
)
ALONE = [(1e-3, False, False)] * 2 * ENOUGH  # the first of them do not count


def filled(steps):
    times = BlockTimes()
    for step_s, in_block, busy in steps:
        times.add(BATCH, step_s, num_together=2 if in_block else 1, busy=busy)
    return times


@given(RUNS)
def test_steps_are_compared_with_those_that_were_as_disturbed(runs):
    """And with those alone that follow many of their kind: the first ones behind a block do not count."""
    steps = [(s, x, busy) for x, busy, seconds, count in runs for s in seconds * count]
    kinds = {(x, busy): [] for x in (False, True) for busy in (False, True)}
    row = 0
    for step_s, in_block, busy in steps:
        row = 0 if in_block else row + 1
        if in_block or row > ENOUGH:
            kinds[in_block, busy] += [step_s] * (2 if in_block else 1)
    kinds = {kind: seconds[-KEEP:] for kind, seconds in kinds.items()}
    least = {False: ENOUGH, True: ENOUGH_IN_BLOCKS}
    known = [b for b in (False, True) if all(len(kinds[x, b]) >= least[x] for x in least)]
    times = filled(steps)
    found = times.compare(BATCH)
    for busy in (False, True):
        assert times.knows_alone(BATCH, busy=busy) == (len(kinds[False, busy]) >= ENOUGH)
    if not known:
        assert math.isnan(found) and times.saved_s == 0.0
        return
    alone, block = (sorted(kinds[x, known[0]])[len(kinds[x, known[0]]) // 4] for x in least)
    margin = MARGIN_BUSY if known[0] else MARGIN
    is_unsure = alone < block <= (1 + margin) * alone
    assert found == (0.0 if is_unsure else alone - block)
    assert times.saved_s == max(found, 0.0)


def test_steps_alone_of_another_batch_begin_a_row_of_their_own():
    times = BlockTimes()
    for batch in [BATCH, OTHER] * 50:
        times.add(batch, 1e-3, busy=False)
    assert not times.knows_alone(BATCH, busy=False)


@given(step_s=SECONDS, alone_s=SECONDS, block_s=SECONDS, replicas=st.sampled_from([1, 2]))
def test_what_blocks_save_is_taken_off_the_times_of_batches_that_may_have_some(
    step_s, alone_s, block_s, replicas
):
    times = filled(
        [(alone_s, False, False)] * 2 * ENOUGH + [(block_s, True, False)] * ENOUGH_IN_BLOCKS
    )
    saved_s = max(times.compare(BATCH), 0.0)
    found = times.corrected(dataclasses.replace(OTHER, num_replicas=replicas), step_s)
    if replicas == 1 and step_s < SHORT_S:
        assert found == pytest.approx(max(step_s - saved_s, (1 - MOST_SAVED) * step_s))
    else:
        assert found == step_s
    assert times.corrected(BATCH, step_s) == step_s, "it has blocks of its own"


def test_what_is_forgotten_is_compared_afresh():
    times = filled(ALONE + [(2e-3, True, False)] * KEEP)
    assert times.compare(BATCH) == -1e-3
    times.forget(BATCH)
    assert math.isnan(times.compare(BATCH))
    for step_s, in_block, busy in [(5e-4, True, False)] * ENOUGH_IN_BLOCKS + ALONE:
        times.add(BATCH, step_s, num_together=2 if in_block else 1, busy=busy)
    assert times.compare(BATCH) == times.saved_s == 5e-4
