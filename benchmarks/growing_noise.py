"""Seconds to a target while the critical batch size grows: adaptive against constant batch sizes.

    python benchmarks/growing_noise.py                     # grows 10-fold and 100-fold, 5 seeds
    python benchmarks/growing_noise.py --growths 30 --seeds 3

What is trained is the mean of samples with known noise, by SGD with AdaScale: its gradient is the distance
to the mean, so the noise scale is known at any time, and grows by as much as the squared distance falls until
the target. The clock is planted: a step takes 1 ms, and as much again at the geometric mean of the first and
the last noise scale, where a choice of the batch matters most. All else is `Trainer.fit`.

"bound" is what no choice of batches could beat: the best batch of the ladder at every moment, with the noise
known and no price for a change, over the best constant one. A batch too large or too small by a factor r
takes (r + 1/r + 2) / 4 of the best one's time where latency and noise scale are equal, and less elsewhere:
growth by 10 leaves little to be won, whoever chooses.
"""

import dataclasses
import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from planted_loop import PlantedLoop

import jaxgoodput as jg
from jaxgoodput.clock import FakeClock
from jaxgoodput.observe.events import EvalEnd, FitStart, StepEnd

FLAGS = flags.FLAGS
flags.DEFINE_list("growths", ["10", "100"], "By how much the noise scale grows, a table each.")
flags.DEFINE_integer("seeds", 5, "Runs of each side.")

BASE, SIZES = 16, (16, 32, 64, 128, 256, 512, 1024, 2048)
DIMENSIONS, NUM_SAMPLES = 256, 2**16
BASE_STEPS = 3000
SMALLEST = 64.0  # the noise scale at the beginning, samples


@dataclasses.dataclass(frozen=True)
class Planted:
    """A problem whose noise scale grows `growth`-fold in `BASE_STEPS` base steps."""

    growth: float

    @property
    def rate(self) -> float:
        """The distance falls by it in every base step."""
        return math.log(self.growth) / (2 * BASE_STEPS)

    @property
    def start(self) -> float:
        """Squared distance to the mean; samples have a variance of 1 in every dimension."""
        return DIMENSIONS / SMALLEST

    def step_s(self, global_batch_size: int) -> float:
        """Planted seconds of a step."""
        return 1e-3 * (1 + global_batch_size / (SMALLEST * math.sqrt(self.growth)))

    def seconds(self, choose: Callable[[np.ndarray], np.ndarray]) -> float:
        """Of all base steps, where `choose` picks from [base steps, batches] of seconds per base step."""
        noise = SMALLEST * self.growth ** (np.arange(BASE_STEPS) / BASE_STEPS)[:, None]
        batches = np.array(SIZES)
        gain = (noise + BASE) / (noise + batches) * batches / BASE
        taken = np.array([self.step_s(b) for b in SIZES]) / gain
        return float(choose(taken))

    @property
    def bound(self) -> float:
        """What no choice of batches could beat, over the best constant batch."""
        best = self.seconds(lambda taken: taken.min(axis=1).sum())
        return best / self.seconds(lambda taken: taken.sum(axis=0).min())


class Mean(jg.Trainer):
    """The problem as a user would write it."""

    def __init__(self, config: jg.Config, planted: Planted, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.planted = planted

    def init(self, key):
        return jnp.full((DIMENSIONS,), math.sqrt(self.planted.start / DIMENSIONS))

    def loss(self, params, batch, key):
        return 0.5 * jnp.sum(jnp.square(params - batch), axis=1)

    def metrics(self, params, batch):
        return {"distance": jnp.broadcast_to(jnp.sum(jnp.square(params)), len(batch))}

    def optimizer(self):
        return optax.sgd(self.planted.rate)

    def dataset(self):
        rng = np.random.default_rng(self.config.seed)
        made = rng.standard_normal((NUM_SAMPLES, DIMENSIONS), dtype=np.float32)
        return made - made.mean(axis=0)  # the mean is exactly 0, however often the samples are seen

    def eval_dataset(self):
        return np.zeros((1, DIMENSIONS), np.float32)


class Referee(jg.Hook):
    """Ends the run at the target."""

    def __init__(self, target: float):
        self.target = target
        self.trainer: Any = None
        self.started_s, self.seconds = 0.0, math.nan
        self.batches: dict[int, None] = {}

    def on_fit_start(self, event: FitStart, /) -> None:
        self.started_s = event.at_s

    def on_step_end(self, event: StepEnd, /) -> None:
        self.batches[event.config.global_batch_size] = None

    def on_eval_end(self, event: EvalEnd, /) -> None:
        if math.isnan(self.seconds) and event.metrics["distance"] <= self.target:
            self.seconds = event.at_s - self.started_s
            self.trainer.finish()


def run(planted: Planted, policy: Any, seed: int, cache: str) -> Referee:
    """One run."""
    with tempfile.TemporaryDirectory() as parent:
        config = jg.Config(
            workdir=str(pathlib.Path(parent) / "run"),
            seed=seed,
            policy=policy,
            batch=jg.BatchLimits(base=BASE, max=SIZES[-1], sizes=SIZES, max_micro_batches=1),
            base_steps=2 * BASE_STEPS,
            # Compiled before the first step: planted seconds know nothing of compilations.
            execution=jg.Execution(background_compile=False, compilation_cache=cache),
            evaluation=jg.Evaluation(every_base_steps=BASE_STEPS // 200),
            tuning=jg.Tuning(remember=False),
            reporting=jg.Reporting(tensorboard=False, progress=False),
            saving=jg.Saving(at_end=False, every_s=1e9),
        )
        referee = Referee(planted.start / planted.growth)
        trainer = Mean(
            config,
            planted,
            clock=FakeClock(),
            loop=PlantedLoop,
            hooks=[referee],
            devices=jax.devices()[:1],
        )
        referee.trainer = trainer
        trainer.fit()
    return referee


def compare(growth: float, cache: str) -> None:
    """One table."""
    planted = Planted(growth)
    policies: dict[str, Any] = {"adaptive": "goodput"}
    policies |= {f"constant {b}": {0: b} for b in SIZES}
    runs = {
        name: [run(planted, policy, seed, cache) for seed in range(FLAGS.seeds)]
        for name, policy in policies.items()
    }
    late = [name for name, some in runs.items() if any(math.isnan(r.seconds) for r in some)]
    if late:
        print(f"no table for a growth of {growth:g}: the target was not met by {', '.join(late)}")
        return
    found = {name: statistics.median(r.seconds for r in some) for name, some in runs.items()}
    best = min((name for name in found if name != "adaptive"), key=lambda name: found[name])
    print(f"noise scale from {SMALLEST:.0f} to {SMALLEST * growth:.0f} samples; best: {best}")
    print("| side | s | / best constant | batches |")
    print("|---|---|---|---|")
    for name, some in runs.items():
        seconds = [r.seconds for r in some]
        ratios = [r.seconds / o.seconds for r, o in zip(some, runs[best], strict=True)]
        print(
            f"| {name} | {found[name]:.2f} ({min(seconds):.2f}..{max(seconds):.2f}) "
            f"| {statistics.median(ratios):.3f} | {', '.join(map(str, some[0].batches))} |",
            flush=True,
        )
    print(f"bound: {planted.bound:.3f} of the best constant batch\n", flush=True)


def main(_: Any) -> None:
    """Print the tables."""
    logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory() as cache:
        for growth in FLAGS.growths:
            compare(float(growth), cache)


if __name__ == "__main__":
    app.run(main)
