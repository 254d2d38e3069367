"""python examples/language_model.py --workdir /tmp/language_model

Trains a transformer on the bytes of Python's own standard library, and tests it on files that it has not
seen. Expect 2.20 bits per byte or less on windows of 64 bytes (a table of trigrams: 2.54; of single bytes:
4.69) within a minute on two CPU cores. Settings can be changed on the command line, for example with `--set
base_steps=2000`. After every evaluation, a hook prints a sample of the model's text.

The input of a position includes two hashed tables of n-grams of the bytes before it, because most of what a
small model of source code has to know is spelling. The tables hold nearly all of the 6.6 million parameters.
"""

import corpora
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxgoodput as jg

LENGTH, DIM, NUM_LAYERS, NUM_HEADS = 64, 96, 2, 4
NGRAMS, NGRAM_ROWS = (3, 5), 2**15
LEARNING_RATE, TARGET_BITS = 3.2e-3, 2.20
WRITTEN = 120  # bytes that are printed after every evaluation


def default_config(workdir: str) -> jg.Config:
    return jg.Config(
        workdir=workdir,
        # Few sizes: on two cores, compiling a size slows down the steps that run meanwhile.
        batch=jg.BatchLimits(base=16, max=64, sizes=(16, 32, 64), max_micro_batches=1),
        base_steps=1000,
        evaluation=jg.Evaluation(every_base_steps=200, micro_batch_size=128),
        reporting=jg.Reporting(tokens_per_sample=LENGTH),
    )


class ByteModel(jg.Trainer):
    """A causal transformer over bytes (pre-norm, GELU), with hashed n-grams added to its input."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.train, self.test = corpora.byte_windows(LENGTH)

    def init(self, key):
        keys = iter(jax.random.split(key, 4 + 4 * NUM_LAYERS))

        def normal(*shape, scale=0.02):
            return scale * jax.random.normal(next(keys), shape)

        wide = DIM**-0.5
        layers = [
            {
                "attention": {
                    "scale": jnp.ones((1, 1, DIM)),
                    "in": normal(DIM, 3 * DIM, scale=wide),
                },
                "attention_out": normal(DIM, DIM, scale=wide / 2),
                "mlp": {"scale": jnp.ones((1, 1, DIM)), "in": normal(DIM, 4 * DIM, scale=wide)},
                "mlp_out": normal(4 * DIM, DIM, scale=wide / 4),
            }
            for _ in range(NUM_LAYERS)
        ]
        return {
            "bytes": normal(256, DIM),
            "ngrams": normal(len(NGRAMS), NGRAM_ROWS, DIM),
            "positions": normal(1, LENGTH, DIM),
            "layers": layers,
            "scale": jnp.ones((1, 1, DIM)),
            "head": normal(DIM, 256, scale=wide),
        }

    def logits(self, params, read):
        """Return the logits of the next byte, `[batch, LENGTH, 256]`, for windows `int32 [batch, LENGTH]`."""
        x = params["bytes"][read] + params["positions"]
        for table, n in zip(params["ngrams"], NGRAMS, strict=True):
            x += table[_hashed(read, n)]
        for layer in params["layers"]:
            x += _attention(_norm(layer["attention"], x)) @ layer["attention_out"]
            x += jax.nn.gelu(_norm(layer["mlp"], x)) @ layer["mlp_out"]
        return _norm({"scale": params["scale"], "in": params["head"]}, x)

    def bits(self, params, windows):
        """Return the mean code length of each window's bytes, in bits per byte `[batch]`."""
        codes = windows.astype(jnp.int32)
        logits, predicted = self.logits(params, codes[:, :-1]), codes[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, predicted)
        return losses.mean(axis=1) / np.log(2)

    def loss(self, params, batch, key):
        del key
        return self.bits(params, batch["windows"])

    def learning_rate(self, progress):
        steps = int(self.config.base_steps or 1000)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, LEARNING_RATE, steps // 16, steps, end_value=LEARNING_RATE / 10
        )
        return schedule(progress)

    def optimizer(self):
        return optax.adamw(self.learning_rate, b2=0.99, weight_decay=0.01)

    def dataset(self):
        return {"windows": self.train}

    def eval_dataset(self):
        return {"windows": self.test}

    def metrics(self, params, batch):
        return {"bits_per_byte": self.bits(params, batch["windows"])}


class Writer(jg.Hook):
    """Prints how the model continues the first held-out bytes, after every evaluation."""

    def __init__(self, model: ByteModel):
        self.model = model
        self.write = jax.jit(self._write)

    def on_eval_end(self, event):
        self.model.request_state()

    def on_state(self, event):
        start = self.model.test[0, :LENGTH]
        written = np.asarray(self.write(event.params, start, jax.random.key(event.step)))
        print(f"after {event.progress:.0f} base steps: {bytes(written).decode(errors='replace')!r}")

    def _write(self, params, start, key):
        def one(window, key):
            logits = self.model.logits(params, window[None])[0, -1]
            code = jax.random.categorical(key, logits).astype(jnp.int32)
            return jnp.append(window[1:], code), code.astype(jnp.uint8)

        return jax.lax.scan(one, start.astype(jnp.int32), jax.random.split(key, WRITTEN))[1]


def _norm(layer, x):
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return (x * layer["scale"]) @ layer["in"]


def _attention(x):
    query, key, value = jnp.split(x.reshape(*x.shape[:2], NUM_HEADS, -1), 3, axis=-1)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(*x.shape[:2], DIM)


def _hashed(codes, n: int):
    """Return the table row of the last n bytes at every position, `int32 [batch, length]`."""
    found = jnp.zeros(codes.shape, jnp.uint32)
    for back in range(n):
        earlier = jnp.pad(codes, ((0, 0), (back, 0)))[:, : codes.shape[1]]
        found = (found ^ (earlier.astype(jnp.uint32) + 1)) * jnp.uint32(0x9E3779B1)
        found = found ^ (found >> 15)
    return (found % NGRAM_ROWS).astype(jnp.int32)


def main(_):
    trainer = ByteModel(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    trainer.hooks = (Writer(trainer),)
    state = trainer.fit()
    bits = trainer.evaluate(state)["bits_per_byte"]
    print(f"held-out files: {bits:.3f} bits per byte, expected {TARGET_BITS:.2f} or less")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=2000")
    app.run(main)
