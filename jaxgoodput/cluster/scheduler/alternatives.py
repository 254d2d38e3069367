"""What a plan could have been: a job on another shape, or one more job, and what that costs other jobs.

Answers are found, as in `explain`, by asking the policy again with one thing changed. A job's *speed* is its
goodput relative to the best shape in its table, 0 while it waits. The *price* of a shape is the total speed
that other jobs lose; 0.5 is half a job running at its best.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxgoodput.cluster.scheduler.policy import JobView, Plan, Policy
from jaxgoodput.cluster.scheduler.priors import Priors
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import shape_of, size_limits, takes
from jaxgoodput.specs import ClusterSpec, Shape

# Factor on a job's weight to learn the price of a shape that the policy would not give it otherwise.
INSISTING = 1000.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A job whose shape (kind and number of devices, and number of nodes) differs between two plans."""

    job: str
    before: Shape | None
    """Shape in the first plan; None if the job waits."""
    after: Shape | None
    speed_before: float
    """Goodput on `before`, relative to the job's best shape; 0 if it waits, NaN if unknown."""
    speed_after: float
    """Likewise on `after`."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A shape (kind and number of devices, and number of nodes) that a job could have instead of its own."""

    shape: Shape
    speed: float
    """Goodput on it, relative to the job's best shape."""
    given: bool
    """Whether the policy gives the shape if the job accepts nothing else; if False, it does so only at a far
    higher weight."""
    price: float
    """Speed that other jobs lose, minus the speed that others gain; see `lost`."""
    others: tuple[Change, ...]
    """Changes for other jobs, the largest loss first."""


def speed(view: JobView, shape: Shape | None) -> float:
    """Return a job's goodput on a shape relative to its best one.

    The speed is 0 if `shape` is None (the job waits), NaN if the job's table lacks the shape.
    """
    if shape is None:
        return 0.0
    best = max(view.goodput.values(), default=0.0)
    return view.goodput.get(shape, float("nan")) / best if best > 0 else float("nan")


def shapes_of(plan: Plan, cluster: ClusterSpec) -> dict[str, Shape | None]:
    """Return each job's shape in a plan, by id; None for jobs that wait."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    return {job: shape_of(given.devices, kind_of) for job, given in plan.allocations.items()}


def changes(
    jobs: Sequence[JobView], cluster: ClusterSpec, before: Plan, after: Plan
) -> tuple[Change, ...]:
    """Return the jobs of both plans whose shape differs, the largest loss of speed first."""
    had, has = shapes_of(before, cluster), shapes_of(after, cluster)
    priors = Priors(cluster)
    found = [
        Change(
            job=id_,
            before=had[id_],
            after=has[id_],
            speed_before=speed(view, had[id_]),
            speed_after=speed(view, has[id_]),
        )
        for view in map(priors.with_table, jobs)
        if (id_ := view.spec.id) in had and id_ in has and had[id_] != has[id_]
    ]
    return tuple(sorted(found, key=lambda c: (c.speed_after - c.speed_before, c.job)))


def lost(found: Sequence[Change]) -> float:
    """Return the speed (relative to each job's best) that jobs lose, minus the speed that others gain.

    Changes of unknown speed are left out.
    """
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
    """Return the shapes that a job could have instead of its present one, the fastest first.

    `plan` must be what `reconcile` returns for the same arguments. Considered are the `most` fastest packed
    shapes of every kind whose size is a power of two, or the job's least or greatest size. A shape is left
    out if the policy would not give it at any weight. The search makes at most two plans per shape. Raises
    ValueError for an unknown job.
    """
    asked = find_job(job, jobs)
    view = Priors(cluster).with_table(asked)
    rest = [v for v in jobs if v.spec.id != job]

    def plan_with(changed: JobView) -> Plan:
        replaced = [changed if v is asked else v for v in jobs]
        return reconcile(replaced, cluster, policy, now_s)

    found = []
    for shape in _candidates(view, shapes_of(plan, cluster)[job], most):
        insisted = _plan_that_gives(shape, view, cluster, plan_with)
        if insisted is not None:
            insisting, other = insisted
            others = changes(rest, cluster, plan, other)
            found.append(
                Alternative(
                    shape=shape,
                    speed=speed(view, shape),
                    given=insisting == 1.0,
                    price=lost(others),
                    others=others,
                )
            )
    return tuple(sorted(found, key=lambda a: (-a.speed, a.shape)))


def find_job(job: str, jobs: Sequence[JobView]) -> JobView:
    """Return the job with the id `job` among `jobs`. Raises ValueError if there is none."""
    for view in jobs:
        if view.spec.id == job:
            return view
    raise ValueError(
        f"there is no job {job!r} among the {len(jobs)} given jobs; check the id, or whether it has finished"
    )


def with_job(
    view: JobView, jobs: Sequence[JobView], cluster: ClusterSpec, policy: Policy, now_s: float
) -> Plan:
    """Return the plan for the jobs and one more, `view`. Raises ValueError if another job has its id."""
    return reconcile([*jobs, view], cluster, policy, now_s)


def _plan_that_gives(
    shape: Shape, view: JobView, cluster: ClusterSpec, plan_with: Callable[[JobView], Plan]
) -> tuple[float, Plan] | None:
    """Return the first factor on the job's weight, 1 or `INSISTING`, that gives it a shape, with the plan."""
    for insisting in (1.0, INSISTING):
        other = plan_with(_only(view, shape, insisting))
        if shapes_of(other, cluster)[view.spec.id] == shape:
            return insisting, other
    return None


def _candidates(view: JobView, present: Shape | None, most: int) -> list[Shape]:
    least, largest = size_limits(view.spec)
    packed: dict[tuple[str, int], Shape] = {}
    for shape in sorted(view.goodput):  # of each size, the fewest nodes come first
        size = shape.num_devices
        rounded = size & (size - 1) == 0 or size in (least, largest)
        if rounded and takes(view.spec, shape) and view.goodput[shape] > 0:
            packed.setdefault((shape.kind, size), shape)
    others = (s for s in packed.values() if s != present)
    return sorted(others, key=lambda s: -view.goodput[s])[:most]


def _only(view: JobView, shape: Shape, insisting: float) -> JobView:
    """Return the job as if it accepted only this shape, with its weight multiplied by `insisting`."""
    size = shape.num_devices
    changed: Mapping[str, object] = {
        "min_devices": size,
        "max_devices": size,
        "num_devices": size,
        "kinds": (shape.kind,),
        "preferred_kinds": None,
        "weight": view.spec.weight * insisting,
    }
    spec = dataclasses.replace(view.spec, **changed)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(view, spec=spec, goodput={shape: view.goodput[shape]})
