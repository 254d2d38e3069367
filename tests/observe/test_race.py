"""The race between batch sizes: each is shown once, as what it is, and a guess is never shown as measured."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._fields.serial import decode, encode
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.race import COLUMNS, Contender, balance, cells, race_of
from jaxgoodput.tune.evidence import Bar, Stretch
from jaxgoodput.tune.exploring import AccountState
from jaxgoodput.tune.verdict import Situation, StrategyOption

NAN = math.nan
SIZES = (16, 32, 64, 128, 256, 512)
LINE = PerfParams(
    compute_base=0.01,
    compute_per_sample=1e-4,
    intra_base=NAN,
    intra_per_replica=NAN,
    inter_base=NAN,
    inter_per_replica=NAN,
    overlap=1.0,
    update_s=0.0,
)
FIT = PerfFit(params=LINE, error=0.0, unidentified=(), links=("none",), num_rows=2, max_replicas=1)
GRAD = GradParams(sqr=1.0, var=4.0)  # of the base, 32: a noise scale of 128 samples
some_sizes = st.sets(st.sampled_from(SIZES[1:]))


def at(size):
    return BatchConfig(micro_batch_size=size, num_micro_batches=1, num_replicas=1)


def timings_of(seconds):
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


def situation(size=32, *, seconds=None, clean=(), ready=(), grad=GRAD, **known):
    seconds = seconds or {}
    here = StrategyOption(
        config=at(size),
        limits=BatchLimits(base=32, max=512, max_micro_batches=1),
        placement=Placement(num_nodes=1, num_replicas=1),
        ready={size, *ready},
        timed=clean,
        fit=FIT if seconds else None,
    )
    return Situation(
        here=here,
        grad=grad,
        steps_since_change=99,
        timings=timings_of(seconds) if seconds else None,
        clean=clean,
        step_s=seconds.get(size, NAN),
        **known,
    )


def race(now, slopes=None, *, settled=(), memory_limit=0):
    found = race_of(now, slopes or {}, sizes=SIZES, settled=settled, memory_limit=memory_limit)
    return {one.config.global_batch_size: one for one in found}


@given(
    timed=some_sizes,
    clean=some_sizes,
    ready=some_sizes,
    settled=some_sizes,
    size=st.sampled_from(SIZES[1:]),
    memory_limit=st.sampled_from([0, 128, 512]),
    noise=st.sampled_from([NAN, 1e-3, 4.0]),
    banned=st.none() | st.sampled_from(SIZES),
)
def test_every_batch_is_shown_once_as_what_it_is(
    timed, clean, ready, settled, size, memory_limit, noise, banned
):
    seconds = {s: 0.02 + s * 1e-4 for s in timed}
    clean = clean & timed
    bar = banned and Bar(noise_scale=1.0, was=Stretch(config=at(banned), num_steps=9))
    now = situation(
        size,
        seconds=seconds,
        clean=clean,
        ready=ready,
        grad=GradParams(sqr=1.0, var=noise),
        bar=bar,
    )
    found = race(now, settled=settled | ready, memory_limit=memory_limit)
    assert list(found) == sorted({*SIZES[1:], size} | ({banned} if banned else set()))
    for batch, one in found.items():
        assert one.is_timed == (batch in timed)
        assert one.basis != "measured" or batch in clean
        if batch in timed:
            assert one.step_s == pytest.approx(seconds[batch])
        elif one.basis == "modelled":
            assert len(timed) > 1
        assert math.isfinite(one.step_s) == (one.basis != "unknown")
        if math.isfinite(one.step_s):
            worth = (noise + 1) / (noise + batch / 32) if batch != 32 else 1.0
            assert one.goodput == pytest.approx(batch / one.step_s * worth, nan_ok=True, rel=1e-5)
        if batch == size:
            assert one.standing == "in use"
        elif banned and batch >= banned:
            assert one.standing == "banned"
        elif batch in timed:
            assert one.standing == "tried"
        elif batch in ready:
            assert one.standing == "compiled"
        elif 0 < memory_limit < batch:
            assert one.standing == "too large"
        else:
            assert one.standing == ("being compiled" if batch in settled else "not compiled")


def test_a_trial_and_the_batch_before_it_are_told_apart():
    now = situation(128, seconds={32: 0.01, 128: 0.02}, clean={32, 128})
    now = dataclasses.replace(now, home=dataclasses.replace(now.here, config=at(32)))
    found = race(now)
    assert found[128].standing == "on trial" and found[32].standing == "before the trial"


def test_slopes_belong_to_their_batches_even_to_those_that_are_no_plain_size():
    odd = dataclasses.replace(at(48), num_micro_batches=3)
    slopes = {
        144: Stretch(config=odd, num_steps=70, gained=0.4, error=0.1, until_samples=9e3),
        32: Stretch(config=at(32), num_steps=80, gained=0.5, error=0.2),
    }
    found = race(situation(), slopes)
    assert found[144].config == odd and found[144].until_samples == 9e3
    known = {
        batch: (x.gained, x.gained_error, x.num_steps) for batch, x in found.items() if x.num_steps
    }
    assert known == {144: (0.4, 0.1, 70), 32: (0.5, 0.2, 80)}


def test_a_guess_is_marked_and_has_two_digits():
    timed = Contender(
        config=at(32), standing="in use", step_s=0.012345, basis="measured", goodput=2345.6
    )
    guess = dataclasses.replace(
        timed, basis="guessed", gained=0.4567, gained_error=0.016, num_steps=50
    )
    row = ("32", "in use", "-", "-", "12.3 ms", "steps", "2.35k")
    assert cells(timed) == row and len(row) == len(COLUMNS)
    assert cells(guess) == ("32", "in use", "0.46 +- 0.03", "50", "~ 12 ms", "guess", "~ 2.3k")


@given(earned=st.floats(0, 1e6), spent=st.floats(0, 1e6), loan=st.floats(0, 1e6) | st.just(NAN))
def test_the_account_balances(earned, spent, loan):
    account = AccountState(earned_s=earned, spent_s=spent, loan_s=loan)
    assert account.borrowed_s >= 0
    assert (account.borrowed_s > 0) == (spent > earned)
    assert account.credit_s + account.borrowed_s == pytest.approx(max(earned - spent, 0), abs=1e-6)
    assert ("borrowed" in balance(account)) == (account.borrowed_s > 0)
    assert "nan" not in balance(account)


def test_a_journal_of_another_version_can_be_read():
    one = Contender(config=at(32), standing="in use", step_s=0.01, basis="measured")
    assert encode(decode(encode(one) | {"later": 1}, Contender, "")) == encode(one)
    account = AccountState(earned_s=1.0, spent_s=2.0, loan_s=NAN)
    assert encode(decode(encode(account) | {"later": 1}, AccountState, "")) == encode(account)
