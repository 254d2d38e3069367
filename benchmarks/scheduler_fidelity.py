"""Checks that the simulator reproduces published numbers. Prints the requirement, the result and the time.

    PYTHONPATH=. python benchmarks/scheduler_fidelity.py ../shared/data [--workloads 1 2 3 4 6] [--no-sia]

The folder holds `pollux` and `sia` as their artifacts ship them. Optimus and Tiresias follow the
artifact's own settings exactly, so their averages must agree; Pollux's published averages come from a
genetic algorithm and are printed beside ours, which is solved exactly, for comparison. Then, what a
simulation of 160 jobs costs under `Goodput`: at most 60 s of CPU are asked.
"""

import argparse
import json
import pathlib
import time

from jaxgoodput.cluster.scheduler import Goodput, Optimus, Pollux, Sia, Tiresias
from jaxgoodput.cluster.simulate import (
    TableTruth,
    pollux_settings,
    read_cluster,
    read_pollux_applications,
    read_pollux_workload,
    read_scenario,
    read_settings,
    read_sia_applications,
    read_sia_workload,
    sia_settings,
    simulate,
    uniform_cluster,
)
from jaxgoodput.cluster.simulate.scenario import CLUSTERS

SIA_AVERAGE_S = 0.542 * 3600  # Sia's artifact on philly/workload-1
MOST_CPU_S = 60.0


def row(name, asked_s, tolerance, jobs, cluster, policy, truth, settings):
    begun = time.process_time()
    result = simulate(jobs, cluster, policy, truth, settings=settings)
    cpu_s = time.process_time() - begun
    found = result.summary()
    off = found["average_jct_s"] / asked_s - 1
    verdict = "-" if tolerance is None else "ok" if abs(off) <= tolerance else "OFF"
    allowed = "-" if tolerance is None else f"{tolerance:.1%}"
    print(
        f"{name:34s} {asked_s:10.2f} {found['average_jct_s']:10.2f} {off:+8.2%} {allowed:>6s} "
        f"{verdict:>4s} {found['p99_jct_s']:9.0f} {found['restarts_per_job']:6.2f} "
        f"{1e3 * found['median_decision_s']:8.2f} {cpu_s:7.1f}",
        flush=True,
    )


def cost(workload):
    """CPU seconds of one simulation from its start, with nothing remembered from earlier ones."""
    scenario = read_scenario(workload)
    settings = read_settings("own", scenario.origin)
    begun = time.process_time()
    result = simulate(
        scenario.jobs,
        scenario.cluster,
        Goodput(),
        scenario.truth,
        settings=settings,
        name="goodput",
    )
    cpu_s = time.process_time() - begun
    print(
        f"goodput, {scenario.name:29s} {len(scenario.jobs):4d} jobs {len(result.decision_s):6d} "
        f"decisions {cpu_s:7.1f} CPU s  {'ok' if cpu_s <= MOST_CPU_S else 'OVER'}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--workloads", type=int, nargs="*", default=[6])
    parser.add_argument("--no-sia", action="store_true")
    options = parser.parse_args()
    print(
        f"{'average completion time, s':34s} {'asked':>10s} {'measured':>10s} {'off':>8s} {'within':>6s} "
        f"{'':4s} {'p99':>9s} {'rst':>6s} {'ms/dec.':>8s} {'CPU s':>7s}"
    )
    folder = options.data / "pollux"
    truth = TableTruth(read_pollux_applications(folder / "traces"))
    cluster = uniform_cluster("t4", 16, 4)
    policies = (
        ("optimus", Optimus(), "elastic", 0.005),
        ("tiresias", Tiresias(), "rigid", 0.005),
        ("pollux", Pollux(), "adaptive", None),
    )
    for number in options.workloads:
        jobs = read_pollux_workload(folder / "workloads" / f"workload-{number}.csv")
        for name, policy, mode, tolerance in policies:
            path = folder / "results-jobload" / f"{name}-1.0" / "summary.json"
            asked_s = json.loads(path.read_text())["avgs"][f"workload-{number}"]
            settings = pollux_settings(mode=mode)
            title = f"{name}, Pollux workload-{number}"
            row(title, asked_s, tolerance, jobs, cluster, policy, truth, settings)
    if not options.no_sia:
        folder = options.data / "sia"
        cluster = read_cluster(CLUSTERS["sia"])
        kinds = sorted({node.kind for node in cluster.nodes})
        truth = TableTruth(read_sia_applications(folder / "traces", kinds))
        jobs = read_sia_workload(folder / "workloads" / "philly" / "workload-1.csv")
        title = "sia, philly/workload-1, 64 mixed"
        row(title, SIA_AVERAGE_S, 0.05, jobs, cluster, Sia(), truth, sia_settings())
    cost("synthetic:160")
    cost(str(options.data / "pollux" / "workloads" / "workload-1.csv"))
    cost(str(options.data / "sia" / "workloads" / "philly" / "workload-1.csv"))


if __name__ == "__main__":
    main()
