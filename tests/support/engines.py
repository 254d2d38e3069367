"""Small engines, and batches placed on their devices, for the tests of the engine."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxgoodput.engine.engine import Engines, LossKind
from jaxgoodput.engine.step import Problem, init_state
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.parallel.place import DEVICE_AXIS, GROUP_AXIS
from jaxgoodput.parallel.strategy import Strategy

T = TypeVar("T")

DIM = 5
BASE = 8
SAMPLE = {
    "x": jax.ShapeDtypeStruct((DIM,), jnp.float32),
    "y": jax.ShapeDtypeStruct((), jnp.float32),
    "weight": jax.ShapeDtypeStruct((), jnp.float32),
}


def linear_init(key):
    return {"w": jax.random.normal(key, (DIM,)), "b": jnp.zeros(())}


def residual(params, batch):
    return batch["x"] @ params["w"] + params["b"][None] - batch["y"]


def per_sample(params, batch, key):
    return residual(params, batch) ** 2 / 2


def make(
    loss=per_sample,
    *,
    init=linear_init,
    tx=None,
    rule=rules.none,
    replicas=1,
    strategy=None,
    sample=None,
    loss_and_state=None,
    smoothing=0.999,
    labels=None,
    base=BASE,
    num_std_errors=1.0,
    loss_kind: LossKind = "auto",
    elastic=False,
    **problem,
):
    """An engine over `replicas` virtual devices, or those of another strategy.

    `elastic`: of a job whose processes come and go, and of which nobody else is there. `loss_kind` is the
    `loss` of `Engines`: whether it runs globally or separately.
    """
    strategy = strategy or Strategy(data=replicas)

    def stateless(params, model_state, batch, key):
        return loss(params, batch, key), model_state

    engines = Engines(
        Problem(
            init=init,
            loss_and_state=loss_and_state or stateless,
            tx=adaptive(
                tx or optax.sgd(0.1),
                rule,
                base_batch_size=base,
                labels=labels,
                smoothing=smoothing,
                num_std_errors=num_std_errors,
                keeps_fresh=False,
            ),
            base_batch_size=base,
            **problem,
        ),
        sample or SAMPLE,
        loss=loss_kind,
        world=_world(strategy.num_devices) if elastic else None,
        control_size=1 if elastic else 0,
    )
    return engines.on(strategy.on(jax.devices()[: strategy.num_devices]))


def _world(num_devices):
    devices = np.array(jax.devices()[:num_devices]).reshape(1, -1)
    return Mesh(devices, (GROUP_AXIS, DEVICE_AXIS))


@functools.cache
def _init(engine):
    # What Engine.init does, which compiles anew at every call: a run needs it once, a test often.
    shardings = jax.tree.map(lambda x: x.sharding, engine.abstract_state())
    return jax.jit(lambda key: init_state(engine.problem, key), out_shardings=shardings)


def start(engine, key):
    """A fresh state."""
    return _init(engine)(jax.device_put(key, engine.layout.replicated))


def samples(rng, count):
    """Random samples of the linear problem, whose weights are token counts."""
    return {
        "x": rng.standard_normal((count, DIM)).astype(np.float32),
        "y": rng.standard_normal(count).astype(np.float32),
        "weight": rng.integers(1, 5, count).astype(np.float32),
    }


def put(engine, rows, mask=None):
    """A global micro-batch and its mask on the engine's devices."""
    count = len(jax.tree.leaves(rows)[0])
    mask = np.ones(count, np.float32) if mask is None else np.asarray(mask, np.float32)
    return jax.device_put((rows, mask), engine.layout.batch_sharding)


def cut(rows, parts):
    """The rows in `parts` equal runs."""
    pieces = [np.split(x, parts) for x in jax.tree.leaves(rows)]
    structure = jax.tree.structure(rows)
    return [jax.tree.unflatten(structure, piece) for piece in zip(*pieces, strict=True)]


def read(engine, packed):
    """What a step reports."""
    return engine.read(packed)[0]


def run(engine, state, micro_batches, *, fused=True, measure=True):
    """One step over (rows, mask) pairs; the new state and what it reports."""
    placed = [put(engine, *m) if isinstance(m, tuple) else put(engine, m) for m in micro_batches]
    work = None
    if not fused or len(placed) > 1:
        work = engine.begin(state)
        for batch, mask in placed[: len(placed) - fused]:
            work = engine.accumulate(work, batch, mask)
    if fused:
        state, metrics = engine.step(state, work, *placed[-1], measure=measure)
    else:
        state, metrics = engine.apply(state, work)
    return state, read(engine, metrics)


def known(value: T | None) -> T:
    """The value, which is there."""
    assert value is not None
    return value


def host(tree):
    """A copy on the host; keys as their numbers."""

    def get(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.array(x)

    return jax.tree.map(get, tree)


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, host(a), host(b))


def assert_close(a, b, **tolerance):
    tolerance = {"rtol": 2e-5, "atol": 1e-6, **tolerance}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), host(a), host(b))
