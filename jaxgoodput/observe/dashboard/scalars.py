"""The numbers of an event by tag, for the dashboard and trackers.

Unknown numbers are left out, so that curves have gaps instead of NaN marks. The user's own metrics are kept
as they are: a loss of NaN must be visible.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgoodput.goodput.perf import Placement, compute_time, sync_time
from jaxgoodput.observe.badput import BUCKETS, PRODUCTIVE
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    Event,
    HostJudged,
    Regrouped,
    Resharded,
    TuneEnd,
    Window,
)


@functools.singledispatch
def scalars_of(event: Event) -> dict[str, float]:
    """Return the numbers of an event by tag; {} for most kinds of events."""
    return {}


@scalars_of.register
def _window(event: Window) -> dict[str, float]:
    values = _window_scalars(event) | _account(event)
    return _known(values) | _bands(event) | _users("train", event.metrics)


@scalars_of.register
def _tune_end(event: TuneEnd) -> dict[str, float]:
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
    return _known(values)


@scalars_of.register
def _resharded(event: Resharded) -> dict[str, float]:
    return {"reshard/seconds": event.seconds, "reshard/bytes_moved": float(event.bytes_moved)}


@scalars_of.register
def _regrouped(event: Regrouped) -> dict[str, float]:
    together_s = sum(event.seconds.values())
    return {"elastic/generation": float(event.generation), "elastic/regroup_s": together_s}


@scalars_of.register
def _host_judged(event: HostJudged) -> dict[str, float]:
    shown = {name: event.numbers.get(name) for name in ("slow_ratio", "excluded_s")}
    values = {f"elastic/{name}": value for name, value in shown.items() if value is not None}
    if event.decision == "taken in again":
        values["elastic/excluded_s"] = 0.0
    return values


@scalars_of.register
def _eval_end(event: EvalEnd) -> dict[str, float]:
    return {**_users("eval", event.metrics), "eval_time_s": event.seconds}


@scalars_of.register
def _checkpoint(event: Checkpoint) -> dict[str, float]:
    return {"checkpoint/stall_s": event.seconds}


def time_scalars(snapshot: Mapping[str, float]) -> dict[str, float]:
    """Return shares of the wall time in percent, from a ledger's seconds by bucket."""
    wall_s = max(sum(snapshot.values()), 1e-9)
    values = {f"badput/{name}": 100.0 * snapshot.get(name, 0.0) / wall_s for name in BUCKETS}
    values["goodput_time/productive_pct"] = 100.0 * snapshot.get(PRODUCTIVE, 0.0) / wall_s
    values["perf/compile_s"] = snapshot.get("compilation", 0.0)
    return values


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: the names of inner settings are joined with dots."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


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
        "gns/is_guess": float(event.noise_is_guess),
        "stats/every": event.statistics_every,
        "lr/gain": event.gain,
        "lr/base": event.learning_rate,
        "lr/effective": event.learning_rate * event.gain,
        "perf/step_time_s": event.measured_step_s,
        "perf/feeding_s": event.feeding_s,
        "perf/tflops_per_device": event.tflops_per_device,
        "perf/mfu": event.mfu,
        "perf/tokens_per_sec": event.tokens_per_s,
        "progress/scale_invariant_steps": event.progress,
        "progress/samples": event.samples,
        "progress/epoch": event.epoch,
        "progress/eta_s": event.eta_s,
        "progress/skipped_steps": event.skipped_steps,
    }


def _account(event: Window) -> dict[str, float]:
    account = event.account
    if account is None:
        return {}
    return {
        "account/earned_s": account.earned_s,
        "account/spent_s": account.spent_s,
        "account/borrowed_s": account.borrowed_s,
        "account/loan_limit_s": account.most_s,
    }


def _bands(event: Window) -> dict[str, float]:
    """Return predictions with a margin of one fit error, the noise scale with its 80 % interval, and the loss
    decrease with two standard errors.

    Value and bounds are written together or not at all: TensorBoard rejects a margin chart whose three curves
    have different steps.
    """
    band = math.exp(min(event.predicted_error, 50.0))  # NaN if the fit's error is unknown
    values = {}
    for value, name, unit in (
        (event.goodput_predicted, "goodput/predicted", ""),
        (event.predicted_step_s, "perf/predicted_step_time", "_s"),
    ):
        if math.isfinite(value) and math.isfinite(band):
            values[f"{name}{unit}"] = value
            values[f"{name}_lower{unit}"] = value / band
            values[f"{name}_upper{unit}"] = value * band
    if event.noise_interval.is_known:
        values["gns/noise_scale"] = event.noise_interval.middle
        values["gns/noise_scale_lower"] = event.noise_interval.lower
        values["gns/noise_scale_upper"] = event.noise_interval.upper
    if math.isfinite(event.loss_gained) and math.isfinite(event.loss_gained_error):
        values["evidence/loss_gained"] = event.loss_gained
        values["evidence/loss_gained_lower"] = event.loss_gained - 2 * event.loss_gained_error
        values["evidence/loss_gained_upper"] = event.loss_gained + 2 * event.loss_gained_error
    return values


def _known(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {tag: float(value) for tag, value in values.items()}
    return {tag: value for tag, value in numbers.items() if math.isfinite(value)}


def _users(group: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        re.sub(r"[^-/\w.]", "_", f"{group}/{name}"): float(value) for name, value in metrics.items()
    }
