"""Compares several policies on one scenario, and reports the results as tables and JSON."""

import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence

from jaxgoodput._fields.serial import encode, pack
from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.simulate.checks import check
from jaxgoodput.cluster.simulate.records import Result
from jaxgoodput.cluster.simulate.scenario import Scenario
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.cluster.simulate.simulator import Progress, simulate

# Heading on two lines, key of `Result.summary`, divisor, digits after the point.
_COLUMNS = (
    ("average", "JCT h", "average_jct_s", 3600.0, 3),
    ("median", "JCT h", "median_jct_s", 3600.0, 3),
    ("p99", "JCT h", "p99_jct_s", 3600.0, 2),
    ("makespan", "h", "makespan_s", 3600.0, 2),
    ("restarts", "per job", "restarts_per_job", 1.0, 2),
    ("device-", "hours", "device_hours", 1.0, 0),
    ("worst", "FTF", "worst_rho", 1.0, 2),
    ("unfair", "jobs %", "unfair_share", 0.01, 0),
    ("decision", "ms", "median_decision_s", 1e-3, 1),
    ("p95", "ms", "p95_decision_s", 1e-3, 1),
)


def compare(
    scenario: Scenario,
    policies: Mapping[str, PolicyEntry],
    settings: Settings,
    *,
    on_progress: Callable[[str, Progress], None] | None = None,
) -> tuple[Result, ...]:
    """Simulate each policy, and return the results in order.

    All policies are checked first: if this raises ValueError, none has run. `on_progress` is called with the
    policy's name and its progress.
    """
    for name, named in policies.items():
        check(scenario, settings, name, named)
    results = []
    for name, named in policies.items():

        def report(progress: Progress, name: str = name) -> None:
            if on_progress is not None:
                on_progress(name, progress)

        results.append(
            simulate(
                scenario.jobs,
                scenario.cluster,
                named.policy,
                scenario.truth,
                settings=dataclasses.replace(settings, mode=named.mode, sharing=named.sharing),
                name=name,
                on_progress=report,
            )
        )
    return tuple(results)


def table(results: Sequence[Result]) -> str:
    """Return a table with a line per policy, as text. FTF is finish-time fairness (see `records`)."""
    rows = []
    for result in results:
        found = result.summary()
        cells = [_number(found[key] / divisor, digits) for _, _, key, divisor, digits in _COLUMNS]
        rows.append((result.policy, *cells))
    return plain_table(["\npolicy", *(f"{above}\n{below}" for above, below, *_ in _COLUMNS)], rows)


def tenants_table(results: Sequence[Result]) -> str:
    """Return a table with a line per policy and tenant, indented below its parent; empty without tenants.

    The deserved share is the tenant's part of all device-hours by `fair_share.deserved`.
    """
    rows = []
    for result in results:
        parent = {tenant.name: tenant.parent for tenant in result.tenants}
        top = [tenant for tenant in result.tenants if tenant.parent is None]
        had = max(sum(tenant.device_s for tenant in top), 1e-9)
        due = max(sum(tenant.deserved_s for tenant in top), 1e-9)
        for tenant in result.tenants:
            cost = math.nan if tenant.cost is None else tenant.cost
            rows.append(
                (
                    result.policy,
                    "  " * _depth(tenant.name, parent) + tenant.name,
                    str(tenant.num_jobs),
                    _number(tenant.average_jct_s / 3600, 3),
                    _number(tenant.device_s / 3600, 1),
                    _number(100 * tenant.device_s / had, 1),
                    _number(100 * tenant.deserved_s / due, 1),
                    _number(cost, 2),
                )
            )
    heads = ["\npolicy", "\ntenant", "\njobs", "average\nJCT h", "device-\nhours", "share\n%"]
    return plain_table([*heads, "deserved\n%", "\ncost"], rows, left=2) if rows else ""


def _depth(name: str, parent: Mapping[str, str | None]) -> int:
    above = parent[name]
    return 0 if above is None else 1 + _depth(above, parent)


def deadlines_in_words(result: Result) -> str:
    """Return how many deadlines were met, and the latest jobs, in words; empty if there are no deadlines."""
    due = [job for job in result.jobs if job.deadline_s is not None]
    if not due:
        return ""
    late = sorted((j for j in due if not j.is_in_time), key=lambda j: j.late_s, reverse=True)
    said = f"{result.policy}: {len(due) - len(late)} of {len(due)} deadlines met"
    if not late:
        return said
    worst = ", ".join(
        f"{job.id} {'never ended' if job.cancelled else f'{job.late_s / 3600:.2f} h'}"
        for job in late[:3]
    )
    more = f" and {len(late) - 3} more" if len(late) > 3 else ""
    return f"{said}; late: {worst}{more}"


def costs_in_words(result: Result) -> str:
    """Return what the jobs cost, and which used up their budget, in words; empty if there are no prices."""
    costs = {job.id: job.cost for job in result.jobs if job.cost is not None}
    if not costs:
        return ""
    dearest = max(costs, key=lambda id_: costs[id_])
    said = (
        f"{result.policy}: cost {sum(costs.values()):,.2f}, {sum(costs.values()) / len(costs):,.2f} per job, "
        f"the dearest {dearest} {costs[dearest]:,.2f}"
    )
    out = [job.id for job in result.jobs if job.out_of_money]
    more = f" and {len(out) - 5} more" if len(out) > 5 else ""
    return said + (f"; out of money: {', '.join(out[:5])}{more}" if out else "")


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table as plain text; the first `left` columns are left-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    blank, dashes = " " * 4, " -  "
    plain = box.Box("\n".join([blank, blank, dashes, *[blank] * 5]) + "\n", ascii=True)
    drawn = Table(box=plain, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=1000, color_system=None, force_terminal=False, markup=False).print(
        drawn
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def to_json(scenario: Scenario, settings: Settings, results: Sequence[Result]) -> str:
    """Return scenario, settings and results as JSON; `serial.unpack` reads the cluster and each result."""
    body = {
        "workload": scenario.name,
        "remarks": list(scenario.remarks),
        "cluster": pack(scenario.cluster),
        "rules": encode(settings),
        "summaries": {result.policy: encode(result.summary()) for result in results},
        "results": [pack(result) for result in results],
    }
    return json.dumps(body, allow_nan=False)
