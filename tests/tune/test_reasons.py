"""What the sentences of verdicts say, whatever the situation: what is measured, and what is only hoped."""

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import Phase, assume, event, given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradParams, is_known
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.leap import Leap
from jaxgoodput.goodput.perf import PerfParams, Placement, step_time
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.batch import tune
from jaxgoodput.tune.evidence import Bar, Stretch
from jaxgoodput.tune.exploring import Explorer
from jaxgoodput.tune.timings import StrategyTimings
from jaxgoodput.tune.verdict import Caution, Situation, StrategyOption

NAN = math.nan
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
DURATION = r"about [\d.]+ (us|ms|s|min|h|days)\b"
# So many draws take minutes to shrink, and the sentence says what is wrong with it.
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
some_sizes = st.sets(st.sampled_from(SIZES), max_size=5)


def fitted(fixed_s, per_sample_s):
    perf = PerfParams(
        compute_base=fixed_s,
        compute_per_sample=per_sample_s,
        intra_base=1e-4,
        intra_per_replica=1e-5,
        inter_base=NAN,
        inter_per_replica=NAN,
        overlap=1.0,
        update_s=0.0,
    )
    return PerfFit(
        params=perf, error=0.03, unidentified=(), links=("none",), num_rows=2, max_replicas=4
    )


def timings_of(seconds, replicas):
    num = len(seconds)
    return StepTimings(
        num_nodes=np.ones(num),
        num_replicas=np.full(num, replicas),
        micro_batch_size=np.array(list(seconds), float),
        accumulate_s=np.full(num, NAN),
        reduce_s=np.full(num, NAN),
        update_s=np.full(num, NAN),
        step_s=np.array(list(seconds.values())),
    )


def a_stretch(draw, config):
    gained, error = draw(st.floats(1e-4, 10)), draw(st.floats(1e-5, 0.1))
    return Stretch(config=config, num_steps=100, gained=gained, error=error)


def a_leap(draw, before, config):
    was = draw(st.integers(-1000, 1000)) / 100
    now = was + draw(st.integers(1, 10**6)) / 100
    return Leap(
        to=before,
        at=config,
        was=was,
        now=now,
        stays=draw(st.booleans()),
        explodes=draw(st.booleans()),
    )


def another_strategy(draw, config, limits, placement):
    has_fit = draw(st.booleans())
    return StrategyOption(
        config=dataclasses.replace(config, strategy="fsdp8"),
        limits=limits,
        placement=placement,
        ready=(config.micro_batch_size,),
        timed=(config.micro_batch_size,) if has_fit else (),
        fit=fitted(draw(st.floats(1e-4, 0.1)), draw(st.floats(1e-6, 1e-2))) if has_fit else None,
        switch_s=draw(st.floats(0, 100)),
    )


def a_situation(draw):
    """A situation as the analyst makes them, with the outlook of a real explorer.

    No strategy of Hypothesis may build it, because the type checks of its classes use `random`.
    """
    replicas = draw(st.sampled_from([1, 2, 4]))
    size, placement = draw(st.sampled_from(SIZES)), Placement(num_nodes=1, num_replicas=replicas)
    count = draw(st.integers(1, 3))
    config = BatchConfig(
        micro_batch_size=size, num_micro_batches=count, num_replicas=replicas, strategy="data8"
    )
    low, high = draw(st.sampled_from([(1, 512), (1, 512), (size, size)]))
    limits = BatchLimits(
        base=draw(st.integers(1, config.global_batch_size)),
        max=config.global_batch_size * draw(st.sampled_from([1, 4, 64, 64])),
        micro=(low, high),
        sizes=tuple(s for s in SIZES if low <= s <= high),
        max_micro_batches=draw(st.integers(count, 4)),
    )
    fixed_s, per_sample_s = draw(st.floats(1e-4, 0.1)), draw(st.floats(1e-6, 1e-2))
    fit = fitted(fixed_s, per_sample_s)
    timed = draw(st.sampled_from([frozenset(), {size}, {size}, {size}, {size} | draw(some_sizes)]))
    timed |= draw(st.sampled_from([frozenset(), frozenset(), draw(some_sizes)]))
    ready = draw(some_sizes) | draw(st.sampled_from([{size}, timed | {size}]))
    seconds = {
        s: float(step_time(fit.params, placement, s)) * draw(st.floats(0.5, 2)) for s in timed
    }
    is_timed = size in timed
    here = StrategyOption(
        config=config,
        limits=limits,
        placement=placement,
        ready=tuple(ready),
        timed=tuple(timed),
        fit=fit if timed else None,
    )
    home = None
    if draw(st.integers(0, 3)) == 0 and ready - {size}:
        old = draw(st.sampled_from(sorted(ready - {size})))
        home = dataclasses.replace(here, config=dataclasses.replace(config, micro_batch_size=old))
    before = dataclasses.replace(config, micro_batch_size=max(size // 2, 1))
    beyond = dataclasses.replace(config, micro_batch_size=2 * size)
    is_noise_known = draw(st.sampled_from([True] * 7 + [False]))
    signal, noise = draw(st.floats(1e-6, 10)), draw(st.floats(1e-3, 1e4))
    situation = Situation(
        here=here,
        home=home,
        others=tuple(
            another_strategy(draw, config, limits, placement)
            for _ in range(draw(st.integers(0, 2)) if timed else 0)
        ),
        grad=GradParams(sqr=signal, var=noise) if is_noise_known else GradParams(sqr=NAN, var=NAN),
        steps_since_change=draw(st.sampled_from([0, 1, 500, 500, 500, 500])),
        caution=Caution(
            min_gain=draw(st.floats(0.01, 0.5)),
            doubt=draw(st.sampled_from([0.0, 0.0, 1.0, 0.37])),
            dwell_steps=draw(st.sampled_from([0, 20])),
            max_growth=draw(st.floats(1.5, 8)),
            switch_s=draw(st.sampled_from([0.0, 0.0, 3.21])),
            horizon_s=draw(st.floats(1, 1000)),
        ),
        timings=timings_of(seconds, replicas) if seconds else None,
        disturbed=draw(st.booleans()),
        accumulate=draw(st.booleans()) or count > 1,
        noise_is_guess=draw(st.booleans()),
        stretch=a_stretch(draw, config),
        stretch_before=a_stretch(draw, before) if draw(st.integers(0, 5)) == 0 else None,
        bar=Bar(noise_scale=1e3, was=a_stretch(draw, beyond)) if draw(st.booleans()) else None,
        leap=a_leap(draw, before, config) if draw(st.integers(0, 9)) == 0 else None,
        floor=draw(st.sampled_from([1, 1, config.global_batch_size])),
        left_s=draw(st.floats(1e-2, 1e7)) if is_timed else NAN,
        step_s=float(seconds[size]) if is_timed else NAN,
    )
    explorer = Explorer(draw(st.floats(0.1, 100)), began_s=0.0)
    table = StrategyTimings(num_nodes=1).table("data8")
    explorer.next(situation, SIZES, ready, table, now_s=draw(st.floats(0, 1e5)))
    outlook = explorer.outlook if draw(st.booleans()) else ""
    return dataclasses.replace(situation, outlook=outlook)


def digits(number):
    """Whether a number has at most two significant digits."""
    return float(number) == float(f"{float(number):.2g}")


@pytest.mark.slow
@settings(max_examples=500, deadline=None, phases=UNSHRUNK, report_multiple_bugs=False)
@given(st.data())
def test_every_reason_says_what_is_known_and_what_is_hoped(data):
    situation = a_situation(data.draw)
    verdict, here, caution = tune(situation), situation.here, situation.caution
    reason, config = verdict.reason, verdict.config
    event(re.sub(r"[\d.]+", "#", reason)[:60])
    assert re.match(r"(keep|change|probe|return): \S", reason), reason
    assert len(reason) < 450 and not reason.endswith((".", " ", ";")), reason
    # Nothing that only a program could have written.
    assert not re.search(
        r"\b(nan|inf|None)\b|\de[+-]?\d|  |\(\)|\b1 (replicas|steps|micro-batches)\b", reason
    ), reason
    # Before two sizes are timed, nothing is called the best.
    if len(set(here.timed)) < 2:
        assert "best" not in reason, reason
    # Estimates have two digits; a measured slope has as many as its error.
    for number in re.findall(r"(\d+)%", reason) + re.findall(r"(\d+\.\d+)(?! \+-)", reason):
        assert digits(number) or "+-" in reason, reason
    assert not re.search(r"\d\.\d+%", reason), "no parts of a percent"
    # What is gained is measured, modelled or hoped for, and the sentence says which.
    for part in re.findall(r"[^;]*\b(?:gain|lose)s? [^;]*", reason):
        told = ("by the model", "measured", "was tried", "may gain", "that a change must bring")
        assert any(word in part for word in told), reason
    is_new = config.micro_batch_size not in here.timed or config.strategy != "data8"
    if config == situation.current or config == situation.incumbent or verdict.denied:
        return
    if reason.startswith("probe"):
        assert is_new and "timed" in reason and "may gain" in reason, reason
        assert re.search(DURATION, reason) or ("a few steps" in reason), reason
        assert "a few steps" not in reason or math.isnan(situation.step_s)
    else:
        assert reason.startswith("change") and verdict.gain >= 1 + caution.min_gain
        assert "is expected to gain" in reason and "measured" in reason, reason
        if config.strategy == "data8":
            assert is_new is ("were never timed" in reason), reason
            assert not (is_new and not situation.disturbed) or re.search(DURATION, reason), reason


@pytest.mark.slow
@settings(max_examples=200, deadline=None, phases=UNSHRUNK)
@given(st.data())
def test_a_verdict_that_keeps_the_batch_on_measurements_names_them(data):
    situation = a_situation(data.draw)
    verdict = tune(dataclasses.replace(situation, others=()))
    assume(verdict.reason.startswith("keep"))
    is_ready = situation.here.fit is not None and is_known(situation.grad)
    assume(is_ready and situation.steps_since_change >= situation.caution.dwell_steps)
    assert re.search(r"measured: noise scale [\d.]+[kMG]?", verdict.reason)
    timed = set(situation.here.timed)
    if 0 < len(timed) <= 3:
        assert f"steps of {' and '.join(map(str, sorted(timed)))}" in verdict.reason


@pytest.mark.slow
@settings(max_examples=200, deadline=None, phases=UNSHRUNK)
@given(
    data=st.data(),
    compile_s=st.floats(1e-3, 1e4),
    passed_s=st.floats(0, 1e5),
    spent_s=st.sampled_from([0.0, 1.0, 1e3]),
)
def test_the_outlook_says_what_the_next_size_costs_and_may_save(data, compile_s, passed_s, spent_s):
    situation = a_situation(data.draw)
    assume(not math.isnan(situation.left_s))
    explorer = Explorer(compile_s, began_s=0.0)
    explorer.account.spent_s = spent_s
    table = StrategyTimings(num_nodes=1).table("data8")
    ready = situation.here.ready
    found = explorer.next(situation, SIZES, ready, table, now_s=passed_s)
    said = explorer.outlook
    event(re.sub(r"[\d.]+", "#", said)[-60:])
    assert not re.search(r"\b(nan|inf|None)\b|\de[+-]?\d|  |best", said), said
    assert all(map(digits, re.findall(r"\d+\.\d+", said))), said
    if "no size left" in said:
        assert found is None
        return
    assert re.search(rf"{DURATION}, and may save up to [\d.]+ \S+ of the", said), said
    assert (found is None) is ("would delay" in said), said


def test_a_return_from_a_trial_says_what_the_trial_has_shown():
    config = BatchConfig(micro_batch_size=32, num_micro_batches=1, num_replicas=1)
    placement = Placement(num_nodes=1, num_replicas=1)
    here = StrategyOption(
        config=dataclasses.replace(config, micro_batch_size=128),
        limits=BatchLimits(base=32, max=128, max_micro_batches=1, sizes=(32, 128)),
        placement=placement,
        ready=(32, 128),
        timed=(32, 128),
        fit=fitted(1e-4, 1e-2),
    )
    verdict = tune(
        Situation(
            here=here,
            home=dataclasses.replace(here, config=config),
            grad=GradParams(sqr=1.0, var=1.0),
            steps_since_change=100,
        )
    )
    assert verdict.reason.startswith("return: a batch of 128 was tried and loses"), verdict.reason
    assert verdict.gain == pytest.approx(1.0)
