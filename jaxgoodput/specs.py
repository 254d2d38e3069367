"""What jobs, devices and allocations are: frozen values without devices, JSON both ways by `_serial`.

A *kind* is a type of device ("h200"). A *shape* says how many devices of one kind a job gets and over how
many nodes; an *allocation* says which ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LARGEST = 1e30  # of a number in hints: products of them are still numbers
MOST_MICRO = (
    2**31
)  # samples of a micro-batch: products of them and of counts are still 64-bit integers
MOST_COUNTS = 2048  # of micro-batches over all layouts: a table is made for each
# How pydantic reads what comes over a wire: nothing unknown, nothing converted, nothing infinite.
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


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

    __pydantic_config__ = STRICT
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

    __pydantic_config__ = STRICT
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


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The seven numbers of a run's own fit of its step times, and what an update takes (`PerfParams`)."""

    __pydantic_config__ = STRICT
    compute_base: float
    compute_per_sample: float
    intra_base: float
    intra_per_replica: float
    inter_base: float
    inter_per_replica: float
    overlap: float
    update_s: float = 0.0

    def __post_init__(self):
        wrong = {n: v for n, v in vars(self).items() if not 0 <= v <= LARGEST}
        if wrong:
            raise ValueError(
                f"step costs are numbers from 0 to {LARGEST:g}; got {wrong}. A link that was never used has "
                "the costs that exploring it assumes, not NaN."
            )


@dataclass(frozen=True, kw_only=True)
class LayoutHints:
    """One strategy as a run knows it: how fast it is, how sure that is, and what its memory allows."""

    __pydantic_config__ = STRICT
    name: str
    devices_per_replica: int
    cost: StepCost
    error: float
    """RMS log error of the fit."""
    micro: tuple[int, int]
    """The smallest and largest micro-batch that fit, in samples per replica."""
    residuals: tuple[tuple[int, float], ...] = ()
    """Pairs of a micro-batch size and its measured over its modelled step time."""
    links: tuple[str, ...] = ()
    """Of those between replicas, which were measured: "intra" within a node, "inter" between nodes."""

    def __post_init__(self):
        said = f"layout {self.name!r}"
        if self.devices_per_replica < 1:
            raise ValueError(
                f"{said} has devices_per_replica={self.devices_per_replica}. It must be at least 1."
            )
        if self.devices_per_replica > 2**20:
            raise ValueError(
                f"{said} has devices_per_replica={self.devices_per_replica}. It is {2**20} at most."
            )
        if not 1 <= self.micro[0] <= self.micro[1] <= MOST_MICRO:
            raise ValueError(
                f"{said} has micro={self.micro}. It is (smallest, largest) with 1 <= smallest <= largest <= "
                f"{MOST_MICRO}."
            )
        if not 0 <= self.error <= LARGEST:
            raise ValueError(
                f"{said} has error={self.error}. It is a number from 0 to {LARGEST:g}."
            )
        if len(self.residuals) > 256:
            raise ValueError(f"{said} has {len(self.residuals)} residuals. 256 are read at most.")
        for size, ratio in self.residuals:
            if not 1 <= size <= MOST_MICRO or not 0 < ratio <= LARGEST:
                raise ValueError(
                    f"{said} has the residual ({size}, {ratio}). It is a micro-batch size from 1 to "
                    f"{MOST_MICRO} and a finite ratio above 0."
                )


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a running job tells of itself: enough to say what other devices would do for it."""

    __pydantic_config__ = STRICT
    generation: int
    """Of the allocation on which it was measured."""
    number: int
    """Grows from hint to hint of a job: one that comes late is not taken for the newest."""
    kind: str
    """Of device on which it was measured."""
    num_devices: int
    """On which it runs now."""
    largest: int
    """The largest number of devices on which it has been measured."""
    progress: float
    """Base steps done."""
    base_batch_size: int
    max_global_batch_size: int
    min_global_batch_size: int | None = None
    """None: the base."""
    max_micro_batches: int = 16
    total: float | None = None
    """Base steps after which it is done; None: not known."""
    layouts: tuple[LayoutHints, ...] = ()
    """None before the first fit of its step times."""
    grad_sqr: tuple[float, ...] = ()
    """Squared norms of the expected gradient by group of parameters; none where noise is unknown."""
    grad_var: tuple[float, ...] = ()
    """Traces of its covariance, of one base batch."""
    noise_confidence: float = 0.0
    """Effective number of samples behind these moments."""
    global_batch_size: int | None = None
    """In use."""
    throughput: float | None = None
    """Samples/s, measured; None: not yet."""
    goodput: float | None = None
    """Useful samples/s, measured."""
    restarts_s: tuple[float, ...] = ()
    """What its latest changes of devices took, the newest last."""

    def __post_init__(self):
        least = {
            "generation": 0,
            "number": 0,
            "num_devices": 1,
            "largest": 1,
            "base_batch_size": 1,
            "max_global_batch_size": self.base_batch_size,
            "max_micro_batches": 1,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(
                    f"hints have {name}={getattr(self, name)}. It must be at least {value}."
                )
        in_use = self.global_batch_size
        if in_use is not None and not 1 <= in_use <= 2**63 - 1:
            raise ValueError(
                f"hints have global_batch_size={in_use}. It lies between 1 and {2**63 - 1}, or is left out."
            )
        smallest = self.min_global_batch_size
        if smallest is not None and not 1 <= smallest <= self.max_global_batch_size:
            raise ValueError(
                f"hints have min_global_batch_size={smallest}. It lies between 1 and max_global_batch_size="
                f"{self.max_global_batch_size}, or is left out."
            )
        numbers = {
            "progress": (self.progress,),
            "noise_confidence": (self.noise_confidence,),
            "grad_sqr": self.grad_sqr,
            "grad_var": self.grad_var,
            "restarts_s": self.restarts_s,
            **{
                name: () if value is None else (value,)
                for name in ("total", "throughput", "goodput")
                for value in (getattr(self, name),)
            },
        }
        for name, values in numbers.items():
            if not all(0 <= value <= LARGEST for value in values):
                raise ValueError(
                    f"hints have {name}={values}. These are numbers from 0 to {LARGEST:g}; what is not known "
                    "is left out."
                )
        most = {
            "generation": 2**63 - 1,
            "number": 2**63 - 1,
            "num_devices": 2**20,
            "largest": 2**20,
            "max_global_batch_size": 2**40,
            "max_micro_batches": MOST_COUNTS // max(len(self.layouts), 1),
        }
        for name, value in most.items():
            if getattr(self, name) > value:
                raise ValueError(f"hints have {name}={getattr(self, name)}. It is {value} at most.")
        if len(self.layouts) > 64 or len(self.grad_sqr) > 4096 or len(self.restarts_s) > 256:
            raise ValueError(
                f"hints have {len(self.layouts)} layouts, {len(self.grad_sqr)} groups and "
                f"{len(self.restarts_s)} restarts. 64, 4096 and 256 are read at most."
            )
        if len(self.grad_sqr) != len(self.grad_var):
            raise ValueError(
                f"hints have {len(self.grad_sqr)} grad_sqr and {len(self.grad_var)} grad_var: one of each "
                "for every group of parameters."
            )

    @property
    def remaining(self) -> float | None:
        """Useful samples to go; None where nobody knows."""
        left = None if self.total is None else max(self.total - self.progress, 0.0)
        return None if left is None else left * self.base_batch_size
