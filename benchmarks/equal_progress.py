"""Compares models at the same progress: with the base batch, and with a batch that was forced to grow.

    python benchmarks/equal_progress.py                              # all tables, 5 seeds
    python benchmarks/equal_progress.py --workloads mlp --optimizers adamw,muon --seeds 3 --factors 4

A run ends after so many base steps. One side keeps the base batch; the others are told, after 10, 30 and
60 % of them, to take 4 or 16 times as many samples per update from there on. Learning-rate rule and schedule
clock are those that the Trainer chooses; `--rule` names another. Where progress means what it says, all
sides end equal.

The figure of a row is the mean over seeds of (side - base), of the final metric and of the final test
loss, with the standard error of that mean; "beyond" marks a difference of more than two of them to the
worse.
"""

import dataclasses
import importlib
import math
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import everyday
import flax.linen as nn
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from absl import app, flags, logging

import jaxgoodput as jg
from jaxgoodput.observe.events import StepEnd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

corpora: Any = importlib.import_module("corpora")
quickstart: Any = importlib.import_module("quickstart")

FLAGS = flags.FLAGS
flags.DEFINE_list("workloads", ["mlp", "cnn", "decoder", "ratings"], "Which tables.")
flags.DEFINE_list(
    "optimizers",
    ["sgd", "adamw", "adagrad", "adagrad_1e-6", "lion", "muon"],
    "Which optimizers.",
)
flags.DEFINE_integer("seeds", 5, "Runs of each side.")
flags.DEFINE_list("factors", ["4", "16"], "How much the batch grows.")
flags.DEFINE_string("rule", "", "A rule of jaxgoodput.rules instead of the one chosen.")
flags.DEFINE_bool("verbose", False, "Print every run.")

SHARES = (0.1, 0.3, 0.6)
Side = tuple[int, float]
"""How much the batch grows, and after which share of the run."""
BASE: Side = (1, 1.0)
MLP = jg.from_linen(
    nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(128), nn.relu, nn.Dense(10)])
)


class Mlp(quickstart.Digits):
    """Two dense layers on the digits."""

    def init(self, key):
        return MLP.init(key, jnp.zeros((1, 8, 8, 1)))

    def loss(self, params, batch, key):
        logits = MLP.predict(params, {}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def metrics(self, params, batch):
        guess = MLP.predict(params, {}, batch["image"]).argmax(axis=-1)
        return {"accuracy": (guess == batch["label"]).astype(jnp.float32)}


class Decoder(models.ByteLm):
    """Two layers of a transformer on the bytes of Python's standard library."""

    layers, width, length = 2, 64, 48

    def columns(self, part):
        windows = corpora.byte_windows(self.length)[part]
        return {"tokens": windows.astype(np.int32)}

    def dataset(self):
        return self.columns(0)

    def eval_dataset(self):
        return self.columns(1)

    def metrics(self, params, batch):
        loss: Any = self.loss(params, batch, jax.random.key(0))
        return {"bits_per_byte": loss.sum / loss.weight / np.log(2)}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A trainer, its length, and the peak learning rate of each optimizer at the base batch."""

    trainer: type[Any]
    base: int
    base_steps: int
    metric: str
    higher_is_better: bool
    rates: dict[str, float]
    warm_up: float = 0.0
    """The share of the base steps in which the rate rises; a cosine follows."""
    is_constant: bool = False
    """Whether the rate is constant, without a cosine."""


WORKLOADS = {
    "mlp": Workload(
        Mlp,
        16,
        600,
        "accuracy",
        True,
        {"sgd": 0.05, "adamw": 2e-3, "adagrad": 0.03, "lion": 3e-4, "muon": 5e-3},
    ),
    "cnn": Workload(
        quickstart.Digits,
        16,
        600,
        "accuracy",
        True,
        {"sgd": 0.05, "adamw": 1e-3, "adagrad": 0.01, "lion": 2e-4, "muon": 5e-3},
    ),
    "decoder": Workload(
        Decoder,
        8,
        600,
        "bits_per_byte",
        False,
        # Near the best of 1.5, 3, 6 and 12e-3 for AdamW, and of 5, 10, 20 and 40e-3 for Muon.
        {"adamw": 6e-3, "muon": 2e-2},
        warm_up=1 / 16,
    ),
    "ratings": Workload(
        everyday.Ratings,
        256,
        45_000,
        "held_out",
        False,
        {"adagrad_1e-6": 0.05},
        is_constant=True,
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9),
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.01),
    "adagrad": lambda rate: optax.adagrad(rate, initial_accumulator_value=1e-4),
    "adagrad_1e-6": lambda rate: optax.adagrad(rate, initial_accumulator_value=1e-6),
    "lion": lambda rate: optax.lion(rate, weight_decay=0.01),
    "muon": lambda rate: optax.contrib.muon(rate),
}


class Grow(jg.Hook):
    """Asks for a larger batch once so much progress is made."""

    def __init__(self, at: float, batch: int):
        self.at, self.batch, self.trainer = at, batch, None
        self.updates = 0

    def on_step_end(self, event: StepEnd, /) -> None:
        self.updates += 1
        if self.at <= event.progress and self.trainer is not None:
            self.trainer.request_batch(self.batch)
            self.trainer = None


def run(
    workload: Workload, optimizer: str, side: Side, seed: int, programs: str
) -> tuple[dict[str, float], int]:
    """The final metrics and the number of updates.

    programs: the folder in which runs find what those before them compiled.
    """
    factor, share = side
    steps, base = workload.base_steps, workload.base
    rate, rising = workload.rates[optimizer], round(steps * workload.warm_up)
    schedule = optax.cosine_decay_schedule(rate, steps)
    if workload.is_constant:
        schedule = optax.constant_schedule(rate)
    elif rising:
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, rising, steps)

    class Trained(workload.trainer):
        def learning_rate(self, progress: Any) -> Any:
            return schedule(progress)

        def optimizer(self) -> optax.GradientTransformation:
            return OPTIMIZERS[optimizer](schedule)

        def metrics(self, params: Any, batch: Any) -> dict[str, Any]:
            loss: Any = self.loss(params, batch, jax.random.key(0))
            loss = loss.sum / loss.weight if isinstance(loss, jg.Loss) else loss
            return {**super().metrics(params, batch), "test_loss": loss}

        def summarize(self, outputs: Any) -> dict[str, float]:
            return {**super().summarize(outputs), "test_loss": float(np.mean(outputs["test_loss"]))}

    sizes = tuple(sorted({base, *(base * int(x) for x in FLAGS.factors)}))
    with tempfile.TemporaryDirectory() as workdir:
        config = jg.Config(
            workdir=workdir,
            seed=seed,
            batch=jg.BatchLimits(base=base, max=max(sizes), sizes=sizes, max_micro_batches=1),
            base_steps=steps,
            rule=getattr(jg.rules, FLAGS.rule) if FLAGS.rule else None,
            # Nobody else decides, no run begins where another ended, and a size that is asked for is there.
            tuning=jg.Tuning(warm_up_steps=10**9, remember=False),
            reporting=jg.Reporting(tensorboard=False, progress=False),
            saving=jg.Saving(at_end=False, every_s=1e9),
            execution=jg.Execution(compilation_cache=programs, background_compile=False),
        )
        hook = Grow(share * steps, base * factor)
        trainer = Trained(config, hooks=[hook], devices=jax.devices()[:1])
        hook.trainer = trainer if side != BASE else None
        found = trainer.evaluate(trainer.fit())
    return {k: float(found[k]) for k in (workload.metric, "test_loss")}, hook.updates


def compare(name: str, workload: Workload, optimizer: str) -> None:
    """One table."""
    sides = [BASE, *((int(factor), share) for factor in FLAGS.factors for share in SHARES)]
    results: dict[Side, list[dict[str, float]]] = {side: [] for side in sides}
    updates: dict[Side, list[int]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as programs:
        for seed in range(FLAGS.seeds):
            for side in sides:
                found, count = run(workload, optimizer, side, seed, programs)
                results[side].append(found)
                updates[side].append(count)
                if FLAGS.verbose:
                    print(f"{name} {optimizer} seed {seed} {_named(side)}: {found}", flush=True)
    signs = {workload.metric: 1 if workload.higher_is_better else -1, "test_loss": -1}
    for side, rows in results.items():
        cells = []
        for metric, sign in signs.items():
            values = [row[metric] for row in rows]
            cell = f"{statistics.mean(values):.4f}"
            if side != BASE:
                pairs = zip(values, results[BASE], strict=True)
                gaps = [value - base[metric] for value, base in pairs]
                mean = statistics.mean(gaps)
                error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
                beyond = " beyond" if sign * mean < -2 * error else ""
                cell += f" ({mean:+.4f} +- {error:.4f}{beyond})"
            cells.append(cell)
        print(
            f"| {name} | {optimizer} | {_named(side)} | {statistics.mean(updates[side]):.0f} | "
            + " | ".join(cells)
            + " |",
            flush=True,
        )


def _named(side: Side) -> str:
    return "base batch" if side == BASE else f"x{side[0]} at {side[1]:.0%}"


def main(_: Any) -> None:
    """Print the tables."""
    logging.set_verbosity(logging.ERROR)
    print("| workload | optimizer | batch | updates | metric | test loss |")
    print("|---|---|---|---|---|---|")
    for name in FLAGS.workloads:
        for optimizer in FLAGS.optimizers:
            if optimizer in WORKLOADS[name].rates:
                compare(name, WORKLOADS[name], optimizer)


if __name__ == "__main__":
    app.run(main)
