"""YAML, written without a library: one line per field, texts in quotes."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_PLAIN_KEY = re.compile("[A-Za-z][A-Za-z0-9-]*")
_OTHER_VALUES = frozenset("y n yes no on off true false null".split())  # what YAML reads as no text
_BEYOND_16_BITS = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return a value as YAML, with one line per field and quoted texts.

    >>> to_yaml({"a": [1, {"b": "x"}]})
    'a:\\n- 1\\n- b: "x"\\n'
    """
    return "".join(f"{line}\n" for line in _lines(value))


def documents(values: Iterable[Mapping[str, Any]]) -> str:
    """Return several values as one YAML text, with a line `---` between them."""
    return "---\n".join(map(to_yaml, values))


def _lines(value: Any) -> list[str]:
    found = []
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            is_plain = _PLAIN_KEY.fullmatch(key) and key.lower() not in _OTHER_VALUES
            name = key if is_plain else _scalar(key)
            inner = _lines(item)
            if isinstance(item, Mapping | list) and item:
                indent = "  " if isinstance(item, Mapping) else ""
                found += [f"{name}:", *(indent + line for line in inner)]
            else:
                found.append(f"{name}: {inner[0]}")
        return found
    if isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        return found
    return [_scalar(value)]


def _scalar(value: Any) -> str:
    """Return a value as JSON, which is YAML, but for characters that JSON writes as two."""

    def joined(found: "re.Match[str]") -> str:
        pair = b"".join(int(half, 16).to_bytes(2, "big") for half in found.groups())
        return f"\\U{ord(pair.decode('utf-16-be')):08x}"

    return _BEYOND_16_BITS.sub(joined, json.dumps(value))
