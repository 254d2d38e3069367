"""The script of the tests of jobs whose processes come and go.

    python elastic_worker.py OUT EPOCHS STEP_S [SETTING=VALUE ...]

Every process writes what it saw to `OUT/<its pid>.jsonl`: the steps that its hooks heard of, and the state
with which it ended, in which every sample has been counted on the devices.
"""

import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput import _jax
from jaxgoodput.data.sources import ArraySource
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.train.config import Config, Reporting, Saving, with_overrides
from jaxgoodput.train.trainer import Trainer

NUM_SAMPLES, BASE, WIDTH = 120, 12, 4


def times_seen():
    """Adds to every entry how often its sample was in the batch, for a loss of minus that entry."""

    def update(updates, state, params=None):
        def times(g):
            once = jnp.min(jnp.where(g < 0, -g, jnp.inf))
            return jnp.round(-g / once)

        return jax.tree.map(times, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Slow(ArraySource):
    """Rows that take their time, until there is a file that says to hurry."""

    def __init__(self, arrays, step_s, hurry):
        super().__init__(arrays)
        self.hurry = hurry
        self.step_s = step_s
        self.num_reads = 0

    def batch(self, indices):
        self.num_reads += 1
        if not self.hurry.exists():
            time.sleep(self.step_s * (6 if os.environ.get("JAXGOODPUT_HOST") == "slow" else 1))
        return super().batch(indices)


class Counting(Trainer):
    """Counts on the devices how often each sample was applied, beside a little real training."""

    def __init__(self, config, *, step_s=0.0, **options):
        super().__init__(config, **options)
        self.step_s = step_s

    def init(self, key):
        return {"w": jax.random.normal(key, (WIDTH,)), "count": jnp.zeros(NUM_SAMPLES)}

    def loss(self, params, batch, key):
        own = params["count"][batch["id"]]
        # No use of the key: each replica has its own, and their number changes.
        mean = 0.5 * jnp.sum((params["w"][None] - batch["x"]) ** 2, axis=-1)
        return mean + jax.lax.stop_gradient(own) - own

    def optimizer(self):
        return optax.multi_transform(
            {"model": optax.sgd(0.05, momentum=0.9), "count": times_seen()},
            {"w": "model", "count": "count"},
        )

    def dataset(self):
        x = np.random.default_rng(3).normal(size=(NUM_SAMPLES, WIDTH)).astype(np.float32)
        rows = {"x": x, "id": np.arange(NUM_SAMPLES, dtype=np.int32)}
        self.source = Slow(rows, self.step_s, pathlib.Path(self.config.workdir) / "hurry")
        return self.source


class Lines(Hook):
    """Writes what it hears, a line at a time."""

    def __init__(self, path):
        self.path = path

    def write(self, kind, **fields):
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "at": time.time(), **fields}) + "\n")

    def on_regrouped(self, event):
        self.write(
            "regrouped",
            step=event.step,
            generation=event.generation,
            num_processes=event.num_processes,
            reason=event.reason,
            seconds=dict(event.seconds),
        )

    def on_step_end(self, event):
        self.write(
            "step",
            step=event.step,
            samples=event.samples,
            loss=event.metrics["loss"],
            before=[event.before.epoch, event.before.offset],
            num_samples=event.num_samples,
        )


def config(workdir, epochs, *settings):
    made = Config(
        workdir=str(workdir),
        policy="fixed",
        batch=BatchLimits(base=BASE, max=BASE),
        epochs=epochs,
        ema=0.9,
        reporting=Reporting(tensorboard=False, progress=False),
        saving=Saving(every_s=1e9),
    )
    return with_overrides(made, list(settings))


def run(out, epochs, step_s, *settings, **options):
    lines = Lines(out / f"{os.getpid()}.jsonl")
    lines.write("began", member=os.environ.get("JAXGOODPUT_MEMBER"))
    trainer = Counting(
        config(out / "run", epochs, *settings), step_s=step_s, hooks=[lines], **options
    )
    state = trainer.fit()
    lines.write(
        "end",
        step=int(state.step),
        count=np.asarray(state.params["count"]).tolist(),
        w=np.asarray(state.params["w"]).tolist(),
        ema=np.asarray(state.averaged["w"]).tolist(),
        num_reads=trainer.source.num_reads,
    )


def die_instead_of_connecting(flag):
    """Once, in the process of the host "fragile" that is about to connect for the first time."""

    def connect(*args, **kwargs):
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*args, **kwargs)

    before = _jax.connect
    if os.environ.get("JAXGOODPUT_HOST") == "fragile":
        _jax.connect = connect


if __name__ == "__main__":
    die_instead_of_connecting(pathlib.Path(sys.argv[1]) / "died")
    run(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
