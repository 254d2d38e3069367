"""Compares training with a plain optax loop, for what users write and for every way to split a batch.

    python benchmarks/exact.py                                   # the whole matrix: many minutes
    python benchmarks/exact.py --rows "adam,MultiSteps" --columns "base,8 x base"

Rows, columns and the comparison are those of `tests/exact/`. "=" says that the parameters are the loop's, to
1e-5 of how far they moved; "refused" that the run ended before its first step with a sentence of this
package. Every other cell is a fault.
"""

import collections
import pathlib
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "exact"), str(TESTS / "support"), str(TESTS)]

# As the tests compute: eight devices, and one folder of compiled programs.
import conftest  # noqa: E402, F401  # pyright: ignore[reportMissingImports]
from absl import app, flags, logging  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_list("rows", [], "Only these rows.")
flags.DEFINE_list("columns", [], "Only these columns.")
flags.DEFINE_bool("details", False, "Print what each cell says that is not equal.")


def main(_):
    logging.set_verbosity(logging.ERROR)
    from exact_bench import outcome
    from exact_columns import COLUMNS
    from exact_rows import ROWS

    columns = FLAGS.columns or list(COLUMNS)
    counts, details = collections.Counter(), []
    print("| row | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for row in FLAGS.rows or ROWS:
        cells = []
        for column in columns:
            with tempfile.TemporaryDirectory() as folder:
                found = outcome(ROWS[row], COLUMNS[column], pathlib.Path(folder))
            counts[found.kind] += 1
            cells.append(str(found))
            if found.kind != "equal":
                details.append(f"{row}, {column}: {found.kind} {found.what}")
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)
    print()
    print("| cells | equal | refused | differ | crashed |")
    print("|---|---|---|---|---|")
    kinds = [str(counts[kind]) for kind in ("equal", "refused", "differs", "crashed")]
    print(f"| {sum(counts.values())} | " + " | ".join(kinds) + " |")
    if FLAGS.details:
        print("\n".join(("", *details)))


if __name__ == "__main__":
    app.run(main)
