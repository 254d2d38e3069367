"""What the loop tells the outside: frozen records for hooks, the dashboard and the journal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput.data.cursor import Cursor
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class FitStart:
    """A run begins, new or restored."""

    step: int  # optimizer updates already applied
    progress: float  # base steps
    restart: int  # 0 for the first run in this workdir
    config: BatchConfig
    limits: BatchLimits
    device_kind: str
    num_devices: int
    num_processes: int
    settings: Mapping[str, Any]  # the whole configuration as JSON values
    at_s: float  # when all was ready for the first step, by the trainer's clock


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """One update is done (or was skipped because its gradient was not finite)."""

    step: int  # index of the update, from 1
    progress: float  # base steps, after this update
    samples: int  # real samples applied since the first run began
    config: BatchConfig
    num_samples: int  # real samples of this update, all processes
    before: Cursor
    after: Cursor
    finite: bool
    at_s: float  # when it was complete, by the trainer's clock; hooks hear of it later
    seconds: float | None  # completion to completion; None for a step that is not timed
    metrics: Mapping[str, float]  # loss, grad_norm, gain, ..., the user's own scalars


@dataclass(frozen=True, kw_only=True)
class Window:
    """Averages over the steps since the previous window: what the dashboard draws."""

    step: int
    progress: float
    samples: int
    epoch: int
    config: BatchConfig
    num_steps: int  # steps in this window
    seconds: float  # wall time of this window
    metrics: Mapping[str, float]  # means over the window: loss, grad_norm, the user's own
    measured_step_s: float  # median; NaN where no step was timed
    predicted_step_s: float  # by the model, for this configuration; NaN = unknown
    predicted_error: float  # the fit's RMS log error; NaN = unknown
    goodput_measured: float  # measured throughput x efficiency, useful samples/s; NaN = unknown
    goodput_predicted: float
    throughput: float  # samples/s measured
    efficiency: float  # statistical efficiency at this batch; NaN = unknown
    grad: GradParams  # smoothed estimates; NaN = unknown
    noise_scale: float  # samples; NaN = unknown
    noise_confidence: float  # effective number of noise samples behind the estimate
    gain: float  # learning-rate factor
    learning_rate: float  # the user's own, before the gain; NaN = not known
    statistics_every: int
    skipped_steps: int  # since the run began
    memory_limit: int  # the largest micro-batch that fits
    eta_s: float


@dataclass(frozen=True, kw_only=True)
class TuneEnd:
    """The model was fitted and a verdict was reached."""

    step: int
    before: BatchConfig
    verdict: Verdict
    fit: PerfFit | None
    timings: StepTimings | None
    grad: GradParams
    num_nodes: int
    num_replicas: int
    limits: BatchLimits
    residuals: tuple[tuple[int, float], ...]  # (micro-batch size, measured / modelled step time)
    switched: bool


@dataclass(frozen=True, kw_only=True)
class Resharded:
    """The state was moved from one strategy's layout to another's, in memory."""

    step: int
    before: str  # strategy
    after: str
    seconds: float  # during which the loop stood still
    bytes_moved: int  # between devices
    largest_send_bytes: int  # by one device
    peak_extra_bytes: int  # on one device, beyond what it holds before or after


@dataclass(frozen=True, kw_only=True)
class EvalEnd:
    """An evaluation is done."""

    step: int
    progress: float
    at_s: float  # when it ended, by the trainer's clock
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint was handed to the writer, or failed."""

    step: int
    seconds: float  # during which the loop stood still
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Preempt:
    """The run was asked to stop and will save."""

    step: int
    signal: str


@dataclass(frozen=True, kw_only=True)
class FitEnd:
    """The run is over; `reason` is 'done', 'preempted', or what went wrong."""

    step: int
    progress: float
    samples: int
    seconds: float
    reason: str
    buckets_s: Mapping[str, float] = field(default_factory=dict)  # badput, by bucket
