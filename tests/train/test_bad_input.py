"""Input that cannot work is an error, or a warning, that says what, got, why and what to do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from problems import (
    NUM_SAMPLES,
    WIDTH,
    Counting,
    Evaluated,
    InStep,
    Mean,
    Recorder,
    config,
    counting_config,
    rows,
)

from jaxgoodput.engine.state import Loss, Variables
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import Checkpoint, FitEnd, StepEnd, Window
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.control import Diverged
from jaxgoodput.train.trainer import Trainer


@pytest.fixture
def told(monkeypatch):
    """What users are warned of while a run is set up."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    return said


# -- the data set and the batch ----------------------------------------------------------------------


@pytest.mark.parametrize("data", [{"x": np.zeros((0, 4), np.float32)}, []])
def test_an_empty_dataset(tmp_path, data):
    with pytest.raises(ValueError, match=r"0 samples|empty"):
        Mean(config(tmp_path), data=data).fit()


def test_a_dataset_smaller_than_the_base_batch(tmp_path):
    with pytest.raises(ValueError, match="base batch of 16 .* data set of 10.*smaller batch.base"):
        Mean(config(tmp_path), data=rows(10)).fit()


@pytest.mark.slow
def test_a_dataset_smaller_than_the_largest_batch(tmp_path, told):
    seen = Recorder()
    limits = BatchLimits(base=16, max=512, micro=(2, 512), sizes=(2, 4, 64))
    settings = config(tmp_path, policy="goodput", batch=limits)
    Mean(settings, hooks=[seen]).fit()
    assert f"stop at its {NUM_SAMPLES} samples" in told[0] and "512" in told[0]
    assert seen.events[0].limits.max == NUM_SAMPLES


def test_a_strategy_that_cannot_cut_a_large_leaf(tmp_path, told):
    class Odd(Mean):
        def init(self, key):
            return {**super().init(key), "odd": jnp.zeros((7, 2**16 + 1))}

    settings = config(tmp_path, strategies=(Strategy(fsdp=8),), base_steps=1.0)
    Odd(settings).fit()
    (sentence,) = told
    assert sentence == (
        "the strategy fsdp8 cuts the model, but every device holds this parameter whole: odd, 2 MiB, "
        "because 7 x 65537 is divisible by none of fsdp=8. To cut it, or to say that this is intended, "
        "name it in Strategy.rules."
    )


@pytest.mark.parametrize(
    "base, count, nearest",
    [(17, 8, "16 and 24"), (10, 4, "8 and 12"), (3, 8, "8")],
)
@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_a_base_batch_that_the_devices_cannot_divide(tmp_path, base, count, nearest, policy):
    settings = config(tmp_path, policy=policy, batch=BatchLimits(base=base, max=64, micro=(1, 64)))
    with pytest.raises(ValueError, match=f"{base} samples cannot .* {count} replicas") as refused:
        Mean(settings, devices=jax.devices()[:count]).fit()
    assert f"can are {nearest}: set batch.base" in str(refused.value)


@pytest.mark.parametrize(
    "limits, what",
    [
        ({"base": 64, "max": 32, "micro": (1, 8)}, "max=32 is below base=64"),
        ({"base": 16, "max": 32, "micro": (8, 4)}, "Swap the two"),
        ({"base": 16, "max": 32, "micro": (0, 4)}, "at least 1.*got \\(0, 4\\)"),
        ({"base": 0, "max": 32, "micro": (1, 4)}, "base must be .*at least 1; got 0"),
        ({"base": 16, "max": 32, "micro": (1, 4), "min_global": 64}, "min_global=64"),
        ({"base": 16, "max": 32, "micro": (1, 4), "sizes": (4, 2)}, "increasing"),
    ],
)
def test_limits_in_the_wrong_order(limits, what):
    with pytest.raises(ValueError, match=what):
        BatchLimits(**limits)


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"epochs": None, "base_steps": None}, "exactly one of base_steps and epochs"),
        ({"epochs": 1, "base_steps": 10.0}, "exactly one of base_steps and epochs"),
        ({"epochs": 0}, "epochs must be .* at least 1.*got 0"),
        ({"saving__every_s": 0.0}, "saving.every_s must be a number of seconds, above 0"),
        ({"policy": "greedy"}, "policy must be .* got 'greedy'"),
        ({"compute_dtype": "float16"}, "would need loss scaling.* Use 'bfloat16'"),
        ({"tuning__max_growth": 1.0}, 'policy="fixed"'),
    ],
)
def test_settings_that_cannot_work(tmp_path, settings, what):
    with pytest.raises(ValueError, match=what):
        config(tmp_path, **settings)


def test_a_batch_that_does_not_fit_into_memory(tmp_path):
    with pytest.raises(ValueError, match="a step with .* samples per replica needs .* MiB"):
        Mean(config(tmp_path, execution__memory_bytes=1000)).fit()


# -- what the user's methods return ------------------------------------------------------------------


class ScalarMean(Mean):
    def loss(self, params, batch, key):
        return super().loss(params, batch, key).mean()


class ScalarSums(Mean):
    def loss(self, params, batch, key) -> Any:
        losses = super().loss(params, batch, key)
        return Loss.of(losses.sum(), jnp.float32(losses.shape[0]))


@pytest.mark.parametrize(
    "made, what",
    [
        (lambda losses: 1.0, "does not depend on the parameters"),
        (lambda losses: (losses > 1).astype(jnp.int32), "int32, which has no gradient"),
        (lambda losses: losses > 1, "bool, which has no gradient"),
    ],
)
def test_a_loss_without_a_gradient_is_named(tmp_path, made, what):
    class Wrong(Mean):
        def loss(self, params, batch, key) -> Any:
            return made(super().loss(params, batch, key))

    with pytest.raises(TypeError, match=what):
        Wrong(config(tmp_path)).fit()


def test_an_optimizer_that_asks_for_more_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="asks for more .* leave that link out"):
        Mean(config(tmp_path), tx=optax.lbfgs()).fit()


def test_an_optimizer_that_asks_for_the_loss_gets_it(tmp_path):
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0, rtol=1.0)
    state = Mean(config(tmp_path, base_steps=12.0), tx=optax.chain(optax.sgd(0.1), plateau)).fit()
    kind = optax.contrib.ReduceLROnPlateauState
    found = jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, kind))
    (scale,) = [x.scale for x in found if isinstance(x, kind)]
    assert 0 < np.asarray(scale) <= 0.25  # no loss is below zero, which is what would count


def test_a_loss_is_what_the_documentation_writes():
    for loss in (Loss(3.0, 2.0), Loss(sum=3.0, weight=2.0), Loss.of(3.0, 2.0)):
        assert (loss.sum, loss.weight, loss.aux) == (3.0, 2.0, {})
    assert Loss(3.0, 2.0, {"hits": 1.0}) == Loss.of(3.0, 2.0, hits=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [ScalarMean, ScalarSums])
def test_a_loss_that_cannot_leave_padding_out_is_refused_for_epochs(tmp_path, trainer):
    limits = BatchLimits(base=40, max=40, micro=(1, 40))
    with pytest.raises(ValueError, match="last batch of the 194 samples .* 8 replicas") as refused:
        trainer(config(tmp_path / "a", batch=limits), data=rows(97)).fit()
    assert "per-sample losses [batch]" in str(refused.value)
    assert '"drop"' in str(refused.value) and "base_steps" in str(refused.value)
    trainer(config(tmp_path / "d", batch=limits, last_batch="drop"), data=rows(97)).fit()
    # Where no batch is ever padded there is nothing to refuse.
    trainer(config(tmp_path / "b")).fit()
    trainer(config(tmp_path / "c", batch=limits, base_steps=3.0)).fit()


class ScalarSum(Mean):
    def loss(self, params, batch, key):
        return super().loss(params, batch, key).sum()


class SumOfNoisy(Mean):
    def loss(self, params, batch, key):
        kept = jax.random.bernoulli(key, 0.9, batch["x"].shape)
        return super().loss(params, {"x": batch["x"] * kept}, key).sum() + 10


class NoisyMean(Mean):
    def loss(self, params, batch, key):
        kept = jax.random.bernoulli(key, 0.1, batch["x"].shape)
        return super().loss(params, {"x": batch["x"] * kept}, key).mean()


class NoLossYet(Mean):
    """A sum, but 0 at the first parameters."""

    def loss(self, params, batch, key):
        return jnp.sum(batch["x"] @ params["w"])


class AmongOthers(Mean):
    """For copies of a sample the logarithm of their number."""

    def loss(self, params, batch, key):
        logits = jnp.tanh(batch["x"] @ batch["x"].T) * jnp.exp(params["w"][0])
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))


@pytest.mark.parametrize("trainer", [ScalarSum, SumOfNoisy])
@pytest.mark.parametrize("count", [1, 8])
def test_a_sum_over_the_batch_is_refused(tmp_path, trainer, count):
    seen = Recorder()
    run = trainer(config(tmp_path), hooks=[seen], devices=jax.devices()[:count])
    with pytest.raises(ValueError, match="grows with the batch: a sum.*one loss per sample, Loss"):
        run.fit()
    assert not seen.of(StepEnd)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [NoisyMean, NoLossYet, AmongOthers, ScalarSums, ScalarMean])
def test_what_is_no_sum_for_sure_is_not_refused(tmp_path, trainer):
    trainer(config(tmp_path, base_steps=2.0), devices=jax.devices()[:1]).fit()


class NoInit(Trainer):
    pass


class Counted(Mean):
    def init(self, key):
        return {**super().init(key), "count": jnp.zeros((), jnp.int32)}


class NoKey(Mean):
    def loss(self, params, batch) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().loss(params, batch, jax.random.key(0))


class KeyOfItsOwn(Mean):
    def loss(self, params, batch, *, rng) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().loss(params, batch, rng)


class AllTrain(Mean):
    def trainable(self, params):
        return True


class NotAllNamed(Counting):
    def trainable(self, params):
        return {"w": True}


class Numbered(Mean):
    def trainable(self, params):
        return {"w": 1}


class NoLoss(Mean):
    loss = Mean.__mro__[1].loss


class Transposed(Mean):
    def loss(self, params, batch, key):
        losses: Any = (params["w"][None] - batch["x"]) ** 2
        return losses


class Pair(Mean):
    def loss(self, params, batch, key) -> Any:
        losses = super().loss(params, batch, key)
        return losses, {"accuracy": losses}


class NotOptax(Mean):
    def optimizer(self):
        return 0.1


class Frozen(Mean):
    def trainable(self, params):
        return {"w": False}


class Rated(Mean):
    learning_rate: Any = 1e-3


class Labelled(Mean):
    def __init__(self, config):
        super().__init__(config)
        self.labels: Any = np.arange(3)


class MaskedMetrics(Mean):
    def metrics(self, params, batch, mask) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"off": mask}


class Noted(Mean):
    def init(self, key):
        return {**super().init(key), "name": "linear"}


@pytest.mark.parametrize(
    "trainer, error, what",
    [
        (NoLoss, TypeError, "NoLoss defines neither loss nor loss_and_state. Write"),
        (Transposed, TypeError, r"loss returned shape \(\d+, 4\).*one loss per sample"),
        (Pair, TypeError, "got tuple. Return numbers beside the losses as Loss.of"),
        (NoInit, TypeError, r"NoInit does not define dataset. Write dataset\(self\): return"),
        (Counted, TypeError, r"params\['count'\] is int32, but trainable .* model_state"),
        (NoKey, TypeError, r"NoKey.loss\(params, batch\).* Write loss\(self, params, batch, key\)"),
        (KeyOfItsOwn, TypeError, r"KeyOfItsOwn.loss.* Write loss\(self, params, batch, key\)"),
        (AllTrain, TypeError, r"a bool for every parameter, but params\['w'\] is missing"),
        (NotAllNamed, TypeError, r"a bool for every parameter, but params\['count'\] is missing"),
        (Numbered, TypeError, r"a bool for every parameter, but params\['w'\] is 1"),
        (
            NotOptax,
            TypeError,
            r"an optax.GradientTransformation; got float. Write `return optax.ad",
        ),
        (Frozen, ValueError, "nothing to train"),
        (
            Rated,
            TypeError,
            r"Rated.learning_rate is 0.001, .*`def learning_rate\(self, progress\)`",
        ),
        (
            Labelled,
            TypeError,
            r"Labelled.labels is array\(\[0, 1, 2\]\), but labels must be a method",
        ),
        (
            MaskedMetrics,
            TypeError,
            r"metrics\(params, batch, mask\).* Write metrics\(self, params, batch\)",
        ),
        (Noted, TypeError, r"init\(\)\['name'\] is a str"),
    ],
)
def test_methods_that_return_something_else(tmp_path, trainer, error, what):
    with pytest.raises(error, match=what):
        trainer(config(tmp_path)).fit()


@pytest.mark.parametrize("name", ["init", "optimizer"])
def test_a_method_that_is_not_written_is_named(tmp_path, name):
    without = type("Without", (Mean,), {name: getattr(Trainer, name)})
    with pytest.raises(TypeError, match=f"Without does not define {name}. Write {name}"):
        without(config(tmp_path)).fit()


def test_the_best_by_a_metric_that_is_not_there_is_refused_before_training(tmp_path):
    seen = Recorder()
    settings = config(tmp_path, evaluation__every_base_steps=2.0, saving__best="acc")
    with pytest.raises(ValueError, match="best is 'acc', .* Choose one of distance, first"):
        Evaluated(settings, hooks=[seen]).fit()
    assert not seen.of(StepEnd)


def test_a_workdir_that_is_a_file_is_called_one(tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(NotADirectoryError, match="file is a file. Name a folder"):
            Mean(config(workdir)).fit()


def test_another_optimizer_is_not_called_another_model(tmp_path):
    Mean(config(tmp_path, epochs=1)).fit()
    with pytest.raises(ValueError, match="belongs to another optimizer: .*FromCheckpoint"):
        Mean(config(tmp_path), tx=optax.adam(0.1)).fit()


@pytest.mark.slow
def test_a_run_that_is_done_says_that_there_is_nothing_to_do(tmp_path, told):
    drop = {
        "epochs": 1,
        "last_batch": "drop",
        "batch__base": 16,
        "batch__max": 16,
        "policy": "fixed",
    }
    for i, length in enumerate(({"base_steps": 3.0}, {"epochs": 1}, drop)):
        settings = config(tmp_path / str(i), **length)
        Mean(settings, data=rows(72)).fit()
        assert not told
        Mean(settings, data=rows(72)).fit()
        name = next(iter(length))
        assert f"nothing to do: {name}={length[name]:g} are done" in told.pop()


class OneNumber(Evaluated):
    def metrics(self, params, batch):
        return {"loss": jnp.mean(batch["x"])}


class NoMetrics(Mean):
    def eval_dataset(self):
        return rows(8)


@pytest.mark.parametrize(
    "trainer, error, what",
    [
        (OneNumber, TypeError, r"metrics\['loss'\] has shape \(\) for .* samples.*per sample"),
        (NoMetrics, TypeError, "eval_dataset but no metrics. Write metrics"),
        (Mean, ValueError, r"eval_dataset\(\) returned None"),
    ],
)
@pytest.mark.parametrize("every_base_steps", [2.0, None])
def test_evaluations_that_cannot_work(tmp_path, trainer, error, what, every_base_steps):
    """Before training where evaluations are due in it, or at its end; else when one is asked for."""
    seen = Recorder()
    broken = trainer(config(tmp_path, evaluation__every_base_steps=every_base_steps), hooks=[seen])
    if every_base_steps or trainer is not Mean:
        with pytest.raises(error, match=what):
            broken.fit()
        assert not seen.of(StepEnd)
    else:
        state = broken.fit()
        with pytest.raises(error, match=what):
            broken.evaluate(state)


# -- numbers that are not finite ---------------------------------------------------------------------


class InfiniteGradient(Mean):
    """Samples that start with 777 have a finite loss whose gradient is not."""

    def loss(self, params, batch, key):
        bad = batch["x"][:, 0] == 777.0
        x = jnp.where(bad[:, None], 0.0, batch["x"])
        # Where bad, the root is 0, its slope infinite, and infinity times 0 is not a number.
        root = jnp.sqrt(jnp.where(bad, 0.0 * params["w"][0], 1.0))
        return super().loss(params, {"x": x}, key) + root - jnp.where(bad, 0.0, 1.0)


@pytest.mark.parametrize(
    "trainer, bad",
    [(Mean, np.nan), (Mean, np.inf), (Mean, -np.inf), (InfiniteGradient, 777.0)],
)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_a_step_that_is_not_finite_is_skipped_and_counted_and_shown(
    tmp_path, told, trainer, bad, count
):
    data = rows()
    data["x"][40] = bad  # in the third batch of each epoch
    seen = Recorder()
    settings = config(tmp_path, shuffle=False)
    state = trainer(settings, data=data, hooks=[seen], devices=jax.devices()[:count]).fit()

    assert [s.step for s in seen.of(StepEnd) if not s.finite] == [3, 9]
    assert [s.metrics["skipped"] for s in seen.of(StepEnd)] == [0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    assert seen.of(Window)[-1].skipped_steps == 2
    assert np.isfinite(seen.of(Window)[-1].metrics["loss"])
    assert int(state.guard.skipped) == 2 and int(state.guard.in_a_row) == 0
    assert int(state.step) == 12
    what = "and its gradient is not" if trainer is InfiniteGradient else f"its loss is {bad * bad}"
    assert "step 3 was not applied: its loss is" in told[0] and what in told[0]
    assert "Its batch: 16 samples from place 32 of epoch 1 on" in told[-1] and len(told) == 2
    # A skipped step is no progress.
    assert seen.of(StepEnd)[-1].progress == pytest.approx(10)
    w = np.zeros(4)
    # And it changes nothing.
    for batch in 2 * [b for b in range(6) if b != 2]:
        w -= 0.05 * (w - data["x"][16 * batch : 16 * batch + 16].astype(np.float64).mean(0))
    np.testing.assert_allclose(state.params["w"], w, rtol=2e-6)


@pytest.mark.slow
def test_too_many_in_a_row_stop_training_with_the_last_good_checkpoint_kept(tmp_path, told):
    data = rows()
    data["x"][64:] = np.nan  # from the fifth batch on
    seen = Recorder(lambda e: trainer.request_save() if e.step == 3 else None)
    settings = config(tmp_path, shuffle=False, base_steps=1e6, max_skipped_in_a_row=2)
    trainer = Mean(settings, data=data, hooks=[seen], loop=InStep)
    with pytest.raises(Diverged, match="2 updates in a row .* the last at step 6") as stopped:
        trainer.fit()
    assert "Of the last update, its loss is nan. Lower the learning rate" in str(stopped.value)
    assert len(told) == 1 and "step 5 was not applied" in told[0]  # and of the next no word more
    assert [c.step for c in seen.of(Checkpoint)] == [3]
    assert seen.of(FitEnd)[0].reason.startswith("Diverged: 2 updates")

    # With better data the run goes on from there.
    again = Recorder()
    state = Mean(
        config(tmp_path, epochs=2, shuffle=False, saving__allow_changed_data=True), hooks=[again]
    ).fit()
    assert again.events[0].step == 3
    assert np.isfinite(state.params["w"]).all()


def nan_at(first, last):
    """A learning rate that is not a number from one progress to another."""
    return lambda count: jnp.where((count >= first) & (count < last), jnp.nan, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 8])
@pytest.mark.parametrize("make", [optax.sgd, optax.adam, optax.inject_hyperparams(optax.sgd)])
def test_an_update_that_is_not_finite_is_refused(tmp_path, make, count):
    seen = Recorder()
    settings = config(tmp_path, epochs=5, max_skipped_in_a_row=3)
    trainer = Mean(settings, tx=make(nan_at(4, 6)), hooks=[seen], devices=jax.devices()[:count])
    state = trainer.fit()
    assert [s.metrics["skipped"] for s in seen.of(StepEnd)] == [0] * 4 + [1] + [2] * 25
    assert np.isfinite(state.params["w"]).all() and int(state.guard.skipped) == 2


def test_a_schedule_that_stays_nan_ends_the_run_with_its_last_good_state(tmp_path):
    settings = config(tmp_path, epochs=None, base_steps=1e6, max_skipped_in_a_row=3)
    with pytest.raises(Diverged, match="update or model state that is not finite.*the schedule"):
        Mean(settings, tx=optax.sgd(nan_at(4, 1e9))).fit()


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_a_model_state_that_is_not_finite_is_refused(tmp_path, count):
    class Stateful(Mean):
        def init(self, key) -> Any:
            return Variables(params=super().init(key), model_state={"mean": jnp.zeros(())})

        def loss_and_state(self, params, model_state, batch, key):
            root = jnp.sqrt(batch["x"][:, 0] - 50)  # of what is negative
            mean = jnp.where(jnp.any(batch["x"] > 100), root.sum(), 1 + model_state["mean"])
            return self.loss(params, batch, key), {"mean": mean}

    data = rows()
    data["x"][20, 1] = 101.0  # in the second batch
    settings = config(tmp_path, epochs=1, shuffle=False)
    state = Stateful(settings, data=data, devices=jax.devices()[:count]).fit()
    assert int(state.guard.skipped) == 1
    assert float(state.model_state["mean"]) == 5


class Wide(Mean):
    """All of its parameters are one large leaf."""

    def init(self, key):
        return {"w": jnp.zeros((3, 2**13))}

    def loss(self, params, batch, key):
        return jnp.sum((params["w"][None, :, :WIDTH] - batch["x"][:, None]) ** 2, axis=(-2, -1))


def test_an_update_that_is_not_finite_is_refused_where_no_leaf_is_small(tmp_path):
    settings = config(tmp_path, epochs=2, max_skipped_in_a_row=3)
    state = Wide(settings, tx=optax.sgd(nan_at(4, 6))).fit()
    assert np.isfinite(state.params["w"]).all() and int(state.guard.skipped) == 2


def test_a_model_state_may_hold_infinity(tmp_path):
    class Masked(Mean):
        def init(self, key) -> Any:
            return Variables(params=super().init(key), model_state={"mask": jnp.asarray(-jnp.inf)})

    state = Masked(config(tmp_path, epochs=1), devices=jax.devices()[:1]).fit()
    assert int(state.guard.skipped) == 0


class Weighted(Mean):
    """Every sample weighs what its first number says."""

    def loss(self, params, batch, key) -> Any:
        losses = super().loss(params, batch, key)
        weight = batch["x"][:, 0]
        return Loss.of(losses * weight, weight)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            0.0,
            "2 updates in a row had a loss whose samples have weight 0 only, the last at step 2.*Loss.weight",
        ),
        (
            -1.0,
            "2 updates in a row had samples of negative weight, the last at step 2.*is 0 or more",
        ),
    ],
)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_weights_that_nothing_can_be_learned_from_are_named(tmp_path, weight, message, count):
    data = rows()
    data["x"][:, 0] = 1.0
    data["x"][:32, 0] = 0.0
    data["x"][[3, 30], 0] = weight  # one in each of two batches
    settings = config(tmp_path, shuffle=False, max_skipped_in_a_row=2)
    with pytest.raises(Diverged, match=message) as stopped:
        Weighted(settings, data=data, devices=jax.devices()[:count]).fit()
    assert "learning rate" not in str(stopped.value)


@pytest.mark.slow
def test_a_batch_without_weight_is_passed_over(tmp_path):
    data = rows()
    data["x"][:, 0] = 1.0
    data["x"][:16, 0] = 0.0
    settings = config(tmp_path, epochs=1, shuffle=False)
    tx = optax.sgd(0.05, momentum=0.9)
    state = Weighted(settings, data=data, tx=tx).fit()
    assert int(state.guard.skipped) == 1
    without = {name: x[16:] for name, x in data.items()}
    other = Weighted(config(tmp_path / "other", epochs=1, shuffle=False), data=without, tx=tx).fit()
    np.testing.assert_allclose(state.params["w"], other.params["w"], rtol=1e-6)


class Fails:
    """The samples of `data`, of which one cannot be read."""

    def __init__(self, data, bad):
        self.data, self.bad = data, bad

    def __len__(self):
        return len(self.data["x"])

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("the disk is gone")
        return {name: rows[index] for name, rows in self.data.items()}


@pytest.mark.slow
def test_a_fixed_batch_leaves_the_sizes_alone(tmp_path):
    limits = BatchLimits(base=16, max=64, sizes=(16, 32, 64))
    seen = Recorder()
    Mean(config(tmp_path, batch=limits, base_steps=3.0), hooks=[seen]).fit()
    assert {s.config.global_batch_size for s in seen.of(StepEnd)} == {16}


@pytest.mark.slow
def test_a_sample_that_cannot_be_read_costs_nothing_of_what_was_learned(tmp_path):
    data = {**rows(), "id": np.arange(NUM_SAMPLES)}
    settings = counting_config(tmp_path, shuffle=False, epochs=1, execution__read_retries=0)
    seen = Recorder()
    trainer = Counting(settings, hooks=[seen])
    trainer.data = Fails(data, bad=70)  # in the fifth batch of 16
    with pytest.raises(RuntimeError, match="sample 70 .* the disk is gone"):
        trainer.fit()
    (end,) = seen.of(FitEnd)
    assert end.step == 4 and "70" in end.reason

    # With the sample mended, training goes on from the step before it.
    again = Recorder()
    state = Counting(settings, hooks=[again]).fit()
    assert again.events[0].step == 4
    np.testing.assert_array_equal(state.params["count"], 1)


def test_one_that_is_finite_between_them_starts_the_count_again(tmp_path):
    data = rows()
    data["x"][[0, 16, 48, 64]] = np.nan  # all but the third and the last batch
    settings = config(tmp_path, shuffle=False, max_skipped_in_a_row=3)
    state = Mean(settings, data=data).fit()
    assert int(state.guard.skipped) == 8


@pytest.mark.parametrize(
    ("length", "last"),
    # Five base steps of progress are six batches here; an epoch is six batches, applied or not.
    [({"epochs": None, "base_steps": 5.0}, 6), ({"epochs": 1}, 5)],
    ids=["by progress", "by samples"],
)
def test_a_schedule_ends_where_the_run_does_though_a_step_was_skipped(tmp_path, length, last):
    data = rows()
    data["x"][0] = np.nan
    tx = optax.sgd(optax.piecewise_constant_schedule(0.05, {5: 0.0}))
    state = Mean(config(tmp_path, shuffle=False, **length), data=data, tx=tx).fit()
    w = np.zeros(4)
    for batch in range(1, last):
        w -= 0.05 * (w - data["x"][16 * batch : 16 * batch + 16].astype(np.float64).mean(0))
    np.testing.assert_allclose(state.params["w"], w, rtol=2e-6)
