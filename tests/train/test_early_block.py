"""Blocks are compiled beside the first step if they surely pay, and along with sizes once they do."""

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
from problems import Counting, counting_config
from scripted import WAIT_S, Scripted, sizes_of

from jaxgoodput import BatchLimits
from jaxgoodput.engine.compiled import ProgramCache
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.compile_sizes import SizeCompiler
from jaxgoodput.train.start import early_block
from jaxgoodput.train.start.early_block import COUNT, EarlyBlock, is_surely_short
from jaxgoodput.tune.block_times import BlockTimes

ONE: dict[str, Any] = {"devices": jax.devices()[:1]}


def program(function, *shapes):
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments
    )
    return Program(function, (), placed, where)


@settings(max_examples=30)
@given(rows=st.integers(1, 10**6), width=st.integers(1, 10**4))
def test_short_is_what_computes_little(rows, width):
    """Nothing is executed, so that the sizes may be anything."""
    product = program(lambda x, w: x @ w, (rows, width), (width, width))
    sums = program(lambda x: jnp.cumsum(x), (rows,))
    flops_s = (2 * rows * width + 1) * width / early_block.FLOPS
    if flops_s > 1.1 * COUNT * early_block.SURELY_SHORT_S:
        assert not is_surely_short(product)
    if flops_s + rows * width / early_block.ADDITIONS < COUNT * early_block.SURELY_SHORT_S / 1.1:
        assert is_surely_short(product)
    if 100 * rows / early_block.ADDITIONS > 2 * COUNT * early_block.SURELY_SHORT_S:
        assert not is_surely_short(sums), "what is not a product counts too"


def test_trips_that_are_not_known_are_not_short():
    loop = program(lambda x: jax.lax.while_loop(lambda y: y[0] < 9, lambda y: y + 1, x), (4,))
    assert not is_surely_short(loop)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_program_is_traced_once_and_compiled_if_it_is_wanted(is_wanted):
    traced, cache = [], ProgramCache()

    def build():
        return program(lambda x: (traced.append(1), x + 1)[1], (3,))

    wanted = partial(build)
    assert cache.compile_if(lambda made: made.traced is not None and is_wanted, wanted) is is_wanted
    assert (cache.peek(wanted) is not None) is is_wanted and len(traced) == 1
    cache(wanted)
    assert len(traced) == 2 - is_wanted
    assert cache.seconds(wanted)


@pytest.fixture
def threads(monkeypatch):
    """The threads that compiled blocks ahead, in runs that are long enough for them, however short."""
    found = []

    def is_short(made):
        found.append(threading.current_thread().name)
        return True

    monkeypatch.setattr(early_block, "COMPILING_S", 0.0)
    monkeypatch.setattr(early_block, "is_surely_short", is_short)
    return found


def free(folder, **options):
    """Settings under which measured times decide when the noise is measured, so that blocks may be used."""
    ours = {"statistics__every_steps": None, "execution__background_compile": True}
    return counting_config(folder, **{**ours, **options})


@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_a_run_begins_with_its_block_compiled(tmp_path, threads, monkeypatch, policy):
    """And each sample is applied once."""
    monkeypatch.setattr(BlockTimes, "knows_alone", lambda self, config, *, busy: True)
    hand_over = EarlyBlock.hand_over

    def wait(self, strategies, batch):
        self.close()  # a run of few steps would be over before
        hand_over(self, strategies, batch)

    monkeypatch.setattr(EarlyBlock, "hand_over", wait)
    steps, counts = Engine.steps, []

    def counted(self, *args, count):
        counts.append(count)
        return steps(self, *args, count=count)

    monkeypatch.setattr(Engine, "steps", counted)
    state = Counting(free(tmp_path, epochs=60, policy=policy), **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 60)
    assert threads == ["jaxgoodput-early"] and set(counts) == {COUNT}


NOT: dict[str, dict[str, Any]] = {
    "the user says which steps measure": {"statistics__every_steps": 50},
    "nothing is compiled behind": {"execution__background_compile": False},
    "batches are not one micro-batch": {
        "batch": BatchLimits(base=16, max=16, micro=(1, 8)),
        "tuning__accumulate": True,
    },
}


@pytest.mark.parametrize("reason", NOT)
def test_a_run_that_may_have_no_blocks_compiles_none(tmp_path, threads, reason):
    Counting(free(tmp_path, epochs=2, **NOT[reason]), **ONE).fit()
    assert not threads


def test_neither_does_one_that_goes_on_nor_one_of_several_replicas(tmp_path, threads):
    Counting(free(tmp_path, epochs=2), **ONE).fit()
    assert len(threads) == 1
    Counting(free(tmp_path, epochs=4), **ONE).fit()
    Counting(free(tmp_path / "two", epochs=2), devices=jax.devices()[:2]).fit()
    assert len(threads) == 1


def test_nor_one_that_jax_debugs_nor_of_a_large_model(tmp_path, threads, monkeypatch):
    with jax.debug_nans(True):
        Counting(free(tmp_path / "nan", epochs=2), **ONE).fit()
    monkeypatch.setattr(early_block, "ADDITIONS", 1.0 / early_block.SURELY_SHORT_S)
    Counting(free(tmp_path / "large", epochs=2), **ONE).fit()
    assert not threads


@pytest.mark.parametrize("room", [True, False])
def test_a_block_that_does_not_fit_is_not_used(tmp_path, threads, monkeypatch, room):
    """It holds the rows of all its steps, so that it may need more than any of them."""
    steps, counts = Engine.steps, []

    def counted(self, *args, count):
        counts.append(count)
        return steps(self, *args, count=count)

    monkeypatch.setattr(Engine, "steps", counted)
    monkeypatch.setattr(BlockTimes, "knows_alone", lambda self, config, *, busy: True)
    monkeypatch.setattr(StrategyCompiler, "has_room_for", lambda self, need: need.peak > 0 and room)
    state = Counting(free(tmp_path, epochs=90), **ONE).fit()
    np.testing.assert_array_equal(state.params["count"], 90)
    assert bool(counts) is room


def test_a_run_of_few_steps_is_not_worth_it(tmp_path, threads, monkeypatch):
    monkeypatch.setattr(early_block, "COMPILING_S", 3 * 60 * early_block.SAVED_S)
    Counting(free(tmp_path, epochs=20), **ONE).fit()  # 60 steps
    assert not threads


class Failing(Counting):
    def loss(self, params, batch, key):
        if len(batch["x"]) == 16:  # not when it is tried on a few samples
            raise ZeroDivisionError("the loss of sixteen samples")
        return super().loss(params, batch, key)


def test_what_fails_there_is_raised_where_it_is_needed(tmp_path, threads):
    with pytest.raises(Exception, match="the loss of sixteen samples"):
        Failing(free(tmp_path, epochs=2), **ONE).fit()
    assert not [x for x in threading.enumerate() if x.name == "jaxgoodput-early"]


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
