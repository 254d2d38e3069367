"""Several policies on the same scenario, and what they are compared by: a table, and JSON."""

import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence

from jaxgoodput._serial import encode, pack
from jaxgoodput.scheduler.policies.catalogue import Named
from jaxgoodput.simulate.records import Result
from jaxgoodput.simulate.scenario import Scenario, check
from jaxgoodput.simulate.settings import Settings
from jaxgoodput.simulate.simulator import Progress, simulate

# Heading (over two lines), key of `Result.summary`, divisor, digits behind the point.
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
    policies: Mapping[str, Named],
    settings: Settings,
    *,
    on_progress: Callable[[str, Progress], None] | None = None,
) -> tuple[Result, ...]:
    """One result per policy, in order. All are checked first: a ValueError means that none ran.

    `on_progress` gets the policy's name and how far it is.
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
    """A line per policy, as plain text; FTF is finish-time fairness, above 1 is unfair (see `records`)."""
    rows = []
    for result in results:
        found = result.summary()
        cells = [_number(found[key] / divisor, digits) for _, _, key, divisor, digits in _COLUMNS]
        rows.append((result.policy, *cells))
    return plain_table(["\npolicy", *(f"{above}\n{below}" for above, below, *_ in _COLUMNS)], rows)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows under their heads, as plain text; the first `left` columns begin at the left."""
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
    """All that was found, and on what; `_serial.unpack` reads the cluster and each of `results`."""
    body = {
        "workload": scenario.name,
        "cluster": pack(scenario.cluster),
        "rules": encode(settings),
        "summaries": {result.policy: encode(result.summary()) for result in results},
        "results": [pack(result) for result in results],
    }
    return json.dumps(body, allow_nan=False)
