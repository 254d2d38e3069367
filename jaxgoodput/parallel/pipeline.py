"""A stack of identical layers as a pipeline, in one program: GPipe (Huang et al. 2019).

Each stage of the mesh holds consecutive layers. A batch is cut into micro-batches. At every tick, all stages
compute at once, each on its own micro-batch, and then hand their results to the next stage (`roll` over a
dimension that is cut over "stage": a collective-permute). Micro-batches that wait, and finished ones, are
cut over "stage" too and travel by one permute per tick, so nothing is ever gathered. The same model runs
under every strategy: without stages it is a scan over the layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.parallel.partition import CannotDivide
from jaxgoodput.parallel.strategy import REPLICA_AXES, STAGE_AXIS

ANY = PartitionSpec.UNCONSTRAINED


def pipeline(
    layer: Callable[[PyTree, PyTree], PyTree],
    stacked_params: PyTree,
    x: PyTree,
    *,
    num_micro_batches: int,
    num_stages: int | None = None,
) -> PyTree:
    """Apply `layer(params, x) -> x` for every layer of a stack in turn, over the stages of the current mesh.

    `stacked_params` are [layers, ...] and `x` is [batch, ...]; `x` may be a tree, and the result has its
    form. `layer` sees some of the rows at a time, so it must treat rows independently; it may be a
    `jax.checkpoint`. The result equals a scan over the layers.

    `num_stages` defaults to the mesh's degree of "stage", 1 without a mesh. `num_micro_batches` is rounded
    up to a multiple of the stages; more of them mean less waiting (`bubble_fraction`). Rows come out cut
    over stages as well as replicas, so what follows is computed once, not again by each stage.

    While a pipeline fills and drains, its stages compute on rows that are not theirs. These results are
    dropped, and their gradients are 0.

    Raises:
        CannotDivide: the stages do not divide the layers.
        ValueError: the micro-batches do not divide the rows.
    """
    if num_micro_batches < 1:
        raise ValueError(
            f"num_micro_batches must be at least 1; got {num_micro_batches}. Use 1 for the whole "
            "batch at once."
        )
    sizes = _sizes()
    num_stages = sizes.get(STAGE_AXIS, 1) if num_stages is None else num_stages
    if num_stages == 1:
        return _scanned(layer, stacked_params, x)
    num_layers, batch = (jax.tree.leaves(tree)[0].shape[0] for tree in (stacked_params, x))
    if num_layers % num_stages:
        raise CannotDivide(
            f"a stack of {num_layers} layers cannot be cut into {num_stages} stages of as many layers each. "
            f"Use a Strategy whose stage divides {num_layers}."
        )
    rows = _Rows.of(batch, num_stages, num_micro_batches, sizes)
    params = jax.tree.map(
        lambda leaf: _cut(leaf.reshape(num_stages, -1, *leaf.shape[1:]), STAGE_AXIS), stacked_params
    )
    stages = jax.vmap(
        lambda params, x: _scanned(layer, params, x),
        spmd_axis_name=STAGE_AXIS if STAGE_AXIS in sizes else None,
    )

    def tick(carry: tuple[PyTree, PyTree], time: Array) -> tuple[tuple[PyTree, PyTree], None]:
        """Take one micro-batch through every stage.

        `stream[s, c]` is at first micro-batch s * columns + c. A column moves up whenever it is used: its
        first entry goes in, and the micro-batch that was just finished takes the place of its last.
        """
        held, stream = carry
        column = time % rows.num_columns
        waiting = jax.tree.map(lambda leaf: _column(leaf, column), stream)
        taken = jax.tree.map(lambda new, old: _where(0, new, old), waiting, held)
        made = jax.tree.map(lambda leaf: _cut(leaf, STAGE_AXIS, rows.axes), stages(params, taken))

        def moved_up(leaf: Array, waiting: Array, made: Array) -> Array:
            new = _where(num_stages - 1, made, jnp.roll(waiting, -1, axis=0))
            return jax.lax.dynamic_update_index_in_dim(leaf, new, column, axis=1)

        stream = jax.tree.map(moved_up, stream, waiting, made)
        return (jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), made), stream), None

    stream = jax.tree.map(rows.by_stage, x)
    # Stages that still wait hold rows of the batch, not zeros: a layer need not have a gradient at zero.
    held = jax.tree.map(lambda leaf: leaf[:, 0], stream)
    ticks = jnp.arange(num_stages * rows.num_columns + num_stages - 1)
    (_, stream), _ = jax.lax.scan(tick, (held, stream), ticks)
    # The last micro-batch of a stage was done in column `stages - 2`, cyclically.
    done = jax.tree.map(lambda leaf: jnp.roll(leaf, 1 - num_stages, axis=1), stream)
    return jax.tree.map(rows.by_row, done, x)


@dataclass(frozen=True)
class _Rows:
    """How the rows of a batch are arranged by stage, and back."""

    num_stages: int
    num_columns: int
    """Micro-batches that each stage keeps."""
    num_replicas: int
    """Replicas whose rows are spread over all micro-batches, so that cutting them sends nothing."""
    axes: Any
    """Mesh axes that cut the rows of a micro-batch; ANY leaves them to the compiler."""

    @classmethod
    def of(
        cls, batch: int, num_stages: int, num_micro_batches: int, sizes: dict[str, int]
    ) -> "_Rows":
        """Arrange `batch` rows; raise ValueError if micro-batches do not divide them."""
        num_columns = -(-num_micro_batches // num_stages)
        if batch % (num_stages * num_columns):
            raise ValueError(
                f"a batch of {batch} rows cannot be cut into {num_stages * num_columns} micro-batches "
                f"(num_micro_batches={num_micro_batches}, a multiple of {num_stages} stages). Use a batch "
                f"that is a multiple of it, or fewer micro-batches; at least {num_stages}."
            )
        num_replicas = math.prod(sizes.get(axis, 1) for axis in REPLICA_AXES)
        if batch % (num_replicas * num_stages * num_columns):
            num_replicas = 1
        axes = tuple(axis for axis in REPLICA_AXES if axis in sizes) if num_replicas > 1 else ANY
        return cls(num_stages, num_columns, num_replicas, axes)

    def by_stage(self, leaf: Array) -> Array:
        """Return [batch, ...] as [stages, columns, rows, ...]."""
        split = leaf.reshape(
            self.num_replicas, self.num_stages, self.num_columns, -1, *leaf.shape[1:]
        )
        split = _cut(split, self.axes, STAGE_AXIS)
        joined = jnp.moveaxis(split, 0, 2)
        joined = joined.reshape(*joined.shape[:2], -1, *leaf.shape[1:])
        return _cut(joined, STAGE_AXIS, ANY, self.axes)

    def by_row(self, leaf: Array, like: Array) -> Array:
        """Return [stages, columns, rows, ...] as [batch, ...], the shape of `like`."""
        split = leaf.reshape(
            self.num_stages, self.num_columns, self.num_replicas, -1, *like.shape[1:]
        )
        split = _cut(jnp.moveaxis(split, 2, 0), self.axes, STAGE_AXIS)
        whole = split.reshape(like.shape)
        return _cut(whole, (*self.axes, STAGE_AXIS) if isinstance(self.axes, tuple) else ANY)


def bubble_fraction(num_stages: int, num_micro_batches: int) -> float:
    """Return the fraction of a pipeline's time in which a stage waits: (S - 1) / (M + S - 1).

    S stages and M micro-batches, Huang et al. 2019. A pipeline takes 1 / (1 - fraction) times as long as
    perfect division would.

    >>> bubble_fraction(num_stages=4, num_micro_batches=12)
    0.2
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def _sizes() -> dict[str, int]:
    """Return the degrees of the current mesh, by axis, that the compiler partitions over; {} without."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes}


def _scanned(layer: Callable[[PyTree, PyTree], PyTree], params: PyTree, x: PyTree) -> PyTree:
    return jax.lax.scan(lambda x, params: (layer(params, x), None), x, params)[0]


def _cut(x: Array, *entries: Any) -> Array:
    """Constrain the first dimensions of `x` to `entries`; without a mesh of stages, return it as it is."""
    if STAGE_AXIS not in _sizes():
        return x
    return jax.lax.with_sharding_constraint(
        x, PartitionSpec(*entries, *[ANY] * (x.ndim - len(entries)))
    )


def _column(x: Array, column: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, column, axis=1, keepdims=False)


def _where(stage: int, chosen: Array, others: Array) -> Array:
    """Return `chosen` on one stage and `others` on all others."""
    is_chosen = jnp.arange(chosen.shape[0]) == stage
    return jnp.where(is_chosen.reshape(-1, *[1] * (chosen.ndim - 1)), chosen, others)
