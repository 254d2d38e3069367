"""Tenants and budgets of a workload's jobs, from short texts: `--tenants` and `--budgets`.

Published workloads do not say which tenant a job belongs to, so jobs are assigned at random, from the seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.key_numbers import key_numbers, naming
from jaxgoodput.specs import Tenant

_KEYS = ("guaranteed", "limit", "weight", "budget", "jobs")


def read_tenants(text: str) -> tuple[tuple[Tenant, ...], dict[str, float]]:
    """Return the tenants of `[PARENT/]NAME[:KEY=NUMBER...],...`, and the part of the jobs that each has.

    Keys: `guaranteed` and `limit` in devices, `weight`, `budget` per hour, and `jobs`, the part of the jobs
    relative to other tenants (default: 1 for a tenant without children, otherwise 0). Raises ValueError for
    any other text.

    >>> tenants, jobs = read_tenants("lab:guaranteed=8,lab/team:guaranteed=4:jobs=3")
    >>> [(t.name, t.parent, t.guaranteed) for t in tenants], jobs
    ([('lab', None, 8), ('team', 'lab', 4)], {'lab': 0.0, 'team': 3.0})
    """
    found: list[Tenant] = []
    jobs: dict[str, float] = {}
    for part in text.split(","):
        path, *words = (word.strip() for word in part.split(":"))
        parent, _, name = path.rpartition("/")
        numbers = {key: value for key, (value,) in map(key_numbers, words)}
        if not name or len(numbers) < len(words) or not _are_valid(numbers):
            raise ValueError(
                f"--tenants {text!r}: {part!r} is not of the form [PARENT/]NAME[:KEY=NUMBER...] with each of "
                f"{', '.join(_KEYS)} at most once and devices in whole numbers, such as "
                "lab:guaranteed=8,lab/team:guaranteed=4:weight=2."
            )
        if "jobs" in numbers:
            jobs[name] = numbers["jobs"]
        with naming(f"--tenants {text!r}"):
            tenant = Tenant(
                name=name,
                parent=parent.rpartition("/")[2] or None,
                guaranteed=int(numbers.get("guaranteed", 0)),
                limit=int(numbers["limit"]) if "limit" in numbers else None,
                weight=numbers.get("weight", 1.0),
                budget_per_hour=numbers.get("budget"),
            )
        found.append(tenant)
    return tuple(found), parts(found, jobs)


def _are_valid(numbers: Mapping[str, float]) -> bool:
    whole = (numbers.get(key, 0.0) for key in ("guaranteed", "limit"))
    return all(k in _KEYS and x >= 0 for k, x in numbers.items()) and all(
        x.is_integer() for x in whole
    )


def parts(tenants: Sequence[Tenant], jobs: Mapping[str, float]) -> dict[str, float]:
    """Return each tenant's part of the jobs; the default is 1 without children, otherwise 0."""
    parents = {tenant.parent for tenant in tenants}
    return {t.name: jobs.get(t.name, float(t.name not in parents)) for t in tenants}


def deal_out(
    jobs: Sequence[TraceJob], part: Mapping[str, float], seed: int
) -> tuple[TraceJob, ...]:
    """Return the jobs with tenants, drawn with these parts. Raises ValueError if all parts are 0."""
    total = sum(part.values())
    if not total > 0:
        raise ValueError("--tenants: no tenant has jobs. Give at least one of them jobs=NUMBER.")
    names = list(part)
    rng = np.random.default_rng([seed, 0x74656E])
    drawn = rng.choice(len(names), len(jobs), p=[part[name] / total for name in names])
    return tuple(replace(j, tenant=names[at]) for j, at in zip(jobs, drawn.tolist(), strict=True))


def with_budgets(jobs: Sequence[TraceJob], budgets: Mapping[str, float]) -> tuple[TraceJob, ...]:
    """Return the jobs with budgets by job id, by application, or for `all`; the most specific one counts.

    Raises ValueError for other names, and for budgets below 0.
    """
    known = {"all", *(job.id for job in jobs), *(job.application for job in jobs)}
    for name, money in budgets.items():
        if name not in known:
            raise ValueError(
                f"--budgets: {name!r} is neither a job, nor an application of one, nor all. There are "
                f"{', '.join(sorted(known)[:8])} ..."
            )
        if money < 0:
            raise ValueError(f"--budgets: {name}={money:g} is below 0; a budget is 0 or more.")
    found = []
    for job in jobs:
        names = (job.id, job.application, "all")
        money = next((budgets[name] for name in names if name in budgets), job.budget)
        found.append(replace(job, budget=money))
    return tuple(found)
