"""Finds the best batch: an exact search over micro-batch sizes and numbers of micro-batches.

A micro-batch size is a shape, so each one in use costs a compilation. The search therefore runs over a fixed
ladder of sizes. The number of micro-batches is only a loop count, so every number is tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from jaxgoodput._fields.typed import Count, Endless, Remedy, typed
from jaxgoodput.goodput.efficiency import efficiency
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import (
    Placement,
    compute_time,
    feeding_time,
    last_micro_batch_time,
)

MAX_SIZES = 13  # sizes of the common ladder; a placement adds at most three of its own
_BASE = "Give the global batch size that the learning rate was tuned for."
_MICRO = "Give the smallest and the largest micro-batch, such as (8, 64)."
RATIO = 1.42  # between sizes: being half of that off the optimum costs less than 1 % (log-concave goodput)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """One way to run a step; the global batch is the product of its three numbers."""

    micro_batch_size: int
    """Samples per replica in a micro-batch."""
    num_micro_batches: int
    """Number of micro-batches per replica, at least 1."""
    num_replicas: int
    """Number of replicas over all nodes."""
    strategy: str = field(default="", repr=False)
    """Name of the strategy; "" if the user has configured none."""

    def __post_init__(self):
        for name in ("micro_batch_size", "num_micro_batches", "num_replicas"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"BatchConfig.{name} must be at least 1, got {getattr(self, name)}."
                )

    @property
    def global_batch_size(self) -> int:
        """Number of samples that one update uses."""
        return self.num_replicas * self.micro_batch_size * self.num_micro_batches


@typed
@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The batches that the user allows, in samples. No step ever uses another one.

    Raises ValueError if the limits contradict each other.
    """

    base: Annotated[Count, Remedy(_BASE)]
    """Global batch size that the learning rate was tuned for."""
    max: Annotated[Count, Endless("Give the largest batch that you allow, such as 64 times base.")]
    """Largest global batch size."""
    micro: Annotated[tuple[Count, Count], Remedy(_MICRO)] | None = None
    """Smallest and largest micro-batch, in samples per replica; None for any that fits into memory."""
    min_global: Count | None = None
    """Smallest global batch size; None for `base`."""
    max_micro_batches: Annotated[Count, Remedy("1 means no gradient accumulation.")] = 16
    """Largest number of micro-batches per update; 1 means no gradient accumulation."""
    sizes: tuple[Count, ...] | None = None
    """Micro-batch sizes to use; None for a geometric ladder."""

    def __post_init__(self):
        low, high = self.span
        sizes = (low,) if self.sizes is None else self.sizes
        rules = {
            f"max={self.max} is below base={self.base}: the base batch itself would not be allowed. "
            "Raise max or lower base.": self.max >= self.base,
            f"micro={self.micro} must be (smallest, largest). Swap the two.": low <= high,
            f"min_global={self.min_global} is above max={self.max}; leave it out to stay at the base batch "
            "or above.": self.smallest <= self.max,
            f"sizes={self.sizes} must be increasing, without repeats and not empty; leave it out for a "
            "geometric ladder.": sizes and list(sizes) == sorted(set(sizes)),
            f"sizes={self.sizes} goes beyond micro={self.micro}. Widen micro or drop the sizes outside it.": (
                all(low <= size <= high for size in sizes)
            ),
        }
        for message, holds in rules.items():
            if not holds:
                raise ValueError(f"BatchLimits.{message}")

    @property
    def span(self) -> tuple[int, int]:
        """Smallest and largest micro-batch allowed: `micro`, or 1 and the largest batch if that is None."""
        return (1, self.max) if self.micro is None else self.micro

    @property
    def smallest(self) -> int:
        """Smallest global batch size allowed, in samples."""
        return self.base if self.min_global is None else self.min_global

    def allows(self, config: BatchConfig) -> bool:
        """Return whether a batch is within the limits."""
        low, high = self.span
        return (
            low <= config.micro_batch_size <= high
            and config.num_micro_batches <= self.max_micro_batches
            and self.smallest <= config.global_batch_size <= self.max
        )

    def ladder(self, num_replicas: int | None = None) -> tuple[int, ...]:
        """Return the only micro-batch sizes that are ever compiled: at most 16, both ends included.

        The ladder is geometric, rounded to numbers that hardware likes. If the number of replicas is given,
        only sizes that fit the limits are returned, together with the sizes that come closest to the
        smallest, the base and the largest global batch.

        >>> BatchLimits(base=32, max=1024, micro=(8, 64)).ladder()
        (8, 12, 16, 24, 32, 48, 64)
        """
        if num_replicas is None:
            return _common_sizes(self)
        sizes = {*_common_sizes(self), *_own_sizes(self, num_replicas)}
        return tuple(sorted(b for b in sizes if _feasible(self, num_replicas, b)))


def best_batch(
    model: GoodputModel,
    placement: Placement,
    limits: BatchLimits,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
) -> tuple[BatchConfig, float]:
    """Return the configuration with the highest goodput within the limits, and that goodput in samples/s.

    The search is exact over `micro_batch_sizes` (None for the ladder of this placement) and every number of
    micro-batches. Among equals it prefers the fewest micro-batches, then the smallest. If the gradient noise
    is unknown (NaN), only the base batch has a known goodput, and it is chosen.

    Raises ValueError if no size fits, or if the model knows the goodput of none that does.
    """
    replicas = int(placement.num_replicas)
    sizes = sorted(limits.ladder(replicas) if micro_batch_sizes is None else set(micro_batch_sizes))
    counts = np.arange(1, limits.max_micro_batches + 1)
    if not any(_feasible(limits, replicas, b) for b in sizes):
        raise ValueError(_infeasible(limits, replicas, sizes))
    table = _goodput(
        model,
        limits,
        np.array([int(placement.num_nodes)]),
        np.array([replicas]),
        np.array([sizes], np.int64),
        counts,
    )[0]
    if not np.isfinite(table).any():
        raise ValueError(
            f"the goodput of every batch on num_nodes={int(placement.num_nodes)}, "
            f"num_replicas={replicas} is unknown: no step was measured over that kind of link, "
            "or the gradient noise is unknown and no size gives the base batch "
            f"({limits.base} samples) exactly. Measure a step there, or build the model from "
            "PerfFit.explore(), which assumes the best."
        )
    # Transposed, because argmax takes the first among equals, which should have the fewest micro-batches.
    table = np.where(np.isnan(table), -np.inf, table).T
    count, size = np.unravel_index(int(np.argmax(table)), table.shape)
    config = BatchConfig(
        micro_batch_size=int(sizes[size]),
        num_micro_batches=int(counts[count]),
        num_replicas=replicas,
    )
    return config, float(table[count, size])


def goodput_table(model: GoodputModel, limits: BatchLimits, placements: Placement) -> np.ndarray:
    """Return the useful samples/s of the best configuration on each placement, `[placements]`.

    It gives the same results as `best_batch`, for many placements at once. `placements` holds arrays of one
    length. A result is NaN if the placement's kind of link was never measured, and 0 if no batch is allowed.
    """
    nodes = np.atleast_1d(np.asarray(placements.num_nodes)).astype(np.int64)
    replicas = np.atleast_1d(np.asarray(placements.num_replicas)).astype(np.int64)
    if nodes.shape != replicas.shape or nodes.ndim != 1:
        raise ValueError(
            f"placements needs two arrays of one length, but num_nodes has shape {nodes.shape} and "
            f"num_replicas {replicas.shape}. Give both an entry for each placement."
        )
    common = np.array(_common_sizes(limits), np.int64)
    sizes = np.concatenate(
        [np.broadcast_to(common, (len(nodes), len(common))), _own_rung_table(limits, replicas)], 1
    )
    counts = np.arange(1, limits.max_micro_batches + 1)
    table = _goodput(model, limits, nodes, replicas, sizes, counts).reshape(len(nodes), -1)
    allowed = ~np.isneginf(table)
    known = allowed & ~np.isnan(table)
    best = np.max(table, axis=1, initial=-np.inf, where=known)
    return np.where(known.any(1), best, np.where(allowed.any(1), np.nan, 0.0))


def _goodput(
    model: GoodputModel,
    limits: BatchLimits,
    nodes: np.ndarray,
    replicas: np.ndarray,
    sizes: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """Return useful samples/s, `[placements, sizes, counts]`; -inf outside the limits.

    The formulas are those in `GoodputModel.goodput`, except that powers are computed once for all numbers
    of micro-batches.
    """
    # Placements differ in their number of sizes; the missing ones are 0 here, and computed as if they were 1.
    exists = (sizes > 0)[..., None]
    sizes = np.maximum(sizes, 1)
    at = Placement(num_nodes=nodes[:, None], num_replicas=replicas[:, None])
    alone = np.asarray(compute_time(model.perf, sizes))[..., None]
    last = np.asarray(last_micro_batch_time(model.perf, at, sizes))[..., None]
    per_count = (replicas[:, None] * sizes)[..., None]
    batches = per_count * counts
    seconds = (counts - 1) * alone + (last + np.asarray(model.perf.update_s))
    seconds = seconds * np.asarray(model.residual(sizes))[..., None]
    if model.feeding is not None:
        seconds = np.maximum(seconds, feeding_time(model.feeding, batches))
    worth = efficiency(model.grad, batches / model.base_batch_size)
    allowed = (batches >= limits.smallest) & (batches <= limits.max) & exists
    return np.where(allowed, batches / seconds * worth, -np.inf)


def _common_sizes(limits: BatchLimits) -> tuple[int, ...]:
    """Return the micro-batch sizes of the ladder that do not depend on the number of replicas."""
    if limits.sizes is not None:
        return limits.sizes
    low, high = limits.span
    high = max(low, min(high, limits.max))  # a replica never computes more than the whole batch
    num_sizes = min(MAX_SIZES, 1 + math.ceil(math.log(high / low) / math.log(RATIO)))
    inner = np.geomspace(low, high, num_sizes)[1:-1]
    rounded = (b for b in map(_round, inner) if low < b < high)
    return tuple(sorted({low, high, *rounded}))


def _round(size: float) -> int:
    """Return the nearest number of the form 2^n or 3 * 2^n, which tiles well and divides most batches."""
    power = 2 ** math.floor(math.log2(size))
    nearest = min((power, 1.5 * power, 2 * power), key=lambda rung: abs(math.log(rung / size)))
    return math.ceil(nearest)


def _own_rung_table(limits: BatchLimits, replicas: np.ndarray) -> np.ndarray:
    """Return the micro-batch sizes for the smallest, largest and base batch, `[placements, 3]`; 0: none."""
    if limits.sizes is not None:
        return np.zeros((len(replicas), 0), np.int64)
    low, high = limits.span
    own = np.zeros((len(replicas), 3), np.int64)
    for column, target, upward in ((0, limits.smallest, True), (1, limits.max, False)):
        # Use the fewest micro-batches that the largest size allows, and divide the batch by them.
        count = np.maximum(1, -(-target // (replicas * high)))
        parts = replicas * count
        own[:, column] = -(-target // parts) if upward else target // parts
    counts = np.arange(1, limits.max_micro_batches + 1)
    parts = replicas[:, None] * counts
    exact = np.where(limits.base % parts == 0, limits.base // parts, 0)
    exact = np.where((exact >= low) & (exact <= high), exact, 0)
    own[:, 2] = exact.max(1)  # the largest size: the fewest micro-batches
    return np.where((own >= low) & (own <= high), own, 0)


def _own_sizes(limits: BatchLimits, num_replicas: int) -> tuple[int, ...]:
    """Return the micro-batch sizes that a number of replicas adds to the common ladder."""
    own = _own_rung_table(limits, np.array([num_replicas]))[0]
    return tuple(int(b) for b in own if b)


def _feasible(limits: BatchLimits, num_replicas: int, size: int) -> bool:
    """Return whether some number of micro-batches of `size` meets the limits."""
    part = num_replicas * size
    most = min(limits.max // part, limits.max_micro_batches)
    return most >= 1 and most * part >= limits.smallest


def _infeasible(limits: BatchLimits, num_replicas: int, sizes: Sequence[Any]) -> str:
    """Return the error message if nothing fits: why, and what to change."""
    least = num_replicas * (min(sizes) if sizes else limits.span[0])
    most = num_replicas * (max(sizes) if sizes else limits.span[1]) * limits.max_micro_batches
    if least > limits.max:
        remedy = "Use fewer replicas, a smaller micro-batch, or raise max."
    elif most < limits.smallest:
        remedy = "Use more replicas, a larger micro-batch, or raise max_micro_batches."
    else:
        remedy = "Widen the limits, or allow more micro-batch sizes."
    offered = tuple(sizes) or limits.span
    listed = str(list(offered)) if len(offered) <= 16 else f"{min(offered)} to {max(offered)}"
    return (
        f"no batch of {num_replicas} replicas lies within the limits: the allowed global batch is "
        f"{limits.smallest} to {limits.max} samples, and micro-batch sizes "
        f"{listed} with 1 to {limits.max_micro_batches} "
        f"micro-batches give {least} at least and {most} at most. {remedy}"
    )
