"""Explain why a job waits and what would change it, by asking the policy again with one thing changed.

The answers make no assumption about how a policy works, so they hold for any policy: "2 more h200" means that
a plan was made with two more h200 and the job ran in it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxgoodput.cluster.scheduler.alternatives import find_job
from jaxgoodput.cluster.scheduler.constraints import constraints_of
from jaxgoodput.cluster.scheduler.costs import cost
from jaxgoodput.cluster.scheduler.free_room import FreeRoom, in_the_way, least_shapes
from jaxgoodput.cluster.scheduler.kept_nodes import may_be_stopped
from jaxgoodput.cluster.scheduler.limits import subtrees
from jaxgoodput.cluster.scheduler.placement.amounts import needs_of, some_limited
from jaxgoodput.cluster.scheduler.policy import JobView, Plan, Policy
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import (
    devices_in_words,
    node_size,
    shape_of,
    size_limits,
)
from jaxgoodput.specs import ClusterSpec, Node, Tenant

Constraint = Literal[
    "none",  # it runs
    "refused",  # it could not run even alone
    "nodes",  # it could run alone if nodes that are down or draining were back
    "budget",  # its own budget is spent
    "quota",
    "tenant limit",
    "tenant budget",
    "guarantee",  # of other tenants
    "reservation",
    "kept nodes",  # for another job, which has waited long
    "needs",  # devices are free, but not the CPUs or the memory that it needs beside them
    "placement",  # enough devices are free, but not together
    "level",
    "avoided nodes",  # which are kept apart from it for a while
    "minimum run time",  # of other jobs, or other jobs that may not be preempted
    "minimum size",
    "capacity",
    "price of switching",
    "utility",  # the devices do more for other jobs
]
MOST_IN_THE_WAY = 6  # sets of jobs that are tried to be ended


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a job runs or waits, and what would change that.

    Each entry of `changes` was tried and let the job run; the binding constraint's change comes first.
    `devices` gives, by kind, how many more devices would be enough (added as whole nodes, the rest on one
    node); several entries are alternatives.
    """

    job: str
    constraint: Constraint
    message: str
    changes: tuple[str, ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)


def explain(
    job: str,
    jobs: Sequence[JobView],
    cluster: ClusterSpec,
    policy: Policy,
    now_s: float,
    *,
    plan: Plan | None = None,
) -> Explanation:
    """Explain what keeps a job from running and what would let it run.

    `plan` must be what `reconcile` returns for the same arguments; if it is None, it is made here. Makes a
    few dozen plans. Raises ValueError for an unknown job.
    """
    find_job(job, jobs)
    plan = plan or reconcile(jobs, cluster, policy, now_s)
    question = _Question(job, jobs, cluster, policy, now_s)
    if plan.allocations[job].devices:
        changes = _changes_for_other_kind(question, plan)
        return Explanation(job=job, constraint="none", message=plan.reasons[job], changes=changes)
    fixed = constraints_of(jobs, cluster, now_s, policy)
    if job in fixed.refused:
        spent = question.view.spec.budget is not None and question.with_spec(budget=None)
        return Explanation(
            job=job,
            constraint="nodes" if job in fixed.for_nodes else "budget" if spent else "refused",
            message=plan.reasons[job],
            changes=_changes_for_refused(question),
        )
    return _explain_waiting(question, plan)


@dataclass(frozen=True)
class _Question:
    """A waiting job and its circumstances; the methods tell whether it would run if one of them changed."""

    job: str
    jobs: Sequence[JobView]
    cluster: ClusterSpec
    policy: Policy
    now_s: float

    @property
    def view(self) -> JobView:
        return find_job(self.job, self.jobs)

    @property
    def most_devices(self) -> int:
        """The most to add in a trial to a number of devices, a quota or a limit."""
        return 4 * sum(node.num_devices for node in self.cluster.nodes)

    def with_cluster(self, **changes) -> bool:
        """Return whether the job would run if these fields of the cluster had other values."""
        return self._runs(self.jobs, dataclasses.replace(self.cluster, **changes))

    def with_tenants(self, name: str | None, **changes) -> bool:
        """Return whether the job would run if the tenant `name` were changed; None changes all tenants."""
        tenants = tuple(
            dataclasses.replace(t, **changes) if name in (None, t.name) else t
            for t in self.cluster.tenants
        )
        return self.with_cluster(tenants=tenants)

    def with_spec(self, **changes) -> bool:
        """Return whether the job would run if these fields of its spec had other values."""
        return self._runs(self._changed(changes), self.cluster)

    def kinds_with(self, **changes) -> set[str]:
        """Return the kinds of its devices if these fields of its spec had other values."""
        return self.kinds_in(self._plan(self._changed(changes), self.cluster))

    def kinds_in(self, plan: Plan) -> set[str]:
        """Return the kinds of the devices that a plan gives the job."""
        kind_of = {node.name: node.kind for node in self.cluster.nodes}
        return {kind_of[name] for name in plan.allocations[self.job].devices}

    def _changed(self, changes: Mapping[str, Any]) -> list[JobView]:
        """Return the jobs if these fields of the job's spec had other values."""
        view = self.view
        other = dataclasses.replace(view, spec=dataclasses.replace(view.spec, **changes))
        return [other if one is view else one for one in self.jobs]

    def with_jobs(self, change: Callable[[JobView], JobView]) -> bool:
        """Return whether the job would run if every job were replaced by `change(job)`."""
        return self._runs([change(view) for view in self.jobs], self.cluster)

    def without(self, ids: Sequence[str]) -> bool:
        """Return whether the job would run if these other jobs ended."""
        return self._runs([v for v in self.jobs if v.spec.id not in ids], self.cluster)

    def with_devices(self, kind: str, count: int) -> bool:
        """Return whether the job would run with `count` more devices of a kind, as `more_nodes` adds them."""
        return self.with_cluster(
            nodes=(*self.cluster.nodes, *more_nodes(self.cluster, kind, count))
        )

    def _runs(self, jobs: Sequence[JobView], cluster: ClusterSpec) -> bool:
        return bool(self._plan(jobs, cluster).allocations[self.job].devices)

    def _plan(self, jobs: Sequence[JobView], cluster: ClusterSpec) -> Plan:
        asked = dataclasses.replace(cluster, changed_s=None)  # what it changes is news
        return reconcile(jobs, asked, self.policy, self.now_s)


class _Reason(NamedTuple):
    """A constraint that keeps the job from running, and a change that would let it run."""

    constraint: Constraint
    message: str
    change: str  # what would let the job run; "" if nothing was found


def more_nodes(cluster: ClusterSpec, kind: str, count: int) -> tuple[Node, ...]:
    """Return new nodes with `count` devices of a kind, in a topology domain of their own.

    They have CPUs and memory like the others of the kind. All are whole nodes, except the last one if `count`
    is not a multiple of the node size.
    """
    size = node_size(cluster).get(kind) or count
    sizes = [size] * (count // size) + [count % size] * (count % size > 0)
    levels = {level for node in cluster.nodes for level in node.labels}
    names = {node.name for node in cluster.nodes}
    prefix = f"more-{kind}"
    while any(name.startswith(prefix) for name in names):
        prefix += "-"
    return tuple(
        Node(
            name=f"{prefix}{i:04}",
            kind=kind,
            num_devices=num,
            labels={level: prefix for level in levels},
            cpus=_as_elsewhere(cluster, kind, "cpus", num),
            memory_gib=_as_elsewhere(cluster, kind, "memory_gib", num),
        )
        for i, num in enumerate(sizes)
    )


def _as_elsewhere(cluster: ClusterSpec, kind: str, name: str, num_devices: int) -> float | None:
    """Return an amount for a new node: as much for each device as the largest node of the kind has."""
    others = [node for node in cluster.nodes if node.kind == kind and node.num_devices]
    like = max(others, key=lambda node: node.num_devices, default=None)
    has = None if like is None else getattr(like, name)
    return None if like is None or has is None else has * num_devices / like.num_devices


def _explain_waiting(question: _Question, plan: Plan) -> Explanation:
    reasons = [
        *_quota(question),
        *_tenant_limits(question),
        *_guarantees(question),
        *_reservation(question),
        *_kept_nodes(question, plan),
        *(placement := _room(question, plan)),
        *_level(question),
        *_avoided_nodes(question),
        *_minimum_run_time(question),
        *_minimum_size(question),
    ]
    devices = _more_devices(question)
    either = " or ".join(f"{devices[kind]} more {kind}" for kind in sorted(devices))
    if placement:
        reasons += _price_of_switching(question)
    elif devices and not _has_room(question, plan):
        said = f"all devices of kind {', '.join(sorted(devices))} that it could use are taken"
        reasons.append(_Reason("capacity", said, either))
    else:
        reasons += [*_price_of_switching(question), _utility(question, plan)]
    changes = [reason.change for reason in reasons if reason.change]
    if devices and reasons[0].constraint != "capacity" and either not in changes:
        changes.append(either)
    return Explanation(
        job=question.job,
        constraint=reasons[0].constraint,
        message=f"waits: {reasons[0].message}",
        changes=tuple(changes),
        devices=devices,
    )


def _quota(question: _Question) -> list[_Reason]:
    quota, tenant = question.cluster.quota, question.view.spec.tenant
    others = {t: n for t, n in quota.items() if t != tenant}
    if tenant not in quota or not question.with_cluster(quota=others):
        return []
    limit = quota[tenant]
    more = _least(
        lambda n: question.with_cluster(quota={**quota, tenant: limit + n}), question.most_devices
    )
    change = f"a quota of {limit + more} for {tenant!r}" if more else "no quota"
    return [_Reason("quota", f"the quota of tenant {tenant!r} is {limit} devices", change)]


def _tenant_limits(question: _Question) -> list[_Reason]:
    """Find limits and budgets of the job's tenant, and of tenants above it, that keep the job waiting."""
    below = subtrees(question.cluster)
    above = [t for t in question.cluster.tenants if question.view.spec.tenant in below[t.name]]
    return [
        reason
        for tenant in above
        for reason in (*_tenant_limit(question, tenant), *_tenant_budget(question, tenant))
    ]


def _tenant_limit(question: _Question, tenant: Tenant) -> list[_Reason]:
    name, limit = tenant.name, tenant.limit
    if limit is None or not question.with_tenants(name, limit=None):
        return []
    more = _least(lambda n: question.with_tenants(name, limit=limit + n), question.most_devices)
    change = f"a limit of {limit + more} for {name!r}" if more else "no limit"
    return [_Reason("tenant limit", f"{name!r} may have at most {limit} devices", change)]


def _tenant_budget(question: _Question, tenant: Tenant) -> list[_Reason]:
    name, budget = tenant.name, tenant.budget_per_hour
    if budget is None or not question.with_tenants(name, budget_per_hour=None):
        return []
    step = max(question.cluster.price_per_hour.values(), default=1.0)
    more = _least(
        lambda n: question.with_tenants(name, budget_per_hour=budget + n * step),
        question.most_devices,
    )
    change = f"{budget + more * step:g} per hour for {name!r}" if more else "no budget"
    return [_Reason("tenant budget", f"{name!r} may spend {budget:g} per hour", change)]


def _guarantees(question: _Question) -> list[_Reason]:
    below = subtrees(question.cluster)
    guarantors = [t for t in question.cluster.tenants if t.guaranteed]
    if not guarantors or not question.with_tenants(None, guaranteed=0):
        return []
    others = [t for t in guarantors if question.view.spec.tenant not in below[t.name]]
    if not others:
        return []
    names = " and ".join(f"{t.name!r} ({t.guaranteed})" for t in others)
    said = f"the devices are guaranteed to other tenants, {names}"
    return [_Reason("guarantee", said, "lower guarantees of other tenants")]


def _reservation(question: _Question) -> list[_Reason]:
    reservations = question.cluster.reservations
    if not reservations or not question.with_cluster(reservations=()):
        return []
    tenant, now_s = question.view.spec.tenant, question.now_s
    active = ", ".join(
        f"{r.num_devices} devices on {r.node} at {r.end_s:.0f} s"
        for r in reservations
        if r.start_s <= now_s < r.end_s and r.tenant != tenant
    )
    change = f"the end of the reservation of {active}"
    return [_Reason("reservation", "devices are reserved for others", change)]


def _kept_nodes(question: _Question, plan: Plan) -> list[_Reason]:
    """Find the job for which nodes are kept, if this job would start on them once it is gone."""
    if may_be_stopped(question.view):
        return []
    waiting = [v for v in question.jobs if not plan.allocations[v.spec.id].devices]
    others = (v.spec.id for v in waiting if v.spec.id != question.job)
    for other in others:
        said = f"are kept for {other!r}"
        if said in plan.reasons[question.job] and question.without([other]):
            change = f"the start or the end of {other!r}"
            return [_Reason("kept nodes", f"the nodes that it could use {said}", change)]
    return []


def _room(question: _Question, plan: Plan) -> list[_Reason]:
    """Find out whether enough devices are free, but not what they need, or not together."""
    return _needs(question, plan) or _placement(question, plan)


def _needs(question: _Question, plan: Plan) -> list[_Reason]:
    """Find out whether the job would run on the devices that are free if it needed no CPUs and no memory."""
    view, cluster = question.view, question.cluster
    if not needs_of(view.spec) or not some_limited(cluster):
        return []
    room = FreeRoom.beside(plan, view, question.jobs, cluster, question.now_s)
    shapes = least_shapes(view, cluster, question.now_s)
    bare = dataclasses.replace(room, left={})
    enough = [shape for shape in shapes if bare.fits(view, shape)]
    if not enough or any(room.fits(view, shape) for shape in shapes):
        return []
    without = {"cpus_per_device": 0.0, "memory_gib_per_device": 0.0}
    if not question.with_spec(**without):
        return []
    return [_Reason("needs", room.lacking(view, enough[0]), _fewer_needs(question))]


def _fewer_needs(question: _Question) -> str:
    """Return the largest part of its needs, in eighths, with which the job would run; "" if none is."""
    spec = question.view.spec
    if not needs_of(spec) or not some_limited(question.cluster):
        return ""
    for eighths in range(7, -1, -1):
        fewer = {
            name: getattr(spec, name) * eighths / 8
            for name in ("cpus_per_device", "memory_gib_per_device")
        }
        if question.with_spec(**fewer):
            said = (f"{name}={value:g}" for name, value in fewer.items() if getattr(spec, name))
            return " and ".join(said)
    return ""


def _placement(question: _Question, plan: Plan) -> list[_Reason]:
    """Find out whether enough devices are free but do not lie together, and what is in the way."""
    view, cluster = question.view, question.cluster
    room = FreeRoom.beside(plan, view, question.jobs, cluster, question.now_s)
    shapes = least_shapes(view, cluster, question.now_s)
    enough = [s for s in shapes if room.of_kind(s.kind) >= s.num_devices]
    if not enough or any(room.fits(view, shape) for shape in shapes):
        return []
    for shape in enough:
        for ids in in_the_way(room, view, shape, plan, question.jobs, MOST_IN_THE_WAY):
            if question.without(ids):
                said = room.in_words(view, shape)
                names = " and ".join(_where(question, plan, id_) for id_ in ids)
                return [_Reason("placement", f"{said}. In the way: {names}", _end_of(ids))]
    return [_Reason("placement", room.in_words(view, enough[0]), "")]


def _end_of(ids: Sequence[str]) -> str:
    return f"the end of {' and '.join(map(repr, ids))}"


def _where(question: _Question, plan: Plan, id_: str) -> str:
    """Return where a job that is in the way runs, and for how much longer as far as that can be told."""
    given, view = plan.allocations[id_], find_job(id_, question.jobs)
    kind_of = {node.name: node.kind for node in question.cluster.nodes}
    shape = shape_of(given.devices, kind_of)
    said = f"{id_!r} ({given.num_devices} on {', '.join(sorted(given.devices))}"
    speed = 0.0 if shape is None else view.goodput.get(shape, 0.0)
    if view.remaining is not None and view.is_measured and speed > 0.0:
        said += f", about {view.remaining / speed:.0f} s more"
    elif view.work_guess is not None and given.num_devices:
        left_s = view.work_guess.least_left_s(math.fsum(view.received_s.values()), 0.5)
        left_s /= given.num_devices
        said += f", perhaps {left_s:.0f} s more, the median of {view.work_guess.basis}"
    return f"{said})"


def _level(question: _Question) -> list[_Reason]:
    level = question.view.spec.level
    if level is None or not question.with_spec(level=None):
        return []
    said = f"no domain of level {level!r} has room for the whole job"
    return [_Reason("level", said, f"no requirement of one {level!r}")]


def _avoided_nodes(question: _Question) -> list[_Reason]:
    avoids, now_s = question.view.avoids, question.now_s

    def without(view: JobView) -> JobView:
        return dataclasses.replace(view, avoids={}) if view.spec.id == question.job else view

    if not avoids or not question.with_jobs(without):
        return []
    said = f"{', '.join(sorted(avoids))} cannot be used by it for now, and no other node is free"
    left_s = min(node.until_s for node in avoids.values()) - now_s
    return [_Reason("avoided nodes", said, f"one of these nodes, in {left_s:.0f} s")]


def _minimum_run_time(question: _Question) -> list[_Reason]:
    def movable(view: JobView) -> JobView:
        if view.spec.id == question.job:
            return view
        spec = dataclasses.replace(view.spec, preemptible=True, min_run_s=0.0)
        return dataclasses.replace(view, spec=spec)

    if not question.with_jobs(movable):
        return []
    said = "jobs that may not be preempted, at all or yet, hold the devices"
    change = "the end of their minimum run time, or making them preemptible"
    return [_Reason("minimum run time", said, change)]


def _minimum_size(question: _Question) -> list[_Reason]:
    smaller = _smaller_minimum(question)
    if smaller is None:
        return []
    said = f"fewer than its minimum of {question.view.spec.min_devices} devices are available"
    return [_Reason("minimum size", said, f"min_devices={smaller}")]


def _smaller_minimum(question: _Question) -> int | None:
    """Return the largest power of two below the job's minimum with which it would run; None if none."""
    spec = question.view.spec
    if spec.mode == "rigid" or spec.min_devices == 1:
        return None
    smaller = 1 << ((spec.min_devices - 1).bit_length() - 1)
    while smaller >= 1:
        if question.with_spec(min_devices=smaller):
            return smaller
        smaller //= 2
    return None


def _more_devices(question: _Question) -> dict[str, int]:
    """Return, for each kind that the job can use, the fewest additional devices with which it would run."""
    spec = question.view.spec
    sizes = node_size(question.cluster)
    wanted = sum(size_limits(view.spec)[0] for view in question.jobs)
    known = {shape.kind for shape in question.view.goodput}
    kinds = set(sizes) & known if known else set(sizes)
    found: dict[str, int] = {}
    for kind in sorted(kinds if spec.kinds is None else kinds.intersection(spec.kinds)):
        most = sizes[kind] * (wanted // sizes[kind] + 2)
        count = _least(lambda n, kind=kind: question.with_devices(kind, n), most)
        if count:
            found[kind] = count
    return found


def _least(runs: Callable[[int], bool], most: int) -> int | None:
    """Return the least number from 1 to `most` for which `runs` is true; None if there is none.

    The search (doubling, then bisection) assumes that `runs` stays true for larger numbers.
    """
    high = 1
    while not runs(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2  # known not to run
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high


def _has_room(question: _Question, plan: Plan) -> bool:
    """Return whether the job would fit onto the devices that a plan leaves free."""
    view, cluster = question.view, question.cluster
    room = FreeRoom.beside(plan, view, question.jobs, cluster, question.now_s)
    return any(room.fits(view, shape) for shape in least_shapes(view, cluster, question.now_s))


def _price_of_switching(question: _Question) -> list[_Reason]:
    if not question.with_jobs(lambda v: dataclasses.replace(v, restart_s=0.0)):
        return []
    said = "making room would cost more in restarts than the job gains"
    return [_Reason("price of switching", said, "cheaper restarts, or waiting longer")]


def _utility(question: _Question, plan: Plan) -> _Reason:
    weight = question.view.spec.weight
    factors = [2.0**power for power in range(1, 11)]
    helps = next((f for f in factors if question.with_spec(weight=weight * f)), None)
    change = f"a weight of {weight * helps:g} instead of {weight:g}" if helps else ""
    does = "leaves devices idle that it could use"
    if not _has_room(question, plan):
        does = "finds the devices of more use to others"
    said = f"{type(question.policy).__name__} {does}"
    return _Reason("utility", said, change)


def _changes_for_other_kind(question: _Question, plan: Plan) -> tuple[str, ...]:
    """Return what would give a job that runs on another kind than it prefers a preferred one."""
    spec = question.view.spec
    preferred = set(spec.preferred_kinds or ())
    if not preferred or preferred & question.kinds_in(plan):
        return ()
    named = " or ".join(sorted(preferred))
    for factor in (2.0, 4.0, 16.0, 256.0):
        price = spec.preference * factor
        if preferred & question.kinds_with(preference=price):
            return (f"preference={price:g} for {named}",)
    usable = tuple(sorted(preferred.intersection(spec.kinds or preferred)))
    return (f"allowing only {named}",) if question.kinds_with(kinds=usable) else ()


def _changes_for_refused(question: _Question) -> tuple[str, ...]:
    """Return changes that would let a job run that could not run even if it were alone."""
    spec, cluster = question.view.spec, question.cluster
    spent = cost(question.view.received_s, cluster.price_per_hour)
    without = {  # a requirement of the job, and what to say if it runs without it
        "budget": f"a budget above {spent:.2f}",
        "kinds": "allowing other kinds of devices",
        "level": f"no requirement of one {spec.level!r}",
    }
    changes = [
        said
        for name, said in without.items()
        if getattr(spec, name) is not None and question.with_spec(**{name: None})
    ]
    changes += filter(None, [_fewer_needs(question)])
    if smaller := _smaller_minimum(question):
        changes.append(f"min_devices={smaller}")
    up = tuple(dataclasses.replace(node, state="up") for node in cluster.nodes)
    counts: dict[str, int] = {}
    for node in cluster.nodes:
        if node.state != "up":
            counts[node.kind] = counts.get(node.kind, 0) + node.num_devices
    if counts and question.with_cluster(nodes=up):
        changes.append(
            f"the return of nodes that are down or draining ({devices_in_words(counts)})"
        )
    return tuple(changes)
