"""Runs a benchmark and keeps what it prints as data, from which the documentation draws its tables.

    python benchmarks/record.py fit            # runs benchmarks/fit.py, writes docs/measured/fit.json
    python benchmarks/record.py tables --only large
    python benchmarks/record.py fit --as fit-2 # writes docs/measured/fit-2.json
    python benchmarks/record.py operations --as gpu --printed OUTPUT --on "one H200" --revision 050a36d
    python docs/tables.py                                # draws README.md and docs/ anew

A table in markdown becomes columns and rows; other output becomes text. The title is the first line of the
benchmark's docstring. If the benchmark fails, nothing is written. `--printed` names a file with what a
benchmark has printed elsewhere, `--on` that machine, and `--revision` the commit.
"""

import argparse
import ast
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

HERE = pathlib.Path(__file__).parent
MEASURED = HERE.parent / "docs" / "measured"
FOLDERS = re.compile(r"(?<![\w.])/(root|home|tmp|Users|work|mnt)/")


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


def run(script: pathlib.Path, arguments: list[str]) -> tuple[int, list[str]]:
    """Run a benchmark and show what it prints. Returns its exit code, and the lines."""
    lines = []
    with subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return child.returncode, lines


def revision() -> str:
    """The commit of this checkout."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.strip()


def keep(
    script: pathlib.Path,
    arguments: list[str],
    name: str,
    lines: Iterable[str],
    *,
    machine: str,
    revision: str,
) -> None:
    """Keep under `name` what a benchmark of that revision has printed on that machine.

    Raises ValueError if it printed where that machine keeps its files, which nobody else needs to know.
    """
    lines = [*lines]
    if named := [line for line in lines if FOLDERS.search(line)]:
        raise ValueError(
            f"{len(named)} lines name folders of the machine, the first is {named[0]!r:.200}. Nothing was "
            "recorded: remove them, and record the rest with --printed."
        )
    shown = " ".join(["python", f"benchmarks/{script.relative_to(HERE)}", *arguments])
    found = {
        "title": (ast.get_docstring(ast.parse(script.read_text())) or name)
        .splitlines()[0]
        .rstrip("."),
        "command": shown,
        "machine": machine,
        "revision": revision,
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
    parser.add_argument(
        "--printed", type=pathlib.Path, help="a file with what it printed elsewhere"
    )
    parser.add_argument("--on", default="", help="that machine, with jax's version")
    parser.add_argument("--revision", default="", help="the commit it ran from")
    options, arguments = parser.parse_known_args()
    script = HERE / f"{options.benchmark}.py"
    if not script.is_file():
        parser.error(f"there is no benchmarks/{options.benchmark}.py")
    if len({bool(options.printed), bool(options.on), bool(options.revision)}) > 1:
        parser.error(
            "--printed, --on and --revision belong together: what was printed, where, by what"
        )
    name = options.name or options.benchmark.replace("/", "-")
    if options.printed:
        lines = options.printed.read_text().splitlines()
        keep(script, arguments, name, lines, machine=options.on, revision=options.revision)
        return 0
    where = f"{machine()}, load {os.getloadavg()[0]:.1f} at the start"
    code, lines = run(script, arguments)
    if code:
        print(f"{script.name} ended with code {code}: nothing was recorded")
        return code
    keep(script, arguments, name, lines, machine=where, revision=revision())
    return 0


if __name__ == "__main__":
    sys.exit(main())
