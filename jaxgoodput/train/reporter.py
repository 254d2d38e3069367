"""The reporter tells hooks about steps, and sums steps up in windows for the dashboard.

A window is a few seconds of steps under one configuration: averages, and the model's view of them.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.clock import Clock
from jaxgoodput.engine.chips import Arithmetic
from jaxgoodput.engine.state import StepMetrics
from jaxgoodput.goodput.efficiency import efficiency, noise_scale
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import Event, StepEnd, TuneEnd, Window
from jaxgoodput.observe.race import race_of
from jaxgoodput.optim.adaptation import NoiseReadout
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.config import Reporting
from jaxgoodput.train.watcher import StepResult
from jaxgoodput.tune.evidence import Stretch
from jaxgoodput.tune.exploring import AccountState
from jaxgoodput.tune.payoff import RunLength
from jaxgoodput.tune.tuner import TunerAnswer
from jaxgoodput.tune.verdict import StrategyOption

UNKNOWN = math.nan


@dataclass(frozen=True, kw_only=True)
class WindowInputs:
    """What the `Analyst` knows at the end of a window of steps, for the `Window` event."""

    here: StrategyOption
    """Strategy and batch in use, with its model."""
    statistics_every: int
    """Steps between two measurements of the gradient noise."""
    measured_at: float
    """Last step that measured the noise; NaN if none did."""
    memory_limit: int
    """Largest micro-batch size that fits into memory; 0 if unknown."""
    stretch: Stretch | None
    """Loss decrease at the present batch."""
    stretch_before: Stretch | None
    """Loss decrease at the batch before."""
    feeding_s: float
    """Seconds to prepare a batch of the present size; NaN if unknown."""
    arithmetic: Arithmetic
    """Operations per sample, and the peak rate of the devices."""
    account: AccountState | None
    """What exploring other batches has cost; None if the run does not explore."""


class Reporter:
    """Sums steps up in windows of `window_s` seconds, and tells hooks about steps and windows.

    `tell` passes an event on to the hooks; `hears_steps` says whether any of them wants `StepEnd`.
    """

    def __init__(
        self,
        tell: Callable[[Event], None],
        config: Reporting,
        *,
        length: RunLength,
        hears_steps: bool,
        clock: Clock,
    ):
        self._tell = tell
        self._config = config
        self._length = length
        self._hears_steps = hears_steps
        self._clock = clock
        self._results: list[StepResult] = []  # of the open window
        self._start_s = clock.now()

    def add(self, result: StepResult) -> None:
        """Add a step to the open window and tell the hooks about it."""
        self._results.append(result)
        if self._hears_steps:
            self._tell(_step_end(result))

    @property
    def is_empty(self) -> bool:
        """Whether no step has been added to the open window yet."""
        return not self._results

    @property
    def is_due(self) -> bool:
        """Whether the open window has lasted long enough."""
        return self._clock.now() - self._start_s >= self._config.window_s

    def draw(self, inputs: WindowInputs) -> None:
        """Close the window, which holds at least one step, and tell the hooks about it."""
        now_s = self._clock.now()
        results, self._results = self._results, []
        seconds, self._start_s = now_s - self._start_s, now_s
        latest = results[-1]
        at = latest.metrics.progress, latest.ticket.samples, inputs.here.limits.base
        rate = self._length.rate(*at)
        self._tell(
            window_of(
                results,
                seconds,
                inputs,
                eta_s=_eta_s(results, self._length),
                learning_rate=UNKNOWN if rate is None else rate,
                tokens_per_sample=float(self._config.tokens_per_sample or UNKNOWN),
            )
        )


def window_of(
    results: Sequence[StepResult],
    seconds: float,
    inputs: WindowInputs,
    *,
    eta_s: float,
    learning_rate: float,
    tokens_per_sample: float = UNKNOWN,
) -> Window:
    """Return the window of `results`, at least one step, which took `seconds` of wall time.

    Its configuration is the last step's. `eta_s` is the time left to the end of the run.
    """
    latest = results[-1]
    metrics, ticket, here = latest.metrics, latest.ticket, inputs.here
    limits = here.limits
    config, noise = ticket.config, metrics.noise
    timed = [r.parts.step_s for r in results if r.ticket.timed and r.ticket.config == config]
    measured = statistics.median(timed) if timed else UNKNOWN
    throughput = config.global_batch_size / measured if measured else UNKNOWN
    worth = _worth(latest, limits)
    predicted_s = _predicted_s(latest, here)
    tflops = throughput * inputs.arithmetic.tflops_per_sample / inputs.arithmetic.num_devices
    stretch = inputs.stretch or Stretch(config=config, num_steps=0)
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
        predicted_error=UNKNOWN if here.fit is None else here.fit.error,
        goodput_measured=throughput * worth,
        goodput_predicted=config.global_batch_size / predicted_s * worth,
        throughput=throughput,
        efficiency=worth,
        grad=noise.plain,
        noise_scale=float(noise_scale(noise.expected, limits.base)) if noise.is_known else UNKNOWN,
        noise_is_guess=noise.is_known and noise.is_guess,
        noise_interval=metrics.noise_interval(limits.base),
        noise_age_steps=float(ticket.step - inputs.measured_at),
        noise_confidence=noise.num_samples,
        gain=metrics.gain,
        learning_rate=learning_rate,
        statistics_every=inputs.statistics_every,
        skipped_steps=int(metrics.num_skipped),
        memory_limit=inputs.memory_limit,
        steps_per_dispatch=len(results) / sum(1 / r.ticket.num_together for r in results),
        loss_gained=stretch.gained,
        loss_gained_error=stretch.error,
        loss_gained_expected=_expected_gain(latest, inputs.stretch_before, limits),
        feeding_s=inputs.feeding_s,
        account=inputs.account,
        tflops_per_device=tflops,
        mfu=tflops / inputs.arithmetic.peak_tflops,
        tokens_per_s=throughput * tokens_per_sample,
        eta_s=eta_s,
    )


def tune_end(
    answer: TunerAnswer,
    slopes: Mapping[int, Stretch],
    strategies: StrategyCompiler,
    *,
    switched: bool,
) -> TuneEnd:
    """Return the event of a verdict.

    `slopes` are the measured loss decreases by global batch; `switched` says whether the verdict changes the
    batch or the strategy.
    """
    situation, here = answer.situation, answer.situation.here
    strategy = here.config.strategy
    return TuneEnd(
        step=situation.step,
        before=here.config,
        verdict=answer.verdict,
        fit=here.fit,
        timings=situation.timings,
        grad=situation.measured_grad,
        noise_factor=situation.noise_factor,
        num_nodes=here.placement.num_nodes,
        num_replicas=here.config.num_replicas,
        limits=here.limits,
        residuals=here.residuals,
        switched=switched,
        feeding=here.feeding,
        race=race_of(
            situation,
            slopes,
            sizes=strategies.sizes(strategy),
            settled=strategies.settled(strategy),
            memory_limit=strategies.memory_limit(strategy),
        ),
    )


def _worth(latest: StepResult, limits: BatchLimits) -> float:
    """Return the statistical efficiency of a step's batch; NaN if the noise is unknown."""
    scale = latest.ticket.config.global_batch_size / limits.base
    if latest.metrics.noise.is_known:
        return float(efficiency(latest.metrics.grad, scale))
    return 1.0 if scale == 1 else UNKNOWN  # the base batch has efficiency 1 whatever the noise


def _predicted_s(latest: StepResult, here: StrategyOption) -> float:
    """Return the step time that the model predicts; NaN before the first fit."""
    if here.fit is None:
        return UNKNOWN
    config = latest.ticket.config
    model = here.model(latest.metrics.grad)
    throughput = model.throughput(here.placement, config.micro_batch_size, config.num_micro_batches)
    return config.global_batch_size / float(throughput)


def _expected_gain(latest: StepResult, before: Stretch | None, limits: BatchLimits) -> float:
    """Return the loss decrease expected at this batch, judging by the one before; NaN if there is none."""
    if before is None:
        return UNKNOWN
    scale = before.config.global_batch_size / limits.base
    then = float(efficiency(latest.metrics.noise.expected, scale))
    return before.gained * _worth(latest, limits) / then


def _eta_s(results: Sequence[StepResult], length: RunLength) -> float:
    first, last = results[0], results[-1]
    if length.base_steps is None:
        left = length.num_samples - last.ticket.samples
        if len(results) == 1:  # steps that are as long as windows
            return max(left, 0.0) * last.parts.step_s / max(last.ticket.num_samples, 1)
        done = last.ticket.samples - first.ticket.samples
    else:
        left = length.base_steps - last.metrics.progress
        done = last.metrics.progress - first.metrics.progress
    # From step to step, because an evaluation after the last of them tells nothing about their pace.
    return max(left, 0.0) * (last.ready_s - first.ready_s) / done if done > 0 else UNKNOWN


def _means(results: Sequence[StepResult]) -> dict[str, float]:
    """Return means over the steps that were applied, with the user's own metrics by their names."""
    applied = [r.metrics for r in results if r.metrics.is_finite]
    shown = [{**m.aux, "loss": m.loss, "grad_norm": m.grad_norm} for m in applied]
    names = ["loss", "grad_norm", *results[-1].metrics.aux]
    return {name: float(np.mean([m[name] for m in shown])) if shown else UNKNOWN for name in names}


# Fields of a step's metrics that `StepEnd` holds elsewhere, and the names by which hooks know the others.
_SAID_ELSEWHERE = {"is_finite", "skipped_in_a_row", "num_samples", "num_groups", "progress"}
_FOR_DECISIONS = {"most_gain"}
_NAMES = {
    "num_skipped": "skipped",
    "sqr": "grad_sqr",
    "var": "grad_var",
    "num_samples": "noise_samples",
    "newest_samples": "newest_noise_samples",
}


def _step_end(result: StepResult) -> StepEnd:
    """Return the event that tells hooks about a step."""
    ticket, metrics = result.ticket, result.metrics
    return StepEnd(
        step=ticket.step,
        progress=metrics.progress,
        samples=ticket.samples,
        config=ticket.config,
        num_samples=ticket.num_samples,
        before=ticket.before,
        after=ticket.after,
        finite=bool(metrics.is_finite),
        at_s=result.ready_s,
        seconds=result.parts.step_s if ticket.timed else None,
        metrics=_by_name(metrics),
    )


# Of a step's metrics and of its noise: names of fields, and by which hooks know them. Arrays are left out.
_OWN = tuple(
    (f.name, _NAMES.get(f.name, f.name))
    for f in dataclasses.fields(StepMetrics)
    if f.name not in {"noise", "measured", "aux", *_SAID_ELSEWHERE, *_FOR_DECISIONS}
)
_OF_NOISE = tuple(
    (f.name, _NAMES.get(f.name, f.name))
    for f in dataclasses.fields(NoiseReadout)
    if not f.name.startswith("group_")
)


def _by_name(metrics: StepMetrics[float]) -> dict[str, float]:
    """Return the numbers of a step by the names that hooks know, without the fields in `_SAID_ELSEWHERE`."""
    found = {known: getattr(metrics, name) for name, known in _OWN}
    found |= {known: getattr(metrics.noise, name) for name, known in _OF_NOISE}
    if not metrics.weight > 0:  # a mean over nothing
        found |= {"loss": UNKNOWN, "grad_norm": UNKNOWN}
    return found | {f"aux/{name}": value for name, value in metrics.aux.items()}
