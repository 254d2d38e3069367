"""A strategy is a plain value; on devices it becomes a layout that places values as it says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgoodput.parallel.strategy import DATA_AXIS, Strategy


@pytest.mark.parametrize("replicas", [1, 3, 8])
def test_a_layout_cuts_batches_and_copies_parameters(replicas):
    devices = jax.devices()[:replicas][::-1]
    layout = Strategy(data=replicas).on(devices)
    assert layout.num_replicas == layout.strategy.num_devices == replicas
    assert list(layout.mesh.devices.flat) == devices, "the order of the devices is the caller's"
    rows = np.arange(6.0 * replicas).reshape(2 * replicas, 3)
    batch = jax.device_put(rows, layout.batch_sharding)
    for i, device in enumerate(devices):
        (mine,) = [s.data for s in batch.addressable_shards if s.device == device]
        np.testing.assert_array_equal(mine, rows[2 * i : 2 * i + 2])
    whole = jax.device_put(rows, layout.replicated)
    for shard in whole.addressable_shards:
        np.testing.assert_array_equal(shard.data, rows)


def test_a_sum_over_the_axis_is_the_sum_over_the_replicas():
    layout = Strategy(data=4).on(jax.devices()[:4])
    add = jax.shard_map(
        lambda x: jax.lax.psum(x, DATA_AXIS),
        mesh=layout.mesh,
        in_specs=layout.batch_sharding.spec,
        out_specs=layout.replicated.spec,
    )
    x = jax.device_put(jnp.arange(4.0), layout.batch_sharding)
    np.testing.assert_array_equal(jax.jit(add)(x), [6.0])


def test_a_strategy_is_a_value():
    assert Strategy(data=2) == Strategy(data=2) != Strategy(data=3)
    assert len({Strategy(data=2), Strategy(data=2), Strategy()}) == 2
    assert Strategy().num_replicas == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Strategy().data = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("count", [0, -1])
def test_no_replicas_is_refused(count):
    with pytest.raises(ValueError, match=f"at least 1; got {count}.*single device"):
        Strategy(data=count)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_devices_is_refused_with_the_strategy_that_would_do(count):
    with pytest.raises(
        ValueError, match=rf"needs 2 devices; got {count}.*Strategy\(data={count}\)"
    ):
        Strategy(data=2).on(jax.devices()[:count])
