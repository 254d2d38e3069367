"""Executables of an engine that spans processes: one flat buffer, one all-reduce.

Every process has its own layout of pure data parallelism; `pack` flattens the sums of each replica,
`reduce` adds them up over all replicas of all processes (the only collective, nothing donated: where it
fails the state is intact), `update` is local again. A control vector rides along.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.programs import ROWS, WHOLE, Recipes, Shape
from jaxgoodput.engine.state import Sums
from jaxgoodput.parallel.strategy import Layout


class AcrossRecipes(Recipes):
    """Recipes whose batch is reduced over `world`, a mesh of one axis over the devices of all processes."""

    def __init__(
        self, problem: pure.Problem, layout: Layout, shape: Shape, *, world: Mesh, control_size: int
    ):
        super().__init__(problem, layout, shape)
        self.world = world
        self._control_size = control_size

    def _make_pack(self):
        def body(sums, control):
            tree = pure.to_reduce(jax.tree.map(lambda x: x[0], sums), control[0])
            return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])[None]

        control = jax.ShapeDtypeStruct(
            (self.layout.num_replicas, self._control_size),
            jnp.float32,
            sharding=self.layout.batch_sharding,
        )
        run = self._replicas_map(body, (ROWS, ROWS), ROWS)
        return run, (), (self.partial_sums(), control), self.layout.batch_sharding

    def _make_reduce(self) -> tuple[Any, ...]:
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
        return run, (), (flat,), NamedSharding(self.world, WHOLE)

    def _make_update(self) -> tuple[Any, ...]:
        tree = self._reduced_tree
        leaves, structure = jax.tree.flatten(tree)
        ends = np.cumsum([0, *(leaf.size for leaf in leaves)])

        def body(state, flat, model_states):
            parts = [
                flat[a:b].reshape(leaf.shape)
                for a, b, leaf in zip(ends, ends[1:], leaves, strict=False)
            ]
            total = jax.tree.unflatten(structure, parts)
            own = jax.tree.map(lambda x: x[0], model_states)
            template = Sums(
                **{k: v for k, v in total.items() if k not in ("floats", "control")},
                calls=jnp.zeros((), jnp.int32),
                model_state=own,
            )
            whole = pure.from_reduced(total, template)
            state, metrics = pure.update(self.problem, state, whole, measure=True)
            vector = jnp.stack([metrics[name] for name in sorted(metrics)])
            return state, jnp.concatenate([vector, total["control"]])

        whole = self.layout.replicated
        flat = jax.ShapeDtypeStruct((self._flat_size,), jnp.float32, sharding=whole)
        arguments = (self.abstract_state(), flat, self.partial_sums().model_state)
        run = self._replicas_map(body, (WHOLE, WHOLE, ROWS), WHOLE)
        return run, (0,), arguments, whole

    @property
    def _reduced_tree(self) -> PyTree:
        control = jax.ShapeDtypeStruct((self._control_size,), jnp.float32)
        return jax.eval_shape(pure.to_reduce, self._local_sums, control)

    @property
    def _flat_size(self) -> int:
        return int(sum(leaf.size for leaf in jax.tree.leaves(self._reduced_tree)))
