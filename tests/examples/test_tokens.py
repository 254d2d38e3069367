"""The tokenizer of small_gpt.py restores text, and its merges follow the definition."""

import collections
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
TEXT = b"def low(self):\n    return lower(self.low, lowest)\n\n" * 3 + b"self.newest = widest\n"


@pytest.fixture(scope="module")
def tokens():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import tokens

        yield tokens


@given(st.binary(max_size=60))
def test_any_bytes_come_back(tokens, data):
    tokenizer = tokens.trained(TEXT, 30)
    assert tokenizer.decode(tokenizer.encode(data)) == data
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2


def test_each_merge_is_of_the_most_frequent_pair_when_all_are_counted_again(tokens):
    tokenizer = tokens.trained(TEXT, 25)
    words = [list(word) for word in tokens.WORD.findall(TEXT)]
    for pair, token in tokenizer.rank.items():
        counts = collections.Counter(p for w in words for p in zip(w, w[1:], strict=False))
        assert counts[pair] == max(counts.values())
        words = [tokens.merged(word, pair, token) for word in words]
    assert [t for word in words for t in word] == tokenizer.encode(TEXT)


def test_windows_tile_the_text_and_know_its_bytes(tokens):
    tokenizer = tokens.trained(TEXT, 10)
    found = tokens.windows(tokenizer, TEXT, 8)
    assert np.array_equal(found["tokens"][:-1, -1], found["tokens"][1:, 0])
    for window, size in zip(found["tokens"], found["num_bytes"], strict=True):
        assert len(tokenizer.decode(window[1:])) == size


def test_what_lora_learns_from_is_not_what_the_gpt_learned_from(tokens):
    settings = {"most_bytes": 10**8}
    rest = tokens.library(folder=None, without="encodings", **settings)
    own = tokens.library(folder="encodings", without=None, **settings)
    assert all(len(part) > 5000 for part in (*rest.values(), *own.values()))
    marked = b"Python Character Mapping Codec"  # in nearly every table
    assert marked in own[False] and marked in own[True]
    assert not any(marked in part for part in rest.values())
