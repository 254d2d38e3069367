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
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from absl import logging
from jaxtyping import Array, PyTree

from jaxgoodput import __version__, _disk, _serial
from jaxgoodput._jax import PeerGone, keeps_priorities
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.fingerprint import Fingerprint, fingerprint, of_stream
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
from jaxgoodput.embedding.plan import Table
from jaxgoodput.engine import memory
from jaxgoodput.engine.engine import Engine, Engines
from jaxgoodput.engine.programs import PRIORITIES
from jaxgoodput.engine.rows import WithRows, as_seen, rows_apart, with_tables
from jaxgoodput.engine.saved import from_host, whole_on_host
from jaxgoodput.engine.state import TrainState, Variables, split
from jaxgoodput.engine.step import LossAndState, Problem
from jaxgoodput.engine.traces import Traces
from jaxgoodput.goodput.memory import StepBytes, TooLarge
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.console import Console
from jaxgoodput.observe.tensorboard import Dashboard
from jaxgoodput.optim import adaptive as adaptation
from jaxgoodput.optim.probe import NeedsMore
from jaxgoodput.optim.treatment import treatment_of
from jaxgoodput.parallel.partition import CannotDivide, whole_leaves
from jaxgoodput.parallel.place import Place, place
from jaxgoodput.parallel.strategy import anywhere
from jaxgoodput.train.checkpoint import (
    CheckpointMeta,
    Checkpoints,
    RestoredCheckpoint,
    WrongWorkdirError,
    check_writable,
    initial_leaves,
    require_best,
    restore,
    saveable,
)
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import CONTROL_SIZE
from jaxgoodput.train.evaluation import Evaluator, Metrics
from jaxgoodput.train.membership import RunSnapshot
from jaxgoodput.train.process import cache_folder, keep_freed_pages
from jaxgoodput.train.tables.commits import Opener, Tables, peers_of
from jaxgoodput.train.tables.feed import Feed
from jaxgoodput.train.tables.given import (
    HostEmbeddings,
    abstract_places,
    checked_ids,
    checked_tables,
    require_place,
    require_rows,
    require_settings,
)
from jaxgoodput.train.task import Task, require_bools, require_floating, require_methods
from jaxgoodput.tune.plan import BatchPlan, Indivisible, batch_plan
from jaxgoodput.tune.remembered import FOLDER, Memory, ProgramMemory

_CUT_OFF_S = 10.0  # for a process that was cut off to let go of the workdir


class TaskInputs:
    """What a task gives, asked for once, however often a run has to get ready."""

    def __init__(self, task: Task, config: Config, clock: Clock):
        require_methods(task)
        self._task = task
        self._config = config
        self._clock = clock

    @property
    def again(self) -> Attempts:
        """In how many attempts its data sets are read."""
        return Attempts(num_retries=self._config.execution.read_retries, clock=self._clock)

    @functools.cached_property
    def dataset(self) -> Source:
        """What it trains on."""
        return as_source(self._task.dataset())

    @functools.cached_property
    def sample(self) -> PyTree[jax.ShapeDtypeStruct]:
        """One sample of it; a stream has the first for a while only."""
        return self.again(functools.partial(abstract_sample, self.dataset))

    @functools.cached_property
    def eval_dataset(self) -> Any:
        """What it is evaluated on; None: it is not."""
        return self._task.eval_dataset()

    @functools.cached_property
    def tables(self) -> Mapping[str, Table]:
        """Its tables, none of them open; {} where it has none."""
        return checked_tables(self._task.tables(), type(self._task).__name__)

    @property
    def ids(self) -> Callable[[PyTree], dict[str, np.ndarray]]:
        """The ids that a batch on the host reads of every table."""
        return checked_ids(self._task.ids, set(self.tables))

    @functools.cached_property
    def problem(self) -> Problem:
        """Its methods; made without a device."""
        return problem_of(self._task, self._config, self.tables)

    @functools.cached_property
    def abstract_sample(self) -> PyTree[jax.ShapeDtypeStruct]:
        """One sample as the loss gets it: with the places of its rows, where there are tables."""
        if not self.tables:
            return self.sample
        return WithRows(own=self.sample, rows=abstract_places(self.ids, self.sample))

    @functools.cached_property
    def traces(self) -> Traces:
        """What its methods came to on one set of devices, for the next."""
        return Traces()


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything that the loop needs before its first step."""

    where: Place
    engine: Engine  # of the strategy to start with
    strategies: StrategyCompiler
    checkpoints: Checkpoints
    loader: Loader
    feed: Feed | None  # of the loader's batches, where there are tables
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
    given: TaskInputs,
    kept: RunSnapshot | None = None,
    is_broken: Callable[[], bool] | None = None,
    group_size: int | None = None,
) -> PreparedRun:
    """Get ready to train; what is opened is closed with `stack`, time is booked in `ledger`.

    `given` is what the task gives. A run that goes on from `kept` reads no checkpoint. Where processes come
    and go, `is_broken` says whether one of them has gone, `group_size` how many share a copy of the model.

    Raises what `Trainer.fit` says it raises for settings that cannot work.
    """
    where = place(devices, config.strategies, group_size=group_size)
    if is_broken is not None:
        where = dataclasses.replace(where, is_broken=is_broken)
    source = given.dataset
    _check_endless(config, source)
    if config.execution.keep_freed_pages:
        keep_freed_pages(where.own_devices[0].platform)
    budget = _budget(config, where)
    again = given.again
    if given.tables:
        require_place(where, source)
    sample = given.abstract_sample
    traces = given.traces if group_size is not None else None  # one set of devices after another
    where, by_strategy, kind = _engines(
        given.problem, config, devices, where, sample, budget, traces
    )
    # The process that held it may be cut off, and not know yet that its set is over.
    patience_s = 0.0 if is_broken is None else _CUT_OFF_S
    _hold(config.workdir, where, stack, clock, patience_s)
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
        # Before anything is compiled; all strategies have the same leaves.
        checkpoints.require_same_model(
            meta, _abstract_as_saved(next(iter(by_strategy.values())), meta)
        )
        found.append(planned(_nearest_strategy(meta.batch.strategy, where)))
        return _abstract_as_saved(by_strategy[found[-1].start.strategy], meta)

    found: list[BatchPlan] = []
    peers = peers_of(where) if given.tables else None
    if peers is not None:
        stack.callback(peers.close)
    opener = Opener(given.tables, config.workdir, where, peers, clock)
    tables: list[Tables] = []

    def close_tables() -> None:
        """Those of a checkpoint that another process could not read."""
        for table in tables.pop().values() if tables else ():
            table.close()

    def open_tables(meta: CheckpointMeta) -> None:
        close_tables()
        tables.append(opener.of_checkpoint(meta.tables))

    with ledger.bucket("checkpoint_restore"):
        if kept is None:
            restored = checkpoints.restore(planned_for, open_tables)
        else:
            abstract = planned_for(kept.meta)
            restored = RestoredCheckpoint(state=from_host(kept.leaves, abstract), meta=kept.meta)
    if restored is None:
        close_tables()
    if not tables:
        tables.append(opener.anew())
    for table in tables[-1].values():
        stack.callback(table.close)
    plan = found[-1] if restored is not None else planned(next(iter(where.layouts)))
    engine = by_strategy[plan.start.strategy]
    step, samples, progress = 0, 0, 0.0
    batch, cursor = plan.start, Cursor(seed=config.seed)
    memory = _memory(config, where, engine, plan, len(source))
    earlier = None if memory is None else memory.earlier
    if restored is None:
        if isinstance(source, StreamSource):
            source.rewind()  # of a set of processes that lost all
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
        progress = adaptation.progress_on_host(state.opt_state)
        if config.policy != "fixed":
            batch = plan.resumed(meta.batch, lambda size: _fits(engine, size, budget, ledger))
    total = None if config.epochs is None else config.epochs * len(source)
    remaining = None if total is None else max(total - samples, 0)
    can_leave_out = kind == "sample" or engine.problem.takes_mask
    if not can_leave_out and config.last_batch != "drop":
        _require_even_rest(config, plan, source, by_strategy, remaining)
    if restored is None and not given.tables:
        _try_loss(config, engine, state, source, plan, again, is_number=kind == "mean")
    held_out, evaluation = given.eval_dataset, None
    every = config.evaluation.every_s or config.evaluation.every_base_steps
    is_ahead = bool(every) or where.process_count > 1  # which would wait for the slowest
    if held_out is not None or every:
        evaluation = evaluator(task, config, where, held_out, clock, tables[-1])
        # What is wrong there is named before training.
        names = evaluation.check(engine.abstract_state())
        if type(task).summarize is Task.summarize:  # whose numbers have the names of the metrics
            require_best(config.saving, names)

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
    if isinstance(source, StreamSource):
        _check_same_stream(source, cursor.offset, where)
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
        on_host=given.ids if given.tables else None,
    )
    stack.callback(loader.close)
    feed = None
    if given.tables:
        threads = config.execution.prefetch > 0
        base = config.batch.base
        feed = Feed(
            tables[-1], loader, clock=clock, threads=threads, peers=peers, base_batch_size=base
        )
        stack.callback(feed.close)
    restart = 0
    told: tuple[Any, ...] = ()
    if where.process_index == 0:
        saved = None if restored is None else restored.meta.ledger
        restart = journal.resume(config.workdir, ledger, saved)
        told = _observers(stack, config, ledger, clock, hooks)
        path = pathlib.Path(config.workdir) / "config.json"
        path.write_text(json.dumps(_serial.encode(config), indent=2) + "\n")
    return PreparedRun(
        where=where,
        engine=engine,
        strategies=strategies,
        checkpoints=checkpoints,
        loader=loader,
        feed=feed,
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


def rehearse(config: Config, given: TaskInputs, num_processes: int, group_size: int) -> None:
    """Have this process trace and compile a step by itself, before others wait for it to do so.

    A process traces its first step far more slowly than any later one. It is a group of its own, and takes
    the part of a batch that would be its own among so many. The programs of a group of several it cannot
    have by itself: then it traces those of whole copies, and compiles none.
    """
    if group_size > 1:
        where = place(None, (), group_size=1)
        _, by_strategy, _ = _engines(given.problem, config, None, where, given.sample, None)
        for engine in by_strategy.values():
            programs = engine.training_programs(1, accumulate=False)
            for program in (*programs, *engine.shared_programs(accumulate=False)):
                program().lower()
        return
    where = place(None, config.strategies, group_size=1)
    part, rest = divmod(config.batch.base, num_processes)
    micro = config.batch.micro
    if isinstance(config.policy, str) and rest == 0 and part >= (micro[0] if micro else 1):
        most = max(config.batch.max // num_processes, part)
        batch = dataclasses.replace(config.batch, base=part, max=most, min_global=None, sizes=None)
        config = dataclasses.replace(config, batch=batch)
    try:
        budget = _budget(config, where)
        _, by_strategy, _ = _engines(
            given.problem, config, None, where, given.sample, budget, given.traces
        )
        plan_of = functools.partial(_plan, config, by_strategy, len(given.dataset), budget)
        _first_plan(by_strategy, plan_of, prefer="")
    except (TooLarge, Indivisible, CannotDivide, ValueError) as error:
        # One process has other limits than all together, who will say it where it is true of them, too.
        logging.info("not rehearsed: %s", error)


def save_kept(config: Config, given: TaskInputs, kept: RunSnapshot) -> str | None:
    """Write a run that is between two sets of processes as its newest checkpoint; None, or an error."""
    where = place(None, config.strategies, group_size=1)
    _, by_strategy, _ = _engines(given.problem, config, None, where, given.sample, None)
    engine = next(iter(by_strategy.values()))
    state = whole_on_host(kept.leaves, _abstract_as_saved(engine, kept.meta))
    with contextlib.ExitStack() as stack:
        _hold(config.workdir, where, stack, SystemClock(), _CUT_OFF_S)
        checkpoints = Checkpoints(config.workdir, keep=config.saving)
        stack.callback(checkpoints.close)
        return checkpoints.save(state, kept.meta) or checkpoints.wait(alone=True)


def restored_state(
    task: Task, config: Config, devices: Sequence[Any] | None, *, step: int | None, best: bool
) -> TrainState:
    """A checkpoint's state, on the strategy of this run that is nearest to the one it was saved under.

    Nothing else is got ready. Raises what `Trainer.restore` says.
    """
    where, given = place(devices, config.strategies), TaskInputs(task, config, SystemClock())
    sample = given.abstract_sample
    where, engines, _ = _engines(given.problem, config, devices, where, sample, None)

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
    traces: Traces | None = None,
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
            traces=traces,
        )

    engines = engines_of(where)
    kind = engines.loss_kind()  # before anything is compiled: a loss of a wrong shape is named
    if where.world is not None and not where.is_elastic and engines.is_global(where.layout):
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


def _with_average(engine: Engine, restored: RestoredCheckpoint) -> TrainState:
    """The state that was read, with an average where this run wants one."""
    if engine.problem.ema is None or restored.meta.has_average:
        return restored.state
    logging.warning(
        "the checkpoint of step %d holds no average of the parameters (Config.ema): it begins with "
        "them as they are there.",
        restored.meta.step,
    )
    return engine.with_average(restored.state)


def _hold(
    workdir: str,
    where: Place,
    stack: contextlib.ExitStack,
    clock: Clock,
    patience_s: float = 0.0,
) -> None:
    """Hold the workdir until `stack` closes, by process 0 for all; for so long it waits for another holder.

    Raises InUse in all of them where another run holds it, PermissionError where it cannot be written, and
    PeerGone where this set of processes ends first.
    """
    refused, deadline_s = None, clock.now() + patience_s
    while True:
        try:
            check_writable(pathlib.Path(workdir))
            if where.process_index == 0:
                stack.enter_context(_disk.held(pathlib.Path(workdir)))
            refused = None
        except (OSError, _disk.InUse) as error:
            refused = error
        if not isinstance(refused, _disk.InUse) or clock.now() >= deadline_s:
            break
        if where.is_broken():  # others did not wait so long
            raise PeerGone(str(refused))
        clock.sleep(0.1)
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


def problem_of(
    task: Task, config: Config, tables: Mapping[str, Table] = MappingProxyType({})
) -> Problem:
    """The user's methods as a `Problem`, with the learning-rate rule chosen where none was.

    Raises ValueError for settings that do not go with tables, TypeError where the optimizer is not an optax
    transformation, or the state holds anything that cannot be checkpointed.
    """
    tx = task.optimizer()
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(
            f"optimizer() must return an optax.GradientTransformation; got {type(tx).__name__}. "
            "Write `return optax.adam(1e-3)`, or another one of optax."
        )
    made = jax.eval_shape(anywhere(saveable(task.init, "init()")), jax.random.key(0))
    params = made.params if isinstance(made, Variables) else made
    mask = task.trainable(params)
    if mask is not None:
        require_bools(mask, params)
    trainable = None if mask is None else task.trainable
    kept = params if mask is None else split(params, mask)[0]
    if not jax.tree.leaves(kept):
        raise ValueError("there is nothing to train: init() has no leaf that trainable() allows.")
    require_floating(kept)
    jax.eval_shape(saveable(tx.init, "the state of optimizer()"), kept)
    try:
        treatment = treatment_of(tx, kept, config.rule)
    except NeedsMore as error:
        raise ValueError(
            "optimizer() has a link that asks for more than gradients, parameters and the loss: "
            f"{str(error).rstrip('.')}. A line search (lbfgs) or a Hessian (sophia) cannot be had here; "
            "leave that link out."
        ) from error
    preconditioned = config.statistics.preconditioned
    preconditioned = treatment.is_adam_like if preconditioned is None else preconditioned
    if config.statistics.from_norm_layers:  # their factors are no parameters of tx
        preconditioned = False
    labels = task.labels if task.labels(kept) is not None else None
    loss_and_state, takes_mask = _loss_of(task, tables)
    if tables:
        require_settings(config, has_labels=labels is not None)
        tx = rows_apart(tx)
    problem = Problem(
        init=task.init,
        loss_and_state=loss_and_state,
        takes_mask=takes_mask,
        tx=adaptation.adaptive(
            tx,
            treatment.rule,
            base_batch_size=config.batch.base,
            smoothing=config.statistics.smoothing,
            labels=labels,
            # A run of so many epochs ends by its samples, and so do its schedules.
            schedules="progress" if config.epochs is None else "samples",
            # Fixed is fixed, for the last batch too, which is smaller.
            shrinks=config.policy != "fixed" or config.tuning.fixed_tolerance > 0,
            second_moment_decay=treatment.second_moment_decay,
            long_averages=treatment.long_averages,
            seen=as_seen,
        ),
        base_batch_size=config.batch.base,
        trainable=trainable,
        preconditioned=preconditioned,
        from_norm_layers=config.statistics.from_norm_layers,
        has_labels=labels is not None,
        moments=treatment.moments,
        compute_dtype=None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
        ema=config.ema,
        swaps_products=config.execution.swap_cpu_products,
    )
    return with_tables(problem, tables) if tables else problem


def _loss_of(task: Task, tables: Mapping[str, Table]) -> tuple[LossAndState, bool]:
    """The user's loss, which takes `rows` where there are tables, and whether it asks for the mask of real
    rows, by a parameter of that name.
    """
    has_state = type(task).loss_and_state is not Task.loss_and_state
    written: Callable[..., Any] = task.loss_and_state if has_state else task.loss
    if tables:
        require_rows(written, "loss_and_state" if has_state else "loss")
    takes_mask = "mask" in inspect.signature(written).parameters
    if not takes_mask and not tables:
        return task.loss_and_state, False

    def asking(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: Array,
        mask: Array | None = None,
        **asked: Any,
    ) -> tuple[Any, PyTree]:
        if takes_mask:  # without one, it is only looked at
            asked["mask"] = jnp.ones(len(jax.tree.leaves(batch)[0])) if mask is None else mask
        if has_state:
            return written(params, model_state, batch, key, **asked)
        return written(params, batch, key, **asked), model_state

    return asking, takes_mask


def evaluator(
    task: Task,
    config: Config,
    where: Place,
    data: Any,
    clock: Clock,
    tables: Tables = MappingProxyType({}),
) -> Evaluator:
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
    metrics: Metrics = task.metrics_with_state
    reading: dict[str, Any] = {}
    if tables:
        metrics, embedded = (
            _metrics_of(task),
            HostEmbeddings(checked_ids(task.ids, set(tables)), tables),
        )
        reading = {"read": embedded, "blank": embedded.blank}
    return Evaluator(
        metrics,
        source,
        where.layout,
        micro_batch_size=config.evaluation.micro_batch_size or base,
        compute_dtype=None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
        process_index=where.process_index,
        process_count=where.process_count,
        clock=clock,
        num_readers=config.execution.readers,
        num_retries=config.execution.read_retries,
        **reading,
    )


def _metrics_of(task: Task) -> Metrics:
    """The user's metrics, of a batch with the rows that it reads."""
    has_state = type(task).metrics_with_state is not Task.metrics_with_state
    written: Callable[..., Any] = task.metrics_with_state if has_state else task.metrics
    require_rows(written, "metrics_with_state" if has_state else "metrics")

    def metrics(params: PyTree, model_state: PyTree, batch: WithRows) -> Mapping[str, Any]:
        state = (model_state,) if has_state else ()
        return written(params, *state, batch.own, rows=batch.rows)

    return metrics


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
    cut = [axis for axis in PRIORITIES if engine.layout.mesh.shape.get(axis, 1) > 1]
    if cut and not keeps_priorities():
        logging.warning(
            "under %s, steps may send several times as much as they need to: jaxlib %s does not tell XLA "
            "that batches are cut before parameters are. Start with "
            "XLA_FLAGS=--xla_enable_hlo_sharding_v3=false in the environment, or install jax 0.10.",
            engine.layout.strategy.name,
            jaxlib.version.__version__,
        )

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
        "swap_cpu_products": config.execution.swap_cpu_products,
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
    earlier: ProgramMemory,
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


def _check_same_stream(source: StreamSource, place: int, where: Place) -> None:
    """Every process reads the stream whole and trains on its part: they have to read the same."""
    first, *others = where.told("its stream", of_stream(source, place))
    differing = [process for process, other in enumerate(others, start=1) if other != first]
    if differing:
        raise ValueError(
            f"dataset() returned a stream, and from sample {place} on process {differing[0]} has others than "
            "process 0. Every process reads a stream whole and trains on its part of each batch: return the "
            "same in all of them, with the same seeds and no part for each process (ShardByJaxProcess), or "
            "something with random access."
        )


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


def _try_loss(
    config: Config,
    engine: Engine,
    state: TrainState,
    source: Source,
    plan: BatchPlan,
    again: Attempts,
    *,
    is_number: bool,
) -> None:
    """Warn where batches may be split, and a loss says other things of the same samples when they are.

    Raises ValueError for a loss that is one number, and a sum over the batch.
    """
    accumulates = plan.accumulate and (config.policy != "fixed" or plan.start.num_micro_batches > 1)
    separate = engine.num_replicas > 1 and not engine.engines.is_global(engine.layout)
    # Layers in stages need more rows than that; and processes would have to try it together.
    cannot_try = engine.spans or engine.layout.strategy.stage > 1 or len(source) < 4
    if cannot_try or not (accumulates or separate or is_number):
        return
    if (
        isinstance(source, StreamSource) and source.available(0, 4) < 4
    ):  # it keeps them for training
        return
    four = narrow(again(lambda: source.batch(np.arange(4))))
    if is_number and engine.grows_with_batch(state, jax.tree.map(lambda x: x[:2], four)):
        raise ValueError(
            "loss() returned a scalar that grows with the batch: a sum? A scalar is taken for the mean of "
            "the batch, so that a larger batch would take larger steps. Return one loss per sample, "
            "Loss(sum, weight), or the mean."
        )
    if not (accumulates or separate):
        return
    if engine.couples_samples(state, four):
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
    hooks: list[Any] = [record]
    if config.reporting.tensorboard:
        dashboard = Dashboard(config.workdir, clock=clock, ledger=ledger)
        stack.callback(dashboard.close)
        hooks.append(dashboard)
    if config.reporting.progress:
        console = Console(clock=clock, total_base_steps=config.base_steps)
        stack.callback(console.close)
        hooks.append(console)
    return (*hooks, *users)
