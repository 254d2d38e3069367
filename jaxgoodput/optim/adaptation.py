"""`Adaptation`: what `adaptive` adds to an optimizer's state, and how to read and change it there."""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import PackedTree, struct
from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.optim import noise as noises
from jaxgoodput.optim.gain_growth import GainGrowth
from jaxgoodput.optim.noise import MeasuredGroups, NoiseState

Number = TypeVar("Number")


@struct
class NoiseReadout(Generic[Number]):
    """Gradient noise as a step reports it: arrays, or Python numbers and numpy arrays on the host."""

    sqr: Number
    """Squared norm of the mean gradient, a plain average."""
    var: Number
    """Trace of the gradient's covariance at the base batch size, a plain average."""
    known: Number
    """Whether enough is known of the groups for decisions, a bool."""
    group_sqr: Any
    """Signal of each group for decisions, `[groups]`; anything finite unless `known`."""
    group_var: Any
    """Noise of each group for decisions, `[groups]`; anything finite unless `known`."""
    seen_groups: Number
    """Number of groups whose signal is above its own standard error; 0 unless `known`."""
    num_samples: Number
    """Number of noise samples in the trusted averages."""
    newest_samples: Number
    """Number of noise samples in the newest averages, which may not be trusted yet."""

    @classmethod
    def of(cls, noise: NoiseState, groups: NoiseState) -> "NoiseReadout[Array]":
        """Return what statistics by label, and by group of parameters, say."""
        plain, expected = noises.grad_params(noise), noises.expected_groups(groups)
        return NoiseReadout(
            sqr=plain.sqr,
            var=plain.var,
            known=expected.known,
            group_sqr=expected.sqr,
            group_var=expected.var,
            seen_groups=noises.num_seen(groups),
            num_samples=noises.confidence(groups),
            newest_samples=noises.newest_confidence(groups),
        )

    @property
    def plain(self) -> GradParams:
        """Plain averages of the moments."""
        return GradParams(sqr=self.sqr, var=self.var)

    @property
    def expected(self: "NoiseReadout[float]") -> GradGroups:
        """Moments by group of parameters for decisions (`noise.expected_groups`), NaN if unknown.

        Host values only.
        """
        sqr, var = (np.where(self.known, x, np.nan) for x in (self.group_sqr, self.group_var))
        return GradGroups(sqr=sqr, var=var, known=self.is_known)

    @property
    def is_known(self: "NoiseReadout[float]") -> bool:
        """Whether enough is known for decisions. Host values only."""
        return bool(self.known)

    @property
    def is_guess(self: "NoiseReadout[float]") -> bool:
        """Whether no signal is above its own standard error: the noise scale is little more than a guess."""
        return self.is_known and self.seen_groups == 0


@struct
class Findings:
    """What follows from the noise statistics. It is worked out when they change, not in every update."""

    readout: NoiseReadout[Any]
    """The noise as a step reports it."""
    trusted: GradGroups
    """Moments by group with the caution that `adaptive` was told, for the worth of a batch."""
    by_label: GradParams | None
    """The same by label, `[labels]`, for the learning rate; None without labels."""


@struct
class Adaptation:
    """What `adaptive` adds to the optimizer's state, such as noise statistics, progress and gain.

    Values are arrays; on the host, Python numbers and numpy arrays.
    """

    noise: NoiseState
    """Noise statistics by label, which decide the learning rate if there are labels."""
    groups: NoiseState
    """Noise statistics by `noise.leaf_groups`, for the worth of a batch, and for the rate without labels."""
    progress: Any
    """Base steps done, a float."""
    progress_rest: Any
    """Rounding error of `progress` (Kahan), for runs of millions of steps."""
    gain: Any
    """Factors of the latest update, `[factors]`: by rule, and within a rule by label."""
    second_moment: Any
    """The optimizer's second moment, relative to its value with base batches, `[factors]`."""
    new_squares: Any
    """Latest measured signal and noise of the squared gradient at the base batch, `[2]`, relative to the
    optimizer's second moment: to averages, as Adam's, or to sums if there are none. Zeros while unknown."""
    moment_weight: Any
    """Divisor in Adam's bias correction, 1 - b2 to the power of the updates, `[rules]`."""
    base_batches: Any
    """Samples taken, including skipped batches, divided by the base batch size; a float."""
    base_batches_rest: Any
    """Rounding error of `base_batches`."""
    unmeasured: Any
    """Base batches since the noise was last measured."""
    findings: Findings
    """What follows from `noise` and `groups`."""
    growth: GainGrowth
    """How fast the gain may grow, by the size of the gradient."""

    @classmethod
    def first(
        cls,
        noise: NoiseState,
        groups: NoiseState,
        findings: Findings,
        *,
        num_factors: int,
        num_rules: int,
    ) -> "Adaptation":
        """Return what holds before the first update, with what these statistics say."""
        return cls(
            noise=noise,
            groups=groups,
            findings=findings,
            progress=jnp.zeros(()),
            progress_rest=jnp.zeros(()),
            gain=jnp.ones(num_factors),
            second_moment=jnp.ones(num_factors),
            new_squares=jnp.zeros(2),
            moment_weight=jnp.zeros(num_rules),
            base_batches=jnp.zeros(()),
            base_batches_rest=jnp.zeros(()),
            unmeasured=jnp.zeros(()),
            growth=GainGrowth.first(),
        )


class AdaptiveState(NamedTuple):
    """The optax state of `adaptive`: the wrapped optimizer's, and an `Adaptation`, which `find` returns."""

    inner: Any
    """State of the user's optimizer."""
    own: Any
    """`PackedTree[Adaptation]`: everything that `adaptive` adds, in one array."""


def find(opt_state: PyTree) -> Adaptation:
    """Return the `Adaptation` in the one `AdaptiveState` of an optimizer state, at any depth."""
    return packed(opt_state).tree


def packed(opt_state: PyTree) -> PackedTree[Adaptation]:
    """Return the `Adaptation` of an optimizer state as it is kept there, in one array: see `find`."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, AdaptiveState))
    found = [x for x in leaves if isinstance(x, AdaptiveState)]
    if len(found) != 1:
        raise ValueError(
            f"the optimizer state holds {len(found)} AdaptiveStates instead of one. Wrap the whole optimizer "
            "once: adaptive(tx, rule, base_batch_size=...), and pass the state that its init returned."
        )
    return found[0].own


def noise_state(opt_state: PyTree) -> NoiseState:
    """Return the gradient-noise statistics by label (`Adaptation.noise`)."""
    return find(opt_state).noise


def grad_groups(opt_state: PyTree) -> GradGroups:
    """Return the expected moments by group of parameters; use these for decisions."""
    return noises.expected_groups(find(opt_state).groups)


def grad_params(opt_state: PyTree) -> GradParams:
    """Return both gradient moments at the base batch size, as plain averages over the recent past.

    They suit a chart; for decisions use `grad_groups(opt_state)`.
    """
    return noises.grad_params(noise_state(opt_state))


def measured_groups(opt_state: PyTree) -> MeasuredGroups[Array]:
    """Return what was measured of the groups, without caution: what the noise scale's interval rests on."""
    return noises.measured_groups(find(opt_state).groups)


def progress(opt_state: PyTree) -> Array:
    """Return the base steps done: the steps that the base batch size would have needed. A scalar."""
    state = find(opt_state)
    return state.progress + state.progress_rest


def progress_on_host(opt_state: PyTree) -> float:
    """Return the base steps done, as a Python number."""
    state = packed(opt_state).host_tree
    return float(state.progress + state.progress_rest)


def progress_between(before: PyTree, after: PyTree) -> Array:
    """Return the base steps between two optimizer states, even below the last digit of `progress`."""
    old, new = find(before), find(after)
    return (new.progress - old.progress) + (new.progress_rest - old.progress_rest)


def gain(opt_state: PyTree) -> Array:
    """Return the factors that multiplied the latest update, `[labels]`; without labels, `[1]`.

    If leaves have different rules, there is a factor for each rule, and within it for each label.
    """
    return find(opt_state).gain


def with_noise_held(opt_state: PyTree, grad: GradGroups) -> PyTree:
    """Return the optimizer state with these moments trusted until it has measured its own.

    The moments by label stay unknown; they matter only if there are labels.
    """

    def held(own: Adaptation) -> Adaptation:
        averages = noises.taken_for(grad, own.groups.held)
        groups = dataclasses.replace(own.groups, held=averages)
        found = dataclasses.replace(
            own.findings,
            readout=NoiseReadout.of(own.noise, groups),
            trusted=noises.expected_groups(groups),
        )
        return dataclasses.replace(own, groups=groups, findings=found)

    # The new values keep the sharding of the old ones.
    changed = with_own(opt_state, held)
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), changed, opt_state)


def passed_over(opt_state: PyTree, base_batches: Array) -> PyTree:
    """Return the optimizer state after a skipped batch, of which only the samples are counted."""

    def passed(own: Adaptation) -> Adaptation:
        done, rest = added(own.base_batches, own.base_batches_rest, base_batches)
        unmeasured = own.unmeasured + base_batches
        return dataclasses.replace(
            own, base_batches=done, base_batches_rest=rest, unmeasured=unmeasured
        )

    return with_own(opt_state, passed)


def watched(
    own: PackedTree[Adaptation], grad_norm: Array, scale: Array, progressed: Array
) -> PackedTree[Adaptation]:
    """Return what follows an update, worth `progressed` base steps, whose gradient has this norm.

    Its batch is `scale` times the base batch.
    """
    tree = own.tree
    progress = tree.progress + tree.progress_rest
    growth = tree.growth.after(grad_norm, tree.gain.max(), scale, progressed, progress)
    return own.replaced(tree, dataclasses.replace(tree, growth=growth))


def with_own(opt_state: PyTree, change: Callable[[Adaptation], Adaptation]) -> PyTree:
    """Return the optimizer state with its `Adaptation` replaced by `change` of it."""

    def is_own(node: Any) -> bool:
        return isinstance(node, AdaptiveState)

    def changed(node: Any) -> Any:
        if not is_own(node):
            return node
        own = node.own.tree
        return node._replace(own=node.own.replaced(own, change(own)))

    return jax.tree.map(changed, opt_state, is_leaf=is_own)


def readout(opt_state: PyTree) -> NoiseReadout[Array]:
    """Return the gradient noise in the form that a step reports."""
    return find(opt_state).findings.readout


def added(total: Array, rest: Array, increment: Array) -> tuple[Array, Array]:
    """Return Kahan's sum as (total, rest), whose sum keeps increments that `total` alone would lose."""
    increment = increment.astype(total.dtype) + rest
    new = total + increment
    return new, increment - (new - total)


def whole(total: Array, rest: Array) -> Array:
    """Return floor(total + rest) as an int32, exactly, even if no float equals their sum."""
    floor = jnp.floor(total)
    return floor.astype(jnp.int32) + jnp.floor((total - floor) + rest).astype(jnp.int32)
