"""The plan for a state: the state as `JobView`s, and the same `reconcile` that the simulator calls.

Everything here is pure: the time and the rules are arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from absl import logging

from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.scheduler.alternatives import changes, shapes_of, with_job
from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.placement.amounts import needs_of
from jaxgoodput.cluster.scheduler.policy import AvoidedNode, JobView, Plan
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.restart_estimate import estimated_restart_s
from jaxgoodput.cluster.scheduler.shapes import (
    own_shapes,
    shape_in_words,
    shape_of,
    shapes,
    size_limits,
)
from jaxgoodput.cluster.scheduler.work_left import EndedJob, Experience
from jaxgoodput.cluster.service.planning.tables import GoodputTable, table_of, work_left
from jaxgoodput.cluster.service.record import faults
from jaxgoodput.cluster.service.record.commands import CommandRefused
from jaxgoodput.cluster.service.record.events import PlanMade, ReasonsGiven
from jaxgoodput.cluster.service.record.state import JobEntry, State, counted_until
from jaxgoodput.cluster.service.wire import (
    JobExplanation,
    PlanOptions,
    Sharing,
    Submission,
    WhatIf,
    WouldChange,
)
from jaxgoodput.specs import ClusterSpec, JobSpec, Shape
from jaxgoodput.text import seconds

Tables = Callable[[JobEntry, Sequence[Shape], float], GoodputTable]


@dataclass(frozen=True, kw_only=True)
class PlanRules(PlanOptions):
    """The options of plans, with the policy object that `policy` names."""

    named: PolicyEntry
    half_life_s: float = 24 * 3600.0
    """Time after which a tenant's past use counts half."""


def cluster_of(state: State, sharing: Sharing) -> ClusterSpec | None:
    """Return the cluster as it is now; None if no node has joined yet."""
    nodes = tuple(entry.node for entry in state.nodes.values())
    if not nodes:
        return None
    present = tuple(r for r in sharing.reservations if r.node in state.nodes)
    rules = vars(dataclasses.replace(sharing, reservations=present))
    return ClusterSpec(nodes=nodes, **rules, changed_s=state.news_s)


def views_of(
    state: State, now_s: float, rules: PlanRules, tables: Tables = table_of
) -> tuple[JobView, ...]:
    """Return what a policy may know of each job that has not ended."""
    cluster = cluster_of(state, rules.sharing)
    if cluster is None:
        return ()
    kind_of = state.kind_of
    held = (shape_of(e.allocation.devices, kind_of) for e in state.active.values())
    offered = {*shapes(cluster), *(s for s in held if s is not None)}
    used = _used_by_tenant(state, now_s, rules.half_life_s) if rules.sharing.tenants else {}
    views, reported = [], faults.in_force(state.faults, now_s)
    experience = _experience(state)
    own: dict[tuple, set[Shape]] = {}  # by what it depends on: the job's limits and needs
    for entry in map(_without_released, state.active.values()):
        entry = entry if rules.named.mode == "adaptive" else _rigid(entry, cluster)
        spec = entry.spec
        limits = (*size_limits(spec), spec.kinds, needs_of(spec))
        if limits not in own:
            own[limits] = own_shapes(cluster, spec)
        table = _table(entry, sorted(offered | own[limits]), now_s, tables)
        view = _view(counted_until(now_s, entry, kind_of), table, now_s, rules, used)
        guess = experience.guess(*_known_by(state.jobs[spec.id]))
        view = dataclasses.replace(view, work_guess=guess)
        if reported:
            avoids = _with_others(avoided_by(reported, spec.id, now_s), cluster)
            view = dataclasses.replace(view, avoids=avoids)
        views.append(view)
    return tuple(views)


def _experience(state: State) -> Experience:
    """Return what the jobs that have ended say about the work of others."""
    ended = (entry for entry in state.jobs.values() if entry.is_over and entry.received_s)
    return Experience(
        EndedJob(*_known_by(entry), math.fsum(entry.received_s.values())) for entry in ended
    )


def _known_by(entry: JobEntry) -> tuple[str, str, int]:
    """Return what jobs that are alike have in common: script, owner, and the devices asked for."""
    spec = entry.spec
    return script_of(entry.submission.command), spec.tenant, spec.num_devices or spec.max_devices


def script_of(command: Sequence[str]) -> str:
    """Return which program a command runs: its first Python file or module; empty if that is not to be seen.

    >>> script_of(["env", "X=1", "python", "train.py", "--lr=1"]), script_of(["python", "-m", "a.train"])
    ('train.py', 'a.train')
    >>> script_of(["numactl", "-m", "0", "python", "train.py"]), script_of(["bash", "run.sh"])
    ('train.py', '')
    """
    for i, word in enumerate(command):
        is_module = i > 1 and command[i - 1] == "-m" and "python" in command[i - 2]
        if is_module or word.endswith(".py"):
            return word
    return ""


def _with_others(avoids: Mapping[str, AvoidedNode], cluster: ClusterSpec) -> dict[str, AvoidedNode]:
    """Return avoided nodes, those usable that are all there is of their kind: to wait would gain nothing."""
    kinds = [node.kind for node in cluster.nodes if node.state == "up"]
    only = {node.name for node in cluster.nodes if kinds.count(node.kind) < 2}
    return {
        name: dataclasses.replace(one, is_usable=one.is_usable or name in only)
        for name, one in avoids.items()
    }


def _without_released(entry: JobEntry) -> JobEntry:
    """Return a job that wants no more devices than it still needs until its end."""
    spec = entry.spec
    if entry.most_devices is None or entry.most_devices >= spec.max_devices:
        return entry
    spec = dataclasses.replace(spec, max_devices=max(entry.most_devices, spec.min_devices))
    submission = dataclasses.replace(entry.submission, spec=spec)
    return dataclasses.replace(entry, submission=submission)


def avoided_by(reported: faults.Faults, job: str, now_s: float) -> dict[str, AvoidedNode]:
    """Return the nodes that are kept apart from a job now, because it or several other jobs reported them.

    What other jobs report never makes a job wait, because it may not hold for this one.
    """
    found: dict[str, AvoidedNode] = {}
    for (node, other), one in faults.of_job(reported, job, now_s).items():
        is_own = other == job
        until_s, is_usable = one.end_s(own=is_own), one.fault == "slow" or not is_own
        if (known := found.get(node)) is not None:
            until_s, is_usable = max(until_s, known.until_s), is_usable and known.is_usable
        found[node] = AvoidedNode(until_s=until_s, is_usable=is_usable)
    return found


def _rigid(entry: JobEntry, cluster: ClusterSpec) -> JobEntry:
    """Return a job for a policy that does not resize jobs."""
    each, held = entry.submission.devices_per_process, entry.allocation.num_devices
    spec = rigid_spec(entry.spec, each, held, cluster)
    submission = dataclasses.replace(entry.submission, spec=spec)
    return dataclasses.replace(entry, submission=submission)


def rigid_spec(spec: JobSpec, each: int, held: int, cluster: ClusterSpec) -> JobSpec:
    """Return the spec for a policy that does not resize jobs: with a fixed size, the most that it may have.

    A job that has devices, `held` of them, stays at this size, also when nodes come and go. `each` is the
    number of devices of each process.
    """
    if spec.mode != "adaptive":
        return spec
    most = held or sum(node.num_devices for node in cluster.nodes)
    size = spec.num_devices or max(min(spec.max_devices, most) // each, 1) * each
    return dataclasses.replace(spec, mode="rigid", num_devices=size)


def _table(entry: JobEntry, offered: Sequence[Shape], now_s: float, tables: Tables) -> GoodputTable:
    """Return the goodput table of a job; made without its hints if no table can be made from them."""
    try:
        return tables(entry, offered, now_s)
    except (ArithmeticError, ValueError, TypeError, MemoryError) as error:
        # The hints of one job must not cost the others their plan.
        logging.warning(
            "job %s: no table can be made from its hints (%s: %s); it is planned as a job without hints",
            entry.spec.id,
            type(error).__name__,
            error,
        )
        return tables(dataclasses.replace(entry, hints=None), offered, now_s)


def _view(
    entry: JobEntry, table: GoodputTable, now_s: float, rules: PlanRules, used: Mapping[str, float]
) -> JobView:
    spec, hints = entry.spec, entry.hints
    restart_s = estimated_restart_s(rules.restart_s, () if hints is None else hints.restarts_s)
    until_s = None if entry.since_s is None else entry.since_s + restart_s
    return JobView(
        spec=spec,
        allocation=entry.allocation,
        goodput=table.goodput,
        goodput_error=table.error,
        devices_per_process=entry.submission.devices_per_process,
        submitted_s=entry.submitted_s,
        since_s=entry.since_s,
        paused_s=_paused_s(entry),
        restoring_until_s=until_s if until_s is not None and until_s > now_s else None,
        num_restarts=entry.num_changes,
        restart_s=restart_s,
        received_s=entry.received_s,
        fraction_received_s=entry.ran_s,
        largest_profiled=table.largest,
        remaining=None if hints is None else work_left(hints, table),
        rigid_shape_hint=spec.num_devices or spec.min_devices,
        tenant_received_s=used,
    )


def _paused_s(entry: JobEntry) -> float | None:
    """Return when a waiting job lost its last devices; None if it had none, or runs."""
    if entry.allocation.devices or not entry.past:
        return None
    return entry.past[-1].end_s


def _used_by_tenant(state: State, now_s: float, half_life_s: float) -> dict[str, float]:
    """Return the device-seconds that each tenant has used, with a weight that halves every half-life."""
    rate = math.log(2.0) / half_life_s
    total: dict[str, float] = {}
    for entry in state.jobs.values():
        for held in entry.past:
            end_s = now_s if held.end_s is None else held.end_s
            # The integral of the weight over the period.
            at_end = math.exp(-rate * max(now_s - end_s, 0.0))
            at_start = math.exp(-rate * max(now_s - held.start_s, 0.0))
            count = sum(map(len, held.devices.values()))
            tenant = entry.spec.tenant
            total[tenant] = total.get(tenant, 0.0) + count * max(at_end - at_start, 0.0) / rate
    return total


def plan(state: State, now_s: float, rules: PlanRules, tables: Tables = table_of) -> Plan | None:
    """Return the allocation of every job; None if there are no jobs or no nodes."""
    cluster = cluster_of(state, rules.sharing)
    views = views_of(state, now_s, rules, tables)
    if cluster is None or not views:
        return None
    return reconcile(
        views,
        cluster,
        rules.named.policy,
        now_s,
        min_gap_s=rules.min_gap_s,
        max_gap_s=rules.max_gap_s,
    )


def as_events(state: State, found: Plan, now_s: float) -> tuple[PlanMade, ReasonsGiven]:
    """Return a plan as the allocations that it changes, and its reasons if any of them is new."""
    moved = {
        id_: dataclasses.replace(allocation, generation=before.generation + 1)
        for id_, allocation in found.allocations.items()
        if dict((before := state.jobs[id_].allocation).devices) != dict(allocation.devices)
    }
    planned = PlanMade(changes=moved, solved_s=now_s, next_solve_s=found.next_solve_s)
    same = all(state.jobs[id_].reason == why for id_, why in found.reasons.items())
    return planned, ReasonsGiven(reasons={} if same else found.reasons)


def explained(state: State, job: str, now_s: float, rules: PlanRules) -> JobExplanation:
    """Explain why a job has its devices, or none. This makes a few dozen plans."""
    entry = state.jobs[job]
    cluster = cluster_of(state, rules.sharing)
    if entry.is_over or cluster is None:
        why = entry.reason if entry.is_over else "waits: no node has joined"
        return JobExplanation(job=job, constraint="none", message=why, changes=(), devices={})
    views = views_of(state, now_s, rules)
    found = explain(job, views, cluster, rules.named.policy, now_s)
    message = "; ".join((found.message, *_apart_in_words(state, job, now_s)))
    return JobExplanation(**vars(dataclasses.replace(found, message=message)))


def _apart_in_words(state: State, job: str, now_s: float) -> list[str]:
    """Say which nodes are kept apart from a job, why, and for how long."""
    return [
        f"{node} is kept apart from {'it' if other == job else 'all jobs'} for "
        f"{seconds(one.end_s(own=other == job) - now_s)}, because it is {one.fault}: {one.why}"
        for (node, other), one in faults.of_job(state.faults, job, now_s).items()
    ]


def what_if(state: State, submission: Submission, now_s: float, rules: PlanRules) -> WhatIf:
    """Return the plan as it would be with one more job. Raises CommandRefused without nodes."""
    cluster = cluster_of(state, rules.sharing)
    if cluster is None:
        raise CommandRefused(
            409,
            "no node has joined yet, so it is not known what a job would get. Add a node first.",
        )
    views = views_of(state, now_s, rules)
    before = reconcile(views, cluster, rules.named.policy, now_s) if views else None
    entry = JobEntry(submission=submission, secret="", submitted_s=now_s, settled_s=now_s)
    with_it = dataclasses.replace(state, jobs={**state.jobs, submission.spec.id: entry})
    (view,) = (v for v in views_of(with_it, now_s, rules) if v.spec.id == submission.spec.id)
    then = with_job(view, views, cluster, rules.named.policy, now_s)
    moved = changes(views, cluster, before, then) if before is not None else ()
    return WhatIf(
        job=submission.spec.id,
        gets=_in_words(shapes_of(then, cluster)[submission.spec.id]),
        why=then.reasons[submission.spec.id],
        others=tuple(
            WouldChange(job=c.job, before=_in_words(c.before), after=_in_words(c.after))
            for c in moved
        ),
    )


def _in_words(shape: Shape | None) -> str:
    return "no devices" if shape is None else shape_in_words(shape)
