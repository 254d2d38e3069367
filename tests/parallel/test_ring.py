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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxgoodput.parallel.collectives import received_bytes
from jaxgoodput.parallel.ring import _Blocks, _checked, _Mask, all_to_all_attention, ring_attention
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
    even = arguments[0].shape[0] % layout.num_replicas == 0
    cut = layout.sharding(P(REPLICA_AXES if even else None, CONTEXT_AXIS))
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


@pytest.mark.slow
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


def collectives(text):
    kinds = re.findall(r"= (?:\(.*?\)|\S+) ([a-z-]+?)(?:-start)?\(", text)
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
    keys = batch * length * kv_heads * head * FLOAT  # of the whole sequence
    exchange = 2 * keys + 2 * keys * heads // kv_heads if options == {"causal": True} else 0
    turns = degree - 1
    if "window" in options:
        turns = min(turns, math.ceil((options["window"] - 1) / (length // degree)))

    def sent(function):
        text = text_of(under(Strategy(context=degree), function, *arguments)[0])
        kinds = collectives(text)
        assert kinds - {"all-reduce"} == {"collective-permute"}  # of the loss, one number
        loops = [int(n) for n in re.findall(r'"known_trip_count":\{"n":"(\d+)"\}', text)]
        assert set(loops) <= {turns}, loops
        return received_bytes(text, degree), loops  # of a loop, one turn

    found, loops = sent(forward)
    assert len(loops) == (turns > 1)
    # In the exchange, some blocks stay where they are.
    assert 2 * keys <= found <= 2 * keys + exchange
    found, loops = sent(with_gradients(forward))
    assert len(loops) == 2 * (turns > 1)
    # Keys and values go round twice, and their gradients once and home; the exchange is undone.
    of_turn, home = 2 * keys + 2 * keys + 2 * keys, 2 * keys
    assert of_turn <= found <= of_turn + home + 2 * exchange + 2 * degree * FLOAT


@pytest.mark.slow
def test_memory_does_not_grow_with_the_degree_nor_with_the_square_of_the_positions():
    def blocks(degree, positions):
        arguments = arrays(1, degree * positions, 2, 2, 16)
        model = with_gradients(ring_attention, causal=True)
        compiled, _ = under(Strategy(context=degree), model, *arguments)
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes / arguments[1].nbytes * degree

    two, four, eight = (blocks(degree, 512) for degree in (2, 4, 8))
    assert four <= 1.1 * two and eight <= 1.1 * two
    assert blocks(2, 8192) <= 1.3 * blocks(2, 4096)


@pytest.mark.parametrize("degree", [2, 4])
def test_the_exchange_of_heads_sends_each_number_once(degree):
    batch, length, heads, kv_heads, head = 2, 48, 8, 4, 8
    arguments = arrays(batch, length, heads, kv_heads, head)
    compiled, _ = under(Strategy(context=degree), all_to_all_attention, *arguments)
    keys = batch * length * kv_heads * head * FLOAT
    queries = keys * heads // kv_heads
    assert collectives(text_of(compiled)) == {"all-to-all"}
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
@pytest.mark.parametrize(
    ("strategy", "shape", "options"),
    [
        (Strategy(context=3), (2, 48, 6, 3), {"causal": True}),
        (Strategy(context=5), (2, 5, 10, 5), {"causal": True, "window": 1}),
        (Strategy(context=4), (2, 8, 8, 4), {"causal": True, "window": 50}),
        (Strategy(context=2, data=2), (3, 24, 8, 2), {"causal": True}),  # rows are not cut
        (Strategy(context=2, tensor=4), (2, 24, 8, 2), {"causal": True}),  # nor heads
    ],
    ids=["odd degree", "one position each", "window of all", "odd rows", "few heads"],
)
def test_corners_are_the_attention_of_one_device(attention, strategy, shape, options):
    arguments = arrays(*shape)
    expected = jax.jit(with_gradients(attention, **options))(*arguments)
    _, found = under(strategy, with_gradients(attention, **options), *arguments)
    assert_close(found, expected)


@pytest.mark.slow
@BOTH
def test_it_is_itself_inside_other_transformations(attention):
    arguments = arrays(4, 16, 4, 2)
    one = functools.partial(attention, causal=True)
    expected = jax.jit(with_gradients(one))(*arguments)

    def by_sample(*arguments, segments=None):
        sample = lambda *x: one(*(y[None] for y in x))[0]  # noqa: E731
        return jax.vmap(sample, spmd_axis_name="data")(*arguments)

    strategy = Strategy(data=2, context=2)
    compiled, found = under(strategy, with_gradients(by_sample), *arguments)
    assert_close(found, expected)
    assert "all-gather" not in collectives(text_of(compiled))

    def kept(*arguments, segments=None):
        return jax.checkpoint(one)(*arguments)

    assert_close(under(strategy, with_gradients(kept), *arguments)[1], expected)

    def of_replicas(*arguments):
        rows = (P("data"),) * 3
        both = jax.shard_map(
            lambda *x: with_gradients(one)(*x)[1:],
            in_specs=rows,
            out_specs=rows,
            axis_names={"data"},
            check_vma=False,
        )
        return both(*arguments)

    # The loss of `with_gradients` tells the rows of a replica apart, not those of all.
    halves = [jax.jit(with_gradients(one))(*(x[i : i + 2] for x in arguments)) for i in (0, 2)]
    alone = [np.concatenate(parts) for parts in zip(*(half[1:] for half in halves), strict=True)]
    assert_close(under(strategy, of_replicas, *arguments)[1], alone)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 3}])
def test_second_derivatives_are_those_of_one_device(attention, options):
    arguments = arrays(1, 8, 2, 2, head=4)
    model = functools.partial(attention, **options)

    def second(*arguments):
        def first(*arguments):
            gradients = with_gradients(model)(*arguments)[1:]
            return sum(jnp.sum(jnp.cos(x) * x) for x in gradients)

        return jax.grad(first, argnums=(0, 1, 2))(*arguments)

    found = under(Strategy(context=2), second, *arguments)[1]
    assert_close(found, jax.jit(second)(*arguments))


@BOTH
def test_a_learned_scale_has_its_gradient(attention):
    query, key, value = arrays(2, 16, 4, 2)

    def loss(scale, *arguments):
        return jnp.sum(jnp.sin(attention(*arguments, causal=True, scale=scale)))

    expected = jax.jit(jax.grad(loss))(0.3, query, key, value)
    layout = Strategy(context=4).on(jax.devices()[:4])
    model = in_mesh(jax.grad(loss), layout.mesh.abstract_mesh, Strategy(context=4))
    whole = layout.sharding(P())
    found = jax.jit(model, in_shardings=(whole,) * 4)(0.3, query, key, value)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@BOTH
@pytest.mark.parametrize("degree", [1, 4])
def test_arguments_that_do_not_fit_together_are_refused(attention, degree):
    query, key, value = arrays(2, 48, 8, 4)
    layout = Strategy(context=degree).on(jax.devices()[:degree])

    def refused(*arguments, **options) -> str:
        model = functools.partial(attention, **options)
        with pytest.raises(ValueError) as error:
            jax.eval_shape(
                in_mesh(model, layout.mesh.abstract_mesh, Strategy(context=degree)), *arguments
            )
        return str(error.value)

    assert "divides heads" in refused(query[:, :, :6], key, value)
    assert "sees itself" in refused(query, key, value, window=3)
    assert "one type" in refused(query, key.astype(jnp.bfloat16), value.astype(jnp.bfloat16))
    assert "one type" in refused(query, key, value.astype(jnp.bfloat16))


def test_where_context_is_manual_or_explicit_it_says_so():
    arguments = arrays(2, 16, 4, 4)
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    model = functools.partial(ring_attention, causal=True)
    positions = (P(None, "context"),) * 3
    inside = jax.shard_map(model, mesh=mesh, in_specs=positions, out_specs=positions[0])
    with pytest.raises(ValueError, match="inside a shard_map over 'context'"):
        jax.eval_shape(inside, *arguments)
    explicit = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(explicit.abstract_mesh):
        with pytest.raises(ValueError, match=r"AxisType\.Auto"):
            jax.eval_shape(model, *arguments)


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"key": (1, 48, 4, 8), "value": (1, 48, 4, 8)}, "one batch"),
        ({"key": (2, 48, 4, 16), "value": (2, 48, 4, 16)}, "one batch"),
        ({"value": (2, 48, 2, 8)}, "one batch"),
        ({"query": (2, 48, 6, 8)}, "divides heads"),
        ({"query": (48, 8, 8)}, "must be"),
        ({"segments": (48,)}, "segments must be"),
        ({"segments": (2, 24)}, "segments must be"),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(changed, said):
    shapes = {"query": (2, 48, 8, 8), "key": (2, 48, 4, 8), "value": (2, 48, 4, 8)}
    found = {name: jnp.zeros(shape) for name, shape in (shapes | changed).items()}
    segments = found.pop("segments", None)
    segments = None if segments is None else segments.astype(jnp.int32)
    with pytest.raises(ValueError, match=said):
        _checked(**found, segments=segments, causal=True, window=None, degree=4)
    with pytest.raises(ValueError, match="segments must be integers"):
        numbers = jnp.zeros((2, 48))
        whole = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        _checked(**whole, segments=numbers, causal=True, window=None, degree=4)
