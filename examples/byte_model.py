"""A byte-level transformer for documents of any length, as a problem for the engine."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

import jaxgoodput as jg

NUM_HEADS, LEARNING_RATE = 4, 1e-3


@dataclass(frozen=True)
class ByteModel:
    """A causal transformer over bytes (pre-norm, GELU), which predicts every byte from the ones before it.

    Parameters have the names that the default partition rules know: heads, the inner width of the MLP and the
    vocabulary are sharded over "tensor". Layers are stacked and scanned, so that FSDP gathers one layer at a
    time. With `remake`, the backward pass recomputes the inside of each layer.
    """

    dim: int
    num_layers: int
    longest: int
    remake: bool = False

    def init(self, key):
        keys = iter(jax.random.split(key, 9))

        def normal(*shape, scale):
            return scale * jax.random.normal(next(keys), shape)

        dim, wide, layers = self.dim, self.dim**-0.5, self.num_layers
        heads = (NUM_HEADS, dim // NUM_HEADS)
        stack = {
            "attention": {
                "scale": jnp.ones((layers, dim)),
                "query": {"kernel": normal(layers, dim, *heads, scale=wide)},
                "key": {"kernel": normal(layers, dim, *heads, scale=wide)},
                "value": {"kernel": normal(layers, dim, *heads, scale=wide)},
                "out": {"kernel": normal(layers, *heads, dim, scale=wide / 2)},
            },
            "mlp": {
                "scale": jnp.ones((layers, dim)),
                "up": {"kernel": normal(layers, dim, 4 * dim, scale=wide)},
                "down": {"kernel": normal(layers, 4 * dim, dim, scale=wide / 4)},
            },
        }
        return {
            "embed": {"embedding": normal(256, dim, scale=0.02)},
            "positions": normal(self.longest, dim, scale=0.02),
            "layers": stack,
            "scale": jnp.ones(dim),
            "head": {"kernel": normal(dim, 256, scale=wide)},
        }

    def loss(self, params, model_state, batch, key):
        """Return the nats of each document and its number of bytes; padding does not count."""
        del key
        codes = batch["codes"].astype(jnp.int32)
        length = codes.shape[1]
        read = jnp.pad(codes, ((0, 0), (1, 0)))[:, :-1]  # the first byte is predicted from a zero
        x = params["embed"]["embedding"][read] + params["positions"][None, :length]
        block = jax.checkpoint(_block) if self.remake else _block
        # A scan, unless the strategy has pipeline stages: then there is a micro-batch for each stage.
        x = jg.pipeline(block, params["layers"], x, num_micro_batches=1)
        logits = _norm(params["scale"], x) @ params["head"]["kernel"]
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, codes)
        is_real = jnp.arange(length)[None] < batch["num_bytes"][:, None]
        weight = is_real.sum(axis=1).astype(jnp.float32)
        return jg.Loss.of(jnp.where(is_real, nats, 0.0).sum(axis=1), weight), model_state

    def problem(self, base_batch_size: int) -> jg.Problem:
        """Return the problem for the engine, with Adam; the learning rate ignores the batch size."""
        tx = jg.adaptive(optax.adam(LEARNING_RATE), jg.rules.none, base_batch_size=base_batch_size)
        return jg.Problem(
            init=self.init,
            loss_and_state=self.loss,
            tx=tx,
            base_batch_size=base_batch_size,
        )


def _block(layer, x):
    attention, mlp = layer["attention"], layer["mlp"]
    x += _attention(attention, _norm(attention["scale"], x))
    inner = _norm(mlp["scale"], x) @ mlp["up"]["kernel"]
    return x + jax.nn.gelu(inner) @ mlp["down"]["kernel"]


def _norm(scale, x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def _attention(layer, x):
    query, key, value = (
        jnp.einsum("bld,dhk->blhk", x, layer[name]["kernel"]) for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return jnp.einsum("blhk,hkd->bld", mixed, layer["out"]["kernel"])


def sample(length: int):
    """Return the shape and dtype of one document."""
    codes = jax.ShapeDtypeStruct((length,), jnp.uint8)
    return {"codes": codes, "num_bytes": jax.ShapeDtypeStruct((), jnp.int32)}


def on_devices(rows: jg.lengths.PaddedRows, layout: jg.Layout):
    """Return a micro-batch of documents, padded to the same length, and its mask."""
    batch = {"codes": rows.tokens, "num_bytes": rows.num_tokens}
    return jax.device_put((batch, rows.mask), layout.batch_sharding)
