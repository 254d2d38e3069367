"""Two kinds of plot, heat map and log-log lines, each drawn by matplotlib or by our own canvas.

Both take the same arguments and give uint8 RGB [height, width, 3].
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgoodput.observe.raster import BLACK, GREY, PALE, WHITE, Canvas, Colour, text_width
from jaxgoodput.text import compact

WIDTH, HEIGHT = 720, 440

# Dark blue over green to yellow, lightness rising evenly: also readable in grey.
_RAMP = np.array(
    [(68, 1, 84), (65, 68, 135), (42, 120, 142), (34, 168, 132), (122, 209, 81), (253, 231, 37)],
    float,
)


@dataclass(frozen=True)
class Series:
    """Points of one meaning; `kind`: line, dash or dots; no label keeps it out of the legend."""

    x: np.ndarray
    y: np.ndarray
    label: str
    colour: Colour
    kind: str


@dataclass(frozen=True)
class Mark:
    """A frame around one cell of a heat map."""

    row: int
    column: int
    width: int
    label: str


def heat_map(
    percent: np.ndarray,
    *,
    title: str,
    x_label: str,
    x_ticks: Sequence[str],
    y_label: str,
    y_ticks: Sequence[str],
    marks: Sequence[Mark] = (),
    matplotlib: bool,
) -> np.ndarray:
    """Cells [rows, columns] of 0..100 with their numbers; NaN is grey; row 0 is at the bottom."""
    draw = _heat_map_matplotlib if matplotlib else _heat_map_raster
    return draw(percent, title, x_label, x_ticks, y_label, y_ticks, marks)


def xy_plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    verticals: Sequence[tuple[float, str, Colour]] = (),
    matplotlib: bool,
) -> np.ndarray:
    """Positive x against positive y on logarithmic axes; `verticals` are (x, label, colour)."""
    draw = _xy_matplotlib if matplotlib else _xy_raster
    return draw(series, title, x_label, y_label, verticals)


def ramp(values: np.ndarray) -> np.ndarray:
    """Colours uint8 [..., 3] for values in 0..1; NaN becomes pale grey."""
    place = np.clip(np.nan_to_num(values), 0.0, 1.0) * (len(_RAMP) - 1)
    low = np.minimum(place.astype(int), len(_RAMP) - 2)
    share = (place - low)[..., None]
    colours = np.round(_RAMP[low] * (1 - share) + _RAMP[low + 1] * share).astype(np.uint8)
    colours[np.isnan(values)] = PALE
    return colours


def _stretched(percent: np.ndarray) -> np.ndarray:
    """Cells on 0..1 so that the whole ramp is used: a surface is often flat near its best."""
    if not np.isfinite(percent).any():
        return percent
    low, high = np.nanmin(percent), np.nanmax(percent)
    return (percent - low) / max(high - low, 1e-9)


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """At most `most` round numbers between low and high: 1, 2, 5 a decade, or decades only.

    >>> log_ticks(30.0, 900.0)
    [50.0, 100.0, 200.0, 500.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{step}e{d}") for d in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most:
            return inside
    return inside[:: math.ceil(len(inside) / most)]


def _range(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    values = np.concatenate([np.asarray(part, float) for part in parts])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size == 0:
        return 0.1, 10.0
    low, high = float(values.min()), float(values.max())
    pad = max((high / low) ** 0.06, 1.05)
    return low / pad, high * pad


# Our own canvas.


def _heat_map_raster(percent, title, x_label, x_ticks, y_label, y_ticks, marks) -> np.ndarray:
    canvas = Canvas(WIDTH, HEIGHT)
    left, right, top, bottom = 70, WIDTH - 20, 60, HEIGHT - 62
    rows, columns = percent.shape
    cell_w, cell_h = (right - left) / columns, (bottom - top) / rows
    shade = _stretched(percent)
    colours = ramp(shade)
    canvas.text(
        WIDTH / 2, 24, title, scale=2 if text_width(title, 2) < WIDTH - 20 else 1, align="centre"
    )
    for row in range(rows):
        y0 = bottom - (row + 1) * cell_h
        canvas.text(left - 8, y0 + cell_h / 2, y_ticks[row], align="right")
        for column in range(columns):
            x0 = left + column * cell_w
            red, green, blue = (int(channel) for channel in colours[row, column])
            canvas.rectangle(x0, y0, x0 + cell_w - 1, y0 + cell_h - 1, (red, green, blue))
            value = percent[row, column]
            if math.isfinite(value) and cell_w >= 26 and cell_h >= 12:
                colour = BLACK if shade[row, column] > 0.6 else WHITE
                canvas.text(
                    x0 + cell_w / 2, y0 + cell_h / 2, f"{value:.0f}", colour, align="centre"
                )
    for mark in marks:
        x0, y0 = left + mark.column * cell_w, bottom - (mark.row + 1) * cell_h
        canvas.frame(x0 - 1, y0 - 1, x0 + cell_w, y0 + cell_h, (200, 30, 30), mark.width)
    for column in range(columns):
        canvas.text(left + (column + 0.5) * cell_w, bottom + 10, x_ticks[column], align="centre")
    canvas.text((left + right) / 2, bottom + 28, x_label, scale=2, align="centre")
    canvas.text(18, (top + bottom) / 2, y_label, scale=2, align="centre", upward=True)
    key = "thin frame: before   thick frame: verdict   grey: outside the limits"
    canvas.text((left + right) / 2, HEIGHT - 10, key, GREY, align="centre")
    return canvas.pixels


def _xy_raster(series, title, x_label, y_label, verticals) -> np.ndarray:
    canvas = Canvas(WIDTH, HEIGHT)
    left, right, top, bottom = 84, WIDTH - 20, 46, HEIGHT - 58
    x_low, x_high = _range([s.x for s in series] + [np.array([v[0] for v in verticals])])
    y_low, y_high = _range([s.y for s in series])

    def across(x: Any) -> Any:
        return left + (right - left) * np.log(x / x_low) / math.log(x_high / x_low)

    def down(y: Any) -> Any:
        return bottom - (bottom - top) * np.log(y / y_low) / math.log(y_high / y_low)

    for tick in log_ticks(x_low, x_high):
        canvas.line(across(tick), top, across(tick), bottom, PALE)
        canvas.text(across(tick), bottom + 11, compact(tick), align="centre")
    for tick in log_ticks(y_low, y_high):
        canvas.line(left, down(tick), right, down(tick), PALE)
        canvas.text(left - 6, down(tick), compact(tick), align="right")
    canvas.frame(left, top, right, bottom, GREY)
    for x, _, colour in verticals:
        canvas.line(across(x), top, across(x), bottom, colour, width=2, dash=6)
    for one in series:
        if one.kind == "dots":
            for x, y in zip(across(one.x), down(one.y), strict=True):
                canvas.disc(x, y, 5.0, WHITE)
                canvas.disc(x, y, 4.0, one.colour)
            continue
        xs, ys = across(one.x), down(one.y)
        for i in range(len(xs) - 1):
            dash, width = (6, 1) if one.kind == "dash" else (0, 2)
            canvas.line(xs[i], ys[i], xs[i + 1], ys[i + 1], one.colour, width=width, dash=dash)
    legend = [(s.label, s.colour, s.kind) for s in series if s.label]
    legend += [(label, colour, "dash") for _, label, colour in verticals]
    _legend_raster(canvas, legend, left, top)
    canvas.text(WIDTH / 2, 22, title, scale=2, align="centre")
    canvas.text((left + right) / 2, bottom + 32, x_label, scale=2, align="centre")
    canvas.text(18, (top + bottom) / 2, y_label, scale=2, align="centre", upward=True)
    return canvas.pixels


def _legend_raster(canvas: Canvas, entries: Sequence[Any], left: int, top: int) -> None:
    width = max((text_width(label) for label, _, _ in entries), default=0) + 48
    x, y = left + 10, top + 10
    canvas.rectangle(x, y, x + width, y + 14 * len(entries) + 6, WHITE)
    canvas.frame(x, y, x + width, y + 14 * len(entries) + 6, PALE)
    for number, (label, colour, kind) in enumerate(entries):
        middle = y + 10 + 14 * number
        if kind == "dots":
            canvas.disc(x + 18, middle, 4.0, colour)
        else:
            dash = 4 if kind == "dash" else 0
            canvas.line(x + 6, middle, x + 30, middle, colour, width=2, dash=dash)
        canvas.text(x + 38, middle, label)


# Matplotlib, through its object interface: pyplot would keep global state.


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=12)
    return figure, axes


def _pixels(figure: Any) -> np.ndarray:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=100)
    width, height = (round(size * 100) for size in figure.get_size_inches())
    rgba = np.frombuffer(buffer.getvalue(), np.uint8).reshape(height, width, 4)
    return np.ascontiguousarray(rgba[..., :3])


def _unit(colour: Colour) -> tuple[float, ...]:
    return tuple(channel / 255 for channel in colour)


def _heat_map_matplotlib(percent, title, x_label, x_ticks, y_label, y_ticks, marks) -> np.ndarray:
    from matplotlib.patches import Rectangle

    figure, axes = _figure(title)
    shade = _stretched(percent)
    axes.imshow(ramp(shade), origin="lower", aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(percent):
        if math.isfinite(value):
            colour = "black" if shade[row, column] > 0.6 else "white"
            axes.text(
                column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8
            )
    for mark in marks:
        corner = (mark.column - 0.47, mark.row - 0.47)
        frame = Rectangle(
            corner, 0.94, 0.94, fill=False, ec="#c81e1e", lw=mark.width, label=mark.label
        )
        axes.add_patch(frame)
    axes.set_xticks(range(len(x_ticks)), x_ticks, fontsize=8)
    axes.set_yticks(range(len(y_ticks)), y_ticks, fontsize=8)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if marks:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return _pixels(figure)


def _xy_matplotlib(series, title, x_label, y_label, verticals) -> np.ndarray:
    figure, axes = _figure(title)
    for one in series:
        style: dict[str, Any] = {"color": _unit(one.colour), "label": one.label or None}
        if one.kind == "dots":
            style |= {"linestyle": "", "marker": "o", "markeredgecolor": "white"}
        elif one.kind == "dash":
            style |= {"linestyle": "--", "linewidth": 1}
        axes.plot(one.x, one.y, **style)
    for x, label, colour in verticals:
        axes.axvline(x, color=_unit(colour), linestyle="--", linewidth=1.5, label=label)
    x_range = _range([s.x for s in series] + [np.array([v[0] for v in verticals])])
    y_range = _range([s.y for s in series])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*x_range)
    axes.set_ylim(*y_range)
    x_ticks, y_ticks = log_ticks(*x_range), log_ticks(*y_range)
    axes.set_xticks(x_ticks, [compact(tick) for tick in x_ticks])
    axes.set_yticks(y_ticks, [compact(tick) for tick in y_ticks])
    axes.minorticks_off()
    axes.grid(True, color=_unit(PALE))
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(fontsize=9, framealpha=0.9)
    return _pixels(figure)
