"""An engine owns a job's executables and runs one step as a value: begin, accumulate, apply.

`Engines` is one problem on any number of layouts, `Engine` one of them. A batch half done, or a whole
state, passes between layouts in memory: a batch may be accumulated under one layout after another (short
sequences under data parallelism, long ones under tensor parallelism) and applied at home.

`accumulate` holds no collective under data parallelism and does not depend on how many processes there
are. `apply` is `reduce` (over the replicas, nothing donated, so that the state of an elastic job outlives
a peer that dies) and then `update` (donating). `step` is the fused form of any other job: the last
micro-batch and `apply` in a single executable, so that a step of one micro-batch is one executable.

Every program and every move is compiled ahead, from abstract values only; one that is missing is
compiled on the thread that calls it.
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
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from jaxgoodput.embedding.table import Lookup
from jaxgoodput.engine import step as pure
from jaxgoodput.engine.compiled import Moves, ProgramCache
from jaxgoodput.engine.memory import step_bytes
from jaxgoodput.engine.programs import (
    GlobalPrograms,
    Program,
    Programs,
    SampleShape,
    SeparatePrograms,
    has_constraints,
)
from jaxgoodput.engine.programs_elastic import (
    ElasticPrograms,
    GroupPrograms,
    OverGroups,
    rows_of,
)
from jaxgoodput.engine.rows import RowProblem, RowPrograms, WithRows
from jaxgoodput.engine.state import Loss, StepMetrics, Sums, TrainState, Work, cast, delete
from jaxgoodput.engine.traces import Traces
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.parallel.place import GROUP_AXIS
from jaxgoodput.parallel.plan import MovePlan, plan_move
from jaxgoodput.parallel.strategy import Layout, anywhere

P = ParamSpec("P")
T = TypeVar("T")
# Samples per replica of the engine's own data set, or a micro-batch of any other shape.
Size = int | SampleShape
# How a loss runs: as `programs.py` says, or "auto", whichever a layout and the model ask for.
LossKind = Literal["auto", "global", "separate", "whole"]
# By how much of it a loss must change with how samples are split to count as coupling them; in bfloat16 ten
# times as much, which rounds by that.
COUPLED = 1e-3
NUM_KEYS = 16  # that a loss which seems to grow with its batch is tried with


class Engines:
    """One problem on any number of layouts: an engine for each, and the moves between them.

    A layout covers the devices of all processes of the job. In an elastic job it covers those of a group
    of processes, mostly of one, and `world` is the mesh of all groups. `control_size` is the length of
    the vector with which processes agree: the sum of all rides along with every step. `sample` is the
    abstract value of one sample, without a batch axis. `memory_bytes` bounds what a move between layouts
    may hold on a device (None: the device's own limit, where it tells one). `traces` is of this problem's
    earlier engines, on devices that are gone.
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
        # Abstract, lying nowhere: what all layouts cut in their own way.
        self.state = self._once(
            "state",
            lambda: jax.eval_shape(anywhere(lambda: pure.init_state(problem, jax.random.key(0)))),
        )
        self.compiled = ProgramCache()
        self.moves = Moves(memory_bytes)
        self._engines: dict[Layout, Engine] = {}
        self._lock = threading.Lock()

    def on(self, layout: Layout) -> "Engine":
        """The engine of one layout; there is one for each.

        Raises ValueError for rules that do not fit the parameters, and, over several processes, for
        anything but one layout of data parallelism.
        """
        with self._lock:
            found = self._engines.get(layout)
            if found is None:
                found = Engine(self, layout)
                if found.world is not None and self._engines:
                    raise ValueError(
                        "engines that span processes have one layout; several need one process."
                    )
                self._engines[layout] = found
        return found

    def is_global(self, layout: Layout) -> bool:
        """Whether the loss runs over all rows at once under a layout.

        Raises ValueError where it has to and "separate" was asked for.
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
        alone = layout.num_devices == 1 and self.world is None
        return has_to or self.loss in ("global", "whole") or alone

    @cached_property
    def _has_constraints(self) -> bool:
        shape = SampleShape.of(self.sample, micro_batch_size=2)
        return self._once("constraints", lambda: has_constraints(self.problem, self.state, shape))

    def _once(self, key: str, find: Callable[[], T]) -> T:
        """What tracing the problem tells, which outlives devices where traces do."""
        return find() if self.traces is None else self.traces.once(key, find)

    def move(self, state: TrainState, old: Layout, new: Layout) -> TrainState:
        """The state, which is on `old`, on another layout; the old one is deleted on the way.

        Raises MoveDoesNotFit, and leaves the state alone, where it would need more memory than there is.
        """
        if old == new:
            return state
        return self.compiled(self.moves.state, *self._both(old, new))(state)

    def require_room(self, old: Layout, new: Layout) -> None:
        """Raise MoveDoesNotFit where a device of this process has too little free memory to move a state."""
        self.compiled(self.moves.state, *self._both(old, new)).require_room()

    def plan_move(self, old: Layout, new: Layout) -> MovePlan:
        """What moving a state would cost; nothing runs, nothing is compiled.

        Of a move that is compiled already, with the routes that were chosen for it.
        """
        found = self.compiled.peek(self.moves.state, *self._both(old, new))
        if found is not None:
            return found.plan
        move = self.moves.state(*self._both(old, new))
        return plan_move(move.tree, move.shardings)

    def compile_moves(self, layouts: Sequence[Layout]) -> None:
        """Compile and plan the moves of a state between every two of these layouts."""
        for old, new in itertools.permutations(dict.fromkeys(layouts), 2):
            self.compiled(self.moves.state, *self._both(old, new))

    def loss_kind(self) -> Literal["sample", "mean"]:
        """'sample' or 'mean': whether the loss can leave padded samples out."""
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
    """One problem on one layout. `Engines.on` makes it."""

    def __init__(self, engines: Engines, layout: Layout):
        self.engines = engines
        self.layout = layout
        self.problem = engines.problem
        self.compiled = engines.compiled
        self.world = engines.world
        shape = SampleShape.of(engines.sample, micro_batch_size=1)
        size = engines.control_size
        made: dict[str, Any] = {"state": engines.state, "shape": shape, "control_size": size}
        made["traces"] = engines.traces
        self.programs: Programs
        whole = engines.loss == "whole"
        if self.world is not None and engines.is_global(layout):
            made |= {"world": self.world, "couples": whole}
            self.programs = GroupPrograms(self.problem, layout, **made)
        elif self.world is not None:
            self.programs = ElasticPrograms(self.problem, layout, world=self.world, **made)
        elif isinstance(self.problem, RowProblem):
            self.programs = RowPrograms(self.problem, layout, couples=whole, **made)
        elif engines.is_global(layout):
            self.programs = GlobalPrograms(self.problem, layout, couples=whole, **made)
        else:
            self.programs = SeparatePrograms(self.problem, layout, **made)
        # XLA:CPU runs out of threads, and hangs, where many executables with collectives wait at once.
        on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
        sums = isinstance(self.programs, GlobalPrograms) and layout.num_devices > 1
        self._is_paced = on_cpu and sums

    # -- what there is ---------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes together."""
        num_groups = 1 if self.world is None else self.world.shape[GROUP_AXIS]
        return self.layout.num_replicas * num_groups

    def can_measure(self, size: Size) -> bool:
        """Whether a batch of one micro-batch of this size tells its noise; of several, every batch does."""
        rows = self.shape(size).micro_batch_size
        if self.has_groups:
            return True
        if self.world is not None:
            return self.programs.can_compare_rows(rows)
        return self.programs.can_measure(rows)

    @property
    def has_groups(self) -> bool:
        """Whether every batch of an elastic job tells its noise, because others have parts of it."""
        return isinstance(self.programs, OverGroups) and not self.programs.is_alone

    @property
    def spans(self) -> bool:
        """Whether the state lies on devices of several processes, which run every program together."""
        return self.layout.mesh.is_multi_process

    def shape(self, size: Size) -> SampleShape:
        """The shape of a micro-batch; a number is of the engine's own samples."""
        if isinstance(size, SampleShape):
            return size
        return SampleShape.of(self.engines.sample, micro_batch_size=size)

    def on(self, layout: Layout) -> "Engine":
        """The engine of the same problem on another layout."""
        return self.engines.on(layout)

    def abstract_state(self) -> TrainState:
        """The state's shapes and types, with this layout's shardings."""
        return self.programs.abstract_state()

    def read(self, packed: Array) -> tuple[StepMetrics[float], np.ndarray]:
        """What a step reports, and the control vectors of all processes added up (empty in one process).

        Fetched at once; waits for the step that computes it.
        """
        programs = self.programs
        return StepMetrics.unpacked(
            np.asarray(packed), programs.aux_names, len(programs.param_groups)
        )

    # -- compiling ahead -------------------------------------------------------------------------

    def training_programs(self, size: Size, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """Those without which a micro-batch size cannot be used."""
        shape, programs = self.shape(size), self.programs
        first = partial(programs.accumulate, shape, first=True)
        more = partial(programs.accumulate, shape, first=False)
        if self.world is not None:
            return (first, more) if accumulate else (first,)
        step = partial(programs.step, shape, measure=False)
        return (step, first, more, partial(programs.step_after, shape)) if accumulate else (step,)

    def last_programs(self, size: Size, *, alone: bool) -> tuple[partial[Program], ...]:
        """That of a batch's last micro-batch of a size of its own: `alone`, or behind others."""
        shape, programs = self.shape(size), self.programs
        if self.world is not None:
            return (partial(programs.accumulate, shape, first=alone),)
        if alone:
            return (partial(programs.step, shape, measure=False),)
        return (partial(programs.step_after, shape),)

    def measuring_programs(self, size: Size) -> tuple[partial[Program], ...]:
        """Those that measure the noise of a batch of one micro-batch; others do so anyway."""
        if self.has_groups or not self.can_measure(size):
            return ()
        if isinstance(self.programs, OverGroups):
            return (partial(self.programs.measured, self.shape(size)),)
        return (partial(self.programs.step, self.shape(size), measure=True),)

    def shared_programs(self, *, accumulate: bool) -> tuple[partial[Program], ...]:
        """What all sizes share."""
        programs = self.programs
        found = []
        if isinstance(programs, OverGroups):
            found += [partial(programs.pack), partial(programs.reduce), partial(programs.update)]
        if programs.has_begin and (accumulate or self.world is not None):
            found.append(partial(programs.begin))
        return tuple(found)

    def compile_program(self, program: Callable[[], Program]) -> None:
        """Compile one of these programs, from abstract values; safe from any thread."""
        self.compiled(program)

    def digest(self, size: Size) -> str:
        """A hash of the program of a step of this size, which is compiled: model, optimizer and layout are
        in it, values are not.
        """
        return self.compiled.digest(partial(self.programs.step, self.shape(size), measure=False))

    def compile(self, sizes: Sequence[Size], *, accumulate: bool = True) -> None:
        """Compile every program of these sizes, but for those that measure in an elastic job: the survivor
        of several goes on without. Safe from any thread.
        """
        for size in sizes:
            programs = self.training_programs(size, accumulate=accumulate)
            if self.world is None:
                programs += self.measuring_programs(size)
            for program in programs:
                self.compile_program(program)
        for program in self.shared_programs(accumulate=accumulate):
            self.compile_program(program)

    def compile_batches(self, plans: Sequence[tuple[Layout, Size]]) -> None:
        """Compile and plan all that batches need which begin and are applied here, and whose
        micro-batches are accumulated under any of `plans`, in any order.
        """
        for layout, size in plans:
            there = self.on(layout)
            for first in (True, False):
                self.compiled(there.programs.accumulate, there.shape(size), first=first)
        if self.programs.has_begin:
            self.compiled(self.programs.begin)
        self.compiled(self.programs.update)
        layouts = dict.fromkeys([self.layout, *(layout for layout, _ in plans)])
        every = [self.on(layout) for layout in layouts]
        for engine in every:
            if isinstance(engine.programs, SeparatePrograms):
                self.compiled(engine.programs.reduce)
                self.compiled(engine.programs.spread)
        moves = self.engines.moves
        for old, new in itertools.permutations(every, 2):
            # Masters that serve as compute parameters belong to the state until a batch has left home.
            for donate in {True, self.problem.compute_dtype is not None or old is not self}:
                self.compiled(moves.work, old.programs, new.programs, donate=donate)
            self.compiled(moves.fixed, old.programs, new.programs)
            self.compiled(moves.sums, old.programs, new.programs)

    def rehearse(self, size: Size, *, accumulate: bool) -> None:
        """Run the training programs once on throw-away zeros, because a first run is slow.

        Collectives over processes are left out: they would have to be run by all at once. Where the state
        spans processes, that is everything.
        """
        if self.spans or isinstance(
            self.programs, RowPrograms
        ):  # there is no room for other tables
            return
        state = self.compiled(self.programs.zeros)()
        batch, mask = self._zero_batch(self.shape(size))
        if self.world is None:
            state, metrics = self.step(state, None, batch, mask, measure=False)
            jax.block_until_ready(metrics)
        if accumulate or self.world is not None:
            work = self.accumulate(self.begin(state), batch, mask)
            if accumulate:
                work = self.accumulate(work, batch, mask)
            jax.block_until_ready(
                work.sums if self.world is not None else self.step(state, work, batch, mask)[1]
            )

    def rehearse_measuring(self, size: Size) -> None:
        """Run the measuring programs once on throw-away zeros."""
        if self.has_groups or self.spans or isinstance(self.programs, RowPrograms):
            return
        state = self.compiled(self.programs.zeros)()
        batch, mask = self._zero_batch(self.shape(size))
        if self.world is None:
            jax.block_until_ready(self.step(state, None, batch, mask)[1])
        elif self.can_measure(size):
            work = self.accumulate(self.begin(state), batch, mask, measure=True)
            jax.block_until_ready(work.sums)

    def bytes_of(self, size: Size) -> StepBytes | None:
        """Predicted peak bytes per device of a step of this size, once it is compiled."""
        shape, programs = self.shape(size), self.programs
        return self._largest(
            partial(programs.step, shape, measure=False),
            partial(programs.step_after, shape),
            partial(programs.accumulate, shape, first=True),
            partial(programs.accumulate, shape, first=False),
        )

    def measuring_bytes_of(self, size: Size) -> StepBytes | None:
        """Predicted peak bytes of a step of this size that measures the noise, once compiled."""
        return self._largest(*self.measuring_programs(size))

    def cost(
        self, program: Callable[P, Program], *args: P.args, **kwargs: P.kwargs
    ) -> Mapping[str, float]:
        """XLA's own cost analysis of a program: flops and bytes accessed, per device."""
        analysis: Any = self.compiled(program, *args, **kwargs).cost_analysis()
        return analysis[0] if isinstance(analysis, list) else analysis

    def tflops_per_sample(self, size: Size) -> float:
        """10^12 operations of matrix products in training one sample; NaN while that is not compiled.

        By the program of a micro-batch of this size, without what measuring the noise adds.
        """
        shape = self.shape(size)
        program = partial(self.programs.step, shape, measure=False)
        if self.world is not None:
            program = partial(self.programs.accumulate, shape, first=True)
        flops = self.compiled.flops(program)
        num_samples = self.layout.num_replicas * shape.micro_batch_size
        return math.nan if flops is None else flops / num_samples / 1e12

    def text(self, program: Callable[P, Program], *args: P.args, **kwargs: P.kwargs) -> str:
        """The optimized HLO of a program."""
        return self.compiled(program, *args, **kwargs).as_text() or ""

    def _largest(self, *programs: partial[Program]) -> StepBytes | None:
        """Predicted peak bytes per device of the largest of these that are compiled."""
        found = [self.compiled.peek(program) for program in programs]
        known = [step_bytes(executable) for executable in found if executable is not None]
        return max(known, key=lambda need: need.peak, default=None)

    # -- a step as a value -----------------------------------------------------------------------

    def init(self, key: Array, given: Mapping[str, Array] = MappingProxyType({})) -> TrainState:
        """A fresh state on this layout; no device ever holds more than its part of it.

        `given` are leaves by their names in `TrainState.variables`, such as "params/layers/0/kernel", that
        lie as in `abstract_state`: taken over in place of those that the problem's `init` makes.
        """
        everywhere = self.layout.replicated
        if self.spans:
            data = self._on_devices(np.asarray(jax.random.key_data(key)), everywhere)
            key = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
        else:
            key = jax.device_put(key, everywhere)
        return self.compiled(self.programs.init, tuple(given))(key, *given.values())

    def couples_samples(self, state: TrainState, four: PyTree) -> bool:
        """Whether the loss of a sample depends on those beside it, tried on `four` of them, with this state.

        A sum over samples, whatever its keys make of a place, has f(abcd) + f(cdab) = f(abab) + f(cdcd).
        False where that cannot be known: of losses that are not finite, or all alike, as before zeros.
        """

        def of(*order: int) -> float:
            return self._loss_of_rows(state, four, np.asarray(order), state.key)

        whole, split = of(0, 1, 2, 3) + of(2, 3, 0, 1), of(0, 1, 0, 1) + of(2, 3, 2, 3)
        share = COUPLED * (1 if self.problem.compute_dtype is None else 10)
        return abs(whole - split) > share * (abs(whole) + abs(split))

    def grows_with_batch(self, state: TrainState, rows: PyTree) -> bool:
        """Whether a plain number that `loss` returns is a sum over the batch, tried with copies of `rows`.

        A doubled batch doubles a sum, beside what does not depend on samples, and leaves a mean as it is;
        what grows otherwise is not said to be one. Random numbers may look like it: several keys are tried.
        """
        loss = self.programs.problem.loss_and_state
        given = jax.tree.map(jnp.asarray, rows)
        out, _ = jax.eval_shape(loss, state.params, state.model_state, given, state.key)
        if isinstance(out, Loss):  # its weight says of how many
            return False

        def of(copies: int, key: Array) -> float:
            places = np.tile(np.arange(len(jax.tree.leaves(rows)[0])), copies)
            return self._loss_of_rows(state, rows, places, key)

        one, two = (of(copies, state.key) for copies in (1, 2))
        if not abs(two - one) > 0.05 * abs(two):  # nor where they are not finite
            return False
        keys = [jax.random.fold_in(state.key, number) for number in range(NUM_KEYS)]
        tried = np.asarray([[of(copies, key) for copies in (1, 2, 4)] for key in keys])
        first, then = tried[:, 1] - tried[:, 0], tried[:, 2] - tried[:, 1]
        noise = first.std() / math.sqrt(NUM_KEYS)
        is_growth = abs(first.mean()) > max(0.05 * abs(tried[:, 1].mean()), 5 * noise)
        is_linear = abs(then.mean() - 2 * first.mean()) < 0.25 * abs(then.mean())
        return bool(is_growth and is_linear)

    def _loss_of_rows(
        self, state: TrainState, rows: PyTree, places: np.ndarray, key: Array
    ) -> float:
        """The loss of some of these rows, in total, each as often as there are replicas."""
        places = np.repeat(places, self.layout.num_replicas)
        batch = jax.device_put(jax.tree.map(lambda x: x[places], rows), self.layout.batch_sharding)
        return float(self._total_loss(state.params, state.model_state, batch, key))

    @cached_property
    def _total_loss(self) -> Callable[..., Array]:
        def total(params: PyTree, model_state: PyTree, batch: PyTree, key: Array) -> Array:
            params = cast(params, self.problem.compute_dtype)
            out, _ = self.programs.problem.loss_and_state(params, model_state, batch, key)
            value = jnp.asarray(out.sum if isinstance(out, Loss) else out)
            return jnp.sum(value.astype(jnp.float32))

        return jax.jit(total)

    def with_average(self, state: TrainState) -> TrainState:
        """A state that has no average of its parameters, with one that begins at them."""
        return dataclasses.replace(state, ema=self.compiled(self.programs.average)(state.params))

    def begin(self, state: TrainState) -> Work:
        """An empty batch for this state: compute-precision parameters, no gradient yet.

        Raises ValueError for a state that was donated already.
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

        `batch` leaves are `[replicas * micro_batch_size, ...]` over this process's devices, `mask`
        `[replicas * micro_batch_size]` float32: 1 for real samples, 0 for padding. The old sums are
        donated. A batch that lies on another layout is moved first: its gradients are reduced there.
        `measure` has the only micro-batch of an elastic job's only group tell its noise (`can_measure`); of
        several each is a group, which tells it anyway.

        Raises ValueError for a Work that was consumed already.
        """
        if layout is not None and layout != self.layout:
            return self.on(layout).accumulate(work, batch, mask)
        work = self._here(work)
        shape = self._shape_of(batch, mask)
        begun = (work.params, work.scale, work.model_state, work.key, work.step)
        old = () if work.sums is None else (work.sums,)
        if measure and not old and isinstance(self.programs, OverGroups):
            run = self.compiled(self.programs.measured, shape)
        else:
            run = self.compiled(self.programs.accumulate, shape, first=not old)
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
        """The last micro-batch and the update, in one executable; for a job that is not elastic.

        Returns the new state and the metrics vector, with the sum of every process's `control` behind it.
        `measure` takes a noise sample, where a batch of one micro-batch tells any (`can_measure`). Donates
        the state.
        """
        if self.world is not None:
            raise ValueError(
                "step() is the fused form, and this engine's job is elastic: its state has to outlive a "
                "peer. Use accumulate() and apply()."
            )
        state.require_alive()
        shape = self._shape_of(batch, mask)
        inputs = (batch, mask, *self._numbers, *self._control_rows(control))
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
        return self.compiled(self.programs.step, shape, measure=measure)(state, *inputs)

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
        """`step` of a problem with tables: also takes their slots and those of the batch's rows.

        Returns the new state, the slots with those rows changed, and the metrics vector. Donates state and
        slots.
        """
        assert isinstance(self.programs, RowPrograms)
        state.require_alive()
        shape = self._shape_of(batch, mask)
        measure = measure and self.programs.can_measure(shape.micro_batch_size)
        run = self.compiled(self.programs.step, shape, measure=measure)
        return run(state, dict(slots), dict(lookups), batch, mask, *self._control_rows(control))

    def apply(
        self, state: TrainState, work: Work, control: np.ndarray | None = None
    ) -> tuple[TrainState, Array]:
        """Reduce over all replicas and update. Donates the state and consumes the work.

        Returns the new state and the metrics vector, with the sum of every process's `control`
        behind it. The reduction donates nothing: where it fails, the state is intact.

        Raises ValueError for a Work that holds nothing or was consumed already.
        """
        total = self.reduce(work, control)
        state, metrics = self.update(state, total, work)
        work.consume()
        return state, metrics

    def reduce(self, work: Work, control: np.ndarray | None = None) -> Sums | Array:
        """The sums of all replicas, on this layout; over processes one flat buffer, one all-reduce."""
        if work.sums is None:
            raise ValueError(
                "the Work holds no micro-batch. Call accumulate() at least once; a replica with "
                "nothing to do accumulates a micro-batch whose mask is 0."
            )
        work.require_unused()
        self._pace(work)
        if work.layout != self.layout:
            there = self.on(work.layout)
            move = self.compiled(self.engines.moves.sums, there.programs, self.programs)
            return move(there.reduce(work))
        programs = self.programs
        if isinstance(programs, OverGroups):
            return self._over_groups(programs, work.sums, control)
        if not isinstance(programs, SeparatePrograms):
            return work.sums
        return self.compiled(programs.reduce)(work.sums)

    def _over_groups(self, programs: OverGroups, sums: Sums, control: np.ndarray | None) -> Array:
        """The flat buffers of this group's devices, added up over those of all groups."""
        flat = self.compiled(programs.pack)(sums, self._row_of_control(control))
        world = programs.world
        everywhere = jax.make_array_from_single_device_arrays(
            (world.size, programs.flat_size),
            NamedSharding(world, rows_of(world)),
            [s.data for s in flat.addressable_shards],
        )
        reduced = self.compiled(programs.reduce)(everywhere)
        return jax.make_array_from_single_device_arrays(
            flat.shape, flat.sharding, [s.data for s in reduced.addressable_shards]
        )

    def update(
        self, state: TrainState, total: Sums | Array, work: Work
    ) -> tuple[TrainState, Array]:
        """The next state from what `reduce` returned: local, donates the state."""
        assert work.sums is not None
        state.require_alive()
        run = self.compiled(self.programs.update)
        if self.world is None:
            return run(state, total)
        return run(state, total, work.sums.model_state)

    # -- between layouts -------------------------------------------------------------------------

    def move(self, state: TrainState, layout: Layout) -> TrainState:
        """The state, which is on this layout, on another one. See `Engines.move`."""
        return self.engines.move(state, self.layout, layout)

    def plan_move(self, layout: Layout) -> MovePlan:
        """What moving a state from here to `layout` would cost. See `Engines.plan_move`."""
        return self.engines.plan_move(self.layout, layout)

    def _pace(self, work: Work) -> None:
        there = self if work.layout == self.layout else self.on(work.layout)
        if self._is_paced or there._is_paced:
            jax.block_until_ready(work.sums)

    def _here(self, work: Work) -> Work:
        """A batch half done, on this layout; one that lies elsewhere is moved, and consumed there."""
        work.require_unused()
        self._pace(work)
        if work.layout == self.layout:
            return work
        there, moves = self.on(work.layout), self.engines.moves
        both = there.programs, self.programs
        # All that may refuse comes first: a refused move leaves the batch as it was.
        move = self.compiled(moves.work, *both, donate=work.owns_params)
        fixed = self.compiled(moves.fixed, *both)
        move_sums = self.compiled(moves.sums, *both)
        for one in (move, fixed, move_sums):
            one.require_room()
        sums = None
        if work.sums is not None:
            reduced = work.sums
            if isinstance(there.programs, SeparatePrograms):
                reduced = self.compiled(there.programs.reduce)(work.sums)
                delete(work.sums)
            sums = move_sums(reduced)
            if isinstance(self.programs, SeparatePrograms):
                sums = self.compiled(self.programs.spread)(sums)
        params, scale = move((work.params, work.scale))
        model_state, key, step = fixed((work.model_state, work.key, work.step))
        moved = Work(
            layout=self.layout,
            owns_params=True,
            params=params,
            scale=scale,
            model_state=model_state,
            key=key,
            step=step,
            sums=sums,
        )
        self._pace(moved)
        return moved

    def _shape_of(self, batch: PyTree, mask: Array) -> SampleShape:
        rows, replicas = mask.shape[0], self.layout.num_replicas
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
        if rows % replicas or lengths - {rows}:
            raise ValueError(
                f"a micro-batch has the same number of rows in every leaf and in the mask, a multiple of the "
                f"{replicas} replicas of {self.layout.strategy.name}; got {sorted(lengths)} rows and a mask "
                f"of {rows}. Pad it to {-(-rows // replicas) * replicas} rows, with 0 in the mask."
            )
        return SampleShape.of_batch(batch, micro_batch_size=rows // replicas)

    @cached_property
    def _numbers(self) -> tuple[Array, ...]:
        """The number of each replica, where each has a gradient of its own; or of the group."""
        group = 0
        if self.world is not None:
            mine = self.layout.mesh.devices.flat[0]
            group = [d.id for d in self.world.devices[:, 0]].index(mine.id)
        if isinstance(self.programs, GroupPrograms):
            return (self._on_devices(np.asarray(group, np.int32), self.layout.replicated),)
        if not isinstance(self.programs, SeparatePrograms):
            return ()
        first = group * self.layout.num_replicas
        numbers = np.arange(first, first + self.layout.num_replicas, dtype=np.int32)
        return (self._on_devices(numbers, self.layout.batch_sharding),)

    def _control_rows(self, control: np.ndarray | None) -> tuple[Array, ...]:
        return (self._row_of_control(control),) if self.programs.control_size else ()

    def _row_of_control(self, control: np.ndarray | None) -> Array:
        """The control vectors of all devices: this process's on the first of its own, 0 on the others."""
        devices = list(self.layout.mesh.devices.flat)
        rows = np.zeros((len(devices), self.engines.control_size), np.float32)
        if control is not None:
            mine = jax.process_index(devices[0].client)
            rows[[d.process_index for d in devices].index(mine)] = control
        return self._on_devices(rows, self.layout.row_per_device)

    def _on_devices(self, value: np.ndarray, sharding: NamedSharding) -> Array:
        """A value that every process knows its own part of, cut over the devices of all of them."""
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        with jax.transfer_guard("allow"):  # it is meant
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

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
