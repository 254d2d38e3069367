"""Trying or tracing a loss, to find out what it does with a batch before a run relies on it."""

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jaxtyping import Array, PyTree

from jaxgoodput.engine.programs.program import seldom_options
from jaxgoodput.engine.state import Loss, TrainState, cast, combine, split, wide
from jaxgoodput.engine.step import Problem, is_summed
from jaxgoodput.parallel.partition import path_name
from jaxgoodput.parallel.strategy import Layout, anywhere, axes_of

# A loss couples samples if regrouping them changes it, or its gradient, by more than this fraction. In
# bfloat16, whose rounding is as large, the threshold is ten times as high.
COUPLED = 1e-3
NUM_KEYS = 16  # random keys with which a loss is tried that seems to grow with its batch
MAX_CHOICES = 8  # choices of unlike samples, each by another leaf of theirs
MAX_LOOKED_AT = 4096  # numbers of each leaf of a sample by which samples are told apart


class LossChecks:
    """Tries the loss of a problem on the devices of one layout."""

    def __init__(self, problem: Problem, layout: Layout):
        self.problem = problem
        self.layout = layout
        self._regrouped: dict[tuple[int, int], jax.stages.Compiled] = {}
        """The compiled comparison of `couples_samples`, by half the number of samples and the loss."""

    def couples_samples(self, state: TrainState, rows: PyTree) -> bool:
        """Return whether a loss of a sample, or its gradient, depends on the samples beside it.

        `rows` are an even number of samples, one half unlike the other (`unlike_halves`). A sum over samples,
        whatever its keys do to a position, has f(ab) + f(ba) = f(aa) + f(bb) for halves a and b, and so has
        its gradient. The loss itself may be the same for all samples, such as for a head of zeros; its
        gradient is not. False if neither can tell, because it is not finite, or the same for all samples.
        """
        return any(self._couples(state, rows, which) for which in range(self.problem.num_losses))

    def _couples(self, state: TrainState, rows: PyTree, which: int) -> bool:
        half = len(jax.tree.leaves(rows)[0]) // 2
        a, b = np.arange(half), np.arange(half, 2 * half)
        pairs = [np.concatenate(pair) for pair in ((a, b), (b, a), (a, a), (b, b))]
        places = np.stack([np.repeat(pair, self.layout.num_replicas) for pair in pairs])
        whole = self.layout.replicated
        arguments = (
            state.params,
            state.model_state,
            jax.device_put(rows, whole),
            jax.device_put(places, whole),
            state.key,
        )
        if (half, which) not in self._regrouped:
            traced = self._regroup(which).trace(*arguments)
            options = seldom_options(traced)
            self._regrouped[half, which] = traced.lower().compile(compiler_options=options)
        found = self._regrouped[half, which](*arguments)
        values, differences, sizes = (np.asarray(x, np.float64) for x in jax.device_get(found))
        share = COUPLED * (1 if self.problem.compute_dtype is None else 10)
        ab, ba, aa, bb = values
        by_value = abs(ab + ba - aa - bb) > share * (abs(ab + ba) + abs(aa + bb))
        return bool(by_value or math.sqrt(differences) > share * sizes)

    def added_state(
        self, state: TrainState, rows: PyTree
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the paths of the leaves of the model state that add over samples, and of differing others.

        An example of the first is a count of tokens: what four samples change is what each pair of them
        changes, added up. The second are leaves that are not floating and change differently with each pair.
        Neither holds leaves that `Problem.summed` names. `rows` are four samples, one half unlike the other.
        """

        def changes(model_state: PyTree) -> tuple[dict[str, np.ndarray], ...]:
            def change(*places: int) -> dict[str, np.ndarray]:
                batch = self._placed(rows, places)
                after = self._state_after(state.params, model_state, batch, state.key)
                pairs = zip(_named(after), _named(model_state), strict=True)
                return {name: _moved(_number(x), _number(old)) for (name, x), (_, old) in pairs}

            return change(0, 1, 2, 3), change(0, 1), change(2, 3)

        both, first, second = changes(state.model_state)
        # An average of sums looks like a sum as long as it is 0.
        whole = self._placed(rows, (0, 1, 2, 3))
        later = changes(self._state_after(state.params, state.model_state, whole, state.key))
        added, differing = [], []
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state):
            name = path_name(path)
            if is_summed(self.problem, path) or not np.isfinite(both[name]).all():
                continue
            if _adds(both[name], first[name], second[name]) and _adds(*(x[name] for x in later)):
                added.append(name)
            elif (
                not jnp.issubdtype(leaf.dtype, jnp.floating) and (first[name] != second[name]).any()
            ):
                differing.append(name)
        return tuple(added), tuple(differing)

    def grows_with_batch(self, state: TrainState, rows: PyTree) -> bool:
        """Return whether a loss that is a plain number is a sum over the batch, tried with copies of `rows`.

        Doubling the batch doubles a sum, apart from terms that do not depend on samples, and leaves a mean
        unchanged. Any other growth is not reported. Random numbers may look like growth, so several keys
        are tried.
        """
        given = jax.tree.map(jnp.asarray, rows)
        out, _ = jax.eval_shape(
            self.problem.loss_and_state, state.params, state.model_state, given, state.key
        )
        return any(
            self._grows(state, rows, which)
            for which, loss in enumerate(self.problem.each_loss(out))
            # The weight of a `Loss` says how many samples it covers.
            if not isinstance(loss, Loss) and jnp.ndim(loss) == 0
        )

    def _grows(self, state: TrainState, rows: PyTree, which: int) -> bool:
        def of(copies: int, key: Array) -> float:
            places = np.tile(np.arange(len(jax.tree.leaves(rows)[0])), copies)
            return self._total_of(state, rows, places, key, which)

        one, two = (of(copies, state.key) for copies in (1, 2))
        if not abs(two - one) > 0.05 * abs(two):  # also false if they are not finite
            return False
        keys = [jax.random.fold_in(state.key, number) for number in range(NUM_KEYS)]
        tried = np.asarray([[of(copies, key) for copies in (1, 2, 4)] for key in keys])
        first, then = tried[:, 1] - tried[:, 0], tried[:, 2] - tried[:, 1]
        noise = first.std() / math.sqrt(NUM_KEYS)
        is_growth = abs(first.mean()) > max(0.05 * abs(tried[:, 1].mean()), 5 * noise)
        is_linear = abs(then.mean() - 2 * first.mean()) < 0.25 * abs(then.mean())
        return bool(is_growth and is_linear)

    def _total_of(
        self,
        state: TrainState,
        rows: PyTree,
        places: Sequence[int] | np.ndarray,
        key: Array,
        which: int,
    ) -> float:
        """Return the total of a loss over the rows with the indices `places`, each repeated by replica."""
        batch = self._placed(rows, places)
        return float(self._total(state.params, state.model_state, batch, key, which))

    def _placed(self, rows: PyTree, places: Sequence[int] | np.ndarray) -> PyTree:
        """Return the rows with these indices, each repeated for every replica, on the devices."""
        places = np.repeat(np.asarray(places), self.layout.num_replicas)
        return jax.device_put(jax.tree.map(lambda x: x[places], rows), self.layout.batch_sharding)

    @cached_property
    def _total(self):
        def total(
            params: PyTree, model_state: PyTree, batch: PyTree, key: Array, which: int
        ) -> Array:
            return self._called(params, model_state, batch, key, which)[0]

        return jax.jit(total, static_argnums=4)

    @cached_property
    def _state_after(self):
        def after(params: PyTree, model_state: PyTree, batch: PyTree, key: Array) -> PyTree:
            return self._called(params, model_state, batch, key)[1]

        return jax.jit(after)

    def _regroup(self, which: int) -> Any:
        """Return the comparison: losses of four batches, |sum of signed gradients|^2, sum of |gradient|.

        One gradient after the other, so that two trees of the model's size are needed, as in a step.
        """
        batch_sharding = self.layout.batch_sharding

        def run(params: PyTree, model_state: PyTree, rows: PyTree, places: Array, key: Array):
            kept, rest = split(params, self.problem.mask(params))

            def total(kept: PyTree, batch: PyTree) -> Array:
                return self._called(combine(kept, rest), model_state, batch, key, which)[0]

            def add(carry: tuple[PyTree, Array], one: tuple[Array, Array]):
                signed, sizes = carry
                own, sign = one
                batch = jax.lax.with_sharding_constraint(
                    jax.tree.map(lambda x: x[own], rows), batch_sharding
                )
                value, grads = jax.value_and_grad(total)(kept, batch)
                signed = jax.tree.map(lambda s, g: s + sign.astype(g.dtype) * g, signed, grads)
                return (signed, sizes + jnp.sqrt(_squares(grads))), value

            signs = jnp.array([1.0, 1.0, -1.0, -1.0], jnp.float32)
            start = (jax.tree.map(jnp.zeros_like, kept), jnp.zeros((), jnp.float32))
            (signed, sizes), values = jax.lax.scan(add, start, (places, signs))
            return values, _squares(signed), sizes

        return jax.jit(run)

    def _called(
        self, params: PyTree, model_state: PyTree, batch: PyTree, key: Array, which: int = 0
    ) -> tuple[Array, PyTree]:
        """Return the total of the loss with this number, and the model state after it."""
        params = cast(params, self.problem.compute_dtype)
        out, after = self.problem.loss_and_state(params, model_state, batch, key)
        loss = self.problem.each_loss(out)[which]
        return jnp.sum(wide(loss.sum if isinstance(loss, Loss) else loss)), after


def has_constraints(problem: Problem, state: TrainState, batch: PyTree) -> bool:
    """Return whether the loss holds sharding constraints. `state` and `batch` are abstract."""
    return bool(_constraints(problem, state, batch))


def constrained_axes(problem: Problem, state: TrainState, batch: PyTree) -> frozenset[str]:
    """Return the axes of the mesh that the loss's sharding constraints name.

    `state` and `batch` are abstract.
    """
    specs = (
        getattr(one.params["sharding"], "spec", ()) for one in _constraints(problem, state, batch)
    )
    return frozenset(axis for spec in specs for entry in spec for axis in axes_of(entry))


def _constraints(problem: Problem, state: TrainState, batch: PyTree) -> list[JaxprEqn]:
    """Return the sharding constraints of the loss."""
    loss = anywhere(problem.loss_and_state)
    key = jax.eval_shape(lambda: jax.random.key(0))
    traced = jax.make_jaxpr(loss)(
        jax.eval_shape(lambda p: cast(p, problem.compute_dtype), state.params),
        state.model_state,
        batch,
        key,
    )

    def found(jaxpr: Jaxpr) -> list[JaxprEqn]:
        own = [one for one in jaxpr.eqns if one.primitive.name == "sharding_constraint"]
        inner = (found(each) for one in jaxpr.eqns for each in jaxprs_in_params(one.params))
        return [*own, *itertools.chain.from_iterable(inner)]

    return found(traced.jaxpr)


def unlike_halves(rows: PyTree, half: int) -> list[PyTree]:
    """Return choices of `2 * half` rows each: the first half has few fillers, the second half many.

    A filler is the number that a leaf holds most often, such as a mask's 0 or the padding of tokens. Each of
    the first leaves makes a choice, so that halves differ in weight in one of them if any samples do.
    """
    count = len(jax.tree.leaves(rows)[0])
    chosen: dict[tuple[int, ...], None] = {}
    for leaf in jax.tree.leaves(rows)[:MAX_CHOICES]:
        numbers = np.asarray(leaf).reshape(count, -1)
        numbers = numbers[:, :: -(-max(numbers.shape[1], 1) // MAX_LOOKED_AT)]
        values, times = np.unique(numbers, return_counts=True)
        share = (
            (numbers == values[np.argmax(times)]).mean(axis=1) if numbers.size else np.zeros(count)
        )
        order = np.argsort(share, kind="stable")
        chosen[(*order[:half].tolist(), *order[count - half :].tolist())] = None
    return [jax.tree.map(lambda x, own=list(own): x[own], rows) for own in chosen]


def _squares(tree: PyTree) -> Array:
    """Return the sum of squares of all leaves, a float32."""
    total = jnp.zeros((), jnp.float32)
    for x in jax.tree.leaves(tree):
        total += jnp.sum(jnp.square(jnp.abs(x)).astype(jnp.float32))
    return total


def _named(tree: PyTree) -> list[tuple[str, Array]]:
    return [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def _moved(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    # A minimum that no sample has lowered stays infinite, and infinity less itself is no number.
    with np.errstate(invalid="ignore"):
        return np.where(np.equal(new, old), 0, np.subtract(new, old))


def _number(x: Array) -> np.ndarray:
    """Return a leaf on the host as float64, wide enough for the difference of two counts or keys."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    host = np.asarray(jax.device_get(x))
    return host.astype(np.complex128 if host.dtype.kind == "c" else np.float64)


def _adds(both: np.ndarray, first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether what four samples change is the sum, not the mean, of what each pair changes."""
    size = np.max(np.abs(both), initial=0.0)
    is_sum = np.max(np.abs(both - first - second), initial=0.0) <= 1e-3 * size
    # A running maximum, too, may change by the sum if only one of the pairs changes it.
    changed_twice = (np.abs(first) > 1e-2 * size) & (np.abs(second) > 1e-2 * size)
    return bool(size > 0 and is_sum and changed_twice.any())
