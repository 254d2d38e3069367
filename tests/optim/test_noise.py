"""The estimators are unbiased, and the read-out is never carried away by a single sample."""

import dataclasses
import functools
import math
import re
import statistics

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxgoodput.goodput.efficiency import GradGroups, efficiency, noise_scale
from jaxgoodput.optim import noise

BASE = 16
MEAN = np.array([0.3, -0.2, 0.1, 0.4, 0.0])
STD = np.array([1.0, 0.5, 2.0, 0.1, 1.5])


def gradients(rng, draws, samples):
    """Per-sample gradients of |x - c|^2 / 2 over noisy centres c: known mean and covariance."""
    return (MEAN + STD * rng.standard_normal((draws, samples, 5))).astype(np.float32)


def estimate(sample, biased=False):
    """The unbiased pair of one sample alone: [labels] each."""
    state = noise.init_noise(sample.small_sqr.shape[0])
    state = noise.update_noise(state, sample, base_batch_size=BASE, biased=biased)
    return state.current.sqr[:-1], state.current.var[:-1]


def assert_recovers(values, truth):
    """The mean of independent estimates is the truth within 4 of its own standard errors."""
    values = np.asarray(values, np.float64)
    error = values.std(axis=0) / np.sqrt(len(values))
    assert np.all(np.abs(values.mean(axis=0) - truth) < 4 * error), (values.mean(0), truth, error)
    assert np.all(error < 0.1 * np.maximum(np.abs(truth), 1)), "too noisy to tell anything"


@pytest.mark.parametrize(
    "counts", [(4, 4, 4, 4), (3, 1, 0, 2), (1, 0, 9), (2, 2), (5, 1, 0, 0, 0, 1, 3, 2)], ids=str
)
@pytest.mark.parametrize("preconditioned", [False, True])
def test_planted_moments_are_recovered(rng, counts, preconditioned):
    scale = np.array([0.5, 1.0, 4.0, 0.2, 2.0]) if preconditioned else np.ones(5)
    counts = np.array(counts)
    draws, total = 6000, counts.sum()
    shares = counts / total

    def measure(samples):
        ends = np.cumsum(counts)
        groups = [
            samples[e - c : e].mean(0) if c else jnp.zeros(5)
            for c, e in zip(counts, ends, strict=True)
        ]
        tree = jax.tree.map(lambda s: jnp.asarray(1 / s, jnp.float32), {"w": scale})
        norms = jnp.stack([noise.squared_norms({"w": g}, preconditioner=tree)[0] for g in groups])
        sample = noise.NoiseSample(
            small_sqr=jnp.sum(shares * norms)[None],
            large_sqr=noise.squared_norms({"w": samples.mean(0)}, preconditioner=tree),
            num_groups=int((counts > 0).sum()),
            num_samples=int(total),
        )
        return estimate(sample)

    sqr, var = jax.jit(jax.vmap(measure))(gradients(rng, draws, total))
    assert_recovers(sqr[:, 0], np.sum(MEAN**2 / scale))
    assert_recovers(var[:, 0], np.sum(STD**2 / scale) / BASE)


@pytest.mark.parametrize("samples", [(8, 8), (8, 24)], ids=str)
def test_differenced_estimator_recovers_where_parameters_stand_still(rng, samples):
    def measure(both):
        new, old = {"w": both[: samples[0]].mean(0)}, {"w": both[samples[0] :].mean(0)}
        sample = noise.differenced_sample(new, old, samples[0], previous_num_samples=samples[1])
        return estimate(sample, biased=True)

    sqr, var = jax.jit(jax.vmap(measure))(gradients(rng, 6000, sum(samples)))
    assert_recovers(sqr[:, 0], np.sum(MEAN**2))
    assert_recovers(var[:, 0], np.sum(STD**2) / BASE)


def test_label_groups_are_measured_apart(rng):
    tree = {"b": jnp.array([3.0]), "w": jnp.array([1.0, 2.0]), "v": {"x": jnp.array([[5.0]])}}
    labels = {"b": "slow", "w": "fast", "v": "slow"}  # a prefix of the tree, as optax allows
    assert noise.label_names(labels, tree) == ("fast", "slow")
    norms = noise.squared_norms(tree)
    np.testing.assert_allclose(norms, [9.0, 25.0, 5.0])
    sample = noise.NoiseSample(small_sqr=norms, large_sqr=norms, num_groups=2, num_samples=BASE)
    indices = jax.tree.leaves(noise.label_indices(labels, tree))
    np.testing.assert_allclose(sample.pooled(indices, 2).small_sqr, [5.0, 34.0])
    np.testing.assert_allclose(sample.pooled([0, 0, 0], 1).large_sqr, [39.0])


def test_half_precision_is_summed_in_single():
    tree = {"w": jnp.full((4096,), 0.01, jnp.bfloat16)}
    exact = 4096 * float(jnp.bfloat16(0.01)) ** 2
    np.testing.assert_allclose(noise.squared_norms(tree), [exact], rtol=1e-5)


# ── averages ────────────────────────────────────────────────────────────────


def samples_of(sqr, var, num_samples=BASE):
    """Two-group samples whose estimates are exactly `sqr` and `var`: [steps]."""
    sqr, var = jnp.asarray(sqr, jnp.float32), jnp.asarray(var, jnp.float32)
    trace = var * BASE / num_samples  # of the mean of the whole batch
    return noise.NoiseSample(
        small_sqr=(sqr + 2 * trace)[..., None],
        large_sqr=(sqr + trace)[..., None],
        num_groups=jnp.full(sqr.shape, 2),
        num_samples=jnp.full(sqr.shape, num_samples),
    )


@functools.partial(jax.jit, static_argnames=("smoothing", "biased", "overlapping"))
def feed(state, samples, smoothing=0.999, biased=False, overlapping=False):
    def body(state, sample):
        state = noise.update_noise(
            state,
            sample,
            base_batch_size=BASE,
            smoothing=smoothing,
            biased=biased,
            overlapping=overlapping,
        )
        return state, None

    return jax.lax.scan(body, state, samples)[0]


def test_confidence_counts_samples():
    state = noise.init_noise(1)
    assert float(noise.confidence(state)) == 0
    steady = samples_of(np.ones(10), np.ones(10))
    state = feed(state, steady, smoothing=0.9999)
    np.testing.assert_allclose(noise.confidence(state), 10, rtol=2e-3)
    pairs = feed(noise.init_noise(1), steady, smoothing=0.9999, biased=True)
    np.testing.assert_allclose(noise.confidence(pairs), 10, rtol=2e-3)
    halves = feed(noise.init_noise(1), steady, smoothing=0.9999, biased=True, overlapping=True)
    np.testing.assert_allclose(noise.confidence(halves), 5, rtol=2e-3)
    long = feed(noise.init_noise(1), samples_of(np.ones(2000), np.ones(2000)), smoothing=0.99)
    np.testing.assert_allclose(noise.confidence(long), 100, rtol=1e-3)


def test_large_batches_are_never_unknown_for_good():
    size = 1000 * BASE  # the memory would be e^-1 per sample
    for biased in (False, True):
        many = samples_of(np.ones(60), np.ones(60), size)
        state = feed(noise.init_noise(1), many, biased=biased)
        np.testing.assert_allclose(noise.confidence(state), 16, rtol=0.05)
    assert np.isfinite(noise.cautious_grad_params(state).sqr)


def test_standard_errors_are_those_of_the_mean(rng):
    values = rng.standard_normal((2000, 40)) + 5.0
    states = jax.vmap(lambda x: feed(noise.init_noise(1), samples_of(x, x), smoothing=0.99999))(
        values.astype(np.float32)
    )
    cautious = jax.vmap(noise.cautious_grad_params)(states)
    plain = jax.vmap(noise.grad_params)(states)
    error = np.asarray(cautious.sqr - plain.sqr)
    np.testing.assert_allclose(error, np.asarray(plain.var - cautious.var), rtol=1e-3)
    truth = np.std(np.asarray(plain.sqr))
    np.testing.assert_allclose(error.mean(), truth, rtol=0.1)


def test_unknown_until_enough_samples():
    state = feed(noise.init_noise(1), samples_of(np.ones(7), np.ones(7)))
    few = noise.cautious_grad_params(state)
    assert not few.known and np.isfinite(few.sqr) and np.isfinite(few.var)
    state = feed(state, samples_of(np.ones(2), np.ones(2)))
    np.testing.assert_allclose(noise.cautious_grad_params(state).sqr, 1.0, rtol=1e-5)


finite = st.floats(-1e3, 1e3)
wild = st.floats(-1e30, 1e30)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(finite, finite), min_size=9, max_size=9),
    st.integers(0, 9),
    wild,
    wild,
    st.sampled_from([1, BASE, 40 * BASE]),
)
def test_no_single_sample_raises_the_noise_scale(history, position, wild_sqr, wild_var, size):
    """With one arbitrary sample at any place: var at most, sqr at least, what the others say."""
    sqr, var = (np.array(x) for x in zip(*history, strict=True))
    for x in (sqr, var):  # an honest history: its last sample is not itself taken for a spike
        assume(abs(x[-1] - x[:-1].mean()) <= 20 * x[:-1].std())
    # The others have the weights that they have beside the wild one.
    weights = np.delete(0.999 ** (np.arange(9, -1, -1) * size / BASE), position)
    rest_sqr, rest_var = np.average(sqr, weights=weights), np.average(var, weights=weights)
    samples = samples_of(
        np.insert(sqr, position, wild_sqr), np.insert(var, position, wild_var), size
    )
    cautious = noise.cautious_grad_params(feed(noise.init_noise(1), samples))
    assert cautious.var <= max(rest_var, 0) + 0.5
    assert cautious.sqr >= max(rest_sqr, 0) - 0.5


def test_one_wild_sample_would_have_carried_the_plain_average_away():
    calm = feed(noise.init_noise(1), samples_of(np.full(20, 1.0), np.full(20, 3.0)))
    hit = feed(calm, samples_of([-1000.0], [5e4]))
    plain, cautious = noise.grad_params(hit), noise.cautious_grad_params(hit)
    assert plain.sqr == 0  # noise scale infinite: the batch would go to its maximum
    assert cautious.var <= 3.001 and cautious.sqr >= 1.0


def test_a_spike_is_forgotten_and_a_lasting_change_is_not(rng):
    calm = samples_of(1 + 0.1 * rng.standard_normal(300), 3 + 0.1 * rng.standard_normal(300))
    state = feed(noise.init_noise(1), calm, smoothing=0.99)
    hit = feed(state, samples_of([1e6], [1e12]), smoothing=0.99)
    np.testing.assert_allclose(noise.grad_params(hit).var, 3.0, atol=0.2)
    moved = feed(state, samples_of(np.full(500, 1e4), np.full(500, 1e5)), smoothing=0.99)
    np.testing.assert_allclose(noise.grad_params(moved).var, 1e5, rtol=0.05)


@pytest.mark.parametrize("bad", ["nan", "inf", "one group", "no samples"])
def test_useless_samples_change_nothing(bad):
    state = feed(noise.init_noise(1), samples_of(np.ones(3), np.ones(3)))
    good = samples_of(1.0, 1.0)
    sample = noise.NoiseSample(
        small_sqr=good.small_sqr * {"nan": np.nan, "inf": np.inf}.get(bad, 1.0),
        large_sqr=good.large_sqr,
        num_groups=1 if bad == "one group" else 2,
        num_samples=0 if bad == "no samples" else BASE,
    )
    after = noise.update_noise(state, sample, base_batch_size=BASE)
    jax.tree.map(np.testing.assert_array_equal, state, after)


def test_statistics_survive_the_change_of_estimator():
    differenced = feed(noise.init_noise(1), samples_of(np.ones(40), np.full(40, 2.0)), biased=True)
    before = noise.cautious_grad_params(differenced)
    state = feed(differenced, samples_of([1.5], [7.0]))
    assert float(noise.grad_params(state).var) == 7.0  # the average itself starts over
    np.testing.assert_allclose(noise.cautious_grad_params(state).var, before.var)
    state = feed(state, samples_of(np.full(9, 1.5), np.full(9, 7.0)))
    np.testing.assert_allclose(noise.cautious_grad_params(state).var, 7.0, rtol=1e-5)


def test_tiny_and_huge_gradients_keep_their_standard_errors(rng):
    values = 1 + 0.5 * rng.standard_normal(30)
    unit = noise.cautious_grad_params(feed(noise.init_noise(1), samples_of(values, values)))
    for scale in (1e-25, 1e25):
        state = feed(noise.init_noise(1), samples_of(scale * values, scale * values))
        cautious = noise.cautious_grad_params(state)
        np.testing.assert_allclose(cautious.sqr, scale * unit.sqr, rtol=1e-4)
        np.testing.assert_allclose(cautious.var, scale * unit.var, rtol=1e-4)


def test_mismatched_labels_and_bad_arguments_are_named():
    with pytest.raises(ValueError, match="1 groups, the statistics have 2"):
        noise.update_noise(noise.init_noise(2), samples_of(1.0, 1.0), base_batch_size=BASE)
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\)"):
        noise.update_noise(
            noise.init_noise(1), samples_of(1.0, 1.0), base_batch_size=BASE, smoothing=1.0
        )
    with pytest.raises(ValueError, match="at least 1"):
        noise.init_noise(0)


# ── value_grad_and_noise ────────────────────────────────────────────────────


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def data(rng, n=24):
    return {
        "x": rng.standard_normal((n, 3)).astype(np.float32),
        "y": rng.standard_normal(n).astype(np.float32),
    }


def test_gradient_is_that_of_the_whole_batch_and_noise_that_of_its_groups(rng):
    batch, params = data(rng), {"w": jnp.array([0.1, 0.2, 0.3])}
    measured = jax.jit(noise.value_grad_and_noise(loss, num_groups=4))
    (value, aux), grads, sample = measured(params, batch)
    whole, whole_grads = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], whole_grads["w"], rtol=1e-5)
    assert aux is None
    each = [jax.grad(loss)(params, jax.tree.map(lambda x, i=i: x[i::4], batch)) for i in range(4)]
    np.testing.assert_allclose(
        sample.small_sqr[0], np.mean([np.sum(g["w"] ** 2) for g in each]), rtol=1e-5
    )
    np.testing.assert_allclose(sample.large_sqr[0], np.sum(whole_grads["w"] ** 2), rtol=1e-5)
    assert (int(sample.num_groups), int(sample.num_samples)) == (4, 24)


def test_groups_have_keys_and_aux_of_their_own(rng, key):
    def noisy(params, batch, key):
        return loss(params, batch) + 0 * jax.random.normal(key), jax.random.normal(key)

    measured = noise.value_grad_and_noise(noisy, num_groups=3, has_aux=True)
    (_, aux), _, _ = measured({"w": jnp.zeros(3)}, data(rng), key)
    assert aux.shape == (3,) and len(set(aux.tolist())) == 3


def test_batches_that_cannot_be_split_are_refused(rng):
    params = {"w": jnp.zeros(3)}
    with pytest.raises(ValueError, match="into 5 equal groups"):
        noise.value_grad_and_noise(loss, num_groups=5)(params, data(rng))
    with pytest.raises(ValueError, match="at least 2"):
        noise.value_grad_and_noise(loss, num_groups=1)


def test_a_sharded_batch_is_split_where_it_is(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    batch = jax.device_put(data(rng, 64), NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put({"w": jnp.ones(3)}, NamedSharding(mesh, PartitionSpec()))
    measured = jax.jit(noise.value_grad_and_noise(loss, num_groups=4))
    text = measured.lower(params, batch).compile().as_text() or ""
    moved = re.findall(r"(all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    assert not moved and "all-reduce" in text
    here = jax.tree.map(np.asarray, batch)
    for got, want in zip(measured(params, batch)[1:], measured(params, here)[1:], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


# ── groups of parameters ────────────────────────────────────────────────────


def test_every_leaf_is_a_group_and_many_layers_share_theirs():
    small = {"a": jnp.zeros(3), "layers": [jnp.zeros((2, 2)), jnp.zeros(2)]}
    assert noise.leaf_groups(small) == (("a", "layers/0", "layers/1"), (0, 1, 2))
    many = {f"layer_{i}": {"kernel": jnp.zeros(4), "bias": jnp.zeros(1)} for i in range(40)}
    names, index = noise.leaf_groups(many)
    assert names == ("layer_*/bias", "layer_*/kernel") and index == (0, 1) * 40
    odd = {chr(ord("a") + i) * (j + 1): jnp.zeros(1 + i) for i in range(26) for j in range(3)}
    names, index = noise.leaf_groups(odd)
    assert len(names) == noise.MAX_GROUPS and "others" in names and len(index) == 78
    sizes = [
        leaf.size for leaf, at in zip(odd.values(), index, strict=True) if names[at] == "others"
    ]
    assert max(sizes) <= min(
        leaf.size for leaf, at in zip(odd.values(), index, strict=True) if names[at] != "others"
    )
    assert noise.leaf_groups(jnp.zeros(3)) == (("all",), (0,))


def of_groups(sqr, var, steps=400, noisy=0.0, seed=0):
    """The state after samples of groups whose moments are `sqr` and `var`, `[groups]`."""
    rng = np.random.default_rng(seed)
    state = noise.init_noise(len(sqr))
    drawn = np.asarray(sqr) + noisy * rng.standard_normal((steps, len(sqr))) * np.asarray(var)
    trace = np.asarray(var, np.float32)

    def take(state, sqr):
        sample = noise.NoiseSample(
            small_sqr=sqr + 2 * trace,
            large_sqr=sqr + trace,
            num_groups=jnp.asarray(2),
            num_samples=jnp.asarray(BASE),
        )
        return noise.update_noise(state, sample, base_batch_size=BASE), None

    return jax.lax.scan(take, state, jnp.asarray(drawn, jnp.float32))[0]


@pytest.mark.parametrize("noisy", [0.0005, 0.05])
def test_a_group_that_is_all_noise_vouches_for_what_it_may_still_hold(noisy):
    """Dense layers at a noise scale of 4 base batches; a table all noise, with 100 times the variance."""
    state = of_groups([1.0, 0.0], [4.0, 400.0], noisy=noisy)
    groups, pooled = noise.expected_groups(state), noise.cautious_grad_params(state)
    truth, found = (1 + 4) / (8 + 4), float(efficiency(groups, 8.0))
    assert float(efficiency(pooled, 8.0)) > 0.9 and float(noise.num_seen(state)) <= 1
    if noisy < 0.01:  # the table has nothing left, and it is known
        np.testing.assert_allclose(found, truth, rtol=0.03)
    else:  # up to about the standard error, which is as much as the dense layers have
        assert 1.1 * truth < found < 0.85


@pytest.mark.parametrize("seed", range(5))
def test_many_samples_tell_what_a_batch_is_worth(seed):
    sqr, var = np.array([1.0, 0.3, 0.05]), np.array([4.0, 20.0, 30.0])
    exact = efficiency(GradGroups(sqr=sqr, var=var), 8.0)
    for noisy, far in ((0.3, 0.3), (0.01, 0.03)):
        state = of_groups(sqr, var, noisy=noisy, seed=seed)
        np.testing.assert_allclose(efficiency(noise.expected_groups(state), 8.0), exact, rtol=far)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    level=st.floats(math.log(0.003), math.log(0.5)).map(math.exp),
    num_groups=st.sampled_from([1, 3, 12]),
    error=st.floats(math.log(1.0), math.log(100.0)).map(math.exp),
)
def test_a_signal_below_its_error_biases_the_worth_of_a_sample_little(level, num_groups, error):
    """In the mean over 40 models; taking the error for the signal would be off by up to 0.7."""
    rng = np.random.default_rng(0)
    shape = (40, num_groups)
    var = np.exp(1.5 * rng.standard_normal(shape))
    var /= var.sum(1, keepdims=True)
    true = level * var * np.exp(rng.standard_normal(shape))
    errors = error * true * np.exp(0.3 * rng.standard_normal(shape))
    measured = true + errors * rng.standard_normal(shape)
    inputs = (jnp.asarray(x, jnp.float32) for x in (measured, errors, var))
    found = np.asarray(jax.vmap(noise._expected_signals)(*inputs), np.float64)
    assert (found > 0).all() and np.isfinite(found).all()
    off = [
        float(
            efficiency(GradGroups(sqr=a, var=v), 16.0) - efficiency(GradGroups(sqr=b, var=v), 16.0)
        )
        for a, b, v in zip(found, true, var, strict=True)
    ]
    assert abs(statistics.mean(off)) < 0.42


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    num_dead=st.integers(0, 6),
    share=st.floats(math.log(1e-9), math.log(1e-3)).map(math.exp),
    ratio=st.floats(math.log(0.01), math.log(1.0)).map(math.exp),
)
def test_groups_without_gradient_and_tiny_ones_change_nothing_for_others(num_dead, share, ratio):
    """Beside a table that is all noise: unused parameters, and a bias whose signal is known."""
    table = np.array([[0.1], [0.3], [1.0]])  # measured, error, noise
    dead = np.zeros((3, num_dead))
    bias = share * np.array([[ratio], [0.1 * ratio], [1.0]])

    def expected(*groups):
        measured, error, noise_ = jnp.asarray(np.concatenate(groups, axis=1), jnp.float32)
        return np.asarray(noise._expected_signals(measured, error, noise_))

    alone, beside, known = expected(table), expected(table, dead), expected(table, bias)
    np.testing.assert_allclose(beside[0], alone[0], rtol=1e-4)
    np.testing.assert_allclose(known[1], share * ratio, rtol=0.1)
    # A bias that was measured well says the same of the table, however small it is.
    moderate = expected(table, 0.01 / share * bias)
    np.testing.assert_allclose(known[0], moderate[0], rtol=0.01)


def test_small_groups_that_cannot_be_told_from_none_do_not_speak_for_the_others():
    """A bias of one entry: what it varies by is all that can be seen of it."""
    sqr, var = np.array([1.0, 0.001]), np.array([400.0, 1.0])
    state = of_groups(sqr, var, steps=16, noisy=0.0)
    wide = np.array([0.2, 10.0])  # standard deviations of one sample
    averages = dataclasses.replace(
        state.current, sqr_deviation=jnp.asarray([*wide, wide[1]], jnp.float32)
    )
    state = dataclasses.replace(state, current=averages, held=averages)
    exact = efficiency(GradGroups(sqr=sqr, var=var), 16.0)
    np.testing.assert_allclose(efficiency(noise.expected_groups(state), 16.0), exact, rtol=0.15)


def test_without_any_signal_the_noise_scale_is_large_and_a_guess():
    state = of_groups([-1.0, -2.0], [4.0, 400.0], noisy=0.01)
    groups = noise.expected_groups(state)
    assert float(noise.num_seen(state)) == 0
    assert float(noise_scale(groups, BASE)) > 100 * BASE
    assert 0.9 < float(efficiency(groups, 4.0)) <= 1


def test_without_any_noise_the_signal_is_what_was_measured():
    state = of_groups([1.0, 2.0], [0.0, 0.0])
    groups = noise.expected_groups(state)
    np.testing.assert_allclose(groups.sqr, [1.0, 2.0], rtol=1e-5)
    np.testing.assert_allclose(efficiency(groups, 4.0), 0.25, rtol=1e-5)


def test_unknown_moments_stay_unknown():
    blank = noise.expected_groups(noise.init_noise(3))
    assert not blank.known and np.isfinite(blank.sqr).all() and np.isfinite(blank.var).all()
    assert np.isnan(efficiency(blank, 2.0)) and np.isnan(noise_scale(blank, BASE))


@pytest.mark.parametrize("wild", [-100.0, -10.0, 10.0, 1e6, -1e6])
@pytest.mark.parametrize("steps", [20, 50])
def test_one_wild_sample_of_a_group_hands_its_share_to_no_other(wild, steps):
    """A quiet group and one of a thousand times its noise scale."""
    sqr, var = np.array([1.0, 1.0]), np.array([1.0, 1000.0])
    rng = np.random.default_rng(0)
    drawn = sqr + 0.3 * rng.standard_normal((steps, 2))

    def state_of(drawn):
        def take(state, sqr):
            sample = noise.NoiseSample(
                small_sqr=sqr + 2 * jnp.asarray(var, jnp.float32),
                large_sqr=sqr + jnp.asarray(var, jnp.float32),
                num_groups=jnp.asarray(2),
                num_samples=jnp.asarray(BASE),
            )
            options = {"base_batch_size": BASE, "outlier": noise.GROUP_OUTLIER}
            return noise.update_noise(state, sample, **options), None

        return jax.lax.scan(take, noise.init_noise(2), jnp.asarray(drawn, jnp.float32))[0]

    before = noise.expected_groups(state_of(drawn))
    after = noise.expected_groups(state_of(np.concatenate([drawn, [[wild, 1.0]]])))
    for scale in (4.0, 16.0):
        worth = [float(efficiency(found, scale)) for found in (before, after)]
        assert worth[1] < 1.3 * worth[0]
