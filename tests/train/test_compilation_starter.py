"""The noise of a batch is measured once it is kept: steps of its trial, and its last ones, do not count."""

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.train.compile_ahead import KEPT, KEPT_SHORT, CompilationStarter, StrategyCompiler
from jaxgoodput.train.watcher import Ticket
from jaxgoodput.tune.timings import SHORT_S, TimingTable

CONFIGS = [
    BatchConfig(num_replicas=1, micro_batch_size=4**k, num_micro_batches=1) for k in range(3)
]
STEP_S = dict(zip(CONFIGS, (SHORT_S / 2, SHORT_S * 2, float("nan")), strict=True))


def needed(config):
    return KEPT if STEP_S[config] >= SHORT_S else KEPT_SHORT


def told(runs):
    """Steps of runs of (index of the batch, whether it is tried, steps), one after another."""
    adopted: list[BatchConfig] = []
    strategies: Any = mock.Mock(spec=StrategyCompiler)
    strategies.adopt = adopted.append
    starter = CompilationStarter(strategies, 1.0, 0.0, explores=False)
    table: Any = mock.Mock(spec=TimingTable)
    table.step_s = lambda num_nodes, config: STEP_S[config]
    for index, is_trial, count in runs:
        ticket: Any = mock.Mock(spec=Ticket)
        ticket.config = CONFIGS[index]
        for _ in range(count):
            starter.stepped(ticket, table, is_trial=is_trial)
    return adopted


RUNS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 50)), max_size=12)


@given(RUNS)
def test_a_batch_is_adopted_once_it_is_kept_for_some_steps(runs):
    expected: list[BatchConfig] = []
    latest, count = None, 0
    for index, is_trial, steps in runs:
        config = CONFIGS[index]
        for _ in range(steps):
            if is_trial or config != latest:
                latest, count = config, 0
            count += not is_trial
            if count >= needed(config) and (not expected or expected[-1] != config):
                expected.append(config)
    assert told(runs) == expected


@pytest.mark.parametrize("late", [1, 2, 4])
def test_steps_still_on_their_way_after_a_trial_adopt_nothing(late):
    kept = (0, False, KEPT_SHORT)
    assert told([kept, (1, True, 8), (1, False, late), kept]) == [CONFIGS[0]]
