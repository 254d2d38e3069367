"""The learning rate to begin with: where the loss falls fastest, found without leaving anything behind."""

import math

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import Mean, Recorder, config, rows

from jaxgoodput.data.streams import stream
from jaxgoodput.train.ask import rates
from jaxgoodput.train.ask.rates import RateSearch, find_learning_rate

ONE = jax.devices()[:1]


def searched(losses, *, spread=0.01, **more):
    factors = np.geomspace(1e-4, 1e3, len(losses))
    return RateSearch(factors=factors, losses=np.asarray(losses), spread=spread, **more)


@given(
    fall=st.floats(0.1, 100.0),
    middle=st.integers(20, 120),
    sharpness=st.floats(0.05, 0.5),
    turn=st.integers(20, 60),
)
def test_the_rate_is_where_the_loss_falls_fastest(fall, middle, sharpness, turn):
    at = np.arange(200.0)
    losses = -fall / (1 + np.exp(-sharpness * (at - middle)))
    losses += fall * np.exp(np.minimum(at - middle - turn, 3.0))
    found = searched(losses, spread=fall / 100)
    assert found.is_known and found.has_turned
    steepest = found.factors[middle]
    ratio = found.factors[1] / found.factors[0]
    expected = min(steepest, found.factors[found.lowest] / 3)
    assert expected / ratio**2 <= found.factor <= expected * ratio**2


@pytest.mark.parametrize(
    "one, said",
    [
        (searched(np.ones(50)), "Not known: the loss did not fall in 50 steps"),
        (searched(1 - np.arange(50) / 50), "still falls at 1e+03 times the optimizer's own"),
        (
            searched(np.abs(np.arange(50) - 30.0), base_rate=0.1),
            "was lowest at 0.19. It is one short run",
        ),
        (
            searched(np.abs(np.arange(50) - 30.0), base_rate=0.1, changes=True),
            "own learning rate changes within these steps",
        ),
    ],
)
def test_the_answer_says_what_is_known(one, said):
    answer = " ".join(one.answer().split())
    assert said in answer, answer
    assert math.isnan(one.factor) == (not one.is_known)


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
