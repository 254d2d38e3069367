"""Probes an optimizer: gives it known gradients before training, and infers what it does with each leaf.

optax stores neither constants nor names in its states. So the transformation is run for a few updates on a
tree with the structure of the parameters, but one element per leaf in float32, and the results are compared.
Results are arrays `[leaves]`, because an optimizer may treat groups of parameters differently. Leaves that it
treats alike are run as one (`folded`), and all probes together, in one compiled program.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import wide_dtype
from jaxgoodput.optim.folded import FoldedUpdate, ShapelessNumbering, shaped_literals
from jaxgoodput.optim.memory import Decays, averages, decays_of
from jaxgoodput.optim.preconditioner import MomentConstants, covers, preconditioner, second_moments
from jaxgoodput.optim.traced import NO_CLOCKS, Clocks, TracedUpdate, traced_update

NORM = 1e-3  # norm of a probing gradient, below every usual clipping limit
NUM_UPDATES = 3
NOISE = 3.0  # noise of probing gradients, relative to their mean
NUM_ALTERNATING = 40
NUM_NOISY, NUM_RUNS = 256, 16  # updates of a probe with noise, and its repetitions
START = 0.1  # parameters of most probes; not 0, because some optimizers scale their steps by them
CUTS = (1, 8, 128, 1024)  # lengths at most of the axes of probed leaves
MAX_ELEMENTS = 2**16  # of all different shapes together, if shapes matter
MAX_AT_ONCE = (
    2**12
)  # elements with which all runs are computed together; it takes 35 kB of memory for each

# Runs of the main probe: places in `_entries`.
_PLUS, _MINUS, _TWICE, _MINUS_TWICE = range(4)
_FROM_ZERO, _FROM_ZERO_BACK, _LITTLE, _LITTLE_BACK, _JUMPED = range(4, 9)
_LAGGING = slice(9, 12)


@dataclass(frozen=True)
class _Runs:
    """What an optimizer did in several runs."""

    moved: np.ndarray
    """Mean change of each leaf, `[runs, updates, leaves]`."""
    states: list[np.ndarray]
    """Each class of the state's leaves after the first, second and last update, `[runs, 3, ...]`."""


class Probe:
    """An optimizer that may be asked what it does with each leaf.

    Schedules at `clocks` are held at `count`, because a warm-up begins at zero. What cannot be asked is
    unknown: each answer says what it then is.
    """

    def __init__(self, traced: TracedUpdate, clocks: Clocks = NO_CLOCKS, count: int = 1) -> None:
        self.count = count
        self._real = traced
        self._clocks = clocks
        self._params = jax.tree.map(_wide, traced.params)
        self._outcomes: dict[int, _Runs | None] = {}
        self._has_warned = False

    @classmethod
    def of(cls, tx: optax.GradientTransformation, params: PyTree) -> "Probe":
        """Return a probe of `tx` whose schedules go on; `params` may be abstract."""
        return cls(traced_update(tx, params))

    def normalises(self) -> np.ndarray:
        """Return for each leaf whether its update stays the same if the gradient doubles: 1.0, 0.0, or NaN.

        It is 0 for SGD with or without momentum, and 1 for optimizers that divide by the gradient's size:
        Adam, Lion, Adafactor, sign and normalised SGD. NaN if the updates are zero.

        >>> Probe.of(optax.sgd(0.1), {"w": jnp.zeros(3)}).normalises()
        array([0.])
        >>> Probe.of(optax.sign_sgd(0.1), {"w": jnp.zeros(3)}).normalises()
        array([1.])
        """
        once = self._both_ways(_PLUS, _MINUS, NUM_UPDATES)
        twice = self._both_ways(_TWICE, _MINUS_TWICE, NUM_UPDATES)
        seen = (once > 0) & (twice > 0)
        ratio = twice / np.where(seen, once, 1)
        return np.where(seen, (ratio < math.sqrt(2)).astype(float), np.nan)  # between 1 and 2

    def noise_left(self) -> np.ndarray:
        """Return how much larger a mean update is without noise than with it, by leaf; NaN if unknown.

        See `noise_share`.
        """
        found = self._run_noisy()
        if found is None:
            return np.full(self._num_leaves, np.nan)
        half = found[:, NUM_NOISY // 2 :].mean(axis=1)
        there, back = half[:NUM_RUNS].mean(axis=0), half[NUM_RUNS:-2].mean(axis=0)
        noisy = np.abs(there - back) / 2  # without weight decay
        quiet = np.abs(half[-2] - half[-1]) / 2
        return np.where(quiet > 0, noisy / np.where(quiet > 0, quiet, 1), np.nan)

    def lags(self) -> np.ndarray:
        """Return for each leaf whether updates follow the gradient while second moments hardly change.

        This holds for Adam, whose second moment hardly moves in one update. It does not hold for optimizers
        that normalise the result again, such as LAMB. The probe uses alternating gradients for some updates,
        and then small gradients of two sizes.

        >>> params = {"w": jnp.zeros(3)}
        >>> Probe.of(optax.adam(0.1), params).lags(), Probe.of(optax.lamb(0.1), params).lags()
        (array([ True]), array([False]))
        """
        none, once, twice = self._moved()[_LAGGING, -1]
        ratios = (twice - none) / np.where(once == none, np.nan, once - none)
        return np.abs(ratios - 2) < 0.1

    def step_sizes(
        self,
        *,
        by_size: np.ndarray | None = None,
        moments: Sequence[MomentConstants] | None = None,
        counts: tuple[int, ...] = (),
    ) -> np.ndarray:
        """Return the step size of each leaf: the update's size over the gradient's, times what divides it.

        The update's size is its share along the gradient, <u, g> / |g|, for a gradient of random signs in the
        leaf's shape: Muon's matrices move less along it than a sign does. The divisor is the preconditioner
        of Adam and its kin, with the constants `moments`. For leaves in `by_size` it is the gradient's size,
        so that the step size is the update's. By default, these are leaves that the preconditioner does not
        cover, and whose updates do not grow with the gradient. Both are probed if None.
        Momentum counts at its full strength, and weight decay does not. Parameters are taken to be 0.1, for
        optimizers that scale steps by them. 0 if the leaf did not move. The result is the largest over
        `counts`, at which schedules are held.

        >>> groups = {"sgd": optax.sgd(0.1, momentum=0.5), "adam": optax.adam(0.01)}
        >>> tx = optax.multi_transform(groups, {"a": "sgd", "b": "adam"})
        >>> Probe.of(tx, dict(a=jnp.zeros(3), b=jnp.zeros(3))).step_sizes().round(4)
        array([0.2 , 0.01])
        """
        covered = np.array([x is not None for x in covers(self._real.state, self._real.params)])
        is_by_size = ~covered & (self.normalises() == 1) if by_size is None else by_size
        if moments is None:
            moments = self.moment_constants()
        entry = _entry(NORM, self._num_leaves)
        found = []
        for count in counts or (self.count,):
            moved = self._both_ways(_PLUS, _MINUS, slice(-1, None), count) / entry
            found.append(moved * np.where(is_by_size, entry, self._divisors(moments, count)))
        return np.max(found, axis=0) * self._shape_factors()

    def averages_parameters(self) -> bool:
        """Return whether the state keeps an average of the parameters, over updates; False if unknown.

        The probe lets the parameters jump once, from 0 to 1. An average then loses the same share of the old
        value in every update. A reference point would stay, and what weight decay adds to a momentum grows
        differently.

        >>> Probe.of(optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(3)}).averages_parameters()
        False
        """
        found = self._outcome(self.count)
        for x in [] if found is None else found.states:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                continue
            first, _, last = (x[_JUMPED] - x[_FROM_ZERO]).astype(np.float64)
            # A sum of small values looks like an average with a very long memory.
            kept = (first > 5e-6) & (first < 1)
            expected = 1 - (1 - first[kept]) ** (NUM_ALTERNATING + 1)
            if np.any(np.abs(last[kept] - expected) < 3e-3 * expected):
                return True
        return False

    def moment_constants(self) -> tuple[MomentConstants, ...]:
        """Return the b2 and eps of Adam and its kin for each leaf; optax's defaults for others.

        Leaves whose moments are in one state have the same constants.

        >>> Probe.of(optax.adam(0.1, b2=0.95, eps=1e-6), {"w": jnp.zeros(3)}).moment_constants()
        (MomentConstants(b2=0.95, eps=1e-06),)
        """
        state_of_leaf = covers(self._real.state, self._real.params)
        moved = np.stack(
            [
                self._both_ways(_FROM_ZERO, _FROM_ZERO_BACK, 1),
                self._both_ways(_LITTLE, _LITTLE_BACK, 1),
            ]
        )
        first, second = self._second_moments(0), self._second_moments(1)
        known = {}
        for state in set(state_of_leaf) - {None}:
            own = np.array([state == x for x in state_of_leaf])
            known[state] = _constants(moved[:, own], first[:, own], second[:, own])
        return tuple(known.get(state, MomentConstants()) for state in state_of_leaf)

    def long_averages(self) -> Decays:
        """Return the share of themselves that long averages in the state keep per update; () without any.

        >>> Probe.of(optax.lion(0.1), {"w": jnp.zeros(3)}).long_averages()
        (0.99,)
        >>> Probe.of(optax.sgd(0.1, momentum=0.9), {"w": jnp.zeros(3)}).long_averages()
        ()
        """
        if not averages(self._real.state):
            return ()
        folded, found = self._folded, self._outcome(self.count)
        if folded is None or found is None:
            return ()

        def state(at: int) -> PyTree:
            values = [found.states[x][_PLUS, at] for x in folded.state_classes]
            # In the types of the run: half precision is too coarse for these averages.
            real = jax.tree.leaves(self._real.state)
            typed = [
                x if _is_key(y) else x.astype(y.dtype) for x, y in zip(values, real, strict=True)
            ]
            return jax.tree.unflatten(jax.tree.structure(folded.traced.state), typed)

        decays = decays_of(state(0), state(1))
        return () if set(decays) == {None} else decays

    @property
    def _num_leaves(self) -> int:
        return len(jax.tree.leaves(self._params))

    @functools.cached_property
    def _folded(self) -> FoldedUpdate | None:
        """The update on few elements per leaf, computed as on all; None if there is none.

        Masks and labels may ask for shapes, mostly for the number of axes. So state and expressions must be
        the real ones, but for the lengths of axes. If only the state is, it is used with a warning.
        """
        reason: Any = None
        alike: FoldedUpdate | None = None
        for shapes in _shortened([x.shape for x in jax.tree.leaves(self._params)]):
            try:
                folded = FoldedUpdate.of(self._reshaped(shapes), self._clocks.steady)
            except Exception as error:  # a user's own link may raise anything
                reason = reason or error
                continue
            if jax.tree.structure(folded.traced.state) == jax.tree.structure(self._real.state):
                if self._is_like_real(folded):
                    return folded
                alike = alike or folded
        smaller = "if leaves are smaller, and they are too large to try"
        if alike is None:
            self._warn(reason or f"its state has another structure {smaller}")
        else:
            self._warn(f"its updates are other expressions {smaller}")
        return alike

    def _is_like_real(self, folded: FoldedUpdate) -> bool:
        """Return whether updates are the real ones, but for the lengths of axes, and numbers from these."""
        if self._has_same_expressions(folded, ShapelessNumbering()):
            return True
        shaped = self._shaped_literals | _shaped_literals(folded.traced)
        return self._has_same_expressions(folded, ShapelessNumbering(shaped))

    def _has_same_expressions(self, folded: FoldedUpdate, numbering: ShapelessNumbering) -> bool:
        real, ours = (
            FoldedUpdate.of(traced, self._clocks.steady, lambda: numbering).expressions
            for traced in (self._real, folded.traced)
        )
        return real == ours

    @functools.cached_property
    def _shaped_literals(self) -> frozenset[tuple[int, int]]:
        return _shaped_literals(self._real)

    def _is_by_element(self, folded: FoldedUpdate) -> bool:
        """Return whether updates are computed by element, and the real ones as the ones of `folded`."""
        if not FoldedUpdate.of(self._real, frozenset()).is_by_element:
            return False
        return self._has_same_expressions(folded, ShapelessNumbering())

    def _reshaped(self, shapes: Sequence[tuple[int, ...]]) -> TracedUpdate:
        """Trace the update for leaves of the parameters that have other `shapes`."""
        return _reshaped(self._real.tx, self._params, shapes)

    def _warn(self, reason: Any) -> None:
        """Warn, once, that the optimizer cannot be asked."""
        if not self._has_warned:
            self._has_warned = True
            logging.warning(
                "optimizer() could not be tried on small gradients before training: %s. So what it does with "
                "gradients is not fully known, and the learning-rate rule for larger batches, its noise and "
                "its constants may be defaults. Choose the rule yourself, with Config.rule: "
                "jg.rules.adam_scale if it divides gradients by their size, as Adam does, and otherwise "
                "jg.rules.adascale.",
                f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason,
            )

    def _outcome(self, count: int) -> _Runs | None:
        """Return what the optimizer did with schedules held at `count`; None if that is unknown."""
        if count not in self._outcomes:
            self._outcomes[count] = None
            if self._folded is not None:
                entries, starts, values = _entries(self._num_leaves)
                try:
                    moved, states = self._compiled(entries, starts, values, count)
                except Exception as error:  # a user's own link may raise anything
                    self._warn(error)
                else:
                    moved = _without_infinities(moved)[..., self._folded.leaf_classes]
                    own = [_without_infinities(x) for x in states]
                    self._outcomes[count] = _Runs(moved.astype(np.float64), own)
        return self._outcomes[count]

    @functools.cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._run)

    def _run(self, entries: Array, starts: Array, values: Array, count: Any) -> tuple[Any, Any]:
        """Return what the optimizer did in runs: mean updates, `[runs, updates, classes]`, and states.

        All elements of a gradient are equal: one number of `entries`, `[runs, updates]`, for each update. So
        are all parameters: a run's number in `starts` when the state is made, and in `values` in updates.
        Schedules are held at `count`. Classes are leaves that the optimizer treats alike (`FoldedUpdate`);
        states are the ones after the first, second and last update (`_Runs.states`).
        """
        folded = self._folded
        assert folded is not None

        def one(entries: Array, start: Array, value: Array) -> tuple[Any, Any]:
            def updated(state: Any, entry: Array) -> tuple[Any, Any]:
                def gradient(x: Any) -> Array:
                    return jnp.full(x.shape, entry, x.dtype)

                moved, state = folded.update(gradient, state, value, count)
                means = [jnp.real(x).mean().astype(entries.dtype) for x in moved]
                return state, (jnp.stack(means), state)

            _, (moved, states) = jax.lax.scan(updated, folded.init(start), entries)
            return moved, [_without_key(x)[jnp.array([0, 1, -1])] for x in states]

        if folded.num_elements <= MAX_AT_ONCE:
            return jax.vmap(one)(entries, starts, values)
        return jax.lax.map(lambda run: one(*run), (entries, starts, values))

    def _run_noisy(self) -> np.ndarray | None:
        """Return means of updates under noise, `[runs, updates, leaves]`; None if unknown."""
        if self._folded is None:
            return None
        keys = jax.random.split(jax.random.key(0), NUM_RUNS)
        normal = jax.vmap(lambda key: jax.random.normal(key, (NUM_NOISY,)))(keys)
        noisy, quiet = NORM * (1 + NOISE * normal), jnp.full((1, NUM_NOISY), NORM)
        entries = jnp.concatenate([noisy, -noisy, quiet, -quiet])
        starts = jnp.full(len(entries), START)
        try:
            moved, _ = self._compiled(entries, starts, starts, self.count)
        except Exception as error:  # a user's own link may raise anything
            self._warn(error)
            return None
        return _without_infinities(moved)[..., self._folded.leaf_classes].astype(np.float64)

    def _moved(self, count: int | None = None) -> np.ndarray:
        found = self._outcome(self.count if count is None else count)
        if found is None:
            return np.zeros((_LAGGING.stop, NUM_ALTERNATING + 1, self._num_leaves))
        return found.moved

    def _both_ways(
        self, there: int, back: int, updates: int | slice, count: int | None = None
    ) -> np.ndarray:
        """Return the size of the change in these updates that changes sign with the gradient, `[leaves]`."""
        moved = self._moved(count)
        where = slice(updates) if isinstance(updates, int) else updates
        return (np.abs(moved[there, where] - moved[back, where]) / 2).sum(axis=0)

    def _second_moments(self, at: int) -> np.ndarray:
        """Return means of second moments after an update, for two gradients; 0 for leaves without one."""
        folded, found = self._folded, self._outcome(self.count)
        if folded is None or found is None:
            return np.zeros((2, self._num_leaves))
        numbered = jax.tree.unflatten(
            jax.tree.structure(folded.traced.state), [np.asarray(x) for x in folded.state_classes]
        )
        moments = []
        for own in second_moments(numbered, folded.traced.params):
            if own is None:
                moments.append(np.zeros(2))
            else:
                values = found.states[int(own)][[_FROM_ZERO, _LITTLE], at]
                moments.append(values.reshape(2, -1).astype(np.float64).mean(axis=1))
        return np.stack(moments, axis=1)

    def _divisors(self, moments: Sequence[MomentConstants], count: int) -> np.ndarray:
        """Return what divides each leaf's gradient after many updates; 1 if nothing does."""
        folded, found = self._folded, self._outcome(count)
        if folded is None or found is None:
            return np.ones(self._num_leaves)

        def means(state: PyTree) -> list[Array]:
            scale = preconditioner(state, folded.traced.params, by_leaf=moments)
            return [] if scale is None else [jnp.mean(x) for x in jax.tree.leaves(scale)]

        factors = folded.scales(means, [jnp.asarray(x[_PLUS, -1]) for x in found.states])
        if not factors:
            return np.ones(self._num_leaves)
        values = np.asarray(jax.device_get(factors), np.float64)
        return 1 / np.where(values > 0, values, 1)

    def _shape_factors(self) -> np.ndarray:
        """Return how much further each leaf moves along its gradient in its real shape, than here.

        If the leaves are large, it is measured for two smaller sizes, and continued as a power of the size.
        """
        ones = np.ones(self._num_leaves)
        shapes = {x.shape for x in jax.tree.leaves(self._params)}
        share = min((MAX_ELEMENTS / max(sum(map(math.prod, shapes)), 1)) ** 0.5, 1.0)
        try:
            if self._folded is None or self._is_by_element(self._folded):
                return ones
            # As the runs: their gradients have equal elements, in shapes that need not be single elements.
            here = self._along(self._folded, jnp.ones)
            there = self._along(self._resized(share))
            if share < 1:
                smaller = self._along(self._resized(share / 2))
                there *= (there / np.where(smaller > 0, smaller, np.nan)) ** -math.log2(share)
        except Exception as error:  # a user's own link may raise anything
            self._warn(error)
            return ones
        factors = there / np.where(here > 0, here, np.nan)
        return np.where(np.isfinite(factors) & (factors > 0), factors, 1.0)

    def _resized(self, share: float) -> FoldedUpdate:
        """Return the update for parameters whose axes are shorter by a factor."""

        leaves = jax.tree.leaves(self._params)
        traced = self._reshaped([tuple(math.ceil(n * share) for n in x.shape) for x in leaves])
        return FoldedUpdate.of(traced, self._clocks.steady)

    def _along(
        self, folded: FoldedUpdate, signs_of: Callable[[Sequence[int]], Array] | None = None
    ) -> np.ndarray:
        """Return how far the first update goes along a gradient, by default of random signs, `[leaves]`."""
        entry = _entry(NORM, self._num_leaves)
        leaves = jax.tree.leaves(folded.traced.params)
        shapes = [leaves[i].shape for i in folded.first_of_leaves]
        shapes_once = list({x.shape for x in leaves})

        @jax.jit
        def along(signs: list[Array], count: Any) -> Array:
            given = dict(zip(shapes_once, signs, strict=True))

            def moved(factor: float) -> list[Array]:
                def gradient(x: Any) -> Array:
                    return (factor * given[x.shape]).astype(x.dtype)

                return folded.update(gradient, folded.init(START), START, count)[0]

            pairs = zip(moved(entry), moved(-entry), shapes, strict=True)
            return jnp.stack([jnp.real(jnp.mean((x - y) * given[s])) / 2 for x, y, s in pairs])

        signs = list(map(signs_of or _signs, shapes_once))
        found = np.asarray(along(signs, self.count), np.float64)
        return np.abs(found)[folded.leaf_classes]


def noise_share(left: np.ndarray) -> float:
    """Return how much of the gradient's noise is left in what a normalising optimizer divides, in [0, 1].

    It follows from the mean update with and without noise, whose ratio (`Probe.noise_left`) is c / sqrt(c^2 +
    share d^2) for noise d on a gradient c. It is 1 for Adam and sign SGD, and 0.01 for Lion, which takes the
    sign of a momentum. The median of the leaves counts. If nothing is known, it is 1.

    >>> noise_share(Probe.of(optax.sign_sgd(0.1), {"w": jnp.zeros(3)}).noise_left()) > 0.9
    True
    >>> noise_share(Probe.of(optax.lion(0.1), {"w": jnp.zeros(3)}).noise_left()) < 0.1
    True
    """
    known = left[~np.isnan(left)]
    if not known.size:
        return 1.0
    median = float(np.clip(np.median(known), 1e-3, 1.0))
    return min((1 / median**2 - 1) / NOISE**2, 1.0)


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


def _epsilon(moved: np.ndarray, large: float, little: float) -> float:
    """Return eps from first updates for two gradient sizes c, which are proportional to c / (c + eps)."""
    seen = (moved > 0).all(axis=0)
    ratio = np.minimum(moved[1, seen] / moved[0, seen], 1.0)
    below = ratio * large - little
    of_adam = below > 1e-4 * little  # updates of other optimizers grow with the gradient
    if not of_adam.any():
        return math.nan
    return float(np.median(large * little * (1 - ratio[of_adam]) / below[of_adam]))


def _entries(num_leaves: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the main probe's gradients, `[runs, updates]`, and the parameters in `init` and in updates."""
    one, little = _entry(NORM, num_leaves), _entry(NORM**2, num_leaves)
    constant = [one, -one, 2 * one, -2 * one, one, -one, little, -little, one]
    entries = np.repeat(np.array(constant)[:, None], NUM_ALTERNATING + 1, axis=1)
    alternating = NORM * np.where(np.arange(NUM_ALTERNATING) % 2 == 0, 1.0, -1.0)
    lagging = [np.append(alternating, size * NORM) for size in (0.0, 0.05, 0.1)]
    starts = np.full(_LAGGING.stop, START)
    starts[_FROM_ZERO:_JUMPED] = 0.0
    values = starts.copy()
    starts[_JUMPED], values[_JUMPED] = 0.0, 1.0
    dtype = jnp.zeros(()).dtype
    found = (np.concatenate([entries, lagging]), starts, values)
    return tuple(x.astype(dtype) for x in found)  # type: ignore[return-value]


def _entry(norm: float, num_leaves: int) -> float:
    return norm / math.sqrt(max(num_leaves, 1))


def _signs(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), shape)


def _wide(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype))


def _reshaped(
    tx: optax.GradientTransformation, params: PyTree, shapes: Sequence[tuple[int, ...]]
) -> TracedUpdate:
    leaves, structure = jax.tree.flatten(params)
    made = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, leaves, strict=True)]
    return traced_update(tx, structure.unflatten(made))


def _shaped_literals(traced: TracedUpdate) -> frozenset[tuple[int, int]]:
    """Return the literals of an update that shapes give: they change if axes are a little longer."""
    found: frozenset[tuple[int, int]] = frozenset()
    shapes = [x.shape for x in jax.tree.leaves(traced.params)]
    for step in (
        1,
        -1,
    ):  # axes get longer by other lengths, so that the ratios of lengths change too
        nudged = [
            tuple(n + 1 + i for n, i in zip(shape, range(len(shape))[::step], strict=True))
            for shape in shapes
        ]
        try:
            other = _reshaped(traced.tx, traced.params, nudged)
        except Exception as error:  # a user's own link may raise anything; then no literal is known
            logging.debug("the optimizer does not take leaves of other lengths: %r", error)
        else:
            found |= shaped_literals(traced.jaxpr, other.jaxpr) or frozenset()
    return found


def _shortened(shapes: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield smaller and then less small shapes for leaves, at last their own, as far as these can be run."""
    ways: list[Callable[[tuple[int, ...]], tuple[int, ...]]] = [
        *(functools.partial(_cut, at=at) for at in CUTS),
        lambda shape: shape[:1] + _cut(shape[1:], at=1),
        lambda shape: _cut(shape[:-1], at=1) + shape[-1:],
        lambda shape: shape,
    ]
    tried = []
    for way in ways:
        made = [tuple(max(n, 1) for n in way(shape)) for shape in shapes]
        if made not in tried and sum(map(math.prod, set(made))) <= MAX_ELEMENTS:
            tried.append(made)
            yield made


def _cut(shape: tuple[int, ...], at: int) -> tuple[int, ...]:
    return tuple(min(n, at) for n in shape)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_key(x: Array) -> Array:
    """Return an array that NumPy knows: random keys as their numbers."""
    return jax.random.key_data(x) if _is_key(x) else x


def _without_infinities(values: Any) -> np.ndarray:
    """Return values with NaN, which stands for unknown, in place of infinities: they have no difference.

    A state may begin at infinity, as the best loss of `reduce_on_plateau` does.
    """
    found = np.array(values)
    if jnp.issubdtype(found.dtype, jnp.inexact):
        found[np.isinf(found)] = np.nan
    return found
