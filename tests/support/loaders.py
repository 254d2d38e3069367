"""Data sets and loaders of other libraries, each of numbered samples, and a trainer that counts them.

The libraries are no dependencies of this project; `Loader.needs` names them. To install all:

    pip install torch torchdata webdataset pyarrow datasets tensorflow-datasets tensorflow-cpu
"""

import functools
import importlib
import io
import json
import pathlib
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from numbered import Numbers
from problems import Counting, InStep

from jaxgoodput.data.streams import stream

PASSES = 2
SEEN_ANEW = "returned other samples when it was set back to its beginning"
FROM_BEGINNING = "reads the stream from its beginning, and skips the samples that were used"
OTHER_DATA = "is not the one that it was when the checkpoint"


class Counted(Counting):
    """Counts the samples of a loader, by their field `id`, of files in a folder."""

    def __init__(self, settings, loader, folder, **options):
        super().__init__(settings, loop=InStep, **options)
        self.loader, self.folder = loader, folder

    def dataset(self):
        return self.loader.make(self.folder, self.num_samples)

    def loss(self, params, batch, key):
        return super().loss(params, {**batch, "x": jnp.ones((len(batch["id"]), 4))}, key)


@dataclass(frozen=True)
class Loader:
    """How to make a loader, and what a run on it should do."""

    make: Callable[[pathlib.Path, int], Any]
    """Makes it, of a number of samples, with its files in a folder."""
    times: int = PASSES
    """How often each sample is to come."""
    needs: tuple[str, ...] = ()
    """Modules of other libraries."""
    has_epochs: bool = False
    """Whether it has random access, so that the run's length is a number of epochs."""
    warning: str | None = None
    """Part of what the run must say before its first step; None if there is nothing to say."""
    is_exact: bool = True
    """Whether each sample must come as often as asked, whatever happens."""
    is_refused: bool = False
    """Whether a run on it must be refused when it is resumed in another process."""


def lib(name) -> Any:
    """A module of a library that type checkers need not know."""
    return importlib.import_module(name)


# -- torch and torchdata -------------------------------------------------------------------------------


def torch_loader(folder, num_samples, **options):
    torch = lib("torch")

    def make(number):
        order = torch.Generator().manual_seed(number)
        return torch.utils.data.DataLoader(
            Numbers(num_samples), batch_size=7, shuffle=True, generator=order, **options
        )

    return stream(make, batched=True, passes=PASSES)


def torch_workers(folder, num_samples):
    # To fork a process with JAX's threads may hang.
    return torch_loader(folder, num_samples, num_workers=2, multiprocessing_context="forkserver")


def torch_unseeded(folder, num_samples):
    loader = lib("torch.utils.data").DataLoader(Numbers(num_samples), batch_size=7, shuffle=True)
    return stream(loader, batched=True, passes=PASSES)


def torch_order_of_process(folder, num_samples):
    data = lib("torch.utils.data")
    order = np.random.default_rng().permutation(num_samples).tolist()  # another one in each process
    return stream(data.DataLoader(Numbers(num_samples), batch_size=7, sampler=order), batched=True)


def torch_dataset(folder, num_samples):
    return Numbers(num_samples)


def weighted(folder, num_samples):
    torch = lib("torch")
    data = torch.utils.data

    def make(number):
        order = torch.Generator().manual_seed(number)
        sampler = data.WeightedRandomSampler(
            [1.0] * num_samples, num_samples, replacement=False, generator=order
        )
        return data.DataLoader(Numbers(num_samples), batch_size=7, sampler=sampler)

    return stream(make, batched=True, passes=PASSES)


def torchdata_loader(folder, num_samples, **options):
    loaders = lib("torchdata.stateful_dataloader")
    loader = loaders.StatefulDataLoader(Numbers(num_samples), batch_size=7, **options)
    return stream(loader, batched=True)


def torchdata_shuffled(folder, num_samples):
    return torchdata_loader(folder, num_samples, shuffle=True)


def torchdata_workers(folder, num_samples):
    return torchdata_loader(
        folder, num_samples, shuffle=True, num_workers=2, multiprocessing_context="forkserver"
    )


# -- Hugging Face, webdataset, Parquet -----------------------------------------------------------------


def hugging_face_table(folder, num_samples):
    return lib("datasets").Dataset.from_dict({"id": list(range(num_samples))})


def hugging_face_stream(folder, num_samples):
    return hugging_face_table(folder, num_samples).to_iterable_dataset(num_shards=4)


def hugging_face_shuffled(folder, num_samples):
    return hugging_face_stream(folder, num_samples).shuffle(seed=0, buffer_size=40)


def shards(folder, num_samples):
    """Tar files of 24 samples each."""
    paths = []
    for first in range(0, num_samples, 24):
        paths.append(str(folder / f"{first:04}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for i in range(first, min(first + 24, num_samples)):
                content = json.dumps({"id": i}).encode()
                info = tarfile.TarInfo(f"{i:04}.json")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return paths


def web_dataset(folder, num_samples):
    wds, paths = lib("webdataset"), shards(folder, num_samples)

    def make(number):
        samples = wds.WebDataset(paths, shardshuffle=False).decode()
        return ({"id": one["json"]["id"]} for one in samples)

    return stream(make, passes=PASSES)


def web_dataset_shuffled(folder, num_samples):
    wds, paths = lib("webdataset"), shards(folder, num_samples)

    def make(number):
        samples = wds.WebDataset(paths, shardshuffle=100, seed=number).shuffle(40, seed=number)
        return ({"id": one["json"]["id"]} for one in samples.decode())

    return stream(make, passes=PASSES)


def parquet(folder, num_samples):
    arrow, files = lib("pyarrow"), lib("pyarrow.parquet")
    datasets = lib("pyarrow.dataset")
    files.write_table(arrow.table({"id": np.arange(num_samples)}), folder / "ids.parquet")

    def columns(batch):
        return {n: c.to_numpy() for n, c in zip(batch.schema.names, batch.columns, strict=True)}

    def make(number):
        return map(columns, datasets.dataset(folder / "ids.parquet").to_batches(batch_size=10))

    return stream(make, batched=True, passes=PASSES)


# -- tfds ----------------------------------------------------------------------------------------------


@functools.cache  # tfds keeps a register of classes, which refuses a second one of the same name
def numbered_builder() -> Any:
    tfds = lib("tensorflow_datasets")
    tfds.disable_progress_bar()

    class NumberedSamples(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        num_samples = 0

        def _info(self):
            features = tfds.features.FeaturesDict({"id": np.int32})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": ((i, {"id": i}) for i in range(self.num_samples))}

        def _generate_examples(self):
            raise NotImplementedError  # the split above is its own generator

    return NumberedSamples


def tfds_files(folder, num_samples, file_format):
    """A builder whose files are written, if they are not there yet."""
    builder = numbered_builder()(data_dir=folder / file_format, file_format=file_format)
    builder.num_samples = num_samples
    builder.download_and_prepare()
    return builder


def tfds_data_source(folder, num_samples):
    return tfds_files(folder, num_samples, "array_record").as_data_source(split="train")


def tfds_iterator(folder, num_samples):
    builder = tfds_files(folder, num_samples, "tfrecord")
    as_numpy = lib("tensorflow_datasets").as_numpy

    def make(number):
        return as_numpy(builder.as_dataset(split="train").shuffle(40, seed=number))

    return stream(make, passes=PASSES)


def tfds_reshuffled(folder, num_samples):
    """As many write it: one data set, which shuffles anew whenever it is read."""
    builder = tfds_files(folder, num_samples, "tfrecord")
    shuffled = builder.as_dataset(split="train").shuffle(40, seed=0)
    return stream(lib("tensorflow_datasets").as_numpy(shuffled), passes=PASSES)


# -- NumPy and grain -----------------------------------------------------------------------------------


def memmap(folder, num_samples):
    ids = np.lib.format.open_memmap(folder / "ids.npy", "w+", np.int32, (num_samples,))
    ids[:] = np.arange(num_samples)
    return {"id": ids}


def _numbered(i):
    return {"id": i}


def grain_stream(folder, num_samples):
    return lib("grain").MapDataset.range(num_samples).map(_numbered).to_iter_dataset()


def grain_loader(folder, num_samples):
    """Its source has no `__repr__`, so its state names an address, and another process refuses it."""
    grain = lib("grain")
    order = grain.samplers.IndexSampler(num_samples, shuffle=True, seed=0, num_epochs=1)
    return grain.DataLoader(data_source=Numbers(num_samples), sampler=order, worker_count=0)


TFDS_ITERATOR = ("tensorflow_datasets", "tensorflow")

LOADERS = {
    "torch DataLoader, shuffled": Loader(torch_loader, needs=("torch",)),
    "torch DataLoader, worker processes": Loader(torch_workers, needs=("torch",)),
    "torch DataLoader, without a seed": Loader(
        torch_unseeded, needs=("torch",), warning=SEEN_ANEW, is_exact=False
    ),
    "torch DataLoader, an order drawn per process": Loader(
        torch_order_of_process, times=1, needs=("torch",), is_refused=True
    ),
    "torch Dataset": Loader(torch_dataset, needs=("torch",), has_epochs=True),
    "torch WeightedRandomSampler": Loader(weighted, needs=("torch",)),
    "torchdata StatefulDataLoader": Loader(torchdata_loader, times=1, needs=("torchdata",)),
    "torchdata StatefulDataLoader, shuffled": Loader(
        torchdata_shuffled, times=1, needs=("torchdata",)
    ),
    "torchdata StatefulDataLoader, worker processes": Loader(
        torchdata_workers, times=1, needs=("torchdata",)
    ),
    "Hugging Face Dataset": Loader(hugging_face_table, needs=("datasets",), has_epochs=True),
    "Hugging Face IterableDataset": Loader(hugging_face_stream, times=1, needs=("datasets",)),
    "Hugging Face IterableDataset, shuffled": Loader(
        hugging_face_shuffled, times=1, needs=("datasets",), warning=FROM_BEGINNING
    ),
    "webdataset": Loader(web_dataset, needs=("webdataset",)),
    "webdataset, shuffled": Loader(web_dataset_shuffled, needs=("webdataset",)),
    "Parquet by pyarrow": Loader(parquet, needs=("pyarrow",)),
    "tfds data source": Loader(tfds_data_source, needs=("tensorflow_datasets",), has_epochs=True),
    "tfds as_numpy, shuffled": Loader(tfds_iterator, needs=TFDS_ITERATOR),
    "tfds as_numpy, one dataset shuffled anew": Loader(
        tfds_reshuffled, needs=TFDS_ITERATOR, warning=SEEN_ANEW, is_exact=False
    ),
    "NumPy memmap": Loader(memmap, has_epochs=True),
    "grain IterDataset": Loader(grain_stream, times=1, needs=("grain",)),
    "grain DataLoader": Loader(grain_loader, times=1, needs=("grain",), warning=FROM_BEGINNING),
}
