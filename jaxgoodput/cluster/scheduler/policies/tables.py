"""Smooth goodput tables whose entries contradict each other, each entry according to how well it is known.

If every entry may be wrong by 30 %, the best looking of twenty is mostly the luckiest. A policy that trusts
it gives the job many devices for nothing. But goodput is a smooth function of the number of devices, so the
error of an entry shows in its distance from its neighbours. For every job and kind of device, fit

    log G(k devices) = level + slope x + sum_m bend_m max(x - m, 0) + step [several nodes],
    x = log2 k, m = 1, 1.5, 2, ...

by least squares, with a prior on slope, bends and step that a few or noisy entries hardly move. *Noise* is
how far entries scatter about the line between their two neighbours; it is a median, which single outliers do
not move. A row too short to know its own noise (among three entries, a knee looks like noise) uses the other
rows' noise, or is trusted if there are none. An entry keeps MISFIT^2 / (MISFIT^2 + noise^2) of its distance
from the curve (empirical Bayes); MISFIT is the distance of exact tables from it. Entries with less noise
than EXACT, such as tables of fitted models, stay as they are, to the bit.
"""

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem

EXACT = 0.05  # relative noise below which a row is left alone
MISFIT = 0.02  # relative distance of exact tables from the curve
# Prior means and deviations, in log goodput: gain of the first doubling (0.62 = 1.86 times as much), change
# of that gain with every further half doubling, and effect of lying on several nodes.
SLOPE, BEND, STEP = (0.62, 0.20), (-0.05, 0.06), (-0.10, 0.15)
FAR = 4.0  # times the largest measured size
LEAST = 5  # differences that a row needs to know its own noise, because one of them may be a knee
QUARTILE = 0.6745  # of a standard normal number


def shrunk(
    goodput: np.ndarray,
    devices: np.ndarray,
    nodes: np.ndarray,
    kind: np.ndarray,
    error: np.ndarray | None = None,
) -> np.ndarray:
    """Return [jobs, shapes] goodput with noisy rows drawn towards their smooth curve, and others unchanged.

    `goodput`: [jobs, shapes] > 0; NaN = not allowed, and stays. `devices`, `nodes`, `kind`: [shapes], kinds
    counted from 0. `error`: [jobs, shapes] known relative standard error of an entry; NaN = unknown.
    """
    found, log = goodput, np.log(goodput)
    groups = [np.flatnonzero(kind == k) for k in np.unique(kind)]
    groups = [g[np.argsort(devices[g], kind="stable")] for g in groups if len(g) > 1]
    if not groups:
        return goodput
    rough = [differences(log[:, g], np.log2(devices[g]), nodes[g] > 1) for g in groups]
    noise = noise_of(rough)
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
        # Even exact tables lie off the curve by MISFIT, so an entry keeps the part of its distance that noise
        # does not explain.
        kept = MISFIT**2 / (MISFIT**2 + variance[rows])
        own = log[np.ix_(rows, columns)]
        drawn = np.exp(curve + kept * (own - curve))
        exact = variance[rows] <= EXACT**2
        found[np.ix_(rows, columns)] = np.where(exact, goodput[np.ix_(rows, columns)], drawn)
    return found


def differences(log: np.ndarray, x: np.ndarray, wide: np.ndarray) -> np.ndarray:
    """Return [jobs, triples] the distance of the middle of three entries from the line between the outer two.

    It is in standard deviations of an entry, NaN if one of the three is missing. `log`: [jobs, sizes] by
    increasing x. Triples across the border between one and several nodes (`wide`) are left out.
    """
    a, b, c = np.arange(len(x) - 2), np.arange(1, len(x) - 1), np.arange(2, len(x))
    good = (wide[a] == wide[c]) & (x[c] > x[b]) & (x[b] > x[a])
    a, b, c = a[good], b[good], c[good]
    part = (x[c] - x[b]) / (x[c] - x[a])
    rest = log[:, b] - part * log[:, a] - (1 - part) * log[:, c]
    return rest / np.sqrt(1 + part**2 + (1 - part) ** 2)


def noise_of(rough: list[np.ndarray]) -> np.ndarray:
    """Return [jobs, groups] relative noise of entries, from the differences of their row; 0 if unknown.

    Noise is the median distance of the differences from their median, because a common bend is not noise. A
    dozen differences give it only to a quarter, so it is averaged with the median over all rows, unless the
    row is exact. A row of fewer than LEAST differences gets that median alone.
    """
    own = np.stack([_scatter(r) for r in rough], 1)
    if np.isnan(own).all():
        return np.zeros(own.shape)
    usual = np.nanmedian(own)
    mean = np.sqrt((own**2 + usual**2) / 2)
    return np.where(np.isnan(own), usual, np.where(own > EXACT, mean, own))


def _scatter(rough: np.ndarray) -> np.ndarray:
    """Return [rows] a robust standard deviation of each row of `rough`; NaN if it has too few entries."""
    found = np.full(len(rough), np.nan)
    rows = np.flatnonzero((~np.isnan(rough)).sum(1) >= LEAST)
    if len(rows):
        apart = rough[rows] - np.nanmedian(rough[rows], 1)[:, None]
        found[rows] = np.nanmedian(np.abs(apart), 1) / QUARTILE
    return found


def smooth(log: np.ndarray, variance: np.ndarray, x: np.ndarray, wide: np.ndarray) -> np.ndarray:
    """Return [jobs, sizes] the fitted curve at every size, from the entries that are known."""
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
    """Return [jobs, shapes] the goodput of a problem with noisy rows smoothed (see `shrunk`)."""
    error = None
    if any(view.goodput_error for view in problem.jobs):
        error = np.array(
            [[view.goodput_error.get(s, np.nan) for s in problem.shapes] for view in problem.jobs]
        )
    nodes = np.array([shape.num_nodes for shape in problem.shapes], np.int64)
    return shrunk(problem.goodput, problem.devices, nodes, problem.kind, error)


def with_doubt(problem: ShapeProblem) -> np.ndarray:
    """Return [jobs, shapes] goodput; entries far above the largest measured size count for less.

    Up to FAR times as many devices, a table is trusted. Beyond, it is taken to gain nothing more than there
    from perfect scaling. So a job first grows to where it is trusted, measures, and then goes on.
    """
    measured = np.array(
        [v.largest_profiled if v.spec.mode == "adaptive" else 0 for v in problem.jobs], np.float64
    )
    trusted = np.where(measured > 0, FAR * measured, np.inf)[:, None]
    return problem.goodput * np.minimum(trusted / problem.devices, 1.0)
