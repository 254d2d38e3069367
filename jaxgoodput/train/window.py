"""`window_of`: averages over the steps since the last window, and what the model predicts for them. Pure."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from jaxgoodput.engine.chips import Arithmetic
from jaxgoodput.goodput.efficiency import efficiency, noise_scale
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Feeding, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.events import Window
from jaxgoodput.train.watcher import StepResult
from jaxgoodput.tune.evidence import Stretch

UNKNOWN = math.nan


def window_of(
    results: Sequence[StepResult],
    seconds: float,
    *,
    limits: BatchLimits,
    placement: Placement,
    fit: PerfFit | None,
    learning_rate: float,
    statistics_every: int,
    sampled_at: int | None,
    memory_limit: int,
    total_base_steps: float | None,
    total_samples: int,
    stretch: Stretch | None = None,
    stretch_before: Stretch | None = None,
    feeding: Feeding | None = None,
    feeding_s: float = UNKNOWN,
    arithmetic: Arithmetic | None = None,
    tokens_per_sample: float = UNKNOWN,
) -> Window:
    """Return the window of `results`, at least one, that took `seconds` of wall time.

    Its configuration is the one of the last step. `sampled_at` is the step that measured the noise last. The
    run ends at `total_base_steps`, or at `total_samples` if that is None.
    """
    latest = results[-1]
    metrics, ticket = latest.metrics, latest.ticket
    config = ticket.config
    cautious, known = metrics.noise.cautious, metrics.noise.is_known
    timed = [r.parts.step_s for r in results if r.ticket.timed and r.ticket.config == config]
    measured = statistics.median(timed) if timed else UNKNOWN
    scale = config.global_batch_size / limits.base
    # At the base batch the efficiency is 1 whatever the noise.
    worth = float(efficiency(cautious, scale)) if known else (1.0 if scale == 1 else UNKNOWN)
    throughput = config.global_batch_size / measured if measured else UNKNOWN
    model = None
    if fit is not None:
        model = GoodputModel(
            perf=fit.params, grad=cautious, base_batch_size=limits.base, feeding=feeding
        )
    predicted_s = _predicted_s(model, placement, config)
    expected = UNKNOWN
    if stretch_before is not None:
        then = stretch_before.config.global_batch_size / limits.base
        # The earlier gain, scaled by what the present model says of both batches.
        expected = stretch_before.gained * worth / float(efficiency(cautious, then))
    tflops = UNKNOWN
    if arithmetic is not None:
        tflops = throughput * arithmetic.tflops_per_sample / arithmetic.num_devices
    return Window(
        step=ticket.step,
        progress=metrics.progress,
        samples=ticket.samples,
        epoch=ticket.after.epoch,
        config=config,
        num_steps=len(results),
        seconds=seconds,
        metrics=_means(results),
        measured_step_s=measured,
        predicted_step_s=predicted_s,
        predicted_error=UNKNOWN if fit is None else fit.error,
        goodput_measured=throughput * worth,
        goodput_predicted=config.global_batch_size / predicted_s * worth,
        throughput=throughput,
        efficiency=worth,
        grad=metrics.noise.plain,
        noise_scale=float(noise_scale(cautious, limits.base)) if known else UNKNOWN,
        noise_is_lower_bound=known and metrics.noise.is_lower_bound,
        noise_age_steps=UNKNOWN if sampled_at is None else float(ticket.step - sampled_at),
        noise_confidence=metrics.noise.num_samples,
        gain=metrics.gain,
        learning_rate=learning_rate,
        statistics_every=statistics_every,
        skipped_steps=int(metrics.num_skipped),
        memory_limit=memory_limit,
        loss_gained=UNKNOWN if stretch is None else stretch.gained,
        loss_gained_error=UNKNOWN if stretch is None else stretch.error,
        loss_gained_expected=expected,
        feeding_s=feeding_s,
        tflops_per_device=tflops,
        mfu=UNKNOWN if arithmetic is None else tflops / arithmetic.peak_tflops,
        tokens_per_s=throughput * tokens_per_sample,
        eta_s=_eta_s(results, total_base_steps, total_samples),
    )


def _predicted_s(model: GoodputModel | None, placement: Placement, config: BatchConfig) -> float:
    """Return the seconds that a step takes by the model; NaN without one."""
    if model is None:
        return UNKNOWN
    at = (placement, config.micro_batch_size, config.num_micro_batches)
    return config.global_batch_size / float(model.throughput(*at))


def _eta_s(
    results: Sequence[StepResult], total_base_steps: float | None, total_samples: int
) -> float:
    first, last = results[0], results[-1]
    if total_base_steps is None:
        left = total_samples - last.ticket.samples
        if len(results) == 1:  # a step takes as long as a window
            return max(left, 0.0) * last.parts.step_s / max(last.ticket.num_samples, 1)
        done = last.ticket.samples - first.ticket.samples
    else:
        left = total_base_steps - last.metrics.progress
        done = last.metrics.progress - first.metrics.progress
    # Measured from step to step: an evaluation after the last step does not slow them.
    return max(left, 0.0) * (last.ready_s - first.ready_s) / done if done > 0 else UNKNOWN


def _means(results: Sequence[StepResult]) -> dict[str, float]:
    """Return the means over the steps that were applied, with the user's own metrics by name."""
    applied = [r.metrics for r in results if r.metrics.is_finite]
    shown = [{**m.aux, "loss": m.loss, "grad_norm": m.grad_norm} for m in applied]
    names = ["loss", "grad_norm", *results[-1].metrics.aux]
    return {name: float(np.mean([m[name] for m in shown])) if shown else UNKNOWN for name in names}
