"""What jobs, devices and allocations are, on the wire and in memory: frozen, JSON both ways, no devices.

A *kind* is a type of device ("h200"). A *shape* says how many devices of one kind a job gets and over how
many nodes; an *allocation* says which ones.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

VERSION = 1  # of the JSON form


@dataclass(frozen=True, order=True)
class Shape:
    """So many devices of one kind over so many nodes."""

    kind: str
    num_nodes: int
    num_devices: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host and its devices.

    `labels` name the topology domain at each level, such as {"rack": "r3", "pod": "p1"}. A node that is
    draining keeps what runs on it and gets nothing new; one that is down has nothing.
    """

    name: str
    kind: str
    num_devices: int
    state: Literal["up", "draining", "down"] = "up"
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Devices kept free of all but one tenant (None: of everybody, such as for maintenance) for a while."""

    node: str
    num_devices: int
    start_s: float
    end_s: float
    tenant: str | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The nodes, what is reserved on them, and what devices cost."""

    nodes: tuple[Node, ...]
    reservations: tuple[Reservation, ...] = ()
    price_per_hour: Mapping[str, float] = field(default_factory=dict)  # by kind, per device
    quota: Mapping[str, int] = field(default_factory=dict)  # devices by tenant; absent = no limit


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a user asks for.

    `mode`: "adaptive" jobs may change size and batch, "elastic" ones keep their global batch, "rigid"
    ones run on exactly `num_devices`.
    """

    id: str
    mode: Literal["adaptive", "elastic", "rigid"] = "adaptive"
    min_devices: int = 1
    max_devices: int = 64
    num_devices: int | None = None  # rigid: exactly these
    weight: float = 1.0  # priority
    tenant: str = "default"
    preemptible: bool = True
    min_run_s: float = 0.0  # before it may be taken off its devices again
    kinds: tuple[str, ...] | None = None  # allowed; None = all
    level: str | None = None  # label of Node within which all of its nodes must lie, such as "rack"
    deadline_s: float | None = None  # soft: reported, never a reason to starve others


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Which devices: node name -> local indices; empty = paused.

    Jobs with the same `share_group` run on the same devices at once (packing). `generation` grows by
    one with every change.
    """

    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    generation: int = 0
    share_group: str | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes it touches."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(len(local) for local in self.devices.values())
