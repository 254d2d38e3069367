"""Trackers get what the dashboard gets: a real run, gone on with once, is read back from what each wrote."""

import csv
import json
import struct
import sys
from typing import Any

import numpy as np
import optax
import pytest
import synthetic

import jaxgoodput as jg
from jaxgoodput.clock import FakeClock
from jaxgoodput.observe import hooks
from jaxgoodput.observe.dashboard.scalars import scalars_of
from jaxgoodput.observe.events import EvalEnd


class Line(jg.Trainer):
    """A line through points, which any optimizer finds."""

    def init(self, key):
        return {"w": np.zeros(3, np.float32)}

    def loss(self, params, batch, key):
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    def optimizer(self):
        return optax.sgd(0.05)

    def dataset(self):
        x = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)
        return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32)}

    def metrics(self, params, batch):
        return {"off": abs(batch["x"] @ params["w"] - batch["y"])}

    def eval_dataset(self):
        return self.dataset()


def fit(workdir, base_steps, *trackers, evaluate_every=None):
    config = jg.Config(
        workdir=str(workdir),
        batch=jg.BatchLimits(base=16, max=64),
        base_steps=float(base_steps),
        evaluation=jg.Evaluation(every_base_steps=evaluate_every),
        reporting=jg.Reporting(window_s=1e-6, tensorboard=False, progress=False),
    )
    return Line(config, hooks=trackers).fit()


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_table_has_a_run_once_through_a_restart(tmp_path):
    fit(tmp_path, 60, jg.trackers.Csv())
    first = rows_of(tmp_path / "scalars.csv")
    fit(tmp_path, 120, jg.trackers.Csv())
    rows = rows_of(tmp_path / "scalars.csv")
    assert rows[: len(first)] == first and len(rows) > len(first)
    losses = {int(row["step"]): float(row["value"]) for row in rows if row["tag"] == "train/loss"}
    assert len(losses) > 2 and losses[max(losses)] < losses[min(losses)]
    assert {"goodput/throughput_samples_per_sec", "lr/gain", "eval/off"} <= {r["tag"] for r in rows}


def test_what_a_run_does_again_takes_the_place_of_what_was_there(tmp_path):
    table = jg.trackers.Csv(tmp_path / "t" / "a.csv", clock=FakeClock())

    def start(step, restart):
        table.start(jg.trackers.Run(workdir=tmp_path, step=step, restart=restart, settings={}))

    start(0, 0)
    table.log({"a": 1.0, 'b,"c': float("nan")}, 10)
    table.log({"a": 2.0}, 20)
    table.log({"a": 3.0}, 30)
    table.finish(False)
    with (tmp_path / "t" / "a.csv").open("a") as file:
        file.write("40,17")  # by a process that was killed while it wrote
    start(20, 1)
    table.log({"a": 4.0}, 25)
    table.finish(True)
    found = [(row["step"], row["tag"], row["value"]) for row in rows_of(tmp_path / "t" / "a.csv")]
    assert found == [
        ("10", "a", "1.0"), ("10", 'b,"c', "nan"), ("20", "a", "2.0"), ("25", "a", "4.0"),
    ]  # fmt: skip
    start(0, 0)
    table.finish(True)
    assert rows_of(tmp_path / "t" / "a.csv") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of a library's own
def test_mlflow_has_the_run_with_its_journal(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs jaxgoodput[trackers]")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = f"file://{tmp_path}/store"
    table = jg.trackers.Csv(tmp_path / "all.csv")
    fit(tmp_path / "run", 60, jg.trackers.MLflow("lines", uri=store))
    fit(tmp_path / "run", 120, jg.trackers.MLflow("lines", uri=store), table)
    client = mlflow.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("lines").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["batch.base"] == "16" and run.data.params["device_kind"] == "cpu"
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "train/loss")}
    rows = rows_of(tmp_path / "all.csv")
    ours = {int(r["step"]): float(r["value"]) for r in rows if r["tag"] == "train/loss"}
    assert ours.items() <= history.items() and min(history) < min(ours)
    assert [a.path for a in client.list_artifacts(run.info.run_id)] == ["goodput.jsonl"]

    fit(tmp_path / "later", 60)  # a tracker that a run begins without has all of its settings too
    fit(tmp_path / "later", 120, jg.trackers.MLflow("later", uri=store))
    (run,) = client.search_runs([client.get_experiment_by_name("later").experiment_id])
    assert run.data.params["batch.base"] == "16"


def logged(data):
    """The records of an offline run: LevelDB's log format, behind seven bytes."""
    at, part = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # no header begins there
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, last
            yield part
            part = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of a library's own
def test_wandb_has_the_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs jaxgoodput[trackers]")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    for base_steps in (60, 120):
        fit(tmp_path, base_steps, jg.trackers.Wandb(project="lines", mode="offline"))
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1  # one run, in two parts
    steps, losses, settings = [], {}, {}
    for path in files:
        for data in logged(path.read_bytes()):
            record: Any = vars(wandb_internal_pb2)["Record"].FromString(data)
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            steps += [row["step"]] if "step" in row else []
            if "train/loss" in row:
                losses[row["step"]] = row["train/loss"]
            for update in record.run.config.update:
                settings[update.key or "/".join(update.nested_key)] = json.loads(update.value_json)
    assert max(steps) >= 120 and len(losses) > 2 and settings["batch.base"] == 16
    assert losses[max(losses)] < losses[min(losses)]
    wandb.teardown()  # a process of its own


@pytest.mark.parametrize("tracker", [jg.trackers.Wandb, jg.trackers.MLflow])
def test_a_library_that_is_not_there_is_named_at_once(tracker, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker.__name__.lower(), None)
    with pytest.raises(ImportError, match=r"jaxgoodput\[trackers\]"):
        tracker()


class Broken(jg.trackers.Tracker):
    def log(self, values, step):
        raise OSError("the server has gone")


@pytest.mark.slow
def test_a_tracker_that_fails_costs_no_step(tmp_path):
    with pytest.raises(OSError, match="the server has gone"):
        fit(tmp_path, 400, Broken())
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    table = jg.trackers.Csv()
    fit(tmp_path, 400, table)
    assert 0 < saved <= min(int(row["step"]) for row in rows_of(tmp_path / "scalars.csv"))


class Kept(jg.trackers.Tracker):
    def __init__(self):
        self.logged, self.ends = {}, []

    def log(self, values, step):
        self.logged |= values

    def finish(self, ok):
        self.ends.append(ok)


def test_the_end_of_a_set_of_processes_is_no_failure_and_hosts_and_wall_time_are_told():
    tracker = Kept()
    numbers = {"slow_ratio": 1.5, "excluded_s": 20.0}
    judged = jg.events.HostJudged(step=5, host="b", decision="left out", why="", numbers=numbers)
    hooks.call([tracker], judged)
    assert tracker.logged == {"elastic/slow_ratio": 1.5, "elastic/excluded_s": 20.0}
    for reason in ("regrouped: a host has come", "done", "OSError: the disk is gone"):
        buckets_s = {"productive": 30.0, "compilation": 10.0}
        end = jg.events.FitEnd(
            step=5, progress=1.0, samples=80, seconds=40.0, reason=reason, buckets_s=buckets_s
        )
        hooks.call([tracker], end)
    assert tracker.ends == [True, True, False]
    assert tracker.logged["badput/compilation"] == 25.0
    assert tracker.logged["perf/compile_s"] == 10.0


def test_events_of_all_kinds_are_numbers_that_are_known():
    config = synthetic.START
    tune = synthetic.tune_end(5, 5.0, config)
    assert scalars_of(synthetic.fit_start()) == {}
    assert all(np.isfinite(value) for value in scalars_of(tune).values())
    done = jg.events.EvalEnd(step=1, progress=1.0, at_s=0.0, seconds=2.0, metrics={"a b": 1.0})
    assert scalars_of(done) == {"eval/a_b": 1.0, "eval_time_s": 2.0}


@pytest.mark.slow
def test_a_trial_that_should_be_pruned_ends_its_run_and_keeps_what_was_reported(tmp_path):
    optuna = pytest.importorskip("optuna")
    # Nothing is worth going on with after 20 base steps.
    pruner = optuna.pruners.ThresholdPruner(upper=-1.0, n_warmup_steps=20)
    trial = optuna.create_study(pruner=pruner).ask()
    with pytest.raises(optuna.TrialPruned, match="off was .* after 2[0-9] base steps"):
        fit(
            tmp_path, 200, jg.trackers.Pruning(trial, "off", every_base_steps=8), evaluate_every=8.0
        )
    assert list(trial.study.trials[0].intermediate_values) == [8, 16, 24]
    with pytest.raises(KeyError, match="no metric 'accuracy'. It has off"):
        fit(tmp_path / "other", 20, jg.trackers.Pruning(trial, "accuracy", every_base_steps=8))


def test_trials_with_other_batches_are_compared_at_equal_steps():
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    for late in (0.0, 3.0, 6.5):  # how far larger batches are beyond an evaluation that is due
        trial = study.ask()
        pruning = jg.trackers.Pruning(trial, "off", every_base_steps=10)
        for i in range(1, 5):
            done = EvalEnd(
                step=i, progress=10.0 * i + late, at_s=0.0, seconds=0.0, metrics={"off": 1.0}
            )
            pruning.on_eval_end(done)
    assert {tuple(one.intermediate_values) for one in study.trials} == {(10, 20, 30, 40)}


@pytest.mark.parametrize("every", [0, -5, float("nan"), float("inf")])
def test_an_interval_without_multiples_is_refused(every):
    with pytest.raises(
        ValueError, match=f"every_base_steps must be a number above 0.*; got {every}"
    ):
        jg.trackers.Pruning(None, "off", every_base_steps=every)
