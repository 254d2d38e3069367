"""What a policy may know and what it answers; `reconcile` is the one path for service and simulator.

A policy is stateless: everything that it remembers is in its input (attained service, deficits, the
present allocation and since when), so that a restart of the scheduler loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Shape


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What a policy may know about one job."""

    spec: JobSpec
    allocation: Allocation = field(default_factory=Allocation)  # at present
    # Useful samples (or any unit of the job's own) per second on each shape, packed on as few nodes as
    # the shape says. A shape that is missing is unknown or not allowed. For an elastic or rigid job the
    # batch is fixed, so this is its throughput.
    goodput: Mapping[Shape, float] = field(default_factory=dict)
    submitted_s: float = 0.0
    since_s: float | None = None  # when the present allocation began; None = not running
    restoring_until_s: float | None = None  # while it restarts, it is not worth moving again
    num_restarts: int = 0
    restart_s: float = 30.0  # measured or estimated cost of one change
    received_s: Mapping[str, float] = field(default_factory=dict)  # device-seconds by kind
    fraction_received_s: Mapping[str, float] = field(default_factory=dict)  # wall seconds by kind
    largest_profiled: int = 0  # devices; the largest size that its model has seen
    remaining: float | None = None  # in units of goodput x seconds; None = not declared
    rigid_shape_hint: int | None = None  # devices that its user would have picked
    # What it does while it shares its devices with another job: (id of the other, shape) -> as goodput.
    shared_goodput: Mapping[tuple[str, Shape], float] = field(default_factory=dict)
    fractions_since_s: float | None = (
        None  # when fraction_received_s began to count; None = submitted_s
    )


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
    resize: tuple[str, ...]  # other devices than before, or another number of them
    pause: tuple[str, ...]
    reasons: Mapping[str, str]  # job id -> why; for every job
    next_solve_s: float  # at the latest; an event asks for one sooner
    solved_s: float | None = None  # when the policy was last asked
    objective: float | None = None  # of the policy's last answer, and the bound on it
    bound: float | None = None
