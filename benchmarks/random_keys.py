"""Compares losses with dropout and augmentation, over every way to split a batch and to run a job.

    python benchmarks/random_keys.py                     # about 8 minutes
    python benchmarks/random_keys.py --only "3 processes"

Each row is a job of its own: two layers with dropout, on samples that are shifted at random, 63 updates of 24
samples, the last one of 18. A figure is the largest difference of a step's loss, as a share of the loss.

The first column has a key for each micro-batch on each replica (the default), and compares with one process
that has as many replicas and the same micro-batches; the second compares the same run with one device. The
last has `keys="sample"`, and compares with one device. The exit code is 1 if a figure of the first or the
last column is above 1e-6. The first has none if hosts come and go, which changes the replicas, or with
leases, which change who computes a micro-batch.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/support"))

from processes import Job

AT_MOST = 1e-6
SECRET = "of a benchmark"
WIDTH, BASE, NUM_SAMPLES, EPOCHS = 16, 24, 251, 6
NUM_STEPS = -(-EPOCHS * NUM_SAMPLES // BASE)  # four replicas have to pad the last one
LIMIT_S = 600.0
SPLIT = ("batch.micro=[1, 3]", "tuning.accumulate=true")
LEASES = ("batch.micro=[1, 2]", "tuning.accumulate=true", "execution.leases=true")
ONE = "1 device"


@dataclass(frozen=True)
class Way:
    """How a job runs."""

    processes: int = 1
    devices: int = 1
    """Devices of each process."""
    settings: Sequence[str] = ()
    like: str | None = None
    """The row that has as many replicas and the same micro-batches in one process."""
    script: str = "fixed"
    """What happens to the job: a name in `SCRIPTS`."""


WAYS = {
    ONE: Way(like=ONE),
    "2 devices": Way(devices=2, like="2 devices"),
    "4 devices": Way(devices=4, like="4 devices"),
    "3 devices": Way(devices=3, like="3 devices"),
    "1 device, micro-batches of at most 3": Way(
        settings=SPLIT, like="1 device, micro-batches of at most 3"
    ),
    "2 devices, micro-batches of at most 3": Way(
        devices=2, settings=SPLIT, like="2 devices, micro-batches of at most 3"
    ),
    "2 devices, one loss for all rows": Way(devices=2, settings=("loss=global",), like=ONE),
    "2 processes": Way(2, 1, like="2 devices"),
    "2 processes, micro-batches of at most 3": Way(
        2, 1, SPLIT, "2 devices, micro-batches of at most 3"
    ),
    "2 processes of 2 devices": Way(2, 2, like="4 devices"),
    "3 processes": Way(3, 1, like="3 devices"),
    "stopped in 3 processes, resumed in 2": Way(script="resumed"),
    "3 hosts that may come and go": Way(3, 1, like="3 devices", script="hosts"),
    "3 hosts, leases": Way(3, 1, LEASES, script="hosts"),
    "1 host, then 3, then 2": Way(script="resized"),
    "1 host, then 3, then 2, leases": Way(settings=LEASES, script="resized"),
}


# -- the job -----------------------------------------------------------------------------------------


def train(out: pathlib.Path, settings: Sequence[str]) -> None:
    """Train, and write each step's loss; with `paced=S`, reads take S seconds until there is "hurry"."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxgoodput as jg
    from jaxgoodput.data.sources import ArraySource

    paces = [float(x.partition("=")[2]) for x in settings if x.startswith("paced=")]
    pace_s = sum(paces)

    class Paced(ArraySource):
        def batch(self, indices: Any) -> Any:
            if not (out / "hurry").exists():
                time.sleep(pace_s)
            return super().batch(indices)

    class Dropped(jg.Trainer):
        def init(self, key: Any) -> Any:
            first, second = jax.random.split(key)
            return {
                "up": jax.random.normal(first, (WIDTH, 2 * WIDTH)) / 4,
                "down": jax.random.normal(second, (2 * WIDTH,)) / 6,
            }

        def loss(self, params: Any, batch: Any, key: Any) -> Any:
            if self.config.keys != "sample":
                key = jax.random.split(key, len(batch["x"]))
            return jax.vmap(partial(self.of_one, params))(batch["x"], batch["y"], key)

        def of_one(self, params: Any, x: Any, y: Any, key: Any) -> Any:
            first, second = jax.random.split(key)
            x = jnp.roll(x, jax.random.randint(first, (), 0, 3))
            hidden = jnp.tanh(x @ params["up"])
            kept = jax.random.bernoulli(second, 0.8, hidden.shape)
            return (jnp.where(kept, hidden / 0.8, 0) @ params["down"] - y) ** 2

        def optimizer(self) -> Any:
            return optax.sgd(0.01)  # rounding does not grow

        def dataset(self) -> Any:
            x = np.random.default_rng(0).normal(size=(NUM_SAMPLES, WIDTH)).astype(np.float32)
            return Paced({"x": x, "y": 3 + x[:, :4].sum(axis=1)})

    class Losses(jg.Hook):
        def on_step_end(self, event: Any, /) -> None:
            line = {"step": event.step, "loss": event.metrics["loss"]}
            with (out / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    config = jg.Config(
        workdir=str(out / "run"),
        batch=jg.BatchLimits(base=BASE, max=BASE),
        policy="fixed",
        epochs=EPOCHS,
        reporting=jg.Reporting(tensorboard=False, progress=False),
    )
    own = [x for x in settings if not x.startswith("paced=")]
    Dropped(jg.with_overrides(config, own), hooks=[Losses()]).fit()


def steps(out: pathlib.Path) -> dict[int, float]:
    """The losses that the processes of a job have written, by step."""
    lines = [text for path in out.glob("*.jsonl") for text in path.read_text().splitlines()]
    found = map(json.loads, lines)
    return {line["step"]: line["loss"] for line in found}


# -- what happens to it ------------------------------------------------------------------------------


def launched(out: pathlib.Path, settings: Sequence[str], *arguments: str) -> Job:
    """Start a command of `jaxgoodput` for a job of this script."""
    own = [sys.executable, __file__, "--worker", str(out), *settings]
    command = [sys.executable, "-m", "jaxgoodput.cli", *arguments, "--", *own]
    return Job(command, {"JAXGOODPUT_SECRET": SECRET})


def done(job: Job) -> None:
    """Wait for a job's end, which must be a good one."""
    finished = job.wait(limit_s=LIMIT_S)
    if finished.code != 0:
        raise RuntimeError(
            f"the job ended with code {finished.code}:\n{finished.out}{finished.err}"
        )


def wait_for(what: Callable[[], bool], job: Job) -> None:
    """Wait until something holds, while the job runs."""
    deadline = time.monotonic() + LIMIT_S
    while not what():
        if not job.running() or time.monotonic() > deadline:
            raise RuntimeError(f"it did not come to that:\n{job.text()}")
        time.sleep(0.05)


def of_processes(way: Way) -> list[str]:
    """Arguments of `jaxgoodput run` for a fixed set of processes."""
    return [
        "run",
        *("--nproc-per-node", str(way.processes)),
        *("--devices-per-process", str(way.devices)),
    ]


def fixed(out: pathlib.Path, way: Way, settings: Sequence[str]) -> None:
    """Run a fixed set of processes."""
    with launched(out, settings, *of_processes(way)) as job:
        done(job)


def resumed(out: pathlib.Path, way: Way, settings: Sequence[str]) -> None:
    """Stop three processes in the middle, and resume in two."""
    with launched(out, (*settings, "paced=0.3"), *of_processes(Way(3))) as job:
        wait_for(lambda: len(steps(out)) >= NUM_STEPS // 3, job)
        job.send(signal.SIGTERM)
        if (code := job.wait(limit_s=LIMIT_S).code) != 143:
            raise RuntimeError(f"a job that was told to stop ended with code {code}")
    if len(steps(out)) >= NUM_STEPS:
        raise RuntimeError("the job was over before it was stopped")
    fixed(out, Way(2), settings)


def hosts(out: pathlib.Path, way: Way, settings: Sequence[str]) -> None:
    """Run hosts that may come and go, and do not."""
    number = str(way.processes)
    arguments = ("run", "--nnodes", number, "--local-hosts", number, "--join-s", "120")
    with launched(out, settings, *arguments) as job:
        done(job)


def resized(out: pathlib.Path, way: Way, settings: Sequence[str]) -> None:
    """Begin with one host, have two more join, and one of these leave."""
    paced = (*settings, "paced=6")  # the hosts that join may take minutes to start
    arguments = ("--rdzv-endpoint", "127.0.0.1:0", "--local-hosts", "0", "--admit-every-s", "1")
    with launched(out, paced, "run", "--nnodes", "1:3", *arguments) as job:
        told = job.wait_for("the job is at ", limit_s=LIMIT_S)
        address = told.split("the job is at ")[1].split(",")[0]

        def agent(name: str) -> Job:
            return launched(out, paced, "agent", "--name", name, "--rdzv-endpoint", address)

        def trains_in(count: int) -> None:
            """Wait for steps of so many processes."""
            wait_for(lambda: num_ranks(job.text()) == count, job)
            before = len(steps(out))
            wait_for(lambda: len(steps(out)) >= before + 3, job)

        with agent("a"):
            trains_in(1)
            with agent("b") as second, agent("c"):
                trains_in(3)
                second.send(signal.SIGTERM)
                trains_in(2)
                (out / "hurry").touch()
                done(job)


def num_ranks(text: str) -> int:
    """Processes of the newest generation, by what the coordinator says; 0 before the first."""
    (*_, last) = ("", *re.findall(r"generation \d+: (.*), from", text))
    return len([name for name in last.split(", ") if name])


SCRIPTS = {"fixed": fixed, "resumed": resumed, "hosts": hosts, "resized": resized}


# -- the table ---------------------------------------------------------------------------------------


def losses(name: str, keys: str) -> list[float]:
    """The losses of a row's job, one for each step."""
    way = WAYS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        SCRIPTS[way.script](out, way, (*way.settings, f"keys={keys}"))
        found = steps(out)
    missing = sorted(set(range(1, NUM_STEPS + 1)) - found.keys())
    # What a process had done last when it left, no other may have heard of.
    if len(missing) > 2:
        raise RuntimeError(f"no losses of the steps {missing}")
    return [found.get(step, math.nan) for step in range(1, NUM_STEPS + 1)]


def difference(one: list[float], other: list[float]) -> float:
    """The largest difference of two losses of a step, as a share."""
    pairs = zip(one, other, strict=True)
    return max(abs(a / b - 1) for a, b in pairs if not math.isnan(a * b))


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", action="append", help="a row, to be compared; may be repeated")
    parser.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(pathlib.Path(options.worker[0]), options.worker[1:])
        return 0
    of = functools.cache(losses)
    is_equal = True
    print('| run | a key for each micro-batch, like one process | like 1 device | keys="sample" |')
    print("|---|---|---|---|")
    for name in options.only or WAYS:
        like = WAYS[name].like
        default, sampled = of(name, "micro-batch"), of(name, "sample")
        as_one = None if like is None else difference(default, of(like, "micro-batch"))
        apart = difference(default, of(ONE, "micro-batch"))
        found = difference(sampled, of(ONE, "sample"))
        is_equal &= max(found, as_one or 0.0) <= AT_MOST
        shown = "" if as_one is None else f"{as_one:.1e}"
        print(f"| {name} | {shown} | {apart:.1e} | {found:.1e} |", flush=True)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
