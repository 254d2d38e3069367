"""Compares the noise scale that a run states, with its 80 % interval, with exact noise scales along the run.

    python benchmarks/noise_intervals.py                                  # five workloads, 2 seeds
    python benchmarks/noise_intervals.py --workloads recommender --seeds 1

A run with the base batch is looked at ten times. At each point the parameters, the model's state and the
optimizer's preconditioner are frozen, and the gradients of 300 whole base batches give the exact moments of
every group, weighted as the run weights them. Printed are noise scales in samples:

* believed: what decisions rest on (`NoiseReadout.expected`).
* stated: the middle of the interval, and the interval (`StepMetrics.noise_interval`).
* exact: of 300 batches at this one state.
* around: of 30 batches at each of ten states, up to this one, over the last twentieth of the run; moments are
  averaged over states. It tells how much of the difference is that between one state and the next.
* frozen: what the run's own estimator says at this one state, averaged over 300 batches. It differs from
  "exact" by what its parts of a batch share, such as batch statistics.

Then, by workload: the number of points whose exact noise scale lies inside, the median of upper over lower,
and the medians of believed, stated and frozen over exact. "mlp", "digits" (an MLP, too) and "cnn", which has
batch normalisation, are trained by SGD with momentum; "decoder" by AdamW; "clicks" and "recommender", which
have embedding tables, by Adagrad.
"""

import dataclasses
import functools
import importlib
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from everyday import WORKLOADS as EVERYDAY
from everyday import Pictures

import jaxgoodput as jg
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import abstract_sample
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.state import TrainState, split
from jaxgoodput.goodput.efficiency import GradGroups, noise_scale
from jaxgoodput.goodput.intervals import NoiseInterval
from jaxgoodput.optim import adaptation
from jaxgoodput.optim import noise as noises
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.start.problem import problem_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

quickstart: Any = importlib.import_module("quickstart")
recommender: Any = importlib.import_module("recommender")

FLAGS = flags.FLAGS
flags.DEFINE_list("workloads", ["mlp", "decoder", "cnn", "clicks", "digits"], "Which ones.")
flags.DEFINE_integer("seeds", 2, "Runs of each.")
flags.DEFINE_integer("first", 0, "First seed.")

NUM_POINTS, NUM_BATCHES, NUM_STATES = 10, 300, 10
DIGITS = jg.from_linen(
    nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(128), nn.relu, nn.Dense(10)])
)


class Network(nn.Module):
    """Three convolutions with batch normalisation."""

    @nn.compact
    def __call__(self, x, train):
        for features, size in ((8, 2), (16, 2), (16, 1)):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (size, size), (size, size))
        return nn.Dense(10)(x.reshape(len(x), -1))


NORMALISED = jg.from_linen(Network(), train_kwargs={"train": True}, predict_kwargs={"train": False})


class Normalised(Pictures):
    """The pictures, with batch normalisation."""

    def init(self, key):  # pyright: ignore[reportIncompatibleMethodOverride]
        return NORMALISED.init(key, jnp.zeros((1, self.side, self.side, 1)))

    def loss_and_state(self, params, model_state, batch, key):
        logits, model_state = NORMALISED.train(params, model_state, key, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses, model_state


class Digits(quickstart.Digits):
    """Two dense layers on the digits."""

    def init(self, key):
        return DIGITS.init(key, jnp.zeros((1, 8, 8, 1)))

    def loss(self, params, batch, key):
        logits = DIGITS.predict(params, {}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def learning_rate(self, progress):
        return optax.cosine_decay_schedule(0.05, 600)(progress)

    def optimizer(self):
        return optax.sgd(self.learning_rate, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A task, its base batch, and the base steps of a run."""

    task: type[Any]
    base: int
    base_steps: int
    loss: str = "auto"


WORKLOADS = {
    "digits": Workload(Digits, 16, 600),
    "mlp": Workload(EVERYDAY["regression"].task, 32, 4000),
    "decoder": Workload(EVERYDAY["headers"].task, 16, 1400),
    "cnn": Workload(Normalised, 32, 1500, loss="whole"),
    "clicks": Workload(EVERYDAY["clicks"].task, 128, 4000),
    "recommender": Workload(recommender.Recommender, 512, 1000),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """What was stated and found at one point of a run, in samples."""

    step: int
    believed: float
    stated: NoiseInterval
    exact: float
    around: float
    frozen: float

    def holds(self, exact: float) -> bool:
        """Whether an exact noise scale lies inside."""
        return self.stated.lower <= exact <= self.stated.upper


class Moments:
    """Exact moments by group at frozen states, in the run's own weighting."""

    def __init__(self, problem: Any, source: Any, base: int):
        self.problem, self.source, self.base = problem, source, base

    def of(self, state: TrainState, rng: np.random.Generator, num_batches: int) -> GradGroups:
        """The moments at one state, unbiased."""
        kept, rest = split(state.params, self.problem.mask(state.params))
        factor = self.problem.preconditioner(state.opt_state, kept)
        total = jax.tree.map(jnp.zeros_like, kept)
        small: Any = 0.0
        for i in range(num_batches):
            rows = self.source.batch(rng.integers(0, len(self.source), self.base))
            about = (kept, rest, state.model_state, factor, rows, jax.random.key(i))
            total, norms = self._add(*about, total)
            small = small + norms
        return self._moments(kept, total, small, factor, num_batches)

    def _mean_loss(self, kept: Any, rest: Any, model_state: Any, rows: Any, key: Any) -> Any:
        params = jax.tree.map(
            lambda a, b: b if a is None else a, kept, rest, is_leaf=lambda x: x is None
        )
        out, _ = self.problem.loss_and_state(params, model_state, rows, key)
        return jnp.sum(out.sum) / jnp.sum(out.weight) if isinstance(out, jg.Loss) else jnp.mean(out)

    def _norms(self, grads: Any, factor: Any) -> Any:
        return self.problem.apart(
            lambda pick: noises.squared_norms(
                pick(grads, 0.0), None if factor is None else pick(factor, 1.0)
            )
        )

    @functools.partial(jax.jit, static_argnums=0)
    def _add(
        self, kept: Any, rest: Any, model_state: Any, factor: Any, rows: Any, key: Any, total: Any
    ) -> tuple[Any, Any]:
        grads = jax.grad(self._mean_loss)(kept, rest, model_state, rows, key)
        return jax.tree.map(jnp.add, total, grads), self._norms(grads, factor)

    @functools.partial(jax.jit, static_argnums=0)
    def _moments(self, kept: Any, total: Any, small: Any, factor: Any, num: Any) -> GradGroups:
        mean = jax.tree.map(lambda x: x / num, total)
        sample = noises.NoiseSample(
            small_sqr=small / num,
            large_sqr=self._norms(mean, factor),
            num_groups=jnp.asarray(num, jnp.float32),
            num_samples=jnp.asarray(num * self.base, jnp.float32),
        )
        tx = self.problem.tx  # it weights and pools the norms; a first sample is the average
        found = tx.decide(kept, tx.init(kept), global_batch_size=self.base, noise=sample)
        averages = found.own.tree.groups.current
        return GradGroups(sqr=averages.sqr[:-1], var=averages.var[:-1])


def scale_of(moments: Sequence[GradGroups], base: int) -> float:
    """The noise scale of averaged moments, in samples."""
    sqr = np.maximum(np.mean([m.sqr for m in moments], axis=0), 0)
    var = np.maximum(np.mean([m.var for m in moments], axis=0), 0)
    return float(noise_scale(GradGroups(sqr=sqr, var=var), base))


class Run:
    """One run of a workload with its base batch."""

    def __init__(self, workload: Workload, seed: int):
        self.workload, self.seed = workload, seed
        config = jg.Config(
            workdir="",
            seed=seed,
            batch=jg.BatchLimits(base=workload.base, max=64 * workload.base),
            base_steps=workload.base_steps,
            policy="fixed",
            loss=workload.loss,  # pyright: ignore[reportArgumentType]
        )
        task = workload.task(config)
        self.source = as_source(task.dataset())
        problem = problem_of(task, config)
        self.engine = Engines(problem, abstract_sample(self.source)).on(
            Strategy().on(jax.devices()[:1])
        )
        lies = self.engine.layout.batch_sharding
        self.mask = jax.device_put(np.ones(workload.base, np.float32), lies)
        self.moments = Moments(problem, self.source, workload.base)

    def step(self, state: TrainState, indices: np.ndarray) -> tuple[TrainState, Any]:
        """One update that measures the noise."""
        rows = jax.device_put(self.source.batch(indices), self.engine.layout.batch_sharding)
        return self.engine.step(state, None, rows, self.mask)

    def points(self) -> Iterator[Point]:
        """Train, and look at every tenth of the run."""
        base, steps = self.workload.base, self.workload.base_steps
        every = steps // NUM_POINTS
        gap = max(every // (2 * NUM_STATES), 1)
        rng, exact_rng = np.random.default_rng(self.seed), np.random.default_rng([self.seed, 1])
        passes = math.ceil(steps * base / len(self.source))
        order = np.concatenate([rng.permutation(len(self.source)) for _ in range(passes)])
        state = self.engine.init(jax.random.key(self.seed))
        around: list[GradGroups] = []
        for step in range(1, steps + 1):
            state, packed = self.step(state, order[(step - 1) * base : step * base])
            left = -step % every
            if left % gap == 0 and left < gap * NUM_STATES:
                around.append(self.moments.of(state, exact_rng, NUM_BATCHES // NUM_STATES))
            if left:
                continue
            metrics, _ = self.engine.read(packed)
            exact = self.moments.of(state, exact_rng, NUM_BATCHES)
            frozen = self.frozen(state, exact_rng)
            yield Point(
                step=step,
                believed=float(noise_scale(metrics.noise.expected, base)),
                stated=metrics.noise_interval(base),
                exact=scale_of([exact], base),
                around=scale_of(around, base),
                frozen=scale_of([frozen], base),
            )
            around.clear()

    def frozen(self, state: TrainState, rng: np.random.Generator) -> GradGroups:
        """What the run's estimator says at one state."""

        def blank(own: adaptation.Adaptation) -> adaptation.Adaptation:
            groups = noises.init_noise(own.groups.current.sqr.size - 1)
            return dataclasses.replace(own, groups=groups)

        opt_state = adaptation.with_own(state.opt_state, blank)
        state = dataclasses.replace(state, opt_state=opt_state)
        found = []
        for _ in range(NUM_BATCHES):
            copy = jax.tree.map(jnp.copy, state)
            copy, _ = self.step(copy, rng.integers(0, len(self.source), self.workload.base))
            averages = jax.device_get(adaptation.find(copy.opt_state).groups.current)
            found.append((averages.sqr[:-1], averages.var[:-1]))
        sqr, var = np.mean(found, axis=0)
        return GradGroups(sqr=sqr, var=var)


def summary(name: str, points: Sequence[Point]) -> str:
    """The row of a workload."""
    ratios = [(p.believed / p.exact, p.stated.middle / p.exact, p.frozen / p.exact) for p in points]
    typical = " | ".join(f"{statistics.median(column):.2f}" for column in zip(*ratios, strict=True))
    return (
        f"| {name} | {len(points)} | {sum(p.holds(p.exact) for p in points)} | "
        f"{sum(p.holds(p.around) for p in points)} | "
        f"{statistics.median(p.stated.upper / p.stated.lower for p in points):.1f} | {typical} |"
    )


def main(_: Any) -> None:
    """Print the tables."""
    logging.set_verbosity(logging.ERROR)
    print(
        "| workload | seed | base steps | believed | stated | interval | exact | around | frozen | inside |"
    )
    print("|---" * 10 + "|")
    found: dict[str, list[Point]] = {}
    for name in FLAGS.workloads:
        for seed in range(FLAGS.first, FLAGS.first + FLAGS.seeds):
            for p in Run(WORKLOADS[name], seed).points():
                found.setdefault(name, []).append(p)
                print(
                    f"| {name} | {seed} | {p.step} | {p.believed:.0f} | {p.stated.middle:.0f} | "
                    f"{p.stated.lower:.0f} to {p.stated.upper:.0f} | {p.exact:.0f} | {p.around:.0f} | "
                    f"{p.frozen:.0f} | {'yes' if p.holds(p.exact) else 'no'} |",
                    flush=True,
                )
    print()
    print(
        "| workload | points | exact inside | around inside | upper / lower | believed / exact | "
        "stated / exact | frozen / exact |"
    )
    print("|---" * 8 + "|")
    for name, points in found.items():
        print(summary(name, points))


if __name__ == "__main__":
    app.run(main)
