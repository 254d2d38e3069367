"""What some tenants' jobs may have together: quotas, and limits and budgets of whole subtrees, as one list.

A limit counts devices, or what these cost in an hour; both grow with devices, so policies keep them as rows
of their problems. What jobs have about which a policy is not asked is taken off before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.specs import Allocation, ClusterSpec

Use = Mapping[str, Mapping[str, int]]  # devices by tenant and kind


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that the jobs of some tenants have together, of what is not spoken for."""

    tenants: frozenset[str]
    """Whose jobs count."""
    left: float
    said: str
    """Whose limit it is and how much, in words."""
    price: Mapping[str, float] | None = None
    """What a device of each kind counts; None = 1."""

    def per_device(self, kind: str) -> float:
        """What a device of a kind counts."""
        return 1.0 if self.price is None else self.price.get(kind, 0.0)

    def used(self, use: Use) -> float:
        """What devices by tenant and kind count against it."""
        return float(
            sum(
                self.per_device(kind) * count
                for tenant in self.tenants.intersection(use)
                for kind, count in use[tenant].items()
            )
        )


def limits_of(cluster: ClusterSpec) -> tuple[Limit, ...]:
    """All limits of a cluster: its quotas by name, then those of its tenants.

    >>> from jaxgoodput.specs import Node, Tenant
    >>> nodes = (Node(name="n", kind="t4", num_devices=8),)
    >>> lab, team = Tenant(name="lab", limit=6), Tenant(name="team", parent="lab")
    >>> limit, = limits_of(ClusterSpec(nodes=nodes, tenants=(lab, team), in_use={"team": {"t4": 2}}))
    >>> sorted(limit.tenants), limit.left
    (['lab', 'team'], 4.0)
    """
    found = [
        Limit(tenants=frozenset({t}), left=float(n), said=f"the quota of tenant {t!r}, {n} devices")
        for t, n in sorted(cluster.quota.items())
    ]
    below = subtrees(cluster) if cluster.tenants else {}
    for tenant in cluster.tenants:
        limits = [
            (tenant.limit, "devices", None),
            (tenant.budget_per_hour, "per hour", dict(cluster.price_per_hour)),
        ]
        for most, unit, price in limits:
            if most is not None:
                what = "limit" if price is None else "budget"
                said = f"the {what} of tenant {tenant.name!r}, {most:g} {unit}"
                limit = Limit(tenants=below[tenant.name], left=float(most), said=said, price=price)
                left = max(most - limit.used(cluster.in_use), 0.0)
                found.append(Limit(tenants=limit.tenants, left=left, said=said, price=price))
    return tuple(found)


def subtrees(cluster: ClusterSpec) -> dict[str, frozenset[str]]:
    """Each tenant with all tenants below it."""
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
) -> dict[str, dict[str, int]]:
    """Devices by tenant and kind; tenants: by job id. A share group counts once, for its first job."""
    seen: set[str] = set()
    used: dict[str, dict[str, int]] = {}
    for id_ in sorted(allocations):
        group = allocations[id_].share_group
        if group not in seen:
            its = used.setdefault(tenants[id_], {})
            for name, local in allocations[id_].devices.items():
                kind = kind_of.get(name, "")
                its[kind] = its.get(kind, 0) + len(local)
        if group is not None:
            seen.add(group)
    return used


def together(uses: Iterable[Use]) -> dict[str, dict[str, int]]:
    """The sum of devices by tenant and kind."""
    total: dict[str, dict[str, int]] = {}
    for use in uses:
        for tenant, by_kind in use.items():
            its = total.setdefault(tenant, {})
            for kind, count in by_kind.items():
                its[kind] = its.get(kind, 0) + count
    return total


def counts(limits: Sequence[Limit], tenants: Sequence[str]) -> np.ndarray:
    """[limits, jobs] bool: whether a job of that tenant counts."""
    rows = [[name in limit.tenants for name in tenants] for limit in limits]
    return np.array(rows, bool).reshape(len(limits), len(tenants))


def per_device(limits: Sequence[Limit], kinds: Sequence[str]) -> np.ndarray:
    """[limits, kinds] what a device of each kind counts."""
    rows = [[limit.per_device(kind) for kind in kinds] for limit in limits]
    return np.array(rows, np.float64).reshape(len(limits), len(kinds))
