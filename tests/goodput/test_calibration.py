"""What the loss says about a forecast, and what it does not."""

import dataclasses
import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from jaxgoodput.goodput.calibration import Calibration
from jaxgoodput.goodput.efficiency import GradGroups, GradParams, efficiency
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.evidence import Evidence

BASE = 64
GRADS = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.3, 100)), min_size=1, max_size=5).map(
    lambda rows: GradGroups(sqr=np.array(rows)[:, 0], var=np.array(rows)[:, 1])
)
BATCHES = st.sampled_from([64, 256, 1024])
CHANGES = st.lists(
    st.tuples(BATCHES, BATCHES).filter(lambda b: b[0] != b[1]), min_size=6, max_size=9
)


def worth(grad, batches):
    """Of a sample in the second batch, relative to the first."""
    old, new = (float(efficiency(grad, batch / BASE)) for batch in batches)
    return new / old


def off(forecast, real, batches):
    """By how much a forecast misses the real worth."""
    return abs(worth(forecast, batches) - worth(real, batches))


def learn(grad, real, changes, error):
    """The calibration after exact slopes of a loss that falls by 1 per e-fold before each change."""
    found = Calibration()
    for batches in changes:
        ratio = worth(real, batches)
        found = found.after(
            batches=batches, gained=(1.0, ratio), errors=(error, error), grad=grad, base=BASE
        )
    return found


@settings(max_examples=40)
@given(grad=GRADS, factor=st.floats(0.25, 4), changes=CHANGES)
def test_a_forecast_is_corrected_in_both_directions(grad, factor, changes):
    """It comes nearer to what separate runs would show, up to what a prior near 1 leaves."""
    real = dataclasses.replace(grad, var=factor * grad.var)
    found = learn(grad, real, changes, 0.02)
    assert (found.factor > 1) == (factor > 1) or abs(math.log(found.factor)) < 0.3
    for batches in ((64, 256), (256, 1024), (64, 1024)):
        assert off(found.corrected(grad), real, batches) <= off(grad, real, batches) + 0.02
        assert off(found.corrected(grad), real, batches) <= 0.2


@settings(max_examples=40)
@given(grad=GRADS, factor=st.floats(0.25, 4), changes=CHANGES)
def test_slopes_that_say_nothing_correct_nothing(grad, factor, changes):
    real = dataclasses.replace(grad, var=factor * grad.var)
    assert learn(grad, real, changes, 0.6).factor == 1
    sure, unsure = (abs(math.log(learn(grad, real, changes[:1], e).factor)) for e in (0.02, 0.45))
    assert unsure <= sure + 0.05


@given(grad=GRADS, ratio=st.floats(-100, 100))
def test_one_measurement_never_decides(grad, ratio):
    """However far off it is, and however sure of itself."""
    found = Calibration().after(
        batches=(64, 256), gained=(1.0, ratio), errors=(1e-9, 1e-9), grad=grad, base=BASE
    )
    assert 0.2 < found.factor < 5


def test_unknown_noise_teaches_nothing():
    grad = GradParams(sqr=np.nan, var=np.nan, known=False)
    found = Calibration().after(
        batches=(64, 256), gained=(1.0, 0.5), errors=(0.1, 0.1), grad=grad, base=BASE
    )
    assert found.num_changes == 0


@settings(deadline=None, max_examples=12)
@given(power=st.floats(0.2, 0.5), factor=st.sampled_from([0.25, 1.0, 4.0]), seed=st.integers(0, 99))
def test_the_losses_of_a_run_calibrate_it(power, factor, seed):
    """A loss that falls as a power of the samples, each worth what the real noise says."""
    rng, evidence = np.random.default_rng(seed), Evidence()
    grad = GradParams(sqr=1.0, var=6.0)
    real = dataclasses.replace(grad, var=factor * grad.var)
    samples, used = 0, 64 * 200.0
    for batch, steps in ((64, 2000), (256, 1000), (1024, 1200)):
        each = float(efficiency(real, batch / BASE))
        config = BatchConfig(num_replicas=1, micro_batch_size=batch, num_micro_batches=1)
        for _ in range(steps):
            samples += batch
            used += batch * each
            loss = (used / 1e4) ** -power + 0.05 * rng.standard_normal() / math.sqrt(batch)
            evidence.add(config, samples, loss, batch)
            evidence.calibrate(grad, BASE)
    found = evidence.calibration
    assert found.num_changes == 2
    assert off(found.corrected(grad), real, (256, 1024)) <= 0.2
