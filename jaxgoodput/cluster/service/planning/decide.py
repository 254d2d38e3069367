"""From the state to a plan: what the journal says as `JobView`s, and the `reconcile` of the simulator.

Pure: the moment is an argument, and so are the rules.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from absl import logging

from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.scheduler.alternatives import changes, shapes_of, with_job
from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.policy import JobView, Plan
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.restart_estimate import estimated_restart_s
from jaxgoodput.cluster.scheduler.shapes import shape_in_words, shape_of, shapes
from jaxgoodput.cluster.service.planning.tables import GoodputTable, table_of
from jaxgoodput.cluster.service.record.commands import CommandRefused
from jaxgoodput.cluster.service.record.events import PlanMade, ReasonsGiven
from jaxgoodput.cluster.service.record.state import JobEntry, State, received
from jaxgoodput.cluster.service.wire import JobExplanation, Sharing, Submission, WhatIf, WouldChange
from jaxgoodput.specs import Allocation, ClusterSpec, Shape

Tables = Callable[[JobEntry, Sequence[Shape], float], GoodputTable]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What plans are made by."""

    named: PolicyEntry
    sharing: Sharing = field(default_factory=Sharing)
    min_gap_s: float = 5.0
    max_gap_s: float = 60.0
    restart_s: float = 10.0
    """What a change of devices costs a job that has not shown it yet."""
    half_life_s: float = 24 * 3600.0
    """After which what a tenant has had counts half."""


def cluster_of(state: State, sharing: Sharing) -> ClusterSpec | None:
    """The cluster as it is now; None where there is no node yet."""
    nodes = tuple(entry.node for entry in state.nodes.values())
    if not nodes:
        return None
    known = {node.name for node in nodes}
    reserved = tuple(r for r in sharing.reservations if r.node in known)
    return ClusterSpec(
        nodes=nodes,
        reservations=reserved,
        price_per_hour=sharing.price_per_hour,
        quota=sharing.quota,
        tenants=sharing.tenants,
    )


def views_of(
    state: State, now_s: float, rules: Rules, tables: Tables = table_of
) -> tuple[JobView, ...]:
    """What a policy may know of the jobs that are not over."""
    cluster = cluster_of(state, rules.sharing)
    if cluster is None:
        return ()
    kind_of = state.kind_of
    held = (shape_of(e.allocation.devices, kind_of) for e in state.active.values())
    offered = tuple(sorted({*shapes(cluster), *(s for s in held if s is not None)}))
    had = _of_tenants(state, now_s, rules.half_life_s) if rules.sharing.tenants else {}
    return tuple(
        _view(entry, cluster, offered, kind_of, now_s, rules, tables, had)
        for entry in state.active.values()
    )


def _view(
    entry: JobEntry,
    cluster: ClusterSpec,
    offered: Sequence[Shape],
    kind_of: Mapping[str, str],
    now_s: float,
    rules: Rules,
    tables: Tables,
    had: Mapping[str, float],
) -> JobView:
    spec = entry.spec
    if rules.named.mode != "adaptive" and spec.mode == "adaptive":
        # A policy that does not resize jobs: they have the most that they may, or all there is.
        total = sum(node.num_devices for node in cluster.nodes)
        size = spec.num_devices or min(spec.max_devices, total)
        spec = dataclasses.replace(spec, mode="rigid", num_devices=size)
        entry = dataclasses.replace(
            entry, submission=dataclasses.replace(entry.submission, spec=spec)
        )
    if spec.mode == "rigid":
        offered = (*offered, *_exactly(cluster, spec.num_devices or 1))
    try:
        table = tables(entry, offered, now_s)
    except (ArithmeticError, ValueError, TypeError, MemoryError) as error:
        # What one job tells must not cost the others their plan.
        logging.warning(
            "job %s: nothing follows from its hints (%s: %s); it counts as one that tells nothing",
            spec.id,
            type(error).__name__,
            error,
        )
        table = tables(dataclasses.replace(entry, hints=None), offered, now_s)
    counted = received(entry, kind_of, now_s)
    took_s = () if entry.hints is None else entry.hints.restarts_s
    restart_s = estimated_restart_s(rules.restart_s, took_s)
    until_s = None if entry.since_s is None else entry.since_s + restart_s
    return JobView(
        spec=spec,
        allocation=entry.allocation,
        goodput=table.goodput,
        goodput_error=table.error,
        submitted_s=entry.submitted_s,
        since_s=entry.since_s,
        restoring_until_s=until_s if until_s is not None and until_s > now_s else None,
        num_restarts=entry.num_changes,
        restart_s=restart_s,
        received_s=counted.received_s,
        fraction_received_s=counted.ran_s,
        largest_profiled=table.largest,
        remaining=None if entry.hints is None else entry.hints.remaining,
        rigid_shape_hint=spec.num_devices or spec.min_devices,
        tenant_received_s=had,
    )


def _exactly(cluster: ClusterSpec, size: int) -> set[Shape]:
    """Packed shapes of one size: on one node, or on as few as it takes."""
    found = set()
    for kind in {node.kind for node in cluster.nodes}:
        each = max(node.num_devices for node in cluster.nodes if node.kind == kind)
        if each:
            found.add(Shape(kind, min(-(-size // each), size), size))
    return found


def _of_tenants(state: State, now_s: float, half_life_s: float) -> dict[str, float]:
    """Device-seconds that every tenant had, those long ago counting less."""
    rate = math.log(2.0) / half_life_s
    total: dict[str, float] = {}
    for entry in state.jobs.values():
        for held in entry.past:
            end_s = now_s if held.end_s is None else held.end_s
            ago = math.exp(-rate * max(now_s - end_s, 0.0))
            before = math.exp(-rate * max(now_s - held.start_s, 0.0))
            count = sum(map(len, held.devices.values()))
            tenant = entry.spec.tenant
            total[tenant] = total.get(tenant, 0.0) + count * max(ago - before, 0.0) / rate
    return total


def plan(state: State, now_s: float, rules: Rules, tables: Tables = table_of) -> Plan | None:
    """What every job gets now; None where there is nothing to plan."""
    cluster = cluster_of(state, rules.sharing)
    views = views_of(state, now_s, rules, tables)
    if cluster is None or not views:
        return None
    # The line that the simulator calls, too.
    return reconcile(
        views,
        cluster,
        rules.named.policy,
        now_s,
        min_gap_s=rules.min_gap_s,
        max_gap_s=rules.max_gap_s,
    )


def as_events(state: State, found: Plan, now_s: float) -> tuple[PlanMade, ReasonsGiven]:
    """A plan as what it changes, and the reasons that are others than before."""
    moved: dict[str, Allocation] = {}
    for id_, allocation in found.allocations.items():
        before = state.jobs[id_].allocation
        if dict(before.devices) != dict(allocation.devices):
            moved[id_] = dataclasses.replace(allocation, generation=before.generation + 1)
    planned = PlanMade(changes=moved, solved_s=now_s, next_solve_s=found.next_solve_s)
    same = all(state.jobs[id_].reason == why for id_, why in found.reasons.items())
    return planned, ReasonsGiven(reasons={} if same else found.reasons)


def explained(state: State, job: str, now_s: float, rules: Rules) -> JobExplanation:
    """Why a job has what it has. Costs a few dozen plans."""
    entry = state.jobs[job]
    cluster = cluster_of(state, rules.sharing)
    if entry.is_over or cluster is None:
        why = entry.reason if entry.is_over else "waits: no node has joined"
        return JobExplanation(job=job, constraint="none", message=why, changes=(), devices={})
    views = views_of(state, now_s, rules)
    said = explain(job, views, cluster, rules.named.policy, now_s)
    return JobExplanation(
        job=job,
        constraint=said.constraint,
        message=said.message,
        changes=said.changes,
        devices=said.devices,
    )


def what_if(state: State, submission: Submission, now_s: float, rules: Rules) -> WhatIf:
    """The plan if one job more were there. Raises Refused where there is no cluster yet."""
    cluster = cluster_of(state, rules.sharing)
    if cluster is None:
        raise CommandRefused(409, "no node has joined yet, so nobody can say what a job would get.")
    views = views_of(state, now_s, rules)
    before = reconcile(views, cluster, rules.named.policy, now_s) if views else None
    entry = JobEntry(submission=submission, secret="", submitted_s=now_s, settled_s=now_s)
    alone = dataclasses.replace(state, jobs={submission.spec.id: entry})
    (view,) = views_of(alone, now_s, rules)
    then = with_job(view, views, cluster, rules.named.policy, now_s)
    moved = changes(views, cluster, before, then) if before is not None else ()
    given = shapes_of(then, cluster)[submission.spec.id]
    return WhatIf(
        job=submission.spec.id,
        gets=_in_words(given),
        why=then.reasons[submission.spec.id],
        others=tuple(
            WouldChange(job=c.job, before=_in_words(c.before), after=_in_words(c.after))
            for c in moved
        ),
    )


def _in_words(shape: Shape | None) -> str:
    return "no devices" if shape is None else shape_in_words(shape)
