"""What every simulated job can do, whatever its truth is made of, and what the three kinds share.

A *truth* knows how applications really behave and makes simulated jobs of a workload's lines. The simulator
places the jobs, advances them, and asks what a policy may know; it never looks inside.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxgoodput.cluster.published.tables import Counts
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import Mode
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import JobSpec, Shape


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

    def samples_per_s(self) -> float:
        """Samples that it takes in a second where it is now, or steps where it knows no samples."""
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
class Truth(Protocol):
    """How applications really behave; makes simulated jobs of them."""

    def job(self, trace: TraceJob, settings: Settings, index: int) -> SimulatedJob:
        """The job of one line of a workload; `index` tells its noise from that of the others."""
        ...


def mode_of(trace: TraceJob, settings: Settings) -> Mode:
    """Whether a job adapts. Raises ValueError where it keeps a batch that its line does not have."""
    mode = trace.mode or settings.mode
    if mode != "adaptive" and trace.global_batch_size is None:
        raise ValueError(
            f"job {trace.id!r} is {mode}, which needs a global batch size, but its line has none."
        )
    return mode


def spec_of(
    trace: TraceJob, mode: Mode, largest: int, kinds: Iterable[str], deadline_s: float | None = None
) -> JobSpec:
    """What a job's user asked for; `largest` is the most devices of one that is not rigid."""
    rigid = mode == "rigid"
    most = trace.num_devices if rigid else max(largest, 1)
    return JobSpec(
        id=trace.id,
        mode=mode,
        min_devices=most if rigid else 1,
        max_devices=most,
        num_devices=most if rigid else None,
        weight=trace.weight,
        kinds=tuple(kinds),
        deadline_s=trace.deadline_s if deadline_s is None else deadline_s,
        tenant=trace.tenant,
        budget=trace.budget,
    )


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
