"""The input of `jaxgoodput decide`: a cluster, its jobs, and what is known about them, as JSON of version 1.

Unknown fields are errors, so that a limit that the scheduler does not know, such as memory, is not taken for
one that it keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from jaxgoodput._fields.serial import parse, unpack
from jaxgoodput.cluster.scheduler.policy import AvoidedNode
from jaxgoodput.cluster.scheduler.work_left import EndedJob
from jaxgoodput.specs import ClusterSpec, Hints, JobSpec, Shape, require_within


@dataclass(frozen=True, kw_only=True)
class GoodputEntry:
    """The goodput of a job on one shape: so many devices of a kind on so many nodes."""

    kind: str
    num_nodes: int
    num_devices: int
    goodput: float
    """Useful samples per second, or any other unit of the job's own."""
    error: float | None = None
    """Relative standard error of `goodput`; None: the policy estimates it."""

    def __post_init__(self):
        require_within(
            "an entry of a goodput table", {"goodput": self.goodput, "error": self.error}
        )

    @property
    def shape(self) -> Shape:
        """The shape of the entry."""
        return Shape(self.kind, self.num_nodes, self.num_devices)


@dataclass(frozen=True, kw_only=True)
class RequestedJob(JobSpec):
    """A job of the request: what its user asked for, as in `jaxgoodput submit`, and what it has had so far.

    A job without `goodput` and `hints` is planned as the service plans a job that reports nothing.
    """

    devices_per_process: int = 1
    """Devices of one node that each process uses."""
    submitted_s: float = 0.0
    """Time of submission, on the clock of `now_s`."""
    allocation: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Local indices of the devices that it has at present, by node; empty: it waits."""
    since_s: float | None = None
    """When it got these devices; None if it waits."""
    paused_s: float | None = None
    """When it lost its last devices, if it waits; None: it never had any, or runs."""
    goodput: tuple[GoodputEntry, ...] = ()
    """Its goodput by shape; a missing shape is not allowed. Empty: it follows from the hints, or is
    assumed."""
    hints: Hints | None = None
    """What it has measured of itself, as the journal of a run gives it."""
    remaining: float | None = None
    """Remaining work in units of goodput x seconds; None: as in its hints, or unknown."""
    script: str = ""
    """What it runs. Its work is guessed from ended jobs of the same script whose owner is its tenant."""
    largest_profiled: int | None = None
    """Largest number of devices that it has run on; None: as in its hints, or its present devices."""
    restart_s: float = 30.0
    """Estimated seconds that the next change of its devices costs."""
    restoring_until_s: float | None = None
    """Expected end of a restart in progress; None: none is."""
    num_restarts: int = 0
    """How often its devices have changed since its first start."""
    received_s: Mapping[str, float] = field(default_factory=dict)
    """Device-seconds used so far, by kind."""
    ran_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds with devices so far, by kind."""
    avoids: Mapping[str, AvoidedNode] = field(default_factory=dict)
    """Nodes that it should not use, by name."""

    def __post_init__(self):
        super().__post_init__()
        what = f"job {self.id!r}"
        self._require_whole_processes(what)
        numbers = (
            "submitted_s",
            "since_s",
            "paused_s",
            "remaining",
            "restart_s",
            "num_restarts",
            "largest_profiled",
        )
        require_within(what, {name: getattr(self, name) for name in numbers})
        for name in ("received_s", "ran_s"):
            require_within(what, {f"{name}[{k!r}]": v for k, v in getattr(self, name).items()})
        if bool(self.allocation) != (self.since_s is not None):
            raise ValueError(
                f"{what} has allocation={dict(self.allocation)} and since_s={self.since_s}. A job that has "
                "devices needs both, and one that waits neither."
            )

    def _require_whole_processes(self, what: str) -> None:
        each = self.devices_per_process
        require_within(what, {"devices_per_process": each}, 1)
        is_rigid = self.mode == "rigid" and self.num_devices is not None
        for name in ("num_devices",) if is_rigid else ("min_devices", "max_devices"):
            size = getattr(self, name)
            require_within(what, {name: size}, 1, 10**6)
            if size is not None and size % each:
                raise ValueError(
                    f"{what} has {name}={size}, which is not a multiple of devices_per_process={each}. A job "
                    "grows and shrinks by whole processes."
                )

    @property
    def spec(self) -> JobSpec:
        """The part of the job that its user asked for."""
        return JobSpec(**{f.name: getattr(self, f.name) for f in fields(JobSpec)})


@dataclass(frozen=True, kw_only=True)
class DecisionRequest:
    """The whole input of `jaxgoodput decide`."""

    version: ClassVar[int] = 1
    now_s: float
    """Time of the decision, on any clock; all other times are on the same one."""
    cluster: ClusterSpec
    jobs: tuple[RequestedJob, ...]
    ended: tuple[EndedJob, ...] = ()
    """Jobs that have ended, the newest last, from which the work of others is guessed."""
    policy: str = "goodput"
    """Name of the policy (`jaxgoodput simulate --list`)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the policy that differ from its defaults, by name."""
    tenant_received_s: Mapping[str, float] = field(default_factory=dict)
    """Recent device-seconds of every tenant; missing ones had none."""
    max_gap_s: float = 60.0
    """Longest time until the next decision."""
    explain: bool = True
    """Whether to explain why jobs wait. Each explanation costs a few dozen decisions."""

    def __post_init__(self):
        require_within("the request", {"now_s": self.now_s, "max_gap_s": self.max_gap_s})
        if self.cluster.in_use:
            raise ValueError("cluster.in_use is set by the scheduler itself. Leave it out.")
        limited = [job.id for job in self.jobs if job.budget is not None]
        if limited and not self.cluster.price_per_hour:
            raise ValueError(
                f"job {limited[0]!r} has a budget, but the devices have no prices. Add "
                "cluster.price_per_hour, or leave the budget out."
            )
        sizes = {node.name: node.num_devices for node in self.cluster.nodes}
        for job in self.jobs:
            _require_past(job, self.now_s)
            _require_devices(job, sizes)


def _require_past(job: RequestedJob, now_s: float) -> None:
    """Raise ValueError if anything has happened to a job after the time of the decision."""
    for name in ("submitted_s", "since_s", "paused_s"):
        at_s = getattr(job, name)
        if at_s is not None and at_s > now_s:
            raise ValueError(
                f"job {job.id!r} has {name}={at_s}, which is after now_s={now_s}. All times are on one clock."
            )


def _require_devices(job: RequestedJob, sizes: Mapping[str, int]) -> None:
    """Raise ValueError if a job has devices that the nodes of these sizes do not have."""
    for name, local in job.allocation.items():
        if name not in sizes:
            raise ValueError(
                f"job {job.id!r} has devices of node {name!r}, which is not one of the cluster's "
                f"{sorted(sizes)[:5]} ... A node that is gone stays in the list with state='down'."
            )
        if not local or not all(0 <= index < sizes[name] for index in local):
            raise ValueError(
                f"job {job.id!r} has devices {list(local)} of node {name!r}. Local indices are from "
                f"0 to {sizes[name] - 1}, and a node without any is left out."
            )


def read_request(text: str | bytes) -> DecisionRequest:
    """Return the request in a JSON text. Raises ValueError, which names the field that is wrong."""
    return unpack(parse(text), DecisionRequest)
