"""What a policy is told about jobs, what it answers, and the plan that `reconcile` makes of the answer.

A policy keeps no state. Everything it needs to remember is in its input (service received so far, the present
allocation and when it began), so a restart of the scheduler loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from jaxgoodput.cluster.scheduler.work_left import WorkGuess
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Shape

Mode = Literal["adaptive", "elastic", "rigid"]
"""What may change while a job runs: devices and batch, devices only, or nothing."""


@dataclass(frozen=True, kw_only=True)
class AvoidedNode:
    """A node that a job should not use for a while, because it was slow or broken."""

    until_s: float
    """Time until which it is avoided."""
    is_usable: bool = True
    """Whether the job may use it if it could not run otherwise: a slow node is better than none."""


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What a policy may know about one job."""

    spec: JobSpec
    allocation: Allocation = field(default_factory=Allocation)
    """Devices that the job has at present."""
    goodput: Mapping[Shape, float] = field(default_factory=dict)
    """Useful samples (or any unit of the job's own) per second on each shape, packed on as few nodes as the
    shape says. A missing shape is unknown or not allowed. For an elastic or rigid job the batch is fixed, so
    this is its throughput. If it is empty, `reconcile` assumes a table (`priors.py`)."""
    goodput_error: Mapping[Shape, float] = field(default_factory=dict)
    """Relative standard error of each entry of `goodput`; 0.1 is about 10 %. Errors are independent. If a
    shape is missing, a policy estimates its error from the roughness of the table."""
    devices_per_process: int = 1
    """Devices of one of its processes, which lie on one node; heeded in tables that are assumed."""
    submitted_s: float = 0.0
    """Time of submission, on the same clock as `now_s` of the decision."""
    since_s: float | None = None
    """Start of the present allocation; None if the job is not running."""
    paused_s: float | None = None
    """Time at which a waiting job lost its last devices; None if unknown, or if it runs or never ran."""
    restoring_until_s: float | None = None
    """Expected end of a restart in progress. Until then the job is not worth moving again."""
    num_restarts: int = 0
    """How often its devices have changed since its first start."""
    restart_s: float = 30.0
    """Estimated seconds that the next change costs (see `estimated_restart_s`)."""
    received_s: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds used so far, by kind."""
    fraction_received_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds run so far, by kind."""
    largest_profiled: int = 0
    """Largest number of devices on which the job was measured; 0 = never."""
    remaining: float | None = None
    """Remaining work in units of goodput x seconds; None if not declared."""
    work_guess: WorkGuess | None = None
    """What jobs that have ended say about its work; None if nothing is known."""
    rigid_shape_hint: int | None = None
    """Number of devices that the user would have picked."""
    shared_goodput: Mapping[tuple[str, Shape], float] = field(default_factory=dict)
    """Goodput while sharing devices with another job, by (id of the other job, shape)."""
    fractions_since_s: float | None = None
    """Start of the period that `fraction_received_s` covers; None = `submitted_s`."""
    tenant_received_s: Mapping[str, float] = field(default_factory=dict)
    """Recent device-seconds of every tenant (`fair_share.faded`); missing tenants had none. All jobs of one
    decision carry the same mapping."""
    avoids: Mapping[str, AvoidedNode] = field(default_factory=dict)
    """Nodes that the job should not use, by name. `reconcile` sees to that; policies need not."""

    @property
    def is_measured(self) -> bool:
        """Whether goodput is in samples/s. An adaptive job that has not run knows only ratios."""
        return self.largest_profiled > 0 or self.spec.mode != "adaptive"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A policy's answer: allocations of the jobs that run, and a reason for every job.

    If the policy solves an optimisation problem, `objective` is the value of its solution and `bound` the
    best possible value; bound - objective is the optimality gap.
    """

    allocations: Mapping[str, Allocation]
    reasons: Mapping[str, str] = field(default_factory=dict)
    objective: float | None = None
    bound: float | None = None


class SolverError(Exception):
    """A solver found no decision; `reconcile` then keeps the previous plan and says so."""


class SolverTimeout(SolverError):
    """A solver found no decision within its time limit."""


@runtime_checkable
class Policy(Protocol):
    """A rule that allocates devices. Equal inputs must give equal decisions.

    Implementations are frozen dataclasses with `__call__`. One that ignores the CPUs and the memory that jobs
    need has a class attribute `knows_amounts`, which is False. If nodes may run short of them, `reconcile`
    then refuses jobs with such needs.
    """

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Decide which job gets which devices. Raises SolverError if no decision is found in time."""
        ...


def knows_amounts(policy: Policy) -> bool:
    """Return whether a policy heeds the CPUs and the memory that jobs need: yes, unless it says otherwise."""
    return getattr(policy, "knows_amounts", True)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now: an allocation for every job (empty = none), and what changes."""

    allocations: Mapping[str, Allocation]
    """Devices of every job, by job id; empty for a job that waits."""
    start: tuple[str, ...]
    """Jobs without devices that get some."""
    resize: tuple[str, ...]
    """Running jobs that get other devices, or another number of devices."""
    pause: tuple[str, ...]
    """Running jobs that lose all devices."""
    reasons: Mapping[str, str]
    """Reason for each job's allocation, by job id."""
    next_solve_s: float
    """Latest time of the next decision; an event may bring it forward."""
    solved_s: float | None = None
    """Time of the policy's last decision."""
    objective: float | None = None
    """Value of the policy's last decision; `bound` is the best possible value."""
    bound: float | None = None
