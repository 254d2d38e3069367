"""Trainers small enough that a whole run takes a second, and hooks that remember what they saw."""

import json
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.train.config import Config, with_overrides
from jaxgoodput.train.loop import Loop
from jaxgoodput.train.trainer import Trainer
from jaxgoodput.tune.tuner import TunerThread, answer

NUM_SAMPLES = 96
WIDTH = 4


def config(workdir, **settings):
    """A quiet run of a fixed batch of 16, compiled once, without accumulation.

    A setting of a group goes by both names: `saving__at_end=False`.
    """
    settings.setdefault("batch", BatchLimits(base=16, max=64, micro=(1, 64)))
    quiet = {
        "policy": "fixed",
        "tuning__accumulate": False,
        "execution__background_compile": False,
        "reporting__tensorboard": False,
        "reporting__progress": False,
        "statistics__every_steps": 1,
    }
    if settings.keys().isdisjoint({"epochs", "base_steps"}):
        quiet["epochs"] = 2
    return configured(workdir=str(workdir), **{**quiet, **settings})


def configured(**settings):
    """A `Config` of settings by name, as in `config`."""
    plain = {k: v for k, v in settings.items() if "__" not in k}
    inner = {k.replace("__", "."): json.dumps(v) for k, v in settings.items() if "__" in k}
    return with_overrides(Config(**plain), [f"{k}={v}" for k, v in inner.items()])


def rows(num_samples=NUM_SAMPLES, *, offset=3.0, seed=1):
    """Samples around `offset`, with the noise of a unit normal."""
    noise = np.random.default_rng(seed).normal(size=(num_samples, WIDTH))
    return {"x": (offset + noise).astype(np.float32)}


class Mean(Trainer):
    """Learns the mean of its samples: strongly convex, and its gradient noise is known (the width)."""

    def __init__(self, config, *, data=None, tx=None, width=WIDTH, **options):
        super().__init__(config, **options)
        self.data = rows() if data is None else data
        self.tx = optax.sgd(0.05) if tx is None else tx
        self.width = width

    def init(self, key):
        return {"w": jnp.zeros(self.width)}

    def loss(self, params, batch, key):
        return 0.5 * jnp.sum((params["w"][None] - batch["x"]) ** 2, axis=-1)

    def optimizer(self):
        return self.tx

    def dataset(self):
        return self.data


class Evaluated(Mean):
    """`Mean` with held-out samples, a number of them that no batch divides."""

    def eval_dataset(self) -> Any:
        return rows(37, seed=2)

    def metrics(self, params, batch):
        return {
            "first": batch["x"][:, 0],
            "distance": jnp.linalg.norm(params["w"][None] - batch["x"], axis=-1),
        }


def add_times_seen():
    """An optimizer that adds, to every entry, how often its sample was in the batch.

    For a loss that is minus the entry of each sample, the gradient of an entry is minus its share of
    the batch; the smallest share that is not 0 belongs to the samples that were there once.
    """

    def update(updates, state, params=None):
        def times(g):
            shares = -g
            once = jnp.min(jnp.where(shares > 0, shares, jnp.inf))
            return jnp.round(shares / once)

        return jax.tree.map(times, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Counting(Mean):
    """`Mean`, which besides counts on the device how often each sample was applied."""

    def __init__(self, config, *, num_samples=NUM_SAMPLES, **options):
        super().__init__(
            config, data={**rows(num_samples), "id": np.arange(num_samples)}, **options
        )
        self.num_samples = num_samples
        self.tx = optax.multi_transform(
            {"model": self.tx, "count": add_times_seen()}, {"w": "model", "count": "count"}
        )

    def init(self, key):
        return {**super().init(key), "count": jnp.zeros(self.num_samples)}

    def loss(self, params, batch, key):
        mean = super().loss({"w": params["w"]}, batch, key)
        own = params["count"][batch["id"]]
        # In value nothing, in gradient minus one.
        return mean + jax.lax.stop_gradient(own) - own


def counting_config(workdir, **settings):
    """The gain would multiply the counts: no rule."""
    return config(workdir, rule=rules.none, **settings)


class Recorder:
    """A hook that keeps every event, in order; `then` is called with each `StepEnd`."""

    def __init__(self, then=None):
        self.events = []
        self.threads = set()
        self._then = then

    def of(self, kind):
        """The events of one class."""
        return [e for e in self.events if isinstance(e, kind)]

    def on_event(self, event):
        self.events.append(event)
        self.threads.add(threading.get_ident())

    def on_step_end(self, event):
        if self._then is not None:
            self._then(event)


def same(a, b):
    """Whether two states are equal to the bit."""
    plain = lambda x: jax.random.key_data(x) if _is_key(x) else x  # noqa: E731
    left, right = (jax.tree.map(lambda x: np.asarray(plain(x)), t) for t in (a, b))
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes()
        for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class AtOnce(TunerThread):
    """A tuner that answers on the asker's thread."""

    def __init__(self, on_answer, on_error):
        self._on_answer = on_answer

    @property
    def is_busy(self):
        return False

    def ask(self, situation):
        self._on_answer(answer(situation))
        return True

    def close(self):
        pass


class InStep(Loop):
    """A loop that waits for its hooks before every step.

    What a hook asks for at the end of step n then holds for step n + 1.
    """

    def __init__(self, *arguments, **named):
        self._told = threading.Condition()
        self._newest = 0  # step of which the analyst knows
        super().__init__(*arguments, **named)

    def _on_result(self, result):
        super()._on_result(result)
        with self._told:
            self._newest = result.ticket.step
            self._told.notify_all()

    def _obey(self, result):
        if self.now.step > self.start.first_step:
            with self._told:
                while self._newest < self.now.step and self.watcher.error is None:
                    self._told.wait(0.1)  # nobody tells of an error
        self.analyst.flush()
        return super()._obey(result)
