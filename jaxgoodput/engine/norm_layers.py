"""Per-sample gradients of normalisation layers alone: noise from one gradient of a whole batch.

Under a global loss a micro-batch has one gradient. Per-sample gradients are cheap for one kind of parameter:
a factor on the output of a normalisation layer. Its noise scale equals the model's up to a constant near 1
(Gray et al. 2024, 2411.00999). So every such layer of flax linen gets a factor of one for each sample and
feature, shared by all layers with as many features, and its gradient is measured. The model's results do not
change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
NOTHING = (
    "Statistics.from_norm_layers needs a model with normalisation layers of flax.linen (LayerNorm, RMSNorm, "
    "GroupNorm) whose outputs have a row per sample. The loss calls none of them directly: it has none, or "
    "calls them inside a jax.jit, jax.checkpoint or scan body that was made outside the loss, which JAX does "
    "not trace again. Make that inside the loss, or leave from_norm_layers False: noise then comes from "
    "micro-batches, or from a part of the rows."
)
Factors = dict[int, Array]
"""Factors `[batch, features]`, by number of features."""


def ones(run: Callable[[PyTree], PyTree], batch: PyTree) -> Factors:
    """Return factors of one for the normalisation layers that `run(batch)` calls on rows of the batch.

    A layer works on rows if its leading axis follows the number of rows. Raises ValueError if none does.
    """
    num_samples = len(jax.tree.leaves(batch)[0])

    def called(num_rows: int) -> list[tuple[bool, int]]:
        seen: list[tuple[bool, int]] = []

        def note(y: Array) -> Array:
            seen.append((y.shape[0] == num_rows, y.shape[-1]))
            return y

        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), batch
        )
        with _on_outputs(note):
            jax.eval_shape(run, rows)
        return seen

    once, twice = called(num_samples), called(2 * num_samples)
    both = zip(once, twice, strict=False)  # lengths differ if JAX has cached some calls
    features = {one for (follows, one), (still, _) in both if follows and still}
    if not features or len(once) != len(twice):
        raise ValueError(NOTHING)
    return {one: jnp.ones((num_samples, one), jnp.float32) for one in sorted(features)}


@contextmanager
def scaled(factors: Factors) -> Iterator[set[int]]:
    """Multiply the outputs of normalisation layers by the factors, inside the `with` block.

    Yields the set of features whose factor was used so far, for `require_all`.
    """
    used: set[int] = set()

    def scale(y: Array) -> Array:
        found = factors.get(y.shape[-1])
        if found is None or y.shape[0] != len(found):
            return y
        used.add(y.shape[-1])
        middle = (1,) * (y.ndim - 2)
        return y * found.reshape(len(found), *middle, found.shape[-1]).astype(y.dtype)

    with _on_outputs(scale):
        yield used


def require_all(factors: Factors, used: set[int]) -> None:
    """Raise ValueError if a factor was not used: its noise would silently be missing."""
    if set(factors) - used:
        raise ValueError(NOTHING)


def sum_of_squares(grads: Factors) -> Array:
    """Return the squared norm of every sample's gradient, `[batch]`."""
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
