"""python examples/ports/nanogpt.py --workdir /tmp/nanogpt

The usual recipe of a small GPT, on bytes of the modules of Python's own standard library: embeddings that are
also the output layer, dropout, AdamW with weight decay on matrices only, warm-up and cosine decay to a tenth,
clipped gradients. Expect 3.4 bits per byte or less on text that it has not seen (8 without a model) after 600
base steps, within two minutes on two CPU cores. More steps go further.
"""

import pathlib
import sysconfig

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxgoodput as jg

LENGTH, DIM, NUM_LAYERS, NUM_HEADS, DROPOUT, NUM_BYTES = 64, 64, 2, 4, 0.1, 3_000_000
LEARNING_RATE, WEIGHT_DECAY, EXPECTED_BITS = 3e-3, 0.1, 3.4


def default_config(workdir: str) -> jg.Config:
    limits = jg.BatchLimits(base=16, max=64, sizes=(16, 32, 64), max_micro_batches=1)
    return jg.Config(workdir=workdir, batch=limits, base_steps=600)


class GPT(nn.Module):
    """A causal transformer: layers read what is normalised, and add to what they got."""

    @nn.compact
    def __call__(self, read, train):
        def dense(features, scale=1.0):
            init = nn.initializers.normal(0.02 * scale)
            return nn.Dense(features, use_bias=False, kernel_init=init)

        def dropped(x):
            return nn.Dropout(DROPOUT, deterministic=not train)(x)

        embed = nn.Embed(256, DIM, embedding_init=nn.initializers.normal(0.02))
        position = self.param("position", nn.initializers.normal(0.02), (LENGTH, DIM))
        x = dropped(embed(read) + position[None])
        into_sum = (2 * NUM_LAYERS) ** -0.5  # keeps the sum of all layers as large as one
        for _ in range(NUM_LAYERS):
            y = dense(3 * DIM)(nn.LayerNorm(use_bias=False)(x))
            query, key, value = jnp.split(y.reshape(*y.shape[:2], NUM_HEADS, -1), 3, axis=-1)
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            x = x + dropped(dense(DIM, into_sum)(mixed.reshape(x.shape)))
            y = nn.gelu(dense(4 * DIM)(nn.LayerNorm(use_bias=False)(x)))
            x = x + dropped(dense(DIM, into_sum)(y))
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


MODEL = jg.from_linen(GPT(), train_kwargs={"train": True}, predict_kwargs={"train": False})


def windows(*, held_out: bool) -> dict[str, np.ndarray]:
    """Return windows `uint8 [windows, LENGTH + 1]` of the text, of which the last tenth is held out."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"\n".join(f.read_bytes() for f in files)[:NUM_BYTES], np.uint8)
    border = len(text) * 9 // 10
    text = text[border:] if held_out else text[:border]
    starts = np.arange(0, len(text) - LENGTH, LENGTH * 8 if held_out else LENGTH)
    return {"codes": text[starts[:, None] + np.arange(LENGTH + 1)]}


def entropy(logits, codes):
    """Return the mean code length of each window's bytes after the first, in nats `[batch]`."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits, codes[:, 1:].astype(jnp.int32))
    return each.mean(axis=1)


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def schedule(num_steps: int):
    peak = LEARNING_RATE
    return optax.warmup_cosine_decay_schedule(0.0, peak, num_steps // 20, num_steps, peak / 10)


class Writer(jg.Trainer):
    """A decoder that predicts the next byte."""

    def init(self, key):
        return MODEL.init(key, jnp.zeros((1, LENGTH), jnp.int32))

    def loss_and_state(self, params, model_state, batch, key):
        read = batch["codes"][:, :-1].astype(jnp.int32)
        logits, model_state = MODEL.train(params, model_state, key, read)
        return entropy(logits, batch["codes"]), model_state

    def learning_rate(self, progress):
        return schedule(int(self.config.base_steps or 1))(progress)

    def optimizer(self):
        adam = optax.adamw(self.learning_rate, b2=0.95, weight_decay=WEIGHT_DECAY, mask=is_matrix)
        return optax.chain(optax.clip_by_global_norm(1.0), adam)

    def dataset(self):
        return windows(held_out=False)

    def eval_dataset(self):
        return windows(held_out=True)

    def metrics(self, params, batch):
        logits = MODEL.predict(params, {}, batch["codes"][:, :-1].astype(jnp.int32))
        return {"bits": entropy(logits, batch["codes"]) / np.log(2)}


def main(_):
    trainer = Writer(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    bits = trainer.evaluate(trainer.fit())["bits"]
    print(f"held-out text: {bits:.3f} bits per byte, expected {EXPECTED_BITS} or less")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=100")
    app.run(main)
