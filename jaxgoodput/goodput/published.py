"""AdaptDL's throughput fit, with its objective and its pins, for comparison with published results.

Source: adaptdl/goodput.py, `fit_perf_params`. Only the minimiser is ours. It starts from several points and
searches in logarithms, whereas AdaptDL starts once and stops at the first kink of its loss.
"""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxgoodput.goodput.regression import (
    BEYOND_TWO,
    LOG_TIMES,
    MANY,
    MULTI,
    OVERLAP,
    UPDATE,
    WEIGHTS,
    RobustMinimum,
    Rows,
    least_squares,
    log_errors,
    starts,
)

FLOOR_S = (
    1e-8  # smallest value of any parameter, in seconds; stands for "assumed perfectly scalable"
)
SHARPEST = 1e-6  # RMS log error below which the kink of the loss is not followed further


@contextlib.contextmanager
def float64_on_cpu() -> Iterator[None]:
    """Compute in float64 on a CPU device, for the calling thread only, regardless of its transfer guard.

    The process's default precision is not touched, because another thread may be tracing float32 code.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.transfer_guard("allow"))
        with contextlib.suppress(RuntimeError):  # without a CPU backend, use the default device
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


def with_jacobian(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return a compiled function with the value and the Jacobian side by side, `[residuals, 1 + params]`."""

    @jax.jit
    def both(point, *rest):
        value = function(point, *rest)
        return jnp.concatenate([value[:, None], jax.jacfwd(function)(point, *rest)], 1)

    return both


def _values(point, held):
    """Return the parameters at a search point, in normal units (`Rows`).

    Fitted ones lie above their floor; ones that AdaptDL does not fit have their fixed value.
    """
    free, pinned, floor = held
    values = floor + jnp.exp(jnp.clip(point, -30.0, 7.0))
    values = values.at[OVERLAP].set(1.0 + 9.0 * jax.nn.sigmoid(point[OVERLAP]))
    return jnp.where(free > 0, values, pinned)


_jitted_values = jax.jit(_values)


def _residuals(point, table, held, blunt):
    """Return residuals whose sum of squares bounds the published loss from above, and meets it at `blunt`.

    The published loss is a sum of two RMS errors, which has kinks. Because sqrt(m) <= m / (2 b) + b / 2, with
    equality at b = sqrt(m), it can be minimised by a few smooth least-squares problems, with b (`blunt`) the
    RMS errors of the last solution.
    """
    values = _values(point, held)
    # AdaptDL measures two times; a reduction or an update timed on its own is not in its loss.
    weights = table[:, WEIGHTS][:, :2]
    errors = log_errors(values, table, jnp)[:, :2] * weights
    count = jnp.maximum(jnp.sum(weights**2, 0), 1e-12)
    means = errors / jnp.sqrt(2.0 * blunt * count)[None, :]
    penalties = jnp.stack(
        [
            jnp.sqrt(1e-3) * (values[OVERLAP] - 1.0),
            0.1 * values[3] / values[2],
            0.1 * values[5] / values[4],
        ]
    )
    return jnp.concatenate([means.ravel(), penalties])


_residuals_and_jacobian = with_jacobian(_residuals)


def _pins(rows: Rows, sizes: np.ndarray) -> np.ndarray:
    """Return `[3, params]`: whether AdaptDL fits each parameter, its fixed value otherwise, and its floor.

    By AdaptDL's exploration priors, a parameter that was not observed is held at its floor, which is as good
    as perfect.
    """
    table = rows.table[: rows.num_rows]
    floor = np.full(8, FLOOR_S / rows.unit_s)
    floor[1] *= rows.unit_size
    free, pinned = np.ones(8), floor.copy()
    free[UPDATE] = pinned[UPDATE] = 0.0
    if len(np.unique(sizes)) == 1:
        weights = table[:, WEIGHTS]
        column = 0 if weights[:, 0].any() else 1
        mean = np.average(np.exp(table[:, LOG_TIMES][:, column]), weights=weights[:, column] ** 2)
        free[0], pinned[0] = 0.0, mean / 2.0
    multi = table[:, MULTI] > 0
    if not multi.any():
        free[2] = free[3] = 0.0
    if not (~multi & (table[:, MANY] > 0)).any():
        free[4] = free[5] = 0.0
    if not (table[:, BEYOND_TWO] > 0.5).any():
        free[3] = free[5] = 0.0
    return np.stack([free, pinned, floor])


def solve_published(rows: Rows, sizes: np.ndarray, smooth: RobustMinimum) -> np.ndarray:
    """Return the best minimum of the published loss near several starts, `[params]` in normal units."""
    pins = _pins(rows, sizes)
    flat = smooth.point.copy()  # the published penalties favour no growth and little overlap
    flat[[3, 5]] = np.log(0.01) + flat[[2, 4]]
    flat[OVERLAP] = -3.8
    points = [smooth.point, flat, starts(rows)[0]]
    with float64_on_cpu():
        table, held = jax.device_put(rows.table), jax.device_put(pins)

        def descend(loss: float, blunt: np.ndarray, point: np.ndarray, tolerance: float):
            """Solve one smooth problem; return the published loss, its two RMS errors and the new point."""
            problem = jax.device_put(blunt)
            _, point = least_squares(
                lambda x: np.asarray(_residuals_and_jacobian(x, table, held, problem)),
                point,
                tolerance=tolerance,
                calls=15,
            )
            residuals = np.asarray(_residuals_and_jacobian(point, table, held, problem))[:, 0]
            squares = residuals[:-3].reshape(-1, 2) ** 2
            rms = np.sqrt(squares.sum(0) * 2.0 * blunt)
            loss = float(rms.sum() + np.sum(residuals[-3:] ** 2))
            return loss, np.maximum(rms, SHARPEST), point

        runs = [descend(np.inf, np.full(2, 0.02), point, 1e-2) for point in points]
        runs = [descend(*run, 1e-3) for run in runs]
        best = min(runs, key=lambda run: run[0])
        for _ in range(8):
            refined = descend(*best, 1e-4)
            converged = refined[0] > best[0] - 1e-5
            best = min(best, refined, key=lambda run: run[0])
            if converged:
                break
        values = np.array(_jitted_values(best[2], held))
    if not (rows.table[:, MULTI] > 0).any():
        # Several nodes, which were not measured, are assumed a tenth slower than one.
        values[2], values[3] = max(values[2], 1.1 * values[4]), max(values[3], 1.1 * values[5])
    return values
