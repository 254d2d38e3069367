"""Tables that contradict themselves are smoothed: every entry counts by how well it is known.

Of twenty entries that are each wrong by 30 %, the best looking one is mostly the luckiest one; a policy that
takes it at its word gives a job many devices for nothing. But how goodput grows with devices is a smooth
curve, so what an entry is off by shows in how far it lies from its neighbours.

    log G(k devices) = level + slope x + sum_m bend_m max(x - m, 0) + step [several nodes],
    x = log2 k, m = 1, 1.5, 2, ...

for every job and kind of device; least squares with a prior on slope, bends and step, which few or noisy
entries hardly move. *Noise* is how far entries scatter about the line between their two neighbours: a median,
which single outliers do not move; short rows use that of all rows, about parabolas, so that jobs may bend
differently. An entry keeps MISFIT^2 / (MISFIT^2 + noise^2) of its distance to the curve, MISFIT being that of
exact tables: empirical Bayes. Entries with less noise than EXACT, which tables of fitted models have, stay as
they are, to the bit.
"""

import numpy as np

from jaxgoodput.scheduler.policies.shape_choice import ShapeProblem

EXACT = 0.05  # relative noise below which a row is left alone
MISFIT = 0.02  # relative distance of exact tables from the curve
# Prior means and deviations, in log goodput: of what the first doubling adds (0.62 = 1.86 times as much), of
# how that changes with every further half of one, and of what it means to lie on several nodes.
SLOPE, BEND, STEP = (0.62, 0.20), (-0.05, 0.06), (-0.10, 0.15)
LEAST = 8  # differences by which a row knows its own noise
QUARTILE = 0.6745  # of a standard normal number


def shrunk(
    goodput: np.ndarray,
    devices: np.ndarray,
    nodes: np.ndarray,
    kind: np.ndarray,
    error: np.ndarray | None = None,
) -> np.ndarray:
    """[jobs, shapes] goodput with noisy rows drawn towards their smooth curve; the others to the bit.

    goodput: [jobs, shapes] > 0, NaN = not allowed, which stays; devices, nodes, kind: [shapes], kinds counted
    from 0; error: [jobs, shapes] the relative standard error that is known of an entry, NaN = unknown.
    """
    found, log = goodput, np.log(goodput)
    groups = [np.flatnonzero(kind == k) for k in np.unique(kind)]
    groups = [g[np.argsort(devices[g], kind="stable")] for g in groups if len(g) > 1]
    if not groups:
        return goodput
    each = [(log[:, g], np.log2(devices[g]), nodes[g] > 1) for g in groups]
    lines = [differences(*of, points=3) for of in each]
    parabolas = [differences(*of, points=4) for of in each]
    noise = noise_of(lines, parabolas, len(goodput))
    for i, columns in enumerate(groups):
        variance = np.broadcast_to(noise[:, i, None] ** 2, log[:, columns].shape)
        if error is not None:
            known = error[:, columns]
            variance = np.where(np.isnan(known), variance, known**2)
        known = ~np.isnan(log[:, columns])
        noisy = (variance * known).max(1) > EXACT**2
        noisy &= known.sum(1) > 1
        if not noisy.any():
            continue
        if found is goodput:
            found = goodput.copy()
        rows = np.flatnonzero(noisy)
        curve = smooth(
            log[np.ix_(rows, columns)],
            variance[rows],
            np.log2(devices[columns]),
            nodes[columns] > 1,
        )
        kept = MISFIT**2 / (MISFIT**2 + variance[rows])
        own = log[np.ix_(rows, columns)]
        drawn = np.exp(curve + kept * (own - curve))
        exact = variance[rows] <= EXACT**2
        found[np.ix_(rows, columns)] = np.where(exact, goodput[np.ix_(rows, columns)], drawn)
    return found


def differences(log: np.ndarray, x: np.ndarray, wide: np.ndarray, points: int) -> np.ndarray:
    """[jobs, runs] what so many neighbouring entries differ by from a polynomial of `points` - 2 degrees, in
    standard deviations of an entry; NaN where one is missing.

    log: [jobs, sizes] by increasing x; runs across the border between one and several nodes are left out.
    """
    at = np.arange(points) + np.arange(max(len(x) - points + 1, 0))[:, None]  # [runs, points]
    at = at[(wide[at[:, 0]] == wide[at[:, -1]]) & (np.diff(x[at], axis=1) > 0).all(1)]
    apart = x[at][:, :, None] - x[at][:, None, :] + np.eye(points)
    divided = 1.0 / apart.prod(2)  # Newton's divided differences
    divided /= np.sqrt((divided**2).sum(1, keepdims=True))
    return (log[:, at] * divided).sum(2)


def noise_of(lines: list[np.ndarray], parabolas: list[np.ndarray], num_jobs: int) -> np.ndarray:
    """[jobs, groups] relative noise of an entry, from the row's differences to lines, else from all there are
    to parabolas.

    It is the median distance from their median: curves that all bend alike are not noise. A row of a dozen
    differences knows its own to a quarter only, so the mean with that of all counts, unless it is exact.
    """
    pooled = _scatter(np.concatenate([r.ravel() for r in parabolas])[None])[0]
    noise = np.full((num_jobs, len(lines)), pooled)
    for i, r in enumerate(lines):
        own = _scatter(r)
        mean = np.sqrt((own**2 + np.where(np.isnan(pooled), own, pooled) ** 2) / 2)
        noise[:, i] = np.where(np.isnan(own), pooled, np.where(own > EXACT, mean, own))
    return np.nan_to_num(noise)


def _scatter(rough: np.ndarray) -> np.ndarray:
    """[rows] standard deviation of the differences of a row, NaN where they are too few to tell."""
    found = np.full(len(rough), np.nan)
    rows = np.flatnonzero((~np.isnan(rough)).sum(1) >= LEAST)
    if len(rows):
        apart = rough[rows] - np.nanmedian(rough[rows], 1)[:, None]
        found[rows] = np.nanmedian(np.abs(apart), 1) / QUARTILE
    return found


def smooth(log: np.ndarray, variance: np.ndarray, x: np.ndarray, wide: np.ndarray) -> np.ndarray:
    """[jobs, sizes] the curve through the entries that are there, for every size."""
    knots = np.arange(1.0, np.floor(x.max()), 0.5)
    columns = [np.ones_like(x), x, *(np.maximum(x - m, 0.0) for m in knots), wide.astype(float)]
    prior = [(0.0, 1e4), SLOPE, *[BEND] * len(knots), STEP]
    basis = np.stack(columns, 1)
    mean, deviation = np.array(prior).T
    known = ~np.isnan(log)
    weight = known / (variance + MISFIT**2)
    square = (basis[:, :, None] * basis[:, None, :]).reshape(len(x), -1)
    precision = (weight @ square).reshape(len(log), len(mean), len(mean)) + np.diag(deviation**-2.0)
    pull = (weight * np.where(known, log, 0.0)) @ basis + mean * deviation**-2.0
    return np.linalg.solve(precision, pull[:, :, None])[:, :, 0] @ basis.T


def shrunk_tables(problem: ShapeProblem) -> np.ndarray:
    """[jobs, shapes] goodput of a problem with noisy rows smoothed; `shrunk` says how."""
    error = None
    if any(view.goodput_error for view in problem.jobs):
        error = np.array(
            [[view.goodput_error.get(s, np.nan) for s in problem.shapes] for view in problem.jobs]
        )
    nodes = np.array([shape.num_nodes for shape in problem.shapes], np.int64)
    return shrunk(problem.goodput, problem.devices, nodes, problem.kind, error)
