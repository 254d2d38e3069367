"""Jobs that advance as measured tables say, and learn their own models from what they measure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxgoodput.cluster.published.tables import Application, Counts
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import Mode
from jaxgoodput.cluster.simulate.job import SimulatedJob, mode_of, packed, spec_of
from jaxgoodput.cluster.simulate.learner import Learner, split
from jaxgoodput.cluster.simulate.settings import Pin, Settings
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.perf import PerfParams
from jaxgoodput.specs import Shape

# A later epoch, with a larger batch, is not this much faster than the present one.
FASTER_YET = 8.0


@dataclass(frozen=True)
class TableTruth:
    """Jobs that advance as the measured tables of Pollux or Sia say.

    Raises ValueError for a job whose application has no tables.
    """

    applications: Mapping[str, Application]
    _learners: dict = field(default_factory=dict, repr=False, compare=False)

    def job(self, trace: TraceJob, settings: Settings, index: int) -> "TableJob":
        """The job of one line of a workload."""
        if trace.application not in self.applications:
            raise ValueError(
                f"job {trace.id!r} runs {trace.application!r}, but there are tables of "
                f"{', '.join(sorted(self.applications))} only; read the folder that has it."
            )
        application = self.applications[trace.application]
        mode = mode_of(trace, settings)
        pin = settings.pins.get(trace.application) if mode != "rigid" else None
        for kind in application.steps:
            self._learners.setdefault((trace.application, kind), Learner(application, kind))
        learners = {kind: self._learners[trace.application, kind] for kind in application.steps}
        rng = np.random.default_rng([settings.seed, index])
        return TableJob(trace, settings, application, learners, mode, pin, rng)


class TableJob:
    """One job of `TableTruth`; see `SimulatedJob`."""

    def __init__(
        self,
        trace: TraceJob,
        settings: Settings,
        application: Application,
        learners: Mapping[str, Learner],
        mode: Mode,
        pin: Pin | None,
        rng: np.random.Generator,
    ):
        self._settings, self._app = settings, application
        self._learners, self._rng = learners, rng
        fixed = trace.global_batch_size if pin is None else pin.global_batch_size
        self._batch = fixed if pin is not None or mode != "adaptive" else None
        widest = application.max_batch if self._batch is None else self._batch
        low = min(application.limits(kind)[0] for kind in application.steps)
        largest = min(settings.max_devices, widest // low) if pin is None else pin.num_devices
        self.application = application.name
        self.spec = spec_of(trace, mode, largest, application.steps)
        self._epoch, self._progress = 0, 0.0
        self._kind, self._counts = "", ()
        self._micro, self._count = 0, 1
        self._profiles: dict[str, dict] = {}  # by kind, in the order of first use
        self._perf: dict[str, PerfParams] = {}  # of profiles that have not changed since
        self._grad: GradParams | None = None
        self._chosen: Any = None  # what the batch was last chosen from
        self._offered: tuple[Any, Mapping[Shape, float]] = (None, {})

    @property
    def done(self) -> bool:
        """Whether all epochs are over."""
        return self._epoch >= self._app.runs.num_epochs

    @property
    def largest_profiled(self) -> int:
        """Devices of the largest size that it has measured, on any kind."""
        return max((k[1] for profile in self._profiles.values() for k in profile), default=0)

    @property
    def global_batch_size(self) -> int:
        """Samples per update at present."""
        return sum(self._counts) * self._micro * self._count

    def place(self, kind: str, counts: Counts) -> None:
        """Go on with so many devices on each node, with a new batch."""
        self._kind, self._counts, self._chosen = kind, tuple(counts), None
        if counts:
            self._choose_batch()

    def _choose_batch(self) -> None:
        devices = sum(self._counts)
        app, (_, high) = self._app, self._app.limits(self._kind)
        if self._batch is None and self._kind in self._profiles and self._grad is not None:
            perf = self._model(self._kind)
            inputs = (id(perf), self._grad.sqr, self._grad.var)
            if inputs != self._chosen:
                self._chosen = inputs
                learner = self._learners[self._kind]
                self._micro, self._count = learner.choose(
                    perf, self._grad, len(self._counts), devices
                )
            return
        batch = self._batch
        if batch is None:
            batch = max(app.base_batch, app.limits(self._kind)[0] * devices)
        self._micro, self._count = split(batch, devices, app.base_batch, high, app.max_batch)

    def _model(self, kind: str) -> PerfParams:
        """The fit to what was measured on a kind."""
        if kind not in self._perf:
            self._perf[kind] = self._learners[kind].fit(self._profiles[kind])
        return self._perf[kind]

    def _rate(self) -> float:
        """Base steps per second at present, by the tables."""
        step, sync = self._app.steps[self._kind].times(self._counts, self._micro)
        batch = self.global_batch_size
        sqr, var = self._app.runs.moments(batch, self._epoch)
        worth = (var + sqr) / (var * self._app.base_batch / batch + sqr)
        seconds = step + (step - sync) * (self._count - 1)
        return worth / seconds / self._settings.slowdown.get(self.application, 1.0)

    def _observe(self) -> None:
        """Measure the present configuration: its times once, the gradient whenever it changed."""
        key = len(self._counts), sum(self._counts), self._micro
        profile = self._profiles.setdefault(self._kind, {})
        if key not in profile:
            step, sync = self._app.steps[self._kind].times(self._counts, self._micro)
            noise = self._noise(self._settings.step_noise)
            profile[key] = step * noise, sync * noise
            self._perf.pop(self._kind, None)
        sqr, var = self._app.runs.moments(self.global_batch_size, self._epoch)
        noise = self._settings.gradient_noise
        self._grad = GradParams(sqr=sqr * self._noise(noise), var=var * self._noise(noise))

    def _noise(self, deviation: float) -> float:
        return math.exp(deviation * self._rng.standard_normal()) if deviation else 1.0

    def advance(self, seconds: float, speed: float = 1.0) -> float:
        """Work for at most `seconds`; the published rule, epoch by epoch."""
        left = seconds
        while left > 0 and not self.done:
            self._observe()
            rate = self._rate() * speed
            end = self._app.runs.epoch_ends[self._epoch]
            if self._progress + rate * left < end:
                self._progress += rate * left
                left = 0.0
            else:
                needed = (end - self._progress) / rate
                needed = float(round(needed)) if self._settings.rounding else needed
                self._epoch += 1
                self._progress = end
                left = max(left - needed, 0.0)
            if not self.done:
                self._choose_batch()
        return seconds - left

    def next_stop(self, seconds: float, speed: float = 1.0) -> float | None:
        """Seconds until the last epoch, or the one before a possible end, is over; changes nothing."""
        runs = self._app.runs
        if self.done or not self._counts:
            return None
        reach = self._rate() * speed * seconds
        if self._progress + FASTER_YET * reach < runs.epoch_ends[-1]:
            return None
        needed = (runs.epoch_ends[self._epoch] - self._progress) * seconds / reach
        return float(needed) if needed <= seconds else None

    def samples_per_s(self) -> float:
        """Samples that it takes in a second where it is now, by the tables."""
        step, sync = self._app.steps[self._kind].times(self._counts, self._micro)
        seconds = step + (step - sync) * (self._count - 1)
        slowdown = self._settings.slowdown.get(self.application, 1.0)
        return float(self.global_batch_size / seconds / slowdown)

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """Useful samples/s by its own models; steps/s, true ones, where its batch is fixed.

        A kind without measurements is projected from the first one that has some, by the ratio of
        the samples/s of one device at the largest micro-batch (Sia's bootstrapping). Before the
        first run one device of each kind is worth 1, and nothing else is known.
        """
        if self.spec.mode != "adaptive":
            return self._true_speeds(shapes)
        grad = self._grad
        models = {kind: id(self._model(kind)) for kind in self._profiles}
        moments = None if grad is None else (grad.sqr, grad.var)
        key = shapes, moments, tuple(models.items()), self._limit()
        if self._offered[0] != key:
            self._offered = key, self._estimate(shapes)
        return self._offered[1]

    def _limit(self) -> int:
        """The largest size that it may be offered."""
        growth, most = self._settings.growth, self.spec.max_devices
        if growth is None:
            return most
        return min(most, max(int(growth * self.largest_profiled), 1))

    def _estimate(self, shapes: tuple[Shape, ...]) -> dict[Shape, float]:
        limit = self._limit()
        table: dict[Shape, float] = {}
        for kind in self._app.steps:
            chosen = tuple(s for s in shapes if s.kind == kind and s.num_devices <= limit)
            if not chosen:
                continue
            if self._grad is None or not self._profiles:
                table |= {shape: 1.0 for shape in chosen if shape.num_devices == 1}
                continue
            source = kind if kind in self._profiles else next(iter(self._profiles))
            places = tuple((shape.num_nodes, shape.num_devices) for shape in chosen)
            found = self._learners[source].goodput(
                self._model(source), self._grad, places, self._batch
            )
            ratio = 1.0 if source == kind else self._single(kind) / self._single(source)
            best = found.max(1) * ratio
            table |= {s: float(g) for s, g in zip(chosen, best, strict=True) if g > 0}
        return table

    def _single(self, kind: str) -> float:
        """Samples/s of one device at its largest micro-batch."""
        steps, size = self._app.steps[kind], self._app.limits(kind)[1]
        return size / steps.times((1,), size)[0]

    def _true_speeds(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        rigid, most = self.spec.num_devices, self.spec.max_devices
        if self._offered[0] != shapes:
            chosen = [s for s in shapes if s.kind in self._app.steps and s.num_devices <= most]
            # Devices of a full node: the largest size that is offered on one.
            full: dict[str, int] = {}
            for shape in shapes:
                if shape.num_nodes == 1:
                    full[shape.kind] = max(full.get(shape.kind, 1), shape.num_devices)
            table = {
                shape: rate
                for shape in chosen
                if (rigid is None or shape.num_devices == rigid)
                and (rate := self._steps(shape, full.get(shape.kind, 1)))
            }
            self._offered = shapes, table
        return self._offered[1]

    def _steps(self, shape: Shape, per_node: int) -> float | None:
        """True optimizer steps/s at the fixed batch on a packed placement; None = not possible."""
        app, devices = self._app, shape.num_devices
        high = app.limits(shape.kind)[1]
        micro, count = split(self._batch or 0, devices, app.base_batch, high, app.max_batch)
        times = app.steps[shape.kind].times_of_sizes(
            packed(devices, per_node), np.array([micro], float)
        )
        step, sync = times[0]
        rate = 1.0 / (step + (step - sync) * (count - 1))
        return float(rate) if rate > 0 else None

    def remaining(self) -> float | None:
        """Steps left where the batch is fixed; else useful samples, if it may say so or has a deadline."""
        runs, batch = self._app.runs, self._batch
        if self.spec.mode != "adaptive" and batch is not None:
            last = runs.num_epochs - 1
            if self._epoch >= last:
                return 1.0  # as published: the last epoch counts as one step
            return runs.iterations_at_end(batch, last) - runs.iterations_at_end(batch, self._epoch)
        if not self._settings.declared_progress and self.spec.deadline_s is None:
            return None
        return float(runs.epoch_ends[-1] - self._progress) * self._app.base_batch

    def save(self) -> tuple[int, float]:
        """The epoch and the base steps done."""
        return self._epoch, self._progress

    def restore(self, saved: tuple[int, float]) -> None:
        """Fall back to that epoch and those base steps."""
        self._epoch, self._progress = saved
        self._chosen = None

    def isolated_s(self, kind: str, counts: Counts) -> float:
        """Seconds that all of its work takes on that placement alone, at its best batch."""
        learner = self._learners[kind]
        return learner.isolated_s(counts, self._batch) * self._settings.slowdown.get(
            self.application, 1.0
        )

    def beside(self, other: SimulatedJob, kind: str) -> float | None:
        """Unknown: nobody measured two of these applications on the same devices."""
        return None
