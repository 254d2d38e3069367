"""When the next verdict should not wait: noise, step time or loss are no longer what they were."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.drift import CADENCE, NOISE, STEP_S, has_drifted
from jaxgoodput.tune.evidence import Stretch
from jaxgoodput.tune.verdict import Situation, StrategyOption

NAN = math.nan
PERF = PerfParams(
    compute_base=0.01,
    compute_per_sample=0.0,
    intra_base=NAN,
    intra_per_replica=NAN,
    inter_base=NAN,
    inter_per_replica=NAN,
    overlap=1.0,
    update_s=0.0,
)
FIT = PerfFit(params=PERF, error=0.0, unidentified=(), links=("none",), num_rows=3, max_replicas=1)
POSITIVE = st.floats(1e-6, 1e6)


def config(size):
    return BatchConfig(micro_batch_size=size, num_micro_batches=1, num_replicas=1)


def situation(*, size=32, noise=1.0, step_s=0.01, every=10, **known):
    here = StrategyOption(
        config=config(size),
        limits=BatchLimits(base=32, max=512, max_micro_batches=1),
        placement=Placement(num_nodes=1, num_replicas=1),
        ready=(32, 128),
        timed=(32, 128),
        fit=FIT,
    )
    grad = GradParams(sqr=0.0 if noise == math.inf else 1.0, var=min(noise, 1e6))
    return Situation(
        here=here,
        grad=grad,
        step_s=step_s,
        statistics_every=every,
        steps_since_change=99,
        **known,
    )


@given(before=POSITIVE, now=POSITIVE, what=st.sampled_from([("noise", NOISE), ("step_s", STEP_S)]))
def test_a_value_has_drifted_when_it_has_left_a_band_around_the_old_one(before, now, what):
    name, factor = what
    pair = [dataclasses.replace(situation(), step_s=x) for x in (before, now)]
    if name == "noise":
        pair = [situation(noise=x) for x in (before, now)]
    far = abs(math.log(now / before)) / math.log(factor)
    if abs(far - 1) > 1e-6:
        assert has_drifted(*pair) == has_drifted(*reversed(pair)) == (far > 1)


@given(every=st.integers(1, 256))
def test_a_noise_that_should_be_measured_more_often_needs_a_verdict(every):
    assert has_drifted(situation(), situation(every=every)) == (10 > CADENCE * every)


@pytest.mark.parametrize("name", ["noise", "step_s"])
@pytest.mark.parametrize("value", [1.0, NAN])
def test_what_is_unknown_has_not_drifted(name, value):
    if name == "noise":
        pair = situation(noise=NAN), situation(noise=value)
    else:
        pair = situation(step_s=NAN), situation(step_s=value)
    assert not has_drifted(*pair) and not has_drifted(*reversed(pair))


def test_a_signal_that_is_lost_or_found_has_drifted():
    pair = situation(noise=math.inf), situation()
    assert has_drifted(*pair) and has_drifted(*reversed(pair))


def test_another_batch_is_judged_by_other_rules():
    assert not has_drifted(situation(), situation(size=128, noise=1e3))


def test_a_loss_that_comes_to_fall_too_slowly_calls_for_a_verdict_once():
    before = Stretch(config=config(32), num_steps=100, gained=1.0, error=0.01)
    good = Stretch(config=config(128), num_steps=100, gained=1.0, error=0.01)
    bad = dataclasses.replace(good, gained=0.01)
    fine, denied = (situation(size=128, stretch_before=before, stretch=now) for now in (good, bad))
    assert has_drifted(fine, denied)
    unsure = dataclasses.replace(bad, gained=0.9, error=0.03)  # 2.5 errors below
    assert not has_drifted(fine, situation(size=128, stretch_before=before, stretch=unsure))
    assert not has_drifted(denied, denied) and not has_drifted(fine, fine)
