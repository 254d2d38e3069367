"""Plays random schedules of faults against the state machine of an elastic job, and checks its laws.

    python benchmarks/schedules.py --worlds 10000 --seed 1

A world has one to six hosts in memory, on a clock of its own. In it processes die, freeze and wake again,
hosts come, go and slow down, links break and heal, messages come late or twice. Three kinds take turns:
faults that end, after which all hosts that are left must train again; links that never heal, which may cost
only those at their smaller end; and a stop among faults, after which the exit code must say whether the last
step is saved (143) or not (75). `tests/launcher/test_rendezvous.py` has the worlds and states the laws. The
exit code is 1 if one was broken, and the seeds that break it are printed.
"""

import argparse
import collections
import pathlib
import random
import sys
import time

TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "launcher")]

import test_rendezvous as worlds  # noqa: E402  # pyright: ignore[reportMissingImports]


def play(kind: str, seed: int) -> None:
    """Play one world. Raises AssertionError if a law does not hold in it."""
    draw = random.Random(seed)
    if kind == "faults that end":
        worlds.live(seed, draw.randint(1, 3), draw.randint(3, 6), draw.randint(1, 3), False)
    elif kind == "links that never heal":
        worlds.live(seed, draw.randint(1, 2), draw.randint(3, 6), 1, True)
    else:
        worlds.stopped(seed, draw.randint(1, 3), draw.randint(1, 5), draw.randint(1, 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first world; others count up")
    options = parser.parse_args()
    kinds = ("faults that end", "links that never heal", "stopped")
    played: collections.Counter[str] = collections.Counter()
    broken: dict[str, list[int]] = collections.defaultdict(list)
    began_s = time.monotonic()
    for seed in range(options.seed, options.seed + options.worlds):
        kind = kinds[seed % len(kinds)]
        played[kind] += 1
        try:
            play(kind, seed)
        except AssertionError as error:
            broken[kind].append(seed)
            print(f"{kind}, seed {seed}: {str(error)[:500]}", file=sys.stderr, flush=True)
    print("\n| worlds | played | broken laws | seeds of these |\n| --- | --- | --- | --- |")
    for kind in kinds:
        seeds = ", ".join(map(str, broken[kind][:20]))
        print(f"| {kind} | {played[kind]} | {len(broken[kind])} | {seeds} |")
    print(f"\n{time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
