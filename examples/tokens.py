"""A byte-pair tokenizer in a page, and the standard library as windows of its tokens.

Sennrich et al. 2016, on bytes: the most frequent pair of neighbours becomes a token, again and again. Pairs
never cross the border of a word, so text is counted and encoded word by word.
"""

import collections
import functools
import re
from collections.abc import Iterable, Sequence

import corpora
import numpy as np

WORD = re.compile(rb" ?\w+|\n *| +|[^\w\s]+|\s")


class Tokenizer:
    """Converts bytes to token numbers and back; the first 256 tokens are the bytes themselves."""

    def __init__(self, merges: Sequence[tuple[int, int]]):
        self.rank = {pair: 256 + i for i, pair in enumerate(merges)}
        self.bytes_of = [bytes([i]) for i in range(256)]
        for first, second in merges:
            self.bytes_of.append(self.bytes_of[first] + self.bytes_of[second])
        self._encode = functools.cache(self._encoded)

    def __len__(self):
        return len(self.bytes_of)

    def encode(self, text: bytes) -> list[int]:
        return [token for word in WORD.findall(text) for token in self._encode(word)]

    def decode(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.bytes_of[int(token)] for token in tokens)

    def _encoded(self, word: bytes) -> tuple[int, ...]:
        tokens = list(word)
        while len(tokens) > 1:
            pairs = list(zip(tokens, tokens[1:], strict=False))
            pair = min(pairs, key=lambda p: self.rank.get(p, len(self) + 1))
            if pair not in self.rank:
                break
            tokens = merged(tokens, pair, self.rank[pair])
        return tuple(tokens)


def merged(tokens: Sequence[int], pair: tuple[int, int], token: int) -> list[int]:
    """Return `tokens` with `token` in place of every occurrence of `pair`."""
    found: list[int] = []
    at = 0
    while at < len(tokens):
        if at + 1 < len(tokens) and (tokens[at], tokens[at + 1]) == pair:
            found.append(token)
            at += 2
        else:
            found.append(tokens[at])
            at += 1
    return found


def trained(text: bytes, num_merges: int, *, num_words: int = 8000) -> Tokenizer:
    """Return the tokenizer of a text, made from its most frequent words."""
    counts = collections.Counter(WORD.findall(text)).most_common(num_words)
    words = [list(word) for word, _ in counts]
    totals: collections.Counter[tuple[int, int]] = collections.Counter()
    where: dict[tuple[int, int], set[int]] = collections.defaultdict(set)

    def count(i: int, sign: int) -> None:
        for pair in zip(words[i], words[i][1:], strict=False):
            totals[pair] += sign * counts[i][1]
            where[pair].add(i)

    for i in range(len(words)):
        count(i, 1)
    merges: list[tuple[int, int]] = []
    for token in range(256, 256 + num_merges):
        # Ties go to the first pair in order, so that the result is always the same.
        pair = max(totals, key=lambda p: (totals[p], -p[0], -p[1]))
        if totals[pair] < 2:
            break
        merges.append(pair)
        for i in where.pop(pair):
            count(i, -1)
            words[i] = merged(words[i], pair, token)
            count(i, 1)
        totals.pop(pair, None)
    return Tokenizer(merges)


def library(*, folder: str | None, without: str | None, most_bytes: int) -> dict[bool, bytes]:
    """Return source text by whether it is held out (a twentieth of the files); filter by folder."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in corpora.standard_library(tests=False):
        inside = name.partition("/")[0]
        if inside != without and folder in (None, inside):
            parts[corpora.is_held_out(name, one_in=20)].append(path.read_bytes())
    return {held_out: b"".join(texts)[:most_bytes] for held_out, texts in parts.items()}


def windows(tokenizer: Tokenizer, text: bytes, length: int) -> dict[str, np.ndarray]:
    """Return windows `int32 [windows, length + 1]` of a text, and their bytes after the first token.

    Windows overlap by one token: the last token of a window is the first of the next.
    """
    tokens = np.asarray(tokenizer.encode(text), np.int32)
    sizes = np.asarray([len(b) for b in tokenizer.bytes_of], np.int32)
    count = (len(tokens) - 1) // length
    places = np.arange(count)[:, None] * length + np.arange(length + 1)[None]
    found = tokens[places]
    return {"tokens": found, "num_bytes": sizes[found[:, 1:]].sum(axis=1).astype(np.float32)}
