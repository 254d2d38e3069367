"""The output of `jaxgoodput decide`: the plan for a request, with reasons, as JSON of version 1.

The decision is the service's own: the same tables, policies and `reconcile`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_type_hints

from jaxgoodput._fields.serial import decode
from jaxgoodput.cluster.catalogue import PolicyEntry, catalogue
from jaxgoodput.cluster.scheduler.explain import Explanation, explain
from jaxgoodput.cluster.scheduler.policy import JobView, Plan
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import (
    own_shapes,
    shape_in_words,
    shape_of,
    shapes,
    size_limits,
)
from jaxgoodput.cluster.scheduler.work_left import Experience
from jaxgoodput.cluster.service.decisions.request import DecisionRequest, RequestedJob
from jaxgoodput.cluster.service.planning.decide import rigid_spec
from jaxgoodput.cluster.service.planning.tables import GoodputTable, table_of, work_left
from jaxgoodput.cluster.service.record.state import JobEntry
from jaxgoodput.cluster.service.wire import HeldDevices, Submission
from jaxgoodput.specs import Allocation, JobSpec, Shape

JobChange = Literal["none", "start", "resize", "pause"]


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """What one job gets, and why."""

    id: str
    change: JobChange
    """What to do: nothing, start it, give it other devices, or take all devices from it."""
    allocation: Mapping[str, tuple[int, ...]]
    """Local indices of its devices by node; empty: it waits."""
    num_devices: int
    reason: str
    """Why it gets this."""
    explanation: Explanation | None = None
    """What keeps it waiting and what would let it run; None if it runs, or none was asked for."""


@dataclass(frozen=True, kw_only=True)
class DecisionPlan:
    """The whole output of `jaxgoodput decide`."""

    version: ClassVar[int] = 1
    policy: str
    jobs: tuple[PlannedJob, ...]
    """All jobs in the order of the request."""
    next_s: float
    """Latest time of the next decision; an event may bring it forward."""
    objective: float | None = None
    """Value of the decision, if the policy solves an optimisation problem."""
    bound: float | None = None
    """Best possible value."""


def decide(request: DecisionRequest) -> DecisionPlan:
    """Return the plan for a request. Raises ValueError for an impossible one, PlanError for a defect."""
    named = _policy(request)
    views = _views(request, named)
    plan = reconcile(
        views,
        request.cluster,
        named.policy,
        request.now_s,
        min_gap_s=0.0,
        max_gap_s=request.max_gap_s,
    )
    explanations = {
        id_: explain(id_, views, request.cluster, named.policy, request.now_s, plan=plan)
        for id_, given in plan.allocations.items()
        if request.explain and not given.devices
    }
    return DecisionPlan(
        policy=request.policy,
        jobs=tuple(
            _planned(job, change, plan, explanations.get(job.id))
            for job, change in zip(request.jobs, _changes(plan, request), strict=True)
        ),
        next_s=plan.next_solve_s,
        objective=plan.objective,
        bound=plan.bound,
    )


def _policy(request: DecisionRequest) -> PolicyEntry:
    """Return the policy with its settings. Raises ValueError for unknown names and wrong values."""
    known = catalogue()
    if request.policy not in known:
        raise ValueError(
            f"policy is {request.policy!r}; it must be one of {', '.join(known)}. `jaxgoodput simulate "
            "--list` describes them."
        )
    named = known[request.policy]
    if named.sharing:
        raise ValueError(
            f"policy {request.policy!r} puts several jobs on the same devices, for which a request has no "
            "goodput. Choose another one."
        )
    policy: Any = named.policy
    kinds = get_type_hints(type(policy))
    for name in request.settings:
        if name not in kinds:
            raise ValueError(
                f"settings: policy {request.policy!r} has no {name!r}; it has {sorted(kinds)}."
            )
    values = {
        name: decode(value, kinds[name], f"settings.{name}")
        for name, value in request.settings.items()
    }
    return replace(named, policy=replace(policy, **values))


def _views(request: DecisionRequest, named: PolicyEntry) -> tuple[JobView, ...]:
    cluster = request.cluster
    kind_of = {node.name: node.kind for node in cluster.nodes}
    held = {shape_of(job.allocation, kind_of) for job in request.jobs}
    usual = {*shapes(cluster)}
    offered = {*usual, *(shape for shape in held if shape is not None)}
    # As in the service, a job that never ran says nothing about how long jobs run.
    views, experience = [], Experience(job for job in request.ended if job.device_s > 0.0)
    for job in request.jobs:
        spec = job.spec
        if named.mode != "adaptive":
            held = sum(map(len, job.allocation.values()))
            spec = rigid_spec(spec, job.devices_per_process, held, cluster)
        own = own_shapes(cluster, spec)
        _require_offered(job, usual | own)
        table = _table(job, spec, sorted(offered | own), request.now_s)
        asked = job.num_devices or job.max_devices
        guess = experience.guess(job.script, job.tenant, asked)
        views.append(replace(_view(job, spec, table, request), work_guess=guess))
    return tuple(views)


def _table(
    job: RequestedJob, spec: JobSpec, offered: Sequence[Shape], now_s: float
) -> GoodputTable:
    """Return the goodput table that the job gives, or the service's for a job that gives none."""
    largest = job.largest_profiled
    if job.goodput:
        present = sum(map(len, job.allocation.values()))
        return GoodputTable(
            goodput={entry.shape: entry.goodput for entry in job.goodput},
            error={e.shape: e.error for e in job.goodput if e.error is not None},
            largest=present if largest is None else largest,
        )
    # The service's own rules for names and weights do not apply to jobs of other programs.
    own = {name: getattr(spec, name) for name in ("mode", "num_devices", "kinds")}
    least, most = size_limits(spec)
    submission = Submission(
        spec=JobSpec(id="job", min_devices=least, max_devices=most, **own),
        command=("-",),
        workdir=None if job.hints is None else "-",
        devices_per_process=job.devices_per_process,
    )
    past = ()
    if job.since_s is not None:
        past = (HeldDevices(start_s=job.since_s, end_s=None, devices=job.allocation),)
    entry = JobEntry(submission=submission, secret="", submitted_s=0.0, hints=job.hints, past=past)
    table = table_of(entry, offered, now_s)
    return table if largest is None else replace(table, largest=largest)


def _require_offered(job: RequestedJob, offered: Collection[Shape]) -> None:
    """Raise ValueError if a table names a size on more or fewer nodes than a job of that size is given."""
    by_size = {(shape.kind, shape.num_devices): shape for shape in offered}
    for entry in job.goodput:
        shape = by_size.get((entry.kind, entry.num_devices))
        if shape is not None and entry.shape not in offered:
            raise ValueError(
                f"job {job.id!r} has the goodput of {shape_in_words(entry.shape)}, and the scheduler gives a "
                f"job of this size {shape_in_words(shape)}. Give its goodput there, measured or estimated."
            )


def _view(
    job: RequestedJob, spec: JobSpec, table: GoodputTable, request: DecisionRequest
) -> JobView:
    remaining = job.remaining
    if remaining is None and job.hints is not None and not job.goodput:
        remaining = work_left(job.hints, table)
    return JobView(
        spec=spec,
        allocation=Allocation(devices=job.allocation),
        goodput=table.goodput,
        goodput_error=table.error,
        submitted_s=job.submitted_s,
        devices_per_process=job.devices_per_process,
        since_s=job.since_s,
        paused_s=job.paused_s,
        restoring_until_s=job.restoring_until_s,
        num_restarts=job.num_restarts,
        restart_s=job.restart_s,
        received_s=job.received_s,
        fraction_received_s=job.ran_s,
        largest_profiled=table.largest,
        remaining=remaining,
        rigid_shape_hint=spec.num_devices or spec.min_devices,
        tenant_received_s=request.tenant_received_s,
        avoids=job.avoids,
    )


def _planned(
    job: RequestedJob, change: JobChange, plan: Plan, explanation: Explanation | None
) -> PlannedJob:
    given = plan.allocations[job.id]
    return PlannedJob(
        id=job.id,
        change=change,
        allocation=given.devices,
        num_devices=given.num_devices,
        reason=plan.reasons[job.id],
        explanation=explanation,
    )


def _changes(plan: Plan, request: DecisionRequest) -> list[JobChange]:
    """Return the change of each job of the request, in its order."""
    found: dict[str, JobChange] = {
        **dict.fromkeys(plan.start, "start"),
        **dict.fromkeys(plan.resize, "resize"),
        **dict.fromkeys(plan.pause, "pause"),
    }
    return [found.get(job.id, "none") for job in request.jobs]
