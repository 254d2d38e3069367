"""Find the price of every capacity at which supply meets demand: the dual of the relaxed knapsack.

    D(p) = limit . p + sum_j max(0, max_o value[o] - use[o] . p),   p >= 0

bounds every choice, whatever the prices, and it has only one variable per row. Its maxima are smoothed
(softmax at a falling temperature) and the sum is minimised by Newton steps, so the cost is a few passes over
the items, however many jobs there are.
"""

import numpy as np

TEMPERATURES = (0.2, 0.04, 0.008, 1.6e-3, 3e-4)  # in units of the mean value of an item
STEPS = 12  # most Newton steps per temperature


def dual_prices(
    value: np.ndarray, use: np.ndarray, limit: np.ndarray, job: np.ndarray, forced: np.ndarray
) -> np.ndarray:
    """Return [rows] prices that nearly minimise D (see the head of this file).

    `value`: [items]; `use`: [items, rows]; `limit`: [rows]; `job`: [items], sorted; `forced`: [jobs] bool,
    takes exactly one item.
    """
    start = np.flatnonzero(np.r_[True, np.diff(job) > 0])
    # [items] position of the item's job among the jobs that have items at all.
    position = np.cumsum(np.r_[False, np.diff(job) > 0])
    idle = np.where(forced[job[start]], 0.0, 1.0)  # whether taking nothing is possible
    scale = float(np.mean(np.abs(value))) or 1.0
    prices = np.zeros(len(limit))

    def smoothed(prices: np.ndarray, heat: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the smoothed dual function D at `prices`, its gradient and its Hessian."""
        z = (value - use @ prices) / heat
        top = np.maximum.reduceat(z, start)
        top = np.where(idle > 0, np.maximum(top, 0.0), top)
        shares = np.exp(z - top[position])
        total = np.add.reduceat(shares, start) + idle * np.exp(-np.abs(top))
        level = float(limit @ prices + heat * np.sum(top + np.log(total)))
        shares /= total[position]
        used = shares[:, None] * use
        expected = np.add.reduceat(used, start, axis=0)
        slope = limit - expected.sum(0)
        curve = (used.T @ use - expected.T @ expected) / heat
        return level, slope, curve

    for temperature in TEMPERATURES:
        heat = temperature * scale
        level, slope, curve = smoothed(prices, heat)
        for _ in range(STEPS):
            free = (prices > 0) | (slope < 0)
            if np.all(np.abs(slope[free]) <= 1e-3 * np.maximum(limit[free], 1.0)):
                break
            step = np.zeros_like(prices)
            inner = curve[np.ix_(free, free)]
            ridge = 1e-9 * (1.0 + np.trace(inner))
            step[free] = np.linalg.solve(inner + ridge * np.eye(free.sum()), -slope[free])
            # In a flat stretch, with no job near indifference, a full step would go far too far.
            step = np.clip(step, -0.5 * scale, 0.5 * scale)
            size = 1.0
            while size > 1e-4:
                trial = np.maximum(prices + size * step, 0.0)
                # The first trial nearly always succeeds, so its derivatives are rarely wasted.
                ahead = smoothed(trial, heat)
                if ahead[0] <= level - 1e-4 * float(slope @ (prices - trial)):
                    break
                size /= 2
            else:
                break
            prices = trial
            level, slope, curve = ahead
    return prices
