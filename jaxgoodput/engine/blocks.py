"""Runs blocks of short steps, or parts of them, in one executable each."""

import dataclasses
from functools import cached_property, partial

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jaxgoodput.engine.compiled import ProgramCache
from jaxgoodput.engine.programs.blocks import BlockPrograms
from jaxgoodput.engine.programs.keyless import KeylessCaller
from jaxgoodput.engine.programs.program import Program, SampleShape
from jaxgoodput.engine.state import TrainState
from jaxgoodput.parallel.strategy import Layout


class BlockRunner:
    """Runs the blocks of one engine."""

    def __init__(
        self, programs: BlockPrograms, compiled: ProgramCache, call: KeylessCaller, layout: Layout
    ):
        self._programs = programs
        self._compiled = compiled
        self._call = call
        self._layout = layout

    @property
    def can_split(self) -> bool:
        """Whether a part of a block may be run."""
        return self._programs.can_split

    @property
    def is_on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self._programs.is_on_cpu

    @property
    def num_steps(self) -> int:
        """Steps of a block."""
        return self._programs.num_steps

    @property
    def compile_cost(self) -> float:
        """How many times as long as a step a block takes to compile."""
        return self.num_steps / 2 if self._programs.unrolls else 1.0

    def loops(self, shape: SampleShape) -> bool:
        """Whether steps of this shape that measure nothing run as a part of a block, even alone."""
        return self._programs.loops(shape)

    def stop_looping(self, shape: SampleShape) -> bool:
        """Have single steps of this shape, and larger ones, run by themselves; call it before any was run.

        A block holds the rows of all its steps, and may need too much memory. Returns whether anything has
        changed: False if such steps run by themselves already.
        """
        loops = self.loops(shape)
        if loops:
            self._programs.loops_up_to = shape.micro_batch_size - 1
        return loops

    def programs(self, shape: SampleShape) -> tuple[partial[Program], partial[Program]]:
        """Return the programs that take a step's rows from a block's, and that run blocks of this shape."""
        return self._programs.of(shape)

    def run(
        self,
        state: TrainState,
        batch: PyTree,
        mask: Array,
        *,
        first: int = 0,
        count: int | None = None,
    ) -> tuple[TrainState, Array]:
        """Run `count` steps of one micro-batch each (default: all), on one replica of one process.

        `batch` and `mask` have the rows of the steps of a block, one after the other. `first` is the number
        of the first one to run; unless it `can_split`, all are. Returns the new state and the metrics
        vectors, `[num_steps, numbers]`, of which `count` are used. Donates the state. No step takes a noise
        sample.
        """
        state.require_alive()
        bounds, num_steps = (), self.num_steps
        count = num_steps if count is None else count
        if self.can_split:
            bounds = self._counts[first], self._counts[count]
        elif count != num_steps:
            raise ValueError(
                f"a block's {num_steps} steps run together on this device, and got count={count}. Take the "
                "rows of single ones with rows(), and call Engine.step()."
            )
        run = self._compiled(self._programs.steps, self._shape_of(batch, mask))
        state, metrics = self._call(run, state, batch, mask, *bounds)
        return state, metrics

    def run_one(self, state: TrainState, batch: PyTree, mask: Array) -> tuple[TrainState, Array]:
        """Run one step as the first of a block; `batch` and `mask` have its rows alone. Donates the state."""
        shape = SampleShape.of_batch(batch, micro_batch_size=mask.shape[0])
        return self.run(state, *self._compiled(self._programs.widened, shape)(batch, mask), count=1)

    def rows(self, batch: PyTree, mask: Array, number: int) -> tuple[PyTree, Array]:
        """Return the batch and mask of one step, from those of a block's steps."""
        narrowed = self._compiled(self._programs.narrowed, self._shape_of(batch, mask))
        batch, mask = narrowed(batch, mask, self._counts[number])
        return batch, mask

    @cached_property
    def _counts(self) -> list[Array]:
        """The numbers from 0 to `num_steps`, on the devices."""
        with jax.transfer_guard("allow"):
            return jax.device_put(
                [np.int32(i) for i in range(self.num_steps + 1)], self._layout.replicated
            )

    def _shape_of(self, batch: PyTree, mask: Array) -> SampleShape:
        """Return the shape of a step, from the batch and mask of a block."""
        wide = SampleShape.of_batch(batch, micro_batch_size=mask.shape[0])
        return dataclasses.replace(wide, micro_batch_size=wide.micro_batch_size // self.num_steps)
