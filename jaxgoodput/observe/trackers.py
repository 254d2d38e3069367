"""Trackers: the numbers of a run where somebody keeps those of all runs. Give them to a trainer as hooks.

    MyTrainer(config, hooks=[jg.trackers.Wandb(project="digits"), jg.trackers.Csv()]).fit()

A run that is gone on with goes on in them, too. They have the dashboard's numbers under the dashboard's tags,
those of where the wall time went once, at the end. Why something was decided is in the journal,
`goodput.jsonl`, which those that keep files get at the end.
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
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    Event,
    FitEnd,
    FitStart,
    HostJudged,
    Regrouped,
    Resharded,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.observe.scalars import flat, scalars_of, time_scalars

IDENTITIES = "trackers.json"  # under the workdir: which runs of others this one is


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a tracker is told of a run at its start."""

    workdir: pathlib.Path
    step: int
    """From which it goes on; 0: it is new."""
    restart: int
    settings: Mapping[str, bool | int | float | str | None]
    """The whole configuration and the devices, by names with dots."""


class Tracker(Hook):
    """Override `start`, `log` and `finish`. An exception in one of them stops training with a checkpoint."""

    def start(self, run: Run) -> None:
        """A run begins, or goes on."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by tag at a step. Steps do not always ascend: a verdict is about what was."""

    def finish(self, ok: bool) -> None:
        """The run is over, or is to begin again with other processes; `ok`: nothing went wrong."""

    def on_fit_start(self, event: FitStart, /) -> None:
        """Start."""
        known = {"device_kind": event.device_kind, "num_devices": event.num_devices}
        settings = {
            name: value if isinstance(value, bool | int | float | str | None) else json.dumps(value)
            for name, value in {**flat(event.settings), **known}.items()
        }
        workdir = pathlib.Path(event.settings["workdir"])
        self.start(Run(workdir=workdir, step=event.step, restart=event.restart, settings=settings))

    def on_window(self, event: Window, /) -> None:
        """Averages over a stretch."""
        self._log(event)

    def on_tune_end(self, event: TuneEnd, /) -> None:
        """A verdict."""
        self._log(event)

    def on_reshard(self, event: Resharded, /) -> None:
        """A move of the state."""
        self._log(event)

    def on_regrouped(self, event: Regrouped, /) -> None:
        """A change of the processes."""
        self._log(event)

    def on_host_judged(self, event: HostJudged, /) -> None:
        """A host that is slow, was left out, or was taken in again."""
        self._log(event)

    def on_eval_end(self, event: EvalEnd, /) -> None:
        """An evaluation."""
        self._log(event)

    def on_checkpoint(self, event: Checkpoint, /) -> None:
        """A checkpoint."""
        self._log(event)

    def on_fit_end(self, event: FitEnd, /) -> None:
        """Where the wall time went, and the end; where only the processes change, the run goes on."""
        try:
            if event.buckets_s:
                self.log(time_scalars(event.buckets_s), event.step)
        finally:
            self.finish(event.goes_on or event.reason in ("done", "preempted"))

    def _log(self, event: Event) -> None:
        values = scalars_of(event)
        if values:
            self.log(values, event.step)


class Csv(Tracker):
    """A table of a row for each number: step, seconds since 1970, tag, value. `path`: default
    `workdir/scalars.csv`. What a run that is gone on with does again takes the place of what was there.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, clock: Clock | None = None):
        self._path = None if path is None else pathlib.Path(path)
        self._clock = clock or SystemClock()
        self._file: Any = None

    def start(self, run: Run) -> None:
        """Open the file, less what is behind the step."""
        path = self._path or run.workdir / "scalars.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        if run.restart and path.exists():
            with path.open(newline="") as file:
                # A line that was being written when its process was killed is not whole.
                rows = [row for row in csv.reader(file) if len(row) == 4 and row[0].isdigit()]
        text = io.StringIO()
        kept = [row for row in rows if int(row[0]) <= run.step]
        csv.writer(text, lineterminator="\n").writerows([("step", "wall_s", "tag", "value"), *kept])
        _write(path, text.getvalue())
        self._file = path.open("a", newline="")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A row each."""
        wall = f"{self._clock.wall():.3f}"
        csv.writer(self._file, lineterminator="\n").writerows(
            (step, wall, tag, repr(float(value))) for tag, value in values.items()
        )
        self._file.flush()

    def finish(self, ok: bool) -> None:
        """Close it."""
        self._file.close()


class Wandb(Tracker):
    """Weights & Biases. `init`: arguments of `wandb.init`, such as project= and mode="offline"."""

    def __init__(self, **init: Any):
        self._wandb = _library("wandb")
        self._init = init
        self._run: Any = None
        self._workdir = pathlib.Path()

    def start(self, run: Run) -> None:
        """Begin or resume."""
        self._workdir = run.workdir
        given = {
            "id": _identity(run, "wandb", lambda: uuid.uuid4().hex[:8]),
            "resume": "allow",
            "dir": str(run.workdir),
            "config": dict(run.settings),
            **self._init,
        }
        self._run = self._wandb.init(**given)
        # Steps of its own must ascend, and ours do not always.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One row."""
        self._run.log({**values, "step": step})

    def finish(self, ok: bool) -> None:
        """With the journal."""
        self._run.save(
            str(self._workdir / journal.FILE_NAME), base_path=str(self._workdir), policy="now"
        )
        self._run.finish(exit_code=0 if ok else 1)


class MLflow(Tracker):
    """MLflow. `uri`: of the tracking server (default: as MLflow finds it, MLFLOW_TRACKING_URI)."""

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
        """Begin or resume."""
        self._workdir, client = run.workdir, self._client
        found = client.get_experiment_by_name(self._experiment)
        where = found.experiment_id if found else client.create_experiment(self._experiment)
        name = self._name or run.workdir.name

        def make() -> str:
            new = client.create_run(where, run_name=name).info.run_id
            param = self._mlflow.entities.Param
            params = [param(k, str(v)[:500]) for k, v in run.settings.items()]
            for first in range(0, len(params), 100):  # as many as it takes at once
                client.log_batch(new, params=params[first : first + 100])
            return new  # its parameters cannot be changed

        self._id = _identity(run, "mlflow", make)
        client.update_run(self._id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One batch."""
        now = int(1000 * self._clock.wall())
        metric = self._mlflow.entities.Metric
        self._client.log_batch(
            self._id, metrics=[metric(tag, float(x), now, step) for tag, x in values.items()]
        )

    def finish(self, ok: bool) -> None:
        """With the journal."""
        self._client.log_artifact(self._id, str(self._workdir / journal.FILE_NAME))
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")


def _write(path: pathlib.Path, text: str) -> None:
    """All of it or, where the disk is full, what was there before."""
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
    """Which run of the tracker's this one is: a new one's, or that of the run which is gone on with."""
    path = run.workdir / IDENTITIES
    known = json.loads(path.read_text()) if run.restart and path.exists() else {}
    if tracker not in known:
        known[tracker] = make()
        _write(path, json.dumps(known))
    return known[tracker]
