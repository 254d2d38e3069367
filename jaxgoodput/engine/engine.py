"""An engine owns a job's executables and runs one step as a value: begin, accumulate, apply.

`Engines` is one problem on any number of layouts, `Engine` the same problem on one of them. A partly
accumulated batch, or a whole state, passes between layouts in memory: micro-batches may be accumulated under
one layout after another (short sequences under data parallelism, long ones under tensor parallelism) and
applied where the state lies.

Under data parallelism, `accumulate` holds no collective and does not depend on the number of processes.
`apply` is `reduce` and then `update`. `reduce` adds up over the replicas and donates nothing, so the state of
an elastic job survives the death of a peer; `update` is local and donates. If nothing can fail in between,
`step` is the fused form: the last micro-batch and `apply` in one executable, so a step of one micro-batch is
a single executable.

Programs and moves are compiled ahead, from abstract values only. A missing one is compiled on the thread
that calls it.
"""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from jaxgoodput.embedding.table import Lookup
from jaxgoodput.engine import step as pure
from jaxgoodput.engine.batch_moves import BatchMoves
from jaxgoodput.engine.blocks import BlockRunner
from jaxgoodput.engine.compiled import Moves, ProgramCache
from jaxgoodput.engine.loss_checks import LossChecks, has_constraints
from jaxgoodput.engine.memory import step_bytes
from jaxgoodput.engine.programs.elastic import ElasticPrograms, GroupPrograms
from jaxgoodput.engine.programs.families import GlobalPrograms, Programs, SeparatePrograms
from jaxgoodput.engine.programs.keyless import KeylessCaller
from jaxgoodput.engine.programs.program import Program, SampleShape
from jaxgoodput.engine.programs.rows import RowProblem, RowPrograms, WithRows
from jaxgoodput.engine.state import StepMetrics, Sums, TrainState, Work
from jaxgoodput.engine.traces import Traces
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.parallel.partition import state_bytes
from jaxgoodput.parallel.plan import MovePlan, plan_move
from jaxgoodput.parallel.strategy import Layout, anywhere

P = ParamSpec("P")
T = TypeVar("T")
# Samples per replica of the engine's own data set, or the shape of any other micro-batch.
Size = int | SampleShape
# How a loss runs (`programs/`). "auto" follows the layout and the model; "whole" is global, with the
# samples of a micro-batch computed together.
LossKind = Literal["auto", "global", "separate", "whole"]


class Engines:
    """One problem on any number of layouts: an engine for each, and the moves between them.

    A layout covers the devices of all processes of the job. In an elastic job it covers one group of
    processes (mostly a single process), and `world` is the mesh of all groups.

    `sample` is the abstract value of one sample, without a batch axis. `control_size` is the length of the
    vector by which processes agree; the sum over all processes rides along with every step. `memory_bytes`
    bounds what a move between layouts may hold on a device (None: the device's own limit, if it reports
    one). `traces` holds what this problem's functions were traced to by earlier engines, whose devices are
    gone.
    """

    def __init__(
        self,
        problem: pure.Problem,
        sample: PyTree,
        *,
        world: Mesh | None = None,
        control_size: int = 0,
        memory_bytes: int | None = None,
        loss: LossKind = "auto",
        traces: Traces | None = None,
    ):
        self.problem = problem
        self.traces = traces
        self.loss = loss
        self.sample = sample
        self.world = world
        self.control_size = control_size
        # Abstract and without shardings: every layout cuts it in its own way.
        self.state = self._once(
            "state",
            lambda: jax.eval_shape(anywhere(lambda: pure.init_state(problem, jax.random.key(0)))),
        )
        self.compiled = ProgramCache()
        self.moves = Moves(memory_bytes)
        self.batch_moves = BatchMoves(self.compiled, self.moves)
        self._engines: dict[Layout, Engine] = {}
        self._lock = threading.Lock()

    def on(self, layout: Layout) -> "Engine":
        """Return the engine of a layout; every call with the same layout returns the same engine.

        Raises ValueError if rules do not fit the parameters, or for a second layout in a job whose
        processes add up their sums.
        """
        with self._lock:
            found = self._engines.get(layout)
            if found is None:
                found = Engine(self, layout)
                if self._engines and not found.programs.can_switch:
                    raise ValueError(
                        f"a job that adds up its gradients over several processes has one layout, here "
                        f"{next(iter(self._engines)).strategy.name}; got {layout.strategy.name} too. Pass "
                        "one strategy, or use a single process."
                    )
                self._engines[layout] = found
        return found

    def programs_on(self, layout: Layout) -> Programs:
        """Return the programs of a layout: the one place that chooses their family.

        Raises ValueError if the loss must run over all rows at once and "separate" was asked for.
        """
        made: dict[str, Any] = {
            "state": self.state,
            "shape": SampleShape.of(self.sample, micro_batch_size=1),
            "control_size": self.control_size,
            "couples": self.loss == "whole",
            "traces": self.traces,
        }
        is_global = self.is_global(layout)
        if self.world is not None:
            family = GroupPrograms if is_global else ElasticPrograms
            return family(self.problem, layout, world=self.world, **made)
        if isinstance(self.problem, RowProblem):
            return RowPrograms(self.problem, layout, **made)
        # One device has no replicas to keep apart.
        family = GlobalPrograms if is_global or layout.num_devices == 1 else SeparatePrograms
        return family(self.problem, layout, **made)

    def is_global(self, layout: Layout) -> bool:
        """Return whether the loss of several replicas has to run over all their rows at once.

        Raises ValueError if it has to and "separate" was asked for.
        """
        reads_rows = isinstance(self.problem, RowProblem)
        has_to = layout.strategy.is_cut or reads_rows or self._has_constraints
        if has_to and self.loss == "separate":
            why = "it reads rows" if reads_rows else "the loss constrains shardings"
            if layout.strategy.is_cut:
                why = f"{layout.strategy.name} cuts the model"
            raise ValueError(
                f'Config.loss is "separate", a gradient for each whole copy of the model, and {why}. Leave '
                'it at "auto".'
            )
        return has_to or self.loss in ("global", "whole")

    @cached_property
    def _has_constraints(self) -> bool:
        batch = SampleShape.of(self.sample, micro_batch_size=2).batch(2)
        return self._once("constraints", lambda: has_constraints(self.problem, self.state, batch))

    def _once(self, key: str, find: Callable[[], T]) -> T:
        """Return a fact that `find` finds by tracing; if `traces` has it under `key`, do not trace again."""
        return find() if self.traces is None else self.traces.once(key, find)

    def move(self, state: TrainState, old: Layout, new: Layout) -> TrainState:
        """Move a state from one layout to another; the old state is deleted on the way.

        Raises MoveDoesNotFit, and leaves the state intact, if a device has too little memory.
        """
        if old == new:
            return state
        return self.compiled(self.moves.state, *self._both(old, new))(state)

    def require_room(self, old: Layout, new: Layout) -> None:
        """Raise MoveDoesNotFit if a device of this process has too little free memory to move a state."""
        self.compiled(self.moves.state, *self._both(old, new)).require_room()

    def plan_move(self, old: Layout, new: Layout) -> MovePlan:
        """Return what moving a state would cost, without running or compiling anything.

        The plan of a move that is already compiled has the routes that were chosen for it.
        """
        found = self.compiled.peek(self.moves.state, *self._both(old, new))
        if found is not None:
            return found.plan
        move = self.moves.state(*self._both(old, new))
        return plan_move(move.tree, move.shardings)

    def compile_moves(self, layouts: Sequence[Layout]) -> None:
        """Plan and compile the moves of a state between every two of these layouts."""
        for old, new in itertools.permutations(dict.fromkeys(layouts), 2):
            self.compiled(self.moves.state, *self._both(old, new))

    def loss_kind(self) -> Literal["sample", "mean"]:
        """Return "sample" if the loss can leave padded samples out, else "mean".

        Raises TypeError for a loss of another shape, or one that does not depend on the parameters.
        """
        return self._once("kind of loss", self._loss_kind)

    def _loss_kind(self) -> Literal["sample", "mean"]:
        batch = SampleShape.of(self.sample, micro_batch_size=2).batch(2)
        problem = dataclasses.replace(
            self.problem, loss_and_state=anywhere(self.problem.loss_and_state)
        )
        kind = pure.loss_kind(problem, self.state, batch, 2)
        pure.require_dependence(problem, self.state, batch)
        return kind

    def _both(self, old: Layout, new: Layout) -> tuple[Programs, Programs]:
        return self.on(old).programs, self.on(new).programs


class Engine:
    """One problem on one layout. Get it from `Engines.on`."""

    def __init__(self, engines: Engines, layout: Layout):
        self.engines = engines
        self.layout = layout
        self.problem = engines.problem
        self.compiled = engines.compiled
        self.world = engines.world
        self.programs = engines.programs_on(layout)
        self._call_keyless = KeylessCaller()
        self.blocks = BlockRunner(self.programs.blocks, self.compiled, self._call_keyless, layout)

    # -- what there is ---------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes together."""
        return self.layout.num_replicas * self.programs.num_groups

    def can_measure(self, size: Size) -> bool:
        """Return whether the gradient noise can be measured in a batch of one micro-batch of this size.

        In a batch of several micro-batches it always can.
        """
        return self.programs.can_measure(self.shape(size).micro_batch_size)

    @property
    def has_groups(self) -> bool:
        """Whether every batch gives a noise sample, because other groups of processes have parts of it."""
        return self.programs.has_groups

    @property
    def spans(self) -> bool:
        """Whether the state lies on devices of several processes, which run every program together."""
        return self.layout.mesh.is_multi_process

    def shape(self, size: Size) -> SampleShape:
        """Return the shape of a micro-batch; a number counts the engine's own samples per replica."""
        if isinstance(size, SampleShape):
            return size
        return SampleShape.of(self.engines.sample, micro_batch_size=size)

    def on(self, layout: Layout) -> "Engine":
        """Return the engine of the same problem on another layout."""
        return self.engines.on(layout)

    def abstract_state(self) -> TrainState:
        """Return the state's shapes and types, with this layout's shardings."""
        return self.programs.abstract_state()

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one device's part of the state."""
        return state_bytes(self.programs.param_specs, self.engines.state)

    def read_all(self, packed: Array, count: int) -> list[tuple[StepMetrics[float], np.ndarray]]:
        """Fetch the metrics of `count` steps that were dispatched together, as `read` does for one."""
        if packed.ndim == 1:
            return [self.read(packed)]
        return list(map(self.read, self._fetched(packed)[:count]))

    def read(self, packed: Array | np.ndarray) -> tuple[StepMetrics[float], np.ndarray]:
        """Fetch a step's metrics, and the sum of all processes' control vectors (empty in one process).

        Of a block's, it reads the first.

        Waits for the step that computes them.
        """
        programs = self.programs
        vector = self._fetched(packed)
        vector = vector[0] if vector.ndim > 1 else vector
        return StepMetrics.unpacked(vector, programs.aux_names, len(programs.param_groups))

    def _fetched(self, packed: Array | np.ndarray) -> np.ndarray:
        # Not `device_get`, whose walk over trees would cost several times as much as the copy.
        with jax.transfer_guard_device_to_host("allow"):
            return np.asarray(packed)

    # -- compiling ahead -------------------------------------------------------------------------

    def training_programs(self, size: Size, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs without which a micro-batch size cannot be used.

        `accumulate` includes the ones for batches of several micro-batches.
        """
        return self.programs.training(self.shape(size), accumulate=accumulate)

    def last_programs(self, size: Size, *, alone: bool) -> tuple[partial[Program], ...]:
        """Return the programs of a batch's last micro-batch with a size of its own.

        `alone` says that it is the only one of its batch.
        """
        return self.programs.last(self.shape(size), alone=alone)

    def measuring_programs(self, size: Size) -> tuple[partial[Program], ...]:
        """Return the programs that measure the noise of a batch of one micro-batch."""
        return self.programs.measuring(self.shape(size))

    def shared_programs(self, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Return the programs that do not depend on the micro-batch size, such as the update."""
        return self.programs.shared(accumulate=accumulate)

    def compile_program(self, program: Callable[[], Program]) -> None:
        """Compile one of these programs from abstract values. Thread-safe."""
        self.compiled(program)

    def digest(self, size: Size) -> str:
        """Return a hash of the program of a step of this size, which is compiled on the way.

        It covers model, optimizer and layout, but no values.
        """
        return self.compiled.digest(self.programs.plain(self.shape(size)))

    def compile(
        self, sizes: Sequence[Size], *, accumulate: bool = True, measure: bool = True
    ) -> None:
        """Compile the programs that these sizes need before their first step. Thread-safe.

        Without `measure`, the programs that measure the noise are left for later.
        """
        wanted = self.programs.ahead if measure else self.programs.training
        for size in sizes:
            for program in wanted(self.shape(size), accumulate=accumulate):
                self.compile_program(program)
        for program in self.shared_programs(accumulate=accumulate):
            self.compile_program(program)

    def compile_s(self, size: Size) -> float:
        """Return the seconds that compiling a step of this size took, 0 if it was not compiled."""
        training = self.training_programs(size, accumulate=False)
        return sum(self.compiled.seconds(program) or 0.0 for program in training)

    def compile_batches(self, plans: Sequence[tuple[Layout, Size]]) -> None:
        """Compile and plan what batches need that begin and are applied here.

        Their micro-batches may be accumulated under any of `plans`, in any order.
        """
        programs = [partial(self.programs.update)]
        if self.programs.has_begin:
            programs.append(partial(self.programs.begin))
        for layout, size in plans:
            there = self.on(layout)
            adds = partial(there.programs.accumulate, there.shape(size))
            programs += [partial(adds, first=first) for first in (True, False)]
        layouts = dict.fromkeys(layout for layout, _ in plans)
        others = [self.on(layout).programs for layout in layouts if layout != self.layout]
        for program in (
            *programs,
            *itertools.chain(*(p.between() for p in (self.programs, *others))),
        ):
            self.compiled(program)
        self.engines.batch_moves.compile(self.programs, others)

    def rehearse(self, size: Size, *, accumulate: bool) -> None:
        """Run the training programs once on throw-away zeros, because a first run is slow.

        Collectives between processes are left out: all processes would have to run them together.
        """
        for num_before in self.programs.rehearsals(accumulate=accumulate):
            self._rehearse(size, num_before, measure=False)

    def rehearse_measuring(self, size: Size) -> None:
        """Run the measuring programs once on throw-away zeros."""
        if self.measuring_programs(size):
            for num_before in self.programs.rehearsals(accumulate=False):
                self._rehearse(size, num_before, measure=True)

    def _rehearse(self, size: Size, num_before: int, *, measure: bool) -> None:
        """Run a batch of zeros with `num_before` micro-batches before its last one, up to reducing."""
        state, work = self.compiled(self.programs.fresh.zeros)(), None
        batch, mask = self._zero_batch(self.shape(size))
        for _ in range(num_before):
            work = self.accumulate(work or self.begin(state), batch, mask)
        if self.programs.is_fused:
            results = self.step(state, work, batch, mask, measure=measure)[1]
        else:
            work = self.accumulate(work or self.begin(state), batch, mask, measure=measure)
            results = work.sums
        jax.block_until_ready(results)

    def bytes_of(self, size: Size) -> StepBytes | None:
        """Return the predicted peak bytes per device of a step; None until it is compiled."""
        return self._largest(*self.training_programs(size, accumulate=True))

    def stop_looping(self, size: Size) -> bool:
        """Have single steps of this size, and larger ones, run by themselves; see `BlockRunner`."""
        return self.blocks.stop_looping(self.shape(size))

    def measuring_bytes_of(self, size: Size) -> StepBytes | None:
        """Return the predicted peak bytes of a step that measures noise; None until it is compiled."""
        return self._largest(*self.measuring_programs(size))

    def tflops_per_sample(self, size: Size) -> float:
        """Return 10^12 matrix-product operations per training sample; NaN until it is compiled.

        Counted in the program of a micro-batch of this size, without what measuring the noise adds.
        """
        shape = self.shape(size)
        flops = self.compiled.flops(self.programs.last(shape, alone=True)[0])
        num_samples = self.layout.num_replicas * shape.micro_batch_size
        return math.nan if flops is None else flops / num_samples / 1e12

    def _largest(self, *programs: partial[Program]) -> StepBytes | None:
        """Return the predicted peak bytes per device of the largest of these that are compiled."""
        found = [self.compiled.peek(program) for program in programs]
        known = [step_bytes(executable) for executable in found if executable is not None]
        return max(known, key=lambda need: need.peak, default=None)

    # -- a step as a value -----------------------------------------------------------------------

    def init(self, key: Array, given: Mapping[str, Array] = MappingProxyType({})) -> TrainState:
        """Make a fresh state on this layout; no device ever holds more than its part of it.

        `given` replaces leaves of the problem's `init` by their names in `TrainState.variables`, such as
        "params/layers/0/kernel". They must lie as in `abstract_state`, and are taken over.
        """
        everywhere = self.layout.replicated
        if self.spans:
            data = self.layout.put(np.asarray(jax.random.key_data(key)), everywhere)
            key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
        else:
            key = jax.device_put(key, everywhere)
        return self.compiled(self.programs.fresh.init, tuple(given))(key, *given.values())

    @cached_property
    def loss_checks(self) -> LossChecks:
        """Trials of the loss on a few samples, before training relies on it."""
        return LossChecks(self.programs.problem, self.layout)

    def with_average(self, state: TrainState) -> TrainState:
        """Return a state without an average of its parameters with one that starts at them."""
        return dataclasses.replace(
            state, ema=self.compiled(self.programs.fresh.average)(state.params)
        )

    def begin(self, state: TrainState) -> Work:
        """Begin a batch for this state: compute-precision parameters, no gradient yet.

        Raises ValueError if the state was donated.
        """
        state.require_alive()
        params, scale = state.params, ()
        if self.programs.has_begin:
            computed, scale = self.compiled(self.programs.begin)(state.params, state.opt_state)
            params = params if self.problem.compute_dtype is None else computed
        return Work(
            layout=self.layout,
            owns_params=self.problem.compute_dtype is not None,
            params=params,
            scale=scale,
            model_state=state.model_state,
            key=state.key,
            step=state.step,
            sums=None,
        )

    def accumulate(
        self,
        work: Work,
        batch: PyTree,
        mask: Array,
        layout: Layout | None = None,
        *,
        measure: bool = False,
    ) -> Work:
        """Add one micro-batch on every replica of `layout` (default: this one).

        `batch` leaves are `[replicas * micro_batch_size, ...]` over this process's devices, `mask` is
        `[replicas * micro_batch_size]` float32: 1 for real samples, 0 for padding. The old sums are
        donated. If the work lies on another layout, it is moved first, and its gradients are reduced there.
        `measure` takes a noise sample from the only micro-batch of an elastic job's only group
        (`can_measure`). In a batch of several, each is a noise group anyway.

        Raises ValueError if the work was already consumed.
        """
        if layout is not None and layout != self.layout:
            return self.on(layout).accumulate(work, batch, mask)
        work = self._here(work)
        shape = self._shape_of(batch, mask)
        begun = (work.params, work.scale, work.model_state, work.key, work.step)
        old = () if work.sums is None else (work.sums,)
        run = self.compiled(self.programs.adding(shape, first=not old, measure=measure))
        sums = run(*begun, batch, mask, *self._numbers, *old)
        return dataclasses.replace(work, sums=sums)

    def step(
        self,
        state: TrainState,
        work: Work | None,
        batch: PyTree,
        mask: Array,
        *,
        measure: bool = True,
        control: np.ndarray | None = None,
    ) -> tuple[TrainState, Array]:
        """Run the last micro-batch and the update in one executable. Not for an elastic job.

        Returns the new state and the metrics vector, followed by the sum of every process's `control`; or
        those of a block, of which it is the first, if it `BlockRunner.loops`.
        `measure` takes a noise sample, if a batch of one micro-batch of this size allows it (`can_measure`).
        Donates the state.
        """
        if not self.programs.is_fused:
            raise ValueError(
                "step() fuses the update with the last micro-batch, and this job is elastic: its state must "
                "survive if a peer dies in between. Use accumulate() and apply()."
            )
        state.require_alive()
        shape = self._shape_of(batch, mask)
        inputs = (batch, mask, *self._numbers, *self.programs.control_rows(control))
        if work is not None:
            if work.sums is None:
                raise ValueError(
                    "step() got an empty Work. Pass None for a batch of one micro-batch."
                )
            work = self._here(work)
            run = self.compiled(self.programs.step_after, shape)
            state, metrics = run(state, work.sums, *inputs)
            work.consume()
            return state, metrics
        measure = measure and self.programs.can_measure(shape.micro_batch_size)
        if not measure and self.blocks.loops(shape):
            return self.blocks.run_one(state, batch, mask)
        run = self.compiled(self.programs.step, shape, measure=measure)
        state, metrics = self._call_keyless(run, state, *inputs)
        return state, metrics

    def step_with_rows(
        self,
        state: TrainState,
        slots: Mapping[str, Array],
        lookups: Mapping[str, Lookup],
        batch: WithRows,
        mask: Array,
        *,
        measure: bool = True,
        control: np.ndarray | None = None,
    ) -> tuple[TrainState, dict[str, Array], Array]:
        """Run `step` for a problem with tables; `lookups` say in which slots the batch's rows are.

        Returns the new state, the slots with those rows changed, and the metrics vector. Donates state and
        slots.
        """
        state.require_alive()
        shape = self._shape_of(batch, mask)
        measure = measure and self.programs.can_measure(shape.micro_batch_size)
        run = self.compiled(self.programs.step, shape, measure=measure)
        rows = self.programs.control_rows(control)
        inputs = (dict(slots), dict(lookups), batch, mask, *rows)
        state, changed, metrics = self._call_keyless(run, state, *inputs)
        return state, changed, metrics

    def apply(
        self, state: TrainState, work: Work, control: np.ndarray | None = None
    ) -> tuple[TrainState, Array]:
        """Reduce over all replicas and update. Donates the state and consumes the work.

        Returns the new state and the metrics vector, followed by the sum of every process's `control`.
        The reduction donates nothing: if it fails, the state is intact.

        Raises ValueError if the work holds no micro-batch or was already consumed.
        """
        total = self.reduce(work, control)
        state, metrics = self.update(state, total, work)
        work.consume()
        return state, metrics

    def reduce(self, work: Work, control: np.ndarray | None = None) -> Sums | Array:
        """Add up the sums of all replicas on this layout; over groups, in one all-reduce of one buffer.

        Pass the result to `update`.
        """
        if work.sums is None:
            raise ValueError(
                "the Work holds no micro-batch. Call accumulate() at least once; a replica with "
                "nothing to do accumulates a micro-batch whose mask is 0."
            )
        work.require_unused()
        self._pace(work)
        if work.layout != self.layout:
            there = self.on(work.layout)
            return self.engines.batch_moves.sums(there.programs, self.programs)(there.reduce(work))
        return self.programs.reduced(self.compiled, work.sums, control)

    def update(
        self, state: TrainState, total: Sums | Array, work: Work
    ) -> tuple[TrainState, Array]:
        """Return the next state and the metrics vector, from what `reduce` returned; donates the state."""
        assert work.sums is not None
        state.require_alive()
        run = self.compiled(self.programs.update)
        return run(state, *self.programs.update_inputs(total, work.sums))

    # -- between layouts -------------------------------------------------------------------------

    def move(self, state: TrainState, layout: Layout) -> TrainState:
        """Move a state from this layout to another one. See `Engines.move`."""
        return self.engines.move(state, self.layout, layout)

    def plan_move(self, layout: Layout) -> MovePlan:
        """Return what moving a state from here to `layout` would cost. See `Engines.plan_move`."""
        return self.engines.plan_move(self.layout, layout)

    def _pace(self, work: Work) -> None:
        """Wait for the work's sums if the devices cannot queue several programs (`Programs.is_paced`)."""
        there = self if work.layout == self.layout else self.on(work.layout)
        if self.programs.is_paced or there.programs.is_paced:
            jax.block_until_ready(work.sums)

    def _here(self, work: Work) -> Work:
        """Return the work on this layout. One that lies elsewhere is moved, and consumed there."""
        work.require_unused()
        self._pace(work)
        if work.layout == self.layout:
            return work
        moved = self.engines.batch_moves(work, self.on(work.layout).programs, self.programs)
        self._pace(moved)
        return moved

    def _shape_of(self, batch: PyTree, mask: Array) -> SampleShape:
        rows, replicas = mask.shape[0], self.layout.num_replicas
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
        if rows % replicas or lengths - {rows}:
            raise ValueError(
                f"a micro-batch needs the same number of rows in every leaf and in the mask, a multiple of "
                f"the {replicas} replicas of {self.layout.strategy.name}; got {sorted(lengths)} rows and a "
                f"mask of {rows}. Pad it to {-(-rows // replicas) * replicas} rows, with 0 in the mask."
            )
        return SampleShape.of_batch(batch, micro_batch_size=rows // replicas)

    @cached_property
    def _numbers(self) -> tuple[Array, ...]:
        return self.programs.numbers()

    def _zero_batch(self, shape: SampleShape) -> tuple[PyTree, Array]:
        batch, mask, *_ = self.programs.abstract_batch(shape)
        zeros = jax.jit(
            lambda: (
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), batch),
                jnp.ones(mask.shape, mask.dtype),
            ),
            out_shardings=self.layout.batch_sharding,
        )
        return zeros()
