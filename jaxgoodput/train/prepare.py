"""What a run starts from: devices, data, a checkpoint or a fresh state, and what must be compiled first."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jaxgoodput._serial import decode
from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.loader import Loader
from jaxgoodput.data.sources import as_source
from jaxgoodput.engine import memory
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.optim import adaptive
from jaxgoodput.train import setup
from jaxgoodput.train.checkpoint import Checkpoints, Restored
from jaxgoodput.train.evaluation import Evaluator
from jaxgoodput.train.ladders import Ladders
from jaxgoodput.train.pages import keep_freed_pages

if TYPE_CHECKING:
    from jaxgoodput.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Start:
    """Everything that the loop needs before its first step."""

    where: setup.Place
    engine: Engine  # of the strategy to start with
    ladders: Ladders
    checkpoints: Checkpoints
    loader: Loader
    evaluator: Evaluator | None
    state: TrainState
    batch: BatchConfig
    limits: BatchLimits
    dataset_size: int
    step: int
    samples: int
    progress: float
    restored: Restored | None


def prepared(
    trainer: "Trainer", stack: contextlib.ExitStack, ledger: TimeLedger, clock: Clock
) -> Start:
    """Get ready to train; what is opened is closed with `stack`, time is booked in `ledger`.

    Raises what `Trainer.fit` says it raises for settings that cannot work.
    """
    config = trainer.config
    where = setup.place(trainer.devices, config.strategies)
    checkpoints = Checkpoints(config.workdir, keep=config.keep_checkpoints, world=where.world)
    stack.callback(checkpoints.close)
    source = as_source(trainer.dataset())
    device = where.layout.mesh.devices.flat[0]
    keep_freed_pages(device.platform)
    budget = memory.device_budget(
        device,
        num_local_devices=where.layout.num_devices,
        stated=config.memory_bytes,
        margin=config.memory_margin,
    )
    where.meet("before the plan")
    if where.process_count > 1:
        budget = memory.least(budget)
    first = setup.engine(trainer, source, where, memory_bytes=budget)
    kind = first.loss_kind()  # before anything is compiled: a loss of a wrong shape is named
    for layout in where.layouts.values():
        first.on(layout)  # rules that do not fit are named before anything is read

    def planned(prefer: str) -> setup.BatchPlan:
        with ledger.bucket("compilation"):
            return setup.start_plan(config, first, where, source, budget, prefer=prefer)

    def planned_for(meta: Mapping[str, Any]) -> TrainState:
        """What to restore: onto the saved strategy, or, where it does not fit here, the first that does."""
        found.append(planned(setup.nearest_strategy(meta["batch"].get("strategy", ""), where)))
        return first.on(where.layouts[found[-1].start.strategy]).abstract_state()

    found: list[setup.BatchPlan] = []
    with ledger.bucket("checkpoint_restore"):
        restored = checkpoints.restore(planned_for)
    plan = found[-1] if restored is not None else planned(next(iter(where.layouts)))
    engine = first.on(where.layouts[plan.start.strategy])
    setup.check_length(config, plan, source, kind)
    step, samples, progress = 0, 0, 0.0
    batch, cursor = plan.start, Cursor(seed=config.seed)
    if restored is None:
        state = engine.init(jax.random.key(config.seed))
    else:
        state = restored.state
        step, samples = restored.step, restored.meta["samples"]
        progress = float(adaptive.progress(state.opt_state))
        cursor = decode(restored.meta["cursor"], Cursor, "cursor")

        def fits(size: int) -> bool:
            with ledger.bucket("compilation"):
                engine.compile([size], accumulate=False)
            need = engine.bytes_of(size)
            return need is not None and need.peak <= budget

        saved = restored.meta["batch"]
        batch = setup.resumed_config(saved, plan, engine.num_replicas, config, fits)
    evaluator = None
    if config.eval_every_s or config.eval_every_base_steps:
        evaluator = setup.evaluator(trainer, where)
        with ledger.bucket("compilation"):
            evaluator.compile(engine.abstract_state())

    def compile_evaluation(other: Engine) -> None:
        if evaluator is not None:
            evaluator.compile(other.abstract_state())

    ladders = Ladders(
        engine,
        plan,
        dict(where.layouts),
        config=config,
        num_samples=len(source),
        budget=budget,
        compile_more=compile_evaluation,
    )
    stack.callback(ladders.close)
    ladders.use(batch)
    with ledger.bucket("compilation"):
        engine.compile([batch.micro_batch_size], accumulate=batch.num_micro_batches > 1)
        if not config.background_compile:
            ladders.prepare()
    remaining = None
    if config.epochs is not None:
        remaining = max(config.epochs * len(source) - samples, 0)
    loader = Loader(
        source,
        sharding=engine.layout.batch_sharding,
        cursor=cursor,
        process_index=where.process_index,
        process_count=where.process_count,
        max_samples=remaining,
        prefetch=config.prefetch,
        shuffle=config.shuffle,
        clock=clock,
    )
    stack.callback(loader.close)
    return Start(
        where=where,
        engine=engine,
        ladders=ladders,
        checkpoints=checkpoints,
        loader=loader,
        evaluator=evaluator,
        state=state,
        batch=batch,
        limits=plan.limits,
        dataset_size=len(source),
        step=step,
        samples=samples,
        progress=progress,
        restored=restored,
    )
