"""The noise of a batch is measured once it is kept: steps of its trial, and its last ones, do not count.

And what a compilation is assumed to delay.
"""

import contextlib
import dataclasses
import math
import os
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import WAIT_S, Scripted, sizes_of

from jaxgoodput.clock import SystemClock
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.train import compile_ahead
from jaxgoodput.train.compile_ahead import (
    MEASURING,
    SHORT_STEPS,
    TRIAL_STEPS,
    CompilationStarter,
    StrategyCompiler,
)
from jaxgoodput.train.control import Stopping
from jaxgoodput.train.duties.reading import LOOK_S, BatchReader
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.watcher import Ticket
from jaxgoodput.tune.block_times import SHORT_S
from jaxgoodput.tune.exploring import EARNINGS, Explorer, NextSize
from jaxgoodput.tune.timings import TimingTable
from jaxgoodput.tune.verdict import Situation

CONFIGS = [
    BatchConfig(num_replicas=1, micro_batch_size=4**k, num_micro_batches=1) for k in range(3)
]
STEP_S = dict(zip(CONFIGS, (SHORT_S / 2, SHORT_S * 2, float("nan")), strict=True))


def needed(config):
    return TRIAL_STEPS if STEP_S[config] >= SHORT_S else SHORT_STEPS


def told(runs):
    """Steps of runs of (index of the batch, whether it is tried, steps), one after another."""
    adopted: list[BatchConfig] = []
    strategies: Any = mock.Mock(spec=StrategyCompiler, delay=0.3, least_delay=0.0)
    strategies.adopt = adopted.append
    starter = CompilationStarter(strategies, 1.0, 0.0, explores=False)
    table: Any = mock.Mock(spec=TimingTable)
    table.step_s = lambda num_nodes, config: STEP_S[config]
    for index, is_trial, count in runs:
        ticket: Any = mock.Mock(spec=Ticket, num_together=1, began_s=0.0)
        ticket.config = CONFIGS[index]
        for _ in range(count):
            starter.stepped(ticket, table, is_trial=is_trial)
    return adopted


RUNS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 50)), max_size=12)


@given(RUNS)
def test_a_batch_is_adopted_while_it_is_kept(runs):
    expected: list[BatchConfig] = []
    latest, count = None, 0
    for index, is_trial, steps in runs:
        config = CONFIGS[index]
        for _ in range(steps):
            if is_trial or config != latest:
                latest, count = config, 0
            count += not is_trial
            if count >= needed(config):
                expected.append(config)
    assert told(runs) == expected


@given(*[st.booleans()] * 4, st.sampled_from(["decided", "waited"]))
def test_what_measures_is_not_compiled_before_a_trial_that_is_due(
    is_compiling, is_due, is_known, one_by_one, end
):
    """It would disturb the trial, or be compiled in vain; but it is if no noise can be measured otherwise."""
    strategies: Any = mock.Mock(spec=StrategyCompiler, delay=0.3, least_delay=0.0)
    strategies.compiles_one_by_one = one_by_one
    strategies.measures_near.return_value = is_known
    strategies.compiler.return_value.is_done.return_value = False
    starter = CompilationStarter(strategies, 1.0, 0.0, explores=True)
    explorer, table = starter._explorer, mock.Mock(spec=TimingTable)
    table.step_s = lambda num_nodes, config: STEP_S[config]
    ticket: Any = mock.Mock(spec=Ticket, num_together=1, began_s=0.0)
    ticket.config = CONFIGS[0]
    explorer.compiling, explorer.is_trial_due = (16 if is_compiling else None), is_due
    for _ in range(SHORT_STEPS):
        starter.stepped(ticket, table, is_trial=False)
    waits = (is_compiling or is_due) and is_known and one_by_one
    assert strategies.adopt.called is not waits
    if end == "decided":
        explorer.compiling, explorer.is_trial_due = None, False
    else:  # compiled, and no trial comes
        explorer.compiling, ticket.began_s = None, compile_ahead.TRIAL_WAIT_S + 1
    starter.stepped(ticket, table, is_trial=False)
    assert strategies.adopt.called


@given(
    saves=st.booleans(),
    is_base=st.booleans(),
    has_begun=st.booleans(),
    num_strategies=st.integers(1, 2),
    has_other=st.booleans(),
    passed_s=st.floats(0, 1e3),
    compile_s=st.floats(0.1, 10),
)
def test_at_the_base_batch_the_noise_is_measured_once_that_may_change_anything_or_is_earned(
    saves, is_base, has_begun, num_strategies, has_other, passed_s, compile_s
):
    strategies: Any = mock.Mock(spec=StrategyCompiler, delay=0.5, least_delay=0.0)
    strategies.compiles_one_by_one = True
    strategies.num_strategies = num_strategies
    strategies.limits.return_value = BatchLimits(base=1 if is_base else 2, max=64)
    strategies.ready.return_value = (1, 4) if has_other else (1,)
    starter = CompilationStarter(strategies, compile_s, 10.0, explores=True, saves=saves)
    if has_begun:
        starter._explorer.account.spend(1.0)
    table: Any = mock.Mock(spec=TimingTable)
    table.step_s = lambda num_nodes, config: STEP_S[config]
    ticket: Any = mock.Mock(spec=Ticket, num_together=1, began_s=0.0)
    ticket.config, ticket.began_s = CONFIGS[0], 10.0 + passed_s
    for _ in range(SHORT_STEPS):
        starter.stepped(ticket, table, is_trial=False)
    is_earned = EARNINGS * passed_s >= MEASURING * compile_s * 0.5
    may_change = has_begun or has_other
    waits = saves and num_strategies == 1 and is_base and not may_change and not is_earned
    assert strategies.adopt.called is not waits


@pytest.mark.parametrize("late", [1, 4, TRIAL_STEPS - 1])
def test_steps_still_on_their_way_after_a_trial_adopt_nothing(late):
    kept = (0, False, SHORT_STEPS)
    assert set(told([kept, (1, True, 8), (1, False, late), kept])) == {CONFIGS[0]}


def test_a_batch_that_a_trial_has_interrupted_measures_in_the_end():
    """It was adopted, but nothing was compiled yet when another batch was tried."""
    engine = Scripted()
    engine.may_go.clear()
    sizes = sizes_of(engine)
    sizes.near(4)
    sizes.compile_next(64)
    assert engine.entered.wait(WAIT_S)  # the thread is compiling
    strategies: Any = mock.Mock(spec=StrategyCompiler, delay=0.3, least_delay=0.0)
    strategies.adopt = lambda config: sizes.adopt(config.micro_batch_size)
    starter = CompilationStarter(strategies, 1.0, 0.0, explores=False)
    table: Any = mock.Mock(spec=TimingTable)
    table.step_s = lambda num_nodes, config: SHORT_S * 2
    for size, is_trial in ((16, False), (64, True), (16, False)):
        sizes.near(size)
        ticket: Any = mock.Mock(spec=Ticket, num_together=1, began_s=0.0)
        ticket.config = dataclasses.replace(CONFIGS[0], micro_batch_size=size)
        for _ in range(TRIAL_STEPS):
            starter.stepped(ticket, table, is_trial=is_trial)
    engine.may_go.set()
    assert sizes.wait(WAIT_S) and sizes.can_measure(16)
    sizes.close()


class Devices(StrategyCompiler):
    """What compiling delays on some devices."""

    def __init__(self, *, are_cpus, state_bytes=0):
        self.are_cpus, self.state_bytes = are_cpus, state_bytes

    @property
    def _is_on_cpu(self):
        return self.are_cpus

    @property
    def _state_bytes(self):
        return self.state_bytes


@given(st.integers(1, 256))
def test_a_compilation_delays_a_cpu_by_its_cores(cores):
    cpu = Devices(are_cpus=True)
    with mock.patch.object(compile_ahead, "num_cores", lambda: cores):
        delay, least = cpu.delay, cpu.least_delay
    assert least <= delay <= 0.9 and delay <= max(2 / cores, least)
    assert 0 < cpu.fixed_s < 0.01


@given(st.integers(0, 10**11), st.integers(0, 10**11))
def test_updating_a_large_state_takes_time_with_any_batch(few, more):
    fixed_s = [Devices(are_cpus=True, state_bytes=few + x).fixed_s for x in (0, more)]
    extra_s = fixed_s[1] - fixed_s[0]
    # Each byte goes through memory a few times, at 100 GB a second at most.
    assert more / 1e11 - 1e-6 <= extra_s <= more / 1e9 + 1e-6


def test_of_an_accelerator_nothing_of_the_kind_is_assumed():
    other = Devices(are_cpus=False)
    assert other.least_delay == 0 and math.isinf(other.fixed_s)
    assert 1 <= compile_ahead.num_cores() <= (os.cpu_count() or 1)


def test_training_waits_for_what_is_hurried_until_it_is_compiled_or_a_stop_is_due():
    engine = Scripted()
    sizes = sizes_of(engine)
    sizes.near(4)
    strategies: Any = mock.Mock(spec=StrategyCompiler, _hurried=None, _waited_s={})
    strategies._current = CONFIGS[0]
    strategies.compiler.return_value = sizes
    strategies.hurry = partial(StrategyCompiler.hurry, strategies)
    strategies.wait_if_hurried = partial(StrategyCompiler.wait_if_hurried, strategies)
    start: Any = mock.Mock(spec=PreparedRun, strategies=strategies, now=mock.Mock())
    paused: list[bool] = []

    @contextlib.contextmanager
    def pausing():
        paused.append(True)
        yield

    start.now.paused = pausing
    reader: Any = mock.Mock(spec=BatchReader, start=start, ledger=TimeLedger(SystemClock()))
    give_way, looks = partial(BatchReader._give_way, reader), []
    engine.may_go.clear()
    sizes.compile_next(16)
    give_way(lambda: looks.append(0))  # not hurried
    strategies.hurry(64)
    give_way(lambda: looks.append(0))  # not to be compiled
    strategies.hurry(16)

    def stop():
        raise Stopping

    with pytest.raises(Stopping):
        give_way(stop)
    assert not looks and sizes.is_busy

    def look():
        looks.append(0)
        if len(looks) == 3:
            engine.may_go.set()

    give_way(look)
    assert len(looks) >= 3 and 16 in sizes.ready() and paused
    assert reader.ledger.snapshot()["compilation"] >= 2 * LOOK_S
    engine.may_go.clear()
    strategies.hurry(4, measuring=True)  # it can measure the noise already
    give_way(lambda: looks.append(0))
    sizes.near(16)
    strategies.hurry(16, measuring=True)  # is only tried
    give_way(lambda: looks.append(0))
    sizes.adopt(16)
    del looks[:]
    give_way(look)
    assert len(looks) >= 3 and sizes.can_measure(16)
    # What takes much longer than expected is not waited for any more.
    engine.may_go.clear()
    sizes.compile_next(64)
    del looks[:]
    strategies.hurry(64, most_s=2 * LOOK_S)
    give_way(lambda: looks.append(0))
    assert len(looks) == 2 and sizes.is_busy
    strategies.hurry(None)
    strategies.hurry(64, most_s=2 * LOOK_S)  # nor later
    give_way(lambda: looks.append(0))
    assert len(looks) == 2
    engine.may_go.set()
    sizes.close()


@given(*[st.booleans()] * 4)
def test_training_waits_for_no_size_but_the_one_that_is_being_compiled(
    alone, is_near, wants, is_done
):
    """Never beside other processes, nor while what measures the noise is compiled before it."""
    strategies: Any = mock.Mock(spec=StrategyCompiler, delay=0.9, least_delay=0.1)
    strategies.compiles_one_by_one, strategies.num_strategies = alone, 1
    strategies.measures_near.return_value = is_near
    strategies.num_plain.return_value = 1.0
    strategies.may_measure.return_value = True
    strategies.sizes.return_value, strategies.settled.return_value = (4, 16), (4,)
    starter = CompilationStarter(strategies, 1.0, 0.0, explores=True)
    explorer: Any = mock.Mock(spec=Explorer, compiling=16, awaits_noise=False, hurries_noise=False)
    explorer.compile_s = 1.0
    starter._explorer = explorer

    def next_size(*_, may_hurry, **__):
        explorer.is_hurried = may_hurry and wants
        return NextSize(size=16, hope=3.0)

    explorer.next = next_size
    table: Any = mock.Mock(spec=TimingTable)
    now: Any = mock.Mock(spec=Situation, step=1, current=CONFIGS[0])
    starter.consider(now, table, strategy="", now_s=1.0, of_all=False)
    waits = alone and is_near and wants
    strategies.hurry.assert_called_once()
    assert strategies.hurry.call_args.args == (16 if waits else None,)
    strategies.compiler.return_value.is_done.return_value = is_done
    ticket: Any = mock.Mock(spec=Ticket, num_together=1, began_s=0.0, config=CONFIGS[0])
    explorer.is_trial_due = False
    starter.stepped(ticket, table, is_trial=True)
    assert (strategies.hurry.call_args == mock.call(None)) is (is_done or not waits)


@given(*[st.booleans()] * 6)
def test_the_noise_is_awaited_and_hurried_only_where_it_will_be_measured(
    alone, is_near, may, several, awaits, hurries
):
    strategies: Any = mock.Mock(spec=StrategyCompiler, delay=0.9, least_delay=0.1)
    strategies.compiles_one_by_one, strategies.num_strategies = alone, 1
    strategies.measures_near.return_value, strategies.may_measure.return_value = is_near, may
    strategies.num_plain.return_value = 1.0
    strategies.sizes.return_value, strategies.settled.return_value = (4, 16), (4,)
    strategies.ready.return_value = (4,)
    strategies.limits.return_value = BatchLimits(base=4, max=64)
    starter = CompilationStarter(strategies, 1.0, 0.0, explores=True, saves=True)
    explorer: Any = mock.Mock(spec=Explorer, compiling=None, is_hurried=False, has_begun=False)
    explorer.is_trial_due, explorer.compile_s = False, 1.0
    explorer.passed_s.return_value = 0.0
    starter._explorer, given_s = explorer, []

    def next_size(*_, measuring_s, **__):
        given_s.append(measuring_s)
        explorer.awaits_noise = awaits and measuring_s is not None
        explorer.hurries_noise = hurries and measuring_s is not None

    explorer.next = next_size
    config = BatchConfig(
        micro_batch_size=4, num_micro_batches=2 if several else 1, num_replicas=1, strategy=""
    )
    now: Any = mock.Mock(spec=Situation, step=1, current=config)
    table: Any = mock.Mock(spec=TimingTable)
    starter.consider(now, table, strategy="", now_s=0.0, of_all=False)
    if not alone:
        assert given_s == [None]
    elif several or (is_near and may):
        assert given_s == [0.0], "it is measured already, or with what is compiled"
    else:
        assert given_s == [1.5 if may else None]
    assert strategies.adopt.called is (explorer.awaits_noise and not several)
    strategies.hurry.assert_called_once()
    measuring = strategies.hurry.call_args.kwargs.get("measuring", False)
    assert measuring is explorer.hurries_noise
    if measuring:
        assert strategies.hurry.call_args.args == (4,)
    # The noise of the base batch, which changes nothing yet, is measured once it is awaited.
    ticket: Any = mock.Mock(spec=Ticket, num_together=100, began_s=0.0, config=config)
    strategies.adopt.reset_mock()
    starter.stepped(ticket, table, is_trial=False)
    starter.stepped(ticket, table, is_trial=False)
    has_price = alone and not several and not explorer.awaits_noise
    assert strategies.adopt.called is not has_price


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_explored_is_looked_up_under_its_own_strategy(alone):
    strategies: Any = mock.Mock(spec=StrategyCompiler, delay=0.9, least_delay=0.1)
    strategies.compiles_one_by_one, strategies.num_strategies = alone, 1
    strategies.measures_near.return_value = True
    strategies.num_plain.return_value = 1.0
    strategies.sizes.return_value, strategies.settled.return_value = (4, 16), (4,)
    starter = CompilationStarter(strategies, 1.0, 0.0, explores=True)
    explorer: Any = mock.Mock(
        spec=Explorer, compiling=None, awaits_noise=False, hurries_noise=False
    )
    explorer.is_hurried, explorer.is_trial_due, explorer.compile_s = False, False, 1.0

    def next_size(*_, **__):
        explorer.compiling = 16
        return NextSize(size=16, hope=3.0)

    explorer.next, starter._explorer = next_size, explorer
    config = dataclasses.replace(CONFIGS[0], strategy="fsdp=2")
    now: Any = mock.Mock(spec=Situation, step=1, current=config)
    table: Any = mock.Mock(spec=TimingTable)
    starter.consider(now, table, strategy="fsdp=2", now_s=1.0, of_all=False)
    strategies.compiler.reset_mock()
    ticket: Any = mock.Mock(spec=Ticket, num_together=1, began_s=0.0, config=config)
    starter.stepped(ticket, table, is_trial=True)
    assert strategies.compiler.call_args_list[0] == mock.call("fsdp=2")
