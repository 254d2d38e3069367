"""A block of steps computes what its steps compute one by one, up to rounding, for what users write.

pytest --platform cuda tests/engine/test_blocks.py     # on a GPU
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxgoodput as jg
from jaxgoodput.data.sources import abstract_sample, as_source
from jaxgoodput.engine.engine import Engines
from jaxgoodput.train.start.problem import problem_of

COUNT, BATCH, CLASSES = 4, 16, 10


class Small(jg.Trainer):
    """Pictures of 8 x 8 with labels; the tokens of some models are the pictures' pixels."""

    def optimizer(self):
        return optax.sgd(0.05, momentum=0.9)

    def dataset(self):
        rng = np.random.default_rng(0)
        return {
            "image": rng.normal(size=(COUNT * BATCH, 8, 8, 3)).astype(np.float32),
            "label": rng.integers(0, CLASSES, COUNT * BATCH).astype(np.int32),
        }

    def logits(self, params, x, key) -> Any:
        raise NotImplementedError

    def loss(self, params, batch, key):
        return optax.softmax_cross_entropy_with_integer_labels(
            self.logits(params, batch["image"], key), batch["label"]
        )


class Convolutional(Small):
    """Convolutions with strides and pooling, without a library."""

    def init(self, key):
        a, b, c = jax.random.split(key, 3)
        he = jax.nn.initializers.he_normal()
        return {
            "one": he(a, (3, 3, 3, 16)),
            "two": he(b, (3, 3, 16, 16)),
            "out": he(c, (64, CLASSES)),
        }

    def logits(self, params, x, key):
        for name, stride in (("one", 1), ("two", 2)):
            x = jax.lax.conv_general_dilated(
                x, params[name], (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return x.reshape(x.shape[0], -1) @ params["out"]


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(16, (3, 3), use_bias=False)(x)  # a bias here would have no gradient
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x).mean((1, 2))
        x = nn.Dropout(0.2, deterministic=not train)(nn.Dense(32)(x))
        return nn.Dense(CLASSES)(x)


LINEN = jg.from_linen(Network(), train_kwargs={"train": True}, predict_kwargs={"train": False})


class Linen(Small):
    """A Flax model with batch normalisation, which is mutable state, and dropout."""

    def init(self, key):
        return LINEN.init(key, jnp.zeros((1, 8, 8, 3)))

    def loss_and_state(self, params, model_state, batch, key):
        out, model_state = LINEN.train(params, model_state, key, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["label"]), model_state


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.into = nnx.Linear(3, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.mix = nnx.MultiHeadAttention(4, 32, 32, decode=False, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.into(x.reshape(x.shape[0], -1, 3))
        x = x + self.mix(self.norm(x))
        return self.out(nnx.gelu(x).mean(1))


NNX = jg.from_nnx(Attention)


class Attending(Small):
    """An nnx model with attention."""

    def init(self, key):
        return NNX.init(key)

    def loss_and_state(self, params, model_state, batch, key):
        out, model_state = NNX.train(params, model_state, key, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["label"]), model_state


class Embedded(Small):
    """Rows of a table that many samples share, and a recurrence over a sequence."""

    def init(self, key):
        a, b, c = jax.random.split(key, 3)
        normal = jax.nn.initializers.normal(0.3)
        return {
            "table": normal(a, (16, 8)),
            "mix": normal(b, (8, 8)),
            "out": normal(c, (8, CLASSES)),
        }

    def logits(self, params, x, key):
        ids = jnp.clip((x[..., 0].reshape(x.shape[0], -1) * 4 + 8).astype(jnp.int32), 0, 15)

        @jax.checkpoint
        def after(state, token):
            return jnp.tanh(state @ params["mix"] + params["table"][token]), None

        last, _ = jax.lax.scan(after, jnp.zeros((x.shape[0], 8)), ids.T)
        return last @ params["out"]


MODELS = (Convolutional, Linen, Attending, Embedded)
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "adagrad": lambda: optax.adagrad(0.05),
    "muon": lambda: optax.contrib.muon(0.02),
}
FIRST = ("momentum", "adamw", "momentum", "adagrad")
PAIRS = [
    pytest.param(m, o, marks=() if o == f else pytest.mark.nightly, id=f"{m.__name__}-{o}")
    for m, f in zip(MODELS, FIRST, strict=True)
    for o in OPTIMIZERS
]


@pytest.mark.parametrize("dtype", [None, pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("model, optimizer", PAIRS)
def test_a_block_is_its_steps_up_to_rounding(tmp_path, model, optimizer, dtype):
    limits = jg.BatchLimits(base=BATCH, max=BATCH)
    config = jg.Config(workdir=str(tmp_path), batch=limits, base_steps=1, compute_dtype=dtype)
    kind: Any = type("Chosen", (model,), {"optimizer": lambda self: OPTIMIZERS[optimizer]()})
    trainer = kind(config, devices=jax.devices()[:1])
    source = as_source(trainer.dataset())
    engines = Engines(problem_of(trainer, trainer.config), abstract_sample(source))
    engine = engines.on(jg.Strategy(data=1).on(jax.devices()[:1]))
    batch, ones = source.batch(np.arange(COUNT * BATCH)), np.ones(COUNT * BATCH, np.float32)
    put = engine.layout.put
    sharding = engine.layout.batch_sharding

    state, one_by_one = engine.init(jax.random.key(0)), []
    for i in range(COUNT):
        part = jax.tree.map(lambda x, i=i: x[i * BATCH : (i + 1) * BATCH], (batch, ones))
        state, metrics = engine.step(
            state, None, *(jax.tree.map(lambda x: put(x, sharding), p) for p in part), measure=False
        )
        one_by_one.append(np.asarray(metrics))
    whole = jax.tree.map(lambda x: put(x, sharding), (batch, ones))
    at_once, metrics = engine.steps(engine.init(jax.random.key(0)), *whole, count=COUNT)

    # Products of a GPU may round to the ten bits of TF32; bfloat16 has eight.
    rtol = 1e-2 if dtype or jax.default_backend() == "gpu" else 1e-4
    first, moved = np.stack(one_by_one)[:, :2], np.asarray(metrics)[:, :2]  # losses and weights
    np.testing.assert_allclose(moved, first, rtol=rtol)
    # Compared with how far training has moved: values themselves would agree without any.
    began, one, other = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(values)])
        for values in (
            jax.device_get((s.params, s.model_state))
            for s in (engine.init(jax.random.key(0)), state, at_once)
        )
    )
    assert np.linalg.norm(other - one) <= 30 * rtol * np.linalg.norm(one - began)
