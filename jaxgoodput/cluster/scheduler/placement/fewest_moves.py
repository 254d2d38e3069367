"""Choose which jobs must move so that all fit, at the least total price, by an integer program (HiGHS).

Only jobs smaller than the largest waiting one can be in its way, and where the moved jobs go does not matter
(they fit largest first, see `board`). So the program decides which jobs stay, and counts the slots of each
size that the nodes keep for the rest:

    max  sum_i price_i stay_i
    s.t. sum_{i on k} g_ik stay_i + sum_s s slots_ks <= n_k         for every node k
         sum_k slots_ks + sum_{i of size s} parts_i stay_i = all_s  for every size s
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, sparse

from jaxgoodput.cluster.scheduler.placement.board import Board, Request
from jaxgoodput.cluster.scheduler.placement.least_price import least_price
from jaxgoodput.cluster.scheduler.shapes import chunks

LARGEST_PROGRAM = 6_000  # variables; larger placements are left to the greedy method
# A limit on branch-and-bound nodes, because a time limit alone would make the result depend on the clock.
NODE_LIMIT = 2_000
ROUNDING = 1e-12  # of a price: the same prices may be added in another order


def fewest_moves(
    board: Board, pending: Sequence[Request], *, below: float = math.inf, time_limit_s: float
) -> set[str] | None:
    """Return the keys of requests on the board that must move so that all pending ones fit.

    The board must hold every request that could keep its devices. Returns None if the program is too large,
    is infeasible or finds nothing in time, if a pending request is neither whole nodes nor a single chunk,
    or needs CPUs or memory that nodes may run short of, or if it is easily seen that no moves cost less than
    `below`.
    """
    if board.is_limited and any(request.needs for request in pending):
        return None
    size = board.node_size
    parts = [chunks(request.shape, size) for request in pending]
    for request, part in zip(pending, parts, strict=True):
        if len(part) > 1 and (set(part) != {size} or request.level):
            return None
    movable = _movable(board, largest=max(part[0] for part in parts))
    if not movable or any(len(board.held[key]) > 1 for key in movable):
        return None
    held_size = np.array([board.requests[key].shape.num_devices for key in movable])
    held_node = np.array([next(iter(board.held[key])) for key in movable])
    room = board.free.copy()
    np.add.at(room, held_node, held_size)
    nodes = np.flatnonzero(room > 0)
    # Chunks of each size that need a slot unless their job stays.
    sizes, wanted = np.unique([*np.concatenate(parts), *held_size], return_counts=True)
    slot_node, slot_size = np.nonzero(sizes <= room[nodes, None])
    if len(movable) + len(slot_node) > LARGEST_PROGRAM:
        return None
    if below < math.inf and below <= least_price(board, pending, below) * (1.0 + ROUNDING):
        return None
    stays = _solve(
        price=np.array([board.requests[key].price for key in movable]),
        node=np.concatenate([np.searchsorted(nodes, held_node), slot_node]),
        size=np.concatenate([np.searchsorted(sizes, held_size), slot_size]),
        room=room[nodes],
        sizes=sizes,
        wanted=wanted,
        time_limit_s=time_limit_s,
    )
    if stays is None:
        return None
    return {key for key, stay in zip(movable, stays, strict=True) if not stay}


def _movable(board: Board, largest: int) -> list[str]:
    """Return the keys of requests that may move: smaller than `largest`, and on nodes that are up."""
    return [
        key
        for key, bits in board.held.items()
        if board.requests[key].shape.num_devices < largest and all(board.up[k] for k in bits)
    ]


def _solve(
    *,
    price: np.ndarray,
    node: np.ndarray,
    size: np.ndarray,
    room: np.ndarray,
    sizes: np.ndarray,
    wanted: np.ndarray,
    time_limit_s: float,
) -> np.ndarray | None:
    """Solve the program; return [movable] bool, which requests stay, or None if nothing is found.

    Variables are the movable requests, then slots. `price`: [movable]; `node`, `size`: [variables] indices;
    `room`: [nodes] devices; `sizes`: [sizes] devices of a chunk; `wanted`: [sizes] number of chunks.
    """
    num_movable, num_variables = len(price), len(node)
    rows = np.stack([node, len(room) + size], 1).ravel()
    columns = np.repeat(np.arange(num_variables), 2)
    values = np.stack([sizes[size], np.ones_like(size)], 1).ravel()
    matrix = sparse.csr_array(
        (values, (rows, columns)), shape=(len(room) + len(sizes), num_variables)
    )
    slots = room[node[num_movable:]] // sizes[size[num_movable:]]
    result = optimize.milp(
        np.concatenate([-price, np.zeros(len(slots))]),
        constraints=(
            matrix,
            np.concatenate([np.full(len(room), -np.inf), wanted]),
            np.concatenate([room, wanted]),
        ),
        integrality=np.ones(num_variables),
        bounds=(0, np.concatenate([np.ones(num_movable), slots])),
        options={"time_limit": time_limit_s, "node_limit": NODE_LIMIT, "mip_rel_gap": 0.0},
    )
    return None if result.x is None else result.x[:num_movable] >= 0.5
