"""Probes an optimizer: gives it known gradients before training, and infers what it does with each leaf.

optax stores neither constants nor names in its states. So the transformation is run for a few updates on a
tree with the structure of the parameters, but one element per leaf, and the results are compared. Results
are arrays `[leaves]`, because an optimizer may treat groups of parameters differently. Schedules should be
held at one count (`traced.at_count`), because a warm-up begins at zero.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, PyTree

from jaxgoodput.optim.memory import Decays, averages, decays_of
from jaxgoodput.optim.preconditioner import MomentConstants, covers, preconditioner, second_moments
from jaxgoodput.optim.traced import NO_CLOCKS, Clocks, at_count, small

T = TypeVar("T")

NORM = 1e-3  # norm of a probing gradient, below every usual clipping limit
NUM_UPDATES = 3
NOISE = 3.0  # noise of probing gradients, relative to their mean
NUM_ALTERNATING = 40
NUM_NOISY, NUM_RUNS = 256, 16  # updates of a probe with noise, and its repetitions
MAX_COMPILED = 100  # with more leaves, compiling takes longer than running operation by operation


def _probed(what: str, probe: Callable[[], T], default: T) -> T:
    """Return `probe()`; if it raises, log that `what` cannot be probed, and return `default`."""
    try:
        return probe()
    except Exception as error:  # a user's own link may raise anything
        logging.info("cannot probe the optimizer for %s, so a default is used: %r", what, error)
        return default


def normalises(tx: optax.GradientTransformation, params: PyTree) -> np.ndarray:
    """Return for each leaf whether its update stays the same if the gradient doubles: 1.0, 0.0, or NaN.

    It is 0 for SGD with or without momentum, and 1 for optimizers that divide by the gradient's size: Adam,
    Lion, Adafactor, sign and normalised SGD. NaN if the updates are zero. `params` may be abstract.

    >>> normalises(optax.sgd(0.1), {"w": jnp.zeros(3)})
    array([0.])
    >>> normalises(optax.sign_sgd(0.1), {"w": jnp.zeros(3)})
    array([1.])
    """
    # The parameters are not zero, because some optimizers scale their steps by them.
    moved, _ = _updates(tx, small(params, 0.1), (NORM, 2 * NORM), NUM_UPDATES)
    seen = (moved > 0).all(axis=0)
    ratio = moved[1] / np.where(seen, moved[0], 1)
    return np.where(seen, (ratio < math.sqrt(2)).astype(float), np.nan)  # half-way between 1 and 2


def noise_left(tx: optax.GradientTransformation, params: PyTree) -> np.ndarray:
    """Return how much larger a mean update is without noise than with it, by leaf; NaN if unknown.

    See `noise_share`. `params` may be abstract.
    """
    tx, start = optax.with_extra_args_support(tx), small(params, 0.1)

    def mean_update(key: Array, size: Array, sign: Array) -> Array:
        def one(state: PyTree, key: Array) -> tuple[PyTree, Array]:
            return _updated(tx, start, state, sign * NORM * (1 + size * jax.random.normal(key)))

        _, moved = jax.lax.scan(one, tx.init(start), jax.random.split(key, NUM_NOISY))
        return moved[NUM_NOISY // 2 :].mean(axis=0)

    @jax.jit
    def both() -> Array:
        keys = jax.random.split(jax.random.key(0), NUM_RUNS)
        over_keys = jax.vmap(mean_update, (0, None, None))
        sizes, signs = jnp.array([NOISE, 0.0]), jnp.array([1.0, -1.0])
        over_sizes = jax.vmap(over_keys, (None, 0, None))
        moved = jax.vmap(over_sizes, (None, None, 0))(keys, sizes, signs).mean(axis=2)
        return (moved[0] - moved[1]) / 2  # without weight decay

    nothing = np.zeros((2, len(jax.tree.leaves(start))))
    noisy, quiet = _probed("noise", lambda: np.abs(np.asarray(both())), nothing)
    return np.where(quiet > 0, noisy / np.where(quiet > 0, quiet, 1), np.nan)


def noise_share(left: np.ndarray) -> float:
    """Return how much of the gradient's noise is left in what a normalising optimizer divides, in [0, 1].

    It follows from the mean update with and without noise, whose ratio (`noise_left`) is c / sqrt(c^2 +
    share d^2) for noise d on a gradient c. It is 1 for Adam and sign SGD, and 0.01 for Lion, which takes the
    sign of a momentum. The median of the leaves counts. If nothing is known, it is 1.

    >>> noise_share(noise_left(optax.sign_sgd(0.1), {"w": jnp.zeros(3)})) > 0.9
    True
    >>> noise_share(noise_left(optax.lion(0.1), {"w": jnp.zeros(3)})) < 0.1
    True
    """
    known = left[~np.isnan(left)]
    if not known.size:
        return 1.0
    median = float(np.clip(np.median(known), 1e-3, 1.0))
    return min((1 / median**2 - 1) / NOISE**2, 1.0)


def lags(tx: optax.GradientTransformation, params: PyTree) -> np.ndarray:
    """Return for each leaf whether updates follow the gradient while second moments hardly change.

    This holds for Adam, whose second moment hardly moves in one update. It does not hold for optimizers that
    normalise the result again, such as LAMB. The probe uses alternating gradients for some updates, and then
    small gradients of two sizes.

    >>> lags(optax.adam(0.1), {"w": jnp.zeros(3)}), lags(optax.lamb(0.1), {"w": jnp.zeros(3)})
    (array([ True]), array([False]))
    """
    tx, start = optax.with_extra_args_support(tx), small(params, 0.1)

    def moved(size: Array) -> Array:
        def one(state: PyTree, entry: Array) -> tuple[PyTree, Array]:
            return _updated(tx, start, state, entry)

        before = NORM * jnp.where(jnp.arange(NUM_ALTERNATING) % 2 == 0, 1.0, -1.0)
        _, updates = jax.lax.scan(one, tx.init(start), jnp.append(before, size * NORM))
        return updates[-1]

    sizes = jnp.array([0.0, 0.05, 0.1])
    nothing = np.zeros((3, len(jax.tree.leaves(start))))
    none, once, twice = _probed(
        "lagging moments", lambda: np.asarray(jax.jit(jax.vmap(moved))(sizes)), nothing
    )
    ratios = (twice - none) / np.where(once == none, np.nan, once - none)
    return np.abs(ratios - 2) < 0.1


def step_sizes(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    by_size: np.ndarray | None = None,
    moments: Sequence[MomentConstants] | None = None,
    clocks: Clocks = NO_CLOCKS,
    counts: tuple[int, ...] = (1,),
) -> np.ndarray:
    """Return the step size of each leaf: the update's size over the gradient's, times what divides it.

    The divisor is the preconditioner of Adam and its kin, with the constants `moments`. For leaves in
    `by_size` it is the gradient's size, so that the step size is the update's. By default, these are leaves
    that the preconditioner does not cover, and whose updates do not grow with the gradient. Both are probed
    if None.
    Momentum counts at its full strength, and weight decay does not. 0 if the leaf did not move. The result
    is the largest over `counts`, at which schedules are held. `params` may be abstract.

    >>> groups = {"sgd": optax.sgd(0.1, momentum=0.5), "adam": optax.adam(0.01), "lion": optax.lion(0.2)}
    >>> tx = optax.multi_transform(groups, {"a": "sgd", "b": "adam", "c": "lion"})
    >>> step_sizes(tx, dict(a=jnp.zeros(3), b=jnp.zeros(3), c=jnp.zeros(3))).round(4)
    array([0.2 , 0.01, 0.2 ])
    """
    asked, start = optax.with_extra_args_support(tx), small(params, 0.1)
    num_leaves = len(jax.tree.leaves(start))
    is_by_size = by_size
    if is_by_size is None:
        covered = np.array([x is not None for x in covers(jax.eval_shape(tx.init, start), start)])
        is_by_size = ~covered & (normalises(tx, params) == 1)
    if moments is None:
        moments = moment_constants(tx, params)
    entry = _entry(NORM, num_leaves)

    def settled(sign: Array, count: Array) -> tuple[Array, Array]:
        tx = at_count(asked, clocks, count)

        def one(state: PyTree, _: None) -> tuple[PyTree, Array]:
            return _updated(tx, start, state, sign * entry)

        state, moved = jax.lax.scan(one, tx.init(start), length=NUM_ALTERNATING)
        scale = preconditioner(state, start, by_leaf=moments)
        factors = jnp.ones(num_leaves)
        if scale is not None:
            factors = jnp.stack([jnp.mean(x) for x in jax.tree.leaves(scale)])
        return moved[-1], 1 / jnp.where(factors > 0, factors, 1)

    @jax.jit
    def both() -> tuple[Array, Array]:
        over_counts = jax.vmap(settled, (None, 0))
        each = jnp.array(counts, jnp.int32)
        moved, divisors = jax.vmap(over_counts, (0, None))(jnp.array([1.0, -1.0]), each)
        return jnp.abs(moved[0] - moved[1]) / 2, divisors[0]

    nothing = (jnp.zeros((1, num_leaves)), jnp.ones((1, num_leaves)))
    moved, divisors = jax.device_get(_probed("step sizes", both, nothing))
    sizes = np.asarray(moved, np.float64) / entry * np.where(is_by_size, entry, divisors)
    return sizes.max(axis=0)


def averages_parameters(tx: optax.GradientTransformation, params: PyTree) -> bool:
    """Return whether the state keeps an average of the parameters, over updates. `params` may be abstract.

    The probe lets the parameters jump once, from 0 to 1. An average then loses the same share of the old
    value in every update. A reference point would stay, and what weight decay adds to a momentum grows
    differently.

    >>> averages_parameters(optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(3)})
    False
    """
    tx, start = optax.with_extra_args_support(tx), small(params, 0.0)

    def states(value: Array) -> Array:
        moved = jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), start)

        def one(state: PyTree, entry: Array) -> tuple[PyTree, Array]:
            state, _ = _updated(tx, moved, state, entry)
            floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
            return state, jnp.concatenate([jnp.zeros(1), *(jnp.ravel(x) for x in floats)])

        return jax.lax.scan(one, tx.init(start), jnp.full(NUM_ALTERNATING, NORM))[1]

    @jax.jit
    def change() -> Array:
        still, after = jax.vmap(states)(jnp.array([0.0, 1.0]))
        return after - still

    first, *_, last = _probed(
        "averages of parameters", lambda: np.asarray(change(), np.float64), np.zeros((2, 1))
    )
    # A sum of small values looks like an average with a very long memory.
    kept = (first > 5e-6) & (first < 1)
    expected = 1 - (1 - first[kept]) ** NUM_ALTERNATING
    return bool(np.any(np.abs(last[kept] - expected) < 3e-3 * expected))


def moment_constants(
    tx: optax.GradientTransformation, params: PyTree
) -> tuple[MomentConstants, ...]:
    """Return the b2 and eps of Adam and its kin for each leaf; optax's defaults for others.

    `params` may be abstract. Leaves whose moments are in one state have the same constants.

    >>> moment_constants(optax.adam(0.1, b2=0.95, eps=1e-6), {"w": jnp.zeros(3)})
    (MomentConstants(b2=0.95, eps=1e-06),)
    """
    start = small(params, 0.0)
    state_of_leaf = covers(jax.eval_shape(tx.init, start), start)
    moved, first = _updates(tx, start, (NORM, NORM**2), 1)
    _, second = _updates(tx, start, (NORM, NORM**2), 2)
    known = {}
    for state in set(state_of_leaf) - {None}:
        own = np.array([state == x for x in state_of_leaf])
        known[state] = _constants(moved[:, own], first[:, own], second[:, own])
    return tuple(known.get(state, MomentConstants()) for state in state_of_leaf)


def _constants(moved: np.ndarray, first: np.ndarray, second: np.ndarray) -> MomentConstants:
    """Return the constants of one state, from updates and moments of its leaves, `[norms, leaves]`."""
    default = MomentConstants()
    # The moment is (1 - b2) c^2, and then (1 + b2) times that, for a constant gradient c that reaches it.
    seen = (first > 0).all(axis=0)
    decays = second[0, seen] / first[0, seen] - 1
    decays = decays[(decays > 0) & (decays < 1)]
    if not decays.size:
        return default  # another kind of optimizer, whose eps acts differently
    b2 = float(np.median(decays))
    large, little = map(float, np.median(np.sqrt(first[:, seen] / (1 - b2)), axis=1))
    eps = _epsilon(moved, large, little)
    # Rounded as people write constants: 0.95, not 0.94999996.
    return MomentConstants(
        b2=float(f"{b2:.4g}"), eps=default.eps if math.isnan(eps) else float(f"{eps:.2g}")
    )


def long_averages(tx: optax.GradientTransformation, params: PyTree) -> Decays:
    """Return the share of themselves that long averages in the state of `tx` keep per update; () without any.

    `params` may be abstract.

    >>> long_averages(optax.lion(0.1), {"w": jnp.zeros(3)})
    (0.99,)
    >>> long_averages(optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(3)})
    ()
    """
    tx, start = optax.with_extra_args_support(tx), small(params, 0.1)
    if not averages(jax.eval_shape(tx.init, start)):
        return ()
    entry = jnp.asarray(_entry(NORM, len(jax.tree.leaves(start))))

    def two_updates() -> tuple[PyTree, PyTree]:
        first, _ = _updated(tx, start, tx.init(start), entry)
        return first, _updated(tx, start, first, entry)[0]

    found = _probed("long averages", lambda: decays_of(*jax.device_get(jax.jit(two_updates)())), ())
    return () if set(found) == {None} else found


def _epsilon(moved: np.ndarray, large: float, little: float) -> float:
    """Return eps from first updates for two gradient sizes c, which are proportional to c / (c + eps)."""
    seen = (moved > 0).all(axis=0)
    ratio = np.minimum(moved[1, seen] / moved[0, seen], 1.0)
    below = ratio * large - little
    of_adam = below > 1e-4 * little  # updates of other optimizers grow with the gradient
    if not of_adam.any():
        return math.nan
    return float(np.median(large * little * (1 - ratio[of_adam]) / below[of_adam]))


def _updates(
    tx: optax.GradientTransformation, params: PyTree, norms: tuple[float, ...], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return summed sizes of `count` updates and means of second moments, both `[norms, leaves]`.

    Only the part of an update that changes sign with the gradient is counted, which excludes weight decay. A
    moment is 0 where there is none.
    """
    tx = optax.with_extra_args_support(tx)
    leaves = jax.tree.leaves(params)

    def run(entry: Array) -> tuple[list[Array], Array]:
        state, found = tx.init(params), []
        for _ in range(count):
            state, moved = _updated(tx, params, state, entry)
            found.append(moved)
        moments = second_moments(state, params)
        return found, jnp.stack([jnp.zeros(()) if x is None else x.sum() / x.size for x in moments])

    def both_ways(entry: Array) -> tuple[Array, Array]:
        (there, moments), (back, _) = run(entry), run(-entry)
        moved = jnp.abs(jnp.stack(there) - jnp.stack(back)).sum(axis=0) / 2
        return moved, moments

    if len(leaves) <= MAX_COMPILED:
        both_ways = jax.jit(both_ways)
    try:
        found = [both_ways(jnp.asarray(_entry(norm, len(leaves)))) for norm in norms]
    except Exception as error:  # a user's own link may raise anything
        logging.info("cannot probe the optimizer for its updates, so they count as 0: %r", error)
        nothing = np.zeros((len(norms), len(leaves)))
        return nothing, nothing
    moved, moments = zip(*jax.device_get(found), strict=True)
    return np.stack(moved), np.stack(moments)


def _updated(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, state: PyTree, entry: Array
) -> tuple[PyTree, Array]:
    """Return the state after one update by gradients that are `entry` everywhere, and each leaf's change."""
    grads = jax.tree.map(lambda x: jnp.full(x.shape, entry, x.dtype), params)
    update, state = tx.update(grads, state, params, value=jnp.ones(()))
    return state, jnp.stack([x.sum() for x in jax.tree.leaves(update)])


def _entry(norm: float, num_leaves: int) -> float:
    return norm / math.sqrt(max(num_leaves, 1))
