"""The dashboard of a run in TensorBoard: measured curves beside the model's, and verdicts with reasons.

It is written to `workdir/tensorboard` as two runs, `measured` and `model`. The model's predictions have the
same tags as the measurements, so that each chart shows both in two colours. `tags.py` lists all tags.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorboardX.proto.api_pb2 import Status  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.plugin_hparams_pb2 import (
    HParamsPluginData,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.summary import custom_scalars, hparams, text

from jaxgoodput.clock import Clock
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.goodput.sweep import Sweep, fixed_goodput
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.dashboard.eventfile import EventFile
from jaxgoodput.observe.dashboard.painter import Drawing, Painter
from jaxgoodput.observe.dashboard.scalars import flat, scalars_of, time_scalars
from jaxgoodput.observe.dashboard.tags import CHARTS, Charts, description, shown, tag_table
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    Event,
    FitEnd,
    FitStart,
    HostJudged,
    Preempt,
    Regrouped,
    Resharded,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.race import COLUMNS, NOTE, Contender, cells
from jaxgoodput.text import count, seconds

DIRECTORY = "tensorboard"
MAIN_RUN, MODEL_RUN = "measured", "model"

_FLUSH_S = 5.0
_BOUNDS = ("", "_lower", "_upper")
_AT_REST = 10  # pictures are this much rarer while the batch stays the same


@dataclass(frozen=True)
class _OpenRun:
    """The event files of a run, and the event with which it started."""

    measured: EventFile
    model: EventFile
    start: FitStart


class Dashboard:
    """A hook that writes a run's events for TensorBoard. Use it in process 0 only.

    With a `ledger`, each window also shows where the wall time went. A window costs well below a millisecond.
    Pictures cost more: they are drawn on a thread of their own, when the batch changes, at most every
    `figures_every_s`, ten times as rarely while it stays the same, and once at the end. There are none in the
    first `first_figure_s`, while the run compiles most.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        clock: Clock,
        ledger: TimeLedger | None = None,
        figures_every_s: float = 60.0,
        first_figure_s: float = 60.0,
    ):
        self._workdir = pathlib.Path(workdir)
        self._clock = clock
        self._ledger = ledger
        self._open: _OpenRun | None = None
        self._flushed_s = clock.now()
        self._pictures = _Pictures(clock, figures_every_s, first_figure_s)
        self._painter = Painter()
        self._lacks_matplotlib = False
        self._comparison = _Comparison()
        self._charts: Charts = {}  # the charts on the page so far
        self._last_kind = ""  # the last verdict's reason without its numbers
        self._race: list[tuple[Any, ...]] = []  # the last table of the race, without its numbers
        self._skipped = 0
        self._window_step = self._judged_step = -1
        self._last_seen: float | None = None  # end of the previous run, Unix seconds

    def on_fit_start(self, event: FitStart) -> None:
        """Open the event files, and write the settings and the table of tags."""
        # What the files say about the resumed step itself stays valid.
        first_step = event.step + 1 if event.step else 0
        measured, model = (
            EventFile(
                self._workdir / DIRECTORY / name,
                clock=self._clock,
                restart=event.restart,
                first_step=first_step,
                describe=description,
            )
            for name in (MAIN_RUN, MODEL_RUN)
        )
        self._open = _OpenRun(measured, model, event)
        self._pictures.progress = event.progress
        self._text("run/settings", _markdown(flat(event.settings)), event.step)
        self._text("run/tags", tag_table(), event.step)
        started = "started"
        if event.restart:
            before = journal.earlier_runs(self._workdir, before=event.restart)
            self._last_seen = before.last_seen
            started = f"restart {event.restart}, resumed"
        self._log(
            event.step,
            f"{started} on {event.num_devices} x {event.device_kind}, "
            f"{count(event.num_processes, 'process')}, batch {describe(event.config)}",
        )
        self.flush()

    def on_window(self, event: Window) -> None:
        """Add a point to each measured and predicted curve, and note skipped updates."""
        run = self._opened()
        values = scalars_of(event)
        values["elastic/num_devices"] = run.start.num_devices
        values["elastic/num_processes"] = run.start.num_processes
        values["elastic/restarts"] = run.start.restart
        if self._last_seen is not None:  # the first window after a restart
            paused_s = self._clock.wall() - event.seconds - self._last_seen
            values["elastic/last_resize_s"] = max(paused_s, 0.0)
            self._last_seen = None
        if self._ledger is not None:
            values |= time_scalars(self._ledger.snapshot())
        run.measured.scalars(values, event.step)
        predicted = {
            "goodput/samples_per_sec": event.goodput_predicted,
            "perf/step_time_s": event.predicted_step_s,
            # TensorBoard draws a margin chart only for runs that have the bounds, too.
            **{f"evidence/loss_gained{b}": event.loss_gained_expected for b in _BOUNDS},
        }
        known = {tag: value for tag, value in predicted.items() if math.isfinite(value)}
        run.model.scalars(known, event.step)
        if event.skipped_steps > self._skipped:
            skipped = count(event.skipped_steps - self._skipped, "update")
            self._log(event.step, f"{skipped} skipped: not finite")
        self._skipped, self._window_step = event.skipped_steps, event.step
        self._comparison.add(event)
        self._comparison.write_session(run, event.learning_rate, event.step)
        self._pictures.add(event)
        if self._pictures.are_due():
            self._draw(event.step)
        if self._clock.now() - self._flushed_s >= _FLUSH_S:
            self._lay_out(event.step)
            self.flush()

    def on_tune_end(self, event: TuneEnd) -> None:
        """Write the fit and the verdict with its reason; draw pictures if the batch changes."""
        verdict = event.verdict
        self._scalars(event)
        if event.switched:
            self._log(event.step, f"batch {describe(event.before)} -> {describe(verdict.config)}")
        # A reason that differs only in its numbers is not news.
        kind = re.sub(r"[-+\d.,]+", "", verdict.reason)
        if event.switched or kind != self._last_kind:
            gain = "" if math.isnan(verdict.gain) else f" (goodput x {verdict.gain:.3g})"
            self._text(
                "decisions/verdicts",
                f"**step {event.step}** {describe(verdict.config)}{gain}: {verdict.reason}",
                event.step,
            )
        self._last_kind = kind
        race = [(one.config, one.standing, one.basis, one.num_steps > 0) for one in event.race]
        if len(race) > 1 and (event.switched or race != self._race):
            self._text("decisions/race", _race_table(event.step, event.race), event.step)
        self._race = race
        self._pictures.add_verdict(event)
        if self._pictures.are_due():
            self._draw(event.step)

    def on_reshard(self, event: Resharded) -> None:
        """Write how much a change of strategy moved, and how long it took."""
        self._scalars(event)
        self._log(
            event.step,
            f"strategy {event.before} -> {event.after}: {event.bytes_moved / 2**20:.1f} MiB moved "
            f"in {seconds(event.seconds)}",
        )

    def on_regrouped(self, event: Regrouped) -> None:
        """Write the number of processes, and how long each part of the change took."""
        self._scalars(event)
        if event.generation > 1:
            parts = ", ".join(f"{name} {seconds(s)}" for name, s in event.seconds.items())
            self._log(
                event.step,
                f"generation {event.generation}: {event.num_processes_before} -> {event.num_processes} "
                f"processes ({event.reason or 'this one has just joined'}): {parts}",
            )

    def on_host_judged(self, event: HostJudged) -> None:
        """Write which host was excluded or admitted again, and why."""
        run = self._opened()
        if (
            event.step != self._judged_step
        ):  # a curve has one point per step; the text has all hosts
            run.measured.scalars(scalars_of(event), event.step)
        self._judged_step = event.step
        self._log(event.step, f"host {event.host} {event.decision}: {event.why}")
        self._text(
            "decisions/hosts",
            f"**step {event.step}** {event.host} {event.decision}: {event.why}",
            event.step,
        )

    def on_eval_end(self, event: EvalEnd) -> None:
        """Write the results of an evaluation."""
        self._scalars(event)
        evaluated = [tag for tag in scalars_of(event) if tag.startswith("eval/")]
        self._comparison.write_experiment(self._opened(), evaluated)
        self._lay_out(event.step)
        self.flush()

    def on_checkpoint(self, event: Checkpoint) -> None:
        """Write the cost of a checkpoint, and flush: what came before it survives a crash."""
        self._scalars(event)
        if event.error is not None:
            self._log(event.step, f"checkpoint FAILED: {event.error}")
        self.flush()

    def on_preempt(self, event: Preempt) -> None:
        """Write that the run was asked to stop."""
        self._log(event.step, f"{event.signal}: asked to stop")
        self.flush()

    def on_fit_end(self, event: FitEnd) -> None:
        """Draw the last pictures, and write the time ledger and the run's outcome."""
        run = self._opened()
        self._draw(event.step)
        self._painter.wait()
        self._comparison.write_session(run, math.nan, event.step)
        self._comparison.write_experiment(run, [])
        self._log(event.step, f"ended after {seconds(event.seconds)}: {event.reason}")
        values: dict[str, Any] = {}
        buckets = dict(event.buckets_s) or (self._ledger.snapshot() if self._ledger else {})
        if buckets:
            shares = time_scalars(buckets)
            values["hparam/productive_pct"] = shares["goodput_time/productive_pct"]
            if event.step != self._window_step or self._ledger is None:
                values |= shares  # otherwise the last window has shown them at this step
        values |= self._comparison.mean_goodput()
        run.measured.scalars(values, event.step)
        if not event.goes_on:  # TensorBoard keeps the first outcome that it reads
            good = event.reason in ("done", "preempted")
            run.measured.summary(_session_end(good, self._clock.wall()), event.step)
        self._lay_out(event.step)
        self.flush()

    def flush(self) -> None:
        """Write everything to the disk."""
        self._flushed_s = self._clock.now()
        if self._open is not None:
            self._write_pictures(self._open)
            self._open.measured.flush()
            self._open.model.flush()

    def close(self) -> None:
        """Flush and close the files. Idempotent. Raises what drawing a picture has raised."""
        try:
            self._painter.close()
        finally:
            if self._open is not None:
                self._write_pictures(self._open)
                self._lay_out(max(self._window_step, 0))
                self._open.measured.close()
                self._open.model.close()
            self._open = None

    def _opened(self) -> _OpenRun:
        if self._open is None:
            raise RuntimeError(
                "The dashboard has no open files: call on_fit_start before any other event, "
                "and none after close."
            )
        return self._open

    def _lay_out(self, step: int) -> None:
        """Write the page of charts again if there is a new chart to show: charts without data are left out.

        A resumed run shows all charts, because data from before it is not known here.
        """
        run = self._opened()
        charts = CHARTS if run.start.restart else shown(CHARTS, run.measured.nonzero)
        if charts != self._charts:
            self._charts = charts
            run.measured.summary(custom_scalars(charts), step)

    def _draw(self, step: int) -> None:
        self._painter.begin(self._pictures.drawing(step, self._opened().start.groups))

    def _write_pictures(self, run: _OpenRun) -> None:
        """Write the pictures that are finished."""
        for picture in self._painter.finished():
            run.measured.image(picture.tag, picture.png, picture.step)
        since = self._painter.lacking_since
        if since is not None and not self._lacks_matplotlib:
            self._lacks_matplotlib = True  # say so only once
            self._log(since, "no pictures: they need matplotlib, pip install 'jaxgoodput[plots]'")

    def _scalars(self, event: Event) -> None:
        self._opened().measured.scalars(scalars_of(event), event.step)

    def _text(self, tag: str, markdown: str, step: int) -> None:
        self._opened().measured.summary(text(tag, markdown), step)

    def _log(self, step: int, line: str) -> None:
        self._text("log/events", f"**step {step}** {line}", step)


class _Pictures:
    """Decides when pictures are due, and which: of the latest verdict and of the whole run."""

    def __init__(self, clock: Clock, every_s: float, first_s: float):
        self.progress = math.nan  # base steps at the last window
        self._clock = clock
        self._begin_s = clock.now() + first_s
        self._every_s = every_s
        self._drawn_s = -math.inf
        self._pending: TuneEnd | None = None  # the verdict to draw next
        self._known: TuneEnd | None = None  # the latest verdict with a model
        self._fixed: dict[int, float] | None = None  # its goodput of fixed batches, if computed
        self._sweep = Sweep()
        self._swept_step = -1  # step of the last picture of the sweep

    def add(self, event: Window) -> None:
        """Continue the sweep, which compares the run with fixed batches, to the end of a window."""
        known = self._known
        model = None if known is None else known.model
        if known is not None and model is not None:
            if self._fixed is None:
                self._fixed = fixed_goodput(model, known.placement, known.limits)
            config = event.config
            now = model.goodput(known.placement, config.micro_batch_size, config.num_micro_batches)
            gained = event.progress - self.progress
            steps_s = event.num_steps * event.measured_step_s
            if not math.isfinite(steps_s):  # no step was timed
                steps_s = event.seconds
            self._sweep = self._sweep.after(gained, event.seconds, steps_s, float(now), self._fixed)
        self.progress = event.progress

    def add_verdict(self, event: TuneEnd) -> None:
        """Draw a verdict next, unless a change of the batch still waits for its picture."""
        waits = self._pending is not None and self._pending.switched
        if event.fit is not None and (event.switched or not waits):
            self._pending = event
        if event.model is not None:
            self._known, self._fixed = event, None

    def are_due(self) -> bool:
        """Return whether to draw: at the first fit, when the batch changes, or after a long time."""
        now_s = self._clock.now()
        if now_s < self._begin_s:
            return False  # drawing competes with compiling, which pays sooner
        waited_s = now_s - self._drawn_s
        is_news = self._pending is not None and (self._pending.switched or math.isinf(waited_s))
        has_any = self._pending is not None or bool(self._sweep.seconds)
        return has_any and waited_s >= self._every_s * (1 if is_news else _AT_REST)

    def drawing(self, step: int, groups: Sequence[str]) -> Drawing | None:
        """Return what draws the pictures as of now; None if there is nothing to show."""
        if self._pending is None and not self._sweep.seconds:
            return None
        tune, self._pending = self._pending, None
        self._drawn_s = self._clock.now()
        error = self._known.fit.error if self._known and self._known.fit else math.nan
        sweep = None
        if self._sweep.seconds and step > self._swept_step:  # one picture per step
            sweep, self._swept_step = self._sweep, step
        return Drawing(tune, tuple(groups), sweep, step, error)


class _Comparison:
    """TensorBoard's page that compares runs by their settings and results (HParams)."""

    def __init__(self):
        self._useful = 0.0  # useful samples, and the seconds in which they were processed
        self._useful_s = 0.0
        self._has_session = self._has_experiment = False

    def add(self, event: Window) -> None:
        """Add a window to the mean goodput."""
        if math.isfinite(event.goodput_measured):
            self._useful += event.goodput_measured * event.seconds
            self._useful_s += event.seconds

    def mean_goodput(self) -> dict[str, float]:
        """Return the mean goodput by its tag; {} if it was never measured."""
        return {"hparam/mean_goodput": self._useful / self._useful_s} if self._useful_s else {}

    def write_session(self, run: _OpenRun, learning_rate: float, step: int) -> None:
        """Write the run's settings once, when the optimizer's learning rate is known."""
        if self._has_session:
            return
        self._has_session = True
        rate = {"learning_rate": learning_rate} if math.isfinite(learning_rate) else {}
        _, session, _ = hparams(_chosen(run.start) | rate, {})
        run.measured.summary(session, step)

    def write_experiment(self, run: _OpenRun, evaluated: Sequence[str]) -> None:
        """Write once which settings and metrics are compared, after the first evaluation.

        TensorBoard keeps the first list that it reads, so the names of the metrics must be known.
        """
        if self._has_experiment:
            return
        self._has_experiment = True
        compared = ["hparam/mean_goodput", "hparam/productive_pct", "train/loss", *evaluated]
        chosen = {**_chosen(run.start), "learning_rate": 0.0}
        experiment, _, _ = hparams(chosen, dict.fromkeys(compared, 0.0))
        run.measured.summary(experiment, run.start.step)


def _chosen(start: FitStart) -> dict[str, Any]:
    settings = flat(start.settings)
    known = {n: v for n, v in settings.items() if isinstance(v, bool | int | float | str)}
    return known | {"device_kind": start.device_kind, "num_devices": start.num_devices}


def describe(config: BatchConfig) -> str:
    """Format a batch as an equation: global = micro-batch x replicas x micro-batches.

    >>> describe(BatchConfig(micro_batch_size=64, num_micro_batches=1, num_replicas=8))
    '512 = 64 x 8 x 1'
    """
    under = f" under {config.strategy}" if config.strategy else ""
    return (
        f"{config.global_batch_size} = {config.micro_batch_size} x {config.num_replicas} "
        f"x {config.num_micro_batches}{under}"
    )


def _race_table(step: int, race: Sequence[Contender]) -> str:
    rows = [f"| {' | '.join(cells(one))} |" for one in race]
    header = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    return "\n".join([f"**step {step}** {NOTE}", "", *header, *rows])


def _markdown(settings: Mapping[str, Any]) -> str:
    rows = [f"| {name} | `{json.dumps(value)}` |" for name, value in sorted(settings.items())]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _session_end(good: bool, wall: float) -> Any:
    """Return the outcome of a run. `SummaryWriter.add_hparams` would report success, in a run of its own."""
    *_, ended = hparams({}, {})
    plugin = ended.value[0].metadata.plugin_data
    # tensorboardX always reports success: correct the status in its serialized message.
    data = HParamsPluginData.FromString(plugin.content)
    data.session_end_info.status = Status.Value("STATUS_SUCCESS" if good else "STATUS_FAILURE")
    data.session_end_info.end_time_secs = wall
    plugin.content = data.SerializeToString()
    return ended
