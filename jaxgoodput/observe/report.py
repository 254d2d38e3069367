"""The report of a run, from its journal: text of 80 columns, JSON values, or several runs side by side.

`jaxgoodput report WORKDIR`, with `--json`, or of several workdirs.
"""

import functools
import io
import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.table import Table

from jaxgoodput._fields.serial import encode
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import BUCKETS, PRODUCTIVE
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    FitEnd,
    FitStart,
    HostJudged,
    Preempt,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.journal import Record, of_kind
from jaxgoodput.observe.race import COLUMNS, NOTE, balance, cells
from jaxgoodput.text import compact, count, seconds
from jaxgoodput.workdir.places import workdir_of

_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(_SPARKS + "▏▎▍▌▋▊▉─", "_.:-=+*#" + "|||####-")
_WIDTH = 60  # of a curve
_COLUMNS = 80
_MOST_VERDICTS = 12
_MOST_LINES = 8


# The parts of a step's time, by the parameters of the fit.
_COSTS = {
    "compute_base": "the fixed time of a micro-batch",
    "compute_per_sample": "the time of a sample",
    "intra_base": "averaging within a host",
    "intra_per_replica": "averaging within a host",
    "inter_base": "averaging between hosts",
    "inter_per_replica": "averaging between hosts",
    "overlap": "the overlap of computing and averaging",
    "update_s": "the optimizer",
}


@dataclass(frozen=True, kw_only=True)
class _Story:
    """What a journal says about a run."""

    workdir: str
    records: Sequence[Record]
    """All records, also the ones that a restart has undone."""
    damages: Sequence[str]
    """Where the journal is damaged, and how."""

    @functools.cached_property
    def kept(self) -> list[Record]:
        """The records that no restart has undone."""
        return [record for record in self.records if not record.undone]

    @functools.cached_property
    def windows(self) -> list[Window]:
        return of_kind(self.kept, Window)

    @functools.cached_property
    def tunes(self) -> list[TuneEnd]:
        return of_kind(self.kept, TuneEnd)

    @functools.cached_property
    def evals(self) -> list[EvalEnd]:
        return of_kind(self.kept, EvalEnd)

    @functools.cached_property
    def starts(self) -> list[FitStart]:
        return of_kind(self.records, FitStart)

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the job; changes of processes that the others survived do not count."""
        num_continued = sum(end.goes_on for end in of_kind(self.records, FitEnd))
        return max(self.starts[-1].restart - num_continued, 0)

    @property
    def ended(self) -> FitEnd | None:
        """The end of the newest run; None if it still runs or was killed."""
        for record in reversed(self.kept):
            if isinstance(record.event, FitEnd):
                return record.event
            if isinstance(record.event, FitStart):
                break
        return None

    @property
    def last(self) -> FitEnd | Window | FitStart:
        """The newest event that tells how far the run is: its end, its last window, or its start."""
        return self.ended or (self.windows[-1] if self.windows else self.starts[-1])

    @property
    def samples(self) -> int | None:
        """Samples so far; None if that is not known yet."""
        return None if isinstance(self.last, FitStart) else self.last.samples


def report(workdir: str | os.PathLike[str], *, ascii: bool = False) -> str:
    """Return a report of the run in `workdir`: where the time went, which batches were used, and why.

    Lines have at most 80 columns. With `ascii`, the text contains only ASCII characters.

    Raises:
      FileNotFoundError: there is no such folder, or no run has written its journal there.
      ValueError: the journal contains no run.
    """
    story = _story(workdir)
    parts = [
        _header(story),
        _time(story),
        _batches(story.windows),
        _race(story),
        _evidence(story.windows),
        _verdicts(story),
        _curves(story.windows, story.evals),
        _incidents(story),
    ]
    return _printable("\n\n".join(part for part in parts if part) + "\n", ascii)


def numbers(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the numbers behind `report` as JSON values; None for what is not known.

    Seconds are wall time; `trained_s` is the time of all runs without their start-ups. Batches are in
    samples, throughputs in samples per second. Raises what `report` raises.
    """
    story = _story(workdir)
    start, last, windows = story.starts[-1], story.last, story.windows
    spent, is_estimated = _spent(story)
    evals: dict[str, float] = {}
    for one in story.evals:
        evals |= one.metrics
    losses = [w.metrics["loss"] for w in windows if "loss" in w.metrics]
    found = {
        "workdir": story.workdir,
        "device_kind": start.device_kind,
        "num_devices": start.num_devices,
        "num_processes": start.num_processes,
        "policy": start.known_settings.policy,
        "base_batch": start.limits.base,
        "max_batch": start.limits.max,
        "step": last.step,
        "progress": last.progress,
        "base_steps": start.known_settings.base_steps,
        "samples": story.samples,
        "outcome": story.ended.reason if story.ended else None,
        "restarts": story.num_restarts,
        "wall_s": sum(spent.values()),
        "trained_s": _trained_s(story),
        "time_s": spent,
        "time_is_estimated": is_estimated,
        "batches": [vars(row) for row in _rows(windows)],
        "changes": [
            {"step": t.step, "reason": t.verdict.reason} for t in story.tunes if t.switched
        ],
        "race": story.tunes[-1].race if story.tunes else (),
        "account": windows[-1].account if windows else None,
        "last_verdict": story.tunes[-1].verdict.reason if story.tunes else None,
        "goodput": _mean((w.goodput_measured, w.num_steps) for w in windows),
        "last_batch": windows[-1].config.global_batch_size if windows else None,
        "last_noise_scale": windows[-1].noise_scale if windows else None,
        "last_noise_scale_is_guess": windows[-1].noise_is_guess if windows else None,
        "last_noise_interval": vars(windows[-1].noise_interval) if windows else None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "last_eval": evals,
        "skipped_steps": windows[-1].skipped_steps if windows else 0,
        "journal_damages": len(story.damages),
    }
    return encode(found)


def run_names(workdirs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return a short name for each run: its folder's name, or more of its path if names would be equal."""
    # A bucket's URL, too, is taken as a path: TensorBoard takes no name with a colon.
    folders = [os.path.abspath(os.fspath(workdir).replace("://", "/")) for workdir in workdirs]
    names = [os.path.basename(folder) for folder in folders]
    if len(set(names)) == len(names):
        return names
    parts = [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]
    return [name if part == os.curdir else part for name, part in zip(names, parts, strict=True)]


def compare(workdirs: Sequence[str | os.PathLike[str]], *, ascii: bool = False) -> str:
    """Return a table of several runs side by side. Raises what `report` raises."""
    runs = [numbers(workdir) for workdir in workdirs]

    def number(value: float | int | None) -> str:
        return "-" if value is None else compact(float(value), digits=4)

    def productive(run: dict[str, Any]) -> str:
        total = sum(run["time_s"].values())
        return f"{run['time_s'].get(PRODUCTIVE, 0.0) / total:.1%}" if total else "-"

    rows = {
        "outcome": lambda run: run["outcome"] or "no end",
        "devices": lambda run: f"{run['num_devices']} x {run['device_kind']}",
        "policy": lambda run: str(run["policy"]),
        "base batch": lambda run: str(run["base_batch"]),
        "last batch": lambda run: number(run["last_batch"]),
        "changes": lambda run: str(len(run["changes"])),
        "steps": lambda run: number(run["step"]),
        "samples": lambda run: number(run["samples"]),
        "base steps": lambda run: number(run["progress"]),
        "wall time": lambda run: seconds(run["wall_s"]),
        "after start-up": lambda run: seconds(run["trained_s"]),
        "productive": productive,
        "goodput": lambda run: number(run["goodput"]),
        "loss, first": lambda run: number(run["first_loss"]),
        "loss, last": lambda run: number(run["last_loss"]),
        **{
            f"eval/{name}": lambda run, name=name: number(run["last_eval"].get(name))
            for name in dict.fromkeys(name for run in runs for name in run["last_eval"])
        },
        "restarts": lambda run: str(run["restarts"]),
    }
    body = _table(
        ("", *run_names(workdirs)),
        [(name, *map(cell, runs)) for name, cell in rows.items()],
    )
    return _printable(body + "\n", ascii)


def _story(workdir: str | os.PathLike[str]) -> _Story:
    damages: list[str] = []
    with workdir_of(workdir).viewed(journal.FILES) as view:
        records = journal.read_workdir(
            view.folder,
            keep_undone=True,
            on_damage=lambda where, what: damages.append(f"{where}: {what}"),
        )
    if not of_kind(records, FitStart):
        raise ValueError(
            f"{os.path.join(workdir, journal.FILE_NAME)} holds {len(records)} record(s) but no start of a "
            f"run, and {len(damages)} line(s) that are damaged. Was it cut or edited? The run itself can "
            "still be continued from its checkpoints."
        )
    return _Story(workdir=str(workdir), records=records, damages=damages)


def _printable(text: str, ascii: bool) -> str:
    if ascii:
        text = text.translate(_ASCII).encode("ascii", "replace").decode()
    # Names and damaged lines may contain control characters, which would move the cursor.
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def sparkline(values: Sequence[float], *, width: int = _WIDTH, log: bool = False) -> str:
    """Return a curve as one line of text, oldest value first; unknown values are gaps.

    >>> sparkline([1.0, 2.0, 3.0, 4.0])
    '▁▃▆█'
    """
    points = np.array(values, float)
    if log:
        points = np.log(points, where=points > 0, out=np.full(points.shape, math.nan))
    if not points.size:
        return ""
    known = [part[np.isfinite(part)] for part in np.array_split(points, min(points.size, width))]
    means = np.array([part.mean() if part.size else math.nan for part in known])
    low, high = np.nanmin(means, initial=math.inf), np.nanmax(means, initial=-math.inf)
    places = (means - low) / (high - low) if high > low else np.where(np.isnan(means), means, 0.5)
    signs = np.floor(places * (len(_SPARKS) - 1) + 0.5)
    return "".join(" " if math.isnan(sign) else _SPARKS[int(sign)] for sign in signs)


def _table(header: Sequence[str], rows: Iterable[Sequence[RenderableType]]) -> str:
    """Return a table as text, the first column aligned to the left and the others to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return _plain(table)


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and their descriptions as two columns of text."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*row)
    return _plain(grid, width=10_000)  # a path is never cut


def _plain(table: Table, width: int = _COLUMNS) -> str:
    """Render a table without colours, at the same width for terminals and files."""
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


def _mean(pairs: Iterable[tuple[float, int]]) -> float:
    """Return the mean of (value, weight) pairs; unknown values are left out."""
    known = [(v, w) for v, w in pairs if math.isfinite(v) and w > 0]
    total = sum(w for _, w in known)
    return sum(v * w for v, w in known) / total if total else math.nan


def _wrapped(lines: Iterable[str]) -> str:
    """Wrap lines at 80 columns."""
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
    start, last, ended = story.starts[-1], story.last, story.ended
    limits, settings = start.limits, start.known_settings
    low, high = limits.span
    length = f" of {compact(settings.base_steps)}" if settings.base_steps else ""
    samples = "" if story.samples is None else f", {compact(story.samples)} samples"
    rows = {
        "workdir": story.workdir,
        "devices": f"{start.num_devices} x {start.device_kind}, "
        f"{count(start.num_processes, 'process')}",
        "policy": f"{settings.policy}, learning-rate rule {settings.rule or 'chosen by the optimizer'}",
        "limits": f"global batch base {limits.base}, at most {limits.max}; micro-batch {low} to {high}",
        "progress": f"step {last.step}, {compact(last.progress)} base steps{length}{samples}",
        "outcome": ended.reason if ended else "no end recorded: still running, or killed",
        "runs": f"{story.num_restarts + 1} ({count(story.num_restarts, 'restart')}), "
        f"{seconds(_trained_s(story))} after start-up",
    }
    return _section("Run", _pairs(rows.items()))


def _spent(story: _Story) -> tuple[dict[str, float], bool]:
    """Return the seconds by time bucket, and whether they are estimated."""
    spent: dict[str, float] = {}
    since: Sequence[Record] = story.kept
    # The ledger of the last end covers all runs until then; what came later has no ledger yet.
    for place, record in reversed(list(enumerate(story.kept))):
        end = record.event
        if isinstance(end, FitEnd) and end.buckets_s:  # the time of this run and the earlier ones
            spent, since = dict(end.buckets_s), story.kept[place + 1 :]
            if end is story.ended:
                return spent, False
            break
    # The run has not ended: add up what its events say.
    later = {
        "evaluation": sum(one.seconds for one in of_kind(since, EvalEnd)),
        "checkpoint_save": sum(one.seconds for one in of_kind(since, Checkpoint)),
    }
    trained_s = sum(one.seconds for one in of_kind(since, Window))
    later[PRODUCTIVE] = max(trained_s - sum(later.values()), 0.0)
    names = (PRODUCTIVE, *(spent | later))
    return {n: float(spent.get(n, 0.0) + later.get(n, 0.0)) for n in names}, True


def _trained_s(story: _Story) -> float:
    """Return the time from each run's start to its last record: without start-ups and pauses."""
    trained_s, began = 0.0, None
    for record, following in itertools.zip_longest(story.records, story.records[1:]):
        if isinstance(record.event, FitStart):
            began = record.wall
        is_last = following is None or isinstance(following.event, FitStart)
        if is_last and began is not None:
            trained_s += max(record.wall - began, 0.0)
    return trained_s


def _time(story: _Story) -> str:
    spent, is_estimated = _spent(story)
    total = sum(spent.values())
    if not total > 0:
        return ""
    note = ""
    if is_estimated:
        note = "\n(no end recorded yet: estimated from windows, evaluations and checkpoints)"
    rows = []
    for name in dict.fromkeys((PRODUCTIVE, *BUCKETS, *spent)):
        value = spent.get(name, 0.0)
        if value > 0 or name == PRODUCTIVE:
            share = value / total
            bar = Bar(1.0, 0.0, max(share, 1 / 240), width=20)  # its thinnest line at least
            rows.append((name, seconds(value), f"{share:.1%}", bar))
    rows.append(("total", seconds(total), "100.0%", ""))
    return _section("Where the time went", _table(("bucket", "time", "share", ""), rows) + note)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What a run measured while it used one batch, in one split and strategy: a row of the table."""

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


def _shape(config: BatchConfig) -> str:
    shape = f"{config.micro_batch_size} x {config.num_replicas} x {config.num_micro_batches}"
    return f"{shape} {config.strategy}".strip()


def _rows(windows: Sequence[Window]) -> list[_Row]:
    """Return what the run measured with each batch, smallest first."""
    groups: dict[tuple[int, str], list[tuple[Window, int]]] = {}
    before: Window | None = None
    for window in windows:
        key = (window.config.global_batch_size, _shape(window.config))
        # Differences of the running count are exact; estimate if there is no earlier window to compare.
        samples = key[0] * window.num_steps
        if before is not None and window.samples >= before.samples:
            samples = window.samples - before.samples
        groups.setdefault(key, []).append((window, samples))
        before = window
    return [_row(*key, members) for key, members in sorted(groups.items())]


def _row(batch: int, shape: str, members: Sequence[tuple[Window, int]]) -> _Row:
    windows = [window for window, _ in members]

    def mean(name: str, windows: Sequence[Window] = windows) -> float:
        return _mean((getattr(w, name), w.num_steps) for w in windows)

    # Prediction and measurement are compared over the same steps, if the model ever predicted any.
    both = [w for w in windows if math.isfinite(w.predicted_step_s * w.measured_step_s)]
    step_s = mean("measured_step_s", both or windows)
    predicted_s, efficiency = mean("predicted_step_s", both), mean("efficiency")
    throughput = batch / step_s if step_s else math.nan
    return _Row(
        batch=batch,
        shape=shape,
        steps=sum(w.num_steps for w in windows),
        samples=sum(samples for _, samples in members),
        time_s=sum(w.seconds for w in windows),
        step_s=step_s,
        predicted_step_s=predicted_s,
        predicted_error=predicted_s / step_s - 1 if step_s else math.nan,
        throughput=throughput,
        efficiency=efficiency,
        goodput=throughput * efficiency,
    )


def _batches(windows: Sequence[Window]) -> str:
    rows = _rows(windows)
    if not rows:
        return ""
    total_s = sum(row.time_s for row in rows)
    uses = [
        (
            str(row.batch),
            row.shape,
            compact(row.steps),
            compact(row.samples),
            f"{row.time_s / total_s:.1%}" if total_s else "-",
        )
        for row in rows
    ]
    results = [
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
    note = "(step: includes the wait for its batch; goodput: useful samples per second)"
    return _section("Batch sizes", f"{_table(first, uses)}\n\n{_table(second, results)}\n{note}")


def _race(story: _Story) -> str:
    """Show what is known of each batch at the last verdict, and what exploring them has cost."""
    race = story.tunes[-1].race if story.tunes else ()
    if len(race) < 2:
        return ""
    lines = [_table(COLUMNS, map(cells, race)), _wrapped([NOTE])]
    account = story.windows[-1].account if story.windows else None
    if account is not None:
        lines.append(_wrapped([balance(account)]))
    return _section("The race between batch sizes", "\n".join(lines))


def _evidence(windows: Sequence[Window]) -> str:
    """Show how fast the loss fell with each batch that was in use for long, and what the model expected."""
    last: list[Window] = []  # of each stretch of windows with the same batch
    for window in windows:
        if math.isnan(window.loss_gained):
            continue
        if last and last[-1].config.global_batch_size == window.config.global_batch_size:
            last.pop()
        last.append(window)
    if not last:
        return ""
    rows = [
        (
            str(window.config.global_batch_size),
            str(window.step),
            compact(window.loss_gained),
            compact(2 * window.loss_gained_error),
            compact(window.loss_gained_expected),
        )
        for window in last
    ]
    body = _table(("batch", "until step", "decrease", "+-", "model expected"), rows)
    note = (
        "(decrease of the loss per e-fold of samples; +- two standard errors; expected\n"
        "from what the previous batch achieved)"
    )
    return _section("What the loss says", f"{body}\n{note}")


def _verdicts(story: _Story) -> str:
    tunes = story.tunes
    if not tunes:
        return ""
    switches = [tune for tune in tunes if tune.switched]
    lines = [f"step {tune.step}: {tune.verdict.reason}" for tune in switches]
    if (num_left_out := len(lines) - _MOST_VERDICTS) > 0:
        half = _MOST_VERDICTS // 2
        lines[half:-half] = [f"  ... {num_left_out} more ..."]
    if not tunes[-1].switched:
        lines.append(f"last, step {tunes[-1].step}: {tunes[-1].verdict.reason}")
    num_verdicts = sum(r.num_merged for r in story.kept if isinstance(r.event, TuneEnd))
    summary = f"{count(num_verdicts, 'verdict')}, {count(len(switches), 'change')}"
    fit = next((tune.fit for tune in reversed(tunes) if tune.fit is not None), None)
    if fit is not None:
        summary += (
            f"; error of the last fit {fit.error:.1%} on {count(fit.num_rows, 'configuration')}"
        )
        unknown = dict.fromkeys(_COSTS.get(name, name) for name in fit.unidentified)
        if unknown:
            summary += f"; not yet known separately: {', '.join(unknown)}"
    return _section("Verdicts", _wrapped([summary, *lines]))


def _curves(windows: Sequence[Window], evals: Sequence[EvalEnd]) -> str:
    is_guess = bool(windows) and windows[-1].noise_is_guess
    noise = "noise scale (a guess)" if is_guess else "noise scale"
    points = [
        {
            "global batch": float(w.config.global_batch_size),
            noise: w.noise_scale,
            "goodput": w.goodput_measured,
            "lr gain": w.gain,
            "loss": w.metrics.get("loss", math.nan),
        }
        for w in windows
    ]
    results = [{f"eval/{name}": value for name, value in e.metrics.items()} for e in evals]
    curves = _by_name(points) | _by_name(results)
    rows = [
        (name, _curve(values, log=name in ("global batch", noise)))
        for name, values in curves.items()
        if any(map(math.isfinite, values))
    ]
    return _section("Over time", _pairs(rows)) if rows else ""


def _by_name(points: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each name over all points; NaN if a point lacks it."""
    names = dict.fromkeys(name for point in points for name in point)
    return {name: [point.get(name, math.nan) for point in points] for name in names}


def _curve(values: Sequence[float], *, log: bool) -> str:
    """Return the range of a curve in words, and the curve itself unless it is flat."""
    known = [v for v in values if math.isfinite(v)]
    # Four digits: an accuracy of 0.9987 is not 1.
    first, last, low, high = (
        compact(v, digits=4) for v in (known[0], known[-1], min(known), max(known))
    )
    if low == high:
        return low if len(known) == 1 else f"{low} throughout"
    return f"{first} -> {last}  (min {low}, max {high})\n{sparkline(values, log=log)}"


def _incidents(story: _Story) -> str:
    lines: list[str] = []
    num_continued = (
        0  # changes of processes: the journal numbers them like restarts, readers should not
    )
    furthest = 0  # the step that any run so far has reached
    for before, record in itertools.pairwise([story.records[0], *story.records]):
        event = record.event
        pause = seconds(record.wall - before.wall)
        if (
            isinstance(before.event, FitEnd)
            and before.event.goes_on
            and isinstance(event, FitStart)
        ):
            num_continued += 1
            processes = count(event.num_processes, "process")
            lines.append(
                f"step {event.step}: {before.event.reason}; continued with {processes} after {pause}"
            )
        elif isinstance(event, FitStart) and record is not story.records[0]:
            undone = count(max(furthest - event.step, 0), "step")
            lines.append(
                f"restart {event.restart - num_continued}: resumed at step {event.step}, {undone} undone, "
                f"{pause} after the last record"
            )
        elif isinstance(event, HostJudged):
            lines.append(f"step {event.step}: host {event.host} {event.decision}: {event.why}")
        elif isinstance(event, Preempt):
            lines.append(f"step {event.step}: {event.signal}")
        elif isinstance(event, Checkpoint) and event.error:
            lines.append(f"step {event.step}: checkpoint failed: {event.error}")
        furthest = max(furthest, event.step)
    lines += _totals(story)
    return _section("Restarts, checkpoints, skipped steps", _wrapped(lines))


def _totals(story: _Story) -> list[str]:
    """Return what there is to say about checkpoints, skipped updates and damaged lines."""
    lines = []
    saves = [save.seconds for save in of_kind(story.records, Checkpoint) if not save.error]
    if saves:
        lines.append(
            f"{count(len(saves), 'checkpoint')}; training paused for {seconds(sum(saves))} in total, "
            f"{seconds(max(saves))} at most"
        )
    skipped = story.windows[-1].skipped_steps if story.windows else 0
    lines.append(f"{count(skipped, 'update')} skipped: a loss, gradient or update was not finite")
    if damages := story.damages:
        more = f"; and {len(damages) - _MOST_LINES} more" if len(damages) > _MOST_LINES else ""
        lines.append(
            f"the journal is damaged, and the figures count what is left: {'; '.join(damages[:_MOST_LINES])}"
            f"{more} (a run was killed while writing, the disk was full, or the file was changed)"
        )
    return lines
