"""What was saved on one layout comes back on any other, to the bit, each device with its own part."""

import dataclasses

import engines
import jax
import numpy as np
import pytest
from layouts import engine, windows

from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.checkpoint import Checkpoints

SAVED_ON = (Strategy(fsdp=8), Strategy(fsdp=4, tensor=2), Strategy())
RESTORED_ON = (
    Strategy(data=8),
    Strategy(data=2, fsdp=4),
    Strategy(fsdp=2, tensor=4),
    Strategy(fsdp=4),
    Strategy(data=2, tensor=2),
    Strategy(tensor=2),
    Strategy(),
)


def named(strategy):
    return strategy.name


@pytest.fixture(scope="module", params=SAVED_ON, ids=named)
def saved(request, tmp_path_factory):
    """A workdir with the state after one step, and that state on the host."""
    one = engine(request.param)
    state = engines.start(one, jax.random.key(0))
    batch = engines.put(one, windows(np.random.default_rng(0), 16, 9))
    state, metrics, _ = one.step(state, None, *batch, measure=False)
    jax.block_until_ready(metrics)
    workdir = str(tmp_path_factory.mktemp("saved"))
    checkpoints = Checkpoints(workdir, keep=1)
    assert checkpoints.save(state, {"step": 1}) is None
    checkpoints.close()
    return workdir, engines.host(state)


@pytest.fixture
def reader(saved, monkeypatch):
    """Its checkpoints, and the arrays that Orbax hands over."""
    checkpoints, handed = Checkpoints(saved[0], keep=1), []
    read = checkpoints._manager.restore

    def watch(*arguments, **named):
        found = read(*arguments, **named)
        handed.extend(x for x in jax.tree.leaves(dict(found)) if isinstance(x, jax.Array))
        return found

    monkeypatch.setattr(checkpoints._manager, "restore", watch)
    yield checkpoints, handed
    checkpoints.close()


@pytest.mark.parametrize("strategy", RESTORED_ON, ids=named)
def test_a_state_comes_back_on_any_layout_to_the_bit(saved, reader, strategy):
    checkpoints, handed = reader
    abstract = engine(strategy).abstract_state()
    found = checkpoints.restore(abstract)
    engines.assert_same_bits(found.state, saved[1])
    for x, planned, read in zip(
        jax.tree.leaves(found.state), jax.tree.leaves(abstract), handed, strict=True
    ):
        assert x.sharding == planned.sharding and x.dtype == planned.dtype
        # Never whole on its way, and not held twice.
        assert read.sharding == planned.sharding and read.is_deleted()


def test_a_restored_state_is_donated_and_trains_like_the_one_that_was_saved(saved):
    workdir, expected = saved
    two = engine(Strategy(fsdp=2, tensor=2))
    batch = engines.put(two, windows(np.random.default_rng(1), 16, 9))
    same = jax.device_put(_without_key(expected), _shardings(_without_key(two.abstract_state())))
    results = []
    for where in ("memory", "file"):
        checkpoints = Checkpoints(workdir, keep=1)
        state = checkpoints.restore(two.abstract_state()).state
        if where == "memory":
            state = dataclasses.replace(same, key=state.key)
        checkpoints.close()
        donated = jax.tree.leaves(state.params)
        state, metrics, _ = two.step(state, None, *batch, measure=False)
        jax.block_until_ready(metrics)
        assert all(x.is_deleted() for x in donated)
        results.append(state)
    engines.assert_same_bits(*results)


def _without_key(state):
    return dataclasses.replace(state, key=())


def _shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)
