"""Lines of a journal that tell whether they are whole and whether some are missing between them.

The last two fields of a line are `journal_line`, its number since the journal began, and `journal_check`, the
CRC-32 of everything before. A file that was written anew in fewer lines numbers these so that the last one
keeps its number; its first line says in `journal_from` which number the file began with. Lines without these
fields come from older versions or from others and are taken as they are.

Lines that were cut off at the end of a journal cannot be told from lines that were never written.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

NUMBER, CHECK, FROM = "journal_line", "journal_check", "journal_from"
_OWN = (NUMBER, CHECK, FROM)
REPEATED = "it is there a second time, which does not count"


def checked(record: Mapping[str, Any], number: int, stands_from: int | None = None) -> bytes:
    """Return a record as a line with its number and, in the first line of a shorter file, where that began.

    >>> checked({"step": 3}, 1)
    b'{"step": 3, "journal_line": 1, "journal_check": "67cfbfde"}\\n'
    """
    fields = {key: value for key, value in record.items() if key not in _OWN}
    told = {} if stands_from is None else {FROM: stands_from}
    text = json.dumps({**fields, **told, NUMBER: number}, allow_nan=False).encode("ascii")[:-1]
    return text + _ending(text) + b"\n"


def is_whole(raw: bytes, record: Mapping[str, Any]) -> bool:
    """Whether a line is as it was written, as far as that can be told; `record` is the object in it."""
    if NUMBER not in record and CHECK not in record:
        return True  # of an older version
    text = raw.rstrip(b"\n")
    length = len(_ending(b""))
    return number_of(record) is not None and text[-length:] == _ending(text[:-length])


def number_of(record: Mapping[str, Any]) -> int | None:
    """Return the number of a line; None if it has none."""
    number = record.get(NUMBER)
    return number if type(number) is int and number > 0 else None


def first_of(record: Mapping[str, Any]) -> int | None:
    """Return the number of the first line that a line stands for, its own or an earlier one; None: none."""
    number, first = number_of(record), record.get(FROM)
    return first if number is not None and type(first) is int else number


def _ending(text: bytes) -> bytes:
    return b', "%s": "%08x"}' % (CHECK.encode(), zlib.crc32(text))


def renumbered(records: Iterable[Mapping[str, Any]], first: int, last: int) -> Iterator[bytes]:
    """Yield the lines of a file that stands for the lines `first` to `last`, in as many lines or fewer."""
    kept = list(records)
    begin = last - len(kept) + 1
    for number, record in enumerate(kept, start=begin):
        yield checked(record, number, first if number == begin else None)


@dataclass
class LineOrder:
    """Follows the numbers of lines and finds what is missing, repeated or not in its place."""

    _last: int = 0
    _num_unreadable: int = 0
    """Lines that could not be read since the last one that could."""
    _seen: set[tuple[int, str]] = field(default_factory=set)

    def unreadable(self) -> None:
        """Note a line that cannot be read."""
        self._num_unreadable += 1

    def problem(self, record: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the place of the next line; None if nothing is."""
        number = number_of(record)
        unreadable, self._num_unreadable = self._num_unreadable, 0
        if number is None:
            return None
        one = number, str(record.get(CHECK))
        if one in self._seen:
            return REPEATED
        self._seen.add(one)
        if number <= self._last:
            return f"line {number} of the journal comes after line {self._last}"
        missing = (first_of(record) or number) - self._last - 1 - unreadable
        self._last = number
        if missing <= 0:
            return None
        return (
            f"{missing} lines before it are missing"
            if missing > 1
            else "the line before it is missing"
        )
