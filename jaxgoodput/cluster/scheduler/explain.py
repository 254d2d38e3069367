"""Why a job waits, and what would change it: answers found by asking the policy again with one thing changed.

Nothing is guessed from the policy's inner workings, so the answers hold for any policy: "2 more h200" means
that the plan was made with two more and the job was in it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxgoodput.cluster.scheduler.constraints import constraints_of
from jaxgoodput.cluster.scheduler.costs import cost
from jaxgoodput.cluster.scheduler.limits import subtrees
from jaxgoodput.cluster.scheduler.policy import JobView, Plan, Policy
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import (
    capacity_rows,
    devices_in_words,
    goodput_matrix,
    node_size,
    shape_of,
    shapes,
    size_limits,
)
from jaxgoodput.specs import ClusterSpec, JobSpec, Node

Constraint = Literal[
    "none",  # it runs
    "refused",  # it could not run even alone
    "budget",  # the job's own: it is spent
    "quota",
    "tenant limit",
    "tenant budget",
    "guarantee",  # of other tenants
    "reservation",
    "level",
    "minimum run time",  # of others, or others that may not be preempted
    "minimum size",
    "capacity",
    "price of switching",
    "utility",  # the devices do more for others
]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a job has what it has.

    `changes` are in words, the binding one first; each was tried and made the job run. `devices` is how
    many more of a kind would (added as whole nodes of that kind and a rest on one node); several entries
    are alternatives.
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
    """What keeps a job from running, and what would let it run.

    `plan` is what `reconcile` said for these very arguments; left out, it is made again. Costs a few dozen
    plans. Raises ValueError for a job that is not among `jobs`.
    """
    if job not in {view.spec.id for view in jobs}:
        raise ValueError(
            f"there is no job {job!r} among the {len(jobs)} that were given; it may have finished, or its id "
            "is misspelt"
        )
    plan = plan or reconcile(jobs, cluster, policy, now_s)
    question = _Question(job, jobs, cluster, policy, now_s)
    if plan.allocations[job].devices:
        return Explanation(job=job, constraint="none", message=plan.reasons[job])
    if job in constraints_of(jobs, cluster, now_s).refused:
        changes = _changes_for_refused(question)
        spent = question.view.spec.budget is not None and question.with_spec(budget=None)
        return Explanation(
            job=job,
            constraint="budget" if spent else "refused",
            message=plan.reasons[job],
            changes=changes,
        )
    return _explain_waiting(question, plan)


@dataclass(frozen=True)
class _Question:
    """Would the job run if ...?"""

    job: str
    jobs: Sequence[JobView]
    cluster: ClusterSpec
    policy: Policy
    now_s: float

    @property
    def view(self) -> JobView:
        return next(view for view in self.jobs if view.spec.id == self.job)

    def with_cluster(self, **changes) -> bool:
        cluster = dataclasses.replace(self.cluster, **changes)
        return self._runs(self.jobs, cluster)

    def with_spec(self, **changes) -> bool:
        def change(view: JobView) -> JobView:
            if view.spec.id != self.job:
                return view
            return dataclasses.replace(view, spec=_replace_spec(view.spec, changes))

        return self._runs([change(view) for view in self.jobs], self.cluster)

    def with_jobs(self, change: Callable[[JobView], JobView]) -> bool:
        return self._runs([change(view) for view in self.jobs], self.cluster)

    def _runs(self, jobs: Sequence[JobView], cluster: ClusterSpec) -> bool:
        plan = reconcile(jobs, cluster, self.policy, self.now_s)
        return bool(plan.allocations[self.job].devices)

    def with_devices(self, kind: str, count: int) -> bool:
        """With more devices: as many whole nodes as that makes, and the rest on one node."""
        return self.with_cluster(
            nodes=(*self.cluster.nodes, *more_nodes(self.cluster, kind, count))
        )


def more_nodes(cluster: ClusterSpec, kind: str, count: int) -> tuple[Node, ...]:
    """New nodes with `count` devices of a kind: whole ones and a rest, in a topology domain of their own."""
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
        )
        for i, num in enumerate(sizes)
    )


def _replace_spec(spec: JobSpec, changes: Mapping[str, object]) -> JobSpec:
    return dataclasses.replace(spec, **changes)  # pyright: ignore[reportArgumentType]


def _explain_waiting(question: _Question, plan: Plan) -> Explanation:
    view, cluster = question.view, question.cluster
    spec = view.spec
    reasons: list[tuple[Constraint, str, str]] = []  # constraint, what it is, what would change it
    if spec.tenant in cluster.quota:
        quota = {t: n for t, n in cluster.quota.items() if t != spec.tenant}
        if question.with_cluster(quota=quota):
            limit = cluster.quota[spec.tenant]
            more = _least(
                lambda n: question.with_cluster(quota={**cluster.quota, spec.tenant: limit + n}),
                4 * sum(node.num_devices for node in cluster.nodes),
            )
            change = f"a quota of {limit + more} for {spec.tenant!r}" if more else "no quota"
            reasons.append(
                ("quota", f"the quota of tenant {spec.tenant!r} is {limit} devices", change)
            )
    reasons += _tenants_limits(question)
    if cluster.reservations and question.with_cluster(reservations=()):
        reasons.append(
            (
                "reservation",
                "devices are reserved for others",
                f"the end of the reservation of {_reservations(question)}",
            )
        )
    if spec.level is not None and question.with_spec(level=None):
        reasons.append(
            (
                "level",
                f"no domain of level {spec.level!r} has room for the whole job",
                f"no requirement of one {spec.level!r}",
            )
        )
    if question.with_jobs(lambda v: v if v.spec.id == spec.id else _movable(v)):
        reasons.append(
            (
                "minimum run time",
                "jobs that may not be preempted yet, or at all, hold the devices",
                "the end of their minimum run time, or letting them be preempted",
            )
        )
    if smaller := _smaller_minimum(question):
        reasons.append(
            (
                "minimum size",
                f"fewer than its {spec.min_devices} devices are to be had",
                f"min_devices={smaller}",
            )
        )
    devices = _more_devices(question)
    if _has_room(question, plan):
        reasons += _for_want_of_merit(question)
    elif devices:
        taken = sorted(devices)
        reasons.append(
            (
                "capacity",
                f"all devices of kind {', '.join(taken)} that it could use are taken",
                _either(devices),
            )
        )
    else:
        reasons += _for_want_of_merit(question)
    constraint, message, _ = reasons[0]
    changes = [change for _, _, change in reasons]
    if devices and constraint != "capacity" and _either(devices) not in changes:
        changes.append(_either(devices))
    return Explanation(
        job=spec.id,
        constraint=constraint,
        message=f"waits: {message}",
        changes=tuple(change for change in changes if change),
        devices=devices,
    )


def _tenants_limits(question: _Question) -> list[tuple[Constraint, str, str]]:
    """What of the job's tenant, of those above it, or of others' guarantees keeps it from running."""
    cluster = question.cluster
    below = subtrees(cluster)
    found: list[tuple[Constraint, str, str]] = []

    def runs(name: str | None, **changes) -> bool:
        """With another limit of one tenant, or of all."""
        tenants = tuple(
            dataclasses.replace(t, **changes) if name in (None, t.name) else t
            for t in cluster.tenants
        )
        return question.with_cluster(tenants=tenants)

    everything = 4 * sum(node.num_devices for node in cluster.nodes)
    for tenant in cluster.tenants:
        name, limit, budget = tenant.name, tenant.limit, tenant.budget_per_hour
        if question.view.spec.tenant not in below[name]:
            continue
        if limit is not None and runs(name, limit=None):
            more = _least(lambda n, at=limit, name=name: runs(name, limit=at + n), everything)
            change = f"a limit of {limit + more} for {name!r}" if more else "no limit"
            found.append(("tenant limit", f"{name!r} may have {limit} devices at most", change))
        if budget is not None and runs(name, budget_per_hour=None):
            step = max(cluster.price_per_hour.values(), default=1.0)
            more = _least(
                lambda n, at=budget, name=name, step=step: runs(
                    name, budget_per_hour=at + n * step
                ),
                everything,
            )
            change = f"{budget + more * step:g} per hour for {name!r}" if more else "no budget"
            found.append(("tenant budget", f"{name!r} may spend {budget:g} per hour", change))
    if any(tenant.guaranteed for tenant in cluster.tenants) and runs(None, guaranteed=0):
        others = [
            f"{t.name!r} ({t.guaranteed})"
            for t in cluster.tenants
            if t.guaranteed and question.view.spec.tenant not in below[t.name]
        ]
        if others:
            said = f"the devices are guaranteed to others, {' and '.join(others)}"
            found.append(("guarantee", said, "lower guarantees of others"))
    return found


def _either(devices: Mapping[str, int]) -> str:
    return " or ".join(f"{devices[kind]} more {kind}" for kind in sorted(devices))


def _reservations(question: _Question) -> str:
    active = [
        r
        for r in question.cluster.reservations
        if r.start_s <= question.now_s < r.end_s and r.tenant != question.view.spec.tenant
    ]
    return ", ".join(f"{r.num_devices} devices on {r.node} at {r.end_s:.0f} s" for r in active)


def _movable(view: JobView) -> JobView:
    spec = dataclasses.replace(view.spec, preemptible=True, min_run_s=0.0)
    return dataclasses.replace(view, spec=spec)


def _smaller_minimum(question: _Question) -> int | None:
    """The largest smaller power of two as a minimum with which the job runs."""
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
    """For each kind that the job can use, the fewest more devices with which it runs."""
    spec = question.view.spec
    wanted = sum(size_limits(view.spec)[0] for view in question.jobs)
    found: dict[str, int] = {}
    for kind in sorted({shape.kind for shape in question.view.goodput}):
        if spec.kinds is not None and kind not in spec.kinds:
            continue
        size = node_size(question.cluster).get(kind)
        if size is None:
            continue
        count = _least(
            lambda n, kind=kind: question.with_devices(kind, n), size * (wanted // size + 2)
        )
        if count:
            found[kind] = count
    return found


def _least(runs: Callable[[int], bool], most: int) -> int | None:
    """The least number that `runs`, from 1 to `most` (if it goes on running beyond its first one)."""
    high = 1
    while not runs(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2  # does not run
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high


def _has_room(question: _Question, plan: Plan) -> bool:
    """Whether the job would fit beside all that run by the plan."""
    cluster = question.cluster
    kind_of = {node.name: node.kind for node in cluster.nodes}
    offered = shapes(cluster, question.jobs)
    matrix = goodput_matrix([question.view], offered, cluster)
    rows = capacity_rows(cluster, offered)
    left = rows.limits.copy()
    column = {shape: i for i, shape in enumerate(offered)}
    groups: set[str] = set()
    for allocation in plan.allocations.values():
        shape = shape_of(allocation.devices, kind_of)
        if shape is None or (allocation.share_group or "") in groups:
            continue
        if allocation.share_group is not None:
            groups.add(allocation.share_group)
        if shape in column:
            left = left - rows.matrix[:, column[shape]]
        else:
            left = left - shape.num_devices * (rows.matrix.max(axis=1) > 0)
    fits = (rows.matrix <= left[:, None]).all(axis=0)
    return bool((fits & (matrix[0] > 0)).any())


def _for_want_of_merit(question: _Question) -> list[tuple[Constraint, str, str]]:
    found: list[tuple[Constraint, str, str]] = []
    if question.with_jobs(lambda v: dataclasses.replace(v, restart_s=0.0)):
        found.append(
            (
                "price of switching",
                "making room would cost more in restarts than the job gains",
                "cheaper restarts, or time",
            )
        )
    weight = question.view.spec.weight
    factors = [2.0**power for power in range(1, 11)]
    helps = next((f for f in factors if question.with_spec(weight=weight * f)), None)
    found.append(
        (
            "utility",
            f"{type(question.policy).__name__} finds the devices of more use to others",
            f"a weight of {weight * helps:g} instead of {weight:g}" if helps else "",
        )
    )
    return found


def _changes_for_refused(question: _Question) -> tuple[str, ...]:
    """What would let a job run that could not run even alone."""
    spec = question.view.spec
    changes: list[str] = []
    if spec.budget is not None and question.with_spec(budget=None):
        spent = cost(question.view.received_s, question.cluster.price_per_hour)
        changes.append(f"a budget above {spent:.2f}")
    if spec.kinds is not None and question.with_spec(kinds=None):
        changes.append("allowing other kinds of devices")
    if spec.level is not None and question.with_spec(level=None):
        changes.append(f"no requirement of one {spec.level!r}")
    if smaller := _smaller_minimum(question):
        changes.append(f"min_devices={smaller}")
    down = [node for node in question.cluster.nodes if node.state == "down"]
    if down:
        up = tuple(dataclasses.replace(node, state="up") for node in question.cluster.nodes)
        if question.with_cluster(nodes=up):
            counts: dict[str, int] = {}
            for node in down:
                counts[node.kind] = counts.get(node.kind, 0) + node.num_devices
            changes.append(f"the return of nodes that are down ({devices_in_words(counts)})")
    return tuple(changes)
