"""What no rule speaks of is cut as its layer suggests: names, shapes, and the sums that a block needs."""

import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from partitions import DIM, EVERY, specs_of

from jaxgoodput.parallel.partition import default_spec, param_specs
from jaxgoodput.parallel.strategy import Strategy

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
    ("layers/norm/scale", (32, 768)): P(),
    ("layers/attention_norm", (32, 768)): P(),
    ("layers/rmsnorm", (32, 768)): P(),
    ("layers/up/bias", (32, 768)): P(),
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
    # A vector would have to be gathered in every layer, for next to no memory.
    ("LayerNorm_0/scale", (2**17 - 8,)): P(),
    ("table/bias", (2**17,)): P("fsdp"),
    # What reads the last activations, whatever the size of the vocabulary.
    ("head/kernel", (512, 256)): P("fsdp", "tensor"),
    ("lm_head/kernel", (64, 1024)): P("fsdp", "tensor"),
    ("logits_dense/kernel", (512, 256)): P("fsdp", "tensor"),
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


ALL = Strategy(fsdp=2, tensor=2, expert=2, stage=2, context=2)
OF_STACKS = {
    # Mixtures of experts, alone and in a stack; what all tokens pass is no expert.
    ("moe/wi", (8, 64, 256)): P("expert", "fsdp", "tensor"),
    ("layers/3/experts/down/kernel", (8, 256, 64)): P("expert", "tensor", "fsdp"),
    ("layers/MoeBlock_0/wo", (6, 8, 256, 64)): P("stage", "expert", "tensor", "fsdp"),
    ("moe/experts/gate/kernel", (8, 64, 256)): P("expert", "fsdp", "tensor"),
    ("moe/wi", (7, 64, 256)): P(None, "fsdp", "tensor"),
    ("moe/router/kernel", (64, 32)): P("tensor", "fsdp"),
    ("layers/moe/router/kernel", (6, 64, 32)): P("stage", "tensor", "fsdp"),
    ("layers/moe/gate/kernel", (6, 64, 32)): P("stage", "fsdp", "tensor"),
    ("layers/shared_experts/up/kernel", (6, 64, 256)): P("stage", "fsdp", "tensor"),
    # Stacks of layers; vectors too, however small.
    ("layers/up/kernel", (6, 64, 256)): P("stage", "fsdp", "tensor"),
    ("layers/up/kernel", (7, 64, 256)): P(None, "fsdp", "tensor"),
    ("decoder/blocks/att/query/kernel", (6, 64, 4, 16)): P("stage", "fsdp", "tensor", None),
    ("layers/norm/scale", (6, 64)): P("stage", None),
    ("ScanBlock_0/norm/scale", (6, 768)): P("stage", None),
    ("layers/3/up/kernel", (64, 256)): P("fsdp", "tensor"),
    ("layers/3/Conv_0/kernel", (4, 4, 64, 128)): P(None, None, "fsdp", "tensor"),
    ("stem/up/kernel", (6, 64, 256)): P(None, "fsdp", "tensor"),
}


@pytest.mark.parametrize("leaf, spec", OF_STACKS.items(), ids=lambda x: str(x))
def test_experts_and_stacked_layers_are_cut_over_axes_of_their_own(leaf, spec):
    name, shape = leaf
    assert default_spec(name, shape, ALL) == spec
    without = default_spec(name, shape, Strategy(fsdp=2, tensor=2))
    assert [e if e in ("fsdp", "tensor") else None for e in spec] == list(without) or not without
    assert default_spec(name, shape, Strategy(context=8)) in (P(), P(*[None] * len(shape)))


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


def without_vectors(specs):
    return {n: spec for n, spec in specs.items() if not n.endswith(("bias", "scale"))}


def test_the_defaults_suit_linen_layers():
    tree = jax.eval_shape(Linen().init, jax.random.key(0), jnp.zeros((2, 5), int))["params"]
    attention = "MultiHeadDotProductAttention_0"
    assert without_vectors(specs_of(tree)) == {
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
    assert without_vectors(specs_of(tree)) == {
        "embed/embedding": P("tensor", "fsdp"),
        **{f"attention/{x}/kernel": P("fsdp", "tensor") for x in ("query", "key", "value")},
        "attention/out/kernel": P("tensor", None, "fsdp"),
        "mlp/0/kernel": P("fsdp", "tensor"),
        "mlp/1/kernel": P("tensor", "fsdp"),
        "conv/kernel": P(None, "fsdp", "tensor"),
        "cell/dense_i/kernel": P("fsdp", "tensor"),
        "cell/dense_h/kernel": P("fsdp", "tensor"),
    }


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x += nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        return x + nn.Dense(DIM, name="down")(nn.gelu(nn.Dense(256, name="up")(nn.LayerNorm()(x))))


def test_a_block_needs_two_sums_and_as_many_on_the_way_back():
    layout = Strategy(tensor=4).on(jax.devices()[:4])
    blank = jax.eval_shape(Block().init, jax.random.key(0), jnp.zeros((1, 4, DIM)))
    found = param_specs(layout, blank)
    x = jax.ShapeDtypeStruct((2, 4, DIM), jnp.float32, sharding=layout.batch_sharding)

    def collectives(function, out):
        compiled = jax.jit(function, out_shardings=out).lower(found.placed(blank), x).compile()
        names = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\("
        return re.findall(names, str(compiled.as_text()))

    assert collectives(Block().apply, layout.batch_sharding) == ["all-reduce"] * 2

    def loss(tree, x):
        return jnp.sum(jnp.square(jnp.asarray(Block().apply(tree, x))))

    gradient = jax.grad(loss, argnums=(0, 1))
    # Two sums on the way forward, two on the way back.
    out = (found.shardings(blank), layout.batch_sharding)
    assert collectives(gradient, out) == ["all-reduce"] * 4


def test_a_bias_is_cut_where_the_outputs_of_its_matrix_are():
    tree = {
        "up": {"kernel": jnp.zeros((64, 256)), "bias": jnp.zeros(256)},
        "down": {"kernel": jnp.zeros((256, 64)), "bias": jnp.zeros(64)},
        "query": {"kernel": jnp.zeros((64, 4, 16)), "bias": jnp.zeros((4, 16))},
        "out": {"kernel": jnp.zeros((4, 16, 64)), "bias": jnp.zeros(64)},
        "stack": {
            "up": {"kernel": jnp.zeros((6, 64, 256)), "bias": jnp.zeros((6, 256))},
            "down": {"kernel": jnp.zeros((6, 256, 64)), "bias": jnp.zeros((6, 64))},
            "query": {"kernel": jnp.zeros((6, 64, 4, 16)), "bias": jnp.zeros((6, 4, 16))},
        },
        "ruled": {"kernel": jnp.zeros((64, 256)), "bias": jnp.zeros(256)},
        "odd": {"kernel": jnp.zeros((64, 255)), "bias": jnp.zeros(255)},
        "other": {"kernel": jnp.zeros((64, 256)), "bias": jnp.zeros(128)},
        "norm": {"scale": jnp.zeros(64), "bias": jnp.zeros(64)},
        "small": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)},
        "kernel": jnp.zeros((64, 64)),
        "bias": jnp.zeros(64),
    }
    rules = (("ruled/kernel", P("tensor")),)
    found = specs_of(tree, Strategy(tensor=2, rules=rules))
    assert {name: spec for name, spec in found.items() if name.endswith("bias")} == {
        "up/bias": P("tensor"),
        "down/bias": P(),
        "query/bias": P("tensor"),
        "out/bias": P(),
        "stack/up/bias": P(None, "tensor"),
        "stack/down/bias": P(),
        "stack/query/bias": P(None, "tensor"),
        "ruled/bias": P(),
        "odd/bias": P(),
        "other/bias": P(),
        "norm/bias": P(),
        "small/bias": P(),
        "bias": P("tensor"),
    }
    told = specs_of(tree, Strategy(tensor=2, rules=(*rules, ("up/bias", P()))))
    assert told["up/bias"] == told["stack/up/bias"] == P(), "a rule of its own goes before"


@pytest.mark.parametrize(
    "strategy", [Strategy(fsdp=8), Strategy(fsdp=4, tensor=2), Strategy(stage=2, fsdp=4)]
)
def test_layers_stacked_along_the_second_dimension_are_cut_as_along_the_first(strategy):
    layers = {
        "layers": {
            "query": {"kernel": (6, 64, 128), "bias": (6, 128)},
            "down": {"kernel": (6, 256, 64)},
            "norm": (6, 64),
        }
    }

    def specs(shapes):
        made = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        found = param_specs(strategy.on(jax.devices()), made).specs(made)
        return {
            path: (*spec, None, None, None)[: len(shape)]
            for (path, shape), (_, spec) in zip(
                jax.tree_util.tree_leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple)),
                jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, P)),
                strict=True,
            )
        }

    front = specs(layers)
    behind = specs(
        jax.tree.map(lambda s: (s[1], s[0], *s[2:]), layers, is_leaf=lambda x: isinstance(x, tuple))
    )
    for path, spec in front.items():
        if "bias" not in str(path):  # beside a matrix that is stacked so it stays whole over tensor
            assert behind[path] == (spec[1], spec[0], *spec[2:]), path
