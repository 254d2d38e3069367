"""A whole run: it learns, ends where it should, keeps or adapts the batch, and tells its hooks."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from problems import (
    NUM_SAMPLES,
    Counting,
    InStep,
    Mean,
    Recorder,
    config,
    counting_config,
    rows,
)

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.goodput.fit import fit_perf_params
from jaxgoodput.goodput.perf import PerfParams
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.events import (
    Checkpoint,
    FitEnd,
    FitStart,
    Preempt,
    StepEnd,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.hooks import Every
from jaxgoodput.train.config import Saving
from jaxgoodput.train.control import Control, Preempted
from jaxgoodput.train.loop import Loop
from jaxgoodput.tune.batch import tune
from jaxgoodput.tune.tuner import TunerAnswer, TunerThread

LONG = 1e5  # base steps: a run that something else must end


def nightly(*values):
    """A case that a whole run at night has beside those of every run."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def devices(count):
    return jax.devices()[:count]


@pytest.fixture
def told(monkeypatch):
    """What users are warned of."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    return said


@pytest.mark.parametrize(
    "count, background",
    [(1, True), nightly(1, False), nightly(8, True), (8, False)],
)
def test_loss_falls_and_every_step_is_reported_in_order(tmp_path, count, background):
    seen = Recorder()
    limits = BatchLimits(base=16, max=64, micro=(1, 64), sizes=(2, 4, 16, 32))
    settings = config(
        tmp_path, epochs=8, execution__background_compile=background, policy="goodput", batch=limits
    )
    state = Mean(settings, devices=devices(count), hooks=[seen]).fit()

    steps = seen.of(StepEnd)
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    assert steps[-1].metrics["loss"] < 0.5 * steps[0].metrics["loss"]
    assert np.linalg.norm(state.params["w"] - rows()["x"].mean(0)) < 1.0
    assert int(state.step) == len(steps)

    assert isinstance(seen.events[0], FitStart) and isinstance(seen.events[-1], FitEnd)
    assert seen.of(FitStart)[0].num_devices == count
    assert seen.of(FitEnd)[0].reason == "done"
    assert seen.of(FitEnd)[0].samples == 8 * NUM_SAMPLES
    assert sum(w.num_steps for w in seen.of(Window)) == len(steps)
    # One thread, and not the one that trains.
    assert len(seen.threads) == 1 and threading.get_ident() not in seen.threads


@pytest.mark.slow
@pytest.mark.parametrize("count", [nightly(1), 8])
def test_epochs_end_to_the_sample_with_a_padded_last_batch(tmp_path, count):
    seen, base = Recorder(), 40
    settings = counting_config(
        tmp_path, epochs=3, batch=BatchLimits(base=base, max=40, micro=(1, 40))
    )
    state = Counting(settings, devices=devices(count), hooks=[seen]).fit()

    np.testing.assert_array_equal(state.params["count"], 3)
    assert [s.num_samples for s in seen.of(StepEnd)] == [40] * 7 + [8]
    assert seen.of(StepEnd)[-1].after == Cursor(seed=0, epoch=3, offset=0)
    # The same in plain numpy: padding has no weight.
    w, cursor, data = np.zeros(4), Cursor(seed=0), rows()["x"].astype(np.float64)
    for size in [40] * 7 + [8]:
        indices, cursor = take(cursor, NUM_SAMPLES, size)
        w -= 0.05 * (w - data[indices].mean(0))
    np.testing.assert_allclose(state.params["w"], w, rtol=2e-6)


@pytest.mark.parametrize("base_steps", [1.0, 7.0])
def test_base_steps_count_progress(tmp_path, base_steps):
    seen = Recorder()
    Mean(config(tmp_path, base_steps=base_steps), hooks=[seen]).fit()
    assert len(seen.of(StepEnd)) == seen.of(FitEnd)[0].progress == base_steps


def test_a_fixed_policy_keeps_the_global_batch_and_still_learns_the_model(tmp_path):
    seen = Recorder()
    done = Every(lambda e: trainer.finish() if seen.of(TuneEnd) else None, steps=10)
    settings = config(
        tmp_path,
        base_steps=LONG,
        tuning__warm_up_steps=1,
        tuning__every_steps=5,
        tuning__every_s=1e9,
    )
    trainer = Mean(settings, data=rows(offset=0.0), hooks=[seen, done])
    trainer.fit()
    assert {s.config.global_batch_size for s in seen.of(StepEnd)} == {16}
    assert not any(t.switched for t in seen.of(TuneEnd))
    assert "fixed" in seen.of(TuneEnd)[0].verdict.reason


@pytest.mark.slow
def test_a_switch_asked_for_from_a_hook_happens_at_the_next_step_and_loses_no_sample(
    tmp_path,
):
    sizes = iter([32, 8, 32, 16])

    def ask(event):
        if event.step in (2, 6, 10, 14):
            trainer.request_batch(next(sizes))

    limits = BatchLimits(base=16, max=64, micro=(8, 64), min_global=8, sizes=(8, 16, 32))
    seen = Recorder(ask)
    settings = counting_config(
        tmp_path, epochs=7, policy="goodput", batch=limits, tuning__warm_up_steps=10**9
    )
    trainer = Counting(settings, devices=devices(1), hooks=[seen], loop=InStep)
    state = trainer.fit()

    used = [s.config.global_batch_size for s in seen.of(StepEnd)]
    changes = [n for n, (a, b) in enumerate(zip(used, used[1:], strict=False), 2) if a != b]
    assert [used[n - 1] for n in changes] == [32, 8, 32, 16]
    assert changes == [3, 7, 11, 15]
    np.testing.assert_array_equal(state.params["count"], 7)


@pytest.mark.slow
def test_accumulation_asked_for_from_a_hook_loses_no_sample(tmp_path):
    def ask(event):
        if event.step == 2:
            trainer.request_batch(2, 3)

    limits = BatchLimits(base=16, max=64, micro=(1, 4), min_global=8, sizes=(1, 2, 4))
    seen = Recorder(ask)
    settings = counting_config(
        tmp_path,
        epochs=2,
        policy="goodput",
        batch=limits,
        tuning__accumulate=True,
        tuning__warm_up_steps=10**9,
        tuning__every_s=1e9,
    )
    trainer = Counting(settings, devices=devices(8), hooks=[seen], loop=InStep)
    state = trainer.fit()
    used = [(s.config.micro_batch_size, s.config.num_micro_batches) for s in seen.of(StepEnd)]
    assert used[0] == (2, 1) and used[2:5] == [(2, 3)] * 3
    np.testing.assert_array_equal(state.params["count"], 2)


def planted(**times):
    """A loop for which every fit of the time model gives these parameters, whatever was measured."""
    usual = {"compute_base": 0.0, "compute_per_sample": 0.0, "intra_base": 1e-9}
    usual |= {"intra_per_replica": 0.0, "inter_base": 0.0, "inter_per_replica": 0.0}
    params = PerfParams(**{**usual, "overlap": 1.0, "update_s": 0.0, **times})

    def answer(situation):
        if situation.timings is not None:
            found = fit_perf_params(situation.timings)
            fit = dataclasses.replace(found, params=params, error=0.0, unidentified=())
            # Without residuals: the real times do not count.
            here = dataclasses.replace(situation.here, fit=fit, residuals=())
            situation = dataclasses.replace(situation, here=here)
        return TunerAnswer(situation=situation, verdict=tune(situation))

    class Planted(Loop):
        def __init__(self, *arguments, **named):
            super().__init__(
                *arguments, **named, tuner=functools.partial(TunerThread, answer=answer)
            )

    return Planted


@pytest.mark.slow
@pytest.mark.parametrize(
    "times, offset, expected",
    [
        # A step costs the same at any size, and the gradient is nothing but noise: as large as allowed.
        ({"compute_base": 0.1}, 0.0, {64}),
        # Time grows with every sample: a larger batch brings nothing.
        ({"compute_per_sample": 0.01}, 0.0, {16}),
        # A step costs the same, but the gradient has no noise: a larger batch brings nothing, and
        # what was tried is not kept.
        ({"compute_base": 0.1}, 1e4, {16}),
    ],
)
@pytest.mark.parametrize("count", [1, nightly(8)])
def test_the_batch_adapts_to_planted_times_and_noise(tmp_path, times, offset, expected, count):
    seen = Recorder()

    def final():
        """The latest verdicts that weighed the alternatives and kept the batch."""
        reasons = ("is the best", " would ", "cannot ", " samples stay;")
        last = [t for t in seen.of(TuneEnd) if not t.verdict.reason.startswith("probe")][-3:]
        keep = all(any(r in t.verdict.reason for r in reasons) and not t.switched for t in last)
        return last if len(last) == 3 and keep else []

    settings = config(
        tmp_path,
        base_steps=LONG,
        policy="goodput",
        batch=BatchLimits(base=16, max=64, micro=(1, 64), sizes=(2, 4, 8, 16, 32, 64)),
        tuning__warm_up_steps=1,
        tuning__every_steps=4,
        tuning__every_s=1e9,
        tuning__dwell_steps=2,
        reporting__window_s=1e9,
    )
    trainer = Mean(
        settings,
        data=rows(offset=offset),
        tx=optax.sgd(0.0),  # stays where the signal is what was planted
        devices=devices(count),
        loop=planted(**times),
        hooks=[
            seen,
            Every(lambda e: trainer.finish() if final() or e.step > 5000 else None, steps=5),
        ],
    )
    trainer.fit()
    assert final(), [t.verdict.reason for t in seen.of(TuneEnd)][-5:]
    assert {t.verdict.config.global_batch_size for t in final()} <= expected
    for verdict in seen.of(TuneEnd):
        assert verdict.verdict.config.global_batch_size <= 64
        assert verdict.verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, background",
    [nightly(1, False), (8, False), (1, True), nightly(8, True)],
    ids=["1-at once", "8-at once", "1-in the background", "8-in the background"],
)
def test_the_noise_is_measured_anew_after_every_change_of_the_batch(tmp_path, count, background):
    """Sizes asked for one after another, none of them compiled before: the estimate never gets old."""
    oldest, sizes = 3 * 4 + 10, [32, 64, 128]
    ages = {}  # global batch -> ages of the newest sample, window by window

    class Change:
        def on_window(self, event):
            seen = ages.setdefault(event.config.global_batch_size, [])
            seen.append(event.noise_age_steps)
            is_fresh = len(seen) > 60 and seen[-1] <= oldest
            if event.step > 50_000 or (is_fresh and len(ages) == 4):
                trainer.finish()
            elif is_fresh and sizes and len(ages) + len(sizes) == 4:
                trainer.request_batch(sizes.pop(0) // count)

    settings = config(
        tmp_path,
        base_steps=LONG,
        batch=BatchLimits(base=16, max=128, micro=(1, 128), sizes=(2, 4, 8, 16)),
        statistics__every_steps=4,
        tuning__warm_up_steps=10**9,
        execution__background_compile=background,
        reporting__window_s=1e-9,
    )
    # Hooks that lag behind would ask for a change long after the window that they hear of.
    trainer = Mean(settings, data=rows(512), devices=devices(count), hooks=[Change()], loop=InStep)
    trainer.fit()
    assert sorted(ages) == [16, 32, 64, 128]
    assert all(seen[-1] <= oldest for seen in ages.values())
    if not background:  # there it takes a moment until the size in use is compiled to measure
        assert all(age <= oldest for seen in ages.values() for age in seen[16:])


@pytest.mark.slow
@pytest.mark.parametrize("end", [{"epochs": 4}, {"base_steps": 16.0}], ids=["epochs", "base_steps"])
def test_a_decay_ends_where_the_run_does(tmp_path, end):
    """64 samples are 4 base steps an epoch; the batch is four times as large from step 2 on."""
    seen = Recorder()
    schedule = optax.linear_schedule(0.1, 0.0, 16)

    class Scheduled(Mean):
        def learning_rate(self, progress):
            return schedule(progress)

    trainer = Scheduled(
        config(tmp_path, **end, reporting__window_s=1e-9, tuning__warm_up_steps=10**9),
        data=rows(64, offset=1.0),
        tx=optax.sgd(schedule),
        devices=devices(1),
        hooks=[seen, Every(lambda e: trainer.request_batch(64) if e.step == 2 else None, steps=1)],
        loop=InStep,
    )
    state = trainer.fit()
    kind = optax.ScaleByScheduleState
    inner = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, kind))
    counts = [np.asarray(x.count).item() for x in inner if isinstance(x, kind)]
    last = seen.of(StepEnd)[-1]
    if "epochs" in end:
        assert last.samples == 256 and last.progress < 8
        # The last update, of 32 samples, was made at 14, and the schedule counts on by itself. By progress
        # the rate would have ended above a half of its peak.
        assert counts == [15]
        assert seen.of(Window)[-1].learning_rate == pytest.approx(0.0, abs=1e-6)
    else:
        before = seen.of(StepEnd)[-2]
        assert last.samples > 256 and before.progress < 16 <= last.progress
        assert counts == [int(before.progress) + 1]  # the schedule counts on by itself


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [False, True], ids=["workdir", "chosen"])
def test_a_run_finds_the_programs_of_the_one_before_and_leaves_jax_as_it_was(
    tmp_path, uncached, chosen
):
    folder = tmp_path / "programs" if chosen else tmp_path / "run" / "compilation_cache"
    before = dict(jax.config.values)
    # Without a checkpoint, so that the second run is the first one again.
    settings = config(
        tmp_path / "run",
        execution__compilation_cache=str(folder) if chosen else "",
        saving__at_end=False,
    )

    def compilations():
        found = []
        undo = listen_for_compilations(found.append)
        Mean(settings).fit()
        undo()
        return found

    assert {c.cached for c in compilations()} >= {False} and list(folder.iterdir())
    again = compilations()
    assert again and all(c.cached for c in again), again
    assert jax.config.values == before


def test_hooks_are_called_in_the_order_given(tmp_path):
    calls = []

    class Named:
        def __init__(self, name):
            self.name = name

        def on_step_end(self, event):
            calls.append((event.step, self.name))

        def on_checkpoint(self, event):
            calls.append((event.step, self.name, "checkpoint"))

    Mean(config(tmp_path), hooks=[Named("a"), Named("b")]).fit()
    steps = 2 * NUM_SAMPLES // 16
    expected = [(n, name) for n in range(1, steps + 1) for name in "ab"]
    assert calls == [*expected, (steps, "a", "checkpoint"), (steps, "b", "checkpoint")]


class Broken:
    """A hook that fails at the `at`-th call of one of its methods."""

    def __init__(self, method, at=1):
        self._left = at
        setattr(self, method, self._fail)

    def _fail(self, event):
        self._left -= 1
        if self._left == 0:
            raise ZeroDivisionError("the hook's own mistake")


LAST = 2 * NUM_SAMPLES // 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, at",
    [
        ("on_fit_start", 1),
        ("on_step_end", 3),
        ("on_step_end", LAST),
        ("on_window", 1),
        ("on_checkpoint", 1),
        ("on_fit_end", 1),
    ],
)
def test_an_exception_in_a_hook_is_raised_after_a_checkpoint(tmp_path, method, at):
    settings = counting_config(tmp_path, saving__at_end=method == "on_checkpoint")
    with pytest.raises(ZeroDivisionError, match="own mistake"):
        Counting(settings, hooks=[Broken(method, at)]).fit()

    seen = Recorder()
    state = Counting(dataclasses.replace(settings, saving=Saving()), hooks=[seen]).fit()
    start = seen.of(FitStart)[0].step
    if method == "on_step_end":
        assert at <= start <= LAST
    elif method != "on_fit_start":
        assert start == LAST
    np.testing.assert_array_equal(state.params["count"], 2)


def test_finish_ends_as_if_complete(tmp_path):
    seen = Recorder(lambda e: trainer.finish() if e.step == 3 else None)
    trainer = Mean(config(tmp_path, base_steps=LONG), hooks=[seen], loop=InStep)
    state = trainer.fit()
    assert int(state.step) == 3
    assert seen.of(FitEnd)[0].reason == "done"
    assert seen.of(Checkpoint)[-1].step == int(state.step)


@pytest.mark.slow
def test_a_batch_that_is_asked_for_while_a_run_is_prepared_is_used_from_its_first_step(tmp_path):
    class Asking(Mean):
        def dataset(self):
            self.request_batch(2, 2)
            return super().dataset()

    seen = Recorder()
    limits = BatchLimits(base=16, max=64, micro=(1, 16), min_global=4)
    settings = config(tmp_path, batch=limits, epochs=1, tuning__accumulate=True)
    Asking(settings, hooks=[seen], devices=devices(1)).fit()
    assert {(s.config.micro_batch_size, s.config.num_micro_batches) for s in seen.of(StepEnd)} == {
        (2, 2)
    }


def test_a_batch_that_was_chosen_for_other_processes_is_used_on_these(tmp_path):
    """A verdict may come when the generation of processes that it is for has just ended."""

    class Asking(Mean):
        def dataset(self):
            late = BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=4)
            self._request(Control(batch=late))
            return super().dataset()

    seen = Recorder()
    limits = BatchLimits(base=16, max=64, micro=(1, 16), min_global=4)
    Asking(config(tmp_path, batch=limits, epochs=1), hooks=[seen], devices=devices(1)).fit()
    used = {(s.config.micro_batch_size, s.config.num_replicas) for s in seen.of(StepEnd)}
    assert used == {(8, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((8,), "8 in 1 micro-batches of 8 on each of 1 replicas are not what Config.batch allows"),
        ((128,), "are not what Config.batch allows"),
        ((16, 2), "would be split, which Config does not allow"),
        ((64,), "do not fit into memory"),
    ],
)
def test_a_batch_that_is_not_allowed_or_does_not_fit_is_not_used(tmp_path, told, asked, why):
    class Large(Mean):
        def loss(self, params, batch, key):
            wide = jnp.outer(batch["x"].ravel(), jnp.ones(1 << 14)).reshape(len(batch["x"]), -1)
            return super().loss(params, batch, key) + 0 * jnp.sort(wide, axis=1)[:, 0]

    seen = Recorder(lambda e: trainer.request_batch(*asked) if e.step == 2 else None)
    limits = BatchLimits(base=16, max=64, micro=(1, 64))
    settings = config(tmp_path, batch=limits, execution__memory_bytes=12 << 20)
    trainer = Large(settings, hooks=[seen], devices=devices(1), loop=InStep)
    trainer.fit()
    assert {s.config.global_batch_size for s in seen.of(StepEnd)} == {16}
    (sentence,) = [line for line in told if "training goes on" in line]
    assert why in sentence


@pytest.mark.slow
def test_request_stop_saves_and_raises_with_exit_code_143(tmp_path):
    seen = Recorder(lambda e: trainer.request_stop() if e.step == 3 else None)
    trainer = Counting(counting_config(tmp_path), hooks=[seen], loop=InStep)
    with pytest.raises(Preempted) as stopped:
        trainer.fit()
    assert stopped.value.code == 143
    step = stopped.value.step
    assert step == 3
    assert [type(e) for e in seen.events[-3:]] == [Checkpoint, Preempt, FitEnd]
    assert [e.step for e in seen.events[-3:]] == [step] * 3

    again = Recorder()
    state = Counting(counting_config(tmp_path), hooks=[again]).fit()
    assert again.of(FitStart)[0].step == step
    assert again.of(StepEnd)[0].step == step + 1
    np.testing.assert_array_equal(state.params["count"], 2)


@pytest.mark.slow
def test_request_save_saves_and_goes_on(tmp_path):
    seen = Recorder(lambda e: trainer.request_save() if e.step == 3 else None)
    trainer = Mean(config(tmp_path, saving__at_end=False), hooks=[seen], loop=InStep)
    trainer.fit()
    (saved,) = seen.of(Checkpoint)
    assert saved.step == 3 and saved.error is None
    assert len(seen.of(StepEnd)) == LAST


@pytest.mark.parametrize(
    "ask",
    [Mean.finish, Mean.request_stop, Mean.request_save, lambda trainer: trainer.request_batch(4)],
)
def test_nothing_can_be_asked_of_a_trainer_that_does_not_run(tmp_path, ask):
    with pytest.raises(RuntimeError, match="from a hook"):
        ask(Mean(config(tmp_path)))


@pytest.mark.parametrize("asked", [(0, 1), (4, 0)])
def test_an_empty_batch_cannot_be_asked_for(tmp_path, asked):
    with pytest.raises(ValueError, match="at least one"):
        Mean(config(tmp_path)).request_batch(*asked)


@pytest.mark.slow
def test_the_same_trainer_runs_again_from_where_it_ended(tmp_path):
    trainer = Counting(counting_config(tmp_path))
    first = trainer.fit()
    trainer.config = dataclasses.replace(trainer.config, epochs=3)
    second = trainer.fit()
    np.testing.assert_array_equal(first.params["count"], 2)
    np.testing.assert_array_equal(second.params["count"], 3)
