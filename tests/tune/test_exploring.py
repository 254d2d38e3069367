"""What is compiled and tried next, and what exploring may cost."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.batch import GROWTH, assumed_growth, choose_batch
from jaxgoodput.tune.exploring import (
    EARNINGS,
    FEW_CORES_DELAY,
    FOUND,
    HURRY,
    LOAN,
    MOST_LOANS,
    REPAYMENT,
    Account,
    Explorer,
    Hopes,
)
from jaxgoodput.tune.timings import Parts, StrategyTimings, key_of
from jaxgoodput.tune.verdict import LEAST_FIXED, PROBE_STEPS, Situation, StrategyOption

SIZES = (8, 16, 32, 64, 128, 256, 512)
SECONDS = st.floats(1e-3, 1e5)
NOISY, SILENT = GradParams(sqr=1e-6, var=1.0), GradParams(sqr=1.0, var=0.0)
UNKNOWN = GradParams(sqr=math.nan, var=math.nan)
TRIAL_S = PROBE_STEPS * 0.1 * 4**GROWTH  # of 128 beside 32, if a step of 32 takes 0.1 s


def situation(size=32, *, ready=(32,), timed=(32,), grad=NOISY, **known):
    config = BatchConfig(micro_batch_size=size, num_micro_batches=1, num_replicas=1, strategy="")
    here = StrategyOption(
        config=config,
        limits=BatchLimits(base=32, max=512, max_micro_batches=1),
        placement=Placement(num_nodes=1, num_replicas=1),
        ready=ready,
        timed=timed,
    )
    return Situation(here=here, grad=grad, steps_since_change=99, **known)


@pytest.fixture
def table():
    return StrategyTimings(num_nodes=1).table("")


@given(
    prices=st.lists(st.tuples(SECONDS, st.floats(0, 1)), min_size=1, max_size=30),
    total_s=SECONDS,
    hope=st.floats(1.05, 8),
)
def test_a_run_in_which_nothing_is_found_loses_at_most_what_the_account_lends(
    prices, total_s, hope
):
    """Whatever is asked for, and whenever, if nothing shortens the run."""
    account = Account()
    for price_s, at in sorted(prices, key=lambda x: x[1]):
        passed_s = at * total_s
        left_s = total_s - passed_s
        saving_s = left_s * (1 - 1 / hope)
        if account.allows(price_s, saving_s=saving_s, passed_s=passed_s, left_s=left_s):
            assert saving_s > price_s
            account.spend(price_s, total_s=total_s)
            num_loans = min(max(saving_s / (REPAYMENT * price_s), 1.0), MOST_LOANS)
            lent_s = LOAN * num_loans * left_s
            assert account.spent_s <= EARNINGS * passed_s + lent_s + 1e-9 * total_s
    assert account.spent_s <= (EARNINGS + MOST_LOANS * LOAN) * total_s * (1 + 1e-9)


def test_a_loan_must_be_repaid_several_times_and_a_found_size_earns():
    account = Account()
    left = {"passed_s": 0.0, "left_s": 100.0}
    assert account.allows(2.0, saving_s=2.0 * REPAYMENT, **left)
    assert not account.allows(2.0, saving_s=1.9 * REPAYMENT, **left)
    assert not account.allows(3.1, saving_s=3.1 * REPAYMENT, **left)
    # What repays twice as much may cost twice as much.
    assert account.allows(5.9, saving_s=2 * 5.9 * REPAYMENT, **left)
    assert not account.allows(6.1, saving_s=2 * 6.1 * REPAYMENT, **left)
    assert not account.allows(12.1, saving_s=1e6, **left)
    account.spend(2.0, total_s=100.0)
    # The same price once more: not from 3 % of what is left, but from a share of the 70 s that were saved.
    assert not account.allows(2.0, saving_s=11.0, passed_s=5.0, left_s=95.0)
    assert account.allows(2.0, saving_s=11.0, passed_s=5.0, left_s=25.0)
    assert not account.allows(1.0, saving_s=9.0, passed_s=5.0, left_s=math.nan)


@given(
    left_s=st.floats(10.0, 1e4),
    outcomes=st.lists(st.sampled_from(["kept", "in vain", "on trial", "refused"]), max_size=4),
)
def test_after_a_size_that_was_tried_in_vain_less_is_borrowed_until_one_is_kept(left_s, outcomes):
    table, explorer = StrategyTimings(num_nodes=1).table(""), Explorer(1e-4, 0.0)
    current, settled, timed, most = 32, [32], [32], MOST_LOANS

    def now(**also):
        return situation(
            current, ready=tuple(settled), timed=tuple(timed), left_s=left_s, step_s=1e-4, **also
        )

    for outcome in outcomes:
        found = explorer.next(now(), SIZES, settled, table, now_s=1.0)
        assert explorer.account.most_loans == most
        if found is None:
            return
        explorer.next(now(), SIZES, settled, table, now_s=1.0)
        assert explorer.account.most_loans == most, "nothing is known of it while it is compiled"
        explorer.compiled(0.0 if outcome == "refused" else 1e-4, table)
        settled.append(found.size)
        if outcome == "on trial":  # whose end is not known yet
            home, before = StrategyOption(**vars(now().here)), current
            current = found.size
            explorer.next(now(home=home), SIZES, SIZES, table, now_s=1.0)
            current = before
            explorer.next(now(home=home), SIZES, SIZES, table, now_s=1.0)
            assert explorer.account.most_loans == most
        if outcome in ("kept", "in vain"):
            timed.append(found.size)
            current = found.size if outcome == "kept" else current
            most = MOST_LOANS if outcome == "kept" else 1.0
        explorer.next(now(), SIZES, SIZES, table, now_s=1.0)
        assert explorer.account.state(1.0, left_s).most_loans == most


@pytest.mark.slow
@given(
    lefts_s=st.lists(st.floats(1.0, 1e4), min_size=2, max_size=6),
    found=st.booleans(),
    busy=st.booleans(),
)
def test_only_a_size_that_was_found_earns_by_shortening_the_run(lefts_s, found, busy):
    """While the first batch is kept, a shorter forecast of the rest is not a saving."""
    table, explorer = StrategyTimings(num_nodes=1).table(""), Explorer(1e-3, 0.0)
    first = situation(left_s=lefts_s[0], step_s=0.1)
    if explorer.next(first, SIZES, (32,), table, now_s=1.0) is None:
        return
    explorer.compiled(1e-3, table)
    for left_s in lefts_s[1:]:
        now = situation(
            128 if found else 32, ready=(32, 128), timed=(32, 128), left_s=left_s, step_s=0.1
        )
        now = dataclasses.replace(now, disturbed=busy)
        explorer.next(now, SIZES, SIZES, table, now_s=2.0)
        saved_s = explorer.account.state(2.0, left_s).earned_s - EARNINGS * 2.0
        expected_s = FOUND * max(1.0 + lefts_s[0] - 2.0 - left_s, 0.0)
        assert saved_s == pytest.approx(expected_s if found else 0.0, abs=1e-6)


def test_what_costs_nothing_is_allowed_if_it_may_save_anything():
    left = {"passed_s": 0.0, "left_s": 100.0}
    assert Account().allows(0.0, saving_s=1.0, **left)
    assert not Account().allows(0.0, saving_s=0.0, **left)


def next_size(now, sizes, settled, table):
    return Hopes.of(now, sizes, table).next_size(settled)


def test_the_farthest_size_that_one_change_reaches_comes_first(table):
    first = next_size(situation(), SIZES, (32,), table)
    assert (
        first is not None
        and first.size == 128
        and first.hope == pytest.approx(4 / 4**GROWTH, rel=0.01)
    )
    later = next_size(situation(), SIZES, (32, 128), table)
    assert later is not None and later.size == 64
    denied = situation(caution=dataclasses.replace(situation().caution, max_growth=2.0))
    near = next_size(denied, SIZES, (32,), table)
    assert near is not None and near.size == 64


def test_one_size_at_a_time(table):
    """A compiled size that promises a gain is tried before another one is compiled."""
    assert next_size(situation(ready=(32, 128)), SIZES, (32, 128), table) is None
    tried = situation(128, ready=(32, 128), timed=(32, 128))
    found = next_size(tried, SIZES, (32, 128), table)
    assert found is not None and found.size == 512


@given(left_s=st.floats(1e-3, 1e4), noise=st.floats(0.1, 100.0))
def test_exploring_waits_for_no_trial_that_the_tuner_does_not_begin(left_s, noise):
    """It may cost more than the rest of the run would save."""
    perf = PerfParams(
        compute_base=0.1,
        compute_per_sample=1e-3,
        intra_base=math.nan,
        intra_per_replica=math.nan,
        inter_base=math.nan,
        inter_per_replica=math.nan,
        overlap=1.0,
        update_s=0.0,
    )
    fit = PerfFit(
        params=perf, error=0.0, unidentified=(), links=("none",), num_rows=2, max_replicas=1
    )
    grad = GradParams(sqr=1.0, var=noise)
    now = situation(128, ready=(32, 128, 512), timed=(32, 128), grad=grad, left_s=left_s)
    now = dataclasses.replace(now, here=dataclasses.replace(now.here, fit=fit))
    hopes = Hopes.of(now, SIZES, StrategyTimings(num_nodes=1).table(""))
    event(f"due: {hopes.is_trial_due}")
    if hopes.is_trial_due:
        assert choose_batch(now).config.micro_batch_size == 512, choose_batch(now).reason
    if left_s < 0.1:
        assert not hopes.is_trial_due


@given(
    delay=st.sampled_from([0.1, FEW_CORES_DELAY, 0.9]),
    ratio=st.floats(math.log(1e-3), math.log(1e3)).map(math.exp),
    left_s=st.floats(1.0, 1e5),
    is_known=st.booleans(),
)
def test_training_waits_only_for_what_is_known_to_promise_much_on_few_cores(
    delay, ratio, left_s, is_known
):
    explorer = Explorer(0.1, 0.0, delay=delay)
    table = StrategyTimings(num_nodes=1).table("")
    grad = GradParams(sqr=1.0, var=ratio) if is_known else UNKNOWN
    now = situation(grad=grad, left_s=left_s, step_s=1e-3, fixed_s=math.inf)
    found = explorer.next(now, SIZES, (32,), table, now_s=1.0)
    promises = found is not None and found.hope >= HURRY
    may_wait = is_known and delay >= FEW_CORES_DELAY
    assert explorer.is_hurried is (promises and may_wait)
    assert ("training waits for it" in explorer.outlook) is explorer.is_hurried
    # What is found out while it is compiled counts.
    for grad, waits in ((NOISY, delay >= FEW_CORES_DELAY), (SILENT, False), (UNKNOWN, False)):
        now = situation(grad=grad, left_s=left_s, step_s=1e-3, fixed_s=math.inf)
        assert explorer.next(now, SIZES, (32, 128), table, now_s=1.0) is None or found is None
        if found is not None:
            assert explorer.is_hurried is waits
    explorer.compiled(0.1, table)
    assert not explorer.is_hurried


@given(
    left_s=st.floats(1.0, 1e3),
    compile_s=st.floats(0.01, 100.0),
    delay=st.floats(FEW_CORES_DELAY, 0.9),
    step_s=st.floats(1e-4, 1e-1),
    fixed=st.floats(0.0, 1.0),
)
def test_a_size_for_which_training_cannot_afford_to_wait_is_compiled_beside_it(
    left_s, compile_s, delay, step_s, fixed
):
    table = StrategyTimings(num_nodes=1).table("")
    now = situation(left_s=left_s, step_s=step_s, fixed_s=fixed * step_s)

    def decided(may_hurry):
        explorer = Explorer(compile_s, 0.0, delay=delay)
        return explorer, explorer.next(now, SIZES, (32,), table, now_s=1.0, may_hurry=may_hurry)

    (hurried, found), (_, beside) = decided(True), decided(False)
    event(f"found: {found is not None}, waits: {hurried.is_hurried}")
    assert found == beside
    # Nor is it waited for later, as long as that costs too much.
    more_s = compile_s * (1 - delay)
    hurried.next(now, SIZES, (32, 128), table, now_s=1.0)
    assert not (
        hurried.is_hurried and more_s > MOST_LOANS * LOAN * left_s + EARNINGS * (left_s + 1)
    )


@given(
    left_s=st.floats(10.0, 1e5),
    fixed=st.floats(0.0, 1.0),
    noise=st.floats(1e-3, 1e3),
    measures=st.booleans(),
)
def test_a_size_that_cannot_gain_much_waits_for_the_noise(left_s, fixed, noise, measures):
    table = StrategyTimings(num_nodes=1).table("")
    times = {"left_s": left_s, "step_s": 0.01, "fixed_s": fixed * 0.01}
    grads = UNKNOWN, GradParams(sqr=1.0, var=noise)
    unknown, known = (situation(grad=x, **times) for x in grads)
    promised = next_size(unknown, SIZES, (32,), table)
    assert promised is not None
    explorer, at_once = Explorer(0.1, 0.0), Explorer(0.1, 0.0)
    first = {"now_s": 1.0, "measuring_s": 0.15 if measures else None}
    if measures and promised.hope < HURRY:  # its price is a part
        at_once.account.spend(0.3 * 0.15)
    found = explorer.next(unknown, SIZES, (32,), table, **first)
    allowed = at_once.next(unknown, SIZES, (32,), table, now_s=1.0) is not None
    waits = allowed and measures and promised.hope < HURRY
    event(f"waits: {waits}")
    assert explorer.awaits_noise is waits
    assert (found is not None) is (allowed and not waits)
    assert ("the noise is measured first" in explorer.outlook) is waits
    if waits:  # what measures it is charged, once
        spent_s = explorer.account.spent_s
        assert 0 < spent_s < 0.15
        explorer.next(unknown, SIZES, (32,), table, **first)
        assert explorer.account.spent_s == spent_s
    # Once the noise is known, it alone decides, and what was hoped for can still be paid.
    if waits and (after := next_size(known, SIZES, (32,), table)) is not None:
        is_found = explorer.next(known, SIZES, (32,), table, **first) is not None
        assert is_found or after.hope < promised.hope
    explorer.next(known, SIZES, (32,), table, **first)
    assert not explorer.awaits_noise


@given(
    delay=st.sampled_from([0.1, FEW_CORES_DELAY, 0.9]),
    measuring_s=st.none() | st.floats(1e-3, 1e3),
    is_known=st.booleans(),
    left_s=st.floats(1.0, 1e4),
)
def test_training_waits_for_what_measures_the_noise_if_that_is_a_small_share_of_the_run(
    delay, measuring_s, is_known, left_s
):
    table, explorer = StrategyTimings(num_nodes=1).table(""), Explorer(1e-4, 0.0, delay=delay)
    times = {"left_s": left_s, "step_s": 1e-4, "fixed_s": math.inf}
    about = {"now_s": 1.0, "measuring_s": measuring_s}
    if explorer.next(situation(grad=UNKNOWN, **times), SIZES, (32,), table, **about) is None:
        return
    assert not explorer.hurries_noise, "first it is chosen"
    now = situation(grad=NOISY if is_known else UNKNOWN, **times)
    explorer.next(now, SIZES, (32, 128), table, **about)
    waits = explorer.hurries_noise
    event(f"waits: {waits}")
    if waits:
        assert measuring_s is not None and not is_known and delay >= FEW_CORES_DELAY
        assert not explorer.is_hurried
        # It is a small share of the run.
        assert measuring_s <= (MOST_LOANS * LOAN + EARNINGS) * (left_s + 1.0) / (1 - delay)
    elif measuring_s is not None and not is_known and delay >= FEW_CORES_DELAY:
        assert measuring_s >= 0.01 * left_s or explorer.account.spent_s > 0.02 * left_s
    # Having begun to wait, it goes on to wait, whatever the account says by then.
    if waits:
        explorer.account.spent_s = spent_s = 1e6
        explorer.next(now, SIZES, (32, 128), table, **about)
        assert explorer.hurries_noise and explorer.account.spent_s == spent_s


def test_nothing_is_compiled_without_hope(table):
    assert next_size(situation(grad=SILENT), SIZES, (32,), table) is None
    assert next_size(situation(), SIZES, SIZES, table) is None
    assert next_size(situation(grad=UNKNOWN), SIZES, (32,), table) is not None, "it may be large"


@given(left_s=st.floats(0, 1e4), compile_s=st.floats(0.01, 100))
def test_the_time_left_decides_whether_a_size_is_compiled(left_s, compile_s):
    explorer, table = Explorer(compile_s, began_s=10.0), StrategyTimings(num_nodes=1).table("")
    now = situation(left_s=left_s, step_s=0.1)
    price_s = 0.3 * compile_s + TRIAL_S
    found = explorer.next(now, SIZES, (32,), table, now_s=10.0)
    num_loans = min(left_s * (1 - 4**GROWTH / 4) / (REPAYMENT * price_s), MOST_LOANS)
    pays = num_loans >= 1 and price_s <= LOAN * num_loans * left_s
    near = math.isclose(price_s, LOAN * num_loans * left_s, rel_tol=0.01)
    assert (found is not None) == pays or near
    assert explorer.account.spent_s == (pytest.approx(price_s) if found else 0)
    assert explorer.next(now, SIZES, (32,), table, now_s=11.0) is None or found is None


def test_what_a_compilation_took_corrects_its_price(table):
    explorer, now = Explorer(1.0, began_s=0.0), situation(left_s=1e4, step_s=0.1)
    found = explorer.next(now, SIZES, (32,), table, now_s=5.0)
    assert found is not None and explorer.compiling == found.size == 128
    assert explorer.next(now, SIZES, (32, 128), table, now_s=7.0) is None, "one at a time"
    explorer.compiled(10.0, table)
    assert explorer.account.spent_s == pytest.approx(0.3 * 10.0 + TRIAL_S)
    next_s = PROBE_STEPS * 0.1 * 2**GROWTH  # of the trial of 64
    assert explorer.next(now, SIZES, (32, 128), table, now_s=15.0) is not None
    assert explorer.account.spent_s == pytest.approx(0.3 * 20.0 + TRIAL_S + next_s)
    explorer.compiled(0.0, table)  # refused before it was compiled
    assert explorer.account.spent_s == pytest.approx(0.3 * 10.0 + TRIAL_S)


@given(delay=st.floats(0.1, 0.9), took_s=st.floats(0.1, 100))
def test_the_delay_is_that_of_the_devices_until_a_compilation_was_seen(delay, took_s):
    explorer, now = Explorer(1.0, began_s=0.0, delay=delay), situation(left_s=1e9, step_s=0.1)
    table = StrategyTimings(num_nodes=1).table("")
    assert explorer.next(now, SIZES, (32,), table, now_s=5.0) is not None
    price_s = 1.0 if explorer.is_hurried else delay
    assert explorer.account.spent_s == pytest.approx(price_s + TRIAL_S)
    for step in range(16):
        for busy in (False, True):
            key = key_of(1, now.current, measured=False)
            table.add(key, Parts(0.1 * (1 + busy)), step, busy=busy)
    is_hurried = explorer.is_hurried
    explorer.compiled(took_s, table)  # twice as long beside it: half of its time was lost, or all
    lost_s = took_s if is_hurried else took_s / 2
    assert explorer.account.spent_s == pytest.approx(lost_s + TRIAL_S)


def test_without_times_nothing_is_explored(table):
    explorer = Explorer(1.0, began_s=0.0)
    assert explorer.next(situation(left_s=math.nan), SIZES, (32,), table, now_s=5.0) is None
    assert explorer.account.spent_s == 0 and "nan" not in explorer.outlook


# -- nothing is compiled for nothing -----------------------------------------------------------------


@given(
    fixed_s=st.floats(1e-4, 1.0),
    per_sample_s=st.floats(1e-6, 1e-1),
    noise=st.floats(1e-2, 1e3),
    start=st.sampled_from(SIZES[2:]),
)
def test_every_size_that_is_compiled_is_tried_and_then_the_race_ends(
    fixed_s, per_sample_s, noise, start
):
    """Whatever times and noise are: a compiled size never waits for a trial that does not come."""
    table, timed = StrategyTimings(num_nodes=1).table(""), {start}
    current, compiled = start, [start]
    line = {"compute_base": fixed_s, "compute_per_sample": per_sample_s}
    none = dict.fromkeys(("intra_base", "intra_per_replica"), 0.0)
    none |= dict.fromkeys(("inter_base", "inter_per_replica"), math.nan)
    perf = PerfParams(**line, **none, overlap=1.0, update_s=0.0)
    fit = PerfFit(
        params=perf, error=0.0, unidentified=(), links=("none",), num_rows=2, max_replicas=1
    )
    grad = GradParams(sqr=1.0, var=noise)
    for _ in range(40):
        now = situation(current, ready=tuple(compiled), timed=tuple(sorted(timed)), grad=grad)
        now = dataclasses.replace(now, here=dataclasses.replace(now.here, fit=fit))
        verdict = choose_batch(now)
        if verdict.config.micro_batch_size != current:
            current = verdict.config.micro_batch_size
            timed.add(current)
            continue
        found = next_size(now, SIZES, tuple(compiled), table)
        if found is None:
            break
        compiled.append(found.size)
    else:
        raise AssertionError(f"still exploring after 40 verdicts: {compiled}, {sorted(timed)}")
    assert set(compiled) == timed


@given(step_s=SECONDS, fixed=st.floats(0.1, 10), times=st.floats(1 / 64, 64))
def test_steps_are_assumed_to_grow_at_least_as_much_as_what_is_not_fixed(step_s, fixed, times):
    now = situation(step_s=step_s, fixed_s=fixed * step_s)
    there = np.array([times * now.current.global_batch_size])
    grown, unknown = (float(assumed_growth(x, there)[0]) for x in (now, situation(step_s=step_s)))
    assert unknown == pytest.approx(times**GROWTH if times > 1 else math.sqrt(times))
    if times < 1:
        assert grown == unknown
        return
    assert unknown <= grown <= times + 1e-9
    share = min(max(fixed, LEAST_FIXED), 1)
    assert grown >= share + (1 - share) * times - 1e-9
