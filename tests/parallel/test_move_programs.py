"""Equal groups of leaves share one program, in a move and between moves; what cannot be judged moves too."""

import itertools
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from jax.sharding import PartitionSpec as P

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.parallel import move as move_module
from jaxgoodput.parallel.move import Move
from jaxgoodput.parallel.once import Once
from jaxgoodput.parallel.partition import param_specs
from jaxgoodput.parallel.strategy import Strategy, candidates


def transformer(num_layers, width):
    """Abstract parameters of unrolled layers, 16 leaves each, with both moments of Adam."""

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def layer():
        heads = {n: {"kernel": leaf(width, width), "bias": leaf(width)} for n in "qkvo"}
        up = {"kernel": leaf(width, 4 * width), "bias": leaf(4 * width)}
        down = {"kernel": leaf(4 * width, width), "bias": leaf(width)}
        norms = {n: {"scale": leaf(width), "bias": leaf(width)} for n in ("ln1", "ln2")}
        return {"attention": heads, "up": up, "down": down, **norms}

    params = {str(i): layer() for i in range(num_layers)}
    params |= {"embed": {"embedding": leaf(4 * width, width)}, "norm": {"scale": leaf(width)}}
    return params


def state_on(layout, params):
    state = {
        "params": params,
        "mu": params,
        "nu": params,
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    return param_specs(layout, params).placed(state)


def compiled_for_all_pairs(layouts, params, group_bytes):
    """The programs, which all moves share, and the number of groups that they move."""
    programs, num_groups = Once(), 0
    states = [state_on(layout, params) for layout in layouts]
    for old, new in itertools.permutations(states, 2):
        target = jax.tree.map(lambda x: x.sharding, new)
        move = Move.compile(old, target, group_bytes=group_bytes, programs=programs)
        num_groups += len(move.groups)
    return programs, num_groups


def test_layers_share_their_programs():
    layouts = [s.on(jax.devices()) for s in (Strategy(fsdp=8), Strategy(fsdp=2, tensor=4))]
    compiled = []
    undo = listen_for_compilations(compiled.append)
    programs, num_groups = compiled_for_all_pairs(layouts, transformer(12, 32), 2**15)
    undo()
    assert len(compiled) == len(programs) <= 14 < num_groups


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_all_pairs_of_layouts_of_a_thousand_parameters_take_at_most_200_programs():
    params = transformer(62, 64)
    assert len(jax.tree.leaves(params)) > 990
    layouts = [s.on(jax.devices()) for s in candidates(8)]
    compiled = []
    undo = listen_for_compilations(compiled.append)
    programs, num_groups = compiled_for_all_pairs(layouts, params, 2**20)
    undo()
    assert len(compiled) == len(programs) <= 200 < num_groups


def test_two_threads_compile_a_program_once():
    layout = Strategy(fsdp=8).on(jax.devices())
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=layout.sharding(P("fsdp")))
    target, programs, compiled = layout.sharding(P(None, "fsdp")), Once(), []
    undo = listen_for_compilations(compiled.append)

    def compile_one():
        Move.compile([x], [target], programs=programs, routes=("direct",))

    threads = [threading.Thread(target=compile_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    undo()
    assert len(compiled) == len(programs) == 1


def random_state(layout, num_layers=3):
    rng = np.random.default_rng(0)
    specs = {"kernel": P("fsdp", "tensor"), "bias": P("tensor"), "table": P("tensor", "fsdp")}
    shapes = {"kernel": (16, 32), "bias": (32,), "table": (32, 16)}
    tree = {
        f"{name}{i}": rng.normal(size=shapes[name]).astype(np.float32)
        for i in range(num_layers)
        for name in shapes
    }
    shardings = {name: layout.sharding(specs[name[:-1]]) for name in tree}
    return tree, shardings


SPANNING = (
    (Strategy(data=8), Strategy(fsdp=8)),
    (Strategy(fsdp=8), Strategy(data=8)),
    (Strategy(fsdp=8), Strategy(tensor=8)),
    (Strategy(data=2, tensor=4), Strategy(fsdp=4, tensor=2)),
    (Strategy(data=2, fsdp=2, tensor=2), Strategy(data=2, tensor=4)),
)


@pytest.mark.parametrize("route", ["direct", "hop", "pieces"])
@pytest.mark.parametrize(("old", "new"), SPANNING, ids=lambda s: s.name)
def test_every_route_moves_bitwise_where_it_is_forced(old, new, route):
    old, new = old.on(jax.devices()), new.on(jax.devices())
    tree, before = random_state(old)
    _, after = random_state(new)
    state = jax.jit(lambda t: jax.tree.map(jnp.copy, t), out_shardings=before)(tree)
    move = Move.compile(state, after, routes=("alias", route), group_bytes=2**12)
    assert {group.plan.route for group in move.groups} <= {"alias", route}
    moved = move(state)
    for name, x in moved.items():
        assert state[name].is_deleted() and x.sharding == after[name]
        np.testing.assert_array_equal(x, tree[name])


def test_buffers_change_hands_under_another_name():
    old = Strategy(data=2, fsdp=4).on(jax.devices())
    new = Strategy(data=2, tensor=4).on(jax.devices())
    host = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    state = [jax.jit(jnp.copy, out_shardings=old.sharding(P("fsdp")))(host + i) for i in range(10)]
    move = Move.compile(state, [new.sharding(P("tensor"))] * 10, routes=("alias",))
    assert {group.plan.route for group in move.groups} == {"alias"}
    places = [x.addressable_data(3).unsafe_buffer_pointer() for x in state]
    for i, x in enumerate(move(state)):
        assert state[i].is_deleted() and x.sharding == new.sharding(P("tensor"))
        assert x.addressable_data(3).unsafe_buffer_pointer() == places[i]
        np.testing.assert_array_equal(x, host + i)


@pytest.mark.parametrize(
    ("routes", "taken"), [(("direct", "pieces"), "pieces"), (("direct", "hop"), "direct")]
)
def test_a_program_that_cannot_be_judged_is_left_with_one_warning(routes, taken):
    old, new = Strategy(fsdp=8).on(jax.devices()), Strategy(tensor=8).on(jax.devices())
    tree, before = random_state(old, 1)
    _, after = random_state(new, 1)
    state = jax.jit(lambda t: jax.tree.map(jnp.copy, t), out_shardings=before)(tree)
    with (
        mock.patch.object(move_module, "received_bytes", side_effect=ValueError("new HLO")),
        mock.patch.object(logging, "warning") as warned,
    ):
        move = Move.compile(state, after, routes=("alias", *routes))
    (call,) = warned.call_args_list
    assert "new HLO" in call.args[0] % call.args[1:]
    assert taken in {group.plan.route for group in move.groups}
    for name, x in move(state).items():
        np.testing.assert_array_equal(x, tree[name])


@pytest.mark.parametrize(("old", "new"), [(6, 4), (4, 6), (3, 8)])
def test_pieces_go_between_numbers_of_devices_that_do_not_divide_each_other(old, new):
    old, new = (Strategy(fsdp=n).on(jax.devices()[:n]) for n in (old, new))
    host = np.arange(48.0, dtype=np.float32).reshape(24, 2)
    state = [jax.jit(jnp.copy, out_shardings=old.sharding(P("fsdp")))(host)]
    (x,) = Move.compile(state, [new.sharding(P("fsdp"))])(state)
    np.testing.assert_array_equal(x, host)
