"""Every message that the troubleshooting page quotes is still one of the code's."""

import ast
import functools
import re
from typing import TypeGuard

import pages
import pytest

PAGE = pages.TOP / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^### `([^`]+)`$", PAGE.read_text(), re.MULTILINE)
GAP = "…"


@functools.cache
def messages() -> list[str]:
    """All strings of the package, with a gap for every value that is put in."""
    found = []
    for path in sorted((pages.TOP / "jaxgoodput").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(x.value) if is_text(x) else GAP for x in node.values))
            elif is_text(node):
                found.append(re.sub(r"%[sdrg]", GAP, str(node.value)))
    return found


def is_text(node) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_said(quoted: str) -> bool:
    """Whether the parts between gaps come in this order in one string, with values between them."""
    parts = [part.strip(" .") for part in quoted.split(GAP)]
    pattern = re.compile(".*".join(re.escape(part) for part in parts if part), re.DOTALL)
    return any(pattern.search(message) for message in messages())


def test_the_page_quotes_messages():
    assert len(QUOTED) > 35
    assert len(QUOTED) == len(re.findall("^### ", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_in_the_code(quoted):
    assert max(map(len, quoted.split(GAP))) > 12, "too short to say anything"
    assert is_said(quoted), "no string of jaxgoodput/ says this any more"


def test_a_message_that_nobody_writes_is_seen():
    assert not is_said("the base batch of … samples is smaller than the moon")
    assert is_said("the base batch of … samples is larger than the data set of …")
