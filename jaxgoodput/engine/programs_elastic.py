"""The programs of an elastic job of several processes: one flat buffer, one all-reduce.

Every process has its own layout of pure data parallelism; `pack` flattens the sums of each replica,
`reduce` adds them up over all replicas of all processes (the only collective, nothing donated: where it
fails the state is intact), `update` is local again. A control vector rides along.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.programs import ROWS, WHOLE, Program, SampleShape, SeparatePrograms
from jaxgoodput.engine.state import Sums, TrainState
from jaxgoodput.parallel.strategy import Layout


class ElasticPrograms(SeparatePrograms):
    """Programs whose batch is reduced over `world`, a mesh of one axis over the devices of all processes.

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
    ):
        super().__init__(problem, layout, state=state, shape=shape)
        self.world = world
        self._num_numbers = control_size

    def pack(self) -> Program:
        """Sums and control vectors of the replicas as rows of one flat buffer."""

        def body(sums: Sums, control: Array) -> Array:
            tree = _with_control(jax.tree.map(lambda x: x[0], sums), control[0])
            return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])[None]

        control = jax.ShapeDtypeStruct(
            (self.layout.num_replicas, self._num_numbers),
            jnp.float32,
            sharding=self.layout.batch_sharding,
        )
        run = self._replicas_map(body, (ROWS, ROWS), ROWS)
        return Program(run, (), (self.partial_sums(), control), self.layout.batch_sharding)

    def reduce(self) -> Program:
        """The sum of the buffers of all replicas of all processes; nothing is donated."""
        (axis,) = self.world.axis_names
        run = jax.shard_map(
            lambda x: jax.lax.psum(x[0], axis),
            mesh=self.world,
            in_specs=PartitionSpec(axis),
            out_specs=WHOLE,
            check_vma=False,
        )
        flat = jax.ShapeDtypeStruct(
            (self.world.size, self._flat_size),
            jnp.float32,
            sharding=NamedSharding(self.world, PartitionSpec(axis)),
        )
        return Program(run, (), (flat,), NamedSharding(self.world, WHOLE))

    def update(self) -> Program:
        """(state, packed metrics and control), from (state, flat buffer, model state of the replicas)."""
        leaves, structure = jax.tree.flatten(self._reduced_tree)
        ends = np.cumsum([0, *(leaf.size for leaf in leaves)])

        def body(state: TrainState, flat: Array, model_states: PyTree) -> tuple[TrainState, Array]:
            parts = [
                flat[a:b].reshape(leaf.shape)
                for a, b, leaf in zip(ends, ends[1:], leaves, strict=False)
            ]
            total = jax.tree.unflatten(structure, parts)
            control = total.pop(_CONTROL)
            own = jax.tree.map(lambda x: x[0], model_states)
            whole = Sums.of_exchanged(total, calls=jnp.zeros((), jnp.int32), model_state=own)
            state, metrics = pure.update(self.problem, state, whole, measure=True)
            return state, jnp.concatenate([metrics.packed(), control])

        whole = self.layout.replicated
        flat = jax.ShapeDtypeStruct((self._flat_size,), jnp.float32, sharding=whole)
        arguments = (self.abstract_state(), flat, self.partial_sums().model_state)
        run = self._replicas_map(body, (WHOLE, WHOLE, ROWS), WHOLE)
        return Program(run, (0,), arguments, whole)

    @property
    def _reduced_tree(self) -> PyTree:
        control = jax.ShapeDtypeStruct((self._num_numbers,), jnp.float32)
        return jax.eval_shape(_with_control, self._local_sums, control)

    @property
    def _flat_size(self) -> int:
        return int(sum(leaf.size for leaf in jax.tree.leaves(self._reduced_tree)))


_CONTROL = "control"


def _with_control(sums: Sums, control: Array) -> PyTree:
    return {**sums.exchanged(), _CONTROL: control}
