"""python examples/ports/clip.py --workdir /tmp/clip

Two towers as in CLIP: one reads a picture of four handwritten digits, the other a caption such as "four seven
one nine", and both meet in one space. Each picture should be closest to its own caption among all captions of
the batch, and each caption to its own picture, at a temperature that is learnt. Pairs are made on the spot.
Expect the right one of 256 captions for 0.95 or more of the pictures of digits that were not seen in
training, after 600 base steps, within three minutes on two CPU cores.

The batch is fixed, and not split. A sample's loss holds all others of its batch: in a batch of 256 the right
caption is one of 256, which is another and harder question than one of 64. Gradients of small batches are
therefore not noisy versions of those of large ones, and what the tuner reckons from their differences (how
much a larger batch is worth, and by how much the learning rate may grow) would be about another loss.
`loss="whole"` keeps the batch in one piece under the other policies as well, and over several devices.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import jaxgoodput as jg

LEARNING_RATE, DIM, NUM_DIGITS, NUM_PAIRS, EXPECTED_HITS = 1e-3, 64, 4, 16_384, 0.95
SHARPEST = 4.6  # of the logarithm of 1 / temperature: a temperature of 0.01


def default_config(workdir: str) -> jg.Config:
    limits = jg.BatchLimits(base=64, max=64)
    return jg.Config(workdir=workdir, batch=limits, base_steps=600, policy="fixed", loss="whole")


def on_sphere(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Towers(nn.Module):
    """A convolutional network for pictures, a small transformer's layer for captions, and a temperature."""

    @nn.compact
    def __call__(self, image, words):
        x = nn.relu(nn.Conv(32, (3, 3))(image))
        x = nn.relu(nn.Conv(64, (3, 3), 2)(x))
        x = nn.relu(nn.Conv(64, (3, 3), 2)(x))
        seen = nn.Dense(DIM)(x.reshape(len(x), -1))
        y = nn.Embed(10, DIM)(words)
        y = y + self.param("position", nn.initializers.normal(0.1), (NUM_DIGITS, DIM))[None]
        y = y + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(y))
        y = y + nn.Dense(DIM)(nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(y))))
        read = nn.Dense(DIM)(y.reshape(len(y), -1))
        sharpness = self.param("sharpness", nn.initializers.constant(np.log(1 / 0.07)), ())
        return on_sphere(seen), on_sphere(read), jnp.exp(jnp.minimum(sharpness, SHARPEST))


TOWERS = Towers()


def towers(params, batch) -> Any:
    return TOWERS.apply(params, batch["image"], batch["words"])


def contrast(params, batch):
    """Return the mean of both directions' losses for each pair `[batch]`."""
    seen, read, sharpness = towers(params, batch)
    logits, own = sharpness * seen @ read.T, jnp.arange(len(seen))
    each = optax.softmax_cross_entropy_with_integer_labels
    return (each(logits, own) + each(logits.T, own)) / 2


def hits(outputs) -> float:
    """Return the share of pictures that are closest to their own caption, of all."""
    likeness = np.asarray(outputs["seen"]) @ np.asarray(outputs["read"]).T
    return float(np.mean(likeness.argmax(axis=1) == np.arange(len(likeness))))


def pairs(*, held_out: bool) -> dict[str, np.ndarray]:
    """Return pictures `[pairs, 8, 8 NUM_DIGITS, 1]` and captions; held-out ones all differ."""
    digits: Any = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    order = order[:360] if held_out else order[360:]
    chosen = rng.choice(order, (NUM_PAIRS, NUM_DIGITS))
    if held_out:
        chosen = chosen[np.unique(digits.target[chosen], axis=0, return_index=True)[1]]
        chosen = rng.permutation(chosen)[:256]
    image = np.concatenate(list(digits.images[chosen].swapaxes(0, 1)), axis=2)[..., None] / 16
    return {"image": image.astype(np.float32), "words": digits.target[chosen].astype(np.int32)}


def schedule(num_steps: int):
    return optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, num_steps // 20, num_steps)


class Clip(jg.Trainer):
    """Two towers that learn which picture belongs to which caption."""

    def init(self, key):
        return TOWERS.init(key, *(jnp.asarray(x[:1]) for x in pairs(held_out=True).values()))

    def loss(self, params, batch, key):
        return contrast(params, batch)

    def learning_rate(self, progress):
        return schedule(int(self.config.base_steps or 1))(progress)

    def optimizer(self):
        return optax.adamw(self.learning_rate, weight_decay=0.01)

    def dataset(self):
        return pairs(held_out=False)

    def eval_dataset(self):
        return pairs(held_out=True)

    def metrics(self, params, batch):
        seen, read, _ = towers(params, batch)
        return {"seen": seen, "read": read}

    def summarize(self, outputs):
        return {"hits": hits(outputs)}


def main(_):
    trainer = Clip(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    found = trainer.evaluate(trainer.fit())["hits"]
    print(f"right captions {found:.3f}, expected {EXPECTED_HITS} or more")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=100")
    app.run(main)
