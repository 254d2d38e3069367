"""The decoder of Llama, as pure functions: RMSNorm, rotary positions, grouped queries, SwiGLU.

Touvron et al. 2023 (arXiv 2302.13971 and 2307.09288), Su et al. 2021, Ainslie et al. 2023, Shazeer 2020.
Layers are stacked and scanned, and recomputed in the backward pass. The code names no devices: the default
rules of a strategy shard every matrix (`jaxgoodput.parallel.partition`).
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    vocab: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 384
    rotary_base: float = 10_000.0

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; the table counts twice, for reading and for predicting."""
        head = self.width // self.heads
        attention = self.width * head * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + 2 * self.vocab * self.width + self.width


SHAPES = {
    "tiny": Shape(),
    "1b": Shape(vocab=32_000, width=2048, layers=22, heads=32, kv_heads=4, hidden=5632),
    "7b": Shape(vocab=32_000, width=4096, layers=32, heads=32, kv_heads=32, hidden=11_008),
}


def init(key: jax.Array, shape: Shape) -> dict[str, Any]:
    """Return new parameters; the leaves of `layers` are stacked along axis 0."""
    keys = iter(jax.random.split(key, 9))
    head = shape.width // shape.heads

    def normal(*dims: int, fan_in: int = shape.width) -> jax.Array:
        return jax.random.normal(next(keys), dims) / math.sqrt(fan_in)

    n, d = shape.layers, shape.width
    return {
        "embedding": normal(shape.vocab, d, fan_in=1) * 0.02,
        "layers": {
            "attention_norm": jnp.ones((n, d)),
            "query": {"kernel": normal(n, d, shape.heads * head)},
            "key": {"kernel": normal(n, d, shape.kv_heads * head)},
            "value": {"kernel": normal(n, d, shape.kv_heads * head)},
            "out": {"kernel": normal(n, shape.heads * head, d)},
            "mlp_norm": jnp.ones((n, d)),
            "gate": {"kernel": normal(n, d, shape.hidden)},
            "up": {"kernel": normal(n, d, shape.hidden)},
            "down": {"kernel": normal(n, shape.hidden, d, fan_in=shape.hidden)},
        },
        "norm": jnp.ones(d),
        "head": {"kernel": normal(d, shape.vocab)},
    }


def logits(params: dict[str, Any], tokens: jax.Array, shape: Shape) -> jax.Array:
    """Return next-token logits `[batch, length, vocab]` for tokens `[batch, length]`."""

    def body(x: jax.Array, layer: dict[str, Any]) -> tuple[jax.Array, None]:
        return decoder_layer(layer, x, shape), None

    x = params["embedding"][tokens]
    x, _ = jax.lax.scan(jax.checkpoint(body), x, params["layers"])
    return rms_norm(x, params["norm"]) @ params["head"]["kernel"]


def decoder_layer(layer: dict[str, Any], x: jax.Array, shape: Shape) -> jax.Array:
    """Apply one layer to activations `[batch, length, width]`."""
    with jax.named_scope("attention"):
        x = x + attention(layer, rms_norm(x, layer["attention_norm"]), shape)
    with jax.named_scope("mlp"):
        h = rms_norm(x, layer["mlp_norm"])
        h = jax.nn.silu(h @ layer["gate"]["kernel"]) * (h @ layer["up"]["kernel"])
        return x + h @ layer["down"]["kernel"]


def attention(layer: dict[str, Any], x: jax.Array, shape: Shape) -> jax.Array:
    """Apply causal attention; groups of heads share keys and values."""
    batch, length, _ = x.shape
    head, groups = shape.width // shape.heads, shape.heads // shape.kv_heads

    def split(name: str, heads: int) -> jax.Array:
        return (x @ layer[name]["kernel"]).reshape(batch, length, heads, head)

    query = rotated(split("query", shape.heads), shape.rotary_base)
    key = rotated(split("key", shape.kv_heads), shape.rotary_base)
    value = split("value", shape.kv_heads)
    query = query.reshape(batch, length, shape.kv_heads, groups, head)
    scores = jnp.einsum("blkgh,bmkh->bkglm", query, key).astype(jnp.float32) / math.sqrt(head)
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal[None, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bkglm,bmkh->blkgh", weights, value)
    return mixed.reshape(batch, length, -1) @ layer["out"]["kernel"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalise over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * jnp.expand_dims(scale, range(x.ndim - 1))


def rotated(x: jax.Array, base: float) -> jax.Array:
    """Rotate pairs (i, i + head / 2) of `[batch, length, heads, head]` by an angle for the position."""
    half = x.shape[-1] // 2
    rates = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates[None]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
