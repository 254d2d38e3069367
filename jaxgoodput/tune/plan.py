"""From what a user allows to what can run: batch limits by data, devices and memory; pure.

How many bytes a step needs is asked through `needs`, which may compile to find out.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from absl import logging

from jaxgoodput.goodput.memory import StepBytes, TooLarge, largest_that_fits
from jaxgoodput.goodput.search import BatchConfig, BatchLimits


class Indivisible(ValueError):
    """A batch that cannot be cut into equal micro-batches over the replicas of a strategy."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The configuration to start with, and the sizes that may ever be used."""

    start: BatchConfig
    """The base batch."""
    sizes: tuple[int, ...]
    """Micro-batch sizes, ascending."""
    limits: BatchLimits
    """What the user allows, narrowed to data, devices and memory."""
    accumulate: bool
    """Whether any batch has more than one micro-batch."""

    def nearest(self, micro_batch_size: int, wanted: int) -> BatchConfig | None:
        """The batch of micro-batches of one size nearest to `wanted` samples; None where none is allowed."""
        return min(
            self.batches([micro_batch_size]),
            key=lambda c: abs(math.log(c.global_batch_size / wanted)),
            default=None,
        )

    def batches(self, micro_batch_sizes: Sequence[int]) -> list[BatchConfig]:
        """All batches of these sizes within the limits."""
        most = self.limits.max_micro_batches if self.accumulate else 1
        made = [
            dataclasses.replace(self.start, micro_batch_size=size, num_micro_batches=count)
            for size in micro_batch_sizes
            for count in range(1, most + 1)
        ]
        low, high = self.limits.smallest, self.limits.max
        return [c for c in made if low <= c.global_batch_size <= high]

    def resumed(self, saved: BatchConfig, fits: Callable[[int], bool]) -> BatchConfig:
        """The batch of a run that was saved with `saved`: the same, or the nearest global batch allowed here.

        `fits` says of a micro-batch size whether the present memory allows it; the plan's start does.
        """
        sizes = self.sizes
        while True:
            near = self._nearest_to(saved, sizes)
            size = near.micro_batch_size
            if size == self.start.micro_batch_size or fits(size):
                return near
            logging.warning(
                "the run was saved with micro-batches of %d samples per replica, or is closest to it with "
                "%d, which does not fit into memory now: a smaller size is used.",
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
    """The global batch after this share of the run, by a user's own schedule.

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
    """Resolve the limits by data, devices and memory.

    `needs` tells the bytes of a step with micro-batches of a size, and whether there are several; `budget`
    is what a device has. `fixed` keeps the base batch, within `tolerance` (a share of it). Of a `schedule`
    only its own batches are planned for, and the first of them is the start.

    Raises TooLarge where the base batch does not fit into memory at any split, Indivisible where it
    cannot be made of equal micro-batches, ValueError where it is larger than the data set.
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
    tolerance = tolerance if fixed else 0.0
    low, high = limits.micro or (None, None)
    most = high or max(largest // num_replicas, 1)
    most_micros = limits.max_micro_batches if accumulate else 1
    several = accumulate and limits.max_micro_batches > 1
    start = fixed_config(
        base, num_replicas, most, tolerance=tolerance, max_micro_batches=most_micros
    )
    known: dict[int, StepBytes] = {}
    while True:
        micro, parts = start.micro_batch_size, start.num_micro_batches > 1
        need = known[micro] = needs(micro, parts)
        if need.peak <= budget:
            break
        if micro > 1 and 1 not in known:
            known[1] = needs(1, parts)  # two sizes tell the samples' bytes from those of the state
        fits = largest_that_fits(range(1, micro), known, budget)
        if fits < 1 or not accumulate:
            raise TooLarge(
                f"a step with {micro} samples per replica needs {need.peak / 2**20:.0f} MiB "
                f"({need.arguments / 2**20:.0f} of it state and batch), and there are "
                f"{budget / 2**20:.0f} MiB. Raise execution.memory_bytes if that is wrong, allow "
                "accumulation, "
                "cut the model over devices with Config.strategies (fsdp), or use a smaller model or "
                "base batch."
            )
        start = fixed_config(
            base, num_replicas, fits, tolerance=tolerance, max_micro_batches=most_micros
        )
    start = dataclasses.replace(start, strategy=strategy)
    if schedule is not None:
        parts = [
            fixed_config(batch, num_replicas, most, max_micro_batches=most_micros).micro_batch_size
            for batch in schedule.values()
        ]
        sizes = tuple(sorted({*parts, start.micro_batch_size}))
        limits = dataclasses.replace(
            limits,
            max=max(limits.base, *schedule.values()),
            min_global=min(schedule.values()),
            micro=(sizes[0], sizes[-1]),
            sizes=sizes,
        )
        return BatchPlan(start=start, sizes=sizes, limits=limits, accumulate=several)
    if fixed:
        only = start.micro_batch_size
        limits = dataclasses.replace(limits, micro=(only, only), sizes=None)
        return BatchPlan(start=start, sizes=(only,), limits=limits, accumulate=several)
    # Sizes below the base's are of use only where batches may be smaller, or memory asks for it.
    floor = limits.min_global if limits.min_global is not None else start.global_batch_size
    low = low or max(1, min(start.micro_batch_size, floor // num_replicas))
    high = max(most, low)
    own = limits.sizes
    if (
        own is not None
    ):  # a user's sizes are for any number of replicas: here those that may be used here
        within = {size for size in (*own, start.micro_batch_size) if low <= size <= high}
        # None of them may be where the base's is below `micro` and the data are few.
        own = tuple(sorted(within or {min(max(start.micro_batch_size, low), high)}))
    limits = dataclasses.replace(limits, max=largest, micro=(low, high), sizes=own)
    sizes = tuple(sorted({*limits.ladder(num_replicas), start.micro_batch_size}))
    return BatchPlan(start=start, sizes=sizes, limits=limits, accumulate=several)


def fixed_config(
    base: int,
    num_replicas: int,
    largest_micro: int,
    *,
    tolerance: float = 0.0,
    max_micro_batches: int = 1024,
) -> BatchConfig:
    """The configuration with the fewest micro-batches whose global batch is `base`, within tolerance.

    Raises Indivisible, a ValueError, naming the nearest global batches that the replicas can divide.

    >>> fixed_config(96, 8, largest_micro=8)
    BatchConfig(micro_batch_size=6, num_micro_batches=2, num_replicas=8)
    """
    if largest_micro < 1:
        raise ValueError(
            "not even one sample per replica fits into the memory budget; raise execution.memory_bytes, or "
            "make the model smaller."
        )
    best: tuple[float, int, BatchConfig] | None = None
    for count in range(1, max_micro_batches + 1):
        exact = base / (num_replicas * count)
        for micro in {math.floor(exact), math.ceil(exact)}:
            if not 1 <= micro <= largest_micro:
                continue
            config = BatchConfig(
                micro_batch_size=micro, num_micro_batches=count, num_replicas=num_replicas
            )
            off = abs(config.global_batch_size - base) / base
            if off <= tolerance + 1e-12 and (best is None or (off, count) < best[:2]):
                best = (off, count, config)
        if best is not None and best[0] == 0:
            break
        if exact < 1:
            break
    if best is not None:
        return best[2]
    near = " and ".join(map(str, _nearest(base, num_replicas, largest_micro, max_micro_batches)))
    raise Indivisible(
        f"a global batch of {base} samples cannot be cut into equal micro-batches over "
        f"{num_replicas} replicas (at most {max_micro_batches} of at most {largest_micro} samples, "
        f"tolerance {tolerance:.0%}). "
        f"The nearest global batches that can are {near}: set batch.base to one of them, or raise "
        "tuning.fixed_tolerance or batch.max_micro_batches."
    )


def _nearest(base: int, num_replicas: int, largest_micro: int, most_micros: int) -> list[int]:
    """The largest global batch below `base` and the smallest above it that can be cut evenly."""

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
