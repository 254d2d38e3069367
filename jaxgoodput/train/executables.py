"""How each executable of an engine is made: a pure function, what it donates, and abstract arguments.

Roles, by micro-batch size: `first` and `more` accumulate. The fused steps are `step` (no statistics),
`step_measured` (several replicas), `step_remember` and `step_difference` (one replica: two steps make a
noise sample, and neither has to copy a gradient), and `step_after` (the last of several micro-batches).
Without a size: `begin`, `zeros` (a throw-away state), `pack`, `reduce` and `update`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxgoodput.optim import noise
from jaxgoodput.parallel.strategy import DATA_AXIS, Layout
from jaxgoodput.train import step as pure
from jaxgoodput.train.state import Previous, Sums, TrainState, cast, split

ROWS = PartitionSpec(DATA_AXIS)
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Recipe:
    """What `jax.jit` needs to know to compile an executable ahead."""

    function: Callable[..., Any]
    donate: tuple[int, ...]
    arguments: tuple[Any, ...]  # abstract
    out: NamedSharding

    def compile(self) -> Any:
        """The executable, compiled on this thread."""
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out)
        return jitted.trace(*self.arguments).lower().compile()


class Recipes:
    """The recipes of one problem on one layout; holds no executables and no device values."""

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        sample: PyTree,
        *,
        world: Mesh | None,
        control_size: int,
    ):
        self.problem = problem
        self.layout = layout
        self.sample = sample
        self.world = world
        self._control_size = control_size
        self.state = jax.eval_shape(lambda: pure.init_state(problem, jax.random.key(0)))

    def recipe(self, role: str, size: int) -> Recipe:
        """The recipe of a role for micro-batches of `size` samples (0 where it has no size)."""
        return Recipe(*getattr(self, f"_make_{role}")(size))

    @property
    def has_begin(self) -> bool:
        """Whether beginning a batch computes anything."""
        return self.problem.compute_dtype is not None or self.problem.preconditioned

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the entries of the metrics vector, in order."""
        total = jax.eval_shape(self._one_replica, *self._abstract_local(1))
        _, metrics = jax.eval_shape(
            lambda s, t: pure.update(self.problem, s, t, measure=False), self.state, total
        )
        return tuple(sorted(metrics))

    def abstract_state(self) -> TrainState:
        """The state's shapes and types, with this layout's shardings."""
        return self.placed(self.state, self.layout.replicated)

    # -- functions -------------------------------------------------------------------------------

    def _one_replica(
        self, params, scale, model_state, key, step, replica, batch, mask, old, *, measure=True
    ) -> Sums:
        # One stream of random numbers per (step, replica, micro-batch).
        count = old.groups.astype(jnp.int32) if old is not None else 0
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), replica), count)
        state = old.model_state if old is not None else model_state
        new = pure.local_sums(self.problem, params, scale, state, batch, mask, key, measure=measure)
        return new if old is None else pure.merge(old, new)

    def _replicas_map(self, function, in_specs, out_specs):
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # gradients stay local, and users' scans need no `pcast`
        )

    def _make_begin(self, size: int):
        def begin(params, opt_state):
            scale = ()
            if self.problem.preconditioned:
                kept, _ = split(params, self.problem.mask(params))
                scale = noise.preconditioner(opt_state, kept)
            # None for the masters themselves: an output would be a copy of them.
            dtype = self.problem.compute_dtype
            return None if dtype is None else cast(params, dtype), scale

        state = self.abstract_state()
        return begin, (), (state.params, state.opt_state), self.layout.replicated

    def _make_zeros(self, size: int):
        def zero(s):
            if jnp.issubdtype(s.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), s.shape)
            return jnp.zeros(s.shape, s.dtype)

        return lambda: jax.tree.map(zero, self.state), (), (), self.layout.replicated

    def _accumulate(self, with_old: bool):
        def body(params, scale, model_state, key, step, replica, batch, mask, *old):
            before = jax.tree.map(lambda x: x[0], old[0]) if old else None
            sums = self._one_replica(
                params, scale, model_state, key, step, replica[0], batch, mask, before
            )
            return jax.tree.map(lambda x: jnp.asarray(x)[None], sums)

        specs = (WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, ROWS, ROWS, ROWS)
        return self._replicas_map(body, specs + (ROWS,) * with_old, ROWS)

    def _make_first(self, size: int):
        return self._accumulate(False), (), self._abstract_args(size), self.layout.batch_sharding

    def _make_more(self, size: int):
        arguments = (*self._abstract_args(size), self._abstract_sums(size))
        return self._accumulate(True), (8,), arguments, self.layout.batch_sharding

    def _fused(self, kind: str):
        measured, after = kind in ("measured", "after"), kind == "after"

        def body(state: TrainState, extra, replica, batch, mask):
            params = cast(state.params, self.problem.compute_dtype)
            scale = ()
            if measured and self.problem.preconditioned:
                kept, _ = split(state.params, self.problem.mask(state.params))
                scale = noise.preconditioner(state.opt_state, kept)
            sums = self._one_replica(
                params,
                scale,
                state.model_state,
                state.key,
                state.step,
                replica[0],
                batch,
                mask,
                jax.tree.map(lambda x: x[0], extra) if after else None,
                measure=measured,
            )
            # One psum of the whole tree: XLA makes a single all-reduce of it.
            total = pure.to_reduce(sums)
            if self.layout.num_replicas > 1:
                total = jax.lax.psum(total, DATA_AXIS)
            total = pure.from_reduced(total, sums)
            previous = extra if kind == "difference" else None
            state, metrics = pure.update(
                self.problem, state, total, measure=measured, previous=previous
            )
            vector = jnp.stack([metrics[name] for name in sorted(metrics)])
            if kind == "remember":
                return state, vector, pure.remember(total, metrics)
            return state, vector

        return self._replicas_map(body, (WHOLE, ROWS if after else WHOLE, ROWS, ROWS, ROWS), WHOLE)

    def _fused_spec(self, kind: str, size: int):
        state = self.abstract_state()
        replica, batch, mask = self.abstract_batch(size)
        run = self._fused(kind)
        whole = self.layout.replicated
        if kind == "after":
            # The sums are not donated: no output has their shape.
            return run, (0,), (state, self._abstract_sums(size), replica, batch, mask), whole
        if kind == "difference":
            return run, (0,), (state, self._abstract_previous(), replica, batch, mask), whole
        alone = lambda s, r, b, m: run(s, (), r, b, m)  # noqa: E731
        return alone, (0,), (state, replica, batch, mask), whole

    def _make_step(self, size: int):
        return self._fused_spec("plain", size)

    def _make_step_measured(self, size: int):
        return self._fused_spec("measured", size)

    def _make_step_remember(self, size: int):
        return self._fused_spec("remember", size)

    def _make_step_difference(self, size: int):
        return self._fused_spec("difference", size)

    def _make_step_after(self, size: int):
        return self._fused_spec("after", size)

    def _make_pack(self, size: int):
        def body(sums, control):
            tree = pure.to_reduce(jax.tree.map(lambda x: x[0], sums), control[0])
            return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])[None]

        control = jax.ShapeDtypeStruct(
            (self.layout.num_replicas, self._control_size),
            jnp.float32,
            sharding=self.layout.batch_sharding,
        )
        run = self._replicas_map(body, (ROWS, ROWS), ROWS)
        return run, (), (self._abstract_sums(1), control), self.layout.batch_sharding

    def _make_reduce(self, size: int):
        mesh = self.layout.mesh if self.world is None else self.world
        run = jax.shard_map(
            lambda x: jax.lax.psum(x[0], DATA_AXIS),
            mesh=mesh,
            in_specs=ROWS,
            out_specs=WHOLE,
            check_vma=False,
        )
        flat = jax.ShapeDtypeStruct(
            (mesh.size, self._flat_size()), jnp.float32, sharding=NamedSharding(mesh, ROWS)
        )
        return run, (), (flat,), NamedSharding(mesh, WHOLE)

    def _make_update(self, size: int):
        tree = self._reduced_tree()
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
                model_state=own,
            )
            whole = pure.from_reduced(total, template)
            state, metrics = pure.update(self.problem, state, whole, measure=True)
            vector = jnp.stack([metrics[name] for name in sorted(metrics)])
            return state, jnp.concatenate([vector, total["control"]])

        whole = self.layout.replicated
        flat = jax.ShapeDtypeStruct((self._flat_size(),), jnp.float32, sharding=whole)
        arguments = (self.abstract_state(), flat, self._abstract_sums(1).model_state)
        run = self._replicas_map(body, (WHOLE, WHOLE, ROWS), WHOLE)
        return run, (0,), arguments, whole

    # -- abstract values -------------------------------------------------------------------------

    def placed(self, tree: PyTree, sharding: NamedSharding) -> PyTree:
        """Abstract values with a sharding."""
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )

    def batch_of(self, num_samples: int) -> PyTree:
        """An abstract batch of so many samples, anywhere."""
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((num_samples, *s.shape), s.dtype), self.sample
        )

    def abstract_batch(self, size: int):
        """(replica indices, batch, mask) of one micro-batch on every replica of this process."""
        rows = self.layout.num_replicas
        sharding = self.layout.batch_sharding
        return (
            jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=sharding),
            self.placed(self.batch_of(rows * size), sharding),
            jax.ShapeDtypeStruct((rows * size,), jnp.float32, sharding=sharding),
        )

    def _abstract_args(self, size: int):
        state = self.abstract_state()
        params, scale = jax.eval_shape(self._make_begin(0)[0], state.params, state.opt_state)
        params = state.params if self.problem.compute_dtype is None else params
        whole = self.layout.replicated
        return (
            self.placed(params, whole),
            self.placed(scale, whole),
            state.model_state,
            state.key,
            state.step,
            *self.abstract_batch(size),
        )

    def _abstract_local(self, size: int):
        """The arguments of `_one_replica` for a single replica, without shardings."""
        params, scale, model_state, key, step, *_ = self._abstract_args(size)
        replica = jax.ShapeDtypeStruct((), jnp.int32)
        mask = jax.ShapeDtypeStruct((size,), jnp.float32)
        plain = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype),
            (params, scale, model_state, key, step),
        )
        return (*plain, replica, self.batch_of(size), mask, None)

    def _abstract_sums(self, size: int) -> Sums:
        sums = jax.eval_shape(self._one_replica, *self._abstract_local(size))
        rows = self.layout.num_replicas
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(
                (rows, *s.shape), s.dtype, sharding=self.layout.batch_sharding
            ),
            sums,
        )

    def _abstract_previous(self) -> Previous:
        kept, _ = split(self.state.params, self.problem.mask(self.state.params))
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        grads = jax.tree.map(lambda k: jax.ShapeDtypeStruct(k.shape, jnp.float32), kept)
        previous = Previous(grads=grads, weight=scalar, num_samples=scalar)
        return self.placed(previous, self.layout.replicated)

    def _reduced_tree(self) -> PyTree:
        sums = jax.eval_shape(self._one_replica, *self._abstract_local(1))
        control = jax.ShapeDtypeStruct((self._control_size,), jnp.float32)
        return jax.eval_shape(pure.to_reduce, sums, control)

    def _flat_size(self) -> int:
        return int(sum(leaf.size for leaf in jax.tree.leaves(self._reduced_tree())))
