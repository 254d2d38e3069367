"""A batch that came home and leaves again: any order of layouts, and nothing is compiled."""

import itertools

import engines
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.parallel.strategy import Strategy

AWAY = (Strategy(fsdp=8), Strategy(fsdp=4, tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_every_order_of_layouts_runs_what_was_compiled_ahead(dtype):
    home = layouts.engine(Strategy(data=8), preconditioned=False, compute_dtype=dtype)
    there = [home.layout, *(strategy.on(jax.devices()) for strategy in AWAY)]
    home.compile_batches([(layout, 1) for layout in there])
    state = home.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    ready = [
        engines.put(home.on(layout), layouts.windows(rng, layout.num_replicas, 9))
        for layout in there
    ]
    # A move whose programs are there already would be planned only, which takes time too.
    made = home.engines.compiled._once
    ahead, compilations = len(made), []
    stop = listen_for_compilations(compilations.append)
    try:
        # Home is 0: away and home again, twice, by every way.
        for order in [*itertools.product(range(3), repeat=3), (0, 1, 0, 2, 0), (1, 0, 2, 0, 1)]:
            work = home.begin(state)
            for i in order:
                rows, mask = ready[i]
                work = home.accumulate(work, rows, mask, there[i])
            state, metrics = home.apply(state, work)
            jax.block_until_ready(metrics)
    finally:
        stop()
    assert [c.name for c in compilations] == [] and len(made) == ahead
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(engines.host(state.params)))
