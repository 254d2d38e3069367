"""Splitting by length: every document once, whole, and no other few lengths would waste less."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.data.lengths import (
    best_lengths,
    micro_batches,
    padded,
    rows_per_replica,
    split_by_length,
)

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
