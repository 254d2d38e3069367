"""With `keys="sample"`, losses with dropout and augmentation do not depend on how batches are split."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from flax import nnx
from jax.sharding import PartitionSpec
from problems import InStep, Mean, config
from table_runs import Two

import jaxgoodput as jg
from jaxgoodput.data.datasets import as_source
from jaxgoodput.train.ask.outlook import Outlook, outlooks
from jaxgoodput.train.control import Preempted

WIDTH, BASE, NUM_SAMPLES = 8, 12, 52
NUM_STEPS = 9  # two epochs, 8 batches and a last one of 8 samples, which 3 replicas have to pad


class Losses(jg.Hook):
    """Keeps the loss of every step by its number; asks for a stop after a step."""

    def __init__(self, stop_at=None):
        self.by_step = {}
        self.stop_at = stop_at
        self.trainer: Any = None

    def on_step_end(self, event, /):
        self.by_step[event.step] = event.metrics["loss"]
        if event.step == self.stop_at:
            self.trainer.request_stop()


def rows(num_samples=NUM_SAMPLES):
    x = np.random.default_rng(1).normal(size=(num_samples, WIDTH)).astype(np.float32)
    return {"x": 2 + x}


class Dropped(Mean):
    """Learns from shifted samples (an augmentation) with dropout, of a key for each of them."""

    def __init__(self, config, **options):
        super().__init__(config, **{"data": rows(), "width": WIDTH, **options})

    def init(self, key):
        return {
            "w": jnp.ones(WIDTH)
        }  # with zeros, the random numbers would not show in the first loss

    def loss(self, params, batch, key) -> Any:
        return jax.vmap(partial(self.of_one, params))(batch["x"], key)

    def of_one(self, params, x, key):
        first, second = jax.random.split(key)
        x = jnp.roll(x, jax.random.randint(first, (), 0, WIDTH))
        kept = jax.random.bernoulli(second, 0.7, x.shape)
        return 0.5 * jnp.sum((jnp.where(kept, params["w"] / 0.7, 0) - x) ** 2)


class OneKey(Dropped):
    """The same from one key for all samples of a call, as without the setting."""

    def loss(self, params, batch, key):
        return super().loss(params, batch, jax.random.split(key, len(batch["x"])))


def losses(folder, make: Any = Dropped, *, stop_at=None, num_devices=1, options=None, **settings):
    """The losses of a run by step; of the first part of a run with `stop_at`."""
    hook = Losses(stop_at)
    settings = {
        "keys": "sample",
        "batch": jg.BatchLimits(base=BASE, max=BASE, micro=(1, BASE)),
        **settings,
    }
    devices = jax.devices()[:num_devices]
    made = config(folder, **settings)
    hook.trainer = make(made, hooks=[hook], loop=InStep, devices=devices, **(options or {}))
    if stop_at is None:
        hook.trainer.fit()
    else:
        with pytest.raises(Preempted):
            hook.trainer.fit()
    return hook.by_step


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of one device with batches in one piece."""
    found = losses(tmp_path_factory.mktemp("alone"))
    assert len(found) == NUM_STEPS
    return found


def check_same(found, wanted):
    assert found.keys() == wanted.keys()
    for step, loss in found.items():
        assert loss == pytest.approx(wanted[step], rel=1e-6, abs=0), step


SPLIT = {"tuning__accumulate": True, "batch": jg.BatchLimits(base=BASE, max=BASE, micro=(1, 2))}
RULES = (("w", PartitionSpec("fsdp")),)
CUT, CUT_TWICE = ((jg.Strategy(data=n, fsdp=2, rules=RULES),) for n in (1, 2))
WAYS = {
    "micro-batches": SPLIT,
    "two replicas": {"num_devices": 2},
    "three replicas, padded": {"num_devices": 3},
    "four replicas": {"num_devices": 4},
    "four replicas of micro-batches": {"num_devices": 4, **SPLIT},
    "one loss over three replicas": {"num_devices": 3, "loss": "global"},
    "cut": {"num_devices": 2, "strategies": CUT},
    "cut, two replicas of micro-batches": {"num_devices": 4, "strategies": CUT_TWICE, **SPLIT},
}
QUICK = ("micro-batches", "three replicas, padded")


@pytest.mark.parametrize("way", QUICK)
def test_losses_are_those_of_one_device(tmp_path, alone, way):
    check_same(losses(tmp_path, **WAYS[way]), alone)


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way not in QUICK])
def test_losses_are_those_of_one_device_in_more_ways(tmp_path, alone, way):
    check_same(losses(tmp_path, **WAYS[way]), alone)


def test_with_a_key_for_each_micro_batch_they_are_not(tmp_path):
    """What the other tests compare does depend on the random numbers."""
    own = {"make": OneKey, "keys": "micro-batch"}
    one, two = (losses(tmp_path / str(n), num_devices=n, **own) for n in (1, 2))
    assert all(abs(one[step] / two[step] - 1) > 1e-3 for step in one)


@pytest.mark.slow
def test_a_run_that_is_resumed_on_other_devices_has_the_same_losses(tmp_path, alone):
    first = losses(tmp_path, stop_at=6, num_devices=3)
    rest = losses(tmp_path, num_devices=2, **SPLIT)
    assert max(first) == min(rest) - 1 == 6
    check_same(first | rest, alone)


@pytest.mark.slow
def test_epochs_have_random_numbers_of_their_own(tmp_path):
    """The whole data set in one batch of a model that does not move."""
    limits = jg.BatchLimits(base=NUM_SAMPLES, max=NUM_SAMPLES)
    found = losses(tmp_path, batch=limits, epochs=3, options={"tx": optax.sgd(0.0)})
    assert len({round(x, 4) for x in found.values()}) == 3


@pytest.mark.slow
def test_what_a_data_set_repeats_has_other_random_numbers(tmp_path):
    """A sampler that draws a sample twice in an epoch asks for two keys: the index tells them apart."""

    class Repeating:
        def __len__(self):
            return BASE

        def __getitem__(self, index):
            return {"x": rows()["x"][0]}

    class Each(Dropped):
        def loss(self, params, batch, key):
            each = super().loss(params, batch, key)
            return jg.Loss.of(each, spread=(each - each.mean()) ** 2)

    seen = []
    hook = jg.Every(lambda event: seen.append(event.metrics["aux/spread"]), steps=1)
    limits = jg.BatchLimits(base=BASE, max=BASE)
    made = config(tmp_path, batch=limits, keys="sample", epochs=1)
    Each(made, data=Repeating(), hooks=[hook], devices=jax.devices()[:1]).fit()
    assert seen[0] > 0.1


class Ordered(Dropped):
    """Reads a stream."""

    def dataset(self):
        x = self.data["x"]
        return jg.stream(lambda number: [{"x": row} for row in x], passes=None)


@pytest.mark.slow
def test_samples_of_a_stream_are_told_apart_by_their_places(tmp_path):
    settings = {"make": Ordered, "epochs": None, "base_steps": 9.0}
    wanted = losses(tmp_path / "whole", **settings)
    first = losses(tmp_path / "parts", stop_at=5, num_devices=2, **settings)
    rest = losses(tmp_path / "parts", num_devices=3, **settings)
    assert max(first) == min(rest) - 1 == 5
    check_same(first | rest, wanted)


@pytest.mark.slow
def test_steps_that_run_in_blocks_have_the_same_losses(tmp_path):
    free = {"statistics__every_steps": None, "execution__background_compile": True, "epochs": 24}
    wanted = losses(tmp_path / "one", epochs=24)
    check_same(losses(tmp_path / "blocks", **free), wanted)


class Game(Dropped):
    """Two losses in turns, each with an optimizer of its own."""

    def init(self, key):
        return {"left": jnp.zeros(WIDTH), "right": jnp.ones(WIDTH)}

    def loss(self, params, batch, key):
        of = super().loss
        return {
            name: of({"w": params[name]}, batch, jax.vmap(partial(jax.random.fold_in, data=n))(key))
            for n, name in enumerate(params)
        }

    def optimizer(self):
        return jg.InTurns({name: optax.sgd(0.05) for name in ("left", "right")})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["three replicas, padded", "four replicas of micro-batches"])
def test_named_updates_have_the_same_losses(tmp_path, way):
    wanted = losses(tmp_path / "one", Game)
    check_same(losses(tmp_path / "other", Game, **WAYS[way]), wanted)


class Rows(Two):
    """Tables, and dropout of what is read from them."""

    def loss(self, params, batch, key, rows=None):
        each = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (4,)).mean())(key)
        return super().loss(params, batch, key, rows=rows) * each


@pytest.mark.slow
def test_a_run_with_tables_has_the_same_losses(tmp_path):
    limits = jg.BatchLimits(base=64, max=64, max_micro_batches=1)
    settings = {"batch": limits, "epochs": None, "base_steps": 6.0}
    one, two = (losses(tmp_path / str(n), Rows, num_devices=n, **settings) for n in (1, 2))
    check_same(two, one)


# -- models of flax and equinox ----------------------------------------------------------------------


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(1)(nn.Dropout(0.3, deterministic=not train)(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.down = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


KINDS = {
    "linen": lambda: jg.from_linen(
        Net(), train_kwargs={"train": True}, predict_kwargs={"train": False}
    ),
    "nnx": lambda: jg.from_nnx(lambda rngs: NnxNet(rngs=rngs)),
}


class OfModel(Mean):
    """A model of flax with dropout, called sample by sample."""

    def __init__(self, config, *, model, **options):
        super().__init__(config, data=rows(), **options)
        self.model = model

    def init(self, key):
        return self.model.init(key, jnp.zeros((1, WIDTH)))

    def loss_and_state(self, params, model_state, batch, key):
        def of_one(x, key):
            return self.model.train(params, model_state, key, x[None])[0][0, 0]

        error = jax.vmap(of_one)(batch["x"], key) - batch["x"].sum(axis=1)
        return error**2, model_state


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_flax_have_the_same_losses(tmp_path, kind):
    options = {"model": KINDS[kind]()}
    wanted = losses(tmp_path / "one", OfModel, options=options)
    assert len(set(wanted.values())) == len(wanted)
    found = losses(tmp_path / "other", OfModel, num_devices=3, options=options)
    check_same(found, wanted)


# -- before the first step ---------------------------------------------------------------------------


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    return found


class Coupled(Dropped):
    def loss(self, params, batch, key):
        each = super().loss(params, batch, key)
        return each / jnp.sum(each)


@pytest.mark.slow
@pytest.mark.parametrize("make, is_coupled", [(Dropped, False), (Coupled, True)])
def test_dropout_couples_no_samples(tmp_path, warnings, make, is_coupled):
    losses(tmp_path, make, epochs=1, **SPLIT)
    assert any("depends on the samples beside it" in text for text in warnings) == is_coupled


def test_a_loss_that_takes_the_keys_for_one_is_told_what_to_write(tmp_path):
    class Taken(Mean):
        def loss(self, params, batch, key):
            kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
            return super().loss(params, {"x": batch["x"] * kept}, key)

    with pytest.raises(Exception, match="a single key") as caught:
        losses(tmp_path, Taken)
    assert "Draw with jax.vmap" in "".join(caught.value.__notes__)


def test_strategies_are_compared_with_the_same_loss(tmp_path):
    task = Dropped(config(tmp_path, keys="sample"))
    found = list(outlooks(task, task.config, jax.devices()[:2], (jg.Strategy(data=2),), budget=1e9))
    assert [isinstance(x, Outlook) and x.fits for x in found] == [True]


@pytest.mark.slow
def test_evaluations_and_the_data_set_know_nothing_of_it(tmp_path):
    class Judged(Dropped):
        def eval_dataset(self):
            return rows(5)

        def metrics(self, params, batch):
            assert set(batch) == {"x"}
            return {"first": batch["x"][:, 0]}

    trainer = Judged(config(tmp_path, keys="sample", epochs=1), devices=jax.devices()[:1])
    found = trainer.evaluate(trainer.fit())
    assert found["first"] == pytest.approx(float(rows(5)["x"][:, 0].mean()), rel=1e-5)
    assert len(as_source(trainer.dataset())) == NUM_SAMPLES
