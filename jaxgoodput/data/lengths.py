"""Batches of documents whose lengths differ much, padded or packed so that little computation is wasted.

*Padded*: a batch of documents is divided into groups by length, and each group is padded to a length of its
own. A few lengths remove most of the padding that a single length needs. Each length is a shape, which is
compiled once; `best_lengths` finds those that waste least. This file does not know what the values of a
document mean: your loss must ignore positions behind a document's end (`num_tokens`) and rows without a
document (`mask`).

*Packed*: several documents share a row, and one shape is enough. The model must not look from one document
into another (`PackedRows.segments`), and positions count from the start of each (`PackedRows.positions`).
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Integer


@dataclass(frozen=True)
class PaddedRows:
    """Documents of tokens as rows of one length, the shorter ones padded."""

    tokens: Integer[np.ndarray, "rows length"]
    """Documents, followed by zeros."""
    num_tokens: Int[np.ndarray, " rows"]
    """Length of each row's document; 0 for a row without a document."""
    mask: Float[np.ndarray, " rows"]
    """1 for a row with a document, 0 without."""


@dataclass(frozen=True)
class PackedRows:
    """Documents of tokens in rows of one length, several to a row, padded at the end."""

    tokens: Integer[np.ndarray, "rows length"]
    """Documents one after another, followed by zeros."""
    segments: Int[np.ndarray, "rows length"]
    """Number of the document in its row, from 1; 0 behind the last. Pass it to `jg.ring_attention`."""
    positions: Int[np.ndarray, "rows length"]
    """Position in the document, from 0."""

    @property
    def density(self) -> float:
        """Share of the positions that hold a token of a document."""
        return float((self.segments > 0).mean())

    def next_tokens(
        self,
    ) -> tuple[Integer[np.ndarray, "rows length"], Float[np.ndarray, "rows length"]]:
        """Return the token that follows each position, and its weight in the loss.

        The weight is 1 inside a document, and 0 at its last token and behind the last document. Give the loss
        as `jg.Loss((losses * weights).sum(-1), weights.sum(-1))`: then every token counts the same, however
        documents share rows.
        """
        targets = np.roll(self.tokens, -1, axis=1)
        follows = (self.segments[:, 1:] == self.segments[:, :-1]) & (self.segments[:, 1:] > 0)
        weights = np.zeros(self.tokens.shape, np.float32)
        weights[:, :-1] = follows
        return targets, weights


def best_lengths(
    document_lengths: Sequence[int] | Int[np.ndarray, " documents"],
    num_groups: int,
    *,
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """Return the lengths, at most `num_groups` and ascending, to which documents are padded at least cost.

    Every document is padded to the shortest length that holds it. Lengths are multiples of `multiple_of`, and
    the last one holds the longest document. Takes time in the order of (distinct lengths)^2 * num_groups.

    Raises ValueError if there are no documents, or if a number is below 1.

    >>> best_lengths([3, 3, 4, 30, 100], 2)
    (4, 100)
    >>> best_lengths([3, 3, 4, 30, 100], 3, multiple_of=8)
    (8, 32, 104)
    """
    if num_groups < 1 or multiple_of < 1:
        raise ValueError(
            f"num_groups and multiple_of must be at least 1; got {num_groups} and {multiple_of}. With one "
            "group, every document is padded to the longest."
        )
    lengths = np.asarray(document_lengths, np.int64)
    if not len(lengths) or lengths.min() < 1:
        got = "none" if not len(lengths) else f"one of length {lengths.min()}"
        raise ValueError(f"best_lengths needs documents of at least 1 token; got {got}.")
    rounded = -(-lengths // multiple_of) * multiple_of
    distinct, counts = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])  # documents shorter than distinct[i]
    # Dynamic programming over the number of groups. cost[j]: positions that are computed for the j shortest
    # distinct lengths, with the number of groups considered so far.
    cost = np.concatenate([[0], np.full(len(distinct), np.iinfo(np.int64).max // 2)])
    starts = []
    for _ in range(min(num_groups, len(distinct))):
        # A last group of the distinct lengths i .. j-1 costs its documents times distinct[j-1].
        documents = below[None, 1:] - below[:-1, None]
        total = cost[:-1, None] + np.where(documents > 0, documents, 0) * distinct[None, :]
        total[np.tril_indices(len(distinct), -1)] = np.iinfo(np.int64).max // 2
        starts.append(total.argmin(axis=0))
        cost = np.concatenate([[0], total.min(axis=0)])
    found, end = [], len(distinct)
    for start in reversed(starts):
        if end == 0:
            break
        found.append(int(distinct[end - 1]))
        end = int(start[end - 1])
    return tuple(reversed(found))


def split_by_length(
    document_lengths: Sequence[int] | Int[np.ndarray, " documents"], lengths: Sequence[int]
) -> tuple[Int[np.ndarray, " group"], ...]:
    """Return the indices of each group's documents, in their order; group i is padded to lengths[i].

    Raises ValueError if `lengths` do not ascend, or if a document is longer than the last of them.

    >>> [group.tolist() for group in split_by_length([5, 40, 8, 33], (8, 64))]
    [[0, 2], [1, 3]]
    """
    if list(lengths) != sorted(set(lengths)) or not lengths:
        raise ValueError(
            f"lengths must ascend; got {tuple(lengths)}. Sort them, and remove duplicates."
        )
    found = np.asarray(document_lengths, np.int64)
    if len(found) and found.max() > lengths[-1]:
        raise ValueError(
            f"document {int(found.argmax())} has {found.max()} tokens, but the largest length is "
            f"{lengths[-1]}. Truncate documents to it, or raise it."
        )
    group = np.searchsorted(np.asarray(lengths), found, side="left")
    return tuple(np.flatnonzero(group == i) for i in range(len(lengths)))


def rows_per_replica(
    counts: Sequence[int], num_replicas: int, *, largest: int, tolerance: float = 0.1
) -> int:
    """Return the largest micro-batch size, up to `largest`, that computes few rows without a document.

    `counts` are the numbers of a group's documents in successive batches. "Few" means at most the share
    `tolerance` more rows in total than with the size that computes fewest. Larger sizes need fewer calls.

    Raises ValueError if `num_replicas` or `largest` is below 1.

    >>> rows_per_replica([24, 23], 8, largest=5), rows_per_replica([24, 23], 2, largest=5)
    (3, 4)
    """
    if num_replicas < 1 or largest < 1:
        raise ValueError(
            f"num_replicas and largest must be at least 1; got {num_replicas} and {largest}. A replica "
            "computes at least one row at a time."
        )
    computed = {}
    for size in range(1, largest + 1):
        rows = num_replicas * size
        computed[size] = sum(-(-count // rows) * rows for count in counts)
    most = min(computed.values()) * (1 + tolerance)
    return max(size for size, rows in computed.items() if rows <= most)


def padded(
    documents: Sequence[Integer[np.ndarray, " _"]], *, length: int, num_rows: int
) -> PaddedRows:
    """Pad documents to `length` tokens, and add rows without a document up to `num_rows`.

    Raises ValueError if there are no documents or too many, or if one is longer than `length`.
    """
    if not 0 < len(documents) <= num_rows:
        raise ValueError(
            f"{num_rows} rows hold 1 to {num_rows} documents; got {len(documents)}. Use micro_batches "
            "for any number of documents."
        )
    sizes = np.zeros(num_rows, np.int32)
    sizes[: len(documents)] = [len(document) for document in documents]
    if sizes.max() > length:
        raise ValueError(
            f"document {int(sizes.argmax())} has {sizes.max()} tokens, but its row holds {length}. Truncate "
            "it, or put it into a group of longer rows (split_by_length)."
        )
    tokens = np.zeros((num_rows, length), _type_of(documents))
    for row, document in zip(tokens, documents, strict=False):
        row[: len(document)] = document
    mask = (np.arange(num_rows) < len(documents)).astype(np.float32)
    return PaddedRows(tokens=tokens, num_tokens=sizes, mask=mask)


def micro_batches(
    documents: Sequence[Integer[np.ndarray, " _"]], *, length: int, num_rows: int
) -> list[PaddedRows]:
    """Pad all documents in order, `num_rows` at a time; only the last may have rows without a document."""
    starts = range(0, len(documents), num_rows)
    return [padded(documents[i : i + num_rows], length=length, num_rows=num_rows) for i in starts]


def share_rows(
    document_lengths: Sequence[int] | Int[np.ndarray, " documents"], length: int
) -> tuple[Int[np.ndarray, " row"], ...]:
    """Return the indices of the documents that share each row of `length` tokens, in few rows.

    Best fit, the longest documents first: at most 11/9 of the fewest rows possible, and four more (Johnson et
    al. 1974). Rows come in the order of their first documents.

    Raises ValueError if a document is empty or longer than `length`, TypeError if a length is no integer.

    >>> [row.tolist() for row in share_rows([30, 60, 40, 50, 20], 100)]
    [[0, 3, 4], [1, 2]]
    """
    sizes = np.asarray([operator.index(size) for size in document_lengths], np.int64)
    if len(sizes) and not 0 < sizes.min() <= sizes.max() <= length:
        wrong = int(np.flatnonzero((sizes < 1) | (sizes > length))[0])
        raise ValueError(
            f"document {wrong} has {sizes[wrong]} tokens, and a row holds 1 to {length}. Split it, truncate "
            "it or leave it out."
        )
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # the bit of each room that a row has
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        if large_enough := rooms >> size:
            room = size + (large_enough & -large_enough).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            rows[row].append(document)
        else:
            room, row = length, len(rows)
            rows.append([document])
        if left := room - size:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return tuple(np.array(row) for row in sorted(map(sorted, rows)))


def packed(documents: Sequence[Integer[np.ndarray, " _"]], *, length: int) -> PackedRows:
    """Return documents in rows of `length` tokens, shared as `share_rows` chooses; no document is split.

    Raises ValueError if there are no documents, or if one is empty or longer than `length`.
    """
    if not len(documents):
        raise ValueError("packed needs at least one document; got none.")
    rows = share_rows([len(document) for document in documents], length)
    tokens = np.zeros((len(rows), length), _type_of(documents))
    segments, positions = np.zeros((2, len(rows), length), np.int32)
    for row, members in enumerate(rows):
        begin = 0
        for number, document in enumerate(members.tolist(), 1):
            its = slice(begin, begin + len(documents[document]))
            tokens[row, its] = documents[document]
            segments[row, its] = number
            positions[row, its] = np.arange(len(documents[document]))
            begin = its.stop
    return PackedRows(tokens=tokens, segments=segments, positions=positions)


def _type_of(documents: Sequence[Integer[np.ndarray, " _"]]) -> np.dtype:
    """Return the type that holds the tokens of all documents."""
    return np.result_type(*{np.asarray(document).dtype for document in documents})
