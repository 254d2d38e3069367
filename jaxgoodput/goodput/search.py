"""Which batch: an exact search over a ladder of micro-batch sizes and all counts of them.

A micro-batch size is a shape, so each one in use costs a compilation: the search runs over a fixed
ladder. The number of micro-batches is a loop count and free, so all of them are tried.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxgoodput.goodput.efficiency import efficiency
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import (
    Placement,
    compute_time,
    feeding_time,
    last_micro_batch_time,
)

MAX_SIZES = 13  # of the common ladder; a placement adds at most three of its own
RATIO = 1.42  # between sizes: half of it off the optimum costs less than 1 % (log-concave goodput)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """One way to run a step: the global batch is the product of the three."""

    micro_batch_size: int
    """Samples, per replica."""
    num_micro_batches: int
    """At least 1."""
    num_replicas: int
    """Over all nodes."""
    strategy: str = field(default="", repr=False)
    """By name, where there are several."""

    def __post_init__(self):
        for name in ("micro_batch_size", "num_micro_batches", "num_replicas"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"BatchConfig.{name} must be at least 1, got {getattr(self, name)}."
                )

    @property
    def global_batch_size(self) -> int:
        """Samples that one update uses."""
        return self.num_replicas * self.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What the user allows, in samples; no configuration ever leaves it.

    Raises ValueError where the limits contradict each other.
    """

    base: int
    """The global batch size that the learning rate was tuned for."""
    max: int
    """The largest global batch size."""
    micro: tuple[int, int] | None = None
    """Samples per replica per micro-batch, smallest and largest; None: whatever fits into memory."""
    min_global: int | None = None
    """The smallest global batch size; None: `base`."""
    max_micro_batches: int = 16
    """1: no accumulation."""
    sizes: tuple[int, ...] | None = None
    """The micro-batch sizes to use instead of a ladder."""

    def __post_init__(self):
        low, high = self.span
        if self.base < 1:
            raise ValueError(
                f"BatchLimits.base={self.base} is not a batch size; give the global batch size "
                "that the learning rate was tuned for, at least 1."
            )
        if self.max < self.base:
            raise ValueError(
                f"BatchLimits.max={self.max} is below base={self.base}: the base batch itself "
                "would not be allowed. Raise max or lower base."
            )
        if not 1 <= low <= high:
            raise ValueError(
                f"BatchLimits.micro={self.micro} must be (smallest, largest) with 1 <= smallest <= "
                f"largest. {'Swap the two.' if low > high >= 1 else 'Start at 1 or more.'}"
            )
        if self.min_global is not None and not 1 <= self.min_global <= self.max:
            raise ValueError(
                f"BatchLimits.min_global={self.min_global} must lie between 1 and "
                f"max={self.max}; leave it out to stay at the base batch or above."
            )
        if self.max_micro_batches < 1:
            raise ValueError(
                f"BatchLimits.max_micro_batches={self.max_micro_batches} must be at least 1; 1 "
                "means no gradient accumulation."
            )
        if self.sizes is not None:
            if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
                raise ValueError(
                    f"BatchLimits.sizes={self.sizes} must be increasing, without repeats and not "
                    "empty; leave it out for a geometric ladder."
                )
            if self.sizes[0] < low or self.sizes[-1] > high:
                raise ValueError(
                    f"BatchLimits.sizes={self.sizes} leaves micro={self.micro}. Widen micro or "
                    "drop the sizes outside it."
                )

    @property
    def span(self) -> tuple[int, int]:
        """The smallest and largest micro-batch allowed; without `micro`, 1 to the largest batch."""
        return (1, self.max) if self.micro is None else self.micro

    @property
    def smallest(self) -> int:
        """The smallest global batch size allowed, samples."""
        return self.base if self.min_global is None else self.min_global

    def allows(self, config: BatchConfig) -> bool:
        """Whether a batch is within the limits."""
        low, high = self.span
        return (
            low <= config.micro_batch_size <= high
            and config.num_micro_batches <= self.max_micro_batches
            and self.smallest <= config.global_batch_size <= self.max
        )

    def ladder(self, num_replicas: int | None = None) -> tuple[int, ...]:
        """The only micro-batch sizes that are ever compiled: at most 16, both ends included.

        Geometric, rounded to numbers that hardware likes. For a known number of replicas, only the
        sizes that fit the limits, and with them the sizes at which the smallest, the base and the
        largest global batch are met most closely.

        >>> BatchLimits(base=32, max=1024, micro=(8, 64)).ladder()
        (8, 12, 16, 24, 32, 48, 64)
        """
        if num_replicas is None:
            return _common_sizes(self)
        sizes = {*_common_sizes(self), *_own_sizes(self, num_replicas)}
        return tuple(sorted(b for b in sizes if _feasible(self, num_replicas, b)))

    def base_config(
        self, num_replicas: int, micro_batch_sizes: Sequence[int] | None = None
    ) -> BatchConfig:
        """The base batch exactly, in as few micro-batches as the limits allow.

        `micro_batch_sizes` narrows the choice (None = any size within `micro`). Raises ValueError,
        naming the nearest base batch sizes that work, where the replicas cannot share it evenly.
        """
        found = _exact(self, self.base, num_replicas, micro_batch_sizes)
        if found is not None:
            return found
        nearest = []
        for step in (-1, 1):
            size = self.base // num_replicas * num_replicas + (num_replicas if step > 0 else 0)
            stop = num_replicas if step < 0 else max(2 * self.base, 2 * num_replicas * self.span[0])
            for other in range(size, stop + step, step * num_replicas):
                if other > 0 and _exact(self, other, num_replicas, micro_batch_sizes):
                    nearest.append(other)
                    break
        remedy = (
            f"The nearest base batch sizes that work are {' and '.join(map(str, nearest))}."
            if nearest
            else "No base batch size near it works: widen micro or raise max_micro_batches."
        )
        sizes = "" if micro_batch_sizes is None else f" out of {sorted(micro_batch_sizes)}"
        raise ValueError(
            f"base={self.base} samples cannot be split evenly over {num_replicas} replicas with "
            f"{self.span[0]} to {self.span[1]} samples per micro-batch{sizes} and at most "
            f"{self.max_micro_batches} micro-batches. {remedy}"
        )


def best_batch(
    model: GoodputModel,
    placement: Placement,
    limits: BatchLimits,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
) -> tuple[BatchConfig, float]:
    """The configuration of highest goodput within the limits, and that goodput in useful samples/s.

    Exact over `micro_batch_sizes` (None = the ladder of this placement) and every number of
    micro-batches; of equals, the one of fewest micro-batches, then of the smallest micro-batch.
    Where the gradient noise is unknown (NaN) only the base batch has a known goodput, and it is
    chosen.

    Raises ValueError where no size fits, or where the model knows nothing about any that does.
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
            "PerfFit.explore() to assume the best."
        )
    # Transposed: argmax takes the first of equals, and that should be the fewest micro-batches.
    table = np.where(np.isnan(table), -np.inf, table).T
    count, size = np.unravel_index(int(np.argmax(table)), table.shape)
    config = BatchConfig(
        micro_batch_size=int(sizes[size]),
        num_micro_batches=int(counts[count]),
        num_replicas=replicas,
    )
    return config, float(table[count, size])


def goodput_table(model: GoodputModel, limits: BatchLimits, placements: Placement) -> np.ndarray:
    """[placements] useful samples/s of the best configuration on each; what `best_batch` finds.

    `placements` holds arrays of one length. NaN where the model knows nothing about the placement's
    kind of link; 0 where the limits allow nothing there.
    """
    nodes = np.atleast_1d(np.asarray(placements.num_nodes)).astype(np.int64)
    replicas = np.atleast_1d(np.asarray(placements.num_replicas)).astype(np.int64)
    if nodes.shape != replicas.shape or nodes.ndim != 1:
        raise ValueError(
            f"placements needs two arrays of one length, but num_nodes has shape {nodes.shape} and "
            f"num_replicas {replicas.shape}."
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
    """[placements, sizes, counts] useful samples/s; -inf outside the limits.

    The same formulas as `GoodputModel.goodput`; only the powers, which do not depend on the number
    of micro-batches, are taken once.
    """
    exists = (sizes > 0)[..., None]  # 0 stands for "no rung here"
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
    """The sizes that do not depend on the number of replicas."""
    if limits.sizes is not None:
        return limits.sizes
    low, high = limits.span
    high = max(low, min(high, limits.max))  # one replica never computes more than the whole batch
    num_sizes = min(MAX_SIZES, 1 + math.ceil(math.log(high / low) / math.log(RATIO)))
    inner = np.geomspace(low, high, num_sizes)[1:-1]
    rounded = (b for b in map(_round, inner) if low < b < high)
    return tuple(sorted({low, high, *rounded}))


def _round(size: float) -> int:
    """The nearest number of the form 2^n or 3 * 2^n: what tiles well and divides most batches."""
    power = 2 ** math.floor(math.log2(size))
    nearest = min((power, 1.5 * power, 2 * power), key=lambda rung: abs(math.log(rung / size)))
    return math.ceil(nearest)


def _own_rung_table(limits: BatchLimits, replicas: np.ndarray) -> np.ndarray:
    """[placements, 3] sizes at which the smallest, base and largest batch are met; 0 = none."""
    if limits.sizes is not None:
        return np.zeros((len(replicas), 0), np.int64)
    low, high = limits.span
    own = np.zeros((len(replicas), 3), np.int64)
    for column, target, upward in ((0, limits.smallest, True), (1, limits.max, False)):
        # In as few micro-batches as it takes: the share of one replica, then of one micro-batch.
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
    """The sizes that one number of replicas adds."""
    own = _own_rung_table(limits, np.array([num_replicas]))[0]
    return tuple(int(b) for b in own if b)


def _feasible(limits: BatchLimits, num_replicas: int, size: int) -> bool:
    """Whether some number of micro-batches of `size` meets the limits."""
    part = num_replicas * size
    most = min(limits.max // part, limits.max_micro_batches)
    return most >= 1 and most * part >= limits.smallest


def _exact(
    limits: BatchLimits, target: int, num_replicas: int, sizes: Sequence[int] | None
) -> BatchConfig | None:
    """`target` samples exactly in the fewest micro-batches, or None."""
    low, high = limits.span
    for count in range(1, limits.max_micro_batches + 1):
        size, rest = divmod(target, num_replicas * count)
        if not rest and low <= size <= high and (sizes is None or size in sizes):
            return BatchConfig(
                micro_batch_size=size, num_micro_batches=count, num_replicas=num_replicas
            )
    return None


def _infeasible(limits: BatchLimits, num_replicas: int, sizes: Sequence[Any]) -> str:
    """Why nothing fits, and what to change."""
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
