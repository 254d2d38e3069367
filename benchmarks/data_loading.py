"""Measures the cost of samples before they are on the device: their order, and reading by threads.

python benchmarks/data_loading.py
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import statistics
import time
import tracemalloc
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgoodput.clock import SystemClock
from jaxgoodput.data.cursor import Cursor, Permutations, take
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.loader import Loader
from jaxgoodput.goodput.search import BatchConfig

BATCH, SIZES = 8192, (10**6, 10**8, 10**9, 2**63 - 1)
READ_S, READERS = 0.005, 16
ROUNDS = 5


class Waiting:
    """Samples that wait for a disk."""

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        time.sleep(READ_S)
        return {"x": np.full(64, index, np.float32)}


def order(size: int) -> tuple[float, float, int]:
    """The median and the longest of 200 batches of indices, ms, and the peak of their memory, bytes."""
    cursor, times, permutations = Cursor(seed=0, epoch=1, offset=size // 2), [], Permutations()
    for _ in range(200):
        start_s = time.perf_counter()
        _, cursor = take(cursor, size, BATCH, permutations=permutations)
        times.append((time.perf_counter() - start_s) * 1e3)
    tracemalloc.start()
    take(cursor, size, BATCH, permutations=permutations)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return statistics.median(times), max(times), peak


def rate(dataset: Any, num_readers: int, micro_batch_size: int, num_samples: int) -> float:
    """Samples per second through a loader, from when the first batch is there."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    config = BatchConfig(micro_batch_size=micro_batch_size, num_micro_batches=1, num_replicas=1)
    with Loader(
        as_source(dataset),
        sharding=NamedSharding(mesh, PartitionSpec("data")),
        cursor=Cursor(seed=0),
        clock=SystemClock(),
        num_readers=num_readers,
    ) as loader:
        count = 0
        for _ in range(4):
            loader.next(config)
        start_s = time.perf_counter()
        while count < num_samples:
            batch = loader.next(config)
            assert batch is not None
            count += batch.num_samples
        return count / (time.perf_counter() - start_s)


def main() -> None:
    print(f"indices of {BATCH} samples: median and longest ms of 200, peak KiB")
    for size in SIZES:
        median, longest, peak = order(size)
        print(f"{size:>20} {median:8.3f} {longest:8.3f} {peak / 1024:8.0f}")
    print(f"reads of {READ_S * 1e3:g} ms: samples/s, medians of {ROUNDS}, range of ratios")
    print(f"{'micro-batch':>20} {'1 reader':>9} {READERS:>5} readers  / ({READERS} x 1)")
    for size in (8, 20, 64):
        ones = [rate(Waiting(), 1, size, 100) for _ in range(ROUNDS)]
        many = [rate(Waiting(), READERS, size, 1600) for _ in range(ROUNDS)]
        shares = sorted(b / (READERS * a) for a, b in zip(ones, many, strict=True))
        print(
            f"{size:>20} {statistics.median(ones):9.1f} {statistics.median(many):13.1f}  "
            f"{statistics.median(shares):.2f} ({shares[0]:.2f}-{shares[-1]:.2f})"
        )
    images = np.random.default_rng(0).integers(0, 255, (1000, 32, 32, 3), np.uint8)
    flipped = (
        grain.MapDataset.source(list(images))
        .seed(0)
        .random_map(lambda x, rng: x[:, ::-1] if rng.random() < 0.5 else x)
    )
    print("a grain MapDataset in memory, micro-batch 64: samples/s")
    for count in (1, READERS):
        rates = [rate(flipped, count, 64, 4000) for _ in range(ROUNDS)]
        print(f"{count:>12} readers {statistics.median(rates):9.0f}")


if __name__ == "__main__":
    main()
