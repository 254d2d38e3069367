"""A training step as pure functions: the sums of one micro-batch, and the update.

Nothing here knows of devices or meshes. `local_sums` runs on one replica, or on all rows at once; sums of
micro-batches and of replicas are added (`Sums` knows how); `update` turns the total into the next state.
Gradient accumulation, uneven numbers of micro-batches and padding are all the same addition with other
weights.

Noise moments of n groups (micro-batches on replicas) with shares p_i of the loss weight:
L = sum p_i |g_i|^2 and T = |g|^2 give `trace = M (L - T) / (n - 1)` per sample and
`sqr = (n T - L) / (n - 1)` (McCandlish et al. 2018, appendix A, for unequal groups).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Var
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import wide_dtype
from jaxgoodput.engine import norm_layers
from jaxgoodput.engine.gradients import swapped_value_and_grad
from jaxgoodput.engine.state import (
    Loss,
    NamedLosses,
    RefusedUpdates,
    StepMetrics,
    Sums,
    TrainState,
    Variables,
    combine,
    split,
    wide,
)
from jaxgoodput.optim import adaptation, noise
from jaxgoodput.optim.adaptive import AdaptiveOptimizer
from jaxgoodput.optim.preconditioner import MomentConstants
from jaxgoodput.parallel.partition import path_name
from jaxgoodput.parallel.strategy import anywhere

T = TypeVar("T")
Pick = Callable[[PyTree, float], PyTree]
# (params, model state, batch, key) -> (what `loss_kind` allows, new model state)
LossAndState = Callable[..., tuple[Array | Loss, PyTree]]
# Leaves of up to this many elements have their update computed twice, to check it before it is applied.
SMALL = 2**14
# The compiler takes longer for one sum over hundreds of leaves than for many sums over a few.
TOGETHER = 32
# The weight of a micro-batch with a negative one: no sum of others makes up for it.
NEGATIVE = -1e30


@dataclass(frozen=True)
class Problem:
    """What is trained: the user's functions, and how the noise of their gradient is measured."""

    init: Callable[[Array], PyTree]
    """Function from a key to the parameters, or to `Variables`."""
    loss_and_state: LossAndState
    """Function from parameters, model state, a batch and a key to the loss and the new model state. The loss
    is per sample `[batch]`, a `Loss` or a scalar mean."""
    tx: AdaptiveOptimizer
    """Optimizer."""
    base_batch_size: int
    """Batch size that the learning rate was tuned for."""
    takes_mask: bool = False
    """Whether `loss_and_state` also takes `mask=`, `[batch]`: 1 for real samples, 0 for padding."""
    trainable: Callable[[PyTree], PyTree] | None = None
    """Function from parameters to a tree of bool; None: all of them train."""
    preconditioned: bool = False
    """Whether noise is measured in the coordinates of the optimizer's preconditioner."""
    moments: tuple[MomentConstants, ...] = ()
    """Constants of the preconditioner for each leaf that trains, which `Probe.moment_constants`
    finds; (): optax's defaults."""
    moves: tuple[bool, ...] = ()
    """Whether the optimizer ever changes a leaf, for each leaf that trains; (): it changes all. Noise is
    measured on leaves that move."""
    from_norm_layers: bool = False
    """Whether noise is measured sample by sample, on normalisation layers alone."""
    measures_often: bool = False
    """Whether steps that measure the noise are so frequent that they should run, not compile, fast."""
    has_own_rates: bool = False
    """Whether parts of the parameters have learning rates of their own, by their own noise."""
    compute_dtype: DTypeLike | None = None
    """Type that floating parameters are cast to for computing; None: their own."""
    ema: float | None = None
    """Fraction of the parameters' average that is kept per base step; None: no average."""
    swaps_products: bool = False
    """Whether, on CPU, matrix gradients become products that XLA computes fast there (`gradients.py`)."""
    summed: tuple[str, ...] = ()
    """Paths in the model state to which micro-batches add over samples: see `Variables.summed`."""
    has_sample_keys: bool = False
    """Whether `loss_and_state` gets the key of the run, of which it makes one for each sample: see
    `with_sample_keys`. If not, it gets a key for each step, replica and micro-batch."""

    def mask(self, params: PyTree) -> PyTree:
        """Return a tree of bool: which leaves train."""
        if self.trainable is None:
            return jax.tree.map(lambda _: True, params)
        return self.trainable(params)

    def moving(self, tree: PyTree) -> PyTree:
        """Return a tree of leaves that train, with None for others."""
        return moving(tree, self.moves)

    def apart(self, norms_of: Callable[[Pick], T]) -> T:
        """Return the norms of every moving leaf, or of every part of one whose noise is measured separately.

        `norms_of(pick)` computes the norms of one part; `pick(tree, fill)` keeps that part of the leaves and
        puts `fill` elsewhere.
        """
        return norms_of(lambda tree, fill: self.moving(tree))

    def preconditioner(self, opt_state: PyTree, kept: PyTree) -> PyTree | None:
        """Return what the optimizer multiplies gradients by; None if noise is measured without it."""
        if not self.preconditioned:
            return None
        return noise.preconditioner(opt_state, kept, by_leaf=self.moments)

    def is_settled(self, opt_state: PyTree) -> Array:
        """Return whether the preconditioner has seen enough updates for the noise to count."""
        return noise.is_settled(opt_state)

    # -- what several losses with an optimizer each do otherwise (`programs.named`) --------------

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the numbers that `report` adds to the user's own."""
        return ()

    def report(self, opt_state: PyTree, losses: Array) -> dict[str, Array]:
        """Return numbers to report beside the user's own, after an update for these losses."""
        del opt_state, losses
        return {}

    def param_groups(self, kept: PyTree) -> tuple[str, ...]:
        """Return the names of the groups of parameters whose noise is measured separately."""
        return noise.leaf_groups(self.moving(kept))[0]

    def turn(self, step: Any) -> dict[str, Array]:
        """Return what else an update depends on after `step` others, as arguments of `tx.update`."""
        del step
        return {}

    @property
    def num_losses(self) -> int:
        """How many losses `each_loss` returns."""
        return 1

    def each_loss(self, out: Any) -> list[Any]:
        """Return the losses in what `loss_and_state` returns, to be looked at one by one."""
        return [out]

    def dependences(self, params: PyTree, out: Any) -> list[tuple[PyTree, Any, str]]:
        """Return for each loss the parameters that it trains, its value, and the error if it reads none."""
        otherwise = (
            "the loss does not depend on the parameters, so there is nothing to learn. Return a loss that is "
            "computed from them."
        )
        return [(params, out.sum if isinstance(out, Loss) else out, otherwise)]

    def measured_every(self, steps: int) -> int:
        """Return the steps between two that measure the noise, at least `steps`."""
        return steps

    def value_and_grad(
        self, objective: Callable[..., Any], turn: Mapping[str, Array], *, swaps: bool
    ) -> Callable[..., Any]:
        """Return `jax.value_and_grad` of an objective that also returns other results."""
        del turn
        if swaps:
            return swapped_value_and_grad(objective)
        return jax.value_and_grad(objective, has_aux=True)

    def of_leaves(self, number: Array, tree: PyTree) -> list[Array]:
        """Return the number, such as a loss weight, that holds for each leaf of a gradient tree."""
        return [number] * len(jax.tree.leaves(tree))

    def map_leaves(
        self, function: Callable[[Array, Array], Array], grads: PyTree, number: Array
    ) -> PyTree:
        """Return `function` of each leaf of a gradient tree and the number that holds for it."""
        leaves, structure = jax.tree.flatten(grads)
        pairs = zip(leaves, self.of_leaves(number, grads), strict=True)
        return jax.tree.unflatten(structure, [function(*pair) for pair in pairs])

    def least_sizes(self, grads: PyTree) -> list[int]:
        """Return the size of the smallest leaf that each optimizer moves."""
        return [min(g.size for g in jax.tree.leaves(self.moving(grads)))]

    def of_norms(self, number: Array, grads: PyTree) -> Array:
        """Return a number in a form that multiplies norms of moving leaves, `[leaves]`."""
        del grads
        return number

    def total(self, losses: Array) -> Array:
        """Return the loss of the run."""
        return losses

    def least(self, numbers: Array) -> Array:
        """Return the weight, or the number of noise groups, that is reported of a batch."""
        return numbers


def moving(tree: PyTree, moves: tuple[bool, ...]) -> PyTree:
    """Return `tree` with None for leaves that never move, by `moves`; leaves beyond its end all move."""
    if all(moves):
        return tree
    leaves, structure = jax.tree.flatten(tree)
    every = (*moves, *(True,) * (len(leaves) - len(moves)))  # rows of tables come last
    return jax.tree.unflatten(
        structure, [x if m else None for x, m in zip(leaves, every, strict=True)]
    )


def init_state(
    problem: Problem, key: Array, given: Mapping[str, Array] = MappingProxyType({})
) -> TrainState:
    """Make the state before the first step. Leaves never share buffers.

    `given` replaces leaves of `init` by their names in `Variables`, such as "params/layers/0/kernel"; the
    compiler then drops the code that made them.
    """
    init_key, run_key = jax.random.split(key)
    made = problem.init(init_key)
    variables = made if isinstance(made, Variables) else Variables(params=made, model_state=())
    variables = jax.tree_util.tree_map_with_path(
        lambda path, leaf: given.get(path_name(path), leaf), variables
    )
    trainable, _ = split(variables.params, problem.mask(variables.params))
    return TrainState(
        params=variables.params,
        opt_state=problem.tx.init(trainable),
        model_state=variables.model_state,
        step=jnp.zeros((), jnp.int32),
        key=run_key,
        guard=RefusedUpdates(skipped=jnp.zeros((), jnp.int32), in_a_row=jnp.zeros((), jnp.int32)),
        ema=first_average(problem, variables.params),
    )


def first_average(problem: Problem, params: PyTree) -> PyTree:
    """Return a copy of the trainable parameters, at least float32; None if no average is kept."""
    if problem.ema is None:
        return None
    kept, _ = split(params, problem.mask(params))
    # In bfloat16 an average would not move: its steps are a thousandth of its value.
    return jax.tree.map(lambda x: jnp.array(x, wide_dtype(x.dtype), copy=True), kept)


def _averaged(problem: Problem, ema: PyTree, kept: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Return the average after an update to `kept`, which took the optimizer from `before` to `after`.

    Progress p keeps d^p of the old average. The weights exp(t log d) over the progress t are divided by their
    sum, 1 - d^t, so the initial parameters have no weight, and d per base step means the same for every batch
    size (Adam's bias correction, in units of progress).
    """
    if problem.ema is None:
        return None
    rate, made = math.log(problem.ema), adaptation.progress_between(before, after)
    share = jnp.expm1(rate * made) / jnp.expm1(rate * adaptation.progress(after))
    return jax.tree.map(lambda a, x: a + share.astype(a.dtype) * (x.astype(a.dtype) - a), ema, kept)


def own_specs(problem: Problem) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the model's own partitioning metadata: specs by the paths of its parameters."""
    made = jax.eval_shape(anywhere(problem.init), jax.random.key(0))
    return made.specs if isinstance(made, Variables) else ()


def loss_kind(
    problem: Problem, state: TrainState, batch: PyTree, num_samples: int
) -> Literal["sample", "mean"]:
    """Return "sample" if the loss can be weighted sample by sample, "mean" if it cannot.

    State and batch are abstract. Raises TypeError for a loss of any other shape, and for a model state that
    is not returned as it was given.
    """
    out, changed = jax.eval_shape(
        problem.loss_and_state,
        state.params,
        state.model_state,
        batch,
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    _require_same_state(state.model_state, changed)
    if isinstance(out, NamedLosses):
        kinds = set()
        for name, part in out.parts.items():
            try:
                kinds.add(_kind_of(part, num_samples))
            except TypeError as error:
                raise TypeError(f"loss {name!r}: {error}") from None
        return "sample" if kinds == {"sample"} else "mean"
    return _kind_of(out, num_samples)


def _kind_of(out: Any, num_samples: int) -> Literal["sample", "mean"]:
    value = out.sum if isinstance(out, Loss) else out
    if hasattr(value, "dtype") and not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"loss returned {value.dtype}, which has no gradient. Return floats, such as the mean of a "
            "cross-entropy, not a count of hits."
        )
    if isinstance(out, Loss):
        shapes = jnp.shape(out.sum), jnp.shape(out.weight)
        wrong = (
            f"Loss.sum and Loss.weight must both have shape ({num_samples},) (one value per sample) "
            f"or both be scalars; got {shapes[0]} and {shapes[1]}."
        )
    elif hasattr(out, "shape"):
        shapes = (out.shape,)
        wrong = (
            f"loss returned shape {out.shape} for a micro-batch of {num_samples} samples. Return one loss "
            f"per sample, shape ({num_samples},), summed over every other axis; or a scalar mean."
        )
    else:
        raise TypeError(
            f"loss must return per-sample losses [batch], Loss(sum, weight, aux), or a scalar mean; "
            f"got {type(out).__name__}. Return numbers beside the losses as Loss.of(losses, name=value), and "
            "no gradients: the run takes them."
        )
    if set(shapes) == {(num_samples,)}:
        return "sample"
    if set(shapes) == {()}:
        return "mean"
    raise TypeError(wrong)


def _require_same_state(given: PyTree, returned: PyTree) -> None:
    """Raise TypeError unless a model state is returned with the leaves, shapes and types that it had."""
    old, new = (
        {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (given, returned)
    )
    wrong = [f"{name} is new" for name in new.keys() - old.keys()]
    wrong += [f"{name} is missing" for name in old.keys() - new.keys()]
    wrong += [
        f"{name} was {old[name].dtype}{list(old[name].shape)} and is "
        f"{new[name].dtype}{list(new[name].shape)} for a batch of two samples"
        for name in old.keys() & new.keys()
        if old[name].shape != new[name].shape or not _is_alike(old[name].dtype, new[name].dtype)
    ]
    if not wrong and jax.tree.structure(given) != jax.tree.structure(returned):
        wrong = [f"{jax.tree.structure(given)} became {jax.tree.structure(returned)}"]
    if wrong:
        raise TypeError(
            "loss_and_state must return the model state with the leaves that init() gave it, each of the "
            f"same shape and type, but {'; '.join(sorted(wrong)[:3])}. Values that a Flax module sows belong "
            "to one call: return what from_linen(...).train or from_nnx(...).train returned, which tells "
            "them apart, and name collections that are sowed with a reduce_fn in from_linen(sown=...)."
        )


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether a leaf of the model state may be returned in a type: its own, or any for floats."""
    both = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (one, other))
    return both or one == other


def require_dependence(problem: Problem, state: TrainState, batch: PyTree) -> None:
    """Raise TypeError if the loss does not depend on the parameters. State and batch are abstract."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    traced, shape = jax.make_jaxpr(problem.loss_and_state, return_shape=True)(
        state.params, state.model_state, batch, key
    )
    jaxpr = traced.jaxpr
    leaves, structure = jax.tree.flatten(state.params)
    params = jax.tree.unflatten(structure, jaxpr.invars[: len(leaves)])
    out, _ = jax.tree.unflatten(jax.tree.structure(shape), jaxpr.outvars)
    for own, value, otherwise in problem.dependences(params, out):
        if not _depends(jaxpr, jax.tree.leaves(own), value):
            raise TypeError(otherwise)


def _depends(jaxpr: Jaxpr, inputs: list[Any], output: Any) -> bool:
    """Return whether an output of a traced function may depend on any of the inputs."""
    found = set(inputs)
    for one in jaxpr.eqns:
        read = [x for x in one.invars if isinstance(x, Var)]
        if any(x in found for x in read):
            found.update(one.outvars)
            if one.effects:  # it may write to its inputs
                found.update(read)
    return isinstance(output, Var) and output in found


def _weighted(out: Array | Loss, mask: Array) -> tuple[Any, Array, dict[str, Array]]:
    """Return the sums of losses, weights and auxiliary numbers, without padding.

    Named losses have a tuple of sums, and weights `[names]`.
    """
    if isinstance(out, NamedLosses):
        each = {name: _weighted(part, mask) for name, part in out.parts.items()}
        totals, weights = (tuple(one[i] for one in each.values()) for i in (0, 1))
        named = {f"{n}/{key}": x for n, one in each.items() for key, x in one[2].items()}
        return totals, jnp.stack([wide(x) for x in weights]), named
    samples = jnp.sum(mask)

    def total(value: ArrayLike) -> Array:
        value = wide(value)
        # `where`, not a product: 0 * inf is not 0.
        if value.ndim:
            return jnp.sum(jnp.where(mask > 0, value, 0.0))
        return jnp.where(samples > 0, value * wide(samples, like=value), 0.0)

    def whole(value: ArrayLike) -> Array:
        value = wide(value)
        return total(value) if value.ndim else jnp.where(samples > 0, value, 0.0)

    if isinstance(out, Loss):
        aux = {name: total(value) for name, value in out.aux.items()}
        negative = jnp.any(jnp.where(mask > 0, jnp.asarray(out.weight), 0.0) < 0)
        # It outweighs every sum, so the update is refused and reports why.
        return whole(out.sum), jnp.where(negative, NEGATIVE, whole(out.weight)), aux
    return total(out), samples, {}


def local_sums(
    problem: Problem,
    params: PyTree,
    scale: PyTree,
    model_state: PyTree,
    batch: PyTree,
    mask: Array,
    key: Array,
    *,
    measure: bool = True,
    part: Array | None = None,
    alone: bool = False,
    swaps: bool = False,
    turn: Mapping[str, Array] = MappingProxyType({}),
) -> Sums:
    """Compute the sums of one micro-batch, of one replica or of all replicas.

    `params` are in compute precision; `mask` is `[batch]`, 1 for real samples and 0 for padding. Padding
    must repeat real samples, as the loader has it: its gradient is multiplied by 0, and 0 * inf is not 0.
    `measure=False` leaves the noise moment at 0 and saves a pass over the gradient.
    If `part` is given (`[batch]`, 1 or 0), all rows are computed together, but only this part counts.
    `alone` says that nothing will be added to these sums: if they have no weight, their gradient may be
    anything, and the whole update is refused. `swaps` rewrites matrix gradients (`gradients.py`). `turn` is
    what `Problem.turn` returned for the step.
    """
    kept, rest = split(params, problem.mask(params))
    asked = {"mask": mask} if problem.takes_mask else {}
    mask = _typed_beside(kept, mask)
    if part is not None:
        mask = mask * part.astype(mask.dtype)

    def objective(kept: PyTree, factors: norm_layers.Factors):
        with norm_layers.scaled(factors) as used:
            out, new_state = problem.loss_and_state(
                combine(kept, rest), model_state, batch, key, **asked
            )
        norm_layers.require_all(factors, used)
        total, weight, aux = _weighted(out, mask)
        total = jax.tree.map(lambda x: x.astype(mask.dtype), total)
        return total, (weight.astype(mask.dtype), aux, new_state)

    factors: norm_layers.Factors = {}
    if problem.from_norm_layers:
        factors = norm_layers.ones(
            lambda rows: problem.loss_and_state(params, model_state, rows, key), batch
        )
    (total, others), (grads, by_sample) = _differentiated(
        problem, objective, kept, factors, turn, measure=measure, swaps=swaps
    )
    weight, aux, new_state = jax.lax.stop_gradient(others[0]), *others[1:]
    grads = jax.tree.map(lambda g: wide(g) if jnp.issubdtype(g.dtype, jnp.floating) else g, grads)
    if not alone:
        # The gradient of a micro-batch of padding alone may be anything. `alone` spares this choice, because
        # XLA:CPU writes it to memory, which slows down every sum over the gradient.
        grads = problem.map_leaves(lambda g, w: jnp.where(w > 0, g, 0), grads, weight)
    total = jnp.where(weight > 0, total, 0.0)
    if problem.from_norm_layers:
        like = problem.moving(grads)
        groups, norms, by_sample = _moments_by_sample(by_sample, weight, mask, like=like)
    else:
        groups = (weight > 0).astype(mask.dtype)
        scale = scale if _is_none(scale) else problem.moving(scale)
        of_norms = problem.of_norms(weight, grads)
        norms = _moments(problem.moving(grads), scale, of_norms, measure=measure)
    samples = jnp.sum(mask)
    return Sums(
        grads=grads,
        loss=total,
        weight=weight,
        samples=samples,
        groups=groups,
        norms=norms,
        factors=jax.tree.map(lambda g: jnp.sum(g, axis=0), by_sample),
        calls=jnp.ones((), jnp.int32),
        aux=aux,
        added=_changes(problem, model_state, new_state, samples),
        model_state=_advance(model_state, new_state, samples),
    )


def _differentiated(
    problem: Problem,
    objective: Callable[..., Any],
    kept: PyTree,
    factors: norm_layers.Factors,
    turn: Mapping[str, Array],
    *,
    measure: bool,
    swaps: bool,
) -> tuple[Any, tuple[PyTree, norm_layers.Factors]]:
    """Return what an objective returns, and its gradients by parameters and, to `measure`, by factors."""
    if not (factors and measure):
        found, grads = problem.value_and_grad(objective, turn, swaps=swaps)(kept, {})
        return found, (grads, jax.tree.map(jnp.zeros_like, factors))
    differentiated = swapped_value_and_grad if swaps else partial(jax.value_and_grad, has_aux=True)
    return differentiated(objective, argnums=(0, 1))(kept, factors)


def _typed_beside(params: PyTree, mask: Array) -> Array:
    # Weights are in the type of the gradients' sums: float64 beside float64, for strict promotion.
    doubles = any(x.dtype in (jnp.float64, jnp.complex128) for x in jax.tree.leaves(params))
    return mask.astype(jnp.float64) if doubles else mask


def _moments(grads: PyTree, scale: PyTree, weight: Array, *, measure: bool) -> Array:
    """Return |gradient sum|^2 / weight of every leaf, `[leaves]`; zeros unless `measure`."""
    if not measure:
        return jnp.zeros((len(jax.tree.leaves(grads)),), weight.dtype)
    norms = noise.squared_norms(grads, None if _is_none(scale) else scale)
    return jnp.where(weight > 0, norms / jnp.where(weight > 0, weight, 1.0), 0.0)


def _moments_by_sample(
    by_sample: norm_layers.Factors, weight: Array, mask: Array, *, like: PyTree
) -> tuple[Array, Array, norm_layers.Factors]:
    """Return the number of groups, their moments, and per-sample gradients without padding.

    Every sample is a group. All samples count alike; the moments of the batch are scaled by its weights.
    """
    groups = jnp.sum(mask)
    by_sample = jax.tree.map(lambda g: jnp.where(mask[:, None] > 0, g, 0), by_sample)
    squares = jnp.sum(norm_layers.sum_of_squares(by_sample))
    each = jnp.where(weight > 0, weight / jnp.maximum(groups, 1), 1.0)
    num_leaves = len(jax.tree.leaves(like))
    return groups, jnp.broadcast_to(squares / each / num_leaves, (num_leaves,)), by_sample


def _is_none(scale: PyTree) -> bool:
    """Return whether `scale` is (), which stands for no preconditioner."""
    return isinstance(scale, tuple) and not scale


def in_two(problem: Problem, total: Sums, part: Sums, scale: PyTree, *, cut: bool) -> Sums:
    """Return `total` with the noise moment of two groups: a part of its rows, and the other rows.

    `scale` is the optimizer's preconditioner, () for none. `cut` says that leaves are cut over devices.
    """

    def products_of(pick: Pick) -> tuple[Array, Array, Array]:
        preconditioner = None if _is_none(scale) else pick(scale, 1.0)
        return noise.products_of_two(
            pick(part.grads, 0.0), pick(total.grads, 0.0), preconditioner, cut=cut
        )

    products = problem.apart(products_of)
    # If the part has no weight, its gradient may be anything.
    of_norms = partial(problem.of_norms, grads=total.grads)
    has_weight = of_norms(part.weight) > 0
    first, both = (jnp.where(has_weight, x, 0) for x in products[:2])
    whole = products[2]
    groups_of_rows = (
        (first, part.weight),
        (jnp.maximum(whole - 2 * both + first, 0), total.weight - part.weight),
    )
    norms, groups = jnp.zeros_like(whole), jnp.zeros_like(total.groups)
    for square, weight in groups_of_rows:
        some = weight > 1e-6 * total.weight  # the difference of two sums is rarely exactly 0
        norms += jnp.where(of_norms(some), square / of_norms(jnp.where(some, weight, 1.0)), 0.0)
        groups += some.astype(groups.dtype)
    return dataclasses.replace(total, norms=norms, groups=groups, square=whole)


def _advance(old: PyTree, new: PyTree, samples: Array) -> PyTree:
    """Return the new model state, with old floats if the micro-batch held no real sample.

    Floats keep their types: Flax computes new statistics of float32 in the type of the parameters. Other
    leaves (counters, keys) advance with every micro-batch, so they stay the same on all replicas.
    """

    def advanced(a: Array, b: Array) -> Array:
        if not jnp.issubdtype(b.dtype, jnp.floating):
            return b
        return jnp.where(samples > 0, b.astype(a.dtype), a)

    return jax.tree.map(advanced, old, new)


def is_summed(problem: Problem, path: Any) -> bool:
    """Return whether micro-batches add over samples to the leaf of the model state at `path`."""
    name = path_name(path)
    return any(name == one or name.startswith(f"{one}/") for one in problem.summed)


def _changes(problem: Problem, old: PyTree, new: PyTree, samples: Array) -> dict[str, Array]:
    """Return by path what a micro-batch added to the leaves that add over samples."""
    if not problem.summed:
        return {}
    pairs = zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True)
    return {
        path_name(path): jnp.where(samples > 0, b.astype(a.dtype) - a, jnp.zeros_like(a))
        for (path, b), a in pairs
        if is_summed(problem, path)
    }


def _with_added(problem: Problem, old: PyTree, total: Sums) -> PyTree:
    """Return the model state after a batch: `old` plus what was added, where leaves add over samples."""
    if not problem.summed:
        return total.model_state

    def placed(path: Any, before: Array, after: Array) -> Array:
        if not is_summed(problem, path):
            return after
        return before + total.added[path_name(path)].astype(before.dtype)

    return jax.tree_util.tree_map_with_path(placed, old, total.model_state)


def _stays_finite(old: PyTree, new: PyTree) -> Array:
    """Return whether all floats that were finite still are. A running minimum may begin at infinity."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    lost = [
        (jnp.isfinite(a) & ~jnp.isfinite(b)).any()
        for a, b in pairs
        if jnp.issubdtype(b.dtype, jnp.floating)
    ]
    return ~jnp.any(jnp.stack([jnp.zeros((), bool), *lost]))


def _checked(
    problem: Problem,
    state: TrainState,
    total: Sums,
    loss: Array,
    share: Array,
    *,
    cut: bool,
    **about: Any,
) -> tuple[Array, Array]:
    """Return the squared norm of the gradient, and whether all updates of small leaves are finite.

    The updates are computed before any is applied. A schedule that turns NaN spoils all leaves alike, so
    small ones suffice. Checking an update while it is applied would write it to memory (twice the CPU time of
    the recommender's steps). Large leaves get a constant gradient here, so their own is not read: 1, because
    optimizers may divide by a norm. If all leaves are large, the smallest that moves is checked.
    """
    kept, _ = split(state.params, problem.mask(state.params))
    small = max(SMALL, *problem.least_sizes(total.grads))
    leaves, shares = jax.tree.leaves(total.grads), problem.of_leaves(share, total.grads)

    def small_mean(g: Array, s: Array) -> Array:
        return g * s.astype(g.dtype) if g.size <= small else jnp.ones_like(g)

    grads = problem.map_leaves(small_mean, total.grads, share)
    updates, _ = problem.tx.update(grads, state.opt_state, kept, value=loss, **about)
    zero = jnp.zeros((), share.dtype)
    norm, lost = zero, zero
    # Small leaves of one shape and one share.
    alike: dict[tuple[Any, ...], list[tuple[Array, Array]]] = {}
    share_of = {id(s): s for s in shares}
    for g, u, s in zip(leaves, jax.tree.leaves(updates), shares, strict=True):
        square = jnp.square(g.real) + jnp.square(g.imag) if jnp.iscomplexobj(g) else g * g
        square = square.astype(share.dtype)
        # NaN in place of what is not finite.
        none = wide(jnp.abs(u)).astype(share.dtype) * 0 if g.size <= small else zero
        if cut or g.size > SMALL:
            # The compiler would gather a leaf that is cut for a joint sum, which would also lose digits in
            # millions of elements.
            norm, lost = norm + jnp.sum(square) * s**2, lost + jnp.sum(none)
        else:
            # A leaf that stays has a scalar update.
            kind = (id(s), g.shape)
            alike.setdefault(kind, []).append((square, jnp.broadcast_to(none, g.shape)))
    for (own, _), leaves in alike.items():
        # One operation for both sums, and for several leaves: hundreds of them take long to compile, too.
        for first in range(0, len(leaves), TOGETHER):
            pair = functools.reduce(noise.added, leaves[first : first + TOGETHER])
            sums = jax.lax.reduce(pair, (zero, zero), noise.added, range(pair[0].ndim))
            norm, lost = norm + sums[0] * share_of[own] ** 2, lost + sums[1]
    return norm, jnp.isfinite(lost)


def _noise_sample(
    problem: Problem, state: TrainState, kept: PyTree, total: Sums, weight: Array
) -> noise.NoiseSample:
    """Return the noise moments of the batch's groups, and of the whole batch."""
    scale = problem.preconditioner(state.opt_state, kept)
    if problem.from_norm_layers:
        # There is one noise scale for all leaves: each gets the same part of it.
        squares = sum(jnp.sum(jnp.square(x)) for x in total.factors.values())
        large = jnp.broadcast_to(squares / total.norms.size, total.norms.shape)
    elif scale is not None and total.square is not None:
        large = total.square  # known already, which saves a pass over memory
    else:
        large = problem.apart(
            lambda pick: noise.squared_norms(
                pick(total.grads, 0.0), None if scale is None else pick(scale, 1.0)
            )
        )
    of_norms = problem.of_norms(weight, total.grads)
    large = large / of_norms**2
    sample = noise.NoiseSample(
        small_sqr=total.norms / of_norms,
        large_sqr=large,
        num_groups=total.groups,
        num_samples=total.samples,
    )
    if scale is None:
        return sample
    # Before the preconditioner has settled, moments have other units and would linger in the average.
    settled = problem.is_settled(state.opt_state)
    return dataclasses.replace(
        sample,
        num_groups=jnp.where(settled, sample.num_groups, 0),
        moment=problem.apart(lambda pick: noise.moment_norms(pick(scale, 0.0))),
    )


def update(
    problem: Problem,
    state: TrainState,
    total: Sums,
    *,
    measure: bool,
    cut: bool = False,
) -> tuple[TrainState, StepMetrics[Array]]:
    """Return the next state from the sums of a whole batch, and what to report.

    If the loss, gradient, update or model state is not finite, or the batch has no weight, then parameters,
    their average, optimizer and model state stay as they were; only the step count, the refusals and the
    samples seen advance. `measure` takes a noise sample from the groups of this batch. `cut` says that a
    device may hold a part of a leaf.
    """
    kept, rest = split(state.params, problem.mask(state.params))
    weight = jnp.maximum(total.weight, 1e-30)
    loss = total.loss / weight
    sample = _noise_sample(problem, state, kept, total, weight) if measure else None
    # Times the reciprocal: XLA fuses a product into both of its uses, but writes a quotient to memory.
    share = 1.0 / weight
    changed = _with_added(problem, state.model_state, total)
    turn = problem.turn(state.step)
    about = {"global_batch_size": total.samples, "noise": sample, **turn}
    scale = total.samples / problem.base_batch_size
    about["decided"] = decided = problem.tx.decide(total.grads, state.opt_state, **about)
    norm_sqr, is_whole = _checked(problem, state, total, loss, share, cut=cut, **about)
    of_run, least_weight = problem.total(loss), problem.least(total.weight)
    finite = is_whole & jnp.isfinite(of_run) & jnp.isfinite(norm_sqr) & (least_weight > 0)
    finite &= _stays_finite(state.model_state, changed)

    def take(grads: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        updates, opt_state = problem.tx.update(
            problem.map_leaves(lambda g, s: g * s.astype(g.dtype), grads, share),
            state.opt_state,
            kept,
            value=loss,  # for links that ask for it, such as `reduce_on_plateau`
            **about,
        )
        after: Any = opt_state
        moved = optax.apply_updates(kept, updates)
        ema = _averaged(problem, state.ema, moved, state.opt_state, after)
        return moved, after.inner, changed, ema

    def skip(grads: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        inner = problem.tx.skipped(state.opt_state.inner, scale, **turn)
        return kept, inner, state.model_state, state.ema

    # A branch, not a `where` over every leaf: that would keep old and new alive and copy both.
    new_kept, inner, model_state, ema = jax.lax.cond(finite, take, skip, total.grads)
    # The samples count all the same, so schedules that depend on them advance.
    passed = adaptation.passed_over(state.opt_state, scale)
    decided_own = problem.tx.watched(decided, inner, jnp.sqrt(norm_sqr), scale)
    own = jax.tree.map(lambda new, old: jnp.where(finite, new, old), decided_own, passed.own)
    opt_state = adaptation.AdaptiveState(inner=inner, own=own)
    missed = (~finite).astype(jnp.int32)
    new_state = TrainState(
        params=combine(new_kept, rest),
        opt_state=opt_state,
        model_state=model_state,
        step=state.step + 1,
        key=state.key,
        guard=RefusedUpdates(
            skipped=state.guard.skipped + missed,
            in_a_row=(state.guard.in_a_row + 1) * missed,
        ),
        ema=ema,
    )
    # A batch without weight is reported as one, not as what its gradient is if divided by nothing. Only here:
    # a choice among what the update reads would change its roundings.
    has_none = least_weight <= 0
    losses = jnp.where(total.weight <= 0, 0.0, loss)
    reported_norm_sqr = jnp.where(has_none, 0.0, norm_sqr)
    metrics = _metrics(problem, new_state, total, losses, reported_norm_sqr, finite)
    return new_state, metrics


def _metrics(
    problem: Problem, state: TrainState, total: Sums, losses: Array, norm_sqr: Array, finite: Array
) -> StepMetrics[Array]:
    """Return what to report of a batch, after the update to `state`."""
    samples = jnp.maximum(total.samples, 1.0)
    growth = adaptation.find(state.opt_state).growth
    aux = {name: value / wide(samples, like=value) for name, value in total.aux.items()}
    return StepMetrics(
        loss=problem.total(losses),
        weight=problem.least(total.weight),
        grad_norm=jnp.sqrt(norm_sqr),
        is_finite=finite,
        num_skipped=state.guard.skipped,
        skipped_in_a_row=state.guard.in_a_row,
        num_samples=total.samples,
        num_groups=problem.least(total.groups),
        progress=adaptation.progress(state.opt_state),
        gain=adaptation.gain(state.opt_state).mean(),
        explodes=growth.explodes,
        most_gain=growth.most_worth,
        noise=adaptation.readout(state.opt_state),
        measured=adaptation.measured_groups(state.opt_state),
        aux=aux | problem.report(state.opt_state, losses),
    )
