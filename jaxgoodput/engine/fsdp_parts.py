"""A replica that holds its FSDP part of the parameters, as `local_sums` sees it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxgoodput.optim import noise
from jaxgoodput.parallel.gather import Collectives, is_cut, value_and_grad
from jaxgoodput.parallel.strategy import FSDP_AXIS


@dataclass(frozen=True)
class FsdpParts:
    """Parameters cut over "fsdp", gathered leaf by leaf; `specs` are those of trained and other leaves.

    `taps` takes the squared norm of each replica's own gradient on the way; without it the norms are
    left to be taken of the copy's gradient (see `noise_groups.py`).
    """

    collectives: Collectives
    specs: tuple[PyTree, PyTree]
    taps: bool

    def value_and_grad(
        self, objective: Any, kept: PyTree, rest: PyTree, *, labels: Any, measure: bool
    ) -> tuple[tuple[Array, Any], PyTree, Array | None]:
        """(value, aux), gradients cut like `kept`, and the replica's squared norms where taps take them."""
        tapped = measure and self.taps
        found, grads, norms = value_and_grad(
            objective,
            kept,
            rest,
            specs=self.specs,
            collectives=self.collectives,
            labels=noise.label_indices(labels, kept),
            num_labels=len(noise.label_names(labels, kept)) if tapped else 0,
        )
        return found, grads, norms if tapped else None

    def sum_over_copy(self, x: Array) -> Array:
        """A number summed over the replicas of a copy."""
        return jax.lax.psum(x, FSDP_AXIS)

    @property
    def is_first(self) -> Array:
        """1 on the copy's first replica, 0 on the others."""
        return (jax.lax.axis_index(FSDP_AXIS) == 0).astype(jnp.float32)

    def counted_once(self, grads: PyTree) -> PyTree:
        """The gradients, those of uncut leaves 0 on all but the copy's first replica."""
        return jax.tree.map(
            lambda g, spec: g if is_cut(spec) else g * self.is_first, grads, self.specs[0]
        )
