"""How much of the cluster each tenant deserves, and how much it had of late.

Of what its parent deserves (the whole cluster at the top), every tenant that wants devices deserves what it
is guaranteed, and of the rest its weight's part, but no more than its limit. What it had fades: a device-
second counts half as much after a half-life, so that who was away is not paid back for ever, and who has just
had a lot waits a while. (As Slurm's and KAI-Scheduler's shares over time; the tree as Kueue's cohorts.)
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from jaxgoodput.cluster.scheduler.limits import subtrees
from jaxgoodput.specs import ClusterSpec, Tenant


def deserved(cluster: ClusterSpec, active: Iterable[str], num_devices: float) -> dict[str, float]:
    """Devices that each active tenant deserves of `num_devices`; active: names of `JobSpec.tenant`.

    A tenant with jobs of its own and others below it shares what it deserves with these, as one of weight 1.

    >>> from jaxgoodput.specs import Node
    >>> nodes = (Node(name="n", kind="t4", num_devices=8),)
    >>> tenants = Tenant(name="a", guaranteed=2), Tenant(name="b", weight=2.0)
    >>> deserved(ClusterSpec(nodes=nodes, tenants=tenants), {"a", "b"}, 8.0)
    {'a': 4.0, 'b': 4.0}
    """
    found: dict[str, float] = {}
    wanting = set(active)
    known = {tenant.name for tenant in cluster.tenants}
    below = subtrees(cluster)
    others = [Tenant(name=name) for name in sorted(wanting - known)]

    def most(tenant: Tenant) -> float:
        """Devices that it may have and its active tenants can take."""
        own = math.inf if tenant.limit is None else float(tenant.limit)
        inner = [t for t in cluster.tenants if t.parent == tenant.name and below[t.name] & wanting]
        if tenant.name in wanting or not inner:
            return own
        return min(own, sum(map(most, inner)))

    def share_out(parent: str | None, devices: float) -> None:
        ones = [t for t in cluster.tenants if t.parent == parent and below[t.name] & wanting]
        if parent is None:
            ones += others
        elif parent in wanting:
            if not ones:
                found[parent] = devices
                return
            ones.append(Tenant(name=parent))
        limits = [math.inf if one.name == parent else most(one) for one in ones]
        for one, its in zip(ones, _shares(ones, limits, devices), strict=True):
            if one.name == parent or one.name not in known:
                found[one.name] = its
            else:
                share_out(one.name, its)

    share_out(None, float(num_devices))
    return found


def _shares(tenants: list[Tenant], limits: list[float], devices: float) -> list[float]:
    """What each deserves: guarantee and a part of the rest by weight, no more than its limit."""
    if not tenants:
        return []
    most = np.array(limits, np.float64)
    sure = np.minimum([float(tenant.guaranteed) for tenant in tenants], most)
    sure *= min(1.0, devices / max(sure.sum(), 1e-9))
    weight = np.array([tenant.weight for tenant in tenants], np.float64)
    its, open_ = sure.copy(), np.ones(len(tenants), bool)
    while True:  # who would have more than its limit has that; the others share what is left
        rest = devices - its[~open_].sum() - sure[open_].sum()
        part = sure + weight / max(weight[open_].sum(), 1e-300) * rest
        over = open_ & (part > most)
        if not over.any():
            its[open_] = part[open_]
            return [float(one) for one in its]
        its[over] = most[over]
        open_ &= ~over
        if not open_.any():
            return [float(one) for one in its]


def faded(
    had: Mapping[str, float], running: Mapping[str, float], seconds: float, half_life_s: float
) -> dict[str, float]:
    """Device-seconds that each tenant had of late, so many seconds later.

    had: as of before; running: devices that each had all the while, whose seconds fade as they pass.

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
    """By tenant, what the weight of its jobs is multiplied by: (deserved / had share)^power, 1/most ... most.

    had_s: device-seconds of late by tenant (`faded`). As long as these are few, every tenant is taken to have
    had `assumed_s` of what it deserves beside them.
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
