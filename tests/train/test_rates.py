"""The learning rate to begin with: where the loss falls fastest, found without leaving anything behind."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import Mean, Recorder, config, rows

from jaxgoodput.data.streams import stream
from jaxgoodput.train.ask import rates
from jaxgoodput.train.ask.rates import find_learning_rate

ONE = jax.devices()[:1]


def found(losses, **more):
    """A search of 200 steps, of which these are the losses."""
    factors = np.geomspace(1e-4, 1e3, 200)[: len(losses)]
    return rates.searched(factors, np.asarray(losses, float), 200, **more)


def falling(height, *, middle=90, sharpness=0.1, turn=40, seed=0):
    """Losses that fall by `height` standard deviations of their own noise, and then rise."""
    at = np.arange(200.0)
    losses = -height / (1 + np.exp(-sharpness * (at - middle)))
    losses += height * np.exp(np.minimum((at - middle - turn) / 5, 3.0))
    return losses + np.random.default_rng(seed).normal(size=200)


@given(
    height=st.floats(5.0, 1e4),
    middle=st.integers(60, 120),
    sharpness=st.floats(0.08, 0.5),
    turn=st.integers(40, 60),
    seed=st.integers(0, 1000),
)
def test_the_rate_is_where_the_loss_falls_fastest(height, middle, sharpness, turn, seed):
    losses = falling(height, middle=middle, sharpness=sharpness, turn=turn, seed=seed)
    one = found(losses)
    assert one.is_known and one.has_turned
    steepest = math.log10(one.factors[middle])
    # Seven decades are 200 steps; a third is half a decade.
    assert abs(math.log10(one.factor) - steepest) < (1.0 if height < 50 else 0.4)


def test_noise_alone_is_seldom_taken_for_a_fall():
    rng = np.random.default_rng(0)
    known = [found(rng.normal(size=200)).is_known for _ in range(400)]
    assert np.mean(known) < 0.05
    assert np.mean([found(falling(3.0, seed=seed)).is_known for seed in range(100)]) > 0.9


@pytest.mark.parametrize("last", [1e6, 1e30])
def test_one_loss_that_explodes_does_not_hide_the_fall_before(last):
    losses = [*falling(20.0, turn=1000)[:130], last]
    one = found(losses)
    assert one.is_known and one.lowest >= 105 and one.losses[-12] < -15


@pytest.mark.parametrize(
    "one, said",
    [
        (found(np.cos(np.arange(50.0))), "Not known: the loss did not clearly fall in 50 steps"),
        (found(-np.maximum(np.arange(200.0) - 20, 0)), "a higher rate may do, too"),
        (
            found(-np.maximum(np.arange(150.0) - 20, 0), has_failed=True),
            "and was lowest at 17 times the optimizer's own. It is",
        ),
        (
            found(np.abs(np.arange(200.0) - 100), base_rate=0.1),
            "and was lowest at 0.033. It is one short run",
        ),
        (
            found(np.abs(np.arange(200.0) - 100), base_rate=0.1, changes=True),
            "own learning rate changes within these steps",
        ),
    ],
    ids=["not known", "falls", "failed", "named", "changes"],
)
def test_the_answer_says_what_is_known(one, said):
    answer = " ".join(one.answer().split())
    assert said in answer, answer
    assert math.isnan(one.factor) == (not one.is_known)
    assert ("a higher rate" in answer) == (one.is_known and not one.has_turned)


class Timid(Mean):
    """Its own learning rate is far too low."""

    def learning_rate(self, progress):
        return 1e-4


@pytest.mark.slow
def test_a_rate_that_is_too_low_is_mended_and_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(rates.tempfile, "tempdir", str(tmp_path))
    heard = Recorder()
    settings = config(tmp_path / "own", evaluation__every_base_steps=2.0, epochs=2)
    trainer = Timid(settings, tx=optax.sgd(1e-4), hooks=[heard], devices=ONE)
    found = find_learning_rate(trainer, highest=1e6)
    assert found.is_known and found.base_rate == 1e-4
    assert 1e-3 < found.factor * 1e-4 < 1.0, found.answer()
    assert list(tmp_path.iterdir()) == [] and heard.events == []
    assert trainer.config is settings and trainer.hooks == (heard,)
    # A run with a rate a thousand times as high diverges: the search ended before.
    assert len(found.losses) < rates.NUM_STEPS and np.isfinite(found.losses).all()


class Logarithmic(Mean):
    """Its loss is the logarithm of what is left until far away, where it is none."""

    def __init__(self, settings, most):
        super().__init__(settings, tx=optax.sgd(1.0), devices=ONE)
        self.most = most

    def loss(self, params, batch, key):
        return jnp.log(self.most - jnp.abs(params["w"]).sum()) + 0 * batch["x"].sum(axis=1)


@pytest.mark.slow
def test_a_rate_at_which_the_loss_is_none_is_too_high(tmp_path):
    one = find_learning_rate(Logarithmic(config(tmp_path, base_steps=100.0), 100.0))
    assert one.has_failed and one.is_known and np.isfinite(one.losses).all()
    assert "a higher rate" not in one.answer()
    with pytest.raises(
        RuntimeError, match="step 1 was not finite, at a learning rate of about 0.0001"
    ):
        find_learning_rate(Logarithmic(config(tmp_path, base_steps=100.0), -1.0))


@pytest.mark.slow
def test_what_moves_parameters_of_its_own_is_refused(tmp_path):
    tx = optax.contrib.schedule_free_sgd(1e-2, b1=0.9)
    with pytest.raises(ValueError, match="schedule-free.*optimizer that it wraps"):
        find_learning_rate(Mean(config(tmp_path, base_steps=100.0), tx=tx, devices=ONE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "data, named, error, why",
    [
        (rows(), {"num_steps": 5}, ValueError, "at least 40 steps"),
        (rows(), {"lowest": 1.0, "highest": 1.0}, ValueError, "0 < lowest < highest"),
        (stream(iter([]), live=True), {}, RuntimeError, "use up a live stream"),
        (stream([{"x": np.zeros(4, np.float32)}] * 40), {}, RuntimeError, "the data ended after"),
    ],
    ids=["steps", "range", "live", "short"],
)
def test_what_it_cannot_tell_is_refused(tmp_path, data, named, error, why):
    task = Mean(config(tmp_path, base_steps=100.0), data=data, devices=ONE)
    with pytest.raises(error, match=why):
        find_learning_rate(task, **named)
