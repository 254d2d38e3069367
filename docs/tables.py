"""Draws the tables of README.md and docs/ from docs/measured/*.json.

    python docs/tables.py            # rewrites every block between its markers
    python docs/tables.py --check    # exit code 1 if a block differs from the data

A block begins with `<!-- measured: FILE/TABLE -->`, or `<!-- measured: FILE -->` for all tables of a file
with their titles and notes, or `<!-- measured: * -->` for all files that the page does not name; it ends with
`<!-- /measured -->`. `python benchmarks/record.py NAME` writes the files.
"""

import argparse
import json
import pathlib
import re
import sys
from typing import Any

TOP = pathlib.Path(__file__).resolve().parents[1]
MEASURED = TOP / "docs" / "measured"
BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- /measured -->)", re.DOTALL)


def pages() -> list[pathlib.Path]:
    """The files that may hold such blocks."""
    return [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]


def load(name: str) -> dict[str, Any]:
    """The results of one benchmark. Raises FileNotFoundError if nothing was recorded under this name."""
    return json.loads((MEASURED / f"{name}.json").read_text())


def drawn(name: str, others: set[str]) -> str:
    """Markdown of a block; `others` are the names that `*` leaves out."""
    if name == "*":
        names = sorted(path.stem for path in MEASURED.glob("*.json"))
        return "\n".join(whole(each) for each in names if each not in others)
    file, _, table = name.partition("/")
    if not table:
        return whole(file)
    found = {each["name"]: each for each in load(file)["tables"]}
    return grid(found[table])


def whole(name: str) -> str:
    """All tables of a file under its title, with what they were measured by and on."""
    found = load(name)
    text = f"## {found['title']}\n\n"
    if found["command"]:
        text += f"`{found['command']}`. "
    text += f"{found['machine']}; revision {found['revision']}.\n"
    for table in found["tables"]:
        title = f"\n*{table['title']}*\n" if table["title"] else ""
        text += f"{title}\n{grid(table)}"
    if found["notes"]:
        text += "\n" + "\n".join(f"* {note}" for note in found["notes"]) + "\n"
    return text


def grid(table: dict[str, Any]) -> str:
    """A table in markdown, or a text as a block."""
    if "text" in table:
        return "```text\n" + "\n".join(table["text"]) + "\n```\n"
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["rows"]]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows
    )


def redrawn(text: str) -> str:
    """A page with its blocks drawn from the data."""
    others = {name.partition("/")[0] for _, name, _ in BLOCK.findall(text)}
    return BLOCK.sub(lambda found: found[1] + drawn(found[2], others) + found[3], text)


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page differs"
    )
    options = parser.parse_args()
    differing = []
    for page in pages():
        text = page.read_text()
        if (new := redrawn(text)) != text:
            differing.append(str(page.relative_to(TOP)))
            if not options.check:
                page.write_text(new)
    if differing:
        print(
            ("differ from docs/measured: " if options.check else "drawn anew: ")
            + ", ".join(differing)
        )
    return 1 if differing and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
