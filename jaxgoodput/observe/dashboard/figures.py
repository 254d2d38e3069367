"""The dashboard's pictures: where goodput is highest, and how accurate the model is.

They use matplotlib's object interface, because pyplot keeps global state. matplotlib is an extra (`plots`):
import this file only when pictures are drawn.
"""

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from jaxgoodput.goodput.efficiency import GradGroups, efficiency, is_known, noise_scale
from jaxgoodput.goodput.perf import Placement, step_time
from jaxgoodput.goodput.sweep import Sweep
from jaxgoodput.observe.events import TuneEnd
from jaxgoodput.observe.race import Contender
from jaxgoodput.text import compact, seconds

# Colours that colour-blind readers can distinguish (Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#969ba0"
PALE = "#e4e6e9"
_GROUPS = (BLUE, ORANGE, GREEN, RED, "#cc79a7", "#56b4e9")

_MAX_COLUMNS = 14
_MAX_NAME = 34


def png(figure: Figure) -> bytes:
    """Return the picture as a PNG file of 720 x 440 pixels."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def goodput_surface(tune: TuneEnd) -> Figure | None:
    """Draw goodput by micro-batch size and count, in percent of the best; None without a fit.

    Cells outside the limits are grey. A thin frame marks the previous batch, a thick one the verdict. If the
    noise is unknown, throughput is drawn instead, and the title says so.
    """
    model = tune.model
    if model is None:
        return None
    is_worth = is_known(model.grad)
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
    worth = model.goodput if is_worth else model.throughput
    values = np.array(worth(tune.placement, micro, number), float)
    batch = micro * number * tune.num_replicas
    values[(batch > tune.limits.max) | (batch < tune.limits.smallest)] = np.nan
    best = np.nanmax(values) if np.isfinite(values).any() else np.nan
    name = "goodput" if is_worth else "throughput (noise unknown)"
    figure, axes = _figure(
        f"step {tune.step}: {name}, % of the best over {tune.num_replicas} replicas",
        "micro-batch, samples per replica",
        "micro-batches per step",
    )
    _cells(axes, 100.0 * values / best)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes], fontsize=8)
    axes.set_yticks(range(len(counts)), [str(count) for count in counts], fontsize=8)
    for config, width, label in ((tune.before, 1, "before"), (verdict, 3, "verdict")):
        if config.micro_batch_size in sizes and config.num_micro_batches in counts:
            column = sizes.index(config.micro_batch_size)
            corner = (column - 0.47, counts.index(config.num_micro_batches) - 0.47)
            frame = Rectangle(corner, 0.94, 0.94, fill=False, ec="#c81e1e", lw=width, label=label)
            axes.add_patch(frame)
    axes.add_patch(Rectangle((0, 0), 0, 0, fc=PALE, label="outside the limits"))
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def goodput_curve(tune: TuneEnd) -> Figure | None:
    """Draw throughput and goodput over the global batch, and mark the verdict and the noise scale.

    Each global batch is split into micro-batches in the best way. None without a fit.
    """
    model = tune.model
    if model is None:
        return None
    sizes = np.array(tune.limits.ladder(tune.num_replicas), float)
    counts = np.arange(1, tune.limits.max_micro_batches + 1, dtype=float)[:, None]
    batch = (sizes * counts * tune.num_replicas).ravel()
    throughput = np.asarray(model.throughput(tune.placement, sizes, counts), float).ravel()
    smallest = tune.limits.smallest
    inside = (batch <= tune.limits.max) & (batch >= smallest) & np.isfinite(throughput)
    batch, throughput = batch[inside], throughput[inside]
    if batch.size == 0:
        return None
    # Keep the upper envelope: if a smaller batch has a higher throughput, a batch is never chosen.
    order = np.lexsort((-throughput, batch))
    batch, first = np.unique(batch[order], return_index=True)
    throughput = throughput[order][first]
    front = throughput >= np.maximum.accumulate(throughput) * (1 - 1e-9)
    batch, throughput = batch[front], throughput[front]
    figure, axes = _figure(
        f"step {tune.step}: what a larger batch gains",
        "global batch, samples",
        "samples per second",
    )
    axes.plot(batch, throughput, color=BLUE, label="throughput, samples/s")
    if is_known(model.grad):
        useful = throughput * np.asarray(model.efficiency(batch), float)
        axes.plot(batch, useful, color=RED, label="goodput, useful samples/s")
    verdict = float(tune.verdict.config.global_batch_size)
    axes.axvline(verdict, color=GREEN, linestyle="--", label="verdict")
    if is_known(model.grad):
        critical = float(noise_scale(model.grad, tune.limits.base))
        if batch[0] <= critical <= batch[-1]:
            axes.axvline(critical, color=ORANGE, linestyle="--", label="noise scale")
    _logarithmic(axes)
    return figure


def fit_scatter(tune: TuneEnd) -> Figure | None:
    """Draw predicted over measured seconds, a dot for each configuration; None without fit or timings.

    On the diagonal the model is exact. The dashed lines are one fit error away.
    """
    model = tune.model
    if model is None or tune.fit is None or tune.timings is None:
        return None
    rows = tune.timings
    micro = np.asarray(rows.micro_batch_size, float)
    placement = Placement(
        num_nodes=np.asarray(rows.num_nodes), num_replicas=np.asarray(rows.num_replicas)
    )
    perf = model.perf
    figure, axes = _figure(
        f"step {tune.step}: the model against the clock", "measured, s", "predicted, s"
    )
    seen = []
    for name, measured, predicted, colour in (
        ("whole step", rows.step_s, step_time(perf, placement, micro, 1), BLUE),
        (
            "micro-batch without sync",
            rows.accumulate_s,
            perf.compute_base + perf.compute_per_sample * micro,
            ORANGE,
        ),
    ):
        x, y = np.asarray(measured, float), np.asarray(predicted, float)
        used = (np.asarray(rows.weight) > 0) & (x > 0) & (y > 0)
        if used.any():
            axes.plot(x[used], y[used], "o", color=colour, markeredgecolor="white", label=name)
            seen += [*x[used], *y[used]]
    if not seen:
        return None
    ends = np.array([min(seen) / 1.2, max(seen) * 1.2])
    axes.plot(ends, ends, color=GREY, label="exact", zorder=1)
    error = float(tune.fit.error)
    if math.isfinite(error):
        for factor, label in (
            (math.exp(error), f"fit error {error:.1%}"),
            (math.exp(-error), None),
        ):
            axes.plot(ends, ends * factor, "--", color=GREY, linewidth=1, label=label, zorder=1)
    _logarithmic(axes)
    return figure


def efficiency_by_group(tune: TuneEnd, names: Sequence[str]) -> Figure | None:
    """Draw the efficiency over the global batch, for each group of parameters and for all together.

    Up to six groups with at least a hundredth of the signal have a curve each; the others share one. `names`
    are the names of the groups in `tune.grad`. None if the noise is not known by group.
    """
    grad = tune.grad
    if not isinstance(grad, GradGroups) or not is_known(grad):
        return None
    sqr, var = np.asarray(grad.sqr, float), np.asarray(grad.var, float)
    if len(names) != len(sqr):
        raise ValueError(
            f"the noise has {len(sqr)} groups, but there are {len(names)} names. Pass FitStart.groups of the "
            "same run."
        )
    if not sqr.sum() > 0:
        return None
    base = tune.limits.base
    present = tune.verdict.config.global_batch_size
    batch = np.geomspace(min(tune.limits.smallest, present), max(tune.limits.max, present), 200)
    order = np.argsort(-sqr)[: (sqr > 0).sum()]
    num_apart = min(int((sqr >= 0.01 * sqr.sum()).sum()), len(_GROUPS))
    apart, rest = order[:num_apart], order[num_apart:]
    figure, axes = _figure(
        f"step {tune.step}: what a sample is worth to each group of parameters",
        "global batch, samples",
        "efficiency (1 at the base)",
    )

    def draw(members: np.ndarray, name: str, colour: str) -> None:
        part = GradGroups(sqr=sqr[members], var=var[members])
        share = sqr[members].sum() / sqr.sum()
        label = (
            f"{name}: {share:.0%} of the signal" if share >= 0.005 else f"{name}: hardly any signal"
        )
        axes.plot(batch, efficiency(part, batch / base), color=colour, label=label)

    for index, colour in zip(apart, _GROUPS, strict=False):
        draw(np.array([index]), _short(str(names[index])), colour)
    if rest.size:  # a single one is shown under its own name
        name = _short(str(names[rest[0]])) if rest.size == 1 else f"{rest.size} others"
        draw(rest, name, GREY)
    together = efficiency(grad, batch / base)
    axes.plot(batch, together, color="black", linewidth=2.5, label="all, by signal: decides")
    axes.axvline(present, color=GREY, linestyle="--", linewidth=1)
    worth = float(efficiency(grad, present / base))
    axes.plot([present], [worth], "o", color="black", label=f"batch {present}: {worth:.2g}")
    axes.set_ylim(bottom=0)
    _logarithmic(axes, y=False, legend=False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def sweep_avoided(sweep: Sweep, step: int, error: float = math.nan) -> Figure | None:
    """Draw the time that each fixed batch would have needed for the same progress, and this run's time.

    The band is one fit error wide, if that is known. None if there is no prediction yet.
    """
    if not sweep.seconds or not sweep.own_s > 0:
        return None
    batch, times = (np.array(list(x), float) for x in (sweep.seconds, sweep.seconds.values()))
    figure, axes = _figure(
        f"step {step}: a sweep over {len(batch)} fixed batches, {seconds(sweep.total_s)} by the model",
        "fixed global batch, samples",
        f"seconds for {compact(sweep.progress)} base steps",
    )
    axes.plot(batch, times, "o-", color=BLUE, label="fixed batch, steps alone, by this run's model")
    if math.isfinite(error):
        band = (times * math.exp(-error), times * math.exp(error))
        axes.fill_between(batch, *band, color=BLUE, alpha=0.15, label=f"fit error {error:.1%}")
    label = f"this run, all of its wall time: {seconds(sweep.own_s)}"
    axes.axhline(sweep.own_s, color=GREEN, linestyle="--", label=label)
    _logarithmic(axes)
    return figure


def race(tune: TuneEnd) -> Figure | None:
    """Draw what is known of each batch, a row each: loss decrease, step time, goodput. None if there is one.

    A filled mark is measured, a hollow one is a model's forecast or a guess. Bars are two standard errors.
    """
    if len(tune.race) < 2:
        return None
    batches = [one.config.global_batch_size for one in tune.race]
    chosen = tune.verdict.config.global_batch_size
    eventful = {
        batch
        for batch, one in zip(batches, tune.race, strict=True)
        if one.standing in ("in use", "on trial", "before the trial") or batch == chosen
    }
    kept = _thinned(batches, eventful)
    shown = [one for one in tune.race if one.config.global_batch_size in kept]
    figure = Figure(figsize=(7.2, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharey=True)
    figure.suptitle(
        f"step {tune.step}: the race between batch sizes (bold: the verdict)", fontsize=12
    )
    rows = np.arange(len(shown))
    names = [f"{one.config.global_batch_size}, {one.standing}" for one in shown]
    axes[0].set_yticks(rows, names, fontsize=8)
    axes[0].set_ylim(-0.6, len(shown) - 0.4)
    for label, one in zip(axes[0].get_yticklabels(), shown, strict=True):
        label.set_fontweight("bold" if one.config.global_batch_size == chosen else "normal")
    margins = [2 * one.gained_error for one in shown]
    columns = [[getattr(one, name) for one in shown] for name in ("gained", "step_s", "goodput")]
    axes[0].axvline(0, color=GREY, linewidth=1)
    axes[0].errorbar(columns[0], rows, xerr=margins, fmt="o", color=BLUE, capsize=3)
    for one, values in zip(axes[1:], columns[1:], strict=True):
        _dots(one, shown, values)
    titles = ("loss decrease\nper e-fold of samples", "step time, s", "goodput,\nuseful samples/s")
    for one, title, values in zip(axes, titles, columns, strict=True):
        one.set_title(title, fontsize=9)
        one.grid(True, color=PALE)
        one.set_axisbelow(True)
        one.tick_params(axis="x", labelsize=8)
        if not any(map(math.isfinite, values)):
            one.text(0.5, 0.5, "not known yet", transform=one.transAxes, ha="center", color=GREY)
    figure.legend(
        handles=[
            Line2D([], [], **_MEASURED, label="measured"),
            Line2D([], [], **_FORECAST, label="by the model, or guessed"),
        ],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    return figure


_MEASURED: dict[str, Any] = {"marker": "o", "linestyle": "", "color": BLUE}
_FORECAST: dict[str, Any] = _MEASURED | {"color": ORANGE, "markerfacecolor": "white"}


def _dots(axes: Axes, shown: Sequence[Contender], values: Sequence[float]) -> None:
    """Draw a value of each batch, in its row, on a logarithmic axis."""
    known = [v for v in values if math.isfinite(v) and v > 0]
    for row, (one, value) in enumerate(zip(shown, values, strict=True)):
        if math.isfinite(value):
            axes.plot([value], [row], **(_MEASURED if one.is_timed else _FORECAST))
    if known:
        axes.set_xscale("log")
        axes.set_xlim(min(known) / 1.3, max(known) * 1.3)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        axes.xaxis.set_minor_locator(NullLocator())


def _short(name: str) -> str:
    """Shorten a long name to its end, because the beginnings are alike."""
    return name if len(name) <= _MAX_NAME else f"...{name[3 - _MAX_NAME :]}"


def _figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=12)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _cells(axes: Axes, percent: np.ndarray) -> None:
    """Draw a heat map with its numbers, row 0 at the bottom; NaN is grey."""
    # Colours span the values that occur, because goodput is often flat near its best.
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=PALE)
    known = percent[np.isfinite(percent)]
    bright = known.min() + 0.6 * np.ptp(known) if known.size else math.inf
    axes.imshow(np.ma.masked_invalid(percent), cmap=colours, origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(percent):
        if math.isfinite(value):
            colour = "black" if value > bright else "white"
            where = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(column, row, f"{value:.0f}", color=colour, **where)


def _logarithmic(axes: Axes, *, y: bool = True, legend: bool = True) -> None:
    axes.set_xscale("log")
    if y:
        axes.set_yscale("log")
    scales = [(axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())]
    for axis, (low, high) in scales[: 2 if y else 1]:
        round_numbers = (1.0, 2.0, 5.0) if high < 1e4 * low else (1.0,)
        axis.set_major_locator(LogLocator(subs=round_numbers, numticks=15))
        axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        axis.set_minor_locator(NullLocator())
    axes.grid(True, color=PALE)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=9)


def _thinned(values: Sequence[int], keep: set[int]) -> list[int]:
    """Return about `_MAX_COLUMNS` values, evenly spread, including the ends and `keep`."""
    values = sorted({*values} | {value for value in keep if value >= 1})
    if len(values) <= _MAX_COLUMNS:
        return values
    spread = np.linspace(0, len(values) - 1, max(_MAX_COLUMNS - len(keep), 2)).round().astype(int)
    return sorted({values[i] for i in spread} | (keep & set(values)))
