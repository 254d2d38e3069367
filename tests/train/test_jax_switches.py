"""A run under any of JAX's debugging switches gives the losses of a run without it, or says a sentence."""

import contextlib
import functools
import itertools
import math
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import InStep, Recorder, config, same
from table_runs import Two, settings

import jaxgoodput as jg
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import EvalEnd, StepEnd

WIDTH, HIDDEN, BASE = 16, 64, 16  # WIDTH * HIDDEN is the smallest matrix that a strategy cuts
NUM_STEPS = 12

# Each switch, and how far the losses may be from those without it: looking at results, JAX donates nothing,
# so programs are compiled otherwise. Doubles have other random numbers.
LOOKS = 1e-5
SWITCHES: Mapping[str, tuple[Mapping[str, Any], float]] = {
    "NaN": ({"jax_debug_nans": True}, LOOKS),
    "infinity": ({"jax_debug_infs": True}, LOOKS),
    "both": ({"jax_debug_nans": True, "jax_debug_infs": True}, LOOKS),
    "strict types": ({"jax_numpy_dtype_promotion": "strict"}, 0.0),
    "no transfer": ({"jax_transfer_guard": "disallow"}, 0.0),
    "none to devices": ({"jax_transfer_guard_host_to_device": "disallow"}, 0.0),
    "none to the host": ({"jax_transfer_guard_device_to_host": "disallow"}, 0.0),
    "none between devices": ({"jax_transfer_guard_device_to_device": "disallow"}, 0.0),
    "leaks": ({"jax_check_tracer_leaks": True}, 0.0),
    "keys": ({"jax_debug_key_reuse": True}, 0.0),
    "double": ({"jax_enable_x64": True}, math.inf),
    "rank": ({"jax_numpy_rank_promotion": "raise"}, 0.0),
}


@dataclass(frozen=True)
class Column:
    """A kind of run."""

    num_devices: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    batches: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Micro-batches to change to, by the step after which."""
    has_tables: bool = False


ACCUMULATES = {"tuning__accumulate": True, "batch": BatchLimits(base=BASE, max=64, micro=(1, 4))}
COLUMNS = {
    "alone": Column(),
    "4 devices": Column(4),
    "micro-batches": Column(settings=ACCUMULATES),
    "fsdp": Column(4, {"strategies": (jg.Strategy(fsdp=4),)}),
    "fsdp, micro-batches, bfloat16": Column(
        4,
        {
            "strategies": (jg.Strategy(fsdp=4),),
            "batch": BatchLimits(base=BASE, max=64, micro=(1, 2)),
            "tuning__accumulate": True,
            "compute_dtype": "bfloat16",
        },
    ),
    "replicas, micro-batches": Column(
        4, {**ACCUMULATES, "batch": BatchLimits(base=BASE, max=64, micro=(1, 2))}
    ),
    "saved and evaluated": Column(
        settings={"saving__every_base_steps": 5.0, "evaluation__every_base_steps": 4.0, "ema": 0.9}
    ),
    "growing": Column(
        2, {"policy": "goodput", "execution__background_compile": True}, {4: (16, 1), 8: (16, 2)}
    ),
    "tables": Column(has_tables=True),
}
NOT_NIGHTLY = {
    ("both", "alone"),
    ("strict types", "saved and evaluated"),
    ("no transfer", "growing"),
    ("keys", "4 devices"),
    ("leaks", "micro-batches"),
    ("double", "fsdp"),
}


class Net(jg.Trainer):
    """Two matrices with dropout, under Adam and a schedule."""

    def init(self, key):
        keys = jax.random.split(key)
        return {
            "up": jax.random.normal(keys[0], (WIDTH, HIDDEN)) / 4,
            "down": jax.random.normal(keys[1], (HIDDEN, WIDTH)) / 8,
        }

    def loss(self, params, batch, key) -> Any:
        x = batch["x"].astype(params["up"].dtype)
        hidden = jnp.tanh(x @ params["up"])
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        return self.errors(params, batch, jnp.where(kept, hidden, 0))

    def errors(self, params, batch, hidden):
        found = (hidden @ params["down"]).astype(jnp.float32)
        return jnp.mean((found - batch["y"]) ** 2, axis=-1)

    def optimizer(self):
        schedule = optax.cosine_decay_schedule(0.01, 2 * NUM_STEPS)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def dataset(self):
        x = np.random.default_rng(1).normal(size=(BASE * NUM_STEPS, WIDTH)).astype(np.float32)
        return {"x": x, "y": np.abs(x)}

    def eval_dataset(self):
        return {name: x[:37] for name, x in self.dataset().items()}

    def metrics(self, params, batch):
        hidden = jnp.tanh(batch["x"].astype(params["up"].dtype) @ params["up"])
        return {"error": self.errors(params, batch, hidden)}


@contextlib.contextmanager
def switched(values):
    """Set JAX's switches for all threads."""
    before = {name: jax.config.values[name] for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def trained(column: Column, workdir, **changes):
    """Return the losses and evaluations of a run, and its state."""
    seen = Recorder()
    devices = jax.devices()[: column.num_devices]
    if column.has_tables:
        trainer: Any = Two(settings(workdir, base_steps=8.0, **changes), hooks=[seen])
    else:
        made = config(workdir, **{"base_steps": float(NUM_STEPS), **column.settings, **changes})
        trainer = Net(made, devices=devices, hooks=[seen], loop=InStep)
    if column.batches:

        def ask(event):
            if event.step in column.batches:
                trainer.request_batch(*column.batches[event.step])

        seen._then = ask
    state = trainer.fit()
    losses = [event.metrics["loss"] for event in seen.of(StepEnd)]
    told = [event.metrics["error"] for event in seen.of(EvalEnd)]
    return np.array(losses + told), trainer, state


@functools.cache
def reference(name: str):
    """Return what a run gives without a switch, once for each column."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(COLUMNS[name], folder)[0]


def marks(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
    return [] if case in NOT_NIGHTLY else [pytest.mark.nightly]


CASES = [
    pytest.param(*case, marks=marks(case), id=f"{case[0]}: {case[1]}")
    for case in itertools.product(SWITCHES, COLUMNS)
]


@pytest.mark.nightly
@pytest.mark.parametrize("switch, name", CASES)
def test_a_run_under_a_switch_gives_the_same_losses(tmp_path, switch, name):
    expected = reference(name)
    values, tolerance = SWITCHES[switch]
    column = COLUMNS[name]
    with switched(values):
        losses, trainer, state = trained(column, tmp_path)
        again = trainer.restore()
        assert trainer.evaluate(state)["error"] > 0
    assert same(again.params, state.params)
    # When a batch is taken up depends on what is compiled by then.
    if not column.batches and tolerance < math.inf:
        np.testing.assert_allclose(losses, expected, rtol=tolerance, equal_nan=False)
    assert np.isfinite(losses).all() and len(losses) >= NUM_STEPS / 2


@pytest.mark.nightly
@pytest.mark.parametrize("switch", ["both", pytest.param("no transfer", marks=pytest.mark.nightly)])
def test_a_run_under_a_switch_resumes(tmp_path, switch):
    column = COLUMNS["saved and evaluated"]
    with switched(SWITCHES[switch][0]):
        first, *_ = trained(column, tmp_path, base_steps=6.0)
        then, *_ = trained(column, tmp_path)
    assert len(first) >= 6 and len(then) >= 6 and np.isfinite([*first, *then]).all()


def test_a_run_without_compilation_is_refused(tmp_path):
    with (
        switched({"jax_disable_jit": True}),
        pytest.raises(RuntimeError, match=r"jax_disable_jit is set.*call it on a few samples"),
    ):
        trained(COLUMNS["alone"], tmp_path)


class Wrong(Net):
    """Its loss is not a number, or infinite, from the fourth batch on."""

    value = np.nan

    def dataset(self):
        data = super().dataset()
        data["y"][BASE * 3 :] = self.value
        return data


@pytest.mark.nightly
@pytest.mark.parametrize("value, found", [(np.nan, "nan"), (np.inf, "inf")])
def test_a_nan_of_the_users_own_is_named_with_the_step(tmp_path, value, found):
    made = config(tmp_path, base_steps=float(NUM_STEPS), shuffle=False)
    trainer = Wrong(made, devices=jax.devices()[:1])
    trainer.value = value
    with (
        switched({f"jax_debug_{found}s": True}),
        pytest.raises(FloatingPointError, match=f"step 4 was not applied: its loss is {found}"),
    ):
        trainer.fit()


class Weighted(Net):
    """Weights its samples; `weights` are in the order of the data."""

    weights = np.ones(BASE * NUM_STEPS, np.float32)

    def dataset(self):
        return {**super().dataset(), "weight": self.weights}

    def loss(self, params, batch, key) -> Any:
        return jg.Loss(super().loss(params, batch, key) * batch["weight"], batch["weight"])


@pytest.mark.parametrize(
    "name",
    [
        "alone",
        pytest.param("4 devices", marks=pytest.mark.nightly),
        *(pytest.param(x, marks=pytest.mark.nightly) for x in ("micro-batches", "fsdp")),
    ],
)
@pytest.mark.parametrize("switch", ["both"])
def test_batches_without_weight_are_passed_over_under_a_switch(tmp_path, switch, name):
    random = np.random.default_rng(7)
    empty = random.random(NUM_STEPS) < 0.4
    weights = random.integers(1, 3, (NUM_STEPS, BASE)) * (random.random((NUM_STEPS, BASE)) < 0.7)
    task = type("Task", (Weighted,), {"weights": np.ravel(weights * ~empty[:, None])})
    seen = Recorder()
    column = COLUMNS[name]
    settings = {"base_steps": float(NUM_STEPS), "shuffle": False, **column.settings}
    made = config(tmp_path, max_skipped_in_a_row=NUM_STEPS, **settings)
    trainer = task(made, devices=jax.devices()[: column.num_devices], hooks=[seen], loop=InStep)
    with switched(SWITCHES[switch][0]):
        state = trainer.fit()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    told = seen.of(StepEnd)
    # Passed over is no progress, so that the run goes on into a second epoch.
    assert len(told) == NUM_STEPS + sum(not event.finite for event in told)
    for event in told:
        number = (event.step - 1) % NUM_STEPS
        has_weight = weights[number].any() and not empty[number]
        assert event.finite == has_weight and (event.metrics["weight"] > 0) == has_weight
        assert np.isfinite(event.metrics["loss"]) == has_weight
        assert np.isfinite(event.metrics["grad_norm"]) == has_weight


PRODUCTS = "jax_default_matmul_precision"


@pytest.mark.nightly
@pytest.mark.parametrize("data", [np.float64, np.float32])
def test_every_thread_sees_the_settings_that_surround_fit(tmp_path, data):
    """Programs that are compiled behind training, and the loader's, would otherwise be others."""
    seen: list[tuple[str, Any]] = []

    class Wide(Net):
        def loss(self, params, batch, key):
            where = threading.current_thread().name
            seen.append((where, (jnp.zeros(()).dtype, getattr(jax.config, PRODUCTS))))
            kinds = {x.dtype for x in jax.tree.leaves((params, batch)) if x.ndim > 1}
            assert kinds == {np.dtype(np.float64), np.dtype(data)}, where
            return super().loss(params, batch, key)

        def init(self, key):
            return jax.tree.map(lambda x: x.astype(np.float64), super().init(key))

        def dataset(self):
            return {name: x.astype(data) for name, x in super().dataset().items()}

    settings = jg.Config(
        workdir=str(tmp_path),
        batch=BatchLimits(base=BASE, max=4 * BASE),
        epochs=20,
        reporting=jg.Reporting(tensorboard=False, progress=False),
    )
    task = Wide(settings, devices=jax.devices()[:1])
    task.hooks = (Grows(task),)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        state = task.fit()
    assert state.params["up"].dtype == np.float64
    assert {kind for _, kind in seen} == {(np.dtype(np.float64), "highest")}
    assert any(where == "jaxgoodput-compile" for where, _ in seen)


class Grows(jg.Hook):
    """Has another size compiled behind training, and waits until it is."""

    def __init__(self, task):
        self.task = task

    def on_step_end(self, event):
        if event.step == 3:
            self.task.compile_sizes()
