"""Which strategy next: the measured best that pays for its move; each is tried once; trials must win."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.strategy import best_of, choose_strategy, judge_trial
from jaxgoodput.tune.verdict import PROBE_STEPS, Caution, Situation, StrategyOption, Verdict

GRAD = GradParams(sqr=1.0, var=4.0)
LIMITS = BatchLimits(base=64, max=512, micro=(1, 64), max_micro_batches=4)
HERE = BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=8, strategy="data8")
FOREVER = 1e6


def fitted(seconds_per_sample):
    """A step takes this long for every sample of a replica."""
    perf = PerfParams(
        compute_base=0.0,
        compute_per_sample=seconds_per_sample,
        intra_base=1e-9,
        intra_per_replica=1e-9,
        inter_base=0.0,
        inter_per_replica=0.0,
        overlap=1.0,
        update_s=0.0,
    )
    return PerfFit(
        params=perf, error=0.0, unidentified=(), links=("intra",), num_rows=3, max_replicas=8
    )


def option(name="fsdp8", *, speed=None, switch_s=0.1, timed=(8,), limits=LIMITS):
    return StrategyOption(
        config=dataclasses.replace(HERE, strategy=name),
        limits=limits,
        placement=Placement(num_nodes=1, num_replicas=8),
        timed=timed if speed else (),
        fit=fitted(1e-3 / speed) if speed else None,
        switch_s=switch_s,
    )


PRESENT = option("data8", speed=1.0)
NOW = PRESENT.goodput(HERE, GRAD)
KEEP = Verdict(config=HERE, goodput=NOW, gain=1.0, reason="keep: the best there is")


def choose(*options, left_s=FOREVER, grad=GRAD, **caution):
    situation = Situation(
        here=PRESENT,
        grad=grad,
        steps_since_change=1000,
        others=options,
        caution=Caution(**caution),
        accumulate=False,
        left_s=left_s,
        step_s=0.1 / PROBE_STEPS,
    )
    return choose_strategy(situation, KEEP)


def test_without_options_the_batch_is_kept_as_it_is():
    assert choose() == KEEP


def test_a_faster_strategy_is_taken_and_its_price_is_told():
    verdict = choose(option(speed=1.5, switch_s=0.25))
    assert verdict.config.strategy == "fsdp8"
    assert verdict.gain == pytest.approx(1.5)
    assert verdict.reason.startswith("change: data8 -> fsdp8")
    assert "the switch costs about 0.25 s" in verdict.reason


@pytest.mark.parametrize("speed", [0.5, 1.0, 1.04])
def test_a_gain_below_the_least_is_refused_with_its_numbers(speed):
    verdict = choose(option(speed=speed), min_gain=0.05)
    assert verdict.config == HERE
    assert (
        verdict.reason.startswith(KEEP.reason)
        and "; data8 -> fsdp8 (64 samples) would" in verdict.reason
    )


def test_a_move_that_does_not_pay_within_the_horizon_or_the_time_left_is_refused():
    assert choose(option(speed=1.1, switch_s=30.0), horizon_s=60.0).config == HERE
    assert choose(option(speed=1.1, switch_s=1.0), left_s=5.0).config == HERE
    assert choose(option(speed=1.1, switch_s=1.0), left_s=20.0).config != HERE


def test_of_several_the_best_is_taken():
    verdict = choose(option("fsdp8", speed=1.5), option("tensor8", speed=2.0), option("data4"))
    assert verdict.config.strategy == "tensor8"


def test_an_untimed_strategy_is_tried_where_the_time_left_repays_it():
    # Two moves of 0.1 s and 0.1 s of steps, against a twentieth of what is left.
    assert choose(option(), left_s=5.9).config == HERE
    verdict = choose(option(), left_s=6.1)
    assert verdict.config.strategy == "fsdp8" and math.isnan(verdict.goodput)
    assert (
        verdict.reason.startswith("probe: fsdp8")
        and "about 0.3 s with both moves" in verdict.reason
    )


def test_a_known_gain_goes_before_a_trial():
    assert choose(option("data4"), option("tensor8", speed=2.0)).config.strategy == "tensor8"


def test_an_unknown_end_tries_nothing():
    assert choose(option(), left_s=math.nan).config == HERE


@pytest.mark.parametrize("base, taken", [(64, True), (32, False)])
def test_without_the_noise_only_equal_batches_can_be_compared(base, taken):
    """At the base batch a sample is worth the same whatever the noise; elsewhere nobody knows."""
    limits = dataclasses.replace(LIMITS, base=base)
    here = dataclasses.replace(PRESENT, limits=dataclasses.replace(LIMITS, base=64))
    situation = Situation(
        here=here,
        grad=GradParams(sqr=math.nan, var=math.nan),
        steps_since_change=1000,
        others=(option(speed=2.0, limits=limits),),
        caution=Caution(max_growth=1.0001),
        accumulate=False,
        left_s=FOREVER,
    )
    verdict = choose_strategy(situation, KEEP)
    assert (verdict.config != HERE) == taken


@given(speed=st.floats(0.1, 10), switch_s=st.floats(0, 100), left_s=st.floats(0, 1e4))
def test_a_change_always_pays_within_what_is_left(speed, switch_s, left_s):
    verdict = choose(option(speed=speed, switch_s=switch_s), left_s=left_s)
    if verdict.config != HERE:
        assert verdict.gain >= 1.05
        assert left_s * (1 - 1 / verdict.gain) >= switch_s * (1 - 1e-9)


def test_the_best_batch_of_a_strategy_is_of_measured_sizes_and_within_the_limits():
    found = best_of(option(speed=1.0, timed=(4, 8, 999)), GRAD, largest=128, accumulate=True)
    assert found is not None
    config, worth = found
    assert config.micro_batch_size in (4, 8) and config.strategy == "fsdp8"
    assert 64 <= config.global_batch_size <= 128
    assert best_of(option(speed=1.0, timed=(1,)), GRAD, largest=512, accumulate=False) is None
    assert best_of(option(), GRAD, largest=512, accumulate=True) is None


def test_a_trial_stays_where_it_was_faster_and_else_returns():
    trial = dataclasses.replace(HERE, strategy="fsdp8")

    def judged(speed):
        return judge_trial(
            Situation(
                here=option("fsdp8", speed=speed),
                home=PRESENT,
                grad=GRAD,
                steps_since_change=8,
                statistics_every=3,
            )
        )

    won = judged(1.2)
    assert won.config == trial and won.gain == pytest.approx(1.2)
    assert won.reason.startswith("keep: fsdp8") and won.statistics_every == 3
    lost = judged(0.8)
    assert lost.config == HERE and lost.reason.startswith("return") and "80%" in lost.reason
    assert judged(None).config == HERE and "could not be timed" in judged(None).reason
