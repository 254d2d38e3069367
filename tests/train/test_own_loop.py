"""A loop of one's own with `jg.Tuner` decides as the Trainer does; clocks and noise are planted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import AtOnce, configured

import jaxgoodput as jg
from jaxgoodput.clock import FakeClock
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.efficiency import gain as worth_of
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.train import compile_ahead
from jaxgoodput.train.loop import Loop
from jaxgoodput.train.trainer import Trainer

BASE, SIZES, WIDTH = 16, (16, 32, 64, 128), 256
BASE_STEPS, TARGET = 400, 300  # believed at the end of training, and true at the target
LIMITS = jg.BatchLimits(base=BASE, max=SIZES[-1], sizes=SIZES)
CONSTANT = {"noise": 100.0, "per_sample_s": 2e-2 / 128}
SMALL_NOISE = {"noise": 2.0, "per_sample_s": 2e-2 / 128}


def step_s(size, per_sample_s):
    return 2e-2 + per_sample_s * size


def rows(noise):
    """Samples whose mean gradient is 1 in every entry; its noise scale is `noise` samples."""
    made = np.random.default_rng(0).standard_normal((4096, WIDTH)).astype(np.float32)
    return (made - made.mean(axis=0)) * np.float32(np.sqrt(noise))


def loss_of(params, x):
    return (1 + x) @ params["w"]


class PlantedLoop(Loop):
    """A loop whose steps take as long as its task says, of a clock that stands still otherwise."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, tuner=AtOnce)

    def _read(self, metrics, count):
        found = super()._read(metrics, count)
        task: Any = self.task
        for metrics, _ in found:
            self.clock.sleep(step_s(int(metrics.num_samples), task.per_sample_s))
        return found

    def _on_result(self, result):
        super()._on_result(result)
        self.analyst.flush()


class Slope(Trainer):
    def __init__(self, config, *, noise, per_sample_s, **options):
        super().__init__(config, **options)
        self.noise, self.per_sample_s = noise, per_sample_s

    def init(self, key):
        return {"w": jnp.zeros(WIDTH)}

    def loss(self, params, batch, key):
        return loss_of(params, batch["x"])

    def optimizer(self):
        return optax.sgd(1e-3)

    def dataset(self):
        return {"x": rows(self.noise)}


class Used(Hook):
    def __init__(self):
        self.sizes = []

    def on_step_end(self, event, /):
        self.sizes.append(event.config.global_batch_size)


def sizes_of_the_trainer(folder, **planted):
    """The batch of every step of `fit`, whose sizes are all compiled before."""
    heard = Used()
    config = configured(
        workdir=str(folder),
        batch=LIMITS,
        base_steps=BASE_STEPS,
        execution__background_compile=False,
        execution__prefetch=0,
        tuning__remember=False,
        tuning__accumulate=False,
        reporting__tensorboard=False,
        reporting__progress=False,
        saving__at_end=False,
    )
    devices = jax.devices()[:1]
    options = {"clock": FakeClock(), "loop": PlantedLoop, "hooks": [heard], "devices": devices}
    Slope(config, **planted, **options).fit()
    return heard.sizes


def optimizer():
    return jg.adaptive(optax.sgd(1e-3), jg.rules.adascale, base_batch_size=BASE)


def new_step(tx):
    noisy = jg.value_grad_and_noise(lambda params, x: loss_of(params, x).mean(), num_groups=2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, x):
        (loss, _), grads, sample = noisy(params, x)
        changes, opt_state = tx.update(
            grads, opt_state, params, global_batch_size=len(x), noise=sample
        )
        return optax.apply_updates(params, changes), opt_state, loss

    return step


def sizes_of_an_own_loop(
    *, noise, per_sample_s, real_compile_s=0.0, base_steps=BASE_STEPS, clock=None, **options
):
    """The batch of every step, and the tuner. Without a `clock`, the loop says what a step took."""
    data, rng, tx = rows(noise), np.random.default_rng(1), optimizer()
    step = new_step(tx)
    params = {"w": jnp.zeros(WIDTH)}
    opt_state = tx.init(params)
    used = []
    tuner = jg.Tuner(LIMITS, base_steps, clock=clock, **options)
    while not tuner.is_done:
        size = tuner.batch_size
        x = data[rng.integers(0, len(data), size)]
        params, opt_state, loss = step(params, opt_state, x)
        seconds = step_s(size, per_sample_s) + real_compile_s * (size not in used)
        if clock is not None:
            jax.block_until_ready(loss)
            clock.advance(seconds)
        tuner.step(opt_state, loss, seconds=None if clock is not None else seconds)
        used.append(size)
    return used, tuner


def changes(sizes):
    return [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]


def seconds_to_target(sizes, *, noise, per_sample_s):
    """Planted seconds until the true progress is made, by the noise that was planted."""
    grad, done, seconds = GradParams(sqr=1.0, var=noise / BASE), 0.0, 0.0
    for size in sizes:
        worth = float(worth_of(grad, size / BASE))
        share = min((TARGET - done) / worth, 1.0)
        seconds += step_s(size, per_sample_s) * share
        done += worth
        if done >= TARGET:
            return seconds
    raise AssertionError("the run has ended before its target")


@pytest.fixture
def large_fixed_part(monkeypatch):
    """The planted step has a large fixed part, as on an accelerator; what is known of CPUs does not hold."""
    monkeypatch.setattr(compile_ahead, "FIXED_ON_CPU_S", float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize("planted", [CONSTANT, SMALL_NOISE])
def test_an_own_loop_decides_as_the_trainer_does(tmp_path, large_fixed_part, planted):
    trained = sizes_of_the_trainer(tmp_path / "run", **planted)
    own, _ = sizes_of_an_own_loop(**planted, compile_s=0)
    assert changes(own) == changes(trained)
    ratio = seconds_to_target(own, **planted) / seconds_to_target(trained, **planted)
    assert ratio == pytest.approx(1, abs=0.02)


def test_a_size_is_tried_only_if_the_time_left_repays_its_compilation(large_fixed_part):
    long: dict[str, Any] = {**CONSTANT, "base_steps": 2000}
    used, tuner = sizes_of_an_own_loop(**long, real_compile_s=0.5)
    assert max(used) > BASE
    planted_s = 2000 * step_s(BASE, CONSTANT["per_sample_s"])
    taken_s = sum(step_s(size, CONSTANT["per_sample_s"]) for size in used) + 0.5 * len({*used})
    assert taken_s < 0.6 * planted_s, "although each new size cost half a second"
    used, tuner = sizes_of_an_own_loop(**{**long, "base_steps": 150}, real_compile_s=60.0)
    assert {*used} == {BASE}
    assert tuner.verdict is not None and tuner.why.startswith("keep: ")


def test_by_the_clock_it_decides_as_by_seconds_and_neither_compilation_counts_as_step_time():
    by_seconds, _ = sizes_of_an_own_loop(**CONSTANT, compile_s=0)
    by_clock, tuner = sizes_of_an_own_loop(
        **CONSTANT, compile_s=0, real_compile_s=5.0, clock=FakeClock()
    )
    assert changes(by_clock) == changes(by_seconds)
    assert abs(len(by_clock) - len(by_seconds)) <= 5
    assert tuner.progress >= BASE_STEPS


def test_it_ends_with_the_first_update_that_reaches_the_length():
    used, tuner = sizes_of_an_own_loop(**SMALL_NOISE, base_steps=3, compile_s=0)
    assert used == [BASE] * 3 and tuner.progress == 3 and tuner.is_done
    assert tuner.why == "" and tuner.verdict is None


def test_steps_measure_until_the_noise_is_known_and_then_as_often_as_pays():
    tx, asked = optimizer(), []
    step, data = new_step(tx), rows(100.0)
    params = {"w": jnp.zeros(WIDTH)}
    opt_state, tuner = tx.init(params), jg.Tuner(LIMITS, 1000, compile_s=0)
    for i in range(40):
        size = tuner.batch_size
        asked.append(tuner.measures)
        params, opt_state, loss = step(params, opt_state, data[i * size % 2048 :][:size])
        tuner.step(opt_state, loss, seconds=0.02)
    assert all(asked[:8]) and 1 <= sum(asked[20:]) <= 4


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="base_steps must be a positive number, got 0"):
        jg.Tuner(LIMITS, 0)
    with pytest.raises(ValueError, match="compile_s must be at least 0 seconds, got -1"):
        jg.Tuner(LIMITS, 10, compile_s=-1)
    tuner, tx = jg.Tuner(LIMITS, 100), optimizer()
    params = {"w": jnp.zeros(WIDTH)}
    opt_state = tx.init(params)
    with pytest.raises(
        ValueError, match=r"one number, the mean over the batch; got the shape \(3,\)"
    ):
        tuner.step(opt_state, jnp.zeros(3))
    with pytest.raises(ValueError, match="0 AdaptiveStates"):
        tuner.step(optax.sgd(0.1).init(params), 0.0)


def test_another_batch_than_the_one_asked_for_is_named():
    tuner, tx = jg.Tuner(LIMITS, 100), optimizer()
    params = {"w": jnp.zeros(WIDTH)}
    opt_state, step = tx.init(params), new_step(tx)
    with pytest.raises(ValueError, match="step 2 was to use 16 samples, .* counts 32 of them"):
        for _ in range(4):
            params, opt_state, loss = step(params, opt_state, rows(1.0)[:32])
            tuner.step(opt_state, loss)
