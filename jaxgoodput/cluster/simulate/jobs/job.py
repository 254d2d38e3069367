"""The interface of simulated jobs, and helpers that all kinds of them share.

A *truth* knows how applications really behave, and creates a simulated job for each line of a workload. The
simulator places jobs, advances them, and asks what a policy may know. It never looks inside.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, runtime_checkable

from jaxgoodput.cluster.published.tables import Counts
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import Mode
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import JobSpec, JobTerms, Shape


@runtime_checkable
class SimulatedJob(Protocol):
    """A simulated job: how fast it truly is, and what it has measured of itself so far."""

    @property
    def spec(self) -> JobSpec:
        """The job's spec, as its user would submit it."""
        ...

    @property
    def application(self) -> str:
        """Name of the program that the job runs."""
        ...

    @property
    def done(self) -> bool:
        """Whether the job has done all of its work."""
        ...

    @property
    def largest_profiled(self) -> int:
        """The largest number of devices that the job has measured itself on."""
        ...

    def place(self, kind: str, counts: Counts) -> None:
        """Run on these devices of a kind from now on, `counts` per node; no work is lost."""
        ...

    def advance(self, seconds: float, speed: float = 1.0) -> float:
        """Make progress for at most `seconds`; return the seconds used, fewer only if the job finished."""
        ...

    def next_stop(self, seconds: float, speed: float = 1.0) -> float | None:
        """Return after how many seconds the job may finish; None if that is more than `seconds`.

        The time may be early. The simulator advances the job in such pieces, and so finds its end exactly.
        """
        ...

    def samples_per_s(self) -> float:
        """Return the samples per second on the current devices, or steps if samples are unknown."""
        ...

    def goodput(self, shapes: tuple[Shape, ...]) -> Mapping[Shape, float]:
        """Return the goodput that the job expects of each shape it can use, as in `JobView.goodput`."""
        ...

    @property
    def tells_work(self) -> bool:
        """Whether the simulator that was published with its workload tells schedulers the work left."""
        ...

    def remaining(self) -> float:
        """Return the work left in units of goodput x seconds."""
        ...

    def save(self) -> Any:
        """Return a checkpoint of the work done, to be given to `restore`."""
        ...

    def restore(self, saved: Any) -> None:
        """Go back to a checkpoint that `save` returned. What the job has measured is kept."""
        ...

    def isolated_s(self, kind: str, counts: Counts) -> float:
        """Return the seconds that the whole job takes alone on these devices, at its best batch size."""
        ...

    def beside(self, other: "SimulatedJob", kind: str) -> float | None:
        """Return the speed on devices shared with another job, relative to alone; None = unknown."""
        ...


@runtime_checkable
class Truth(Protocol):
    """Creates simulated jobs; knows how their applications really behave."""

    def job(self, trace: TraceJob, settings: Settings, index: int) -> SimulatedJob:
        """Return the job of one line of a workload; its noise is drawn from the seed and `index`."""
        ...


def mode_of(trace: TraceJob, settings: Settings) -> Mode:
    """Return the mode of a job. Raises ValueError if its batch is fixed, but its line has none."""
    mode = trace.mode or settings.mode
    if mode != "adaptive" and trace.global_batch_size is None:
        raise ValueError(
            f"job {trace.id!r} is {mode}, which needs a global batch size, but its line has none."
        )
    return mode


def spec_of(
    trace: TraceJob,
    mode: Mode,
    largest: int,
    kinds: Collection[str],
    deadline_s: float | None = None,
) -> JobSpec:
    """Return the request of a job's user, whose program runs on `kinds`.

    `largest` is the device limit of a job that is not rigid. Raises ValueError if the job allows no kind that
    its program runs on, or more devices at least than at most.
    """
    possible = tuple(kind for kind in kinds if trace.kinds is None or kind in trace.kinds)
    if not possible:
        raise ValueError(
            f"job {trace.id!r} allows only {', '.join(trace.kinds or ()) or 'no kind'}, but its program runs "
            f"on {', '.join(kinds) or 'no kind'}. Leave the job out, or add such devices."
        )
    terms = {field.name: getattr(trace, field.name) for field in fields(JobTerms)}
    preferred = tuple(kind for kind in trace.preferred_kinds or () if kind in possible)
    terms |= {
        "kinds": possible,
        "preferred_kinds": preferred or None,
        "deadline_s": trace.deadline_s if deadline_s is None else deadline_s,
    }
    if mode == "rigid":
        size = trace.num_devices
        return JobSpec(
            id=trace.id, mode=mode, min_devices=size, max_devices=size, num_devices=size, **terms
        )
    most = max(largest, 1) if trace.max_devices is None else min(trace.max_devices, max(largest, 1))
    return JobSpec(
        id=trace.id, mode=mode, min_devices=trace.min_devices or 1, max_devices=most, **terms
    )


def packed(num_devices: int, per_node: int) -> Counts:
    """Return the devices per node if all nodes but the last are full.

    >>> packed(10, 4)
    (4, 4, 2)
    """
    full, rest = divmod(num_devices, per_node)
    return (per_node,) * full + ((rest,) if rest else ())


def every_size(kinds: Sequence[tuple[str, int, int]]) -> tuple[Shape, ...]:
    """Return shapes of all device counts, packed on as few nodes as possible.

    `kinds` holds (kind, number of nodes, devices per node).

    >>> [shape.num_nodes for shape in every_size([("t4", 2, 4)])]
    [1, 1, 1, 1, 2, 2, 2, 2]
    """
    return tuple(
        Shape(kind, -(-size // each), size)
        for kind, nodes, each in kinds
        for size in range(1, nodes * each + 1)
    )
