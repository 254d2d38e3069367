"""Programs of a job whose processes add up their sums: within each group of devices, then over groups.

A *group* holds one copy of everything: the devices of one process, or of several that share one mesh. `world`
is the mesh of all groups, with the axes "group" and "device". `pack` flattens the sums that a device holds
and appends the control vector. `reduce` adds up the buffers over the groups: it is the only collective
between them and donates nothing, so the state survives if it fails. `update` runs within each group again.

Under plain data parallelism every device is a replica with sums of its own, and the buffers of all devices
are added up. If the model is cut, a device's buffer is added to the buffers at its position in other groups.
"""

import abc
import dataclasses
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput._jax import looks_for
from jaxgoodput.engine import step as pure
from jaxgoodput.engine.programs.families import (
    ROWS,
    WHOLE,
    Compile,
    GlobalPrograms,
    Programs,
    SeparatePrograms,
    Trees,
    as_row,
    control_rows,
    first_row,
)
from jaxgoodput.engine.programs.program import Program, SampleShape, shardings_of
from jaxgoodput.engine.state import StepMetrics, Sums, TrainState
from jaxgoodput.parallel.place import DEVICE_AXIS, GROUP_AXIS
from jaxgoodput.parallel.strategy import Layout

_CONTROL = "control"


class OverGroups(Programs):
    """Base of the programs of an elastic job, in which groups of devices add up their sums.

    `world` is the mesh of all groups.
    """

    can_switch: ClassVar[bool] = False
    is_fused: ClassVar[bool] = False
    axes: ClassVar[tuple[str, ...]]
    """Axes of the world over which buffers are added up."""

    def __init__(self, problem: pure.Problem, layout: Layout, *, world: Mesh, **kwargs: Any):
        super().__init__(problem, layout, **kwargs)
        self.world = world

    # -- what an engine asks of its family -------------------------------------------------------

    @property
    def num_groups(self) -> int:
        """Groups of devices whose sums are added up."""
        return self.world.shape[GROUP_AXIS]

    @property
    @abc.abstractmethod
    def has_groups(self) -> bool:
        """Whether every batch gives a noise sample, because several groups have a part of it."""

    def can_measure(self, micro_batch_size: int) -> bool:
        """Return whether a batch of one micro-batch gives a noise sample: by groups, or by rows if alone."""
        return self.has_groups or self.row_comparison.is_possible(micro_batch_size)

    def training(self, shape: SampleShape, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs without which this micro-batch shape cannot be used."""
        first, more = (partial(self.accumulate, shape, first=first) for first in (True, False))
        return (first, more) if accumulate else (first,)

    def last(self, shape: SampleShape, *, alone: bool) -> tuple[partial[Program], ...]:
        """Return the programs of a last micro-batch with a shape of its own: `alone`, or after others."""
        return (partial(self.accumulate, shape, first=alone),)

    def measuring(self, shape: SampleShape) -> tuple[partial[Program], ...]:
        """Return the programs that measure the noise of a batch of one micro-batch, without peers."""
        if self.has_groups or not self.can_measure(shape.micro_batch_size):
            return ()
        return (partial(self.measured, shape),)

    def ahead(self, shape: SampleShape, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs of this micro-batch shape that are compiled before the first step.

        Measuring waits: the survivor of several processes should resume soon, and can do without.
        """
        return self.training(shape, accumulate=accumulate)

    def shared(self, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs that do not depend on the micro-batch shape, such as the update."""
        begin = (partial(self.begin),) if self.has_begin else ()
        return (partial(self.pack), partial(self.reduce), partial(self.update), *begin)

    def adding(self, shape: SampleShape, *, first: bool, measure: bool) -> partial[Program]:
        """Return the program that adds a micro-batch; with `measure`, the first also gives a noise sample.

        The sample comes from comparing two groups of the rows of that one micro-batch (`measured`), so it
        needs neither further micro-batches nor other groups of devices. Later ones ignore `measure`.
        """
        if measure and first:
            return partial(self.measured, shape)
        return partial(self.accumulate, shape, first=first)

    def rehearsals(self, *, accumulate: bool) -> tuple[int, ...]:
        """Return the batches to rehearse, each as the number of micro-batches before its last one."""
        if self.layout.mesh.is_multi_process or looks_for():
            return ()
        return (1,) if accumulate else (0,)

    def reduced(self, compiled: Compile, sums: Sums, control: np.ndarray | None = None) -> Array:
        """Return the buffers of this group's devices, added up over all groups; `sums` stay intact."""
        flat = compiled(self.pack)(sums, control_rows(self.layout, self.control_size, control))
        everywhere = jax.make_array_from_single_device_arrays(
            (self.world.size, self.flat_size),
            NamedSharding(self.world, _rows_of(self.world)),
            [s.data for s in flat.addressable_shards],
        )
        total = compiled(self.reduce)(everywhere)
        return jax.make_array_from_single_device_arrays(
            flat.shape, flat.sharding, [s.data for s in total.addressable_shards]
        )

    def update_inputs(self, total: Any, sums: Sums) -> tuple[Any, ...]:
        """Return the buffers and the model state: its leaves that are not floats are not reduced."""
        return total, sums.model_state

    @property
    def _group(self) -> int:
        mine = self.layout.mesh.devices.flat[0]
        return [device.id for device in self.world.devices[:, 0]].index(mine.id)

    # -- programs --------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _own_sums(self) -> Sums:
        """The part of the sums that one device holds, as abstract arrays."""

    @abc.abstractmethod
    def _compared(self, begun: Trees, inputs: Trees) -> Sums:
        """Return the sums of a micro-batch, with a noise sample from comparing two groups of its rows."""

    def measured(self, shape: SampleShape) -> Program:
        """Build `accumulate` for the only micro-batch of a batch, which takes a noise sample by its rows."""
        sums, fixed = self.partial_sums(), (*self.abstract_work, *self.abstract_batch(shape))

        def run(*arguments: PyTree) -> Sums:
            total = self._compared(arguments[:5], arguments[5:])
            return dataclasses.replace(total, square=None)  # other groups' sums have none

        return Program(run, (), fixed, shardings_of(sums))

    @abc.abstractmethod
    def pack(self) -> Program:
        """Build the program from (sums, control vectors) to flat buffers, a row for each device."""

    def reduce(self) -> Program:
        """Build the program that adds up the buffers over the groups; donates nothing."""
        rows = _rows_of(self.world)
        run = jax.shard_map(
            lambda x: jax.lax.psum(x, self.axes),
            mesh=self.world,
            in_specs=rows,
            out_specs=rows,
            check_vma=False,
        )
        sharding = NamedSharding(self.world, rows)
        shape = (self.world.size, self.flat_size)
        flat = jax.ShapeDtypeStruct(shape, self.flat_dtype, sharding=sharding)
        return Program(run, (), (flat,), sharding)

    def _update_of(
        self, state: TrainState, total: PyTree, model_state: PyTree, control: Array
    ) -> tuple[TrainState, Array]:
        """Return the next state, and the metrics followed by the control vector."""
        calls = jnp.zeros((), jnp.int32)
        whole = Sums.of_exchanged(total, calls=calls, model_state=model_state)
        metrics: StepMetrics[Array]
        state, metrics = self._update(state, whole, measure=True)
        return state, jnp.concatenate([metrics.packed(), control])

    def _update_arguments(self) -> tuple[PyTree, ...]:
        return self.abstract_state(), self.abstract_flat(), self.partial_sums().model_state

    def abstract_flat(self) -> jax.ShapeDtypeStruct:
        """Return the abstract buffers of a group, a row for each of its devices."""
        shape = (self.layout.num_devices, self.flat_size)
        return jax.ShapeDtypeStruct(shape, self.flat_dtype, sharding=self.layout.row_per_device)

    @property
    def flat_size(self) -> int:
        """How many numbers the buffer of a device holds."""
        leaves = jax.tree.leaves(_exchanged(self._own_sums, self.control_size))
        return int(sum(leaf.size for leaf in leaves))

    @property
    def flat_dtype(self) -> Any:
        """Type of the numbers in a buffer, which holds all leaves."""
        return _dtype_of(_exchanged(self._own_sums, self.control_size))


class ElasticPrograms(OverGroups, SeparatePrograms):
    """Whole copies of the model: the buffers of all devices of the world are added up."""

    axes = (GROUP_AXIS, DEVICE_AXIS)

    @property
    def has_groups(self) -> bool:
        """Whether there are several devices: each is a replica, and a group of samples."""
        return self.world.size > 1

    def _compared(self, begun: Trees, inputs: Trees) -> Sums:
        batch, mask, numbers = inputs
        total = self._merged(begun, numbers[0], batch, mask, None, measure=False)
        some, part = self.row_comparison.choose(batch, mask)
        few = self._merged(begun, numbers[0], *some, None, measure=False, part=part)
        return as_row(pure.in_two(self.problem, total, few, begun[1], cut=False))

    def pack(self) -> Program:
        """Build the program from the replicas' sums and control vectors to rows of one flat buffer."""

        def body(sums: Sums, control: Array) -> Array:
            return _flat(first_row(sums), control[0])[None]

        run = self._manual(body, (ROWS, ROWS), ROWS)
        arguments = (self.partial_sums(), self._abstract_control())
        return Program(run, (), arguments, self.layout.row_per_device)

    def update(self) -> Program:
        """Build the program from (state, buffers, the replicas' model state) to the next state.

        It also returns the packed metrics and control vector. Donates the state.
        """

        def body(state: TrainState, flat: Array, model_states: PyTree) -> tuple[TrainState, Array]:
            total, control = _parts(flat[0], self._local_sums, self.control_size)
            return self._update_of(state, total, first_row(model_states), control)

        run = self._manual(body, (WHOLE, ROWS, ROWS), WHOLE)
        return Program(run, (0,), self._update_arguments(), self.layout.replicated)

    @property
    def _own_sums(self) -> Sums:
        return self._local_sums


class GroupPrograms(OverGroups, GlobalPrograms):
    """A model that the compiler cuts within each group; between groups there is one reduction.

    A device's buffer holds its parts of the gradient, so traffic between groups is cut likewise.
    """

    axes = (GROUP_AXIS,)

    @property
    def has_groups(self) -> bool:
        """Whether there are several groups of devices: the micro-batch of each is a group of samples."""
        return self.num_groups > 1

    @cached_property
    def _specs(self) -> Sums:
        return jax.tree.map(lambda x: x.sharding.spec, self.reduced_sums())

    @property
    def _every(self) -> PartitionSpec:
        """Spec that cuts the leading axis into a row for each device of the group."""
        return PartitionSpec(self.layout.mesh.axis_names)

    def _compared(self, begun: Trees, inputs: Trees) -> Sums:
        return self._whole(begun, inputs, None, measure=True)

    def numbers(self) -> tuple[Array, ...]:
        """Return the index of this group among all groups, an array without axes in a tuple."""
        return (self.layout.put(np.asarray(self._group, np.int32), self.layout.replicated),)

    def abstract_batch(self, shape: SampleShape) -> tuple[PyTree, ...]:
        """Return (batch, mask, the number of this group)."""
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.layout.replicated)
        return *super().abstract_batch(shape), number

    def pack(self) -> Program:
        """Build the program from sums and control vectors to flat buffers of what each device holds."""

        def body(sums: Sums, control: Array) -> Array:
            # A group may span processes, each with a control vector on one of its devices.
            total = jax.lax.psum(control[0], self.layout.mesh.axis_names)
            return _flat(sums, total)[None]

        run = self._manual(body, (self._specs, self._every), self._every)
        arguments = (self.partial_sums(), self._abstract_control())
        return Program(run, (), arguments, self.layout.row_per_device)

    def update(self) -> Program:
        """Build the program from (state, buffers, model state) to the next state; donates the state.

        It also returns the packed metrics and control vector.
        """

        def body(flat: Array) -> tuple[PyTree, Array]:
            return _parts(flat[0], self._own_sums, self.control_size)

        specs = jax.tree.map(lambda _: WHOLE, _exchanged(self._local_sums, 0))
        control = specs.pop(_CONTROL)
        unpack = self._manual(
            body, (self._every,), ({**specs, "grads": self._specs.grads}, control)
        )

        def run(state: TrainState, flat: Array, model_state: PyTree) -> tuple[TrainState, Array]:
            total, control = unpack(flat)
            return self._update_of(state, total, model_state, control)

        return Program(run, (0,), self._update_arguments(), self._out())

    @property
    def _own_sums(self) -> Sums:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype),
            self.reduced_sums(),
        )


def _rows_of(world: Mesh) -> PartitionSpec:
    """Return the spec that cuts a row for each device of all groups."""
    return PartitionSpec(world.axis_names)


def _flat(sums: Sums, control: Array) -> Array:
    tree = {**sums.exchanged(), _CONTROL: control}
    dtype = _dtype_of(tree)
    return jnp.concatenate([jnp.ravel(x).astype(dtype) for x in jax.tree.leaves(tree)])


def _dtype_of(tree: PyTree) -> np.dtype:
    return np.result_type(
        np.float32, *(x.dtype for x in jax.tree.leaves(tree) if x.dtype.kind in "fc")
    )


def _parts(flat: Array, sums: Sums, control_size: int) -> tuple[PyTree, Array]:
    """Split a buffer that `_flat` made into the sums that groups exchange, and the control vector."""
    leaves, structure = jax.tree.flatten(_exchanged(sums, control_size))
    ends = np.cumsum([0, *(leaf.size for leaf in leaves)])
    parts = [
        flat[a:b].reshape(leaf.shape).astype(leaf.dtype)
        for a, b, leaf in zip(ends, ends[1:], leaves, strict=False)
    ]
    total = jax.tree.unflatten(structure, parts)
    control = total.pop(_CONTROL)
    return total, control


def _exchanged(sums: Sums, control_size: int) -> PyTree:
    control = jax.ShapeDtypeStruct((control_size,), jnp.float32)
    return jax.eval_shape(lambda sums, c: {**sums.exchanged(), _CONTROL: c}, sums, control)
