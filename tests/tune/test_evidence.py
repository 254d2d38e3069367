"""The loss says what a batch gained; it denies what is beyond doubt, and only that."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.evidence import MIN_STEPS, Evidence, Stretch, is_denied


def config(global_batch_size):
    return BatchConfig(micro_batch_size=global_batch_size, num_micro_batches=1, num_replicas=1)


def stretch(batch, gained, error):
    return Stretch(config=config(batch), num_steps=100, gained=gained, error=error)


class Training:
    """Losses of a run: they fall by `gain` per e-fold of samples, with noise of one sample's size."""

    def __init__(self, seed=0, noise=1.0):
        self.evidence, self.rng = Evidence(), np.random.default_rng(seed)
        self.noise, self.samples, self.loss = noise, 1000, 5.0

    def go(self, batch, gain, steps):
        for _ in range(steps):
            before, self.samples = self.samples, self.samples + batch
            self.loss -= gain * math.log(self.samples / before)
            seen = self.loss + self.noise * self.rng.standard_normal() / math.sqrt(batch)
            self.evidence.add(config(batch), self.samples, seen, batch)
        return self.evidence.now()


CURVES = {
    "power": lambda samples: 3 * samples**-0.3,
    "exponential": lambda samples: 3 * math.exp(-samples / 4e4) + 0.5,
    "line": lambda samples: 2 - samples / 1e6,
}


@settings(max_examples=40, deadline=None)
@given(
    curve=st.sampled_from(sorted(CURVES)),
    steps=st.integers(100, 1500),
    later=st.integers(40, 3000),
    batch=st.sampled_from([128, 256]),
    seed=st.integers(0, 2**16),
    ratio=st.floats(1.8, 4.0),
)
def test_a_batch_whose_samples_are_worth_as_much_is_not_denied_however_late_it_is_judged(
    curve, steps, later, batch, seed, ratio
):
    """Training slows down by itself, and no faster than throughput that is 1.8 times as high makes up for."""
    evidence, rng, samples = Evidence(), np.random.default_rng(seed), 1000
    for size in [64] * steps + [batch] * later:
        samples += size
        seen = CURVES[curve](samples) + 0.3 * rng.standard_normal() / math.sqrt(size)
        evidence.add(config(size), samples, seen, size)
    before, after = evidence.before, evidence.after
    assert before is not None and after is not None
    assume(after.is_known)
    wide = dataclasses.replace(after, error=2 * after.error)  # two errors leave a chance of 2 %
    assert not is_denied(before, wide, ratio), (before, after)


@pytest.mark.slow
@given(steps=st.integers(60, 1500), later=st.integers(100, 3000), batch=st.sampled_from([128, 256]))
def test_a_batch_that_gains_next_to_nothing_is_denied_however_young_the_run_is(steps, later, batch):
    training = Training(noise=0.3)
    training.go(64, 1.0, steps)
    training.go(batch, 0.0, later)
    before, after = training.evidence.before, training.evidence.after
    assert before is not None and after is not None
    assume(before.gained > 4 * before.error)
    assert after.is_known and after.error > 0 and after.gained < 0.3
    assert is_denied(before, dataclasses.replace(after, error=0.0), 1.5) == (
        1.5 * after.gained < before.gained - 2 * before.error
    )


def test_what_is_judged_is_what_came_just_after_the_change():
    training = Training(noise=0.0)
    training.go(64, 0.4, 200)
    training.go(128, 0.3, 30)
    early = training.evidence.after
    assert early.gained == pytest.approx(0.3) and early.num_steps == 20
    training.go(128, 0.3, 100)
    training.go(128, 0.01, 3000)
    late = training.evidence.after
    assert late.gained == pytest.approx(0.3) and training.evidence.now().gained < 0.02
    assert late.num_steps < 0.5 * 200 * 64 / 128 + 10


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("steps", [60, 600, 3000])
def test_it_finds_the_planted_gain_within_its_error(seed, steps):
    found = Training(seed).go(64, 0.4, steps)
    assert found.is_known and abs(found.gained - 0.4) < 4 * found.error
    assert found.error < (0.5 if steps == 60 else 0.15)


@pytest.mark.slow
def test_its_error_is_that_of_repeated_runs():
    found = [Training(seed).go(64, 0.4, 400) for seed in range(200)]
    spread = np.std([one.gained for one in found])
    np.testing.assert_allclose(np.median([one.error for one in found]), spread, rtol=0.2)


def test_a_new_batch_is_a_new_stretch_and_the_first_steps_are_left_out():
    training = Training()
    training.go(64, 0.4, 200)
    for steps in range(1, 40):
        now = training.go(256, 0.4, 1)
        assert now.config.global_batch_size == 256 and now.num_steps == max(steps - 10, 0)
        assert now.is_known == (now.num_steps >= MIN_STEPS)
    assert training.evidence.before.config.global_batch_size == 64


def test_another_way_to_make_the_same_batch_is_the_same_stretch():
    training = Training()
    training.go(64, 0.4, 100)
    other = dataclasses.replace(config(64), micro_batch_size=32, num_micro_batches=2)
    training.evidence.add(other, training.samples + 64, 3.0, 64)
    assert training.evidence.before is None and training.evidence.now().config == other


@pytest.mark.parametrize(
    ("before", "now", "ratio", "denied"),
    [
        (stretch(64, 0.4, 0.01), stretch(256, 0.1, 0.01), 1.5, True),
        (
            stretch(64, 0.4, 0.01),
            stretch(256, 0.1, 0.01),
            4.0,
            False,
        ),  # more samples make up for it
        (stretch(64, 0.4, 0.01), stretch(256, 0.1, 0.2), 1.5, False),  # nobody knows
        (stretch(64, 0.02, 0.02), stretch(256, -0.1, 0.01), 1.5, False),  # nor what it was before
        (stretch(256, 0.4, 0.01), stretch(64, 0.1, 0.01), 0.9, False),  # a smaller batch
        (stretch(64, math.nan, math.nan), stretch(256, 0.1, 0.01), 1.0, False),
    ],
)
def test_only_what_is_beyond_doubt_is_denied(before, now, ratio, denied):
    assert is_denied(before, now, ratio) == denied


def test_a_bar_stays_while_the_smaller_batch_gains_more():
    training = Training()
    training.go(64, 0.4, 800)
    training.go(256, 0.02, 300)
    training.evidence.deny(noise_scale=100.0)
    assert training.evidence.bar.global_batch_size == 256
    training.go(64, 0.4, 3000)
    training.evidence.review(150.0)
    assert training.evidence.bar is not None
    training.evidence.review(math.nan)
    assert training.evidence.bar is not None
    training.evidence.review(201.0)
    assert training.evidence.bar is None


def test_a_bar_is_lifted_where_training_has_slowed_down_by_itself():
    training = Training()
    training.go(64, 0.4, 800)
    training.go(256, 0.02, 300)
    training.evidence.deny(noise_scale=100.0)
    training.go(64, 0.02, 100)
    training.evidence.review(100.0)
    assert training.evidence.bar is not None, "too early to tell"
    training.go(64, 0.02, 3000)
    training.evidence.review(100.0)
    assert training.evidence.bar is None


def test_each_batch_keeps_its_newest_known_slope():
    training = Training(noise=0.01)
    assert training.evidence.by_batch == {}
    training.go(64, 1.0, 200)
    training.go(256, 0.2, 200)
    found = training.evidence.by_batch
    assert found[64].gained == pytest.approx(1.0, abs=0.05)
    assert found[256].gained == pytest.approx(0.2, abs=0.05)
    assert found[64].until_samples == 1000 + 64 * 200
    training.go(64, 0.5, 15)  # a trial is too short for a slope, so what is known stays
    assert training.evidence.by_batch == found
    training.go(64, 0.5, 200)
    assert training.evidence.by_batch[64].gained == pytest.approx(0.5, abs=0.05)
    assert training.evidence.by_batch[256] == found[256]
