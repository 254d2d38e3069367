"""Measures what wrong numbers cost the default policy: completion times relative to the undisturbed run.

    python benchmarks/scheduler_wrong_numbers.py [--made-up 5] [--jobs 60] [--rows tables restarts]
        [--data ../shared/data] [--workload 2] [--workload-jobs 160] [--seeds 1]

Told tables: every entry of every job's table is wrong by a log-normal factor of its own that never changes,
of 10 and of 30 %; with `Goodput.smooth_tables`, and without, as every other policy takes them. Told restarts:
five times too long and five times too short, with learning from those that happened, and without. Made-up
days (`synthetic_workload`, 8 nodes of 4 devices, on events, restarts of 30 s, any size at once) differ in
their seed, and so does the noise. `--data` adds a workload of Pollux, on 16 nodes in its artifact's rules
(rounds of 60 s, jobs grow at most twofold): its runs take minutes each. A row is the mean over the days, and
the range.
"""

import argparse
import dataclasses
import pathlib
from typing import Any, NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler import Goodput
from jaxgoodput.cluster.simulate import (
    Settings,
    TableTruth,
    pollux_settings,
    read_pollux_applications,
    read_pollux_workload,
    simulate,
    synthetic_applications,
    synthetic_workload,
    uniform_cluster,
)
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth

RESTART_S = 30.0


class Row(NamedTuple):
    """One kind of wrong number, and whether anything is done about it."""

    title: str
    asked: float | None  # of the undisturbed average; None = only for comparison
    settings: dict[str, Any]
    policy: Goodput


PLAIN, TAKEN = Goodput(), Goodput(smooth_tables=False)
ROWS = {
    "tables": (
        Row("tables wrong by 1 %: what chance alone does", None, {"told_noise": 0.01}, PLAIN),
        Row("tables wrong by 10 %, smoothed", 1.02, {"told_noise": 0.1}, PLAIN),
        Row("tables wrong by 10 %, as told", None, {"told_noise": 0.1}, TAKEN),
        Row("tables wrong by 30 %, smoothed", 1.15, {"told_noise": 0.3}, PLAIN),
        Row(
            "tables wrong by 30 %, smoothed, error declared",
            1.15,
            {"told_noise": 0.3, "declared_errors": True},
            PLAIN,
        ),
        Row("tables wrong by 30 %, as told", None, {"told_noise": 0.3}, TAKEN),
    ),
    "restarts": tuple(
        Row(
            f"restarts told {factor:g} times what they take, {'learned' if learned else 'as told'}",
            1.03 if learned else None,
            {"told_restart_s": factor * RESTART_S, "learned_restarts": learned},
            PLAIN,
        )
        for factor in (5.0, 0.2)
        for learned in (True, False)
    ),
}


def made_up(num_days, num_jobs):
    """(jobs, truth, settings) of the days."""
    truth = ModelTruth(synthetic_applications({"t4": 1.0}))
    for seed in range(num_days):
        yield (
            synthetic_workload(num_jobs, seed=seed),
            truth,
            Settings(round_s=None, rounding=False, growth=None, restart_s=RESTART_S, seed=seed),
        )


def published(folder, number, num_jobs, num_seeds):
    """The same of one workload of Pollux; only the noise differs by seed."""
    truth = TableTruth(read_pollux_applications(folder / "pollux" / "traces"))
    path = folder / "pollux" / "workloads" / f"workload-{number}.csv"
    jobs = read_pollux_workload(path)[:num_jobs]
    for seed in range(num_seeds):
        yield jobs, truth, pollux_settings(restart_s=RESTART_S, seed=seed)


def measure(title, days, names, num_nodes):
    cluster = uniform_cluster("t4", num_nodes, 4)
    print(
        f"\n{title}\n{'':52s} {'average':>8s} {'range':>15s} {'asked':>6s} {'':4s} {'p99':>6s} "
        f"{'rst':>5s} {'ms/dec.':>8s}",
        flush=True,
    )
    days, undisturbed = list(days), {}

    def run(day, policy, changes):
        jobs, truth, settings = day
        rules = dataclasses.replace(settings, **changes)
        return simulate(jobs, cluster, policy, truth, settings=rules).summary()

    for i, day in enumerate(days):
        same = next((undisturbed[k] for k in undisturbed if days[k][0] is day[0]), None)
        undisturbed[i] = run(day, PLAIN, {}) if same is None else same
    said = np.mean([found["average_jct_s"] for found in undisturbed.values()])
    restarts = np.mean([found["restarts_per_job"] for found in undisturbed.values()])
    each_ms = 1e3 * np.mean([found["median_decision_s"] for found in undisturbed.values()])
    heading = f"undisturbed: {said:,.0f} s"
    print(f"{heading:52s} {'1':>8s} {'':31s} {restarts:5.2f} {each_ms:8.1f}", flush=True)
    for row in (row for name in names for row in ROWS[name]):
        average, p99, restarts, each_ms = [], [], [], []
        for i, day in enumerate(days):
            if row.settings.get("told_noise") is None and i and days[0][0] is day[0]:
                continue  # without noise the seed changes nothing
            found = run(day, row.policy, row.settings)
            average.append(found["average_jct_s"] / undisturbed[i]["average_jct_s"])
            p99.append(found["p99_jct_s"] / undisturbed[i]["p99_jct_s"])
            restarts.append(found["restarts_per_job"])
            each_ms.append(1e3 * found["median_decision_s"])
        mean = float(np.mean(average))
        holds = "-" if row.asked is None else "ok" if mean <= row.asked else "OVER"
        asked = "-" if row.asked is None else f"{row.asked:.2f}"
        print(
            f"{row.title:52s} {mean:8.3f} {min(average):7.3f} {max(average):7.3f} {asked:>6s} "
            f"{holds:4s} {np.mean(p99):6.3f} {np.mean(restarts):5.2f} {np.mean(each_ms):8.1f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--made-up", type=int, default=5, metavar="DAYS")
    parser.add_argument("--jobs", type=int, default=60, help="of a made-up day")
    parser.add_argument("--rows", nargs="*", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--data", type=pathlib.Path, help="the folder that holds pollux/")
    parser.add_argument("--workload", type=int, default=2)
    parser.add_argument("--workload-jobs", type=int, default=160, help="the first so many of it")
    parser.add_argument("--seeds", type=int, default=1, help="of the noise on that workload")
    options = parser.parse_args()
    if options.made_up:
        title = f"made-up days of {options.jobs} jobs, seeds 0 to {options.made_up - 1}"
        measure(title, made_up(options.made_up, options.jobs), options.rows, 8)
    if options.data is not None:
        days = published(options.data, options.workload, options.workload_jobs, options.seeds)
        title = f"Pollux workload-{options.workload}, first {options.workload_jobs} jobs"
        measure(title, days, options.rows, 16)


if __name__ == "__main__":
    main()
