"""Optimizers of rows: what they keep in a row beside its embedding, and how a gradient changes both.

A row that no sample of a batch reads stays as it is, to the bit. For SGD and Adagrad that is what a dense
optimizer does, whose update of such a row is zero. Adam's dense moments shrink with every step; here they
shrink with every step that reads the row, and each row has its own count for the correction of its bias.

Everything is worked out in float32 and rounded to the row's dtype at the end.
"""

import abc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxgoodput.embedding.rows import EMBEDDING, Field


class RowOptimizer(abc.ABC):
    """How rows learn; a frozen dataclass."""

    @abc.abstractmethod
    def fields(self, dim: int) -> tuple[Field, ...]:
        """What it keeps of a row."""

    @abc.abstractmethod
    def begin(self) -> dict[str, float]:
        """With what the fields of a new row are filled."""

    @abc.abstractmethod
    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """Rows after a gradient `float32 [n, dim]`; `factor` multiplies the learning rate."""

    def divisor(self, row: dict[str, Array]) -> Array:
        """What it divides a gradient by, `[n, dim]`: the coordinates in which noise is measured.

        Infinite where that is not known yet, which leaves the element out. 1 unless overridden.
        """
        return jnp.ones(row[EMBEDDING].shape, jnp.float32)


@dataclass(frozen=True)
class Sgd(RowOptimizer):
    """Gradient descent: nothing is kept."""

    learning_rate: float

    def fields(self, dim: int) -> tuple[Field, ...]:
        """None."""
        return ()

    def begin(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """x - rate * g."""
        value = row[EMBEDDING].astype(jnp.float32)
        return {EMBEDDING: value + grads * (-self.learning_rate * factor)}


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """`optax.adagrad`, row by row; the last bits may be others."""

    learning_rate: float
    initial_accumulator_value: float = 0.1
    eps: float = 1e-7

    def fields(self, dim: int) -> tuple[Field, ...]:
        """The sum of squared gradients of each element."""
        return (Field("squares", dim),)

    def begin(self) -> dict[str, float]:
        """What the sums start from."""
        return {"squares": self.initial_accumulator_value}

    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """s += g^2; x - rate * g / sqrt(s + eps)."""
        squares = row["squares"] + grads * grads
        # The barrier keeps the compiler from dividing by way of an approximate 1 / sqrt, whose last bit goes
        # by how a loop was cut: a row is to have the same bits wherever it is.
        root = jax.lax.optimization_barrier(jnp.sqrt(squares + self.eps))
        scaled = jnp.where(squares > 0, grads / root, 0.0)
        value = row[EMBEDDING].astype(jnp.float32)
        return {EMBEDDING: value + scaled * (-self.learning_rate * factor), "squares": squares}

    def divisor(self, row: dict[str, Array]) -> Array:
        """The root of the sums, before this gradient."""
        return _root(row["squares"], self.eps)


@dataclass(frozen=True)
class Adam(RowOptimizer):
    """Adam whose steps are those that read the row."""

    learning_rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def fields(self, dim: int) -> tuple[Field, ...]:
        """Both moments, and how often the row was read."""
        return (Field("mean", dim), Field("squares", dim), Field("count", 1, "int32"))

    def begin(self) -> dict[str, float]:
        """Zeros."""
        return {"mean": 0.0, "squares": 0.0, "count": 0.0}

    def update(
        self, row: dict[str, Array], grads: Array, factor: Array | float
    ) -> dict[str, Array]:
        """m, v towards g, g^2; x - rate * m' / (sqrt(v') + eps), m' and v' freed of their bias."""
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
        """The root of the mean square, freed of its bias, before this gradient."""
        steps = jnp.maximum(row["count"], 1).astype(jnp.float32)
        return _root(row["squares"] / (1 - jnp.power(self.b2, steps)), self.eps)


def _root(squares: Array, eps: float) -> Array:
    return jnp.sqrt(squares) + (eps + jnp.where(squares > 0, 0.0, jnp.inf))
