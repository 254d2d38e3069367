"""Step times: how long each configuration takes, without compilation and with old measurements fading out.

A step's time runs from the completion of the step before to its own (`interval`). It includes synchronisation
and the wait for the batch, but not time in which the device was idle because the loop was busy elsewhere.

`TimingTable` keeps the latest times of every configuration and reports medians, so that one slow step does
not matter. The weight of a configuration halves every `half_life_steps` after its last use. Steps that ran
beside a background compilation are stored separately and count only until there are undisturbed ones.
"""

import dataclasses
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.perf import Feeding, PerfParams, Placement, step_time
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.block_times import KEEP, BlockTimes
from jaxgoodput.tune.verdict import StrategyOption

MIN_COUNT = 3  # fewer steps make no median
BUSY_WEIGHT = 0.1  # weight of a median of disturbed steps


@dataclass(frozen=True)
class TimingKey:
    """The properties that a step's time depends on."""

    num_nodes: int
    num_replicas: int
    micro_batch_size: int
    num_micro_batches: int
    measured: bool  # whether the step also measures the gradient noise


@dataclass(frozen=True)
class Parts:
    """Seconds of one step and of its parts; a part that was not measured on its own is NaN."""

    step_s: float
    accumulate_s: float = float("nan")  # all micro-batches of the step
    reduce_s: float = float("nan")
    update_s: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class DispatchedStep:
    """A step that was dispatched to the devices, with what decisions need to know of it."""

    step: int
    """Its number, counted from 1."""
    config: BatchConfig
    """Its batch."""
    measured: bool
    """Whether it measures the gradient noise."""
    began_s: float
    """When it was dispatched, less what the loop waited for its batch."""
    timed: bool
    """False for the first step of its kind, or if something was compiled meanwhile."""
    busy: bool
    """Whether something else, such as a compilation, competed for the processors."""
    num_samples: int
    """Samples of this step."""
    samples: int
    """Samples of the run, with this step's."""
    num_batches_taken: int
    """Wishes for a batch that the loop had taken when it dispatched this step."""
    num_together: int = 1
    """Number of steps that were dispatched together with it, itself included."""
    is_last: bool = True
    """Whether it is the last of these."""


@dataclass(frozen=True, kw_only=True)
class TimingRow:
    """The entries of a `TimingTable` for one configuration, as saved in a checkpoint."""

    key: TimingKey
    """The configuration."""
    last: int
    """Step at which the configuration was last used."""
    clean: tuple[Parts, ...]
    """Latest undisturbed steps."""
    busy: tuple[Parts, ...]
    """Latest steps that ran beside a compilation."""


def interval(previous_ready_s: float | None, began_s: float, ready_s: float) -> float:
    """Return the seconds that a step took, from its begin or the end of the step before, whichever is later.

    >>> interval(10.0, 9.0, 10.5)  # queued behind the previous step
    0.5
    >>> interval(10.0, 10.4, 10.5)  # the loop was elsewhere for 0.4 s; that is not step time
    0.09999999999999964
    """
    start = began_s if previous_ready_s is None else max(previous_ready_s, began_s)
    return ready_s - start


def key_of(num_nodes: int, config: BatchConfig, *, measured: bool) -> TimingKey:
    """Return the key of a configuration's times, with or without a noise measurement."""
    return TimingKey(
        num_nodes=num_nodes,
        num_replicas=config.num_replicas,
        micro_batch_size=config.micro_batch_size,
        num_micro_batches=config.num_micro_batches,
        measured=measured,
    )


class TimingTable:
    """Recent step times by configuration. Not thread-safe; `rows` are saved in checkpoints."""

    def __init__(self, *, half_life_steps: float = 2000.0):
        self._half_life_steps = half_life_steps
        self._rows: dict[TimingKey, TimingRow] = {}

    def add(
        self, key: TimingKey, parts: Parts, step: int, *, busy: bool = False, count: int = 1
    ) -> None:
        """Record `count` steps; `busy` says that a compilation competed for the processors."""
        row = self._rows.get(key) or TimingRow(key=key, last=step, clean=(), busy=())
        kind = "busy" if busy else "clean"
        latest = (*getattr(row, kind), *[parts] * count)[-KEEP:]
        self._rows[key] = dataclasses.replace(row, last=step, **{kind: latest})

    def _parts(self, key: TimingKey) -> Sequence[Parts]:
        """Return a key's undisturbed steps if there are enough, else the ones beside a compilation."""
        row = self._rows.get(key)
        if row is None:
            return ()
        return row.clean if len(row.clean) >= MIN_COUNT or not row.busy else row.busy

    def median_s(self, key: TimingKey) -> float:
        """Return the median seconds of a step; NaN if none was recorded."""
        rows = self._parts(key)
        return statistics.median(p.step_s for p in rows) if rows else math.nan

    def count(self, key: TimingKey) -> int:
        """Return how many steps the median is taken over."""
        return len(self._parts(key))

    def timed_sizes(self, num_nodes: int, num_replicas: int, *, clean: bool) -> set[int]:
        """Return the micro-batch sizes whose step time is known on a placement.

        `clean` counts undisturbed steps only.
        """
        return {
            key.micro_batch_size
            for key, row in self._rows.items()
            if (key.num_nodes, key.num_replicas) == (num_nodes, num_replicas)
            and max(len(row.clean), 0 if clean else len(row.busy)) >= MIN_COUNT
        }

    def disturbance(self) -> float:
        """Return how much longer steps take beside a compilation: 0.5 is half as long again, NaN unknown."""
        ratios = [
            _median(p.step_s for p in row.busy) / _median(p.step_s for p in row.clean)
            for row in self._rows.values()
            if min(len(row.busy), len(row.clean)) >= MIN_COUNT
        ]
        return statistics.median(ratios) - 1 if ratios else math.nan

    def step_s(self, num_nodes: int, config: BatchConfig) -> float:
        """Return the median seconds of a configuration's steps; NaN if none was recorded.

        Uses steps without a noise measurement, or with one if they say more or the others are too few.
        """
        plain, measured = (key_of(num_nodes, config, measured=m) for m in (False, True))
        for key, other in ((plain, measured), (measured, plain)):
            if self.count(key) >= MIN_COUNT and not self._says_more(other, key):
                return self.median_s(key)
        return self.median_s(max(plain, measured, key=self.count))

    def timings(self, step: int) -> StepTimings | None:
        """Return the medians as input of the fit; None before any configuration has `MIN_COUNT` steps.

        A row of the fit is a step of one micro-batch. A step of k > 1 micro-batches is shortened by the time
        of k - 1 of them. That time was measured on its own, or follows from a step with another k.
        Failing both, each micro-batch is taken to be a k-th of the step, so that synchronisation and update
        count as computing until another k is seen.
        """
        shapes: dict[tuple[int, int, int], list[_Medians]] = {}
        for key, row in self._rows.items():
            other = dataclasses.replace(key, measured=not key.measured)
            if self.count(key) < MIN_COUNT or self._says_more(other, key):
                continue
            shape = (key.num_nodes, key.num_replicas, key.micro_batch_size)
            shapes.setdefault(shape, []).append(self._medians(key, step - row.last))
        rows = [(*shape, *_one_micro_batch(seen)) for shape, seen in shapes.items()]
        # If the clock is too coarse for the step, it says 0, which must not be taken for a time.
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

    def _medians(self, key: TimingKey, age_steps: int) -> "_Medians":
        """Return the medians of a configuration that was last used `age_steps` ago."""
        parts = self._parts(key)
        fade = 0.5 ** (age_steps / self._half_life_steps)
        if parts is self._rows[key].busy:
            fade *= BUSY_WEIGHT
        return _Medians(
            num_micro_batches=key.num_micro_batches,
            step_s=_median(p.step_s for p in parts),
            accumulate_s=_median(p.accumulate_s / key.num_micro_batches for p in parts),
            reduce_s=_median(p.reduce_s for p in parts),
            update_s=_median(p.update_s for p in parts),
            weight=len(parts) / KEEP * fade,
        )

    def _says_more(self, other: TimingKey, key: TimingKey) -> bool:
        """Return whether `other`, which differs only in `measured`, is the better source for the fit.

        Undisturbed steps without a measurement are. If there are none, all others take longer than these, so
        the shorter ones are closer.
        """
        if self.count(other) < MIN_COUNT:
            return False
        plain, measured = (other, key) if key.measured else (key, other)
        is_plain_better = len(self._rows[plain].clean) >= MIN_COUNT or self.median_s(
            plain
        ) < self.median_s(measured)
        return is_plain_better == key.measured

    def rows(self) -> tuple[TimingRow, ...]:
        """Return the whole table, for a checkpoint."""
        return tuple(self._rows.values())

    def restore(self, rows: Iterable[TimingRow]) -> None:
        """Take over the rows of a checkpoint."""
        self._rows |= {row.key: row for row in rows}


class SwitchCosts:
    """The cost of changing the batch: the extra time of the first step after each change.

    `book` is called with every cost, in seconds.
    """

    def __init__(self, book: Callable[[float], None]):
        self._book = book
        self._costs_s: deque[float] = deque(maxlen=9)
        self._first: tuple[TimingKey, float, int] | None = None  # not compared yet

    def add_first_steps(self, key: TimingKey, step_s: float, count: int) -> None:
        """Note the first steps after a change, dispatched together; `compare` books their cost later."""
        self._first = key, step_s, count

    def compare(self, table: TimingTable) -> None:
        """Book how much longer the first step took than usual ones, once `table` has enough of its kind."""
        if self._first is None or table.count(self._first[0]) < MIN_COUNT:
            return
        key, step_s, count = self._first
        cost_s = max(step_s - table.median_s(key), 0.0) * count
        self._costs_s.append(cost_s)
        self._book(cost_s)
        self._first = None

    @property
    def median_s(self) -> float:
        """The usual cost of a change, in seconds; 0 before the first change."""
        return statistics.median(self._costs_s) if self._costs_s else 0.0


class StrategyTimings:
    """A table of step times and a fit for each strategy, because another layout is another program.

    `add` and `rows` may be called from different threads, everything else from one. `book` is called with the
    seconds that each change of the batch has cost.
    """

    def __init__(self, num_nodes: int, book: Callable[[float], None] = lambda seconds: None):
        self.num_nodes = num_nodes
        self.switches = SwitchCosts(book)
        self.fits: dict[str, PerfFit | None] = {}
        self.blocks = BlockTimes()
        self._tables: dict[str, TimingTable] = {}
        self._lock = threading.Lock()

    def table(self, strategy: str) -> TimingTable:
        """Return the step times of a strategy."""
        return self._tables.setdefault(strategy, TimingTable())

    def add(
        self,
        config: BatchConfig,
        parts: Parts,
        step: int,
        *,
        measured: bool,
        busy: bool,
        num_together: int = 1,
    ) -> None:
        """Record steps of a configuration: see `TimingTable.add`.

        `num_together` is how many were dispatched together, each of which took as long as `parts` says. From
        the times of a batch that has no blocks yet, but may have some if it is adopted, is taken what they
        have saved elsewhere.
        """
        if not measured:
            self.blocks.add(config, parts.step_s, num_together=num_together, busy=busy)
        if num_together == 1:
            step_s = self.blocks.corrected(config, parts.step_s)
            parts = dataclasses.replace(parts, step_s=step_s)
        with self._lock:
            self.table(config.strategy).add(
                self.key(config, measured=measured), parts, step, busy=busy, count=num_together
            )

    def step_s(self, config: BatchConfig) -> float:
        """Return the median seconds of a configuration's steps; NaN if none was recorded."""
        return self.table(config.strategy).step_s(self.num_nodes, config)

    def key(self, config: BatchConfig, *, measured: bool) -> TimingKey:
        """Return the key of a configuration's times, with or without a noise measurement."""
        return key_of(self.num_nodes, config, measured=measured)

    def placement(self, config: BatchConfig) -> Placement:
        """Return the nodes and replicas that a configuration runs on."""
        return Placement(num_nodes=self.num_nodes, num_replicas=config.num_replicas)

    def timed(self, config: BatchConfig, *, clean: bool) -> set[int]:
        """Return the timed micro-batch sizes of the configuration's strategy; `clean`: undisturbed only."""
        table = self.table(config.strategy)
        return table.timed_sizes(self.num_nodes, config.num_replicas, clean=clean)

    def is_timed(self, config: BatchConfig, *, clean: bool) -> bool:
        """Return whether steps of this very configuration were timed often enough; `clean` as above."""
        table = self.table(config.strategy)
        counts = [table.count(self.key(config, measured=x)) for x in (False, True)]
        return max(counts) >= MIN_COUNT and config.micro_batch_size in self.timed(
            config, clean=clean
        )

    def known(self, there: StrategyOption) -> StrategyOption:
        """Return the option `there` with its strategy's step times and last fit, if there is one."""
        strategy = there.config.strategy
        fit, timings = self.fits.get(strategy), self.table(strategy).timings(0)
        timed = self.timed(there.config, clean=True) & set(there.ready)
        if fit is None or timings is None or not timed:
            return dataclasses.replace(there, timed=timed)
        residuals = residuals_of(fit.params, there.placement, timings, timed)
        return dataclasses.replace(there, timed=timed, fit=fit, residuals=residuals)

    def rows(self) -> dict[str, tuple[TimingRow, ...]]:
        """Return the whole tables by strategy, for a checkpoint."""
        with self._lock:
            # A copy, because the other thread may add a table at the same time.
            return {name: table.rows() for name, table in list(self._tables.items())}

    def restore(self, saved: Mapping[str, Sequence[TimingRow]]) -> None:
        """Take over the rows of a checkpoint. The fits are not saved; they are made again from the rows."""
        for strategy, rows in saved.items():
            self.table(strategy).restore(rows)


class FeedingTimes:
    """The measured seconds to prepare a batch, by global batch size."""

    def __init__(self):
        self._seconds: dict[int, float] = {}

    def add(self, global_batch_size: int, seconds: float) -> None:
        """Record the time of the newest batch of a size. Any thread may call this."""
        self._seconds[global_batch_size] = seconds

    def of(self, global_batch_size: int) -> float:
        """Return the newest time of a batch size; NaN if none was recorded."""
        return self._seconds.get(global_batch_size, math.nan)

    def line(self, current: int, step_s: float) -> Feeding | None:
        """Return the preparing time as a line in the batch size; caps the time of `current` at `step_s`."""
        if math.isfinite(step_s) and current in self._seconds:
            self._seconds[current] = min(self._seconds[current], step_s)
        return feeding_of(dict(self._seconds))


def residuals_of(
    perf: PerfParams, placement: Placement, timings: StepTimings, timed: Collection[int]
) -> tuple[tuple[int, float], ...]:
    """Return (micro-batch size, measured / modelled step time) of the `timed` sizes, in order of size.

    The model is a straight line, but caches and the allocator bend it. These ratios correct it, so that a
    size that was timed without disturbance counts with its measured time.
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
    """Return the line through the seconds of preparing a batch, by global batch size; None without times.

    It minimises the squared relative errors, with no negative coefficient. A single size gives a level line,
    which is no argument against a larger batch.
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
class _Medians:
    """The median times of one configuration."""

    num_micro_batches: int
    step_s: float
    accumulate_s: float  # of one micro-batch
    reduce_s: float
    update_s: float
    weight: float


def _one_micro_batch(rows: Sequence[_Medians]) -> tuple[float, float, float, float, float]:
    """Return (accumulate, reduce, update, step of one micro-batch, weight) of one micro-batch size."""
    rows = sorted(rows, key=lambda r: r.num_micro_batches)
    least, most = rows[0], rows[-1]
    accumulate = _median(r.accumulate_s for r in rows)
    if math.isnan(accumulate) and len(rows) > 1:
        slope = (most.step_s - least.step_s) / (most.num_micro_batches - least.num_micro_batches)
        # Noise can make the larger count look faster, but a micro-batch is never free.
        accumulate = max(slope, 0.1 * most.step_s / most.num_micro_batches)
    step, more = least.step_s, least.num_micro_batches - 1
    if more and math.isnan(accumulate):
        accumulate, step = least.step_s / least.num_micro_batches, math.nan
    elif more:
        step -= more * accumulate
    return (
        accumulate,
        _median(r.reduce_s for r in rows),
        _median(r.update_s for r in rows),
        step if step > 0 else math.nan,
        sum(r.weight for r in rows),
    )


def _median(values: Iterable[float]) -> float:
    seen = [v for v in values if v == v]
    return statistics.median(seen) if seen else float("nan")
