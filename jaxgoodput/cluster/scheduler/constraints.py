"""What must hold whatever a policy says: who stays, who cannot run, which devices are spoken for.

Policies then see a smaller problem: without the jobs that stay and without the devices that these hold, so
that no policy needs to know about minimum run times, reservations or draining nodes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.costs import cost, within_budget
from jaxgoodput.cluster.scheduler.limits import Use, together
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import (
    capacity,
    domain_of,
    no_shape_reason,
    shape_in_words,
    size_limits,
)
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape

Devices = dict[str, set[int]]  # node name -> local indices


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """What a policy may not change, and the jobs with what may be believed of them."""

    views: Mapping[str, JobView]
    """By job id, with what is left of each allocation, and usable tables only."""
    held: Mapping[str, str]
    """Job id -> why it stays where it is."""
    refused: Mapping[str, str]
    """Job id -> why it cannot run."""
    remarks: Mapping[str, str]
    """Job id -> what else its user should know."""
    reserved: Mapping[str | None, Devices]
    """Tenant (None: nobody) -> devices that are only his now."""


def constraints_of(jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float) -> Constraints:
    """What holds at present for these jobs on this cluster.

    Raises ValueError where two jobs have one id, or hold one device without sharing it.
    """
    nodes = {node.name: node for node in cluster.nodes}
    views: dict[str, JobView] = {}
    remarks: dict[str, list[str]] = {}
    spent: dict[str, str] = {}
    empty = _EmptyCluster(cluster)
    for view in jobs:
        if view.spec.id in views:
            raise ValueError(
                f"two jobs have the id {view.spec.id!r}; a job is known by its id, so ids must differ"
            )
        lost = _lost(view.allocation, nodes)
        if lost is not None:
            remarks.setdefault(view.spec.id, []).append(f"it lost its devices: {lost}")
            generation = view.allocation.generation
            view = dataclasses.replace(
                view, allocation=Allocation(generation=generation), since_s=None
            )
        cleaned, wrong = _usable_entries(view)
        if wrong is not None:
            remarks.setdefault(view.spec.id, []).append(wrong)
        purse = within_budget(
            cleaned, cluster.price_per_hour, functools.partial(empty.could_run, cleaned.spec)
        )
        if late := _deadline(purse.view, now_s):
            remarks.setdefault(view.spec.id, []).append(late)
        if purse.remark:
            remarks.setdefault(view.spec.id, []).append(purse.remark)
        if purse.spent:
            spent[view.spec.id] = purse.spent
        views[view.spec.id] = purse.view
    _check_disjoint(views.values())
    held = _held({id_: v for id_, v in views.items() if id_ not in spent}, nodes, now_s)
    refused = spent | {
        id_: reason
        for id_, view in views.items()
        if id_ not in held and id_ not in spent and (reason := empty.refusal(view)) is not None
    }
    return Constraints(
        views=views,
        held=held,
        refused=refused,
        remarks={id_: "; ".join(said) for id_, said in remarks.items()},
        reserved=_reserved(views, held, cluster, now_s),
    )


def withhold(cluster: ClusterSpec, taken: Mapping[str, Iterable[int]], used: Use) -> ClusterSpec:
    """The cluster without these devices, without reservations, and with what is left of the quotas.

    used: what counts as the tenants' already.
    """
    nodes = tuple(
        dataclasses.replace(n, withheld=tuple(sorted({*n.withheld, *taken[n.name]})))
        if taken.get(n.name)
        else n
        for n in cluster.nodes
    )
    quota = {t: max(limit - sum(used.get(t, {}).values()), 0) for t, limit in cluster.quota.items()}
    in_use = together((cluster.in_use, used)) if cluster.tenants else cluster.in_use
    return dataclasses.replace(cluster, nodes=nodes, reservations=(), quota=quota, in_use=in_use)


def add_devices(into: Devices, more: Mapping[str, Iterable[int]]):
    """Adds devices to a set of devices, in place."""
    for name, local in more.items():
        into.setdefault(name, set()).update(local)


def _lost(allocation: Allocation, nodes: Mapping[str, Node]) -> str | None:
    """Why an allocation cannot go on."""
    for name, local in allocation.devices.items():
        node = nodes.get(name)
        if node is None:
            return f"node {name} is gone"
        if node.state == "down":
            return f"node {name} is down"
        if max(local) >= node.num_devices or (node.withheld and set(local) & set(node.withheld)):
            return f"devices of node {name} are withdrawn"
    return None


def _usable_entries(view: JobView) -> tuple[JobView, str | None]:
    """The view with the numbers only that can be, and what was wrong with the others."""
    said = []
    left = view.remaining
    if left is not None and not (left >= 0 and math.isfinite(left)):
        view = dataclasses.replace(view, remaining=None)
        said.append(
            f"the work that it says is left, {left}, is no number of at least 0 and is not used"
        )
    values = np.fromiter(view.goodput.values(), dtype=float, count=len(view.goodput))
    good = np.isfinite(values) & (values > 0)
    if good.all():
        return view, "; ".join(said) or None
    table = {s: v for (s, v), ok in zip(view.goodput.items(), good, strict=True) if ok}
    shape, value = next((s, v) for s, v in view.goodput.items() if s not in table)
    said.append(
        f"{int((~good).sum())} of {len(good)} entries of its goodput table are not positive numbers and are "
        f"not used, the first being {value} on {shape_in_words(shape)}"
    )
    return dataclasses.replace(view, goodput=table), "; ".join(said)


def _deadline(view: JobView, now_s: float) -> str | None:
    deadline = view.spec.deadline_s
    if deadline is None:
        return None
    if now_s > deadline:
        return f"its deadline passed {now_s - deadline:.0f} s ago"
    if view.remaining is not None and view.goodput and view.is_measured:
        least_s = view.remaining / max(view.goodput.values())
        if now_s + least_s > deadline:
            return (
                f"its deadline cannot be met: it needs {least_s:.0f} s on its best shape, "
                f"{deadline - now_s:.0f} s are left"
            )
    return None


def _check_disjoint(views: Iterable[JobView]):
    owner: dict[tuple[str, int], JobView] = {}
    for view in views:
        group = view.allocation.share_group
        for name, local in view.allocation.devices.items():
            for i in local:
                other = owner.setdefault((name, i), view)
                if other is not view and (group is None or other.allocation.share_group != group):
                    raise ValueError(
                        f"jobs {other.spec.id!r} and {view.spec.id!r} both hold device {i} of node {name!r} "
                        "without being of one share group; their allocations cannot both be true"
                    )


def _held(views: Mapping[str, JobView], nodes: Mapping[str, Node], now_s: float) -> dict[str, str]:
    held: dict[str, str] = {}
    for id_, view in views.items():
        if not view.allocation.devices:
            continue
        draining = [n for n in view.allocation.devices if nodes[n].state == "draining"]
        if not view.spec.preemptible:
            held[id_] = "it may not be preempted"
        elif view.since_s is not None and now_s < view.since_s + view.spec.min_run_s:
            left = view.since_s + view.spec.min_run_s - now_s
            held[id_] = f"its minimum run time has {left:.0f} s left"
        elif draining:
            held[id_] = f"node {draining[0]} is draining and keeps what runs on it"
    by_group = {views[id_].allocation.share_group: id_ for id_ in held}
    for id_, view in views.items():
        group = view.allocation.share_group
        if group is not None and view.allocation.devices and group in by_group and id_ not in held:
            held[id_] = f"it shares its devices with {by_group[group]}, which stays"
    return held


class _EmptyCluster:
    """What the cluster has room for while nothing runs there, for quick refusals."""

    def __init__(self, cluster: ClusterSpec):
        self._nodes = [node for node in cluster.nodes if node.state == "up"]
        self._devices = capacity(cluster)
        self._most_on_a_node: dict[str, int] = {}
        for node in self._nodes:
            most = max(self._most_on_a_node.get(node.kind, 0), node.num_usable)
            self._most_on_a_node[node.kind] = most

    def refusal(self, view: JobView) -> str | None:
        """Why the job could not run even if it were alone; None = it could."""
        for shape in view.goodput:
            if self.could_run(view.spec, shape):
                return None
        return no_shape_reason(view, self._devices, self._has_room)

    def could_run(self, spec: JobSpec, shape: Shape) -> bool:
        """Whether the job could have that shape if it were alone."""
        least, most = size_limits(spec)
        return (
            least <= shape.num_devices <= most
            and (spec.kinds is None or shape.kind in spec.kinds)
            and self._has_room(shape)
            and (spec.level is None or shape.num_nodes == 1 or self._one_domain(shape, spec.level))
        )

    def _has_room(self, shape: Shape) -> bool:
        on_one = -(-shape.num_devices // shape.num_nodes)
        return shape.num_devices <= self._devices.get(
            shape.kind, 0
        ) and on_one <= self._most_on_a_node.get(shape.kind, 0)

    def _one_domain(self, shape: Shape, level: str) -> bool:
        room: dict[str, int] = {}
        for node in self._nodes:
            if node.kind == shape.kind:
                domain = domain_of(node, level)
                room[domain] = room.get(domain, 0) + node.num_usable
        return max(room.values(), default=0) >= shape.num_devices


def _reserved(
    views: Mapping[str, JobView], held: Mapping[str, str], cluster: ClusterSpec, now_s: float
) -> dict[str | None, Devices]:
    """Which devices the reservations in force mean.

    First those that the tenant uses, then free ones, then others'; never one of a job that stays.
    """
    tenant_of: dict[tuple[str, int], str] = {}
    stays: set[tuple[str, int]] = set()
    active = [r for r in cluster.reservations if r.start_s <= now_s < r.end_s]
    if not active:
        return {}
    for id_, view in views.items():
        for name, local in view.allocation.devices.items():
            tenant_of |= {(name, i): view.spec.tenant for i in local}
            if id_ in held:
                stays |= {(name, i) for i in local}
    nodes = {node.name: node for node in cluster.nodes}
    reserved: dict[str | None, Devices] = {}
    spoken_for: set[tuple[str, int]] = set()
    for reservation in active:
        node = nodes[reservation.node]
        candidates = [
            (node.name, i)
            for i in range(node.num_devices)
            if i not in node.withheld and (node.name, i) not in spoken_for
        ]

        def rank(device: tuple[str, int], tenant: str | None = reservation.tenant) -> int:
            user = tenant_of.get(device)
            return 0 if user is not None and user == tenant else 1 if user is None else 2

        chosen = sorted(candidates, key=lambda d: (rank(d), d))[: reservation.num_devices]
        spoken_for |= set(chosen)
        # A device of a job that stays is the reservation's as soon as that job ends.
        usable = {i for name, i in chosen if (name, i) not in stays}
        add_devices(reserved.setdefault(reservation.tenant, {}), {node.name: usable})
    return reserved


def next_change_s(
    jobs: Sequence[JobView], cluster: ClusterSpec, held: Mapping[str, str], now_s: float
) -> float:
    """When constraints next change by themselves.

    A minimum run time ends, a reservation starts or ends, a running job's budget is spent.
    """
    kind_of = {node.name: node.kind for node in cluster.nodes}
    times = [t for r in cluster.reservations for t in (r.start_s, r.end_s)]
    times += [
        v.since_s + v.spec.min_run_s for v in jobs if v.spec.id in held and v.since_s is not None
    ]
    for view in jobs:
        if view.spec.budget is not None and view.allocation.devices:
            per_s: dict[str, float] = {}
            for name, local in view.allocation.devices.items():
                if name in kind_of:
                    kind = kind_of[name]
                    per_s[kind] = per_s.get(kind, 0.0) + len(local)
            rate = cost(per_s, cluster.price_per_hour)
            if rate > 0.0:
                left = view.spec.budget - cost(view.received_s, cluster.price_per_hour)
                times.append(now_s + left / rate)
    return min((t for t in times if t > now_s), default=math.inf)
