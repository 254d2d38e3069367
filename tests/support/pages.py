"""The code blocks of README and docs/, with what their comments say about running them.

A comment right before a block says why it is not run: `<!-- not run: a GPU is needed -->`. One that begins
with the word `setup` or `then` on its first line holds Python that a reader need not see, run in its place.
`<!-- nightly: reason -->` anywhere puts the whole page into the nightly tests.
"""

import dataclasses
import json
import os
import pathlib
import re
import sys
import traceback
import warnings
from typing import Literal

TOP = pathlib.Path(__file__).resolve().parents[2]
# The diary of what was tried has no blocks that anybody is to run, and says so itself.
PAGES = sorted([TOP / "README.md", TOP / "CONTRIBUTING.md", *(TOP / "docs").rglob("*.md")])


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, or the Python of a comment."""

    page: pathlib.Path
    line: int
    """Of the first line of its text, from 1."""
    language: str
    """As written after the fence; "python" for comments."""
    text: str
    why_not_run: str | None
    kind: Literal["shown", "setup", "then"]

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        return f"{self.page.relative_to(TOP)}:{self.line}"


MARK = "page: "
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<language>[^\n`]*)$")


def blocks(page: pathlib.Path) -> list[Block]:
    """Of one page, from top to bottom. Raises ValueError where a fence or comment does not end."""
    lines = page.read_text().splitlines()
    found: list[Block] = []
    reason: str | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("<!--"):
            end = _end(lines, at, "-->", page)
            comment = "\n".join(lines[at : end + 1])[4:].rpartition("-->")[0].strip()
            word, _, rest = comment.partition("\n")
            if word in ("setup", "then"):
                found.append(Block(page, at + 2, "python", rest + "\n", None, word))
            elif comment.startswith("not run:"):
                reason = comment.removeprefix("not run:").strip()
            at = end + 1
        elif fence := FENCE.match(line):
            closing = fence["indent"] + fence["fence"]
            end = _end(lines, at + 1, closing, page, whole=True)
            inner = [x.removeprefix(fence["indent"]) for x in lines[at + 1 : end]]
            text = "\n".join(inner) + "\n"
            language = fence["language"].strip()
            found.append(Block(page, at + 2, language, text, reason, "shown"))
            reason, at = None, end + 1
        else:
            reason = reason if not line.strip() else None
            at += 1
    return found


def nightly(page: pathlib.Path) -> bool:
    """Whether its Python is run by the nightly tests only."""
    return re.search(r"^<!-- nightly: .+ -->$", page.read_text(), re.MULTILINE) is not None


def run(page: pathlib.Path, folder: pathlib.Path) -> None:
    """The Python of a page, from top to bottom, in one namespace; `folder` also stands for /tmp."""
    space = {"__name__": "page"}
    for block in blocks(page):
        if block.language == "python" and block.why_not_run is None:
            text = block.text.replace("/tmp/", f"{folder}/")
            text = "\n" * (block.line - 1) + text  # a traceback names the page's own line
            exec(compile(text, str(page), "exec"), space)


def main(folder: str, *names: str) -> int:
    """Run pages one after another in this process, and say of each what came of it, as a line of JSON."""
    failed = 0
    for name in names:
        own = pathlib.Path(folder, name.replace("/", "-"))
        own.mkdir()
        os.chdir(own)
        warnings.simplefilter("error")
        try:
            run(TOP / name, own)
            error = None
        except BaseException:  # a page may stop with SystemExit, which is no end of the others
            error, failed = traceback.format_exc(), failed + 1
        print(MARK + json.dumps({"page": name, "error": error}), flush=True)
    return failed > 0


def _end(lines, start, closing, page, whole=False):
    for at in range(start, len(lines)):
        if lines[at] == closing if whole else closing in lines[at]:
            return at
    raise ValueError(f"{page}:{start + 1}: no line with {closing!r} follows")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
