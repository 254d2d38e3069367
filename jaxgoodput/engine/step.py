"""A training step as pure functions: the sums of one micro-batch, and the update.

Nothing here knows of devices or meshes. `local_sums` runs on one replica, or on all rows at once; sums
of micro-batches and of replicas are added (`Sums` knows how); `update` turns the total into the next
state. Gradient accumulation, uneven counts of micro-batches and padding are all the same addition with
other weights.

Noise moments of n groups (micro-batches on replicas) with shares p_i of the loss weight:
L = sum p_i |g_i|^2 and T = |g|^2 give `trace = M (L - T) / (n - 1)` per sample and
`sqr = (n T - L) / (n - 1)` (McCandlish et al. 2018, appendix A, for unequal groups).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, PyTree

from jaxgoodput.engine import norm_layers
from jaxgoodput.engine.gradients import swapped_value_and_grad
from jaxgoodput.engine.state import (
    Loss,
    RefusedUpdates,
    StepMetrics,
    Sums,
    TrainState,
    Variables,
    cast,
    combine,
    split,
)
from jaxgoodput.optim import adaptive as adaptation
from jaxgoodput.optim import noise
from jaxgoodput.optim.preconditioner import MomentConstants
from jaxgoodput.parallel.partition import path_name
from jaxgoodput.parallel.strategy import anywhere

# (params, model state, batch, key) -> (what `loss_kind` allows, new model state)
T = TypeVar("T")
Pick = Callable[[PyTree, float], PyTree]
LossAndState = Callable[..., tuple[Array | Loss, PyTree]]
# Elements of a leaf whose update is worked out twice, to see what it is before anything is applied.
SMALL = 2**14


@dataclass(frozen=True)
class Problem:
    """What is trained: the user's functions and how their gradient is measured."""

    init: Callable[[Array], PyTree]
    """From a key to the parameters, or to `Variables`."""
    loss_and_state: LossAndState
    """From parameters, model state, a batch and a key to per-sample losses `[batch]`, a `Loss` or a scalar
    mean, and the new model state."""
    tx: optax.GradientTransformationExtraArgs
    """An `adaptive(...)`."""
    base_batch_size: int
    """The batch that the learning rate was tuned for."""
    takes_mask: bool = False
    """Whether `loss_and_state` takes `mask=` too: 1 for real samples, 0 for padding, `[batch]`."""
    trainable: Callable[[PyTree], PyTree] | None = None
    """From parameters to a tree of bool; None: all train."""
    preconditioned: bool = False
    """Whether noise is measured in the coordinates of the optimizer's preconditioner."""
    moments: MomentConstants = MomentConstants()
    """Of the preconditioner; `probe.moment_constants(tx, params)` finds them."""
    from_norm_layers: bool = False
    """Whether noise is measured on normalisation layers alone, sample by sample."""
    has_labels: bool = False
    """Whether learning rates go by labels."""
    compute_dtype: DTypeLike | None = None
    """What floating parameters are cast to for computing; None: they are not."""
    ema: float | None = None
    """Share of the parameters' average that is kept per base step; None: there is no average."""
    swaps_products: bool = False
    """Whether, on CPU, gradients of matrices are computed as XLA does it fast there (`gradients.py`)."""

    def mask(self, params: PyTree) -> PyTree:
        """Which leaves train."""
        if self.trainable is None:
            return jax.tree.map(lambda _: True, params)
        return self.trainable(params)

    def apart(self, norms_of: Callable[[Pick], T]) -> T:
        """Norms of every leaf, or of every part of one whose noise is apart, from `norms_of(pick)`.

        `pick(tree, fill)` is the part that they are to be of, and `fill` elsewhere.
        """
        return norms_of(lambda tree, fill: tree)

    def preconditioner(self, opt_state: PyTree, kept: PyTree) -> PyTree | None:
        """What the optimizer divides gradients by; None where noise is measured without."""
        if not self.preconditioned:
            return None
        return noise.preconditioner(opt_state, kept, b2=self.moments.b2, eps=self.moments.eps)


def init_state(
    problem: Problem, key: Array, given: Mapping[str, Array] = MappingProxyType({})
) -> TrainState:
    """The state before the first step. Buffers are never shared between leaves.

    `given` are leaves by their names in `Variables`, such as "params/layers/0/kernel", in place of those that
    `init` makes; the compiler leaves out what made those.
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
    """A copy of the trainable parameters, float32 at least; None where no average is kept."""
    if problem.ema is None:
        return None
    kept, _ = split(params, problem.mask(params))
    # In bfloat16 an average would not move: its steps are a thousandth of what it is.
    return jax.tree.map(
        lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True), kept
    )


def _averaged(problem: Problem, ema: PyTree, kept: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """The average after an update to `kept`, which took the optimizer state from `before` to `after`.

    A stretch of progress p keeps d^p of what was there. Weights are those of exp(t log d) over the progress
    t, divided by their sum, 1 - d^t: the initial parameters have none, and an average of d per base step
    means the same at every batch (Adam's bias correction, in progress).
    """
    if problem.ema is None:
        return None
    rate, made = math.log(problem.ema), adaptation.progress_between(before, after)
    share = jnp.expm1(rate * made) / jnp.expm1(rate * adaptation.progress(after))
    return jax.tree.map(lambda a, x: a + share.astype(a.dtype) * (x - a), ema, kept)


def own_specs(problem: Problem) -> tuple[tuple[str, PartitionSpec], ...]:
    """How the model's own metadata cuts its parameters, by their paths."""
    made = jax.eval_shape(anywhere(problem.init), jax.random.key(0))
    return made.specs if isinstance(made, Variables) else ()


def loss_kind(
    problem: Problem, state: TrainState, batch: PyTree, num_samples: int
) -> Literal["sample", "mean"]:
    """'sample' where the loss can be weighted sample by sample, 'mean' where it cannot.

    State and batch are abstract. Raises TypeError for a loss of any other shape.
    """
    out, _ = jax.eval_shape(
        problem.loss_and_state,
        state.params,
        state.model_state,
        batch,
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    value = out.sum if isinstance(out, Loss) else out
    if hasattr(value, "dtype") and not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"loss returned {value.dtype}, which has no gradient. Return floats, such as the mean of a "
            "cross-entropy, not a count of hits."
        )
    if isinstance(out, Loss):
        total, weight = jnp.shape(out.sum), jnp.shape(out.weight)
        if total == weight == (num_samples,):
            return "sample"
        if total == weight == ():
            return "mean"
        raise TypeError(
            f"Loss.sum and Loss.weight must both have shape ({num_samples},) (one value per sample) "
            f"or both be scalars; got {total} and {weight}."
        )
    if not hasattr(out, "shape"):
        raise TypeError(
            f"loss must return per-sample losses [batch], Loss(sum, weight, aux), or a scalar mean; "
            f"got {type(out).__name__}. Wrap auxiliary numbers as Loss.of(sum, weight, name=value)."
        )
    if out.shape == (num_samples,):
        return "sample"
    if out.shape == ():
        return "mean"
    raise TypeError(
        f"loss returned shape {out.shape} for a micro-batch of {num_samples} samples. Return one loss "
        f"per sample, shape ({num_samples},), summed over every other axis; or a scalar mean."
    )


def require_dependence(problem: Problem, state: TrainState, batch: PyTree) -> None:
    """Raises TypeError for a loss that does not depend on the parameters; all abstract."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = jax.make_jaxpr(problem.loss_and_state)(
        state.params, state.model_state, batch, key
    ).jaxpr
    found = set(jaxpr.invars[: len(jax.tree.leaves(state.params))])
    for one in jaxpr.eqns:
        read = [x for x in one.invars if isinstance(x, Var)]
        if any(x in found for x in read):
            found.update(one.outvars)
            if one.effects:  # what it writes to
                found.update(read)
    # The sum of a `Loss` comes first, too.
    loss = jaxpr.outvars[0]
    if not (isinstance(loss, Var) and loss in found):
        raise TypeError(
            "the loss does not depend on the parameters, so there is nothing to learn. Return what was "
            "computed from them."
        )


def _weighted(out: Array | Loss, mask: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Sum of losses, sum of weights, and sums of the auxiliary numbers, padding left out."""
    samples = jnp.sum(mask)

    def total(value: ArrayLike) -> Array:
        value = jnp.asarray(value, jnp.float32)
        # `where`, not a product: 0 * inf is not 0.
        if value.ndim:
            return jnp.sum(jnp.where(mask > 0, value, 0.0))
        return jnp.where(samples > 0, value * samples, 0.0)

    def whole(value: ArrayLike) -> Array:
        value = jnp.asarray(value, jnp.float32)
        return total(value) if value.ndim else jnp.where(samples > 0, value, 0.0)

    if isinstance(out, Loss):
        aux = {name: total(value) for name, value in out.aux.items()}
        negative = jnp.any(jnp.where(mask > 0, jnp.asarray(out.weight), 0.0) < 0)
        # What no sum of others makes up for: the update is refused, and says why.
        return whole(out.sum), jnp.where(negative, -jnp.inf, whole(out.weight)), aux
    return total(out), samples, {}


def _without_padding(batch: PyTree, mask: Array, blocks: int) -> PyTree:
    """The batch with a real sample in place of padding, which may hold anything.

    Leaving a padded loss out of the sum is not enough: its gradient is 0 times whatever the padding
    makes of the backward pass, and 0 * inf is not 0. The sample is one of the same block of rows (those
    of a replica), so that nothing is sent; a block of padding alone stays as it is, which is a real
    sample where the loader made it, but for zeros in place of what is not finite. Where there is no real
    sample at all, what comes of it counts for nothing (`local_sums`).
    """
    rows = mask.reshape(blocks, -1) > 0
    real, is_empty = jnp.argmax(rows, axis=1), ~rows.any(axis=1)

    def fill(x: Array) -> Array:
        split = x.reshape(*rows.shape, *x.shape[1:])
        chosen = jax.vmap(lambda block, row: block[row])(split, real)
        kept = rows | is_empty[:, None]
        found = jnp.where(kept.reshape(*rows.shape, *(1,) * (x.ndim - 1)), split, chosen[:, None])
        if jnp.issubdtype(x.dtype, jnp.inexact):
            empty = is_empty.reshape(-1, *(1,) * x.ndim)
            found = jnp.where(empty & ~jnp.isfinite(found), jnp.zeros((), x.dtype), found)
        return found.reshape(x.shape)

    return jax.tree.map(fill, batch)


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
    blocks: int = 1,
    part: Array | None = None,
    alone: bool = False,
    swaps: bool = False,
) -> Sums:
    """One micro-batch, of one replica or of all: gradient sum, loss sum, weight, and |gradient|^2.

    `params` are in compute precision, `mask` is 1 for real samples and 0 for padding, `[batch]`; rows
    come from `blocks` replicas. `measure=False` leaves the noise moment at 0 and saves one pass over the
    gradient. Of all rows, which are computed together, only those of `part` (`[batch]`, 1 or 0) count.
    `alone` says that nothing will be added to these sums: the gradient of a micro-batch without weight,
    which may then be anything, is refused with the whole update. `swaps` computes those of matrices as
    XLA:CPU does it fast (`gradients.py`).
    """
    kept, rest = split(params, problem.mask(params))
    batch = _without_padding(batch, mask, blocks)
    asked = {"mask": mask} if problem.takes_mask else {}
    if part is not None:
        mask = mask * part

    def objective(kept: PyTree, factors: norm_layers.Factors):
        with norm_layers.scaled(factors) as used:
            out, new_state = problem.loss_and_state(
                combine(kept, rest), model_state, batch, key, **asked
            )
        norm_layers.require_all(factors, used)
        total, weight, aux = _weighted(out, mask)
        return total, (weight, aux, new_state)

    factors: norm_layers.Factors = {}
    if problem.from_norm_layers:
        factors = norm_layers.ones(
            lambda rows: problem.loss_and_state(params, model_state, rows, key), batch
        )
    differentiated = swapped_value_and_grad if swaps else partial(jax.value_and_grad, has_aux=True)
    if problem.from_norm_layers and measure:
        (total, others), (grads, by_sample) = differentiated(objective, argnums=(0, 1))(
            kept, factors
        )
    else:
        (total, others), grads = differentiated(objective)(kept, {})
        by_sample = jax.tree.map(jnp.zeros_like, factors)
    weight, aux, new_state = others
    weight = jax.lax.stop_gradient(weight)
    grads = cast(grads, jnp.float32)
    if not alone:  # a choice that XLA:CPU writes out, and that slows down every sum over it
        # A micro-batch of padding alone may have made anything of it.
        grads = jax.tree.map(lambda g: jnp.where(weight > 0, g, 0), grads)
    total = jnp.where(weight > 0, total, 0.0)
    norms = jnp.zeros((len(jax.tree.leaves(kept)),), jnp.float32)
    groups = (weight > 0).astype(jnp.float32)
    if problem.from_norm_layers:
        # Samples weigh alike here; the sum of the batch's is what the weights make of it.
        groups = jnp.sum(mask)
        by_sample = jax.tree.map(lambda g: jnp.where(mask[:, None] > 0, g, 0), by_sample)
        squares = jnp.sum(norm_layers.sum_of_squares(by_sample)) if factors else 0.0
        each = jnp.where(weight > 0, weight / jnp.maximum(groups, 1), 1.0)
        norms = jnp.broadcast_to(squares / each / norms.size, norms.shape)
    elif measure:
        preconditioner = None if isinstance(scale, tuple) and not scale else scale
        norms = noise.squared_norms(grads, preconditioner)
        norms = jnp.where(weight > 0, norms / jnp.where(weight > 0, weight, 1.0), 0.0)
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
        model_state=_advance(model_state, new_state, samples),
    )


def in_two(problem: Problem, total: Sums, part: Sums, scale: PyTree, *, cut: bool) -> Sums:
    """The sums of one micro-batch with the noise moment of two groups: a part of its rows, and the others.

    `scale` is the optimizer's preconditioner, () for none; `cut` says that leaves are cut over devices.
    """
    has_none = isinstance(scale, tuple) and not scale

    def products_of(pick: Pick) -> tuple[Array, Array, Array]:
        preconditioner = None if has_none else pick(scale, 1.0)
        return noise.products_of_two(
            pick(part.grads, 0.0), pick(total.grads, 0.0), preconditioner, cut=cut
        )

    products = problem.apart(products_of)
    # The gradient of a part without weight may be anything.
    first, both = (jnp.where(part.weight > 0, x, 0) for x in products[:2])
    whole = products[2]
    groups_of_rows = (
        (first, part.weight),
        (jnp.maximum(whole - 2 * both + first, 0), total.weight - part.weight),
    )
    norms, groups = jnp.zeros_like(whole), jnp.zeros_like(total.groups)
    for square, weight in groups_of_rows:
        some = weight > 1e-6 * total.weight  # the difference of two sums is hardly ever 0
        norms += jnp.where(some, square / jnp.where(some, weight, 1.0), 0.0)
        groups += some.astype(groups.dtype)
    return dataclasses.replace(total, norms=norms, groups=groups, square=whole)


def _advance(old: PyTree, new: PyTree, samples: Array) -> PyTree:
    """The new model state; floating leaves only where the micro-batch held any real sample.

    Others (counters, keys) move on with every micro-batch, so that they stay alike on all replicas.
    """
    return jax.tree.map(
        lambda a, b: jnp.where(samples > 0, b, a) if jnp.issubdtype(b.dtype, jnp.floating) else b,
        old,
        new,
    )


def _stays_finite(old: PyTree, new: PyTree) -> Array:
    """Whether all floating numbers are that were before: a running minimum may begin at infinity."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    lost = [
        (jnp.isfinite(a) & ~jnp.isfinite(b)).any()
        for a, b in pairs
        if jnp.issubdtype(b.dtype, jnp.floating)
    ]
    return ~jnp.any(jnp.stack([jnp.zeros((), bool), *lost]))


def _is_update_finite(
    problem: Problem, state: TrainState, total: Sums, loss: Array, share: Array
) -> Array:
    """Whether the updates of all small leaves are, which a schedule that turns NaN spoils like all others.

    Worked out beforehand: an update that is looked at while it is applied has to be written out (twice the
    CPU time of the recommender's steps). Large leaves get a constant here, so that nothing reads theirs:
    1, because a norm of all that is 0 would be divided by. Where all are large, the smallest stands for them.
    """
    kept, _ = split(state.params, problem.mask(state.params))
    small = max(SMALL, min(g.size for g in jax.tree.leaves(total.grads)))
    grads = jax.tree.map(lambda g: g * share if g.size <= small else jnp.ones_like(g), total.grads)
    updates, _ = problem.tx.update(
        grads, state.opt_state, kept, global_batch_size=total.samples, value=loss
    )
    is_finite = [jnp.isfinite(u).all() for u in jax.tree.leaves(updates) if u.size <= small]
    return jnp.all(jnp.stack(is_finite))


def update(
    problem: Problem,
    state: TrainState,
    total: Sums,
    *,
    measure: bool,
) -> tuple[TrainState, StepMetrics[Array]]:
    """The next state from the sums of a whole batch, and what to report.

    A loss, gradient, update or model state that is not finite, or a batch without weight, leaves
    parameters, their average, optimizer and model state as they were; only the step count, the guard and
    the samples gone by move on. `measure` takes a noise sample from the groups of this batch.
    """
    kept, rest = split(state.params, problem.mask(state.params))
    weight = jnp.maximum(total.weight, 1e-30)
    loss = total.loss / weight
    norms = noise.squared_norms(total.grads) / weight**2
    norm_sqr = jnp.sum(norms)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm_sqr) & (total.weight > 0)

    sample = None
    if measure:
        scale = problem.preconditioner(state.opt_state, kept)
        if problem.from_norm_layers:
            # One noise scale for all: every leaf is given the same part of it.
            squares = [jnp.sum(jnp.square(x)) for x in total.factors.values()]
            large = jnp.broadcast_to(sum(squares) / norms.size, norms.shape) / weight**2
        elif scale is not None:
            known = total.square  # a pass of its own over memory takes long
            if known is None:
                known = problem.apart(
                    lambda pick: noise.squared_norms(pick(total.grads, 0.0), pick(scale, 1.0))
                )
            large = known
            large = large / weight**2
        else:
            large = problem.apart(lambda pick: noise.squared_norms(pick(total.grads, 0.0)))
            large = large / weight**2
        sample = noise.NoiseSample(
            small_sqr=total.norms / weight,
            large_sqr=large,
            num_groups=total.groups,
            num_samples=total.samples,
        )
        if scale is not None:
            # Before, it is in other units, and would stay in the average for long.
            settled = noise.is_settled(state.opt_state)
            sample = dataclasses.replace(
                sample, num_groups=jnp.where(settled, sample.num_groups, 0)
            )

    # Times the reciprocal: XLA fuses a product into both of its uses, and writes a quotient out.
    share = 1.0 / weight
    finite &= _stays_finite(state.model_state, total.model_state)
    finite &= _is_update_finite(problem, state, total, loss, share)

    def take(grads: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        updates, opt_state = problem.tx.update(
            jax.tree.map(lambda g: g * share, grads),
            state.opt_state,
            kept,
            global_batch_size=total.samples,
            noise=sample,
            value=loss,  # for links that ask for it, such as `reduce_on_plateau`
        )
        moved = optax.apply_updates(kept, updates)
        ema = _averaged(problem, state.ema, moved, state.opt_state, opt_state)
        return moved, opt_state, total.model_state, ema

    def skip(grads: PyTree) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        # The run's samples go by all the same, and so do schedules that are called with them.
        opt_state = adaptation.passed_over(state.opt_state, total.samples / problem.base_batch_size)
        return kept, opt_state, state.model_state, state.ema

    # A branch, not a `where` over every leaf: that would keep old and new alive and copy both.
    new_kept, opt_state, model_state, ema = jax.lax.cond(finite, take, skip, total.grads)
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
    samples = jnp.maximum(total.samples, 1.0)
    metrics = StepMetrics(
        loss=loss,
        weight=total.weight,
        grad_norm=jnp.sqrt(norm_sqr),
        is_finite=finite,
        num_skipped=new_state.guard.skipped,
        skipped_in_a_row=new_state.guard.in_a_row,
        num_samples=total.samples,
        num_groups=total.groups,
        progress=adaptation.progress(new_state.opt_state),
        gain=adaptation.gain(new_state.opt_state).mean(),
        noise=adaptation.readout(new_state.opt_state),
        aux={name: value / samples for name, value in total.aux.items()},
    )
    return new_state, metrics
