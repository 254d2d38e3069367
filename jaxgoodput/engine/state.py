"""The values that a training step is made of: loss, state, a batch in progress, and what a step reports.

`TrainState` is what a checkpoint holds. `Sums` is one replica's contribution to a batch, and `Work` a partly
accumulated batch: accumulating more micro-batches, on any number of replicas, only adds `Sums`.

A state and a batch are handed on, not shared. The function that takes one over frees its buffers, and the
old value is refused from then on (`TrainState.require_alive`, `Work.require_unused`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jaxgoodput._pytree import one_vector, static, struct
from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.goodput.intervals import UNKNOWN_INTERVAL, NoiseInterval, noise_interval
from jaxgoodput.optim.adaptation import NoiseReadout, Number
from jaxgoodput.optim.noise import MeasuredGroups
from jaxgoodput.parallel.strategy import Layout

Leaf = Any  # an array; or a shape, sharding or flag in trees of those


@struct
class Loss:
    """Loss of a micro-batch with its weight, for losses whose weight is not the number of samples.

    For a language model, the weight is the number of tokens. Training minimises `sum(sum) / sum(weight)` over
    the whole batch, however it is split.
    """

    sum: Leaf = dataclasses.field(kw_only=False)
    """Loss per sample, `[batch]` (exact for padded batches), or a scalar for the whole micro-batch."""
    weight: Leaf = dataclasses.field(kw_only=False)
    """Weights, of the same shape."""
    aux: Mapping[str, Leaf] = dataclasses.field(default_factory=dict, kw_only=False)
    """Further numbers to report, scalars or per sample `[batch]`; they are averaged over samples."""

    @classmethod
    def of(cls, sum: Leaf, weight: Leaf | None = None, **aux: Leaf) -> "Loss":
        """Return a loss with its weight, and further numbers by name.

        Without a weight each sample counts as one, and `sum` is the loss per sample.

        Raises TypeError for a single number without a weight.
        """
        if weight is None:
            if not jnp.ndim(sum):
                raise TypeError(
                    "Loss.of(sum) without a weight takes losses per sample, [batch], and got a single "
                    "number. Leave out the mean or sum over samples, or pass the weight: for a sum over "
                    "tokens, their number."
                )
            weight = jnp.ones_like(sum)
        return cls(sum=sum, weight=weight, aux=aux)

    @classmethod
    def weighted(
        cls, losses: Mapping[str, Leaf], weights: Mapping[str, float] | None = None
    ) -> "Loss":
        """Return the weighted sum of several losses, for one optimizer. Each is reported by its name.

        `losses` are losses per sample, `[batch]`, by name. A name without a weight has weight 1. What is
        reported is a loss before its weight. For an optimizer for each loss, return a dict of losses instead.

        Raises ValueError for no losses or a weight without one, and TypeError for a loss that is not one per
        sample.

        >>> loss = Loss.weighted({"fit": jnp.ones(2), "size": jnp.full(2, 3.0)}, {"size": 0.1})
        >>> [round(float(x), 2) for x in loss.sum]
        [1.3, 1.3]
        """
        weights = weights or {}
        if not losses:
            raise ValueError("Loss.weighted got no losses. Give it at least one, by a name.")
        if unknown := sorted(set(weights) - set(losses)):
            raise ValueError(
                f"Loss.weighted has a weight for {', '.join(map(repr, unknown))}, and its losses are "
                f"{', '.join(map(repr, losses))}. Use one of these names."
            )
        for name, loss in losses.items():
            if isinstance(loss, Loss) or jnp.ndim(loss) != 1:
                raise TypeError(
                    f"Loss.weighted: {name!r} is {_shown(loss)}, and losses that are added up must be one "
                    "number per sample, [batch]. Leave out the mean or sum over samples. If losses have "
                    "different weights per sample, such as tokens, add up the sums yourself and return "
                    "Loss.of(sum, weight)."
                )
        total = sum(weights.get(name, 1.0) * loss for name, loss in losses.items())
        total = jnp.asarray(total)
        return cls(sum=total, weight=jnp.ones_like(total), aux=dict(losses))


def _shown(loss: Any) -> str:
    """Return what a loss is, for an error."""
    return type(loss).__name__ if isinstance(loss, Loss) else f"of shape {jnp.shape(loss)}"


@struct
class NamedLosses(Loss):
    """Losses by name, each of which trains its own part of the parameters. A run makes it of a task's dict.

    As a `Loss` it is the sum of all, per sample if all are. In a game that may cancel, so checks of what a
    loss depends on look at one after the other (`Problem.each_loss`).
    """

    parts: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)
    """Losses by name, each per sample `[batch]`, a `Loss` or a scalar mean."""

    @classmethod
    def together(cls, parts: Mapping[str, Any]) -> "NamedLosses":
        """Return these losses, with their sum."""
        each = [wide(x.sum if isinstance(x, Loss) else x) for x in parts.values()]
        if any(jnp.ndim(x) == 0 for x in each):
            each = [jnp.sum(x) for x in each]
        total = sum(each)
        return cls(sum=total, weight=jnp.ones_like(total), parts=dict(sorted(parts.items())))


@struct
class Variables:
    """What `Trainer.init` returns for a model with mutable state or its own partitioning."""

    params: PyTree
    """Parameters, in master precision."""
    model_state: PyTree
    """BatchNorm statistics and other mutable collections; () if there are none."""
    specs: tuple[tuple[str, PartitionSpec], ...] = static(default=())
    """Pairs of a parameter's path, such as `layers/0/kernel`, and the axes that cut its dimensions. A rule of
    the strategy overrides them."""
    summed: tuple[str, ...] = static(default=())
    """Paths in the model state, of leaves or of everything below, such as `counts`, to which each micro-batch
    adds over its samples. Their changes are added up over replicas; other floats are averaged."""


@jax.tree_util.register_pytree_node_class
class SownState(dict):
    """Model state after a call of a Flax model, beside values that the call sowed (`sow`).

    Read it like the nested dict of both. Return it from `loss_and_state` as it is: only the state is kept
    from one call to the next, because sown values belong to one call.
    """

    def __init__(self, found: Mapping[str, Any], sown: Sequence[tuple[Any, ...]]):
        super().__init__(found)
        self.sown = tuple(sown)
        """Paths of the sown values, each a tuple of keys."""

    @property
    def kept(self) -> dict[str, Any]:
        """The state without the sown values."""
        return _without(self, self.sown)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the values and what else describes them, for JAX."""
        names = tuple(sorted(self))
        return tuple(self[name] for name in names), (names, self.sown)

    @classmethod
    def tree_unflatten(cls, about: tuple[Any, ...], values: Sequence[Any]) -> "SownState":
        """Return the value that `tree_flatten` took apart."""
        names, sown = about
        return cls(dict(zip(names, values, strict=True)), sown)


def _without(tree: Mapping[Any, Any], paths: Sequence[tuple[Any, ...]]) -> dict[Any, Any]:
    """Return a nested dict without the entries at these paths, and without dicts that held nothing else."""
    gone = {path[0] for path in paths if len(path) == 1}
    found = {}
    for name, value in tree.items():
        below = [path[1:] for path in paths if path[0] == name and len(path) > 1]
        if name in gone:
            continue
        kept = _without(value, below) if below else value
        if kept or not below:
            found[name] = kept
    return found


@struct
class RefusedUpdates:
    """Counts of refused updates: something was not finite, or the batch had no weight."""

    skipped: Leaf
    """Refused updates since training began, int32."""
    in_a_row: Leaf
    """Refused updates in a row up to the latest one, int32."""


@struct
class TrainState:
    """Everything that training needs to continue, as device values."""

    params: PyTree
    """Trainable and frozen parameters, in master precision."""
    opt_state: PyTree
    """State of `adaptive(tx, rule)`: the user's optimizer, noise statistics, progress, gain."""
    model_state: PyTree
    """Mutable collections; () if there are none."""
    step: Leaf
    """Updates attempted, int32."""
    key: Leaf
    """Root key of every random number of the run."""
    guard: RefusedUpdates
    """Counts of refused updates."""
    ema: PyTree = None
    """Average of the trainable parameters over progress, at least float32; None if none is kept."""

    @property
    def averaged(self) -> PyTree:
        """Parameters for an evaluation: the average of the trainable ones, and the frozen ones.

        These are `params` if no average is kept. Use the training model state with both: batch statistics
        are not averaged.
        """
        return self.params if self.ema is None else combine(self.ema, self.params)

    @property
    def variables(self) -> Variables:
        """Trained variables, in the form that `init` may return."""
        return Variables(params=self.params, model_state=self.model_state)

    @property
    def is_donated(self) -> bool:
        """Whether a step, an update or a move has taken its memory over."""
        return self.step.is_deleted()

    def require_alive(self) -> None:
        """Raise ValueError if the state was donated."""
        if self.is_donated:
            raise ValueError(
                "this state was donated already, to a step, an update or a move. Continue with the state "
                "that it returned."
            )


@struct
class Sums:
    """Sums over micro-batches, such as gradients, losses and weights: one replica's part of a batch.

    If replicas compute separate gradients, fields have a leading axis over the replicas until they are
    reduced. Sums of a global loss are reduced from the start, and cut like the parameters. No other code
    knows which fields add up, and how.
    """

    grads: PyTree
    """Sum of the loss gradient over samples, at least float32, of trainable leaves."""
    loss: Leaf
    """Sum of losses; with named updates `[names]`."""
    weight: Leaf
    """Sum of loss weights; with named updates `[names]`."""
    samples: Leaf
    """Number of real samples, without padding."""
    groups: Leaf
    """Micro-batches with any weight, with named updates `[names]`; or samples, if noise comes from
    normalisation layers."""
    norms: Leaf
    """Sum of |gradient sum|^2 / weight over `groups`, `[leaves]`."""
    factors: Mapping[int, Leaf]
    """Gradient sums of the factors on normalisation layers, by number of features; {} without factors."""
    calls: Leaf
    """Micro-batches so far, int32; each has its own stream of random numbers."""
    aux: Mapping[str, Leaf]
    """Sums of the user's own numbers over samples."""
    added: Mapping[str, Leaf]
    """Sums of the changes of those leaves of the model state that add over samples, by path."""
    model_state: PyTree
    """Model state after the latest micro-batch."""
    square: Leaf | None = None
    """|gradient sum|^2 in the coordinates of `norms`, `[leaves]`; None if it is not known yet."""

    def merged(self, later: "Sums") -> "Sums":
        """Add a `later` micro-batch of this replica, which continued from the model state of this one."""
        summed = jax.tree.map(jnp.add, self._added(), later._added())
        return Sums(**summed, calls=self.calls + later.calls, model_state=later.model_state)

    def exchanged(self) -> dict[str, PyTree]:
        """Return what replicas must add up: one tree of floats, with model state weighted by samples.

        Other leaves of the model state (counters, keys) are the same on every replica and not exchanged.
        """
        floats = [
            jnp.where(self.samples > 0, wide(x) * wide(self.samples, like=x), 0.0)
            for x in jax.tree.leaves(self.model_state)
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return {**self._added(), "floats": floats}

    @classmethod
    def of_exchanged(
        cls, total: Mapping[str, PyTree], *, calls: Leaf, model_state: PyTree
    ) -> "Sums":
        """Return the batch's sums from the total of `exchanged` trees, and any replica's `model_state`."""
        fields = {name: value for name, value in total.items() if name != "floats"}
        floats, samples = iter(total["floats"]), total["samples"]

        def mean(x: Array) -> Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            # A batch of padding alone does not change it.
            total_of_leaf = next(floats)
            average = total_of_leaf / wide(jnp.maximum(samples, 1.0), like=total_of_leaf)
            return jnp.where(samples > 0, average, x).astype(x.dtype)

        return cls(**fields, calls=calls, model_state=jax.tree.map(mean, model_state))

    def reduced(
        self, add_grads: Callable[[PyTree], PyTree], add_others: Callable[[PyTree], PyTree]
    ) -> "Sums":
        """Return the sums of the whole batch; the functions add up gradients, and all else, over replicas."""
        tree = self.exchanged()
        grads = add_grads(tree.pop("grads"))
        total = {**add_others(tree), "grads": grads}
        return Sums.of_exchanged(total, calls=self.calls, model_state=self.model_state)

    def part_of(self, replica: Array, num_replicas: int) -> "Sums":
        """Split reduced sums into parts, one per replica, that add up to them again; return one part.

        The first replica holds them. Every replica continues from the model state, with an equal share of
        the samples so that it keeps its weight, and with new streams of random numbers.
        """
        share = jnp.floor(self.samples / num_replicas)
        rest = self.samples - share * num_replicas
        share += (replica.astype(rest.dtype) < rest).astype(share.dtype)
        held = jax.tree.map(lambda x: jnp.where(replica == 0, x, jnp.zeros_like(x)), self._added())
        added = {**held, "samples": share}
        return Sums(**added, calls=self.calls, model_state=self.model_state)

    def with_grads(self, grads: PyTree) -> "Sums":
        """Return these sums with other gradients."""
        return dataclasses.replace(self, grads=grads)

    def _added(self) -> dict[str, PyTree]:
        """Return by name the fields that add up: all but `calls` and `model_state`."""
        names = ("grads", "loss", "weight", "samples", "groups", "norms", "factors", "aux", "added")
        return {name: getattr(self, name) for name in names}


@struct
class Work:
    """Partly accumulated batch on one layout. `begin` makes it, `accumulate` adds to it, `apply` frees it."""

    layout: Layout = static()
    """Layout on which it lies."""
    owns_params: bool = static()
    """Whether its parameters are freed with it; otherwise they belong to the state."""
    params: PyTree
    """Parameters in compute precision; the state's own if that is the same."""
    scale: PyTree
    """Preconditioner of the optimizer; () if noise is measured without it."""
    model_state: PyTree
    """Model state at the beginning of the batch."""
    key: Leaf
    """Root key of the state."""
    step: Leaf
    """Step count of the state."""
    sums: Sums | None
    """Sums so far; None before the first micro-batch."""

    def require_unused(self) -> None:
        """Raise ValueError if any of its buffers was freed."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self)):
            raise ValueError(
                "this Work was consumed already: accumulate(), step() and apply() take it over, and they and "
                "move() take over the state that it began from. Continue with the Work that accumulate() "
                "returned, or begin() a new one from the latest state."
            )

    def consume(self) -> None:
        """Free the buffers that belong to the batch alone; running executables keep them until they end."""
        delete(self.sums)
        if self.owns_params:
            delete((self.params, self.scale))


def host_copy(x: Array, dtype: DTypeLike | None = None) -> Any:
    """Copy a whole array to a read-only NumPy array, of type `dtype` if given; keys stay keys.

    If the array spans processes, all of them must call it.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = host_copy(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not x.is_fully_addressable:
        assert isinstance(x.sharding, NamedSharding)
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())
        x = jax.jit(_same, out_shardings=whole)(x).addressable_data(0)
    host = np.array(jax.device_get(x), dtype)  # a copy: on CPU, NumPy would share the buffer
    host.flags.writeable = False
    return host


def _same(x: Array) -> Array:
    return x


def delete(tree: PyTree) -> None:
    """Free the leaves that are not freed yet."""
    for leaf in jax.tree.leaves(tree):
        if not leaf.is_deleted():
            leaf.delete()


@struct
class StepMetrics(Generic[Number]):
    """What a step reports: arrays inside its program, Python numbers after reading."""

    loss: Number
    """Loss of the whole batch, per unit of weight."""
    weight: Number
    """Loss weight of the whole batch; negative if a sample's is."""
    grad_norm: Number
    """Norm of the averaged gradient of the whole batch."""
    is_finite: Number
    """Whether loss, gradient, update and model state were finite, so that the update was applied."""
    num_skipped: Number
    """Updates refused since training began."""
    skipped_in_a_row: Number
    """Updates refused in a row, up to this one."""
    num_samples: Number
    """Real samples of the batch."""
    num_groups: Number
    """Noise groups of the batch: micro-batches on replicas with any weight, or samples."""
    progress: Number
    """Base steps done."""
    gain: Number
    """Factor that the update was multiplied by, mean over label groups."""
    explodes: Number
    """Whether the gradient is so much larger than before that the next update has a gain of at most 1."""
    most_gain: Number
    """Base steps that a step may be worth, at most; 0 if no earlier explosion limits it."""
    noise: NoiseReadout[Number]
    """Estimate of the gradient noise after this step."""
    measured: MeasuredGroups[Number]
    """What this estimate rests on, by group of parameters."""
    aux: Mapping[str, Number]
    """User's own numbers, averaged over samples."""

    @property
    def grad(self: "StepMetrics[float]") -> GradGroups:
        """Moments of the gradient for decisions, and what else limits a step's worth. Host values only."""
        return dataclasses.replace(self.noise.expected, most_gain=self.most_gain or None)

    def noise_interval(self: "StepMetrics[float]", base_batch_size: int) -> NoiseInterval:
        """Return the noise scale with its 80 % interval, NaN if too little is known. Host values only."""
        noise, measured = self.noise, self.measured
        if not noise.is_known:
            return UNKNOWN_INTERVAL
        return noise_interval(
            measured.sqr, noise.group_var, measured.sqr_error, measured.var_error, base_batch_size
        )

    def packed(self) -> Float[Array, " numbers"]:
        """Return all numbers as one float32 vector, which the step's program returns instead of them."""
        return one_vector([*map(jnp.asarray, jax.tree.leaves(self))], jnp.float32)

    @staticmethod
    def num_packed(aux_names: Sequence[str], num_groups: int) -> int:
        """Return how many numbers `packed` packs."""
        kinds, _ = _kinds_with(tuple(aux_names))
        return sum(num_groups if kind is np.ndarray else 1 for kind in kinds)

    @staticmethod
    def unpacked(
        vector: np.ndarray, aux_names: Sequence[str], num_groups: int
    ) -> tuple["StepMetrics[float]", np.ndarray]:
        """Return what `packed` packed, as numbers and arrays `[groups]`, and the rest of the vector."""
        kinds, structure = _kinds_with(tuple(aux_names))
        numbers, values, at = vector.tolist(), [], 0
        for kind in kinds:
            if kind is np.ndarray:
                values.append(vector[at : at + num_groups])
                at += num_groups
            else:
                values.append(kind(numbers[at]))
                at += 1
        return jax.tree.unflatten(structure, values), vector[at:]


_KINDS = StepMetrics[type](
    **dict.fromkeys(("loss", "weight", "grad_norm", "progress", "gain", "most_gain"), float),
    **dict.fromkeys(("num_skipped", "skipped_in_a_row", "num_samples", "num_groups"), int),
    is_finite=bool,
    explodes=bool,
    noise=NoiseReadout(
        known=bool,
        **dict.fromkeys(("group_sqr", "group_var"), np.ndarray),
        **dict.fromkeys(("sqr", "var", "seen_groups", "num_samples", "newest_samples"), float),
    ),
    measured=MeasuredGroups(
        **dict.fromkeys(("sqr", "sqr_error"), np.ndarray),
        var_error=float,
    ),
    aux={},
)


@functools.cache
def _kinds_with(aux_names: tuple[str, ...]) -> tuple[list[Any], Any]:
    """Return the kinds of a step's numbers in packing order, and the structure that they belong to."""
    return jax.tree.flatten(dataclasses.replace(_KINDS, aux=dict.fromkeys(aux_names, float)))


def wide(x: Leaf, like: Leaf | None = None) -> Array:
    """Return a number as float64 if it, or `like`, is that, else as float32; sums are made in this type."""
    is_double = jnp.asarray(x if like is None else like).dtype == jnp.float64
    return jnp.asarray(x, jnp.float64 if is_double else jnp.float32)


def split(tree: PyTree, mask: PyTree) -> tuple[PyTree, PyTree]:
    """Return the leaves of `tree` that `mask` selects, and the others, with None elsewhere."""
    kept = jax.tree.map(lambda m, x: x if m else None, mask, tree)
    rest = jax.tree.map(lambda m, x: None if m else x, mask, tree)
    return kept, rest


def combine(kept: PyTree, rest: PyTree) -> PyTree:
    """Return the tree that `split` took apart: leaves of `kept`, or of `rest` if None there."""
    return jax.tree.map(lambda a, b: b if a is None else a, kept, rest, is_leaf=lambda x: x is None)


def cast(tree: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Return a tree with floating leaves in `dtype`, and all others unchanged; None changes nothing."""
    if dtype is None:
        return tree
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
