"""Splitting by length: every document once, whole, and no other few lengths would waste less."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxgoodput as jg
from jaxgoodput.data.lengths import (
    PackedRows,
    best_lengths,
    micro_batches,
    packed,
    padded,
    rows_per_replica,
    share_rows,
    split_by_length,
)

FIELDS = ("tokens", "segments", "positions")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def positions(document_lengths, lengths):
    """What is computed when every document is padded to the shortest length that holds it."""
    return sum(min(n for n in lengths if n >= size) for size in document_lengths)


@given(LENGTHS, st.integers(1, 4), st.sampled_from([1, 4, 7]))
def test_no_other_lengths_waste_less(document_lengths, num_groups, multiple):
    found = best_lengths(document_lengths, num_groups, multiple_of=multiple)
    assert list(found) == sorted(set(found)) and len(found) <= num_groups
    assert all(n % multiple == 0 for n in found)
    possible = sorted({-(-n // multiple) * multiple for n in document_lengths})
    assert found[-1] == possible[-1]
    others = [
        (*others, possible[-1])
        for count in range(min(num_groups, len(possible)))
        for others in itertools.combinations(possible[:-1], count)
    ]
    least = min(positions(document_lengths, lengths) for lengths in others)
    assert positions(document_lengths, found) == least


def test_enough_groups_leave_no_padding():
    assert best_lengths([5, 2, 9, 5], 10) == (2, 5, 9)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 5))
def test_every_document_is_in_one_row_and_whole(document_lengths, num_groups, num_rows):
    documents = [np.arange(1, n + 1, dtype=np.int16) + i for i, n in enumerate(document_lengths)]
    lengths = best_lengths(document_lengths, num_groups, multiple_of=3)
    groups = split_by_length(document_lengths, lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(documents)))
    read = {}
    for shorter, length, group in zip((0, *lengths), lengths, groups, strict=False):
        batches = micro_batches([documents[i] for i in group], length=length, num_rows=num_rows)
        assert len(batches) == -(-len(group) // num_rows)
        rows = []
        for batch in batches:
            assert batch.tokens.shape == (num_rows, length) and batch.tokens.dtype == np.int16
            assert np.array_equal(batch.mask > 0, batch.num_tokens > 0)
            behind = np.arange(length)[None] >= batch.num_tokens[:, None]
            assert not batch.tokens[behind].any()
            rows += [r[:n] for r, n in zip(batch.tokens, batch.num_tokens, strict=True) if n]
        assert all(shorter < len(row) <= length for row in rows)
        read.update(zip(group.tolist(), rows, strict=True))
    for i, document in enumerate(documents):
        np.testing.assert_array_equal(read[i], document)


@given(st.lists(st.integers(0, 50), min_size=1), st.sampled_from([1, 2, 8]), st.integers(1, 9))
def test_a_larger_micro_batch_never_computes_many_more_rows(counts, num_replicas, largest):
    def computed(size):
        return sum(-(-n // (num_replicas * size)) * num_replicas * size for n in counts)

    size = rows_per_replica(counts, num_replicas, largest=largest, tolerance=0.25)
    least = min(computed(n) for n in range(1, largest + 1))
    assert computed(size) <= 1.25 * least
    assert all(computed(n) > 1.25 * least for n in range(size + 1, largest + 1))


def test_what_cannot_be_split_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match="document 1 has 9 tokens.*Truncate documents"):
        split_by_length([3, 9], (4, 8))
    with pytest.raises(ValueError, match=r"must ascend; got \(8, 4\)"):
        split_by_length([3], (8, 4))
    with pytest.raises(ValueError, match="at least 1; got 0"):
        best_lengths([3], 0)
    with pytest.raises(ValueError, match="at least 1 token; got none"):
        best_lengths([], 2)
    with pytest.raises(ValueError, match="at least 1; got 8 and 0"):
        rows_per_replica([3], 8, largest=0)
    documents = [np.ones(3, np.uint8)] * 3
    with pytest.raises(ValueError, match="2 rows hold 1 to 2 documents; got 3"):
        padded(documents, length=4, num_rows=2)
    with pytest.raises(ValueError, match="document 0 has 3 tokens, but its row holds 2"):
        padded(documents, length=2, num_rows=4)


@given(LENGTHS, st.integers(40, 60))
def test_every_document_is_in_one_row_which_holds_it(document_lengths, length):
    rows = share_rows(document_lengths, length)
    assert sorted(i for row in rows for i in row.tolist()) == list(range(len(document_lengths)))
    assert all(sum(document_lengths[i] for i in row) <= length for row in rows)
    # No two rows could be one.
    full = sorted(sum(document_lengths[i] for i in row) for row in rows)
    assert len(full) < 2 or full[0] + full[1] > length


def fewest_rows(sizes, length):
    """By trying every way, the longest document first."""

    def best(left, rooms, most):
        if not left:
            return len(rooms)
        if len(rooms) >= most:
            return most
        for i, room in enumerate(rooms):
            if left[0] <= room and room not in rooms[:i]:
                others = [*rooms[:i], room - left[0], *rooms[i + 1 :]]
                most = min(most, best(left[1:], others, most))
        return min(most, best(left[1:], [*rooms, length - left[0]], most))

    return best(sorted(sizes, reverse=True), [], len(sizes))


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 40))
def test_rows_are_few(document_lengths, length):
    assert (
        len(share_rows(document_lengths, length))
        <= 11 / 9 * fewest_rows(document_lengths, length) + 1
    )


@given(LENGTHS, st.integers(40, 60))
def test_packed_rows_hold_each_document_whole(document_lengths, length):
    documents = [np.arange(1, n + 1) + 100 * i for i, n in enumerate(document_lengths)]
    rows = packed(documents, length=length)
    found = []
    for tokens, segments, positions in zip(rows.tokens, rows.segments, rows.positions, strict=True):
        for number in range(1, segments.max() + 1):
            its = np.flatnonzero(segments == number)
            assert (np.diff(its) == 1).all() and (positions[its] == np.arange(len(its))).all()
            found.append(tuple(tokens[its].tolist()))
        assert not tokens[segments == 0].any()
    assert sorted(found) == sorted(tuple(d.tolist()) for d in documents)
    assert rows.density == sum(document_lengths) / rows.tokens.size
    targets, weights = rows.next_tokens()
    follows = weights > 0
    assert weights.sum() == sum(document_lengths) - len(documents)
    assert (targets[follows] == rows.tokens[follows] + 1).all()


@pytest.mark.parametrize(("sizes", "wrong"), [([3, 0], 1), ([3, 11, 2], 1)])
def test_what_no_row_holds_is_refused(sizes, wrong):
    with pytest.raises(ValueError, match=f"document {wrong} has"):
        share_rows(sizes, 10)
    with pytest.raises(ValueError, match="at least one document"):
        packed([], length=10)
    with pytest.raises(TypeError):
        share_rows([2.9, 2.9], 4)  # type: ignore


def test_tokens_of_every_document_fit_into_the_rows():
    documents = [np.array([1, 2], np.uint8), np.array([300, 70000], np.int32)]
    assert packed(documents, length=4).tokens.tolist() == [[1, 2, 300, 70000]]
    assert padded(documents, length=2, num_rows=2).tokens.tolist() == [[1, 2], [300, 70000]]


VOCAB, WIDTH = 32, 16


def of_decoder(params, tokens, segments, positions):
    """Logits of a small decoder with two heads."""
    x = params["tokens"][tokens] + params["positions"][positions]
    query, key, value = (
        (x @ params[n]).reshape(*x.shape[:2], 2, -1) for n in ("query", "key", "value")
    )
    mixed = jg.ring_attention(query, key, value, causal=True, segments=segments)
    x = x + mixed.reshape(x.shape)
    return (x + jnp.tanh(x @ params["mlp"])) @ params["tokens"].T


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(2, 24), min_size=1, max_size=9), st.integers(0, 1000))
def test_the_loss_per_token_and_its_gradient_are_those_of_padded_rows(sizes, seed):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, VOCAB, n) for n in sizes]
    shapes = {"tokens": (VOCAB, WIDTH), "positions": (24, WIDTH)}
    shapes |= {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "mlp")}
    params = {k: rng.normal(size=s).astype(np.float32) / 4 for k, s in shapes.items()}

    def loss(params, rows):
        targets, weights = rows.next_tokens()
        logits = of_decoder(params, rows.tokens, rows.segments, rows.positions)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return (losses * weights).sum() / weights.sum()

    alone = packed(documents, length=24)
    one_each = [packed([d], length=24) for d in documents]  # padded
    each = PackedRows(*(np.concatenate([getattr(r, f) for r in one_each]) for f in FIELDS))
    found, expected = (jax.value_and_grad(loss)(params, rows) for rows in (alone, each))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
