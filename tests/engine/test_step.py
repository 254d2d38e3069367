"""The update: refused where it is not finite, scheduled by progress, multiplied by the gain."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import (
    BASE,
    DIM,
    SAMPLE,
    assert_close,
    assert_same_bits,
    cut,
    host,
    make,
    put,
    read,
    residual,
    run,
    samples,
    start,
)

from jaxgoodput.engine import step as pure
from jaxgoodput.engine.state import Loss, StepMetrics, Variables, combine, split
from jaxgoodput.optim import adaptation
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptive import GAIN_GROWTH
from jaxgoodput.optim.noise import MeasuredGroups
from jaxgoodput.parallel.strategy import Strategy

# -- the norm of the gradient ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [Strategy(), Strategy(data=2), Strategy(fsdp=2)], ids=lambda x: x.name
)
@pytest.mark.parametrize(
    "shapes", [[()], [(7,), (0,)], [(100, 100), ()], [(2048, 2048)], [(2048, 2048), (8,)]], ids=str
)
def test_the_norm_is_exact_for_leaves_of_every_size(key, rng, shapes, strategy):
    """One running sum over millions of elements would lose digits."""
    planted = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    def loss(params, batch, key):
        slope = sum(jnp.sum(w * c) for w, c in zip(params, planted, strict=True))
        return batch["x"][:, 0] * slope

    engine = make(
        loss,
        init=lambda key: [jnp.zeros(shape) for shape in shapes],
        strategy=strategy,
        sample={"x": SAMPLE["x"]},
    )
    rows = {"x": samples(rng, 8)["x"]}
    _, metrics = engine.step(start(engine, key), None, *put(engine, rows))
    norm = math.sqrt(sum(np.sum(np.square(c, dtype=np.float64)) for c in planted))
    expected = abs(float(np.mean(rows["x"][:, 0]))) * norm
    assert read(engine, metrics).grad_norm == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", [None, 0, 31, 32, 69])
def test_each_of_many_small_leaves_counts(key, rng, spoilt):
    """They are summed up in groups; the optimizer spoils one of them."""
    planted = rng.standard_normal((70, 4)).astype(np.float32)

    def loss(params, batch, key):
        return batch["x"][:, 0] * sum(jnp.sum(w * c) for w, c in zip(params, planted, strict=True))

    def spoil(updates, state, params=None):
        return [u if i != spoilt else u * jnp.nan for i, u in enumerate(updates)], state

    engine = make(
        loss,
        init=lambda key: [jnp.zeros(4) for _ in planted],
        tx=optax.chain(
            optax.sgd(0.1), optax.GradientTransformation(lambda params: optax.EmptyState(), spoil)
        ),
        sample={"x": SAMPLE["x"]},
    )
    rows = {"x": samples(rng, 8)["x"]}
    state, metrics = engine.step(start(engine, key), None, *put(engine, rows))
    metrics = read(engine, metrics)
    assert metrics.is_finite == (spoilt is None)
    expected = abs(float(np.mean(rows["x"][:, 0]))) * np.linalg.norm(planted)
    assert metrics.grad_norm == pytest.approx(expected, rel=1e-4)
    assert bool(any(np.any(x) for x in jax.tree.leaves(host(state.params)))) is (spoilt is None)


@pytest.mark.parametrize("often", [False, True])
def test_steps_that_measure_often_are_compiled_to_run_fast(often):
    engine = make(measures_often=often)
    (build,) = engine.measuring_programs(8)
    assert build().is_seldom is not often


# -- not finite --------------------------------------------------------------------------------------


def breakable(params, batch, key):
    """A finite loss and gradient where `bad` is 1 and `root` is 1; else only what the name says."""
    # At 0 the root is finite and its gradient is not.
    root = jnp.sqrt((batch["root"] * params["w"][:1]) ** 2)
    return residual(params, batch) ** 2 / 2 * batch["bad"] + root


def fragile(rng, count, **broken):
    rows = samples(rng, count)
    rows |= {name: np.ones(count, np.float32) for name in ("bad", "root")}
    for name, value in broken.items():
        rows[name][count // 2] = value
    return rows


@pytest.fixture(scope="module")
def guarded():
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def loss_and_state(params, model_state, batch, key):
        seen = {"mean": jnp.mean(batch["x"]), "calls": model_state["calls"] + 1}
        return breakable(params, batch, key), seen

    def init(key):
        state = {"mean": jnp.zeros(()), "calls": jnp.zeros((), jnp.int32)}
        params = {"w": jax.random.normal(key, (DIM,)), "b": jnp.zeros(())}
        return Variables(params=params, model_state=state)

    return make(
        loss_and_state=loss_and_state,
        init=init,
        tx=optax.adam(0.05),
        replicas=2,
        sample=SAMPLE | {"bad": scalar, "root": scalar},
    )


BROKEN = {
    "nan loss": {"bad": np.nan},
    "infinite loss": {"bad": np.inf},
    "nan gradient of a finite loss": {"root": 0.0},
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize("what", BROKEN, ids=lambda what: what.replace(" ", "-"))
def test_an_update_that_is_not_finite_never_happened(guarded, key, rng, what, fused):
    def go(state, rows):
        return run(guarded, state, cut(rows, 2), fused=fused)

    good = [fragile(rng, 16) for _ in range(3)]
    bad = fragile(rng, 16, **BROKEN[what])
    state, _ = go(start(guarded, key), good[0])
    before = host(state)
    for in_a_row in (1, 2):
        state, metrics = go(state, bad)
        assert metrics.is_finite == 0
        assert (metrics.num_skipped, metrics.skipped_in_a_row) == (in_a_row, in_a_row)
        if what.startswith("nan gradient"):
            assert np.isfinite(metrics.loss)
    for field in ("params", "model_state", "key"):
        assert_same_bits(getattr(state, field), getattr(before, field))
    # Its samples have gone by.
    own = jax.tree.map(jnp.asarray, before.opt_state)
    gone = adaptation.passed_over(own, jnp.float32(2 * 16 / BASE))
    assert_same_bits(state.opt_state, gone)
    assert state.step == before.step + 2
    state, metrics = go(state, good[1])
    assert (metrics.num_skipped, metrics.skipped_in_a_row) == (2, 0)
    # As if the bad batches had never been.
    other = start(guarded, key)
    for rows in good[:2]:
        other, _ = go(other, rows)
    for field in ("params", "opt_state", "model_state"):
        wanted = getattr(other, field)
        if field == "opt_state":
            now = adaptation.find(state.opt_state)
            wanted = adaptation.with_own(
                wanted,
                lambda own, now=now: dataclasses.replace(
                    own,
                    base_batches=own.base_batches + 2 * 16 / BASE,
                    # The averages are as much older as went by.
                    noise=now.noise,
                    groups=now.groups,
                ),
            )
        assert_same_bits(getattr(state, field), wanted)


def test_a_step_that_is_not_finite_says_nothing_of_the_noise(key, rng):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    engine = make(breakable, sample=SAMPLE | {"bad": scalar, "root": scalar})
    good, bad = fragile(rng, 8), fragile(rng, 8, bad=np.nan)
    state, counts = start(engine, key), []
    for rows in (bad, good, bad, good, bad):
        state, metrics = engine.step(state, None, *put(engine, rows))
        counts.append(read(engine, metrics).noise.num_samples)
    assert counts[0] == 0 < counts[1] == counts[2] < counts[3] == counts[4]
    assert read(engine, metrics).num_skipped == 3


# -- schedules, gains, statistics --------------------------------------------------------------------


def gradient(params, rows):
    x = np.concatenate([np.ones((len(rows["y"]), 1)), rows["x"]], 1)
    r = x @ np.concatenate([[params["b"]], params["w"]]) - rows["y"]
    g = (r[:, None] * x).mean(0)
    return {"b": g[0], "w": g[1:]}


@pytest.mark.slow
def test_schedules_follow_progress_and_the_gain_multiplies_what_comes_out(key, rng):
    # The rate is the count it was called with: the update tells which.
    engine = make(
        tx=optax.sgd(lambda count: 0.01 * (1.0 + count)), rule=rules.linear, replicas=2, base=BASE
    )
    state, counts = start(engine, key), []
    for size in (BASE // 2, BASE // 2, BASE // 2, BASE, 4 * BASE, 4 * BASE, BASE // 2):
        rows = samples(rng, size)
        before = host(state)
        state, metrics = run(engine, state, [rows])
        after = host(state)
        wanted = size / BASE
        last = float(adaptation.find(before.opt_state).gain[0])
        gain = metrics.gain
        np.testing.assert_allclose(gain, min(wanted, max(last, 1) * GAIN_GROWTH), rtol=1e-5)
        g = gradient(before.params, rows)
        rate = (
            np.linalg.norm(before.params["w"] - after.params["w"]) / np.linalg.norm(g["w"]) / gain
        )
        counts.append(rate / 0.01 - 1)
        expected = {n: before.params[n] - rate * gain * g[n] for n in g}
        assert_close(after.params, expected, rtol=1e-4, atol=1e-6)
    # Fewer than MIN_SAMPLES of statistics: a base step per step, and half of one for half the batch; less
    # what the limit on the gain's growth holds back of the first two at four times the base.
    np.testing.assert_allclose(counts, [0, 0, 1, 1, 2, 2, 3], atol=1e-3)
    done = 2.5 + 0.5 + (GAIN_GROWTH + GAIN_GROWTH**2) / 4
    np.testing.assert_allclose(metrics.progress, done, rtol=1e-5)
    np.testing.assert_allclose(adaptation.progress(state.opt_state), done, rtol=1e-5)


def test_groups_of_parameters_have_gains_of_their_own(key, rng):
    def loss(params, batch, key):
        # "steady" has the same gradient for every sample, "noisy" one without any mean.
        steady = jnp.broadcast_to(jnp.sum(params["steady"]), batch["y"].shape)
        return steady + batch["x"] @ params["noisy"]

    engine = make(
        loss,
        init=lambda key: {"noisy": jnp.zeros(DIM), "steady": jnp.zeros(3)},
        rule=rules.adascale,
        labels=lambda params: {"noisy": "noisy", "steady": "steady"},
        replicas=4,
        tx=optax.sgd(0.1),
    )
    state = start(engine, key)
    for _ in range(50):
        state, _ = run(engine, state, [samples(rng, 4 * BASE)])
    noisy, steady = np.asarray(adaptation.gain(state.opt_state))
    assert noisy > 2.0 and noisy <= 4.0
    np.testing.assert_allclose(steady, 1.0, rtol=1e-3)
    before, rows = host(state.params), samples(rng, 4 * BASE)
    state, _ = run(engine, state, [rows])
    noisy, steady = np.asarray(adaptation.gain(state.opt_state))
    expected = {
        "noisy": before["noisy"] - 0.1 * noisy * rows["x"].mean(0),
        "steady": before["steady"] - 0.1 * steady,
    }
    assert_close(state.params, expected, rtol=1e-4, atol=1e-5)


MEAN = np.array([0.3, -0.2, 0.1, 0.4, 0.0])
STD = np.array([1.0, 0.5, 2.0, 0.1, 1.5])


def centres(params, batch, key):
    """Half the squared distance to a random centre: the gradient is the centre with a minus."""
    return jnp.sum((params["w"][None] - batch["x"]) ** 2, axis=1) / 2


def planted_second_moment(opt_state, moment):
    """Adam's memory as it is after very long training."""

    def place(node):
        if isinstance(node, optax.ScaleByAdamState):
            whole = jnp.asarray(moment, jnp.float32)
            return node._replace(count=jnp.full_like(node.count, 10**6), nu={"w": whole})
        return node

    return jax.tree.map(
        place, opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "micro_batches", "adam", "draws"),
    [(8, 1, False, 400), (1, 3, False, 400), (1, 1, False, 1200), (4, 2, True, 400)],
    ids=["replicas", "micro-batches", "pairs", "adam"],
)
def test_noise_statistics_recover_a_planted_quadratic(
    key, rng, replicas, micro_batches, adam, draws
):
    size = 24
    # A rate of 0: the parameters, and with them the truth, stand still.
    engine = make(
        centres,
        init=lambda key: {"w": jnp.zeros(DIM)},
        tx=optax.adam(0.0) if adam else optax.sgd(0.0),
        preconditioned=adam,
        replicas=replicas,
        smoothing=1 - 1e-6,
        sample={"x": SAMPLE["x"]},
    )
    state, scale = start(engine, key), np.ones(DIM)
    if adam:
        moment = MEAN**2 + STD**2 / size
        planted = planted_second_moment(state.opt_state, moment)
        state = jax.device_put(
            pure.TrainState(**{**vars(state), "opt_state": planted}), engine.layout.replicated
        )
        scale = np.sqrt(moment)
    for _ in range(draws):
        rows = {"x": (MEAN + STD * rng.standard_normal((size, DIM))).astype(np.float32)}
        *first, last = [put(engine, part) for part in cut(rows, micro_batches)]
        work = None
        for batch, mask in first:
            work = engine.accumulate(work or engine.begin(state), batch, mask)
        state, metrics = engine.step(state, work, *last)
        # Hundreds of steps in flight on eight virtual devices can starve XLA's collectives.
        metrics.block_until_ready()
    averages = host(adaptation.noise_state(state.opt_state).current)
    effective = float(averages.weight / averages.heaviest)
    assert effective > 0.9 * draws
    truth = {"sqr": np.sum(MEAN**2 / scale), "var": np.sum(STD**2 / scale) / BASE}
    for name, value in truth.items():
        mean = getattr(averages, name)[-1]
        error = getattr(averages, f"{name}_deviation")[-1] / np.sqrt(effective)
        assert abs(mean - value) < 4 * error, (name, mean, value, error)
        assert error < 0.15 * value, "too noisy to tell anything"


@pytest.mark.parametrize("known", [False, True])
def test_metrics_come_off_the_wire_as_numbers_with_what_rides_along(known):
    noise = adaptation.NoiseReadout(
        sqr=1.5,
        var=2.5,
        known=known,
        group_sqr=jnp.array([4.0, 5.0, 6.0]),
        group_var=jnp.array([1.0, 2.0, 3.0]),
        seen_groups=0,
        num_samples=3,
        newest_samples=2,
    )
    sent = StepMetrics(
        loss=jnp.float32(0.1),
        weight=64.0,
        grad_norm=4.0,
        is_finite=jnp.asarray(True),
        num_skipped=jnp.int32(7),
        skipped_in_a_row=0,
        num_samples=64.0,
        num_groups=8.0,
        progress=12.25,
        gain=1.0,
        explodes=jnp.asarray(True),
        most_gain=0.0,
        noise=noise,
        measured=MeasuredGroups(
            sqr=jnp.array([-4.0, 5.5, 6.5]), sqr_error=jnp.array([0.1, 0.2, 0.3]), var_error=0.25
        ),
        aux={"b": 2.0, "a": 1.0},
    )
    vector = np.concatenate([sent.packed(), [5.0, 6.0]])
    got, rest = StepMetrics.unpacked(vector, ("a", "b"), 3)
    assert rest.tolist() == [5.0, 6.0]
    assert got.is_finite is True and got.loss == np.float32(0.1) and got.aux == {"a": 1.0, "b": 2.0}
    counts = (got.num_skipped, got.skipped_in_a_row, got.num_samples, got.num_groups)
    assert counts == (7, 0, 64, 8) and all(type(n) is int for n in counts)
    assert (got.progress, got.noise.num_samples, got.noise.newest_samples) == (12.25, 3.0, 2.0)
    assert got.noise.plain.var == 2.5
    assert got.noise.is_known is known and got.noise.is_guess is known
    expected = [1.0, 2.0, 3.0] if known else [np.nan] * 3  # on the host, unknown is NaN
    np.testing.assert_array_equal(got.noise.expected.var, expected)
    np.testing.assert_array_equal(got.measured.sqr, [-4.0, 5.5, 6.5])
    np.testing.assert_allclose(got.measured.sqr_error, [0.1, 0.2, 0.3], rtol=1e-6)
    assert got.measured.var_error == 0.25 and got.noise_interval(16).is_known is known


# -- the pure functions ------------------------------------------------------------------------------


def test_split_and_combine_are_inverse():
    tree = {"a": jnp.ones(2), "b": [jnp.zeros(3), None], "c": (jnp.ones(()),)}
    mask = {"a": True, "b": [False, None], "c": (True,)}
    kept, rest = split(tree, mask)
    assert len(jax.tree.leaves(kept)) == 2 and len(jax.tree.leaves(rest)) == 1
    assert jax.tree.structure(combine(kept, rest)) == jax.tree.structure(tree)
    assert_same_bits(combine(kept, rest), tree)


def kind_of(loss):
    engine = make(loss)
    return engine.engines.loss_kind()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda p, b, k: p["b"] * b["y"], "sample"),
        (lambda p, b, k: jnp.mean(p["b"] * b["y"]), "mean"),
        (lambda p, b, k: Loss.of(p["b"] * b["y"], b["weight"], extra=p["b"] * b["y"]), "sample"),
        (lambda p, b, k: Loss.of(jnp.sum(p["b"] * b["y"]), jnp.sum(b["weight"])), "mean"),
    ],
    ids=["per-sample", "scalar", "Loss-per-sample", "Loss-scalar"],
)
def test_the_kind_of_a_loss_is_read_off_its_shape(loss, kind):
    assert kind_of(loss) == kind


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda p, b, k: b["x"], r"returned shape \(2, 5\) for a micro-batch of 2 samples"),
        (lambda p, b, k: (b["y"], {}), "got tuple.*Loss.of"),
        (lambda p, b, k: Loss.of(b["y"], jnp.sum(b["y"])), r"got \(2,\) and \(\)"),
    ],
    ids=["tokens", "pair", "mixed"],
)
def test_a_loss_of_another_shape_is_refused_with_the_remedy(loss, message):
    with pytest.raises(TypeError, match=message):
        kind_of(loss)


def test_the_state_shares_no_buffer_that_donation_would_take_twice(key):
    shared = jnp.ones(DIM)
    engine = make(init=lambda key: {"w": shared, "b": jnp.zeros(()), "again": shared})
    state = engine.init(key)
    leaves = [x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    places = [x.addressable_data(0).unsafe_buffer_pointer() for x in leaves]
    assert len(places) == len(set(places))


def test_parameters_may_be_a_single_array(key, rng):
    engine = make(
        lambda params, batch, key: (batch["x"] @ params - batch["y"]) ** 2 / 2,
        init=lambda key: jax.random.normal(key, (DIM,)),
        tx=optax.adam(0.1),
        preconditioned=True,
        replicas=2,
    )
    rows = samples(rng, 8)
    fused, _ = run(engine, start(engine, key), cut(rows, 2))
    whole, _ = run(engine, start(engine, key), [rows])
    assert_close(fused.params, whole.params)
