"""From what a user wrote to what can run: the problem, the batch plan, the devices; no training yet."""

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jaxgoodput._jax import shared_store
from jaxgoodput.clock import Clock
from jaxgoodput.data.sources import Source, abstract_sample, as_source
from jaxgoodput.engine import memory
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.state import Variables, split
from jaxgoodput.engine.step import Problem
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.console import Console
from jaxgoodput.observe.tensorboard import Dashboard
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.optim.preconditioner import is_adam_like
from jaxgoodput.parallel.strategy import DATA_AXIS, Layout, Strategy
from jaxgoodput.train.checkpoint import saveable
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import CONTROL_SIZE
from jaxgoodput.train.evaluation import Evaluator
from jaxgoodput.tune.batch import Indivisible as Indivisible
from jaxgoodput.tune.batch import fixed_config

if TYPE_CHECKING:
    from jaxgoodput.train.trainer import Trainer


@dataclass(frozen=True)
class Place:
    """The devices of this process and, where there are several processes, of all."""

    layouts: Mapping[str, Layout]  # by strategy; the name "" is plain data parallelism, unasked
    world: Mesh | None
    process_index: int
    process_count: int

    @property
    def layout(self) -> Layout:
        """The first layout."""
        return next(iter(self.layouts.values()))

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes, under the first layout."""
        return self.layout.num_replicas if self.world is None else self.world.size

    def meet(self, moment: str) -> None:
        """Wait for all processes: they compile at different speeds, and a first collective waits 30 s."""
        store = shared_store()
        if self.process_count > 1 and store is not None:
            store.barrier(f"jaxgoodput: {moment}", timeout_s=1800.0)


def place(devices: Sequence[Any] | None, strategies: Sequence[Strategy] = ()) -> Place:
    """The layouts of `strategies` (none: one replica on every device) on this process's devices.

    `devices` narrows them where there is one process. Raises ValueError for a strategy that does not
    use exactly those devices, for two of one name, and for several processes with anything but data
    parallelism.
    """
    count = jax.process_count()
    if count > 1 and devices is not None:
        raise ValueError(
            f"devices= is for one process; this job has {count}. Start the processes with the devices "
            "that they should use."
        )
    local = jax.local_devices() if devices is None else devices
    layouts = {"": Strategy(data=len(local)).on(local)}
    if strategies:
        plans = [strategy.resolved(len(local)) for strategy in strategies]
        names = [plan.name for plan in plans]
        if len(set(names)) < len(names):
            raise ValueError(
                f"Config.strategies has two of one name: {', '.join(names)}. On {len(local)} devices "
                "they have the same degrees; leave one of them out."
            )
        layouts = {plan.name: plan.on(local) for plan in plans}
        if count > 1 and (len(plans) > 1 or plans[0].is_cut):
            raise ValueError(
                f"a job of {count} processes trains with data parallelism only; got the strategies "
                f"{', '.join(names)}. Leave Config.strategies empty, or use one process."
            )
    world = None
    if count > 1:
        world = Mesh(np.asarray(jax.devices()), (DATA_AXIS,), axis_types=(AxisType.Auto,))
    return Place(layouts, world, jax.process_index(), count)


def problem(trainer: "Trainer") -> Problem:
    """The user's methods as a `Problem`, with the learning-rate rule chosen where none was.

    Raises TypeError where the optimizer is not an optax transformation, or the state holds anything
    that cannot be checkpointed.
    """
    config = trainer.config
    tx = trainer.optimizer()
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"optimizer() must return an optax.GradientTransformation; got {type(tx).__name__}."
        )
    made = jax.eval_shape(saveable(trainer.init, "init()"), jax.random.key(0))
    params = made.params if isinstance(made, Variables) else made
    mask = trainer.trainable(params)
    trainable = None if mask is None else trainer.trainable
    kept = params if mask is None else split(params, mask)[0]
    if not jax.tree.leaves(kept):
        raise ValueError("there is nothing to train: init() has no leaf that trainable() allows.")
    adam_like = is_adam_like(jax.eval_shape(saveable(tx.init, "the state of optimizer()"), kept))
    rule = config.rule
    if rule is None:
        rule = rules.adam_scale if adam_like else rules.adascale
    elif (rule is rules.adascale and adam_like) or (rule is rules.adam_scale and not adam_like):
        better = "adam_scale" if adam_like else "adascale"
        logging.warning(
            "the rule %s does not suit this optimizer, which %s the gradient by its second moment: "
            "%s does. Leave Config.rule None to have it chosen.",
            getattr(rule, "__name__", rule),
            "divides" if adam_like else "does not divide",
            better,
        )
    labels = trainer.labels if trainer.labels(kept) is not None else None
    return Problem(
        init=trainer.init,
        loss_and_state=trainer.loss_and_state,
        tx=adaptive(
            tx,
            rule,
            base_batch_size=config.batch.base,
            smoothing=config.smoothing,
            labels=labels,
        ),
        base_batch_size=config.batch.base,
        trainable=trainable,
        labels=labels,
        preconditioned=adam_like if config.preconditioned is None else config.preconditioned,
        compute_dtype=None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
    )


def engine(
    trainer: "Trainer", source: Source, where: Place, *, memory_bytes: int | None = None
) -> Engine:
    """The engine of this trainer's problem on these devices, of the first strategy."""
    return Engine(
        problem(trainer),
        where.layout,
        abstract_sample(source),
        world=where.world,
        control_size=CONTROL_SIZE if where.process_count > 1 else 0,
        memory_bytes=memory_bytes,
    )


@dataclass(frozen=True)
class BatchPlan:
    """The configuration to start with, and the sizes that may ever be used."""

    start: BatchConfig
    sizes: tuple[int, ...]  # micro-batch sizes, ascending
    limits: BatchLimits  # resolved


def start_plan(
    config: Config, engine: Engine, where: Place, source: Source, budget: int, *, prefer: str
) -> BatchPlan:
    """The plan of the first strategy under which the model fits into memory, `prefer` before others.

    Raises what `batch_plan` raises for the last of them.
    """
    *firsts, last = sorted(where.layouts, key=lambda strategy: strategy != prefer)
    for strategy in firsts:
        try:
            there = engine.on(where.layouts[strategy])
            return batch_plan(config, there, len(source), budget, strategy=strategy)
        except (memory.TooLarge, Indivisible) as error:
            logging.warning("the strategy %s is left out: %s", strategy, error)
    there = engine.on(where.layouts[last])
    return batch_plan(config, there, len(source), budget, strategy=last)


def nearest_strategy(saved: str, where: Place) -> str:
    """The strategy of this run by the name it was saved under; else one that cuts along the same axes."""

    def axes(name: str) -> set[str]:
        return {part.rstrip("0123456789") for part in name.split(".")}

    order = sorted(where.layouts, key=lambda name: (name != saved, axes(name) != axes(saved)))
    return order[0]


def batch_plan(
    config: Config, engine: Engine, num_samples: int, budget: int, *, strategy: str = ""
) -> BatchPlan:
    """Resolve the limits by data, devices and memory; compiles the starting size to know its bytes.

    Raises TooLarge where the base batch does not fit into memory at any split, Indivisible where it
    cannot be made of equal micro-batches, ValueError where it is larger than the data set.
    """
    limits, replicas = config.batch, engine.num_replicas
    base, largest = limits.base, limits.max
    if base > num_samples:
        raise ValueError(
            f"the base batch of {base} samples is larger than the data set of {num_samples}. Use a "
            "smaller batch.base (and the learning rate that belongs to it)."
        )
    if largest > num_samples:
        logging.warning(
            "batch.max=%d is larger than the data set; batches stop at its %d samples.",
            largest,
            num_samples,
        )
        largest = num_samples
    fixed = config.policy == "fixed"
    tolerance = config.fixed_tolerance if fixed else 0.0
    low, high = limits.micro or (None, None)
    most = high or max(largest // replicas, 1)
    most_micros = limits.max_micro_batches if config.accumulate else 1
    start = fixed_config(base, replicas, most, tolerance=tolerance, max_micro_batches=most_micros)
    known: dict[int, memory.StepBytes] = {}

    def needs(micro: int) -> memory.StepBytes:
        engine.compile([micro], accumulate=start.num_micro_batches > 1)
        need = engine.bytes_of(micro)
        assert need is not None
        known[micro] = need
        return need

    while True:
        micro = start.micro_batch_size
        need = needs(micro)
        if need.peak <= budget:
            break
        if micro > 1 and 1 not in known:
            needs(1)  # two sizes tell the samples' bytes from those of the state
        fits = memory.largest_that_fits(range(1, micro), known, budget)
        if fits < 1 or not config.accumulate:
            raise memory.TooLarge(
                f"a step with {micro} samples per replica needs {need.peak / 2**20:.0f} MiB "
                f"({need.arguments / 2**20:.0f} of it state and batch), and there are "
                f"{budget / 2**20:.0f} MiB. Raise memory_bytes if that is wrong, allow accumulation, "
                "cut the model over devices with Config.strategies (fsdp), or use a smaller model or "
                "base batch."
            )
        start = fixed_config(
            base, replicas, fits, tolerance=tolerance, max_micro_batches=most_micros
        )
    start = dataclasses.replace(start, strategy=strategy)
    if fixed:
        sizes: set[int] = {start.micro_batch_size}
        limits = dataclasses.replace(limits, micro=(start.micro_batch_size,) * 2, sizes=None)
        return BatchPlan(start, tuple(sizes), limits)
    # Sizes below the base's are of use only where batches may be smaller, or memory asks for it.
    floor = limits.min_global if limits.min_global is not None else start.global_batch_size
    low = low or max(1, min(start.micro_batch_size, floor // replicas))
    limits = dataclasses.replace(limits, max=largest, micro=(low, max(most, low)))
    sizes = {*limits.ladder(replicas), start.micro_batch_size}
    return BatchPlan(start, tuple(sorted(sizes)), limits)


def resumed_config(
    saved: Mapping[str, Any],
    plan: BatchPlan,
    replicas: int,
    config: Config,
    fits: Callable[[int], bool],
) -> BatchConfig:
    """The saved batch on the present number of replicas: the same, or the nearest allowed global batch.

    `fits` says of a micro-batch size whether the present memory allows it; the plan's start does.
    """
    if config.policy == "fixed":
        return plan.start
    while (near := _nearest_config(saved, plan, replicas, config)) != plan.start:
        size = near.micro_batch_size
        if fits(size):
            break
        logging.warning(
            "the run was saved with micro-batches of %d samples per replica, or is closest to it with %d, "
            "which does not fit into memory now: a smaller size is used.",
            saved["micro_batch_size"],
            size,
        )
        sizes = {s for s in plan.sizes if s < size} | {plan.start.micro_batch_size}
        plan = dataclasses.replace(plan, sizes=tuple(sorted(sizes - {size})))
    return near


def _nearest_config(
    saved: Mapping[str, Any], plan: BatchPlan, replicas: int, config: Config
) -> BatchConfig:
    here = {"num_replicas": replicas, "strategy": plan.start.strategy}
    same = BatchConfig(**{**saved, **here})
    wanted = saved["micro_batch_size"] * saved["num_micro_batches"] * saved["num_replicas"]
    if same.global_batch_size == wanted and same.micro_batch_size in plan.sizes:
        return same
    most = plan.limits.max_micro_batches if config.accumulate else 1
    floor = plan.limits.min_global or plan.limits.base
    options = [
        dataclasses.replace(
            plan.start, micro_batch_size=m, num_micro_batches=k, num_replicas=replicas
        )
        for m in plan.sizes
        for k in range(1, most + 1)
        if floor <= m * k * replicas <= plan.limits.max
    ] or [plan.start]
    return min(
        options,
        key=lambda c: (abs(math.log(c.global_batch_size / wanted)), c.num_micro_batches),
    )


def check_length(config: Config, plan: BatchPlan, source: Source, kind: str) -> None:
    """A loss that cannot leave padding out must never meet a padded batch: refuse before training."""
    if config.epochs is None or kind == "sample":
        return
    total = config.epochs * len(source)
    constant = config.policy == "fixed" and total % plan.start.global_batch_size == 0
    if not constant:
        raise ValueError(
            f"loss() returns a scalar mean, and the last batch of {config.epochs} epochs of "
            f"{len(source)} samples will have to be padded. Return per-sample losses [batch], or "
            "Loss(sum, weight) per sample, so that padding can be left out exactly; or train for "
            "base_steps instead of epochs."
        )


def evaluator(trainer: "Trainer", where: Place | None = None) -> Evaluator:
    """The compiled evaluation of this trainer.

    Raises ValueError where it has no eval_dataset.
    """
    data = trainer.eval_dataset()
    if data is None:
        raise ValueError(
            f"{type(trainer).__name__}.eval_dataset() returned None: there is nothing to evaluate on."
        )
    where = where or place(trainer.devices, trainer.config.strategies)
    config = trainer.config
    base = max(config.batch.base // where.num_replicas, 1)
    return Evaluator(
        trainer.metrics_with_state,
        as_source(data),
        where.layout,
        micro_batch_size=config.eval_micro_batch_size or base,
        compute_dtype=None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
        process_index=where.process_index,
        process_count=where.process_count,
    )


def observers(
    stack: contextlib.ExitStack,
    config: Config,
    ledger: TimeLedger,
    clock: Clock,
    users: Sequence[Any],
) -> list[Any]:
    """The hooks of the process that reports: journal, dashboard, console, then the user's own.

    They are closed with `stack`.
    """
    record = journal.Journal(config.workdir, clock=clock)
    stack.callback(record.close)
    hooks: list[Any] = [journal.Recorder(record)]
    if config.tensorboard:
        dashboard = Dashboard(config.workdir, clock=clock, ledger=ledger)
        stack.callback(dashboard.close)
        hooks.append(dashboard)
    if config.progress:
        console = Console(clock=clock, total_base_steps=config.base_steps)
        stack.callback(console.close)
        hooks.append(console)
    return [*hooks, *users]


@contextlib.contextmanager
def prompt_threads(interval_s: float = 0.0005) -> Iterator[None]:
    """Let the loop's thread have the interpreter soon while another one traces, plans or compiles.

    A waiting thread gets it after CPython's switch interval, 5 ms unless told, which is longer than
    many a step.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(interval_s, before))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def persistent_cache(config: Config) -> Iterator[None]:
    """JAX's compilation cache under the workdir while a run lasts, unless one is set already."""
    wanted = config.compilation_cache
    if wanted is None or jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    directory = wanted or os.path.join(os.path.abspath(config.workdir), "compilation_cache")
    settings = {
        "jax_compilation_cache_dir": directory,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
