"""From jobs, cluster and policy to a plan: pure, deterministic, one for the service and the simulator.

What a policy may not change (see `constraints_of`) is taken out of its problem first and put back afterwards;
what it answers is checked before it is believed.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxgoodput.cluster.scheduler.constraints import (
    Constraints,
    Devices,
    add_devices,
    constraints_of,
    next_change_s,
    withhold,
)
from jaxgoodput.cluster.scheduler.limits import limits_of, together, use_by_tenant
from jaxgoodput.cluster.scheduler.placement.placement import allocation_of
from jaxgoodput.cluster.scheduler.policy import Decision, JobView, Plan, Policy, SolverError
from jaxgoodput.cluster.scheduler.shapes import devices_in_words, domain_of, size_limits
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
    fixed = constraints_of(jobs, cluster, now_s)
    if last is not None and last.solved_s is not None and now_s < last.solved_s + min_gap_s:
        result = _unchanged(
            fixed, f"decided {now_s - last.solved_s:.1f} s ago; the next look is soon"
        )
        result.objective, result.bound = last.objective, last.bound
        return _plan(jobs, fixed, result, last.solved_s, last.solved_s + min_gap_s)
    result = _solve(fixed, cluster, policy, now_s)
    change_s = next_change_s(jobs, cluster, fixed.held, now_s)
    next_s = min(now_s + max_gap_s, max(now_s + min_gap_s, change_s))
    return _plan(jobs, fixed, result, now_s, next_s)


@dataclasses.dataclass
class _Result:
    """Answers as they come together, over the pools of devices."""

    allocations: dict[str, Allocation]
    reasons: dict[str, str]
    objective: float | None = None
    bound: float | None = None


def _unchanged(fixed: Constraints, why: str) -> _Result:
    allocations = {
        id_: view.allocation for id_, view in fixed.views.items() if id_ not in fixed.refused
    }
    return _Result(allocations, {id_: why for id_ in allocations})


def _solve(fixed: Constraints, cluster: ClusterSpec, policy: Policy, now_s: float) -> _Result:
    result = _Result({}, {})
    taken: Devices = {}  # by jobs that stay
    tenants = {id_: view.spec.tenant for id_, view in fixed.views.items()}
    for id_, why in fixed.held.items():
        result.allocations[id_] = fixed.views[id_].allocation
        result.reasons[id_] = f"keeps its devices: {why}"
        add_devices(taken, fixed.views[id_].allocation.devices)
    kind_of = {node.name: node.kind for node in cluster.nodes}
    used = use_by_tenant(result.allocations, tenants, kind_of)
    free = [id_ for id_ in fixed.views if id_ not in fixed.held and id_ not in fixed.refused]
    for tenant in sorted(t for t in fixed.reserved if t is not None):
        own = fixed.reserved[tenant]
        pool = [
            id_
            for id_ in free
            if fixed.views[id_].spec.tenant == tenant and _within(fixed.views[id_].allocation, own)
        ]
        if not pool:
            continue
        others = {n.name: set(range(n.num_devices)) - own.get(n.name, set()) for n in cluster.nodes}
        _ask(policy, pool, fixed, withhold(cluster, others, used), now_s, result)
        placed = [id_ for id_ in pool if result.allocations[id_].devices]
        more = {id_: result.allocations[id_] for id_ in placed}
        used = together((used, use_by_tenant(more, tenants, kind_of)))
        free = [id_ for id_ in free if id_ not in set(placed)]
    for own in fixed.reserved.values():
        add_devices(taken, own)
    if free:
        _ask(policy, free, fixed, withhold(cluster, taken, used), now_s, result)
    return result


def _within(allocation: Allocation, devices: Devices) -> bool:
    """Whether it lies on these devices only; a job without any may go anywhere."""
    return all(set(local) <= devices.get(name, set()) for name, local in allocation.devices.items())


def _ask(
    policy: Policy,
    ids: Sequence[str],
    fixed: Constraints,
    cluster: ClusterSpec,
    now_s: float,
    result: _Result,
):
    """Adds the policy's answer for some jobs on some devices to the result."""
    views = [fixed.views[id_] for id_ in ids]
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
                f"{'unchanged' if stays else 'its devices are reserved for others'}: "
                f"{type(policy).__name__} found no decision ({error})"
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
        return f"{'keeps' if same else 'gets'} {devices_in_words(counts)} by {policy}"
    return f"waits: {policy} gives the devices to others"


def check_decision(decision: Decision, views: Sequence[JobView], cluster: ClusterSpec, policy: str):
    """Raises PlanError where a decision cannot be carried out, naming the policy, the job and the rule."""
    nodes = {node.name: node for node in cluster.nodes}
    known = {view.spec.id: view for view in views}
    owner: dict[tuple[str, int], str] = {}

    def wrong(id_: str, what: str):
        raise PlanError(
            f"policy {policy} gives job {id_!r} {what}. This is a defect of the policy; the present plan "
            "stands."
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
        least, most = size_limits(spec)
        if not least <= allocation.num_devices <= most:
            takes = (
                f"is rigid and takes {least}"
                if spec.mode == "rigid"
                else f"takes {least} to {most}"
            )
            wrong(id_, f"{allocation.num_devices} devices, but it {takes}")
        if spec.level is not None and len(allocation.devices) > 1:
            domains = {domain_of(nodes[name], spec.level) for name in allocation.devices}
            if len(domains) > 1:
                wrong(id_, f"nodes of several domains of level {spec.level!r}: {sorted(domains)}")
    tenants = {id_: known[id_].spec.tenant for id_ in decision.allocations}
    kind_of = {node.name: node.kind for node in cluster.nodes}
    use = use_by_tenant(decision.allocations, tenants, kind_of)
    for limit in limits_of(cluster):
        if limit.used(use) > limit.left + 1e-6:
            last = max(id_ for id_, whose in tenants.items() if whose in limit.tenants)
            wrong(last, f"more than {limit.said}")


def _plan(
    jobs: Sequence[JobView],
    fixed: Constraints,
    result: _Result,
    solved_s: float,
    next_solve_s: float,
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
        said = f"refused: {fixed.refused[id_]}" if id_ in fixed.refused else result.reasons[id_]
        reasons[id_] = f"{said}; {fixed.remarks[id_]}" if id_ in fixed.remarks else said
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
