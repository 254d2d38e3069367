"""Synthetic workloads, for simulations without a trace; the same seed gives the same jobs.

The shapes of the distributions follow publications about real clusters (Jeon et al., "Philly", ATC 2019; Hu
et al., "Helios", SC 2021). The numbers are our own and describe no particular site.

* Arrivals are a Poisson process, given the number of jobs. Around the fourth hour of every day, its rate
  rises to `peak` times the quiet rate, because queues form in bursts that averages hide.
* A job belongs to one of six families, from small and short to large and long. Most jobs are small; most
  device-hours belong to the few large ones.
* The work of a job, in base steps, is log-normal around the median of its family. The distribution has a
  long tail, so the few longest jobs decide p99 and the makespan.
* The devices and the batch size that a job's user requests are drawn from the settings at which its family
  reaches 50 to 80 % of a perfect speedup; if there are none, one device. Only rigid policies use them.
* The truth about a job is a `GoodputModel` for every kind of device. Computation is faster on a faster kind
  (for some families less than proportionally, because they wait for their input); synchronisation is not.
  The gradient noise grows during the training, so that larger batches, and with them more devices, become
  worth more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.jobs.model import ModelApplication, fixed_step_s
from jaxgoodput.goodput.efficiency import GradParams, gain
from jaxgoodput.goodput.perf import PerfParams
from jaxgoodput.goodput.search import BatchLimits

DAY_H, PEAK_H, PEAK_WIDTH_H = 24.0, 3.5, 1.0
LONGEST_H = 1e5  # arrivals are drawn minute by minute
LONGEST = 20.0  # largest work of a job, in units of the median of its family


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of job: how frequent and how long such jobs are, and how they scale."""

    share: float
    """Share of all jobs."""
    median_h: float
    """Median hours on one device of speed 1 at the base batch size."""
    spread: float
    """Standard deviation of the log of the work."""
    limits: BatchLimits
    noise: tuple[float, float]
    """Noise scale at the start and at the end, in base batches."""
    fixed_s: float
    """Seconds of a micro-batch, independent of its size."""
    sample_s: float
    """Additional seconds for each sample."""
    intra_s: float
    """Seconds of synchronisation on one node."""
    inter_s: float
    """Seconds of synchronisation over several nodes."""
    state_bytes: float
    """Bytes of parameters and optimizer state, which a restart writes and reads; assumed."""
    input_bound: float = 0.0
    """How much the input limits the speed: 0 = not at all; 1 = faster devices do not help."""


FAMILIES: Mapping[str, Family] = {
    "vision-small": Family(
        share=0.38, median_h=0.5, spread=0.9, noise=(2.0, 30.0), fixed_s=0.02, sample_s=8e-4,
        limits=BatchLimits(base=128, max=4096, micro=(16, 1024)), intra_s=0.02, inter_s=0.06, state_bytes=9e7,
    ),
    "recommender": Family(
        share=0.22, median_h=0.4, spread=0.8, noise=(8.0, 60.0), fixed_s=0.006, sample_s=6e-6,
        limits=BatchLimits(base=256, max=32768, micro=(64, 32768)), intra_s=0.04, inter_s=0.15,
        state_bytes=4e8, input_bound=0.7,
    ),
    "speech": Family(
        share=0.17, median_h=4.0, spread=0.7, noise=(4.0, 24.0), fixed_s=0.04, sample_s=0.03,
        limits=BatchLimits(base=24, max=640, micro=(4, 64)), intra_s=0.08, inter_s=0.25, state_bytes=3e8,
        input_bound=0.2,
    ),
    "language-tune": Family(
        share=0.13, median_h=5.0, spread=0.8, noise=(6.0, 20.0), fixed_s=0.05, sample_s=0.07,
        limits=BatchLimits(base=16, max=384, micro=(1, 12)), intra_s=0.12, inter_s=0.4, state_bytes=1.3e9,
    ),
    "detection": Family(
        share=0.07, median_h=14.0, spread=0.6, noise=(3.0, 40.0), fixed_s=0.05, sample_s=0.04,
        limits=BatchLimits(base=16, max=512, micro=(2, 16)), intra_s=0.06, inter_s=0.2, state_bytes=5e8,
        input_bound=0.3,
    ),
    "vision-large": Family(
        share=0.03, median_h=40.0, spread=0.4, noise=(10.0, 90.0), fixed_s=0.04, sample_s=4.5e-3,
        limits=BatchLimits(base=192, max=12288, micro=(16, 192)), intra_s=0.05, inter_s=0.15, state_bytes=2e8,
        input_bound=0.1,
    ),
}  # fmt: skip


def synthetic_workload(
    num_jobs: int = 160,
    *,
    hours: float = 8.0,
    seed: int = 0,
    peak: float = 3.0,
    largest: int = 16,
    per_node: int = 4,
) -> tuple[TraceJob, ...]:
    """Return synthetic jobs in order of arrival; `TraceJob.num_steps` is their work in base steps.

    They arrive during `hours`. No job requests more than `largest` devices, on nodes with `per_node`. The
    jobs do not depend on a cluster. Raises ValueError for impossible numbers.
    """
    for name, value in (("num_jobs", num_jobs), ("largest", largest), ("per_node", per_node)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1: there would be no jobs.")
    if not 0 < hours <= LONGEST_H:
        raise ValueError(
            f"hours={hours} must be above 0 and at most {LONGEST_H:g}: jobs arrive during them."
        )
    if not (peak >= 1 and math.isfinite(peak)):
        raise ValueError(f"peak={peak} must be at least 1 (1 = the same rate all day) and finite.")
    rng = np.random.default_rng([seed, 0x6A6F6273])
    submit_s = _arrivals(rng, num_jobs, hours, peak)
    names = list(FAMILIES)
    shares = np.array([family.share for family in FAMILIES.values()])
    drawn = rng.choice(len(names), num_jobs, p=shares / shares.sum())
    asked_for = {name: _asked_for(FAMILIES[name], largest, per_node) for name in names}
    steps = {name: _median_steps(FAMILIES[name]) for name in names}
    jobs = []
    for i in range(num_jobs):
        name = names[int(drawn[i])]
        family = FAMILIES[name]
        longer = min(math.exp(family.spread * rng.standard_normal()), LONGEST)
        devices, batch = asked_for[name][int(rng.integers(len(asked_for[name])))]
        jobs.append(
            TraceJob(
                id=f"{name}-{i:04d}",
                submit_s=float(submit_s[i]),
                application=name,
                num_devices=devices,
                global_batch_size=batch,
                num_steps=max(round(steps[name] * longer), 1),
            )
        )
    return tuple(jobs)


def synthetic_applications(speeds: Mapping[str, float]) -> dict[str, ModelApplication]:
    """Return the truth about every family; `speeds` by kind of device are relative to a T4.

    Raises ValueError for a speed that is not above 0.
    """
    for kind, speed in speeds.items():
        if not (speed > 0 and math.isfinite(speed)):
            raise ValueError(f"speeds[{kind!r}]={speed} must be above 0 and finite; 1 = a T4.")
    return {
        name: ModelApplication(
            perf={kind: _perf(family, speed) for kind, speed in speeds.items()},
            limits=family.limits,
            first=GradParams(sqr=1.0, var=family.noise[0]),
            last=GradParams(sqr=1.0, var=family.noise[1]),
            num_samples=float(_median_steps(family) * family.limits.base),
        )
        for name, family in FAMILIES.items()
    }


def _arrivals(rng: np.random.Generator, num_jobs: int, hours: float, peak: float) -> np.ndarray:
    """Return ascending seconds `[jobs]`: a Poisson process, given its number, is that many separate draws."""
    grid_h = np.linspace(0.0, hours, max(int(hours * 60), 2))
    swell = np.exp(-0.5 * ((grid_h % DAY_H - PEAK_H) / PEAK_WIDTH_H) ** 2)
    rate = 1.0 + (peak - 1.0) * swell
    # The integral of the rate by the trapezoidal rule, inverted at uniform draws.
    mass = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)])
    return np.sort(np.interp(rng.random(num_jobs), mass / mass[-1], grid_h) * 3600.0)


def _perf(family: Family, speed: float) -> PerfParams:
    faster = speed ** (1.0 - family.input_bound)
    return PerfParams(
        compute_base=family.fixed_s / faster,
        compute_per_sample=family.sample_s / faster,
        intra_base=family.intra_s,
        intra_per_replica=family.intra_s / 50,
        inter_base=family.inter_s,
        inter_per_replica=family.inter_s / 50,
        overlap=1.6,
    )


def _median_steps(family: Family) -> int:
    """Return the base steps of the family's median job: its hours over one step's time on one device."""
    seconds = fixed_step_s(_perf(family, 1.0), family.limits, 1, 1, family.limits.base)
    assert seconds is not None  # FAMILIES' own numbers allow their base batch
    return max(round(family.median_h * 3600.0 / seconds), 1)


def _asked_for(family: Family, largest: int, per_node: int) -> list[tuple[int, int]]:
    """Return (devices, batch) whose speedup, half-way through the training, is 50 to 80 % of perfect."""
    base, most = family.limits.base, family.limits.max
    middle = GradParams(sqr=1.0, var=math.sqrt(family.noise[0] * family.noise[1]))
    batches = [base * 2**i for i in range((most // base).bit_length())]
    sizes = [2**i for i in range(1, largest.bit_length())]

    def speed(devices: int, batch: int) -> float:
        """Return the base steps per second on these devices at this batch, half-way through training."""
        nodes = -(-devices // per_node)
        seconds = fixed_step_s(_perf(family, 1.0), family.limits, nodes, devices, batch)
        return 0.0 if seconds is None else float(gain(middle, batch / base)) / seconds

    alone = speed(1, base)
    found = [(k, b) for k in sizes for b in batches if 0.5 * k <= speed(k, b) / alone <= 0.8 * k]
    return found or [(1, base)]
