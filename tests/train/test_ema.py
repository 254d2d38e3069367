"""`Config.ema`: an average of the parameters over progress, the same at every batch, layout and restart."""

import dataclasses
from typing import Any, NamedTuple

import engines
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from absl import logging
from problems import Evaluated, InStep, Mean, Recorder, config, same

from jaxgoodput.engine.state import TrainState
from jaxgoodput.observe.events import EvalEnd, StepEnd
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.checkpoints.meta import WrongWorkdirError
from jaxgoodput.train.control import Preempted
from jaxgoodput.train.start.problem import problem_of

KEPT = 0.9
PLACES = (
    Strategy(),
    Strategy(data=8),
    Strategy(fsdp=8),
    Strategy(data=2, fsdp=2, tensor=2),
)
MEASURED = [
    *((strategy, "sgd") for strategy in PLACES[:2]),
    *((s, "adamw") for s in (PLACES[0], *PLACES[2:])),
]
OPTIMIZERS = {"sgd": (optax.sgd(0.1), rules.adascale), "adamw": (layouts.ADAM, rules.adam_scale)}


@pytest.fixture
def told(monkeypatch):
    """What users are warned of while a run is set up."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    return said


def averaging(strategy, optimizer="sgd", **problem):
    tx, rule = OPTIMIZERS[optimizer]
    return layouts.engine(strategy, tx=tx, rule=rule, ema=KEPT, base=32, **problem)


def over_progress(history):
    """The mean of parameters, each for the stretch of progress that led to it, older ones by KEPT."""
    progress = np.array([0.0, *(done for _, done in history)])
    weights = KEPT ** (progress[-1] - progress)
    weights = (weights[1:] - weights[:-1]) / (1 - KEPT ** progress[-1])
    np.testing.assert_allclose(weights.sum(), 1.0)

    def mean(*values):
        return sum(w * np.asarray(x, np.float64) for w, x in zip(weights, values, strict=True))

    return jax.tree.map(mean, *(params for params, _ in history))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, optimizer", MEASURED, ids=lambda x: x if isinstance(x, str) else x.name
)
def test_it_is_the_mean_over_progress_at_whatever_batch(strategy, optimizer, key, rng):
    engine = averaging(strategy, optimizer)
    state = engines.start(engine, key)
    engines.assert_same_bits(state.ema, state.params)
    history = []
    # Of a base of 32: updates and progress of one batch are a part of another's.
    for num_samples, parts in [(8, 1), (8, 1), (32, 4), (16, 2), (8, 1)]:
        rows = layouts.windows(rng, num_samples, 9)
        state, metrics = engines.run(engine, state, engines.cut(rows, parts))
        history.append((engines.host(state.params), metrics.progress))
        engines.assert_close(state.ema, over_progress(history), rtol=1e-5, atol=1e-6)
    steps = np.diff([0.0, *(progress for _, progress in history)])
    assert steps.max() == 1.0 and steps.min() == 0.25
    for own, trained in zip(jax.tree.leaves(state.ema), jax.tree.leaves(state.params), strict=True):
        assert own.sharding == trained.sharding
        assert not np.array_equal(own, trained)


@pytest.mark.parametrize("fused", [True, False])
def test_a_refused_update_leaves_it_alone(key, rng, fused):
    engine = engines.make(ema=KEPT, replicas=2)
    state, _ = engines.run(engine, engines.start(engine, key), [engines.samples(rng, 8)])
    before = engines.host((state.params, state.ema))
    bad = engines.samples(rng, 8)
    bad["y"][3] = np.nan
    state, metrics = engines.run(engine, state, [bad], fused=fused)
    assert not metrics.is_finite
    engines.assert_same_bits((state.params, state.ema), before)


def test_a_move_between_layouts_carries_every_bit(key, rng):
    engine = averaging(PLACES[1])
    state = engines.start(engine, key)
    for _ in range(2):
        state, _ = engines.run(engine, state, [layouts.windows(rng, 8, 9)])
    before = engines.host(state.ema)
    for strategy in (*PLACES[2:], PLACES[0], PLACES[1]):
        other = engine.on(strategy.on(jax.devices()[: strategy.num_devices]))
        state, engine = engine.move(state, other.layout), other
        engines.assert_same_bits(state.ema, before)
        wanted = jax.tree.map(lambda x: x.sharding, engine.abstract_state().ema)
        assert jax.tree.map(lambda x: x.sharding, state.ema) == wanted


def test_a_device_holds_its_part_of_it_and_no_more():
    without, with_one = layouts.engine(Strategy(fsdp=8)), averaging(Strategy(fsdp=8), "adamw")
    for engine in (without, with_one):
        for program in engine.training_programs(1, accumulate=False):
            engine.compile_program(program)
    params = jax.tree.leaves(with_one.abstract_state().params)
    part = sum(4 * np.prod(x.sharding.shard_shape(x.shape)) for x in params)
    more = (
        engines.known(with_one.bytes_of(1)).arguments - engines.known(without.bytes_of(1)).arguments
    )
    assert more == part


def test_frozen_parameters_have_none_and_bfloat16_masters_one_in_float32(key, rng):
    seen = []

    class Frozen(Evaluated):
        def init(self, key):
            return {"w": jnp.zeros(4, jnp.bfloat16), "body": jnp.ones(4)}

        def trainable(self, params):
            return {"w": True, "body": False}

        def loss(self, params, batch, key):
            return super().loss({"w": params["w"] * params["body"]}, batch, key)

        def metrics(self, params, batch):
            seen.append(jax.tree.map(lambda x: x.dtype, params))
            return {"w": jnp.full(batch["x"].shape[:1], params["w"][0], jnp.float32)}

    trainer = Frozen(config("unused", ema=KEPT))
    problem = problem_of(trainer, trainer.config)
    engine = engines.make(
        trainer.loss,
        init=trainer.init,
        sample={"x": jax.ShapeDtypeStruct((4,), jnp.float32)},
        trainable=problem.trainable,
        ema=KEPT,
    )
    state = engines.start(engine, key)
    for _ in range(3):
        rows = {"x": rng.normal(3, 1, (8, 4)).astype(np.float32)}
        state, _ = engines.run(engine, state, [rows])
    assert jax.tree.structure(state.ema) == jax.tree.structure({"w": 0, "body": None})
    assert state.ema["w"].dtype == jnp.float32 and state.params["w"].dtype == jnp.bfloat16
    engines.assert_same_bits(state.averaged, {"w": state.ema["w"], "body": state.params["body"]})
    both = [trainer.evaluate(s) for s in (state, dataclasses.replace(state, ema=None))]
    assert both[0]["w"] == float(state.ema["w"][0].astype(jnp.bfloat16))
    assert both[1]["w"] == float(state.params["w"][0]) != both[0]["w"]
    assert all(kinds["w"] == jnp.bfloat16 for kinds in seen)


def distance(weights):
    """What an evaluation of `Evaluated` says of them."""
    held_out = Evaluated(config("unused")).eval_dataset()["x"]
    return np.linalg.norm(np.asarray(weights) - held_out, axis=1).mean()


def test_an_evaluation_uses_it_and_the_user_gets_both(tmp_path):
    seen = Recorder()
    settings = config(tmp_path, ema=0.99, evaluation__every_base_steps=4.0)
    trainer = Evaluated(settings, hooks=[seen])
    state = trainer.fit()
    trained, averaged = distance(state.params["w"]), distance(state.averaged["w"])
    assert abs(trained - averaged) > 0.1
    assert seen.of(EvalEnd)[-1].metrics["distance"] == pytest.approx(averaged, rel=1e-5)
    assert trainer.evaluate(state)["distance"] == pytest.approx(averaged, rel=1e-5)
    as_trained = dataclasses.replace(state, ema=None)
    assert trainer.evaluate(as_trained)["distance"] == pytest.approx(trained, rel=1e-5)


def test_without_it_nothing_is_kept(tmp_path):
    state = Mean(config(tmp_path, epochs=1)).fit()
    assert not jax.tree.leaves(state.ema)
    assert state.averaged is state.params


# -- restarts ----------------------------------------------------------------------------------------


def stopped(settings, step, count):
    seen = Recorder(lambda e: trainer.request_stop() if e.step == step else None)
    trainer = Mean(settings, hooks=[seen], devices=jax.devices()[:count], loop=InStep)
    with pytest.raises(Preempted):
        trainer.fit()


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_a_resumed_run_has_the_same_to_the_bit(tmp_path, count):
    devices = jax.devices()[:count]
    whole = Mean(config(tmp_path / "whole", ema=KEPT), devices=devices).fit()
    settings = config(tmp_path / "parts", ema=KEPT)
    stopped(settings, 4, count)
    parts = Mean(settings, devices=devices).fit()
    assert same((parts.params, parts.ema), (whole.params, whole.ema))


def test_a_run_without_it_goes_on_with_one_that_begins_at_its_parameters(tmp_path, told):
    before = Mean(config(tmp_path, epochs=1)).fit()
    settings = config(tmp_path, epochs=2, ema=KEPT)
    seen: list[TrainState] = []

    class Kept(InStep):
        def run(self):
            seen.append(engines.host(self.now.state))
            return super().run()

    recorder = Recorder()
    state = Mean(settings, hooks=[recorder], loop=Kept).fit()
    assert "begins with the parameters" in told[0]
    engines.assert_same_bits(seen[0].ema, before.params)
    steps = recorder.of(StepEnd)
    assert [s.step for s in steps] == list(range(7, 13))
    # As if parameters had stood still until then.
    low, high = sorted([np.asarray(before.params["w"]), np.asarray(state.params["w"])], key=sum)
    assert np.all((low < state.ema["w"]) & (state.ema["w"] < high))


@pytest.mark.slow
def test_one_that_would_be_lost_is_refused(tmp_path):
    Mean(config(tmp_path, epochs=1, ema=KEPT)).fit()
    with pytest.raises(WrongWorkdirError, match=r"holds an average.*Set Config.ema"):
        Mean(config(tmp_path, epochs=2)).fit()
    another = Mean(config(tmp_path, epochs=2, ema=0.5)).fit()
    assert int(another.step) == 12


# -- what users are told -----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_a_share_that_cannot_work_is_named(tmp_path, share):
    with pytest.raises(ValueError, match="Config.ema must be a number between 0 and 1"):
        config(tmp_path, ema=share)


class Own(NamedTuple):
    average: Any


def own_average(first):
    """A link of a user's own that averages parameters."""

    def update(updates, state, params=None):
        assert params is not None
        moved: Any = optax.apply_updates(params, updates)
        return updates, Own(optax.incremental_update(moved, state.average, 1e-3))

    return optax.GradientTransformation(lambda params: Own(jax.tree.map(first, params)), update)


@pytest.mark.parametrize(
    "link, words",
    [
        (optax.ema(0.9), "Use Config.ema instead"),
        (own_average(jnp.array), "Use Config.ema instead"),
        (own_average(jnp.zeros_like), "Use Config.ema instead"),
        (optax.add_decayed_weights(1e-3), None),
        (optax.trace(0.9), None),
    ],
)
def test_an_average_in_the_optimizer_is_named(tmp_path, told, link, words):
    tx = optax.chain(link, optax.sgd(0.05, momentum=0.9))
    trainer = Mean(config(tmp_path), tx=tx)
    problem_of(trainer, trainer.config)
    assert [words in sentence for sentence in told] == ([True] if words else [])


def test_a_schedule_free_optimizer_is_named(tmp_path, told):
    tx = optax.contrib.schedule_free_sgd(0.1)
    problem_of(Mean(config(tmp_path), tx=tx), config(tmp_path))
    assert len(told) == 1 and 'Use Config.policy "fixed"' in told[0]
