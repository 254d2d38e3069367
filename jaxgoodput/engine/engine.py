"""The engine owns a job's executables and runs one step as a value: begin, accumulate, apply.

An engine works on one layout; `on` gives that of another one, and a batch half done, or a whole state,
passes between them in memory. A batch may so be accumulated under one layout after another (short
sequences under data parallelism, long ones under tensor parallelism) and applied at home.

`accumulate` holds no collective under data parallelism and does not depend on how many processes there
are. `apply` is `reduce` (over the replicas, nothing donated, so that the state outlives a peer that dies)
and then `update` (donating). `step` is the fused form for one process: the last micro-batch and `apply`
in a single executable, so that a step of one micro-batch is one executable.

Every executable and every move is compiled ahead, from abstract values only, and is kept by (role, shape
of the micro-batch); calling one that is missing compiles it on the caller's thread.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.compiled import Compiled
from jaxgoodput.engine.memory import StepBytes
from jaxgoodput.engine.ownership import check_alive, check_unused, consume, delete
from jaxgoodput.engine.programs import Recipes, Shape
from jaxgoodput.engine.programs_multiprocess import AcrossRecipes
from jaxgoodput.engine.state import Previous, TrainState, Variables, Work
from jaxgoodput.engine.switching import Moves
from jaxgoodput.parallel.partition import ParamSpecs
from jaxgoodput.parallel.plan import MovePlan
from jaxgoodput.parallel.strategy import Layout

# Samples per replica of the engine's own data set, or a micro-batch of any other shape.
Size = int | Shape


class Engine:
    """Executables of one problem on one layout.

    `layout` covers this process's devices; `world` is the mesh over the devices of all processes
    (None: this process is alone). `sample` is the abstract value of one sample, without a batch axis.
    `memory_bytes` bounds what a move between layouts may hold on a device (None: not checked).

    Raises:
      ValueError: rules that do not fit the parameters; several processes with anything but data
        parallelism.
    """

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        sample: PyTree,
        *,
        world: Mesh | None = None,
        control_size: int = 0,
        memory_bytes: int | None = None,
    ):
        self.problem = problem
        self.layout = layout
        self.world = world if world is not None and world.size > layout.mesh.size else None
        self._sample = sample
        self._control_size = control_size
        first = 0
        if self.world is None:
            recipes = Recipes(problem, layout, Shape.of(1, sample))
        else:
            if layout.strategy.is_cut:
                raise ValueError(
                    f"several processes train with data parallelism only; got {layout.strategy.name}. "
                    "Use Strategy(data=-1), or one process."
                )
            recipes = AcrossRecipes(
                problem, layout, Shape.of(1, sample), world=self.world, control_size=control_size
            )
            mine = layout.mesh.devices.flat[0]
            first = [d.id for d in self.world.devices.flat].index(mine.id)
        self._recipes, self._executable = recipes, Compiled(recipes)
        ids = np.arange(first, first + layout.num_replicas, dtype=np.int32)
        self._replicas = jax.device_put(ids, layout.batch_sharding)
        # XLA:CPU runs out of threads, and hangs, where many executables with collectives wait at once.
        on_cpu = layout.mesh.devices.flat[0].platform == "cpu"
        self._is_paced = on_cpu and layout.strategy.is_cut
        # Shared by the engines of all layouts.
        self._family: dict[Layout, Engine] = {layout: self}
        self._family_lock = threading.Lock()
        self._moves = Moves(memory_bytes)

    # -- what there is ---------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes together."""
        return self.layout.num_replicas if self.world is None else self.world.size

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the entries of the metrics vector, in order."""
        return self._recipes.metric_names

    def read(self, metrics: Array) -> dict[str, float]:
        """The metrics vector on the host, by name. Waits for the step that computes it."""
        values = np.asarray(jax.device_get(metrics))
        named = dict(zip(self.metric_names, values[: len(self.metric_names)].tolist(), strict=True))
        return named

    def read_control(self, metrics: Array) -> np.ndarray:
        """The agreement vector that rode along with the reduction, summed over processes."""
        return np.asarray(jax.device_get(metrics))[len(self.metric_names) :]

    def loss_kind(self) -> str:
        """'sample' or 'mean': whether the loss can leave padded samples out."""
        state = self._recipes.state
        variables = Variables(params=state.params, model_state=state.model_state)
        return pure.loss_kind(self.problem, variables, self.shape(2).batch(2), 2)

    def roles(self, *, accumulate: bool) -> tuple[str, ...]:
        """The executables that one micro-batch size needs."""
        return (*self.training_roles(accumulate=accumulate), *self.measuring_roles)

    def training_roles(self, *, accumulate: bool) -> tuple[str, ...]:
        """Those without which a size cannot be used."""
        if self.world is not None:
            return ("first", "more")
        return ("step", "first", "more", "step_after") if accumulate else ("step",)

    @property
    def measuring_roles(self) -> tuple[str, ...]:
        """Those that measure the noise of a batch of one micro-batch; others do so anyway."""
        if self.world is not None:
            return ()
        pairs = self._recipes.estimator.needs_two_steps
        return ("step_remember", "step_difference") if pairs else ("step_measured",)

    @property
    def needs_two_steps(self) -> bool:
        """Whether a batch of one micro-batch is a single group, so that two make a noise sample."""
        return self.world is None and self._recipes.estimator.needs_two_steps

    @property
    def param_specs(self) -> ParamSpecs:
        """How parameters, and what follows them, are cut."""
        return self._recipes.param_specs

    def shape(self, size: Size) -> Shape:
        """The shape of a micro-batch; a number is of the engine's own samples."""
        return size if isinstance(size, Shape) else Shape.of(size, self._sample)

    def is_ready(self, size: Size, *, accumulate: bool) -> bool:
        """Whether every executable of this size is compiled."""
        return self._executable.has(self.roles(accumulate=accumulate), self.shape(size))

    def measuring_bytes_of(self, size: Size) -> StepBytes | None:
        """Predicted peak bytes of a step of this size that measures the noise, once compiled."""
        return self._executable.largest_of(self.measuring_roles, self.shape(size))

    def bytes_of(self, size: Size) -> StepBytes | None:
        """Predicted peak bytes per device of a step of this size, once it is compiled."""
        return self._executable.bytes_of(self.shape(size))

    # -- making and compiling --------------------------------------------------------------------

    def init(self, key: Array) -> TrainState:
        """A fresh state on this layout; no device ever holds more than its part of it."""
        return self._executable("init")(jax.device_put(key, self.layout.replicated))

    def abstract_state(self) -> TrainState:
        """The state's shapes and types, with this layout's shardings."""
        return self._recipes.abstract_state()

    def on(self, layout: Layout) -> "Engine":
        """The engine of the same problem on another layout; there is one for each."""
        with self._family_lock:
            found = self._family.get(layout)
            if found is None:
                if self.world is not None:
                    raise ValueError(
                        "an engine that spans processes has one layout; several need one process."
                    )
                found = Engine(self.problem, layout, self._sample)
                found._family, found._family_lock = self._family, self._family_lock
                found._moves = self._moves
                self._family[layout] = found
        return found

    def compile(self, sizes: Sequence[Size], *, accumulate: bool = True) -> None:
        """Compile every executable of these sizes, from abstract values; safe from any thread."""
        for size in sizes:
            for role in self.roles(accumulate=accumulate):
                self.compile_role(role, size)
        self.compile_shared(accumulate=accumulate)

    def compile_shared(self, *, accumulate: bool) -> None:
        """Compile what all sizes share; safe from any thread."""
        if self.world is not None:
            for role in ("pack", "reduce", "update"):
                self._executable(role)
        if self._recipes.has_begin and (accumulate or self.world is not None):
            self._executable("begin")

    def compile_role(self, role: str, size: Size) -> None:
        """Compile one executable of `roles`; safe from any thread."""
        self._executable(role, self.shape(size))

    def compile_batches(self, plans: Sequence[tuple[Layout, Size]]) -> None:
        """Compile and plan all that batches need which begin and are applied here, and whose
        micro-batches are accumulated under any of `plans`, in any order.
        """
        layouts = list(dict.fromkeys([self.layout, *(layout for layout, _ in plans)]))
        for layout, size in plans:
            for role in ("first", "more"):
                self.on(layout).compile_role(role, size)
        for layout in layouts:
            self.on(layout)._executable("reduce")
            self.on(layout)._executable("spread")
        if self._recipes.has_begin:
            self._executable("begin")
        self._executable("update")
        for old in (self.on(layout) for layout in layouts):
            # Masters that serve as compute parameters belong to the state, at home.
            owned = self.problem.compute_dtype is not None or old is not self
            for new in (self.on(layout) for layout in layouts):
                if old is not new:
                    self._moves.work(old._recipes, new._recipes, donate=owned)
                    self._moves.fixed(old._recipes, new._recipes)
                    self._moves.sums(old._recipes, new._recipes)

    def compile_moves(self, layouts: Sequence[Layout]) -> None:
        """Compile and plan the moves of a state between this layout and any of `layouts`."""
        every = list(dict.fromkeys([self.layout, *layouts]))
        for old in every:
            for new in every:
                if old != new:
                    self._moves.state(self.on(old)._recipes, self.on(new)._recipes)

    def plan_move(self, layout: Layout) -> MovePlan:
        """What moving a state from here to `layout` would cost; nothing runs, nothing is compiled.

        Of a move that is compiled already, with the routes that were chosen for it.
        """
        return self._moves.plan(self._recipes, self.on(layout)._recipes)

    def cost(self, role: str, size: Size) -> Mapping[str, float]:
        """XLA's own cost analysis of an executable: flops and bytes accessed, per device."""
        return self._executable.cost(role, self.shape(size))

    def text(self, role: str, size: Size) -> str:
        """The optimized HLO of an executable."""
        return self._executable.text(role, self.shape(size))

    def rehearse(self, size: Size, roles: Sequence[str]) -> None:
        """Run these of `roles` once on throw-away zeros, because a first run is slow.

        Collectives over processes are left out: they would have to be run by all at once.
        """
        state = self._executable("zeros")()
        batch, mask = self._zero_batch(self.shape(size))
        metrics = None
        if "step" in roles:
            state, metrics, _ = self.step(state, None, batch, mask, measure=False)
        if self.measuring_roles and set(self.measuring_roles) <= set(roles):
            state, metrics, previous = self.step(state, None, batch, mask)
            if previous is not None:
                state, metrics, _ = self.step(state, None, batch, mask, previous=previous)
        jax.block_until_ready(metrics)
        if "more" in roles:
            work = self.accumulate(self.accumulate(self.begin(state), batch, mask), batch, mask)
            if self.world is None:
                self.step(state, work, batch, mask)[1].block_until_ready()
            else:
                jax.block_until_ready(work.sums)

    # -- a step as a value -----------------------------------------------------------------------

    def begin(self, state: TrainState) -> Work:
        """An empty batch for this state: compute-precision parameters, no gradient yet.

        Raises ValueError for a state that was donated already.
        """
        check_alive(state)
        params, scale = state.params, ()
        if self._recipes.has_begin:
            computed, scale = self._executable("begin")(state.params, state.opt_state)
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
        self, work: Work, batch: PyTree, mask: Array, layout: Layout | None = None
    ) -> Work:
        """Add one micro-batch on every replica of `layout` (default: this one).

        `batch` leaves are `[replicas * micro_batch_size, ...]` over this process's devices, `mask`
        `[replicas * micro_batch_size]` float32: 1 for real samples, 0 for padding. The old sums are
        donated. A batch that lies on another layout is moved first: its gradients are reduced there.

        Raises ValueError for a Work that was consumed already.
        """
        if layout is not None and layout != self.layout:
            return self.on(layout).accumulate(work, batch, mask)
        work = self._here(work)
        shape = self._shape_of(batch, mask)
        fixed = (work.params, work.scale, work.model_state, work.key, work.step, self._replicas)
        if work.sums is None:
            sums = self._executable("first", shape)(*fixed, batch, mask)
        else:
            sums = self._executable("more", shape)(*fixed, batch, mask, work.sums)
        return dataclasses.replace(work, sums=sums)

    def move(self, state: TrainState, layout: Layout) -> TrainState:
        """The state, which is on this layout, on another one; the old one is deleted on the way.

        Raises MoveDoesNotFit, and leaves the state alone, where it would need more memory than there is.
        """
        if layout == self.layout:
            return state
        return self._moves.state(self._recipes, self.on(layout)._recipes)(state)

    def step(
        self,
        state: TrainState,
        work: Work | None,
        batch: PyTree,
        mask: Array,
        *,
        measure: bool = True,
        previous: Previous | None = None,
    ) -> tuple[TrainState, Array, Previous | None]:
        """The last micro-batch and the update, in one executable; for one process.

        Returns the new state and the metrics vector. For one replica with one micro-batch, a noise
        sample takes two measured steps: the first returns the gradient to be remembered, which the
        second must be given as `previous`; otherwise the third value is None. Donates the state.
        """
        if self.world is not None:
            raise ValueError(
                "step() is the fused form for one process, and this engine spans several. "
                "Use accumulate() and apply()."
            )
        check_alive(state)
        size = self._shape_of(batch, mask)
        if work is not None:
            if work.sums is None:
                raise ValueError(
                    "step() got an empty Work. Pass None for a batch of one micro-batch."
                )
            work = self._here(work)
            run = self._executable("step_after", size)
            state, metrics = run(state, work.sums, self._replicas, batch, mask)
            consume(work)
            return state, metrics, None
        if not measure:
            state, metrics = self._executable("step", size)(state, self._replicas, batch, mask)
            return state, metrics, None
        if not self.needs_two_steps:
            run = self._executable("step_measured", size)
            state, metrics = run(state, self._replicas, batch, mask)
            return state, metrics, None
        if previous is None:
            run = self._executable("step_remember", size)
            return run(state, self._replicas, batch, mask)
        run = self._executable("step_difference", size)
        state, metrics = run(state, previous, self._replicas, batch, mask)
        return state, metrics, None

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
        consume(work)
        return state, metrics

    def reduce(self, work: Work, control: np.ndarray | None = None) -> Any:
        """The sums of all replicas, on this layout; over processes one flat buffer, one all-reduce."""
        if work.sums is None:
            raise ValueError(
                "the Work holds no micro-batch. Call accumulate() at least once; a replica with "
                "nothing to do accumulates a micro-batch whose mask is 0."
            )
        check_unused(work)
        self._pace(work)
        if work.layout != self.layout:
            there = self.on(work.layout)
            return self._moves.sums(there._recipes, self._recipes)(there.reduce(work))
        if self.world is None:
            return self._executable("reduce")(work.sums)
        rows = np.zeros((self.layout.num_replicas, self._control_size), np.float32)
        if control is not None:
            rows[0] = control
        rows = jax.device_put(rows, self.layout.batch_sharding)
        flat = self._executable("pack")(work.sums, rows)
        shape = (self.world.size, flat.shape[1])
        sharding = NamedSharding(self.world, PartitionSpec(*self.world.axis_names))
        everywhere = jax.make_array_from_single_device_arrays(
            shape, sharding, [s.data for s in flat.addressable_shards]
        )
        return self.local(self._executable("reduce")(everywhere))

    def update(self, state: TrainState, total: Any, work: Work) -> tuple[TrainState, Array]:
        """The next state from what `reduce` returned: local, donates the state."""
        assert work.sums is not None
        check_alive(state)
        if self.world is None:
            return self._executable("update")(state, total)
        return self._executable("update")(state, total, work.sums.model_state)

    def local(self, replicated: Array) -> Array:
        """A value replicated over all processes, as this process's own copy."""
        return jax.make_array_from_single_device_arrays(
            replicated.shape,
            self.layout.replicated,
            [s.data for s in replicated.addressable_shards],
        )

    # -- between layouts -------------------------------------------------------------------------

    def _pace(self, work: Work) -> None:
        if self._is_paced or self.on(work.layout)._is_paced:
            jax.block_until_ready(work.sums)

    def _here(self, work: Work) -> Work:
        """A batch half done, on this layout; one that lies elsewhere is moved, and consumed there."""
        check_unused(work)
        self._pace(work)
        if work.layout == self.layout:
            return work
        there = self.on(work.layout)
        # All that may refuse comes first: a refused move leaves the batch as it was.
        move = self._moves.work(there._recipes, self._recipes, donate=work.owns_params)
        fixed = self._moves.fixed(there._recipes, self._recipes)
        move_sums = self._moves.sums(there._recipes, self._recipes)
        for one in (move, fixed, move_sums):
            one.require_room()
        sums = None
        if work.sums is not None:
            reduced = there._executable("reduce")(work.sums)
            delete(work.sums)
            sums = self._executable("spread")(move_sums(reduced))
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

    def _shape_of(self, batch: PyTree, mask: Array) -> Shape:
        rows, replicas = mask.shape[0], self.layout.num_replicas
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
        if rows % replicas or lengths - {rows}:
            raise ValueError(
                f"a micro-batch has the same number of rows in every leaf and in the mask, a multiple of the "
                f"{replicas} replicas of {self.layout.strategy.name}; got {sorted(lengths)} rows and a mask "
                f"of {rows}. Pad it to {-(-rows // replicas) * replicas} rows, with 0 in the mask."
            )
        return Shape.of_batch(rows // replicas, batch)

    def _zero_batch(self, shape: Shape) -> Any:
        _, batch, mask = self._recipes.abstract_batch(shape)
        zeros = jax.jit(
            lambda: (
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), batch),
                jnp.ones(mask.shape, mask.dtype),
            ),
            out_shardings=self.layout.batch_sharding,
        )
        return zeros()
