"""Equinox models as pure functions do what the modules themselves do, and train in a `Trainer`."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import config

from jaxgoodput import Trainer, Variables, from_equinox, load
from jaxgoodput.engine.state import Loss

FEATURES = 6


class Plain(eqx.Module):
    """No state, no key; an array of NumPy, an integer array and a function among its fields."""

    layers: list
    table: jax.Array
    shift: np.ndarray
    activation: Callable

    def __init__(self, key):
        keys = jax.random.split(key, 11)
        self.layers = [eqx.nn.Linear(FEATURES, FEATURES, key=k) for k in keys]
        self.table = jnp.arange(FEATURES)
        self.shift = np.full(FEATURES, 0.5, np.float32)
        self.activation = jax.nn.tanh

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x[self.table] + self.shift


class Normed(eqx.Module):
    """With batch statistics and dropout."""

    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.dense = eqx.nn.Linear(FEATURES, FEATURES, key=key)
        self.norm = eqx.nn.BatchNorm(FEATURES, axis_name="rows", mode="ema")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.dense(x), state)
        return self.dropout(x, key=key), state


def normed():
    return from_equinox(lambda key: eqx.nn.make_with_state(Normed)(key), axis_name="rows")


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(32, FEATURES)), jnp.float32)


def test_a_model_computes_what_it_computes_by_itself(key, x):
    model = from_equinox(Plain)
    made = model.init(key)
    assert isinstance(made, Variables) and set(made.params["layers"]) == {str(i) for i in range(11)}
    assert "shift" in made.params  # as for eqx.filter_grad
    assert jax.tree.map(jnp.shape, made.model_state) == {"arrays": {"table": (FEATURES,)}}
    expected = jax.vmap(Plain(key))(x)
    out, state = jax.jit(model.train)(made.params, made.model_state, key, x)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(model.predict(made.params, state, x), expected, rtol=1e-6)
    moved = jax.tree.map(lambda p: p + 1, made.params)
    assert np.any(model.predict(moved, state, x) != expected)


def test_training_moves_the_statistics_and_prediction_uses_them(key, x):
    model = normed()
    made = model.init(key)
    own, own_state = eqx.nn.make_with_state(Normed)(key)
    before = own_state
    train = jax.jit(model.train)
    out, after = train(made.params, made.model_state, key, x)
    expected, own_state = jax.vmap(
        lambda x, k: own(x, before, key=k), axis_name="rows", out_axes=(0, None)
    )(x, jax.random.split(key, 32))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(jax.tree.leaves(after["state"]), jax.tree.leaves(own_state), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    still = eqx.nn.inference_mode(own)
    guess = jax.vmap(lambda x: still(x, own_state)[0], axis_name="rows")(x)
    np.testing.assert_allclose(model.predict(made.params, after, x), guess, rtol=1e-5, atol=1e-5)
    again = train(made.params, made.model_state, jax.random.key(7), x)[0]
    assert np.any(again != out)  # dropout follows the key


def test_training_takes_one_key_or_a_key_for_each_row(key, x):
    model = normed()
    made = model.init(key)
    train = jax.jit(model.train)
    one, _ = train(made.params, made.model_state, key, x)
    each, _ = train(made.params, made.model_state, jax.random.split(key, len(x)), x)
    np.testing.assert_array_equal(one, each)
    other, _ = train(made.params, made.model_state, jax.random.split(jax.random.key(7), len(x)), x)
    assert np.any(one != other)


class Fitted(Trainer):
    """Regression on the sum of the features, by whatever model."""

    def __init__(self, settings, model):
        super().__init__(settings, devices=jax.devices()[:2])
        self.model = model

    def init(self, key):
        return self.model.init(key)

    def loss_and_state(self, params, model_state, batch, key):
        out, model_state = self.model.train(params, model_state, key, batch["x"])
        return Loss.of((out.sum(axis=1) - batch["y"]) ** 2), model_state

    def optimizer(self):
        return optax.adam(1e-2)

    def dataset(self):
        x = np.random.default_rng(0).normal(size=(512, FEATURES)).astype(np.float32)
        return {"x": x, "y": x.sum(axis=1)}


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: from_equinox(Plain), normed], ids=["plain", "state"])
def test_it_trains_on_two_devices_is_saved_and_restored(tmp_path, make):
    losses = []
    settings = config(tmp_path / "one", base_steps=60.0)
    trainer = Fitted(settings, make())
    trainer.hooks = (type("Seen", (), {"on_step_end": lambda _, e: losses.append(e.loss)})(),)
    trainer.fit()
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    longer = {"base_steps": 80.0}
    resumed = Fitted(dataclasses.replace(settings, **longer), make()).fit()
    whole = Fitted(config(tmp_path / "two", **longer), make()).fit()
    for tree in ("params", "model_state"):
        pairs = (jax.tree.leaves(getattr(state, tree)) for state in (resumed, whole))
        for a, b in zip(*pairs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    params, _ = load(str(tmp_path / "one"))
    assert jax.tree.structure(params) == jax.tree.structure(resumed.params)


@pytest.mark.slow
def test_to_name_a_model_starts_no_device():
    """A script names its model when it is imported, and joins its job later."""
    text = """
import jax
jax.config.update("jax_platforms", "none")  # to start a device would be an error
import equinox as eqx
from jaxgoodput import from_equinox
from_equinox(lambda key: eqx.nn.MLP(4, 2, 8, 1, key=key))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_equinox_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(ImportError, match="from_equinox needs it: pip install equinox"):
        from_equinox(Plain)
