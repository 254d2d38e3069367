"""Checkpoints: everything comes back to the bit, on any devices; a bad one costs only itself."""

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import problems
import pytest
from absl import logging
from hypothesis import given
from hypothesis import strategies as st
from problems import Counting, Evaluated, InStep, Mean, Recorder, config, counting_config, same

from jaxgoodput import _disk
from jaxgoodput._fields.serial import dumps, encode
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import abstract_sample
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.saved import LeafKind, differences
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.events import Checkpoint, EvalEnd, FitStart, StepEnd
from jaxgoodput.parallel.place import place
from jaxgoodput.train.checkpoints.meta import OLDEST, VERSION, CheckpointMeta, WrongWorkdirError
from jaxgoodput.train.checkpoints.retention import Note, best_step, kept
from jaxgoodput.train.checkpoints.writer import Checkpoints
from jaxgoodput.train.config import Saving
from jaxgoodput.train.control import Preempted
from jaxgoodput.train.start.problem import problem_of

STEPS = 12  # of two epochs of 96 samples in batches of 16


@pytest.fixture
def told(monkeypatch):
    """What users are warned of."""
    said = []

    def warning(message, *values):
        if "cannot be read" in message:  # Orbax says a thing or two of its own
            said.append(message % values)

    monkeypatch.setattr(logging, "warning", warning)
    return said


def steps_in(workdir):
    # What a failed save began may still lie there, under a name that says so.
    found = (pathlib.Path(workdir) / "checkpoints").iterdir()
    return sorted(int(p.name) for p in found if p.name.isdigit())


def trained(workdir, count=1):
    """A run with a checkpoint at every third step; returns its last state."""
    hook = Recorder(lambda e: trainer.request_save() if e.step % 3 == 0 else None)
    devices = jax.devices()[:count]
    trainer = Counting(counting_config(workdir), hooks=[hook], devices=devices, loop=InStep)
    return trainer.fit()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A workdir with checkpoints at steps 6, 9 and 12, and the state that the run returned."""
    workdir = tmp_path_factory.mktemp("original")
    state = trained(workdir)
    assert steps_in(workdir) == [6, 9, 12]
    return workdir, state


@pytest.fixture
def workdir(original, tmp_path):
    shutil.copytree(original[0], tmp_path / "run")
    return tmp_path / "run"


def restored(workdir, count=1, trainer=None):
    """What a run in this workdir would start from."""
    trainer = trainer or Counting(counting_config(workdir), devices=jax.devices()[:count])
    engines = Engines(
        problem_of(trainer, trainer.config), abstract_sample(as_source(trainer.dataset()))
    )
    abstract = engines.on(place(trainer.devices).layout).abstract_state()
    found = Checkpoints(str(workdir), keep=3)
    try:
        return found.restore(lambda meta: abstract)
    finally:
        found.close()


def test_the_last_few_are_kept_and_hold_the_state_to_the_bit(original, workdir):
    found = restored(workdir)
    assert found.meta.step == STEPS
    assert same(found.state, original[1])
    assert int(found.state.step) == STEPS
    assert found.meta.samples == 2 * 96
    assert found.meta.cursor == Cursor(seed=0, epoch=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after", [(8, 4), pytest.param(4, 1, marks=pytest.mark.nightly), (1, 8)]
)
def test_a_state_moves_to_another_number_of_devices(tmp_path, before, after):
    state = trained(tmp_path, count=before)
    found = restored(tmp_path, count=after)
    assert same(found.state, state)
    for leaf in jax.tree.leaves(found.state):
        assert leaf.sharding.device_set == set(jax.devices()[:after])

    seen = Recorder()
    more = Counting(
        counting_config(tmp_path, epochs=3), hooks=[seen], devices=jax.devices()[:after]
    ).fit()
    assert seen.of(StepEnd)[0].step == STEPS + 1
    assert {s.config.global_batch_size for s in seen.of(StepEnd)} == {16}
    np.testing.assert_array_equal(more.params["count"], 3)


class Kept(InStep):
    """Keeps what is in its books when it begins and when it ends."""

    books: list[tuple[dict[str, Any], float]] = []

    def run(self):
        self._note()
        try:
            return super().run()
        finally:
            self._note()

    def _note(self):
        self.books.append((self.analyst.timings(), sum(self.ledger.snapshot().values())))


@pytest.mark.slow
def test_timings_statistics_batch_and_ledger_come_back(tmp_path):
    class First(Kept):
        books = []

    class Again(Kept):
        books = []

    def grow(event):
        if event.step == 10:
            trainer.request_batch(8)

    limits = BatchLimits(base=16, max=64, micro=(2, 8), sizes=(2, 4, 8))
    settings = counting_config(
        tmp_path, policy="goodput", batch=limits, epochs=4, tuning__warm_up_steps=10**9
    )
    four: Any = {"devices": jax.devices()[:4]}
    trainer = Counting(settings, hooks=[Recorder(grow)], loop=First, **four)
    trainer.fit()
    saved = restored(tmp_path, trainer=trainer, count=4).meta
    assert saved.batch == BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=4)
    timings, wall_s = First.books[-1]
    assert encode(saved.timings) == encode(timings)
    rows = saved.timings[""]  # of the one strategy, which has no name
    assert {row.key.micro_batch_size for row in rows} == {4, 8}
    assert 0 < saved.ledger.wall_s <= wall_s

    seen = Recorder()
    Counting(dataclasses.replace(settings, epochs=6), hooks=[seen], loop=Again, **four).fit()
    timings, wall_s = Again.books[0]
    assert encode(timings) == encode(saved.timings)
    assert wall_s >= saved.ledger.wall_s
    assert seen.of(FitStart)[0].restart == 1
    assert seen.of(StepEnd)[0].config.global_batch_size == 32
    # The noise statistics are part of the state: nobody starts over.
    assert seen.of(StepEnd)[0].metrics["noise_samples"] > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, expected", [(1, 32), pytest.param(8, 32, marks=pytest.mark.nightly), (4, 32)]
)
def test_the_saved_batch_is_kept_on_other_devices_where_it_can_be(tmp_path, count, expected):
    limits = BatchLimits(base=16, max=64, micro=(1, 32), sizes=(2, 4, 8, 16, 32))

    def grow(event):
        if event.step == 2:
            trainer.request_batch(16)

    settings = counting_config(
        tmp_path,
        policy="goodput",
        batch=limits,
        epochs=20,
        tuning__warm_up_steps=10**9,
        execution__background_compile=True,
    )
    trainer = Counting(settings, hooks=[Recorder(grow)], devices=jax.devices()[:2])
    trainer.fit()
    seen = Recorder()
    settings = dataclasses.replace(settings, epochs=21)
    Counting(settings, hooks=[seen], devices=jax.devices()[:count]).fit()
    assert seen.of(StepEnd)[0].config.global_batch_size == expected
    assert seen.of(StepEnd)[0].config.num_replicas == count


def test_saves_are_periodic_by_time(tmp_path, clock):
    seen = Recorder(lambda e: clock.advance(10.0))
    settings = config(tmp_path, saving__every_s=30.0, saving__keep=2, saving__at_end=False)
    Mean(settings, clock=clock, hooks=[seen], loop=InStep).fit()
    assert [c.step for c in seen.of(Checkpoint)] == [3, 6, 9, 12][: len(seen.of(Checkpoint))]
    assert len(seen.of(Checkpoint)) >= 3
    assert all(c.error is None for c in seen.of(Checkpoint))
    assert steps_in(tmp_path) == [c.step for c in seen.of(Checkpoint)][-2:]


def truncate(path, keep):
    with open(path, "r+b") as file:
        file.truncate(int(path.stat().st_size * keep))


def files(folder, pattern="**/*"):
    found = [p for p in folder.glob(pattern) if p.is_file()]
    assert found, f"{folder} has no {pattern}"
    return found


def cut_all(newest):
    for path in files(newest):
        truncate(path, 0.5)


def empty_all(newest):
    for path in files(newest):
        truncate(path, 0.0)


def cut_arrays(newest):
    for path in files(newest, "state/**/d/*"):
        truncate(path, 0.5)


def cut_meta(newest):
    for path in files(newest, "meta/*"):
        truncate(path, 0.5)


def no_meta(newest):
    shutil.rmtree(newest / "meta")


def no_state(newest):
    shutil.rmtree(newest / "state")


def garbage_meta(newest):
    (newest / "meta" / "metadata").write_bytes(b"\x00\xff garbage")


def a_foreign_meta(newest):
    (newest / "meta" / "metadata").write_text("{}")


def nothing_inside(newest):
    shutil.rmtree(newest)
    newest.mkdir()


def no_sums(newest):
    (newest / _disk.SUMS).unlink()


def one_bit(newest):
    (path,) = files(newest, "state/manifest.ocdbt")
    flip(path, 8 * path.stat().st_size // 2)


def a_file_too_many(newest):
    (newest / "state" / "d" / "new").write_bytes(b"")


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGES = [
    cut_all,
    empty_all,
    cut_arrays,
    cut_meta,
    no_meta,
    no_state,
    garbage_meta,
    a_foreign_meta,
    nothing_inside,
]
SILENT = [no_sums, one_bit, a_file_too_many]


# Orbax leaves coroutines behind where a read fails.
left_behind = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@left_behind
@pytest.mark.parametrize("damage", [*DAMAGES, *SILENT])
def test_a_damaged_newest_is_named_and_set_aside_and_the_one_before_is_used(workdir, told, damage):
    damage(workdir / "checkpoints" / "12")
    found = restored(workdir)
    gc.collect()
    assert found.meta.step == 9
    (warning,) = told
    assert str(workdir / "checkpoints" / "12") in warning and "one before it" in warning
    assert steps_in(workdir) == [6, 9]
    assert (workdir / "damaged_checkpoints" / "12").is_dir()
    assert str(workdir / "damaged_checkpoints" / "12") in warning


@pytest.mark.slow
@left_behind
def test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one(workdir, told, original):
    cut_all(workdir / "checkpoints" / "12")
    cut_meta(workdir / "checkpoints" / "9")
    seen = Recorder()
    state = Counting(counting_config(workdir), hooks=[seen], devices=jax.devices()[:1]).fit()
    assert seen.of(FitStart)[0].step == 6
    np.testing.assert_array_equal(state.params["count"], 2)
    np.testing.assert_array_equal(state.params["w"], original[1].params["w"])
    assert steps_in(workdir) == [6, 12]
    assert len(told) == 2
    gc.collect()


def test_a_write_that_was_cut_off_is_not_a_checkpoint(workdir, told):
    # What a killed process leaves: the folder has its final name only once it is complete.
    newest = workdir / "checkpoints" / "12"
    newest.rename(workdir / "checkpoints" / "12.orbax-checkpoint-tmp")
    assert restored(workdir).meta.step == 9
    assert not told


@left_behind
def test_damage_everywhere_starts_over_and_says_so(workdir, told):
    for step in steps_in(workdir):
        cut_all(workdir / "checkpoints" / str(step))
    assert restored(workdir) is None
    assert len(told) == 3
    gc.collect()


@left_behind
@pytest.mark.slow
@pytest.mark.parametrize("num_flips", [10, pytest.param(200, marks=pytest.mark.nightly)])
def test_no_damage_of_any_file_is_restored_in_silence(original, tmp_path, told, num_flips):
    """Each file deleted, cut, zeroed, and bits flipped: the checkpoint before, or the same bits."""
    found = {step: restored_at(original[0], step) for step in (9, 12)}
    rng = np.random.default_rng(12)
    newest = original[0] / "checkpoints" / "12"
    names = [p.relative_to(newest) for p in files(newest)]
    assert pathlib.Path(_disk.SUMS) in names and len(names) > 8

    def flipped(path):
        flip(path, int(rng.integers(8 * path.stat().st_size)))

    whole = {
        "deleted": pathlib.Path.unlink,
        "cut": lambda path: truncate(path, 0.5),
        "emptied": lambda path: truncate(path, 0.0),
        "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    }
    cases = [(name, how, harm) for name in names for how, harm in whole.items()]
    drawn = rng.choice(len(names), num_flips)
    cases += [(names[i], "flipped", flipped) for i in drawn]
    used = {9: 0, 12: 0}
    for name, how, harm in cases:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(original[0], tmp_path / "run")
        harm(tmp_path / "run" / "checkpoints" / "12" / name)
        told.clear()
        got = restored(tmp_path / "run")
        used[got.meta.step] += 1
        wanted = found[got.meta.step]
        # As text: times that are not known are NaN, which no other NaN is equal to.
        assert dumps(got.meta) == dumps(wanted.meta), (name, how)
        assert same(got.state, wanted.state), (name, how)
        assert len(told) == (got.meta.step == 9), (name, how, told)
        # What lies within is never used once it was touched.
        assert got.meta.step == 9 or len(name.parts) == 1 or how == "zeroed", (name, how)
    print(used)
    gc.collect()


@left_behind
def test_of_a_damaged_checkpoint_only_the_damage_is_told(workdir, told):
    """The metadata is still valid, but for what the run remembered."""
    metadata = workdir / "checkpoints" / "12" / "meta" / "metadata"
    saved = json.loads(metadata.read_text())
    saved["memory"]["findings"]["evidence"]["_calibration"]["likelihood"].pop()
    metadata.write_text(json.dumps(saved))
    assert restored(workdir).meta.step == 9
    (message,) = told
    assert "meta/metadata is not what was written" in message
    gc.collect()


def restored_at(workdir, step):
    """What a checkpoint that nobody has touched gives back."""
    with contextlib.ExitStack() as stack:
        hidden = [p for p in (workdir / "checkpoints").iterdir() if int(p.name) > step]
        for path in hidden:
            path.rename(workdir / path.name)
            stack.callback((workdir / path.name).rename, path)
        return restored(workdir)


# -- who writes, which stay, which data --------------------------------------------------------------


def test_a_checkpoint_has_its_name_only_with_its_sums_and_the_newest_is_asked_for(
    workdir, tmp_path
):
    found = Checkpoints(str(workdir), keep=3)
    assert all(_disk.is_sealed(workdir / "checkpoints" / str(step)) for step in steps_in(workdir))
    (workdir / "checkpoints" / "15.orbax-checkpoint-tmp").mkdir()
    (workdir / "checkpoints" / "15.orbax-checkpoint-tmp" / _disk.SUMS).touch()
    assert found.newest() == 12
    found.close()
    found = Checkpoints(str(tmp_path / "empty"), keep=3)
    assert found.newest() is None
    found.close()


def test_two_runs_in_one_workdir_are_refused_and_leftovers_go_at_the_start(workdir):
    left = workdir / "checkpoints" / "15.orbax-checkpoint-tmp"
    left.mkdir()
    again = Counting(counting_config(workdir, epochs=3))
    with _disk.held(workdir), pytest.raises(_disk.InUse, match=f"process {os.getpid()} on"):
        again.fit()
    assert left.is_dir()
    again.fit()
    assert not left.exists()


notes = st.dictionaries(
    st.integers(1, 200),
    st.builds(Note, st.floats(0, 100), st.sampled_from([np.nan, np.inf, 0.5, 1.0, 2.0])),
)


@given(notes=notes, keep=st.integers(1, 4), mode=st.sampled_from(["min", "max"]))
def test_the_newest_the_best_and_the_first_of_every_stretch_stay(notes, keep, mode):
    saving = Saving(keep=keep, best="loss", best_mode=mode, keep_every_base_steps=10.0)
    stay = kept(notes, saving)
    newest = set(sorted(notes)[-keep:])
    assert newest <= stay <= set(notes)
    values = {step: note.value for step, note in notes.items() if np.isfinite(note.value)}
    best = best_step(notes, saving)
    assert (best is None) == (not values)
    if best is not None:
        assert best in stay and values[best] == (min if mode == "min" else max)(values.values())
    firsts = {}
    for step in sorted(notes):
        firsts.setdefault(int(notes[step].progress // 10), step)
    assert stay == newest | ({best} - {None}) | {s for k, s in firsts.items() if k > 0}
    assert kept({step: notes[step] for step in stay}, saving) == stay
    assert kept(notes, Saving(keep=keep)) == newest


def test_checkpoints_by_progress_and_every_so_many_of_them_stay(tmp_path):
    settings = config(
        tmp_path,
        base_steps=20.0,
        saving__every_s=None,
        saving__every_base_steps=3.0,
        saving__keep=1,
        saving__keep_every_base_steps=6.0,
        saving__at_end=False,
    )
    seen = Recorder()
    Mean(settings, hooks=[seen], loop=InStep).fit()
    steps = [c.step for c in seen.of(Checkpoint)]
    assert len(steps) >= 5 and {b - a for a, b in itertools.pairwise(steps)} == {3}
    progress = {s.step: s.progress for s in seen.of(StepEnd)}
    firsts = {}
    for step in steps:
        # What is known of the progress is that of the step before.
        firsts.setdefault(progress[step - 1] // 6, step)
    assert steps_in(tmp_path) == sorted({s for k, s in firsts.items() if k} | {steps[-1]})


class Wavering(Evaluated):
    """An evaluation that says what it is told to."""

    values: list[float] = []

    def summarize(self, outputs):
        return {**super().summarize(outputs), "score": self.values.pop(0)}


def wavering(tmp_path, *values, **settings):
    """A run with an evaluation at every second base step; the steps at which it saved."""
    usual = {
        "evaluation__every_base_steps": 2.0,
        "saving__best": "score",
        "saving__best_mode": "max",
        "saving__keep": 1,
        "saving__every_s": None,
    }
    seen = Recorder()
    trainer = Wavering(config(tmp_path, **{**usual, **settings}), hooks=[seen], loop=InStep)
    trainer.values = list(values)
    trainer.fit()
    assert not trainer.values
    return [e.step for e in seen.of(EvalEnd)], [c.step for c in seen.of(Checkpoint)]


@pytest.mark.slow
def test_the_best_is_saved_when_it_is_found_and_stays(tmp_path):
    evaluated, saved = wavering(tmp_path, 1.0, np.nan, 3.0, 3.0, 2.0, 0.0)
    assert saved == [evaluated[0], evaluated[2], evaluated[-1]]
    assert steps_in(tmp_path) == [evaluated[2], evaluated[-1]]
    # The next run knows the best of this one.
    later, saved = wavering(tmp_path, 2.5, 2.9, 3.5, 0.0, 0.0, 0.0, epochs=4)
    assert saved == [later[2], later[-1]]
    assert steps_in(tmp_path) == [later[2], later[-1]]
    found = Checkpoints(str(tmp_path), keep=Saving(keep=1, best="score", best_mode="max"))
    assert found.best() == later[2] and found.newest() == later[-1]
    found.close()


def test_a_metric_that_no_evaluation_has_is_named(tmp_path):
    with pytest.raises(ValueError, match="best is 'scores'.*one of distance, first, score"):
        wavering(tmp_path, *[0.0] * 6, saving__best="scores")


class Poisoned(Mean):
    """Of twelve batches the fifth to the eighth are not finite."""

    def __init__(self, settings, **options):
        bad = (np.arange(192) >= 64) & (np.arange(192) < 128)
        data = {"x": np.ones((192, 4), np.float32), "bad": bad}
        super().__init__(settings, data=data, **options)

    def loss(self, params, batch, key):
        return jnp.where(batch["bad"], jnp.nan, super().loss(params, batch, key))


def poisoned_config(workdir, **settings):
    return config(workdir, epochs=1, shuffle=False, saving__at_end=False, **settings)


def test_what_is_due_while_updates_are_skipped_waits_for_one_that_is_applied(tmp_path, clock):
    seen = Recorder(lambda e: clock.advance(10.0))
    settings = poisoned_config(tmp_path, saving__every_s=1.0, saving__every_base_steps=0.5)
    Poisoned(settings, clock=clock, hooks=[seen], loop=InStep).fit()
    finite = {s.step: s.finite for s in seen.of(StepEnd)}
    assert [step for step, held in finite.items() if not held] == [5, 6, 7, 8]
    # The newest known result is that of the step before.
    assert [c.step for c in seen.of(Checkpoint)] == [1, 2, 3, 4, 5, 10, 11, 12]


@pytest.mark.slow
def test_a_stop_saves_what_skipped_updates_have_left_as_it_was(tmp_path):
    whole = Poisoned(poisoned_config(tmp_path / "whole")).fit()
    stop = Recorder(lambda e: trainer.request_stop() if e.step == 6 else None)
    trainer = Poisoned(poisoned_config(tmp_path / "parts"), hooks=[stop], loop=InStep)
    with pytest.raises(Preempted):
        trainer.fit()
    assert steps_in(tmp_path / "parts") == [6]
    seen = Recorder()
    parts = Poisoned(poisoned_config(tmp_path / "parts"), hooks=[seen]).fit()
    assert [s.finite for s in seen.of(StepEnd)] == [False] * 2 + [True] * 4
    assert same(parts.params, whole.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, what",
    [
        ({"num_samples": 97}, "the data set has 97 samples instead of 96"),
        ({"num_samples": 95}, "the data set has 95 samples instead of 96"),
        ({"offset": 1.0}, "the data set holds other samples"),
        ({"base": 8}, "batch.base is 8 instead of 16"),
    ],
)
def test_other_data_and_another_base_are_refused_unless_allowed(tmp_path, change, what):
    stop = Recorder(lambda e: first.request_stop() if e.step == 11 else None)
    first = Mean(config(tmp_path), hooks=[stop], loop=InStep)
    with pytest.raises(Preempted):
        first.fit()
    change = dict(change)
    limits = BatchLimits(base=change.pop("base", 16), max=64, micro=(1, 64))
    data = problems.rows(**change)
    with pytest.raises(WrongWorkdirError, match=what) as refused:
        Mean(config(tmp_path, batch=limits), data=data).fit()
    assert "set Config.saving.allow_changed_data" in str(refused.value)
    assert steps_in(tmp_path) == [11]
    allowed = config(tmp_path, epochs=4, batch=limits, saving__allow_changed_data=True)
    seen = Recorder()
    Mean(allowed, data=data, hooks=[seen]).fit()
    assert seen.of(FitStart)[0].step == 11 and len(seen.of(StepEnd)) > 8
    Mean(config(tmp_path, epochs=5, batch=limits), data=data).fit()  # they are the run's own now


def test_another_model_is_refused_naming_the_leaf_and_both_shapes(workdir):
    class Wider(Counting):
        def init(self, key):
            return {**super().init(key), "w": jnp.zeros(7)}

        def loss(self, params, batch, key):
            return super().loss({**params, "w": params["w"][:4]}, batch, key)

    with pytest.raises(WrongWorkdirError) as refused:
        Wider(counting_config(workdir)).fit()
    message = str(refused.value)
    assert "['w']" in message and "float32(4,)" in message and "float32(7,)" in message
    assert "or another workdir" in message
    assert steps_in(workdir) == [6, 9, 12]


def test_another_optimizer_is_refused_naming_what_it_lacks(workdir):
    with pytest.raises(WrongWorkdirError, match=r"trace.*not in the checkpoint"):
        Counting(counting_config(workdir), tx=optax.sgd(0.05, momentum=0.9)).fit()


# -- what the host saves -----------------------------------------------------------------------------

# As JSON: what checks the types of a dataclass draws random numbers of its own.
counts = st.integers(0, 10**9)
seconds = st.floats(0, 1e9)


def objects(**fields):
    return st.fixed_dictionaries(fields)


batches = objects(
    micro_batch_size=st.integers(1, 10**6),
    num_micro_batches=st.integers(1, 1024),
    num_replicas=st.integers(1, 1024),
    strategy=st.sampled_from(["", "data8", "fsdp4.tensor2"]),
)
PARTS = ("step_s", "accumulate_s", "reduce_s", "update_s")
parts = objects(**dict.fromkeys(PARTS, seconds))
keys = objects(
    **dict.fromkeys(("num_nodes", "num_replicas", "micro_batch_size", "num_micro_batches"), counts),
    measured=st.booleans(),
)
steps = st.lists(parts, max_size=3)
tables = st.lists(objects(key=keys, last=counts, clean=steps, busy=steps), max_size=3)
saved_metas = objects(
    step=counts,
    samples=counts,
    cursor=objects(seed=counts, epoch=counts, offset=counts),
    stream=st.none()
    | objects(
        place=counts,
        state=st.text(),
        is_bytes=st.booleans(),
        is_pickle=st.booleans(),
        first=st.none() | st.text(),
        replays=st.booleans(),
    ),
    batch=batches,
    timings=st.dictionaries(st.sampled_from(["", "data8", "fsdp8"]), tables, max_size=2),
    statistics_every=st.integers(1, 64),
    ledger=objects(
        saved_at=seconds, wall_s=seconds, seconds=st.dictionaries(st.text(), seconds, max_size=3)
    ),
    leaves=st.dictionaries(
        st.text(), objects(shape=st.lists(counts, max_size=3), dtype=st.just("float32")), max_size=3
    ),
    progress=seconds,
    metrics=st.dictionaries(st.text(), seconds, max_size=2),
    data=st.none()
    | objects(
        num_samples=counts,
        content=st.none() | st.text(),
        whole=st.none() | st.text(),
        stated=st.none() | st.text(),
        shuffle=st.none() | st.booleans(),
    ),
    base_batch_size=st.none() | counts,
    tables=st.dictionaries(st.text(), counts, max_size=2),
    lost=st.none() | st.dictionaries(st.text(), counts, max_size=2),
    began=st.dictionaries(st.text(), st.text(), max_size=2),
    memory=st.none(),  # see test_run_memory.py
    version=st.integers(OLDEST, VERSION),
)


@given(saved=saved_metas)
def test_what_the_host_saved_comes_back_through_json(saved):
    meta = CheckpointMeta.from_json(saved)
    assert meta.to_json() == saved
    assert CheckpointMeta.from_json(json.loads(json.dumps(meta.to_json()))) == meta


@given(saved=saved_metas, version=st.integers(0, 100).filter(lambda v: not OLDEST <= v <= VERSION))
def test_another_version_is_refused_by_its_number(saved, version):
    saved = {**saved, "version": version, "news": "of that time"}
    told = (
        f"version {version}, but this program reads versions {OLDEST} to {VERSION}.* that wrote it"
    )
    with pytest.raises(WrongWorkdirError, match=told):
        CheckpointMeta.from_json(saved)


def test_metadata_from_before_versions_are_refused_and_not_taken_for_damaged():
    with pytest.raises(WrongWorkdirError, match="version 0, but this program reads versions"):
        CheckpointMeta.from_json({"step": 3, "analyst": {}})


def test_differences_say_what_is_missing_on_which_side():
    same = LeafKind((), "int32")
    saved = {"a": LeafKind((2,), "float32"), "b": LeafKind((3,), "int32"), "c": same}
    wanted = {"a": LeafKind((2,), "bfloat16"), "c": same, "d": LeafKind((1, 2), "int8")}
    assert differences(saved, saved) == []
    assert differences(saved, wanted) == [
        "a is float32(2,) in the checkpoint, bfloat16(2,) in the model",
        "b is int32(3,) in the checkpoint, the model has no such leaf",
        "d is not in the checkpoint, the model has int8(1, 2)",
    ]


@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_a_workdir_that_cannot_be_made_is_refused_before_anything_else(tmp_path, inside):
    (tmp_path / "file").write_text("not a folder")
    at = tmp_path / "file"
    with pytest.raises(NotADirectoryError, match="cannot create") as refused:
        Mean(config(at / inside)).fit()
    assert f"cannot create the workdir {at / inside}: {at} is a file. Name a folder" in str(
        refused.value
    )


def test_an_optimizer_state_that_is_not_arrays_is_refused_by_name(tmp_path):
    inner = optax.sgd(0.1)

    def init(params) -> Any:
        return {"inner": inner.init(params), "note": "warm-up"}

    def update(updates, state: Any, params=None) -> Any:
        return inner.update(updates, state["inner"], params)[0], state

    tx = optax.GradientTransformation(init, update)
    with pytest.raises(TypeError, match=r"optimizer\(\)\['note'\] is a str.*Keep only arrays"):
        Mean(config(tmp_path), tx=tx).fit()


FULL = """
    import pathlib, shutil, sys
    import jax
    jax.config.update("jax_platforms", "cpu")
    import problems
    from jaxgoodput.train import loop
    from jaxgoodput.train.duties.saving import Saver

    workdir = pathlib.Path(sys.argv[1])
    block = workdir / "block"

    class Filler:
        failed = 0

        def on_step_end(self, event):
            if event.step == 20:
                free = shutil.disk_usage(workdir).free
                with open(block, "wb") as file:
                    file.write(bytes(max(free - 8192, 0)))
            if event.step in (5, 25, 45):
                trainer.request_save()
            if event.step == 60:
                block.unlink()
            if event.step == 80:
                trainer.finish()

        def on_checkpoint(self, event):
            print("checkpoint", event.step, event.error)

    class Patient(Saver):
        def save(self, *, wait=False):
            return super().save(wait=wait or self.start.now.step == 5)

    loop.Saver = Patient

    class Slow(problems.Mean):
        def init(self, key):
            return {**super().init(key), "ballast": jax.numpy.zeros(100_000)}

    settings = problems.config(workdir, base_steps=1e6)
    trainer = Slow(settings, hooks=[Filler()], loop=problems.InStep)
    trainer.fit()
"""


@pytest.fixture
def small_disk(tmp_path):
    """Eight megabytes that are nobody else's."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mounted)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here (that needs root)")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(small_disk):
    script = textwrap.dedent(FULL)
    ended = subprocess.run(
        [sys.executable, "-c", script, str(small_disk)],
        cwd=pathlib.Path(__file__).parents[1] / "support",
        env={**os.environ, **compilations.JOBS},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    saved = dict(line.split(" ", 2)[1:] for line in ended.stdout.splitlines())
    print(ended.stdout, ended.stderr)
    assert saved["5"] == "None"
    assert any("space" in error for error in saved.values()), saved
    assert "Training goes on" in ended.stderr and "Free some space" in ended.stderr
    # On a busy machine the compiler adds lines. If several files of a checkpoint could not be written, Orbax
    # raises one of the errors, and asyncio prints the others.
    own = [line for line in ended.stderr.splitlines() if ":absl:" in line]
    assert 1 <= len(own) < 12
    assert "Traceback" not in ended.stderr or "exception was never retrieved" in ended.stderr
    assert "/jaxgoodput/train/" not in ended.stderr  # no traceback of ours
    # The old one stayed, and the last was written once there was room again.
    assert steps_in(small_disk) == [5, 80]


def test_a_checkpoint_with_other_noise_statistics_is_named(tmp_path):
    Mean(config(tmp_path)).fit()
    meta = next((tmp_path / "checkpoints").rglob("meta/metadata"))
    saved = json.loads(meta.read_text())
    own = ".opt_state.own.vector"
    leaves = {**saved["leaves"], own: {"shape": [99], "dtype": "float32"}}
    meta.write_text(json.dumps({**saved, "leaves": leaves}))
    _disk.seal(meta.parents[1])
    with pytest.raises(WrongWorkdirError, match="other statistics of the gradient noise"):
        Mean(config(tmp_path, epochs=3)).fit()
