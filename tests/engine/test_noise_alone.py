"""An elastic job that nobody else has joined tells its noise from the rows of its only micro-batch."""

import engines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.parallel.strategy import Strategy

ROWS = 64
CASES = {
    "one device": {},
    "a whole loss": {"loss_kind": "whole"},
    "cut over devices": {"strategy": Strategy(fsdp=2)},
    "preconditioned": {"tx": optax.adam(0.01), "preconditioned": True},
}


def step_of(engine, state, rows, *, measure):
    """One elastic step, and the control vector that rides with it."""
    batch, mask = engines.put(engine, rows)
    work = engine.accumulate(engine.begin(state), batch, mask, measure=measure)
    return engine.apply(state, work, np.zeros(1, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_a_job_of_one_process_measures(name, rng):
    how = CASES[name]
    alone, usual = engines.make(elastic=True, **how), engines.make(**how)
    assert alone.can_measure(ROWS) and not alone.has_groups
    rows = [engines.samples(rng, ROWS) for _ in range(8)]
    found = []
    for engine in (alone, usual):
        state, packed = engines.start(engine, jax.random.key(0)), None
        for one in rows:
            if engine is alone:
                state, packed = step_of(engine, state, one, measure=True)
            else:
                batch, mask = engines.put(engine, one)
                state, packed = engine.step(state, None, batch, mask, measure=True)
        found.append((engines.read(engine, packed), jax.device_get(state.params)))
    (elastic, params), (whole, expected) = found
    assert elastic.num_groups == whole.num_groups == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), params, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-7),
        elastic.noise,
        whole.noise,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_does_not_measure_makes_the_same_update(name, rng):
    engine = engines.make(elastic=True, **CASES[name])
    rows, params, groups = engines.samples(rng, ROWS), [], []
    for measure in (False, True):
        state = engines.start(engine, jax.random.key(0))
        state, packed = step_of(engine, state, rows, measure=measure)
        params.append(jax.device_get(state.params))
        groups.append(engines.read(engine, packed).num_groups)
    assert groups == [1, 2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *params)


def test_rows_that_cannot_be_told_apart_are_not_measured(rng):
    def whole_batch(params, batch, key):  # a sum over the rows, of which none can be left out
        return jnp.sum(engines.residual(params, batch) ** 2)

    engine = engines.make(elastic=True, loss=whole_batch)
    assert not engine.can_measure(1)


def test_several_replicas_are_groups_of_their_own():
    engine = engines.make(elastic=True, replicas=4)
    assert engine.has_groups and engine.can_measure(8) and not engine.measuring_programs(8)
