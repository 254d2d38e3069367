"""Evaluation: per-sample outputs of the user's `metrics` over a whole data set, exactly once each.

It runs wherever the state lies, which may change from one evaluation to the next: batches go to the
state's own mesh, and each way of cutting parameters has an executable of its own.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.readers import Attempts, Readers, Reading
from jaxgoodput.data.rows import held_rows, narrow, parts_of, put_rows
from jaxgoodput.data.sources import Source, abstract_sample
from jaxgoodput.engine.memory import StepBytes, step_bytes
from jaxgoodput.engine.programs import Program
from jaxgoodput.engine.state import TrainState, cast
from jaxgoodput.parallel.strategy import DATA_AXIS, REPLICA_AXES, Layout, in_mesh

Metrics = Callable[[PyTree, PyTree, PyTree], Mapping[str, Any]]

# Batches under way at once, behind which outputs are fetched: memory stays bounded.
DEPTH = 3


@dataclass(frozen=True)
class _Placed:
    """`metrics` compiled for states that lie in one way."""

    run: Any
    num_rows: int  # of a batch, all replicas together
    batch_sharding: NamedSharding
    depth: int

    @property
    def spans(self) -> bool:
        """Whether the states lie on devices of several processes."""
        return not self.batch_sharding.is_fully_addressable


class Evaluator:
    """Owns the compiled `metrics`. Each process covers its own part of the samples.

    Where a state spans processes, those cover every batch together, each with the rows of its devices.
    States may lie on any mesh of a `Layout`, and are evaluated there; one that lies on no mesh, on the
    devices of `layout`. `read` makes of a batch on the host the one that `metrics` gets, and `blank` one of
    the same shapes, without reading.
    """

    def __init__(
        self,
        metrics: Metrics,
        source: Source,
        layout: Layout,
        *,
        micro_batch_size: int,
        compute_dtype: Any = None,
        process_index: int = 0,
        process_count: int = 1,
        clock: Clock,
        num_readers: int | None = 1,
        num_retries: int = 0,
        read: Callable[[PyTree], PyTree] = lambda rows: rows,
        blank: Callable[[PyTree], PyTree] = lambda rows: rows,
    ):
        self._metrics = metrics
        self._read, self._blank = read, blank
        self._source = source
        self._again = Attempts(num_retries=num_retries, clock=clock)
        self._readers = partial(
            Readers, source, clock=clock, num_readers=num_readers, num_retries=num_retries
        )
        self._layout = layout
        self._micro_batch_size = micro_batch_size
        self._compute_dtype = compute_dtype
        self._process_index = process_index
        self._process_count = process_count
        self._placed: dict[tuple[Any, ...], _Placed] = {}
        self.num_batches = 0  # begun so far: a sign of life

    def check(self, abstract: TrainState) -> tuple[str, ...]:
        """The names of the metrics; nothing is compiled.

        Raises TypeError where one is not one value per sample.
        """
        return self._planned(abstract)[3]

    def compile(self, abstract: TrainState) -> None:
        """Compile ahead for states that lie like this abstract one; safe from any thread.

        Raises TypeError where a metric is not one value per sample.
        """
        key = _placement(abstract)
        if key not in self._placed:
            self._placed[key] = self._compile(abstract)

    def bytes_of(self, abstract: TrainState) -> StepBytes | None:
        """Predicted peak bytes per device of one batch, once compiled for such states."""
        found = self._placed.get(_placement(abstract))
        return None if found is None else step_bytes(found.run)

    def _planned(self, abstract: TrainState) -> tuple[Program, int, NamedSharding, tuple[str, ...]]:
        """The program of a batch, its rows, where they lie, and the names of what it gives."""
        where = abstract.step.sharding
        mesh: Any = where.mesh if isinstance(where, NamedSharding) else self._layout.mesh
        sharding = NamedSharding(mesh, self._layout.batch_sharding.spec)
        num_replicas = math.prod(mesh.shape[axis] for axis in REPLICA_AXES)
        # Not more than there is: a small set should not be padded to a large batch.
        num_parts, _ = self._parts(sharding)
        share = -(-len(self._source) // (num_replicas * num_parts))
        num_rows = min(self._micro_batch_size, share) * num_replicas
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype, sharding=sharding),
            self._blank(
                jax.tree.map(
                    lambda x: np.zeros((1, *x.shape), x.dtype),
                    self._again(partial(abstract_sample, self._source)),
                )
            ),
        )

        metrics = in_mesh(self._metrics, mesh.abstract_mesh, self._layout.strategy)

        def run(params: PyTree, model_state: PyTree, batch: PyTree) -> Mapping[str, Any]:
            # An average has more bits than some masters.
            params = jax.tree.map(lambda x, own: x.astype(own.dtype), params, abstract.params)
            return metrics(cast(params, self._compute_dtype), model_state, batch)

        arguments = (abstract.averaged, abstract.model_state, batch)
        shapes = jax.eval_shape(run, *arguments)
        for name, out in shapes.items():
            if not out.shape or out.shape[0] != num_rows:
                raise TypeError(
                    f"metrics[{name!r}] has shape {out.shape} for {num_rows} samples. Return one "
                    f"value (or row) per sample, shape ({num_rows}, ...): padding is left out and "
                    "parts are put together afterwards."
                )
        spans = not sharding.is_fully_addressable
        # What every process is to fetch has to lie whole in every process.
        out = NamedSharding(mesh, PartitionSpec()) if spans else sharding
        return Program(run, (), arguments, out), num_rows, sharding, tuple(shapes)

    def _compile(self, abstract: TrainState) -> _Placed:
        program, num_rows, sharding, _ = self._planned(abstract)
        mesh: Any = sharding.mesh
        spans = not sharding.is_fully_addressable
        cuts = mesh.size > mesh.shape[DATA_AXIS]
        options: dict[str, str | bool] = {}
        depth = DEPTH
        if (cuts or spans) and mesh.devices.flat[0].platform == "cpu":
            # XLA:CPU gathers all parameters before it computes anything, unless told otherwise. And it
            # runs out of threads, and hangs, where many executables with collectives wait at once.
            options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
            depth = 1
        return _Placed(
            run=program.lower().compile(compiler_options=options),
            num_rows=num_rows,
            batch_sharding=sharding,
            depth=depth,
        )

    def __call__(
        self, state: TrainState, *, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, np.ndarray]:
        """The outputs for every sample of the set, in its order, on the host.

        Of the average of the parameters where the state has one (`TrainState.averaged`). `meanwhile` is
        called before every batch, and may raise.
        """
        self.compile(jax.tree.map(_abstract, state))
        placed = self._placed[_placement(state)]
        if placed.depth == 1:
            jax.block_until_ready(state)
        total, num_rows, sharding = len(self._source), placed.num_rows, placed.batch_sharding
        num_parts, part = self._parts(sharding)
        mine = np.array_split(np.arange(total), num_parts)[part]
        held = held_rows(sharding, num_rows)
        pending, parts = [], []
        # A process without a sample runs one batch all the same: the others wait for its outputs.
        cut = [mine[i : i + num_rows] for i in range(0, max(len(mine), 1), num_rows)]
        with self._readers() as readers:

            def begun(indices: np.ndarray) -> Reading:
                rows = np.resize(indices, num_rows)[held]
                return readers.begin(rows, np.zeros_like(rows))

            ahead = deque([begun(cut[0])])
            for indices, following in zip(cut, [*cut[1:], None], strict=True):
                self.num_batches += 1
                meanwhile()
                if (
                    following is not None
                ):  # read while this one is computed, where there are threads
                    ahead.append(begun(following))
                rows = self._read(narrow(ahead.popleft().result()))
                batch = put_rows(rows, held, sharding, num_rows=num_rows)
                pending.append((len(indices), placed.run(state.averaged, state.model_state, batch)))
                if len(pending) >= placed.depth:
                    parts.append(_fetch(*pending.pop(0)))
        parts += [_fetch(*p) for p in pending]
        merged = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        return merged if num_parts == 1 else self._everyone(merged, total, num_parts)

    def _parts(self, sharding: NamedSharding) -> tuple[int, int]:
        """How many meshes share the samples, and the number of this one."""
        return parts_of(sharding, self._process_index, self._process_count)

    def _everyone(
        self, mine: dict[str, np.ndarray], total: int, num_parts: int
    ) -> dict[str, np.ndarray]:
        longest = -(-total // num_parts)
        gathered: dict[str, np.ndarray] = {}
        counts = [len(p) for p in np.array_split(np.arange(total), num_parts)]
        for name, part in mine.items():
            row = np.zeros((longest, *part.shape[1:]), part.dtype)
            row[: len(part)] = part
            every = np.asarray(multihost_utils.process_allgather(row))
            every = every[:: self._process_count // num_parts]  # those of a mesh have the same
            gathered[name] = np.concatenate([r[:n] for r, n in zip(every, counts, strict=True)])
        return gathered


def _placement(state: TrainState) -> tuple[Any, ...]:
    """Where parameters and model state lie; with their shapes, all that an executable depends on."""
    tree = (state.averaged, state.model_state, state.step)
    return tuple((x.sharding, x.dtype) for x in jax.tree.leaves(tree))


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _fetch(count: int, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(jax.device_get(x))[:count] for name, x in outputs.items()}
