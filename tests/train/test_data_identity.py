"""Whatever a resumed run changes about its data: each sample comes once per epoch, or the run is refused."""

import contextlib
import itertools

import jax
import numpy as np
import pytest
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Counting, InStep, Recorder, counting_config

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.train.checkpoints.meta import WrongWorkdirError
from jaxgoodput.train.control import Preempted

NUM_SAMPLES = 100  # 6 batches of 16, and 4 more


class Changed(Counting):
    """Counts by identity how often each sample was used, wherever it lies."""

    def __init__(self, config, *, change=lambda data: data, **options):
        super().__init__(config, num_samples=NUM_SAMPLES, **options)
        self.change = change

    def dataset(self):
        return self.change(self.data)


def at(places):
    return lambda data: {name: x[places] for name, x in data.items()}


def swapped(first, second):
    order = np.arange(NUM_SAMPLES)
    order[[first, second]] = order[[second, first]]
    return at(order)


def as_list(data):
    return [{name: x[i] for name, x in data.items()} for i in range(NUM_SAMPLES)]


# Settings that a resumed run may change: the order of the checkpoint is kept, or not concerned.
KEPT = {
    "shuffle": {"shuffle": False},
    "seed": {"seed": 7},
    "prefetch": {"execution__prefetch": 0},
    "readers": {"execution__readers": 3},
    "policy": {"policy": {0: 16, 0.3: 32}},
    "largest batch": {"batch": BatchLimits(base=16, max=32, micro=(1, 32))},
}
# Changes of the data set, with which a run is refused.
REFUSED = {
    "reversed": at(slice(None, None, -1)),
    "permuted": at(np.random.default_rng(0).permutation(NUM_SAMPLES)),
    "two swapped": swapped(17, 43),
    "fewer": at(slice(1, None)),
    "filtered": at([*range(50), *range(51, NUM_SAMPLES), 0]),
    "other type": lambda data: {**data, "id": data["id"].astype(np.int32)},
}


def run(workdir, *, stop=None, change=lambda data: data, **changed):
    """Two epochs, or less of them; returns how often each sample was used, if the run ends."""
    trainer = Changed(
        counting_config(workdir, epochs=2, **changed),
        change=change,
        devices=jax.devices()[:1],
        loop=InStep,
        hooks=[Recorder(lambda event: trainer.request_stop() if event.step == stop else None)],
    )
    if stop is None:
        return np.asarray(trainer.fit().params["count"])
    with contextlib.suppress(Preempted):
        trainer.fit()
    return None


def check(workdir, stop, shuffle, kept, refused):
    """Stop a run, and resume it with other settings."""
    run(workdir, stop=stop, shuffle=shuffle)
    changed = {"shuffle": shuffle}
    for name in kept:
        changed |= {"shuffle": not shuffle} if name == "shuffle" else KEPT[name]
    if refused is None:
        np.testing.assert_array_equal(run(workdir, **changed), 2)
        return
    with pytest.raises(WrongWorkdirError, match="the data set ha|the data set hold"):
        run(workdir, change=REFUSED[refused], **changed)
    np.testing.assert_array_equal(run(workdir, **changed), 2)  # nothing was lost


@pytest.fixture
def warnings_of(monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: said.append(text % args))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_keeps_its_order_and_says_so(tmp_path, warnings_of, shuffle):
    run(tmp_path, stop=4, shuffle=shuffle)
    run(
        tmp_path, stop=8, shuffle=not shuffle, seed=5
    )  # a checkpoint of the resumed run keeps it, too
    np.testing.assert_array_equal(run(tmp_path, shuffle=not shuffle, seed=5), 2)
    said = [text for text in warnings_of if "order of samples" in text]
    assert len(said) == 2
    for text in said:
        assert f"Config.seed=5 instead of 0 and Config.shuffle={not shuffle} instead of" in text


@pytest.mark.slow
@settings(max_examples=3)
@given(
    stop=st.integers(1, 12),
    shuffle=st.booleans(),
    kept=st.sets(st.sampled_from(sorted(KEPT)), min_size=1, max_size=3),
    refused=st.none() | st.sampled_from(sorted(REFUSED)),
)
def test_each_sample_comes_once_or_the_run_is_refused(
    tmp_path_factory, stop, shuffle, kept, refused
):
    check(tmp_path_factory.mktemp("run"), stop, shuffle, kept, refused)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("stop", [1, 5, 6, 7, 12])
def test_every_pair_of_changes(tmp_path, stop, shuffle):
    pairs = itertools.product(KEPT, [None, *REFUSED])
    for number, (kept, refused) in enumerate(pairs):
        check(tmp_path / str(number), stop, shuffle, [kept], refused)


@pytest.mark.slow
def test_the_last_batch_may_be_dropped_later(tmp_path):
    """The new value counts: only the samples at the very end are concerned, and none comes twice."""
    run(tmp_path, stop=5)
    seen = run(tmp_path, last_batch="drop")
    assert seen is not None and seen.max() == 2 and (2 - seen).sum() == 2 * NUM_SAMPLES % 16
