"""The time ledger: every second lies in one bucket, through nesting, threads and restarts."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._fields import serial
from jaxgoodput.clock import FakeClock
from jaxgoodput.observe.badput import BUCKETS, PRODUCTIVE, SavedLedger, TimeLedger

NAMES = st.sampled_from(sorted(BUCKETS))
# A script: wait, open a bucket with a script inside, or book seconds that have just passed.
SCRIPTS = st.recursive(
    st.lists(st.tuples(st.just("wait"), st.integers(0, 8)), max_size=3),
    lambda inner: st.lists(
        st.one_of(
            st.tuples(st.just("wait"), st.integers(0, 8)),
            st.tuples(st.just("open"), NAMES, inner),
            st.tuples(st.just("book"), NAMES, st.integers(0, 8)),
        ),
        max_size=4,
    ),
    max_leaves=12,
)


def play(script, ledger, clock, expected, inside=PRODUCTIVE):
    """Run a script, book by hand, and check the sum at every moment."""
    for action, *rest in script:
        if action == "wait":
            clock.advance(float(rest[0]))
            expected[inside] += rest[0]
        elif action == "book":
            clock.advance(float(rest[1]))
            ledger.add(rest[0], float(rest[1]))
            expected[rest[0]] += rest[1]
        else:
            with ledger.bucket(rest[0]):
                play(rest[1], ledger, clock, expected, rest[0])
        assert ledger.snapshot() == pytest.approx(expected)
        assert ledger.saved().wall_s == pytest.approx(sum(expected.values()))


@given(SCRIPTS)
def test_every_second_lies_in_the_innermost_open_bucket(script):
    clock = FakeClock(100.0)
    play(script, TimeLedger(clock), clock, dict.fromkeys([*BUCKETS, PRODUCTIVE], 0.0))


@given(SCRIPTS, SCRIPTS)
def test_a_ledger_continues_after_a_restart(first, second):
    clock, expected = FakeClock(5.0), dict.fromkeys([*BUCKETS, PRODUCTIVE], 0.0)
    ledger = TimeLedger(clock)
    play(first, ledger, clock, expected)
    saved = serial.loads(serial.dumps(ledger.saved()), SavedLedger)
    clock.advance(1000.0)  # nothing runs
    ledger = TimeLedger(clock)
    ledger.continue_from(saved)
    play(second, ledger, clock, expected)
    assert ledger.snapshot() == pytest.approx(expected)


def test_steps_lost_since_the_checkpoint_are_wasted_progress(clock):
    ledger = TimeLedger(clock)
    clock.advance(10.0)
    saved = ledger.saved()
    clock.advance(4.0)
    died = clock.wall()
    clock.advance(60.0)
    ledger = TimeLedger(clock)
    ledger.continue_from(saved, last_seen=died)
    clock.advance(1.0)
    spent = {name: seconds for name, seconds in ledger.snapshot().items() if seconds}
    assert spent == {"wasted_progress_from_disruption": 4.0, PRODUCTIVE: 11.0}


def test_a_bucket_of_an_unknown_version_does_not_stop_a_resume(clock):
    saved = SavedLedger(saved_at=0.0, wall_s=5.0, seconds={"a_new_bucket": 2.0, "other": 1.0})
    ledger = TimeLedger(clock)
    ledger.continue_from(saved)
    assert ledger.snapshot()["other"] == 3.0


def test_an_exception_closes_the_bucket(clock):
    ledger = TimeLedger(clock)
    with pytest.raises(RuntimeError), ledger.bucket("evaluation"):
        clock.advance(2.0)
        raise RuntimeError
    clock.advance(1.0)
    assert ledger.snapshot()["evaluation"] == 2.0


def test_other_threads_may_book_and_read(clock):
    ledger = TimeLedger(clock)
    clock.advance(1000.0)

    def book():
        for _ in range(200):
            ledger.add("other", 1.0)
            assert sum(ledger.snapshot().values()) == 1000.0

    threads = [threading.Thread(target=book) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.snapshot()["other"] == 800.0


def test_errors_name_the_remedy(clock):
    ledger = TimeLedger(clock)
    with pytest.raises(ValueError, match="no badput bucket 'lunch'.*evaluation"):
        ledger.add("lunch", 1.0)
    with pytest.raises(ValueError, match="lunch"), ledger.bucket("lunch"):
        pass
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="same clock"):
            ledger.add("other", seconds)
