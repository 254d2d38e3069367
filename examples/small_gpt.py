"""python examples/small_gpt.py --workdir /tmp/small_gpt

Trains a small GPT on the source of Python's own standard library, with a byte-pair tokenizer that is made
from the same text. Expect 1.90 bits per byte or less on files that it has not seen (a table of byte trigrams:
2.54) after 800 base steps, in one to two minutes on two CPU cores. Then it writes a few lines. The folder
`encodings` is left out for `lora.py`, which continues from this checkpoint.

Every token has the same weight: a sample is a window of tokens, and its loss is their mean.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokens
from absl import app, flags

import jaxgoodput as jg

LENGTH, DIM, NUM_LAYERS, NUM_HEADS, NUM_MERGES = 64, 96, 2, 4, 512
LEARNING_RATE, TARGET_BITS = 4e-3, 1.90
KEPT_OUT = "encodings"
MOST_BYTES = 3_000_000


def default_config(workdir: str) -> jg.Config:
    return jg.Config(
        workdir=workdir,
        # Few sizes: on two cores, compiling a size slows down the steps that run meanwhile.
        batch=jg.BatchLimits(base=16, max=64, sizes=(16, 32, 64), max_micro_batches=1),
        base_steps=800,
        evaluation=jg.Evaluation(every_base_steps=200.0, micro_batch_size=64),
        reporting=jg.Reporting(tokens_per_sample=LENGTH),
    )


def tokenizer() -> tokens.Tokenizer:
    """Return the tokenizer, made from the text; it is always the same."""
    text = tokens.library(folder=None, without=KEPT_OUT, most_bytes=MOST_BYTES)[False]
    return tokens.trained(text, NUM_MERGES)


class GPT(jg.Trainer):
    """A causal transformer (pre-norm, GELU, learnt positions); `lora.py` finds its matrices by name."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.tokenizer = tokenizer()
        text = tokens.library(folder=None, without=KEPT_OUT, most_bytes=MOST_BYTES)
        self.train = tokens.windows(self.tokenizer, text[False], LENGTH)
        self.test = tokens.windows(self.tokenizer, text[True], LENGTH)

    def init(self, key):
        keys = iter(jax.random.split(key, 3 + 4 * NUM_LAYERS))

        def normal(*shape, scale=DIM**-0.5):
            return scale * jax.random.normal(next(keys), shape)

        layers = [
            {
                "query_key_value": normal(DIM, 3 * DIM),
                "attention_out": normal(DIM, DIM) / 2,
                "mlp_in": normal(DIM, 4 * DIM),
                "mlp_out": normal(4 * DIM, DIM) / 4,
                "scales": jnp.ones((2, DIM)),
            }
            for _ in range(NUM_LAYERS)
        ]
        return {
            "tokens": normal(len(self.tokenizer), DIM, scale=0.02),
            "positions": normal(LENGTH, DIM, scale=0.02),
            "layers": layers,
            "scale": jnp.ones(DIM),
            "head": normal(DIM, len(self.tokenizer)),
        }

    def logits(self, params, read):
        """Return next-token logits `[batch, length, tokens]` for windows `int32 [batch, length]`."""
        x = params["tokens"][read] + params["positions"][None, : read.shape[1]]
        for layer in params["layers"]:
            x += (
                attention(norm(layer["scales"][0], x) @ layer["query_key_value"])
                @ (layer["attention_out"])
            )
            x += jax.nn.gelu(norm(layer["scales"][1], x) @ layer["mlp_in"]) @ layer["mlp_out"]
        return norm(params["scale"], x) @ params["head"]

    def bits(self, params, batch):
        """Return the code length of each window's tokens after the first, in bits `[batch]`."""
        logits, predicted = self.logits(params, batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, predicted)
        return losses.sum(axis=1) / np.log(2)

    def loss(self, params, batch, key):
        return self.bits(params, batch) / LENGTH

    def learning_rate(self, progress):
        steps = int(self.config.base_steps or 1)
        return optax.warmup_cosine_decay_schedule(
            0.0, LEARNING_RATE, steps // 16, steps, end_value=LEARNING_RATE / 10
        )(progress)

    def optimizer(self):
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(self.learning_rate, b2=0.99, weight_decay=0.01),
        )

    def dataset(self):
        return self.train

    def eval_dataset(self):
        return {name: x[:1024] for name, x in self.test.items()}

    def metrics(self, params, batch):
        return {"bits": self.bits(params, batch), "num_bytes": batch["num_bytes"]}

    def summarize(self, outputs):
        return {"bits_per_byte": outputs["bits"].sum() / outputs["num_bytes"].sum()}

    def written(self, params, start: bytes, num_tokens: int = 60) -> bytes:
        """Return how the model continues `start`, sampled at a temperature of 0.7."""

        @jax.jit
        def draw(params, window, keys):
            def one(window, key):
                logits = self.logits(params, window[None])[0, -1]
                token = jax.random.categorical(key, logits / 0.7).astype(jnp.int32)
                return jnp.append(window[1:], token), token

            return jax.lax.scan(one, window, keys)[1]

        begun = (self.tokenizer.encode(b"\n" * LENGTH) + self.tokenizer.encode(start))[-LENGTH:]
        keys = jax.random.split(jax.random.key(0), num_tokens)
        drawn = draw(params, jnp.asarray(begun, jnp.int32), keys)
        return start + self.tokenizer.decode(np.asarray(drawn))


def norm(scale, x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def attention(x):
    query, key, value = jnp.split(x.reshape(*x.shape[:2], NUM_HEADS, -1), 3, axis=-1)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(*x.shape[:2], DIM)


def main(_):
    trainer = GPT(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    state = trainer.fit()
    bits = trainer.evaluate(state)["bits_per_byte"]
    print(
        trainer.written(jax.device_get(state.params), b"    def __init__(").decode(errors="replace")
    )
    print(f"held-out files: {bits:.3f} bits per byte, expected {TARGET_BITS:.2f} or less")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=2000")
    app.run(main)
