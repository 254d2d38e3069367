"""How much of the cluster each tenant deserves, and how much it had recently.

Shares are computed from the top of the tenant tree downwards. Each tenant that wants devices deserves its
guarantee plus a part of the rest by weight, up to its limit. Past use fades: a device-second counts half as
much after one half-life. So a tenant that was away is not paid back for ever, and a tenant that has just had
much waits a while. (Shares over time as in Slurm and KAI-Scheduler; the tree as Kueue's cohorts.)
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from jaxgoodput.cluster.scheduler.limits import subtrees
from jaxgoodput.specs import ClusterSpec, Tenant


def deserved(cluster: ClusterSpec, active: Iterable[str], num_devices: float) -> dict[str, float]:
    """Return the part of `num_devices` that each active tenant deserves, in devices.

    `active` names the tenants that have jobs. If a tenant has both jobs of its own and active tenants below
    it, its own jobs share as one more tenant of weight 1.

    >>> from jaxgoodput.specs import Node
    >>> nodes = (Node(name="n", kind="t4", num_devices=8),)
    >>> tenants = Tenant(name="a", guaranteed=2), Tenant(name="b", weight=2.0)
    >>> deserved(ClusterSpec(nodes=nodes, tenants=tenants), {"a", "b"}, 8.0)
    {'a': 4.0, 'b': 4.0}
    """
    found: dict[str, float] = {}
    wanting = set(active)
    below = subtrees(cluster)
    # Tenants that the cluster does not define compete at the top of the tree, without limits.
    unknown = [Tenant(name=name) for name in sorted(wanting - below.keys())]

    def active_below(parent: str | None) -> list[Tenant]:
        return [t for t in cluster.tenants if t.parent == parent and below[t.name] & wanting]

    def most(tenant: Tenant) -> float:
        """Return the most devices that a tenant may have and its active tenants can use."""
        own = math.inf if tenant.limit is None else float(tenant.limit)
        inner = active_below(tenant.name)
        if tenant.name in wanting or not inner:
            return own
        return min(own, sum(map(most, inner)))

    def share_out(parent: str | None, devices: float) -> None:
        ones = active_below(parent)
        if parent is None:
            ones += unknown
        elif parent in wanting:
            ones.append(Tenant(name=parent))
        limits = [math.inf if one.name == parent else most(one) for one in ones]
        for one, its in zip(ones, _shares(ones, limits, devices), strict=True):
            if one.name == parent or one.name not in below:
                found[one.name] = its
            else:
                share_out(one.name, its)

    share_out(None, float(num_devices))
    return found


def _shares(tenants: list[Tenant], limits: list[float], devices: float) -> list[float]:
    """Return the devices of each tenant: its guarantee and a part of the rest by weight, up to its limit."""
    if not tenants:
        return []
    most = np.array(limits, np.float64)
    sure = np.minimum([float(tenant.guaranteed) for tenant in tenants], most)
    # If the guarantees exceed what there is to share, they shrink alike.
    sure *= min(1.0, devices / max(sure.sum(), 1e-9))
    weight = np.array([tenant.weight for tenant in tenants], np.float64)
    its, open_ = sure.copy(), np.ones(len(tenants), bool)
    # Tenants that would exceed their limit get the limit; the others share what that leaves.
    while open_.any():
        rest = devices - its[~open_].sum() - sure[open_].sum()
        part = sure + weight / max(weight[open_].sum(), 1e-300) * rest
        over = open_ & (part > most)
        if not over.any():
            its[open_] = part[open_]
            break
        its[over] = most[over]
        open_ &= ~over
    return its.tolist()


def faded(
    had: Mapping[str, float], running: Mapping[str, float], seconds: float, half_life_s: float
) -> dict[str, float]:
    """Return each tenant's faded device-seconds after `seconds` more have passed.

    `had` holds the faded device-seconds before, `running` the devices that each tenant used throughout. The
    new device-seconds fade as they pass, too. Raises ValueError for a half-life of 0 or negative seconds.

    >>> faded({"a": 100.0}, {}, 60.0, 60.0)
    {'a': 50.0}
    """
    if not (half_life_s > 0 and seconds >= 0):
        raise ValueError(
            f"half_life_s={half_life_s} must be above 0 and seconds={seconds} at least 0: usage fades as "
            "time passes."
        )
    rate = math.log(2.0) / half_life_s
    kept, gained_s = math.exp(-rate * seconds), -math.expm1(-rate * seconds) / rate
    names = sorted({*had, *running})
    return {n: kept * had.get(n, 0.0) + gained_s * running.get(n, 0.0) for n in names}


def factors(
    cluster: ClusterSpec,
    active: Iterable[str],
    had_s: Mapping[str, float],
    num_devices: float,
    *,
    power: float = 2.0,
    most: float = 8.0,
    assumed_s: float = 900.0,
) -> dict[str, float]:
    """Return the factor on the weights of each tenant's jobs: (deserved share / recent share)^power.

    Factors are clipped to 1/most ... most. `had_s` holds recent device-seconds by tenant (`faded`). Each
    tenant is credited with `assumed_s` of what it deserves in addition, so factors stay near 1 while little
    is known.
    """
    due = deserved(cluster, active, num_devices)
    total_s = sum(had_s.get(name, 0.0) for name in due)
    total = max(sum(due.values()), 1e-9)
    found = {}
    for name, devices in due.items():
        had = (had_s.get(name, 0.0) + assumed_s * devices) / (total_s + assumed_s * total)
        ratio = devices / total / had if had > 0 else 1.0
        found[name] = float(np.clip(ratio**power, 1.0 / most, most))
    return found
