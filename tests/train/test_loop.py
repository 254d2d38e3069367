"""The loop's thread dispatches and never waits for a step in flight, compiles, or moves data unasked."""

import dataclasses
import functools
import threading
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import NUM_SAMPLES, InStep, Mean, Recorder, config, rows

import jaxgoodput as jg
from jaxgoodput.engine.programs.program import SampleShape
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import StepEnd, TuneEnd, Window
from jaxgoodput.train.control import DEPTH
from jaxgoodput.train.loop import Loop
from jaxgoodput.tune.tuner import TunerAnswer, TunerThread

LIMIT_S = 60.0  # after which something hangs


def devices(count):
    return jax.devices()[:count]


class Submitting(Loop):
    """Shows every ticket to `look` before the watcher has it."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        submit = self.watcher.submit

        def look_and_submit(*tickets):
            for ticket in tickets:
                self.look(ticket)
            submit(*tickets)

        self.watcher.submit = look_and_submit

    def look(self, ticket):
        raise NotImplementedError


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_a_step_is_dispatched_while_the_one_before_runs_and_no_further(tmp_path, count):
    """The results of three steps are held back until the step behind each was dispatched."""
    lock = threading.Condition()
    submitted, published = [], []
    held = {4, 5, 9}
    impatient = []

    class Held(Submitting):
        def look(self, ticket):
            with lock:
                # Never more than DEPTH steps whose results nobody has seen.
                if ticket.step > DEPTH and ticket.step - DEPTH not in published:
                    impatient.append(ticket.step)
                submitted.append(ticket.step)
                lock.notify_all()

        def _on_result(self, result):
            step = result.ticket.step
            with lock:
                if step in held:
                    assert lock.wait_for(lambda: step + 1 in submitted, LIMIT_S)
                    assert step + DEPTH not in submitted
                published.append(step)
            super()._on_result(result)

    Mean(config(tmp_path), devices=devices(count), loop=Held).fit()
    assert submitted == published == list(range(1, 13))
    assert not impatient


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_the_mask_that_full_micro_batches_share_is_neither_given_away_nor_changed(tmp_path, count):
    masks = []

    class Kept(Loop):
        def _dispatch(self, batch):
            masks.extend(micro.mask for micro in batch.micro_batches)
            super()._dispatch(batch)

    limits = BatchLimits(base=32, max=32, micro=(1, 32 // count // 2), max_micro_batches=2)
    settings = config(tmp_path, batch=limits, base_steps=4.0, tuning__accumulate=True)
    Mean(settings, devices=devices(count), loop=Kept).fit()
    assert len(masks) >= 8 and all(mask is masks[0] for mask in masks)
    assert np.asarray(masks[0]).tolist() == [1] * 16


class Heavy(Mean):
    """A step takes a while, so that it is still running when the next one is dispatched."""

    def loss(self, params, batch, key):
        losses = super().loss(params, batch, key)
        matrix = jnp.full((64, 64), jax.lax.stop_gradient(losses[0]) * 1e-3)
        busy = jax.lax.fori_loop(0, 2000, lambda _, m: jnp.tanh(m @ m), matrix)
        return losses + 0 * jax.lax.stop_gradient(busy[0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_dispatching_does_not_wait_for_the_device(tmp_path, count):
    running, latest = [], []

    class Noted(Submitting):
        def look(self, ticket):
            running.append([m.is_ready() for m in (*latest[-1:], ticket.metrics)])
            latest.append(ticket.metrics)

    Heavy(config(tmp_path), devices=devices(count), loop=Noted).fit()
    both = [pair for pair in running if pair == [False, False]]
    # One runs, one waits behind it. A busy machine may let the loop sleep through a step or two.
    assert len(both) >= len(running) // 2


@pytest.fixture
def pulls(monkeypatch):
    """(thread, what) of everything that waits for a device value."""
    seen = []
    kind: Any = type(jnp.zeros(()))
    value = kind._value

    def noted(name, function, only=object):
        def call(*arguments, **options):
            if isinstance(arguments[0], only):
                seen.append((threading.get_ident(), name))
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(kind, "_value", property(noted("value", value.fget)))
    monkeypatch.setattr(
        kind, "block_until_ready", noted("block_until_ready", kind.block_until_ready)
    )
    monkeypatch.setattr(jax, "block_until_ready", noted("block", jax.block_until_ready))
    monkeypatch.setattr(jax, "device_get", noted("device_get", jax.device_get))
    for name in ("asarray", "array"):  # through the buffer protocol, which has no method to replace
        monkeypatch.setattr(np, name, noted(name, getattr(np, name), jax.Array))
    return seen


def test_the_instrument_sees_every_way_to_wait(pulls):
    x = jnp.arange(3.0) + 1
    for wait in (
        lambda: float(x[0]),
        lambda: np.asarray(x + 1),
        lambda: np.array(x + 1),
        lambda: x.tolist(),
        lambda: jax.device_get(x + 2),
        lambda: (x + 3).block_until_ready(),
        lambda: jax.block_until_ready(x + 4),
        lambda: bool(x[0] > 0),
    ):
        before = len(pulls)
        wait()
        assert len(pulls) > before


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("statistics_every", [1, 3])
def test_the_loop_never_asks_for_a_value(tmp_path, pulls, count, statistics_every):
    marks = []

    class Marked(Loop):
        def _dispatch(self, batch):
            super()._dispatch(batch)
            marks.append(len(pulls))

    settings = config(tmp_path, epochs=6, statistics__every_steps=statistics_every)
    Mean(settings, devices=devices(count), loop=Marked).fit()
    steady = pulls[marks[0] : marks[-1]]
    own = [what for thread, what in steady if thread == threading.get_ident()]
    assert len(marks) == 36 and not own
    # The watcher, for one, did.
    assert steady


@pytest.mark.slow
def test_the_loop_refuses_transfers_that_nobody_asked_for(tmp_path):
    class Careless(Loop):
        def _next_batch(self):
            batch = super()._next_batch()
            if self.now.step == 3:
                batch.micro_batches[0].mask + np.ones(16, np.float32)
            return batch

    with pytest.raises(Exception, match="[Dd]isallowed host-to-device transfer"):
        Mean(config(tmp_path), devices=devices(1), loop=Careless).fit()


SIZES = (2, 4, 8)
LIMITS = BatchLimits(base=16, max=64, micro=(2, 8), sizes=SIZES)


def switching(tmp_path, sizes, **settings):
    """A run that is told to use these sizes in turn, four steps each; also how much it compiled."""
    found = {}
    wanted = iter(sizes)

    class Counted(InStep):
        def run(self):
            found["start"] = self.compilations.num
            if self.config.execution.background_compile:
                strategies = self.start.strategies
                strategies.start()
                assert strategies.compiler(self.now.batch.strategy).wait(LIMIT_S)
            try:
                return super().run()
            finally:
                found["loop"] = self.compilations.num - found["start"]

    def ask(event):
        if event.step % 4 == 0:
            size = next(wanted, None)
            if size is None:
                trainer.finish()
            else:
                trainer.request_batch(size)

    seen = Recorder(ask)
    usual = {
        "policy": "goodput",
        "batch": LIMITS,
        "base_steps": 1e6,
        "tuning__warm_up_steps": 10**9,
    }
    usual |= {"execution__compilation_cache": None, "saving__at_end": False}
    whole = config(tmp_path, **{**usual, **settings})
    trainer = Mean(whole, hooks=[seen], devices=devices(8), loop=Counted)
    trainer.fit()
    return seen, found


@pytest.mark.slow
def test_the_watcher_lets_go_of_what_steps_have_used(tmp_path):
    """The loop would wait for Python's lock at each array. Nothing is kept when the run is over."""
    dropped, has_let_go = [], threading.Semaphore(0)

    class Noting(Loop):
        def _settled(self):
            has_let_go.release()  # of all batches so far: none is left in the loop's frames
            return super()._settled()

        def _dispatch(self, batch):
            for leaf in jax.tree.leaves([x.data for x in batch.micro_batches]):
                weakref.finalize(leaf, lambda: dropped.append(threading.current_thread().name))
            super()._dispatch(batch)

        def _on_result(self, result):
            assert has_let_go.acquire(timeout=LIMIT_S)
            super()._on_result(result)

    has_let_go.acquire(blocking=False)
    Mean(config(tmp_path), loop=Noting).fit()
    assert dropped == ["jaxgoodput-watcher"] * 12


@pytest.mark.slow
def test_nothing_compiles_on_the_loops_thread_while_sizes_switch(tmp_path):
    seen, found = switching(tmp_path, [4, 8, 2, 8, 4, 2], execution__background_compile=True)
    used = [s.config.micro_batch_size for s in seen.of(StepEnd)]
    assert [size for size, after in zip(used, used[1:], strict=False) if size != after] == [
        2, 4, 8, 2, 8, 4,
    ]  # fmt: skip
    assert found["start"]  # the counter counts
    assert not found["loop"]


@pytest.mark.parametrize("base_steps, compiles", [(1e6, True), (60.0, False)])
def test_other_sizes_are_compiled_where_the_time_left_can_repay_it(tmp_path, base_steps, compiles):
    starts = []

    class Noted(InStep):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.start.strategies.compile_next = lambda size: starts.append(size)

    seen = Recorder(lambda e: trainer.finish() if e.step == 50 else None)
    usual = {"policy": "goodput", "batch": LIMITS, "saving__at_end": False, "tuning__min_gain": 0.0}
    settings = config(tmp_path, base_steps=base_steps, execution__background_compile=True, **usual)
    noise = rows(offset=0.0)
    trainer = Mean(settings, data=noise, hooks=[seen], devices=devices(8), loop=Noted)
    trainer.fit()
    assert set(starts) == ({8} if compiles else set())


@pytest.mark.slow
def test_a_size_that_is_not_ready_would_be_seen(tmp_path):
    """The check above can fail: an unknown size compiles on the loop's thread, and is counted."""
    _, found = switching(tmp_path, [5], execution__background_compile=False)
    assert found["loop"]


def largest(situation):
    """The answer that always wants the largest size that it is told is ready."""
    current = situation.current
    size = max([*situation.here.ready, current.micro_batch_size])
    wanted = dataclasses.replace(current, micro_batch_size=size, num_micro_batches=1)
    verdict = situation.change(wanted, "as large as can be", goodput=1.0)
    return TunerAnswer(situation=situation, verdict=verdict)


class Greedy(Loop):
    """Wants the largest size that is ready; shows every size above 2 to `look` before it is compiled."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named, tuner=functools.partial(TunerThread, answer=largest))
        compile_program, compiled = self.now.engine.compile_program, []

        def look_and_compile(program):
            shapes = [x for x in program.args if isinstance(x, SampleShape)]
            named = (program.func, program.args, program.keywords)
            if named not in compiled and any(shape.micro_batch_size > 2 for shape in shapes):
                self.look()
            compile_program(program)
            compiled.append(named)

        self.now.engine.compile_program = look_and_compile

    def look(self):
        raise NotImplementedError


def growing(tmp_path):
    """Settings under which verdicts come at once and often."""
    return config(
        tmp_path,
        policy="goodput",
        batch=LIMITS,
        base_steps=1e6,
        execution__background_compile=True,
        tuning__warm_up_steps=1,
        tuning__every_steps=1,
    )


@pytest.mark.slow
def test_a_size_is_used_only_once_it_is_ready(tmp_path):
    """Compilation of the larger sizes is held up; verdicts come and go; nobody uses them meanwhile."""
    gate, early, main = threading.Event(), [], threading.get_ident()

    class HeldUp(Greedy):
        def look(self):
            assert threading.get_ident() != main
            assert gate.wait(LIMIT_S)

    def watch(event):
        verdicts = len(seen.of(TuneEnd))
        if not gate.is_set():
            early.append(event.config.micro_batch_size)
            if verdicts >= 5:
                gate.set()
        elif event.config.micro_batch_size == max(SIZES):
            trainer.finish()

    seen = Recorder(watch)
    settings, data = growing(tmp_path), rows(960)
    trainer = Mean(settings, data=data, hooks=[seen], devices=devices(8), loop=HeldUp)
    trainer.fit()
    assert set(early) == {2}
    assert seen.of(StepEnd)[-1].config.micro_batch_size == max(SIZES)


@pytest.mark.slow
def test_a_compilation_that_fails_in_the_background_stops_the_run(tmp_path):
    class Broken(Greedy):
        def look(self):
            raise RuntimeError("the compiler gave up")

    with pytest.raises(RuntimeError, match="the compiler gave up"):
        Mean(growing(tmp_path), devices=devices(8), loop=Broken).fit()


def test_steps_that_wait_for_their_batches_take_as_long_as_reading_them(tmp_path):
    """So that no batch, and no device, is chosen for a speed that the data do not come at."""
    read_s = 0.002  # a sample

    class Slow(jg.Source):
        def __len__(self):
            return NUM_SAMPLES

        def batch(self, indices):
            time.sleep(read_s * len(indices))
            return {"x": rows()["x"][indices]}

    recorder = Recorder()
    settings = config(tmp_path, epochs=None, base_steps=40.0)
    Mean(settings, data=Slow(), hooks=[recorder], devices=devices(1)).fit()
    window = [event for event in recorder.events if isinstance(event, Window)][-1]
    assert window.measured_step_s >= 0.9 * 16 * read_s
    assert window.throughput <= 1.2 / read_s


def test_the_time_left_is_known_where_a_window_is_one_step(tmp_path):
    seen = Recorder()
    settings = config(tmp_path, epochs=2, reporting__window_s=1e-9)
    Mean(settings, hooks=[seen]).fit()
    windows = seen.of(Window)
    assert len(windows) > 3 and all(w.num_steps == 1 for w in windows)
    assert all(w.eta_s > 0 for w in windows[1:-1]) and windows[-1].eta_s == 0


@pytest.mark.slow
def test_a_batch_of_several_micro_batches_is_judged_though_one_would_do(tmp_path):
    """Its programs are compiled for it, and the tuner may stay at it."""

    def ask(event):
        if event.step == 30:
            trainer.request_batch(4, num_micro_batches=4)
        split = [t for t in seen.of(TuneEnd) if t.before.num_micro_batches == 4]
        if split or event.step > 3000:
            trainer.finish()

    seen = Recorder(ask)
    settings = config(
        tmp_path,
        policy="goodput",
        base_steps=1e6,
        batch=BatchLimits(base=16, max=64, micro=(1, 64)),
        execution__background_compile=True,
        tuning__accumulate=True,
        tuning__warm_up_steps=1,
        tuning__dwell_steps=2,
        saving__at_end=False,
    )
    trainer = Mean(settings, hooks=[seen], devices=devices(1), loop=InStep)
    trainer.fit()
    assert any(t.before.num_micro_batches == 4 and t.fit is not None for t in seen.of(TuneEnd))
