"""An evaluation covers every held-out sample exactly once, wherever and whenever it runs."""

import contextlib
import math
import types
from typing import Any

import engines
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Evaluated, InStep, Recorder, config, rows

from jaxgoodput.clock import FakeClock
from jaxgoodput.data.datasets import as_source
from jaxgoodput.engine.state import Variables
from jaxgoodput.observe.events import EvalEnd, FitEnd, StepEnd
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train import evaluation
from jaxgoodput.train.config import with_overrides
from jaxgoodput.train.control import Preempted
from jaxgoodput.train.duties.evaluating import Evaluations
from jaxgoodput.train.evaluation import Evaluator
from jaxgoodput.train.loop import Loop

HELD_OUT = rows(37, seed=2)["x"]


class Everything(Evaluated):
    """Keeps what `summarize` is given."""

    def metrics(self, params, batch):
        return {**super().metrics(params, batch), "rows": batch["x"]}

    def summarize(self, outputs):
        self.outputs = {k: np.array(v) for k, v in outputs.items()}
        return {"largest": outputs["first"].max()}


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 8])
@pytest.mark.parametrize("rows_at_once", [None, 1, 3, 37, 64])
def test_every_sample_once_and_in_order(tmp_path, count, rows_at_once):
    settings = config(tmp_path, epochs=1, evaluation__micro_batch_size=rows_at_once)
    trainer = Everything(settings, devices=jax.devices()[:count])
    state = trainer.fit()
    found = trainer.evaluate(state)
    assert found == {"largest": HELD_OUT[:, 0].max()}
    np.testing.assert_array_equal(trainer.outputs["rows"], HELD_OUT)
    np.testing.assert_allclose(
        trainer.outputs["distance"],
        np.linalg.norm(np.asarray(state.params["w"]) - HELD_OUT, axis=1),
        rtol=1e-6,
    )


@pytest.mark.parametrize("widest, num_batches", [(2**24, 1), (100 * 8 * 4, 2), (1, 37)])
@pytest.mark.parametrize("strategy", [Strategy(), Strategy(data=2)], ids=lambda s: s.name)
def test_an_evaluation_takes_batches_as_large_as_cost_little_memory(
    monkeypatch, strategy, widest, num_batches
):
    monkeypatch.setattr(evaluation, "WIDEST_ON_CPU", widest)
    held_out = np.arange(37 * 4 * strategy.num_devices, dtype=np.float32)

    def metrics(params, model_state, batch):
        wide = jnp.broadcast_to(batch["x"][:, None], (len(batch["x"]), 8))  # 32 bytes a sample
        return {"x": jnp.sin(wide)[:, 0]}

    engine = engines.make(strategy=strategy)
    evaluator = Evaluator(
        metrics, as_source({"x": held_out}), engine.layout, base=4, clock=FakeClock()
    )
    state = engines.start(engine, jax.random.key(0))
    np.testing.assert_allclose(evaluator(state)["x"], np.sin(held_out), rtol=1e-6)
    assert evaluator.num_batches == num_batches


def test_the_mean_of_each_output_unless_overridden(tmp_path):
    trainer = Evaluated(config(tmp_path, epochs=1))
    found = trainer.evaluate(trainer.fit())
    assert found.keys() == {"first", "distance"}
    assert found["first"] == pytest.approx(HELD_OUT[:, 0].astype(np.float64).mean(), rel=1e-6)


def test_evaluations_by_base_steps_and_at_the_end(tmp_path):
    seen = Recorder()
    settings = config(tmp_path, evaluation__every_base_steps=4.0)
    trainer = Evaluated(settings, hooks=[seen], loop=InStep)
    state = trainer.fit()
    # The loop looks one step behind, so that it never waits for the one in flight.
    assert [e.step for e in seen.of(EvalEnd)] == [5, 9, 12]
    assert seen.of(EvalEnd)[-1].metrics == pytest.approx(trainer.evaluate(state))
    assert seen.of(EvalEnd)[-1].metrics["distance"] < seen.of(EvalEnd)[0].metrics["distance"]
    kinds = [type(e) for e in seen.events if isinstance(e, StepEnd | EvalEnd)]
    assert kinds == 5 * [StepEnd] + [EvalEnd] + 4 * [StepEnd] + [EvalEnd] + 3 * [StepEnd] + [
        EvalEnd
    ]


def test_without_an_interval_it_is_evaluated_once_at_the_end(tmp_path):
    seen = Recorder()
    trainer = Evaluated(config(tmp_path), hooks=[seen])
    state = trainer.fit()
    (only,) = seen.of(EvalEnd)
    assert only.step == 12 and only.metrics == pytest.approx(trainer.evaluate(state))


# -- predictions ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 8])
def trained(request, tmp_path_factory):
    """A trainer on some devices, and its state."""
    settings = config(tmp_path_factory.mktemp("run"), epochs=1)
    trainer = Everything(settings, devices=jax.devices()[: request.param])
    return trainer, trainer.fit()


@settings(max_examples=12)
@given(count=st.integers(1, 70), at_once=st.sampled_from([None, 1, 7, 64]))
def test_predictions_come_for_every_sample_in_order(trained, count, at_once):
    trainer, state = trained
    trainer.config = with_overrides(trainer.config, [f"evaluation.micro_batch_size={at_once}"])
    data = {"x": rows(count, seed=4)["x"], "id": np.arange(count)}

    def outputs(params, model_state, batch):
        return {"id": batch["id"], "far": params["w"][None] + batch["x"]}

    found = trainer.predict(state, data, outputs)
    np.testing.assert_array_equal(found["id"], data["id"])
    np.testing.assert_allclose(found["far"], np.asarray(state.params["w"]) + data["x"], rtol=1e-6)


def test_predictions_are_those_of_metrics_unless_others_are_asked_for(trained):
    trainer, state = trained
    np.testing.assert_array_equal(trainer.predict(state, rows(5))["rows"], rows(5)["x"])


def test_predictions_use_the_average_and_the_model_state(tmp_path):
    class Counted(Everything):
        def init(self, key) -> Any:
            return Variables(params=super().init(key), model_state={"calls": jnp.zeros(())})

        def loss_and_state(self, params, model_state, batch, key):
            return super().loss(params, batch, key), {"calls": model_state["calls"] + 1}

    trainer = Counted(config(tmp_path, epochs=1, ema=0.9), devices=jax.devices()[:1])
    state = trainer.fit()

    def outputs(params, model_state, batch):
        ones = jnp.ones(len(batch["x"]))
        return {"w": ones[:, None] * params["w"][None], "calls": ones * model_state["calls"]}

    found = trainer.predict(state, rows(3), outputs)
    np.testing.assert_allclose(found["w"], [state.averaged["w"]] * 3, rtol=1e-6)
    assert not np.allclose(found["w"], [state.params["w"]] * 3)
    assert found["calls"].tolist() == [float(state.step)] * 3


def test_outputs_that_are_not_by_name_and_sample_are_refused(trained):
    trainer, state = trained
    for wrong, said in (
        (lambda params, model_state, batch: batch["x"], "outputs must return arrays by name"),
        (lambda params, model_state, batch: {"a": {"b": batch["x"]}}, "and nothing nested"),
        (lambda params, model_state, batch: {"a": batch["x"].sum()}, r"outputs\['a'\] has shape"),
    ):
        with pytest.raises(TypeError, match=said):
            trainer.predict(state, rows(5), wrong)


def test_predictions_for_what_can_be_read_once_only_are_refused(trained):
    trainer, state = trained
    with pytest.raises(
        ValueError, match=r"predict\(\): a generator that is a stream.*loader.dataset"
    ):
        trainer.predict(state, (one for one in [rows(1)]))


# -- several data sets ---------------------------------------------------------------------------------


class Several(Everything):
    """Two sets of held-out samples, of different lengths."""

    def eval_dataset(self) -> Any:
        return None

    def eval_datasets(self) -> Any:
        return {"validation": rows(37, seed=2), "test": rows(11, seed=3)}


@pytest.mark.parametrize("count", [1, 8])
def test_each_of_several_data_sets_is_evaluated_by_its_name(tmp_path, count):
    settings = config(
        tmp_path,
        epochs=1,
        evaluation__every_base_steps=4.0,
        saving__best="test/largest",
        saving__best_mode="max",
    )
    seen = Recorder()
    trainer = Several(settings, devices=jax.devices()[:count], hooks=[seen])
    state = trainer.fit()
    expected = {"validation/largest": HELD_OUT[:, 0].max()}
    expected["test/largest"] = rows(11, seed=3)["x"][:, 0].max()
    assert trainer.evaluate(state) == expected == seen.of(EvalEnd)[-1].metrics
    assert int(trainer.restore(best=True).step) == seen.of(EvalEnd)[0].step, (
        "the first of equal ones"
    )


@pytest.mark.slow
def test_data_sets_that_are_given_in_the_wrong_way_are_refused_with_the_right_one(tmp_path):
    class Nested(Evaluated):
        def eval_dataset(self):
            return {"validation": rows(37), "test": rows(11)}

    class Both(Several):
        def eval_dataset(self):
            return rows(37)

    class Unnamed(Several):
        def eval_datasets(self):
            return [rows(37)]

    refused = {
        Nested: "11 rows.*If validation, test are several data sets, return them from eval_datasets",
        Both: "has eval_dataset and eval_datasets",
        Unnamed: "must return data sets by name",
    }
    for kind, why in refused.items():
        with pytest.raises(ValueError, match=why):
            kind(config(tmp_path / kind.__name__, evaluation__every_base_steps=4.0)).fit()


# -- ending early --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(), (6,), (11,), (11, 13)])
def test_a_run_ends_when_nothing_became_better_for_long(tmp_path, stops):
    """Restarts neither prolong nor shorten the time that it waits."""
    best_at, values = [], iter([5.0, 3.0, 4.0, 3.5, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0])

    class Planned(Evaluated):
        def summarize(self, outputs):
            return {"score": next(values)}

    settings = config(
        tmp_path,
        base_steps=100.0,
        evaluation__every_base_steps=4.0,
        saving__best="score",
        evaluation__patience_base_steps=8.0,
    )

    def run(end=None):
        seen = Recorder()
        trainer = Planned(settings, hooks=[seen], loop=InStep)
        seen._then = lambda e: e.step == end and trainer.request_stop()
        with contextlib.nullcontext() if end is None else pytest.raises(Preempted):
            trainer.fit()
        best_at.extend(e.step for e in seen.of(EvalEnd) if e.metrics["score"] == 3.0)
        return trainer, seen

    for end in stops:
        run(end)
    trainer, seen = run()
    assert seen.of(FitEnd)[0].reason == "done"
    assert 8 <= seen.of(StepEnd)[-1].step - best_at[0] <= 8 + 4 + 2
    assert float(trainer.restore(best=True).step) == best_at[0]


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0, math.nan]), min_size=1, max_size=12),
    patience=st.integers(1, 5),
    is_late=st.booleans(),
)
def test_patience_counts_from_the_best_evaluation(values, patience, is_late):
    """Also while that is still being saved."""
    ended, best = [], [math.nan, math.nan]  # saved at
    now = types.SimpleNamespace(progress=0.0)
    asked: Any = types.SimpleNamespace(
        config=types.SimpleNamespace(
            evaluation=types.SimpleNamespace(patience_base_steps=float(patience)),
            saving=types.SimpleNamespace(best="score"),
        ),
        start=types.SimpleNamespace(
            now=now,
            is_chief=True,
            checkpoints=types.SimpleNamespace(best_progress=lambda: best[-2 if is_late else -1]),
        ),
        finish=lambda: ended.append(now.progress),
        best_at=0.0,
    )
    for at, value in enumerate(values):
        now.progress = float(at)
        if value < min((v for v in values[:at] if v == v), default=math.inf):
            best.append(float(at))
            asked.best_at = float(at)
        else:
            Evaluations._lose_patience(asked)
    for at in range(len(values)):
        known = [(v, i) for i, v in enumerate(values[: at + 1]) if v == v]
        first = min(known)[1] if known else 0
        is_best = bool(known) and first == at
        assert (at in ended) == (at - first >= patience and not is_best)


def test_patience_without_a_metric_is_refused(tmp_path):
    with pytest.raises(ValueError, match="waits for a better value.*saving.best"):
        config(tmp_path, evaluation__patience_base_steps=8.0)


class AsArrays:
    """Rows that are made with jnp, when they are read."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data["x"])

    def __getitem__(self, index):
        return {"x": np.asarray(jnp.asarray(self.data["x"][index]) + jnp.zeros(()))}


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_is_the_users_may_use_jnp_as_it_likes(tmp_path, prefetch):
    """The loop's own thread may not send anything unasked."""

    class Free(Evaluated):
        def summarize(self, outputs) -> Any:
            return {name: jnp.mean(jnp.asarray(x) + np.ones(())) for name, x in outputs.items()}

        def dataset(self):
            return AsArrays(super().dataset())

        def eval_dataset(self) -> Any:
            return AsArrays(super().eval_dataset())

    seen = Recorder()
    settings = config(
        tmp_path, evaluation__every_base_steps=4.0, execution__prefetch=prefetch, epochs=1
    )
    Free(settings, hooks=[seen]).fit()
    assert np.isfinite([e.metrics["first"] for e in seen.of(EvalEnd)]).all() and seen.of(EvalEnd)


@pytest.mark.slow
def test_evaluations_by_time(tmp_path, clock):
    seen = Recorder(lambda e: clock.advance(10.0))
    settings = config(tmp_path, evaluation__every_s=50.0)
    Evaluated(settings, clock=clock, hooks=[seen], loop=InStep).fit()
    assert [e.step for e in seen.of(EvalEnd)] == [5, 10, 12]


def test_time_in_an_evaluation_is_no_training_time(tmp_path, clock):
    ledgers = []

    class Slow(Evaluated):
        def summarize(self, outputs):
            clock.advance(7.0)
            return super().summarize(outputs)

    class Kept(Loop):
        def _finish(self, reason):
            ledgers.append(self.ledger)
            super()._finish(reason)

    seen, settings = Recorder(), config(tmp_path, evaluation__every_base_steps=100.0)
    Slow(settings, clock=clock, hooks=[seen], loop=Kept).fit()
    assert ledgers[0].snapshot()["evaluation"] == pytest.approx(7.0 * len(seen.of(EvalEnd)))
    assert seen.of(EvalEnd)[-1].seconds == pytest.approx(7.0)


@pytest.mark.slow
def test_an_evaluation_reads_the_state_and_leaves_it(tmp_path):
    trainer = Evaluated(config(tmp_path, epochs=1))
    state = trainer.fit()
    before = np.array(state.params["w"])
    assert trainer.evaluate(state) == trainer.evaluate(state)
    np.testing.assert_array_equal(state.params["w"], before)


def test_bf16_computes_in_bf16(tmp_path):
    kinds = []

    class Asking(Evaluated):
        def metrics(self, params, batch):
            kinds.append(params["w"].dtype)
            return {"first": batch["x"][:, 0]}

    trainer = Asking(config(tmp_path, epochs=1, compute_dtype="bfloat16"))
    state = trainer.fit()
    trainer.evaluate(state)
    assert set(kinds) == {jnp.dtype("bfloat16")} and state.params["w"].dtype == jnp.float32


WINDOWS = layouts.windows(np.random.default_rng(5), 21, 9)
# Steps of the network on other devices and other parts, from one evaluation to the next.
PLACES = (
    Strategy(data=8),
    Strategy(fsdp=8),
    Strategy(fsdp=4, tensor=2),
    Strategy(data=2, tensor=4),
    Strategy(data=2, fsdp=2),
    Strategy(),
)


def outputs(params, model_state, batch):
    return {"loss": layouts.loss(params, batch, None), "codes": batch["codes"]}


@pytest.fixture(scope="module")
def following():
    """One evaluator, made for a single device, and what it says of a state there."""
    home = Strategy().on(jax.devices()[:1])
    evaluator = Evaluator(
        outputs, as_source(WINDOWS), home, base=4, micro_batch_size=4, clock=FakeClock()
    )
    alone = layouts.engine(Strategy())
    return evaluator, evaluator(engines.start(alone, jax.random.key(0)))


@pytest.mark.parametrize("strategy", PLACES, ids=lambda s: s.name)
def test_an_evaluation_follows_the_state_and_gives_the_same_numbers(following, strategy):
    evaluator, expected = following
    other = layouts.engine(strategy)
    found = evaluator(engines.start(other, jax.random.key(0)))
    np.testing.assert_array_equal(found["codes"], WINDOWS["codes"])
    np.testing.assert_array_equal(expected["codes"], WINDOWS["codes"])
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=2e-6)
    # Compiled for where the state lies, as can be done ahead.
    assert evaluator.bytes_of(other.abstract_state()) is not None


@pytest.mark.parametrize("scanned", [False, True])
def test_cut_parameters_are_whole_one_after_the_other(scanned):
    width, layers, rows = 64, 16, 64  # per replica

    def init(key):
        ups = jax.random.normal(key, (layers, width, 4 * width)) / width**0.5
        # Cut over its features, which invites the compiler to gather the batch instead.
        embed = jax.random.normal(key, (4 * width, width))
        return {"embed": embed, "up": ups if scanned else list(ups)}

    def layer(x, up):
        return x + jnp.sin(x @ up).reshape(-1, 4, width).mean(1), None

    def deep(params, model_state, batch):
        x = params["embed"][batch["code"]]
        if scanned:
            x, _ = jax.lax.scan(layer, x, params["up"])
        else:
            for up in params["up"]:
                x, _ = layer(x, up)
        return {"out": x.sum(-1)}

    one = engines.make(init=init, strategy=Strategy(fsdp=8), tx=layouts.ADAM)
    codes = {"code": np.arange(8 * rows, dtype=np.int32) % (4 * width)}
    evaluator = Evaluator(
        deep, as_source(codes), one.layout, base=rows, micro_batch_size=rows, clock=FakeClock()
    )
    evaluator.compile(one.abstract_state())
    need = evaluator.bytes_of(one.abstract_state())
    a_leaf = 4 * width * width * 4
    activations = rows * (4 + 1) * width * 4  # of a replica's own samples
    assert need.arguments == (layers + 1) * a_leaf // 8 + rows * 4
    # XLA:CPU of jaxlib 0.11 gathers the leaves of an unrolled model ahead of their layers.
    at_once = 3 if scanned or jax.__version_info__ < (0, 11) else layers + 1
    assert need.temporaries < at_once * a_leaf + 2 * activations
