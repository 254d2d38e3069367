"""From jobs, cluster and policy to a plan: pure, deterministic, one for the service and the simulator.

What a policy may not change (see `situation`) is taken out of its problem first and put back afterwards;
what it answers is checked before it is believed.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxgoodput.scheduler.constraints import (
    Devices,
    Situation,
    add_devices,
    next_change_s,
    situation,
    withhold,
    words_of,
)
from jaxgoodput.scheduler.placement.placement import allocation_of
from jaxgoodput.scheduler.policy import Decision, JobView, Plan, Policy, SolverError
from jaxgoodput.scheduler.shapes import domain_of
from jaxgoodput.specs import Allocation, ClusterSpec


class PlanError(Exception):
    """A policy's answer cannot be carried out: a defect of the policy, which the message names."""


def reconcile(
    jobs: Sequence[JobView],
    cluster: ClusterSpec,
    policy: Policy,
    now_s: float,
    *,
    last: Plan | None = None,
    min_gap_s: float = 5.0,
    max_gap_s: float = 60.0,
) -> Plan:
    """What every job gets now, and why.

    The plan has an allocation (empty = none) and a reason for every job. Jobs that could not run even alone
    are named and left out; jobs on nodes that are down lose their devices; jobs that may not be preempted,
    are within their minimum run time or run on draining nodes keep theirs. Reserved devices go to the
    tenant's jobs that run on them or are waiting, before all others are served.

    Where `last` was solved less than `min_gap_s` ago, nothing changes but what was lost or is refused. A
    policy that raises SolverError changes nothing either. `next_solve_s` is at most `max_gap_s` from now;
    what changes by itself (the end of a minimum run time, a reservation) brings it forward.

    Raises PlanError where the policy's answer is impossible, ValueError where the jobs contradict one
    another.
    """
    if not 0 <= min_gap_s <= max_gap_s:
        raise ValueError(
            f"min_gap_s={min_gap_s} and max_gap_s={max_gap_s}; needed is 0 <= min_gap_s <= max_gap_s"
        )
    now = situation(jobs, cluster, now_s)
    if last is not None and last.solved_s is not None and now_s < last.solved_s + min_gap_s:
        result = _unchanged(
            now, f"decided {now_s - last.solved_s:.1f} s ago; the next look is soon"
        )
        result.objective, result.bound = last.objective, last.bound
        return _plan(jobs, now, result, last.solved_s, last.solved_s + min_gap_s)
    result = _solve(now, cluster, policy, now_s)
    change_s = next_change_s(jobs, cluster, now.held, now_s)
    next_s = min(now_s + max_gap_s, max(now_s + min_gap_s, change_s))
    return _plan(jobs, now, result, now_s, next_s)


@dataclasses.dataclass
class _Result:
    """Answers as they come together, over the pools of devices."""

    allocations: dict[str, Allocation]
    reasons: dict[str, str]
    objective: float | None = None
    bound: float | None = None


def _unchanged(now: Situation, why: str) -> _Result:
    allocations = {
        id_: view.allocation for id_, view in now.views.items() if id_ not in now.refused
    }
    return _Result(allocations, {id_: why for id_ in allocations})


def _solve(now: Situation, cluster: ClusterSpec, policy: Policy, now_s: float) -> _Result:
    result = _Result({}, {})
    taken: Devices = {}  # by jobs that stay
    used: dict[str, int] = {}  # devices of each tenant's quota
    for id_, why in now.held.items():
        result.allocations[id_] = now.views[id_].allocation
        result.reasons[id_] = f"keeps its devices: {why}"
        add_devices(taken, now.views[id_].allocation.devices)
    _count(used, now, result.allocations)
    free = [id_ for id_ in now.views if id_ not in now.held and id_ not in now.refused]
    for tenant in sorted(t for t in now.reserved if t is not None):
        own = now.reserved[tenant]
        pool = [
            id_
            for id_ in free
            if now.views[id_].spec.tenant == tenant and _within(now.views[id_].allocation, own)
        ]
        if not pool:
            continue
        others = {n.name: set(range(n.num_devices)) - own.get(n.name, set()) for n in cluster.nodes}
        _ask(policy, pool, now, withhold(cluster, others, used), now_s, result)
        placed = [id_ for id_ in pool if result.allocations[id_].devices]
        _count(used, now, {id_: result.allocations[id_] for id_ in placed})
        free = [id_ for id_ in free if id_ not in set(placed)]
    for own in now.reserved.values():
        add_devices(taken, own)
    if free:
        _ask(policy, free, now, withhold(cluster, taken, used), now_s, result)
    return result


def _count(used: dict[str, int], now: Situation, allocations: Mapping[str, Allocation]):
    for id_, devices in _shares(allocations).items():
        tenant = now.views[id_].spec.tenant
        used[tenant] = used.get(tenant, 0) + devices


def _shares(allocations: Mapping[str, Allocation]) -> dict[str, int]:
    """Devices that count against each job's tenant: those of a share group count once, for its first job."""
    seen: set[str] = set()
    counts: dict[str, int] = {}
    for id_ in sorted(allocations):
        group = allocations[id_].share_group
        counts[id_] = 0 if group in seen else allocations[id_].num_devices
        if group is not None:
            seen.add(group)
    return counts


def _within(allocation: Allocation, devices: Devices) -> bool:
    """Whether it lies on these devices only; a job without any may go anywhere."""
    return all(set(local) <= devices.get(name, set()) for name, local in allocation.devices.items())


def _ask(
    policy: Policy,
    ids: Sequence[str],
    now: Situation,
    cluster: ClusterSpec,
    now_s: float,
    result: _Result,
):
    """Adds the policy's answer for some jobs on some devices to the result."""
    views = [now.views[id_] for id_ in ids]
    try:
        decision = policy(views, cluster, now_s)
    except (SolverError, np.linalg.LinAlgError) as error:
        offered = {
            n.name: set(range(n.num_devices)) - set(n.withheld)
            for n in cluster.nodes
            if n.state == "up"
        }
        for view in views:
            stays = _within(view.allocation, offered)
            result.allocations[view.spec.id] = view.allocation if stays else Allocation()
            result.reasons[view.spec.id] = (
                f"{'unchanged' if stays else 'its devices are reserved for others'}:"
                f" {type(policy).__name__} found no decision ({error})"
            )
        return
    check_decision(decision, views, cluster, type(policy).__name__)
    kind_of = {node.name: node.kind for node in cluster.nodes}
    for view in views:
        id_ = view.spec.id
        result.allocations[id_] = decision.allocations.get(id_, Allocation())
        result.reasons[id_] = decision.reasons.get(id_) or _default_reason(
            view, result.allocations[id_], kind_of, type(policy).__name__
        )
    if decision.objective is not None:
        result.objective = (result.objective or 0.0) + decision.objective
    if decision.bound is not None:
        result.bound = (result.bound or 0.0) + decision.bound


def _default_reason(
    view: JobView, given: Allocation, kind_of: Mapping[str, str], policy: str
) -> str:
    if given.devices:
        counts: dict[str, int] = {}
        for name, local in given.devices.items():
            counts[kind_of[name]] = counts.get(kind_of[name], 0) + len(local)
        same = given.devices == view.allocation.devices
        return f"{'keeps' if same else 'gets'} {words_of(counts)} by {policy}"
    return f"waits: {policy} gives the devices to others"


def check_decision(decision: Decision, views: Sequence[JobView], cluster: ClusterSpec, policy: str):
    """Raises PlanError where a decision cannot be carried out, naming the policy, the job and the rule."""
    nodes = {node.name: node for node in cluster.nodes}
    known = {view.spec.id: view for view in views}
    owner: dict[tuple[str, int], str] = {}

    def wrong(id_: str, what: str):
        raise PlanError(
            f"policy {policy} gives job {id_!r} {what}. This is a defect of the policy; the present plan"
            " stands."
        )

    for id_ in sorted(decision.allocations):
        allocation = decision.allocations[id_]
        if id_ not in known:
            wrong(id_, "devices, but was not asked about it")
        spec = known[id_].spec
        if not allocation.devices:
            continue
        for name, local in allocation.devices.items():
            node = nodes.get(name)
            if node is None:
                wrong(id_, f"devices of node {name!r}, which does not exist")
                continue
            if node.state != "up":
                wrong(id_, f"devices of node {name!r}, which is {node.state}")
            if max(local) >= node.num_devices or (
                node.withheld and set(local) & set(node.withheld)
            ):
                wrong(
                    id_,
                    f"devices {list(local)} of node {name!r}, not all of which may be given away",
                )
            if spec.kinds is not None and node.kind not in spec.kinds:
                wrong(id_, f"devices of kind {node.kind!r}, but it allows only {list(spec.kinds)}")
            for i in local:
                other = owner.setdefault((name, i), id_)
                group = allocation.share_group
                if other != id_ and (
                    group is None or decision.allocations[other].share_group != group
                ):
                    wrong(id_, f"device {i} of node {name!r}, which it also gives to {other!r}")
        count = allocation.num_devices
        if spec.mode == "rigid" and count != spec.num_devices:
            wrong(id_, f"{count} devices, but it is rigid and takes {spec.num_devices}")
        if spec.mode != "rigid" and not spec.min_devices <= count <= spec.max_devices:
            wrong(id_, f"{count} devices, but it takes {spec.min_devices} to {spec.max_devices}")
        if spec.level is not None and len(allocation.devices) > 1:
            domains = {domain_of(nodes[name], spec.level) for name in allocation.devices}
            if len(domains) > 1:
                wrong(id_, f"nodes of several domains of level {spec.level!r}: {sorted(domains)}")
    used: dict[str, int] = {}
    for id_, count in _shares(decision.allocations).items():
        tenant = known[id_].spec.tenant
        used[tenant] = used.get(tenant, 0) + count
        if used[tenant] > cluster.quota.get(tenant, used[tenant]):
            wrong(id_, f"more than the quota of tenant {tenant!r}, {cluster.quota[tenant]} devices")


def _plan(
    jobs: Sequence[JobView], now: Situation, result: _Result, solved_s: float, next_solve_s: float
) -> Plan:
    allocations: dict[str, Allocation] = {}
    reasons: dict[str, str] = {}
    start: list[str] = []
    resize: list[str] = []
    pause: list[str] = []
    for view in jobs:
        id_ = view.spec.id
        given = result.allocations.get(id_, Allocation())
        allocations[id_] = allocation_of(
            view.allocation, given.devices, given.share_group if given.devices else None
        )
        said = f"refused: {now.refused[id_]}" if id_ in now.refused else result.reasons[id_]
        reasons[id_] = f"{said}; {now.remarks[id_]}" if id_ in now.remarks else said
        if given.devices == view.allocation.devices:
            continue
        moved = pause if not given.devices else resize if view.allocation.devices else start
        moved.append(id_)
    return Plan(
        allocations=allocations,
        start=tuple(start),
        resize=tuple(resize),
        pause=tuple(pause),
        reasons=reasons,
        next_solve_s=next_solve_s,
        solved_s=solved_s,
        objective=result.objective,
        bound=result.bound,
    )
