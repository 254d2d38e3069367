"""A two-layer network whose every dimension can be cut, for the tests of layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from engines import make

from jaxgoodput.parallel.strategy import Strategy

DIM, HIDDEN, CLASSES = 32, 64, 16
ADAM = optax.adamw(1e-2)

# Every kind: copies, cut parameters, cut computation, and each pair and all three of them.
STRATEGIES = (
    Strategy(data=8),
    Strategy(data=2, fsdp=4),
    Strategy(data=4, fsdp=2),
    Strategy(fsdp=8),
    Strategy(data=4, tensor=2),
    Strategy(data=2, tensor=4),
    Strategy(tensor=8),
    Strategy(fsdp=4, tensor=2),
    Strategy(fsdp=2, tensor=4),
    Strategy(data=2, fsdp=2, tensor=2),
)


def init(key):
    k = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(k[0], (CLASSES * 4, DIM)) * 0.3,
        "up": {
            "kernel": jax.random.normal(k[1], (DIM, HIDDEN)) / DIM**0.5,
            "bias": jnp.zeros(HIDDEN),
        },
        "down": {"kernel": jax.random.normal(k[2], (HIDDEN, DIM)) / HIDDEN**0.5},
        "scale": jnp.ones(DIM),
    }


def loss(params, batch, key):
    """Per-sample losses `[batch]` of windows `[batch, length]` of small numbers."""
    del key
    read, wanted = batch["codes"][:, :-1], batch["codes"][:, 1:]
    x = params["embed"][read]
    x = (
        x
        + jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"][None, None])
        @ (params["down"]["kernel"])
    )
    x = x * params["scale"][None, None]
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean(-1)


def sample(length):
    return {"codes": jax.ShapeDtypeStruct((length,), jnp.int32)}


def windows(rng, count, length):
    return {"codes": rng.integers(0, CLASSES * 4, (count, length)).astype(np.int32)}


def engine(strategy, *, length=9, tx=ADAM, **problem):
    """An engine of the network under `strategy` on the first virtual devices."""
    return make(loss, init=init, tx=tx, strategy=strategy, sample=sample(length), **problem)
