"""The script of the tests of jobs whose processes come and go.

    python elastic_worker.py OUT EPOCHS STEP_S [SETTING=VALUE ...]

Every process writes what it saw to `OUT/<its pid>.jsonl`: the steps that its hooks heard of, and the state
with which it ended, in which every sample has been counted on the devices. The setting `initial` has the
run begin with parameters that are given to it; with `stream` the samples of all epochs come as a stream, of
which each process gets its own part with `stream=own`. STEP_S is what a read takes, of however many rows;
with `by-row`, what a batch takes, of which a process that reads a half needs half the time. On a host "x3" it
is three times as long. `samples=N` makes an epoch of N samples. With `may-stick` the device of the host that
the file "stuck" names computes nothing more. With `dropout` the loss draws random numbers: of one key for all
samples of a call, or of one for each with `keys=sample`.
"""

import dataclasses
import gc
import json
import os
import pathlib
import re
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxgoodput import _jax
from jaxgoodput.data.sources import ArraySource
from jaxgoodput.engine.state import host_copy
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.config import Config, Reporting, Saving, with_overrides
from jaxgoodput.train.trainer import Trainer

NUM_SAMPLES, BASE, WIDTH = 120, 12, 4
INITIAL, STREAM, OWN, BY_ROW = "initial", "stream", "stream=own", "by-row"
MAY_STICK, DROPOUT, SAMPLES = "may-stick", "dropout", "samples="


def times_seen():
    """Adds to every entry how often its sample was in the batch, for a loss of minus that entry."""

    def update(updates, state, params=None):
        def times(g):
            once = jnp.min(jnp.where(g < 0, -g, jnp.inf))
            return jnp.round(-g / once)

        return jax.tree.map(times, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Slow(ArraySource):
    """Rows that take their time, until there is a file that says to hurry.

    More of it on the host "slow", and on the host "moody" while there is a file that says so. The file "slow"
    names a host and how many times as long it takes there.
    """

    def __init__(self, arrays, step_s, hurry, by_row=False):
        super().__init__(arrays)
        self.hurry = hurry
        self.by_row = by_row
        self.step_s = step_s
        self.num_read = 0  # samples

    def batch(self, indices):
        self.num_read += len(indices)
        self.take_time(len(indices) / BASE if self.by_row else 1)
        return self.at_once(indices)

    def at_once(self, indices):
        return super().batch(indices)

    def take_time(self, share):
        if not self.hurry.exists():
            host = os.environ.get("JAXGOODPUT_HOST")
            is_slow = host == "slow" or (host == "moody" and (self.hurry.parent / "moody").exists())
            named = re.fullmatch(r"x(\d+)", host or "")
            times = float(named[1]) if named else 6.0 if is_slow else 1.0
            told = self.hurry.parent / "slow"
            if told.exists() and (said := told.read_text().split()) and said[0] == host:
                times = float(said[1])
            time.sleep(self.step_s * share * times)


class Stream:
    """The samples of `source` again and again, up to an end; knows where it is."""

    def __init__(self, source, end, first=0):
        self.source, self.end, self.place = source, end, first

    def __iter__(self):
        return self

    def __next__(self):
        if self.place >= self.end:
            raise StopIteration
        index = np.array([self.place % NUM_SAMPLES])
        self.place += 1
        # A batch's time with its first sample.
        rows = self.source.batch(index) if index % BASE == 0 else self.source.at_once(index)
        return jax.tree.map(lambda x: x[0], rows)

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


class Counting(Trainer):
    """Counts on the devices how often each sample was applied, beside a little real training."""

    def __init__(
        self,
        config,
        *,
        step_s=0.0,
        by_row=False,
        stream=None,
        may_stick=False,
        dropout=False,
        num_samples=NUM_SAMPLES,
        **options,
    ):
        super().__init__(config, **options)
        self.dropout, self.num_samples = dropout, num_samples
        self.may_stick = may_stick
        self.step_s, self.by_row = step_s, by_row
        self.stream = stream

    def init(self, key):
        return {"w": jax.random.normal(key, (WIDTH,)), "count": jnp.zeros(self.num_samples)}

    def loss(self, params, batch, key):
        own, x = params["count"][batch["id"]], batch["x"]
        # Otherwise the key is not used: each replica has its own, and their number changes.
        if self.dropout:
            keys = key if self.config.keys == "sample" else jax.random.split(key, len(x))
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (WIDTH,)))(keys)
            x = jnp.where(kept, x, 0.0)
        mean = 0.5 * jnp.sum((params["w"][None] - x) ** 2, axis=-1)
        if self.may_stick:
            mean += jax.pure_callback(self.stick, jax.ShapeDtypeStruct((), jnp.float32))
        return mean + jax.lax.stop_gradient(own) - own

    def stick(self):
        """Stand for the device: on the host that a file names, it never ends."""
        named = pathlib.Path(self.config.workdir) / "stuck"
        while named.exists() and named.read_text() == os.environ.get("JAXGOODPUT_HOST"):
            time.sleep(0.1)
        return np.float32(0)

    def optimizer(self):
        return optax.multi_transform(
            {"model": optax.sgd(0.05, momentum=0.9), "count": times_seen()},
            {"w": "model", "count": "count"},
        )

    def dataset(self):
        count = self.num_samples
        x = np.random.default_rng(3).normal(size=(count, WIDTH)).astype(np.float32)
        rows = {"x": x, "id": np.arange(count, dtype=np.int32)}
        hurry = pathlib.Path(self.config.workdir) / "hurry"
        self.source = Slow(rows, self.step_s, hurry, self.by_row)
        if self.stream is None:
            return self.source
        end, is_own = self.stream
        return Stream(self.source, end, os.getpid() % NUM_SAMPLES if is_own else 0)


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

    def on_host_judged(self, event):
        self.write(
            "judged",
            step=event.step,
            host=event.host,
            decision=event.decision,
            why=event.why,
            numbers=dict(event.numbers),
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
    """`fsdp=N` among the settings cuts the model over N devices."""
    cut = [int(x.partition("=")[2]) for x in settings if x.startswith("fsdp=")]
    settings = [x for x in settings if not x.startswith("fsdp=")]
    rules = (("w|count", PartitionSpec("fsdp")),)
    made = Config(
        workdir=str(workdir),
        policy="fixed",
        strategies=tuple(Strategy(fsdp=parts, rules=rules) for parts in cut),
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
    if "JAXGOODPUT_MEMBER" in os.environ:
        count_what_is_left(lines)
    if INITIAL in settings:  # on a device that this process has now
        options["initial"] = {"w": 3.0 + jnp.arange(WIDTH, dtype=jnp.float32)}
    if STREAM in settings or OWN in settings:
        options["stream"] = (epochs * NUM_SAMPLES, OWN in settings)
    sizes = [x for x in settings if x.startswith(SAMPLES)]
    if sizes:
        options["num_samples"] = int(sizes[0].removeprefix(SAMPLES))
    own = (INITIAL, STREAM, OWN, BY_ROW, MAY_STICK, DROPOUT, *sizes)
    options["may_stick"], options["dropout"] = MAY_STICK in settings, DROPOUT in settings
    made = config(out / "run", epochs, *(x for x in settings if x not in own))
    if "stream" in options:
        made = dataclasses.replace(made, epochs=None, base_steps=1e6)
    trainer = Counting(made, step_s=step_s, by_row=BY_ROW in settings, hooks=[lines], **options)
    state = trainer.fit()
    lines.write(
        "end",
        step=int(state.step),
        count=host_copy(state.params["count"]).tolist(),
        w=host_copy(state.params["w"]).tolist(),
        ema=host_copy(state.averaged["w"]).tolist(),
        num_read=trainer.source.num_read,
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


def count_what_is_left(lines):
    """Write how many arrays there are when the devices have been forgotten: each would keep them."""

    def forget():
        before()
        # Arrays as JAX makes them: another kind would say what it is only when it is asked.
        left = [x for x in gc.get_objects() if type(x).__name__ == "ArrayImpl"]
        lines.write("forgot", num_arrays=len(left))

    before = _jax.forget_devices
    _jax.forget_devices = forget


if __name__ == "__main__":
    die_instead_of_connecting(pathlib.Path(sys.argv[1]) / "died")
    run(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
