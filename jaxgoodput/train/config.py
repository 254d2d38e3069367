"""How a run is set up: one frozen dataclass of a few small ones, their validation, and changes by name."""

import contextlib
import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp

from jaxgoodput._serial import decode, parse
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim.learning_rate import Rule
from jaxgoodput.parallel.strategy import Strategy

POLICIES = ("goodput", "fixed")
LOSSES = ("auto", "global", "separate", "whole")
LAST_BATCHES = ("smaller", "drop")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """When the batch and the strategy are looked at again, and what a change must promise."""

    min_gain: float = 0.05
    """Predicted gain in goodput, as a share, below which nothing changes."""
    dwell_steps: int = 20
    """Steps between two changes."""
    max_growth: float = 4.0
    """The global batch grows at most by this factor in one change."""
    warm_up_steps: int = 10
    """Steps before the first verdict."""
    every_s: float = 5.0
    """Seconds between two verdicts, if `every_steps` have not passed before."""
    every_steps: int = 200
    """Steps between two verdicts, if `every_s` has not passed before."""
    accumulate: bool = True
    """Allow several micro-batches per replica."""
    fixed_tolerance: float = 0.0
    """With `policy="fixed"`: how far the global batch may be from the base, as a share of it."""
    remember: bool = True
    """Leave step times, a batch and the first noise to the next run of the same program.

    With `policy="goodput"` and one process. Such a run compiles the batches that it will want before it
    starts, needs no probes, and begins with the batch that the earlier one ended with, where that one's
    first noise is known and rates have no labels. It tries no smaller one before as many samples have gone
    by as the earlier run took to get there, and a tenth of the run at most. Its learning rate goes by its own
    noise, and by the remembered one until that is known.
    Kept in `execution.compilation_cache`; where that is None, not at all.
    """

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        _check_positive(self, "every_s", "every_steps")
        _check_not_negative(self, "min_gain", "dwell_steps", "warm_up_steps")
        _check_share(self, "fixed_tolerance")
        if not self.max_growth > 1:
            raise ValueError(
                f"Tuning.max_growth is a factor above 1; got {self.max_growth}. For a constant batch use "
                'policy="fixed".'
            )


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """How the gradient noise is measured."""

    every_steps: int | None = None
    """Steps between two measurements; None: picked by what they cost."""
    overhead: float = 0.02
    """Share of the step time that they may cost."""
    smoothing: float = 0.999
    """Share of what is known that is kept per base step; 0.999 remembers about 1000 of them."""
    preconditioned: bool | None = None
    """Measure after Adam's division; None: for Adam-like optimizers."""
    from_norm_layers: bool = False
    """Measure on the normalisation layers of a flax.linen model alone, sample by sample (Gray et al. 2024).

    For models under one global gradient (fsdp, tensor), where there is nothing else to compare within a batch
    of one micro-batch. One noise scale for all parameters, of plain gradients: under Adam it is below that of
    its own coordinates. Layers must be called in the open: not inside a `jax.jit`, `jax.checkpoint` or body
    of a scan that outlives one call of the loss, nor in the stages of a pipeline.
    """

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        _check_positive(self, "every_steps", "overhead")
        _check_share(self, "smoothing")
        if self.preconditioned and self.from_norm_layers:
            raise ValueError(
                "Statistics.preconditioned has no meaning with from_norm_layers, whose factors are no "
                "parameters of the optimizer. Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How steps are compiled, and how much memory they may take."""

    memory_bytes: int | None = None
    """Of one device; None: what the device reports."""
    memory_margin: float = 0.08
    """Share of it that is left free."""
    prefetch: int = 2
    """Global batches that wait on the devices."""
    readers: int | None = None
    """Threads that read a data set sample by sample; None: 16 for a grain `MapDataset`, as grain itself has,
    and one for others, of which nothing says that `[]` may be called by several threads.

    More of them help with reads that wait (disks, networks) or decode outside of the interpreter; those that
    compute in Python wait for one another. Arrays, streams, and sources with a `batch` of their own have one.
    """
    read_retries: int = 3
    """How often a read is repeated that failed with an OSError (TimeoutError is one): after 0.5 s, 1 s, ...

    The log and the journal say so. A stream is not read again.
    """
    background_compile: bool = True
    """Compile other batch sizes and strategies while training goes on."""
    compilation_cache: str | None = ""
    """Folder of compiled programs; "": under the workdir; None: JAX's own setting is left alone.

    Where JAX has a folder set, programs go there; what runs remember (`Tuning.remember`) stays in this one.
    """

    leases: bool = False
    """Over processes that each have a copy of the model: give the micro-batches of a step to whoever is free.

    A process that is slower than others then takes fewer of them, and the update is the same. It needs
    batches of several micro-batches, such as `BatchLimits(micro=(1, 4))`: the finer, the more even, at a
    fraction of a millisecond each. Samples are then read when they are needed, not ahead.
    """
    keep_freed_pages: bool = False
    """On CPU: have glibc keep the memory that steps free, in this process and for good.

    Goes before glibc's own variables. `jaxgoodput run` does so by itself, through the environment of its
    workers, where none of these is set.
    """
    swap_cpu_products: bool = False
    """On CPU: rewrite the gradient's products of matrices so that XLA has fast kernels for them.

    Steps of decoders take 0.7-0.9 of the time, and the last bits of gradients are others. The trace of the
    loss is changed for it; nothing is, on other devices.
    """

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        _check_positive(self, "memory_bytes", "readers")
        _check_not_negative(self, "prefetch", "read_retries")
        _check_share(self, "memory_margin")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How often the model is evaluated; neither: at the end only."""

    every_s: float | None = None
    """Seconds between two evaluations."""
    every_base_steps: float | None = None
    """Progress between two evaluations."""
    micro_batch_size: int | None = None
    """Samples per replica at once; None: as many as with the base batch."""

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        _check_positive(self, "every_s", "every_base_steps", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class Saving:
    """How often the run is saved, and which checkpoints stay.

    No checkpoint that is due is written while updates are being skipped; those that are asked for are.
    """

    every_s: float | None = 600.0
    """Seconds between two checkpoints; None: not by time."""
    every_base_steps: float | None = None
    """Progress between two checkpoints; None: not by progress."""
    keep: int = 3
    """Newest checkpoints that stay; older ones are deleted."""
    keep_every_base_steps: float | None = None
    """Besides, the first checkpoint after every so much progress stays for good."""
    best: str | None = None
    """Besides, the checkpoint with the best value of this metric of the evaluations stays.

    An evaluation that is the best so far is saved at once.
    """
    best_mode: Literal["min", "max"] = "min"
    """Which value of it is the best."""
    at_end: bool = True
    """Save once more when training is done."""
    allow_changed_data: bool = False
    """Go on from a checkpoint though the data set or `batch.base` is not the one that it was written with."""
    grace_s: float = 60.0
    """Seconds from a stop signal to the end of the process; a launcher's own `--grace-s` goes before it."""
    hang_after_s: float = 600.0
    """Seconds without a step after which a run counts as hanging, and ten times the usual time at least.

    It then writes the stacks of all its threads to the log, and stops as if by a signal.
    """

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        _check_positive(self, "every_s", "every_base_steps", "keep", "keep_every_base_steps")
        _check_positive(self, "grace_s", "hang_after_s")
        if self.best_mode not in ("min", "max"):
            raise ValueError(f'Saving.best_mode must be "min" or "max"; got {self.best_mode!r}.')


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What a run tells while it runs."""

    window_s: float = 2.0
    """Seconds that one point of the dashboard stands for."""
    tensorboard: bool = True
    """Write the dashboard's events under the workdir."""
    progress: bool = True
    """A progress bar on a terminal, lines with the time left elsewhere."""
    tokens_per_sample: int | None = None
    """To show tokens per second of a model of text; None: it is none."""

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        _check_positive(self, "window_s")
        if self.tokens_per_sample is not None:
            _check_positive(self, "tokens_per_sample")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `Trainer` needs to know besides the model. Only `workdir`, `batch` and a length are needed.

    Exactly one of `base_steps` and `epochs` says when training ends.
    """

    workdir: str
    """Where checkpoints/, tensorboard/, compilation_cache/, config.json and goodput.jsonl go."""
    batch: BatchLimits
    """Which batches are allowed."""
    base_steps: float | None = None
    """Length in *progress*: updates that the base batch would have needed; the last one may pass it."""
    epochs: int | None = None
    """Length in whole passes over the data, to the sample."""
    last_batch: Literal["smaller", "drop"] = "smaller"
    """What is left at the end of `epochs`: "smaller", a batch of its own size, for which a program is
    compiled behind the loop; "drop", not trained on."""
    seed: int = 0
    """Of the parameters, the order of the data and the keys that losses get."""
    shuffle: bool = True
    """Whether every epoch has an order of its own."""
    strategies: tuple[Strategy, ...] = ()
    """How the model may lie on the devices; (): a copy on every device.

    The first that fits into memory is the start; where there are several, the one of highest goodput is
    found while training.
    """
    loss: Literal["auto", "global", "separate", "whole"] = "auto"
    """"global": `loss` sees the rows of all replicas, in one program that the compiler cuts; "separate":
    those of one whole copy of the model; "auto": separate where each device holds a whole copy and the model
    constrains no sharding; "whole": all rows of the batch, which is never split into micro-batches either,
    for losses in which samples see each other.
    """
    rule: Rule | None = None
    """Learning-rate gain; None: adam_scale for Adam and its kin, of_noise_share for others that divide the
    gradient by its size (Lion, Adafactor, sign SGD: the optimizer is asked), else adascale."""
    policy: str | Mapping[int | float, int] = "goodput"
    """"goodput"; "fixed" to keep `batch.base` as the global batch; or a schedule of your own.

    A schedule says from which share of the run on (of progress, or of the samples of `epochs`) which global
    batch is used, such as `{0: 256, 0.03: 512}`. All of them are compiled before training.
    """
    compute_dtype: str | None = None
    """With "bfloat16", loss() gets parameters in it, and masters stay as init() made them.

    A batch keeps its own types: cast its floating inputs in loss(), or their products with parameters are
    float32.
    """
    ema: float | None = None
    """Share of an average of the trainable parameters that is kept per base step, such as 0.999; None: none.

    It goes by progress, so that it covers the same stretch of a run at every batch; its weights add up to 1
    from the first update on. Evaluations use it (`TrainState.averaged`), batch statistics stay those of
    training, and checkpoints hold it. One in the optimizer's own chain would see updates before the
    learning-rate gain.
    """
    max_skipped_in_a_row: int = 10
    """Updates refused, as not finite or without weight, before training stops."""

    tuning: Tuning = field(default_factory=Tuning)
    """When the batch changes."""
    statistics: Statistics = field(default_factory=Statistics)
    """How the noise is measured."""
    execution: Execution = field(default_factory=Execution)
    """Compiling and memory."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """How often to evaluate."""
    saving: Saving = field(default_factory=Saving)
    """Checkpoints."""
    reporting: Reporting = field(default_factory=Reporting)
    """Dashboard and terminal."""

    @property
    def accumulates(self) -> bool:
        """Whether a batch may be made of several micro-batches."""
        return self.tuning.accumulate and self.loss != "whole"

    @property
    def compiles_behind(self) -> bool:
        """Whether other batches are compiled while training goes on; those of a schedule are there before."""
        return self.execution.background_compile and isinstance(self.policy, str)

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        if not isinstance(self.batch, BatchLimits):
            raise ValueError(
                f"Config.batch says which batches are allowed; got {self.batch!r}. Write "
                "batch=BatchLimits(base=64, max=4096); base is the batch that the learning rate was tuned "
                "for, and where max is the same, so is every batch."
            )
        if (self.base_steps is None) == (self.epochs is None):
            raise ValueError(
                "exactly one of base_steps and epochs must be given; got "
                f"base_steps={self.base_steps}, epochs={self.epochs}. "
                "base_steps counts progress, epochs counts passes over the data."
            )
        if isinstance(self.policy, str):
            if self.policy not in POLICIES:
                raise ValueError(
                    f"Config.policy must be one of {POLICIES} or a schedule such as {{0: 256, 0.03: 512}}; "
                    f"got {self.policy!r}."
                )
        else:
            _check_schedule(self.policy, self.batch)
        _check_local(self.workdir)
        evaluation = self.evaluation
        if self.saving.best is not None and not (evaluation.every_s or evaluation.every_base_steps):
            raise ValueError(
                f"Config.saving.best={self.saving.best!r} needs evaluations while training: set "
                "evaluation.every_base_steps or evaluation.every_s."
            )
        if self.loss not in LOSSES:
            raise ValueError(f"Config.loss must be one of {LOSSES}; got {self.loss!r}.")
        if self.last_batch not in LAST_BATCHES:
            raise ValueError(
                f"Config.last_batch must be one of {LAST_BATCHES}; got {self.last_batch!r}."
            )
        _check_positive(self, "base_steps", "epochs", "max_skipped_in_a_row")
        whole = "a whole number of passes, an int (base_steps ends a run within one)"
        _check(self, ("epochs",), whole, lambda value: isinstance(value, int))
        _check(self, ("ema",), "a share, above 0 and below 1", lambda value: 0 < value < 1)
        if self.compute_dtype is not None and not _is_floating(self.compute_dtype):
            raise ValueError(
                "Config.compute_dtype must name a floating type such as 'bfloat16'; got "
                f"{self.compute_dtype!r}. None computes in the precision of the parameters."
            )
        if self.compute_dtype is not None and jnp.dtype(self.compute_dtype) == jnp.float16:
            raise ValueError(
                "Config.compute_dtype='float16' needs losses scaled against underflow, which is not done "
                "here: gradients below 6e-8 would vanish. Use 'bfloat16', which has float32's range."
            )


def _check_local(workdir: str) -> None:
    if re.match(r"[\w+.-]+:[/\\]|~", str(workdir)):
        raise ValueError(
            f"Config.workdir must be a folder of a mounted file system; got {workdir!r}. A bucket can be "
            "mounted (gcsfuse, s3fs); write a home folder out, or use os.path.expanduser."
        )


def _check_schedule(schedule: Mapping[int | float, int], limits: BatchLimits) -> None:
    if 0 not in schedule or not all(0 <= share < 1 for share in schedule):
        raise ValueError(
            "a schedule of batches needs shares of the run from 0 to below 1, and one for its beginning, "
            f"such as {{0: {limits.base}, 0.03: {limits.max}}}; got {dict(schedule)}."
        )
    if not all(limits.smallest <= batch <= limits.max for batch in schedule.values()):
        raise ValueError(
            f"a schedule's batches must lie between {limits.smallest} and {limits.max} samples, as "
            f"Config.batch says; got {dict(schedule)}. Widen batch.min_global and batch.max."
        )


def _check_positive(settings: Any, *names: str) -> None:
    _check(settings, names, "positive", lambda value: value > 0)


def _check_not_negative(settings: Any, *names: str) -> None:
    _check(settings, names, "at least 0", lambda value: value >= 0)


def _check_share(settings: Any, *names: str) -> None:
    _check(settings, names, "a share, at least 0 and below 1", lambda value: 0 <= value < 1)


def _check(settings: Any, names: Sequence[str], what: str, holds: Callable[[float], bool]) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not holds(value):  # None: left to us; NaN holds nowhere
            raise ValueError(f"{type(settings).__name__}.{name} must be {what}; got {value}.")


def _is_floating(name: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.floating))
    except TypeError:
        return False


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `name=value` changes, values as JSON (or plain text); `tuning.min_gain=0.1` reaches in.

    Raises ValueError naming the field where there is none of that name or the value has another type.
    """
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            raise ValueError(f"an override is name=value; got {override!r}.")
        if name not in (known := list(_names(config))):
            raise ValueError(f"there is no setting {name!r}{_meant(name, known)}")
        config = _replaced(config, name.split("."), text, name)
    return config


def _names(settings: Any, before: str = "") -> Iterator[str]:
    """The names of all settings, those of groups with a dot."""
    for name in (f.name for f in dataclasses.fields(settings)):
        yield before + name
        if dataclasses.is_dataclass(value := getattr(settings, name)):
            yield from _names(value, f"{before}{name}.")


def _meant(name: str, known: Sequence[str]) -> str:
    """The end of a sentence that says there is no `name`: what may have been meant."""
    last = name.rpartition(".")[-1]
    close = [k for k in known if k.rpartition(".")[-1] == last]
    close = close or difflib.get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f". There are {', '.join(known)}."


def _replaced(settings: Any, path: Sequence[str], text: str, where: str) -> Any:
    name, *rest = path
    if rest:
        value = _replaced(getattr(settings, name), rest, text, where)
    else:
        value = _read(text, typing.get_type_hints(type(settings))[name], where)
    return dataclasses.replace(settings, **{name: value})


def _read(text: str, type_: Any, where: str) -> Any:
    try:
        value = parse(text)
    except ValueError:
        value = text
    try:
        return decode(value, type_, where)
    except ValueError:
        with contextlib.suppress(ValueError):  # a name may look like a number
            return decode(text, type_, where)
        raise
