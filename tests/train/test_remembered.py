"""What one run leaves to the next: it starts where the first one ended up, or as if nothing had been left."""

import dataclasses
import json
import threading
import unittest.mock as mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from problems import AtOnce, InStep, Mean, Recorder, config, rows, same

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.events import FitStart, StepEnd, TuneEnd
from jaxgoodput.optim import adaptation
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.optim.noise import NoiseSample
from jaxgoodput.tune import due
from jaxgoodput.tune.remembered import FOLDER, Memory, ProgramMemory
from jaxgoodput.tune.timings import Parts

SIZES = (16, 32, 64)
NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


# Almost nothing but a cost per step, so that noise decides; data around 0 are nothing but noise.
def step_s(batch):
    return 0.010 + 1e-6 * batch.global_batch_size


@pytest.fixture(autouse=True)
def verdicts_by_steps(monkeypatch):
    """Verdicts come every so many steps, however fast the machine runs these small ones."""
    monkeypatch.setattr(due, "LEAST_S", 0.0)
    monkeypatch.setattr(due, "LEAST_TIMES", 0.0)


class Timed(InStep):
    """A loop whose steps take what `step_s` says, and whose verdicts are there at once."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named, tuner=AtOnce)

    def _on_result(self, result):
        ticket = dataclasses.replace(result.ticket, timed=True, busy=False)
        parts = Parts(step_s=step_s(ticket.config))
        super()._on_result(dataclasses.replace(result, ticket=ticket, parts=parts))


def settings(workdir, **changes):
    usual = {
        "policy": "goodput",
        "batch": BatchLimits(base=16, max=64, micro=(8, 64), sizes=(8, *SIZES)),
        "base_steps": 300.0,
        "tuning__dwell_steps": 8,
        "tuning__max_growth": 2.0,
        "tuning__every_steps": 10,
        "saving__at_end": False,
    }
    return config(workdir, **{**usual, **changes})


def fit(configured, *, task=Mean, count=1, then=None, **options):
    """(what its hooks saw, what was warned of, the state) of a run."""
    options.setdefault("data", rows(960, offset=0.0))
    seen = Recorder(then)
    with mock.patch.object(logging, "warning") as warning:
        trainer = task(
            configured, devices=jax.devices()[:count], hooks=[seen], loop=Timed, **options
        )
        state = trainer.fit()
    return seen, [call.args[0] % call.args[1:] for call in warning.call_args_list], state


def batches(seen):
    return [s.config.global_batch_size for s in seen.of(StepEnd)]


def files(workdir):
    return sorted((workdir / "compilation_cache" / FOLDER).glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_second_run_starts_where_the_first_one_ended(tmp_path, background):
    """The first one is so long that it has most of its steps there, however long it compiles before."""
    long = {"base_steps": 900.0}
    first, warned, _ = fit(settings(tmp_path, **long))
    assert not warned and len(files(tmp_path)) == 1
    assert batches(first)[0] == 16 and batches(first)[-1] == 64
    assert any("probe" in t.verdict.reason for t in first.of(TuneEnd))

    compiled = []

    def listen(event):
        if event.step == 1:
            undos.append(listen_for_compilations(compiled.append))

    undos = []
    runs = settings(tmp_path, execution__background_compile=background, **long)
    second, warned, state = fit(runs, then=listen)
    for undo in undos:
        undo()
    assert not warned
    assert set(batches(second)) == {64}
    assert len(batches(second)) < len(batches(first))
    assert not any(t.switched for t in second.of(TuneEnd))
    # Nothing is worth compiling: what is not there was timed, and is worse.
    assert not [c for c in compiled if "step" in c.name]
    # The noise of the first steps was taken on trust, and by now is its own.
    assert second.of(StepEnd)[0].metrics["noise_samples"] == 8
    assert second.of(StepEnd)[0].progress > 1
    assert adaptation.readout(state.opt_state).newest_samples > 8


@pytest.mark.slow
def test_a_second_run_stays_there_as_long_as_the_first_took_to_get_there(tmp_path):
    """The noise of its own speaks for the base batch at once; it is not asked before."""
    fit(settings(tmp_path))
    (path,) = files(tmp_path)
    left = Memory.at(path)
    assert left.earlier is not None and left.earlier.noise is not None
    assert 0 < left.earlier.since_samples < 300 * 16
    # Far from the optimum there is no noise, and steps take as long as their samples.
    dear = {"task": Far, "data": rows(960, offset=0.0)}
    with mock.patch(f"{__name__}.step_s", lambda batch: 1e-4 * batch.global_batch_size):
        fit(settings(tmp_path, base_steps=5.0), **dear)
        (other,) = set(files(tmp_path)) - {path}
        found = Memory.at(other)
        assert found.earlier is not None
        noise = left.earlier.noise
        made = dataclasses.replace(found.earlier, batch=BATCH, since_samples=1280, noise=noise)
        found.write(made)
        second, _, _ = fit(settings(tmp_path), **dear)
    early = [s for s in second.of(StepEnd) if s.samples <= 1280]
    assert {s.config.global_batch_size for s in early} == {64}
    assert batches(second)[-1] == 16
    # What it leaves behind is about the batch that it ended with.
    after = Memory.at(other).earlier
    assert after is not None and after.batch.global_batch_size == 16 and after.since_samples >= 1280


BATCH = BatchConfig(micro_batch_size=64, num_micro_batches=1, num_replicas=1)


class Far(Mean):
    """No noise to speak of."""

    def loss(self, params, batch, key):
        return super().loss(params, jax.tree.map(lambda x: 1e-3 * x + 10.0, batch), key)


class Other(Mean):
    def loss(self, params, batch, key):
        return 2 * super().loss(params, batch, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"task": Other},
        pytest.param({"tx": optax.sgd(0.04)}, marks=NIGHTLY),
        pytest.param({"count": 2}, marks=NIGHTLY),
        pytest.param({"compute_dtype": "bfloat16"}, marks=NIGHTLY),
        pytest.param({"statistics__smoothing": 0.99}, marks=NIGHTLY),
        {"data": rows(961, offset=0.0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_device_or_setting_has_a_memory_of_its_own(tmp_path, change):
    short = {"base_steps": 3.0}
    of_run = {k: v for k, v in change.items() if k in ("task", "tx", "count", "data")}
    of_config = {k: v for k, v in change.items() if k not in of_run}
    fit(settings(tmp_path, **short))
    fit(settings(tmp_path, **short, **of_config), **of_run)
    assert len(files(tmp_path)) == 2


def damaged(text):
    yield "not a line of JSON"
    yield text[: len(text) // 2]
    body = json.loads(text)
    yield json.dumps({**body, "version": 99})
    yield json.dumps({**body, "batch": {**body["batch"], "num_replicas": 0}})
    yield json.dumps({**body, "more": 1})
    yield "[]"


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_named_and_left_out(tmp_path):
    fit(settings(tmp_path))
    (path,) = files(tmp_path)
    for text in [*damaged(path.read_text()), "\udcff"]:
        path.write_text(text, errors="surrogateescape")
        with mock.patch.object(logging, "warning") as warning:
            assert Memory.at(path).earlier is None
        assert path in warning.call_args.args
    seen, warned, _ = fit(settings(tmp_path, base_steps=20.0))
    assert batches(seen)[0] == 16
    assert len(warned) == 1 and str(path) in warned[0], warned
    assert Memory.at(path).earlier is not None  # what this run learned is in its place


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    folder = tmp_path / "compilation_cache" / FOLDER
    folder.parent.mkdir()
    folder.write_text("a file is in its way")
    seen, warned, _ = fit(settings(tmp_path, base_steps=20.0))
    assert batches(seen)
    assert len(warned) == 2 and all(str(folder) in w for w in warned), warned


@pytest.mark.slow
@pytest.mark.parametrize(
    "off",
    [
        {"tuning__remember": False},
        pytest.param({"policy": "fixed"}, marks=NIGHTLY),
        pytest.param({"policy": {0: 16, 0.5: 32}}, marks=NIGHTLY),
        pytest.param({"execution__compilation_cache": None}, marks=NIGHTLY),
    ],
)
def test_what_does_not_remember_reads_and_writes_nothing(tmp_path, off):
    fit(settings(tmp_path))
    (path,) = files(tmp_path)
    before = path.stat().st_mtime_ns
    with mock.patch.object(Memory, "at", side_effect=AssertionError("it was read")):
        seen, _, _ = fit(settings(tmp_path, base_steps=20.0, **off))
    assert batches(seen)[0] == 16
    assert path.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_run_that_begins_at_the_base_batch_keeps_its_bits(tmp_path):
    """What is remembered steers the batch, never an update: where it says nothing, nothing differs."""
    runs = settings(tmp_path, base_steps=6.0)
    _, _, first = fit(runs)
    _, _, second = fit(runs)
    assert same(first, second)


@pytest.mark.slow
def test_a_resumed_run_goes_on_where_its_checkpoint_is(tmp_path):
    runs = settings(tmp_path / "first", execution__compilation_cache=str(tmp_path))
    fit(runs)
    saving = settings(
        tmp_path / "second",
        execution__compilation_cache=str(tmp_path),
        saving__at_end=True,
        base_steps=20.0,
        tuning__remember=False,
        tuning__warm_up_steps=10**9,
    )
    fit(saving)
    seen, _, _ = fit(
        settings(tmp_path / "second", execution__compilation_cache=str(tmp_path), base_steps=400.0)
    )
    assert seen.of(FitStart)[0].config.global_batch_size == 16
    assert batches(seen)[-1] == 64
    assert not any("probe" in t.verdict.reason for t in seen.of(TuneEnd))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_program_that_names_a_memory_is_compiled_once(tmp_path, uncached):
    def steps(**changes):
        found = []
        undo = listen_for_compilations(found.append)
        fit(settings(tmp_path / str(len(changes)), base_steps=3.0, **changes))
        undo()
        return sorted(c.name for c in found)

    jax.clear_caches()
    without = steps(tuning__remember=False)
    jax.clear_caches()
    assert steps() == without


def test_readers_find_whole_files_while_several_write(tmp_path):
    path = tmp_path / FOLDER / "key.json"
    writers = 3

    def left(number):
        batch = BatchConfig(micro_batch_size=number, num_micro_batches=1, num_replicas=1)
        return ProgramMemory(timings={"": ()}, batch=batch, since_samples=0, noise=None)

    Memory(path, None).write(left(1))
    threads = [
        threading.Thread(target=lambda n=n: [Memory(path, None).write(left(n)) for _ in range(100)])
        for n in range(1, writers + 1)
    ]
    for thread in threads:
        thread.start()
    found = set()
    while any(thread.is_alive() for thread in threads):
        earlier = Memory.at(path).earlier
        assert earlier is not None
        found.add(earlier.batch.micro_batch_size)
    assert found <= set(range(1, writers + 1))
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_noise_taken_on_trust_gives_way_to_what_is_measured():
    tx = adaptive(optax.sgd(0.1), lambda *_: 1.0, base_batch_size=4)
    params = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}
    state = tx.init(params)
    grad = jax.tree.map(np.asarray, GradGroups(sqr=np.array([1.0, 2.0]), var=np.array([3.0, 8.0])))
    held = adaptation.with_noise_held(state, grad)
    told = adaptation.grad_groups(held)
    np.testing.assert_allclose(told.sqr, grad.sqr)
    np.testing.assert_allclose(told.var, grad.var)
    assert adaptation.readout(held).newest_samples == 0

    sample = NoiseSample(
        small_sqr=jnp.array([5.0, 5.0]),
        large_sqr=jnp.array([3.0, 3.0]),
        num_groups=2,
        num_samples=8,
    )
    for count in range(1, 13):
        _, held = tx.update(params, held, params, global_batch_size=8, noise=sample)
        trusted = bool(np.allclose(adaptation.grad_groups(held).sqr, grad.sqr))
        assert trusted == (count <= 8) or 8 < count < 12  # older ones count for less than one
