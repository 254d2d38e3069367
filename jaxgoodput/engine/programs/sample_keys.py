"""A random key for each sample, made from the run's key and from which sample it is.

Random numbers of a sample then depend neither on the samples beside it nor on the replica, the micro-batch or
the step that it is part of.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, PyTree, UInt

from jaxgoodput.data.rows import NumberedRows
from jaxgoodput.engine.step import Problem

# The default kind of keys may be another one, such as "rbg". `jax.vmap` over keys of that kind draws the
# numbers of all of them from the first.
KIND = "threefry2x32"


def with_sample_keys(problem: Problem) -> Problem:
    """Return a problem whose loss gets a key for each sample, `[batch]`, in place of one for all of them.

    Its batches are `NumberedRows`, which a `Loader` hands out if it is `numbered`.
    """
    loss = problem.loss_and_state

    def loss_and_state(
        params: PyTree, model_state: PyTree, batch: NumberedRows, key: Array, **asked: Any
    ) -> tuple[Any, PyTree]:
        keys = sample_keys(key, batch.numbers)
        return loss(params, model_state, batch.own, keys, **asked)

    return dataclasses.replace(problem, loss_and_state=loss_and_state, has_sample_keys=True)


def sample_keys(key: Array, numbers: UInt[Array, "rows words"]) -> Array:
    """Return a key for each row of `numbers`, `[rows]`. Equal rows have equal keys."""
    base = jax.random.wrap_key_data(jax.random.key_data(key)[:2], impl=KIND)

    def of_one(words: Array) -> Array:
        found = base
        for word in words:
            found = jax.random.fold_in(found, word)
        return found

    return jax.vmap(of_one)(numbers)
