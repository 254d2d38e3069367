"""Evaluation: the user's `metrics` for every sample of a data set, exactly once each.

It runs on the mesh that the state lies on, which may change between evaluations. Every layout of the
parameters has its own compiled program.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.readers import Attempts, Readers, Reading
from jaxgoodput.data.rows import held_rows, narrow, parts_of, put_rows
from jaxgoodput.data.sources import Source, abstract_sample
from jaxgoodput.engine.memory import StepBytes, step_bytes
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.engine.state import TrainState, cast
from jaxgoodput.parallel.strategy import DATA_AXIS, REPLICA_AXES, Layout, in_mesh

Metrics = Callable[[PyTree, PyTree, PyTree], Mapping[str, Any]]

# Batches in flight before their outputs are fetched, so that memory stays bounded.
DEPTH = 3
# Bytes of the largest intermediate value of a batch, by platform. An operation on so much takes far longer
# than starting it; more would only leave the caches of a CPU.
WIDEST, WIDEST_ON_CPU = 2**28, 2**24


@dataclass(frozen=True)
class _CompiledMetrics:
    """The user's `metrics` compiled for states with one layout."""

    run: Any
    num_rows: int  # rows of a batch, over all replicas
    batch_sharding: NamedSharding
    depth: int  # batches in flight


@dataclass(frozen=True)
class _Question:
    """What is computed for the samples of a data set, before the size of a batch is chosen."""

    run: Callable[..., Mapping[str, Any]]  # of parameters, model state and a batch
    arguments: Callable[[int], tuple[PyTree, ...]]  # of `run`, for so many samples per replica
    sharding: NamedSharding
    num_replicas: int
    least: int  # samples per replica of a batch, at least
    share: int  # samples of the data set per replica
    names: tuple[str, ...]  # of the metrics

    def grown(self, widest: int) -> int:
        """Return the samples per replica with which no intermediate value gets beyond `widest` bytes."""
        if self.least >= self.share:
            return self.least
        more = _bytes_of_more(self.run, *map(self.arguments, (self.least, 2 * self.least)))
        most = widest * self.num_replicas * self.least // max(more, 1)
        return _even(self.share, least=self.least, most=most)


class Evaluator:
    """Evaluates states with the user's `metrics`, which it compiles as needed.

    Each process evaluates its own part of the samples. If a state spans processes, they evaluate every batch
    together, each with the rows of its devices. A state is evaluated on the mesh that it lies on, or on the
    devices of `layout` if it lies on no mesh. `read` turns a batch on the host into the batch that `metrics`
    gets, and `blank` makes one of the same shapes without reading. `name` is what errors call `metrics`.

    A batch has `micro_batch_size` samples per replica. If that is None it has `base`, or more of them: as
    many as keep every intermediate value small (`WIDEST`), because starting a small batch takes longer than
    computing it.
    """

    def __init__(
        self,
        metrics: Metrics,
        source: Source,
        layout: Layout,
        *,
        base: int,
        micro_batch_size: int | None = None,
        compute_dtype: Any = None,
        process_index: int = 0,
        process_count: int = 1,
        clock: Clock,
        num_readers: int | None = 1,
        num_retries: int = 0,
        read: Callable[[PyTree], PyTree] = lambda rows: rows,
        blank: Callable[[PyTree], PyTree] = lambda rows: rows,
        name: str = "metrics",
    ):
        self._metrics, self._name = metrics, name
        self._read, self._blank = read, blank
        self._source = source
        self._again = Attempts(num_retries=num_retries, clock=clock)
        self._readers = partial(
            Readers, source, clock=clock, num_readers=num_readers, num_retries=num_retries
        )
        self._layout = layout
        self._base = base
        self._micro_batch_size = micro_batch_size
        self._compute_dtype = compute_dtype
        self._process_index = process_index
        self._process_count = process_count
        self._compiled: dict[tuple[Any, ...], _CompiledMetrics] = {}
        self.num_batches = 0  # begun so far, which serves as a heartbeat

    def check(self, abstract: TrainState) -> tuple[str, ...]:
        """Return the names of the metrics, without compiling.

        Raises TypeError if a metric is not one value per sample.
        """
        return self._question(abstract).names

    def compile(self, abstract: TrainState) -> None:
        """Compile ahead for states with the layout of `abstract`. Thread-safe.

        Raises TypeError if a metric is not one value per sample.
        """
        key = _placement(abstract)
        if key not in self._compiled:
            self._compiled[key] = self._compile(abstract)

    def bytes_of(self, abstract: TrainState) -> StepBytes | None:
        """Return the predicted peak bytes per device of one batch; None before `compile`."""
        found = self._compiled.get(_placement(abstract))
        return None if found is None else step_bytes(found.run)

    def _question(self, abstract: TrainState) -> "_Question":
        """Return what is computed for states with the layout of `abstract`, in batches of the least size."""
        own = abstract.step.sharding
        mesh: Any = own.mesh if isinstance(own, NamedSharding) else self._layout.mesh
        sharding = NamedSharding(mesh, self._layout.batch_sharding.spec)
        num_replicas = math.prod(mesh.shape[axis] for axis in REPLICA_AXES)
        # A small data set should not be padded to a large batch.
        num_parts, _ = self._parts(sharding)
        share = -(-len(self._source) // (num_replicas * num_parts))
        sample = self._blank(
            jax.tree.map(
                lambda x: np.zeros((1, *x.shape), x.dtype),
                self._again(partial(abstract_sample, self._source)),
            )
        )
        metrics = in_mesh(self._metrics, mesh.abstract_mesh, self._layout.strategy)

        def run(params: PyTree, model_state: PyTree, batch: PyTree) -> Any:
            # An average may have a wider type than the parameters.
            params = jax.tree.map(lambda x, own: x.astype(own.dtype), params, abstract.params)
            return metrics(cast(params, self._compute_dtype), model_state, batch)

        def arguments(per_replica: int) -> tuple[PyTree, ...]:
            rows = per_replica * num_replicas
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=sharding),
                sample,
            )
            return abstract.averaged, abstract.model_state, batch

        per_replica = min(self._micro_batch_size or self._base, share)
        shapes = jax.eval_shape(run, *arguments(per_replica))
        if not isinstance(shapes, Mapping) or any(map(_is_nested, shapes.values())):
            raise TypeError(
                f"{self._name} must return arrays by name, such as "
                '{"accuracy": one value per sample}, and nothing nested.'
            )
        for name, out in shapes.items():
            num_rows = per_replica * num_replicas
            if not out.shape or out.shape[0] != num_rows:
                raise TypeError(
                    f"{self._name}[{name!r}] has shape {out.shape} for {num_rows} samples. Return one value "
                    f"(or row) per sample, shape ({num_rows}, ...), so that padding can be removed."
                )
        return _Question(
            run=run,
            arguments=arguments,
            sharding=sharding,
            num_replicas=num_replicas,
            least=per_replica,
            share=share,
            names=tuple(shapes),
        )

    def _compile(self, abstract: TrainState) -> _CompiledMetrics:
        question = self._question(abstract)
        sharding = question.sharding
        mesh: Any = sharding.mesh
        is_on_cpu = mesh.devices.flat[0].platform == "cpu"
        per_replica = question.least
        if self._micro_batch_size is None:
            per_replica = question.grown(WIDEST_ON_CPU if is_on_cpu else WIDEST)
        spans = not sharding.is_fully_addressable
        # Every process fetches the outputs, so they must be replicated if the state spans processes.
        out = NamedSharding(mesh, PartitionSpec()) if spans else sharding
        program = Program(question.run, (), question.arguments(per_replica), out)
        cuts = mesh.size > mesh.shape[DATA_AXIS]
        options: dict[str, str | bool] = {}
        depth = DEPTH
        if (cuts or spans) and is_on_cpu:
            # By default XLA:CPU gathers all parameters before it computes anything. It also runs out of
            # threads and hangs if many executables with collectives wait at once.
            options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
            depth = 1
        return _CompiledMetrics(
            run=program.lower().compile(compiler_options=options),
            num_rows=per_replica * question.num_replicas,
            batch_sharding=sharding,
            depth=depth,
        )

    def __call__(
        self, state: TrainState, *, meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, np.ndarray]:
        """Return the outputs for every sample, in the order of the data set, on the host.

        Uses the average of the parameters if the state has one (`TrainState.averaged`). `meanwhile` is called
        before every batch and may raise.
        """
        self.compile(jax.tree.map(_abstract, state))
        compiled = self._compiled[_placement(state)]
        if compiled.depth == 1:
            jax.block_until_ready(state)
        total, num_rows, sharding = len(self._source), compiled.num_rows, compiled.batch_sharding
        num_parts, part = self._parts(sharding)
        mine = np.array_split(np.arange(total), num_parts)[part]
        held = held_rows(sharding, num_rows)
        pending, parts = [], []
        # A process without samples still runs one batch, because the others wait for its outputs.
        cut = [mine[i : i + num_rows] for i in range(0, max(len(mine), 1), num_rows)]
        with self._readers() as readers:

            def begun(indices: np.ndarray) -> Reading:
                rows = np.resize(indices, num_rows)[held]
                return readers.begin(rows, np.zeros_like(rows))

            ahead = deque([begun(cut[0])])
            for indices, following in zip(cut, [*cut[1:], None], strict=True):
                self.num_batches += 1
                meanwhile()
                if following is not None:  # reader threads read it while this one is computed
                    ahead.append(begun(following))
                rows = self._read(narrow(ahead.popleft().result()))
                batch = put_rows(rows, held, sharding, num_rows=num_rows)
                outputs = compiled.run(state.averaged, state.model_state, batch)
                pending.append((len(indices), outputs))
                if len(pending) >= compiled.depth:
                    parts.append(_fetch(*pending.pop(0)))
        parts += [_fetch(*p) for p in pending]
        merged = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        return merged if num_parts == 1 else self._everyone(merged, total, num_parts)

    def _parts(self, sharding: NamedSharding) -> tuple[int, int]:
        """Return how many meshes share the samples, and the index of this process's mesh among them."""
        return parts_of(sharding, self._process_index, self._process_count)

    def _everyone(
        self, mine: dict[str, np.ndarray], total: int, num_parts: int
    ) -> dict[str, np.ndarray]:
        """Gather the outputs of all processes, in the order of the data set."""
        longest = -(-total // num_parts)
        gathered: dict[str, np.ndarray] = {}
        counts = [len(p) for p in np.array_split(np.arange(total), num_parts)]
        for name, part in mine.items():
            row = np.zeros((longest, *part.shape[1:]), part.dtype)
            row[: len(part)] = part
            every = np.asarray(multihost_utils.process_allgather(row))
            every = every[:: self._process_count // num_parts]  # one process for each mesh
            gathered[name] = np.concatenate([r[:n] for r, n in zip(every, counts, strict=True)])
        return gathered


class Evaluators:
    """The evaluators of one or several data sets, by name; the name of a single one is ""."""

    def __init__(self, each: Mapping[str, Evaluator]):
        self._each = dict(each)

    @property
    def num_batches(self) -> int:
        """Batches begun so far, which serves as a heartbeat."""
        return sum(one.num_batches for one in self._each.values())

    def check(self, abstract: TrainState) -> tuple[str, ...]:
        """Return the names of the metrics of all data sets, without compiling; see `Evaluator.check`."""
        return tuple(
            _named(data, metric)
            for data, one in self._each.items()
            for metric in one.check(abstract)
        )

    def compile(self, abstract: TrainState) -> None:
        """Compile ahead for states with the layout of `abstract`; see `Evaluator.compile`."""
        for one in self._each.values():
            one.compile(abstract)

    def __call__(
        self,
        state: TrainState,
        summarize: Callable[[Mapping[str, np.ndarray]], Mapping[str, float]],
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Return what `summarize` makes of the outputs for every sample of each data set.

        `meanwhile` is called before every batch and may raise.
        """
        return {
            _named(data, metric): float(value)
            for data, one in self._each.items()
            for metric, value in summarize(one(state, meanwhile=meanwhile)).items()
        }


def _is_nested(value: PyTree) -> bool:
    return jax.tree.leaves(value) != [value]


def _named(data: str, metric: str) -> str:
    return f"{data}/{metric}" if data else metric


def _even(share: int, *, least: int, most: int) -> int:
    """Return the samples of a batch, of which few cover `share`: a multiple of `least` that is about even.

    >>> _even(8192, least=64, most=10**6), _even(100, least=10, most=60), _even(100, least=10, most=5)
    (8192, 50, 10)
    """
    num_batches = -(-share // max(most // least * least, least))
    return -(-share // (num_batches * least)) * least


def _bytes_of_more(run: Callable[..., Any], some: PyTree, more: PyTree) -> int:
    """Return by how many bytes the intermediate value that grows most is larger for the arguments `more`."""

    def sizes(jaxpr: Jaxpr) -> Iterator[int]:
        for one in jaxpr.eqns:
            avals: list[Any] = [x.aval for x in one.outvars]
            yield from (x.size * x.dtype.itemsize for x in avals if x.shape)
            for inner in jaxprs_in_params(one.params):
                yield from sizes(inner)

    found = [list(sizes(jax.make_jaxpr(run)(*x).jaxpr)) for x in (some, more)]
    if len(found[0]) != len(found[1]):  # it takes other operations for other numbers of rows
        return max(found[1], default=0)
    return max((b - a for a, b in zip(*found, strict=True)), default=0)


def _placement(state: TrainState) -> tuple[Any, ...]:
    """Return the shardings and types of parameters and model state, which the compiled program depends on."""
    tree = (state.averaged, state.model_state, state.step)
    return tuple((x.sharding, x.dtype) for x in jax.tree.leaves(tree))


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _fetch(count: int, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(jax.device_get(x))[:count] for name, x in outputs.items()}
