"""What goes between the service, its users and the agents of nodes: frozen values, JSON both ways.

The service checks all that it is sent against these types (pydantic reads them as they are: unknown fields,
other types and numbers that are not finite are refused), and `cluster.client` reads its answers with them.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxgoodput.specs import STRICT, Hints, JobSpec, Node, Reservation, Tenant

VERSION = 1
"""Of what agents and service say to each other; an agent of another one is refused."""

DONE, FAILED, USAGE = 0, 1, 2  # how agents and commands end

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
MOST_WORDS, LONGEST_WORD = 1000, 10_000
LONGEST_PATH = 4096
MOST_S = 1e10
MOST_DEVICES = 4096  # of a node

Phase = Literal["waiting", "running", "done", "failed", "cancelled"]
OVER: tuple[Phase, ...] = ("done", "failed", "cancelled")


def check_name(name: str, of: str) -> None:
    """Raises ValueError for a name that could be a path, or is hard to type.

    >>> check_name("bert-large.v2", "a job")
    """
    if re.fullmatch(NAME, name) is None:
        raise ValueError(
            f"{name[:80]!a} is no name of {of}: up to 63 letters, digits, dots, dashes and underscores, of "
            "which the first is a letter or a digit."
        )


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job as its user hands it in: what it may have, and what is run."""

    __pydantic_config__ = STRICT
    spec: JobSpec
    command: tuple[str, ...]
    """Such as ("python", "train.py"); the same on every node."""
    cwd: str = "."
    """Where the command is started, on every node."""
    workdir: str | None = None
    """Of the run, from whose journal hints are read; None: it gives none."""
    devices_per_process: int = 1
    """A process takes so many devices of one node; the job comes and goes by whole processes."""

    def __post_init__(self):
        check_name(self.spec.id, "a job")
        said = f"job {self.spec.id!r}"
        if not self.command:
            raise ValueError(
                f"{said} has no command. Give what is to be run: `-- python train.py`."
            )
        if len(self.command) > MOST_WORDS or max(map(len, self.command)) > LONGEST_WORD:
            raise ValueError(
                f"{said} has a command of {len(self.command)} words, the longest of "
                f"{max(map(len, self.command))} letters; {MOST_WORDS} of up to {LONGEST_WORD} can be. Put "
                "the rest into a file that the script reads."
            )
        if max(len(self.cwd), len(self.workdir or "")) > LONGEST_PATH:
            raise ValueError(
                f"{said} has a cwd or workdir of more than {LONGEST_PATH} letters, which no file system "
                "takes. Give a shorter path."
            )
        if any("\0" in text for text in (*self.command, self.cwd, self.workdir or "")):
            raise ValueError(f"{said} holds a NUL character, which no command and no file has.")
        spec = self.spec
        bounds = {
            "weight": (1e-3, spec.weight, 1e3),
            "max_devices": (1, spec.max_devices, 10**6),
            "num_devices": (1, spec.num_devices or 1, 10**6),
            "min_run_s": (0.0, spec.min_run_s, MOST_S),
            "deadline_s": (0.0, spec.deadline_s or 0.0, MOST_S),
            "budget": (0.0, spec.budget or 0.0, 1e12),
        }
        for name, (least, value, most) in bounds.items():
            if not least <= value <= most:
                raise ValueError(
                    f"{said} has {name}={value}. From {least:g} to {most:g} is possible here."
                )
        each = self.devices_per_process
        if each < 1:
            raise ValueError(f"{said} has devices_per_process={each}. It must be at least 1.")
        sizes = {
            "min_devices": self.spec.min_devices,
            "max_devices": self.spec.max_devices,
            "num_devices": self.spec.num_devices or each,
        }
        for name, size in sizes.items():
            if size % each:
                raise ValueError(
                    f"{said} has {name}={size}, which is no multiple of devices_per_process={each}: it comes "
                    "and goes by whole processes."
                )

    @functools.cached_property
    def num_letters(self) -> int:
        """About how much room it takes."""
        return sum(map(len, (*self.command, self.cwd, self.workdir or "")))


@dataclass(frozen=True, kw_only=True)
class Join:
    """What the agent of a node says when it comes."""

    __pydantic_config__ = STRICT
    node: Node
    instance: str
    """Of this agent: another one for a node is a restart, and what ran there has ended."""
    version: int
    """`VERSION` of its program."""

    def __post_init__(self):
        check_name(self.node.name, "a node")
        if self.node.state != "up" or self.node.num_devices > MOST_DEVICES:
            raise ValueError(
                f"node {self.node.name!r} comes with state {self.node.state!r} and {self.node.num_devices} "
                f"devices. It comes up, with {MOST_DEVICES} devices at most."
            )


@dataclass(frozen=True, kw_only=True)
class JobTask:
    """What a node has to do for one job."""

    __pydantic_config__ = STRICT
    job: str
    generation: int
    """Of the job's allocation."""
    devices: tuple[int, ...]
    """Of this node; none where it only runs the job's coordinator."""
    command: tuple[str, ...]
    cwd: str
    workdir: str | None
    devices_per_process: int
    min_processes: int
    max_processes: int
    attempt: int
    """Counts the coordinators that the job has had."""
    coordinates: bool
    """Whether the job's coordinator runs here."""
    address: str | None
    """Of the coordinator, for this attempt; None: it has not said yet."""
    runs: bool
    """Whether the job has devices anywhere; otherwise its coordinator is told to save and stop."""
    secret: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class NodeWork:
    """All that a node has to do; what is not here, it ends."""

    __pydantic_config__ = STRICT
    node: str
    version: int
    tasks: tuple[JobTask, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the coordinator of a job did on a node: it listens somewhere, or it has ended."""

    __pydantic_config__ = STRICT
    job: str
    attempt: int
    address: str | None = None
    code: int | None = None
    """Its exit code; below 0: minus the signal that ended it."""
    why: str = ""

    def __post_init__(self):
        if self.code is not None and not -(2**31) <= self.code < 2**32:
            raise ValueError(f"job {self.job[:80]!a} has ended with {self.code}, no exit code.")


@dataclass(frozen=True, kw_only=True)
class OutputLines:
    """More of what the processes of a job wrote on a node."""

    __pydantic_config__ = STRICT
    job: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Reports:
    """What an agent tells all at once."""

    __pydantic_config__ = STRICT
    instance: str
    coordinators: tuple[Report, ...] = ()
    lines: tuple[OutputLines, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeldDevices:
    """Devices that a job had for a while."""

    __pydantic_config__ = STRICT
    start_s: float
    end_s: float | None
    """None: it has them still."""
    devices: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class JobShown:
    """A job as its user sees it; times are seconds of the service's own clock."""

    __pydantic_config__ = STRICT
    id: str
    tenant: str
    phase: Phase
    reason: str
    """Why it has what it has."""
    command: tuple[str, ...]
    workdir: str | None
    min_devices: int
    max_devices: int
    devices: Mapping[str, tuple[int, ...]]
    home: str | None
    """The node of its coordinator; None where it has none."""
    generation: int
    num_devices: int
    submitted_s: float
    started_s: float | None
    finished_s: float | None
    num_changes: int
    """Of its devices, since its first start."""
    device_s: float
    """Device-seconds that it has had."""
    code: int | None
    hints: Hints | None
    past: tuple[HeldDevices, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobList:
    """Jobs, the newest last."""

    __pydantic_config__ = STRICT
    now_s: float
    jobs: tuple[JobShown, ...]


@dataclass(frozen=True, kw_only=True)
class AllocationShown:
    """What a job has, and since which generation."""

    __pydantic_config__ = STRICT
    job: str
    phase: Phase
    generation: int
    devices: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class NodeShown:
    """A node of the cluster."""

    __pydantic_config__ = STRICT
    node: Node
    jobs: Mapping[str, tuple[int, ...]]
    """Who has which of its devices."""
    silent_s: float
    """Since it was heard of last."""
    why: str
    """Why it is draining or down."""


@dataclass(frozen=True, kw_only=True)
class ClusterShown:
    """All nodes."""

    __pydantic_config__ = STRICT
    now_s: float
    nodes: tuple[NodeShown, ...]


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Something was taken note of, for good."""

    __pydantic_config__ = STRICT
    ok: bool = True
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Log:
    """A part of what a job's processes wrote."""

    __pydantic_config__ = STRICT
    text: str
    next_offset: int
    over: bool
    """Whether nothing more will come."""


@dataclass(frozen=True, kw_only=True)
class JobExplanation:
    """Why a job has what it has, and what would change that; each change was tried."""

    __pydantic_config__ = STRICT
    job: str
    constraint: str
    message: str
    changes: tuple[str, ...]
    devices: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class WouldChange:
    """A job that would have something else."""

    __pydantic_config__ = STRICT
    job: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The plan if one job more were there."""

    __pydantic_config__ = STRICT
    job: str
    gets: str
    why: str
    others: tuple[WouldChange, ...]


@dataclass(frozen=True, kw_only=True)
class Health:
    """That the service answers."""

    __pydantic_config__ = STRICT
    ok: bool
    version: int
    num_jobs: int
    plans: bool
    """Whether plans are being made."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why something was not done: what, what it got, why, what to do."""

    __pydantic_config__ = STRICT
    error: str


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How those who share the cluster do so: what a `ClusterSpec` says beside its nodes."""

    reservations: tuple[Reservation, ...] = ()
    price_per_hour: Mapping[str, float] = field(default_factory=dict)
    quota: Mapping[str, int] = field(default_factory=dict)
    tenants: tuple[Tenant, ...] = ()
