"""Which strategies `plan` compares: all six degrees, and a reason for each that a model cannot follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxgoodput as jg
from jaxgoodput.parallel.collectives import received
from jaxgoodput.train.ask import outlook
from jaxgoodput.train.ask.outlook import LeftOut, Outlook, candidates_for, outlooks


class Plain(jg.Trainer):
    """Sequences of numbers through one matrix."""

    constrains: P | None = None

    def init(self, key):
        return {"kernel": jnp.zeros((16, 16))}

    def loss(self, params, batch, key):
        x = batch["x"] @ params["kernel"]
        if self.constrains is not None:
            x = jax.lax.with_sharding_constraint(x, self.constrains)
        return jnp.mean(x**2, axis=(1, 2))

    def optimizer(self):
        return optax.sgd(0.1)

    def dataset(self):
        return {"x": np.zeros((32, 8, 16), np.float32)}


class Sequences(Plain):
    constrains = P(None, "context")


class Rows(Plain):
    constrains = P("data")


def compared(kind, tmp_path, **config):
    limits = jg.BatchLimits(base=8, max=8)
    task = kind(jg.Config(workdir=str(tmp_path), batch=limits, base_steps=1.0, **config))
    kept, left_out = candidates_for(task, task.config, 8, memory_bytes=None)
    return {s.name for s in kept}, {one.strategy.name: one.reason for one in left_out}


@pytest.mark.parametrize("kind", [Plain, Rows])
def test_a_model_that_names_no_other_axis_has_the_usual_strategies(kind, tmp_path):
    kept, left_out = compared(kind, tmp_path)
    assert kept == {strategy.name for strategy in jg.candidates(8)}
    assert left_out["expert8"] == "no parameter is cut over expert=8"
    assert left_out["data4.stage2"] == "no parameter is cut over stage=2"
    assert "constrains no activation over context" in left_out["data4.context2"]
    assert not kept & set(left_out)


def test_a_model_that_constrains_sequences_is_planned_with_context(tmp_path):
    kept, left_out = compared(Sequences, tmp_path)
    assert {"context8", "data4.context2", "fsdp4.context2"} <= kept
    assert not any("context" in reason for reason in left_out.values())


def test_strategies_of_the_configuration_are_taken_as_they_are(tmp_path):
    asked = (jg.Strategy(context=-1), jg.Strategy(data=-1))
    kept, left_out = compared(Plain, tmp_path, strategies=asked)
    assert (kept, left_out) == ({"context8", "data8"}, {})


def test_a_strategy_that_sends_an_unknown_amount_leaves_the_others_their_rows(
    tmp_path, monkeypatch
):
    read, calls = outlook.compiled_analysis, []

    def analysis(program, nodes):
        calls.append(program)
        if len(calls) == 2:
            received("%r = f32[8]{0} ragged-all-to-all(f32[8]{0} %x)", nodes)
        return read(program, nodes)

    monkeypatch.setattr(outlook, "compiled_analysis", analysis)
    limits = jg.BatchLimits(base=8, max=8)
    task = Plain(jg.Config(workdir=str(tmp_path), batch=limits, base_steps=1.0))
    strategies = (jg.Strategy(data=2), jg.Strategy(fsdp=2), jg.Strategy(tensor=2))
    found = list(outlooks(task, task.config, jax.devices()[:2], strategies, budget=1e9))
    assert [type(one) for one in found] == [Outlook, LeftOut, Outlook]
    assert isinstance(found[1], LeftOut) and "ragged-all-to-all" in found[1].reason
    assert [one.strategy for one in found] == list(strategies)
