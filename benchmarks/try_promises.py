"""What `jaxgoodput try` promises of another batch, beside the time that runs with it take to a target.

    python benchmarks/try_promises.py                          # five programs, 3 pairs each; 40 minutes
    python benchmarks/try_promises.py --programs flights --pairs 7

`promised` is the time for the same progress with the batch that the answer names, as a share of the time with
the script's own batch; if it names none, of the next larger batch that it timed. `measured` is the ratio of
the seconds to the target, from the end of the first step on: the median of pairs run in turns, and the
smallest and largest. A pair of which one run does not meet the target is left out, and counted. `took` is how
long the answer took. The first three programs are runs of `fit` with a fixed batch and the learning-rate rule
(`time_to_target.py`); the last two are loops by hand, whose learning rate is multiplied by a power of the
ratio of the batches, as a careful user would do (`by_hand.py`).
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

import by_hand
import time_to_target
from absl import app, flags, logging

import jaxgoodput as jg

FLAGS = flags.FLAGS
EXAMPLES = {"quickstart": "digits", "byte LM": "lm", "recommender": "recommender"}
BY_HAND = {"flights": "flights", "decoder": "headers"}
flags.DEFINE_list("programs", [*EXAMPLES, *BY_HAND], "Programs.")
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
            own = by_hand.WORKLOADS[BY_HAND[program]]
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


def example_s(program: str, batch: int, seed: int) -> float:
    """Seconds of training until an example meets its target with a fixed batch; infinite if it does not."""
    with tempfile.TemporaryDirectory() as cache:
        outcome = time_to_target.run(EXAMPLES[program], f"fixed {batch}", seed, cache)
    return math.inf if math.isnan(outcome.seconds) else outcome.seconds


def by_hand_s(program: str) -> Callable[[int, int], float]:
    """Return what trains a program by hand to the target that a run of its own has set."""
    name = BY_HAND[program]
    own = by_hand.WORKLOADS[name]
    reference = by_hand.Side(kind="reference", batch=own.base)
    target, _ = by_hand.target_of(
        by_hand.run(name, by_hand.Scale(), reference, by_hand.REFERENCE_SEED).losses
    )

    def run_s(batch: int, seed: int) -> float:
        side = by_hand.Side(kind="hand", batch=batch, power=own.power)
        outcome = by_hand.run(name, by_hand.Scale(), side, seed, target)
        return outcome.seconds - outcome.first_s if outcome.is_met else math.inf

    return run_s


def apart(function: Callable[..., Promise], *args: str) -> Promise:
    """Call a function in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()


def row(program: str) -> str:
    """Ask about one program, and measure."""
    told = apart(promise, program)
    print(f"{program}\n{told.answer}\n", file=sys.stderr, flush=True)
    run_s = partial(example_s, program) if program in EXAMPLES else by_hand_s(program)
    ratios, num_missed = [], 0
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
    unknown = set(FLAGS.programs) - {*EXAMPLES, *BY_HAND}
    if unknown:
        raise app.UsageError(f"--programs: {sorted(unknown)} is not among {[*EXAMPLES, *BY_HAND]}.")
    rows = [row(program) for program in FLAGS.programs]
    print(f"\n| {COLUMNS} |\n|{'---|' * (COLUMNS.count('|') + 1)}")
    print("\n".join(rows))


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    app.run(main)
