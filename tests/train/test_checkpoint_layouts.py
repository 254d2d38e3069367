"""What was saved on one layout comes back on any other, to the bit, each device with its own part."""

import errno
import threading

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import engine, windows

from jaxgoodput import _disk
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.engine import saved as saved_states
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import SavedLedger
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.checkpoints.meta import CheckpointMeta
from jaxgoodput.train.checkpoints.writer import Checkpoints

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


def filled(abstract):
    """A state on its layout whose every number is another one."""
    rng = np.random.default_rng(0)

    def fill(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(7), x.sharding)
        return jax.device_put((rng.random(x.shape) * 100).astype(x.dtype), x.sharding)

    return jax.tree.map(fill, abstract)


def meta_of(step):
    return CheckpointMeta(
        step=step,
        samples=8 * step,
        cursor=Cursor(seed=0, offset=8 * step),
        batch=BatchConfig(micro_batch_size=1, num_micro_batches=1, num_replicas=8),
        timings={},
        statistics_every=1,
        ledger=SavedLedger(saved_at=0.0),
        lost={},
    )


def save(workdir, strategy):
    """A checkpoint of such a state, and the state on the host."""
    state = filled(engine(strategy).abstract_state())
    checkpoints = Checkpoints(str(workdir), keep=1)
    assert checkpoints.save(state, meta_of(1)) is None
    checkpoints.close()
    return engines.host(state)


@pytest.fixture(scope="module", params=SAVED_ON, ids=named)
def saved(request, tmp_path_factory):
    """A workdir with a checkpoint, and what it holds."""
    workdir = tmp_path_factory.mktemp("saved")
    return str(workdir), save(workdir, request.param)


@pytest.fixture
def reader(saved, monkeypatch):
    """Its checkpoints, and the arrays that Orbax hands over."""
    checkpoints, handed = Checkpoints(saved[0], keep=1), {}
    read = saved_states.read

    def watch(*arguments):
        found = read(*arguments)
        handed.update(found)
        return found

    monkeypatch.setattr(saved_states, "read", watch)
    yield checkpoints, handed
    checkpoints.close()


@pytest.mark.parametrize("strategy", RESTORED_ON, ids=named)
def test_a_state_comes_back_on_any_layout_to_the_bit(saved, reader, strategy):
    checkpoints, handed = reader
    abstract = engine(strategy).abstract_state()
    found = checkpoints.restore(lambda meta: abstract)
    engines.assert_same_bits(found.state, saved[1])
    leaves, _ = jax.tree_util.tree_flatten_with_path(found.state)
    assert len(handed) == len(leaves)
    for (path, x), planned in zip(leaves, jax.tree.leaves(abstract), strict=True):
        read = handed[jax.tree_util.keystr(path)]
        assert x.sharding == planned.sharding and x.dtype == planned.dtype
        # Never whole on its way, and not held twice.
        assert read.sharding == planned.sharding and read.is_deleted()


def test_a_restored_state_owns_its_buffers_and_trains_like_the_one_that_was_saved(tmp_path):
    two = engine(Strategy(fsdp=2, tensor=2))
    abstract = two.abstract_state()
    save(tmp_path, Strategy(fsdp=8))
    batch = engines.put(two, windows(np.random.default_rng(1), 16, 9))
    results = []
    for make in (lambda: filled(abstract), lambda: restored(tmp_path, abstract)):
        state = make()
        donated = jax.tree.leaves(state.params)
        state, metrics = two.step(state, None, *batch, measure=False)
        jax.block_until_ready(metrics)
        assert all(x.is_deleted() for x in donated)
        results.append(state)
    engines.assert_same_bits(*results)


def restored(workdir, abstract):
    checkpoints = Checkpoints(str(workdir), keep=1)
    try:
        return checkpoints.restore(lambda meta: abstract).state
    finally:
        checkpoints.close()


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.parametrize("spans", [False, True])
def test_a_save_is_written_though_earlier_ones_fail_meanwhile(
    tmp_path, monkeypatch, spans, num_failures
):
    """Each failure is told with the step that failed, by the save after it."""
    seal, released, left = _disk.seal, threading.Semaphore(0), [None] * num_failures

    def fail_first(folder):
        if not left:
            return seal(folder)
        left.pop()
        released.acquire(timeout=30)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_disk, "seal", fail_first)
    state = filled(engine(Strategy()).abstract_state())
    checkpoints = Checkpoints(str(tmp_path), keep=1, spans=spans)
    assert checkpoints.save(state, meta_of(1)) is None
    for step in range(2, 2 + num_failures):
        threading.Timer(0.2, released.release).start()  # while the next save is asked for
        error = checkpoints.save(state, meta_of(step))
        assert error is not None and error.startswith(f"step {step - 1}: ") and "space" in error
    assert checkpoints.wait() is None
    assert checkpoints.newest() == 1 + num_failures
    checkpoints.close()
