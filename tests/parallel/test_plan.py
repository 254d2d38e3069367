"""A plan of a move: what has to be sent, by whom, in which groups and with how much memory."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxgoodput.parallel.plan import boxes, num_elements, plan_move
from jaxgoodput.parallel.strategy import Strategy, candidates

SPEC = P("fsdp", "tensor")
MiB = 2**20


def leaf(shape, strategy, spec=SPEC, devices=None, dtype=jnp.float32):
    sharding = strategy.on(jax.devices() if devices is None else devices).sharding(spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def elements(box):
    """A box as a set of flat positions in a 64 x 64 array: slow, and obviously right."""
    return {(i, j) for i in range(*box[0]) for j in range(*box[1])}


@pytest.mark.parametrize("before", candidates(8), ids=lambda s: s.name)
def test_the_pieces_are_what_each_device_needs_and_come_from_devices_that_hold_them(before):
    for after in candidates(8):
        state = leaf((16, 16), before)
        target = leaf((16, 16), after).sharding
        plan = plan_move([state], [target])
        held = {d: elements(box) for d, box in boxes(state.sharding, (16, 16)).items()}
        need = {d: elements(box) for d, box in boxes(target, (16, 16)).items()}
        got = {d: [] for d in need}
        for piece in plan.leaves[0].pieces:
            assert elements(piece.box) <= held[piece.sender]
            got[piece.receiver] += elements(piece.box)
        for device, wanted in need.items():
            assert sorted(got[device]) == sorted(wanted), "each element once, and nothing else"
        lacking = sum(len(need[d] - held.get(d, set())) for d in need)
        assert plan.bytes_moved == 4 * lacking


def test_local_parts_are_not_sent_and_replicas_share_the_sending():
    four, eight = jax.devices()[:4], jax.devices()
    state = leaf((8, 8), Strategy(data=4), devices=four)
    plan = plan_move([state], [leaf((8, 8), Strategy(data=8), devices=eight).sharding])
    assert plan.bytes_moved == 4 * 8 * 8 * 4, "four new devices need one whole array each"
    assert plan.largest_send_bytes == 8 * 8 * 4


def test_the_load_is_spread_over_leaves_too():
    holders, receiver = jax.devices()[:2], jax.devices()[7:]
    state = [leaf((4, 4), Strategy(data=2), devices=holders) for _ in range(6)]
    target = leaf((4, 4), Strategy(), devices=receiver).sharding
    plan = plan_move(state, [target] * 6)
    assert plan.largest_send_bytes == 3 * 64


def test_nothing_moves_where_every_device_has_its_part():
    before, after = Strategy(data=8), Strategy(tensor=8)
    plan = plan_move([leaf((8, 8), before)], [leaf((8, 8), after).sharding])
    assert (plan.bytes_moved, plan.largest_send_bytes, plan.groups[0].route) == (0, 0, "pieces")
    same = plan_move([leaf((8, 8), before)], [leaf((8, 8), Strategy(fsdp=8), P()).sharding])
    assert (same.bytes_moved, same.groups[0].route, same.peak_extra_bytes) == (0, "alias", 0)


def test_groups_hold_up_to_the_limit_and_the_extra_memory_is_one_group():
    state = [leaf((256, 256), Strategy(fsdp=8)) for _ in range(10)]  # 256 KiB, 32 KiB a device
    shardings = [leaf((256, 256), Strategy(tensor=8)).sharding] * 10
    plan = plan_move(state, shardings, group_bytes=96 * 2**10)
    assert [len(group.leaves) for group in plan.groups] == [2] * 5, "all are equal"
    assert sorted(i for group in plan.groups for i in group.leaves) == list(range(10))
    assert plan.peak_extra_bytes == 64 * 2**10
    kept = plan_move(state, shardings, group_bytes=96 * 2**10, donate=False)
    device = jax.devices()[0]
    assert kept.peak_bytes[device] == kept.after_bytes[device] == 2 * 320 * 2**10
    assert kept.peak_extra_bytes == 0, "source and target are both wanted afterwards"


def test_a_leaf_larger_than_the_limit_is_a_group_of_its_own():
    state = [leaf((8, 8), Strategy(fsdp=8)) for _ in range(3)]
    plan = plan_move(state, [leaf((8, 8), Strategy(tensor=8)).sharding] * 3, group_bytes=1)
    assert [group.leaves for group in plan.groups] == [(0,), (1,), (2,)]


def test_what_frees_memory_moves_first():
    grows = leaf((64, 64), Strategy(fsdp=8)), leaf((64, 64), Strategy(data=8)).sharding
    shrinks = leaf((64, 64), Strategy(data=8)), leaf((64, 64), Strategy(fsdp=8)).sharding
    plan = plan_move([grows[0], shrinks[0]], [grows[1], shrinks[1]], group_bytes=1)
    assert [group.leaves for group in plan.groups] == [(1,), (0,)]
    shard, whole = 64 * 64 * 4 // 8, 64 * 64 * 4
    assert max(plan.peak_bytes.values()) == whole + 2 * shard


def test_keys_are_planned_as_the_integers_they_are_made_of():
    replicated = Strategy(data=8).on(jax.devices()).replicated
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated)
    target = Strategy(fsdp=4).on(jax.devices()[:4]).sharding(P("fsdp"))
    plan = plan_move({"key": key}, {"key": target})
    assert plan.leaves[0].shape == (4, 2) and plan.leaves[0].dtype == np.uint32
    assert sum(plan.groups[0].target_bytes.values()) == 32


def test_an_empty_state_is_planned():
    plan = plan_move({}, {})
    assert (plan.bytes_moved, plan.groups, plan.peak_extra_bytes) == (0, (), 0)


def test_boxes_tile_the_array():
    for strategy in candidates(8):
        found = boxes(leaf((64, 64), strategy).sharding, (64, 64))
        distinct = set(found.values())
        assert sum(num_elements(box) for box in distinct) == 64 * 64
        for one, other in itertools.combinations(distinct, 2):
            assert not elements(one) & elements(other)


@pytest.mark.parametrize(
    ("state", "shardings", "message"),
    [
        ("one", "two", "structure"),
        ("numpy", "one", "w has no sharding: it is a ndarray"),
        ("one", "none", "must be a sharding; got 3"),
        ("odd", "one", "w of shape .* cannot be cut"),
    ],
)
def test_states_that_cannot_be_planned_are_refused(state, shardings, message):
    one = leaf((8, 8), Strategy(fsdp=8))
    odd = jax.ShapeDtypeStruct(
        (7, 8), jnp.float32, sharding=Strategy(data=8).on(jax.devices()).replicated
    )
    states = {"one": {"w": one}, "numpy": {"w": np.ones((8, 8))}, "odd": {"w": odd}}
    targets = {"one": {"w": one.sharding}, "two": {"v": one.sharding}, "none": {"w": 3}}
    with pytest.raises(ValueError, match=message):
        plan_move(states[state], targets[shardings])


def test_a_plan_says_what_it_does_in_a_line():
    state = [leaf((1024, 1024), Strategy(fsdp=8))]
    text = str(plan_move(state, [leaf((1024, 1024), Strategy(tensor=8)).sharding]))
    assert text.startswith("3.5 MiB moved, 0.4 MiB by the largest sender, 0.5 MiB extra")
    assert text.endswith("pieces x 1")
