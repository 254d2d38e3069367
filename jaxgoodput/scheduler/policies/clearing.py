"""The price of a device at which the jobs together want as many as there are.

A job of weight w that runs at goodput G on k devices costs, per unit of work, (w + price k) / G: it
keeps its user waiting, and it keeps k devices from others. Its best shape has the lowest cost,
whatever work is left. The price is the delay of others that a device is worth; it is found by
raising it where more devices are wanted than exist, and lowering it where fewer are.
"""

from typing import NamedTuple

import numpy as np

STEPS = 36  # of the search; each is one pass over the options
SHRINK = 0.86  # of the step, so that the last ones change a price by less than 1 %
MOST = 10.0  # the price is at most so many times the mean weight: beyond, weights would not count


class Market(NamedTuple):
    """What devices cost, and what jobs make of that."""

    prices: np.ndarray  # [kinds] of a device, in units of weight
    cost: np.ndarray  # [jobs] the least cost of a unit of work; NaN = no shape is allowed
    best: np.ndarray  # [jobs] the goodput of the shape that has it


def clearing_prices(
    goodput: np.ndarray,
    weight: np.ndarray,
    devices: np.ndarray,
    kind: np.ndarray,
    capacity: np.ndarray,
) -> Market:
    """Prices that bring together supply and demand.

    goodput: [jobs, shapes], NaN = not allowed; weight: [jobs] > 0; devices, kind: [shapes]; capacity:
    [kinds] devices. Wants jump where a job changes its shape, so that supply is met closely and not
    exactly.

    >>> market = clearing_prices(np.array([[1.0, 1.8]] * 3), np.ones(3), np.array([1, 2]),
    ...     np.array([0, 0]), np.array([4.0]))
    >>> bool(3.9 < market.prices[0] < 4.1)
    True
    """
    job, shape = np.nonzero(goodput > 0.0)
    cost, best = np.full((2, len(goodput)), np.nan)
    prices = np.zeros(len(capacity))
    if not len(job):
        return Market(prices, cost, best)
    start = np.flatnonzero(np.r_[True, np.diff(job) > 0])
    length = np.diff(np.r_[start, len(job)])
    rate, need, of = goodput[job, shape], devices[shape].astype(np.float64), kind[shape]
    own = weight[job]
    log_most = np.log(MOST * weight[job[start]].mean())
    log_prices = np.full(len(capacity), log_most - np.log(10.0 * MOST))
    for step in range(STEPS):
        worth = rate / (own + np.exp(log_prices)[of] * need)
        chosen = worth >= np.repeat(np.maximum.reduceat(worth, start), length)
        equal = np.repeat(np.add.reduceat(chosen.astype(np.int64), start), length)
        taken = need[chosen] / equal[chosen]  # of shapes that are equally good, a part of each
        wanted = np.bincount(of[chosen], taken, minlength=len(capacity))
        over = np.log(np.maximum(wanted, 1e-9) / np.maximum(capacity, 1e-9))
        log_prices += np.clip(20.0 * over, -1.0, 1.0) * SHRINK**step
        log_prices = np.minimum(log_prices, log_most)
    prices = np.exp(log_prices)
    worth = rate / (own + prices[of] * need)
    most = np.maximum.reduceat(worth, start)
    cost[job[start]] = 1.0 / most
    # Of equals the fastest: where a device costs nothing, they differ in nothing else.
    best[job[start]] = np.maximum.reduceat(
        np.where(worth >= np.repeat(most, length), rate, 0.0), start
    )
    return Market(prices, cost, best)
