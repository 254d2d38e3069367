"""The three models in JAX: the loss of each sample of a batch, and what they say of test samples."""

import dataclasses
import functools
from typing import Any

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Problem:
    """A workload's model and data."""

    name: str
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]

    def init(self, key: Any) -> dict[str, Any]:
        """Initial parameters."""
        shapes = data.shapes(self.name, self.train)
        keys = jax.random.split(key, len(shapes))
        return {
            name: jnp.ones(shape) if np.isinf(spread) else spread * jax.random.normal(k, shape)
            for k, (name, (shape, spread)) in zip(keys, shapes.items(), strict=True)
        }

    def losses(self, params: Any, batch: Any) -> Any:
        """Of each sample."""
        if self.name == "digits":
            scores = _digits(params, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])
        if self.name == "recommender":
            scores = _recommender(params, batch["rows"])
            return optax.sigmoid_binary_cross_entropy(scores, batch["label"])
        return _bits(params, batch["windows"].astype(jnp.int32))

    def outputs(self, params: Any, batch: Any) -> Any:
        """Of each test sample: digit, score, bits per byte."""
        if self.name == "digits":
            return _digits(params, batch["image"]).argmax(axis=1)
        if self.name == "recommender":
            return _recommender(params, batch["rows"])
        return _bits(params, batch["windows"].astype(jnp.int32))

    def optimizer(self, rate: float) -> optax.GradientTransformation:
        """The workload's own."""
        if self.name == "digits":
            return optax.sgd(rate, momentum=0.9, nesterov=True)
        if self.name == "recommender":
            return optax.adagrad(rate, initial_accumulator_value=1e-7)
        return optax.adamw(rate, b2=0.99, weight_decay=0.01)

    def evaluate(self, params: Any) -> float:
        """The metric on all test samples."""
        size = len(next(iter(self.test.values())))
        outputs = [
            np.asarray(
                _outputs(self.name, params, {k: v[i : i + 8192] for k, v in self.test.items()})
            )
            for i in range(0, size, 8192)
        ]
        return data.value(self.name, np.concatenate(outputs), self.test)


@functools.partial(jax.jit, static_argnums=0)
def _outputs(name: str, params: Any, batch: Any) -> Any:
    return Problem(name, {}, {}).outputs(params, batch)


def _dense(params: Any, key: str, x: Any) -> Any:
    return x @ params[key] + params[f"{key}_bias"][None]


def _digits(params: Any, x: Any) -> Any:
    for key, stride in (("a", 1), ("b", 2)):
        x = jax.lax.conv_general_dilated(
            x,
            params[key],
            (stride, stride),
            ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jax.nn.relu(x + params[f"{key}_bias"][None, None, None])
    x = jax.nn.relu(_dense(params, "c", x.reshape(len(x), -1)))
    return _dense(params, "d", x)


def _recommender(params: Any, rows: Any) -> Any:
    embedded = params["tables"][rows]
    products = jnp.einsum("bid,bjd->bij", embedded, embedded)
    upper = products[:, *np.triu_indices(data.TABLES, 1)]
    x = jnp.concatenate([embedded.reshape(len(embedded), -1), upper], axis=1)
    x = jax.nn.relu(_dense(params, "b", jax.nn.relu(_dense(params, "a", x))))
    return _dense(params, "c", x)[:, 0]


def _normed(scale: Any, x: Any) -> Any:
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * scale[None, None]


def _bits(params: Any, codes: Any) -> Any:
    x = params["bytes"][codes[:, :-1]] + params["places"][None]
    for i in range(data.LAYERS):
        parts = jnp.split(_normed(params[f"scale_a{i}"], x) @ params[f"attention{i}"], 3, axis=-1)
        heads = [part.reshape(*part.shape[:2], data.HEADS, -1) for part in parts]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        x = x + mixed.reshape(x.shape) @ params[f"attention_out{i}"]
        hidden = _normed(params[f"scale_b{i}"], x) @ params[f"mlp{i}"]
        x = x + jax.nn.gelu(hidden) @ params[f"mlp_out{i}"]
    logits = _normed(params["scale"], x) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, codes[:, 1:])
    return losses.mean(axis=1) / np.log(2)
