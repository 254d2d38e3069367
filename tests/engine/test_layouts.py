"""Training is the same under every layout: same updates, same noise, state cut as planned."""

import engines
import jax
import numpy as np
import pytest
from layouts import STRATEGIES, engine, windows

from jaxgoodput.parallel.strategy import Strategy


def named(strategy):
    return strategy.name


@pytest.fixture(scope="module")
def alone():
    """A step of 16 samples as two micro-batches of eight groups, on one device, and what it gave."""
    rng = np.random.default_rng(0)
    rows = windows(rng, 16, 9)
    one = engine(Strategy(), preconditioned=False)
    state, metrics = engines.run(one, engines.start(one, jax.random.key(0)), engines.cut(rows, 8))
    return rows, engines.host(state), metrics


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=named)
def test_one_step_is_the_same_under_every_layout(strategy, alone):
    rows, expected, _ = alone
    other = engine(strategy, preconditioned=False)
    state, metrics = engines.run(other, engines.start(other, jax.random.key(0)), [rows])
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(engines.host(state).params),
        jax.tree.leaves(expected.params),
        strict=True,
    ):
        assert np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(b), path
    wanted = other.abstract_state()
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=named)
def test_what_a_step_reports_is_the_same_under_every_layout(strategy, alone):
    rows, _, expected = alone
    other = engine(strategy, preconditioned=False)
    _, metrics = engines.run(other, engines.start(other, jax.random.key(0)), [rows])
    for name in ("grad_norm", "loss", "num_samples"):
        found, wanted = getattr(metrics, name), getattr(expected, name)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, err_msg=name)
    # Each copy of the model is a group of its own where it is whole; else a part of all rows and the others.
    assert metrics.num_groups == (8 if strategy == Strategy(data=8) else 2)
