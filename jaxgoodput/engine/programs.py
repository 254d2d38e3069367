"""The programs of an engine: for each, a pure function, what it donates, and abstract arguments.

`accumulate` adds a micro-batch; `step` is the fused step of one micro-batch, whose `Noise` says what it
measures; `step_after` fuses the last of several micro-batches with the update. These are made for
micro-batches of one shape. Without a shape: `init`, `begin`, `zeros` (a throw-away state), `reduce`,
`spread` (reduced sums back in partial form) and `update`.

A replica's part of a step is manual over the replica axes, so that gradients stay its own; "tensor" is
left to the compiler, and so is the update, which sees whole values whatever the layout.
"""

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.fsdp_parts import FsdpParts
from jaxgoodput.engine.noise_groups import noise_groups
from jaxgoodput.engine.state import Previous, StepMetrics, Sums, TrainState, cast, split
from jaxgoodput.optim import noise as noises
from jaxgoodput.parallel import partition as rules
from jaxgoodput.parallel.gather import Collectives, manual
from jaxgoodput.parallel.strategy import DATA_AXIS, REPLICA_AXES, Layout

ROWS = PartitionSpec(REPLICA_AXES)
WHOLE = PartitionSpec()


class Noise(enum.Enum):
    """What a fused step of one micro-batch says of the gradient noise."""

    OFF = enum.auto()
    """Nothing; it saves a pass over the gradient."""
    MEASURED = enum.auto()
    """A noise sample of the groups of this batch, two or more."""
    REMEMBER = enum.auto()
    """Of a single group, the first of two steps that make a sample: it returns the gradient, uncopied."""
    DIFFERENCE = enum.auto()
    """The second of them: a sample of this gradient and the one before."""


@dataclass(frozen=True)
class SampleShape:
    """What a micro-batch looks like: samples per replica, and the shapes and types of one sample.

    >>> SampleShape.of(np.zeros((28, 28)), micro_batch_size=4).batch(8).shape
    (8, 28, 28)
    """

    micro_batch_size: int
    """Samples per replica."""
    structure: Hashable
    """Of one sample."""
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]
    """Shape and type of each leaf of one sample."""

    @classmethod
    def of(cls, sample: PyTree, *, micro_batch_size: int) -> "SampleShape":
        """Of a sample without a batch axis, arrays or abstract."""
        leaves, structure = jax.tree.flatten(sample)
        return cls(micro_batch_size, structure, tuple((tuple(x.shape), x.dtype) for x in leaves))

    @classmethod
    def of_batch(cls, batch: PyTree, *, micro_batch_size: int) -> "SampleShape":
        """Of a batch, whose leaves have a leading axis."""
        leaves, structure = jax.tree.flatten(batch)
        found = tuple((tuple(x.shape[1:]), x.dtype) for x in leaves)
        return cls(micro_batch_size, structure, found)

    def batch(self, num_samples: int) -> PyTree:
        """An abstract batch of so many samples, anywhere."""
        made = [jax.ShapeDtypeStruct((num_samples, *shape), dtype) for shape, dtype in self.leaves]
        return jax.tree.unflatten(self.structure, made)


@dataclass(frozen=True)
class Program:
    """What `jax.jit` needs to know to compile an executable ahead."""

    function: Callable[..., PyTree]
    """Pure."""
    donate: tuple[int, ...]
    """Positions of arguments that it takes over."""
    arguments: tuple[PyTree, ...]
    """Abstract, with shardings."""
    out: PyTree
    """Shardings, a prefix of the results."""

    def compile(self) -> jax.stages.Compiled:
        """The executable, compiled on this thread."""
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out)
        return jitted.trace(*self.arguments).lower().compile()


class Programs:
    """The programs of one problem on one layout; holds no executables and no device values.

    `state` is the problem's abstract state. `shape` is that of the micro-batches which what has no shape
    of its own is made for.
    """

    def __init__(
        self, problem: pure.Problem, layout: Layout, *, state: TrainState, shape: SampleShape
    ):
        self.problem = problem
        self.layout = layout
        self.shape = shape
        self.state = state
        self.param_specs = rules.param_specs(layout, state.params, pure.own_specs(problem))
        self.noise_groups = noise_groups(layout.strategy, preconditioned=problem.preconditioned)
        self._collectives = Collectives(layout.strategy)
        kept, rest = split(state.params, problem.mask(state.params))
        self._kept = kept
        self._kept_specs = self.param_specs.specs(kept)
        self._rest_specs = self.param_specs.specs(rest)

    @property
    def has_begin(self) -> bool:
        """Whether beginning a batch computes anything."""
        return self.problem.compute_dtype is not None or self.problem.preconditioned

    @property
    def aux_names(self) -> tuple[str, ...]:
        """Names of the user's own numbers, which tell apart what a step's metrics pack."""
        return tuple(self._local_sums.aux)

    # -- values and where they lie ---------------------------------------------------------------

    def abstract_state(self) -> TrainState:
        """The state's shapes and types, with this layout's shardings."""
        return self.param_specs.placed(self.state)

    @cached_property
    def abstract_work(self) -> tuple[PyTree, ...]:
        """(params, scale, model_state, key, step) of a batch that has begun, with shardings."""
        state = self.abstract_state()
        params, scale = jax.eval_shape(self._begin, self.state.params, self.state.opt_state)
        params = state.params if params == () else self.param_specs.placed(params)
        return params, self.param_specs.placed(scale), state.model_state, state.key, state.step

    def abstract_batch(self, shape: SampleShape) -> tuple[PyTree, PyTree, PyTree]:
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
        return whole.with_grads(self.param_specs.placed(sums.grads))

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
        return rows.with_grads(grads)

    def placed(self, tree: PyTree, sharding: NamedSharding) -> PyTree:
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

    def _replicas_map(
        self, function: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., PyTree]:
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            # "tensor" is the compiler's, unless it cuts nothing.
            axis_names=set(REPLICA_AXES) if self.layout.strategy.tensor > 1 else set(),
            check_vma=False,  # gradients stay local, and users' scans need no `pcast`
        )

    def _work_specs(self) -> tuple[PyTree, ...]:
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
        return rest.with_grads(grads)

    def _one_replica(
        self,
        begun: Sequence[PyTree],
        replica: Array,
        batch: PyTree,
        mask: Array,
        old: Sums | None,
        *,
        measure: bool = True,
    ) -> Sums:
        """A replica's sums after one more micro-batch; `begun` is as in `abstract_work`."""
        params, scale, model_state, key, step = begun
        # One stream of random numbers per (step, replica, micro-batch).
        count = 0 if old is None else old.calls
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), replica), count)
        state = model_state if old is None else old.model_state
        parts = None
        if self.layout.strategy.fsdp > 1:
            parts = FsdpParts(
                self._collectives,
                (self._kept_specs, self._rest_specs),
                taps=self.noise_groups.group == "replica",
            )
        new = pure.local_sums(
            self.problem, params, scale, state, batch, mask, key, measure=measure, parts=parts
        )
        return new if old is None else old.merged(new)

    def _total(self, sums: Sums) -> Sums:
        """The whole batch, from one replica's sums; the collectives of a step."""

        def add_others(tree: PyTree) -> PyTree:
            return self._collectives.sum(tree, jax.tree.map(lambda _: WHOLE, tree), REPLICA_AXES)

        return sums.reduced(
            lambda grads: self._collectives.sum(grads, self._kept_specs, (DATA_AXIS,)), add_others
        )

    # -- programs without a shape ----------------------------------------------------------------

    def init(self) -> Program:
        """A fresh state, from a key."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.layout.replicated)
        out = _shardings(self.abstract_state())
        return Program(lambda k: pure.init_state(self.problem, k), (), (key,), out)

    def zeros(self) -> Program:
        """A throw-away state."""

        def zero(s: jax.ShapeDtypeStruct) -> Array:
            if jnp.issubdtype(s.dtype, jax.dtypes.prng_key):
                return jnp.broadcast_to(jax.random.key(0), s.shape)
            return jnp.zeros(s.shape, s.dtype)

        out = _shardings(self.abstract_state())
        return Program(lambda: jax.tree.map(zero, self.state), (), (), out)

    def begin(self) -> Program:
        """(params, scale) of a batch, from (params, opt_state); () for the masters themselves."""
        state, (params, scale, *_) = self.abstract_state(), self.abstract_work
        out = (() if self.problem.compute_dtype is None else params, scale)
        return Program(self._begin, (), (state.params, state.opt_state), _shardings(out))

    def reduce(self) -> Program:
        """The sums of the whole batch, from those of the replicas; nothing is donated."""
        run = self._replicas_map(
            lambda sums: self._total(_first_row(sums)),
            (self._sums_specs(partial=True),),
            self._sums_specs(partial=False),
        )
        return Program(run, (), (self.partial_sums(),), _shardings(self.reduced_sums()))

    def spread(self) -> Program:
        """Reduced sums in partial form, so that a batch goes on from them."""

        def body(sums: Sums) -> Sums:
            replica = jax.lax.axis_index(REPLICA_AXES)
            part = sums.part_of(
                replica,
                self.layout.num_replicas,
                holds_rest=replica == 0,
                holds_grads=jax.lax.axis_index(DATA_AXIS) == 0,
            )
            return _as_row(part)

        run = self._replicas_map(
            body, (self._sums_specs(partial=False),), self._sums_specs(partial=True)
        )
        return Program(run, (), (self.reduced_sums(),), _shardings(self.partial_sums()))

    def update(self) -> Program:
        """(state, packed metrics), from (state, reduced sums); donates the state."""
        state = self.abstract_state()

        def run(state: TrainState, total: Sums) -> tuple[TrainState, Array]:
            state, metrics = self._update(state, total, measure=True)
            return state, metrics.packed()

        out = (_shardings(state), self.layout.replicated)
        return Program(run, (0,), (state, self.reduced_sums()), out)

    def _begin(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        # Nothing for the masters themselves: an output would be a copy of them.
        dtype = self.problem.compute_dtype
        return () if dtype is None else cast(params, dtype), self._scale(params, opt_state)

    def _scale(self, params: PyTree, opt_state: PyTree) -> PyTree:
        if not self.problem.preconditioned:
            return ()
        kept, _ = split(params, self.problem.mask(params))
        return noises.preconditioner(opt_state, kept)

    def _update(
        self, state: TrainState, total: Sums, *, measure: bool, previous: Previous | None = None
    ) -> tuple[TrainState, StepMetrics[Array]]:
        shardings = _shardings(self.param_specs.placed(total.grads))
        grads = jax.lax.with_sharding_constraint(total.grads, shardings)
        return pure.update(
            self.problem,
            state,
            total.with_grads(grads),
            measure=measure,
            previous=previous,
            cut=self.layout.strategy.is_cut,
        )

    # -- programs for micro-batches of a shape ---------------------------------------------------

    def accumulate(self, shape: SampleShape, *, first: bool) -> Program:
        """Sums with one more micro-batch, in partial form; the old ones are donated.

        From what `abstract_work` and `abstract_batch` say and, but for the `first`, the old sums.
        """

        def body(*arguments: PyTree) -> Sums:
            begun, (replica, batch, mask, *old) = arguments[:5], arguments[5:]
            before = _first_row(old[0]) if old else None
            return _as_row(self._one_replica(begun, replica[0], batch, mask, before))

        sums, sums_specs = self.partial_sums(), self._sums_specs(partial=True)
        specs = (*self._work_specs(), ROWS, ROWS, ROWS)
        arguments = (*self.abstract_work, *self.abstract_batch(shape))
        if first:
            return Program(
                self._replicas_map(body, specs, sums_specs), (), arguments, _shardings(sums)
            )
        run = self._replicas_map(body, (*specs, sums_specs), sums_specs)
        return Program(run, (len(arguments),), (*arguments, sums), _shardings(sums))

    def step(self, shape: SampleShape, *, noise: Noise) -> Program:
        """A whole step of one micro-batch, from (state, replica indices, batch, mask); donates the state.

        Returns (state, packed metrics). REMEMBER returns a `Previous` besides, which DIFFERENCE takes
        after the state.
        """
        state, inputs = self.abstract_state(), self.abstract_batch(shape)
        out = (_shardings(state), self.layout.replicated)
        measure = noise is Noise.MEASURED
        if noise is Noise.DIFFERENCE:

            def second(state: TrainState, previous: Previous, *inputs: PyTree):
                total = self._fused(state, inputs, None, measure=False)
                state, metrics = self._update(state, total, measure=False, previous=previous)
                return state, metrics.packed()

            return Program(second, (0,), (state, self._abstract_previous(), *inputs), out)

        def run(state: TrainState, *inputs: PyTree):
            total = self._fused(state, inputs, None, measure=measure)
            state, metrics = self._update(state, total, measure=measure)
            if noise is Noise.REMEMBER:
                return state, metrics.packed(), pure.remember(total, metrics.is_finite)
            return state, metrics.packed()

        if noise is Noise.REMEMBER:
            out = (*out, _shardings(self._abstract_previous()))
        return Program(run, (0,), (state, *inputs), out)

    def step_after(self, shape: SampleShape) -> Program:
        """The last of several micro-batches and the update, from (state, sums so far, replica indices,
        batch, mask) to (state, packed metrics); donates the state.
        """
        state = self.abstract_state()

        def run(state: TrainState, sums: Sums, *inputs: PyTree):
            total = self._fused(state, inputs, sums, measure=True)
            state, metrics = self._update(state, total, measure=True)
            return state, metrics.packed()

        # The sums are not donated: no output has their shape.
        arguments = (state, self.partial_sums(), *self.abstract_batch(shape))
        return Program(run, (0,), arguments, (_shardings(state), self.layout.replicated))

    def _fused(
        self, state: TrainState, inputs: Sequence[PyTree], sums: Sums | None, *, measure: bool
    ) -> Sums:
        """The whole batch, of `sums` so far and the last micro-batch."""

        def body(*arguments: PyTree) -> Sums:
            begun, (replica, batch, mask, *old) = arguments[:5], arguments[5:]
            before = _first_row(old[0]) if old else None
            return self._total(
                self._one_replica(begun, replica[0], batch, mask, before, measure=measure)
            )

        params, scale, *others = self._work_specs()
        specs = (params, scale if measure else (), *others, ROWS, ROWS, ROWS)
        begun = (
            cast(state.params, self.problem.compute_dtype),
            self._scale(state.params, state.opt_state) if measure else (),
            state.model_state,
            state.key,
            state.step,
        )
        old, old_specs = ((), ()) if sums is None else ((sums,), (self._sums_specs(partial=True),))
        run = self._replicas_map(body, (*specs, *old_specs), self._sums_specs(partial=False))
        return run(*begun, *inputs, *old)

    def _abstract_previous(self) -> Previous:
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.layout.replicated)
        grads = self.param_specs.placed(
            jax.tree.map(lambda k: jax.ShapeDtypeStruct(k.shape, jnp.float32), self._kept)
        )
        return Previous(grads=grads, weight=scalar, num_samples=scalar)


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, tree)


def _first_row(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: x[0], sums)


def _as_row(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], sums)
