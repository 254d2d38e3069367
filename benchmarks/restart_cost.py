"""Measures the cost of a restart from disk by the size of the state; realistic simulations use it.

    python benchmarks/restart_cost.py [--megabytes 3 100 400] [--repeats 3]

A process trains a matrix under Adam, is told to stop (SIGTERM: checkpoint at the next step, exit 143), and
is started again at once. The cost is the time from the signal to the first finished step of the next
process, less one step: saving, leaving, importing, reading, compiling from the cache. The first start,
with a cold cache, is not counted. The least-squares line over the sizes is `base_s + 2 size / bytes_per_s`
of `settings.restart_by_state`. One process on a CPU, its checkpoint still in the page cache: no start-up of
accelerators or of several hosts is in it.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.train.config import Config, Reporting
from jaxgoodput.train.trainer import Trainer

BYTES_PER_PARAMETER = 12  # the parameter and Adam's two moments, in 32 bits each
WIDTH = 256
STEPS_BEFORE_S = 3.0  # between the first step of a life and the signal


class Matrix(Trainer):
    """Regression on one wide layer."""

    def __init__(self, config: Config, rows: int, **options):
        super().__init__(config, **options)
        self._rows = rows

    def init(self, key):
        return {"w": jax.random.normal(key, (self._rows, WIDTH)) * 1e-3}

    def loss(self, params, batch, key):
        return jnp.mean((params["w"][batch["row"]] - batch["y"]) ** 2, axis=-1)

    def optimizer(self):
        return optax.adam(1e-3)

    def dataset(self):
        rng = np.random.default_rng(0)
        return {
            "row": rng.integers(0, self._rows, 4096).astype(np.int32),
            "y": rng.normal(size=(4096, WIDTH)).astype(np.float32),
        }


class Log:
    """A line for every finished step, out of the process at once."""

    def __init__(self, path: pathlib.Path):
        self._file = open(path, "ab", buffering=0)

    def on_step_end(self, event) -> None:
        line = {"step": event.step, "at_s": time.time(), "pid": os.getpid()}
        self._file.write(json.dumps(line).encode() + b"\n")


def train(workdir: pathlib.Path, rows: int) -> None:
    """One life of the training process."""
    jax.config.update("jax_platforms", "cpu")
    config = Config(
        workdir=str(workdir),
        batch=BatchLimits(base=32, max=32, micro=(32, 32), sizes=(32,)),
        epochs=10**6,
        reporting=Reporting(tensorboard=False, progress=False),
    )
    Matrix(config, rows, hooks=[Log(workdir / "steps.jsonl")]).fit()


def steps_of(workdir: pathlib.Path, pid: int) -> list[dict]:
    """The finished steps of a life."""
    path = workdir / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [step for step in found if step["pid"] == pid]


def start(workdir: pathlib.Path, rows: int) -> subprocess.Popen:
    command = [sys.executable, __file__, "--child", str(workdir), "--rows", str(rows)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def first_step(process: subprocess.Popen, workdir: pathlib.Path) -> dict:
    """Waits for it. Raises RuntimeError where the process ends before."""
    while not (steps := steps_of(workdir, process.pid)):
        if process.poll() is not None:
            raise RuntimeError(
                f"the training process ended with {process.returncode} before its first step:\n"
                + (workdir / "errors.txt").read_text()[-2000:]
            )
        time.sleep(0.02)
    return steps[0]


def measure(rows: int, repeats: int) -> list[float]:
    """Seconds of every restart."""
    with tempfile.TemporaryDirectory(prefix="jaxgoodput-restart-") as name:
        workdir = pathlib.Path(name)
        process = start(workdir, rows)
        try:
            first_step(process, workdir)
            costs = []
            for _ in range(repeats):
                time.sleep(STEPS_BEFORE_S)
                told_s = time.time()
                process.send_signal(signal.SIGTERM)
                code = process.wait()
                if code != 128 + signal.SIGTERM:
                    raise RuntimeError(f"told to stop, the training process ended with {code}")
                last = steps_of(workdir, process.pid)
                step_s = (last[-1]["at_s"] - last[0]["at_s"]) / max(len(last) - 1, 1)
                process = start(workdir, rows)
                first = first_step(process, workdir)
                if first["step"] != last[-1]["step"] + 1:
                    raise RuntimeError(f"resumed at {first['step']} after {last[-1]['step']}")
                costs.append(first["at_s"] - told_s - step_s)
        finally:
            process.kill()
            process.wait()
    return costs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[3.0, 100.0, 400.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        train(options.child, options.rows)
        return
    sizes, medians = [], []
    print(f"{'state, MB':>10s} {'median s':>9s} {'min':>6s} {'max':>6s}")
    for megabytes in options.megabytes:
        rows = max(round(megabytes * 1e6 / BYTES_PER_PARAMETER / WIDTH), 1)
        costs = measure(rows, options.repeats)
        sizes.append(rows * WIDTH * BYTES_PER_PARAMETER)
        medians.append(float(np.median(costs)))
        print(
            f"{megabytes:10.0f} {medians[-1]:9.2f} {min(costs):6.2f} {max(costs):6.2f}", flush=True
        )
    if len(sizes) > 1:
        slope, base_s = np.polyfit(sizes, medians, 1)
        if slope <= 0:
            raise SystemExit(
                "larger states were not slower: noise; give larger sizes or more repeats"
            )
        print(f"base_s={base_s:.2f}, bytes_per_s={2.0 / slope:.3g}")


if __name__ == "__main__":
    main()
