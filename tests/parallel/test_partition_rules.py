"""Parameters are cut as rules, metadata or defaults say; placing and fetching them changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from partitions import DIM, EVERY, params, specs_of

from jaxgoodput.parallel.partition import param_specs, state_bytes, suitable, whole_leaves
from jaxgoodput.parallel.strategy import Strategy, candidates


def bytes_per_device(tree):
    total = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            total[shard.device] = total.get(shard.device, 0) + shard.data.nbytes
    return total


# -- placing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", candidates(8), ids=lambda s: s.name)
def test_placing_and_fetching_changes_no_bit(strategy):
    tree = {"params": params(), "opt": optax.adamw(0.1).init(params(7)), "step": jnp.int32(3)}
    expected = jax.device_get(tree)
    found = param_specs(strategy.on(jax.devices()), tree["params"])
    placed = jax.device_put(tree, found.shardings(tree))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(placed), expected)
    for leaf, sharding in zip(
        jax.tree.leaves(placed), jax.tree.leaves(found.shardings(tree)), strict=True
    ):
        assert leaf.sharding == sharding and sharding.mesh == found.layout.mesh
    # What a compiled function is told is what it will be given.
    told = jax.jit(lambda x: x).lower(found.placed(tree)).compile()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(told(placed)), expected)


def test_a_weak_type_stays_weak():
    tree = {"w": jax.ShapeDtypeStruct((2,), jnp.float32, weak_type=True)}
    (told,) = jax.tree.leaves(param_specs(EVERY.on(jax.devices()[:4]), tree).placed(tree))
    assert told.weak_type and told.sharding.spec == P()


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_each_device_holds_its_part_of_parameters_and_optimizer_state(parts):
    tree = {k: v for k, v in params().items() if k != "odd"}
    state = {"params": tree, "opt": optax.adamw(0.1).init(tree)}
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    layout = Strategy(fsdp=parts).on(jax.devices()[:parts])
    held = bytes_per_device(
        jax.device_put(state, param_specs(layout, tree).shardings(state))
    ).values()
    assert len(held) == parts and len(set(held)) == 1
    # Vectors stay whole: less than two hundredths of this tree.
    assert whole / parts <= max(held) < whole / parts + 0.02 * whole


@pytest.mark.parametrize("number", [2, 4, 8])
def test_no_default_fails_and_none_cuts_unevenly(number):
    for strategy in candidates(number):
        for name, spec in specs_of(params(), strategy).items():
            assert name != "odd" or spec == P()
            assert all(strategy.degrees[axis] > 1 for axis in spec if axis is not None)
            assert not spec or spec[-1] is not None, "no trailing None: equal specs are equal"


# -- rules -----------------------------------------------------------------------------------------


def test_the_first_rule_goes_before_metadata_and_metadata_before_defaults():
    rules = (("up/kernel$", P(None, "fsdp")), ("up", P("tensor")), ("^kernel$", P()))
    own = (
        ("layers/0/up/kernel", P("tensor", "fsdp")),
        ("layers/1/down", P(None, "tensor")),
        ("scale", P("tensor")),
    )
    found = specs_of(params(), Strategy(fsdp=2, tensor=2, rules=rules), own)
    assert found["layers/0/up/kernel"] == found["layers/1/up/kernel"] == P(None, "fsdp")
    assert found["layers/0/up/bias"] == P("tensor")
    assert found["kernel"] == P()
    assert found["layers/1/down"] == P(None, "tensor")
    assert found["layers/0/down"] == P("tensor", "fsdp")
    assert found["scale"] == P("tensor")


def test_an_axis_of_degree_one_cuts_nothing():
    rules = (("up/kernel$", P("fsdp", "tensor")), ("odd", P("tensor", "fsdp")))
    assert specs_of(params(), Strategy(data=4, rules=rules))["odd"] == P()
    kept = rules[:1]
    found = {s.name: specs_of(params(), s)["layers/0/up/kernel"] for s in candidates(4, rules=kept)}
    assert found["fsdp4"] == found["data2.fsdp2"] == P("fsdp")
    assert found["tensor4"] == P(None, "tensor")
    assert found["fsdp2.tensor2"] == P("fsdp", "tensor")


BAD = {
    "no match": (("mpl/kernel", P()), r"\('mpl/kernel', .*matches no parameter.*embed/emb.*regex"),
    "too long": (
        ("scale$", P(None, "fsdp")),
        r"'scale\$' gives scale.*2 dimensions.*shape \(64,\).*\('\^scale\$', PartitionSpec",
    ),
    "odd": (
        ("odd", P("tensor")),
        r"the rule 'odd' cuts dimension 0 of odd, of length 35, over tensor=2.*work are 1 and 5.*'\^odd\$'",
    ),
    "odd, second": (
        ("odd", P(None, "fsdp")),
        "dimension 1 of odd, of length 33, over fsdp=4.*3 and 11",
    ),
}


@pytest.mark.parametrize("rule, message", BAD.values(), ids=BAD)
def test_a_rule_that_cannot_be_followed_is_refused_with_its_remedy(rule, message):
    with pytest.raises(ValueError, match=message):
        specs_of(params(), Strategy(fsdp=4, tensor=2, rules=(rule,)))


def test_a_degree_beyond_the_dimension_names_the_largest_that_works():
    with pytest.raises(
        ValueError, match="of length 4, over fsdp=8.*nearest degrees that work are 4;"
    ):
        specs_of({"w": jnp.zeros((4, 512))}, Strategy(fsdp=8, rules=(("w", P("fsdp")),)))


def test_metadata_that_cannot_be_followed_is_refused_with_its_remedy():
    with pytest.raises(ValueError, match=r"metadata cuts dimension 0 of odd.*'\^odd\$'"):
        specs_of(params(), own=(("odd", P("fsdp")),))
    with pytest.raises(ValueError, match="metadata for scale must name.*got .*'data'.*raise fsdp"):
        specs_of(params(), own=(("scale", P("data")),))
    with pytest.raises(ValueError, match="names 'skale'.*no parameter.*Paths are embed/embedding"):
        specs_of(params(), own=(("skale", P("fsdp")),))


def test_a_rule_overrules_metadata_that_does_not_divide():
    strategy = Strategy(fsdp=2, rules=(("^odd$", P()),))
    assert specs_of(params(), strategy, own=(("odd", P("fsdp")),))["odd"] == P()


def test_the_parameters_may_be_one_array():
    bare = jnp.zeros((DIM, 128))
    assert specs_of(bare) == {"": P("fsdp", "tensor")}
    found = param_specs(EVERY.on(jax.devices()[:4]), bare)
    state = optax.adam(0.1).init(bare)
    assert [x.spec for x in jax.tree.leaves(found.shardings(state))] == [
        P(),
        P("fsdp", "tensor"),
        P("fsdp", "tensor"),
    ]
    with pytest.raises(ValueError, match="Paths are '' .a bare array"):
        specs_of(bare, Strategy(rules=(("kernel", P()),)))


def test_a_dimension_may_be_cut_over_several_axes():
    rules = (("up/kernel$", P(None, ("fsdp", "tensor"))),)
    found = {
        s.name: specs_of(params(), s)["layers/0/up/kernel"]
        for s in (Strategy(fsdp=2, tensor=2, rules=rules), Strategy(data=2, fsdp=2, rules=rules))
    }
    assert found["fsdp2.tensor2"] == P(None, ("fsdp", "tensor"))
    assert found["data2.fsdp2"] == P(None, "fsdp")
    biases = specs_of(params(), Strategy(fsdp=2, tensor=2, rules=rules))["layers/0/up/bias"]
    assert biases == P("tensor")
    wrong = (("odd", P(("fsdp", "tensor"))),)
    with pytest.raises(ValueError, match="length 35, over fsdp=4 x tensor=2.*are 7 and 35"):
        specs_of(params(), Strategy(fsdp=4, tensor=2, rules=wrong))


# -- what suits a model ----------------------------------------------------------------------------


def stacked():
    return {"layers": {"up": {"kernel": jnp.zeros((4, DIM, 256))}}, "moe": jnp.zeros((4, DIM, DIM))}


@pytest.mark.parametrize(
    "strategy", candidates(8, max_expert=2, max_context=2, max_stage=4), ids=lambda s: s.name
)
def test_the_bytes_of_a_state_are_those_that_a_device_holds(strategy):
    tree = {"embed": jnp.zeros((256, DIM), jnp.bfloat16), **stacked()}
    state = {"params": tree, "opt": optax.adamw(0.1).init(tree), "key": jax.random.key(0)}
    found = param_specs(strategy.on(jax.devices()), tree)
    placed = jax.device_put(state, found.shardings(state))
    held = bytes_per_device({**placed, "key": jax.random.key_data(placed["key"])})
    assert set(held.values()) == {state_bytes(found, jax.eval_shape(lambda: state))}


def test_what_does_not_suit_is_left_out_with_the_reason():
    tree = jax.eval_shape(stacked)
    state = {"params": tree, "opt": jax.eval_shape(optax.adam(0.1).init, tree)}
    plans = candidates(8, max_expert=8, max_stage=4)
    own = (("layers/up/kernel", P("stage", None, "fsdp")),)
    whole = 3 * 4 * 4 * (DIM * 256 + DIM * DIM)
    kept, left_out = suitable(plans, state, tree, own, memory_bytes=whole // 4)
    assert set(kept) | {s for s, _ in left_out} == set(plans) and kept
    assert {s for s in kept} & {s for s, _ in left_out} == set()
    reasons = {s.name: reason for s, reason in left_out}
    assert reasons["expert8"] == "no parameter is cut over expert=8"
    assert "GiB of state per device, 0.0 GiB are there" in reasons["data8"]
    assert all(param_specs(s.on(jax.devices()), tree, own) for s in kept)
    odd = Strategy(fsdp=8, rules=(("moe", P("fsdp")),))
    ((_, reason),) = suitable([odd], state, tree)[1]
    assert "cuts dimension 0 of moe, of length 4, over fsdp=8" in reason
    with pytest.raises(ValueError, match="only a number of devices resolves"):
        suitable([Strategy(data=-1)], state, tree)


def test_what_sends_less_for_its_parameters_comes_first():
    tree = jax.eval_shape(stacked)
    plans = candidates(4, max_stage=2)[::-1]
    names = [s.name for s in suitable(plans, tree, tree)[0]]
    assert names[:3] == ["data4", "data2.fsdp2", "fsdp4"], "gathers are paid twice, sums once"
    assert names.index("tensor4") > names.index("data2.tensor2")


def test_a_large_leaf_that_stays_whole_is_named_with_the_reason():
    def told(*, own=(), **degrees):
        strategy = Strategy(**degrees)
        found = param_specs(strategy.on(jax.devices()[: strategy.num_devices]), tree, own)
        return whole_leaves(found, tree)

    shapes = {
        "up": (1024, 4096),
        "layers": {"kernel": (3, 5, 7 * 2**14 + 7)},
        "wpe": (1024, 512),
        "small": (33, 35),
    }
    tree = {
        "small_part": jax.ShapeDtypeStruct((2**18 - 1,), jnp.float32),
        **jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        ),
    }
    odd = "layers/kernel, 7 MiB, because 3 x 5 x 114695 is divisible by none of"
    positions = "wpe, 2 MiB, because neither metadata nor a default cuts 1024 x 512 over"
    assert told(fsdp=8) == (f"{odd} fsdp=8",)
    assert told(fsdp=4, tensor=2) == (f"{odd} fsdp=4, tensor=2",)
    assert told(tensor=8) == (f"{odd} tensor=8", f"{positions} tensor=8")
    assert told(tensor=8, own=(("wpe", P("tensor")),)) == (f"{odd} tensor=8",)
    assert told(tensor=8, rules=((r"wpe|layers", P()),)) == (), (
        "what a rule leaves whole was chosen"
    )
    assert told(data=8) == told(data=2, context=4) == ()
