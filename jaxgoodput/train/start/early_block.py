"""Compiles blocks of steps before the first step, beside the program of a single one, if they surely pay.

A block of very short steps takes a fraction of the time of as many single ones. If that is found out only by
timing single steps, the program of blocks is compiled beside them, which takes twice as long and slows them
down. What a step computes is known once it is traced. If even a slow processor would do that in a moment, the
program is compiled on a thread of its own while the caller compiles the single step.
"""

from functools import partial

from absl import logging

from jaxgoodput._worker import Worker
from jaxgoodput.data.sources import StreamSource
from jaxgoodput.engine.arithmetic import elementary_work, matrix_flops
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.train.compile_sizes import SizeCompiler
from jaxgoodput.train.runs.kinds import is_alone
from jaxgoodput.train.start.plans import RunSetup

COUNT = 8  # steps of a block
# What a step in a block saves at least, by its dispatch, and what compiling the program of blocks takes.
SAVED_S, COMPILING_S = 4e-4, 2.0
# A step takes less than this on two cores of a slow processor, at these rates: surely short.
SURELY_SHORT_S = 3e-3
FLOPS, ADDITIONS = 3e10, 1e10  # per second


def block_programs(engine: Engine, size: int, count: int) -> tuple[partial[Program], ...]:
    """Return the programs that take the rows of `count` steps apart, and that run these steps.

    `size` is of a micro-batch; every step is one of them, on one replica.
    """
    shape, programs = engine.shape(size), engine.programs
    return (partial(programs.cut, shape, count=count), partial(programs.steps, shape, count=count))


def is_surely_short(block: Program) -> bool:
    """Return whether the steps of a block surely take a few milliseconds each, at most."""
    jaxpr = block.traced.jaxpr.jaxpr
    seconds = matrix_flops(jaxpr) / FLOPS + elementary_work(jaxpr) / ADDITIONS
    return seconds <= COUNT * SURELY_SHORT_S


class EarlyBlock:
    """A thread that compiles the block of a new run's base batch, if it surely pays. Close it."""

    def __init__(self, setup: RunSetup):
        self._programs: tuple[partial[Program], ...] = ()
        self._worker: Worker | None = None
        if _may_pay(setup):
            self._engine = next(iter(setup.engines.values()))
            self._programs = block_programs(self._engine, setup.config.batch.base, COUNT)
            self._worker = Worker(
                "early", self._compile, on_error=_leave, within=self._engine.compiled.settings
            )

    def hand_over(self, compiler: SizeCompiler) -> None:
        """Have `compiler` go on, so that steps beside what is left are known to be disturbed."""
        if self._worker is not None and self._worker.is_alive:
            compiler.compile_soon(self._programs)

    def close(self) -> None:
        """Wait for the program that is being compiled."""
        if self._worker is not None:
            self._worker.join()

    def _compile(self, _: Worker) -> None:
        cut, steps = self._programs
        if self._engine.compiled.compile_if(is_surely_short, steps):
            self._engine.compile_program(cut)


def _may_pay(setup: RunSetup) -> bool:
    """Whether the run may have blocks, and has enough steps to repay the compilation of their program."""
    config, engines = setup.config, list(setup.engines.values())
    if not is_alone(setup.where) or len(engines) > 1 or engines[0].num_replicas > 1:
        return False
    low, high = config.batch.span
    is_single = low <= config.batch.base <= high and not setup.inputs.tables.plans
    is_single &= not isinstance(setup.inputs.dataset, StreamSource)
    # Where the user fixes the steps that measure, every run gives the same bits: no blocks (`duties.blocks`).
    is_free = config.compiles_behind and config.statistics.every_steps is None
    return is_single and is_free and _num_steps(setup) * SAVED_S > COMPILING_S


def _num_steps(setup: RunSetup) -> float:
    """Return how many steps the run has at the base batch."""
    config = setup.config
    if config.base_steps is not None:
        return float(config.base_steps)
    return (config.epochs or 0) * len(setup.inputs.dataset) / config.batch.base


def _leave(error: BaseException) -> None:
    """Leave it to whoever needs the program to find the error again and to raise it."""
    logging.info("a block of steps was not compiled ahead: %s", error)
