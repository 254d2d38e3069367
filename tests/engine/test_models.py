"""Whole models, as people write them: five Adam steps under any layout are those of one device.

linen scanned over axis 0 and 1 with logical names, nnx with metadata, a mixture of experts, convolutions
with BatchNorm, the Llama-like decoder of the examples, and the same as a pipeline. Per leaf, in float32.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import engines
import flax.linen as nn
import jax
import jax.numpy as jnp
import llama_model
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.sharding import PartitionSpec as P

import jaxgoodput as jg
from jaxgoodput.engine.engine import LossKind
from jaxgoodput.parallel.pipeline import pipeline
from jaxgoodput.parallel.strategy import Strategy

NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)
ROWS, LENGTH, VOCAB = 16, 8, 64
WIDTH, HIDDEN, HEADS, LAYERS, EXPERTS = 32, 64, 8, 2, 4
HEAD = WIDTH // HEADS
TOLERANCE = 2e-5
# What the metadata's names stand for.
AXES = {"embed": "fsdp", "heads": "tensor", "kv": None, "mlp": "tensor", "vocab": "tensor"}
AXES |= {"layers": None}

DATA8 = Strategy(data=8)
STRATEGIES = (
    DATA8,
    Strategy(fsdp=8),
    Strategy(fsdp=4, tensor=2),
    Strategy(fsdp=2, tensor=4),
    Strategy(tensor=8),
    Strategy(data=2, fsdp=2, tensor=2),
    Strategy(data=2, tensor=4),
    Strategy(fsdp=4, context=2),
)


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained; `zero` finds the leaves whose true gradient is 0, where Adam blows up rounding."""

    init: Callable[..., Any]
    loss_and_state: Callable[..., Any]
    sample: Any
    zero: str = "^$"


def of_tokens(logits, init, **kwargs):
    """A language model, from (params, model state, key, tokens read) to logits and state."""

    def loss_and_state(params, model_state, batch, key):
        read, wanted = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        out, model_state = logits(params, model_state, key, read)
        losses = optax.softmax_cross_entropy_with_integer_labels(out, wanted)
        return losses.mean(-1), model_state

    sample = {"tokens": jax.ShapeDtypeStruct((LENGTH + 1,), jnp.int32)}
    return Model(init, loss_and_state, sample, **kwargs)


def attended(query, key, value):
    """Causal attention of `[batch, length, heads, head]`."""
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key) / math.sqrt(HEAD)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("bhlm,bmhd->blhd", weights, value)


# -- linen -----------------------------------------------------------------------------------------


def named(*names):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)


class LinenBlock(nn.Module):
    attention: Callable[..., Any] = attended

    @nn.compact
    def __call__(self, x, _):
        def heads(name):
            init = named("embed", "heads", "kv")
            y = nn.DenseGeneral((HEADS, HEAD), kernel_init=init, name=name)(h)
            return with_logical_constraint(y, ("batch", "length", "heads", "kv"))

        x = with_logical_constraint(x, ("batch", "length", "embed"))
        h = nn.LayerNorm(name="norm")(x)
        y = self.attention(heads("query"), heads("key"), heads("value"))
        init = named("heads", "kv", "embed")
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=init, name="out")(y)
        y = nn.Dense(HIDDEN, kernel_init=named("embed", "mlp"), name="up")(nn.LayerNorm()(x))
        y = with_logical_constraint(nn.gelu(y), ("batch", "length", "mlp"))
        y = nn.Dense(WIDTH, kernel_init=named("mlp", "embed"), name="down")(y)
        return x + nn.Dropout(0.1, deterministic=True)(y), None


class LinenTransformer(nn.Module):
    axis: int
    attention: Callable[..., Any] = attended

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, WIDTH, embedding_init=named("vocab", "embed"))
        layers = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(self.attention, name="layers")(table(tokens), None)
        return table.attend(nn.LayerNorm()(x))


def linen(axis=0, attention=attended):
    model = jg.from_linen(LinenTransformer(axis, attention), axes=AXES)
    return of_tokens(
        model.train,
        lambda key: model.init(key, jnp.zeros((1, LENGTH), jnp.int32)),
        zero="key/bias",  # added to a row's every score, which softmax does not see
    )


# -- nnx -------------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        def init(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        shape = (HEADS, HEAD)
        kernel = init("embed", "heads", "kv")
        self.query = nnx.LinearGeneral(WIDTH, shape, kernel_init=kernel, rngs=rngs)
        self.key = nnx.LinearGeneral(WIDTH, shape, kernel_init=kernel, rngs=rngs)
        self.value = nnx.LinearGeneral(WIDTH, shape, kernel_init=kernel, rngs=rngs)
        self.out = nnx.LinearGeneral(
            shape, WIDTH, axis=(-2, -1), kernel_init=init("heads", "kv", "embed"), rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=init("embed", "mlp"), rngs=rngs)
        down = nnx.initializers.lecun_normal()(rngs.params(), (HIDDEN, WIDTH))
        self.down = nnx.Param(down, out_sharding=("mlp", "embed"))

    def __call__(self, x):
        x = with_logical_constraint(x, ("batch", "length", "embed"))
        h = self.norm(x)
        x = x + self.out(attended(self.query(h), self.key(h), self.value(h)))
        return x + jax.nn.gelu(self.up(x)) @ self.down[...]


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def of_nnx():
    model = jg.from_nnx(lambda rngs: NnxTransformer(rngs), axes=AXES)
    return of_tokens(model.train, model.init, zero="key/bias")


# -- a mixture of experts --------------------------------------------------------------------------


def mixture_init(key):
    keys = iter(jax.random.split(key, 4))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])

    return {
        "embedding": normal(VOCAB, WIDTH),
        "router": {"kernel": normal(WIDTH, EXPERTS)},
        "experts": {
            "up": {"kernel": normal(EXPERTS, WIDTH, HIDDEN)},
            "down": {"kernel": normal(EXPERTS, HIDDEN, WIDTH)},
        },
    }


def mixture_logits(params, model_state, key, tokens):
    """Every token goes to the expert of its choice; tokens are sorted, so that an expert's are a run."""
    x = params["embedding"][tokens]
    flat = x.reshape(-1, WIDTH)
    weights = jax.nn.softmax(flat @ params["router"]["kernel"])
    chosen = jnp.argmax(weights, axis=-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    y = jax.lax.ragged_dot(flat[order], params["experts"]["up"]["kernel"], sizes)
    y = jax.lax.ragged_dot(jax.nn.gelu(y), params["experts"]["down"]["kernel"], sizes)
    y = y[jnp.argsort(order)] * jnp.max(weights, axis=-1, keepdims=True)
    return (x + y.reshape(x.shape)) @ params["embedding"].T, model_state


# -- convolutions ----------------------------------------------------------------------------------


class Images(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for width in (16, 32):
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(8)(x.mean((1, 2)))


def images():
    model = jg.from_linen(Images(), train_kwargs={"train": True}, predict_kwargs={"train": False})

    def loss_and_state(params, model_state, batch, key):
        out, model_state = model.train(params, model_state, key, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(out, batch["label"])
        return losses, model_state

    sample = {
        "image": jax.ShapeDtypeStruct((8, 8, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((), jnp.int32),
    }
    return Model(lambda key: model.init(key, jnp.zeros((1, 8, 8, 3))), loss_and_state, sample)


# -- the decoder of the examples -------------------------------------------------------------------

LLAMA = llama_model.Shape(
    vocab=VOCAB, width=WIDTH, layers=4, heads=4, kv_heads=2, hidden=HIDDEN, rotary_base=100.0
)


def llama_logits(params, model_state, key, tokens):
    return llama_model.logits(params, tokens, LLAMA), model_state


def pipeline_logits(params, model_state, key, tokens):
    """Those of `llama_logits`, over the stages of the layout."""
    layer = jax.checkpoint(lambda layer, x: llama_model.decoder_layer(layer, x, LLAMA))
    x = params["embedding"][tokens]
    x = pipeline(layer, params["layers"], x, num_micro_batches=4)
    out = llama_model.rms_norm(x, params["norm"]) @ params["head"]["kernel"]
    return out, model_state


def constrained_logits(params, model_state, key, tokens):
    """Rows over the replicas, said with a bare PartitionSpec, in a scan too."""

    def rows(x):
        return jax.lax.with_sharding_constraint(x, P(("fsdp", "data")))

    def body(x, layer):
        return rows(llama_model.decoder_layer(layer, x, LLAMA)), None

    x, _ = jax.lax.scan(body, rows(params["embedding"][tokens]), params["layers"])
    return llama_model.rms_norm(x, params["norm"]) @ params["head"]["kernel"], model_state


def llama_init(key):
    params = llama_model.init(key, LLAMA)
    # As large as what comes after it: RMSNorm would divide by a fiftieth, and multiply rounding by 50.
    return {**params, "embedding": params["embedding"] * 50}


MODELS = {
    "linen": linen,
    "linen_axis_1": functools.partial(linen, axis=1),
    "ring": functools.partial(linen, attention=functools.partial(jg.ring_attention, causal=True)),
    "heads_exchanged": functools.partial(
        linen, attention=functools.partial(jg.all_to_all_attention, causal=True)
    ),
    "nnx": of_nnx,
    "mixture": lambda: of_tokens(mixture_logits, mixture_init),
    "images": images,
    "llama": lambda: of_tokens(llama_logits, llama_init),
    "pipeline": lambda: of_tokens(pipeline_logits, llama_init),
    "constrained": lambda: of_tokens(constrained_logits, llama_init),
}
# What stands for the whole of `STRATEGIES` in every run, and what is special to a model.
OFTEN = {
    "linen": (Strategy(data=2, fsdp=2, tensor=2),),
    "linen_axis_1": (Strategy(fsdp=4, tensor=2),),
    "ring": (Strategy(fsdp=2, context=4),),
    "heads_exchanged": (Strategy(tensor=2, context=4),),
    "nnx": (DATA8,),
    "mixture": (Strategy(fsdp=4, expert=2),),
    "images": (Strategy(fsdp=8),),
    "llama": (Strategy(tensor=8),),
    "pipeline": (Strategy(data=2, stage=4),),
    "constrained": (Strategy(data=2, tensor=4),),
}
QUICK = ("linen", "linen_axis_1")
SELDOM = {
    "linen_axis_1": (Strategy(fsdp=4, context=2),),
    "ring": (Strategy(data=2, context=2, tensor=2),),
    "pipeline": (
        Strategy(data=4, stage=2),
        Strategy(fsdp=2, stage=4),
        Strategy(fsdp=2, tensor=2, stage=2),
    ),
}


def cases():
    """Models with strategies; only `OFTEN` is tried in every run of all tests."""
    for name in MODELS:
        every = dict.fromkeys((*OFTEN[name], *SELDOM.get(name, ()), *STRATEGIES))
        for strategy in every:
            marks = NIGHTLY
            if strategy in OFTEN[name]:
                marks = () if name in QUICK else pytest.mark.slow
            yield pytest.param(name, strategy, id=f"{name}-{strategy.name}", marks=marks)


def rows_of(sample, step):
    """The rows of one update: numbers below `VOCAB`, images."""
    rng = np.random.default_rng(step)

    def one(leaf):
        shape = (ROWS, *leaf.shape)
        if leaf.dtype == jnp.int32:
            return rng.integers(0, VOCAB if leaf.shape else 8, shape).astype(np.int32)
        return rng.standard_normal(shape).astype(np.float32)

    return jax.tree.map(one, sample)


@functools.cache
def model_of(name):
    return MODELS[name]()


@functools.cache
def after_five_steps(name, strategy, loss_kind: LossKind = "auto"):
    """Parameters and model state, on the host, and the engine."""
    model = model_of(name)
    engine = engines.make(
        init=model.init,
        loss_and_state=model.loss_and_state,
        sample=model.sample,
        # Not 1e-8: where a gradient is all but 0, that makes steps of the size of others from rounding.
        tx=optax.adam(1e-3, eps=1e-6),
        strategy=strategy,
        preconditioned=False,
        loss_kind=loss_kind,
    )
    state = engine.init(jax.random.key(0))
    for step in range(5):
        state, _ = engines.run(engine, state, [rows_of(model.sample, step)], measure=False)
    return engines.host(state.params), engines.host(state.model_state)


def distances(found, expected):
    """|a - b| / |b| of every leaf, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(found)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    pairs = zip(names, leaves, jax.tree.leaves(expected), strict=True)
    return {name: float(np.linalg.norm(a - b) / np.linalg.norm(b)) for name, (_, a), b in pairs}


def assert_same_training(name, found, expected):
    zero = model_of(name).zero
    far = {
        leaf: distance
        for leaf, distance in distances(found, expected).items()
        if not distance <= TOLERANCE and not re.search(zero, leaf)
    }
    assert not far


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [*cases()])
def test_five_steps_are_those_of_one_device(name, strategy):
    expected, _ = after_five_steps(name, Strategy())
    found, _ = after_five_steps(name, strategy, "global" if name == "images" else "auto")
    assert_same_training(name, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=NIGHTLY) for n in ("mixture",))])
def test_a_global_loss_under_data_parallelism_is_a_separate_one(name):
    found, _ = after_five_steps(name, DATA8, "global")
    assert_same_training(name, found, after_five_steps(name, DATA8, "separate")[0])


@pytest.mark.slow
def test_statistics_of_a_separate_loss_are_those_of_each_replica():
    """BatchNorm sees the rows of a gradient: all of a micro-batch under a global loss, otherwise one
    replica's, as in the data parallelism of most frameworks, whose variance is less by a factor of
    (n - 1) / n or so. The running statistics are the mean over replicas.
    """
    (whole, _), (separate, statistics) = (
        after_five_steps("images", DATA8, kind) for kind in ("global", "separate")
    )
    assert max(distances(separate, whole).values()) > 100 * TOLERANCE
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(statistics))


@pytest.mark.slow
def test_a_pipeline_trains_as_the_scan_does():
    expected, _ = after_five_steps("llama", Strategy())
    assert_same_training("pipeline", after_five_steps("pipeline", Strategy())[0], expected)
    found, _ = after_five_steps("pipeline", Strategy(data=2, stage=4))
    assert_same_training("pipeline", found, expected)


@pytest.mark.slow
def test_bare_constraints_change_nothing():
    expected, _ = after_five_steps("llama", Strategy())
    assert_same_training("constrained", after_five_steps("constrained", Strategy())[0], expected)
