"""Jobs, devices and allocations as frozen values without devices; `serial` makes JSON of them.

A *kind* is a type of device ("h200"). A *shape* says how many devices of one kind a job gets and over how
many nodes; an *allocation* says which devices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LARGEST = 1e30  # largest number in hints, so that products of such numbers are finite
MOST_MICRO = 2**31  # samples of a micro-batch; its product with a count fits into 64 bits
MOST_COUNTS = 2048  # micro-batches per update, summed over layouts: a table is computed for each
MOST_NEED = 1e6  # CPUs, or GiB, that a job may need for one device
# Settings of pydantic, which reads these types from HTTP: no unknown, converted or infinite values.
STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

HostFault = Literal["slow", "unreachable", "stuck", "faulty"]
"""What is wrong with a host of a job: it slows the others down, is not reached by others, has a device that
computes nothing any more, or computes wrong numbers."""

_LARGEST_INT = 2**63 - 1


@dataclass(frozen=True, order=True)
class Shape:
    """A number of devices of one kind, spread over a number of nodes."""

    kind: str
    """Kind of the devices, such as "h200"."""
    num_nodes: int
    num_devices: int
    """Devices on all nodes together."""

    def __post_init__(self):
        if not 1 <= self.num_nodes <= self.num_devices:
            raise ValueError(
                f"a shape needs at least one node and one device on each; got {self.num_devices} devices "
                f"of kind {self.kind!r} on {self.num_nodes} nodes. A job without devices has no shape."
            )


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host and its devices, which have the local indices 0 to num_devices - 1."""

    __pydantic_config__ = STRICT
    name: str
    kind: str
    """Kind of the devices, such as "h200"."""
    num_devices: int
    state: Literal["up", "draining", "down"] = "up"
    """Draining: running jobs stay, and no new ones come. Down: no jobs."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Topology domain at each level, such as {"rack": "r3", "pod": "p1"}."""
    withheld: tuple[int, ...] = ()
    """Local indices of devices that no job gets: they are broken or used otherwise."""
    cpus: float | None = None
    """CPUs for jobs; None: unknown, and never the limit."""
    memory_gib: float | None = None
    """Main memory for jobs, in GiB; None: unknown, and never the limit."""

    def __post_init__(self):
        numbers = {
            "num_devices": self.num_devices,
            "cpus": self.cpus,
            "memory_gib": self.memory_gib,
        }
        require_within(f"node {self.name!r}", numbers)
        if self.withheld:
            wrong = [i for i in self.withheld if not 0 <= i < self.num_devices]
            if wrong or len(set(self.withheld)) < len(self.withheld):
                raise ValueError(
                    f"node {self.name!r} withholds devices {list(self.withheld)}. These must be different "
                    f"local indices from 0 to {self.num_devices - 1}."
                )

    @property
    def num_usable(self) -> int:
        """Number of devices that are not withheld, whatever the node's state."""
        return self.num_devices - len(self.withheld)


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Devices that are kept free for one tenant, or for maintenance, for a while."""

    node: str
    num_devices: int
    start_s: float
    end_s: float
    tenant: str | None = None
    """Tenant that may use the devices; None: no tenant, for example during maintenance."""

    def __post_init__(self):
        require_within(f"a reservation on node {self.node!r}", {"num_devices": self.num_devices})
        if not self.start_s < self.end_s:
            raise ValueError(
                f"a reservation on node {self.node!r} runs from {self.start_s} s to {self.end_s} s. "
                "It must end after it starts."
            )


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A team, or a group of teams, that shares the cluster with others.

    The jobs of a tenant are all jobs that name it (`JobSpec.tenant`) and the jobs of its child tenants.
    """

    name: str
    parent: str | None = None
    """Parent tenant; None: a tenant at the top level."""
    guaranteed: int = 0
    """Devices that its jobs get whenever they want them. Other tenants may borrow them while they are idle:
    first the children of the same parent, then all others."""
    limit: int | None = None
    """Maximum number of devices, borrowed ones included; None: no limit."""
    weight: float = 1.0
    """Share of the devices without a guarantee, relative to the other children of its parent."""
    budget_per_hour: float | None = None
    """Maximum cost of its devices per hour, by the cluster's prices; None: no limit."""

    def __post_init__(self):
        what = f"tenant {self.name!r}"
        require_within(
            what, {"guaranteed": self.guaranteed, "budget_per_hour": self.budget_per_hour}
        )
        if self.limit is not None and self.limit < self.guaranteed:
            raise ValueError(
                f"{what} is guaranteed {self.guaranteed} devices but limited to {self.limit}. Raise the "
                "limit, lower the guarantee, or leave the limit out."
            )
        _require_weight(what, self.weight)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The nodes of a cluster, their reservations and prices, and the tenants that share them."""

    nodes: tuple[Node, ...]
    reservations: tuple[Reservation, ...] = ()
    price_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Price of one device per hour, by kind."""
    quota: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of devices by tenant; tenants that are not listed have no limit."""
    tenants: tuple[Tenant, ...] = ()
    """Tenants with guarantees, limits and shares. A tenant that is not listed has weight 1 and no others."""
    in_use: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Devices by tenant and kind of jobs that a policy may not change; they count for their tenants.
    `reconcile` fills this in; users leave it empty."""
    changed_s: float | None = None
    """Time of the last news: a job arrived, ended or was measured, or a node changed. Until more happens,
    policies may leave their plan as it is. None = unknown, so each decision may be the first after news."""

    def __post_init__(self):
        if not self.nodes:
            raise ValueError(
                "a cluster needs at least one node; got none. "
                "Nodes that are out of service stay in the list with state='down'."
            )
        _require_different("nodes", "node", [node.name for node in self.nodes])
        sizes = {node.name: node.num_devices for node in self.nodes}
        for reservation in self.reservations:
            if reservation.num_devices > sizes.get(reservation.node, -1):
                known = reservation.node in sizes
                has = f"has {sizes[reservation.node]}" if known else "is not one of the cluster's"
                raise ValueError(
                    f"{reservation.num_devices} devices are reserved on node {reservation.node!r}, which "
                    f"{has}. Reserve devices that exist; the nodes are {sorted(sizes)[:5]} ..."
                )
        for tenant, limit in self.quota.items():
            require_within(f"tenant {tenant!r}", {"quota": limit})
        for kind, price in self.price_per_hour.items():
            require_within(f"kind {kind!r}", {"price_per_hour": price})
        if self.tenants:
            _require_tree(self.tenants)
            self._require_prices()

    def _require_prices(self):
        # A budget is meaningless if a device that the tenant may get has no price.
        unpriced = sorted({node.kind for node in self.nodes} - set(self.price_per_hour))
        for tenant in self.tenants:
            if tenant.budget_per_hour is not None and unpriced:
                raise ValueError(
                    f"tenant {tenant.name!r} has budget_per_hour={tenant.budget_per_hour}, but kind "
                    f"{unpriced[0]!r} has no price. Add it to price_per_hour (0 = free)."
                )


def _require_tree(tenants: tuple[Tenant, ...]):
    """Raise ValueError unless the tenants form trees in which children have no more than their parent."""
    by_name = {tenant.name: tenant for tenant in tenants}
    _require_different("tenants", "tenant", [tenant.name for tenant in tenants])
    children: dict[str, list[Tenant]] = {}
    for tenant in tenants:
        if tenant.parent is None:
            continue
        if tenant.parent not in by_name:
            raise ValueError(
                f"tenant {tenant.name!r} has the parent {tenant.parent!r}, which is not one of the tenants "
                f"{sorted(by_name)}. Add it, or set parent=None."
            )
        children.setdefault(tenant.parent, []).append(tenant)
        above, path = tenant, [tenant.name]
        while above.parent in by_name:
            above = by_name[above.parent]
            path.append(above.name)
            if len(path) > len(tenants):  # longer than any path without a loop
                raise ValueError(
                    f"tenant {tenant.name!r} is below itself: {' below '.join(path[:4])} ... One of them "
                    "must have parent=None."
                )
    for name, group in children.items():
        wanted = sum(child.guaranteed for child in group)
        if wanted > by_name[name].guaranteed:
            raise ValueError(
                f"the tenants below {name!r}, {', '.join(child.name for child in group)}, are guaranteed "
                f"{wanted} devices, but {name!r} itself is guaranteed {by_name[name].guaranteed}. Raise its "
                f"guarantee to {wanted}, or lower theirs."
            )


@dataclass(frozen=True, kw_only=True)
class JobTerms:
    """What a job asks for beside its size: the fields that jobs of the service and of traces share."""

    weight: float = 1.0
    """Priority; 1 is normal."""
    tenant: str = "default"
    preemptible: bool = True
    """Whether other jobs may get its devices while it runs; it still stops if its budget is spent."""
    min_run_s: float = 0.0
    """Seconds for which it keeps its devices before other jobs may get them."""
    kinds: tuple[str, ...] | None = None
    """Kinds of device that it may run on; None: all."""
    preferred_kinds: tuple[str, ...] | None = None
    """Kinds that it would rather have than its other ones; None: no preference. The policy `goodput` heeds
    it."""
    preference: float = 1.25
    """Price of the preference: work on other kinds counts as this many times less, so a job takes another
    kind if that is more than this many times as fast, or cheaper by as much, or if no preferred one is to be
    had."""
    cpus_per_device: float = 0.0
    """CPUs that it needs for each of its devices, on the node of the device."""
    memory_gib_per_device: float = 0.0
    """Main memory that it needs for each of its devices, on the node of the device, in GiB."""
    level: str | None = None
    """Topology level, such as "rack": all nodes of the job must have the same label at this level."""
    deadline_s: float | None = None
    """Deadline. It takes precedence over other jobs if the job declares its remaining work and the deadline
    can be met; otherwise it is only reported."""
    budget: float | None = None
    """Maximum total cost, by the cluster's prices; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(JobTerms):
    """A user's request for a job."""

    __pydantic_config__ = STRICT
    id: str
    mode: Literal["adaptive", "elastic", "rigid"] = "adaptive"
    """Adaptive: devices and batch may change. Elastic: the global batch is fixed. Rigid: the number of
    devices is fixed as well."""
    min_devices: int = 1
    max_devices: int = 64
    num_devices: int | None = None
    """Number of devices of a rigid job."""

    def __post_init__(self):
        what = f"job {self.id!r}"
        if self.mode == "rigid" and self.num_devices is None:
            raise ValueError(
                f"{what} is rigid but has no num_devices. Give the exact number, or choose mode='elastic'."
            )
        require_within(what, {"num_devices": self.num_devices}, 1)
        if not 1 <= self.min_devices <= self.max_devices:
            raise ValueError(
                f"{what} has min_devices={self.min_devices} and max_devices={self.max_devices}. They must be "
                "1 <= min_devices <= max_devices."
            )
        _require_weight(what, self.weight)
        if not self.min_run_s >= 0:  # may be infinite: the job keeps its devices until it ends
            raise ValueError(f"{what} has min_run_s={self.min_run_s}. It must be 0 or more.")
        require_within(what, {"budget": self.budget})
        self._require_kinds(what)
        needs = ("cpus_per_device", "memory_gib_per_device")
        require_within(what, {name: getattr(self, name) for name in needs}, 0, MOST_NEED)

    def _require_kinds(self, what: str) -> None:
        if self.kinds is not None and not self.kinds:
            raise ValueError(
                f"{what} allows no kind of device. List at least one, or set kinds=None for all."
            )
        require_within(what, {"preference": self.preference}, 1)
        preferred, kinds = self.preferred_kinds, self.kinds
        if preferred is None:
            return
        if not preferred:
            raise ValueError(
                f"{what} prefers no kind of device. List at least one, or set preferred_kinds=None."
            )
        if kinds is not None and not set(preferred) & set(kinds):
            raise ValueError(
                f"{what} prefers {list(preferred)} but allows only {list(kinds)}. Prefer some of these, or "
                "allow more."
            )


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The devices of a job."""

    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Local indices of the devices by name of the node; empty: the job is paused."""
    generation: int = 0
    """Number of changes so far."""
    share_group: str | None = None
    """Group of jobs that run on the same devices at the same time (packing)."""

    def __post_init__(self):
        for name, local in self.devices.items():
            if not local or len(set(local)) < len(local) or min(local) < 0:
                raise ValueError(
                    f"an allocation lists devices {list(local)} of node {name!r}. Local indices must be 0 or "
                    "more and different, and a node without any is left out."
                )

    @property
    def num_nodes(self) -> int:
        """Number of nodes with devices of the job."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Number of devices on all nodes."""
        return sum(len(local) for local in self.devices.values())


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The parameters of a run's fitted step times, as in `PerfParams`."""

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
                f"step costs must be numbers from 0 to {LARGEST:g}; got {wrong}. For a link that was never "
                "used, pass the best possible cost instead of NaN."
            )


@dataclass(frozen=True, kw_only=True)
class LayoutHints:
    """What a run has measured about one strategy: its speed, the error of that, and its memory limits."""

    __pydantic_config__ = STRICT
    name: str
    devices_per_replica: int
    cost: StepCost
    error: float
    """RMS log error of the fit."""
    micro: tuple[int, int]
    """Smallest and largest micro-batch that fit into memory, in samples per replica."""
    residuals: tuple[tuple[int, float], ...] = ()
    """Pairs of a micro-batch size and its ratio of measured to modelled step time."""
    links: tuple[str, ...] = ()
    """Measured links between replicas: "intra" within a node, "inter" between nodes."""

    def __post_init__(self):
        what = f"layout {self.name!r}"
        require_within(what, {"devices_per_replica": self.devices_per_replica}, 1, 2**20)
        if not 1 <= self.micro[0] <= self.micro[1] <= MOST_MICRO:
            raise ValueError(
                f"{what} has micro={self.micro}. It must be (smallest, largest) with 1 <= smallest <= "
                f"largest <= {MOST_MICRO}."
            )
        require_within(what, {"error": self.error}, 0, LARGEST)
        if len(self.residuals) > 256:
            raise ValueError(f"{what} has {len(self.residuals)} residuals. At most 256 are read.")
        for size, ratio in self.residuals:
            if not 1 <= size <= MOST_MICRO or not 0 < ratio <= LARGEST:
                raise ValueError(
                    f"{what} has the residual ({size}, {ratio}). It must be a micro-batch size from 1 to "
                    f"{MOST_MICRO} and a finite ratio above 0."
                )


@dataclass(frozen=True, kw_only=True)
class Hints:
    """A running job's measurements, from which the scheduler predicts its goodput on other devices."""

    __pydantic_config__ = STRICT
    generation: int
    """Generation of the allocation on which they were measured."""
    number: int
    """Number that grows from one hint of a job to the next, so that a late one does not replace a newer
    one."""
    kind: str
    """Kind of device on which they were measured."""
    num_devices: int
    """Present number of devices."""
    largest: int
    """Largest number of devices that was measured."""
    progress: float
    """Base steps done."""
    base_batch_size: int
    """Samples of a base step, for which the learning rate was tuned."""
    max_global_batch_size: int
    """Largest batch that the run may use, in samples."""
    min_global_batch_size: int | None = None
    """None: the base batch size."""
    max_micro_batches: int = 16
    """Most micro-batches of one replica per update."""
    total: float | None = None
    """Base steps at the end of training; None: unknown."""
    layouts: tuple[LayoutHints, ...] = ()
    """Strategies whose step times were fitted; empty before the first fit."""
    grad_sqr: tuple[float, ...] = ()
    """Squared norms of the expected gradient by group of parameters; empty if the noise is unknown."""
    grad_var: tuple[float, ...] = ()
    """Traces of the gradient's covariance for one base batch, by group of parameters."""
    most_gain: float | None = None
    """Base steps that an update may be worth at most, for a while after its gradient has exploded; None: no
    such limit."""
    noise_confidence: float = 0.0
    """Effective number of samples behind these moments."""
    global_batch_size: int | None = None
    """Present batch."""
    throughput: float | None = None
    """Measured samples/s; None: not yet measured."""
    goodput: float | None = None
    """Measured useful samples/s; None: not yet measured."""
    restarts_s: tuple[float, ...] = ()
    """Durations of its latest changes of devices, newest last."""

    def __post_init__(self):
        limits = {
            "generation": (0, _LARGEST_INT),
            "number": (0, _LARGEST_INT),
            "num_devices": (1, 2**20),
            "largest": (1, 2**20),
            "base_batch_size": (1, math.inf),
            "max_global_batch_size": (self.base_batch_size, 2**40),
            "min_global_batch_size": (1, self.max_global_batch_size),
            "max_micro_batches": (1, MOST_COUNTS // max(len(self.layouts), 1)),
            "global_batch_size": (1, _LARGEST_INT),
            **dict.fromkeys(
                ("progress", "most_gain", "noise_confidence", "total", "throughput", "goodput"),
                (0, LARGEST),
            ),
        }
        for name, (low, high) in limits.items():
            require_within("a hint", {name: getattr(self, name)}, low, high)
        for name in ("grad_sqr", "grad_var", "restarts_s"):
            values = getattr(self, name)
            if not all(0 <= value <= LARGEST for value in values):
                raise ValueError(
                    f"a hint has {name}={values}. All must be numbers from 0 to {LARGEST:g}; leave out what "
                    "is unknown."
                )
        if len(self.layouts) > 64 or len(self.grad_sqr) > 4096 or len(self.restarts_s) > 256:
            raise ValueError(
                f"a hint has {len(self.layouts)} layouts, {len(self.grad_sqr)} groups and "
                f"{len(self.restarts_s)} restarts. At most 64, 4096 and 256 are read."
            )
        if len(self.grad_sqr) != len(self.grad_var):
            raise ValueError(
                f"a hint has {len(self.grad_sqr)} grad_sqr and {len(self.grad_var)} grad_var. Both need one "
                "number for each group of parameters."
            )

    @property
    def remaining(self) -> float | None:
        """Useful samples until the end of training; None if `total` is unknown."""
        left = None if self.total is None else max(self.total - self.progress, 0.0)
        return None if left is None else left * self.base_batch_size


def require_within(
    what: str,
    numbers: Mapping[str, int | float | None],
    low: int | float = 0,
    high: int | float = math.inf,
) -> None:
    """Raise ValueError, naming the field, if a number is not finite or not from `low` to `high`; skip
    None."""
    for name, value in numbers.items():
        if value is not None and not (low <= value <= high and value < math.inf):
            span = f"from {low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            raise ValueError(f"{what} has {name}={value}. It must be a finite number, {span}.")


def _require_weight(what: str, weight: float) -> None:
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"{what} has weight={weight}. A weight is a finite number above 0 (1 = normal)."
        )


def _require_different(plural: str, noun: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"{plural} {twice} occur more than once. A {noun} is known by its name, so names must differ."
        )
