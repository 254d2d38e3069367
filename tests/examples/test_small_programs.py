"""Six programs that a user could write from the documentation alone; each trains to a stated result.

A GAN, a contrastive loss, batch normalisation, LoRA, an average of the parameters, and several heads with
labels for only some samples.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxgoodput as jg

pytestmark = pytest.mark.slow

DIM = 8


@pytest.fixture
def devices():
    return jax.devices()[:2]


def config(workdir, **settings):
    given = {"batch": jg.BatchLimits(base=32, max=128), "epochs": 10, **settings}
    return jg.Config(
        workdir=str(workdir),
        reporting=jg.Reporting(tensorboard=False, progress=False),
        **given,
    )


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Gan(jg.Trainer):
    """Two networks, two optimizers, one step; gradients that one network must not see are stopped."""

    def init(self, key):
        return {
            "generator": {"scale": jnp.ones(()), "shift": jnp.zeros(())},
            "critic": {"linear": jnp.zeros(()), "square": jnp.zeros(())},
        }

    def loss(self, params, batch, key):
        real = batch["x"]
        noise = jax.random.normal(key, real.shape)
        fixed = jax.lax.stop_gradient(params)

        def made(generator):
            return generator["scale"] * noise + generator["shift"]

        def score(critic, x):
            return critic["linear"] * x + critic["square"] * x**2

        own, others = params["critic"], made(fixed["generator"])
        slope = own["linear"] + 2 * own["square"] * real  # its penalty keeps the game from circling
        critic = jax.nn.softplus(-score(own, real)) + jax.nn.softplus(score(own, others))
        generator = jax.nn.softplus(-score(fixed["critic"], made(params["generator"])))
        return critic + 0.5 * slope**2 + generator

    def optimizer(self):
        return optax.multi_transform(
            {"generator": optax.adam(0.01, b1=0.5), "critic": optax.adam(0.03, b1=0.5)},
            {"generator": "generator", "critic": "critic"},
        )

    def dataset(self):
        return {"x": 2 + 0.5 * normal(0, 1024)}


def test_a_gan_finds_mean_and_spread(tmp_path, devices):
    settings = config(tmp_path, epochs=40, policy="fixed")
    made = Gan(settings, devices=devices).fit().params["generator"]
    assert abs(float(made["shift"]) - 2) < 0.2
    assert abs(abs(float(made["scale"])) - 0.5) < 0.2


class Contrastive(jg.Trainer):
    """Two views of a sample should be closer to each other than to all others of the batch."""

    def init(self, key):
        return {"w": jax.random.normal(key, (DIM, DIM)) / DIM**0.5}

    def similarities(self, params, batch):
        one, other = (batch[name] @ params["w"] for name in ("one", "other"))
        one, other = (x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in (one, other))
        return 10 * one @ other.T

    def loss(self, params, batch, key):
        logits = self.similarities(params, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits)))

    def optimizer(self):
        return optax.adam(0.01)

    def dataset(self, seed=0, num_samples=1000):
        """The first half of the features is of the sample, and small; the rest is of the view."""
        same = 0.3 * normal(seed, num_samples, DIM // 2)
        views = (normal(seed + n, num_samples, DIM // 2) for n in (100, 200))
        one, other = (np.concatenate([same, view], axis=1) for view in views)
        return {"one": one, "other": other}


def test_a_contrastive_loss_finds_what_views_share(tmp_path, devices):
    trainer = Contrastive(config(tmp_path, loss="whole", epochs=30), devices=devices)
    held_out = trainer.dataset(seed=7, num_samples=64)

    def hits(params):
        found = trainer.similarities(params, held_out).argmax(axis=1)
        return float(np.mean(np.asarray(found) == np.arange(64)))

    assert hits(trainer.init(jax.random.key(0))) < 0.3
    assert hits(jax.device_get(trainer.fit().params)) > 0.9


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(nn.Dense(32)(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(2)(x)


MODEL = jg.from_linen(Network(), train_kwargs={"train": True}, predict_kwargs={"train": False})


class Normalised(jg.Trainer):
    """Evaluates with the averages of its batch statistics; features are of very different sizes."""

    def init(self, key):
        return MODEL.init(key, jnp.zeros((1, DIM)))

    def loss_and_state(self, params, model_state, batch, key):
        logits, model_state = MODEL.train(params, model_state, key, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), model_state

    def optimizer(self):
        return optax.adam(0.01)

    def dataset(self, seed=0):
        x, sizes = normal(seed, 1000, DIM), 10.0 ** np.arange(-2, DIM - 2, dtype=np.float32)
        return {"x": 50 + x * sizes, "y": (x[:, 0] * x[:, 1] > 0).astype(np.int32)}

    def eval_dataset(self):
        return self.dataset(seed=1)

    def metrics_with_state(self, params, model_state, batch):
        guess = MODEL.predict(params, model_state, batch["x"]).argmax(axis=1)
        return {"accuracy": guess == batch["y"]}


def test_batch_normalisation_predicts_with_its_averages(tmp_path, devices):
    # A batch that grows would leave fewer updates in these epochs.
    settings = config(tmp_path, policy="fixed", loss="whole", epochs=40)
    trainer = Normalised(settings, devices=devices)
    assert trainer.evaluate(trainer.fit())["accuracy"] > 0.93


class LoRA(jg.Trainer):
    """A frozen matrix, and two thin ones that learn a correction."""

    def init(self, key):
        base = jax.random.normal(jax.random.key(1), (DIM, DIM))
        down = jax.random.normal(key, (DIM, 1)) / DIM**0.5
        return {"base": base, "down": down, "up": jnp.zeros((1, DIM))}

    def trainable(self, params):
        return {"base": False, "down": True, "up": True}

    def loss(self, params, batch, key):
        out = batch["x"] @ (params["base"] + params["down"] @ params["up"])
        return jnp.mean((out - batch["y"]) ** 2, axis=1)

    def optimizer(self):
        return optax.adam(0.02)

    def dataset(self):
        x, change = normal(0, 1000, DIM), normal(1, DIM, 1) @ normal(2, 1, DIM)
        base = np.asarray(self.init(jax.random.key(0))["base"])
        return {"x": x, "y": x @ (base + change)}


def test_lora_learns_beside_a_matrix_that_keeps_every_bit(tmp_path, devices):
    trainer = LoRA(config(tmp_path, epochs=20), devices=devices)
    before = trainer.init(jax.random.key(0))["base"]
    state = trainer.fit()
    data = trainer.dataset()
    error = float(np.mean(trainer.loss(jax.device_get(state.params), data, jax.random.key(0))))
    assert error < 0.01 * float(np.mean(data["y"] ** 2))
    np.testing.assert_array_equal(state.params["base"], before)
    assert all(x.shape != (DIM, DIM) for x in jax.tree.leaves(state.opt_state))


class Noisy(jg.Trainer):
    """A mean of noisy samples, at a high learning rate."""

    def init(self, key):
        return {"mean": jnp.zeros(DIM)}

    def loss(self, params, batch, key):
        return jnp.sum((params["mean"][None] - batch["x"]) ** 2, axis=1)

    def optimizer(self):
        return optax.sgd(0.3)

    def dataset(self):
        return {"x": 1 + normal(0, 1024, DIM)}

    def eval_dataset(self):
        return {"x": np.ones((8, DIM), np.float32)}

    def metrics(self, params, batch):
        return {"error": self.loss(params, batch, jax.random.key(0))}


def test_an_average_of_the_parameters_is_nearer_than_what_was_trained(tmp_path, devices):
    trainer = Noisy(config(tmp_path, ema=0.98, policy="fixed"), devices=devices)
    state = trainer.fit()
    averaged = trainer.evaluate(state)["error"]
    trained = trainer.evaluate(dataclasses.replace(state, ema=None))["error"]
    assert averaged < 0.3 * trained


class Heads(jg.Trainer):
    """Three tasks on shared features; only some answers of each sample are known (else NaN)."""

    def init(self, key):
        shared, heads = jax.random.split(key)
        return {
            "shared": jax.random.normal(shared, (DIM, 16)) / DIM**0.5,
            "heads": jax.random.normal(heads, (16, 3)) / 4,
        }

    def loss(self, params, batch, key):
        known = ~jnp.isnan(batch["y"])
        out = batch["x"] @ params["shared"] @ params["heads"]
        errors = jnp.where(known, out - jnp.where(known, batch["y"], 0), 0) ** 2
        return jg.Loss(errors.sum(axis=1), known.sum(axis=1).astype(jnp.float32))

    def optimizer(self):
        return optax.adam(0.01)

    def dataset(self):
        x, known = (
            normal(0, 1000, DIM),
            np.random.default_rng(1).random((1000, 3)) < [0.9, 0.5, 0.1],
        )
        return {"x": x, "y": np.where(known, x @ normal(2, DIM, 3), np.nan).astype(np.float32)}


def test_every_head_learns_from_the_answers_that_there_are(tmp_path, devices):
    trainer = Heads(config(tmp_path, epochs=30), devices=devices)
    params = jax.device_get(trainer.fit().params)
    truth = normal(2, DIM, 3)
    off = params["shared"] @ params["heads"] - truth
    assert np.all(np.linalg.norm(off, axis=0) < 0.1 * np.linalg.norm(truth, axis=0))
