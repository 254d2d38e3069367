"""Measures what certifying costs: the check of large leaves between saves, and of the whole state at a save.

    python benchmarks/certify.py                # about 4 minutes, mostly to compile 1,000 leaves
    python benchmarks/certify.py --only "byte LM"

Each row is a process of its own. Steps and checks are timed alone, in turns; the figures are medians.
A check between saves begins on the step's path, where the loop walks over the leaves and starts a program. It
ends when its result was read. Its share is the larger of two: the time until then, in the time of the
steps from one check to the next, and its CPU time on all threads, in the CPU time of these steps. The issue
asks for at most 0.005. A save checks everything once.
"""

import collections
import contextlib
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
WARM_UP = 5  # steps that are not timed
COLUMNS = {
    "step": "step, ms",
    "step, CPU": "step, ms CPU",
    "path": "check between saves: on the step's path, ms",
    "check": "until its result, ms",
    "check, CPU": "in all, ms CPU",
    "whole": "whole check, ms",
}
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
            # One array to cut up: 500 calls of `normal` take a minute to compile.
            matrices = jax.random.normal(key, (500, width, width)) / width**0.5
            return {"matrices": [*matrices], "scales": [jnp.ones(width) for _ in matrices]}

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

    found: dict[str, list[float]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def timed(what: str):
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        yield
        found[what].append(time.perf_counter() - begin_s)
        found[f"{what}, CPU"].append(time.process_time() - begin_cpu_s)

    class Timed(Loop):
        def _dispatch(self, batch):
            with timed("step"):
                super()._dispatch(batch)
                jax.block_until_ready((self.now.state, self.start.feed.slots))
            certifier = self._saver.certifier
            assert self.now.step % value_checks.GLANCE_EVERY and not certifier.is_looking
            with timed("check"):
                with timed("path"):
                    certifier.look()
                while certifier.is_looking:
                    certifier.stepped()  # what the loop calls after each step
                    time.sleep(5e-5)  # the steps go on meanwhile
            with timed("whole"), jax.transfer_guard("allow"):
                self.start.values.lost(self.now.engine, self.now.state)

    with tempfile.TemporaryDirectory() as workdir:
        config = Config(
            workdir=workdir,
            batch=BatchLimits(base=base, max=base, max_micro_batches=1),
            base_steps=FLAGS.rounds + WARM_UP,
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
    median = {what: statistics.median(seconds[WARM_UP:]) for what, seconds in found.items()}
    return {**median, "every": value_checks.GLANCE_EVERY}


def line(name: str, base: int) -> str:
    """A row of the table, measured in a process of its own."""
    command = [sys.executable, __file__, "--worker", f"--only={name}", f"--rounds={FLAGS.rounds}"]
    env = {**os.environ, **keep_freed_pages(os.environ)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr[-2000:]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    shares = [found[f"check{x}"] / (found["every"] * found[f"step{x}"]) for x in ("", ", CPU")]
    ms = [f"{1e3 * found[key]:.2f}" for key in COLUMNS]
    verdict = "yes" if max(shares) <= AT_MOST else "NO"
    return f"| {name} | {base} | {' | '.join(ms)} | {max(shares):.5f} | {verdict} |"


def main(argv: list[str]) -> None:
    """Print the table, or measure one row."""
    del argv
    rows = [row for row in ROWS if FLAGS.only in ("", row[0])]
    if FLAGS.worker:
        sys.path.insert(0, str(pathlib.Path(__file__).parent))
        print(json.dumps(measure(*rows[0])))
        return
    print(f"| model | samples | {' | '.join(COLUMNS.values())} | share | kept |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for row in rows:
        print(line(*row), flush=True)


if __name__ == "__main__":
    app.run(main)
