"""The engine owns a job's executables and runs one step as a value: begin, accumulate, apply.

Parameters and optimizer state are replicated over the devices of this process (the local mesh); a
batch is cut over them. `accumulate` holds no collective and does not depend on how many processes
there are. `apply` is `reduce` (the only collective: one flat buffer over all replicas of all
processes, nothing donated, so that the state outlives a peer that dies) and then `update` (local,
donating). `step` is the fused form for one process: the last micro-batch and `apply` in a single
executable, so that a step of one micro-batch is one executable.

Every executable is compiled ahead by `compile`, from abstract values only, and is kept by (role,
micro-batch size). Calling one that is missing compiles it on the caller's thread.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from jaxgoodput.parallel.strategy import Layout
from jaxgoodput.train import step as pure
from jaxgoodput.train.executables import ROWS, Recipes
from jaxgoodput.train.memory import StepBytes, step_bytes
from jaxgoodput.train.state import Previous, TrainState, Variables, Work


class Engine:
    """Executables of one problem on one layout.

    `layout` covers this process's devices; `world` is the mesh over the devices of all processes
    (None: this process is alone). `sample` is the abstract value of one sample, without a batch axis.
    """

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        sample: PyTree,
        *,
        world: Mesh | None = None,
        control_size: int = 0,
    ):
        self.problem = problem
        self.layout = layout
        self.world = world if world is not None and world.size > layout.mesh.size else None
        self._control_size = control_size
        self._executables: dict[tuple[str, int], Any] = {}
        self._bytes: dict[int, StepBytes] = {}
        self._lock = threading.Lock()
        self._compiling: dict[tuple[str, int], threading.Lock] = {}
        self._recipes = Recipes(
            problem, layout, sample, world=self.world, control_size=control_size
        )
        first = 0
        if self.world is not None:
            mine = layout.mesh.devices.flat[0]
            first = [d.id for d in self.world.devices.flat].index(mine.id)
        ids = np.arange(first, first + layout.num_replicas, dtype=np.int32)
        self._replicas = jax.device_put(ids, layout.batch_sharding)

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
        return pure.loss_kind(self.problem, variables, self._recipes.batch_of(2), 2)

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
        alone = self.layout.num_replicas == 1
        return ("step_remember", "step_difference") if alone else ("step_measured",)

    def is_ready(self, micro_batch_size: int, *, accumulate: bool) -> bool:
        """Whether every executable of this size is compiled."""
        with self._lock:
            return all(
                (role, micro_batch_size) in self._executables
                for role in self.roles(accumulate=accumulate)
            )

    def measuring_bytes_of(self, micro_batch_size: int) -> StepBytes | None:
        """Predicted peak bytes of a step of this size that measures the noise, once compiled."""
        with self._lock:
            found = [self._executables.get((r, micro_batch_size)) for r in self.measuring_roles]
        known = [step_bytes(executable) for executable in found if executable is not None]
        return max(known, key=lambda need: need.peak, default=None)

    def bytes_of(self, micro_batch_size: int) -> StepBytes | None:
        """Predicted peak bytes per device of a step of this size, once it is compiled."""
        with self._lock:
            return self._bytes.get(micro_batch_size)

    # -- making and compiling --------------------------------------------------------------------

    def init(self, key: Array) -> TrainState:
        """A fresh state, replicated over this process's devices."""
        build = jax.jit(
            lambda k: pure.init_state(self.problem, k), out_shardings=self.layout.replicated
        )
        return build(jax.device_put(key, self.layout.replicated))

    def abstract_state(self) -> TrainState:
        """The state's shapes and types, with this layout's shardings."""
        return self._recipes.abstract_state()

    def compile(self, micro_batch_sizes: Sequence[int], *, accumulate: bool = True) -> None:
        """Compile every executable of these sizes, from abstract values; safe from any thread."""
        for size in micro_batch_sizes:
            for role in self.roles(accumulate=accumulate):
                self.compile_role(role, size)
        self.compile_shared(accumulate=accumulate)

    def compile_shared(self, *, accumulate: bool) -> None:
        """Compile what all sizes share; safe from any thread."""
        if self.world is not None:
            for role in ("pack", "reduce", "update"):
                self._executable(role, 0)
        if self._recipes.has_begin and (accumulate or self.world is not None):
            self._executable("begin", 0)

    def compile_role(self, role: str, micro_batch_size: int) -> None:
        """Compile one executable of `roles`; safe from any thread."""
        self._executable(role, micro_batch_size)

    def cost(self, role: str, micro_batch_size: int) -> Mapping[str, float]:
        """XLA's own cost analysis of an executable: flops and bytes accessed, per device."""
        analysis = self._executable(role, micro_batch_size).cost_analysis()
        return analysis[0] if isinstance(analysis, list) else analysis

    def text(self, role: str, micro_batch_size: int) -> str:
        """The optimized HLO of an executable."""
        return self._executable(role, micro_batch_size).as_text()

    def rehearse(self, micro_batch_size: int, roles: Sequence[str]) -> None:
        """Run these of `roles` once on throw-away zeros, because a first run is slow.

        Collectives over processes are left out: they would have to be run by all at once.
        """
        zeros = self._executable("zeros", 0)
        batch, mask = self._zero_batch(micro_batch_size)
        state = zeros()
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
        """An empty batch for this state: compute-precision parameters, no gradient yet."""
        params, scale = state.params, ()
        if self._recipes.has_begin:
            computed, scale = self._executable("begin", 0)(state.params, state.opt_state)
            params = params if self.problem.compute_dtype is None else computed
        return Work(
            params=params,
            scale=scale,
            model_state=state.model_state,
            key=state.key,
            step=state.step,
            sums=None,
        )

    def accumulate(self, work: Work, batch: PyTree, mask: Array) -> Work:
        """Add one micro-batch on every replica. No collective; the old sums are donated.

        `batch` leaves are `[replicas * micro_batch_size, ...]` over this process's devices, `mask`
        `[replicas * micro_batch_size]` float32: 1 for real samples, 0 for padding.
        """
        size = mask.shape[0] // self.layout.num_replicas
        fixed = (work.params, work.scale, work.model_state, work.key, work.step, self._replicas)
        if work.sums is None:
            sums = self._executable("first", size)(*fixed, batch, mask)
        else:
            sums = self._executable("more", size)(*fixed, batch, mask, work.sums)
        return dataclasses.replace(work, sums=sums)

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
        size = mask.shape[0] // self.layout.num_replicas
        if work is not None:
            if work.sums is None:
                raise ValueError(
                    "step() got an empty Work. Pass None for a batch of one micro-batch."
                )
            run = self._executable("step_after", size)
            state, metrics = run(state, work.sums, self._replicas, batch, mask)
            return state, metrics, None
        if not measure:
            state, metrics = self._executable("step", size)(state, self._replicas, batch, mask)
            return state, metrics, None
        if self.layout.num_replicas > 1:
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
        """Reduce over all replicas and update. Donates the state, not the work.

        Returns the new state and the metrics vector, with the sum of every process's `control`
        behind it. The reduction donates nothing: where it fails, the state is intact.
        """
        return self.update(state, self.reduce(work, control), work)

    def reduce(self, work: Work, control: np.ndarray | None = None) -> Array:
        """The sums of all replicas of all processes: one flat buffer, one all-reduce."""
        if work.sums is None:
            raise ValueError(
                "the Work holds no micro-batch. Call accumulate() at least once; a replica with "
                "nothing to do accumulates a micro-batch whose mask is 0."
            )
        rows = np.zeros((self.layout.num_replicas, self._control_size), np.float32)
        if control is not None:
            rows[0] = control
        rows = jax.device_put(rows, self.layout.batch_sharding)
        flat = self._executable("pack", 0)(work.sums, rows)
        if self.world is None:
            return self._executable("reduce", 0)(flat)
        shape = (self.world.size, flat.shape[1])
        everywhere = jax.make_array_from_single_device_arrays(
            shape, NamedSharding(self.world, ROWS), [s.data for s in flat.addressable_shards]
        )
        return self.local(self._executable("reduce", 0)(everywhere))

    def update(self, state: TrainState, total: Array, work: Work) -> tuple[TrainState, Array]:
        """The next state from the reduced sums: local, donates the state."""
        assert work.sums is not None
        return self._executable("update", 0)(state, total, work.sums.model_state)

    def local(self, replicated: Array) -> Array:
        """A value replicated over all processes, as this process's own copy."""
        return jax.make_array_from_single_device_arrays(
            replicated.shape,
            self.layout.replicated,
            [s.data for s in replicated.addressable_shards],
        )

    # -- executables -----------------------------------------------------------------------------

    def _executable(self, role: str, size: int) -> Any:
        with self._lock:
            found = self._executables.get((role, size))
            if found is not None:
                return found
            turn = self._compiling.setdefault((role, size), threading.Lock())
        with turn:
            with self._lock:
                found = self._executables.get((role, size))
            if found is None:
                found = self._recipes.recipe(role, size).compile()
                with self._lock:
                    self._executables[(role, size)] = found
                    if role in ("step", "step_after", "more"):
                        old = self._bytes.get(size)
                        new = step_bytes(found)
                        self._bytes[size] = new if old is None or new.peak > old.peak else old
        return found

    def _zero_batch(self, size: int):
        _, batch, mask = self._recipes.abstract_batch(size)
        zeros = jax.jit(
            lambda: (
                jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), batch),
                jnp.ones(mask.shape, mask.dtype),
            ),
            out_shardings=self.layout.batch_sharding,
        )
        return zeros()
