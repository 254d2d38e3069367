"""A strategy is a plain value; on devices it becomes a layout that places values as it says."""

import dataclasses
import importlib.util
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import logical_axis_rules
from flax.linen.spmd import logical_to_mesh_axes, with_logical_constraint
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

from jaxgoodput._fields.serial import decode, dumps, loads
from jaxgoodput.parallel.strategy import (
    DEFAULT_ACTIVATIONS,
    FSDP_AXIS,
    MESH_AXES,
    REPLICA_AXES,
    TENSOR_AXIS,
    Strategy,
    candidates,
    device_grid,
)

SPECS = st.sampled_from(
    [P(), P(None), P("fsdp"), P(None, ("expert", "tensor")), P("tensor", None, "stage")]
)
RULES = st.lists(st.tuples(st.sampled_from(["kernel$", "^a/b", "é|x"]), SPECS), max_size=3).map(
    tuple
)
ACTIVATIONS = st.lists(
    st.tuples(st.sampled_from(["mlp", "length"]), st.sampled_from([None, "context", REPLICA_AXES])),
    max_size=2,
).map(tuple)
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
        Strategy(data=2, expert=2, stage=2),
        Strategy(fsdp=2, expert=2, context=2),
    ],
    ids=lambda s: s.name,
)
def test_a_layout_cuts_batches_over_replicas_and_copies_the_rest(strategy):
    devices = jax.devices()[: strategy.num_devices][::-1]
    layout = strategy.on(devices)
    replicas = strategy.data * strategy.fsdp * strategy.expert
    assert layout.num_replicas == strategy.num_replicas == replicas
    assert layout.num_devices == strategy.num_devices
    assert list(layout.mesh.devices.flat) == devices, "the order of the devices is the caller's"
    rows = np.arange(6.0 * replicas).reshape(2 * replicas, 3)
    batch = jax.device_put(rows, layout.batch_sharding)
    parts = [shard.index[0].start or 0 for shard in batch.addressable_shards]
    for start in range(0, 2 * replicas, 2):
        assert parts.count(start) == strategy.num_devices // replicas, (
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


@given(
    degrees=st.fixed_dictionaries({axis: DEGREES for axis in MESH_AXES}),
    rules=RULES,
    activations=ACTIVATIONS,
    left=st.booleans(),
    title=st.sampled_from(["", "mine-2.b"]),
)
def test_json_keeps_everything(degrees, rules, activations, left, title):
    degrees = {**degrees, "data": -1} if left else degrees
    strategy = Strategy(**degrees, rules=rules, activations=activations, title=title)
    again = loads(dumps(strategy), Strategy)
    assert again == strategy and hash(again) == hash(strategy)


def test_json_may_leave_out_what_is_default_and_may_not_say_more():
    assert decode({"fsdp": 4}, Strategy, "Strategy") == Strategy(fsdp=4)
    with pytest.raises(
        ValueError,
        match="Strategy has no field 'pipeline'; its fields are .'activations', 'context'",
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
    assert dict(layout.mesh.shape) == dict.fromkeys(MESH_AXES, 1) | {"fsdp": 2, "data": 4}


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
    [
        *(P("data"), P("context"), P("model"), P("fsdp", "fsdp"), P(P.UNCONSTRAINED)),
        *(P(("fsdp", "data")), P("tensor", ("fsdp", "tensor"))),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_followed_is_refused(spec):
    with pytest.raises(ValueError, match="'a/b'.*None, 'fsdp', 'tensor'.*raise fsdp instead"):
        Strategy(rules=(("a/b", spec),))


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ValueError, match="regular expression: .*searched for in paths such as"):
        Strategy(rules=(("(kernel", P()),))


def test_a_title_is_the_name():
    whole = Strategy(fsdp=4, rules=(("kernel", P()),), title="fsdp4-whole")
    assert whole.name == "fsdp4-whole" != Strategy(fsdp=4).name
    assert Strategy(fsdp=-1, title="x").resolved(2).name == "x"
    with pytest.raises(ValueError, match="title is 'a b'.*letters, digits.*leave it empty"):
        Strategy(title="a b")


def test_candidates_of_more_axes_are_every_way_to_use_all_devices():
    found = candidates(8, max_tensor=2, max_context=2, max_expert=4, max_stage=8)
    assert found[0] == Strategy(data=8) and len({s.name for s in found}) == len(found)
    assert all(s.num_devices == 8 for s in found)
    wanted = [
        powers
        for powers in itertools.product(range(4), repeat=6)
        if sum(powers) == 3 and powers[2] <= 1 and powers[3] <= 1 and powers[4] <= 2
    ]
    assert {tuple(2**p for p in w) for w in wanted} == {tuple(s.degrees.values()) for s in found}


# -- activations -----------------------------------------------------------------------------------


def test_logical_names_follow_the_strategy_first_then_the_defaults():
    strategy = Strategy(fsdp=2, context=2, tensor=2, activations=(("mlp", None), ("mine", "fsdp")))
    rules = strategy.logical_rules
    assert rules[:2] == strategy.activations and rules[2:] == DEFAULT_ACTIVATIONS

    def spec(*names):
        return logical_to_mesh_axes(names, rules)

    assert spec("batch", "length", "embed") == P(REPLICA_AXES, "context", None)
    assert spec("activation_batch", "activation_length", "heads", "kv") == P(
        REPLICA_AXES, "context", "tensor", None
    )
    assert spec("mlp", "mine", "exp", "stage") == P(None, "fsdp", "expert", "stage")
    with jax.set_mesh(strategy.on(jax.devices()).mesh), logical_axis_rules(rules):
        cut = jax.jit(lambda x: with_logical_constraint(x, ("batch", "length", "vocab")))(
            jnp.zeros((2, 2, 2))
        )
    assert {shard.data.shape for shard in cut.addressable_shards} == {(1, 1, 1)}


@pytest.mark.parametrize("entry", ["model", ("fsdp", "fsdp"), ("fsdp", "x")], ids=str)
def test_activations_over_what_is_no_axis_are_refused(entry):
    with pytest.raises(ValueError, match="activations gives 'mlp'.*stage.*Correct the axes"):
        Strategy(activations=(("mlp", entry),))


# -- several hosts ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    slice_index: int = 0
    platform: str = "gpu"
    device_kind: str = "any"
    coords: tuple = ()
    core_on_chip: int = 0


def along(grid, axis):
    """Groups of devices that differ along one axis only."""
    moved = np.moveaxis(grid, MESH_AXES.index(axis), -1)
    return moved.reshape(-1, moved.shape[-1])


def hosts(group):
    return {device.process_index for device in group}


def test_tensor_stays_within_a_host_and_copies_are_on_different_hosts():
    devices = [Device(i, process_index=i % 4) for i in range(32)]  # the caller's order is no help
    strategy = Strategy(data=2, stage=2, expert=2, tensor=4)
    grid = device_grid(strategy, devices)
    assert dict(zip(MESH_AXES, grid.shape, strict=True)) == strategy.degrees
    assert sorted(d.id for d in grid.flat) == list(range(32))
    for axis in ("tensor", "expert"):
        assert all(len(hosts(group)) == 1 for group in along(grid, axis))
    for axis in ("data", "stage"):
        assert all(len(hosts(group)) == 2 for group in along(grid, axis))


def test_one_process_keeps_its_order():
    devices = [Device(i) for i in (3, 1, 0, 2)]
    assert list(device_grid(Strategy(data=2, tensor=2), devices).flat) == devices


def tpus(num_slices, shape=(2, 2, 1)):
    return [
        Device(
            8 * s + i,
            process_index=s,
            slice_index=s,
            platform="tpu",
            device_kind="TPU v4",
            coords=coords[::-1],
        )
        for s in range(num_slices)
        for i, coords in enumerate(itertools.product(*(range(n) for n in shape[::-1])))
    ]


def test_slices_of_tpus_are_copies():
    grid = device_grid(Strategy(data=4, fsdp=2, tensor=2), tpus(4)[::-1])
    for axis in ("tensor", "fsdp"):
        assert all(len({d.slice_index for d in group}) == 1 for group in along(grid, axis))
    assert all(len({d.slice_index for d in group}) == 4 for group in along(grid, "data"))
    with pytest.raises(ValueError, match="data=1 copies on 2 slices.*multiple of 2, or use one"):
        device_grid(Strategy(fsdp=8), tpus(2))


def test_parts_that_compute_together_are_neighbours_on_the_torus():
    grid = device_grid(Strategy(fsdp=4, tensor=4), tpus(1, (4, 4, 1)))
    for group in along(grid, "tensor"):
        assert {len({d.coords[i] for d in group}) for i in (0, 1)} == {1, 4}
    part = tpus(1, (4, 4, 1))[:3]  # no full box
    assert {d.id for d in device_grid(Strategy(fsdp=3), part).flat} == {d.id for d in part}


@pytest.mark.tpu
def test_a_described_topology_gives_a_mesh():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: topologies of TPUs cannot be described")
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x2").devices
    mesh = Strategy(data=2, fsdp=2, tensor=len(devices) // 4).on(devices).mesh
    assert set(mesh.devices.flat) == set(devices) and mesh.axis_names == MESH_AXES
