"""How each executable of an engine is made: a pure function, what it donates, and abstract arguments.

Roles, by the shape of a micro-batch: `first` and `more` accumulate. The fused steps are `step` (no
statistics), `step_measured` (several groups), `step_remember` and `step_difference` (one group: two steps
make a noise sample, and neither has to copy a gradient), and `step_after` (the last of several
micro-batches). Without a shape: `init`, `begin`, `zeros` (a throw-away state), `reduce`, `spread` (reduced
sums back in partial form) and `update`.

A replica's part of a step is manual over the replica axes, so that gradients stay its own; "tensor" is
left to the compiler, and so is the update, which sees whole values whatever the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.noise_groups import estimator
from jaxgoodput.engine.parts import FsdpParts
from jaxgoodput.engine.state import Previous, Sums, TrainState, cast, split
from jaxgoodput.optim import noise
from jaxgoodput.parallel import partition as rules
from jaxgoodput.parallel.gather import Collectives, manual
from jaxgoodput.parallel.strategy import DATA_AXIS, REPLICA_AXES, Layout

ROWS = PartitionSpec(REPLICA_AXES)
WHOLE = PartitionSpec()


@dataclass(frozen=True)
class Shape:
    """What a micro-batch looks like: samples per replica, and the shapes and types of one sample."""

    micro_batch_size: int
    structure: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, micro_batch_size: int, sample: PyTree) -> "Shape":
        """Of a sample without a batch axis, arrays or abstract."""
        leaves, structure = jax.tree.flatten(sample)
        return cls(micro_batch_size, structure, tuple((tuple(x.shape), x.dtype) for x in leaves))

    @classmethod
    def of_batch(cls, micro_batch_size: int, batch: PyTree) -> "Shape":
        """Of a batch, whose leaves have a leading axis."""
        leaves, structure = jax.tree.flatten(batch)
        return cls(
            micro_batch_size, structure, tuple((tuple(x.shape[1:]), x.dtype) for x in leaves)
        )

    def batch(self, num_samples: int) -> PyTree:
        """An abstract batch of so many samples, anywhere."""
        made = [jax.ShapeDtypeStruct((num_samples, *shape), dtype) for shape, dtype in self.leaves]
        return jax.tree.unflatten(self.structure, made)


@dataclass(frozen=True)
class Recipe:
    """What `jax.jit` needs to know to compile an executable ahead."""

    function: Callable[..., Any]
    donate: tuple[int, ...]
    arguments: tuple[Any, ...]  # abstract
    out: PyTree  # shardings, a prefix of the results

    def compile(self) -> Any:
        """The executable, compiled on this thread."""
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out)
        return jitted.trace(*self.arguments).lower().compile()


class Recipes:
    """The recipes of one problem on one layout; holds no executables and no device values.

    `shape` is that of the micro-batches which what has no shape of its own is made for.
    """

    def __init__(self, problem: pure.Problem, layout: Layout, shape: Shape):
        self.problem = problem
        self.layout = layout
        self.shape = shape
        self.state = jax.eval_shape(lambda: pure.init_state(problem, jax.random.key(0)))
        self.param_specs = rules.param_specs(layout, self.state.params, pure.own_specs(problem))
        self.estimator = estimator(layout.strategy, preconditioned=problem.preconditioned)
        self._collectives = Collectives(layout.strategy)
        kept, rest = split(self.state.params, problem.mask(self.state.params))
        self._kept = kept
        self._kept_specs = self.param_specs.specs(kept)
        self._rest_specs = self.param_specs.specs(rest)

    def recipe(self, role: str, shape: Shape | None) -> Recipe:
        """The recipe of a role for micro-batches of `shape` (None where it has none)."""
        return Recipe(*getattr(self, f"_make_{role}")(*(() if shape is None else (shape,))))

    @property
    def has_begin(self) -> bool:
        """Whether beginning a batch computes anything."""
        return self.problem.compute_dtype is not None or self.problem.preconditioned

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the entries of the metrics vector, in order."""
        _, metrics = jax.eval_shape(
            lambda s, t: pure.update(self.problem, s, t, measure=False),
            self.state,
            self.reduced_sums(),
        )
        return tuple(sorted(metrics))

    # -- values and where they lie ---------------------------------------------------------------

    def abstract_state(self) -> TrainState:
        """The state's shapes and types, with this layout's shardings."""
        return self.param_specs.placed(self.state)

    @cached_property
    def abstract_work(self) -> tuple[Any, ...]:
        """(params, scale, model_state, key, step) of a batch that has begun, with shardings."""
        state = self.abstract_state()
        params, scale = jax.eval_shape(self._begin, self.state.params, self.state.opt_state)
        params = state.params if params == () else self.param_specs.placed(params)
        return params, self.param_specs.placed(scale), state.model_state, state.key, state.step

    def abstract_batch(self, shape: Shape) -> tuple[Any, Any, Any]:
        """(replica indices, batch, mask) of one micro-batch on every replica."""
        replicas, sharding = self.layout.num_replicas, self.layout.batch_sharding
        rows = replicas * shape.micro_batch_size
        return (
            jax.ShapeDtypeStruct((replicas,), jnp.int32, sharding=sharding),
            self.placed(shape.batch(rows), sharding),
            jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=sharding),
        )

    def reduced_sums(self) -> Sums:
        """The sums of a whole batch, abstract, with this layout's shardings."""
        sums = self._local_sums
        whole = self.placed(sums, self.layout.replicated)
        return _with_grads(whole, self.param_specs.placed(sums.grads))

    def partial_sums(self) -> Sums:
        """Sums in partial form, abstract, with shardings: see `Sums`."""
        sums, replicas = self._local_sums, self.layout.num_replicas
        rows = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(
                (replicas, *s.shape), s.dtype, sharding=self.layout.batch_sharding
            ),
            sums,
        )
        grads = jax.tree.map(
            lambda s, spec: jax.ShapeDtypeStruct(
                (self.layout.strategy.data, *s.shape),
                s.dtype,
                sharding=self.layout.sharding(PartitionSpec(DATA_AXIS, *spec)),
            ),
            sums.grads,
            self._kept_specs,
        )
        return _with_grads(rows, grads)

    def placed(self, tree: PyTree, sharding: Any) -> PyTree:
        """Abstract values with a sharding."""
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )

    @cached_property
    def _local_sums(self) -> Sums:
        """One replica's sums as whole values, abstract, without shardings."""
        params, scale, model_state, key, step = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), self.abstract_work
        )
        del key, step
        return jax.eval_shape(
            lambda p, s, m, b, w: pure.local_sums(
                self.problem, p, s, m, b, w, jax.random.key(0), measure=True
            ),
            params,
            scale,
            model_state,
            self.shape.batch(1),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        )

    # -- a replica's part ------------------------------------------------------------------------

    def _replicas_map(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            # "tensor" is the compiler's, unless it cuts nothing.
            axis_names=set(REPLICA_AXES) if self.layout.strategy.tensor > 1 else set(),
            check_vma=False,  # gradients stay local, and users' scans need no `pcast`
        )

    def _work_specs(self) -> tuple[Any, ...]:
        """Manual specs of (params, scale, model_state, key, step)."""
        params, scale, *_ = self.abstract_work
        specs = [jax.tree.map(lambda x: manual(x.sharding.spec), tree) for tree in (params, scale)]
        return (*specs, WHOLE, WHOLE, WHOLE)

    def _sums_specs(self, *, partial: bool) -> Sums:
        """Manual specs of sums, in partial form or reduced."""
        sums = self._local_sums
        lead = (DATA_AXIS,) if partial else ()
        grads = jax.tree.map(lambda spec: PartitionSpec(*lead, *manual(spec)), self._kept_specs)
        rest = jax.tree.map(lambda _: ROWS if partial else WHOLE, sums)
        return _with_grads(rest, grads)

    def _one_replica(
        self, params, scale, model_state, key, step, replica, batch, mask, old, *, measure=True
    ) -> Sums:
        # One stream of random numbers per (step, replica, micro-batch).
        count = 0 if old is None else old.calls
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), replica), count)
        state = model_state if old is None else old.model_state
        parts = None
        if self.layout.strategy.fsdp > 1:
            parts = FsdpParts(
                self._collectives,
                (self._kept_specs, self._rest_specs),
                taps=self.estimator.group == "replica",
            )
        new = pure.local_sums(
            self.problem, params, scale, state, batch, mask, key, measure=measure, parts=parts
        )
        return new if old is None else pure.merge(old, new)

    def _total(self, sums: Sums) -> Sums:
        """The whole batch, from one replica's sums; the collectives of a step."""
        tree = pure.to_reduce(sums)
        grads = self._collectives.sum(tree.pop("grads"), self._kept_specs, (DATA_AXIS,))
        others = self._collectives.sum(tree, jax.tree.map(lambda _: WHOLE, tree), REPLICA_AXES)
        return pure.from_reduced({**others, "grads": grads}, sums)

    # -- recipes ---------------------------------------------------------------------------------

    def _begin(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        # Nothing for the masters themselves: an output would be a copy of them.
        dtype = self.problem.compute_dtype
        return () if dtype is None else cast(params, dtype), self._scale(params, opt_state)

    def _scale(self, params: PyTree, opt_state: PyTree) -> PyTree:
        if not self.problem.preconditioned:
            return ()
        kept, _ = split(params, self.problem.mask(params))
        return noise.preconditioner(opt_state, kept)

    def _make_begin(self):
        state, (params, scale, *_) = self.abstract_state(), self.abstract_work
        out = (() if self.problem.compute_dtype is None else params, scale)
        return self._begin, (), (state.params, state.opt_state), _shardings(out)

    def _make_init(self):
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.layout.replicated)
        out = _shardings(self.abstract_state())
        return lambda k: pure.init_state(self.problem, k), (), (key,), out

    def _make_zeros(self):
        def zero(s):
            if jnp.issubdtype(s.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), s.shape)
            return jnp.zeros(s.shape, s.dtype)

        out = _shardings(self.abstract_state())
        return lambda: jax.tree.map(zero, self.state), (), (), out

    def _accumulate(self, with_old: bool):
        def body(params, scale, model_state, key, step, replica, batch, mask, *old):
            before = _first_row(old[0]) if old else None
            sums = self._one_replica(
                params, scale, model_state, key, step, replica[0], batch, mask, before
            )
            return _as_row(sums)

        sums = self._sums_specs(partial=True)
        specs = (*self._work_specs(), ROWS, ROWS, ROWS, *((sums,) if with_old else ()))
        return self._replicas_map(body, specs, sums)

    def _make_first(self, shape: Shape):
        arguments = (*self.abstract_work, *self.abstract_batch(shape))
        return self._accumulate(False), (), arguments, _shardings(self.partial_sums())

    def _make_more(self, shape: Shape):
        old = self.partial_sums()
        arguments = (*self.abstract_work, *self.abstract_batch(shape), old)
        return self._accumulate(True), (8,), arguments, _shardings(old)

    def _fused(self, kind: str):
        measured, after = kind in ("measured", "after"), kind == "after"

        def body(params, scale, model_state, key, step, replica, batch, mask, *old):
            before = _first_row(old[0]) if old else None
            sums = self._one_replica(
                params,
                scale,
                model_state,
                key,
                step,
                replica[0],
                batch,
                mask,
                before,
                measure=measured,
            )
            return self._total(sums)

        def run(state: TrainState, extra: Any, replica: Any, batch: PyTree, mask: Any):
            scale = self._scale(state.params, state.opt_state) if measured else ()
            work_specs = self._work_specs()
            specs = (work_specs[0], work_specs[1] if measured else (), *work_specs[2:])
            old = (extra,) if after else ()
            old_specs = (self._sums_specs(partial=True),) if after else ()
            total = self._replicas_map(
                body, (*specs, ROWS, ROWS, ROWS, *old_specs), self._sums_specs(partial=False)
            )(
                cast(state.params, self.problem.compute_dtype),
                scale,
                state.model_state,
                state.key,
                state.step,
                replica,
                batch,
                mask,
                *old,
            )
            previous = extra if kind == "difference" else None
            state, metrics = self._update(state, total, measure=measured, previous=previous)
            if kind == "remember":
                # The metrics' own names are lost in the vector.
                finite = metrics[sorted(self.metric_names).index("finite")]
                return state, metrics, pure.remember(total, finite)
            return state, metrics

        return run

    def _update(self, state: TrainState, total: Sums, **how: Any):
        shardings = _shardings(self.param_specs.placed(total.grads))
        grads = jax.lax.with_sharding_constraint(total.grads, shardings)
        how["cut"] = self.layout.strategy.is_cut
        state, metrics = pure.update(self.problem, state, _with_grads(total, grads), **how)
        return state, jnp.stack([metrics[name] for name in sorted(metrics)])

    def _fused_recipe(self, kind: str, shape: Shape):
        state = self.abstract_state()
        inputs = self.abstract_batch(shape)
        run = self._fused(kind)
        out = (_shardings(state), self.layout.replicated)
        if kind == "after":
            # The sums are not donated: no output has their shape.
            return run, (0,), (state, self.partial_sums(), *inputs), out
        if kind == "difference":
            return run, (0,), (state, self._abstract_previous(), *inputs), out
        if kind == "remember":
            out = (*out, _shardings(self._abstract_previous()))
        alone = lambda s, r, b, m: run(s, (), r, b, m)  # noqa: E731
        return alone, (0,), (state, *inputs), out

    def _make_step(self, shape: Shape):
        return self._fused_recipe("plain", shape)

    def _make_step_measured(self, shape: Shape):
        return self._fused_recipe("measured", shape)

    def _make_step_remember(self, shape: Shape):
        return self._fused_recipe("remember", shape)

    def _make_step_difference(self, shape: Shape):
        return self._fused_recipe("difference", shape)

    def _make_step_after(self, shape: Shape):
        return self._fused_recipe("after", shape)

    def _make_reduce(self) -> tuple[Any, ...]:
        run = self._replicas_map(
            lambda sums: self._total(_first_row(sums)),
            (self._sums_specs(partial=True),),
            self._sums_specs(partial=False),
        )
        return run, (), (self.partial_sums(),), _shardings(self.reduced_sums())

    def _make_spread(self):
        def body(sums: Sums) -> Sums:
            first_copy = jax.lax.axis_index(DATA_AXIS) == 0
            replica, replicas = jax.lax.axis_index(REPLICA_AXES), self.layout.num_replicas
            first = replica == 0

            def one(x: Any, here: Any) -> Any:
                return jnp.where(here, x, jnp.zeros_like(x))

            spread = jax.tree.map(lambda x: one(x, first), sums)
            spread = _with_grads(spread, jax.tree.map(lambda x: one(x, first_copy), sums.grads))
            # Every replica goes on from the model state with its share of the weight, in whole samples,
            # and with new streams of random numbers.
            share = jnp.floor(sums.samples / replicas)
            share += replica < sums.samples - share * replicas
            kept = {"model_state": sums.model_state, "calls": sums.calls, "samples": share}
            return _as_row(Sums(**{**vars(spread), **kept}))

        run = self._replicas_map(
            body, (self._sums_specs(partial=False),), self._sums_specs(partial=True)
        )
        return run, (), (self.reduced_sums(),), _shardings(self.partial_sums())

    def _make_update(self) -> tuple[Any, ...]:
        state = self.abstract_state()
        run = lambda s, total: self._update(s, total, measure=True)  # noqa: E731
        return run, (0,), (state, self.reduced_sums()), (_shardings(state), self.layout.replicated)

    def _abstract_previous(self) -> Previous:
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.layout.replicated)
        grads = self.param_specs.placed(
            jax.tree.map(lambda k: jax.ShapeDtypeStruct(k.shape, jnp.float32), self._kept)
        )
        return Previous(grads=grads, weight=scalar, num_samples=scalar)


def _with_grads(sums: Sums, grads: PyTree) -> Sums:
    return Sums(**{**vars(sums), "grads": grads})


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, tree)


def _first_row(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: x[0], sums)


def _as_row(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], sums)
