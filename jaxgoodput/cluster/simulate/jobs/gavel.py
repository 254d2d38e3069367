"""Jobs with the speeds of Gavel's throughput tables: steps per second by kind, alone or beside another job.

Source: the simulator of Narayanan et al., "Heterogeneity-Aware Cluster Scheduling Policies for Deep
Learning Workloads", OSDI 2020. The speed does not depend on the placement, and a step count is the
sum over all devices of a job.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxgoodput.cluster.published.tables import Counts
from jaxgoodput.cluster.published.traces import Throughputs, TraceJob
from jaxgoodput.cluster.simulate.jobs.job import SimulatedJob, spec_of
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import Shape


@dataclass(frozen=True)
class GavelTruth:
    """Creates jobs of fixed size, whose speeds are in Gavel's tables by (job type, number of devices)."""

    throughputs: Throughputs

    def job(self, trace: TraceJob, settings: Settings, index: int) -> "GavelJob":
        """Return the job of one line of a trace.

        Raises ValueError if the tables have no speed for it on any kind, or if the line has no steps.
        """
        if trace.num_steps is None:
            raise ValueError(
                f"job {trace.id!r} has no number of steps; only lines of a Gavel trace have one. "
                "Name such a trace."
            )
        key = trace.application, trace.num_devices
        speeds = {
            kind: alone
            for kind, table in self.throughputs.items()
            if isinstance(alone := table.get(key, {}).get(None), float) and alone > 0
        }
        if not speeds:
            raise ValueError(
                f"job {trace.id!r}: no kind of device has a throughput of {trace.application!r} on "
                f"{trace.num_devices} devices; the tables have {', '.join(self.throughputs)}."
            )
        return GavelJob(trace, settings, speeds, self.throughputs)


class GavelJob:
    """A simulated job that advances at the steps per second of Gavel's published tables."""

    def __init__(
        self,
        trace: TraceJob,
        settings: Settings,
        speeds: Mapping[str, float],
        throughputs: Throughputs,
    ):
        self._trace, self._settings = trace, settings
        self._speeds, self._throughputs = speeds, throughputs
        self._left = float(trace.num_steps or 0)
        self._kind = ""
        self._ran = False
        self._offered: tuple[tuple[Shape, ...], Mapping[Shape, float]] = ((), {})
        shortest_s = self._left / max(speeds.values())
        deadline_s = None if trace.slo is None else trace.submit_s + trace.slo * shortest_s
        self.application = trace.application
        self.spec = spec_of(trace, "rigid", trace.num_devices, speeds, deadline_s)

    @property
    def done(self) -> bool:
        """Whether the job has done all of its steps."""
        return self._left <= 0

    @property
    def largest_profiled(self) -> int:
        """The job's number of devices once it has run, 0 before."""
        return self._trace.num_devices if self._ran else 0

    def place(self, kind: str, counts: Counts) -> None:
        """Continue on this kind of device; `counts` (devices per node) does not change the speed."""
        self._kind, self._ran = kind, self._ran or bool(counts)

    def advance(self, seconds: float, speed: float = 1.0) -> float:
        """Make progress for at most `seconds`; only by whole steps if `Settings.rounding` is set."""
        rate = self._speeds[self._kind] * speed
        if self._left <= rate * seconds:
            used = self._left / rate
            self._left = 0.0
            return min(used, seconds)
        steps = rate * seconds
        self._left -= math.floor(steps) if self._settings.rounding else steps
        return seconds

    def next_stop(self, seconds: float, speed: float = 1.0) -> float | None:
        """Return after how many seconds the job finishes; None if that is more than `seconds`."""
        needed = self._left / (self._speeds[self._kind] * speed)
        return needed if needed <= seconds else None

    def samples_per_s(self) -> float:
        """Return the job's steps per second, as it is not known how many samples a step has."""
        return self._speeds[self._kind]

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """Return the steps per second by shape, for the shapes that have the job's number of devices."""
        if self._offered[0] is not shapes:
            size = self._trace.num_devices
            table = {s: self._speeds.get(s.kind, 0.0) for s in shapes if s.num_devices == size}
            self._offered = shapes, {shape: speed for shape, speed in table.items() if speed > 0}
        return self._offered[1]

    @property
    def tells_work(self) -> bool:
        """True: in the published simulator, policies know every job's steps."""
        return True

    def remaining(self) -> float:
        """Return the number of steps that are left."""
        return self._left

    def save(self) -> float:
        """Return a checkpoint for `restore`: the number of steps that are left."""
        return self._left

    def restore(self, saved: float) -> None:
        """Go back to a checkpoint that `save` returned: the number of steps that were left."""
        self._left = saved

    def isolated_s(self, kind: str, counts: Counts) -> float:
        """Return the seconds of all steps on these devices alone; with too few, it runs part of the time."""
        if kind not in self._speeds:
            return math.inf
        share = min(1.0, sum(counts) / self._trace.num_devices)
        return (self._trace.num_steps or 0) / (self._speeds[kind] * share)

    def beside(self, other: SimulatedJob, kind: str) -> float | None:
        """Return the speed beside another job of its size, relative to alone; None if it was not measured."""
        row = self._throughputs.get(kind, {}).get((self.application, self._trace.num_devices), {})
        pair = row.get((other.application, other.spec.num_devices or 1))
        if not isinstance(pair, tuple) or kind not in self._speeds:
            return None
        return pair[0] / self._speeds[kind]
