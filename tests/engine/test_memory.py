"""The largest micro-batch that fits is known before it runs."""

import os
import types

import jax
import numpy as np
import pytest
from engines import known, make
from jaxgoodput.train.setup import BatchPlan, batch_plan, resumed_config

from jaxgoodput.data.sources import as_source
from jaxgoodput.engine.memory import device_budget, step_bytes
from jaxgoodput.goodput.memory import predicted_peak
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.train.config import Config


@pytest.mark.parametrize("room, micro", [(64, 64), (16, 16), (8, 8)])
def test_a_run_saved_with_more_memory_resumes_with_what_fits(room, micro, tmp_path):
    start = BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=2)
    limits = BatchLimits(base=16, max=128, max_micro_batches=4)
    plan = BatchPlan(start, (8, 16, 32, 64), limits)
    saved = {"micro_batch_size": 64, "num_micro_batches": 1, "num_replicas": 2}
    config = Config(workdir=str(tmp_path), batch=limits, base_steps=10.0)
    asked = []

    def fits(size):
        asked.append(size)
        return size <= room

    found = resumed_config(saved, plan, 2, config, fits)
    assert found.micro_batch_size == micro and asked == [s for s in (64, 32, 16, 8) if s >= micro]
    assert found.global_batch_size == min(128, micro * 4 * 2), "the nearest batch that can be made"


def test_xla_says_what_a_step_needs_and_more_samples_need_more():
    width = 64

    def loss(params, batch, key):
        return (batch["x"] @ params["w"]) ** 2

    sample = {"x": jax.ShapeDtypeStruct((width,), np.float32)}
    engine = make(loss, init=lambda key: {"w": jax.numpy.zeros(width)}, sample=sample)
    engine.compile([4, 64, 256], accumulate=False)
    small, middle, large = (known(engine.bytes_of(size)) for size in (4, 64, 256))
    assert 4 * width * 256 <= large.arguments
    assert small.peak < middle.peak < large.peak
    assert predicted_peak(256, {4: small, 64: middle}) == pytest.approx(large.peak, rel=0.2)
    # The state is written in place: it is counted once.
    assert large.outputs < 4 * width


def test_outputs_written_in_place_are_not_counted_twice():
    numbers = jax.ShapeDtypeStruct((1000,), np.float32)

    def needs(donate):
        jitted = jax.jit(lambda x: (x + 1, x.sum()), donate_argnums=donate)
        return step_bytes(jitted.lower(numbers).compile())

    copied, in_place = needs(()), needs((0,))
    assert in_place.arguments == copied.arguments == 4000
    assert copied.outputs - in_place.outputs == 4000
    assert in_place.peak == in_place.arguments + in_place.outputs + in_place.temporaries


def device(limit):
    stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": 3}
    return types.SimpleNamespace(memory_stats=lambda: stats)


def test_a_stated_budget_wins():
    assert device_budget(device(1000), num_local_devices=1, stated=77, margin=0.5) == 77


def test_a_reported_limit_loses_its_margin():
    assert device_budget(device(1000), num_local_devices=4, stated=None, margin=0.1) == 900


def test_without_a_limit_the_devices_share_half_of_the_host():
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    whole = device_budget(device(None), num_local_devices=1, stated=None, margin=0.0)
    assert whole == host // 2
    eighth = device_budget(jax.devices()[0], num_local_devices=8, stated=None, margin=0.0)
    assert eighth == host // 2 // 8


@pytest.mark.parametrize("stated", [0, -5])
def test_a_budget_of_nothing_is_refused(stated):
    with pytest.raises(ValueError, match=f"memory_bytes must be positive; got {stated}.*None"):
        device_budget(device(1000), num_local_devices=1, stated=stated, margin=0.0)


@pytest.fixture(scope="module")
def wide_engine():
    """A model whose samples need far more memory than its state."""
    width = 512

    def loss(params, batch, key):
        return jax.numpy.sum(jax.numpy.tanh(batch["x"] * params["w"][None]), axis=1)

    sample = {"x": jax.ShapeDtypeStruct((width,), np.float32)}
    return make(loss, init=lambda key: {"w": jax.numpy.ones(width)}, sample=sample)


def planned(engine, budget, **kind):
    limits = BatchLimits(base=64, max=256, micro=(1, 256), **kind)
    source = as_source({"x": np.zeros((300, 512), np.float32)})
    return batch_plan(
        Config(workdir="unused", batch=limits, base_steps=1.0), engine, len(source), budget
    )


def test_a_base_batch_that_does_not_fit_is_accumulated(wide_engine):
    whole = planned(wide_engine, 10**9)
    assert (whole.start.micro_batch_size, whole.start.num_micro_batches) == (64, 1)
    need = known(wide_engine.bytes_of(64)).peak
    small = planned(wide_engine, need // 2)
    assert small.start.global_batch_size == 64 and small.start.num_micro_batches > 1
    assert known(wide_engine.bytes_of(small.start.micro_batch_size)).peak <= need // 2


def test_memory_never_leads_beyond_the_limits(wide_engine):
    need = known(wide_engine.bytes_of(64)).peak
    with pytest.raises(ValueError, match="at most 2 of at most .*max_micro_batches"):
        planned(wide_engine, need // 3, max_micro_batches=2)
    with pytest.raises(
        ValueError, match="a step with .* samples per replica needs .* Raise memory"
    ):
        planned(wide_engine, 100)
