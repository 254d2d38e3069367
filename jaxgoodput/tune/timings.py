"""Step times by readiness: how long each configuration takes, compilation excluded, old ones fading.

Seconds come from completion to completion (`interval`), so they include synchronisation and what a step
waited for its batch, and exclude the time during which the device had nothing to do because the loop was
elsewhere. The table keeps
the latest times of every (placement, configuration, measured) and reports medians, so one slow step
does not move it; its weight halves every `half_life_steps` after it was last used. Steps beside a
background compilation are kept apart and count only until there are others.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.perf import Feeding, PerfParams, Placement, step_time
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.verdict import StrategyOption

KEEP = 48  # latest steps behind a median
MIN_COUNT = 3  # fewer say nothing
BUSY_WEIGHT = 0.1  # of a median of disturbed steps


@dataclass(frozen=True)
class TimingKey:
    """What a step time is a property of."""

    num_nodes: int
    num_replicas: int
    micro_batch_size: int
    num_micro_batches: int
    measured: bool  # with noise statistics


@dataclass(frozen=True)
class Parts:
    """Seconds of one step; the parts are NaN where they were not seen apart."""

    step_s: float
    accumulate_s: float = float("nan")  # all micro-batches of the step
    reduce_s: float = float("nan")
    update_s: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class TimingRow:
    """What the table holds of one configuration."""

    key: TimingKey
    """Which one."""
    last: int
    """The step at which it was used last."""
    clean: tuple[Parts, ...]
    """Its latest undisturbed steps."""
    busy: tuple[Parts, ...]
    """Its latest steps beside a compilation."""


def interval(previous_ready_s: float | None, began_s: float, ready_s: float) -> float:
    """Seconds that a step took: from the later of its begin and the end of the step before.

    >>> interval(10.0, 9.0, 10.5)  # queued behind the previous step
    0.5
    >>> interval(10.0, 10.4, 10.5)  # the loop was elsewhere for 0.4 s; that is not step time
    0.09999999999999964
    """
    start = began_s if previous_ready_s is None else max(previous_ready_s, began_s)
    return ready_s - start


class TimingTable:
    """Recent step times by configuration. Used by one thread; `rows` ride in a checkpoint."""

    def __init__(self, *, half_life_steps: float = 2000.0):
        self._half_life_steps = half_life_steps
        self._clean: dict[TimingKey, deque[Parts]] = {}
        self._busy: dict[TimingKey, deque[Parts]] = {}
        self._last: dict[TimingKey, int] = {}

    def add(self, key: TimingKey, parts: Parts, step: int, *, busy: bool = False) -> None:
        """Record one step; `busy` where something else competed for the processors."""
        rows = self._busy if busy else self._clean
        rows.setdefault(key, deque(maxlen=KEEP)).append(parts)
        self._last[key] = step

    def _parts(self, key: TimingKey) -> Sequence[Parts]:
        clean = self._clean.get(key, ())
        return clean if len(clean) >= MIN_COUNT else self._busy.get(key, clean)

    def median_s(self, key: TimingKey) -> float:
        """Median step seconds; NaN where there are none."""
        rows = self._parts(key)
        return statistics.median(p.step_s for p in rows) if rows else float("nan")

    def count(self, key: TimingKey) -> int:
        """Steps behind the median."""
        return len(self._parts(key))

    def timed_sizes(self, num_nodes: int, num_replicas: int, *, clean: bool) -> set[int]:
        """Micro-batch sizes whose step time is known on this placement; `clean`: undisturbed."""
        rows = [*self._clean.items(), *(() if clean else self._busy.items())]
        return {
            key.micro_batch_size
            for key, parts in rows
            if (key.num_nodes, key.num_replicas) == (num_nodes, num_replicas)
            and len(parts) >= MIN_COUNT
        }

    def disturbance(self) -> float:
        """By how much steps beside a compilation took longer, 0.5 is half as long again; NaN unknown."""
        ratios = [
            _median(p.step_s for p in busy) / _median(p.step_s for p in clean)
            for key, busy in self._busy.items()
            if len(busy) >= MIN_COUNT and len(clean := self._clean.get(key, ())) >= MIN_COUNT
        ]
        return statistics.median(ratios) - 1 if ratios else float("nan")

    def step_s(self, num_nodes: int, config: BatchConfig) -> float:
        """Median seconds of a configuration, whichever kind of step was seen more; NaN if none."""
        keys = [
            TimingKey(
                num_nodes, config.num_replicas, config.micro_batch_size, config.num_micro_batches, m
            )
            for m in (False, True)
        ]
        key = max(keys, key=self.count)
        return self.median_s(key)

    def timings(self, step: int) -> StepTimings | None:
        """Medians as the fit wants them; None before any configuration has `MIN_COUNT` steps.

        The fit's rows are steps of one micro-batch. Where a configuration has k > 1, its step is
        brought down by k - 1 micro-batches: measured apart, or from another k of the same size, or,
        where there is neither, taken as a k-th of the step each (synchronisation and update then
        count as computing until another k is seen).
        """
        shapes: dict[tuple[int, int, int], list[_Row]] = {}
        for key, last in self._last.items():
            parts = self._parts(key)
            other = dataclasses.replace(key, measured=not key.measured)
            if len(parts) < MIN_COUNT or self._says_more(other, key):
                continue
            fade = 0.5 ** ((step - last) / self._half_life_steps)
            if parts is self._busy.get(key):
                fade *= BUSY_WEIGHT
            row = _Row(
                num_micro_batches=key.num_micro_batches,
                step_s=_median(p.step_s for p in parts),
                accumulate_s=_median(p.accumulate_s / key.num_micro_batches for p in parts),
                reduce_s=_median(p.reduce_s for p in parts),
                update_s=_median(p.update_s for p in parts),
                weight=len(parts) / KEEP * fade,
            )
            shape = (key.num_nodes, key.num_replicas, key.micro_batch_size)
            shapes.setdefault(shape, []).append(row)
        if not shapes:
            return None
        rows = [(*shape, *_one_micro_batch(seen)) for shape, seen in shapes.items()]
        # A clock too coarse for the step says 0, which is no time.
        rows = [row for row in rows if row[3] > 0 or row[6] > 0]
        if not rows:
            return None
        columns = list(zip(*rows, strict=True))
        counts = [np.asarray(c, np.int64) for c in columns[:3]]
        values = [np.asarray(c, np.float64) for c in columns[3:]]
        return StepTimings(
            num_nodes=counts[0],
            num_replicas=counts[1],
            micro_batch_size=counts[2],
            accumulate_s=values[0],
            reduce_s=values[1],
            update_s=values[2],
            step_s=values[3],
            weight=values[4],
        )

    def _says_more(self, other: TimingKey, key: TimingKey) -> bool:
        """Whether `other`, which differs in the statistics, goes before `key`.

        What was not disturbed does; among equals, steps without statistics say what a step costs.
        """
        if self.count(other) < MIN_COUNT:
            return False
        clean, others = (len(self._clean.get(k, ())) >= MIN_COUNT for k in (key, other))
        return others > clean or (others == clean and key.measured)

    def rows(self) -> tuple[TimingRow, ...]:
        """The whole table, for a checkpoint."""
        return tuple(
            TimingRow(
                key=key,
                last=last,
                clean=tuple(self._clean.get(key, ())),
                busy=tuple(self._busy.get(key, ())),
            )
            for key, last in self._last.items()
        )

    def restore(self, rows: Iterable[TimingRow]) -> None:
        """Take over what `rows` gave."""
        for row in rows:
            for target, parts in ((self._clean, row.clean), (self._busy, row.busy)):
                if parts:
                    target[row.key] = deque(parts, maxlen=KEEP)
            self._last[row.key] = row.last


class StrategyTimings:
    """A table of step times and a fit for each strategy: another layout is another program.

    Used by one thread; `rows` ride in a checkpoint.
    """

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        self._tables: dict[str, TimingTable] = {}
        self.fits: dict[str, PerfFit | None] = {}

    def table(self, strategy: str) -> TimingTable:
        """The step times of a strategy."""
        return self._tables.setdefault(strategy, TimingTable())

    def key(self, config: BatchConfig, *, measured: bool) -> TimingKey:
        """Under which the times of a configuration are kept."""
        return TimingKey(
            num_nodes=self.num_nodes,
            num_replicas=config.num_replicas,
            micro_batch_size=config.micro_batch_size,
            num_micro_batches=config.num_micro_batches,
            measured=measured,
        )

    def placement(self, config: BatchConfig) -> Placement:
        """Where a configuration runs, as the model sees it."""
        return Placement(num_nodes=self.num_nodes, num_replicas=config.num_replicas)

    def timed(self, config: BatchConfig, *, clean: bool) -> set[int]:
        """Micro-batch sizes of the configuration's strategy that were timed; `clean`: undisturbed."""
        table = self.table(config.strategy)
        return table.timed_sizes(self.num_nodes, config.num_replicas, clean=clean)

    def known(self, there: StrategyOption) -> StrategyOption:
        """Another strategy with what is known of it; its fit is as of when it was left."""
        strategy = there.config.strategy
        fit, timings = self.fits.get(strategy), self.table(strategy).timings(0)
        timed = self.timed(there.config, clean=True) & set(there.ready)
        if fit is None or timings is None or not timed:
            return dataclasses.replace(there, timed=timed)
        residuals = residuals_of(fit.params, there.placement, timings, timed)
        return dataclasses.replace(there, timed=timed, fit=fit, residuals=residuals)

    def rows(self) -> dict[str, tuple[TimingRow, ...]]:
        """The whole tables by strategy, for a checkpoint."""
        # Of a copy: a save may come while a strategy is seen for the first time.
        return {name: table.rows() for name, table in list(self._tables.items())}

    def restore(self, saved: Mapping[str, Sequence[TimingRow]]) -> None:
        """Take over what `rows` gave. Fits are made again from the timings."""
        for strategy, rows in saved.items():
            self.table(strategy).restore(rows)


def residuals_of(
    perf: PerfParams, placement: Placement, timings: StepTimings, timed: Collection[int]
) -> tuple[tuple[int, float], ...]:
    """(micro-batch size, measured / modelled step time) of the `timed` sizes, in order of size.

    Caches and the allocator bend the model's straight line; where a size was timed undisturbed, that
    goes before what the model makes of it.
    """
    here = (timings.num_nodes == placement.num_nodes) & (
        timings.num_replicas == placement.num_replicas
    )
    here &= np.isin(timings.micro_batch_size, list(timed)) & np.isfinite(timings.step_s)
    sizes = np.asarray(timings.micro_batch_size)[here]
    ratios = np.asarray(timings.step_s)[here] / step_time(perf, placement, sizes)
    known = np.isfinite(ratios)
    return tuple(sorted(zip(sizes[known].tolist(), ratios[known].tolist(), strict=True)))


def feeding_of(times: Mapping[int, float]) -> Feeding | None:
    """The line through what preparing batches took, by global batch size; None: nothing was prepared.

    Least squares of relative distances, neither part negative. One size says nothing against a larger batch:
    the line is level until there is another.
    """
    if not times:
        return None
    sizes, seconds = (np.array(x, float) for x in zip(*sorted(times.items()), strict=True))
    lines = [(float(np.mean(seconds)), 0.0)]
    if len(sizes) > 1:
        slope, base = np.polyfit(sizes, seconds, 1, w=1 / seconds)
        lines += [(0.0, float(np.mean(seconds / sizes))), (float(base), float(slope))]
    errors = [np.sum(((b + s * sizes) / seconds - 1) ** 2) for b, s in lines]
    good = [i for i, (b, s) in enumerate(lines) if b >= 0 and s >= 0]
    base, slope = lines[min(good, key=lambda i: errors[i])]
    return Feeding(base_s=base, per_sample_s=slope)


@dataclass(frozen=True)
class _Row:
    """Medians of one configuration."""

    num_micro_batches: int
    step_s: float
    accumulate_s: float  # one micro-batch
    reduce_s: float
    update_s: float
    weight: float


def _one_micro_batch(rows: Sequence[_Row]) -> tuple[float, float, float, float, float]:
    """(accumulate, reduce, update, step of one micro-batch, weight) of one micro-batch size."""
    rows = sorted(rows, key=lambda r: r.num_micro_batches)
    least, most = rows[0], rows[-1]
    accumulate = _median(r.accumulate_s for r in rows)
    more = least.num_micro_batches - 1
    if accumulate != accumulate and len(rows) > 1:
        slope = (most.step_s - least.step_s) / (most.num_micro_batches - least.num_micro_batches)
        # Noise can make the larger count look faster; a micro-batch is never free.
        accumulate = max(slope, 0.1 * most.step_s / most.num_micro_batches)
    step = least.step_s - more * accumulate if more else least.step_s
    if accumulate != accumulate and more:
        accumulate, step = least.step_s / least.num_micro_batches, float("nan")
    if step <= 0:
        step = float("nan")
    return (
        accumulate,
        _median(r.reduce_s for r in rows),
        _median(r.update_s for r in rows),
        step,
        sum(r.weight for r in rows),
    )


def _median(values: Iterable[float]) -> float:
    seen = [v for v in values if v == v]
    return statistics.median(seen) if seen else float("nan")
