"""The messages between the service, its users and the agents of nodes: frozen values, JSON both ways.

The service checks requests against these types with pydantic, strictly: unknown fields, values of another
type and numbers that are not finite are refused. `cluster.client` decodes answers to the same types without
pydantic, which agents and users need not install.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, dataclass_transform

from jaxgoodput.cluster.service.plain import TextRule, TextRules
from jaxgoodput.launcher import variables
from jaxgoodput.specs import (
    STRICT,
    Hints,
    HostFault,
    JobSpec,
    Node,
    Reservation,
    Tenant,
    require_within,
)

T = TypeVar("T")

VERSION = 4
"""The version of the protocol. The service refuses agents of another version."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
MOST_WORDS, LONGEST_WORD = 1000, 10_000
LONGEST_PATH = 4096
LONGEST_WHY = 2000
MOST_DEVICES = 4096  # of a node
# The least and the largest value of fields of a `JobSpec` that a cluster accepts.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "weight": (1e-3, 1e3),
    "max_devices": (1, 10**6),
    "num_devices": (1, 10**6),
    "min_run_s": (0.0, 1e10),
    "deadline_s": (0.0, 1e10),
    "budget": (0.0, 1e12),
    "preference": (1.0, 1e6),
}

Phase = Literal["waiting", "running", "done", "failed", "cancelled"]
OVER: tuple[Phase, ...] = ("done", "failed", "cancelled")


def check_name(name: str, of: str) -> None:
    """Raise ValueError for a name that could be a path or that is hard to type.

    >>> check_name("bert-large.v2", "a job")
    """
    if re.fullmatch(NAME, name) is None:
        raise ValueError(
            f"{name[:80]!a} is not a valid name for {of}. Use up to 63 letters, digits, dots, dashes and "
            "underscores, starting with a letter or a digit."
        )


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that pydantic checks strictly."""
    cls.__pydantic_config__ = STRICT  # pyright: ignore[reportAttributeAccessIssue]
    return dataclass(frozen=True, kw_only=True)(cls)


@message
class Submission:
    """A job as its user submits it: the devices that it may use, and the command that it runs."""

    spec: JobSpec
    command: tuple[str, ...]
    """The words of the command, such as ("python", "train.py"); the same on every node."""
    cwd: str = "."
    """The folder in which the command starts, on every node."""
    workdir: str | None = None
    """The run's workdir, whose journal holds its hints; None if the job gives no hints."""
    devices_per_process: int = 1
    """Devices of one node that each process uses. The job grows and shrinks by whole processes."""
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Environment variables of its processes, as pairs of a name and a value."""

    def __post_init__(self):
        check_name(self.spec.id, "a job")
        said = f"job {self.spec.id!r}"
        self._check_texts(said)
        self._check_numbers(said)

    def _check_texts(self, said: str) -> None:
        texts = (*self.command, self.cwd, self.workdir or "")
        longest = max(map(len, self.command), default=0)
        if not self.command:
            raise ValueError(f"{said} has no command. Add one, such as `-- python train.py`.")
        if len(self.command) > MOST_WORDS or longest > LONGEST_WORD:
            raise ValueError(
                f"{said} has a command of {len(self.command)} words, the longest of {longest} characters. "
                f"The limits are {MOST_WORDS} words and {LONGEST_WORD} characters. Put the rest into a file "
                "that the script reads."
            )
        if max(len(self.cwd), len(self.workdir or "")) > LONGEST_PATH:
            raise ValueError(
                f"{said} has a cwd or workdir of more than {LONGEST_PATH} characters, which no file system "
                "accepts. Give a shorter path."
            )
        try:
            for name in variables.as_mapping(self.variables):
                variables.check_name(name)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from None
        if any("\0" in text for text in (*texts, *(value for _, value in self.variables))):
            raise ValueError(
                f"{said} has a NUL character in its command, paths or variables, which no system accepts. "
                "Remove it."
            )

    def _check_numbers(self, said: str) -> None:
        for name, (least, most) in BOUNDS.items():
            require_within(said, {name: getattr(self.spec, name)}, least, most)
        each = self.devices_per_process
        require_within(said, {"devices_per_process": each}, 1)
        for name in ("min_devices", "max_devices", "num_devices"):
            size = getattr(self.spec, name)
            if size is not None and size % each:
                raise ValueError(
                    f"{said} has {name}={size}, which is not a multiple of devices_per_process={each}. A job "
                    "grows and shrinks by whole processes."
                )

    @functools.cached_property
    def num_letters(self) -> int:
        """The number of characters in its texts, roughly the memory that it takes."""
        pairs = (text for pair in self.variables for text in pair)
        return sum(map(len, (*self.command, self.cwd, self.workdir or "", *pairs)))


@message
class Join:
    """The request by which an agent adds its node to the cluster."""

    node: Node
    instance: str
    """A random name for the agent's process. Another instance means that the agent was restarted."""
    version: int
    """`VERSION` of the agent's program."""

    def __post_init__(self):
        check_name(self.node.name, "a node")
        if self.node.state != "up" or self.node.num_devices > MOST_DEVICES:
            raise ValueError(
                f"node {self.node.name!r} joins with state {self.node.state!r} and {self.node.num_devices} "
                f"devices. It must be up and have {MOST_DEVICES} devices at most."
            )


@message
class JobTask:
    """The part of a job that one node runs, as the service tells the node."""

    job: str
    generation: int
    """The generation of the job's allocation."""
    devices: tuple[int, ...]
    """Local indices of the node's devices; empty if it only runs the job's coordinator."""
    command: tuple[str, ...]
    cwd: str
    workdir: str | None
    devices_per_process: int
    min_processes: int
    max_processes: int
    attempt: int
    """The number of coordinators that the job has had."""
    coordinates: bool
    """Whether the job's coordinator runs on this node."""
    address: str | None
    """The address of this attempt's coordinator; None until it is known."""
    runs: bool
    """Whether the job has devices anywhere; if not, its coordinator must save and stop."""
    secret: str = field(repr=False)
    variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Environment variables of the job's processes."""


@message
class NodeWork:
    """All tasks of a node. The node ends every process that belongs to none of them."""

    node: str
    version: int
    tasks: tuple[JobTask, ...]


@message
class Report:
    """News of a job: its coordinator listens at an address or has ended, or it has released devices."""

    job: str
    attempt: int
    address: str | None = None
    code: int | None = None
    """Its exit code; negative for the signal that ended it; None while it runs."""
    why: str = ""
    released: tuple[int, ...] = ()
    """Devices of this node without which the job goes on until its end."""

    def __post_init__(self):
        if self.code is not None and not -(2**31) <= self.code < 2**32:
            raise ValueError(
                f"job {self.job[:80]!a} is reported to have ended with {self.code}, which is not an exit "
                "code."
            )


@message
class NodeReport:
    """What the coordinator of a job reports of a node that its processes run on."""

    job: str
    attempt: int
    node: str
    fault: HostFault
    why: str
    """The evidence in words."""
    slow_ratio: float | None = None
    """Its time per sample, divided by the median of the job's other nodes; None if that is not the fault."""


@message
class OutputLines:
    """Lines that a job's processes on a node have written since the last request."""

    job: str
    text: str


@message
class Reports:
    """All reports of coordinators that an agent sends in one request."""

    instance: str
    coordinators: tuple[Report, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    lines: tuple[OutputLines, ...] = ()


# What text may enter in a request. Fields that are not listed hold short lines.
TEXT_RULES: TextRules = {
    (Submission, "command"): TextRule(most=LONGEST_WORD, lines=True),
    (Submission, "cwd"): TextRule(most=LONGEST_PATH),
    (Submission, "workdir"): TextRule(most=LONGEST_PATH),
    (Submission, "variables"): TextRule(most=LONGEST_WORD, lines=True),
    (Report, "address"): TextRule(is_cleaned=True),
    (Report, "why"): TextRule(most=LONGEST_WHY, is_cleaned=True),
    (NodeReport, "why"): TextRule(most=LONGEST_WHY, is_cleaned=True),
    (OutputLines, "text"): TextRule(most=2**20, lines=True, is_cleaned=True),
}


@message
class HeldDevices:
    """The devices that a job held in one period, and when the period began and ended."""

    start_s: float
    end_s: float | None
    """None if the job still holds them."""
    devices: Mapping[str, tuple[int, ...]]


@message
class FaultShown:
    """A node that is kept apart from a job, or from all jobs, for a while, because jobs reported it."""

    node: str
    job: str
    """The job that reported it."""
    fault: HostFault
    why: str
    slow_ratio: float | None
    at_s: float
    """Time of the report."""
    until_s: float
    """Time until which the node is kept apart from this job."""
    all_until_s: float | None
    """Time until which it is kept apart from all jobs; None if no other job has reported it lately."""


@message
class JobShown:
    """A job as its user sees it. Times are seconds of the service's own clock."""

    id: str
    tenant: str
    phase: Phase
    reason: str
    """Why the job has these devices, or none."""
    command: tuple[str, ...]
    workdir: str | None
    min_devices: int
    max_devices: int
    devices: Mapping[str, tuple[int, ...]]
    home: str | None
    """The node of the job's coordinator; None without one."""
    generation: int
    num_devices: int
    submitted_s: float
    started_s: float | None
    finished_s: float | None
    num_changes: int
    """How often its devices have changed since its first start."""
    device_s: float
    """Device-seconds that it has used."""
    code: int | None
    hints: Hints | None
    past: tuple[HeldDevices, ...] = ()
    apart: tuple[FaultShown, ...] = ()
    """Nodes that are kept apart from it, because it or other jobs reported them."""
    kinds: tuple[str, ...] | None = None
    """Kinds of device that it may run on; None: all."""
    preferred_kinds: tuple[str, ...] | None = None
    """Kinds that it would rather have; None: no preference."""
    cpus_per_device: float = 0.0
    """CPUs that it needs for each device."""
    memory_gib_per_device: float = 0.0
    """Main memory that it needs for each device, in GiB."""


@message
class JobList:
    """Some jobs, as users see them, the newest last."""

    now_s: float
    jobs: tuple[JobShown, ...]
    num_older: int = 0
    """How many older jobs the request asked for as well, but are not in this answer."""
    next_before: int | None = None
    """The value of `before` with which the same request returns the next older jobs; None without any."""


@message
class AllocationShown:
    """The devices of a job, and the generation (number of changes) of that allocation."""

    job: str
    phase: Phase
    generation: int
    devices: Mapping[str, tuple[int, ...]]


@message
class NodeShown:
    """A node as users see it."""

    node: Node
    jobs: Mapping[str, tuple[int, ...]]
    """The local indices of the devices that each job holds."""
    silent_s: float
    """Seconds since its last heartbeat."""
    why: str
    """Why it is draining or down."""
    faults: tuple[FaultShown, ...] = ()
    """Reports of jobs about it that are in force."""
    cpus_left: float | None = None
    """CPUs that no job uses; None: jobs are never short of them."""
    memory_gib_left: float | None = None
    """Main memory that no job uses, in GiB; None: jobs are never short of it."""


@message
class ClusterShown:
    """All nodes, as users see them."""

    now_s: float
    nodes: tuple[NodeShown, ...]


@message
class Receipt:
    """The answer which confirms that a request is in the journal."""

    ok: bool = True
    note: str = ""


@message
class Log:
    """A part of the output of a job's processes."""

    text: str
    next_offset: int
    over: bool
    """Whether the output has ended."""


@message
class JobExplanation:
    """Why a job has its devices, and what would change that. Each change was tried on the policy."""

    job: str
    constraint: str
    message: str
    changes: tuple[str, ...]
    devices: Mapping[str, int]


@message
class WouldChange:
    """A job that would get other devices if one more job were submitted."""

    job: str
    before: str
    after: str


@message
class WhatIf:
    """The answer to a what-if question: the plan as it would be with one more job."""

    job: str
    gets: str
    why: str
    others: tuple[WouldChange, ...]


@message
class Health:
    """The answer of `/healthz`: how a running service is."""

    ok: bool
    version: int
    num_jobs: int
    plans: bool
    """Whether plans are being made."""


@message
class Refusal:
    """Why a request was not carried out: what it asked for, why that is impossible, and what to do."""

    error: str


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The rules by which tenants share a cluster: the fields of a `ClusterSpec` other than its nodes."""

    reservations: tuple[Reservation, ...] = ()
    price_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Price of one device for an hour, by kind."""
    quota: Mapping[str, int] = field(default_factory=dict)
    """Most devices that the jobs of a tenant may use at a time, by tenant."""
    tenants: tuple[Tenant, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of plans: the policy, and how it decides."""

    policy: str = "goodput"
    sharing: Sharing = field(default_factory=Sharing)
    min_gap_s: float = 5.0
    """Least time between two plans."""
    max_gap_s: float = 60.0
    """Longest time without a plan."""
    restart_s: float = 10.0
    """Cost of a change of devices for a job that has not measured it yet."""
