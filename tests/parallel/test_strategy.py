"""A strategy is a plain value; on devices it becomes a layout that places values as it says."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxgoodput._serial import decode, dumps, loads
from jaxgoodput.parallel.strategy import (
    FSDP_AXIS,
    MESH_AXES,
    REPLICA_AXES,
    TENSOR_AXIS,
    Strategy,
    candidates,
)

SPECS = st.sampled_from([P(), P(None), P("fsdp"), P(None, "tensor"), P("tensor", None, "fsdp")])
RULES = st.lists(st.tuples(st.sampled_from(["kernel$", "^a/b", "é|x"]), SPECS), max_size=3).map(
    tuple
)
DEGREES = st.integers(1, 64)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(),
        Strategy(data=3),
        Strategy(data=8),
        Strategy(data=2, fsdp=4),
        Strategy(data=2, fsdp=2, tensor=2),
        Strategy(tensor=4),
    ],
    ids=lambda s: s.name,
)
def test_a_layout_cuts_batches_over_replicas_and_copies_the_rest(strategy):
    devices = jax.devices()[: strategy.num_devices][::-1]
    layout = strategy.on(devices)
    replicas = strategy.data * strategy.fsdp
    assert layout.num_replicas == strategy.num_replicas == replicas
    assert layout.num_devices == strategy.num_devices
    assert list(layout.mesh.devices.flat) == devices, "the order of the devices is the caller's"
    rows = np.arange(6.0 * replicas).reshape(2 * replicas, 3)
    batch = jax.device_put(rows, layout.batch_sharding)
    parts = [shard.index[0].start or 0 for shard in batch.addressable_shards]
    for start in range(0, 2 * replicas, 2):
        assert parts.count(start) == strategy.tensor, (
            "those that compute together see the same rows"
        )
    for shard in batch.addressable_shards:
        assert shard.data.shape == (2, 3)
        np.testing.assert_array_equal(shard.data, rows[shard.index])
    whole = jax.device_put(rows, layout.replicated)
    for shard in whole.addressable_shards:
        np.testing.assert_array_equal(shard.data, rows)


def test_a_sum_over_the_replica_axes_is_the_sum_over_the_replicas():
    layout = Strategy(data=2, fsdp=2, tensor=2).on(jax.devices())
    add = jax.shard_map(
        lambda x: jax.lax.psum(x, REPLICA_AXES),
        mesh=layout.mesh,
        in_specs=layout.batch_sharding.spec,
        out_specs=layout.replicated.spec,
    )
    x = jax.device_put(jnp.arange(4.0), layout.batch_sharding)
    np.testing.assert_array_equal(jax.jit(add)(x), [6.0])


def test_copies_vary_fastest_over_the_devices():
    layout = Strategy(data=2, fsdp=4).on(jax.devices())
    assert layout.mesh.axis_names == MESH_AXES
    x = jax.device_put(np.arange(8.0), layout.sharding(P("fsdp")))
    held = [int(shard.data[0]) for shard in sorted(x.addressable_shards, key=lambda s: s.device.id)]
    assert held == [0, 0, 2, 2, 4, 4, 6, 6]


def test_a_strategy_is_a_value():
    rules = (("kernel$", P("fsdp")),)
    assert Strategy(data=2) == Strategy(data=2) != Strategy(data=3)
    assert len({Strategy(data=2), Strategy(data=2), Strategy()}) == 2
    assert len({Strategy(rules=rules), Strategy(rules=list(rules)), Strategy()}) == 2
    assert Strategy().num_replicas == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        Strategy().data = 2  # pyright: ignore[reportAttributeAccessIssue]


@given(data=DEGREES, fsdp=DEGREES, tensor=DEGREES, rules=RULES, left=st.booleans())
def test_json_keeps_everything(data, fsdp, tensor, rules, left):
    strategy = Strategy(data=-1 if left else data, fsdp=fsdp, tensor=tensor, rules=rules)
    again = loads(dumps(strategy), Strategy)
    assert again == strategy and hash(again) == hash(strategy)


def test_json_may_leave_out_what_is_default_and_may_not_say_more():
    assert decode({"fsdp": 4}, Strategy, "Strategy") == Strategy(fsdp=4)
    with pytest.raises(
        ValueError, match="Strategy has no field 'pipeline'; its fields are .'data'"
    ):
        decode({"fsdp": 4, "pipeline": 2}, Strategy, "Strategy")


@given(number=st.integers(1, 96), most=st.integers(1, 96))
def test_candidates_are_every_way_to_use_all_devices(number, most):
    found = candidates(number, max_tensor=most)
    assert found[0] == Strategy(data=number)
    assert len(set(found)) == len(found)
    wanted = {
        (d, f, number // d // f)
        for d in range(1, number + 1)
        for f in range(1, number // d + 1)
        if number % (d * f) == 0 and number // d // f <= most
    }
    assert {(s.data, s.fsdp, s.tensor) for s in found} == wanted
    assert all(math.prod(s.degrees.values()) == s.num_devices == number for s in found)
    assert len({s.name for s in found}) == len(found), "names tell them apart"


def test_candidates_carry_the_rules():
    rules = (("kernel$", P("fsdp")),)
    assert {s.rules for s in candidates(8, rules=rules)} == {rules}
    with pytest.raises(ValueError, match="at least 1; got 0. Pass the number"):
        candidates(0)


@given(number=st.integers(1, 64), axis=st.sampled_from(MESH_AXES), other=st.integers(1, 8))
def test_what_is_left_uses_all_devices_or_is_refused(number, axis, other):
    beside = FSDP_AXIS if axis != FSDP_AXIS else TENSOR_AXIS
    plan = Strategy(**{axis: -1, beside: other})
    if number % other == 0:
        resolved = plan.resolved(number)
        assert resolved.num_devices == number
        assert resolved.degrees[axis] == number // other and resolved.degrees[beside] == other
        assert resolved.resolved(number) == resolved
    else:
        with pytest.raises(
            ValueError, match=rf"a multiple of {other} devices; got {number}.*or use"
        ):
            plan.resolved(number)


def test_what_is_left_is_found_on_the_devices():
    layout = Strategy(data=-1, fsdp=2).on(jax.devices())
    assert layout.strategy == Strategy(data=4, fsdp=2)
    assert dict(layout.mesh.shape) == {"fsdp": 2, "tensor": 1, "data": 4}


def test_what_is_left_is_not_known_without_devices():
    plan = Strategy(tensor=-1)
    assert plan.name == "tensor-1"
    for ask in (lambda: plan.num_devices, lambda: plan.num_replicas):
        with pytest.raises(
            ValueError, match=r"only a number of devices resolves.*resolved\(num_dev"
        ):
            ask()
    with pytest.raises(
        ValueError, match="only one degree.*data-1.fsdp-1.*Give the others a number"
    ):
        Strategy(data=-1, fsdp=-1)


@pytest.mark.parametrize("count", [0, -2])
@pytest.mark.parametrize("axis", MESH_AXES)
def test_a_degree_below_one_is_refused(axis, count):
    with pytest.raises(
        ValueError, match=f"Strategy.{axis} .*at least 1.*got {count}.*single device"
    ):
        Strategy(**{axis: count})


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_devices_is_refused_with_the_strategy_that_would_do(count):
    devices = jax.devices()[:count]
    with pytest.raises(ValueError, match=rf"needs 2 devices; got {count}.*\(data={count}\)"):
        Strategy(data=2).on(devices)
    with pytest.raises(ValueError, match=rf"needs 4 devices; got {count}.*candidates\({count}\)"):
        Strategy(fsdp=2, tensor=2).on(devices)


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(data=-1)], ids=lambda s: s.name)
def test_no_devices_are_refused(strategy):
    with pytest.raises(ValueError, match="got 0. Pass exactly that many[.]$"):
        strategy.on([])


@pytest.mark.parametrize(
    "spec",
    [P("data"), P("model"), P("fsdp", "fsdp"), P(("fsdp", "tensor")), P(P.UNCONSTRAINED)],
    ids=str,
)
def test_a_rule_that_cannot_be_followed_is_refused(spec):
    with pytest.raises(ValueError, match="'a/b'.*None, 'fsdp' or 'tensor'.*raise fsdp instead"):
        Strategy(rules=(("a/b", spec),))


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match="regular expression: .*searched for in paths such as"):
        Strategy(rules=(("(kernel", P()),))
