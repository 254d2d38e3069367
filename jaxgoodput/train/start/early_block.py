"""Compiles blocks of steps before the first step, beside the program of a single one, if they surely pay.

A block of very short steps takes a fraction of the time of as many single ones. If that is found out only by
timing single steps, the program of blocks is compiled beside them, which takes twice as long and slows them
down. What a step computes is known once it is traced. If even a slow processor would do that in a moment, the
program is compiled on a thread of its own while the caller compiles the single step.
"""

from functools import partial

import jax
from absl import logging

from jaxgoodput._jax import looks_for
from jaxgoodput._worker import Worker
from jaxgoodput.data.sources import StreamSource
from jaxgoodput.engine.arithmetic import elementary_work, matrix_flops
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.runs.kinds import is_alone
from jaxgoodput.train.start.plans import RunSetup

COUNT = 8  # steps of a block
# What a step in a block saves at least, by its dispatch, and what compiling the program of blocks takes.
SAVED_S, COMPILING_S = 4e-4, 2.0
# A step takes less than this on two cores of a slow processor, at these rates: surely short.
SURELY_SHORT_S = 3e-3
FLOPS, ADDITIONS = 3e10, 1e10  # per second


def block_programs(
    engine: Engine, size: int, count: int
) -> tuple[partial[Program], partial[Program]]:
    """Return the programs that take the rows of `count` steps apart, and that run these steps.

    Each step is one micro-batch of this size, on one replica.
    """
    shape, programs = engine.shape(size), engine.programs
    cut = partial(programs.cut, shape, count=count)
    return cut, partial(programs.steps, shape, count=count)


def is_surely_short(block: Program) -> bool:
    """Return whether the steps of a block surely take a few milliseconds each, at most."""
    jaxpr = block.traced.jaxpr.jaxpr
    seconds = matrix_flops(jaxpr) / FLOPS + elementary_work(jaxpr) / ADDITIONS
    return seconds <= COUNT * SURELY_SHORT_S


class EarlyBlock:
    """A thread that compiles the block of a new run's base batch, if it surely pays. Close it.

    A run that goes on (not `is_new`) may begin with another batch.
    """

    def __init__(self, setup: RunSetup, *, is_new: bool):
        self._size = setup.config.batch.base
        self._pays = False
        self._worker: Worker | None = None
        if is_new and _may_pay(setup):
            self._engine = next(iter(setup.engines.values()))
            self._on_cpu = setup.where.own_devices[0].platform == "cpu"
            self._programs = block_programs(self._engine, self._size, COUNT)
            self._worker = Worker(
                "early", self._compile, on_error=_leave, within=self._engine.compiled.settings
            )

    def hand_over(self, strategies: StrategyCompiler, batch: BatchConfig) -> None:
        """Have the run's compiler go on, if training begins with the base batch and the block surely pays.

        Steps beside what is left to compile are then known to be disturbed.
        """
        if self._worker is None:
            return
        if batch.global_batch_size != self._size or batch.num_micro_batches > 1:
            self._worker.stop()
        elif self._pays:
            strategies.compiler(batch.strategy).compile_soon(self._programs)

    def close(self, *, wait: bool = True) -> None:
        """Have the thread end; waits for the program that is being compiled, unless told not to."""
        if self._worker is not None:
            self._worker.stop()
            if wait:
                self._worker.join()

    def _compile(self, worker: Worker) -> None:
        def is_wanted(steps: Program) -> bool:
            self._pays = is_surely_short(steps)
            # Compilers for accelerators try kernels on the device, where two would disturb each other. There
            # it is left to `hand_over`.
            return self._pays and self._on_cpu and not worker.is_stopping

        cut, steps = self._programs
        if self._engine.compiled.compile_if(is_wanted, steps) and not worker.is_stopping:
            self._engine.compile_program(cut)


def _may_pay(setup: RunSetup) -> bool:
    """Whether the run may have blocks, of steps that may be short, and enough of them to repay compiling."""
    config, engines = setup.config, list(setup.engines.values())
    if not is_alone(setup.where) or len(engines) > 1 or engines[0].num_replicas > 1:
        return False
    low, high = config.batch.span
    is_single = low <= config.batch.base <= high and not setup.inputs.tables.plans
    is_single &= not isinstance(setup.inputs.dataset, StreamSource)
    # Where the user fixes the steps that measure, every run gives the same bits: no blocks (`duties.blocks`).
    is_free = config.compiles_behind and config.statistics.every_steps is None and not looks_for()
    # The update alone of a large model is not surely short; then nothing has to be traced to know.
    num_params = sum(x.size for x in jax.tree.leaves(engines[0].abstract_state().params))
    is_small = num_params < SURELY_SHORT_S * ADDITIONS
    return is_single and is_free and is_small and _num_steps(setup) * SAVED_S > COMPILING_S


def _num_steps(setup: RunSetup) -> float:
    """Return how many steps the run has at the base batch."""
    config = setup.config
    if config.base_steps is not None:
        return float(config.base_steps)
    return (config.epochs or 0) * len(setup.inputs.dataset) / config.batch.base


def _leave(error: BaseException) -> None:
    """Go on without: blocks are no more than faster, and what is wrong with a step shows in the step."""
    logging.info("a block of steps was not compiled ahead: %s", error)
