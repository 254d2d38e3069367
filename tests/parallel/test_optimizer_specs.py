"""Optimizer state is cut like its parameter, whatever the optimizer wraps it in; the rest is whole."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from partitions import EVERY, params, specs_of

from jaxgoodput.engine.state import split
from jaxgoodput.optim import learning_rate as gain_rules
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.parallel.partition import param_specs, path_name
from jaxgoodput.parallel.strategy import Strategy


def halves(tree):
    labels = itertools.cycle(["a", "b"])
    return jax.tree.map(lambda _: next(labels), tree)


OPTIMIZERS: dict[str, tuple[Any, float]] = {
    # With how many values of the parameters' shapes it keeps for each parameter.
    "adamw": (optax.adamw(0.1), 2),
    "momentum": (optax.sgd(0.1, momentum=0.9), 1),
    "multi_transform": (
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.adam(0.2)}, halves),
        2,
    ),
    "masked": (optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda _: True, tree)), 2),
    "inject_hyperparams": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 2),
    "MultiSteps": (optax.MultiSteps(optax.adam(0.1), 4), 3),
    "chain": (optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale_by_adam()), 3),
    "adaptive": (adaptive(optax.adamw(0.1), gain_rules.adam_scale, base_batch_size=8), 2),
}


@pytest.mark.parametrize("tx, copies", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_is_cut_like_its_parameter(tx, copies):
    tree = params()
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    state = jax.eval_shape(tx.init, tree)
    wanted = specs_of(tree)
    seen = dict.fromkeys(wanted, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        spec = found.spec(path, leaf.shape)
        # The parameter is the longest path that ends this one.
        ends = [n for n in wanted if f"/{path_name(path)}".endswith(f"/{n}")]
        if ends and leaf.ndim:
            owner = max(ends, key=len)
            seen[owner] += 1
            assert spec == wanted[owner], path_name(path)
        else:
            assert spec == P(), path_name(path)
    assert set(seen.values()) == {copies}


def test_an_update_keeps_every_sharding():
    tree = params()
    tx = optax.adamw(0.1)
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    placed = jax.device_put((tree, tx.init(tree)), found.shardings((tree, tx.init(tree))))

    def step(tree, state):
        updates, state = tx.update(jax.tree.map(jnp.sin, tree), state, tree)
        return optax.apply_updates(tree, updates), state

    expected = jax.device_get(step(tree, tx.init(tree)))
    got = jax.jit(step, out_shardings=found.shardings((tree, tx.init(tree))))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, got)
    assert found.specs(got) == jax.tree.map(lambda x: x.sharding.spec, got)


def test_factored_moments_are_whole():
    tree = {"up": {"kernel": jnp.zeros((256, 512))}, "kernel": jnp.zeros((64, 32))}
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    state = jax.eval_shape(optax.adafactor(0.1, momentum=0.9).init, tree)
    specs = {
        (path_name(path), leaf.shape): found.spec(path, leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    cut = {key: spec for key, spec in specs.items() if spec != P()}
    assert {shape for _, shape in cut} == {(256, 512), (64, 32)}
    assert {(256,), (512,)} <= {shape for _, shape in specs}
    # The small matrix is not factored: its second moment and momentum follow it, so does the momentum
    # of the large one.
    assert sorted(math.prod(shape) for _, shape in cut) == [2048, 2048, 256 * 512]


def test_paths_that_end_alike_are_told_apart():
    """The same names and shapes at several depths: each follows its own parameter."""
    rules = (("^a/a/w", P("tensor")), ("^a/w", P("fsdp")), ("^w", P(None, "fsdp")))
    tree = {"a": {"a": {"w": jnp.zeros((8, 8))}, "w": jnp.zeros((8, 8))}, "w": jnp.zeros((8, 8))}
    layout = Strategy(fsdp=2, tensor=2, rules=rules).on(jax.devices()[:4])
    state = jax.eval_shape(optax.adam(0.1).init, tree)
    moments = param_specs(layout, tree).specs(state)[0].mu
    assert moments == {"a": {"a": {"w": P("tensor")}, "w": P("fsdp")}, "w": P(None, "fsdp")}


def test_frozen_parameters_have_a_place_and_no_moments():
    tree = params()
    mask = jax.tree_util.tree_map_with_path(lambda p, _: "layers" in path_name(p), tree)
    kept, rest = split(tree, mask)
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    state = optax.adam(0.1).init(kept)
    assert found.specs(kept)["layers"] == found.specs(tree)["layers"]
    assert found.specs(rest)["embed"] == found.specs(tree)["embed"]
    assert found.specs(kept)["embed"] == {"embedding": None}
    assert found.specs(state)[0].nu == found.specs(kept)
