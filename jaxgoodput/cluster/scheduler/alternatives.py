"""What a plan could have been: a job on other shapes, or one job more, and who would have paid for it.

Like `explain`, by asking the policy again with one thing changed. A job's *speed* is its goodput over that of
the best shape in its table, 0 while it waits; the *price* of a shape is the sum of the speeds that others
lose: 0.5 is half a job at its best.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxgoodput.cluster.scheduler.policy import JobView, Plan, Policy
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import shape_of, size_limits
from jaxgoodput.specs import ClusterSpec, Shape

# By so much a job's weight is raised to see what a shape would cost that the policy would not give it.
INSISTING = 1000.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A job that has something else in one plan than in another."""

    job: str
    before: Shape | None
    """None: it waits."""
    after: Shape | None
    speed_before: float
    speed_after: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A job on a shape that it does not have by the plan."""

    shape: Shape
    speed: float
    given: bool
    """Whether the policy gives it where the job takes nothing else; otherwise only at a far higher weight."""
    price: float
    others: tuple[Change, ...]
    """Who would have something else, the one that loses most first."""


def speed(view: JobView, shape: Shape | None) -> float:
    """Goodput on a shape over that on the best one; 0 where it waits, NaN where its table lacks the shape."""
    if shape is None:
        return 0.0
    best = max(view.goodput.values(), default=0.0)
    return view.goodput.get(shape, float("nan")) / best if best > 0 else float("nan")


def shapes_of(plan: Plan, cluster: ClusterSpec) -> dict[str, Shape | None]:
    """What every job has by a plan."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    return {job: shape_of(given.devices, kind_of) for job, given in plan.allocations.items()}


def changes(
    jobs: Sequence[JobView], cluster: ClusterSpec, before: Plan, after: Plan
) -> tuple[Change, ...]:
    """The jobs of both plans that have another shape, the one that loses most first."""
    had, has = shapes_of(before, cluster), shapes_of(after, cluster)
    found = [
        Change(
            job=view.spec.id,
            before=had[view.spec.id],
            after=has[view.spec.id],
            speed_before=speed(view, had[view.spec.id]),
            speed_after=speed(view, has[view.spec.id]),
        )
        for view in jobs
        if view.spec.id in had and view.spec.id in has and had[view.spec.id] != has[view.spec.id]
    ]
    return tuple(sorted(found, key=lambda c: (c.speed_after - c.speed_before, c.job)))


def lost(found: Sequence[Change]) -> float:
    """The sum of the speeds that are lost, less what is gained; what is not known is left out."""
    differences = (c.speed_before - c.speed_after for c in found)
    return float(sum(d for d in differences if d == d))


def alternatives(
    job: str,
    jobs: Sequence[JobView],
    cluster: ClusterSpec,
    policy: Policy,
    now_s: float,
    plan: Plan,
    *,
    most: int = 8,
) -> tuple[Alternative, ...]:
    """What a job could have had instead of what `plan`, of these very arguments, gives it.

    Of every kind the packed sizes that are powers of two, the fastest `most` of them. A shape is left out
    where no weight would make the policy give it. Costs two plans for each at most. Raises ValueError for
    a job that is not among `jobs`.
    """
    view = next((v for v in jobs if v.spec.id == job), None)
    if view is None:
        raise ValueError(
            f"there is no job {job!r} among the {len(jobs)} that were given; it may have finished, or its id "
            "is misspelt"
        )
    present = shapes_of(plan, cluster)[job]
    rest = [v for v in jobs if v.spec.id != job]
    found = []
    for shape in _candidates(view, present, most):
        for insisting in (1.0, INSISTING):
            asked = [_only(v, shape, insisting) if v is view else v for v in jobs]
            other = reconcile(asked, cluster, policy, now_s)
            if shapes_of(other, cluster)[job] == shape:
                differences = changes(rest, cluster, plan, other)
                found.append(
                    Alternative(
                        shape=shape,
                        speed=speed(view, shape),
                        given=insisting == 1.0,
                        price=lost(differences),
                        others=differences,
                    )
                )
                break
    return tuple(sorted(found, key=lambda a: (-a.speed, a.shape)))


def with_job(
    view: JobView, jobs: Sequence[JobView], cluster: ClusterSpec, policy: Policy, now_s: float
) -> Plan:
    """The plan if this job were there too. Raises ValueError where one of them has its id already."""
    return reconcile([*jobs, view], cluster, policy, now_s)


def _candidates(view: JobView, present: Shape | None, most: int) -> list[Shape]:
    least, largest = size_limits(view.spec)
    packed: dict[tuple[str, int], Shape] = {}
    for shape in sorted(view.goodput):
        size = shape.num_devices
        rounded = size & (size - 1) == 0 or least == largest
        if rounded and least <= size <= largest and view.goodput[shape] > 0:
            packed.setdefault((shape.kind, size), shape)  # sorted: on the fewest nodes
    allowed = [s for s in packed.values() if view.spec.kinds is None or s.kind in view.spec.kinds]
    return sorted((s for s in allowed if s != present), key=lambda s: -view.goodput[s])[:most]


def _only(view: JobView, shape: Shape, insisting: float) -> JobView:
    """The job, if it took nothing but one shape."""
    size = shape.num_devices
    changed: Mapping[str, object] = {
        "min_devices": size,
        "max_devices": size,
        "num_devices": size,
        "kinds": (shape.kind,),
        "weight": view.spec.weight * insisting,
    }
    spec = dataclasses.replace(view.spec, **changed)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(view, spec=spec, goodput={shape: view.goodput[shape]})
