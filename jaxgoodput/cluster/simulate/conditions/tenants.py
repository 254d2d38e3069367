"""Whose the jobs of a workload are, and what they may spend: tenants, prices and budgets from short texts.

Published workloads do not say whose their jobs are, so they are dealt out at random, by the same seed always
in the same way.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.specs import Tenant

_KEYS = ("guaranteed", "limit", "weight", "budget", "jobs")


def read_tenants(text: str) -> tuple[tuple[Tenant, ...], dict[str, float]]:
    """Tenants, and how many of the jobs are whose, from `[PARENT/]NAME[:KEY=NUMBER...],...`.

    Keys: `guaranteed` and `limit` in devices, `weight`, `budget` per hour, and `jobs`, the part of the jobs
    relative to the others' (left out: 1 for who has no tenants below it, else 0). Raises ValueError where it
    is something else.

    >>> tenants, jobs = read_tenants("lab:guaranteed=8,lab/team:guaranteed=4:jobs=3")
    >>> [(t.name, t.parent, t.guaranteed) for t in tenants], jobs
    ([('lab', None, 8), ('team', 'lab', 4)], {'lab': 0.0, 'team': 3.0})
    """
    found: list[Tenant] = []
    jobs: dict[str, float] = {}
    for part in text.split(","):
        path, *words = (word.strip() for word in part.split(":"))
        parent, _, name = path.rpartition("/")
        numbers = {}
        for word in words:
            key, _, number = word.partition("=")
            numbers[key] = _number(number)
        whole = all(numbers.get(key, 0.0).is_integer() for key in ("guaranteed", "limit"))
        wrong = [key for key, number in numbers.items() if key not in _KEYS or not number >= 0]
        if not name or wrong or not whole or len(numbers) < len(words):
            raise ValueError(
                f"--tenants {text!r}: {part!r} is not of the form [PARENT/]NAME[:KEY=NUMBER...] with each of "
                f"{', '.join(_KEYS)} at most once and devices in whole numbers, such as "
                "lab:guaranteed=8,lab/team:guaranteed=4:weight=2."
            )
        if "jobs" in numbers:
            jobs[name] = numbers["jobs"]
        try:
            found.append(
                Tenant(
                    name=name,
                    parent=parent.rpartition("/")[2] or None,
                    guaranteed=int(numbers.get("guaranteed", 0)),
                    limit=int(numbers["limit"]) if "limit" in numbers else None,
                    weight=numbers.get("weight", 1.0),
                    budget_per_hour=numbers.get("budget"),
                )
            )
        except ValueError as error:
            raise ValueError(f"--tenants {text!r}: {error}") from error
    return tuple(found), parts(found, jobs)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def parts(tenants: Sequence[Tenant], jobs: Mapping[str, float]) -> dict[str, float]:
    """How many of the jobs are whose, relative to the others'; who is absent from `jobs`: 1 for leaves."""
    parents = {tenant.parent for tenant in tenants}
    return {t.name: jobs.get(t.name, float(t.name not in parents)) for t in tenants}


def deal_out(
    jobs: Sequence[TraceJob], part: Mapping[str, float], seed: int
) -> tuple[TraceJob, ...]:
    """The jobs with tenants, drawn with these parts. Raises ValueError where nobody has a part."""
    total = sum(part.values())
    if not total > 0:
        raise ValueError("--tenants: nobody has any jobs. Give one of them a number behind jobs=.")
    names = list(part)
    rng = np.random.default_rng([seed, 0x74656E])
    drawn = rng.choice(len(names), len(jobs), p=[part[name] / total for name in names])
    return tuple(replace(j, tenant=names[at]) for j, at in zip(jobs, drawn.tolist(), strict=True))


def with_budgets(jobs: Sequence[TraceJob], budgets: Mapping[str, float]) -> tuple[TraceJob, ...]:
    """The jobs with budgets, by id, by application, or `all`; the first of these that is there holds.

    Raises ValueError for names that are none of these, and for budgets below 0.
    """
    known = {"all", *(job.id for job in jobs), *(job.application for job in jobs)}
    for name, money in budgets.items():
        if name not in known:
            raise ValueError(
                f"--budgets: {name!r} is no job, no application that one runs, and not all. There are "
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
