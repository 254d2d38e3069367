"""Checks that a long run does not leak: memory, threads, file descriptors, journal and cache stay bounded.

    python benchmarks/soak.py --minutes 30

Trains in this process, on two virtual CPU devices, in steps of about 20 ms, with evaluations,
checkpoints, changes of the batch and moves between layouts every few seconds, and prints a line a
minute. From a third of the time on, the resident memory must stay within 5 %, and threads, descriptors
and the compilation cache must not grow beyond what they were before; the journal, whose parts are made
small here so that many are set aside, within what `observe/journal.py` promises. The exit code is 1
where one of them does not.
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe import journal
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.config import Config, Evaluation, Reporting, Saving, Tuning
from jaxgoodput.train.trainer import Trainer

WIDTH = 768
MICRO_BATCHES = (16, 24, 32)
SEGMENT_BYTES = 2**16
FLAT = 0.05


class Wide(Trainer):
    """Regression with two wide layers."""

    def init(self, key):
        one, two, three = jax.random.split(key, 3)
        return {
            "in": {"kernel": jax.random.normal(one, (32, WIDTH)) / 6},
            "middle": {"kernel": jax.random.normal(two, (WIDTH, WIDTH)) / 28},
            "out": {"kernel": jax.random.normal(three, (WIDTH, 8)) / 28},
        }

    def output(self, params, x):
        hidden = jax.nn.gelu(x @ params["in"]["kernel"])
        hidden = jax.nn.gelu(hidden @ params["middle"]["kernel"])
        return hidden @ params["out"]["kernel"]

    def loss(self, params, batch, key):
        return jnp.mean((self.output(params, batch["x"]) - batch["y"]) ** 2, axis=-1)

    def optimizer(self):
        return optax.adam(1e-4)

    def dataset(self):
        return rows(20_000, seed=0)

    def eval_dataset(self):
        return rows(256, seed=1)

    def metrics(self, params, batch):
        return {"error": jnp.mean((self.output(params, batch["x"]) - batch["y"]) ** 2, axis=-1)}


def rows(count: int, *, seed: int):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 32)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :8]) + rng.normal(size=(count, 8)).astype(np.float32) / 4}


class Sample(NamedTuple):
    """What the process and its folder hold at a moment."""

    at_s: float
    rss_mib: float
    threads: int
    descriptors: int
    journal_kib: float
    cache_kib: float
    checkpoints: int


def bytes_under(folder: pathlib.Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


def sample(workdir: pathlib.Path, began_s: float) -> Sample:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    saved = [name for name in os.listdir(workdir / "checkpoints") if name.isdigit()]
    return Sample(
        at_s=time.monotonic() - began_s,
        rss_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        threads=len(os.listdir("/proc/self/task")),
        descriptors=len(os.listdir("/proc/self/fd")),
        journal_kib=bytes_under(workdir, "goodput*.jsonl") / 2**10,
        cache_kib=bytes_under(workdir, "compilation_cache/**/*") / 2**10,
        checkpoints=len(saved),
    )


class Watch(Hook):
    """Samples with every window, asks for changes, and ends the run."""

    def __init__(self, workdir: pathlib.Path, seconds: float):
        self.trainer: Any = None
        self.samples: list[Sample] = []
        self.step_s: list[float] = []
        self.strategies: list[str] = []
        self.num = {"steps": 0, "evaluations": 0, "checkpoints": 0, "batches": 0, "moves": 0}
        self._workdir, self._seconds = workdir, seconds
        self._began_s = self._asked_s = 0.0

    def on_fit_start(self, event, /):
        self._began_s = self._asked_s = time.monotonic()

    def on_step_end(self, event, /):
        self.num["steps"] += 1
        if time.monotonic() - self._asked_s > 5.0:
            self._asked_s, turn = time.monotonic(), self.num["batches"] + self.num["moves"]
            moves = turn % 3 == 2
            self.num["moves" if moves else "batches"] += 1
            others = [s.name for s in self.trainer.config.strategies]
            others.remove(event.config.strategy)
            micro = MICRO_BATCHES[turn % len(MICRO_BATCHES)]
            self.trainer.request_batch(micro, strategy=others[0] if moves else None)

    def on_eval_end(self, event, /):
        self.num["evaluations"] += 1

    def on_checkpoint(self, event, /):
        self.num["checkpoints"] += event.error is None

    def on_window(self, event, /):
        found = sample(self._workdir, self._began_s)
        if not self.samples or found.at_s // 60 > self.samples[-1].at_s // 60:
            print(" ".join(f"{value:>12.0f}" for value in found), flush=True)
        self.samples.append(found)
        self.step_s.append(event.seconds / event.num_steps)
        if found.at_s > self._seconds:
            self.trainer.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    journal.SEGMENT_BYTES = SEGMENT_BYTES
    print(" ".join(f"{name:>12}" for name in Sample._fields))
    with tempfile.TemporaryDirectory(prefix="jaxgoodput-soak-") as folder:
        workdir = pathlib.Path(folder)
        watch = Watch(workdir, 60 * args.minutes)
        config = Config(
            workdir=str(workdir),
            batch=BatchLimits(base=32, max=64, micro=(min(MICRO_BATCHES), max(MICRO_BATCHES))),
            base_steps=1e9,
            strategies=(Strategy(data=2), Strategy(fsdp=2)),
            tuning=Tuning(accumulate=False, warm_up_steps=10**9),
            evaluation=Evaluation(every_s=4.0),
            saving=Saving(every_s=7.0),
            reporting=Reporting(progress=False),
        )
        trainer = watch.trainer = Wide(config, hooks=[watch])
        trainer.fit()
        segments = journal.segments(workdir / journal.FILE_NAME)
        largest = max(path.stat().st_size for path in segments)
    early = sum(s.at_s < 20 * args.minutes for s in watch.samples)
    before, after = watch.samples[: max(early, 1)], watch.samples[early:]
    rss = [s.rss_mib for s in after]
    spread = max(rss) / min(rss) - 1
    grown = {
        name: max(getattr(s, name) for s in after) - max(getattr(s, name) for s in before)
        for name in ("threads", "descriptors", "cache_kib", "checkpoints")
    }
    done = ", ".join(f"{number} {name}" for name, number in watch.num.items())
    print(f"{done}; median step {statistics.median(watch.step_s) * 1e3:.1f} ms")
    print(f"from a third of the time on: memory within {spread:.1%}; grown by {grown}")
    print(f"journal: {len(segments)} parts, the largest {largest / 2**10:.0f} KiB")
    bounded = largest < 1.2 * SEGMENT_BYTES and not any(n > 0 for n in grown.values())
    return 0 if spread <= FLAT and bounded else 1


if __name__ == "__main__":
    sys.exit(main())
