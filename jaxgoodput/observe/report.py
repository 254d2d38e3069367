"""The story of a run from its journal, as text of 80 columns or as numbers; several side by side.

`jaxgoodput report WORKDIR`, with `--json`, or of several workdirs.
"""

import io
import math
import os
import pathlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table

from jaxgoodput._serial import decode
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import BUCKETS, PRODUCTIVE
from jaxgoodput.observe.events import REGROUPED
from jaxgoodput.text import compact, count, seconds

_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(_SPARKS + "▏▎▍▌▋▊▉─", "_.:-=+*#" + "|||####-")
_WIDTH = 60  # of a curve
_COLUMNS = 80
_MOST_VERDICTS = 12
_MOST_LINES = 8


@dataclass(frozen=True, kw_only=True)
class _Record(journal.RecordFields):
    """A line of the journal; those of other kinds only show that the run lived."""

    event: str
    step: int
    wall: float
    restart: int
    num_merged: int = 1


@dataclass(frozen=True, kw_only=True)
class _Config(journal.RecordFields):
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
class _Limits(journal.RecordFields):
    base: int
    max: int
    micro: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Settings(journal.RecordFields):
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
class _Verdict(journal.RecordFields):
    reason: str


@dataclass(frozen=True, kw_only=True)
class _Fit(journal.RecordFields):
    error: float
    unidentified: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    num_rows: int = 0


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

    @property
    def goes_on(self) -> bool:
        return self.reason.startswith(REGROUPED)


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

# What a step's time is made of, by the parameters of the fit.
_COSTS = {
    "compute_base": "a micro-batch's fixed time",
    "compute_per_sample": "the time of a sample",
    "intra_base": "averaging within a host",
    "intra_per_replica": "averaging within a host",
    "inter_base": "averaging between hosts",
    "inter_per_replica": "averaging between hosts",
    "overlap": "what runs beside each other",
    "update_s": "the optimizer",
}


@dataclass(frozen=True, kw_only=True)
class _Story:
    """What a journal says, without what a restart has undone (`records` has that, too)."""

    folder: pathlib.Path
    records: Sequence[_Record]
    kept: Sequence[_Record]
    starts: Sequence[_Start]
    torn: Sequence[str]

    @property
    def windows(self) -> list[_Window]:
        return _of(self.kept, _Window)

    @property
    def num_restarts(self) -> int:
        """Of the job, or of its loop; where processes came or went, and the others went on, there is none."""
        went_on = sum(end.goes_on for end in _of(self.records, _End))
        return max(self.starts[-1].restart - went_on, 0)

    @property
    def ended(self) -> _End | None:
        """The end of the newest run; None: it is still running, or was killed."""
        ends = _of(self.kept, _End)
        return ends[-1] if ends and ends[-1].wall >= self.starts[-1].wall else None


def report(workdir: str | os.PathLike[str], *, ascii: bool = False) -> str:
    """What happened under `workdir`: where the time went, which batches were used, and why.

    Lines have at most 80 columns; `ascii`: of nothing but ASCII.

    Raises:
      FileNotFoundError: there is no such folder, or no run has written its journal there.
      ValueError: the journal holds no run.
    """
    story = _story(workdir)
    parts = [
        _header(story),
        _time(story),
        _batches(story.windows),
        _evidence(story.windows),
        _verdicts(_of(story.kept, _Tune)),
        _curves(story.windows, _of(story.kept, _Eval)),
        _incidents(story.records, story.windows, story.torn),
    ]
    return _printable("\n\n".join(part for part in parts if part) + "\n", ascii)


def numbers(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """What `report` rests on, as JSON values; None: not known. Raises what `report` raises.

    Seconds are wall time, `trained_s` that of all runs after their start-ups; batches are in samples,
    throughputs in samples a second.
    """
    story = _story(workdir)
    start, last, windows = story.starts[-1], _last(story), story.windows
    spent, is_estimated = _spent(story)
    tunes = _of(story.kept, _Tune)
    evals: dict[str, float] = {}
    for one in _of(story.kept, _Eval):
        evals |= one.metrics
    losses = [w.metrics["loss"] for w in windows if "loss" in w.metrics]
    found = {
        "workdir": str(story.folder),
        "device_kind": start.device_kind,
        "num_devices": start.num_devices,
        "num_processes": start.num_processes,
        "policy": start.settings.policy,
        "base_batch": start.limits.base,
        "max_batch": start.limits.max,
        "step": last.step,
        "progress": last.progress,
        "base_steps": start.settings.base_steps,
        "samples": None if isinstance(last, _Start) else last.samples,
        "outcome": story.ended.reason if story.ended else None,
        "restarts": story.num_restarts,
        "wall_s": sum(spent.values()),
        "trained_s": _trained_s(story),
        "time_s": spent,
        "time_is_estimated": is_estimated,
        "batches": [vars(row) for row in _rows(windows)],
        "changes": [{"step": t.step, "reason": t.verdict.reason} for t in tunes if t.switched],
        "last_verdict": tunes[-1].verdict.reason if tunes else None,
        "goodput": _mean((w.goodput_measured, w.num_steps) for w in windows),
        "last_batch": windows[-1].config.size if windows else None,
        "last_noise_scale": windows[-1].noise_scale if windows else None,
        "last_noise_scale_is_lower_bound": windows[-1].noise_is_lower_bound if windows else None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "last_eval": evals,
        "skipped_steps": windows[-1].skipped_steps if windows else 0,
        "unreadable_lines": len(story.torn),
    }
    return _as_json(found)


def run_names(workdirs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """What runs are called side by side: their folders' names; where some are alike, from where they part."""
    folders = [os.path.abspath(workdir) for workdir in workdirs]
    names = [os.path.basename(folder) for folder in folders]
    if len(set(names)) == len(names):
        return names
    parts = [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]
    return [name if part == os.curdir else part for name, part in zip(names, parts, strict=True)]


def compare(workdirs: Sequence[str | os.PathLike[str]], *, ascii: bool = False) -> str:
    """Several runs side by side. Raises what `report` raises."""
    runs = [numbers(workdir) for workdir in workdirs]

    def number(value: float | int | None) -> str:
        return "-" if value is None else compact(float(value), digits=4)

    def productive(run: dict[str, Any]) -> str:
        total = sum(run["time_s"].values())
        return f"{run['time_s'].get(PRODUCTIVE, 0.0) / total:.1%}" if total else "-"

    metrics = dict.fromkeys(name for run in runs for name in run["last_eval"])
    rows = [
        ("outcome", [run["outcome"] or "no end" for run in runs]),
        ("devices", [f"{run['num_devices']} x {run['device_kind']}" for run in runs]),
        ("policy", [str(run["policy"]) for run in runs]),
        ("base batch", [str(run["base_batch"]) for run in runs]),
        ("last batch", [number(run["last_batch"]) for run in runs]),
        ("changes", [str(len(run["changes"])) for run in runs]),
        ("steps", [number(run["step"]) for run in runs]),
        ("samples", [number(run["samples"]) for run in runs]),
        ("base steps", [number(run["progress"]) for run in runs]),
        ("wall time", [seconds(run["wall_s"]) for run in runs]),
        ("after start-up", [seconds(run["trained_s"]) for run in runs]),
        ("productive", [productive(run) for run in runs]),
        ("goodput", [number(run["goodput"]) for run in runs]),
        ("loss, first", [number(run["first_loss"]) for run in runs]),
        ("loss, last", [number(run["last_loss"]) for run in runs]),
        *((f"eval/{n}", [number(run["last_eval"].get(n)) for run in runs]) for n in metrics),
        ("restarts", [str(run["restarts"]) for run in runs]),
    ]
    names = run_names(workdirs)
    body = _table(("", *names), [(name, *cells) for name, cells in rows])
    return _printable(body + "\n", ascii)


def _story(workdir: str | os.PathLike[str]) -> _Story:
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
    return _Story(folder=folder, records=records, kept=kept, starts=starts, torn=torn)


def _last(story: _Story) -> "_End | _Window | _Start":
    windows = story.windows
    return story.ended or (windows[-1] if windows else story.starts[-1])


def _as_json(value: Any) -> Any:
    """With None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _printable(text: str, ascii: bool) -> str:
    if ascii:
        text = text.translate(_ASCII).encode("ascii", "replace").decode()
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
    return _plain(grid, width=10_000)  # a path is never cut


def _plain(table: Table, width: int = _COLUMNS) -> str:
    """Without colours, in 80 columns wherever it goes: a file has no width."""
    console = Console(
        file=io.StringIO(),
        width=width,
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


def _wrapped(lines: Iterable[str]) -> str:
    """Lines of any length in 80 columns."""
    wrapper = textwrap.TextWrapper(
        width=_COLUMNS,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )
    return "\n".join(map(wrapper.fill, lines))


def _section(title: str, body: str) -> str:
    return f"{title}\n{'=' * len(title)}\n{body}"


def _header(story: _Story) -> str:
    start, last = story.starts[-1], _last(story)
    limits, settings = start.limits, start.settings
    ended = story.ended
    samples = None if isinstance(last, _Start) else last.samples
    length = settings.base_steps
    rows = [
        ("workdir", str(story.folder)),
        ("devices", f"{start.num_devices} x {start.device_kind}, "
         f"{count(start.num_processes, 'process')}"),
        ("policy", f"{settings.policy}, learning-rate rule {settings.rule or 'chosen by the optimizer'}"),
        ("limits", f"global batch base {limits.base}, at most {limits.max}; "
         f"micro-batch {limits.micro[0]} to {limits.micro[1]}"),
        ("progress", f"step {last.step}, {compact(last.progress)} base steps"
         + (f" of {compact(length)}" if length > 0 else "")
         + (f", {compact(samples)} samples" if samples is not None else "")),
        ("outcome", ended.reason if ended else "no end recorded: still running, or killed"),
        ("runs", f"{story.num_restarts + 1} ({count(story.num_restarts, 'restart')}), "
         f"{seconds(_trained_s(story))} after start-up"),
    ]  # fmt: skip
    return _section("Run", _pairs(rows))


def _spent(story: _Story) -> tuple[dict[str, float], bool]:
    """Seconds by bucket, and whether they are an estimate."""
    ends = [end for end in _of(story.kept, _End) if end.buckets_s]
    spent: dict[str, float] = {}
    since = story.kept
    if ends:  # of this run and those that it went on from
        spent = dict(ends[-1].buckets_s)
        if PRODUCTIVE not in spent:
            spent[PRODUCTIVE] = max(ends[-1].seconds - sum(spent.values()), 0.0)
        if story.ended is ends[-1]:
            return spent, False
        since = [record for record in story.kept if record.wall > ends[-1].wall]
    # A run that has not ended: what its records add up to.
    later = {
        "evaluation": float(sum(e.seconds for e in _of(since, _Eval))),
        "checkpoint_save": float(sum(c.seconds for c in _of(since, _Save))),
    }
    trained_s = float(sum(w.seconds for w in _of(since, _Window)))
    later[PRODUCTIVE] = max(trained_s - sum(later.values()), 0.0)
    return {n: spent.get(n, 0.0) + later.get(n, 0.0) for n in (PRODUCTIVE, *(spent | later))}, True


def _trained_s(story: _Story) -> float:
    """From the first to the last record of each run: without start-ups, and the time between runs."""
    starts = [story.records.index(start) for start in story.starts]
    lasts = [*(story.records[i - 1] for i in starts[1:]), story.records[-1]]
    return sum(
        max(last.wall - start.wall, 0.0) for start, last in zip(story.starts, lasts, strict=True)
    )


def _time(story: _Story) -> str:
    spent, is_estimated = _spent(story)
    total = sum(spent.values())
    if not total > 0:
        return ""
    note = ""
    if is_estimated:
        note = "\n(no end recorded yet: estimated from windows, evaluations and checkpoints)"
    order = [PRODUCTIVE, *BUCKETS, *[n for n in spent if n not in BUCKETS and n != PRODUCTIVE]]
    rows = []
    for name in order:
        value = spent.get(name, 0.0)
        if value > 0 or name == PRODUCTIVE:
            share = value / total
            bar = Bar(1.0, 0.0, max(share, 1 / 240), width=20)  # at least its thinnest line
            rows.append((name, seconds(value), f"{share:.1%}", bar))
    rows.append(("total", seconds(total), "100.0%", ""))
    return _section("Where the time went", _table(("bucket", "time", "share", ""), rows) + note)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What was done with one batch."""

    batch: int
    shape: str
    steps: int
    samples: int
    time_s: float
    step_s: float
    predicted_step_s: float
    predicted_error: float
    throughput: float
    efficiency: float
    goodput: float


def _rows(windows: Sequence[_Window]) -> list[_Row]:
    groups: dict[tuple[int, str], list[tuple[_Window, int]]] = {}
    before: _Window | None = None
    for window in windows:
        key = (window.config.size, window.config.identity)
        samples = key[0] * window.num_steps
        if before is not None and window.samples >= before.samples:
            samples = window.samples - before.samples
        groups.setdefault(key, []).append((window, samples))
        before = window
    rows = []
    for (size, identity), members in sorted(groups.items()):

        def mean(name: str, members: Sequence[tuple[_Window, int]] = members) -> float:
            return _mean((getattr(w, name), w.num_steps) for w, _ in members)

        # Where the model had said something, if it ever had: a row's numbers are of the same steps.
        both = [m for m in members if math.isfinite(m[0].predicted_step_s * m[0].measured_step_s)]
        step_s = mean("measured_step_s", both or members)
        predicted_s, efficiency = mean("predicted_step_s", both), mean("efficiency")
        throughput = size / step_s if step_s else math.nan
        rows.append(
            _Row(
                batch=size,
                shape=identity,
                steps=sum(w.num_steps for w, _ in members),
                samples=sum(samples for _, samples in members),
                time_s=sum(w.seconds for w, _ in members),
                step_s=step_s,
                predicted_step_s=predicted_s,
                predicted_error=predicted_s / step_s - 1 if step_s else math.nan,
                throughput=throughput,
                efficiency=efficiency,
                goodput=throughput * efficiency,
            )
        )
    return rows


def _batches(windows: Sequence[_Window]) -> str:
    rows = _rows(windows)
    if not rows:
        return ""
    total_s = sum(row.time_s for row in rows)
    used = [
        (
            str(row.batch),
            row.shape,
            compact(row.steps),
            compact(row.samples),
            f"{row.time_s / total_s:.1%}" if total_s else "-",
        )
        for row in rows
    ]
    gave = [
        (
            str(row.batch),
            seconds(row.step_s),
            seconds(row.predicted_step_s),
            "-" if math.isnan(row.predicted_error) else f"{row.predicted_error:+.1%}",
            compact(row.throughput),
            compact(row.efficiency),
            compact(row.goodput),
        )
        for row in rows
    ]
    first = ("batch", "micro x replicas x accum", "steps", "samples", "time")
    second = ("batch", "step", "model says", "error", "samples/s", "efficiency", "goodput")
    body = f"{_table(first, used)}\n\n{_table(second, gave)}"
    return _section(
        "Batch sizes",
        body + "\n(step: with what it waited for its batch; goodput: useful samples a second)",
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
    total = sum(t.num_merged for t in tunes)
    summary = f"{count(total, 'verdict')}, {count(len(switches), 'change')}"
    if fits:
        fit = fits[-1]
        summary += (
            f"; error of the last fit {fit.error:.1%} on {count(fit.num_rows, 'configuration')}"
        )
        unknown = dict.fromkeys(_COSTS.get(name, name) for name in fit.unidentified)
        if unknown:
            summary += f"; what it cannot tell apart yet: {', '.join(unknown)}"
    return _section("Verdicts", _wrapped([summary, *lines]))


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
            if low == high:  # a line that is flat says nothing more
                rows.append((name, low if len(known) == 1 else f"{low} throughout"))
                continue
            facts = f"{first} -> {last}  (min {low}, max {high})"
            rows.append((name, f"{facts}\n{sparkline(values, log=log)}"))
    return _section("Over time", _pairs(rows)) if rows else ""


def _incidents(records: Sequence[_Record], windows: Sequence[_Window], torn: Sequence[str]) -> str:
    lines = []
    went_on = 0
    for number, record in enumerate(records):
        before = records[number - 1] if number else record
        if isinstance(record, _Start) and isinstance(before, _End) and before.goes_on:
            went_on += 1
            lines.append(
                f"step {record.step}: {before.reason}; went on with "
                f"{count(record.num_processes, 'process')} after {seconds(record.wall - before.wall)}"
            )
        elif isinstance(record, _Start) and number:
            lost = max(
                (r.step for r in records[:number] if r.restart < record.restart),
                default=record.step,
            )
            undone = max(lost - record.step, 0)
            lines.append(
                f"restart {record.restart - went_on}: resumed at step {record.step}, "
                f"{count(undone, 'step')} undone, "
                f"{seconds(record.wall - before.wall)} after the last record"
            )
        elif isinstance(record, _Stop):
            lines.append(f"step {record.step}: {record.signal}")
        elif isinstance(record, _Save) and record.error:
            lines.append(f"step {record.step}: checkpoint failed: {record.error}")
    saves = [save.seconds for save in _of(records, _Save) if not save.error]
    if saves:
        lines.append(
            f"{count(len(saves), 'checkpoint')}, the loop stood still for {seconds(sum(saves))} in all, "
            f"{seconds(max(saves))} at most"
        )
    skipped = windows[-1].skipped_steps if windows else 0
    lines.append(f"{count(skipped, 'update')} skipped: a loss, gradient or update was not finite")
    if torn:
        more = f" and {len(torn) - _MOST_LINES} more" if len(torn) > _MOST_LINES else ""
        lines.append(
            f"journal lines left out, which cannot be read: {', '.join(torn[:_MOST_LINES])}{more} (a "
            "run was killed while writing, the disk was full, or the file was changed)"
        )
    return _section("Restarts, checkpoints, skipped steps", _wrapped(lines))
