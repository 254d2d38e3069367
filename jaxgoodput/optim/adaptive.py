"""`adaptive(tx, rule)`: any optax optimizer, made ready for a batch size that changes in training.

The user's transformation runs unchanged. What is added: gradient-noise statistics, progress in base
steps (which drives the user's schedules instead of the update count), and a learning-rate factor
that multiplies the updates that come out.

    tx = adaptive(optax.adamw(schedule), rules.adam_scale, base_batch_size=64)
    updates, state = tx.update(grads, state, params, global_batch_size=512, noise=sample)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import PackedTree, struct
from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.optim import memory
from jaxgoodput.optim import noise as noises
from jaxgoodput.optim.learning_rate import Rule, adascale
from jaxgoodput.optim.noise import Labels, NoiseSample, NoiseState

Number = TypeVar("Number")
# What schedules are called with: see `adaptive`.
ScheduleClock = Literal["progress", "samples"]


@struct
class Adaptation:
    """What `adaptive` knows and remembers: arrays, or Python's numbers and numpy's arrays on the host."""

    noise: NoiseState
    """By label: what the learning rate goes by where there are labels."""
    groups: NoiseState
    """By `noise.leaf_groups`: what a sample of another batch is worth; and, without labels, the rate."""
    progress: Any
    """Base steps done; float."""
    progress_rest: Any
    """What rounding left out of `progress` (Kahan), for runs of millions of steps."""
    gain: Any
    """[labels] the factor that the latest update was multiplied by."""
    second_moment: Any
    """[labels] the optimizer's second moment over what base batches would have made of it."""
    moment_weight: Any
    """What Adam's bias correction divides by: 1 - b2 to the power of the updates."""
    base_batches: Any
    """Samples gone by over the base batch size, those of skipped batches too; float."""
    base_batches_rest: Any
    """What rounding left out of `base_batches`."""
    unmeasured: Any
    """Base batches since the noise was measured."""


class AdaptiveState(NamedTuple):
    """The state of `adaptive`, checkpointed like any optax state. `find` reads it."""

    inner: Any
    """The user's optimizer."""
    own: Any
    """All of ours, a `Packed[Adaptation]`: one array."""


def adaptive(
    tx: optax.GradientTransformation,
    rule: Rule,
    *,
    base_batch_size: int,
    smoothing: float = 0.999,
    labels: Labels = None,
    max_gain_growth: float = 1 / 0.9,
    num_std_errors: float = 1.0,
    min_samples: float = noises.MIN_SAMPLES,
    schedules: ScheduleClock = "progress",
    second_moment_decay: float | None = None,
    long_averages: memory.Decays = (),
    keeps_fresh: bool = True,
    shrinks: bool = True,
    seen: Callable[[PyTree], PyTree] = lambda tree: tree,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer `tx`, tuned at `base_batch_size`, for batches of any size.

    Its update is `update(grads, state, params, *, global_batch_size, noise=None, biased=False,
    finite=None, **extra)`:

    * `global_batch_size`: samples behind `grads`, a number or a traced scalar; free to differ.
    * `noise`: a `NoiseSample` of this batch, of every leaf of `seen(grads)`, or None to keep the
      statistics; `biased` marks a differenced sample.
    * `finite`: a bool scalar; where False, the updates are zero and the state stays, but for the samples
      gone by.
    * `extra` goes to `tx` where it takes extra arguments.

    The updates are multiplied, per label group, by `rule(scale, grad, progress)`, so momentum,
    clipping and weight decay of `tx` see the plain averaged gradient (and an average of parameters, which
    `tx` should not keep, sees updates that are too small by the factor). The factor starts at 1 and
    grows at most `max_gain_growth`-fold per update (beyond 1): momentum remembers about ten smaller
    steps, and a sudden jump would act on all of them. It falls at once. At the base batch every
    noise-driven factor is exactly 1, but for what a second moment of larger batches leaves to make up.

    `grad` are cautious moments (`noise.cautious_groups`): unknown below `min_samples`, and off by
    `num_std_errors` to the safe side. They are those of one group that is worth as much as all the
    groups of parameters at this scale; with `labels`, the pooled ones of the label, where
    `num_std_errors=0, min_samples=0, max_gain_growth=inf, keeps_fresh=False` is AdaptDL. Where the averages
    behind them are to keep fresh, they forget by `smoothing` per base batch, measured or not, and start over
    whenever the base batches gone by have doubled, as long as `smoothing` remembers more: the signal of a
    run's beginning may be a thousand times that of later, and would stay in an average for long.

    `second_moment_decay`, under `rules.adam_scale`: Adam's b2, or 1 for Adagrad, which keeps a sum.
    The root of the gain is enough only once the second moment has shrunk to that of the larger batch,
    by the gain; until then an update is too small by the root of what is missing, which is thus
    multiplied on. (Moments that do not move are a preconditioner, for which AdaScale's factor, the
    gain itself, is right. A sum grows by the gain less per update, and there are fewer by the gain:
    in the long run its factor is 1.)

    `long_averages` (`probe.long_averages`) are what averages in the state of `tx` keep of themselves in an
    update: they then forget by progress (`memory`). Without, they forget by updates.

    Progress grows by what the batch is worth in base batches (`GradGroups`), whatever the rule, less
    what `max_gain_growth` holds back.
    Schedules in `tx` (states that are nothing but a `count`: `scale_by_schedule`,
    `inject_hyperparams`, scheduled weight decay) are set to floor(progress) before every update;
    counts that belong to the updates themselves (Adam's bias correction) are left alone. With
    `schedules="samples"` they are set to the samples gone by over the base batch size instead: for a
    run that ends after so many samples, whose progress would not have come to the schedule's end by
    then.

    Without `shrinks` a batch below the base keeps the learning rate of the base batch, as in a plain loop.

    `labels` is a tree of strings with the structure of params (or a prefix, or a function that
    makes one), as in `optax.multi_transform`; groups are in sorted order of their labels.
    """
    if not base_batch_size > 0:
        raise ValueError(
            f"base_batch_size must be positive, got {base_batch_size}: pass the global batch size "
            "that the learning rate was tuned for."
        )
    if not max_gain_growth > 1:
        raise ValueError(
            f"max_gain_growth must be above 1, got {max_gain_growth}: it is the largest factor by "
            "which the gain may grow per update; 1 / 0.9 suits a momentum of 0.9, inf is no limit."
        )
    if schedules not in ("progress", "samples"):
        raise ValueError(f"schedules must be 'progress' or 'samples', got {schedules!r}.")
    tx = optax.with_extra_args_support(tx)

    def init(params: PyTree) -> AdaptiveState:
        num_labels = len(noises.label_names(labels, params))
        own = Adaptation(
            noise=noises.init_noise(num_labels),
            groups=noises.init_noise(len(noises.leaf_groups(seen(params))[0])),
            progress=jnp.zeros(()),
            progress_rest=jnp.zeros(()),
            gain=jnp.ones(num_labels),
            second_moment=jnp.ones(num_labels),
            moment_weight=jnp.zeros(()),
            base_batches=jnp.zeros(()),
            base_batches_rest=jnp.zeros(()),
            unmeasured=jnp.zeros(()),
        )
        return AdaptiveState(inner=tx.init(params), own=PackedTree.of(own))

    def update(
        updates: PyTree,
        state: AdaptiveState,
        params: PyTree | None = None,
        *,
        global_batch_size: Any,
        noise: NoiseSample | None = None,
        biased: Any = False,
        finite: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, AdaptiveState]:
        own = state.own.tree
        scale = jnp.asarray(global_batch_size, own.progress.dtype) / base_batch_size
        label_of_leaf = noises.label_indices(labels, updates)
        statistics, by_group = own.noise, own.groups
        elapsed = own.unmeasured + scale
        unmeasured = elapsed
        if noise is not None:
            unmeasured = jnp.where(jnp.asarray(noise.num_groups) >= 2, 0, elapsed)
            start_over = jnp.zeros((), bool)
            if keeps_fresh and smoothing < 1:
                now = own.base_batches + scale
                then = now - elapsed
                doubled = jnp.floor(jnp.log2(now)) > jnp.floor(jnp.log2(jnp.maximum(then, 0.5)))
                start_over = doubled & (now < 4 / (1 - smoothing))
            # A differenced sample is of two batches.
            elapsed = jnp.maximum(elapsed, noise.num_samples / base_batch_size)
            names, group_of_leaf = noises.leaf_groups(seen(updates))

            def updated(old: NoiseState, sample: NoiseSample, **options: Any) -> NoiseState:
                return noises.update_noise(
                    old,
                    sample,
                    base_batch_size=base_batch_size,
                    smoothing=smoothing,
                    biased=biased,
                    elapsed=elapsed if keeps_fresh else None,
                    start_over=start_over,
                    min_samples=min_samples,
                    **options,
                )

            labels_seen = noises.label_indices(labels, seen(updates))
            pooled = noise.pooled(jax.tree.leaves(labels_seen), own.gain.size)
            statistics = updated(statistics, pooled)
            by_group = updated(
                by_group, noise.pooled(group_of_leaf, len(names)), outlier=noises.GROUP_OUTLIER
            )

        groups = noises.cautious_groups(by_group, num_std_errors, min_samples=min_samples)
        as_one = _as_one(groups, scale)
        worth = adascale(scale, as_one)  # 1 at most where that is unknown
        if labels is None:
            grad = jax.tree.map(lambda x: x[None], as_one)
        else:
            grad = noises.cautious_grad_params(
                statistics, num_std_errors, min_samples=min_samples, per_group=True
            )
        rated = scale if shrinks else jnp.maximum(scale, 1)
        over_labels = {"in_axes": (None, 0, None), "axis_size": own.gain.size}
        wanted = jax.vmap(rule, **over_labels)(rated, grad, own.progress)
        wanted = jnp.asarray(wanted, own.gain.dtype)
        second_moment, moment_weight = own.second_moment, own.moment_weight
        gains: Any = 1.0
        if second_moment_decay is not None:
            gains = jax.vmap(adascale, **over_labels)(rated, grad, own.progress)
            wanted = wanted * jnp.sqrt(gains * second_moment)
        # From 1 rather than from the last gain where that is smaller: a warm-up starts at 0.
        factors = jnp.minimum(wanted, jnp.maximum(own.gain, 1) * max_gain_growth)
        held_back = jnp.mean(jnp.where(wanted > 0, factors / wanted, 1))
        progressed = worth * held_back
        if second_moment_decay == 1:  # a sum over all updates; that of base batches has more
            summed = own.progress * second_moment + 1 / gains
            second_moment = summed / (own.progress + gains * held_back)
        elif second_moment_decay is not None:
            kept = second_moment_decay ** (progressed if long_averages else 1.0)
            new = 1 - kept
            moment_weight = kept * moment_weight + new
            second_moment += new / moment_weight * (1 / gains - second_moment)

        clocks = {
            "progress": (own.progress, own.progress_rest),
            "samples": (own.base_batches, own.base_batches_rest),
        }
        before = with_schedules_at(state.inner, _whole(*clocks[schedules]))
        scaled, inner = tx.update(updates, before, params, **extra)
        scaled = jax.tree.map(lambda u, i: (factors[i] * u).astype(u.dtype), scaled, label_of_leaf)

        done, rest = _add(own.progress, own.progress_rest, progressed)
        if long_averages:
            inner = memory.by_progress(
                before, inner, long_averages, own.progress + own.progress_rest, progressed
            )
        batches = _add(own.base_batches, own.base_batches_rest, scale)
        new = Adaptation(
            noise=statistics,
            groups=by_group,
            progress=done,
            progress_rest=rest,
            gain=factors,
            second_moment=second_moment,
            moment_weight=moment_weight,
            base_batches=batches[0],
            base_batches_rest=batches[1],
            unmeasured=unmeasured,
        )
        new = AdaptiveState(inner=inner, own=PackedTree.of(new))
        if finite is not None:
            finite = jnp.asarray(finite, bool)
            scaled = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), scaled)
            passed = passed_over(state, scale)
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, passed)
        return scaled, new

    extended: Any = update  # optax's type has no room for the required global_batch_size
    return optax.GradientTransformationExtraArgs(init, extended)


def find(opt_state: PyTree) -> Adaptation:
    """What the one `AdaptiveState` in an optimizer state, at any depth, holds beside the user's optimizer."""
    return _own(opt_state).tree


def _own(opt_state: PyTree) -> PackedTree[Adaptation]:
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, AdaptiveState))
    found = [x for x in leaves if isinstance(x, AdaptiveState)]
    if len(found) != 1:
        raise ValueError(
            f"the optimizer state holds {len(found)} AdaptiveStates, not one. Wrap the whole "
            "optimizer once: adaptive(tx, rule, base_batch_size=...), and pass the state that its "
            "init returned."
        )
    return found[0].own


def noise_state(opt_state: PyTree) -> NoiseState:
    """The gradient-noise statistics by label."""
    return find(opt_state).noise


def grad_groups(opt_state: PyTree) -> GradGroups:
    """The cautious moments by group of parameters: what decisions rest on."""
    return noises.cautious_groups(find(opt_state).groups)


def grad_params(opt_state: PyTree) -> GradParams:
    """Both gradient moments at the base batch size, plain averages over the run's recent past.

    For decisions take `grad_groups(opt_state)`.
    """
    return noises.grad_params(noise_state(opt_state))


def progress(opt_state: PyTree) -> Array:
    """Base steps done: the steps that the base batch size would have needed. A scalar."""
    state = find(opt_state)
    return state.progress + state.progress_rest


def progress_on_host(opt_state: PyTree) -> float:
    """Likewise, as a number."""
    state = _own(opt_state).host_tree
    return float(state.progress + state.progress_rest)


def progress_between(before: PyTree, after: PyTree) -> Array:
    """Base steps from one optimizer state to a later one, below the last digit of `progress` too."""
    old, new = find(before), find(after)
    return (new.progress - old.progress) + (new.progress_rest - old.progress_rest)


def gain(opt_state: PyTree) -> Array:
    """The factor that the latest update was multiplied by, `[labels]`: one for each group that has its own.

    Without labels there is one, `gain(opt_state)[0]`.
    """
    return find(opt_state).gain


def with_noise_held(opt_state: PyTree, grad: GradGroups) -> PyTree:
    """The optimizer state with these moments trusted until it has measured its own.

    Those by label, which learning rates of several labels go by, stay unknown.
    """

    def held(own: Adaptation) -> Adaptation:
        averages = noises.taken_for(grad, own.groups.held)
        return dataclasses.replace(own, groups=dataclasses.replace(own.groups, held=averages))

    # Values, which stay where they were.
    changed = with_own(opt_state, held)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), changed, opt_state)


def passed_over(opt_state: PyTree, base_batches: Array) -> PyTree:
    """The optimizer state after a batch, in base batches, that was left out: only its samples count."""

    def passed(own: Adaptation) -> Adaptation:
        done, rest = _add(own.base_batches, own.base_batches_rest, base_batches)
        unmeasured = own.unmeasured + base_batches
        return dataclasses.replace(
            own, base_batches=done, base_batches_rest=rest, unmeasured=unmeasured
        )

    return with_own(opt_state, passed)


def with_own(opt_state: PyTree, change: Callable[[Adaptation], Adaptation]) -> PyTree:
    """The optimizer state with another `Adaptation`."""

    def is_own(node: Any) -> bool:
        return isinstance(node, AdaptiveState)

    def changed(node: Any) -> Any:
        if not is_own(node):
            return node
        return node._replace(own=PackedTree.of(change(node.own.tree)))

    return jax.tree.map(changed, opt_state, is_leaf=is_own)


@struct
class NoiseReadout(Generic[Number]):
    """Gradient noise as a step reports it: arrays, or Python numbers and numpy arrays on the host."""

    sqr: Number
    """The squared norm of the gradient's mean: a plain average."""
    var: Number
    """The trace of its covariance at the base batch size: a plain average."""
    group_sqr: Any
    """[groups] the signal that decisions use; NaN = unknown."""
    group_var: Any
    """[groups] the noise that decisions use; NaN = unknown."""
    seen_groups: Number
    """Groups whose signal is above its own standard error."""
    num_samples: Number
    """How many samples stand behind the averages."""
    newest_samples: Number
    """How many stand behind the latest averages, while older ones are still the trusted ones."""

    @property
    def plain(self) -> GradParams:
        """The plain averages."""
        return GradParams(sqr=self.sqr, var=self.var)

    @property
    def cautious(self) -> GradGroups:
        """The moments for decisions."""
        return GradGroups(sqr=self.group_sqr, var=self.group_var)

    @property
    def is_known(self: "NoiseReadout[float]") -> bool:
        """Whether decisions can rest on it; on the host."""
        return not math.isnan(self.group_sqr[0])

    @property
    def is_lower_bound(self: "NoiseReadout[float]") -> bool:
        """Whether no signal is above its own standard error: the noise may then be any larger."""
        return self.seen_groups == 0


def readout(opt_state: PyTree) -> NoiseReadout[Array]:
    """The noise, as it is worth reporting."""
    state = find(opt_state).groups
    plain, cautious = grad_params(opt_state), noises.cautious_groups(state)
    return NoiseReadout(
        sqr=plain.sqr,
        var=plain.var,
        group_sqr=cautious.sqr,
        group_var=cautious.var,
        seen_groups=noises.num_seen(state),
        num_samples=noises.confidence(state),
        newest_samples=noises.newest_confidence(state),
    )


def _as_one(grad: GradGroups, scale: Array) -> GradParams:
    """The moments of one group that is worth as much at this scale; NaN where any is unknown.

    With shares s_i of the signal and noise scales n_i in base batches, 1 / (n + scale) is the mean
    sum_i s_i / (n_i + scale): exact, and without a singularity at the base.
    """
    signal = jnp.sum(grad.sqr)
    each = grad.var + scale * grad.sqr
    mean = jnp.sum(jnp.square(grad.sqr) / jnp.where(each == 0, 1, each))
    var = jnp.square(signal) / jnp.where(mean == 0, 1, mean) - scale * signal
    # `<=` and not its opposite: a NaN must stay a NaN.
    return GradParams(sqr=signal, var=jnp.where(mean <= 0, jnp.sum(grad.var), jnp.maximum(var, 0)))


def _is_schedule(node: Any) -> bool:
    # ScaleByScheduleState, WrappedScheduleState, WeightDecaySchedule, and a user's own: a state
    # that is nothing but a count exists to call a function of it.
    return getattr(type(node), "_fields", None) == ("count",)


def with_schedules_at(state: PyTree, count: Array) -> PyTree:
    """The optimizer state with the count of every schedule set to `count`."""

    def place(node: Any) -> Any:
        if not _is_schedule(node):
            return node
        return type(node)(count=count.astype(jnp.asarray(node.count).dtype))

    return jax.tree.map(place, state, is_leaf=_is_schedule)


def _add(total: Array, rest: Array, increment: Array) -> tuple[Array, Array]:
    """Kahan's sum: `total + rest` stays exact where `total` alone would drop small increments."""
    increment = increment.astype(total.dtype) + rest
    new = total + increment
    return new, increment - (new - total)


def _whole(total: Array, rest: Array) -> Array:
    """floor(total + rest) as an int32, exact where their sum is not a float."""
    floor = jnp.floor(total)
    return floor.astype(jnp.int32) + jnp.floor((total - floor) + rest).astype(jnp.int32)
