"""Choose which jobs must move so that all fit, at the least total price, by an integer program (HiGHS).

Only jobs smaller than the largest waiting one can be in its way, and where the moved jobs go does not matter
(they fit largest first, see `board`). So the program decides which jobs stay, and counts the slots of each
size that the nodes keep for the rest:

    max  sum_i price_i stay_i
    s.t. sum_{i on k} g_ik stay_i + sum_s s slots_ks <= n_k         for every node k
         sum_k slots_ks + sum_{i of size s} parts_i stay_i = all_s  for every size s
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import optimize, sparse

from jaxgoodput.cluster.scheduler.placement.board import Board, Request, chunks

LARGEST_PROGRAM = 6_000  # variables; larger placements are left to the greedy method
# A limit on branch-and-bound nodes, because a time limit alone would make the result depend on the clock.
NODE_LIMIT = 2_000


def fewest_moves(
    board: Board, pending: Sequence[Request], *, time_limit_s: float
) -> set[str] | None:
    """Return the keys of requests on the board that must move so that all pending ones fit.

    The board must hold every request that could keep its devices. Returns None if the program is too large,
    is infeasible or finds nothing in time, or if a pending request is neither whole nodes nor a single
    chunk.
    """
    size = board.node_size
    parts = [chunks(request.shape, size) for request in pending]
    for request, part in zip(pending, parts, strict=True):
        if len(part) > 1 and (set(part) != {size} or request.level):
            return None
    movable = _movable(board, largest=max(part[0] for part in parts))
    if not movable or any(len(board.held[key]) > 1 for key in movable):
        return None
    room = board.free.copy()
    for key in movable:
        for node, bits in board.held[key].items():
            room[node] += bits.bit_count()
    nodes = np.flatnonzero(room > 0)
    waiting = Counter(count for part in parts for count in part)
    waiting.update(board.requests[key].shape.num_devices for key in movable)
    slots = [
        (row, count)
        for row, node in enumerate(nodes)
        for count in sorted(waiting)
        if count <= room[node]
    ]
    if len(movable) + len(slots) > LARGEST_PROGRAM:
        return None
    return _solve(board, movable, nodes, room[nodes], waiting, slots, time_limit_s)


def _movable(board: Board, largest: int) -> list[str]:
    """Return the keys of requests smaller than `largest` on nodes that are up."""
    return [
        key
        for key, bits in board.held.items()
        if board.requests[key].shape.num_devices < largest and all(board.up[k] for k in bits)
    ]


def _solve(
    board: Board,
    movable: list[str],
    nodes: np.ndarray,
    room: np.ndarray,
    waiting: Counter[int],
    slots: list[tuple[int, int]],
    time_limit_s: float,
) -> set[str] | None:
    """Solve the program; `room`: [nodes] devices, `waiting`: number of chunks by size, `slots`: node and
    size."""
    position = {int(node): row for row, node in enumerate(nodes)}
    row_of_size = {s: len(room) + i for i, s in enumerate(sorted(waiting))}
    holders = [
        (position[next(iter(board.held[key]))], board.requests[key].shape.num_devices)
        for key in movable
    ]
    variables = holders + slots  # node and size of each
    rows = [row for node, count in variables for row in (node, row_of_size[count])]
    columns = [column for column in range(len(variables)) for _ in range(2)]
    values = [value for _, count in variables for value in (count, 1)]
    matrix = sparse.csr_array(
        (values, (rows, columns)), shape=(len(room) + len(row_of_size), len(variables))
    )
    wanted = np.array([waiting[s] for s in sorted(waiting)])
    lower = np.concatenate([np.full(len(room), -np.inf), wanted])
    upper = np.concatenate([room, wanted])
    price = np.array([board.requests[key].price for key in movable])
    limit = np.array([room[row] // count for row, count in slots])
    result = optimize.milp(
        np.concatenate([-price, np.zeros(len(slots))]),
        constraints=(matrix, lower, upper),
        integrality=np.ones(len(variables)),
        bounds=(0, np.concatenate([np.ones(len(movable)), limit])),
        options={"time_limit": time_limit_s, "node_limit": NODE_LIMIT, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    return {key for key, stays in zip(movable, result.x, strict=False) if stays < 0.5}
