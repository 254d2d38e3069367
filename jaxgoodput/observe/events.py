"""Events: frozen records of what happens in a run, for hooks, dashboard and journal.

To add an event, add a class here. It names the hook method that handles it, and the journal writes it and
reads it back without further code. Only `hooks.Hook` should list the method as well, for its users.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from jaxtyping import PyTree

from jaxgoodput._fields.serial import decode
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.goodput.efficiency import Grad, GradParams
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.intervals import UNKNOWN_INTERVAL, NoiseInterval
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Feeding, PerfParams, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.race import Contender
from jaxgoodput.tune.exploring import AccountState
from jaxgoodput.tune.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run. Each kind of event is a subclass."""

    hook: ClassVar[str]
    """Name of the hook method that handles it."""
    journaled: ClassVar[bool] = True
    """Whether the journal records it, without the fields whose metadata are `NOT_JOURNALED`."""
    # A journal of another version may have more fields, which are skipped.
    is_part: ClassVar[bool] = True
    step: int
    """Number of updates applied so far. For a `StepEnd`, its own number, counted from 1."""


NOT_JOURNALED = MappingProxyType({"journaled": False})


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The part of a run's configuration that reports and forecasts need."""

    is_part: ClassVar[bool] = True  # the configuration has more fields
    batch: BatchLimits
    """The user's own limits. `FitStart.limits` are these, narrowed to the devices of the run."""
    policy: str | Mapping[str, int]
    """Name of the batch policy, or the user's schedule: batch sizes by the share of training done."""
    rule: str | None = None
    """Learning-rate rule; None: chosen to suit the optimizer."""
    base_steps: float | None = None
    """Length of training, base steps; None if it is given in epochs."""


@dataclass(frozen=True, kw_only=True)
class FitStart(Event):
    """Event: a run starts, from the beginning or from a checkpoint."""

    hook: ClassVar[str] = "on_fit_start"
    progress: float
    """Base steps done."""
    restart: int
    """0 for the first run in this workdir."""
    config: BatchConfig
    """Batch in use."""
    limits: BatchLimits
    """Limits of the batch on the devices of this run."""
    device_kind: str
    num_devices: int
    num_processes: int
    settings: Mapping[str, Any]
    """Whole configuration as JSON values."""
    at_s: float
    """Time at which everything was ready for the first step, by the trainer's clock."""
    groups: tuple[str, ...] = ()
    """Names of the groups of parameters whose noise is measured separately, in the order of
    `TuneEnd.grad`."""

    @property
    def known_settings(self) -> RunSettings:
        """The settings with their types. Raises ValueError if they do not describe a run."""
        return decode(self.settings, RunSettings, "settings")


@dataclass(frozen=True, kw_only=True)
class StepEnd(Event):
    """Event: an update is done, or was skipped because its loss, gradient or result was not finite."""

    hook: ClassVar[str] = "on_step_end"
    journaled: ClassVar[bool] = False
    progress: float
    """Base steps done, including this update."""
    samples: int
    """Real samples applied since the first run began; padding is not counted."""
    config: BatchConfig
    """Batch of this update."""
    num_samples: int
    """Real samples of this update, in all processes."""
    before: Cursor
    """Place in the data before this update."""
    after: Cursor
    """Place in the data after this update."""
    finite: bool
    """Whether the update was applied."""
    at_s: float
    """Time of completion, by the trainer's clock; hooks are called later."""
    seconds: float | None
    """Time since the completion of the step before; None if this step is not timed."""
    metrics: Mapping[str, float]
    """`loss`, `grad_norm`, `gain` and so on, and the user's own scalars. Loss and norm of a batch without
    weight are unknown, NaN."""

    @property
    def loss(self) -> float:
        """Mean loss of the batch, before the update."""
        return self.metrics["loss"]


@dataclass(frozen=True, kw_only=True)
class Window(Event):
    """Event: averages over the steps since the previous window, which the dashboard draws."""

    hook: ClassVar[str] = "on_window"
    progress: float
    """Base steps done."""
    samples: int
    """Real samples applied since the first run began."""
    epoch: int
    """Number of the current pass over the data."""
    config: BatchConfig
    """Batch in use."""
    num_steps: int
    """Steps in this window."""
    seconds: float
    """Wall time of this window."""
    metrics: Mapping[str, float]
    """Means over the window: `loss`, `grad_norm`, the user's own."""
    measured_step_s: float
    """Median step time; NaN if no step was timed."""
    predicted_step_s: float
    """Step time that the model predicts for this batch; NaN if unknown."""
    predicted_error: float
    """RMS log error of the fitted model; NaN if unknown."""
    goodput_measured: float
    """Measured throughput x efficiency, useful samples/s; NaN if unknown."""
    goodput_predicted: float
    """Predicted throughput x efficiency, useful samples/s; NaN if unknown."""
    throughput: float
    """Measured samples/s."""
    efficiency: float
    """Statistical efficiency at this batch; NaN if unknown."""
    grad: GradParams
    """Smoothed estimates of the gradient's signal and noise; NaN if unknown."""
    noise_scale: float
    """Batch size at which noise and signal are equal, samples; the mean if there are groups of parameters.
    NaN if unknown."""
    noise_age_steps: float
    """Steps since the last measurement of the noise; NaN if this process has made none."""
    noise_confidence: float
    """Effective number of noise samples behind the estimate."""
    gain: float
    """Factor on the learning rate."""
    learning_rate: float
    """The user's learning rate, before the gain; NaN if unknown."""
    statistics_every: int
    """Steps from one measurement of the noise to the next."""
    skipped_steps: int
    """Updates skipped since the run began, because they were not finite."""
    memory_limit: int
    """Largest micro-batch that fits into memory."""
    eta_s: float
    """Seconds until the end of training at the present goodput."""
    steps_per_dispatch: float = 1.0
    """Steps that were dispatched together, in the mean."""
    loss_gained: float = math.nan
    """Decrease of the loss per e-fold of samples with this batch; NaN if there were too few steps."""
    loss_gained_error: float = math.nan
    """Standard error of `loss_gained`."""
    loss_gained_expected: float = math.nan
    """Decrease with the previous batch, scaled by the ratio of efficiencies that the model predicts."""
    tflops_per_device: float = math.nan
    """10^12 matrix-product operations/s, without the measurement of the noise; NaN if unknown."""
    mfu: float = math.nan
    """Model flops utilisation, relative to the chip's bfloat16 peak; NaN for an unlisted chip."""
    tokens_per_s: float = math.nan
    """NaN if `Reporting.tokens_per_sample` is None."""
    noise_is_guess: bool = False
    """Whether no signal exceeds its own standard error: the noise scale is little more than a guess."""
    noise_interval: NoiseInterval = UNKNOWN_INTERVAL
    """80 % interval of the noise scale, samples; NaN if unknown. Decisions rest on `noise_scale`, which may
    lie outside if `noise_is_guess`."""
    feeding_s: float = math.nan
    """Time to bring a batch's table rows to the device, hidden behind other steps; NaN without tables."""
    account: AccountState | None = None
    """What exploring other batches has cost and may cost; None if the run does not explore."""

    @property
    def loss(self) -> float:
        """Mean loss over the window."""
        return self.metrics["loss"]


@dataclass(frozen=True, kw_only=True)
class TuneEnd(Event):
    """Event: the tuner fitted the goodput model and reached a verdict."""

    hook: ClassVar[str] = "on_tune_end"
    before: BatchConfig
    """Batch in use when the tuner was asked."""
    verdict: Verdict
    fit: PerfFit | None
    """Fitted step-time model; None if there are too few step times."""
    timings: StepTimings | None = field(default=None, metadata=NOT_JOURNALED)
    """Step times behind the fit. Checkpoints keep them; they would be most of a journal."""
    grad: Grad
    """Signal and noise that gradients showed; the verdict took the noise `noise_factor` times as large."""
    num_nodes: int
    num_replicas: int
    limits: BatchLimits
    """Limits of the batch when the tuner was asked."""
    residuals: tuple[tuple[int, float], ...]
    """Pairs of a micro-batch size and its ratio of measured to modelled step time."""
    switched: bool
    """Whether the verdict changes the batch or the strategy."""
    feeding: Feeding | None = None
    """Time to prepare a batch while other steps run; None if there are no tables."""
    noise_factor: float = 1.0
    """What the loss has corrected the measured noise by, for this verdict."""
    race: tuple[Contender, ...] = ()
    """What is known of each batch that the run may use, smallest first."""

    @property
    def model(self) -> GoodputModel | None:
        """The model behind the verdict, in host numbers; None without a fit."""
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
        """The nodes and replicas of the run."""
        return Placement(num_nodes=self.num_nodes, num_replicas=self.num_replicas)


@dataclass(frozen=True, kw_only=True)
class Resharded(Event):
    """Event: the state was moved in memory from one strategy's layout to another's."""

    hook: ClassVar[str] = "on_reshard"
    before: str
    """Previous strategy."""
    after: str
    """New strategy."""
    seconds: float
    """Time for which the training loop was paused."""
    bytes_moved: int
    """Bytes sent between devices."""
    largest_send_bytes: int
    """Bytes sent by the device that sent most."""
    peak_extra_bytes: int
    """Peak memory of a device beyond what it holds before or after."""


@dataclass(frozen=True, kw_only=True)
class EvalEnd(Event):
    """Event: an evaluation is done, with its metrics."""

    hook: ClassVar[str] = "on_eval_end"
    progress: float
    """Base steps done."""
    at_s: float
    """Time of its end, by the trainer's clock."""
    seconds: float
    """Duration of the evaluation."""
    metrics: Mapping[str, float]
    """Results of the evaluation."""


@dataclass(frozen=True, kw_only=True)
class StateShown(Event):
    """Event: the parameters between two steps, because `Trainer.request_state` asked for them."""

    hook: ClassVar[str] = "on_state"
    journaled: ClassVar[bool] = False
    progress: float
    """Base steps done."""
    params: PyTree
    """NumPy arrays on the host, not to be modified; the average if the run keeps one."""
    model_state: PyTree
    """NumPy arrays on the host, not to be modified; random keys stay keys."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """Event: a checkpoint was handed to the writer, or failed."""

    hook: ClassVar[str] = "on_checkpoint"
    seconds: float
    """Time for which the training loop was paused."""
    error: str | None = None
    """What went wrong; None if nothing did."""


@dataclass(frozen=True, kw_only=True)
class ReadsRetried(Event):
    """Event: samples could not be read at first, but could when the read was repeated."""

    hook: ClassVar[str] = "on_reads_retried"
    num_retried: int
    """Failed attempts since the start of the process that reports."""


@dataclass(frozen=True, kw_only=True)
class Regrouped(Event):
    """Event: processes joined or left, and the run continues with the present ones."""

    hook: ClassVar[str] = "on_regrouped"
    generation: int
    """Number of the present set of processes, counted over the job."""
    num_processes_before: int
    """0 in a process that has just joined."""
    num_processes: int
    reason: str
    """Why the previous set ended; empty for the first set."""
    seconds: Mapping[str, float]
    """Duration of each part of the change, in the process that reports."""


@dataclass(frozen=True, kw_only=True)
class HostJudged(Event):
    """Event: a host was excluded, admitted again, released, told to leave or found at fault; or refused."""

    hook: ClassVar[str] = "on_host_judged"
    host: str
    decision: str
    """"left out", "taken in again", "released" (it is not needed any more), "refused" or "told to leave";
    "slow", "stuck" or "unreachable" for a host that stays."""
    why: str
    numbers: Mapping[str, float]
    """Numbers behind the decision, such as `slow_ratio`, the host's seconds per sample over the median of the
    other hosts, `excluded_s`, how long it is excluded, and `notice_s`, how long before its end a host that is
    taken away was told to leave."""


@dataclass(frozen=True, kw_only=True)
class Preempt(Event):
    """Event: the run was asked to stop, and has saved its state if it could."""

    hook: ClassVar[str] = "on_preempt"
    signal: str
    """Name of the signal, or another reason."""


REGROUPED = "regrouped: "
"""Beginning of `FitEnd.reason` if processes joined or left."""


@dataclass(frozen=True, kw_only=True)
class FitEnd(Event):
    """Event: this call of `fit`, or this set of processes, has ended, whether or not it succeeded."""

    hook: ClassVar[str] = "on_fit_end"
    progress: float
    """Base steps done."""
    samples: int
    """Real samples applied since the first run began."""
    seconds: float
    """Wall time of this run."""
    reason: str
    """'done', 'preempted', 'regrouped: ' followed by the reason, or what went wrong."""
    buckets_s: Mapping[str, float] = field(default_factory=dict)
    """Wall time of all runs in this workdir, by bucket of the time ledger."""

    @property
    def goes_on(self) -> bool:
        """Whether the run continues from memory with another set of processes."""
        return self.reason.startswith(REGROUPED)
