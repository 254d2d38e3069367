"""Results of benchmarks: printed as they come, and kept as data for the tables of the documentation.

    table = Table("fit", "grid", columns=("priors", "noise", "bad fits"))
    table.add("ours", "0 %", 0)           # printed at once
    write(options.record, "fit", title="Fit of the time model", command="...", tables=[table])

`--record` (`add_record_option`) writes `docs/measured/NAME.json`; `python docs/tables.py` then draws the
tables of README.md and docs/ anew.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

MEASURED = pathlib.Path(__file__).parents[1] / "docs" / "measured"


@dataclass
class Table:
    """A table that grows row by row. `name` is its name within the file of the benchmark."""

    name: str
    columns: Sequence[str]
    title: str = ""
    rows: list[list[str]] = field(default_factory=list)

    def __post_init__(self):
        if self.title:
            print(f"\n{self.title}")
        print(f"| {' | '.join(self.columns)} |\n|{'---|' * len(self.columns)}", flush=True)

    def add(self, *cells: object) -> None:
        """Add a row and print it. Numbers are shown as they are: round them first."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns: {cells}")
        self.rows.append([str(cell) for cell in cells])
        print(f"| {' | '.join(self.rows[-1])} |", flush=True)


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Add `--record`, which keeps the results in docs/measured/."""
    parser.add_argument(
        "--record", action="store_true", help="write docs/measured/NAME.json, for the documentation"
    )


def write(
    wanted: bool,
    name: str,
    *,
    title: str,
    command: str,
    tables: Sequence[Table],
    notes: Sequence[str] = (),
) -> None:
    """Write the results of one benchmark, if they are `wanted`. `notes` are sentences that explain them."""
    if not wanted:
        return
    found = {
        "title": title,
        "command": command,
        "machine": machine(),
        "revision": _revision(),
        "measured": datetime.date.today().isoformat(),
        "tables": [
            {"name": t.name, "title": t.title, "columns": list(t.columns), "rows": t.rows}
            for t in tables
        ],
        "notes": list(notes),
    }
    MEASURED.mkdir(exist_ok=True)
    path = MEASURED / f"{name}.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}; `python docs/tables.py` draws it into the documentation")


def machine() -> str:
    """What the figures were measured on, in words."""
    model = platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            x.partition(":")[2].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        model = names[0] if names else model
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    return f"{os.cpu_count()} cores ({model}), {versions}, load {os.getloadavg()[0]:.1f} at the end"


def _revision() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=MEASURED.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or "unknown"
