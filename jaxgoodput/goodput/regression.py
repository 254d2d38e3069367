"""The numerical core of the fit: log errors of the time model, minimised from several starts.

Everything here is in *normal units*: times over the geometric mean of the measured step times,
sizes over the geometric mean of the micro-batch sizes. One prior then serves microseconds and
minutes alike. Parameters are searched as an unbounded vector `[params]` (logarithms; a sigmoid for
the overlap), in the order of `NAMES`, so that no bound is ever active and a parameter can approach
zero smoothly.

The rows are padded to a few sizes, because a compiled function is tied to its shapes; padding has
weight zero. All of it runs in float64 inside a context of the calling thread (`float64_on_cpu`).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import optimize

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
NO_SYNC = 1e-9  # normal units: what one replica pays for synchronisation

# Where a parameter goes when the data do not say, in normal units and in the searched coordinates:
# a fifth of a step is fixed cost, synchronising costs about a tenth and hardly grows with the
# replicas. Wide (a factor of e^2 either way), and weighed by the measured noise, so that data
# overrule it.
PRIOR_CENTRE = np.array(
    [np.log(0.2), np.log(0.5), np.log(0.2), np.log(0.005), np.log(0.1), np.log(0.005), -2.4]
    + [np.log(0.01)]
)
PRIOR_WIDTH = np.array([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])

# Columns of the packed rows.
MULTI, MANY, BEYOND_TWO, SIZE = 0, 1, 2, 3
LOG_TIMES = slice(4, 8)  # accumulate, step, reduce, update
WEIGHTS = slice(8, 12)  # square roots; 0 = not measured, or padding
NUM_COLUMNS = 12

NOISE_FLOOR = 1e-3  # nobody measures steps better than 0.1 %
NOISE_CEILING = 0.3
NORMAL_MEDIAN = 0.6745  # of the size of a standard normal number


@contextlib.contextmanager
def float64_on_cpu() -> Iterator[None]:
    """float64 on a host CPU device, for the calling thread only and whatever its transfer guard.

    The process's default precision is not touched: another thread may be tracing float32 code.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.transfer_guard("allow"))
        with contextlib.suppress(RuntimeError):  # no CPU backend: the default device does it
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


@dataclass(frozen=True)
class Rows:
    """Measurements in normal units, padded; see the column constants above."""

    table: np.ndarray
    """[padded, NUM_COLUMNS] float64."""
    num_rows: int
    """Without the padding."""
    unit_s: float
    """Seconds of one normal unit of time."""
    unit_size: float
    """Samples of one normal unit of size."""
    has_update: bool
    """Whether the optimizer's time can be told from the rest."""


def padded_size(num_rows: int) -> int:
    """The next of 32, 128, 512, ...: few sizes, so that few functions are compiled."""
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
    """Rows in normal units; `times` [rows, 4] is seconds of accumulate, step, reduce, update."""
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
    # Weights are relative: their mean is 1, so that they do not pretend to more rows than there
    # are.
    mean_weight = np.mean(weight[weight > 0])
    real[:, WEIGHTS] = np.sqrt(np.where(measured, weight[:, None] / mean_weight, 0.0))
    alone = (num_replicas == 1) & measured[:, 0] & measured[:, 1]
    return Rows(table, num_rows, unit_s, unit_size, bool(measured[:, 3].any() or alone.any()))


def parameters(
    point: Float[Array, " params"], has_update: Float[Array, ""]
) -> Float[Array, " params"]:
    """The eight parameters, in normal units, at a point of the search space."""
    # The clip keeps a wild trial step finite; the prior pulls back from beyond it.
    values = jnp.exp(jnp.clip(point, -25.0, 12.0))
    overlap = 1.0 + 9.0 * jax.nn.sigmoid(point[OVERLAP])
    return values.at[OVERLAP].set(overlap).at[UPDATE].multiply(has_update)


_parameters = jax.jit(parameters)


def log_errors(
    values: Float[Array, " params"], table: Float[Array, "rows columns"]
) -> Float[Array, "rows 4"]:
    """log(predicted / measured) of accumulate, step, reduce and update; meaningless at weight 0."""
    base, per_sample, inter, inter_more, intra, intra_more, overlap, update = values
    compute = base + per_sample * table[:, SIZE]
    beyond_two = table[:, BEYOND_TWO]
    link = jnp.where(table[:, MANY] > 0, intra + intra_more * beyond_two, NO_SYNC)
    sync = jnp.where(table[:, MULTI] > 0, inter + inter_more * beyond_two, link)
    norm = jnp.logaddexp(overlap * jnp.log(compute), overlap * jnp.log(sync)) / overlap
    step = jnp.exp(norm) + update
    # The optimizer's time may be pinned at zero, whose logarithm would poison the gradient.
    update = jnp.broadcast_to(jnp.where(update > 0, update, 1.0), step.shape)
    return jnp.log(jnp.stack([compute, step, sync, update], 1)) - table[:, LOG_TIMES]


def _residuals(point, table, prior, settings):
    """What least squares sees: robust weighted log errors, then the distances from the prior."""
    pull, knee, has_update = settings
    errors = log_errors(parameters(point, has_update), table)
    # The signed root of the pseudo-Huber loss: its square is quadratic within `knee`, linear
    # beyond, smooth everywhere, and an outlier cannot bend the fit.
    robust = errors * jnp.sqrt(2.0 / (1.0 + jnp.sqrt(1.0 + (errors / knee) ** 2)))
    return jnp.concatenate(
        [(robust * table[:, WEIGHTS]).ravel(), pull * (point - prior[0]) / prior[1]]
    )


@jax.jit
def _residuals_and_jacobian(point, table, prior, settings):
    """[residuals, 1 + params]: the value and the Jacobian in one call."""
    value = _residuals(point, table, prior, settings)
    jacobian = jax.jacfwd(_residuals)(point, table, prior, settings)
    return jnp.concatenate([value[:, None], jacobian], 1)


@jax.jit
def _errors_and_jacobian(point, table, has_update):
    """[4 * rows, 1 + params]: the plain weighted log errors and their Jacobian."""

    def errors(point):
        return (log_errors(parameters(point, has_update), table) * table[:, WEIGHTS]).ravel()

    return jnp.concatenate([errors(point)[:, None], jax.jacfwd(errors)(point)], 1)


def search_point(perf: PerfParams, rows: Rows) -> np.ndarray:
    """[params] search coordinates of known parameters; NaN ones start at the prior."""
    units = np.full(len(NAMES), rows.unit_s)
    units[1], units[OVERLAP] = rows.unit_s / rows.unit_size, 1.0
    values = np.array([float(getattr(perf, name)) for name in NAMES]) / units
    point = np.log(np.maximum(values, 1e-9))
    share = np.clip((values[OVERLAP] - 1.0) / 9.0, 1e-3, 1.0 - 1e-3)
    point[OVERLAP] = np.log(share / (1.0 - share))
    return np.where(np.isfinite(point), point, PRIOR_CENTRE)


def starts(rows: Rows) -> list[np.ndarray]:
    """Points to start from, the most promising first: one per degree of overlap.

    Computing is a linear least-squares problem of its own; given it and the overlap, each link
    class is a search over a small grid.
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
    """A minimum of the robust loss."""

    point: np.ndarray
    """[params] search coordinates."""
    values: np.ndarray
    """[params] normal units."""
    noise: float
    """RMS log error of the measurements, corrected for the fitted parameters."""
    error: float
    """RMS log error of the measurements."""
    spread: np.ndarray
    """[params] standard error; 1 = the size of the parameter, or of what matters."""


def solve(rows: Rows, warm: np.ndarray | None = None) -> RobustMinimum:
    """The most plausible parameters: several starts, then once more with the noise they revealed.

    `warm` is an additional start in search coordinates.
    """
    with float64_on_cpu():
        table = jax.device_put(rows.table)
        prior = jax.device_put(np.stack([PRIOR_CENTRE, PRIOR_WIDTH]))
        has_update = float(rows.has_update)

        def search(points: list[np.ndarray], noise: float, knee: float, tolerance: float, calls):
            settings = jax.device_put(np.array([noise, knee, has_update]))
            found = [
                least_squares(
                    lambda x: np.asarray(_residuals_and_jacobian(x, table, prior, settings)),
                    point,
                    tolerance=tolerance,
                    calls=calls,
                )
                for point in points
            ]
            return [point for _, point in sorted(found, key=lambda pair: pair[0])]

        points = starts(rows)[:3] + ([] if warm is None else [warm])
        found = search(points, 0.02, 0.1, 1e-3, 25)
        noise, _ = _noise(found[0], rows, table)
        # Clean data tell minima apart that looked alike under the first, stronger prior.
        again = found if noise < 0.01 else found[:1]
        # The prior is worth one measurement of that noise per parameter; the knee is at three of
        # them.
        point = search(again, noise, max(3.0 * noise, 0.02), 1e-5, 40)[0]
        before, (noise, error) = noise, _noise(point, rows, table)
        if noise < before / 2:  # an outlier had bent the first search, and raised its noise
            point = search([point], noise, max(3.0 * noise, 0.02), 1e-5, 40)[0]
            noise, error = _noise(point, rows, table)
        values = np.array(_parameters(point, has_update))
        spread = _spread(point, values, noise, rows, table)
    return RobustMinimum(point, values, noise, error, spread)


def least_squares(
    both: Callable[[np.ndarray], np.ndarray], point: np.ndarray, *, tolerance: float, calls: int
) -> tuple[float, np.ndarray]:
    """(cost, point) of MINPACK's Levenberg-Marquardt from `point`.

    `both` gives [residuals, 1 + params]: the residuals and their Jacobian side by side.
    """
    seen: tuple[bytes, np.ndarray] = (b"", np.empty(0))

    def evaluate(x: np.ndarray) -> np.ndarray:
        nonlocal seen  # MINPACK asks for the value and the Jacobian of one point apart
        if seen[0] != x.tobytes():
            seen = x.tobytes(), both(x)
        return seen[1]

    result: Any = optimize.leastsq(  # its stubs know the short form only
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
    """RMS log error, over all measurements, of parameters in normal units."""
    with float64_on_cpu():
        errors = np.asarray(log_errors(jnp.asarray(values), jnp.asarray(rows.table)))
    weights = rows.table[:, WEIGHTS] ** 2
    return float(np.sqrt(np.sum(errors**2 * weights) / np.sum(weights)))


def _noise(point: np.ndarray, rows: Rows, table) -> tuple[float, float]:
    """(noise, error): the scale of log errors, corrected for the fitted parameters; their RMS.

    The scale comes from their median, of which nearly half may be outliers without moving it far.
    """
    errors = np.asarray(_errors_and_jacobian(point, table, float(rows.has_update)))[:, 0]
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


def _spread(point, values, noise: float, rows: Rows, table) -> np.ndarray:
    """Standard errors from the data alone, each over max(its parameter, a tenth of a step)."""
    jacobian = np.asarray(_errors_and_jacobian(point, table, float(rows.has_update)))[:, 1:]
    real = rows.table[: rows.num_rows]
    reach = np.ones(len(NAMES))
    for column, chosen in ((3, real[:, MULTI] > 0), (5, real[:, MANY] > real[:, MULTI])):
        reach[column] = max(1.0, real[chosen, BEYOND_TWO].max(initial=1.0))
    units = np.maximum(values, 0.1 / reach)
    units[OVERLAP] = values[OVERLAP]
    slope = np.exp(np.clip(point, -25.0, 12.0))
    share = (values[OVERLAP] - 1.0) / 9.0
    slope[OVERLAP] = max(9.0 * share * (1.0 - share), 1e-6)
    scaled = jacobian / slope * units / max(noise, 0.01)
    # The ridge is a standard error of 100: what the data say nothing about stays visibly large. Not by the
    # inverse of a product: the squares may be too far apart for it.
    rows_and_ridge = np.vstack([scaled, 0.01 * np.eye(len(NAMES))])
    _, sizes, directions = np.linalg.svd(rows_and_ridge, full_matrices=False)
    return np.sqrt(np.sum((directions / sizes[:, None]) ** 2, axis=0))
