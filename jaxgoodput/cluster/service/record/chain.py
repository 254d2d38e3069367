"""The chain of the journal: each row covers the row before it, so that a missing row is noticed.

A row has two checksums. `total` covers its own contents and never changes. `link` joins it to the row before
it. If an event replaces an earlier one, that row is deleted, and the row after it is linked to the row that
is now before it. So the rows that are left always form one chain, from the first to the head.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxgoodput.cluster.service.record.events import JournalEntry, key_of, to_text


@dataclass(frozen=True)
class ChainHead:
    """The end of a chain: its last row."""

    position: int
    """The position of the last event, which is the number of events that were ever written."""
    total: str | None
    """The checksum of that row's contents; None if it is not known."""


EMPTY = ChainHead(0, "")
"""The head of a chain without rows."""


class JournalRow(NamedTuple):
    """A row as it lies in the table. If the file is damaged, a column may hold a value of any type."""

    seq: int
    at_s: Any
    wall: Any
    kind: Any
    body: Any
    key: Any
    """The key of an event that replaces earlier events of the same key, or None."""
    after: Any
    """The position of the row before this one."""
    total: Any
    """The checksum of the contents."""
    link: Any
    """The checksum of `total`, `key` and the row before this one."""

    @property
    def head(self) -> ChainHead:
        """The head of a chain that ends with this row."""
        return ChainHead(self.seq, self.total)


def content_sum(seq: int, at_s: float, wall: float, kind: str, body: str) -> str:
    """Return the checksum of a row's contents."""
    return _sum(f"{seq} {at_s!r} {wall!r} {kind} {body}")


def link_sum(seq: int, total: str, key: str | None, before: ChainHead) -> str:
    """Return the checksum that joins a row with the contents `total` to the row before it."""
    return _sum(f"{seq} {total} {key!r} {before.position} {before.total}")


def row_of(entry: JournalEntry, before: ChainHead) -> JournalRow:
    """Return the row of an event which continues the chain that ends with `before`."""
    kind, body, key = type(entry.event).__name__, to_text(entry.event), key_of(entry.event)
    total = content_sum(entry.seq, entry.at_s, entry.wall, kind, body)
    link = link_sum(entry.seq, total, key, before)
    return JournalRow(
        entry.seq, entry.at_s, entry.wall, kind, body, key, before.position, total, link
    )


def chained(entries: Iterable[JournalEntry]) -> Iterator[JournalRow]:
    """Yield the rows of events, as a chain from its beginning."""
    head = EMPTY
    for entry in entries:
        row = row_of(entry, head)
        head = row.head
        yield row


def fault(row: JournalRow, before: ChainHead, *, is_first: bool = False) -> tuple[int, str] | None:
    """Return the position from which on a chain is broken, and why; None if `row` continues it soundly.

    `is_first` is for a reader that goes on after `before`, which may have been replaced since it was read.
    """
    if row.total != content_sum(row.seq, row.at_s, row.wall, row.kind, row.body):
        is_next = row.after == before.position < row.seq
        position = (
            row.seq if is_next else before.position + 1
        )  # its position may be what is damaged
        return position, "its checksum does not match"
    after = row.after if isinstance(row.after, int) else -1
    if is_first and 0 <= after < before.position:
        return None
    if after != before.position:
        return before.position + 1, (
            f"the row at position {row.seq} does not follow the row at position {before.position}, so that "
            "rows between them are missing or its link is damaged"
        )
    if before.total is not None and row.link != link_sum(row.seq, row.total, row.key, before):
        return row.seq, "its link to the row before does not match"
    return None


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:24]
