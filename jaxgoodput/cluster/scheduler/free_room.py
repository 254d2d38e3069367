"""Which devices a plan leaves free, node by node, and whether a job would fit onto them as they are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxgoodput.cluster.scheduler.constraints import constraints_of
from jaxgoodput.cluster.scheduler.placement.amounts import (
    NOTHING,
    PLENTY,
    Amounts,
    amounts_of,
    in_words,
    needed_in_words,
    needs_of,
    some_limited,
    used_by_node,
)
from jaxgoodput.cluster.scheduler.policy import JobView, Plan
from jaxgoodput.cluster.scheduler.shapes import (
    Domains,
    chunks,
    domain_of,
    holds,
    node_size,
    shape_in_words,
    takes,
)
from jaxgoodput.specs import Allocation, ClusterSpec, Node, Shape
from jaxgoodput.text import count

MOST_NODES = 4  # that a message names
NEAREST = 32  # nodes near which jobs may be in the way: the ones with the most free devices


@dataclass(frozen=True, kw_only=True)
class FreeRoom:
    """The free devices of each node that is up, beside the jobs of a plan and other tenants' reservations."""

    cluster: ClusterSpec
    free: Mapping[str, int]
    """Number of free devices, by name of the node."""
    left: Mapping[str, Amounts] = field(default_factory=dict)
    """CPUs and memory that jobs leave, by name of the node; nodes that never lack any may be missing."""

    @classmethod
    def beside(
        cls,
        plan: Plan,
        view: JobView,
        jobs: Sequence[JobView],
        cluster: ClusterSpec,
        now_s: float,
    ) -> "FreeRoom":
        """Return what a plan for the jobs leaves free for one of them."""
        used = _devices_by_node(plan.allocations.values())
        reserved: dict[str, int] = {}
        for one in cluster.reservations:
            if one.start_s <= now_s < one.end_s and one.tenant != view.spec.tenant:
                reserved[one.node] = reserved.get(one.node, 0) + one.num_devices
        free = {
            node.name: max(node.num_usable - used.get(node.name, 0) - reserved.get(node.name, 0), 0)
            for node in cluster.nodes
            if node.state == "up" and node.name not in view.avoids
        }
        left: dict[str, Amounts] = {}
        if some_limited(cluster):
            specs = {one.spec.id: one.spec for one in jobs}
            amounts = used_by_node(specs, plan.allocations)
            left = {
                node.name: amounts_of(node).minus(amounts.get(node.name, NOTHING))
                for node in cluster.nodes
            }
        return cls(cluster=cluster, free=free, left=left)

    def room(self, name: str, needs: Amounts) -> int:
        """Return the number of a node's free devices that a job with these needs could use."""
        return self.left.get(name, PLENTY).devices(needs, self.free[name])

    def of_kind(self, kind: str) -> int:
        """Return the number of free devices of a kind."""
        return sum(self.free.get(node.name, 0) for node in self.cluster.nodes if node.kind == kind)

    def fits(self, view: JobView, shape: Shape) -> bool:
        """Return whether a job's shape fits onto the free devices, if no other job moves."""
        level = view.spec.level if shape.num_nodes > 1 else None
        needs = needs_of(view.spec)
        domains: dict[str, list[int]] = {}
        for node in self._nodes(shape.kind):
            domain = "" if level is None else domain_of(node, level)
            domains.setdefault(domain, []).append(self.room(node.name, needs))
        if not domains:
            return False  # no node of this kind
        sizes = chunks(shape, node_size(self.cluster)[shape.kind])
        return any(holds(sorted(free, reverse=True), sizes) for free in domains.values())

    def lacking(self, view: JobView, shape: Shape) -> str:
        """Say what a job needs for each device, and what is left of it beside free devices."""
        needs = needs_of(view.spec)
        there = [node for node in self._nodes(shape.kind) if self.free[node.name]]
        there.sort(key=lambda n: (-self.room(n.name, needs), -self.free[n.name], n.name))
        named = [
            f"node {node.name} has {in_words(left, needs)} left beside "
            f"{count(self.free[node.name], 'free device')}"
            for node in there[:MOST_NODES]
            if in_words(left := self.left.get(node.name, PLENTY), needs)
        ]
        if len(there) > MOST_NODES:
            named.append(f"{len(there) - MOST_NODES} other nodes have no more")
        return f"it needs {needed_in_words(needs)}; {', '.join(named)}"

    def in_words(self, view: JobView, shape: Shape) -> str:
        """Say what is free on which nodes, and what the job needs."""
        there = [node for node in self._nodes(shape.kind) if self.free[node.name]]
        there.sort(key=lambda node: (-self.free[node.name], node.name))
        named = [f"{self.free[node.name]} on {node.name}" for node in there[:MOST_NODES]]
        if len(there) > MOST_NODES:
            named.append(f"fewer on {len(there) - MOST_NODES} other nodes")
        within = f" within one {view.spec.level}" if view.spec.level and shape.num_nodes > 1 else ""
        return (
            f"{self.of_kind(shape.kind)} devices of kind {shape.kind} are free, but not together "
            f"({', '.join(named)}); it needs {shape_in_words(shape)}{within}"
        )

    def _nodes(self, kind: str) -> list[Node]:
        return [n for n in self.cluster.nodes if n.kind == kind and n.name in self.free]


def least_shapes(view: JobView, cluster: ClusterSpec, now_s: float) -> list[Shape]:
    """Return the smallest shape of each kind on which a job can run, the smallest of all first."""
    checked = constraints_of([view], cluster, now_s).views[view.spec.id]
    least: dict[str, Shape] = {}
    domains, needs = Domains(cluster), needs_of(view.spec)
    for shape in sorted(checked.goodput, key=lambda s: (s.num_devices, s)):
        if takes(view.spec, shape) and (not needs or domains.fits(shape, None, needs)):
            least.setdefault(shape.kind, shape)
    return sorted(least.values(), key=lambda shape: (shape.num_devices, shape))


def in_the_way(
    room: FreeRoom, view: JobView, shape: Shape, plan: Plan, jobs: Sequence[JobView], most: int
) -> list[tuple[str, ...]]:
    """Return sets of jobs after whose end the shape would fit onto free devices, at most `most` of them.

    Considered are single jobs, all jobs of one node, and all of one topology domain; the ones with the fewest
    devices come first.
    """
    level = view.spec.level if shape.num_nodes > 1 else None
    nodes = [n for n in room.cluster.nodes if n.kind == shape.kind and n.name in room.free]
    nodes.sort(key=lambda node: -room.free[node.name])
    near = {node.name for node in nodes[:NEAREST]}
    groups: dict[str, set[str]] = {}
    held: dict[str, Allocation] = {}
    domain = {n.name: n.name if level is None else domain_of(n, level) for n in nodes}
    near_domains = {domain[name] for name in near}
    for other in jobs:
        id_, given = other.spec.id, plan.allocations[other.spec.id]
        there = [name for name in given.devices if domain.get(name) in near_domains]
        if there and id_ != view.spec.id:
            held[id_] = given
            for name in there:
                groups.setdefault(f"node {name}", set()).add(id_)
                groups.setdefault(f"domain {domain[name]}", set()).add(id_)
    specs = {other.spec.id: other.spec for other in jobs}
    sets = {(id_,) for id_ in held} | {tuple(sorted(ids)) for ids in groups.values()}
    found = []
    for ids in sorted(sets, key=lambda ids: (_count(held, ids), len(ids), ids)):
        more = _devices_by_node(held[id_] for id_ in ids)
        free = {name: has + more.get(name, 0) for name, has in room.free.items()}
        amounts = used_by_node(specs, {id_: held[id_] for id_ in ids}) if room.left else {}
        left = {name: has.plus(amounts.get(name, NOTHING)) for name, has in room.left.items()}
        if FreeRoom(cluster=room.cluster, free=free, left=left).fits(view, shape):
            found.append(ids)
            if len(found) == most:
                break
    return found


def _count(held: Mapping[str, Allocation], ids: Iterable[str]) -> int:
    return sum(held[id_].num_devices for id_ in ids)


def _devices_by_node(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Return the number of devices in use on each node; jobs of one share group count once."""
    used: dict[str, set[int]] = {}
    for given in allocations:
        for name, local in given.devices.items():
            used.setdefault(name, set()).update(local)
    return {name: len(local) for name, local in used.items()}
