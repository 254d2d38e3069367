"""Measures what a very short step costs: `Trainer.fit` with a fixed batch against a loop by hand, in turns.

    python benchmarks/short_steps.py        # models of 1, 10 and 100 leaves, about 5 minutes

By hand is one donated jit of loss, gradient and update, one dispatch a step, batches from NumPy by a shuffled
permutation, the loss fetched every 100 steps. `fit` is timed from step 4,000 on, when its blocks of steps are
compiled and the noise is measured rarely. Each turn of `fit` is a run of its own. Times are medians over
turns, with quartiles of the ratio within a turn.
"""

import functools
import pathlib
import statistics
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from jaxgoodput import BatchLimits, Config, Hook, Reporting, Saving, Trainer

FLAGS = flags.FLAGS
flags.DEFINE_integer("turns", 7, "Turns of each loop.")
flags.DEFINE_integer("steps", 6000, "Timed steps of a turn.")
flags.DEFINE_list("leaves", ["1", "10", "100"], "Leaves of the model.")

BATCH, ROWS, SKIPPED = 8, 8192, 4000


class Leaves(Trainer):
    """A model of many small leaves, whose step computes next to nothing."""

    num_leaves = 1

    def init(self, key):
        return {f"w{i}": jnp.ones(4) for i in range(self.num_leaves)}

    def loss(self, params, batch, key):
        return (batch["x"][:, 0] * sum(jnp.sum(x) for x in params.values()) - 1.0) ** 2

    def optimizer(self):
        return optax.adam(1e-5)

    def dataset(self):
        return {"x": np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)}


class Stopwatch(Hook):
    """Reads clocks at two steps, and ends the run at the second."""

    def __init__(self, last: int):
        self.last = last
        self.marks: list[tuple[float, float, float]] = []
        self.trainer: Trainer | None = None

    def on_step_end(self, event, /):
        if event.step in (SKIPPED, self.last):
            self.marks.append((time.perf_counter(), time.process_time(), main_s()))
        if event.step == self.last and self.trainer is not None:
            self.trainer.finish()


def main_s() -> float:
    """CPU seconds of the main thread."""
    path = pathlib.Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat")
    return int(path.read_text().split()[0]) * 1e-9


def by_fit(num_leaves: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds and the main thread's CPU seconds of a step."""
    watch = Stopwatch(SKIPPED + FLAGS.steps)
    kind = type("Leaves", (Leaves,), {"num_leaves": num_leaves})
    with tempfile.TemporaryDirectory() as workdir:
        config = Config(
            workdir=workdir,
            batch=BatchLimits(base=BATCH, max=BATCH),
            base_steps=SKIPPED + 2 * FLAGS.steps,
            policy="fixed",
            reporting=Reporting(progress=False),
            saving=Saving(at_end=False),
        )
        watch.trainer = kind(config, hooks=[watch])
        watch.trainer.fit()
    first, last = watch.marks
    wall, cpu, main = ((b - a) / FLAGS.steps for a, b in zip(first, last, strict=True))
    return wall, cpu, main


def by_hand(num_leaves: int) -> tuple[float, float, float]:
    """The same of a loop by hand."""
    kind = type("Leaves", (Leaves,), {"num_leaves": num_leaves})
    limits = BatchLimits(base=BATCH, max=BATCH)
    made = kind(Config(workdir="/tmp", batch=limits, base_steps=1))
    key = jax.random.key(0)
    tx, params, data = made.optimizer(), made.init(key), made.dataset()["x"]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        def mean(params):
            return jnp.mean(made.loss(params, batch, key))

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, order = tx.init(params), np.random.default_rng(0).permutation(ROWS)
    marks = []
    for i in range(SKIPPED // 4 + FLAGS.steps + 1):
        if i in (SKIPPED // 4, SKIPPED // 4 + FLAGS.steps):
            jax.block_until_ready(params)
            marks.append((time.perf_counter(), time.process_time(), main_s()))
        at = i * BATCH % ROWS
        params, opt_state, loss = step(params, opt_state, {"x": data[order[at : at + BATCH]]})
        if i % 100 == 0:
            float(loss)
    first, last = marks
    wall, cpu, main = ((b - a) / FLAGS.steps for a, b in zip(first, last, strict=True))
    return wall, cpu, main


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median and quartiles of the ratios within turns."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def main(argv: list[str]) -> None:
    """Take turns, and print the table."""
    del argv
    print(
        "| leaves | by hand, us | fit, us | ratio | by hand, us CPU | fit, us CPU | ratio | main thread, us |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for num_leaves in map(int, FLAGS.leaves):
        fits, hands = [], []
        for _ in range(FLAGS.turns):
            hands.append(by_hand(num_leaves))
            fits.append(by_fit(num_leaves))
        (hand_s, hand_cpu, _), (fit_s, fit_cpu, main_cpu) = (
            [list(x) for x in zip(*rows, strict=True)] for rows in (hands, fits)
        )
        us = [statistics.median(x) * 1e6 for x in (hand_s, fit_s, hand_cpu, fit_cpu, main_cpu)]
        print(
            f"| {num_leaves} | {us[0]:.0f} | {us[1]:.0f} | {ratio(fit_s, hand_s)} | {us[2]:.0f} | "
            f"{us[3]:.0f} | {ratio(fit_cpu, hand_cpu)} | {us[4]:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
