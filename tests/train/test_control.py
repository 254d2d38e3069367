"""Wishes reach the loop once, whoever posts them, and mean the same in every process."""

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.train.control import (
    CONTROL_SIZE,
    BatchWish,
    Control,
    ControlWire,
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
