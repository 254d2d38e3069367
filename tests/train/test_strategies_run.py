"""Whole runs under several strategies: the same training, moved in memory, and tuned among them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from problems import InStep, Recorder, config, rows

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import FitEnd, Resharded, StepEnd, TuneEnd
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.parallel.partition import CannotDivide
from jaxgoodput.parallel.place import place, require_as_many
from jaxgoodput.parallel.strategy import Strategy, candidates
from jaxgoodput.train.duties.switching import BatchSwitcher
from jaxgoodput.train.trainer import Trainer

WIDTH, HIDDEN = 8, 512
STRATEGIES = (Strategy(data=-1), Strategy(fsdp=8), Strategy(fsdp=4, tensor=2))
NAMES = tuple(s.resolved(8).name for s in STRATEGIES)


class Network(Trainer):
    """A regression whose matrices can be cut."""

    def init(self, key):
        k = jax.random.split(key, 2)
        return {
            "up": {"kernel": jax.random.normal(k[0], (WIDTH, HIDDEN)) / 3},
            "down": {"kernel": jax.random.normal(k[1], (HIDDEN, WIDTH)) / 20},
        }

    def loss(self, params, batch, key):
        hidden = jax.nn.tanh(batch["x"] @ params["up"]["kernel"])
        return jnp.mean((hidden @ params["down"]["kernel"] - batch["x"]) ** 2, axis=-1)

    def optimizer(self):
        return optax.adam(1e-3)

    def dataset(self):
        noise = np.random.default_rng(1).normal(size=(192, WIDTH))
        return {"x": noise.astype(np.float32)}

    def eval_dataset(self):
        return {"x": rows(30)["x"].repeat(2, 1)}

    def metrics(self, params, batch):
        return {"loss": self.loss(params, batch, jax.random.key(0))}


class Wander(Hook):
    """Asks for the next strategy every few steps."""

    def __init__(self, every):
        self.every = every
        self.trainer: Any = None

    def on_step_end(self, event):
        if event.step % self.every == 0:
            name = NAMES[event.step // self.every % len(NAMES)]
            replicas = {"data8": 8, "fsdp8": 8, "fsdp4.tensor2": 4}[name]
            self.trainer.request_batch(16 // replicas, strategy=name)


LIMITS = BatchLimits(base=16, max=16, micro=(1, 16), max_micro_batches=1)


def run(workdir, strategies, *, hooks=(), loop=InStep, **settings):
    made = config(
        workdir, batch=LIMITS, strategies=strategies, statistics__preconditioned=False, **settings
    )
    trainer = Network(made, hooks=hooks, loop=loop)
    for hook in hooks:
        if isinstance(hook, Wander):
            hook.trainer = trainer
    return trainer.fit(), trainer


@pytest.mark.slow
def test_a_run_that_changes_its_strategy_is_the_run_that_does_not(tmp_path):
    alone, _ = run(tmp_path / "alone", (STRATEGIES[0],), epochs=4, ema=0.9)
    seen = Recorder()
    moved, trainer = run(
        tmp_path / "moved",
        STRATEGIES,
        hooks=[seen, Wander(5)],
        epochs=4,
        ema=0.9,
        evaluation__every_base_steps=8.0,
    )
    switches = seen.of(Resharded)
    assert len(switches) >= 5 and {s.after for s in switches} == set(NAMES)
    assert all(s.seconds > 0 for s in switches)
    assert any(s.bytes_moved > 0 for s in switches)
    steps = seen.of(StepEnd)
    assert sum(s.num_samples for s in steps) == 4 * 192, "every sample once an epoch"
    assert {s.config.strategy for s in steps} == set(NAMES)
    ours, theirs = ((state.params, state.ema) for state in (moved, alone))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) <= 1e-4 * np.linalg.norm(b)
    (end,) = seen.of(FitEnd)
    assert end.buckets_s["resharding"] > 0
    assert trainer.evaluate(moved)["loss"] == pytest.approx(
        trainer.evaluate(alone)["loss"], rel=1e-4
    )


@pytest.mark.slow
def test_the_tuner_tries_every_strategy_once_and_says_why(tmp_path):
    seen = Recorder()
    run(
        tmp_path,
        STRATEGIES,
        hooks=[seen],
        epochs=60,
        tuning__min_gain=0.5,  # so that a trial is worth its price in a run of seconds
        policy="goodput",
        tuning__warm_up_steps=20,
        tuning__dwell_steps=10,
        tuning__every_steps=20,
    )
    verdicts = [t.verdict for t in seen.of(TuneEnd)]
    reasons = [v.reason for v in verdicts]
    # One that came too late, on a configuration no longer in use, is void.
    taken = [t.verdict for t in seen.of(TuneEnd) if t.switched]
    probed = [v.config.strategy for v in taken if v.reason.startswith("probe")]
    assert sorted(probed) == sorted(NAMES[1:]), reasons
    assert all("both moves" in r for r in reasons if r.startswith("probe"))
    after = [r for r in reasons if r.startswith(("return", "keep: ")) and "tried" in r]
    assert len(after) >= 2
    assert any("the switch costs" in r for r in reasons)


@pytest.mark.slow
def test_each_start_makes_do_with_the_strategies_that_its_devices_allow(tmp_path):
    """8, 6, 1, 3 and again 8 devices: 16 samples cannot be cut over 6 or 3 replicas, nor 512 in 3."""
    cut = (("up/kernel", PartitionSpec(None, "tensor")),)
    used, samples = [], 0
    for epochs, count in enumerate((8, 6, 1, 3, 8), start=1):
        seen = Recorder()
        made = config(
            tmp_path,
            batch=LIMITS,
            strategies=(*candidates(count, rules=cut), Strategy(tensor=-1, title="whole")),
            epochs=epochs,
            execution__background_compile=True,
        )
        Network(made, hooks=[seen], devices=jax.devices()[:count]).fit()
        steps = seen.of(StepEnd)
        samples += sum(s.num_samples for s in steps)
        used.append({s.config.strategy for s in steps})
    assert samples == 5 * 192
    assert used == [{"data8"}, *[{"whole"}] * 4]  # a run stays with what it was saved under


def test_strategies_that_are_the_same_on_these_devices_are_one():
    one = jax.devices()[:1]
    assert list(place(one, (Strategy(data=-1), Strategy(fsdp=-1))).layouts) == ["single"]
    other = Strategy(data=-1, rules=((".", PartitionSpec()),))
    with pytest.raises(ValueError, match="title"):
        place(one, (Strategy(data=-1), other))


def test_a_strategy_that_does_not_divide_is_refused_where_there_is_no_other(tmp_path):
    three = Strategy(tensor=-1, rules=(("up/kernel", PartitionSpec(None, "tensor")),))
    made = config(tmp_path, batch=LIMITS, strategies=(three,), epochs=1)
    with pytest.raises(CannotDivide, match="tensor=3"):
        Network(made, devices=jax.devices()[:3]).fit()


@pytest.mark.slow
def test_a_misspelt_strategy_is_refused_where_it_is_asked_for(tmp_path):
    asked = []

    class Asking(Hook):
        trainer: Any = None

        def on_step_end(self, event):
            if event.step == 2:
                with pytest.raises(ValueError, match="no strategy 'fdsp8'.*data8, fsdp8"):
                    self.trainer.request_batch(2, strategy="fdsp8")
                asked.append(event.step)

    hook = Asking()
    settings = config(tmp_path, batch=LIMITS, strategies=STRATEGIES[:2], epochs=1)
    hook.trainer = Network(settings, hooks=[hook])
    hook.trainer.fit()
    assert asked == [2]


@pytest.mark.slow
def test_a_refused_move_leaves_training_as_it_was(tmp_path, monkeypatch):
    def refuse(self, strategy):
        raise MoveDoesNotFit("the move needs 9 MiB more")

    monkeypatch.setattr(BatchSwitcher, "_move", refuse)
    seen = Recorder()
    run(tmp_path, STRATEGIES, hooks=[seen, Wander(5)], epochs=2)
    assert not seen.of(Resharded)
    assert {s.config.strategy for s in seen.of(StepEnd)} == {"data8"}
    assert seen.of(FitEnd)[0].reason == "done"


@pytest.mark.slow
def test_a_rule_that_does_not_fit_costs_no_checkpoint(tmp_path):
    run(tmp_path, (Strategy(fsdp=8),), epochs=1)
    wrong = Strategy(fsdp=8, rules=(("kernal", PartitionSpec("fsdp")),))
    with pytest.raises(ValueError, match="'kernal'.*matches no parameter"):
        run(tmp_path, (Strategy(data=8), wrong), epochs=2)
    assert not (tmp_path / "damaged_checkpoints").exists()
    seen = Recorder()
    run(tmp_path, (Strategy(data=8), Strategy(fsdp=8)), hooks=[seen], epochs=2)
    assert seen.of(StepEnd)[0].step == 13 and seen.of(StepEnd)[0].config.strategy == "fsdp8"


@pytest.mark.slow
def test_a_model_that_must_be_cut_resumes_on_fewer_devices(tmp_path):
    both = (Strategy(data=-1), Strategy(fsdp=-1))
    # Three copies of two matrices: 98 KiB whole, so that data parallelism does not fit.
    tight: Any = {"execution__memory_bytes": 110_000}
    first, _ = run(tmp_path, both, epochs=1, **tight)
    assert first.params["up"]["kernel"].sharding.mesh.shape["fsdp"] == 8
    seen = Recorder()
    settings = config(
        tmp_path, batch=LIMITS, strategies=both, statistics__preconditioned=False, epochs=2, **tight
    )
    second = Network(settings, hooks=[seen], devices=jax.devices()[:4]).fit()
    assert second.params["up"]["kernel"].sharding.mesh.shape["fsdp"] == 4
    assert seen.of(StepEnd)[0].step == 13


def test_processes_with_other_numbers_of_devices_are_named():
    require_as_many([[1, 2], [3, 4]])
    with pytest.raises(ValueError, match="have 2, 1, 2 devices.*--devices-per-process"):
        require_as_many([[1, 2], [3], [4, 5]])
