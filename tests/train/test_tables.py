"""Tables of rows in the Trainer: they train as if all rows were in memory, whatever the batch does."""

import dataclasses
import errno
import pathlib
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Recorder, same
from table_runs import (
    SAVED,
    SIZES,
    Changing,
    Two,
    close_rows,
    dense,
    rows_of,
    same_rows,
    samples,
    settings,
)

import jaxgoodput as jg
from jaxgoodput.embedding.store import RowStore, read_manifest
from jaxgoodput.engine.programs.rows import WithRows, as_seen
from jaxgoodput.observe import hooks
from jaxgoodput.observe.events import EvalEnd, FitStart, StepEnd, Window
from jaxgoodput.optim.noise import leaf_groups, squared_norms
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.checkpoints.writer import Checkpoints
from jaxgoodput.train.start.problem import problem_of
from jaxgoodput.train.tables.commits import Opener
from jaxgoodput.train.tables.feed import TableFeed


@pytest.mark.slow
def test_every_row_is_the_one_of_a_dense_table_while_the_batch_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "MOST_BEHIND", 4)  # so that no two changes are asked for at once
    seen = Changing({15: (256,), 40: (128,), 70: (64,)})
    quiet = {"policy": "goodput", "tuning__warm_up_steps": 10**6, "base_steps": 200.0}
    quiet["rule"] = jg.rules.square_root  # which no rounding of the noise changes
    trainer = seen.trainer = Two(settings(tmp_path, **quiet), hooks=[seen])
    state = trainer.fit()
    steps = seen.of(StepEnd)
    assert {one.num_samples for one in steps} == {64, 128, 256}
    for table in seen.tables.values():
        counts = table.counts
        assert min(counts.on_device, counts.in_ram, counts.on_disk, counts.new) > 30
    expected, params = dense(trainer, steps)
    # To rounding: the dense table is always trained by the program that measures the noise.
    for name in params:
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-4, atol=1e-6)
    for table, fields in rows_of(trainer).items():
        for field, found in fields.items():
            np.testing.assert_allclose(found, expected[table][field], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_several_devices_train_the_rows_of_a_dense_table(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "MOST_BEHIND", 4)
    seen = Changing({15: (64,), 40: (32,)})  # of each of four
    quiet = {"policy": "goodput", "tuning__warm_up_steps": 10**6, "base_steps": 100.0}
    quiet["rule"] = jg.rules.square_root
    trainer = seen.trainer = Two(
        settings(tmp_path, **quiet), hooks=[seen], devices=jax.devices()[:4]
    )
    state = trainer.fit()
    steps = seen.of(StepEnd)
    assert {one.num_samples for one in steps} == {64, 128, 256}
    expected, params = dense(trainer, steps)
    close_rows(rows_of(trainer), expected)
    for name in params:
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-3, atol=1e-5)


def test_noise_of_rows_that_are_read_often_is_apart(tmp_path):
    trainer = Two(settings(tmp_path))
    problem = problem_of(trainer, trainer.config)
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(size=(6, dim)) for name, (_, dim) in SIZES.items()}
    own = {"in": rng.normal(size=(5, 2)), "out": rng.normal(size=3)}
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), WithRows(own=own, rows=rows))
    often = {name: jnp.asarray(rng.random(6) < 0.5) for name in rows}
    scale = jax.tree.map(lambda x: 1 / (1 + x**2), tree)
    scale.rows["user"] = scale.rows["user"].at[1].set(0.0)  # not known yet
    known = dataclasses.replace(problem, is_often=often)
    found = known.apart(lambda pick: squared_norms(pick(tree, 0.0), pick(scale, 1.0)))
    parts = {
        name: {
            "often": (x**2 * scale.rows[name])[np.asarray(often[name])],
            "seldom": (x**2 * scale.rows[name])[~np.asarray(often[name])],
        }
        for name, x in tree.rows.items()
    }
    expected = WithRows(own=jax.tree.map(lambda x, s: x**2 * s, tree.own, scale.own), rows=parts)
    wanted = [float(x.sum()) for x in jax.tree.leaves(expected)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    names, _ = leaf_groups(as_seen(tree))
    assert names == (
        "own/in",
        "own/out",
        *(f"rows/{n}/{k}" for n in sorted(SIZES) for k in ("often", "seldom")),
    )


def saved_steps(workdir):
    return [int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdigit()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts: its state and its rows."""
    trainer = Two(settings(tmp_path_factory.mktemp("whole"), **SAVED))
    return trainer.fit(), rows_of(trainer)


@pytest.mark.slow
def test_evaluating_changes_no_row_and_takes_those_of_the_states_step(tmp_path, whole):
    seen = Recorder()
    evaluating = settings(tmp_path, evaluation__every_base_steps=15.0, **SAVED)
    trainer = Two(evaluating, hooks=[seen])
    state = trainer.fit()
    assert same(state.params, whole[0].params)
    same_rows(rows_of(trainer), whole[1])
    ends = seen.of(EvalEnd)
    assert len(ends) > 2
    assert trainer.evaluate(state) == ends[-1].metrics
    held_out = trainer.eval_dataset()
    errors = trainer.predict(state, held_out)["error"]
    assert errors.mean() == pytest.approx(ends[-1].metrics["error"])

    def embedded(params, model_state, batch, rows):
        return {"first": rows["item"].reshape(len(rows["item"]), -1)[:, 0]}

    assert len(trainer.predict(state, held_out, embedded)["first"]) == len(errors)
    before = trainer.restore(min(saved_steps(tmp_path)))
    assert trainer.evaluate(before)["error"] != ends[-1].metrics["error"]
    with pytest.raises(ValueError, match="no commit of step 10"):
        trainer.evaluate(dataclasses.replace(before, step=jnp.asarray(10)))


def worker(workdir, *arguments):
    """A run in a process of its own: how it ended."""
    file = pathlib.Path(__file__).with_name("table_worker.py")
    command = [sys.executable, file, workdir, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("fatal", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_a_run_that_dies_between_the_commit_and_the_checkpoint_goes_on_with_the_same_bits(
    tmp_path, fatal
):
    # All in processes alike: another kind may round sums in another order.
    assert worker(tmp_path / "whole") == 0
    assert worker(tmp_path / "killed", fatal) == -signal.SIGKILL
    trainers = [Two(settings(tmp_path / name, **SAVED)) for name in ("whole", "killed")]
    with trainers[1].tables()["item"].open() as table:
        commits = {said["step"] for said in table.commits().values()}
    safe = max(saved_steps(tmp_path / "killed"), default=0)
    assert max(commits) > safe  # a commit that no checkpoint names
    assert (safe > 0) == (fatal > 1)
    assert worker(tmp_path / "killed") == 0
    assert same(*(trainer.restore().params for trainer in trainers))
    same_rows(*map(rows_of, trainers))


@pytest.mark.slow
def test_where_a_table_is_damaged_the_checkpoint_before_is_used(tmp_path, whole):
    trainer = Two(settings(tmp_path, **SAVED))
    trainer.fit()
    safe, newest = sorted(saved_steps(tmp_path))
    folder = trainer.tables()["user"].folder_of()
    named = {}
    with trainer.tables()["user"].open() as table:
        for number, said in table.commits().items():
            manifest = read_manifest(folder / f"commits/{number:08d}.json")
            named[said["step"]] = {listed.name for listed in manifest.segments}
    damaged = folder / min(named[newest] - named[safe])
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"damaged!!")
    seen = Recorder()
    again = Two(settings(tmp_path, **SAVED), hooks=[seen])
    state = again.fit()
    assert seen.of(FitStart)[0].step == safe
    assert same(state.params, whole[0].params)
    same_rows(rows_of(again), whole[1])


@pytest.mark.slow
def test_rows_of_a_checkpoint_that_another_process_cannot_read_are_put_away(
    tmp_path, whole, monkeypatch
):
    Two(settings(tmp_path, **{**SAVED, "base_steps": 20.0, "saving__keep": 1})).fit()
    opened, of_checkpoint = [], Opener.of_checkpoint

    def opens(self, commits):
        opened.append(of_checkpoint(self, commits))
        return opened[-1]

    everywhere, heard = Checkpoints._everywhere, []

    def damaged_elsewhere(self, holds):
        heard.append(len(opened))
        return everywhere(self, holds) and heard.count(1) != 1  # asked first behind that

    monkeypatch.setattr(Opener, "of_checkpoint", opens)
    monkeypatch.setattr(Checkpoints, "_everywhere", damaged_elsewhere)
    seen = Recorder()
    again = Two(settings(tmp_path, **SAVED), hooks=[seen])
    state = again.fit()
    assert len(opened) == 1 and seen.of(FitStart)[0].step == 0
    assert same(state.params, whole[0].params)
    same_rows(rows_of(again), whole[1])


@pytest.mark.slow
def test_a_full_disk_of_a_table_is_not_said_to_be_the_workdirs(tmp_path, monkeypatch, caplog):
    def refuses(*_, **options):
        raise OSError(
            errno.ENOSPC, "No space left on device: /t takes no more rows; make room there"
        )

    monkeypatch.setattr(RowStore, "commit", refuses)
    with pytest.raises(jg.NotSaved):
        Two(settings(tmp_path, **{**SAVED, "base_steps": 12.0})).fit()
    said = [r.getMessage() for r in caplog.records if "was not written" in r.getMessage()]
    assert said and all("make room there" in x and "writable" not in x for x in said)


@pytest.mark.slow
def test_what_feeding_takes_is_told_of_every_window(tmp_path, monkeypatch):
    monkeypatch.setattr(TableFeed, "feeding_s", 1e-5)  # less than any step takes
    seen = Recorder()
    Two(settings(tmp_path, reporting__window_s=1e-6, base_steps=10.0), hooks=[seen]).fit()
    feeding = [one.feeding_s for one in seen.of(Window)]
    assert feeding[-1] == 1e-5


def with_item(change):
    data = samples()
    data["item"] = change(data["item"])
    return data


def put(value):
    def change(ids):
        ids = ids.copy()
        ids[700:] = value
        return ids

    return change


class Stream:
    """Samples that can be read once."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return {name: x[self.at - 1] for name, x in self.data.items()}

    def get_state(self):
        return self.at

    def set_state(self, state):
        self.at = state


class NoRows(Two):
    def loss(self, params, batch, key):  # pyright: ignore[reportIncompatibleMethodOverride]
        return batch["label"]


class OtherIds(Two):
    def ids(self, batch):
        return {"item": batch["item"]}


class FlatIds(Two):
    def ids(self, batch):
        return {name: batch[name].ravel() for name in SIZES}


class Labelled(Two):
    def labels(self, params):
        return {"in": "a", "out": "b"}


class NoTable(Two):
    def tables(self) -> Any:
        return {"item": np.zeros(3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda s: Two(s, data=with_item(put(2500))), ValueError, "Table 'item': id 2500 at"),
        (lambda s: Two(s, data=with_item(put(-1))), ValueError, "Table 'item': id -1 at"),
        (
            lambda s: Two(s, data=with_item(lambda x: x.astype(np.float32))),
            TypeError,
            "Table 'item': ids have dtype float32",
        ),
        (
            lambda s: Two(s, tiers={"user": (20, 30), "item": (500, 520)}),
            ValueError,
            "Table 'user': A batch reads",
        ),
        (NoRows, TypeError, r"loss\(\) has no parameter `rows`"),
        (OtherIds, ValueError, r"gives \['item'\], and tables\(\) has \['item', 'user'\]"),
        (FlatIds, ValueError, r"ids\(batch\)\['item'\] has shape"),
        (NoTable, TypeError, "must return a dict from a name to a jaxgoodput.embedding.Table"),
        (Labelled, ValueError, "rows of tables have no label"),
        (
            lambda s: Two(
                dataclasses.replace(s, strategies=(Strategy(fsdp=2),)), devices=jax.devices()[:2]
            ),
            ValueError,
            "every device holds all slots",
        ),
        (lambda s: Two(dataclasses.replace(s, ema=0.99)), ValueError, "Config.ema=0.99"),
        (
            lambda s: Two(s, data=Stream(samples())),
            ValueError,
            r"dataset\(\) is a stream",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        make(settings(tmp_path)).fit()
