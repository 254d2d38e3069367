"""The values that a training step is made of: losses, state, a step in the making, and what it reports.

`TrainState` is what a checkpoint holds. `Sums` is one replica's contribution to a batch and `Work` a
batch half done: accumulating more micro-batches, on however many replicas, only ever adds `Sums`.
A state and a batch are handed on, not shared: whoever takes one over frees what belonged to it, and the
old value is refused from then on (`TrainState.require_alive`, `Work.require_unused`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jaxgoodput._pytree import static, struct
from jaxgoodput.optim.adaptive import NoiseReadout, Number
from jaxgoodput.parallel.strategy import Layout

Leaf = Any  # an array; or a shape, a sharding, a flag, where the tree holds those


@struct
class Loss:
    """What a user's loss may return where its weight is not the number of samples.

    A language model's weight is its tokens: the gradient is that of `sum(sum) / sum(weight)` over the
    whole batch, however it is split.
    """

    sum: Leaf = dataclasses.field(kw_only=False)
    """Per sample, shape `[batch]` (exact for padded batches), or a scalar over the whole micro-batch."""
    weight: Leaf = dataclasses.field(kw_only=False)
    """Of the same shape."""
    aux: Mapping[str, Leaf] = dataclasses.field(default_factory=dict, kw_only=False)
    """Further numbers to report: scalars, or per sample `[batch]`; they are averaged over samples."""

    @classmethod
    def of(cls, sum: Leaf, weight: Leaf, **aux: Leaf) -> "Loss":
        """A loss with its weight and further numbers by name."""
        return cls(sum=sum, weight=weight, aux=aux)


@struct
class Variables:
    """What `Trainer.init` returns for a model with mutable state, or with partitioning of its own."""

    params: PyTree
    """Parameters, in master precision."""
    model_state: PyTree
    """BatchNorm statistics and other mutable collections; () where there are none."""
    specs: tuple[tuple[str, PartitionSpec], ...] = static(default=())
    """By a parameter's path such as `layers/0/kernel`: which dimension is cut over "fsdp", which over
    "tensor". A rule of the strategy goes before it."""


@struct
class RefusedUpdates:
    """Updates refused: loss, gradient, update or model state was not finite, or the batch had no weight."""

    skipped: Leaf
    """int32, since training began."""
    in_a_row: Leaf
    """int32, ending with the latest update."""


@struct
class TrainState:
    """Everything that training needs to go on, as device values."""

    params: PyTree
    """Trainable and frozen parameters, in master precision."""
    opt_state: PyTree
    """Of `adaptive(tx, rule)`: the user's own, noise statistics, progress, gain."""
    model_state: PyTree
    """Mutable collections; () where there are none."""
    step: Leaf
    """int32, updates attempted."""
    key: Leaf
    """The root of every random number of the run."""
    guard: RefusedUpdates
    """Updates that were refused."""
    ema: PyTree = None
    """Average of the trainable parameters over progress, float32 at least; None where there is none."""

    @property
    def averaged(self) -> PyTree:
        """All parameters, the average in place of those that it is of: what an evaluation uses.

        Where no average is kept, `params`. The model state is that of training in both cases: batch
        statistics belong to the parameters that were trained.
        """
        return self.params if self.ema is None else combine(self.ema, self.params)

    @property
    def variables(self) -> Variables:
        """What was trained, in the form in which `init` may return it."""
        return Variables(params=self.params, model_state=self.model_state)

    def require_alive(self) -> None:
        """Raise ValueError for a state that was donated."""
        if self.step.is_deleted():
            raise ValueError(
                "this state was donated already, to a step, an update or a move. Go on with the state that "
                "came out of it."
            )


@struct
class Sums:
    """One replica's part of a batch.

    Where replicas compute separate gradients they have a leading axis over the replicas until they are
    reduced; of a global loss they are reduced from the start, and cut like the parameters. Which fields add
    up, and how, is known here alone.
    """

    grads: PyTree
    """Sum over samples of the loss gradient, float32, trainable leaves."""
    loss: Leaf
    """Sum of losses."""
    weight: Leaf
    """Sum of loss weights."""
    samples: Leaf
    """Real samples; padding does not count."""
    groups: Leaf
    """Micro-batches with any weight; samples, where noise comes from normalisation layers."""
    norms: Leaf
    """[leaves]: sum over micro-batches of |gradient sum|^2 / weight; of samples, on normalisation layers."""
    factors: Mapping[int, Leaf]
    """Gradient sums of the factors on normalisation layers, by their features; {} where they have none."""
    calls: Leaf
    """int32, micro-batches so far: numbers the streams of random keys."""
    aux: Mapping[str, Leaf]
    """Sums over samples."""
    model_state: PyTree
    """After the latest micro-batch."""
    square: Leaf | None = None
    """[leaves]: |gradient sum|^2 as `norms` are measured, where it came along with them; else None."""

    def merged(self, later: "Sums") -> "Sums":
        """Two micro-batches of one replica as one; the later went on from the model state of this."""
        summed = jax.tree.map(jnp.add, self._added(), later._added())
        return Sums(**summed, calls=self.calls + later.calls, model_state=later.model_state)

    def exchanged(self) -> dict[str, PyTree]:
        """What must be added up over replicas: one tree of floats, model state weighted by samples.

        Leaves of the model state that are not floating (counters, keys) advance alike on every replica
        and are not exchanged.
        """
        floats = [
            jnp.where(self.samples > 0, x.astype(jnp.float32) * self.samples, 0.0)
            for x in jax.tree.leaves(self.model_state)
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return {**self._added(), "floats": floats}

    @classmethod
    def of_exchanged(
        cls, total: Mapping[str, PyTree], *, calls: Leaf, model_state: PyTree
    ) -> "Sums":
        """The whole batch, of every replica's `exchanged` added up; `model_state` is any replica's own."""
        fields = {name: value for name, value in total.items() if name != "floats"}
        floats, samples = iter(total["floats"]), total["samples"]

        def mean(x: Array) -> Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            # Where everything was padding, nothing has changed it.
            return jnp.where(samples > 0, next(floats) / jnp.maximum(samples, 1.0), x).astype(
                x.dtype
            )

        return cls(**fields, calls=calls, model_state=jax.tree.map(mean, model_state))

    def reduced(
        self, add_grads: Callable[[PyTree], PyTree], add_others: Callable[[PyTree], PyTree]
    ) -> "Sums":
        """The whole batch, where the functions add up gradients and all else over the replicas."""
        tree = self.exchanged()
        grads = add_grads(tree.pop("grads"))
        total = {**add_others(tree), "grads": grads}
        return Sums.of_exchanged(total, calls=self.calls, model_state=self.model_state)

    def part_of(self, replica: Array, num_replicas: int) -> "Sums":
        """One replica's part of reduced sums, so that the parts add up to them.

        The first holds them. Every replica goes on from the model state with its share of the weight, in
        whole samples, and with new streams of random numbers.
        """
        share = jnp.floor(self.samples / num_replicas)
        share += replica < self.samples - share * num_replicas
        held = jax.tree.map(lambda x: jnp.where(replica == 0, x, jnp.zeros_like(x)), self._added())
        added = {**held, "samples": share}
        return Sums(**added, calls=self.calls, model_state=self.model_state)

    def with_grads(self, grads: PyTree) -> "Sums":
        """The same with other gradients."""
        return dataclasses.replace(self, grads=grads)

    def _added(self) -> dict[str, PyTree]:
        """What is the sum of its parts."""
        names = ("grads", "loss", "weight", "samples", "groups", "norms", "factors", "aux")
        return {name: getattr(self, name) for name in names}


@struct
class Work:
    """A batch half done, on one layout: `begin` makes it, `accumulate` adds to it, `apply` consumes it."""

    layout: Layout = static()
    """Where it lies."""
    owns_params: bool = static()
    """False: parameters are the state's own, which must outlive the batch."""
    params: PyTree
    """Compute precision; the master itself where both are the same."""
    scale: PyTree
    """The optimizer's preconditioner, () where noise is measured without one."""
    model_state: PyTree
    """Of the state that it began from."""
    key: Leaf
    """The state's."""
    step: Leaf
    """The state's."""
    sums: Sums | None
    """None until the first micro-batch."""

    def require_unused(self) -> None:
        """Raise ValueError where anything of it is gone."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self)):
            raise ValueError(
                "this Work was consumed already: accumulate(), step() and apply() take it over, and so do "
                "they and move() the state that it began from. Go on with the Work that accumulate() "
                "returned, or begin() a new one from the latest state."
            )

    def consume(self) -> None:
        """Free what belongs to the batch alone; executables that read it hold on until they are done."""
        delete(self.sums)
        if self.owns_params:
            delete((self.params, self.scale))


def host_copy(x: Array, dtype: DTypeLike | None = None) -> Any:
    """An array, whole, as a NumPy array (in another type) that nobody can write to; keys as keys.

    Of one that spans processes, all of those come here together.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = host_copy(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not x.is_fully_addressable:
        assert isinstance(x.sharding, NamedSharding)
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())
        x = jax.jit(_same, out_shardings=whole)(x).addressable_data(0)
    host = np.array(x, dtype)  # a copy: on CPU, the host would see the buffer itself
    host.flags.writeable = False
    return host


def _same(x: Array) -> Array:
    return x


def delete(tree: PyTree) -> None:
    """Free what is not freed yet."""
    for leaf in jax.tree.leaves(tree):
        if not leaf.is_deleted():
            leaf.delete()


@struct
class StepMetrics(Generic[Number]):
    """What a step reports: arrays inside its program, Python numbers once it is read."""

    loss: Number
    """Per unit of weight, of the whole batch."""
    weight: Number
    """Of the whole batch; minus infinity where a sample's is negative."""
    grad_norm: Number
    """Of the averaged gradient of the whole batch."""
    is_finite: Number
    """Whether loss, gradient, update and model state were, so that it was applied; a bool once read."""
    num_skipped: Number
    """Updates refused since training began; an int once read, like all counts."""
    skipped_in_a_row: Number
    """Of them, those that end with this update."""
    num_samples: Number
    """Real samples of the batch."""
    num_groups: Number
    """Gradient groups of the batch: micro-batches on replicas, with any weight; or samples."""
    progress: Number
    """Base steps done."""
    gain: Number
    """The factor that the update was multiplied by, mean over label groups."""
    noise: NoiseReadout[Number]
    """Gradient noise, as it is known after this step."""
    aux: Mapping[str, Number]
    """The user's own numbers, averaged over samples."""

    def packed(self) -> Float[Array, " numbers"]:
        """All numbers as one vector: what leaves the step's program."""
        return jnp.concatenate(
            [jnp.ravel(x).astype(jnp.float32) for x in map(jnp.asarray, jax.tree.leaves(self))]
        )

    @staticmethod
    def unpacked(
        vector: np.ndarray, aux_names: Sequence[str], num_groups: int
    ) -> tuple["StepMetrics[float]", np.ndarray]:
        """What `packed` packed, as Python numbers and arrays `[groups]`; and the rest of the vector."""
        kinds = dataclasses.replace(_KINDS, aux=dict.fromkeys(aux_names, float))
        leaves, structure = jax.tree.flatten(kinds)
        values, at = [], 0
        for kind in leaves:
            if kind is np.ndarray:
                values.append(vector[at : at + num_groups])
                at += num_groups
            else:
                values.append(kind(vector[at]))
                at += 1
        return jax.tree.unflatten(structure, values), vector[at:]


_KINDS = StepMetrics[type](
    loss=float,
    weight=float,
    grad_norm=float,
    is_finite=bool,
    num_skipped=int,
    skipped_in_a_row=int,
    num_samples=int,
    num_groups=int,
    progress=float,
    gain=float,
    noise=NoiseReadout(
        sqr=float,
        var=float,
        group_sqr=np.ndarray,
        group_var=np.ndarray,
        seen_groups=float,
        num_samples=float,
        newest_samples=float,
    ),
    aux={},
)


def split(tree: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """`tree` twice: the leaves where `mask` holds, and the others; None elsewhere."""
    kept = jax.tree.map(lambda m, x: x if m else None, mask, tree)
    rest = jax.tree.map(lambda m, x: None if m else x, mask, tree)
    return kept, rest


def combine(kept: PyTree, rest: PyTree) -> PyTree:
    """The tree that `split` took apart."""
    return jax.tree.map(lambda a, b: b if a is None else a, kept, rest, is_leaf=lambda x: x is None)


def cast(tree: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Floating leaves in `dtype`; other leaves, and all of them where `dtype` is None, unchanged."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
