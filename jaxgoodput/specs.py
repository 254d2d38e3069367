"""What jobs, devices and allocations are: frozen values without devices, JSON both ways by `_serial`.

A *kind* is a type of device ("h200"). A *shape* says how many devices of one kind a job gets and over how
many nodes; an *allocation* says which ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, order=True)
class Shape:
    """So many devices of one kind over so many nodes."""

    kind: str
    """Of all the devices, such as "h200"."""
    num_nodes: int
    num_devices: int
    """On all nodes together."""

    def __post_init__(self):
        if not 1 <= self.num_nodes <= self.num_devices:
            raise ValueError(
                f"a shape needs at least one node and one device on each; got {self.num_devices} devices "
                f"of kind {self.kind!r} on {self.num_nodes} nodes. A job without devices has no shape."
            )


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host and its devices, local indices 0 ... num_devices - 1."""

    name: str
    kind: str
    """Of its devices, such as "h200"."""
    num_devices: int
    state: Literal["up", "draining", "down"] = "up"
    """Draining: keeps what runs on it and gets nothing new. Down: has nothing."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The topology domain at each level, such as {"rack": "r3", "pod": "p1"}."""
    withheld: tuple[int, ...] = ()
    """Local indices that are given to nobody: broken, or spoken for."""

    def __post_init__(self):
        if self.num_devices < 0:
            raise ValueError(
                f"node {self.name!r} has num_devices={self.num_devices}. It must be 0 or more."
            )
        if self.withheld:
            wrong = [i for i in self.withheld if not 0 <= i < self.num_devices]
            if wrong or len(set(self.withheld)) < len(self.withheld):
                raise ValueError(
                    f"node {self.name!r} withholds devices {list(self.withheld)}. These must be different "
                    f"local indices from 0 to {self.num_devices - 1}."
                )

    @property
    def num_usable(self) -> int:
        """Devices that are not withheld, whatever the node's state."""
        return self.num_devices - len(self.withheld)


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Devices kept free of all but one tenant for a while."""

    node: str
    num_devices: int
    start_s: float
    end_s: float
    tenant: str | None = None
    """Who may use them; None: nobody, such as for maintenance."""

    def __post_init__(self):
        if self.num_devices < 0:
            raise ValueError(
                f"a reservation on node {self.node!r} has num_devices={self.num_devices}. "
                "It must be 0 or more."
            )
        if not self.start_s < self.end_s:
            raise ValueError(
                f"a reservation on node {self.node!r} runs from {self.start_s} s to {self.end_s} s. "
                "It must end after it starts."
            )


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Who shares the cluster with others: a team, or a group of teams, whose jobs count together.

    A tenant is all jobs that name it (`JobSpec.tenant`) and those of the tenants below it.
    """

    name: str
    parent: str | None = None
    """The tenant that it is a part of; None: of none."""
    guaranteed: int = 0
    """Devices that its jobs have whenever they want them. While they do not, others may borrow them: the
    other tenants below its parent first, then all."""
    limit: int | None = None
    """The most devices, with those that it borrows; None: no limit."""
    weight: float = 1.0
    """Its share of what nobody is guaranteed, relative to the others below its parent."""
    budget_per_hour: float | None = None
    """The most that its devices cost in an hour, by the cluster's prices; None: no limit."""

    def __post_init__(self):
        said = f"tenant {self.name!r}"
        if self.guaranteed < 0:
            raise ValueError(
                f"{said} is guaranteed {self.guaranteed} devices. It must be 0 or more."
            )
        if self.limit is not None and self.limit < self.guaranteed:
            raise ValueError(
                f"{said} is guaranteed {self.guaranteed} devices but may have {self.limit} at most. Raise "
                "the limit, lower the guarantee, or leave the limit out."
            )
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"{said} has weight={self.weight}. A weight is a finite number above 0 (1 = normal)."
            )
        budget = self.budget_per_hour
        if budget is not None and not (math.isfinite(budget) and budget >= 0):
            raise ValueError(
                f"{said} has budget_per_hour={budget}. It is a finite number, 0 or more; None = no limit."
            )


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The nodes, what is reserved on them, what devices cost, and who shares them."""

    nodes: tuple[Node, ...]
    reservations: tuple[Reservation, ...] = ()
    price_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Of one device, by kind."""
    quota: Mapping[str, int] = field(default_factory=dict)
    """The most devices, by tenant; who is absent has no limit."""
    tenants: tuple[Tenant, ...] = ()
    """Who has guarantees, limits and shares; jobs of others have none of these and count as tenants of
    weight 1."""
    in_use: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Devices by tenant and kind that jobs have about which a policy is not asked: not its to give, but they
    count as their tenants'. `reconcile` says so; a user leaves it empty."""

    def __post_init__(self):
        if not self.nodes:
            raise ValueError(
                "a cluster needs at least one node; got none. "
                "Nodes that are out of service stay in the list with state='down'."
            )
        if len({node.name for node in self.nodes}) < len(self.nodes):
            names = [node.name for node in self.nodes]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"nodes {twice} occur more than once. A node is known by its name, so names must differ."
            )
        sizes = {node.name: node.num_devices for node in self.nodes}
        for reservation in self.reservations:
            if reservation.num_devices > sizes.get(reservation.node, -1):
                known = reservation.node in sizes
                has = f"has {sizes[reservation.node]}" if known else "is not one of the cluster's"
                raise ValueError(
                    f"{reservation.num_devices} devices are reserved on node {reservation.node!r}, which "
                    f"{has}. Reserve devices that are there; the nodes are {sorted(sizes)[:5]} ..."
                )
        for tenant, limit in self.quota.items():
            if limit < 0:
                raise ValueError(
                    f"tenant {tenant!r} has a quota of {limit} devices. It must be 0 or more."
                )
        for kind, price in self.price_per_hour.items():
            if not (math.isfinite(price) and price >= 0):
                raise ValueError(
                    f"kind {kind!r} costs {price} per hour. A price is a finite number, 0 or more."
                )
        if self.tenants:
            _check_tree(self.tenants)
            unpriced = sorted({node.kind for node in self.nodes} - set(self.price_per_hour))
            for tenant in self.tenants:
                if tenant.budget_per_hour is not None and unpriced:
                    raise ValueError(
                        f"tenant {tenant.name!r} has budget_per_hour={tenant.budget_per_hour}, but nobody "
                        f"knows what a {unpriced[0]!r} costs. Add it to price_per_hour (0 = nothing)."
                    )


def _check_tree(tenants: tuple[Tenant, ...]):
    by_name = {tenant.name: tenant for tenant in tenants}
    if len(by_name) < len(tenants):
        names = [tenant.name for tenant in tenants]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"tenants {twice} occur more than once. A tenant is known by its name.")
    below: dict[str, list[Tenant]] = {}
    for tenant in tenants:
        if tenant.parent is None:
            continue
        if tenant.parent not in by_name:
            raise ValueError(
                f"tenant {tenant.name!r} is below {tenant.parent!r}, which is not one of the tenants "
                f"{sorted(by_name)}. Add it, or say parent=None."
            )
        below.setdefault(tenant.parent, []).append(tenant)
        above, path = tenant, [tenant.name]
        while above.parent in by_name:
            above = by_name[above.parent]
            path.append(above.name)
            if len(path) > len(tenants):
                raise ValueError(
                    f"tenant {tenant.name!r} is below itself: {' below '.join(path[:4])} ... One of them "
                    "must have parent=None."
                )
    for name, children in below.items():
        wanted = sum(child.guaranteed for child in children)
        if wanted > by_name[name].guaranteed:
            raise ValueError(
                f"the tenants below {name!r}, {', '.join(child.name for child in children)}, are guaranteed "
                f"{wanted} devices, but it is itself guaranteed {by_name[name].guaranteed}. Guarantee it "
                f"{wanted}, or them less."
            )


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a user asks for."""

    id: str
    mode: Literal["adaptive", "elastic", "rigid"] = "adaptive"
    """Adaptive: size and batch may change. Elastic: the global batch stays. Rigid: so does the size."""
    min_devices: int = 1
    max_devices: int = 64
    num_devices: int | None = None
    """Rigid jobs run on exactly so many."""
    weight: float = 1.0
    """Priority; 1 is normal."""
    tenant: str = "default"
    preemptible: bool = True
    """Whether it may be taken off its devices, other than because its budget is spent."""
    min_run_s: float = 0.0
    """How long it runs before it may be taken off its devices again."""
    kinds: tuple[str, ...] | None = None
    """Kinds of device that it may run on; None: all."""
    level: str | None = None
    """The label of `Node` within which all of its nodes must lie, such as "rack"."""
    deadline_s: float | None = None
    """Met ahead of other jobs where the job declares its work left and that is possible; else reported."""
    budget: float | None = None
    """The most that it may cost in total, by the cluster's prices; None: no limit."""

    def __post_init__(self):
        said = f"job {self.id!r}"
        if self.mode == "rigid" and self.num_devices is None:
            raise ValueError(
                f"{said} is rigid but says no num_devices. Give the exact number, or choose mode='elastic'."
            )
        if self.num_devices is not None and self.num_devices < 1:
            raise ValueError(
                f"{said} asks for num_devices={self.num_devices}. It must be at least 1."
            )
        if not 1 <= self.min_devices <= self.max_devices:
            raise ValueError(
                f"{said} has min_devices={self.min_devices} and max_devices={self.max_devices}. "
                "Needed is 1 <= min_devices <= max_devices."
            )
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"{said} has weight={self.weight}. A weight is a finite number above 0 (1 = normal)."
            )
        if not self.min_run_s >= 0:
            raise ValueError(f"{said} has min_run_s={self.min_run_s}. It must be 0 or more.")
        if self.budget is not None and not (math.isfinite(self.budget) and self.budget >= 0):
            raise ValueError(
                f"{said} has budget={self.budget}. It is a finite number, 0 or more; None = no limit."
            )
        if self.kinds is not None and not self.kinds:
            raise ValueError(
                f"{said} allows no kind of device. List at least one, or say kinds=None for all."
            )


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Which devices a job has."""

    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Node name -> local indices; empty: paused."""
    generation: int = 0
    """Grows by one with every change."""
    share_group: str | None = None
    """Jobs of the same group run on the same devices at once (packing)."""

    def __post_init__(self):
        for name, local in self.devices.items():
            if not local or len(set(local)) < len(local) or min(local) < 0:
                raise ValueError(
                    f"an allocation lists devices {list(local)} of node {name!r}. Local indices are 0 or "
                    "more and different, and a node without any is left out."
                )

    @property
    def num_nodes(self) -> int:
        """Nodes it touches."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(len(local) for local in self.devices.values())
