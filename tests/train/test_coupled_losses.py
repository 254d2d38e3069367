"""Losses in which samples see each other: the last batch, the mask, and what splitting a batch means."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from problems import WIDTH, InStep, Mean, Recorder, config, rows

from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.engine.state import Loss
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.models.of_flax import from_linen
from jaxgoodput.observe.events import FitEnd, StepEnd
from jaxgoodput.parallel.pipeline import pipeline
from jaxgoodput.parallel.strategy import Strategy

LIMITS = BatchLimits(base=40, max=40, micro=(1, 40))
STILL = optax.sgd(0.0)  # nothing moves: what a loss says is what it says of the first parameters


def devices(count):
    return jax.devices()[:count]


def in_order(num_samples, *counts):
    """The rows that batches of so many samples hold, one after the other."""
    cursor, data, found = Cursor(seed=0), rows(num_samples)["x"], []
    for count in counts:
        indices, cursor = take(cursor, num_samples, count)
        found.append(data[indices])
    return found


def in_batch(z):
    """Every sample's similarity to itself, among those of its batch."""
    logits = z @ z.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(z)))


class Contrastive(Mean):
    def init(self, key):
        return {"w": 0.4 * jax.random.normal(key, (WIDTH, WIDTH))}

    def loss(self, params, batch, key):
        return in_batch(batch["x"] @ params["w"])


class OneNumber(Contrastive):
    def loss(self, params, batch, key):
        return super().loss(params, batch, key).mean()


class Normal(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train, momentum=0.0)(x))[:, 0]


MODEL = from_linen(Normal(), train_kwargs={"train": True}, predict_kwargs={"train": False})


class Normalised(Mean):
    def init(self, key) -> Any:
        return MODEL.init(key, jnp.zeros((1, WIDTH)))

    def loss_and_state(self, params, model_state, batch, key):
        out, model_state = MODEL.train(params, model_state, key, batch["x"])
        return (out - batch["x"][:, 0]) ** 2, model_state


class InStages(Mean):
    """Two layers as a pipeline."""

    def init(self, key):
        return {"w": jax.random.normal(key, (2, WIDTH, WIDTH)) / WIDTH}

    def loss(self, params, batch, key):
        out = pipeline(lambda w, x: jnp.tanh(x @ w), params["w"], batch["x"], num_micro_batches=4)
        return jnp.sum((out - batch["x"]) ** 2, axis=-1)


# -- the last batch ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_last_batch_of_layers_in_stages_is_padded_to_the_size_of_others(tmp_path):
    seen = Recorder()
    settings = config(tmp_path, epochs=1, strategies=(Strategy(data=1, stage=2),))
    InStages(settings, data=rows(50), hooks=[seen], devices=devices(2)).fit()
    assert [s.num_samples for s in seen.of(StepEnd)] == [16, 16, 16, 2]


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", [Contrastive, OneNumber])
@pytest.mark.parametrize("background", [True, False])
def test_the_last_batch_has_the_loss_of_its_own_samples(tmp_path, trainer, background):
    seen = Recorder()
    settings = config(tmp_path, batch=LIMITS, epochs=1, execution__background_compile=background)
    run = trainer(settings, tx=STILL, hooks=[seen], devices=devices(1))
    state = run.fit()
    wanted = [float(in_batch(x @ state.params["w"]).mean()) for x in in_order(96, 40, 40, 16)]
    assert [s.num_samples for s in seen.of(StepEnd)] == [40, 40, 16]
    np.testing.assert_allclose([s.metrics["loss"] for s in seen.of(StepEnd)], wanted, rtol=1e-5)


@pytest.mark.nightly
def test_the_last_batch_has_the_statistics_of_its_own_samples(tmp_path):
    settings = config(tmp_path, batch=LIMITS, epochs=1, loss="whole")
    state = Normalised(settings, tx=STILL, devices=devices(8)).fit()
    last = in_order(96, 40, 40, 16)[-1]
    (statistics,) = state.model_state["batch_stats"].values()
    np.testing.assert_allclose(statistics["mean"], last.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics["var"], last.var(0), rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("accumulate", [False, True])
def test_micro_batches_before_it_are_whole(tmp_path, accumulate):
    """91 samples in batches of 40, made of one or two micro-batches: 11 are left, in one of 20 or two."""
    seen, sizes = Recorder(), []

    class Seen(Mean):
        def loss(self, params, batch, key):
            sizes.append(len(batch["x"]))
            return super().loss(params, batch, key)

    limits = BatchLimits(base=40, max=40, micro=(1, 8 if accumulate else 40))
    settings = config(tmp_path, batch=limits, epochs=1, tuning__accumulate=accumulate)
    state = Seen(settings, data=rows(91), hooks=[seen], devices=devices(1)).fit()
    assert [s.num_samples for s in seen.of(StepEnd)] == [40, 40, 11]
    assert set(sizes) >= ({8, 3} if accumulate else {40, 11})
    w = np.zeros(WIDTH)
    for x in in_order(91, 40, 40, 11):
        w -= 0.05 * (w - x.astype(np.float64).mean(0))
    np.testing.assert_allclose(state.params["w"], w, rtol=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("accumulate", [False, True])
def test_it_is_dropped_where_that_is_asked_for_and_a_complete_run_stays_complete(
    tmp_path, accumulate
):
    limits = BatchLimits(base=40, max=40, micro=(1, 8 if accumulate else 40))
    settings = config(
        tmp_path, batch=limits, epochs=1, last_batch="drop", tuning__accumulate=accumulate
    )
    for used in ([40, 40], []):
        seen = Recorder()
        OneNumber(settings, data=rows(91), hooks=[seen], devices=devices(1)).fit()
        assert [s.num_samples for s in seen.of(StepEnd)] == used
        assert (seen.of(FitEnd)[0].samples, seen.of(FitEnd)[0].reason) == (80, "done")


class Masked(Mean):
    """A mean over rows, one number, which leaves padding out by itself."""

    def loss(self, params, batch, key, mask: Any = None) -> Any:
        losses = super().loss(params, batch, key)
        return Loss(jnp.sum(losses * mask), jnp.sum(mask), {"real": mask})


class MaskedWithState(Masked):
    def loss_and_state(self, params, model_state, batch, key, *, mask: Any = None) -> Any:
        return self.loss(params, batch, key, mask), model_state


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", [Masked, MaskedWithState])
@pytest.mark.parametrize("loss", ["separate", "global"])
def test_a_loss_that_asks_for_the_mask_tells_padding_from_samples(tmp_path, trainer, loss):
    seen = Recorder()
    settings = config(tmp_path, batch=LIMITS, epochs=1, loss=loss)
    run = trainer(settings, data=rows(83), hooks=[seen], devices=devices(8))
    state = run.fit()
    assert [s.num_samples for s in seen.of(StepEnd)] == [40, 40, 3]  # on eight replicas
    w = np.zeros(WIDTH)
    for x in in_order(83, 40, 40, 3):
        w -= 0.05 * (w - x.astype(np.float64).mean(0))
    np.testing.assert_allclose(state.params["w"], w, rtol=2e-6)


# -- a batch that is never split ---------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    """What users are warned of while a run is set up."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    return said


class Dropout(Mean):
    def loss(self, params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return super().loss(params, {"x": batch["x"] * kept}, key)


def words(*, lengths):
    """Samples of eight tokens, of which as many count as `lengths` say; the first four alike."""
    rng = np.random.default_rng(0)
    counts = np.concatenate([np.full(4, 8), rng.choice(lengths, size=92)])
    kept = (np.arange(8) < counts[:, None]).astype(np.float32)
    return {"x": rng.normal(size=(96, 8, WIDTH)).astype(np.float32), "kept": kept}


class MeanOfTokens(Mean):
    """One mean over the tokens that count. At the head of zeros, all losses are the logarithm of two."""

    def __init__(self, config, *, lengths=(1, 2, 8), **options):
        super().__init__(config, data=words(lengths=lengths), **options)

    def tokens(self, params, batch):
        return jnp.log1p(jnp.exp(-(batch["x"] @ params["w"])))

    def loss(self, params, batch, key):
        return jnp.sum(self.tokens(params, batch) * batch["kept"]) / jnp.sum(batch["kept"])


class EvenTokens(MeanOfTokens):
    """All samples have as many tokens: the mean of two means is the mean of both."""

    def __init__(self, config, **options):
        super().__init__(config, lengths=(8,), **options)


class WeightedTokens(MeanOfTokens):
    def loss(self, params, batch, key) -> Any:
        losses = self.tokens(params, batch) * batch["kept"]
        return Loss(jnp.sum(losses), jnp.sum(batch["kept"]))


FREE = {"tuning__accumulate": True, "policy": "goodput", "execution__background_compile": True}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trainer", "settings", "what"),
    [
        (Contrastive, {}, "split over replicas"),
        (OneNumber, FREE, "micro-batches and replicas"),
        (Normalised, {"loss": "global", **FREE}, "over micro-batches:"),
        (Contrastive, {"loss": "global"}, None),  # a fixed batch, in one piece
        (Contrastive, {"loss": "whole", **FREE}, None),
        (Mean, {}, None),
        (Dropout, {}, None),
        (Masked, {}, None),
        (MeanOfTokens, {}, "split over replicas"),
        (MeanOfTokens, {"loss": "global", **FREE}, "over micro-batches:"),
        (
            MeanOfTokens,
            {"loss": "global", **FREE, "compute_dtype": "bfloat16"},
            "over micro-batches:",
        ),
        (EvenTokens, FREE, None),
        (WeightedTokens, FREE, None),
    ],
)
def test_a_loss_that_splitting_changes_is_warned_of(tmp_path, told, trainer, settings, what):
    limits = BatchLimits(base=16, max=64, micro=(1, 64), sizes=(2, 4, 8))
    given = config(tmp_path, batch=limits, base_steps=1.0, **settings)
    trainer(given, devices=devices(8)).fit()
    found = [sentence for sentence in told if "depends on the samples beside it" in sentence]
    assert len(found) == (what is not None)
    assert what is None or what in found[0]


@pytest.mark.nightly
def test_whole_is_one_micro_batch_that_sees_all_rows(tmp_path, told):
    def ask(event):
        if event.step in (1, 2):
            run.request_batch(*((2, 2) if event.step == 1 else (8,)))

    seen = Recorder(ask)
    limits = BatchLimits(base=32, max=64, micro=(1, 8), sizes=(2, 4, 8))
    settings = config(
        tmp_path,
        batch=limits,
        epochs=4,
        loss="whole",
        policy="goodput",
        tuning__accumulate=True,
        tuning__warm_up_steps=10**9,
    )
    run = Contrastive(settings, tx=STILL, hooks=[seen], devices=devices(8), loop=InStep)
    state = run.fit()
    (refused,) = [sentence for sentence in told if "training goes on" in sentence]
    assert "32 in 2 micro-batches of 2 on each of 8 replicas would be split" in refused
    used = [s.num_samples for s in seen.of(StepEnd)]
    assert {s.config.num_micro_batches for s in seen.of(StepEnd)} == {1} and 64 in used
    wanted = [float(in_batch(x @ state.params["w"]).mean()) for x in in_order(96, *used)]
    np.testing.assert_allclose([s.metrics["loss"] for s in seen.of(StepEnd)], wanted, rtol=1e-5)


@pytest.mark.nightly
def test_whole_does_not_fall_back_on_micro_batches_where_memory_is_short(tmp_path):
    settings = config(tmp_path, loss="whole", tuning__accumulate=True, execution__memory_bytes=1000)
    with pytest.raises(ValueError, match="a step with 16 samples per replica needs"):
        Contrastive(settings, devices=devices(1)).fit()
