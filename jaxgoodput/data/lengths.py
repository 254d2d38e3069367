"""Documents of very different lengths, split so that little of what is computed is padding.

A batch of documents is split into groups by length, and each group is padded to a length of its own.
A few lengths remove most of the padding that a single one needs, and each length is a shape, which is
compiled once; `best_lengths` finds the few that waste least. What a document's values mean is not known
here: whoever reads the rows leaves out what lies behind a document's end (`num_tokens`) and rows that
hold no document (`mask`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Integer


@dataclass(frozen=True)
class PaddedRows:
    """Documents as rows of one length; behind a document's end, and in rows without one, zeros."""

    tokens: Integer[np.ndarray, "rows length"]
    """Zeros where there is no document."""
    num_tokens: Int[np.ndarray, " rows"]
    """Of the document in each row; 0 where there is none."""
    mask: Float[np.ndarray, " rows"]
    """1 where there is a document."""


def best_lengths(
    document_lengths: Sequence[int] | Int[np.ndarray, " documents"],
    num_groups: int,
    *,
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """The lengths, ascending and at most `num_groups`, to which padding documents adds least.

    Every document is padded to the shortest length that holds it. Lengths are multiples of
    `multiple_of`; the last one holds the longest document. Costs (distinct lengths)^2 * num_groups.

    Raises ValueError for no documents, and for numbers below 1.

    >>> best_lengths([3, 3, 4, 30, 100], 2)
    (4, 100)
    >>> best_lengths([3, 3, 4, 30, 100], 3, multiple_of=8)
    (8, 32, 104)
    """
    if num_groups < 1 or multiple_of < 1:
        raise ValueError(
            f"num_groups and multiple_of must be at least 1; got {num_groups} and {multiple_of}. One "
            "group pads every document to the longest."
        )
    lengths = np.asarray(document_lengths, np.int64)
    if not len(lengths) or lengths.min() < 1:
        got = "none" if not len(lengths) else f"one of length {lengths.min()}"
        raise ValueError(f"lengths are found from documents of at least 1 token; got {got}.")
    rounded = -(-lengths // multiple_of) * multiple_of
    distinct, counts = np.unique(rounded, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])  # documents shorter than distinct[i]
    # cost[j]: positions computed for the j shortest distinct lengths, in as many groups as looked at.
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
    """The indices of the documents of each group, in their order; group i is padded to lengths[i].

    Raises ValueError where `lengths` do not ascend or a document is longer than the last.

    >>> [group.tolist() for group in split_by_length([5, 40, 8, 33], (8, 64))]
    [[0, 2], [1, 3]]
    """
    if list(lengths) != sorted(set(lengths)) or not lengths:
        raise ValueError(
            f"lengths must ascend; got {tuple(lengths)}. Sort them, and leave out repetitions."
        )
    found = np.asarray(document_lengths, np.int64)
    if len(found) and found.max() > lengths[-1]:
        raise ValueError(
            f"document {int(found.argmax())} has {found.max()} tokens, and the longest of lengths is "
            f"{lengths[-1]}. Cut documents off there, or raise it."
        )
    group = np.searchsorted(np.asarray(lengths), found, side="left")
    return tuple(np.flatnonzero(group == i) for i in range(len(lengths)))


def rows_per_replica(
    counts: Sequence[int], num_replicas: int, *, largest: int, tolerance: float = 0.1
) -> int:
    """The largest micro-batch size, up to `largest`, that computes few rows without a document.

    `counts` are the documents of a group in one batch after another. Few: at most `tolerance` more rows
    in all than with the size that computes fewest. Larger sizes need fewer calls.

    Raises ValueError for `num_replicas` or `largest` below 1.

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
    """At least one document as the first of `num_rows` rows of `length` tokens.

    Raises ValueError where there are none or too many, and where one is longer than `length`.
    """
    if not 0 < len(documents) <= num_rows:
        raise ValueError(
            f"{num_rows} rows hold 1 to {num_rows} documents; got {len(documents)}. Use micro_batches "
            "for any number of them."
        )
    sizes = np.zeros(num_rows, np.int32)
    sizes[: len(documents)] = [len(document) for document in documents]
    if sizes.max() > length:
        raise ValueError(
            f"document {int(sizes.argmax())} has {sizes.max()} tokens and its row {length}. Cut it off, "
            "or put it into a group of longer rows (split_by_length)."
        )
    tokens = np.zeros((num_rows, length), documents[0].dtype)
    for row, document in zip(tokens, documents, strict=False):
        row[: len(document)] = document
    mask = (np.arange(num_rows) < len(documents)).astype(np.float32)
    return PaddedRows(tokens=tokens, num_tokens=sizes, mask=mask)


def micro_batches(
    documents: Sequence[Integer[np.ndarray, " _"]], *, length: int, num_rows: int
) -> list[PaddedRows]:
    """All documents in order, `num_rows` at a time; only the last has rows without a document."""
    starts = range(0, len(documents), num_rows)
    return [padded(documents[i : i + num_rows], length=length, num_rows=num_rows) for i in starts]
