"""Sections of a job whose model lies over its processes; a script as `multihost_worker` is."""

import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import multihost_worker as worker
import numpy as np
import optax
from jax.sharding import PartitionSpec
from multihost_worker import NUM_COUNTED, Counting, config, watched

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.parallel.strategy import REPLICA_AXES, Strategy
from jaxgoodput.train.checkpoints.saved import FromCheckpoint

INPUTS, HIDDEN, NUM_EVAL = 16, 64, 37
EPOCHS = 3
STOPPED_AT = 5
STRATEGIES = {
    "fsdp4.tensor2": (Strategy(fsdp=4, tensor=2),),
    "fsdp8": (Strategy(fsdp=8),),
    "data2.fsdp4": (Strategy(data=2, fsdp=4),),
    "data8": (Strategy(data=8),),
}


def rows(count, *, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, INPUTS)).astype(np.float32)
    return {"x": x, "id": np.arange(count, dtype=np.int32)}


class Cut(Counting):
    """`Counting` with parameters large enough to be cut."""

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": {"kernel": jax.random.normal(up, (INPUTS, HIDDEN)) / 4},
            "down": {"kernel": jax.random.normal(down, (HIDDEN, INPUTS)) / 8},
            "count": jnp.zeros(NUM_COUNTED),
        }

    def output(self, params, x):
        return jax.nn.gelu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]

    def loss(self, params, batch, key):
        own = params["count"][batch["id"]]
        kept = jax.random.bernoulli(key, 0.8, batch["x"].shape)
        out = self.output(params, jnp.where(kept, batch["x"], 0.0))
        error = jnp.mean((out - batch["x"]) ** 2, axis=-1)
        return error + jax.lax.stop_gradient(own) - own

    def optimizer(self):
        parts: dict[Hashable, Any] = {
            "model": optax.sgd(0.5, momentum=0.9),
            "count": worker.times_seen(),
        }
        return optax.multi_transform(parts, {"up": "model", "down": "model", "count": "count"})

    def dataset(self):
        return rows(NUM_COUNTED, seed=3)

    def eval_dataset(self):
        return rows(NUM_EVAL, seed=4)

    def metrics(self, params, batch):
        error = jnp.mean((self.output(params, batch["x"]) - batch["x"]) ** 2, axis=-1)
        return {"error": error, "id": batch["id"]}

    def summarize(self, outputs):
        assert outputs["id"].tolist() == list(range(NUM_EVAL))
        return super().summarize(outputs)


class Constrained(Cut):
    """A model that says itself how its activations are cut."""

    def output(self, params, x):
        cut = jax.lax.with_sharding_constraint(x, PartitionSpec(REPLICA_AXES))
        return super().output(params, cut)


def settings(**changes):
    """Batches of 16 samples; two epochs of 120 end with half a batch."""
    usual = {"batch": BatchLimits(base=16, max=16), "rule": rules.none, "epochs": 1}
    return {**usual, **changes}


def run_layout(out, section, **options):
    """One epoch under the strategy that the section is named after."""
    kind = "global" if section == "data8" else "auto"
    given = settings(
        strategies=STRATEGIES[section],
        loss=kind,
        ema=0.9,
        **{"evaluation.every_base_steps": 4.0},
    )
    watch = watched(Cut, out, section, config(out, section, **given), **options)
    state = watch.fit()
    watch.write("evaluated at the end", metrics=watch.trainer.evaluate(state))


class Shown(worker.Watch):
    """Asks for the parameters after step 3."""

    def on_step_end(self, event):
        super().on_step_end(event)
        if event.step == 3:
            self.trainer.request_state()

    def on_state(self, event):
        count = event.params["count"]
        self.write(
            "shown", step=event.step, count=count.tolist(), shape=event.params["up"]["kernel"].shape
        )


def run_begun(out, section, **options):
    """Begins with what was learned under "fsdp8", and restores what it comes to."""
    given = settings(strategies=STRATEGIES["fsdp4.tensor2"])
    other = FromCheckpoint(config(out, "fsdp8", **settings()).workdir, averaged=False)
    watch = Shown(
        Cut, config(out, section, **given), worker.lines_of(out, section), initial=other, **options
    )
    state, found = watch.fit(), watch.trainer.restore()
    same = jax.tree.map(
        lambda a, b: all(
            np.array_equal(x.data, y.data)
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        ),
        state.params,
        found.params,
    )
    watch.write("restored", same=all(jax.tree.leaves(same)))


def run_constrained(out, section, **options):
    """No strategy is asked for, and the model is one program over all devices."""
    given = settings(epochs=None, base_steps=2.0)
    watched(Constrained, out, section, config(out, section, **given), **options).fit()


def run_switched(out, section, **options):
    """Two changes of strategy, by request."""
    wanted = {1: (2, "data2.fsdp4"), 4: (4, "fsdp4.tensor2")}

    def on_step(watch, event):
        if event.step in wanted:
            micro, strategy = wanted[event.step]
            watch.trainer.request_batch(micro, strategy=strategy)

    strategies = (*STRATEGIES["fsdp4.tensor2"], *STRATEGIES["data2.fsdp4"])
    given = settings(strategies=strategies, ema=0.9)
    watched(Cut, out, section, config(out, section, **given), on_step=on_step, **options).fit()


def run_stopped(out, section, **options):
    """A save fails in all processes; then a hook asks to save and stop."""

    def on_step(watch, event):
        if event.step == 1:
            watch.trainer.request_save()
        if event.step == STOPPED_AT:
            watch.trainer.request_stop()

    with worker.one_failing_save():
        counted(out, section, "fsdp4.tensor2", on_step=on_step, **options)


def run_completed(out, section, **options):
    """Resumes and goes on to the end."""
    counted(out, section, "fsdp4.tensor2", **options)


def counted(out, section, strategy, **options):
    """Goes on with the run that several jobs share."""
    given = settings(strategies=STRATEGIES[strategy], epochs=EPOCHS)
    watched(Cut, out, section, config(out, "counted", **given), **options).fit()


SECTIONS = {
    **dict.fromkeys(STRATEGIES, run_layout),
    "begun": run_begun,
    "constrained": run_constrained,
    "switched": run_switched,
    "stopped": run_stopped,
    "completed": run_completed,
}


def main():
    out = Path(sys.argv[1])
    for section in sys.argv[2:]:
        SECTIONS[section](out, section)


if __name__ == "__main__":
    main()
