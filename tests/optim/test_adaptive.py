"""`adaptive` changes nothing at the base batch, and beside it exactly what it says."""

import dataclasses
import functools
from typing import Any

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradGroups, efficiency
from jaxgoodput.optim import adaptation, noise
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptation import find
from jaxgoodput.optim.adaptive import GAIN_GROWTH, adaptive

BASE = 8
LABELS = {"a": "first", "b": {"c": "second"}}
PARAMS: dict[str, Any] = {"a": jnp.ones((2, 3)), "b": {"c": jnp.ones((4,))}}
SCHEDULE = optax.cosine_decay_schedule(0.1, 50)

OPTIMIZERS: dict[str, Any] = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw, schedule": optax.adamw(SCHEDULE),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(SCHEDULE)),
    "parameter groups": optax.multi_transform(
        {"first": optax.sgd(SCHEDULE), "second": optax.adamw(0.01)}, LABELS
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=0.1),
    "masked": optax.masked(optax.adam(0.1), {"a": True, "b": {"c": False}}),
    "lamb": optax.lamb(SCHEDULE),
}


def wrap(tx, rule=rules.adascale, **options) -> Any:
    options = {"keeps_fresh": False, **options}
    return adaptive(tx, rule, base_batch_size=BASE, **options)


def gradients(step, scale=1.0) -> Any:
    leaves = scale * jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (10,))
    return {"a": leaves[:6].reshape(2, 3), "b": {"c": leaves[6:]}}


def sample(sqr, var, num_samples=BASE):
    """A sample of two groups that says exactly this, of both leaves together or of each."""
    shares = np.ones(1) if np.ndim(sqr) else np.array([0.5, 0.5])
    sqr, var = np.float32(sqr * shares), np.float32(var * shares)
    trace = var * BASE / num_samples
    return noise.NoiseSample(
        small_sqr=jnp.asarray(sqr + 2 * trace),
        large_sqr=jnp.asarray(sqr + trace),
        num_groups=jnp.asarray(2),
        num_samples=jnp.asarray(num_samples),
    )


def jitted(tx) -> Any:
    return jax.jit(lambda g, s, size, n: tx.update(g, s, PARAMS, global_batch_size=size, noise=n))


def run(tx, steps, size, state=None, say=(1.0, 3.0), step=None) -> Any:
    """`steps` updates at one batch size; the last updates and the state."""
    step = step or jitted(tx)
    state, updates = tx.init(PARAMS) if state is None else state, None
    for i in range(steps):
        updates, state = step(gradients(i), state, size, sample(*say, num_samples=size))
    return updates, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_base_batch_is_the_users_optimizer_bit_for_bit(name):
    plain: Any = optax.with_extra_args_support(OPTIMIZERS[name])
    wrapped = wrap(OPTIMIZERS[name])
    # As users compile it: the older generator of kernels fuses products and sums in its own way.
    jit = functools.partial(jax.jit, compiler_options=compilations.AS_USERS)
    plain_step = jit(lambda g, s: plain.update(g, s, PARAMS))
    step = jit(lambda g, s, n: wrapped.update(g, s, PARAMS, global_batch_size=BASE, noise=n))
    plain_state, state = plain.init(PARAMS), wrapped.init(PARAMS)
    for i in range(20):
        expected, plain_state = plain_step(gradients(i), plain_state)
        updates, state = step(gradients(i), state, sample(0.1 * i - 1, i))
        jax.tree.map(np.testing.assert_array_equal, updates, expected)
    jax.tree.map(np.testing.assert_array_equal, state.inner, plain_state)
    assert float(adaptation.progress(state)) == 20


@pytest.mark.parametrize("name", ["adamw, schedule", "parameter groups", "injected", "lamb"])
def test_schedules_advance_with_progress_and_bias_correction_with_updates(name):
    seen = []

    def schedule(count):
        jax.debug.callback(lambda c: seen.append(int(c)), count)
        return 0.1

    tx = {
        "adamw, schedule": lambda: optax.adamw(schedule),
        "parameter groups": lambda: optax.multi_transform(
            {"first": optax.adam(schedule), "second": optax.sgd(0.1)}, LABELS
        ),
        "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=schedule),
        "lamb": lambda: optax.lamb(schedule),
    }[name]()
    wrapped = wrap(tx, max_gain_growth=1e9)  # at once, so that all of it is credited
    state = wrapped.init(PARAMS)
    seen.clear()
    _, state = run(wrapped, 30, 4 * BASE, state)
    jax.effects_barrier()
    # The first 8 samples say nothing yet; then a gain of (3 + 1) / (3 / 4 + 1).
    unknown = 8
    growth = 4 / 1.75
    expected = [*range(unknown), *(unknown + growth * np.arange(30 - unknown))]
    # Either side of a whole number is right.
    assert (np.floor(np.array(expected) - 1e-3) <= seen).all()
    assert (seen <= np.floor(np.array(expected) + 1e-3)).all()
    np.testing.assert_allclose(
        adaptation.progress(state), unknown + growth * (30 - unknown), rtol=1e-4
    )
    adams = [
        x
        for x in jax.tree.leaves(
            state.inner, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
        )
        if isinstance(x, optax.ScaleByAdamState)
    ]
    assert [x.count for x in adams] == [30]


def test_scheduled_weight_decay_follows_progress():
    seen = []

    def decay(count):
        jax.debug.callback(lambda c: seen.append(int(c)), count)
        return 0.1

    tx = optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.1))
    _, counted = tx.update(gradients(0), tx.init(PARAMS), PARAMS)
    run(wrap(tx), 30, 4 * BASE)
    jax.effects_barrier()
    # optax 0.2.6 never advances this count: a loop of its own keeps the first value, and so does a run.
    advances = any(int(x) for x in jax.tree.leaves(counted) if jnp.ndim(x) == 0)
    assert max(seen) > 40 if advances else max(seen) == 0


def test_updates_are_multiplied_and_the_optimizer_sees_the_plain_gradient():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.trace(0.9), optax.scale(-0.1))
    plain_state, expected = tx.init(PARAMS), None
    for i in range(40):
        expected, plain_state = tx.update(gradients(i), plain_state, PARAMS)
    updates, state = run(wrap(tx), 40, 4 * BASE)
    factor = 4 / 1.75
    np.testing.assert_allclose(adaptation.gain(state), [factor], rtol=1e-3)
    jax.tree.map(
        lambda u, e: np.testing.assert_allclose(u, factor * e, rtol=1e-3, atol=1e-6),
        updates,
        expected,
    )


def test_gain_grows_slowly_and_falls_at_once():
    tx = wrap(optax.sgd(0.1), rules.linear, max_gain_growth=1.1)
    state, step, gains = tx.init(PARAMS), jitted(tx), []
    for _ in range(40):
        _, state = run(tx, 1, 16 * BASE, state, step=step)
        gains.append(float(adaptation.gain(state)[0]))
    np.testing.assert_allclose(gains, np.minimum(1.1 ** np.arange(1, 41), 16), rtol=1e-4)
    _, state = run(tx, 1, 2 * BASE, state, step=step)
    assert float(adaptation.gain(state)[0]) == 2.0
    _, state = run(tx, 1, BASE // 2, state, step=step)
    assert float(adaptation.gain(state)[0]) == 0.5
    _, state = run(tx, 1, BASE, state, step=step)  # back to the tuned rate without delay
    assert float(adaptation.gain(state)[0]) == 1.0


def test_a_warm_up_that_starts_at_zero_does_not_stay_there():
    _, state = run(wrap(optax.sgd(0.1), rules.legw(5.0)), 60, 4 * BASE)
    np.testing.assert_allclose(adaptation.gain(state), [2.0], rtol=1e-5)


def test_nothing_grows_on_unknown_noise():
    tx = wrap(optax.sgd(0.1))
    _, state = run(tx, 5, 64 * BASE, say=(-100.0, 1e9))
    assert float(adaptation.gain(state)[0]) == 1.0
    assert float(adaptation.progress(state)) == 5.0


def test_smaller_batches_than_the_base_take_smaller_steps():
    tx = wrap(optax.sgd(0.1))
    _, state = run(tx, 60, BASE)
    _, state = run(tx, 1, BASE // 4, state)
    expected = (3 + 1) / (3 * 4 + 1)
    np.testing.assert_allclose(adaptation.gain(state), [expected], rtol=0.05)
    np.testing.assert_allclose(adaptation.progress(state), 60 + expected, rtol=1e-3)


def test_label_groups_have_factors_of_their_own():
    tx = wrap(optax.sgd(1.0), labels=LABELS)
    updates, state = run(tx, 40, 4 * BASE, say=([1.0, 1.0], [0.0, 1e6]))
    np.testing.assert_allclose(adaptation.gain(state), [1.0, 4.0], rtol=1e-3)
    grads = gradients(39)
    np.testing.assert_allclose(updates["a"], -grads["a"], rtol=1e-3)
    np.testing.assert_allclose(updates["b"]["c"], -4 * grads["b"]["c"], rtol=1e-3)


def test_progress_loses_no_increment_in_a_long_run():
    tx = wrap(optax.sgd(0.1), num_std_errors=0.0, min_samples=0.0, max_gain_growth=1e9)
    _, state = run(tx, 1, 4 * BASE)
    start = 2.0**24  # a float32 cannot count on from here
    state = adaptation.with_own(
        state,
        lambda own: dataclasses.replace(
            own, progress=jnp.float32(start), progress_rest=jnp.float32(0.0)
        ),
    )
    _, state = run(tx, 700, 4 * BASE, state)
    own = find(state)
    done = np.float64(own.progress) + np.float64(own.progress_rest) - start
    np.testing.assert_allclose(done, 700 * 4 / 1.75, rtol=1e-5)
    assert float(own.progress) != start + 1400  # ... and the plain sum would have been wrong


def test_whole_progress_is_exact_between_floats():
    whole = jax.jit(adaptation.whole)
    assert int(whole(jnp.float32(2.0**25), jnp.float32(1.0))) == 2**25 + 1
    assert int(whole(jnp.float32(5.0), jnp.float32(-1e-9))) == 4
    assert int(whole(jnp.float32(5.5), jnp.float32(0.25))) == 5


def test_without_a_sample_statistics_stay_and_structure_too():
    tx = wrap(optax.adam(0.1))
    _, state = run(tx, 12, 2 * BASE)
    step = jax.jit(lambda g, s: tx.update(g, s, PARAMS, global_batch_size=2 * BASE))
    _, after = step(gradients(0), state)
    jax.tree.map(np.testing.assert_array_equal, find(after).noise, find(state).noise)
    assert (
        jax.tree.structure(after)
        == jax.tree.structure(state)
        == jax.tree.structure(tx.init(PARAMS))
    )
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), (after, tx.init(PARAMS)))
    assert shapes[0] == shapes[1]


def test_a_refused_step_leaves_all_but_the_samples_gone_by_as_it_was():
    tx = wrap(optax.adamw(SCHEDULE))
    _, state = run(tx, 12, 2 * BASE)
    bad = jax.tree.map(lambda g: g * jnp.nan, gradients(0))
    step = jax.jit(
        lambda g, s, finite: tx.update(
            g, s, PARAMS, global_batch_size=16, noise=sample(np.nan, 1.0), finite=finite
        )
    )
    updates, after = step(bad, state, False)
    gone = adaptation.passed_over(state, jnp.float32(16 / BASE))  # its samples
    own, before = find(gone), find(state)
    assert float(own.base_batches) == float(before.base_batches) + 16 / BASE
    assert float(own.unmeasured) == float(before.unmeasured) + 16 / BASE
    jax.tree.map(np.testing.assert_array_equal, after, gone)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), updates)
    _, after = step(gradients(0), state, True)
    assert float(adaptation.progress(after)) > float(adaptation.progress(state))


def test_no_recompilation_when_the_batch_changes():
    tx = wrap(optax.adamw(SCHEDULE))
    step: Any = jax.jit(
        lambda g, s, size, n, biased: tx.update(
            g, s, PARAMS, global_batch_size=size, noise=n, biased=biased
        )
    )
    state = tx.init(PARAMS)
    for size in (8, 16, 24, 4, 1024):
        _, state = step(gradients(0), state, size, sample(1.0, 1.0, size), size == 8)
    assert step._cache_size() == 1


def test_extra_arguments_reach_an_optimizer_that_takes_them():
    def update(updates, state, params=None, *, value, **extra):
        return jax.tree.map(lambda u: u * value, updates), state

    init: Any = lambda params: optax.EmptyState()  # noqa: E731
    times_value: Any = update
    inner = optax.GradientTransformationExtraArgs(init, times_value)
    grads = gradients(0)
    tx: Any = optax.chain(optax.identity(), wrap(inner))
    updates, state = tx.update(grads, tx.init(PARAMS), PARAMS, global_batch_size=BASE, value=2.0)
    np.testing.assert_allclose(updates["a"], 2 * grads["a"])
    assert float(adaptation.progress(state)) == 1.0  # found inside a chain


def test_half_precision_updates_stay_half():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = wrap(optax.sgd(0.1), rules.linear)
    updates, _ = tx.update(params, tx.init(params), params, global_batch_size=2 * BASE)
    assert updates["w"].dtype == jnp.bfloat16


def test_state_survives_a_checkpoint(tmp_path):
    tx = wrap(OPTIMIZERS["parameter groups"], labels=LABELS)
    _, state = run(tx, 12, 2 * BASE, say=([1.0, 2.0], [3.0, 4.0]))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", target)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_a_donated_state_has_no_shared_buffers():
    tx = wrap(optax.adam(0.1))
    step = jax.jit(
        lambda g, s: tx.update(g, s, PARAMS, global_batch_size=BASE)[1], donate_argnums=1
    )
    state = step(gradients(0), tx.init(PARAMS))
    assert float(adaptation.progress(step(gradients(1), state))) == 2.0


def test_readers_read():
    tx = wrap(optax.adam(0.1))
    _, state = run(tx, 30, 2 * BASE)
    grad = adaptation.grad_params(state)
    np.testing.assert_allclose([grad.sqr, grad.var], [1.0, 3.0], rtol=1e-4)
    noise = adaptation.readout(state)
    np.testing.assert_allclose(noise.num_samples, 30, rtol=0.05)
    assert noise.known
    np.testing.assert_allclose(noise.group_var, [1.5, 1.5], rtol=1e-3)
    np.testing.assert_allclose([noise.plain.sqr, noise.plain.var], [1.0, 3.0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [None, LABELS])
def test_what_is_kept_of_the_noise_is_what_follows_from_it(labels):
    """After any update, measured or not, and when an earlier run's noise is held."""
    tx = wrap(optax.adam(0.1), labels=labels, num_std_errors=0.5, min_samples=3.0)
    made = tx.update.__self__  # the object whose methods an optax transformation is made of
    held = GradGroups(sqr=np.ones(2), var=np.full(2, 5.0))
    begun = tx.init(PARAMS)
    for state in (begun, adaptation.with_noise_held(begun, held)):
        for step in range(12):
            own = find(state)
            found = made._findings(own.noise, own.groups)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), own.findings, found
            )
            measured = sample(1.0 + step, 3.0) if step % 3 else None
            _, state = tx.update(
                gradients(step), state, PARAMS, global_batch_size=2 * BASE, noise=measured
            )


def test_a_decision_made_apart_gives_the_same_update():
    tx = wrap(optax.adamw(SCHEDULE))
    state = tx.init(PARAMS)
    for step in range(10):
        about = {"global_batch_size": 3 * BASE, "noise": sample(1.0, 3.0)}
        whole = tx.update(gradients(step), state, PARAMS, **about)
        decided = tx.decide(gradients(step), state, **about)
        norm = optax.tree.norm(gradients(step))
        own = adaptation.watched(decided.own, norm, jnp.float32(3), decided.progressed)
        decided = dataclasses.replace(decided, own=own)
        apart = tx.update(gradients(step), state, PARAMS, **about, decided=decided)
        jax.tree.map(np.testing.assert_array_equal, whole, apart)
        _, state = whole


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="base_batch_size must be positive, got 0"):
        adaptive(optax.sgd(0.1), rules.none, base_batch_size=0)
    with pytest.raises(ValueError, match="max_gain_growth must be above 1"):
        wrap(optax.sgd(0.1), max_gain_growth=0.9)
    with pytest.raises(ValueError, match="holds 0 AdaptiveStates"):
        adaptation.progress(optax.sgd(0.1).init(PARAMS))
    with pytest.raises(TypeError, match="global_batch_size"):
        tx = wrap(optax.sgd(0.1))
        tx.update(gradients(0), tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="has 1 norms, the parameters have 2 leaves"):
        tx = wrap(optax.sgd(0.1))
        one = sample([1.0], [1.0])
        tx.update(gradients(0), tx.init(PARAMS), PARAMS, global_batch_size=8, noise=one)


@pytest.mark.parametrize("scale", [1, 4, 2.5])
def test_schedules_may_go_by_samples(scale):
    """Whatever a sample is worth, a run of so many samples ends where its schedules do."""
    seen = []

    def schedule(count):
        jax.debug.callback(lambda c: seen.append(int(c)), count)
        return 0.1

    tx = wrap(optax.adamw(schedule), schedules="samples")
    state = tx.init(PARAMS)
    seen.clear()
    _, state = run(tx, 30, scale * BASE, state)
    jax.effects_barrier()
    np.testing.assert_allclose(seen, np.floor(scale * np.arange(30) + 1e-4))
    assert scale == 1 or adaptation.progress(state) < 0.9 * 30 * scale


@pytest.mark.slow
@pytest.mark.parametrize("at", [30, 2000])
def test_a_second_moment_that_lags_behind_is_made_up_for(at):
    """Adam's moment of base batches makes updates of larger ones too small, until it has shrunk.

    The tracked lag is that of optax's own state: young moments forget faster.
    """
    b2, scale, gain = 0.999, 4, 4 * (3 + 1) / (3 + 4)
    tx = wrap(optax.adam(1.0, b2=b2), rules.adam_scale, second_moment_decay=b2, max_gain_growth=1e9)
    _, state = run(tx, at, BASE)
    assert float(adaptation.gain(state)[0]) == 1.0
    _, state = run(tx, 1, scale * BASE, state)
    np.testing.assert_allclose(adaptation.gain(state), [gain], rtol=0.05)
    _, state = run(tx, 299, scale * BASE, state)
    # Squares of 1 for base batches and of 1 / gain since, as Adam with its bias correction has them.
    weights = b2 ** np.arange(at + 300)[::-1]
    squares = np.where(np.arange(at + 300) < at, 1.0, 1 / gain)
    lag = np.average(squares, weights=weights)
    np.testing.assert_allclose(find(state).second_moment, [lag], rtol=0.02)
    # Back at the base its moment is that of larger batches, and too small.
    _, state = run(tx, 1, BASE, state)
    np.testing.assert_allclose(adaptation.gain(state), [lag**0.5], rtol=0.02)


@functools.cache
def adam_that_measures() -> Any:
    b2 = 0.99
    tx = wrap(optax.adam(1.0, b2=b2), rules.adam_scale, second_moment_decay=b2, max_gain_growth=1e9)
    return tx, jitted(tx), b2


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    decays=st.floats(0.97, 1.0),
    noise_to_signal=st.floats(0.5, 20.0),
    scale=st.sampled_from([1, 4, 16]),
    switch=st.integers(10, 60),
)
def test_a_second_moment_of_gradients_that_shrink_keeps_the_early_ones(
    decays, noise_to_signal, scale, switch
):
    """Early gradients are larger, so a larger batch removes less of the moment than of new squares.

    The tracked ratio is that of the moment to the one that base batches would have made.
    """
    tx, step, b2 = adam_that_measures()
    state = tx.init(PARAMS)
    moment, at_base, weight = 1.0 + noise_to_signal, 1.0 + noise_to_signal, 0.0
    for i in range(150):
        size = scale if i >= switch else 1
        signal = decays**i
        var = noise_to_signal * signal
        # Of two elements of equal moment, one in each leaf.
        root = np.float32(moment**0.5)
        said = sample(signal / root, var / root, num_samples=size * BASE)
        said = dataclasses.replace(said, moment=jnp.full(2, root / 2))
        _, state = step(gradients(i), state, size * BASE, said)
        weight = b2 * weight + 1 - b2
        share = (1 - b2) / weight
        moment += share * (signal + var / size - moment)
        at_base += share * (signal + var - at_base)
    found = float(find(state).second_moment[0])
    np.testing.assert_allclose(found, moment / at_base, rtol=0.02)
    assert scale > 1 or found == 1.0


@pytest.mark.slow
def test_a_sum_of_squares_lags_behind_as_well():
    """Adagrad's, which in the long run makes a large batch's updates as large as they should be."""
    scale = 4
    tx = wrap(optax.adagrad(1.0), rules.adam_scale, second_moment_decay=1.0, max_gain_growth=1e9)
    _, state = run(tx, 1000, BASE)
    assert float(adaptation.gain(state)[0]) == 1.0
    _, state = run(tx, 1, scale * BASE, state)
    gain = scale * (3 + 1) / (3 + scale)
    np.testing.assert_allclose(adaptation.gain(state), [gain], rtol=0.05)
    done, squares = 1000.0, 1000.0  # base steps, and what the sum is in squares of base batches
    for _ in range(500):
        done, squares = done + gain, squares + 1 / gain
    _, state = run(tx, 500, scale * BASE, state)
    wanted = gain * (squares / done) ** 0.5
    assert 1 < wanted < 0.9 * gain
    np.testing.assert_allclose(adaptation.gain(state), [wanted], rtol=0.02)
    # What is held back is not credited, and not taken for base steps of the sum either.
    slow = wrap(optax.adagrad(1.0), rules.adam_scale, second_moment_decay=1.0)
    _, state = run(slow, 60, BASE)
    _, state = run(slow, 40, 16 * BASE, state)
    gain = 16 * (3 + 1) / (3 + 16)
    truth = (60 + 40 / gain) / float(adaptation.progress(state))
    np.testing.assert_allclose(find(state).second_moment, [truth], rtol=0.05)


@functools.cache
def adagrad_that_measures() -> Any:
    tx = wrap(optax.adagrad(1.0), rules.adam_scale, second_moment_decay=1.0, max_gain_growth=1e9)
    return tx, jitted(tx)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    decays=st.floats(0.96, 1.0),
    noise_to_signal=st.floats(0.5, 20.0),
    scale=st.sampled_from([1, 4, 16]),
    switch=st.integers(10, 60),
    every=st.sampled_from([1, 8]),
)
def test_a_sum_of_squares_of_gradients_that_shrink_is_that_of_the_early_ones(
    decays, noise_to_signal, scale, switch, every
):
    """Most of Adagrad's sum is from before the batch grew, so later updates need not be smaller for it.

    The tracked ratio is that of the sum to the one that base batches would have made up to this progress.
    """
    tx, step = adagrad_that_measures()
    state = tx.init(PARAMS)
    made = at_base = 1.0
    for i in range(150):
        size = scale if i >= switch else 1
        signal = decays ** float(state.own.tree.progress)
        var = noise_to_signal * signal
        # Of two elements with equal sums, one in each leaf.
        root = np.float32(made**0.5)
        said = sample(signal / root, var / root, num_samples=size * BASE)
        said = dataclasses.replace(said, moment=jnp.full(2, root / 2))
        before = float(state.own.tree.progress)
        if i % every:  # steps that measure nothing have no group to compare
            said = dataclasses.replace(
                said, num_groups=jnp.zeros_like(jnp.asarray(said.num_groups))
            )
        _, state = step(gradients(i), state, size * BASE, said)
        made += signal + var / size
        at_base += (signal + var) * (float(state.own.tree.progress) - before)
    found = float(find(state).second_moment[0])
    np.testing.assert_allclose(found, made / at_base, rtol=0.02 if every == 1 else 0.2)
    assert scale > 1 or found == 1.0


@pytest.mark.parametrize("scale", [0.5, 1, 3])
def test_a_rule_is_told_the_moments_of_one_group_that_is_worth_as_much(scale):
    seen = []

    def rule(scale, grad, progress):
        jax.debug.callback(lambda s, v: seen.append((float(s), float(v))), grad.sqr, grad.var)
        noise = grad.var / grad.sqr
        return (noise + 1) / (noise / scale + 1)

    tx = wrap(optax.sgd(0.1), rule, max_gain_growth=1e9, num_std_errors=0.0)
    say = (np.array([1.0, 2.0]), np.array([3.0, 60.0]))  # of one leaf and of the other
    _, state = run(tx, 20, int(scale * BASE), say=say)
    jax.effects_barrier()
    assert np.isfinite(seen).all() and min(sqr for sqr, _ in seen) > 0
    worth = float(efficiency(GradGroups(sqr=say[0], var=say[1]), scale)) * scale
    np.testing.assert_allclose(adaptation.gain(state), [worth], rtol=1e-3)


def test_what_the_limit_on_growth_holds_back_is_no_progress():
    tx = wrap(optax.sgd(0.1))
    _, state = run(tx, 100, BASE)
    _, state = run(tx, 1, 64 * BASE, state)
    np.testing.assert_allclose(adaptation.gain(state), [GAIN_GROWTH], rtol=1e-5)
    np.testing.assert_allclose(adaptation.progress(state), 100 + GAIN_GROWTH, rtol=1e-5)
