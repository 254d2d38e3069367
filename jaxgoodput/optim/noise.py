"""Estimates gradient noise inside the jitted step, from squared norms in one pass over the gradient.

A batch of M samples consists of n groups: replicas, micro-batches, two parts of the rows, or two successive
gradients. Their mean gradients are g_i, their shares of the loss weight p_i, and g = sum p_i g_i. With L =
sum p_i |g_i|^2 and T = |g|^2, E[L] - |E g|^2 is n times E[T] - |E g|^2 = trace / M. This gives the unbiased
pair

    sqr = (n T - L) / (n - 1)          trace = M (L - T) / (n - 1)

(McCandlish et al. 2018, appendix A.1, for groups of unequal size; Pollux section 3.1). For
optimizers that multiply it by P the norm is g' P g: an update -P g is plain SGD in coordinates P^(-1/2) x,
whose gradient is P^(1/2) g. (AdaptDL takes |P g|^2, which is invariant under no change of
coordinates.) `var` is the trace at the base batch size, trace / base.

A noise sample holds these norms for every leaf of the parameters. They are pooled by label for the learning
rate, and by group (`leaf_groups`) for the worth of a larger batch.

A single estimate varies widely and may be negative. Estimates are therefore averaged, together with their
standard error and their number: see `cautious_grad_params` and `expected_groups`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, PyTree

from jaxgoodput._pytree import struct, wide_dtype
from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.goodput.intervals import GROUP_SPREAD, LEVELS
from jaxgoodput.optim.preconditioner import is_settled as is_settled
from jaxgoodput.optim.preconditioner import preconditioner as preconditioner

MIN_SAMPLES = 8.0  # with fewer, a standard error says little, and the moments count as unknown
_MIN_VAR = 1e-6  # AdaptDL's floor of the variance
_MAX_FORGET = (
    1 / 16
)  # per sample; more would leave too few samples for a standard error at large batches
_OUTLIER = 30.0  # standard deviations beyond which a sample is clipped as a spike
GROUP_OUTLIER = (
    6.0  # the same for groups: a spike in one group would change the shares of all others
)
# Points over which what is expected of a signal is summed.
NUM_LEVELS, NUM_SIGNALS = 12, 16
MAX_GROUPS = 64  # groups of parameters, each with its own efficiency

Labels = PyTree[str] | Callable[[PyTree], PyTree[str]] | None
Scalar = Num[Array, ""]
Number = TypeVar("Number")
# Fields of a PyTree hold arrays, or anything that a tree map puts in their place (shardings, shapes).
Leaf: TypeAlias = Any


@struct
class NoiseSample:
    """The gradient noise measured in one batch: two squared norms of every leaf, and two counts.

    `update_noise` ignores a sample with fewer than two groups, or with a value that is not finite.
    """

    small_sqr: Leaf
    """L = sum_i p_i g_i' P g_i, `[leaves]`, or pooled."""
    large_sqr: Leaf
    """T = g' P g, `[leaves]`, or pooled."""
    num_groups: Leaf
    """n, the number of gradient groups with weight above zero; a scalar."""
    num_samples: Leaf
    """M, the number of real samples in the whole batch; a scalar."""
    moment: Leaf = None
    """The second moment v in the same norm, sum of v P, `[leaves]`, or pooled; None if it was not measured.
    Any value if a leaf has no second moment."""

    def pooled(self, groups: Sequence[int], num_groups: int) -> "NoiseSample":
        """Return the sample with the norms of each group added up; `groups` is the group of every entry."""
        if self.small_sqr.shape != (len(groups),):
            raise ValueError(
                f"the noise sample has {self.small_sqr.size} norms, the parameters have {len(groups)} "
                "leaves. Measure all of the gradients that the optimizer gets."
            )

        def pool(norms: Array) -> Array:
            index = jnp.asarray(groups, jnp.int32)
            return jnp.zeros(num_groups, norms.dtype).at[index].add(norms)

        return dataclasses.replace(
            self,
            small_sqr=pool(self.small_sqr),
            large_sqr=pool(self.large_sqr),
            moment=None if self.moment is None else pool(self.moment),
        )


@struct
class Averages:
    """Running averages of two unbiased estimates, signal (`sqr`) and noise (`var`).

    Arrays are `[groups + 1]`; the last entry is all groups together.
    """

    sqr: Leaf
    """Squared norm of the expected gradient."""
    var: Leaf
    """Trace of the covariance at the base batch size."""
    sqr_deviation: Leaf
    """Standard deviation of one sample of `sqr`."""
    var_deviation: Leaf
    """Standard deviation of one sample of `var`."""
    weight: Leaf
    """Sum of the samples' weights, a scalar that tends to 1."""
    heaviest: Leaf
    """Largest weight of one sample, a scalar."""


@struct
class NoiseState:
    """The noise statistics of a training run: arrays only, so they can be saved in a checkpoint.

    While `current` has too few samples to be trusted, `held` keeps the last trusted averages. This happens in
    two cases. `current` may have started over, to stay fresh or because unbiased samples followed differenced
    ones. Or the batch has grown, and the few samples since then outweigh all earlier ones.
    """

    current: Averages
    """Averages of all samples."""
    held: Averages
    """Last trusted averages."""
    biased: Leaf
    """Whether the latest sample was a differenced one, a bool."""


@struct
class MeasuredGroups(Generic[Number]):
    """What was measured of the groups, without any caution: arrays; on the host, numpy values."""

    sqr: Any
    """Average of the estimated signals, `[groups]`; it may be negative."""
    sqr_error: Any
    """Standard error of each of these averages, `[groups]`."""
    var_error: Number
    """Standard error of the noise of all groups together, as a share of it; a scalar."""


def init_noise(num_groups: int = 1) -> NoiseState:
    """Return statistics without samples, which `grad_params` reads as sqr 1 and var 0, as in AdaptDL."""
    if num_groups < 1:
        raise ValueError(
            f"num_groups must be at least 1, got {num_groups}: a model without labels is one group."
        )

    def blank() -> Averages:  # called twice, because a donated state must not share buffers
        return Averages(
            sqr=_with_total(jnp.ones(num_groups)),
            var=jnp.zeros(num_groups + 1),
            sqr_deviation=jnp.zeros(num_groups + 1),
            var_deviation=jnp.zeros(num_groups + 1),
            weight=jnp.zeros(()),
            heaviest=jnp.zeros(()),
        )

    return NoiseState(current=blank(), held=blank(), biased=jnp.zeros((), bool))


def update_noise(
    state: NoiseState,
    sample: NoiseSample,
    *,
    base_batch_size: int,
    smoothing: float = 0.999,
    biased: Any = False,
    overlapping: bool = False,
    outlier: float = _OUTLIER,
    elapsed: Any = None,
    start_over: Any = False,
    min_samples: float = MIN_SAMPLES,
) -> NoiseState:
    """Return the statistics after one more sample.

    An average keeps `smoothing ** elapsed` of itself, bias-corrected, as in AdaptDL. `elapsed` is the number
    of base batches since the sample before (default: the batch of this sample). A single sample never gets
    more than 1/16 of the weight (at 0.999: beyond 64 base batches).

    If `start_over` is true, a new average begins, and the old one is held until there are `min_samples` new
    samples, provided that it had as many. The first unbiased sample after differenced ones (`biased`) starts
    over, too; the reverse does not. Both flags may be traced. `overlapping` says that successive differenced
    samples share a gradient; each of them then counts for half.

    A sample that is not finite, or has fewer than two groups, changes nothing. A sample that is off by more
    than `outlier` standard deviations is clipped to that distance.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"smoothing must be in [0, 1), got {smoothing}: it is the share of the old average "
            "kept per base batch; 0.999 remembers about 1000 base batches."
        )
    if sample.small_sqr.shape != (state.current.sqr.size - 1,):
        raise ValueError(
            f"the noise sample has {sample.small_sqr.size} groups, the statistics have "
            f"{state.current.sqr.size - 1}. Pool the sample's leaves into the same groups."
        )
    dtype = state.current.sqr.dtype
    small, large = sample.small_sqr.astype(dtype), sample.large_sqr.astype(dtype)
    groups = jnp.asarray(sample.num_groups, dtype)
    samples = jnp.asarray(sample.num_samples, dtype)
    biased = jnp.asarray(biased, bool)
    # The unbiased pair; a sample of a single group is invalid, and only must not divide by zero.
    spare = jnp.maximum(groups - 1, 1)
    sqr = _with_total((groups * large - small) / spare)
    var = _with_total((small - large) / spare * (samples / base_batch_size))
    valid = (groups >= 2) & (samples > 0) & jnp.all(jnp.isfinite(sqr) & jnp.isfinite(var))

    # 1 - smoothing ** scale, without cancellation in float32.
    forget_rate = math.log(smoothing) if smoothing > 0 else -math.inf
    forget = jnp.minimum(-jnp.expm1(forget_rate * samples / base_batch_size), _MAX_FORGET)
    # Unmeasured batches age the old samples, but give the new one no additional weight.
    fade = forget
    if elapsed is not None:
        fade = jnp.minimum(-jnp.expm1(forget_rate * jnp.asarray(elapsed, dtype)), _MAX_FORGET)
    old, enough = state.current, max(min_samples, MIN_SAMPLES)
    start_over = (state.biased & ~biased) | (
        jnp.asarray(start_over, bool) & (_count(old) >= enough)
    )
    kept = jnp.where(start_over, 0, (1 - fade) * old.weight)
    weight = kept + forget
    share = forget / weight  # 1 for a first sample, which replaces the average
    # Samples that share a gradient with their neighbours count for half a sample each.
    heaviest = jnp.where(start_over, 0, (1 - fade) * old.heaviest)
    heaviest = jnp.maximum(heaviest, forget * (2 if overlapping else 1))

    # A spike can be recognised only once there are enough samples for a standard deviation.
    reach = jnp.where(~start_over & (_count(old) >= MIN_SAMPLES), outlier, jnp.inf)
    sqr_mean, sqr_deviation = _average(old.sqr, old.sqr_deviation, sqr, share, reach)
    var_mean, var_deviation = _average(old.var, old.var_deviation, var, share, reach)
    current = Averages(
        sqr=sqr_mean,
        var=var_mean,
        sqr_deviation=sqr_deviation,
        var_deviation=var_deviation,
        weight=weight,
        heaviest=heaviest,
    )
    held = _select(_count(old) >= enough, old, state.held)
    return _select(valid, NoiseState(current=current, held=held, biased=biased), state)


def grad_params(state: NoiseState, *, per_group: bool = False) -> GradParams:
    """Return plain moments as AdaptDL does: sqr clipped at 0 and var at 1e-6 per group, then summed.

    Scalars, or `[groups]` with `per_group`. They are never unknown, even after a single sample; for decisions
    use `cautious_grad_params`.
    """
    sqr = jnp.maximum(state.current.sqr[:-1], 0)
    var = jnp.maximum(state.current.var[:-1], _MIN_VAR)
    return GradParams(sqr=sqr, var=var) if per_group else GradParams(sqr=sqr.sum(), var=var.sum())


def confidence(state: NoiseState) -> Scalar:
    """Return the effective number of samples in the statistics: 1 / the largest share of one sample.

    Samples from overlapping pairs count for half. At a constant scale it grows to about
    1 / (1 - smoothing ** scale).
    """
    return _count(_trusted(state, MIN_SAMPLES))


def newest_confidence(state: NoiseState) -> Scalar:
    """Return the effective number of samples in the newest averages, even if older ones are still trusted."""
    return _count(state.current)


def cautious_grad_params(
    state: NoiseState,
    num_std_errors: float = 1.0,
    *,
    min_samples: float = MIN_SAMPLES,
    per_group: bool = False,
) -> GradParams:
    """Return moments for decisions: sqr raised and var lowered by standard errors.

    Chance then never overstates the noise. With one standard error, no single sample makes the noise scale
    larger than the plain average of the other samples would. (A sample with share f at distance d moves the
    average by f d and its standard error by as much.) So a single negative or extreme estimate cannot send
    the batch to its maximum.

    Scalars, or `[groups]` with `per_group`. Not `known` with fewer than `min_samples`. With
    `num_std_errors=0, min_samples=0` they are the plain averages.
    """
    averages = _trusted(state, min_samples)
    count = _count(averages)
    # The margin covers rounding errors if one sample is many orders of magnitude above the others.
    step = num_std_errors * (1 + 1e-4) / _root(count)
    sqr = jnp.maximum(averages.sqr[:-1], 0)
    sqr = jnp.append(sqr, sqr.sum()) + step * averages.sqr_deviation
    var = jnp.maximum(averages.var - step * averages.var_deviation, 0)
    known = jnp.broadcast_to((count > 0) & (count >= min_samples), sqr.shape)
    sqr, var = jnp.where(known, sqr, 0), jnp.where(known, var, 0)
    one = slice(-1) if per_group else -1
    return GradParams(sqr=sqr[one], var=var[one], known=known[one])


def expected_groups(
    state: NoiseState, num_std_errors: float = 1.0, *, min_samples: float = MIN_SAMPLES
) -> GradGroups:
    """Return the moments of every group for decisions; `known` as in `cautious_grad_params`.

    The signal of a group may matter long before it stands out from its error. Embedding tables, which are
    nearly all noise, may hold most of what is left to learn; biases hold little. So the signal returned is
    what is expected of it (`_expected_signals`). If it is well above its error, that is the measured signal.
    `num_std_errors` is a factor on the standard errors; with 0 the signal is the measured one, or 0 below it.
    """
    averages = _trusted(state, min_samples)
    count = _count(averages)
    error = num_std_errors * averages.sqr_deviation[:-1] / _root(count)
    measured, var = averages.sqr[:-1], jnp.maximum(averages.var[:-1], 0)
    total = jnp.sum(var)
    unit = jnp.where(total > 0, total, 1)
    signal = unit * _expected_signals(measured / unit, error / unit, var / unit)
    signal = jnp.where((error > 0) & (total > 0), signal, jnp.maximum(measured, 0))
    known = (count > 0) & (count >= min_samples)
    return GradGroups(sqr=jnp.where(known, signal, 0), var=jnp.where(known, var, 0), known=known)


def _expected_signals(measured: Array, error: Array, noise: Array) -> Array:
    """Return the mean of each group's signal given all that was measured, `[groups]`.

    `measured` has normal errors, of standard deviation `error`. Beforehand, the ratio of signal to `noise`
    has a level that all groups share, of which only the range is known (`LEVELS`), and differs from it in
    each group by a random factor (`GROUP_SPREAD`). So a group that was measured well says something about
    others.
    """
    # Without noise or error nothing was measured, as of an unused parameter: it tells nothing of others.
    is_measured = (noise > 0) & (error > 0)
    noise = jnp.maximum(noise, 1e-12)  # a group without noise would have an infinite ratio
    error = jnp.maximum(error, 1e-4 * jnp.maximum(jnp.abs(measured), noise * LEVELS[0]))
    least = jnp.maximum(measured - 3.5 * error, noise * (LEVELS[0] / 30))
    most = jnp.maximum(jnp.maximum(measured, 0) + 4 * error, 1.01 * least)
    # Candidates for every group's signal, [groups, signals]: logarithmic below its error, linear above.
    low, high = (x / error + jnp.log(-jnp.expm1(-x / error)) for x in (least, most))
    parts = jnp.asarray(np.linspace(0, 1, NUM_SIGNALS), error.dtype)[None, :]
    bent = low[:, None] + (high - low)[:, None] * parts
    ratios = jax.nn.softplus(bent)  # to the error
    logs = jnp.log(ratios) + jnp.log(error)[:, None]
    # The density of the candidates' logarithms, and the likelihood of what was measured.
    agreement = jax.nn.log_sigmoid(bent) - jnp.log(ratios)
    agreement -= 0.5 * jnp.square(ratios - (measured / error)[:, None])
    levels = jnp.asarray(np.log(np.geomspace(*LEVELS, NUM_LEVELS)), error.dtype)
    apart = (logs - jnp.log(noise)[:, None])[None] - levels[:, None, None]
    likely = agreement[None] - 0.5 * jnp.square(apart / GROUP_SPREAD)  # [levels, groups, signals]
    best = jnp.max(likely, axis=-1, keepdims=True)
    chance = jnp.exp(likely - best)
    total = jnp.sum(chance, axis=-1)
    evidence = jnp.where(is_measured[None], jnp.log(total) + best[..., 0], 0)
    of_level = jax.nn.softmax(jnp.sum(evidence, axis=-1))
    mean = jnp.sum(chance * ratios[None], axis=-1) / total
    return error * jnp.sum(of_level[:, None] * mean, axis=0)


def measured_groups(
    state: NoiseState, *, min_samples: float = MIN_SAMPLES
) -> MeasuredGroups[Array]:
    """Return the signal of every group as measured, with its standard error: what an interval rests on."""
    averages = _trusted(state, min_samples)
    root = _root(_count(averages))
    var, error = averages.var[-1], averages.var_deviation[-1] / root
    return MeasuredGroups(
        sqr=averages.sqr[:-1],
        sqr_error=averages.sqr_deviation[:-1] / root,
        var_error=jnp.where(var > 0, error / jnp.where(var > 0, var, 1), 0),
    )


def taken_for(grad: GradGroups, like: Averages) -> Averages:
    """Return made-up averages that `expected_groups` reads as `grad`, with barely enough samples to count."""
    values = Averages(
        sqr=np.append(grad.sqr, np.sum(grad.sqr)),
        var=np.append(grad.var, np.sum(grad.var)),
        sqr_deviation=np.zeros(like.sqr.shape),
        var_deviation=np.zeros(like.sqr.shape),
        weight=np.ones(()),
        heaviest=np.array(1 / MIN_SAMPLES),
    )
    return jax.tree.map(lambda x, old: x.astype(old.dtype), values, like)


def joined(states: Sequence[NoiseState], factors: Sequence[Any], old: NoiseState) -> NoiseState:
    """Return the statistics of several sets of groups as one, each with its moments times a factor.

    They count as many samples as the set with the fewest, and so are known once all of them are. Until then
    the averages that `old` holds stay.
    """
    current = _joined([state.current for state in states], factors)
    trusted = _joined([_trusted(state, MIN_SAMPLES) for state in states], factors)
    held = _select(_count(trusted) >= MIN_SAMPLES, trusted, old.held)
    biased = jnp.any(jnp.stack([state.biased for state in states]))
    return NoiseState(current=current, held=held, biased=biased)


def _joined(averages: Sequence[Averages], factors: Sequence[Any]) -> Averages:
    counts = [_count(one) for one in averages]
    least = jnp.min(jnp.stack(counts))
    # A standard error is a deviation over the root of the count, of which there is one for all.
    pairs = list(zip(averages, factors, strict=True))
    spreads = [factor * _root(least) / _root(n) for factor, n in zip(factors, counts, strict=True)]

    def together(name: str) -> Array:
        return _with_total(jnp.concatenate([f * getattr(one, name)[:-1] for one, f in pairs]))

    def deviation(name: str) -> Array:
        values = [f * getattr(one, name) for one, f in zip(averages, spreads, strict=True)]
        total = jnp.sqrt(jnp.sum(jnp.stack([jnp.square(x[-1]) for x in values])))
        return jnp.append(jnp.concatenate([x[:-1] for x in values]), total)

    return Averages(
        sqr=together("sqr"),
        var=together("var"),
        sqr_deviation=deviation("sqr_deviation"),
        var_deviation=deviation("var_deviation"),
        weight=jnp.ones_like(least),
        heaviest=jnp.where(least > 0, 1 / jnp.maximum(least, 1), 0),
    )


def num_seen(state: NoiseState) -> Scalar:
    """Return how many groups have a signal above its own standard error; 0 while that is unknown."""
    averages = _trusted(state, MIN_SAMPLES)
    count = _count(averages)
    error = averages.sqr_deviation / _root(count)
    seen = jnp.sum((averages.sqr > error)[:-1].astype(error.dtype))
    return jnp.where(count >= MIN_SAMPLES, seen, 0)


def label_names(labels: Labels, tree: PyTree) -> tuple[str, ...]:
    """Return the distinct labels in the order of `[labels]` arrays, sorted; ("all",) without labels."""
    if labels is None:
        return ("all",)
    return tuple(sorted(set(jax.tree.leaves(labels(tree) if callable(labels) else labels))))


def label_indices(labels: Labels, tree: PyTree) -> PyTree:
    """Return a tree like `tree` with the index of each leaf's label, a Python int.

    `labels` is a tree of strings, a prefix of `tree`, or a function that makes one, as in
    `optax.multi_transform`.
    """
    if labels is None:
        return jax.tree.map(lambda _: 0, tree)
    index = {name: i for i, name in enumerate(label_names(labels, tree))}
    given = labels(tree) if callable(labels) else labels
    return jax.tree.map(lambda label, part: jax.tree.map(lambda _: index[label], part), given, tree)


def leaf_groups(tree: PyTree) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of the groups of parameters with their own efficiency, and the group of every leaf.

    Each leaf is a group of its own, up to 64 leaves. If there are more, leaves whose paths differ only in
    numbers are pooled ("layers_*/kernel"). If that leaves too many, the smallest are pooled as "others".
    """
    paths, sizes = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        paths.append(jax.tree_util.keystr(path, simple=True, separator="/") or "all")
        sizes.append(math.prod(leaf.shape))
    if len(paths) > MAX_GROUPS:
        paths = [re.sub(r"\d+", "*", path) for path in paths]
    totals = dict.fromkeys(paths, 0)
    for path, size in zip(paths, sizes, strict=True):
        totals[path] += size
    if len(totals) > MAX_GROUPS:
        largest = sorted(totals, key=lambda name: -totals[name])[: MAX_GROUPS - 1]
        paths = [path if path in largest else "others" for path in paths]
    names = tuple(dict.fromkeys(paths))
    return names, tuple(names.index(path) for path in paths)


def squared_norms(tree: PyTree, preconditioner: PyTree | None = None) -> Float[Array, " leaves"]:
    """Return the squared 2-norm of every leaf; of P^(1/2) g if a `preconditioner` P is given."""
    return _inner_products([(tree, tree)], preconditioner, one_pass=True)[0]


def moment_norms(preconditioner: PyTree) -> Float[Array, " leaves"]:
    """Return v' P of every leaf for a second moment v whose root divides gradients, so that v P = 1 / P."""
    leaves = jax.tree.leaves(preconditioner)
    return jnp.stack([jnp.sum(jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)) for x in leaves])


def products_of_two(
    x: PyTree, y: PyTree, preconditioner: PyTree | None = None, *, cut: bool = False
) -> tuple[Float[Array, " leaves"], Float[Array, " leaves"], Float[Array, " leaves"]]:
    """Return x' P x, x' P y and y' P y of every leaf; `cut`: leaves are partitioned over devices."""
    first, both, second = _inner_products(
        [(x, x), (x, y), (y, y)], preconditioner, one_pass=not cut
    )
    return first, both, second


def _inner_products(
    pairs: Sequence[tuple[PyTree, PyTree]], preconditioner: PyTree | None, *, one_pass: bool
) -> list[Float[Array, " leaves"]]:
    """Return the inner products x' P y of every leaf, for each pair of trees.

    `one_pass` makes a single pass over memory. Separate sums would write products to memory or compute them
    again, which takes a third of a small language model's step. Do not use it if leaves are partitioned: the
    compiler cannot partition such a joint sum, and would gather them.
    """
    num_leaves = len(jax.tree.leaves(pairs[0][0]))
    scales = [None] * num_leaves if preconditioner is None else jax.tree.leaves(preconditioner)
    sums: list[list[Array]] = [[] for _ in pairs]
    leaves = zip(*(zip(*map(jax.tree.leaves, pair), strict=True) for pair in pairs), strict=True)
    for scale, both in zip(scales, leaves, strict=True):
        # A leaf that appears in two pairs is converted once.
        real = {id(x): _real(x) for pair in both for x in pair}
        products = [real[id(x)] * real[id(y)] for x, y in both]
        if scale is not None:
            products = [x * (scale if x.ndim == scale.ndim else scale[..., None]) for x in products]
        for total, value in zip(sums, _sums(tuple(products), one_pass=one_pass), strict=True):
            total.append(value)
    return [jnp.stack(total) for total in sums]


def _sums(arrays: tuple[Array, ...], *, one_pass: bool) -> list[Array]:
    """Return the sum of all elements of each array; the arrays have one shape. See `_inner_products`."""
    if one_pass and len(arrays) > 1 and arrays[0].ndim:
        # Along the last axis only, because one running sum over millions of elements would lose digits.
        zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
        arrays = tuple(jax.lax.reduce(arrays, zeros, added, (arrays[0].ndim - 1,)))
    # vdot would flatten the arrays, for which a sharded leaf would be gathered.
    return [jnp.sum(x) for x in arrays]


def added(xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the sums of two tuples, element by element; for `jax.lax.reduce`."""
    return tuple(x + y for x, y in zip(xs, ys, strict=True))


def _real(x: Array) -> Array:
    """Return the array in float32 or wider, with complex numbers as two real parts on a last axis."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    return x.astype(wide_dtype(x.dtype))


def differenced_sample(
    grads: PyTree,
    previous_grads: PyTree,
    num_samples: Any,
    preconditioner: PyTree | None = None,
    *,
    previous_num_samples: Any = None,
    weight: Any = 1.0,
    previous_weight: Any = 1.0,
    cut: bool = False,
) -> NoiseSample:
    """Return a noise sample from two successive gradients, for one replica with one micro-batch.

    `num_samples` and `previous_num_samples` (default: the same) are the batch sizes of the two gradients. If
    the latter is 0, nothing was remembered, and `update_noise` ignores the sample. Both trees are divided by
    their `weight`, so you can pass sums of gradients. The movement of the parameters in between makes the
    estimate biased: pass `biased=True` with it. `cut` says that leaves are partitioned over devices.
    """
    dtype = jnp.zeros(()).dtype
    now = jnp.asarray(num_samples, dtype)
    before = now if previous_num_samples is None else jnp.asarray(previous_num_samples, dtype)
    share = now / jnp.maximum(now + before, 1)
    # Computed from inner products, so that no tree of means is written to memory.
    pairs = [(grads, grads), (previous_grads, previous_grads), (grads, previous_grads)]
    new, old, both = _inner_products(pairs, preconditioner, one_pass=not cut)
    new, old = new / weight**2, old / previous_weight**2
    both = both / (weight * previous_weight)
    return NoiseSample(
        small_sqr=share * new + (1 - share) * old,
        large_sqr=share**2 * new + (1 - share) ** 2 * old + 2 * share * (1 - share) * both,
        num_groups=(now > 0).astype(dtype) + (before > 0).astype(dtype),
        num_samples=now + before,
    )


def value_grad_and_noise(
    loss_fn: Callable[..., Any],
    *,
    num_groups: int,
    has_aux: bool = False,
) -> Callable[..., tuple[tuple[Array, Any], PyTree, NoiseSample]]:
    """Make a `jax.value_and_grad` that also measures gradient noise, for a loss that is a batch mean.

    Returns `f(params, batch, key=None, *, preconditioner=None) -> ((loss, aux), grads, NoiseSample)`.
    `loss_fn(params, batch)` returns the mean loss, or (loss, aux) with `has_aux`; aux is then stacked, one
    row per group. If f gets a key, it calls `loss_fn(params, batch, key)` with another key for each group.
    The batch is split along axis 0 into `num_groups` interleaved groups, so that a sharded batch need not
    move.

    Raises ValueError if the batch cannot be split into at least two equal groups.
    """
    if num_groups < 2:
        raise ValueError(
            f"num_groups={num_groups}, but at least 2 are needed: noise is the disagreement between "
            "groups. If only one gradient per step fits, use differenced_sample."
        )

    def measured(
        params: PyTree,
        batch: PyTree,
        key: Any = None,
        *,
        preconditioner: PyTree | None = None,
    ) -> tuple[tuple[Array, Any], PyTree, NoiseSample]:
        sizes = {x.shape[0] if jnp.ndim(x) else 0 for x in jax.tree.leaves(batch)}
        if len(sizes) != 1 or 0 in sizes or max(sizes) % num_groups:
            raise ValueError(
                f"a batch whose leaves have {sorted(sizes)} samples along axis 0 cannot be split "
                f"into {num_groups} equal groups. Every leaf needs the same number of samples, a "
                "multiple of num_groups."
            )
        (global_batch_size,) = sizes
        losses, auxes, grads, small = [], [], None, 0.0
        # Unrolled, because the gradient of a convolution inside scan is 20-40 times slower on CPU.
        for i in range(num_groups):
            group = jax.tree.map(
                lambda x, i=i: x.reshape(-1, num_groups, *x.shape[1:])[:, i],
                batch,
            )
            keys = () if key is None else (jax.random.fold_in(key, i),)
            value, grad = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, group, *keys)
            loss, aux = value if has_aux else (value, None)
            losses.append(loss)
            auxes.append(aux)
            small = small + squared_norms(grad, preconditioner)
            grads = grad if grads is None else jax.tree.map(jnp.add, grads, grad)
        grads = jax.tree.map(lambda g: g / num_groups, grads)
        sample = NoiseSample(
            small_sqr=jnp.asarray(small) / num_groups,
            large_sqr=squared_norms(grads, preconditioner),
            num_groups=jnp.asarray(num_groups),
            num_samples=jnp.asarray(global_batch_size),
        )
        aux = jax.tree.map(lambda *rows: jnp.stack(rows), *auxes) if has_aux else None
        return (jnp.stack(losses).mean(), aux), grads, sample

    return measured


def _with_total(per_group: Array) -> Array:
    return jnp.append(per_group, per_group.sum())


def _average(
    mean: Array, deviation: Array, x: Array, share: Array, reach: Array
) -> tuple[Array, Array]:
    """Return weighted mean and standard deviation after `x` joins with `share` of the weight (West 1979).

    The deviation is stored as a root, because squares of squared norms leave the range of float32. A sample
    is clipped to `reach` deviations, so that a spike is soon forgotten. A lasting change still gets through,
    because the deviation grows with every clipped sample.
    """
    reach = jnp.where(deviation > 0, reach * deviation, jnp.inf)
    x = jnp.clip(x, mean - reach, mean + reach)
    spread = jnp.hypot(deviation, jnp.sqrt(share) * (x - mean))
    return (1 - share) * mean + share * x, jnp.sqrt(1 - share) * spread


def _count(averages: Averages) -> Array:
    heaviest = averages.heaviest
    return jnp.where(heaviest > 0, averages.weight / jnp.where(heaviest > 0, heaviest, 1), 0)


def _root(count: Array) -> Array:
    """Return sqrt(count - 1), which turns a standard deviation into the standard error of a mean."""
    return jnp.sqrt(jnp.maximum(count - 1, 1e-6))


def _trusted(state: NoiseState, min_samples: float) -> Averages:
    """Return the current averages; the held, older ones if only they have `min_samples`."""
    use_held = (_count(state.current) < min_samples) & (_count(state.held) >= min_samples)
    return _select(use_held, state.held, state.current)


def _select(condition: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
