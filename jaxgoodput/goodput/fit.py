"""From measured step times to the parameters of the time model, and to what they leave open.

The fit is robust where a plain one is not: log errors under a pseudo-Huber loss, several starts, a
weak prior that is weighed by the noise the measurements themselves show, float64 whatever the
process's precision. It says which parameters the data cannot determine, and a link that was never
measured stays unknown (NaN) instead of perfect; `PerfFit.explore` opts into the optimistic
reading.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxgoodput._pytree import struct
from jaxgoodput.goodput.perf import NO_SYNC_S, Numeric, PerfParams, Placement
from jaxgoodput.goodput.published import solve_published
from jaxgoodput.goodput.regression import NAMES, OVERLAP, pack, rms_error, search_point, solve

# A parameter counts as determined when its standard error is below half its size (or half of a
# tenth of a step, for one so small that it does not matter).
DETERMINED = 0.5

LINKS = ("none", "intra", "inter")  # one replica; many on one node; many nodes


@struct
class StepTimings:
    """What was measured: one row per configuration; every field is an array `[rows]`.

    A time that was not measured is NaN. Times are seconds; compilation does not belong in them.
    """

    num_nodes: Numeric
    """Whole numbers."""
    num_replicas: Numeric
    """Whole numbers, over all nodes."""
    micro_batch_size: Numeric
    """Whole numbers: samples per replica."""
    accumulate_s: Numeric
    """One micro-batch, no synchronisation."""
    reduce_s: Numeric
    """The all-reduce, measured apart."""
    update_s: Numeric
    """The optimizer, measured apart."""
    step_s: Numeric
    """A whole step of one micro-batch: compute, synchronise, update."""
    weight: Numeric = 1.0
    """Relative trust in the row, at least 0, or one number for all; old timings fade so."""


@dataclass(frozen=True)
class PerfFit:
    """Fitted parameters and how far to trust them."""

    params: PerfParams
    """NaN for a kind of link that was never measured."""
    error: float
    """RMS log error over all measurements; 0.1 is about 10 %."""
    unidentified: tuple[str, ...]
    """Fields of `params` that the data cannot determine."""
    links: tuple[str, ...]
    """The measured ones of "none", "intra", "inter"."""
    num_rows: int
    """Measurements behind the fit."""
    max_replicas: int
    """The largest number measured."""

    def knows(self, placement: Placement) -> Any:
        """Whether the kind of link that `placement` needs was measured; bool, or an array of it."""
        nodes, replicas = np.asarray(placement.num_nodes), np.asarray(placement.num_replicas)
        link = np.where(nodes > 1, 2, np.where(replicas > 1, 1, 0))
        known = np.array([name in self.links for name in LINKS])[link]
        return known if known.ndim else bool(known)

    def explore(self) -> PerfParams:
        """The parameters with every unknown link assumed as good as it can be.

        For a scheduler that wants a reason to try: with nothing measured, scaling is perfect
        (Pollux's prior); many nodes are then a tenth slower than the one that was measured, and
        one node as fast as the many that were.
        """
        p = self.params
        intra, intra_more = p.intra_base, p.intra_per_replica
        inter, inter_more = p.inter_base, p.inter_per_replica
        if np.isnan(intra):
            intra, intra_more = (NO_SYNC_S, NO_SYNC_S) if np.isnan(inter) else (inter, inter_more)
        if np.isnan(inter):
            inter, inter_more = 1.1 * intra, 1.1 * intra_more
        return PerfParams(
            compute_base=p.compute_base,
            compute_per_sample=p.compute_per_sample,
            intra_base=intra,
            intra_per_replica=intra_more,
            inter_base=inter,
            inter_per_replica=inter_more,
            overlap=p.overlap,
            update_s=p.update_s,
        )


def fit_perf_params(
    timings: StepTimings,
    *,
    priors: Literal["default", "adaptdl"] = "default",
    start: PerfParams | None = None,
) -> PerfFit:
    """The time model that explains `timings` best, with what it cannot know marked.

    `start`, the previous fit for example, is one more place to search from. `priors="adaptdl"`
    minimises AdaptDL's objective under its pins: what it did not observe is perfect, and
    `update_s` is 0.

    Safe to call from any thread: it computes in float64 without touching the process's precision.
    Raises ValueError for rows of unequal length, impossible counts, times that are not positive,
    or no measured time at all.
    """
    if priors not in ("default", "adaptdl"):
        raise ValueError(
            f"priors={priors!r} is not known; choose 'default', or 'adaptdl' for the published fit."
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
    """Which kinds of link the rows say something about."""
    accumulate, step, reduce = measured[:, 0], measured[:, 1], measured[:, 2]
    alone = replicas == 1
    # Computing is known from a step without synchronisation, or where synchronising is known apart.
    known = {"none": accumulate | (alone & step) | (step & reduce)}
    for link, chosen in (("intra", ~alone & (nodes == 1)), ("inter", nodes > 1)):
        known[link] = chosen & (step | reduce)
    return tuple(link for link in LINKS if known[link].any())


def _checked(timings: StepTimings) -> tuple[np.ndarray, ...]:
    """(nodes, replicas, sizes, times [rows, 4], weight); rows without weight are left out."""
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
            "Fill a time that was not measured with NaN."
        )
    weight = fields["weight"]
    if not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError(
            f"StepTimings.weight must be finite and >= 0, got {weight.tolist()}: it is the "
            "relative trust in each row; use 1 for all if nothing fades."
        )
    nodes, replicas, sizes = (
        fields[name] for name in ("num_nodes", "num_replicas", "micro_batch_size")
    )
    wrong = ~((nodes >= 1) & (replicas >= nodes) & (sizes >= 1))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"StepTimings row {row} has num_nodes={nodes[row]:g}, num_replicas={replicas[row]:g}, "
            f"micro_batch_size={sizes[row]:g}; each must be at least 1 and num_replicas, counted "
            "over all nodes, at least num_nodes."
        )
    times = np.stack([fields[n] for n in ("accumulate_s", "step_s", "reduce_s", "update_s")], 1)
    wrong = ~np.isnan(times) & ~(np.isfinite(times) & (times > 0))
    if wrong.any():
        row, column = map(int, np.argwhere(wrong)[0])
        raise ValueError(
            f"StepTimings row {row} has a time of {times[row, column]} s; measured times are "
            "finite and above 0. Use NaN for one that was not measured."
        )
    used = (weight > 0) & np.isfinite(times[:, :2]).any(1)
    if not used.any():
        raise ValueError(
            f"StepTimings has {len(weight)} rows, none with a positive weight and a measured "
            "step_s or accumulate_s: there is nothing to fit. Measure at least one step."
        )
    return nodes[used], replicas[used], sizes[used], times[used], weight[used]
