"""Exactly once: a run that is killed at random moments applies every sample of every epoch once.

    python benchmarks/resume.py --kills 20

A training process is killed (SIGKILL) again and again, in the middle of an epoch, of a checkpoint, of
a compilation, and started again until it is done. Two witnesses are printed. The log: a hook writes
what each finished step applied; a restart at step s undoes the lines beyond s; what remains is
counted. The device: an optimizer that adds one to the entry of every sample that it is given, in
state that is checkpointed like any other. The exit code is 1 where a witness disagrees.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.train.config import Config, Reporting, Saving, Tuning
from jaxgoodput.train.trainer import Trainer

EPOCHS = 3
SAMPLES_PER_KILL = 200
FETCH_S = 0.002  # per sample: so that steps take long enough to be killed in
LIFE_S = 1.5  # after the first step of a life, at most


class Slowly:
    """Samples that take a while to read."""

    def __init__(self, num_samples: int):
        self._rows = np.random.default_rng(0).normal(size=(num_samples, 4)).astype(np.float32)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        time.sleep(FETCH_S)
        return {"id": np.int32(index), "x": self._rows[index]}


def add_times_seen() -> optax.GradientTransformation:
    """Adds to every entry how often its sample was in the batch: its share over the smallest."""

    def update(updates, state, params=None):
        def times(g):
            once = jnp.min(jnp.where(g < 0, -g, jnp.inf))
            return jnp.round(-g / once)

        return jax.tree.map(times, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Counting(Trainer):
    """Learns a mean, and counts on the device how often each sample was applied."""

    def __init__(self, config: Config, num_samples: int, **options):
        super().__init__(config, **options)
        self.num_samples = num_samples

    def init(self, key):
        return {"w": jnp.zeros(4), "count": jnp.zeros(self.num_samples)}

    def loss(self, params, batch, key):
        own = params["count"][batch["id"]]
        distance = 0.5 * jnp.sum((params["w"][None] - batch["x"]) ** 2, axis=-1)
        return distance + jax.lax.stop_gradient(own) - own  # the last two: no value, slope -1

    def optimizer(self):
        return optax.multi_transform(
            {"model": optax.sgd(0.01), "count": add_times_seen()},
            {"w": "model", "count": "count"},
        )

    def dataset(self):
        return Slowly(self.num_samples)


class Log:
    """A line for every start and every finished step, out of the process at once."""

    def __init__(self, path: pathlib.Path):
        self._file = open(path, "ab", buffering=0)

    def _write(self, **line) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def on_fit_start(self, event) -> None:
        self._write(start=event.step)

    def on_step_end(self, event) -> None:
        self._write(
            step=event.step,
            before=dataclasses.asdict(event.before),
            num_samples=event.num_samples,
            batch=event.config.global_batch_size,
        )


def train(workdir: pathlib.Path, num_samples: int, checkpoint_every_s: float) -> None:
    """One life of the training process."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    config = Config(
        workdir=str(workdir),
        batch=BatchLimits(base=16, max=64, micro=(8, 32), sizes=(8, 16, 32)),
        epochs=EPOCHS,
        rule=rules.none,  # a gain would multiply the counts
        tuning=Tuning(accumulate=False, every_s=0.5, dwell_steps=5),
        saving=Saving(every_s=checkpoint_every_s),
        reporting=Reporting(tensorboard=False, progress=False),
    )
    state = Counting(config, num_samples, hooks=[Log(workdir / "applied.jsonl")]).fit()
    counts = np.asarray(state.params["count"])
    (workdir / "device.json").write_text(json.dumps(counts.tolist()))


def replay(lines: Iterable[bytes]) -> tuple[list[dict], int, int]:
    """The steps that count, the number of starts, and the number of steps that were undone.

    A start at step s undoes the steps beyond s. A line that a kill has cut off is left out.
    """
    applied: list[dict] = []
    starts = undone = 0
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "start" in line:
            starts += 1
            kept = [a for a in applied if a["step"] <= line["start"]]
            undone += len(applied) - len(kept)
            applied = kept
        else:
            applied.append(line)
    return applied, starts, undone


def times_applied(applied: Iterable[dict], num_samples: int) -> Counter:
    """(epoch, sample) -> how often the steps applied it."""
    seen: Counter = Counter()
    for line in applied:
        cursor = Cursor(**line["before"])
        for _ in range(line["num_samples"]):
            index, after = take(cursor, num_samples, 1)
            seen[cursor.epoch, int(index[0])] += 1
            cursor = after
    return seen


def tally(seen: Counter, num_samples: int) -> dict[str, int]:
    """How many of the samples of all epochs were applied never, once, and more often."""
    wanted = [seen[epoch, i] for epoch in range(EPOCHS) for i in range(num_samples)]
    beyond = sum(n for (epoch, _), n in seen.items() if epoch >= EPOCHS)
    return {
        "never": sum(n == 0 for n in wanted),
        "once": sum(n == 1 for n in wanted),
        "more often": sum(n > 1 for n in wanted) + beyond,
    }


def steps_logged(log: pathlib.Path) -> int:
    """Finished steps in the log, undone ones too."""
    return log.read_bytes().count(b'"step"') if log.exists() else 0


def kill_until_done(workdir: pathlib.Path, args: argparse.Namespace) -> int:
    """Start, kill, start again; returns the number of kills that hit."""
    draw = random.Random(args.seed)
    log, kills, startup_s = workdir / "applied.jsonl", 0, None
    command = [sys.executable, __file__, "--child", str(workdir), "--kills", str(args.kills)]
    command += ["--checkpoint-every-s", str(args.checkpoint_every_s)]
    while True:
        began, before = time.monotonic(), steps_logged(log)
        with open(workdir / "output.txt", "ab") as output:
            child = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            if kills < args.kills:
                if startup_s is not None and draw.random() < 0.2:
                    wait_s = draw.uniform(0, startup_s)  # while it starts, restores, compiles
                else:
                    while child.poll() is None and steps_logged(log) == before:
                        time.sleep(0.005)
                    startup_s = time.monotonic() - began
                    wait_s = draw.uniform(0, LIFE_S)
                try:
                    child.wait(wait_s)
                except subprocess.TimeoutExpired:
                    child.send_signal(signal.SIGKILL)
                    child.wait()
                    kills += 1
                    continue
            code = child.wait(300)
        finally:
            child.kill()
            child.wait()
        if code != 0:
            raise RuntimeError(
                f"a life ended with code {code}:\n{(workdir / 'output.txt').read_text()[-4000:]}"
            )
        return kills


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every-s", type=float, default=0.3)
    parser.add_argument("--child", type=pathlib.Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_samples = SAMPLES_PER_KILL * args.kills
    if args.child is not None:
        train(args.child, num_samples, args.checkpoint_every_s)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder)
        began = time.monotonic()
        kills = kill_until_done(workdir, args)
        lines = (workdir / "applied.jsonl").read_bytes().split(b"\n")
        applied, starts, undone = replay(lines)
        log = tally(times_applied(applied, num_samples), num_samples)
        counts = np.asarray(json.loads((workdir / "device.json").read_text()))
    sizes = Counter(a["batch"] for a in applied)
    print(
        f"{EPOCHS} epochs of {num_samples} samples, checkpoints every {args.checkpoint_every_s} s"
    )
    rows = [
        ("kills (SIGKILL)", kills),
        ("starts that reached training", starts),
        ("steps that count", len(applied)),
        ("steps lost with a kill", undone),
        ("batch sizes used", " ".join(f"{b}:{n}" for b, n in sorted(sizes.items()))),
        *((f"log: samples applied {name}", n) for name, n in log.items()),
        (f"device: samples with count {EPOCHS}", int((counts == EPOCHS).sum())),
        ("device: samples with another count", int((counts != EPOCHS).sum())),
        ("wall seconds", round(time.monotonic() - began)),
    ]
    for name, value in rows:
        print(f"{name:<36} {value}")
    exact = log == {"never": 0, "once": EPOCHS * num_samples, "more often": 0}
    return 0 if exact and (counts == EPOCHS).all() and kills == args.kills else 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
