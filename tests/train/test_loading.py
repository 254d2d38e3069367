"""A trained model can be taken away, looked at, and gone on from elsewhere: by name, on any layout."""

import dataclasses
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl import logging
from hypothesis import given
from hypothesis import strategies as st
from problems import Evaluated, InStep, Mean, Recorder, config, same

import jaxgoodput as jg
from jaxgoodput._disk import SUMS
from jaxgoodput.engine.saved import keys_of, named
from jaxgoodput.engine.state import host_copy
from jaxgoodput.observe.events import EvalEnd, FitStart, StateShown, StepEnd
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.train.checkpoints.meta import WrongWorkdirError, saveable

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "howto" / "checkpoints.md"
ROWS, COLUMNS = 64, 32  # a leaf that layouts cut


class Layer(NamedTuple):
    kernel: Any
    scale: Any


class Deep(Mean):
    """`Mean`, with its vector and others deep in containers of every kind and under unusual names."""

    def init(self, key) -> Any:
        kernel = jax.random.normal(key, (ROWS, COLUMNS))
        return jg.Variables(
            params={
                "layers": [Layer(kernel, jnp.ones(())), {"w": jnp.zeros(self.width)}],
                "odd": {
                    "": jnp.ones(2),
                    "a.b/c": jnp.ones(3),
                    "..": jnp.ones(4),
                    "/é ]['%": jnp.ones(5),
                },
                "by_number": {7: jnp.ones(6), 3: jnp.ones(7)},
            },
            model_state={
                "num_batches": jnp.zeros((), jnp.int32),
                "narrow": jnp.ones(2, jnp.bfloat16),
                "key": jax.random.key(3),
            },
        )

    def loss_and_state(self, params, model_state, batch, key):
        first, second = params["layers"]
        loss = self.loss({"w": second["w"]}, batch, key)
        loss += 1e-3 * jnp.mean(first.kernel**2) * first.scale
        loss += 1e-3 * sum(
            jnp.sum(x) for x in jax.tree.leaves((params["odd"], params["by_number"]))
        )
        return loss, {**model_state, "num_batches": model_state["num_batches"] + 1}


def deep(workdir, **options):
    settings = {"tx": optax.adamw(1e-2), "devices": jax.devices()[:1]}
    return Deep(config(workdir), **{**settings, **options})


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A workdir of 8 devices under fsdp with two checkpoints, and the last state."""
    workdir = tmp_path_factory.mktemp("original")
    settings = config(workdir, strategies=(jg.Strategy(fsdp=8),), saving__keep=2)
    hook = Recorder(lambda e: trainer.request_save() if e.step == 6 else None)
    trainer = Deep(settings, tx=optax.adamw(1e-2), hooks=[hook], loop=InStep)
    state = trainer.fit()
    return workdir, state


@pytest.fixture
def told(monkeypatch):
    """What users are warned of."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    return said


def listing(folder):
    return {str(p): p.stat().st_mtime_ns for p in pathlib.Path(folder).rglob("*")}


def assert_equal(found, wanted):
    """Arrays of the same types and bits in the same containers."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def as_orbax_keeps(params):
    """Parameters of `Deep` in dicts with keys of text, and lists."""
    first, second = params["layers"]
    return {
        "layers": [{"kernel": first.kernel, "scale": first.scale}, second],
        "odd": params["odd"],
        "by_number": {str(k): x for k, x in params["by_number"].items()},
    }


# -- names -------------------------------------------------------------------------------------------

trees = st.recursive(
    st.integers(),
    lambda inner: (
        st.dictionaries(st.text(), inner, min_size=1, max_size=4)
        | st.lists(inner, min_size=1, max_size=4)
    ),
)


@given(tree=st.dictionaries(st.text(), trees, min_size=1))
def test_any_tree_of_dicts_and_lists_is_made_again_from_the_paths_of_its_leaves(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    assert named({keys_of(jax.tree_util.keystr(p)): x for p, x in leaves}) == tree


def test_two_leaves_of_one_name_are_refused_before_anything_runs():
    tree = {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)}
    with pytest.raises(ValueError, match=r"\['a'\]\['b'\] and .*\['a.b'\] have one name"):
        jax.eval_shape(saveable(lambda _: tree, "init()"), 0)


@pytest.mark.slow
def test_plain_orbax_finds_every_value_by_its_name(original):
    """The lines of its page, as they are printed there, but for the folder."""
    workdir, state = original
    (block,) = [
        part.partition("```")[0]
        for part in PAGE.read_text().split("```python\n")[1:]
        if "orbax.checkpoint as ocp" in part.partition("```")[0]
    ]
    assert "jaxgoodput" not in block and len(block.strip().splitlines()) <= 12
    found: dict[str, Any] = {}
    exec(block.replace("/tmp/mine", str(workdir)), found)
    assert_equal(found["params"], as_orbax_keeps(state.params))
    assert found["model_state"]["num_batches"] == state.model_state["num_batches"]
    tree = found["state"]
    assert tree["step"] == 12 and {"opt_state", "key", "guard"} <= tree.keys()


def test_the_standard_reader_of_orbax_finds_them_too(original):
    workdir, state = original
    tree = ocp.StandardCheckpointer().restore(workdir / "checkpoints/12/state")
    assert_equal(tree["params"], as_orbax_keeps(state.params))


# -- taking it away ----------------------------------------------------------------------------------


def test_load_needs_no_class_and_says_what_there_is_not(original):
    workdir, state = original
    before = listing(workdir)
    params, model_state = jg.load(str(workdir))
    assert all(type(x) is np.ndarray for x in jax.tree.leaves((params, model_state)))
    assert_equal(params, as_orbax_keeps(state.params))
    assert model_state["num_batches"] == state.model_state["num_batches"]
    np.testing.assert_array_equal(model_state["key"], jax.random.key_data(state.model_state["key"]))
    earlier, _ = jg.load(str(workdir), step=6)
    assert not np.array_equal(earlier["layers"][1]["w"], params["layers"][1]["w"])
    assert listing(workdir) == before
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7; it has \[6, 12\]"):
        jg.load(str(workdir), step=7)
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        jg.load(str(workdir / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="a value of Saving.best, which is None"):
        jg.load(str(workdir), best=True)
    with pytest.raises(ValueError, match="best=True and step=6 exclude"):
        jg.load(str(workdir), 6, best=True)


@pytest.mark.slow
def test_the_best_is_found_by_the_metric_that_the_run_kept_it_by(tmp_path):
    """The distance falls until the learning rate changes its sign."""
    settings = config(
        tmp_path,
        epochs=4,
        evaluation__every_base_steps=2.0,
        saving__best="distance",
        saving__keep=1,
    )
    seen = Recorder()
    tx = optax.sgd(lambda progress: jnp.where(jnp.asarray(progress) < 10, 0.1, -0.1))
    trainer = Evaluated(settings, tx=tx, hooks=[seen], loop=InStep)
    last = trainer.fit()
    evaluated = {e.step: e.metrics["distance"] for e in seen.of(EvalEnd)}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert 0 < best < int(last.step)
    found = trainer.restore(best=True)
    assert int(found.step) == best
    assert_equal(jg.load(str(tmp_path), best=True)[0], jax.device_get(found.params))
    again = {"initial": jg.FromCheckpoint(str(tmp_path), best=True), "loop": First}
    Mean(config(tmp_path / "again"), **again).fit()
    assert_equal(First.params, jax.device_get(found.params))


@pytest.mark.slow
def test_load_gives_the_average_in_the_parameters_own_types(tmp_path):
    trainer = deep(tmp_path)
    trainer.config = dataclasses.replace(trainer.config, ema=0.9)
    state = trainer.fit()
    wanted = jax.tree.map(lambda x, own: x.astype(own.dtype), state.averaged, state.params)
    assert_equal(jg.load(str(tmp_path))[0], as_orbax_keeps(wanted))
    assert_equal(jg.load(str(tmp_path), averaged=False)[0], as_orbax_keeps(state.params))


@pytest.mark.parametrize("strategy", [jg.Strategy(), jg.Strategy(fsdp=4), jg.Strategy(data=8)])
def test_restore_gives_the_state_on_the_trainers_own_devices(original, strategy):
    workdir, state = original
    before = listing(workdir)
    count = {"": 1, "fsdp4": 4, "data8": 8}.get(strategy.name, 1)
    settings = config(workdir, strategies=(strategy,))
    trainer = Deep(settings, tx=optax.adamw(1e-2), devices=jax.devices()[:count])
    found = trainer.restore()
    assert same(found, state) and type(found.params["layers"][0]) is Layer
    assert found.step.sharding.device_set == set(jax.devices()[:count])
    assert int(trainer.restore(step=6).step) == 6
    assert listing(workdir) == before


def test_restore_refuses_another_model_as_fit_does(original):
    workdir, _ = original
    errors = []
    for call in (Mean.restore, Mean.fit):
        with pytest.raises(WrongWorkdirError, match="belongs to another model") as refused:
            call(Mean(config(workdir)))
        errors.append(str(refused.value))
    assert errors[0] == errors[1]


def no_state(folder):
    shutil.rmtree(folder / "state")


def no_meta(folder):
    shutil.rmtree(folder / "meta")


def no_sums(folder):
    (folder / SUMS).unlink()


def one_bit(folder):
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [no_state, no_meta, no_sums, one_bit])
def test_a_damaged_one_is_named_and_left_where_it_is(original, tmp_path, damage):
    shutil.copytree(original[0], tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "12"
    damage(folder)
    before = listing(tmp_path)
    for read in (lambda: jg.load(str(tmp_path / "run")), deep(tmp_path / "run").restore):
        with pytest.raises(ValueError, match=rf"{folder} cannot be read.*\[6, 12\] are there"):
            read()
    assert listing(tmp_path) == before


# -- beginning with it -------------------------------------------------------------------------------


class First(InStep):
    """Keeps what a run begins with."""

    params: Any = None
    model_state: Any = None

    def run(self):
        type(self).params = jax.device_get(self.now.state.params)
        type(self).model_state = jax.tree.map(host_copy, self.now.state.model_state)
        return super().run()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(jg.Strategy(), marks=pytest.mark.nightly),
        jg.Strategy(data=2, fsdp=4),
        jg.Strategy(fsdp=2, tensor=2),
    ],
)
def test_a_run_begins_with_a_checkpoint_of_another_layout(original, tmp_path, strategy):
    workdir, state = original
    count = {"data2.fsdp4": 8, "fsdp2.tensor2": 4}.get(strategy.name, 1)
    seen = Recorder()
    Deep(
        config(tmp_path, strategies=(strategy,)),
        tx=optax.adamw(1e-2),
        devices=jax.devices()[:count],
        initial=str(workdir),
        hooks=[seen],
        loop=First,
    ).fit()
    assert_equal(First.params, jax.device_get(state.params))
    assert int(First.model_state["num_batches"]) > 0
    np.testing.assert_array_equal(
        jax.random.key_data(First.model_state["key"]),
        jax.random.key_data(state.model_state["key"]),
    )
    assert seen.of(FitStart)[0].step == 0 and seen.of(StepEnd)[0].step == 1


@pytest.mark.slow
def test_a_tree_is_taken_in_part_and_stays_the_users_own(tmp_path, told):
    kernel = jnp.full((ROWS, COLUMNS), 2.0)
    # Another type, other containers, and not all of it.
    given = {"layers": {"0": {"kernel": kernel}, "1": {"w": np.full(4, 3.0, np.float64)}}}
    fresh = deep(tmp_path / "fresh", loop=First)
    fresh.fit()
    wanted = First.params
    deep(tmp_path / "begun", initial=given, loop=First).fit()
    assert not kernel.is_deleted() and float(kernel[0, 0]) == 2.0
    first, second = First.params["layers"]
    np.testing.assert_array_equal(first.kernel, 2.0)
    np.testing.assert_array_equal(second["w"], np.full(4, 3.0, np.float32))
    assert second["w"].dtype == np.float32
    assert_equal(First.params["odd"], wanted["odd"])
    assert any("come from init(): params/by_number/3" in said for said in told)


def test_names_lead_to_other_names_or_to_init(original, tmp_path):
    workdir, state = original

    def names(name):
        if name.startswith("model_state"):
            return None
        return "params/layers/1/w"

    Mean(
        config(tmp_path), initial=jg.FromCheckpoint(str(workdir), names=names, step=6), loop=First
    ).fit()
    wanted = jg.load(str(workdir), step=6)[0]["layers"][1]["w"]
    np.testing.assert_array_equal(First.params["w"], wanted)
    del state


class Tied(Mean):
    """Two leaves that begin alike."""

    def init(self, key):
        return {"w": jnp.zeros(self.width), "v": jnp.ones(self.width)}

    def loss(self, params, batch, key):
        return super().loss({"w": params["w"] + params["v"]}, batch, key)


def test_one_leaf_there_may_be_two_here(original, tmp_path):
    initial = jg.FromCheckpoint(str(original[0]), names=lambda _: "params/layers/1/w")
    Tied(config(tmp_path), initial=initial, loop=First).fit()
    np.testing.assert_array_equal(First.params["w"], First.params["v"])
    np.testing.assert_array_equal(First.params["w"], original[1].params["layers"][1]["w"])


@pytest.mark.parametrize(
    "initial, sentence",
    [
        (
            {"w": np.zeros(5)},
            r"params/w is float64\(5,\) in initial=, but float32\(4,\) in the model",
        ),
        ({"w": np.zeros(4, int)}, r"params/w is int64\(4,\)"),
        ({"v": np.zeros(4)}, "has params/v, which the model has not"),
        ({}, "no leaf of the model is in initial="),
        ("other", "no leaf of the model is in"),
        (lambda _: "params/v", "maps params/w to params/v, but .* no such leaf"),
        (
            lambda _: "params/layers/0/kernel",
            r"params/w is float32\(64, 32\) in .*/12, but float32\(4",
        ),
        ("nowhere", "holds no checkpoint"),
    ],
)
def test_what_does_not_fit_is_named_with_what_to_do(original, tmp_path, initial, sentence):
    if initial == "other":
        initial = str(original[0])
    elif initial == "nowhere":
        initial = str(tmp_path / "nowhere")
    elif callable(initial):
        names: Any = initial
        initial = jg.FromCheckpoint(str(original[0]), names=names)
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        Mean(config(tmp_path / "run"), initial=initial).fit()


@pytest.mark.slow
def test_a_run_that_goes_on_says_once_that_it_does_not_begin_anew(original, tmp_path, told):
    deep(tmp_path).fit()
    more = deep(tmp_path, initial=str(tmp_path / "gone"), loop=First)
    more.config = config(tmp_path, epochs=3)
    more.fit()
    assert len([said for said in told if "initial= was not read" in said]) == 1


class Adapted(jg.Trainer):
    """A frozen matrix with a trainable one of low rank beside it (LoRA, Hu et al. 2021)."""

    RANK = 2

    def init(self, key):
        down = jax.random.normal(key, (ROWS, self.RANK)) / ROWS**0.5
        return {
            "base": {"kernel": jax.random.normal(key, (ROWS, COLUMNS))},
            "lora": {"down": down, "up": jnp.zeros((self.RANK, COLUMNS))},
        }

    def trainable(self, params):
        return {
            "base": jax.tree.map(lambda _: False, params["base"]),
            "lora": {"down": True, "up": True},
        }

    def loss(self, params, batch, key):
        lora = params["lora"]
        out = batch["x"] @ params["base"]["kernel"] + batch["x"] @ lora["down"] @ lora["up"]
        return jnp.mean((out - batch["y"]) ** 2, axis=-1)

    def optimizer(self):
        return optax.adam(1e-2)

    def dataset(self):
        x = np.random.default_rng(0).normal(size=(96, ROWS)).astype(np.float32)
        return {"x": x, "y": np.zeros((96, COLUMNS), np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [jg.Strategy(data=8), jg.Strategy(fsdp=8)])
def test_lora_trains_what_it_adds_to_a_loaded_model(original, tmp_path, strategy):
    base = jg.FromCheckpoint(
        str(original[0]),
        names=lambda name: "params/layers/0/kernel" if name == "params/base/kernel" else None,
    )
    seen = Recorder()
    state = Adapted(
        config(tmp_path, strategies=(strategy,), epochs=20), initial=base, hooks=[seen]
    ).fit()
    kernel = original[1].params["layers"][0].kernel
    np.testing.assert_array_equal(state.params["base"]["kernel"], np.asarray(kernel))
    losses = [step.metrics["loss"] for step in seen.of(StepEnd)]
    assert losses[-1] < 0.9 * losses[0]
    held = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert held < kernel.size  # moments of the adapters alone


@pytest.mark.slow
def test_what_a_run_begins_with_is_no_part_of_its_programs(tmp_path, uncached):
    """As constants of a program, weights would be compiled, and kept in the compilation cache."""
    cache = tmp_path / "cache"
    weights = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)

    class Large(Adapted):
        def init(self, key):
            params = super().init(key)
            return {
                **params,
                "base": {"kernel": params["base"]["kernel"], "more": jnp.zeros(weights.shape)},
            }

    seen = Large(
        config(tmp_path / "run", execution__compilation_cache=str(cache)),
        initial={"base": {"more": weights}},
        loop=First,
    )
    seen.fit()
    np.testing.assert_array_equal(First.params["base"]["more"], weights)
    size = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file())
    assert size < weights.nbytes / 2


# -- looking at it while it trains -------------------------------------------------------------------


class Looker(Hook):
    """Asks for the parameters after every third step, and keeps what it is shown."""

    def __init__(self):
        self.trainer: Any = None
        self.shown: list[StateShown] = []

    def on_step_end(self, event):
        if event.step % 3 == 0:
            self.trainer.request_state()

    def on_state(self, event):
        self.shown.append(event)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_hooks_are_shown_the_parameters_as_they_were_and_cannot_change_them(tmp_path, ema, count):
    noted = {}

    class Noting(InStep):
        def _obey(self, result):
            noted[self.now.step] = jax.tree.map(host_copy, self.now.state.averaged)
            return super()._obey(result)

    hook = Looker()
    settings = config(tmp_path, ema=ema, strategies=(jg.Strategy(fsdp=count),))
    hook.trainer = Deep(
        settings, tx=optax.adamw(1e-2), hooks=[hook], loop=Noting, devices=jax.devices()[:count]
    )
    hook.trainer.fit()
    assert [event.step for event in hook.shown] == [3, 6, 9, 12]
    for event in hook.shown:
        assert_equal(event.params, noted[event.step])
        with pytest.raises(ValueError, match="read-only"):
            event.params["layers"][1]["w"][0] = 1.0
        assert jnp.issubdtype(event.model_state["key"].dtype, jax.dtypes.prng_key)


@pytest.mark.slow
def test_looking_changes_no_bit_of_the_run(tmp_path):
    hook = Looker()
    hook.trainer = deep(tmp_path / "seen", hooks=[hook], loop=InStep)
    assert same(hook.trainer.fit(), deep(tmp_path / "unseen").fit())
    assert hook.shown
