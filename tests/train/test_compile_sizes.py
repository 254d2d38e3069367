"""Sizes are compiled in the background: only what fits and was tried is ever ready."""

import threading
import time
import unittest.mock as mock

import jax
import numpy as np
import optax
import pytest
from absl import logging
from engines import make, put, samples, start
from hypothesis import given
from hypothesis import strategies as st
from scripted import SIZES, WAIT_S, Scripted, sizes_of

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.train.compile_sizes import SizeCompiler, compiling_order


@given(sizes=st.sets(st.integers(1, 100)), first=st.integers(1, 100))
def test_the_order_begins_at_home_and_forgets_nobody(sizes, first):
    order = compiling_order(sorted(sizes), first)
    assert order[0] == first and len(order) == len(set(order))
    assert set(order) == sizes | {first}
    ups, downs = [s for s in order if s > first], [s for s in order if s < first]
    assert not ups or ups[0] == max(ups), "what has far to go should not wait"
    assert downs == sorted(downs, reverse=True)


def test_sizes_become_ready_in_order_compiled_and_tried():
    engine = Scripted()
    sizes = sizes_of(engine)
    sizes.near(4)
    assert sizes.ready() == () and sizes.num_wanted == 7
    assert not sizes.is_busy, "nothing is compiled before it is asked for"
    sizes.compile_all()
    assert sizes.ready() == (4, 64, 16, 2, 32, 8, 1) and not sizes.is_busy
    assert engine.shared == len(SIZES)
    both = [(kind, size) for size in sizes.ready() for kind in ("step", "step_measured")]
    both.remove(("step_measured", 4))  # the first size can measure already
    assert engine.compiled == engine.rehearsed == both
    assert all(map(sizes.can_measure, SIZES))
    assert sizes.memory_limit == 64


def test_only_what_two_changes_can_reach_is_compiled_and_more_as_the_size_moves():
    engine = Scripted()
    sizes = sizes_of(engine, reach=2.0)
    sizes.near(4)
    sizes.compile_all()
    assert sizes.ready()[:3] == (4, 8, 2), "what one change can reach comes first"
    assert set(sizes.ready()) == {1, 2, 4, 8, 16}
    sizes.near(16)
    sizes.compile_all()
    assert set(sizes.ready()) == {1, 2, 4, 8, 16, 32, 64}
    assert len(engine.compiled) == len(set(engine.compiled)), "nothing is compiled twice"
    assert {size for _, size in engine.compiled} == set(SIZES)


def test_a_size_that_was_asked_for_measures_though_no_other_is_compiled():
    engine = Scripted()
    sizes = sizes_of(engine)
    sizes.near(4)
    sizes.near(16)  # `start` was not called
    assert not sizes.is_busy, "a size on trial does not measure"
    sizes.adopt(8)  # no longer in use
    assert not sizes.is_busy
    sizes.adopt(16)
    assert sizes.wait(WAIT_S) and sizes.can_measure(16)
    assert engine.compiled == engine.rehearsed == [("step_measured", 16)]
    sizes.near(4)
    assert not sizes.is_busy and not sizes.can_measure(8)
    sizes.start()
    assert sizes.wait(WAIT_S) and set(sizes.ready()) == set(SIZES)
    assert engine.compiled.count(("step_measured", 16)) == 1
    sizes.close()


def test_measuring_the_size_in_use_comes_before_other_sizes():
    engine = Scripted()
    engine.may_go.clear()
    sizes = sizes_of(engine)
    sizes.near(4)
    sizes.start()
    assert engine.entered.wait(WAIT_S)  # compiling 4
    sizes.near(2)
    sizes.adopt(2)
    engine.may_go.set()
    assert sizes.wait(WAIT_S)
    assert engine.compiled[:2] == [("step", 4), ("step_measured", 2)]
    sizes.close()


def test_one_size_is_compiled_at_a_time_and_measures_once_it_is_adopted():
    engine = Scripted()
    sizes = sizes_of(engine)
    sizes.near(4)
    for size in (16, 2, 16):
        sizes.compile_next(size)
        assert sizes.wait(WAIT_S) and size in sizes.settled
    assert sizes.ready() == (4, 16, 2) and sizes.settled == (2, 4, 16)
    assert ("step_measured", 16) not in engine.compiled
    sizes.near(16)
    sizes.adopt(16)
    assert sizes.wait(WAIT_S) and sizes.can_measure(16)
    assert engine.compiled.count(("step_measured", 16)) == 1 and not sizes.can_measure(2)
    sizes.close()


@pytest.mark.parametrize("measured", [None, 2, 4, 8, 32, 64])
def test_the_next_size_comes_before_measuring_only_if_a_size_near_by_was_measured(measured):
    """Within a factor of 4: what a small batch shows of the signal says little of a much larger one."""
    engine = Scripted()
    sizes = sizes_of(engine, reach=4.0)
    sizes.near(4)
    sizes._measurable.clear()  # the first size's program was left for later
    if measured is not None:
        sizes.near(measured)
        sizes.adopt(measured)
        assert sizes.wait(WAIT_S) and sizes.can_measure(measured)
    is_near = measured is not None and 4 <= measured <= 64
    engine.may_go.clear()
    engine.entered.clear()
    engine.compiled.clear()
    sizes.compile_next(32)
    assert engine.entered.wait(WAIT_S)  # compiling 32
    sizes.near(16)
    sizes.adopt(16)
    sizes.compile_next(64)
    engine.may_go.set()
    assert sizes.wait(WAIT_S)
    step, measuring = map(engine.compiled.index, [("step", 64), ("step_measured", 16)])
    assert (step < measuring) == is_near
    sizes.close()


def test_sizes_that_cover_all_batches_accumulate_only_if_one_does_not_fit():
    engine = Scripted()
    sizes = sizes_of(engine, accumulate=True, covers=True, budget=200)
    sizes.near(4)
    sizes.compile_next(16)
    assert sizes.wait(WAIT_S) and set(sizes.ready()) == {4, 16} and not sizes.accumulates
    assert {name for name, _ in engine.compiled} == {"step"}
    sizes.near(16)
    sizes.compile_next(64)
    assert sizes.wait(WAIT_S) and set(sizes.ready()) == {4, 16} and sizes.accumulates
    assert {size for name, size in engine.compiled if name == "first"} == {4, 16}
    sizes.close()


def test_without_a_background_it_measures_when_it_is_asked_for():
    engine = Scripted()
    sizes = sizes_of(engine, background=False)
    sizes.near(4)
    sizes.compile_all()
    assert engine.compiled[-1] == ("step_measured", 1) and not sizes.is_busy
    sizes.near(500)
    assert sizes.can_measure(500) and engine.compiled[-1] == ("step_measured", 500)


def test_a_size_over_the_budget_is_never_ready():
    engine = Scripted()
    sizes = sizes_of(engine, budget=200)
    sizes.near(4)
    sizes.compile_all()
    assert sizes.ready() == (4, 16, 2, 8, 1)
    assert sizes.memory_limit == 16


def test_a_size_that_fits_only_without_measuring_is_used_without():
    engine = Scripted()
    sizes = sizes_of(engine, budget=70)
    sizes.near(2)
    sizes.start()
    assert sizes.wait(WAIT_S) and set(sizes.ready()) == {1, 2, 4}
    assert sizes.can_measure(4) and sizes.can_measure(2)
    sizes.close()
    tight = sizes_of(Scripted(), budget=50)
    tight.near(2)
    tight.start()
    assert tight.wait(WAIT_S) and 4 in tight.ready() and not tight.can_measure(4)
    with mock.patch.object(logging, "warning") as warned:
        tight.near(4)
    assert "noise is not measured" in warned.call_args[0][0]
    tight.close()


def test_a_size_without_room_for_a_second_copy_is_ready_but_not_tried():
    engine = Scripted()
    sizes = sizes_of(engine, budget=100)
    sizes.near(4)
    sizes.compile_all()
    assert set(sizes.ready()) == {1, 2, 4, 8}
    assert {size for _, size in engine.rehearsed} == {1, 2, 4}
    assert engine.shared >= len(sizes.ready()), "what sizes share must not wait for a rehearsal"


def test_the_background_climbs_while_the_caller_goes_on():
    engine = Scripted()
    engine.may_go.clear()
    sizes = sizes_of(engine)
    sizes.start()
    sizes.near(4)
    assert engine.entered.wait(WAIT_S)
    assert sizes.ready() == () and sizes.is_busy and not sizes.wait(0.0)
    engine.may_go.set()
    assert sizes.wait(WAIT_S) and set(sizes.ready()) == set(SIZES)
    sizes.near(500)  # a size off the ladder joins it
    assert sizes.wait(WAIT_S) and 500 in sizes.ready()
    sizes.close()


def test_close_waits_for_the_executable_in_hand_and_for_no_other():
    engine = Scripted()
    engine.may_go.clear()
    sizes = SizeCompiler(engine, SIZES, accumulate=True, budget=10**9)
    sizes.start()
    sizes.near(4)
    assert engine.entered.wait(WAIT_S)
    closer = threading.Thread(target=sizes.close)
    closer.start()
    while sizes.is_busy:  # until the wish to stop is known
        time.sleep(0.001)
    engine.may_go.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert engine.compiled == [("step", 4)] and sizes.ready() == ()
    sizes.close()


def test_closing_what_never_started_is_nothing():
    sizes = sizes_of(Scripted())
    sizes.close()
    sizes.near(4)
    sizes.compile_all()
    assert sizes.ready() == ()


def test_an_error_in_the_background_surfaces_where_the_loop_looks():
    sizes = sizes_of(Scripted(broken=8))
    sizes.start()
    sizes.near(4)
    assert sizes.wait(WAIT_S)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the compiler gave up"):
            sizes.ready()
    sizes.close()


def test_an_error_on_the_callers_thread_is_its_own():
    sizes = sizes_of(Scripted(broken=4))
    sizes.near(4)
    with pytest.raises(RuntimeError, match="the compiler gave up"):
        sizes.compile_all()


@pytest.mark.slow
def test_a_ready_size_of_a_real_engine_runs_without_compiling_even_untried(key, rng):
    # Adam's second moment is prepared by an executable that all sizes share.
    engine, other = (make(replicas=2, preconditioned=True, tx=optax.adam(0.1)) for _ in range(2))
    engine.compile([3], accumulate=False)  # as a run does before its first step
    other.compile([3], accumulate=True)
    need = other.bytes_of(3)
    assert need is not None
    # Enough for every step, too little for a rehearsal beside it.
    sizes = SizeCompiler(engine, (3,), accumulate=True, budget=need.peak * 3 // 2)
    sizes.start()
    sizes.near(3)
    assert sizes.wait(10 * WAIT_S)
    sizes.close()
    assert sizes.ready() == (3,)
    state, batch = start(engine, key), put(engine, samples(rng, 6))
    names = []
    undo = listen_for_compilations(lambda event: names.append(event.name))
    try:
        with jax.transfer_guard("disallow"):
            work = engine.accumulate(engine.begin(state), *batch)
            state, metrics = engine.step(state, work, *batch)
            state, metrics = engine.step(state, None, *batch)
    finally:
        undo()
    assert names == [] and np.isfinite(engine.read(metrics)[0].loss)
