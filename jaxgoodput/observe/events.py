"""What the loop tells the outside: frozen records for hooks, the dashboard and the journal.

An event is added here and nowhere else: the class names the method of a hook that hears of it, and
the journal writes whatever comes. (`hooks.Hook` lists the methods for people.)
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from jaxtyping import PyTree

from jaxgoodput.data.cursor import Cursor
from jaxgoodput.goodput.efficiency import Grad, GradParams
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Feeding, PerfParams, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a run; each kind of event is a subclass."""

    hook: ClassVar[str]
    """The method of a hook that hears of it."""
    journaled: ClassVar[bool] = True
    """Whether the journal writes it, but for fields whose metadata are `NOT_JOURNALED`."""
    step: int
    """Optimizer updates applied so far; of a `StepEnd` its own index, from 1."""


NOT_JOURNALED = MappingProxyType({"journaled": False})


@dataclass(frozen=True, kw_only=True)
class FitStart(Event):
    """A run begins, new or restored."""

    hook: ClassVar[str] = "on_fit_start"
    progress: float
    """Base steps done."""
    restart: int
    """0 for the first run in this workdir."""
    config: BatchConfig
    limits: BatchLimits
    device_kind: str
    num_devices: int
    num_processes: int
    settings: Mapping[str, Any]
    """The whole configuration as JSON values."""
    at_s: float
    """When all was ready for the first step, by the trainer's clock."""
    groups: tuple[str, ...] = ()
    """The names of the groups of parameters whose noise is told apart, in the order of `TuneEnd.grad`."""


@dataclass(frozen=True, kw_only=True)
class StepEnd(Event):
    """One update is done (or was skipped: its loss, gradient or result was not finite)."""

    hook: ClassVar[str] = "on_step_end"
    journaled: ClassVar[bool] = False
    progress: float
    """Base steps done, this update among them."""
    samples: int
    """Real samples applied since the first run began."""
    config: BatchConfig
    num_samples: int
    """Real samples of this update, all processes."""
    before: Cursor
    after: Cursor
    finite: bool
    at_s: float
    """When it was complete, by the trainer's clock; hooks hear of it later."""
    seconds: float | None
    """From completion to completion; None for a step that is not timed."""
    metrics: Mapping[str, float]
    """`loss`, `grad_norm`, `gain` and so on, and the user's own scalars."""


@dataclass(frozen=True, kw_only=True)
class Window(Event):
    """Averages over the steps since the previous window: what the dashboard draws."""

    hook: ClassVar[str] = "on_window"
    progress: float
    samples: int
    epoch: int
    config: BatchConfig
    num_steps: int
    """Steps in this window."""
    seconds: float
    """Wall time of this window."""
    metrics: Mapping[str, float]
    """Means over the window: `loss`, `grad_norm`, the user's own."""
    measured_step_s: float
    """The median step time; NaN where no step was timed."""
    predicted_step_s: float
    """The model's step time for this configuration; NaN = unknown."""
    predicted_error: float
    """The fit's RMS log error; NaN = unknown."""
    goodput_measured: float
    """Measured throughput x efficiency, useful samples/s; NaN = unknown."""
    goodput_predicted: float
    throughput: float
    """Samples/s, measured."""
    efficiency: float
    """Statistical efficiency at this batch; NaN = unknown."""
    grad: GradParams
    """Smoothed estimates of the gradient's signal and noise; NaN = unknown."""
    noise_scale: float
    """The batch at which noise and signal are equal, samples; of groups of parameters, on average.
    NaN = unknown."""
    noise_is_lower_bound: bool
    """Whether no signal is above its own standard error: the noise scale may be any larger."""
    noise_age_steps: float
    """Steps since the newest sample of the noise; NaN = none since the process began."""
    noise_confidence: float
    """Effective number of noise samples behind the estimate."""
    gain: float
    """The factor on the learning rate."""
    learning_rate: float
    """The user's own, before the gain; NaN = unknown."""
    statistics_every: int
    skipped_steps: int
    """Updates left out since the run began."""
    memory_limit: int
    """The largest micro-batch that fits."""
    eta_s: float
    loss_gained: float = math.nan
    """Loss lost per e-fold of samples with this batch; NaN = too few steps to tell."""
    loss_gained_error: float = math.nan
    """Its standard error."""
    loss_gained_expected: float = math.nan
    """What the batch before gained, times what the model says of this one's efficiency beside that one's."""
    tflops_per_device: float = math.nan
    """10^12 operations/s of matrix products, without what measuring the noise takes; NaN = not known."""
    mfu: float = math.nan
    """Model flops utilisation: of what the chip can do in bfloat16; NaN = a chip that is not listed."""
    tokens_per_s: float = math.nan
    """NaN = `Reporting.tokens_per_sample` is None."""
    feeding_s: float = math.nan
    """What bringing the rows of a batch to the device takes, beside the steps of others; NaN = no tables."""


@dataclass(frozen=True, kw_only=True)
class TuneEnd(Event):
    """The model was fitted and a verdict was reached."""

    hook: ClassVar[str] = "on_tune_end"
    before: BatchConfig
    verdict: Verdict
    fit: PerfFit | None
    timings: StepTimings | None = field(metadata=NOT_JOURNALED)
    """They ride in the checkpoint; in the journal they would be most of the file."""
    grad: Grad
    num_nodes: int
    num_replicas: int
    limits: BatchLimits
    residuals: tuple[tuple[int, float], ...]
    """Pairs of a micro-batch size and its measured over its modelled step time."""
    switched: bool
    feeding: Feeding | None = None
    """What prepares a batch beside the step."""

    @property
    def model(self) -> GoodputModel | None:
        """The model behind the verdict, in numbers of the host; None without a fit."""
        if self.fit is None:
            return None
        names = PerfParams.__dataclass_fields__
        perf = PerfParams(**{name: float(getattr(self.fit.params, name)) for name in names})
        grad = dataclasses.replace(
            self.grad, sqr=np.asarray(self.grad.sqr, float), var=np.asarray(self.grad.var, float)
        )
        return GoodputModel(
            perf=perf,
            grad=grad,
            base_batch_size=self.limits.base,
            residuals=self.residuals,
            feeding=self.feeding,
        )

    @property
    def placement(self) -> Placement:
        """Where the run was."""
        return Placement(num_nodes=self.num_nodes, num_replicas=self.num_replicas)


@dataclass(frozen=True, kw_only=True)
class Resharded(Event):
    """The state was moved from one strategy's layout to another's, in memory."""

    hook: ClassVar[str] = "on_reshard"
    before: str
    """The strategy that was left."""
    after: str
    seconds: float
    """How long the loop stood still."""
    bytes_moved: int
    """Sent between devices."""
    largest_send_bytes: int
    """Sent by one device."""
    peak_extra_bytes: int
    """Memory of one device beyond what it holds before or after."""


@dataclass(frozen=True, kw_only=True)
class EvalEnd(Event):
    """An evaluation is done."""

    hook: ClassVar[str] = "on_eval_end"
    progress: float
    at_s: float
    """When it ended, by the trainer's clock."""
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StateShown(Event):
    """The parameters as they were between two steps, because someone asked (`Trainer.request_state`)."""

    hook: ClassVar[str] = "on_state"
    journaled: ClassVar[bool] = False
    progress: float
    """Base steps done."""
    params: PyTree
    """The average where the run keeps one; NumPy arrays on the host, not to be written to."""
    model_state: PyTree
    """Likewise; random keys stay keys."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint was handed to the writer, or failed."""

    hook: ClassVar[str] = "on_checkpoint"
    seconds: float
    """How long the loop stood still."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReadsRetried(Event):
    """Samples could not be read at first, and were at another attempt."""

    hook: ClassVar[str] = "on_reads_retried"
    num_retried: int
    """Attempts that failed since the process began, in the process that tells."""


@dataclass(frozen=True, kw_only=True)
class Regrouped(Event):
    """Processes have come or gone, and the run goes on with those that there are now."""

    hook: ClassVar[str] = "on_regrouped"
    generation: int
    """Counts the sets of processes that this job has had."""
    num_processes_before: int
    """0 in a process that has just come."""
    num_processes: int
    reason: str
    """Why the set before this one ended; empty for the first."""
    seconds: Mapping[str, float]
    """What coming together took in the process that tells, by part."""


@dataclass(frozen=True, kw_only=True)
class HostJudged(Event):
    """A host was left out for a while, taken in again, or refused, since the last set of processes."""

    hook: ClassVar[str] = "on_host_judged"
    host: str
    decision: str
    """"left out", "taken in again" or "refused"."""
    why: str
    numbers: Mapping[str, float]
    """On which it rests, such as `slow_ratio`, its seconds per sample over the median of the others', and
    `excluded_s`, for how long it is left out."""


@dataclass(frozen=True, kw_only=True)
class Preempt(Event):
    """The run was asked to stop; it has saved, if it could."""

    hook: ClassVar[str] = "on_preempt"
    signal: str


REGROUPED = "regrouped: "
"""How the reason of a `FitEnd` begins where processes have come or gone."""


@dataclass(frozen=True, kw_only=True)
class FitEnd(Event):
    """The run is over; `reason` is 'done', 'preempted', 'regrouped: ' and why, or what went wrong."""

    hook: ClassVar[str] = "on_fit_end"
    progress: float
    samples: int
    seconds: float
    reason: str
    buckets_s: Mapping[str, float] = field(default_factory=dict)
    """Wall time by bucket of the time ledger."""

    @property
    def goes_on(self) -> bool:
        """Only the set of processes ends: the run goes on with another, from memory."""
        return self.reason.startswith(REGROUPED)
