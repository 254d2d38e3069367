"""Trying a loss on a few rows, to find out what it does with a batch before a run relies on it."""

import math
from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxgoodput.engine.state import Loss, TrainState, cast
from jaxgoodput.engine.step import Problem
from jaxgoodput.parallel.strategy import Layout

# A loss couples samples if regrouping them changes it by more than this fraction. In bfloat16, whose
# rounding is as large, the threshold is ten times as high.
COUPLED = 1e-3
NUM_KEYS = 16  # random keys with which a loss is tried that seems to grow with its batch


class LossChecks:
    """Tries the loss of a problem on the devices of one layout."""

    def __init__(self, problem: Problem, layout: Layout):
        self.problem = problem
        self.layout = layout

    def couples_samples(self, state: TrainState, four: PyTree) -> bool:
        """Return whether the loss of a sample depends on the samples beside it, tried on `four` of them.

        A sum over samples, whatever its keys do to a position, has f(abcd) + f(cdab) = f(abab) + f(cdcd).
        False if the loss cannot tell, because it is not finite, or the same for all samples.
        """

        def of(*order: int) -> float:
            return self._total_of(state, four, order, state.key)

        whole, split = of(0, 1, 2, 3) + of(2, 3, 0, 1), of(0, 1, 0, 1) + of(2, 3, 2, 3)
        share = COUPLED * (1 if self.problem.compute_dtype is None else 10)
        return abs(whole - split) > share * (abs(whole) + abs(split))

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
        if isinstance(out, Loss):  # its weight says how many samples it covers
            return False

        def of(copies: int, key: Array) -> float:
            places = np.tile(np.arange(len(jax.tree.leaves(rows)[0])), copies)
            return self._total_of(state, rows, places, key)

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
        self, state: TrainState, rows: PyTree, places: Sequence[int] | np.ndarray, key: Array
    ) -> float:
        """Return the total loss of the rows with the indices `places`, each repeated for every replica."""
        places = np.repeat(np.asarray(places), self.layout.num_replicas)
        batch = jax.device_put(jax.tree.map(lambda x: x[places], rows), self.layout.batch_sharding)
        return float(self._total(state.params, state.model_state, batch, key))

    @cached_property
    def _total(self):
        def total(params: PyTree, model_state: PyTree, batch: PyTree, key: Array) -> Array:
            params = cast(params, self.problem.compute_dtype)
            out, _ = self.problem.loss_and_state(params, model_state, batch, key)
            value = jnp.asarray(out.sum if isinstance(out, Loss) else out)
            return jnp.sum(value.astype(jnp.float32))

        return jax.jit(total)
