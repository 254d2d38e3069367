"""Compares the forecast of a sample's worth in a larger batch with separate runs at that batch.

    python benchmarks/forecast.py                                # flights, ratings, headers; 3 seeds
    python benchmarks/forecast.py --only ratings --seeds 1

One run of `fit` begins with the base batch B, and takes 4 B after a quarter of its length (`--visit`). Once
the loss at 4 B is known, it forecasts how much a sample is worth at 16 B, relative to 4 B: from the noise
that the gradients show, and from that noise as the loss has corrected it. Separate runs of `fit` keep 4 B
and 16 B from the beginning. The measured worth is how many samples the former needs to reach a held-out
loss, over how many the latter needs. The target is that of `by_hand.py`.
"""

import concurrent.futures
import multiprocessing
import statistics
import tempfile
from dataclasses import dataclass
from typing import Any
from unittest import mock

import by_hand
import numpy as np
from absl import app, flags, logging
from everyday import WORKLOADS, Scale

from jaxgoodput.goodput.efficiency import Grad, efficiency, noise_scale
from jaxgoodput.tune.evidence import Evidence

FLAGS = flags.FLAGS
flags.DEFINE_integer("visit", 4, "The batch that is visited, in base batches.")
flags.DEFINE_integer("next", 16, "The batch that is forecast, in base batches.")
flags.DEFINE_float("share", 0.25, "Share of the run after which the visit begins.")
flags.DEFINE_float("length", 1.0, "Factor on the number of base steps.")


@dataclass(frozen=True)
class Forecast:
    """What a run says of the next batch, once the loss at another is known."""

    noise: float
    """Noise scale that the gradients show, in samples."""
    factor: float
    """What the loss corrects it by."""
    plain: float
    """Worth of a sample by the gradients alone."""
    corrected: float
    """Worth of a sample by both."""


def worth(grad: Grad, visited: int, following: int) -> float:
    """Return the worth of a sample of one batch relative to another, both in base batches."""
    return float(efficiency(grad, float(following))) / float(efficiency(grad, float(visited)))


def visiting(
    name: str, seed: int, share: float, factors: tuple[int, int], length: float
) -> Forecast:
    """Return the forecast of a run that visits a batch; the factor is 1 if its loss was too uncertain."""
    logging.set_verbosity(logging.ERROR)
    workload = WORKLOADS[name].scaled(Scale(length=length))
    found: list[Forecast] = []
    calibrate = Evidence.calibrate

    def recorded(self: Evidence, grad: Grad, base: int) -> None:
        is_known = self._before is not None and self._settled is not None
        calibrate(self, grad, base)
        if is_known and not found:
            both = self.calibration.corrected(grad)
            scale = float(noise_scale(grad, base))
            ratios = [worth(g, *factors) for g in (grad, both)]
            found.append(Forecast(scale, self.calibration.factor, *ratios))

    policy = {0: workload.base, share: factors[0] * workload.base}
    with (
        tempfile.TemporaryDirectory() as parent,
        mock.patch.object(Evidence, "calibrate", recorded),
    ):
        by_hand.train_by_fit(
            workload, policy, seed, target=-np.inf, cache=f"{parent}/cache", parent=parent
        )
    if not found:
        raise app.UsageError(
            f"{name} is over before the loss at the visited batch is known: --length."
        )
    return found[0]


def reference(name: str, seed: int, length: float) -> float:
    """Return the target."""
    workload = WORKLOADS[name].scaled(Scale(length=length))
    side = by_hand.Side(kind="reference", batch=workload.base)
    return by_hand.target_of(by_hand.train(workload, side, seed, -np.inf, "").losses)[0]


def samples_at(name: str, seed: int, factor: int, target: float, length: float) -> float:
    """Return how many samples a run with one batch needs to reach the target; infinite if it does not."""
    logging.set_verbosity(logging.ERROR)
    workload = WORKLOADS[name].scaled(Scale(length=2 * length))
    with tempfile.TemporaryDirectory() as parent:
        found = by_hand.train_by_fit(
            workload,
            {0: factor * workload.base},
            seed,
            target=target,
            cache=f"{parent}/cache",
            parent=parent,
        )
    if not found.is_met:
        return np.inf
    if len(found.losses) == 1:
        return float(found.losses[0][0])
    (before, high), (after, low) = found.losses[-2:]
    return before + (after - before) * (high - target) / (high - low)


def alone(function: Any, *args: Any) -> Any:
    """Call a function in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()


def main(_: Any) -> None:
    """Print a row for each run, and the mean error of both forecasts."""
    factors, length = (FLAGS.visit, FLAGS.next), FLAGS.length
    print("| problem, seed | noise scale | factor | by the gradients | corrected | measured |")
    print("|---|---|---|---|---|---|", flush=True)
    errors: list[tuple[float, float]] = []
    for name in FLAGS.only:
        target = alone(reference, name, by_hand.REFERENCE_SEED, length)
        for seed in range(FLAGS.seeds):
            forecast = alone(visiting, name, seed, FLAGS.share, factors, length)
            visited, following = (
                alone(samples_at, name, seed, factor, target, length) for factor in factors
            )
            if not np.isfinite([visited, following]).all():
                print(f"| {name}, {seed} | a separate run missed the target | | | | |", flush=True)
                continue
            measured = visited / following
            errors.append((abs(forecast.plain - measured), abs(forecast.corrected - measured)))
            print(
                f"| {name}, {seed} | {forecast.noise:.0f} | {forecast.factor:.2f} | {forecast.plain:.2f} "
                f"| {forecast.corrected:.2f} | {measured:.2f} |",
                flush=True,
            )
    if not errors:
        return
    plain, corrected = (statistics.mean(column) for column in zip(*errors, strict=True))
    print(f"| mean error of {len(errors)} | | | {plain:.2f} | {corrected:.2f} | |")


if __name__ == "__main__":
    FLAGS.set_default("only", ["flights", "ratings", "headers"])
    FLAGS.set_default("seeds", 3)
    app.run(main)
