"""Kills runs on loaders of other libraries: are samples lost, do any come twice, and what was said of it?

    python benchmarks/loaders.py                            # all that are installed: about a minute each
    python benchmarks/loaders.py --only webdataset --only "NumPy memmap" --kills 5

Each loader is trained on in processes that SIGKILL ends at moments that are drawn, mostly after a
checkpoint. The run is resumed on another number of devices each time, until it ends, with batches of other
sizes in between. What is counted is how often each sample is in the parameters of the end. The loaders are
those of `tests/support/loaders.py`, which says what to install. The exit code is 1 if a sample was lost or
came twice and nothing was said before training.
"""

import importlib.util
import pathlib
import signal
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support")]

from absl import app, flags  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("only", [], "Only the loader with this name; may be repeated.")
flags.DEFINE_integer("kills", 3, "Number of processes to kill for each loader.")
flags.DEFINE_integer("seed", 0, "Seed of the moments, the devices and the sizes of batches.")

COLUMNS = (
    "loader",
    "processes killed",
    "devices",
    "steps undone",
    "samples lost",
    "samples twice",
    "said before training",
)


def chosen(names) -> list[str]:
    """The names of `--only`, or all."""
    if unknown := sorted(set(FLAGS.only) - set(names)):
        raise app.UsageError(f"--only: no loader is called {unknown}. There are: {list(names)}.")
    return [name for name in names if name in FLAGS.only or not FLAGS.only]


def main(_) -> int:
    # So that the process that trains is ended, too, and its files are deleted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    from loader_kills import killed
    from loaders import FROM_BEGINNING, LOADERS, OTHER_DATA, SEEN_ANEW  # pyright: ignore

    faults, missing = [], []
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for name in chosen(LOADERS):
        loader = LOADERS[name]
        if not all(importlib.util.find_spec(module) for module in loader.needs):
            missing.append(name)
            continue
        with tempfile.TemporaryDirectory(prefix="jaxgoodput-loaders-") as folder:
            found = killed(
                name, pathlib.Path(folder), times=loader.times, kills=FLAGS.kills, seed=FLAGS.seed
            )
        said = [*found.said, *([f"refused: {found.refused}"] if found.refused else [])]
        devices = ", ".join(map(str, found.devices))
        lost, twice = ("-" if n is None else n for n in (found.lost, found.twice))
        cells = (
            name,
            found.kills,
            devices,
            found.undone,
            lost,
            twice,
            " ".join(" ".join(said).split()) or "nothing",
        )
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        about_data = (SEEN_ANEW, FROM_BEGINNING, OTHER_DATA)
        is_said = any(part in one for one in said for part in about_data)
        if (found.lost or found.twice) and not is_said:
            faults.append(name)
    if missing:
        print(f"\nNot installed: {'; '.join(missing)}.")
    if faults:
        print(f"\nSamples were lost or came twice, and nothing was said: {'; '.join(faults)}.")
    return int(bool(faults))


if __name__ == "__main__":
    app.run(main)
