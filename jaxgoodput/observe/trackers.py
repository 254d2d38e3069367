"""Trackers: hooks that send a run's numbers to Weights & Biases, MLflow or a CSV file, or to Optuna.

    MyTrainer(config, hooks=[jg.trackers.Wandb(project="digits"), jg.trackers.Csv()]).fit()

A resumed run continues in the same tracker run. Trackers get the dashboard's numbers under the dashboard's
tags, and the shares of wall time once, at the end. The reasons for decisions are in the journal,
`goodput.jsonl`, which trackers that store files get at the end.
"""

import csv
import io
import json
import os
import pathlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.observe import journal
from jaxgoodput.observe.dashboard.scalars import flat, scalars_of, time_scalars
from jaxgoodput.observe.events import EvalEnd, Event, FitEnd, FitStart
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.workdir.places import workdir_of

IDENTITIES = "trackers.json"  # in the workdir: the ids of the tracker runs of this run


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as a tracker learns about it at its start."""

    workdir: pathlib.Path
    step: int
    """Step from which it resumes; 0 for a new run."""
    restart: int
    """0 for the first run in this workdir."""
    settings: Mapping[str, bool | int | float | str | None]
    """Whole configuration and the devices; inner names are joined with dots."""


class Tracker(Hook):
    """Base class of trackers: override `start`, `log` and `finish`.

    An exception in one of them saves a checkpoint and stops training.
    """

    def start(self, run: Run) -> None:
        """Handle the start of a run, or of a resumed run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers by tag at a step. Steps do not always increase: a verdict has the step it was asked
        for."""

    def finish(self, ok: bool) -> None:
        """Handle the end of a run, or its continuation with other processes. `ok`: there was no error."""

    def on_fit_start(self, event: FitStart, /) -> None:
        """Call `start`."""
        known = {"device_kind": event.device_kind, "num_devices": event.num_devices}
        settings = {
            name: value if isinstance(value, bool | int | float | str | None) else json.dumps(value)
            for name, value in {**flat(event.settings), **known}.items()
        }
        workdir = workdir_of(event.settings["workdir"]).folder
        self.start(Run(workdir=workdir, step=event.step, restart=event.restart, settings=settings))

    def on_record(self, event: Event) -> None:
        """Log the numbers of any event that the journal records, too."""
        values = scalars_of(event)
        if values:
            self.log(values, event.step)

    def on_fit_end(self, event: FitEnd, /) -> None:
        """Log the shares of wall time, and call `finish`."""
        try:
            if event.buckets_s:
                self.log(time_scalars(event.buckets_s), event.step)
        finally:
            self.finish(event.goes_on or event.reason in ("done", "preempted"))


class Csv(Tracker):
    """A CSV file with one row per number: step, Unix seconds, tag, value.

    `path` defaults to `workdir/scalars.csv`. A resumed run replaces the rows that it has undone.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, clock: Clock | None = None):
        self._path = None if path is None else pathlib.Path(path)
        self._clock = clock or SystemClock()
        self._file: Any = None

    def start(self, run: Run) -> None:
        """Open the file, and drop the rows after the step from which the run resumes."""
        path = self._path or run.workdir / "scalars.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        if run.restart and path.exists():
            with path.open(newline="") as file:
                # Drop a line that a killed process has left incomplete.
                rows = [row for row in csv.reader(file) if len(row) == 4 and row[0].isdigit()]
        text = io.StringIO()
        kept = [row for row in rows if int(row[0]) <= run.step]
        csv.writer(text, lineterminator="\n").writerows([("step", "wall_s", "tag", "value"), *kept])
        _write(path, text.getvalue())
        self._file = path.open("a", newline="")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a row for each number."""
        wall = f"{self._clock.wall():.3f}"
        csv.writer(self._file, lineterminator="\n").writerows(
            (step, wall, tag, repr(float(value))) for tag, value in values.items()
        )
        self._file.flush()

    def finish(self, ok: bool) -> None:
        """Close the file, whether or not the run failed."""
        self._file.close()


class Wandb(Tracker):
    """Weights & Biases. `init` are arguments of `wandb.init`, such as project= and mode="offline"."""

    def __init__(self, **init: Any):
        self._wandb = _library("wandb")
        self._init = init
        self._run: Any = None
        self._workdir = pathlib.Path()

    def start(self, run: Run) -> None:
        """Start or resume the tracker run."""
        self._workdir = run.workdir
        given = {
            "id": _identity(run, "wandb", lambda: uuid.uuid4().hex[:8]),
            "resume": "allow",
            "dir": str(run.workdir),
            "config": dict(run.settings),
            **self._init,
        }
        self._run = self._wandb.init(**given)
        # Its own steps must increase, and ours do not always: log ours as a metric.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers as one row."""
        self._run.log({**values, "step": step})

    def finish(self, ok: bool) -> None:
        """Store the journal with the tracker run, and end that run as successful or failed."""
        self._run.save(
            str(self._workdir / journal.FILE_NAME), base_path=str(self._workdir), policy="now"
        )
        self._run.finish(exit_code=0 if ok else 1)


class MLflow(Tracker):
    """MLflow. `uri` is the tracking server (default: MLflow's own, from MLFLOW_TRACKING_URI)."""

    def __init__(
        self,
        experiment: str = "jaxgoodput",
        *,
        uri: str | None = None,
        name: str | None = None,
        clock: Clock | None = None,
    ):
        self._mlflow = _library("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        self._experiment, self._name = experiment, name
        self._clock = clock or SystemClock()
        self._id = ""
        self._workdir = pathlib.Path()

    def start(self, run: Run) -> None:
        """Start or resume the tracker run."""
        self._workdir, client = run.workdir, self._client
        found = client.get_experiment_by_name(self._experiment)
        where = found.experiment_id if found else client.create_experiment(self._experiment)
        name = self._name or run.workdir.name

        def make() -> str:
            new = client.create_run(where, run_name=name).info.run_id
            param = self._mlflow.entities.Param
            params = [param(k, str(v)[:500]) for k, v in run.settings.items()]
            for first in range(0, len(params), 100):  # MLflow's limit per call
                client.log_batch(new, params=params[first : first + 100])
            return new

        self._id = _identity(run, "mlflow", make)
        client.update_run(self._id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers as one batch."""
        now = int(1000 * self._clock.wall())
        metric = self._mlflow.entities.Metric
        self._client.log_batch(
            self._id, metrics=[metric(tag, float(x), now, step) for tag, x in values.items()]
        )

    def finish(self, ok: bool) -> None:
        """Store the journal with the tracker run, and end that run as successful or failed."""
        self._client.log_artifact(self._id, str(self._workdir / journal.FILE_NAME))
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")


def _write(path: pathlib.Path, text: str) -> None:
    """Replace a file atomically: if the disk is full, the old content stays."""
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text)
    aside.replace(path)


def _library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{error}. This tracker needs it: pip install 'jaxgoodput[trackers]'."
        ) from error


def _identity(run: Run, tracker: str, make: Any) -> str:
    """Return the id of the tracker run: a new one, or the one that the resumed run has used before."""
    path = run.workdir / IDENTITIES
    known = json.loads(path.read_text()) if run.restart and path.exists() else {}
    if tracker not in known:
        known[tracker] = make()
        _write(path, json.dumps(known))
    return known[tracker]


class Pruning(Hook):
    """Reports a metric to a trial of Optuna, and ends the run if the trial is not worth more time.

    After each evaluation, the metric called `metric` is reported. Optuna compares trials at equal steps.
    These are base steps, rounded down to a multiple of `every_base_steps`, because runs with larger batches
    are evaluated a little later: give it the interval of the evaluations, `Evaluation.every_base_steps`. If
    Optuna says that the trial should be pruned, `Trainer.fit` saves, stops and raises `optuna.TrialPruned`,
    as `study.optimize` expects.

        def objective(trial):
            rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
            pruning = jg.trackers.Pruning(trial, "accuracy", every_base_steps=100)
            trainer = Net(config(rate, a_new_folder()), hooks=[pruning])
            return trainer.evaluate(trainer.fit())["accuracy"]

    It is for runs of one process. Each trial needs a workdir of its own, or it would resume another's run.

    Raises ValueError if `every_base_steps` is not above 0, and (from the run) KeyError if an evaluation has
    no such metric.
    """

    def __init__(self, trial: Any, metric: str, *, every_base_steps: int | float):
        if not 0 < every_base_steps < float("inf"):
            raise ValueError(
                f"Pruning: every_base_steps must be a number above 0, the interval of the evaluations; got "
                f"{every_base_steps}."
            )
        self._trial, self._metric, self._every = trial, metric, every_base_steps
        self._is_pruned = False  # the run may be ahead of its hooks, and be evaluated once more

    def on_eval_end(self, event: EvalEnd, /) -> None:
        """Report the metric, and raise `optuna.TrialPruned` if the trial should be pruned."""
        if self._is_pruned:
            return
        if self._metric not in event.metrics:
            raise KeyError(
                f"Pruning: the evaluation has no metric {self._metric!r}. It has {', '.join(event.metrics)}."
            )
        value = event.metrics[self._metric]
        self._trial.report(value, int(event.progress // self._every * self._every))
        if self._trial.should_prune():
            import optuna

            self._is_pruned = True
            raise optuna.TrialPruned(
                f"{self._metric} was {value:.6g} after {event.progress:.0f} base steps"
            )
