"""The dashboard's pictures: where goodput lies, and how well the model tells the truth.

Each returns uint8 RGB [height, width, 3]. Drawn with matplotlib where it is installed (extra
`plots`; no pyplot, so no global state), else with the canvas of `raster.py`.
"""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgoodput.goodput.efficiency import GradParams, noise_scale
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement, step_time
from jaxgoodput.observe import plots
from jaxgoodput.observe.events import TuneEnd
from jaxgoodput.observe.plots import Mark, Series

# Colours that stay apart for colour-blind eyes (Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, RED = (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0)

_MAX_COLUMNS = 14


def has_matplotlib() -> bool:
    """Whether the extra `plots` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@dataclass(frozen=True)
class _Known:
    """The model of a re-plan in Python floats, so that drawing never touches a device."""

    model: GoodputModel
    placement: Placement
    has_efficiency: bool


def _known(tune: TuneEnd) -> _Known | None:
    if tune.fit is None:
        return None
    perf = PerfParams(
        **{name: float(getattr(tune.fit.params, name)) for name in PerfParams.__dataclass_fields__}
    )
    grad = GradParams(sqr=float(tune.grad.sqr), var=float(tune.grad.var))
    return _Known(
        model=GoodputModel(
            perf=perf, grad=grad, base_batch_size=tune.limits.base, residuals=tune.residuals
        ),
        placement=Placement(num_nodes=tune.num_nodes, num_replicas=tune.num_replicas),
        has_efficiency=math.isfinite(grad.sqr) and math.isfinite(grad.var),
    )


def goodput_surface(tune: TuneEnd, *, matplotlib: bool | None = None) -> np.ndarray | None:
    """Goodput over micro-batch size and count, percent of the best; None without a fit.

    Cells outside the limits are grey; a thin frame marks the configuration before, a thick one the
    verdict. Throughput stands in while the noise is unknown, and the title says so.
    """
    known = _known(tune)
    if known is None:
        return None
    verdict = tune.verdict.config
    sizes = _thinned(
        tune.limits.ladder(tune.num_replicas),
        {tune.before.micro_batch_size, verdict.micro_batch_size},
    )
    most = max(tune.limits.max_micro_batches, verdict.num_micro_batches)
    counts = _thinned(
        list(range(1, most + 1)), {1, tune.before.num_micro_batches, verdict.num_micro_batches}
    )
    micro, number = np.array(sizes, float)[None, :], np.array(counts, float)[:, None]
    worth = known.model.goodput if known.has_efficiency else known.model.throughput
    values = np.array(worth(known.placement, micro, number), float)
    batch = micro * number * tune.num_replicas
    smallest = tune.limits.smallest
    values[(batch > tune.limits.max) | (batch < smallest)] = np.nan
    best = np.nanmax(values) if np.isfinite(values).any() else np.nan
    percent = 100.0 * values / best
    name = "goodput" if known.has_efficiency else "throughput (noise unknown)"
    marks = []
    for config, width, label in ((tune.before, 1, "before"), (verdict, 3, "verdict")):
        if config.micro_batch_size in sizes and config.num_micro_batches in counts:
            row = counts.index(config.num_micro_batches)
            marks.append(Mark(row, sizes.index(config.micro_batch_size), width, label))
    return plots.heat_map(
        percent,
        title=f"step {tune.step}: {name}, % of the best over {tune.num_replicas} replicas",
        x_label="micro-batch, samples per replica",
        x_ticks=[str(size) for size in sizes],
        y_label="micro-batches per step",
        y_ticks=[str(count) for count in counts],
        marks=marks,
        matplotlib=has_matplotlib() if matplotlib is None else matplotlib,
    )


def goodput_curve(tune: TuneEnd, *, matplotlib: bool | None = None) -> np.ndarray | None:
    """Throughput and goodput over the global batch, with the verdict and the noise scale marked.

    At each global batch the better split into micro-batches counts. None without a fit.
    """
    known = _known(tune)
    if known is None:
        return None
    sizes = np.array(tune.limits.ladder(tune.num_replicas), float)
    counts = np.arange(1, tune.limits.max_micro_batches + 1, dtype=float)[:, None]
    batch = (sizes * counts * tune.num_replicas).ravel()
    throughput = np.asarray(known.model.throughput(known.placement, sizes, counts), float).ravel()
    smallest = tune.limits.smallest
    inside = (batch <= tune.limits.max) & (batch >= smallest) & np.isfinite(throughput)
    batch, throughput = batch[inside], throughput[inside]
    if batch.size == 0:
        return None
    # Keep the upper envelope: a batch that a smaller one beats in throughput is never chosen
    # for speed.
    order = np.lexsort((-throughput, batch))
    batch, first = np.unique(batch[order], return_index=True)
    throughput = throughput[order][first]
    front = throughput >= np.maximum.accumulate(throughput) * (1 - 1e-9)
    batch, throughput = batch[front], throughput[front]
    series = [Series(batch, throughput, "throughput, samples/s", BLUE, "line")]
    verticals = [(float(tune.verdict.config.global_batch_size), "verdict", GREEN)]
    if known.has_efficiency:
        useful = throughput * np.asarray(known.model.efficiency(batch), float)
        series.append(Series(batch, useful, "goodput, useful samples/s", RED, "line"))
        critical = float(noise_scale(known.model.grad, tune.limits.base))
        if batch[0] <= critical <= batch[-1]:
            verticals.append((critical, "noise scale", ORANGE))
    return plots.xy_plot(
        series,
        title=f"step {tune.step}: what a larger batch brings",
        x_label="global batch, samples",
        y_label="samples per second",
        verticals=verticals,
        matplotlib=has_matplotlib() if matplotlib is None else matplotlib,
    )


def fit_scatter(tune: TuneEnd, *, matplotlib: bool | None = None) -> np.ndarray | None:
    """Predicted against measured seconds, a dot a configuration; None without fit or timings.

    On the diagonal the model is exact; the dashed lines are one fit error away.
    """
    known = _known(tune)
    if known is None or tune.timings is None:
        return None
    rows = tune.timings
    micro = np.asarray(rows.micro_batch_size, float)
    placement = Placement(
        num_nodes=np.asarray(rows.num_nodes), num_replicas=np.asarray(rows.num_replicas)
    )
    perf = known.model.perf
    whole = np.asarray(step_time(perf, placement, micro, 1), float)
    alone = perf.compute_base + perf.compute_per_sample * micro
    series = []
    for name, measured, predicted, colour in (
        ("whole step", rows.step_s, whole, BLUE),
        ("micro-batch without sync", rows.accumulate_s, alone, ORANGE),
    ):
        measured = np.asarray(measured, float)
        used = (np.asarray(rows.weight) > 0) & (measured > 0) & (predicted > 0)
        if used.any():
            series.append(Series(measured[used], predicted[used], name, colour, "dots"))
    if not series:
        return None
    seen = np.concatenate([np.concatenate([s.x, s.y]) for s in series])
    ends = np.array([seen.min() / 1.2, seen.max() * 1.2])
    error = float(tune.fit.error) if tune.fit is not None else math.nan
    lines = [Series(ends, ends, "exact", (90, 94, 98), "line")]
    if math.isfinite(error):
        factor = math.exp(error)
        lines.append(Series(ends, ends * factor, f"fit error {error:.1%}", (150, 155, 160), "dash"))
        lines.append(Series(ends, ends / factor, "", (150, 155, 160), "dash"))
    return plots.xy_plot(
        [*lines, *series],
        title=f"step {tune.step}: the model against the clock",
        x_label="measured, s",
        y_label="predicted, s",
        matplotlib=has_matplotlib() if matplotlib is None else matplotlib,
    )


def _thinned(values: Sequence[int], keep: set[Any]) -> list[int]:
    """At most `_MAX_COLUMNS` values, ends and `keep` among them, the rest evenly spread."""
    values = sorted({*values} | {value for value in keep if value >= 1})
    if len(values) <= _MAX_COLUMNS:
        return values
    spread = np.linspace(0, len(values) - 1, _MAX_COLUMNS - len(keep)).round().astype(int)
    return sorted({values[i] for i in spread} | (keep & set(values)))
