"""Programs that run seldom are compiled with options that the installed XLA knows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgoodput import _seldom
from jaxgoodput._seldom import options_if_seldom


@pytest.fixture
def fresh():
    _seldom._knows_old_emitters.cache_clear()
    yield
    _seldom._knows_old_emitters.cache_clear()


@pytest.mark.parametrize("numbers", [1.0, math.inf])
def test_a_program_that_runs_seldom_computes_the_same(numbers):
    def some(x):
        y = jnp.tanh(x @ x.T)
        return jnp.sum(y, 0) / (1 + jnp.exp(-y).mean(1)), jnp.argsort(y[0])

    x = jnp.asarray(np.random.default_rng(0).normal(size=(9, 7)), jnp.float32)
    usual, seldom = jax.jit(some), jax.jit(some, compiler_options=options_if_seldom(numbers))
    for a, b in zip(usual(x), seldom(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_options_are_known_to_the_versions_of_xla_that_have_other_emitters(fresh):
    version = tuple(map(int, jax.__version__.split(".")[:2]))
    if version not in ((0, 10), (0, 12)):
        pytest.skip("not tried with this version")
    assert (options_if_seldom() is not None) == (version == (0, 10))


def test_only_a_small_program_is_compiled_without_optimisation():
    small, large = (options_if_seldom(x) or {} for x in (_seldom.SMALL, 2 * _seldom.SMALL))
    assert small == {**large, **_seldom.UNOPTIMISED} != large


def test_an_option_that_xla_does_not_know_is_left_out(fresh, monkeypatch):
    monkeypatch.setattr(_seldom, "OLD_EMITTERS", {"xla_cpu_no_such_option": True})
    assert options_if_seldom() is None
    assert options_if_seldom(1.0) == _seldom.UNOPTIMISED


def test_another_error_of_the_compiler_is_raised(fresh, monkeypatch):
    monkeypatch.setattr(_seldom, "OLD_EMITTERS", {"xla_backend_optimization_level": "neither"})
    with pytest.raises(jax.errors.JaxRuntimeError):
        options_if_seldom()


def test_other_devices_get_the_usual_options(fresh, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert options_if_seldom(1.0) is None
