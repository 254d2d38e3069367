"""How long jobs that have run are paused for others, if not many more want devices than there are.

    python benchmarks/scheduler_pauses.py [--worlds 20] [--hours 6]

Each world has 8 devices and 6 to 12 endless jobs of different scaling and priority. Some have had many hours
of devices before, so that their weights are low. A plan is made every minute. A pause is the time from the
loss of a job's last devices until it gets some again, or until the end. Asked: at most 1,800 s. Restarts are
counted per job and hour.
"""

import argparse
from typing import NamedTuple

import numpy as np
from scheduler_steps import carried_out, later

from jaxgoodput.cluster.scheduler import Goodput, JobView, reconcile
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.specs import ClusterSpec, JobSpec, Node

STEP_S = 60.0
MOST_S = 1800.0
CLUSTER = ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=8),))
SHAPES = shapes(CLUSTER)


class Pauses(NamedTuple):
    """What happened in a world."""

    longest_s: float
    restarts_per_h: float
    """Restarts per job and hour."""


def world(seed) -> list[JobView]:
    """Jobs of at least one device each, at most half as many again as there are devices."""
    rng = np.random.default_rng([seed, 0x70617573])
    jobs = []
    for i in range(int(rng.integers(6, 13))):
        power = float(rng.uniform(0.3, 1.0))
        age_s = float(rng.choice([0.0, 3600.0, 36000.0]))
        jobs.append(
            JobView(
                spec=JobSpec(
                    id=f"j{i}",
                    max_devices=8,
                    mode="elastic",
                    weight=float(rng.choice([0.25, 1.0, 1.0, 4.0])),
                ),
                goodput={s: s.num_devices**power for s in SHAPES},
                submitted_s=-age_s,
                received_s={"a": age_s * float(rng.uniform(0.5, 8.0))},
                fraction_received_s={"a": age_s * float(rng.uniform(0.5, 1.0))},
                largest_profiled=8,
            )
        )
    return jobs


def lived(jobs, hours, policy=None) -> Pauses:
    """Plan every minute for some hours."""
    policy, views = policy or Goodput(), list(jobs)
    longest_s, end_s = 0.0, hours * 3600.0
    for now_s in np.arange(0.0, end_s, STEP_S).tolist():
        plan = reconcile(views, CLUSTER, policy, now_s)
        for view in views:
            if view.paused_s is not None:
                longest_s = max(longest_s, now_s - view.paused_s)
        views = later(carried_out(views, plan, now_s), CLUSTER, now_s, STEP_S)
    restarts = sum(view.num_restarts for view in views)
    return Pauses(longest_s, restarts / len(views) / hours)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--hours", type=float, default=6.0)
    options = parser.parse_args()
    found = [lived(world(seed), options.hours) for seed in range(options.worlds)]
    longest_s = max(pauses.longest_s for pauses in found)
    over = sum(pauses.longest_s > MOST_S for pauses in found)
    some = sum(pauses.longest_s > 0.0 for pauses in found)
    restarts = float(np.mean([pauses.restarts_per_h for pauses in found]))
    verdict = "ok" if longest_s <= MOST_S else "OVER"
    print(
        f"{options.worlds} worlds, {options.hours:g} h: longest pause {longest_s:.0f} s (asked <= "
        f"{MOST_S:.0f} {verdict}), worlds with pauses {some}, with longer ones {over}; restarts per job and "
        f"hour {restarts:.2f}"
    )


if __name__ == "__main__":
    main()
