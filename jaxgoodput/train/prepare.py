"""Gets a run ready: devices, state, the programs to compile first, data, and the kind of run.

`prepare` reads as a list of what happens, in order. Each phase is a function; `RunSetup` and `Beginning` are
what earlier phases found.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from absl import logging

from jaxgoodput._fields import serial
from jaxgoodput._jax import trying
from jaxgoodput._worker import Worker
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.fingerprint import Fingerprint, fingerprint
from jaxgoodput.data.loader import Loader
from jaxgoodput.data.streams import StreamSource
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.console import Console
from jaxgoodput.observe.dashboard.tensorboard import Dashboard
from jaxgoodput.optim import adaptation
from jaxgoodput.parallel.place import Place
from jaxgoodput.train.checkpoints.memory import RunMemory
from jaxgoodput.train.checkpoints.meta import CheckpointMeta
from jaxgoodput.train.checkpoints.retention import require_best
from jaxgoodput.train.checkpoints.saved import RestoredCheckpoint, initial_leaves
from jaxgoodput.train.checkpoints.writer import Checkpoints
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import Requests
from jaxgoodput.train.evaluation import Evaluators
from jaxgoodput.train.process import keep_freed_pages
from jaxgoodput.train.runs.kinds import Run, has_others, is_alone, place_of, run_of
from jaxgoodput.train.runs.membership import Membership, RunSnapshot, WorkSharing
from jaxgoodput.train.runs.state import RunState
from jaxgoodput.train.start.checks import (
    require_end,
    require_even_rest,
    require_same_stream,
    try_loss,
    try_state,
)
from jaxgoodput.train.start.compiler_threads import make_compiler_yield
from jaxgoodput.train.start.earlier import begin_as_earlier, memory_of
from jaxgoodput.train.start.looping import ShortSteps
from jaxgoodput.train.start.plans import RunSetup, budget_of, set_up
from jaxgoodput.train.start.problem import TaskInputs, evaluator_of
from jaxgoodput.train.start.restoring import (
    CUT_OFF_S,
    Restorer,
    hold_workdir,
    kept_order,
    resume_stream,
    with_average,
)
from jaxgoodput.train.start.value_checks import ValueChecks, origin_of
from jaxgoodput.train.tables.commits import Opener, Tables
from jaxgoodput.train.tables.feed import Feed
from jaxgoodput.train.task import Task
from jaxgoodput.tune.plan import BatchPlan
from jaxgoodput.tune.remembered import Memory
from jaxgoodput.workdir.places import workdir_of

UNREAD_INITIAL = (
    "initial= was not read: it is for a new workdir, and the run resumes from its checkpoint of "
    "step %d."
)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything that the loop needs before its first step."""

    now: RunState
    """The state, batch and place in the data to begin with; the loop changes it."""
    run: Run
    where: Place
    strategies: StrategyCompiler
    checkpoints: Checkpoints
    loader: Loader
    feed: Feed
    evaluator: Evaluators | None
    """None if there is nothing to evaluate on."""
    limits: BatchLimits
    dataset_size: int
    data: Fingerprint
    total_samples: int | None
    """The samples with which the run ends; None if progress ends it."""
    first_step: int
    """The step that the run goes on from."""
    compile_s: float
    """Seconds that compiling the programs of one batch took in this start."""
    restart: int
    """Earlier runs in this workdir, as the chief knows."""
    restored: CheckpointMeta | None
    memory: Memory | None
    """What earlier runs of this program left, and for later ones."""
    values: ValueChecks
    """What finds values of the state that are not finite any more."""
    hooks: tuple[Any, ...]
    """The hooks of the process that reports; none in the others."""

    @property
    def is_chief(self) -> bool:
        """Whether this process decides, reports and writes for all."""
        return self.where.process_index == 0

    @property
    def earlier(self) -> RunMemory | None:
        """What the run remembers of before this start; None if it begins, or if that was not saved."""
        return None if self.restored is None else self.restored.memory


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The state, batch and place in the data that a run begins with: new, or from a checkpoint or memory."""

    plan: BatchPlan
    engine: Engine
    state: TrainState
    batch: BatchConfig
    step: int
    """The last step done; 0 for a new run."""
    samples: int
    """Samples taken until then."""
    progress: float
    """Base steps done until then."""
    cursor: Cursor
    restored: CheckpointMeta | None
    """The metadata that the run resumes from; None for a new run."""
    memory: Memory | None
    remaining: int | None
    """Samples until the end of `epochs`; None if progress ends the run."""


def prepare(
    inputs: TaskInputs,
    devices: Sequence[Any] | None,
    *,
    initial: Any,
    hooks: Sequence[Any],
    requests: Requests,
    stack: contextlib.ExitStack,
    ledger: TimeLedger,
    membership: Membership | None = None,
    kept: RunSnapshot | None = None,
) -> PreparedRun:
    """Get ready to train. `stack` closes what is opened; `ledger` books the time.

    A run that goes on from `kept` reads no checkpoint. `membership` is given if processes come and go.

    Raises what `Trainer.fit` says it raises for settings that cannot work.
    """
    setup = _find_devices(inputs, devices, membership)
    checkpoints = _open_workdir(setup, requests, stack)
    data = fingerprint(inputs.dataset, inputs.attempts, shuffle=inputs.config.shuffle)
    opener = stack.enter_context(
        Opener.connected(inputs.tables.plans, inputs.config.workdir, setup.where, inputs.clock)
    )
    restorer = Restorer(setup, checkpoints, opener, data, ledger)
    short = ShortSteps(setup)
    _compile_init_beside(setup, checkpoints, requests, stack, initial, kept)
    restored = restorer.restore(kept)
    tables = restorer.tables or {}
    for table in tables.values():
        stack.callback(table.close)
    if restored is None:
        beginning = _begin(setup, restorer, initial, ledger)
    else:
        data = kept_order(restored.meta, data, inputs.config)
        beginning = _resume(setup, restorer, restored, ledger)
        if initial is not None and kept is None:
            logging.warning(UNREAD_INITIAL, beginning.step)
    require_even_rest(setup, beginning.plan, beginning.remaining)
    if kept is None:  # else it was tried when these processes began
        _try(setup, beginning, resumed=restored is not None)
    evaluator = _evaluation(setup, beginning, tables, ledger)
    values = _value_checks(beginning, ledger)
    strategies, compile_s = _compile_first(setup, beginning, evaluator, values, stack, ledger)
    short.compile_soon(strategies, beginning.batch)
    loader = _open_data(setup, beginning, data, stack)
    feed = inputs.tables.feed(opener, tables, loader, inputs.config)
    stack.callback(feed.close)
    run = run_of(
        setup.where,
        requests,
        strategies,
        first=beginning.batch,
        feed=feed,
        loader=loader,
        sharing=_sharing_of(inputs.config, evaluator),
        membership=membership,
        clock=inputs.clock,
    )
    restart, told = _observe(setup, beginning, hooks, stack, ledger)
    return PreparedRun(
        now=_run_state(beginning, loader),
        run=run,
        where=setup.where,
        strategies=strategies,
        checkpoints=checkpoints,
        loader=loader,
        feed=feed,
        evaluator=evaluator,
        limits=beginning.plan.limits,
        dataset_size=len(inputs.dataset),
        data=data,
        total_samples=_total_samples(setup),
        first_step=beginning.step,
        compile_s=compile_s,
        restart=restart,
        restored=beginning.restored,
        memory=beginning.memory,
        values=values,
        hooks=told,
    )


# -- the phases, in order ----------------------------------------------------------------------------


def _find_devices(
    inputs: TaskInputs, devices: Sequence[Any] | None, membership: Membership | None
) -> RunSetup:
    """Find the devices and their memory, and make the engines of all strategies, without their programs."""
    config = inputs.config
    where = place_of(devices, config.strategies, membership)
    require_end(config, inputs.dataset)
    if config.execution.keep_freed_pages:
        keep_freed_pages(where.own_devices[0].platform)
    budget = budget_of(inputs, where)
    inputs.tables.require_place(where, inputs.dataset)
    if config.compiles_behind and where.own_devices[0].platform == "cpu":
        make_compiler_yield()
    # Only processes that come and go have one set of devices after another.
    traces = inputs.traces if where.is_elastic else None
    return set_up(inputs, where, devices, budget=budget, traces=traces)


def _open_workdir(setup: RunSetup, requests: Requests, stack: contextlib.ExitStack) -> Checkpoints:
    """Hold the workdir, and remove what interrupted saves have left there."""
    config, where = setup.config, setup.where
    # A process of an earlier generation may be cut off, and not know yet that its generation is over.
    patience_s = CUT_OFF_S if where.is_elastic else 0.0
    keeper = hold_workdir(
        config.workdir,
        where,
        stack,
        setup.inputs.clock,
        patience_s=patience_s,
        on_lost=lambda why: requests.interrupt("the loss of the workdir"),
    )
    checkpoints = Checkpoints(config.workdir, keep=config.saving, spans=where.spans, keeper=keeper)
    stack.callback(checkpoints.close)
    checkpoints.remove_leftovers()
    checkpoints.tidy()
    return checkpoints


def _compile_init_beside(
    setup: RunSetup,
    checkpoints: Checkpoints,
    requests: Requests,
    stack: contextlib.ExitStack,
    *given: object,
) -> None:
    """Have the program of the initial values compiled on a thread, beside that of the first step.

    It is traced here: the user's functions need not be safe to call on two threads. Nothing is compiled if
    any values are `given` or restored; nor if there are several strategies, the first of which may not fit,
    or processes that would do so together.
    """
    engine, *others = setup.engines.values()
    is_new = checkpoints.newest() is None and all(x is None for x in given)
    if not is_new or others or not is_alone(setup.where) or not setup.config.compiles_behind:
        return
    init = partial(engine.programs.fresh.init, ())

    def leave(error: BaseException) -> None:  # it is raised where the values are needed
        logging.info("the program of the initial values was not compiled: %s", error)

    engine.compiled.look_at(init)
    worker = Worker(
        "init",
        lambda _: engine.compile_program(init),
        on_error=leave,
        within=engine.compiled.settings,
    )
    stack.callback(lambda: worker.join(None if requests.signal is None else 0.0))


def _try(setup: RunSetup, beginning: Beginning, *, resumed: bool) -> None:
    """Call the user's loss on a few samples, and raise ValueError if it cannot be split over replicas."""
    with trying():
        if not resumed:
            try_loss(setup, beginning.engine, beginning.state, beginning.plan)
        try_state(setup, beginning.engine, beginning.state, resumed=resumed)


def _begin(setup: RunSetup, restorer: Restorer, initial: Any, ledger: TimeLedger) -> Beginning:
    """Return the beginning of a new run; `initial` replaces leaves of the model, whole or in part."""
    plan, source = restorer.plan, setup.inputs.dataset
    assert plan is not None
    engine = setup.engines[plan.start.strategy]
    memory = memory_of(setup, engine, plan)
    if isinstance(source, StreamSource) and (warning := source.begin()) is not None:
        logging.warning("%s", warning)
    leaves: dict[str, Any] = {}
    if initial is not None:
        with ledger.bucket("checkpoint_restore"):
            leaves = initial_leaves(initial, engine.abstract_state().variables)
    state = engine.init(jax.random.key(setup.config.seed), leaves)
    batch = plan.start
    if memory is not None and memory.earlier is not None:
        batch, state = begin_as_earlier(setup, engine, plan, memory.earlier, state, ledger)
    return Beginning(
        plan=plan,
        engine=engine,
        state=state,
        batch=batch,
        step=0,
        samples=0,
        progress=0.0,
        cursor=Cursor(seed=setup.config.seed),
        restored=None,
        memory=memory,
        remaining=_total_samples(setup),
    )


def _resume(
    setup: RunSetup, restorer: Restorer, restored: RestoredCheckpoint, ledger: TimeLedger
) -> Beginning:
    """Return the beginning of a run that goes on with `restored`, from a checkpoint or from memory."""
    plan, meta, source = restorer.plan, restored.meta, setup.inputs.dataset
    assert plan is not None
    engine = setup.engines[plan.start.strategy]
    memory = memory_of(setup, engine, plan)
    state, cursor = with_average(engine, restored), meta.cursor
    if cursor.offset > len(
        source
    ):  # the checkpoint may be of a larger data set, if that is allowed
        cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, offset=0)
    resume_stream(source, meta, setup.config, setup.where)
    batch = plan.start
    if setup.config.policy != "fixed":
        batch = plan.resumed(meta.batch, lambda size: setup.fits(engine, size, ledger))
    total = _total_samples(setup)
    return Beginning(
        plan=plan,
        engine=engine,
        state=state,
        batch=batch,
        step=meta.step,
        samples=meta.samples,
        progress=adaptation.progress_on_host(state.opt_state),
        cursor=cursor,
        restored=meta,
        memory=memory,
        remaining=None if total is None else max(total - meta.samples, 0),
    )


def _evaluation(
    setup: RunSetup, beginning: Beginning, tables: Tables, ledger: TimeLedger
) -> Evaluators | None:
    """Return the evaluation of the held-out data, checked before training; None if there is nothing to do."""
    inputs, config = setup.inputs, setup.config
    if not inputs.eval_datasets and not _is_periodic(config):
        return None
    evaluator = evaluator_of(inputs, setup.where, tables)
    abstract = beginning.engine.abstract_state()
    names = evaluator.check(abstract)
    if type(inputs.task).summarize is Task.summarize:  # its numbers have the names of the metrics
        require_best(config.saving, names)
    if _compiles_evaluation(setup):
        with ledger.bucket("compilation"):
            evaluator.compile(abstract)
    return evaluator


def _is_periodic(config: Config) -> bool:
    return bool(config.evaluation.every_s or config.evaluation.every_base_steps)


def _compiles_evaluation(setup: RunSetup) -> bool:
    """Whether evaluations are compiled ahead: they are periodic, or processes would wait for the slowest."""
    return _is_periodic(setup.config) or has_others(setup.where)


def _value_checks(beginning: Beginning, ledger: TimeLedger) -> ValueChecks:
    """Return the checks of the state's values, which are compiled; finds out which did not begin finite."""
    with ledger.bucket("compilation"):
        origin = origin_of(beginning.engine, beginning.state, beginning.restored)
        values = ValueChecks(origin)
        values.compile(beginning.engine)
    return values


def _compile_first(
    setup: RunSetup,
    beginning: Beginning,
    evaluator: Evaluators | None,
    values: ValueChecks,
    stack: contextlib.ExitStack,
    ledger: TimeLedger,
) -> tuple[StrategyCompiler, float]:
    """Compile the first batch's steps, and what else must be ready; also returns the seconds of the steps."""
    config, plan, batch, engine = setup.config, beginning.plan, beginning.batch, beginning.engine

    def compile_more(other: Engine) -> None:
        values.compile(other)
        if evaluator is not None and _compiles_evaluation(setup):
            evaluator.compile(other.abstract_state())

    assert setup.budget is not None
    strategies = StrategyCompiler(
        setup.engines,
        plan,
        setup.plan,
        budget=setup.budget,
        reach=config.tuning.max_growth if config.compiles_behind else math.inf,
        background=config.compiles_behind,
        compile_more=compile_more,
    )
    stack.callback(strategies.close)
    size = batch.micro_batch_size
    with ledger.bucket("compilation"):
        setup.compile(engine, size, accumulate=batch.num_micro_batches > 1)
    strategies.use(batch)
    with ledger.bucket("compilation"):
        if config.compiles_behind:
            _compile_as_earlier(beginning, strategies)
        else:
            strategies.prepare()
    return strategies, engine.compile_s(size)


def _compile_as_earlier(beginning: Beginning, strategies: StrategyCompiler) -> None:
    """Compile the sizes of an earlier run of this program first, if this run is new."""
    memory, batch, plan = beginning.memory, beginning.batch, beginning.plan
    if beginning.restored is not None or memory is None or memory.earlier is None:
        return
    batches = (batch, plan.start, memory.earlier.batch)
    wanted = [x for x in batches if x.strategy == batch.strategy]
    # If it stayed at the base batch, the earlier run may not have compiled anything else.
    if set(wanted) != {plan.start}:
        compiler = strategies.compiler(batch.strategy)
        compiler.compile_first(x.micro_batch_size for x in wanted)


def _open_data(
    setup: RunSetup, beginning: Beginning, data: Fingerprint, stack: contextlib.ExitStack
) -> Loader:
    """Return the loader of the training samples from the run's place on; nothing is read yet."""
    inputs, config, where = setup.inputs, setup.config, setup.where
    require_same_stream(inputs.dataset, beginning.cursor.offset, where)
    loader = Loader(
        inputs.dataset,
        sharding=beginning.engine.layout.batch_sharding,
        cursor=beginning.cursor,
        process_index=where.process_index,
        process_count=where.process_count,
        max_samples=beginning.remaining,
        drop_last=config.last_batch == "drop",
        prefetch=config.execution.prefetch,
        shuffle=bool(data.shuffle),
        num_readers=config.execution.readers,
        num_retries=config.execution.read_retries,
        clock=inputs.clock,
        on_host=inputs.tables.ids,
        numbered=config.keys == "sample",
    )
    stack.callback(loader.close)
    return loader


def _observe(
    setup: RunSetup,
    beginning: Beginning,
    users: Sequence[Any],
    stack: contextlib.ExitStack,
    ledger: TimeLedger,
) -> tuple[int, tuple[Any, ...]]:
    """Return the number of earlier runs, and the hooks: journal, dashboard, console, then the user's own.

    Only process 0 has hooks. They are closed with `stack`.
    """
    if setup.where.process_index != 0:
        return 0, ()
    config, clock = setup.config, setup.inputs.clock
    saved = None if beginning.restored is None else beginning.restored.ledger
    folder = workdir_of(config.workdir).folder
    restart = journal.resume(folder, ledger, saved)
    record = journal.Journal(folder, clock=clock)
    stack.callback(record.close)
    hooks: list[Any] = [record]
    if config.reporting.tensorboard:
        dashboard = Dashboard(folder, clock=clock, ledger=ledger)
        stack.callback(dashboard.close)
        hooks.append(dashboard)
    if config.reporting.progress:
        console = Console(clock=clock, total_base_steps=config.base_steps)
        stack.callback(console.close)
        hooks.append(console)
    (folder / "config.json").write_text(json.dumps(serial.encode(config), indent=2) + "\n")
    return restart, (*hooks, *users)


def _sharing_of(config: Config, evaluator: Evaluators | None) -> WorkSharing:
    """Return how processes share the work. Hosts may leave early only if it is certain when the run ends."""
    return WorkSharing(
        leases=config.execution.leases,
        may_release=not config.execution.keep_hosts
        and config.evaluation.patience_base_steps is None,
        evaluates=evaluator is not None,
    )


def _run_state(beginning: Beginning, loader: Loader) -> RunState:
    return RunState(
        state=beginning.state,
        engine=beginning.engine,
        batch=beginning.batch,
        step=beginning.step,
        samples=beginning.samples,
        progress=beginning.progress,
        progress_step=beginning.step,
        cursor=loader.cursor,
        stream=loader.stream,
    )


def _total_samples(setup: RunSetup) -> int | None:
    epochs = setup.config.epochs
    return None if epochs is None else epochs * len(setup.inputs.dataset)
