"""Which jobs must give way so that all fit, at the least total price: a small integer program (HiGHS).

Only jobs smaller than the largest that is waiting can be in the way, and where the others go does not matter
(they fit largest first, see `board`); so the program decides who stays, and counts the slots of each size
that the nodes keep for the rest:

    max  sum_i price_i stay_i
    s.t. sum_{i on k} g_ik stay_i + sum_s s slots_ks <= n_k         for every node k
         sum_k slots_ks + sum_{i of size s} parts_i stay_i = all_s  for every size s
"""

from collections.abc import Sequence

import numpy as np
from scipy import optimize, sparse

from jaxgoodput.cluster.scheduler.placement.board import Board, Request, chunks

LARGEST_PROGRAM = 6_000  # variables; beyond, the greedy way is used
NODE_LIMIT = 2_000  # of the branch-and-bound tree: where it stops does not depend on the clock


def fewest_moves(
    board: Board, pending: Sequence[Request], *, time_limit_s: float
) -> set[str] | None:
    """The holders on the board that must move so that all pending ones fit; None = not found.

    The board holds everybody that could stay. Not found means: the program is too large, was out of time
    without an answer, has none, or a pending request has a shape of parts other than whole nodes and single
    parts.
    """
    size = board.node_size
    parts = {r.key: chunks(r.shape, size) for r in pending}
    if any(len(parts[r.key]) > 1 and (set(parts[r.key]) != {size} or r.level) for r in pending):
        return None
    largest = max(part[0] for part in parts.values())
    movable = [
        key
        for key, bits in board.held.items()
        if board.requests[key].shape.num_devices < largest and all(board.up[k] for k in bits)
    ]
    if not movable or any(len(board.held[key]) > 1 for key in movable):
        return None
    room = board.free.copy()
    for key in movable:
        for node, bits in board.held[key].items():
            room[node] += bits.bit_count()
    nodes = np.flatnonzero(room > 0)
    position = {int(node): row for row, node in enumerate(nodes)}
    waiting: dict[int, int] = {}  # how many parts of each size need a slot if nobody stays
    for part in parts.values():
        for count in part:
            waiting[count] = waiting.get(count, 0) + 1
    for key in movable:
        count = board.requests[key].shape.num_devices
        waiting[count] = waiting.get(count, 0) + 1
    slots = [
        (row, count)
        for row, node in enumerate(nodes)
        for count in sorted(waiting)
        if count <= room[node]
    ]
    if len(movable) + len(slots) > LARGEST_PROGRAM:
        return None
    return _solve(board, movable, position, room[nodes], waiting, slots, time_limit_s)


def _solve(
    board: Board,
    movable: list[str],
    position: dict[int, int],
    room: np.ndarray,
    waiting: dict[int, int],
    slots: list[tuple[int, int]],
    time_limit_s: float,
) -> set[str] | None:
    row_of_size = {s: len(room) + i for i, s in enumerate(sorted(waiting))}
    rows: list[int] = []
    columns: list[int] = []
    values: list[int] = []
    for column, key in enumerate(movable):
        (node,) = board.held[key]
        count = board.requests[key].shape.num_devices
        rows += [position[node], row_of_size[count]]
        columns += [column, column]
        values += [count, 1]
    for column, (row, count) in enumerate(slots, start=len(movable)):
        rows += [row, row_of_size[count]]
        columns += [column, column]
        values += [count, 1]
    num_columns = len(movable) + len(slots)
    matrix = sparse.csr_array(
        (values, (rows, columns)), shape=(len(room) + len(row_of_size), num_columns)
    )
    wanted = np.array([waiting[s] for s in sorted(waiting)])
    lower = np.concatenate([np.full(len(room), -np.inf), wanted])
    upper = np.concatenate([room, wanted])
    price = np.array([board.requests[key].price for key in movable])
    limit = np.array([room[row] // count for row, count in slots])
    result = optimize.milp(
        np.concatenate([-price, np.zeros(len(slots))]),
        constraints=(matrix, lower, upper),
        integrality=np.ones(num_columns),
        bounds=(0, np.concatenate([np.ones(len(movable)), limit])),
        options={"time_limit": time_limit_s, "node_limit": NODE_LIMIT, "mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    return {key for key, stays in zip(movable, result.x, strict=False) if stays < 0.5}
