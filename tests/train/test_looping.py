"""Short steps run in a loop of one program, and blocks of sizes on trial are compiled along with them."""

import dataclasses
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Counting, Recorder, counting_config
from scripted import WAIT_S, Scripted, sizes_of

from jaxgoodput import BatchLimits
from jaxgoodput.engine.compiled import ProgramCache
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs.blocks import BlockPrograms
from jaxgoodput.engine.programs.families import Programs
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.observe.events import StepEnd
from jaxgoodput.train.compile_sizes import SizeCompiler
from jaxgoodput.train.duties.blocks import Blocks
from jaxgoodput.train.start import looping
from jaxgoodput.train.start.looping import ADDITIONS, FLOPS, ShortSteps, step_seconds

ONE: dict[str, Any] = {"devices": jax.devices()[:1]}


def looped(function, *shapes, splits):
    """The jaxpr of a step that is `function`, or of a block of such steps that can be split."""

    def block(count, *arguments):
        def step(_, x):
            return jax.tree.map(lambda a, b: a + 0 * b.sum(), x, function(*x))

        return jax.lax.fori_loop(0, count, step, arguments) if splits else step(0, arguments)

    values = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.make_jaxpr(block)(jax.ShapeDtypeStruct((), jnp.int32), *values).jaxpr


@pytest.mark.slow
@pytest.mark.parametrize("splits", [True, False])
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 10**6), width=st.integers(1, 10**4))
def test_seconds_are_at_least_those_of_what_a_step_computes(splits, rows, width):
    """Nothing is executed, so that the sizes may be anything."""
    product = looped(lambda x, w: (x @ w, w), (rows, width), (width, width), splits=splits)
    numbers = rows * width + width * width
    flops_s = 2 * rows * width * width / FLOPS
    assert flops_s <= step_seconds(product) <= flops_s + 20 * numbers / ADDITIONS
    sums = looped(lambda x: (jnp.cumsum(x),), (rows,), splits=splits)
    assert step_seconds(sums) >= 100 * rows / ADDITIONS, "what is not a product counts too"


@pytest.mark.parametrize("splits", [True, False])
def test_trips_that_are_not_known_are_not_short(splits):
    def step(x):
        return (jax.lax.while_loop(lambda y: y[0] < 9, lambda y: y + 1, x),)

    jaxpr = looped(step, (4,), splits=splits)
    assert step_seconds(jaxpr) == float("inf") or not splits


@pytest.mark.parametrize("digest", [True, False])
def test_a_program_that_was_looked_at_is_not_traced_again(digest):
    traced, cache = [], ProgramCache()
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def build():
        x = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=where)
        return Program(lambda x: (traced.append(1), x + 1)[1], (), (x,), where)

    program = partial(build)
    cache.look_at(program)
    assert cache.peek(program) is None and len(traced) == 1
    if digest:
        cache.digest(program)
    cache(program)
    assert cache.seconds(program) and len(traced) == 1


@pytest.fixture
def built(monkeypatch):
    """The plain programs that runs have built: "steps" or "step"."""
    found, steps, step = [], BlockPrograms.steps, Programs.step

    def build_steps(self, shape):
        found.append("steps")
        return steps(self, shape)

    def build_step(self, shape, *, measure):
        if not measure:
            found.append("step")
        return step(self, shape, measure=measure)

    monkeypatch.setattr(BlockPrograms, "steps", build_steps)
    monkeypatch.setattr(Programs, "step", build_step)
    return found


def free(folder, **options):
    """Settings under which measured times decide when the noise is measured, so that blocks may be used."""
    ours = {"statistics__every_steps": None, "execution__background_compile": True}
    return counting_config(folder, **{**ours, **options})


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fixed", "goodput"])
@pytest.mark.parametrize("num_samples", [47, 48, 100])
def test_short_steps_have_one_program(tmp_path, built, policy, num_samples):
    """From the first step on; a smaller last batch has another of the same kind."""
    settings = free(tmp_path, epochs=20, policy=policy)
    state = Counting(settings, num_samples=num_samples, **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 20)
    assert set(built) == {"steps"}


@pytest.mark.slow
def test_a_run_that_goes_on_loops_too(tmp_path, built):
    Counting(free(tmp_path, epochs=2), **ONE).fit()
    state = Counting(free(tmp_path, epochs=40), **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 40)
    assert set(built) == {"steps"}


@pytest.mark.slow
def test_larger_steps_have_a_program_of_their_own(tmp_path, built, monkeypatch):
    monkeypatch.setattr(looping, "step_seconds", lambda block: 0.9 * looping.SHORT_S)
    limits = BatchLimits(base=16, max=32, micro=(16, 32))
    settings = free(tmp_path, epochs=40, policy={0: 16, 0.5: 32}, batch=limits)
    state = Counting(settings, **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 40)
    assert built[0] == "steps" and "step" in built


NOT: dict[str, dict[str, Any]] = {
    "the user says which steps measure": {"statistics__every_steps": 50},
    "batches are not one micro-batch": {
        "batch": BatchLimits(base=16, max=16, micro=(1, 8)),
        "tuning__accumulate": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("reason", NOT)
def test_a_run_that_may_have_no_blocks_has_none(tmp_path, built, reason):
    Counting(free(tmp_path, epochs=2, **NOT[reason]), **ONE).fit()
    assert "steps" not in built


@pytest.mark.slow
def test_neither_has_one_of_several_replicas_nor_one_that_jax_debugs(tmp_path, built):
    Counting(free(tmp_path / "two", epochs=2), devices=jax.devices()[:2]).fit()
    with jax.debug_nans(True):
        Counting(free(tmp_path / "nan", epochs=2), **ONE).fit()
    assert "steps" not in built


def test_nor_one_of_a_large_model_or_of_long_steps(tmp_path, built, monkeypatch):
    monkeypatch.setattr(looping, "step_seconds", lambda block: 1.1 * looping.SHORT_S)
    Counting(free(tmp_path / "long", epochs=2), **ONE).fit()
    assert "step" in built
    built.clear()
    monkeypatch.setattr(looping, "ADDITIONS", 1.0 / looping.SHORT_S)
    Counting(free(tmp_path / "large", epochs=2), **ONE).fit()
    assert "steps" not in built


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 16, 64])
def test_steps_whose_block_does_not_fit_have_a_program_of_their_own(
    tmp_path, built, monkeypatch, most
):
    """It holds the rows of all its steps. No size is refused because of that."""
    bytes_of = Engine.bytes_of

    def scarce(self, size):
        need = bytes_of(self, size)
        is_large = self.blocks.loops(self.shape(size)) and self.shape(size).micro_batch_size > most
        return dataclasses.replace(need, temporaries=2**60) if need and is_large else need

    monkeypatch.setattr(Engine, "bytes_of", scarce)
    limits = BatchLimits(base=16, max=32, micro=(16, 32))
    recorder = Recorder()
    settings = free(tmp_path, epochs=80, policy={0: 16, 0.5: 32}, batch=limits)
    state = Counting(settings, hooks=[recorder], **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 80)
    assert {e.num_samples for e in recorder.events if isinstance(e, StepEnd)} == {16, 32}
    assert ("step" in built) is (most < 32)


class Convolving(Counting):
    def loss(self, params, batch, key):
        x = batch["x"]
        kernel = jnp.ones((1, 1, 1)) * params["count"].sum()
        smooth = jax.lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")
        return super().loss(params, batch, key) + 0 * smooth.sum((1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("pays", [True, False])
def test_nor_one_with_convolutions_which_have_blocks_of_copies(tmp_path, built, monkeypatch, pays):
    """Their gradients take several times as long in a loop of XLA:CPU."""
    monkeypatch.setattr(Blocks, "_pay", lambda self, batch: pays)
    state = Convolving(free(tmp_path, epochs=60), **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 60)
    looked_at, *compiled = built
    assert looked_at == "steps" and compiled == ["step", "steps"][: 1 + pays]


class Failing(Counting):
    def loss(self, params, batch, key):
        if len(batch["x"]) == 16:  # not when it is tried on a few samples
            raise ZeroDivisionError("the loss of sixteen samples")
        return super().loss(params, batch, key)


def test_what_fails_in_a_loop_is_raised_where_it_is_needed(tmp_path, built):
    with pytest.raises(Exception, match="the loss of sixteen samples"):
        Failing(free(tmp_path, epochs=2), **ONE).fit()
    assert built[-1] == "step"


@pytest.mark.parametrize("step_s, num_epochs", [(1e-3, 2000), (1e-3, 2), (0.02, 2000)])
def test_where_no_part_of_a_block_can_run_the_program_is_compiled_soon(
    tmp_path, monkeypatch, step_s, num_epochs
):
    """As on an accelerator; if steps are surely short, and there are enough of them."""
    asked = []
    monkeypatch.setattr(BlockPrograms, "can_split", False)
    monkeypatch.setattr(looping, "step_seconds", lambda block: step_s)
    monkeypatch.setattr(SizeCompiler, "compile_soon", lambda self, programs: asked.append(programs))
    compile_soon = ShortSteps.compile_soon

    def once(self, strategies, batch):
        compile_soon(self, strategies, batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(ShortSteps, "compile_soon", once)
    with pytest.raises(KeyboardInterrupt):
        Counting(free(tmp_path, epochs=num_epochs), **ONE).fit()
    assert bool(asked) is (step_s < 0.01 and num_epochs > 10)


# -- along with sizes -------------------------------------------------------------------------------------


def along(engine, most):
    return lambda size: (partial(engine._program, "block", size),) if size <= most else ()


@pytest.mark.parametrize("most", [0, 16, 64])
def test_a_size_is_ready_once_its_block_is_compiled(most):
    engine = Scripted()
    sizes = sizes_of(engine)
    sizes.near(4)
    sizes.compile_along(along(engine, most))
    engine.may_go.clear()
    sizes.compile_next(16)
    assert engine.entered.wait(WAIT_S) and 16 not in sizes.ready()
    engine.may_go.set()
    assert sizes.wait(WAIT_S) and 16 in sizes.ready()
    at = [engine.compiled.index((kind, 16)) for kind in ("step", "block") if 16 <= most]
    assert at == sorted(at) and (("block", 16) in engine.compiled) is (16 <= most)
    sizes.close()


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_block_that_cannot_be_compiled_is_left_out_and_named(caplog, is_urgent):
    """The size is as good as before: blocks are no more than faster."""
    engine = Scripted()
    compile_program = engine.compile_program

    def fails(program):
        if program.args[0] == "block":
            raise RuntimeError("the compiler ran out of memory")
        compile_program(program)

    engine.compile_program = fails
    sizes = sizes_of(engine)
    sizes.near(4)
    if is_urgent:
        sizes.compile_soon(along(engine, 64)(4))
    else:
        sizes.compile_along(along(engine, 64))
    sizes.compile_next(16)
    assert sizes.wait(WAIT_S) and 16 in sizes.ready()
    sizes.close()
    assert "the compiler ran out of memory" in caplog.text


@given(
    plain_s=st.floats(0, 10), block_s=st.lists(st.floats(0, 10) | st.none(), min_size=1, max_size=3)
)
def test_what_is_compiled_along_is_part_of_the_price(plain_s, block_s):
    seconds = dict(enumerate(block_s))
    engine: Any = mock.Mock(spec=Engine)
    engine.compile_s.return_value = plain_s
    engine.compiled = SimpleNamespace(seconds=lambda program: seconds[program])
    engine.measuring_bytes_of.return_value = None
    engine.measuring_programs.return_value = ("left out",)
    sizes = SizeCompiler(engine, (4, 16), accumulate=False, budget=1)
    assert sizes.num_plain == 1, "nothing is known yet"
    sizes.near(4)
    assert sizes.num_plain == 1
    sizes.compile_along(lambda size: tuple(seconds))  # pyright: ignore[reportArgumentType]
    expected = 1 + sum(x or 0.0 for x in block_s) / plain_s if plain_s else 1.0
    assert sizes.num_plain == pytest.approx(expected)


# -- the initial values ---------------------------------------------------------------------------------


@pytest.fixture
def inits(monkeypatch):
    """The threads that compiled the program of the initial values."""
    found, compiled = [], Program.compiled

    def note(self, lowered):
        if self.out is not None and "key" in str(self.arguments[:1]) and len(self.arguments) == 1:
            found.append(threading.current_thread().name)
        return compiled(self, lowered)

    monkeypatch.setattr(Program, "compiled", note)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("behind", [True, False])
def test_the_initial_values_are_compiled_beside_the_first_step(tmp_path, inits, behind):
    """In a new run, if anything may be compiled on a thread."""
    settings = free(tmp_path, epochs=2, execution__background_compile=behind)
    Counting(settings, **ONE).fit()
    assert inits == ["jaxgoodput-init" if behind else "MainThread"]
    assert not [x for x in threading.enumerate() if x.name == "jaxgoodput-init"]
    Counting(free(tmp_path, epochs=3, execution__background_compile=behind), **ONE).fit()
    assert len(inits) == 1, "a run that goes on has its values"


def test_what_fails_there_is_compiled_again_where_the_values_are_needed(tmp_path, monkeypatch):
    compiled, failed = Program.compiled, []

    def fails(self, lowered):
        if threading.current_thread().name == "jaxgoodput-init":
            failed.append(1)
            raise RuntimeError("the compiler ran out of memory")
        return compiled(self, lowered)

    monkeypatch.setattr(Program, "compiled", fails)
    state = Counting(free(tmp_path, epochs=2), **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 2)
    assert failed
