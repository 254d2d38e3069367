"""Flax models as pure functions do what the modules themselves do, in either mode."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgoodput import from_linen, from_nnx

FEATURES = 6


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(FEATURES)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def linen():
    return from_linen(Linen(), train_kwargs={"train": True}, predict_kwargs={"train": False})


def of_nnx():
    return from_nnx(lambda rngs: Nnx(rngs))


@pytest.fixture(params=[linen, of_nnx], ids=["linen", "nnx"])
def model(request):
    return request.param()


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(32, FEATURES)), jnp.float32)


def test_training_moves_the_statistics_and_prediction_uses_them(model, key, x):
    made = model.init(key, x)
    assert len(jax.tree.leaves(made.params)) == 4  # two weights and two biases or scales
    before = jax.tree.leaves(made.model_state)
    out, after = jax.jit(model.train)(made.params, made.model_state, key, x)
    assert out.shape == (32, FEATURES)
    assert jax.tree.structure(after) == jax.tree.structure(made.model_state)
    moved = [np.any(a != b) for a, b in zip(before, jax.tree.leaves(after), strict=True)]
    assert len(moved) == 2 and all(moved)  # the running mean and variance
    predict = jax.jit(model.predict)
    first, again = (predict(made.params, after, x) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != predict(made.params, made.model_state, x))


def test_dropout_follows_the_key(model, key, x):
    made = model.init(key, x)
    train = jax.jit(model.train)
    out = train(made.params, made.model_state, key, x)[0]
    np.testing.assert_array_equal(out, train(made.params, made.model_state, key, x)[0])
    other = train(made.params, made.model_state, jax.random.key(7), x)[0]
    dropped = np.asarray(out == 0)
    assert 0.3 < dropped.mean() < 0.7 and np.any(dropped != np.asarray(other == 0))


def test_gradients_reach_every_parameter(model, key, x):
    made = model.init(key, x)

    def loss(params):
        return jnp.sum(model.train(params, made.model_state, key, x)[0] ** 3)

    grads = jax.tree.leaves(jax.grad(loss)(made.params))
    # A bias before a normalisation has none: the mean takes it away.
    assert sum(float(jnp.max(jnp.abs(g))) > 1e-3 for g in grads) == 3


def test_an_nnx_model_predicts_what_the_module_does(key, x):
    module = Nnx(nnx.Rngs(key))
    model = of_nnx()
    made = model.init(key, x)
    module.eval()
    np.testing.assert_allclose(
        model.predict(made.params, made.model_state, x), module(x), rtol=1e-6
    )
