"""However a batch is cut over replicas and micro-batches, the update is that of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import (
    BASE,
    DIM,
    assert_close,
    assert_same_bits,
    cut,
    host,
    linear_init,
    make,
    per_sample,
    put,
    residual,
    run,
    samples,
    start,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.engine.state import Loss
from jaxgoodput.optim import adaptation
from jaxgoodput.parallel.strategy import Strategy

TOTAL = 48
STEPS = 3


def token_weighted(params, batch, key):
    weight = batch["weight"]
    return Loss.of(weight * residual(params, batch) ** 2 / 2, weight, rows=weight)


def token_totals(params, batch, key):
    weight = batch["weight"]
    return Loss.of(jnp.sum(weight * residual(params, batch) ** 2 / 2), jnp.sum(weight))


def scalar_mean(params, batch, key):
    return jnp.mean(residual(params, batch) ** 2 / 2)


LOSSES = {
    "per sample": per_sample,
    "token weights": token_weighted,
    "token totals": token_totals,
    "scalar mean": scalar_mean,
}


def optimizer():
    # Clipping and Adam see one gradient of the whole batch, or the results differ visibly.
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))


def by_hand(name, params, batches):
    """A plain optax loop over whole batches."""
    tx = optimizer()
    weighted = name.startswith("token")

    def objective(params, batch):
        weight = batch["weight"] if weighted else jnp.ones_like(batch["y"])
        return jnp.sum(weight * residual(params, batch) ** 2 / 2) / jnp.sum(weight)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(objective)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return params, losses


@pytest.fixture(scope="module")
def engines():
    """(loss, replicas) -> engine, made once."""
    made = {}

    def get(name, replicas):
        if (name, replicas) not in made:
            made[name, replicas] = make(LOSSES[name], tx=optimizer(), replicas=replicas)
        return made[name, replicas]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "counts"),
    [
        ("per sample", 2, (1, 3)),
        pytest.param("token weights", 1, (1, 4), marks=pytest.mark.nightly),
        ("token weights", 8, (1, 2, 3)),
        ("token totals", 2, (2,)),
        ("scalar mean", 2, (1, 4)),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_any_cut_of_a_batch_is_one_plain_step_of_the_whole(
    engines, key, rng, name, replicas, counts
):
    engine = engines(name, replicas)
    batches = [samples(rng, TOTAL) for _ in range(STEPS)]
    params = host(start(engine, key).params)
    expected, losses = by_hand(name, params, batches)
    assert all(np.abs(np.asarray(expected["w"]) - params["w"]) > 1e-3), "nothing was trained"
    for count in counts:
        state, seen = start(engine, key), []
        for batch in batches:
            state, metrics = run(engine, state, cut(batch, count))
            seen.append(metrics)
        assert_close(state.params, expected)
        assert all(m.grad_norm > 0.5 for m in seen), "nothing was clipped"
        np.testing.assert_allclose([m.loss for m in seen], losses, rtol=1e-5)
        for metrics in seen:
            assert metrics.num_samples == TOTAL
            # One gradient of all rows has that of a part of them to be compared with.
            assert metrics.num_groups == max(replicas * count, 2)
            assert metrics.is_finite == 1 and metrics.num_skipped == 0


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "count"), [(1, 4), (8, 2)])
def test_step_is_accumulate_and_apply(engines, key, rng, replicas, count):
    engine = engines("token weights", replicas)
    fused, apart = start(engine, key), start(engine, key)
    for _ in range(2):
        parts = cut(samples(rng, TOTAL), count)
        fused, one = run(engine, fused, parts)
        apart, other = run(engine, apart, parts, fused=False)
        assert set(one.aux) == {"rows"}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), one, other)
    assert_close(fused, apart)
    assert_same_bits(fused.step, apart.step)


@pytest.mark.slow
def test_statistics_do_not_change_the_update(engines, key, rng):
    for replicas in (1, 8):
        engine = engines("token weights", replicas)
        batch = samples(rng, TOTAL)
        plain, _ = run(engine, start(engine, key), [batch], measure=False)
        measured, metrics = run(engine, start(engine, key), [batch])
        assert_close(plain.params, measured.params, rtol=1e-6)
        assert adaptation.noise_state(plain.opt_state).current.weight == 0
        assert metrics.noise.num_samples > 0


def test_auxiliary_numbers_are_averaged_over_samples(engines, key, rng):
    engine = engines("token weights", 8)
    batch = samples(rng, TOTAL)
    _, metrics = run(engine, start(engine, key), cut(batch, 3))
    np.testing.assert_allclose(metrics.aux["rows"], batch["weight"].mean(), rtol=1e-6)


@pytest.mark.parametrize("name", ["per sample", "token weights"])
def test_padding_counts_for_nothing(engines, key, rng, name):
    """It repeats real samples, whichever they are."""
    engine = engines(name, 2 if name == "per sample" else 8)
    good = samples(rng, TOTAL // 2 if name == "per sample" else TOTAL)
    total = len(good["y"])
    mask = np.ones(total, np.float32)
    mask[1 : total - 1 : 2] = 0  # every replica keeps at least one real sample
    found = []
    for seed in (0, 1):
        chosen = np.random.default_rng(seed).choice(np.flatnonzero(mask), total)
        rows = np.where(mask > 0, np.arange(total), chosen)
        padded = jax.tree.map(lambda x, rows=rows: x[rows], good)
        state, metrics = run(engine, start(engine, key), [(padded, mask)])
        assert metrics.num_samples == mask.sum() and metrics.is_finite == 1
        found.append(state)
    real = jax.tree.map(lambda x: x[mask > 0], good)
    expected, _ = by_hand(name, host(start(engine, key).params), [real])
    assert_close(found[0].params, expected)
    assert_close(found[0].params, found[1].params)


def by_length(params, batch, key):
    """A loss whose gradient is not finite for a sample of zeros."""
    return jnp.linalg.norm(batch["x"] * params["w"][None], axis=-1) * residual(params, batch) ** 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss, strategy",
    [
        (by_length, Strategy(data=4)),
        (per_sample, Strategy(fsdp=4)),
        (per_sample, Strategy(data=2, fsdp=2)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_replica_of_padding_alone_counts_for_nothing(key, rng, loss, strategy):
    """Samples [2, 2, 2, 0] by replica, and a second micro-batch of padding alone."""
    engine = make(loss, strategy=strategy, tx=optax.sgd(0.1))
    alone = make(loss, replicas=1, tx=optax.sgd(0.1))
    good = samples(rng, 8)
    padded = jax.tree.map(lambda x: np.concatenate([x[:6], x[:1], x[:1]]), good)
    nothing = jax.tree.map(lambda x: np.repeat(x[:1], 8, 0), good)
    mask = np.array([1] * 6 + [0] * 2, np.float32)
    real = jax.tree.map(lambda x: x[:6], good)
    expected, told = run(alone, start(alone, key), [real])
    for batch in ([(padded, mask)], [(padded, mask), (nothing, 0 * mask)]):
        found, metrics = run(engine, start(engine, key), batch)
        assert metrics.is_finite == 1 and metrics.num_samples == 6
        np.testing.assert_allclose(metrics.loss, told.loss, rtol=1e-5)
        assert_close(found.params, expected.params)


# -- uneven counts -----------------------------------------------------------------------------------

ROWS = 2  # samples of a micro-batch on one replica


@pytest.fixture(scope="module")
def uneven():
    """Eight replicas; two parameters; token weights."""
    return make(token_weighted, replicas=8, tx=optax.sgd(0.1))


def formulas(params, rows, masks):
    """Whole gradient, and (L, T, n, M) per parameter, from the definitions, in float64.

    `rows` and `masks` are lists over micro-batches of arrays `[8 * ROWS, ...]`. Parameters
    in the order of their names: b, w.
    """
    groups, total = [], 0.0
    whole = np.zeros(DIM + 1)
    for row, mask in zip(rows, masks, strict=True):
        x = np.concatenate([np.ones((len(mask), 1)), row["x"]], 1).astype(np.float64)
        r = x @ np.concatenate([[params["b"]], params["w"]]) - row["y"]
        per_row = (mask * row["weight"] * r)[:, None] * x
        for replica in range(8):
            mine = slice(replica * ROWS, (replica + 1) * ROWS)
            weight = float((mask * row["weight"])[mine].sum())
            if weight:
                groups.append((weight, per_row[mine].sum(0)))
            total += weight
        whole += per_row.sum(0)
    gradient = whole / total
    parts = [slice(0, 1), slice(1, None)]
    small = [sum(w / total * np.sum((g[p] / w) ** 2) for w, g in groups) for p in parts]
    large = [np.sum(gradient[p] ** 2) for p in parts]
    return gradient, np.array(small), np.array(large), len(groups), int(sum(m.sum() for m in masks))


def check_uneven(engine, key, seed, counts, partial):
    rng = np.random.default_rng(seed)
    most = max(counts)
    rows = [samples(rng, 8 * ROWS) for _ in range(most)]
    masks = []
    for j in range(most):
        mask = np.repeat([1.0 if j < c else 0.0 for c in counts], ROWS).astype(np.float32)
        if partial:
            mask[1::ROWS] *= rng.integers(0, 2, 8)
        masks.append(mask)
    state = start(engine, key)
    before = host(state.params)
    state, metrics = run(engine, state, list(zip(rows, masks, strict=True)), fused=False)
    gradient, small, large, n, num_samples = formulas(before, rows, masks)
    assert metrics.num_groups == n == sum(counts)
    assert metrics.num_samples == num_samples
    np.testing.assert_allclose(metrics.grad_norm, np.linalg.norm(gradient), rtol=1e-4)
    expected = {"b": before["b"] - 0.1 * gradient[0], "w": before["w"] - 0.1 * gradient[1:]}
    assert_close(state.params, expected, rtol=1e-4, atol=1e-5)
    averages = host(adaptation.find(state.opt_state).groups.current)
    if n < 2:
        assert averages.weight == 0
        return
    # A first sample is the average: the unbiased pair of this batch alone.
    sqr = (n * large - small) / (n - 1)
    trace = num_samples * (small - large) / (n - 1)
    for got, wanted in (
        (averages.sqr, sqr),
        (averages.var * BASE / num_samples, trace / num_samples),
    ):
        wanted = [*wanted, wanted.sum()]
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4 * float(small.sum()))


@pytest.mark.parametrize(
    "counts",
    [(3, 1, 0, 2, 2, 0, 1, 3), (1, 0, 0, 0, 0, 0, 0, 0), (2,) * 8, (0, 0, 4, 0, 0, 0, 0, 1)],
)
def test_uneven_counts_give_the_update_and_the_moments_of_the_formulas(uneven, key, counts):
    check_uneven(uneven, key, 0, counts, partial=False)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3), min_size=8, max_size=8).filter(any),
    partial=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_counts_and_any_padding_follow_the_formulas(uneven, counts, partial, seed):
    check_uneven(uneven, jax.random.key(1), seed, counts, partial)


def test_a_batch_without_any_micro_batch_is_refused(uneven, key):
    state = start(uneven, key)
    with pytest.raises(ValueError, match="holds no micro-batch"):
        uneven.apply(state, uneven.begin(state))
    batch = put(uneven, samples(np.random.default_rng(0), 8 * ROWS))
    with pytest.raises(ValueError, match="Pass None"):
        uneven.step(state, uneven.begin(state), *batch)


# -- randomness --------------------------------------------------------------------------------------


def dropped(params, batch, key):
    # The gradient is the mask itself, so that it can be read off the sums.
    return jnp.broadcast_to(jax.random.uniform(key, (DIM,)) @ params["w"], batch["y"].shape)


@pytest.fixture(scope="module")
def random_engine():
    return make(dropped, init=lambda key: {"w": jnp.ones(DIM)}, replicas=4)


def test_every_micro_batch_on_every_replica_at_every_step_has_its_own_key(random_engine, key, rng):
    engine = random_engine

    def masks_of(state, seed=0):
        work, before, seen = engine.begin(state), 0.0, []
        for part in cut(samples(np.random.default_rng(seed), 24), 3):
            work = engine.accumulate(work, *put(engine, part))
            total = np.array(work.sums.grads["w"])
            seen.append((total - before) / 2)
            before = total
        state, _ = engine.apply(state, work)
        return np.round(np.concatenate(seen), 4), state

    first, state = masks_of(start(engine, key))
    second, _ = masks_of(state)
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 2 * 3 * 4
    again, _ = masks_of(start(engine, key), seed=1)
    np.testing.assert_array_equal(first, again)  # whatever the data
    other, _ = masks_of(start(engine, jax.random.key(7)))
    assert not np.isclose(first, other).all(axis=1).any()


def test_fused_and_apart_draw_the_same_numbers(random_engine, key, rng):
    parts = cut(samples(rng, 24), 3)
    fused, _ = run(random_engine, start(random_engine, key), parts)
    apart, _ = run(random_engine, start(random_engine, key), parts, fused=False)
    assert_close(fused.params, apart.params)


def test_init_depends_on_the_key_alone(engines, key):
    one, other = engines("token weights", 1), engines("token weights", 8)
    assert_same_bits(one.init(key), other.init(key))
    assert_same_bits(start(one, key), one.init(key))
    assert not np.array_equal(one.init(key).params["w"], one.init(jax.random.key(3)).params["w"])
    assert jax.tree.structure(one.init(key)) == jax.tree.structure(one.abstract_state())
    assert linear_init(key)["w"].shape == (DIM,)
