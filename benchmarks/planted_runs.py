"""Planted seconds of a whole run, over the best constant batch: what the tuner's decisions cost.

    python benchmarks/planted_runs.py                               # all problems, 500 and 3,000 steps
    python benchmarks/planted_runs.py --kinds jumps --optimizers sgd --lengths 500 --verbose

The gradient has a known mean, the noise of its samples is scaled by a known function of the progress, and a
step takes as long as the problem says; all else is `Trainer.fit`. A run ends after so much true progress that
the best constant batch takes the length in steps. True is what follows from the noise that was planted,
whatever the run believes; so constant batches need no runs. Every size is compiled before the first step,
and neither changes of the batch nor measuring the noise take time: nothing but decisions is judged. A run
ends by its true progress, which its tuner doesn't know. Adam's and Adagrad's division is taken as it is at
the base batch.
"""

import dataclasses
import itertools
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
from jaxgoodput.data.sources import Source
from jaxgoodput.goodput.efficiency import GradGroups, efficiency
from jaxgoodput.observe.events import StepEnd, TuneEnd
from jaxgoodput.train import compile_ahead

FLAGS = flags.FLAGS
flags.DEFINE_list("kinds", [], "Problems; all if empty.")
flags.DEFINE_list("optimizers", ["sgd", "adamw", "adagrad", "muon"], "Optimizers.")
flags.DEFINE_list("lengths", ["500", "3000"], "Steps at the best constant batch.")
flags.DEFINE_integer("seeds", 3, "Runs of each problem.")
flags.DEFINE_boolean("verbose", False, "Print every verdict of the first run.")

BASE, SIZES = 16, (16, 32, 64, 128, 256, 512, 1024)
WIDTH, NUM_ROWS, NUM_IDS, TABLE_WIDTH = 32, 2**14, 2048, 4
LATENCY_S = 2e-2
# How often each row of the table is read, and its gradient in every entry if so: all rows together have about
# as much signal as the rest.
FREQUENCIES = np.arange(1, NUM_IDS + 1) ** -0.6 / np.sum(np.arange(1, NUM_IDS + 1) ** -0.6)
IDS = np.random.default_rng(0).choice(NUM_IDS, NUM_ROWS, p=FREQUENCIES).astype(np.int32)
REALISED = np.bincount(IDS, minlength=NUM_IDS) / NUM_ROWS
TABLE_SIGNAL = WIDTH / math.sqrt(TABLE_WIDTH * float(np.sum(FREQUENCIES**2)))

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(1e-3),
    "adamw": lambda: optax.adamw(1e-4),
    "adagrad": lambda: optax.adagrad(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """The noise scale of the dense parameters by the share of the run, and seconds of a step by samples."""

    noise: Callable[[float], float]
    step_s: Callable[[int], float] = lambda batch: LATENCY_S * (1 + batch / 128)
    has_table: bool = False


def _knee(batch: int) -> float:
    return LATENCY_S * max(1.0, batch / 96)


KINDS = {
    "grows": Kind(lambda share: 32 * 30**share),
    "falls": Kind(lambda share: 960 / 30**share),
    "jumps": Kind(lambda share: 1280 if share > 0.4 else 32),
    "drops": Kind(lambda share: 1280 if share < 0.4 else 32),
    "plateau": Kind(lambda share: 256.0),
    "knee": Kind(lambda share: 512.0, _knee),
    "mixed": Kind(lambda share: 64.0, has_table=True),
    "base": Kind(lambda share: 4.0),
}


@dataclasses.dataclass(frozen=True)
class Planted:
    """A kind of a certain length, under an optimizer."""

    kind: Kind
    optimizer: str
    base_steps: float

    def step_s(self, global_batch_size: int) -> float:
        """Planted seconds of a step."""
        return self.kind.step_s(global_batch_size)

    def gain(self, progress: float, batch: int) -> float:
        """Base steps that a step is worth."""
        noise = self.kind.noise(min(progress / self.base_steps, 1.0))
        return float(efficiency(self.moments(noise), batch / BASE)) * batch / BASE

    def moments(self, noise: float) -> GradGroups:
        """Exact, in the norm that the optimizer divides by."""
        by_size = self.optimizer in ("adamw", "adagrad")
        divide = 1 / math.sqrt(1 + noise / BASE) if by_size else 1.0
        sqr, var = [WIDTH**2 * divide], [WIDTH**2 * noise / BASE * divide]
        if self.kind.has_table:
            p = REALISED[REALISED > 0]
            signal, trace = (TABLE_SIGNAL * p) ** 2, TABLE_SIGNAL**2 * p * (1 - p) / BASE
            weight = 1 / np.sqrt(signal + trace) if by_size else np.ones_like(p)
            sqr.append(float(TABLE_WIDTH * np.sum(weight * signal)))
            var.append(float(TABLE_WIDTH * np.sum(weight * trace)))
        return GradGroups(sqr=np.array(sqr), var=np.array(var))

    def seconds(self, batch: int) -> float:
        """Of a whole run with a constant batch."""
        shares = (np.arange(200) + 0.5) / 200
        gains = np.array([self.gain(float(share) * self.base_steps, batch) for share in shares])
        return float(np.mean(1 / gains)) * self.step_s(batch) * self.base_steps

    @property
    def best(self) -> int:
        """The best constant batch."""
        return min(SIZES, key=self.seconds)

    @classmethod
    def of_length(cls, kind: Kind, optimizer: str, steps: int) -> "Planted":
        """The problem whose best constant batch takes so many steps."""
        one = cls(kind, optimizer, 1.0)
        return cls(kind, optimizer, steps * kind.step_s(one.best) / one.seconds(one.best))


class Noise(Source):
    """Rows of noise, scaled as the progress says when they are read."""

    def __init__(self, planted: Planted, seed: int):
        rng = np.random.default_rng(seed)
        made = rng.standard_normal((NUM_ROWS, WIDTH * WIDTH), dtype=np.float32)
        self.rows = made - made.mean(axis=0)
        self.ids = IDS
        self.planted, self.progress, self.seconds = planted, 0.0, 0.0

    def __len__(self) -> int:
        return NUM_ROWS

    def batch(self, indices: np.ndarray) -> Any:
        # A signal of 1 in every entry has a squared norm of one per entry, as has noise of deviation 1.
        noise = self.planted.kind.noise(min(self.progress / self.planted.base_steps, 1.0))
        return {"x": self.rows[indices] * np.float32(math.sqrt(noise)), "id": self.ids[indices]}


class Slope(jg.Trainer):
    """A loss that is linear in its parameters, so that the gradient is what was planted."""

    def __init__(self, config: jg.Config, planted: Planted, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.planted = planted
        self.source = Noise(planted, config.seed)

    def init(self, key):
        made = {"w": jnp.zeros((WIDTH, WIDTH))}
        if self.planted.kind.has_table:
            made["table"] = jnp.zeros((NUM_IDS, TABLE_WIDTH))
        return made

    def loss(self, params, batch, key):
        loss = jnp.sum(params["w"].reshape(-1) * (1 + batch["x"]), axis=1)
        if "table" in params:
            loss += TABLE_SIGNAL * jnp.sum(params["table"][batch["id"]], axis=1)
        return loss

    def optimizer(self):
        return OPTIMIZERS[self.planted.optimizer]()

    def dataset(self):
        return self.source


class ByProgress(PlantedLoop):
    """Counts true progress, tells the noise of it, and ends the run when there is enough."""

    def _read(self, metrics, count):
        found = super()._read(metrics, count)
        task: Any = self.task
        planted, source = task.planted, task.source
        for metrics, _ in found:
            batch, left = int(metrics.num_samples), planted.base_steps - source.progress
            worth = planted.gain(source.progress, batch)
            if left > 0:
                source.seconds += planted.step_s(batch) * min(left / worth, 1.0)
                source.progress += worth
        return found

    def _is_complete(self):
        task: Any = self.task
        return task.source.progress >= task.planted.base_steps


class Listener(jg.Hook):
    """Which batches were used, and why."""

    def __init__(self):
        self.batches: list[int] = []
        self.verdicts: list[str] = []

    def on_step_end(self, event: StepEnd, /) -> None:
        if self.batches[-1:] != [event.config.global_batch_size]:
            self.batches.append(event.config.global_batch_size)

    def on_tune_end(self, event: TuneEnd, /) -> None:
        self.verdicts.append(f"{event.step}: {event.verdict.reason}")


def run(planted: Planted, seed: int, cache: str) -> tuple[float, Listener]:
    """Return the planted seconds of a run."""
    with tempfile.TemporaryDirectory() as parent:
        config = jg.Config(
            workdir=str(pathlib.Path(parent) / "run"),
            seed=seed,
            batch=jg.BatchLimits(base=BASE, max=SIZES[-1], sizes=SIZES, max_micro_batches=1),
            base_steps=round(planted.base_steps),
            execution=jg.Execution(background_compile=False, compilation_cache=cache, prefetch=0),
            tuning=jg.Tuning(remember=False),
            reporting=jg.Reporting(tensorboard=False, progress=False),
            saving=jg.Saving(at_end=False, every_s=1e9),
        )
        heard, devices = Listener(), jax.devices()[:1]
        trainer = Slope(
            config, planted, clock=FakeClock(), loop=ByProgress, hooks=[heard], devices=devices
        )
        trainer.fit()
    if trainer.source.progress < planted.base_steps:
        raise RuntimeError("the run has ended before its true progress was made")
    return trainer.source.seconds, heard


def compare(name: str, optimizer: str, steps: int, cache: str) -> float:
    """Print one row; return the median ratio to the best constant batch."""
    planted = Planted.of_length(KINDS[name], optimizer, steps)
    best_s, base_s = planted.seconds(planted.best), planted.seconds(BASE)
    runs = [run(planted, seed, cache) for seed in range(FLAGS.seeds)]
    ratios = [seconds / best_s for seconds, _ in runs]
    if FLAGS.verbose:
        print("\n".join(runs[0][1].verdicts))
    ratio = statistics.median(ratios)
    print(
        f"| {name} | {optimizer} | {steps:,} | {planted.best} | {base_s / best_s:.2f} "
        f"| {ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f}) "
        f"| {' '.join(map(str, runs[0][1].batches))} |",
        flush=True,
    )
    return ratio


def main(_: Any) -> None:
    """Print the table."""
    logging.set_verbosity(logging.ERROR)
    # The planted step has a large fixed part, as on an accelerator; what is known of CPUs does not hold.
    compile_ahead.FIXED_ON_CPU_S = math.inf
    print("| noise | optimizer | steps | best constant | base / best | adaptive / best | batches |")
    print("|---|---|---|---|---|---|---|")
    found: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        names = itertools.product(FLAGS.lengths, FLAGS.kinds or KINDS, FLAGS.optimizers)
        for length, name, optimizer in names:
            if (name, optimizer) == ("mixed", "muon"):
                continue  # a table of rows is no matrix
            steps = int(length)
            found.setdefault(steps, []).append(compare(name, optimizer, steps, cache))
    for steps, ratios in found.items():
        print(f"{steps:,} steps: worst {max(ratios):.3f}, median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    app.run(main)
