"""Live state moves between layouts unchanged, without compiling, and leaves nothing behind."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.parallel.move import (
    ALL_ROUTES,
    MAX_TEMPORARY_RATIO,
    Move,
    MoveDoesNotFit,
    is_good,
)
from jaxgoodput.parallel.strategy import Strategy

BOTH = P("fsdp", "tensor")
ONLY_PIECES = ("alias", "pieces")


def layouts():
    """Name -> layout: 1-D, 2-D, 3-D, fewer devices, other devices, another order, one device."""
    devices = jax.devices()
    plans = {
        "data8": (Strategy(data=8), devices),
        "fsdp8": (Strategy(fsdp=8), devices),
        "tensor8": (Strategy(tensor=8), devices),
        "data2.fsdp4": (Strategy(data=2, fsdp=4), devices),
        "data2.tensor4": (Strategy(data=2, tensor=4), devices),
        "data4.tensor2": (Strategy(data=4, tensor=2), devices),
        "fsdp4.tensor2": (Strategy(fsdp=4, tensor=2), devices),
        "fsdp2.tensor4": (Strategy(fsdp=2, tensor=4), devices),
        "data2.fsdp2.tensor2": (Strategy(data=2, fsdp=2, tensor=2), devices),
        "half": (Strategy(fsdp=2, tensor=2), devices[:4]),
        "other half": (Strategy(data=2, tensor=2), devices[:3:-1]),
        "swapped": (Strategy(fsdp=8), [*devices[4:], *devices[:4]]),
        "single": (Strategy(), devices[5:6]),
    }
    return {name: strategy.on(chosen) for name, (strategy, chosen) in plans.items()}


NAMES = tuple(layouts())


def value(small=False):
    """Host values of a training state: masters, moments, a compute copy, scalars, gradients."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(16, 32)).astype(np.float32)
    if small:
        return {"w": w}
    return {
        "w": w,
        "moment": rng.normal(size=(8, 24, 8)).astype(np.float32),
        "compute": w.astype(jnp.bfloat16),
        "count": np.int32(7),
        "grads": rng.normal(size=(8, 16)).astype(np.float32),
        "empty": np.zeros((0, 8), np.float32),
    }


def shardings(layout, tree):
    specs = {
        "w": BOTH,
        "moment": P("tensor", "fsdp"),
        "compute": BOTH,
        "grads": P(("fsdp", "data")),
    }
    return {name: layout.sharding(specs.get(name, P())) for name in tree}


def placed(tree, layout):
    # Through a program, so that XLA owns the buffers as it does after a step.
    def same(t):
        return jax.tree.map(jnp.copy, t)

    return jax.jit(same, out_shardings=shardings(layout, tree))(tree)


def moved_and_checked(before, after, tree, routes=ALL_ROUTES):
    """Move and check: values, shardings, sources gone, nothing compiled."""
    state, target = placed(tree, before), shardings(after, tree)
    move = Move.compile(state, target, routes=routes)
    compiled = []
    undo = listen_for_compilations(compiled.append)
    result = move(state)
    undo()
    assert compiled == []
    assert all(x.is_deleted() for x in state.values()), "the move deletes its sources"
    gc.collect()
    noise = [jnp.full(4096, i, jnp.float32) for i in range(50)]  # whoever reuses freed memory
    jax.block_until_ready(noise)
    for name, x in result.items():
        assert x.sharding == target[name] and x.dtype == tree[name].dtype
        assert np.array_equal(np.asarray(x), tree[name]), name
        for shard in x.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), np.asarray(tree[name])[shard.index])
    return move


def every_pair():
    """Every ordered pair of layouts; by day one pair for each layout that is left.

    Neighbours in the list are alike and take the routes without copies; the others are far apart.
    """
    for i, source in enumerate(NAMES):
        for step, _ in enumerate(NAMES):
            target = NAMES[(i + step) % len(NAMES)]
            yield pytest.param(
                source, target, marks=() if step == (1, 6)[i % 2] else pytest.mark.nightly
            )


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), list(every_pair()))
def test_every_pair_moves_bitwise(source, target):
    move = moved_and_checked(layouts()[source], layouts()[target], value(small=True))
    for group in move.groups:
        assert group.xla_temporary_bytes <= MAX_TEMPORARY_RATIO * group.plan.whole_bytes
        if group.collective_bytes is not None:
            assert is_good(group)


@pytest.mark.parametrize("routes", [ALL_ROUTES, ONLY_PIECES], ids=["best", "pieces"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp8", "tensor8"),
        ("data2.tensor4", "data4.tensor2"),
        ("data8", "half"),
        ("half", "other half"),
        ("single", "fsdp8"),
        ("fsdp8", "swapped"),
    ],
)
def test_a_state_moves_bitwise(source, target, routes):
    moved_and_checked(layouts()[source], layouts()[target], value(small=True), routes)


def test_a_state_of_every_kind_of_leaf_moves_bitwise():
    moved_and_checked(layouts()["fsdp8"], layouts()["data2.tensor4"], value())


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("fsdp8", "tensor8", "all-to-all"),
        ("tensor8", "fsdp8", "all-to-all"),
        ("data2.fsdp4", "fsdp8", None),
    ],
)
def test_xla_sends_no_more_than_the_lower_bound(source, target, kind):
    state = placed(value(small=True), layouts()[source])
    move = Move.compile(state, shardings(layouts()[target], state), routes=("alias", "direct"))
    (group,) = move.groups
    assert group.plan.route == "direct"
    assert group.collective_bytes == move.plan.bytes_moved
    assert (kind is None) == (move.plan.bytes_moved == 0)


def test_a_permutation_sends_the_lower_bound():
    # The devices of one mesh, in an order that gives every device another's shard.
    first = Strategy(fsdp=2, tensor=4).on(jax.devices())
    x = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), first.sharding(BOTH))
    target = first.sharding(P(None, ("tensor", "fsdp")))
    source = first.sharding(P(None, ("fsdp", "tensor")))
    x = jax.jit(jnp.copy, out_shardings=source)(x)
    move = Move.compile([x], [target], routes=("alias", "direct"))
    assert move.groups[0].collective_bytes == move.plan.bytes_moved > 0


@pytest.mark.parametrize("target", ["data8", "tensor8", "half", "swapped"])
def test_keys_move(target):
    layout = layouts()["data8"]
    keys = jax.random.split(jax.random.key(5), 8)
    expected = np.asarray(jax.random.key_data(keys))
    state = {"key": jax.device_put(keys, layout.replicated)}
    move = Move.compile(state, {"key": layouts()[target].replicated})
    compiled = []
    undo = listen_for_compilations(compiled.append)
    result = move(state)
    undo()
    assert compiled == [] and state["key"].is_deleted()
    assert result["key"].dtype == keys.dtype
    assert np.array_equal(np.asarray(jax.random.key_data(result["key"])), expected)
    assert result["key"].sharding.is_equivalent_to(layouts()[target].replicated, 1)


@pytest.mark.parametrize("target", ["data8", "fsdp8", "tensor8", "half", "swapped"])
def test_without_donation_the_source_stays_and_shares_nothing(target):
    tree = value()
    state = placed(tree, layouts()["fsdp8"])
    move = Move.compile(state, shardings(layouts()[target], state), donate=False)
    first, second = move(state), move(state)
    places = [addresses(t) for t in (state, first, second)]
    assert not places[0] & places[1] and not places[0] & places[2] and not places[1] & places[2]
    for x in state.values():
        x.delete()
    for x in first.values():
        x.delete()
    jax.block_until_ready([jnp.full(4096, i, jnp.float32) for i in range(50)])
    for name, x in second.items():
        assert np.array_equal(np.asarray(x), tree[name])


def addresses(tree):
    """Addresses of all buffers that hold anything."""
    return {
        shard.data.unsafe_buffer_pointer()
        for x in tree.values()
        for shard in x.addressable_shards
        if x.size
    }


@pytest.mark.parametrize("routes", [ALL_ROUTES, ONLY_PIECES], ids=["best", "pieces"])
@pytest.mark.parametrize("target", ["data8", "fsdp8", "tensor8", "half", "swapped"])
def test_a_step_writes_into_the_result_in_place(target, routes):
    state = placed(value(small=True), layouts()["fsdp8"])
    result = Move.compile(state, shardings(layouts()[target], state), routes=routes)(state)
    before = addresses(result)
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    after = step(result)
    assert addresses(after) == before, "XLA owns the buffers"
    assert np.array_equal(np.asarray(after["w"]), value(small=True)["w"] + 1)


def test_a_move_back_gives_the_first_state_again_and_again():
    tree = value()
    there, back = layouts()["data2.tensor4"], layouts()["half"]
    state = placed(tree, back)
    out = Move.compile(state, shardings(there, state))
    state = out(state)
    home = Move.compile(state, shardings(back, state))
    for _ in range(3):
        state = out(home(state))
    for name, x in state.items():
        assert np.array_equal(np.asarray(x), tree[name])


def test_leaves_on_single_devices_move_too():
    state = {"count": jax.device_put(jnp.int32(3), jax.devices()[0])}
    move = Move.compile(state, {"count": SingleDeviceSharding(jax.devices()[2])})
    result = move(state)
    assert int(result["count"]) == 3 and result["count"].devices() == {jax.devices()[2]}


def test_a_move_that_does_not_fit_is_refused_with_the_numbers_and_the_state_intact():
    state = placed(value(small=True), layouts()["fsdp8"])
    target = shardings(layouts()["data8"], state)
    with pytest.raises(
        MoveDoesNotFit, match=r"at its peak \(0\.\d MiB before.*0\.\d MiB are allowed"
    ):
        Move.compile(state, target, memory_bytes=2048)
    assert np.array_equal(np.asarray(state["w"]), value(small=True)["w"])
    routes = "alias", "direct"
    assert (
        Move.compile(state, target, memory_bytes=2304, routes=routes).plan.peak_extra_bytes == 256
    )


def test_leaves_that_share_a_buffer_are_refused_and_intact():
    (x,) = placed(value(small=True), layouts()["fsdp8"]).values()
    target = layouts()["tensor8"].sharding(BOTH)
    move = Move.compile([x, x], [target, target])
    with pytest.raises(ValueError, match=r"0 and 1 share a buffer.*donate=False"):
        move([x, x])
    kept = Move.compile([x, x], [target, target], donate=False)([x, x])
    assert all(np.array_equal(np.asarray(y), np.asarray(x)) for y in kept)


def test_another_state_than_the_compiled_one_is_refused():
    tree = value(small=True)
    state = placed(tree, layouts()["fsdp8"])
    move = Move.compile(state, shardings(layouts()["tensor8"], state))
    with pytest.raises(ValueError, match="compiled for PyTreeDef"):
        move({"v": state["w"]})
    with pytest.raises(ValueError, match="compiled for w as float32"):
        move(placed(tree, layouts()["data8"]))
    with pytest.raises(ValueError, match="must be a jax.Array; got ndarray"):
        move(tree)
    move(state)
    with pytest.raises(ValueError, match="w has been deleted"):
        move(state)


def test_no_allowed_route_is_an_error():
    state = placed(value(small=True), layouts()["fsdp8"])
    with pytest.raises(ValueError, match='other devices need "pieces"'):
        Move.compile(state, shardings(layouts()["half"], state), routes=("alias", "direct"))


def test_an_empty_leaf_goes_along():
    old, new = Strategy(fsdp=8).on(jax.devices()), Strategy(fsdp=4).on(jax.devices()[:4])
    cut = P("fsdp")
    tree = {
        "empty": jax.device_put(jnp.zeros((0, 8)), old.replicated),
        "full": jax.device_put(jnp.arange(64.0).reshape(8, 8), old.sharding(cut)),
    }
    target = {"empty": new.replicated, "full": new.sharding(cut)}
    moved = Move.compile(tree, target, routes=("alias", "pieces"))(tree)
    assert moved["empty"].shape == (0, 8)
    np.testing.assert_array_equal(moved["full"], np.arange(64.0).reshape(8, 8))
