"""Programs that run several short steps at once, or parts of such a block."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxgoodput.engine.programs.keyless import Keyless
from jaxgoodput.engine.programs.program import Program, SampleShape
from jaxgoodput.engine.state import TrainState
from jaxgoodput.parallel.strategy import Layout

# Steps of a program that runs several: of one that may also run a part, and of one that may not. The latter
# is run only if all its steps fit before the next one that measures the noise.
SPLIT_BLOCK, WHOLE_BLOCK = 16, 8
Rows = tuple[PyTree, Array]
"""The batch and mask of a step, or of the steps of a block, one behind the other."""


class BlockPrograms:
    """The programs of blocks of steps, for one replica and process.

    `rows` gives the abstract batch and mask of a micro-batch; `step` is one step without a noise sample, from
    a state to the next one and the packed metrics; `num_numbers` returns how many these are.
    """

    def __init__(
        self,
        layout: Layout,
        rows: Callable[[SampleShape], Sequence[PyTree]],
        *,
        keyless: Callable[[], Keyless],
        step: Callable[[TrainState, Rows], tuple[TrainState, Array]],
        num_numbers: Callable[[], int],
    ):
        self.loops_up_to = 0
        """The largest micro-batch that `loops`; set it before anything is compiled."""
        self.unrolls = False
        """Whether a block has a copy of each of its steps instead of a loop; set it before, too."""
        self._layout = layout
        self._rows = rows
        self._keyless = keyless
        self._step = step
        self._num_numbers = num_numbers

    def loops(self, shape: SampleShape) -> bool:
        """Whether steps of this shape that measure nothing run as a part of a block, even alone.

        Then they need one program instead of two. It must be able to run a part: `can_split`.
        """
        return shape.micro_batch_size <= self.loops_up_to

    @property
    def can_split(self) -> bool:
        """Whether `steps` may run a part of a block. On an accelerator, the host would wait for each step."""
        return self.is_on_cpu and not self.unrolls

    @property
    def is_on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self._layout.mesh.devices.flat[0].platform == "cpu"

    @property
    def num_steps(self) -> int:
        """Steps of a block."""
        return SPLIT_BLOCK if self.can_split else WHOLE_BLOCK

    def of(self, shape: SampleShape) -> tuple[partial[Program], partial[Program]]:
        """Return the programs that take a step's rows from a block's, and that run blocks of this shape."""
        return partial(self.narrowed, shape), partial(self.steps, shape)

    def steps(self, shape: SampleShape) -> Program:
        """Build up to `num_steps` steps of one micro-batch each, without noise samples, for one dispatch.

        It goes from (state, key, batch, mask) to (state, packed metrics `[num_steps, numbers]`). The batch
        has the rows of all steps, one after the other. If it `can_split`, it takes the number of the first
        step to run and their number, too, and the metrics are followed by zeros. A loop is compiled in the
        time of one step, each step as it is alone, and takes less time than as many copies of the step,
        unless these are convolutions on a CPU (`unrolls`).
        """
        splits, num_steps = self.can_split, self.num_steps

        def run(state: TrainState, batch: PyTree, mask: Array, *bounds: Array):
            key, begun = state.key, dataclasses.replace(state, key=None)
            rows = jax.tree.map(lambda x: x.reshape(num_steps, -1, *x.shape[1:]), (batch, mask))

            def one(state: TrainState, rows: Rows) -> tuple[TrainState, Array]:
                state, packed = self._step(dataclasses.replace(state, key=key), rows)
                return dataclasses.replace(state, key=None), packed

            if self.unrolls:
                state, found = begun, []
                for i in range(num_steps):
                    state, packed = one(state, jax.tree.map(lambda x, i=i: x[i], rows))
                    found.append(packed)
                return state, jnp.stack(found)
            if not splits:
                return jax.lax.scan(one, begun, rows)
            first, count = bounds

            def next_one(i: Array, carried: tuple[TrainState, Array]) -> tuple[TrainState, Array]:
                state, found = carried
                state, packed = one(state, _part(rows, i))
                return state, found.at[i - first].set(packed)

            found = jnp.zeros((num_steps, self._num_numbers()), jnp.float32)
            return jax.lax.fori_loop(first, first + count, next_one, (begun, found))

        inputs = (*self._wide(shape), *((self._number, self._number) if splits else ()))
        return self._keyless().program(run, (0,), inputs, (self._layout.replicated,))

    def widened(self, shape: SampleShape) -> Program:
        """Build the program from (batch, mask) of one step to those of a block, of which it is the first."""

        def run(*rows: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.tile(x, (self.num_steps, *[1] * (x.ndim - 1))), rows)

        inputs = tuple(self._rows(shape)[:2])
        return Program(run, (), inputs, self._layout.batch_sharding, is_seldom=True)

    def narrowed(self, shape: SampleShape) -> Program:
        """Build the program from (batch, mask) of a block and the number of a step to those of that step."""

        def run(batch: PyTree, mask: Array, number: Array) -> PyTree:
            rows = jax.tree.map(
                lambda x: x.reshape(self.num_steps, -1, *x.shape[1:]), (batch, mask)
            )
            return _part(rows, number)

        inputs = (*self._wide(shape), self._number)
        return Program(run, (), inputs, self._layout.batch_sharding, is_seldom=True)

    def _wide(self, shape: SampleShape) -> Sequence[PyTree]:
        size = self.num_steps * shape.micro_batch_size
        return self._rows(dataclasses.replace(shape, micro_batch_size=size))[:2]

    @property
    def _number(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.int32, sharding=self._layout.replicated)


def _part(rows: Rows, number: Array) -> Rows:
    """Return the rows of one step, from `[steps, rows, ...]`."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), rows)
