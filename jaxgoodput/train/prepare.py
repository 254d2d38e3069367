"""From a user's task to what can run: devices, data, a fresh or restored state, what is compiled first."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import optax
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, PyTree

from jaxgoodput import __version__, _disk, _serial
from jaxgoodput._jax import shared_store
from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.fingerprint import Fingerprint, fingerprint
from jaxgoodput.data.loader import Loader
from jaxgoodput.data.readers import Attempts
from jaxgoodput.data.rows import narrow
from jaxgoodput.data.sources import (
    Source,
    StreamSource,
    abstract_sample,
    as_source,
    is_endless,
)
from jaxgoodput.engine import memory
from jaxgoodput.engine.engine import Engine, Engines
from jaxgoodput.engine.saved import from_host
from jaxgoodput.engine.state import TrainState, Variables, split
from jaxgoodput.engine.step import LossAndState, Problem
from jaxgoodput.goodput.memory import StepBytes, TooLarge
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.console import Console
from jaxgoodput.observe.tensorboard import Dashboard
from jaxgoodput.optim import adaptive as adaptation
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.preconditioner import MomentConstants, is_adam_like, moment_memory
from jaxgoodput.optim.probe import (
    NeedsMore,
    averages_parameters,
    lags,
    moment_constants,
    noise_share,
    normalised_share,
)
from jaxgoodput.parallel.partition import CannotDivide, whole_leaves
from jaxgoodput.parallel.strategy import DATA_AXIS, Layout, Strategy, anywhere
from jaxgoodput.train.checkpoint import (
    CheckpointMeta,
    Checkpoints,
    Restored,
    WrongWorkdirError,
    check_writable,
    initial_leaves,
    restore,
    saveable,
)
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import CONTROL_SIZE
from jaxgoodput.train.evaluation import Evaluator
from jaxgoodput.train.membership import Kept
from jaxgoodput.train.process import cache_folder, keep_freed_pages
from jaxgoodput.train.task import Task
from jaxgoodput.tune.plan import BatchPlan, Indivisible, batch_plan
from jaxgoodput.tune.remembered import FOLDER, Memory, Remembered


@dataclass(frozen=True)
class Place:
    """Which devices a run has, and who shares them.

    Where there are several processes, either the layouts span them, or, where the model is whole on every
    device, each process has one of its own and `world` is the mesh of all: then a state outlives a peer.
    """

    layouts: Mapping[str, Layout]  # by strategy; the name "" is plain data parallelism, unasked
    world: Mesh | None
    process_index: int
    process_count: int
    is_broken: Callable[[], bool] = lambda: False
    """Whether a process of this generation has gone: nobody waits for it."""

    @property
    def layout(self) -> Layout:
        """The first layout."""
        return next(iter(self.layouts.values()))

    @property
    def spans(self) -> bool:
        """Whether the layouts are of devices of several processes."""
        return self.process_count > 1 and self.world is None

    @property
    def num_devices(self) -> int:
        """Devices of all processes."""
        return self.layout.num_devices if self.world is None else self.world.size

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes, under the first layout."""
        return self.layout.num_replicas if self.world is None else self.world.size

    @property
    def own_devices(self) -> Sequence[Any]:
        """This process's part of the devices."""
        return self.layout.mesh.local_devices

    def meet(self, moment: str) -> None:
        """Wait for all processes: they compile at different speeds, and a first collective waits 30 s."""
        store = shared_store()
        if self.process_count > 1 and store is not None:
            store.meet(
                f"jaxgoodput: {moment}",
                self.process_index,
                self.process_count,
                timeout_s=1800.0,
                unless=self.is_broken,
            )

    def silent(self, clock: Clock) -> tuple[int, ...]:
        """The processes that do not come here within a second or so of this one."""
        store = shared_store()
        assert store is not None
        keys = [f"jaxgoodput: process {rank} has lost a peer" for rank in range(self.process_count)]
        store.set(keys[self.process_index], "", overwrite=True)
        clock.sleep(1.0)
        return tuple(rank for rank, key in enumerate(keys) if store.try_get(key) is None)

    def everywhere(self, holds: bool) -> bool:
        """Whether it holds in every process; they come here together."""
        if self.process_count == 1:
            return holds
        return bool(np.all(multihost_utils.process_allgather(np.float32(holds))))


def place(
    devices: Sequence[Any] | None,
    strategies: Sequence[Strategy] = (),
    *,
    spanning: bool = False,
    elastic: bool = False,
) -> Place:
    """The layouts of `strategies` (none: one replica on every device).

    `devices` narrows them where there is one process. In several processes, plain data parallelism has a
    layout in each of them unless it is to be `spanning`; so it has in one, where others are to come
    (`elastic`), which then takes the same programs. Of strategies that are the same on these devices the
    first stays.

    Raises ValueError for a strategy that does not use exactly those devices, and for two that differ and
    have one name.
    """
    count = jax.process_count()
    if count > 1 and devices is not None:
        raise ValueError(
            f"devices= is for one process; this job has {count}. Start the processes with the devices "
            "that they should use."
        )
    everyone = jax.devices() if count > 1 else jax.local_devices() if devices is None else devices
    num_devices = len(everyone)
    plans = list(dict.fromkeys(strategy.resolved(num_devices) for strategy in strategies))
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Config.strategies has two of one name: {', '.join(names)}. On {num_devices} devices they have "
            "the same degrees, and other rules: give each a `title`, or leave one of them out."
        )
    world = None
    plain = not plans or (len(plans) == 1 and not plans[0].is_cut)
    if (count > 1 or elastic) and not spanning and plain:
        world = Mesh(np.asarray(everyone), (DATA_AXIS,), axis_types=(AxisType.Auto,))
        everyone = jax.local_devices()
        plans = [dataclasses.replace(plan, data=len(everyone)) for plan in plans]
    layouts = {"": Strategy(data=len(everyone)).on(everyone)}
    if plans:
        layouts = {name: plan.on(everyone) for name, plan in zip(names, plans, strict=True)}
    return Place(layouts, world, jax.process_index(), count)


class Given:
    """What a task gives, asked for once, however often a run has to get ready."""

    def __init__(self, task: Task, config: Config):
        self._task = task
        self._config = config

    @functools.cached_property
    def dataset(self) -> Source:
        """What it trains on."""
        return as_source(self._task.dataset())

    @functools.cached_property
    def eval_dataset(self) -> Any:
        """What it is evaluated on; None: it is not."""
        return self._task.eval_dataset()

    @functools.cached_property
    def problem(self) -> Problem:
        """Its methods; made without a device."""
        return problem_of(self._task, self._config)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Everything that the loop needs before its first step."""

    where: Place
    engine: Engine  # of the strategy to start with
    strategies: StrategyCompiler
    checkpoints: Checkpoints
    loader: Loader
    evaluator: Evaluator | None
    state: TrainState
    batch: BatchConfig
    limits: BatchLimits
    dataset_size: int
    data: Fingerprint
    total_samples: int | None  # with which the run ends; None: it ends by progress
    step: int
    samples: int
    progress: float
    compile_s: float  # what compiling took in this start
    restart: int  # earlier runs in this workdir, as the chief knows
    restored: CheckpointMeta | None
    memory: Memory | None  # of earlier runs, and for later ones
    hooks: tuple[Any, ...]  # those of the process that reports


def prepare(
    task: Task,
    config: Config,
    devices: Sequence[Any] | None,
    *,
    initial: Any,
    hooks: Sequence[Any],
    stack: contextlib.ExitStack,
    ledger: TimeLedger,
    clock: Clock,
    given: Given,
    kept: Kept | None = None,
    is_broken: Callable[[], bool] | None = None,
) -> Start:
    """Get ready to train; what is opened is closed with `stack`, time is booked in `ledger`.

    `given` is what the task gives. A run that goes on from `kept` reads no checkpoint. Where processes come
    and go, `is_broken` says whether one of them has gone.

    Raises what `Trainer.fit` says it raises for settings that cannot work.
    """
    where = place(devices, config.strategies, elastic=is_broken is not None)
    if is_broken is not None:
        where = dataclasses.replace(where, is_broken=is_broken)
    source = given.dataset
    _check_endless(config, source)
    if config.execution.keep_freed_pages:
        keep_freed_pages(where.own_devices[0].platform)
    budget = _budget(config, where)
    again = Attempts(num_retries=config.execution.read_retries, clock=clock)
    sample = again(functools.partial(abstract_sample, source))
    where, by_strategy, kind = _engines(given.problem, config, devices, where, sample, budget)
    if is_broken is not None and where.world is None:
        is_cut = any(layout.strategy.is_cut for layout in where.layouts.values())
        what = (
            f"Config.strategies asks for {', '.join(where.layouts)}"
            if is_cut
            else "the loss runs over all processes at once (Config.loss, or constraints of the model)"
        )
        raise ValueError(
            "in a job whose hosts come and go (run --nnodes) each process trains a whole copy of the model "
            f"by itself, and here {what}. Leave strategies and loss at their defaults, or start it with "
            "--nproc-per-node."
        )
    _hold(config.workdir, where, stack)
    checkpoints = Checkpoints(config.workdir, keep=config.saving, spans=where.spans)
    stack.callback(checkpoints.close)
    checkpoints.remove_leftovers()
    data = fingerprint(source, again)
    plan_of = functools.partial(_plan, config, by_strategy, len(source), budget)

    def planned(prefer: str) -> BatchPlan:
        with ledger.bucket("compilation"):
            return _first_plan(by_strategy, plan_of, prefer=prefer)

    def planned_for(meta: CheckpointMeta) -> TrainState:
        """What to restore: onto the saved strategy, or, where it does not fit here, the first that does."""
        _check_same_data(meta, data, config, where)
        found.append(planned(_nearest_strategy(meta.batch.strategy, where)))
        return _abstract_as_saved(by_strategy[found[-1].start.strategy], meta)

    found: list[BatchPlan] = []
    with ledger.bucket("checkpoint_restore"):
        if kept is None:
            restored = checkpoints.restore(planned_for)
        else:
            abstract = planned_for(kept.meta)
            restored = Restored(state=from_host(kept.leaves, abstract), meta=kept.meta)
    plan = found[-1] if restored is not None else planned(next(iter(where.layouts)))
    engine = by_strategy[plan.start.strategy]
    step, samples, progress = 0, 0, 0.0
    batch, cursor = plan.start, Cursor(seed=config.seed)
    memory = _memory(config, where, engine, plan, len(source))
    earlier = None if memory is None else memory.earlier
    if restored is None:
        leaves: dict[str, Any] = {}
        if initial is not None:
            with ledger.bucket("checkpoint_restore"):
                leaves = initial_leaves(initial, engine.abstract_state().variables)
        state = engine.init(jax.random.key(config.seed), leaves)
        if earlier is not None:
            batch, state = _begun(engine, plan, earlier, budget, ledger, state)
    else:
        state, meta = _with_average(engine, restored), restored.meta
        if initial is not None and kept is None:
            logging.warning(
                "the run goes on from its checkpoint of step %d: initial= is for a new workdir, not read.",
                meta.step,
            )
        step, samples, cursor = meta.step, meta.samples, meta.cursor
        if cursor.offset > len(source):  # of a larger data set; it may be allowed
            cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, offset=0)
        _go_on(source, meta)
        progress = float(adaptation.progress(state.opt_state))
        if config.policy != "fixed":
            batch = plan.resumed(meta.batch, lambda size: _fits(engine, size, budget, ledger))
    total = None if config.epochs is None else config.epochs * len(source)
    remaining = None if total is None else max(total - samples, 0)
    can_leave_out = kind == "sample" or engine.problem.takes_mask
    if not can_leave_out and config.last_batch != "drop":
        _require_even_rest(config, plan, source, by_strategy, remaining)
    if restored is None:
        _warn_of_coupling(config, engine, state, source, plan, again)
    held_out, evaluation = given.eval_dataset, None
    every = config.evaluation.every_s or config.evaluation.every_base_steps
    is_ahead = bool(every) or where.process_count > 1  # which would wait for the slowest
    if held_out is not None or every:
        evaluation = evaluator(task, config, where, held_out, clock)
        evaluation.check(engine.abstract_state())  # what is wrong there is named before training

    def compile_evaluation(other: Engine) -> None:
        if evaluation is not None and is_ahead:
            evaluation.compile(other.abstract_state())

    with ledger.bucket("compilation"):
        compile_evaluation(engine)

    strategies = StrategyCompiler(
        by_strategy,
        plan,
        plan_of,
        budget=budget,
        reach=config.tuning.max_growth if config.compiles_behind else math.inf,
        background=config.compiles_behind,
        compile_more=compile_evaluation,
    )
    stack.callback(strategies.close)
    strategies.use(batch)
    with ledger.bucket("compilation"):
        engine.compile([batch.micro_batch_size], accumulate=batch.num_micro_batches > 1)
    compile_s = ledger.snapshot().get("compilation", 0.0)  # before those of earlier runs are added
    with ledger.bucket("compilation"):
        if restored is None and earlier is not None and config.compiles_behind:
            wanted = [c for c in (batch, plan.start, earlier.batch) if c.strategy == batch.strategy]
            # At the base batch alone: what else it takes, the earlier run may not have compiled.
            if set(wanted) != {plan.start}:
                strategies.compiler(batch.strategy).compile_first(
                    c.micro_batch_size for c in wanted
                )
        if not config.compiles_behind:
            strategies.prepare()
    loader = Loader(
        source,
        sharding=engine.layout.batch_sharding,
        cursor=cursor,
        process_index=where.process_index,
        process_count=where.process_count,
        max_samples=remaining,
        drop_last=config.last_batch == "drop",
        prefetch=config.execution.prefetch,
        shuffle=config.shuffle,
        num_readers=config.execution.readers,
        num_retries=config.execution.read_retries,
        clock=clock,
    )
    stack.callback(loader.close)
    restart = 0
    told: tuple[Any, ...] = ()
    if where.process_index == 0:
        saved = None if restored is None else restored.meta.ledger
        restart = journal.resume(config.workdir, ledger, saved)
        told = _observers(stack, config, ledger, clock, hooks)
        path = pathlib.Path(config.workdir) / "config.json"
        path.write_text(json.dumps(_serial.encode(config), indent=2) + "\n")
    return Start(
        where=where,
        engine=engine,
        strategies=strategies,
        checkpoints=checkpoints,
        loader=loader,
        evaluator=evaluation,
        state=state,
        batch=batch,
        limits=plan.limits,
        dataset_size=len(source),
        data=data,
        total_samples=total,
        step=step,
        samples=samples,
        progress=progress,
        compile_s=compile_s,
        restart=restart,
        restored=None if restored is None else restored.meta,
        memory=memory,
        hooks=told,
    )


def rehearse(config: Config, given: Given) -> None:
    """Have this process trace and compile a step by itself, before others wait for it to do so.

    A process traces its first step far more slowly than any later one.
    """
    where = place(None, config.strategies, elastic=True)
    budget = _budget(config, where)
    sample = abstract_sample(given.dataset)
    _, by_strategy, _ = _engines(given.problem, config, None, where, sample, budget)
    plan_of = functools.partial(_plan, config, by_strategy, len(given.dataset), budget)
    _first_plan(by_strategy, plan_of, prefer="")


def save_kept(config: Config, given: Given, kept: Kept) -> str | None:
    """Write a run that is between two sets of processes as its newest checkpoint; None, or an error."""
    where = place(None, config.strategies, elastic=True)
    sample = abstract_sample(given.dataset)
    _, by_strategy, _ = _engines(given.problem, config, None, where, sample, None)
    engine = next(iter(by_strategy.values()))
    state = from_host(kept.leaves, _abstract_as_saved(engine, kept.meta))
    with contextlib.ExitStack() as stack:
        _hold(config.workdir, where, stack)
        checkpoints = Checkpoints(config.workdir, keep=config.saving)
        stack.callback(checkpoints.close)
        return checkpoints.save(state, kept.meta) or checkpoints.wait(alone=True)


def restored_state(
    task: Task, config: Config, devices: Sequence[Any] | None, *, step: int | None, best: bool
) -> TrainState:
    """A checkpoint's state, on the strategy of this run that is nearest to the one it was saved under.

    Nothing else is got ready. Raises what `Trainer.restore` says.
    """
    where, source = place(devices, config.strategies), as_source(task.dataset())
    sample = abstract_sample(source)
    where, engines, _ = _engines(problem_of(task, config), config, devices, where, sample, None)

    def engine_for(meta: CheckpointMeta) -> Engine:
        return engines[_nearest_strategy(meta.batch.strategy, where)]

    restored = restore(
        config.workdir,
        lambda meta: _abstract_as_saved(engine_for(meta), meta),
        step=step,
        best=best,
        saving=config.saving,
    )
    return _with_average(engine_for(restored.meta), restored)


def _engines(
    problem: Problem,
    config: Config,
    devices: Sequence[Any] | None,
    where: Place,
    sample: PyTree[jax.ShapeDtypeStruct],
    budget: int | None,
) -> tuple[Place, Mapping[str, Engine], str]:
    """The engine of every strategy that can be had, where they run, and the kind of the loss."""

    def engines_of(where: Place) -> Engines:
        return Engines(
            problem,
            sample,
            world=where.world,
            control_size=CONTROL_SIZE if where.process_count > 1 or where.world is not None else 0,
            memory_bytes=budget,
            loss=config.loss,
        )

    engines = engines_of(where)
    kind = engines.loss_kind()  # before anything is compiled: a loss of a wrong shape is named
    if where.world is not None and engines.is_global(where.layout):
        layouts = place(devices, config.strategies, spanning=True).layouts
        where = dataclasses.replace(where, layouts=layouts, world=None)
        engines = engines_of(where)
    # Rules that do not fit are named before anything is read.
    by_strategy = _engines_by_strategy(engines, where)
    layouts = {name: engine.layout for name, engine in by_strategy.items()}
    return dataclasses.replace(where, layouts=layouts), by_strategy, kind


def _abstract_as_saved(engine: Engine, meta: CheckpointMeta) -> TrainState:
    """The state of an engine, abstract, without an average where the checkpoint has none."""
    abstract = engine.abstract_state()
    return abstract if meta.has_average else dataclasses.replace(abstract, ema=None)


def _with_average(engine: Engine, restored: Restored) -> TrainState:
    """The state that was read, with an average where this run wants one."""
    if engine.problem.ema is None or restored.meta.has_average:
        return restored.state
    logging.warning(
        "the checkpoint of step %d holds no average of the parameters (Config.ema): it begins with "
        "them as they are there.",
        restored.meta.step,
    )
    return engine.with_average(restored.state)


def _hold(workdir: str, where: Place, stack: contextlib.ExitStack) -> None:
    """Hold the workdir until `stack` closes, by process 0 for all.

    Raises InUse in all of them where another run holds it, PermissionError where it cannot be written.
    """
    refused = None
    try:
        check_writable(pathlib.Path(workdir))
        if where.process_index == 0:
            stack.enter_context(_disk.held(pathlib.Path(workdir)))
    except (OSError, _disk.InUse) as error:
        refused = error
    if not where.everywhere(refused is None):
        raise refused or _disk.InUse(f"{workdir} cannot be used, as another process says.")


def _check_same_data(meta: CheckpointMeta, data: Fingerprint, config: Config, where: Place) -> None:
    """Refuse, in all processes, a checkpoint that was written with other data or another base batch."""
    changed = []
    difference = None if meta.data is None else meta.data.difference(data)
    if difference is not None:
        changed.append(f"the data set {difference}")
    if meta.base_batch_size not in (None, config.batch.base):
        changed.append(f"batch.base is {config.batch.base} instead of {meta.base_batch_size}")
    if where.everywhere(not changed):
        return
    what = " and ".join(changed) or "another process reads other data"
    if not config.saving.allow_changed_data:
        raise WrongWorkdirError(
            f"{what}, against the checkpoint of step {meta.step} in {config.workdir}. Use another workdir, "
            "or set Config.saving.allow_changed_data: then samples need no longer come exactly once."
        )
    logging.warning(
        "%s, against the checkpoint of step %d. It goes on, as allowed.", what, meta.step
    )


def _engines_by_strategy(engines: Engines, where: Place) -> Mapping[str, Engine]:
    """The engine of every strategy whose rules, or the model's, divide on these devices.

    Raises CannotDivide, of the last, where there is none.
    """
    found: dict[str, Engine] = {}
    refused: CannotDivide | None = None
    for name, layout in where.layouts.items():
        try:
            found[name] = engines.on(layout)
        except CannotDivide as error:
            _log_left_out(name, error)
            refused = error
    if not found:
        assert refused is not None
        raise refused
    return found


def _log_left_out(strategy: str, why: Exception) -> None:
    logging.warning("the strategy %s is left out: %s", strategy, why)


def problem_of(task: Task, config: Config) -> Problem:
    """The user's methods as a `Problem`, with the learning-rate rule chosen where none was.

    Raises TypeError where the optimizer is not an optax transformation, or the state holds anything
    that cannot be checkpointed.
    """
    tx = task.optimizer()
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"optimizer() must return an optax.GradientTransformation; got {type(tx).__name__}."
        )
    made = jax.eval_shape(anywhere(saveable(task.init, "init()")), jax.random.key(0))
    params = made.params if isinstance(made, Variables) else made
    mask = task.trainable(params)
    trainable = None if mask is None else task.trainable
    kept = params if mask is None else split(params, mask)[0]
    if not jax.tree.leaves(kept):
        raise ValueError("there is nothing to train: init() has no leaf that trainable() allows.")
    opt_state = jax.eval_shape(saveable(tx.init, "the state of optimizer()"), kept)
    adam_like = is_adam_like(opt_state)
    # Whatever is not known by name is asked: Lion, sign and normalised SGD, and a user's own.
    preconditioned = config.statistics.preconditioned
    preconditioned = adam_like if preconditioned is None else preconditioned
    if config.statistics.from_norm_layers:  # their factors are no parameters of tx
        preconditioned = False
    try:
        normalises = adam_like or normalised_share(tx, kept) > 0.5
        moments = moment_constants(tx, kept) if adam_like else MomentConstants()
    except NeedsMore as error:
        raise ValueError(
            "optimizer() has a link that asks for more than gradients, parameters and the loss: "
            f"{error} A line search (lbfgs) or a Hessian (sophia) cannot be had here; leave that link out."
        ) from error
    if _holds(opt_state, optax.contrib.ScheduleFreeState):
        logging.warning(
            "optimizer() is schedule-free: it averages parameters by steps of its own, which the "
            "learning-rate gain of a larger batch does not reach, so that most of the gain is lost. Use "
            'Config.policy "fixed", under which there is none.'
        )
    elif _holds(opt_state, optax.EmaState) or averages_parameters(tx, kept):
        logging.warning(
            "optimizer() keeps an average (optax.ema, or one of the parameters), which sees updates before "
            "the learning-rate gain. As a momentum it is right; as an average of the parameters it falls "
            "behind them at a larger batch. Config.ema keeps one that does not."
        )
    rule = config.rule
    remembered = moment_memory(opt_state, moments.b2)
    if remembered is not None and not lags(tx, kept):
        remembered = None
    if rule is None:
        rule = rules.adam_scale if normalises else rules.adascale
        if normalises and remembered is None:
            rule = rules.of_noise_share(noise_share(tx, kept))
    elif (rule is rules.adascale and normalises) or (rule is rules.adam_scale and not normalises):
        better = "adam_scale" if normalises else "adascale"
        logging.warning(
            "the rule %s does not suit this optimizer, which %s the gradient by its size: "
            "%s does. Leave Config.rule None to have it chosen.",
            getattr(rule, "__name__", rule),
            "divides" if normalises else "does not divide",
            better,
        )
    labels = task.labels if task.labels(kept) is not None else None
    loss_and_state, takes_mask = _loss_of(task)
    return Problem(
        init=task.init,
        loss_and_state=loss_and_state,
        takes_mask=takes_mask,
        tx=adaptation.adaptive(
            tx,
            rule,
            base_batch_size=config.batch.base,
            smoothing=config.statistics.smoothing,
            labels=labels,
            # A run of so many epochs ends by its samples, and so do its schedules.
            schedules="progress" if config.epochs is None else "samples",
            # Fixed is fixed, for the last batch too, which is smaller.
            shrinks=config.policy != "fixed" or config.tuning.fixed_tolerance > 0,
            second_moment_decay=remembered if rule is rules.adam_scale else None,
        ),
        base_batch_size=config.batch.base,
        trainable=trainable,
        preconditioned=preconditioned,
        from_norm_layers=config.statistics.from_norm_layers,
        has_labels=labels is not None,
        moments=moments,
        compute_dtype=None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
        ema=config.ema,
    )


def _loss_of(task: Task) -> tuple[LossAndState, bool]:
    """The user's loss, and whether it asks for the mask of real rows, by a parameter of that name."""
    has_state = type(task).loss_and_state is not Task.loss_and_state
    written: Callable[..., Any] = task.loss_and_state if has_state else task.loss
    if "mask" not in inspect.signature(written).parameters:
        return task.loss_and_state, False

    def masked(
        params: PyTree, model_state: PyTree, batch: PyTree, key: Array, mask: Array | None = None
    ) -> tuple[Any, PyTree]:
        if mask is None:  # only looked at
            mask = jnp.ones(len(jax.tree.leaves(batch)[0]))
        if has_state:
            return written(params, model_state, batch, key, mask=mask)
        return written(params, batch, key, mask=mask), model_state

    return masked, True


def _holds(opt_state: PyTree, kind: type) -> bool:
    """Whether a state of this kind is anywhere in an optimizer's."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    return any(isinstance(x, kind) for x in nodes)


def evaluator(task: Task, config: Config, where: Place, data: Any, clock: Clock) -> Evaluator:
    """The evaluation of this task on its held-out `data`.

    Raises ValueError where there are none, or they have no end.
    """
    if data is None:
        raise ValueError(
            f"{type(task).__name__}.eval_dataset() returned None: there is nothing to evaluate on."
        )
    source = as_source(data)
    if is_endless(source):
        raise ValueError(
            f"{type(task).__name__}.eval_dataset() returned a {type(data).__name__} that is a stream or has "
            "no end, and an evaluation takes every sample once. Return something with a length."
        )
    base = max(config.batch.base // where.num_replicas, 1)
    return Evaluator(
        task.metrics_with_state,
        source,
        where.layout,
        micro_batch_size=config.evaluation.micro_batch_size or base,
        compute_dtype=None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
        process_index=where.process_index,
        process_count=where.process_count,
        clock=clock,
        num_readers=config.execution.readers,
        num_retries=config.execution.read_retries,
    )


def _budget(config: Config, where: Place) -> int:
    """Bytes that a step may use on a device; the same in every process."""
    budget = memory.device_budget(
        where.own_devices[0],
        num_local_devices=len(where.own_devices),
        stated=config.execution.memory_bytes,
        margin=config.execution.memory_margin,
    )
    where.meet("before the plan")
    return memory.least(budget) if where.process_count > 1 else budget


def _plan(
    config: Config, engines: Mapping[str, Engine], num_samples: int, budget: int, strategy: str
) -> BatchPlan:
    """The batch plan of a strategy; compiles the starting size to know its bytes."""
    engine = engines[strategy]
    for sentence in whole_leaves(engine.programs.param_specs, engine.engines.state.params):
        logging.warning("under %s, %s", engine.layout.strategy.name, sentence)

    def needs(micro_batch_size: int, accumulate: bool) -> StepBytes:
        if _memory_folder(config) is not None and engine.world is None:
            engine.digest(micro_batch_size)  # wanted later: it must not be traced twice
        engine.compile([micro_batch_size], accumulate=accumulate)
        need = engine.bytes_of(micro_batch_size)
        assert need is not None
        return need

    return batch_plan(
        config.batch,
        engine.num_replicas,
        num_samples,
        budget=budget,
        needs=needs,
        accumulate=config.accumulates,
        fixed=config.policy == "fixed",
        schedule=None if isinstance(config.policy, str) else config.policy,
        tolerance=config.tuning.fixed_tolerance,
        strategy=strategy,
    )


def _first_plan(
    engines: Mapping[str, Engine], plan_of: Callable[[str], BatchPlan], *, prefer: str
) -> BatchPlan:
    """The plan of the first strategy under which the model fits into memory, `prefer` before others.

    Raises what `batch_plan` raises for the last of them.
    """
    *firsts, last = sorted(engines, key=lambda strategy: strategy != prefer)
    for strategy in firsts:
        try:
            return plan_of(strategy)
        except (TooLarge, Indivisible, CannotDivide) as error:
            _log_left_out(strategy, error)
    return plan_of(last)


def _nearest_strategy(saved: str, where: Place) -> str:
    """The strategy of this run by the name it was saved under; else one that cuts along the same axes."""

    def axes(name: str) -> set[str]:
        return {part.rstrip("0123456789") for part in name.split(".")}

    order = sorted(where.layouts, key=lambda name: (name != saved, axes(name) != axes(saved)))
    return order[0]


def _fits(engine: Engine, micro_batch_size: int, budget: int, ledger: TimeLedger) -> bool:
    """Whether a step of this size fits into memory; compiles it to know."""
    with ledger.bucket("compilation"):
        engine.compile([micro_batch_size], accumulate=False)
    need = engine.bytes_of(micro_batch_size)
    return need is not None and need.peak <= budget


def _memory_folder(config: Config) -> pathlib.Path | None:
    """Where this run finds and leaves what runs remember; None: it does neither.

    Nor do several processes: they would have to agree on a file that each of them may see in another state.
    """
    folder = cache_folder(config)
    wanted = config.tuning.remember and config.policy == "goodput" and jax.process_count() == 1
    return pathlib.Path(folder) / FOLDER if wanted and folder is not None else None


def _memory(
    config: Config, where: Place, engine: Engine, plan: BatchPlan, num_samples: int
) -> Memory | None:
    """What earlier runs left that had the same program, data and devices, as far as can be told."""
    folder = _memory_folder(config)
    if folder is None or where.world is not None:
        return None
    device = where.own_devices[0]
    alike = {
        "program": engine.digest(plan.start.micro_batch_size),
        "base_batch_size": config.batch.base,
        "num_samples": num_samples,
        "statistics": _serial.encode(config.statistics),
        "strategies": list(where.layouts),
        "num_devices": where.num_devices,
        "device_kind": device.device_kind,
        "num_cpus": os.cpu_count() if device.platform == "cpu" else None,
        "keep_freed_pages": config.execution.keep_freed_pages,
        "versions": [
            device.client.platform_version,
            jax.__version__,
            jaxlib.version.__version__,
            __version__,
        ],
    }
    key = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:32]
    return Memory.at(folder / f"{key}.json")


def _begun(
    engine: Engine,
    plan: BatchPlan,
    earlier: Remembered,
    budget: int,
    ledger: TimeLedger,
    state: TrainState,
) -> tuple[BatchConfig, TrainState]:
    """The batch of a fresh run, where an earlier one ended, and a state that trusts its first noise.

    The base batch where that noise is not known, and where the learning rate goes by labels, whose noise is
    not remembered: the rate would stay that of the base batch.
    """
    if earlier.noise is None or engine.problem.has_labels:
        return plan.start, state
    batch = plan.resumed(earlier.batch, lambda size: _fits(engine, size, budget, ledger))
    if batch == plan.start:
        return plan.start, state
    with ledger.bucket("compilation"):
        engine.compile([batch.micro_batch_size], accumulate=batch.num_micro_batches > 1)
    need = engine.bytes_of(batch.micro_batch_size)
    if need is None or need.peak > budget:
        return plan.start, state
    logging.info("it begins where an earlier run ended, at %d samples", batch.global_batch_size)
    held = adaptation.with_noise_held(state.opt_state, earlier.noise.grad)
    return batch, dataclasses.replace(state, opt_state=held)


def _check_endless(config: Config, source: Source) -> None:
    if config.epochs is not None and is_endless(source):
        raise ValueError(
            f"Config.epochs={config.epochs} counts passes over the data, and dataset() returned a stream or "
            "a data set that repeats without end. Set Config.base_steps instead, or leave out .repeat()."
        )


def _go_on(source: Source, meta: CheckpointMeta) -> None:
    """Set a stream back to where the checkpoint left it."""
    if isinstance(source, StreamSource) != (meta.stream is not None):
        raise WrongWorkdirError(
            f"the checkpoint of step {meta.step} is of a run whose data set was "
            f"{'no stream' if meta.stream is None else 'a stream'}, and that of this one is "
            f"{'one' if meta.stream is None else 'not'}. Resume with the data set that it began with, or use "
            "another workdir."
        )
    if isinstance(source, StreamSource) and meta.stream is not None:
        source.restore(meta.stream)


def _require_even_rest(
    config: Config,
    plan: BatchPlan,
    source: Source,
    engines: Mapping[str, Engine],
    remaining: int | None,
) -> None:
    """A loss that cannot leave padding out must never meet a padded batch: refuse before training."""
    counts = sorted({engine.num_replicas for engine in engines.values()})
    in_stages = any(engine.layout.strategy.stage > 1 for engine in engines.values())
    if remaining is None:  # only a stream ends all the same, and anywhere
        is_even = not isinstance(source, StreamSource) or (counts == [1] and not in_stages)
        what = "a stream"
    else:
        what = f"the {remaining} samples until the end of `epochs`"
        # Where there are several, what is left for one of them depends on how long others were used.
        is_even = len(counts) == 1 and remaining % counts[0] == 0
        if in_stages:  # the last batch keeps its size there
            is_even = config.policy == "fixed" and remaining % plan.start.global_batch_size == 0
    if not is_even:
        raise ValueError(
            f"loss() returns a scalar mean, and the last batch of {what} may have to be padded, so that "
            f"{' or '.join(map(str, counts))} replicas, or stages, can share it. "
            "Return per-sample losses [batch], or Loss(sum, weight) per sample, so that padding can be left "
            "out exactly; or give loss() a parameter `mask`; or set Config.last_batch to "
            '"drop"; or train for base_steps.'
        )


def _warn_of_coupling(
    config: Config,
    engine: Engine,
    state: TrainState,
    source: Source,
    plan: BatchPlan,
    again: Attempts,
) -> None:
    """Warn where batches may be split, and a loss says other things of the same samples when they are."""
    accumulates = plan.accumulate and (config.policy != "fixed" or plan.start.num_micro_batches > 1)
    separate = engine.num_replicas > 1 and not engine.engines.is_global(engine.layout)
    # Layers in stages need more rows than that; and processes would have to try it together.
    cannot_try = engine.spans or engine.layout.strategy.stage > 1 or len(source) < 4
    if cannot_try or not (accumulates or separate):
        return
    if (
        isinstance(source, StreamSource) and source.available(0, 4) < 4
    ):  # it keeps them for training
        return
    if engine.couples_samples(state, narrow(again(lambda: source.batch(np.arange(4))))):
        logging.warning(
            "the loss of a sample depends on the samples beside it (batch statistics, in-batch negatives, "
            "ranks), and batches may be split over %s: it then sees those of its own part. "
            'Config.loss="whole" never splits a batch.',
            "micro-batches and replicas"
            if accumulates and separate
            else "replicas"
            if separate
            else "micro-batches",
        )


def _observers(
    stack: contextlib.ExitStack,
    config: Config,
    ledger: TimeLedger,
    clock: Clock,
    users: Sequence[Any],
) -> tuple[Any, ...]:
    """The hooks of the process that reports: journal, dashboard, console, then the user's own.

    They are closed with `stack`.
    """
    record = journal.Journal(config.workdir, clock=clock)
    stack.callback(record.close)
    hooks: list[Any] = [journal.Recorder(record)]
    if config.reporting.tensorboard:
        dashboard = Dashboard(config.workdir, clock=clock, ledger=ledger)
        stack.callback(dashboard.close)
        hooks.append(dashboard)
    if config.reporting.progress:
        console = Console(clock=clock, total_base_steps=config.base_steps)
        stack.callback(console.close)
        hooks.append(console)
    return (*hooks, *users)
