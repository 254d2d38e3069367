"""Fits the parameters of the time model to measured step times, and says which of them the data leave open.

The fit is more robust than plain least squares. It uses log errors under a pseudo-Huber loss, several
starting points, and a weak prior whose weight follows the noise of the measurements. It computes in float64
whatever the process's precision. A link that was never measured stays unknown (NaN) instead of perfect;
`PerfFit.explore` gives the optimistic reading.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxgoodput._pytree import struct
from jaxgoodput.goodput.perf import NO_SYNC_S, Numeric, PerfParams, Placement
from jaxgoodput.goodput.published import solve_published
from jaxgoodput.goodput.regression import NAMES, OVERLAP, pack, rms_error, search_point, solve

# A parameter counts as determined if its standard error is below half its size (or half of a tenth of a step,
# if it is too small to matter).
DETERMINED = 0.5

LINKS = ("none", "intra", "inter")  # one replica; many on one node; many nodes


@struct
class StepTimings:
    """Measured times, one row per configuration; every field is an array `[rows]`.

    A time that was not measured is NaN. Times are seconds, without compilation.
    """

    num_nodes: Numeric
    """Number of nodes."""
    num_replicas: Numeric
    """Number of replicas over all nodes."""
    micro_batch_size: Numeric
    """Samples per replica."""
    accumulate_s: Numeric
    """Time of one micro-batch without synchronisation."""
    reduce_s: Numeric
    """Time of the all-reduce alone."""
    update_s: Numeric
    """Time of the optimizer alone."""
    step_s: Numeric
    """Time of a whole step of one micro-batch: compute, synchronise, update."""
    weight: Numeric = 1.0
    """Relative trust in each row, at least 0, or one number for all; lower for old timings."""


@dataclass(frozen=True)
class PerfFit:
    """Fitted parameters and how far to trust them."""

    params: PerfParams
    """Fitted parameters; NaN for a kind of link that was never measured."""
    error: float
    """RMS log error over all measurements; 0.1 is about 10 %."""
    unidentified: tuple[str, ...]
    """Fields of `params` that the data cannot determine."""
    links: tuple[str, ...]
    """Kinds of link that were measured, out of "none", "intra" and "inter"."""
    num_rows: int
    """Number of rows fitted."""
    max_replicas: int
    """Largest number of replicas measured."""

    def knows(self, placement: Placement) -> Any:
        """Return whether the kind of link that `placement` needs was measured; bool, or an array of bool."""
        nodes, replicas = np.asarray(placement.num_nodes), np.asarray(placement.num_replicas)
        link = np.where(nodes > 1, 2, np.where(replicas > 1, 1, 0))
        known = np.array([name in self.links for name in LINKS])[link]
        return known if known.ndim else bool(known)

    def explore(self) -> PerfParams:
        """Return the parameters with every unknown link assumed as fast as possible.

        Use this if a scheduler should have a reason to try new placements. Without measurements, scaling is
        perfect (Pollux's prior). If only one node was measured, several nodes are assumed a tenth slower; if
        only several were measured, one node is assumed as fast.
        """
        p = self.params
        intra, intra_more = p.intra_base, p.intra_per_replica
        inter, inter_more = p.inter_base, p.inter_per_replica
        if np.isnan(intra):
            intra, intra_more = (NO_SYNC_S, NO_SYNC_S) if np.isnan(inter) else (inter, inter_more)
        if np.isnan(inter):
            inter, inter_more = 1.1 * intra, 1.1 * intra_more
        return dataclasses.replace(
            p,
            intra_base=intra,
            intra_per_replica=intra_more,
            inter_base=inter,
            inter_per_replica=inter_more,
        )


def fit_perf_params(
    timings: StepTimings,
    *,
    priors: Literal["default", "adaptdl"] = "default",
    start: PerfParams | None = None,
) -> PerfFit:
    """Return the time model that explains `timings` best, and mark the parameters that the data leave open.

    `start`, for example the previous fit, is one more point to search from. `priors="adaptdl"` minimises
    AdaptDL's objective under its constraints: anything not observed is perfect, and `update_s` is 0.

    Thread-safe: it computes in float64 without touching the process's precision. Raises ValueError for rows
    of unequal length, impossible counts, times that are not positive, or no measured time at all.
    """
    if priors not in ("default", "adaptdl"):
        raise ValueError(
            f"priors={priors!r} is unknown; choose 'default', or 'adaptdl' for the published fit."
        )
    nodes, replicas, sizes, times, weight = _checked(timings)
    rows = pack(nodes, replicas, sizes, times, weight)
    solution = solve(rows, None if start is None else search_point(start, rows))
    links = _measured_links(nodes, replicas, np.isfinite(times) & (weight[:, None] > 0))
    open_ = {name for name, s in zip(NAMES, solution.spread, strict=True) if not s < DETERMINED}
    if priors == "adaptdl":
        values = solve_published(rows, sizes, solution)
        error = rms_error(values, rows)
        open_.add("update_s")
    else:
        values, error = solution.values.copy(), solution.error
        values[2:4] *= 1.0 if "inter" in links else np.nan
        values[4:6] *= 1.0 if "intra" in links else np.nan
    units = np.full(len(NAMES), rows.unit_s)
    units[1], units[OVERLAP] = rows.unit_s / rows.unit_size, 1.0
    return PerfFit(
        params=PerfParams(**dict(zip(NAMES, map(float, values * units), strict=True))),
        error=error,
        unidentified=tuple(name for name in NAMES if name in open_),
        links=links,
        num_rows=len(nodes),
        max_replicas=int(replicas.max()),
    )


def _measured_links(
    nodes: np.ndarray, replicas: np.ndarray, measured: np.ndarray
) -> tuple[str, ...]:
    """Return the kinds of link whose cost the rows tell: "none", "intra" (a node) and "inter" (nodes)."""
    accumulate, step, reduce = measured[:, 0], measured[:, 1], measured[:, 2]
    alone = replicas == 1
    # The compute time is known from a step without synchronisation, or if synchronising was timed alone.
    known = {"none": accumulate | (alone & step) | (step & reduce)}
    for link, chosen in (("intra", ~alone & (nodes == 1)), ("inter", nodes > 1)):
        known[link] = chosen & (step | reduce)
    return tuple(link for link in LINKS if known[link].any())


def _checked(timings: StepTimings) -> tuple[np.ndarray, ...]:
    """Return (nodes, replicas, sizes, times [rows, 4], weight) of rows with weight; ValueError if invalid."""
    fields = {
        name: np.atleast_1d(np.asarray(getattr(timings, name), np.float64))
        for name in StepTimings.__dataclass_fields__
    }
    if fields["weight"].size == 1:
        fields["weight"] = np.broadcast_to(fields["weight"].ravel(), fields["step_s"].shape)
    shapes = {name: array.shape for name, array in fields.items()}
    if len(set(shapes.values())) != 1 or len(shapes["step_s"]) != 1:
        raise ValueError(
            f"StepTimings needs arrays of one length, one entry per row, but has {shapes}. "
            "Use NaN for a time that was not measured."
        )
    weight = fields["weight"]
    if not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError(
            f"StepTimings.weight must be finite and >= 0, got {weight.tolist()}. It is the "
            "relative trust in each row; use 1 to trust all rows alike."
        )
    nodes, replicas, sizes = (
        fields[name] for name in ("num_nodes", "num_replicas", "micro_batch_size")
    )
    wrong = ~((nodes >= 1) & (replicas >= nodes) & (sizes >= 1))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"StepTimings row {row} has num_nodes={nodes[row]:g}, num_replicas={replicas[row]:g}, "
            f"micro_batch_size={sizes[row]:g}. Each must be at least 1, and num_replicas, counted "
            "over all nodes, at least num_nodes."
        )
    times = np.stack([fields[n] for n in ("accumulate_s", "step_s", "reduce_s", "update_s")], 1)
    wrong = ~np.isnan(times) & ~(np.isfinite(times) & (times > 0))
    if wrong.any():
        row, column = map(int, np.argwhere(wrong)[0])
        raise ValueError(
            f"StepTimings row {row} has a time of {times[row, column]} s, but times must be "
            "finite and above 0. Use NaN for a time that was not measured."
        )
    used = (weight > 0) & np.isfinite(times[:, :2]).any(1)
    if not used.any():
        raise ValueError(
            f"there is nothing to fit: none of the {len(weight)} rows of StepTimings has a positive weight "
            "and a measured step_s or accumulate_s. Measure at least one step."
        )
    return nodes[used], replicas[used], sizes[used], times[used], weight[used]
