"""A choice of shapes all of which are placed: what placing finds out goes back into the choice.

Choosing and placing are two stages, because for powers of two and whole nodes every choice within the rows
can be placed (`shapes.py`). For other sizes, and for jobs that must stay within a rack, the first choice may
not fit. Then the nodes themselves become part of the program (`solve/joint.py`). If that is too large, or
ends without an answer, what could be placed stays, and the others are chosen again on what is left, until
nothing more fits. So the last answer is always placed, and no chosen job is dropped.

Moving jobs so that another one fits is a choice, too. It costs each moved job a restart. If the jobs that
keep their shape are worth more where they are, with the others chosen around them, they stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.constraints import (
    Devices,
    add_devices,
    on_offer,
    withhold,
)
from jaxgoodput.cluster.scheduler.limits import use_by_tenant
from jaxgoodput.cluster.scheduler.placement.amounts import (
    PLENTY,
    UNLIMITED,
    amounts_of,
    needs_of,
    needs_together,
    some_limited,
    too_much,
    used_by_node,
)
from jaxgoodput.cluster.scheduler.placement.placement import place
from jaxgoodput.cluster.scheduler.policies.promises import Promises
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.shapes import (
    allowed,
    chunks,
    domain_of,
    fitting,
    node_size,
)
from jaxgoodput.cluster.scheduler.solve.assignment import Choice
from jaxgoodput.cluster.scheduler.solve.by_node import solve_by_node
from jaxgoodput.cluster.scheduler.solve.joint import Area, JointProblem, solve_jointly
from jaxgoodput.specs import Allocation, Node, Shape

LARGEST = 1_500  # pairs of a job and a shape in the program with nodes: tenths of a second
FEW_PROMISES = 64  # that are tried one after the other if they do not all fit together
MOST_ROUNDS = 8  # of choosing again on what is left
JOINT_GAP = 1e-4  # relative to the objective
JOINT_TIME_S = 1.0


class PlacedChoice(NamedTuple):
    """A choice, and the devices of every job that it runs."""

    choice: Choice
    allocations: Mapping[str, Allocation]


@dataclass(frozen=True, kw_only=True)
class PlacingRules:
    """How much a choice may cost: moves of jobs, distance from the best choice, time."""

    move_cost: np.ndarray
    """[jobs] what a job loses if it is moved to other devices of the same shape, in units of utility."""
    relative_gap: float
    time_limit_s: float


def choose_placeable(
    problem: ShapeProblem,
    utility: np.ndarray,
    promised: Promises,
    rules: PlacingRules,
    *,
    start: np.ndarray | None = None,
) -> PlacedChoice:
    """Return a choice of high utility that keeps the promises as far as they fit, with all its devices.

    `utility`: [jobs, shapes], NaN = not allowed. `start`: see `ShapeProblem.choose`.
    """
    utility = np.where(promised.allowed, utility, np.nan)
    choice = problem.choose(
        utility,
        pinned=promised.pinned,
        at_least=promised.at_least,
        start=start,
        relative_gap=rules.relative_gap,
        time_limit_s=rules.time_limit_s,
    )
    wanted = problem.wanted(choice)
    found = PlacedChoice(choice, place(wanted, problem.jobs, problem.cluster))
    if len(found.allocations) < len(wanted):
        kept = _that_fit_together(problem, promised)
        pinned = {job: shape for job, shape in kept.items() if promised.pinned[job] >= 0}
        jointly = _chosen_jointly(problem, _pinned(utility, pinned), kept, choice, rules)
        found = jointly or _chosen_in_turn(problem, utility, kept, found, rules)
    return _with_fewer_moves(problem, utility, promised, found, rules)


def _that_fit_together(problem: ShapeProblem, promised: Promises) -> dict[int, int]:
    """Return the promises that can be placed together, as the shape of each job.

    If not all of them fit, those that count most do.
    """
    kept = {job: int(promised.granted[job]) for job in promised.order}
    placed = _place(problem, kept)
    if len(placed) == len(kept):
        return kept
    if len(kept) > FEW_PROMISES:
        return {job: s for job, s in kept.items() if problem.jobs[job].spec.id in placed}
    together: dict[int, int] = {}
    for job, shape in kept.items():
        others = [s for s in problem.sizes(job) if promised.allowed[job, s] and s != shape]
        for one in (shape, *(() if promised.pinned[job] >= 0 else others)):
            if len(_place(problem, {**together, job: one})) > len(together):
                together[job] = one
                break
    return together


def _place(problem: ShapeProblem, shapes: Mapping[int, int]) -> dict[str, Allocation]:
    wanted = {problem.jobs[job].spec.id: problem.shapes[shape] for job, shape in shapes.items()}
    return place(wanted, problem.jobs, problem.cluster)


def _pinned(utility: np.ndarray, pinned: Mapping[int, int]) -> np.ndarray:
    """Return the utility with no other shapes than their present one for jobs that keep it."""
    found = utility.copy()
    for job, shape in pinned.items():
        found[job] = np.nan
        found[job, shape] = np.nan_to_num(utility[job, shape])
    return found


def _chosen_jointly(
    problem: ShapeProblem,
    utility: np.ndarray,
    kept: Mapping[int, int],
    first: Choice,
    rules: PlacingRules,
) -> PlacedChoice | None:
    """Return the best choice that the nodes hold; None if the program finds none or it is not placed."""
    forced = np.zeros(len(problem.jobs), bool)
    forced[list(kept)] = True
    if np.count_nonzero(~np.isnan(utility)) > LARGEST:
        return None
    job, shape = np.nonzero(~np.isnan(utility) & ((utility > 0.0) | forced[:, None]))
    joint = _joint_problem(problem, utility, job, shape, forced)
    time_limit_s = min(rules.time_limit_s, JOINT_TIME_S)
    gap = min(rules.relative_gap, JOINT_GAP)
    found = solve_jointly(joint, gap, time_limit_s)
    if found is None and joint.num_amounts > 1:
        found = solve_by_node(joint, gap, time_limit_s)
    if found is None:
        return None
    chosen = np.where(found.item >= 0, shape[found.item], -1)
    choice = _as_choice(utility, chosen, min(first.bound, found.bound), first)
    wanted = problem.wanted(choice)
    placed = place(wanted, problem.jobs, problem.cluster)
    return PlacedChoice(choice, placed) if len(placed) == len(wanted) else None


def _joint_problem(
    problem: ShapeProblem,
    utility: np.ndarray,
    job: np.ndarray,
    shape: np.ndarray,
    forced: np.ndarray,
) -> JointProblem:
    """Return the problem with its nodes, for these pairs of jobs and shapes."""
    size = node_size(problem.cluster)
    parts = [chunks(s, size[s.kind]) for s in problem.shapes]
    limited = _limited_amounts(problem)
    needs = [
        tuple(needs_of(view.spec)[at] for at in limited) if limited else () for view in problem.jobs
    ]
    several = np.array([len(its) > 1 for its in parts], bool)
    level_of = [view.spec.level for view in problem.jobs]
    used = {level_of[j] for j in set(job[several[shape]].tolist())} - {None}
    levels = sorted(level for level in used if level is not None)
    index = {level: i for i, level in enumerate(levels)}
    limits = problem.limits()
    use = [
        counted[job] * (units[problem.kind] * problem.devices)[shape]
        for _, counted, units in limits
    ]
    return JointProblem(
        job=job,
        value=utility[job, shape],
        kind=problem.kind[shape],
        level=np.array([index.get(level_of[j], -1) for j in job.tolist()], np.int64),
        parts=[
            tuple((part, *(part * need for need in needs[j])) for part in parts[s])
            for j, s in zip(job.tolist(), shape.tolist(), strict=True)
        ],
        forced=forced,
        use=np.stack(use, 1) if use else np.zeros((len(job), 0)),
        limit=np.array([limit.left for limit, _, _ in limits], np.float64),
        areas=_areas(problem, levels, limited),
    )


def _limited_amounts(problem: ShapeProblem) -> list[int]:
    """Return which amounts (CPUs 0, memory 1) jobs need and nodes may run short of."""
    if not some_limited(problem.cluster):
        return []
    total = needs_together(view.spec for view in problem.jobs)
    has = [amounts_of(node) for node in problem.cluster.nodes]
    return [at for at in range(len(total)) if total[at] and min(one[at] for one in has) < UNLIMITED]


def _numbers(problem: ShapeProblem, level: str) -> dict[str, int]:
    """Return a number for each domain of a level."""
    return {
        name: i
        for i, name in enumerate(sorted({domain_of(n, level) for n in problem.cluster.nodes}))
    }


def _room_of(node: Node, limited: Sequence[int]) -> tuple[int, ...]:
    """Return the usable devices of a node, and what it has of the amounts that count."""
    has = amounts_of(node) if limited else PLENTY
    return node.num_usable, *(has[at] for at in limited)


def _areas(problem: ShapeProblem, levels: Sequence[str], limited: Sequence[int]) -> list[Area]:
    """Return the nodes of the cluster, equal ones together; `limited`: amounts that count."""
    names = [_numbers(problem, level) for level in levels]
    kinds = {kind: i for i, kind in enumerate(problem.kinds)}
    count: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    for node in problem.cluster.nodes:
        if node.state == "up" and node.num_usable and node.kind in kinds:
            where = tuple(
                ids[domain_of(node, level)] for level, ids in zip(levels, names, strict=True)
            )
            key = kinds[node.kind], where, _room_of(node, limited)
            count[key] = count.get(key, 0) + 1
    return [Area(*key, number) for key, number in sorted(count.items())]


def _chosen_in_turn(
    problem: ShapeProblem,
    utility: np.ndarray,
    kept: Mapping[int, int],
    first: PlacedChoice,
    rules: PlacingRules,
) -> PlacedChoice:
    """Keep what is placed, then choose and place other jobs on what is left, until nothing more fits.

    If a promised job is not placed, all promised jobs are placed first, and all others chosen again.
    """
    row = {view.spec.id: i for i, view in enumerate(problem.jobs)}
    open_, shape = utility.copy(), np.full(len(problem.jobs), -1)
    allocations = dict(first.allocations)
    if all(problem.jobs[job].spec.id in allocations for job in kept):
        for id_, its in problem.wanted(first.choice).items():
            if id_ in allocations:
                shape[row[id_]] = first.choice.shape[row[id_]]
            else:
                _forbid(open_, problem, row[id_], its)
    else:
        allocations = _place(problem, kept)
        shape[list(kept)] = list(kept.values())
    for _ in range(MOST_ROUNDS):
        open_[shape >= 0] = np.nan
        rest = _without(problem, allocations)
        # What no rack can hold any more is not offered to any job.
        open_[~allowed(problem.jobs, problem.shapes, rest.cluster)] = np.nan
        choice = rest.choose(
            open_, relative_gap=rules.relative_gap, time_limit_s=rules.time_limit_s
        )
        wanted = problem.wanted(choice)
        if not wanted:
            break
        placed = place(wanted, problem.jobs, rest.cluster)
        allocations |= placed
        for id_, its in wanted.items():
            if id_ in placed:
                shape[row[id_]] = choice.shape[row[id_]]
            else:
                _forbid(open_, problem, row[id_], its)
    _fill_up(problem, utility, shape, allocations, rules)
    bound = first.choice.bound
    return PlacedChoice(_as_choice(utility, shape, bound, first.choice), allocations)


def _fill_up(
    problem: ShapeProblem,
    utility: np.ndarray,
    shape: np.ndarray,
    allocations: dict[str, Allocation],
    rules: PlacingRules,
):
    """Start, in place, jobs that wait although one of their shapes fits onto what is free.

    A shape that did not fit once may do so later, because jobs that were in its way moved on.
    """
    row = {view.spec.id: i for i, view in enumerate(problem.jobs)}
    for _ in range(MOST_ROUNDS):
        rest = _without(problem, allocations)
        fits = fitting(problem.jobs, problem.shapes, rest.cluster) & (shape < 0)[:, None]
        open_ = np.where(fits, utility, np.nan)
        if not (open_ > 0.0).any():
            break
        choice = rest.choose(
            open_, relative_gap=rules.relative_gap, time_limit_s=rules.time_limit_s
        )
        placed = place(problem.wanted(choice), problem.jobs, rest.cluster)
        if not placed:  # limits of tenants are in the way
            break
        allocations |= placed
        for id_ in placed:
            shape[row[id_]] = choice.shape[row[id_]]


def _forbid(utility: np.ndarray, problem: ShapeProblem, job: int, shape: Shape):
    """Forbid a job a shape that did not fit, and all larger ones of its kind, in place."""
    larger = problem.devices >= shape.num_devices
    utility[job, larger & (problem.kind == problem.kinds.index(shape.kind))] = np.nan


def _without(problem: ShapeProblem, allocations: Mapping[str, Allocation]) -> ShapeProblem:
    """Return the problem without the devices of these jobs; limits are reduced by what they use."""
    taken: Devices = {}
    for allocation in allocations.values():
        add_devices(taken, allocation.devices)
    tenants = {view.spec.id: view.spec.tenant for view in problem.jobs}
    kind_of = {node.name: node.kind for node in problem.cluster.nodes}
    used = use_by_tenant(allocations, tenants, kind_of)
    amounts = used_by_node({view.spec.id: view.spec for view in problem.jobs}, allocations)
    return replace(problem, cluster=withhold(problem.cluster, taken, used, amounts))


def _as_choice(utility: np.ndarray, shape: np.ndarray, bound: float, first: Choice) -> Choice:
    """Return the choice of these shapes; jobs that had to run and do not are reported."""
    runs = np.flatnonzero(shape >= 0)
    objective = float(np.nansum(utility[runs, shape[runs]]))
    unserved = tuple(job for job in first.unserved if shape[job] < 0)
    return Choice(shape=shape, objective=objective, bound=max(bound, objective), unserved=unserved)


def _with_fewer_moves(
    problem: ShapeProblem,
    utility: np.ndarray,
    promised: Promises,
    found: PlacedChoice,
    rules: PlacingRules,
) -> PlacedChoice:
    """Return the choice, or the best one in which the jobs that keep their shape are not moved.

    The second one is sought only if the moves cost more than the gap to the best objective that is accepted
    anyway.
    """
    shape = found.choice.shape
    stays = problem.running & (shape >= 0) & (shape == problem.present)
    moved = [
        i
        for i in np.flatnonzero(stays).tolist()
        if found.allocations[problem.jobs[i].spec.id] is not problem.jobs[i].allocation
    ]
    for i in moved:  # jobs whose devices are no longer offered have to move
        stays[i] = on_offer(problem.jobs[i].allocation, problem.nodes, draining=True)
    moved = [i for i in moved if stays[i]]
    cost = float(rules.move_cost[moved].sum())
    if cost <= rules.relative_gap * abs(found.choice.objective):
        return found
    still = {problem.jobs[i].spec.id: problem.jobs[i].allocation for i in np.flatnonzero(stays)}
    specs = {view.spec.id: view.spec for view in problem.jobs}
    if too_much(problem.cluster, specs, still) is not None:
        return found  # a node has fewer CPUs or less memory than before
    rest = _without(problem, still)
    others = np.where(stays[:, None], np.nan, utility)
    must = promised.at_least | (promised.pinned >= 0)
    choice = rest.choose(
        others,
        at_least=must & ~stays,
        relative_gap=rules.relative_gap,
        time_limit_s=rules.time_limit_s,
    )
    wanted = problem.wanted(choice)
    placed = place(wanted, problem.jobs, rest.cluster)
    together = _as_choice(
        utility, np.where(stays, shape, choice.shape), found.choice.bound, found.choice
    )
    served = (together.shape >= 0) | (found.choice.shape < 0) | ~must
    is_better = together.objective >= found.choice.objective - cost
    if len(placed) < len(wanted) or not served.all() or not is_better:
        return found
    return PlacedChoice(together, {**still, **placed})
