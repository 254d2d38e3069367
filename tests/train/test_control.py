"""Wishes reach the loop once, whoever posts them, and mean the same in every process."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.train.config import Config, Evaluation, Saving
from jaxgoodput.train.control import (
    CONTROL_SIZE,
    BatchWish,
    Control,
    ControlWire,
    Due,
    Requests,
)

REPLICAS = {"data8": 8, "fsdp8": 8, "fsdp4.tensor2": 4}
WIRE = ControlWire(REPLICAS)
counts = st.integers(1, 10**6)


def batch_of(micro, count, strategy=None):
    if strategy is None:
        return BatchWish(micro_batch_size=micro, num_micro_batches=count)
    return BatchConfig(
        micro_batch_size=micro,
        num_micro_batches=count,
        num_replicas=REPLICAS[strategy],
        strategy=strategy,
    )


controls = st.builds(
    Control,
    stop=st.booleans(),
    finish=st.booleans(),
    save=st.booleans(),
    evaluate=st.booleans(),
    show=st.booleans(),
    batch=st.none() | st.builds(batch_of, counts, counts, st.sampled_from([None, *REPLICAS])),
    statistics_every=st.none() | counts,
    num_ready=st.integers(0, 100),
    num_measuring=st.integers(0, 1),
)
# Only process 0 decides configurations.
followers = st.builds(
    Control,
    stop=st.booleans(),
    finish=st.booleans(),
    save=st.booleans(),
    evaluate=st.booleans(),
    show=st.booleans(),
    num_ready=st.integers(0, 100),
    num_measuring=st.integers(0, 1),
)


@given(control=controls)
def test_a_control_survives_the_vector(control):
    vector = WIRE.encode(control)
    assert vector.shape == (CONTROL_SIZE,) and vector.dtype == np.float32
    assert WIRE.decode(vector) == control


@given(first=controls, others=st.lists(followers, max_size=7))
def test_the_sum_over_processes_is_what_anyone_wished_and_what_process_0_decided(first, others):
    everyone = [first, *others]
    agreed = WIRE.decode(np.stack([WIRE.encode(c) for c in everyone]).sum(axis=0))
    for name in ("stop", "finish", "save", "evaluate", "show"):
        assert getattr(agreed, name) == any(getattr(c, name) for c in everyone)
    for name in ("batch", "statistics_every"):
        assert getattr(agreed, name) == getattr(first, name)
    for name in ("num_ready", "num_measuring"):
        assert getattr(agreed, name) == sum(getattr(c, name) for c in everyone)


@given(first=controls, later=controls)
def test_two_wishes_are_both_and_of_two_batches_or_cadences_the_later_one(first, later):
    both = first.also(later)
    for name in ("stop", "finish", "save", "evaluate", "show"):
        assert getattr(both, name) == (getattr(first, name) or getattr(later, name))
    for name in ("batch", "statistics_every"):
        wanted = getattr(later, name)
        assert getattr(both, name) == (getattr(first, name) if wanted is None else wanted)
    assert both.num_ready == first.num_ready + later.num_ready


@given(wishes=st.lists(controls, min_size=3, max_size=3))
def test_it_does_not_matter_when_the_mailbox_is_looked_into(wishes):
    one, two, three = wishes
    assert one.also(two).also(three) == one.also(two.also(three))
    assert Control().also(one) == one.also(Control()) == one
    requests = Requests()
    for wish in wishes:
        requests.post(wish)
    assert requests.take() == one.also(two).also(three)


def test_no_wish_is_no_change():
    assert Requests().take() == Control() == WIRE.decode(np.zeros(CONTROL_SIZE))


def test_a_wish_is_taken_once_and_the_latest_wins():
    requests = Requests()
    requests.post(Control(batch=batch_of(8, 1)))
    requests.post(Control(save=True))
    requests.post(Control(batch=batch_of(16, 2)))
    assert requests.take() == Control(save=True, batch=batch_of(16, 2))
    assert requests.take() == Control()


def test_an_interrupt_stops_until_the_end_and_keeps_its_name():
    requests = Requests()
    requests.interrupt("SIGTERM")
    assert requests.signal == "SIGTERM"
    assert requests.take().stop and requests.take().stop


def test_an_interrupt_comes_through_while_the_mailbox_is_in_use():
    """A signal handler runs on the thread that may hold the mailbox's lock."""
    requests = Requests()
    with requests._lock:
        requests.interrupt("SIGINT")
    assert requests.take().stop


def test_no_wish_is_lost_between_threads():
    requests, taken, posting = Requests(), [], threading.Event()
    posting.set()
    rounds = 300

    def ask(wish_of):
        for value in range(1, rounds + 1):
            requests.post(wish_of(value))

    def take():
        while posting.is_set():
            taken.append(requests.take())

    wishes = (
        lambda value: Control(batch=batch_of(value, 1)),
        lambda value: Control(statistics_every=value),
    )
    threads = [threading.Thread(target=ask, args=(wish_of,)) for wish_of in wishes]
    taker = threading.Thread(target=take)
    for thread in (*threads, taker):
        thread.start()
    for thread in threads:
        thread.join()
    posting.clear()
    taker.join()
    taken.append(requests.take())
    batches = [c.batch.micro_batch_size for c in taken if c.batch is not None]
    cadences = [c.statistics_every for c in taken if c.statistics_every is not None]
    for seen in (batches, cadences):
        # Each at most once, in order, and the last one certainly.
        assert seen == sorted(set(seen)) and seen[-1] == rounds


# -- what is due -------------------------------------------------------------------------------------


def due_of(**settings):
    limits = BatchLimits(base=8, max=8)
    saving = Saving(**{k: v for k, v in settings.items() if k.startswith("every")})
    return Due(Config(workdir="x", batch=limits, base_steps=1e3, saving=saving))


def test_a_new_generation_does_not_reset_the_timers():
    due = due_of(every_s=60.0)
    for start_s in (0.0, 40.0):  # the second generation begins before a checkpoint is due
        due.begin(start_s, 0.0)
        assert due.asked(start_s + 19.0, 0.0) is None
    assert due.asked(60.0, 0.0) == Control(save=True)
    made(due)
    assert due.asked(119.0, 0.0) is None and due.asked(120.0, 0.0) == Control(save=True)


def test_a_generation_that_goes_back_counts_progress_from_there():
    due = due_of(every_base_steps=10.0)
    due.begin(0.0, 0.0)
    assert due.asked(1.0, 12.0) == Control(save=True)
    made(due)
    due.begin(2.0, 5.0)  # what came after was lost
    assert due.asked(3.0, 14.0) is None
    assert due.asked(4.0, 15.0) == Control(save=True)


def made(due):
    with due.saving():
        pass


def test_what_was_asked_for_and_not_done_is_asked_for_again_in_the_next_generation():
    due = due_of(every_s=60.0, every_base_steps=10.0)
    due.begin(0.0, 0.0)
    assert due.asked(60.0, 3.0) == Control(save=True)
    with pytest.raises(OSError), due.saving():
        assert not due.timers(60.0, 3.0).save_left  # which this checkpoint will hold
        raise OSError("another process died while it saved")
    left = due.timers(61.0, 3.0)
    assert left.save_left
    other = due_of(every_s=60.0, every_base_steps=10.0)  # in another process
    for next_, earlier in ((due, None), (other, left)):
        next_.begin(100.0, 3.0, earlier=earlier)
        assert next_.asked(101.0, None) == Control(save=True)
        assert next_.asked(102.0, 4.0) is None  # once a generation
        made(next_)
        assert not next_.timers(103.0, 4.0).save_left
        next_.begin(104.0, 4.0)
        assert next_.asked(105.0, 5.0) is None


def test_an_evaluation_that_was_cut_is_asked_for_again():
    limits, evaluation = BatchLimits(base=8, max=8), Evaluation(every_s=60.0)
    due = Due(Config(workdir="x", batch=limits, base_steps=1e3, evaluation=evaluation))
    due.begin(0.0, 0.0)
    assert due.asked(60.0, 1.0) == Control(evaluate=True)
    due.begin(61.0, 1.0)
    assert due.asked(62.0, 1.0) == Control(evaluate=True)
    due.evaluated()
    due.begin(63.0, 1.0)
    assert due.asked(64.0, 1.0) is None


def test_a_process_whose_clock_lags_owes_nothing_that_was_done():
    """It joined while the others regrouped for 20 s, which count as training only for them."""
    chief, joined = due_of(every_s=60.0), due_of(every_s=60.0)
    chief.begin(0.0, 0.0)
    joined.begin(30.0, 0.0, earlier=told_10_s())
    assert chief.asked(60.0, 1.0) == Control(save=True)
    assert joined.asked(-math.inf, 1.0) is None
    made(chief)
    made(joined)
    joined.obeyed(Control(save=True), 61.0)
    assert joined.asked(-math.inf, 2.0) is None
    joined.begin(100.0, 2.0)  # it decides now
    assert joined.asked(120.0, 3.0) is None
    assert joined.asked(121.0, 3.0) == Control(save=True)


def told_10_s():
    due = due_of(every_s=60.0)
    due.begin(0.0, 0.0)
    return due.timers(10.0, 0.0)


def test_copies_come_soon_and_then_as_they_cost_and_hosts_fail():
    due = due_of(every_s=None)
    due.begin(0.0, 0.0, keep_s=2.0)
    assert due.asked(1.9, None) is None
    assert due.asked(2.0, None, skipping=True) is None
    assert due.asked(2.0, None) == Control(keep=True)
    due.kept(cost_s=2.0, failure_every_s=100.0)
    assert due.asked(21.9, None) is None and due.asked(22.0, None) == Control(keep=True)
    due.begin(30.0, 0.0)  # the next generation has another group with the state
    assert due.asked(1e6, None) is None


@given(steps=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=30), skipped=st.integers(0, 10))
def test_no_checkpoint_is_due_while_updates_are_skipped(steps, skipped):
    due, now_s = due_of(every_s=1.0), 0.0
    due.begin(0.0, 0.0)
    for number, seconds in enumerate(steps):
        now_s += seconds
        wish = due.asked(now_s, 1.0, skipping=number < skipped)
        assert wish is None or number >= skipped
