"""Measures what it saves, and what it costs, that hosts leave before the end of a run.

    python benchmarks/early_release.py                       # 3 pairs of runs for each split, about an hour
    python benchmarks/early_release.py --row-ms 8 --pairs 7  # runs that are too short for it

Four hosts of unequal speed, each an agent of its own on this machine, train two epochs under `jaxgoodput run
--nnodes 1:4`, in turns with early release and without (`Execution.keep_hosts`), with the compiled programs of
runs before. A host "x3" takes three times as long to read a sample as the first two, and reading is all that
takes time. A run has 300 steps; `--row-ms` says how long a row takes. Host-seconds go from the first step to
the end of each host's agent, and the run ends with its coordinator. Every sample is counted on the devices.
The exit code is 1 if one was not applied once an epoch, if no host left early, or if a run ended later than
1.02 of the one without.
"""

import argparse
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import elasticity
import kills
import numpy as np

import jaxgoodput as jg
from jaxgoodput.data.sources import ArraySource

EPOCHS, BATCH, STEPS = 2, 24, 150  # steps of an epoch
ROW_MS, WARM_MS = 40.0, 1.0
SPLITS = {"even": ("a", "b", "x2", "x3"), "leased": ("a", "b", "x8", "x16")}
WAIT_S = 600.0


class Waiting(ArraySource):
    """Rows that take as long to read as a host takes to compute."""

    def __init__(self, arrays: Any, row_s: float):
        super().__init__(arrays)
        self._row_s = row_s

    def batch(self, indices: Any) -> Any:
        named = re.fullmatch(r"x(\d+)", os.environ.get("JAXGOODPUT_HOST", ""))
        time.sleep(len(indices) * self._row_s * (int(named[1]) if named else 1))
        return super().batch(indices)


class Paced(kills.Counting):
    """A model that computes hardly anything."""

    row_s = 0.0

    def dataset(self) -> Any:
        x = np.random.default_rng(0).normal(size=(self.num_samples, 16)).astype(np.float32)
        rows = {"id": np.arange(self.num_samples, dtype=np.int32), "x": x}
        return Waiting(rows, self.row_s)


def worker(folder: pathlib.Path, split: str) -> None:
    """One training process."""
    lines = elasticity.Lines(folder)
    split, row_ms, *keeps = split.split()
    is_leased = split == "leased"
    limits: dict[str, Any] = {"micro": (1, 1), "max_micro_batches": BATCH} if is_leased else {}
    config = jg.Config(
        workdir=str(folder / "run"),
        policy="fixed",
        batch=jg.BatchLimits(base=BATCH, max=BATCH, **limits),
        epochs=EPOCHS,
        execution=jg.Execution(
            leases=is_leased,
            keep_hosts=bool(keeps),
            compilation_cache=str(folder.parent / "programs"),
        ),
        reporting=jg.Reporting(tensorboard=False, progress=False),
        saving=jg.Saving(every_s=1e9, at_end=False),
    )
    task = Paced(config, BATCH * STEPS, lambda phase: None, hooks=[lines])
    task.row_s = float(row_ms) / 1000
    state = task.fit()
    counts = state.params["count"]
    lines.write(kind="end", least=float(counts.min()), most=float(counts.max()))


@dataclass(frozen=True)
class Measured:
    """One run."""

    end_s: float
    """From the first step to the end of the coordinator."""
    host_s: float
    released: tuple[str, ...]
    is_exact: bool


def measure(split: str, parent: str, row_ms: float, *, keeps: bool) -> Measured:
    """Run a job to its end; `parent` holds its folder, and the compiled programs of all runs."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = pathlib.Path(name)
        command = ("python", __file__, "--worker", name, f"{split} {row_ms}{' keeps' * keeps}")
        options = ("--nnodes", "1:4", "--join-s", "60", "--exclude-slow", "0")
        with elasticity.Job(folder, split, *options, worker=command) as job:
            for host in SPLITS[split]:
                job.agent(host)
            ended_s: dict[str, float] = {}
            deadline_s = time.time() + WAIT_S
            while job.coordinator.poll() is None:
                if time.time() > deadline_s:
                    raise RuntimeError(job.said()[-4000:])
                for host, agent in job.agents.items():
                    if agent.poll() is not None:
                        ended_s.setdefault(host, time.time())
                time.sleep(0.02)
            end_s = time.time()
            if job.coordinator.returncode:
                raise RuntimeError(job.said()[-4000:])
            first_s = job.lines("step")[0]["at"]
            ends = job.lines("end")
            released = re.findall(r"^jaxgoodput: (\w+) is released", job.said(), re.MULTILINE)
            return Measured(
                end_s=end_s - first_s,
                host_s=sum(ended_s.get(host, end_s) - first_s for host in job.agents),
                released=tuple(sorted(set(released))),
                is_exact=bool(ends) and all(x["least"] == x["most"] == EPOCHS for x in ends),
            )


def compare(split: str, pairs: int, row_ms: float) -> bool:
    """Print the row of a split; return whether all runs were as they must be."""
    with_, without = [], []
    with tempfile.TemporaryDirectory() as parent:
        for keeps in (False, True):  # so that no program is compiled later
            measure(split, parent, WARM_MS, keeps=keeps)
        for index in range(pairs):
            both = [(with_, False), (without, True)]
            for found, keeps in both if index % 2 else reversed(both):
                found.append(measure(split, parent, row_ms, keeps=keeps))
                print(split, "without" if keeps else "with", found[-1], file=sys.stderr, flush=True)
    ends = [a.end_s / b.end_s for a, b in zip(with_, without, strict=True)]
    saved = [1 - a.host_s / b.host_s for a, b in zip(with_, without, strict=True)]

    def told(numbers: Sequence[float]) -> str:
        return f"{statistics.median(numbers):.3f} ({min(numbers):.3f}-{max(numbers):.3f})"

    released = sorted({" ".join(x.released) or "none" for x in with_})
    print(
        f"| {split}: {', '.join(SPLITS[split])} | {pairs} | {'; '.join(released)} | "
        f"{statistics.median(x.host_s for x in without):.0f} | "
        f"{statistics.median(x.host_s for x in with_):.0f} | {told(saved)} | "
        f"{statistics.median(x.end_s for x in without):.1f} | "
        f"{statistics.median(x.end_s for x in with_):.1f} | {told(ends)} |",
        flush=True,
    )
    is_right = all(x.is_exact for x in (*with_, *without)) and all(x.released for x in with_)
    return is_right and not any(x.released for x in without) and max(ends) <= 1.02


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind")
    parser.add_argument("--splits", default="even,leased")
    parser.add_argument("--row-ms", type=float, default=ROW_MS, help="milliseconds of a row")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(pathlib.Path(options.worker[0]), options.worker[1])
        return 0
    print(
        "| split: hosts | pairs | released | host-seconds without | with | share saved: median (range) | "
        "end without, s | with | with / without: median (range) |\n|" + "---|" * 9
    )
    return (
        0
        if all(
            [compare(split, options.pairs, options.row_ms) for split in options.splits.split(",")]
        )
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
