"""Choose shapes of greatest value among the choices that the nodes can hold, by an integer program (HiGHS).

The rows of `shapes.capacity_rows` are only necessary if sizes are odd or jobs must stay within a rack. Here
the nodes are part of the program. A *pattern* says how many parts of each size one node holds (5 + 3, or 4 +
4, on a node of 8). If CPUs or memory count, parts differ in them, too. Equal nodes need no variables of their
own, only how many of them have which pattern, so that the program stays small:

    max  sum value x
    s.t. sum_{items of a job} x <= 1 (= 1 if it must run), and the limits of tenants
         parts of size a in an area            <= sum_p count_a(p) nodes_p        for every area and size
         sum_p nodes_p                         <= number of equal nodes
         jobs of one shape bound to a level    <= sum_{domains} jobs there
         parts of the jobs in a domain         <= parts taken from the areas in it

An *area* is the set of nodes of one kind that lie in the same domains at every level in use. What the program
chooses has room, except that two parts of one job might end on one node; `place` finds out.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse

LARGEST = 6_000  # variables; the caller chooses larger problems in turn
MOST_PATTERNS = 400  # of one node
# A limit on branch-and-bound nodes, because a time limit alone would make the result depend on the clock.
NODE_LIMIT = 1_000


Part = tuple[int, ...]
"""What a job takes of one node: devices, and the CPUs and memory that they need if these count."""


class Area(NamedTuple):
    """Equal nodes: of one kind and size, in the same domains."""

    kind: int
    domains: tuple[int, ...]
    """Domain at each level in use."""
    room: tuple[int, ...]
    """Devices that may be given away on one node, and its CPUs and memory if these count."""
    number: int


@dataclass(frozen=True, kw_only=True)
class JointProblem:
    """Items to choose from, at most one per job, and the nodes that have to hold them."""

    job: np.ndarray
    """[items] index of the job."""
    value: np.ndarray
    """[items]."""
    kind: np.ndarray
    """[items] kind of device."""
    level: np.ndarray
    """[items] level that the job may not leave, -1 = none."""
    parts: Sequence[tuple[Part, ...]]
    """[items] what it takes of each of its nodes."""
    forced: np.ndarray
    """[jobs] bool: takes exactly one item; other jobs take at most one."""
    use: np.ndarray
    """[items, limits] what an item uses of each limit."""
    limit: np.ndarray
    """[limits]."""
    areas: Sequence[Area]

    @property
    def num_amounts(self) -> int:
        """Number of amounts that count: devices alone, or CPUs or memory as well."""
        return max((len(area.room) for area in self.areas), default=1)


class JointSelection(NamedTuple):
    """The item of every job, -1 = none, and a bound on the best value."""

    item: np.ndarray
    bound: float


def solve_jointly(
    problem: JointProblem, relative_gap: float, time_limit_s: float
) -> JointSelection | None:
    """Return a choice that the nodes hold; None if the program is too large, infeasible or out of time."""
    program = NodeProgram()
    taken = add_items(program, problem)
    for kind in np.unique(problem.kind).tolist():
        items = np.flatnonzero(problem.kind == kind).tolist()
        areas = [area for area in problem.areas if area.kind == kind]
        if not _add_nodes(program, problem, items, areas, taken):
            return None
    if len(program.value) > LARGEST:
        return None
    return selection(program, problem, taken, relative_gap, time_limit_s)


def add_items(program: "NodeProgram", problem: JointProblem) -> list[int]:
    """Add a variable for each item, with the rules on what a job takes and on limits; return them."""
    taken = [program.variable(value, 1.0) for value in problem.value]
    for job, items in _groups(problem.job.tolist()).items():
        least = 1.0 if problem.forced[job] else -np.inf
        program.row([(taken[i], 1.0) for i in items], least, 1.0)
    for column, most in enumerate(problem.limit):
        used = problem.use[:, column]
        program.row([(taken[i], used[i]) for i in np.flatnonzero(used)], -np.inf, most)
    return taken


def selection(
    program: "NodeProgram",
    problem: JointProblem,
    taken: Sequence[int],
    relative_gap: float,
    time_limit_s: float,
) -> JointSelection | None:
    """Solve a program and return the items that it takes; None if it found nothing."""
    result = program.solve(relative_gap, time_limit_s)
    if result.x is None:
        return None
    item = np.full(len(problem.forced), -1)
    chosen = np.flatnonzero(result.x[: len(taken)] > 0.5)
    item[problem.job[chosen]] = chosen
    bound = -result.mip_dual_bound if result.mip_dual_bound is not None else np.inf
    return JointSelection(item, float(bound))


def _add_nodes(
    program: "NodeProgram",
    problem: JointProblem,
    items: list[int],
    areas: list[Area],
    taken: list[int],
) -> bool:
    """Add what holds the parts of one kind's items; return False if a node has too many patterns."""
    sizes = sorted({part for i in items for part in problem.parts[i]}, reverse=True)
    where = sorted({area.domains for area in areas})
    slots: dict[tuple[tuple[int, ...], Part], list[tuple[int, float]]] = defaultdict(list)
    for area in areas:
        every = patterns(area.room, tuple(s for s in sizes if _fits(s, area.room)))
        held = list(itertools.islice(every, MOST_PATTERNS + 1))
        if len(held) > MOST_PATTERNS:
            return False
        number = float(area.number)
        nodes = [program.variable(0.0, number) for _ in held]
        program.row([(node, 1.0) for node in nodes], -np.inf, number)
        for node, pattern in zip(nodes, held, strict=True):
            for size, count in pattern.items():
                slots[area.domains, size].append((node, -float(count)))
    bound = {i for i in items if problem.level[i] >= 0 and len(problem.parts[i]) > 1}
    # Parts of each size that jobs without a level, and jobs bound to each level, take from each area. They
    # are whole by themselves, because all that they have to add up to is.
    levels = [-1, *sorted({int(problem.level[i]) for i in bound})]
    drawn = {
        (level, domains, size): program.variable(0.0, np.inf, is_whole=False)
        for level in levels
        for domains in where
        for size in sizes
    }
    for domains in where:
        for size in sizes:
            use = [(drawn[level, domains, size], 1.0) for level in levels]
            program.row([*use, *slots[domains, size]], -np.inf, 0.0)
    for size in sizes:
        demand = [
            (taken[i], float(n))
            for i in items
            if i not in bound and (n := problem.parts[i].count(size))
        ]
        supply = [(drawn[-1, domains, size], -1.0) for domains in where]
        program.row([*demand, *supply], -np.inf, 0.0)
    for level in levels[1:]:
        its = {i: (problem.parts[i],) for i in bound if problem.level[i] == level}
        _add_level(program, level, its, where, sizes, drawn, taken)
    return True


def _add_level(program, level, its, where, sizes, drawn, taken):
    """Add jobs that must stay within a domain of a level: how many of each shape lie in which domain.

    `its`: shape of each item, as its parts; `where`: domains of the areas; `drawn`: variables for the parts
    that come from each area.
    """
    by_domain = _groups([domains[level] for domains in where])
    shapes = _groups(dict(sorted(its.items())).values())
    there = {
        (shape, domain): program.variable(0.0, np.inf) for shape in shapes for domain in by_domain
    }
    items = sorted(its)
    for shape, positions in shapes.items():
        wanted = [(taken[items[at]], 1.0) for at in positions]
        program.row(
            [*wanted, *((there[shape, domain], -1.0) for domain in by_domain)], -np.inf, 0.0
        )
    for domain, positions in by_domain.items():
        for size in sizes:
            need = [
                (there[shape, domain], float(n)) for shape in shapes if (n := shape[0].count(size))
            ]
            supply = [(drawn[level, where[at], size], -1.0) for at in positions]
            program.row([*need, *supply], -np.inf, 0.0)


def patterns(room: Part, parts: tuple[Part, ...]) -> Iterator[Counter[Part]]:
    """Yield the ways to fill a node with such parts, to which no further part can be added.

    >>> [dict(pattern) for pattern in patterns((8,), ((5,), (3,)))]
    [{(5,): 1, (3,): 1}, {(3,): 2}]
    """
    if not parts:
        yield Counter()
        return

    def most(left: Part, part: Part) -> int:
        return min(has // need for has, need in zip(left, part, strict=True) if need > 0)

    def fill(left: Part, at: int) -> Iterator[Counter[Part]]:
        part = parts[at]
        held = most(left, part)
        if at == len(parts) - 1:
            yield Counter({part: held} if held else {})
            return
        for count in range(held, -1, -1):
            rest = tuple(has - count * need for has, need in zip(left, part, strict=True))
            for other in fill(rest, at + 1):
                yield Counter({part: count}) + other

    yield from fill(room, 0)


def _fits(part: Part, room: Part) -> bool:
    return all(need <= has for need, has in zip(part, room, strict=True))


def _groups(keys) -> dict:
    """Return the positions of each different key, in order."""
    found = defaultdict(list)
    for position, key in enumerate(keys):
        found[key].append(position)
    return dict(found)


class NodeProgram:
    """A mixed integer program that grows variable by variable and row by row."""

    def __init__(self):
        self.value: list[float] = []
        self._high: list[float] = []
        self._whole: list[bool] = []
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._low_of_row: list[float] = []
        self._high_of_row: list[float] = []

    def variable(self, value: float, high: float, *, is_whole: bool = True) -> int:
        """Add a number from 0 to `high`, each unit of which is worth `value`; return its index."""
        self.value.append(float(value))
        self._high.append(float(high))
        self._whole.append(is_whole)
        return len(self.value) - 1

    def row(self, terms: Sequence[tuple[int, float]], low: float, high: float):
        """Demand that a sum of variables times coefficients lies between two limits."""
        rows, columns, values = self._entries
        rows += [len(self._low_of_row)] * len(terms)
        columns += [column for column, _ in terms]
        values += [value for _, value in terms]
        self._low_of_row.append(low)
        self._high_of_row.append(high)

    def solve(self, relative_gap: float, time_limit_s: float):
        """Return HiGHS's result for the greatest value."""
        rows, columns, values = self._entries
        matrix = sparse.csr_array(
            (values, (rows, columns)), shape=(len(self._low_of_row), len(self.value))
        )
        return optimize.milp(
            -np.array(self.value),
            integrality=np.array(self._whole, np.uint8),
            bounds=(0.0, np.array(self._high)),
            constraints=(matrix, self._low_of_row, self._high_of_row),
            options={
                "mip_rel_gap": relative_gap,
                "time_limit": time_limit_s,
                "node_limit": NODE_LIMIT,
            },
        )
