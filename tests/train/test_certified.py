"""A checkpoint is called good only if every value that began finite still is, wherever it lies."""

import dataclasses
import json
import pathlib
import sys
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Evaluated, InStep, Mean, Recorder, config, rows, same
from table_runs import Two
from table_runs import settings as table_settings

import jaxgoodput as jg
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import abstract_sample
from jaxgoodput.engine.engine import Engines
from jaxgoodput.engine.state import Variables
from jaxgoodput.observe.events import Checkpoint, StepEnd
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.checkpoints.saved import SavedCheckpoint
from jaxgoodput.train.checkpoints.writer import Checkpoints
from jaxgoodput.train.control import Diverged
from jaxgoodput.train.start import value_checks
from jaxgoodput.train.start.lost_values import Origin, any_not_finite, floats
from jaxgoodput.train.start.problem import problem_of
from jaxgoodput.train.start.value_checks import ValueChecks, origin_of
from jaxgoodput.workdir.places import FolderView

BAD = (np.nan, np.inf, -np.inf)
LARGE = (4, 5000)  # 20,000 elements: more than a step checks


class Various(Mean):
    """Leaves of many kinds; only `w` learns. The mask and the running minimum begin at infinity."""

    def init(self, key) -> Any:
        params = {
            "w": jnp.zeros(self.width),
            "large": jnp.ones(LARGE),
            "half": jnp.ones((3, 5), jnp.bfloat16),
            "mask": jnp.where(jnp.tri(4, dtype=bool), 0.0, -jnp.inf),
            "none": None,
            "whole": jnp.arange(3),
        }
        state = {
            "least": jnp.full(6, jnp.inf),
            "mean": jnp.zeros((2, 3)),
            "complex": 1j * jnp.ones(2),
        }
        return Variables(params=params, model_state=state)

    def trainable(self, params):
        return {
            **dict.fromkeys(params, True),
            "half": False,
            "mask": False,
            "none": None,
            "whole": False,
        }

    def loss_and_state(self, params, model_state, batch, key):
        least = jnp.minimum(model_state["least"].at[0].min(batch["x"].min()), jnp.inf)
        return self.loss({"w": params["w"]}, batch, key), {**model_state, "least": least}


def various(workdir, **changes):
    return config(workdir, **{"epochs": 2, "ema": 0.9, "saving__keep": 20, **changes})


def spoilt(state, path, index, value):
    """The state with another value at one place of a leaf, where it lay."""

    def one(at, x):
        if jax.tree_util.keystr(at) != path:
            return x
        return jax.device_put(x.at[index].set(value), x.sharding)

    return jax.tree_util.tree_map_with_path(one, state)


class Spoiling(InStep):
    """Loses one value between two steps, however that may have come about."""

    at, path, index, value = 5, "", (), np.nan

    def _dispatch(self, batch):
        super()._dispatch(batch)
        if self.now.step == self.at:
            with jax.transfer_guard("allow"):
                self.now.state = spoilt(self.now.state, self.path, self.index, self.value)


def spoiling(path, index, value, at=5):
    return type("Spoils", (Spoiling,), {"path": path, "index": index, "value": value, "at": at})


class SavesAt(Recorder):
    """A hook that asks its trainer for a checkpoint after these steps."""

    def __init__(self, *steps):
        super().__init__(self.ask)
        self.steps = steps
        self.trainer: Any = None

    def ask(self, event):
        if event.step in self.steps:
            self.trainer.request_save()


def folders(workdir, name="checkpoints"):
    root = pathlib.Path(workdir) / name
    return sorted(int(x.name) for x in root.iterdir() if x.name.isdigit()) if root.is_dir() else []


def held(workdir):
    """Every value of every checkpoint that is called good."""
    for step in folders(workdir):
        saved = SavedCheckpoint.find(FolderView(str(workdir)), step, best=False)
        wanted = {
            path: jax.ShapeDtypeStruct(kind.shape, jnp.dtype(kind.dtype))
            for path, kind in saved.meta.leaves.items()
            if not kind.is_key
        }
        yield from saved.read(wanted).items()


# -- which values are lost ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A state of four devices, cut over them, and the checks of its values."""
    trainer = Various(various(tmp_path_factory.mktemp("checked")), devices=jax.devices()[:4])
    sample = abstract_sample(as_source(trainer.dataset()))
    engines = Engines(problem_of(trainer, trainer.config), sample)
    engine = engines.on(Strategy(data=1, fsdp=4).on(jax.devices()[:4]))
    state = engine.init(jax.random.key(0))
    return engine, state, ValueChecks(origin_of(engine, state, None))


def test_what_begins_infinite_is_known_and_not_lost(checked):
    engine, state, values = checked
    assert set(values.origin.codes) == {".params['mask']", ".model_state['least']"}
    assert values.lost(engine, state) == {}
    shapes = {path: x.shape for path, x in floats(state).items()}
    again = Origin.unpacked(json.loads(json.dumps(values.origin.packed)), shapes)
    assert same(dict(again.codes), dict(values.origin.codes))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_one_lost_value_is_found_in_any_leaf_on_devices_and_on_the_host(checked, data):
    engine, state, values = checked
    leaves = floats(state)
    path = data.draw(st.sampled_from(sorted(leaves)))
    index = tuple(data.draw(st.integers(0, n - 1)) for n in leaves[path].shape)
    value = data.draw(st.sampled_from((*BAD, 0.0)))
    before = leaves[path][index]
    bad = spoilt(state, path, index, value)
    began_infinite = not np.isfinite(before)
    is_lost = np.isnan(value) or (np.isinf(value) and not began_infinite)
    expected = {path: 1} if is_lost else {}
    assert values.lost(engine, bad) == expected
    on_host = {name: np.asarray(x) for name, x in floats(bad).items()}
    assert values.origin.lost_on_host(on_host) == expected


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_value_of_a_large_leaf_is_seen_within_one_round(checked, data):
    engine, state, values = checked
    values.compile(engine)
    index = tuple(data.draw(st.integers(0, n - 1)) for n in LARGE)
    bad = spoilt(state, ".params['large']", index, data.draw(st.sampled_from(BAD)))
    found = False
    for turn in range(value_checks.NUM_PARTS):
        step = jax.device_put(np.int32(turn * value_checks.GLANCE_EVERY), state.step.sharding)
        (flag,) = values.glance(engine, dataclasses.replace(bad, step=step), {})
        found |= bool(flag)
    assert found


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_equal_leaves_are_checked_together_and_told_apart(data):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=80))
    leaves = {f"[{i:03}]": jnp.ones((size,)) for i, size in enumerate(sizes)}
    apart = data.draw(st.sets(st.sampled_from(sorted(leaves))))
    groups = value_checks.alike(leaves, apart)
    assert sorted(path for group in groups for path in group) == sorted(leaves)
    for group in groups:
        assert len({leaves[path].shape for path in group}) == 1
        assert len(group) == 1 or not apart & {*group}
    assert len(groups) <= len(apart) + 3 * -(-len(leaves) // value_checks.MOST_ALIKE)
    bad = data.draw(st.lists(st.sampled_from(range(len(groups[0]))), max_size=2))
    values = [np.full(leaves[path].shape, 3e38, np.float32) for path in groups[0]]
    for number in bad:  # one infinity must not make up for another
        values[number][0] = data.draw(st.sampled_from(BAD))
    assert bool(any_not_finite([*map(jnp.asarray, values)])) == bool(bad)


class Many(Mean):
    """Large leaves, as many as `num`."""

    num = 1

    def init(self, key):
        wide = jnp.ones(LARGE)
        return {**super().init(key), **{f"{i:03}": wide for i in range(self.num)}}

    def loss(self, params, batch, key):
        return super().loss({"w": params["w"]}, batch, key)


class Looking(InStep):
    """Counts what Python does on the step's path for a look between two saves, and after it."""

    seen: ClassVar[list[tuple[int, int, int]]] = []

    def _dispatch(self, batch):
        super()._dispatch(batch)
        certifier = self._saver.certifier
        looked, read = num_calls(certifier.look), 0
        while certifier.is_looking:
            jax.block_until_ready(certifier._glances)
            read = num_calls(certifier.stepped)
        self.seen.append((looked, read, num_calls(certifier.stepped)))


def num_calls(function):
    """Calls of Python functions that a call of `function` makes."""
    found = 0

    def count(frame, event, arg):
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.slow
def test_a_look_between_saves_does_no_more_in_python_for_more_leaves(tmp_path):
    counts = []
    for num in (2, 40):
        task = type("Task", (Many,), {"num": num})
        loop = type("Loop", (Looking,), {"seen": []})
        task(config(tmp_path / str(num), base_steps=4.0, epochs=None), loop=loop).fit()
        counts.append(loop.seen[-1])
    assert counts[0] == counts[1]
    looked, read, idle = counts[0]
    assert idle < min(looked, read)


# -- runs --------------------------------------------------------------------------------------------


def nan_once(at, index, value=np.nan):
    """An optimizer whose update of `large` has one bad element, once."""

    def update(updates: Any, state: Any, params=None) -> Any:
        large = updates["large"]
        bad = jnp.where(state == at, large.at[index].set(value), large)
        return {**updates, "large": bad}, state + 1

    spoil = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    return optax.chain(optax.sgd(0.05), spoil)


def goes_on(workdir, step, **options):
    """A run without the fault goes on from this step, to an end that is good."""
    seen = Recorder()
    state = Various(various(workdir, epochs=3), hooks=[seen], **options).fit()
    assert seen.of(StepEnd)[0].step == step + 1
    codes = {".params['mask']", ".model_state['least']"}
    assert all(np.isfinite(x).all() for path, x in floats(state).items() if path not in codes)


@pytest.mark.slow
def test_an_update_that_is_nan_in_one_large_matrix_is_never_saved_as_good(tmp_path):
    seen = SavesAt(3, 7)
    trainer = seen.trainer = Various(
        various(tmp_path, base_steps=80.0, epochs=None),
        tx=nan_once(4, (3, 1234)),
        hooks=[seen],
        loop=InStep,
    )
    with pytest.raises(Diverged) as ended:
        trainer.fit()
    said = str(ended.value)
    assert "as found at step 7: params['large'] (1 of 20000 values, the first is nan at" in said
    assert "[3, 1234])" in said and "Step 3 is certified" in said and "spoilt_checkpoints/7" in said
    assert ended.value.safe_step == 3
    assert folders(tmp_path) == [3] and folders(tmp_path, "spoilt_checkpoints") == [7]
    assert all(np.isfinite(x).all() for path, x in held(tmp_path) if "large" in path)
    assert [c.step for c in seen.of(Checkpoint)] == [3]
    # What was set aside is readable, and says that it is not good.
    aside = SavedCheckpoint.at(tmp_path / "spoilt_checkpoints/7")
    assert aside.meta.lost is not None and not aside.meta.is_certified
    with pytest.raises(FileNotFoundError, match=r"step 7; it has \[3\]"):
        jg.load(str(tmp_path), step=7)
    goes_on(tmp_path, 3, tx=nan_once(-1, (0, 0)))


class Embedded(Mean):
    """Most rows of its embedding are not read, so that their gradient is 0."""

    def init(self, key):
        return {**super().init(key), "table": jnp.ones((2000, 10))}

    def loss(self, params, batch, key):
        return super().loss({"w": params["w"]}, batch, key) + params["table"][:16].sum() * 1e-3


@pytest.mark.slow
def test_adam_without_eps_ends_with_the_truth(tmp_path):
    hook = SavesAt(1, 2, 3, 5)
    settings = config(tmp_path, epochs=5, max_skipped_in_a_row=2, saving__keep=20)
    tx = optax.adam(1e-2, eps=0.0)
    trainer = hook.trainer = Embedded(settings, tx=tx, hooks=[hook], loop=InStep)
    with pytest.raises(Diverged, match=r"params\['table'\].*nan.*No checkpoint is certified.*eps"):
        trainer.fit()
    assert folders(tmp_path) == []
    assert np.isfinite(Embedded(settings, tx=optax.adam(1e-2)).fit().params["table"]).all()


PLACES = {
    ".params['w']": (1,),
    ".params['large']": (2, 777),
    ".params['mask']": (3, 0),
    ".params['half']": (1, 1),
    ".ema['large']": (0, 4999),
    ".model_state['mean']": (1, 2),
    ".model_state['least']": (5,),
    ".opt_state.inner[0].mu['large']": (1, 4),
}
QUICK = (".params['mask']", ".model_state['mean']")
NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=NIGHTLY)])
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(data=1),
        *(pytest.param(x, marks=NIGHTLY) for x in (Strategy(data=4), Strategy(fsdp=4))),
    ],
)
@pytest.mark.parametrize(
    "path",
    [x if x in QUICK else pytest.param(x, marks=NIGHTLY) for x in PLACES],
)
def test_no_checkpoint_that_holds_a_lost_value_is_called_good(tmp_path, path, strategy, value):
    if value == np.inf and path.endswith("['least']"):
        pytest.skip("it began there")
    seen = SavesAt(3, 6, 9)
    devices = jax.devices()[: strategy.num_devices]
    trainer = seen.trainer = Various(
        various(tmp_path, max_skipped_in_a_row=3, strategies=(strategy,)),
        tx=optax.adam(0.05),
        hooks=[seen],
        devices=devices,
        loop=spoiling(path, PLACES[path], value),
    )
    with pytest.raises(Diverged) as ended:
        trainer.fit()
    assert path.removeprefix(".") in str(ended.value) or "of 4 values" in str(ended.value)
    assert ended.value.safe_step == 3 and folders(tmp_path) == [3]
    began = {".params['mask']", ".model_state['least']"}
    for name, x in held(tmp_path):
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        assert not is_float or name in began or np.isfinite(np.asarray(x)).all(), name
    assert Checkpoints(str(tmp_path), keep=3).newest() == 3


@pytest.mark.slow
def test_a_run_that_saves_nothing_does_not_return_a_spoilt_state(tmp_path):
    trainer = Various(
        various(tmp_path, saving__at_end=False),
        loop=spoiling(".params['large']", (1, 1), np.nan),
    )
    with pytest.raises(Diverged, match="as found at step 12.*No checkpoint is certified"):
        trainer.fit()


def test_a_stop_does_not_save_a_spoilt_state(tmp_path):
    hook = Recorder(lambda e: trainer.request_stop() if e.step == 6 else None)
    trainer = Various(various(tmp_path), hooks=[hook], loop=spoiling(".ema['w']", (0,), np.inf))
    with pytest.raises(Diverged, match=r"ema\['w'\] \(1 of 4 values, the first is nan at \[0\]"):
        trainer.fit()
    assert folders(tmp_path) == []


def test_a_large_leaf_is_checked_between_saves_and_the_run_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(value_checks, "GLANCE_EVERY", 4)
    monkeypatch.setattr("jaxgoodput.train.duties.certifying.GLANCE_EVERY", 4)
    seen = Recorder()
    trainer = Various(
        various(tmp_path, epochs=None, base_steps=200.0),
        hooks=[seen],
        loop=spoiling(".params['large']", (0, 4999), np.nan, at=9),
    )
    with pytest.raises(Diverged, match=r"params\['large'\] \(1 of 20000"):
        trainer.fit()
    # The last part is looked at within a round, and two steps later all processes act.
    assert 9 < seen.of(StepEnd)[-1].step <= 9 + 4 * value_checks.NUM_PARTS + 4


class Own(Exception):
    """An error of the user's own code."""


class FailsAt(SavesAt):
    """A hook that fails after a step."""

    def ask(self, event):
        if event.step in self.steps:
            raise Own("the hook's")


class FailingData:
    """Samples of which one cannot be read."""

    def __init__(self, bad):
        self.all, self.bad = rows(), bad

    def __len__(self):
        return len(self.all["x"])

    def __getitem__(self, index):
        if index == self.bad:
            raise Own("the data's")
        return {"x": self.all["x"][index]}


class FailingEvaluation(Evaluated):
    """Its evaluation fails."""

    def summarize(self, outputs):
        raise Own("the evaluation's")


def own_errors(workdir, loop):
    """A trainer for each place where a user's code may fail, after values were lost and before a save."""
    plain = config(workdir, shuffle=False)
    return {
        "hook": lambda: Mean(plain, hooks=[FailsAt(7)], loop=loop),
        "last hook": lambda: Mean(plain, hooks=[FailsAt(12)], loop=loop),
        "data": lambda: Mean(
            config(workdir, shuffle=False, execution__read_retries=0, epochs=1),
            data=FailingData(90),  # not one that is compared on resuming
            loop=loop,
        ),
        "evaluation": lambda: FailingEvaluation(
            config(workdir, evaluation__every_base_steps=6.0), loop=loop
        ),
    }


@pytest.mark.parametrize("where", ["hook", "last hook", "data", "evaluation"])
def test_an_error_of_the_user_s_code_stays_the_cause_of_diverged(tmp_path, where):
    loop = spoiling(".params['w']", (1,), np.nan, at=4)
    with pytest.raises(Diverged, match=r"params\['w'\]") as ended:
        own_errors(tmp_path, loop)[where]().fit()
    chain: list[BaseException] = [ended.value]
    while (error := chain[-1].__cause__) is not None:
        chain.append(error)
    assert any(isinstance(error, Own) for error in chain), chain


@pytest.mark.parametrize("steps", [(6, 6), (9, 6), pytest.param((6, 9), marks=pytest.mark.slow)])
def test_a_state_that_is_set_aside_is_of_this_run_and_stays(tmp_path, steps):
    """Two runs in one workdir lose values, each in a leaf of its own."""
    for step, leaf in zip(steps, ("large", "half"), strict=True):
        hook = SavesAt(step)
        loop = spoiling(f".params['{leaf}']", (1, 1), np.nan, at=step - 1)
        trainer = hook.trainer = Various(various(tmp_path), hooks=[hook], loop=loop)
        with pytest.raises(Diverged, match=rf"spoilt_checkpoints/{step}\.") as ended:
            trainer.fit()
        assert ended.value.safe_step is None
        aside = SavedCheckpoint.at(tmp_path / f"spoilt_checkpoints/{step}")
        assert aside.meta.step == step and f".params['{leaf}']" in (aside.meta.lost or {})
        path = f".params['{leaf}']"
        kind = aside.meta.leaves[path]
        found = aside.read({path: jax.ShapeDtypeStruct(kind.shape, jnp.dtype(kind.dtype))})
        assert np.isnan(np.asarray(found[path], np.float32)).sum() == 1
        assert Checkpoints(str(tmp_path), keep=3).newest() is None
        with pytest.raises(FileNotFoundError):
            jg.load(str(tmp_path))


@pytest.mark.slow
def test_what_was_infinite_at_the_start_is_known_after_a_restart(tmp_path):
    Various(various(tmp_path, epochs=1)).fit()
    Various(various(tmp_path, epochs=2)).fit()
    assert folders(tmp_path) == [6, 12]
    hook = SavesAt(14)
    trainer = hook.trainer = Various(
        various(tmp_path, epochs=3),
        hooks=[hook],
        loop=spoiling(".params['mask']", (0, 0), -np.inf, at=13),
    )
    with pytest.raises(
        Diverged, match=r"params\['mask'\] \(1 of 16 values, the first is -inf at \[0, 0\]"
    ):
        trainer.fit()
    assert folders(tmp_path) == [6, 12]


@pytest.mark.slow
def test_a_row_of_a_table_that_is_not_read_again_is_found(tmp_path):
    class Spoils(InStep):
        def _dispatch(self, batch):
            super()._dispatch(batch)
            if self.now.step == 5:
                (table, *_) = self.start.feed.tables.values()
                slot = int(np.flatnonzero(table._on_device.ids >= 0)[0])
                bits = np.float32(np.nan).view(np.uint32)
                with jax.transfer_guard("allow"):
                    table.slots = table.slots.at[slot, 0].set(bits)

    hook = SavesAt(3, 6)
    trainer = hook.trainer = Two(table_settings(tmp_path), hooks=[hook], loop=Spoils)
    with pytest.raises(
        Diverged, match=r"embedding from row \d+ on \(1 values\).*Step 3 is certified"
    ):
        trainer.fit()
    assert folders(tmp_path) == [3]
    seen = Recorder()
    Two(table_settings(tmp_path), hooks=[seen]).fit()
    assert seen.of(StepEnd)[0].step == 4


class NanMetrics(Evaluated):
    """Its evaluations are no numbers from the third on."""

    num = 0

    def summarize(self, outputs):
        self.num += 1
        return {"distance": np.nan if self.num > 2 else 1.0 / self.num}


def test_an_evaluation_that_is_nan_is_never_the_best(tmp_path):
    settings = config(
        tmp_path,
        epochs=2,
        evaluation__every_base_steps=2.0,
        saving__best="distance",
        saving__keep=1,
    )
    NanMetrics(settings, loop=InStep).fit()
    assert json.loads((tmp_path / "config.json").read_text())["saving"]["best"] == "distance"
    best = SavedCheckpoint.find(FolderView(str(tmp_path)), None, best=True)
    assert np.isfinite(best.meta.metrics["distance"]) and best.meta.step < 12


# -- names of folders --------------------------------------------------------------------------------


@pytest.fixture
def swapped(tmp_path):
    """A workdir whose folders 3 and 6 hold the checkpoints of steps 6 and 3."""
    hook = SavesAt(3)
    trainer = hook.trainer = Mean(config(tmp_path, epochs=1), hooks=[hook], loop=InStep)
    state = trainer.fit()
    root = tmp_path / "checkpoints"
    (root / "3").rename(root / "x")
    (root / "6").rename(root / "3")
    (root / "x").rename(root / "6")
    return tmp_path, state


@pytest.mark.slow
def test_the_name_of_a_folder_is_not_believed(swapped):
    workdir, state = swapped
    found = Checkpoints(str(workdir), keep=3)
    assert found.newest() == 6 and found.steps() >= {3, 6}
    found.close()
    params, _ = jg.load(str(workdir))
    np.testing.assert_array_equal(params["w"], state.params["w"])
    assert SavedCheckpoint.find(FolderView(str(workdir)), 6, best=False).folder.name == "3"
    # A run names them anew, goes on from the newest, and deletes the oldest.
    seen = Recorder()
    trainer = Mean(config(workdir, epochs=2, saving__keep=2), hooks=[seen])
    trainer.fit()
    assert seen.of(StepEnd)[0].step == 7
    assert folders(workdir) == [6, 12]
    for step in (6, 12):
        meta = json.loads((workdir / f"checkpoints/{step}/meta/metadata").read_text())
        assert meta["step"] == step


def test_a_run_that_was_ended_while_it_named_folders_loses_none(swapped):
    workdir, _ = swapped
    root = workdir / "checkpoints"
    (root / "3").rename(root / "03")
    assert Checkpoints(str(workdir), keep=3).newest() == 6
    found = Checkpoints(str(workdir), keep=3)
    found.tidy()
    assert folders(workdir) == [3, 6] and (root / "3").is_dir() and found.newest() == 6
    found.close()


def test_a_spoilt_checkpoint_among_the_others_is_moved_away(tmp_path):
    Mean(config(tmp_path, epochs=1)).fit()
    path = tmp_path / "checkpoints/6/meta/metadata"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lost": {".params['w']": 1}}))
    found = Checkpoints(str(tmp_path), keep=3)
    assert found.newest() is None
    with pytest.raises(FileNotFoundError):
        jg.load(str(tmp_path))
    found.tidy()
    found.close()
    assert folders(tmp_path) == [] and folders(tmp_path, "spoilt_checkpoints") == [6]


def test_bad_data_alone_ends_with_a_message_that_is_true(tmp_path):
    data = rows()
    data["x"][64:] = np.nan
    settings = config(tmp_path, shuffle=False, epochs=2, max_skipped_in_a_row=2)
    with pytest.raises(Diverged, match="None of them was applied. No checkpoint is certified in"):
        Mean(settings, data=data).fit()
