"""Checks whether a change made training slower: `step_overhead.py` in two checkouts, in turns.

    python benchmarks/before_after.py --before ../older-checkout --only cnn:1

Each turn runs a process of one checkout, then one of the other, on the same machine and with the same
environment. The hand-written loop is the same in both, so all figures are relative to it. The last column is
the ratio of the two within a turn: median and range.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys

from absl import app, flags

from jaxgoodput.launcher.local import keep_freed_pages

FLAGS = flags.FLAGS
flags.DEFINE_string("before", None, "The checkout to compare with.", required=True)
flags.DEFINE_list("only", ["cnn:1", "byte LM:1", "cnn:8", "byte LM:8"], "Rows of step_overhead.py.")
flags.DEFINE_integer("turns", 3, "Turns of both checkouts.")

HERE = pathlib.Path(__file__).resolve().parents[1]
PARTS = {"fit": "fit", "plain": "step", "statistics": "step with statistics"}


def turn(checkout: pathlib.Path, row: str) -> dict[str, float]:
    """Median seconds of each part over the hand-written loop's, in a process of its own."""
    command = [sys.executable, str(checkout / "benchmarks" / "step_overhead.py")]
    command += [f"--only={row}", "--worker", "--rounds=2"]
    environ = {**os.environ, **keep_freed_pages(os.environ), "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    rounds = json.loads(done.stdout.splitlines()[-1])["rounds"]
    ratios = {
        part: [a / b for a, b in zip(rounds[part], rounds["hand"], strict=True)] for part in PARTS
    }
    return {part: statistics.median(values) for part, values in ratios.items()}


def main(argv):
    """Run both checkouts in turns and print the table."""
    del argv
    before = pathlib.Path(FLAGS.before).resolve()
    print(f"{'row':12} {'part':22} {'before / hand':>14} {'after / hand':>13}  after / before")
    for row in FLAGS.only:
        pairs = []
        for number in range(FLAGS.turns):
            order = (before, HERE) if number % 2 == 0 else (HERE, before)
            found = {checkout: turn(checkout, row) for checkout in order}
            pairs.append((found[before], found[HERE]))
        for part, name in PARTS.items():
            old, new = ([pair[i][part] for pair in pairs] for i in (0, 1))
            change = [b / a for a, b in zip(old, new, strict=True)]
            print(
                f"{row:12} {name:22} {statistics.median(old):14.3f} {statistics.median(new):13.3f}  "
                f"{statistics.median(change):.3f} ({min(change):.3f}-{max(change):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
