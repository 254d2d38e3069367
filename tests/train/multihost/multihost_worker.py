"""The script that these tests start in several processes, and the trainers it runs.

    python multihost_worker.py OUT SECTION ...

runs the sections one after the other. What process r saw of a section goes to `OUT/SECTION.r.jsonl`,
line by line, so that it is there even if the process is killed.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
import time
import unittest.mock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.data.sources import ArraySource
from jaxgoodput.engine.state import Variables
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import Checkpoint, EvalEnd, FitEnd, FitStart, StepEnd
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.train.config import Config, with_overrides
from jaxgoodput.train.control import Preempted
from jaxgoodput.train.loop import Loop
from jaxgoodput.train.trainer import Trainer

NUM_SAMPLES = 50
NUM_COUNTED = 120
COUNTED_EPOCHS = 10
WIDTH = 4
WAIT_S = 60.0


def config(out, section, **settings):
    """A quiet run whose tuner never speaks, in a folder of its own under `out`."""
    quiet = {
        "policy": "fixed",
        "tuning.accumulate": False,
        "tuning.warm_up_steps": 1_000_000,
        "statistics.every_steps": 1,
        "execution.background_compile": False,
        "reporting.tensorboard": False,
        "reporting.progress": False,
    }
    given = {**quiet, **settings}
    plain = {k: v for k, v in given.items() if "." not in k}
    inner = [f"{k}={json.dumps(v)}" for k, v in given.items() if "." in k]
    return with_overrides(Config(workdir=str(out / section), **plain), inner)


class Noisy(Trainer):
    """A linear model with dropout, mutable state and metrics, for comparing one run with another."""

    def __init__(self, config, *, tx, num_eval=7, **options):
        super().__init__(config, **options)
        self.tx = tx
        self.num_eval = num_eval
        self.outputs = []

    def init(self, key):
        params = {"w": jax.random.normal(key, (WIDTH,)), "b": jnp.zeros(())}
        return Variables(
            params=params, model_state={"mean": jnp.zeros(WIDTH), "steps": jnp.int32(0)}
        )

    def output(self, params, x):
        return x @ params["w"] + params["b"]

    def loss_and_state(self, params, model_state, batch, key):
        kept = jax.random.bernoulli(key, 0.8, batch["x"].shape)
        error = self.output(params, jnp.where(kept, batch["x"], 0.0)) - batch["y"]
        mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)
        return error**2, {"mean": mean, "steps": model_state["steps"] + 1}

    def optimizer(self):
        return self.tx

    def dataset(self):
        return _rows(NUM_SAMPLES, seed=1)

    def eval_dataset(self):
        return {**_rows(self.num_eval, seed=2), "id": np.arange(self.num_eval, dtype=np.int32)}

    def metrics(self, params, batch):
        return {"error": self.output(params, batch["x"]) - batch["y"], "id": batch["id"]}

    def summarize(self, outputs):
        self.outputs.append({name: np.asarray(x).tolist() for name, x in outputs.items()})
        return super().summarize(outputs)


def _rows(count, *, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, WIDTH)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) + rng.normal(size=count)).astype(np.float32)}


def times_seen():
    """Adds to every entry how often its sample was in the batch, for a loss of minus that entry.

    The gradient of an entry is minus its share of the batch. A sample can be there twice, but not
    all of them, so the smallest share is that of one.
    """

    def update(updates, state, params=None):
        def times(g):
            once = jnp.min(jnp.where(g < 0, -g, jnp.inf))
            return jnp.round(-g / once)

        return jax.tree.map(times, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Counting(Trainer):
    """Counts on the devices how often each sample was applied, beside a little real training."""

    def init(self, key):
        return {"w": jnp.zeros(WIDTH), "count": jnp.zeros(NUM_COUNTED)}

    def loss(self, params, batch, key):
        own = params["count"][batch["id"]]
        mean = 0.5 * jnp.sum((params["w"][None] - batch["x"]) ** 2, axis=-1)
        return mean + jax.lax.stop_gradient(own) - own

    def optimizer(self):
        return optax.multi_transform(
            {"model": optax.sgd(0.05), "count": times_seen()}, {"w": "model", "count": "count"}
        )

    def dataset(self) -> Any:
        rows = _rows(NUM_COUNTED, seed=3)
        return {"x": rows["x"], "id": np.arange(NUM_COUNTED, dtype=np.int32)}


class Broken(ArraySource):
    """A source one of whose processes cannot read any more once `file` is there."""

    def __init__(self, arrays, file):
        super().__init__(arrays)
        self.file = file

    def batch(self, indices):
        if self.file.exists() and jax.process_index() == 1:
            raise OSError("the disk of process 1 is gone")
        return super().batch(indices)


class Crashing(Counting):
    """`Counting` over a source that breaks."""

    def dataset(self):
        return Broken(super().dataset(), pathlib.Path(self.config.workdir) / "broken")


class Watched(Loop):
    """A loop that shows its `Watch` every batch before it is taken, and after."""

    @property
    def watch(self):
        trainer: Any = self.task
        (watch,) = [hook for hook in trainer.hooks if isinstance(hook, Watch)]
        return watch

    def _next_batch(self):
        self.watch.before(self)
        batch = super()._next_batch()
        self.watch.taken(self, batch)
        return batch


class Watch:
    """What one process saw of one fit: a hook, and the loop's batches, as lines of JSON.

    `make` makes the trainer from a config.
    """

    def __init__(self, make, config, path, *, on_step=None, before_step=None, **options):
        self.on_step = on_step  # of process 0, on the hooks' thread
        self.before_step = before_step  # of every process, on the loop's
        self.last_step = 0  # of which the hooks know
        self._path = path
        self.trainer = make(config, hooks=(self,), loop=Watched, **options)

    def write(self, kind, **fields):
        with self._path.open("a") as file:  # complete lines, even if the next moment is the last
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    def lines(self):
        """This process's own lines."""
        return read(self._path)

    def on_fit_start(self, event: FitStart):
        self.last_step = event.step
        self.write("start", step=event.step, config=vars(event.config))

    def on_step_end(self, event: StepEnd):
        self.write(
            "applied",
            step=event.step,
            samples=event.samples,
            num_samples=event.num_samples,
            before=dataclasses.asdict(event.before),
            after=dataclasses.asdict(event.after),
            config=vars(event.config),
            metrics=dict(event.metrics),
        )
        self.last_step = event.step
        if self.on_step is not None:
            self.on_step(self, event)

    def on_eval_end(self, event: EvalEnd):
        self.write("evaluated", step=event.step, metrics=dict(event.metrics))

    def on_checkpoint(self, event: Checkpoint):
        self.write("checkpoint", step=event.step, error=event.error)

    def on_fit_end(self, event: FitEnd):
        self.write("end", step=event.step, reason=event.reason)

    def before(self, loop):
        self.loop = loop
        if self.on_step is not None and jax.process_index() == 0:
            # What the hook asks for, it asks for about then.
            _wait_until(lambda: self.last_step >= loop.now.step - 1)
        if self.before_step is not None:
            self.before_step(self, loop.now.step + 1)

    def taken(self, loop, batch):
        self.write(
            "taken",
            step=loop.now.step + 1,
            config=vars(loop.now.batch),
            compiled=loop.now.engine.bytes_of(loop.now.batch.micro_batch_size) is not None,
            indices=None if batch is None else batch.indices.tolist(),
            samples=loop.now.samples,
        )

    def compiled(self, found):
        self.write("compiled", name=found.name, cached=found.cached)

    def fit(self):
        """`fit`, and what came of it in the last lines."""
        began = time.monotonic()
        undo = listen_for_compilations(self.compiled)
        try:
            state = self.trainer.fit()
        except Preempted as error:
            self.write("preempted", step=error.step, signal=error.signal_name)
            raise
        finally:
            undo()
        leaves, _ = jax.tree_util.tree_flatten_with_path(
            (state.params, state.model_state, state.ema)
        )
        self.write(
            "state",
            step=int(state.step),
            seconds=time.monotonic() - began,
            leaves={jax.tree_util.keystr(p): whole(x).tolist() for p, x in leaves},
        )
        return state


def whole(x):
    """A value on the host, wherever its parts lie; all processes come here together."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def read(path):
    """The lines of a file that a `Watch` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- sections ----------------------------------------------------------------------------------------


def watched(make, out, section, config, **options):
    """A `Watch` of a section."""
    return Watch(make, config, lines_of(out, section), **options)


def noisy(out, section):
    """The settings of the sections that are compared with one process."""
    small = {"batch": BatchLimits(base=16, max=48, micro=(1, 4)), "epochs": 2}
    settings = {
        "sgd": {**small, "evaluation.every_base_steps": 2.0},
        "adam": {
            **small,
            "batch": BatchLimits(base=16, max=48, micro=(1, 2)),
            "tuning.accumulate": True,
            "ema": 0.9,
        },
    }
    return config(out, section, **settings[section])


def noisy_options(section):
    """The optimizer and the number of samples of an evaluation."""
    if section == "adam":
        return {
            "tx": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05)),
            "num_eval": 1,
        }
    return {"tx": optax.sgd(optax.cosine_decay_schedule(0.05, 20), momentum=0.9)}


def run_noisy(out, section, **options):
    watch = watched(Noisy, out, section, noisy(out, section), **noisy_options(section), **options)
    summary = watch.trainer.evaluate(watch.fit())
    watch.write("outputs", outputs=watch.trainer.outputs, summary=summary)


def counting_settings(**settings):
    """Any batch from 24 to 48 samples, on 2, 3 or 4 replicas; the tuner never speaks."""
    usual = {
        "policy": "goodput",
        "batch": BatchLimits(base=24, max=48),
        "rule": rules.none,  # a gain would multiply the counts
        "epochs": COUNTED_EPOCHS,
    }
    return {**usual, **settings}


def ask(watch, micro_batch_size, num_micro_batches):
    watch.trainer.request_batch(micro_batch_size, num_micro_batches)


def run_verdicts(out, section):
    """Process 0 asks for other batches in the middle of it all."""
    wanted = {3: (12, 1), 6: (8, 2), 9: (6, 1), 10: (10, 1), 13: (6, 2)}

    def on_step(watch, event):
        if event.step in wanted:
            micro, count = wanted[event.step]
            ask(watch, micro, count)

    limits = BatchLimits(base=24, max=96, min_global=12)
    given = counting_settings(batch=limits, **{"tuning.accumulate": True})
    watched(Counting, out, section, config(out, section, **given), on_step=on_step).fit()


class Slow(Counting):
    """In process 1 no size is traced behind the loop before `release` is there; 24 takes memory."""

    def loss(self, params, batch, key):
        size = len(batch["id"])
        is_behind = threading.current_thread() is not threading.main_thread()
        if jax.process_index() == 1 and is_behind and size in (8, 12, 16, 24):
            _wait_until(release_of(pathlib.Path(self.config.workdir)).exists)
        loss = super().loss(params, batch, key)
        if size == 24:
            loss += 0 * jnp.sort(jax.random.normal(key, (2**20,)))[0]
        return loss


def release_of(folder):
    return folder.with_suffix(".release")


def run_ready(out, section):
    """Greedy for the largest size that is ready everywhere; process 1 compiles nothing for a while.

    Of the sizes, 24 is refused for its memory, by the budget of process 1 alone.
    """

    def on_step(watch, event):
        loop = watch.loop
        sizes = loop.start.strategies.compiler("")
        ready, own = loop.start.strategies.ready(""), sizes.ready()
        watch.write("ready", step=event.step, sizes=list(ready), own=list(own))
        if event.step >= 4 and not sizes.is_busy:
            release_of(out / section).touch()
        if ready:
            ask(watch, max(ready), 1)
        if event.config.micro_batch_size == 16 and len(ready) == 4:
            watch.trainer.finish()

    def before_step(watch, step):
        time.sleep(0.01)

    small = {"execution.memory_bytes": 2**21} if jax.process_index() == 1 else {}
    settings = counting_settings(
        batch=BatchLimits(base=24, max=96, micro=(6, 24)),
        epochs=None,
        base_steps=1e4,
        **{"execution.background_compile": True, **small},
    )
    steps = {"on_step": on_step, "before_step": before_step}
    watched(Slow, out, section, config(out, section, **settings), **steps).fit()


@contextlib.contextmanager
def one_failing_save():
    """The disk is full the first time that Orbax writes."""
    save, failures = ocp.CheckpointManager.save, iter([OSError(28, "No space left on device")])

    def fail_once(self, *arguments, **named):
        for failure in failures:
            raise failure
        return save(self, *arguments, **named)

    with unittest.mock.patch.object(ocp.CheckpointManager, "save", fail_once):
        yield


def run_finish(out, section):
    """A save fails; later a hook of process 0 ends training as if it were complete."""

    def on_step(watch, event):
        if event.step == 2:
            watch.trainer.request_save()
        if event.step == 8:
            watch.trainer.finish()

    settings = counting_settings(epochs=None, base_steps=1e4)
    watch = watched(Counting, out, section, config(out, section, **settings), on_step=on_step)
    with one_failing_save():
        watch.fit()


def run_stop(out, section):
    """A hook of process 0 asks to save and stop."""

    def on_step(watch, event):
        if event.step == 5:
            watch.trainer.request_stop()

    settings = counting_settings(epochs=None, base_steps=1e4)
    watched(Counting, out, section, config(out, section, **settings), on_step=on_step).fit()


def run_terminated(out, section):
    """Process 1 gets SIGTERM at step 8, some steps after a verdict."""

    def on_step(watch, event):
        if event.step == 3:
            ask(watch, 12, 1)

    def before_step(watch, step):
        if step == 8 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    _counted(out, section, on_step, before_step)


def run_killed(out, section):
    """Resumes, saves, and gets SIGKILL some steps after the checkpoint is on disk."""

    def on_step(watch, event):
        if event.step == first(watch) + 2:
            watch.trainer.request_save()

    def before_step(watch, step):
        folder = watch.trainer.config.workdir
        if step == first(watch) + 8:  # the request has long been taken up
            _wait_until(lambda: newest(folder) > first(watch))
        saved = newest(folder)
        if saved > first(watch) and watch.last_step >= saved + 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def first(watch):
        def starts():
            return [line["step"] for line in watch.lines() if line["kind"] == "start"]

        _wait_until(starts)  # the hooks run beside the loop, which may be ahead of them
        return starts()[-1]

    _counted(out, section, on_step, before_step)


def run_completed(out, section):
    """Resumes and goes on to the end."""
    _counted(out, section, None, None)


def _counted(out, section, on_step, before_step):
    given = config(out, "counted", **counting_settings())
    watched(Counting, out, section, given, on_step=on_step, before_step=before_step).fit()


def run_crash_source(out, section):
    """Process 1 cannot read its data any more, some steps after a checkpoint."""

    def before_step(watch, step):
        if jax.process_index() == 1 and newest(watch.trainer.config.workdir) >= 0:
            (pathlib.Path(watch.trainer.config.workdir) / "broken").touch()

    _crash(out, section, Crashing, None, before_step)


def run_crash_hook(out, section):
    """A hook of process 0 fails, some steps after a checkpoint."""

    def on_step(watch, event):
        if newest(watch.trainer.config.workdir) >= 0:
            raise ArithmeticError("this hook cannot go on")

    _crash(out, section, Counting, on_step, None)


def _crash(out, section, kind, on_step, before_step):
    def on_step_and_save(watch, event):
        if event.step == 2:
            watch.trainer.request_save()
        if on_step is not None:
            on_step(watch, event)

    print(f"pid={os.getpid()}")
    given = config(out, section, **counting_settings(epochs=None, base_steps=1e5))
    steps = {"on_step": on_step_and_save, "before_step": before_step}
    watched(kind, out, section, given, **steps).fit()


def newest(workdir):
    """The newest complete checkpoint on disk, -1 where there is none."""
    folder = pathlib.Path(workdir) / "checkpoints"
    return max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=-1)


def lines_of(out, section):
    return out / f"{section}.{jax.process_index()}.jsonl"


def _wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


SECTIONS = {
    "sgd": run_noisy,
    "adam": run_noisy,
    "verdicts": run_verdicts,
    "ready": run_ready,
    "finish": run_finish,
    "stop": run_stop,
    "terminated": run_terminated,
    "killed": run_killed,
    "completed": run_completed,
    "crash_source": run_crash_source,
    "crash_hook": run_crash_hook,
}


def main():
    out = pathlib.Path(sys.argv[1])
    for section in sys.argv[2:]:
        SECTIONS[section](out, section)


if __name__ == "__main__":
    main()
