"""`adaptive(tx, rule)` prepares any optax optimizer for a batch size that changes during training.

    tx = adaptive(optax.adamw(schedule), rules.adam_scale, base_batch_size=64)
    updates, state = tx.update(grads, state, params, global_batch_size=512, noise=sample)

The user's optimizer runs unchanged. Three things are added: statistics of the gradient noise, progress in
base steps, and a factor (the gain) that multiplies the resulting updates, `rule(scale, grad, progress)` for
each label.

Momentum, clipping and weight decay in `tx` therefore see the plain averaged gradient. An average of the
parameters in `tx` would see updates without the factor, so it does not belong there. At the base batch every
rule that depends on noise gives a factor of exactly 1, apart from the correction for a second moment below.
The factor starts at 1. It grows by at most `max_gain_growth` per update, and may fall at once. Momentum
remembers about ten smaller steps, and a sudden jump would act on all of them. Also, a batch that is tried for
ten steps should hardly change the rate. `gain_growth.py` says when it grows more slowly, or falls.

The moments in `grad` are not `known` at first (`learning_rate.cautious`), and later what is expected of them
(`noise.expected_groups`); with labels they are off by some standard errors to the safe side.
Without labels they describe a single group that is worth as much, at this scale, as all groups of parameters
together. With labels they are the pooled moments of the label.

Under `rules.adam_scale`, the root of the gain is enough only once Adam's second moment has shrunk to the
second moment of the larger batch, which is smaller by the gain. Until then an update is too small by the root
of the ratio, so the factor is multiplied by it. How fast the moment shrinks depends on how large new squares
are beside it, which noise samples say: early in training it is full of larger gradients, which no batch
removes. (If the moments did not move, Adam would be a fixed
preconditioner, for which AdaScale's factor, the gain itself, is right. Adagrad's sum grows more slowly per
update by the gain, and there are fewer updates by the gain, so in the long run its factor is 1. How long that
takes is measured in the same way, unless Adam is used beside it: the more of the sum is from early gradients,
the longer. What is measured are gradients before any clipping.)

Progress grows by what the batch is worth in base batches (`GradGroups`), whatever the rule, reduced by the
share that `max_gain_growth` holds back. Before every update, schedules in `tx` are set to floor(progress).
`traced.clocks_of` finds their counts in `scale_by_schedule`, `inject_hyperparams`, scheduled weight decay,
and a user's own schedules. Counts that belong to the updates themselves, as in Adam's bias
correction, are left alone, and so are schedules that a wrapper advances in some updates only (`MultiSteps`).

Groups of parameters may have different optimizers: `LeafRules` gives each leaf its own rule. All rules get
the same moments. Norms of leaves under different optimizers have different units, g'g or g' P^-1 g. So they
are converted to expected decreases of the loss by an update, norm times step size, which can be added up.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import PackedTree, struct, wide_dtype
from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.optim import memory
from jaxgoodput.optim import noise as noises
from jaxgoodput.optim.adaptation import (
    Adaptation,
    AdaptiveState,
    Findings,
    NoiseReadout,
    added,
    passed_over,
    watched,
    whole,
)
from jaxgoodput.optim.learning_rate import LeafRules, Rule, adascale
from jaxgoodput.optim.learning_rate import cautious as cautious_moments
from jaxgoodput.optim.noise import Labels, NoiseSample, NoiseState
from jaxgoodput.optim.traced import (
    Clocks,
    UnsupportedOptimizer,
    clocks_of,
    traced_update,
    with_counts_at,
)

# The argument that schedules are called with: see `adaptive`.
ScheduleClock = Literal["progress", "samples"]


@struct
class UpdateDecision:
    """What an update is going to do, apart from the leaves: a few numbers."""

    own: PackedTree[Adaptation]
    """What `adaptive` adds to the state, after the update."""
    factors: Any
    """Factors of the update, `[factors]`."""
    count: Any
    """Argument that schedules are called with, int32."""
    done: Any
    """Base steps before the update."""
    progressed: Any
    """Base steps that the update is worth."""


GAIN_GROWTH = (
    1.05  # in a young run four times takes 28 updates; a trial of ten raises it by at most 1.6
)


class AdaptiveOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation whose `update` can be split in two: `decide`, and the rest, given `decided`.

    The decision does not depend on the values of gradients. Made outside of a branch, it is made once.
    """

    decide: Callable[..., UpdateDecision]
    """Function from gradients or their shapes, the state and the keyword arguments of `update` that concern
    the batch, to a `UpdateDecision`."""
    watched: Callable[[UpdateDecision, PyTree, Array, Array], PackedTree[Adaptation]]
    """Function from a decision, the user's optimizer's state after the update, the norm of the gradient and
    the scale of the batch, to what `adaptive` adds to the state after the update."""
    skipped: Callable[..., PyTree]
    """Function from the user's optimizer's state and the scale of a batch that is skipped, and what else
    `update` takes, to that state after it."""

    @classmethod
    def of(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        decide: Callable[..., UpdateDecision],
        watched: Callable[..., PackedTree[Adaptation]] | None = None,
        skipped: Callable[..., PyTree] | None = None,
    ) -> "AdaptiveOptimizer":
        """Make one of its functions. The default ones are for a single optimizer."""
        made = cls(init, update)
        made.decide = decide
        made.watched = watched or _watched
        made.skipped = skipped or (lambda inner, scale: inner)
        return made


def _watched(
    decided: UpdateDecision, inner: PyTree, grad_norm: Array, scale: Array
) -> PackedTree[Adaptation]:
    del inner
    return watched(decided.own, grad_norm, scale, decided.progressed)


def adaptive(
    tx: optax.GradientTransformation,
    rule: Rule | LeafRules,
    *,
    base_batch_size: int,
    smoothing: float = 0.999,
    labels: Labels = None,
    max_gain_growth: float = GAIN_GROWTH,
    num_std_errors: float = 1.0,
    min_samples: float = noises.MIN_SAMPLES,
    schedules: ScheduleClock = "progress",
    second_moment_decay: float | None = None,
    long_averages: memory.Decays = (),
    keeps_fresh: bool = True,
    shrinks: bool = True,
    seen: Callable[[PyTree], PyTree] = lambda tree: tree,
    clocks: Clocks | None = None,
) -> "AdaptiveOptimizer":
    """Wrap the optimizer `tx`, tuned at `base_batch_size`, so that the batch size may change in every update.

    The head of this module explains the method. Call `update(grads, state, params, *, global_batch_size,
    noise=None, biased=False, finite=None, **extra)`; see `_Adaptive.update`. The options:

    * `rule`: the factor of the updates, or `LeafRules`; `max_gain_growth` limits its growth, per update.
    * `labels`: a tree of strings with the structure of params (or a prefix, or a function that makes one), as
      in `optax.multi_transform`. Each label is a group with its own noise and factor, in sorted order.
    * `smoothing`: share of the noise averages kept per base batch, measured or not. With `keeps_fresh` they
      also start over whenever the base batches done have doubled, as long as `smoothing` remembers more: the
      signal may be a thousand times larger at first than later, and would distort an average for long.
    * `num_std_errors`, `min_samples`: of the moments that the rule gets; see `noise.expected_groups`.
    * `schedules`: "progress" calls schedules in `tx` with base steps. "samples" calls them with the samples
      done over the base batch size; use it if the run ends after a number of samples.
    * `second_moment_decay`, for `rules.adam_scale`: Adam's b2, or 1 for Adagrad, which keeps a sum. Not used
      with `LeafRules`, which have their own.
    * `long_averages` (`Probe.long_averages`): decays of the averages in the state of `tx` that are to forget
      by progress (`memory`) instead of by updates.
    * `shrinks`: whether a batch below the base lowers the learning rate; a plain loop would not.
    * `seen`: selects the part of a gradient tree that noise is measured on; leaves that no update changes
      should not be among them.
    * `clocks` (`traced.clocks_of`): counts of the schedules in the state of `tx`; None: find them.

    AdaptDL's behaviour is `num_std_errors=0, min_samples=0, max_gain_growth=inf, keeps_fresh=False`, with
    labels.
    """
    if not base_batch_size > 0:
        raise ValueError(
            f"base_batch_size must be positive, got {base_batch_size}: pass the global batch size "
            "that the learning rate was tuned for."
        )
    if not max_gain_growth > 1:
        raise ValueError(
            f"max_gain_growth must be above 1, got {max_gain_growth}: it is the largest factor by which the "
            f"gain may grow per update. {GAIN_GROWTH} is the default; inf means no limit."
        )
    if schedules not in ("progress", "samples"):
        raise ValueError(
            f"schedules must be 'progress' (base steps) or 'samples', got {schedules!r}."
        )
    if not isinstance(rule, LeafRules):
        rule = LeafRules(rules=(rule,), second_moment_decays=(second_moment_decay,))
    made = _Adaptive(
        tx=optax.with_extra_args_support(tx),
        rule=rule,
        base_batch_size=base_batch_size,
        smoothing=smoothing,
        labels=labels,
        max_gain_growth=max_gain_growth,
        num_std_errors=num_std_errors,
        min_samples=min_samples,
        schedules=schedules,
        long_averages=long_averages,
        keeps_fresh=keeps_fresh,
        shrinks=shrinks,
        seen=seen,
        clocks=clocks,
        found_clocks={},
    )
    return AdaptiveOptimizer.of(made.init, made.update, made.decide)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Adaptive:
    """The options of `adaptive`, and the two functions that it returns."""

    tx: optax.GradientTransformationExtraArgs
    rule: LeafRules
    base_batch_size: int
    smoothing: float
    labels: Labels
    max_gain_growth: float
    num_std_errors: float
    min_samples: float
    schedules: ScheduleClock
    long_averages: memory.Decays
    keeps_fresh: bool
    shrinks: bool
    seen: Callable[[PyTree], PyTree]
    clocks: Clocks | None
    found_clocks: dict[Any, Clocks]
    """Schedules found by `_clocks_in`, by the structure of the parameters."""

    def init(self, params: PyTree) -> AdaptiveState:
        """Return the `AdaptiveState` before the first update, with no noise measured."""
        num_labels = len(noises.label_names(self.labels, params))
        num_factors = len(self._factors_of(params)[0])
        noise = noises.init_noise(num_labels)
        groups = noises.init_noise(len(noises.leaf_groups(self.seen(params))[0]))
        own = Adaptation.first(
            noise,
            groups,
            self._findings(noise, groups),
            num_factors=num_factors,
            num_rules=len(self.rule.rules),
        )
        with jax.numpy_dtype_promotion("standard"):  # as in `update`
            inner = self.tx.init(params)
        return AdaptiveState(inner=inner, own=PackedTree.of(own))

    def update(
        self,
        updates: PyTree,
        state: AdaptiveState,
        params: PyTree | None = None,
        *,
        global_batch_size: Any,
        noise: NoiseSample | None = None,
        biased: Any = False,
        finite: Any = None,
        decided: UpdateDecision | None = None,
        **extra: Any,
    ) -> tuple[PyTree, AdaptiveState]:
        """Return the updates for averaged gradients, and the new state.

        * `global_batch_size`: number of samples averaged over, a number or a traced scalar.
        * `noise`: a `NoiseSample` of this batch with every leaf of `seen(grads)`; None keeps the statistics.
          `biased` marks a differenced sample.
        * `finite`: a bool scalar. If False, the updates are zero and the state stays, except that the samples
          are counted.
        * `decided`: what `decide` returned for the arguments before; None: ask it.
        * `extra`: passed to `tx` if it takes extra arguments.
        """
        if decided is None:
            about = {"global_batch_size": global_batch_size, "noise": noise, "biased": biased}
            decided = self.decide(updates, state, **about)
            norm = jnp.sqrt(sum(map(_squared, jax.tree.leaves(updates))))
            scale = self._scale(state.own.tree, global_batch_size)
            own = watched(decided.own, norm, scale, decided.progressed)
            decided = dataclasses.replace(decided, own=own)
        _, factor_of_leaf = self._factors_of(updates)
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # optax's adam and schedules fail under "strict"
            paths = self._clocks_in(updates, params, extra).steady
            before = with_counts_at(state.inner, paths, decided.count)
            scaled, inner = self.tx.update(updates, before, params, **extra)
            inner = jax.tree.map(_typed_as, inner, before)
        scaled = jax.tree.map(lambda u, i: _times(decided.factors[i], u), scaled, factor_of_leaf)
        if self.long_averages:
            inner = memory.by_progress(
                before, inner, self.long_averages, decided.done, decided.progressed
            )
        new = AdaptiveState(inner=inner, own=decided.own)
        if finite is not None:
            finite = jnp.asarray(finite, bool)
            scaled = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), scaled)
            passed = passed_over(state, self._scale(state.own.tree, global_batch_size))
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, passed)
        return scaled, new

    def decide(
        self,
        updates: PyTree,
        state: AdaptiveState,
        *,
        global_batch_size: Any,
        noise: NoiseSample | None = None,
        biased: Any = False,
        worth: Array | None = None,
    ) -> UpdateDecision:
        """Return what the update for such gradients does, apart from the leaves: see `update`.

        `worth` is what the batch is worth in base batches, if the noise of others counts as well.
        """
        own = state.own.tree
        scale = self._scale(own, global_batch_size)
        measured = self._measured(own, updates, scale, noise, biased)
        kinds, _ = self._factors_of(updates)
        factors, progressed, after = self._factors(measured, scale, kinds, worth)
        second_moment, moment_weight, new_squares = after
        clocks = {
            "progress": (own.progress, own.progress_rest),
            "samples": (own.base_batches, own.base_batches_rest),
        }
        progress, progress_rest = added(own.progress, own.progress_rest, progressed)
        base_batches, base_batches_rest = added(own.base_batches, own.base_batches_rest, scale)
        changed = dataclasses.replace(
            measured,
            progress=progress,
            progress_rest=progress_rest,
            gain=factors,
            second_moment=second_moment,
            moment_weight=moment_weight,
            new_squares=new_squares,
            base_batches=base_batches,
            base_batches_rest=base_batches_rest,
        )
        return UpdateDecision(
            own=state.own.replaced(own, changed),
            factors=factors,
            count=whole(*clocks[self.schedules]),
            done=own.progress + own.progress_rest,
            progressed=progressed,
        )

    def _scale(self, own: Adaptation, global_batch_size: Any) -> Array:
        """Return a batch size over the base batch size."""
        return jnp.asarray(global_batch_size, own.progress.dtype) / self.base_batch_size

    def _measured(
        self, own: Adaptation, updates: PyTree, scale: Array, noise: NoiseSample | None, biased: Any
    ) -> Adaptation:
        """Return `own` with the noise statistics after this batch."""
        elapsed = own.unmeasured + scale
        if noise is None:
            return dataclasses.replace(own, unmeasured=elapsed)
        unmeasured = jnp.where(jnp.asarray(noise.num_groups) >= 2, 0, elapsed)
        start_over = jnp.zeros((), bool)
        if self.keeps_fresh and self.smoothing < 1:
            # Start over when the base batches done pass a power of two, while there are fewer than the
            # averages remember anyway.
            now = own.base_batches + scale
            then = now - elapsed
            doubled = jnp.floor(jnp.log2(now)) > jnp.floor(jnp.log2(jnp.maximum(then, 0.5)))
            start_over = doubled & (now < 4 / (1 - self.smoothing))
        # A differenced sample covers two batches.
        elapsed = jnp.maximum(elapsed, noise.num_samples / self.base_batch_size)

        def updated(old: NoiseState, sample: NoiseSample, **options: Any) -> NoiseState:
            return noises.update_noise(
                old,
                sample,
                base_batch_size=self.base_batch_size,
                smoothing=self.smoothing,
                biased=biased,
                elapsed=elapsed if self.keeps_fresh else None,
                start_over=start_over,
                min_samples=self.min_samples,
                **options,
            )

        noise = self._in_units_of_loss(self._with_one_kind(noise, updates), updates)
        names, group_of_leaf = noises.leaf_groups(self.seen(updates))
        labels_seen = self.seen(noises.label_indices(self.labels, updates))
        by_label = noise.pooled(jax.tree.leaves(labels_seen), own.noise.current.sqr.size - 1)
        by_group = noise.pooled(group_of_leaf, len(names))
        of_labels = updated(own.noise, by_label)
        of_groups = updated(own.groups, by_group, outlier=noises.GROUP_OUTLIER)
        new_squares = own.new_squares
        if by_group.moment is not None:
            found = _relative_squares(by_group, self.base_batch_size)
            new_squares = jnp.where(found[1] > 0, found, new_squares)
        return dataclasses.replace(
            own,
            noise=of_labels,
            groups=of_groups,
            unmeasured=unmeasured,
            findings=self._findings(of_labels, of_groups),
            new_squares=new_squares,
        )

    def _findings(self, noise: NoiseState, groups: NoiseState) -> Findings:
        """Return what follows from the statistics by label and by group."""
        cautious = {"num_std_errors": self.num_std_errors, "min_samples": self.min_samples}
        by_label = None
        if self.labels is not None:
            by_label = noises.cautious_grad_params(noise, per_group=True, **cautious)
        trusted = noises.expected_groups(groups, **cautious)
        return Findings(readout=NoiseReadout.of(noise, groups), trusted=trusted, by_label=by_label)

    @property
    def _has_averages(self) -> bool:
        """Whether any second moment is an average, as Adam's; if not, all that are followed are sums."""
        return any(decay not in (None, 1) for decay in self.rule.second_moment_decays)

    def _with_one_kind(self, noise: NoiseSample, updates: PyTree) -> NoiseSample:
        """Return the sample with the second moments that are averages, if there are any, or else sums.

        Other leaves have 0: `new_squares` is for both kinds alike, and means different things for them.
        """
        if noise.moment is None:
            return noise
        leaves, structure = jax.tree.flatten(updates)
        decays = [self.rule.second_moment_decays[i] for i in self.rule.of_leaves(len(leaves))]
        # Rows of tables, which come last, are divided by optimizers of their own.
        num_own = len(self.rule.rule_of_leaf) or len(leaves)
        others = (None, 1) if self._has_averages else (None,)
        followed = [i < num_own and x not in others for i, x in enumerate(decays)]
        kept = jax.tree.leaves(self.seen(jax.tree.unflatten(structure, followed)))
        return dataclasses.replace(noise, moment=jnp.where(jnp.array(kept), noise.moment, 0))

    def _in_units_of_loss(self, noise: NoiseSample, updates: PyTree) -> NoiseSample:
        """Return the sample with norms times step sizes; unchanged if all norms have the same units.

        A leaf whose update is divided by the size of its gradient would have, at the base batch, the divisor
        that follows from both moments of the sample. Their sum is hardly noisy, other than each of them.
        Below the base batch the estimate of it may be negative. The true one is at least what pure noise
        makes of this batch's, and so is the one that is used. A gradient of 0 has no divisor: it is left out.
        """
        steps, structure = self.rule.step_sizes, jax.tree.structure(updates)
        if not steps:
            return noise
        num_others = structure.num_leaves - len(steps)

        def seen(values: tuple[Any, ...], default: Any) -> Array:
            tree = jax.tree.unflatten(structure, (*values, *(default,) * num_others))
            return jnp.asarray(jax.tree.leaves(self.seen(tree)), noise.large_sqr.dtype)

        scale = noise.num_samples / self.base_batch_size
        spare = jnp.maximum(noise.num_groups - 1, 1)
        at_base = (
            noise.large_sqr * (1 + (1 - scale) / spare) + noise.small_sqr * (scale - 1) / spare
        )
        at_base = jnp.maximum(at_base, jnp.minimum(scale, 1) * noise.large_sqr)
        sizes = tuple(max(x.size, 1) for x in jax.tree.leaves(updates))
        size = jnp.sqrt(at_base / seen(sizes[: len(steps)], 1))
        size = jnp.where(seen(self.rule.by_size, False) > 0, size, 1)
        weight = jnp.where(size > 0, seen(steps, 1.0) / jnp.where(size > 0, size, 1), 0)
        return dataclasses.replace(
            noise,
            small_sqr=weight * noise.small_sqr,
            large_sqr=weight * noise.large_sqr,
            moment=None if noise.moment is None else weight * noise.moment,
        )

    def _clocks_in(self, updates: PyTree, params: PyTree | None, extra: dict[str, Any]) -> Clocks:
        """Return the schedules of `tx`; found once for each structure of the parameters."""
        if self.clocks is not None:
            return self.clocks
        like = jax.eval_shape(lambda: updates if params is None else params)
        leaves, structure = jax.tree.flatten(like)
        key = (structure, *((x.shape, x.dtype) for x in leaves))
        if key not in self.found_clocks:
            try:
                traced = traced_update(self.tx, like)
            except UnsupportedOptimizer:  # it needs what this call gives
                traced = traced_update(_given(self.tx, extra), like)
            self.found_clocks[key] = clocks_of(traced)
        return self.found_clocks[key]

    def _factors_of(self, params: PyTree) -> tuple[list[tuple[int, int]], PyTree]:
        """Return the rule and the label of each factor, and a tree with the index of each leaf's factor.

        Leaves that are not `seen` do not move; they have the first factor.
        """
        labels, structure = jax.tree.flatten(noises.label_indices(self.labels, params))
        kinds = list(zip(self.rule.of_leaves(len(labels)), labels, strict=True))
        places = jax.tree.unflatten(structure, range(len(labels)))
        present = sorted({kinds[i] for i in jax.tree.leaves(self.seen(places))})
        index = {kind: i for i, kind in enumerate(present)}
        return present, jax.tree.unflatten(structure, [index.get(kind, 0) for kind in kinds])

    def _factors(
        self,
        own: Adaptation,
        scale: Array,
        kinds: list[tuple[int, int]],
        worth: Array | None = None,
    ) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """Return the factors of `kinds` (rule, label), and the base steps that this update is worth.

        `worth` replaces what the batch is worth. The last values are those of `_moments_after`.
        """
        one = as_one(own.findings.trusted, scale)
        # At most 1 if the noise is unknown.
        worth = jnp.asarray(adascale(scale, one)) if worth is None else worth
        grad = own.findings.by_label
        if grad is None:
            grad = jax.tree.map(lambda x: x[None], one)
        rated = scale if self.shrinks else jnp.maximum(scale, 1)
        grad = cautious_moments(rated, grad)
        num_labels = own.noise.current.sqr.size - 1
        over_labels = {"in_axes": (None, 0, None), "axis_size": num_labels}
        gains: Any = None
        if any(decay is not None for decay in self.rule.second_moment_decays):
            gains = jax.vmap(adascale, **over_labels)(rated, grad, own.progress)
        parts = [_Part.of(kinds, i) for i in range(len(self.rule.rules))]
        wanted = []
        for part, rule, decay in zip(
            parts, self.rule.rules, self.rule.second_moment_decays, strict=True
        ):
            factor = part.labels_of(jax.vmap(rule, **over_labels)(rated, grad, own.progress))
            factor = jnp.asarray(factor, own.gain.dtype)
            if decay is not None:
                factor = factor * jnp.sqrt(part.labels_of(gains) * own.second_moment[part.where])
            wanted.append(factor)
        wanted = jnp.concatenate(wanted)
        factors = jnp.minimum(wanted, own.growth.limit(own.gain, self.max_gain_growth))
        held_back = jnp.mean(jnp.where(wanted > 0, factors / jnp.where(wanted > 0, wanted, 1), 1))
        progressed = worth * held_back
        after = self._moments_after(own, parts, gains, rated, worth, held_back)
        return factors, progressed, after

    def _moments_after(
        self,
        own: Adaptation,
        parts: list["_Part"],
        gains: Any,
        scale: Array,
        worth: Array,
        held_back: Array,
    ) -> tuple[Array, Array, Array]:
        """Return `Adaptation.second_moment`, `moment_weight` and `new_squares` after an update."""
        new_squares = own.new_squares
        if gains is None:  # no second moment follows the batch
            return own.second_moment, own.moment_weight, new_squares
        moments, weights, sum_growth = [], [], 1.0
        for i, (part, decay) in enumerate(zip(parts, self.rule.second_moment_decays, strict=True)):
            moment, weight = own.second_moment[part.where], own.moment_weight[i]
            own_gains = 1.0 if decay is None else part.labels_of(gains)
            if decay == 1:  # a sum over all updates, of which base batches would have made more
                # Unless measured, each base batch would have added as much as any before.
                added = own_gains * held_back  # in base batches
                summed = own.progress * moment + 1 / own_gains
                likely = summed / (own.progress + added)
                if self._has_averages:
                    moment = likely
                else:
                    # What an update adds, and what a base batch would have added, relative to the sum.
                    signal, noise = new_squares
                    now = jnp.maximum(signal + noise / scale, 0)
                    then = jnp.maximum(signal + noise, 0)
                    measured = moment * (1 + now) / (1 + moment * then * added)
                    moment = jnp.where(noise > 0, measured, likely)
                    sum_growth = jnp.where(noise > 0, 1 + now, 1.0)
            elif decay is not None:
                kept = decay ** (worth * held_back if self.long_averages else 1.0)
                new = 1 - kept
                weight = kept * weight + new
                share = new / weight
                # What is added, and what a base batch would have added, relative to the moment that base
                # batches would have made. Unless measured, they would have added as much as is there.
                signal, noise = new_squares
                now, then = 1 / own_gains, 1.0
                is_measured = noise > 0
                now = jnp.where(is_measured, jnp.maximum(signal + noise / scale, 0) * moment, now)
                then = jnp.where(is_measured, jnp.maximum(signal + noise, 0) * moment, then)
                moment += share * (now - moment * then) / (1 - share + share * then)
            moments.append(moment)
            weights.append(weight)
        # Later squares are smaller beside a sum that has grown.
        return jnp.concatenate(moments), jnp.stack(weights), new_squares / sum_growth


def _squared(leaf: Any) -> Array:
    """Return the squared norm of a leaf, in single precision at least."""
    size = jnp.abs(jnp.asarray(leaf))
    return jnp.sum(jnp.square(size.astype(wide_dtype(size.dtype))))


def _given(
    tx: optax.GradientTransformationExtraArgs, extra: dict[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` with arguments that its update always gets."""

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


@dataclass(frozen=True)
class _Part:
    """The factors of one rule: a stretch of all factors, with a label each."""

    where: slice
    labels: tuple[int, ...]

    @classmethod
    def of(cls, kinds: list[tuple[int, int]], rule: int) -> "_Part":
        places = [i for i, (own, _) in enumerate(kinds) if own == rule]
        start = places[0] if places else 0
        return cls(slice(start, start + len(places)), tuple(kinds[i][1] for i in places))

    def labels_of(self, by_label: Array) -> Array:
        """Return the values of this rule's labels, from the values of all labels."""
        if self.labels == tuple(range(len(by_label))):
            return by_label
        return by_label[jnp.array(self.labels, jnp.int32)]


def _relative_squares(sample: NoiseSample, base_batch_size: int) -> Array:
    """Return signal and noise at the base batch, relative to the second moment, of the leaves that have one.

    An array `[2]`; zeros if the sample is invalid.
    """
    moment = jnp.asarray(sample.moment)
    small, large, moment = (
        jnp.sum(jnp.where(moment > 0, x, 0)) for x in (sample.small_sqr, sample.large_sqr, moment)
    )
    spare = jnp.maximum(sample.num_groups - 1, 1)
    scale = sample.num_samples / base_batch_size
    found = jnp.stack([sample.num_groups * large - small, (small - large) * scale]) / spare
    valid = (sample.num_groups >= 2) & (moment > 0) & jnp.all(jnp.isfinite(found))
    return jnp.where(valid, found / jnp.where(moment > 0, moment, 1), 0)


def as_one(grad: GradGroups, scale: Array) -> GradParams:
    """Return the moments of a single group with the same worth at this scale.

    With shares s_i of the signal and noise scales n_i in base batches, its n follows from 1 / (n + scale) =
    sum_i s_i / (n_i + scale). This is exact and has no singularity at the base.
    """
    signal = jnp.sum(grad.sqr)
    each = grad.var + scale * grad.sqr
    mean = jnp.sum(jnp.square(grad.sqr) / jnp.where(each == 0, 1, each))
    var = jnp.square(signal) / jnp.where(mean == 0, 1, mean) - scale * signal
    var = jnp.where(mean <= 0, jnp.sum(grad.var), jnp.maximum(var, 0))
    return GradParams(sqr=signal, var=var, known=jnp.asarray(grad.known))


def _times(factor: Array, update: Any) -> Array:
    """Return the product in the type of `update`, an array of JAX or NumPy, rounded once."""
    wide = wide_dtype(factor.dtype, update.dtype)
    return (factor.astype(wide) * update.astype(wide)).astype(update.dtype)


def _typed_as(new: Any, old: Any) -> Any:
    # Gradients are float32 whatever the parameters are, and so would become what optax makes in their types.
    return new if jnp.result_type(new) == jnp.result_type(old) else jnp.asarray(new, old.dtype)
