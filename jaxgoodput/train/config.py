"""How a run is set up: one frozen dataclass, its validation, and its form as JSON."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim.learning_rate import Rule
from jaxgoodput.parallel.strategy import Strategy

POLICIES = ("goodput", "fixed")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `Trainer` needs to know besides the model. Only `workdir`, `batch` and a length are needed.

    Exactly one of `base_steps` and `epochs` says when training ends: `base_steps` counts *progress*
    (updates that the base batch would have needed; the last one or two updates may pass it), `epochs`
    counts passes over the data, to the sample.
    """

    workdir: str  # checkpoints/, tensorboard/, compilation_cache/, config.json, goodput.jsonl
    batch: BatchLimits
    base_steps: float | None = None
    epochs: int | None = None
    seed: int = 0

    # How the model may lie on the devices; the first that fits into memory is the start, and where there
    # are several, the one of highest goodput is found while training. (): a copy on every device.
    strategies: tuple[Strategy, ...] = ()
    rule: Rule | None = None  # learning-rate gain; None: adam_scale for Adam-like, else adascale
    smoothing: float = 0.999  # of the noise statistics, per base step
    preconditioned: bool | None = None  # measure noise after Adam's division; None: for Adam-like
    policy: str = "goodput"  # "fixed" keeps `batch.base` as the global batch
    fixed_tolerance: float = 0.0  # "fixed": how far the global batch may be from the base, relative
    # "bfloat16": loss() gets parameters in it, masters stay as init() made them. A batch keeps its own
    # types: cast its floating inputs in loss(), or their products with parameters are float32.
    compute_dtype: str | None = None

    statistics_every: int | None = None  # steps between noise measurements; None: picked by cost
    statistics_overhead: float = 0.02  # share of the step time that statistics may cost
    tune_every_s: float = 5.0
    tune_every_steps: int = 200
    min_gain: float = 0.05  # predicted goodput gain below which nothing changes
    dwell_steps: int = 20  # steps between two changes
    max_growth: float = 4.0  # the global batch grows at most by this factor in one change
    warm_up_steps: int = 10  # steps before the first verdict

    memory_bytes: int | None = None  # per device; None: what the device reports
    memory_margin: float = 0.08
    accumulate: bool = True  # allow several micro-batches per replica
    background_compile: bool = True
    compilation_cache: str | None = (
        ""  # "": under the workdir; None: JAX's own setting is left alone
    )

    eval_every_s: float | None = None
    eval_every_base_steps: float | None = None
    eval_micro_batch_size: int | None = None  # per replica; None: the base's

    checkpoint_every_s: float = 600.0
    keep_checkpoints: int = 3
    save_at_end: bool = True
    max_skipped_in_a_row: int = 10  # updates that are not finite, before training stops

    window_s: float = 2.0  # how often the dashboard gets a point
    tensorboard: bool = True
    progress: bool = True  # progress bar on a terminal, ETA lines elsewhere
    shuffle: bool = True
    prefetch: int = 2  # global batches ahead

    def __post_init__(self):
        """Refuse what cannot work, naming what to change."""
        if (self.base_steps is None) == (self.epochs is None):
            raise ValueError(
                f"exactly one of base_steps and epochs must be given; got base_steps="
                f"{self.base_steps}, epochs={self.epochs}. base_steps counts progress, epochs counts "
                "passes over the data."
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}; got {self.policy!r}.")
        positive = {
            "base_steps": self.base_steps,
            "epochs": self.epochs,
            "tune_every_s": self.tune_every_s,
            "tune_every_steps": self.tune_every_steps,
            "checkpoint_every_s": self.checkpoint_every_s,
            "keep_checkpoints": self.keep_checkpoints,
            "max_skipped_in_a_row": self.max_skipped_in_a_row,
            "window_s": self.window_s,
            "eval_every_s": self.eval_every_s,
            "eval_every_base_steps": self.eval_every_base_steps,
            "statistics_every": self.statistics_every,
            "statistics_overhead": self.statistics_overhead,
            "memory_bytes": self.memory_bytes,
            "eval_micro_batch_size": self.eval_micro_batch_size,
        }
        for name, value in positive.items():
            if value is not None and not (value > 0 and not math.isnan(value)):
                raise ValueError(f"{name} must be positive; got {value}.")
        at_least_zero = {
            "min_gain": self.min_gain,
            "dwell_steps": self.dwell_steps,
            "warm_up_steps": self.warm_up_steps,
            "prefetch": self.prefetch,
        }
        for name, value in at_least_zero.items():
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0; got {value}.")
        if not self.max_growth > 1:
            raise ValueError(
                f"max_growth is a factor above 1; got {self.max_growth}. For a constant batch use "
                'policy="fixed".'
            )
        if not 0 <= self.smoothing < 1:
            raise ValueError(
                f"smoothing must lie in [0, 1); got {self.smoothing}. It is the share of the noise "
                "statistics that is kept per base step; 0.999 remembers about 1000 of them."
            )
        if self.compute_dtype is not None and not _is_floating(self.compute_dtype):
            raise ValueError(
                f"compute_dtype must name a floating type such as 'bfloat16' or 'float16'; got "
                f"{self.compute_dtype!r}. None computes in the precision of the parameters."
            )
        if not 0 <= self.memory_margin < 1:
            raise ValueError(f"memory_margin must lie in [0, 1); got {self.memory_margin}.")
        if not 0 <= self.fixed_tolerance < 1:
            raise ValueError(f"fixed_tolerance must lie in [0, 1); got {self.fixed_tolerance}.")


def _is_floating(name: str) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(name), jnp.floating))
    except TypeError:
        return False


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `name=value` changes, values as JSON (or plain text); `batch.max=512` reaches in.

    Raises ValueError naming the field where there is none of that name or the value has another type.
    """
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            raise ValueError(f"an override is name=value; got {override!r}.")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        config = _replace(config, name.split("."), value, text, name)
    return config


def _replace(target: Any, path: Sequence[str], value: Any, text: str, full: str) -> Any:
    if not dataclasses.is_dataclass(target) or isinstance(target, type):
        raise ValueError(
            f"there is no setting {full!r}: {type(target).__name__} has none of its own."
        )
    fields = {f.name for f in dataclasses.fields(target)}
    if path[0] not in fields:
        raise ValueError(
            f"there is no setting {full!r}: {type(target).__name__} has {', '.join(sorted(fields))}."
        )
    if len(path) > 1:
        value = _replace(getattr(target, path[0]), path[1:], value, text, full)
    else:
        expected = typing.get_type_hints(type(target))[path[0]]
        if isinstance(value, list):
            value = tuple(value)
        if not _fits(value, expected):
            if not _fits(text, expected):  # a name may look like a number
                wanted = getattr(expected, "__name__", None) if isinstance(expected, type) else None
                raise ValueError(f"{full} is of type {wanted or expected}; got {text!r}.")
            value = text
        if type(value) is int and int not in (expected, *typing.get_args(expected)):
            value = float(value)
    return dataclasses.replace(target, **{path[0]: value})


def _fits(value: Any, expected: Any) -> bool:
    """Whether a value that JSON can hold is of a field's type."""
    origin, parts = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is Ellipsis:
            return all(_fits(v, parts[0]) for v in value)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if expected is float:
        return type(value) in (float, int)
    return type(value) is expected  # not isinstance: True is no number
