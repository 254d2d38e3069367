"""Attention cut over "context" is that of one device, and sends what it says."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxgoodput.parallel.collectives import received_bytes
from jaxgoodput.parallel.ring import _Blocks, _Mask, all_to_all_attention, ring_attention
from jaxgoodput.parallel.strategy import CONTEXT_AXIS, REPLICA_AXES, Strategy, in_mesh

BOTH = pytest.mark.parametrize("attention", [ring_attention, all_to_all_attention])
FLOAT = 4  # bytes


def arrays(batch, length, heads, kv_heads, head=8, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(batch, length, n, head)).astype(dtype) for n in (heads, kv_heads, kv_heads)
    ]


def in_segments(batch, length, seed=0):
    """Rows of several documents."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, 4, (batch, length)), axis=1).astype(np.int32)


def with_gradients(attention, **options):
    """The result and the gradients of queries, keys and values, of a loss that tells all numbers apart."""

    def loss(query, key, value, *segments):
        found = attention(query, key, value, segments=segments[0] if segments else None, **options)
        return jnp.sum(found * jnp.cos(jnp.arange(found.size).reshape(found.shape))), found

    def both(*arguments):
        gradients, found = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arguments)
        return found, *gradients

    return both


def under(strategy, function, *arguments):
    """Compile and run a function as a model runs under a strategy, all arguments cut over "context"."""
    layout = strategy.on(jax.devices()[: strategy.num_devices])
    cut = layout.sharding(P(REPLICA_AXES, CONTEXT_AXIS))
    compiled = (
        jax.jit(in_mesh(function, layout.mesh.abstract_mesh, strategy), in_shardings=cut)
        .lower(*arguments)
        .compile()
    )
    return compiled, compiled(*(jax.device_put(x, cut) for x in arguments))


def assert_close(found, expected, tolerance=2e-6):
    for a, b in zip(found, expected, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1.0)


@BOTH
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window": 7}, {"causal": True, "window": 20}],
    ids=["all", "causal", "window", "wide window"],
)
def test_it_is_the_attention_of_one_device(attention, degree, options):
    arguments = arrays(2, 48, 8, 4)
    expected = jax.jit(with_gradients(attention, **options))(*arguments)
    _, found = under(
        Strategy(context=degree, data=min(2, 8 // degree)),
        with_gradients(attention, **options),
        *arguments,
    )
    assert_close(found, expected)


@settings(max_examples=25, deadline=None)
@given(
    attention=st.sampled_from([ring_attention, all_to_all_attention]),
    degree=st.sampled_from([2, 4]),
    tensor=st.sampled_from([1, 2]),
    per_block=st.integers(1, 5),
    groups=st.sampled_from([1, 2, 3]),
    window=st.none() | st.integers(1, 50),
    causal=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_form_of_it_is_the_attention_of_one_device(
    attention, degree, tensor, per_block, groups, window, causal, packed, seed
):
    length, kv_heads = 2 * degree * per_block, 8
    options = {"causal": causal, "window": window if causal else None}
    arguments = arrays(2, length, kv_heads * groups, kv_heads, head=4, seed=seed)
    arguments += [in_segments(2, length, seed)] if packed else []
    expected = jax.jit(with_gradients(attention, **options))(*arguments)
    strategy = Strategy(context=degree, tensor=tensor)
    _, found = under(strategy, with_gradients(attention, **options), *arguments)
    assert_close(found, expected)


@BOTH
def test_half_precision_is_as_exact_as_on_one_device(attention):
    exact = arrays(2, 64, 8, 4)
    low = [jnp.asarray(x, jnp.bfloat16) for x in exact]
    options = {"causal": True}
    expected = jax.jit(with_gradients(attention, **options))(*exact)
    one = jax.jit(with_gradients(attention, **options))(*low)
    _, many = under(Strategy(context=4), with_gradients(attention, **options), *low)

    def far(found):
        pairs = zip(found, expected, strict=True)
        return [float(np.abs(np.asarray(a, np.float64) - b).max()) for a, b in pairs]

    assert all(a <= 1.5 * b + 1e-3 for a, b in zip(far(many), far(one), strict=True))


def text_of(compiled):
    text = compiled.as_text()
    assert text is not None
    return text


def collectives(compiled):
    kinds = re.findall(r"= (?:\(.*?\)|\S+) ([a-z-]+?)(?:-start)?\(", text_of(compiled))
    return set(kinds) & {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-permute",
        "reduce-scatter",
    }


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 7}])
def test_keys_are_never_gathered_and_bytes_are_by_the_formula(degree, options):
    batch, length, heads, kv_heads, head = 2, 48, 8, 4, 8
    arguments = arrays(batch, length, heads, kv_heads, head)
    forward = functools.partial(ring_attention, **options)
    compiled, _ = under(Strategy(context=degree), forward, *arguments)
    keys = batch * length * kv_heads * head * FLOAT  # of the whole sequence
    queries = keys * heads // kv_heads
    turns = degree - 1
    if "window" in options:
        turns = min(turns, math.ceil((options["window"] - 1) / (length // degree)))
    zigzag = options == {"causal": True}
    most = turns * 2 * keys + zigzag * (2 * queries + 2 * keys)
    assert collectives(compiled) == {"collective-permute"}
    # Blocks that stay where they are in the exchange are not sent.
    assert turns * 2 * keys <= received_bytes(text_of(compiled), degree) <= most
    compiled, _ = under(Strategy(context=degree), with_gradients(forward), *arguments)
    assert collectives(compiled) - {"all-reduce"} == {
        "collective-permute"
    }  # of the loss, one number
    # Keys and values go round twice, their gradients once and home; the exchange is undone.
    most = turns * 4 * keys + turns * 2 * keys + 2 * keys + 2 * zigzag * (2 * queries + 2 * keys)
    assert received_bytes(text_of(compiled), degree) <= most + 2 * degree * FLOAT


@pytest.mark.parametrize("degree", [2, 4])
def test_the_exchange_of_heads_sends_each_number_once(degree):
    batch, length, heads, kv_heads, head = 2, 48, 8, 4, 8
    arguments = arrays(batch, length, heads, kv_heads, head)
    compiled, _ = under(Strategy(context=degree), all_to_all_attention, *arguments)
    keys = batch * length * kv_heads * head * FLOAT
    queries = keys * heads // kv_heads
    assert collectives(compiled) == {"all-to-all"}
    sent = (2 * queries + 2 * keys) * (degree - 1) // degree
    assert received_bytes(text_of(compiled), degree) == sent


def test_a_balanced_ring_computes_as_much_on_every_device():
    for degree in (2, 3, 4, 8):
        blocks = _Blocks(degree, 8, True, _Mask(True, None, 1.0))
        for turn in range(degree):
            pairs = [
                sum(
                    bool(blocks.mask.some(query, key, blocks.length))
                    for query in blocks.begins(jnp.array(device))
                    for key in blocks.begins(jnp.array((device - turn) % degree))
                )
                for device in range(degree)
            ]
            assert pairs == [3 if turn == 0 else 2] * degree


@BOTH
def test_what_does_not_divide_is_refused(attention):
    def refused(strategy, arguments, **options):
        with pytest.raises(ValueError) as error:
            under(strategy, functools.partial(attention, **options), *arguments)
        return str(error.value)

    query, key, value = arrays(2, 48, 8, 4)
    assert "kv_heads divides" in refused(Strategy(), (query[:, :, :6], key, value))
    assert "sees itself" in refused(Strategy(), (query, key, value), window=3)


def test_what_a_degree_does_not_divide_is_refused():
    def refused(attention, arguments, **options):
        layout = Strategy(context=4).on(jax.devices()[:4])
        model = functools.partial(attention, **options)
        with pytest.raises(ValueError) as error:
            jax.eval_shape(
                in_mesh(model, layout.mesh.abstract_mesh, Strategy(context=4)), *arguments
            )
        return str(error.value)

    assert "Pad them" in refused(ring_attention, arrays(2, 46, 8, 4))
    assert "length that 8 divides" in refused(ring_attention, arrays(2, 44, 8, 4), causal=True)
    assert "come out even" in refused(all_to_all_attention, arrays(2, 48, 6, 6))
