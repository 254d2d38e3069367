"""Whether a change made anything slower: the same measurement in two checkouts, in turns.

    python benchmarks/before_after.py --before ../older-checkout
    python benchmarks/before_after.py --before ../older-checkout --only step,decision --pairs 9

A pair measures one checkout and then the other, each in processes of its own, on the same machine and with
the same environment; the order alternates. The table gives the ratio after / before: median and quartiles.
Step overhead is itself a ratio to the same hand-written loop, so pairs can be compared.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial

from jaxgoodput.launcher.local import keep_freed_pages

HERE = pathlib.Path(__file__).resolve().parents[1]


def run(checkout: pathlib.Path, *arguments: str) -> str:
    """What Python prints when it runs with `checkout` as its package; raises if it fails."""
    environ = {**os.environ, **keep_freed_pages(os.environ), "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def step(row: str, checkout: pathlib.Path) -> Mapping[str, float]:
    """Time of each kind of step over that of the hand-written loop."""
    script = ["benchmarks/step_overhead.py", f"--only={row}", "--worker", "--rounds=1"]
    rounds = json.loads(run(checkout, *script).splitlines()[-1])["rounds"]
    parts = {"fit": "fit", "plain": "plain step", "statistics": "step with statistics"}
    return {
        f"{row}: {name} / by hand": statistics.median(
            a / b for a, b in zip(rounds[part], rounds["hand"], strict=True)
        )
        for part, name in parts.items()
    }


def decision(checkout: pathlib.Path) -> Mapping[str, float]:
    """CPU milliseconds of a scheduling decision, by size of the cluster."""
    said = run(checkout, "benchmarks/scheduler_decisions.py", "--rounds", "5")
    rows = [line.split() for line in said.splitlines() if re.match(r"\s*\d+\s+\d+\s+[13]\s", line)]
    # The columns are devices, jobs, kinds, shapes, tables, CPU median.
    return {
        f"decision, ms CPU: {row[0]} devices, {row[1]} jobs, kinds {row[2]}, row {number}": float(
            row[5]
        )
        for number, row in enumerate(rows, start=1)
    }


def move(checkout: pathlib.Path) -> Mapping[str, float]:
    """Milliseconds of a move of the state between two layouts."""
    pair = "fsdp8>tensor8"
    said = run(checkout, "benchmarks/reshard.py", f"--only={pair}", "--mebibytes=100", "--rounds=5")
    (row,) = (line.split() for line in said.splitlines() if line.split()[:2] == pair.split(">"))
    return {f"move {pair}, 100 MiB, ms": float(row[4])}


def start(checkout: pathlib.Path) -> Mapping[str, float]:
    """Seconds to the first step of the quickstart, and of the command line's help."""
    found = {}
    said = run(checkout, "benchmarks/first_step.py", "--repeats", "1", "--asked-s", "1000")
    for line in said.splitlines():
        if parts := re.match(r"\s*(imports|processor|first step)\s+([\d.]+)", line):
            found[f"quickstart, seconds to: {parts[1]}"] = float(parts[2])
    timer = "import time; t = time.process_time(); import {0}; print(time.process_time() - t)"
    for module in ("jaxgoodput", "jaxgoodput.cli", "jaxgoodput.train.trainer"):
        found[f"import {module}, s CPU"] = float(run(checkout, "-c", timer.format(module)))
    return found


def files(checkout: pathlib.Path) -> Mapping[str, float]:
    """Seconds that a run's files take on the local disk."""
    said = run(checkout, str(HERE / "benchmarks" / "local_files.py"))
    rows = (line.rpartition(": ") for line in said.splitlines())
    return {f"files: {what}": float(value) for what, _, value in rows}


MEASURES: Mapping[str, Callable[[pathlib.Path], Mapping[str, float]]] = {
    "decision": decision,
    "files": files,
    "move": move,
    "start": start,
}


def main() -> None:
    """Measure both checkouts in turns and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--before", type=pathlib.Path, required=True, help="the checkout to compare with"
    )
    names = ["step", *MEASURES]
    parser.add_argument("--only", default=",".join(names), help=f"some of {', '.join(names)}")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--steps", default="cnn:1,mlp:1", help="rows of benchmarks/step_overhead.py to measure"
    )
    options = parser.parse_args()
    print("| what | before | after | after / before: median (quartiles) |\n|---|---|---|---|")
    of_steps = [partial(step, row) for row in options.steps.split(",")]
    chosen = [of_steps if name == "step" else [MEASURES[name]] for name in options.only.split(",")]
    for measure in (each for measures in chosen for each in measures):
        pairs: list[dict[pathlib.Path, Mapping[str, float]]] = []
        for number in range(options.pairs):
            checkouts = [options.before.resolve(), HERE]
            pairs.append(
                {each: measure(each) for each in checkouts[:: 1 if number % 2 == 0 else -1]}
            )
        for what in pairs[0][HERE]:
            old, new = (
                [pair[each][what] for pair in pairs] for each in (options.before.resolve(), HERE)
            )
            ratios = [b / a for a, b in zip(old, new, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"| {what} | {statistics.median(old):.3g} | {statistics.median(new):.3g} | "
                f"{middle:.3f} ({low:.3f}-{high:.3f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
