"""Whichever way a loss runs, it estimates the noise that was planted."""

import engines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxgoodput as jg
from jaxgoodput.optim import adaptation
from jaxgoodput.parallel.strategy import Strategy

DIM, SPREAD, STEPS = 2048, 3.0, 150
STRATEGIES = (
    Strategy(data=8),
    Strategy(fsdp=8),
    Strategy(data=2, fsdp=2, tensor=2),
    Strategy(tensor=8),
)


def inner_product(params, batch, key):
    """The gradient of one sample is the sample itself, so its moments are those of the data."""
    del key
    return batch["x"] @ params["w"]


def moments(strategy, *, preconditioned, micro_batches=1):
    """(|E g|^2, trace of the covariance per base batch) after many batches of 16 samples."""
    one = engines.make(
        inner_product,
        init=lambda key: {"w": jnp.zeros(DIM)},
        tx=optax.chain(optax.scale_by_adam(b2=0.99), optax.scale(0.0)),
        strategy=strategy,
        sample={"x": jax.ShapeDtypeStruct((DIM,), jnp.float32)},
        preconditioned=preconditioned,
        smoothing=0.97,  # Adam's first updates have no second moment to divide by: forget them
        base=16,
    )
    state, metrics = one.init(jax.random.key(0)), None
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = {"x": 1.0 + SPREAD * rng.standard_normal((16, DIM)).astype(np.float32)}
        *some, last = engines.cut(x, micro_batches)
        work = None
        for rows in some:
            work = one.accumulate(work or one.begin(state), *engines.put(one, rows))
        state, metrics = one.step(state, work, *engines.put(one, last))
        jax.block_until_ready(metrics)  # too many steps under way are more than XLA:CPU can take
    found = engines.read(one, engines.known(metrics))
    return found.noise.sqr, found.noise.var


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_every_layout_finds_the_planted_noise(strategy):
    sqr, var = moments(strategy, preconditioned=False)
    np.testing.assert_allclose(var, DIM * SPREAD**2 / 16, rtol=0.03)
    np.testing.assert_allclose(sqr, DIM, rtol=0.1)


def test_micro_batches_of_a_global_loss_find_it_too():
    sqr, var = moments(Strategy(fsdp=4), preconditioned=False, micro_batches=4)
    np.testing.assert_allclose(var, DIM * SPREAD**2 / 16, rtol=0.03)
    np.testing.assert_allclose(sqr, DIM, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[1:], ids=lambda s: s.name)
def test_parts_of_a_batch_agree_with_replicas_after_adams_division(strategy):
    expected = moments(STRATEGIES[0], preconditioned=True)
    np.testing.assert_allclose(moments(strategy, preconditioned=True), expected, rtol=0.07)


# -- a part of the rows ------------------------------------------------------------------------------


def linear(params, batch, key):
    del key
    return (batch["x"] @ params["w"] - batch["y"]) ** 2 / 2


def with_statistics(params, model_state, batch, key):
    """The batch's own mean goes into every loss, as BatchNorm's does."""
    centred = {**batch, "x": batch["x"] - batch["x"].mean(0, keepdims=True)}
    return linear(params, centred, key), {"mean": batch["x"].mean(0)}


def gradients(x, y, w):
    return (x @ w - y)[:, None] * x


ROWS = {"x": jax.ShapeDtypeStruct((5,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)}
# (strategy, rows, real rows, one in how many is the part; 2: all rows are computed)
PARTS = (
    (Strategy(), 16, 16, 4),
    (Strategy(), 10, 7, 4),
    (Strategy(), 2, 2, 4),
    (Strategy(fsdp=4), 16, 16, 4),
    (Strategy(fsdp=4, tensor=2), 32, 30, 4),
    (Strategy(fsdp=8), 8, 8, 2),
)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rows", "real", "stride"), PARTS, ids=str)
@pytest.mark.parametrize("is_mutable", [False, True])
def test_a_sample_is_that_of_a_part_of_the_rows_and_the_others(
    rng, strategy, rows, real, stride, is_mutable
):
    """By definition, from single samples' gradients; with mutable state all rows are computed together."""
    made = {
        "loss_and_state": with_statistics if is_mutable else None,
        "init": lambda key: jg.Variables(
            params={"w": jnp.arange(1.0, 6.0)},
            model_state={"mean": jnp.zeros(5)} if is_mutable else (),
        ),
    }
    one = engines.make(linear, strategy=strategy, sample=ROWS, base=16, **made)
    x, y = rng.standard_normal((rows, 5)).astype(np.float32), np.ones(rows, np.float32)
    mask = (np.arange(rows) < real).astype(np.float32)
    share = rows // strategy.num_replicas
    x = np.where(mask[:, None] > 0, x, x[np.arange(rows) // share * share])  # as the loader pads
    state, metrics = engines.run(one, one.init(jax.random.key(0)), [({"x": x, "y": y}, mask)])
    if is_mutable:
        x, stride = x - x.mean(0), 2
    each = gradients(x, y, np.arange(1.0, 6.0))
    part = np.arange(rows) % (rows // strategy.num_replicas) % stride == 0
    if stride == 2:
        part = np.arange(rows) % 2 == 0
    groups = [each[(mask > 0) & part], each[(mask > 0) & ~part]]
    sizes = np.array([len(group) for group in groups])
    norms = np.array([np.sum(group.mean(0) ** 2) for group in groups])
    large, small = np.sum(each[mask > 0].mean(0) ** 2), (sizes * norms).sum() / real
    assert metrics.num_groups == 2 and metrics.noise.num_samples > 0
    averages = engines.host(adaptation.find(state.opt_state).groups.current)
    np.testing.assert_allclose(averages.sqr[-1], 2 * large - small, rtol=1e-4)
    np.testing.assert_allclose(averages.var[-1], real * (small - large) / 16, rtol=1e-4)


def test_what_leaves_nothing_to_compare_is_not_measured(rng):
    def mean(params, batch, key):
        return linear(params, batch, key).mean()

    x, y = np.ones((8, 5), np.float32), np.ones(8, np.float32)
    for loss, strategy, rows in ((linear, Strategy(), 1), (mean, Strategy(fsdp=8), 8)):
        one = engines.make(
            loss, init=lambda key: {"w": jnp.ones(5)}, strategy=strategy, sample=ROWS
        )
        assert not one.can_measure(1) and one.can_measure(2) and one.measuring_programs(1) == ()
        given = {"x": x[:rows], "y": y[:rows]}
        _, metrics = engines.run(one, one.init(jax.random.key(0)), [given])
        assert metrics.noise.num_samples == 0
