"""The settings of a run: frozen dataclasses, their validation, and overrides by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from jaxgoodput._fields.serial import decode, parse
from jaxgoodput._fields.typed import (
    PRACTICALLY,
    Count,
    CountOrZero,
    Endless,
    Folder,
    InnerShare,
    NotNegative,
    Positive,
    Range,
    Remedy,
    Seconds,
    Share,
    annotations,
    field_names,
    fit,
    meant,
    refusal,
    typed,
)
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim.learning_rate import Rule
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.workdir.places import require_known

_LIMITS = (
    "Write batch=BatchLimits(base=64, max=4096). base is the batch that the learning rate was tuned for; "
    "with max equal to base the batch stays constant."
)
_WHOLE_PASSES = "Use base_steps to end a run within a pass."
_SCHEDULE = "A schedule of batches is such as {0: 256, 0.03: 512}."
_FIXED = 'For a constant batch use policy="fixed".'
_NO_LIMIT = Endless("None sets no limit.")
_UNTIL_STOPPED = Endless("To train until the run is stopped write 1000000000.")
_RULE = "Pass a function, such as jg.rules.linear."


@typed
@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Conditions for changing the batch and the strategy."""

    min_gain: Annotated[NotNegative, Endless(_FIXED)] = 0.05
    """Smallest predicted gain in goodput, as a share, that justifies a change."""
    dwell_steps: Annotated[CountOrZero, PRACTICALLY] = 20
    """Minimum number of steps between two changes."""
    max_growth: Annotated[float, Range("above 1", above=1), Remedy(_FIXED), PRACTICALLY] = 4.0
    """Largest factor by which one change may grow the global batch."""
    warm_up_steps: Annotated[CountOrZero, PRACTICALLY] = 10
    """Number of steps before the first verdict."""
    every_s: Seconds = 5.0
    """Seconds between two verdicts, unless `every_steps` is reached first, or noise, step times or loss have
    changed so much that the last verdict may no longer hold."""
    every_steps: Annotated[Count, PRACTICALLY] = 200
    """Steps between two verdicts, unless `every_s` is reached first, or much has changed. If these
    steps take less than half a second, or 50 times what a verdict takes, it comes later."""
    accumulate: bool = True
    """Whether a batch may consist of several micro-batches per replica."""
    fixed_tolerance: Share = 0.0
    """Largest deviation of the global batch from the base with `policy="fixed"`, as a share of the base."""
    remember: bool = True
    """Whether step times, the last batch and the first noise are kept for the next run of the same program.

    This needs `policy="goodput"` and a single process. The next run then compiles the batches that it will
    want before it starts and needs no probes. It begins with the batch that the earlier run ended with, if
    that run's first noise is known and learning rates have no labels. It tries no smaller batch until it has
    trained on as many samples as the earlier run had when it chose that batch, but for at most a tenth of the
    run. Until its own noise is known, its learning rate follows the remembered noise. The memory is a file in
    `execution.compilation_cache`; if that is None, nothing is kept.
    """


@typed
@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Measurement of the gradient noise, which decides the batch and the learning rate."""

    every_steps: Annotated[Count, PRACTICALLY] | None = None
    """Steps between two measurements; None chooses the number by their cost."""
    overhead: Positive = 0.02
    """Largest share of the step time that measurements may cost."""
    smoothing: Share = 0.999
    """Share of the average that is kept per base step; 0.999 remembers about 1000 base steps."""
    preconditioned: bool | None = None
    """Whether noise is measured after Adam's division; None does so for Adam-like optimizers."""
    from_norm_layers: bool = False
    """Whether noise is measured only on the normalization layers of a flax.linen model (Gray et al. 2024).

    Use this for models under one global gradient (fsdp, tensor): with one micro-batch, nothing else in the
    batch can be compared. It gives one noise scale for all parameters, of plain gradients. Under Adam this is
    smaller than the noise scale of Adam's coordinates. The layers must not be called inside a `jax.jit`,
    `jax.checkpoint` or scan body that outlives one call of the loss, nor in the stages of a pipeline.
    """

    def __post_init__(self):
        """Raise ValueError for settings that cannot work; the message names the remedy."""
        if self.preconditioned and self.from_norm_layers:
            raise ValueError(
                "Statistics.preconditioned and from_norm_layers exclude each other, because the factors of "
                "the layers are not parameters of the optimizer. Set only one of them."
            )


@typed
@dataclass(frozen=True, kw_only=True)
class Execution:
    """Compilation of steps, memory, and reading of data."""

    memory_bytes: Annotated[Count, Endless("None is all that the device reports.")] | None = None
    """Memory of one device in bytes; None for the number that the device reports."""
    memory_margin: Share = 0.08
    """Share of the memory that is left free."""
    prefetch: CountOrZero = 2
    """Number of global batches that are read ahead and wait on the devices; 0 reads each when it is due.

    Small batches are read eight at a time; steps that are dispatched together count as one batch.
    """
    readers: Count | None = None
    """Number of threads that read a data set sample by sample; None for a default.

    The default is 16 for a grain `MapDataset`, as in grain itself, and 1 for other data sets, whose
    `__getitem__` may not be thread-safe. More threads help if reads wait (disks, networks) or decode outside
    of the interpreter. Reads that compute in Python wait for one another. Arrays, streams, and sources with
    a `batch` method of their own use one thread.
    """
    read_retries: CountOrZero = 3
    """Number of retries after a read fails with an OSError, such as TimeoutError: after 0.5 s, 1 s, ...

    Retries are reported in the log and in the journal. Reads of a stream are not repeated.
    """
    background_compile: bool = True
    """Whether other batch sizes and strategies are compiled while training goes on."""
    compilation_cache: Folder | None = ""
    """Folder of compiled programs: "" for one under the workdir, None to leave JAX's own setting alone.

    If JAX has a cache folder set, programs go there; the memory of runs (`Tuning.remember`) stays in this
    one.
    """

    leases: bool = False
    """Whether the micro-batches of a step are given to the processes as they become free.

    This is for processes that each hold a copy of the model. A straggler then takes fewer micro-batches, and
    the update stays the same. Batches must have several micro-batches, such as `BatchLimits(micro=(1, 4))`.
    The smaller these are, the more even is the load; each costs a fraction of a millisecond. Samples are read
    when they are needed, not ahead.
    """
    keep_hosts: bool = False
    """Whether all hosts of a job whose hosts come and go stay until the run ends.

    By default hosts leave in the last of `epochs` as soon as the remaining samples need fewer of them and the
    run ends at most a hundredth of its time later. Hosts stay in any case if the end is not known: with
    `base_steps`, streams, or `Evaluation.patience_base_steps`.
    """
    keep_freed_pages: bool = False
    """Whether glibc keeps the memory that steps free, on CPU, in this process until it ends.

    This overrides glibc's own environment variables. `jaxgoodput run` does the same through the environment
    of its workers, unless one of these variables is set.
    """
    swap_cpu_products: bool = False
    """Whether matrix products in the gradient are rewritten, on CPU, so that XLA uses fast kernels for them.

    Steps of decoders then take 0.7-0.9 of the time, and the last bits of the gradients change. The trace of
    the loss is rewritten for this. On other devices nothing changes.
    """


@typed
@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Times of evaluations; without `every_s` and `every_base_steps` there is one at the end only."""

    every_s: Seconds | None = None
    """Seconds between two evaluations; None to evaluate none by time."""
    every_base_steps: Annotated[Positive, _NO_LIMIT] | None = None
    """Base steps between two evaluations; None to evaluate none by progress."""
    micro_batch_size: Count | None = None
    """Samples per replica at once; None for as many as with the base batch, or more while they take little
    memory."""
    patience_base_steps: Annotated[Positive, _NO_LIMIT] | None = None
    """Base steps without a better value of `Saving.best` after which the run ends; None to go on.

    The best one may be of an earlier run in the workdir. `Trainer.restore(best=True)` returns it.
    """


@typed
@dataclass(frozen=True, kw_only=True)
class Saving:
    """Times of checkpoints, and the choice of checkpoints to keep.

    While updates are being skipped, no periodic checkpoint is written; requested ones are.
    """

    every_s: Seconds | None = 600.0
    """Seconds between two checkpoints; None to save none by time."""
    every_base_steps: Annotated[Positive, _NO_LIMIT] | None = None
    """Base steps between two checkpoints; None to save none by progress."""
    keep: Annotated[Count, Endless("To keep practically all write 1000000000.")] = 3
    """Number of newest checkpoints that are kept; older ones are deleted."""
    keep_every_base_steps: Annotated[Positive, _NO_LIMIT] | None = None
    """Base steps between two checkpoints that are never deleted; None to keep none for good."""
    best: str | None = None
    """Evaluation metric whose best checkpoint is kept as well; None for none.

    If an evaluation is the best so far, the run is saved at once.
    """
    best_mode: Literal["min", "max"] = "min"
    """Direction in which the metric is better."""
    at_end: bool = True
    """Whether the run is saved once more when training ends."""
    allow_changed_data: bool = False
    """Whether to resume even if the data set or `batch.base` is not the same as in the checkpoint."""
    grace_s: Seconds = 60.0
    """Seconds from a stop signal to the end of the process; a launcher's own `--grace-s` takes precedence."""
    hang_after_s: Seconds = 600.0
    """Seconds without a finished step after which a run counts as hung; at least ten usual step times pass.

    The run then writes the stacks of all its threads to the log and stops as if by a signal.
    """


@typed
@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Output of a run while it trains."""

    window_s: Seconds = 2.0
    """Seconds that one point of the dashboard covers."""
    tensorboard: bool = True
    """Whether the dashboard's events are written under the workdir."""
    progress: bool = True
    """Whether a progress bar is shown on a terminal, and lines with the time left elsewhere."""
    tokens_per_sample: Count | None = None
    """Number of tokens in a sample, to show tokens per second; None if samples are not text."""


@typed
@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run. Only `workdir`, `batch` and a length are required.

    The length is either `base_steps` or `epochs`.
    """

    workdir: Folder
    """Folder of checkpoints/, tensorboard/, compilation_cache/, config.json and goodput.jsonl.

    It may be a bucket, gs://BUCKET/PATH or s3://BUCKET/PATH, for runs of one process."""
    batch: Annotated[BatchLimits, Remedy(_LIMITS)]
    """Batches that are allowed."""
    base_steps: Annotated[Positive, _UNTIL_STOPPED] | None = None
    """Length in base steps: the updates that the base batch would need. The last update may exceed it."""
    epochs: Annotated[Count, Remedy(_WHOLE_PASSES), _UNTIL_STOPPED] | None = None
    """Length in whole passes over the data, exact to the sample."""
    last_batch: Literal["smaller", "drop"] = "smaller"
    """Treatment of the samples left at the end of `epochs`.

    "smaller" trains on them as a batch of their own size, whose program is compiled in the background. "drop"
    leaves them out."""
    seed: CountOrZero = 0
    """Seed of the parameters, the order of the data, and the keys passed to losses.

    A resumed run keeps the order of its checkpoint, with a warning if the seed is another one."""
    shuffle: bool = True
    """Whether every epoch has its own random order; a resumed run keeps the order of its checkpoint."""
    strategies: tuple[Strategy, ...] = ()
    """Strategies that lay the model out on the devices; () for a copy of the model on every device.

    Training starts with the first strategy that fits into memory. If there are several, the one with the
    highest goodput is found while training.
    """
    loss: Literal["auto", "global", "separate", "whole"] = "auto"
    """Samples that one call of `loss` sees.

    With "global" it sees the samples of all replicas, in one program that the compiler partitions. With
    "separate" it sees the samples of one whole copy of the model. "auto" chooses separate if every device
    holds a whole copy and the model constrains no sharding, else global. "whole" passes the whole batch,
    never split into micro-batches; use this for losses in which samples see each other.
    """
    keys: Literal["micro-batch", "sample"] = "micro-batch"
    """Random keys that `loss` gets: one for all samples of a call, or one for each sample.

    With "sample" it gets an array of keys, `[micro_batch_size]`, each made from the seed, the epoch and the
    index of its sample. Draw with `jax.vmap` over them. Random numbers, such as those of dropout or an
    augmentation, are then the same for any micro-batches, replicas, devices and processes, and if the run is
    resumed. In a stream the index is the sample's place.
    """
    rule: Annotated[Rule, Remedy(_RULE)] | None = None
    """Rule for the learning-rate gain; None chooses one for each leaf that suits its optimizer.

    The choice is adam_scale for Adam and its kin, of_noise_share for other optimizers that divide the
    gradient by its size (Lion, Adafactor, sign SGD), and adascale for the rest. The optimizer is probed to
    find out."""
    policy: Annotated[
        Literal["goodput", "fixed"] | Mapping[int | float, int], Remedy(_SCHEDULE)
    ] = "goodput"
    """Policy for the batch: "goodput", "fixed" to stay at `batch.base`, or a schedule.

    A schedule maps shares of the run (of base steps, or of the samples of `epochs`) to the global batch used
    from there on, such as `{0: 256, 0.03: 512}`. All its batches are compiled before training.
    """
    compute_dtype: Annotated[str, Remedy('Write a name, such as "bfloat16".')] | None = None
    """Type of the parameters passed to loss(), such as "bfloat16"; the master copies keep init()'s type.

    The batch keeps its types. Cast its floating inputs in loss(), or their products with parameters are
    float32.
    """
    ema: InnerShare | None = None
    """Share of a running average of trainable parameters kept per base step, such as 0.999; None for none.

    It is measured in base steps, so that it covers the same stretch of the run at every batch. Its weights
    add up to 1 from the first update on. Evaluations use it (`TrainState.averaged`), with the batch
    statistics of training, and checkpoints hold it. An average in the optimizer's own chain would miss the
    learning-rate gain.
    """
    max_skipped_in_a_row: Annotated[Count, PRACTICALLY] = 10
    """Number of consecutive updates skipped, as not finite or without weight, after which training stops."""

    tuning: Tuning = field(default_factory=Tuning)
    """Changes of the batch."""
    statistics: Statistics = field(default_factory=Statistics)
    """Measurement of the gradient noise."""
    execution: Execution = field(default_factory=Execution)
    """Compilation and memory."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """Times of evaluations."""
    saving: Saving = field(default_factory=Saving)
    """Checkpoints."""
    reporting: Reporting = field(default_factory=Reporting)
    """Dashboard and terminal."""

    @property
    def accumulates(self) -> bool:
        """Whether a batch may consist of several micro-batches."""
        return self.tuning.accumulate and self.loss != "whole"

    @property
    def compiles_behind(self) -> bool:
        """Whether other batches are compiled in the background instead of before training."""
        return self.execution.background_compile and isinstance(self.policy, str)

    def __post_init__(self):
        """Raise ValueError for settings that cannot work; the message names the remedy."""
        if (self.base_steps is None) == (self.epochs is None):
            raise ValueError(
                "exactly one of base_steps and epochs must be given; got "
                f"base_steps={self.base_steps}, epochs={self.epochs}. "
                "base_steps counts progress, epochs counts passes over the data."
            )
        if not isinstance(self.policy, str):
            _check_schedule(self.policy, self.batch)
        require_known(self.workdir)
        evaluation = self.evaluation
        if self.saving.best is not None and not (evaluation.every_s or evaluation.every_base_steps):
            raise ValueError(
                f"Config.saving.best={self.saving.best!r} needs evaluations during training: set "
                "evaluation.every_base_steps or evaluation.every_s."
            )
        if evaluation.patience_base_steps is not None and self.saving.best is None:
            raise ValueError(
                f"Config.evaluation.patience_base_steps={evaluation.patience_base_steps} waits for a better "
                "value of a metric: name it in saving.best, such as saving=Saving(best='accuracy', "
                "best_mode='max')."
            )
        if self.compute_dtype is not None:
            _check_compute_dtype(self.compute_dtype)


def _check_schedule(schedule: Mapping[int | float, int], limits: BatchLimits) -> None:
    if 0 not in schedule or not all(0 <= share < 1 for share in schedule):
        raise ValueError(
            "Config.policy is a schedule of batches. It needs shares of the run from 0 to below 1, and 0 "
            f"must be one of them, such as {{0: {limits.base}, 0.03: {limits.max}}}; got {dict(schedule)}."
        )
    if not all(limits.smallest <= batch <= limits.max for batch in schedule.values()):
        raise ValueError(
            f"Config.policy is a schedule whose batches must lie between {limits.smallest} and {limits.max} "
            f"samples, as Config.batch says; got {dict(schedule)}. Widen batch.min_global and batch.max."
        )


def _check_compute_dtype(name: str) -> None:
    # NumPy's own names include deprecated letters, and descriptions of records such as "i4,(2,)f4".
    kind = getattr(jnp, name, None)
    try:
        is_floating = kind is not None and bool(jnp.issubdtype(jnp.dtype(kind), jnp.floating))
    except TypeError:
        is_floating = False
    if not is_floating:
        raise ValueError(
            f"Config.compute_dtype must name a floating type such as 'bfloat16'; got {name[:60]!r}. None "
            "computes in the precision of the parameters."
        )
    if jnp.dtype(name) == jnp.float16:
        raise ValueError(
            "Config.compute_dtype='float16' is not supported: it would need loss scaling, because gradients "
            "below 6e-8 vanish. Use 'bfloat16', which has the range of float32."
        )


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return `config` with overrides such as `tuning.min_gain=0.1`; values are JSON or plain text.

    Raises ValueError with the name if there is no such setting or the value has another type.
    """
    if isinstance(overrides, str):
        raise ValueError(
            f"overrides are a list, such as sys.argv[1:]; got the string {overrides!r}."
        )
    for override in overrides:
        name, separator, text = str(override).partition("=")
        if not separator:
            raise ValueError(
                f"an override is name=value, such as tuning.min_gain=0.1; got {override!r}."
            )
        if name not in (known := field_names(Config)):
            raise ValueError(f"there is no setting {name!r}{meant(name, known)}")
        config = _replaced(config, name.split("."), text, name)
    return config


def _replaced(settings: Any, path: Sequence[str], text: str, where: str) -> Any:
    name, *rest = path
    if rest:
        value = _replaced(getattr(settings, name), rest, text, where)
    else:
        value = _read(text, annotations(type(settings))[name], where)
    return dataclasses.replace(settings, **{name: value})


def _read(text: str, kind: Any, where: str) -> Any:
    """Return the value that a text means, as JSON or as it is."""
    try:
        value = parse(text)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text, text)  # Python's words
    errors = []
    for candidate in (value, text):  # a name may look like a number
        try:
            return fit(decode(candidate, kind, where), kind, where)
        except ValueError as error:
            errors.append(error)
    if isinstance(value, dict | list):  # the error says which part of it is wrong
        raise errors[0]
    raise ValueError(refusal(value, kind, where))
