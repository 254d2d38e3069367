"""The run in TensorBoard: curves, the model beside the measurement, verdicts with reasons.

Written under `workdir/tensorboard`; the model's predictions are the sub-run `model` under the same
tags, so that a chart shows both in two colours. `tags.py` lists what is written.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboardX.proto.api_pb2 import Status  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.plugin_hparams_pb2 import (
    HParamsPluginData,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.summary import custom_scalars, hparams, text

from jaxgoodput.clock import Clock
from jaxgoodput.goodput.perf import Placement, compute_time, sync_time
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import BUCKETS, PRODUCTIVE, TimeLedger
from jaxgoodput.observe.eventfile import EventFile
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    FitEnd,
    FitStart,
    Preempt,
    Regrouped,
    Resharded,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.tags import CHARTS, tag_table
from jaxgoodput.text import seconds

DIRECTORY = "tensorboard"
MODEL_RUN = "model"

_FLUSH_S = 5.0


class Dashboard:
    """Writes one run's events; for process 0, called from one background thread.

    With a `ledger`, every window also shows where the wall time went. A window costs well below a
    millisecond; the pictures cost more, so there is at most one set per `figures_every_s` (and the
    last one is drawn at the end).
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
        self._window_step = -1
        self._last_seen: float | None = None  # Unix seconds, of the run before
        self._useful = 0.0  # samples, and
        self._useful_s = 0.0  # the seconds they took

    def on_fit_start(self, event: FitStart) -> None:
        """Open the event files and write what does not change: layout, settings, tag table."""
        self._start = event
        # What stands at the resumed step is still true; a new run starts from nothing.
        first_step = event.step + 1 if event.step else 0
        folder = self._workdir / DIRECTORY
        self._run = EventFile(
            folder, clock=self._clock, restart=event.restart, first_step=first_step
        )
        self._model = EventFile(
            folder / MODEL_RUN, clock=self._clock, restart=event.restart, first_step=first_step
        )
        self._run.summary(custom_scalars(CHARTS), event.step)
        settings = _flat(event.settings)
        self._write_hparams(self._run, settings, event)
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
            f"{event.num_processes} process(es), batch {describe(event.config)}",
        )
        self.flush()

    def on_window(self, event: Window) -> None:
        """One point on every curve."""
        run, model, start = self._files()
        now = self._clock.wall()
        values = _known(_window_scalars(event)) | _bands(event)
        values["elastic/num_devices"] = start.num_devices
        values["elastic/num_processes"] = start.num_processes
        values["elastic/restarts"] = start.restart
        if self._last_seen is not None:
            values["elastic/last_resize_s"] = max(now - event.seconds - self._last_seen, 0.0)
            self._last_seen = None
        if self._ledger is not None:
            values |= _time_scalars(self._ledger.snapshot())
        # Whatever the user measures is shown as it is: a loss of NaN must be seen.
        values |= {_clean(f"train/{name}"): float(v) for name, v in event.metrics.items()}
        run.scalars(values, event.step)
        predicted = {
            "goodput/samples_per_sec": event.goodput_predicted,
            "perf/step_time_s": event.predicted_step_s,
            "evidence/loss_gained": event.loss_gained_expected,
        }
        model.scalars(_known(predicted), event.step)
        if event.skipped_steps > self._skipped:
            self._log(
                event.step,
                f"{event.skipped_steps - self._skipped} update(s) skipped: gradient not finite",
            )
        self._skipped, self._window_step = event.skipped_steps, event.step
        if math.isfinite(event.goodput_measured):
            self._useful += event.goodput_measured * event.seconds
            self._useful_s += event.seconds
        if self._clock.now() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def on_tune_end(self, event: TuneEnd) -> None:
        """The fit, the verdict and its reason; at a change of the batch, pictures."""
        run, _, _ = self._files()
        verdict = event.verdict
        values: dict[str, Any] = {"goodput/predicted_gain": verdict.gain}
        values["elastic/num_hosts"] = event.num_nodes
        if event.fit is not None:
            perf = event.fit.params
            placement = Placement(num_nodes=event.num_nodes, num_replicas=event.num_replicas)
            values["perf/compute_s"] = compute_time(perf, verdict.config.micro_batch_size)
            values["perf/sync_s"] = sync_time(perf, placement) if event.num_replicas > 1 else 0.0
            values["perf/update_s"] = perf.update_s
            values["perf/fit_rmsle"] = event.fit.error
        if event.timings is not None:
            values["perf/num_observations"] = int((np.asarray(event.timings.weight) > 0).sum())
        run.scalars(_known(values), event.step)
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
        if event.fit is not None:
            self._pending = event
        due = self._clock.now() - self._figures_s >= self._figures_every_s
        if due and (event.switched or self._figures_s == -math.inf):
            self._draw()

    def on_reshard(self, event: Resharded) -> None:
        """What a change of strategy moved, and how long it took."""
        run, _, _ = self._files()
        run.scalars(
            {"reshard/seconds": event.seconds, "reshard/bytes_moved": event.bytes_moved}, event.step
        )
        self._log(
            event.step,
            f"strategy {event.before} -> {event.after}: {event.bytes_moved / 2**20:.1f} MiB moved "
            f"in {seconds(event.seconds)}",
        )

    def on_regrouped(self, event: Regrouped) -> None:
        """Which processes there are, and what coming together took."""
        run, _, _ = self._files()
        together_s = sum(event.seconds.values())
        values = {"elastic/generation": float(event.generation), "elastic/regroup_s": together_s}
        run.scalars(values, event.step)
        if event.generation > 1:
            parts = ", ".join(f"{name} {seconds(s)}" for name, s in event.seconds.items())
            self._log(
                event.step,
                f"generation {event.generation}: {event.num_processes_before} -> {event.num_processes} "
                f"processes ({event.reason or 'this one has just come'}): {parts}",
            )

    def on_eval_end(self, event: EvalEnd) -> None:
        """The evaluation's results."""
        run, _, _ = self._files()
        values = {_clean(f"eval/{name}"): float(v) for name, v in event.metrics.items()}
        run.scalars({**values, "eval_time_s": event.seconds}, event.step)
        self.flush()

    def on_checkpoint(self, event: Checkpoint) -> None:
        """What the checkpoint cost; everything up to it is on disk from here on."""
        run, _, _ = self._files()
        run.scalars({"checkpoint/stall_s": event.seconds}, event.step)
        if event.error is not None:
            self._log(event.step, f"checkpoint FAILED: {event.error}")
        self.flush()

    def on_preempt(self, event: Preempt) -> None:
        """That the run was asked to stop."""
        self._log(event.step, f"{event.signal}: will save and stop")
        self.flush()

    def on_fit_end(self, event: FitEnd) -> None:
        """The last pictures, the time ledger and the run's outcome."""
        run, _, _ = self._files()
        self._draw()
        self._log(event.step, f"ended after {seconds(event.seconds)}: {event.reason}")
        values: dict[str, Any] = {}
        buckets = dict(event.buckets_s) or (self._ledger.snapshot() if self._ledger else {})
        if buckets:
            if PRODUCTIVE not in buckets:
                buckets[PRODUCTIVE] = max(event.seconds - sum(buckets.values()), 0.0)
            shares = _time_scalars(buckets)
            values["hparam/productive_pct"] = shares["goodput_time/productive_pct"]
            if event.step != self._window_step or self._ledger is None:
                values |= shares  # else the last window has shown them at this step
        if self._useful_s > 0:
            values["hparam/mean_goodput"] = self._useful / self._useful_s
        run.scalars(values, event.step)
        good = event.reason in ("done", "preempted")
        run.summary(_session_end(good, self._clock.wall()), event.step)
        self.flush()

    def flush(self) -> None:
        """Hand everything to the disk."""
        self._flushed_s = self._clock.now()
        for file in (self._run, self._model):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Flush and close the files; a second call does nothing."""
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

    def _draw(self) -> None:
        if self._pending is None:
            return
        run, _, _ = self._files()
        tune, self._pending = self._pending, None
        self._figures_s = self._clock.now()
        try:
            from jaxgoodput.observe import figures  # slow to import, and matplotlib is an extra
        except ModuleNotFoundError:
            if not self._missed:
                line = "no pictures: they need matplotlib, pip install 'jaxgoodput[plots]'"
                self._log(tune.step, line)
            self._missed = True
            return
        for tag, draw in (
            ("model/goodput_surface", figures.goodput_surface),
            ("model/goodput_curve", figures.goodput_curve),
            ("model/fit", figures.fit_scatter),
        ):
            figure = draw(tune)
            if figure is not None:
                run.image(tag, figures.png(figure), tune.step)

    def _text(self, tag: str, markdown: str, step: int) -> None:
        run, _, _ = self._files()
        run.summary(text(tag, markdown), step)

    def _log(self, step: int, line: str) -> None:
        self._text("log/events", f"**step {step}** {line}", step)

    def _write_hparams(self, run: EventFile, settings: Mapping[str, Any], start: FitStart) -> None:
        chosen = {
            name: v for name, v in settings.items() if isinstance(v, bool | int | float | str)
        }
        chosen |= {"device_kind": start.device_kind, "num_devices": start.num_devices}
        metrics = dict.fromkeys(("hparam/mean_goodput", "hparam/productive_pct"), 0.0)
        experiment, session, _ = hparams(chosen, metrics)
        run.summary(experiment, start.step)
        run.summary(session, start.step)


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


def _window_scalars(event: Window) -> dict[str, Any]:
    config = event.config
    return {
        "goodput/samples_per_sec": event.goodput_measured,
        "goodput/throughput_samples_per_sec": event.throughput,
        "goodput/statistical_efficiency": event.efficiency,
        "batch/global": config.global_batch_size,
        "batch/per_device": config.micro_batch_size,
        "batch/accumulation_steps": config.num_micro_batches,
        "batch/num_replicas": config.num_replicas,
        "batch/memory_limit": event.memory_limit,
        "gns/critical_batch_size": event.noise_scale,
        "gns/grad_sqr": event.grad.sqr,
        "gns/grad_var": event.grad.var,
        "gns/confidence": event.noise_confidence,
        "gns/age": event.noise_age_steps,
        "gns/is_lower_bound": float(event.noise_is_lower_bound),
        "stats/every": event.statistics_every,
        "lr/gain": event.gain,
        "lr/base": event.learning_rate,
        "lr/effective": event.learning_rate * event.gain,
        "perf/step_time_s": event.measured_step_s,
        "progress/scale_invariant_steps": event.progress,
        "progress/samples": event.samples,
        "progress/epoch": event.epoch,
        "progress/eta_s": event.eta_s,
        "progress/skipped_steps": event.skipped_steps,
    }


def _bands(event: Window) -> dict[str, float]:
    """The model's predictions with one fit error to either side, and what the loss says with two of its own.

    All three or none: TensorBoard refuses a margin chart whose three curves differ in their steps.
    """
    band = math.exp(min(event.predicted_error, 50.0))  # NaN where the fit's error is not known
    values = {}
    for value, name, unit in (
        (event.goodput_predicted, "goodput/predicted", ""),
        (event.predicted_step_s, "perf/predicted_step_time", "_s"),
    ):
        if math.isfinite(value) and math.isfinite(band):
            values[f"{name}{unit}"] = value
            values[f"{name}_lower{unit}"] = value / band
            values[f"{name}_upper{unit}"] = value * band
    if math.isfinite(event.loss_gained) and math.isfinite(event.loss_gained_error):
        values["evidence/loss_gained"] = event.loss_gained
        values["evidence/loss_gained_lower"] = event.loss_gained - 2 * event.loss_gained_error
        values["evidence/loss_gained_upper"] = event.loss_gained + 2 * event.loss_gained_error
    return values


def _time_scalars(snapshot: Mapping[str, float]) -> dict[str, float]:
    wall_s = max(sum(snapshot.values()), 1e-9)
    values = {f"badput/{name}": 100.0 * snapshot.get(name, 0.0) / wall_s for name in BUCKETS}
    values["goodput_time/productive_pct"] = 100.0 * snapshot.get(PRODUCTIVE, 0.0) / wall_s
    values["perf/compile_s"] = snapshot.get("compilation", 0.0)
    return values


def _known(values: Mapping[str, Any]) -> dict[str, float]:
    """Without the unknown: a gap in a curve is honest, a NaN mark on it is noise."""
    numbers = {tag: float(value) for tag, value in values.items()}
    return {tag: value for tag, value in numbers.items() if math.isfinite(value)}


def _clean(tag: str) -> str:
    return re.sub(r"[^-/\w.]", "_", tag)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


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
