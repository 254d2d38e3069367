"""Probes an optimizer: gives it known gradients before training, and infers its properties from the updates.

optax stores neither constants nor names in its states. So the transformation is run for a few updates on a
tree with the structure of the parameters, but one element per leaf, and the results are compared.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, PyTree

from jaxgoodput.optim.adaptive import with_schedules_at
from jaxgoodput.optim.memory import Decays, averages, decays_of
from jaxgoodput.optim.preconditioner import MomentConstants, second_moments

T = TypeVar("T")

NORM = 1e-3  # norm of a probing gradient, below every usual clipping limit
NUM_UPDATES = 3
NOISE = 3.0  # noise of probing gradients, relative to their mean
NUM_ALTERNATING = 40
NUM_NOISY, NUM_RUNS = 256, 16  # updates of a probe with noise, and its repetitions
MAX_COMPILED = 100  # with more leaves, compiling takes longer than running operation by operation


class NeedsMore(TypeError):
    """Error: a transformation requires arguments that training does not pass."""


def _probed(what: str, probe: Callable[[], T], default: T) -> T:
    """Return `probe()`; if it raises, log that `what` cannot be probed, and return `default`."""
    try:
        return probe()
    except Exception as error:  # a user's own link may raise anything
        logging.info("cannot probe the optimizer for %s, so a default is used: %r", what, error)
        return default


def normalised_share(tx: optax.GradientTransformation, params: PyTree) -> float:
    """Return the share of parameters whose update stays the same if the gradient doubles.

    It is about 0 for SGD with or without momentum, and 1 for optimizers that divide by the gradient's size:
    Adam, Lion, Adafactor, sign and normalised SGD. NaN if all updates are zero. `params` may be abstract.

    Raises NeedsMore if the transformation requires more than gradients, parameters and the loss.

    >>> normalised_share(optax.sgd(0.1), {"w": jnp.zeros(3)})
    0.0
    >>> normalised_share(optax.sign_sgd(0.1), {"w": jnp.zeros(3)})
    1.0
    """
    sizes = np.array([math.prod(x.shape) for x in jax.tree.leaves(params)], float)
    # The parameters are not zero, because some optimizers scale their steps by them.
    moved, _ = _updates(tx, _small(params, 0.1), (NORM, 2 * NORM), NUM_UPDATES)
    seen = (moved > 0).all(axis=0)
    if not seen.any():
        return math.nan
    stays = moved[1, seen] / moved[0, seen] < math.sqrt(2)  # half-way between 1 and 2
    return float(np.average(stays, weights=sizes[seen]))


def noise_share(tx: optax.GradientTransformation, params: PyTree) -> float:
    """Return how much of the gradient's noise is left in what a normalising optimizer divides, in [0, 1].

    It follows from the mean update with and without noise, whose ratio is c / sqrt(c^2 + share d^2) for noise
    d on a gradient c. It is 1 for Adam and sign SGD, and 0.01 for Lion, which takes the sign of a momentum.
    If the optimizer cannot be probed, it is 1. `params` may be abstract.

    >>> noise_share(optax.sign_sgd(0.1), {"w": jnp.zeros(3)}) > 0.9
    True
    >>> noise_share(optax.lion(0.1), {"w": jnp.zeros(3)}) < 0.1
    True
    """
    tx, small = optax.with_extra_args_support(tx), _small(params, 0.1)

    def mean_update(key: Array, size: Array, sign: Array) -> Array:
        def one(state: PyTree, key: Array) -> tuple[PyTree, Array]:
            return _updated(tx, small, state, sign * NORM * (1 + size * jax.random.normal(key)))

        _, moved = jax.lax.scan(one, tx.init(small), jax.random.split(key, NUM_NOISY))
        return moved[NUM_NOISY // 2 :].mean(axis=0)

    @jax.jit
    def both() -> Array:
        keys = jax.random.split(jax.random.key(0), NUM_RUNS)
        over_keys = jax.vmap(mean_update, (0, None, None))
        sizes, signs = jnp.array([NOISE, 0.0]), jnp.array([1.0, -1.0])
        over_sizes = jax.vmap(over_keys, (None, 0, None))
        moved = jax.vmap(over_sizes, (None, None, 0))(keys, sizes, signs).mean(axis=2)
        return (moved[0] - moved[1]) / 2  # without weight decay

    noisy, quiet = _probed("noise", lambda: np.abs(np.asarray(both())), np.zeros((2, 1)))
    seen = quiet > 0
    if not seen.any():
        return 1.0
    left = float(np.clip(np.median(noisy[seen] / quiet[seen]), 1e-3, 1.0))
    return min((1 / left**2 - 1) / NOISE**2, 1.0)


def lags(tx: optax.GradientTransformation, params: PyTree) -> bool:
    """Return whether updates are proportional to the gradient while the second moment hardly changes.

    This holds for Adam, whose second moment hardly moves in one update. It does not hold for optimizers that
    normalise the result again, such as LAMB, or if groups of parameters have another optimizer. The probe
    uses alternating gradients for some updates, and then small gradients of two sizes.

    >>> lags(optax.adam(0.1), {"w": jnp.zeros(3)}), lags(optax.lamb(0.1), {"w": jnp.zeros(3)})
    (True, False)
    """
    tx, small = optax.with_extra_args_support(tx), _small(params, 0.1)

    def moved(size: Array) -> Array:
        def one(state: PyTree, entry: Array) -> tuple[PyTree, Array]:
            return _updated(tx, small, state, entry)

        before = NORM * jnp.where(jnp.arange(NUM_ALTERNATING) % 2 == 0, 1.0, -1.0)
        _, updates = jax.lax.scan(one, tx.init(small), jnp.append(before, size * NORM))
        return updates[-1]

    sizes = jnp.array([0.0, 0.05, 0.1])
    none, once, twice = _probed(
        "lagging moments", lambda: np.asarray(jax.jit(jax.vmap(moved))(sizes)), np.zeros((3, 1))
    )
    ratios = (twice - none) / np.where(once == none, np.nan, once - none)
    return bool(np.all(np.abs(ratios - 2) < 0.1))


def averages_parameters(tx: optax.GradientTransformation, params: PyTree) -> bool:
    """Return whether the state keeps an average of the parameters, over updates. `params` may be abstract.

    The probe lets the parameters jump once, from 0 to 1. An average then loses the same share of the old
    value in every update. A reference point would stay, and what weight decay adds to a momentum grows
    differently.

    >>> averages_parameters(optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(3)})
    False
    """
    tx, small = optax.with_extra_args_support(tx), _small(params, 0.0)

    def states(value: Array) -> Array:
        moved = jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), small)

        def one(state: PyTree, entry: Array) -> tuple[PyTree, Array]:
            state, _ = _updated(tx, moved, state, entry)
            floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
            return state, jnp.concatenate([jnp.zeros(1), *(jnp.ravel(x) for x in floats)])

        return jax.lax.scan(one, tx.init(small), jnp.full(NUM_ALTERNATING, NORM))[1]

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


def moment_constants(tx: optax.GradientTransformation, params: PyTree) -> MomentConstants:
    """Return the b2 and eps of Adam and its kin; optax's defaults for others. `params` may be abstract.

    If groups of parameters have different constants, the median is returned.

    >>> moment_constants(optax.adam(0.1, b2=0.95, eps=1e-6), {"w": jnp.zeros(3)})
    MomentConstants(b2=0.95, eps=1e-06)
    """
    default = MomentConstants()
    params = _small(params, 0.0)
    moved, first = _updates(tx, params, (NORM, NORM**2), 1)
    _, second = _updates(tx, params, (NORM, NORM**2), 2)
    # The moment is (1 - b2) c^2, and then (1 + b2) times that, for a constant gradient c that reaches it.
    seen = (first > 0).all(axis=0)
    decays = second[0, seen] / first[0, seen] - 1
    decays = decays[(decays > 0) & (decays < 1)]
    if not decays.size:
        return default  # another kind of optimizer, whose eps acts differently
    b2 = float(np.median(decays))
    large, small = map(float, np.median(np.sqrt(first[:, seen] / (1 - b2)), axis=1))
    eps = _epsilon(moved, large, small)
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
    tx, small = optax.with_extra_args_support(tx), _small(params, 0.1)
    if not averages(jax.eval_shape(tx.init, small)):
        return ()
    entry = jnp.asarray(_entry(NORM, len(jax.tree.leaves(small))))

    def two_updates() -> tuple[PyTree, PyTree]:
        first, _ = _updated(tx, small, tx.init(small), entry)
        return first, _updated(tx, small, first, entry)[0]

    found = _probed("long averages", lambda: decays_of(*jax.device_get(jax.jit(two_updates)())), ())
    return () if set(found) == {None} else found


def _epsilon(moved: np.ndarray, large: float, small: float) -> float:
    """Return eps from first updates for two gradient sizes c, which are proportional to c / (c + eps)."""
    seen = (moved > 0).all(axis=0)
    ratio = np.minimum(moved[1, seen] / moved[0, seen], 1.0)
    below = ratio * large - small
    of_adam = below > 1e-4 * small  # updates of other optimizers grow with the gradient
    if not of_adam.any():
        return math.nan
    return float(np.median(large * small * (1 - ratio[of_adam]) / below[of_adam]))


def _updates(
    tx: optax.GradientTransformation, params: PyTree, norms: tuple[float, ...], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return summed sizes of `count` updates, `[norms, leaves]`, and second moments, `[norms, moments]`.

    Only the part of an update that changes sign with the gradient is counted, which excludes weight decay.
    """
    tx = optax.with_extra_args_support(tx)
    leaves = jax.tree.leaves(params)

    def run(entry: Array) -> tuple[list[Array], list[Array]]:
        state, found = tx.init(params), []
        for _ in range(count):
            state, moved = _updated(tx, params, state, entry)
            found.append(moved)
        return found, [x.sum() / x.size for x in second_moments(state)]

    def both_ways(entry: Array) -> tuple[Array, Array]:
        (there, moments), (back, _) = run(entry), run(-entry)
        moved = jnp.abs(jnp.stack(there) - jnp.stack(back)).sum(axis=0) / 2
        return moved, jnp.stack(moments) if moments else jnp.zeros(0)

    if len(leaves) <= MAX_COMPILED:
        both_ways = jax.jit(both_ways)
    try:
        found = [both_ways(jnp.asarray(_entry(norm, len(leaves)))) for norm in norms]
    except Exception as error:  # a user's own link may raise anything
        said = str(error) if isinstance(error, (TypeError, ValueError, KeyError)) else ""
        if any(words in said for words in ("missing", "must be provided")):
            raise NeedsMore(str(error)) from error
        logging.info("cannot probe the optimizer for its updates, so they count as 0: %r", error)
        return np.zeros((len(norms), len(leaves))), np.zeros((len(norms), 0))
    moved, moments = zip(*jax.device_get(found), strict=True)
    return np.stack(moved), np.stack(moments)


def _updated(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, state: PyTree, entry: Array
) -> tuple[PyTree, Array]:
    """Return the state after one update by gradients that are `entry` everywhere, and each leaf's change."""
    grads = jax.tree.map(lambda x: jnp.full(x.shape, entry, x.dtype), params)
    state = with_schedules_at(state, jnp.ones((), jnp.int32))  # a warm-up begins at zero
    update, state = tx.update(grads, state, params, value=jnp.ones(()))
    return state, jnp.stack([x.sum() for x in jax.tree.leaves(update)])


def _entry(norm: float, num_leaves: int) -> float:
    return norm / math.sqrt(max(num_leaves, 1))


def _small(params: PyTree, value: float) -> PyTree:
    """Return a tree like `params` whose leaves hold only `value`, in the rank that masks may ask for."""

    def leaf(x: Any) -> Array:
        return jnp.full((1,) * len(x.shape), value, x.dtype)

    return jax.tree.map(leaf, params)
