"""Whole runs on every kind of data set: orders of earlier versions, random transforms, streams, bad reads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from problems import (
    Counting,
    Evaluated,
    InStep,
    Mean,
    Recorder,
    config,
    counting_config,
    rows,
    same,
)

from jaxgoodput.clock import FakeClock
from jaxgoodput.data.streams import stream
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe import journal
from jaxgoodput.observe.events import FitEnd, ReadsRetried, StepEnd
from jaxgoodput.train.checkpoints.meta import WrongWorkdirError
from jaxgoodput.train.control import Preempted

grain = pytest.importorskip("grain", reason="grain (the extra of that name) is not installed")

NUM_SAMPLES = 96


def stopped_at(trainer, step):
    """What a run sees that is asked to stop once `step` is done."""
    seen = Recorder(lambda e: trainer.request_stop() if e.step == step else None)
    trainer.hooks = (seen,)
    with pytest.raises(Preempted):
        trainer.fit()
    return seen


# -- random transforms -------------------------------------------------------------------------------


class Augmented(Mean):
    """Every sample with a random addition, which the parameters remember one by one."""

    def init(self, key):
        return {"seen": jnp.zeros((3, NUM_SAMPLES))}

    def loss(self, params, batch, key):
        # The gradient of its own entry is minus the addition times its share of the batch.
        return -params["seen"][batch["epoch"], batch["id"]] * batch["noise"]

    def dataset(self):
        numbers = grain.MapDataset.range(NUM_SAMPLES).seed(1)
        return numbers.map_with_index(lambda i, x: {"id": x, "epoch": i // NUM_SAMPLES}).random_map(
            lambda row, rng: {**row, "noise": rng.uniform(1, 2)}
        )


@pytest.mark.slow
def test_augmentation_differs_from_epoch_to_epoch_and_is_drawn_again_after_a_restart(tmp_path):
    settings = {"epochs": 3}
    whole = Augmented(counting_config(tmp_path / "whole", **settings)).fit()
    for step in (4, 11):
        stopped_at(Augmented(counting_config(tmp_path / "parts", **settings), loop=InStep), step)
    parts = Augmented(counting_config(tmp_path / "parts", **settings)).fit()
    assert same(parts.params, whole.params)
    seen = np.asarray(whole.params["seen"])
    assert (seen > 0).all() and len(np.unique(seen)) > 0.99 * seen.size


# -- streams and data sets without end -----------------------------------------------------------------


class Stream(Counting):
    """Counts the samples of a grain stream, shuffled in a window, of as many epochs as asked."""

    def __init__(self, config, *, num_epochs=3, **options):
        super().__init__(config, **options)
        self.num_epochs = num_epochs

    def dataset(self):
        numbers = grain.MapDataset.range(NUM_SAMPLES).seed(3).shuffle().repeat(self.num_epochs)
        stream = grain.experimental.WindowShuffleIterDataset(
            numbers.to_iter_dataset(), window_size=10, seed=4
        )
        return stream.map(lambda i: {"x": self.data["x"][i], "id": i})


def growing(trainer):
    """Asks for another batch every few steps."""

    def then(event):
        if event.step % 3 == 0:
            trainer.request_batch([16, 5, 8][event.step // 3 % 3])

    return then


@pytest.mark.slow
def test_a_stream_is_used_once_over_restarts_and_changes_of_batch(tmp_path):
    settings = counting_config(
        tmp_path,
        base_steps=1000.0,
        policy="goodput",
        batch=BatchLimits(base=16, min_global=5, max=32, micro=(4, 32)),
        tuning__warm_up_steps=10**6,
    )
    device, steps, state = jax.devices()[:1], [], None
    for end in (4, 9, 14, None):
        trainer = Stream(settings, devices=device, loop=InStep)
        ask = growing(trainer)

        def then(event, ask=ask, end=end, trainer=trainer):
            ask(event)
            if event.step == end:
                trainer.request_stop()

        seen = Recorder(then)
        trainer.hooks = (seen,)
        if end is None:
            state = trainer.fit()
        else:
            with pytest.raises(Preempted):
                trainer.fit()
        steps += seen.of(StepEnd)
    assert len({s.config.global_batch_size for s in steps}) > 1
    assert [s.after.offset for s in steps] == np.cumsum([s.num_samples for s in steps]).tolist()
    assert state is not None
    np.testing.assert_array_equal(state.params["count"], 3)
    assert seen.of(FitEnd)[0].reason == "done" and seen.of(FitEnd)[0].samples == 3 * NUM_SAMPLES


class Rows:
    """A stream as Hugging Face's: the state is the data set's, and lacks the buffer that shuffles."""

    def __init__(self, ids, buffer=1):
        self.ids, self.buffer, self.begins_at, self.place = ids, buffer, 0, 0

    def __iter__(self):
        rng, held = np.random.default_rng(0), []
        for place in range(self.begins_at, len(self.ids)):
            self.place = place + 1
            held.append(self.ids[place])
            if len(held) == self.buffer:
                yield {"id": held.pop(rng.integers(self.buffer))}
        yield from ({"id": i} for i in held)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.begins_at = state["place"]


class Loadable(Counting):
    def __init__(self, config, rows, **options):
        super().__init__(config, **options)
        self.rows = rows

    def dataset(self):
        return self.rows

    def loss(self, params, batch, key):
        return super().loss(params, {**batch, "x": jnp.ones((len(batch["id"]), 4))}, key)


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [1, 10])
def test_a_stream_with_a_state_dict_is_used_once_over_restarts(tmp_path, buffer):
    settings = counting_config(tmp_path, base_steps=1000.0)
    ids, device = np.tile(np.arange(NUM_SAMPLES), 2), jax.devices()[:1]
    for end in (1, 5, 8):
        stopped_at(Loadable(settings, Rows(ids, buffer), devices=device, loop=InStep), end)
    with pytest.raises(
        WrongWorkdirError, match="sample .* of the stream is not the one that it was"
    ):
        Loadable(settings, Rows(ids[::-1], buffer), devices=device).fit()
    state = Loadable(settings, Rows(ids, buffer), devices=device).fit()
    np.testing.assert_array_equal(state.params["count"], 2)


def batches_of(number):
    """A pass of a loader that has no state: batches of its own size, in another order in each pass."""
    ids = np.random.default_rng(number).permutation(NUM_SAMPLES)
    return [{"id": ids[i : i + 7]} for i in range(0, NUM_SAMPLES, 7)]


@pytest.mark.slow
def test_a_loader_of_batches_is_used_once_over_restarts_with_other_devices(tmp_path):
    settings = counting_config(tmp_path, base_steps=1000.0)

    def trainer(num_devices):
        rows = stream(batches_of, batched=True, passes=3)
        return Loadable(settings, rows, devices=jax.devices()[:num_devices], loop=InStep)

    for end, num_devices in ((1, 1), (5, 4), (9, 2), (14, 1)):
        stopped_at(trainer(num_devices), end)
    seen = Recorder()
    last = trainer(2)
    last.hooks = (seen,)
    np.testing.assert_array_equal(last.fit().params["count"], 3)
    assert seen.of(FitEnd)[0].samples == 3 * NUM_SAMPLES


@pytest.mark.slow
def test_a_stream_trains_under_the_default_policy(tmp_path):
    settings = counting_config(tmp_path, base_steps=4.0, policy="goodput")
    seen = Recorder()
    Stream(settings, devices=jax.devices()[:1], hooks=[seen]).fit()
    assert seen.of(StepEnd)[-1].after.offset == seen.of(FitEnd)[0].samples >= 4 * 16


def test_a_stream_that_ends_before_the_run_does_is_warned_of(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    settings = counting_config(tmp_path, base_steps=24.0)
    Stream(settings, devices=jax.devices()[:1], num_epochs=1).fit()
    (told,) = [one for one in said if "the data ended" in one]
    assert "at 25 % of base_steps=24, after 96 samples: schedules did not come to their end" in told


@pytest.mark.slow
def test_a_data_set_that_repeats_is_read_to_the_end_of_the_run(tmp_path):
    class Repeated(Counting):
        def dataset(self):
            numbers = grain.MapDataset.range(NUM_SAMPLES).seed(3).shuffle().repeat()
            return numbers.map(lambda i: {"x": self.data["x"][i], "id": i})

    settings = counting_config(tmp_path, base_steps=12.0)
    stopped_at(Repeated(settings, loop=InStep), 7)
    seen = Recorder()
    state = Repeated(settings, hooks=[seen]).fit()
    counts = np.asarray(
        state.params["count"]
    )  # two epochs, and what was dispatched by then of the third
    assert counts.sum() == seen.of(FitEnd)[0].samples >= 2 * NUM_SAMPLES
    assert set(counts.tolist()) <= {2, 3}
    with pytest.raises(ValueError, match="epochs=2 counts passes.*repeats without end.*base_steps"):
        Repeated(config(tmp_path / "other", epochs=2)).fit()


def test_what_a_stream_cannot_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match="epochs=2 counts passes over the data.*a stream"):
        Stream(config(tmp_path, epochs=2)).fit()

    class Held(Evaluated):
        def eval_dataset(self):
            return Stream(self.config).dataset()

    with pytest.raises(ValueError, match="every sample is taken once.*something with a length"):
        Held(config(tmp_path / "held", evaluation__every_base_steps=1.0)).fit()


def test_a_run_on_a_stream_does_not_go_on_with_another_kind_of_data(tmp_path):
    settings = counting_config(tmp_path, base_steps=20.0)
    stopped_at(Stream(settings, loop=InStep), 3)
    with pytest.raises(WrongWorkdirError, match="has 96 samples instead of no end"):
        Counting(settings).fit()


# -- reads that fail in passing ------------------------------------------------------------------------


class Flaky:
    """The samples of `data`, of which every twentieth, from `first`, is there at the second attempt only."""

    def __init__(self, data, first=16):
        self.data, self.first, self.failed = data, first, set()

    def __len__(self):
        return len(self.data["x"])

    def __getitem__(self, index):
        if index % 20 == self.first and index not in self.failed:
            self.failed.add(index)
            raise TimeoutError("the network is slow")
        return {name: rows[index] for name, rows in self.data.items()}


@pytest.mark.parametrize("readers", [1, 4])
def test_reads_that_fail_in_passing_are_counted_in_the_journal(tmp_path, readers):
    settings = counting_config(tmp_path, epochs=1, execution__readers=readers)
    seen = Recorder()
    trainer = Counting(settings, hooks=[seen], clock=FakeClock())
    trainer.data = Flaky({**rows(), "id": np.arange(NUM_SAMPLES)})
    state = trainer.fit()
    np.testing.assert_array_equal(state.params["count"], 1)
    expected = len(range(16, NUM_SAMPLES, 20))  # the first 16 are read before training, too
    assert seen.of(ReadsRetried)[-1].num_retried == expected
    records = journal.read(tmp_path / journal.FILE_NAME)
    assert journal.of_kind(records, ReadsRetried)[-1].num_retried == expected


@pytest.mark.parametrize("first", [0, 1, 7])
def test_reads_that_fail_in_passing_before_training_keep_no_run_from_starting(tmp_path, first):
    settings = counting_config(tmp_path, epochs=1)
    trainer = Counting(settings, clock=FakeClock())
    trainer.data = Flaky({**rows(), "id": np.arange(NUM_SAMPLES)}, first)
    np.testing.assert_array_equal(trainer.fit().params["count"], 1)


@pytest.mark.slow
def test_an_evaluation_reads_by_threads_and_again(tmp_path):
    class Held(Evaluated):
        def eval_dataset(self) -> Any:
            return Flaky(rows(37, seed=2))

        def summarize(self, outputs):
            self.outputs = outputs
            return {"first": 0.0}

    trainer = Held(config(tmp_path, epochs=1, execution__readers=4), clock=FakeClock())
    trainer.evaluate(trainer.fit())
    np.testing.assert_array_equal(trainer.outputs["first"], rows(37, seed=2)["x"][:, 0])
