"""A tree of parameters with everything in it, and what becomes of its leaves."""

import itertools

import jax

from jaxgoodput.parallel.partition import param_specs, path_name
from jaxgoodput.parallel.strategy import Strategy

DIM = 64
EVERY = Strategy(fsdp=2, tensor=2)


def params(seed=0):
    """A little of everything: names that repeat under several paths, in several shapes."""
    numbers = itertools.count(seed)

    def normal(*shape):
        return jax.random.normal(jax.random.key(next(numbers)), shape)

    return {
        "embed": {"embedding": normal(256, DIM)},
        "layers": [
            {"up": {"kernel": normal(DIM, 256), "bias": normal(256)}, "down": normal(256, DIM)}
            for _ in range(2)
        ],
        "kernel": normal(DIM, DIM),
        "scale": normal(DIM),
        "odd": normal(35, 33),
    }


def specs_of(tree, strategy=EVERY, own=()):
    """Path -> spec."""
    layout = strategy.on(jax.devices()[: strategy.num_devices])
    found = param_specs(layout, tree, own)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): found.spec(path, leaf.shape) for path, leaf in leaves}
