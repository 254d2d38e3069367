"""Measures what certifying costs: the check of large leaves between saves, and of the whole state at a save.

    python benchmarks/certify.py                # about 2 minutes

Each row is a process of its own. Steps and checks are timed alone, in turns: the time until the result is
there, median of all. The share is that of one check in the steps between two; the issue asks for at most
0.005. A save checks everything once.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

from jaxgoodput.launcher.local import keep_freed_pages

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "One row.")
flags.DEFINE_integer("rounds", 30, "Timed steps, and timed checks.")
flags.DEFINE_bool("worker", False, "Internal: measure one row and print it as JSON.")

AT_MOST = 0.005
# model, samples of a step
ROWS = (
    ("cnn", 96),
    ("byte LM", 32),
    ("recommender", 8192),
    ("recommender, tables of rows", 4096),
    ("1,000 leaves", 64),
)


def thousand(config: Any) -> Any:
    """A sum of matrices and their scales: 1,000 leaves, half of them larger than a step checks."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from models import Benchmark

    width = 136

    class Thousand(Benchmark):
        def init(self, key):
            keys = jax.random.split(key, 500)
            matrices = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys]
            return {"matrices": matrices, "scales": [jnp.ones(width) for _ in keys]}

        def loss(self, params, batch, key):
            pairs = zip(params["matrices"], params["scales"], strict=True)
            total = sum(matrix * scale[None] for matrix, scale in pairs)
            return jnp.mean((batch["x"] @ total - batch["x"]) ** 2, axis=-1)

        def optimizer(self):
            return optax.adam(1e-4)

        def dataset(self):
            rng = np.random.default_rng(0)
            return {"x": rng.normal(size=(256, width)).astype(np.float32)}

    return Thousand(config)


def with_rows(config: Any) -> Any:
    """A small dense part above two tables, of which a step reads few rows."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxgoodput import Trainer, embedding

    sizes = {"user": (400_000, 32), "item": (100_000, 32)}

    class Rows(Trainer):
        def init(self, key):
            keys = jax.random.split(key, 2)
            return {
                "in": jax.random.normal(keys[0], (64, 64)),
                "out": jax.random.normal(keys[1], (64,)),
            }

        def tables(self):
            return {
                name: embedding.Table(
                    folder=f"{self.config.workdir}/{name}",
                    dim=dim,
                    optimizer=embedding.Adagrad(0.1),
                    num_rows=size,
                    device_rows=size,
                )
                for name, (size, dim) in sizes.items()
            }

        def ids(self, batch):
            return {name: batch[name] for name in sizes}

        def loss(self, params, batch, key, rows: Any = None):
            x = jnp.concatenate([rows[name] for name in sizes], axis=1)
            return (jnp.tanh(x @ params["in"]) @ params["out"] - batch["label"]) ** 2

        def optimizer(self):
            return optax.adam(1e-3)

        def dataset(self):
            rng = np.random.default_rng(0)
            ids = {n: rng.integers(0, s, 1 << 18).astype(np.int32) for n, (s, _) in sizes.items()}
            return {**ids, "label": rng.normal(size=1 << 18).astype(np.float32)}

    return Rows(config)


def measure(name: str, base: int) -> dict[str, float]:
    """One row, in this process: seconds of a step, of a check between saves, and of a whole one."""
    import jax
    from models import MODELS, made

    from jaxgoodput import BatchLimits, Config, Reporting, Saving
    from jaxgoodput.train.loop import Loop
    from jaxgoodput.train.start import value_checks

    class Timed(Loop):
        steps: list[float] = []
        checks: list[float] = []
        wholes: list[float] = []

        def _dispatch(self, batch):
            begin_s = time.perf_counter()
            super()._dispatch(batch)
            jax.block_until_ready((self.now.state, self.start.feed.slots))
            self.steps.append(time.perf_counter() - begin_s)
            now, values = self.now, self.start.values
            begin_s = time.perf_counter()
            jax.block_until_ready(values.glance(now.engine, now.state, self.start.feed.slots))
            self.checks.append(time.perf_counter() - begin_s)
            begin_s = time.perf_counter()
            with jax.transfer_guard("allow"):
                values.lost(now.engine, now.state)
            self.wholes.append(time.perf_counter() - begin_s)

    with tempfile.TemporaryDirectory() as workdir:
        config = Config(
            workdir=workdir,
            batch=BatchLimits(base=base, max=base, max_micro_batches=1),
            base_steps=FLAGS.rounds + 5,
            policy="fixed",
            reporting=Reporting(progress=False, tensorboard=False),
            saving=Saving(at_end=False),
        )
        trainer: Any
        if name in MODELS:
            trainer = made(name, config)
        else:
            trainer = thousand(config) if "leaves" in name else with_rows(config)
        trainer._loop_class = Timed
        trainer.fit()
    median = {
        key: statistics.median(getattr(Timed, key)[5:]) for key in ("steps", "checks", "wholes")
    }
    return {**median, "every": value_checks.GLANCE_EVERY}


def line(name: str, base: int) -> str:
    """A row of the table, measured in a process of its own."""
    command = [sys.executable, __file__, "--worker", f"--only={name}", f"--rounds={FLAGS.rounds}"]
    env = {**os.environ, **keep_freed_pages(os.environ)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr[-2000:]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    share = found["checks"] / (found["every"] * found["steps"])
    ms = [f"{1e3 * found[key]:.2f}" for key in ("steps", "checks", "wholes")]
    verdict = "yes" if share <= AT_MOST else "NO"
    return f"| {name} | {base} | {' | '.join(ms)} | {share:.5f} | {verdict} |"


def main(argv: list[str]) -> None:
    """Print the table, or measure one row."""
    del argv
    rows = [row for row in ROWS if FLAGS.only in ("", row[0])]
    if FLAGS.worker:
        sys.path.insert(0, str(pathlib.Path(__file__).parent))
        print(json.dumps(measure(*rows[0])))
        return
    print(
        "| model | samples | step, ms | check between saves, ms | whole check, ms | share | kept |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(line(*row), flush=True)


if __name__ == "__main__":
    app.run(main)
