"""A loss that leaps after the batch has grown is noticed within some tens of steps, and nothing else is."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.leap import RECOVERY_STEPS, LossLevel
from jaxgoodput.goodput.search import BatchConfig


def config(size):
    return BatchConfig(micro_batch_size=size, num_micro_batches=1, num_replicas=1)


class Training:
    """Losses of a run at a level of its own, with noise."""

    def __init__(self, seed, noise):
        self.watched, self.rng = LossLevel(), np.random.default_rng(seed)
        self.noise, self.samples = noise, 0

    def go(self, batch, level, steps):
        """Train, and return after how many steps the loss was seen to leap; None if it was not."""
        for i in range(steps):
            self.samples += batch
            loss = level(self.samples) if callable(level) else level
            loss += self.noise * self.rng.standard_normal()
            self.watched.add(config(batch), self.samples, loss, batch)
            if self.watched.leap is not None:
                return i + 1
        return None


CURVES = {
    "falling": lambda samples: 3 / (1 + samples / 1e4),
    "flat": lambda samples: 1.0,
    "rising slowly": lambda samples: 1 + samples / 1e7,
    "negative": lambda samples: -np.log1p(samples / 1e3),
}


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.sampled_from([16, 64, 256]), min_size=2, max_size=6),
    steps=st.lists(st.integers(5, 300), min_size=6, max_size=6),
    curve=st.sampled_from(sorted(CURVES)),
    noise=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**16),
)
def test_losses_that_only_vary_are_no_leap(batches, steps, curve, noise, seed):
    training = Training(seed, noise)
    for batch, num in zip(batches, steps, strict=False):
        assert training.go(batch, CURVES[curve], num) is None


@settings(max_examples=60, deadline=None)
@given(
    before=st.integers(20, 500),
    calm=st.integers(0, 90),
    high=st.floats(1.0, 1e3),
    noise=st.floats(0.001, 0.1),
    seed=st.integers(0, 2**16),
    trials=st.integers(0, 3),
)
def test_a_leap_is_seen_and_says_where_to_go_back_to(before, calm, high, noise, seed, trials):
    training = Training(seed, noise)
    training.go(64, 0.1, before)
    for _ in range(trials):  # short ones that go well do not hide it
        assert training.go(128, 0.1, 9) is None and training.go(64, 0.1, 9) is None
    assert training.go(256, 0.1, calm) is None
    taken = training.go(256, 0.1 + high, 40)
    leap = training.watched.leap
    assert taken is not None and taken <= 8 and leap is not None
    assert (leap.to, leap.at, leap.stays) == (config(64), config(256), False)
    assert abs(leap.was - 0.1) < 5 * noise and leap.now > leap.was + high / 2
    # It stays until the batch shrinks, whatever the loss does.
    assert training.go(256, 0.1, 1) == 1
    assert training.go(64, 0.1, 50) is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), later=st.integers(0, RECOVERY_STEPS - 20))
def test_a_loss_that_stays_high_goes_down_to_the_smallest_batch(seed, later):
    training = Training(seed, 0.01)
    training.go(16, 0.1, 100)
    training.go(64, 0.1, 100)
    assert training.go(256, 2.3, 40) == 8 or training.watched.leap is not None
    assert training.go(64, 2.3, RECOVERY_STEPS - 1) is None
    assert training.go(64, 2.3, 10) is not None
    leap = training.watched.leap
    assert leap is not None and leap.stays and leap.to == config(16)
    assert training.go(16, 2.3, later) is None
    assert training.go(16, 2.3, RECOVERY_STEPS) is None, "there is no smaller batch"
    assert training.go(64, 2.3, 100) is None, "and what is compared with is what it is now"


def test_two_explosions_send_the_run_to_the_batch_it_grew_from():
    training = Training(0, 0.01)

    def explode(batch):
        training.samples += batch
        training.watched.add(config(batch), training.samples, 0.1, batch, explodes=True)
        return training.watched.leap

    training.go(16, 0.1, 10)
    training.go(64, 0.1, 10)
    training.go(256, 0.1, 5)  # a trial
    training.go(64, 0.1, 2000)
    assert explode(64) is None, "once may be an odd batch of data"
    training.go(64, 0.1, 500)
    leap = explode(64)
    assert leap is not None and leap.explodes and (leap.to, leap.at) == (config(16), config(64))
    training.go(16, 0.1, 10)
    assert explode(16) is None and explode(16) is None, "there is no smaller batch"


def test_growth_upon_growth_compares_with_what_was_before_both():
    training = Training(0, 0.01)
    training.go(64, 0.1, 100)
    training.go(128, 0.15, 30)
    training.go(256, 0.15, 5)
    assert training.go(256, 0.3, 20) is not None
