"""A run that ends and is started again is the run that never ended: to the bit, and to the sample."""

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import compilations
import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Counting, InStep, Mean, Recorder, config, counting_config, rows, same

from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import FitEnd, FitStart, StepEnd
from jaxgoodput.train.control import Preempted

BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


def devices(count):
    return jax.devices()[:count]


def stopped_at(trainer_class, settings, step, **options):
    """A run that is asked to stop once `step` is done."""
    seen = Recorder(lambda e: trainer.request_stop() if e.step == step else None)
    trainer = trainer_class(settings, hooks=[seen], loop=InStep, **options)
    with pytest.raises(Preempted):
        trainer.fit()
    return seen


class Noisy(Mean):
    """The loss draws random numbers, as dropout does."""

    def loss(self, params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return super().loss(params, {"x": batch["x"] * kept}, key)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(optax.sgd(0.05, momentum=0.9), marks=pytest.mark.nightly, id="sgd"),
        pytest.param(optax.adamw(0.05), id="adamw"),
    ],
)
@pytest.mark.parametrize("end", [{"epochs": 3}, {"base_steps": 7.0}], ids=["epochs", "base_steps"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, count, tx, end):
    """Three epochs are seven batches of 40 and one of 8."""
    options = {"devices": devices(count), "tx": tx}
    limits = BatchLimits(base=40, max=40, micro=(1, 40))
    settings = {"batch": limits, "ema": 0.9, "statistics__every_steps": 2, **end}
    whole = Noisy(config(tmp_path / "whole", **settings), **options).fit()
    for step in (3, 6):
        stopped_at(Noisy, config(tmp_path / "parts", **settings), step, **options)
    parts = Noisy(config(tmp_path / "parts", **settings), **options).fit()
    assert same(parts, whole)
    assert int(parts.step) == (8 if "epochs" in end else 7)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: optax.sgd(0.05, momentum=0.9), lambda: optax.adam(0.05)])
def test_a_fixed_batch_is_a_plain_loop_the_smaller_last_one_included(tmp_path, make):
    limits = BatchLimits(base=40, max=40, micro=(1, 40))
    trained = Mean(config(tmp_path, batch=limits, epochs=3), tx=make(), devices=devices(1)).fit()
    cursor, data, tx = Cursor(seed=0), rows()["x"], make()
    params: Any = {"w": np.zeros(4, np.float32)}
    opt_state = tx.init(params)
    for size in [40] * 7 + [8]:
        indices, cursor = take(cursor, 96, size)
        grads = {"w": params["w"] - data[indices].mean(0)}
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(trained.params["w"], params["w"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_a_restart_goes_on_at_the_next_sample_with_the_same_books(tmp_path, count):
    settings = counting_config(tmp_path, epochs=3)
    first = stopped_at(Counting, settings, 7, devices=devices(count))
    second = Recorder()
    state = Counting(settings, hooks=[second], devices=devices(count)).fit()

    steps = first.of(StepEnd) + second.of(StepEnd)
    assert [s.step for s in steps] == list(range(1, 19))
    for a, b in itertools.pairwise(steps):
        assert a.after == b.before
        assert b.samples - a.samples == b.num_samples
        assert b.progress > a.progress
    start = second.of(FitStart)[0]
    assert (start.step, start.restart) == (7, 1)
    assert start.progress == pytest.approx(first.of(FitEnd)[0].progress)
    assert second.of(FitEnd)[0].samples == 3 * 96
    np.testing.assert_array_equal(state.params["count"], 3)


@pytest.mark.slow
def test_what_a_resumed_run_waits_for_before_its_first_step_is_not_productive(tmp_path, clock):
    """The ledger of the run before is taken over while a bucket is open, which goes on."""
    wait_s, step_s = 1000.0, 100.0  # beside which it is nothing that compiling takes real time

    class Waiting(InStep):
        def announce(self, regrouped=None):
            super().announce(regrouped)
            clock.advance(wait_s)  # as for the other processes

    settings = counting_config(tmp_path)
    stopped_at(Counting, settings, 4, clock=clock)
    seen = Recorder(lambda e: clock.advance(step_s))
    Counting(settings, clock=clock, hooks=[seen], loop=Waiting).fit()
    booked = seen.of(FitEnd)[0].buckets_s
    assert len(seen.of(StepEnd)) == 8
    assert booked["training_prep"] == pytest.approx(wait_s, rel=0.05)
    assert booked["productive"] == pytest.approx(8 * step_s, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("length", [{"epochs": 2}, {"base_steps": 7.0}])
def test_a_run_that_is_complete_stays_complete(tmp_path, length):
    first = Mean(config(tmp_path, **length)).fit()
    for _ in range(2):
        seen = Recorder()
        again = Mean(config(tmp_path, **length), hooks=[seen]).fit()
        assert same(again, first)
        assert not seen.of(StepEnd)
        assert seen.of(FitStart)[0].progress > 6
        assert seen.of(FitEnd)[0].progress == seen.of(FitStart)[0].progress


@pytest.mark.slow
def test_every_number_of_devices_carries_the_run_on(tmp_path):
    settings = counting_config(tmp_path, epochs=4)
    for step, count in ((3, 8), (10, 4), (17, 1)):
        stopped_at(Counting, settings, step, devices=devices(count))
    state = Counting(settings, devices=devices(8)).fit()
    np.testing.assert_array_equal(state.params["count"], 4)
    # The same batches in the same order: only the order of additions differs.
    w, cursor, data = np.zeros(4), Cursor(seed=0), Counting(settings).data["x"].astype(np.float64)
    for _ in range(24):
        indices, cursor = take(cursor, 96, 16)
        w -= 0.05 * (w - data[indices].mean(0))
    np.testing.assert_allclose(state.params["w"], w, rtol=5e-6)


@pytest.mark.slow
def test_another_seed_starts_elsewhere_but_a_restart_keeps_its_own(tmp_path):
    stopped_at(Counting, counting_config(tmp_path, seed=5), 2)
    seen = Recorder()
    # The order of the samples belongs to the run, not to the call.
    state = Counting(counting_config(tmp_path, seed=6), hooks=[seen]).fit()
    assert seen.of(StepEnd)[0].before == Cursor(seed=5, offset=32)
    np.testing.assert_array_equal(state.params["count"], 2)


# -- killed ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def witness():
    """The benchmark's own functions: what counts the samples must be right itself."""
    spec = importlib.util.spec_from_file_location("kills_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logged(num_samples, batch, total, kills):
    """The log of a run with restarts: (step at which a life ends, step at which the next begins)."""
    starts: Any = iter(kills)
    lines, step = [], 0
    cursors = [Cursor(seed=0)]
    while cursors[-1].num_samples(num_samples) < total:
        left = total - cursors[-1].num_samples(num_samples)
        cursors.append(take(cursors[-1], num_samples, min(batch, left))[1])
    lines.append({"start": 0})
    end, back = next(starts, (len(cursors), None))
    while step < len(cursors) - 1:
        if step >= end:
            assert back is not None
            step = min(back, step)
            lines.append({"start": step})
            end, back = next(starts, (len(cursors), None))
        step += 1
        before, after = cursors[step - 1], cursors[step]
        count = after.num_samples(num_samples) - before.num_samples(num_samples)
        lines.append(
            {"step": step, "before": dataclasses.asdict(before), "num_samples": count, "batch": 1}
        )
    return [json.dumps(line).encode() for line in lines]


@settings(deadline=None, max_examples=30)
@given(
    kills=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=5),
    batch=st.integers(1, 20),
)
def test_the_log_of_a_right_run_counts_once(witness, kills, batch):
    lines = logged(20, batch, 60, kills)
    applied, starts, _ = witness.replay([*lines, b'{"step": 4, "bef'])
    counted = witness.tally(witness.times_applied(applied, 20), 20)
    assert counted == {"never": 0, "once": 60, "more often": 0}
    assert starts == sum(b"start" in line for line in lines)


@pytest.mark.parametrize("wrong", ["never", "more often"])
def test_the_log_of_a_wrong_run_does_not(witness, wrong):
    lines = logged(20, 7, 60, [(5, 3)])
    step = {"step": 10, "before": {"seed": 0, "epoch": 1, "offset": 3}, "num_samples": 2}
    lines = lines[:-1] if wrong == "never" else [*lines, json.dumps(step).encode()]
    applied, _, undone = witness.replay(lines)
    counted = witness.tally(witness.times_applied(applied, 20), 20)
    assert counted[wrong] > 0 and counted["once"] < 60
    assert undone == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_long_run_is_watched_and_ends_by_itself():
    """That it takes no more of anything shows after minutes only: `benchmarks/soak.py --minutes 30`."""
    soak = BENCHMARK.with_name("soak.py")
    ended = subprocess.run(
        [sys.executable, str(soak), "--minutes", "0.5"], capture_output=True, text=True, timeout=500
    )
    assert ended.returncode in (0, 1) and not ended.stderr.count("Traceback"), ended.stderr
    done = re.search(
        r"(\d+) steps, (\d+) evaluations, (\d+) checkpoints, (\d+) batches", ended.stdout
    )
    assert done is not None and all(map(int, done.groups())), ended.stdout


@pytest.mark.slow
@pytest.mark.multihost
def test_a_run_that_is_killed_applies_every_sample_exactly_once():
    ended = subprocess.run(
        [sys.executable, str(BENCHMARK), "--kills", "3", "--seed", "1"],
        env={**os.environ, **compilations.JOBS},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = dict(line.rsplit(maxsplit=1) for line in ended.stdout.splitlines()[1:])
    table = {name.strip(): value for name, value in table.items()}
    assert table["kills (SIGKILL)"] == "3"
    assert table["log: samples applied never"] == "0"
    assert table["log: samples applied once"] == str(3 * 600)
    assert table["log: samples applied more often"] == "0"
    assert table["device: samples with count 3"] == "600"
