"""Loaders of other libraries: every sample as often as asked, over restarts and other devices.

The libraries are no dependencies of this project. To test with them:

    pip install torch torchdata webdataset pyarrow datasets
    pytest -m "nightly or not nightly" tests/train/test_loaders.py
"""

import importlib
import io
import json
import tarfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from numbered import NUM_SAMPLES, Numbers
from problems import Counting, InStep, Recorder, counting_config

from jaxgoodput.data.streams import stream
from jaxgoodput.observe.events import FitEnd
from jaxgoodput.train.control import Preempted

# webdataset leaves its files to the garbage collector.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
]

PASSES = 2


class Counted(Counting):
    """Counts the samples of whatever `made` makes of a folder, by their field `id`."""

    def __init__(self, settings, made, folder, **options):
        super().__init__(settings, loop=InStep, **options)
        self.made, self.folder = made, folder

    def dataset(self):
        return self.made(self.folder)

    def loss(self, params, batch, key):
        return super().loss(params, {**batch, "x": jnp.ones((len(batch["id"]), 4))}, key)


def lib(name) -> Any:
    """A library, or the test is skipped."""
    pytest.importorskip(name.split(".")[0], reason=f"{name} is not installed")
    return importlib.import_module(name)


def torch_loader(folder, **options):
    torch = lib("torch")

    def make(number):
        order = torch.Generator().manual_seed(number)
        return torch.utils.data.DataLoader(
            Numbers(), batch_size=7, shuffle=True, generator=order, **options
        )

    return stream(make, batched=True, passes=PASSES)


def torch_workers(folder):
    # To fork a process with JAX's threads may hang.
    return torch_loader(folder, num_workers=2, multiprocessing_context="forkserver")


def torch_dataset(folder):
    lib("torch")
    return Numbers()  # two epochs, by their own orders


def torchdata_loader(folder):
    loaders = lib("torchdata.stateful_dataloader")
    return stream(loaders.StatefulDataLoader(Numbers(), batch_size=7), batched=True)


def weighted(folder):
    torch = lib("torch")
    data = torch.utils.data

    def make(number):
        order = torch.Generator().manual_seed(number)
        sampler = data.WeightedRandomSampler(
            [1.0] * NUM_SAMPLES, NUM_SAMPLES, replacement=False, generator=order
        )
        return data.DataLoader(Numbers(), batch_size=7, sampler=sampler)

    return stream(make, batched=True, passes=PASSES)


def hugging_face_table(folder):
    return lib("datasets").Dataset.from_dict({"id": list(range(NUM_SAMPLES))})


def hugging_face_stream(folder):
    table = lib("datasets").Dataset.from_dict({"id": list(range(NUM_SAMPLES))})
    return table.to_iterable_dataset(num_shards=4)


def web_dataset(folder):
    wds = lib("webdataset")
    shards = []
    for first in range(0, NUM_SAMPLES, 24):
        shards.append(str(folder / f"{first:04}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for i in range(first, first + 24):
                content = json.dumps({"id": i}).encode()
                info = tarfile.TarInfo(f"{i:04}.json")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))

    def make(number):
        samples = wds.WebDataset(shards, shardshuffle=False).decode()
        return ({"id": one["json"]["id"]} for one in samples)

    return stream(make, passes=PASSES)


def parquet(folder):
    arrow, files = lib("pyarrow"), lib("pyarrow.parquet")
    datasets = lib("pyarrow.dataset")
    files.write_table(arrow.table({"id": np.arange(NUM_SAMPLES)}), folder / "ids.parquet")

    def columns(batch):
        return {n: c.to_numpy() for n, c in zip(batch.schema.names, batch.columns, strict=True)}

    def make(number):
        return map(columns, datasets.dataset(folder / "ids.parquet").to_batches(batch_size=10))

    return stream(make, batched=True, passes=PASSES)


def memmap(folder):
    ids = np.lib.format.open_memmap(folder / "ids.npy", "w+", np.int32, (NUM_SAMPLES,))
    ids[:] = np.arange(NUM_SAMPLES)
    return {"id": ids}


def grain_stream(folder):
    return lib("grain").MapDataset.range(NUM_SAMPLES).map(lambda i: {"id": i}).to_iter_dataset()


# What each is, and how often each sample is to come.
LOADERS = {
    "torch DataLoader, shuffled": (torch_loader, PASSES),
    "torch DataLoader, worker processes": (torch_workers, PASSES),
    "torch Dataset": (torch_dataset, 2),
    "torchdata StatefulDataLoader": (torchdata_loader, 1),
    "torch WeightedRandomSampler": (weighted, PASSES),
    "Hugging Face Dataset": (hugging_face_table, 2),
    "Hugging Face IterableDataset": (hugging_face_stream, 1),
    "webdataset": (web_dataset, PASSES),
    "Parquet by pyarrow": (parquet, PASSES),
    "NumPy memmap": (memmap, 2),
    "grain IterDataset": (grain_stream, 1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_sample_comes_as_often_as_asked(name, tmp_path, monkeypatch):
    made, times = LOADERS[name]
    said = []
    monkeypatch.setattr(logging, "warning", lambda m, *values: said.append(m % values))
    has_epochs = made in (torch_dataset, hugging_face_table, memmap)
    length = {"epochs": 2} if has_epochs else {"base_steps": 1000.0}
    settings = counting_config(tmp_path / "run", **length)

    def trainer(num_devices, then=None):
        seen = Recorder(then)
        devices = jax.devices()[:num_devices]
        return Counted(settings, made, tmp_path, devices=devices, hooks=[seen]), seen

    for end, num_devices in ((1, 1), (3, 4), (4, 2)):
        one, seen = trainer(num_devices)
        seen._then = lambda e, end=end, one=one: e.step == end and one.request_stop()
        with pytest.raises(Preempted):
            one.fit()
    last, seen = trainer(1)
    np.testing.assert_array_equal(last.fit().params["count"], times)
    assert seen.of(FitEnd)[0].samples == times * NUM_SAMPLES
    assert not [one for one in said if "samples when it was set back" in one]
