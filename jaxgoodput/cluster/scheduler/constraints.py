"""What a policy may not change: which jobs keep their devices, which cannot run, which devices are reserved.

Policies are then given a smaller problem, without these jobs and without the devices they hold, so no policy
needs to know about minimum run times, reservations or draining nodes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.costs import cost, within_budget
from jaxgoodput.cluster.scheduler.limits import Use, devices_by_kind, together
from jaxgoodput.cluster.scheduler.placement.amounts import (
    NOTHING,
    Amounts,
    needed_in_words,
    needs_of,
    some_limited,
    without,
)
from jaxgoodput.cluster.scheduler.policy import JobView, Policy, knows_amounts
from jaxgoodput.cluster.scheduler.priors import Priors
from jaxgoodput.cluster.scheduler.shapes import (
    Domains,
    capacity,
    needs_reason,
    no_shape_reason,
    shape_in_words,
    takes,
)
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Reservation, Shape

Devices = dict[str, set[int]]
"""Local device indices by node name."""
Device = tuple[str, int]
"""Node name and local index."""


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The jobs after input checks, and what a policy may not change about them."""

    views: Mapping[str, JobView]
    """Checked jobs by id: lost allocations removed, unusable table entries left out."""
    held: Mapping[str, str]
    """Jobs that keep their devices, each with the reason."""
    refused: Mapping[str, str]
    """Jobs that cannot run, each with the reason."""
    for_nodes: frozenset[str]
    """Refused jobs that could run alone if nodes that are down or draining were back."""
    remarks: Mapping[str, str]
    """Warnings for users, by job id."""
    reserved: Mapping[str | None, Devices]
    """Devices reserved at present, by tenant; None = reserved for no tenant."""

    @property
    def open(self) -> list[str]:
        """Ids of the jobs that the policy decides about: not bound to their devices, and not refused."""
        return [id_ for id_ in self.views if id_ not in self.held and id_ not in self.refused]


def constraints_of(
    jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, policy: Policy | None = None
) -> Constraints:
    """Check the jobs and find what a policy may not change at `now_s`.

    With `policy`, jobs whose needs it does not know are refused, so that it can decide about the others.
    Raises ValueError if two jobs have one id, or hold one device without sharing it.
    """
    nodes = {node.name: node for node in cluster.nodes}
    empty = _EmptyCluster(cluster)
    views: dict[str, JobView] = {}
    remarks: dict[str, str] = {}
    spent: dict[str, str] = {}
    for view in jobs:
        id_ = view.spec.id
        if id_ in views:
            raise ValueError(f"two jobs have the id {id_!r}; give every job an id of its own")
        checked = _checked(view, cluster, nodes, empty, now_s)
        views[id_] = checked.view
        if checked.remarks:
            remarks[id_] = "; ".join(checked.remarks)
        if checked.spent:
            spent[id_] = checked.spent
    _check_disjoint(views.values())
    solvent = {id_: view for id_, view in views.items() if id_ not in spent}
    held = _held(solvent, nodes, now_s)
    movable = [view for id_, view in solvent.items() if id_ not in held]
    unknown, refused = _unknown_needs(movable, cluster, policy), empty.refusals(movable)
    return Constraints(
        views=views,
        held=held,
        refused=spent | unknown | refused,
        for_nodes=frozenset(
            id_ for id_ in refused if id_ not in unknown and empty.could_run_later(views[id_])
        ),
        remarks=remarks,
        reserved=_reserved(views, held, cluster, now_s),
    )


def _unknown_needs(
    views: Iterable[JobView], cluster: ClusterSpec, policy: Policy | None
) -> dict[str, str]:
    """Return, by id, why jobs that need CPUs or memory cannot run under a policy that knows neither."""
    if policy is None or knows_amounts(policy) or not some_limited(cluster):
        return {}
    return {
        view.spec.id: f"it needs {needed_in_words(needs)}, which nodes may lack, but "
        f"{type(policy).__name__} knows devices only. Submit it without cpus_per_device and "
        "memory_gib_per_device, or choose another policy"
        for view in views
        if (needs := needs_of(view.spec))
    }


def withhold(
    cluster: ClusterSpec,
    taken: Mapping[str, Iterable[int]],
    used: Use,
    amounts: Mapping[str, Amounts] = MappingProxyType({}),
) -> ClusterSpec:
    """Return the cluster without the `taken` devices and reservations, and with reduced quotas.

    `used` is what already counts against the tenants' quotas and limits; `amounts` are the CPUs and the
    memory, by node, that jobs use already.
    """
    nodes = tuple(
        dataclasses.replace(n, withheld=tuple(sorted({*n.withheld, *taken[n.name]})))
        if taken.get(n.name)
        else n
        for n in cluster.nodes
    )
    if amounts:
        nodes = tuple(without(node, amounts.get(node.name, NOTHING)) for node in nodes)
    quota = {t: max(limit - sum(used.get(t, {}).values()), 0) for t, limit in cluster.quota.items()}
    in_use = together((cluster.in_use, used)) if cluster.tenants else cluster.in_use
    return dataclasses.replace(cluster, nodes=nodes, reservations=(), quota=quota, in_use=in_use)


def add_devices(into: Devices, more: Mapping[str, Iterable[int]]):
    """Add the devices in `more` to the ones in `into` (local indices by node), in place."""
    for name, local in more.items():
        into.setdefault(name, set()).update(local)


def offered_devices(cluster: ClusterSpec, *, draining: bool = False) -> Devices:
    """Return the local device indices that may be allocated, by node name.

    With `draining`, include the devices of draining nodes, which their present jobs may keep.
    """
    states = ("up", "draining") if draining else ("up",)
    return {
        node.name: set(range(node.num_devices)) - set(node.withheld)
        for node in cluster.nodes
        if node.state in states
    }


def within(allocation: Allocation, devices: Mapping[str, set[int]]) -> bool:
    """Return whether all devices of an allocation are among `devices`; True if it has no devices."""
    return all(set(local) <= devices.get(name, set()) for name, local in allocation.devices.items())


def on_offer(allocation: Allocation, nodes: Mapping[str, Node], *, draining: bool = False) -> bool:
    """Return whether all devices of an allocation are among the `offered_devices`; for a few allocations.

    `nodes`: the cluster's, by name.
    """
    states = ("up", "draining") if draining else ("up",)
    for name, local in allocation.devices.items():
        node = nodes.get(name)
        if node is None or node.state not in states or max(local) >= node.num_devices:
            return False
        if not set(local).isdisjoint(node.withheld):
            return False
    return True


class _CheckedJob(NamedTuple):
    view: JobView
    remarks: list[str]
    spent: str | None  # says that the budget is spent


def _checked(
    view: JobView,
    cluster: ClusterSpec,
    nodes: Mapping[str, Node],
    empty: "_EmptyCluster",
    now_s: float,
) -> _CheckedJob:
    lost = _lost(view.allocation, nodes)
    if lost is not None:
        allocation = Allocation(generation=view.allocation.generation)
        view = dataclasses.replace(view, allocation=allocation, since_s=None)
    view, wrong = _usable_entries(empty.with_table(view))
    could_run = functools.partial(empty.could_run, view.spec)
    purse = within_budget(view, cluster.price_per_hour, could_run)
    said = (
        lost and f"it lost its devices: {lost}",
        wrong,
        _deadline(purse.view, now_s),
        purse.remark,
    )
    return _CheckedJob(purse.view, [remark for remark in said if remark], purse.spent)


def _lost(allocation: Allocation, nodes: Mapping[str, Node]) -> str | None:
    """Explain why an allocation is no longer valid, for example as a node is gone; None if it is valid."""
    for name, local in allocation.devices.items():
        node = nodes.get(name)
        if node is None:
            return f"node {name} has left the cluster"
        if node.state == "down":
            return f"node {name} is down"
        if max(local) >= node.num_devices or not set(local).isdisjoint(node.withheld):
            return f"some of them are no longer offered by node {name}"
    return None


def _usable_entries(view: JobView) -> tuple[JobView, str | None]:
    """Return the job without numbers that cannot be right, and a message about them; None without any."""
    said = []
    left = view.remaining
    if left is not None and not (left >= 0 and math.isfinite(left)):
        view = dataclasses.replace(view, remaining=None)
        said.append(
            f"its declared remaining work, {left}, is no number of at least 0 and is not used"
        )
    values = np.fromiter(view.goodput.values(), dtype=float, count=len(view.goodput))
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        table = {s: v for (s, v), ok in zip(view.goodput.items(), good, strict=True) if ok}
        shape, value = next((s, v) for s, v in view.goodput.items() if s not in table)
        view = dataclasses.replace(view, goodput=table)
        said.append(
            f"{int((~good).sum())} of {len(good)} entries of its goodput table are not positive numbers and "
            f"are not used, the first being {value} on {shape_in_words(shape)}"
        )
    return view, "; ".join(said) or None


def _deadline(view: JobView, now_s: float) -> str | None:
    """Warn that a deadline has passed, or cannot be met on any shape; None if neither is known."""
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
    owner: dict[Device, JobView] = {}
    for view in views:
        group = view.allocation.share_group
        for name, i in _devices_of(view.allocation):
            other = owner.setdefault((name, i), view)
            if other is not view and (group is None or other.allocation.share_group != group):
                raise ValueError(
                    f"jobs {other.spec.id!r} and {view.spec.id!r} both hold device {i} of node {name!r} but "
                    "are not in one share group; correct the allocation of one of them"
                )


def _devices_of(allocation: Allocation) -> list[Device]:
    return [(name, i) for name, local in allocation.devices.items() for i in local]


def _held(views: Mapping[str, JobView], nodes: Mapping[str, Node], now_s: float) -> dict[str, str]:
    """Return, by id, the reason for each running job that must keep its present devices."""
    running = {id_: view for id_, view in views.items() if view.allocation.devices}
    held = {
        id_: why
        for id_, view in running.items()
        if (why := _why_held(view, nodes, now_s)) is not None
    }
    by_group = {views[id_].allocation.share_group: id_ for id_ in held}
    for id_, view in running.items():
        group = view.allocation.share_group
        if group is not None and group in by_group and id_ not in held:
            held[id_] = f"it shares its devices with {by_group[group]}, which stays"
    return held


def _why_held(view: JobView, nodes: Mapping[str, Node], now_s: float) -> str | None:
    if not view.spec.preemptible:
        return "it may not be preempted"
    if view.since_s is not None and now_s < view.since_s + view.spec.min_run_s:
        left = view.since_s + view.spec.min_run_s - now_s
        return f"its minimum run time has {left:.0f} s left"
    draining = [name for name in view.allocation.devices if nodes[name].state == "draining"]
    return f"node {draining[0]} is draining and keeps what runs on it" if draining else None


class _EmptyCluster:
    """Tells which jobs could run if they were alone in the cluster, to refuse impossible jobs quickly."""

    def __init__(self, cluster: ClusterSpec):
        self._priors = Priors(cluster)
        self._without_table: set[str] = set()
        self._devices = capacity(cluster)
        self._domains = Domains(cluster)
        self._cluster, self._is_limited = cluster, some_limited(cluster)
        self._known: dict[tuple[Shape, str | None, Amounts], bool] = {}
        self._all_up: _EmptyCluster | None = None  # made if a job cannot run

    def with_table(self, view: JobView) -> JobView:
        """Return the job with the goodput table that is assumed of it if it has none."""
        found = self._priors.with_table(view)
        if found is not view:
            self._without_table.add(view.spec.id)
        return found

    def refusals(self, views: Iterable[JobView]) -> dict[str, str]:
        """Return, by id, why jobs could not run even alone in the cluster; those that could are left out."""
        return {
            view.spec.id: needs_reason(view, self._cluster)
            or no_shape_reason(
                view,
                self._devices,
                self._has_room,
                has_table=view.spec.id not in self._without_table,
            )
            for view in views
            if not any(self.could_run(view.spec, shape) for shape in view.goodput)
        }

    def could_run_later(self, view: JobView) -> bool:
        """Return whether a job could run alone if all nodes were up."""
        nodes = self._cluster.nodes
        if all(node.state == "up" for node in nodes):
            return False
        if self._all_up is None:
            up = tuple(dataclasses.replace(node, state="up") for node in nodes)
            self._all_up = _EmptyCluster(dataclasses.replace(self._cluster, nodes=up))
        later = view
        if view.spec.id in self._without_table:
            later = self._all_up.with_table(dataclasses.replace(view, goodput={}))
        return any(self._all_up.could_run(later.spec, shape) for shape in later.goodput)

    def could_run(self, spec: JobSpec, shape: Shape) -> bool:
        """Return whether the job could run with that shape if no other job used the cluster."""
        needs = needs_of(spec) if self._is_limited else NOTHING
        return takes(spec, shape) and self._fits(shape, spec.level, needs)

    def _has_room(self, shape: Shape) -> bool:
        return self._fits(shape, None, NOTHING)

    def _fits(self, shape: Shape, level: str | None, needs: Amounts) -> bool:
        key = shape, level, needs
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._domains.fits(shape, level, needs)
        return known


def _reserved(
    views: Mapping[str, JobView], held: Mapping[str, str], cluster: ClusterSpec, now_s: float
) -> dict[str | None, Devices]:
    """Choose the devices of each reservation that holds now, by tenant, but none that a job must keep."""
    active = [r for r in cluster.reservations if r.start_s <= now_s < r.end_s]
    user_of = {d: v.spec for v in views.values() for d in _devices_of(v.allocation)}
    stays = {device for id_ in held for device in _devices_of(views[id_].allocation)}
    nodes = {node.name: node for node in cluster.nodes}
    reserved: dict[str | None, Devices] = {}
    spoken_for: set[Device] = set()
    for reservation in active:
        node = nodes[reservation.node]
        chosen = _devices_to_reserve(reservation, node, user_of, spoken_for)
        spoken_for.update(chosen)
        # The reservation gets a device of a job that stays as soon as that job ends.
        usable = {index for name, index in chosen if (name, index) not in stays}
        add_devices(reserved.setdefault(reservation.tenant, {}), {node.name: usable})
    return reserved


def _devices_to_reserve(
    reservation: Reservation,
    node: Node,
    user_of: Mapping[Device, JobSpec],
    spoken_for: set[Device],
) -> list[Device]:
    """Choose devices that the tenant uses already, then free ones, then devices of other tenants."""

    def rank(device: Device) -> tuple[int, Device]:
        user = user_of.get(device)
        return (1 if user is None else 0 if user.tenant == reservation.tenant else 2), device

    offered = ((node.name, i) for i in range(node.num_devices) if i not in node.withheld)
    candidates = [device for device in offered if device not in spoken_for]
    return sorted(candidates, key=rank)[: reservation.num_devices]


def next_change_s(
    jobs: Sequence[JobView], cluster: ClusterSpec, held: Mapping[str, str], now_s: float
) -> float:
    """Return when the constraints next change without an event; infinity if they never do.

    Such a change is the end of a held job's minimum run time, the start or end of a reservation, the end of
    the time for which a job avoids a node, or the moment at which a running job's budget is spent.
    """
    kind_of = {node.name: node.kind for node in cluster.nodes}
    times = [t for r in cluster.reservations for t in (r.start_s, r.end_s)]
    times += [
        v.since_s + v.spec.min_run_s for v in jobs if v.spec.id in held and v.since_s is not None
    ]
    times += [node.until_s for view in jobs for node in view.avoids.values()]
    times += [_budget_end_s(view, cluster.price_per_hour, kind_of, now_s) for view in jobs]
    return min((t for t in times if t > now_s), default=math.inf)


def _budget_end_s(
    view: JobView, price_per_hour: Mapping[str, float], kind_of: Mapping[str, str], now_s: float
) -> float:
    if view.spec.budget is None or not view.allocation.devices:
        return math.inf
    rate = cost(devices_by_kind(view.allocation, kind_of), price_per_hour)
    left = view.spec.budget - cost(view.received_s, price_per_hour)
    return now_s + left / rate if rate > 0.0 else math.inf
