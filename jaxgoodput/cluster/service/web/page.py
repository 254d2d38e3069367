"""The web page at `/`: which job holds which devices and why, what waits, and what has ended.

It is plain HTML without a build step, and complete when it arrives. A small script refreshes its content.
"""

import colorsys
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.record.state import JobEntry, State, owners
from jaxgoodput.cluster.service.web.show import (
    amounts_left,
    left_in_words,
    name_for,
    node_faults,
    progress,
    state_in_words,
    with_faults,
)
from jaxgoodput.text import compact, seconds

SPAN_S = 1800.0  # that the chart covers
WIDTH, LEFT, ROW, GAP = 1100, 130, 14, 4
MOST_ROWS, MOST_JOBS, MOST_ENDED, MOST_BOXES = 128, 100, 20, 64
NONE = "<p class=dim>None.</p>"
# The first colours, which are easy to tell apart. Letters on them are white.
FIRST_COLOURS = (
    *("#2563c9", "#65a30d", "#b91c1c", "#0f766e", "#a21caf", "#db2777"),
    *("#d97706", "#15803d", "#78350f", "#475569", "#6d28d9", "#0891b2"),
)

SCRIPT = """\
async function refresh() {
  try {
    const answer = await fetch(location.origin + "/page", {credentials: "same-origin"});
    if (answer.ok) document.querySelector("main").innerHTML = await answer.text();
    document.body.classList.toggle("stale", !answer.ok);
  } catch (error) { document.body.classList.add("stale"); }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
"""

STYLE = """\
:root { color-scheme: light dark; --line: #8884; --dim: #888; --bar: #2a7de1; }
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.2rem auto; max-width: 1160px; padding: 0 1rem; }
body.stale main { opacity: .45; } body.stale h1::after { content: " (no answer)"; color: #d33; }
h1 { font-size: 1.25rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .6rem .25rem 0; }
tr { border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--dim); font-weight: 500; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } .dim { color: var(--dim); }
.devices span { display: inline-block; min-width: 1.4em; padding: 0 .3em; margin: 1px; border-radius: 3px;
  text-align: center; font-size: 12px; color: #fff; } .devices .free { background: none; color: var(--dim);
  border: 1px dashed var(--line); } .dot { display: inline-block; width: .7em; height: .7em;
  border-radius: 2px; margin-right: .4em; }
svg text { font-size: 11px; fill: currentColor; } .failed { color: #d33; }
"""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The addresses of other pages that the web page links to."""

    tensorboard: str | None = None
    """The URL of a TensorBoard over the workdirs of all jobs; None shows the folders instead."""


def whole(caller: Caller, state: State, now_s: float, links: Links) -> str:
    """Return the whole web page as HTML: what the caller may see of the cluster."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>jaxgoodput</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style></head>"
        f"<body><h1>jaxgoodput</h1><main>{inner(caller, state, now_s, links)}</main>"
        "<script src=/page.js></script></body></html>"
    )


def inner(caller: Caller, state: State, now_s: float, links: Links) -> str:
    """Return, as HTML, the part of the web page that the browser fetches again and again."""
    by_phase = {"running": [], "waiting": []}
    for job in state.active.values():
        by_phase[job.phase].append(job)
    running, waiting = by_phase["running"], by_phase["waiting"]
    ended = _seen(caller, [job for job in state.jobs.values() if job.is_over])
    latest = ended[-MOST_ENDED:][::-1]
    begin_s = max(now_s - SPAN_S, 0.0)
    names = {job.spec.id for job in latest}
    painted = colours(
        job
        for id_, job in state.jobs.items()
        if not job.is_over or id_ in names or (job.finished_s or 0.0) > begin_s
    )
    nodes = [e.node for e in state.nodes.values() if e.node.state != "down"]
    used = sum(job.allocation.num_devices for job in running)
    said = (
        f"<p><b>{used}</b> of <b>{sum(node.num_devices for node in nodes)}</b> devices on {len(nodes)} "
        f"{'node' if len(nodes) == 1 else 'nodes'} are in use; <b>{len(running)}</b> "
        f"{'job runs' if len(running) == 1 else 'jobs run'}, <b>{len(waiting)}</b> "
        f"{'waits' if len(waiting) == 1 else 'wait'}; up for {html.escape(seconds(now_s))}</p>"
    )
    sections = {
        "Nodes": _nodes(caller, state, painted, now_s),
        "Running": _running(_seen(caller, running), painted, now_s, links),
        "Waiting": _waiting(_seen(caller, waiting), painted, now_s),
        "Devices over time": _gantt(caller, state, painted, now_s),
        "Ended": _ended(latest, painted, links) + _more(len(ended) - len(latest), "jobs"),
    }
    return said + "".join(f"<h2>{head}</h2>{section}" for head, section in sections.items())


def _seen(caller: Caller, jobs: Iterable[JobEntry]) -> list[JobEntry]:
    """Return the jobs that the caller may see."""
    return [job for job in jobs if caller.sees(job.spec.tenant)]


def colour(number: int) -> str:
    """Return a colour by its number; numbers below 14,000 all have different ones.

    >>> colour(0), colour(12)
    ('#2563c9', '#20b64b')
    """
    if number < len(FIRST_COLOURS):
        return FIRST_COLOURS[number]
    # Each turn round the circle takes 360 different hues, neighbours far apart, and is darker than the last.
    turn, place = divmod(number - len(FIRST_COLOURS), 360)
    red, green, blue = colorsys.hls_to_rgb(137 * (place + 1) % 360 / 360, 0.42 - 0.0065 * turn, 0.7)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def colours(jobs: Iterable[JobEntry]) -> dict[str, str]:
    """Return a colour for each of the jobs that are shown together; no two have the same.

    A job has the colour of its number, unless an older one of these jobs has that colour.
    """
    numbers: dict[int, str] = {}
    for job in jobs:
        number = job.colour
        while number in numbers:
            number += 1
        numbers[number] = job.spec.id
    return {id_: colour(number) for number, id_ in numbers.items()}


def _nodes(caller: Caller, state: State, painted: Mapping[str, str], now_s: float) -> str:
    if not state.nodes:
        return "<p class=dim>No node has joined: <code>jaxgoodput node --scheduler URL</code>.</p>"
    owner, faults = owners(state), node_faults(caller, state, now_s)
    amounts = amounts_left(state)
    rows = []
    for name, entry in list(state.nodes.items())[:MOST_ROWS]:
        boxes, said = [], state_in_words(entry.node.state, entry.why)
        for index in range(min(entry.node.num_devices, MOST_BOXES)):
            job = owner.get((name, index))
            if job is None:
                boxes.append(f"<span class=free>{index}</span>")
            else:
                title = html.escape(name_for(caller, state, job), quote=True)
                boxes.append(
                    f'<span style="background:{painted[job]}" title="{title}">{index}</span>'
                )
        if (left := entry.node.num_devices - len(boxes)) > 0:
            boxes.append(f"and {left} more")
        boxes += left_in_words(*amounts[name])
        rows.append(
            (
                html.escape(name),
                html.escape(entry.node.kind),
                html.escape(with_faults(said, faults.get(name, ()), now_s)),
                f"<div class=devices>{''.join(boxes)}</div>",
            )
        )
    more = _more(len(state.nodes) - len(rows), "nodes")
    return _table(("node", "kind", "state", "devices"), rows) + more


def _running(
    jobs: Sequence[JobEntry], painted: Mapping[str, str], now_s: float, links: Links
) -> str:
    rows = []
    for job in jobs[:MOST_JOBS]:
        goodput = batch = efficiency = None
        if (hints := job.hints) is not None:
            goodput, batch = hints.goodput, hints.global_batch_size
            if goodput is not None and hints.throughput:
                efficiency = goodput / hints.throughput
        rows.append(
            (
                _name(job, painted),
                html.escape(job.spec.tenant),
                f"#{job.allocation.num_devices}",
                f"#{compact(goodput)}",
                "#-" if efficiency is None else f"#{efficiency:.2f}",
                f"#{compact(batch)}",
                f"#{progress(hints)}",
                f"#{seconds(now_s - (job.started_s or now_s))}",
                html.escape(job.reason),
                _link(job, links),
            )
        )
    heads = ("job", "tenant", "#devices", "#goodput", "#efficiency", "#batch", "#done", "#runs for")
    more = _more(len(jobs) - len(rows), "jobs")
    return _table((*heads, "why it has these devices", ""), rows) + more


def _waiting(jobs: Sequence[JobEntry], painted: Mapping[str, str], now_s: float) -> str:
    rows = [
        (
            _name(job, painted),
            html.escape(job.spec.tenant),
            f"#{job.spec.num_devices or job.spec.min_devices}",
            f"#{seconds(now_s - job.submitted_s)}",
            html.escape(job.reason),
        )
        for job in jobs[:MOST_JOBS]
    ]
    heads = ("job", "tenant", "#needs", "#waits for", "why")
    return _table(heads, rows) + _more(len(jobs) - len(rows), "jobs")


def _ended(jobs: Iterable[JobEntry], painted: Mapping[str, str], links: Links) -> str:
    rows = [
        (
            _name(job, painted),
            f"<span{' class=failed' if job.phase == 'failed' else ''}>{job.phase}</span>",
            f"#{seconds((job.finished_s or 0.0) - job.submitted_s)}",
            f"#{job.num_changes}",
            html.escape(job.reason),
            _link(job, links),
        )
        for job in jobs
    ]
    return _table(("job", "result", "#took", "#changes", "", ""), rows)


def _name(job: JobEntry, painted: Mapping[str, str]) -> str:
    dot = f'<span class=dot style="background:{painted[job.spec.id]}"></span>'
    return dot + html.escape(job.spec.id)


def _more(number: int, what: str) -> str:
    """Say how many things, named in the plural, are left out; nothing if none are."""
    return f"<p class=dim>and {number} more {what}</p>" if number > 0 else ""


def _link(job: JobEntry, links: Links) -> str:
    workdir = job.submission.workdir
    if workdir is None:
        return ""
    if links.tensorboard is None:
        return f"<code>{html.escape(workdir)}/tensorboard</code>"
    url = f"{links.tensorboard.rstrip('/')}/?runFilter={quote(job.spec.id)}#timeseries"
    return f'<a href="{html.escape(url, quote=True)}">TensorBoard</a>'


def _gantt(caller: Caller, state: State, painted: Mapping[str, str], now_s: float) -> str:
    """Draw a row for each device, with a bar for each period in which a job held it."""
    every = [
        (name, index)
        for name, entry in state.nodes.items()
        for index in range(entry.node.num_devices)
    ]
    tops = {device: row * (ROW + GAP) for row, device in enumerate(every[:MOST_ROWS])}
    begin_s = max(now_s - SPAN_S, 0.0)
    span_s = max(now_s - begin_s, 1.0)
    bars = [
        f'<rect class=held x="{LEFT + start * (WIDTH - LEFT):.1f}" y="{tops[device]}" '
        f'width="{max(width * (WIDTH - LEFT), 0.5):.1f}" height="{ROW}" fill="{painted[job]}">'
        f"<title>{html.escape(name_for(caller, state, job))}</title></rect>"
        for job, device, start, width in _periods(state, now_s, begin_s, span_s)
        if device in tops
    ]
    names = [
        f'<text x="0" y="{top + ROW - 3}">{html.escape(name)}:{index}</text>'
        for (name, index), top in tops.items()
    ]
    height = len(tops) * (ROW + GAP) + 18
    ticks = [
        f'<text x="{LEFT + (WIDTH - LEFT) * share:.0f}" y="{height - 4}" text-anchor="{anchor}">'
        f"{html.escape(seconds(span_s * (1 - share)))} ago</text>"
        for share, anchor in ((0.0, "start"), (0.5, "middle"))
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="devices over time">'
        f"{''.join(bars)}{''.join(names)}{''.join(ticks)}</svg>"
        + _more(len(every) - len(tops), "devices")
    )


def _periods(
    state: State, now_s: float, begin_s: float, span_s: float
) -> Iterator[tuple[str, tuple[str, int], float, float]]:
    """Yield job, device, start and length of each period in the chart, as shares of its time span."""
    for job in state.jobs.values():
        for held in job.past:
            start_s, end_s = max(held.start_s, begin_s), now_s if held.end_s is None else held.end_s
            if end_s <= begin_s:
                continue
            for name, local in held.devices.items():
                for index in local:
                    device = name, index
                    yield (
                        job.spec.id,
                        device,
                        (start_s - begin_s) / span_s,
                        (end_s - start_s) / span_s,
                    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table, or "None." if there are no rows. Cells that begin with # are numbers."""
    if not rows:
        return NONE

    def cell(tag: str, text: str) -> str:
        return f"<{tag} class=n>{text[1:]}</{tag}>" if text[:1] == "#" else f"<{tag}>{text}</{tag}>"

    head = "".join(cell("th", text) for text in heads)
    body = "".join(f"<tr>{''.join(cell('td', text) for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
