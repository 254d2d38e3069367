"""What a policy may know and what it answers; `reconcile` is the one path for service and simulator.

A policy is stateless: everything that it remembers is in its input (attained service, deficits, the
present allocation and since when), so that a restart of the scheduler loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Shape

Mode = Literal["adaptive", "elastic", "rigid"]
"""What may change while a job runs: devices and batch, devices only, or nothing."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What a policy may know about one job."""

    spec: JobSpec
    allocation: Allocation = field(default_factory=Allocation)
    """What it has at present."""
    goodput: Mapping[Shape, float] = field(default_factory=dict)
    """Useful samples (or any unit of the job's own) per second on each shape, packed on as few nodes as the
    shape says. A shape that is missing is unknown or not allowed. For an elastic or rigid job the batch is
    fixed, so this is its throughput."""
    goodput_error: Mapping[Shape, float] = field(default_factory=dict)
    """Relative standard error of an entry of `goodput`, independent of those of the others: 0.1 is about
    10 %. A shape that is missing has an unknown one, and a policy judges it by how rough the table is."""
    submitted_s: float = 0.0
    since_s: float | None = None
    """When the present allocation began; None = not running."""
    restoring_until_s: float | None = None
    """While it restarts, it is not worth moving again."""
    num_restarts: int = 0
    restart_s: float = 30.0
    """Seconds that the next change costs: as told, until its restarts have shown what they take
    (`estimated_restart_s`)."""
    received_s: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds that it has had, by kind."""
    fraction_received_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that it has run, by kind."""
    largest_profiled: int = 0
    """The largest size, in devices, that its model has seen."""
    remaining: float | None = None
    """Work left, in units of goodput x seconds; None = not declared."""
    rigid_shape_hint: int | None = None
    """Devices that its user would have picked."""
    shared_goodput: Mapping[tuple[str, Shape], float] = field(default_factory=dict)
    """What it does while it shares its devices with another job: (id of the other, shape) -> as goodput."""
    fractions_since_s: float | None = None
    """When `fraction_received_s` began to count; None = `submitted_s`."""
    tenant_received_s: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds that every tenant had of late (`fair_share.faded`), the same for all jobs of a
    decision; who is absent had none."""

    @property
    def is_measured(self) -> bool:
        """Whether its goodput is in samples/s; that of an adaptive job that has not run is in no unit."""
        return self.largest_profiled > 0 or self.spec.mode != "adaptive"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a policy answers: allocations of the jobs that run, and why, for every job.

    `objective` and `bound` are of its optimisation problem where it has one (bound - objective is the
    optimality gap).
    """

    allocations: Mapping[str, Allocation]
    reasons: Mapping[str, str] = field(default_factory=dict)
    objective: float | None = None
    bound: float | None = None


class SolverError(Exception):
    """A solver found no decision; `reconcile` then keeps the previous plan, and says so."""


class SolverTimeout(SolverError):
    """No decision was found in time."""


@runtime_checkable
class Policy(Protocol):
    """Implementations are frozen dataclasses with `__call__`; equal inputs give equal decisions."""

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Who gets which devices. Raises SolverError where it finds nothing (in time)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now: an allocation for every job (empty = none), and how they differ from the present."""

    allocations: Mapping[str, Allocation]
    start: tuple[str, ...]
    resize: tuple[str, ...]
    """Jobs that get other devices than before, or another number of them."""
    pause: tuple[str, ...]
    reasons: Mapping[str, str]
    """Why, for every job id."""
    next_solve_s: float
    """When to ask again at the latest; an event asks sooner."""
    solved_s: float | None = None
    """When the policy was last asked."""
    objective: float | None = None
    """What the policy's last answer is worth; `bound` is the most that any could be."""
    bound: float | None = None
