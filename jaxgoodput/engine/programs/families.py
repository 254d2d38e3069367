"""Families of programs: how the loss of a micro-batch runs on a layout, and what a step makes of it."""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from jaxgoodput._jax import looks_for
from jaxgoodput.engine import step as pure
from jaxgoodput.engine.programs.blocks import BlockPrograms
from jaxgoodput.engine.programs.fresh import FreshStates
from jaxgoodput.engine.programs.keyless import Keyless
from jaxgoodput.engine.programs.program import Program, SampleShape, shardings_of
from jaxgoodput.engine.programs.row_comparison import RowComparison
from jaxgoodput.engine.state import StepMetrics, Sums, TrainState, cast, split
from jaxgoodput.engine.traces import Traces
from jaxgoodput.parallel import partition as rules
from jaxgoodput.parallel.strategy import DATA_AXIS, UNCUT, Layout, in_mesh

T = TypeVar("T")
Trees = Sequence[PyTree]

ROWS = PartitionSpec(DATA_AXIS)
WHOLE = PartitionSpec()
# Compiles a program, or returns the executable if there is one: `ProgramCache`.
Compile = Callable[[Callable[[], Program]], Callable[..., Any]]


class Programs(abc.ABC):
    """The programs of one problem on one layout. Holds no executables and no device values.

    `state` is the problem's abstract state. `shape` is any micro-batch shape of the run: programs without a
    shape of their own are traced with one sample of it. `control_size` numbers of each process are summed
    along with every step (0: one process decides alone). `couples` says that the samples of a micro-batch
    must be computed together. `traces` holds what this problem's functions were traced to before.
    """

    can_switch: ClassVar[bool] = True
    """Whether a state may move between several layouts of the job."""
    is_fused: ClassVar[bool] = True
    """Whether `step` and `step_after` may be used: nothing can fail between reducing and updating."""

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        *,
        state: TrainState,
        shape: SampleShape,
        control_size: int = 0,
        couples: bool = False,
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
        # Used to work out shapes alone: one sample fills no pipeline.
        self._uncut_problem = problem
        self._couples = couples

    @property
    def has_begin(self) -> bool:
        """Whether beginning a batch computes anything: parameters of another type, or a preconditioner."""
        return self.problem.compute_dtype is not None or self.problem.preconditioned

    @property
    def aux_names(self) -> tuple[str, ...]:
        """Names of the user's own numbers among a step's metrics, in packing order."""
        return *self._local_sums.aux, *self.problem.reported

    @cached_property
    def param_groups(self) -> tuple[str, ...]:
        """Names of the parameter groups whose noise is measured separately."""
        return self.problem.param_groups(self._kept)

    # -- what an engine asks of its family -------------------------------------------------------

    @property
    def num_groups(self) -> int:
        """Groups of devices that each hold a copy of everything, and whose sums are added up."""
        return 1

    @property
    def has_groups(self) -> bool:
        """Whether every batch gives a noise sample, because several groups have a part of it."""
        return False

    @abc.abstractmethod
    def can_measure(self, micro_batch_size: int) -> bool:
        """Return whether a batch of one micro-batch, of this size per replica, gives a noise sample."""

    @property
    def is_paced(self) -> bool:
        """Whether a program must end before the next one starts.

        XLA:CPU runs out of threads and hangs if many executables with collectives wait at once.
        """
        return False

    @cached_property
    def blocks(self) -> BlockPrograms:
        """The programs of several steps, of one micro-batch each."""

        def step(state: TrainState, rows: Trees) -> tuple[TrainState, Array]:
            total = self._fused(state, rows, None, measure=False)
            state, metrics = self._update(state, total, measure=False)
            return state, self._packed(metrics, rows)

        return BlockPrograms(
            self.layout,
            self.abstract_batch,
            keyless=lambda: self.keyless,
            step=step,
            num_numbers=lambda: StepMetrics.num_packed(self.aux_names, len(self.param_groups)),
        )

    def plain(self, shape: SampleShape) -> partial[Program]:
        """Return the program of a step of one micro-batch that measures nothing."""
        if self.blocks.loops(shape):
            return partial(self.blocks.steps, shape)
        return partial(self.step, shape, measure=False)

    def training(self, shape: SampleShape, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs without which this micro-batch shape cannot be used."""
        step = self.alone(shape)
        if not accumulate:
            return step
        adds = [partial(self.accumulate, shape, first=first) for first in (True, False)]
        return (*step, *adds, partial(self.step_after, shape))

    def alone(self, shape: SampleShape) -> tuple[partial[Program], ...]:
        """Return the programs of a step of one micro-batch that measures nothing."""
        more = (partial(self.blocks.widened, shape),) if self.blocks.loops(shape) else ()
        return (self.plain(shape), *more)

    def last(self, shape: SampleShape, *, alone: bool) -> tuple[partial[Program], ...]:
        """Return the programs of a last micro-batch with a shape of its own: `alone`, or after others."""
        return self.alone(shape) if alone else (partial(self.step_after, shape),)

    def measuring(self, shape: SampleShape) -> tuple[partial[Program], ...]:
        """Return the programs that measure the noise of a batch of one micro-batch.

        Batches of several micro-batches need none: each micro-batch is a noise group.
        """
        if not self.can_measure(shape.micro_batch_size):
            return ()
        more = (partial(self.blocks.narrowed, shape),) if self.blocks.loops(shape) else ()
        return (*more, partial(self.step, shape, measure=True))

    def ahead(self, shape: SampleShape, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs of this micro-batch shape that are compiled before the first step."""
        return (*self.training(shape, accumulate=accumulate), *self.measuring(shape))

    def shared(self, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs that do not depend on the micro-batch shape, such as the update."""
        return (partial(self.begin),) if self.has_begin and accumulate else ()

    def adding(self, shape: SampleShape, *, first: bool, measure: bool) -> partial[Program]:
        """Return the program that adds a micro-batch. `measure` wants noise from a batch's only one."""
        del measure  # the fused step does it
        return partial(self.accumulate, shape, first=first)

    def rehearsals(self, *, accumulate: bool) -> tuple[int, ...]:
        """Return the batches to rehearse, each as the number of micro-batches before its last one.

        There are none if several processes would have to run the collectives together, or if JAX would report
        what is not finite for zeros.
        """
        if self.layout.mesh.is_multi_process or looks_for():
            return ()
        return (0, 2) if accumulate else (0,)

    def between(self) -> tuple[partial[Program], ...]:
        """Return the programs that add up the replicas' sums and split them again; none if not needed."""
        return ()

    def reduced(self, compiled: Compile, sums: Sums, control: np.ndarray | None = None) -> Any:
        """Return the sums of all replicas, as `update` takes them; `sums` stay intact.

        `control` is this process's control vector; only groups reduce it along with the sums.
        """
        del compiled, control
        return sums

    def in_parts(self, compiled: Compile, sums: Sums) -> Sums:
        """Return reduced sums in the form to which `accumulate` adds micro-batches; here unchanged."""
        del compiled
        return sums

    def update_inputs(self, total: Any, sums: Sums) -> tuple[Any, ...]:
        """Return what `update` takes besides the state: what `reduced` returned, and more of `sums`."""
        del sums
        return (total,)

    def numbers(self) -> tuple[Array, ...]:
        """Return the device arrays by which a batch's programs tell random streams apart; here none."""
        return ()

    def control_rows(self, control: np.ndarray | None) -> tuple[Array, ...]:
        """Return the control vectors as arguments of a fused step: none if one process decides alone."""
        return (control_rows(self.layout, self.control_size, control),) if self.control_size else ()

    # -- abstract values and their shardings -----------------------------------------------------

    def abstract_state(self) -> TrainState:
        """Return the state's shapes and types, with this layout's shardings."""
        return self.param_specs.placed(self.state)

    @cached_property
    def fresh(self) -> FreshStates:
        """The programs that make a state, or its average, from nothing."""
        return FreshStates(self.problem, self.layout, self.abstract_state())

    @cached_property
    def keyless(self) -> Keyless:
        """The state without its key, as the fused steps take it."""
        return Keyless(self.abstract_state(), self.layout.replicated)

    @cached_property
    def abstract_work(self) -> tuple[PyTree, ...]:
        """(params, scale, model_state, key, step) of a batch that has begun, with shardings."""
        state = self.abstract_state()
        params, scale = jax.eval_shape(self._begin, self.state.params, self.state.opt_state)
        params = state.params if params == () else self.param_specs.placed(params)
        return params, self.param_specs.placed(scale), state.model_state, state.key, state.step

    def abstract_batch(self, shape: SampleShape) -> tuple[PyTree, ...]:
        """Return (batch, mask) of one micro-batch on every replica, then what `numbers` returns."""
        sharding = self.layout.batch_sharding
        rows = self.layout.num_replicas * shape.micro_batch_size
        mask = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=sharding)
        return _placed(shape.batch(rows), sharding), mask

    def abstract_control(self) -> tuple[PyTree, ...]:
        """Return the control vectors `[devices, control_size]`; () if one process decides alone."""
        return (self._abstract_control(),) if self.control_size else ()

    def _abstract_control(self) -> jax.ShapeDtypeStruct:
        shape = self.layout.num_devices, self.control_size
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.layout.row_per_device)

    def reduced_sums(self) -> Sums:
        """Return the sums of a whole batch, abstract, with this layout's shardings."""
        sums = self._local_sums
        whole = _placed(sums, self.layout.replicated)
        return whole.with_grads(self.param_specs.placed(sums.grads))

    @abc.abstractmethod
    def partial_sums(self) -> Sums:
        """Return the sums that `accumulate` returns, abstract, with shardings."""

    @cached_property
    def _local_sums(self) -> Sums:
        """Sums of one sample as whole values, abstract, without shardings."""
        problem = self._uncut_problem
        params, scale, model_state, key, step = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), self.abstract_work
        )
        del key

        def sums(p: PyTree, s: PyTree, m: PyTree, b: PyTree, w: Array, n: Array) -> Sums:
            return pure.local_sums(problem, p, s, m, b, w, jax.random.key(0), turn=problem.turn(n))

        return jax.eval_shape(
            lambda *arguments: self._traced("sums of one", sums, *arguments),
            params,
            scale,
            model_state,
            self.shape.batch(1),
            jax.ShapeDtypeStruct((1,), jnp.float32),
            step,
        )

    @property
    def _swaps_products(self) -> bool:
        """Whether matrix gradients become products that XLA:CPU computes fast (`gradients.py`)."""
        return self.problem.swaps_products and self._is_on_cpu

    @property
    def _is_on_cpu(self) -> bool:
        return self.layout.mesh.devices.flat[0].platform == "cpu"

    # -- how a family computes sums --------------------------------------------------------------

    @abc.abstractmethod
    def _accumulate(self, begun: Trees, inputs: Trees, old: Sums | None) -> Sums:
        """Return the sums with one more micro-batch, in the form of `partial_sums`.

        `begun` is in the form of `abstract_work`, `inputs` in the form of `abstract_batch`.
        """

    @abc.abstractmethod
    def _whole(self, begun: Trees, inputs: Trees, old: Sums | None, *, measure: bool) -> Sums:
        """Return the reduced sums of the whole batch: of `old`, if any, and a last micro-batch."""

    def _merged(
        self,
        begun: Trees,
        replica: ArrayLike,
        batch: PyTree,
        mask: Array,
        old: Sums | None,
        *,
        part: Array | None = None,
        **how: Any,
    ) -> Sums:
        """Return the sums with one more micro-batch, of one replica or of all. See `local_sums`."""
        params, scale, model_state, key, step = begun
        if not self.problem.has_sample_keys:
            # Every (step, replica, micro-batch) has a random stream of its own.
            for number in (step, replica, 0 if old is None else old.calls):
                key = jax.random.fold_in(key, number)
        how = {"measure": True, "alone": False, "swaps": self._swaps_products} | how

        def sums(*arguments: PyTree) -> Sums:
            *values, part, turn = arguments
            return pure.local_sums(self.problem, *values, part=part, turn=turn, **how)

        before = model_state if old is None else old.model_state
        name = ("sums", *how.values())
        turn = self.problem.turn(step)
        new = self._traced(name, sums, params, scale, before, batch, mask, key, part, turn)
        return new if old is None else old.merged(new)

    @cached_property
    def row_comparison(self) -> RowComparison:
        """How a part of a micro-batch's rows is compared with all of them, to measure its noise."""
        return RowComparison(
            self._uncut_problem,
            self.layout,
            state=self.state,
            rows=self.shape.batch(2),
            couples=self._couples,
        )

    def _manual(
        self, function: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., PyTree]:
        """Return `function` applied to what each device holds, with its collectives written out."""
        # check_vma=False: gradients stay local, and scans in the user's model need no `pcast`.
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _traced(self, name: Hashable, function: Callable[..., T], *arguments: PyTree) -> T:
        """Call `function` inside a trace, or replay what it was traced to under `name` before."""
        if self._traces is None:
            return function(*arguments)
        where = self.layout.strategy, self.layout.mesh.abstract_mesh
        return self._traces((name, where), function, *arguments)

    # -- programs without a shape ----------------------------------------------------------------

    def begin(self) -> Program:
        """Build the program from (params, opt_state) to a batch's (params, scale).

        Its params are () if the batch computes with the master parameters.
        """
        state, (params, scale, *_) = self.abstract_state(), self.abstract_work
        out = (() if self.problem.compute_dtype is None else params, scale)
        return Program(self._begin, (), (state.params, state.opt_state), shardings_of(out))

    def update(self) -> Program:
        """Build the program from (state, reduced sums) to (state, packed metrics); donates the state."""

        def run(state: TrainState, total: Sums) -> tuple[TrainState, Array]:
            state, metrics = self._update(state, total, measure=True)
            return state, metrics.packed()

        return Program(run, (0,), (self.abstract_state(), self.reduced_sums()), self._out())

    def _begin(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        # The masters themselves are not returned: an output would be a copy of them.
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
        cut = self.layout.strategy.is_cut
        update = partial(pure.update, self.problem, measure=measure, cut=cut)
        return self._traced(("update", measure), update, state, total)

    # -- programs for micro-batches of a shape ---------------------------------------------------

    def accumulate(self, shape: SampleShape, *, first: bool) -> Program:
        """Build the program that adds a micro-batch to sums in the form of `partial_sums`.

        It takes values in the form of `abstract_work` and `abstract_batch`, then, unless it is for the
        `first` micro-batch, the sums so far, which it donates.
        """
        sums, fixed = self.partial_sums(), (*self.abstract_work, *self.abstract_batch(shape))

        def run(*arguments: PyTree) -> Sums:
            old = None if first else arguments[-1]
            return self._accumulate(arguments[:5], arguments[5 : len(fixed)], old)

        if first:
            return Program(run, (), fixed, shardings_of(sums))
        return Program(run, (len(fixed),), (*fixed, sums), shardings_of(sums))

    def step(self, shape: SampleShape, *, measure: bool) -> Program:
        """Build the step of one micro-batch: (state, key, batch, mask, control) to (state, packed metrics).

        Donates the state, which has no key (`Keyless`). Without `measure` it takes no noise sample and
        saves a pass over the gradient.
        """

        def run(state: TrainState, *inputs: PyTree):
            total = self._fused(state, inputs, None, measure=measure)
            state, metrics = self._update(state, total, measure=measure)
            return state, self._packed(metrics, inputs)

        inputs = (*self.abstract_batch(shape), *self.abstract_control())
        out = (self.layout.replicated,)
        is_seldom = measure and not self.problem.measures_often
        return self.keyless.program(run, (0,), inputs, out, is_seldom=is_seldom)

    def step_after(self, shape: SampleShape) -> Program:
        """Build the last micro-batch after others, fused with the update; donates the state.

        It goes from (state, sums so far, batch, mask, control) to (state, packed metrics).
        """

        def run(state: TrainState, sums: Sums, *inputs: PyTree):
            total = self._fused(state, inputs, sums, measure=True)
            state, metrics = self._update(state, total, measure=True)
            return state, self._packed(metrics, inputs)

        inputs = (*self.abstract_batch(shape), *self.abstract_control())
        arguments = (self.abstract_state(), self.partial_sums(), *inputs)
        # The sums are not donated: no output has their shape.
        return Program(run, (0,), arguments, self._out())

    def _out(self) -> tuple[PyTree, NamedSharding]:
        return shardings_of(self.abstract_state()), self.layout.replicated

    def _fused(self, state: TrainState, inputs: Trees, sums: Sums | None, *, measure: bool) -> Sums:
        """Return the sums of the whole batch, from `sums` so far and the last micro-batch."""
        params = cast(state.params, self.problem.compute_dtype)
        scale = self._scale(state.params, state.opt_state) if measure else ()
        begun = (params, scale, state.model_state, state.key, state.step)
        return self._whole(begun, self._split(inputs)[0], sums, measure=measure)

    def _split(self, inputs: Trees) -> tuple[Trees, Sequence[Array]]:
        """Split the inputs of a fused step into the batch's own and the control vectors, if any."""
        end = len(inputs) - bool(self.control_size)
        return inputs[:end], inputs[end:]

    def _packed(self, metrics: StepMetrics[Array], inputs: Trees) -> Array:
        """Return the metrics as one vector, followed by the sum of all control vectors."""
        control = [jnp.sum(rows, axis=0) for rows in self._split(inputs)[1]]
        return jnp.concatenate([metrics.packed(), *control])


class GlobalPrograms(Programs):
    """The loss of all rows of a micro-batch, cut by the compiler; any layout, any number of processes.

    The loss is traced with the layout's mesh set and the strategy's logical names known, so that
    constraints inside the model hold under every layout. Sums are reduced from the first micro-batch on.
    If the loss couples samples, measuring noise computes all rows together, too.
    """

    def __init__(self, problem: pure.Problem, layout: Layout, **kwargs: Any):
        loss = in_mesh(problem.loss_and_state, layout.mesh.abstract_mesh, layout.strategy)
        super().__init__(dataclasses.replace(problem, loss_and_state=loss), layout, **kwargs)
        uncut = in_mesh(problem.loss_and_state, UNCUT, layout.strategy)
        self._uncut_problem = dataclasses.replace(problem, loss_and_state=uncut)

    def can_measure(self, micro_batch_size: int) -> bool:
        """Return whether there are two rows to compare, and the loss can leave some out if it must."""
        return self.row_comparison.is_possible(micro_batch_size)

    @property
    def is_paced(self) -> bool:
        """Whether a program must end before the next one starts: on several CPU devices."""
        return self._is_on_cpu and self.layout.num_devices > 1

    @property
    def _swaps_products(self) -> bool:
        # A product that the compiler partitions is left as it is.
        return super()._swaps_products and self.layout.num_devices == 1

    def partial_sums(self) -> Sums:
        """Return the abstract reduced sums, because every micro-batch's sums are reduced at once."""
        return self.reduced_sums()

    def _accumulate(self, begun: Trees, inputs: Trees, old: Sums | None) -> Sums:
        return self._all_rows(begun, inputs, old, measure=True)

    def _whole(self, begun: Trees, inputs: Trees, old: Sums | None, *, measure: bool) -> Sums:
        alone = old is None
        if not measure or old is not None or self.problem.from_norm_layers:
            return self._all_rows(begun, inputs, old, measure=measure, alone=alone)
        total = self._all_rows(begun, inputs, None, measure=False, alone=alone)
        part = self._part(begun, *inputs)
        return pure.in_two(self.problem, total, part, begun[1], cut=self.layout.strategy.is_cut)

    def _part(self, begun: Trees, batch: PyTree, mask: Array, *number: Array) -> Sums:
        """Return the sums of a part of every replica's rows, to compare with all rows (`RowComparison`)."""
        some, part = self.row_comparison.choose(batch, mask)
        return self._all_rows(begun, (*some, *number), None, measure=False, part=part, alone=True)

    def _all_rows(self, begun: Trees, inputs: Trees, old: Sums | None, **how: Any) -> Sums:
        batch, mask, *number = inputs
        group = number[0] if number else 0
        return self._merged(begun, group, batch, mask, old, **how)


class SeparatePrograms(Programs):
    """A gradient for each replica, under pure data parallelism: manual over the copies of the model.

    Sums have a leading axis over the replicas until they are reduced; `spread` is the way back.
    """

    def can_measure(self, micro_batch_size: int) -> bool:
        """Return whether there are several replicas, each a noise group."""
        return self.layout.num_replicas > 1

    def between(self) -> tuple[partial[Program], ...]:
        """Return the programs that add up the replicas' sums and split them again; none if not needed."""
        return partial(self.reduce), partial(self.spread)

    def reduced(self, compiled: Compile, sums: Sums, control: np.ndarray | None = None) -> Any:
        """Return the sums added up over all replicas; `sums` stay intact."""
        return compiled(self.reduce)(sums)

    def in_parts(self, compiled: Compile, sums: Sums) -> Sums:
        """Return reduced sums with a leading axis over the replicas."""
        return compiled(self.spread)(sums)

    def numbers(self) -> tuple[Array, ...]:
        """Return each replica's number among the replicas of all processes, `[replicas]`."""
        first = self._group * self.layout.num_replicas
        numbers = np.arange(first, first + self.layout.num_replicas, dtype=np.int32)
        return (self.layout.put(numbers, self.layout.batch_sharding),)

    @property
    def _group(self) -> int:
        """Index of this process's group of devices, from 0."""
        return 0

    def partial_sums(self) -> Sums:
        """Return the abstract sums with a row for each replica."""
        replicas, sharding = self.layout.num_replicas, self.layout.batch_sharding
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((replicas, *s.shape), s.dtype, sharding=sharding),
            self._local_sums,
        )

    def reduce(self) -> Program:
        """Build the program from the sums of the replicas to the batch's; donates nothing."""
        run = self._manual(lambda sums: self._total(first_row(sums)), (ROWS,), WHOLE)
        return Program(run, (), (self.partial_sums(),), shardings_of(self.reduced_sums()))

    def spread(self) -> Program:
        """Build the program from reduced sums to parts of them, from which a batch goes on."""

        def body(sums: Sums) -> Sums:
            replica = jax.lax.axis_index(DATA_AXIS)
            return as_row(sums.part_of(replica, self.layout.num_replicas))

        run = self._manual(body, (WHOLE,), ROWS)
        return Program(run, (), (self.reduced_sums(),), shardings_of(self.partial_sums()))

    def abstract_batch(self, shape: SampleShape) -> tuple[PyTree, ...]:
        """Return (batch, mask, the number of each replica among all processes' replicas), abstract."""
        replicas, sharding = self.layout.num_replicas, self.layout.batch_sharding
        numbers = jax.ShapeDtypeStruct((replicas,), jnp.int32, sharding=sharding)
        return *super().abstract_batch(shape), numbers

    def _accumulate(self, begun: Trees, inputs: Trees, old: Sums | None) -> Sums:
        def body(*arguments: PyTree) -> Sums:
            return as_row(self._one_replica(*arguments))

        return self._on_replicas(body, begun, inputs, old, out=ROWS)

    def _whole(self, begun: Trees, inputs: Trees, old: Sums | None, *, measure: bool) -> Sums:
        def body(*arguments: PyTree) -> Sums:
            return self._total(self._one_replica(*arguments, measure=measure))

        return self._on_replicas(body, begun, inputs, old, out=WHOLE)

    def _on_replicas(
        self, body: Callable[..., Sums], begun: Trees, inputs: Trees, old: Sums | None, *, out: Any
    ) -> Sums:
        rows = (*inputs, *(() if old is None else (old,)))
        run = self._manual(body, (WHOLE, *(ROWS for _ in rows)), out)
        return run(tuple(begun), *rows)

    def _one_replica(
        self,
        begun: Trees,
        batch: PyTree,
        mask: Array,
        numbers: Array,
        *old: Sums,
        measure: bool = True,
    ) -> Sums:
        before = first_row(old[0]) if old else None
        return self._merged(begun, numbers[0], batch, mask, before, measure=measure)

    def _total(self, sums: Sums) -> Sums:
        """Return one replica's sums added up over all replicas, with a step's only collectives."""

        def add_others(tree: PyTree) -> PyTree:
            return jax.lax.psum(tree, DATA_AXIS) if self.layout.num_replicas > 1 else tree

        return sums.reduced(add_others, add_others)


def control_rows(layout: Layout, size: int, control: np.ndarray | None) -> Array:
    """Return a row per device: this process's vector on its first device, zeros on the others."""
    devices = list(layout.mesh.devices.flat)
    rows = np.zeros((len(devices), size), np.float32)
    if control is not None:
        mine = jax.process_index(devices[0].client)
        rows[[d.process_index for d in devices].index(mine)] = control
    return layout.put(rows, layout.row_per_device)


def _placed(tree: PyTree, sharding: NamedSharding) -> PyTree:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)


def first_row(tree: PyTree) -> PyTree:
    """Return a tree of `[1, ...]` arrays without their leading axis."""
    return jax.tree.map(lambda x: x[0], tree)


def as_row(tree: PyTree) -> PyTree:
    """Return a tree of arrays with a leading axis of length 1."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
