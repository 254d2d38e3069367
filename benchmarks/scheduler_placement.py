"""Whether jobs that are hard to place get their turns: gangs, odd sizes, racks and uneven nodes.

    python benchmarks/scheduler_placement.py [--worlds 1000] [--first 0]

The first table has seven cases of jobs that no table, no power of two or no flat cluster describes. Then
random worlds of endless jobs: nothing ever ends, so a job runs only if the policy gives it a turn. The
longest wait of each world is compared with the longest under round-robin, which every hour places the jobs
that have waited longest first, each on its least size, wherever there is room. *Idle* counts the plans in
which a job waits that would have fitted onto free devices. *Dropped* counts jobs that were chosen but not
placed.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.cluster.scheduler import Goodput, JobView, reconcile
from jaxgoodput.cluster.scheduler.constraints import constraints_of
from jaxgoodput.cluster.scheduler.placement.packing import JobParts, pack
from jaxgoodput.cluster.scheduler.shapes import chunks, domain_of, shape_of
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape

TURN_S = 3600.0  # of round-robin
STEP_S = 900.0
MOST_WAIT = 4.0  # times the wait under round-robin


def cluster_of(sizes, *, per_rack=None, kind="k"):
    """Nodes of these sizes, in racks of `per_rack`."""
    return ClusterSpec(
        nodes=tuple(
            Node(
                name=f"{kind}{i}",
                kind=kind,
                num_devices=size,
                labels={} if per_rack is None else {"rack": f"{kind}{i // per_rack}"},
            )
            for i, size in enumerate(sizes)
        )
    )


def gang(name, size, level=None, submitted_s=0.0, **fields):
    """A rigid job without a table."""
    spec = JobSpec(id=name, mode="rigid", num_devices=size, level=level, **fields)
    return JobView(spec=spec, submitted_s=submitted_s)


def random_world(seed):
    """A cluster of 2 to 6 uneven nodes in racks, and 3 to 9 jobs each of which could run alone."""
    rng = np.random.default_rng([seed, 0x77616974])
    size = int(rng.choice([4, 6, 8]))
    sizes = [size if rng.random() < 0.7 else int(rng.integers(2, size + 1)) for _ in range(6)]
    cluster = cluster_of(sizes[: int(rng.integers(2, 7))], per_rack=int(rng.integers(2, 4)))
    jobs = []
    for i in range(int(rng.integers(3, 10))):
        level = "rack" if rng.random() < 0.3 else None
        num = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16]))
        at_s = float(rng.uniform(0.0, 3600.0))
        weight = float(rng.choice([0.5, 1.0, 1.0, 2.0]))
        if rng.random() < 0.7:
            jobs.append(gang(f"j{i}", num, level, at_s, weight=weight))
        else:
            most = num + int(rng.integers(0, 4))
            spec = JobSpec(
                id=f"j{i}",
                mode="elastic",
                min_devices=num,
                max_devices=most,
                level=level,
                weight=weight,
            )
            jobs.append(JobView(spec=spec, submitted_s=at_s))
    refused = constraints_of(jobs, cluster, 0.0).refused
    return cluster, [view for view in jobs if view.spec.id not in refused]


@dataclass
class Outcome:
    """What happened in a world."""

    waits_s: dict[str, float]
    """Longest wait of each job, the one that has not ended included."""
    ran_s: dict[str, float]
    idle: int = 0
    """Plans in which a job waits that would fit onto free devices."""
    idle_share: float = 0.0
    """Devices that no job had while one waited, as a share of all."""
    dropped: int = 0
    """Jobs that were chosen and not placed."""
    wrong: list[str] = field(default_factory=list)
    """Plans that are impossible, in words."""

    @property
    def longest_s(self):
        return max(self.waits_s.values(), default=0.0)


def least_shape(view, cluster):
    """The smallest shape that a job can have, or None."""
    checked = constraints_of([view], cluster, 0.0).views[view.spec.id]
    return min(checked.goodput, key=lambda s: (s.num_devices, s), default=None)


def parts_of(view, shape: Shape, nodes):
    """The job as `pack` wants it, on nodes of one kind."""
    level = view.spec.level if shape.num_nodes > 1 else None
    domains = None
    if level is not None:
        names = [domain_of(node, level) for node in nodes]
        domains = tuple(names.index(name) for name in names)
    size = max(node.num_devices for node in nodes)
    return JobParts(tuple(chunks(shape, size)), domains, frozenset())


def round_robin(cluster, jobs, hours):
    """The longest wait of each job if each hour the ones that have waited longest are placed first."""
    nodes, free = cluster.nodes, [node.num_usable for node in cluster.nodes]
    shapes = {v.spec.id: least_shape(v, cluster) for v in jobs}
    wanted = {v.spec.id: parts_of(v, shape, nodes) for v in jobs if (shape := shapes[v.spec.id])}
    since_s = {v.spec.id: v.submitted_s for v in jobs if v.spec.id in wanted}
    waits_s = dict.fromkeys(since_s, 0.0)
    for turn in range(int(hours * 3600.0 / TURN_S)):
        now_s = turn * TURN_S
        there = [v.spec.id for v in jobs if v.submitted_s <= now_s and v.spec.id in wanted]
        runs: list[str] = []
        for id_ in sorted(there, key=lambda id_: since_s[id_]):
            trial = sorted([*runs, id_], key=lambda one: -sum(wanted[one].sizes))
            if pack(free, [wanted[one] for one in trial]) is not None:
                runs.append(id_)
        for id_ in runs:
            waits_s[id_] = max(waits_s[id_], now_s - since_s[id_])
            since_s[id_] = now_s + TURN_S
    return waits_s


def live(cluster, jobs, hours, policy=None, step_s=STEP_S):
    """Plan every `step_s` for jobs that never end."""
    policy = policy or Goodput()
    total = sum(node.num_usable for node in cluster.nodes)
    views = {v.spec.id: v for v in jobs}
    since_s = {id_: v.submitted_s for id_, v in views.items()}
    found = Outcome(waits_s=dict.fromkeys(views, 0.0), ran_s=dict.fromkeys(views, 0.0))
    rounds, idle = int(hours * 3600.0 / step_s), 0
    for turn in range(rounds):
        now_s = turn * step_s
        there = [v for v in views.values() if v.submitted_s <= now_s]
        if not there:
            continue
        plan = reconcile(there, cluster, policy, now_s)
        found.wrong += impossible(plan, there, cluster)
        found.dropped += sum("do not fit beside" in why for why in plan.reasons.values())
        unused = total - sum(a.num_devices for a in plan.allocations.values())
        waiting = [v for v in there if not plan.allocations[v.spec.id].devices]
        idle += unused if waiting else 0
        found.idle += any(fits_in(v, plan, cluster) for v in waiting)
        for view in there:
            id_ = view.spec.id
            given = plan.allocations[id_]
            if given.devices:
                if not view.allocation.devices:
                    found.waits_s[id_] = max(found.waits_s[id_], now_s - since_s[id_])
                found.ran_s[id_] += step_s
            elif view.allocation.devices:
                since_s[id_] = now_s
            views[id_] = after(view, given, now_s, step_s)
    end_s = rounds * step_s
    for id_, view in views.items():
        if not view.allocation.devices:
            found.waits_s[id_] = max(found.waits_s[id_], end_s - since_s[id_])
    found.idle_share = idle / max(total * rounds, 1)
    return found


def after(view, given: Allocation, now_s, span_s):
    """The job a while later, under its new allocation."""
    changed = dict(given.devices) != dict(view.allocation.devices)
    had = sum(view.received_s.values())
    runs = bool(given.devices)
    paused_s = now_s if changed and not runs else None if runs else view.paused_s
    return dataclasses.replace(
        view,
        allocation=given,
        since_s=None if not runs else now_s if changed else view.since_s,
        paused_s=paused_s,
        restoring_until_s=now_s + view.restart_s if runs and changed else None,
        num_restarts=view.num_restarts + (runs and changed and had > 0),
        received_s={"k": had + span_s * given.num_devices},
        fraction_received_s={"k": sum(view.fraction_received_s.values()) + runs * span_s},
    )


def fits_in(view, plan, cluster):
    """Whether a waiting job would fit onto the devices that no job has, if no other job moves."""
    shape = least_shape(view, cluster)
    if shape is None:
        return False
    used = dict.fromkeys((node.name for node in cluster.nodes), 0)
    for given in plan.allocations.values():
        for name, local in given.devices.items():
            used[name] += len(local)
    free = [node.num_usable - used[node.name] for node in cluster.nodes]
    return pack(free, [parts_of(view, shape, cluster.nodes)]) is not None


def impossible(plan, jobs, cluster):
    """What is wrong with a plan: a device given twice, a gang across its domain, a size not asked for."""
    nodes = {node.name: node for node in cluster.nodes}
    taken, wrong = set(), []
    for view in jobs:
        given, spec = plan.allocations[view.spec.id], view.spec
        devices = {(name, i) for name, local in given.devices.items() for i in local}
        if taken & devices or any(i >= nodes[name].num_devices for name, i in devices):
            wrong.append(f"{spec.id} has devices that do not exist or are another's")
        taken |= devices
        if spec.level and len({domain_of(nodes[name], spec.level) for name in given.devices}) > 1:
            wrong.append(f"{spec.id} lies in several domains of {spec.level}")
        if devices and spec.num_devices not in (None, len(devices)):
            wrong.append(f"{spec.id} has {len(devices)} devices")
    return wrong


def could_join(view, plan, jobs, cluster):
    """Whether a waiting job would fit beside all jobs that run, if they may move."""
    shape = least_shape(view, cluster)
    if shape is None:
        return False
    kind_of = {node.name: node.kind for node in cluster.nodes}
    wanted = [parts_of(view, shape, cluster.nodes)]
    for other in jobs:
        there = shape_of(plan.allocations[other.spec.id].devices, kind_of)
        if there is not None:
            wanted.append(parts_of(other, there, cluster.nodes))
    wanted.sort(key=lambda parts: (-sum(parts.sizes), parts.domains is None))
    return pack([node.num_usable for node in cluster.nodes], wanted) is not None


def stream(num_jobs=40, seed=0):
    """Jobs that arrive within two hours, a third of them gangs of 16 in racks, with hours of work."""
    rng = np.random.default_rng([seed, 0x7261636B])
    jobs = []
    for i in range(num_jobs):
        at_s = float(rng.uniform(0.0, 2 * 3600.0))
        if i % 3 == 0:
            view = gang(f"g{i}", 16, "rack", at_s)
        else:
            view = gang(f"s{i}", int(rng.choice([1, 2, 3, 4, 5, 6, 8])), None, at_s)
        jobs.append((view, float(rng.uniform(0.5, 4.0)) * 3600.0))
    return jobs


def run_stream(cluster, jobs, policy=None, step_s=STEP_S):
    """Live through jobs that end after some seconds on their devices.

    Returns the share of devices that is idle while a job waits, and while one waits that would fit beside the
    jobs that run, dropped jobs, and hours until all have ended.
    """
    policy = policy or Goodput()
    total = sum(node.num_usable for node in cluster.nodes)
    views = {view.spec.id: view for view, _ in jobs}
    left_s = {view.spec.id: work_s for view, work_s in jobs}
    idle = could = dropped = 0
    device_steps, now_s = 0, 0.0
    while views:
        there = [v for v in views.values() if v.submitted_s <= now_s]
        if there:
            plan = reconcile(there, cluster, policy, now_s)
            dropped += sum("do not fit beside" in why for why in plan.reasons.values())
            unused = total - sum(a.num_devices for a in plan.allocations.values())
            waiting = [v for v in there if not plan.allocations[v.spec.id].devices]
            device_steps += total
            idle += unused if waiting else 0
            if any(could_join(v, plan, there, cluster) for v in waiting):
                could += unused
            for view in there:
                given = plan.allocations[view.spec.id]
                views[view.spec.id] = after(view, given, now_s, step_s)
                left_s[view.spec.id] -= step_s if given.devices else 0.0
            views = {id_: v for id_, v in views.items() if left_s[id_] > 0.0}
        now_s += step_s
    return idle / device_steps, could / device_steps, dropped, now_s / 3600.0


def least_idle(jobs, num_racks=3, beside=8):
    """The share that is idle under any schedule while gangs are left, with `beside` devices beside each."""
    hours = [work_s / 3600.0 for _, work_s in jobs]
    gangs = sum(h for (v, _), h in zip(jobs, hours, strict=True) if v.spec.level) / num_racks
    others = sum(
        h * v.spec.num_devices for (v, _), h in zip(jobs, hours, strict=True) if not v.spec.level
    )
    room = num_racks * beside * gangs
    return max(room - others, 0.0) / (num_racks * (16 + beside) * gangs)


def cases():
    four = cluster_of([8] * 4)
    found, _ = live_case("a rigid job without a table", four, [gang("a", 5)], 1.0)
    assert not found.wrong
    live_case("five endless gangs of 5 on 4 nodes of 8, 48 h", four, named(5, 5), 48.0)
    racks = cluster_of([8] * 6, per_rack=3)
    live_case("three gangs of 16, two racks of 3 x 8, 12 h", racks, named(3, 16, "rack"), 12.0)
    late = [*named(4, 6), gang("late", 8, submitted_s=3600.0)]
    live_case("four gangs of 6, then one of 8, 24 h", four, late, 24.0)
    for least, most in ((3, 3), (5, 7)):
        spec = JobSpec(id="x", min_devices=least, max_devices=most)
        view = JobView(spec=spec)
        live_case(f"--min {least} --max {most}, a node of 8", cluster_of([8]), [view], 1.0)
    jobs = stream()
    idle, could, dropped, hours = run_stream(cluster_of([8] * 9, per_rack=3), jobs)
    print(
        f"{'40 jobs on 72 devices in racks':48s} idle while a job waits {idle:.1%}, while one would fit "
        f"{could:.1%}; under any schedule {least_idle(jobs):.1%}; dropped {dropped}; done after "
        f"{hours:.1f} h",
        flush=True,
    )


def named(count, size, level=None):
    return [gang(f"g{i}", size, level) for i in range(count)]


def live_case(name, cluster, jobs, hours):
    found = live(cluster, jobs, hours)
    turns = round_robin(cluster, jobs, hours)
    ran = ", ".join(f"{s / 3600:.1f}" for s in found.ran_s.values())
    print(
        f"{name:48s} h run: {ran}; longest wait {found.longest_s / 3600:.2f} h, round-robin "
        f"{max(turns.values()) / 3600:.2f} h",
        flush=True,
    )
    return found, turns


def ratio(found, turns):
    """The longest wait, in waits under round-robin; a turn of it counts at least."""
    return found.longest_s / max(TURN_S, *turns.values())


def worlds(first, count, hours):
    ratios, idle, dropped, wrong, over = [], 0, 0, 0, []
    for seed in range(first, first + count):
        cluster, jobs = random_world(seed)
        if not jobs:
            continue
        found = live(cluster, jobs, hours)
        ratios.append(ratio(found, round_robin(cluster, jobs, hours)))
        idle += found.idle
        dropped += found.dropped
        wrong += len(found.wrong)
        if ratios[-1] > MOST_WAIT or found.idle or found.dropped or found.wrong:
            over.append(seed)
    print(
        f"{len(ratios)} random endless worlds, {hours:g} h each: longest wait in waits under round-robin, "
        f"median {np.median(ratios):.2f}, worst {max(ratios):.2f} (asked <= {MOST_WAIT:g}); plans with idle "
        f"devices that fit a waiting job {idle}; dropped {dropped}; impossible {wrong}; seeds to look at "
        f"{over[:20]}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=30, help="number of random worlds")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--hours", type=float, default=36.0)
    options = parser.parse_args()
    cases()
    worlds(options.first, options.worlds, options.hours)


if __name__ == "__main__":
    main()
