"""Models of fixed size for the benchmarks, with random data: a CNN, two decoders, an MLP, two recommenders.

Each is a `Trainer`. Its `mean_loss` is the same loss in the form that a hand-written loop uses.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput import Config, Loss, Trainer

NUM_SAMPLES = 8192


class Benchmark(Trainer):
    """A trainer that also serves a hand-written loop."""

    name = ""

    def mean_loss(self, params: Any, batch: Any) -> Any:
        """The batch mean of the training loss."""
        out = self.loss(params, batch, jax.random.key(0))
        return jnp.sum(out.sum) / jnp.sum(out.weight) if isinstance(out, Loss) else jnp.mean(out)


class Cnn(Benchmark):
    """Three convolutions and two dense layers on 32 x 32 x 3 pictures; 90 MFLOP a sample."""

    name = "cnn"

    def init(self, key):
        k = jax.random.split(key, 5)
        he = jax.nn.initializers.he_normal()
        return {
            "conv1": he(k[0], (3, 3, 3, 32)),
            "conv2": he(k[1], (3, 3, 32, 64)),
            "conv3": he(k[2], (3, 3, 64, 64)),
            "dense1": he(k[3], (8 * 8 * 64, 64)),
            "dense2": he(k[4], (64, 10)),
        }

    def loss(self, params, batch, key):
        x = batch["image"]
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 1)):
            x = jax.lax.conv_general_dilated(
                x, params[name], (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["dense1"])
        logits = x @ params["dense2"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def optimizer(self):
        return optax.sgd(0.01, momentum=0.9, nesterov=True)

    def dataset(self):
        rng = np.random.default_rng(0)
        return {
            "image": rng.normal(size=(2048, 32, 32, 3)).astype(np.float32),
            "label": rng.integers(0, 10, 2048).astype(np.int32),
        }


class ByteLm(Benchmark):
    """A 4-layer transformer of width 128 over 64 bytes; 0.86 M parameters, 330 MFLOP a sample."""

    name = "byte LM"
    layers, width, length, heads = 4, 128, 64, 4

    def init(self, key):
        d = self.width
        k = iter(jax.random.split(key, 2 + 4 * self.layers))
        normal = jax.nn.initializers.normal(0.02)
        blocks = [
            {
                "qkv": normal(next(k), (d, 3 * d)),
                "out": normal(next(k), (d, d)),
                "up": normal(next(k), (d, 4 * d)),
                "down": normal(next(k), (4 * d, d)),
                "scale1": jnp.ones(d),
                "scale2": jnp.ones(d),
            }
            for _ in range(self.layers)
        ]
        return {
            "embed": normal(next(k), (256, d)),
            "position": normal(next(k), (self.length, d)),
            "blocks": blocks,
        }

    def loss(self, params, batch, key):
        tokens, d = batch["tokens"], self.width
        x = params["embed"][tokens[:, :-1]] + params["position"][None]
        causal = jnp.tril(jnp.ones((self.length, self.length), bool))

        def norm(x, scale):
            return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]

        for block in params["blocks"]:
            q, k, v = jnp.split(norm(x, block["scale1"]) @ block["qkv"], 3, -1)
            q, k, v = (a.reshape(*a.shape[:2], self.heads, -1) for a in (q, k, v))
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d / self.heads)
            weights = jax.nn.softmax(jnp.where(causal[None, None], scores, -1e9))
            mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
            x = x + mixed @ block["out"]
            x = x + jax.nn.gelu(norm(x, block["scale2"]) @ block["up"]) @ block["down"]
        logits = x @ params["embed"].T
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return Loss.of(each.sum(-1), jnp.full(each.shape[:1], float(self.length)))

    def optimizer(self):
        return optax.adamw(1e-3)

    def dataset(self):
        rng = np.random.default_rng(0)
        shape = (NUM_SAMPLES // 4, self.length + 1)
        return {"tokens": rng.integers(0, 256, shape).astype(np.int32)}


class Decoder(ByteLm):
    """Two layers of width 256 over 32 bytes: fewer and larger leaves than the byte LM."""

    name = "decoder"
    layers, width, length, heads = 2, 256, 32, 8


class Mlp(Benchmark):
    """Two hidden layers on pictures of 28 x 28: a step of 5 to 10 ms on a CPU."""

    name = "mlp"
    widths = (784, 512, 512, 10)

    def init(self, key):
        keys = jax.random.split(key, len(self.widths))
        he = jax.nn.initializers.he_normal()
        return [
            he(k, shape) for k, shape in zip(keys, itertools.pairwise(self.widths), strict=False)
        ]

    def loss(self, params, batch, key):
        x = batch["x"]
        for kernel in params[:-1]:
            x = jax.nn.relu(x @ kernel)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1], batch["y"])

    def optimizer(self):
        return optax.sgd(0.1, momentum=0.9)

    def dataset(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(NUM_SAMPLES, self.widths[0])).astype(np.float32)
        return {"x": x, "y": rng.integers(0, 10, NUM_SAMPLES).astype(np.int32)}


class Recommender(Benchmark):
    """Eight tables of width 16, 7.7 M parameters, and a small dense part: little compute, much update."""

    name = "recommender"
    rows = (131072, 131072, 131072, 40960, 24576, 16384, 4096, 1024)

    def init(self, key):
        k = jax.random.split(key, len(self.rows) + 2)
        tables = [jax.random.normal(k[i], (n, 16)) * 0.05 for i, n in enumerate(self.rows)]
        he = jax.nn.initializers.he_normal()
        return {"tables": tables, "up": he(k[-2], (128, 32)), "down": he(k[-1], (32, 1))}

    def loss(self, params, batch, key):
        found = [t[batch["ids"][:, i]] for i, t in enumerate(params["tables"])]
        x = jax.nn.relu(jnp.concatenate(found, -1) @ params["up"]) @ params["down"]
        return optax.sigmoid_binary_cross_entropy(x[:, 0], batch["label"])

    def optimizer(self):
        return optax.adagrad(0.02, initial_accumulator_value=1e-7)

    def dataset(self):
        rng = np.random.default_rng(0)
        count = 1 << 18
        # Identifiers are Zipf-like: a few rows are touched by most samples.
        uniform = rng.random((count, len(self.rows)))
        ids = (np.power(np.asarray(self.rows), uniform) - 1).astype(np.int32)
        return {"ids": ids, "label": rng.integers(0, 2, count).astype(np.float32)}


class Dlrm(Benchmark):
    """A recommender with dense features and products of all pairs: a step of 5 to 10 ms on a CPU."""

    name = "dlrm"
    rows, width, dense = (32768, 16384, 8192, 4096, 2048, 1024), 32, 13

    def init(self, key):
        k = iter(jax.random.split(key, len(self.rows) + 4))
        he = jax.nn.initializers.he_normal()
        pairs = (len(self.rows) + 1) * len(self.rows) // 2
        return {
            "tables": [jax.random.normal(next(k), (n, self.width)) * 0.05 for n in self.rows],
            "bottom": [he(next(k), (self.dense, 128)), he(next(k), (128, self.width))],
            "top": [he(next(k), (self.width + pairs, 128)), he(next(k), (128, 1))],
        }

    def loss(self, params, batch, key):
        x = jax.nn.relu(batch["dense"] @ params["bottom"][0]) @ params["bottom"][1]
        found = [t[batch["ids"][:, i]] for i, t in enumerate(params["tables"])]
        vectors = jnp.stack([x, *found], 1)
        first, second = np.triu_indices(len(found) + 1, 1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)[:, first, second]
        x = jax.nn.relu(jnp.concatenate([x, products], -1) @ params["top"][0]) @ params["top"][1]
        return optax.sigmoid_binary_cross_entropy(x[:, 0], batch["label"])

    def optimizer(self):
        return optax.sgd(0.1)

    def dataset(self):
        rng = np.random.default_rng(0)
        count = 1 << 16
        return {
            "dense": rng.normal(size=(count, self.dense)).astype(np.float32),
            "ids": rng.integers(0, self.rows, (count, len(self.rows))).astype(np.int32),
            "label": rng.integers(0, 2, count).astype(np.float32),
        }


MODELS: dict[str, type[Benchmark]] = {
    m.name: m for m in (Cnn, ByteLm, Decoder, Mlp, Recommender, Dlrm)
}


def made(name: str, config: Config, **kwargs: Any) -> Benchmark:
    """The model of that name."""
    return MODELS[name](config, **kwargs)
