"""What a minute of training says of larger batches: the model of goodput, and nothing left behind."""

import dataclasses
import math
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st
from problems import Evaluated, Mean, Recorder, config, rows

import jaxgoodput
from jaxgoodput.clock import FakeClock
from jaxgoodput.data.streams import stream
from jaxgoodput.goodput.efficiency import GradParams, efficiency
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.launcher import plan
from jaxgoodput.train.ask import tryout as trying
from jaxgoodput.train.ask.tryout import StepTimes, TriedBatch, Tryout, step_times, tryout
from jaxgoodput.tune.block_times import SHORT_S

EXAMPLES = pathlib.Path(jaxgoodput.__file__).parents[1] / "examples"


def found(steps_s, noise, *, base=8, limit=""):
    """A tryout of batches that double; the noise scale may be half or twice as large."""
    return Tryout(
        batches=tuple(
            TriedBatch(num_samples=base * 2**i, step_s=step_s) for i, step_s in enumerate(steps_s)
        ),
        noise_scale=noise,
        noise_lower=noise / 2,
        noise_upper=noise * 2,
        noise_is_guess=False,
        limit=limit,
        num_noise_steps=100,
        base_steps=1e4,
    )


@given(
    steps_s=st.lists(st.floats(1e-5, 10.0), min_size=1, max_size=6),
    noise=st.floats(0.0, 1e6),
)
def test_a_batch_takes_the_time_that_the_model_of_goodput_says(steps_s, noise):
    one = found(steps_s, noise)
    base = one.base
    grad = GradParams(sqr=1.0, var=noise / base.num_samples)
    goodputs = [
        b.num_samples / b.step_s * float(efficiency(grad, b.num_samples / base.num_samples))
        for b in one.batches
    ]
    times = [one.time_of(b, noise) for b in one.batches]
    np.testing.assert_allclose(times, goodputs[0] / np.array(goodputs), rtol=1e-6)
    assert one.time_of(one.best, noise) == min(times)
    if one.is_worth_it:
        assert min(times) <= 0.9 and one.time_of(one.best, noise / 2) <= 1
    assert ("Worth it" in one.answer()) == one.is_worth_it
    expected = "Not known" if len(steps_s) == 1 else "Not worth it"
    assert one.is_worth_it or expected in one.answer()


@pytest.mark.parametrize(
    "one, said",
    [
        (
            found([0.1, 0.2, 0.4], 100.0),
            ["Not worth it now: no larger batch", "noise scale is about 100"],
        ),
        (
            found([0.1, 0.1, 0.1], 1e6, limit="64 samples cannot be used"),
            [
                "Worth it: 32 samples instead of 8 would take 25% of the time",
                "4.2 min instead of 17 min",
            ],
        ),
        (found([0.1, 0.12], 6.0), ["and that is not certain"]),
        (found([0.1, 0.1], math.nan), ["Not known: 100 steps did not tell the noise", "unknown"]),
        (
            found([0.1], 6.0, limit="the time was up"),
            ["Not known: no larger batch", "the time was up"],
        ),
    ],
    ids=["bound by arithmetic", "bound by latency", "unsure", "unknown", "no time"],
)
def test_the_answer_says_what_is_known_and_what_to_do(one, said):
    answer = one.answer()
    for part in said:
        assert part in answer, answer
    assert ("Worth it" in answer) == one.is_worth_it
    assert one.limit in answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "length",
    [
        {"base_steps": 12.0},
        {"epochs": 2, "batch": BatchLimits(base=16, max=64, sizes=(16, 64))},
        {
            "epochs": 2,
            "batch": BatchLimits(base=16, max=16, micro=(1, 4)),
            "tuning__accumulate": True,
        },
    ],
)
def test_it_leaves_nothing_behind(tmp_path, monkeypatch, length):
    """Whatever the length of the run and its micro-batches."""
    folders = []
    monkeypatch.setattr(trying.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(trying, "TIMED_S", 0.5)

    class Failing(Evaluated):
        def metrics(self, params, batch):
            raise AssertionError("nothing is evaluated")

        def dataset(self):
            folders.append(self.config.workdir)
            return super().dataset()

    heard = Recorder()
    settings = config(tmp_path / "own", evaluation__every_base_steps=2.0, **length)
    trainer = Failing(settings, hooks=[heard], devices=jax.devices()[:1])
    one = tryout(trainer, time_s=300.0)
    assert list(tmp_path.iterdir()) == [] and heard.events == [] and len(folders) == 1
    assert trainer.config is settings and trainer.hooks == (heard,)
    sizes = [b.num_samples for b in one.batches]
    assert sizes == sorted(sizes) and sizes[0] == settings.batch.base and 64 in sizes
    assert all(b.step_s > 0 for b in one.batches) and one.base_steps == 12
    assert one.noise_lower <= one.noise_upper and one.noise_scale > 0


@given(passed_s=st.floats(0, 60), took_s=st.floats(1, 40))
def test_a_larger_batch_is_timed_unless_the_time_is_far_over(passed_s, took_s):
    """Without one there is no answer. The time is over by the base batch and one more try, at most."""
    clock, time_s, sizes = FakeClock(passed_s), 50.0, []

    def time_one(trainer, own, folder, size, clock, time_left_s):
        sizes.append(size)
        clock.advance(took_s)
        return StepTimes(num_samples=size, alone_s=1.0, together_s=math.nan)

    settings = config("unused")
    trainer = Mean(settings, devices=jax.devices()[:1])
    with mock.patch.object(trying, "_time_one", time_one):
        batches, limit = trying._timed(
            *(
                trainer,
                settings,
                "",
                lambda: time_s - clock.now(),
                math.inf,
                math.inf,
                clock,
                time_s,
            )
        )
    assert sizes[0] == settings.batch.base
    assert len(batches) == len(sizes) == len({*sizes})
    if passed_s + 2 * took_s <= time_s:
        assert len(batches) > 1
    assert clock.now() <= max(passed_s + took_s, time_s + trying.EXTRA_SHARE * time_s)
    assert ("the time was up" in limit) or clock.now() <= time_s


SECONDS = st.floats(1e-4, 5e-3)


@given(
    alone_s=SECONDS, saved=st.floats(0, 0.9), longer=st.floats(1, 10), seen=st.sampled_from("abc")
)
def test_step_times_are_compared_like_with_like(alone_s, saved, longer, seen):
    """Steps that are not seen together yet are no reason against a batch, or for one."""
    together_s = alone_s * (1 - saved)
    base = StepTimes(num_samples=8, alone_s=alone_s, together_s=together_s)
    more_s = (longer - 1) * together_s  # the larger batch computes so much longer
    whole = StepTimes(num_samples=32, alone_s=alone_s + more_s, together_s=together_s + more_s)
    alone = dataclasses.replace(whole, together_s=math.nan)
    if seen == "a":  # both kinds of both
        assert base.step_s(base) == together_s and whole.step_s(base) == together_s + more_s
    elif seen == "b":  # the larger batch alone
        expected_s = together_s + more_s if alone.alone_s < SHORT_S else alone.alone_s
        assert alone.step_s(base) == pytest.approx(expected_s)
    else:  # the base batch alone
        base = dataclasses.replace(base, together_s=math.nan)
        assert (base.step_s(base), whole.step_s(base)) == (alone_s, whole.alone_s)
        together = dataclasses.replace(whole, alone_s=math.nan)
        assert math.isnan(together.step_s(base)), "nothing of one kind is known of both"
    only_together = StepTimes(num_samples=8, alone_s=math.nan, together_s=together_s)
    assert math.isnan(alone.step_s(only_together)) == (alone.alone_s < SHORT_S)


def test_windows_of_steps_alone_and_together_are_apart():
    window = synthetic.window(10, 10.0, 640)
    told = [(1.0, 0.9), (1.0, 0.5), (1.3, 0.5), (8.0, 0.7), (8.0, 0.1), (8.0, 0.1)]
    windows = [
        dataclasses.replace(window, num_steps=10, seconds=s * 10, steps_per_dispatch=n)
        for n, s in told
    ]
    times = step_times(windows)
    assert (times.alone_s, times.together_s) == (0.5, 0.1)
    assert math.isnan(step_times(windows[:3]).together_s)
    assert math.isnan(step_times(windows[3:]).alone_s)


@pytest.mark.slow
def test_a_batch_that_cannot_be_used_is_the_end_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(trying, "TIMED_S", 0.2)
    settings = config(tmp_path, base_steps=12.0, execution__memory_bytes=3000)
    one = tryout(Mean(settings, devices=jax.devices()[:1]), time_s=300.0)
    assert "samples cannot be used" in one.limit and "memory" in one.limit


@pytest.mark.slow
def test_a_loop_of_ones_own_is_tried_by_its_loss():
    mean = Mean(config("unused"))
    one = trying.try_loss(
        mean.loss, {"w": np.zeros(4, np.float32)}, rows(512), optax.sgd(0.05), batch=8, time_s=6.0
    )
    assert one.base.num_samples == 8 and "noise scale" in one.answer() and one.base_steps is None


@pytest.mark.slow
def test_the_command_answers_for_a_script(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxgoodput", "try", EXAMPLES / "quickstart.py", "--time-s", "5"]
        + ["--", "--workdir", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Not known: " in done.stdout and "samples/s" in done.stdout  # in so short a time
    assert list(tmp_path.iterdir()) == []


class Given(Mean):
    """Trains on whatever it is given, with whatever tables."""

    def __init__(self, settings, data, own_tables=None):
        super().__init__(settings, data=data, devices=jax.devices()[:1])
        self.own_tables = own_tables

    def tables(self):
        return self.own_tables


@pytest.mark.slow
@pytest.mark.parametrize(
    "data, own_tables, why",
    [
        (rows(), {"words": object()}, "into their own folders"),
        (stream(iter([]), live=True), None, "use up a live stream"),
        (stream([{"x": np.zeros(4, np.float32)}] * 40), None, "the data ended before enough steps"),
    ],
    ids=["tables", "live", "short"],
)
def test_what_it_would_change_or_cannot_tell_is_refused(tmp_path, data, own_tables, why):
    with pytest.raises(RuntimeError, match=why):
        tryout(Given(config(tmp_path, base_steps=100.0), data, own_tables))


@pytest.mark.slow
def test_what_keeps_a_run_from_choosing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(trying, "TIMED_S", 0.2)
    settings = config(tmp_path, base_steps=100.0)
    task = Mean(settings, tx=optax.MultiSteps(optax.sgd(0.1), 2), devices=jax.devices()[:1])
    one = tryout(task, time_s=5.0)
    assert "BatchLimits.micro" in one.refusal
    worth = found([0.1, 0.1, 0.1], 1e6)
    assert "Before that: x" in dataclasses.replace(worth, refusal="x").answer()


def test_a_script_that_catches_everything_does_not_train(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""
from jaxgoodput import BatchLimits, Config, Trainer
trainer = Trainer(Config(workdir="own", batch=BatchLimits(base=8, max=8), base_steps=1))
for _ in range(2):
    try:
        trainer.fit()
    except BaseException:
        raise
""")

    def fails(trainer):
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        plan.reached(str(script), [], fails)
    assert not (tmp_path / "own").exists()
