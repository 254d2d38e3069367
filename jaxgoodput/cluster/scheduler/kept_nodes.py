"""Keep nodes for a job that has waited long, so that jobs that may not be stopped do not fill them for ever.

A job that may be stopped makes room whenever another one is due. One that may not, or not yet, does so only
when it ends. A stream of such jobs would take every device that one of them frees, so that a gang would never
find its devices together. Once a job has waited an hour although the devices that may be given away do not
suffice for it, jobs that may not be stopped no longer start on the nodes that it needs. Other jobs still may.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxgoodput.cluster.scheduler.placement.amounts import needs_of, usable
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import (
    Domains,
    chunks,
    domain_of,
    node_size,
    size_limits,
    takes,
)
from jaxgoodput.specs import ClusterSpec, JobSpec, Shape, Tenant

PATIENCE_S = 3600.0  # wait after which nodes are kept


@dataclass(frozen=True, kw_only=True)
class KeptNodes:
    """The nodes that are kept for a job, and how long it has waited."""

    job: str
    nodes: tuple[str, ...]
    waited_s: float

    def in_words(self) -> str:
        """Return for which job the nodes are kept and why."""
        names = ", ".join(self.nodes)
        return f"{names} are kept for {self.job!r}, which has waited {self.waited_s / 3600:.1f} h"


def may_be_stopped(view: JobView) -> bool:
    """Return whether a job, once started, gives way to others at any time."""
    return view.spec.preemptible and view.spec.min_run_s <= 0.0


def kept_nodes(
    waiting: Sequence[JobView], cluster: ClusterSpec, offered: ClusterSpec, now_s: float
) -> KeptNodes | None:
    """Return the nodes to keep for the job that has waited longest in vain; None if there is none.

    `offered` is the cluster without the devices that certain jobs keep.
    """
    since = {view.spec.id: _waits_since_s(view, now_s) for view in waiting}
    late = [
        view
        for view in waiting
        if now_s - since[view.spec.id] > PATIENCE_S and _waits_for_room(view, cluster, now_s)
    ]
    free, every = Domains(offered), Domains(cluster)
    for view in sorted(late, key=lambda view: (since[view.spec.id], view.spec.id)):
        least = _least_without_room(view, free, every)
        if least is not None:
            nodes = _fewest_held(least, view.spec, cluster, offered)
            waited_s = now_s - since[view.spec.id]
            return KeptNodes(job=view.spec.id, nodes=nodes, waited_s=waited_s)
    return None


def _least_without_room(view: JobView, free: Domains, every: Domains) -> Shape | None:
    """Return a job's least shape; None if the free devices hold one of its shapes, or the cluster none."""
    level, needs = view.spec.level, needs_of(view.spec)
    shapes = [s for s in view.goodput if takes(view.spec, s) and every.fits(s, level, needs)]
    if not shapes or any(free.fits(shape, level, needs) for shape in shapes):
        return None
    return min(shapes, key=lambda s: (s.num_devices, s))


def _waits_for_room(view: JobView, cluster: ClusterSpec, now_s: float) -> bool:
    """Return whether only devices keep a job waiting: no limit, budget, avoided node or reservation does.

    Nodes that were kept for a job with another reason to wait would be idle for ever.
    """
    least, _ = size_limits(view.spec)
    above = _with_parents(view.spec.tenant, cluster)
    limits = [cluster.quota.get(view.spec.tenant), *(tenant.limit for tenant in above)]
    is_limited = any(limit is not None and limit < least for limit in limits)
    budgets = (view.spec.budget, *(tenant.budget_per_hour for tenant in above))
    has_budget = any(budget is not None for budget in budgets)
    avoids = any(not one.is_usable for one in view.avoids.values())
    return not (is_limited or has_budget or avoids or _is_reserved(view, cluster, now_s))


def _with_parents(name: str | None, cluster: ClusterSpec) -> list[Tenant]:
    """Return a tenant and the ones above it, as far as the cluster lists them."""
    tenants, found = {tenant.name: tenant for tenant in cluster.tenants}, []
    while name is not None and name in tenants:
        found.append(tenants[name])
        name = tenants[name].parent
    return found


def _is_reserved(view: JobView, cluster: ClusterSpec, now_s: float) -> bool:
    """Return whether any devices are reserved for others now."""
    now = (one for one in cluster.reservations if one.start_s <= now_s < one.end_s)
    return any(one.tenant != view.spec.tenant for one in now)


def _waits_since_s(view: JobView, now_s: float) -> float:
    """Return when a waiting job was paused, or submitted if it never ran; now if that is unknown."""
    if view.paused_s is not None:
        return view.paused_s
    return now_s if any(view.received_s.values()) else view.submitted_s


def _fewest_held(
    shape: Shape, spec: JobSpec, cluster: ClusterSpec, offered: ClusterSpec
) -> tuple[str, ...]:
    """Return nodes of one domain that can hold a shape and on which the fewest devices are held."""
    level, needs = spec.level, needs_of(spec)
    free = {node.name: node.num_usable for node in offered.nodes}
    parts = chunks(shape, node_size(cluster)[shape.kind])
    domains: dict[str, list[tuple[int, int, str]]] = {}
    for node in cluster.nodes:
        if node.kind == shape.kind and node.state == "up":
            one = "" if level is None or shape.num_nodes == 1 else domain_of(node, level)
            held = node.num_usable - free[node.name]
            domains.setdefault(one, []).append((held, usable(node, needs), node.name))
    found = [its for nodes in domains.values() if (its := _nodes_for(parts, nodes)) is not None]
    assert found, "the job could run if it were alone"
    _, names = min(found)
    return tuple(sorted(names))


def _nodes_for(
    parts: Sequence[int], nodes: list[tuple[int, int, str]]
) -> tuple[int, list[str]] | None:
    """Choose a node for each part, the largest first, with the fewest held devices; None if none is left.

    `nodes`: held devices, usable devices and name. Returns the held devices of the chosen ones, and names.
    """
    left, total, names = sorted(nodes), 0, []
    for part in parts:
        best = next((node for node in left if node[1] >= part), None)
        if best is None:
            return None
        left.remove(best)
        total += best[0]
        names.append(best[2])
    return total, names
