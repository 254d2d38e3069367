"""A block of steps computes what its steps compute one by one, up to rounding, for what users write.

pytest --platform cuda tests/engine/test_blocks.py     # on a GPU
"""

import itertools
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxgoodput as jg
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import abstract_sample
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.programs.blocks import SPLIT_BLOCK, BlockPrograms
from jaxgoodput.train.start.problem import problem_of

BATCH, CLASSES = 16, 10


class Small(jg.Trainer):
    """Pictures of 8 x 8 with labels; the tokens of some models are the pictures' pixels."""

    def optimizer(self):
        return optax.sgd(0.05, momentum=0.9)

    def dataset(self):
        rng = np.random.default_rng(0)
        return {
            "image": rng.normal(size=(SPLIT_BLOCK * BATCH, 8, 8, 3)).astype(np.float32),
            "label": rng.integers(0, CLASSES, SPLIT_BLOCK * BATCH).astype(np.int32),
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


def engine_of(model, tmp_path, optimizer="momentum", dtype=None):
    """The engine of a model on one device, its samples, and a function that puts some on it."""
    limits = jg.BatchLimits(base=BATCH, max=BATCH)
    config = jg.Config(workdir=str(tmp_path), batch=limits, base_steps=1, compute_dtype=dtype)
    kind: Any = type("Chosen", (model,), {"optimizer": lambda self: OPTIMIZERS[optimizer]()})
    trainer = kind(config, devices=jax.devices()[:1])
    source = as_source(trainer.dataset())
    engines = Engines(problem_of(trainer, trainer.config), abstract_sample(source))
    engine = engines.on(jg.Strategy(data=1).on(jax.devices()[:1]))
    whole = source.batch(np.arange(SPLIT_BLOCK * BATCH)), np.ones(SPLIT_BLOCK * BATCH, np.float32)
    sharding = engine.layout.batch_sharding
    return engine, whole, lambda tree: jax.tree.map(lambda x: engine.layout.put(x, sharding), tree)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("model, optimizer", PAIRS)
def test_a_block_is_its_steps_up_to_rounding(tmp_path, model, optimizer, dtype):
    engine, whole, put = engine_of(model, tmp_path, optimizer, dtype)
    engine.programs.blocks.unrolls = model in (
        Convolutional,
        Linen,
    )  # as `train/start/looping.py` has it
    num_steps = engine.blocks.num_steps
    whole = jax.tree.map(lambda x: x[: num_steps * BATCH], whole)
    state, one_by_one = engine.init(jax.random.key(0)), []
    for i in range(num_steps):
        part = jax.tree.map(lambda x, i=i: x[i * BATCH : (i + 1) * BATCH], whole)
        state, metrics = engine.step(state, None, *put(part), measure=False)
        one_by_one.append(np.asarray(metrics))
    at_once, metrics = engine.blocks.run(engine.init(jax.random.key(0)), *put(whole))

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


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    engine, whole, put = engine_of(Embedded, tmp_path_factory.mktemp("embedded"), "adagrad")
    if not engine.blocks.can_split:
        pytest.skip("this device runs blocks only as a whole")
    state, metrics = engine.blocks.run(engine.init(jax.random.key(0)), *put(whole))
    return engine, put(whole), jax.device_get(state.params), np.asarray(metrics)


@settings(deadline=None, max_examples=25)
@given(ends=st.sets(st.integers(1, SPLIT_BLOCK - 1)), alone=st.booleans())
def test_the_parts_of_a_block_are_the_block(embedded, ends, alone):
    """To the bit, wherever it is divided; so is a step in a loop whose rows come by themselves."""
    engine, rows, params, metrics = embedded
    state, found = engine.init(jax.random.key(0)), []
    cuts = sorted({0, *ends, SPLIT_BLOCK})
    for first, end in itertools.pairwise(cuts):
        if alone and end == first + 1:
            with mock.patch.object(engine.programs.blocks, "loops_up_to", BATCH):
                own = engine.blocks.rows(*rows, first)
                state, packed = engine.step(state, None, *own, measure=False)
        else:
            state, packed = engine.blocks.run(state, *rows, first=first, count=end - first)
        found += [np.asarray(packed)[: end - first]]
        assert not np.asarray(packed)[end - first :].any()
        assert len(engine.read_all(packed, end - first)) == end - first
    np.testing.assert_array_equal(np.concatenate(found), metrics)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)


def test_a_part_is_refused_where_only_whole_blocks_run(embedded):
    engine, rows, *_ = embedded
    with mock.patch.object(BlockPrograms, "can_split", False):
        with pytest.raises(ValueError, match="count=3"):
            engine.blocks.run(engine.init(jax.random.key(0)), *rows, count=3)
