"""What `preconditioner` finds is what the optimizer multiplies by, however the states are nested."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.optim import noise

PARAMS: dict[str, Any] = {"a": jnp.zeros((2, 3)), "b": {"c": jnp.zeros((4,))}}
LABELS = {"a": "first", "b": "second"}

# Without a first moment the update is the gradient times the preconditioner.
TRANSFORMS: dict[str, Any] = {
    "adam": optax.scale_by_adam(b1=0.0),
    "adam, b2 of its own": optax.scale_by_adam(b1=0.0, b2=0.9, eps=1e-3),
    "amsgrad": optax.scale_by_amsgrad(b1=0.0),
    "rms": optax.scale_by_rms(eps_in_sqrt=False),
    "rms, corrected": optax.scale_by_rms(decay=0.999, eps_in_sqrt=False, bias_correction=True),
    "adagrad": optax.scale_by_rss(),
    "chain": optax.chain(optax.identity(), optax.scale_by_adam(b1=0.0), optax.scale(1.0)),
    "injected": optax.inject_hyperparams(optax.scale_by_adam)(b1=0.0, b2=0.7, eps=1e-2),
    "if finite": optax.apply_if_finite(optax.scale_by_adam(b1=0.0), 3),
    "two labels": optax.multi_transform(
        {"first": optax.scale_by_adam(b1=0.0), "second": optax.scale_by_rss()}, LABELS
    ),
    "one label frozen": optax.multi_transform(
        {"first": optax.scale_by_adam(b1=0.0), "second": optax.identity()}, LABELS
    ),
    "masked": optax.masked(optax.scale_by_adam(b1=0.0), {"a": False, "b": True}),
}


def run(tx, steps, key):
    state, updates, grads = tx.init(PARAMS), None, None
    for i in range(steps):
        leaves = jax.random.normal(jax.random.fold_in(key, i), (10,))
        grads = {"a": leaves[:6].reshape(2, 3), "b": {"c": leaves[6:]}}
        updates, state = tx.update(grads, state, PARAMS)
    return grads, updates, state


@pytest.mark.parametrize("name", TRANSFORMS)
def test_update_is_gradient_times_preconditioner(name, key):
    constants: Any = {"b2": 0.9, "eps": 1e-3} if name == "adam, b2 of its own" else {}
    grads, updates, state = run(TRANSFORMS[name], 7, key)
    scale = jax.jit(lambda s: noise.preconditioner(s, PARAMS, **constants))(state)
    jax.tree.map(
        lambda g, p, u: np.testing.assert_allclose(g * p, u, rtol=1e-4), grads, scale, updates
    )


def test_a_young_second_moment_counts_as_one(key):
    _, _, state = run(optax.adam(0.1), 4, key)
    scale = noise.preconditioner(state, PARAMS)
    jax.tree.map(lambda p: np.testing.assert_array_equal(p, jnp.ones_like(p)), scale)
    _, _, state = run(optax.adam(0.1), 5, key)
    scale: Any = noise.preconditioner(state, PARAMS)
    assert not np.allclose(scale["a"], 1)


@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.lion(0.1)])
def test_nothing_adaptive_is_none(tx):
    assert noise.preconditioner(tx.init(PARAMS), PARAMS) is None


def test_frozen_leaves_of_a_partial_tree_are_left_out(key):
    kept = {"a": PARAMS["a"], "b": {"c": None}}
    state = optax.adamw(0.1).init(kept)
    scale = noise.preconditioner(state, kept)
    assert jax.tree.structure(scale) == jax.tree.structure(kept)


def test_params_of_another_shape_are_named():
    other = {"a": jnp.zeros((5,)), "b": {"c": jnp.zeros((4,))}}
    with pytest.raises(ValueError, match=r"\['a'\].*\(2, 3\).*\(5,\)"):
        noise.preconditioner(optax.adam(0.1).init(PARAMS), other)
