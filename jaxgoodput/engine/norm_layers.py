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
NOTHING = (
    "Statistics.from_norm_layers needs a model with normalisation layers of flax.linen (LayerNorm, RMSNorm, "
    "GroupNorm) whose outputs have a row per sample, called in the open. The loss calls none, or calls them "
    "inside a function that JAX remembers from an earlier call: a jax.jit, jax.checkpoint or body of a scan "
    "that was made once, outside the loss. Make it inside, or leave from_norm_layers False: the noise then "
    "comes from micro-batches, or from a part of the rows."
)
Factors = dict[int, Array]
"""By number of features: `[batch, features]`."""


def ones(run: Callable[[PyTree], PyTree], batch: PyTree) -> Factors:
    """The factors of whatever layers `run(batch)` calls on rows of the batch.

    Those are the calls whose leading axis follows the number of rows. Raises ValueError where there are none.
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
    both = zip(once, twice, strict=False)  # of other lengths where JAX remembers some
    features = {one for (follows, one), (still, _) in both if follows and still}
    if not features or len(once) != len(twice):
        raise ValueError(NOTHING)
    return {one: jnp.ones((num_samples, one), jnp.float32) for one in sorted(features)}


@contextmanager
def scaled(factors: Factors) -> Iterator[set[int]]:
    """Multiply what normalisation layers put out by the factors, while this lasts.

    Yields the features of those that were used by now, for `require_all`.
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
    """Raise ValueError where a factor was not used: nothing would be measured, in silence."""
    if set(factors) - used:
        raise ValueError(NOTHING)


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
