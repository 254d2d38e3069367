"""Choose shapes of greatest value that the nodes hold, with a variable for every part of a job on every node.

`joint.py` counts patterns of equal nodes. If jobs need CPUs and memory, nearly every part differs from every
other one, and a node has far too many patterns. Then this program is the smaller one, on few nodes:

    max  sum value x
    s.t. what `joint.py` demands of the items of a job, and of limits
         sum_n y[i, a, n] = count_a(i) x_i             for each item and each size a of its parts
         sum_a y[i, a, n] <= x_i                       for each item and node: its parts lie on different ones
         sum_ia amount(i, a) y[i, a, n] <= room_n      for each node and amount: devices, CPUs, memory
         y[i, a, n] <= d[i, domain of n], sum_D d[i, D] = x_i      for items that must stay within a domain
"""

from collections import Counter

import numpy as np

from jaxgoodput.cluster.scheduler.solve.joint import (
    LARGEST,
    Area,
    JointProblem,
    JointSelection,
    NodeProgram,
    add_items,
    selection,
)


def solve_by_node(
    problem: JointProblem, relative_gap: float, time_limit_s: float
) -> JointSelection | None:
    """Return a choice that the nodes hold; None if the program is too large, infeasible or out of time."""
    nodes = [area for area in problem.areas for _ in range(area.number)]
    if len(nodes) * sum(len(set(parts)) for parts in problem.parts) > LARGEST:
        return None
    program = NodeProgram()
    taken = add_items(program, problem)
    use: list[list[list[tuple[int, float]]]] = [[[] for _ in node.room] for node in nodes]
    for item, x in enumerate(taken):
        on = _add_parts(program, problem, item, x, nodes, use)
        if problem.level[item] >= 0:
            level = problem.level[item]
            _keep_together(program, x, on, {n: nodes[n].domains[level] for n in on})
    _keep_to_room(program, nodes, use)
    return selection(program, problem, taken, relative_gap, time_limit_s)


def _keep_to_room(
    program: NodeProgram, nodes: list[Area], use: list[list[list[tuple[int, float]]]]
) -> None:
    """Demand that what parts use of each node is there; `use`: by node and amount."""
    for node, terms in zip(nodes, use, strict=True):
        for amount, its in zip(node.room, terms, strict=True):
            program.row(its, -np.inf, float(amount))


def _add_parts(
    program: NodeProgram,
    problem: JointProblem,
    item: int,
    x: int,
    nodes: list[Area],
    use: list[list[list[tuple[int, float]]]],
) -> dict[int, list[int]]:
    """Add the parts of an item on the nodes of its kind, and what they use; return them by node."""
    on: dict[int, list[int]] = {
        n: [] for n, node in enumerate(nodes) if node.kind == problem.kind[item]
    }
    for part, count in Counter(problem.parts[item]).items():
        placed = [program.variable(0.0, 1.0) for _ in on]
        program.row([*zip(placed, [1.0] * len(placed), strict=True), (x, -float(count))], 0.0, 0.0)
        for n, y in zip(on, placed, strict=True):
            on[n].append(y)
            for amount, need in enumerate(part):
                if need:
                    use[n][amount].append((y, float(need)))
    for its in on.values():
        program.row([*zip(its, [1.0] * len(its), strict=True), (x, -1.0)], -np.inf, 0.0)
    return on


def _keep_together(program: NodeProgram, x: int, on: dict[int, list[int]], where: dict[int, int]):
    """Demand that all parts of an item lie on nodes of one domain; `where`: the domain of each node."""
    domains = {domain: program.variable(0.0, 1.0) for domain in sorted(set(where.values()))}
    program.row([*((d, 1.0) for d in domains.values()), (x, -1.0)], 0.0, 0.0)
    for n, its in on.items():
        program.row([*((y, 1.0) for y in its), (domains[where[n]], -1.0)], -np.inf, 0.0)
