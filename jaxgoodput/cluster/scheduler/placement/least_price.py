"""A price below which no set of moves makes room, to see that a cheap set needs no search for a cheaper one.

Count the slots of s devices, for any s. Devices for the waiting parts take sum floor(part / s) of them, and
the free devices of the nodes offer sum floor(free / s). What is missing has to come from jobs that move. On
its new node a job of g devices takes floor(g / s) slots itself, so moving jobs off a node with f free devices
brings at most floor((f + sum (g mod s)) / s) - floor(f / s). The least price of moves that bring what is
missing for all s at once is found by a dynamic program; it may use each node's moves any number of times, so
the true price can only be higher.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxgoodput.cluster.scheduler.placement.board import Board, Request
from jaxgoodput.cluster.scheduler.shapes import chunks

MOST_STATES = 5_000  # combinations of missing slots; with more, nothing is claimed

Gain = tuple[int, ...]
"""Slots of each size."""


def least_price(board: Board, pending: Sequence[Request], most: float) -> float:
    """Return a price that the moves which make room for the pending requests cost at least.

    The board must hold every request that could keep its devices, and the ones that move must lie on one node
    each. Prices above `most` need not be told apart: `most` or less is returned.
    """
    parts = [part for request in pending for part in chunks(request.shape, board.node_size)]
    missing = {
        size: sum(part // size for part in parts) - int((board.free // size).sum())
        for size in sorted(set(parts))
    }
    missing = {size: count for size, count in missing.items() if count > 0}
    if not missing or np.prod([count + 1.0 for count in missing.values()]) > MOST_STATES:
        return 0.0
    gains = _gains(board, max(parts), tuple(missing), most)
    return _cover(tuple(missing.values()), gains, most)


def _gains(board: Board, largest: int, sizes: tuple[int, ...], most: float) -> dict[Gain, float]:
    """Return the slots of each size that moves on one node bring, with the least price of such moves."""
    found: dict[Gain, float] = {}
    nodes = np.flatnonzero(board.up).tolist()
    for free, jobs in {(int(board.free[node]), _jobs(board, node, largest)) for node in nodes}:
        for moved, price in _moves(jobs, most):
            rests = [sum(g % size * n for g, n in moved.items()) for size in sizes]
            gain = tuple(
                (free + rest) // size - free // size
                for rest, size in zip(rests, sizes, strict=True)
            )
            if any(gain) and price < found.get(gain, most):
                found[gain] = price
    return found


def _jobs(board: Board, node: int, largest: int) -> tuple[tuple[int, float], ...]:
    """Return the size and price of each job on a node that is smaller than the largest waiting part."""
    its = (board.requests[key] for key in board.on[node])
    return tuple(
        sorted((r.shape.num_devices, r.price) for r in its if r.shape.num_devices < largest)
    )


def _moves(
    jobs: Sequence[tuple[int, float]], most: float
) -> Iterator[tuple[Mapping[int, int], float]]:
    """Yield how many jobs of each size may move, with the least price, if that is below `most`.

    `jobs`: size and price, sorted.
    """
    groups = [
        (size, [0.0, *itertools.accumulate(price for _, price in its)])
        for size, its in itertools.groupby(jobs, key=lambda job: job[0])
    ]
    affordable = [
        [(n, price) for n, price in enumerate(prices) if price < most] for _, prices in groups
    ]
    for counts in itertools.product(*affordable):
        price = sum(price for _, price in counts)
        if 0.0 < price < most:
            yield {size: n for (size, _), (n, _) in zip(groups, counts, strict=True)}, price


def _cover(missing: Gain, gains: Mapping[Gain, float], most: float) -> float:
    """Return the least price of gains that add up to what is missing, at most `most`."""
    least: dict[Gain, float] = {(0,) * len(missing): 0.0}
    for state in itertools.product(*(range(count + 1) for count in missing)):
        least.setdefault(state, most)
        for gain, price in gains.items():
            rest = tuple(max(have - more, 0) for have, more in zip(state, gain, strict=True))
            if rest != state:
                least[state] = min(least[state], price + least[rest])
    return least[missing]
