"""When the batch changes, and when it does not: a table of cases, and what holds in all of them."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.goodput.fit import PerfFit, StepTimings, fit_perf_params
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Feeding, PerfParams, Placement, feeding_time, step_time
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.optim.noise import MeasuredGroups
from jaxgoodput.tune.batch import (
    GROWTH,
    KNEE,
    MOST_DISTURBED,
    OPTIMISM,
    REPAYMENT,
    hoped_seconds,
    tune,
)
from jaxgoodput.tune.cadence import statistics_cadence
from jaxgoodput.tune.evidence import Bar, Stretch
from jaxgoodput.tune.plan import fixed_config
from jaxgoodput.tune.timings import feeding_of, residuals_of
from jaxgoodput.tune.verdict import (
    LEAST_FIXED,
    PROBE_S,
    PROBE_STEPS,
    Caution,
    Situation,
    StrategyOption,
)

NAN = math.nan
# A micro-batch costs 10 ms plus 0.1 ms per sample: larger batches are far faster per sample.
PERF = PerfParams(
    compute_base=0.01,
    compute_per_sample=1e-4,
    intra_base=0.002,
    intra_per_replica=1e-4,
    inter_base=NAN,
    inter_per_replica=NAN,
    overlap=2.0,
    update_s=0.001,
)
LIMITS = BatchLimits(base=32, max=4096, micro=(8, 1024), max_micro_batches=4)
NOISY = GradParams(sqr=1e-3, var=10.0)  # noise scale 320,000: a larger batch is nearly free
QUIET = GradParams(sqr=10.0, var=1e-3)  # a larger batch is nearly useless
UNKNOWN = GradParams(sqr=NAN, var=NAN)
BOLD = Caution(min_gain=0.05, dwell_steps=0, max_growth=4.0)
READY = (8, 16, 32, 64, 128, 256, 512, 1024)


def fitted(perf=PERF):
    return PerfFit(
        params=perf, error=0.01, unidentified=(), links=("none",), num_rows=3, max_replicas=1
    )


def at(micro, count=1, replicas=1):
    return BatchConfig(micro_batch_size=micro, num_micro_batches=count, num_replicas=replicas)


def decide(
    grad: Any = NOISY,
    *,
    fit=None,
    current=None,
    limits=LIMITS,
    caution=BOLD,
    ready=READY,
    timed=(16, 32),
    since=1000,
    tried_from=None,
    residuals=(),
    feeding=None,
    **kind,
):
    here = StrategyOption(
        config=current or at(32),
        limits=limits,
        placement=Placement(num_nodes=1, num_replicas=(current or at(32)).num_replicas),
        ready=ready,
        timed=timed,
        fit=fitted() if fit is None else fit,
        residuals=residuals,
        feeding=feeding,
    )
    return tune(
        Situation(
            here=here,
            home=None if tried_from is None else dataclasses.replace(here, config=tried_from),
            grad=grad,
            steps_since_change=since,
            caution=caution,
            **kind,
        )
    )


# -- cases -------------------------------------------------------------------------------------------


def test_nothing_changes_before_there_are_step_times():
    here = StrategyOption(
        config=at(32), limits=LIMITS, placement=Placement(num_nodes=1, num_replicas=1), ready=READY
    )
    verdict = tune(
        Situation(here=here, grad=NOISY, steps_since_change=1000, caution=BOLD, statistics_every=7)
    )
    assert verdict.config == at(32) and "no step times" in verdict.reason
    assert verdict.gain == 1.0 and math.isnan(verdict.goodput) and verdict.statistics_every == 7


def test_a_guess_of_the_noise_speaks_for_no_smaller_batch():
    """Measured, the same moments send the batch down; growing is judged as usual."""
    quiet = {"grad": QUIET, "current": at(512), "timed": READY}
    assert decide(**quiet).config.global_batch_size < 512
    kept = decide(**quiet, noise_is_guess=True)
    assert kept.config == at(512) and "below its own standard error" in kept.reason
    assert "little more than a guess" in kept.reason
    assert decide(noise_is_guess=True) == dataclasses.replace(
        decide(),
        reason=decide().reason.replace(
            " samples, steps", " samples, little more than a guess, steps"
        ),
    )


def test_the_reason_states_the_interval_of_the_noise_scale_which_decides_nothing():
    seen = MeasuredGroups(sqr=np.array([1.0]), sqr_error=np.array([0.2]), var_error=0.01)
    grad = GradGroups(sqr=np.array([1.0]), var=np.array([8.0]))
    with_interval, without = decide(grad, measured=seen), decide(grad)
    assert re.search(r"samples \(80 % interval \d+ to \d+\)", with_interval.reason)
    assert dataclasses.replace(with_interval, reason=without.reason) == without
    assert "80 %" not in without.reason


def test_the_reason_tells_the_measured_noise_scale_and_the_correction():
    grad = GradGroups(sqr=np.array([1.0]), var=np.array([8.0]))
    plain = decide(grad).reason
    corrected = decide(dataclasses.replace(grad, var=4 * grad.var), noise_factor=4.0).reason
    (told,) = re.findall(r"noise scale \d+ samples", plain)
    assert f"{told} and taken 4 times as large, by how the loss fell" in corrected


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"grad": UNKNOWN}, "the gradient noise is not known yet"),
        ({"grad": GradParams(sqr=1.0, var=NAN)}, "the gradient noise is not known yet"),
        (
            {"since": 19, "caution": dataclasses.replace(BOLD, dwell_steps=20)},
            "only 19 steps since",
        ),
        ({"grad": QUIET}, "32 samples is the best batch by the model; measured: noise"),
        (
            {"ready": (), "accumulate": False},
            "32 samples is the best batch by the model among the compiled",
        ),
        ({"caution": dataclasses.replace(BOLD, min_gain=9.0)}, "below the 900%"),
        ({"caution": dataclasses.replace(BOLD, switch_s=60.0, horizon_s=30.0)}, "earn back"),
        # Step times of one replica say nothing about two: not a guess, and not an error.
        (
            {"fit": fitted(dataclasses.replace(PERF, intra_base=NAN)), "current": at(16, 1, 2)},
            "cannot predict the present batch",
        ),
    ],
    ids=[
        "noise",
        "variance",
        "dwell",
        "best",
        "nothing-ready",
        "min-gain",
        "price",
        "unknown-link",
    ],
)
def test_the_batch_stays(what, reason):
    verdict = decide(**what)
    assert verdict.config == what.get("current", at(32))
    assert verdict.reason.startswith("keep") and reason in verdict.reason
    assert verdict.gain == 1.0


def test_noise_makes_the_batch_grow_and_says_why():
    verdict = decide()
    assert verdict.config == at(128) and verdict.reason.startswith("change: 32 -> 128 samples")
    model = GoodputModel(perf=PERF, grad=NOISY, base_batch_size=32)
    placement = Placement(num_nodes=1, num_replicas=1)
    best, now = (float(model.goodput(placement, m)) for m in (128, 32))
    np.testing.assert_allclose([verdict.goodput, verdict.gain], [best, best / now], rtol=1e-6)


def test_the_batch_shrinks_where_the_signal_is_clear():
    below = dataclasses.replace(LIMITS, min_global=8)
    cheap = dataclasses.replace(PERF, compute_base=1e-5, update_s=0.0)
    verdict = decide(QUIET, fit=fitted(cheap), limits=below, current=at(512))
    assert verdict.config.global_batch_size < 32


def test_a_dwell_ends():
    caution = dataclasses.replace(BOLD, dwell_steps=20)
    assert decide(since=20, caution=caution).config != at(32)


def test_a_price_is_paid_where_it_comes_back_in_time():
    gain = decide().gain
    payback = 1 / (1 - 1 / gain)  # of a switch of one second
    for factor, switches in ((0.99, False), (1.01, True)):
        caution = dataclasses.replace(BOLD, switch_s=10.0, horizon_s=10.0 * payback * factor)
        assert (decide(caution=caution).config != at(32)) is switches


def test_one_timed_size_is_followed_by_a_probe_of_another():
    verdict = decide(timed=(32,))
    assert verdict.config == at(128) and verdict.reason.startswith("probe")
    assert math.isnan(verdict.goodput)
    assert decide(timed=(), ready=(8, 16)).config != at(16), "below the smallest batch"
    # As far away as growth is allowed, no farther: the batch never grows faster than max_growth allows.
    assert decide(timed=(32,), ready=(1024,), accumulate=False).config == at(32)
    assert decide(timed=(32, 64)).reason.startswith("change")


def timings_of(seconds):
    """Step times of one replica by micro-batch size."""
    ones, empty = np.ones(len(seconds)), np.full(len(seconds), NAN)
    return StepTimings(
        num_nodes=ones,
        num_replicas=ones,
        micro_batch_size=np.array(list(seconds), float),
        accumulate_s=empty,
        reduce_s=empty,
        update_s=empty,
        step_s=np.array(list(seconds.values())),
    )


@given(disturbed=st.floats(1, MOST_DISTURBED), growth=st.floats(1, 8))
def test_a_size_that_was_timed_beside_a_compilation_is_not_tried_again_without_hope(
    disturbed, growth
):
    """Whatever the compilation did to its times, what is left of the hope must suffice."""
    timings = timings_of({32: 0.01, 128: 0.01 * growth * disturbed})
    verdict = decide(timed=(32,), timings=timings, step_s=0.01, ready=(32, 128), accumulate=False)
    hope = 4 / max(
        4**GROWTH, growth * disturbed / MOST_DISTURBED
    )  # the noise of this case is large
    assume(abs(hope - 1.05) > 0.1)
    assert verdict.reason.startswith("probe") is (hope > 1.05), (hope, verdict.reason)


@pytest.mark.parametrize("scale, probes", [(0.49, False), (0.51, True)])
def test_a_probe_must_pay_if_time_grew_as_an_optimist_assumes(scale, probes):
    # A fourfold batch, 4^GROWTH times the time: worth it from an efficiency on where (N + 32) / (N + 128) is
    # so many times 1.05 / 4. An optimist believes in more noise than was measured.
    least = 1.05 * 4**GROWTH / 4
    break_even = (least * 128 - 32) / (1 - least) / OPTIMISM
    grad = GradParams(sqr=1.0, var=break_even / 32 * (2 * scale))
    only = {"timed": (32,), "ready": (32, 128), "accumulate": False}
    assert decide(grad, **only).reason.startswith("probe") is probes
    # The nearer size pays earlier: of 128 an efficiency of 0.37 is asked, of 64 one of 0.62.
    assert decide(grad, timed=(32,)).reason.startswith("probe")


@given(ratio=st.floats(math.log(0.1), math.log(1e3)).map(math.exp))
def test_a_trial_that_succeeds_is_kept_unless_another_size_promises_clearly_more(ratio):
    """One that was never timed, behind a knee perhaps, is not leapt to for a gain that no change is worth."""
    grad = GradParams(sqr=1.0, var=ratio)
    model = GoodputModel(perf=PERF, grad=grad, base_batch_size=32)
    here = Placement(num_nodes=1, num_replicas=1)
    home, tried, *others = (
        float(model.goodput(here, size)) for size in (32, 128, 32, 64, 256, 512)
    )
    verdict = decide(
        grad,
        current=at(128),
        tried_from=at(32),
        timed=(32, 128),
        ready=(32, 64, 128, 256, 512),
        accumulate=False,
    )
    least = 1 + BOLD.min_gain
    if tried >= least * home:
        assert (verdict.config == at(128)) is (max(others) < least * tried)


@given(
    flat=st.floats(1e-3, 1.0),
    slope=st.floats(0, 1e-2),
    knee=st.integers(1, 600),
    curve=st.floats(0, 1e-5),
    timed=st.sets(st.sampled_from(READY), min_size=2),
    fixed=st.floats(0, 2),
)
def test_hoped_seconds_are_possible(flat, slope, knee, curve, timed, fixed):
    """Lines with a knee and parabolas: between two timed sizes a hope is neither below nor above a bound."""
    seconds = {n: flat + slope * max(n - knee, 0) + curve * n**2 for n in READY}
    known = {n: seconds[n] for n in timed}
    fixed_s = fixed * min(known.values())
    anything, grown = hoped_seconds(known, READY), hoped_seconds(known, READY, fixed_s)
    for size, hoped_s, grown_s in zip(READY, anything, grown, strict=True):
        is_between = min(timed) < size < max(timed) and size not in timed
        assert is_between is not math.isnan(hoped_s)
        if is_between:
            below, above = max(n for n in timed if n < size), min(n for n in timed if n > size)
            line_s = np.interp(size, [below, above], [seconds[below], seconds[above]])
            assert seconds[below] * (1 - 1e-9) <= hoped_s <= grown_s <= line_s * (1 + 1e-9)
            # What is not fixed takes longer in proportion, unless both times say otherwise.
            still_s = min(max(fixed_s, LEAST_FIXED * seconds[below]), seconds[below])
            share_s = still_s + (seconds[below] - still_s) * size / below
            assert grown_s >= min(share_s, line_s) * (1 - 1e-9)


@given(
    times=st.floats(1.01, 100.0),
    sizes=st.lists(st.integers(17, 255), min_size=1, max_size=9, unique=True).map(sorted),
    rising=st.sampled_from([0.0, 1e-6, -1e-6]),
)
def test_of_sizes_on_the_way_to_a_slow_one_none_just_below_it_is_hoped_for(times, sizes, rising):
    """Whatever smaller sizes were timed, a knee is expected at a share of the way to the slow one."""
    timed = {8: 0.02 - rising, 16: 0.02, 256: 16 * times * 0.02}
    hoped_s = hoped_seconds(timed, sizes)
    assert np.all(np.diff(hoped_s) >= -1e-12)
    for size, one_s in zip(sizes, hoped_s, strict=True):
        knee = 16 * 16**KNEE
        line_s = np.interp(size, [knee, 256], [0.02, timed[256]])
        np.testing.assert_allclose(one_s, line_s, rtol=1e-2)
    without = hoped_seconds({n: x for n, x in timed.items() if n != 8}, sizes)
    np.testing.assert_allclose(hoped_s, without, rtol=1e-2)


def test_a_size_beside_a_knee_is_tried_though_a_line_through_others_promises_little():
    """Steps of 16 and 64 take as long, of 256 and 512 in proportion: 128 may be as fast as a knee allows."""
    seconds = {16: 0.02, 64: 0.02, 256: 0.16 / 3, 512: 0.32 / 3}
    timings = timings_of(seconds)
    known = {
        "current": at(256),
        "timed": tuple(seconds),
        "ready": (*seconds, 128),
        "timings": timings,
    }
    verdict = decide(
        GradParams(sqr=1.0, var=16.0), fit=fitted(fit_perf_params(timings).params), **known
    )
    assert verdict.config == at(128) and "as short as hoped" in verdict.reason


@pytest.mark.slow
@given(left_s=st.floats(1e-3, 1e4))
def test_a_later_trial_must_repay_its_seconds_several_times(left_s):
    """By the model nothing is better than 64; an optimist hopes for 512."""
    known = {"current": at(64), "timed": (32, 64), "ready": (64, 512), "accumulate": False}
    known |= {
        "grad": GradParams(sqr=1.0, var=5.0),
        "caution": dataclasses.replace(BOLD, max_growth=8.0),
    }
    sure, verdict = decide(**known), decide(**known, left_s=left_s)
    assert sure.reason.startswith("probe: steps with 512 were never timed")
    hope = 1 + float(re.search(r"gain up to (\d+)%", sure.reason)[1]) / 100
    model = GoodputModel(perf=PERF, grad=known["grad"], base_batch_size=32)
    step_s = 512 / float(model.throughput(Placement(num_nodes=1, num_replicas=1), 512, 1))
    saved, asked = left_s * (1 - 1 / hope), REPAYMENT * max(PROBE_STEPS * step_s, PROBE_S)
    if abs(saved / asked - 1) > 0.1:  # the hope is rounded
        assert verdict.reason.startswith("probe") == (saved > asked)


@given(growth=st.floats(1, 50))
def test_a_size_without_hope_does_not_stand_in_the_way_of_another(growth):
    """However long steps of 128 took beside a compilation, 64 is tried."""
    timings = timings_of({32: 0.01, 128: 0.01 * growth})
    verdict = decide(timed=(32,), timings=timings, step_s=0.01, ready=(32, 64, 128))
    assert verdict.reason.startswith("probe") and verdict.config.micro_batch_size in (64, 128)


def test_what_was_measured_goes_before_the_model():
    # By the model 128 is far better than 32; it was seen to take four times as long as modelled.
    for off, grows in ((1.0, True), (4.0, False)):
        verdict = decide(ready=(32, 128), timed=(32, 128), residuals=((32, 1.0), (128, off)))
        assert (verdict.config.micro_batch_size == 128) == grows, verdict.reason


def test_a_batch_does_not_grow_for_steps_that_would_wait_for_its_rows():
    # 1.2 ms a sample: a larger batch is only prepared in as much more time.
    waits = Feeding(base_s=0.0, per_sample_s=1.2e-3)
    assert decide(timed=READY).config.global_batch_size > 32
    assert decide(timed=READY, feeding=waits).config == at(32)
    # Rows that are there in a fraction of the step's time change nothing.
    quick = Feeding(base_s=0.0, per_sample_s=1e-5)
    assert decide(timed=READY, feeding=quick) == decide(timed=READY)


@given(
    st.floats(0.0, 0.1),
    st.floats(1e-7, 1e-3),
    st.sets(st.integers(1, 4096), min_size=2, max_size=6),
)
def test_a_line_of_feeding_times_is_found_again(base, slope, sizes):
    found = feeding_of({size: base + slope * size for size in sizes})
    assert found is not None
    for size in sizes:
        assert feeding_time(found, size) == pytest.approx(base + slope * size, rel=1e-5)


def test_feeding_times_that_fall_with_the_batch_are_no_promise():
    found = feeding_of({32: 0.02, 64: 0.01})  # noise
    assert found is not None
    assert found.per_sample_s >= 0
    assert found.base_s >= 0
    assert feeding_of({}) is None
    assert feeding_of({32: 0.02}) == Feeding(base_s=0.02, per_sample_s=0.0)


def test_residuals_come_from_this_placement_and_from_sizes_that_were_timed():
    here, sizes = Placement(num_nodes=1, num_replicas=1), np.array([32, 64, 128, 32])
    replicas = np.array([1, 1, 1, 2])
    modelled = np.asarray(step_time(PERF, here, sizes))
    unknown = np.full(4, NAN)
    timings = StepTimings(
        num_nodes=np.ones(4, int),
        num_replicas=replicas,
        micro_batch_size=sizes,
        accumulate_s=unknown,
        reduce_s=unknown,
        update_s=unknown,
        step_s=modelled * np.array([2.0, NAN, 0.5, 9.0]),
    )
    assert residuals_of(PERF, here, timings, {32, 64}) == ((32, pytest.approx(2.0)),)
    found = residuals_of(PERF, here, timings, {32, 64, 128})
    model = GoodputModel(perf=PERF, grad=NOISY, base_batch_size=32, residuals=found)
    assert [float(model.residual(m)) for m in (16, 32, 64, 128, 512)] == pytest.approx(
        [2.0, 2.0, 1.0, 0.5, 0.5]
    )


def test_doubt_asks_more_of_a_change_and_nothing_of_a_trial():
    home, doubtful = at(32), dataclasses.replace(BOLD, doubt=9.0)
    assert decide().gain < 10
    assert decide(caution=doubtful).config == home
    tried = decide(caution=doubtful, current=at(128), tried_from=home, timed=(32, 128))
    assert tried.config.micro_batch_size >= 128, tried.reason


def test_only_ready_sizes_are_chosen():
    assert decide(ready=(48,), accumulate=False).config == at(48)
    # Two micro-batches of what is ready, rather than one of what is not.
    several = decide(dataclasses.replace(NOISY), ready=(32,)).config
    assert several.micro_batch_size == 32 and several.num_micro_batches > 1


def test_growth_is_capped_below_the_base_too():
    limits = dataclasses.replace(LIMITS, min_global=8, base=512)
    verdict = decide(current=at(8), limits=limits)
    assert verdict.config.global_batch_size == 32


sizes = st.lists(st.integers(1, 300), min_size=0, max_size=6)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    sqr=st.floats(0, 100, width=32),  # what a device reports
    var=st.floats(0, 1000, width=32),
    base=st.integers(1, 300),
    factor=st.integers(1, 50),
    micros=st.integers(1, 8),
    below=st.none() | st.floats(0.05, 1),
    replicas=st.sampled_from([1, 2, 3, 8]),
    micro=st.integers(1, 100),
    count=st.integers(1, 8),
    ready=sizes,
    timed=sizes,
    growth=st.floats(1.1, 10),
    accumulate=st.booleans(),
    since=st.integers(0, 40),
)
def test_no_verdict_ever_leaves_the_limits(
    sqr,
    var,
    base,
    factor,
    micros,
    below,
    replicas,
    micro,
    count,
    ready,
    timed,
    growth,
    accumulate,
    since,
):
    limits = BatchLimits(
        base=base,
        max=base * factor,
        micro=(1, 300),
        min_global=None if below is None else max(1, int(base * below)),
        max_micro_batches=micros,
    )
    current = at(micro, count, replicas)
    assume(limits.smallest <= current.global_batch_size <= limits.max)
    assume(count <= (micros if accumulate else 1))
    caution = Caution(min_gain=0.05, dwell_steps=20, max_growth=growth)
    verdict = decide(
        GradParams(sqr=sqr, var=var),
        current=current,
        limits=limits,
        caution=caution,
        ready=ready,
        timed=timed,
        since=since,
        accumulate=accumulate,
    )
    config = verdict.config
    assert limits.smallest <= config.global_batch_size <= limits.max
    assert config.global_batch_size <= current.global_batch_size * growth
    assert 1 <= config.num_micro_batches <= (micros if accumulate else 1)
    assert config.micro_batch_size in {*ready, micro} and config.num_replicas == replicas
    if config != current:
        assert since >= 20
        assert verdict.reason.startswith("probe") or verdict.gain >= 1.05
    else:
        assert verdict.reason.startswith("keep")


# -- a fixed batch -----------------------------------------------------------------------------------


def test_a_fixed_batch_takes_the_fewest_micro_batches():
    assert fixed_config(96, 8, largest_micro=8) == at(6, 2, 8)
    assert fixed_config(96, 8, largest_micro=100) == at(12, 1, 8)
    assert fixed_config(97, 1, largest_micro=8) == at(1, 97, 1)
    assert fixed_config(103, 8, largest_micro=100, tolerance=0.05) == at(13, 1, 8)


@pytest.mark.parametrize(
    ("base", "replicas", "largest", "most", "near"),
    [
        (100, 8, 100, 16, "96 and 104"),
        (5, 8, 100, 16, "8"),
        (97, 1, 8, 16, "96 and 98"),
        (4096, 1, 8, 16, "128"),
        (97, 2, 8, 16, "96 and 98"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_with_those_that_can(
    base, replicas, largest, most, near
):
    with pytest.raises(ValueError, match=f"batch of {base} samples.* that can are {near}: "):
        fixed_config(base, replicas, largest, max_micro_batches=most)
    for size in map(int, near.split(" and ")):
        config = fixed_config(size, replicas, largest, max_micro_batches=most)
        assert config.global_batch_size == size and config.micro_batch_size <= largest


def test_no_memory_for_a_single_sample_is_refused():
    with pytest.raises(ValueError, match="not even one sample.*memory_bytes"):
        fixed_config(32, 1, largest_micro=0)


@settings(max_examples=200, deadline=None)
@given(
    base=st.integers(1, 2000),
    replicas=st.integers(1, 16),
    largest=st.integers(1, 200),
    most=st.integers(1, 32),
    tolerance=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_a_fixed_batch_is_the_base_within_tolerance_or_an_error(
    base, replicas, largest, most, tolerance
):
    try:
        config = fixed_config(base, replicas, largest, tolerance=tolerance, max_micro_batches=most)
    except ValueError:
        exact = [
            k
            for k in range(1, most + 1)
            if base % (replicas * k) == 0 and base <= replicas * k * largest
        ]
        assert not exact
        return
    assert abs(config.global_batch_size - base) <= tolerance * base + 1e-9
    assert config.micro_batch_size <= largest and config.num_micro_batches <= most
    if config.global_batch_size == base:
        fewer = range(1, config.num_micro_batches)
        assert not any(
            base % (replicas * k) == 0 and base // (replicas * k) <= largest for k in fewer
        )


# -- how often to measure ----------------------------------------------------------------------------


def test_cheap_or_unknown_statistics_are_measured_at_every_step():
    for plain, measured in ((0.1, 0.1005), (0.1, 0.09), (NAN, 0.1), (0.1, NAN)):
        assert statistics_cadence(plain, measured, overhead=0.02) == 1


@settings(deadline=None)
@given(
    plain=st.floats(1e-4, 1),
    extra=st.floats(0, 3),
    overhead=st.floats(0.005, 0.5),
)
def test_statistics_cost_no_more_than_their_share(plain, extra, overhead):
    measured = plain * (1 + extra)
    every = statistics_cadence(plain, measured, overhead=overhead)
    assert 1 <= every <= 256
    share = (measured / plain - 1) / every  # one of every `every` steps is a measured one
    assert share <= overhead * (1 + 1e-6) or every == 256


# -- what the loss says ------------------------------------------------------------------------------


def said(config, gained, error=0.01):
    return Stretch(config=config, num_steps=100, gained=gained, error=error)


def test_what_the_loss_denies_is_left_whatever_the_model_hopes():
    kind = {"current": at(512), "timed": READY, "stretch_before": said(at(128), 0.5)}
    assert decide(**kind, stretch=said(at(512), 0.45)).config != at(128)
    verdict = decide(**kind, stretch=said(at(512), 0.1))
    assert verdict.config == at(128) and verdict.denied
    assert (
        "the loss falls too slowly with 512 samples" in verdict.reason
        and "0.50 +- 0.02" in verdict.reason
    )
    waits = dataclasses.replace(BOLD, dwell_steps=20)
    assert not decide(**kind, stretch=said(at(512), 0.1), caution=waits, since=5).denied


@settings(max_examples=60, deadline=None)
@given(barred=st.sampled_from([64, 100, 512, 4096]), micro=st.sampled_from(READY[:4]))
def test_a_barred_batch_is_neither_taken_nor_tried(barred, micro):
    bar = Bar(noise_scale=1e4, was=said(at(barred), 0.1))
    for timed in ((micro,), READY):
        config = decide(current=at(micro), timed=timed, bar=bar).config
        assert config.global_batch_size < barred or config == at(micro)


@given(micro=st.sampled_from(READY[2:]), floor=st.sampled_from([1, *READY]))
@settings(deadline=None)
def test_no_batch_below_that_of_an_earlier_run_is_considered(micro, floor):
    assume(floor <= micro)
    verdict = decide(QUIET, current=at(micro), timed=READY, floor=floor)
    # Without noise the smallest is the best there is.
    assert verdict.config.global_batch_size == max(floor, LIMITS.smallest)
    if floor == micro > LIMITS.smallest:
        assert "because an earlier run had reached it by now" in verdict.reason
