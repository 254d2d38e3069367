"""The device-seconds that tenants have had and deserved while a simulation runs."""

from collections.abc import Sequence

from jaxgoodput.cluster.scheduler.fair_share import deserved, faded
from jaxgoodput.cluster.scheduler.limits import subtrees
from jaxgoodput.cluster.scheduler.shapes import capacity
from jaxgoodput.cluster.simulate.jobs.tracked import TrackedJob
from jaxgoodput.cluster.simulate.records import JobRecord, TenantRecord, array_of
from jaxgoodput.specs import ClusterSpec, Tenant


class TenantAccounts:
    """Keeps account of what the tenants of a cluster received and deserved.

    `half_life_s` is the time after which what a tenant had counts half as much.
    """

    def __init__(self, cluster: ClusterSpec, half_life_s: float):
        self.had_s: dict[str, float] = {}
        """Device-seconds that each tenant had lately."""
        self._deserved_s: dict[str, float] = {}
        self._cluster, self._half_life_s = cluster, half_life_s

    def add(self, active: Sequence[TrackedJob], present: ClusterSpec, seconds: float) -> None:
        """Count `seconds` in which unfinished jobs kept their devices; `present`: the cluster meanwhile."""
        have = dict.fromkeys((job.work.spec.tenant for job in active), 0.0)
        for job in active:
            have[job.work.spec.tenant] += job.allocation.num_devices if job.running else 0
        self.had_s = faded(self.had_s, have, seconds, self._half_life_s)
        devices = float(sum(capacity(present).values()))
        for name, share in deserved(self._cluster, have, devices).items():
            self._deserved_s[name] = self._deserved_s.get(name, 0.0) + share * seconds

    def records(self, jobs: Sequence[JobRecord]) -> tuple[TenantRecord, ...]:
        """Return a record per tenant: first the cluster's, then others that jobs name; () without tenants."""
        if not self._cluster.tenants:
            return ()
        below = subtrees(self._cluster)
        others = sorted({job.tenant for job in jobs} - set(below))
        tenants = (*self._cluster.tenants, *(Tenant(name=name) for name in others))
        return tuple(
            self._record(tenant, below.get(tenant.name, frozenset({tenant.name})), jobs)
            for tenant in tenants
        )

    def _record(
        self, tenant: Tenant, subtree: frozenset[str], jobs: Sequence[JobRecord]
    ) -> TenantRecord:
        mine = [job for job in jobs if job.tenant in subtree]
        has_prices = bool(self._cluster.price_per_hour)
        return TenantRecord(
            name=tenant.name,
            parent=tenant.parent,
            num_jobs=len(mine),
            average_jct_s=float(array_of(job.jct_s for job in mine if not job.cancelled).mean()),
            device_s=float(sum(sum(job.device_s.values()) for job in mine)),
            deserved_s=float(sum(self._deserved_s.get(name, 0.0) for name in sorted(subtree))),
            cost=float(sum(job.cost or 0.0 for job in mine)) if has_prices else None,
        )
