"""Compares the predicted with the measured efficiency of samples in a larger batch.

    python benchmarks/predicted_efficiency.py                                 # three workloads
    python benchmarks/predicted_efficiency.py --workloads recommender --draws 8 --settle 65536

An example is trained with its base batch to three points. From the state at each of them training goes on
for so many samples (65,536 of the recommender) with the base batch and, on the same samples, with larger
ones: the learning rate by the rule and the noise statistics that the run has then. Efficiency is the
decrease of the held-out loss over that of the base batch, both means over runs (`--seeds`) and draws of the
samples (`--draws`); behind it stands its standard error, over runs where there are several. Draws of one
run share its state, and with it whatever luck its last updates had. The loss is taken on a part of the
training set that is never trained on: a test set of another distribution, like the recommender's, would
measure how that differs.

What is compared with it is predicted at the point, before those samples: by group of parameters (what the
project decides by, with the norm that the example's configuration says) and pooled over all parameters, in
the norm g' P^-1 g of the optimizer's division P and in the plain one. (Without a division they are one.)
Those by group are expected values, the pooled ones plain averages, where a squared gradient estimated below 0
counts as 0: all noise, and an efficiency of 1.
"booked" is the progress that training itself credits over the stretch: less than predicted where the gain
was still growing.

That is what a sudden jump costs: the gain grows by a ninth per update at most, so that a batch 16 times as
large, which a run would reach in two changes, takes 13 to 26 updates to get there, more than some stretches
have. The measured decrease includes that; `--settle` trains so many samples at the forced batch before
the measured stretch begins. Each batch is then measured from its own loss.
"""

import dataclasses
import importlib
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

import jaxgoodput as jg
from jaxgoodput.goodput.efficiency import Grad, efficiency
from jaxgoodput.observe.events import StepEnd
from jaxgoodput.optim import adaptation
from jaxgoodput.train.start.problem import problem_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

language_model: Any = importlib.import_module("language_model")
quickstart: Any = importlib.import_module("quickstart")
recommender: Any = importlib.import_module("recommender")

FLAGS = flags.FLAGS
flags.DEFINE_list("workloads", ["recommender", "lm", "digits"], "Which rows.")
flags.DEFINE_list("points", [], "Base steps at which to measure, instead of each workload's own.")
flags.DEFINE_list("factors", [], "Batches, in base batches, instead of each workload's own.")
flags.DEFINE_integer("seeds", 0, "Runs; 0: each workload's own number.")
flags.DEFINE_integer("draws", 0, "Continuations of each point; 0: each workload's own number.")
flags.DEFINE_integer("samples", 0, "Of the measured stretch; 0: each workload's own number.")
flags.DEFINE_integer("settle", 0, "Samples at the forced batch before the measured stretch.")
flags.DEFINE_string("rule", "", "A rule of jaxgoodput.rules instead of the example's.")
flags.DEFINE_bool("verbose", False, "Print every continuation.")

COLUMNS = ("by group, P^-1", "by group, plain", "pooled, P^-1", "pooled, plain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """An example, where it is looked at, and for how long."""

    trainer: type[Any]
    config: Callable[[str], jg.Config]
    points: tuple[int, ...]  # base steps
    factors: tuple[int, ...]  # batches, in base batches
    samples: int  # of the measured stretch
    held_out: int
    seeds: int  # runs
    draws: int  # of each run, at each point


WORKLOADS = {
    "recommender": Workload(
        trainer=recommender.Recommender,
        config=recommender.default_config,
        points=(200, 800, 2000),
        factors=(4, 16),
        samples=65_536,
        held_out=2**16,
        seeds=3,
        draws=3,
    ),
    "lm": Workload(
        trainer=language_model.ByteModel,
        config=language_model.default_config,
        points=(100, 300, 600),
        factors=(4, 8),
        samples=2048,
        held_out=1024,
        seeds=2,
        draws=2,
    ),
    "digits": Workload(
        trainer=quickstart.Digits,
        config=quickstart.default_config,
        points=(20, 50, 100),
        factors=(4, 8),  # x16 would take as many updates to settle as there are
        samples=4096,
        held_out=360,
        seeds=8,
        draws=2,
    ),
}


class Until(jg.Hook):
    """Ends a run after so many base steps, as if it were complete: schedules do not know of it."""

    def __init__(self, base_steps: float):
        self.base_steps = base_steps
        self.trainer: Any = None

    def on_step_end(self, event: StepEnd, /) -> None:
        if event.progress >= self.base_steps:
            self.trainer.finish()


def measured(workload: Workload) -> type[Any]:
    """The example, with a part of its training set kept apart."""

    class Measured(workload.trainer):
        def parts(self) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
            data = super().dataset()
            order = np.random.default_rng(0).permutation(len(next(iter(data.values()))))
            held, kept = order[: workload.held_out], np.sort(order[workload.held_out :])
            return {k: v[kept] for k, v in data.items()}, {k: v[held] for k, v in data.items()}

        def dataset(self) -> Any:
            return self.parts()[0]

    return Measured


def config_of(
    workload: Workload, workdir: str, *, seed: int = 0, preconditioned: bool | None = None
) -> jg.Config:
    """The example's own, at its base batch, with the noise measured at every step."""
    config = workload.config(workdir)
    statistics = dataclasses.replace(config.statistics, every_steps=1)
    if preconditioned is not None:
        statistics = dataclasses.replace(statistics, preconditioned=preconditioned)
    return dataclasses.replace(
        config,
        seed=seed,
        policy="fixed",
        rule=getattr(jg.rules, FLAGS.rule) if FLAGS.rule else config.rule,
        statistics=statistics,
        evaluation=jg.Evaluation(),
        reporting=dataclasses.replace(config.reporting, tensorboard=False, progress=False),
    )


def train(workload: Workload, config: jg.Config, point: int) -> Any:
    """The state at a point; goes on from the one before, which lies in the workdir."""
    hook = Until(point)
    trainer = measured(workload)(config, hooks=[hook], devices=jax.devices()[:1])
    hook.trainer = trainer
    return trainer.fit()


def predicted(readouts: Mapping[bool, Any], scale: float) -> list[float]:
    """The worth of a sample by each of `COLUMNS`; `readouts` by whether P was divided by."""
    with_p, plain = readouts[True], readouts[False]
    grads: list[Grad] = [with_p.expected, plain.expected, with_p.plain, plain.plain]
    return [float(efficiency(grad, np.asarray(scale))) for grad in grads]


class Continuations:
    """Training from a given state, with any batch."""

    def __init__(self, workload: Workload, config: jg.Config):
        task = self.task = measured(workload)(config)
        problem = problem_of(task, config)
        self.preconditioned = problem.preconditioned
        self.data, self.held_out = task.parts()
        self.base: int = config.batch.base

        def mean_loss(params: Any, batch: Any) -> jax.Array:
            return task.loss(params, batch, jax.random.key(0)).mean()

        def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
            num_samples = len(next(iter(batch.values())))
            grads = jax.grad(mean_loss)(params, batch)
            updates, opt_state = problem.tx.update(
                grads, opt_state, params, global_batch_size=num_samples
            )
            return optax.apply_updates(params, updates), opt_state

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._mean_loss = jax.jit(mean_loss)

    @property
    def num_samples(self) -> int:
        """That may be trained on."""
        return len(next(iter(self.data.values())))

    def loss(self, params: Any) -> float:
        """On what is held out."""
        total = len(next(iter(self.held_out.values())))
        parts = np.array_split(np.arange(total), math.ceil(total / 4096))
        losses = [
            len(part) * float(self._mean_loss(params, _rows(self.held_out, part))) for part in parts
        ]
        return sum(losses) / total

    def decrease(self, state: Any, order: np.ndarray, batch: int) -> tuple[float, float]:
        """Of the held-out loss after the first `--settle` samples of `order`; and the progress booked."""
        params, opt_state = jax.tree.map(jnp.copy, (state.params, state.opt_state))
        before = after = math.nan
        began = 0.0
        for start in range(0, len(order), batch):
            if start == FLAGS.settle:
                before, began = self.loss(params), float(adaptation.progress(opt_state))
            rows = _rows(self.data, order[start : start + batch])
            params, opt_state = self._step(params, opt_state, rows)
        after = self.loss(params)
        return before - after, float(adaptation.progress(opt_state)) - began


def _rows(data: Mapping[str, np.ndarray], at: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[at] for name, values in data.items()}


@dataclasses.dataclass(frozen=True)
class Row:
    """One batch at one point."""

    measured: float
    error: float  # standard
    predictions: list[float]
    own: float  # what the project decides by


def compare(name: str, workload: Workload) -> list[Row]:
    """The rows of one workload, printed as they come."""
    factors = [int(factor) for factor in FLAGS.factors] or list(workload.factors)
    samples = FLAGS.samples or workload.samples
    seeds, draws = FLAGS.seeds or workload.seeds, FLAGS.draws or workload.draws
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        going_on = Continuations(workload, config_of(workload, parent))
        own, base = going_on.preconditioned, going_on.base
        largest = base * max(factors)
        if samples % largest or FLAGS.settle % largest:
            raise app.UsageError(
                f"--samples ({samples}) and --settle ({FLAGS.settle}) must be multiples of the largest "
                f"batch, {largest}: every batch is to see the same samples."
            )
        for point in [int(p) for p in FLAGS.points] or workload.points:
            # [factor][seed][draw]; [seed][factor][column]
            fell: dict[int, list[list[float]]] = {factor: [] for factor in (1, *factors)}
            booked: dict[int, list[float]] = {factor: [] for factor in fell}
            guesses: list[list[list[float]]] = []
            for seed in range(seeds):
                readouts: dict[bool, Any] = {}
                state: Any = None
                # A run for each norm, the project's own last; at the base batch their states are the same.
                for with_p in (not own, own):
                    workdir = f"{parent}/{seed}-{with_p}"
                    config = config_of(workload, workdir, seed=seed, preconditioned=with_p)
                    state = train(workload, config, point)
                    readouts[with_p] = jax.device_get(adaptation.readout(state.opt_state))
                guesses.append([predicted(readouts, factor) for factor in factors])
                for factor in fell:
                    fell[factor].append([])
                for draw in range(draws):
                    rng = np.random.default_rng([seed, point, draw])
                    order = _order(rng, going_on.num_samples, samples + FLAGS.settle)
                    for factor in fell:
                        value, progress = going_on.decrease(state, order, base * factor)
                        fell[factor][-1].append(value)
                        booked[factor].append(progress * base / samples)
                    if FLAGS.verbose:
                        last = {factor: round(fell[factor][-1][-1], 5) for factor in fell}
                        print(f"    {name} at {point}, seed {seed}: {last}", flush=True)
            for i, factor in enumerate(factors):
                worth, error = _ratio(fell[factor], fell[1])
                each = np.mean([of_seed[i] for of_seed in guesses], axis=0).tolist()
                rows.append(Row(worth, error, each, each[0 if own else 1]))
                cells = " | ".join(f"{guess:.2f}" for guess in each)
                print(
                    f"| {name} | {point} | {base * factor} | {np.mean(fell[1]):.4f} | {worth:.2f} +- "
                    f"{error:.2f} | {np.mean(booked[factor]):.2f} | {rows[-1].own:.2f} | {cells} |",
                    flush=True,
                )
    return rows


def _order(rng: np.random.Generator, num_samples: int, count: int) -> np.ndarray:
    """`count` samples, in passes over the data."""
    passes = [rng.permutation(num_samples) for _ in range(math.ceil(count / num_samples))]
    return np.concatenate(passes)[:count]


def _ratio(values: list[list[float]], base: list[list[float]]) -> tuple[float, float]:
    """The ratio of two means, `[seeds][draws]`, and its standard error."""
    ours, theirs = np.asarray(values), np.asarray(base)
    if len(ours) > 1:  # draws of a run are not independent of each other
        ours, theirs = ours.mean(axis=1), theirs.mean(axis=1)
    ours, theirs = ours.ravel(), theirs.ravel()
    ratio = ours.mean() / theirs.mean()
    if len(ours) < 2:
        return float(ratio), math.nan
    rest = (ours - ratio * theirs).std(ddof=1) / math.sqrt(len(ours))
    return float(ratio), float(abs(rest / theirs.mean()))


def main(_: Any) -> None:
    """Print the table."""
    logging.set_verbosity(logging.ERROR)
    unknown = set(FLAGS.workloads) - set(WORKLOADS)
    if unknown:
        raise app.UsageError(f"--workloads: {sorted(unknown)} is not among {sorted(WORKLOADS)}.")
    columns = ("predicted", *COLUMNS)
    print(
        "| workload | base steps | batch | decrease at base | measured | booked | "
        + " | ".join(columns)
        + " |"
    )
    print("|---" * (6 + len(columns)) + "|")
    rows = [row for name in FLAGS.workloads for row in compare(name, WORKLOADS[name])]
    for i, column in enumerate(columns):
        errors = [abs([row.own, *row.predictions][i] - row.measured) for row in rows]
        print(f"{column}: mean absolute error {np.mean(errors):.3f}, worst {max(errors):.3f}")
    unsure = sum(not row.error <= 0.05 for row in rows)
    print(f"{unsure} of {len(rows)} measured with a standard error above 0.05")


if __name__ == "__main__":
    app.run(main)
