"""The programs of an elastic job: a batch is summed within each group of devices, then over the groups.

A *group* is one copy of everything: the devices of one process, or of several that share one mesh. `world` is
the mesh of all groups, of the axes "group" and "device". `pack` flattens the sums that a device holds,
`reduce` adds them up over the groups (the only collective between them, nothing donated: where it fails the
state is intact), `update` happens within each group again. A control vector rides along.

Under plain data parallelism every device is a replica with sums of its own, and the buffers of all devices
are added up. Where the model is cut, a device adds up its part with those of the same place in other groups.
"""

import abc
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.programs import (
    ROWS,
    WHOLE,
    GlobalPrograms,
    Program,
    Programs,
    SampleShape,
    SeparatePrograms,
)
from jaxgoodput.engine.state import Sums, TrainState
from jaxgoodput.engine.traces import Traces
from jaxgoodput.parallel.place import DEVICE_AXIS, GROUP_AXIS
from jaxgoodput.parallel.strategy import Layout

_CONTROL = "control"


class OverGroups(Programs):
    """What is the same however a group holds the model."""

    world: Mesh
    _num_numbers: int

    @property
    @abc.abstractmethod
    def _own_sums(self) -> Sums:
        """What one device holds of the sums, abstract."""

    @property
    @abc.abstractmethod
    def is_alone(self) -> bool:
        """Whether there is but one group of samples in a batch of one micro-batch, so that noise has to be
        told from its rows.
        """

    @abc.abstractmethod
    def _compared(self, begun: Sequence[PyTree], inputs: Sequence[PyTree]) -> Sums:
        """The sums of a micro-batch with the noise of two groups of its rows."""

    def measured(self, shape: SampleShape) -> Program:
        """`accumulate` of a batch's only micro-batch where nobody else has one, with its noise."""
        sums, fixed = self.partial_sums(), (*self.abstract_work, *self.abstract_batch(shape))

        def run(*arguments: PyTree) -> Sums:
            total = self._compared(arguments[:5], arguments[5:])
            return dataclasses.replace(total, square=None)  # which the sums of others have not

        return Program(run, (), fixed, jax.tree.map(lambda x: x.sharding, sums))

    @abc.abstractmethod
    def pack(self) -> Program:
        """Sums and control vectors, as flat buffers, a row for each device."""

    @abc.abstractmethod
    def reduce(self) -> Program:
        """The sum of those over the groups; nothing is donated."""

    def abstract_flat(self) -> jax.ShapeDtypeStruct:
        """The buffers of a group, a row for each of its devices."""
        shape = (self.layout.num_devices, self.flat_size)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.layout.row_per_device)

    @property
    def flat_size(self) -> int:
        """Numbers in the buffer of a device."""
        return _size(self._own_sums, self._num_numbers)


class ElasticPrograms(OverGroups, SeparatePrograms):
    """Whole copies of the model: the buffers of all devices of `world` are added up.

    `control_size` numbers of each replica are added up along with its sums.
    """

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        *,
        state: TrainState,
        shape: SampleShape,
        world: Mesh,
        control_size: int,
        traces: Traces | None = None,
    ):
        super().__init__(problem, layout, state=state, shape=shape, traces=traces)
        self.world = world
        self._num_numbers = control_size

    @property
    def is_alone(self) -> bool:
        """One device in all: each is a replica, and a group of samples."""
        return self.world.size == 1

    def _compared(self, begun: Sequence[PyTree], inputs: Sequence[PyTree]) -> Sums:
        batch, mask, numbers = inputs
        total = self._merged(begun, numbers[0], batch, mask, None, measure=False)
        some, part = self._some_of(batch, mask)
        few = self._merged(begun, numbers[0], *some, None, measure=False, part=part)
        return jax.tree.map(
            lambda x: jnp.asarray(x)[None],
            pure.in_two(self.problem, total, few, begun[1], cut=False),
        )

    def pack(self) -> Program:
        """Sums and control vectors of the replicas as rows of one flat buffer."""

        def body(sums: Sums, control: Array) -> Array:
            return _flat(jax.tree.map(lambda x: x[0], sums), control[0])[None]

        shape = (self.layout.num_devices, self._num_numbers)
        control = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.layout.row_per_device)
        run = self._manual(body, (ROWS, ROWS), ROWS)
        return Program(run, (), (self.partial_sums(), control), self.layout.row_per_device)

    def reduce(self) -> Program:
        """The sum of the buffers of all devices of all groups; nothing is donated."""
        return _over(self.world, (GROUP_AXIS, DEVICE_AXIS), self.flat_size)

    def update(self) -> Program:
        """(state, packed metrics and control), from (state, flat buffers, model state of the replicas)."""

        def body(state: TrainState, flat: Array, model_states: PyTree) -> tuple[TrainState, Array]:
            total, control = _parts(flat[0], self._local_sums, self._num_numbers)
            own = jax.tree.map(lambda x: x[0], model_states)
            whole = Sums.of_exchanged(total, calls=jnp.zeros((), jnp.int32), model_state=own)
            state, metrics = self._update(state, whole, measure=True)
            return state, jnp.concatenate([metrics.packed(), control])

        arguments = (self.abstract_state(), self.abstract_flat(), self.partial_sums().model_state)
        run = self._manual(body, (WHOLE, ROWS, ROWS), WHOLE)
        return Program(run, (0,), arguments, self.layout.replicated)

    @property
    def _own_sums(self) -> Sums:
        return self._local_sums


class GroupPrograms(OverGroups, GlobalPrograms):
    """A model that is cut within each group, as the compiler does it; between groups one reduction.

    A device's buffer holds its parts of the gradient, so that what is sent between groups is cut likewise.
    """

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        *,
        state: TrainState,
        shape: SampleShape,
        world: Mesh,
        control_size: int,
        couples: bool = False,
        traces: Traces | None = None,
    ):
        super().__init__(problem, layout, state=state, shape=shape, couples=couples, traces=traces)
        self.world = world
        self._num_numbers = control_size
        self._specs = jax.tree.map(lambda x: x.sharding.spec, self.reduced_sums())
        self._every = PartitionSpec(layout.mesh.axis_names)  # a row for each device

    @property
    def is_alone(self) -> bool:
        """One group of devices, whose micro-batch is one group of samples."""
        return self.world.shape[GROUP_AXIS] == 1

    def _compared(self, begun: Sequence[PyTree], inputs: Sequence[PyTree]) -> Sums:
        return self._whole(begun, inputs, None, measure=True)

    def abstract_batch(self, shape: SampleShape) -> tuple[PyTree, ...]:
        """(batch, mask, the number of this group)."""
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.layout.replicated)
        return *super().abstract_batch(shape), number

    def _all_rows(
        self,
        begun: Sequence[PyTree],
        inputs: Sequence[PyTree],
        old: Sums | None,
        *,
        measure: bool,
        part: Array | None = None,
        alone: bool = False,
    ) -> Sums:
        batch, mask, group = inputs
        blocks = self.layout.num_replicas
        return self._merged(
            begun, group, batch, mask, old, measure=measure, blocks=blocks, part=part, alone=alone
        )

    def pack(self) -> Program:
        """Sums and control vectors, as flat buffers of what each device holds of them."""

        def body(sums: Sums, control: Array) -> Array:
            # One process of a group has something to say, or several.
            total = jax.lax.psum(control[0], self.layout.mesh.axis_names)
            return _flat(sums, total)[None]

        run = self._manual(body, (self._specs, self._every), self._every)
        shape = (self.layout.num_devices, self._num_numbers)
        control = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.layout.row_per_device)
        return Program(run, (), (self.partial_sums(), control), self.layout.row_per_device)

    def reduce(self) -> Program:
        """The sum of the buffers of each place over all groups; nothing is donated."""
        return _over(self.world, (GROUP_AXIS,), self.flat_size)

    def update(self) -> Program:
        """(state, packed metrics and control), from (state, flat buffers, model state)."""

        def body(flat: Array) -> tuple[PyTree, Array]:
            return _parts(flat[0], self._own_sums, self._num_numbers)

        specs = jax.tree.map(lambda _: WHOLE, _exchanged(self._local_sums, 0))
        control = specs.pop(_CONTROL)
        unpack = self._manual(
            body, (self._every,), ({**specs, "grads": self._specs.grads}, control)
        )

        def run(state: TrainState, flat: Array, model_state: PyTree) -> tuple[TrainState, Array]:
            total, control = unpack(flat)
            calls = jnp.zeros((), jnp.int32)
            whole = Sums.of_exchanged(total, calls=calls, model_state=model_state)
            state, metrics = self._update(state, whole, measure=True)
            return state, jnp.concatenate([metrics.packed(), control])

        arguments = (self.abstract_state(), self.abstract_flat(), self.partial_sums().model_state)
        return Program(run, (0,), arguments, self._out())

    @property
    def _own_sums(self) -> Sums:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype),
            self.reduced_sums(),
        )


def _over(world: Mesh, axes: tuple[str, ...], flat_size: int) -> Program:
    """The buffers of all devices `[devices, flat_size]`, added up over some axes of the world."""
    rows = rows_of(world)
    run = jax.shard_map(
        lambda x: jax.lax.psum(x, axes),
        mesh=world,
        in_specs=rows,
        out_specs=rows,
        check_vma=False,
    )
    sharding = NamedSharding(world, rows)
    flat = jax.ShapeDtypeStruct((world.size, flat_size), jnp.float32, sharding=sharding)
    return Program(run, (), (flat,), sharding)


def rows_of(world: Mesh) -> PartitionSpec:
    """A row for each device of all groups."""
    return PartitionSpec(world.axis_names)


def _flat(sums: Sums, control: Array) -> Array:
    tree = {**sums.exchanged(), _CONTROL: control}
    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])


def _parts(flat: Array, sums: Sums, num_numbers: int) -> tuple[PyTree, Array]:
    """What `_flat` made a buffer of: what is exchanged of sums, and the control vector."""
    leaves, structure = jax.tree.flatten(_exchanged(sums, num_numbers))
    ends = np.cumsum([0, *(leaf.size for leaf in leaves)])
    parts = [
        flat[a:b].reshape(leaf.shape) for a, b, leaf in zip(ends, ends[1:], leaves, strict=False)
    ]
    total = jax.tree.unflatten(structure, parts)
    control = total.pop(_CONTROL)
    return total, control


def _exchanged(sums: Sums, num_numbers: int) -> PyTree:
    control = jax.ShapeDtypeStruct((num_numbers,), jnp.float32)
    return jax.eval_shape(lambda sums, c: {**sums.exchanged(), _CONTROL: c}, sums, control)


def _size(sums: Sums, num_numbers: int) -> int:
    return int(sum(leaf.size for leaf in jax.tree.leaves(_exchanged(sums, num_numbers))))
