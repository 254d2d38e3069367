"""Compares `Goodput` with published policies. One table per question: requirement and result by workload.

    python benchmarks/scheduler_goodput.py ../shared/data [--workloads 1 2 3] [--held-out] [--sia]
        [--made-up DAYS] [--against-pollux]

The folder holds `pollux` and `sia` as their artifacts ship them. On Pollux's workloads the settings are the
artifact's own (rounds of 60 s, NeuMF pinned to one device, growth of at most twice what was profiled,
nothing known about the work that is left), and every average is a ratio to the published one, which was
made at restarts of 30 s. `--against-pollux` runs Pollux's own policy, solved exactly, under the very same
settings beside it: at other restarts than 30 s only that ratio compares like with like (*Pollux, 2x*: with
its published limit on growth). The work left is told in the row "declared progress" alone, and Pollux's
policy does not use it. `Goodput` was tuned on workloads 1-3; `--held-out` is 4 and 6, which it was not.
`--sia` compares it with Sia's policy in the same simulator, on 64 devices of three kinds, six workloads
that it was not tuned on: in Sia's rounds of 60 s, and both on events. On events, too, growth is at most
twofold. `--made-up` does the same on days like those that it was tuned on: Sia's applications in about
Sia's mix, arriving as the generator of workloads says.
"""

import argparse
import json
import pathlib
import time

import numpy as np

from jaxgoodput.cluster.scheduler import Goodput, Pollux, Sia
from jaxgoodput.cluster.simulate import (
    TableTruth,
    TraceJob,
    pollux_settings,
    read_cluster,
    read_pollux_applications,
    read_pollux_workload,
    read_sia_applications,
    read_sia_workload,
    sia_settings,
    simulate,
    synthetic_workload,
    uniform_cluster,
)
from jaxgoodput.cluster.simulate.scenario import CLUSTERS

HELD_OUT = (4, 6)
EVENTS = {"round_s": None, "rounding": False}  # decisions follow arrivals, ends and measurements
# title, settings, asked mean of the ratios, the most that one workload may have
POLLUX = {
    "published": ("restart 30 s", {}, 0.95, 1.02),
    "fast": ("restart 5 s", {"restart_s": 5.0}, 0.85, None),
    "events": ("on events, restart 30 s", EVENTS, None, None),
    "fast-events": ("on events, restart 5 s", {"restart_s": 5.0, **EVENTS}, 0.85, None),
    "declared": ("declared progress, restart 30 s", {"work_left": "told"}, None, None),
}
SIA = (
    ("average completion time", "average_jct_s", 0.95),
    ("p99 completion time", "p99_jct_s", 1.0),
    ("worst finish-time fairness", "worst_rho", 1.0),
)
# Of 100 jobs of a made-up day; about what Sia's workloads have.
MIX = {"cifar10": 81, "deepspeech2": 8, "bert": 5, "yolov3": 5, "imagenet": 1}


def made_up(seed):
    """A day of 160 jobs; every one that is drawn has its application's published work."""
    arrivals = synthetic_workload(160, seed=seed)
    shares = np.array(list(MIX.values())) / 100.0
    drawn = np.random.default_rng([seed, 0x73696120]).choice(list(MIX), len(arrivals), p=shares)
    return tuple(
        TraceJob(
            id=f"{name}-{i}",
            submit_s=job.submit_s,
            application=str(name),
            num_devices=1,
            global_batch_size=None,
        )
        for i, (job, name) in enumerate(zip(arrivals, drawn, strict=True))
    )


def run(jobs, cluster, policy, truth, settings):
    """What a simulation found, and its CPU seconds."""
    begun = time.process_time()
    found = simulate(jobs, cluster, policy, truth, settings=settings).summary()
    return found, time.process_time() - begun


def verdict(value, asked):
    return "-" if asked is None else "ok" if value <= asked else "OVER"


def limit(asked):
    return "-" if asked is None else f"{asked:.2f}"


def pollux(folder, truth, workloads, against, title, changes, asked, most):
    published = json.loads((folder / "results-jobload" / "pollux-1.0" / "summary.json").read_text())
    cluster = uniform_cluster("t4", 16, 4)
    print(
        f"\n{'Goodput, ' + title:46s} {'published':>10s} {'measured':>10s} {'ratio':>7s} "
        f"{'asked':>6s} {'':4s} {'median':>7s} {'p99':>8s} {'rst':>5s} {'ms/dec.':>8s} {'CPU s':>6s}"
        + (f" {'Pollux, 2x':>10s} {'ratio':>7s} {'p99':>7s}" if against else ""),
        flush=True,
    )
    ratios, to_policy = [], []
    for number in workloads:
        jobs = read_pollux_workload(folder / "workloads" / f"workload-{number}.csv")
        found, cpu_s = run(jobs, cluster, Goodput(), truth, pollux_settings(**changes))
        theirs = published["avgs"][f"workload-{number}"]
        ratios.append(found["average_jct_s"] / theirs)
        name = f"Pollux workload-{number}" + (", held out" if number in HELD_OUT else "")
        print(
            f"{name:46s} {theirs:10.2f} {found['average_jct_s']:10.2f} {ratios[-1]:7.3f} "
            f"{limit(most):>6s} {verdict(ratios[-1], most):4s} {found['median_jct_s']:7.0f} "
            f"{found['p99_jct_s']:8.0f} {found['restarts_per_job']:5.2f} "
            f"{1e3 * found['median_decision_s']:8.2f} {cpu_s:6.1f}",
            end="",
            flush=True,
        )
        if against:
            other, _ = run(jobs, cluster, Pollux(), truth, pollux_settings(**changes))
            to_policy.append(found["average_jct_s"] / other["average_jct_s"])
            p99 = found["p99_jct_s"] / other["p99_jct_s"]
            print(f" {other['average_jct_s']:10.2f} {to_policy[-1]:7.3f} {p99:7.3f}", end="")
        print(flush=True)
    mean = float(np.mean(ratios))
    print(
        f"{'mean of the ratios':46s} {'':10s} {'':10s} {mean:7.3f} {limit(asked):>6s} "
        f"{verdict(mean, asked)}"
        + (f"; to Pollux's own policy {np.mean(to_policy):.3f}" if against else ""),
        flush=True,
    )


def sia(folder, title, changes, days):
    cluster = read_cluster(CLUSTERS["sia"])
    kinds = sorted({node.kind for node in cluster.nodes})
    truth = TableTruth(read_sia_applications(folder / "traces", kinds))
    print(
        f"\n{'Goodput against Sia, 3 kinds, ' + title:46s} {'Sia, h':>10s} {'ours, h':>10s} "
        f"{'average':>7s} {'median':>7s} {'p99':>6s} {'worst FTF':>9s} {'rst':>11s} {'CPU s':>12s}",
        flush=True,
    )
    ratios = {key: [] for _, key, _ in SIA}
    for name, jobs in days.items():
        theirs, their_cpu_s = run(jobs, cluster, Sia(), truth, sia_settings(**changes))
        ours, our_cpu_s = run(jobs, cluster, Goodput(), truth, sia_settings(**changes))
        found = {key: ours[key] / theirs[key] for key in theirs if theirs[key]}
        for key in ratios:
            ratios[key].append(found[key])
        restarts = f"{theirs['restarts_per_job']:.2f}/{ours['restarts_per_job']:.2f}"
        print(
            f"{name:46s} {theirs['average_jct_s'] / 3600:10.3f} "
            f"{ours['average_jct_s'] / 3600:10.3f} {found['average_jct_s']:7.3f} "
            f"{found['median_jct_s']:7.3f} {found['p99_jct_s']:6.3f} {found['worst_rho']:9.3f} "
            f"{restarts:>11s} {f'{their_cpu_s:.1f}/{our_cpu_s:.1f}':>12s}",
            flush=True,
        )
    for title, key, asked in SIA:
        values = np.array(ratios[key])
        print(
            f"{'mean ratio of the ' + title:46s} {values.mean():7.3f} asked {asked:.2f} "
            f"{verdict(values.mean(), asked):4s} spread {values.min():.3f} to {values.max():.3f}, "
            f"standard deviation {values.std(ddof=1):.3f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--workloads", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--held-out", action="store_true", help="also Pollux workloads 4 and 6")
    parser.add_argument("--sia", action="store_true", help="also against Sia's policy")
    parser.add_argument("--made-up", type=int, default=0, metavar="DAYS", help="against Sia's too")
    parser.add_argument("--rows", nargs="*", choices=[*POLLUX], default=[*POLLUX], help="of Pollux")
    parser.add_argument(
        "--against-pollux", action="store_true", help="also Pollux's policy under the same settings"
    )
    options = parser.parse_args()
    workloads = [*options.workloads, *(HELD_OUT if options.held_out else ())]
    folder = options.data / "pollux"
    truth = TableTruth(read_pollux_applications(folder / "traces"))
    for name in options.rows if workloads else ():
        pollux(folder, truth, workloads, options.against_pollux, *POLLUX[name])
    folder = options.data / "sia"
    if options.sia:
        days = {
            f"{name}/workload-{number}": read_sia_workload(
                folder / "workloads" / name / f"workload-{number}.csv"
            )
            for name in ("philly", "saturn")
            for number in (1, 2, 3)
        }
        sia(folder, "rounds of 60 s", {}, days)
        sia(folder, "both on events", EVENTS, days)
    if options.made_up:
        days = {f"made-up day {seed}": made_up(seed) for seed in range(options.made_up)}
        sia(folder, "rounds of 60 s", {}, days)


if __name__ == "__main__":
    main()
