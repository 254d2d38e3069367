"""Turn jobs, a cluster and a policy into a plan; the service and the simulator both call `reconcile`.

The function is pure and deterministic. What a policy may not change (`constraints_of`) is taken out of its
problem first and put back afterwards. The policy's answer is checked before it is used.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxgoodput.cluster.scheduler.avoidance import avoiding
from jaxgoodput.cluster.scheduler.constraints import (
    Constraints,
    Devices,
    add_devices,
    constraints_of,
    next_change_s,
    offered_devices,
    withhold,
    within,
)
from jaxgoodput.cluster.scheduler.kept_nodes import kept_nodes, may_be_stopped
from jaxgoodput.cluster.scheduler.limits import (
    Use,
    devices_by_kind,
    limits_of,
    together,
    use_by_tenant,
)
from jaxgoodput.cluster.scheduler.placement.amounts import Amounts, too_much, used_by_node
from jaxgoodput.cluster.scheduler.placement.placement import allocation_of
from jaxgoodput.cluster.scheduler.policy import (
    AvoidedNode,
    Decision,
    JobView,
    Plan,
    Policy,
    SolverError,
)
from jaxgoodput.cluster.scheduler.shapes import devices_in_words, domain_of, size_limits
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node


class PlanError(Exception):
    """A policy's answer cannot be carried out; a defect of the policy, which the message names."""


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
    """Decide what every job gets now, with a reason for every job.

    Jobs that could not run even alone are refused, and so are jobs whose needs the policy does not know. Jobs
    on nodes that are down lose their devices. Jobs that may not be preempted, are within their minimum run
    time, or run on draining nodes keep theirs. A tenant's reserved devices are offered first to its jobs that
    run on them or wait. Other jobs leave the nodes that they avoid (`JobView.avoids`) if they can run without
    them. If jobs that may not be stopped leave a job too little for more than an hour, further ones do not
    start on the nodes that it needs (`kept_nodes.py`).

    If `last` was solved less than `min_gap_s` ago, jobs keep what they have, except lost or refused
    allocations. The same holds if the policy raises SolverError. `next_solve_s` is at most `max_gap_s` from
    now; changes that are known in advance (the end of a minimum run time, a reservation) bring it forward.

    Raises PlanError if the policy's answer is impossible, ValueError if the jobs contradict each other.
    """
    if not 0 <= min_gap_s <= max_gap_s:
        raise ValueError(
            f"min_gap_s={min_gap_s} and max_gap_s={max_gap_s}; choose 0 <= min_gap_s <= max_gap_s"
        )
    fixed = constraints_of(jobs, cluster, now_s, policy)
    answers = _Round(fixed, cluster, policy, now_s)
    if last is not None and last.solved_s is not None and now_s < last.solved_s + min_gap_s:
        why = (
            f"unchanged: the last decision was {now_s - last.solved_s:.1f} s ago, "
            "and the next one follows shortly"
        )
        kept = {id_: v.allocation for id_, v in fixed.views.items() if id_ not in fixed.refused}
        answers.allocations, answers.reasons = kept, dict.fromkeys(kept, why)
        answers.objective, answers.bound = last.objective, last.bound
        return _plan(jobs, answers, last.solved_s, last.solved_s + min_gap_s)
    answers.solve()
    change_s = next_change_s(jobs, cluster, fixed.held, now_s)
    next_s = min(now_s + max_gap_s, max(now_s + min_gap_s, change_s))
    return _plan(jobs, answers, now_s, next_s)


@dataclasses.dataclass
class _Round:
    """One decision in the making: the answers of a policy that is called for several sets of devices."""

    fixed: Constraints
    cluster: ClusterSpec
    policy: Policy
    now_s: float
    allocations: dict[str, Allocation] = dataclasses.field(default_factory=dict)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    objective: float | None = None
    bound: float | None = None

    def solve(self):
        """Ask the policy about each tenant's jobs on its reserved devices, then about all others."""
        fixed = self.fixed
        taken: Devices = {}  # by held jobs and reservations
        for id_, why in fixed.held.items():
            self.allocations[id_] = fixed.views[id_].allocation
            self.reasons[id_] = f"keeps its devices: {why}"
            add_devices(taken, fixed.views[id_].allocation.devices)
        used = self.use(fixed.held)
        left = fixed.open
        # Reserved devices first, so that a tenant's jobs that fit there do not take others' devices.
        for tenant in sorted(t for t in fixed.reserved if t is not None):
            placed = self.ask_reserved(tenant, left, used)
            used = together((used, self.use(placed)))
            left = [id_ for id_ in left if id_ not in placed]
        for own in fixed.reserved.values():
            add_devices(taken, own)
        if left:
            self.ask_others(left, self.without(taken, used))

    def without(self, taken: Devices, used: Use) -> ClusterSpec:
        """Return the cluster without the `taken` devices, and what jobs that have devices use by now."""
        return withhold(self.cluster, taken, used, self.amounts(self.allocations))

    def amounts(self, ids: Iterable[str]) -> dict[str, Amounts]:
        """Return the CPUs and the memory that these jobs use on each node."""
        specs = {id_: self.fixed.views[id_].spec for id_ in ids}
        return used_by_node(specs, {id_: self.allocations[id_] for id_ in specs})

    def ask_others(self, left: Sequence[str], cluster: ClusterSpec):
        """Ask the policy about all jobs without reserved devices, and keep nodes for one that waits long."""
        waits = [id_ for id_ in left if not self.fixed.views[id_].allocation.devices]
        views = [self.fixed.views[id_] for id_ in waits]
        kept = None
        if any(not may_be_stopped(view) for view in views):
            kept = kept_nodes(views, self.cluster, cluster, self.now_s)
        later = [
            v.spec.id for v in views if kept and kept.job != v.spec.id and not may_be_stopped(v)
        ]
        first = [id_ for id_ in left if id_ not in later]
        if first:
            self.ask(first, cluster)
        if kept is None:
            return
        useless: Devices = {
            node.name: set(range(node.num_devices))
            for node in cluster.nodes
            if node.name in kept.nodes
        }
        if later:
            self.ask(later, self.rest(first, cluster, useless))
        for id_ in (kept.job, *later):
            if not self.allocations[id_].devices:
                self.reasons[id_] = f"{self.reasons[id_]}; {kept.in_words()}"

    def ask_reserved(self, tenant: str, left: Sequence[str], used: Use) -> list[str]:
        """Ask the policy about a tenant's jobs on its reserved devices; return the jobs that get some."""
        own = self.fixed.reserved[tenant]
        pool = [id_ for id_ in left if self.may_use(id_, tenant, own)]
        if pool:
            others = {
                node.name: set(range(node.num_devices)) - own.get(node.name, set())
                for node in self.cluster.nodes
            }
            self.ask(pool, self.without(others, used))
        return [id_ for id_ in pool if self.allocations[id_].devices]

    def may_use(self, id_: str, tenant: str, devices: Devices) -> bool:
        """Return whether a job belongs to the tenant and runs on these reserved devices, or waits."""
        view = self.fixed.views[id_]
        return view.spec.tenant == tenant and within(view.allocation, devices)

    def use(self, ids: Iterable[str]) -> Use:
        """Return how many devices of each kind these jobs use, by tenant."""
        kind_of = {node.name: node.kind for node in self.cluster.nodes}
        tenants = {id_: self.fixed.views[id_].spec.tenant for id_ in ids}
        return use_by_tenant({id_: self.allocations[id_] for id_ in ids}, tenants, kind_of)

    def ask(self, ids: Sequence[str], cluster: ClusterSpec):
        """Have the policy decide about the jobs `ids` on the devices of `cluster`, and note its answer."""
        views = [self.fixed.views[id_] for id_ in ids]
        name = type(self.policy).__name__
        try:
            decision = self.policy(views, cluster, self.now_s)
        except (SolverError, np.linalg.LinAlgError) as error:
            self.keep(views, offered_devices(cluster), f"{name} found no decision ({error})")
            return
        check_decision(decision, views, cluster, name)
        avoidance = avoiding(decision.allocations, views, cluster)
        kind_of = {node.name: node.kind for node in cluster.nodes}
        for view in views:
            id_ = view.spec.id
            given = avoidance.allocations.get(id_, Allocation())
            default = _default_reason(view, given, kind_of, name)
            self.allocations[id_] = given
            self.reasons[id_] = decision.reasons.get(id_) or default
            if remark := avoidance.remarks.get(id_):
                said = f"{self.reasons[id_]}; {remark}"
                self.reasons[id_] = said if given.devices else remark
        if decision.objective is not None:
            self.objective = (self.objective or 0.0) + decision.objective
        if decision.bound is not None:
            self.bound = (self.bound or 0.0) + decision.bound
        if avoidance.reduced:
            self.ask_again(ids, cluster, avoidance.reduced)

    def ask_again(self, ids: Sequence[str], cluster: ClusterSpec, reduced: frozenset[str]):
        """Offer what `reduced` jobs gave up to jobs that wait, and other devices to those left without."""
        without = {id_ for id_ in ids if not self.allocations[id_].devices}
        if waiting := [id_ for id_ in ids if id_ in without - reduced]:
            self.ask(waiting, self.rest(ids, cluster))
        # Each avoids other nodes, so they are asked for one by one.
        for id_ in sorted(without & reduced):
            avoids, why = self.fixed.views[id_].avoids, self.reasons[id_]
            self.ask([id_], self.rest(ids, cluster, _useless(cluster, avoids)))
            if not self.allocations[id_].devices:
                self.reasons[id_] = why

    def rest(self, ids: Sequence[str], cluster: ClusterSpec, taken: Devices | None = None):
        """Return the cluster without the devices that the jobs `ids` have, and those in `taken`."""
        has = {id_: self.allocations[id_] for id_ in ids if self.allocations[id_].devices}
        taken = taken or {}
        for allocation in has.values():
            add_devices(taken, allocation.devices)
        return withhold(cluster, taken, self.use(has), self.amounts(has))

    def keep(self, views: Sequence[JobView], offered: Devices, why: str):
        """Let each job keep its devices if all of them are `offered`, else take them; note the reason."""
        for view in views:
            stays = within(view.allocation, offered)
            what = "unchanged" if stays else "its devices are reserved for others"
            self.allocations[view.spec.id] = view.allocation if stays else Allocation()
            self.reasons[view.spec.id] = f"{what}: {why}"


def _default_reason(
    view: JobView, given: Allocation, kind_of: Mapping[str, str], policy: str
) -> str:
    if not given.devices:
        return f"waits: {policy} gives the devices to others"
    same = given.devices == view.allocation.devices
    said = devices_in_words(devices_by_kind(given, kind_of))
    return f"{'keeps' if same else 'gets'} {said} by {policy}"


def check_decision(decision: Decision, views: Sequence[JobView], cluster: ClusterSpec, policy: str):
    """Raise PlanError if a decision cannot be carried out, naming the policy, the job and the rule."""
    nodes = {node.name: node for node in cluster.nodes}
    spec_of = {view.spec.id: view.spec for view in views}
    owner: dict[tuple[str, int], str] = {}
    for id_ in sorted(decision.allocations):
        allocation = decision.allocations[id_]
        if id_ not in spec_of:
            raise _defect(policy, id_, "devices, but was not asked about it")
        wrong = (
            _wrong_devices(spec_of[id_], allocation, nodes)
            or _wrong_sharing(id_, decision, owner)
            or _wrong_size(spec_of[id_], allocation, nodes)
        )
        if wrong:
            raise _defect(policy, id_, wrong)
    _check_limits(decision, spec_of, cluster, policy)
    _check_amounts(decision, spec_of, cluster, policy)


def _check_amounts(
    decision: Decision, spec_of: Mapping[str, JobSpec], cluster: ClusterSpec, policy: str
):
    if (found := too_much(cluster, spec_of, decision.allocations)) is not None:
        name, has = found
        there = (id_ for id_, given in decision.allocations.items() if name in given.devices)
        raise _defect(policy, max(there), f"and others more than the {has} of node {name!r}")


def _check_limits(
    decision: Decision, spec_of: Mapping[str, JobSpec], cluster: ClusterSpec, policy: str
):
    tenants = {id_: spec_of[id_].tenant for id_ in decision.allocations}
    kind_of = {node.name: node.kind for node in cluster.nodes}
    use = use_by_tenant(decision.allocations, tenants, kind_of)
    for limit in limits_of(cluster):
        if limit.used(use) > limit.left + 1e-6:
            last = max(id_ for id_, tenant in tenants.items() if tenant in limit.tenants)
            raise _defect(policy, last, f"more than {limit.said}")


def _defect(policy: str, id_: str, what: str) -> PlanError:
    return PlanError(
        f"policy {policy} gives job {id_!r} {what}. The present plan stays in force; report this defect of "
        "the policy, or choose another policy."
    )


def _wrong_devices(spec: JobSpec, allocation: Allocation, nodes: Mapping[str, Node]) -> str | None:
    for name, local in allocation.devices.items():
        node = nodes.get(name)
        if node is None:
            return f"devices of node {name!r}, which does not exist"
        if node.state != "up":
            return f"devices of node {name!r}, which is {node.state}"
        if max(local) >= node.num_devices or not set(local).isdisjoint(node.withheld):
            return f"devices {list(local)} of node {name!r}, not all of which may be given away"
        if spec.kinds is not None and node.kind not in spec.kinds:
            return f"devices of kind {node.kind!r}, but it allows only {list(spec.kinds)}"
    return None


def _wrong_sharing(id_: str, decision: Decision, owner: dict[tuple[str, int], str]) -> str | None:
    """Record a job's devices in `owner`; report one that another job has without sharing it."""
    group = decision.allocations[id_].share_group
    for name, local in decision.allocations[id_].devices.items():
        for i in local:
            other = owner.setdefault((name, i), id_)
            shared = group is not None and decision.allocations[other].share_group == group
            if other != id_ and not shared:
                return f"device {i} of node {name!r}, which it also gives to {other!r}"
    return None


def _wrong_size(spec: JobSpec, allocation: Allocation, nodes: Mapping[str, Node]) -> str | None:
    if not allocation.devices:
        return None
    least, most = size_limits(spec)
    if not least <= allocation.num_devices <= most:
        takes = (
            f"is rigid and takes {least}" if spec.mode == "rigid" else f"takes {least} to {most}"
        )
        return f"{allocation.num_devices} devices, but it {takes}"
    if spec.level is not None:
        domains = {domain_of(nodes[name], spec.level) for name in allocation.devices}
        if len(domains) > 1:
            return f"nodes of several domains of level {spec.level!r}: {sorted(domains)}"
    return None


def _plan(jobs: Sequence[JobView], answers: _Round, solved_s: float, next_solve_s: float) -> Plan:
    fixed = answers.fixed
    allocations: dict[str, Allocation] = {}
    reasons: dict[str, str] = {}
    moved: dict[str, list[str]] = {"start": [], "resize": [], "pause": []}
    for view in jobs:
        id_ = view.spec.id
        given = answers.allocations.get(id_, Allocation())
        allocations[id_] = allocation_of(
            view.allocation, given.devices, given.share_group if given.devices else None
        )
        if id_ in fixed.for_nodes:
            said = f"waits: for nodes that are down or draining: {fixed.refused[id_]}"
        elif id_ in fixed.refused:
            said = f"refused: {fixed.refused[id_]}"
        else:
            said = answers.reasons[id_]
        reasons[id_] = f"{said}; {fixed.remarks[id_]}" if id_ in fixed.remarks else said
        if given.devices != view.allocation.devices:
            was = "resize" if view.allocation.devices else "start"
            moved[was if given.devices else "pause"].append(id_)
    return Plan(
        allocations=allocations,
        start=tuple(moved["start"]),
        resize=tuple(moved["resize"]),
        pause=tuple(moved["pause"]),
        reasons=reasons,
        next_solve_s=next_solve_s,
        solved_s=solved_s,
        objective=answers.objective,
        bound=answers.bound,
    )


def _useless(cluster: ClusterSpec, avoids: Mapping[str, AvoidedNode]) -> Devices:
    """Return the devices of the nodes that a job cannot use."""
    return {
        node.name: set(range(node.num_devices))
        for node in cluster.nodes
        if node.name in avoids and not avoids[node.name].is_usable
    }
