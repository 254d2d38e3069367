"""The story of a run as plain text, from its journal: `jaxgoodput report WORKDIR`."""

import io
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from rich import box
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table

from jaxgoodput._serial import decode
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import BUCKETS, PRODUCTIVE
from jaxgoodput.text import compact, seconds

_SPARKS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_UNLIMITED = 10_000
_MOST_VERDICTS = 12
_MOST_LINES = 8


@dataclass(frozen=True, kw_only=True)
class _Record(journal.Part):
    """A line of the journal; those of other kinds only show that the run lived."""

    event: str
    step: int
    wall: float
    restart: int
    num_merged: int = 1


@dataclass(frozen=True, kw_only=True)
class _Config(journal.Part):
    micro_batch_size: int
    num_micro_batches: int
    num_replicas: int
    strategy: str = ""

    @property
    def size(self) -> int:
        return self.micro_batch_size * self.num_micro_batches * self.num_replicas

    @property
    def identity(self) -> str:
        shape = f"{self.micro_batch_size} x {self.num_replicas} x {self.num_micro_batches}"
        return f"{shape} {self.strategy}".strip()


@dataclass(frozen=True, kw_only=True)
class _Limits(journal.Part):
    base: int
    max: int
    micro: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Settings(journal.Part):
    policy: str | Mapping[str, int] = "-"
    rule: str | None = None
    base_steps: float = math.nan


@dataclass(frozen=True, kw_only=True)
class _Start(_Record):
    progress: float
    limits: _Limits
    settings: _Settings
    device_kind: str
    num_devices: int
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class _Window(_Record):
    progress: float
    samples: int
    config: _Config
    num_steps: int
    seconds: float
    metrics: Mapping[str, float]
    measured_step_s: float
    predicted_step_s: float
    goodput_measured: float
    throughput: float
    efficiency: float
    noise_scale: float
    noise_is_lower_bound: bool = False
    gain: float
    skipped_steps: int
    loss_gained: float = math.nan
    loss_gained_error: float = math.nan
    loss_gained_expected: float = math.nan


@dataclass(frozen=True, kw_only=True)
class _Verdict(journal.Part):
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Fit(journal.Part):
    error: float
    unidentified: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Tune(_Record):
    verdict: _Verdict
    fit: _Fit | None
    switched: bool


@dataclass(frozen=True, kw_only=True)
class _Eval(_Record):
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class _Save(_Record):
    seconds: float
    error: str | None


@dataclass(frozen=True, kw_only=True)
class _Stop(_Record):
    signal: str


@dataclass(frozen=True, kw_only=True)
class _End(_Record):
    progress: float
    samples: int | None = None
    seconds: float
    reason: str
    buckets_s: Mapping[str, float] = field(default_factory=dict)


_KINDS: Mapping[str, type[_Record]] = {
    "FitStart": _Start,
    "Window": _Window,
    "TuneEnd": _Tune,
    "EvalEnd": _Eval,
    "Checkpoint": _Save,
    "Preempt": _Stop,
    "FitEnd": _End,
}
R = TypeVar("R", bound=_Record)


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
    if not journal.segments(path):
        raise FileNotFoundError(
            f"{folder} holds no {journal.FILE_NAME}, so no jaxgoodput run has started there. "
            "Pass the --workdir that the training was started with."
        )
    records, torn = _read(path)
    starts = _of(records, _Start)
    if not starts:
        raise ValueError(
            f"{path} holds {len(records)} record(s) but no start of a run, and {len(torn)} line(s) that "
            "cannot be read. Was it cut or edited? The run itself can still be continued from its "
            "checkpoints."
        )
    gone = journal.undone([vars(record) for record in records])
    kept = [record for record, is_undone in zip(records, gone, strict=True) if not is_undone]
    windows, ends = _of(kept, _Window), _of(kept, _End)
    parts = [
        _header(folder, starts, windows, ends),
        _time(ends, windows, kept),
        _batches(windows),
        _evidence(windows),
        _verdicts(_of(kept, _Tune)),
        _curves(windows, _of(kept, _Eval)),
        _incidents(records, windows, torn),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    # What a program or a damaged line put in between moves no cursor and ends no line.
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def _read(path: pathlib.Path) -> tuple[list[_Record], list[str]]:
    """The records of a journal, and where lines are that hold none."""
    records: list[_Record] = []
    torn: list[str] = []
    for where, record in journal.lines(path, lambda where, _: torn.append(where)):
        try:
            records.append(decode(record, _KINDS.get(record["event"], _Record), where))
        except ValueError:
            torn.append(where)
    return records, torn


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


def _of(records: Iterable[_Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    """The mean of (value, weight) pairs, unknown values left out."""
    known = [(v, w) for v, w in pairs if math.isfinite(v) and w > 0]
    total = sum(w for _, w in known)
    return sum(v * w for v, w in known) / total if total else math.nan


def _section(title: str, body: str) -> str:
    return f"{title}\n{'=' * len(title)}\n{body}"


def _header(
    folder: pathlib.Path,
    starts: Sequence[_Start],
    windows: Sequence[_Window],
    ends: Sequence[_End],
) -> str:
    start, first = starts[-1], starts[0]
    limits, settings = start.limits, start.settings
    ended = ends[-1] if ends and ends[-1].wall >= start.wall else None
    last = ended or (windows[-1] if windows else start)
    samples = None if isinstance(last, _Start) else last.samples
    length = settings.base_steps
    rows = [
        ("workdir", str(folder)),
        ("devices", f"{start.num_devices} x {start.device_kind}, "
         f"{start.num_processes} process(es)"),
        ("policy", f"{settings.policy}, learning-rate rule {settings.rule or 'auto'}"),
        ("limits", f"global batch base {limits.base}, at most {limits.max}; "
         f"micro-batch {limits.micro[0]} to {limits.micro[1]}"),
        ("progress", f"step {last.step}, {compact(last.progress)} base steps"
         + (f" of {compact(length)}" if length > 0 else "")
         + (f", {compact(samples)} samples" if samples is not None else "")),
        ("outcome", ended.reason if ended else "no end recorded: still running, or killed"),
        ("runs", f"{len(starts)} ({start.restart} restart(s)), first seen to last "
         f"{seconds(last.wall - first.wall)}"),
    ]  # fmt: skip
    return _section("Run", _pairs(rows))


def _time(ends: Sequence[_End], windows: Sequence[_Window], kept: Sequence[_Record]) -> str:
    if ends and ends[-1].buckets_s:
        spent = dict(ends[-1].buckets_s)
        if PRODUCTIVE not in spent:
            spent[PRODUCTIVE] = max(ends[-1].seconds - sum(spent.values()), 0.0)
        note = ""
    else:
        # A run that has not ended: what its records add up to.
        spent = {
            PRODUCTIVE: sum(w.seconds for w in windows),
            "evaluation": sum(e.seconds for e in _of(kept, _Eval)),
            "checkpoint_save": sum(c.seconds for c in _of(kept, _Save)),
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


def _batches(windows: Sequence[_Window]) -> str:
    if not windows:
        return ""
    groups: dict[tuple[int, str], list[tuple[_Window, int]]] = {}
    before: _Window | None = None
    for window in windows:
        key = (window.config.size, window.config.identity)
        samples = key[0] * window.num_steps
        if before is not None and window.samples >= before.samples:
            samples = window.samples - before.samples
        groups.setdefault(key, []).append((window, samples))
        before = window
    total_s = sum(window.seconds for window in windows)
    rows = []
    for (size, identity), members in sorted(groups.items()):
        spent_s = sum(w.seconds for w, _ in members)

        def mean(name: str, members: Sequence[tuple[_Window, int]] = members) -> float:
            return _mean((getattr(w, name), w.num_steps) for w, _ in members)

        both = [m for m in members if math.isfinite(m[0].predicted_step_s * m[0].measured_step_s)]
        measured_s = mean("measured_step_s", both)
        error = mean("predicted_step_s", both) / measured_s - 1 if measured_s else math.nan
        rows.append(
            (
                str(size),
                identity,
                compact(sum(w.num_steps for w, _ in members)),
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


def _evidence(windows: Sequence[_Window]) -> str:
    """What the loss says of every stretch of one batch that was long enough, beside the model."""
    last: list[_Window] = []
    for window in windows:
        if math.isnan(window.loss_gained):
            continue
        if last and last[-1].config.size == window.config.size:
            last.pop()
        last.append(window)
    rows = [
        (
            str(window.config.size),
            str(window.step),
            compact(window.loss_gained),
            compact(2 * window.loss_gained_error),
            compact(window.loss_gained_expected),
        )
        for window in last
    ]
    if not rows:
        return ""
    body = _table(("batch", "until step", "loss lost", "+-", "model expected"), rows)
    note = "\n(per e-fold of samples; two standard errors; expected from the batch before)"
    return _section("What the loss says", body + note)


def _verdicts(tunes: Sequence[_Tune]) -> str:
    switches = [tune for tune in tunes if tune.switched]
    lines = []
    shown = switches
    if len(switches) > _MOST_VERDICTS:
        half = _MOST_VERDICTS // 2
        shown = switches[:half] + switches[-half:]
    for number, tune in enumerate(shown):
        if len(shown) < len(switches) and number == _MOST_VERDICTS // 2:
            lines.append(f"  ... {len(switches) - len(shown)} more ...")
        lines.append(f"step {tune.step}: {tune.verdict.reason}")
    if tunes and not tunes[-1].switched:
        lines.append(f"last, step {tunes[-1].step}: {tunes[-1].verdict.reason}")
    if not lines:
        return ""
    fits = [tune.fit for tune in tunes if tune.fit is not None]
    summary = f"{sum(t.num_merged for t in tunes)} verdicts, {len(switches)} changes"
    if fits:
        summary += f"; error of the last fit {fits[-1].error:.1%}"
        if fits[-1].unidentified:
            summary += f"; not identified by the data: {', '.join(fits[-1].unidentified)}"
    return _section("Verdicts", "\n".join([summary, *lines]))


def _curves(windows: Sequence[_Window], evals: Sequence[_Eval]) -> str:
    is_bound = bool(windows) and windows[-1].noise_is_lower_bound
    curves: list[tuple[str, list[float], bool]] = [
        ("global batch", [float(w.config.size) for w in windows], True),
        (
            "noise scale >=" if is_bound else "noise scale",
            [w.noise_scale for w in windows],
            True,
        ),
        ("goodput", [w.goodput_measured for w in windows], False),
        ("lr gain", [w.gain for w in windows], False),
    ]
    if any("loss" in w.metrics for w in windows):
        losses = [w.metrics.get("loss", math.nan) for w in windows]
        curves.append(("loss", losses, False))
    names = dict.fromkeys(name for e in evals for name in e.metrics)
    for name in names:
        results = [e.metrics.get(name, math.nan) for e in evals]
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


def _incidents(records: Sequence[_Record], windows: Sequence[_Window], torn: Sequence[str]) -> str:
    lines = []
    for number, record in enumerate(records):
        if isinstance(record, _Start) and number:
            before = records[number - 1]
            lost = max(
                (r.step for r in records[:number] if r.restart < record.restart),
                default=record.step,
            )
            undone = max(lost - record.step, 0)
            lines.append(
                f"restart {record.restart}: resumed at step {record.step}, "
                f"{undone} step(s) undone, "
                f"{seconds(record.wall - before.wall)} after the last record"
            )
        elif isinstance(record, _Stop):
            lines.append(f"step {record.step}: {record.signal}")
        elif isinstance(record, _Save) and record.error:
            lines.append(f"step {record.step}: checkpoint failed: {record.error}")
    saves = [save.seconds for save in _of(records, _Save) if not save.error]
    if saves:
        lines.append(
            f"{len(saves)} checkpoint(s), the loop stood still for {seconds(sum(saves))} in all, "
            f"{seconds(max(saves))} at most"
        )
    skipped = windows[-1].skipped_steps if windows else 0
    lines.append(f"{skipped} update(s) skipped because a gradient was not finite")
    if torn:
        more = f" and {len(torn) - _MOST_LINES} more" if len(torn) > _MOST_LINES else ""
        lines.append(
            f"journal line(s) left out, which cannot be read: {', '.join(torn[:_MOST_LINES])}{more} (a "
            "run was killed while writing, the disk was full, or the file was changed)"
        )
    return _section("Restarts, checkpoints, skipped steps", "\n".join(lines))
