"""Steps that are dispatched at once are the steps that they would be one by one, in all that anyone sees."""

import math
import types
from collections import Counter
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import Counting, Evaluated, InStep, Mean, Recorder, config, counting_config, rows

from jaxgoodput.engine.blocks import BlockRunner
from jaxgoodput.engine.programs import blocks as programs
from jaxgoodput.engine.programs.blocks import BlockPrograms
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.events import Checkpoint, EvalEnd, StepEnd
from jaxgoodput.train.compile_sizes import SizeCompiler
from jaxgoodput.train.control import Preempted
from jaxgoodput.train.duties import blocks
from jaxgoodput.train.runs.alone import Alone
from jaxgoodput.train.start import looping
from jaxgoodput.tune.block_times import ENOUGH_IN_BLOCKS, KEEP, BlockTimes

ONE: dict[str, Any] = {"devices": jax.devices()[:1]}
MAY_ROUND: Any = looping.may_round
MODES = ("in a loop", "in parts", "as a whole")
COMPARE = blocks.Blocks._compare
KNOWS_ALONE = BlockTimes.knows_alone


@pytest.fixture(params=MODES)
def sizes(monkeypatch, request):
    """Blocks of four steps as soon as they may be; lists the number of steps of each block dispatched.

    Single steps run in a loop, too, or blocks in parts or only as a whole, as on an accelerator.
    """
    found = []
    steps = BlockRunner.run

    def compile_now(self, programs):
        with jax.transfer_guard("allow"):
            for program in programs:
                self._engine.compile_program(program)

    def counted(self, *args, first=0, count):
        if count > 1:
            found.append(count)
        return steps(self, *args, first=first, count=count)

    monkeypatch.setattr(programs, "SPLIT_BLOCK", 4)
    monkeypatch.setattr(programs, "WHOLE_BLOCK", 4)
    if request.param == "as a whole":
        monkeypatch.setattr(BlockPrograms, "can_split", False)
    if request.param != "in a loop":
        monkeypatch.setattr(looping, "_may_have_blocks", lambda setup: False)
    monkeypatch.setattr(blocks, "LOOK_EVERY", 1)
    monkeypatch.setattr(blocks, "SETTLED", 0)
    monkeypatch.setattr(blocks, "SHORT_S", math.inf)  # else long steps, of a busy machine, go alone
    monkeypatch.setattr(BlockTimes, "knows_alone", lambda self, config, *, busy: True)
    monkeypatch.setattr(blocks.Blocks, "_pay", lambda self, batch: True)
    # These models give the same bits in blocks: what they compute with is exact, or a sum of few numbers.
    monkeypatch.setattr(blocks, "may_round", lambda config: True)
    monkeypatch.setattr(looping, "may_round", lambda config: True)
    monkeypatch.setattr(blocks.Blocks, "_compare", lambda self, batch: None)  # tiny steps: chance
    monkeypatch.setattr(SizeCompiler, "compile_soon", compile_now)
    monkeypatch.setattr(BlockRunner, "run", counted)
    return found


def compare_times(monkeypatch):
    """Have blocks compared with steps alone after all, once some are timed."""
    monkeypatch.setattr(blocks.Blocks, "_compare", COMPARE)
    monkeypatch.setattr(BlockTimes, "knows_alone", KNOWS_ALONE)
    is_timed = lambda self, batch: self.analyst.step_s(batch) > 0  # noqa: E731
    monkeypatch.setattr(blocks.Blocks, "_pay", is_timed)


def seen(make, kind=Evaluated, **options):
    """What a run tells of each step, its evaluations and checkpoints, and its last parameters."""
    recorder = Recorder()
    state = kind(make(), hooks=[recorder], **ONE, **options).fit()
    steps = [
        (
            e.step,
            e.progress,
            e.samples,
            e.num_samples,
            e.before,
            e.after,
            e.finite,
            sorted(e.metrics.items()),
        )
        for e in recorder.events
        if isinstance(e, StepEnd)
    ]
    others = [(type(e), e.step) for e in recorder.events if isinstance(e, EvalEnd | Checkpoint)]
    return steps, others, jax.device_get(state.params)


def compare(folders, sizes, make, **options):
    """A run with blocks tells the same as one without."""
    found = seen(lambda: make(next(folders)), **options)
    num_blocks = len(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Alone, "runs_blocks", property(lambda self: False))
        expected = seen(lambda: make(next(folders)), **options)
    assert len(sizes) == num_blocks
    np.testing.assert_equal(found, expected)
    return num_blocks


@pytest.fixture
def folders(tmp_path):
    return (tmp_path / str(i) for i in range(1000))


# How often the noise is measured, the run is evaluated and saved; samples; the length, else six epochs.
CASES = (
    (50, 11.0, 7.0, 100, None),
    (50, 5.0, None, 17, 5.0),
    (50, None, None, 96, None),
    (6, 15.0, None, 96, None),
    (6, None, 7.0, 100, 21.0),
    (50, 1.0, None, 96, None),
    (3, None, None, 96, None),
)
# Each mode has two cases in every run: what differs between modes is how a block is run.
OFTEN = [(mode, *case) for at, mode in enumerate(MODES) for case in (CASES[at], CASES[-1 - at])]
RARELY = [(mode, *case) for mode in MODES for case in CASES if (mode, *case) not in OFTEN]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, measure, evaluate, save, num_samples, base_steps",
    [*OFTEN, *(pytest.param(*one, marks=pytest.mark.nightly) for one in RARELY)],
    indirect=["sizes"],
)
def test_a_run_with_blocks_is_one_without(
    folders, sizes, measure, evaluate, save, num_samples, base_steps
):
    length = {"epochs": 6} if base_steps is None else {"base_steps": base_steps}

    def make(folder):
        return config(
            folder,
            **length,
            statistics__every_steps=measure,
            evaluation__every_base_steps=evaluate,
            saving__every_base_steps=save,
        )

    num_blocks = compare(folders, sizes, make, data=rows(num_samples))
    splits = bool(BlockPrograms.can_split)  # else there must be four steps between two that measure
    is_possible = measure > 4 and num_samples > 17
    assert bool(num_blocks) == (evaluate != 1.0 and (is_possible or splits))


@pytest.mark.slow
def test_a_refused_update_is_refused_alone(folders, sizes):
    data = rows(96 * 4)
    data["x"][[70, 71, 200]] = np.nan

    def make(folder):
        return config(folder, epochs=2, statistics__every_steps=50)

    assert compare(folders, sizes, make, kind=Mean, data=data) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop_at", [6, 9, *(pytest.param(at, marks=pytest.mark.nightly) for at in (12, 15))]
)
def test_after_a_stop_each_sample_is_applied_once(tmp_path, sizes, stop_at):
    """Wherever it comes, in a block or between two."""
    settings = counting_config(tmp_path, epochs=6, statistics__every_steps=50)
    hook = Recorder()
    trainer = Counting(settings, hooks=[hook], loop=InStep, **ONE)
    hook._then = lambda e: trainer.request_stop() if e.step == stop_at else None
    with pytest.raises(Preempted):
        trainer.fit()
    state = Counting(settings, **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 6)
    assert sizes


@pytest.mark.slow
def test_the_batch_may_change_in_the_middle_of_a_block(tmp_path, sizes):
    """Samples of a block that was read and not used are read again."""
    settings = counting_config(
        tmp_path,
        epochs=10,
        statistics__every_steps=6,
        policy={0: 16, 0.5: 32, 0.8: 16},
        batch=BatchLimits(base=16, max=32),
    )
    recorder = Recorder()
    state = Counting(settings, hooks=[recorder], **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 10)
    used = {e.num_samples for e in recorder.events if isinstance(e, StepEnd)}
    assert used == {16, 32} and len(sizes) > 1  # how many depends on when they are compiled


LATER = pytest.mark.parametrize("sizes", MODES[1:], indirect=True)


def blocks_seem_slow(monkeypatch, num_slow):
    """Have steps of the first `num_slow` blocks recorded as slower than any alone, later ones as faster."""
    add, num_blocks = BlockTimes.add, Counter[str]()

    def recorded(self, config, step_s, *, num_together=1, busy):
        if num_together > 1:
            num_blocks["seen"] += 1
            step_s = 1e3 if num_blocks["seen"] <= num_slow else 1e-9
        add(self, config, step_s, num_together=num_together, busy=busy)

    monkeypatch.setattr(BlockTimes, "add", recorded)
    compare_times(monkeypatch)


@pytest.mark.slow
@LATER  # else there is nothing to compare with
def test_blocks_that_take_longer_than_single_steps_are_given_up(tmp_path, sizes, monkeypatch):
    """As a loop of convolutions may on a CPU."""
    blocks_seem_slow(monkeypatch, num_slow=math.inf)
    settings = counting_config(tmp_path, epochs=60, statistics__every_steps=1000)
    state = Counting(settings, **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 60)
    assert 0 < len(sizes) < 40  # of 90


BATCH = BatchConfig(num_replicas=1, micro_batch_size=16, num_micro_batches=1)


@pytest.mark.slow
@given(
    slow=st.lists(st.booleans(), min_size=1, max_size=9),
    step=st.integers(0, 10**6),
    compile_cost=st.sampled_from([0.5, 1.0, 1.5, 4.0]),
)
def test_blocks_pause_if_they_are_slower_twice_and_ever_longer(slow, step, compile_cost):
    """However often they were faster in between.

    Blocks of other sizes are compiled along with these only if they are not dearer than a size.
    """
    times = BlockTimes()
    own = types.SimpleNamespace(compile_cost=compile_cost)
    now = types.SimpleNamespace(step=step, engine=types.SimpleNamespace(blocks=own))
    compile_along = mock.Mock()
    compiler: Any = mock.Mock(spec=SizeCompiler)
    strategies = types.SimpleNamespace(compiler=lambda strategy: compiler)
    judged: Any = types.SimpleNamespace(
        analyst=types.SimpleNamespace(blocks=times),
        start=types.SimpleNamespace(now=now, strategies=strategies),
        _pause=Counter(),
        _slower={},
        _suspected=set(),
        _compile_along=compile_along,
    )
    num_pauses, in_a_row, expected = 0, 0, {}
    for i, is_slow in enumerate(slow):
        for in_block, step_s in ((False, 1e-3), (True, 2e-3 if is_slow else 5e-4)):
            for _ in range(2 * KEEP):
                times.add(BATCH, step_s, num_together=8 if in_block else 1, busy=False)
        now.step = step + i
        COMPARE(judged, BATCH)
        in_a_row = in_a_row + 1 if is_slow else 0
        if in_a_row == 2:
            in_a_row, num_pauses = 0, num_pauses + 1
            expected = {BATCH: now.step + blocks.FIRST_PAUSE * 10 ** (num_pauses - 1)}
            assert compiler.compile_along.call_count == num_pauses, "nor have other sizes blocks"
        assert judged._slower == expected
        num_faster = slow[: i + 1].count(False)
        assert compile_along.call_count == (num_faster if compile_cost <= 1 else 0)
        assert math.isnan(times.compare(BATCH)) is is_slow, "they are to be compared afresh"


@pytest.mark.slow
@LATER
def test_blocks_that_seemed_slower_are_tried_again(tmp_path, sizes, monkeypatch):
    """The machine was busy with something else, until they had been given up."""
    slowly = 2 * ENOUGH_IN_BLOCKS // 4  # blocks, as many as two comparisons take
    blocks_seem_slow(monkeypatch, num_slow=slowly)
    monkeypatch.setattr(blocks, "FIRST_PAUSE", 100)
    settings = counting_config(tmp_path, epochs=100, statistics__every_steps=1000)
    state = Counting(settings, **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 100)
    assert len(sizes) > slowly + 8  # some were still on their way when they were given up


@pytest.mark.slow
def test_steps_are_free_while_what_measures_is_being_compiled(tmp_path, sizes, monkeypatch):
    """None of them can measure, though every one should."""
    monkeypatch.setattr(SizeCompiler, "can_measure", lambda self, size: False)
    settings = counting_config(tmp_path, epochs=10, statistics__every_steps=1)
    state = Counting(settings, **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 10)
    assert len(sizes) > 3


@pytest.mark.slow
def test_a_run_without_measured_decisions_has_no_blocks(tmp_path, sizes, monkeypatch):
    """Its bits, and those of a resumed run, must not depend on when a program is compiled."""
    monkeypatch.setattr(blocks, "may_round", MAY_ROUND)
    monkeypatch.setattr(looping, "may_round", MAY_ROUND)
    settings = counting_config(tmp_path, epochs=20, statistics__every_steps=50)
    Counting(settings, **ONE).fit()
    assert not sizes
    assert MAY_ROUND(counting_config(tmp_path, statistics__every_steps=None))


@pytest.mark.slow
def test_blocks_run_beside_a_tuner_that_may_change_the_batch(tmp_path, sizes):
    """As with a fixed batch, each sample is applied once."""
    settings = counting_config(
        tmp_path,
        epochs=12,
        statistics__every_steps=50,
        policy="goodput",
        batch=BatchLimits(base=16, max=64, micro=(1, 64)),
    )
    state = Counting(settings, **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 12)
    assert len(sizes) > 3
