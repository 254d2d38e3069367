"""What was compiled ahead stays compiled, nothing crosses to the device unasked, and nothing is extra."""

import concurrent.futures
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import DIM, cut, known, make, put, read, residual, samples, start

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.engine.compiled import ProgramCache
from jaxgoodput.parallel.strategy import Strategy

SIZES = (1, 3)


@pytest.fixture
def compiled():
    """The names of programs compiled since the test began."""
    names = []
    undo = listen_for_compilations(lambda event: names.append(event.name))
    yield names
    undo()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "kind"),
    [
        (1, {}),
        (
            2,
            {
                "preconditioned": True,
                "tx": optax.adam(0.01),
                "compute_dtype": jnp.dtype("bfloat16"),
            },
        ),
    ],
    ids=["alone", "adam-in-bfloat16"],
)
def test_nothing_compiles_after_a_rehearsal_whatever_the_sizes_and_counts(
    compiled, key, rng, replicas, kind
):
    engine = make(replicas=replicas, **kind)
    engine.compile(SIZES)
    for size in SIZES:
        engine.rehearse(size, accumulate=True)
        engine.rehearse_measuring(size)
    state = start(engine, key)
    steps = [(s, k, m) for s in SIZES for k in (1, 2, 3) for m in (True, False)] * 2
    rng.shuffle(steps)
    placed = {s: put(engine, samples(rng, s * replicas)) for s in SIZES}
    compiled.clear()
    with jax.transfer_guard("disallow"):
        for size, count, measure in steps:
            work = None
            for _ in range(count - 1):
                work = engine.accumulate(work or engine.begin(state), *placed[size])
            state, metrics = engine.step(state, work, *placed[size], measure=measure)
            assert np.isfinite(read(engine, metrics).loss)
    assert compiled == []
    assert int(state.step) == len(steps)


def test_apply_compiles_nothing_after_its_first_use(compiled, key, rng):
    engine = make(replicas=2)
    parts = [put(engine, part) for part in cut(samples(rng, 12), 3)]
    state = start(engine, key)
    for turn in range(3):
        if turn == 1:
            compiled.clear()
        with jax.transfer_guard("disallow"):
            work = engine.begin(state)
            for part in parts[turn:]:
                work = engine.accumulate(work, *part)
            state, _ = engine.apply(state, work)
    assert compiled == []


def test_what_a_size_needs_is_known_once_it_is_compiled():
    engine = make(replicas=2)
    assert engine.bytes_of(4) is None and engine.measuring_bytes_of(4) is None
    (step,) = engine.training_programs(4, accumulate=False)
    engine.compile_program(step)
    assert known(engine.bytes_of(4)).peak > 0 and engine.measuring_bytes_of(4) is None
    (measuring,) = engine.measuring_programs(4)
    engine.compile_program(measuring)
    assert known(engine.measuring_bytes_of(4)).peak > 0


def test_a_program_is_compiled_once_however_many_threads_ask(compiled):
    engine = make(replicas=2)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: engine.compiled(engine.programs.begin), range(4)))
    assert all(one is found[0] for one in found)
    assert compiled.count("jit(_begin)") == 1  # others are of the first test of a process


def test_a_program_that_does_not_compile_is_tried_again():
    class Fails:
        def compile(self):
            raise RuntimeError("no memory")

    compiled, tries = ProgramCache(), []

    def build(size):
        tries.append(size)
        return Fails()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            compiled(build, 3)
    assert tries == [3, 3] and compiled.peek(build, 3) is None


def test_a_batch_in_the_masters_precision_begins_without_a_copy_of_them(key):
    engine = make(replicas=2, preconditioned=True, tx=optax.adam(0.01))
    state = start(engine, key)
    work = engine.begin(state)
    assert work.params["w"] is state.params["w"] and work.scale["w"].shape == (DIM,)


# -- what the executables hold -----------------------------------------------------------------------

# A real amount of compute: the statistics cost a few flops per parameter.
WIDTH, SIZE = 128, 256


def deep(params, batch, key):
    x = batch["x"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return residual({"w": params["w"], "b": jnp.zeros(())}, {**batch, "x": x}) ** 2


def deep_init(key):
    layers = [jnp.ones((5, WIDTH)), jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, 5))]
    return {"layers": layers, "w": jnp.ones(5)}


@pytest.fixture(scope="module", params=["sgd", "adam"])
def deep_engine(request):
    tx = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}[request.param]
    return make(deep, init=deep_init, tx=tx, replicas=8, preconditioned=request.param == "adam")


COLLECTIVE = re.compile(
    r"= \S+ (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast)(-start)?\("
)
TUPLE_COLLECTIVE = re.compile(r"= \(.*?\) (all-reduce)(-start)?\(")


def collectives(text):
    lines = text.splitlines()
    return [
        found.group(1)
        for line in lines
        if (found := COLLECTIVE.search(line) or TUPLE_COLLECTIVE.search(line))
    ]


def test_accumulation_holds_no_collective(deep_engine):
    for first in (True, False):
        text = deep_engine.compiled.text(
            deep_engine.programs.accumulate, deep_engine.shape(SIZE), first=first
        )
        assert "HloModule" in text and collectives(text) == []


@pytest.mark.slow
def test_a_step_is_one_all_reduce_with_statistics_or_without(deep_engine):
    programs, shape = deep_engine.programs, deep_engine.shape(SIZE)
    for measure in (False, True):
        text = deep_engine.compiled.text(programs.step, shape, measure=measure)
        assert collectives(text) == ["all-reduce"]
    assert collectives(deep_engine.compiled.text(programs.step_after, shape)) == ["all-reduce"]


def flops(engine, measure, size=SIZE):
    return engine.compiled.cost(engine.programs.step, engine.shape(size), measure=measure)["flops"]


def test_statistics_cost_about_a_hundredth_of_the_flops(deep_engine):
    plain, measured = flops(deep_engine, False), flops(deep_engine, True)
    real = 3 * 2 * SIZE * WIDTH * (WIDTH + 10)  # forward, and twice that backward
    assert plain > 0.8 * real, "XLA counts less than the products themselves"
    assert plain < measured <= 1.011 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("size", "share"), [(64, 1 / 4), (SIZE, 1 / 16)])
@pytest.mark.parametrize("strategy", [Strategy(), Strategy(fsdp=4)], ids=lambda s: s.name)
def test_a_part_of_the_rows_costs_its_share_more(strategy, size, share):
    engine = make(deep, init=deep_init, strategy=strategy)
    plain, measured = (flops(engine, measure, size) for measure in (False, True))
    # Beside it, a pass over both gradients, which weighs more in a small batch.
    assert (1 + 0.8 * share) * plain < measured <= (1.03 + share) * plain
