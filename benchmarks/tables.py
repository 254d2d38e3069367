"""Measures tables larger than the device: the store on disk, training through the tiers, memory, quality.

python benchmarks/tables.py                    store, throughput, stall, lookahead: ten minutes
python benchmarks/tables.py --only large       100 M rows; 20 GB of disk under --folder; --minutes 10
python benchmarks/tables.py --only recommender the recommender of the examples, dense and with tables
python benchmarks/tables.py --only quality     its AUC, from the same rows on the same batches
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import dataclasses
import importlib
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import jaxgoodput as jg
from jaxgoodput._hash import mixed
from jaxgoodput.embedding.optimizers import Adagrad
from jaxgoodput.embedding.pipeline import Pipeline
from jaxgoodput.embedding.step import row_step
from jaxgoodput.embedding.store import RowStore
from jaxgoodput.embedding.table import TieredTable

STORE_ROWS, STORE_BATCH, STORE_WORDS = 2_000_000, 100_000, 32  # 64 floats
NUM_ROWS, DIM, SAMPLES, READS = 1_000_000, 16, 8192, 8
STEPS, WARM = 120, 40


def milliseconds(run: Callable[[], Any]) -> float:
    """How long a call takes."""
    start_s = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start_s)


def told(name: str, run: Callable[[Any], Any], arguments: Iterable[Any]) -> None:
    """The median of calls, the middle half, and of the processor's time, which other work takes less from."""
    wall, own = [], []
    for argument in arguments:
        start_s, start_own_s = time.perf_counter(), time.thread_time()
        run(argument)
        wall.append(1e3 * (time.perf_counter() - start_s))
        own.append(1e3 * (time.thread_time() - start_own_s))
    low, _, high = statistics.quantiles(wall, n=4)
    print(
        f"  {name:34} {statistics.median(wall):8.1f} ms   middle half {low:.1f} to {high:.1f}, least "
        f"{min(wall):.1f}   processor {statistics.median(own):.1f}",
        flush=True,
    )


# -- the store ---------------------------------------------------------------------------------------


def store(folder: pathlib.Path) -> None:
    """Batches of unique random ids, got and put, beside what the disk and another store take for them."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**63, (STORE_BATCH, STORE_WORDS), dtype=np.uint64)
    every = rng.permutation(STORE_ROWS)
    batches = [rng.permutation(STORE_ROWS)[:STORE_BATCH] for _ in range(30)]
    print(f"store: {STORE_ROWS:,} rows of {8 * STORE_WORDS} bytes, {STORE_BATCH:,} ids at once")
    # A virtual machine may have to be given memory for pages that were never used: not what is measured.
    (folder / "warm").write_bytes(bytes(3 * STORE_ROWS * 8 * STORE_WORDS))
    (folder / "warm").unlink()
    with open(folder / "plain", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 30 * rows.nbytes)
        view = rows.data.cast("B")
        told(
            "plain pwrite of as many bytes",
            lambda i: os.pwrite(file.fileno(), view, i * len(view)),
            range(30),
        )
    (folder / "plain").unlink()
    table = rng.integers(0, 2**63, (STORE_ROWS, STORE_WORDS), dtype=np.uint64)
    told("numpy take from memory", lambda ids: table.take(ids, axis=0), batches)
    del table
    for name, num_ids in (("any ids (hash index)", None), ("ids below 2 M", STORE_ROWS)):
        with RowStore(
            folder / name.replace(" ", "_"), row_bytes=8 * STORE_WORDS, num_ids=num_ids
        ) as it:
            start_s = time.perf_counter()
            for some in every.reshape(-1, STORE_BATCH):
                it.put(some, rows)
            print(f"  {name}: all put in {time.perf_counter() - start_s:.2f} s")
            it.commit()
            told("get, warm", it.get, batches)
            told("put", partial(_put, it, rows), batches)
            for ids in batches * 3:
                it.put(ids, rows)
            took_ms = milliseconds(it.commit)
            while it.compact():
                pass
            it.commit()
            it.commit()
            size = sum(path.stat().st_size for path in it.folder.glob("*.rows"))
            print(
                f"  commit {took_ms:.0f} ms; write amplification {it.traffic.write_amplification:.2f}; on "
                f"disk {size / 2**20:.0f} MiB for {STORE_ROWS * 8 * STORE_WORDS / 2**20:.0f} of rows"
            )
        shutil.rmtree(it.folder)
    try:
        rocksdict: Any = importlib.import_module("rocksdict")
    except ImportError:
        print("  rocksdict is not installed: pip install rocksdict")
        return
    options = rocksdict.Options(raw_mode=True)
    other = rocksdict.Rdict(str(folder / "rocks"), options)
    without = rocksdict.WriteOptions()
    without.disable_wal = True
    other.set_write_options(without)

    def put(ids: np.ndarray) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        keys, values = ids.astype(">u8").tobytes(), rows.tobytes()
        width = 8 * STORE_WORDS
        for i in range(len(ids)):
            batch.put(keys[8 * i : 8 * i + 8], values[width * i : width * i + width])
        other.write(batch)

    def get(ids: np.ndarray) -> np.ndarray:
        keys = ids.astype(">u8").tobytes()
        found = other[[keys[8 * i : 8 * i + 8] for i in range(len(ids))]]
        return np.frombuffer(b"".join(found), np.uint64)

    for some in every.reshape(-1, STORE_BATCH):
        put(some)
    told("rocksdict get, without its log", get, batches[:10])
    told("rocksdict put, without its log", put, batches[:10])
    other.close()


def _put(it: RowStore, rows: np.ndarray, ids: np.ndarray) -> None:
    it.put(ids, rows)


# -- training ----------------------------------------------------------------------------------------


def power_law(num_rows: int, count: int, rng: np.random.Generator, exponent: float) -> np.ndarray:
    """Ids of which the k-th most frequent is drawn in proportion to k^-exponent; spread over all numbers."""
    u = rng.random(count)
    if exponent == 1.0:
        rank = np.exp(u * np.log(num_rows))
    else:
        power = 1 - exponent
        rank = (1 + u * (num_rows**power - 1)) ** (1 / power)
    rank = np.minimum(rank.astype(np.int64) - 1, num_rows - 1)
    return (mixed(rank) % np.uint64(num_rows)).astype(np.int64)


def stream(
    num_batches: int, num_rows: int = NUM_ROWS, exponent: float = 1.05
) -> Iterator[dict[str, Any]]:
    """Batches that are drawn when they are asked for."""
    rng = np.random.default_rng(0)
    for _ in range(num_batches):
        ids = power_law(num_rows, SAMPLES * READS, rng, exponent).reshape(SAMPLES, READS)
        yield {"ids": ids, "label": (ids.sum(1) % 3 == 0).astype(np.float32)}


def parameters(dim: int = DIM) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (READS * dim, 64, 32, 1)
    return {
        f"layer{i}": jax.random.normal(key, (sizes[i], sizes[i + 1])) / sizes[i] ** 0.5
        for i, key in enumerate(keys)
    }


def loss(params: Any, rows: dict[str, Any], batch: Any) -> Any:
    """Two hidden layers over the embeddings of a sample."""
    x = rows["t"].reshape(SAMPLES, -1)
    x = jax.nn.relu(x @ params["layer0"])
    x = jax.nn.relu(x @ params["layer1"])
    logits = (x @ params["layer2"])[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).mean()


def tiered_rate(
    folder: pathlib.Path, batches: list[Any], share: float, ram_share: float, depth: int
) -> tuple[float, Any]:
    """Samples per second of a table with this share of its rows on the device, and its counts."""
    with TieredTable(
        folder,
        dim=DIM,
        optimizer=Adagrad(0.05),
        num_rows=NUM_ROWS,
        device_rows=int(share * NUM_ROWS),
        ram_rows=int(ram_share * NUM_ROWS),
    ) as table:
        tx, params = optax.sgd(0.01), parameters()
        state = tx.init(params)
        step = jax.jit(row_step(loss, {"t": table}, tx), donate_argnums=(0, 1, 2))
        times, value = [], None
        with Pipeline(
            {"t": table}, iter(batches), lambda b: {"t": b["ids"]}, depth=depth
        ) as pipeline:
            for placed in pipeline:
                batch = {"label": placed.batch["label"]}
                slots, params, state, value = step(
                    placed.slots, params, state, placed.lookups, batch
                )
                pipeline.trained(slots)
                jax.block_until_ready(value)
                times.append(time.perf_counter())
        counts = table.counts
    shutil.rmtree(folder)
    return SAMPLES * (len(times) - 1 - WARM) / (times[-1] - times[WARM]), counts


def dense_rate(batches: list[Any]) -> float:
    """Samples per second of a table that is a parameter, with an optimizer that passes over all of it."""
    tx = optax.adagrad(0.05)
    params = {**parameters(), "table": 0.01 * jax.random.normal(jax.random.key(1), (NUM_ROWS, DIM))}
    state = tx.init(params)

    @jax.jit
    def plain(params: Any, state: Any, batch: Any) -> Any:
        def of(params: Any) -> Any:
            return loss(params, {"t": params["table"][batch["ids"]]}, batch)

        value, grads = jax.value_and_grad(of)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    step = jax.jit(plain, donate_argnums=(0, 1))
    times = []
    for batch in batches:
        batch = {"ids": batch["ids"].astype(np.int32), "label": batch["label"]}
        params, state, value = step(params, state, batch)
        jax.block_until_ready(value)
        times.append(time.perf_counter())
    return SAMPLES * (len(times) - 1 - WARM) / (times[-1] - times[WARM])


def throughput(folder: pathlib.Path) -> None:
    """A device cache of a tenth of the rows beside tables that are in memory as a whole, in turns."""
    batches = list(stream(STEPS))
    print(
        f"throughput: {NUM_ROWS:,} rows x {DIM}, Adagrad, {SAMPLES} samples of {READS} power-law ids"
    )
    found: dict[str, list[float]] = {}
    counts = None
    for _ in range(3):
        rates = {"dense parameter, optax": dense_rate(batches)}
        rates["all rows in slots"], _ = tiered_rate(folder / "t", batches, 1.0, 0, 1)
        rates["a tenth in slots, RAM holds the rest"], _ = tiered_rate(
            folder / "t", batches, 0.1, 1.0, 1
        )
        rates["a tenth in slots, a tenth in RAM"], counts = tiered_rate(
            folder / "t", batches, 0.1, 0.1, 1
        )
        rates["the same without threads"], _ = tiered_rate(folder / "t", batches, 0.1, 0.1, 0)
        for name, rate in rates.items():
            found.setdefault(name, []).append(rate)
    base = found["dense parameter, optax"]
    for name, rates in found.items():
        ratios = sorted(a / b for a, b in zip(rates, base, strict=True))
        shown = ", ".join(f"{x:.2f}" for x in ratios)
        print(f"  {name:38} {statistics.median(rates):9,.0f} samples/s   of the dense: {shown}")
    print(f"  {counts}")


def sleeping(
    folder: pathlib.Path, seconds: float, look_ahead: int, num_batches: int, depth: int = 1
) -> tuple[Any, Any]:
    """Batches through the tiers with a step that only takes its time, like one on a device of its own."""
    batches = list(stream(num_batches))
    with TieredTable(
        folder,
        dim=DIM,
        optimizer=Adagrad(0.05),
        num_rows=NUM_ROWS,
        device_rows=150_000,
        ram_rows=200_000,
    ) as table:
        with Pipeline(
            {"t": table},
            iter(batches),
            lambda b: {"t": b["ids"]},
            look_ahead=look_ahead,
            depth=depth,
        ) as pipeline:
            start_s = 0.0
            for placed in pipeline:
                if placed.number == WARM:
                    pipeline.times.stalled_s = table.counts.waited_s = table.counts.waits = 0
                    start_s = time.perf_counter()
                time.sleep(seconds)
                pipeline.trained(placed.slots)
            total_s = time.perf_counter() - start_s
        times = pipeline.times
    shutil.rmtree(folder)
    return (times.stalled_s / total_s, times), table.counts


def stall(folder: pathlib.Path) -> None:
    """The share of the time that a device of this speed waits for the other stages."""
    print("stall: share of the time that the training waits, by the length of its step")
    for step_ms in (10, 20, 40, 80, 160):
        (share, times), _ = sleeping(
            folder / "t", step_ms / 1e3, look_ahead=5, num_batches=WARM + 60
        )
        busy = ", ".join(
            f"{n} {1e3 * s / times.num_batches:.1f}"
            for n, s in times.busy_s.items()
            if n != "train"
        )
        print(f"  {step_ms:4} ms   {100 * share:5.1f} %   at work per batch, ms: {busy}")


def lookahead(folder: pathlib.Path) -> None:
    """What batches wait for rows that others evict."""
    print("look-ahead: waits for rows that are just being evicted, 100 batches, steps of 50 ms")
    for batches in (0, 1, 3, 5):
        _, counts = sleeping(folder / "t", 0.05, look_ahead=batches, num_batches=WARM + 100)
        print(f"  {batches}: {counts.waits} waits, {1e3 * counts.waited_s / 100:.2f} ms a batch")


# -- more rows than memory ---------------------------------------------------------------------------


def memory_mb() -> dict[str, int]:
    """Memory of this process: its own, and pages of files that it has mapped, which the kernel may drop."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    kinds = {"RssAnon": "own", "RssFile": "mapped files"}
    return {
        kinds[name]: int(text.split()[0]) // 1024
        for name, _, text in (line.partition(":") for line in lines)
        if name in kinds
    }


def large(folder: pathlib.Path, num_rows: int, minutes: float) -> None:
    """A table of which every row is on the disk, trained with tiers that hold 2 % of it."""
    dim = 8  # and as many numbers of Adagrad: 64 bytes
    before = memory_mb()
    with TieredTable(
        folder / "large",
        dim=dim,
        optimizer=Adagrad(0.05),
        num_rows=num_rows,
        device_rows=500_000,
        ram_rows=1_500_000,
        segment_bytes=2**26,
    ) as table:
        start_s = time.perf_counter()
        for first in range(0, num_rows, 2**17):
            ids = np.arange(first, min(first + 2**17, num_rows))
            table.store.put(ids, table.initial(ids).view(np.uint64))
        table.save()
        size = sum(path.stat().st_size for path in table.store.folder.glob("*.rows"))
        print(
            f"{num_rows:,} rows put in {time.perf_counter() - start_s:.0f} s, {size / 1e9:.1f} GB on disk"
        )
        print(f"memory before the table {before}, now {memory_mb()}", flush=True)
        tx, params = optax.sgd(0.01), parameters(dim)
        state = tx.init(params)
        step = jax.jit(row_step(loss, {"t": table}, tx), donate_argnums=(0, 1, 2))
        start_s = last_s = time.perf_counter()
        batches = stream(10**9, num_rows, exponent=0.9)
        with Pipeline({"t": table}, batches, lambda b: {"t": b["ids"]}) as pipeline:
            for placed in pipeline:
                batch = {"label": placed.batch["label"]}
                slots, params, state, value = step(
                    placed.slots, params, state, placed.lookups, batch
                )
                pipeline.trained(slots)
                now_s = time.perf_counter()
                if now_s - last_s > 30:
                    jax.block_until_ready(value)
                    rate = SAMPLES * (placed.number + 1) / (now_s - start_s)
                    print(
                        f"  {now_s - start_s:4.0f} s   {memory_mb()} MB   {rate:,.0f} samples/s   "
                        f"write amplification {table.store.traffic.write_amplification:.2f}",
                        flush=True,
                    )
                    last_s = now_s
                if now_s - start_s > 60 * minutes:
                    break
        print(f"  {table.counts}")
        save_ms = milliseconds(table.save)
        print(f"  saved in {save_ms / 1e3:.1f} s")
    shutil.rmtree(folder / "large")


# -- quality -----------------------------------------------------------------------------------------


def recommender(folder: pathlib.Path, sides: list[str], batches: list[int], seeds: int) -> None:
    """The recommender of the examples until its test AUC is reached, dense and with tables, by turns.

    Batch 0 is chosen by the Trainer. Ratios are formed within a seed; evaluations are not counted.
    """
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
    import tiered_recsys

    print(f"recommender: seconds to a test AUC of {tiered_recsys.TARGET_AUC}, by the Trainer")
    for batch in batches:
        took: dict[str, list[float]] = {side: [] for side in sides}
        for seed in range(seeds):
            for side in sides if seed % 2 else reversed(sides):
                seconds, samples, auc = _to_target(tiered_recsys, folder / "t", side, batch, seed)
                took[side].append(seconds)
                what = f"batch {batch}" if batch else "adaptive"
                print(
                    f"  {what:12} seed {seed}  {side:34} {seconds:6.1f} s   {samples:9,} samples   "
                    f"AUC {auc:.4f}",
                    flush=True,
                )
        first = sides[0]
        for side in sides[1:]:
            ratios = [a / b for a, b in zip(took[side], took[first], strict=True)]
            print(f"  {side} over {first}: {statistics.median(ratios):.2f}", flush=True)


def quality(folder: pathlib.Path) -> None:
    """The recommender of the examples, dense and with tiers, from the same rows and on the same batches."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
    import tiered_recsys

    found = {}
    for side in (SLOTS, TENTH, DENSE):
        config = tiered_recsys.default_config(str(folder / "t"))
        config = jg.with_overrides(
            config, ["reporting.tensorboard=false", "reporting.progress=false", 'policy="fixed"']
        )
        limits = dataclasses.replace(config.batch, base=2048, sizes=(2048,))
        evaluation = dataclasses.replace(config.evaluation, every_base_steps=None)
        config = dataclasses.replace(config, batch=limits, evaluation=evaluation, base_steps=500.0)
        share = 0.1 if side == TENTH else 1.0
        rows = tiered_recsys.TieredRecommender(config, device_share=share, ram_share=share)
        trainer: jg.Trainer = rows
        if side == DENSE:
            with rows.tables()["rows"].open() as table:
                initial = {"tables": table.read(np.arange(rows.num_rows))}
            shutil.rmtree(folder / "t")
            dense = tiered_recsys.Recommender
            trainer = dense(config, devices=jax.devices()[:1], initial=initial)
        state = trainer.fit()
        found[side] = trainer.evaluate(state)["auc"]
        shutil.rmtree(folder / "t")
        samples = 2048 * int(state.step)
        print(f"  {side:34} AUC {found[side]:.4f} after {samples:,} samples", flush=True)


SIDES = DENSE, SLOTS, TENTH = (
    "dense parameter",
    "all rows in slots",
    "a tenth in slots, a tenth in RAM",
)


def _to_target(
    example: Any, folder: pathlib.Path, side: str, batch: int, seed: int
) -> tuple[float, int, float]:
    """Seconds of training until the AUC is reached, samples taken by then, and the AUC."""
    config = example.default_config(str(folder))
    reporting = dataclasses.replace(config.reporting, tensorboard=False, progress=False)
    tuning = dataclasses.replace(config.tuning, remember=False)
    config = dataclasses.replace(config, reporting=reporting, tuning=tuning, seed=seed)
    if batch:
        limits = dataclasses.replace(config.batch, max=max(batch, 512), sizes=(512, batch))
        config = dataclasses.replace(config, batch=limits, policy={0: batch})
    clock = _UntilAuc(example.TARGET_AUC)
    one = {"hooks": [clock], "devices": jax.devices()[:1]}
    if side == DENSE:
        trainer = example.Recommender(config, **one)
    else:
        share = 0.1 if side == TENTH else 1.0
        trainer = example.TieredRecommender(config, device_share=share, ram_share=share, **one)
    clock.trainer = trainer
    trainer.fit()
    shutil.rmtree(folder)
    return clock.seconds, clock.samples, clock.auc


class _UntilAuc:
    """Ends a run at its target, and knows how long it took from the first step on, without evaluations."""

    def __init__(self, target: float):
        self.target = target
        self.trainer: Any = None
        self.began_s = self.evaluated_s = self.seconds = self.auc = 0.0
        self.samples = 0

    def on_step_end(self, event: Any) -> None:
        """The clock runs from the end of the first step."""
        self.began_s = self.began_s or event.at_s
        self.samples = event.samples

    def on_eval_end(self, event: Any) -> None:
        """Ends the run where it is good enough."""
        self.seconds = event.at_s - event.seconds - self.began_s - self.evaluated_s
        self.evaluated_s += event.seconds
        self.auc = event.metrics["auc"]
        if self.auc >= self.target:
            self.trainer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        choices=["store", "throughput", "stall", "lookahead", "large", "recommender", "quality"],
    )
    parser.add_argument(
        "--folder", help="on the disk that is to be measured; default: the temporary folder"
    )
    parser.add_argument("--rows", type=int, default=100_000_000, help="of the large table")
    parser.add_argument("--minutes", type=float, default=10.0, help="that the large table trains")
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[0], help="of the recommender; 0: adaptive"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of the recommender")
    parser.add_argument(
        "--tiers", action="store_true", help="of the recommender: with tiers as well"
    )
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as path:
        folder = pathlib.Path(path)
        if flags.only == "large":
            return large(folder, flags.rows, flags.minutes)
        if flags.only == "recommender":
            sides = [side for side in SIDES if flags.tiers or side != TENTH]
            return recommender(folder, sides, flags.batches, flags.seeds)
        if flags.only == "quality":
            return quality(folder)
        for run in (store, throughput, stall, lookahead):
            if flags.only in (None, run.__name__):
                run(folder)


if __name__ == "__main__":
    main()
