"""An evaluation covers every held-out sample exactly once, wherever and whenever it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import Evaluated, Recorder, config, in_step, rows

from jaxgoodput.train.events import EvalEnd, StepEnd
from jaxgoodput.train.run import Run

HELD_OUT = rows(37, seed=2)["x"]


class Everything(Evaluated):
    """Keeps what `summarize` is given."""

    def metrics(self, params, batch):
        return {**super().metrics(params, batch), "rows": batch["x"]}

    def summarize(self, outputs):
        self.outputs = {k: np.array(v) for k, v in outputs.items()}
        return {"largest": outputs["first"].max()}


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("rows_at_once", [None, 1, 3, 37, 64])
def test_every_sample_once_and_in_order(tmp_path, count, rows_at_once):
    settings = config(tmp_path, epochs=1, eval_micro_batch_size=rows_at_once)
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


def test_the_mean_of_each_output_unless_overridden(tmp_path):
    trainer = Evaluated(config(tmp_path, epochs=1))
    found = trainer.evaluate(trainer.fit())
    assert found.keys() == {"first", "distance"}
    assert found["first"] == pytest.approx(HELD_OUT[:, 0].astype(np.float64).mean(), rel=1e-6)


def test_evaluations_by_base_steps_and_at_the_end(tmp_path, monkeypatch):
    in_step(monkeypatch)
    seen = Recorder()
    settings = config(tmp_path, eval_every_base_steps=4.0)
    trainer = Evaluated(settings, hooks=[seen])
    state = trainer.fit()
    # The loop looks one step behind, so that it never waits for the one in flight.
    assert [e.step for e in seen.of(EvalEnd)] == [5, 9, 12]
    assert seen.of(EvalEnd)[-1].metrics == pytest.approx(trainer.evaluate(state))
    assert seen.of(EvalEnd)[-1].metrics["distance"] < seen.of(EvalEnd)[0].metrics["distance"]
    kinds = [type(e) for e in seen.events if isinstance(e, StepEnd | EvalEnd)]
    assert kinds == 5 * [StepEnd] + [EvalEnd] + 4 * [StepEnd] + [EvalEnd] + 3 * [StepEnd] + [
        EvalEnd
    ]


def test_evaluations_by_time(tmp_path, monkeypatch, clock):
    in_step(monkeypatch)
    seen = Recorder(lambda e: clock.advance(10.0))
    settings = config(tmp_path, eval_every_s=50.0)
    Evaluated(settings, clock=clock, hooks=[seen]).fit()
    assert [e.step for e in seen.of(EvalEnd)] == [5, 10, 12]


def test_time_in_an_evaluation_is_no_training_time(tmp_path, monkeypatch, clock):
    ledgers = []

    class Slow(Evaluated):
        def summarize(self, outputs):
            clock.advance(7.0)
            return super().summarize(outputs)

    finish = Run._finish

    def keep(run, *arguments):
        ledgers.append(run.ledger)
        finish(run, *arguments)

    monkeypatch.setattr(Run, "_finish", keep)
    seen = Recorder()
    Slow(config(tmp_path, eval_every_base_steps=100.0), clock=clock, hooks=[seen]).fit()
    assert ledgers[0].snapshot()["evaluation"] == pytest.approx(7.0 * len(seen.of(EvalEnd)))
    assert seen.of(EvalEnd)[-1].seconds == pytest.approx(7.0)


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
