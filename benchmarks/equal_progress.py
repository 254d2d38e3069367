"""Compares models at the same progress: with the base batch, and with a batch that was forced to grow.

    python benchmarks/equal_progress.py                              # all tables, 5 seeds
    python benchmarks/equal_progress.py --workloads mlp --optimizers adamw,lion --seeds 3

A run ends after so many base steps. One side keeps the base batch; the others are told, after 10, 30 and
60 % of them, to take 16 times as many samples per update from there on. Learning-rate rule and schedule
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

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

import jaxgoodput as jg
from jaxgoodput.observe.events import StepEnd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

language_model: Any = importlib.import_module("language_model")
quickstart: Any = importlib.import_module("quickstart")

FLAGS = flags.FLAGS
flags.DEFINE_list("workloads", ["mlp", "cnn", "lm"], "Which tables.")
flags.DEFINE_list("optimizers", ["sgd", "adamw", "adagrad", "lion"], "Which optimizers.")
flags.DEFINE_integer("seeds", 5, "Runs of each side.")
flags.DEFINE_integer("factor", 16, "How much the batch grows.")
flags.DEFINE_string("rule", "", "A rule of jaxgoodput.rules instead of the one chosen.")
flags.DEFINE_bool("verbose", False, "Print every run.")

SHARES = (0.1, 0.3, 0.6)
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


WORKLOADS = {
    "mlp": Workload(
        Mlp, 16, 600, "accuracy", True, {"sgd": 0.05, "adamw": 2e-3, "adagrad": 0.03, "lion": 3e-4}
    ),
    "cnn": Workload(
        quickstart.Digits,
        16,
        600,
        "accuracy",
        True,
        {"sgd": 0.05, "adamw": 1e-3, "adagrad": 0.01, "lion": 2e-4},
    ),
    "lm": Workload(
        language_model.ByteModel,
        8,
        500,
        "bits_per_byte",
        False,
        {"sgd": 0.1, "adamw": 2e-3, "adagrad": 0.03, "lion": 2e-4},
        warm_up=1 / 16,  # as its example; without one, seeds end up to 0.4 bits apart
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "sgd": lambda rate: optax.sgd(rate, momentum=0.9),
    "adamw": lambda rate: optax.adamw(rate, weight_decay=0.01),
    "adagrad": lambda rate: optax.adagrad(rate, initial_accumulator_value=1e-4),
    "lion": lambda rate: optax.lion(rate, weight_decay=0.01),
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
    workload: Workload, optimizer: str, share: float, seed: int, programs: str
) -> tuple[dict[str, float], int]:
    """The final metrics and the number of updates; `share` is 1 where the batch stays.

    programs: the folder in which runs find what those before them compiled.
    """
    steps, base = workload.base_steps, workload.base
    rate, rising = workload.rates[optimizer], round(steps * workload.warm_up)
    schedule = optax.cosine_decay_schedule(rate, steps)
    if rising:
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

    most = base * FLAGS.factor
    with tempfile.TemporaryDirectory() as workdir:
        config = jg.Config(
            workdir=workdir,
            seed=seed,
            batch=jg.BatchLimits(base=base, max=most, sizes=(base, most), max_micro_batches=1),
            base_steps=steps,
            rule=getattr(jg.rules, FLAGS.rule) if FLAGS.rule else None,
            # Nobody else decides, no run begins where another ended, and a size that is asked for is there.
            tuning=jg.Tuning(warm_up_steps=10**9, remember=False),
            reporting=jg.Reporting(tensorboard=False, progress=False),
            saving=jg.Saving(at_end=False, every_s=1e9),
            execution=jg.Execution(compilation_cache=programs, background_compile=False),
        )
        hook = Grow(share * steps, most)
        trainer = Trained(config, hooks=[hook], devices=jax.devices()[:1])
        hook.trainer = trainer if share < 1 else None
        found = trainer.evaluate(trainer.fit())
    return {k: float(found[k]) for k in (workload.metric, "test_loss")}, hook.updates


def compare(name: str, workload: Workload, optimizer: str) -> None:
    """One table."""
    results: dict[float, list[dict[str, float]]] = {share: [] for share in (1.0, *SHARES)}
    updates: dict[float, list[int]] = {share: [] for share in results}
    with tempfile.TemporaryDirectory() as programs:
        for seed in range(FLAGS.seeds):
            for share in results:
                found, count = run(workload, optimizer, share, seed, programs)
                results[share].append(found)
                updates[share].append(count)
                if FLAGS.verbose:
                    print(
                        f"{name} {optimizer} seed {seed} grown at {share:.0%}: {found}", flush=True
                    )
    signs = {workload.metric: 1 if workload.higher_is_better else -1, "test_loss": -1}
    for share, rows in results.items():
        cells = []
        for metric, sign in signs.items():
            values = [row[metric] for row in rows]
            cell = f"{statistics.mean(values):.4f}"
            if share < 1:
                pairs = zip(values, results[1.0], strict=True)
                gaps = [value - base[metric] for value, base in pairs]
                mean = statistics.mean(gaps)
                error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
                beyond = " beyond" if sign * mean < -2 * error else ""
                cell += f" ({mean:+.4f} +- {error:.4f}{beyond})"
            cells.append(cell)
        when = "base batch" if share == 1 else f"x{FLAGS.factor} at {share:.0%}"
        print(
            f"| {name} | {optimizer} | {when} | {statistics.mean(updates[share]):.0f} | "
            + " | ".join(cells)
            + " |",
            flush=True,
        )


def main(_: Any) -> None:
    """Print the tables."""
    logging.set_verbosity(logging.ERROR)
    print("| workload | optimizer | batch | updates | metric | test loss |")
    print("|---|---|---|---|---|---|")
    for name in FLAGS.workloads:
        for optimizer in FLAGS.optimizers:
            compare(name, WORKLOADS[name], optimizer)


if __name__ == "__main__":
    app.run(main)
