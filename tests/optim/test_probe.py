"""An optimizer that is asked tells whether it normalises gradients, and its constants."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxgoodput.optim.preconditioner import MomentConstants
from jaxgoodput.optim.probe import Probe, noise_share
from jaxgoodput.optim.traced import clocks_of, traced_update

PARAMS = {
    "kernel": jax.ShapeDtypeStruct((30, 20), jnp.float32),
    "bias": jax.ShapeDtypeStruct((20,), jnp.float32),
}
SGD_BIAS = {"kernel": "other", "bias": "sgd"}
WARMUP = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000)


def asked(tx):
    """The optimizer as it is probed: with schedules held after their first step."""
    traced = traced_update(tx, PARAMS)
    return Probe(traced, clocks_of(traced))


def beside_sgd(tx):
    return optax.multi_transform({"other": tx, "sgd": optax.sgd(0.1)}, SGD_BIAS)


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.sgd(WARMUP, momentum=0.9, nesterov=True),
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.02), optax.sgd(0.1)
        ),
        optax.adagrad(0.1),  # beside its accumulator the probing gradient is small
    ],
    ids=["sgd", "momentum", "clipped", "adagrad"],
)
def test_the_update_of_these_follows_the_gradient(tx):
    assert asked(tx).normalises().tolist() == [0, 0]


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(WARMUP),
        optax.lion(1e-4),
        optax.adafactor(1e-3),
        optax.sign_sgd(0.1),
        optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
        optax.adan(1e-3),
        optax.contrib.prodigy(),
        optax.contrib.muon(1e-3),
    ],
    ids=["adamw", "lion", "adafactor", "sign", "normalised", "adan", "prodigy", "muon"],
)
def test_the_update_of_these_does_not(tx):
    assert asked(tx).normalises().tolist() == [1, 1]


def test_each_leaf_has_an_answer_of_its_own():
    bias, kernel = Probe.of(beside_sgd(optax.lion(1e-3)), PARAMS).normalises()
    assert (bias, kernel) == (0, 1)


def test_who_moves_nothing_is_unknown():
    assert np.isnan(Probe.of(optax.sgd(0.0), PARAMS).normalises()).all()


@pytest.mark.parametrize(
    ("tx", "size"),
    [
        (optax.sgd(0.3), 0.3),
        (optax.sgd(0.3, momentum=0.5), 0.6),
        (optax.adamw(0.02, b2=0.9, weight_decay=0.1), 0.02),
        (optax.adagrad(0.2), 0.2),
        (optax.lion(0.01), 0.01),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.5)), 0.5),
    ],
    ids=["sgd", "momentum", "adamw", "adagrad", "lion", "clipped"],
)
def test_the_step_size_of_each_leaf_is_found(tx, size):
    np.testing.assert_allclose(
        Probe.of(beside_sgd(tx), PARAMS).step_sizes(), [0.1, size], rtol=0.02
    )


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    b2=st.sampled_from([0.9, 0.95, 0.98, 0.99, 0.999]),
    eps=st.sampled_from([1e-15, 1e-8, 1e-6, 1e-5, 1e-3]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_the_constants_of_adam_are_found(b2, eps, decay):
    adam = optax.adamw(WARMUP, b2=b2, eps=eps, weight_decay=decay)
    before = {
        "clip": optax.clip_by_global_norm(1.0),
        "scale": optax.scale(1 / 128),
        "unit-wise clip": optax.adaptive_grad_clip(0.01),
    }
    for name, link in before.items():
        found, _ = asked(optax.chain(link, adam)).moment_constants()
        assert found.b2 == b2, name
        if (
            name != "unit-wise clip"
        ):  # which cuts both gradients to one size, so that eps is not seen
            assert found.eps == pytest.approx(eps, rel=0.05, abs=1e-9), name


def test_the_constants_of_one_group_are_found_beside_another():
    adam = optax.adam(0.1, b2=0.9, eps=1e-3)
    bias, kernel = Probe.of(beside_sgd(adam), PARAMS).moment_constants()
    assert kernel == MomentConstants(b2=0.9, eps=1e-3)
    assert bias == MomentConstants()


def test_groups_with_other_constants_have_their_own():
    groups: Any = {"a": optax.adam(0.1, b2=0.9, eps=1e-3), "b": optax.adam(0.1, b2=0.99, eps=1e-6)}
    tx = optax.multi_transform(groups, {"kernel": "a", "bias": "b"})
    bias, kernel = Probe.of(tx, PARAMS).moment_constants()
    assert kernel == MomentConstants(b2=0.9, eps=1e-3)
    assert bias == MomentConstants(b2=0.99, eps=1e-6)


def strict(shape):
    """A link that takes only gradients whose kernel has this shape."""

    def update(updates, state, params=None):
        assert updates["kernel"].shape == shape, "another shape"
        return updates, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def large(rows):
    return {**PARAMS, "kernel": jax.ShapeDtypeStruct((rows, rows), jnp.float32)}


def test_a_link_that_takes_only_real_shapes_is_tried_with_these(caplog):
    for tx in (optax.sgd(0.1), optax.adam(0.1, b2=0.9)):
        alone = Probe.of(tx, PARAMS)
        found = Probe.of(optax.chain(strict((30, 20)), tx), PARAMS)
        np.testing.assert_array_equal(found.normalises(), alone.normalises())
        assert found.moment_constants() == alone.moment_constants()
    assert not caplog.records


def test_a_link_that_takes_only_large_shapes_is_unknown_and_named_once(caplog):
    link, params = strict((2000, 2000)), large(2000)
    probe = Probe.of(optax.chain(link, optax.adam(0.1, b2=0.9)), params)
    assert np.isnan(probe.normalises()).all()
    assert set(probe.moment_constants()) == {MomentConstants()}
    assert noise_share(probe.noise_left()) == 1.0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for word in ("another shape", "Config.rule", "defaults"):
        assert word in record.getMessage()


def by_rows(large, small, rows):
    """An optimizer that is chosen by the length of a leaf's first axis."""

    def labels(params):
        return jax.tree.map(lambda x: "large" if x.shape[0] >= rows else "small", params)

    return optax.multi_transform({"large": large, "small": small}, labels)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01, b2=0.95),
    "lion": lambda: optax.lion(0.01),
    "sign": lambda: optax.sign_sgd(0.01),
    "long adam": lambda: optax.adam(0.01, b2=0.99),
}


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    names=st.permutations(list(OPTIMIZERS)),
    rows=st.integers(2, 3000),
    columns=st.integers(1, 8),
)
@example(names=["lion", "adam"], rows=1000, columns=8)
@example(names=["sgd", "sign"], rows=1000, columns=4)
@example(names=["adam", "long adam"], rows=1000, columns=4)
def test_optimizers_that_are_chosen_by_the_size_of_leaves_are_found(names, rows, columns):
    """The state of the leaves at which an optimizer is tried has the structure of the real one."""
    first, second = (OPTIMIZERS[name]() for name in names[:2])
    params = {
        "kernel": jax.ShapeDtypeStruct((rows + 100, columns), jnp.float32),
        "bias": jax.ShapeDtypeStruct((1,), jnp.float32),
    }
    found = Probe.of(by_rows(first, second, rows), params)
    named = optax.multi_transform(
        {"large": first, "small": second}, {"kernel": "large", "bias": "small"}
    )
    expected = Probe.of(named, params)
    np.testing.assert_array_equal(found.normalises(), expected.normalises())
    np.testing.assert_allclose(found.noise_left(), expected.noise_left(), rtol=0.02)
    assert found.moment_constants() == expected.moment_constants()
    assert found.long_averages() == expected.long_averages()


DIVISORS = {
    "rows": lambda shape: shape[0],
    "size": math.prod,
    "root": lambda shape: math.sqrt(shape[0]),
    "aspect": lambda shape: max(1, shape[0] / shape[1]) ** 0.5,
    "large": lambda shape: 10.0 if shape[0] > 16 else 1.0,
}


@settings(max_examples=8, deadline=None)
@given(
    divisor=st.sampled_from(list(DIVISORS)),
    shape=st.tuples(st.integers(1, 200), st.integers(1, 60)),
    momentum=st.sampled_from([None, 0.5]),
)
@example(divisor="rows", shape=(64, 8), momentum=None)
@example(divisor="large", shape=(64, 8), momentum=None)
def test_step_sizes_that_follow_from_shapes_are_the_ones_of_real_shapes(divisor, shape, momentum):
    """A rule such as muP divides by the length of an axis: a constant of the trace that shapes give."""
    divided_by = DIVISORS[divisor]

    def scaled(updates, params):
        return jax.tree.map(lambda g: g / divided_by(g.shape), updates)

    tx = optax.chain(optax.sgd(0.1, momentum=momentum), optax.stateless(scaled))
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    (found,) = Probe.of(tx, params).step_sizes()
    expected = 0.1 / (1 - (momentum or 0)) / divided_by(shape)
    assert found == pytest.approx(expected, rel=1e-3)


def test_leaves_that_are_treated_differently_at_sizes_that_cannot_be_run_are_named(caplog):
    tx = by_rows(optax.sgd(0.1), optax.sign_sgd(0.1), 70_000)
    params = {**PARAMS, "kernel": jax.ShapeDtypeStruct((80_000, 8), jnp.float32)}
    Probe.of(tx, params).normalises()
    (record,) = caplog.records
    assert "other expressions" in record.getMessage()


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb", "muon", "clipped"])
def test_optimizers_whose_constants_follow_from_shapes_are_asked_with_one_element(name, caplog):
    """Means over elements, norms and transposes are no other treatment, however large leaves are."""
    tx = {
        "adamw": optax.adamw(0.1),
        "adafactor": optax.adafactor(0.1),
        "lamb": optax.lamb(0.1),
        "muon": optax.contrib.muon(0.1),
        "clipped": optax.chain(optax.clip_by_block_rms(1.0), optax.centralize(), optax.sgd(0.1)),
    }[name]
    params = {
        "wide": jax.ShapeDtypeStruct((500, 70_000), jnp.float32),
        "tall": jax.ShapeDtypeStruct((70_000, 500), jnp.float32),
        "bias": jax.ShapeDtypeStruct((500,), jnp.float32),
    }
    Probe.of(tx, params).normalises()
    assert not caplog.records


def test_optimizers_that_are_chosen_by_sizes_that_cannot_be_run_are_named(caplog):
    labels = by_rows(optax.lion(0.01), optax.adam(0.01), 70_000)
    params = {**PARAMS, "kernel": jax.ShapeDtypeStruct((80_000, 8), jnp.float32)}
    probe = Probe.of(labels, params)
    assert np.isnan(probe.normalises()).all() and probe.long_averages() == ()
    (record,) = caplog.records
    assert "too large to try" in record.getMessage()


def test_the_constants_of_others_are_those_of_optax():
    for tx in (optax.sgd(0.1), optax.rmsprop(0.1, decay=0.5), optax.adagrad(0.1)):
        assert set(Probe.of(tx, PARAMS).moment_constants()) == {MomentConstants()}


@pytest.mark.parametrize(
    ("tx", "least", "most"),
    [
        (optax.sign_sgd(0.1), 0.9, 1.0),
        (optax.adafactor(0.1), 0.3, 1.0),
        (optax.rmsprop(0.1, decay=0.99), 0.7, 1.0),
        (optax.lion(0.1, weight_decay=0.1), 0.0, 0.05),
        (optax.chain(optax.trace(0.9), optax.scale_by_sign(), optax.scale(-0.1)), 0.0, 0.2),
    ],
    ids=["sign", "adafactor", "rmsprop", "lion", "sign of momentum"],
)
def test_how_much_noise_an_optimizer_divides_by(tx, least, most):
    assert least <= noise_share(Probe.of(tx, PARAMS).noise_left()) <= most


def test_of_what_cannot_be_asked_all_noise_is_left():
    for tx, params in ((strict((2000, 2000)), large(2000)), (optax.set_to_zero(), PARAMS)):
        assert noise_share(Probe.of(tx, params).noise_left()) == 1.0


def test_only_updates_in_proportion_to_the_gradient_lag():
    for tx in (
        optax.adamw(0.1, weight_decay=0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1, b2=0.9)),
        optax.adagrad(0.1),
    ):
        assert Probe.of(tx, PARAMS).lags().tolist() == [True, True]
    assert Probe.of(optax.lamb(0.1), PARAMS).lags().tolist() == [False, False]
    groups: Any = {"adam": optax.adam(0.1), "lion": optax.lion(0.1)}
    mixed = optax.multi_transform(groups, {"kernel": "adam", "bias": "lion"})
    assert Probe.of(mixed, PARAMS).lags().tolist() == [False, True]  # bias, kernel


def waits_for_a_better_value():
    """A link whose state begins at infinity, and stays there until a loss is seen."""

    def init(params):
        del params
        return {"best": jnp.array(jnp.inf), "worst": jnp.full(2, -jnp.inf)}

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


@pytest.mark.parametrize(
    "tx",
    [optax.sgd(0.1, momentum=0.9), optax.adam(0.01), optax.lion(0.01)],
    ids=["momentum", "adam", "lion"],
)
def test_infinities_in_a_state_change_no_answer(tx):
    """Warnings of NumPy are errors here."""
    alone, beside = asked(tx), asked(optax.chain(tx, waits_for_a_better_value()))
    assert beside.averages_parameters() == alone.averages_parameters()
    assert beside.moment_constants() == alone.moment_constants()
    np.testing.assert_array_equal(beside.normalises(), alone.normalises())
    np.testing.assert_array_equal(beside.step_sizes(), alone.step_sizes())
