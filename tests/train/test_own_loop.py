"""A loop of one's own with `jg.Tuner` decides as the Trainer does; clocks and noise are planted."""

import contextlib
import dataclasses
import functools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import AtOnce, configured

import jaxgoodput as jg
from jaxgoodput.clock import FakeClock
from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.goodput.efficiency import gain as worth_of
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.train import compile_ahead
from jaxgoodput.train.ask import own_loop
from jaxgoodput.train.loop import Loop
from jaxgoodput.train.trainer import Trainer
from jaxgoodput.tune.exploring import NextSize
from jaxgoodput.tune.timings import DispatchedStep, Parts, TimingTable, key_of
from jaxgoodput.tune.verdict import Situation, StrategyOption

BASE, SIZES, WIDTH = 16, (16, 32, 64, 128), 256
BASE_STEPS, TARGET = 400, 300  # believed at the end of training, and true at the target
LIMITS = jg.BatchLimits(base=BASE, max=SIZES[-1], sizes=SIZES)
CONSTANT: dict[str, Any] = {"noise": 100.0, "per_sample_s": 2e-2 / 128}
SMALL_NOISE: dict[str, Any] = {"noise": 2.0, "per_sample_s": 2e-2 / 128}


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
    *,
    noise,
    per_sample_s,
    real_compile_s=0.0,
    num_compiled=1,
    base_steps=BASE_STEPS,
    clock=None,
    **options,
):
    """The batch of every step, and the tuner. Without a `clock`, the loop says what a step took.

    The first `num_compiled` steps of a size compile something.
    """
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
        seconds = step_s(size, per_sample_s) + real_compile_s * (used.count(size) < num_compiled)
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


def test_it_works_while_jax_looks_for_nan_and_infinity():
    with contextlib.ExitStack() as switches:
        for name in ("jax_debug_nans", "jax_debug_infs"):
            switches.callback(jax.config.update, name, jax.config.values[name])
            jax.config.update(name, True)
        used, _ = sizes_of_an_own_loop(**CONSTANT, base_steps=40, compile_s=0)
    assert max(used) > BASE


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


class Device:
    """A device that computes beside its host, on a fake clock: a dispatched step is not done at once."""

    def __init__(self, clock, monkeypatch):
        self._clock, self._free_s, self._ends = clock, 0.0, deque()
        read = own_loop._on_host

        def on_host(reading):
            clock.advance(max(self._ends.popleft() - clock.now(), 0.0))
            return read(reading)

        monkeypatch.setattr(own_loop, "_on_host", on_host)
        monkeypatch.setattr(own_loop, "_is_done", lambda loss: self._free_s <= clock.now())

    def dispatch(self, seconds):
        self._free_s = max(self._free_s, self._clock.now()) + seconds
        self._ends.append(self._free_s)

    def wait(self):
        self._clock.advance(max(self._free_s - self._clock.now(), 0.0))


def new_two_programs(tx):
    """A step that measures the noise, by its key True, and a plain one."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def plain(params, opt_state, x):
        loss, grads = jax.value_and_grad(lambda params: loss_of(params, x).mean())(params)
        changes, opt_state = tx.update(grads, opt_state, params, global_batch_size=len(x))
        return optax.apply_updates(params, changes), opt_state, loss

    return {True: new_step(tx), False: plain}


def sizes_on_a_device(
    monkeypatch,
    *,
    real_compile_s=0.0,
    thinking_s=0.0,
    waits=(False,),
    base_steps=BASE_STEPS,
    **options,
):
    """The batch of every step of a loop with two programs, and the tuner, on a fake clock.

    `waits` says in turn whether the loop waits for its loss. Every program costs `real_compile_s` at its
    first use, a verdict `thinking_s`, and a measuring step half as long again as a plain one. Fails if a step
    is taken to have been longer or shorter.
    """
    clock, tx, rng, data = FakeClock(), optimizer(), np.random.default_rng(1), rows(100.0)
    device, programs, used, seen = Device(clock, monkeypatch), new_two_programs(tx), [], set()
    answer = own_loop.answer

    def slow_answer(situation):
        clock.advance(thinking_s)
        return answer(situation)

    monkeypatch.setattr(own_loop, "answer", slow_answer)
    params = {"w": jnp.zeros(WIDTH)}
    opt_state, tuner = tx.init(params), jg.Tuner(LIMITS, base_steps, clock=clock, **options)
    add = tuner._decider.timings.add

    def checked_add(config, parts, step, *, measured, **how):
        expected = planted_s(config.global_batch_size, measured)
        assert parts.step_s == pytest.approx(expected), f"step {step} of {config}"
        add(config, parts, step, measured=measured, **how)

    monkeypatch.setattr(tuner._decider.timings, "add", checked_add)
    while not tuner.is_done:
        size, measures = tuner.batch_size, tuner.measures
        if (size, measures) not in seen:
            clock.advance(real_compile_s)
        seen.add((size, measures))
        x = data[rng.integers(0, len(data), size)]
        params, opt_state, loss = programs[measures](params, opt_state, x)
        device.dispatch(planted_s(size, measures))
        if waits[len(used) % len(waits)]:
            device.wait()
        tuner.step(opt_state, loss)
        used.append(size)
    return used, tuner


def planted_s(size, measures):
    return step_s(size, CONSTANT["per_sample_s"]) * (1.5 if measures else 1.0)


def timed(tuner):
    """Size and kind of all steps that were timed."""
    (times,) = tuner._decider.timings.rows().values()
    return {(row.key.micro_batch_size, row.key.measured) for row in times}


@pytest.mark.parametrize("waits", [(False,), (True,), (False, True)])
def test_neither_compiling_nor_deciding_is_step_time(monkeypatch, large_fixed_part, waits):
    used, tuner = sizes_on_a_device(
        monkeypatch, compile_s=0, real_compile_s=5.0, thinking_s=1.0, waits=waits
    )
    assert max(used) == SIZES[-1]
    assert {(BASE, True), (SIZES[-1], False)} <= timed(tuner)


@pytest.mark.slow
def test_the_price_of_a_size_is_told_by_several_steps(large_fixed_part):
    """A second step that compiles again would make the first compilation look free."""
    for num_compiled in (1, 2):
        used, tuner = sizes_of_an_own_loop(
            **CONSTANT, real_compile_s=60.0, num_compiled=num_compiled, clock=FakeClock()
        )
        assert {*used} == {BASE} and "would delay training by about 60 s" in tuner.why


@pytest.mark.parametrize("waits", [(False,), (True,)])
def test_with_two_programs_each_compilation_is_priced(monkeypatch, large_fixed_part, waits):
    with monkeypatch.context() as patch:
        used, tuner = sizes_on_a_device(patch, real_compile_s=60.0, waits=waits)
    assert {*used} == {BASE}
    with monkeypatch.context() as patch:
        long: dict[str, Any] = {"real_compile_s": 0.5, "base_steps": 4 * BASE_STEPS}
        used, tuner = sizes_on_a_device(patch, **long, waits=waits)
    assert max(used) > BASE
    account = tuner._sizes._explorer.account
    num_programs = len(tuner._sizes._used) - 2  # those of the base batch cost nothing more
    assert account.spent_s >= 0.5 * num_programs


def test_a_price_of_the_user_outlasts_a_first_step_from_a_compilation_cache(large_fixed_part):
    used, tuner = sizes_of_an_own_loop(**CONSTANT, compile_s=60)
    assert {*used} == {BASE}, tuner.why


def test_a_resumed_loop_goes_on_counting():
    tx, data, params = optimizer(), rows(100.0), {"w": jnp.zeros(WIDTH)}
    opt_state, step = tx.init(params), new_step(tx)
    for _ in range(3):
        params, opt_state, _ = step(params, opt_state, data[:BASE])
    assert jg.Tuner(LIMITS, 3, opt_state=opt_state).is_done
    tuner = jg.Tuner(LIMITS, 10, opt_state=opt_state)
    assert tuner.progress == 3 and not tuner.is_done
    params, opt_state, loss = step(params, opt_state, data[:BASE])
    tuner.step(opt_state, loss)
    assert tuner.progress == 4
    latest: Any = tuner._decider._latest
    newest, _ = latest
    assert newest.samples == 4 * BASE


def test_an_offer_is_charged_when_it_is_compiled_and_another_one_replaces_it(monkeypatch):
    sizes = jg.Tuner(LIMITS, 10, compile_s=2.0)._sizes
    explorer, table = sizes._explorer, TimingTable()
    offers = iter([32, 64])

    def offer(*args, **kwargs):
        explorer.account.spend(3.0)
        explorer._charged_s, explorer._trial_s = 3.0, 1.0
        return NextSize(size=next(offers), hope=2.0)

    monkeypatch.setattr(explorer, "next", offer)
    how: dict[str, Any] = {"strategy": "", "now_s": 1.0, "of_all": True}
    start = sizes._plan.start
    here = StrategyOption(
        config=start,
        limits=sizes.limits(""),
        placement=Placement(num_nodes=1, num_replicas=1),
        ready=sizes.ready(""),
    )
    grad = GradGroups(sqr=np.array([1.0]), var=np.array([10.0]))
    situation = Situation(here=here, grad=grad, steps_since_change=100, step=40)
    assert sizes.consider(situation, table, **how)
    before = sizes.ready("")
    assert sizes.consider(situation, table, **how)
    assert (before, sizes.ready("")) == ((16, 32), (16, 64)) and explorer.account.spent_s == 0
    config = dataclasses.replace(start, micro_batch_size=64)
    sizes.compiled(config, 5.0)
    step = DispatchedStep(
        step=41,
        config=config,
        measured=False,
        began_s=1.0,
        timed=True,
        busy=False,
        num_samples=64,
        samples=64,
        num_batches_taken=1,
    )
    assert explorer.account.spent_s == 3
    key = key_of(1, config, measured=False)
    # 4 s of compiling instead of 2, once 3 steps were timed.
    for at, spent_s in enumerate([3, 3, 5.0]):
        table.add(key, Parts(step_s=1.0), at)
        sizes.stepped(step, table, is_trial=True)
        assert explorer.account.spent_s == spent_s
    assert explorer.compile_s == 4
