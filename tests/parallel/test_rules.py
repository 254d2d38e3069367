"""Parameters are cut as rules, metadata or defaults say, whole in sum; optimizer state goes with them."""

import itertools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxgoodput.optim import rules as gain_rules
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.parallel.rules import default_spec, param_specs, path_name
from jaxgoodput.parallel.strategy import Strategy, candidates
from jaxgoodput.train.state import split

DIM = 64
EVERY = Strategy(fsdp=2, tensor=2)


def params(seed=0):
    """A little of everything: names that repeat under several paths, in several shapes."""
    numbers = itertools.count(seed)

    def normal(*shape):
        return jax.random.normal(jax.random.key(next(numbers)), shape)

    return {
        "embed": {"embedding": normal(256, DIM)},
        "layers": [
            {"up": {"kernel": normal(DIM, 256), "bias": normal(256)}, "down": normal(256, DIM)}
            for _ in range(2)
        ],
        "kernel": normal(DIM, DIM),
        "scale": normal(DIM),
        "odd": normal(35, 33),
    }


def specs_of(tree, strategy=EVERY, own=()):
    """Path -> spec."""
    layout = strategy.on(jax.devices()[: strategy.num_devices])
    found = param_specs(layout, tree, own)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): found.spec(path, leaf.shape) for path, leaf in leaves}


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
    with pytest.raises(
        ValueError, match="speaks of 'skale'.*no parameter.*Paths are embed/embedding"
    ):
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


# -- defaults --------------------------------------------------------------------------------------

BY_DEFAULT = {
    # Pairs of an MLP, by name and by shape.
    ("mlp/up/kernel", (64, 256)): P("fsdp", "tensor"),
    ("mlp/down/kernel", (256, 64)): P("tensor", "fsdp"),
    ("wi", (64, 64)): P("fsdp", "tensor"),
    ("wo", (64, 64)): P("tensor", "fsdp"),
    ("fc1/weight", (64, 64)): P("fsdp", "tensor"),
    ("fc2/weight", (64, 64)): P("tensor", "fsdp"),
    ("mlp_out", (64, 64)): P("tensor", "fsdp"),
    ("h.3.mlp.c_proj.weight", (64, 64)): P("tensor", "fsdp"),
    ("Dense_0/kernel", (64, 256)): P("fsdp", "tensor"),
    ("Dense_1/kernel", (256, 64)): P("tensor", "fsdp"),
    ("k_proj/kernel", (256, 64)): P("fsdp", "tensor"),  # fewer heads of keys than of queries
    ("o_proj/kernel", (256, 256)): P("tensor", "fsdp"),
    # Heads kept apart, alone and stacked.
    ("att/query/kernel", (64, 4, 16)): P("fsdp", "tensor", None),
    ("att/out/kernel", (4, 16, 64)): P("tensor", None, "fsdp"),
    ("att/query/kernel", (6, 64, 4, 16)): P(None, "fsdp", "tensor", None),
    ("att/out/kernel", (6, 4, 16, 64)): P(None, "tensor", None, "fsdp"),
    # Stacks that are scanned over.
    ("layers/q_proj/kernel", (6, 64, 64)): P(None, "fsdp", "tensor"),
    ("layers/o_proj/kernel", (6, 64, 64)): P(None, "tensor", "fsdp"),
    ("layers/up/kernel", (128, 64, 256)): P(None, "fsdp", "tensor"),
    ("layers/norm/scale", (32, 768)): P(None, "fsdp"),
    ("layers/up/bias", (32, 768)): P(None, "fsdp"),
    # Images.
    ("Conv_0/kernel", (3, 3, 64, 128)): P(None, None, "fsdp", "tensor"),
    ("conv_out/kernel", (2, 2, 64, 128)): P(None, None, "tensor", "fsdp"),
    ("out/kernel", (2, 2, 64, 128)): P(None, None, "tensor", "fsdp"),
    ("patch_embed/kernel", (16, 16, 4, 256)): P(None, None, "fsdp", "tensor"),
    # Tables.
    ("embed/embedding", (256, 512)): P("tensor", "fsdp"),
    ("wte/weight", (1024, 64)): P("tensor", "fsdp"),
    ("wpe/embedding", (1024, 64)): P("fsdp", None),
    ("pos_embedding", (1, 196, 64)): P(None, "fsdp", None),
    # What does not divide stays whole, or leaves it to another dimension.
    ("head/kernel", (64, 257)): P("fsdp", None),
    ("stem/kernel", (3, 1024)): P(None, "tensor"),
    ("LayerNorm_0/scale", (2048,)): P("fsdp"),
    ("LayerNorm_0/scale", (2047,)): P(None),
    ("small/kernel", (16, 16)): P(),
    ("temperature", ()): P(),
}


@pytest.mark.parametrize("leaf, spec", BY_DEFAULT.items(), ids=lambda x: str(x))
def test_the_defaults_know_usual_layers(leaf, spec):
    name, shape = leaf
    assert default_spec(name, shape, EVERY) == spec


@pytest.mark.parametrize("name, shape", [leaf for leaf in BY_DEFAULT if len(leaf[1]) != 1])
def test_fsdp_takes_the_same_dimension_whatever_the_degrees(name, shape):
    found = set()
    for strategy in (Strategy(fsdp=f, tensor=t) for f in (2, 4) for t in (1, 2, 4)):
        spec = default_spec(name, shape, strategy)
        found |= {i for i, axis in enumerate(spec) if axis == "fsdp"}
    assert len(found) <= 1


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, DIM)(tokens)
        x = nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        x = nn.Dense(256)(x)
        x = nn.Dense(DIM)(x)
        return nn.RNN(nn.OptimizedLSTMCell(DIM))(nn.Conv(DIM, (3,))(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, DIM, decode=False, rngs=rngs)
        self.mlp = nnx.List([nnx.Linear(DIM, 256, rngs=rngs), nnx.Linear(256, DIM, rngs=rngs)])
        self.conv = nnx.Conv(DIM, DIM, (3,), rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(DIM, DIM, rngs=rngs)


def test_the_defaults_suit_linen_layers():
    tree = jax.eval_shape(Linen().init, jax.random.key(0), jnp.zeros((2, 5), int))["params"]
    attention = "MultiHeadDotProductAttention_0"
    assert {name: spec for name, spec in specs_of(tree).items() if spec != P()} == {
        "Embed_0/embedding": P("tensor", "fsdp"),
        **{f"{attention}/{x}/kernel": P("fsdp", "tensor") for x in ("query", "key", "value")},
        f"{attention}/out/kernel": P("tensor", None, "fsdp"),
        "Dense_0/kernel": P("fsdp", "tensor"),
        "Dense_1/kernel": P("tensor", "fsdp"),
        "Conv_0/kernel": P(None, "fsdp", "tensor"),
        **{
            f"OptimizedLSTMCell_0/{a}{b}/kernel": P("fsdp", "tensor")
            for a, b in itertools.product("ih", "ifgo")
        },
    }


def test_the_defaults_suit_nnx_layers():
    blank = nnx.eval_shape(lambda: Nnx(nnx.Rngs(0)))
    tree = nnx.to_pure_dict(nnx.split(blank, nnx.Param, ...)[1])
    assert {name: spec for name, spec in specs_of(tree).items() if spec != P()} == {
        "embed/embedding": P("tensor", "fsdp"),
        **{f"attention/{x}/kernel": P("fsdp", "tensor") for x in ("query", "key", "value")},
        "attention/out/kernel": P("tensor", None, "fsdp"),
        "mlp/0/kernel": P("fsdp", "tensor"),
        "mlp/1/kernel": P("tensor", "fsdp"),
        "conv/kernel": P(None, "fsdp", "tensor"),
        "cell/dense_i/kernel": P("fsdp", "tensor"),
        "cell/dense_h/kernel": P("fsdp", "tensor"),
    }


def test_a_pair_of_the_defaults_needs_one_sum():
    layout = Strategy(tensor=4).on(jax.devices()[:4])
    tree = {"up": jnp.zeros((DIM, 256)), "down": jnp.zeros((256, DIM)), "bias": jnp.zeros(256)}
    found = param_specs(layout, tree)

    def mlp(tree, x):
        return jax.nn.relu(x @ tree["up"] + tree["bias"][None]) @ tree["down"]

    x = jax.ShapeDtypeStruct((8, DIM), jnp.float32, sharding=layout.batch_sharding)
    lowered = jax.jit(mlp, out_shardings=layout.batch_sharding).lower(found.placed(tree), x)
    text = str(lowered.compile().as_text())
    assert text.count(" all-reduce(") == 1
    assert "all-gather" not in text and "all-to-all" not in text and "collective-perm" not in text


# -- optimizer state -------------------------------------------------------------------------------


def halves(tree):
    labels = itertools.cycle(["a", "b"])
    return jax.tree.map(lambda _: next(labels), tree)


OPTIMIZERS: dict[str, tuple[Any, float]] = {
    # With how many values of the parameters' shapes it keeps for each parameter.
    "adamw": (optax.adamw(0.1), 2),
    "momentum": (optax.sgd(0.1, momentum=0.9), 1),
    "multi_transform": (
        optax.multi_transform({"a": optax.adam(0.1), "b": optax.adam(0.2)}, halves),
        2,
    ),
    "masked": (optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda _: True, tree)), 2),
    "inject_hyperparams": (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), 2),
    "MultiSteps": (optax.MultiSteps(optax.adam(0.1), 4), 3),
    "chain": (optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale_by_adam()), 3),
    "adaptive": (adaptive(optax.adamw(0.1), gain_rules.adam_scale, base_batch_size=8), 2),
}


@pytest.mark.parametrize("tx, copies", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_is_cut_like_its_parameter(tx, copies):
    tree = params()
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    state = jax.eval_shape(tx.init, tree)
    wanted = specs_of(tree)
    seen = dict.fromkeys(wanted, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        spec = found.spec(path, leaf.shape)
        # The parameter is the longest path that ends this one.
        ends = [n for n in wanted if f"/{path_name(path)}".endswith(f"/{n}")]
        if ends and leaf.ndim:
            owner = max(ends, key=len)
            seen[owner] += 1
            assert spec == wanted[owner], path_name(path)
        else:
            assert spec == P(), path_name(path)
    assert set(seen.values()) == {copies}


def test_an_update_keeps_every_sharding():
    tree = params()
    tx = optax.adamw(0.1)
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    placed = jax.device_put((tree, tx.init(tree)), found.shardings((tree, tx.init(tree))))

    def step(tree, state):
        updates, state = tx.update(jax.tree.map(jnp.sin, tree), state, tree)
        return optax.apply_updates(tree, updates), state

    expected = jax.device_get(step(tree, tx.init(tree)))
    got = jax.jit(step, out_shardings=found.shardings((tree, tx.init(tree))))(*placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, got)
    assert found.specs(got) == jax.tree.map(lambda x: x.sharding.spec, got)


def test_factored_moments_are_whole():
    tree = {"up": {"kernel": jnp.zeros((256, 512))}, "kernel": jnp.zeros((64, 32))}
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    state = jax.eval_shape(optax.adafactor(0.1, momentum=0.9).init, tree)
    specs = {
        (path_name(path), leaf.shape): found.spec(path, leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    cut = {key: spec for key, spec in specs.items() if spec != P()}
    assert {shape for _, shape in cut} == {(256, 512), (64, 32)}
    assert {(256,), (512,)} <= {shape for _, shape in specs}
    # The small matrix is not factored: its second moment and momentum follow it, so does the momentum
    # of the large one.
    assert sorted(math.prod(shape) for _, shape in cut) == [2048, 2048, 256 * 512]


def test_paths_that_end_alike_are_told_apart():
    """The same names and shapes at several depths: each follows its own parameter."""
    rules = (("^a/a/w", P("tensor")), ("^a/w", P("fsdp")), ("^w", P(None, "fsdp")))
    tree = {"a": {"a": {"w": jnp.zeros((8, 8))}, "w": jnp.zeros((8, 8))}, "w": jnp.zeros((8, 8))}
    layout = Strategy(fsdp=2, tensor=2, rules=rules).on(jax.devices()[:4])
    state = jax.eval_shape(optax.adam(0.1).init, tree)
    moments = param_specs(layout, tree).specs(state)[0].mu
    assert moments == {"a": {"a": {"w": P("tensor")}, "w": P("fsdp")}, "w": P(None, "fsdp")}


def test_frozen_parameters_have_a_place_and_no_moments():
    tree = params()
    mask = jax.tree_util.tree_map_with_path(lambda p, _: "layers" in path_name(p), tree)
    kept, rest = split(tree, mask)
    found = param_specs(EVERY.on(jax.devices()[:4]), tree)
    state = optax.adam(0.1).init(kept)
    assert found.specs(kept)["layers"] == found.specs(tree)["layers"]
    assert found.specs(rest)["embed"] == found.specs(tree)["embed"]
    assert found.specs(kept)["embed"] == {"embedding": None}
    assert found.specs(state)[0].nu == found.specs(kept)
