"""Evaluation: per-sample outputs of the user's `metrics` over a whole data set, exactly once each."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxgoodput.data.rows import narrow
from jaxgoodput.data.sources import Source, abstract_sample
from jaxgoodput.parallel.strategy import Layout
from jaxgoodput.train.state import TrainState, cast

Metrics = Callable[[PyTree, PyTree, PyTree], Mapping[str, Any]]


class Evaluator:
    """Owns the compiled `metrics`. Each process covers its own part of the samples."""

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
    ):
        self._source = source
        self._layout = layout
        # Not more than there is: a small set should not be padded to a large batch.
        share = -(-len(source) // (layout.num_replicas * process_count))
        self._rows = min(micro_batch_size, share) * layout.num_replicas
        self._process_index = process_index
        self._process_count = process_count

        def run(params: PyTree, model_state: PyTree, batch: PyTree) -> Mapping[str, Any]:
            return metrics(cast(params, compute_dtype), model_state, batch)

        self._run = run
        self._compiled: Any = None

    def compile(self, abstract: TrainState) -> None:
        """Compile ahead, from abstract values.

        Raises TypeError where a metric is not one value per sample.
        """
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self._rows, *x.shape), x.dtype, sharding=self._layout.batch_sharding
            ),
            abstract_sample(self._source),
        )
        shapes = jax.eval_shape(self._run, abstract.params, abstract.model_state, batch)
        for name, out in shapes.items():
            if not out.shape or out.shape[0] != self._rows:
                raise TypeError(
                    f"metrics[{name!r}] has shape {out.shape} for {self._rows} samples. Return one "
                    f"value (or row) per sample, shape ({self._rows}, ...): padding is left out and "
                    "parts are put together afterwards."
                )
        jitted = jax.jit(self._run, out_shardings=self._layout.batch_sharding)
        self._compiled = jitted.lower(abstract.params, abstract.model_state, batch).compile()

    def __call__(self, state: TrainState) -> dict[str, np.ndarray]:
        """The outputs for every sample of the set, in its order, on the host."""
        if self._compiled is None:
            self.compile(jax.tree.map(_abstract, state))
        run = self._compiled
        assert run is not None
        total = len(self._source)
        mine = np.array_split(np.arange(total), self._process_count)[self._process_index]
        pending, parts = [], []
        # A process without a sample runs one batch all the same: the others wait for its outputs.
        for start in range(0, max(len(mine), 1), self._rows):
            indices = mine[start : start + self._rows]
            padded = np.resize(indices, self._rows)
            batch = jax.device_put(narrow(self._source.batch(padded)), self._layout.batch_sharding)
            pending.append((len(indices), run(state.params, state.model_state, batch)))
            if len(pending) > 2:  # fetch behind the device, so that memory stays bounded
                parts.append(_fetch(*pending.pop(0)))
        parts += [_fetch(*p) for p in pending]
        merged = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        return merged if self._process_count == 1 else self._everyone(merged, total)

    def _everyone(self, mine: dict[str, np.ndarray], total: int) -> dict[str, np.ndarray]:
        longest = -(-total // self._process_count)
        gathered: dict[str, np.ndarray] = {}
        counts = [len(p) for p in np.array_split(np.arange(total), self._process_count)]
        for name, part in mine.items():
            row = np.zeros((longest, *part.shape[1:]), part.dtype)
            row[: len(part)] = part
            every = np.asarray(multihost_utils.process_allgather(row))
            gathered[name] = np.concatenate([r[:n] for r, n in zip(every, counts, strict=True)])
        return gathered


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _fetch(count: int, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(jax.device_get(x))[:count] for name, x in outputs.items()}
