"""`RowComparison`: measures gradient noise in one micro-batch, by comparing a part of its rows with all."""

from functools import cached_property

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.state import TrainState
from jaxgoodput.parallel.strategy import Layout

# How many rows of a replica are compared with the others: about 16, at most every fourth, at least every
# sixteenth. If gradients are normal, two groups of any sizes estimate the noise equally well, and a few rows
# cost little; with fewer than these, single outliers would dominate.
PART_ROWS, STRIDES = 16, (4, 16)


class RowComparison:
    """Measures gradient noise in one micro-batch, by comparing a part of its rows with all of them.

    `state` and `rows`, a batch of two, are abstract. `couples` says that the samples of a micro-batch must be
    computed together.
    """

    def __init__(
        self,
        problem: pure.Problem,
        layout: Layout,
        *,
        state: TrainState,
        rows: PyTree,
        couples: bool,
    ):
        self.problem = problem
        self.layout = layout
        self.state = state
        self.rows = rows
        self.couples = couples

    def is_possible(self, micro_batch_size: int) -> bool:
        """Return whether one micro-batch, of this many samples per replica, gives a noise sample."""
        if self.problem.from_norm_layers or self._is_apart(micro_batch_size):
            return True
        return self._can_leave_out and self.layout.num_replicas * micro_batch_size > 1

    def choose(self, batch: PyTree, mask: Array) -> tuple[tuple[PyTree, Array], Array | None]:
        """Return a part of every replica's rows on its own, or all rows and a mask of the part."""
        replicas = self.layout.num_replicas
        rows = len(mask) // replicas
        if not self._is_apart(rows):
            return (batch, mask), (jnp.arange(len(mask)) % 2 == 0).astype(mask.dtype)
        stride = min(max(rows // PART_ROWS, STRIDES[0]), STRIDES[1])

        def some(x: Array) -> Array:  # a stride and not the first rows, because they may be sorted
            part = x.reshape(replicas, rows, *x.shape[1:])[:, ::stride]
            return part.reshape(-1, *x.shape[1:])

        return jax.tree.map(some, (batch, mask)), None

    @cached_property
    def _can_leave_out(self) -> bool:
        return pure.loss_kind(self.problem, self.state, self.rows, 2) == "sample"

    def _is_apart(self, micro_batch_size: int) -> bool:
        """Return whether the part may be computed on its own, which costs least."""
        if self.layout.strategy.stage > 1:  # a pipeline needs rows for all its stages
            return False
        # In a model with mutable state, such as BatchNorm, results depend on which rows come together.
        coupled = self.couples or jax.tree.leaves(self.state.model_state)
        whole = coupled and self._can_leave_out
        return micro_batch_size > 1 and not whole
