"""python examples/llama.py --workdir /tmp/llama

Trains a small decoder of Llama's architecture on the bytes of Python's own standard library. Expect 2.8 bits
per byte or less after its 300 base steps, in half a minute on two CPU cores.

To plan a larger model on devices that you do not have, you need only their compiler:

    pip install 'jaxgoodput[cuda12]'
    jaxgoodput plan examples/llama.py --topology h100:2x8 -- --size 7b --workdir /tmp/llama
    pip install 'jaxgoodput[tpu]'
    jaxgoodput plan examples/llama.py --topology v5e:16x16 -- --size 7b --workdir /tmp/llama
"""

import corpora
import jax
import jax.numpy as jnp
import llama_model
import numpy as np
import optax
from absl import app, flags

import jaxgoodput as jg

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Where the run is kept.", required=True)
flags.DEFINE_enum("size", "tiny", list(llama_model.SHAPES), "tiny, and what only a pod can train.")
flags.DEFINE_multi_string("set", [], "Settings of the configuration, name=value.")

LENGTHS = {"tiny": 64, "1b": 2048, "7b": 2048}


class Llama(jg.Trainer):
    """Predicts the next byte. The larger sizes, with a vocabulary to match, are only meant to be planned."""

    def __init__(self, config, size, **kwargs):
        super().__init__(config, **kwargs)
        self.shape, self.length = llama_model.SHAPES[size], LENGTHS[size]
        self.train, self.test = corpora.byte_windows(self.length)

    def init(self, key):
        return llama_model.init(key, self.shape)

    def loss(self, params, batch, key):
        tokens = batch["tokens"].astype(jnp.int32)
        logits = llama_model.logits(params, tokens[:, :-1], self.shape).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(-1)

    def optimizer(self):
        return optax.adamw(3e-3 if self.shape == llama_model.SHAPES["tiny"] else 3e-4)

    def dataset(self):
        return {"tokens": self.train}

    def eval_dataset(self):
        return {"tokens": self.test}

    def metrics(self, params, batch):
        return {"bits": self.loss(params, batch, jax.random.key(0)) / np.log(2)}


def main(_):
    config = jg.Config(
        workdir=FLAGS.workdir,
        batch=jg.BatchLimits(base=16, max=64, max_micro_batches=1),
        base_steps=300,
        compute_dtype=None if FLAGS.size == "tiny" else "bfloat16",
        reporting=jg.Reporting(tokens_per_sample=LENGTHS[FLAGS.size]),
    )
    trainer = Llama(jg.with_overrides(config, FLAGS.set), FLAGS.size)
    bits = trainer.evaluate(trainer.fit())["bits"]
    print(f"{bits:.2f} bits per byte on files it has not seen")


if __name__ == "__main__":
    app.run(main)
