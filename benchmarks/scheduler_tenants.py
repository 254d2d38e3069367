"""What guarantees, limits and shares cost the jobs: tenants, beside the same jobs without them.

    python benchmarks/scheduler_tenants.py [--hours 24] [--seed 0]

Simulated time, restarts of 30 s, made-up jobs that want more than there is. `shares`: two tenants that are
always busy, weights 1 and 2; asked: device-hours within 10 % of 1 : 2 over a day. `guarantees`: a lab of two
teams and a newcomer; asked: while a tenant's jobs wait it has what it is guaranteed, two decisions later at
the latest. `limits`: one tenant may have half of the devices and another may spend so much an hour; asked:
never more. Each row: jobs, average completion time, restarts per job; then the tenants.
"""

import argparse
import dataclasses
import time

import numpy as np

from jaxgoodput.cluster.scheduler import Goodput
from jaxgoodput.cluster.simulate import (
    Settings,
    TraceJob,
    simulate,
    synthetic_applications,
    uniform_cluster,
)
from jaxgoodput.cluster.simulate.comparison import tenants_table
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth
from jaxgoodput.specs import Tenant

TRUTH = ModelTruth(synthetic_applications({"t4": 1.0}))
STEPS_PER_S = 1.0 / (0.02 + 8e-4 * 128)  # of vision-small on one device at its base batch of 128
RULES = Settings(
    round_s=None, rounding=False, growth=None, restart_s=30.0, min_gap_s=60.0, max_gap_s=600.0
)


def stream(tenant, load, num_devices, seed, *, start_h=0.0, end_h=24.0, hours=2.0):
    """Jobs of about `hours` on one device that want `load` times the devices that there are."""
    rng = np.random.default_rng([seed, sum(map(ord, tenant))])
    count = int(load * num_devices * (end_h - start_h) / hours)
    at_s = 3600.0 * np.sort(rng.uniform(start_h, end_h, count))
    return [
        TraceJob(
            id=f"{tenant}-{i:04d}",
            submit_s=float(submit_s),
            application="vision-small",
            global_batch_size=128,
            num_steps=max(int(3600 * hours * rng.lognormal(-0.32, 0.8) * STEPS_PER_S), 1),
            tenant=tenant,
        )
        for i, submit_s in enumerate(at_s)
    ]


def run(jobs, cluster, policy=None):
    return simulate(jobs, cluster, policy or Goodput(), TRUTH, settings=RULES)


def had_h(result, tenant, begin_s, end_s):
    """Device-hours of a tenant's jobs between two moments."""
    return sum(
        max(min(stay.end_s, end_s) - max(stay.start_s, begin_s), 0.0) * stay.num_devices
        for job in result.jobs
        if job.tenant in tenant
        for stay in job.intervals
    ) / 3600.0  # fmt: skip


def in_use(result, tenants):
    """(moments, devices of these tenants from each on), and the moments at which a job of theirs waits."""
    change: dict[float, int] = {}
    for job in result.jobs:
        if job.tenant in tenants:
            for stay in job.intervals:
                change[stay.start_s] = change.get(stay.start_s, 0) + stay.num_devices
                change[stay.end_s] = change.get(stay.end_s, 0) - stay.num_devices
    moments = np.array(sorted(change))
    return moments, np.cumsum([change[moment] for moment in moments.tolist()])


def waits(result, tenants):
    """(begin, end) of every wait of a job without devices."""
    found = []
    for job in result.jobs:
        if job.tenant in tenants:
            ends = [job.submit_s, *(stay.end_s for stay in job.intervals)]
            starts = [*(stay.start_s for stay in job.intervals), job.finish_s]
            found += [(a, b) for a, b in zip(ends, starts, strict=True) if b > a]
    return found


def below_guarantee_s(result, tenants, guaranteed):
    """The longest stretch of a wait during which its tenant had less than it is guaranteed."""
    moments, devices = in_use(result, tenants)
    longest = 0.0
    for begin, end in waits(result, tenants):
        inside = moments[(moments > begin) & (moments < end)]
        edges = np.concatenate([[begin], inside, [end]])
        at = np.searchsorted(moments, edges[:-1], side="right") - 1
        short = np.where(at >= 0, devices[np.maximum(at, 0)], 0) < guaranteed
        stretch = 0.0
        for is_short, span in zip(short.tolist(), np.diff(edges).tolist(), strict=True):
            stretch = stretch + span if is_short else 0.0
            longest = max(longest, stretch)
    return longest


def say(name, result, cpu_s):
    total = result.summary()
    print(
        f"{name:28s} {len(result.jobs):5d} jobs, average {total['average_jct_s'] / 3600:6.3f} h, "
        f"p99 {total['p99_jct_s'] / 3600:6.2f} h, {total['restarts_per_job']:5.2f} restarts per job; "
        f"CPU {cpu_s:.0f} s",
        flush=True,
    )


def timed(jobs, cluster):
    begun = time.process_time()
    result = run(jobs, cluster)
    return result, time.process_time() - begun


def verdict(holds):
    return "ok" if holds else "OVER"


def world(name, jobs, bare, **shared):
    """The same jobs with and without tenants; both results."""
    without, spent = timed(jobs, bare)
    say(f"{name}, no tenants", without, spent)
    result, spent = timed(jobs, dataclasses.replace(bare, **shared))
    say(f"{name}, tenants", result, spent)
    ratio = result.summary()["average_jct_s"] / without.summary()["average_jct_s"]
    print(f"{'':28s} average completion time {ratio:.3f} times that without", flush=True)
    print("\n".join(f"    {line}" for line in tenants_table([result]).splitlines()))
    return without, result


def shares(hours, seed):
    bare = uniform_cluster("t4", 2, 4)
    tenants = (Tenant(name="one"), Tenant(name="two", weight=2.0))
    jobs = stream("one", 0.7, 8, seed, end_h=hours) + stream("two", 1.1, 8, seed, end_h=hours)
    for name, found in zip(
        ("no tenants", "tenants"), world("shares", jobs, bare, tenants=tenants), strict=True
    ):
        one, two = (had_h(found, t, 0.0, hours * 3600.0) for t in ("one", "two"))
        asked = (
            f", asked 1.8 to 2.2 {verdict(1.8 <= two / one <= 2.2)}" if name == "tenants" else ""
        )
        print(f"    {name}: {one:.0f} and {two:.0f} device-hours, 1 : {two / one:.2f}{asked}")


def guarantees(hours, seed):
    bare = uniform_cluster("t4", 2, 4)
    tenants = (
        Tenant(name="lab", guaranteed=5),
        Tenant(name="a", parent="lab", guaranteed=2),
        Tenant(name="b", parent="lab", guaranteed=2),
        Tenant(name="c", guaranteed=2),
    )
    jobs = stream("a", 0.5, 8, seed, end_h=hours) + stream("d", 0.6, 8, seed, end_h=hours)
    jobs += stream("b", 0.5, 8, seed, start_h=hours / 4, end_h=hours / 2)
    jobs += stream("c", 0.5, 8, seed, start_h=hours / 3, end_h=hours / 1.5)
    _, result = world("guarantees", jobs, bare, tenants=tenants)
    for tenant, its in (("a", "a"), ("b", "b"), ("c", "c"), ("lab", "ab")):
        sure = next(t.guaranteed for t in tenants if t.name == tenant)
        short_s = below_guarantee_s(result, its, sure)
        print(
            f"    {tenant}: at most {short_s:.0f} s below its {sure} devices while its jobs wait, asked <= "
            f"{2 * RULES.min_gap_s:.0f} {verdict(short_s <= 2 * RULES.min_gap_s + 1e-3)}"
        )


def limits(hours, seed):
    bare = dataclasses.replace(uniform_cluster("t4", 2, 4), price_per_hour={"t4": 0.5})
    tenants = (Tenant(name="one", limit=4), Tenant(name="two", budget_per_hour=1.0))
    jobs = stream("one", 0.4, 8, seed, end_h=hours) + stream("two", 0.2, 8, seed, end_h=hours)
    _, result = world("limits", jobs, bare, tenants=tenants)
    for tenant, most in (("one", 4), ("two", 2)):
        had = int(in_use(result, (tenant,))[1].max())
        print(
            f"    {tenant}: at most {had} devices at once, asked <= {most} {verdict(had <= most)}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=24.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", nargs="*", choices=["shares", "guarantees", "limits"], default=[])
    options = parser.parse_args()
    for name, part in (("shares", shares), ("guarantees", guarantees), ("limits", limits)):
        if name not in options.skip:
            part(options.hours, options.seed)


if __name__ == "__main__":
    main()
