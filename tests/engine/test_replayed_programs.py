"""What a function came to is replayed for the next set of devices: the same programs, the loss not called."""

import engines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.engine.programs.families import GlobalPrograms, SeparatePrograms
from jaxgoodput.engine.traces import Traces
from jaxgoodput.parallel.strategy import Strategy


def every_program(engine, traces):
    kind = GlobalPrograms if engine.layout.strategy.is_cut else SeparatePrograms
    programs = kind(
        engine.problem,
        engine.layout,
        state=engine.engines.state,
        shape=engine.shape(1),
        traces=traces,
    )
    shape = engine.shape(2)
    made = [
        programs.begin(),
        programs.update(),
        programs.step_after(shape),
        *(programs.accumulate(shape, first=first) for first in (True, False)),
        *(programs.step(shape, measure=measure) for measure in (False, True)),
    ]
    return [program.lower().as_text() for program in made]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy(data=2), Strategy(fsdp=2)], ids=lambda s: s.name)
def test_programs_are_the_same_and_the_loss_is_traced_once(strategy):
    calls = []

    def loss(params, batch, key):
        calls.append(1)
        return engines.per_sample(params, batch, key) + jax.random.normal(key, ())

    engine = engines.make(strategy=strategy, loss=loss, tx=optax.adamw(0.1), preconditioned=True)
    traces = Traces()
    usual = every_program(engine, None)
    first = every_program(engine, traces)
    assert calls
    calls.clear()
    again = every_program(engine, traces)
    assert not calls
    assert again == first == usual


def test_other_types_and_other_keys_are_other_traces():
    traces = Traces()

    def compute(key, function, x):
        return jax.jit(lambda x: traces(key, function, x))(x)

    x = jnp.arange(3.0)
    for _ in range(2):
        assert compute("a", lambda x: x + 1, x).tolist() == [1, 2, 3]
        assert compute("b", lambda x: x - 1, x).tolist() == [-1, 0, 1]
        assert compute("a", lambda x: x + 1, x.astype(jnp.int32)).dtype == jnp.int32
        assert compute("a", lambda x: x + 1, x[:2]).tolist() == [1, 2]


def test_structures_come_back_and_a_constant_outlives_its_device():
    traces, table = Traces(), jnp.arange(4.0)

    def look(x):
        return {"found": table[x["at"]], "both": (x["at"], table.sum())}

    def compute(at):
        return jax.jit(lambda x: traces("look", look, x))({"at": at})

    assert compute(2)["found"] == 2
    table.delete()
    found = compute(3)
    assert found["found"] == 3 and found["both"] == (3, 6)


@pytest.mark.slow
def test_a_constant_that_cannot_be_kept_has_the_function_called_again():
    traces, key, calls = Traces(), jax.random.key(3), []

    def draw(x):
        calls.append(1)
        return x + jax.random.normal(key, ())

    def compute(x):
        return jax.jit(lambda x: traces("draw", draw, x))(x)

    first = compute(jnp.zeros(2))
    before = len(calls)
    jax.clear_caches()
    np.testing.assert_array_equal(compute(jnp.zeros(2)), first)
    assert len(calls) > before


def test_an_array_within_a_function_of_the_loss_is_not_kept():
    """It would keep its devices, to which others are connected."""
    traces, calls = Traces(), []

    @jax.jit
    def inner(x):
        with jax.ensure_compile_time_eval():
            table = jnp.arange(3.0) + 1
        return x * table

    def outer(x):
        calls.append(1)
        return inner(x) + 1

    for _ in range(2):
        found = jax.jit(lambda x: traces("outer", outer, x))(jnp.ones(3))
        assert found.tolist() == [2.0, 3.0, 4.0]
    assert not any(_arrays(trace.jaxpr.jaxpr) for trace in traces.once._made.values() if trace)


def _arrays(jaxpr):
    inner = [x for one in jaxpr.eqns for x in one.params.values() if hasattr(x, "consts")]
    return [c for x in inner for c in (*x.consts, *_arrays(x.jaxpr)) if isinstance(c, jax.Array)]
