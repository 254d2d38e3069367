"""A Trainer over two tables with tiers, and the same training with all rows in memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import Recorder, config

import jaxgoodput as jg
from jaxgoodput.data.cursor import take
from jaxgoodput.embedding.hashing import initial_values
from jaxgoodput.embedding.table import Lookup
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.programs.rows import WithRows
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.start.problem import problem_of

SIZES = {"user": (900, 8), "item": (2500, 4)}
NUM_READ = {"user": 1, "item": 3}
TIERS = {"user": (200, 210), "item": (500, 520)}  # slots on the device and in RAM
NUM_SAMPLES = 4096
RATE = 0.1


def samples(seed=0):
    rng = np.random.default_rng(seed)
    drawn = {
        name: np.minimum(rng.zipf(1.2, (NUM_SAMPLES, NUM_READ[name])) - 1, size - 1).astype(
            np.int32
        )
        for name, (size, _) in SIZES.items()
    }
    return {**drawn, "label": rng.standard_normal(NUM_SAMPLES).astype(np.float32)}


class Two(jg.Trainer):
    """Two tables below a small dense part."""

    def __init__(
        self, config, *, tiers=TIERS, folder=None, row_optimizer=None, data=None, **kwargs
    ):
        super().__init__(config, **{"devices": jax.devices()[:1], **kwargs})
        self.data = samples() if data is None else data
        self.tiers, self.folder = tiers, folder or f"{config.workdir}/tables"
        self.row_optimizer = row_optimizer or jg.embedding.Adagrad(RATE)

    def init(self, key):
        width = sum(NUM_READ[name] * dim for name, (_, dim) in SIZES.items())
        keys = jax.random.split(key, 2)
        return {
            "in": jax.random.normal(keys[0], (width, 16)),
            "out": jax.random.normal(keys[1], (16,)),
        }

    def tables(self):
        return {
            name: jg.embedding.Table(
                folder=f"{self.folder}/{name}",
                dim=dim,
                optimizer=self.row_optimizer,
                num_rows=size,
                device_rows=self.tiers[name][0],
                ram_rows=self.tiers[name][1],
                store={"segment_bytes": 2**14},
            )
            for name, (size, dim) in SIZES.items()
        }

    def ids(self, batch):
        return {name: batch[name] for name in SIZES}

    def scores(self, params, rows):
        read = [rows[name].reshape(len(rows[name]), -1) for name in sorted(rows)]
        return jnp.tanh(jnp.concatenate(read, axis=1) @ params["in"]) @ params["out"]

    def loss(self, params, batch, key, rows: Any = None):
        return (self.scores(params, rows) - batch["label"]) ** 2

    def optimizer(self):
        return optax.sgd(0.05)

    def dataset(self):
        return self.data

    def eval_dataset(self):
        return samples(seed=1)

    def metrics(self, params, batch, rows: Any = None):
        return {"error": (self.scores(params, rows) - batch["label"]) ** 2}


def settings(workdir, **changes):
    limits = BatchLimits(base=64, max=256, sizes=(64, 128, 256), max_micro_batches=1)
    return config(workdir, **{"batch": limits, "base_steps": 40.0, **changes})


SAVED = {"saving__every_base_steps": 10.0, "saving__keep": 2}


class Changing(Recorder):
    """Asks for other batches at some steps."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.trainer: Any = None
        self.tables: Any = None  # while they are open

    def on_step_end(self, event):
        super().on_step_end(event)
        self.tables = self.trainer._loop.start.feed.tables
        if event.step in self.sizes:
            self.trainer.request_batch(*self.sizes[event.step])


def dense(trainer, steps):
    """Tables that are arrays of all rows, which every step passes over; trained on the batches of a run."""
    whole = Two(trainer.config, tiers={name: (size, 0) for name, (size, _) in SIZES.items()})
    problem, layout = (
        problem_of(whole, whole.config),
        Strategy().on(jax.devices()[:1]),
    )
    shapes = {name: jax.ShapeDtypeStruct((n,), np.int32) for name, n in NUM_READ.items()}
    sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), samples())
    engine = Engines(problem, WithRows(own=sample, rows=shapes)).on(layout)
    slots = {
        name: jnp.asarray(
            table.layout.pack_host(
                {
                    "embedding": initial_values(
                        np.arange(SIZES[name][0]), table.dim, seed=0, scale=0.01
                    ),
                    **table.optimizer.begin(),
                },
                SIZES[name][0],
            )
        )
        for name, table in whole.tables().items()
    }
    every = {
        name: Lookup(
            slots=np.arange(size, dtype=np.int32), inverse=(), is_often=np.zeros(size, bool)
        )
        for name, (size, _) in SIZES.items()
    }
    step = jax.jit(engine.programs.step(engine.shape(64), measure=True).function)
    state, data = engine.init(jax.random.key(whole.config.seed)), samples()
    state, key = dataclasses.replace(state, key=None), jax.random.key_data(state.key)
    for one in steps:
        chosen, _ = take(one.before, NUM_SAMPLES, one.num_samples)
        batch = {name: x[chosen] for name, x in data.items()}
        batch = WithRows(own=batch, rows={name: batch[name] for name in SIZES})
        mask = np.ones(one.num_samples, np.float32)
        state, slots, _ = step(state, key, slots, every, batch, mask)
    tables = whole.tables()
    rows = {name: tables[name].layout.unpack_host(np.asarray(x)) for name, x in slots.items()}
    return rows, jax.device_get(state.params)


def rows_of(trainer):
    """All rows of the tables of a run that is over, by field."""
    found = {}
    for name, table in trainer.tables().items():
        with table.open() as table:
            rows = table.rows(np.arange(SIZES[name][0]))
            found[name] = table.layout.unpack_host(rows)
    return found


def same_rows(a, b):
    for table, fields in a.items():
        for field, found in fields.items():
            np.testing.assert_array_equal(found, b[table][field], err_msg=f"{table} {field}")


def close_rows(a, b):
    """Equal but for the order of sums."""
    for table, fields in a.items():
        for field, found in fields.items():
            name = f"{table} {field}"
            np.testing.assert_allclose(found, b[table][field], rtol=1e-3, atol=1e-5, err_msg=name)
