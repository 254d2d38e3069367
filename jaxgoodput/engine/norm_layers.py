"""The gradient of every sample, of normalisation layers alone: noise from one gradient of a whole batch.

Under a global loss a micro-batch has one gradient. What single samples would have had is cheap for one kind
of parameter, a factor on the output of a normalisation layer, and its noise scale is that of the model up to
a constant near 1 (Gray et al. 2024, 2411.00999). So every such layer of flax linen gets a factor of one for
each sample and feature, shared by all layers of as many features; its gradient is what is measured. The
model computes what it did.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
Factors = dict[int, Array]
"""By number of features: `[batch, features]`."""


def ones(run: Callable[[], PyTree], num_samples: int) -> Factors:
    """The factors of whatever layers `run` calls; raises ValueError where it calls none."""
    seen: set[int] = set()

    def note(y: Array) -> Array:
        if y.shape[0] == num_samples:
            seen.add(y.shape[-1])
        return y

    with _on_outputs(note):
        jax.eval_shape(run)
    if not seen:
        raise ValueError(
            "Statistics.from_norm_layers needs a model with normalisation layers of flax.linen (LayerNorm, "
            f"RMSNorm, GroupNorm) whose outputs have a row per sample ({num_samples} here); the loss calls "
            "none. Leave it False: the noise then comes from micro-batches, or from pairs of updates."
        )
    return {features: jnp.ones((num_samples, features)) for features in sorted(seen)}


@contextmanager
def scaled(factors: Factors) -> Iterator[None]:
    """Multiply what normalisation layers put out by the factors, while this lasts."""

    def scale(y: Array) -> Array:
        found = factors.get(y.shape[-1])
        if found is None or y.shape[0] != len(found):
            return y
        middle = (1,) * (y.ndim - 2)
        return y * found.reshape(len(found), *middle, found.shape[-1]).astype(y.dtype)

    with _on_outputs(scale):
        yield


def sum_of_squares(grads: Factors) -> Array:
    """The squared norm of every sample's gradient, `[batch]`."""
    return jnp.stack([jnp.sum(jnp.square(g), axis=-1) for g in grads.values()]).sum(axis=0)


@contextmanager
def _on_outputs(change: Callable[[Array], Array]) -> Iterator[None]:
    def intercept(
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        out = call(*arguments, **named)
        is_norm = isinstance(context.module, _LAYERS) and context.method_name == "__call__"
        return change(out) if is_norm else out

    with nn.intercept_methods(intercept):
        yield
