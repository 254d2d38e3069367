"""What `jaxgoodput try` promises of another batch, beside the time that runs with it take to a target.

    python benchmarks/try_promises.py                          # five programs, 3 pairs each; 40 minutes
    python benchmarks/try_promises.py --programs flights --pairs 7

`promised` is the time for the same progress with the batch that the answer names, as a share of the time with
the script's own batch; if it names none, of the next larger batch that it timed. `measured` is the ratio of
the seconds to the target, from the end of the first step on: the median of pairs run in turns, and the
smallest and largest. A pair of which one run does not meet the target is left out, and counted. `took` is how
long the answer took. All runs are of `fit` with a fixed batch, with the learning-rate rule for a larger one;
their programs were compiled by a run before. Targets of the first three programs are those of
`time_to_target.py`, of the last two those of `by_hand.py`.
"""

import concurrent.futures
import math
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import by_hand
import time_to_target
from absl import app, flags, logging

import jaxgoodput as jg

FLAGS = flags.FLAGS
EXAMPLES = {"quickstart": "digits", "byte LM": "lm", "recommender": "recommender"}
EVERYDAY = {"flights": "flights", "decoder": "headers"}
LENGTHS = {"flights": 5.0, "headers": 1.0}  # so that a run takes ten seconds and more
flags.DEFINE_list("programs", [*EXAMPLES, *EVERYDAY], "Programs.")
flags.DEFINE_integer("pairs", 3, "Runs with each of the two batches.")

COLUMNS = (
    "program | took, s | base | other batch | worth it | promised | measured | promised / measured"
)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """An answer of `tryout`."""

    took_s: float
    base: int
    other: int
    is_worth_it: bool
    share: float
    """Of the time with the base batch."""
    lower: float
    """Least share, with the largest noise in the interval."""
    upper: float
    """Largest share."""
    answer: str


def promise(program: str) -> Promise:
    """Ask `tryout` about a program, in this process."""
    logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory() as parent:
        folder = str(pathlib.Path(parent) / "run")
        if program in EXAMPLES:
            example = time_to_target.WORKLOADS[EXAMPLES[program]]
            trainer = example.trainer(example.config(folder))
        else:
            own = by_hand.WORKLOADS[EVERYDAY[program]]
            limits = jg.BatchLimits(base=own.base, max=own.most)
            config = jg.Config(workdir=folder, batch=limits, base_steps=own.base_steps)
            trainer = own.task(config)
        began_s = time.perf_counter()
        found = jg.tryout(trainer)
        took_s = time.perf_counter() - began_s
    other = found.best if found.is_worth_it else found.batches[min(1, len(found.batches) - 1)]
    return Promise(
        took_s=took_s,
        base=found.base.num_samples,
        other=other.num_samples,
        is_worth_it=found.is_worth_it,
        share=found.time_of(other, found.noise_scale),
        lower=found.time_of(other, found.noise_upper),
        upper=found.time_of(other, found.noise_lower),
        answer=found.answer(),
    )


def example_s(program: str, cache: str, batch: int, seed: int) -> float:
    """Seconds of training until an example meets its target with a fixed batch; infinite if it does not."""
    outcome = time_to_target.run(EXAMPLES[program], f"fixed {batch}", seed, cache)
    return math.inf if math.isnan(outcome.seconds) else outcome.seconds


def everyday_s(name: str, batch: int, seed: int, target: float, cache: str) -> float:
    """Seconds of training until a workload meets its target with a fixed batch; infinite if it does not."""
    logging.set_verbosity(logging.ERROR)
    workload = by_hand.WORKLOADS[name].scaled(by_hand.Scale(length=2 * LENGTHS[name]))
    with tempfile.TemporaryDirectory() as parent:
        outcome = by_hand.train_by_fit(
            workload, {0: batch}, seed, target=target, cache=cache, parent=parent
        )
    seconds = outcome.seconds - outcome.first_s - outcome.evaluating_s
    return seconds if outcome.is_met else math.inf


def everyday(program: str, cache: str) -> Callable[[int, int], float]:
    """Return what trains a workload to the target that a loop by hand at its base batch has set."""
    name = EVERYDAY[program]
    own = by_hand.WORKLOADS[name]
    scale = by_hand.Scale(length=LENGTHS[name])
    reference = by_hand.Side(kind="reference", batch=own.base)
    target, _ = by_hand.target_of(
        by_hand.run(name, scale, reference, by_hand.REFERENCE_SEED).losses
    )
    return lambda batch, seed: apart(everyday_s, name, batch, seed, target, cache)


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()


def row(program: str, cache: str) -> str:
    """Ask about one program, and measure."""
    told = apart(promise, program)
    print(f"{program}\n{told.answer}\n", file=sys.stderr, flush=True)
    run_s = partial(example_s, program, cache) if program in EXAMPLES else everyday(program, cache)
    ratios, num_missed = [], 0
    for batch in (told.base, told.other):  # so that no program of theirs is compiled later
        run_s(batch, 0)
    for seed in range(FLAGS.pairs):
        times = {}
        for batch in (told.base, told.other) if seed % 2 else (told.other, told.base):
            times[batch] = run_s(batch, seed)
        print(f"{program}, seed {seed}: {times}", file=sys.stderr, flush=True)
        if all(map(math.isfinite, times.values())):
            ratios.append(times[told.other] / times[told.base])
        else:
            num_missed += 1
    middle, least, most = math.nan, math.nan, math.nan
    if ratios:
        middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    missed = f"; {num_missed} of {FLAGS.pairs} pairs without the target" if num_missed else ""
    cells = (
        program,
        f"{told.took_s:.0f}",
        f"{told.base}",
        f"{told.other}",
        "yes" if told.is_worth_it else "no",
        f"{told.share:.2f} ({told.lower:.2f} to {told.upper:.2f})",
        f"{middle:.2f} ({least:.2f} to {most:.2f}){missed}",
        f"{told.share / middle:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main(_: object) -> None:
    """Print the table."""
    unknown = set(FLAGS.programs) - {*EXAMPLES, *EVERYDAY}
    if unknown:
        raise app.UsageError(
            f"--programs: {sorted(unknown)} is not among {[*EXAMPLES, *EVERYDAY]}."
        )
    with tempfile.TemporaryDirectory() as cache:
        rows = [row(program, cache) for program in FLAGS.programs]
    print(f"\n| {COLUMNS} |\n|{'---|' * (COLUMNS.count('|') + 1)}")
    print("\n".join(rows))


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    app.run(main)
