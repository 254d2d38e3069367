"""Compares the default policy with published ones when there are more jobs than devices.

    python benchmarks/scheduler_pressure.py [--all] [--worlds NAME ...] [--skip worlds pair gang deadlines]

Worlds of made-up jobs (`synthetic_workload`), two to five times as many as devices, on events, restarts of
30 s. Every policy sees the same jobs, and none is told how much work they have left, except of jobs with a
deadline, which declare it. Sia and Pollux, whose program is solved exactly, come twice: with their
published limit, at most twice the largest size that a job has run on (*twofold*), and without (*any*).
`Goodput` has no limit, "las" is Tiresias (least attained service), "fifo" is Static (first in, first out);
the last two run jobs on the devices that their users asked for. The ratio is to the best of all of these
but fifo.

Without `--all` the worlds are the first five, which take a few minutes; each line says its seed. *To alone*
is the longest wait of a job in the time that it and the jobs before it take alone. The pair rows let two
equal jobs share a device. The gang rows put one rigid gang into a stream of single-device jobs at 1.5 times
the capacity of 64 devices, and say what the gang costs the others. Deadlines can be met by construction: a
policy that knows nothing of them (fifo, or Pollux without its limit) ends every job before its own; behind
the share that is met stand the average completion time of all jobs and of those without. "edf" runs the
earliest deadline first.
"""

import argparse
import dataclasses
import math
import time
from typing import Any, NamedTuple

import numpy as np

from jaxgoodput.cluster.published.baselines import EarliestDeadline, Static, Tiresias
from jaxgoodput.cluster.scheduler import Goodput, Pollux, Sia
from jaxgoodput.cluster.scheduler.policy import Mode, Policy
from jaxgoodput.cluster.simulate import (
    Settings,
    TraceJob,
    simulate,
    synthetic_applications,
    synthetic_workload,
    uniform_cluster,
)
from jaxgoodput.cluster.simulate.jobs.job import packed
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth

RULES = {"round_s": None, "rounding": False, "growth": None, "restart_s": 30.0}
TRUTH = ModelTruth(synthetic_applications({"t4": 1.0}))
STEPS_PER_S = 1.0 / (0.02 + 8e-4 * 128)  # of vision-small on one device at its base batch of 128
POLICIES: dict[str, tuple[Policy, Mode]] = {
    "goodput": (Goodput(), "adaptive"),
    "sia, any": (Sia(growth=None), "adaptive"),
    "sia, twofold": (Sia(), "adaptive"),
    "pollux, any": (Pollux(growth=None), "adaptive"),
    "pollux, twofold": (Pollux(), "adaptive"),
    "las": (Tiresias(), "rigid"),
    "fifo": (Static(), "rigid"),
}


class World(NamedTuple):
    """Jobs and a cluster; `rigid` jobs keep the devices that they ask for under every policy."""

    nodes: int
    each: int
    num_jobs: int
    seed: int
    hours: float = 4.0
    rigid: bool = False
    gangs: tuple[int, ...] = ()
    weights: tuple[float, ...] = (1.0,)


WORLDS = {
    "one device, 10 jobs": World(1, 1, 10, 3, hours=2.0),
    "4 devices, 40 jobs": World(1, 4, 40, 0),
    "16 devices x2": World(4, 4, 32, 1),
    "16 devices x3, rigid": World(4, 4, 48, 2, rigid=True),
    "12 devices x5, burst": World(3, 4, 60, 4, hours=0.2),
    "16 devices x3": World(4, 4, 48, 5),
    "16 devices x5": World(4, 4, 80, 6),
    "16 devices x3, priorities": World(4, 4, 48, 7, weights=(1.0, 2.0, 4.0)),
    "one device, 5 jobs, burst": World(1, 1, 5, 8, hours=0.1),
    "16 devices x5, rigid": World(4, 4, 80, 9, rigid=True),
    "64 devices x2, gangs of 8-32": World(8, 8, 128, 10, rigid=True, gangs=(8, 16, 32)),
    "32 devices x3, gangs of 8-16, burst": World(
        4, 8, 96, 11, hours=0.2, rigid=True, gangs=(8, 16)
    ),
}
FEW = tuple(WORLDS)[:5]
PARTS = ("worlds", "pair", "gang", "deadlines")


def jobs_of(world):
    devices = world.nodes * world.each
    jobs = synthetic_workload(
        world.num_jobs,
        hours=world.hours,
        seed=world.seed,
        largest=min(16, devices),
        per_node=world.each,
    )
    rng = np.random.default_rng([world.seed, 0x70726573])
    changed = []
    for i, job in enumerate(jobs):
        fields: dict[str, Any] = {"weight": float(rng.choice(world.weights))}
        if world.rigid:
            fields["mode"] = "rigid"
        # Every eighth job is a gang, of a program that scales so far.
        if world.gangs and i % 8 == 0:
            size = int(rng.choice(world.gangs))
            fields |= {
                "application": "vision-small",
                "num_devices": size,
                "global_batch_size": 128 * size,
                "num_steps": int(3600 * 0.5 * STEPS_PER_S),
            }
        changed.append(dataclasses.replace(job, **fields))
    return tuple(changed)


def run(jobs, cluster, policy, mode: Mode = "adaptive"):
    """The result and its CPU seconds."""
    begun = time.process_time()
    found = simulate(jobs, cluster, policy, TRUTH, settings=Settings(**RULES, mode=mode))
    return found, time.process_time() - begun


def longest_wait_s(result, id_=None):
    """The longest time without a device of any job, or of that one, from its submission to its end."""
    longest = 0.0
    for job in result.jobs if id_ is None else [j for j in result.jobs if j.id == id_]:
        ends = [job.submit_s, *(stay.end_s for stay in job.intervals)]
        starts = [*(stay.start_s for stay in job.intervals), job.finish_s]
        longest = max([longest, *(b - a for a, b in zip(ends, starts, strict=True))])
    return longest


def worst_wait(result, jobs, per_node):
    """The longest wait of a job, in the time that it and the jobs before it take alone, at its largest.

    Alone it runs on the devices that its user asked for; before it are the jobs that are there when it comes.
    """
    ends = {job.id: job.finish_s for job in result.jobs}
    waits = {job.id: longest_wait_s(result, job.id) for job in result.jobs}
    settings, worst = Settings(**RULES), 0.0
    for index, job in enumerate(jobs):
        ahead = sum(o.submit_s <= job.submit_s < ends[o.id] for o in jobs)
        counts = packed(job.num_devices, per_node)
        alone_s = TRUTH.job(job, settings, index).isolated_s("t4", counts)
        worst = max(worst, waits[job.id] / (alone_s * ahead))
    return worst


def verdict(holds):
    return "ok" if holds else "OVER"


def worlds(names):
    heading = ("avg h", "p99 h", "restarts", "most", "wait h", "to alone", "CPU s")
    print(f"{'world, seed':44s} {'policy':15s} " + " ".join(f"{h:>8s}" for h in heading))
    ratios = []
    for name in names:
        world = WORLDS[name]
        cluster = uniform_cluster("t4", world.nodes, world.each)
        average = {}
        for label, (policy, mode) in POLICIES.items():
            found, cpu_s = run(jobs_of(world), cluster, policy, mode)
            total = found.summary()
            average[label] = total["average_jct_s"]
            print(
                f"{f'{name}, {world.seed}':44s} {label:15s} {average[label] / 3600:8.3f} "
                f"{total['p99_jct_s'] / 3600:8.2f} {total['restarts_per_job']:8.2f} "
                f"{max(job.restarts for job in found.jobs):8d} "
                f"{longest_wait_s(found) / 3600:8.2f} "
                f"{worst_wait(found, jobs_of(world), world.each):8.2f} {cpu_s:8.1f}"
                + (
                    f"  asked <= 5 restarts {verdict(total['restarts_per_job'] <= 5)}, <= 2 to alone"
                    if label == "goodput"
                    else ""
                ),
                flush=True,
            )
        best = min(average[label] for label in average.keys() - {"goodput", "fifo"})
        ratios.append(average["goodput"] / best)
        print(
            f"{'':44s} average to the best but fifo: {ratios[-1]:.3f}, asked <= 1.02 "
            f"{verdict(ratios[-1] <= 1.02)}",
            flush=True,
        )
    mean = float(np.mean(ratios)) if ratios else math.nan
    print(f"mean of the ratios {mean:.3f}, asked <= 0.9 {verdict(mean <= 0.9)}", flush=True)


def single(name, hours, submit_s=0.0, num_devices=1, **fields):
    """A job of about so many hours on its devices."""
    return TraceJob(
        id=name,
        submit_s=submit_s,
        application="vision-small",
        num_devices=num_devices,
        global_batch_size=128 * num_devices,
        num_steps=max(int(3600 * hours * STEPS_PER_S), 1),
        **fields,
    )


def pair():
    print("\ntwo equal jobs, one device; asked: at most 4 restarts each")
    for hours in (0.03, 0.5, 3.0):
        for label in ("goodput", "sia, any"):
            jobs = [single("a", hours), single("b", hours)]
            found, _ = run(jobs, uniform_cluster("t4", 1, 1), POLICIES[label][0])
            ends = ", ".join(f"{job.finish_s:.0f} s" for job in found.jobs)
            most = max(job.restarts for job in found.jobs)
            print(
                f"{hours:5.2f} h {label:15s} ends {ends}; restarts {most} {verdict(most <= 4)}",
                flush=True,
            )


def stream(num_devices, load, hours, seed, each_h=1.0):
    """Single-device jobs of about `each_h` hours that want `load` times the devices that there are."""
    rng = np.random.default_rng([seed, 0x67616E67])
    count = int(load * num_devices * hours / each_h)
    return [
        single(f"s{i}", each_h * float(rng.lognormal(-0.32, 0.8)), float(at), mode="rigid")
        for i, at in enumerate(np.sort(rng.random(count)) * hours * 3600.0)
    ]


def gang(sizes, hours):
    print("\none rigid gang at hour 1 among single devices at 1.5 times the capacity of 64, seed 0")
    cluster = uniform_cluster("t4", 8, 8)
    others = stream(64, 1.5, hours, 0)
    for label, policy in (
        ("no gang", Goodput()),
        ("goodput", Goodput()),
        ("no guarantee", Goodput(guaranteed=0.0)),
        ("sia, any", Sia(growth=None)),
    ):
        for size in sizes if label != "no gang" else (0,):
            extra = [single("gang", 0.5, 3600.0, size, mode="rigid")] if size else []
            found, cpu_s = run([*others, *extra], cluster, policy)
            done = {job.id: job for job in found.jobs}
            mean_h = np.mean([done[job.id].jct_s for job in others]) / 3600
            said = f"others' average {mean_h:.3f} h, restarts {found.summary()['restarts_per_job']:.2f}"
            if size:
                its = done["gang"]
                wait_h = (its.start_s - its.submit_s) / 3600
                said += (
                    f"; gang of {size} starts after {wait_h:.2f} h (asked <= 2 "
                    f"{verdict(wait_h <= 2)}), ends after {its.jct_s / 3600:.2f} h"
                )
            print(f"{label:15s} {said}; CPU {cpu_s:.0f} s", flush=True)


def deadlines():
    print("\ndeadlines 10-50 % later than another policy ends each job; asked: 95 % met")
    policies: dict[str, tuple[Policy, Mode]] = {**POLICIES, "edf": (EarliestDeadline(), "rigid")}
    for world in (World(4, 4, 32, 1), World(1, 4, 40, 0), World(4, 4, 48, 2), World(8, 8, 128, 10)):
        cluster = uniform_cluster("t4", world.nodes, world.each)
        for by, every in (("fifo", 1), ("pollux, any", 2), ("pollux, any", 1)):
            jobs = jobs_of(world)
            before, _ = run(jobs, cluster, *policies[by])
            jct_s = {job.id: job.jct_s for job in before.jobs}
            rng = np.random.default_rng([world.seed, 0x64756520])
            jobs = [
                dataclasses.replace(
                    job,
                    deadline_s=job.submit_s + jct_s[job.id] * (1.0 + rng.uniform(0.1, 0.5)),
                )
                if i % every == 0
                else job
                for i, job in enumerate(jobs)
            ]
            said = []
            for label, (policy, mode) in policies.items():
                found, _ = run(jobs, cluster, policy, mode)
                due = [job for job in found.jobs if job.deadline_s is not None]
                met = sum(job.is_in_time for job in due) / len(due)
                others = [job.jct_s for job in found.jobs if job.deadline_s is None]
                said.append(
                    f"{label} {met:.0%} ({found.summary()['average_jct_s'] / 3600:.2f} h"
                    + (f", without {np.mean(others) / 3600:.2f} h" if others else "")
                    + f", {found.summary()['restarts_per_job']:.1f} restarts)"
                )
            print(
                f"{world.nodes}x{world.each}, seed {world.seed}, {len(jobs)} jobs, one of {every} with a "
                f"deadline set by {by}: {'; '.join(said)}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="all worlds, and longer streams")
    parser.add_argument("--worlds", nargs="*", choices=[*WORLDS], help="these only")
    parser.add_argument("--skip", nargs="*", choices=[*PARTS], default=[])
    options = parser.parse_args()
    if "worlds" not in options.skip:
        names = options.worlds if options.worlds is not None else WORLDS if options.all else FEW
        worlds(names)
    if "pair" not in options.skip:
        pair()
    if "deadlines" not in options.skip:
        deadlines()
    if "gang" not in options.skip:
        gang((8, 32), hours=12.0 if options.all else 3.0)


if __name__ == "__main__":
    main()
