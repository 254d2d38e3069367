"""Runs a benchmark and keeps what it prints as data, from which the documentation draws its tables.

    python benchmarks/record.py fit            # runs benchmarks/fit.py, writes docs/measured/fit.json
    python benchmarks/record.py tables --only large
    python benchmarks/record.py fit --as fit-2 # writes docs/measured/fit-2.json
    python docs/tables.py                                # draws README.md and docs/ anew

A table in markdown becomes columns and rows; other output becomes text. The title is the first line of the
benchmark's docstring. If the benchmark fails, nothing is written.
"""

import argparse
import ast
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

HERE = pathlib.Path(__file__).parent
MEASURED = HERE.parent / "docs" / "measured"


def parsed(output: Iterable[str]) -> list[dict[str, Any]]:
    """Tables and texts in printed lines, in order. The line above a table is its title."""
    found: list[dict[str, Any]] = []
    text: list[str] = []

    def end_text() -> None:
        if any(line.strip() for line in text):
            lines = "\n".join(text).strip("\n").splitlines()
            found.append({"name": str(len(found) + 1), "title": "", "text": lines})
        text.clear()

    rows: list[list[str]] = []
    for line in (*output, ""):
        if line.startswith("|") and line.rstrip().endswith("|"):
            if not rows:
                title = text.pop().strip(" :*") if text and text[-1].strip() else ""
                end_text()
                found.append({"name": str(len(found) + 1), "title": title})
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
            continue
        if rows:
            columns, *body = [row for row in rows if not set("".join(row)) <= set("-: ")]
            found[-1] |= {"columns": columns, "rows": body}
            rows = []
        text.append(line.rstrip("\n"))
    end_text()
    return found


def machine() -> str:
    """What the figures were measured on."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = names[0] if names else platform.machine()
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    return f"{os.cpu_count()} cores ({model}), {versions}"


def record(script: pathlib.Path, arguments: list[str], name: str) -> int:
    """Run a benchmark, show what it prints, and keep it under `name`. Returns its exit code."""
    load_before = os.getloadavg()[0]
    lines = []
    with subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if child.returncode:
        print(f"{script.name} ended with code {child.returncode}: nothing was recorded")
        return child.returncode
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    shown = " ".join(["python", f"benchmarks/{script.relative_to(HERE)}", *arguments])
    found = {
        "title": (ast.get_docstring(ast.parse(script.read_text())) or name)
        .splitlines()[0]
        .rstrip("."),
        "command": shown,
        "machine": f"{machine()}, load {load_before:.1f} at the start",
        "revision": said.stdout.strip(),
        "measured": datetime.date.today().isoformat(),
        "tables": parsed(lines),
        "notes": [],
    }
    MEASURED.mkdir(exist_ok=True)
    path = MEASURED / f"{name}.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(
        f"wrote docs/measured/{path.name}; `python docs/tables.py` draws it into the documentation"
    )
    return 0


def main() -> int:
    """Run and record the benchmark that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "benchmark", help="a file of benchmarks/, without .py, such as fit or peers/run"
    )
    parser.add_argument(
        "--as", dest="name", help="the name to record under (default: the benchmark's)"
    )
    options, arguments = parser.parse_known_args()
    script = HERE / f"{options.benchmark}.py"
    if not script.is_file():
        parser.error(f"there is no benchmarks/{options.benchmark}.py")
    return record(script, arguments, options.name or options.benchmark.replace("/", "-"))


if __name__ == "__main__":
    sys.exit(main())
