"""The default policy beside Pollux's, solved exactly, at half, usual, 1.5 times and twice the load.

    python benchmarks/scheduler_loads.py ../shared/data [--loads 1.5 2.0] [--workloads 1 2] [--days 3]

The folder holds `pollux` as its artifact ships it. Rows of workloads: Pollux's own jobs on its 16 nodes of
four devices, by the artifact's rules: rounds of 60 s, restarts of 30 s, no policy may offer a job more than
twice the largest size that it has measured. Rows of days: made-up jobs (`--days` days at each load, 160 jobs
a day at load 1) on the same devices, decided when something happens, and a policy may offer any size; beside
Pollux's policy with any size stands the one with its published limit of twice. Nobody is told the work that
is left. The default policy was tuned on workloads 1 to 3 at load 1.

Ratios are to Pollux's policy without a limit of its own; below 1 the default policy is better. *App* is the
application whose average is worst. A pause lies between two times at which a job holds devices; queueing
before its first start is none.
"""

import argparse
import pathlib
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler import Goodput, Pollux
from jaxgoodput.cluster.simulate import (
    Result,
    Scenario,
    Settings,
    TableTruth,
    pollux_settings,
    read_pollux_applications,
    read_pollux_workload,
    read_scenario,
    read_settings,
    simulate,
    uniform_cluster,
)

LOADS = (0.5, 1.0, 1.5, 2.0)
WORKLOADS = (1, 2, 3, 4, 6)
JOBS_A_DAY = 160
MOST_PAUSE_S = 1800.0
MOST_APPLICATION = 1.02
POLICIES = {"ours": Goodput, "any": lambda: Pollux(growth=None), "twofold": Pollux}


class Row(NamedTuple):
    """One workload under the default policy, as ratios to Pollux's with any size."""

    average: float
    p99: float
    fairness: float
    restarts: float
    application: float
    pause_s: float


def longest_pause_s(result: Result) -> float:
    """Return the longest time for which a job that had run held no devices."""
    return max(
        (
            later.start_s - earlier.end_s
            for job in result.jobs
            for earlier, later in zip(job.intervals, job.intervals[1:], strict=False)
        ),
        default=0.0,
    )


def application_averages(result: Result) -> dict[str, float]:
    """Return the average completion time of each application, in seconds."""
    times = defaultdict(list)
    for job in result.jobs:
        times[job.application].append(job.jct_s)
    return {name: float(np.mean(values)) for name, values in times.items()}


def published(folder: pathlib.Path, truth: TableTruth, number: int, load: float) -> Scenario:
    """Return one of Pollux's workloads at a load."""
    place = "workloads" if load == 1.0 else f"workloads-{load}"
    return Scenario(
        name=f"{place}/{number}",
        origin="pollux",
        jobs=read_pollux_workload(folder / place / f"workload-{number}.csv"),
        cluster=uniform_cluster("t4", 16, 4),
        truth=truth,
    )


def compared(name: str, world: Scenario, settings: Settings) -> Row:
    """Run the policies, print the row and return its ratios."""
    found = {
        policy: simulate(world.jobs, world.cluster, make(), world.truth, settings=settings)
        for policy, make in POLICIES.items()
        if settings.growth is None or policy != "twofold"
    }
    sums = {policy: result.summary() for policy, result in found.items()}
    ratio = {key: sums["ours"][key] / sums["any"][key] for key in sums["any"] if sums["any"][key]}
    averages = {policy: application_averages(result) for policy, result in found.items()}
    by_app = {app: averages["ours"][app] / averages["any"][app] for app in averages["any"]}
    worst = max(by_app, key=by_app.__getitem__)
    pauses = {policy: longest_pause_s(result) for policy, result in found.items()}
    row = Row(
        ratio["average_jct_s"],
        ratio["p99_jct_s"],
        ratio["worst_rho"],
        sums["ours"]["restarts_per_job"] / max(sums["any"]["restarts_per_job"], 1e-9),
        by_app[worst],
        pauses["ours"],
    )
    twofold = sums["ours"]["average_jct_s"] / sums.get("twofold", sums["any"])["average_jct_s"]
    restarts = "/".join(f"{of['restarts_per_job']:.1f}" for of in sums.values())
    print(
        f"{name:18s} {sums['ours']['average_jct_s']:8.0f} {row.average:7.3f} {twofold:7.3f} {row.p99:6.3f} "
        f"{row.fairness:8.3f} {restarts:>13s} {row.application:6.3f} {worst:12s} "
        f"{'/'.join(f'{pause_s:.0f}' for pause_s in pauses.values()):>15s}",
        flush=True,
    )
    return row


def report(title: str, rows: list[Row]) -> None:
    """Print what was asked of the rows beside what they show."""

    def verdict(value, asked):
        return "ok" if value <= asked else "OVER"

    average, p99 = ([getattr(row, name) for row in rows] for name in ("average", "p99"))
    worst = {name: max(getattr(row, name) for row in rows) for name in Row._fields}
    checks = (
        ("average", float(np.mean(average)), 0.95),
        ("worst average", worst["average"], 1.02),
        ("p99", float(np.mean(p99)), 1.0),
        ("worst p99", worst["p99"], 1.1),
        ("worst fairness", worst["fairness"], 1.0),
        ("restarts", worst["restarts"], 2.0),
        ("worst application", worst["application"], MOST_APPLICATION),
        ("longest pause, s", worst["pause_s"], MOST_PAUSE_S),
    )
    print(f"{title}: " + "; ".join(f"{n} {v:.3f} ({a:g} {verdict(v, a)})" for n, v, a in checks))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--loads", type=float, nargs="*", choices=LOADS, default=LOADS)
    parser.add_argument("--workloads", type=int, nargs="*", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--days", type=int, default=3, help="made-up days at each load")
    options = parser.parse_args()
    folder = options.data / "pollux"
    truth = TableTruth(read_pollux_applications(folder / "traces"))
    print(
        f"{'':18s} {'ours, s':>8s} {'to any':>7s} {'twofold':>7s} {'p99':>6s} {'fairness':>8s} "
        f"{'restarts':>13s} {'app':>6s} {'':12s} {'longest pause':>15s}\n"
        f"{'':18s} {'average':>8s} {'':7s} {'':7s} {'':6s} {'':8s} {'per job':>13s} {'':6s} {'':12s} "
        f"{'s':>15s}\n(restarts and pauses: ours, Pollux of any size, Pollux with growth at most twofold)",
        flush=True,
    )
    for load in options.loads:
        workloads = {
            f"{load:g} workload-{number}": (
                published(folder, truth, number, load),
                pollux_settings(),
            )
            for number in options.workloads
        }
        days = {
            f"{load:g} day {seed}": (
                read_scenario(f"synthetic:{round(JOBS_A_DAY * load)}", "t4:16x4", seed=seed),
                read_settings("events", "synthetic", seed=seed),
            )
            for seed in range(options.days)
        }
        for title, worlds in (("workloads", workloads), ("days", days)):
            rows = [compared(name, *world) for name, world in worlds.items()]
            if rows:
                report(f"{title} at load {load:g}", rows)


if __name__ == "__main__":
    main()
