"""Measures what a very short step costs: `Trainer.fit` with a fixed batch against a loop by hand, in turns.

    python benchmarks/short_steps.py                      # about 12 minutes
    python benchmarks/short_steps.py --cases 10:0,100:5   # leaves of the model : milliseconds of work

By hand is one donated jit of loss, gradient and update, one dispatch a step, batches from NumPy by a shuffled
permutation, the loss fetched every 100 steps. `fit` is timed from step 4,000 on, or after 8 s if that is
earlier, when its blocks of steps are compiled and the noise is measured rarely. The work is products of
matrices that need no gradient, as many as take so long here. Each turn of `fit` is a run of its own. Times
are medians over turns, with quartiles of the ratio within a turn.
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

from jaxgoodput import BatchLimits, Config, Execution, Hook, Reporting, Saving, Trainer

FLAGS = flags.FLAGS
flags.DEFINE_integer("turns", 7, "Turns of each loop.")
flags.DEFINE_integer(
    "steps", 6000, "Timed steps of a turn, at most; fewer if they take more than 5 s."
)
flags.DEFINE_list(
    "cases",
    ["1:0", "10:0", "100:0", "100:0.1", "100:1", "100:5", "100:40"],
    "Leaves of the model, and milliseconds of work in a step.",
)

BATCH, ROWS, WIDTH = 8, 8192, 128
SKIPPED, SKIPPED_S, TIMED_S = 4000, 8.0, 5.0


class Leaves(Trainer):
    """A model of many small leaves, whose step computes next to nothing."""

    num_leaves, num_products = 1, 0

    def init(self, key):
        return {f"w{i}": jnp.ones(4) for i in range(self.num_leaves)}

    def loss(self, params, batch, key):
        x = batch["x"][:, 0]
        return (x * sum(jnp.sum(x) for x in params.values()) - 1.0) ** 2 + work(
            x, self.num_products
        )

    def optimizer(self):
        return optax.adam(1e-5)

    def dataset(self):
        return {"x": np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)}


def work(x: jax.Array, num_products: int) -> jax.Array:
    """Return next to nothing, `[batch]`, after so many products of matrices."""
    if num_products == 0:
        return jnp.zeros_like(x)
    matrix = jnp.eye(WIDTH) * 0.5

    def product(_, rows):
        return jnp.tanh(rows @ matrix) + 1e-3

    rows = jax.lax.stop_gradient(jnp.broadcast_to(x[:, None], (len(x), WIDTH)))
    return 1e-30 * jax.lax.fori_loop(0, num_products, product, rows)[:, 0]


def products_of(seconds: float) -> int:
    """Return how many products take so long."""
    if seconds == 0:
        return 0
    many = 2000
    run = jax.jit(functools.partial(work, num_products=many))
    x = jnp.ones(BATCH)
    run(x).block_until_ready()
    took = []
    for _ in range(5):
        began = time.perf_counter()
        run(x).block_until_ready()
        took.append(time.perf_counter() - began)
    return max(round(seconds / statistics.median(took) * many), 1)


class Stopwatch(Hook):
    """Reads clocks at two steps, and ends the run at the second."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self.marks: list[tuple[float, float, float]] = []
        self.trainer: Trainer | None = None

    def on_step_end(self, event, /):
        if event.step in (self.first, self.last):
            self.marks.append((time.perf_counter(), time.process_time(), main_s()))
        if event.step == self.last and self.trainer is not None:
            self.trainer.finish()


def main_s() -> float:
    """CPU seconds of the main thread."""
    path = pathlib.Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat")
    return int(path.read_text().split()[0]) * 1e-9


def by_fit(
    kind: type[Leaves], skipped: int, steps: int, programs: str
) -> tuple[float, float, float]:
    """Seconds, CPU seconds and the main thread's CPU seconds of a step.

    Compiled programs are kept in the folder `programs`: compiling is not timed.
    """
    watch = Stopwatch(skipped, skipped + steps)
    with tempfile.TemporaryDirectory() as workdir:
        config = Config(
            workdir=workdir,
            batch=BatchLimits(base=BATCH, max=BATCH),
            base_steps=skipped + 2 * steps,
            policy="fixed",
            reporting=Reporting(progress=False),
            saving=Saving(at_end=False),
            execution=Execution(compilation_cache=programs),
        )
        watch.trainer = kind(config, hooks=[watch])
        watch.trainer.fit()
    first, last = watch.marks
    wall, cpu, main = ((b - a) / steps for a, b in zip(first, last, strict=True))
    return wall, cpu, main


def by_hand(kind: type[Leaves], skipped: int, steps: int) -> tuple[float, float, float]:
    """The same of a loop by hand."""
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
    for i in range(skipped // 4 + steps + 1):
        if i in (skipped // 4, skipped // 4 + steps):
            jax.block_until_ready(params)
            marks.append((time.perf_counter(), time.process_time(), main_s()))
        at = i * BATCH % ROWS
        params, opt_state, loss = step(params, opt_state, {"x": data[order[at : at + BATCH]]})
        if i % 100 == 0:
            float(loss)
    first, last = marks
    wall, cpu, main = ((b - a) / steps for a, b in zip(first, last, strict=True))
    return wall, cpu, main


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median and quartiles of the ratios within turns."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def main(argv: list[str]) -> None:
    """Take turns, and print the table."""
    del argv
    columns = (
        *(
            "leaves",
            "work, ms",
            "by hand, us",
            "fit, us",
            "ratio",
            "by hand, us CPU",
            "fit, us CPU",
        ),
        *("ratio", "main thread, us"),
    )
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for num_leaves, work_ms in (case.split(":") for case in FLAGS.cases):
        num_products = products_of(float(work_ms) * 1e-3)
        of_case = {"num_leaves": int(num_leaves), "num_products": num_products}
        kind = type("Leaves", (Leaves,), of_case)
        step_s, _, _ = by_hand(kind, 100, 50)
        skipped = min(SKIPPED, round(SKIPPED_S / step_s))
        steps = min(FLAGS.steps, round(TIMED_S / step_s))
        fits, hands = [], []
        with tempfile.TemporaryDirectory() as programs:
            jax.config.update("jax_compilation_cache_dir", programs)  # by hand, too
            for _ in range(FLAGS.turns):
                hands.append(by_hand(kind, skipped, steps))
                fits.append(by_fit(kind, skipped, steps, programs))
        (hand_s, hand_cpu, _), (fit_s, fit_cpu, main_cpu) = (
            [list(x) for x in zip(*rows, strict=True)] for rows in (hands, fits)
        )
        us = [statistics.median(x) * 1e6 for x in (hand_s, fit_s, hand_cpu, fit_cpu, main_cpu)]
        cells = (num_leaves, work_ms, *(f"{x:.0f}" for x in us[:2]), ratio(fit_s, hand_s))
        cells += (*(f"{x:.0f}" for x in us[2:4]), ratio(fit_cpu, hand_cpu), f"{us[4]:.0f}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    app.run(main)
