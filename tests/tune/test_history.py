"""What a run remembers: trials, batches, the first noise, the costs of changes, and the cadence."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.block_times import SHORT_S
from jaxgoodput.tune.cadence import FIRST_CADENCE, NoiseCadence
from jaxgoodput.tune.payoff import RunLength
from jaxgoodput.tune.remembered import BEGINNING, BatchHistory, ProgramMemory
from jaxgoodput.tune.timings import (
    FeedingTimes,
    Parts,
    StrategyTimings,
    SwitchCosts,
)
from jaxgoodput.tune.trial import Trials
from jaxgoodput.tune.verdict import Situation, StrategyOption

LIMITS = BatchLimits(base=32, max=512, max_micro_batches=1)
NOISE = GradGroups(sqr=np.array([1.0]), var=np.array([2.0]))


def at(size, strategy=""):
    return BatchConfig(
        micro_batch_size=size, num_micro_batches=1, num_replicas=1, strategy=strategy
    )


def situation(config, *, timed=(32,), home=None, **known):
    here = StrategyOption(
        config=config,
        limits=LIMITS,
        placement=Placement(num_nodes=1, num_replicas=1),
        ready=(32,),
        timed=timed,
    )
    if home is not None:
        home = dataclasses.replace(here, config=home)
    return Situation(
        here=here, home=home, grad=GradParams(sqr=1e-6, var=1.0), steps_since_change=99, **known
    )


# -- trials ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "goodput", "is_trial"),
    [
        ({}, 5.0, True),  # a size that was never timed
        ({"timed": (32, 64)}, 5.0, False),
        ({"timed": (32, 64)}, math.nan, True),
        ({"disturbed": True}, 5.0, False),  # its times would teach nothing
        ({"scheduled": 64}, math.nan, False),  # the user's own choice
    ],
)
def test_a_change_is_a_trial_if_its_speed_is_unknown(known, goodput, is_trial):
    trials, now = Trials(), situation(at(32), **known)
    trials.switched(now, now.change(at(64), "why", goodput))
    assert trials.is_running == is_trial and trials.home == (at(32) if is_trial else None)


@pytest.mark.parametrize("gain", [0.9, 1.1])
def test_a_trial_that_gains_has_no_way_back(gain):
    trials, first = Trials(), situation(at(32))
    trials.switched(first, first.change(at(64), "why"))
    trial = situation(at(64), home=at(32))
    trials.kept(trial, trial.keep("why", 1.0, gain))
    assert not trials.is_running and (trials.home is None) == (gain > 1)


# -- batches and noise -------------------------------------------------------------------------------


def test_a_trial_that_was_left_is_no_part_of_the_memory():
    history = BatchHistory.begun(at(32))
    history.add(at(64), 100)
    history.add(at(128), 200)
    assert history.memory({}, 9, at(128), is_trial=True).batch == at(64)
    history.add(at(64), 300)  # back from it
    kept = history.memory({}, 9, at(64), is_trial=False)
    assert (kept.batch, kept.since_samples, kept.noise) == (at(64), 100, None)


def test_only_noise_near_the_beginning_is_remembered_and_the_first_counts():
    history = BatchHistory.begun(at(32))
    history.add_noise(BEGINNING + 1, NOISE, 99.0)
    assert history.memory({}, 1, at(32), is_trial=False).noise is None
    for progress, samples in ((50.0, 1.0), (60.0, 99.0), (70.0, 99.0)):
        history.add_noise(progress, NOISE, samples)
    noise = history.memory({}, 1, at(32), is_trial=False).noise
    assert noise is not None and noise.progress == 60.0 and noise.var == (2.0,)


def test_the_batch_of_an_earlier_run_is_within_reach_and_the_floor_until_it_had_come_to_it():
    history = BatchHistory.begun(at(32))
    assert history.max_growth(at(32), 4.0) == 4.0 and history.floor(at(512), 0, 0.0) == 1
    history.recall(ProgramMemory(timings={}, batch=at(512), since_samples=1000, noise=None), at(32))
    assert history.max_growth(at(32), 4.0) == 16.0
    assert history.floor(at(512), 10, 0.01) == 512
    assert history.floor(at(256), 10, 0.01) == 1, "it is not there yet"
    assert history.floor(at(512), 1000, 0.01) == history.floor(at(512), 10, 0.1) == 1


# -- times -------------------------------------------------------------------------------------------


def timed(timings, config, seconds, steps=3, *, measured=False):
    for step in range(steps):
        timings.add(config, Parts(step_s=seconds), step, measured=measured, busy=False)
    return timings.table(config.strategy), timings.key(config, measured=measured)


def test_a_change_costs_what_its_first_step_takes_beyond_the_usual():
    booked, timings = [], StrategyTimings(num_nodes=1)
    costs = SwitchCosts(booked.append)
    assert costs.median_s == 0.0
    costs.add_first_steps(timings.key(at(64), measured=False), 5.0, 1)
    costs.compare(timings.table(""))
    assert not booked, "nothing to compare it with yet"
    costs.compare(timed(timings, at(64), 2.0)[0])
    costs.compare(timings.table(""))
    assert booked == [3.0] and costs.median_s == 3.0


def test_preparing_a_batch_took_no_longer_than_the_step_beside_it():
    feeding = FeedingTimes()
    assert feeding.line(32, 1.0) is None and math.isnan(feeding.of(32))
    feeding.add(32, 9.0)
    line = feeding.line(32, 2.0)
    assert line is not None and (line.base_s, line.per_sample_s) == (2.0, 0.0)
    assert feeding.of(32) == 2.0


@given(
    plain=st.floats(1e-3, 1.0),
    extra=st.floats(0.0, 3.0),
    newest=st.sampled_from([1.0, 99.0]),
    may_block=st.booleans(),
)
def test_the_cadence_waits_for_noise_and_times_and_then_keeps_its_share(
    plain, extra, newest, may_block
):
    cadence, timings = NoiseCadence(None, 0.02), StrategyTimings(num_nodes=1)

    def wanted(is_known=True):
        keys = (timings.key(at(32), measured=m) for m in (False, True))
        about = {"is_known": is_known, "newest_samples": newest, "may_block": may_block}
        return cadence.wanted(timings.table(""), *keys, **about)

    assert wanted(is_known=False) == 1 and wanted() == FIRST_CADENCE
    table, key = timed(timings, at(32), plain)
    assert not cadence.should_relax(table, key, is_known=True), "plain steps are timed already"
    timed(timings, at(32), plain * (1 + extra), measured=True)
    every = wanted()
    assert every >= 2, "or no plain step would be timed again"
    if may_block and plain < SHORT_S:
        assert every >= FIRST_CADENCE, "a block fits in between"
    assert extra / every <= 0.02001 or every == 256 or newest < 8
    assert every <= FIRST_CADENCE or newest >= 8, "after a change it is measured soon"
    assert NoiseCadence(5, 0.02).wanted(table, key, key, is_known=False, newest_samples=0.0) == 5


@given(
    plain=st.floats(1e-3, 1.0),
    extra=st.floats(0.0, 1.0),
    newest=st.sampled_from([0.0, 99.0]),
    is_known=st.booleans(),
)
def test_noise_on_which_nothing_rests_costs_its_share_from_the_first_step_on(
    plain, extra, newest, is_known
):
    cadence, timings = NoiseCadence(None, 0.02, is_needed=False), StrategyTimings(num_nodes=1)
    seen = [cadence.every]

    def look():
        keys = (timings.key(at(32), measured=m) for m in (False, True))
        about = {"is_known": is_known, "newest_samples": newest, "is_needed": False}
        assert not cadence.should_relax(timings.table(""), key, is_known=is_known)
        seen.append(cadence.wanted(timings.table(""), *keys, **about))

    key = timings.key(at(32), measured=False)
    look()
    timed(timings, at(32), plain)
    look()
    timed(timings, at(32), plain * (1 + extra), measured=True)
    look()
    assert all(extra / every <= 0.02001 for every in seen)
    assert seen[-1] <= 50, "it is measured all the same"


# -- the rest of the run -----------------------------------------------------------------------------


def test_a_run_ends_by_progress_or_by_samples():
    steps = RunLength(base_steps=100.0, epochs=None, dataset_size=640, schedule={0: 32, 0.5: 64})
    passes = RunLength(base_steps=None, epochs=2, dataset_size=640)
    assert steps.share_done(25.0, 0) == passes.share_done(0.0, 320) == 0.25
    assert steps.scheduled(49.0, 0) == 32 and steps.scheduled(50.0, 0) == 64
    assert passes.scheduled(0.0, 0) is None and passes.num_samples == 1280
    now = {"global_batch_size": 64, "base": 32, "step_s": 0.5}
    pure_noise = GradParams(sqr=0.0, var=1.0)
    assert steps.left_s(pure_noise, 20.0, 0, **now) == pytest.approx(80 / 2 * 0.5)
    assert passes.left_s(pure_noise, 0.0, 640, **now) == pytest.approx(10 * 0.5)
