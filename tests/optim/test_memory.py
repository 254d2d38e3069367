"""An update worth k base steps is k updates for the long averages of an optimizer, and for nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.optim import memory
from jaxgoodput.optim.adaptation import with_noise_held
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.optim.learning_rate import adam_scale
from jaxgoodput.optim.probe import Probe

PARAMS: dict[str, Any] = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.zeros(3)}
GROUPS = {"w": "first", "b": "second"}
OPTIMIZERS: dict[str, tuple[Any, memory.Decays]] = {
    "adamw": (optax.adamw(0.1, b2=0.95), (0.95,)),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), (0.999,)),
    "lion": (optax.lion(0.1), (0.99,)),
    "groups": (
        optax.multi_transform(
            {"first": optax.adam(0.1, b2=0.9), "second": optax.lion(0.1, b2=0.98)}, GROUPS
        ),
        (0.9, 0.98),
    ),
    "injected": (optax.inject_hyperparams(optax.adamw)(0.1, b2=0.98), (0.98,)),
}


def gradients(size=1.0) -> Any:
    return jax.tree.map(lambda x: size * jnp.cos(3 * x + 1), PARAMS)


def updated(tx, state, worth=1.0, decays=(), done=0.0, size=1.0) -> Any:
    """The state after one update, which counts as `worth`, after `done` base steps."""
    _, after = tx.update(gradients(size), state, PARAMS)
    if not decays:
        return after
    return memory.by_progress(state, after, decays, jnp.float32(done), jnp.float32(worth))


def corrected(state, decays) -> list[Any]:
    """The long averages as the optimizer sees them: Adam's without its bias."""
    kinds = tuple(memory.FIELD_OF)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    found = []
    nodes: list[Any] = [x for x in leaves if isinstance(x, kinds)]
    for node, kept in zip(nodes, decays, strict=True):
        average = getattr(node, memory.FIELD_OF[type(node)])
        bias = (
            1 - kept ** int(np.asarray(node.count))
            if isinstance(node, optax.ScaleByAdamState)
            else 1.0
        )
        found.append(jax.tree.map(lambda x, bias=bias: x / bias, average))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_averages_keep_is_found_out(name):
    tx, wanted = OPTIMIZERS[name]
    assert Probe.of(tx, PARAMS).long_averages() == pytest.approx(wanted)


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adagrad(0.1),
        optax.adamax(0.1),  # a maximum, under Adam's name
        optax.rmsprop(0.1),
    ],
    ids=["momentum", "adagrad", "adamax", "rmsprop"],
)
def test_others_keep_none(tx):
    assert Probe.of(tx, PARAMS).long_averages() == ()


def test_averages_in_half_precision_are_left_alone():
    assert Probe.of(optax.lion(0.1, mu_dtype=jnp.bfloat16), PARAMS).long_averages() == ()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_worth_one_is_left_as_it_is(name):
    tx, decays = OPTIMIZERS[name]
    state = updated(tx, tx.init(PARAMS))
    jax.tree.map(
        np.testing.assert_array_equal, updated(tx, state, 1, decays, done=1), updated(tx, state)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=10)
@given(worth=st.integers(2, 40), before=st.integers(0, 5))
def test_an_update_worth_k_is_k_updates(name, worth, before):
    """By the same gradient, as the optimizer sees its averages, and again after another update."""
    tx, decays = OPTIMIZERS[name]
    state = tx.init(PARAMS)
    for _ in range(before):
        state = updated(tx, state, size=2.0)
    many = state
    for _ in range(worth + 3):
        many = updated(tx, many)
    once = updated(tx, state, worth, decays, done=before)
    once = updated(tx, once, 3, decays, done=before + worth)
    for one, other in zip(corrected(once, decays), corrected(many, decays), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3), one, other)


def test_the_first_moment_and_its_count_are_left_alone():
    tx = optax.adam(0.1)
    state = updated(tx, tx.init(PARAMS), size=2.0)
    once, plain = updated(tx, state, 7, (0.999,), done=1), updated(tx, state)
    jax.tree.map(np.testing.assert_array_equal, once[0].mu, plain[0].mu)
    assert int(once[0].count) == int(plain[0].count)


def test_a_constant_that_is_not_quite_right_makes_no_square_negative():
    tx = optax.adam(0.1, b2=0.8952)
    state = updated(tx, tx.init(PARAMS), size=2.0)
    after = updated(tx, state, 32, (0.9,), done=1, size=0.0)
    assert min(float(x.min()) for x in jax.tree.leaves(after[0].nu)) >= 0


def test_updates_by_a_constant_gradient_stay_as_large():
    """From the first on, at sixteen times the base batch: both moments are corrected for what they are."""
    wrap = {"base_batch_size": 1, "second_moment_decay": 0.999, "max_gain_growth": 1e9}
    sizes = []
    for averages in ((), (0.999,)):
        tx: Any = adaptive(optax.adam(1.0), adam_scale, long_averages=averages, **wrap)
        held = GradGroups(sqr=np.ones(2), var=np.full(2, 100.0))
        state = with_noise_held(tx.init(PARAMS), held)
        update = jax.jit(lambda s, tx=tx: tx.update(gradients(), s, PARAMS, global_batch_size=16))
        moved = []
        for _ in range(12):
            updates, state = update(state)
            moved.append(float(jnp.abs(updates["w"]).mean()))
        sizes.append(moved)
    # The root of the gain, times that of what the second moment lags behind: less where it forgets faster.
    without, with_averages = sizes
    assert with_averages[0] == pytest.approx(without[0])
    assert min(with_averages) > 0.9 * min(without)
