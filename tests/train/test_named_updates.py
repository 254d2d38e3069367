"""Named updates: a run is the loop by hand with an optimizer for each loss, at once or in turns."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from engines import put, read
from jax.sharding import Mesh
from problems import InStep, Recorder, config, same

from jaxgoodput.clock import FakeClock
from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.state import Loss
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import StepEnd
from jaxgoodput.optim.named import InTurns
from jaxgoodput.parallel.place import DEVICE_AXIS, GROUP_AXIS
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.ask.rates import find_learning_rate
from jaxgoodput.train.control import Preempted
from jaxgoodput.train.start.problem import TaskInputs
from jaxgoodput.train.trainer import Trainer

NAMES, WIDTH, NUM_SAMPLES, STEPS = ("critic", "maker"), 3, 96, 50
LIMITS = BatchLimits(base=16, max=16, micro=(1, 16))
ONE = {"devices": jax.devices()[:1]}
SPLIT = ("micro-batches", "both")  # into micro-batches of 2 samples


def data():
    rng = np.random.default_rng(0)
    return {
        "real": (1 + rng.normal(size=(NUM_SAMPLES, WIDTH))).astype(np.float32),
        "from": rng.normal(size=(NUM_SAMPLES, WIDTH)).astype(np.float32),
        "tokens": rng.integers(1, 5, NUM_SAMPLES).astype(np.float32),
    }


def losses_of(params, batch):
    """Per sample. Each reads the parameters of both."""
    made = batch["from"] @ params["maker"]["w"] + params["maker"]["b"][None]
    real, fake = (jnp.tanh(x @ params["critic"]["w"]) for x in (batch["real"], made))
    size = jnp.sum(params["critic"]["w"] ** 2)
    return {
        "critic": jax.nn.softplus(-real) + jax.nn.softplus(fake) + 0.1 * size,
        "maker": jax.nn.softplus(-3 * fake),
    }


def optimizers() -> dict[str, Any]:
    """A schedule counts the updates of its own optimizer."""
    fast = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.03, b1=0.5))
    return {"critic": fast, "maker": optax.sgd(optax.cosine_decay_schedule(0.5, 40), momentum=0.9)}


class Pair(Trainer):
    """Two parts that learn against each other."""

    def __init__(self, config, *, given: Any = None, **options):
        super().__init__(config, **options)
        self.given = optimizers() if given is None else given

    def init(self, key) -> Any:
        w = jnp.arange(WIDTH, dtype=jnp.float32) / WIDTH - 0.4
        made = {"w": jnp.eye(WIDTH), "b": jnp.zeros(WIDTH)}
        return {"maker": made, "critic": {"w": w}}

    def loss(self, params, batch, key) -> Any:
        return losses_of(params, batch)

    def optimizer(self) -> Any:
        return self.given

    def dataset(self):
        return data()


class Tokens(Pair):
    """The loss of one part is a mean over tokens."""

    def loss(self, params, batch, key):
        losses = super().loss(params, batch, key)
        weighted = Loss.of(losses["maker"] * batch["tokens"], batch["tokens"], made=losses["maker"])
        return {**losses, "maker": weighted}


def by_hand(num_steps, cycle, *, tokens=False):
    """The losses of each step and the last parameters of a plain loop, with an optimizer for each part."""
    params, txs = Pair.init(None, None), optimizers()  # pyright: ignore[reportArgumentType]
    states = {name: txs[name].init(params[name]) for name in NAMES}

    def mean(part, name, params, batch):
        losses = losses_of({**params, name: part}, batch)
        share = {"maker": batch["tokens"]} if tokens else {}
        means = {n: jnp.average(x, weights=share.get(n)) for n, x in losses.items()}
        return means[name], means

    gradient = jax.jit(jax.grad(mean, has_aux=True), static_argnums=1)
    cursor, seen = Cursor(seed=0), []
    for step in range(num_steps):
        indices, cursor = take(cursor, NUM_SAMPLES, 16)
        batch = {n: x[indices] for n, x in data().items()}
        moving = [cycle[step % len(cycle)]] if cycle else NAMES
        found = {name: gradient(params[name], name, params, batch) for name in moving}
        seen.append({n: float(x) for n, x in found[moving[0]][1].items()})
        for name, (grads, _) in found.items():
            updates, states[name] = txs[name].update(grads, states[name], params[name])
            params = {**params, name: optax.apply_updates(params[name], updates)}
    return seen, params


WAYS = {
    "at once": (lambda: optimizers(), ()),
    "in turns": (lambda: InTurns(optimizers()), NAMES),
    "two to one": (lambda: InTurns(optimizers(), {"critic": 2}), ("critic", "critic", "maker")),
}


def trained(workdir, made, *, kind=Pair, devices=ONE, **settings):
    """A run of a fixed batch, and the losses of its steps by name."""
    seen = Recorder()
    settings = {"base_steps": float(STEPS), "batch": LIMITS, "saving__at_end": False, **settings}
    state = kind(config(workdir, **settings), given=made(), hooks=[seen], **devices).fit()
    steps = [e.metrics for e in seen.of(StepEnd)]
    return state, [{n: step[f"aux/{n}/loss"] for n in NAMES} for step in steps]


def close(a, b, rtol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["two to one", *(pytest.param(x, marks=pytest.mark.nightly) for x in list(WAYS)[:2])]
)
def test_a_fixed_batch_is_the_loop_by_hand(tmp_path, way):
    made, cycle = WAYS[way]
    state, losses = trained(tmp_path, made)
    expected, params = by_hand(STEPS, cycle)
    close(losses, expected)
    close(dict(state.params), params)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["four devices", "micro-batches", "both", "cut"])
def test_however_a_batch_is_split_it_is_the_loop_by_hand(tmp_path, way, how):
    """Also for losses with different weights, which no split may change."""
    made, cycle = WAYS[way]
    count = 1 if how == "micro-batches" else 4
    split = {"batch": BatchLimits(base=16, max=16, micro=(1, 2))} if how in SPLIT else {}
    strategy = {"strategies": (Strategy(fsdp=4),)} if how == "cut" else {}
    state, losses = trained(
        tmp_path,
        made,
        kind=Tokens,
        devices={"devices": jax.devices()[:count]},
        tuning__accumulate=how in SPLIT,
        **split,
        **strategy,
    )
    expected, params = by_hand(STEPS, cycle, tokens=True)
    close(losses, expected)
    close(dict(state.params), params)


def stopped_at(step, settings, given):
    """Run until `step` is done, and be preempted."""
    hook = Recorder(lambda e: trainer.request_stop() if e.step == step else None)
    trainer = Pair(settings, given=given, hooks=[hook], loop=InStep, **ONE)
    with pytest.raises(Preempted):
        trainer.fit()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    made = WAYS["two to one"][0]
    settings = {"batch": LIMITS, "base_steps": 8.0, "statistics__every_steps": 2, "ema": 0.9}
    whole = Pair(config(tmp_path / "whole", **settings), given=made(), **ONE).fit()
    for step in (2, 5):
        stopped_at(step, config(tmp_path / "parts", **settings), made())
    parts = Pair(config(tmp_path / "parts", **settings), given=made(), **ONE).fit()
    assert same(parts, whole)


# -- a step ------------------------------------------------------------------------------------------


def engine_of(task):
    """The engine of a task on one device."""
    inputs = TaskInputs(task, task.config, FakeClock())
    return Engines(inputs.problem, inputs.sample).on(Strategy().on(jax.devices()[:1]))


def rows_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "real": (1 + rng.normal(size=(count, WIDTH))).astype(np.float32),
        "from": rng.normal(size=(count, WIDTH)).astype(np.float32),
        "tokens": np.ones(count, np.float32),
    }


def parts_of(state):
    """Everything that belongs to each part, on the host."""
    host = jax.device_get(state)
    return {name: (host.params[name], host.opt_state.inner[name]) for name in NAMES}


@pytest.mark.slow
def test_between_its_turns_a_part_stays_as_it_is_to_the_bit(tmp_path):
    task = Pair(config(tmp_path, batch=LIMITS), given=InTurns(optimizers(), {"critic": 2}))
    engine = engine_of(task)
    state, seen = engine.init(jax.random.key(0)), []
    for step in range(6):
        before = parts_of(state)
        state, _ = engine.step(state, None, *put(engine, rows_of(16, seed=step)), measure=True)
        after = parts_of(state)
        seen.append([name for name in NAMES if not same(before[name], after[name])])
    assert seen == [["critic"], ["critic"], ["maker"]] * 2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_part_without_weight_has_the_whole_update_refused_and_the_turn_goes_on(tmp_path):
    task = Tokens(config(tmp_path, batch=LIMITS), given=InTurns(optimizers()))
    engine = engine_of(task)
    state = engine.init(jax.random.key(0))
    before, none = parts_of(state), rows_of(16)
    none["tokens"][:] = 0
    state, packed = engine.step(state, None, *put(engine, none), measure=False)
    found, after = read(engine, packed), parts_of(state)
    assert not found.is_finite and found.weight == 0
    assert all(same(before[n][0], after[n][0]) for n in NAMES)
    assert all(same(before[n][1].inner, after[n][1].inner) for n in NAMES)
    # For schedules by samples, the batch was taken by the part whose turn it was.
    assert [after[n][1].own.tree.base_batches for n in NAMES] == [1, 0]
    before = after
    state, packed = engine.step(state, None, *put(engine, rows_of(16)), measure=False)
    after = parts_of(state)
    assert read(engine, packed).is_finite
    assert [name for name in NAMES if not same(before[name], after[name])] == ["maker"]


def test_a_gradient_that_explodes_is_reported_in_its_own_turn_alone(tmp_path):
    """A part that keeps its state keeps what it knows of its last gradient, too."""
    tx = engine_of(Pair(config(tmp_path, batch=LIMITS), given=InTurns(optimizers()))).problem.tx
    params = Pair.init(None, None)  # pyright: ignore[reportArgumentType]
    state: Any = tx.init(params)
    own = state.inner["maker"].own
    growth = dataclasses.replace(own.tree.growth, explodes=jnp.asarray(True))
    own = own.replaced(own.tree, dataclasses.replace(own.tree, growth=growth))
    inner = {**state.inner, "maker": state.inner["maker"]._replace(own=own)}
    grads = jax.tree.map(jnp.ones_like, params)

    def reported(turn):
        turn = None if turn is None else jnp.asarray(turn)
        decided = tx.decide(grads, state, global_batch_size=16, turn=turn)
        found = tx.watched(decided, inner, jnp.ones(()), jnp.ones(()))
        return bool(found.tree.growth.explodes)

    assert [reported(NAMES.index(name)) for name in NAMES] == [False, True]
    assert reported(None)


class Large(Pair):
    """The largest leaf of one part is small, and the smallest one of the other large."""

    def init(self, key):
        return {"maker": {"w": jnp.zeros((160, 160))}, "critic": {"w": jnp.zeros(WIDTH)}}

    def loss(self, params, batch, key):
        losses = [
            batch["real"] @ params["critic"]["w"],
            batch["tokens"] * params["maker"]["w"].sum(),
        ]
        return {name: loss + 1 for name, loss in zip(NAMES, losses, strict=True)}


@pytest.mark.slow
def test_each_optimizer_is_looked_at_before_an_update_is_applied(tmp_path):
    """A schedule that turns NaN spoils all leaves of its own part, and no others."""
    lost = {"critic": optax.sgd(0.1), "maker": optax.sgd(lambda count: count * jnp.nan)}
    engine = engine_of(Large(config(tmp_path, batch=LIMITS), given=lost))
    state = engine.init(jax.random.key(0))
    state, packed = engine.step(state, None, *put(engine, rows_of(16)), measure=False)
    assert not read(engine, packed).is_finite and np.isfinite(state.params["maker"]["w"]).all()


class ZeroSum(Pair):
    """Losses whose sum is 0 wherever a sample meets the others."""

    coupled = True

    def loss(self, params, batch, key):
        made = batch["from"] @ params["maker"]["w"]
        made = (
            made / (1 + jnp.square(made).mean(axis=0, keepdims=True))
            if self.coupled
            else jnp.tanh(made)
        )
        fake = made @ params["critic"]["w"]
        return {"critic": fake - batch["real"] @ params["critic"]["w"], "maker": -fake}


@pytest.mark.slow
def test_samples_that_see_each_other_are_found_in_each_loss(tmp_path):
    rows = rows_of(4)
    for coupled in (True, False):
        task = ZeroSum(config(tmp_path, batch=LIMITS))
        task.coupled = coupled
        engine = engine_of(task)
        state = engine.init(jax.random.key(0))
        assert engine.loss_checks.couples_samples(state, rows) == coupled


def test_no_earlier_noise_is_believed_where_each_part_has_its_own(tmp_path):
    assert engine_of(Pair(config(tmp_path, batch=LIMITS))).problem.has_own_rates
    assert not engine_of(Weighted(config(tmp_path, batch=LIMITS))).problem.has_own_rates


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("count", [1, 2])
def test_an_elastic_job_makes_the_same_updates(tmp_path, count):
    """Its micro-batches are added and reduced before they are applied."""
    given = InTurns(optimizers(), {"critic": 2})
    task = Tokens(config(tmp_path, batch=LIMITS), given=given)
    inputs = TaskInputs(task, task.config, FakeClock())
    layout = Strategy(data=count).on(jax.devices()[:count])
    world = Mesh(np.array(jax.devices()[:count]).reshape(1, -1), (GROUP_AXIS, DEVICE_AXIS))
    elastic = Engines(inputs.problem, inputs.sample, world=world, control_size=1).on(layout)
    usual, found = Engines(inputs.problem, inputs.sample).on(layout), []
    for engine in (elastic, usual):
        state, packed = engine.init(jax.random.key(0)), None
        for seed in range(4):
            work = engine.begin(state)
            for half in range(2):
                rows = put(engine, rows_of(8, seed=10 * seed + half))
                work = engine.accumulate(work, *rows)
            more = [np.zeros(1, np.float32)] if engine is elastic else []
            state, packed = engine.apply(state, work, *more)
        found.append((jax.device_get(state.params), read(engine, packed)))
    (params, metrics), (expected, others) = found
    close(params, expected)
    close(metrics.aux, others.aux)
    assert metrics.num_groups == 2 * count


DIM, SPREADS = 512, {"critic": 0.5, "maker": 4.0}


class Planted(Pair):
    """The gradient of a part is its column of the samples, whose moments are known."""

    def init(self, key):
        return {name: jnp.zeros(DIM) for name in self.names}

    @property
    def names(self) -> list[str]:
        return list(getattr(self.given, "optimizers", self.given))

    def loss(self, params, batch, key):
        found = {name: batch[name] @ params[name] for name in self.names}
        return found if len(found) > 1 else found[self.names[0]]

    def optimizer(self):
        return self.given if len(self.names) > 1 else self.given[self.names[0]]

    def dataset(self):
        return self.rows(16, 0)

    @staticmethod
    def rows(count, seed, **spreads):
        rng = np.random.default_rng(seed)
        spreads = SPREADS | spreads
        return {
            name: (1 + spreads[name] * rng.standard_normal((count, DIM))).astype(np.float32)
            for name in NAMES
        }


def measured(task, batches):
    """The state after steps that measure the noise of these batches."""
    engine = engine_of(task)
    state, packed = engine.init(jax.random.key(0)), None
    for batch in batches:
        state, packed = engine.step(state, None, *put(engine, batch), measure=True)
    return jax.device_get(state), read(engine, packed)


@pytest.mark.slow
@pytest.mark.nightly
def test_in_turns_the_noise_of_a_part_is_that_of_a_run_in_which_it_trains_alone(tmp_path):
    still = {name: optax.sgd(1e-9) for name in NAMES}
    turns = InTurns(still, {"critic": 2})
    batches = [Planted.rows(64, seed) for seed in range(60)]
    settings = config(tmp_path, batch=BatchLimits(base=64, max=64, micro=(1, 64)))
    together, metrics = measured(Planted(settings, given=turns), batches)
    for name in NAMES:
        own = list(itertools.compress(batches, [n == name for n in turns.cycle] * 20))
        alone, _ = measured(Planted(settings, given={name: still[name]}), own)
        part = together.opt_state.inner[name].own.tree
        close(part.groups, alone.opt_state.own.tree.groups)
        close(part.noise, alone.opt_state.own.tree.noise)
        assert part.progress == len(own)
        scale = metrics.aux[f"{name}/noise_scale"]
        np.testing.assert_allclose(scale, SPREADS[name] ** 2, rtol=0.2)
    # Together, each counts by its share of the updates.
    share = np.asarray(metrics.noise.group_sqr)
    np.testing.assert_allclose(share / share.sum(), [2 / 3, 1 / 3], rtol=0.02)
    np.testing.assert_allclose(
        metrics.noise.group_var / metrics.noise.group_sqr,
        [SPREADS[name] ** 2 / 64 for name in NAMES],
        rtol=0.2,
    )


# -- a batch that changes ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("way", ["at once", "in turns"])
def test_a_batch_that_changes_is_worth_the_mean_over_the_parts(tmp_path, way):
    """A part has hardly any noise, the other hardly any signal: for 8 base batches, 1 and 8 base steps."""
    still = {name: optax.sgd(1e-9) for name in NAMES}
    given = still if way == "at once" else InTurns(still)
    settings = config(tmp_path, policy="goodput", batch=BatchLimits(base=8, max=64, micro=(1, 64)))
    task = Planted(settings, given=given)
    engine = engine_of(task)
    state, packed, seen = engine.init(jax.random.key(0)), None, []
    for seed in range(160):
        rows = Planted.rows(64, seed, critic=0.01, maker=100.0)
        state, packed = engine.step(state, None, *put(engine, rows), measure=True)
        if seed in (139, 159):  # both gains have grown as far as they may
            owns = (state.opt_state, *(state.opt_state.inner[name] for name in NAMES))
            seen.append([float(x.own.tree.progress) for x in owns])
    metrics = read(engine, packed)
    worth, *own = np.subtract(seen[1], seen[0]) / 20
    np.testing.assert_allclose(worth, (1 + 8) / 2, rtol=0.1)
    # Schedules of both parts advance alike.
    share = 1.0 if way == "at once" else 0.5
    np.testing.assert_allclose(own, [share * worth] * 2, rtol=1e-3)
    np.testing.assert_allclose(metrics.aux["critic/gain"], 1, rtol=0.05)
    np.testing.assert_allclose(metrics.aux["maker/gain"], 8, rtol=0.1)


@pytest.mark.slow
@pytest.mark.nightly
def test_goodput_changes_the_batch_if_both_parts_have_noise(tmp_path):
    class Noisy(Planted):
        def loss(self, params, batch, key):
            return {
                name: 0.5 * jnp.sum((params[name][None] - batch[name]) ** 2, -1) for name in NAMES
            }

        def dataset(self):
            return self.rows(4096, 0, critic=50.0, maker=100.0)

    def until(event):
        if event.config.global_batch_size >= 64 or event.step >= 20_000:
            trainer.finish()

    given = InTurns({name: optax.sgd(1e-4) for name in NAMES})
    seen = Recorder(until)
    settings = config(
        tmp_path,
        policy="goodput",
        batch=BatchLimits(base=8, max=256, micro=(1, 256)),
        base_steps=1e6,
        statistics__every_steps=4,  # of steps so far apart all would fall on one part's turn
        execution__background_compile=True,
    )
    trainer = Noisy(settings, given=given, hooks=[seen], **ONE)
    trainer.fit()
    sizes = {e.config.global_batch_size for e in seen.of(StepEnd)}
    assert max(sizes) >= 64
    assert all(seen.of(StepEnd)[-1].metrics[f"aux/{name}/noise_scale"] > 0 for name in NAMES)


# -- what is refused ---------------------------------------------------------------------------------


class Grows(Pair):
    def loss(self, params, batch, key):
        losses = losses_of(params, batch)
        return {"critic": losses["critic"].sum(), "maker": losses["maker"].mean()}


def refused(workdir, kind=Pair, given=None, **settings):
    """The sentence with which a run is refused before its first step."""
    seen = Recorder()
    with pytest.raises((TypeError, ValueError)) as error:
        kind(config(workdir, batch=LIMITS, **settings), given=given, hooks=[seen], **ONE).fit()
    assert not seen.of(StepEnd)
    return str(error.value)


class OneLoss(Pair):
    def loss(self, params, batch, key) -> Any:
        return sum(losses_of(params, batch).values())


class OtherNames(Pair):
    def loss(self, params, batch, key):
        return {"critic": losses_of(params, batch)["critic"], "generator": 0.0}


class Deaf(Pair):
    def loss(self, params, batch, key):
        losses = losses_of(params, batch)
        return {**losses, "maker": batch["from"] @ params["critic"]["w"]}


class Third(Pair):
    def init(self, key):
        return {**super().init(key), "judge": jnp.zeros(2)}


class Frozen(Pair):
    def trainable(self, params):
        return {n: jax.tree.map(lambda _, n=n: n != "maker", x) for n, x in params.items()}


class Listed(Pair):
    def init(self, key):
        return list(super().init(key).values())


class Labelled(Pair):
    def labels(self, params):
        return jax.tree.map(lambda _: "all", params)


class Summed(Pair):
    def loss(self, params, batch, key):
        return {n: x[:, None] * jnp.ones((1, 2)) for n, x in losses_of(params, batch).items()}


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (OneLoss, None, "loss() returned a"),
        (OtherNames, None, "loss() returned losses named 'critic', 'generator'"),
        (Deaf, None, "the loss 'maker' does not depend on params['maker']"),
        (Third, None, "no optimizer moves 'judge'"),
        (Frozen, None, "there is nothing to train in 'maker'"),
        (Listed, None, "init() made a list"),
        (Labelled, None, "labels() does not work"),
        (Summed, None, "loss 'critic': loss returned shape (2, 2)"),
        (Grows, None, "grows with the batch"),
        (Pair, {"critic": optax.sgd(1), "other": optax.sgd(1)}, "optimizer() has 'other'"),
        (Pair, {"critic": optax.sgd(1)}, "at least two optimizers"),
        (Pair, {"critic": optax.sgd(1), "maker": 3}, "optimizer()['maker'] must be an optax"),
        (Pair, optax.sgd(1.0), "return jg.Loss.weighted(losses, weights)"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_first_step(tmp_path, kind, given, says):
    assert says in refused(tmp_path, kind, given)


def test_normalisation_layers_tell_no_parts_apart(tmp_path):
    assert "from_norm_layers" in refused(tmp_path, statistics__from_norm_layers=True)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_frozen_part_needs_no_optimizer(tmp_path):
    class Still(Third):
        def trainable(self, params):
            return {n: jax.tree.map(lambda _, n=n: n != "judge", x) for n, x in params.items()}

    engine = engine_of(Still(config(tmp_path, batch=LIMITS)))
    state = engine.init(jax.random.key(0))
    state, _ = engine.step(state, None, *put(engine, rows_of(16)), measure=False)
    np.testing.assert_array_equal(state.params["judge"], np.zeros(2))


@pytest.mark.parametrize(
    ("optimizers", "counts", "says"),
    [
        ({"a": optax.sgd(1)}, {}, "at least two"),
        ({"a": optax.sgd(1), "b": optax.sgd(1)}, {"c": 2}, "counts updates of 'c'"),
        ({"a": optax.sgd(1), "b": optax.sgd(1)}, {"a": 0}, "at least 1"),
    ],
)
def test_turns_that_make_no_cycle_are_refused(optimizers, counts, says):
    with pytest.raises(ValueError, match=says):
        InTurns(optimizers, counts)


# -- several losses for one optimizer ----------------------------------------------------------------


class Weighted(OneLoss):
    def loss(self, params, batch, key):
        return Loss.weighted(losses_of(params, batch), {"maker": 0.25})

    def optimizer(self):
        return optax.sgd(0.1)


@pytest.mark.slow
def test_weighted_losses_are_one_loss_and_reported_by_name(tmp_path):
    engine = engine_of(Weighted(config(tmp_path, batch=LIMITS)))
    state, rows = engine.init(jax.random.key(0)), rows_of(16)
    params = jax.device_get(state.params)

    def total(params):
        losses = losses_of(params, rows)
        return jnp.mean(losses["critic"] + 0.25 * losses["maker"])

    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(total)(params))
    state, packed = engine.step(state, None, *put(engine, rows), measure=False)
    close(jax.device_get(state.params), expected)
    found, losses = read(engine, packed), losses_of(params, rows)
    assert found.loss == pytest.approx(float(total(params)), rel=1e-5)
    assert found.aux == pytest.approx({n: float(x.mean()) for n, x in losses.items()}, rel=1e-5)


def test_weights_that_cannot_be_meant_are_refused():
    losses = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match="a weight for 'c'"):
        Loss.weighted(losses, {"c": 1.0})
    with pytest.raises(ValueError, match="got no losses"):
        Loss.weighted({})
    with pytest.raises(TypeError, match="'b' is of shape"):
        Loss.weighted({**losses, "b": jnp.ones(())})
    with pytest.raises(TypeError, match="'b' is Loss"):
        Loss.weighted({**losses, "b": Loss.of(jnp.ones(2))})


def test_a_weighted_loss_may_have_any_name():
    found = Loss.weighted({"weight": jnp.full(2, 3.0), "sum": jnp.ones(2)}, {"sum": 2.0})
    np.testing.assert_array_equal(found.sum, [5.0, 5.0])
    np.testing.assert_array_equal(found.weight, [1.0, 1.0])
    assert set(found.aux) == {"weight", "sum"}


def test_no_single_rate_is_looked_for_where_each_part_has_its_own(tmp_path):
    with pytest.raises(ValueError, match="several by name"):
        find_learning_rate(Pair(config(tmp_path, batch=LIMITS), **ONE))
