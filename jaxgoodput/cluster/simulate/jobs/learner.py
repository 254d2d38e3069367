"""How a simulated job learns its speed and chooses its batch size, as AdaptDL does.

A job measures the time of every configuration that it runs, fits a time model for each kind of device, and
searches 50 global batch sizes, geometrically spaced, for the highest goodput (adaptdl/goodput.py,
`optimize`). Jobs with the same measurements share fits and searches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.cluster.published.tables import Application, Counts
from jaxgoodput.goodput.efficiency import GradParams, efficiency, gain
from jaxgoodput.goodput.fit import StepTimings, fit_perf_params
from jaxgoodput.goodput.perf import PerfParams, Placement, step_time

NUM_BATCHES = 50  # global batch sizes tried
ROUNDING = 1e-8  # AdaptDL's tolerance before it rounds up

# (nodes, devices, batch size per device) -> measured (step_s, sync_s).
Profile = Mapping[tuple[int, int, int], tuple[float, float]]


def split(
    batch: float | int, num_devices: int, base: int, largest: int, limit: int
) -> tuple[int, int]:
    """Return (samples per device and micro-batch, number of micro-batches) for about that global batch.

    `largest` is the largest micro-batch. `limit` is the largest global batch, which is never exceeded. If
    there is only one device, it uses two micro-batches above `base`, because its gradient noise needs two
    gradients.

    >>> split(2048, 6, 128, 1024, 4096)
    (342, 1)
    """
    size = math.ceil(batch / num_devices - ROUNDING)
    count = math.ceil(size / largest - ROUNDING)
    if num_devices == 1 and batch > base:
        count = max(count, 2)
    micro = math.ceil(size / count - ROUNDING)
    return min(micro, limit // (num_devices * count)), count


@dataclass(frozen=True)
class Configurations:
    """The configurations that a job could use on some placements; arrays are `[placements, batches]`."""

    at: Placement  # num_nodes and num_replicas, [placements, 1]
    micro: np.ndarray  # samples per device and micro-batch
    count: np.ndarray  # micro-batches
    batch: np.ndarray  # global
    allowed: np.ndarray  # bool


def configurations(
    nodes: Sequence[int],
    devices: Sequence[int],
    application: Application,
    limits: tuple[int, int],
    batch: int | None = None,
) -> Configurations:
    """Return the configurations that AdaptDL could choose on each placement (nodes, devices).

    If `batch` is given, only this global batch is allowed.
    """
    base, most = application.base_batch, application.max_batch
    low, high = limits
    replicas = np.asarray(devices, np.int64)[:, None]
    smallest = np.maximum(base, low * replicas[:, 0])
    if batch is not None:
        pairs = [split(batch, int(k), base, high, most) for k in replicas[:, 0]]
        micro, count = (np.array(column)[:, None] for column in zip(*pairs, strict=True))
        fits = np.ones_like(micro, bool)
    else:
        # If a placement is too large for the largest batch, its range is empty and the row is not allowed.
        fits = (smallest <= most)[:, None]
        steps = np.geomspace(np.minimum(smallest, most), most, NUM_BATCHES, axis=1)
        local = steps / replicas
        count = np.maximum(np.ceil(local / high - ROUNDING), 1)
        alone = (replicas == 1) & (local > base + ROUNDING)
        count = np.where(alone, np.maximum(count, 2), count).astype(np.int64)
        micro = np.ceil(local / count - ROUNDING).astype(np.int64)
    total = replicas * micro * count
    allowed = fits & (micro >= low) & (micro <= high)
    at = Placement(num_nodes=np.asarray(nodes)[:, None], num_replicas=replicas)
    return Configurations(at, micro, count, total, allowed)


@dataclass(frozen=True)
class Learner:
    """Fits time models and finds good configurations for one application on one kind; caches both."""

    application: Application
    kind: str
    _fits: dict = field(default_factory=dict, repr=False, compare=False)
    _configurations: dict = field(default_factory=dict, repr=False, compare=False)
    _speeds: dict = field(default_factory=dict, repr=False, compare=False)
    _isolated: dict = field(default_factory=dict, repr=False, compare=False)

    def fit(self, profile: Profile) -> PerfParams:
        """Return the model of step times that fits a job's measurements, with AdaptDL's priors."""
        key = frozenset(profile.items())
        if key not in self._fits:
            rows = sorted(profile.items())
            nodes, replicas, sizes = np.array([k for k, _ in rows]).T
            step, sync = np.array([times for _, times in rows]).T
            unknown = np.full(len(rows), np.nan)
            timings = StepTimings(
                num_nodes=nodes,
                num_replicas=replicas,
                micro_batch_size=sizes,
                accumulate_s=step - sync,
                reduce_s=unknown,
                update_s=unknown,
                step_s=step,
            )
            self._fits[key] = fit_perf_params(timings, priors="adaptdl").params
        return self._fits[key]

    def configurations(
        self, placements: tuple[tuple[int, int], ...], batch: int | None
    ) -> Configurations:
        """Return the configurations on (nodes, devices) pairs; a `batch` of None means all sizes tried."""
        key = placements, batch
        if key not in self._configurations:
            nodes, devices = zip(*placements, strict=True)
            limits = self.application.limits(self.kind)
            self._configurations[key] = configurations(
                nodes, devices, self.application, limits, batch
            )
        return self._configurations[key]

    def goodput(
        self,
        perf: PerfParams,
        grad: GradParams,
        placements: tuple[tuple[int, int], ...],
        batch: int | None,
    ) -> np.ndarray:
        """Return useful samples/s, as the model `perf` predicts: `[placements, batches]`; 0 = not allowed.

        Placements are (nodes, devices) pairs. `batch` is the only global batch to look at, for one column; if
        None, the columns are the 50 sizes (`NUM_BATCHES`) that AdaptDL tries.
        """
        found = self.configurations(placements, batch)
        key = id(perf), placements, batch
        if key not in self._speeds:
            seconds = step_time(perf, found.at, found.micro, found.count)
            # The key holds the id of `perf`: keeping `perf` stops Python from giving its id to another
            # object.
            self._speeds[key] = perf, np.where(found.allowed, found.batch / seconds, 0.0)
        worth = efficiency(grad, found.batch / self.application.base_batch)
        return self._speeds[key][1] * worth

    def choose(
        self, perf: PerfParams, grad: GradParams, nodes: int, devices: int
    ) -> tuple[int, int]:
        """Return (samples per device and micro-batch, number of micro-batches) with the highest goodput."""
        place = ((nodes, devices),)
        best = int(np.argmax(self.goodput(perf, grad, place, None)[0]))
        found = self.configurations(place, None)
        micro, count = int(found.micro[0, best]), int(found.count[0, best])
        return min(micro, self.application.max_batch // (devices * count)), count

    def isolated_s(self, counts: Counts, batch: int | None) -> float:
        """Return the true seconds of the application on that placement, at the best batch size of each epoch.

        If `batch` is given, it is used in all epochs. Infinite if the tables have no measurement there.
        """
        key = counts, batch
        if key not in self._isolated:
            self._isolated[key] = self._alone(counts, batch)
        return self._isolated[key]

    def _alone(self, counts: Counts, batch: int | None) -> float:
        app, runs = self.application, self.application.runs
        found = self.configurations(((len(counts), sum(counts)),), batch)
        micro, count, total = found.micro[0], found.count[0], found.batch[0]
        times = app.steps[self.kind].times_of_sizes(counts, micro.astype(float))
        seconds = times[:, 0] + (times[:, 0] - times[:, 1]) * (count - 1)
        # Outside of what was measured, times are NaN, which compares false.
        usable = (seconds > 0) & (total <= app.max_batch)
        if not usable.any():
            return math.inf
        batches, seconds = total[usable], seconds[usable]
        work = np.diff(runs.epoch_ends, prepend=0.0)
        needed = 0.0
        for epoch in range(runs.num_epochs):
            sqr, var = np.array([runs.moments(float(b), epoch) for b in batches]).T
            worth = gain(GradParams(sqr=sqr, var=var), batches / app.base_batch)
            needed += float(work[epoch] / (worth / seconds).max())
        return needed
