"""`RunSetup`: the devices of a run, an engine for each strategy, and the batch plans that fit into memory."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jaxlib.version
from absl import logging

from jaxgoodput._jax import keeps_priorities
from jaxgoodput.engine import memory
from jaxgoodput.engine.engine import Engine, Engines
from jaxgoodput.engine.programs.program import PRIORITIES
from jaxgoodput.engine.state import TrainState
from jaxgoodput.engine.traces import Traces
from jaxgoodput.goodput.memory import StepBytes, TooLarge
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.parallel.partition import CannotDivide, whole_leaves
from jaxgoodput.parallel.place import Place, place
from jaxgoodput.train.checkpoints.meta import CheckpointMeta
from jaxgoodput.train.config import Config
from jaxgoodput.train.process import cache_folder
from jaxgoodput.train.runs.kinds import control_size, is_alone, least_everywhere
from jaxgoodput.train.runs.processes import spanning
from jaxgoodput.train.start.problem import TaskInputs
from jaxgoodput.tune.plan import BatchPlan, Indivisible, batch_plan
from jaxgoodput.tune.remembered import FOLDER


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What the steps of a run can be made of. `set_up` makes it; the phases of getting ready read it."""

    inputs: TaskInputs
    config: Config
    """The task's own, but for a rehearsal."""
    where: Place
    engines: Mapping[str, Engine]
    """The engine of every strategy whose rules divide on these devices, by name."""
    loss_kind: Literal["sample", "mean"]
    """See `Engines.loss_kind`."""
    budget: int | None
    """Bytes that a step may use on a device; None if nothing is to be planned."""

    @property
    def can_leave_out(self) -> bool:
        """Whether padding can be left out of the loss."""
        problem = self.inputs.problem
        return problem.takes_mask or (self.loss_kind == "sample" and not problem.summed)

    @property
    def memory_folder(self) -> pathlib.Path | None:
        """The folder in which runs leave what later runs of the same program use; None: not here.

        Several processes do not use it: they would have to agree on a file that each may see in another
        state.
        """
        config = self.config
        folder = cache_folder(config)
        wanted = config.tuning.remember and config.policy == "goodput" and is_alone(self.where)
        return pathlib.Path(folder) / FOLDER if wanted and folder is not None else None

    def compile(self, engine: Engine, micro_batch_size: int, *, accumulate: bool) -> None:
        """Compile what the first step of a size needs.

        The program that measures the noise takes longest, and is compiled after some steps, beside others.
        Not if the user has fixed the steps that measure, which are then the same in every run, nor if several
        processes would have to agree on when all of them can.
        """
        config = self.config
        is_free = config.compiles_behind and config.statistics.every_steps is None
        measure = not (is_free and is_alone(self.where))
        engine.compile([micro_batch_size], accumulate=accumulate, measure=measure)

    def plan(self, strategy: str) -> BatchPlan:
        """Return the batch plan of a strategy; compiles the starting size to know its bytes.

        Raises what `batch_plan` raises if nothing fits.
        """
        config, engine, budget = self.config, self.engines[strategy], self.budget
        assert budget is not None
        _warn_of_layout(engine)

        def needs(micro_batch_size: int, accumulate: bool) -> StepBytes:
            if self.memory_folder is not None:
                engine.digest(micro_batch_size)  # wanted later: it must not be traced twice
            self.compile(engine, micro_batch_size, accumulate=accumulate)
            need = engine.bytes_of(micro_batch_size)
            assert need is not None
            if need.peak > budget and engine.stop_looping(micro_batch_size):
                return needs(micro_batch_size, accumulate)
            return need

        return batch_plan(
            config.batch,
            engine.num_replicas,
            len(self.inputs.dataset),
            budget=budget,
            needs=needs,
            accumulate=config.accumulates,
            fixed=config.policy == "fixed",
            schedule=None if isinstance(config.policy, str) else config.policy,
            tolerance=config.tuning.fixed_tolerance,
            strategy=strategy,
        )

    def first_plan(self, prefer: str = "") -> BatchPlan:
        """Return the plan of the first strategy whose step fits into memory, `prefer` before the others.

        Raises what `batch_plan` raises for the last of them.
        """
        *firsts, last = sorted(self.engines, key=lambda strategy: strategy != prefer)
        for strategy in firsts:
            try:
                return self.plan(strategy)
            except (TooLarge, Indivisible, CannotDivide) as error:
                _log_left_out(strategy, error)
        return self.plan(last)

    def fits(self, engine: Engine, micro_batch_size: int, ledger: TimeLedger) -> bool:
        """Whether a step of this size fits into memory; compiles it to know."""
        with ledger.bucket("compilation"):
            self.compile(engine, micro_batch_size, accumulate=False)
        need = engine.bytes_of(micro_batch_size)
        if need is not None and need.peak <= (self.budget or 0):
            return True
        return engine.stop_looping(micro_batch_size) and self.fits(engine, micro_batch_size, ledger)

    def nearest_strategy(self, saved: str) -> str:
        """Return the strategy with the name `saved`, or else one that cuts along the same axes."""

        def axes(name: str) -> set[str]:
            return {part.rstrip("0123456789") for part in name.split(".")}

        order = sorted(
            self.where.layouts, key=lambda name: (name != saved, axes(name) != axes(saved))
        )
        return order[0]


def set_up(
    inputs: TaskInputs,
    where: Place,
    devices: Sequence[Any] | None = None,
    *,
    budget: int | None = None,
    traces: Traces | None = None,
) -> RunSetup:
    """Return the engines of a task on these devices; nothing is compiled.

    `traces` are of earlier engines on devices that are gone.

    Raises CannotDivide if no strategy divides the model on these devices.
    """
    config = inputs.config

    def engines_of(where: Place) -> Engines:
        return Engines(
            inputs.problem,
            inputs.sample,
            world=where.world,
            control_size=control_size(where),
            memory_bytes=budget,
            loss=config.loss,
            traces=traces,
        )

    engines = engines_of(where)
    kind = (
        engines.loss_kind()
    )  # before anything is compiled, so that a loss of a wrong shape is named
    together = spanning(where, engines, devices, config.strategies)
    if together is not None:
        where, engines = together, engines_of(together)
    # Rules that do not divide the model are named before anything is read.
    by_strategy = _engines_by_strategy(engines, where)
    layouts = {name: engine.layout for name, engine in by_strategy.items()}
    where = dataclasses.replace(where, layouts=layouts)
    return RunSetup(
        inputs=inputs,
        config=config,
        where=where,
        engines=by_strategy,
        loss_kind=kind,
        budget=budget,
    )


def budget_of(inputs: TaskInputs, where: Place) -> int:
    """Return the bytes that a step may use on a device; the same in every process."""
    execution = inputs.config.execution
    own = memory.device_budget(
        where.own_devices[0],
        num_local_devices=len(where.own_devices),
        stated=execution.memory_bytes,
        margin=execution.memory_margin,
    )
    return least_everywhere(where, own)


def abstract_as_saved(engine: Engine, meta: CheckpointMeta) -> TrainState:
    """Return the abstract state of an engine, without an average if the checkpoint has none."""
    abstract = engine.abstract_state()
    return abstract if meta.has_average else dataclasses.replace(abstract, ema=None)


def rehearse(inputs: TaskInputs, num_processes: int, group_size: int) -> None:
    """Have this process trace and compile a step by itself, before other processes wait for it.

    A process traces its first step far more slowly than any later one. Here it is a group of its own, and
    takes the part of a batch that it would have among `num_processes`. It cannot have the programs of a group
    of several processes by itself; then it traces the programs of whole copies, and compiles none.
    """
    config = inputs.config
    if group_size > 1:
        setup = set_up(inputs, place(None, (), group_size=1))
        for engine in setup.engines.values():
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
        budget = budget_of(inputs, where)
        setup = set_up(inputs, where, budget=budget, traces=inputs.traces)
        dataclasses.replace(setup, config=config).first_plan()
    except (TooLarge, Indivisible, CannotDivide, ValueError) as error:
        # One process has other limits than all together; they report what is wrong with their own.
        logging.info(
            "the first step was not compiled by this process alone before the others join: %s",
            error,
        )


def _engines_by_strategy(engines: Engines, where: Place) -> Mapping[str, Engine]:
    """Return the engine of every strategy whose rules, or the model's, divide on these devices.

    Raises CannotDivide, of the last strategy, if there is none.
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


def _warn_of_layout(engine: Engine) -> None:
    """Warn of large parameters that are not cut, and of a compiler that sends more than it needs to."""
    strategy = engine.layout.strategy
    for sentence in whole_leaves(engine.programs.param_specs, engine.engines.state.params):
        logging.warning(
            "the strategy %s cuts the model, but every device holds this parameter whole: %s. To cut it, or "
            "to say that this is intended, name it in Strategy.rules.",
            strategy.name,
            sentence,
        )
    cut = [axis for axis in PRIORITIES if engine.layout.mesh.shape.get(axis, 1) > 1]
    if cut and not keeps_priorities():
        logging.warning(
            "under %s, steps may send several times as much as they need to: jaxlib %s does not tell XLA "
            "that batches are cut before parameters are. Start with "
            "XLA_FLAGS=--xla_enable_hlo_sharding_v3=false in the environment, or install jax 0.10.",
            strategy.name,
            jaxlib.version.__version__,
        )


def _log_left_out(strategy: str, why: Exception) -> None:
    logging.warning("the strategy %s is left out: %s", strategy, why)
