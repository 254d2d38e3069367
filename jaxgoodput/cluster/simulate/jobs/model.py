"""Jobs with the speeds of a `GoodputModel`: simulations that need no measured tables.

The truth is a time model for every kind of device, and a gradient noise that grows geometrically with the
work done. Adaptive jobs use the best batch size of every phase; elastic and rigid jobs keep the one of their
trace.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.cluster.published.tables import Counts
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.jobs.job import SimulatedJob, mode_of, spec_of
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement, step_time
from jaxgoodput.goodput.search import BatchLimits, best_batch, goodput_table
from jaxgoodput.specs import Shape


@dataclass(frozen=True, kw_only=True)
class ModelApplication:
    """One program: its speed on each kind of device, and how its gradient noise grows."""

    perf: Mapping[str, PerfParams]
    """Time model by kind of device."""
    limits: BatchLimits
    first: GradParams
    """Gradient moments at the start of the training."""
    last: GradParams
    """Gradient moments at the end."""
    num_samples: float
    """Useful samples of a whole training, if the trace gives no number of steps."""
    num_phases: int = 10
    """Number of equal parts of the work; the noise is constant within each."""

    def model(self, kind: str, phase: int) -> GoodputModel:
        """Return the true model of speed and gradient noise on a kind of device during a training phase."""
        share = phase / max(self.num_phases - 1, 1)
        grad = GradParams(
            sqr=self.first.sqr ** (1 - share) * self.last.sqr**share,
            var=self.first.var ** (1 - share) * self.last.var**share,
        )
        return GoodputModel(perf=self.perf[kind], grad=grad, base_batch_size=self.limits.base)


def fixed_step_s(
    perf: PerfParams, limits: BatchLimits, num_nodes: int, num_devices: int, batch: int
) -> float | None:
    """Return the seconds of a step at a fixed global batch, in as few micro-batches as possible.

    Returns None if the limits do not allow the batch there.
    """
    low, high = limits.span
    each = math.ceil(batch / num_devices)
    count = math.ceil(each / high)
    micro = math.ceil(each / count)
    if micro < low or count > limits.max_micro_batches:
        return None
    at = Placement(num_nodes=num_nodes, num_replicas=num_devices)
    return float(step_time(perf, at, micro, count))


@dataclass(frozen=True)
class ModelTruth:
    """Creates jobs of `ModelApplication`s. An adaptive job knows its own model once it has run.

    `TraceJob.num_steps` is the work of a job in base steps.
    """

    applications: Mapping[str, ModelApplication]
    _known: dict = field(default_factory=dict, repr=False, compare=False)

    def job(self, trace: TraceJob, settings: Settings, index: int) -> "ModelJob":
        """Return the job of one line of a workload. Raises ValueError if its application has no model."""
        if trace.application not in self.applications:
            raise ValueError(
                f"job {trace.id!r} runs {trace.application!r}, but there are only models of "
                f"{', '.join(sorted(self.applications))}. Add one."
            )
        rng = np.random.default_rng([settings.seed, index])
        return ModelJob(trace, settings, self, rng)

    def goodput(
        self,
        name: str,
        kind: str,
        phase: int,
        places: tuple[tuple[int, int], ...],
        batch: int | None = None,
    ) -> np.ndarray:
        """Return useful samples/s on (nodes, devices), `[places]`; 0 = impossible.

        `batch` None = the best batch of each place.
        """
        key = name, kind, phase, places, batch
        if key not in self._known:
            application = self.applications[name]
            model = application.model(kind, phase)
            if batch is None:
                nodes, devices = np.array(places).T
                at = Placement(num_nodes=nodes, num_replicas=devices)
                table = np.nan_to_num(goodput_table(model, application.limits, at))
            else:
                useful = batch * float(model.efficiency(batch))
                steps = (fixed_step_s(model.perf, application.limits, *p, batch) for p in places)
                table = np.array([0.0 if s is None else useful / s for s in steps])
            self._known[key] = table
        return self._known[key]

    def efficiency(
        self, name: str, kind: str, phase: int, place: tuple[int, int], batch: int | None = None
    ) -> float:
        """Return the useful share of the samples on (nodes, devices); `batch` None = the best one."""
        key = "efficiency", name, kind, phase, place, batch
        if key not in self._known:
            application = self.applications[name]
            model = application.model(kind, phase)
            if batch is None:
                at = Placement(num_nodes=place[0], num_replicas=place[1])
                batch = best_batch(model, at, application.limits)[0].global_batch_size
            self._known[key] = float(model.efficiency(batch))
        return self._known[key]


class ModelJob:
    """A simulated job whose true speed follows a model, which may differ between phases of training."""

    def __init__(
        self, trace: TraceJob, settings: Settings, truth: ModelTruth, rng: np.random.Generator
    ):
        self._settings, self._truth = settings, truth
        self._app = truth.applications[trace.application]
        self._noise = (
            math.exp(settings.step_noise * rng.standard_normal()) if settings.step_noise else 1
        )
        self._done = 0.0  # useful samples
        base, mode = self._app.limits.base, mode_of(trace, settings)
        self._total = self._app.num_samples if trace.num_steps is None else base * trace.num_steps
        self._batch = None if mode == "adaptive" else trace.global_batch_size
        self._kind, self._counts = "", ()
        self._largest = 0
        self._offered: tuple[object, Mapping[Shape, float]] = (None, {})
        widest = self._app.limits.max if self._batch is None else self._batch
        largest = min(settings.max_devices, widest // self._app.limits.span[0])
        self.application = trace.application
        self.spec = spec_of(trace, mode, largest, self._app.perf)

    @property
    def done(self) -> bool:
        """Whether the job has done all of its useful samples."""
        return self._done >= self._total

    @property
    def largest_profiled(self) -> int:
        """The largest number of devices that the job has run on."""
        return self._largest

    @property
    def _phase(self) -> int:
        share = self._done / self._total
        # The end of a phase is reached by a sum of floats, and belongs to the next phase.
        return min(int(share * self._app.num_phases + 1e-9), self._app.num_phases - 1)

    def place(self, kind: str, counts: Counts) -> None:
        """Run on these devices of a kind from now on, `counts` per node."""
        self._kind, self._counts = kind, tuple(counts)

    def _true_goodput(
        self, kind: str, phase: int, places: tuple[tuple[int, int], ...]
    ) -> np.ndarray:
        return self._truth.goodput(self.application, kind, phase, places, self._batch)

    @property
    def _slowdown(self) -> float:
        return self._settings.slowdown.get(self.application, 1.0)

    def _rate(self, phase: int) -> float:
        """Return the true useful samples/s on the current devices. Raises ValueError if it is 0."""
        rate = self._true_goodput(self._kind, phase, ((len(self._counts), sum(self._counts)),))[0]
        if not rate > 0:
            raise ValueError(
                f"job {self.spec.id!r} cannot run on {sum(self._counts)} devices of {self._kind!r} "
                f"over {len(self._counts)} nodes: its batch limits allow no batch there. The policy "
                "gave it a shape that is not in its goodput table."
            )
        return float(rate) / self._slowdown

    def advance(self, seconds: float, speed: float = 1.0) -> float:
        """Make progress for at most `seconds`, phase by phase."""
        self._largest = max(self._largest, sum(self._counts))
        left = seconds
        while left > 0 and not self.done:
            phase = self._phase
            rate = self._rate(phase) * speed
            last = phase + 1 == self._app.num_phases
            end = self._total * (1.0 if last else (phase + 1) / self._app.num_phases)
            if self._done + rate * left < end:
                self._done += rate * left
                left = 0.0
            else:
                left = max(left - (end - self._done) / rate, 0.0)
                self._done = end
        return seconds - left

    def next_stop(self, seconds: float, speed: float = 1.0) -> float | None:
        """Return after how many seconds the job finishes; None if that is more than `seconds`."""
        # The phases make the speed a step function of the work, so trying is simpler than solving.
        before = self._done, self._largest
        used = self.advance(seconds, speed)
        finished = self.done
        self._done, self._largest = before
        return used if finished else None

    def samples_per_s(self) -> float:
        """Return the samples processed per second on the current devices, useful ones or not."""
        phase = self._phase
        place = len(self._counts), sum(self._counts)
        worth = self._truth.efficiency(self.application, self._kind, phase, place, self._batch)
        return self._rate(phase) / worth

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """Return useful samples/s; before the first run, only the smallest shape of each kind, as 1.

        If the batch is fixed, the job's user knows the truth on every size.
        """
        ran, limit = self._largest > 0 or self._batch is not None, self._limit()
        key = shapes, self._phase, limit, ran
        if self._offered[0] != key:
            table: dict[Shape, float] = {}
            for kind in self._app.perf:
                known = dict(self._expected(kind, shapes))
                least = min((s.num_devices for s in known), default=0)
                if not ran:
                    known = {s: 1.0 for s in known if s.num_devices == least}
                table |= {s: g for s, g in known.items() if s.num_devices <= max(limit, least)}
            self._offered = key, table
        return self._offered[1]

    def _limit(self) -> int:
        """Return the most devices to offer the job: limited growth beyond the most that it has run on."""
        growth, most = self._settings.growth, self.spec.max_devices
        if growth is None or self._batch is not None:
            return most
        return min(most, max(int(growth * self._largest), 1))

    def _expected(self, kind: str, shapes: tuple[Shape, ...]) -> Iterator[tuple[Shape, float]]:
        """Yield each possible shape of a kind with the goodput that the job expects there.

        That is the true goodput times one factor for the whole job, its error of measurement. Shapes on
        which the job has not run yet are included.
        """
        fewest, most = self.spec.min_devices, self.spec.max_devices
        mine = tuple(s for s in shapes if s.kind == kind and fewest <= s.num_devices <= most)
        if mine:
            places = tuple((s.num_nodes, s.num_devices) for s in mine)
            speeds = self._true_goodput(kind, self._phase, places)
            yield from ((s, float(g) * self._noise) for s, g in zip(mine, speeds, strict=True) if g)

    @property
    def tells_work(self) -> bool:
        """Whether the job's batch is fixed, as in the published simulator."""
        return self._batch is not None

    def remaining(self) -> float:
        """Return the useful samples left."""
        return self._total - self._done

    def save(self) -> float:
        """Return a checkpoint for `restore`: the number of useful samples done."""
        return self._done

    def restore(self, saved: float) -> None:
        """Go back to a checkpoint that `save` returned: the number of useful samples done."""
        self._done = saved

    def isolated_s(self, kind: str, counts: Counts) -> float:
        """Return the seconds that the whole job takes alone on these devices, at its best batch size."""
        places = ((len(counts), sum(counts)),)
        num_phases, total = self._app.num_phases, 0.0
        for phase in range(num_phases):
            rate = float(self._true_goodput(kind, phase, places)[0])
            total += self._total / num_phases / rate if rate > 0 else math.inf
        return total * self._slowdown

    def beside(self, other: SimulatedJob, kind: str) -> float | None:
        """Return None: unknown speed, as the model does not cover jobs that share devices."""
        return None
