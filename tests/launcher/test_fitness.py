"""Laws of who counts as slow, over healthy noise and planted slow hosts; and what a check measures."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from jaxgoodput import _wire as wire
from jaxgoodput.clock import SystemClock
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness
from jaxgoodput.launcher.elastic import rendezvous as rv
from jaxgoodput.launcher.elastic.fitness import Check, Pace
from jaxgoodput.launcher.elastic.state import Limits, Rendezvous, Stage

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 30))]
LIMITS = Limits(least=1, most=16)
SECRET = "of these tests"


class Job:
    """Hosts that train, and say at which pace; every window is one of 5 steps."""

    def __init__(self, num_hosts):
        self.names = [f"h{i}" for i in range(num_hosts)]
        events = [
            *(ev.ProcessJoined(name, name) for name in self.names),
            *(ev.Ready(name, 0, -1) for name in self.names),
            *(ev.SetUp(name, 1) for name in self.names),
        ]
        self.machine = Rendezvous(limits=LIMITS)
        for event in events:
            self.machine, _ = rv.step(self.machine, event, 100.0)
        assert self.machine.stage is Stage.TRAINING

    def window(self, seconds):
        """The steps' seconds per sample, [hosts, steps]; who is left out after that."""
        samples_s = np.median(seconds, axis=1)
        whole, found = 64, []
        for name, sample_s in zip(self.names, samples_s, strict=True):
            pace = Pace(
                sample_s=float(sample_s),
                step_s=float(samples_s.max()) * whole / len(self.names),  # nothing but computing
                part=1,
                whole=whole,
                is_leased=False,
            )
            self.machine, actions = rv.step(self.machine, ev.Beat(name, 1, 1, pace), 100.0)
            found += [a.decision.host for a in actions if isinstance(a, ev.Tell)]
        return found


class Noise:
    """What healthy hosts do: no two are quite alike, collect garbage, share their machine with others."""

    def __init__(self, rng, num_hosts):
        self.rng = rng
        self.own = rng.uniform(1.0, 1.3, num_hosts)
        self.left = np.zeros(num_hosts, int)  # windows that a neighbour stays
        self.times = np.ones(num_hosts)

    def window(self):
        rng, count = self.rng, len(self.own)
        comes = (self.left == 0) & (rng.random(count) < 0.03)
        self.left = np.where(comes, rng.integers(1, 5, count), np.maximum(self.left - 1, 0))
        self.times = np.where(comes, rng.uniform(1.2, 6.0, count), self.times)
        steady = self.own * np.where(self.left > 0, self.times, 1.0)
        steps = rng.lognormal(0.0, 0.2, (count, 5)) + 0.05 * rng.pareto(1.2, (count, 5))
        pauses = np.where(rng.random((count, 5)) < 0.05, rng.pareto(1.0, (count, 5)) * 5.0, 0.0)
        everybody = rng.choice([1.0, 1.0, 1.0, 3.0])  # the network, or the file system
        return 1e-3 * everybody * (steady[:, None] * steps + pauses)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_thousand_healthy_windows_none_leaves_a_host_out(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 9))
    job, noise = Job(count), Noise(rng, count)
    for _ in range(1000):
        assert job.window(noise.window()) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_that_becomes_three_times_slower_is_found_soon(seed):
    """In 8 windows where no other host is slow meanwhile, and as soon as none is."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9))
    job, noise = Job(count), Noise(rng, count)
    for _ in range(50):
        assert job.window(noise.window()) == []
    found, windows = [], 0
    while not found:
        seconds = noise.window()
        seconds[0] *= 3.0
        found, windows = job.window(seconds), windows + 1
    assert found == ["h0"] and windows <= 80


def test_without_noise_it_takes_as_many_windows_as_are_asked_for():
    job = Job(3)
    for _ in range(LIMITS.slow_windows - 1):
        assert job.window(np.array([[1.0], [1.0], [3.0]])) == []
    assert job.window(np.array([[1.0], [1.0], [3.0]])) == ["h2"]


def test_hosts_of_two_kinds_are_nobodys_odd_one():
    job = Job(6)
    for _ in range(50):
        assert job.window(np.array([[1.0]] * 3 + [[2.5]] * 3)) == []


# -- the check -----------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(reply):
    """An address at which every connection is answered with `reply(channel)`."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def serve():
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            channel, _ = wire.accepted(sock, SECRET)
            threads.append(threading.Thread(target=reply, args=(channel,)))
            threads[-1].start()

    accepting = threading.Thread(target=serve)
    accepting.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in [accepting, *threads]:
            thread.join()


def give(channel):
    with contextlib.closing(channel), contextlib.suppress(OSError):  # it may only want an answer
        fitness.give(channel)


def test_a_check_measures_this_machine_and_its_network():
    with serving(fitness.answer) as coordinator, serving(give) as peer:
        check = fitness.examine(coordinator, [peer], SECRET, SystemClock())
    assert not check.failure and not check.unreached
    assert check.product_s > 0 and check.round_trip_s > 0 and check.send_s > 0
    assert check.fetch_s is not None and check.fetch_s > 0


def test_who_does_not_reach_all_that_train_is_left_out_with_their_names():
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    with serving(fitness.answer) as coordinator, serving(give) as peer:
        alone = fitness.examine(coordinator, [nobody], SECRET, SystemClock())
        both = fitness.examine(coordinator, [nobody, peer], SECRET, SystemClock())
        peers = fitness.unreached_of({"a": nobody, "b": peer}, SECRET)
    assert nobody in fitness.unfit(alone, [], 2.0)
    assert fitness.unfit(both, [], 2.0) == "", "a single peer may just have ended"
    assert list(peers) == ["a"] and "refused" in peers["a"]


def test_a_coordinator_that_does_not_answer_a_probe_is_not_reached():
    with serving(lambda channel: channel.close()) as coordinator:
        check = fitness.examine(coordinator, [], SECRET, SystemClock())
    assert not check.failure and ("did not answer" in check.unreached or "Errno" in check.unreached)
    assert "it did not reach the coordinator" in fitness.unfit(check, [], 2.0)
    assert "it did not reach" in str(check)


@pytest.mark.parametrize("wrong", [1.0, float("nan"), float("inf")])
def test_one_wrong_number_in_a_product_is_found(wrong):
    product = np.ones((4, 4), np.float32)
    fitness.require_right(product, np.full(4, 4))
    product[2, 1] += wrong
    with pytest.raises(ArithmeticError, match="wrong numbers"):
        fitness.require_right(product, np.full(4, 4))


@pytest.mark.parametrize("name", ["product_s", "send_s", "fetch_s"])
def test_a_check_is_judged_against_the_slower_half_of_the_others(name):
    def made(seconds):
        usual = {"product_s": 1.0, "round_trip_s": 1.0, "send_s": 1.0, "fetch_s": 1.0}
        return Check(**{**usual, name: seconds})

    # One of the others is the coordinator's own host, to which all is near.
    assert fitness.unfit(made(7.9), [made(0.01), made(1.0)], 2.0) == ""
    assert "median of 2 others" in fitness.unfit(made(8.1), [made(0.01), made(1.0)], 2.0)
    assert fitness.unfit(made(8.1), [made(1.0)], 2.0) == "", "of two, nobody knows which is odd"
    assert fitness.unfit(made(8.1), [made(1.0)] * 3, 0.0) == "", "turned off"
