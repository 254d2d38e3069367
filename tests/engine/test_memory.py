"""The largest micro-batch that fits is known before it runs."""

import os
import types

import jax
import numpy as np
import pytest
from engines import known, make

from jaxgoodput.engine.memory import device_budget, step_bytes
from jaxgoodput.goodput.memory import predicted_peak


@pytest.mark.slow
def test_xla_says_what_a_step_needs_and_more_samples_need_more():
    width = 128

    def loss(params, batch, key):
        return (batch["x"] @ params["w"]) ** 2

    sample = {"x": jax.ShapeDtypeStruct((width,), np.float32)}
    engine = make(loss, init=lambda key: {"w": jax.numpy.zeros(width)}, sample=sample)
    engine.compile([4, 64, 256], accumulate=False)
    small, middle, large = (known(engine.bytes_of(size)) for size in (4, 64, 256))
    assert 4 * width * 256 <= large.arguments
    assert small.peak < middle.peak < large.peak
    assert predicted_peak(256, {4: small, 64: middle}) == pytest.approx(large.peak, rel=0.2)
    # The state is written in place: it is counted once. What is left are the metrics.
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
