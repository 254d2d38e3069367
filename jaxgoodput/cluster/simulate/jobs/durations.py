"""Jobs of which only the duration on their own number of devices is known, as in traces of real clusters.

A rigid job runs for its duration on its devices, and makes one second of progress per second on any kind.
Nothing says how its speed would change with the number of devices. If that is of interest, a scaling curve
has to be assumed for all jobs (`Amdahl`); the results then depend on this assumption.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxgoodput.cluster.published.tables import Counts
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.jobs.job import SimulatedJob, spec_of
from jaxgoodput.cluster.simulate.key_numbers import read_numbers
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import Shape


@dataclass(frozen=True)
class Amdahl:
    """A scaling curve: a share of the work is serial, the rest is divided among the devices.

    >>> round(Amdahl(serial=0.1).speedup(4), 3)
    3.077
    """

    serial: float
    """Share of a job's time on one device that more devices do not shorten."""
    most: float = 4.0
    """A job may have at most this many times the devices that it had in the trace."""

    def speedup(self, num_devices: int) -> float:
        """Return the speed on some devices, relative to one."""
        return 1.0 / (self.serial + (1.0 - self.serial) / num_devices)

    def in_words(self) -> str:
        """Return the assumption as a sentence."""
        return (
            f"assumed: all jobs are elastic, from one device to {self.most:g} times what they had; on k "
            f"devices they are 1 / ({self.serial:g} + {1 - self.serial:g} / k) times as fast as on one "
            "(Amdahl's law)"
        )


def read_curve(text: str) -> Amdahl:
    """Return the curve of `serial=SHARE[,most=TIMES]`. Raises ValueError for any other text.

    >>> read_curve("serial=0.05,most=2")
    Amdahl(serial=0.05, most=2.0)
    """
    example = "serial=0.05,most=4"
    found = read_numbers("--elastic", text, known=("serial", "most"), example=example)
    serial, most = found.get("serial", -1.0), found.get("most", 4.0)
    if not (0 <= serial < 1 and most >= 1):
        raise ValueError(
            f"--elastic {text!r}: expected a serial share from 0 to below 1, and most of at least 1, such "
            f"as {example}."
        )
    return Amdahl(serial, most)


@dataclass(frozen=True)
class DurationTruth:
    """Creates jobs of traces that hold only durations: rigid ones, or elastic ones by a `curve`."""

    kinds: tuple[str, ...]
    """Kinds of device of the cluster, on all of which jobs are equally fast."""
    curve: Amdahl | None = None
    _shapes: dict[int, tuple[tuple[Shape, ...], dict[int, list[Shape]]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def job(self, trace: TraceJob, settings: Settings, index: int) -> "DurationJob":
        """Return the job of one row. Raises ValueError if the row has no duration, or no kind to run on."""
        if trace.duration_s is None:
            raise ValueError(
                f"job {trace.id!r} has no duration, and nothing else says how long it runs. Only jobs of "
                "the trace itself can be simulated."
            )
        return DurationJob(trace, settings, self)

    def of_size(self, shapes: tuple[Shape, ...], least: int, most: int) -> Iterator[Shape]:
        """Yield the shapes of `least` to `most` devices."""
        # Jobs are asked with the same tuple again and again. It is kept, so that its id stays its own.
        if id(shapes) not in self._shapes:
            by_size: dict[int, list[Shape]] = {}
            for shape in shapes:
                by_size.setdefault(shape.num_devices, []).append(shape)
            self._shapes[id(shapes)] = shapes, by_size
        by_size = self._shapes[id(shapes)][1]
        for size in range(least, most + 1):
            yield from by_size.get(size, ())


class DurationJob:
    """A simulated job that needs the duration of the trace on the devices of the trace."""

    def __init__(self, trace: TraceJob, settings: Settings, truth: DurationTruth):
        assert trace.duration_s is not None  # `DurationTruth.job` checks it
        self._truth, self._size, self._total = truth, trace.num_devices, trace.duration_s
        self._left = trace.duration_s
        self._speed = 0.0
        self._offered: tuple[tuple[Shape, ...], Mapping[Shape, float]] = ((), {})
        curve = None if settings.mode == "rigid" or trace.mode == "rigid" else truth.curve
        self._curve = curve
        self.application = trace.application
        if curve is None:
            self.spec = spec_of(trace, "rigid", trace.num_devices, truth.kinds)
        else:
            largest = math.floor(curve.most * trace.num_devices)
            self.spec = spec_of(trace, "elastic", largest, truth.kinds)

    @property
    def done(self) -> bool:
        """Whether the job has run for its whole duration."""
        return self._left <= 0

    @property
    def largest_profiled(self) -> int:
        """The job's largest number of devices: there is nothing that it would have to measure."""
        return self.spec.max_devices

    def _speed_on(self, num_devices: int) -> float:
        """Return the speed on some devices, relative to the devices that the job had in the trace."""
        if self._curve is None:
            return 1.0
        return self._curve.speedup(num_devices) / self._curve.speedup(self._size)

    def place(self, kind: str, counts: Counts) -> None:
        """Continue on these devices; their kind does not change the speed."""
        self._speed = self._speed_on(sum(counts)) if counts else 0.0

    def advance(self, seconds: float, speed: float = 1.0) -> float:
        """Make progress for at most `seconds`; return the seconds used."""
        rate = self._speed * speed
        if self._left <= rate * seconds:
            used = self._left / rate
            self._left = 0.0
            return min(used, seconds)
        self._left -= rate * seconds
        return seconds

    def next_stop(self, seconds: float, speed: float = 1.0) -> float | None:
        """Return after how many seconds the job finishes; None if that is more than `seconds`."""
        needed = self._left / (self._speed * speed)
        return needed if needed <= seconds else None

    def samples_per_s(self) -> float:
        """Return the seconds of the trace that pass per second, as it is not known what a sample is."""
        return self._speed

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """Return the seconds of the trace that pass per second, by shape."""
        if self._offered[0] is not shapes:
            spec = self.spec
            offered = self._truth.of_size(shapes, spec.min_devices, spec.max_devices)
            allowed = (shape for shape in offered if shape.kind in (spec.kinds or ()))
            self._offered = shapes, {s: self._speed_on(s.num_devices) for s in allowed}
        return self._offered[1]

    @property
    def tells_work(self) -> bool:
        """False: nothing was published about what schedulers were told."""
        return False

    def remaining(self) -> float:
        """Return the seconds left on the devices of the trace."""
        return self._left

    def save(self) -> float:
        """Return a checkpoint for `restore`: the seconds that are left."""
        return self._left

    def restore(self, saved: float) -> None:
        """Go back to a checkpoint that `save` returned: the seconds that were left."""
        self._left = saved

    def isolated_s(self, kind: str, counts: Counts) -> float:
        """Return the seconds of the job alone on these devices; if they are too few, it takes turns."""
        spec, have = self.spec, sum(counts)
        if kind not in (spec.kinds or ()):
            return math.inf
        share = min(1.0, have / spec.min_devices)
        used = max(min(have, spec.max_devices), spec.min_devices)
        return self._total / (self._speed_on(used) * share)

    def beside(self, other: SimulatedJob, kind: str) -> float | None:
        """Return None: nothing is known of jobs that share devices."""
        return None
