"""Draws simulations: which job had which device when, and how soon jobs were done.

The functions return the bytes of a PNG, and need matplotlib (extra `plots`).
"""

import importlib.util
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxgoodput.cluster.simulate.records import JobRecord, Result
from jaxgoodput.specs import ClusterSpec

# Okabe and Ito's colours, which colour-blind people can distinguish.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A800")
_REST = "#8C8C8C"
_TEXT, _FAINT = "#202124", "#D9DCE0"
_WAITING, _RUNNING = "#E8A6A1", "#5F6B7A"
_OTHERS = "others"


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def gantt_png(result: Result, cluster: ClusterSpec, *, title: str = "") -> bytes:
    """Return a Gantt chart: a row per device, a bar per job on it, coloured by application; above, the queue.

    A white line separates the bars of different jobs.
    """
    figure = _figure(11.0, 6.2)
    queue, rows = figure.subplots(2, 1, sharex=True, height_ratios=(1, 4))
    names = _applications(result.jobs)
    colours = _colours(names)
    first = {}
    count = 0
    for node in cluster.nodes:
        first[node.name] = count
        count += node.num_devices
    end_h = max((job.finish_s for job in result.jobs), default=3600.0) / 3600
    for application, colour in colours.items():
        boxes = [
            (interval.start_s / 3600, interval.end_s / 3600, first[node], local)
            for job in result.jobs
            if names[job.id] == application
            for interval in job.intervals
            for node, local in interval.devices.items()
        ]
        _bars(rows, boxes, colour, application)
    _kinds(rows, cluster, first, end_h)
    rows.set_ylim(count, 0)
    rows.set_xlim(0, end_h)
    rows.set_ylabel("devices")
    rows.set_xlabel("time, h")
    rows.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.11),
        ncols=min(len(colours), 8),
        frameon=False,
        handlelength=1.0,
        columnspacing=1.4,
    )
    _queue(queue, result.jobs)
    queue.set_title(title or f"Which device worked for which application: {result.policy}")
    return _png(figure)


def completion_png(results: Sequence[Result], *, title: str = "") -> bytes:
    """Return a plot of the share of jobs done within a time since their submission, a line per policy.

    The time axis is logarithmic; dots mark averages.
    """
    figure = _figure(8.0, 4.8)
    axes = figure.subplots()
    styles = ("-", "--", "-.", ":")
    for i, result in enumerate(results):
        jct_h = np.sort([job.jct_s for job in result.jobs]) / 3600
        share = np.arange(1, len(jct_h) + 1) / len(jct_h)
        colour = _COLOURS[i % len(_COLOURS)]
        style = styles[i // len(_COLOURS) % len(styles)]
        mean_h = float(jct_h.mean())
        axes.step(
            np.concatenate([jct_h[:1], jct_h]),
            np.concatenate([[0.0], share]),
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1.8,
            label=f"{result.policy}  (average {mean_h:.3g} h)",
        )
        reached = float(np.searchsorted(jct_h, mean_h, side="right")) / len(jct_h)
        axes.plot([mean_h], [reached], "o", color=colour, markersize=6)
    axes.set_xscale("log")
    _hour_ticks(axes)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("job completion time (dots: averages)")
    axes.set_ylabel("jobs done")
    axes.grid(True, which="major", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor=_FAINT)
    axes.set_title(title or "How soon jobs are done")
    return _png(figure)


def _hour_ticks(axes: Any) -> None:
    """Set ticks on the time axis whose labels are usual times, such as 10 min."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    words = {"1 s": 1, "10 s": 10, "1 min": 60, "10 min": 600, "1 h": 3600, "10 h": 36000}
    words |= {"100 h": 360000, "1000 h": 3600000}
    low, high = axes.get_xlim()
    inside = {word: s / 3600 for word, s in words.items() if low <= s / 3600 <= high}
    axes.xaxis.set_minor_formatter(NullFormatter())
    if len(inside) > 1:
        axes.xaxis.set_major_locator(FixedLocator(list(inside.values())))
        axes.xaxis.set_major_formatter(
            lambda value, _: min(inside, key=lambda w: abs(inside[w] - value))
        )
    else:
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g} h")


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _png(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(12)
        axes.title.set_color(_TEXT)
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": "jaxgoodput"})
    return file.getvalue()


def _applications(jobs: Sequence[JobRecord]) -> dict[str, str]:
    """Return the application (without its settings) that each job is coloured by; rare ones are "others"."""
    names = {job.id: job.application.partition(" (")[0] for job in jobs}
    common = [name for name, _ in Counter(names.values()).most_common()]
    kept = set(common if len(common) <= len(_COLOURS) + 1 else common[: len(_COLOURS)])
    return {job: name if name in kept else _OTHERS for job, name in names.items()}


def _colours(names: Mapping[str, str]) -> dict[str, str]:
    """Return colours by application, in alphabetical order, so that all policies use the same colours."""
    found = sorted(set(names.values()) - {_OTHERS})
    colours = dict(zip(found, (*_COLOURS, _REST), strict=False))
    return colours | ({_OTHERS: _REST} if _OTHERS in names.values() else {})


def _bars(axes: Any, boxes: Sequence[tuple], colour: str, label: str) -> None:
    from matplotlib.collections import PolyCollection

    corners = []
    for start, end, row, local in boxes:
        for low, high in _runs(local):
            top, bottom = row + low + 0.04, row + high - 0.04
            corners.append([(start, top), (end, top), (end, bottom), (start, bottom)])
    axes.add_collection(
        PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=0.35, label=label)
    )


def _runs(local: Sequence[int]) -> list[tuple[int, int]]:
    """Join neighbouring device indices to ranges [low, high), so that a job on a whole node is one bar."""
    runs: list[tuple[int, int]] = []
    for index in sorted(local):
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs


def _kinds(axes: Any, cluster: ClusterSpec, first: Mapping[str, int], end_h: float) -> None:
    """Draw a line at the border of each node, and name each kind of device beside its rows."""
    spans: dict[str, tuple[int, int]] = {}
    for node in cluster.nodes:
        low, high = first[node.name], first[node.name] + node.num_devices
        axes.axhline(low, color=_FAINT, linewidth=0.6, zorder=0)
        begin = spans.get(node.kind, (low, high))[0]
        spans[node.kind] = begin, high
    axes.set_yticks([(low + high) / 2 for low, high in spans.values()])
    axes.set_yticklabels([f"{high - low}\n{kind}" for kind, (low, high) in spans.items()])
    axes.tick_params(axis="y", length=0)
    for low, _ in list(spans.values())[1:]:
        axes.axhline(low, color=_TEXT, linewidth=1.0)


def _queue(axes: Any, jobs: Sequence[JobRecord]) -> None:
    """Draw the number of unfinished jobs over time, and the number of them that are running."""
    inside = [(job.submit_s, 1) for job in jobs] + [(job.finish_s, -1) for job in jobs]
    stays = [(i.start_s, i.end_s) for job in jobs for i in job.intervals]
    running = [(start, 1) for start, _ in stays] + [(end, -1) for _, end in stays]
    for events, colour, label in ((inside, _WAITING, "waiting"), (running, _RUNNING, "running")):
        times, counts = _count(events)
        axes.fill_between(times, counts, step="post", color=colour, linewidth=0, label=label)
    axes.set_ylabel("jobs")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper right", frameon=False, ncols=2, handlelength=1.0, borderaxespad=0.0)


def _count(events: Sequence[tuple[float, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return times in hours, and the count from each time on; simultaneous events are one change."""
    changes: Counter[float] = Counter()
    for at, change in events:
        changes[at] += change
    times = np.array([0.0, *sorted(changes)])
    counts = np.cumsum([0, *(changes[at] for at in times[1:].tolist())])
    return times / 3600, counts
