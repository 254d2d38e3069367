"""Jobs with the speeds of measured tables, which learn models of themselves from their own measurements."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxgoodput.cluster.published.tables import Application, Counts
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import Mode
from jaxgoodput.cluster.simulate.jobs.job import SimulatedJob, mode_of, packed, spec_of
from jaxgoodput.cluster.simulate.jobs.learner import Learner, split
from jaxgoodput.cluster.simulate.settings import Pin, Settings
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.perf import PerfParams
from jaxgoodput.specs import Shape

# Upper bound: a later epoch, with a larger batch, is less than this many times as fast as the current one.
FASTER_YET = 8.0


@dataclass(frozen=True)
class TableTruth:
    """Creates jobs whose speeds are read from the tables that Pollux or Sia measured."""

    applications: Mapping[str, Application]
    _learners: dict = field(default_factory=dict, repr=False, compare=False)

    def job(self, trace: TraceJob, settings: Settings, index: int) -> "TableJob":
        """Return the job of one line of a workload. Raises ValueError if its application has no tables."""
        if trace.application not in self.applications:
            raise ValueError(
                f"job {trace.id!r} runs {trace.application!r}, but there are only tables of "
                f"{', '.join(sorted(self.applications))}. Read the folder that has its tables."
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
    """A simulated job whose speed and gradient noise are read from published measurements."""

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
        self._profiles: dict[str, dict] = {}  # by kind, in order of first use
        self._perf: dict[str, PerfParams] = {}  # by kind; dropped when the profile changes
        self._grad: GradParams | None = None
        self._chosen: Any = None  # inputs of the last choice of a batch
        self._offered: tuple[Any, Mapping[Shape, float]] = (None, {})

    @property
    def done(self) -> bool:
        """Whether all epochs are done."""
        return self._epoch >= self._app.runs.num_epochs

    @property
    def largest_profiled(self) -> int:
        """The largest number of devices that the job has measured itself on, of any kind."""
        return max((k[1] for profile in self._profiles.values() for k in profile), default=0)

    @property
    def global_batch_size(self) -> int:
        """Current samples per update."""
        return sum(self._counts) * self._micro * self._count

    def place(self, kind: str, counts: Counts) -> None:
        """Run on these devices of a kind from now on, `counts` per node, and choose the batch size anew."""
        self._kind, self._counts, self._chosen = kind, tuple(counts), None
        if counts:
            self._choose_batch()

    def _choose_batch(self) -> None:
        devices = sum(self._counts)
        app, (_, high) = self._app, self._app.limits(self._kind)
        if self._batch is None and self._kind in self._profiles and self._grad is not None:
            perf = self._model(self._kind)
            inputs = (id(perf), self._grad.sqr, self._grad.var)
            # Searching is expensive, and the result only changes with the model or the noise.
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
        """Return the time model that fits the measurements on a kind."""
        if kind not in self._perf:
            self._perf[kind] = self._learners[kind].fit(self._profiles[kind])
        return self._perf[kind]

    def _rate(self) -> float:
        """Return the current progress per second in base steps, by the tables."""
        batch = self.global_batch_size
        sqr, var = self._app.runs.moments(batch, self._epoch)
        worth = (var + sqr) / (var * self._app.base_batch / batch + sqr)
        return worth / self._step_s() / self._slowdown

    def _step_s(self) -> float:
        """Return the current seconds per update, by the tables."""
        step, sync = self._app.steps[self._kind].times(self._counts, self._micro)
        return step + (step - sync) * (self._count - 1)

    @property
    def _slowdown(self) -> float:
        return self._settings.slowdown.get(self.application, 1.0)

    def _observe(self) -> None:
        """Let the job measure its current configuration: times only once, gradient moments every time."""
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
        """Make progress for at most `seconds`, epoch by epoch, as the published simulators do."""
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
        """Return after how many seconds the current epoch ends, if the job might finish within `seconds`."""
        runs = self._app.runs
        if self.done or not self._counts:
            return None
        # Only the end of the whole job matters. As long as it is out of reach even at the highest speed that
        # a later epoch could have, there is no need to stop at ends of epochs.
        reach = self._rate() * speed * seconds
        if self._progress + FASTER_YET * reach < runs.epoch_ends[-1]:
            return None
        needed = (runs.epoch_ends[self._epoch] - self._progress) * seconds / reach
        return float(needed) if needed <= seconds else None

    def samples_per_s(self) -> float:
        """Return the samples per second on the current devices, by the tables."""
        return float(self.global_batch_size / self._step_s() / self._slowdown)

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """Return useful samples/s by the job's own models, or true steps/s if its batch is fixed.

        A kind without measurements is projected from the first kind that has some, by the ratio of the
        samples/s of one device at the largest micro-batch (Sia's bootstrapping). Before the first run, one
        device of each kind counts as 1, and nothing else is known.
        """
        if self.spec.mode != "adaptive":
            key, estimate = shapes, self._true_speeds
        else:
            models = {kind: id(self._model(kind)) for kind in self._profiles}
            moments = None if self._grad is None else (self._grad.sqr, self._grad.var)
            key, estimate = (shapes, moments, tuple(models.items()), self._limit()), self._estimate
        if self._offered[0] != key:
            self._offered = key, estimate(shapes)
        return self._offered[1]

    def _limit(self) -> int:
        """Return the most devices to offer the job: limited growth beyond the most that it has measured."""
        growth, most = self._settings.growth, self.spec.max_devices
        if growth is None:
            return most
        return min(most, max(int(growth * self.largest_profiled), 1))

    def _estimate(self, shapes: tuple[Shape, ...]) -> dict[Shape, float]:
        limit = self._limit()
        table: dict[Shape, float] = {}
        for kind in self._app.steps:
            offered = tuple(s for s in shapes if s.kind == kind and s.num_devices <= limit)
            if offered:
                table |= self._expected(kind, offered)
        return table

    def _expected(self, kind: str, offered: tuple[Shape, ...]) -> dict[Shape, float]:
        """Return the goodput on shapes of a kind, by the model of the kind or of another one."""
        if self._grad is None or not self._profiles:
            return {shape: 1.0 for shape in offered if shape.num_devices == 1}
        source = kind if kind in self._profiles else next(iter(self._profiles))
        places = tuple((shape.num_nodes, shape.num_devices) for shape in offered)
        found = self._learners[source].goodput(self._model(source), self._grad, places, self._batch)
        ratio = 1.0 if source == kind else self._single(kind) / self._single(source)
        best = found.max(1) * ratio
        return {s: float(g) for s, g in zip(offered, best, strict=True) if g > 0}

    def _single(self, kind: str) -> float:
        """Return the samples/s on one device of a kind, with the largest micro-batch that fits there."""
        steps, size = self._app.steps[kind], self._app.limits(kind)[1]
        return size / steps.times((1,), size)[0]

    def _true_speeds(self, shapes: tuple[Shape, ...]) -> dict[Shape, float]:
        rigid, most = self.spec.num_devices, self.spec.max_devices
        full: dict[str, int] = {}  # devices of a full node: the largest size offered on one node
        for shape in shapes:
            if shape.num_nodes == 1:
                full[shape.kind] = max(full.get(shape.kind, 1), shape.num_devices)
        table = {}
        for shape in shapes:
            fits = shape.num_devices <= most if rigid is None else shape.num_devices == rigid
            if shape.kind in self._app.steps and fits:
                table[shape] = self._true_speed(shape, full.get(shape.kind, 1))
        return {shape: rate for shape, rate in table.items() if rate > 0}

    def _true_speed(self, shape: Shape, per_node: int) -> float:
        """Return the true optimizer steps/s at the fixed batch on a packed placement; 0 = impossible."""
        app, devices = self._app, shape.num_devices
        high = app.limits(shape.kind)[1]
        micro, count = split(self._batch or 0, devices, app.base_batch, high, app.max_batch)
        times = app.steps[shape.kind].times_of_sizes(
            packed(devices, per_node), np.array([micro], float)
        )
        step, sync = times[0]
        return float(1.0 / (step + (step - sync) * (count - 1)))

    @property
    def tells_work(self) -> bool:
        """Whether the job's batch is fixed, as in the published simulator."""
        return self.spec.mode != "adaptive" and self._batch is not None

    def remaining(self) -> float:
        """Return the work left: steps if the batch is fixed, otherwise useful samples."""
        runs, batch = self._app.runs, self._batch
        if self.spec.mode != "adaptive" and batch is not None:
            last = runs.num_epochs - 1
            if self._epoch >= last:
                return 1.0  # as published, the last epoch counts as one step
            return runs.iterations_at_end(batch, last) - runs.iterations_at_end(batch, self._epoch)
        return float(runs.epoch_ends[-1] - self._progress) * self._app.base_batch

    def save(self) -> tuple[int, float]:
        """Return a checkpoint for `restore`: the current epoch, and the base steps done."""
        return self._epoch, self._progress

    def restore(self, saved: tuple[int, float]) -> None:
        """Go back to a checkpoint that `save` returned: the epoch, and the base steps done."""
        self._epoch, self._progress = saved
        self._chosen = None

    def isolated_s(self, kind: str, counts: Counts) -> float:
        """Return the seconds that the whole job takes alone on these devices, at its best batch size."""
        return self._learners[kind].isolated_s(counts, self._batch) * self._slowdown

    def beside(self, other: SimulatedJob, kind: str) -> float | None:
        """Return None: unknown speed, as these applications were not measured on shared devices."""
        return None
