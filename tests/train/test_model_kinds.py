"""Frozen parameters, mutable model state and mixed precision train as they should."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import (
    DIM,
    assert_close,
    assert_same_bits,
    cut,
    host,
    make,
    per_sample,
    run,
    samples,
    start,
)

from jaxgoodput.engine.state import Variables, cast

# -- frozen parameters -------------------------------------------------------------------------------


@pytest.mark.slow
def test_frozen_parameters_keep_every_bit_and_cost_no_optimizer_state(key, rng):
    frozen_shape = (DIM, DIM)

    def loss(params, batch, key):
        return per_sample(params, {**batch, "x": batch["x"] @ params["body"]}, key)

    def init(key):
        body = jax.random.normal(key, frozen_shape)
        return {"body": body, "steps": jnp.arange(3), "w": jnp.ones(DIM), "b": jnp.zeros(())}

    engine = make(
        loss,
        init=init,
        # Weight decay would move a frozen leaf that has no gradient.
        tx=optax.adamw(0.1, weight_decay=0.1),
        replicas=2,
        preconditioned=True,
        trainable=lambda params: {"body": False, "steps": False, "w": True, "b": True},
    )
    state = start(engine, key)
    before = host(state.params)
    whole = start(engine, key)
    for _ in range(3):
        rows = samples(rng, 16)
        state, _ = run(engine, state, cut(rows, 2))
        whole, _ = run(engine, whole, [rows])
    assert_close(state.params, whole.params)
    for name in ("body", "steps"):
        assert_same_bits(state.params[name], before[name])
    assert np.all(np.abs(np.asarray(state.params["w"]) - before["w"]) > 0.01)
    assert all(x.shape != frozen_shape for x in jax.tree.leaves(state.opt_state))


# -- mixed precision ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_bfloat16_computes_over_float32_masters(key, rng):
    seen = []

    def loss(params, batch, key):
        seen.append({name: x.dtype for name, x in params.items()})
        return per_sample(params, {**batch, "x": cast(batch["x"], params["w"].dtype)}, key)

    def trained(**kind):
        engine = make(loss, tx=optax.sgd(0.05, momentum=0.9), replicas=2, **kind)
        state, metrics = start(engine, key), None
        for seed in range(4):
            rows = samples(np.random.default_rng(seed), 32)
            state, metrics = run(engine, state, cut(rows, 1 + seed % 2))
        return state, metrics

    full, full_metrics = trained()
    assert {d for s in seen for d in s.values()} == {jnp.dtype("float32")}
    seen.clear()
    mixed, metrics = trained(compute_dtype=jnp.dtype("bfloat16"))
    assert {d for s in seen for d in s.values()} == {jnp.dtype("bfloat16")}
    for leaf in jax.tree.leaves((mixed.params, mixed.opt_state)):
        assert leaf.dtype != jnp.bfloat16
    assert_close(mixed.params, full.params, rtol=0.02, atol=0.01)
    assert not np.array_equal(mixed.params["w"], full.params["w"])
    np.testing.assert_allclose(metrics.loss, full_metrics.loss, rtol=0.05)


def test_small_updates_are_not_lost_in_bfloat16(key, rng):
    """A bfloat16 parameter near 1 cannot move by 1e-4; its master can."""
    engine = make(
        lambda params, batch, key: params["w"][0] + 0 * batch["y"],
        init=lambda key: {"w": jnp.ones(1)},
        tx=optax.sgd(1e-4),
        compute_dtype=jnp.dtype("bfloat16"),
    )
    state = start(engine, key)
    for _ in range(50):
        state, _ = run(engine, state, [samples(rng, 2)])
    np.testing.assert_allclose(state.params["w"], 1 - 50e-4, rtol=1e-5)


# -- batch normalisation -----------------------------------------------------------------------------

MOMENTUM, ROWS, REPLICAS = 0.8, 4, 4


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x)
        return nn.Dense(1)(nn.tanh(x))[:, 0]


def normalised_engine(**kind):
    model = Normalised()

    def init(key):
        made = model.init(key, jnp.zeros((1, DIM)), train=False)
        state = {"batch_stats": made["batch_stats"], "batches": jnp.zeros((), jnp.int32)}
        return Variables(params=made["params"], model_state=state)

    def loss_and_state(params, model_state, batch, key):
        variables = {"params": params, "batch_stats": model_state["batch_stats"]}
        out, seen = model.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        state = {**seen, "batches": model_state["batches"] + 1}
        return (out - batch["y"]) ** 2, state

    engine = make(init=init, loss_and_state=loss_and_state, **kind)
    return engine, model


def running(stats, activations, counts):
    """Weighted mean over replicas of what each replica's own micro-batches make of the averages."""
    total, weight = {"mean": 0.0, "var": 0.0}, 0
    for replica, count in enumerate(counts):
        mean, var = np.asarray(stats["mean"], np.float64), np.asarray(stats["var"], np.float64)
        for j in range(count):
            rows = activations[j][replica * ROWS : (replica + 1) * ROWS]
            mean = MOMENTUM * mean + (1 - MOMENTUM) * rows.mean(0)
            var = MOMENTUM * var + (1 - MOMENTUM) * rows.var(0)
        total = {"mean": total["mean"] + count * mean, "var": total["var"] + count * var}
        weight += count
    return {name: value / weight for name, value in total.items()}


@pytest.fixture(scope="module")
def normalised():
    return normalised_engine(replicas=REPLICAS, tx=optax.adam(0.02))


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (2, 2, 2, 2), (3, 1, 0, 2), (0, 0, 0, 1)])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_running_averages_are_the_mean_over_replicas_weighted_by_samples(
    normalised, key, rng, counts, fused
):
    engine, _ = normalised
    state = start(engine, key)
    before = host((state.params, state.model_state))
    rows = [samples(rng, REPLICAS * ROWS) for _ in range(max(counts))]
    masks = [np.repeat([float(j < c) for c in counts], ROWS) for j in range(max(counts))]
    micro = []
    for row, mask in zip(rows, masks, strict=True):
        # A replica with nothing to do computes on whatever is there.
        row = {**row, "x": np.where(mask[:, None] > 0, row["x"], 1e4).astype(np.float32)}
        micro.append((row, mask))
    state, metrics = run(engine, state, micro, fused=fused)
    dense = before[0]["Dense_0"]
    activations = [row["x"].astype(np.float64) @ dense["kernel"] + dense["bias"] for row in rows]
    expected = running(before[1]["batch_stats"]["BatchNorm_0"], activations, counts)
    assert metrics.num_samples == sum(counts) * ROWS
    assert_close(
        dict(state.model_state["batch_stats"]["BatchNorm_0"]), expected, rtol=1e-4, atol=1e-5
    )
    # Counters advance alike everywhere, or the replicas would no longer be one model.
    counters = {int(s.data) for s in state.model_state["batches"].addressable_shards}
    assert counters == {max(counts)}


def test_a_model_with_batch_normalisation_learns_and_evaluates_with_its_averages(normalised, key):
    engine, model = normalised
    rng = np.random.default_rng(3)

    def draw(count):
        rows = samples(rng, count)
        # Far from unit scale: without the right averages an evaluation is worthless.
        rows["x"] = 30 + 10 * rows["x"]
        rows["y"] = np.tanh((rows["x"][:, 0] - 30) / 10)
        return rows

    state = start(engine, key)
    for step in range(120):
        rows = draw(REPLICAS * ROWS * (1 + step % 2))
        state, _ = run(engine, state, cut(rows, 1 + step % 2))
    held_out = draw(512)

    def error(batch_stats):
        variables = {"params": state.params, "batch_stats": batch_stats}
        out = model.apply(variables, held_out["x"], train=False)
        return float(np.mean((np.asarray(out) - held_out["y"]) ** 2))

    learnt = error(host(state.model_state["batch_stats"]))
    assert learnt < 0.3 * held_out["y"].var()
    assert error(host(start(engine, key).model_state["batch_stats"])) > 3 * learnt
