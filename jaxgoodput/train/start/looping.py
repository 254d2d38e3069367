"""Decides whether short steps run in a loop of one program, even those that are dispatched alone.

A block of short steps, dispatched at once, takes a fraction of the time of as many single ones. On a CPU its
program may also run a part of the block (`BlockPrograms.can_split`): a single step in it takes no longer than
in a program of its own, and it is compiled in the same time. So there is one program for both. Only
convolutions, above all their gradients, may take several times as long in a loop of XLA:CPU. Their blocks are
copies of the step, run as a whole, as on an accelerator, and compiled behind training if that pays. Anything
else that is slower in a loop is not noticed, as there is nothing to compare with: transforms and
decompositions took 1.2 to 1.3 times as long, sorts, sums and scans as long or less.

What a step computes is known once it is traced. If even a slow processor would do that in a moment, steps are
short.
"""

from functools import partial

import jax
from absl import logging
from jax.extend.core import Jaxpr

from jaxgoodput._jax import looks_for
from jaxgoodput.data.streams import StreamSource
from jaxgoodput.engine.arithmetic import elementary_work, matrix_flops, primitives
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.runs.kinds import is_alone
from jaxgoodput.train.start.plans import RunSetup

# A step takes less than this on two cores of a slow processor, at these rates: short, or surely so.
SHORT_S, SURELY_SHORT_S = 0.03, 3e-3
FLOPS, ADDITIONS = 3e10, 1e10  # per second
LEAST_PER_PARAM = (
    5  # additions for each parameter of a model: its gradient, its update and a moment
)
# What a step in a block saves at least, by its dispatch, and what compiling the program of blocks takes.
SAVED_S, COMPILING_S = 4e-4, 2.0


class ShortSteps:
    """What is known of a run's steps before anything is compiled; make it then.

    If they are short, it has them run in loops, up to the size at which they may not be. Where a program
    cannot run a part of a block, `compile_soon` has the program of blocks compiled.
    """

    def __init__(self, setup: RunSetup):
        self._setup = setup
        self._step_s = float("inf")
        if not _may_have_blocks(setup):
            return
        (engine,) = setup.engines.values()
        size, blocks = setup.config.batch.base, engine.programs.blocks
        shape = engine.shape(size)
        # What is looked at is compiled next, and not traced again; only convolutions are looked at in vain.
        program = partial(engine.programs.step, shape, measure=False)
        if blocks.can_split:
            program = partial(blocks.steps, shape)
        try:
            jaxpr = engine.compiled.look_at(program).traced.jaxpr.jaxpr
            self._step_s = step_seconds(jaxpr)
        except Exception as error:  # what is wrong with a step by itself shows where that is traced
            logging.info("steps do not run in loops: %s", error)
            return
        if not blocks.can_split:
            return
        blocks.unrolls = "conv_general_dilated" in primitives(jaxpr)
        if not blocks.unrolls:
            blocks.loops_up_to = int(size * SHORT_S / self._step_s)
        if not blocks.loops(shape):
            engine.compiled.forget(program)

    def compile_soon(self, strategies: StrategyCompiler, batch: BatchConfig) -> None:
        """Have blocks of a new run's first batch compiled beside the first steps, if they surely pay.

        Steps beside what is left to compile are then known to be disturbed. The first program of an
        accelerator is left alone: its compiler tries kernels on the device, where two would disturb each
        other.
        """
        config, (engine, *_) = self._setup.config, self._setup.engines.values()
        is_base = batch.global_batch_size == config.batch.base and batch.num_micro_batches == 1
        compile_s = COMPILING_S * engine.blocks.compile_cost
        pays = _num_steps(self._setup) * SAVED_S > compile_s and config.compiles_behind
        if not pays or not is_base or engine.blocks.can_split:
            return
        if self._step_s <= SURELY_SHORT_S:
            programs = engine.blocks.programs(engine.shape(batch.micro_batch_size))
            strategies.compiler(batch.strategy).compile_soon(programs)


def step_seconds(jaxpr: Jaxpr) -> float:
    """Return about how many seconds a step takes on a slow processor; infinite if unknown.

    `jaxpr` is of a step, or of a block of steps that is a loop of unknown length.
    """
    loops = [one for one in jaxpr.eqns if one.primitive.name == "while"]
    if loops:
        jaxpr = loops[0].params["body_jaxpr"].jaxpr
    return matrix_flops(jaxpr) / FLOPS + elementary_work(jaxpr) / ADDITIONS


def may_round(config: Config) -> bool:
    """Whether a second run may differ by rounding: measured times decide when the noise is measured.

    Where the user fixes the steps that measure, every run gives the same bits.
    """
    return config.statistics.every_steps is None


def _may_have_blocks(setup: RunSetup) -> bool:
    """Whether the run may have blocks, and a model so small that its steps may be short."""
    config, engines = setup.config, list(setup.engines.values())
    if not is_alone(setup.where) or len(engines) > 1 or engines[0].num_replicas > 1:
        return False
    low, high = config.batch.span
    is_plain = low <= config.batch.base <= high and not setup.inputs.tables.plans
    data, ahead = (
        setup.inputs.dataset,
        (config.execution.prefetch + 1) * engines[0].blocks.num_steps,
    )
    is_plain &= not isinstance(data, StreamSource) or data.may_read_ahead(ahead * config.batch.base)
    is_plain &= may_round(config) and not looks_for()  # JAX looks at the results of single steps
    # The update alone of a large model is not short; then nothing has to be traced to know.
    num_params = sum(x.size for x in jax.tree.leaves(engines[0].abstract_state().params))
    return is_plain and num_params * LEAST_PER_PARAM < SHORT_S * ADDITIONS


def _num_steps(setup: RunSetup) -> float:
    """Return how many steps the run has at the base batch."""
    config = setup.config
    if config.base_steps is not None:
        return float(config.base_steps)
    return (config.epochs or 0) * len(setup.inputs.dataset) / config.batch.base
