"""A made-up application with measured tables, a small cluster, and a policy that moves jobs at random."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.published.tables import Application, Curve, Runs, StepTable
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.simulate.jobs.tables import TableTruth
from jaxgoodput.specs import Allocation, ClusterSpec, Node

SIZES = np.array([4.0, 8.0, 16.0, 32.0])


def sync_s(nodes: int, devices: int) -> float:
    return 0.0 if devices == 1 else 0.02 * nodes + 0.002 * devices


def steps(kind: str, second: float, nodes: int = 4, each: int = 4) -> StepTable:
    """0.02 s and `second` per 64 samples, plus synchronisation; every even spread was measured."""
    curves = {}
    for n in range(1, nodes + 1):
        for g in range(1, each + 1):
            sync = np.full(len(SIZES), sync_s(n, n * g))
            curves[(g,) * n] = Curve(SIZES, 0.02 + second * SIZES / 64 + sync, sync)
    return StepTable(f"toy on {kind}", curves, np.zeros((0, 5)))


def application(name: str = "toy", epochs: int = 5, noise: float = 8.0) -> Application:
    """Base batch 16, up to 512; the gradient noise grows from epoch to epoch."""
    batches = (16, 64, 512)
    ends = np.tile(np.arange(1, epochs + 1) * 400.0, (3, 1))
    sqr = np.ones((3, epochs))
    var = np.tile(noise * np.arange(1, epochs + 1), (3, 1))
    iterations = ends / np.array([[1.0], [2.0], [6.0]])
    runs = Runs(name, batches, ends, iterations, sqr, var)
    return Application(name, {"a": steps("a", 1.0), "b": steps("b", 0.4)}, runs, (4, 32))


def truth() -> TableTruth:
    return TableTruth({"toy": application(), "tiny": application("tiny", epochs=1, noise=0.5)})


def cluster(kinds: str = "ab") -> ClusterSpec:
    names = [(kind, i) for kind in kinds for i in range(2)]
    return ClusterSpec(
        nodes=tuple(Node(name=f"{kind}{i}", kind=kind, num_devices=4) for kind, i in names)
    )


def workload(num_jobs: int = 8, seed: int = 0, gap_s: float = 100.0) -> tuple[TraceJob, ...]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(gap_s, num_jobs))
    return tuple(
        TraceJob(
            id=f"job-{i}",
            submit_s=float(times[i]),
            application=("toy", "tiny")[int(rng.integers(2))],
            num_devices=int(rng.choice([1, 2, 4])),
            global_batch_size=64,
        )
        for i in range(num_jobs)
    )


@dataclass(frozen=True)
class Shuffle:
    """Keeps, moves, resizes and pauses jobs at random, always within what they and the cluster allow."""

    seed: int = 0
    keep: float = 0.6

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        rng = np.random.default_rng([self.seed, int(now_s * 1000)])
        up = [n for n in cluster.nodes if n.state == "up"]
        free = {n.name: set(range(n.num_devices)) - set(n.withheld) for n in up}
        kind = {n.name: n.kind for n in cluster.nodes}
        chosen = {}
        kept = [j for j in jobs if j.allocation.devices and rng.random() < self.keep]
        for job in kept:
            if all(free.get(n, set()) >= set(local) for n, local in job.allocation.devices.items()):
                chosen[job.spec.id] = job.allocation
                for node, local in job.allocation.devices.items():
                    free[node] -= set(local)
        for job in jobs:
            shapes = sorted(job.goodput)
            if job.spec.id in chosen or not shapes or rng.random() < 0.1:
                continue
            shape = shapes[int(rng.integers(len(shapes)))]
            each = shape.num_devices // shape.num_nodes
            fits = [n for n in free if kind[n] == shape.kind and len(free[n]) >= each]
            if len(fits) < shape.num_nodes or each * shape.num_nodes != shape.num_devices:
                continue
            devices = {n: tuple(sorted(free[n])[:each]) for n in fits[: shape.num_nodes]}
            for node, local in devices.items():
                free[node] -= set(local)
            chosen[job.spec.id] = Allocation(
                devices=devices, generation=job.allocation.generation + 1
            )
        return Decision(allocations=chosen)
