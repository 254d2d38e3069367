"""If every batch reads a row, it learns as with optax; packed as words, it keeps its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.embedding.optimizers import Adagrad, Adam, Sgd
from jaxgoodput.embedding.rows import Field, RowLayout, padded_size

SAME = [
    (Sgd(0.3), optax.sgd(0.3)),
    (Adagrad(0.3), optax.adagrad(0.3)),
    (Adagrad(0.3, initial_accumulator_value=0.0), optax.adagrad(0.3, 0.0)),
    (Adam(0.3, b1=0.8, b2=0.99), optax.adam(0.3, b1=0.8, b2=0.99)),
]


@pytest.mark.parametrize(("rows", "tx"), SAME)
def test_rows_that_every_batch_reads_learn_as_optax_has_it(rows, tx):
    rng = np.random.default_rng(0)
    start = jnp.asarray(rng.normal(size=(20, 6)), jnp.float32)
    row = {"embedding": start}
    for field in rows.fields(6):
        row[field.name] = jnp.full((20, field.width), rows.begin()[field.name], field.dtype)
    params, state = start, tx.init(start)
    update = jax.jit(rows.update)
    for _ in range(12):
        # some elements of a gradient are zero, as if a unit were inactive
        grads = jnp.asarray(rng.normal(size=(20, 6)) * (rng.random((20, 6)) < 0.7), jnp.float32)
        row = update(row, grads, 1.0)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(row["embedding"], np.asarray(params), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [Sgd(0.3), Adagrad(0.3), Adam(0.3)])
def test_the_factor_multiplies_the_learning_rate_and_nothing_else(rows):
    row = {"embedding": jnp.ones((3, 2))}
    for field in rows.fields(2):
        row[field.name] = jnp.full((3, field.width), rows.begin()[field.name], field.dtype)
    grads = jnp.full((3, 2), 0.5)
    one, half = rows.update(row, grads, 1.0), rows.update(row, grads, 0.5)
    np.testing.assert_allclose(1 - half["embedding"], 0.5 * (1 - one["embedding"]), rtol=1e-5)
    for field in rows.fields(2):
        np.testing.assert_array_equal(half[field.name], one[field.name])


@pytest.mark.parametrize("rows", [Sgd(0.3), Adagrad(0.3), Adam(0.3, b1=0.0)])
def test_a_small_gradient_is_divided_by_the_divisor(rows):
    rng = np.random.default_rng(0)
    row = {"embedding": jnp.zeros((4, 3))}
    for field in rows.fields(3):
        row[field.name] = jnp.full((4, field.width), rows.begin()[field.name], field.dtype)
    for _ in range(400):  # so large that one more step hardly changes the state
        row = rows.update(row, jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), 1.0)
    row["embedding"] = jnp.zeros((4, 3))
    grads = jnp.full((4, 3), 1e-3)
    moved = rows.update(row, grads, 1.0)["embedding"]
    np.testing.assert_allclose(moved, -0.3 * grads / rows.divisor(row), rtol=1e-2)


def test_what_adam_will_divide_by_is_not_known_of_a_row_that_nobody_has_read():
    rows = Adam(0.3)
    row = {"embedding": jnp.zeros((2, 3))}
    for field in rows.fields(3):
        row[field.name] = jnp.full((2, field.width), rows.begin()[field.name], field.dtype)
    assert np.isinf(rows.divisor(row)).all()


KINDS = [
    [(5, "bfloat16")],
    [(3, "float32"), (1, "bfloat16"), (1, "int32")],
    [(4, "bfloat16"), (2, "float32"), (3, "bfloat16"), (2, "int32")],
]


@pytest.mark.parametrize("kinds", KINDS)
def test_words_on_the_host_and_on_the_device_are_the_same_bits(kinds):
    num_rows = 3
    layout = RowLayout(tuple(Field(f"f{i}", *kind) for i, kind in enumerate(kinds)))
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (num_rows, layout.num_words), dtype=np.uint32)
    on_host = layout.unpack_host(words)
    on_device = jax.jit(layout.unpack)(words)
    for field in layout.fields:
        assert on_host[field.name].shape == (num_rows, field.width)
        assert on_host[field.name].tobytes() == np.asarray(on_device[field.name]).tobytes()
    again = layout.pack_host(on_host, num_rows)
    np.testing.assert_array_equal(again, jax.jit(layout.pack)(on_device))
    for name, numbers in layout.unpack_host(again).items():
        assert numbers.tobytes() == on_host[name].tobytes()


def test_sizes_are_padded_by_half_at_most_and_few():
    counts = range(1, 100_000, 7)
    sizes = [padded_size(n) for n in counts]
    assert all(n <= size for n, size in zip(counts, sizes, strict=True))
    assert all(size <= 1.5 * n for n, size in zip(counts, sizes, strict=True) if n >= 64)
    assert len(set(sizes)) == 23
