"""The numerical core of the fit: log errors of the time model, minimised from several starts.

Everything here is in *normal units*: times are divided by the geometric mean of the measured step times, and
sizes by the geometric mean of the micro-batch sizes, so that one prior suits microseconds and minutes alike.
Parameters are searched as an unbounded vector `[params]` (logarithms; a sigmoid for the overlap), in the
order of `NAMES`. No bound is ever active, and a parameter can approach zero smoothly.

All of it is NumPy in float64: a fit takes milliseconds, and compiling these functions took a second of the
run's first ones. Rows are padded to a few lengths for `published.py`, which is compiled; padding has weight
zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

from jaxgoodput.goodput.perf import PerfParams

NAMES = (
    "compute_base",
    "compute_per_sample",
    "inter_base",
    "inter_per_replica",
    "intra_base",
    "intra_per_replica",
    "overlap",
    "update_s",
)
OVERLAP, UPDATE = 6, 7
NO_SYNC = 1e-9  # synchronisation time of a single replica, in normal units

# The prior, in search coordinates: the values of parameters that the data leave open. A fifth of a step is
# fixed cost; synchronising costs about a tenth and hardly grows with the replicas. The prior is wide (a
# factor of e^2 either way) and weighted by the measured noise, so that data overrule it.
PRIOR_CENTRE = np.array(
    [np.log(0.2), np.log(0.5), np.log(0.2), np.log(0.005), np.log(0.1), np.log(0.005), -2.4]
    + [np.log(0.01)]
)
PRIOR_WIDTH = np.array([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])

CLIP = -25.0, 12.0  # of search coordinates

# Columns of the packed rows.
MULTI, MANY, BEYOND_TWO, SIZE = 0, 1, 2, 3
LOG_TIMES = slice(4, 8)  # accumulate, step, reduce, update
WEIGHTS = slice(8, 12)  # square roots of weights; 0 = not measured, or padding
NUM_COLUMNS = 12

NOISE_FLOOR = 1e-3  # step times are never more precise than 0.1 %
NOISE_CEILING = 0.3
NORMAL_MEDIAN = 0.6745  # median of |x| for a standard normal x


@dataclass(frozen=True)
class Rows:
    """Measured step times as a padded table, in multiples of `unit_s` and `unit_size` ("normal units")."""

    table: np.ndarray
    """Rows with padding, `[padded, NUM_COLUMNS]`, float64."""
    num_rows: int
    """Number of rows without padding."""
    unit_s: float
    """Seconds of one normal unit of time."""
    unit_size: float
    """Samples of one normal unit of size."""
    has_update: bool
    """Whether the optimizer's time can be separated from the rest."""


def padded_size(num_rows: int) -> int:
    """Return the next of 32, 128, 512, ..., so that few functions are compiled (`published.py`)."""
    size = 32
    while size < num_rows:
        size *= 4
    return size


def pack(
    num_nodes: np.ndarray,
    num_replicas: np.ndarray,
    micro_batch_size: np.ndarray,
    times: np.ndarray,
    weight: np.ndarray,
) -> Rows:
    """Return rows in normal units; `times`, `[rows, 4]`, are s of accumulate, step, reduce and update."""
    num_rows = len(num_nodes)
    measured = np.isfinite(times) & (weight[:, None] > 0)
    measured[num_replicas == 1, 2] = False  # one replica has nothing to reduce
    whole = times[:, 1][measured[:, 1]]
    unit_s = float(np.exp(np.mean(np.log(whole if whole.size else times[measured]))))
    unit_size = float(np.exp(np.mean(np.log(micro_batch_size))))
    table = np.zeros((padded_size(num_rows), NUM_COLUMNS))
    table[:, SIZE] = 1.0
    real = table[:num_rows]
    real[:, MULTI] = num_nodes > 1
    real[:, MANY] = num_replicas > 1
    real[:, BEYOND_TWO] = np.maximum(num_replicas - 2, 1e-8)
    real[:, SIZE] = micro_batch_size / unit_size
    real[:, LOG_TIMES] = np.log(np.where(measured, times, unit_s) / unit_s)
    # Weights are relative: their mean is made 1, so that they do not act like more rows than there are.
    mean_weight = np.mean(weight[weight > 0])
    real[:, WEIGHTS] = np.sqrt(np.where(measured, weight[:, None] / mean_weight, 0.0))
    alone = (num_replicas == 1) & measured[:, 0] & measured[:, 1]
    return Rows(table, num_rows, unit_s, unit_size, bool(measured[:, 3].any() or alone.any()))


def parameters(point: np.ndarray, has_update: bool) -> Float[np.ndarray, " params"]:
    """Return the eight parameters of the time model, in normal units, at a point of the search space."""
    # The clip keeps the values of a wild trial step finite; the prior then pulls the search back.
    values = np.exp(np.clip(point, *CLIP))
    values[OVERLAP] = 1.0 + 9.0 * special.expit(point[OVERLAP])
    values[UPDATE] *= has_update
    return values


def _slopes(point: np.ndarray, values: np.ndarray) -> Float[np.ndarray, " params"]:
    """Return the derivative of each parameter by its search coordinate."""
    low, high = CLIP
    slopes = np.where((point > low) & (point < high), values, 0.0)
    share = special.expit(point[OVERLAP])
    slopes[OVERLAP] = 9.0 * share * (1.0 - share)
    return slopes


def log_errors(values: Any, table: Any, xp: Any = np) -> Any:
    """Return log(predicted / measured) of accumulate, step, reduce and update, `[rows, 4]`.

    They are meaningless at weight 0. `xp` is the module to compute with: NumPy, or `jax.numpy`.
    """
    base, per_sample, inter, inter_more, intra, intra_more, overlap, update = values
    compute = base + per_sample * table[:, SIZE]
    beyond_two = table[:, BEYOND_TWO]
    link = xp.where(table[:, MANY] > 0, intra + intra_more * beyond_two, NO_SYNC)
    sync = xp.where(table[:, MULTI] > 0, inter + inter_more * beyond_two, link)
    norm = xp.logaddexp(overlap * xp.log(compute), overlap * xp.log(sync)) / overlap
    step = xp.exp(norm) + update
    # The optimizer's time may be pinned at zero, whose logarithm would make the gradient NaN.
    update = xp.broadcast_to(xp.where(update > 0, update, 1.0), step.shape)
    return xp.log(xp.stack([compute, step, sync, update], 1)) - table[:, LOG_TIMES]


def _errors(
    point: np.ndarray, table: np.ndarray, has_update: bool
) -> tuple[Float[np.ndarray, "rows 4"], Float[np.ndarray, "rows 4 params"]]:
    """Return `log_errors` at a point, and their derivatives by its coordinates."""
    values = parameters(point, has_update)
    errors = log_errors(values, table)
    compute, step, sync, _ = np.exp(errors + table[:, LOG_TIMES]).T
    overlap, update = values[OVERLAP], values[UPDATE]
    by = np.zeros((*errors.shape, len(NAMES)))  # by the parameters
    is_multi, is_many = table[:, MULTI] > 0, table[:, MANY] > 0
    beyond_two, size = table[:, BEYOND_TWO], table[:, SIZE]
    by[:, 0, 0], by[:, 0, 1] = 1.0 / compute, size / compute
    for column, chosen in ((2, is_multi), (4, is_many & ~is_multi)):
        by[chosen, 2, column] = 1.0 / sync[chosen]
        by[chosen, 2, column + 1] = beyond_two[chosen] / sync[chosen]
    log_compute, log_sync = np.log(compute), np.log(sync)
    norm = np.logaddexp(overlap * log_compute, overlap * log_sync) / overlap
    of_compute = np.exp(overlap * (log_compute - norm))  # its part of the norm
    of_sync = np.exp(overlap * (log_sync - norm))
    by_norm = of_compute[:, None] * by[:, 0] + of_sync[:, None] * by[:, 2]
    by_norm[:, OVERLAP] = (of_compute * log_compute + of_sync * log_sync - norm) / overlap
    by[:, 1] = by_norm * (np.exp(norm) / step)[:, None]
    by[:, 1, UPDATE] = 1.0 / step
    by[:, 3, UPDATE] = 1.0 / update if update > 0 else 0.0
    return errors, by * _slopes(point, values)


def _residuals_and_jacobian(
    point: np.ndarray, table: np.ndarray, has_update: bool, pull: float, knee: float
) -> np.ndarray:
    """Return the residuals for least squares, and their Jacobian, side by side: `[residuals, 1 + params]`.

    They are robust weighted log errors, then distances from the prior.
    """
    errors, by = _errors(point, table, has_update)
    # The signed root of the pseudo-Huber loss. Its square is quadratic within `knee`, linear beyond, and
    # smooth everywhere, so an outlier cannot bend the fit.
    bend = np.sqrt(1.0 + (errors / knee) ** 2)
    factor = np.sqrt(2.0 / (1.0 + bend)) * table[:, WEIGHTS]
    robust = np.concatenate([errors[..., None], by * (0.5 * (1.0 + 1.0 / bend))[..., None]], -1)
    robust *= factor[..., None]
    prior = np.column_stack([(point - PRIOR_CENTRE) / PRIOR_WIDTH, np.diag(1.0 / PRIOR_WIDTH)])
    return np.concatenate([robust.reshape(-1, 1 + len(NAMES)), pull * prior])


def search_point(perf: PerfParams, rows: Rows) -> np.ndarray:
    """Return the search coordinates, `[params]`, of known parameters; NaN ones start at the prior."""
    units = np.full(len(NAMES), rows.unit_s)
    units[1], units[OVERLAP] = rows.unit_s / rows.unit_size, 1.0
    values = np.array([float(getattr(perf, name)) for name in NAMES]) / units
    point = np.log(np.maximum(values, 1e-9))
    share = np.clip((values[OVERLAP] - 1.0) / 9.0, 1e-3, 1.0 - 1e-3)
    point[OVERLAP] = np.log(share / (1.0 - share))
    return np.where(np.isfinite(point), point, PRIOR_CENTRE)


def starts(rows: Rows) -> list[np.ndarray]:
    """Return points to start from, the most promising first: one for each of a few degrees of overlap.

    The compute time alone is a linear least-squares problem. Given its solution and the overlap, each kind of
    link is searched over a small grid.
    """
    table = rows.table[: rows.num_rows]
    has = table[:, WEIGHTS] > 0
    accumulate, step, reduce, _ = np.exp(table[:, LOG_TIMES]).T
    alone = table[:, MANY] == 0
    hidden = np.where(has[:, 2], np.maximum(step - reduce, 0.1 * step), 0.7 * step)
    compute = np.where(has[:, 0], accumulate, np.where(alone, step, hidden))
    design = np.stack([1.0 / compute, table[:, SIZE] / compute], 1)
    base, per_sample = np.maximum(optimize.nnls(design, np.ones(len(compute)))[0], 1e-3)
    log_compute = np.log(base + per_sample * table[:, SIZE])

    overlaps = np.array([1.1, 1.7, 3.0, 6.0])
    bases = np.geomspace(1e-2, 5.0, 9)
    ratios = np.array([1e-3, 0.03, 0.3])
    points = np.tile(PRIOR_CENTRE, (len(overlaps), 1))
    points[:, 0], points[:, 1] = np.log(base), np.log(per_sample)
    share = (overlaps - 1.0) / 9.0
    points[:, OVERLAP] = np.log(share / (1.0 - share))
    cost = np.zeros(len(overlaps))
    multi = table[:, MULTI] > 0
    for column, chosen in ((2, multi), (4, ~alone & ~multi)):
        chosen = chosen & (has[:, 1] | has[:, 2])
        if not chosen.any():
            continue
        growth = 1.0 + ratios[:, None] * table[chosen, BEYOND_TWO]
        log_sync = np.log(bases[:, None, None] * growth)  # [bases, ratios, rows]
        p = overlaps[:, None, None, None]
        log_step = np.logaddexp(p * log_compute[chosen], p * log_sync) / p
        errors = (log_step - table[chosen, 5]) ** 2 * has[chosen, 1]
        errors = errors + (log_sync - table[chosen, 6]) ** 2 * has[chosen, 2]
        sums = np.minimum(errors, 0.5).sum(-1).reshape(len(overlaps), -1)
        best = sums.argmin(1)
        cost += sums.min(1)
        points[:, column] = np.log(bases[best // len(ratios)])
        points[:, column + 1] = points[:, column] + np.log(ratios[best % len(ratios)])
    return list(points[np.argsort(cost, kind="stable")])


@dataclass(frozen=True)
class RobustMinimum:
    """A local minimum of the robust loss: the parameters found, and how well they explain the times."""

    point: np.ndarray
    """Search coordinates, `[params]`."""
    values: np.ndarray
    """Parameters in normal units, `[params]`."""
    noise: float
    """Scale of the log errors, corrected for the number of fitted parameters."""
    error: float
    """RMS log error of the measurements."""
    spread: np.ndarray
    """Standard errors, `[params]`, relative to the parameter, or to a tenth of a step if that is larger."""


def solve(rows: Rows, warm: np.ndarray | None = None) -> RobustMinimum:
    """Return the most plausible parameters: search from several starts, then again with the noise found.

    `warm` is an additional start in search coordinates.
    """
    table, has_update = rows.table, rows.has_update

    def search(points: list[np.ndarray], noise: float, knee: float, tolerance: float, calls: int):
        found = [
            least_squares(
                lambda x: _residuals_and_jacobian(x, table, has_update, noise, knee),
                point,
                tolerance=tolerance,
                calls=calls,
            )
            for point in points
        ]
        return [point for _, point in sorted(found, key=lambda pair: pair[0])]

    points = starts(rows)[:3] + ([] if warm is None else [warm])
    found = search(points, 0.02, 0.1, 1e-3, 25)
    noise, _ = _noise(found[0], rows)
    # Clean data can separate minima that looked alike under the first, stronger prior.
    again = found if noise < 0.01 else found[:1]
    # For each parameter the prior counts as one measurement with that noise; the knee is at three times it.
    point = search(again, noise, max(3.0 * noise, 0.02), 1e-5, 40)[0]
    before, (noise, error) = noise, _noise(point, rows)
    if noise < before / 2:  # an outlier had bent the first search and raised its noise
        point = search([point], noise, max(3.0 * noise, 0.02), 1e-5, 40)[0]
        noise, error = _noise(point, rows)
    values = parameters(point, has_update)
    spread = _spread(point, values, noise, rows)
    return RobustMinimum(point, values, noise, error, spread)


def least_squares(
    both: Callable[[np.ndarray], np.ndarray], point: np.ndarray, *, tolerance: float, calls: int
) -> tuple[float, np.ndarray]:
    """Minimise by MINPACK's Levenberg-Marquardt from `point`; return (cost, point).

    `both` returns the residuals and their Jacobian side by side, `[residuals, 1 + params]`.
    """
    seen: tuple[bytes, np.ndarray] = (b"", np.empty(0))

    def evaluate(x: np.ndarray) -> np.ndarray:
        nonlocal seen  # MINPACK asks for the value and the Jacobian of a point in separate calls
        if seen[0] != x.tobytes():
            seen = x.tobytes(), both(x)
        return seen[1]

    result: Any = optimize.leastsq(  # scipy's type stubs only know the short form
        lambda x: evaluate(x)[:, 0].copy(),
        point,
        Dfun=lambda x: evaluate(x)[:, 1:].copy(),
        full_output=True,
        ftol=tolerance**1.5,
        xtol=tolerance,
        maxfev=calls,
    )
    return float(np.sum(result[2]["fvec"] ** 2)), result[0]


def rms_error(values: np.ndarray, rows: Rows) -> float:
    """Return the RMS log error of parameters in normal units, over all measurements."""
    errors = log_errors(values, rows.table)
    weights = rows.table[:, WEIGHTS] ** 2
    return float(np.sqrt(np.sum(errors**2 * weights) / np.sum(weights)))


def _noise(point: np.ndarray, rows: Rows) -> tuple[float, float]:
    """Return the scale of the log errors, corrected for the number of parameters, and their RMS.

    The scale comes from the median, which hardly moves even if nearly half of the rows are outliers.
    """
    errors = (_errors(point, rows.table, rows.has_update)[0] * rows.table[:, WEIGHTS]).ravel()
    weights = rows.table[:, WEIGHTS].ravel() ** 2
    seen = weights > 0
    count = np.count_nonzero(seen)
    sizes = np.abs(errors[seen]) / np.sqrt(weights[seen])
    order = np.argsort(sizes)
    below = np.cumsum(weights[seen][order])
    median = sizes[order][np.searchsorted(below, below[-1] / 2)]
    noise = float(median / NORMAL_MEDIAN * np.sqrt(count / max(count - 4, 2)))
    error = float(np.sqrt(np.sum(errors**2) / np.sum(weights)))
    return float(np.clip(noise, NOISE_FLOOR, NOISE_CEILING)), error


def _spread(point: np.ndarray, values: np.ndarray, noise: float, rows: Rows) -> np.ndarray:
    """Return standard errors from the data alone, each divided by max(its parameter, a tenth of a step)."""
    _, by = _errors(point, rows.table, rows.has_update)
    jacobian = (by * rows.table[:, WEIGHTS, None]).reshape(-1, len(NAMES))
    real = rows.table[: rows.num_rows]
    reach = np.ones(len(NAMES))
    for column, chosen in ((3, real[:, MULTI] > 0), (5, real[:, MANY] > real[:, MULTI])):
        reach[column] = max(1.0, real[chosen, BEYOND_TWO].max(initial=1.0))
    units = np.maximum(values, 0.1 / reach)
    units[OVERLAP] = values[OVERLAP]
    slope = np.exp(np.clip(point, *CLIP))
    share = (values[OVERLAP] - 1.0) / 9.0
    slope[OVERLAP] = max(9.0 * share * (1.0 - share), 1e-6)
    scaled = jacobian / slope * units / max(noise, 0.01)
    # The ridge is a standard error of 100, so that a parameter the data say nothing about gets a large one.
    # An SVD is used instead of the inverse of a product, because squares may be too many orders apart for
    # that.
    rows_and_ridge = np.vstack([scaled, 0.01 * np.eye(len(NAMES))])
    _, sizes, directions = np.linalg.svd(rows_and_ridge, full_matrices=False)
    return np.sqrt(np.sum((directions / sizes[:, None]) ** 2, axis=0))
