"""A background thread has an owner: what it fails with arrives there, and it ends when told to."""

import functools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput._worker import QueueWorker, Worker, Workers


def test_a_worker_runs_until_it_is_closed_and_has_its_name():
    names = []

    def run(worker):
        names.append(threading.current_thread().name)
        worker.wait_stopping()

    worker = Worker("test", run)
    worker.close()
    worker.close()
    assert names == ["jaxgoodput-test"] and not worker.is_alive


def test_what_ends_a_worker_is_raised_once_where_it_is_owned():
    def run(worker):
        raise SystemExit("no disk")

    worker = Worker("test", run)
    with pytest.raises(SystemExit, match="no disk"):
        worker.close()
    worker.close()


def test_an_exception_in_the_block_is_not_replaced_by_the_worker_s():
    def run(worker):
        raise ValueError("second")

    with pytest.raises(KeyError, match="first"):
        with Worker("test", run):
            raise KeyError("first")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.booleans())
def test_every_item_is_handled_in_order_whatever_others_raise(items, flushes):
    handled, errors = [], []

    def handle(item):
        handled.append(item)
        if item % 3 == 0:
            raise ValueError(item)

    with QueueWorker("test", handle, on_error=errors.append) as worker:
        for item in items:
            worker.put(item)
        if flushes:
            assert worker.flush() and handled == items
    assert handled == items
    assert [error.args[0] for error in errors] == [x for x in items if x % 3 == 0]


def test_a_queue_without_on_error_ends_at_the_first_exception_and_says_so():
    handled = []

    def handle(item):
        handled.append(item)
        raise OSError("disk full")

    worker = QueueWorker("test", handle)
    worker.put(1)
    worker.put(2)
    with pytest.raises(OSError, match="disk full"):
        worker.flush()
    assert handled == [1] and not worker.flush()
    worker.close()


def test_a_worker_does_not_wait_for_itself():
    found = []

    def handle(item):
        worker.stop()
        found.append(worker.join())
        worker.flush()

    worker = QueueWorker("test", handle)
    worker.put(1)
    worker.join(5.0)
    assert found == [False]
    with pytest.raises(RuntimeError, match="wait for itself"):
        worker.close()


def test_what_was_put_before_a_stop_is_handled():
    handled = []
    worker = QueueWorker("test", lambda item: (time.sleep(0.01), handled.append(item)))
    for item in range(5):
        worker.put(item)
    done = threading.Event()
    worker.call_when_done(done.set)
    worker.close()
    assert handled == list(range(5)) and done.is_set()


def test_workers_are_forgotten_when_they_end_and_their_errors_are_delivered():
    errors, may_end = [], threading.Event()

    def run(worker, number):
        assert may_end.wait(20)
        if number % 2:
            raise ValueError(number)

    workers = Workers("test", errors.append)
    for number in range(20):
        workers.start(functools.partial(run, number=number))
    assert not workers.join(0.0)
    may_end.set()
    assert workers.join(20.0)
    assert sorted(error.args[0] for error in errors) == list(range(1, 20, 2))
    workers.start(lambda worker: print(worker.wait_stopping()))
    workers.stop()
    assert workers.join(20.0) and not workers._running


def test_a_rest_puts_off_what_comes_meanwhile_and_nobody_waits_for_it():
    handled, first = [], threading.Event()
    with QueueWorker("test", lambda x: (handled.append(x), first.set()), rest_s=60.0) as worker:
        time.sleep(0.1)  # it rests
        worker.flush()
        worker.put(0)
        assert worker.flush(30.0) and handled == [0]
        worker.put(1)
        worker.put(2)
        time.sleep(0.05)
        assert handled == [0]  # it rests
        assert worker.flush(30.0) and handled == [0, 1, 2]
        done = threading.Event()
        worker.put(3)
        worker.call_when_done(done.set)
        assert done.wait(30.0) and handled == [0, 1, 2, 3]
        worker.put(4)
    assert handled == [0, 1, 2, 3, 4]  # closing does not wait, either


@given(st.lists(st.sampled_from(["put", "flush", "call", "pause"]), max_size=30))
@settings(deadline=None, max_examples=30)
def test_a_resting_worker_handles_everything_in_order_whenever_it_is_asked(asked):
    handled, wanted, called = [], [], []
    with QueueWorker("test", handled.append, rest_s=0.002) as worker:
        for i, what in enumerate(asked):
            if what == "put":
                worker.put(i)
                wanted.append(i)
            elif what == "flush":
                assert worker.flush(30.0) and handled == wanted
            elif what == "call":
                so_far = len(wanted)
                worker.call_when_done(lambda n=so_far: called.append((n, len(handled))))
            else:
                time.sleep(0.001)
    assert handled == wanted and all(n == found for n, found in called)
