"""The run in TensorBoard: curves, the model beside the measurement, verdicts with reasons.

Written under `workdir/tensorboard` as two runs, `measured` and `model`: the model's predictions are under
the same tags, so that a chart shows both in two colours. `tags.py` lists what is written.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
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
from jaxgoodput.observe.badput import PRODUCTIVE, TimeLedger
from jaxgoodput.observe.eventfile import EventFile
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    FitEnd,
    FitStart,
    HostJudged,
    Preempt,
    Regrouped,
    Resharded,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.scalars import flat, scalars_of, time_scalars
from jaxgoodput.observe.tags import CHARTS, Charts, description, shown, tag_table
from jaxgoodput.text import count, seconds

DIRECTORY = "tensorboard"
MAIN_RUN, MODEL_RUN = "measured", "model"

_FLUSH_S = 5.0
_BOUNDS = ("", "_lower", "_upper")
_AT_REST = 10  # times as long until new pictures where the batch stays


class Dashboard:
    """Writes one run's events; for process 0, called from one background thread.

    With a `ledger`, every window also shows where the wall time went. A window costs well below a
    millisecond; the pictures cost more, so there is at most one set per `figures_every_s`, at a change of the
    batch; one in ten times as long where it stays; and the last one at the end.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        clock: Clock,
        ledger: TimeLedger | None = None,
        figures_every_s: float = 60.0,
    ):
        self._workdir = pathlib.Path(workdir)
        self._clock = clock
        self._ledger = ledger
        self._figures_every_s = figures_every_s
        self._run: EventFile | None = None
        self._model: EventFile | None = None
        self._start: FitStart | None = None
        self._flushed_s = clock.now()
        self._figures_s = -math.inf
        self._pending: TuneEnd | None = None
        self._missed = False  # pictures, for want of matplotlib, and it was said
        self._last_kind = ""
        self._skipped = 0
        self._window_step = self._judged_step = -1
        self._has_session = self._has_experiment = False
        self._last_seen: float | None = None  # Unix seconds, of the run before
        self._useful = 0.0  # samples, and
        self._useful_s = 0.0  # the seconds they took
        self._sweep = Sweep()
        self._known: TuneEnd | None = None  # the newest with a model
        self._fixed: dict[int, float] | None = (
            None  # its goodput of fixed batches; None: not asked yet
        )
        self._progress = math.nan  # at the last window
        self._swept_step = -1  # of the last picture of the sweep
        self._charts: Charts = {}  # on the page so far

    def on_fit_start(self, event: FitStart) -> None:
        """Open the event files and write what does not change: layout, settings, tag table."""
        self._start, self._progress = event, event.progress
        # What stands at the resumed step is still true; a new run starts from nothing.
        first_step = event.step + 1 if event.step else 0
        folder = self._workdir / DIRECTORY
        self._run, self._model = (
            EventFile(
                where,
                clock=self._clock,
                restart=event.restart,
                first_step=first_step,
                describe=description,
            )
            for where in (folder / MAIN_RUN, folder / MODEL_RUN)
        )
        settings = flat(event.settings)
        self._text("run/settings", _markdown(settings), event.step)
        self._text("run/tags", tag_table(), event.step)
        if event.restart:
            before = journal.earlier_runs(self._workdir, before=event.restart)
            self._last_seen = before.last_seen
            started = f"restart {event.restart}, resumed"
        else:
            started = "started"
        self._log(
            event.step,
            f"{started} on {event.num_devices} x {event.device_kind}, "
            f"{count(event.num_processes, 'process')}, batch {describe(event.config)}",
        )
        self.flush()

    def on_window(self, event: Window) -> None:
        """One point on every curve."""
        run, model, start = self._files()
        now = self._clock.wall()
        values = scalars_of(event)
        values["elastic/num_devices"] = start.num_devices
        values["elastic/num_processes"] = start.num_processes
        values["elastic/restarts"] = start.restart
        if self._last_seen is not None:
            values["elastic/last_resize_s"] = max(now - event.seconds - self._last_seen, 0.0)
            self._last_seen = None
        if self._ledger is not None:
            values |= time_scalars(self._ledger.snapshot())
        run.scalars(values, event.step)
        predicted = {
            "goodput/samples_per_sec": event.goodput_predicted,
            "perf/step_time_s": event.predicted_step_s,
            # TensorBoard misses the bounds of a run that has the value alone.
            **{f"evidence/loss_gained{b}": event.loss_gained_expected for b in _BOUNDS},
        }
        model.scalars({tag: x for tag, x in predicted.items() if math.isfinite(x)}, event.step)
        if event.skipped_steps > self._skipped:
            self._log(
                event.step,
                f"{count(event.skipped_steps - self._skipped, 'update')} skipped: not finite",
            )
        self._skipped, self._window_step = event.skipped_steps, event.step
        if math.isfinite(event.goodput_measured):
            self._useful += event.goodput_measured * event.seconds
            self._useful_s += event.seconds
        if not self._has_session:
            self._write_session(event.learning_rate, event.step)
        self._sweep = self._swept(event)
        self._progress = event.progress
        self._draw_if_due(event.step)
        if self._clock.now() - self._flushed_s >= _FLUSH_S:
            self._lay_out(event.step)
            self.flush()

    def on_tune_end(self, event: TuneEnd) -> None:
        """The fit, the verdict and its reason; at a change of the batch, pictures."""
        run, _, _ = self._files()
        verdict = event.verdict
        run.scalars(scalars_of(event), event.step)
        if event.switched:
            self._log(event.step, f"batch {describe(event.before)} -> {describe(verdict.config)}")
        # A reason that differs in its numbers only is not news.
        kind = re.sub(r"[-+\d.,]+", "", verdict.reason)
        if event.switched or kind != self._last_kind:
            gain = "" if math.isnan(verdict.gain) else f" (goodput x {verdict.gain:.3g})"
            self._text(
                "decisions/verdicts",
                f"**step {event.step}** {describe(verdict.config)}{gain}: {verdict.reason}",
                event.step,
            )
        self._last_kind = kind
        waits = self._pending is not None and self._pending.switched
        if event.fit is not None and (event.switched or not waits):
            self._pending = (
                event  # a change that waits for its picture is not forgotten for a verdict
            )
        if event.model is not None:
            self._known, self._fixed = event, None
        self._draw_if_due(event.step)

    def on_reshard(self, event: Resharded) -> None:
        """What a change of strategy moved, and how long it took."""
        run, _, _ = self._files()
        run.scalars(scalars_of(event), event.step)
        self._log(
            event.step,
            f"strategy {event.before} -> {event.after}: {event.bytes_moved / 2**20:.1f} MiB moved "
            f"in {seconds(event.seconds)}",
        )

    def on_regrouped(self, event: Regrouped) -> None:
        """Which processes there are, and what coming together took."""
        run, _, _ = self._files()
        run.scalars(scalars_of(event), event.step)
        if event.generation > 1:
            parts = ", ".join(f"{name} {seconds(s)}" for name, s in event.seconds.items())
            self._log(
                event.step,
                f"generation {event.generation}: {event.num_processes_before} -> {event.num_processes} "
                f"processes ({event.reason or 'this one has just come'}): {parts}",
            )

    def on_host_judged(self, event: HostJudged) -> None:
        """Who was left out or taken in again, and why."""
        run, _, _ = self._files()
        if event.step != self._judged_step:  # a curve has one point at a step; the text has all
            run.scalars(scalars_of(event), event.step)
        self._judged_step = event.step
        self._log(event.step, f"host {event.host} {event.decision}: {event.why}")
        self._text(
            "decisions/hosts",
            f"**step {event.step}** {event.host} {event.decision}: {event.why}",
            event.step,
        )

    def on_eval_end(self, event: EvalEnd) -> None:
        """The evaluation's results."""
        run, _, _ = self._files()
        run.scalars(scalars_of(event), event.step)
        if not self._has_experiment:
            self._write_experiment([tag for tag in scalars_of(event) if tag.startswith("eval/")])
        self._lay_out(event.step)
        self.flush()

    def on_checkpoint(self, event: Checkpoint) -> None:
        """What the checkpoint cost; everything up to it is on disk from here on."""
        run, _, _ = self._files()
        run.scalars(scalars_of(event), event.step)
        if event.error is not None:
            self._log(event.step, f"checkpoint FAILED: {event.error}")
        self.flush()

    def on_preempt(self, event: Preempt) -> None:
        """That the run was asked to stop."""
        self._log(event.step, f"{event.signal}: asked to stop")
        self.flush()

    def on_fit_end(self, event: FitEnd) -> None:
        """The last pictures, the time ledger and the run's outcome."""
        run, _, _ = self._files()
        self._draw(event.step)
        if not self._has_session:
            self._write_session(math.nan, event.step)
        if not self._has_experiment:
            self._write_experiment([])
        self._log(event.step, f"ended after {seconds(event.seconds)}: {event.reason}")
        values: dict[str, Any] = {}
        buckets = dict(event.buckets_s) or (self._ledger.snapshot() if self._ledger else {})
        if buckets:
            if PRODUCTIVE not in buckets:
                buckets[PRODUCTIVE] = max(event.seconds - sum(buckets.values()), 0.0)
            shares = time_scalars(buckets)
            values["hparam/productive_pct"] = shares["goodput_time/productive_pct"]
            if event.step != self._window_step or self._ledger is None:
                values |= shares  # else the last window has shown them at this step
        if self._useful_s > 0:
            values["hparam/mean_goodput"] = self._useful / self._useful_s
        run.scalars(values, event.step)
        if not event.goes_on:  # TensorBoard keeps the first outcome that it reads
            good = event.reason in ("done", "preempted")
            run.summary(_session_end(good, self._clock.wall()), event.step)
        self._lay_out(event.step)
        self.flush()

    def _lay_out(self, step: int) -> None:
        """Write the page of charts, where it has grown: of all charts those that have something to show.

        A run that goes on shows all: what was drawn before it is not known here.
        """
        run, _, start = self._files()
        charts = CHARTS if start.restart else shown(CHARTS, run.nonzero)
        if charts != self._charts:
            self._charts = charts
            run.summary(custom_scalars(charts), step)

    def flush(self) -> None:
        """Hand everything to the disk."""
        self._flushed_s = self._clock.now()
        for file in (self._run, self._model):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Flush and close the files; a second call does nothing."""
        if self._run is not None:
            self._lay_out(max(self._window_step, 0))
        for file in (self._run, self._model):
            if file is not None:
                file.close()
        self._run = self._model = None

    def _files(self) -> tuple[EventFile, EventFile, FitStart]:
        if self._run is None or self._model is None or self._start is None:
            raise RuntimeError(
                "The dashboard has no open files: call on_fit_start before any other event, "
                "and none after close."
            )
        return self._run, self._model, self._start

    def _swept(self, event: Window) -> Sweep:
        """The sweep as of the end of a window."""
        known = self._known
        model = None if known is None else known.model
        if known is None or model is None:
            return self._sweep
        if self._fixed is None:
            self._fixed = fixed_goodput(model, known.placement, known.limits)
        config = event.config
        now = model.goodput(known.placement, config.micro_batch_size, config.num_micro_batches)
        gone, steps_s = event.progress - self._progress, event.num_steps * event.measured_step_s
        if not math.isfinite(steps_s):  # no step was timed
            steps_s = event.seconds
        return self._sweep.after(gone, event.seconds, steps_s, float(now), self._fixed)

    def _draw_if_due(self, step: int) -> None:
        """Draw at a change of the batch and at the first fit, once a while; seldom where the batch stays."""
        waits = self._clock.now() - self._figures_s
        is_news = self._pending is not None and (self._pending.switched or math.isinf(waits))
        if waits >= self._figures_every_s * (1 if is_news else _AT_REST):
            self._draw(step)

    def _draw(self, step: int) -> None:
        """The pictures of the model as of the verdict that waits for them, and of the sweep as of now."""
        if self._pending is None and not self._sweep.seconds:
            return
        run, _, start = self._files()
        tune, self._pending = self._pending, None
        self._figures_s = self._clock.now()
        try:
            from jaxgoodput.observe import figures  # slow to import, and matplotlib is an extra
        except ModuleNotFoundError:
            if not self._missed:
                line = "no pictures: they need matplotlib, pip install 'jaxgoodput[plots]'"
                self._log(step, line)
            self._missed = True
            return
        drawn = []
        if tune is not None:
            for tag, figure in (
                ("model/goodput_surface", figures.goodput_surface(tune)),
                ("model/goodput_curve", figures.goodput_curve(tune)),
                ("model/fit", figures.fit_scatter(tune)),
                ("model/efficiency_by_group", figures.efficiency_by_group(tune, start.groups)),
            ):
                drawn.append((tag, figure, tune.step))
        if self._sweep.seconds and step > self._swept_step:  # one picture at a step
            error = self._known.fit.error if self._known and self._known.fit else math.nan
            drawn.append(("model/sweep", figures.sweep_avoided(self._sweep, step, error), step))
            self._swept_step = step
        for tag, figure, at in drawn:
            if figure is not None:
                run.image(tag, figures.png(figure), at)

    def _text(self, tag: str, markdown: str, step: int) -> None:
        run, _, _ = self._files()
        run.summary(text(tag, markdown), step)

    def _log(self, step: int, line: str) -> None:
        self._text("log/events", f"**step {step}** {line}", step)

    def _write_session(self, learning_rate: float, step: int) -> None:
        """The settings for the page that compares runs, once the optimizer's learning rate is known."""
        run, _, start = self._files()
        chosen = self._chosen(start)
        if math.isfinite(learning_rate):
            chosen["learning_rate"] = learning_rate
        _, session, _ = hparams(chosen, {})
        run.summary(session, step)
        self._has_session = True

    def _write_experiment(self, evaluated: Sequence[str]) -> None:
        """What that page compares; TensorBoard reads the first that it meets, so metrics are known by now."""
        run, _, start = self._files()
        compared = ["hparam/mean_goodput", "hparam/productive_pct", "train/loss", *evaluated]
        chosen = {**self._chosen(start), "learning_rate": 0.0}
        experiment, _, _ = hparams(chosen, dict.fromkeys(compared, 0.0))
        run.summary(experiment, start.step)
        self._has_experiment = True

    def _chosen(self, start: FitStart) -> dict[str, Any]:
        settings = flat(start.settings)
        known = {n: v for n, v in settings.items() if isinstance(v, bool | int | float | str)}
        return known | {"device_kind": start.device_kind, "num_devices": start.num_devices}


def describe(config: BatchConfig) -> str:
    """The batch as an identity: global = micro-batch x replicas x micro-batches.

    >>> describe(BatchConfig(micro_batch_size=64, num_micro_batches=1, num_replicas=8))
    '512 = 64 x 8 x 1'
    """
    under = f" under {config.strategy}" if config.strategy else ""
    return (
        f"{config.global_batch_size} = {config.micro_batch_size} x {config.num_replicas} "
        f"x {config.num_micro_batches}{under}"
    )


def _markdown(settings: Mapping[str, Any]) -> str:
    rows = [f"| {name} | `{json.dumps(value)}` |" for name, value in sorted(settings.items())]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _session_end(good: bool, wall: float) -> Any:
    """`SummaryWriter.add_hparams` would call every run a success, in a run of its own."""
    *_, ended = hparams({}, {})
    plugin = ended.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    data.session_end_info.status = Status.Value("STATUS_SUCCESS" if good else "STATUS_FAILURE")
    data.session_end_info.end_time_secs = wall
    plugin.content = data.SerializeToString()
    return ended
