"""Whether a plan stays the same if it is asked for again and nothing new is known.

    python benchmarks/scheduler_asked_again.py [--worlds 300] [--first 0] [--show 5]

Each world is a small cluster on which jobs of all modes have arrived, run and been paused for a while. One
decision is made and carried out. Then time passes, 0 to 3,600 s: jobs that run grow older and use devices,
declared work shrinks, and nothing arrives, ends or is measured. The policy is asked again, and each plan that
changes anything is counted: those in which each job that starts or gets fewer devices has a reason that names
what fell due (a turn, a promise or a deadline), and others. Asked: none of these.
"""

import argparse
import dataclasses
from collections import Counter
from typing import NamedTuple

import numpy as np
from scheduler_steps import carried_out, later

from jaxgoodput.cluster.scheduler import Goodput, JobView, reconcile
from jaxgoodput.cluster.scheduler.policy import Mode, Plan
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.specs import ClusterSpec, JobSpec, Node

LATER_S = (0.0, 45.0, 120.0, 400.0, 1000.0, 2000.0, 3600.0)
NAMED = (  # in reasons: what fell due
    ": its turn, after",
    ": its turn is over",
    ": it has had less than its guaranteed share",
    ": its deadline is in",
    ", now that",
    "; it is the turn of",
)


class AskedAgain(NamedTuple):
    """A plan that changes something although nothing is new."""

    seed: int
    later_s: float
    plan: Plan
    is_named: bool
    """Whether a reason names what fell due."""


def cluster_of(rng):
    """One or two kinds of devices, on 1 to 6 nodes each."""
    nodes = []
    for kind in ("a", "b")[: int(rng.integers(1, 3))]:
        size = int(rng.choice([2, 4, 8]))
        nodes += [
            Node(name=f"{kind}{i}", kind=kind, num_devices=size)
            for i in range(int(rng.integers(1, 7)))
        ]
    return ClusterSpec(nodes=tuple(nodes))


def job_of(rng, name, cluster, now_s):
    """A job that has just arrived: of any mode, some with declared work, priorities and deadlines."""
    modes: tuple[Mode, ...] = ("adaptive", "adaptive", "elastic", "rigid")
    mode = modes[int(rng.integers(len(modes)))]
    size = int(rng.choice([1, 1, 1, 2, 4, 8]))
    declares = bool(rng.random() < 0.3)
    late_s = now_s + float(rng.uniform(7200.0, 40000.0))
    spec = JobSpec(
        id=name,
        mode=mode,
        num_devices=size if mode == "rigid" else None,
        min_devices=1 if mode == "rigid" else min(size, 2),
        max_devices=max(size, int(rng.choice([4, 16, 64]))),
        weight=float(rng.choice([1.0, 1.0, 1.0, 4.0, 0.25])),
        deadline_s=late_s if declares and rng.random() < 0.3 else None,
    )
    power, of_b = float(rng.uniform(0.3, 1.0)), float(rng.uniform(0.5, 4.0))
    noise = float(rng.choice([0.0, 0.0, 0.1]))
    table = {
        s: (of_b if s.kind == "b" else 1.0)
        * s.num_devices**power
        * 0.95 ** (s.num_nodes - 1)
        * float(np.exp(noise * rng.standard_normal()))
        for s in shapes(cluster)
    }
    return JobView(
        spec=spec,
        goodput=table,
        submitted_s=now_s,
        restart_s=float(rng.choice([2.0, 30.0, 120.0])),
        largest_profiled=int(rng.choice([0, 1, 4])) if mode == "adaptive" else 1,
        remaining=float(rng.uniform(2.0, 30.0)) * 3600.0 * max(table.values())
        if declares
        else None,
    )


def lived(seed, policy):
    """A world after some decisions: its cluster, jobs, and the time of the last decision."""
    rng = np.random.default_rng([seed, 0x616761])
    cluster, now_s, views = cluster_of(rng), 0.0, []
    most = int(rng.integers(1, 2 + sum(node.num_devices for node in cluster.nodes)))
    for step in range(int(rng.integers(2, 7))):
        for i in range(int(rng.integers(0, 1 + most // 2)) if step else max(most // 2, 1)):
            views.append(job_of(rng, f"j{step}-{i}", cluster, now_s))
        cluster = dataclasses.replace(cluster, changed_s=now_s)
        views = carried_out(views, reconcile(views, cluster, policy, now_s), now_s)
        span_s = float(rng.choice([20.0, 200.0, 900.0, 4000.0]))
        views, now_s = later(views, cluster, now_s, span_s), now_s + span_s
        views = [view for view in views if view.remaining is None or view.remaining > 0.0]
    if rng.random() < 0.5:  # something is new, if only to the policy
        cluster = dataclasses.replace(cluster, changed_s=now_s)
    views = carried_out(views, reconcile(views, cluster, policy, now_s), now_s)
    return cluster, views, now_s


def asked_again(seed, policy=None, later_s=LATER_S) -> list[AskedAgain]:
    """The plans of a world that change something although nothing is new."""
    policy = policy or Goodput()
    cluster, views, now_s = lived(seed, policy)
    found = []
    for span_s in later_s:
        then = later(views, cluster, now_s, span_s)
        if any(view.remaining is not None and view.remaining <= 0.0 for view in then):
            break  # a job has ended, which is news
        plan = reconcile(then, cluster, policy, now_s + span_s)
        changed = [*plan.start, *plan.resize, *plan.pause]
        if changed:
            before = {view.spec.id: view.allocation.num_devices for view in then}
            kept = {id_ for id_ in plan.resize if plan.allocations[id_].num_devices >= before[id_]}
            # A job may take what others have left; those that start or lose devices say what fell due.
            said = [plan.reasons[id_] for id_ in changed if id_ not in kept]
            is_named = bool(said) and all(any(name in one for name in NAMED) for one in said)
            found.append(AskedAgain(seed, span_s, plan, is_named))
    return found


def in_words(found: AskedAgain):
    plan = found.plan
    parts = [
        f"{what} {id_} ({plan.reasons[id_]})"
        for what, ids in (("start", plan.start), ("resize", plan.resize), ("pause", plan.pause))
        for id_ in ids
    ]
    return f"world {found.seed}, {found.later_s:.0f} s later: " + "; ".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", type=int, default=5, help="changes without a reason to print")
    options = parser.parse_args()
    named, unnamed, worlds, shown = Counter(), Counter(), set(), 0
    for seed in range(options.first, options.first + options.worlds):
        for found in asked_again(seed):
            (named if found.is_named else unnamed)[found.later_s] += 1
            if found.is_named:
                continue
            worlds.add(seed)
            if shown < options.show:
                print(in_words(found), flush=True)
                shown += 1
    print(f"{'seconds later':>14s} {'changed, due':>13s} {'changed, nothing due':>21s}")
    for span_s in LATER_S:
        print(f"{span_s:14.0f} {named[span_s]:13d} {unnamed[span_s]:21d}")
    verdict = "ok" if not worlds else "OVER"
    print(
        f"worlds that change with nothing due: {len(worlds)} of {options.worlds}, asked 0 {verdict}"
    )


if __name__ == "__main__":
    main()
