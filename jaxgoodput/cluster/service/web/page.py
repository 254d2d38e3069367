"""The page at `/`: who has which devices and why, what waits, and what was, as HTML that needs no build.

It is whole when it arrives; a small script only fetches what changes and puts it in place.
"""

import colorsys
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.record.state import JobEntry, State
from jaxgoodput.cluster.service.web.show import name_for
from jaxgoodput.text import compact, seconds

SPAN_S = 1800.0  # of the picture
WIDTH, LEFT, ROW, GAP = 1100, 130, 14, 4
MOST_ROWS, MOST_JOBS, MOST_WAITING_SHOWN = 128, 100, 100

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
    """Where else to look."""

    tensorboard: str | None = None
    """A TensorBoard over the workdirs of all jobs; None: their folders are named only."""


def whole(caller: Caller, state: State, now_s: float, links: Links) -> str:
    """The whole page."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>jaxgoodput</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style></head>"
        f"<body><h1>jaxgoodput</h1><main>{inner(caller, state, now_s, links)}</main>"
        "<script src=/page.js></script></body></html>"
    )


def inner(caller: Caller, state: State, now_s: float, links: Links) -> str:
    """What of it changes."""
    jobs = list(state.jobs.values())
    running = [job for job in jobs if job.phase == "running"]
    waiting = [job for job in jobs if job.phase == "waiting"]
    over = [job for job in jobs if job.is_over and caller.sees(job.spec.tenant)][-20:][::-1]
    up = [e for e in state.nodes.values() if e.node.state != "down"]
    total = sum(entry.node.num_devices for entry in up)
    used = sum(job.allocation.num_devices for job in running)
    said = (
        f"<p><b>{used}</b> of <b>{total}</b> devices on {len(up)} nodes are in use; <b>{len(running)}</b> "
        f"jobs run, <b>{len(waiting)}</b> wait; up for {html.escape(seconds(now_s))}</p>"
    )
    mine = [job for job in running if caller.sees(job.spec.tenant)]
    return "".join(
        (
            said,
            "<h2>Nodes</h2>" + _nodes(caller, state),
            "<h2>Running</h2>" + _running(mine[:MOST_JOBS], now_s, links),
            "<h2>Waiting</h2>"
            + _waiting([j for j in waiting if caller.sees(j.spec.tenant)], now_s),
            "<h2>Devices over time</h2>" + _gantt(caller, state, now_s),
            "<h2>Over</h2>" + _over(over, links),
        )
    )


def colour(job: str) -> str:
    """Of a job, everywhere on the page.

    >>> colour("a") == colour("a") != colour("b")
    True
    """
    number = int.from_bytes(hashlib.sha256(job.encode()).digest()[:2], "big")
    red, green, blue = colorsys.hls_to_rgb(number / 65536, 0.42, 0.55)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _nodes(caller: Caller, state: State) -> str:
    if not state.nodes:
        return "<p class=dim>No node has joined: <code>jaxgoodput node --scheduler URL</code>.</p>"
    owner: dict[tuple[str, int], JobEntry] = {}
    for job in state.jobs.values():
        for name, local in job.allocation.devices.items():
            owner |= {(name, index): job for index in local}
    rows = []
    for name, entry in list(state.nodes.items())[:MOST_ROWS]:
        boxes = []
        for index in range(min(entry.node.num_devices, 64)):
            job = owner.get((name, index))
            if job is None:
                boxes.append(f"<span class=free>{index}</span>")
            else:
                title = html.escape(name_for(caller, state, job.spec.id), quote=True)
                boxes.append(
                    f'<span style="background:{colour(job.spec.id)}" title="{title}">{index}</span>'
                )
        why = f" ({entry.why})" if entry.why and entry.node.state != "up" else ""
        rows.append(
            (
                html.escape(name),
                html.escape(entry.node.kind),
                html.escape(entry.node.state + why),
                f"<div class=devices>{''.join(boxes)}</div>",
            )
        )
    return _table(("node", "kind", "state", "devices"), rows)


def _running(jobs: Iterable[JobEntry], now_s: float, links: Links) -> str:
    rows = []
    for job in jobs:
        hints = job.hints
        goodput = None if hints is None else hints.goodput
        rate = None if hints is None else hints.throughput
        worth = goodput / rate if goodput is not None and rate else None
        done = "-"
        if hints is not None:
            done = compact(hints.progress)
            if hints.total:
                done = f"{100 * min(hints.progress / hints.total, 1):.0f} %"
        rows.append(
            (
                _dot(job) + html.escape(job.spec.id),
                html.escape(job.spec.tenant),
                f"#{job.allocation.num_devices}",
                f"#{compact(goodput)}",
                "#-" if worth is None else f"#{worth:.2f}",
                f"#{compact(None if hints is None else hints.global_batch_size)}",
                f"#{done}",
                f"#{seconds(now_s - (job.started_s or now_s))}",
                html.escape(job.reason),
                _links(job, links),
            )
        )
    heads = ("job", "tenant", "#devices", "#goodput", "#efficiency", "#batch", "#done", "#runs for")
    return _table((*heads, "why it has them", ""), rows) if rows else "<p class=dim>None.</p>"


def _waiting(jobs: Sequence[JobEntry], now_s: float) -> str:
    rows = [
        (
            _dot(job) + html.escape(job.spec.id),
            html.escape(job.spec.tenant),
            f"#{job.spec.num_devices or job.spec.min_devices}",
            f"#{seconds(now_s - job.submitted_s)}",
            html.escape(job.reason),
        )
        for job in jobs[:MOST_WAITING_SHOWN]
    ]
    more = len(jobs) - len(rows)
    said = f"<p class=dim>and {more} more</p>" if more else ""
    heads = ("job", "tenant", "#needs", "#waits for", "why")
    return _table(heads, rows) + said if rows else "<p class=dim>None.</p>"


def _over(jobs: Iterable[JobEntry], links: Links) -> str:
    rows = []
    for job in jobs:
        took_s = (job.finished_s or 0.0) - job.submitted_s
        bad = " class=failed" if job.phase == "failed" else ""
        rows.append(
            (
                _dot(job) + html.escape(job.spec.id),
                f"<span{bad}>{job.phase}</span>",
                f"#{seconds(took_s)}",
                f"#{job.num_changes}",
                html.escape(job.reason),
                _links(job, links),
            )
        )
    heads = ("job", "how", "#took", "#changes", "", "")
    return _table(heads, rows) if rows else "<p class=dim>None yet.</p>"


def _dot(job: JobEntry) -> str:
    return f'<span class=dot style="background:{colour(job.spec.id)}"></span>'


def _links(job: JobEntry, links: Links) -> str:
    workdir = job.submission.workdir
    if workdir is None:
        return ""
    if links.tensorboard is None:
        return f"<code>{html.escape(workdir)}/tensorboard</code>"
    where = html.escape(
        f"{links.tensorboard.rstrip('/')}/?runFilter={quote(job.spec.id)}#timeseries", quote=True
    )
    return f'<a href="{where}">TensorBoard</a>'


def _gantt(caller: Caller, state: State, now_s: float) -> str:
    """A row for each device, a bar for each stretch of time that a job had it."""
    every = [
        (name, index)
        for name, entry in state.nodes.items()
        for index in range(entry.node.num_devices)
    ]
    rows = {device: place for place, device in enumerate(every[:MOST_ROWS])}
    begin_s = max(now_s - SPAN_S, 0.0)
    span_s = max(now_s - begin_s, 1.0)
    bars = []
    for job in state.jobs.values():
        title = html.escape(name_for(caller, state, job.spec.id))
        for held in job.past:
            end_s = now_s if held.end_s is None else held.end_s
            if end_s <= begin_s:
                continue
            x = LEFT + (WIDTH - LEFT) * (max(held.start_s, begin_s) - begin_s) / span_s
            width = max((WIDTH - LEFT) * (end_s - max(held.start_s, begin_s)) / span_s, 0.5)
            for name, local in held.devices.items():
                for index in local:
                    if (name, index) not in rows:
                        continue
                    y = rows[name, index] * (ROW + GAP)
                    bars.append(
                        f'<rect class=held x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" '
                        f'fill="{colour(job.spec.id)}"><title>{title}</title></rect>'
                    )
    names = [
        f'<text x="0" y="{place * (ROW + GAP) + ROW - 3}">{html.escape(name)}:{index}</text>'
        for (name, index), place in rows.items()
    ]
    height = len(rows) * (ROW + GAP) + 18
    ticks = [
        f'<text x="{LEFT + (WIDTH - LEFT) * share:.0f}" y="{height - 4}" text-anchor="{anchor}">'
        f"{html.escape(seconds(span_s * (1 - share)))} ago</text>"
        for share, anchor in ((0.0, "start"), (0.5, "middle"))
    ]
    more = len(every) - len(rows)
    said = f"<p class=dim>and {more} more devices</p>" if more > 0 else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="100%" role="img" aria-label="devices over time">'
        f"{''.join(bars)}{''.join(names)}{''.join(ticks)}</svg>{said}"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells that begin with # are numbers."""

    def cell(tag: str, text: str) -> str:
        return f"<{tag} class=n>{text[1:]}</{tag}>" if text[:1] == "#" else f"<{tag}>{text}</{tag}>"

    head = "".join(cell("th", text) for text in heads)
    body = "".join(f"<tr>{''.join(cell('td', text) for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
