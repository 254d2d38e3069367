"""The values that a training step is made of: losses, state, and a step in the making.

`TrainState` is what a checkpoint holds. `Sums` is one replica's contribution to a batch and `Work` a
batch half done: accumulating more micro-batches, on however many replicas, only ever adds `Sums`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxgoodput._pytree import static, struct
from jaxgoodput.parallel.strategy import Layout

Leaf = Any  # an array; or a shape, a sharding, a flag, where the tree holds those


@struct
class Loss:
    """What a user's loss may return where its weight is not the number of samples.

    `sum` and `weight` are per sample, shape `[batch]` (exact for padded batches), or scalars over the
    whole micro-batch. A language model's weight is its tokens: the gradient is that of
    `sum(sum) / sum(weight)` over the whole batch, however it is split.

    `aux` holds further numbers to report, by name: scalars, or per sample `[batch]`; they are
    averaged over samples.
    """

    sum: Any
    weight: Any
    aux: Mapping[str, Any]

    @classmethod
    def of(cls, sum: Any, weight: Any, **aux: Any) -> "Loss":
        """A loss with its weight and further numbers by name."""
        return cls(sum=sum, weight=weight, aux=aux)


@struct
class Variables:
    """What `Trainer.init` returns for a model with mutable state, or with partitioning of its own.

    `specs` says of parameters, by their path such as `layers/0/kernel`, which dimension is cut over
    "fsdp" and which over "tensor"; a rule of the strategy goes before it.
    """

    params: PyTree
    model_state: PyTree  # BatchNorm statistics, ...; () where there is none
    specs: tuple[tuple[str, PartitionSpec], ...] = static(default=())


@struct
class Guard:
    """Updates refused because the loss or the gradient was not finite."""

    skipped: Leaf  # int32, since training began
    in_a_row: Leaf  # int32, ending with the latest update


@struct
class TrainState:
    """Everything that training needs to go on, as device values."""

    params: PyTree  # master precision, trainable and frozen
    opt_state: PyTree  # of `adaptive(tx, rule)`: the user's own, noise statistics, progress, gain
    model_state: PyTree  # mutable collections; () where there are none
    step: Leaf  # int32, updates attempted
    key: Leaf  # the root of every random number of the run
    guard: Guard


@struct
class Previous:
    """The gradient of the update before, for the differenced noise estimator."""

    grads: PyTree  # its sum, not yet divided by the weight
    weight: Leaf  # float32
    num_samples: Leaf  # float32; 0 = nothing remembered yet


@struct
class Sums:
    """One replica's part of a batch.

    In an engine they are in their layout's partial form: with a leading axis, over the copies of the
    model for gradients (summed within a copy, and cut like the parameters), over the replicas for all
    else. Reduced sums have no such axis.
    """

    grads: PyTree  # sum over samples of the loss gradient, float32, trainable leaves
    loss: Leaf  # sum of losses
    weight: Leaf  # sum of loss weights
    samples: Leaf  # real samples (padding does not count)
    groups: Leaf  # micro-batches with any weight
    norms: Leaf  # [labels]: sum over micro-batches of |gradient sum|^2 / weight
    calls: Leaf  # int32, micro-batches so far: numbers the streams of random keys
    aux: Mapping[str, Leaf]  # sums over samples
    model_state: PyTree  # after the latest micro-batch


@struct
class Work:
    """A batch half done, on one layout: `begin` makes it, `accumulate` adds to it, `apply` consumes it."""

    layout: Layout = static()
    owns_params: bool = static()  # False: they are the state's own, which must outlive the batch
    params: PyTree  # compute precision; the master itself where both are the same
    scale: PyTree  # the optimizer's preconditioner, () where noise is measured without one
    model_state: PyTree
    key: Leaf
    step: Leaf
    sums: Sums | None  # None until the first micro-batch


def split(tree: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """`tree` twice: the leaves where `mask` holds, and the others; None elsewhere."""
    kept = jax.tree.map(lambda m, x: x if m else None, mask, tree)
    rest = jax.tree.map(lambda m, x: None if m else x, mask, tree)
    return kept, rest


def combine(kept: PyTree, rest: PyTree) -> PyTree:
    """The tree that `split` took apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, kept, rest, is_leaf=lambda x: x is None)


def cast(tree: PyTree, dtype: Any) -> PyTree:
    """Floating leaves in `dtype`; other leaves, and all of them where `dtype` is None, unchanged."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
