"""Model state that adds up over samples, and state that is not returned as it was given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Mean, config, rows

from jaxgoodput.clock import SystemClock
from jaxgoodput.engine.loss_checks import unlike_halves
from jaxgoodput.engine.state import SownState, Variables
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.parallel.place import place
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.start.checks import try_state
from jaxgoodput.train.start.plans import set_up
from jaxgoodput.train.start.problem import TaskInputs


class Counts(Mean):
    """Counts samples, and where they are positive, besides a mean and a number of calls."""

    summed: tuple[str, ...] = ("seen",)

    def init(self, key) -> Any:
        state = {
            "seen": {"samples": jnp.zeros(()), "positive": jnp.zeros(self.width, jnp.int32)},
            "mean": jnp.zeros(self.width),
            "calls": jnp.zeros((), jnp.int32),
        }
        return Variables(params=super().init(key), model_state=state, summed=self.summed)

    def loss_and_state(self, params, model_state, batch, key, mask: Any = None) -> Any:
        seen, kept = model_state["seen"], mask[:, None]
        changed = {
            "seen": {
                "samples": seen["samples"] + jnp.sum(mask),
                "positive": seen["positive"]
                + jnp.sum((batch["x"] > 0) & (kept > 0), axis=0, dtype=jnp.int32),
            },
            "mean": 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch["x"], axis=0),
            "calls": model_state["calls"] + 1,
        }
        return self.loss(params, batch, key), changed


class UndeclaredCounts(Counts):
    summed = ()


OTHER_SPLITS = [(1, 16, 96), (1, 4, 96), (4, 2, 91)]


@pytest.mark.parametrize(
    ("num_devices", "micro", "num_samples"),
    [(4, 4, 96), *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHER_SPLITS)],
)
def test_counts_are_exact_for_every_split(tmp_path, num_devices, micro, num_samples):
    data = rows(num_samples)
    limits = BatchLimits(base=16, max=16, micro=(1, micro))
    accumulates = micro * num_devices < 16
    found = config(tmp_path, batch=limits, epochs=2, tuning__accumulate=accumulates)
    state = Counts(found, data=data, devices=jax.devices()[:num_devices]).fit()
    seen = state.model_state["seen"]
    assert float(seen["samples"]) == 2 * num_samples
    np.testing.assert_array_equal(seen["positive"], 2 * (data["x"] > 0).sum(axis=0))


@pytest.mark.slow
def test_counts_that_are_not_declared_are_refused_with_several_replicas(tmp_path):
    with pytest.raises(ValueError, match="seen/positive, seen/samples adds up over samples"):
        UndeclaredCounts(config(tmp_path), devices=jax.devices()[:2]).fit()
    alone = UndeclaredCounts(config(tmp_path, base_steps=2.0), devices=jax.devices()[:1]).fit()
    assert float(alone.model_state["seen"]["samples"]) == 32


def test_counts_are_refused_before_other_processes_can_join(tmp_path):
    trainer = UndeclaredCounts(config(tmp_path))
    inputs = TaskInputs(trainer, trainer.config, SystemClock())
    setup = set_up(inputs, place(jax.devices()[:1], (), group_size=1))
    assert setup.where.is_elastic
    (engine,) = setup.engines.values()
    assert engine.num_replicas == 1
    message = r"seen/samples adds up .*\(others may join .* fixed number of processes"
    with pytest.raises(ValueError, match=message):
        try_state(setup, engine, engine.init(jax.random.key(0)), resumed=False)


@pytest.mark.slow
def test_counts_are_refused_before_another_strategy_is_tried(tmp_path):
    strategies = (Strategy(fsdp=2), Strategy(data=2))
    with pytest.raises(ValueError, match="seen/samples adds up .* under the strategy data2"):
        UndeclaredCounts(config(tmp_path, strategies=strategies), devices=jax.devices()[:2]).fit()


class Queue(Mean):
    """Keeps the last samples in a ring, as MoCo does: the place of the next one is set, and begins anew."""

    length = 24

    def init(self, key) -> Any:
        state = {"ring": jnp.zeros((self.length, self.width)), "place": jnp.zeros((), jnp.int32)}
        return Variables(params=super().init(key), model_state=state)

    def loss_and_state(self, params, model_state, batch, key):
        x, place = batch["x"], model_state["place"]
        ring = model_state["ring"].at[(place + jnp.arange(len(x))) % self.length].set(x)
        return self.loss(params, batch, key), {
            "ring": ring,
            "place": (place + len(x)) % self.length,
        }


@pytest.mark.slow
def test_what_a_refusal_says_of_a_place_in_a_queue_works(tmp_path):
    def run(num, **settings):
        made = config(tmp_path / f"{num}{len(settings)}", base_steps=5.0, shuffle=False, **settings)
        return Queue(made, devices=jax.devices()[:num]).fit().model_state

    with pytest.raises(
        ValueError, match='place adds up .* queue does, set Config.loss to "global"'
    ):
        run(2)
    alone, together = run(1), run(2, loss="global")
    assert int(alone["place"]) == int(together["place"]) == 5 * 16 % Queue.length
    np.testing.assert_array_equal(alone["ring"], together["ring"])


@pytest.mark.slow
def test_an_average_of_sums_is_not_taken_for_a_sum(tmp_path):
    class Averaged(Mean):
        def init(self, key) -> Any:
            return Variables(params=super().init(key), model_state={"size": jnp.zeros(())})

        def loss_and_state(self, params, model_state, batch, key):
            size = 0.9 * model_state["size"] + 0.1 * jnp.sum(batch["x"] > 0)
            return self.loss(params, batch, key), {"size": size}

    settings = config(tmp_path, base_steps=2.0)
    Averaged(settings, devices=jax.devices()[:2]).fit()


@pytest.mark.slow
def test_an_integer_that_depends_on_the_samples_is_refused_with_several_replicas(tmp_path):
    class Largest(Mean):
        def init(self, key) -> Any:
            return Variables(
                params=super().init(key), model_state={"largest": jnp.zeros((), jnp.int32)}
            )

        def loss_and_state(self, params, model_state, batch, key):
            largest = jnp.maximum(
                model_state["largest"], jnp.max(100 * batch["x"]).astype(jnp.int32)
            )
            return self.loss(params, batch, key), {"largest": largest}

    with pytest.raises(ValueError, match="largest is not floating and depends on the samples"):
        Largest(config(tmp_path), devices=jax.devices()[:2]).fit()


def test_a_summed_path_must_be_one_of_the_state(tmp_path):
    class Misnamed(Counts):
        summed = ("sen",)

    with pytest.raises(ValueError, match="names 'sen', and the model state has no such leaf"):
        Misnamed(config(tmp_path)).fit()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda s: {**s, "more": jnp.zeros(())}, "more is new"),
        (lambda s: {}, "count is missing"),
        (lambda s: {"count": jnp.zeros(2)}, r"count was int32\[\] and is float32\[2\]"),
        (lambda s: {"count": (s["count"],)}, "count is missing; count/0 is new"),
    ],
)
def test_a_state_that_is_not_returned_as_it_was_given_is_refused(tmp_path, changed, message):
    class Changing(Mean):
        def init(self, key) -> Any:
            count = jnp.zeros((), jnp.int32)
            return Variables(params=super().init(key), model_state={"count": count})

        def loss_and_state(self, params, model_state, batch, key):
            return self.loss(params, batch, key), changed(model_state)

    with pytest.raises(TypeError, match=message):
        Changing(config(tmp_path)).fit()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 8), min_size=4, max_size=16))
def test_halves_differ_in_their_fillers_if_any_samples_do(lengths):
    kept = (np.arange(8) < np.asarray(lengths)[:, None]).astype(np.float32)
    data = {"kept": kept, "id": np.arange(len(lengths))}
    choices = unlike_halves(data, 2)
    assert all(len(set(one["id"])) == 4 for one in choices)
    differ = any(one["kept"][:2].sum() != one["kept"][2:].sum() for one in choices)
    assert differ == (len(set(lengths)) > 1)


def test_sown_values_are_left_out_of_what_is_kept():
    found = SownState(
        {"stats": 1, "losses": 2, "moe": {"mean": 3, "loss": (4,)}, "other": {"loss": 5}},
        [("losses",), ("moe", "loss"), ("other", "loss")],
    )
    assert found.kept == {"stats": 1, "moe": {"mean": 3}}
    again = jax.tree.map(lambda x: x + 1, found)
    assert again["losses"] == 3 and again.kept == {"stats": 2, "moe": {"mean": 4}}
