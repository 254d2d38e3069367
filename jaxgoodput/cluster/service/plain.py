"""The door for text: what users, jobs and nodes send is made plain here, once, when it arrives.

Text that its sender chose, such as a name, a label or a word of a command, is refused if it is not plain,
because a changed text would mean something else. Text that is only reported, such as the output of a job or
the reason for its end, is cleaned, because it must not be lost. So whatever shows a text may print it as it
is: it contains nothing that a terminal obeys, that is invisible, or that changes the order of letters.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxgoodput._fields.serial import field_names

T = TypeVar("T")

# Control characters of both sets, invisible ones, line separators, surrogates, and those that change the
# order of letters. The two joiners stay: some scripts cannot be written without them.
_HARMFUL = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    r"\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f\ud800-\udfff"
)
_NOT_IN_LINES = re.compile(f"[{_HARMFUL}]")
_NOT_IN_A_LINE = re.compile(f"[\t\n{_HARMFUL}]")


@dataclass(frozen=True, kw_only=True)
class TextRule:
    """What the text of a field may be, and what happens to other text: it is cleaned or refused."""

    most: int = 200
    """Most characters."""
    lines: bool = False
    """Whether line breaks and tabs are allowed."""
    is_cleaned: bool = False
    """Whether other text is cleaned; otherwise it is refused."""


# Most values of a request are of these types, which hold no text.
_WITHOUT_TEXT = frozenset((int, float, bool, type(None)))

# By type and name of a field. Text of all other fields must be one plain line of up to 200 characters.
TextRules = Mapping[tuple[type, str], TextRule]


def plain(text: str, rule: TextRule) -> str:
    r"""Return a text as a rule wants it: a `?` for each harmful character, and cut if it is too long.

    >>> plain("done\x1b[2J\nall", TextRule()), plain("x" * 9, TextRule(most=5))
    ('done?[2J all', 'xx...')
    """
    if not rule.lines:
        text = text.replace("\r\n", " ").replace("\n", " ").replace("\t", " ")
    text = _NOT_IN_LINES.sub("?", text)
    return text if len(text) <= rule.most else f"{text[: rule.most - 3]}..."


def admit(value: T, rules: TextRules, where: str = "", rule: TextRule | None = None) -> T:
    """Return a request as it may enter the service: all text in it, at any depth, is plain.

    `where` names the value in errors. Raises ValueError for text that is neither plain nor only reported.
    """
    admitted: Any = value
    if isinstance(value, str):
        admitted = _admit_text(value, where, rule or TextRule())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {}
        for name in field_names(type(value)):
            old = getattr(value, name)
            if type(old) in _WITHOUT_TEXT:
                continue
            its = rules.get((type(value), name))
            new = admit(old, rules, f"{where}.{name}".removeprefix("."), its)
            if new is not old:
                found[name] = new
        admitted = dataclasses.replace(value, **found) if found else value
    elif isinstance(value, Mapping):
        pairs = {
            admit(key, rules, f"a key of {where}", rule): admit(
                item, rules, f"{where}[{key!a}]", rule
            )
            for key, item in value.items()
        }
        admitted = value if _is_same(pairs.values(), value.values()) else pairs
    elif isinstance(value, tuple):
        if all(type(item) in _WITHOUT_TEXT for item in value):
            return admitted
        items = tuple(admit(item, rules, f"{where}[{i}]", rule) for i, item in enumerate(value))
        admitted = value if _is_same(items, value) else items
    return admitted


def _admit_text(text: str, where: str, rule: TextRule) -> str:
    if rule.is_cleaned:
        found = plain(text, rule)
        return text if found == text else found
    if len(text) > rule.most:
        raise ValueError(
            f"{where} has {len(text)} characters, but {rule.most} are the most. Give a shorter text."
        )
    harmful = (_NOT_IN_LINES if rule.lines else _NOT_IN_A_LINE).search(text)
    if harmful is not None:
        raise ValueError(
            f"{where} has the character U+{ord(harmful[0]):04X} at position {harmful.start()}. It is "
            "invisible, or a terminal would obey it. Remove it; a job can read what it needs from a file."
        )
    return text


def _is_same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
