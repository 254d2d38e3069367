"""What a run makes of an optimizer: frozen leaves have no noise, and what counts updates is named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import assert_close, run
from problems import Mean, config, rows

from jaxgoodput.engine.engine import Engines
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import adaptation
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.start.problem import problem_of
from jaxgoodput.train.trainer import Trainer

BASE, DIM = 4, 6
FROZEN = {"body": True, "head": False, "tail": True}
LABELS = {name: "still" if frozen else "moves" for name, frozen in FROZEN.items()}


class Layers(Trainer):
    """Three matrices, of which two are frozen: by the optimizer, or by `trainable`."""

    def __init__(self, config, tx, *, by_trainable):
        super().__init__(config)
        self.tx, self.by_trainable = tx, by_trainable

    def init(self, key):
        keys = jax.random.split(key, 3)
        names = zip(FROZEN, keys, strict=True)
        return {name: 0.5 * jax.random.normal(k, (DIM, DIM)) for name, k in names}

    def trainable(self, params):
        if not self.by_trainable:
            return jax.tree.map(lambda x: True, params)
        return {name: not frozen for name, frozen in FROZEN.items()}

    def loss(self, params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["body"]) @ params["head"] @ params["tail"]
        return jnp.sum((hidden - batch["y"]) ** 2, axis=-1)

    def optimizer(self):
        return self.tx

    def dataset(self):
        rng = np.random.default_rng(0)
        return {name: rng.standard_normal((256, DIM)).astype(np.float32) for name in "xy"}


WAYS = {
    "set_to_zero": lambda tx: optax.multi_transform(
        {"moves": tx, "still": optax.set_to_zero()}, LABELS
    ),
    "freeze": lambda tx: optax.chain(tx, optax.freeze(FROZEN)),
    "rate of 0": lambda tx: optax.multi_transform({"moves": tx, "still": optax.sgd(0.0)}, LABELS),
}
OPTIMIZERS = {"sgd": lambda: optax.sgd(1e-2), "adam": lambda: optax.adam(1e-3)}


def trained(tmp_path, tx, *, by_trainable, strategy, accumulate, **settings):
    """The state after some steps of eight times the base batch, and what the last one reports."""
    limits = BatchLimits(base=BASE, max=64 * BASE, micro=(1, 64 * BASE))
    own = config(tmp_path, batch=limits, policy="goodput", **settings)
    task = Layers(own, tx, by_trainable=by_trainable)
    problem, data = problem_of(task, own), task.dataset()
    sample = {name: jax.ShapeDtypeStruct((DIM,), jnp.float32) for name in data}
    engine = Engines(problem, sample).on(strategy.on(jax.devices()[: strategy.num_devices]))
    state, metrics = engine.init(jax.random.key(0)), None
    for turn in range(14):
        batch = {name: np.roll(x, 37 * turn, axis=0)[: 8 * BASE] for name, x in data.items()}
        parts = [{n: x[i::accumulate] for n, x in batch.items()} for i in range(accumulate)]
        state, metrics = run(engine, state, parts)
    return jax.device_get(state), metrics


CASES = [
    ("set_to_zero", "sgd", Strategy(data=2), 1),
    ("set_to_zero", "adam", Strategy(), 2),
    pytest.param("freeze", "adam", Strategy(data=2), 2, marks=pytest.mark.slow),
    pytest.param("rate of 0", "sgd", Strategy(fsdp=2), 2, marks=pytest.mark.slow),
    pytest.param("freeze", "sgd", Strategy(), 1, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "optimizer", "strategy", "accumulate"), CASES)
def test_noise_gain_and_progress_are_those_of_the_leaves_that_move(
    tmp_path, way, optimizer, strategy, accumulate
):
    given = {"strategy": strategy, "accumulate": accumulate}
    by_optimizer = WAYS[way](OPTIMIZERS[optimizer]())
    state, told = trained(tmp_path, by_optimizer, by_trainable=False, **given)
    other, expected = trained(tmp_path, OPTIMIZERS[optimizer](), by_trainable=True, **given)
    assert float(told.noise.num_samples) >= 8
    told, expected = jax.tree.map(np.asarray, (told, expected))
    assert_close(told.noise, expected.noise, rtol=1e-4)
    assert_close([told.gain, told.progress], [expected.gain, expected.progress], rtol=1e-4)
    assert 1 < told.gain < 8 ** (0.5 if optimizer == "adam" else 1)
    assert_close(state.params, other.params)
    assert adaptation.grad_groups(state.opt_state).sqr.shape == (1,)


SCHEDULE = optax.cosine_decay_schedule(0.1, 12)


def every_second(step: Any, **_: Any) -> Any:
    return step % 2 == 0


COUNTING = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(SCHEDULE), 3),
    "apply_every": lambda: optax.chain(optax.sgd(SCHEDULE), optax.apply_every(2)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.sgd(SCHEDULE), every_second),
    "sam": lambda: optax.contrib.sam(optax.sgd(SCHEDULE), optax.sgd(0.05)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_what_counts_updates_is_refused_if_the_batch_may_change(tmp_path, name):
    settings = config(tmp_path, policy="goodput")
    with pytest.raises(ValueError, match=rf"optax\.(contrib\.)?{name}.*BatchLimits.micro.*fixed"):
        problem_of(Mean(settings, tx=COUNTING[name]()), settings)


def test_every_first_update_is_no_number_of_updates(tmp_path):
    settings = config(tmp_path, policy="goodput")
    for tx in (optax.MultiSteps(optax.adam(SCHEDULE), 1), optax.apply_every(1)):
        problem_of(Mean(settings, tx=tx), settings)


@pytest.mark.parametrize(("policy", "is_told"), [("goodput", True), ("fixed", False)])
def test_a_schedule_that_only_updates_can_advance_is_told_of(tmp_path, caplog, policy, is_told):
    settings = config(tmp_path, policy=policy)
    with caplog.at_level("WARNING"):
        problem_of(Mean(settings, tx=optax.contrib.prodigy(SCHEDULE)), settings)
    assert ("optax.contrib.prodigy. A schedule that is given to it" in caplog.text) == is_told


@pytest.mark.parametrize(
    "name",
    [
        "MultiSteps",
        *(pytest.param(n, marks=pytest.mark.slow) for n in COUNTING if n != "MultiSteps"),
    ],
)
def test_what_counts_updates_runs_as_in_a_plain_loop_if_the_batch_is_fixed(tmp_path, name):
    state = Mean(config(tmp_path, base_steps=12.0), tx=COUNTING[name](), data=rows(16)).fit()
    tx: Any = COUNTING[name]()
    params: Any = {"w": jnp.zeros(4)}
    own, mean = tx.init(params), rows(16)["x"].mean(axis=0)
    for _ in range(12):  # every batch is the whole data set
        updates, own = tx.update({"w": params["w"] - mean}, own, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)


def test_a_schedule_that_a_users_wrapper_holds_back_is_refused(tmp_path):
    inner = optax.sgd(SCHEDULE)

    def update(updates, state, params=None):
        turn, own = state
        moved, after = inner.update(updates, own, params)
        return moved, (turn + 1, jax.tree.map(lambda a, b: jnp.where(turn % 2, a, b), after, own))

    def init(params):
        return jnp.zeros((), jnp.int32), inner.init(params)

    tx = optax.GradientTransformation(init, update)
    settings = config(tmp_path, policy="goodput")
    with pytest.raises(ValueError, match=r"a schedule, at \[1\].*count.*inside a wrapper"):
        problem_of(Mean(settings, tx=tx), settings)
    problem_of(Mean(config(tmp_path), tx=tx), config(tmp_path))


def test_an_optimizer_that_needs_more_is_refused_before_the_first_step(tmp_path):
    settings = config(tmp_path)
    tx = optax.lookahead(optax.sgd(0.1), 5, 0.5)
    with pytest.raises(ValueError, match="optimizer\\(\\) has a link.*lookahead.*Config.ema"):
        problem_of(Mean(settings, tx=tx), settings)


class Halves(Mean):
    """A mean whose parameters are in half precision."""

    def init(self, key):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), super().init(key))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "lion", "adagrad"])
def test_the_state_of_an_optimizer_keeps_its_types_beside_float32_gradients(tmp_path, name):
    tx = getattr(optax, name)(0.01)
    state = Halves(config(tmp_path, base_steps=3), tx=tx).fit()

    def types(tree):
        return jax.tree.map(lambda x: x.dtype, tree)

    assert types(state.opt_state.inner) == types(tx.init(state.params))
