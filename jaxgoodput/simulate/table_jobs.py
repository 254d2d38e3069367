"""How simulated jobs really advance, and what they tell the scheduler: applications from measured tables.

A *physics* knows the truth of every application and makes simulated jobs of a workload's lines. The
simulator places them, advances them, and asks what a policy may know; it never looks inside.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.perf import PerfParams
from jaxgoodput.simulate.learner import Learner, split
from jaxgoodput.simulate.settings import Pin, Rules
from jaxgoodput.simulate.tables import Application, Counts
from jaxgoodput.simulate.traces import TraceJob
from jaxgoodput.specs import JobSpec, Shape

# A later epoch, with a larger batch, is not this much faster than the present one.
FASTER_YET = 8.0


@runtime_checkable
class SimulatedJob(Protocol):
    """One job, its truth and what it has measured of it."""

    @property
    def spec(self) -> JobSpec:
        """What its user asked for."""
        ...

    @property
    def application(self) -> str:
        """What it runs."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        ...

    @property
    def largest_profiled(self) -> int:
        """Devices of the largest size that it has measured."""
        ...

    def place(self, kind: str, counts: Counts) -> None:
        """Go on with so many devices on each node; the work done so far is kept."""
        ...

    def advance(self, seconds: float, speed: float = 1.0) -> float:
        """Work for at most `seconds`, and return how many; fewer only where it got done."""
        ...

    def next_stop(self, seconds: float, speed: float = 1.0) -> float | None:
        """Seconds after which it may be done, at most `seconds`, or None; changes nothing.

        Advancing it in such pieces finds its end exactly.
        """
        ...

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """What it expects of each shape, as `JobView.goodput`; shapes it cannot use are left out."""
        ...

    def remaining(self) -> float | None:
        """Work left in units of goodput x seconds; None where it does not say."""
        ...

    def save(self) -> Any:
        """The work done so far, for `restore`."""
        ...

    def restore(self, saved: Any) -> None:
        """Fall back to an earlier state of the work; what was learned is kept."""
        ...

    def isolated_s(self, kind: str, counts: Counts) -> float:
        """Seconds that all of its work takes on that placement alone, at its best batch."""
        ...

    def beside(self, other: "SimulatedJob", kind: str) -> float | None:
        """Its speed on devices that it shares with another job, relative to alone; None = unknown."""
        ...


@runtime_checkable
class Physics(Protocol):
    """Makes simulated jobs."""

    def job(self, trace: TraceJob, rules: Rules, index: int) -> SimulatedJob:
        """The job of one line of a workload; `index` tells its noise from that of the others."""
        ...


@dataclass(frozen=True)
class TablePhysics:
    """Jobs that advance as the measured tables of Pollux or Sia say.

    Raises ValueError for a job whose application has no tables.
    """

    applications: Mapping[str, Application]
    _learners: dict = field(default_factory=dict, repr=False, compare=False)

    def job(self, trace: TraceJob, rules: Rules, index: int) -> "TableJob":
        """The job of one line of a workload."""
        if trace.application not in self.applications:
            raise ValueError(
                f"job {trace.id!r} runs {trace.application!r}, but there are tables of "
                f"{', '.join(sorted(self.applications))} only; read the folder that has it."
            )
        application = self.applications[trace.application]
        mode = trace.mode or rules.mode
        pin = rules.pins.get(trace.application) if mode != "rigid" else None
        if mode != "adaptive" and trace.global_batch_size is None:
            raise ValueError(
                f"job {trace.id!r} is {mode}, which needs a global batch size, but its line has none."
            )
        for kind in application.steps:
            self._learners.setdefault((trace.application, kind), Learner(application, kind))
        learners = {kind: self._learners[trace.application, kind] for kind in application.steps}
        rng = np.random.default_rng([rules.seed, index])
        return TableJob(
            trace, rules, application, learners, _spec(trace, rules, application, pin), rng
        )


def _spec(trace: TraceJob, rules: Rules, application: Application, pin: Pin | None) -> JobSpec:
    mode = trace.mode or rules.mode
    low = min(application.limits(kind)[0] for kind in application.steps)
    if pin is not None:
        most = pin.num_devices
    elif mode == "adaptive":
        most = min(rules.max_devices, application.max_batch // low)
    elif mode == "elastic":
        most = min(rules.max_devices, (trace.global_batch_size or 1) // low)
    else:
        most = trace.num_devices
    rigid = mode == "rigid"
    return JobSpec(
        id=trace.id,
        mode=mode,
        min_devices=most if rigid else 1,
        max_devices=max(most, 1),
        num_devices=trace.num_devices if rigid else None,
        weight=trace.weight,
        kinds=tuple(application.steps),
    )


class TableJob:
    """One job of `TablePhysics`; see `SimulatedJob`."""

    def __init__(
        self,
        trace: TraceJob,
        rules: Rules,
        application: Application,
        learners: Mapping[str, Learner],
        spec: JobSpec,
        rng: np.random.Generator,
    ):
        self._trace, self._rules, self._app = trace, rules, application
        self._learners, self._spec, self._rng = learners, spec, rng
        pin = rules.pins.get(trace.application) if spec.mode != "rigid" else None
        fixed = trace.global_batch_size if pin is None else pin.global_batch_size
        self._batch = fixed if pin is not None or spec.mode != "adaptive" else None
        self._epoch, self._progress = 0, 0.0
        self._kind, self._counts = "", ()
        self._micro, self._count = 0, 1
        self._profiles: dict[str, dict] = {}  # by kind, in the order of first use
        self._perf: dict[str, PerfParams] = {}  # of profiles that have not changed since
        self._grad: GradParams | None = None
        self._chosen: Any = None  # what the batch was last chosen from
        self._offered: tuple[Any, Mapping[Shape, float]] = (None, {})

    @property
    def spec(self) -> JobSpec:
        """What its user asked for."""
        return self._spec

    @property
    def application(self) -> str:
        """What it runs."""
        return self._app.name

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
        return worth / seconds / self._rules.slowdown.get(self._app.name, 1.0)

    def _observe(self) -> None:
        """Measure the present configuration: its times once, the gradient whenever it changed."""
        key = len(self._counts), sum(self._counts), self._micro
        profile = self._profiles.setdefault(self._kind, {})
        if key not in profile:
            step, sync = self._app.steps[self._kind].times(self._counts, self._micro)
            noise = self._noise(self._rules.step_noise)
            profile[key] = step * noise, sync * noise
            self._perf.pop(self._kind, None)
        sqr, var = self._app.runs.moments(self.global_batch_size, self._epoch)
        noise = self._rules.gradient_noise
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
                needed = float(round(needed)) if self._rules.rounding else needed
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

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """Useful samples/s by its own models; steps/s, true ones, where its batch is fixed.

        A kind without measurements is projected from the first one that has some, by the ratio of
        the samples/s of one device at the largest micro-batch (Sia's bootstrapping). Before the
        first run one device of each kind is worth 1, and nothing else is known.
        """
        if self._spec.mode != "adaptive":
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
        growth, most = self._rules.growth, self._spec.max_devices
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
        rigid, most = self._spec.num_devices, self._spec.max_devices
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
        """Steps left where the batch is fixed; else useful samples, if the rules let it say so."""
        runs, batch = self._app.runs, self._batch
        if self._spec.mode != "adaptive" and batch is not None:
            last = runs.num_epochs - 1
            if self._epoch >= last:
                return 1.0  # as published: the last epoch counts as one step
            return runs.iterations_at_end(batch, last) - runs.iterations_at_end(batch, self._epoch)
        if not self._rules.declared_progress:
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
        return learner.isolated_s(counts, self._batch) * self._rules.slowdown.get(
            self._app.name, 1.0
        )

    def beside(self, other: SimulatedJob, kind: str) -> float | None:
        """Unknown: nobody measured two of these applications on the same devices."""
        return None


def packed(num_devices: int, per_node: int) -> Counts:
    """Devices per node with all nodes but the last one full.

    >>> packed(10, 4)
    (4, 4, 2)
    """
    full, rest = divmod(num_devices, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


def every_size(kinds: Sequence[tuple[str, int, int]]) -> tuple[Shape, ...]:
    """All numbers of devices packed on as few nodes as hold them; kinds are (kind, nodes, devices each).

    >>> [shape.num_nodes for shape in every_size([("t4", 2, 4)])]
    [1, 1, 1, 1, 2, 2, 2, 2]
    """
    return tuple(
        Shape(kind, -(-size // each), size)
        for kind, nodes, each in kinds
        for size in range(1, nodes * each + 1)
    )
