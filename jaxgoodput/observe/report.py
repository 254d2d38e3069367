"""The story of a run as plain text, from its journal: `jaxgoodput report WORKDIR`."""

import io
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table

from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import BUCKETS, PRODUCTIVE
from jaxgoodput.text import compact, seconds

Record = Mapping[str, Any]

_SPARKS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_UNLIMITED = 10_000
_MOST_VERDICTS = 12


def report(workdir: str | os.PathLike[str]) -> str:
    """What happened under `workdir`: where the time went, which batches were used, and why.

    Raises:
      FileNotFoundError: there is no such folder, or no run has written its journal there.
      ValueError: the journal holds no run.
    """
    folder = pathlib.Path(workdir)
    path = folder / journal.FILE_NAME
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}. Pass the --workdir that the training was started with."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {journal.FILE_NAME}, so no jaxgoodput run has started there. "
            "Pass the --workdir that the training was started with."
        )
    torn: list[int] = []
    records = journal.read(path, keep_undone=True, on_torn=lambda number, _: torn.append(number))
    starts = _of(records, "FitStart")
    if not starts:
        raise ValueError(
            f"{path} holds {len(records)} record(s) but no start of a run. Was it cut or edited? "
            "The run itself can still be continued from its checkpoints."
        )
    kept = [record for record in records if not record.get("undone")]
    windows = _of(kept, "Window")
    parts = [
        _header(folder, starts, windows, _of(kept, "FitEnd")),
        _time(_of(kept, "FitEnd"), windows, kept),
        _batches(windows),
        _evidence(windows),
        _verdicts(_of(kept, "TuneEnd")),
        _curves(windows, _of(kept, "EvalEnd")),
        _incidents(records, windows, torn),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sparkline(values: Sequence[float], *, width: int = _WIDTH, log: bool = False) -> str:
    """A curve in one line of text, oldest first; gaps where unknown.

    >>> sparkline([1.0, 2.0, 3.0, 4.0])
    '▁▃▆█'
    """
    points = [math.log(v) if log and v > 0 else (math.nan if log else v) for v in values]
    if not points:
        return ""
    known = [part[np.isfinite(part)] for part in np.array_split(points, min(len(points), width))]
    means = [float(part.mean()) for part in known if part.size]
    low, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    places = iter((v - low) / span if span else 0.5 for v in means)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[math.floor(next(places) * top + 0.5)] if p.size else " " for p in known)


def _table(header: Sequence[str], rows: Iterable[Sequence[RenderableType]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return _plain(table)


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what there is to say about them, side by side."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*row)
    return _plain(grid)


def _plain(table: Table) -> str:
    """As wide as it needs to be and without colours, wherever it goes: a file has no width."""
    console = Console(
        file=io.StringIO(),
        width=_UNLIMITED,
        color_system=None,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as written:
        console.print(table)
    return "\n".join(line.rstrip() for line in written.get().splitlines())


def _of(records: Iterable[Record], event: str) -> list[Record]:
    return [record for record in records if record["event"] == event]


def _number(value: Any) -> float:
    """What the journal wrote as null was NaN."""
    return math.nan if value is None else float(value)


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    """The mean of (value, weight) pairs, unknown values left out."""
    known = [(v, w) for v, w in pairs if math.isfinite(v) and w > 0]
    total = sum(w for _, w in known)
    return sum(v * w for v, w in known) / total if total else math.nan


def _global(config: Record) -> int:
    return config["micro_batch_size"] * config["num_micro_batches"] * config["num_replicas"]


def _identity(config: Record) -> str:
    shape = (
        f"{config['micro_batch_size']} x {config['num_replicas']} x {config['num_micro_batches']}"
    )
    return " ".join([shape, config.get("strategy", "")]).strip()


def _section(title: str, body: str) -> str:
    return f"{title}\n{'=' * len(title)}\n{body}"


def _header(
    folder: pathlib.Path,
    starts: Sequence[Record],
    windows: Sequence[Record],
    ends: Sequence[Record],
) -> str:
    start, first = starts[-1], starts[0]
    limits, settings = start["limits"], start["settings"]
    last: Record = windows[-1] if windows else start
    ended = ends[-1] if ends and ends[-1]["wall"] >= start["wall"] else None
    if ended is None:
        outcome = "no end recorded: still running, or killed"
    else:
        outcome = ended["reason"]
        last = ended
    length = settings.get("base_steps")
    progress = compact(_number(last["progress"]))
    rows = [
        ("workdir", str(folder)),
        ("devices", f"{start['num_devices']} x {start['device_kind']}, "
         f"{start['num_processes']} process(es)"),
        ("policy", f"{settings.get('policy', '-')}, "
         f"learning-rate rule {settings.get('rule') or 'auto'}"),
        ("limits", f"global batch base {limits['base']}, at most {limits['max']}; "
         f"micro-batch {limits['micro'][0]} to {limits['micro'][1]}"),
        ("progress", f"step {last['step']}, {progress} base steps"
         + (f" of {compact(length)}" if length else "")
         + (f", {compact(last['samples'])} samples" if "samples" in last else "")),
        ("outcome", outcome),
        ("runs", f"{len(starts)} ({starts[-1]['restart']} restart(s)), first seen to last "
         f"{seconds(last['wall'] - first['wall'])}"),
    ]  # fmt: skip
    return _section("Run", _pairs(rows))


def _time(ends: Sequence[Record], windows: Sequence[Record], kept: Sequence[Record]) -> str:
    if ends and ends[-1].get("buckets_s"):
        spent = {name: _number(value) for name, value in ends[-1]["buckets_s"].items()}
        if PRODUCTIVE not in spent:
            spent[PRODUCTIVE] = max(_number(ends[-1]["seconds"]) - sum(spent.values()), 0.0)
        note = ""
    else:
        # A run that has not ended: what its records add up to.
        spent = {
            PRODUCTIVE: sum(_number(w["seconds"]) for w in windows),
            "evaluation": sum(_number(e["seconds"]) for e in _of(kept, "EvalEnd")),
            "checkpoint_save": sum(_number(c["seconds"]) for c in _of(kept, "Checkpoint")),
        }
        lost_s = spent["evaluation"] + spent["checkpoint_save"]
        spent[PRODUCTIVE] = max(spent[PRODUCTIVE] - lost_s, 0.0)
        note = "\n(no end recorded yet: estimated from windows, evaluations and checkpoints)"
    total = sum(spent.values())
    if not total > 0:
        return ""
    order = [PRODUCTIVE, *BUCKETS, *[n for n in spent if n not in BUCKETS and n != PRODUCTIVE]]
    rows = []
    for name in order:
        value = spent.get(name, 0.0)
        if value > 0 or name == PRODUCTIVE:
            share = value / total
            bar = Bar(1.0, 0.0, max(share, 1 / 240), width=30)  # at least its thinnest line
            rows.append((name, seconds(value), f"{share:.1%}", bar))
    rows.append(("total", seconds(total), "100.0%", ""))
    return _section("Where the time went", _table(("bucket", "time", "share", ""), rows) + note)


def _batches(windows: Sequence[Record]) -> str:
    if not windows:
        return ""
    groups: dict[tuple[int, str], list[tuple[Record, int]]] = {}
    before: Record | None = None
    for window in windows:
        key = (_global(window["config"]), _identity(window["config"]))
        samples = key[0] * window["num_steps"]
        if before is not None and window["samples"] >= before["samples"]:
            samples = window["samples"] - before["samples"]
        groups.setdefault(key, []).append((window, samples))
        before = window
    total_s = sum(_number(window["seconds"]) for window in windows)
    rows = []
    for (size, identity), members in sorted(groups.items()):
        spent_s = sum(_number(w["seconds"]) for w, _ in members)

        def mean(name: str, members: Sequence[tuple[Record, int]] = members) -> float:
            return _mean((_number(w[name]), w["num_steps"]) for w, _ in members)

        both = [
            (_number(w["predicted_step_s"]) / _number(w["measured_step_s"]) - 1, w["num_steps"])
            for w, _ in members
            if w["predicted_step_s"] is not None and w["measured_step_s"]
        ]
        error = _mean(both)
        rows.append(
            (
                str(size),
                identity,
                compact(sum(w["num_steps"] for w, _ in members)),
                compact(sum(samples for _, samples in members)),
                f"{spent_s / total_s:.1%}" if total_s else "-",
                seconds(mean("measured_step_s")),
                seconds(mean("predicted_step_s")),
                "-" if math.isnan(error) else f"{error:+.1%}",
                compact(mean("throughput")),
                compact(mean("efficiency")),
                compact(mean("goodput_measured")),
            )
        )
    header = (
        "batch", "micro x replicas x accum", "steps", "samples", "time",
        "step", "model says", "error", "samples/s", "efficiency", "goodput",
    )  # fmt: skip
    body = _table(header, rows)
    return _section(
        "Batch sizes", body + "\n(goodput: useful samples per second; batch in samples)"
    )


def _evidence(windows: Sequence[Record]) -> str:
    """What the loss says of every stretch of one batch that was long enough, beside the model."""
    last: list[Record] = []
    for window in windows:
        if window.get("loss_gained") is None:
            continue
        if last and _global(last[-1]["config"]) == _global(window["config"]):
            last.pop()
        last.append(window)
    rows = [
        (
            str(_global(window["config"])),
            str(window["step"]),
            compact(_number(window["loss_gained"])),
            compact(2 * _number(window["loss_gained_error"])),
            compact(_number(window["loss_gained_expected"])),
        )
        for window in last
    ]
    if not rows:
        return ""
    body = _table(("batch", "until step", "loss lost", "+-", "model expected"), rows)
    note = "\n(per e-fold of samples; two standard errors; expected from the batch before)"
    return _section("What the loss says", body + note)


def _verdicts(tunes: Sequence[Record]) -> str:
    switches = [tune for tune in tunes if tune["switched"]]
    lines = []
    shown = switches
    if len(switches) > _MOST_VERDICTS:
        half = _MOST_VERDICTS // 2
        shown = switches[:half] + switches[-half:]
    for number, tune in enumerate(shown):
        if len(shown) < len(switches) and number == _MOST_VERDICTS // 2:
            lines.append(f"  ... {len(switches) - len(shown)} more ...")
        lines.append(f"step {tune['step']}: {tune['verdict']['reason']}")
    if tunes and not tunes[-1]["switched"]:
        lines.append(f"last, step {tunes[-1]['step']}: {tunes[-1]['verdict']['reason']}")
    if not lines:
        return ""
    errors = [_number(t["fit"]["error"]) for t in tunes if t["fit"] is not None]
    summary = f"{len(tunes)} verdicts, {len(switches)} changes"
    if errors:
        summary += f"; error of the last fit {errors[-1]:.1%}"
        unidentified = [t for t in tunes if t["fit"] is not None][-1]["fit"].get("unidentified")
        if unidentified:
            summary += f"; not identified by the data: {', '.join(unidentified)}"
    return _section("Verdicts", "\n".join([summary, *lines]))


def _curves(windows: Sequence[Record], evals: Sequence[Record]) -> str:
    is_bound = bool(windows) and windows[-1].get("noise_is_lower_bound", False)
    curves: list[tuple[str, list[float], bool]] = [
        ("global batch", [float(_global(w["config"])) for w in windows], True),
        (
            "noise scale >=" if is_bound else "noise scale",
            [_number(w["noise_scale"]) for w in windows],
            True,
        ),
        ("goodput", [_number(w["goodput_measured"]) for w in windows], False),
        ("lr gain", [_number(w["gain"]) for w in windows], False),
    ]
    if any("loss" in w["metrics"] for w in windows):
        losses = [_number(w["metrics"].get("loss")) for w in windows]
        curves.append(("loss", losses, False))
    names = dict.fromkeys(name for e in evals for name in e["metrics"])
    for name in names:
        results = [_number(e["metrics"].get(name)) for e in evals]
        curves.append((f"eval/{name}", results, False))
    rows = []
    for name, values, log in curves:
        known = [v for v in values if math.isfinite(v)]
        if known:
            # Four digits: an accuracy of 0.9987 is not 1.
            first, last, low, high = (
                compact(v, digits=4) for v in (known[0], known[-1], min(known), max(known))
            )
            facts = f"{first} -> {last}  (min {low}, max {high})"
            rows.append((name, f"{facts}\n{sparkline(values, log=log)}"))
    return _section("Over time", _pairs(rows)) if rows else ""


def _incidents(records: Sequence[Record], windows: Sequence[Record], torn: Sequence[int]) -> str:
    lines = []
    for number, record in enumerate(records):
        event = record["event"]
        if event == "FitStart" and number:
            before = records[number - 1]
            lost = max(
                (r.get("step", 0) for r in records[:number] if r["restart"] < record["restart"]),
                default=record["step"],
            )
            undone = max(lost - record["step"], 0)
            lines.append(
                f"restart {record['restart']}: resumed at step {record['step']}, "
                f"{undone} step(s) undone, "
                f"{seconds(record['wall'] - before['wall'])} after the last record"
            )
        elif event == "Preempt":
            lines.append(f"step {record['step']}: {record['signal']}")
        elif event == "Checkpoint" and record["error"]:
            lines.append(f"step {record['step']}: checkpoint failed: {record['error']}")
    saves = [_number(c["seconds"]) for c in _of(records, "Checkpoint") if not c["error"]]
    if saves:
        lines.append(
            f"{len(saves)} checkpoint(s), the loop stood still for {seconds(sum(saves))} in all, "
            f"{seconds(max(saves))} at most"
        )
    skipped = windows[-1]["skipped_steps"] if windows else 0
    lines.append(f"{skipped} update(s) skipped because a gradient was not finite")
    if torn:
        numbers = ", ".join(map(str, torn))
        lines.append(
            f"unfinished journal line(s) left out: {numbers} (a run was killed while writing)"
        )
    return _section("Restarts, checkpoints, skipped steps", "\n".join(lines))
