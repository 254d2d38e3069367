"""Measured applications: how fast they run and how they learn, interpolated between measurements.

There are two kinds of table: step and synchronisation times on one kind of device, by placement and batch per
device; and the progress of whole training runs, by global batch size and epoch. Source: the simulator in the
artifact of Qiao et al., "Pollux", OSDI 2021, which Sia's artifact extends to several kinds. Difference: a
question outside of what was measured is an error instead of an extrapolation.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.interpolate import LinearNDInterpolator
from scipy.spatial import QhullError

Counts = tuple[int, ...]  # devices on each node that a job uses, in the order of its ring

FARTHEST_NODES = 16  # more nodes are taken to be as fast as this many


def normalised(counts: Sequence[int]) -> Counts:
    """Return the smallest rotation of the devices per node, because a ring has no first node.

    >>> normalised((4, 1, 0, 4))
    (1, 4, 4)
    """
    used = tuple(int(count) for count in counts if count)
    return min((used[i:] + used[:i] for i in range(len(used))), default=())


@dataclass(frozen=True)
class Curve:
    """Measured times on one placement, by samples per device; all fields are `[sizes]`, ascending."""

    sizes: np.ndarray  # samples per device of one micro-batch
    step_s: np.ndarray  # one step of one micro-batch
    sync_s: np.ndarray  # the part of the step that synchronises


@dataclass(frozen=True)
class StepTable:
    """Measured step and synchronisation times of one application on one kind of device.

    For a measured placement, times are interpolated over the batch alone. For any other one they are
    piecewise linear (Delaunay) in nodes, devices and batch, from the means of the placements and `points`.
    """

    name: str
    """Name in messages, such as "bert on aws"."""
    curves: Mapping[Counts, Curve]
    """Measurements by normalised placement."""
    points: np.ndarray
    """[rows, 5] measurements at larger scales: nodes, devices, batch per device, step_s, sync_s."""
    _known: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def span(self) -> tuple[int, int]:
        """Smallest and largest batch per device that was measured on any placement."""
        sizes = [curve.sizes for curve in self.curves.values()]
        return int(min(s[0] for s in sizes)), int(max(s[-1] for s in sizes))

    def times(self, counts: Sequence[int], size: float | int) -> tuple[float, float]:
        """Return (step_s, sync_s) of one micro-batch of `size` samples per device on a placement.

        Raises ValueError outside of what was measured.
        """
        key = normalised(counts), size
        if key not in self._known:
            step, sync = self.times_of_sizes(key[0], np.array([size], float))[0]
            if not step > 0:
                raise ValueError(
                    f"{self.name}: {size:g} samples per device on {list(key[0])} devices per node lie "
                    f"outside of what was measured (over all placements, {self.span[0]} to {self.span[1]} "
                    "samples); choose another size or placement, or add measurements."
                )
            self._known[key] = float(step), float(sync)
        return self._known[key]

    def times_of_sizes(self, counts: Sequence[int], sizes: np.ndarray) -> np.ndarray:
        """Return [sizes, 2] seconds of a step and of its synchronisation; NaN beyond what was measured."""
        counts = normalised(counts)
        curve = self.curves.get(counts)
        if curve is not None:
            times = np.stack(
                [np.interp(sizes, curve.sizes, y) for y in (curve.step_s, curve.sync_s)], -1
            )
            outside = (sizes < curve.sizes[0]) | (sizes > curve.sizes[-1])
            return np.where(outside[:, None], np.nan, times)
        where = np.empty((len(sizes), 3))
        where[:, 0], where[:, 1], where[:, 2] = min(len(counts), FARTHEST_NODES), sum(counts), sizes
        return np.asarray(self._elsewhere(where))

    @cached_property
    def _elsewhere(self) -> Callable[[np.ndarray], np.ndarray]:
        """Interpolates times for placements that were not measured; its points are in a fixed order."""
        rows: dict[tuple[int, int, float], list[tuple[float, float]]] = {}
        for counts, curve in self.curves.items():
            for size, step, sync in zip(curve.sizes, curve.step_s, curve.sync_s, strict=True):
                rows.setdefault((len(counts), sum(counts), float(size)), []).append((step, sync))
        keys = sorted(rows)
        means = np.array([np.mean(rows[key], axis=0) for key in keys])
        table = np.concatenate([np.array(keys, float), means], 1)
        if len(self.points):
            table = np.concatenate([table, self.points])
        try:
            return LinearNDInterpolator(table[:, :3], table[:, 3:])
        except QhullError:  # too few points, or all in one plane: nothing lies between them
            return lambda where: np.full((len(where), 2), np.nan)


@dataclass(frozen=True)
class Runs:
    """Whole training runs of one application, one per global batch size; linear in between.

    All tables are `[batches, epochs]`: `progress` and `iterations` are the base steps and optimizer steps
    done at the end of an epoch, `sqr` and `var` the gradient's moments during it (`var` at the base batch).
    """

    name: str
    batches: tuple[int, ...]  # increasing; the first is the base batch
    progress: np.ndarray
    iterations: np.ndarray
    sqr: np.ndarray
    var: np.ndarray
    _known: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_epochs(self) -> int:
        """Number of epochs until the application is done."""
        return self.progress.shape[1]

    @cached_property
    def epoch_ends(self) -> np.ndarray:
        """[epochs] base steps (units of progress) done at the end of each epoch."""
        return self.progress.min(0)

    def _mix(self, table: np.ndarray, batch: float | int, epoch: int) -> float:
        if not self.batches[0] <= batch <= self.batches[-1]:
            raise ValueError(
                f"{self.name}: a global batch of {batch:g} samples lies outside of the measured runs "
                f"({self.batches[0]} to {self.batches[-1]}). Choose one between these."
            )
        upper = bisect.bisect_left(self.batches, batch)
        if self.batches[upper] == batch:
            return float(table[upper, epoch])
        low, high = self.batches[upper - 1], self.batches[upper]
        share = (batch - low) / (high - low)
        return float(table[upper, epoch] * share + table[upper - 1, epoch] * (1.0 - share))

    def moments(self, batch: float | int, epoch: int) -> tuple[float, float]:
        """Return the gradient's squared norm, and its variance at the base batch, in an epoch."""
        key = batch, epoch
        if key not in self._known:
            self._known[key] = self._mix(self.sqr, *key), self._mix(self.var, *key)
        return self._known[key]

    def iterations_at_end(self, batch: float | int, epoch: int) -> float:
        """Return the optimizer steps from the start of training to the end of an epoch, at that batch."""
        return self._mix(self.iterations, batch, epoch)


@dataclass(frozen=True)
class Application:
    """One program that users submit: its speed on each kind of device, and how it learns."""

    name: str
    steps: Mapping[str, StepTable]
    """Measured steps by kind of device."""
    runs: Runs
    micro: tuple[int, int]
    """Smallest and largest micro-batch, in samples per device."""

    @property
    def base_batch(self) -> int:
        """Global batch whose steps are the unit of progress."""
        return self.runs.batches[0]

    @property
    def max_batch(self) -> int:
        """The largest global batch that a job of this application may use."""
        return self.runs.batches[-1]

    def limits(self, kind: str) -> tuple[int, int]:
        """Return the smallest and the largest samples per device and micro-batch on a kind of device."""
        low, high = self.steps[kind].span
        return max(low, self.micro[0]), min(high, self.micro[1])
