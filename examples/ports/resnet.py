"""python examples/ports/resnet.py --workdir /tmp/resnet

The usual recipe of a ResNet on ImageNet, made small for scikit-learn's handwritten digits: basic blocks with
batch normalisation, SGD with Nesterov momentum, warm-up and cosine decay, label smoothing, weight decay on
kernels only, random crops and mirror images. Expect a test accuracy of 0.95 or more after 600 base steps,
within two minutes on two CPU cores. Mirrored digits are part of the recipe, not of what is good for digits.

The batch is never split (`loss="whole"`), so that batch statistics are of all its rows, as in a plain loop.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import jaxgoodput as jg

LEARNING_RATE, WEIGHT_DECAY, SMOOTHING, STAGES = 0.1, 5e-4, 0.1, (16, 32, 64)
EXPECTED_ACCURACY = 0.95


def default_config(workdir: str) -> jg.Config:
    limits = jg.BatchLimits(base=64, max=256, sizes=(64, 128, 256))
    return jg.Config(workdir=workdir, batch=limits, base_steps=600, loss="whole")


class Block(nn.Module):
    """Two convolutions beside a shortcut; the block begins as the shortcut alone."""

    features: int
    stride: int
    train: bool

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train, momentum=0.9)
        conv = functools.partial(nn.Conv, self.features, use_bias=False)
        y = nn.relu(norm()(conv((3, 3), self.stride)(x)))
        y = norm(scale_init=nn.initializers.zeros)(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm()(conv((1, 1), self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A block for each stage, a mean over all positions, and a linear layer."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(STAGES[0], (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for number, features in enumerate(STAGES):
            x = Block(features, 2 if number else 1, train)(x)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


MODEL = jg.from_linen(ResNet(), train_kwargs={"train": True}, predict_kwargs={"train": False})


def augmented(key, images):
    """Return images moved by up to a pixel in each direction; half of them are mirrored."""
    key, mirror = jax.random.split(key)
    places = jax.random.randint(key, (len(images), 2), 0, 3)
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    cut = jax.vmap(lambda x, at: jax.lax.dynamic_slice(x, (at[0], at[1], 0), images.shape[1:]))
    is_mirrored = jax.random.bernoulli(mirror, shape=(len(images), 1, 1, 1))
    images = cut(padded, places)
    return jnp.where(is_mirrored, images[:, :, ::-1], images)


def smoothed_loss(logits, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets)


def is_kernel(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def schedule(num_steps: int):
    return optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, num_steps // 20, num_steps)


def pictures(*, held_out: bool) -> dict[str, np.ndarray]:
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    part = order[:360] if held_out else order[360:]
    image = (digits.images[part, ..., None] / 16).astype(np.float32)
    return {"image": image, "label": digits.target[part].astype(np.int32)}


class Classifier(jg.Trainer):
    """Ten digits; evaluation uses the averages of the batch statistics."""

    def init(self, key):
        return MODEL.init(key, jnp.zeros((1, 8, 8, 1)))

    def loss_and_state(self, params, model_state, batch, key):
        images = augmented(key, batch["image"])
        logits, model_state = MODEL.train(params, model_state, key, images)
        return smoothed_loss(logits, batch["label"]), model_state

    def learning_rate(self, progress):
        return schedule(int(self.config.base_steps or 1))(progress)

    def optimizer(self):
        decay = optax.add_decayed_weights(WEIGHT_DECAY, mask=is_kernel)
        return optax.chain(decay, optax.sgd(self.learning_rate, momentum=0.9, nesterov=True))

    def dataset(self):
        return pictures(held_out=False)

    def eval_dataset(self):
        return pictures(held_out=True)

    def metrics_with_state(self, params, model_state, batch):
        guess = MODEL.predict(params, model_state, batch["image"]).argmax(axis=-1)
        return {"accuracy": (guess == batch["label"]).astype(jnp.float32)}


def main(_):
    trainer = Classifier(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    accuracy = trainer.evaluate(trainer.fit())["accuracy"]
    print(f"test accuracy {accuracy:.4f}, expected {EXPECTED_ACCURACY} or more")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=100")
    app.run(main)
