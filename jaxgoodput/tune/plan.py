"""Turns what a user allows into batches that can run, given data, devices and memory. Pure.

The bytes that a step needs are asked for through `needs`, which may compile to find out.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from absl import logging

from jaxgoodput.goodput.memory import StepBytes, TooLarge, largest_that_fits
from jaxgoodput.goodput.search import BatchConfig, BatchLimits


class Indivisible(ValueError):
    """Error: a batch cannot be split into equal micro-batches over the replicas of a strategy."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The configuration to start with, and the sizes that may ever be used."""

    start: BatchConfig
    """Configuration of the base batch."""
    sizes: tuple[int, ...]
    """Micro-batch sizes, ascending."""
    limits: BatchLimits
    """The user's limits, narrowed to data, devices and memory."""
    accumulate: bool
    """Whether a batch may have more than one micro-batch."""

    def nearest(self, micro_batch_size: int, wanted: int) -> BatchConfig | None:
        """Return the batch with this micro-batch size nearest to `wanted` samples; None if there is none."""
        return min(
            self.batches([micro_batch_size]),
            key=lambda c: abs(math.log(c.global_batch_size / wanted)),
            default=None,
        )

    def batches(self, micro_batch_sizes: Sequence[int]) -> list[BatchConfig]:
        """Return all batches with these sizes within the limits."""
        most = self.limits.max_micro_batches if self.accumulate else 1
        made = [
            dataclasses.replace(self.start, micro_batch_size=size, num_micro_batches=count)
            for size in micro_batch_sizes
            for count in range(1, most + 1)
        ]
        low, high = self.limits.smallest, self.limits.max
        return [c for c in made if low <= c.global_batch_size <= high]

    def resumed(self, saved: BatchConfig, fits: Callable[[int], bool]) -> BatchConfig:
        """Return the batch to resume with: the saved one, or the nearest global batch that is allowed here.

        `fits` says whether a micro-batch size fits into the present memory; the size of `start` does.
        """
        sizes = self.sizes
        while True:
            near = self._nearest_to(saved, sizes)
            size = near.micro_batch_size
            if size == self.start.micro_batch_size or fits(size):
                return near
            logging.warning(
                "the run was saved with micro-batches of %d samples per replica. The nearest size here, %d, "
                "does not fit into memory: a smaller size is used.",
                saved.micro_batch_size,
                size,
            )
            sizes = tuple(sorted({s for s in sizes if s < size} | {self.start.micro_batch_size}))

    def _nearest_to(self, saved: BatchConfig, sizes: Sequence[int]) -> BatchConfig:
        wanted = saved.global_batch_size
        here = {"num_replicas": self.start.num_replicas, "strategy": self.start.strategy}
        same = dataclasses.replace(saved, **here)
        can = self.accumulate or saved.num_micro_batches == 1
        if can and same.global_batch_size == wanted and same.micro_batch_size in sizes:
            return same
        return min(
            self.batches(sizes) or [self.start],
            key=lambda c: (abs(math.log(c.global_batch_size / wanted)), c.num_micro_batches),
        )


def scheduled(schedule: Mapping[int | float, int], share: int | float) -> int:
    """Return the global batch that the user's schedule asks for after this share of the run.

    >>> scheduled({0: 256, 0.03: 512}, 0.02), scheduled({0: 256, 0.03: 512}, 0.03)
    (256, 512)
    """
    return schedule[max(at for at in schedule if at <= max(share, 0))]


def batch_plan(
    limits: BatchLimits,
    num_replicas: int,
    num_samples: int,
    *,
    budget: int,
    needs: Callable[[int, bool], StepBytes],
    accumulate: bool = True,
    fixed: bool = False,
    tolerance: float = 0.0,
    strategy: str = "",
    schedule: Mapping[int | float, int] | None = None,
) -> BatchPlan:
    """Return the plan that the limits allow with this number of replicas and samples.

    `needs(size, several)` returns the bytes of a step with micro-batches of a size, `several` of them or one;
    `budget` is the memory of a device. `fixed` keeps the base batch, within `tolerance` (a share of it). With
    a `schedule`, only its batches are planned for, and its first one is the start.

    Raises TooLarge if the base batch does not fit into memory in any split, Indivisible if it cannot be split
    into equal micro-batches, ValueError if it is larger than the data set.
    """
    base, largest = limits.base, limits.max
    if schedule is not None:
        base, largest = scheduled(schedule, 0), max(schedule.values())
    if base > num_samples:
        raise ValueError(
            f"the base batch of {base} samples is larger than the data set of {num_samples}. Use a "
            "smaller batch.base (and the learning rate that belongs to it)."
        )
    if largest > num_samples:
        logging.warning(
            "batch.max=%d is larger than the data set; batches stop at its %d samples.",
            largest,
            num_samples,
        )
        largest = num_samples
    most = (limits.micro or (None, None))[1] or max(largest // num_replicas, 1)
    several = accumulate and limits.max_micro_batches > 1
    split = partial(
        fixed_config,
        num_replicas=num_replicas,
        max_micro_batches=limits.max_micro_batches if accumulate else 1,
        advice=partial(_advice, num_replicas, schedule is not None, fixed, accumulate),
    )
    start = _first_that_fits(
        partial(split, base, tolerance=tolerance if fixed else 0.0),
        most,
        budget=budget,
        needs=needs,
        accumulate=accumulate,
    )
    start = dataclasses.replace(start, strategy=strategy)
    if schedule is not None:
        parts = [split(batch, largest_micro=most).micro_batch_size for batch in schedule.values()]
        sizes = tuple(sorted({*parts, start.micro_batch_size}))
        limits = dataclasses.replace(
            limits,
            max=max(limits.base, *schedule.values()),
            min_global=min(schedule.values()),
            micro=(sizes[0], sizes[-1]),
            sizes=sizes,
        )
    elif fixed:
        sizes = (start.micro_batch_size,)
        limits = dataclasses.replace(limits, micro=(*sizes, *sizes), sizes=None)
    else:
        limits = _narrowed(limits, start, most, largest)
        sizes = tuple(sorted({*limits.ladder(num_replicas), start.micro_batch_size}))
    return BatchPlan(start=start, sizes=sizes, limits=limits, accumulate=several)


def _first_that_fits(
    split: Callable[..., BatchConfig],
    most: int,
    *,
    budget: int,
    needs: Callable[[int, bool], StepBytes],
    accumulate: bool,
) -> BatchConfig:
    """Return the split with the fewest micro-batches, of `most` samples each at most, that fits into memory.

    `split` makes the configuration for a largest micro-batch size.
    """
    start = split(largest_micro=most)
    known: dict[int, StepBytes] = {}
    while True:
        micro, parts = start.micro_batch_size, start.num_micro_batches > 1
        need = known[micro] = needs(micro, parts)
        if need.peak <= budget:
            return start
        if micro > 1 and 1 not in known:
            # Two sizes tell the bytes of the samples from the bytes of the state.
            known[1] = needs(1, parts)
        fits = largest_that_fits(range(1, micro), known, budget)
        if fits < 1 or not accumulate:
            raise TooLarge(
                f"a step with {micro} samples per replica needs {need.peak / 2**20:.0f} MiB "
                f"({need.arguments / 2**20:.0f} of them for state and batch), but only "
                f"{budget / 2**20:.0f} MiB are available. Raise execution.memory_bytes if that is wrong, "
                "allow accumulation, partition the model over devices with Config.strategies (fsdp), or "
                "use a smaller model or base batch."
            )
        start = split(largest_micro=fits)


def _narrowed(limits: BatchLimits, start: BatchConfig, most: int, largest: int) -> BatchLimits:
    """Narrow the limits to micro-batch sizes that are of use, up to `most`, and batches up to `largest`."""
    low, _ = limits.micro or (None, None)
    # Sizes below the base's are of use only if batches may be smaller, or memory demands it.
    floor = limits.min_global if limits.min_global is not None else start.global_batch_size
    low = low or max(1, min(start.micro_batch_size, floor // start.num_replicas))
    high = max(most, low)
    own = limits.sizes
    if own is not None:
        # The user's sizes are for any number of replicas; keep the ones that may be used with this number.
        within = {size for size in (*own, start.micro_batch_size) if low <= size <= high}
        # There may be none, if the base's size is below `micro` and the data set is small.
        own = tuple(sorted(within or {min(max(start.micro_batch_size, low), high)}))
    return dataclasses.replace(limits, max=largest, micro=(low, high), sizes=own)


def fixed_config(
    base: int,
    num_replicas: int,
    largest_micro: int,
    *,
    tolerance: float = 0.0,
    max_micro_batches: int = 1024,
    advice: Callable[[int, int], str] = lambda batch, largest_micro: "use one of them",
) -> BatchConfig:
    """Return the configuration with the fewest micro-batches whose global batch is `base`, within tolerance.

    Raises Indivisible, a ValueError, naming the nearest global batches that the replicas can divide; `advice`
    says what to do for a batch.

    >>> fixed_config(96, 8, largest_micro=8)
    BatchConfig(micro_batch_size=6, num_micro_batches=2, num_replicas=8)
    """
    if largest_micro < 1:
        raise ValueError(
            "not even one sample per replica fits into the memory budget; raise execution.memory_bytes, or "
            "use a smaller model."
        )
    options: list[tuple[float, int, int]] = []  # deviation, number and size of micro-batches
    for count in range(1, max_micro_batches + 1):
        exact = base / (num_replicas * count)
        options += [
            (abs(num_replicas * micro * count - base) / base, count, micro)
            for micro in {math.floor(exact), math.ceil(exact)}
            if 1 <= micro <= largest_micro
        ]
        # More micro-batches cannot help if the batch is met exactly, or is less than one sample each.
        if exact < 1 or any(off == 0 for off, _, _ in options[-2:]):
            break
    off, count, micro = min(options, default=(math.inf, 1, 1))
    if off <= tolerance + 1e-12:
        return BatchConfig(
            micro_batch_size=micro, num_micro_batches=count, num_replicas=num_replicas
        )
    near = " and ".join(map(str, _nearest(base, num_replicas, largest_micro, max_micro_batches)))
    raise Indivisible(
        f"a global batch of {base} samples cannot be split into equal micro-batches over "
        f"{num_replicas} replicas (at most {max_micro_batches} of at most {largest_micro} samples, "
        f"tolerance {tolerance:.0%}). "
        f"The nearest global batches that can are {near}: {advice(base, largest_micro)}."
    )


def _advice(
    num_replicas: int,
    is_scheduled: bool,
    fixed: bool,
    accumulate: bool,
    batch: int,
    largest_micro: int,
) -> str:
    """Return what to do about a batch that cannot be split; each way alone helps."""
    ways = ["use one of them in Config.policy" if is_scheduled else "set batch.base to one of them"]
    if fixed and not is_scheduled:
        ways.append("raise tuning.fixed_tolerance")
    share, rest = divmod(batch, num_replicas)
    if share and not rest:
        counts = range(1, share + 1)
        needed = next(k for k in counts if share % k == 0 and share // k <= largest_micro)
        more = f"raise batch.max_micro_batches to {needed}"
        ways.append(more if accumulate else "allow accumulation (Tuning.accumulate)")
    return ", or ".join(ways)


def _nearest(base: int, num_replicas: int, largest_micro: int, most_micros: int) -> list[int]:
    """Return the largest global batch below `base` and the smallest above it that can be split evenly."""

    def can(share: int) -> bool:  # samples per replica
        return any(
            share % k == 0 and share // k <= largest_micro for k in range(1, most_micros + 1)
        )

    most = largest_micro * most_micros
    share = base // num_replicas
    below = next(
        (s for s in range(min(share, most), 0, -1) if s * num_replicas < base and can(s)), 0
    )
    above = next((s for s in range(share + 1, most + 1) if can(s)), 0)
    return [s * num_replicas for s in (below, above) if s]
