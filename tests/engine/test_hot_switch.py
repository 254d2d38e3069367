"""One batch under one layout after another: the same update, no compilation, nothing used twice."""

import dataclasses
import functools
from typing import Any

import engines
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest

import jaxgoodput as jg
from jaxgoodput._jax import listen_for_compilations
from jaxgoodput.engine.programs.program import SampleShape
from jaxgoodput.engine.state import Sums
from jaxgoodput.parallel.strategy import Strategy

# Four layouts, each with its own samples per replica and window length.
PARTS = (
    (Strategy(data=8), 2, 9),
    (Strategy(data=2, tensor=4), 4, 17),
    (Strategy(fsdp=4, tensor=2), 1, 33),
    (Strategy(fsdp=8), 1, 5),
)


def by_token(params, batch, key):
    """Windows count by their tokens, so that windows of any length share a batch."""
    tokens = batch["codes"].shape[1] - 1.0
    losses = layouts.loss(params, batch, key)
    return jg.Loss.of(losses * tokens, jnp.full(losses.shape, tokens))


def make(home, **problem):
    return engines.make(
        by_token,
        init=layouts.init,
        tx=layouts.ADAM,
        strategy=home,
        sample=layouts.sample(9),
        **problem,
    )


def placed(engine, rows) -> tuple[Any, Any]:
    """A micro-batch and its mask on an engine's devices."""
    batch, mask = engines.put(engine, rows)
    return batch, mask


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    return [
        layouts.windows(rng, strategy.num_replicas * size, length)
        for strategy, size, length in PARTS
    ]


@pytest.fixture(scope="module")
def under_one_layout(batch):
    """The state and the metrics after two steps on one device, by the type they compute in."""

    @functools.cache
    def after_two_steps(dtype):
        alone = make(Strategy(), preconditioned=False, compute_dtype=dtype)
        state, metrics = engines.start(alone, jax.random.key(0)), None
        for _ in range(2):
            work = alone.begin(state)
            for rows in batch:
                work = alone.accumulate(work, *placed(alone, rows))
            state, metrics = alone.apply(state, work)
        return engines.host(state), engines.read(alone, engines.known(metrics))

    return after_two_steps


@pytest.fixture(scope="module")
def at_home():
    """Engines that hold nothing but what they have compiled, one for each home."""
    return functools.cache(lambda home: make(home, preconditioned=False))


def compiled_ahead(home):
    devices = jax.devices()
    plans = [
        (s.on(devices), SampleShape.of(layouts.sample(n), micro_batch_size=size))
        for s, size, n in PARTS
    ]
    home.compile_batches(plans)
    return plans


HOMES = (Strategy(fsdp=8), Strategy(data=8), Strategy(fsdp=2, tensor=4))
NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "dtype"),
    [
        *(pytest.param(home, None, id=home.name) for home in HOMES),
        pytest.param(HOMES[0], jnp.bfloat16, id=f"{HOMES[0].name}-bfloat16"),
        *(
            pytest.param(home, jnp.bfloat16, marks=NIGHTLY, id=f"{home.name}-bfloat16")
            for home in HOMES[1:]
        ),
    ],
)
def test_a_batch_under_four_layouts_is_the_batch_under_one(batch, under_one_layout, home, dtype):
    expected, told = under_one_layout(dtype)
    engine = make(home, preconditioned=False, compute_dtype=dtype)
    plans = compiled_ahead(engine)
    state = engine.init(jax.random.key(0))
    ready = [
        placed(engine.on(layout), rows) for (layout, _), rows in zip(plans, batch, strict=True)
    ]
    compilations, metrics = [], None
    stop = listen_for_compilations(compilations.append)
    try:
        for _ in range(2):
            work = engine.begin(state)
            for (layout, _), (rows, mask) in zip(plans, ready, strict=True):
                work = engine.accumulate(work, rows, mask, layout)
            state, metrics = engine.apply(state, work)
        jax.block_until_ready(state)
    finally:
        stop()
    assert [c.name for c in compilations] == []
    # In bfloat16 the products themselves differ by how they are cut.
    tolerance = 2e-5 if dtype is None else 2e-2
    paths = jax.tree_util.tree_leaves_with_path(engines.host(state.params))
    for (path, a), b in zip(paths, jax.tree.leaves(expected.params), strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), path
    found = engines.read(engine, engines.known(metrics))
    np.testing.assert_allclose(found.loss, told.loss, rtol=1e-5 if dtype is None else 1e-2)
    assert found.num_samples == told.num_samples == sum(len(rows["codes"]) for rows in batch)
    # A group for each copy that is whole, and one for each micro-batch of the others.
    assert found.num_groups == 8 + 3


@pytest.mark.slow
def test_switching_back_and_forth_adds_up(batch, at_home):
    engine = at_home(Strategy(fsdp=8))
    plans = compiled_ahead(engine)
    ready = [
        placed(engine.on(layout), rows) for (layout, _), rows in zip(plans, batch, strict=True)
    ]

    def total(order):
        state = engine.init(jax.random.key(0))
        work = engine.begin(state)
        for i in order:
            rows, mask = ready[i]
            work = engine.accumulate(work, rows, mask, plans[i][0])
        sums = engine.reduce(work)
        assert isinstance(sums, Sums)
        return engines.host(sums.grads)

    # Every switch reduces what has been accumulated so far, and adds to it under the next layout.
    engines.assert_close(total([0, 1, 0, 2, 0]), total([0, 0, 0, 1, 2]), rtol=1e-4, atol=1e-4)


def test_model_state_and_random_numbers_go_on_across_layouts():
    """Batch statistics are averaged by samples, and no stream of random numbers is used twice."""

    def loss_and_state(params, model_state, batch, key):
        noise = jax.random.uniform(key, (batch["x"].shape[0],))
        mean = 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch["x"])
        out = jg.Loss.of(params["w"].sum() * noise, jnp.ones_like(noise), drawn=noise[0])
        return out, {"mean": mean, "count": model_state["count"] + 1}

    def init(key):
        state = {"mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}
        return jg.Variables(params={"w": jnp.ones((4, 512))}, model_state=state)

    engine = engines.make(
        None,
        init=init,
        loss_and_state=loss_and_state,
        strategy=Strategy(data=8),
        sample={"x": jax.ShapeDtypeStruct((3,), jnp.float32)},
    )
    here, there = engine.layout, Strategy(fsdp=8).on(jax.devices())
    state = engine.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    rows = [{"x": rng.standard_normal((8, 3)).astype(np.float32)} for _ in range(3)]
    work = engine.begin(state)
    for layout, x in zip((here, there, here), rows, strict=True):
        work = engine.accumulate(work, *placed(engine.on(layout), x), layout)
    moved, metrics = engine.apply(state, work)
    # Each replica carries on from the average of all.
    mean = 0.0
    for x in rows:
        mean = 0.5 * mean + 0.5 * x["x"].mean()
    np.testing.assert_allclose(moved.model_state["mean"], mean, rtol=1e-5)
    assert int(moved.model_state["count"]) == 3

    # The same three micro-batches without switching draw other streams, but none of them twice.
    def draws(layouts_in_turn):
        state = engine.init(jax.random.key(0))
        work, found = engine.begin(state), []
        for layout, x in zip(layouts_in_turn, rows, strict=True):
            before = None if work.sums is None else np.asarray(work.sums.aux["drawn"]).sum()
            work = engine.accumulate(work, *placed(engine.on(layout), x), layout)
            found.append(np.asarray(work.sums.aux["drawn"]).sum() - (before or 0.0))
        return found

    assert len(set(np.round(draws((here, there, here)), 3))) == 3


@pytest.mark.slow
def test_a_used_work_is_refused_and_the_state_is_intact(batch, at_home):
    engine = at_home(Strategy(data=8))
    other = Strategy(fsdp=8).on(jax.devices())
    state = engine.init(jax.random.key(0))
    rows = placed(engine, batch[0])
    used = engine.accumulate(engine.begin(state), *rows)
    state, _ = engine.apply(state, used)
    before = engines.host(state)
    for again in (
        lambda: engine.accumulate(used, *rows),
        lambda: engine.accumulate(used, *rows, other),
        lambda: engine.apply(state, used),
        lambda: engine.step(state, used, *rows),
    ):
        with pytest.raises(ValueError, match="consumed already.*begin"):
            again()
    engines.assert_same_bits(before, state)


def test_a_work_that_moved_on_is_refused(batch, at_home):
    engine = at_home(Strategy(data=8))
    other = Strategy(fsdp=8).on(jax.devices())
    state = engine.init(jax.random.key(0))
    first = engine.accumulate(engine.begin(state), *placed(engine, batch[0]))
    second = engine.accumulate(first, *placed(engine.on(other), batch[0]), other)
    with pytest.raises(ValueError, match="consumed already"):
        engine.accumulate(first, *placed(engine, batch[0]))
    _, metrics = engine.apply(state, second)
    assert engines.read(engine, metrics).num_samples == 2 * len(batch[0]["codes"])


def test_an_empty_work_moves_too(batch):
    engine = make(Strategy(data=8), compute_dtype=jnp.bfloat16, preconditioned=False)
    other = Strategy(fsdp=8).on(jax.devices())
    state = engine.init(jax.random.key(0))
    masters = engines.host(state.params)
    work = engine.accumulate(engine.begin(state), *placed(engine.on(other), batch[0]), other)
    assert work.layout == other
    assert work.params["up"]["kernel"].dtype == jnp.bfloat16, "the copy moves, not its master"
    assert work.params["up"]["kernel"].sharding.spec != state.params["up"]["kernel"].sharding.spec
    engines.assert_same_bits(masters, state.params)


@pytest.mark.parametrize("donated_by", ["apply", "step", "move"])
def test_a_work_whose_state_is_gone_is_refused(batch, at_home, donated_by):
    engine = at_home(Strategy(data=8))
    other = Strategy(fsdp=8).on(jax.devices())
    state = engine.init(jax.random.key(0))
    rows, mask = placed(engine, batch[0])
    begun = engine.begin(state)
    if donated_by == "apply":
        engine.apply(state, engine.accumulate(begun, rows, mask))
    elif donated_by == "step":
        engine.step(state, None, rows, mask)
    else:
        engine.move(state, other)
    with pytest.raises(ValueError, match="consumed already"):
        engine.accumulate(begun, rows, mask)
    with pytest.raises(ValueError, match="state was donated already"):
        engine.begin(state)
    with pytest.raises(ValueError, match="state was donated already"):
        engine.step(state, None, rows, mask)


def test_padding_alone_changes_no_model_state():
    def loss_and_state(params, model_state, batch, key):
        return batch["x"] @ params["w"], {"mean": model_state["mean"] + 1.0}

    engine = engines.make(
        None,
        init=lambda key: jg.Variables(
            params={"w": jnp.ones(2048)}, model_state={"mean": jnp.full((), 5.0)}
        ),
        loss_and_state=loss_and_state,
        strategy=Strategy(data=8),
        sample={"x": jax.ShapeDtypeStruct((2048,), jnp.float32)},
    )
    other = Strategy(fsdp=8).on(jax.devices())
    state = engine.init(jax.random.key(0))
    nothing = ({"x": np.ones((8, 2048), np.float32)}, np.zeros(8, np.float32))
    work = engine.begin(state)
    for layout in (engine.layout, other):
        rows, mask = jax.device_put(nothing, layout.batch_sharding)
        work = engine.accumulate(work, rows, mask, layout)
    sums = engine.reduce(work)
    assert isinstance(sums, Sums) and float(sums.model_state["mean"]) == 5.0


def test_rows_that_do_not_divide_are_refused(batch, at_home):
    engine = at_home(Strategy(fsdp=4, tensor=2))
    state = engine.init(jax.random.key(0))
    rows = {"codes": jnp.zeros((10, 9), jnp.int32)}
    with pytest.raises(ValueError, match="multiple of the 4 replicas of fsdp4.tensor2.*12 rows"):
        engine.accumulate(engine.begin(state), rows, jnp.ones(10))


def test_works_are_values(batch, at_home):
    engine = at_home(Strategy(data=8))
    work = engine.begin(engine.init(jax.random.key(0)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        work.sums = None  # pyright: ignore[reportAttributeAccessIssue]
