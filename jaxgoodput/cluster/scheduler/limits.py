"""Limits on what jobs use together: quotas, limits and budgets of subtrees of tenants, CPUs and memory.

A limit counts devices, their price per hour, or the CPUs or the memory that a job needs for each. All grow
with devices, so policies add each limit as one linear row to their problem. Devices of jobs that the policy
is not asked about are subtracted first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxgoodput.cluster.scheduler.placement.amounts import (
    PER_CPU,
    PER_GIB,
    UNLIMITED,
    Amounts,
    amounts_of,
    needs_of,
    some_limited,
)
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec

Use = Mapping[str, Mapping[str, int]]
"""Number of devices by tenant and kind."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most devices, or money per hour, that the jobs of some tenants may use at a time."""

    tenants: frozenset[str]
    """Tenants that share the limit."""
    left: float
    """Unused part of the limit."""
    said: str
    """Owner and size of the limit, in words."""
    price: Mapping[str, float] | None = None
    """Units per device of each kind; None = 1, the limit counts devices."""

    def per_device(self, kind: str) -> float:
        """Return how much of this limit one device of a kind uses up: 1, or its price."""
        return 1.0 if self.price is None else self.price.get(kind, 0.0)

    def used(self, use: Use) -> float:
        """Return how much of this limit the devices in `use` (counts by tenant and kind) use up."""
        return float(
            sum(
                self.per_device(kind) * count
                for tenant in self.tenants.intersection(use)
                for kind, count in use[tenant].items()
            )
        )


def limits_of(cluster: ClusterSpec) -> tuple[Limit, ...]:
    """Return all limits of a cluster: its quotas sorted by tenant, then each tenant's limit and budget.

    >>> from jaxgoodput.specs import Node, Tenant
    >>> nodes = (Node(name="n", kind="t4", num_devices=8),)
    >>> lab, team = Tenant(name="lab", limit=6), Tenant(name="team", parent="lab")
    >>> limit, = limits_of(ClusterSpec(nodes=nodes, tenants=(lab, team), in_use={"team": {"t4": 2}}))
    >>> sorted(limit.tenants), limit.left
    (['lab', 'team'], 4.0)
    """
    found = [quota_limit(tenant, most) for tenant, most in sorted(cluster.quota.items())]
    below = subtrees(cluster) if cluster.tenants else {}
    for tenant in cluster.tenants:
        for most, said, price in (
            (tenant.limit, "the limit of tenant {!r}, {:g} devices", None),
            (
                tenant.budget_per_hour,
                "the budget of tenant {!r}, {:g} per hour",
                dict(cluster.price_per_hour),
            ),
        ):
            if most is not None:
                limit = Limit(
                    tenants=below[tenant.name],
                    left=float(most),
                    said=said.format(tenant.name, most),
                    price=price,
                )
                found.append(replace(limit, left=max(most - limit.used(cluster.in_use), 0.0)))
    return tuple(found)


def amount_limits(
    cluster: ClusterSpec, specs: Sequence[JobSpec]
) -> list[tuple[Limit, np.ndarray, str]]:
    """Return, by kind, limits on the CPUs and on the memory that jobs use together on nodes that are up.

    Each comes with [jobs] how much of it a device of each job uses, and the kind of device. Kinds of which a
    node has no such limit, and what no job needs, are left out. That all of it together is enough does not
    mean that jobs fit on the nodes; placing them finds out. All numbers are rounded as for placing, so that
    no limit forbids what fits.
    """
    if not some_limited(cluster):
        return []
    needs_by_job = [needs_of(spec) for spec in specs]
    found = []
    for kind, its in sorted(_amounts_by_kind(cluster).items()):
        for column, (per_unit, unit) in enumerate(((PER_CPU, "CPUs"), (PER_GIB, "GiB of memory"))):
            has = [amounts[column] for amounts in its]
            needs = np.array([needs[column] for needs in needs_by_job], np.float64)
            if max(has) < UNLIMITED and needs.any():
                left = sum(has) / per_unit
                said = f"what the nodes of kind {kind} have, {left:g} {unit}"
                limit = Limit(tenants=frozenset(), left=left, said=said)
                found.append((limit, needs / per_unit, kind))
    return found


def _amounts_by_kind(cluster: ClusterSpec) -> dict[str, list[Amounts]]:
    """Return what each node has that is up and has usable devices, by kind."""
    found: dict[str, list[Amounts]] = {}
    for node in cluster.nodes:
        if node.state == "up" and node.num_usable:
            found.setdefault(node.kind, []).append(amounts_of(node))
    return found


def quota_limit(tenant: str, most: int) -> Limit:
    """Return a quota, by which the jobs of a tenant may use `most` devices at a time, as a `Limit`."""
    said = f"the quota of tenant {tenant!r}, {most} devices"
    return Limit(tenants=frozenset({tenant}), left=float(most), said=said)


def subtrees(cluster: ClusterSpec) -> dict[str, frozenset[str]]:
    """Return, by tenant, the names of the tenant itself and of all tenants below it."""
    parent = {tenant.name: tenant.parent for tenant in cluster.tenants}
    found: dict[str, set[str]] = {name: {name} for name in parent}
    for name in parent:
        above = parent[name]
        while above is not None:
            found[above].add(name)
            above = parent[above]
    return {name: frozenset(names) for name, names in found.items()}


def use_by_tenant(
    allocations: Mapping[str, Allocation], tenants: Mapping[str, str], kind_of: Mapping[str, str]
) -> dict[str, Counter[str]]:
    """Return the number of allocated devices by tenant and kind.

    `tenants` is by job id, `kind_of` by node name. Jobs of one share group use the same devices, which are
    counted once, for the job whose id sorts first.
    """
    seen: set[str] = set()
    used: dict[str, Counter[str]] = {}
    for id_ in sorted(allocations):
        allocation = allocations[id_]
        if allocation.share_group not in seen:
            its = used.setdefault(tenants[id_], Counter())
            its.update(devices_by_kind(allocation, kind_of))
        if allocation.share_group is not None:
            seen.add(allocation.share_group)
    return used


def devices_by_kind(allocation: Allocation, kind_of: Mapping[str, str]) -> Counter[str]:
    """Return the number of devices of each kind in an allocation; unknown nodes count as kind ""."""
    counted: Counter[str] = Counter()
    for name, local in allocation.devices.items():
        counted[kind_of.get(name, "")] += len(local)
    return counted


def together(uses: Iterable[Use]) -> dict[str, Counter[str]]:
    """Return the sum of several counts of devices by tenant and kind."""
    total: dict[str, Counter[str]] = {}
    for use in uses:
        for tenant, by_kind in use.items():
            total.setdefault(tenant, Counter()).update(by_kind)
    return total


def counts(limits: Sequence[Limit], tenants: Sequence[str]) -> np.ndarray:
    """Return [limits, jobs] bool: whether a job counts against a limit. `tenants` has one entry per job."""
    rows = [[name in limit.tenants for name in tenants] for limit in limits]
    return np.array(rows, bool).reshape(len(limits), len(tenants))


def per_device(limits: Sequence[Limit], kinds: Sequence[str]) -> np.ndarray:
    """Return [limits, kinds]: how much of each limit one device of each kind uses up."""
    rows = [[limit.per_device(kind) for kind in kinds] for limit in limits]
    return np.array(rows, np.float64).reshape(len(limits), len(kinds))
