"""The programs of an engine: for each, a pure function, what it donates, and abstract arguments.

`accumulate` adds a micro-batch; `step` is the fused step of one micro-batch, which measures the noise or does
not; `step_after` fuses the last of several micro-batches with the update. These are made for
micro-batches of one shape. Without a shape: `init`, `begin`, `zeros` (a throw-away state), `reduce`,
`spread` (reduced sums back in partial form) and `update`.

A loss runs in one of two ways. *separate* (`SeparatePrograms`): every replica holds the whole model and
computes a gradient of its own, so that `accumulate` needs no collective and a batch of one micro-batch has
a noise group per replica. *global* (`GlobalPrograms`): the loss of all rows of a micro-batch under plain
`jit` with the mesh set; the compiler cuts it as parameters and the model's own constraints say, and a
micro-batch is one noise group; a step of one that is to measure takes the gradient of a part of its rows
besides. The update sees whole values in both.
"""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from jaxgoodput._jax import set_priorities
from jaxgoodput.engine import step as pure
from jaxgoodput.engine.state import StepMetrics, Sums, TrainState, cast, split
from jaxgoodput.engine.traces import Traces
from jaxgoodput.optim.noise import leaf_groups
from jaxgoodput.parallel import partition as rules
from jaxgoodput.parallel.strategy import (
    DATA_AXIS,
    FSDP_AXIS,
    MODEL_AXES,
    UNCUT,
    Layout,
    anywhere,
    in_mesh,
)

T = TypeVar("T")

# The order in which the partitioner follows shardings: batches, then these. (Rows are cut over DATA_AXIS.)
PRIORITIES = {axis: 1 for axis in MODEL_AXES} | {FSDP_AXIS: 2}
ROWS = PartitionSpec(DATA_AXIS)
WHOLE = PartitionSpec()
# Rows of a replica that are compared with its others: so many, but no more than every fourth and no fewer
# than every sixteenth. Two groups of any sizes tell the noise equally well where gradients are normal, and a
# few rows cost little; fewer than these would be ruled by single wild samples.
PART_ROWS, STRIDES = 16, (4, 16)


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

    @cached_property
    def traced(self) -> jax.stages.Traced:
        """The program as JAX has traced it."""
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out)
        return jitted.trace(*self.arguments)

    def lower(self, platform: str | None = None) -> jax.stages.Lowered:
        """The program for the compiler, which is to follow the batch before it follows the parameters.

        Otherwise it may compute all samples on every device's part of the features, and sum activations,
        where it should gather a layer: 5 times the bytes, for a transformer on fsdp 8. `platform`, such as
        "cuda", is another than the devices': such a program can be looked at, but not compiled.
        """
        platforms = None if platform is None else (platform,)
        lowered = self.traced.lower(lowering_platforms=platforms)
        set_priorities(lowered, PRIORITIES, first=DATA_AXIS)
        return lowered

    def compile(self) -> jax.stages.Compiled:
        """The executable, compiled on this thread."""
        return self.lower().compile()


class Programs(abc.ABC):
    """The programs of one problem on one layout; holds no executables and no device values.

    `state` is the problem's abstract state. `shape` is that of the micro-batches which what has no shape
    of its own is made for. `control_size` numbers of each device are added up and ride behind the metrics
    of every fused step (0: one process decides alone). `traces` knows what functions of this very problem
    came to before.
    """

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        *,
        state: TrainState,
        shape: SampleShape,
        control_size: int = 0,
        traces: Traces | None = None,
    ):
        self.problem = problem
        self.layout = layout
        self.shape = shape
        self.state = state
        self.control_size = control_size
        self.param_specs = rules.param_specs(layout, state.params, pure.own_specs(problem))
        self._kept, _ = split(state.params, problem.mask(state.params))
        self._traces = traces
        # For shapes alone: one sample fills no pipeline.
        self._uncut_problem = problem
        self._couples = False  # whether samples of a micro-batch may not be computed apart

    @abc.abstractmethod
    def can_measure(self, micro_batch_size: int) -> bool:
        """Whether a batch of one micro-batch of so many samples per replica tells its noise."""

    @property
    def has_begin(self) -> bool:
        """Whether beginning a batch computes anything."""
        return self.problem.compute_dtype is not None or self.problem.preconditioned

    @property
    def aux_names(self) -> tuple[str, ...]:
        """Names of the user's own numbers, which tell apart what a step's metrics pack."""
        return tuple(self._local_sums.aux)

    @cached_property
    def param_groups(self) -> tuple[str, ...]:
        """The names of the groups of parameters whose noise is told apart."""
        return leaf_groups(self._kept)[0]

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

    def abstract_batch(self, shape: SampleShape) -> tuple[PyTree, ...]:
        """(batch, mask) of one micro-batch on every replica, and what else `inputs` of it are."""
        sharding = self.layout.batch_sharding
        rows = self.layout.num_replicas * shape.micro_batch_size
        mask = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=sharding)
        return self.placed(shape.batch(rows), sharding), mask

    def abstract_control(self) -> tuple[PyTree, ...]:
        """The control vectors of all devices `[devices, control_size]`; nothing where there are none."""
        if not self.control_size:
            return ()
        shape = self.layout.num_devices, self.control_size
        return (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.layout.row_per_device),)

    def reduced_sums(self) -> Sums:
        """The sums of a whole batch, abstract, with this layout's shardings."""
        sums = self._local_sums
        whole = self.placed(sums, self.layout.replicated)
        return whole.with_grads(self.param_specs.placed(sums.grads))

    @abc.abstractmethod
    def partial_sums(self) -> Sums:
        """Sums as `accumulate` returns them, abstract, with shardings."""

    def placed(self, tree: PyTree, sharding: NamedSharding) -> PyTree:
        """Abstract values with a sharding."""
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )

    @cached_property
    def _local_sums(self) -> Sums:
        """The sums of one sample as whole values, abstract, without shardings."""
        problem = self._uncut_problem
        params, scale, model_state, key, step = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), self.abstract_work
        )
        del key, step

        def sums(p: PyTree, s: PyTree, m: PyTree, b: PyTree, w: Array) -> Sums:
            return pure.local_sums(problem, p, s, m, b, w, jax.random.key(0))

        return jax.eval_shape(
            lambda *arguments: self._traced("sums of one", sums, *arguments),
            params,
            scale,
            model_state,
            self.shape.batch(1),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        )

    @property
    def _swaps_products(self) -> bool:
        """Whether gradients of matrices are computed as XLA:CPU does it fast (`gradients.py`).

        Where the compiler cuts them, it is left alone.
        """
        return self._may_swap_products and self.layout.num_devices == 1

    @property
    def _may_swap_products(self) -> bool:
        on_cpu = self.layout.mesh.devices.flat[0].platform == "cpu"
        return self.problem.swaps_products and on_cpu

    # -- what the two ways differ in -------------------------------------------------------------

    @abc.abstractmethod
    def _accumulate(
        self, begun: Sequence[PyTree], inputs: Sequence[PyTree], old: Sums | None
    ) -> Sums:
        """Sums with one more micro-batch, as `partial_sums`; arguments are as in `abstract_work` and
        `abstract_batch`.
        """

    @abc.abstractmethod
    def _whole(
        self,
        begun: Sequence[PyTree],
        inputs: Sequence[PyTree],
        old: Sums | None,
        *,
        measure: bool,
    ) -> Sums:
        """The reduced sums of the whole batch: `old`, if any, and a last micro-batch."""

    def _merged(
        self,
        begun: Sequence[PyTree],
        replica: ArrayLike,
        batch: PyTree,
        mask: Array,
        old: Sums | None,
        *,
        measure: bool = True,
        blocks: int = 1,
        part: Array | None = None,
        alone: bool = False,
    ) -> Sums:
        """The sums after one more micro-batch, of one replica or of all; `alone` as in `local_sums`."""
        params, scale, model_state, key, step = begun
        # One stream of random numbers per (step, replica, micro-batch).
        count = 0 if old is None else old.calls
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), replica), count)
        how = {
            "measure": measure,
            "blocks": blocks,
            "alone": alone,
            "swaps": self._swaps_products,
        }

        def sums(*arguments: PyTree) -> Sums:
            *values, part = arguments
            return pure.local_sums(self.problem, *values, part=part, **how)

        before = model_state if old is None else old.model_state
        name = ("sums", *how.values())
        new = self._traced(name, sums, params, scale, before, batch, mask, key, part)
        return new if old is None else old.merged(new)

    def can_compare_rows(self, micro_batch_size: int) -> bool:
        """Whether the rows of one micro-batch tell its noise: some of them beside all."""
        if self.problem.from_norm_layers or self._is_cut_in_rows(micro_batch_size):
            return True
        return self._can_leave_out and self.layout.num_replicas * micro_batch_size > 1

    @cached_property
    def _can_leave_out(self) -> bool:
        rows = self.shape.batch(2)
        return pure.loss_kind(self._uncut_problem, self.state, rows, 2) == "sample"

    def _is_cut_in_rows(self, micro_batch_size: int) -> bool:
        """Whether a part of the rows is computed by itself, which costs least."""
        if self.layout.strategy.stage > 1:  # a pipeline needs rows for all its stages
            return False
        # A model with mutable state (BatchNorm) computes other things of other rows.
        coupled = self._couples or jax.tree.leaves(self.state.model_state)
        whole = coupled and self._can_leave_out
        return micro_batch_size > 1 and not whole

    def _some_of(self, batch: PyTree, mask: Array) -> tuple[tuple[PyTree, Array], Array | None]:
        """A part of the rows, the same of every replica: apart, or all of them and which of them count."""
        replicas = self.layout.num_replicas
        rows = len(mask) // replicas
        if not self._is_cut_in_rows(rows):
            return (batch, mask), (jnp.arange(len(mask)) % 2 == 0).astype(mask.dtype)
        stride = min(max(rows // PART_ROWS, STRIDES[0]), STRIDES[1])

        def some(x: Array) -> Array:  # a stride, because rows may come in some order
            part = x.reshape(replicas, rows, *x.shape[1:])[:, ::stride]
            return part.reshape(-1, *x.shape[1:])

        return jax.tree.map(some, (batch, mask)), None

    def _manual(
        self, function: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., PyTree]:
        """`function` of what each device holds, its collectives written out."""
        # Gradients stay local, and users' scans need no `pcast`.
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _traced(self, name: Hashable, function: Callable[..., T], *arguments: PyTree) -> T:
        """`function(*arguments)`, in a trace; `name` says which, among those of this problem and layout."""
        if self._traces is None:
            return function(*arguments)
        where = self.layout.strategy, self.layout.mesh.abstract_mesh
        return self._traces((name, where), function, *arguments)

    # -- programs without a shape ----------------------------------------------------------------

    def init(self, given: tuple[str, ...] = ()) -> Program:
        """A fresh state, from a key and the leaves that are `given`, taken over. See `init_state`."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.layout.replicated)
        state = self.abstract_state()
        leaves = rules.leaves_by_name(state.variables)
        # Its own constraints hold, whether or not it computes the loss with several devices.
        make = in_mesh(self.problem.init, self.layout.mesh.abstract_mesh, self.layout.strategy)
        problem = dataclasses.replace(self.problem, init=make)

        def run(key: Array, *values: Array) -> TrainState:
            return pure.init_state(problem, key, dict(zip(given, values, strict=True)))

        arguments = (key, *(leaves[name] for name in given))
        return Program(run, tuple(range(1, len(arguments))), arguments, _shardings(state))

    def average(self) -> Program:
        """The average of parameters, from those that it begins with."""
        state = self.abstract_state()
        run = partial(pure.first_average, self.problem)
        return Program(run, (), (state.params,), _shardings(state.ema))

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
        scale = self._traced("scale", self._scale, params, opt_state)
        return () if dtype is None else cast(params, dtype), scale

    def _scale(self, params: PyTree, opt_state: PyTree) -> PyTree:
        if not self.problem.preconditioned:
            return ()
        kept, _ = split(params, self.problem.mask(params))
        return self.problem.preconditioner(opt_state, kept)

    def _update(
        self, state: TrainState, total: Sums, *, measure: bool
    ) -> tuple[TrainState, StepMetrics[Array]]:
        update = partial(pure.update, self.problem, measure=measure)
        return self._traced(("update", measure), update, state, total)

    # -- programs for micro-batches of a shape ---------------------------------------------------

    def accumulate(self, shape: SampleShape, *, first: bool) -> Program:
        """Sums with one more micro-batch, as `partial_sums`; the old ones are donated.

        From what `abstract_work` and `abstract_batch` say and, but for the `first`, the old sums.
        """
        sums, fixed = self.partial_sums(), (*self.abstract_work, *self.abstract_batch(shape))

        def run(*arguments: PyTree) -> Sums:
            old = None if first else arguments[-1]
            return self._accumulate(arguments[:5], arguments[5 : len(fixed)], old)

        if first:
            return Program(run, (), fixed, _shardings(sums))
        return Program(run, (len(fixed),), (*fixed, sums), _shardings(sums))

    def step(self, shape: SampleShape, *, measure: bool) -> Program:
        """A whole step of one micro-batch, from (state, batch, mask, and control) to (state, packed
        metrics); donates the state. One that does not measure the noise saves a pass over the gradient.
        """

        def run(state: TrainState, *inputs: PyTree):
            total = self._fused(state, inputs, None, measure=measure)
            state, metrics = self._update(state, total, measure=measure)
            return state, self._packed(metrics, inputs)

        state = self.abstract_state()
        inputs = (*self.abstract_batch(shape), *self.abstract_control())
        return Program(run, (0,), (state, *inputs), self._out())

    def step_after(self, shape: SampleShape) -> Program:
        """The last of several micro-batches and the update, from (state, sums so far, batch, mask, and
        control) to (state, packed metrics); donates the state.
        """

        def run(state: TrainState, sums: Sums, *inputs: PyTree):
            total = self._fused(state, inputs, sums, measure=True)
            state, metrics = self._update(state, total, measure=True)
            return state, self._packed(metrics, inputs)

        # The sums are not donated: no output has their shape.
        inputs = (*self.abstract_batch(shape), *self.abstract_control())
        return Program(
            run, (0,), (self.abstract_state(), self.partial_sums(), *inputs), self._out()
        )

    def _out(self) -> tuple[PyTree, NamedSharding]:
        return _shardings(self.abstract_state()), self.layout.replicated

    def _fused(
        self, state: TrainState, inputs: Sequence[PyTree], sums: Sums | None, *, measure: bool
    ) -> Sums:
        """The whole batch, of `sums` so far and the last micro-batch."""
        params = cast(state.params, self.problem.compute_dtype)
        scale = self._scale(state.params, state.opt_state) if measure else ()
        begun = (params, scale, state.model_state, state.key, state.step)
        return self._whole(begun, self._split(inputs)[0], sums, measure=measure)

    def _split(self, inputs: Sequence[PyTree]) -> tuple[Sequence[PyTree], Sequence[Array]]:
        """What belongs to the batch, and the control vectors, if any."""
        end = len(inputs) - bool(self.control_size)
        return inputs[:end], inputs[end:]

    def _packed(self, metrics: StepMetrics[Array], inputs: Sequence[PyTree]) -> Array:
        """The metrics, and behind them the sum of all control vectors."""
        control = [jnp.sum(rows, axis=0) for rows in self._split(inputs)[1]]
        return jnp.concatenate([metrics.packed(), *control])


class GlobalPrograms(Programs):
    """The loss of all rows of a micro-batch, cut by the compiler; any layout, any number of processes.

    The loss is traced with the layout's mesh set and the strategy's logical names known, so that
    constraints inside the model hold under every layout. Sums are reduced from the first micro-batch on.
    Where the loss `couples` samples, all rows are computed together for the noise, too.
    """

    def __init__(
        self, problem: pure.Problem, layout: Layout, *, couples: bool = False, **kwargs: Any
    ):
        loss = in_mesh(problem.loss_and_state, layout.mesh.abstract_mesh, layout.strategy)
        super().__init__(dataclasses.replace(problem, loss_and_state=loss), layout, **kwargs)
        self._couples = couples
        uncut = in_mesh(problem.loss_and_state, UNCUT, layout.strategy)
        self._uncut_problem = dataclasses.replace(problem, loss_and_state=uncut)

    def can_measure(self, micro_batch_size: int) -> bool:
        """Whether there are two rows to compare, and the loss can leave some out where it has to."""
        return self.can_compare_rows(micro_batch_size)

    def partial_sums(self) -> Sums:
        """The reduced sums: there are no others."""
        return self.reduced_sums()

    def _accumulate(
        self, begun: Sequence[PyTree], inputs: Sequence[PyTree], old: Sums | None
    ) -> Sums:
        return self._all_rows(begun, inputs, old, measure=True)

    def _whole(
        self,
        begun: Sequence[PyTree],
        inputs: Sequence[PyTree],
        old: Sums | None,
        *,
        measure: bool,
    ) -> Sums:
        alone = old is None
        if not measure or old is not None or self.problem.from_norm_layers:
            return self._all_rows(begun, inputs, old, measure=measure, alone=alone)
        total = self._all_rows(begun, inputs, None, measure=False, alone=alone)
        part = self._part(begun, *inputs)
        return pure.in_two(self.problem, total, part, begun[1], cut=self.layout.strategy.is_cut)

    def _part(self, begun: Sequence[PyTree], batch: PyTree, mask: Array, *number: Array) -> Sums:
        """The sums of a part of the rows, the same of every replica."""
        some, part = self._some_of(batch, mask)
        return self._all_rows(begun, (*some, *number), None, measure=False, part=part, alone=True)

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
        batch, mask = inputs
        return self._merged(
            begun,
            0,
            batch,
            mask,
            old,
            measure=measure,
            blocks=self.layout.num_replicas,
            part=part,
            alone=alone,
        )


class SeparatePrograms(Programs):
    """A gradient for each replica, under pure data parallelism: manual over the copies of the model.

    Sums have a leading axis over the replicas until they are reduced (`spread` is the way back).
    """

    def can_measure(self, micro_batch_size: int) -> bool:
        """Whether there are several replicas, each a group."""
        return self.layout.num_replicas > 1

    @property
    def _swaps_products(self) -> bool:
        return self._may_swap_products  # every device computes products of its own

    def partial_sums(self) -> Sums:
        """A row for each replica."""
        replicas, sharding = self.layout.num_replicas, self.layout.batch_sharding
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((replicas, *s.shape), s.dtype, sharding=sharding),
            self._local_sums,
        )

    def reduce(self) -> Program:
        """The sums of the whole batch, from those of the replicas; nothing is donated."""
        run = self._manual(lambda sums: self._total(_first_row(sums)), (ROWS,), WHOLE)
        return Program(run, (), (self.partial_sums(),), _shardings(self.reduced_sums()))

    def spread(self) -> Program:
        """Reduced sums in partial form, so that a batch goes on from them."""

        def body(sums: Sums) -> Sums:
            replica = jax.lax.axis_index(DATA_AXIS)
            return _as_row(sums.part_of(replica, self.layout.num_replicas))

        run = self._manual(body, (WHOLE,), ROWS)
        return Program(run, (), (self.reduced_sums(),), _shardings(self.partial_sums()))

    def abstract_batch(self, shape: SampleShape) -> tuple[PyTree, ...]:
        """(batch, mask, the number of each replica among those of all processes)."""
        replicas, sharding = self.layout.num_replicas, self.layout.batch_sharding
        numbers = jax.ShapeDtypeStruct((replicas,), jnp.int32, sharding=sharding)
        return *super().abstract_batch(shape), numbers

    def _accumulate(
        self, begun: Sequence[PyTree], inputs: Sequence[PyTree], old: Sums | None
    ) -> Sums:
        def body(*arguments: PyTree) -> Sums:
            return _as_row(self._one_replica(*arguments))

        return self._on_replicas(body, begun, inputs, old, out=ROWS)

    def _whole(
        self,
        begun: Sequence[PyTree],
        inputs: Sequence[PyTree],
        old: Sums | None,
        *,
        measure: bool,
    ) -> Sums:
        def body(*arguments: PyTree) -> Sums:
            return self._total(self._one_replica(*arguments, measure=measure))

        return self._on_replicas(body, begun, inputs, old, out=WHOLE)

    def _on_replicas(
        self,
        body: Callable[..., Sums],
        begun: Sequence[PyTree],
        inputs: Sequence[PyTree],
        old: Sums | None,
        *,
        out: PartitionSpec,
    ) -> Sums:
        rows = (*inputs, *(() if old is None else (old,)))
        run = self._manual(body, (WHOLE, *(ROWS for _ in rows)), out)
        return run(tuple(begun), *rows)

    def _one_replica(
        self,
        begun: Sequence[PyTree],
        batch: PyTree,
        mask: Array,
        numbers: Array,
        *old: Sums,
        measure: bool = True,
    ) -> Sums:
        before = _first_row(old[0]) if old else None
        return self._merged(begun, numbers[0], batch, mask, before, measure=measure)

    def _total(self, sums: Sums) -> Sums:
        """The whole batch, from one replica's sums; the collectives of a step."""

        def add_others(tree: PyTree) -> PyTree:
            return jax.lax.psum(tree, DATA_AXIS) if self.layout.num_replicas > 1 else tree

        return sums.reduced(add_others, add_others)


def has_constraints(problem: pure.Problem, state: TrainState, shape: SampleShape) -> bool:
    """Whether the loss constrains how anything in it is cut; `state` is abstract."""
    loss = anywhere(problem.loss_and_state)
    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = shape.batch(shape.micro_batch_size)
    traced = jax.make_jaxpr(loss)(
        jax.eval_shape(lambda p: cast(p, problem.compute_dtype), state.params),
        state.model_state,
        batch,
        key,
    )

    def holds(jaxpr: Jaxpr) -> bool:
        return any(
            one.primitive.name == "sharding_constraint"
            or any(map(holds, jaxprs_in_params(one.params)))
            for one in jaxpr.eqns
        )

    return holds(traced.jaxpr)


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, tree)


def _first_row(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: x[0], sums)


def _as_row(sums: Sums) -> Sums:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], sums)
