"""Optimizers of table rows: the state that a row carries beside its embedding, and the update of both.

A row that no sample of a batch reads keeps every bit. For SGD and Adagrad this equals a dense optimizer,
whose update of such a row is zero. Adam differs: its dense moments decay at every step, here only at the
steps that read the row, and each row counts its own steps for the bias correction.

All arithmetic is in float32 and rounded to the row's dtype at the end.
"""

import abc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgoodput.embedding.rows import EMBEDDING, Field


class RowOptimizer(abc.ABC):
    """The update rule of a table's rows. Implementations are frozen dataclasses."""

    @abc.abstractmethod
    def fields(self, dim: int) -> tuple[Field, ...]:
        """Return the fields of optimizer state, such as moments, that are stored with every row."""

    @abc.abstractmethod
    def begin(self) -> dict[str, float]:
        """Return the value that each field of a new row starts with, by the field's name."""

    @abc.abstractmethod
    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """Return rows after a gradient `float32 [n, dim]`; the learning rate is multiplied by `factor`."""

    def divisor(self, row: dict[str, Array]) -> Array:
        """Return what the update divides a gradient by, `[n, dim]`.

        The noise of row gradients is measured in these units. Elements that are
        not known yet are infinite, and are left out of the measurement. The default is 1.
        """
        return jnp.ones(row[EMBEDDING].shape, jnp.float32)


@dataclass(frozen=True)
class Sgd(RowOptimizer):
    """Gradient descent, without any state beside the rows."""

    learning_rate: float

    def fields(self, dim: int) -> tuple[Field, ...]:
        """Return no fields, as this optimizer has no state."""
        return ()

    def begin(self) -> dict[str, float]:
        """Return {}: this optimizer keeps no state beside a row."""
        return {}

    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """Return x - rate * g: rows after a gradient g; the rate includes `factor`."""
        value = row[EMBEDDING].astype(jnp.float32)
        return {EMBEDDING: value + grads * (-self.learning_rate * factor)}


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """`optax.adagrad` for rows of a table. The last bits of results may differ from optax."""

    learning_rate: float
    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def fields(self, dim: int) -> tuple[Field, ...]:
        """Return one field: the sum of squared gradients of each element."""
        return (Field("squares", dim),)

    def begin(self) -> dict[str, float]:
        """Return the value that the sums of squared gradients of a new row start from."""
        return {"squares": self.initial_accumulator_value}

    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """Return x - rate * g / sqrt(s + eps), where s has grown by g^2."""
        squares = row["squares"] + grads * grads
        # Without the barrier, the compiler may divide by way of an approximate 1 / sqrt. Its last bit
        # depends on how a loop was split, and a row must have the same bits wherever it is.
        root = jax.lax.optimization_barrier(jnp.sqrt(squares + self.eps))
        scaled = jnp.where(squares > 0, grads / root, 0.0)
        value = row[EMBEDDING].astype(jnp.float32)
        return {EMBEDDING: value + scaled * (-self.learning_rate * factor), "squares": squares}

    def divisor(self, row: dict[str, Array]) -> Array:
        """Return what a gradient is divided by: the root of the sums of squares, without this gradient."""
        return _root(row["squares"], self.eps)


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Adam for rows of a table; a row's number of steps is how many batches have read it."""

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def fields(self, dim: int) -> tuple[Field, ...]:
        """Return the fields for both moments, and for the number of steps that read the row."""
        return (Field("mean", dim), Field("squares", dim), Field("count", 1, "int32"))

    def begin(self) -> dict[str, float]:
        """Return zeros: both moments and the number of steps of a new row."""
        return {"mean": 0.0, "squares": 0.0, "count": 0.0}

    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """Return x - rate * m' / (sqrt(v') + eps), with the bias-corrected moments m' and v'."""
        count = row["count"] + 1
        mean = self.b1 * row["mean"] + (1 - self.b1) * grads
        squares = self.b2 * row["squares"] + (1 - self.b2) * grads * grads
        steps = count.astype(jnp.float32)
        unbiased_mean = mean / (1 - jnp.power(self.b1, steps))
        unbiased = squares / (1 - jnp.power(self.b2, steps))
        value = row[EMBEDDING].astype(jnp.float32)
        step = self.learning_rate * factor * unbiased_mean / (jnp.sqrt(unbiased) + self.eps)
        return {EMBEDDING: value - step, "mean": mean, "squares": squares, "count": count}

    def divisor(self, row: dict[str, Array]) -> Array:
        """Return the root of the bias-corrected second moment, without this gradient."""
        steps = jnp.maximum(row["count"], 1).astype(jnp.float32)
        return _root(row["squares"] / (1 - jnp.power(self.b2, steps)), self.eps)


def _root(squares: Array, eps: float) -> Array:
    """Return sqrt(squares) + eps, infinite if the squares are 0: no gradient has been seen yet."""
    return jnp.sqrt(squares) + (eps + jnp.where(squares > 0, 0.0, jnp.inf))
